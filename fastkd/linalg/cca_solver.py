"""Canonical correlations and their gradient, without the derivative of an eigenvector.

Let A (m, Ds) and B (m, Dt) be the centred student and teacher features over √(m−1). Let R_s with
R_s R_sᵀ = (AᵀA + r_s·I)⁻¹ be any whitening of the student, R_t likewise of the teacher, and
M = R_tᵀBᵀA R_s. Then corr = tr (MᵀM)^½ and, with the polar factor W = M (MᵀM)^{−½},

    ∂corr/∂A = B·R_t W R_sᵀ − A·R_s (MᵀM)^½ R_sᵀ = (B − A·C)·R_t W R_sᵀ

with the regression C = R_s R_sᵀ AᵀB of the teacher on the student, since (MᵀM)^½ = MᵀW. Where
correlations are near 1 only the difference B − A·C cancels.

Both roots are those of `fastkd.linalg.roots`: `singular` has them as singular values and vectors,
`polar` as products alone, which never make the host wait for a GPU. There are two plans:

- covariances, for m > D: (D, D) matrices, whitened by Cholesky factors. On a GPU all large products
  of half-precision and float32 features are sums of integer and float16 products
  (`fastkd.kernels.cca`); float64 has the factors, their inverses, M and C.
- observations, for m ≤ D: (m, m) matrices, whitened by symmetric roots: with AAᵀ = Q S² Qᵀ,
  A R_s = Q·S(S² + r)^{−½}.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastkd._core import extension
from fastkd._core.numerics import values_readable, working_dtype
from fastkd._core.products import symmetric_product
from fastkd.linalg.roots import POLAR_STEPS, left_roots, polar, singular, symmetric_roots

if TYPE_CHECKING:
    from fastkd.distributed import Ranks

# A GPU uses (m, m) matrices up to this many times D observations, else (D, D) products.
FEW_OBSERVATIONS = 1 / 6
# Elements of an item's features from which a CPU solves the item alone, so that it stays in the
# cache, and without its masked rows. Smaller items take fewer steps as a batch.
LARGE_ITEM = 2**18
# Up to this many times D observations the gradient is computed from rows (m, D), else from (D, D)
# matrices.
FEW_ROWS = 2
# Float32 products compute the gradient if their rounding error, by norms, is below this fraction of
# the gradient. Norms overestimate it about ten times.
FLOAT32_ERROR = 5e-5
# Largest triangular matrices that a GPU inverts without products.
LARGEST_SOLVED = 96


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
    kernels: bool = False  # Triton kernels may run


class Problem(NamedTuple):
    """Items that are solved together."""

    student: Tensor  # (batch, m, Ds)
    teacher: Tensor  # (batch, m, Dt)
    mask: Tensor | None  # (batch, m)
    options: Options
    want_grad: bool
    # Moments of earlier observations, which are constants. Solved by covariances in float64.
    memory: Moments | None = None


class Plan(NamedTuple):
    """Choice of the algorithm, by device and sizes."""

    observations: bool  # (m, m) matrices instead of (D, D)
    products: bool  # no step that makes the host wait: `polar`, and inverses by products
    digits: bool = False  # products by `fastkd.kernels.cca` instead of float64


def moments_are_less(rows: int, student: Tensor, teacher: Tensor, ranks: "Ranks") -> bool:
    """Whether adding moments over the processes sends fewer bytes than gathering the features.

    A process has up to ``rows`` observations. Moments are reduced in a ring; features are sent to
    each of the other processes.
    """
    d_s, d_t = student.shape[-1], teacher.shape[-1]
    moments = 2 * 8 * (d_s**2 + d_t**2 + d_s * d_t)
    features = ranks.size * rows * (d_s + d_t) * student.element_size()
    return moments < features and ranks.size * rows > min(d_s, d_t)


def make_plan(problem: Problem) -> Plan:
    """The smaller matrices; on a GPU a plan without synchronisation, if there is one.

    Eigenvectors of matrices that are too large for the extension's kernel make the host wait. Ridge
    0 and ``top_k`` need them; otherwise a GPU has covariances and products beyond that size.
    """
    student, teacher, _, options, _, memory = problem
    m, smaller = student.shape[-2], min(student.shape[-1], teacher.shape[-1])
    products = options.top_k is None and min(options.ridges) > 0
    products &= student.is_cuda or options.kernels
    digits = products and options.kernels
    # With ``ranks`` the plan must not depend on a process's own observations.
    if options.ranks is not None or memory is not None:
        return Plan(False, products, digits)
    if not products:
        return Plan(m <= smaller, False)
    few = m <= FEW_OBSERVATIONS * smaller and student.dtype != torch.float64
    few &= extension.runs_cuda_roots(student) and extension.kernel_is_faster(m, 2 * len(student))
    return Plan(few, True, digits)


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
            corr, ds, total = _by_observations(part, plan.products)
        else:
            corr, ds, total = _by_covariances(part, plan.products, plan.digits)
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
        options.kernels,
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
    kernels: bool,
    want_grad: bool,
    memory: Sequence[Tensor],
) -> list[Tensor]:
    earlier = Moments(*memory) if memory else None
    options = Options(ridges, top_k, dims, kernels=kernels)
    problem = Problem(student, teacher, mask, options, want_grad, earlier)
    corr, gradient, totals = solve(problem)
    return [corr, *([] if gradient is None else [gradient]), *(totals or [])]


@_operator.register_fake
def _(student, teacher, mask, ridges, top_k, dims, kernels, want_grad, memory):
    corr = student.new_empty(student.shape[0], dtype=torch.float64)
    ds = student.new_empty(student.shape, dtype=working_dtype(student))
    return [corr, *([ds] if want_grad else []), *map(torch.empty_like, memory)]


def correlations(x: Tensor, y: Tensor, mask: Tensor | None, ridges: tuple[float, float]) -> Tensor:
    """Correlations (*, min(m−1, Dx, Dy)), descending, from singular vectors of the features."""
    count = max(0, min(x.shape[-2] - 1, x.shape[-1], y.shape[-1]))
    problem = Problem(x, y, mask, Options(ridges), want_grad=False)
    centred, share, _, _ = _centred(problem, torch.float64)
    finite = torch.stack([a.isfinite().flatten(-2).all(-1) for a in centred]).all(0)
    white = []
    for a, ridge, features in zip(centred, ridges, (x, y), strict=True):
        a = a.masked_fill(~finite[..., None, None], 0.0) * share.sqrt()  # LAPACK rejects NaN
        if a.shape[-2] < a.shape[-1]:  # the same singular values and left vectors
            a = torch.linalg.qr(a.mT, mode="r").R.mT
        left, values, _ = torch.linalg.svd(a, full_matrices=False)
        white.append(_whitened_features(values, left, ridge, features).factor)
    values = torch.linalg.svdvals(white[0].mT @ white[1])[..., :count].clamp_max(1.0)
    return values.masked_fill(~finite.unsqueeze(-1), torch.nan)


def _by_observations(problem: Problem, products: bool) -> Solution:
    """Solve in observation space: roots of (m, m) matrices."""
    student, teacher, _, options, want_grad, _ = problem
    (a, b), share, _, _ = _centred(problem, torch.float64)
    sides = [x * share.sqrt() for x in (a, b)]
    (left_s, left_t), (r_s, r_t) = left_roots(sides, refine=not products), options.ridges
    white_s = _whitened_features(*left_s, r_s, student)
    white_t = _whitened_features(*left_t, r_t, teacher)
    whitened = white_t.factor.mT @ white_s.factor  # M
    back = white_s.back
    if products:
        left = polar(whitened)
        corr, of_student = (left * whitened).sum((-2, -1)), white_s.factor @ (left.mT @ whitened)
    else:
        corr, (left, values, right) = _roots(whitened, problem)
        of_student, back = white_s.factor @ (right * values.unsqueeze(-2)), right.mT @ back
    if not want_grad:
        return corr, None, None
    return corr, (white_t.factor @ left - of_student) @ back * share @ a, None


def _roots(m: Tensor, problem: Problem) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """tr (MᵀM)^½ and U, σ, V with W = UVᵀ; of the ``top_k`` largest singular values.

    W is zero where σ is at the level of rounding, the features' or this function's: there the loss
    has a kink, and zero is one of its subgradients.
    """
    rounding = torch.finfo(working_dtype(problem.student)).eps
    zero = max(rounding, max(m.shape[-2:]) * torch.finfo(torch.float64).eps)
    left, values, right = (x[..., : problem.options.top_k] for x in singular(m, zero))
    left = left.masked_fill_(values.unsqueeze(-2) <= zero, 0.0)
    values = values.clamp_max(1.0)
    return values.sum(-1), (left, values, right)


class _WhitenedFeatures(NamedTuple):
    factor: Tensor  # F = A R (*, m, k), with FFᵀ = A(AᵀA + r·I)⁻¹Aᵀ
    back: Tensor  # (*, k, m), with Rᵀ = back·A


def _whitened_features(
    values: Tensor, left: Tensor, ridge: float, features: Tensor
) -> _WhitenedFeatures:
    """From A's singular values and left vectors; ``features`` are A's in their own dtype."""
    keep = values > _zero_deviation(features, ridge) * values[..., :1]
    kept = torch.where(keep, values, 1.0)
    shrink = (kept.square() + ridge).rsqrt() * keep
    factor = left * (kept * shrink).unsqueeze(-2)
    return _WhitenedFeatures(factor, (left * (shrink / kept).unsqueeze(-2)).mT)


def _covariances(
    problem: Problem, large: "_Products", share: Tensor, means: list[Tensor], count: Tensor
) -> tuple[list[Tensor], Tensor, Moments | None]:
    """Σ_s, Σ_t with their ridges, Σ_ts, and the new memory."""
    ranks, memory = problem.options.ranks, problem.memory
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

    sigmas = []
    for i, ridge in enumerate(problem.options.ridges):
        sigmas.append(moment(large.scatter(i, i), i, i, i))
        if ridge > 0:
            _add_ridge(sigmas[i], ridge)
    sigma_ts = moment(large.scatter(1, 0), 2, 1, 0)
    if memory is None:
        return sigmas, sigma_ts, None
    new = (count.flatten(), *means, *totals)
    # A NaN in one batch must not stay.
    finite = (_trace(sigmas[0]) + _trace(sigmas[1])).isfinite()
    kept = (
        torch.where(finite.view(-1, *[1] * (x.dim() - 1)), x, before)
        for x, before in zip(new, memory, strict=True)
    )
    return sigmas, sigma_ts, Moments(*kept)


def _by_covariances(problem: Problem, products: bool, digits: bool) -> Solution:
    """Solve in feature space: (D, D) covariances."""
    student, teacher, _, options, want_grad, memory = problem
    ranks = options.ranks
    (a, b), share, means, count = _centred(problem, torch.float64)
    large = (_DigitProducts if digits else _Products)(a, b)
    sigmas, sigma_ts, combined = _covariances(problem, large, share, means, count)
    whitenings = []
    if not products:
        for ridge, sigma, x in zip(options.ridges, sigmas, (student, teacher), strict=True):
            root = _cholesky(sigma) if ridge > 0 else _inverse_root(sigma, x)
            whitenings.append(_Whitening(root, triangular=ridge > 0))
    if memory is not None:
        own = count - memory.observations[:, None, None]
        share = share * count / own.clamp_min(1)
    if products:
        root_s, root_t = (x.mT for x in _inverse_choleskies(sigmas))  # R_s, R_t
        of_student = sigma_ts @ root_s
        whitened = root_t.mT @ of_student  # M (batch, Dt, Ds)
        left = large.polar(whitened)
        corr = (left * whitened).sum((-2, -1))
        if want_grad:
            ds = large.gradient(root_s @ of_student.mT, (root_t, left, root_s)) * share
        return corr, ds if want_grad else None, combined
    whiten_s, whiten_t = whitenings
    whitened = whiten_s.transposed(whiten_t.transposed(sigma_ts).mT).mT  # (batch, Dt, Ds)
    corr, (left, values, right) = _roots(whitened, problem)
    if not want_grad:
        return corr, None, combined
    of_teacher, directions = whiten_t(left), whiten_s(right)  # R_t U, R_s V
    of_student = directions * values.unsqueeze(-2)
    last = working_dtype(student)
    if a.shape[-2] <= FEW_ROWS * a.shape[-1]:
        rows = (b @ of_teacher).baddbmm_(a, of_student, alpha=-1)
        # The cancelling terms are subtracted, so float32 is enough for the last product.
        return corr, rows.to(last) @ directions.mul_(share).mT.to(last), combined
    factors = [symmetric_product(of_student, directions.mT), of_teacher @ directions.mT]
    for x in factors:
        x *= share
    if last == torch.float32 and memory is None and ranks is None:
        size = _gradient_norm(left, values, of_teacher, directions, options.ridges, share)
        if _float32_suffices(sigmas, factors, size, share):
            del large  # which holds the features in float64
            factors, a = [x.float() for x in factors], a.float()
            b = b.float()
    ds = (b @ factors[1]).baddbmm_(a, factors[0], alpha=-1)
    if ds.dtype == torch.float32:  # it sums to 0, but for the rounding error of large means
        ds -= ds.sum(-2, keepdim=True) * (share / (1 + share)).float()
    return corr, ds, combined


def _gradient_norm(
    left: Tensor,
    values: Tensor,
    of_teacher: Tensor,
    directions: Tensor,
    ridges: Sequence[float],
    share: Tensor,
) -> Tensor:
    """Norm (batch) of the gradient, but for products of different columns, from (D, D) matrices.

    The gradient is (B R_t U − A R_s V S)(R_s V)ᵀ, and (A R)ᵀ(A R) = I − r·RᵀR.
    """
    r_s, r_t = ridges
    along_t, along_s = of_teacher.square().sum(-2), directions.square().sum(-2)
    squares = left.square().sum(-2) - r_t * along_t
    squares = squares - (1 + r_s * along_s) * values.square()
    return (squares.clamp_min(0) * along_s).sum(-1).sqrt() * share.flatten().sqrt()


def _float32_suffices(
    sigmas: list[Tensor], factors: list[Tensor], size: Tensor, share: Tensor
) -> bool:
    """Whether A·factors[0] and B·factors[1], whose difference is the gradient, may be float32.

    Where correlations are near 1 the products cancel.
    """
    if not values_readable(size):
        return False
    norms = [
        _trace(x).sqrt() * y.flatten(1).norm(dim=1) for x, y in zip(sigmas, factors, strict=True)
    ]
    error = torch.finfo(torch.float32).eps * (norms[0] + norms[1]) / share.flatten().sqrt()
    return bool((error <= FLOAT32_ERROR * size).all())


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


class _Products:
    """Large products of centred features A (batch, m, Ds) and B (batch, m, Dt), in float64."""

    def __init__(self, *features: Tensor):
        self.features = features

    def scatter(self, i: int, j: int) -> Tensor:
        """Product of the transposed features i and the features j, of 0 for A and 1 for B."""
        x, y = self.features[i], self.features[j]
        return symmetric_product(x.mT, y) if i == j else x.mT @ y

    def polar(self, m: Tensor) -> Tensor:
        return polar(m)

    def gradient(self, regression: Tensor, factors: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """(B − A·regression)·R_t W R_sᵀ of the factors R_t, W and R_s."""
        a, b = self.features
        root_t, left, root_s = factors
        return torch.baddbmm(b, a, regression, alpha=-1) @ (root_t @ left @ root_s.mT)


class _DigitProducts(_Products):
    """The same by the kernels of `fastkd.kernels.cca`."""

    def __init__(self, *features: Tensor):
        from fastkd.kernels import cca as kernels

        super().__init__(*features)
        self.kernels = kernels
        self.digits = [kernels.split(x.mT) for x in features]

    def scatter(self, i: int, j: int) -> Tensor:
        return self.kernels.product(self.digits[i], self.digits[j], orders=7, symmetric=i == j)

    def polar(self, m: Tensor) -> Tensor:
        return self.kernels.polar(m, POLAR_STEPS)

    def gradient(self, regression: Tensor, factors: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        split, product = self.kernels.split, self.kernels.product
        a, b = self.features
        root_t, left, root_s = factors
        # Columns have the scales: one may be much larger than all others.
        scale = self.digits[0].scale
        right = split((regression * scale).mT, digits=5)
        residual = b - product(split(a, scale.mT), right, orders=5)
        factor = product(split(product(split(root_t), split(left.mT))), split(root_s))
        scale = self.kernels.scale_of(residual, -2)
        return product(split(residual, scale), split((factor * scale.mT).mT))


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


def _inverse_root(sigma: Tensor, features: Tensor) -> Tensor:
    """Eigenvectors of ``sigma`` over the roots of its eigenvalues; 0 for those of rounding size."""
    roots, vectors = symmetric_roots(sigma, True)
    rounding = math.sqrt(sigma.shape[-1] * torch.finfo(torch.float64).eps)
    keep = roots > max(_zero_deviation(features, 0.0), rounding) * roots[..., -1:]
    inverse = torch.where(keep, roots, 1.0).reciprocal().masked_fill(~keep, 0.0)
    return vectors * inverse.unsqueeze(-2)


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
        wide = x = _masked(x, mask)
        if x.device.type == "cpu":  # a sum in another dtype is slower than converting first
            wide = x.to(dtype)
        total = wide.sum(-2, keepdim=True, dtype=dtype)
        if ranks is not None:
            total = ranks.sum(total)
        if memory is not None:
            total = total + memory.observations[:, None, None] * memory[1 + i]
        means.append(total / count.clamp_min(1))
        centred.append(_masked(wide.sub_(means[-1]) if wide is not x else x - means[-1], mask))
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
