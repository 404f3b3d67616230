"""Gradients computed in the forward pass, times the upstream gradient that the backward pass gets.

Data path. Each program reads the upstream gradient. If that is 1, as ``loss.backward()`` passes it,
the program returns; else the programs read, multiply and write the gradient in place, a block at a
time: 2Es bytes for a gradient of E elements of s bytes. The host doesn't wait to learn which. There
are at most as many programs as run at a time, since each that only returns costs a microsecond.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.operator import launch_kernel, operator
from fastkd.kernels.launch import cdiv
from fastkd.kernels.pointers import pick

BLOCK = 4096
PROGRAMS = 1024  # 8 on each multiprocessor of a large GPU


@triton.jit(do_not_specialize=["blocks", "rest"])
def upstream_kernel(
    gradient_ptrs,  # one or two of (blocks · BLOCK + rest,)
    upstream_ptr,  # ()
    blocks,
    rest,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    upstream = tl.load(upstream_ptr).to(tl.float32)
    if upstream != 1.0:
        at = pick(gradient_ptrs, tl.program_id(1), SLOTS) + tl.arange(0, BLOCK)
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            of_block = at + tl.cast(block, tl.int64) * BLOCK
            tl.store(of_block, tl.load(of_block).to(tl.float32) * upstream)
        if tl.program_id(0) == 0:
            at += tl.cast(blocks, tl.int64) * BLOCK
            inside = tl.arange(0, BLOCK) < rest
            tl.store(at, tl.load(at, mask=inside).to(tl.float32) * upstream, mask=inside)


def _scaled_shapes(gradients, upstream):
    return None


@operator(_scaled_shapes, mutates=[0])
def scale_in_place(gradients: list[Tensor], upstream: Tensor) -> None:
    """Multiply one or two contiguous gradients of one size by ``upstream`` (), if that is not 1."""
    size = gradients[0].numel()
    launch_kernel(
        upstream_kernel,
        (min(cdiv(size, BLOCK), PROGRAMS), len(gradients)),
        tuple(gradients),
        upstream,
        size // BLOCK,
        size % BLOCK,
        SLOTS=len(gradients),
        BLOCK=BLOCK,
        num_warps=8,
    )


def scaled(gradients: Sequence[Tensor], upstream: Tensor) -> Sequence[Tensor]:
    """Saved gradients, of one size, for an upstream gradient of 1, times ``upstream``.

    In place if it may be. ``forward`` computes and saves them. It doesn't for "none", which has
    many upstream gradients, and in float16, which can't hold them before the loss scale is
    multiplied in.
    """
    # With ``retain_graph`` another pass may read what is saved, and a receiver may change it.
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return [(x.float() * upstream).to(x.dtype) for x in gradients]
    if gradients:
        scale_in_place(list(gradients), upstream)
    return gradients
