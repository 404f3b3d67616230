"""What a method sees of one batch, and the loss terms that read logits and labels."""

import dataclasses
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastkd.distill.backbone import Backbone, Model
from fastkd.distill.outputs import QKV, EnsembleOutputs, Logits, Outputs, pooled_rows
from fastkd.distill.predictions import (
    MULTI_LABEL,
    REGRESSION,
    PredictionOptions,
    Sum,
    Targets,
    head_losses,
    label_losses,
    soft_losses,
)
from fastkd.distill.vocabulary import shared_words
from fastkd.distributed import Ranks
from fastkd.soft_targets import DivergenceWord


class ItemCounts:
    """How many items sums are divided by, where a batch is a part of the one that counts.

    Every division asks for the number of its items in the order of the terms. Over ``ranks`` the
    numbers add up. Passes over parts write theirs into ``seen``, and ``known`` are those of all.
    """

    def __init__(
        self,
        ranks: Ranks | None = None,
        *,
        seen: list[Tensor] | None = None,
        known: Sequence[Tensor] | None = None,
    ) -> None:
        self.ranks, self.seen = ranks, seen
        self.known = None if known is None else iter(known)

    def mean(self, total: Tensor, count: Tensor | int) -> Tensor:
        """``total`` over the number of items: this part's share of the mean."""
        if not isinstance(count, Tensor):  # copied from the host it would wait for the device
            count = torch.full((), count, dtype=torch.int64, device=total.device)
        if self.seen is not None:
            self.seen.append(count)
        return total / (global_count(count, self.ranks) if self.known is None else next(self.known))


def global_count(count: Tensor, ranks: Ranks | None) -> Tensor:
    """Number of items over all processes, for a share that the loop averages over them."""
    if ranks is None:
        return count.clamp(min=1)
    return ranks.sum(count).clamp(min=1) / ranks.size


@dataclass
class Step:
    """One batch: both models' outputs, labels and mask.

    Hidden states of both sides come in the dtype of the student's parameters, so that losses see
    one dtype under autocast and with a half-precision teacher. Each of their B rows is one sample
    that starts at position 0: packed rows were taken apart, left padding moved to the end.
    """

    student: Outputs
    teacher: Outputs
    student_model: Backbone
    teacher_model: Model
    mask: Tensor | None = None  # (B, N) bool, True = real token
    labels: Tensor | tuple[Tensor, Tensor] | None = None
    num_items: float | Tensor | None = None
    # Of logits for each token, which stay as the models gave them.
    token_mask: Tensor | None = None
    document_ids: Tensor | None = None  # the document of each token, where rows are packed
    first: Tensor | None = None  # as in `Part`: where each row's tokens began
    ranks: Ranks | None = None  # the processes whose samples are compared
    items: ItemCounts = field(default_factory=ItemCounts)

    def of_teacher(self, number: int) -> "Step":
        """The step with one of several teachers; the same where there is one for all."""
        if not isinstance(self.teacher, EnsembleOutputs):
            return self
        teacher, model = self.teacher.parts[number], self.teacher_model.models[number]  # type: ignore[attr-defined]
        return dataclasses.replace(self, teacher=teacher, teacher_model=model)

    def layers(
        self, student: Sequence[int], teacher: Sequence[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Hidden states (B, N, D) of the layer pairs."""
        dtype = self.student_model.dtype
        return (
            [self.student.hidden[i].to(dtype) for i in student],
            [self.teacher.hidden[i].to(dtype) for i in teacher],
        )

    def attentions(
        self, student: Sequence[int], teacher: Sequence[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Attention maps (B, H, N, N) of the layer pairs; rows and columns of padding are noise."""
        dtype = self.student_model.dtype
        return (
            [self.student.attentions[i].to(dtype) for i in student],
            [self.teacher.attentions[i].to(dtype) for i in teacher],
        )

    def qkv(self, student: int, teacher: int) -> tuple[QKV, QKV]:
        """Queries, keys and values of a student and a teacher layer, before any rotation."""
        dtype = self.student_model.dtype
        sides = self.student.qkv[student], self.teacher.qkv[teacher]
        students, teachers = (QKV(*(x.to(dtype) for x in side)) for side in sides)
        return students, teachers

    def last(self) -> tuple[Tensor, Tensor]:
        """Last hidden states (B, N, Ds) and (B, N, Dt)."""
        students, teachers = self.layers(
            [self.student_model.num_layers], [self.teacher_model.num_layers]
        )
        return students[0], teachers[0]

    def pooled(
        self, pool: str, student: Tensor, teacher: Tensor
    ) -> tuple[list[Tensor], Tensor | None]:
        """Features (B, N, D) of both sides, one row a sample (B, D) unless ``pool`` is "tokens".

        "cls" is the token that each model's own classification head reads, "mean" the average of
        the real ones. Also the mask that is left: none where rows are pooled.
        """
        if pool == "tokens":
            return [student, teacher], self.mask

        def rows(outputs: Outputs, model: Model, hidden: Tensor) -> Tensor:
            # A cache, or a teacher with inputs of its own, has pooled in the same way.
            if outputs.pooled or (outputs.spans and pool == "cls"):
                return hidden[:, 0]
            return pooled_rows(pool, model, hidden, self.mask)

        return [
            rows(self.student, self.student_model, student),
            rows(self.teacher, self.teacher_model, teacher),
        ], None

    @property
    def real(self) -> Tensor:
        """`mask`, also where there is none: (B, N) bool."""
        if self.mask is not None:
            return self.mask
        kept = self.student.all_features()[0]
        return torch.ones(kept.shape[0], kept.shape[-2], dtype=torch.bool, device=kept.device)

    def mean(self, total: Tensor, count: Tensor | int) -> Tensor:
        """``total``, a sum over ``count`` items of this batch, as the mean over all that count.

        For terms in which each item stands for itself. Over several processes it is this
        process's share of the mean, of which the loop takes the average.
        """
        return self.items.mean(total, count)

    def whole(self, x: Any) -> Any:
        """Rows of ``x`` (B, ...), or of a list of such, of all processes that compare samples.

        For terms that compare samples with each other. Without ``gather`` it is ``x`` itself.
        """
        if self.ranks is None or x is None:
            return x
        if isinstance(x, (list, tuple)):
            return type(x)(self.whole(part) for part in x)
        return self.ranks.gather(x)

    def across(self, loss: Any) -> Any:
        """``loss``, a Module with ``gather``, over the samples of all processes that compare."""
        loss.gather, loss.group = self.gathering.values()
        return loss

    @property
    def gathering(self) -> dict[str, Any]:
        """``gather`` and ``group``, as losses that compare samples take them."""
        return {"gather": self.ranks is not None, "group": self.ranks and self.ranks.group}

    @property
    def length(self) -> int:
        """Tokens of the features; 0 where the method compares none."""
        kept = self.student.all_features()
        return kept[0].shape[-2] if kept else 0

    @property
    def rows(self) -> int:
        """Samples whose features are compared."""
        kept = self.student.all_features()
        return kept[0].shape[0] if kept else 0

    def padded(self, length: int) -> "Step":
        """The same step with features of ``length`` tokens, and a mask."""
        if not length:
            return self
        more = length - self.length
        student, teacher = (side.padded(more) for side in (self.student, self.teacher))
        mask = F.pad(self.real, (0, more))
        return dataclasses.replace(self, student=student, teacher=teacher, mask=mask)

    def among_ranks(self) -> "Step":
        """As long as the longest step of the processes that compare samples."""
        kept = self.student.all_features()
        if self.ranks is None or not kept:
            return self
        return self.padded(self.ranks.max(self.length, kept[0].device))

    def sample_labels(self) -> Tensor:
        """One label per sample, (B,), for terms that compare the samples of a class."""
        labels = self.labels
        if labels is None:
            raise ValueError(
                "labels must be passed, one per sample, for a term that compares the samples of a "
                "class; pass them, or set the term's weight to 0"
            )
        if isinstance(labels, tuple):
            raise ValueError(
                "labels must be one per sample for a term that compares the samples of a class, "
                "got start and end positions"
            )
        if labels.dim() == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if labels.dim() != 1:
            raise ValueError(
                "labels must be one per sample for a term that compares the samples of a class, "
                f"got shape {tuple(labels.shape)}"
            )
        rows = self.rows
        if rows and labels.shape[0] != rows:
            raise ValueError(
                "labels must be one per sample for a term that compares the samples of a class, "
                f"got {labels.shape[0]} labels for {rows} samples (packed documents and the "
                "choices of a question are samples too)"
            )
        return labels

    @property
    def targets(self) -> Targets:
        """What the student's predictions are compared with."""
        return Targets(
            self.student_model,
            self.labels,
            self.token_mask,
            self.document_ids,
            self.teacher_model.vocabulary,
        )

    def task_loss(self, label_spread: float = 0.0) -> Tensor:
        """Student's loss on the labels: cross-entropy, or MSE for regression.

        In the target of the cross-entropy each class but the label has ``label_spread`` times the
        label's weight.
        """
        if self.student.loss is not None and self.labels is None:
            return self._own_mean(self.student.loss)  # of a head with targets of its own
        logits = self._logits_of(self.student, "student", "task")
        options = PredictionOptions(label_spread=label_spread)
        return self._average(label_losses(logits, self.targets, options))

    def router_loss(self) -> Tensor | None:
        """Load-balancing loss of a student whose configuration has ``output_router_logits``."""
        return None if self.student.router is None else self._own_mean(self.student.router)

    def _own_mean(self, mean: Tensor) -> Tensor:
        """A mean that the student itself computes, taken for one over samples."""
        rows = self.rows or (1 if self.token_mask is None else len(self.token_mask))
        return self.mean(mean * rows, rows)

    def soft_loss(
        self, temperature: float, divergence: DivergenceWord, scale_by_t2: bool
    ) -> Tensor:
        """Divergence between softened output distributions, or MSE for regression.

        For answer spans the mean over start and end, each a distribution over the real tokens;
        for multi-label heads the mean over the labels, each a distribution over yes and no.
        """
        students = self._logits_of(self.student, "student", "soft")
        teachers = self._logits_of(self.teacher, "teacher", "soft")
        options = PredictionOptions(temperature, divergence, scale_by_t2)
        return self._average(soft_losses(students, teachers, self.targets, options))

    def head_loss(
        self, weights: Mapping[str, float], options: PredictionOptions
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Weighted loss of "task" and "soft" by the LM heads, and each term, detached."""
        teacher = self.teacher.head_inputs if "soft" in weights else None
        assert self.student.head_inputs is not None
        sums = head_losses(self.student.head_inputs, teacher, self.targets, options, weights)
        loss, *terms = self._mean(sums).unbind()
        return loss, {name: x.detach() for name, x in zip(weights, terms, strict=True)}

    def has_heads(self, terms: Container[str]) -> bool:
        """Whether `head_loss` can compute these terms, of "task" and "soft"."""
        soft = "soft" not in terms or self.teacher.head_inputs is not None
        return self.student.head_inputs is not None and soft

    def _average(self, sums: list[Sum]) -> Tensor:
        means = [self._mean(each) for each in sums]
        return means[0] if len(means) == 1 else torch.stack(means).mean()

    def _mean(self, losses: Sum) -> Tensor:
        """Mean over the items that count, or over ``num_items`` for token-level heads."""
        if self.num_items is None or not losses.over_tokens:
            return self.mean(losses.total, losses.count)
        # A number is passed to the kernel: as a tensor it would wait for the device.
        items = (losses.total.new_ones(()) * self.num_items).to(losses.total.dtype)
        return losses.total / torch.where(items > 0, items, 1)

    def _logits_of(self, outputs: Outputs, side: str, term: str) -> Logits:
        model = self.student_model if side == "student" else self.teacher_model
        if outputs.head_inputs is not None:  # the other side's can't be had by its head
            return outputs.head_inputs.logits()
        if outputs.logits is None and {"logits", "start_logits"} & {*outputs.names}:
            raise ValueError(
                f"a term reads the {side}'s logits as {term} terms do, and they are kept only for "
                "those that the method names in logit_terms"
            )
        if outputs.logits is None:
            given = ", ".join(outputs.names) or "a tuple"
            raise ValueError(
                f"the {term} term needs logits, but the {side} ({model.class_name}) "
                f"returns {given}; give it a head, or set the term's weight to 0"
            )
        logits, size = outputs.logits, model.output_size
        # Not by `in`: of sizes that change Dynamo finds none.
        if (
            isinstance(logits, Tensor)
            and logits.dim() != 3
            and size is not None
            and size != (logits.shape[-1] if logits.dim() > 1 else 1)
        ):
            raise ValueError(
                f"the {term} term needs logits of {size} labels, last of their dimensions, but "
                f"those of the {side} ({model.class_name}) are {tuple(logits.shape)}"
            )
        return logits


def check_head(student: Backbone, terms: Sequence[str], method: str, remedy: str) -> None:
    """Raise, before any training, if ``terms`` on the output have no head to read."""
    if terms and not student.has_head:
        raise ValueError(
            f"{method} has terms on the student's output ({', '.join(terms)}), but the student "
            f"({student.class_name}) has no head; {remedy}"
        )
    if terms and student.aligns:
        raise ValueError(
            f"{method} has terms on the student's output ({', '.join(terms)}), but the student "
            f"({student.class_name}) has a CTC head or one like it, whose outputs are aligned with "
            f"labels by a loss of their own, which fastkd doesn't support; {remedy}"
        )


def check_same_kind(teacher: Model, student: Backbone) -> None:
    """Raise unless both models write, or none."""
    writes = [model.writes for model in (teacher, student)]
    if writes[0] != writes[1]:
        sides = [("teacher", teacher), ("student", student)]
        (name, model), (other, plain) = sides if writes[0] else sides[::-1]
        raise ValueError(
            f"the {name} ({model.class_name}) is an encoder-decoder, the {other} "
            f"({plain.class_name}) is none; their hidden states are those of other tokens"
        )


def check_same_head(teacher: Model, student: Backbone, method: str) -> None:
    """Raise, before any training, if both models' logits can't be compared."""
    if not teacher.has_head:
        raise ValueError(
            f"{method} compares logits, but the teacher has no head ({teacher.class_name})"
        )
    if teacher.vocabulary is None:
        teacher.vocabulary = shared_words(teacher, student)
    sizes = [student.output_size, teacher.output_size]
    if teacher.vocabulary is None and None not in sizes and sizes[0] != sizes[1]:
        remedy = "; if their first words are the same, pass tokenizers=(student's, teacher's)"
        words = student.predicts_words and teacher.predicts_words
        raise ValueError(
            f"{method} compares logits, but the student has {sizes[0]} labels or vocabulary "
            f"entries and the teacher {sizes[1]}{remedy if words else ''}"
        )
    if student.problem is None and teacher.problem in (REGRESSION, MULTI_LABEL):
        student.taught_problem = teacher.problem
    problems = {model.problem for model in (student, teacher)} - {None}
    if len(problems) > 1 and problems & {REGRESSION, MULTI_LABEL}:
        raise ValueError(
            f"{method} compares logits, but the student's problem_type is {student.problem} and "
            f"the teacher's {teacher.problem}; set that of their configurations"
        )
    ours, theirs = student.class_labels, teacher.class_labels
    if ours != theirs and sorted(ours) == sorted(theirs):
        raise ValueError(
            f"{method} compares logits, but the student's classes are {', '.join(ours)} and the "
            f"teacher's {', '.join(theirs)}; give both heads one order"
        )
