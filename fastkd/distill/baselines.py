"""What others distil with, as methods: the rows that a table of losses is read against."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fastkd._core.numerics import upcast
from fastkd.distill.capture import Backbone, Model
from fastkd.distill.method import Layers, Method
from fastkd.distill.methods import METHODS, AttentionMSE, SoftTargets
from fastkd.distill.step import Step


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
        for student, teacher in pairs:
            (s, t), _ = step.pooled("cls", student, teacher)
            difference = F.normalize(upcast(s), dim=-1) - F.normalize(upcast(t), dim=-1)
            total.append(difference.square().sum(-1).mean())
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
        return 1 - F.cosine_similarity(student, teacher, dim=-1).mean()


BASELINES: dict[str, type[Method]] = {
    "tinybert": AttentionMSE,
    "pkd": PKD,
    "distilbert": DistilBERT,
}
#: What commands know by a name.
NAMES = (*METHODS, *BASELINES)
