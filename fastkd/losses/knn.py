"""Intra-class KNN loss (Saadi et al.): distance to the nearest teacher rows of the same label."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fastkd._core import check
from fastkd._core.dispatch import Backend, backend_of
from fastkd._core.label_matching import add_by_class, class_numbers, comparable, label_ranges
from fastkd._core.module import LossModule
from fastkd._core.numerics import (
    GradientInForward,
    LossInCpp,
    Projector,
    apply,
    autocast_off,
    dense_rows,
    first_order_only,
    once_differentiable,
    saveable,
    upcast,
    values_readable,
    zero_padding,
)
from fastkd._core.plans import planned
from fastkd._core.pooling import pool_tokens
from fastkd._core.warn import warn_caller
from fastkd.distributed import Group, InGroup, Ranks, gather_rows, ranks_of
from fastkd.losses.neighbours import neighbour_losses

Reduction = Literal["sum", "mean", "none"]
REDUCTIONS = get_args(Reduction)
Pool = Literal["cls", "mean", "tokens"]


def knn_feature_loss_ref(
    student: Tensor,
    teacher: Tensor,
    student_labels: Tensor,
    teacher_labels: Tensor | None = None,
    *,
    k: int = 1,
    tolerance: float | None = None,
    ignore_index: int = -100,
    weights: Tensor | None = None,
    reduction: Reduction = "sum",
) -> Tensor:
    """The paper's equations (section 2) in plain PyTorch; see `knn_feature_loss`."""
    if teacher_labels is None:
        teacher_labels = student_labels
    r, f = upcast(student).flatten(1), upcast(teacher).flatten(1)  # (N, n), (M, n)
    n = r.shape[1]

    # G: distances to the rows of F with the label of x. A distance that isn't finite counts as the
    # smallest, so that a NaN is never hidden by finite rows.
    broken = ~(r.isfinite().all(1)[:, None] & f.isfinite().all(1))  # (N, M)
    d = torch.cdist(r.detach(), f).clamp_max(torch.finfo(r.dtype).max)  # (N, M)
    d = d.masked_fill(broken, -torch.inf)
    d = d.masked_fill(
        ~_same_label(student_labels, teacher_labels, tolerance, ignore_index), torch.inf
    )
    # l_hidd(x) = (1/n) Σ_{k in G_K} Σ_j (f(s_k)_j - r_j)²
    l_hidd = r.new_zeros(len(r))
    for _ in range(min(k, len(f))):
        distance, nearest = d.min(1, keepdim=True)  # (N, 1), the first of equals
        # Divide before adding: the sum of squares may overflow where the mean doesn't.
        mean = ((f[nearest.squeeze(1)] - r).square() / max(n, 1)).sum(1)
        mean = torch.where(distance.squeeze(1) == -torch.inf, torch.nan, mean)
        l_hidd = l_hidd + torch.where(distance.squeeze(1) < torch.inf, mean, 0)
        d = d.scatter(1, nearest, torch.inf)
    if weights is not None:
        l_hidd = l_hidd * weights
    if reduction == "mean":
        l_hidd = l_hidd / _counted(student_labels, ignore_index).sum().clamp_min(1)
    return l_hidd if reduction == "none" else l_hidd.sum()


@planned
def knn_feature_loss(
    student: Tensor,
    teacher: Tensor,
    student_labels: Tensor,
    teacher_labels: Tensor | None = None,
    *,
    k: int = 1,
    tolerance: float | None = None,
    ignore_index: int = -100,
    weights: Tensor | None = None,
    reduction: Reduction = "sum",
    backend: Backend = "auto",
    gather: bool = False,
    group: Group = None,
) -> Tensor:
    """Squared distance of each student row to its k nearest teacher rows of the same label.

    ``l(x) = (1/D) Σ_{k in G_K} Σ_j (teacher_kj - student_j)²`` for each row x, where G_K are the k
    nearest teacher rows with the label of x, its own row included, and ``L = Σ_x l(x)`` (section 2,
    the unnumbered equations for l_hidd and L_hidd of "Intra-Class Similarity-Guided Feature
    Distillation"). Ties go to the lower index. A label with fewer than k teacher rows uses all of
    them; a label with none contributes zero, with zero gradient. A NaN or inf in a row, or in any
    teacher row of its label, makes that row's loss NaN; rows of other labels have no effect. Where
    the squares overflow the loss is inf, and its gradient may be too.

    Args:
        student: (N, ...) features. Trailing dimensions are flattened; D is their product.
        teacher: (M, ...) features, as many per row as student. M may be a memory bank.
        student_labels: (N,) labels. A NaN matches nothing.
        teacher_labels: (M,) labels; None means student_labels, and then M must equal N.
        k: neighbours per row.
        tolerance: labels a and b match if |a - b| <= tolerance (regression); None: if they are
            equal.
        ignore_index: student and teacher rows with this label are left out.
        weights: (N,), factors of the student rows' losses, as in `fastkd.hidden_state_loss`.
        reduction: "sum" over rows, "mean" (the sum over the number of rows that are not ignored),
            or "none".
        backend: "auto", "torch", "triton" or "cpp".
        gather, group: compare the rows of all processes, or of a group; see `fastkd.distributed`.

    Returns:
        Scalar, or (N,) for "none"; float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device or option; the message names it.

    >>> student = torch.tensor([[0.0, 0.0], [5.0, 5.0]])
    >>> bank = torch.tensor([[0.0, 2.0], [1.0, 0.0], [5.0, 4.0]])
    >>> knn_feature_loss(student, bank, torch.tensor([0, 1]), torch.tensor([0, 0, 1]))
    tensor(1.)
    """
    check.pair(student, teacher, min_ndim=2)
    size, bank_size = student.shape[0], teacher.shape[0]
    if student.shape[1:].numel() != teacher.shape[1:].numel():
        raise ValueError(
            f"student and teacher must have as many features per row, got shapes "
            f"{tuple(student.shape)} and {tuple(teacher.shape)}; project one to the other's size "
            "(IntraClassKNNLoss(student_dim=..., teacher_dim=...) has a projector)"
        )
    check.labels("student_labels", student_labels, size, student.device)
    if teacher_labels is not None:
        check.labels("teacher_labels", teacher_labels, bank_size, student.device)
    elif bank_size != size:
        raise ValueError(
            f"teacher_labels is missing: teacher has {bank_size} rows and student {size}, so "
            "student_labels can't serve both; pass the labels of the teacher's rows"
        )
    check.positive_int("k", k)
    if tolerance is not None:
        check.number("tolerance", tolerance, at_least=0)
    elif (
        student_labels.is_floating_point()
        and values_readable(student_labels)
        and bool((student_labels.frac() != 0).any())
    ):
        warn_caller(
            "student_labels are real numbers, of which only equal ones match; pass tolerance, the "
            "largest difference of two labels that match"
        )
    check.choice("reduction", reduction, REDUCTIONS)
    check.integer("ignore_index", ignore_index)
    counted = None if weights is None else _counted(student_labels, ignore_index)
    weights = check.weights(weights, (size,), student, counted)

    student, teacher = student.flatten(1), teacher.flatten(1)  # (N, D), (M, D)
    bank_labels = student_labels if teacher_labels is None else teacher_labels
    ranks = ranks_of(gather, group)
    if ranks is not None:  # student rows need no gathering
        teacher, bank_labels = ranks.gather_together(teacher, bank_labels)
        bank_size = len(teacher)
    # Each row is divided by it: the sum may overflow where the mean doesn't.
    count = _counted(student_labels, ignore_index).sum() if reduction == "mean" else None
    if ranks is not None and count is not None:
        count = ranks.sum(count)
    k = min(k, bank_size)  # sym_min under Dynamo where a size is symbolic
    sizes: dict[str, Any] = {"neighbours": k, "products": size * bank_size * student.shape[1]}
    runs_on = backend_of(backend, "knn_feature_loss", student, **sizes)
    if student.numel() == 0 or teacher.numel() == 0:  # nothing to compare
        losses = upcast(student.masked_fill(torch.ones_like(student, dtype=torch.bool), 0)).sum(1)
    else:
        ranges = label_ranges(student_labels, bank_labels, tolerance, ignore_index)
        in_cpp = runs_on == "cpp"  # the operator multiplies by the weights
        summed = reduction if weights is None or in_cpp else "none"
        given = student, teacher, *ranges, count, *((weights,) if in_cpp else ())
        losses = apply(_FUNCTIONS[runs_on], _Options(k, ignore_index, summed), *given)
        if weights is not None and not in_cpp:
            losses = losses * weights
    if reduction == "none":
        return losses if ranks is None else gather_rows(losses, group)
    total = losses.sum() if losses.dim() else losses
    return total if ranks is None else ranks.total(total)


def _counted(labels: Tensor, ignore_index: int) -> Tensor:
    (labels,) = comparable(labels)
    return labels != ignore_index


@dataclass(eq=False, repr=False)
class IntraClassKNNLoss(LossModule, InGroup):
    """See `knn_feature_loss`. Adds pooling, and a linear projector when the sizes differ.

    Args:
        k: neighbours per sample.
        student_dim, teacher_dim: hidden sizes; when both are given and differ, ``projector``
            maps the student's features to the teacher's size.
        pool: "cls" (the first real token), "mean" (mean of the real tokens) or "tokens" (all tokens
            of a sample as one row, with zeros at padding). Features (B, D) are not pooled.
        tolerance, ignore_index, reduction, backend, gather, group: as in `knn_feature_loss`.

    ``forward(student, teacher, labels, teacher_labels=None, mask=None, teacher_mask=None)`` takes
    student (B, D) or (B, N, D), teacher likewise with M rows, and masks (B, N), (M, N) of tokens;
    teacher_mask defaults to mask when teacher has as many rows as student.

    >>> loss = IntraClassKNNLoss(k=2, student_dim=4, teacher_dim=6)
    >>> loss(torch.randn(3, 5, 4), torch.randn(3, 5, 6), torch.tensor([0, 1, 0])).shape
    torch.Size([])
    """

    k: int = 1
    student_dim: int | None = None
    teacher_dim: int | None = None
    pool: Pool = "cls"
    _: KW_ONLY
    tolerance: float | None = None
    ignore_index: int = -100
    reduction: Reduction = "sum"
    backend: Backend = "auto"
    gather: bool = False
    group: Group = None

    fixed = "student_dim", "teacher_dim"

    def check_options(self) -> None:
        super().check_options()
        check.positive_int("k", self.k)
        check.integer("ignore_index", self.ignore_index)
        if self.tolerance is not None:
            check.number("tolerance", self.tolerance, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.projector = None
        sizes = self.student_dim, self.teacher_dim
        check.sizes_to_project(*sizes)
        if sizes[0] is not None and sizes[1] is not None and sizes[0] != sizes[1]:
            # With a bias: the loss is a distance, and the two spaces may have different origins.
            self.projector = Projector(sizes[0], sizes[1])

    def forward(
        self,
        student: Tensor,
        teacher: Tensor,
        labels: Tensor,
        teacher_labels: Tensor | None = None,
        mask: Tensor | None = None,
        teacher_mask: Tensor | None = None,
    ) -> Tensor:
        check.pair(student, teacher, min_ndim=2)
        teacher_mask = _mask_of_teacher(student, teacher, mask, teacher_mask)
        ranks = ranks_of(self.gather, self.group)
        if ranks is not None and self.pool == "tokens":  # rows of all processes need one length
            student, mask = _padded_to_longest(student, mask, ranks)
            teacher, teacher_mask = _padded_to_longest(teacher, teacher_mask, ranks)
        student = self._rows("student", student, mask)
        teacher = self._rows("teacher", teacher, teacher_mask)
        if self.projector is not None:
            teacher = teacher.to(student.dtype)
        names = "k", "tolerance", "ignore_index", "reduction", "backend", "gather", "group"
        return knn_feature_loss(student, teacher, labels, teacher_labels, **self.options(*names))

    def _rows(self, name: str, x: Tensor, mask: Tensor | None) -> Tensor:
        """One row per sample, in the teacher's feature space."""
        if x.dim() > 3:
            raise ValueError(f"{name} must be (B, D) or (B, N, D), got shape {tuple(x.shape)}")
        if x.dim() == 3:
            mask = check.mask(mask, x.shape[:2], x.device)
            if self.pool != "tokens":
                x, mask = pool_tokens(x, mask, self.pool), None
        else:
            mask = None
        if self.projector is not None and name == "student":
            if x.shape[-1] != self.projector.in_features:
                raise ValueError(
                    f"student must have student_dim={self.projector.in_features} features, "
                    f"got {x.shape[-1]}"
                )
            x = self.projector(x, mask)
        else:
            x = zero_padding(x, mask)
        return x.flatten(1)


def _mask_of_teacher(
    student: Tensor, teacher: Tensor, mask: Tensor | None, teacher_mask: Tensor | None
) -> Tensor | None:
    """``teacher_mask``, by default the student's; raises for a mask that would be ignored."""
    is_shared = teacher_mask is None and teacher.dim() == 3 and len(teacher) == len(student)
    if teacher_mask is not None and teacher.dim() < 3:
        raise ValueError(
            f"teacher_mask: teacher {tuple(teacher.shape)} has no tokens to mask; leave it out"
        )
    if mask is not None and student.dim() < 3 and not is_shared:
        raise ValueError(
            f"mask: student {tuple(student.shape)} has no tokens to mask; leave it out"
        )
    if is_shared and isinstance(mask, Tensor) and mask.shape != teacher.shape[:2]:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, which doesn't fit teacher "
            f"{tuple(teacher.shape)}; pass teacher_mask too"
        )
    return mask if is_shared else teacher_mask


def _padded_to_longest(
    x: Tensor, mask: Tensor | None, ranks: Ranks
) -> tuple[Tensor, Tensor | None]:
    """Tokens (B, N, D) and mask, padded to the largest N of all processes."""
    if x.dim() != 3:
        return x, mask
    missing = ranks.max(x.shape[1], x.device) - x.shape[1]
    mask = check.mask(mask, x.shape[:2], x.device)
    if missing and mask is None:
        mask = x.new_ones(x.shape[:2], dtype=torch.bool)
    return F.pad(x, (0, 0, 0, missing)), None if mask is None else F.pad(mask, (0, missing))


def intra_class_similarity(features: Tensor, labels: Tensor) -> Tensor:
    """Mean cosine of each sample with the samples of its class, itself included (M_ICS).

    ``M_ICS = (1/N) Σ_i (1/c_i) Σ_j <s_i, s_j> / (‖s_i‖ ‖s_j‖)`` (section 2), where j runs over the
    c_i samples with the label of i. Linear in N. The cosine of a zero vector is 0.

    Args:
        features: (N, D).
        labels: (N,).

    Returns:
        Scalar, float32 (float64 for float64 features); 0 when N = 0.

    Raises:
        ValueError, TypeError: a wrong shape, dtype or device; the message names it.

    >>> features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
    >>> intra_class_similarity(features, torch.tensor([0, 0, 1]))
    tensor(0.6667)
    """
    check.floating("features", features, ndim=2)
    check.labels("labels", labels, features.shape[0], features.device)
    with autocast_off(features):
        x = upcast(first_order_only(features))
        peak = x.detach().abs().amax(1, keepdim=True) if x.shape[1] else x.new_ones(len(x), 1)
        x = x / torch.where(peak == 0, 1, peak)  # squares of huge or tiny features stay in range
        s_hat = torch.where(peak == 0, 0, x / x.norm(dim=1, keepdim=True).clamp_min(0.5))
        classes = class_numbers(labels)
        # Σ_ij in class c of ŝ_i·ŝ_j = ‖Σ_i ŝ_i‖², one sum per class
        sums = add_by_class(torch.zeros_like(s_hat), classes, s_hat)  # (C = N, D)
        count = add_by_class(x.new_zeros(len(x)), classes, x.new_ones(len(x)))
        return (sums.square().sum(1) / count.clamp_min(1)).sum() / max(len(x), 1)


def _same_label(a: Tensor, b: Tensor, tolerance: float | None, ignore_index: int) -> Tensor:
    """Which labels of ``a`` (N,) and ``b`` (M,) match: (N, M)."""
    a, b = comparable(a, b)
    a, b = a[:, None], b[None, :]
    real = (a != ignore_index) & (b != ignore_index)
    if tolerance is None:
        return real & (a == b)
    gap = torch.where(a > b, a - b, b - a)  # (N, M), below 0 where an integer wraps
    if gap.is_floating_point():
        return real & (gap <= tolerance)
    whole = min(math.floor(tolerance), 2**63 - 1)
    return real & ((gap >= 0) | (tolerance >= 2**63)) & (gap <= whole)


@dataclass(frozen=True)
class _Options:
    k: int
    ignore_index: int
    reduction: str  # "mean" or "sum": C++ and Triton add the rows' losses

    def cpp(self, tensors: Sequence[Any], needs: Sequence[bool]) -> list[Tensor]:
        """See `LossInCpp`."""
        student, teacher, *ranges, count, weights = tensors
        wide = torch.float64 if ranges[-1].is_floating_point() else torch.int64
        return torch.ops.fastkd_cpp.knn(
            *dense_rows(student, teacher),
            *(None if x is None else x.to(wide) for x in ranges),
            count,
            weights,
            k=self.k,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            gradient=needs[0],
        )


class _TorchKNN(GradientInForward):
    """Loss of each student row (N,), divided by ``count`` if given and not 0."""

    @staticmethod
    def forward(ctx, options, student, teacher, low, high, labels, count):
        losses, residual = neighbour_losses(
            student, teacher, low, high, labels, options.k, options.ignore_index
        )
        divisor = 1 if count is None else count.clamp_min(1)
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(residual * (2 / residual.shape[1]) / divisor)  # (N, D)
            ctx.dtypes = [student.dtype]
        return losses / divisor


class _TritonKNN(torch.autograd.Function):
    """`_TorchKNN` by `fastkd.kernels.knn`, which also adds the losses."""

    @staticmethod
    def forward(ctx, options, student, teacher, low, high, labels, count):
        from fastkd.kernels.knn import knn_forward

        student, teacher = dense_rows(student, teacher)
        given = low, high, labels, count, options.k, options.ignore_index
        is_sum = options.reduction != "none"
        losses, factor, nearest = knn_forward(student, teacher, *given, is_sum)
        ctx.save_for_backward(saveable(student), saveable(teacher), nearest, factor)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        from fastkd.kernels.knn import knn_backward

        student, teacher, nearest, factor = ctx.saved_tensors
        return None, knn_backward(student, teacher, nearest, factor, grad), *[None] * 5


_FUNCTIONS = {"torch": _TorchKNN, "triton": _TritonKNN, "cpp": LossInCpp}
