"""Canonical correlation between teacher and student features (MC3KD, eqs. 4-7).

The public functions and their checks. `fastkd.linalg.cca_solver` computes correlations and
gradients.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fastkd._core.checks import (
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
from fastkd._core.dispatch import Backend, backend_of
from fastkd._core.numerics import (
    apply,
    autocast_off,
    once_differentiable,
    values_readable,
    working_dtype,
)
from fastkd._core.pooling import pool_tokens
from fastkd._core.warn import warn_caller
from fastkd.distributed import Group, InGroup, Ranks, ranks_of
from fastkd.linalg import cca_solver
from fastkd.linalg.cca_solver import Options, Problem
from fastkd.linalg.roots import inv_sqrtm_ref

Reduction = Literal["sum", "mean", "none"]
REDUCTIONS = get_args(Reduction)
Pool = Literal["tokens", "cls", "mean"]
POOLS = get_args(Pool)

Ridge = float | tuple[float, float]


def cca_loss_ref(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None = None,
    *,
    ridge: Ridge = 1e-4,
    top_k: int | None = None,
    reduction: Reduction = "sum",
) -> Tensor:
    """Eqs. 4-7 as written, with observations in rows: the paper's X̄X̄ᵀ is X̄ᵀX̄. See `cca_loss`."""
    r_s, r_t = _ridge_pair(ridge)
    S, T = student.to(working_dtype(student)), teacher.to(working_dtype(teacher))
    real = torch.ones_like(S[..., :1]) if mask is None else mask.unsqueeze(-1).to(S.dtype)
    S, T = S.masked_fill(real == 0, 0.0), T.masked_fill(real == 0, 0.0)
    observed = real.sum(-2, keepdim=True)
    m = observed.clamp_min(1)

    S_bar = (S - S.sum(-2, keepdim=True) / m) * real  # (*, m, Ds)
    T_bar = (T - T.sum(-2, keepdim=True) / m) * real  # (*, m, Dt)
    m = m.clamp_min(2)  # one observation has covariance 0, not 0/0
    I_s, I_t = (torch.eye(x.shape[-1], dtype=x.dtype, device=x.device) for x in (S, T))
    sigma_tt = T_bar.mT @ T_bar / (m - 1) + r_t * I_t  # eq. 5
    sigma_ts = T_bar.mT @ S_bar / (m - 1)
    sigma_ss = S_bar.mT @ S_bar / (m - 1) + r_s * I_s

    whitened = inv_sqrtm_ref(sigma_tt) @ sigma_ts @ inv_sqrtm_ref(sigma_ss)  # eq. 4
    corr = torch.linalg.svdvals(whitened)[..., :top_k].sum(-1)  # eq. 6: tr (TᵀT)^½
    if reduction == "mean":  # over items with at least two observations
        return -corr.sum() / (observed >= 2).sum().clamp_min(1)
    return -corr.sum() if reduction == "sum" else -corr  # eq. 7


def cca_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None = None,
    *,
    ridge: Ridge = 1e-4,
    top_k: int | None = None,
    reduction: Reduction = "sum",
    backend: Backend = "auto",
    gather: bool = False,
    group: Group = None,
) -> Tensor:
    """Negative sum of the canonical correlations between student and teacher features.

    L = −‖Σ_tt^{−½} Σ_ts Σ_ss^{−½}‖_* (MC3KD, eqs. 4-7), with Σ_ss = S̄ᵀS̄/(m−1) + r_s·I and
    likewise Σ_tt. Each index of the leading dimensions has its own loss. With ``top_k`` only the
    largest correlations count. With ``ridge=0`` directions without variance are left out. Both need
    eigenvectors; PyTorch computes those of large matrices, and waits for a GPU.

    Args:
        student: (*, m, Ds), m observations.
        teacher: (*, m, Dt), without grad.
        mask: (*, m), 1 = real observation. Other rows are left out and don't count in m.
        ridge: r_s = r_t, or the pair (student, teacher), at least 0.
        top_k: number of largest correlations to sum; None for all.
        reduction: over the leading dimensions: "sum", "none", or "mean" over those with at least
            two real observations.
        backend: "auto", "torch" or "triton".
        gather: correlate over the observations of all processes; see `fastkd.distributed`.
        group: the processes that gather, by default all.

    Returns:
        Scalar, or (*) for reduction "none"; float64 for float64, else float32. Fewer than two
        real observations give 0 with zero gradient.

    Raises:
        TypeError: wrong type or dtype.
        ValueError: wrong shape, device, option, or a teacher that requires grad.

    Example:
        >>> import torch
        >>> from fastkd.losses.cca import cca_loss
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
    backend_of(backend, "cca_loss", student)
    ranks = ranks_of(gather, group)
    arguments = _over_ranks(student, teacher, mask, Options(ridges, top_k), ranks)
    loss: Tensor = apply(_NegativeCorrelation, *arguments)
    if reduction == "mean":  # items with fewer than two observations have nothing to compare
        observed = cca_solver.count_observed(student, mask, ranks).expand(loss.shape)
        return loss.sum() / (observed >= 2).sum().clamp_min(1)
    return loss.sum() if reduction == "sum" else loss


def canonical_correlations(
    x: Tensor, y: Tensor, *, ridge: Ridge = 0.0, mask: Tensor | None = None
) -> Tensor:
    """Canonical correlations between two feature matrices, largest first.

    The singular values of Σ_xx^{−½} Σ_xy Σ_yy^{−½} (MC3KD, eqs. 2 and 4), from singular value
    decompositions of the centred features in float64: no covariance is formed, so ill-conditioned
    features lose no digits. The result has no gradient; train with `cca_loss`.

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
        >>> from fastkd.losses.cca import canonical_correlations
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
    with torch.no_grad(), autocast_off(x):
        values = cca_solver.correlations(x, y, mask, _ridge_pair(ridge))
        return values.to(working_dtype(x))


class CCALoss(InGroup):
    """Canonical-correlation loss between hidden states of a student and a teacher (MC3KD, eq. 7).

    See `cca_loss`. Losses of several layers are averaged. On a GPU all layers run as one batch,
    elsewhere those of equal size. Stores ridge, top_k and pool, no parameters.

    With no more observations than dimensions every correlation is near 1 whatever the student
    computes, and the loss teaches nothing; the first such call warns.

    Args:
        ridge: r_s = r_t, or the pair (student, teacher).
        top_k: number of largest correlations to sum; None for all.
        pool: the observations: "tokens", all real tokens of the batch; "cls", the first real token
            of each sample; "mean", the mean of each sample's real tokens.
        gather, group: as in `cca_loss`.

    Example:
        >>> import torch
        >>> from fastkd.losses.cca import CCALoss
        >>> student, teacher = torch.randn(8, 16, 4, requires_grad=True), torch.randn(8, 16, 6)
        >>> CCALoss(ridge=1e-3)(student, teacher, mask=torch.ones(8, 16)).backward()
        >>> student.grad.shape
        torch.Size([8, 16, 4])
    """

    def __init__(
        self,
        ridge: Ridge = 1e-4,
        top_k: int | None = None,
        pool: Pool = "tokens",
        *,
        gather: bool = False,
        group: Group = None,
    ) -> None:
        super().__init__()
        _ridge_pair(ridge)
        if top_k is not None:
            check_positive_int("top_k", top_k)
        check_choice("pool", pool, POOLS)
        self.ridge = ridge
        self.top_k = top_k
        self.pool = pool
        self.gather, self.group = gather, group
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
        if self.pool == "tokens":
            pooled = [(s.flatten(0, 1), t.flatten(0, 1)) for s, t in pairs]
            observed = None if real is None else real.flatten()
        else:
            pooled = [
                (pool_tokens(s, real, self.pool), pool_tokens(t, real, self.pool)) for s, t in pairs
            ]
            observed = None if real is None else real.any(1)
        ranks = ranks_of(self.gather, self.group)
        self._warn_if_saturated(pooled, observed, ranks)
        batches: dict[tuple, list[tuple[Tensor, Tensor]]] = {}
        for s, t in pooled:
            sizes = () if _pads_layers(s) else (s.shape[-1], t.shape[-1])
            batches.setdefault((s.dtype, s.device, sizes), []).append((s, t))
        losses = []
        for batch in batches.values():
            students, teachers = (_stacked(side) for side in zip(*batch, strict=True))
            masks = None if observed is None else observed.expand(students.shape[:-1])
            dims = tuple(min(s.shape[-1], t.shape[-1]) for s, t in batch)
            options = Options(_ridge_pair(self.ridge), self.top_k, dims)
            arguments = _over_ranks(students, teachers, masks, options, ranks)
            losses.append(apply(_NegativeCorrelation, *arguments))
        return torch.cat(losses).mean()

    def _warn_if_saturated(
        self,
        pairs: list[tuple[Tensor, Tensor]],
        observed: Tensor | None,
        ranks: Ranks | None,
    ) -> None:
        if torch.compiler.is_compiling() or self._warned:  # a graph must not depend on _warned
            return
        observations = pairs[0][0].shape[0]
        if observed is not None and values_readable(observed):
            observations = int(observed.sum())
        if ranks is not None:  # an estimate: the exact sum would make the processes wait
            observations *= ranks.size
        dims = max(x.shape[-1] for pair in pairs for x in pair)
        if observations <= dims:
            self._warned = True
            warn_caller(
                f"CCALoss: {observations} observations for {dims} dimensions; every correlation is "
                "near 1 whatever the student computes, so the loss teaches nothing. Use "
                "pool='tokens', larger batches or a larger ridge.",
            )

    def extra_repr(self) -> str:
        return f"ridge={self.ridge}, top_k={self.top_k}, pool={self.pool!r}"


def _pads_layers(x: Tensor) -> bool:
    """Whether layers of different sizes run as one batch, padded to the largest.

    On a GPU launches take the time, and their number doesn't depend on the number of layers. On a
    CPU, where large items run one by one anyway, padding would only add arithmetic with zeros.
    """
    return x.is_cuda


def _stacked(layers: Sequence[Tensor]) -> Tensor:
    """Layers (m, ≤ D) stacked to (L, m, D), with columns of zeros in the smaller ones.

    Such columns change no correlation: their cross-covariance is 0, and their covariance the
    ridge's identity or, without a ridge, a direction without variance.
    """
    size = max(x.shape[-1] for x in layers)
    missing = [size - x.shape[-1] for x in layers]
    with autocast_off(layers[0]):  # which refuses to stack the other half-precision dtype
        return torch.stack(
            [F.pad(x, (0, n)) if n else x for x, n in zip(layers, missing, strict=True)]
        )


def _ridge_pair(ridge: Ridge) -> tuple[float, float]:
    """Ridges of student and teacher."""
    pair = tuple(ridge) if isinstance(ridge, (tuple, list)) else (ridge, ridge)
    if len(pair) != 2:
        raise ValueError(f"ridge must be a number or a pair (student, teacher), got {ridge!r}")
    for r in pair:
        check_number("ridge", r, at_least=0.0)
    return float(pair[0]), float(pair[1])


def _over_ranks(
    student: Tensor, teacher: Tensor, mask: Tensor | None, options: Options, ranks: Ranks | None
) -> tuple[Tensor, Tensor, Tensor | None, Options]:
    """Arguments of `_NegativeCorrelation` over the observations of all processes.

    Either the observations are gathered, or ``options`` has the processes whose moments are added.
    Features are (*, m, D), the mask is (*, m); m may differ by process.
    """
    if ranks is None:
        return student, teacher, mask, options
    rows = ranks.max(student.shape[-2], student.device)
    if cca_solver.moments_are_less(rows, student, teacher, ranks):
        return student, teacher, mask, replace(options, ranks=ranks)
    observations = [x.movedim(-2, 0) for x in (student, teacher)]
    real = None if mask is None else mask.movedim(-1, 0)
    observations, real = ranks.gather_samples(observations, real)
    student, teacher = (x.movedim(0, -2) for x in observations)
    return student, teacher, None if real is None else real.movedim(0, -1), options


class _NegativeCorrelation(torch.autograd.Function):
    """Losses (*) of features (*, m, D), and their gradient, from one decomposition."""

    @staticmethod
    def forward(ctx, student, teacher, mask, options):
        with autocast_off(student):
            batch = student.shape[:-2].numel()
            problem = Problem(
                student.reshape(batch, *student.shape[-2:]),
                teacher.reshape(batch, *teacher.shape[-2:]),
                None if mask is None else mask.reshape(batch, mask.shape[-1]),
                options,
                want_grad=ctx.needs_input_grad[0],
            )
            in_graph = torch.compiler.is_compiling() and options.ranks is None
            solve = cca_solver.solve_in_graph if in_graph else cca_solver.solve
            corr, ds = solve(problem)
            ctx.dtype = student.dtype
            ctx.ranks = 1 if options.ranks is None else options.ranks.size
            ctx.save_for_backward(None if ds is None else ds.reshape(student.shape))
            corr = corr.to(working_dtype(student)).view(student.shape[:-2])
            return -corr

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (ds,) = ctx.saved_tensors
        with autocast_off(grad):
            return (-ctx.ranks * grad[..., None, None] * ds).to(ctx.dtype), None, None, None
