"""Losses that compare samples, over the samples of all processes.

Each process holds a part of the batch. Its rows are gathered, the student's with gradients, and
every process computes the loss of the whole batch. DistributedDataParallel and FSDP average
gradients over the processes; with that average value and every gradient equal one process's on
the concatenated batch, parts of unequal size and empty ones included. A loop that sums gradients
has to divide them by the number of processes.

The backward pass sends nothing: all processes hold the same loss, so the gradient of a process's
own rows is known to it; it is multiplied by the number of processes W, which the average takes out
again. The forward pass sends to each of the W − 1 others, for a part of B samples, N tokens,
L layer pairs and b bytes a number, besides one message of a few integers a step:

| loss | rows sent | bytes |
|---|---|---|
| relations over samples | tokens of both sides | L·B·N·(Ds + Dt)·b + B·N |
| relations over tokens | none, only how many samples count | 8 |
| KNN, pool "cls" or "mean" | one row a sample of both sides | B·(Ds + Dt)·b + 8·B |
| KNN, pool "tokens" | tokens of both sides | B·N·(Ds + Dt)·b + B·N + 8·B |
| COS-NCE, pool "tokens" | tokens of both sides | L·B·N·(Ds + Dt)·b + B·N |
| CCA, pool "tokens" | tokens of both sides | L·B·N·(Ds + Dt)·b + B·N |
| CCA, pool "cls" or "mean" | one row a sample of both sides | L·B·(Ds + Dt)·b + B |
| dual projection, soft targets, task | none, only how many items count | 8 |
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastkd._numerics import once_differentiable

__all__ = ["AcrossRanks", "Ranks", "gather_rows", "row_counts", "world_size"]


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Number of processes in ``group``, 1 without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(group)


def row_counts(x: Tensor, group: dist.ProcessGroup | None = None) -> list[int]:
    """How many rows ``x`` (B, ...) has in each process, by rank; reads the answer on the host.

    Raises:
        ValueError: the processes' tensors differ in another dimension than the first.
    """
    sizes = torch.tensor([x.dim(), *x.shape, *[0] * (7 - x.dim())], device=x.device)
    shapes = [torch.empty_like(sizes) for _ in range(world_size(group))]
    dist.all_gather(shapes, sizes, group=group)
    by_rank = [tuple(shape[1 : 1 + shape[0]]) for shape in torch.stack(shapes).tolist()]
    if len({shape[1:] for shape in by_rank}) > 1:
        raise ValueError(
            f"tensors of shapes {', '.join(map(str, by_rank))} on ranks 0 to {len(by_rank) - 1} "
            "can't be gathered; all but the first dimension must agree"
        )
    return [shape[0] for shape in by_rank]


def gather_rows(
    x: Tensor, group: dist.ProcessGroup | None = None, *, counts: list[int] | None = None
) -> Tensor:
    """The rows of ``x`` (B, ...) of all processes, in the order of their ranks.

    Differentiable, without communication in the backward pass: see the module's text for what
    the processes have to do alike. Without torch.distributed ``x`` itself.

    Args:
        x: (B_r, ...) on rank r; B_r may differ and be 0.
        group: the processes, by default all.
        counts: every process's B_r, from `row_counts`, where they are known already.

    Returns:
        (Σ B_r, ...), dtype of ``x``.

    Example:
        >>> gather_rows(torch.ones(3, 2)).shape
        torch.Size([3, 2])
    """
    if world_size(group) == 1:
        return x
    return _GatherRows.apply(x, row_counts(x, group) if counts is None else counts, group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, counts, group):
        rank = dist.get_rank(group)
        ctx.own = sum(counts[:rank]), counts[rank], len(counts)
        # Collectives take equal parts, and not every backend takes bool.
        padded = x.new_zeros(max(counts), *x.shape[1:], dtype=_sent_as(x.dtype))
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in counts]
        if padded.numel():
            dist.all_gather(parts, padded, group=group)
        gathered = [part[:count] for part, count in zip(parts, counts, strict=True)]
        return torch.cat(gathered).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        start, count, ranks = ctx.own
        return gradient[start : start + count] * ranks, None, None


def _sent_as(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype == torch.bool else dtype


class Ranks:
    """The processes of a group, whose rows of one batch are gathered several times."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group, self.size = group, world_size(group)
        self._counts: list[int] | None = None

    def gather(self, x: Tensor) -> Tensor:
        """`gather_rows`; every tensor has as many rows as this process's first."""
        if self._counts is None:
            self._counts = row_counts(x.new_empty(len(x)), self.group)
        return gather_rows(x, self.group, counts=self._counts)

    def sum(self, x: Tensor) -> Tensor:
        """Sum of ``x`` over the processes, without gradient."""
        return self._reduce(x, dist.ReduceOp.SUM)

    def max(self, x: int, device: torch.device) -> int:
        """Largest ``x``; reads the answer on the host."""
        return int(self._reduce(torch.tensor(x, device=device), dist.ReduceOp.MAX))

    def _reduce(self, x: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        x = x.detach().clone()
        if self.size > 1:
            dist.all_reduce(x, how, group=self.group)
        return x


class AcrossRanks(nn.Module):
    """A loss over the samples of all processes: a Module or function of this package, wrapped.

    Every tensor that the loss is called with, also in lists of layers, is gathered along its first
    dimension: features, labels, masks and shared negatives. All other dimensions must agree
    between the processes: pad tokens to one length. See the module's text for the gradients'
    convention and for the bytes sent. Without torch.distributed it is the loss itself.

    Args:
        loss: for example ``FCDLoss()``, or ``cos_nce_loss``.
        group: the processes, by default all.

    Example:
        >>> from fastkd import FCDLoss
        >>> loss = AcrossRanks(FCDLoss())
        >>> loss(torch.randn(4, 5, 8), torch.randn(4, 5, 6), mask=torch.ones(4, 5)).shape
        torch.Size([])
    """

    def __init__(self, loss: Callable[..., Tensor], group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.loss, self.group = loss, group

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        """The loss of all processes' samples, the same in each."""

        def gather(x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return [gather(part) for part in x]
            if not isinstance(x, Tensor) or x.dim() == 0:
                return x
            return gather_rows(x, self.group)

        return self.loss(*map(gather, arguments), **{k: gather(x) for k, x in options.items()})
