"""Intra-class KNN distillation (Saadi et al.): the nearest teacher rows of the same label."""

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fastkd._checks import (
    check_choice,
    check_floating,
    check_labels,
    check_mask,
    check_number,
    check_pair,
    check_positive_int,
)
from fastkd._dispatch import Backend, use_triton
from fastkd._labels import add_by_class, label_segments
from fastkd._numerics import (
    autocast_off,
    first_order_only,
    once_differentiable,
    project,
    upcast,
    working_dtype,
    zero_padding,
)
from fastkd._pooling import pool_tokens

__all__ = [
    "IntraClassKNNLoss",
    "intra_class_similarity",
    "knn_feature_loss",
    "knn_feature_loss_ref",
]

Reduction = Literal["sum", "mean", "none"]
REDUCTIONS = get_args(Reduction)
Pool = Literal["cls", "mean", "tokens"]
POOLS = get_args(Pool)

# Elements of one block of rows: about 4 MB in fp32, so that a block and its distances stay in
# the cache, and the working memory is small beside the (N, M) matrix that is never made.
BLOCK_ELEMENTS = 2**20
MAX_BLOCK_ROWS = 1024

# The same for pairs of rows, of which there are several blocks at a time.
PAIR_ELEMENTS = 2**18

# Products of rows, bank and features up to which the few large steps of the search cost more.
SMALL_PROBLEM = 2**20

# With fewer rows, centring the bank costs more than the few choices that it makes sure.
MIN_ROWS_TO_CENTRE = 256

# Features of one product: what a longer sum may round is more than most distances differ by.
PRODUCT_FEATURES = 512

# Candidates beyond the k-th, compared by direct difference.
EXTRA_CANDIDATES = 8

_Rows = slice | Tensor  # rows 0..n or start..stop, or their numbers


def knn_feature_loss_ref(
    student: Tensor,
    teacher: Tensor,
    student_labels: Tensor,
    teacher_labels: Tensor | None = None,
    *,
    k: int = 1,
    tolerance: float | None = None,
    reduction: Reduction = "sum",
) -> Tensor:
    """The paper's equations (section 2) in plain PyTorch; see `knn_feature_loss`."""
    if teacher_labels is None:
        teacher_labels = student_labels
    r, f = upcast(student).flatten(1), upcast(teacher).flatten(1)  # (N, n), (M, n)
    n = r.shape[1]

    # G: the distances of the rows of F, which have the label of x. One that is not finite comes
    # first, so that no NaN hides behind finite rows.
    broken = ~(r.isfinite().all(1)[:, None] & f.isfinite().all(1))  # (N, M)
    d = torch.cdist(r.detach(), f).clamp_max(torch.finfo(r.dtype).max)  # (N, M)
    d = d.masked_fill(broken, -torch.inf)
    d = d.masked_fill(~_same_label(student_labels, teacher_labels, tolerance), torch.inf)
    # l_hidd(x) = (1/n) Σ_{k in G_K} Σ_j (f(s_k)_j - r_j)²
    l_hidd = r.new_zeros(len(r))
    for _ in range(min(k, len(f))):
        distance, nearest = d.min(1, keepdim=True)  # (N, 1), the first of equals
        # Divided first, so that the squares' sum can't overflow where the mean doesn't.
        mean = ((f[nearest.squeeze(1)] - r).square() / max(n, 1)).sum(1)
        mean = torch.where(distance.squeeze(1) == -torch.inf, torch.nan, mean)
        l_hidd = l_hidd + torch.where(distance.squeeze(1) < torch.inf, mean, 0)
        d = d.scatter(1, nearest, torch.inf)
    return _reduce(l_hidd, reduction)


def knn_feature_loss(
    student: Tensor,
    teacher: Tensor,
    student_labels: Tensor,
    teacher_labels: Tensor | None = None,
    *,
    k: int = 1,
    tolerance: float | None = None,
    reduction: Reduction = "sum",
    backend: Backend = "auto",
) -> Tensor:
    """Squared distance of each student row to its k nearest teacher rows of the same label.

    Per row ``l(x) = (1/D) Σ_{k in G_K} Σ_j (teacher_kj - student_j)²``, G_K being the k nearest
    teacher rows with the label of x, its own included, and ``L = Σ_x l(x)`` (section 2, the
    unnumbered equations for l_hidd and L_hidd of "Intra-Class Similarity-Guided Feature
    Distillation"). Ties go to the lower index. A label with fewer than k teacher rows uses all it
    has; one with none contributes zero, with zero gradient. A NaN or inf in a row, or in any
    teacher row of its label, makes that row's loss NaN; rows of other labels never matter.

    Args:
        student: (N, ...) features. Trailing dimensions are flattened; D is their product.
        teacher: (M, ...) features, as many per row as student. M may be a memory bank.
        student_labels: (N,) labels.
        teacher_labels: (M,) labels; None means student_labels, and then M must equal N.
        k: neighbours per row.
        tolerance: labels a and b match when |a - b| <= tolerance (regression); None: when equal.
        reduction: "sum" over rows, "mean" (the sum divided by N), or "none".
        backend: "auto", "torch" or "triton".

    Returns:
        Scalar, or (N,) for "none"; float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, device or option, naming the argument.

    >>> student = torch.tensor([[0.0, 0.0], [5.0, 5.0]])
    >>> bank = torch.tensor([[0.0, 2.0], [1.0, 0.0], [5.0, 4.0]])
    >>> knn_feature_loss(student, bank, torch.tensor([0, 1]), torch.tensor([0, 0, 1]))
    tensor(1.)
    """
    check_pair(student, teacher, min_ndim=2)
    size, bank_size = student.shape[0], teacher.shape[0]
    if student.shape[1:].numel() != teacher.shape[1:].numel():
        raise ValueError(
            f"student and teacher must have as many features per row, got shapes "
            f"{tuple(student.shape)} and {tuple(teacher.shape)}; project one to the other's size "
            "(IntraClassKNNLoss has a projector)"
        )
    check_labels("student_labels", student_labels, size, student.device)
    if teacher_labels is not None:
        check_labels("teacher_labels", teacher_labels, bank_size, student.device)
    elif bank_size != size:
        raise ValueError(
            f"teacher_labels must be given when teacher has another number of rows "
            f"({bank_size}) than student ({size})"
        )
    check_positive_int("k", k)
    if tolerance is not None:
        check_number("tolerance", tolerance, at_least=0)
    check_choice("reduction", reduction, REDUCTIONS)

    student, teacher = student.flatten(1), teacher.flatten(1)  # (N, D), (M, D)
    kernels = use_triton(backend, "knn_feature_loss", student, neighbours=min(k, bank_size))
    if student.numel() == 0 or teacher.numel() == 0:  # nothing to compare
        losses = upcast(student.masked_fill(torch.ones_like(student, dtype=torch.bool), 0)).sum(1)
        return _reduce(losses, reduction)
    arguments = student, teacher, student_labels, teacher_labels, min(k, bank_size), tolerance
    if kernels:
        losses = _KNNFeatureLossTriton.apply(*arguments, 1 / size if reduction == "mean" else 1.0)
        return losses if reduction == "none" else losses.sum()
    return _reduce(_KNNFeatureLoss.apply(*arguments), reduction)


class IntraClassKNNLoss(nn.Module):
    """See `knn_feature_loss`. Adds pooling, and a linear projector when the sizes differ.

    Args:
        k: neighbours per sample.
        student_dim, teacher_dim: hidden sizes; when both are given and differ, ``projector``
            maps the student's features to the teacher's size.
        pool: "cls" (the first real token), "mean" (average of the real tokens) or "tokens" (all
            tokens of a sample as one row, padded positions zeroed on both sides). Features
            (B, D) pass through unpooled.
        tolerance, reduction, backend: as in `knn_feature_loss`.

    ``forward(student, teacher, labels, teacher_labels=None, mask=None, teacher_mask=None)`` takes
    student (B, D) or (B, N, D), teacher likewise with M rows, and masks (B, N), (M, N);
    teacher_mask defaults to mask when teacher has as many rows as student.

    >>> loss = IntraClassKNNLoss(k=2, student_dim=4, teacher_dim=6)
    >>> loss(torch.randn(3, 5, 4), torch.randn(3, 5, 6), torch.tensor([0, 1, 0])).shape
    torch.Size([])
    """

    def __init__(
        self,
        k: int = 1,
        student_dim: int | None = None,
        teacher_dim: int | None = None,
        pool: Pool = "cls",
        *,
        tolerance: float | None = None,
        reduction: Reduction = "sum",
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        check_positive_int("k", k)
        check_choice("pool", pool, POOLS)
        check_choice("reduction", reduction, REDUCTIONS)
        self.k, self.pool = k, pool
        self.tolerance, self.reduction, self.backend = tolerance, reduction, backend
        self.projector: nn.Linear | None = None
        if student_dim is not None and teacher_dim is not None and student_dim != teacher_dim:
            # With a bias: the loss is a distance, so the two spaces' origins need not agree.
            self.projector = nn.Linear(student_dim, teacher_dim)

    def forward(
        self,
        student: Tensor,
        teacher: Tensor,
        labels: Tensor,
        teacher_labels: Tensor | None = None,
        mask: Tensor | None = None,
        teacher_mask: Tensor | None = None,
    ) -> Tensor:
        if teacher_mask is None and teacher.shape[:2] == student.shape[:2]:
            teacher_mask = mask
        student = self._rows("student", student, mask)
        teacher = self._rows("teacher", teacher, teacher_mask)
        if self.projector is not None:
            teacher = teacher.to(student.dtype)
        return knn_feature_loss(
            student,
            teacher,
            labels,
            teacher_labels,
            k=self.k,
            tolerance=self.tolerance,
            reduction=self.reduction,
            backend=self.backend,
        )

    def _rows(self, name: str, x: Tensor, mask: Tensor | None) -> Tensor:
        """One row per sample, in the teacher's feature space."""
        check_floating(name, x, min_ndim=2)
        if x.dim() > 3:
            raise ValueError(f"{name} must be (B, D) or (B, N, D), got shape {tuple(x.shape)}")
        if x.dim() == 3:
            mask = check_mask(mask, x.shape[:2], x.device)
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
            x = project(self.projector, x, mask)
        else:
            x = zero_padding(x, mask)
        return x.flatten(1)

    def extra_repr(self) -> str:
        return f"k={self.k}, pool={self.pool!r}, tolerance={self.tolerance}"


def intra_class_similarity(features: Tensor, labels: Tensor) -> Tensor:
    """Mean cosine of each sample with the samples of its class, itself included (M_ICS).

    ``M_ICS = (1/N) Σ_i (1/c_i) Σ_j <s_i, s_j> / (‖s_i‖ ‖s_j‖)`` (section 2), j running over the
    c_i samples with the label of i. Linear in N. A zero vector has cosine 0 with everything.

    Args:
        features: (N, D).
        labels: (N,).

    Returns:
        Scalar, float32 (float64 for float64 features); 0 when N = 0.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype or device, naming the argument.

    >>> features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
    >>> intra_class_similarity(features, torch.tensor([0, 0, 1]))
    tensor(0.6667)
    """
    check_floating("features", features, ndim=2)
    check_labels("labels", labels, features.shape[0], features.device)
    with autocast_off(features):
        x = upcast(first_order_only(features))
        peak = x.detach().abs().amax(1, keepdim=True) if x.shape[1] else x.new_ones(len(x), 1)
        x = x / torch.where(peak == 0, 1, peak)  # squares of huge or tiny features stay in range
        s_hat = torch.where(peak == 0, 0, x / x.norm(dim=1, keepdim=True).clamp_min(0.5))
        segments = label_segments(labels)
        # Σ_ij in class c of ŝ_i·ŝ_j = ‖Σ_i ŝ_i‖², one sum per class
        sums = add_by_class(torch.zeros_like(s_hat), segments, s_hat)  # (C = N, D)
        count = add_by_class(x.new_zeros(len(x)), segments, x.new_ones(len(x)))
        return (sums.square().sum(1) / count.clamp_min(1)).sum() / max(len(x), 1)


def _reduce(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / max(losses.shape[0], 1)


def _same_label(a: Tensor, b: Tensor, tolerance: float | None) -> Tensor:
    """Which labels of ``a`` (N,) and ``b`` (M,) match: (N, M)."""
    if tolerance is None:
        return a[:, None] == b[None, :]
    return (_real(a)[:, None] - _real(b)[None, :]).abs() <= tolerance


def _real(labels: Tensor) -> Tensor:
    """Labels whose differences are right: integers could wrap, halves would round."""
    if labels.dtype in (torch.float32, torch.float64):
        return labels
    return labels.to(torch.float32 if labels.is_floating_point() else torch.float64)


class _KNNFeatureLoss(torch.autograd.Function):
    """Loss per student row (N,); saves Σ_k (student - neighbour_k), the gradient's direction."""

    @staticmethod
    def forward(ctx, student, teacher, student_labels, teacher_labels, k, tolerance):
        if teacher_labels is None:
            teacher_labels = student_labels
        with autocast_off(student):
            search = _Search(student, teacher, student_labels, teacher_labels, k, tolerance)
            losses, residual = search.losses(*search.neighbours())
        ctx.save_for_backward(residual)
        ctx.dtype = student.dtype
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (residual,) = ctx.saved_tensors  # (N, D)
        scale = grad * (2 / residual.shape[1])
        return (residual * scale[:, None]).to(ctx.dtype), None, None, None, None, None


class _KNNFeatureLossTriton(torch.autograd.Function):
    """The same, times ``scale``, by `fastkd.kernels.knn`."""

    @staticmethod
    def forward(ctx, student, teacher, student_labels, teacher_labels, k, tolerance, scale):
        from fastkd.kernels import knn as kernels

        student, teacher = (x if x.stride(1) == 1 else x.contiguous() for x in (student, teacher))
        student_labels, teacher_labels = _comparable(student_labels, teacher_labels)
        # A custom operator costs more than the launches behind it: only where a graph needs one.
        run = kernels.knn_op if torch.compiler.is_compiling() else kernels.knn
        losses, factor, nearest = run(
            student, teacher, student_labels, teacher_labels, k, tolerance, scale
        )
        ctx.save_for_backward(student, teacher, nearest, factor)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        from fastkd.kernels import knn as kernels

        compiling = torch.compiler.is_compiling()
        run = kernels.knn_gradient_op if compiling else kernels.knn_gradient
        student, teacher, nearest, factor = ctx.saved_tensors
        return (run(student, teacher, nearest, factor, grad),) + (None,) * 6


def _comparable(a: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Labels of one type, contiguous, in which differences are right; see `_real`."""
    dtype = a.dtype
    if b is not None and b.dtype != dtype:
        dtype = torch.promote_types(dtype, b.dtype)
    if dtype == torch.bool:
        dtype = torch.uint8
    elif dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32
    a = a.to(dtype).contiguous()
    return a, None if b is None else b.to(dtype).contiguous()


class _Search:
    """The nearest rows of the same label, without a matrix of all distances.

    Matrix products of blocks choose k rows and a few more, among which direct differences in
    float64 decide. On the CPU that is done only where rounding could have swapped the k-th and the
    next row, and where it could have swapped more, for all rows that it could. On a GPU and under
    torch.compile, where nothing may depend on the data, it is done always, and the products are in
    float64: they tell apart what differs in float32, at two to three times the cost on a CPU.
    """

    def __init__(self, student, teacher, student_labels, teacher_labels, k, tolerance):
        self.student, self.teacher = student, teacher
        self.student_labels, self.teacher_labels = student_labels, teacher_labels
        self.k, self.tolerance = k, tolerance
        self.dtype = working_dtype(student)
        self.block_rows = min(MAX_BLOCK_ROWS, max(64, BLOCK_ELEMENTS // student.shape[1]))
        self.may_look = student.device.type == "cpu" and not torch.compiler.is_compiling()
        self.product_dtype = self.dtype if self.may_look else torch.float64
        self.centre: Tensor | None = None
        if not self.may_look or student.shape[0] >= MIN_ROWS_TO_CENTRE:
            # ‖s‖² + ‖t‖² - 2 s·t cancels less the nearer both are to the origin.
            centre = teacher.mean(0, dtype=self.product_dtype)  # (D,)
            self.centre = torch.where(centre.isfinite(), centre, 0)

    def losses(self, nearest: Tensor, found: Tensor, broken: Tensor) -> tuple[Tensor, Tensor]:
        """Loss (N,) and Σ_k (student - neighbour_k) (N, D), by direct difference."""
        size, features = self.student.shape
        losses, residuals = [], []
        all_found = self.may_look and bool(found.all())
        for part in _parts(size, max(1, PAIR_ELEMENTS // features)):
            student = self.student[part].to(self.dtype)
            for j in range(self.k):
                neighbour = self.teacher.index_select(0, nearest[part, j])
                difference = student - neighbour.to(self.dtype)
                if not all_found:
                    difference.masked_fill_(~found[part, j, None], 0)
                squares = difference.square().sum(1)
                if j == 0:
                    residual, loss = difference, squares
                else:
                    residual, loss = residual.add_(difference), loss.add_(squares)
            losses.append(loss)
            residuals.append(residual)
        loss, residual = torch.cat(losses).div_(features), torch.cat(residuals)
        if not self.may_look or bool(broken.any()):
            residual.masked_fill_(broken[:, None], torch.nan)
            loss.masked_fill_(broken, torch.nan)
        return loss, residual

    def neighbours(self) -> tuple[Tensor, Tensor, Tensor]:
        """Neighbours (N, k), whether each exists (N, k), and rows that met a NaN or inf (N,)."""
        size, device = self.student.shape[0], self.student.device
        if self.may_look and self.student.numel() * self.teacher.shape[0] <= SMALL_PROBLEM:
            result = self.all_pairs()
            if result is not None:
                return result
        nearest = torch.zeros(size, self.k, dtype=torch.int64, device=device)
        found = torch.zeros(size, self.k, dtype=torch.bool, device=device)
        broken = torch.zeros(size, dtype=torch.bool, device=device)
        for queries, bank in self.chunks():
            nearest[queries], found[queries], broken[queries] = self.search(queries, bank)
        return nearest, found, broken

    def all_pairs(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """`neighbours` of a small problem in few steps; None where a square may overflow."""
        q, t = self.student.to(self.dtype), self.teacher.to(self.dtype)
        t_norm = torch.linalg.vector_norm(t, dim=1)
        largest = float(torch.linalg.vector_norm(q, dim=1).max() + t_norm.max())
        if not largest**2 < torch.finfo(self.dtype).max / 4:
            return None
        same = _same_label(self.student_labels, self.teacher_labels, self.tolerance)
        d = _scores(t_norm.square_(), q, t).masked_fill_(~same, torch.inf)
        best, nearest = d.topk(min(self.k + 1, len(t)), largest=False)
        if self.k < len(t):
            slack = self.rounding(self.dtype) * largest**2 + self.underflow(self.dtype)
            unsure = best[:, self.k] - best[:, self.k - 1] <= slack  # NaN where both are missing
            if bool(unsure.any()):
                rows = unsure.nonzero().squeeze(1)
                near = d[rows] <= best[rows, self.k - 1, None] + slack
                nearest[rows, : self.k] = self.nearest_of(rows, torch.arange(len(t)), near)
        found = best[:, : self.k] < torch.inf
        return nearest[:, : self.k], found, found.new_zeros(len(q))

    def chunks(self) -> Iterator[tuple[_Rows, _Rows]]:
        """Student rows, and the teacher rows among which their labels are."""
        size, bank_size = self.student.shape[0], self.teacher.shape[0]
        if not self.may_look or size <= self.block_rows:
            yield from ((part, slice(0, bank_size)) for part in _parts(size, self.block_rows))
            return
        # Grouped by label, a chunk of rows meets only the part of the bank around its labels.
        dtype = torch.promote_types(self.student_labels.dtype, self.teacher_labels.dtype)
        if self.tolerance is not None:
            dtype = torch.float64
        labels, queries = self.student_labels.to(dtype).sort(stable=True)
        bank_labels, bank = self.teacher_labels.to(dtype).sort(stable=True)
        for part in _parts(size, self.block_rows):
            low, high = labels[part][0], labels[part][-1]
            if self.tolerance is not None:
                # Wider than the tolerance by more than any rounding of a difference of labels.
                low = low - self.tolerance - 1e-5 * (low.abs() + self.tolerance)
                high = high + self.tolerance + 1e-5 * (high.abs() + self.tolerance)
            first = int(torch.searchsorted(bank_labels, low))
            last = int(torch.searchsorted(bank_labels, high, right=True))
            if first < last:
                yield queries[part], bank[first:last]

    def search(self, queries: _Rows, bank: _Rows) -> tuple[Tensor, Tensor, Tensor]:
        """`neighbours` of some rows among some of the bank."""
        q = self.rows(self.student, queries)  # (Q, D)
        q_squared = _squared_norm(q)
        keep = self.k + EXTRA_CANDIDATES
        best = q.new_full((len(q), keep), torch.inf)
        chosen = torch.zeros_like(best, dtype=torch.int64)
        for block in _split(bank, self.block_rows):
            score = self.scores(q, q_squared, block)
            score.masked_fill_(~self.same(queries, block), torch.inf)
            score, column = self.smallest(score, keep)
            column = column + block.start if isinstance(block, slice) else block[column]
            best, order = self.smallest(torch.cat([best, score], 1), keep)
            chosen = torch.cat([chosen, column], 1).gather(1, order)

        found = best[:, : self.k] < torch.inf
        broken = best[:, 0] == -torch.inf
        if not self.may_look or not bool(q_squared.isfinite().all()):
            broken |= ~q.isfinite().all(1)
        if self.may_look:
            self.settle(queries, bank, q_squared, best, chosen, broken)
        else:
            chosen = self.reorder(queries, best, chosen)
        return chosen[:, : self.k], found, broken & found[:, 0]

    def smallest(self, score: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The n smallest of each row, and where; the first of equals where `settle` is not used."""
        if self.may_look:
            return score.topk(min(n, score.shape[1]), largest=False)
        score, column = score.sort(dim=1, stable=True)
        return score[:, :n], column[:, :n]

    def scores(self, q: Tensor, q_squared: Tensor, bank: _Rows) -> Tensor:
        """‖q - t‖² - ‖q‖² for a block of the bank (Q, M); -inf where t holds a NaN or inf."""
        t = self.rows(self.teacher, bank)
        t_squared = _squared_norm(t)
        score = _scores(t_squared, q, t)
        if self.may_look and bool((t_squared.max() + q_squared.max()).isfinite()):
            return score
        # Finite rows whose squares overflow stay candidates, far away.
        largest = torch.finfo(score.dtype).max
        score.nan_to_num_(largest, largest, -largest)
        return score.masked_fill_(~t.isfinite().all(1), -torch.inf)

    def settle(
        self,
        queries: _Rows,
        bank: _Rows,
        q_squared: Tensor,
        best: Tensor,
        chosen: Tensor,
        broken: Tensor,
    ) -> None:
        """Choose again, in place, where rounding could have changed the choice."""
        following, last = best[:, self.k], best[:, -1]
        limit = self.limit(q_squared, best[:, self.k - 1])
        unsure = ~((following > limit) | (following == torch.inf) | broken)
        if not bool(unsure.any()):
            return
        # Where the last candidate is out of reach, one of the candidates it is.
        few = (last > limit) | (last == torch.inf)
        index = (unsure & few).nonzero().squeeze(1)
        rows = index + queries.start if isinstance(queries, slice) else queries[index]
        # Ascending, here and below, so that the lower of two equals comes first.
        candidates, order = chosen[index].sort(1)
        near = (best <= limit[:, None])[index].gather(1, order)
        chosen[index, : self.k] = self.nearest_of(rows, candidates, near)

        index = (unsure & ~few).nonzero().squeeze(1)
        rows = index + queries.start if isinstance(queries, slice) else queries[index]
        bank = torch.arange(bank.stop) if isinstance(bank, slice) else bank.sort().values
        for part in _parts(len(rows), max(1, BLOCK_ELEMENTS // (2 * len(bank)))):
            chosen[index[part], : self.k] = self.exact(rows[part], bank)

    def rounding(self, dtype: torch.dtype) -> float:
        """Bound of the error of two scores by rounding, relative to (‖q‖ + ‖t‖)²."""
        features = self.student.shape[1]
        sums = min(features, PRODUCT_FEATURES) + features // PRODUCT_FEATURES
        return (sums + 8) * torch.finfo(dtype).eps

    def underflow(self, dtype: torch.dtype) -> float:
        """Bound of the error of two scores by underflow."""
        return 8 * self.student.shape[1] * torch.finfo(dtype).tiny

    def limit(self, q_squared: Tensor, kth: Tensor) -> Tensor:
        """The largest score that a row as near as the k-th can have, whatever was rounded."""
        # Such a row is no farther out than this.
        reach = q_squared.sqrt() + (kth + q_squared).clamp_min(0).sqrt()
        rounding = 2 * self.rounding(kth.dtype) * (q_squared + reach.square())
        largest = torch.finfo(kth.dtype).max
        return (kth + rounding + self.underflow(kth.dtype)).nan_to_num_(largest, largest)

    def exact(self, queries: Tensor, bank: Tensor) -> Tensor:
        """The k nearest (Q, k): direct differences of all that float64 does not rule out."""
        q = self.student[queries].double()
        d = torch.empty(len(queries), len(bank), dtype=torch.float64)
        for part in _parts(len(bank), self.block_rows):
            t = self.teacher[bank[part]].double()
            d[:, part] = _scores(_squared_norm(t), q, t)
        largest = torch.finfo(d.dtype).max
        d.nan_to_num_(largest, largest).masked_fill_(~self.same(queries, bank), torch.inf)
        kth = d.topk(self.k, largest=False).values[:, -1]
        return self.nearest_of(queries, bank, d <= self.limit(_squared_norm(q), kth)[:, None])

    def nearest_of(self, queries: Tensor, bank: Tensor, near: Tensor) -> Tensor:
        """The k nearest (Q, k) by direct difference of those in ``bank`` (Q, M) that are ``near``.

        Of equals the first; at least k are near.
        """
        bank = bank.expand_as(near)
        row, column = near.nonzero(as_tuple=True)
        queries, others = queries[row], bank[row, column]
        d = torch.full(near.shape, torch.inf, dtype=torch.float64)
        largest = torch.finfo(d.dtype).max
        for part in _parts(len(row), max(1, PAIR_ELEMENTS // self.student.shape[1])):
            difference = self.student[queries[part]].double() - self.teacher[others[part]]
            d[row[part], column[part]] = difference.square_().sum(1).clamp_max_(largest)
        return bank.gather(1, _first(d, self.k))

    def reorder(self, queries: _Rows, best: Tensor, chosen: Tensor) -> Tensor:
        """The candidates (Q, keep) sorted by direct difference, the lower row first."""
        chosen, order = chosen.sort(1)
        missing = best.gather(1, order) == torch.inf
        q = self.student[queries].double()
        distance = []
        for part in _parts(len(q), max(1, BLOCK_ELEMENTS // (chosen.shape[1] * q.shape[1]))):
            t = self.teacher[chosen[part]]  # (b, keep, D)
            distance.append((q[part, None] - t).square_().sum(2))
        # Only what is missing may be inf: neither a square that overflows nor a NaN.
        largest = torch.finfo(torch.float64).max
        direct = torch.cat(distance) if distance else best.double()
        direct = direct.nan_to_num_(largest, largest).masked_fill_(missing, torch.inf)
        return chosen.gather(1, direct.argsort(dim=1, stable=True))

    def same(self, queries: _Rows, bank: _Rows) -> Tensor:
        """Which labels match (Q, M)."""
        return _same_label(self.student_labels[queries], self.teacher_labels[bank], self.tolerance)

    def rows(self, x: Tensor, index: _Rows) -> Tensor:
        """Rows of ``x`` in the working dtype, centred where that is done."""
        x = x[index].to(self.product_dtype)
        return x if self.centre is None else x - self.centre


def _first(d: Tensor, k: int) -> Tensor:
    """The columns of the k smallest (Q, k), the first of equals; spoils ``d``."""
    chosen = [d.argmin(1, keepdim=True)]
    while len(chosen) < k:
        d.scatter_(1, chosen[-1], torch.inf)
        chosen.append(d.argmin(1, keepdim=True))
    return torch.cat(chosen, 1)


def _scores(t_squared: Tensor, q: Tensor, t: Tensor) -> Tensor:
    """‖t‖² - 2 q·t (Q, M)."""
    first, *more = zip(q.split(PRODUCT_FEATURES, 1), t.split(PRODUCT_FEATURES, 1), strict=True)
    score = torch.addmm(t_squared, first[0], first[1].T, alpha=-2)
    for a, b in more:
        score.addmm_(a, b.T, alpha=-2)
    return score


def _squared_norm(x: Tensor) -> Tensor:
    # In parts, because one long running sum would lose digits.
    norms = [torch.linalg.vector_norm(part, dim=1) for part in x.split(4096, dim=1)]
    return sum((norm.square_() for norm in norms[1:]), norms[0].square_())


def _split(index: _Rows, step: int) -> Sequence[_Rows]:
    """The same rows in runs of at most ``step``."""
    if isinstance(index, slice):
        return _parts(index.stop, step)
    return list(index.split(step))


def _parts(size: int, step: int) -> list[slice]:
    """0..size in slices of at most ``step``."""
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]
