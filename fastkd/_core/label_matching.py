"""Labels: which ones match, and sums over the samples of each class."""

import math

import torch
from torch import Tensor


def class_numbers(labels: Tensor) -> Tensor:
    """Class of each sample (B,): the distinct labels are numbered from 0 in ascending order."""
    if labels.numel() == 0:
        return labels.new_zeros(0, dtype=torch.int64)
    ordered, order = labels.sort()
    first = torch.zeros_like(order)
    first[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(order).scatter_(0, order, first.cumsum(0))


def add_by_class(sums: Tensor, classes: Tensor, x: Tensor) -> Tensor:
    """Add each row of ``x`` (B, ...) to the row of its class in ``sums`` (C, ...), in place.

    Deterministic: ``index_add_`` is sequential on the CPU but uses atomics on CUDA, where
    accumulating ``index_put_`` sorts instead.
    """
    if x.is_cuda:
        return sums.index_put_((classes,), x, accumulate=True)
    return sums.index_add_(0, classes, x)


def comparable(*labels: Tensor) -> list[Tensor]:
    """Contiguous labels of one dtype, int64 or float64: comparing them neither rounds nor wraps."""
    real = any(some.is_floating_point() for some in labels)
    return [some.to(torch.float64 if real else torch.int64).contiguous() for some in labels]


def label_ranges(
    student: Tensor, teacher: Tensor, tolerance: float | None, ignore_index: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """``low``, ``high`` (N,) and ``labels`` (M,): row i matches low_i <= labels_j <= high_i.

    Without a tolerance ``high`` is None: the range is ``low`` alone. A teacher's label
    ``ignore_index`` matches nothing, even inside a range, and neither does a NaN.
    """
    student, teacher = comparable(student, teacher)
    if tolerance is None:
        return student, None, teacher
    low, high = (_real_range if student.is_floating_point() else _whole_range)(student, tolerance)
    ignored = student == ignore_index  # its range becomes ignore_index, which matches nothing
    return low.masked_fill(ignored, ignore_index), high.masked_fill(ignored, ignore_index), teacher


def _whole_range(labels: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Ends of the int64 range, in three steps: ``tolerance`` may exceed the largest int64."""
    least, greatest = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    whole = min(math.floor(tolerance), greatest - least)
    low = high = labels
    for step in (whole // 3, whole // 3, whole - 2 * (whole // 3)):
        low = torch.where(low < least + step, least, low - step)
        high = torch.where(high > greatest - step, greatest, high + step)
    return low, high


def _real_range(labels: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """First and last float64 whose computed difference from the label is within ``tolerance``."""
    ends = []
    for sign in (-1, 1):
        end = labels + sign * tolerance
        outer = end.nextafter(torch.full_like(end, sign * torch.inf))
        inner = end.nextafter(torch.full_like(end, -sign * torch.inf))
        end = torch.where((end - labels).abs() <= tolerance, end, inner)
        ends.append(torch.where((outer - labels).abs() <= tolerance, outer, end))
    return ends[0], ends[1]
