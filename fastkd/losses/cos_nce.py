"""COS-NCE (LRC-BERT): contrastive loss on the angles between student and teacher features."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fastkd._core import check
from fastkd._core.dispatch import Backend, backend_of, widest
from fastkd._core.fallback import by_reference, wide_dtype
from fastkd._core.label_matching import add_by_class, class_numbers, comparable
from fastkd._core.module import LossModule
from fastkd._core.numerics import (
    LossInCpp,
    Projector,
    apply,
    autocast_off,
    cumulative_sum,
    direction_ref,
    once_differentiable,
    reduced,
    saveable,
    upcast,
    values_readable,
    zero_padding,
)
from fastkd._core.plans import planned
from fastkd._core.pooling import pool_tokens
from fastkd.distributed import Group, InGroup, Ranks, ranks_of

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = get_args(Reduction)
Pool = Literal["tokens", "cls", "mean"]

# Elements of one block of negatives: 2 MB, so that a block and its products fit the cache.
BLOCK_ELEMENTS = 2**18


def cos_nce_loss_ref(
    student: Tensor,
    teacher: Tensor,
    *,
    negatives: Tensor | None = None,
    labels: Tensor | None = None,
    mask: Tensor | None = None,
    negatives_mask: Tensor | None = None,
    negatives_labels: Tensor | None = None,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Eqs. 1-2 of LRC-BERT in plain PyTorch; see `cos_nce_loss`."""
    z_s, z_t = upcast(student), upcast(teacher)  # (B, ..., D)
    size = len(z_s)
    real = z_s.new_ones(z_s.shape[:-1], dtype=torch.bool) if mask is None else mask.bool()
    z_s, z_t = (torch.where(real[..., None], z, 0) for z in (z_s, z_t))

    # The negatives n_j of sample i, and which of them count: (B, K, ...)
    if negatives is None:
        n = z_t
        cos_n = torch.einsum("i...d,j...d->ij...", direction_ref(z_s), direction_ref(n))
        other = ~torch.eye(size, dtype=torch.bool, device=z_s.device)
        if labels is not None:
            other &= labels[:, None] != labels[None, :]
        counts = other.view(size, size, *[1] * (real.dim() - 1)) & real[None]
    else:
        n = upcast(negatives)  # (K, ..., D) or (B, K, ..., D)
        counts = n.new_ones(n.shape[:-1], dtype=torch.bool)
        if negatives_mask is not None:
            counts = negatives_mask.bool()
            n = torch.where(counts[..., None], n, 0)
        samples = "i" if n.dim() > z_s.dim() else ""
        cos_n = torch.einsum(f"i...d,{samples}k...d->ik...", direction_ref(z_s), direction_ref(n))
        if negatives_labels is not None:
            assert labels is not None
            labels, negatives_labels = comparable(labels, negatives_labels)
            other = labels[:, None] != negatives_labels  # (B, K)
            counts = counts & other.view(*other.shape, *[1] * (real.dim() - 1))
        counts = counts.expand_as(cos_n)

    # g(x, y) = 1 - x·y / (‖x‖ ‖y‖)   (eq. 2)
    g_n = 1 - cos_n  # (B, K, ...)
    g_p = 1 - (direction_ref(z_t) * direction_ref(z_s)).sum(-1)  # (B, ...)
    # Σ_i (2 - (g(n_i, z_S) - g(z_T, z_S))) / 2K + g(z_T, z_S)   (eq. 1)
    k = counts.sum(1)  # (B, ...)
    total = torch.where(counts, 2 - (g_n - g_p[:, None]), 0).sum(1)
    compared = real & (k > 0)
    losses = torch.where(compared, total / (2 * k.clamp_min(1)) + g_p, 0)
    return reduced(losses, compared, reduction, weights)


@planned
def cos_nce_loss(
    student: Tensor,
    teacher: Tensor,
    *,
    negatives: Tensor | None = None,
    labels: Tensor | None = None,
    mask: Tensor | None = None,
    negatives_mask: Tensor | None = None,
    negatives_labels: Tensor | None = None,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    backend: Backend = "auto",
    gather: bool = False,
    group: Group = None,
) -> Tensor:
    """Contrastive loss by angle: pulls a position to the teacher's and away from negatives.

    ``L(z_S, z_T, N) = Σ_k (2 - (g(n_k, z_S) - g(z_T, z_S))) / 2K + g(z_T, z_S)`` (LRC-BERT,
    eq. 1) with ``g(x, y) = 1 - x·y / (‖x‖ ‖y‖)`` (eq. 2), which is
    ``2 + mean_k cos(n_k, z_S) / 2 - 3/2 cos(z_T, z_S)`` and costs one pass, linear in B. A
    position without negatives (a batch of one, no sample of another label) contributes zero, with
    zero gradient. The cosine of a zero vector is 0, its gradient zero.

    Args:
        student: (B, ..., D).
        teacher: (B, ..., D), the same shape.
        negatives: teacher features of negatives, (K, ..., D) for all samples or (B, K, ..., D)
            for each, compared at the same position; None: the other samples of the batch.
        labels: (B,); only samples of another label are negatives. A NaN differs from all other
            samples' labels. With ``negatives`` pass ``negatives_labels`` too.
        mask: (B, ...) bool or 0/1, 1 = real token. A padded position has no loss and is no
            negative.
        negatives_mask: (K, ...) or (B, K, ...), the leading dimensions of ``negatives``, bool or
            0/1. A row at 0 is no negative, whatever it holds: an unfilled row of a memory bank, or
            padding.
        negatives_labels: (K,) or (B, K), like ``negatives``; the negatives of a sample are those
            whose label differs from its own.
        weights: (B, ...), the leading dimensions of ``student``: factors of the positions' losses,
            as in `fastkd.hidden_state_loss`.
        reduction: "mean" over the real positions that have a negative, "sum", or "none".
        backend: "auto", "torch", "triton" or "cpp".
        gather: compare the samples of all processes as one batch, and shared ``negatives`` as one
            bank; see `fastkd.distributed`.

    Returns:
        Scalar, or (B, ...) for "none"; float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device or option; the message names it.

    >>> student = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> cos_nce_loss(student, teacher=2 * student)  # at the teacher, at right angles to the other
    tensor(0.5000)
    """
    features = None if negatives is None else [negatives]
    of_negatives = features, negatives_mask, negatives_labels
    batch = _Batch([student], [teacher], labels, mask, weights, *of_negatives)
    return _cos_nce_layers(batch, reduction, backend, ranks_of(gather, group))


@dataclass(frozen=True)
class _Batch:
    """Layers (B, ..., D) of both models, and what belongs to their samples and negatives."""

    students: list[Tensor]
    teachers: list[Tensor]
    labels: Tensor | None
    mask: Tensor | None
    weights: Tensor | None
    negatives: list[Tensor] | None  # (K, ..., D) or (B, K, ..., D) a layer; None: other samples
    negatives_mask: Tensor | None  # of all layers
    negatives_labels: Tensor | None


@planned
def _cos_nce_layers(given: _Batch, reduction: str, backend: str, ranks: Ranks | None) -> Tensor:
    """Mean `cos_nce_loss` of the layers; reduction "none" and weights allow one layer."""
    given = _checked(given)
    check.choice("reduction", reduction, REDUCTIONS)
    if ranks is not None:
        given = _gathered(given, ranks)
    first = given.students[0]
    runs_on = backend_of(backend, "cos_nce_loss", widest(given.students))
    batch = _flattened(given)
    negatives: Sequence[Tensor | None] = batch.negatives or [None] * len(batch.students)
    layers = list(zip(batch.students, batch.teachers, negatives, strict=True))
    labels_and_masks = batch.labels, batch.mask, batch.negatives_labels, batch.negatives_mask
    weights = batch.weights
    if runs_on == "triton" and batch.students[0].numel() > 0:
        loss = _triton_layers(layers, labels_and_masks, weights, reduction)
    else:
        losses = []
        for layer in layers:
            if runs_on == "cpp":
                arguments = *layer, *labels_and_masks, weights
                losses.append(apply(LossInCpp, _Options(reduction, 1), *arguments))
            else:
                terms, compared = _by_reference(*layer, *labels_and_masks)
                losses.append(reduced(terms, compared, reduction, weights))
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
    return loss.reshape(first.shape[:-1]) if reduction == "none" else loss


def _gathered(given: _Batch, ranks: Ranks) -> _Batch:
    """Samples of all processes, and their negatives: shared ones become one bank."""
    students, labels, weights = given.students, given.labels, given.weights
    negatives, negatives_mask = given.negatives, given.negatives_mask
    others, n = given.negatives_labels, len(students)
    each = negatives is not None and negatives[0].dim() > students[0].dim()
    # Besides the features; it must be equal in all processes.
    besides = "".join(f", labels {x.dtype}" for x in (labels, others) if x is not None)
    if negatives is not None and each:
        masked = "without a mask" if negatives_mask is None else "with a mask"
        besides += f", {negatives[0].shape[1]} negatives of each {masked}"
    elif negatives is not None:
        besides += ", shared negatives"
    weighted = [] if weights is None else [weights[..., None]]
    rows, mask = ranks.gather_samples([*students, *given.teachers, *weighted], given.mask, besides)
    if weights is not None:
        weights = rows.pop().squeeze(-1)
    labels = None if labels is None else ranks.gather(labels)
    bank = ranks if each else Ranks(ranks.group)
    if negatives is not None and each:
        missing = rows[0].shape[1:-1].numel() - students[0].shape[1:-1].numel()
        padding = (0, missing) if missing else ()  # of tokens, as gathering has padded the samples
        negatives = [bank.gather(F.pad(x, (0, 0, *padding))) for x in negatives]
        if negatives_mask is not None:
            negatives_mask = bank.gather(F.pad(negatives_mask, padding))
    elif negatives is not None:
        negatives, negatives_mask = bank.gather_samples(negatives, negatives_mask)
    others = None if others is None else bank.gather(others)
    return _Batch(rows[:n], rows[n:], labels, mask, weights, negatives, negatives_mask, others)


def _flat(x: Tensor, leading: int = 1) -> Tensor:
    """(B, ..., D) as (B, P, D), keeping the first ``leading`` dimensions."""
    if x.dim() != leading + 2:
        x = x.reshape(*x.shape[:leading], x.shape[leading:-1].numel(), x.shape[-1])
    # A vector without entries counts as a zero vector.
    return F.pad(x, (0, 1)) if x.shape[-1] == 0 else x


def _flattened(given: _Batch) -> _Batch:
    """Features (B, P, D), negatives (K, P, D) or (B, K, P, D), and their masks.

    Labels (B, K) of negatives become part of the mask.
    """
    students = [_flat(x) for x in given.students]
    teachers = [_flat(saveable(x)) for x in given.teachers]
    mask, weights = (
        None if x is None else x.reshape(students[0].shape[:2]) for x in (given.mask, given.weights)
    )
    labels, others, negatives = given.labels, given.negatives_labels, given.negatives
    negatives_mask = given.negatives_mask
    if negatives is not None:
        leading = negatives[0].dim() - given.students[0].dim() + 1
        negatives = [_flat(x, leading) for x in negatives]
        shape = negatives[0].shape[:-1]
        negatives_mask = None if negatives_mask is None else negatives_mask.reshape(shape)
        if labels is not None and others is not None and leading == 2:
            labels, others = comparable(labels, others)
            other = (labels[:, None] != others)[..., None].expand(shape)
            negatives_mask = other if negatives_mask is None else negatives_mask & other
            labels = others = None
    return _Batch(students, teachers, labels, mask, weights, negatives, negatives_mask, others)


@dataclass(eq=False, repr=False)
class CosNCELoss(LossModule, InGroup):
    """See `cos_nce_loss`. Stores ``W``, the projection of eq. 3 from student to teacher size.

    Args:
        student_dim, teacher_dim: hidden sizes.
        pool: "tokens" (compare each position), "cls" (the first real token) or "mean" (the mean of
            the real tokens). Features (B, D) are not pooled.
        reduction, backend, gather, group: as in `cos_nce_loss`.

    ``forward(student, teacher, mask=None, labels=None, negatives=None, *, negatives_mask=None,
    negatives_labels=None)`` takes student (B, N, Ds) or (B, Ds), teacher likewise, or lists of
    layers: all layers share W, and their losses are averaged. ``negatives`` are pooled already, as
    `cos_nce_loss` takes them (a list for layers); all layers share their mask and labels.

    >>> loss = CosNCELoss(student_dim=4, teacher_dim=6)
    >>> loss(torch.randn(3, 5, 4), torch.randn(3, 5, 6)).shape
    torch.Size([])
    """

    student_dim: int
    teacher_dim: int
    pool: Pool = "tokens"
    _: KW_ONLY
    reduction: Literal["mean", "sum"] = "mean"
    backend: Backend = "auto"
    gather: bool = False
    group: Group = None

    fixed = "student_dim", "teacher_dim"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive_int("student_dim", self.student_dim)
        check.positive_int("teacher_dim", self.teacher_dim)
        self.W = Projector(self.student_dim, self.teacher_dim, bias=False)

    def forward(
        self,
        student: Tensor | Sequence[Tensor],
        teacher: Tensor | Sequence[Tensor],
        mask: Tensor | None = None,
        labels: Tensor | None = None,
        negatives: Tensor | Sequence[Tensor] | None = None,
        *,
        negatives_mask: Tensor | None = None,
        negatives_labels: Tensor | None = None,
    ) -> Tensor:
        pairs = check.layer_pairs(student, teacher)
        given: list[Tensor] | None = None
        if negatives is not None:
            if not isinstance(negatives, (Tensor, list, tuple)):
                raise TypeError(
                    "negatives must be a Tensor, or a list of one for each layer, got "
                    f"{type(negatives).__name__}"
                )
            given = [negatives] if isinstance(negatives, Tensor) else list(negatives)
            if len(given) != len(pairs):
                raise ValueError(
                    f"negatives has {len(given)} layers but student has {len(pairs)}; "
                    "pass the negatives of each student layer"
                )
        students, teachers = [], []
        mask_of_layers = mask
        for i, (student, teacher) in enumerate(pairs):
            self._check(student, teacher)
            if given is not None:
                check.floating("negatives", given[i])
                check.like("negatives", given[i], "teacher", teacher)
            student, teacher, mask_of_layers = self._pooled(student, teacher, mask)
            students.append(self.W(student, mask_of_layers))
            teachers.append(teacher.to(students[-1].dtype))
            if given is not None:
                given[i] = given[i].to(students[-1].dtype)
        rest = labels, mask_of_layers, None, given, negatives_mask, negatives_labels
        ranks = ranks_of(self.gather, self.group)
        return _cos_nce_layers(
            _Batch(students, teachers, *rest), self.reduction, self.backend, ranks
        )

    def _check(self, student: Tensor, teacher: Tensor) -> None:
        check.pair(student, teacher, min_ndim=2)
        sizes = (student, self.student_dim), (teacher, self.teacher_dim)
        for name, (x, size) in zip(("student", "teacher"), sizes, strict=True):
            if x.shape[-1] != size:
                raise ValueError(
                    f"{name} must have {size} columns ({name}_dim), got {tuple(x.shape)}"
                )

    def _pooled(
        self, student: Tensor, teacher: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Student, teacher and mask of a layer, one row per sample unless the pool is "tokens"."""
        sizes = (*student.shape[:-1], teacher.shape[-1])
        check.shape("teacher", teacher, sizes, "student's but for the size")
        if student.dim() < 3 or self.pool == "tokens":
            return student, teacher, check.mask(mask, student.shape[:-1], student.device)
        mask = check.mask(mask, student.shape[:2], student.device)
        if mask is None and student.shape[1] == 0:  # without tokens: nothing real, not zero rows
            mask = torch.ones(student.shape[:2], dtype=torch.bool, device=student.device)
        student = pool_tokens(student, mask, self.pool)
        teacher = pool_tokens(teacher, mask, self.pool)
        return student, teacher, None if mask is None else mask.any(1)


def _checked(given: _Batch) -> _Batch:
    """The batch, checked, with bool masks."""
    first, labels = given.students[0], given.labels
    for student, teacher in zip(given.students, given.teachers, strict=True):
        check.pair(student, teacher, min_ndim=2)
        check.shape("teacher", teacher, student.shape, "the shape of student")
        same = (*first.shape[:-1], student.shape[-1])
        check.shape("student", student, same, "leading dimensions as in the first layer")
    mask = check.mask(given.mask, first.shape[:-1], first.device)
    weights = check.weights(given.weights, first.shape[:-1], first, mask)
    if labels is not None:
        check.labels("labels", labels, first.shape[0], first.device)
    given = dataclasses.replace(given, mask=mask, weights=weights)
    if given.negatives is None:
        for name in ("negatives_mask", "negatives_labels"):
            if getattr(given, name) is not None:
                raise ValueError(f"{name} belongs to negatives; pass negatives too")
        return given
    if (labels is None) != (given.negatives_labels is None):
        raise ValueError(
            "labels are compared with negatives_labels if negatives are given; pass both or neither"
        )
    bank = given.negatives[0]
    for negatives, student in zip(given.negatives, given.students, strict=True):
        check.floating("negatives", negatives)
        check.like("negatives", negatives, "student", student)
        check.no_grad("negatives", negatives)
        shape, rest = tuple(negatives.shape), tuple(student.shape[1:])
        shared = negatives.dim() == student.dim() and shape[1:] == rest
        each = negatives.dim() == student.dim() + 1 and shape[2:] == rest
        if not shared and not (each and shape[0] == student.shape[0]):
            named = ", ".join(map(str, rest))
            raise ValueError(
                f"negatives must have shape (K, {named}) or ({student.shape[0]}, K, {named}), "
                f"got {shape}"
            )
        same = (*bank.shape[:-1], negatives.shape[-1])
        check.shape("negatives", negatives, same, "leading dimensions as in the first layer")
    of_bank = bank.shape[:-1], bank.device, "negatives_mask", "negatives", False
    if given.negatives_labels is not None:
        sizes = bank.shape[: bank.dim() - first.dim() + 1]  # (K,) or (B, K)
        check.labels("negatives_labels", given.negatives_labels, sizes, bank.device)
    return dataclasses.replace(given, negatives_mask=check.mask(given.negatives_mask, *of_bank))


def _by_reference(
    student: Tensor,
    teacher: Tensor,
    negatives: Tensor | None,
    labels: Tensor | None,
    mask: Tensor | None,
    negatives_labels: Tensor | None,
    negatives_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Loss of each position (B, P), and which positions had a negative."""
    own_too = negatives is None and labels is None
    with torch.no_grad(), autocast_off(student):
        if negatives is None:
            total, own, count = _sums_of_negatives(labels, teacher, None, mask)
        else:
            total, own, count = _sums_of_negatives(
                labels, negatives, negatives_labels, negatives_mask
            )
        s = total.expand(student.shape) if own is None else total[own]
        count = (count - int(own_too)).expand(student.shape[:2])
        compared = count > 0 if mask is None else (count > 0) & mask
    losses = functools.partial(_position_losses, own_too)
    entries = 4 * student.shape[1:].numel()
    return by_reference(losses, entries, student, teacher, s, count, compared), compared


def _position_losses(
    own_too: bool, z_s: Tensor, z_t: Tensor, s: Tensor, k: Tensor, compared: Tensor
) -> Tensor:
    """Eq. 1 from the sum ``s`` of the directions of ``k`` negatives; 0 where not ``compared``.

    ``own_too``: the sum includes each sample's own teacher, as in a batch without labels.
    """
    z_s, z_t = (direction_ref(zero_padding(z, compared)) for z in (z_s, z_t))
    s = s - z_t if own_too else s
    g_n = k - (s * z_s).sum(-1)  # Σ_k g(n_k, z_S)
    g_p = 1 - (z_t * z_s).sum(-1)
    losses = (2 * k - (g_n - k * g_p)) / (2 * k.clamp_min(1)) + g_p
    return torch.where(compared, losses, 0)


def _sums_of_negatives(
    labels: Tensor | None, rows: Tensor, rows_labels: Tensor | None, rows_mask: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Sums of the directions of every position's negatives, rows (K, P, D) or (B, K, P, D).

    With ``labels`` but no labels of the rows, the rows are the samples themselves.

    Returns the sums (..., P, D), the index of each sample's sum (B,), or None if all samples share
    one, and the numbers of negatives (B, P) or (P,).
    """
    *groups, K, positions, features = rows.shape
    readable = values_readable(rows)
    own = row_classes = None
    if labels is not None:
        own, row_classes, classes = _classes(labels, rows_labels, readable)
        groups = [classes]
    elif groups:
        own = torch.arange(groups[0], device=rows.device)
    zeros = functools.partial(torch.zeros, dtype=wide_dtype(rows), device=rows.device)
    count = zeros(*groups, positions)
    total = zeros(*groups, positions, features)
    size = total.numel() if row_classes is None else positions * features
    step = max(1, BLOCK_ELEMENTS // max(size, 1)) if readable else K
    for start in range(0, K, step) if readable else (0,):
        part = slice(start, start + step)
        real = None if rows_mask is None else rows_mask[..., part, :]
        directions = direction_ref(zero_padding(rows[..., part, :, :].to(total.dtype), real))
        if row_classes is None:
            total += directions.sum(-3)
        else:
            add_by_class(total, row_classes[part], directions)
    if row_classes is None:
        count += K if rows_mask is None else rows_mask.sum(-2)
        return total, own, count
    real = zeros(rows.shape[:-1]) + 1 if rows_mask is None else rows_mask.to(total.dtype)
    count = _sum_of_others(add_by_class(count, row_classes, real))
    return _sum_of_others(total), own, count[own]


def _classes(labels: Tensor, others: Tensor | None, readable: bool) -> tuple[Tensor, Tensor, int]:
    """Classes of the samples (B,) and of rows with labels ``others`` (K,), and their number.

    Rows with a label that no sample has form one more class. ``others`` is None if the rows are the
    samples.
    """
    own = class_numbers(labels)
    classes = int(own.max()) + 1 if readable and own.numel() else labels.shape[0]
    if others is None:
        return own, own, classes
    among_all = class_numbers(torch.cat(comparable(labels, others)))
    place = torch.full_like(among_all, classes).scatter_(0, among_all[: len(own)], own)
    return own, place[among_all[len(own) :]], classes + 1


def _sum_of_others(x: Tensor) -> Tensor:
    """For each class (C, ...) the sum over the other classes, without subtraction and its error."""
    before, after = cumulative_sum(x, 0), cumulative_sum(x.flip(0), 0).flip(0)
    others = torch.zeros_like(x)
    others[1:] += before[:-1]
    others[:-1] += after[1:]
    return others


def _triton_layers(
    layers: list[tuple[Tensor, Tensor, Tensor | None]],
    labels_and_masks: tuple[Tensor | None, ...],
    weights: Tensor | None,
    reduction: str,
) -> Tensor:
    """Mean loss of the layers in Triton; layers of one shape share launches."""
    from fastkd.kernels.contrastive import SMALL_BATCH
    from fastkd.kernels.pointers import layer_groups
    from fastkd.kernels.upstream import LossByKernel

    student, _, negatives = layers[0]
    most = SMALL_BATCH if labels_and_masks[0] is not None else 2 * SMALL_BATCH
    small = negatives is None and _is_at_most(len(student), most)
    losses = []
    for group in layer_groups([layer[:1] for layer in layers]):  # teachers have the same shapes
        part = [layers[i] for i in group]
        features = [x for tensors in zip(*part, strict=True) for x in tensors if x is not None]
        options = _Options(reduction, len(part))
        if small:
            loss = apply(LossByKernel, options, *features, *labels_and_masks[:2], weights)
        else:
            loss = apply(_TritonCosNCE, options, *features, *labels_and_masks, weights)
        losses.append(loss if len(part) == len(layers) else loss * (len(part) / len(layers)))
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def _is_at_most(size: int, limit: int) -> bool:
    """``size <= limit``; False in a graph of any size, which a comparison would split in two."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(size <= limit)
    return size <= limit


@dataclass(frozen=True)
class _Options:
    reduction: str
    layers: int
    stacked = True

    def cpp(self, tensors: Sequence[Any], needs: Sequence[bool]) -> list[Tensor]:
        """Of one layer, as `_by_reference`, and weights; see `LossInCpp`."""
        student, teacher, negatives, labels, mask, negatives_labels, negatives_mask, weights = (
            tensors
        )
        rows, rows_mask = (teacher, mask) if negatives is None else (negatives, negatives_mask)
        own, row_classes, classes = None, None, 1
        if labels is not None:
            own, row_classes, classes = _classes(labels, negatives_labels, values_readable(student))
        elif rows.dim() == 4:  # each sample has its own negatives: one class a sample
            classes, K = rows.shape[:2]
            own = torch.arange(classes, device=rows.device)
            row_classes = torch.arange(classes * K, device=rows.device) // max(K, 1)
            rows, rows_mask = (None if x is None else x.flatten(0, 1) for x in (rows, rows_mask))
        return torch.ops.fastkd_cpp.cos_nce(
            *(_with_equal_strides([x])[0] for x in (student, teacher, rows)),
            mask,
            rows_mask,
            own,
            row_classes,
            None if weights is None else weights.flatten(),
            classes=classes,
            others=labels is not None,
            own_too=labels is None and negatives is None,
            reduction=self.reduction,
            gradient=needs[0],
        )

    def triton(
        self, tensors: Sequence[Any], upstream: Tensor | None, needs: Sequence[bool]
    ) -> list[Tensor]:
        """Of few samples, with the batch's negatives: students, teachers, labels, mask, weights.

        See `LossByKernel`.
        """
        from fastkd.kernels.contrastive import cos_nce_positions

        n, (*features, labels, mask, weights) = self.layers, tensors
        students, teachers = map(_with_equal_strides, (features[:n], features[n:]))
        labels, mask = (None if x is None else x.contiguous() for x in (labels, mask))
        weights = None if weights is None else weights.float().contiguous()
        given = students, teachers, labels, mask, weights, upstream
        return cos_nce_positions(*given, self.reduction, any(needs))


class _TritonCosNCE(torch.autograd.Function):
    """Mean loss of layers of one shape, by `fastkd.kernels.contrastive`."""

    # *tensors as in `LossInCpp`.
    @staticmethod
    def forward(ctx, options, *tensors):
        from fastkd.kernels.contrastive import cos_nce

        *features, labels, mask, negatives_labels, negatives_mask, weights = tensors
        n = options.layers
        students, teachers = map(_with_equal_strides, (features[:n], features[n : 2 * n]))
        each = len(features) > 2 * n and features[2 * n].dim() == 4
        negatives = [x.reshape(-1, *x.shape[-2:]) for x in features[2 * n :]]
        labels, mask, negatives_labels, negatives_mask = (
            None if x is None else x.contiguous()
            for x in (labels, mask, negatives_labels, negatives_mask)
        )
        reduction = options.reduction if weights is None else "none"
        rows = students, teachers, _with_equal_strides(negatives)
        masks = labels, mask, negatives_labels, negatives_mask
        loss, *saved = cos_nce(*rows, *masks, each, reduction)
        ctx.options, ctx.own_too = options, not negatives and labels is None
        factor = None
        if weights is not None:
            compared = saved[2][0] != 0
            factor = weights / compared.sum() if options.reduction == "mean" else weights
            factor = torch.where(compared, factor, 0)
            loss = loss * factor
            loss = loss if options.reduction == "none" else loss.sum()
        ctx.save_for_backward(mask, factor, *saved, *students, *teachers)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        from fastkd.kernels.contrastive import SAVED, cos_nce_gradient

        mask, factor, *rest = ctx.saved_tensors
        saved, features = rest[:SAVED], rest[SAVED:]
        n = ctx.options.layers
        grad = grad if factor is None else grad * factor
        dx = cos_nce_gradient(features[:n], features[n:], mask, saved, grad, ctx.own_too)
        return None, *dx.unbind(), *(None for _ in ctx.needs_input_grad[n + 1 :])


def _with_equal_strides(tensors: Sequence[Tensor]) -> list[Tensor]:
    """``tensors`` with equal strides, the last one 1; copied where they differ."""
    strides = [x.stride() for x in tensors]
    if all(stride == strides[0] and stride[-1] == 1 for stride in strides):
        return list(tensors)
    return [x.contiguous() for x in tensors]
