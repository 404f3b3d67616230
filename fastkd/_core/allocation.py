"""Allocation of large results on the CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import extension
from .numerics import values_readable

# From this size the C library often returns memory to the system and requests it again each step.
LARGE = 1 << 22


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.empty`` on huge pages where the system has them: page faults cost less."""
    x = torch.empty(shape, dtype=dtype, device=device)
    large = extension.CPU and not torch.compiler.is_compiling() and x.nbytes >= LARGE
    if large and values_readable(x):
        torch.ops.fastkd_cpp.take_pages(x)
    return x
