"""Decoders, students of an embedding model, and the tables of the study method_by_task.

The plan is in docs/studies/method_by_task.md and was committed before the runs.

`python -m bench.studies.method_by_task decoder FOLDER WIKITEXT` writes the sources of Python's
library and the articles of WikiText-2 as rows, and FOLDER/decoder, an untrained GPT-2 with its
tokenizer, for method_by_task_decoder.toml. `... embeddings FOLDER GLUE` trains the missing students
of the packaged encoder by `fastkd distill --task embedding`, and writes FOLDER/embeddings.json.
"""

import argparse
import hashlib
import json
import re
import shutil
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed

from fastkd._core.machine import describe
from fastkd.train.config import DistillConfig
from fastkd.train.distillation import run_distillation
from fastkd.train.packaged_teacher import teacher_path

VOCABULARY, WIDTH, LAYERS, LENGTH = 4096, 128, 6, 128
TEXTS, HELD_OUT = 40 * 32, 200
EMBEDDING_METHODS = ("fcd", "lrc_bert", "mc3kd", "lrkd")


def sources(files: int) -> list[str]:
    """First characters of Python's library files, in the order of their names' hashes."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "site-packages", "idlelib", "lib2to3"}
    paths = (p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts))
    ordered = sorted(
        paths, key=lambda p: hashlib.sha256(str(p.relative_to(root)).encode()).digest()
    )
    texts = (path.read_text(encoding="utf-8", errors="ignore")[:20_000] for path in ordered)
    return [text for text in texts if text.strip()][:files]


def articles(file: Path) -> list[str]:
    """Articles of a file of WikiText-2, which begin with a heading of the first level."""
    parts = re.split(r"(?m)^ = (?!=)", file.read_text(encoding="utf-8"))
    return [part for part in parts if part.strip()]


def write_decoder(folder: Path, wikitext: Path) -> None:
    """Rows of both corpora, and an untrained decoder with a tokenizer of their training rows."""
    library = sources(330)
    corpora = {
        "sources": {"train": library[:300], "eval": library[300:]},
        "wikitext": {
            "train": articles(wikitext / "valid.txt"), "eval": articles(wikitext / "test.txt")[:20]
        },
    }  # fmt: skip
    for name, parts in corpora.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for part, texts in parts.items():
            lines = [json.dumps({"text": text}) for text in texts]
            (folder / name / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<end>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([t for c in corpora.values() for t in c["train"]], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    set_seed(0)
    config = GPT2Config(
        vocab_size=len(fast), n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=4,
        bos_token_id=0, eos_token_id=0, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder / "decoder")
    fast.save_pretrained(folder / "decoder")


def write_texts(out: Path, glue: Path) -> dict[str, tuple[Path, Path]]:
    """Training and held-out texts of both corpora, one a line."""
    from fastkd.study.docstrings import load_docstrings

    corpus = load_docstrings(400, 60)
    first = [" ".join(text.split()[:16]) for text in corpus.train.texts]
    held = [" ".join(text.split()[:16]) for text in corpus.evals[""].texts]
    rows = {
        part: [line.partition("\t")[0] for line in (glue / f"{part}.tsv").read_text().splitlines()]
        for part in ("train", "dev")
    }
    found = {"docs": (first, held), "sst2": (rows["train"][1:], rows["dev"][1:])}
    paths = {}
    for name, (train, evals) in found.items():
        paths[name] = out / f"{name}.train.txt", out / f"{name}.eval.txt"
        for path, texts in zip(paths[name], (train[:TEXTS], evals[:HELD_OUT]), strict=True):
            path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return paths


def train_embeddings(folder: Path, glue: Path, seeds: int) -> None:
    """Train the missing students; each run's score is kept at once."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    machine = describe(torch.device("cpu"))
    file, paths = folder / "embeddings.json", write_texts(folder, glue / "SST-2")
    runs = json.loads(file.read_text()) if file.exists() else []
    done = {(run["task"], run["variant"], run["seed"]) for run in runs}
    for seed in range(seeds):
        for task, (train, evals) in paths.items():
            for method in EMBEDDING_METHODS:
                if (task, method, seed) in done:
                    continue
                config = DistillConfig(
                    task="embedding", teacher=str(teacher_path()), train=train, evals=evals,
                    student_layers=2, method=method, seed=seed, num_train_epochs=1, batch_size=32,
                    learning_rate=2e-4, max_length=24, precision="bf16", device_name="cpu",
                    out=folder / "student",
                )  # fmt: skip
                report = run_distillation(config)
                shutil.rmtree(folder / "student")
                score, seconds = report["student"]["agreement"], report["seconds"]["training"]
                about = {"task": task, "variant": method, "seed": seed, "commit": machine["commit"]}
                runs.append({**about, "score": score, "seconds": seconds})
                file.write_text(json.dumps(runs, indent=1))
                print(runs[-1], flush=True)


def main() -> None:
    """Write the decoder, or train the students of the embedding model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("decoder", "embeddings"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("data", type=Path, help="WikiText-2's folder, or GLUE's")
    parser.add_argument("--seeds", type=int, default=4)
    given = parser.parse_args()
    if given.what == "decoder":
        write_decoder(given.folder, given.data)
    else:
        train_embeddings(given.folder, given.data, given.seeds)


if __name__ == "__main__":
    main()
