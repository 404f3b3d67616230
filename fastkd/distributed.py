"""Losses that compare samples, over the samples of all processes.

Each process holds a part of the batch. With ``gather=True`` the compared features are gathered, and
every process computes the loss of the whole batch. A process's gradient is then that of the whole
loss times the number of processes W. DistributedDataParallel and FSDP average gradients over the
processes, which divides by W: the value and every gradient equal those of one process on the
concatenated batch, also with parts of unequal size or empty parts. A training loop that sums
gradients must divide them by W.

The backward pass sends nothing. The forward pass sends to each of the W − 1 other processes, for a
part of B samples of N tokens, L layer pairs and b bytes a number, besides a few integers:

| loss | sent | bytes |
|---|---|---|
| relations over samples | tokens of student and teacher | L·B·N·(Ds + Dt)·b + B·N |
| relations over tokens | the sum and the number of samples | 16 |
| KNN, pool "cls" or "mean" | one teacher row a sample | B·Dt·b + 8·B |
| KNN, pool "tokens" | tokens of the teacher | B·N·Dt·b + 8·B |
| COS-NCE, pool "tokens" | projected student tokens, teacher tokens | 2·L·B·N·Dt·b + B·N + 8·B |
| COS-NCE, pool "cls" or "mean" | one projected student row, one teacher row | 2·L·B·Dt·b + 9·B |
| CCA, pool "tokens" | tokens of student and teacher | L·B·N·(Ds + Dt)·b + B·N |
| CCA, pool "cls" or "mean" | one row a sample of student and teacher | L·B·(Ds + Dt)·b + B |
| CCA, if that is less | float64 moments, reduced in a ring | 16·L·(Ds² + Dt² + Ds·Dt)/W |
| dual projection, soft targets, task | the number of items | 8 |

`AcrossRanks` sends every tensor of its arguments.

The sample counts of the processes are read on the host. torch.compile makes two graphs there, and
raises with ``fullgraph=True``: leave that out, or compile only the models.
"""

import copy
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fastkd._core.numerics import cast, once_differentiable

__all__ = [
    "AcrossRanks", "Group", "InGroup", "Ranks", "gather_rows", "ranks_of", "row_counts",
    "world_size",
]  # fmt: skip

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
            f"group doesn't contain this process, rank {dist.get_rank()}; pass a group that does"
        )
    return size


def row_counts(tensors: Tensor | Sequence[Tensor], group: Group = None) -> list[int]:
    """Number of rows in each process, by rank, of a tensor (B, ...) or several with B rows each.

    Read on the host.

    Raises:
        ValueError: the processes' tensors differ in dtype or in a dimension besides the first.
    """
    given = [tensors] if isinstance(tensors, Tensor) else tensors
    x = given[0]
    if x.dim() == 0:
        raise ValueError("a tensor without dimensions has no rows to gather; pass (B, ...)")
    sizes = [x.dim(), *x.shape, *[0] * (6 - x.dim())]
    dtypes = ", ".join(str(y.dtype) for y in given)
    gathered = _exchange(sizes, dtypes, x.device, group)
    by_rank = [tuple(shape[1 : 1 + shape[0]]) for shape in gathered]
    if len({shape[1:] for shape in by_rank}) > 1:
        raise ValueError(
            f"tensors of shapes {', '.join(map(str, by_rank))} on ranks 0 to {len(by_rank) - 1} "
            "can't be gathered; all but the first dimension must agree"
        )
    return [shape[0] for shape in by_rank]


def _exchange(
    numbers: list[int], description: str, device: torch.device, group: Group
) -> list[list[int]]:
    """Every process's ``numbers``, by rank; read on the host.

    Raises unless ``description``, of the tensors to gather, is the same in all processes: the
    collectives that follow would hang or mix up bytes.
    """
    _end_graph()
    checksum = zlib.crc32(description.encode())
    own = torch.tensor([checksum, *numbers], device=device)
    parts = [torch.empty_like(own) for _ in range(world_size(group))]
    dist.all_gather(parts, own, group=group)
    received: list[list[int]] = torch.stack(parts).tolist()
    for rank, sent in enumerate(received):
        if sent[0] != checksum:
            raise ValueError(
                f"rank {dist.get_rank(group)} gathers {description}, but rank {rank} something "
                "else; every process must pass the same arguments, of the same dtypes and sizes"
            )
    return [sent[1:] for sent in received]


def _end_graph() -> None:
    """End the graph of torch.compile here, with a reason that fullgraph=True reports."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(
            msg="gather=True reads the other processes' sample counts on the host, which a graph "
            "can't contain; leave fullgraph=True out, or compile only the models"
        )


def gather_rows(x: Tensor, group: Group = None, *, counts: list[int] | None = None) -> Tensor:
    """Rows of ``x`` (B, ...) of all processes, in the order of their ranks.

    Differentiable, without communication in the backward pass; the module's docstring describes
    the gradient. Without torch.distributed ``x`` itself.

    Args:
        x: (B_r, ...) on rank r; B_r may differ and be 0.
        group: the processes, by default all.
        counts: every process's B_r, from `row_counts`, if known already.

    Returns:
        (Σ B_r, ...), dtype of ``x``.

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
        # Collectives need parts of equal size, and some backends don't support bool.
        sent_as = torch.uint8 if x.dtype == torch.bool else x.dtype
        padded = x.new_zeros(max(counts), *x.shape[1:], dtype=sent_as)
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in counts]
        if padded.numel():
            dist.all_gather(parts, padded, group=group)
        gathered = [part[:count] for part, count in zip(parts, counts, strict=True)]
        return cast(torch.cat(gathered), x.dtype)

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
    """Collectives of one call of a loss, over the processes that hold parts of its batch."""

    def __init__(self, group: Group = None) -> None:
        self.group, self.size = group, world_size(group)
        self._counts: list[int] | None = None

    def gather(self, x: Tensor) -> Tensor:
        """`gather_rows` of a tensor with as many rows as the first that was gathered."""
        return self.gather_together(x)[0]

    def gather_together(self, *tensors: Tensor) -> list[Tensor]:
        """`gather` of each tensor, after checking that the dtypes agree over the processes."""
        if self._counts is None:
            self._counts = row_counts(tensors, self.group)
        return [gather_rows(x, self.group, counts=self._counts) for x in tensors]

    def gather_samples(
        self, features: Sequence[Tensor], mask: Tensor | None, besides: str = ""
    ) -> tuple[list[Tensor], Tensor | None]:
        """Features (B, ..., D) with equal leading dimensions, and their mask, of all processes.

        If the processes have different numbers of tokens (B, N, D), shorter rows are padded. A mask
        is returned if rows were padded or any process has one. ``besides`` describes in words what
        else of these samples will be gathered.

        Raises:
            ValueError: features that are not (B, N, D) with different numbers of positions, or
                features whose sizes or dtypes differ between the processes.
        """
        first = features[0]
        positions = first.shape[1:-1].numel()
        own = [len(first), positions, int(mask is not None)]
        sizes = ", ".join(f"{x.dtype} features of size {x.shape[-1]}" for x in features)
        received = _exchange(own, sizes + besides, first.device, self.group)
        counts, lengths, masked = zip(*received, strict=True)
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
        """Largest ``x`` of the processes; read on the host."""
        _end_graph()
        return int(self._reduce(torch.tensor(x, device=device), dist.ReduceOp.MAX))

    def _reduce(self, x: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        x = x.detach().clone()
        if self.size > 1:
            dist.all_reduce(x, how, group=self.group)
        return x


def ranks_of(gather: bool, group: Group = None) -> Ranks | None:
    """The processes whose samples form one batch; None for this process alone."""
    return Ranks(group) if gather and world_size(group) > 1 else None


class InGroup(nn.Module):
    """A Module with a ``group`` of processes, which can't be copied: a deep copy shares it."""

    group: Group

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = new = self.__new__(type(self))
        memo[id(self.group)] = self.group
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


class AcrossRanks(InGroup):
    """Any loss, computed on the rows of all processes.

    This package's own losses need only ``gather=True``, and send less. Every tensor in the call,
    also in lists or dicts, is gathered along its first dimension; all other dimensions must agree
    between the processes. The module's docstring describes the gradient. Without torch.distributed
    the call is the loss itself.

    Args:
        loss: for example ``FCDLoss()``, or ``cos_nce_loss``.
        group: the processes, by default all.

    >>> from fastkd import FCDLoss
    >>> loss = AcrossRanks(FCDLoss())
    >>> loss(torch.randn(4, 5, 8), torch.randn(4, 5, 6), mask=torch.ones(4, 5)).shape
    torch.Size([])
    """

    def __init__(self, loss: Callable[..., Tensor], group: Group = None) -> None:
        super().__init__()
        self.loss, self.group = loss, group

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        """The loss of all processes' samples; the same value in each process."""

        def gather(x: Any) -> Any:
            if isinstance(x, dict):
                return {name: gather(part) for name, part in x.items()}
            if isinstance(x, (list, tuple)):
                return [gather(part) for part in x]
            if not isinstance(x, Tensor) or x.dim() == 0:
                return x
            return gather_rows(x, self.group)

        return self.loss(*map(gather, arguments), **{k: gather(x) for k, x in options.items()})
