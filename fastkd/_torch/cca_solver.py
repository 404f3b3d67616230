"""Canonical correlations and their gradient, without the derivative of an eigenvector.

Let A (m, Ds) and B (m, Dt) be the centred student and teacher features over √(m−1). Let R_s with
R_s R_sᵀ = (AᵀA + r_s·I)⁻¹ be any whitening of the student, R_t likewise of the teacher, and
M = R_tᵀBᵀA R_s with singular values σ and vectors U, V. Then corr = Σσ and

    ∂corr/∂A = B·(R_t U)(R_s V)ᵀ − A·(R_s V)·diag(σ)·(R_s V)ᵀ.

With fewer observations than dimensions (m, m) matrices are used instead: with A = QSPᵀ,
A R_s = F_s = Q·S(S²+r)^{−½} and M = F_tᵀF_s.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fastkd._core import extension
from fastkd._core.numerics import values_readable, working_dtype
from fastkd._core.operator import operator
from fastkd._core.products import symmetric_product

if TYPE_CHECKING:
    from fastkd.distributed import Ranks

# float32 covariances are used while their rounding error, amplified by max diag(Σ) / min pivot²,
# stays below this: no pivot under 0.4 of the largest variance. Along a direction of little
# variance, which every LayerNorm's output has, float32 gradients can be wrong by some per cent.
LARGEST_FLOAT32_ERROR = 3e-7
# Of D independent columns, column j keeps 1 − j/m of its variance after projecting out those before
# it. With fewer observations than this many times D the last pivot is too small for float32.
FLOAT32_OBSERVATIONS = 1.6
# A GPU uses (m, m) eigenvectors up to this many times D observations, else (D, D) products.
FEW_OBSERVATIONS = 1 / 6
# Elements of an item's features from which masked rows are removed, and from which the item is
# solved alone: smaller items take fewer steps as a batch.
LARGE_ITEM, LARGEST_ITEM = 2**17, 2**18
# Up to this many times D observations the gradient is computed from rows (m, D), else from (D, D)
# matrices.
FEW_ROWS = 2
# Squared singular values below this fraction of the largest are too near float32's rounding error;
# in float64 those above it lose no more digits than the other steps.
SMALL_SQUARE = 1e-3
# Up to this size LAPACK's own singular value decomposition is as fast.
SMALL_MATRIX = 64
# A float32 singular value up to this may be amplified rounding error: its direction, which enters
# the gradient with length 1, could have either sign.
SMALLEST_FLOAT32 = 1e-4

# Coefficients (a, b, c) of `polar`'s steps: polynomials of degree 5 that stretch small values most
# while the others stay below 2, with a margin of 1% for rounding, then those that gather large
# values at 1 (Amsel et al. 2025, "The Polar Express"). The last two send the others to 0.
POLAR_STEPS = [
    (7.5657, -17.8052, 10.7894),
    *[(4.1199, -2.8752, 0.5167)] * 7,
    (2.7983, -1.7271, 0.3015),
    (2.1328, -1.5145, 0.4028),
    (1.879, -1.2542, 0.3752),
    *[(0.0, 2.5, -1.5)] * 2,
]
# Largest triangular matrices that a GPU inverts without products.
LARGEST_SOLVED = 96

Method = Literal["lapack", "extension", "products"]
Solution = tuple[Tensor, Tensor | None]  # correlation (batch), gradient (batch, m, Ds)


@dataclass(frozen=True)
class Options:
    """Options of the loss."""

    ridges: tuple[float, float]  # (student's, teacher's)
    top_k: int | None = None
    # min(Ds, Dt) of each item before its padding with columns of zeros.
    dims: tuple[int, ...] | None = None
    # Processes that hold parts of the observations: their moments are added.
    ranks: "Ranks | None" = None


@dataclass(frozen=True)
class SolverPlan:
    """Choice of the algorithm, made once for each call."""

    observations: bool  # (m, m) matrices instead of (D, D)
    method: Method  # of their decomposition
    # Try float32; the pivots and the smallest correlation decide whether float64 is needed.
    float32_first: bool = False
    one_by_one: bool = False  # solve each item of a batch alone
    in_threads: bool = False  # float64 in C++, one thread for each item
    real_only: bool = False  # remove masked rows


def moments_are_less(rows: int, student: Tensor, teacher: Tensor, ranks: "Ranks") -> bool:
    """Whether adding moments over the processes sends fewer bytes than gathering the features.

    A process has up to ``rows`` observations. Moments are reduced in a ring; features are sent to
    each of the other processes.
    """
    d_s, d_t = student.shape[-1], teacher.shape[-1]
    moments = 2 * 8 * (d_s**2 + d_t**2 + d_s * d_t)
    features = ranks.size * rows * (d_s + d_t) * student.element_size()
    return moments < features and ranks.size * rows > min(d_s, d_t)


def make_plan(student: Tensor, teacher: Tensor, options: Options) -> SolverPlan:
    """The cheapest accurate plan; on a GPU one without synchronisation, if there is one.

    m ≤ D: (m, m) matrices in float64, which are small, and singular by construction. Else (D, D)
    covariances. On the CPU float32 is tried first, unless sizes or ridge 0 make them singular or
    values can't be read. Large items are solved one at a time, so that each stays in the cache.

    On a GPU PyTorch's eigenvalue and singular value solvers synchronise with the host. Cholesky
    factors and products don't; nor does the extension, which is used for few observations. Ridge 0
    and ``top_k`` need eigenvectors: by the extension too, but of large matrices by PyTorch.
    """
    m, d_s, d_t = student.shape[-2], student.shape[-1], teacher.shape[-1]
    products = options.top_k is None and min(options.ridges) > 0
    if options.ranks is not None:  # the plan must not depend on a process's own observations
        method: Method = "extension" if _has_cuda_eigh(student) else "lapack"
        return SolverPlan(False, "products" if student.is_cuda and products else method)
    observations = m <= min(d_s, d_t)
    if student.is_cuda:
        few = m <= FEW_OBSERVATIONS * min(d_s, d_t) and student.dtype != torch.float64
        few &= extension.kernel_is_faster(m, 2 * len(student))
        if _has_cuda_eigh(student) and (few or not products):
            return SolverPlan(observations, "extension")
        return SolverPlan(False, "products") if products else SolverPlan(observations, "lapack")
    readable = values_readable(student)
    size = m * d_s if readable and not observations else 0
    return SolverPlan(
        observations,
        "lapack",
        in_threads=extension.MKL
        and 0 < size < LARGEST_ITEM
        and min(d_s, d_t) >= SMALL_MATRIX
        and min(options.ridges) > 0,
        float32_first=readable
        and student.dtype != torch.float64
        and m > FLOAT32_OBSERVATIONS * max(d_s, d_t)
        and min(options.ridges) > 0,
        one_by_one=len(student) > 1 and size >= LARGEST_ITEM,
        real_only=size >= LARGE_ITEM,
    )


class _Call(NamedTuple):
    student: Tensor  # (batch, m, Ds)
    teacher: Tensor  # (batch, m, Dt)
    mask: Tensor | None  # (batch, m)
    options: Options
    want_grad: bool


def solve(
    student: Tensor, teacher: Tensor, mask: Tensor | None, options: Options, *, want_grad: bool
) -> Solution:
    """Correlation and gradient of features (batch, m, Ds), (batch, m, Dt), mask (batch, m)."""
    if options.ranks is not None:
        return _solve(student, teacher, mask, options, want_grad)
    dims = None if options.dims is None else list(options.dims)
    corr, *gradient = solve_in_process(
        student, teacher, mask, list(options.ridges), options.top_k, dims, want_grad
    )
    return corr, gradient[0] if gradient else None


def _solve(
    student: Tensor, teacher: Tensor, mask: Tensor | None, options: Options, want_grad: bool
) -> Solution:
    m, d_s, d_t = student.shape[-2], student.shape[-1], teacher.shape[-1]
    if 0 in (len(student), d_s, d_t) or (m == 0 and options.ranks is None):
        nothing = student.new_zeros(len(student), dtype=torch.float64)
        return nothing, student.new_zeros(student.shape) if want_grad else None
    plan = make_plan(student, teacher, options)
    real = mask if plan.real_only else None
    if plan.one_by_one or (real is not None and not bool((real == real[:1]).all())):
        masks = [None] * len(student) if mask is None else mask.split(1)
        items = zip(student.split(1), teacher.split(1), masks, strict=True)
        alone = replace(options, dims=None)  # `_bounded` applies the dims of all items below
        solutions = [_solve(*item, alone, want_grad) for item in items]
        corr = torch.cat([corr for corr, _ in solutions])
        ds = torch.cat([ds for _, ds in solutions if ds is not None]) if want_grad else None
    else:
        solve_all = _solve_items if real is None else _solve_real
        corr, ds = solve_all(_Call(student, teacher, mask, options, want_grad), plan)
    return _bounded(corr, student, teacher, mask, options), ds


def _shapes(student, teacher, mask, ridges, top_k, dims, want_grad):
    dtype = working_dtype(student)
    corr = student.new_empty(student.shape[0], dtype=dtype)
    return [corr, student.new_empty(student.shape, dtype=dtype)] if want_grad else [corr]


# An operator, so that the plan can read values under torch.compile too.
@operator(_shapes)
def solve_in_process(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    ridges: list[float],
    top_k: int | None,
    dims: list[int] | None,
    want_grad: bool,
) -> list[Tensor]:
    """Solution for the observations of this process alone."""
    options = Options((ridges[0], ridges[1]), top_k, None if dims is None else tuple(dims))
    solution = _solve(student, teacher, mask, options, want_grad)
    return [x.to(working_dtype(student)) for x in solution if x is not None]


def correlations(x: Tensor, y: Tensor, mask: Tensor | None, ridges: tuple[float, float]) -> Tensor:
    """Correlations (*, min(m−1, Dx, Dy)), descending, from singular vectors of the features."""
    count = max(0, min(x.shape[-2] - 1, x.shape[-1], y.shape[-1]))
    a, b, share = _centred(x, y, mask, torch.float64)
    by_extension = _has_cuda_eigh(x)
    decompose = _left_by_extension if by_extension else _left
    sides = a * share.sqrt(), b * share.sqrt()
    white_x, white_y = _whitened_features(sides, ridges, (x, y), decompose)
    whitened = white_x.factor.mT @ white_y.factor
    values = decompose([whitened])[0][0] if by_extension else torch.linalg.svdvals(whitened)
    values = values[..., :count].clamp_max(1.0)
    return values.masked_fill(~(white_x.finite & white_y.finite).unsqueeze(-1), torch.nan)


def _solve_real(call: _Call, plan: SolverPlan) -> Solution:
    """Solution for large items with one mask, with the masked rows removed."""
    real = cast(Tensor, call.mask)[0]
    if bool(real.all()):
        return _solve_items(call._replace(mask=None), plan)
    observed = call.student[:, real], call.teacher[:, real]
    # `_solve` again: for fewer rows the plan may differ.
    corr, ds = _solve(*observed, None, call.options, call.want_grad)
    if ds is None:
        return corr, None
    whole = ds.new_zeros(call.student.shape)
    whole[:, real] = ds
    return corr, whole


def _solve_items(call: _Call, plan: SolverPlan) -> Solution:
    if plan.observations:
        solution = _by_observations(call, plan.method)
    elif plan.method == "products":
        solution = _by_products(call)
    else:
        first = _by_covariances(call, plan.method, torch.float32) if plan.float32_first else None
        if first is None and plan.in_threads:
            return _in_cpp(call)
        solution = first or cast(Solution, _by_covariances(call, plan.method, torch.float64))
    corr, ds = solution
    return corr, None if ds is None else _masked(ds, call.mask).to(working_dtype(call.student))


def _in_cpp(call: _Call) -> Solution:
    """`_by_covariances` in float64, by the extension."""
    student, teacher, mask, options, want_grad = call
    corr, *gradient = torch.ops.fastkd_cpp.cca(
        student, teacher, mask, *options.ridges, options.top_k or 0, want_grad
    )
    return corr, gradient[0] if gradient else None


def _by_observations(call: _Call, method: Method) -> Solution:
    """Solve in observation space: decompositions of (m, m) matrices."""
    student, teacher, mask, options, want_grad = call
    a, b, share = _centred(student, teacher, mask, torch.float64)
    decompose = _left
    if method == "extension":
        decompose = _left_by_extension if student.dtype == torch.float64 else _left_by_squares
    sides = a * share.sqrt(), b * share.sqrt()
    white_s, white_t = _whitened_features(sides, options.ridges, (student, teacher), decompose)
    finite = white_s.finite & white_t.finite
    whitened = white_t.factor.mT @ white_s.factor  # (batch, m, m)
    if method == "extension" and options.top_k is None:
        left = polar(whitened)
        scaled = left.mT @ whitened  # (MᵀM)^½
        corr, back = _trace(scaled), white_s.back
    else:
        left, values, right = _svd(whitened, options.top_k, student, method)
        scaled = right * values.unsqueeze(-2)
        corr, back = values.sum(-1), right.mT @ white_s.back
    corr = corr.masked_fill(~finite, torch.nan)
    if not want_grad:
        return corr, None
    weights = (white_t.factor @ left - white_s.factor @ scaled) @ back * share
    return corr, weights.masked_fill(~finite[..., None, None], torch.nan) @ a


class _WhitenedFeatures(NamedTuple):
    factor: Tensor  # F = A R (*, m, k), with FFᵀ = A(AᵀA + r·I)⁻¹Aᵀ
    back: Tensor  # (*, k, m), with Rᵀ = back·A
    finite: Tensor  # (*), False where A holds NaN or inf; LAPACK rejects a batch for one NaN


# Singular values, descending, and left vectors (values, left) of each matrix A.
Decompositions = list[tuple[Tensor, Tensor]]


def _whitened_features(
    sides: tuple[Tensor, Tensor],
    ridges: tuple[float, float],
    features: tuple[Tensor, Tensor],
    decompose: Callable[[list[Tensor]], Decompositions],
) -> list[_WhitenedFeatures]:
    """Of student and teacher; ``features`` are the sides before centring, in their own dtype."""
    all_finite = [a.isfinite().flatten(-2).all(-1) for a in sides]
    clean = [
        a.masked_fill(~x[..., None, None], 0.0) for a, x in zip(sides, all_finite, strict=True)
    ]
    whitened = []
    for (values, left), ridge, x, finite in zip(
        decompose(clean), ridges, features, all_finite, strict=True
    ):
        keep = values > _zero_deviation(x, ridge) * values[..., :1]
        kept = torch.where(keep, values, 1.0)
        shrink = (kept.square() + ridge).rsqrt()
        factor = left * (kept * shrink).masked_fill(~keep, 0.0).unsqueeze(-2)
        back = (left * (shrink / kept).masked_fill(~keep, 0.0).unsqueeze(-2)).mT
        whitened.append(_WhitenedFeatures(factor, back, finite))
    return whitened


def _by_covariances(call: _Call, method: Method, dtype: torch.dtype) -> Solution | None:
    """Solve in feature space: (D, D) covariances. None where float32 is not accurate enough."""
    student, teacher, mask, options, want_grad = call
    a, b, share = _centred(student, teacher, mask, dtype, options.ranks)
    finite = a.new_ones(len(a), dtype=torch.bool)
    whitenings = []
    for x, ridge, features in zip((a, b), options.ridges, (student, teacher), strict=True):
        sigma, own = _covariance(x, share, options.ranks)
        finite = finite & own
        whitenings.append(_Whitening(sigma, ridge, features, method))
        if dtype == torch.float32 and not whitenings[-1].accurate_in_float32():
            return None
    whiten_s, whiten_t = whitenings
    bad = ~finite[..., None, None]
    sigma_ts = _moment(b.mT @ a, share, options.ranks)
    if dtype == torch.float64:
        sigma_ts.masked_fill_(bad, 0.0)
    whitened = whiten_s.transposed(whiten_t.transposed(sigma_ts).mT).mT  # (batch, Dt, Ds)
    left, values, right = _svd(whitened, options.top_k, student, method)
    if dtype == torch.float32 and not bool((values > SMALLEST_FLOAT32).all()):
        return None
    corr = values.sum(-1).masked_fill(~finite, torch.nan)
    if not want_grad:
        return corr, None
    scale = share.sqrt().masked_fill(bad, torch.nan)
    directions, of_teacher = whiten_s(right) * scale, whiten_t(left) * scale  # R_s V, R_t U
    if method == "lapack" and dtype == torch.float64 and a.shape[-2] <= FEW_ROWS * a.shape[-1]:
        rows = (b @ of_teacher).baddbmm_(a, directions * values.unsqueeze(-2), alpha=-1)
        # The cancelling terms are subtracted, so float32 is enough for the last product.
        last = working_dtype(student)
        return corr, rows.to(last) @ directions.mT.to(last)
    to_student = _gram((directions * values.sqrt().unsqueeze(-2)).mT)  # (batch, Ds, Ds)
    to_teacher = of_teacher @ directions.mT  # (batch, Dt, Ds)
    ds = (b @ to_teacher).baddbmm_(a, to_student, alpha=-1)
    if dtype == torch.float32:  # the gradient sums to 0, but for the rounding error of large means
        ds -= ds.sum(-2, keepdim=True) * (share / (1 + share))
    return corr, ds


def _by_products(call: _Call) -> Solution:
    """`_by_covariances` for a GPU: Cholesky factors, then products alone."""
    student, teacher, mask, options, want_grad = call
    a, b, share = _centred(student, teacher, mask, torch.float64, options.ranks)
    (sigma_s, finite_s), (sigma_t, finite_t) = (
        _covariance(x, share, options.ranks) for x in (a, b)
    )
    for sigma, ridge in zip((sigma_s, sigma_t), options.ridges, strict=True):
        _add_ridge(sigma, ridge)
    if sigma_s.shape == sigma_t.shape:  # the launches of one batch take half the time
        whiten_s, whiten_t = _inverse_cholesky(torch.cat((sigma_s, sigma_t))).chunk(2)
    else:
        whiten_s, whiten_t = _inverse_cholesky(sigma_s), _inverse_cholesky(sigma_t)
    finite = finite_s & finite_t
    bad = ~finite[..., None, None]
    sigma_ts = _moment(b.mT @ a, share, options.ranks).masked_fill_(bad, 0.0)
    whitened = whiten_t @ sigma_ts @ whiten_s.mT  # (batch, Dt, Ds)
    left = polar(whitened)
    root = left.mT @ whitened  # (MᵀM)^½
    corr = _trace(root).masked_fill(~finite, torch.nan)
    if not want_grad:
        return corr, None
    scaled = whiten_s * share.sqrt().masked_fill(bad, torch.nan)
    to_student = scaled.mT @ root @ scaled  # (batch, Ds, Ds)
    to_teacher = whiten_t.mT @ (left @ scaled) * share.sqrt()  # (batch, Dt, Ds)
    return corr, (b @ to_teacher).baddbmm_(a, to_student, alpha=-1)


def _moment(product: Tensor, share: Tensor, ranks: "Ranks | None") -> Tensor:
    return (product if ranks is None else ranks.sum(product)).mul_(share)


def _covariance(x: Tensor, share: Tensor, ranks: "Ranks | None") -> tuple[Tensor, Tensor]:
    """Covariances of centred features, and which of them are finite; in float64 others are 0."""
    sigma = _moment(_gram(x), share, ranks)
    finite = _trace(sigma).isfinite()
    if x.dtype == torch.float64:
        sigma.masked_fill_(~finite[..., None, None], 0.0)
    return sigma, finite


def _add_ridge(sigma: Tensor, ridge: float) -> None:
    # A ridge below the rounding error of a variance would let the factorisation fail. Each column
    # has its own bound: a large column must not raise the ridge of all others.
    diagonal = sigma.diagonal(dim1=-2, dim2=-1)
    rounding = 4 * sigma.shape[-1] * torch.finfo(torch.float64).eps
    diagonal += (rounding * diagonal).clamp_min(ridge)


class _Whitening:
    """R with R Rᵀ = (Σ + r·I)⁻¹: inverse Cholesky factor, or eigenvectors for ridge 0.

    Overwrites Σ.
    """

    def __init__(self, sigma: Tensor, ridge: float, features: Tensor, method: Method) -> None:
        self.triangular = ridge > 0
        if self.triangular:
            self.largest = sigma.diagonal(dim1=-2, dim2=-1).amax(-1) + ridge
            _add_ridge(sigma, ridge)
            self.factor = _cholesky(sigma)
        else:
            if method == "extension":
                values, vectors = extension.eigh(sigma)
            else:
                values, vectors = torch.linalg.eigh(sigma)
            eps = torch.finfo(torch.float64).eps
            zero = max(_zero_deviation(features, ridge) ** 2, sigma.shape[-1] * eps)
            keep = values > zero * values[..., -1:]
            roots = torch.where(keep, values, 1.0).rsqrt().masked_fill(~keep, 0.0)
            self.factor = vectors * roots.unsqueeze(-2)

    def accurate_in_float32(self) -> bool:
        """Whether float32's error, amplified by largest variance / smallest pivot, stays small."""
        pivots = self.factor.diagonal(dim1=-2, dim2=-1).amin(-1).square()
        rounding = torch.finfo(torch.float32).eps * self.largest / pivots
        return bool((rounding <= LARGEST_FLOAT32_ERROR).all())

    def __call__(self, y: Tensor) -> Tensor:
        """R y."""
        if self.triangular:
            return torch.linalg.solve_triangular(self.factor.mT, y, upper=True)
        return self.factor @ y

    def transposed(self, y: Tensor) -> Tensor:
        """Rᵀ y."""
        if self.triangular:
            return torch.linalg.solve_triangular(self.factor, y, upper=False)
        return self.factor.mT @ y


def _svd(
    m: Tensor, top_k: int | None, features: Tensor, method: Method
) -> tuple[Tensor, Tensor, Tensor]:
    """``(U, σ, V)`` of the leading singular values, σ ≤ 1.

    U is zero where σ is at the level of rounding error: there the loss has a kink, and zero is one
    of its subgradients.
    """
    work = max(m.shape[-2:]) * torch.finfo(torch.float64).eps
    if method == "extension":
        values, right = _by_squares(m.mT @ m)
        left = m @ right / values.clamp_min(torch.finfo(m.dtype).tiny).unsqueeze(-2)
        work = _squared_rounding(m.shape[-1])
    elif values_readable(m) and min(m.shape[-2:]) >= SMALL_MATRIX:
        left, values, right = _svd_by_squares(m)
    else:
        left, values, right = torch.linalg.svd(m, full_matrices=False)
        right = right.mT
    zero = values <= max(work, torch.finfo(working_dtype(features)).eps)
    left.masked_fill_(zero.unsqueeze(-2), 0.0)
    return left[..., :top_k], values[..., :top_k].clamp_max(1.0), right[..., :top_k]


def _svd_by_squares(m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(U, σ, V)`` from the eigenvectors of MᵀM, in half the time of LAPACK's SVD.

    Squares lose the digits of small singular values. The right vectors of the small values span an
    accurate space: M times these vectors, without the parts along the large left vectors, is
    decomposed again. If more than a quarter of the values are small, LAPACK decomposes M.
    """
    if m.shape[-2] < m.shape[-1]:
        left, values, right = _svd_by_squares(m.mT)
        return right, values, left
    squares, right = torch.linalg.eigh(_gram(m))
    squares, right = squares.flip(-1), right.flip(-1)
    small = (squares < SMALL_SQUARE * squares[..., :1]).sum(-1)
    low = int(small.max()) if small.numel() else 0
    if 4 * low > m.shape[-1]:
        left, values, right_t = torch.linalg.svd(m, full_matrices=False)
        return left, values, right_t.mT
    left = m @ right
    values = torch.linalg.vector_norm(left, dim=-2)
    left /= values.clamp_min(torch.finfo(m.dtype).tiny).unsqueeze(-2)
    if low:
        large, span = left[..., :-low], right[..., -low:]
        rest = m @ span
        rest -= large @ (large.mT @ rest)
        left[..., -low:], values[..., -low:], turn = torch.linalg.svd(rest, full_matrices=False)
        right[..., -low:] = span @ turn.mT
    return left, values, right


def _left(sides: list[Tensor]) -> Decompositions:
    """By LAPACK or its kind; AAᵀ would square A's condition number."""
    decompositions = []
    for a in map(_narrow, sides):
        left, values, _ = torch.linalg.svd(a, full_matrices=False)
        decompositions.append((values, left))
    return decompositions


def _left_by_extension(sides: list[Tensor]) -> Decompositions:
    """On a GPU: [[0, A], [Aᵀ, 0]] has the eigenvalues ±σ and the vectors (u, ±v)/√2."""
    decompositions = []
    for a in map(_narrow, sides):
        q, r = torch.linalg.qr(a) if a.shape[-2] > a.shape[-1] else (None, a)
        count = r.shape[-1]
        pairs = r.new_zeros(*r.shape[:-2], 2 * count, 2 * count)
        pairs[..., :count, count:], pairs[..., count:, :count] = r, r.mT
        values, vectors = extension.eigh(pairs)
        values, left = values[..., count:].flip(-1), vectors[..., :count, count:].flip(-1)
        left = math.sqrt(2) * left
        decompositions.append((values.clamp_min(0), left if q is None else q @ left))
    return decompositions


def _left_by_squares(sides: list[Tensor]) -> Decompositions:
    """From AAᵀ, of all sides at once: float64 has enough digits for a loss of float32 features."""
    values, left = _by_squares(torch.cat([a @ a.mT for a in sides]))
    return list(zip(values.chunk(len(sides)), left.chunk(len(sides)), strict=True))


def _narrow(a: Tensor) -> Tensor:
    """A matrix with the singular values and left vectors of A and no more columns than rows."""
    return torch.linalg.qr(a.mT, mode="r").R.mT if a.shape[-2] < a.shape[-1] else a


def _by_squares(square: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values, descending, and left vectors of A from AAᵀ, by the extension."""
    squares, vectors = extension.eigh(square)
    values = squares.clamp_min(0).sqrt().flip(-1)
    lost = values <= _squared_rounding(square.shape[-1]) * values[..., :1]
    return values.masked_fill(lost, 0.0), vectors.flip(-1)


def _squared_rounding(n: int) -> float:
    """Fraction of the largest singular value below which a squared one is rounding error."""
    return math.sqrt(n * torch.finfo(torch.float64).eps)


def _has_cuda_eigh(x: Tensor) -> bool:
    """Whether the extension computes eigenvectors on x's GPU."""
    return extension.runs_cuda_roots(x)


def polar(m: Tensor) -> Tensor:
    """Orthogonal polar factor UVᵀ of M = U diag(σ) Vᵀ with σ ≤ 1.1, by products alone.

    Singular values above 1e-6 are mapped to 1, those between to between 0 and 1, and those below
    1e-7, float32's rounding error, to 0, up to 1e-5.
    X ← X·(a·I + b·XᵀX + c·(XᵀX)²) maps σ to aσ + bσ³ + cσ⁵.
    """
    if m.shape[-2] < m.shape[-1]:
        return polar(m.mT).mT
    x = m
    for a, b, c in POLAR_STEPS:
        gram = x.mT @ x
        inner = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        inner.diagonal(dim1=-2, dim2=-1).add_(a)
        x = x @ inner
    return x


def _inverse_cholesky(x: Tensor) -> Tensor:
    """L⁻¹ with LLᵀ = X.

    A GPU solves small triangular systems fast, and is slow at large ones: the diagonal blocks are
    inverted in one call, and two neighbours are joined by products into one of twice the size.
    """
    n = x.shape[-1]
    size, count = n, 1
    while size > LARGEST_SOLVED:
        size, count = -(-size // 2), 2 * count
    lower = F.pad(_cholesky(x), (0, count * size - n) * 2)
    lower.diagonal(dim1=-2, dim2=-1)[..., n:] = 1.0
    eye = torch.eye(size, dtype=x.dtype, device=x.device)
    inverse = torch.linalg.solve_triangular(_diagonal_blocks(lower, size), eye, upper=False)
    while size < n:
        first, second = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        below = _diagonal_blocks(lower, 2 * size)[..., size:, :size]
        joined = F.pad(first, (0, size) * 2)
        joined[..., size:, size:] = second
        joined[..., size:, :size] = -second @ (below @ first)
        inverse, size = joined, 2 * size
    return inverse[..., 0, :n, :n]


def _diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """(*, n / size, size, size), a view of x (*, n, n)."""
    blocks = x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _cholesky(x: Tensor) -> Tensor:
    """Lower Cholesky factor without synchronising; NaN where x is not positive definite."""
    factor, failed = torch.linalg.cholesky_ex(x)
    return factor.masked_fill_((failed != 0)[..., None, None], torch.nan)


def _gram(x: Tensor) -> Tensor:
    return symmetric_product(x.mT, x)


def _trace(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1).sum(-1)


def _zero_deviation(features: Tensor, ridge: float) -> float:
    """Fraction of the largest standard deviation up to which a direction counts as constant.

    It is the rounding error of float64 or, without a ridge, of the features themselves.
    """
    work = max(features.shape[-2:]) * torch.finfo(torch.float64).eps
    return work if ridge > 0 else max(work, 10 * torch.finfo(working_dtype(features)).eps)


def _centred(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    dtype: torch.dtype,
    ranks: "Ranks | None" = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Features minus their mean, zero where masked, and 1/(m−1) of each item (*, 1, 1)."""
    count = count_observed(student, mask, ranks).to(dtype)[..., None, None]
    centred = []
    for x in (student, teacher):
        x = _masked(x, mask)
        if x.device.type == "cpu":  # a sum in another dtype is slower than converting first
            x = x.to(dtype)
        total = x.sum(-2, keepdim=True, dtype=dtype)
        mean = (total if ranks is None else ranks.sum(total)) / count.clamp_min(1)
        centred.append(_masked(x - mean, mask))  # in dtype
    return centred[0], centred[1], (count - 1).clamp_min(1).reciprocal()


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


def _bounded(
    corr: Tensor,
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    options: Options,
) -> Tensor:
    """``corr`` cut to its bound min(m − 1, Ds, Dt), which rounding may exceed."""
    rank = min(student.shape[-1], teacher.shape[-1])
    if options.ranks is None:
        rank = min(rank, student.shape[-2] - 1)
    corr = corr.clamp_max(rank)
    if mask is not None or options.ranks is not None:
        observed = count_observed(student, mask, options.ranks)
        corr = torch.minimum(corr, (observed - 1).clamp_min(0))
    dims = options.dims
    if dims is not None and min(dims) < rank:
        # Filled on the GPU: a copy from the host would synchronise.
        corr = torch.minimum(corr, torch.cat([corr.new_full((1,), d) for d in dims]))
    return corr
