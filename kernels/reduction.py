"""Sum of losses over a divisor, in one program, and the divisor that a kernel reads on the device.

A kernel that writes gradients with its losses needs the divisor of their mean before:
`count_kernel` counts the positions of a mask, and the host doesn't wait for the number. Both
kernels read a few bytes a position; their time is that of a launch and of a few reads in a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.operator import launch_kernel


@triton.jit
def sum_of(x_ptr, count, BLOCK: tl.constexpr):
    """Sum of ``count`` float32 entries, in the same order for every program that reads them."""
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, count, BLOCK):
        i = first + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + i, mask=i < count, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["R"])
def count_kernel(
    mask_ptr,  # (R,) bytes
    count_ptr,  # (): number of real positions, at least 1
    R,
    BLOCK_R: tl.constexpr,
):
    count = tl.zeros([BLOCK_R], dtype=tl.int32)
    for start in range(0, R, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        count += (tl.load(mask_ptr + row, mask=row < R, other=0) != 0).to(tl.int32)
    tl.store(count_ptr, tl.maximum(tl.sum(count, axis=0), 1).to(tl.float32))


@triton.jit(do_not_specialize=["R", "number"])
def reduce_kernel(
    loss_ptr,  # (R,)
    divisor_ptr,  # (), or none
    total_ptr,  # ()
    R,
    number,  # divisor if there is no divisor_ptr
    BLOCK_R: tl.constexpr,
):
    total = sum_of(loss_ptr, R, BLOCK_R)
    divisor = number
    if divisor_ptr is not None:
        divisor = tl.load(divisor_ptr)
    tl.store(total_ptr, total / divisor)


def counted(mask: Tensor | None, positions: int) -> tuple[Tensor | None, int]:
    """Number of real positions, at least 1: a 0-d float32 tensor, or None, and a number."""
    if mask is None:
        return None, max(positions, 1)
    count = torch.empty((), dtype=torch.float32, device=mask.device)
    launch_kernel(count_kernel, (1,), bytes_of(mask), count, len(mask), BLOCK_R=8192, num_warps=8)
    return count, 1


def summed(losses: Tensor, divisor: Tensor | None, number: int) -> Tensor:
    """Sum of contiguous float32 losses over the divisor (), or ``number`` without one."""
    total = torch.empty((), dtype=torch.float32, device=losses.device)
    launch_kernel(
        reduce_kernel,
        (1,),
        losses,
        divisor,
        total,
        losses.numel(),
        float(number),
        BLOCK_R=4096,
        num_warps=8,
    )
    return total


def bytes_of(mask: Tensor | None) -> Tensor | None:
    """The mask as bytes, the only type that all versions of Triton read in the same way."""
    return None if mask is None else mask.view(torch.uint8)
