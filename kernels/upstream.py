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

from fastkd._core.numerics import once_differentiable, save_for_backward
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
    """Saved gradients, of one size, times ``upstream``; in place if that is allowed."""
    # With ``retain_graph`` another pass may read what is saved, and a receiver may change it.
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return [(x.float() * upstream).to(x.dtype) for x in gradients]
    if gradients:
        scale_in_place(list(gradients), upstream)
    return gradients


class LossByKernel(torch.autograd.Function):
    """A loss whose kernel computes the gradients too.

    ``options.triton(tensors, upstream, needs)`` runs it: the loss, then gradients of the tensors
    that need one, times ``upstream`` if that is given. With ``options.stacked`` those of the first
    tensors are one tensor.

    The forward pass computes gradients for an upstream gradient of 1, and `scaled` multiplies them.
    It computes none for "none", which has many upstream gradients, and in float16, which can't hold
    them before the loss scale is multiplied in: there the backward pass runs the kernel again.
    """

    # *tensors, because the compiler omits ctx where a call has as many arguments as forward has
    # parameters.
    @staticmethod
    def forward(ctx, options, *tensors):
        half = any(x is not None and x.dtype == torch.float16 for x in tensors)
        ctx.options, ctx.in_forward = options, options.reduction != "none" and not half
        needs = [needed and ctx.in_forward for needed in ctx.needs_input_grad[1:]]
        loss, *gradients = options.triton(tensors, None, needs)
        save_for_backward(ctx, *(gradients if ctx.in_forward else tensors))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        needs = ctx.needs_input_grad[1:]
        if ctx.in_forward:
            gradients = scaled(ctx.saved_tensors, grad)
        else:
            _, *gradients = ctx.options.triton(ctx.saved_tensors, grad, needs)
        if ctx.options.stacked:
            (stacked,) = gradients
            found = [*stacked.unbind(), *[None] * (len(needs) - len(stacked))]
        else:
            rest = iter(gradients)
            found = [next(rest) if needed else None for needed in needs]
        return None, *(x if needed else None for x, needed in zip(found, needs, strict=True))
