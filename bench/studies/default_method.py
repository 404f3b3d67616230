"""A narrow teacher, and students of an embedding model, for the study of the default method.

The plan is in docs/studies/default_method.md and was committed before the runs.

`python -m bench.studies.default_method teacher runs/default/teacher` writes the packaged encoder, a
third as wide: the teacher of default_method.toml before it learns a task.
`python -m bench.studies.default_method embeddings runs/default` trains the missing students of the
packaged encoder by `fastkd distill --task embedding`; scores go to runs/default/embeddings.json.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from fastkd._core.machine import describe
from fastkd.distill import student_from_teacher
from fastkd.study.docstrings import load_docstrings
from fastkd.train.config import DistillConfig
from fastkd.train.distillation import run_distillation
from fastkd.train.packaged_teacher import teacher_path

SEEDS = range(4)
TEXTS, HELD_OUT, WORDS = 20 * 32, 200, 16
NARROW = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512}
#: An embedding model has no head, so a method and its sum with soft targets are one run here.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "fcd": ("fcd", {}),
    "FCD, samples 0.1, + soft targets": ("fcd", {"beta": 0.1}),
    "lrc_bert": ("lrc_bert", {}),
    "mc3kd": ("mc3kd", {}),
    "lrkd": ("lrkd", {}),
    "tinybert": ("tinybert", {}),
}


def write_teacher(folder: Path) -> None:
    """The packaged encoder with all its layers, each narrower, and its tokenizer."""
    whole: Any = AutoModel.from_pretrained(teacher_path())
    layers = list(range(1, 1 + whole.config.num_hidden_layers))
    narrow: Any = student_from_teacher(whole, layers, config=NARROW)
    narrow.save_pretrained(folder)
    AutoTokenizer.from_pretrained(teacher_path()).save_pretrained(folder)


def texts(out: Path) -> dict[str, Path]:
    """Files of training and held-out docstrings, each cut to its first words."""
    corpus = load_docstrings(400, 60)
    found = {"train": corpus.train.texts[:TEXTS], "eval": corpus.evals[""].texts[:HELD_OUT]}
    paths = {name: out / f"{name}.txt" for name in found}
    for name, rows in found.items():
        lines = [" ".join(row.split()[:WORDS]) for row in rows]
        paths[name].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths


def run(method: str, seed: int, paths: dict[str, Path], out: Path) -> dict[str, Any]:
    """The report of one student; its folder is deleted."""
    name, options = METHODS[method]
    config = DistillConfig(
        task="embedding", teacher=str(teacher_path()), train=paths["train"], evals=paths["eval"],
        student_layers=2, method=name, options=options, seed=seed, num_train_epochs=1,
        batch_size=32, learning_rate=2e-4, max_length=24, precision="bf16", device_name="cpu",
        out=out,
    )  # fmt: skip
    report = run_distillation(config)
    shutil.rmtree(out)
    return report


def train(folder: Path) -> None:
    """Train the missing students."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    file, paths = folder / "embeddings.json", texts(folder)
    found = json.loads(file.read_text()) if file.exists() else {"runs": []}
    found.setdefault("where", describe(torch.device("cpu")))
    done = {(run["variant"], run["seed"]) for run in found["runs"]}
    for seed in SEEDS:
        for variant in METHODS:
            if (variant, seed) in done:
                continue
            report = run(variant, seed, paths, folder / "student")
            scores = {"agreement": report["student"]["agreement"]}
            seconds = report["seconds"]["training"]
            about = {"variant": variant, "seed": seed, "seconds": seconds, **scores}
            found["runs"].append(about)
            part = file.with_suffix(".part")
            part.write_text(json.dumps(found, indent=1))
            part.replace(file)
            print(about, flush=True)


def main() -> None:
    """Write the teacher, or train the students."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("teacher", "embeddings"))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    (write_teacher if given.what == "teacher" else train)(given.folder)


if __name__ == "__main__":
    main()
