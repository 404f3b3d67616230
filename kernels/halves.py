"""Halves of a tile in registers: used one after the other, they need fewer registers at a time."""

import triton
import triton.language as tl


@triton.jit
def halves(x):
    """Left and right half of the columns of a tile."""
    columns: tl.constexpr = x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, columns)), (0, 2, 1)))
