"""`fastkd demo --task causal-lm`: a small decoder of Python code, halved by every method.

A tokenizer and a decoder are trained on the sources of Python's library. Students with half its
layers are trained by each method for the same steps on the same rows. Perplexity is plotted against
seconds of training.
"""

import dataclasses
import hashlib
import json
import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    set_seed,
)

import fastkd
from fastkd.analysis.pictures import new_figure
from fastkd.cli.command_settings import DemoSettings
from fastkd.cli.demo import TITLES, Sizes, either
from fastkd.cli.display import RichDisplay, say
from fastkd.distill.methods import METHODS
from fastkd.train import data
from fastkd.train.config import TrainingConfig
from fastkd.train.docstrings import SKIPPED
from fastkd.train.errors import InputError
from fastkd.train.launcher import leave_launcher
from fastkd.train.run import Run, assemble, save_model
from fastkd.train.saving import locked, read_manifest, saving, write_json
from fastkd.train.settings import Pairing

TASK = "causal-lm"
END = "<end>"
HELD_OUT = 10  # one file in ten
PROMPT = "def "
# LRC-BERT smooths class labels; over thousands of tokens little of a label would remain.
OPTIONS: dict[str, dict[str, Any]] = {"lrc_bert": {"gamma": 0.0}}


@dataclasses.dataclass(frozen=True)
class Size(Sizes):
    train_files: int = either(150, 6)
    eval_files: int = either(6, 2)
    characters: int = either(8000, 1500)  # of a file
    vocabulary: int = either(2000, 300)
    width: int = either(128, 16)
    layers: int = either(6, 2)
    length: int = either(128, 32)
    teacher_steps: int = either(300, 2)
    student_steps: int = either(80, 2)
    evaluations: int = either(4, 1)
    batch_size: int = either(16, 2)
    sample_tokens: int = either(60, 4)


def sources(root: Path) -> Iterator[str]:
    """Python files below ``root`` except tests, ordered by the hashes of their names."""

    def place(path: Path) -> bytes:
        name = path.relative_to(root).as_posix()
        return hashlib.md5(name.encode(), usedforsecurity=False).digest()

    for path in sorted(root.rglob("*.py"), key=place):
        if not SKIPPED & set(path.relative_to(root).parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if text.strip():
                yield text


def write_texts(folder: Path, size: Size, root: Path) -> dict[str, Path]:
    """Write files of training and evaluation documents; returns their paths.

    Raises:
        InputError: this Python comes without its library's sources.
    """
    texts = {"train": size.train_files, "eval": size.eval_files}
    lines: dict[str, list[str]] = {name: [] for name in texts}
    for i, text in enumerate(sources(root)):
        name = "eval" if i % HELD_OUT == 0 else "train"
        if len(lines[name]) < texts[name]:
            lines[name].append(json.dumps({"text": text[: size.characters]}))
    if not lines["train"] or not lines["eval"]:
        raise InputError(f"too few sources below {root}: this Python comes without its library's")
    paths = {name: folder / f"{name}.jsonl" for name in lines}
    with saving(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in paths.items():
            path.write_text("\n".join(lines[name]) + "\n", encoding="utf-8")
    return paths


def make_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-pair encoding of these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def make_teacher(tokenizer: PreTrainedTokenizerFast, size: Size, seed: int) -> GPT2LMHeadModel:
    """A decoder that has read nothing yet."""
    set_seed(seed)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=size.length, n_embd=size.width,
        n_layer=size.layers, n_head=max(1, size.width // 32), bos_token_id=0, eos_token_id=0,
        pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def run_demo(settings: DemoSettings, console: Console, root: Path | None = None) -> dict[str, Any]:
    """Run `fastkd demo --task causal-lm`; returns the content of demo.json."""
    began = time.perf_counter()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if leave_launcher()[0]:  # one teacher, and one run after another
        return {}
    size = Size.of(settings)
    out, display = settings.out, RichDisplay(console)
    theirs = read_manifest(out / "student") or {}
    if (out / "student").exists() and "sample" not in theirs:
        raise InputError(f"--out {out} holds a student that isn't this demo's; give another --out")
    root = root or Path(sysconfig.get_path("stdlib"))
    with locked(out), display:
        run, pairing = _begin(settings, size, display, write_texts(out / "text", size, root))
        report = _compare(run, pairing, size, settings)
        report["seconds"] = time.perf_counter() - began
        write_json(out / "demo.json", report)
        _draw(report, out / "students.png")
    _show(report, settings, console)
    return report


def _begin(
    settings: DemoSettings, size: Size, display: RichDisplay, paths: dict[str, Path]
) -> tuple[Run, Pairing]:
    """A trained teacher with its rows."""
    pairing = Pairing(
        task=TASK, train=paths["train"], evals=paths["eval"], teacher=str(settings.out / "teacher"),
        max_length=size.length, seed=settings.seed, device_name=settings.device,
        student_layers=size.layers // 2,
    )  # fmt: skip
    corpus = data.load(pairing)
    tokenizer = make_tokenizer(corpus.train.texts, size.vocabulary)
    teacher = make_teacher(tokenizer, size, settings.seed)
    task = type(corpus.task).of(teacher.config)
    corpus = dataclasses.replace(corpus, task=task)
    training_config = TrainingConfig(
        max_steps=size.teacher_steps, batch_size=size.batch_size, learning_rate=1e-3,
        device_name=settings.device, seed=settings.seed,
    )  # fmt: skip
    torch.nn.Module.to(teacher, training_config.device)
    run = Run(corpus, tokenizer, teacher, training_config, size.length, display)
    display.say(
        f"{len(corpus.train)} files of Python's library, {len(run.train_rows)} rows of "
        f"{size.length} tokens; {len(run.eval_rows[''])} held out; device {training_config.device}"
    )
    display.say(f"teacher: {size.layers} layers, {teacher.num_parameters():,} parameters")
    run.train_teacher(training_config, every=size.teacher_steps)
    return run, pairing


def _compare(run: Run, pairing: Pairing, size: Size, settings: DemoSettings) -> dict[str, Any]:
    """Train a student by each method, and save the best."""
    run.training_config = dataclasses.replace(run.training_config, max_steps=size.student_steps)
    every = -(-size.student_steps // size.evaluations)
    students: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    best: Any = None
    for name in METHODS:
        try:
            options = OPTIONS.get(name, {})
            distiller = assemble(dataclasses.replace(pairing, method=name, options=options), run)
            history = run.train(distiller, TITLES[name], every=every)
        except InputError as error:  # the method does not fit a language model
            left_out[name] = str(error)
            run.display.say(f"{TITLES[name]}: left out ({error})")
            continue
        scores, student = history[-1]["scores"], cast(PreTrainedModel, distiller.student)
        students[name] = {
            **scores,
            "parameters": student.num_parameters(),
            "seconds": history[-1]["seconds"],
            "curve": [[entry["seconds"], entry["scores"]["perplexity"]] for entry in history],
        }
        if best is None or scores["perplexity"] < students[best[0]]["perplexity"]:
            best = name, student
    if best is None:
        raise InputError("no method gave a student: " + "; ".join(left_out.values()))
    report = {
        "fastkd": fastkd.__version__,
        "torch": torch.__version__,
        "device": str(run.device),
        "threads": torch.get_num_threads(),
        "seed": settings.seed,
        "size": dataclasses.asdict(size),
        "rows": {"train": len(run.train_rows), "eval": len(run.eval_rows[""])},
        "teacher": {**run.score(run.teacher), "parameters": run.teacher.num_parameters()},
        "students": students,
        "left_out": left_out,
        "best": best[0],
        "sample": _sample(best[1], run.tokenizer, size.sample_tokens),
    }
    save_model(settings.out / "student", best[1], run.tokenizer, report)
    return report


def _sample(student: Any, tokenizer: Any, tokens: int) -> str:
    """Text that a student generates greedily."""
    inputs = tokenizer(PROMPT, return_tensors="pt").to(student.device)
    ids = student.eval().generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
        max_new_tokens=tokens, do_sample=False, repetition_penalty=1.2,
    )  # fmt: skip
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def _draw(report: dict[str, Any], path: Path) -> None:
    """Draw perplexity against seconds of training."""
    figure = new_figure(8.4, 4.2)
    ax = figure.subplots()
    for name, row in report["students"].items():
        seconds, perplexities = zip(*row["curve"], strict=True)
        ax.plot(seconds, perplexities, marker="o", markersize=3, label=TITLES[name])
    ax.axhline(report["teacher"]["perplexity"], color="black", linewidth=1.5, label="teacher")
    ax.set_yscale("log")
    ax.set_xlabel("seconds of training")
    ax.set_ylabel("perplexity on held-out files")
    size = report["size"]
    ax.set_title(f"{size['layers'] // 2} of {size['layers']} layers, {size['student_steps']} steps")
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def _show(report: dict[str, Any], settings: DemoSettings, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("", "perplexity", "bits per byte", "seconds"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    rows = [("teacher", report["teacher"], "")]
    rows += [(TITLES[k], row, f"{row['seconds']:.0f}") for k, row in report["students"].items()]
    for title, row, seconds in rows:
        table.add_row(title, f"{row['perplexity']:.2f}", f"{row['bits_per_byte']:.3f}", seconds)
    console.print(table)
    out, best = settings.out, report["best"]
    smaller = report["students"][best]["parameters"] / report["teacher"]["parameters"]
    say(console, f"the {TITLES[best]} student, {smaller:.0%} of the teacher's parameters, writes:")
    console.print(report["sample"], markup=False, highlight=False)
    say(
        console,
        f"{report['seconds']:.0f} s in all; that student is saved in {out / 'student'}; one seed, "
        f"curves in {out / 'students.png'}",
    )
