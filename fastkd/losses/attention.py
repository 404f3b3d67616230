"""Mean squared difference of attention maps (TinyBERT, eq. 7)."""

import functools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fastkd._core import check
from fastkd._core.dispatch import Backend, backend_of
from fastkd._core.fallback import by_reference
from fastkd._core.module import LossModule
from fastkd._core.numerics import LossInCpp, apply, reduced, saveable, upcast
from fastkd._core.plans import planned

Heads = Literal["match", "mean"]
Reduction = Literal["mean", "sum", "none"]
HEADS, REDUCTIONS = get_args(Heads), get_args(Reduction)


def attention_loss_ref(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None = None,
    *,
    heads: Heads = "match",
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Eq. 7 of TinyBERT in plain PyTorch; see `attention_loss`."""
    losses = _sample_losses(heads, upcast(student), upcast(teacher), mask)
    return reduced(losses, None if mask is None else mask.bool().any(1), reduction, weights)


def _sample_losses(heads: str, A_s: Tensor, A_t: Tensor, mask: Tensor | None) -> Tensor:
    """Losses (B,) of maps (B, H, N, N)."""
    if heads == "mean":
        A_s, A_t = A_s.mean(1, keepdim=True), A_t.mean(1, keepdim=True)
    B, h, N, _ = A_s.shape
    real = A_s.new_ones(B, N, dtype=torch.bool) if mask is None else mask.bool()
    pair = real[:, None, :, None] & real[:, None, None, :]
    squares = torch.where(pair, A_s - A_t, 0).square()
    mse = squares.sum((2, 3)) / pair.sum((2, 3)).clamp(min=1)  # (B, h), of each head
    return mse.sum(1) / h


@planned
def attention_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None = None,
    *,
    heads: Heads = "match",
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    backend: Backend = "auto",
) -> Tensor:
    """Mean squared difference of two attention maps.

    L = (1/h) Σ_i MSE(A_i^S, A_i^T)  (Jiao et al., *TinyBERT*, 2020, eq. 7)

    A are scores before the softmax in the paper and probabilities in many implementations; any
    (B, H, N, N) is accepted. Entries with a padded query or key don't count, whatever they hold. A
    sample without a real token gives zero.

    Args:
        student: (B, H, N, N): heads, queries, keys.
        teacher: (B, H_t, N, N), same dtype and device, without grad.
        mask: (B, N) bool or 0/1, 1 = real token.
        heads: "match" compares head by head and needs H = H_t; "mean" compares the mean over the
            student's heads with the mean over the teacher's, for any numbers of heads.
        weights: (B,), factors of the samples' losses, as in `fastkd.hidden_state_loss`.
        reduction: over the samples' losses: "mean" over those with a real token, "sum", or "none"
            for (B,).
        backend: "auto", "torch", "triton" or "cpp".

    Returns:
        Scalar, or (B,), in float32 (float64 for float64).

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device or option, or a teacher that requires
            grad.

    >>> student, teacher = torch.zeros(2, 4, 2, 2), torch.full((2, 4, 2, 2), 0.5)
    >>> attention_loss(student, teacher).item()
    0.25
    """
    return _attention_layers([(student, teacher)], mask, heads, weights, reduction, backend)


@dataclass(eq=False, repr=False)
class AttentionLoss(LossModule):
    """See `attention_loss`; the losses of several layers are averaged.

    Args:
        heads, reduction, backend: as in `attention_loss`.

    ``forward(student, teacher, mask=None)`` takes attention maps (B, H, N, N), or lists of layers.

    >>> maps = [torch.rand(2, 4, 3, 3, requires_grad=True) for _ in range(3)]
    >>> AttentionLoss(heads="mean")(maps, [torch.rand(2, 12, 3, 3)] * 3).shape
    torch.Size([])
    """

    heads: Heads = "match"
    _: KW_ONLY
    reduction: Reduction = "mean"
    backend: Backend = "auto"

    def forward(
        self,
        student: Tensor | Sequence[Tensor],
        teacher: Tensor | Sequence[Tensor],
        mask: Tensor | None = None,
    ) -> Tensor:
        pairs = check.layer_pairs(student, teacher)
        return _attention_layers(pairs, mask, self.heads, None, self.reduction, self.backend)


@planned
def _attention_layers(
    pairs: list[tuple[Tensor, Tensor]],
    mask: Tensor | None,
    heads: Heads,
    weights: Tensor | None,
    reduction: Reduction,
    backend: Backend,
) -> Tensor:
    check.choice("heads", heads, HEADS)
    check.choice("reduction", reduction, REDUCTIONS)
    for student, teacher in pairs:
        _check_maps(student, teacher, pairs[0][0], heads)
    first = pairs[0][0]
    real = check.mask(mask, (first.shape[0], first.shape[2]), first.device)
    pairs = [(saveable(student), saveable(teacher)) for student, teacher in pairs]
    backends = {backend_of(backend, "attention_loss", student) for student, _ in pairs}
    runs_on = backends.pop() if len(backends) == 1 else "torch"
    options = _Options(heads == "mean", len(pairs), reduction)
    compared = None
    if real is not None and (weights is not None or runs_on == "torch"):
        compared = real.any(1)
    weights = check.weights(weights, first.shape[:1], first, compared)
    if runs_on == "torch":
        losses = functools.partial(_sample_losses, heads)
        entries = first.shape[1] * first.shape[2] ** 2
        terms = [by_reference(losses, entries, *pair, real) / len(pairs) for pair in pairs]
    elif runs_on == "cpp":
        terms = [apply(LossInCpp, options, *pair, real, weights) for pair in pairs]
    else:
        from fastkd.kernels.pointers import layer_groups
        from fastkd.kernels.upstream import LossByKernel

        terms = []
        for group in layer_groups(pairs):
            students, teachers = zip(*(pairs[i] for i in group), strict=True)
            given = *students, *teachers, real, weights
            terms.append(apply(LossByKernel, options, *given))
    loss = terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)
    return reduced(loss, compared, reduction, weights) if runs_on == "torch" else loss


def _check_maps(student: Tensor, teacher: Tensor, first: Tensor, heads: Heads) -> None:
    check.pair(student, teacher, ndim=4)
    B, H, N, _ = student.shape
    check.shape("student", student, (B, H, N, N), "queries and keys of the same tokens")
    if (first.shape[0], first.shape[2]) != (B, N):
        raise ValueError(
            f"student has layers of shapes {tuple(first.shape)} and {tuple(student.shape)}; "
            "pass layers of the same samples and tokens"
        )
    H_t = teacher.shape[1]
    check.shape("teacher", teacher, (B, H_t, N, N), "student's samples and tokens")
    if H == 0 or H_t == 0:
        raise ValueError(f"student and teacher must have at least one head, got {H} and {H_t}")
    if heads == "match" and H_t != H:
        raise ValueError(
            f"student has {H} heads but teacher has {H_t}; compare their means with heads='mean'"
        )


@dataclass(frozen=True)
class _Options:
    mean: bool  # compare means over the heads
    layers: int  # number of all layers: each loss is divided by it
    reduction: str  # applied by the kernels, which compute the gradient with the loss
    stacked = True

    def cpp(self, tensors: Sequence[Any], needs: Sequence[bool]) -> list[Tensor]:
        """Of one layer: student, teacher, mask, weights; see `LossInCpp`."""
        student, teacher, *rest = tensors
        options = self.mean, self.layers, self.reduction, needs[0]
        maps = student.contiguous(), teacher.contiguous()
        return torch.ops.fastkd_cpp.attention(*maps, *rest, *options)

    def triton(
        self, tensors: Sequence[Any], upstream: Tensor | None, needs: Sequence[bool]
    ) -> list[Tensor]:
        """Of layers of one shape: students, teachers, mask, weights; see `LossByKernel`."""
        from fastkd.kernels.attention import attention

        maps: list[Any]
        *maps, mask, weights = (None if x is None else x.contiguous() for x in tensors)
        n, options = len(maps) // 2, (self.mean, self.layers, self.reduction)
        return attention(maps[:n], maps[n:], mask, weights, upstream, *options, any(needs))
