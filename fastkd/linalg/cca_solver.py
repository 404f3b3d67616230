"""Canonical correlations and their gradient, without the derivative of an eigenvector.

Let A (m, Ds) and B (m, Dt) be the centred student and teacher features over √(m−1). Let R_s with
R_s R_sᵀ = (AᵀA + r_s·I)⁻¹ be any whitening of the student, R_t likewise of the teacher, and
M = R_tᵀBᵀA R_s with singular values σ and vectors U, V. Then corr = Σσ and

    ∂corr/∂A = B·(R_t U)(R_s V)ᵀ − A·(R_s V)·diag(σ)·(R_s V)ᵀ.

With fewer observations than dimensions (m, m) matrices are used instead: with A = QSPᵀ,
A R_s = F_s = Q·S(S²+r)^{−½} and M = F_tᵀF_s.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fastkd._core import extension
from fastkd._core.numerics import values_readable, working_dtype
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
# Elements of an item's features from which a CPU solves the item alone, so that it stays in the
# cache, and without its masked rows. Smaller items take fewer steps as a batch.
LARGE_ITEM = 2**18
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

Method = Literal["lapack", "threads", "extension", "products"]


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


@dataclass(frozen=True)
class Options:
    """Options of the loss."""

    ridges: Sequence[float]  # (student's, teacher's)
    top_k: int | None = None
    # min(Ds, Dt) of each item before its padding with columns of zeros.
    dims: Sequence[int] | None = None
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


@dataclass(frozen=True)
class SolverPlan:
    """Choice of the algorithm, by device, dtype and sizes."""

    observations: bool  # (m, m) matrices instead of (D, D)
    method: Method  # of their decomposition; "threads" is LAPACK in C++, one thread for each item
    # Try float32; the pivots and the smallest correlation decide whether float64 is needed.
    float32_first: bool = False


def moments_are_less(rows: int, student: Tensor, teacher: Tensor, ranks: "Ranks") -> bool:
    """Whether adding moments over the processes sends fewer bytes than gathering the features.

    A process has up to ``rows`` observations. Moments are reduced in a ring; features are sent to
    each of the other processes.
    """
    d_s, d_t = student.shape[-1], teacher.shape[-1]
    moments = 2 * 8 * (d_s**2 + d_t**2 + d_s * d_t)
    features = ranks.size * rows * (d_s + d_t) * student.element_size()
    return moments < features and ranks.size * rows > min(d_s, d_t)


def make_plan(problem: Problem) -> SolverPlan:
    """The cheapest accurate plan; on a GPU one without synchronisation, if there is one.

    m ≤ D: (m, m) matrices in float64, which are small, and singular by construction. Else (D, D)
    covariances. On the CPU float32 is tried first, unless sizes, masked rows or ridge 0 make them
    singular or values can't be read.

    On a GPU PyTorch's eigenvalue and singular value solvers synchronise with the host. Cholesky
    factors and products don't; nor does the extension, which is used for few observations. Ridge 0
    and ``top_k`` need eigenvectors: by the extension too, but of large matrices by PyTorch.
    """
    student, teacher, mask, options, _, memory = problem
    (m, d_s), d_t = student.shape[-2:], teacher.shape[-1]
    products = options.top_k is None and min(options.ridges) > 0
    # With ``ranks`` the plan must not depend on a process's own observations.
    if options.ranks is not None or memory is not None:
        method: Method = "extension" if _has_cuda_eigh(student) else "lapack"
        return SolverPlan(False, "products" if student.is_cuda and products else method)
    observations = m <= min(d_s, d_t)
    if student.is_cuda:
        few = m <= FEW_OBSERVATIONS * min(d_s, d_t) and student.dtype != torch.float64
        few &= extension.kernel_is_faster(m, 2 * len(student))
        if _has_cuda_eigh(student) and (few or not products):
            return SolverPlan(observations, "extension")
        return SolverPlan(False, "products") if products else SolverPlan(observations, "lapack")
    if observations or min(options.ridges) == 0 or not values_readable(student):
        return SolverPlan(observations, "lapack")
    medium = min(d_s, d_t) >= SMALL_MATRIX and m * d_s < LARGE_ITEM
    many = m > FLOAT32_OBSERVATIONS * max(d_s, d_t) and mask is None
    method = "threads" if extension.MKL and medium else "lapack"
    return SolverPlan(False, method, float32_first=many and student.dtype != torch.float64)


def solve(problem: Problem) -> Solution:
    """Correlation in float64 and gradient in the working dtype, of each item.

    With memory also the moments of the memory and the batch together. The gradient is then N/m
    times that with respect to the batch's m rows, N being the number of all observations: its
    scale is that of the gradient of a batch of m.
    """
    student, teacher, _, options, want_grad, memory = problem
    dtype = working_dtype(student)
    if 0 in (len(student), student.shape[-1], teacher.shape[-1]) or (
        student.shape[-2] == 0 and options.ranks is None
    ):
        nothing = student.new_zeros(len(student), dtype=torch.float64)
        gradient = student.new_zeros(student.shape, dtype=dtype) if want_grad else None
        return nothing, gradient, memory and Moments(*(x.clone() for x in memory))
    correlations, gradients, moments = [], [], []
    for part, rows in _parts(problem):
        plan = make_plan(part)
        if plan.observations:
            corr, ds = _by_observations(part, plan.method)
            total = None
        elif plan.float32_first and (found := _by_covariances(part, plan.method, torch.float32)):
            corr, ds, total = found
        elif plan.method == "threads":
            corr, ds = _by_threads(part)
            total = None
        else:
            corr, ds, total = cast(Solution, _by_covariances(part, plan.method, torch.float64))
        correlations.append(corr)
        if total is not None:
            moments.append(total)
        if ds is not None:
            ds = _masked(ds, part.mask).to(dtype)
            if rows is not None:
                whole = ds.new_zeros(len(ds), *student.shape[1:])
                whole[:, rows] = ds
                ds = whole
            gradients.append(ds)
    corr = _bounded(_joined(correlations), problem)
    totals = Moments(*(_joined(list(x)) for x in zip(*moments, strict=True))) if moments else None
    return corr, _joined(gradients) if want_grad else None, totals


def _parts(problem: Problem) -> list[tuple[Problem, Tensor | None]]:
    """Items that are solved together, and which of their rows (m) are left; None for all."""
    student, teacher, mask, options, _, memory = problem
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
        parts.append((problem._replace(student=s, teacher=t, mask=None, memory=own), rows))
    return parts


def solve_in_graph(problem: Problem) -> Solution:
    """`solve` under torch.compile: one operator, so that the plan can read values there too."""
    student, teacher, mask, options, want_grad, memory = problem
    corr, *rest = _operator(
        student,
        teacher,
        mask,
        options.ridges,
        options.top_k,
        options.dims,
        want_grad,
        list(memory or []),
    )
    gradient = rest.pop(0) if want_grad else None
    return corr, gradient, Moments(*rest) if rest else None


@torch.library.custom_op("fastkd::cca", mutates_args=())
def _operator(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    ridges: Sequence[float],
    top_k: int | None,
    dims: Sequence[int] | None,
    want_grad: bool,
    memory: Sequence[Tensor],
) -> list[Tensor]:
    earlier = Moments(*memory) if memory else None
    problem = Problem(student, teacher, mask, Options(ridges, top_k, dims), want_grad, earlier)
    corr, gradient, totals = solve(problem)
    return [corr, *([] if gradient is None else [gradient]), *(totals or [])]


@_operator.register_fake
def _(student, teacher, mask, ridges, top_k, dims, want_grad, memory):
    corr = student.new_empty(student.shape[0], dtype=torch.float64)
    ds = student.new_empty(student.shape, dtype=working_dtype(student))
    return [corr, *([ds] if want_grad else []), *map(torch.empty_like, memory)]


def correlations(x: Tensor, y: Tensor, mask: Tensor | None, ridges: tuple[float, float]) -> Tensor:
    """Correlations (*, min(m−1, Dx, Dy)), descending, from singular vectors of the features."""
    count = max(0, min(x.shape[-2] - 1, x.shape[-1], y.shape[-1]))
    problem = Problem(x, y, mask, Options(ridges), want_grad=False)
    (a, b), share, _, _ = _centred(problem, torch.float64)
    by_extension = _has_cuda_eigh(x)
    decompose = _left_by_extension if by_extension else _left
    sides = a * share.sqrt(), b * share.sqrt()
    white_x, white_y = _whitened_features(sides, ridges, (x, y), decompose)
    whitened = white_x.factor.mT @ white_y.factor
    values = decompose([whitened])[0][0] if by_extension else torch.linalg.svdvals(whitened)
    values = values[..., :count].clamp_max(1.0)
    return values.masked_fill(~(white_x.finite & white_y.finite).unsqueeze(-1), torch.nan)


def _by_threads(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """`_by_covariances` in float64, by the extension."""
    student, teacher, mask, options, want_grad, _ = problem
    corr, *gradient = torch.ops.fastkd_cpp.cca(
        student, teacher, mask, *options.ridges, options.top_k or 0, want_grad
    )
    return corr, gradient[0] if gradient else None


def _by_observations(problem: Problem, method: Method) -> tuple[Tensor, Tensor | None]:
    """Solve in observation space: decompositions of (m, m) matrices."""
    student, teacher, _, options, want_grad, _ = problem
    (a, b), share, _, _ = _centred(problem, torch.float64)
    decompose = _left
    if method == "extension":
        decompose = _left_by_extension if student.dtype == torch.float64 else _left_by_squares
    sides = a * share.sqrt(), b * share.sqrt()
    white_s, white_t = _whitened_features(sides, options.ridges, (student, teacher), decompose)
    finite = white_s.finite & white_t.finite
    rounding = torch.finfo(working_dtype(student)).eps
    whitened = white_t.factor.mT @ white_s.factor  # (batch, m, m)
    if method == "extension" and options.top_k is None:
        left = polar(whitened)
        scaled = left.mT @ whitened  # (MᵀM)^½
        corr, back = _trace(scaled), white_s.back
    else:
        left, values, right = _svd(whitened, options.top_k, rounding, method)
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
    ridges: Sequence[float],
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


def _by_covariances(problem: Problem, method: Method, dtype: torch.dtype) -> Solution | None:
    """Solve in feature space: (D, D) covariances. None where float32 is not accurate enough.

    Method "products" has Cholesky factors, then products alone.
    """
    student, teacher, _, options, want_grad, memory = problem
    ranks, products = options.ranks, method == "products"
    rounding = torch.finfo(working_dtype(student)).eps
    (a, b), share, means, count = _centred(problem, dtype)
    totals: list[Tensor] = []
    # Rows that stand for the memory's mean: their products move its scatters to the new mean.
    moved = [] if memory is None else _moved_means(memory, means)

    def moment(product: Tensor, scatter: int = 0, left: int = 0, right: int = 0) -> Tensor:
        if ranks is not None:
            product = ranks.sum(product)
        if memory is None:
            return product.mul_(share)
        product += memory[3 + scatter]
        totals.append(product.baddbmm_(moved[left].mT, moved[right]))
        return product * share

    sigmas, whitenings = [], []
    finite = a.new_ones(len(a), dtype=torch.bool)
    features_of = (student, teacher)
    for i, (x, ridge, features) in enumerate(zip((a, b), options.ridges, features_of, strict=True)):
        sigma = moment(symmetric_product(x.mT, x), i, i, i)
        own = _trace(sigma).isfinite()
        sigma.masked_fill_(~own[..., None, None], 0.0)
        finite = finite & own
        if ridge > 0:
            _add_ridge(sigma, ridge)
        sigmas.append(sigma)
        if not products and ridge > 0:
            whitenings.append(_Whitening(_cholesky(sigma), triangular=True))
        elif not products:
            whitenings.append(_Whitening(_inverse_root(sigma, features, method), triangular=False))
        if dtype == torch.float32 and not _accurate_in_float32(sigma, whitenings[-1].factor):
            return None
    if products:
        whitenings = [_Whitening(x.mT, triangular=False) for x in _inverse_choleskies(sigmas)]
    whiten_s, whiten_t = whitenings
    bad = ~finite[..., None, None]
    sigma_ts = moment(b.mT @ a, 2, 1, 0).masked_fill_(bad, 0.0)
    combined = None
    if memory is not None:  # a NaN in one batch must not stay
        new = (count.flatten(), *means, *totals)
        combined = Moments(
            *(
                torch.where(finite.view(-1, *[1] * (x.dim() - 1)), x, before)
                for x, before in zip(new, memory, strict=True)
            )
        )
    whitened = whiten_s.transposed(whiten_t.transposed(sigma_ts).mT).mT  # (batch, Dt, Ds)
    if products:
        left = polar(whitened)
        root = left.mT @ whitened  # (MᵀM)^½
        corr = _trace(root)
    else:
        left, values, right = _svd(whitened, options.top_k, rounding, method)
        if dtype == torch.float32 and not bool((values > SMALLEST_FLOAT32).all()):
            return None
        corr = values.sum(-1)
    corr = corr.masked_fill(~finite, torch.nan)
    if not want_grad:
        return corr, None, combined
    if memory is not None:
        own = count - memory.observations[:, None, None]
        share = share * count / own.clamp_min(1)
    scale = share.sqrt().masked_fill(bad, torch.nan)
    of_teacher = whiten_t(left) * scale  # R_t U, or R_t UVᵀ
    directions = (whiten_s.factor if products else whiten_s(right)) * scale  # R_s V, or R_s
    of_student = directions @ root if products else directions * values.unsqueeze(-2)
    if method == "lapack" and dtype == torch.float64 and a.shape[-2] <= FEW_ROWS * a.shape[-1]:
        rows = (b @ of_teacher).baddbmm_(a, of_student, alpha=-1)
        # The cancelling terms are subtracted, so float32 is enough for the last product.
        last = working_dtype(student)
        return corr, rows.to(last) @ directions.mT.to(last), combined
    # A GPU multiplies matrices of this size faster whole than by their lower blocks.
    multiply = torch.matmul if products else symmetric_product
    to_student = multiply(of_student, directions.mT)  # (batch, Ds, Ds)
    ds = (b @ (of_teacher @ directions.mT)).baddbmm_(a, to_student, alpha=-1)
    if dtype == torch.float32:  # the gradient sums to 0, but for the rounding error of large means
        ds -= ds.sum(-2, keepdim=True) * (share / (1 + share))
    return corr, ds, combined


def _moved_means(memory: Moments, means: Sequence[Tensor]) -> list[Tensor]:
    """√count times the memory's means from the means of all observations (batch, 1, D)."""
    root = memory.observations[:, None, None].sqrt()
    return [
        root * (old - new) for old, new in zip((memory.mean_s, memory.mean_t), means, strict=True)
    ]


def _add_ridge(sigma: Tensor, ridge: float) -> None:
    # A ridge below the rounding error of a variance would let the factorisation fail. Each column
    # has its own bound: a large column must not raise the ridge of all others.
    diagonal = sigma.diagonal(dim1=-2, dim2=-1)
    rounding = 4 * sigma.shape[-1] * torch.finfo(torch.float64).eps
    diagonal += (rounding * diagonal).clamp_min(ridge)


class _Whitening(NamedTuple):
    """R with R Rᵀ = (Σ + r·I)⁻¹: ``factor``, or L⁻ᵀ of a ``triangular`` factor L."""

    factor: Tensor
    triangular: bool

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


def _inverse_root(sigma: Tensor, features: Tensor, method: Method) -> Tensor:
    """Eigenvectors of ``sigma`` over the roots of its eigenvalues; 0 for those of rounding size."""
    values, vectors = (extension.eigh if method == "extension" else torch.linalg.eigh)(sigma)
    eps = torch.finfo(torch.float64).eps
    zero = max(_zero_deviation(features, 0.0) ** 2, sigma.shape[-1] * eps)
    keep = values > zero * values[..., -1:]
    roots = torch.where(keep, values, 1.0).rsqrt().masked_fill(~keep, 0.0)
    return vectors * roots.unsqueeze(-2)


def _accurate_in_float32(sigma: Tensor, factor: Tensor) -> bool:
    """Whether float32's error, amplified by largest variance / smallest pivot, stays small."""
    largest = sigma.diagonal(dim1=-2, dim2=-1).amax(-1)
    pivots = factor.diagonal(dim1=-2, dim2=-1).amin(-1).square()
    rounding = torch.finfo(torch.float32).eps * largest / pivots
    return bool((rounding <= LARGEST_FLOAT32_ERROR).all())


def _svd(
    m: Tensor, top_k: int | None, rounding: float, method: Method
) -> tuple[Tensor, Tensor, Tensor]:
    """``(U, σ, V)`` of the leading singular values, σ ≤ 1.

    U is zero where σ is at the level of ``rounding``, the features' or this function's: there the
    loss has a kink, and zero is one of its subgradients.
    """
    work = max(m.shape[-2:]) * torch.finfo(torch.float64).eps
    if method == "extension":
        values, right = _by_squares(m.mT @ m)
        left = m @ right / values.clamp_min(torch.finfo(m.dtype).tiny).unsqueeze(-2)
        work = _squared_rounding(m.shape[-1])
    elif min(m.shape[-2:]) >= SMALL_MATRIX and values_readable(m):
        left, values, right = _svd_by_squares(m)
    else:
        left, values, right = torch.linalg.svd(m, full_matrices=False)
        right = right.mT
    zero = values <= max(work, rounding)
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
    squares, right = torch.linalg.eigh(symmetric_product(m.mT, m))
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


def _inverse_choleskies(sigmas: list[Tensor]) -> list[Tensor]:
    """`_inverse_cholesky` of both sides; the launches of one batch take half the time."""
    if sigmas[0].shape == sigmas[1].shape:
        return list(_inverse_cholesky(torch.cat(sigmas)).chunk(2))
    return [_inverse_cholesky(x) for x in sigmas]


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


def _trace(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1).sum(-1)


def _zero_deviation(features: Tensor, ridge: float) -> float:
    """Fraction of the largest standard deviation up to which a direction counts as constant.

    It is the rounding error of float64 or, without a ridge, of the features themselves.
    """
    work = max(features.shape[-2:]) * torch.finfo(torch.float64).eps
    return work if ridge > 0 else max(work, 10 * torch.finfo(working_dtype(features)).eps)


class _Centred(NamedTuple):
    features: list[Tensor]  # student's and teacher's, minus their mean, zero where masked
    share: Tensor  # (*, 1, 1): 1/(N − 1), with N observations of all processes and the memory
    means: list[Tensor]  # (*, 1, D)
    observations: Tensor  # (*, 1, 1): N


def _centred(problem: Problem, dtype: torch.dtype) -> _Centred:
    student, teacher, mask, options, _, memory = problem
    ranks = options.ranks
    count = count_observed(student, mask, ranks).to(dtype)[..., None, None]
    if memory is not None:
        count = count + memory.observations[:, None, None]
    centred, means = [], []
    for i, x in enumerate((student, teacher)):
        x = _masked(x, mask)
        if x.device.type == "cpu":  # a sum in another dtype is slower than converting first
            x = x.to(dtype)
        total = x.sum(-2, keepdim=True, dtype=dtype)
        if ranks is not None:
            total = ranks.sum(total)
        if memory is not None:
            total = total + memory.observations[:, None, None] * memory[1 + i]
        means.append(total / count.clamp_min(1))
        centred.append(_masked(x - means[-1], mask))  # in dtype
    return _Centred(centred, (count - 1).clamp_min(1).reciprocal(), means, count)


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


def _bounded(corr: Tensor, problem: Problem) -> Tensor:
    """``corr`` cut to its bound min(m − 1, Ds, Dt), which rounding may exceed."""
    student, teacher, mask, options, _, memory = problem
    rank = min(student.shape[-1], teacher.shape[-1])
    if options.ranks is None and memory is None:
        rank = min(rank, student.shape[-2] - 1)
    corr = corr.clamp_max(rank)
    if mask is not None or options.ranks is not None or memory is not None:
        observed = count_observed(student, mask, options.ranks)
        if memory is not None:  # faded observations count by their weights
            observed = observed + memory.observations.ceil()
        corr = torch.minimum(corr, (observed - 1).clamp_min(0))
    dims = options.dims
    if dims is not None and min(dims) < rank:
        # Filled on the GPU: a copy from the host would synchronise.
        corr = torch.minimum(corr, torch.cat([corr.new_full((1,), d) for d in dims]))
    return corr
