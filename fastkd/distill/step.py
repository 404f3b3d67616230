"""One step as a method reads it: outputs of both models, labels, masks, and means over items.

At the end LRC-BERT's perturbation: the student runs again on perturbed embeddings (eqs. 7-8).
"""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastkd._core.numerics import upcast, zero_padding
from fastkd.distill.by_row import RowOutputs
from fastkd.distributed import Ranks
from fastkd.models.backbone import Backbone, Model
from fastkd.models.batch import Batch
from fastkd.models.hooks import replaced_embeddings
from fastkd.models.inputs import IGNORED
from fastkd.models.outputs import QKV, EnsembleOutputs, Outputs, pooled_rows
from fastkd.models.spans import Spans


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
    return ranks.sum(count).clamp(min=1).double() / ranks.size


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
    #: Spans of text of a teacher with tokens of its own.
    spans: Spans | None = None
    document_ids: Tensor | None = None  # the document of each token of packed rows
    first: Tensor | None = None  # (B, 1), position of each row's first token before rotation
    items: ItemCounts = field(default_factory=ItemCounts)

    def of_teacher(self, number: int) -> "Step":
        """The step of one teacher of an ensemble; the step itself if there is one teacher."""
        if not isinstance(self.teacher, EnsembleOutputs):
            return self
        teacher, model = self.teacher.parts[number], self.teacher_model.models[number]  # type: ignore[attr-defined]
        return dataclasses.replace(self, teacher=teacher, teacher_model=model)

    def parts(self) -> "list[Step]":
        """For predictions, a step of each teacher's rows; the step itself if one serves all."""
        if not isinstance(self.teacher, RowOutputs) or not self.teacher.parts:
            return [self]
        return [
            dataclasses.replace(
                self,
                student=self.student.predictions(operator.itemgetter(part.rows)),
                teacher=part.outputs,
                teacher_model=part.model,
                labels=part.batch.labels,
                loss_weights=part.batch.loss_weights,
                token_mask=part.batch.mask,
                document_ids=part.batch.document_ids,
                spans=part.batch.spans,
            )
            for part in self.teacher.parts
        ]

    def layers(
        self, student: Sequence[int], teacher: Sequence[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Hidden states (B, N, D) of the layer pairs."""
        return self._pairs("hidden", student, teacher)

    def attentions(
        self, student: Sequence[int], teacher: Sequence[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Attention maps (B, H, N, N) of the layer pairs; padding has arbitrary values."""
        return self._pairs("attentions", student, teacher)

    def _pairs(
        self, kind: str, student: Sequence[int], teacher: Sequence[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        dtype = self.student_model.dtype
        ours, theirs = getattr(self.student, kind), getattr(self.teacher, kind)
        return [ours[i].to(dtype) for i in student], [theirs[i].to(dtype) for i in teacher]

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
            return pooled_rows(pool, model, hidden, self.mask, outputs.sentence)

        return [
            rows(self.student, self.student_model, student),
            rows(self.teacher, self.teacher_model, teacher),
        ], None

    @property
    def ranks(self) -> Ranks | None:
        """The processes whose samples are compared; None for this process alone."""
        return self.items.ranks

    @property
    def real(self) -> Tensor:
        """`mask` (B, N) bool, all True if it is None."""
        if self.mask is not None:
            return self.mask
        kept = self.student.all_features()[0]
        return torch.ones(kept.shape[0], kept.shape[-2], dtype=torch.bool, device=kept.device)

    def mean(self, total: Tensor, count: Tensor | int, *, over_tokens: bool = False) -> Tensor:
        """Mean of ``total``, a sum over ``count`` items, over all micro-batches and processes.

        For terms whose items are independent. With several processes it is this process's share of
        the mean; the loop averages the shares. ``over_tokens``: the items are predictions of
        tokens, whose number the loop may pass as ``num_items``.
        """
        if over_tokens and self.num_items is not None:
            # A Python number is a kernel argument; a tensor of it would wait for the device.
            given = (total.new_ones(()) * self.num_items).to(total.dtype)
            return total / torch.where(given > 0, given, 1)
        if not isinstance(count, Tensor):  # a copy from the host would wait for the device
            count = torch.full((), count, dtype=torch.int64, device=total.device)
        items = self.items
        if items.seen is not None:
            items.seen.append(count)
        known = items.known
        whole = global_count(count, items.ranks) if known is None else next(known)
        return (total / whole).to(total.dtype)

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
        if self.ranks is None or not (kept := self.student.all_features()):
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
        if isinstance(labels, Tensor) and labels.dim() == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        single = self.student_model.problem == "single_label_classification"
        if single and isinstance(labels, Tensor) and labels.dim() == 2:  # probabilities
            known = ~labels.isnan().any(-1)
            labels = labels.argmax(-1).where(known, IGNORED)
        rows = self.rows
        if isinstance(labels, tuple):
            got = "start and end positions"
        elif labels.dim() != 1:
            got = f"shape {tuple(labels.shape)}"
        elif rows and len(labels) != rows:
            got = (
                f"{len(labels)} labels for {rows} samples (packed documents and the choices of a "
                "question are samples too)"
            )
        else:
            return labels
        raise ValueError(
            "labels must be one per sample for a term that compares the samples of a class, got "
            f"{got}"
        )

    def own_mean(self, mean: Tensor) -> Tensor:
        """Share of a mean that the student computes itself, weighted by its number of samples."""
        rows = self.rows or (1 if self.token_mask is None else len(self.token_mask))
        return self.mean(mean * rows, rows)


def unit_gradients(
    student: Backbone,
    batches: list[Batch],
    losses: list[Callable[[], tuple[Any, ...]]],
    norm: str = "sample",
    ranks: Ranks | None = None,
) -> list[Tensor]:
    """g / ‖g‖ for each micro-batch, g the gradient of the loss at the embeddings (eqs. 7-8).

    It is 0 for padding, since DeBERTa's convolution reads the token after the last real one. A
    function in ``losses`` runs the student on its micro-batch; the loss is its first result.
    ``norm``: of each "sample", or over the whole "batch", in all processes of ``ranks``.
    """
    found = [_gradient(student, *each) for each in zip(batches, losses, strict=True)]
    if norm == "batch":
        total = torch.stack([upcast(g).square().sum() for g in found]).sum()
        whole = (total if ranks is None else ranks.sum(total)).sqrt()
        return [_divided(g, whole) for g in found]
    return [_by_sample(student, batch, g) for batch, g in zip(batches, found, strict=True)]


def _gradient(
    student: Backbone, batch: Batch, compute_loss: Callable[[], tuple[Any, ...]]
) -> Tensor:
    """Gradient of the loss at the embeddings, up to a factor; 0 at padding."""
    if student.compiled:
        raise ValueError(
            "perturb=True: the embeddings are perturbed inside the student, which a compiled "
            "student doesn't allow; pass the student uncompiled, or set perturb=False"
        )
    with replaced_embeddings(student, lambda emb: emb.detach().requires_grad_()) as embeddings:
        loss = compute_loss()[0]
    if not embeddings:
        raise ValueError(
            "perturb=True: the output of the embedding layer is perturbed, but the student didn't "
            "compute it; pass input_ids, or set perturb=False"
        )
    # float16 gradients underflow without a scale. Dividing by the norm removes it.
    device, dtype = loss.device.type, embeddings[0].dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    scale = 2.0**12 if torch.float16 in (dtype, embeddings[0].dtype) else 1.0
    (g,) = torch.autograd.grad(loss * scale, embeddings[0])
    mask = batch.mask.T if batch.mask is not None and student.batch_dim else batch.mask
    return zero_padding(g, mask) if mask is not None and mask.shape == g.shape[:2] else g


def _by_sample(student: Backbone, batch: Batch, g: Tensor) -> Tensor:
    """``g`` over the norm of each sample, of each document in packed rows."""
    samples, documents = student.batch_dim, batch.documents
    if documents is not None and documents.packed:
        norm = documents.norms(upcast(g).transpose(0, samples)).transpose(0, samples)
    else:
        sample_dims = [d for d in range(g.dim()) if d != samples]
        norm = torch.linalg.vector_norm(upcast(g), dim=sample_dims, keepdim=True)
    return _divided(g, norm)


def _divided(g: Tensor, norm: Tensor) -> Tensor:
    usable = norm.isfinite() & (norm > 0)
    return torch.where(usable, g / norm, 0).to(g.dtype)
