"""Sums over the vocabulary, where each process may hold the logits of a part of it."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class VocabularyShard(NamedTuple):
    """The token ids of the columns of logits (R, n): the whole vocabulary, or this process's shard.

    For a shard each sum is one all-reduce over the group, after which every process has the sum
    over the whole vocabulary. All processes must compute the same sums, of equally many rows.
    """

    group: str = ""  # name of the process group, "" for the whole vocabulary
    first: int = 0  # this process's first token id
    largest: int = 0  # size of the largest shard
    vocabulary: int = 0  # size of the whole vocabulary

    def total(self, x: Tensor, op: str = "sum") -> Tensor:
        """``x`` summed over the processes, or another reduction of `dist.ReduceOp`."""
        if self.group:
            x = x.contiguous()
            group = dist.distributed_c10d._resolve_process_group(self.group)  # type: ignore[arg-type]
            dist.all_reduce(x, getattr(dist.ReduceOp, op.upper()), group=group)
        return x

    def sum(self, x: Tensor) -> Tensor:
        """(R,) of (R, n)."""
        return self.total(x.sum(-1))

    def logsumexp(self, z: Tensor) -> Tensor:
        """(R,) of (R, n)."""
        if not self.group:
            return z.logsumexp(-1)
        top = self.total(z.amax(-1), "max")
        base = top.masked_fill(top == -torch.inf, 0)
        return self.sum((z - base[:, None]).exp_()).log_() + base

    def log_softmax(self, z: Tensor) -> Tensor:
        """(R, n)."""
        return z - self.logsumexp(z)[:, None] if self.group else torch.log_softmax(z, -1)

    def gather(self, x: Tensor, ids: Tensor) -> Tensor:
        """Entries (R,) of x (R, n) at one token id for each row, ids (R,)."""
        if not self.group:
            return x.gather(-1, ids[:, None])[:, 0]
        own, here = self.own(ids, x)
        return self.total(x.gather(-1, own[:, None])[:, 0].masked_fill(~here, 0))

    def own(self, ids: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of token ids in ``x`` (R, n), 0 for other shards' ids; which ids are in ``x``."""
        here = (ids >= self.first) & (ids < self.first + x.shape[-1])
        return (ids - self.first).masked_fill(~here, 0), here

    def argmax(self, z: Tensor) -> Tensor:
        """The most probable token id (R,), the first of equals."""
        if not self.group:
            return z.argmax(-1)
        top, column = z.max(-1)
        best = column + self.first
        return self.total(
            best.masked_fill(top < self.total(top.clone(), "max"), self.vocabulary), "min"
        )


WHOLE_VOCABULARY = VocabularyShard()
