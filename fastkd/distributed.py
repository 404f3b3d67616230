"""Losses that compare samples, over the samples of all processes.

Each process holds a part of the batch. What a loss compares of it is gathered, and every process
comes to the loss of the whole batch: ``gather=True`` of the functions and Modules. A process's own
gradient is then that of the whole loss times the number of processes W. DistributedDataParallel
and FSDP average gradients over the processes, which takes W out again: value and every gradient
equal one process's on the concatenated batch, parts of unequal size and empty ones included. A
loop that sums gradients has to divide them by W.

The backward pass sends nothing. The forward pass sends to each of the W − 1 others, for a part of
B samples of N tokens, L layer pairs and b bytes a number, besides a few integers:

| loss | sent | bytes |
|---|---|---|
| relations over samples | tokens of both sides | L·B·N·(Ds + Dt)·b + B·N |
| relations over tokens | the sum and how many samples count | 16 |
| KNN, pool "cls" or "mean" | one row a sample of the teacher | B·Dt·b + 8·B |
| KNN, pool "tokens" | tokens of the teacher | B·N·Dt·b + 8·B |
| COS-NCE, pool "tokens" | projected tokens of both sides | 2·L·B·N·Dt·b + B·N + 8·B |
| COS-NCE, pool "cls" or "mean" | one projected row a sample of both sides | 2·L·B·Dt·b + 9·B |
| CCA, pool "tokens" | tokens of both sides | L·B·N·(Ds + Dt)·b + B·N |
| CCA, pool "cls" or "mean" | one row a sample of both sides | L·B·(Ds + Dt)·b + B |
| the same, where that is less | float64 moments, reduced in a ring | 16·L·(Ds² + Dt² + Ds·Dt)/W |
| dual projection, soft targets, task | how many items count | 8 |

`AcrossRanks` sends every tensor of its arguments.

How many samples the others have is read on the host. torch.compile makes two graphs there, and
with ``fullgraph=True`` it refuses: leave that out, or compile the models alone.
"""

import copy
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fastkd._core.numerics import once_differentiable

__all__ = [
    "AcrossRanks",
    "Group",
    "InGroup",
    "Ranks",
    "gather_rows",
    "ranks_of",
    "row_counts",
    "world_size",
]

Group = dist.ProcessGroup | None  # None for all processes


def world_size(group: Group = None) -> int:
    """Number of processes in ``group``, 1 without torch.distributed.

    Raises:
        ValueError: this process is not in ``group``.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    size = dist.get_world_size(group)
    if size < 1:
        raise ValueError(
            f"group is of other processes than this one, rank {dist.get_rank()} of all"
        )
    return size


def row_counts(x: Tensor, group: Group = None) -> list[int]:
    """How many rows ``x`` (B, ...) has in each process, by rank; reads the answer on the host.

    Raises:
        ValueError: the processes' tensors differ in dtype or in another dimension than the first.
    """
    return _row_counts([x], group)


def _row_counts(tensors: Sequence[Tensor], group: Group) -> list[int]:
    """`row_counts` of tensors with as many rows each."""
    x = tensors[0]
    if x.dim() == 0:
        raise ValueError("a tensor without dimensions has no rows to gather")
    sizes = [x.dim(), *x.shape, *[0] * (6 - x.dim())]
    alike = ", ".join(str(y.dtype) for y in tensors)
    found = _exchange(sizes, alike, x.device, group)
    by_rank = [tuple(shape[1 : 1 + shape[0]]) for shape in found]
    if len({shape[1:] for shape in by_rank}) > 1:
        raise ValueError(
            f"tensors of shapes {', '.join(map(str, by_rank))} on ranks 0 to {len(by_rank) - 1} "
            "can't be gathered; all but the first dimension must agree"
        )
    return [shape[0] for shape in by_rank]


def _exchange(
    numbers: list[int], alike: str, device: torch.device, group: Group
) -> list[list[int]]:
    """Every process's ``numbers``, by rank; reads them on the host.

    ``alike``: in words what has to be the same in all. Collectives would hang or mix up bytes.
    """
    _end_graph()
    words = zlib.crc32(alike.encode())
    own = torch.tensor([words, *numbers], device=device)
    parts = [torch.empty_like(own) for _ in range(world_size(group))]
    dist.all_gather(parts, own, group=group)
    found: list[list[int]] = torch.stack(parts).tolist()
    for rank, sent in enumerate(found):
        if sent[0] != words:
            raise ValueError(
                f"rank {dist.get_rank(group)} gathers {alike}, but rank {rank} something else; "
                "every process must pass the same arguments, of the same dtypes and sizes"
            )
    return [sent[1:] for sent in found]


def _end_graph() -> None:
    """Under torch.compile end the graph here: fullgraph=True then says why."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(
            msg="gather=True reads on the host how many samples the other processes have, which is "
            "no part of a graph; leave fullgraph=True out, or compile the models alone"
        )


def gather_rows(x: Tensor, group: Group = None, *, counts: list[int] | None = None) -> Tensor:
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
        sent_as = torch.uint8 if x.dtype == torch.bool else x.dtype
        padded = x.new_zeros(max(counts), *x.shape[1:], dtype=sent_as)
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


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.ranks = world_size(group)
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient * ctx.ranks, None


class Ranks:
    """The processes of a group that hold parts of one batch, for one call of a loss."""

    def __init__(self, group: Group = None) -> None:
        self.group, self.size = group, world_size(group)
        self._counts: list[int] | None = None

    def gather(self, x: Tensor) -> Tensor:
        """`gather_rows`; every tensor has as many rows as this process's first."""
        return self.gather_together(x)[0]

    def gather_together(self, *tensors: Tensor) -> list[Tensor]:
        """`gather` of each: the processes know before that theirs are alike."""
        if self._counts is None:
            self._counts = _row_counts(tensors, self.group)
        return [gather_rows(x, self.group, counts=self._counts) for x in tensors]

    def gather_samples(
        self, features: Sequence[Tensor], mask: Tensor | None, besides: str = ""
    ) -> tuple[list[Tensor], Tensor | None]:
        """Features (B, ..., D) of one (B, ...), and their mask (B, ...) bool, of all processes.

        Where the processes have different numbers of tokens (B, N, D) the shorter rows are padded.
        There is a mask where rows were padded or any process has one. ``besides``: in words what
        else of these samples will be gathered.

        Raises:
            ValueError: features other than (B, N, D) of different numbers of positions, or of
                other sizes or dtypes than in another process.
        """
        first = features[0]
        positions = first.shape[1:-1].numel()
        own = [len(first), positions, int(mask is not None)]
        alike = ", ".join(f"{x.dtype} features of size {x.shape[-1]}" for x in features) + besides
        found = _exchange(own, alike, first.device, self.group)
        counts, lengths, masked = zip(*found, strict=True)
        self._counts = list(counts)
        if len(set(lengths)) > 1 and first.dim() != 3:
            raise ValueError(
                f"samples of {', '.join(map(str, lengths))} positions on ranks 0 to "
                f"{self.size - 1} can't be gathered; only tokens (B, N, D) are padded"
            )
        if len(set(lengths)) > 1 or any(masked):
            if mask is None:
                mask = torch.ones(first.shape[:-1], dtype=torch.bool, device=first.device)
            if missing := max(lengths) - positions:
                mask = F.pad(mask, (0, missing))
                features = [F.pad(x, (0, 0, 0, missing)) for x in features]
            mask = self.gather(mask)
        return [self.gather(x) for x in features], mask

    def total(self, x: Tensor) -> Tensor:
        """Sum of ``x`` over the processes, differentiable without communication."""
        return _SumOverRanks.apply(x, self.group)

    def sum(self, x: Tensor) -> Tensor:
        """Sum of ``x`` over the processes, without gradient."""
        return self._reduce(x, dist.ReduceOp.SUM)

    def max(self, x: int, device: torch.device) -> int:
        """Largest ``x``; reads the answer on the host."""
        _end_graph()
        return int(self._reduce(torch.tensor(x, device=device), dist.ReduceOp.MAX))

    def _reduce(self, x: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        x = x.detach().clone()
        if self.size > 1:
            dist.all_reduce(x, how, group=self.group)
        return x


def ranks_of(gather: bool, group: Group = None) -> Ranks | None:
    """The processes whose samples are one batch; None for this one alone."""
    return Ranks(group) if gather and world_size(group) > 1 else None


class InGroup(nn.Module):
    """A Module with a ``group`` of processes, which its copies share: it can't be copied."""

    group: Group

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = new = self.__new__(type(self))
        memo[id(self.group)] = self.group
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


class AcrossRanks(InGroup):
    """Any loss of rows over those of all processes.

    The losses of this package that compare samples do it by themselves, with ``gather=True``, and
    send less. Every tensor that the loss is called with, also in lists or dicts, is gathered along
    its first dimension; all other dimensions must agree between the processes. See the module's
    text for the gradients' convention. Without torch.distributed it is the loss itself.

    Args:
        loss: for example ``FCDLoss()``, or ``cos_nce_loss``.
        group: the processes, by default all.

    Example:
        >>> from fastkd import FCDLoss
        >>> loss = AcrossRanks(FCDLoss())
        >>> loss(torch.randn(4, 5, 8), torch.randn(4, 5, 6), mask=torch.ones(4, 5)).shape
        torch.Size([])
    """

    def __init__(self, loss: Callable[..., Tensor], group: Group = None) -> None:
        super().__init__()
        self.loss, self.group = loss, group

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        """The loss of all processes' samples, the same in each."""

        def gather(x: Any) -> Any:
            if isinstance(x, dict):
                return {name: gather(part) for name, part in x.items()}
            if isinstance(x, (list, tuple)):
                return [gather(part) for part in x]
            if not isinstance(x, Tensor) or x.dim() == 0:
                return x
            return gather_rows(x, self.group)

        return self.loss(*map(gather, arguments), **{k: gather(x) for k, x in options.items()})
