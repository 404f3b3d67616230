"""What others distil with, as methods: the rows that a table of losses is read against."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastkd._core.checks import check_choice, check_number
from fastkd._core.numerics import project, upcast
from fastkd.cca import CCALoss, Ridge
from fastkd.contrastive import cos_nce_loss
from fastkd.distill.backbone import Backbone, Model
from fastkd.distill.method import Layers, Method
from fastkd.distill.methods import METHODS, AttentionMSE, SoftTargets
from fastkd.distill.step import Step
from fastkd.relation import Distance, FCDLoss


class PKD(SoftTargets):
    """Patient knowledge distillation (Sun et al. 2019).

    L = (1 − alpha)·CE + alpha·T²·KL + beta·L_PT, L_PT = Σ_layers mean over the samples of
    ‖h_S/‖h_S‖ − h_T/‖h_T‖‖² of the sentence tokens (eqs. 6-7), the last layer left out as there.

    Args:
        alpha, temperature: {0.2, 0.5, 0.7} and {5, 10, 20} in the paper.
        beta: {10, 100, 500, 1000} in the paper.
        layers: "uniform" is PKD-skip, "top" PKD-last.

    Terms: task, soft, patient.
    """

    def __init__(
        self,
        *,
        alpha: float = 0.5,
        temperature: float = 5.0,
        beta: float = 10.0,
        layers: Layers = "uniform",
    ) -> None:
        super().__init__(alpha=alpha, temperature=temperature)
        self.beta, self.layers = beta, layers

    def choose_layers(self, teacher: Model, student: Backbone) -> None:
        if teacher.hidden_size != student.hidden_size:
            raise ValueError("PKD needs hidden sizes that are equal")
        self.pair_layers(self.layers, teacher, student)
        if student.num_layers > 1:
            self.student_layers = self.student_layers[:-1]
            self.teacher_layers = self.teacher_layers[:-1]

    def weights(self, progress: float) -> dict[str, float]:
        return {**super().weights(progress), "patient": self.beta}

    def patient(self, step: Step) -> Tensor:
        """L_PT, eq. 7."""
        pairs = zip(*step.layers(self.student_layers, self.teacher_layers), strict=True)
        total = []
        there = step.real.any(1)  # (B,), samples that have any token
        for student, teacher in pairs:
            (s, t), _ = step.pooled("cls", student, teacher)
            difference = F.normalize(upcast(s), dim=-1) - F.normalize(upcast(t), dim=-1)
            squares = torch.where(there, difference.square().sum(-1), 0)
            total.append(step.mean(squares.sum(), there.sum()))
        return torch.stack(total).sum()


class DistilBERT(SoftTargets):
    """The losses of DistilBERT (Sanh et al. 2019), with the task in the place of masked words.

    L = (1 − alpha)·CE + alpha·T²·KL + beta·(1 − cos(H_S, H_T)), the last hidden states compared
    token by token.

    Args:
        alpha, temperature: as in `SoftTargets`; the paper weighs soft to task 5:2, T = 2.
        beta: weight of the cosine; the paper has 1 beside 5 and 2.

    Terms: task, soft, cosine.
    """

    def __init__(self, *, alpha: float = 0.7, temperature: float = 2.0, beta: float = 0.15) -> None:
        super().__init__(alpha=alpha, temperature=temperature)
        self.beta = beta

    def choose_layers(self, teacher: Model, student: Backbone) -> None:
        if teacher.hidden_size != student.hidden_size:
            raise ValueError("DistilBERT's cosine needs hidden sizes that are equal")
        self.student_layers, self.teacher_layers = [student.num_layers], [teacher.num_layers]

    def weights(self, progress: float) -> dict[str, float]:
        return {**super().weights(progress), "cosine": self.beta}

    def cosine(self, step: Step) -> Tensor:
        student, teacher = (upcast(x[step.real]) for x in step.last())
        distances = 1 - F.cosine_similarity(student, teacher, dim=-1)
        return step.mean(distances.sum(), step.real.sum())


class Embeddings(Method):
    """One embedding a sample against the teacher's: how embedding models are distilled.

    L = task_weight·L_g + cos_nce·L_NCE + cosine·(1 − cos) + mse·MSE + relations·L_s + cca·L_CCC:
    COS-NCE (LRC-BERT, eqs. 1-2), the mean of 1 − cos(s, t), the mean square of s − t over elements,
    the relations between the samples of a batch (FCD, eq. 9) and −Σ of the canonical correlations
    (MC3KD, eq. 7). Hidden states are no part of it. With unequal widths COS-NCE compares by a
    projection that trains along and starts as a slice of the identity; cosine and MSE can't.

    Args:
        cos_nce, cosine, mse, relations, cca: weights.
        task_weight: weight of the task loss; nothing where models have no head.
        pooling: "mean" of a sample's last hidden states, or "cls", the one that a classification
            head reads. `fastkd distill --task embedding` takes the teacher's.
        unit_length: compare embeddings of length 1, which only mse and cca can tell; the command
            takes what the teacher gives.
        distance: of the relations, as in `fastkd.relation_loss`.
        ridge: of the correlations, as in `fastkd.CCALoss`; batches smaller than the embeddings
            are long want a large one.

    Terms: task, contrast, angles, squares, samples, correlations.
    """

    across_samples = ("contrast", "samples", "correlations")
    headless = MappingProxyType({"task_weight": 0.0})

    def __init__(
        self,
        *,
        cos_nce: float = 1.0,
        cosine: float = 0.0,
        mse: float = 0.0,
        relations: float = 0.0,
        cca: float = 0.0,
        task_weight: float = 1.0,
        pooling: Literal["mean", "cls"] = "mean",
        unit_length: bool = True,
        distance: Distance = "pearson",
        ridge: Ridge = 0.1,
    ) -> None:
        super().__init__()
        given = {"cos_nce": cos_nce, "cosine": cosine, "mse": mse, "relations": relations}
        for name, value in {**given, "cca": cca, "task_weight": task_weight}.items():
            check_number(name, value, at_least=0)
        check_choice("pooling", pooling, ("mean", "cls"))
        self.cos_nce, self.cosine, self.mse = cos_nce, cosine, mse
        self.relations, self.cca, self.task_weight = relations, cca, task_weight
        self.pooling, self.unit_length = pooling, unit_length
        self.distance, self.ridge = distance, ridge
        self.teacher_pool = pooling
        self.relation_loss = FCDLoss(0.0, 1.0, "l2", distance)
        self.cca_loss = CCALoss(ridge)

    def choose_layers(self, teacher: Model, student: Backbone) -> None:
        widths = student.hidden_size, teacher.hidden_size
        if (self.cosine or self.mse) and widths[0] != widths[1]:
            raise ValueError(
                "Embeddings' cosine and mse compare embeddings of one length, and the student's "
                f"have {widths[0]} numbers, the teacher's {widths[1]}; set both to 0: cos_nce, "
                "relations and cca take any two"
            )
        self.student_layers, self.teacher_layers = [student.num_layers], [teacher.num_layers]

    def make_parts(self, teacher: Model, student: Backbone) -> None:
        self.W = None
        if self.cos_nce and student.hidden_size != teacher.hidden_size:
            self.W = nn.Linear(student.hidden_size, teacher.hidden_size, bias=False)
            nn.init.eye_(self.W.weight)  # type: ignore[arg-type]

    def weights(self, progress: float) -> dict[str, float]:
        return {
            "task": self.task_weight,
            "contrast": self.cos_nce,
            "angles": self.cosine,
            "squares": self.mse,
            "samples": self.relations,
            "correlations": self.cca,
        }

    def compute(self, step: Step, weights: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
        loss, terms = super().compute(step, {x: weights[x] for x in weights if x == "task"})
        for name, term in self._embedding_terms(step, [x for x in weights if x != "task"]):
            loss, terms[name] = loss + weights[name] * term, term.detach()
        return loss, terms

    def _embedding_terms(self, step: Step, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Terms of embeddings (B, Ds) and (B, Dt), which are pooled once."""
        if not names:
            return
        (student, teacher), _ = step.pooled(self.pooling, *step.last())
        student, teacher = upcast(student), upcast(teacher)
        if self.unit_length:
            student, teacher = F.normalize(student, dim=-1), F.normalize(teacher, dim=-1)
        real = step.real.any(1)  # (B,), samples that have any token
        rows = student[:, None], teacher[:, None], real[:, None]
        for name in names:
            if name == "contrast":  # LRC-BERT, eq. 1
                projected = student if self.W is None else project(self.W, student, real)
                taught = teacher.to(projected.dtype)
                yield name, cos_nce_loss(projected, taught, mask=real, **step.gathering)
            elif name == "samples":  # FCD, eq. 9
                yield name, step.across(self.relation_loss)(student, teacher, real)
            elif name == "correlations":  # MC3KD, eq. 7
                yield name, step.across(self.cca_loss)(*rows)
            else:
                losses = (student - teacher).square().mean(-1)
                if name == "angles":
                    losses = 1 - F.cosine_similarity(student, teacher, dim=-1)
                yield name, step.mean(torch.where(real, losses, 0).sum(), real.sum())


BASELINES: dict[str, type[Method]] = {
    "tinybert": AttentionMSE,
    "pkd": PKD,
    "distilbert": DistilBERT,
    "embeddings": Embeddings,
}
#: What commands know by a name.
NAMES = (*METHODS, *BASELINES)
