"""What a method sees of one batch, and the loss terms that read logits and labels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastkd._numerics import upcast, working_dtype
from fastkd.distill.capture import Backbone
from fastkd.soft_targets import soft_target_loss

IGNORED = -100  # transformers' label of a position that doesn't count


@dataclass
class Outputs:
    """Kept hidden states by layer, (B, N, D), and logits (None for a model without a head)."""

    hidden: dict[int, Tensor]
    logits: Tensor | None
    loss: Tensor | None = None


@dataclass
class Step:
    """One batch: both models' outputs, labels and mask.

    Hidden states of both sides come in the dtype of the student's parameters, so that losses see
    one dtype under autocast and with a half-precision teacher.
    """

    student: Outputs
    teacher: Outputs
    student_model: Backbone
    teacher_model: Backbone
    mask: Tensor | None = None  # (B, N) bool, True = real token
    labels: Tensor | None = None
    num_items: float | Tensor | None = None
    _rows: "Rows | None" = field(default=None, repr=False)

    def layers(
        self, student: Sequence[int], teacher: Sequence[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Hidden states (B, N, D) of the layer pairs."""
        dtype = self.student_model.dtype
        return (
            [self.student.hidden[i].to(dtype) for i in student],
            [self.teacher.hidden[i].to(dtype) for i in teacher],
        )

    def last(self) -> tuple[Tensor, Tensor]:
        """Last hidden states (B, N, Ds) and (B, N, Dt)."""
        students, teachers = self.layers(
            [self.student_model.num_layers], [self.teacher_model.num_layers]
        )
        return students[0], teachers[0]

    def sentence_tokens(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """The token that each model's own classification head reads, (B, D) of (B, N, D)."""
        return (
            self.student_model.sentence_token(student, self.mask),
            self.teacher_model.sentence_token(teacher, self.mask),
        )

    def allows(self, term: str) -> bool:
        """Whether the student's output has what ``term`` reads; terms on features always do."""
        if term == "soft":
            return self.student.logits is not None
        if term == "task":
            return self.student.logits is not None or self.student.loss is not None
        return True

    @property
    def regression(self) -> bool:
        """Whether the head predicts numbers: losses on logits are then squared errors."""
        return self.student_model.problem == "regression"

    def sample_labels(self, method: str) -> Tensor:
        """One label per sample, (B,)."""
        labels = self._needed_labels(method)
        if labels.dim() == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if labels.dim() != 1:
            raise ValueError(
                f"{method} needs one label per sample, got labels of shape {tuple(labels.shape)}"
            )
        return labels

    def class_labels(self, method: str) -> tuple[Tensor, Tensor]:
        """`sample_labels` of the student's and the teacher's rows for losses that match them.

        They differ where a sample has no label (−100): it then matches nothing, itself included.
        """
        labels = self.sample_labels(method)
        if labels.is_floating_point() or labels.numel() == 0:
            return labels, labels
        labels = labels.long()
        unlabelled, lowest = labels == IGNORED, labels.amin()
        return torch.where(unlabelled, lowest - 1, labels), torch.where(
            unlabelled, lowest - 2, labels
        )

    def task_loss(self, method: str) -> Tensor:
        """The student's loss on the labels: cross-entropy, or MSE for regression."""
        if self.student.loss is not None:  # a head with targets of its own, not ``labels``
            return self.student.loss
        return self._hard_loss(self._needed_labels(method), smoothing=0.0)

    def softened_task_loss(self, method: str, temperature: float) -> Tensor:
        """−softmax(y/τ)·log softmax(z_S), y the one-hot label (LRC-BERT, eq. 5)."""
        # softmax(y/τ) is q/(1 + (V−1)q) off the label, q = e^{−1/τ}: a smoothed one-hot.
        V, q = self._student_logits().shape[-1], math.exp(-1 / temperature)
        smoothing = V * q / (1 + (V - 1) * q)
        return self._hard_loss(self._needed_labels(method), smoothing)

    def soft_loss(self, temperature: float, divergence: str, scale_by_t2: bool) -> Tensor:
        """Divergence between softened output distributions, or MSE for regression."""
        rows = self._logit_rows()
        if self.regression:
            return F.mse_loss(upcast(rows.student), upcast(rows.teacher))
        if self.student_model.problem == MULTI_LABEL:
            raise ValueError("soft targets compare one distribution a sample, not multi-label ones")
        return soft_target_loss(
            rows.student,
            rows.teacher,
            temperature=temperature,
            divergence=divergence,
            mask=rows.valid,
            scale_by_t2=scale_by_t2,
            denominator=self.num_items if rows.valid is not None else None,
        )

    def _student_logits(self) -> Tensor:
        assert self.student.logits is not None
        return self.student.logits

    def _needed_labels(self, method: str) -> Tensor:
        if self.labels is None:
            raise ValueError(
                f"{method} needs labels in the batch; pass labels, or set the weight of its "
                "label term to 0"
            )
        return self.labels

    def _hard_loss(self, labels: Tensor, smoothing: float) -> Tensor:
        logits = self._student_logits()
        if self.regression:
            targets = labels.to(working_dtype(logits))
            return F.mse_loss(upcast(logits).flatten(), targets.flatten())
        if self.student_model.problem == MULTI_LABEL:
            return F.binary_cross_entropy_with_logits(
                upcast(logits), labels.to(working_dtype(logits))
            )
        rows = self._logit_rows(compare=False)
        assert rows.labels is not None
        targets = rows.labels
        if targets.shape != rows.student.shape[:-1]:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)} but the student's logits "
                f"{tuple(logits.shape)}"
            )
        total = F.cross_entropy(
            upcast(rows.student).flatten(0, -2),
            targets.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=smoothing,
        )
        if self.num_items is not None and rows.valid is not None:
            return total / self.num_items
        return total / (targets != IGNORED).sum().clamp(min=1)

    def _logit_rows(self, compare: bool = True) -> "Rows":
        """Logits of both sides, the labels they are about, and which positions count.

        Sequence heads give (B, V) and every row counts. Token heads give (B, N, V): a causal
        language model's position n is about label n + 1, and padding and ignored labels are out.
        """
        student, teacher = self._student_logits(), self.teacher.logits
        if compare:
            if teacher is None:
                raise ValueError(
                    "the teacher has no logits to compare with; give it the student's head"
                )
            if teacher.shape != student.shape:
                raise ValueError(
                    f"student logits have shape {tuple(student.shape)} but the teacher's "
                    f"{tuple(teacher.shape)}; both need the same labels or vocabulary"
                )
        teacher = student if teacher is None or not compare else teacher.to(student.dtype)
        labels = self.labels
        if student.dim() == 2:
            return Rows(student, teacher, labels, None)
        valid = self.mask
        if self.student_model.causal:
            student, teacher = student[:, :-1], teacher[:, :-1]
            labels = None if labels is None else labels[:, 1:]
            valid = None if valid is None else valid[:, 1:] & valid[:, :-1]
        if labels is not None:
            counted = labels != IGNORED
            valid = counted if valid is None else valid & counted
        if valid is None:
            valid = torch.ones(student.shape[:-1], dtype=torch.bool, device=student.device)
        return Rows(student, teacher, labels, valid)


@dataclass
class Rows:
    """Rows of logits to compare, (..., V); ``valid`` (...) is None when all count."""

    student: Tensor
    teacher: Tensor
    labels: Tensor | None
    valid: Tensor | None


MULTI_LABEL = "multi_label_classification"


def check_same_head(teacher: Backbone, student: Backbone, method: str) -> None:
    """Raise, before any training, if both models' logits can't be compared."""
    if not student.has_head:
        return
    if not teacher.has_head:
        raise ValueError(
            f"{method} compares logits, but the teacher has no head "
            f"({type(teacher.inner).__name__})"
        )
    sizes = [_output_size(student), _output_size(teacher)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise ValueError(
            f"{method} compares logits, but the student has {sizes[0]} labels or vocabulary "
            f"entries and the teacher {sizes[1]}"
        )


def _output_size(backbone: Backbone) -> int | None:
    head: Any = backbone.inner.get_output_embeddings()  # type: ignore[operator]
    if head is not None:
        weight = getattr(head, "weight", None)
        return None if weight is None else int(weight.shape[0])
    return getattr(backbone.config, "num_labels", None)
