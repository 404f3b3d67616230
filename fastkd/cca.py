"""Canonical correlation between teacher and student features (MC3KD, eqs. 4-7).

Neither the value nor the gradient needs an eigenvector derivative. Let A (m, Ds) and B (m, Dt) be
the centred features over √(m−1), R Rᵀ = (AᵀA + r·I)⁻¹ any whitening of one side, M = R_tᵀBᵀA R_s
with singular values σ and vectors U, V. Then corr = Σσ and

    ∂corr/∂A = B·(R_t U)(R_s V)ᵀ − A·(R_s V)·diag(σ)·(R_s V)ᵀ.

With fewer observations than dimensions the same is done with m×m matrices; see `_solve`.
"""

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastkd import _extension
from fastkd._checks import (
    check_choice,
    check_floating,
    check_like,
    check_mask,
    check_number,
    check_pair,
    check_positive_int,
    check_shape,
    layer_pairs,
)
from fastkd._dispatch import use_triton
from fastkd._numerics import autocast_off, once_differentiable, values_readable, working_dtype
from fastkd._pooling import pool_tokens
from fastkd.linalg import inv_sqrtm_ref, symmetric_product

REDUCTIONS = ("sum", "mean", "none")
POOLS = ("tokens", "cls", "mean")

Ridge = float | tuple[float, float]

# float32 covariances are trusted while their rounding, grown by max diag(Σ) / min pivot², stays
# below this: no pivot under 0.4 of the largest variance. Along a direction that hardly varies, as
# there is one in every output of a LayerNorm, float32 gradients can be off by some per cent.
TRUSTED_ROUNDING = 3e-7
# Elements of one item's features from which it is solved apart from the others of its batch.
LARGE_ITEM = 2**17
# Squared singular values below this part of the largest are too near float32 rounding to be used.
SMALL_SQUARE = 1e-3
# A float32 singular value up to this may be rounding grown by TRUSTED_ROUNDING and a few more: the
# direction that belongs to it, a whole one in the gradient, could have either sign.
SMALLEST_FLOAT32 = 1e-4


def cca_loss_ref(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None = None,
    *,
    ridge: Ridge = 1e-4,
    top_k: int | None = None,
    reduction: str = "sum",
) -> Tensor:
    """Eqs. 4-7 as written; see `cca_loss`. Rows are observations: the paper's X̄X̄ᵀ is X̄ᵀX̄."""
    r_s, r_t = _ridge_pair(ridge)
    S, T = student.to(working_dtype(student)), teacher.to(working_dtype(teacher))
    real = torch.ones_like(S[..., :1]) if mask is None else mask.unsqueeze(-1).to(S.dtype)
    S, T = S.masked_fill(real == 0, 0.0), T.masked_fill(real == 0, 0.0)
    m = real.sum(-2, keepdim=True).clamp_min(1)

    S_bar = (S - S.sum(-2, keepdim=True) / m) * real  # (*, m, Ds)
    T_bar = (T - T.sum(-2, keepdim=True) / m) * real  # (*, m, Dt)
    m = m.clamp_min(2)  # one observation has covariance 0, not 0/0
    I_s, I_t = (torch.eye(x.shape[-1], dtype=x.dtype, device=x.device) for x in (S, T))
    sigma_tt = T_bar.mT @ T_bar / (m - 1) + r_t * I_t  # eq. 5
    sigma_ts = T_bar.mT @ S_bar / (m - 1)
    sigma_ss = S_bar.mT @ S_bar / (m - 1) + r_s * I_s

    whitened = inv_sqrtm_ref(sigma_tt) @ sigma_ts @ inv_sqrtm_ref(sigma_ss)  # eq. 4
    corr = torch.linalg.svdvals(whitened)[..., :top_k].sum(-1)  # eq. 6: tr (TᵀT)^½
    return _reduce(-corr, reduction)  # eq. 7


def cca_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None = None,
    *,
    ridge: Ridge = 1e-4,
    top_k: int | None = None,
    reduction: str = "sum",
    backend: str = "auto",
) -> Tensor:
    """Negative sum of the canonical correlations between student and teacher features.

    L = −‖Σ_tt^{−½} Σ_ts Σ_ss^{−½}‖_* (MC3KD, eqs. 4-7), with Σ_ss = S̄ᵀS̄/(m−1) + r_s·I and
    likewise Σ_tt; one loss for each index of the leading dimensions. With ``top_k`` only the
    largest correlations count. With ``ridge=0`` directions without variance are left out.

    Args:
        student: (*, m, Ds), m observations.
        teacher: (*, m, Dt), without grad.
        mask: (*, m), 1 = real observation; others are left out, also from m.
        ridge: r_s = r_t, or the pair (student, teacher), at least 0.
        top_k: how many of the largest correlations to sum; None for all.
        reduction: over the leading dimensions: "sum", "mean" or "none".
        backend: "auto", "torch" or "triton".

    Returns:
        Scalar, or (*) for reduction "none"; float64 for float64, else float32. Fewer than two
        real observations give 0 with zero gradient.

    Raises:
        TypeError: wrong type or dtype. ValueError: wrong shape, device, option, or a teacher that
        requires grad.

    Example:
        >>> import torch
        >>> from fastkd.cca import cca_loss
        >>> x = torch.eye(4)[:, :2]
        >>> cca_loss(x, 3.0 * x + 1.0, ridge=0.0)
        tensor(-2.)
    """
    check_pair(student, teacher, min_ndim=2)
    check_shape(
        "teacher", teacher, (*student.shape[:-1], teacher.shape[-1]), "student's but for the size"
    )
    mask = check_mask(mask, student.shape[:-1], student.device)
    ridges = _ridge_pair(ridge)
    if top_k is not None:
        check_positive_int("top_k", top_k)
    check_choice("reduction", reduction, REDUCTIONS)
    use_triton(backend, "cca_loss", student)
    rank = min(student.shape[-2] - 1, student.shape[-1], teacher.shape[-1])
    loss = _NegativeCorrelation.apply(student, teacher, mask, ridges, top_k, rank)
    return _reduce(loss, reduction)


def canonical_correlations(
    x: Tensor, y: Tensor, *, ridge: Ridge = 0.0, mask: Tensor | None = None
) -> Tensor:
    """Canonical correlations between two feature matrices, largest first.

    The singular values of Σ_xx^{−½} Σ_xy Σ_yy^{−½} (MC3KD, eqs. 2 and 4), from singular value
    decompositions of the centred features in float64: nothing is squared, so ill-conditioned
    features lose no digits. A measure, not a loss: it carries no gradient; train with `cca_loss`.

    Args:
        x: (*, m, Dx), m observations.
        y: (*, m, Dy).
        ridge: for both, or the pair (x, y), at least 0.
        mask: (*, m), 1 = real observation.

    Returns:
        (*, min(m−1, Dx, Dy)), descending, in [0, 1]; float64 for float64, else float32.
        Directions without variance give 0.

    Raises:
        TypeError: wrong type or dtype. ValueError: wrong shape, device or ridge.

    Example:
        >>> import torch
        >>> from fastkd.cca import canonical_correlations
        >>> x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
        >>> y = torch.tensor([[1.0], [-1.0], [-1.0], [1.0]])
        >>> canonical_correlations(x, torch.cat([-2 * x + y, y], 1))
        tensor([1.])
    """
    check_floating("x", x, min_ndim=2)
    check_floating("y", y, min_ndim=2)
    check_like("y", y, "x", x)
    check_shape("y", y, (*x.shape[:-1], y.shape[-1]), "x's but for the size")
    mask = check_mask(mask, x.shape[:-1], x.device)
    count = max(0, min(x.shape[-2] - 1, x.shape[-1], y.shape[-1]))
    with torch.no_grad(), autocast_off(x):
        a, b, share = _centred(x, y, mask, torch.float64)
        a, b = a * share.sqrt(), b * share.sqrt()
        r_x, r_y = _ridge_pair(ridge)
        side_x, side_y = _factor(a, r_x, x), _factor(b, r_y, y)
        values = torch.linalg.svdvals(side_x.factor.mT @ side_y.factor)[..., :count].clamp_max(1.0)
        finite = (side_x.finite & side_y.finite).unsqueeze(-1)
        return values.masked_fill(~finite, torch.nan).to(working_dtype(x))


class CCALoss(nn.Module):
    """Canonical-correlation loss between hidden states of a student and a teacher (MC3KD, eq. 7).

    See `cca_loss`. Several layers are averaged; on a GPU all run as one batch, elsewhere those of
    equal size. Stores ridge, top_k and pool, no parameters.

    When there are no more observations than dimensions every correlation is near 1 whatever the
    student does, and the loss teaches nothing; the first such call warns.

    Args:
        ridge: r_s = r_t, or the pair (student, teacher).
        top_k: how many of the largest correlations to sum; None for all.
        pool: what one observation is: "tokens" every real token of the batch, "cls" the first
            real token of a sample, "mean" the mean over a sample's real tokens.

    Example:
        >>> import torch
        >>> from fastkd.cca import CCALoss
        >>> student, teacher = torch.randn(8, 16, 4, requires_grad=True), torch.randn(8, 16, 6)
        >>> CCALoss(ridge=1e-3)(student, teacher, mask=torch.ones(8, 16)).backward()
        >>> student.grad.shape
        torch.Size([8, 16, 4])
    """

    def __init__(self, ridge: Ridge = 1e-4, top_k: int | None = None, pool: str = "tokens") -> None:
        super().__init__()
        _ridge_pair(ridge)
        if top_k is not None:
            check_positive_int("top_k", top_k)
        check_choice("pool", pool, POOLS)
        self.ridge = ridge
        self.top_k = top_k
        self.pool = pool
        self._warned = False

    def forward(
        self,
        student: Tensor | Sequence[Tensor],
        teacher: Tensor | Sequence[Tensor],
        mask: Tensor | None = None,
    ) -> Tensor:
        """Mean loss over the layers: student (B, N, Ds), teacher (B, N, Dt), mask (B, N)."""
        pairs = layer_pairs(student, teacher)
        for s, t in pairs:
            check_pair(s, t, ndim=3)
            check_shape("student", s, (*pairs[0][0].shape[:2], s.shape[-1]), "the first layer's")
            check_shape("teacher", t, (*s.shape[:2], t.shape[-1]), "student's but for the size")
        real = check_mask(mask, pairs[0][0].shape[:2], pairs[0][0].device)
        observed = _observations(real, self.pool)
        pooled = [(_pooled(s, real, self.pool), _pooled(t, real, self.pool)) for s, t in pairs]
        self._warn_if_saturated(pooled, observed)
        batches: dict[tuple, list[tuple[Tensor, Tensor]]] = {}
        for s, t in pooled:
            sizes = () if _pads_layers(s) else (s.shape[-1], t.shape[-1])
            batches.setdefault((s.dtype, s.device, sizes), []).append((s, t))
        ridges = _ridge_pair(self.ridge)
        losses = [_batched_layers(b, observed, ridges, self.top_k) for b in batches.values()]
        return torch.cat(losses).mean()

    def _warn_if_saturated(
        self, pairs: list[tuple[Tensor, Tensor]], observed: Tensor | None
    ) -> None:
        if self._warned or torch.compiler.is_compiling():
            return
        observations = pairs[0][0].shape[0]
        if observed is not None and values_readable(observed):
            observations = int(observed.sum())
        dims = max(x.shape[-1] for pair in pairs for x in pair)
        if observations <= dims:
            self._warned = True
            warnings.warn(
                f"CCALoss: {observations} observations for {dims} dimensions; every correlation is "
                "near 1 whatever the student does, so the loss teaches nothing. Use "
                "pool='tokens', larger batches or a larger ridge.",
                stacklevel=3,
            )

    def extra_repr(self) -> str:
        return f"ridge={self.ridge}, top_k={self.top_k}, pool={self.pool!r}"


def _pooled(x: Tensor, real: Tensor | None, pool: str) -> Tensor:
    """(B, N, D) -> (observations, D)."""
    return x.flatten(0, 1) if pool == "tokens" else pool_tokens(x, real, pool)


def _observations(real: Tensor | None, pool: str) -> Tensor | None:
    """Which observations of `_pooled` are real, from the tokens' mask (B, N)."""
    if real is None:
        return None
    return real.flatten() if pool == "tokens" else real.any(1)


def _pads_layers(x: Tensor) -> bool:
    """Whether layers of different sizes run as one batch, padded to the largest.

    On a GPU the time goes into launches, as many for one layer as for all. On a CPU, where large
    items run one by one anyway, padding would only add arithmetic with zeros.
    """
    return x.is_cuda


def _batched_layers(
    pairs: list[tuple[Tensor, Tensor]],
    mask: Tensor | None,
    ridges: tuple[float, float],
    top_k: int | None,
) -> Tensor:
    """Losses (L) of layer pairs (m, Ds), (m, Dt) of any sizes, in one call; mask (m).

    Columns of zeros make the sizes equal and change no correlation: their cross-covariance is 0,
    and their covariance the ridge's identity or, without a ridge, a direction without variance.
    """
    students, teachers = (_stacked(side) for side in zip(*pairs, strict=True))
    if mask is not None:
        mask = mask.expand(students.shape[:-1])
    ranks = [min(s.shape[-2] - 1, s.shape[-1], t.shape[-1]) for s, t in pairs]
    rank: int | Tensor = ranks[0]
    if any(r != ranks[0] for r in ranks):
        # Filled where it is used: the host would wait for a copy to the GPU.
        filled = [students.new_full((1,), r, dtype=torch.float32) for r in ranks]
        rank = torch.cat(filled)
    return _NegativeCorrelation.apply(students, teachers, mask, ridges, top_k, rank)


def _stacked(layers: Sequence[Tensor]) -> Tensor:
    """(L, m, D) of layers (m, ≤ D), the smaller ones with columns of zeros."""
    size = max(x.shape[-1] for x in layers)
    missing = [size - x.shape[-1] for x in layers]
    return torch.stack([F.pad(x, (0, n)) if n else x for x, n in zip(layers, missing, strict=True)])


def _ridge_pair(ridge: Ridge) -> tuple[float, float]:
    """(student's, teacher's) ridge."""
    pair = tuple(ridge) if isinstance(ridge, (tuple, list)) else (ridge, ridge)
    if len(pair) != 2:
        raise ValueError(f"ridge must be a number or a pair (student, teacher), got {ridge!r}")
    for r in pair:
        check_number("ridge", r, at_least=0.0)
    return float(pair[0]), float(pair[1])


def _reduce(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    return loss.sum() / (max(1, loss.numel()) if reduction == "mean" else 1)


class _NegativeCorrelation(torch.autograd.Function):
    """Value and gradient together: both come from one decomposition."""

    @staticmethod
    def forward(ctx, student, teacher, mask, ridges, top_k, rank):
        with autocast_off(student):
            batch = student.shape[:-2].numel()
            corr, ds = _solve(
                student.reshape(batch, *student.shape[-2:]),
                teacher.reshape(batch, *teacher.shape[-2:]),
                None if mask is None else mask.reshape(batch, mask.shape[-1]),
                ridges,
                top_k,
                rank,
                ctx.needs_input_grad[0],
            )
            ctx.dtype = student.dtype
            ctx.save_for_backward(None if ds is None else ds.reshape(student.shape))
            return -corr.to(working_dtype(student)).view(student.shape[:-2])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (ds,) = ctx.saved_tensors
        with autocast_off(grad):
            return (-grad[..., None, None] * ds).to(ctx.dtype), None, None, None, None, None


def _solve(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    ridges: tuple[float, float],
    top_k: int | None,
    rank: int | Tensor,
    want_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """Correlation (batch) and gradient (batch, m, Ds): chooses the side and the precision.

    ``rank``, a number or (batch), bounds the sum: min(m − 1, Ds, Dt).

    m ≤ D: m×m matrices in float64, small and singular by nature. Else D×D covariances: on the
    CPU in float32 where that is accurate, which the pivots of their factors and the smallest
    correlation tell; in float64 where it is not, where sizes or ridge 0 make them singular, and
    where looking at these numbers would break a compiled graph or wait for a GPU.

    On a GPU PyTorch's eigen and singular value solvers wait for the host. The extension's do not,
    as far as a matrix fits into a block, and beyond that Cholesky factors and products do the work;
    only large matrices with ridge 0 or ``top_k`` are left to the solvers that wait.
    """
    m, d_s, d_t = student.shape[-2], student.shape[-1], teacher.shape[-1]
    if 0 in (len(student), m, d_s, d_t):
        nothing = student.new_zeros(len(student), dtype=torch.float64)
        return nothing, torch.zeros_like(student) if want_grad else None
    products_only = _use_polar(student, top_k) and min(ridges) > 0
    if m <= min(d_s, d_t) and (_use_rotations(student, m) or not products_only):
        return _by_observations(student, teacher, mask, ridges, top_k, rank, want_grad)
    may_look = values_readable(student)
    if may_look and len(student) > 1 and m * d_s >= LARGE_ITEM:
        # One at a time: each chooses for itself, and what it needs stays in the cache.
        masks = [None] * len(student) if mask is None else mask.split(1)
        ranks = [rank] * len(student) if isinstance(rank, int) else rank.split(1)
        solutions = [
            _solve(s, t, item_mask, ridges, top_k, item_rank, want_grad)
            for s, t, item_mask, item_rank in zip(
                student.split(1), teacher.split(1), masks, ranks, strict=True
            )
        ]
        corr, ds = zip(*solutions, strict=True)
        return torch.cat(corr), torch.cat(ds) if want_grad else None
    options = (ridges, top_k, rank, want_grad)
    solution = None
    if may_look and student.dtype != torch.float64 and m > max(d_s, d_t) and min(ridges) > 0:
        solution = _by_covariances(student, teacher, mask, *options, dtype=torch.float32)
    if solution is None:
        solution = _by_covariances(student, teacher, mask, *options, dtype=torch.float64)
    assert solution is not None
    return solution


def _by_observations(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    ridges: tuple[float, float],
    top_k: int | None,
    rank: int | Tensor,
    want_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """With A = QSPᵀ: A R_s = F_s = Q·S(S²+r)^{−½} and M = F_tᵀF_s, everything m×m."""
    a, b, share = _centred(student, teacher, mask, torch.float64)
    rotations = _use_rotations(student, student.shape[-2])
    side_s = _factor(a * share.sqrt(), ridges[0], student, rotations)
    side_t = _factor(b * share.sqrt(), ridges[1], teacher, rotations)
    finite = side_s.finite & side_t.finite
    left, values, right = _svd(side_t.factor.mT @ side_s.factor, top_k, student)
    corr = _bounded(values.sum(-1), share, rank).masked_fill(~finite, torch.nan)
    if not want_grad:
        return corr, None
    rows = side_t.factor @ left - side_s.factor @ (right * values.unsqueeze(-2))  # (batch, m, m)
    weights = rows @ (right.mT @ side_s.back) * share
    ds = weights.masked_fill(~finite[..., None, None], torch.nan) @ a
    return corr, _masked(ds, mask).to(working_dtype(student))


class _Factor(NamedTuple):
    factor: Tensor  # F (*, m, k) with FFᵀ = A(AᵀA + r·I)⁻¹Aᵀ, so that F = A R
    back: Tensor  # (*, k, m) with Rᵀ = back·A
    finite: Tensor  # (*), False where A holds NaN or inf; LAPACK refuses the batch for one NaN


def _factor(a: Tensor, ridge: float, features: Tensor, rotations: bool = False) -> _Factor:
    """From the singular vectors of A itself: AAᵀ would square its condition number.

    ``rotations`` takes AAᵀ all the same: float64 has digits enough for a loss of float32 features,
    and a GPU's singular value solver would be waited for.
    """
    finite = a.isfinite().flatten(-2).all(-1)
    a = a.masked_fill(~finite[..., None, None], 0.0)
    if rotations:
        values, left = _by_rotations(a.mT)
    else:
        if a.shape[-2] < a.shape[-1]:
            a = torch.linalg.qr(a.mT, mode="r").R.mT  # (batch, m, m), the same left vectors
        left, values, _ = torch.linalg.svd(a, full_matrices=False)
    keep = values > _zero_deviation(features, ridge) * values[..., :1]
    values = torch.where(keep, values, 1.0)
    shrink = (values.square() + ridge).rsqrt()
    factor = left * (values * shrink).masked_fill(~keep, 0.0).unsqueeze(-2)
    back = (left * (shrink / values).masked_fill(~keep, 0.0).unsqueeze(-2)).mT
    return _Factor(factor, back, finite)


def _by_covariances(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    ridges: tuple[float, float],
    top_k: int | None,
    rank: int | Tensor,
    want_grad: bool,
    *,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None] | None:
    """The formula of this module's docstring, everything D×D; None where float32 won't do."""
    a, b, share = _centred(student, teacher, mask, dtype)
    sigma_ss, sigma_tt, sigma_ts = (x.mul_(share) for x in (_gram(a), _gram(b), b.mT @ a))
    finite = (_trace(sigma_ss) + _trace(sigma_tt)).isfinite()
    bad = ~finite[..., None, None]
    if dtype == torch.float64:
        sigma_ss, sigma_tt, sigma_ts = (
            x.masked_fill(bad, 0.0) for x in (sigma_ss, sigma_tt, sigma_ts)
        )
    whiten_s = _Whitening(sigma_ss, ridges[0], student)
    whiten_t = _Whitening(sigma_tt, ridges[1], teacher)
    if dtype == torch.float32 and not (whiten_s.trusted() and whiten_t.trusted()):
        return None

    whitened = whiten_s.transposed(whiten_t.transposed(sigma_ts).mT).mT  # (batch, Dt, Ds)
    if _use_polar(whitened, top_k):
        left = polar(whitened)
        right = torch.eye(whitened.shape[-1], dtype=dtype, device=whitened.device)
        root = left.mT @ whitened  # (MᵀM)^½
        corr = _trace(root)
    else:
        left, values, right = _svd(whitened, top_k, student)
        if dtype == torch.float32 and not bool((values > SMALLEST_FLOAT32).all()):
            return None
        root = None
        corr = values.sum(-1)
    corr = _bounded(corr, share, rank).masked_fill(~finite, torch.nan)
    if not want_grad:
        return corr, None
    directions = whiten_s(right) * share.sqrt()  # R_s V
    if root is None:
        to_student = _gram((directions * values.sqrt().unsqueeze(-2)).mT)  # (batch, Ds, Ds)
    else:
        to_student = directions @ root @ directions.mT
    to_teacher = (whiten_t(left) * share.sqrt()) @ directions.mT  # (batch, Dt, Ds)
    ds = (b @ to_teacher.masked_fill_(bad, torch.nan)).baddbmm_(a, to_student, alpha=-1)
    return corr, _masked(ds, mask).to(working_dtype(student))


class _Whitening:
    """R with R Rᵀ = (Σ + r·I)⁻¹: inverse Cholesky factor, or eigenvectors for ridge 0.

    Overwrites Σ.
    """

    def __init__(self, sigma: Tensor, ridge: float, features: Tensor) -> None:
        self.triangular = ridge > 0
        if self.triangular:
            diagonal = sigma.diagonal(dim1=-2, dim2=-1)
            self.largest = diagonal.amax(-1) + ridge
            # A ridge lost in the rounding of Σ would let the factorisation break down. The rounding
            # of each variance counts: one large column must not bury the ridge of all others.
            rounding = 4 * sigma.shape[-1] * torch.finfo(torch.float64).eps
            diagonal += ridge + rounding * (diagonal + ridge)
            self.factor, _ = torch.linalg.cholesky_ex(sigma)
        else:
            if _use_rotations(sigma, sigma.shape[-1]):
                _, values, vectors = torch.ops.fastkd.sqrtm(sigma)
            else:
                values, vectors = torch.linalg.eigh(sigma)
            eps = torch.finfo(torch.float64).eps
            zero = max(_zero_deviation(features, ridge) ** 2, sigma.shape[-1] * eps)
            keep = values > zero * values[..., -1:]
            roots = torch.where(keep, values, 1.0).rsqrt().masked_fill(~keep, 0.0)
            self.factor = vectors * roots.unsqueeze(-2)

    def trusted(self) -> bool:
        """Whether rounding to float32, grown by largest variance / smallest pivot, stays small."""
        pivots = self.factor.diagonal(dim1=-2, dim2=-1).amin(-1).square()
        rounding = torch.finfo(torch.float32).eps * self.largest / pivots
        return bool((rounding <= TRUSTED_ROUNDING).all())

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


def _svd(m: Tensor, top_k: int | None, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(U, σ, V)`` of the leading singular values, σ ≤ 1.

    U is zero where σ is no more than rounding of this work or of the features: there the loss has
    a kink, and the zero is one of its subgradients.
    """
    work = max(m.shape[-2:]) * torch.finfo(torch.float64).eps
    if m.dtype == torch.float32:
        left, values, right = _svd_float32(m)
    elif _use_rotations(m, m.shape[-1]):
        values, right = _by_rotations(m)
        left = m @ right / values.clamp_min(torch.finfo(m.dtype).tiny).unsqueeze(-2)
        work = _squared_rounding(m.shape[-1])
    else:
        left, values, right = torch.linalg.svd(m, full_matrices=False)
        right = right.mT
    zero = values <= max(work, torch.finfo(working_dtype(features)).eps)
    left = left.masked_fill(zero.unsqueeze(-2), 0.0)
    return left[..., :top_k], values[..., :top_k].clamp_max(1.0), right[..., :top_k]


def _svd_float32(m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(U, σ, V)`` by the eigenvectors of MᵀM: half the time of LAPACK's.

    Squaring loses the small ones: M times their (accurate) span, less what rounding put there of
    the large ones, is decomposed again. Where they are many LAPACK does it all.
    """
    if m.shape[-2] < m.shape[-1]:
        left, values, right = _svd_float32(m.mT)
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


def _by_rotations(m: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values, descending, and right singular vectors of M by the extension, from MᵀM."""
    _, squares, vectors = torch.ops.fastkd.sqrtm(m.mT @ m)
    values = squares.flip(-1).sqrt()
    lost = values <= _squared_rounding(m.shape[-1]) * values[..., :1]
    return values.masked_fill(lost, 0.0), vectors.flip(-1)


def _squared_rounding(n: int) -> float:
    """Singular values up to this part of the largest are lost when their squares are computed."""
    return math.sqrt(n * torch.finfo(torch.float64).eps)


def _use_rotations(x: Tensor, n: int) -> bool:
    """Whether the extension decomposes n×n matrices on x's GPU without waiting for the host."""
    return x.is_cuda and _extension.CUDA and _extension.cuda_roots_fit(n, x.device)


def _use_polar(x: Tensor, top_k: int | None) -> bool:
    """On a GPU eigen solvers wait for the host; products and Cholesky factors do not."""
    return x.is_cuda and top_k is None


def polar(m: Tensor, smallest: float = 1e-6) -> Tensor:
    """Orthogonal polar factor UVᵀ of M = U diag(σ) Vᵀ with σ ≤ 1, by dynamic Halley iteration.

    Singular values above ``smallest`` are mapped to 1, in four or five steps whose number depends
    on nothing but ``smallest``; below it they come out between 0 and 1, and 0 stays 0.
    X ← X·(a·I + b·XᵀX)(I + c·XᵀX)⁻¹ with the best a, b, c for the interval [low, 1]
    (Nakatsukasa, Bai, Gygi 2010).
    """
    if m.shape[-2] < m.shape[-1]:
        return polar(m.mT, smallest).mT
    eye = torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)
    x, low = m, smallest
    while low < 1 - 1e-9:
        d = (4 * (1 - low**2) / low**4) ** (1 / 3)
        root = math.sqrt(1 + d)
        a = root + math.sqrt(8 - 4 * d + 8 * (2 - low**2) / (low**2 * root)) / 2
        b = (a - 1) ** 2 / 4
        c = a + b - 1
        factor, _ = torch.linalg.cholesky_ex(eye + c * _gram(x))
        half = torch.linalg.solve_triangular(factor, x.mT, upper=False)
        solved = torch.linalg.solve_triangular(factor.mT, half, upper=True).mT
        x = (b / c) * x + (a - b / c) * solved
        low = min(1.0, low * (a + b * low**2) / (1 + c * low**2))
    return x


def _gram(x: Tensor) -> Tensor:
    return symmetric_product(x.mT, x)


def _trace(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1).sum(-1)


def _zero_deviation(features: Tensor, ridge: float) -> float:
    """Directions with up to this part of the largest deviation count as constant.

    They are rounding of the float64 work or, where no ridge covers it, of the features themselves.
    """
    work = max(features.shape[-2:]) * torch.finfo(torch.float64).eps
    return work if ridge > 0 else max(work, 10 * torch.finfo(working_dtype(features)).eps)


def _centred(
    student: Tensor, teacher: Tensor, mask: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Features minus their mean, zero where masked; and 1/(m−1) of each item, (*, 1, 1)."""
    if mask is None:
        count = torch.full((1, 1), student.shape[-2], dtype=dtype, device=student.device)
    else:
        count = mask.sum(-1, dtype=dtype)[..., None, None]
    centred = []
    for x in (student, teacher):
        x = _masked(x.to(dtype), mask)
        mean = x.sum(-2, keepdim=True) / count.clamp_min(1)
        centred.append(_masked(x - mean, mask))
    return centred[0], centred[1], (count - 1).clamp_min(1).reciprocal()


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zero, whatever stood there, in rows that are no observations."""
    return x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)


def _bounded(corr: Tensor, share: Tensor, rank: int | Tensor) -> Tensor:
    """Rounding must not lift the sum above ``rank`` or a masked m − 1; ``share`` is 1/(m−1)."""
    bound = share[..., 0, 0].reciprocal().round().clamp_max(rank)
    return torch.minimum(corr, bound.clamp_min(0))
