"""Canonical correlations and their gradient, without the derivative of an eigenvector.

Let A (m, Ds) and B (m, Dt) be the centred student and teacher features over √(m−1). Let R_s with
R_s R_sᵀ = (AᵀA + r_s·I)⁻¹ be any whitening of the student, R_t likewise of the teacher, and
M = R_tᵀBᵀA R_s. Then corr = tr (MᵀM)^½ and, with the polar factor W = M (MᵀM)^{−½},

    ∂corr/∂A = B·R_t W R_sᵀ − A·R_s (MᵀM)^½ R_sᵀ = B·F − A·C·F,  F = R_t W R_sᵀ

with the regression C = R_s R_sᵀ AᵀB of the teacher on the student, since (MᵀM)^½ = MᵀW. Both roots
are those of `fastkd.linalg.roots.symmetric_roots`. There are two plans:

- covariances, for m > D: (D, D) matrices, whitened by Cholesky factors.
- observations, for m ≤ D: A = L_s Q_s and B = L_t Q_t with (m, m) Cholesky factors of the Gram
  matrices. L_s and L_t take the place of A and B, which are their rotations.

MᵀM squares, so small singular values lose digits. On a CPU a second root has them whole: that of
what the large ones leave of M. Singular values up to 1.2e-7 of (Σσ⁴)^¼, which is the largest or
little more, and those of rounding size, are zero: W and the gradient are zero along their
directions, where the loss has a kink.
"""

import importlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fastkd._core.numerics import values_readable, working_dtype
from fastkd._core.products import symmetric_product
from fastkd.linalg.roots import eigh, symmetric_roots

if TYPE_CHECKING:
    from fastkd.distributed import Ranks

# A GPU uses (m, m) matrices up to this many times D observations, else (D, D) products.
FEW_OBSERVATIONS = 1 / 6
# Elements of an item's features from which a CPU solves the item alone, so that it stays in the
# cache, and without its masked rows. Smaller items take fewer steps as a batch.
LARGE_ITEM = 2**18
# Elements of features that a CPU centres and converts at a time.
CHUNK = 2**21
# Columns of a block of a symmetric product, whose lower half is multiplied.
BLOCK = 96
# Float32 products compute a large item's gradient where their error stays below this fraction.
FLOAT32_ERROR = 3e-6
# cuBLAS solves more triangular systems at a time one by one inside, slowly.
SOLVED_AT_ONCE = 8
EPSILON = torch.finfo(torch.float64).eps
# Eigenvalues of MᵀM up to this fraction of the largest have lost digits that the gradient needs.
SMALL = 1e-10
TINY = 1e-300


class Moments(NamedTuple):
    """Float64 sums over observations, of each item; scatters are about the mean."""

    observations: Tensor  # (batch)
    mean_s: Tensor  # (batch, 1, Ds)
    mean_t: Tensor  # (batch, 1, Dt)
    scatter_s: Tensor  # (batch, Ds, Ds)
    scatter_t: Tensor  # (batch, Dt, Dt)
    scatter_ts: Tensor  # (batch, Dt, Ds)


# Correlation (batch), gradient (batch, m, Ds), moments of a problem with memory.
Solution = tuple[Tensor, Tensor | None, Moments | None]


class Options(NamedTuple):
    """Options of the loss."""

    ridges: Sequence[float]  # (student's, teacher's)
    top_k: int | None = None
    digits: bool = False  # products by `fastkd.kernels.cca` instead of float64
    # Processes that hold parts of the observations: their moments are added.
    ranks: "Ranks | None" = None


class Problem(NamedTuple):
    """Items that are solved together."""

    student: Tensor  # (batch, m, Ds)
    teacher: Tensor  # (batch, m, Dt)
    mask: Tensor | None  # (batch, m)
    options: Options
    want_grad: bool
    # Moments of earlier observations, which are constants. Solved by covariances in float64.
    memory: Moments | None = None


def moments_are_less(rows: int, student: Tensor, teacher: Tensor, ranks: "Ranks") -> bool:
    """Whether adding moments over the processes sends fewer bytes than gathering the features.

    A process has up to ``rows`` observations. Moments are reduced in a ring; features are sent to
    each of the other processes.
    """
    d_s, d_t = student.shape[-1], teacher.shape[-1]
    moments = 2 * 8 * (d_s**2 + d_t**2 + d_s * d_t)
    features = ranks.size * rows * (d_s + d_t) * student.element_size()
    return moments < features and ranks.size * rows > min(d_s, d_t)


def solve(problem: Problem) -> Solution:
    """Correlation in float64 and gradient in the working dtype, of each item.

    With memory also the moments of the memory and the batch together. The gradient is then N/m
    times that with respect to the batch's m rows, N being the number of all observations: its
    scale is that of the gradient of a batch of m.
    """
    student, want_grad = problem.student, problem.want_grad
    correlations, gradients, moments = [], [], []
    for part, rows in _parts(problem):
        corr, ds, total = _solved(part)
        correlations.append(corr)
        if total is not None:
            moments.append(total)
        if ds is not None:
            if rows is not None:
                whole = ds.new_zeros(len(ds), *student.shape[1:])
                whole[:, rows] = ds
                ds = whole
            gradients.append(ds)
    corr = _joined(correlations)
    totals = Moments(*(_joined(list(x)) for x in zip(*moments, strict=True))) if moments else None
    return corr, _joined(gradients) if want_grad else None, totals


def _parts(problem: Problem) -> list[tuple[Problem, Tensor | None]]:
    """Items that are solved together, and which of their rows (m) are left; None for all."""
    student, teacher, mask, options, want_grad, memory = problem
    (m, d_s), d_t = student.shape[-2:], teacher.shape[-1]
    large = m * d_s >= LARGE_ITEM and m > min(d_s, d_t) and options.ranks is None
    if not large or not values_readable(student):
        return [(problem, None)]
    parts = []
    for i in range(len(student)):
        s, t = student[i, None], teacher[i, None]
        rows = None if mask is None or bool(mask[i].all()) else mask[i]
        if rows is not None:
            s, t = s[:, rows], t[:, rows]
        own = memory and Moments(*(x[i, None] for x in memory))
        parts.append((Problem(s, t, None, options, want_grad, own), rows))
    return parts


def solve_in_graph(problem: Problem) -> Solution:
    """`solve` under torch.compile: one operator, so that the plan can read values there too."""
    student, teacher, mask, options, want_grad, memory = problem
    earlier = list(memory or [])
    corr, *rest = _operator(student, teacher, mask, *options[:3], want_grad, earlier)
    gradient = rest.pop(0) if want_grad else None
    return corr, gradient, Moments(*rest) if rest else None


@torch.library.custom_op("fastkd::cca", mutates_args=())
def _operator(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    ridges: Sequence[float],
    top_k: int | None,
    digits: bool,
    want_grad: bool,
    memory: Sequence[Tensor],
) -> list[Tensor]:
    earlier = Moments(*memory) if memory else None
    options = Options(ridges, top_k, digits)
    corr, gradient, totals = solve(Problem(student, teacher, mask, options, want_grad, earlier))
    return [corr, *([] if gradient is None else [gradient]), *(totals or [])]


@_operator.register_fake
def _(student, teacher, mask, ridges, top_k, digits, want_grad, memory):
    corr = student.new_empty(student.shape[0], dtype=torch.float64)
    ds = student.new_empty(student.shape, dtype=working_dtype(student))
    return [corr, *([ds] if want_grad else []), *map(torch.empty_like, memory)]


def correlations(x: Tensor, y: Tensor, mask: Tensor | None, ridges: tuple[float, float]) -> Tensor:
    """Correlations (*, min(m−1, Dx, Dy)), descending, from singular vectors of the features."""
    count = max(0, min(x.shape[-2] - 1, x.shape[-1], y.shape[-1]))
    rows = _Rows(Problem(x, y, mask, Options(ridges), want_grad=False))
    centred = rows.centred()
    finite = torch.stack([a.isfinite().flatten(-2).all(-1) for a in centred]).all(0)
    white = []
    for a, ridge, features in zip(centred, ridges, (x, y), strict=True):
        a = a.masked_fill(~finite[..., None, None], 0.0) * rows.share.sqrt()  # LAPACK rejects NaN
        if a.shape[-2] < a.shape[-1]:  # the same singular values and left vectors
            a = torch.linalg.qr(a.mT, mode="r").R.mT
        left, values, _ = torch.linalg.svd(a, full_matrices=False)
        keep = values > _zero_deviation(features, ridge) * values[..., :1]
        kept = torch.where(keep, values, 1.0)
        white.append(left * (kept * (kept.square() + ridge).rsqrt() * keep).unsqueeze(-2))
    values = torch.linalg.svdvals(white[0].mT @ white[1])[..., :count].clamp_max(1.0)
    return values.masked_fill(~finite.unsqueeze(-1), torch.nan)


def _zero_deviation(features: Tensor, ridge: float) -> float:
    """Fraction of the largest standard deviation up to which a direction counts as constant.

    It is the rounding error of float64 or, without a ridge, of the features themselves.
    """
    work = max(features.shape[-2:]) * EPSILON
    return work if ridge > 0 else max(work, 10 * torch.finfo(working_dtype(features)).eps)


def _by_observations(problem: Problem) -> bool:
    """Whether (m, m) matrices are the smaller ones.

    With ``ranks`` the choice must not depend on a process's own observations.
    """
    student, teacher, _, options, _, memory = problem
    if options.ranks is not None or memory is not None:
        return False
    m, smaller = student.shape[-2], min(student.shape[-1], teacher.shape[-1])
    if not student.is_cuda:
        return 0 < m <= smaller
    return 0 < m <= FEW_OBSERVATIONS * smaller and student.dtype != torch.float64


def _solved(problem: Problem) -> Solution:
    """`solve` of one part."""
    student, teacher, _, _, want_grad, memory = problem
    if 0 in (len(student), student.shape[-1], teacher.shape[-1]):
        nothing = student.new_zeros(len(student), dtype=torch.float64)
        gradient = student.new_zeros(student.shape, dtype=working_dtype(student))
        moments = memory and Moments(*(x.clone() for x in memory))
        return nothing, gradient if want_grad else None, moments
    rows = _Rows(problem)
    if _by_observations(problem):
        (left_s, right_s), (left_t, _) = (_rotated(x * rows.share.sqrt()) for x in rows.centred())
        pairs = ((left_s, left_s), (left_t, left_t), (left_t, left_s))
        corr, factors = _from_covariances([x.mT @ y for x, y in pairs], problem)
        if factors is None:
            return corr, None, None
        weights = (left_t @ factors.of_teacher).baddbmm_(left_s, factors.of_student, alpha=-1)
        few_ds = _masked(weights * rows.share.sqrt() @ right_s, problem.mask)
        return corr, few_ds.to(working_dtype(problem.student)), None
    covariances, totals = rows.covariances()
    corr, factors = _from_covariances(covariances, problem)
    del covariances
    return corr, None if factors is None else rows.gradient(factors), totals


class _Factors(NamedTuple):
    """The gradient's, B·F − A·C·F."""

    of_teacher: Tensor  # F
    of_student: Tensor  # C·F
    dtype: torch.dtype  # of its products


def _from_covariances(
    covariances: list[Tensor], problem: Problem
) -> tuple[Tensor, _Factors | None]:
    """Correlation and gradient of Σ_ss, Σ_tt and Σ_ts, whose ridges are added in place."""
    *sigmas, sigma_ts = covariances
    options = problem.options
    whiten_s, whiten_t = _whitenings(sigmas, problem)
    whitened = whiten_s.transposed(whiten_t.transposed(sigma_ts).mT).mT  # M (batch, Dt, Ds)
    student, _, mask, _, want_grad, memory = problem
    most = min(*whitened.shape[-2:], options.top_k or whitened.shape[-1])  # correlations
    bound = student.new_full((len(student),), most, dtype=torch.float64)
    if memory is None:  # whose faded moments have full rank, whatever their number
        observed = count_observed(student, mask, options.ranks)
        bound = torch.minimum(bound, (observed - 1).clamp_min(0))
    corr, polar = _polar(whitened, _rounding_of(whiten_s, whiten_t), bound, options)
    corr = torch.minimum(corr, bound)  # which rounding may exceed
    if not want_grad:
        return corr, None
    back = whiten_s(polar.mT).mT  # W R_sᵀ
    regressed = _product(whitened.mT, back, options.digits)
    factors = _Factors(whiten_t(back), whiten_s(regressed), torch.float64)
    large = len(student) == 1 and student.numel() >= LARGE_ITEM and student.dtype != torch.float64
    if large and student.is_cpu and values_readable(student):
        # ‖B·F − A·C·F‖² is that of W R_sᵀ less that of MᵀW R_sᵀ, but for the ridges.
        square = back.square().sum() - regressed.square().sum()
        terms = torch.zeros_like(square)
        for x, i in ((factors.of_teacher, 1), (factors.of_student, 0)):
            squares = x.square().sum(-1)
            square -= options.ridges[i] * squares.sum()
            terms += (sigmas[i].diagonal(dim1=-2, dim2=-1) * squares).sum()
        if bool(torch.finfo(torch.float32).eps ** 2 * terms <= FLOAT32_ERROR**2 * square):
            return corr, factors._replace(dtype=torch.float32)
    return corr, factors


def _rotated(x: Tensor) -> tuple[Tensor, Tensor]:
    """L (m, m) and Q (m, D) with X = LQ; rows of Q are orthonormal, or 0 where X has no variance.

    By two Cholesky factorisations: the first has small directions with few digits, the second has
    them whole. Shifts of rounding size let them succeed; errors of D products may all be alike.
    """
    lower = None
    for _ in range(2):
        gram = symmetric_product(x, x.mT)
        gram.diagonal(dim1=-2, dim2=-1).add_(
            (x.shape[-1] * EPSILON * _trace(gram)[:, None]).clamp_min(TINY)
        )
        factor = _cholesky(gram)
        x = _solve(factor, x, False)
        if lower is None:
            lower = factor
        else:  # of near-orthonormal rows: without columns of dependent ones
            pivots = factor.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
            dependent = pivots.square() <= 64 * factor.shape[-1] * EPSILON
            lower = lower @ factor.masked_fill(dependent, 0.0)
    assert lower is not None
    return lower, x


class _Whitening(NamedTuple):
    """R with R Rᵀ = (Σ + r·I)⁻¹: L⁻ᵀ of a Cholesky factor L; inverse roots of some items."""

    factor: Tensor  # (batch, D, D) L
    # Smallest fraction (batch) of a column's variance that the columns before it don't explain.
    pivot: Tensor
    inverse: Tensor | None = None  # (items, D, D) R of `_inverse_root`
    items: Tensor | None = None  # which, (batch); None for all

    def __call__(self, y: Tensor) -> Tensor:
        """R y."""
        return self._applied(self.factor.mT, self.inverse, y, upper=True)

    def transposed(self, y: Tensor) -> Tensor:
        """Rᵀ y."""
        inverse = None if self.inverse is None else self.inverse.mT
        return self._applied(self.factor, inverse, y, upper=False)

    def _applied(self, factor: Tensor, inverse: Tensor | None, y: Tensor, upper: bool) -> Tensor:
        if inverse is None:
            return _solve(factor, y, upper)
        if self.items is None:
            return inverse @ y
        product = _solve(factor, y, upper)
        product[self.items] = inverse @ y[self.items]
        return product


def _solve(factor: Tensor, y: Tensor, upper: bool) -> Tensor:
    parts = [(factor, y)]
    if y.is_cuda and len(y) > SOLVED_AT_ONCE:
        parts = [*zip(factor.split(SOLVED_AT_ONCE), y.split(SOLVED_AT_ONCE), strict=True)]
    return _joined([torch.linalg.solve_triangular(f, x, upper=upper) for f, x in parts])


def _whitenings(sigmas: list[Tensor], problem: Problem) -> list[_Whitening]:
    """Cholesky's; inverse roots without directions of rounding size where the ridge is smaller."""
    found = []
    sides = zip(sigmas, problem.options.ridges, (problem.student, problem.teacher), strict=True)
    for sigma, ridge, features in sides:
        fraction = max(_zero_deviation(features, ridge) ** 2, 64 * EPSILON)
        variances = sigma.diagonal(dim1=-2, dim2=-1)
        if ridge == 0:
            none_lost = torch.ones_like(variances[:, 0])
            found.append(_Whitening(sigma, none_lost, _inverse_root(sigma, fraction)))
            continue
        # A ridge below the rounding error of a variance would let the factorisation fail. Each
        # column has its own bound: a large column must not raise the ridge of all others.
        rounding = 4 * sigma.shape[-1] * EPSILON * variances
        inverse, items = None, (rounding > ridge).any(-1)
        if values_readable(sigma) and bool(items.any()):
            ridged = sigma[items]
            ridged.diagonal(dim1=-2, dim2=-1).add_(ridge)
            inverse = _inverse_root(ridged, fraction)
        variances += rounding.clamp_min(ridge)
        factor = _cholesky(sigma)
        pivot = (factor.diagonal(dim1=-2, dim2=-1).square() / variances).amin(-1)
        if inverse is not None:
            pivot = pivot.masked_fill(items, 1.0)
        found.append(_Whitening(factor, pivot, inverse, items))
    return found


def _inverse_root(sigma: Tensor, fraction: float) -> Tensor:
    """R with R Rᵀ = Σ⁻¹, without eigenvalues up to ``fraction`` of the largest.

    The eigenvectors are those of Σ with variances of 1 to 4: the rounding errors of a large column
    must not reach the others. Columns up to ``fraction`` of the largest variance stay small.
    """
    variances = sigma.diagonal(dim1=-2, dim2=-1)
    largest = variances.amax(-1, keepdim=True)
    sizes = torch.where(variances > fraction * largest, variances, largest)
    scale = sizes.clamp_min(TINY).log2().div(2).floor().exp2()
    scaled = sigma / scale.unsqueeze(-1) / scale.unsqueeze(-2)
    inverse = symmetric_roots(scaled, sigma.new_full((len(sigma),), fraction), False)[1]
    return inverse / scale.unsqueeze(-1)


def _cholesky(x: Tensor) -> Tensor:
    """Lower Cholesky factor without synchronising; NaN where x is not positive definite."""
    factor, failed = torch.linalg.cholesky_ex(x)
    return factor.masked_fill_((failed != 0)[..., None, None], torch.nan)


def _trace(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1).sum(-1)


def _rounding_of(whiten_s: _Whitening, whiten_t: _Whitening) -> Tensor | None:
    """Fraction (batch) of MᵀM's largest eigenvalue that is rounding error; on a GPU the default.

    Whitening multiplies the rounding errors of a covariance.
    """
    if whiten_s.factor.is_cuda:
        return None
    size = max(x.factor.shape[-1] for x in (whiten_s, whiten_t))
    rounding = 16 * size * EPSILON**2 / (whiten_s.pivot * whiten_t.pivot)
    return rounding.clamp(64 * EPSILON, 1e-2)


def _polar(
    m: Tensor, rounding: Tensor | None, most: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """tr (MᵀM)^½ and W = M (MᵀM)^{−½}; with ``top_k`` those of the largest singular values.

    ``most`` (batch): how many singular values can be positive.
    """
    if m.shape[-2] < m.shape[-1]:
        corr, polar = _polar(m.mT, rounding, most, options)
        return corr, polar.mT
    square = _product(m.mT, m, options.digits, symmetric=True)
    if options.top_k is not None:
        values, vectors = (x[..., -options.top_k :] for x in eigh(square))
        fraction = 64 * EPSILON if rounding is None else rounding.unsqueeze(-1)
        dropped = values <= fraction * values[..., -1:]
        roots = values.masked_fill(dropped, 0.0).sqrt()
        inverse = vectors * roots.reciprocal().masked_fill(dropped, 0.0).unsqueeze(-2)
        return roots.sum(-1), m @ inverse @ vectors.mT
    large = None if rounding is None else rounding.clamp_min(SMALL)
    root, inverse, rank = symmetric_roots(square, large, options.digits)
    corr, polar = _trace(root), _product(m, inverse, options.digits)
    if rounding is None or not values_readable(m):
        return corr, polar
    few = (rank < most) & (rounding < SMALL)
    if bool(few.any()):
        w = polar[few]
        rest = m[few] - w @ root[few]
        rest -= w @ (w.mT @ rest)
        # A root of all of M, with its large singular values equal and little above the others.
        size = SMALL * square[few].square().sum((-2, -1)).sqrt()
        level = symmetric_product(w.mT, w).mul_(size[:, None, None])
        level += symmetric_product(rest.mT, rest)
        root, inverse, _ = symmetric_roots(level, rounding[few] / SMALL, options.digits)
        corr[few] += _trace(root) - rank[few] * size.sqrt()
        polar[few] += rest @ inverse
    return corr, polar


class _Rows:
    """Features of a problem, centred in float64; on a CPU a chunk of rows at a time."""

    def __init__(self, problem: Problem):
        student, teacher, mask, options, _, memory = problem
        self.problem = problem
        count = count_observed(student, mask, options.ranks).double()[..., None, None]
        if memory is not None:
            count = count + memory.observations[:, None, None]
        self.count = count  # N (*, 1, 1), of all processes and the memory
        self.share = (count - 1).clamp_min(1).reciprocal()
        *batch, m, d_s = student.shape
        width = math.prod(batch) * (d_s + teacher.shape[-1])
        step = max(1, CHUNK // max(1, width) if student.is_cpu else m)
        self.chunks = [slice(i, i + step) for i in range(0, m, step)]
        self.means = []  # (*, 1, D)
        for i, x in enumerate((student, teacher)):
            total = x.new_zeros(*x.shape[:-2], 1, x.shape[-1], dtype=torch.float64)
            for rows in self.chunks:
                real = None if mask is None else mask[..., rows]
                total += _masked(x[..., rows, :], real).double().sum(-2, keepdim=True)
            if options.ranks is not None:
                total = options.ranks.sum(total)
            if memory is not None:
                total = total + memory.observations[:, None, None] * memory[1 + i]
            self.means.append(total / count.clamp_min(1))

    def centred(
        self, rows: slice = slice(None), dtype: torch.dtype = torch.float64
    ) -> list[Tensor]:
        """Student's and teacher's rows minus their mean, zero where masked."""
        mask = None if self.problem.mask is None else self.problem.mask[..., rows]
        centred = []
        for x, mean in zip(self.problem[:2], self.means, strict=True):
            apart = x[..., rows, :].to(dtype, copy=True).sub_(mean.to(dtype))
            if x.dtype == torch.float64:  # a constant minus its rounded mean
                apart.masked_fill_(apart.abs() <= 16 * EPSILON * mean.abs(), 0.0)
            centred.append(_masked(apart, mask))
        return centred

    def covariances(self) -> tuple[list[Tensor], Moments | None]:
        """Σ_ss, Σ_tt and Σ_ts, and with a memory the moments of all observations."""
        scatters, ranks = self.scatters(), self.problem.options.ranks
        if ranks is not None:
            scatters = [ranks.sum(x) for x in scatters]
        if self.problem.memory is None:
            return [x.mul_(self.share) for x in scatters], None
        totals = self.with_memory(scatters)
        return [x * self.share for x in totals[3:]], totals

    def scatters(self) -> list[Tensor]:
        """AᵀA, BᵀB and BᵀA (batch, D, D) of the centred rows."""
        d_s, d_t = (x.shape[-1] for x in self.means)
        x = self.means[0]
        totals = [x.new_zeros(len(x), *shape) for shape in ((d_s, d_s), (d_t, d_t), (d_t, d_s))]
        for rows in self.chunks:
            a, b = self.centred(rows)
            for total, x, y in zip(totals, (a, b, b), (a, b, a), strict=True):
                if self.problem.options.digits:
                    total += _product(x.mT, y, True, symmetric=x is y)
                else:
                    _add_product(total, x, y)
        return totals

    def with_memory(self, scatters: list[Tensor]) -> Moments:
        """Moments of memory and batch; a batch with NaN leaves the memory unchanged."""
        memory = self.problem.memory
        assert memory is not None
        root = memory.observations[:, None, None].sqrt()
        # Rows that stand for the memory's means: their products move its scatters to the new mean.
        moved = [root * (old - x) for old, x in zip(memory[1:3], self.means, strict=True)]
        pairs = ((0, 0), (1, 1), (1, 0))
        new = [self.count.flatten(), *self.means]
        for total, old, (i, j) in zip(scatters, memory[3:], pairs, strict=True):
            new.append((total + old).baddbmm_(moved[i].mT, moved[j]))
        return Moments(*new)

    def gradient(self, factors: _Factors) -> Tensor:
        """B·F − A·C·F. With a memory times N/m: its scale is that of a batch of m rows."""
        student, _, mask, options, _, memory = self.problem
        scale = self.share
        if memory is not None:
            own = self.count - memory.observations[:, None, None]
            scale = scale * self.count / own.clamp_min(1)
        dtype = factors.dtype
        ds = student.new_empty(student.shape, dtype=working_dtype(student))
        f, cf = (x * scale for x in factors[:2])
        # A and B of float32 are off by the rounding error of the means.
        moved = [x.to(dtype).double() - x for x in self.means]
        shift = (moved[1] @ f).baddbmm_(moved[0], cf, alpha=-1).to(ds.dtype)
        f, cf = f.to(dtype), cf.to(dtype)
        for rows in self.chunks:
            a, b = self.centred(rows, dtype)
            part = _product(b, f, options.digits)
            if options.digits:
                part -= _product(a, cf, True)
            else:
                part.baddbmm_(a, cf, alpha=-1)
            torch.add(part, shift, out=ds[..., rows, :])
        return _masked(ds, mask)


def _product(x: Tensor, y: Tensor, digits: bool, symmetric: bool = False) -> Tensor:
    """XY (batch, M, N); of a ``symmetric`` one the lower half may be computed."""
    if digits:
        importlib.import_module("fastkd.kernels.cca")  # registers the operator
        return torch.ops.fastkd.digit_product(x, y, symmetric)
    return symmetric_product(x, y) if symmetric else x @ y


def _add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """total += XᵀY; of a large X with itself the lower blocks alone are multiplied."""
    n = total.shape[-1]
    if x is not y or n < 2 * BLOCK or len(x) > 1 or not x.is_cpu:
        total.baddbmm_(x.mT, y)
        return
    for start in range(0, n, BLOCK):
        end = min(start + BLOCK, n)
        lower = total[0, start:, start:end]
        lower.addmm_(x[0, :, start:].T, x[0, :, start:end])
        total[0, start:end, end:] = lower[end - start :].T


def count_observed(x: Tensor, mask: Tensor | None, ranks: "Ranks | None") -> Tensor:
    """Number of real observations: (*), or one number for all items."""
    if mask is None:
        count = torch.full(() if ranks is None else x.shape[:-2], x.shape[-2], device=x.device)
    else:
        count = mask.sum(-1)
    return count if ranks is None else ranks.sum(count)


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """``x`` with zeros in masked rows, even where they hold NaN."""
    return x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
