"""Memory for large results on the CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import extension
from .numerics import values_readable

# So much the C library often gives back to the system, and takes from there again in each step.
LARGE = 1 << 22


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.empty``, whose first touch costs less where the system lets it."""
    x = torch.empty(shape, dtype=dtype, device=device)
    if extension.CPU and x.nbytes >= LARGE and values_readable(x):
        torch.ops.fastkd_cpp.take_pages(x)
    return x
