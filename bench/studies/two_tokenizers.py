"""A teacher with another tokenizer: labels, hidden states of spans, matched logits, or both.

The plan is in docs/studies/two_tokenizers.md and was committed before the runs.

`python -m bench.studies.two_tokenizers TRAIN.txt TEST.txt WORK` makes the models in WORK, trains
the missing students by `fastkd distill`, and writes the page's tables. Both texts have empty lines
between their paragraphs, as WikiText's.
"""

import re
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fastkd._core.machine import describe
from fastkd.study.statistics import holm, paired_difference, verdict
from fastkd.train.config import DistillConfig
from fastkd.train.distillation import run_distillation
from fastkd.train.saving import read_json

PAGE = Path(__file__).parents[2] / "docs/studies/two_tokenizers.md"
SEEDS = range(3)
ARMS: dict[str, dict[str, Any]] = {
    "labels only": {"method": "labels"},
    "span hidden states": {"method": "fcd", "options": {"soft_weight": 0.0}},
    "matched logits": {"method": "soft_targets", "unmatched": "bucket"},
    "both": {"method": "fcd", "unmatched": "bucket"},
}
BASE = "labels only"
MEASURE = "bits_per_byte"
#: Characters of the texts: the teacher's, the students', and those held out.
TEACHER_TEXT, STUDENT_TEXT, HELD_OUT = 400_000, 120_000, 60_000


def make_tokenizer(model: Any, trainer: Any, pre_tokenizer: Any, decoder: Any, text: str) -> Any:
    made = Tokenizer(model)
    made.pre_tokenizer, made.decoder = pre_tokenizer, decoder
    made.train_from_iterator(text.splitlines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    )


def make_models(folder: Path, text: str) -> None:
    """Random models with tokenizers of their own: byte-level BPE, and a unigram model."""
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<unk>", "</s>"]
    options = {"special_tokens": special, "show_progress": False}
    bpe = make_tokenizer(
        models.BPE(),
        trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, **options),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
        text,
    )
    unigram = make_tokenizer(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=1000, unk_token="<unk>", **options),
        pre_tokenizers.Metaspace(),
        decoders.Metaspace(),
        text,
    )
    for name, tokenizer, width, layers, seed in (
        ("untrained", bpe, 128, 3, 100),
        *((f"student-{seed}", unigram, 64, 2, seed) for seed in SEEDS),
    ):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def train(work: Path, name: str, **options: Any) -> dict[str, Any]:
    """The report of a run of `fastkd distill`, which continues where it was stopped."""
    out = work / name
    config = DistillConfig(
        task="causal-lm",
        out=out,
        evals=work / "held-out.txt",
        max_length=64,
        batch_size=16,
        device_name="cpu",
        resume=out.exists(),
        **options,
    )
    run_distillation(config)
    report: dict[str, Any] = read_json(out / "student/fastkd.json")
    return report


def prepare(train_text: str, held_out: str, work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    if (work / "untrained").exists():
        return
    for name, text in (
        ("teacher.txt", train_text[:TEACHER_TEXT]),
        ("student.txt", train_text[:STUDENT_TEXT]),
        ("held-out.txt", held_out[:HELD_OUT]),
    ):
        (work / name).write_text(text)
    make_models(work, train_text[:TEACHER_TEXT])


def tables(teacher: dict[str, Any], reports: dict[tuple[str, int], dict[str, Any]]) -> str:
    """The page's tables, from the reports of the runs by arm and seed."""
    scores = {key: report["student"][MEASURE] for key, report in reports.items()}
    differences = {
        arm: paired_difference([scores[arm, s] - scores[BASE, s] for s in SEEDS]) for arm in ARMS
    }
    tests = [differences[arm] for arm in ARMS if arm != BASE]
    corrected = dict(zip((a for a in ARMS if a != BASE), holm([x.p for x in tests]), strict=True))
    where = describe(torch.device("cpu"))
    lines = [
        f"{where['machine']['cpu']}, one thread, torch {where['versions']['torch']}. Teacher: "
        f"{teacher['student'][MEASURE]:.3f} bits a byte.",
        "",
        "| | bits a byte, seeds 0, 1, 2 | − labels only | 95% | p (Holm) | verdict |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for arm in ARMS:
        own = ", ".join(f"{scores[arm, s]:.4f}" for s in SEEDS)
        more = "|  |  |  |  |"
        if arm != BASE:
            found, p = differences[arm], corrected[arm]
            more = (
                f"| {found.mean:+.4f} | [{found.low:+.4f}, {found.high:+.4f}] | {p:.2g} "
                f"| {verdict(found, p, None)} |"
            )
        lines.append(f"| {arm} | {own} {more}")
    return "\n".join(lines)


def main(train_text: Path, held_out: Path, work: Path) -> None:
    prepare(train_text.read_text(), held_out.read_text(), work)
    teacher = train(
        work,
        "teacher",
        teacher=str(work / "untrained"),
        student=str(work / "untrained"),
        train=work / "teacher.txt",
        method="labels",
        num_train_epochs=1,
        learning_rate=3e-3,
    )
    reports = {}
    for seed in SEEDS:
        for arm, options in ARMS.items():
            reports[arm, seed] = train(
                work,
                f"{arm.replace(' ', '-')}-{seed}",
                teacher=str(work / "teacher/student"),
                student=str(work / f"student-{seed}"),
                train=work / "student.txt",
                num_train_epochs=2,
                learning_rate=3e-3,
                seed=seed,
                **options,
            )
    text = PAGE.read_text()
    found = f"<!-- tables -->\n{tables(teacher, reports)}\n<!-- end -->"
    PAGE.write_text(re.sub(r"<!-- tables -->.*<!-- end -->", lambda _: found, text, flags=re.S))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
