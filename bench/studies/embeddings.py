"""Students of an embedding model without labels: which loss, for which student, at what batch.

The plan stands in docs/studies/embeddings.md, and was committed before the runs.

`python -m bench.studies.embeddings docs/studies/embeddings/runs.json` goes on where it stopped;
`python -m bench.studies.embeddings_page` writes what is there into the page.
"""

import argparse
import copy
import json
import math
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    EmbedDistillLoss,
    MarginMSELoss,
    MSELoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn
from transformers import BertModel

from bench.studies.decoder import make_tokenizer
from fastkd._core.machine import describe
from fastkd.distill import FCD, student_from_teacher
from fastkd.integrations.sentence_transformers import (
    CCADistillLoss,
    CosNCEDistillLoss,
    LayerDistillLoss,
    RelationDistillLoss,
)
from fastkd.study.docstrings import load_docstrings, load_pairs
from fastkd.train.packaged_teacher import teacher_path

SEEDS = (1, 2, 3, 4)
WORDS, TOKENS, HELD_OUT, NEIGHBOURS = 12, 24, 300, 10
STEPS, BATCH, RATE, RANDOM_RATE = 40, 32, 3e-4, 1e-3
LARGE, ALL_TEXTS = 512, 3072
WIDTH, VOCABULARY = 384, 8000
HALF = {"hidden_size": 192, "intermediate_size": 768, "num_attention_heads": 6}
STUDENTS = ("3 layers", "2 layers", "half the width", "another body")
LOSSES: dict[str, Any] = {
    "MSE": lambda student, projected: MSELoss(student, projected),
    "cosine": lambda student, projected: EmbedDistillLoss(student, "cosine", projected),
    "margin": lambda student, projected: MarginMSELoss(student),
    "relations": lambda student, projected: RelationDistillLoss(student),
    "COS-NCE": lambda student, projected: CosNCEDistillLoss(student, teacher_dim=WIDTH),
    "CCA": lambda student, projected: CCADistillLoss(student, ridge=0.1),
}
SUMS = ("cosine + relations", "COS-NCE + relations", "cosine + layers", "relations + layers")
COMPARED = {"relations": (16, 32, 128, 512), "COS-NCE": (16, 32, 128, 512), "CCA": (32, 512)}


class Variant(NamedTuple):
    student: str
    loss: str  # names of LOSSES or "layers", with " + " between them; "" trains nothing
    texts: int = BATCH  # texts of a step
    compared: int = BATCH  # texts that are compared with each other
    steps: int = STEPS


MAIN = [
    Variant(student, loss)
    for student in STUDENTS
    for loss in ("", *LOSSES, "layers", *SUMS)
    if student != "another body" or "layers" not in loss
]
BATCHES = [
    Variant("2 layers", loss, LARGE, compared, ALL_TEXTS // LARGE)
    for loss, sizes in COMPARED.items()
    for compared in sizes
] + [Variant("2 layers", loss, BATCH, BATCH, ALL_TEXTS // BATCH) for loss in COMPARED]


class Embedded(nn.Module):
    """Sum of the losses over groups of ``compared`` texts of one forward pass."""

    def __init__(self, student: SentenceTransformer, names: list[str], compared: int) -> None:
        super().__init__()
        width = student.get_embedding_dimension()
        projected = None if width == WIDTH else WIDTH
        self.student, self.compared = student, compared
        self.losses = nn.ModuleList(LOSSES[name](student, projected) for name in names)

    def forward(self, columns: list[dict[str, Any]], labels: Tensor) -> Tensor:
        embeddings = self.student(columns[0])["sentence_embedding"].float()
        groups = zip(embeddings.split(self.compared), labels.split(self.compared), strict=True)
        with torch.autocast("cpu", enabled=False):
            found = [compare(loss, x, y) for x, y in groups for loss in self.losses]
        return torch.stack(found).sum() / (len(found) / len(self.losses))


def compare(loss: Any, x: Tensor, y: Tensor) -> Tensor:
    """A loss between student and teacher embeddings, by its name."""
    if isinstance(loss, EmbedDistillLoss):
        return loss.compute_loss_from_embeddings([x], [y])
    if isinstance(loss, MarginMSELoss):
        turns = range(1, len(x))
        scores = torch.stack([(y * y.roll(turn, 0)).sum(-1) for turn in turns], 1)
        columns = [x, *(x.roll(turn, 0) for turn in turns)]
        return loss.compute_loss_from_embeddings(columns, scores)
    found: Tensor = loss.loss_of_embeddings([x], y)
    return found


class Study:
    """Teacher, texts, the teacher's embeddings, and the initial students."""

    def __init__(self) -> None:
        still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        path = str(teacher_path())
        self.teacher = SentenceTransformer(path, device="cpu", config_kwargs=still).eval()
        self.teacher.max_seq_length = TOKENS
        corpus, pairs = load_docstrings(400, 60), load_pairs(10, 40).evals[""]
        self.train, self.held = shorten(corpus.train.texts), shorten(corpus.evals[""].texts)
        self.held, self.grades = self.held[:HELD_OUT], pairs.labels
        self.pairs = shorten(pairs.texts), shorten(pairs.pairs or [])
        self.labels = self.encode(self.teacher, self.train)
        self.similar = self.similarities(self.teacher)
        body: Any = self.teacher[0].model
        self.bodies = {
            "3 layers": student_from_teacher(body, [2, 4, 6]),
            "2 layers": student_from_teacher(body, [3, 6]),
            "half the width": student_from_teacher(body, config=HALF),
        }
        self.tokenizer = make_tokenizer(self.train, VOCABULARY)
        self.tokenizer.model_max_length = TOKENS

    def student(self, name: str) -> Any:
        made: Any = copy.deepcopy(self.teacher)
        if name in self.bodies:
            made[0].model = copy.deepcopy(self.bodies[name])
        else:
            config: Any = copy.deepcopy(self.bodies["3 layers"].config)
            config.vocab_size = len(self.tokenizer)
            made[0].model, made[0].processor = BertModel(config), self.tokenizer
        made[1] = Pooling(made[0].model.config.hidden_size, "mean")
        return made

    def encode(self, model: SentenceTransformer, texts: list[str]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            rows = model.encode(texts, batch_size=64, convert_to_tensor=True)
        return rows.float().clone()

    def similarities(self, model: SentenceTransformer) -> np.ndarray:
        rows = self.encode(model, self.held).numpy()
        return rows @ rows.T

    def scores(self, model: SentenceTransformer) -> dict[str, float]:
        found = self.similarities(model.eval())
        above = np.triu_indices(len(found), 1)
        near = []
        for similar in (found, self.similar):
            others = similar - 2 * np.eye(len(similar))
            near.append(np.argsort(-others, axis=1)[:, :NEIGHBOURS])
        shared = [len(set(a) & set(b)) / NEIGHBOURS for a, b in zip(*near, strict=True)]
        first, second = (self.encode(model, texts) for texts in self.pairs)
        return {
            "agreement": float(spearmanr(found[above], self.similar[above])[0]),
            "neighbours": float(np.mean(shared)),
            "pairs": float(spearmanr((first * second).sum(1).numpy(), self.grades)[0]),
        }

    def run(self, variant: Variant, seed: int) -> dict[str, float]:
        """Scores of one trained student, and processor seconds for each step."""
        torch.manual_seed(seed)
        student = self.student(variant.student)
        seconds = self.fit(student, variant, seed) if variant.loss else 0.0
        return {**self.scores(student), "seconds": seconds}

    def fit(self, student: SentenceTransformer, variant: Variant, seed: int) -> float:
        names = variant.loss.split(" + ")
        embedded = [name for name in names if name != "layers"]
        loss: Any = Embedded(student.train(), embedded, variant.compared) if embedded else None
        if "layers" in names:
            loss = LayerDistillLoss(student, self.teacher, FCD(task_weight=0.0), loss=loss)
        rate = RATE if variant.student in self.bodies else RANDOM_RATE
        rate *= math.sqrt(variant.texts / BATCH)
        learning = [p for p in loss.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(learning, lr=rate, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: (1 + math.cos(math.pi * step / variant.steps)) / 2
        )
        order = np.random.default_rng(seed).permutation(len(self.train))
        took = []
        for step in range(variant.steps):
            began = time.process_time()
            rows = order[step * variant.texts : (step + 1) * variant.texts]
            features = dict(student.preprocess([self.train[i] for i in rows]))
            with torch.autocast("cpu", torch.bfloat16):
                value = loss([features], self.labels[rows])
            total: Any = sum(value.values()) if isinstance(value, dict) else value
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            took.append(time.process_time() - began)
        return float(np.median(took))


def shorten(texts: list[str]) -> list[str]:
    return [" ".join(text.split()[:WORDS]) for text in texts]


def key(variant: Variant, seed: int) -> str:
    compared = f"{variant.steps} steps of {variant.texts}, {variant.compared} compared"
    return f"{variant.student}; {variant.loss or 'cut'}; {compared}; seed {seed}"


def main() -> None:
    """Train the missing students."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(out.read_text()) if out.exists() else {"runs": {}}
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*CCA")
    study = Study()
    found.setdefault("where", describe(torch.device("cpu")))
    found["teacher"] = study.scores(study.teacher)
    for seed in SEEDS:
        for variant in MAIN + BATCHES:
            if (at := key(variant, seed)) not in found["runs"]:
                found["runs"][at] = study.run(variant, seed)
                part = out.with_suffix(".part")
                part.write_text(json.dumps(found, indent=1))
                part.replace(out)
                print(at, found["runs"][at], flush=True)


if __name__ == "__main__":
    main()
