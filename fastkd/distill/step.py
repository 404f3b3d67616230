"""One step as a method reads it: outputs, labels, masks, and the terms on logits and labels."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastkd.distill.backbone import Backbone, Model
from fastkd.distill.outputs import QKV, EnsembleOutputs, Logits, Outputs, pooled_rows
from fastkd.distill.prediction_losses import (
    MULTI_LABEL,
    REGRESSION,
    PredictionOptions,
    Sum,
    Targets,
    head_losses,
    label_losses,
    soft_losses,
)
from fastkd.distill.vocabulary import shared_tokens
from fastkd.distributed import Ranks
from fastkd.soft_targets import DivergenceWord


@dataclass
class ItemCounts:
    """Number of items that each term's sum is divided by, over processes and micro-batches.

    The terms divide in a fixed order. Counts are summed over ``ranks``. A first pass over
    micro-batches appends its counts to ``seen``; a later pass divides by the totals in ``known``.
    """

    ranks: Ranks | None = None
    seen: list[Tensor] | None = None
    known: Iterator[Tensor] | None = None


def global_count(count: Tensor, ranks: Ranks | None) -> Tensor:
    """Mean number of items per process, at least one in total; the loop averages the shares."""
    if ranks is None:
        return count.clamp(min=1)
    return ranks.sum(count).clamp(min=1) / ranks.size


@dataclass
class Step:
    """One batch: both models' outputs, labels and mask.

    Hidden states of teacher and student are returned in the dtype of the student's parameters, so
    that losses read one dtype under autocast and with a half-precision teacher. Each of the B rows
    is one sample that starts at position 0: packed rows are unpacked, left padding is moved to the
    end.
    """

    student: Outputs
    teacher: Outputs
    student_model: Backbone
    teacher_model: Model
    mask: Tensor | None = None  # (B, N) bool, True = real token
    labels: Tensor | tuple[Tensor, Tensor] | None = None
    num_items: float | Tensor | None = None
    # Mask of per-token logits, which stay in the models' row layout.
    token_mask: Tensor | None = None
    loss_weights: Tensor | None = None  # (B, N), factors of the tokens' losses, as the labels
    document_ids: Tensor | None = None  # the document of each token of packed rows
    first: Tensor | None = None  # (B, 1), position of each row's first token before rotation
    ranks: Ranks | None = None  # the processes whose samples are compared
    items: ItemCounts = field(default_factory=ItemCounts)

    def of_teacher(self, number: int) -> "Step":
        """The step of one teacher of an ensemble; the step itself if there is one teacher."""
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
        """Attention maps (B, H, N, N) of the layer pairs; padding has arbitrary values."""
        dtype = self.student_model.dtype
        return (
            [self.student.attentions[i].to(dtype) for i in student],
            [self.teacher.attentions[i].to(dtype) for i in teacher],
        )

    def qkv(self, student: int, teacher: int) -> tuple[QKV, QKV]:
        """Queries, keys and values of a student and a teacher layer, before any rotation."""
        dtype = self.student_model.dtype
        return (
            QKV(*(x.to(dtype) for x in self.student.qkv[student])),
            QKV(*(x.to(dtype) for x in self.teacher.qkv[teacher])),
        )

    def last(self) -> tuple[Tensor, Tensor]:
        """Last hidden states (B, N, Ds) and (B, N, Dt)."""
        students, teachers = self.layers(
            [self.student_model.num_layers], [self.teacher_model.num_layers]
        )
        return students[0], teachers[0]

    def pooled(
        self, pool: str, student: Tensor, teacher: Tensor
    ) -> tuple[list[Tensor], Tensor | None]:
        """Pooled features of student and teacher, and their mask.

        "tokens" returns the features (B, N, D) and the mask. "cls" returns the token (B, D) that
        each model's classification head reads, "mean" the mean (B, D) over real tokens, both
        without a mask.
        """
        if pool == "tokens":
            return [student, teacher], self.mask

        def rows(outputs: Outputs, model: Model, hidden: Tensor) -> Tensor:
            # A cache, or a teacher with inputs of its own, returns pooled rows already.
            if outputs.pooled or (outputs.spans and pool == "cls"):
                return hidden[:, 0]
            return pooled_rows(pool, model, hidden, self.mask)

        return [
            rows(self.student, self.student_model, student),
            rows(self.teacher, self.teacher_model, teacher),
        ], None

    @property
    def real(self) -> Tensor:
        """`mask` (B, N) bool, all True if it is None."""
        if self.mask is not None:
            return self.mask
        kept = self.student.all_features()[0]
        return torch.ones(kept.shape[0], kept.shape[-2], dtype=torch.bool, device=kept.device)

    def mean(self, total: Tensor, count: Tensor | int) -> Tensor:
        """Mean of ``total``, a sum over ``count`` items, over all micro-batches and processes.

        For terms whose items are independent. With several processes it is this process's share of
        the mean; the loop averages the shares.
        """
        if not isinstance(count, Tensor):  # a copy from the host would wait for the device
            count = torch.full((), count, dtype=torch.int64, device=total.device)
        items = self.items
        if items.seen is not None:
            items.seen.append(count)
        if items.known is not None:
            return total / next(items.known)
        return total / global_count(count, items.ranks)

    def whole(self, x: Any) -> Any:
        """Rows of ``x`` (B, ...), or of each tensor in a list, gathered from all processes.

        For terms that compare samples with each other. Without ``gather`` it returns ``x``.
        """
        if self.ranks is None or x is None:
            return x
        if isinstance(x, (list, tuple)):
            return type(x)(self.whole(part) for part in x)
        return self.ranks.gather(x)

    def across(self, loss: Any) -> Any:
        """``loss``, a Module with ``gather`` and ``group``, set to compare all samples."""
        loss.gather, loss.group = self.ranks is not None, self.ranks and self.ranks.group
        return loss

    @property
    def gathering(self) -> dict[str, Any]:
        """Arguments ``gather`` and ``group`` of losses that compare samples."""
        return {"gather": self.ranks is not None, "group": self.ranks and self.ranks.group}

    @property
    def length(self) -> int:
        """Number of tokens of the features; 0 if the method compares no features."""
        kept = self.student.all_features()
        return kept[0].shape[-2] if kept else 0

    @property
    def rows(self) -> int:
        """Number of samples of the features; 0 if the method compares no features."""
        kept = self.student.all_features()
        return kept[0].shape[0] if kept else 0

    def padded(self, length: int) -> "Step":
        """The same step with features of ``length`` tokens, and a mask."""
        if not length:
            return self
        more = length - self.length
        return dataclasses.replace(
            self,
            student=self.student.padded(more),
            teacher=self.teacher.padded(more),
            mask=F.pad(self.real, (0, more)),
        )

    def among_ranks(self) -> "Step":
        """The step padded to the longest one of all processes that compare samples."""
        kept = self.student.all_features()
        if self.ranks is None or not kept:
            return self
        return self.padded(self.ranks.max(self.length, kept[0].device))

    def sample_labels(self) -> Tensor:
        """Labels (B,), one per sample, for terms that compare samples of the same class."""
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
        """Labels and masks for the losses on predictions."""
        return Targets(
            self.student_model,
            self.labels,
            self.token_mask,
            self.document_ids,
            self.teacher_model.vocabulary,
            self.loss_weights,
        )

    def task_loss(self, label_spread: float = 0.0) -> Tensor:
        """Student's loss on the labels: cross-entropy, or MSE for regression.

        ``label_spread`` is the weight of every other class in the target of the cross-entropy, as
        a fraction of the label's weight.
        """
        if self.student.loss is not None and self.labels is None:
            return self.own_mean(self.student.loss)  # the head has targets of its own
        logits = self._logits_of(self.student, "student", "task")
        options = PredictionOptions(label_spread=label_spread)
        return self._average(label_losses(logits, self.targets, options))

    def own_mean(self, mean: Tensor) -> Tensor:
        """Share of a mean that the student computes itself, weighted by its number of samples."""
        rows = self.rows or (1 if self.token_mask is None else len(self.token_mask))
        return self.mean(mean * rows, rows)

    def soft_loss(
        self, temperature: float, divergence: DivergenceWord, scale_by_t2: bool
    ) -> Tensor:
        """Divergence between softened output distributions, or MSE for regression.

        Question answering: the mean over start and end, each a distribution over the real tokens.
        Multi-label heads: the mean over the labels, each a distribution over yes and no.
        """
        students = self._logits_of(self.student, "student", "soft")
        teachers = self._logits_of(self.teacher, "teacher", "soft")
        options = PredictionOptions(temperature, divergence, scale_by_t2)
        return self._average(soft_losses(students, teachers, self.targets, options))

    def head_loss(
        self, weights: Mapping[str, float], options: PredictionOptions
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Weighted sum of "task" and "soft" from LM-head inputs, and each term, detached."""
        teacher = self.teacher.head_inputs if "soft" in weights else None
        assert self.student.head_inputs is not None
        sums = head_losses(self.student.head_inputs, teacher, self.targets, options, weights)
        loss, *terms = self._average([sums]).unbind()
        return loss, {name: x.detach() for name, x in zip(weights, terms, strict=True)}

    def _average(self, sums: list[Sum]) -> Tensor:
        """Average of means over the counted items, or over ``num_items`` for token-level heads."""
        means = []
        for each in sums:
            if self.num_items is None or not each.over_tokens:
                means.append(self.mean(each.total, each.count))
                continue
            # A Python number is a kernel argument; a tensor of it would wait for the device.
            items = (each.total.new_ones(()) * self.num_items).to(each.total.dtype)
            means.append(each.total / torch.where(items > 0, items, 1))
        return means[0] if len(means) == 1 else torch.stack(means).mean()

    def _logits_of(self, outputs: Outputs, side: str, term: str) -> Logits:
        model = self.student_model if side == "student" else self.teacher_model
        if outputs.head_inputs is not None:  # only one of the two models has head inputs
            return outputs.head_inputs.logits()
        if outputs.logits is None and {"logits", "start_logits"} & {*outputs.names}:
            raise ValueError(
                f"logit_terms: a term reads the {side}'s logits, which are kept only for terms "
                f"named there; add it to logit_terms, as {term} is"
            )
        if outputs.logits is None:
            given = ", ".join(outputs.names) or "a tuple"
            raise ValueError(
                f"the {term} term needs logits, but the {side} ({model.class_name}) "
                f"returns {given}; use a model with a head, or set the term's weight to 0"
            )
        logits, size = outputs.logits, model.output_size
        # Without `in`, which Dynamo doesn't evaluate for dynamic sizes.
        if (
            isinstance(logits, Tensor)
            and logits.dim() != 3
            and size is not None
            and size != (logits.shape[-1] if logits.dim() > 1 else 1)
        ):
            raise ValueError(
                f"the {term} term needs logits of {size} labels in the last dimension, but the "
                f"{side} ({model.class_name}) returns {tuple(logits.shape)}; set num_labels of its "
                "configuration"
            )
        return logits


def check_head(student: Backbone, terms: Sequence[str], method: str, remedy: str) -> None:
    """Raise if ``terms`` read logits and the student has no head that fastkd supports."""
    if terms and not student.has_head:
        raise ValueError(
            f"{method} has terms on the student's output ({', '.join(terms)}), but the student "
            f"({student.class_name}) has no head; {remedy}"
        )
    if terms and student.aligns:
        raise ValueError(
            f"{method} has terms on the student's output ({', '.join(terms)}), but the student "
            f"({student.class_name}) has a CTC-like head, whose loss aligns outputs with labels, "
            f"which fastkd doesn't support; {remedy}"
        )


def check_same_kind(teacher: Model, student: Backbone) -> None:
    """Raise if only one of the models is an encoder-decoder."""
    if teacher.writes != student.writes:
        models = [("teacher", teacher), ("student", student)]
        (name, model), (other, plain) = models if teacher.writes else models[::-1]
        raise ValueError(
            f"the {name} ({model.class_name}) is an encoder-decoder, the {other} "
            f"({plain.class_name}) is not, and their hidden states belong to different tokens; use "
            "two models of one kind"
        )


def check_same_head(teacher: Model, student: Backbone, method: str) -> None:
    """Raise if the logits of teacher and student can't be compared."""
    if not teacher.has_head:
        raise ValueError(
            f"{method} compares logits, but the teacher has no head ({teacher.class_name}); "
            "load it with its head"
        )
    if teacher.vocabulary is None:
        teacher.vocabulary = shared_tokens(teacher, student)
    sizes = [student.output_size, teacher.output_size]
    if teacher.vocabulary is None and None not in sizes and sizes[0] != sizes[1]:
        remedy = "; if their first tokens are the same, pass tokenizers=(student's, teacher's)"
        lm_heads = student.predicts_words and teacher.predicts_words
        raise ValueError(
            f"{method} compares logits, but the student has {sizes[0]} labels or vocabulary "
            f"entries and the teacher {sizes[1]}{remedy if lm_heads else ''}"
        )
    unset = student.problem is None and student.uses_problem_type
    if unset and teacher.problem in (REGRESSION, MULTI_LABEL):
        student.problem = teacher.problem
    problems = {model.problem for model in (student, teacher)} - {None}
    if len(problems) > 1 and problems & {REGRESSION, MULTI_LABEL}:
        raise ValueError(
            f"{method} compares logits, but the student's problem_type is {student.problem} and "
            f"the teacher's {teacher.problem}; set one problem_type in both configurations"
        )
    ours, theirs = student.class_labels, teacher.class_labels
    if ours != theirs and sorted(ours) == sorted(theirs):
        raise ValueError(
            f"{method} compares logits, but the student's classes are {', '.join(ours)} and the "
            f"teacher's {', '.join(theirs)}; use one order for both heads"
        )
