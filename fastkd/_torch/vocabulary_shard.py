"""Sums over the words of a row, of whose logits a process may have a part."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Columns:
    """Which words logits (R, n) are about: all, or a process's part of them.

    Of parts every sum goes once through all processes of the group; each then has the whole
    row's. They must ask for the same sums, of as many rows.
    """

    group: str = ""  # name of the processes that have the others, "" for none
    first: int = 0
    most: int = 0  # that any process has
    words: int = 0  # of all processes

    def total(self, x: Tensor, op: str = "sum") -> Tensor:
        """Every process's ``x`` added up, or another reduction of `dist.ReduceOp`."""
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
        """x (R, n) at one word each, ids (R,): (R,)."""
        if not self.group:
            return x.gather(-1, ids[:, None])[:, 0]
        own, here = self.own(ids, x)
        return self.total(x.gather(-1, own[:, None])[:, 0].masked_fill(~here, 0))

    def own(self, ids: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Places of words among the n columns of ``x``, 0 for others; which are there."""
        here = (ids >= self.first) & (ids < self.first + x.shape[-1])
        return (ids - self.first).masked_fill(~here, 0), here

    def argmax(self, z: Tensor) -> Tensor:
        """The likeliest word (R,), the first of equals."""
        if not self.group:
            return z.argmax(-1)
        top, place = z.max(-1)
        best = place + self.first
        return self.total(best.masked_fill(top < self.total(top.clone(), "max"), self.words), "min")


ALL = Columns()
