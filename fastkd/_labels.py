"""Sums over the samples of a class, without asking the device how many classes there are."""

import torch
from torch import Tensor


def label_segments(labels: Tensor) -> Tensor:
    """Number the distinct labels from 0 in ascending order: one class number per sample (B,)."""
    if labels.numel() == 0:
        return labels.new_zeros(0, dtype=torch.int64)
    ordered, order = labels.sort()
    first = torch.zeros_like(order)
    first[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(order).scatter_(0, order, first.cumsum(0))


def add_by_class(sums: Tensor, segments: Tensor, x: Tensor) -> Tensor:
    """Add each row of ``x`` (B, ...) to its class's row of ``sums`` (C, ...), in place.

    The same bits on every run: ``index_add_`` is sequential on the CPU but uses atomics on CUDA,
    where accumulating ``index_put_`` sorts instead.
    """
    if x.is_cuda:
        return sums.index_put_((segments,), x, accumulate=True)
    return sums.index_add_(0, segments, x)
