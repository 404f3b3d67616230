"""Canonical correlation between teacher and student features (MC3KD, eqs. 4-7).

The public functions and their checks. `fastkd.linalg.cca_solver` computes correlations and
gradients.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fastkd._core import check, extension
from fastkd._core.dispatch import Backend, backend_of
from fastkd._core.module import LossModule
from fastkd._core.numerics import (
    apply,
    autocast_off,
    once_differentiable,
    reduced,
    values_readable,
    working_dtype,
)
from fastkd._core.pooling import pool_tokens
from fastkd._core.warn import warn_caller
from fastkd.distributed import Group, InGroup, Ranks, ranks_of
from fastkd.linalg import cca_solver
from fastkd.linalg.cca_solver import Moments, Options, Problem
from fastkd.linalg.roots import inv_sqrtm_ref

Reduction = Literal["sum", "mean", "none"]
REDUCTIONS = get_args(Reduction)
Pool = Literal["tokens", "cls", "mean"]

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
    return reduced(-corr, observed >= 2, reduction)  # eq. 7; a mean counts these items alone


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
    eigenvectors, which PyTorch computes; on a GPU it waits for them.

    Args:
        student: (*, m, Ds), m observations.
        teacher: (*, m, Dt), without grad.
        mask: (*, m), 1 = real observation. Other rows are left out and don't count in m.
        ridge: r_s = r_t, or the pair (student, teacher), at least 0.
        top_k: number of largest correlations to sum; None for all.
        reduction: over the leading dimensions: "sum", "none", or "mean" over those with at least
            two real observations.
        backend: "auto", "torch" or "triton".
        gather, group: correlate over the observations of all processes, or of a group; see
            `fastkd.distributed`.

    Returns:
        Scalar, or (*) for reduction "none"; float64 for float64, else float32. Fewer than two
        real observations give 0 with zero gradient.

    Raises:
        TypeError, ValueError: a wrong shape, dtype, device or option, or a teacher that requires
            grad.

    >>> x = torch.eye(4)[:, :2]
    >>> cca_loss(x, 3.0 * x + 1.0, ridge=0.0)
    tensor(-2.)
    """
    check.pair(student, teacher, min_ndim=2)
    check.shape(
        "teacher", teacher, (*student.shape[:-1], teacher.shape[-1]), "student's but for the size"
    )
    mask = check.mask(mask, student.shape[:-1], student.device)
    options = _checked(ridge, top_k)
    check.choice("reduction", reduction, REDUCTIONS)
    ranks = ranks_of(gather, group)
    loss: Tensor = _losses(student, teacher, mask, options, backend, ranks)[0]
    counted = None
    if reduction == "mean":  # items with fewer than two observations have nothing to compare
        counted = (cca_solver.count_observed(student, mask, ranks) >= 2).expand(loss.shape)
    return reduced(loss, counted, reduction)


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

    >>> x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    >>> y = torch.tensor([[1.0], [-1.0], [-1.0], [1.0]])
    >>> canonical_correlations(x, torch.cat([-2 * x + y, y], 1))
    tensor([1.])
    """
    check.floating("x", x, min_ndim=2)
    check.floating("y", y, min_ndim=2)
    check.like("y", y, "x", x)
    check.shape("y", y, (*x.shape[:-1], y.shape[-1]), "x's but for the size")
    mask = check.mask(mask, x.shape[:-1], x.device)
    with torch.no_grad(), autocast_off(x):
        values = cca_solver.correlations(x, y, mask, _ridge_pair(ridge))
        return values.to(working_dtype(x))


@dataclass(eq=False, repr=False)
class CCALoss(LossModule, InGroup):
    """Canonical-correlation loss between hidden states of a student and a teacher (MC3KD, eq. 7).

    See `cca_loss`. Losses of several layers are averaged; layers of equal size run as one batch.
    Stores ridge, top_k and pool, no parameters.

    With m observations, Ds + Dt − (m − 1) correlations are 1 whatever the student computes, and
    their gradient is noise; the first such call for each pair of sizes warns. ``memory`` adds
    earlier observations: in training the module keeps the moments of about the last n, detached
    and faded exponentially, and correlates the batch and the memory together. The gradient reaches
    the batch's rows only, and its scale is that of a batch alone: N/m times the derivative, with m
    rows in the batch and N observations in all. Only a call with gradient in training mode updates
    the memory: it then holds these N, with all weights times n/N if N is above n. A batch with NaN
    is not stored. Under activation checkpointing the next call updates it, so that a forward pass
    that is computed again has the same memory; each call needs its backward pass before the next.

    Args:
        ridge: r_s = r_t, or the pair (student, teacher).
        top_k: number of largest correlations to sum; None for all.
        pool: the observations: "tokens", all real tokens of the batch; "cls", the first real token
            of each sample; "mean", the mean of each sample's real tokens.
        gather, group: as in `cca_loss`. The memory holds the rows of all processes.
        memory: number n of earlier observations; 0 for none; "auto" for 3·(Ds + Dt) less those of
            the batch.
        persistent: keep the memory in ``state_dict()``, from which a run continues with the same
            bits.

    >>> student, teacher = torch.randn(8, 16, 4, requires_grad=True), torch.randn(8, 16, 6)
    >>> CCALoss(ridge=1e-3)(student, teacher, mask=torch.ones(8, 16)).backward()
    >>> student.grad.shape
    torch.Size([8, 16, 4])
    """

    ridge: Ridge = 1e-4
    top_k: int | None = None
    pool: Pool = "tokens"
    _: KW_ONLY
    gather: bool = False
    group: Group = None
    memory: int | Literal["auto"] = 0
    persistent: bool = False

    def check_options(self) -> None:
        super().check_options()
        _checked(self.ridge, self.top_k)
        if self.memory != "auto":
            check.integer("memory", self.memory)
            check.number("memory", self.memory, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._warned: set[tuple[int, int]] = set()  # (Ds, Dt)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Empty the memory."""
        self._memories: list[Moments] = []  # one for each batch of layers
        self._awaited: dict[int, tuple] = {}  # arguments of updates after the backward pass

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.persistent:
            self._update_awaited()
            destination[f"{prefix}memory.batches"] = torch.tensor(len(self._memories))
            for i, moments in enumerate(self._memories):
                for name, x in moments._asdict().items():
                    destination[f"{prefix}memory.{i}.{name}"] = x

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, *errors):
        if self.persistent:
            first = f"{prefix}memory."
            batches = state_dict.pop(f"{first}batches", None)
            if batches is None:
                missing.append(f"{first}batches")
            self.reset_parameters()
            for i in range(int(batches or 0)):
                found = (state_dict.pop(f"{first}{i}.{name}") for name in Moments._fields)
                self._memories.append(Moments(*(x.detach().clone() for x in found)))
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *errors)

    def forward(
        self,
        student: Tensor | Sequence[Tensor],
        teacher: Tensor | Sequence[Tensor],
        mask: Tensor | None = None,
    ) -> Tensor:
        """Mean loss over the layers: student (B, N, Ds), teacher (B, N, Dt), mask (B, N)."""
        pairs = check.layer_pairs(student, teacher)
        for s, t in pairs:
            check.pair(s, t, ndim=3)
            check.shape("student", s, (*pairs[0][0].shape[:2], s.shape[-1]), "the first layer's")
            check.shape("teacher", t, (*s.shape[:2], t.shape[-1]), "student's but for the size")
        real = check.mask(mask, pairs[0][0].shape[:2], pairs[0][0].device)
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
        if not _in_backward():
            self._update_awaited()
        batches: dict[tuple, list[tuple[Tensor, Tensor]]] = {}
        for s, t in pooled:
            batches.setdefault((s.dtype, s.shape[-1], t.shape[-1]), []).append((s, t))
        losses, options = [], _checked(self.ridge, self.top_k)
        for i, ((_, *sizes), batch) in enumerate(batches.items()):
            with autocast_off(batch[0][0]):  # which refuses to stack the other half precision
                students, teachers = map(torch.stack, zip(*batch, strict=True))
            masks = None if observed is None else observed.expand(students.shape[:-1])
            memory = self._memory(i, students, sizes)
            loss, *totals = _losses(students, teachers, masks, options, "auto", ranks, memory)
            losses.append(loss)
            trains = self.training and torch.is_grad_enabled() and students.requires_grad
            if memory is not None and trains:
                update = memory, Moments(*totals), sum(sizes)
                if _may_be_recomputed():
                    self._awaited[i] = update
                else:
                    self._update(*update)
        return torch.cat(losses).mean()

    def _memory(self, i: int, student: Tensor, sizes: list[int]) -> Moments | None:
        """Moments for a batch (L, m, Ds) of layers; zeros before its first update.

        In float64 on the features' device, wherever the Module was moved.
        """
        if self.memory == 0:
            return None
        layers, (d_s, d_t) = len(student), sizes
        shapes = [(), (1, d_s), (1, d_t), (d_s, d_s), (d_t, d_t), (d_t, d_s)]
        if i == len(self._memories):
            zeros = (student.new_zeros(layers, *x, dtype=torch.float64) for x in shapes)
            self._memories.append(Moments(*zeros))
        memory = self._memories[i]
        if [x.shape for x in memory] != [(layers, *x) for x in shapes]:
            raise ValueError(
                "memory: it holds moments of other layers or sizes; empty it by reset_parameters()"
            )
        if memory.observations.device != student.device:
            memory = self._memories[i] = Moments(*(x.to(student.device) for x in memory))
        return memory

    def _update_awaited(self) -> None:
        awaited, self._awaited = self._awaited, {}
        for update in awaited.values():
            self._update(*update)

    @torch.no_grad()
    def _update(self, memory: Moments, totals: Moments, dims: int) -> None:
        """Store the moments of memory and batch, faded, in place: a CUDA graph may hold them."""
        count = totals.observations
        limit: Tensor | int = 3 * dims if self.memory == "auto" else self.memory
        if self.memory == "auto":
            limit = (limit - (count - memory.observations)).clamp_min(0)
        keep = (limit / count.clamp_min(1)).clamp_max(1.0)
        traces = [x.diagonal(dim1=-2, dim2=-1).sum(-1) for x in totals[3:5]]
        finite = torch.stack(traces).sum(0).isfinite()  # a NaN must not stay
        for old, new, fades in zip(memory, totals, (1, 0, 0, 1, 1, 1), strict=True):
            shape = -1, *[1] * (new.dim() - 1)
            faded = new * keep.view(shape) if fades else new
            torch.where(finite.view(shape), faded, old, out=old)

    def _warn_if_saturated(
        self, pairs: list[tuple[Tensor, Tensor]], observed: Tensor | None, ranks: Ranks | None
    ) -> None:
        # A graph must not depend on _warned. Faded moments of a memory have full rank.
        if torch.compiler.is_compiling() or self.memory:
            return
        sizes = {(s.shape[-1], t.shape[-1]) for s, t in pairs} - self._warned
        if not sizes:
            return
        observations = pairs[0][0].shape[0]
        if observed is not None and values_readable(observed):
            observations = int(observed.sum())
        if ranks is not None:  # an estimate: the exact sum would make the processes wait
            observations *= ranks.size
        rank = max(observations - 1, 0)
        for d_s, d_t in sorted(sizes):
            ones = min(d_s, rank) + min(d_t, rank) - rank
            if ones <= 0:
                continue
            self._warned.add((d_s, d_t))
            warn_caller(
                f"CCALoss: {observations} observations for {d_s} + {d_t} dimensions; {ones} of "
                f"{min(d_s, d_t, rank)} correlations are 1 by counting alone, whatever the student "
                "computes. Use memory=, larger batches, a larger ridge or top_k."
            )


def _in_backward() -> bool:
    """Whether activation checkpointing computes a forward pass again."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _may_be_recomputed() -> bool:
    """Whether hooks replace saved tensors, as those of activation checkpointing do."""
    compiling = torch.compiler.is_compiling()
    return not compiling and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _ridge_pair(ridge: Ridge) -> tuple[float, float]:
    pair = tuple(ridge) if isinstance(ridge, (tuple, list)) else (ridge, ridge)
    if len(pair) != 2:
        raise ValueError(f"ridge must be a number or a pair (student, teacher), got {ridge!r}")
    for r in pair:
        check.number("ridge", r, at_least=0.0)
    return float(pair[0]), float(pair[1])


def _checked(ridge: Ridge, top_k: int | None) -> Options:
    if top_k is not None:
        check.positive_int("top_k", top_k)
    return Options(_ridge_pair(ridge), top_k)


def _losses(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    options: Options,
    backend: Backend,
    ranks: Ranks | None,
    memory: Moments | None = None,
) -> tuple[Tensor, ...]:
    """Losses (*) of features (*, m, D), and with memory the moments of memory and batch.

    Over the observations of all processes: either these are gathered, or ``options`` has the
    processes whose moments are added. m may differ by process.
    """
    options = options._replace(digits=_uses_digits(backend, student, options))
    if ranks is not None:
        rows = ranks.max(student.shape[-2], student.device)
        if cca_solver.moments_are_less(rows, student, teacher, ranks):
            options = options._replace(ranks=ranks)
        else:
            observations = [x.movedim(-2, 0) for x in (student, teacher)]
            real = None if mask is None else mask.movedim(-1, 0)
            observations, real = ranks.gather_samples(observations, real)
            student, teacher = (x.movedim(0, -2) for x in observations)
            mask = None if real is None else real.movedim(0, -1)
    return apply(_NegativeCorrelation, student, teacher, mask, options, memory)


def _uses_digits(backend: Backend, student: Tensor, options: Options) -> bool:
    """Whether Triton kernels compute the large products, from integer digits.

    A GPU with float64 tensor cores is as fast without them.
    """
    unsupported = None
    if options.top_k is not None or min(options.ridges) == 0:
        unsupported = "ridge=0 and top_k need eigenvectors, which PyTorch computes"
    if backend_of(backend, "cca_loss", student, unsupported) != "triton":
        return False
    return backend != "auto" or not extension.multiplies_float64(student.device)


class _NegativeCorrelation(torch.autograd.Function):
    """Losses (*) of features (*, m, D), and their gradient, from one root.

    With memory also the moments of memory and batch.
    """

    @staticmethod
    def forward(ctx, student, teacher, mask, options, memory):
        with autocast_off(student):
            batch = student.shape[:-2].numel()
            problem = Problem(
                student.reshape(batch, *student.shape[-2:]),
                teacher.reshape(batch, *teacher.shape[-2:]),
                None if mask is None else mask.reshape(batch, mask.shape[-1]),
                options,
                want_grad=ctx.needs_input_grad[0],
                memory=memory,
            )
            in_graph = torch.compiler.is_compiling() and options.ranks is None
            solve = cca_solver.solve_in_graph if in_graph else cca_solver.solve
            corr, ds, totals = solve(problem)
            ctx.dtype = student.dtype
            ctx.ranks = 1 if options.ranks is None else options.ranks.size
            ctx.save_for_backward(None if ds is None else ds.reshape(student.shape))
            corr = corr.to(working_dtype(student)).view(student.shape[:-2])
            stored = totals or ()
            ctx.mark_non_differentiable(*stored)
            return -corr, *stored

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        (ds,) = ctx.saved_tensors
        with autocast_off(grad):
            return (-ctx.ranks * grad[..., None, None] * ds).to(ctx.dtype), None, None, None, None
