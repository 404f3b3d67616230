"""Squared differences of attention maps (B, H, N, N), and their gradient.

Data path. A program computes BLOCK_Q queries of one map, or of one sample if heads are averaged
first. It loops over the keys, reads student and teacher once (padded queries are skipped), and
writes one partial loss. One PyTorch sum adds the partial losses of a sample. Backward: the same
loop writes the gradient, multiplied by the upstream gradient, so no differences are stored.

With E = B·H·N² elements of s bytes on each side: forward reads 2Es, backward reads 2Es and writes
Es, 5Es bytes in all; about 3E operations forward and 3E backward. Bound by bandwidth.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.operator import operator
from fastkd.kernels.launch import cdiv
from fastkd.kernels.pointers import padded, pick, slots


def blocks(N: int, mean: bool) -> dict[str, int]:
    """Tiles of 1024 pairs, 8 a thread; narrow ones for short sequences, for few compiled forms.

    Without a bound on registers, the assembler keeps one value of a mean of heads in memory.
    """
    block_k, bound = 32 if N <= 32 else 128, {"maxnreg": 224} if mean else {}
    return {"BLOCK_Q": 1024 // block_k, "BLOCK_K": block_k, "num_warps": 4, **bound}


@triton.jit
def _real(mask_ptr, sample, token, N, HAS_MASK: tl.constexpr):
    """Masks of tokens inside the sample, and of real tokens."""
    real = token < N
    if HAS_MASK:
        real = real & (tl.load(mask_ptr + sample * N + token, mask=real, other=0) != 0)
    return real


@triton.jit
def _map(x_ptr, heads, q, k, N, real_q, MEAN: tl.constexpr):
    """A tile of one map, or of the mean over consecutive maps.

    Values at padded keys are arbitrary: a mask that changes within 16 bytes would split the load.
    """
    at = q[:, None] * N + k[None, :]
    inside = real_q[:, None] & (k < N)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if MEAN:
        for _ in range(1, heads):
            x_ptr += tl.cast(N, tl.int64) * N
            x += tl.load(x_ptr + at, mask=inside, other=0.0)
        x = x / heads
    return x


@triton.jit(do_not_specialize=["groups", "heads_s", "heads_t", "layers"])
def attention_forward_kernel(
    student_ptrs,  # layers of (B, groups·heads_s, N, N)
    teacher_ptrs,
    mask_ptr,  # (B, N) bytes
    groups,  # of heads: one per head, or a single one if the heads' mean is compared
    heads_s,  # in a group
    heads_t,
    layers,  # averaged in the loss
    N,
    partial_ptr,  # (B, launched layers, groups, blocks of queries)
    tokens_ptr,  # (B,): real ones
    SLOTS: tl.constexpr,
    MEAN: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    query_blocks = tl.cdiv(N, BLOCK_Q)
    group = program // query_blocks
    sample = group // groups
    student_ptr = pick(student_ptrs, layer, SLOTS) + group * heads_s * N * N
    teacher_ptr = pick(teacher_ptrs, layer, SLOTS) + group * heads_t * N * N
    q = (program % query_blocks) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    real_q = _real(mask_ptr, sample, q, N, HAS_MASK)
    squares = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
    counts = tl.zeros((BLOCK_K,), tl.int32)
    for first in range(0, N, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        real_k = _real(mask_ptr, sample, k, N, HAS_MASK)
        counts += real_k.to(tl.int32)
        inside = real_q[:, None] & real_k[None, :]
        d = _map(student_ptr, heads_s, q, k, N, real_q, MEAN)
        d -= _map(teacher_ptr, heads_t, q, k, N, real_q, MEAN)
        squares += tl.where(inside, d * d, 0.0)
    tokens = tl.sum(counts, axis=0)
    # Divided before the sum, which may overflow over a whole map.
    n = tl.maximum(tokens, 1).to(tl.float32)
    rows = tl.sum(squares, axis=1) / (n * n * groups * layers)
    programs = groups * query_blocks
    out = (sample * tl.num_programs(1) + layer) * programs + program % programs
    tl.store(partial_ptr + out, tl.sum(rows, axis=0))
    if (layer == 0) & (program % programs == 0):
        tl.store(tokens_ptr + sample, tokens)


@triton.jit(do_not_specialize=["groups", "heads_s", "heads_t", "layers", "stride_dloss"])
def attention_backward_kernel(
    student_ptrs,  # layers of (B, groups·heads_s, N, N)
    teacher_ptrs,
    mask_ptr,  # (B, N) bytes
    groups,
    heads_s,
    heads_t,
    layers,
    N,
    tokens_ptr,  # (B,)
    dloss_ptr,  # (B,)
    stride_dloss,
    dx_ptr,  # (launched layers, B, groups·heads_s, N, N)
    SLOTS: tl.constexpr,
    MEAN: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    query_blocks = tl.cdiv(N, BLOCK_Q)
    group = program // query_blocks
    sample = group // groups
    student_ptr = pick(student_ptrs, layer, SLOTS) + group * heads_s * N * N
    teacher_ptr = pick(teacher_ptrs, layer, SLOTS) + group * heads_t * N * N
    in_layer = tl.num_programs(0) // query_blocks  # groups of all samples
    dx_ptr += (layer * in_layer + group) * heads_s * N * N
    q = (program % query_blocks) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    real_q = _real(mask_ptr, sample, q, N, HAS_MASK)
    n = tl.maximum(tl.load(tokens_ptr + sample), 1).to(tl.float32)
    dloss = tl.load(dloss_ptr + sample * stride_dloss)
    factor = 2.0 * dloss / (n * n * groups * layers * heads_s)
    for first in range(0, N, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = real_q[:, None] & _real(mask_ptr, sample, k, N, HAS_MASK)[None, :]
        d = _map(student_ptr, heads_s, q, k, N, real_q, MEAN)
        d -= _map(teacher_ptr, heads_t, q, k, N, real_q, MEAN)
        dx = tl.where(inside, d * factor, 0.0)
        there = (q < N)[:, None] & (k < N)[None, :]
        at = q[:, None] * N + k[None, :]
        if MEAN:
            for head in range(0, heads_s):
                tl.store(dx_ptr + tl.cast(head, tl.int64) * N * N + at, dx, mask=there)
        else:
            tl.store(dx_ptr + at, dx, mask=there)


def _programs(student: Tensor, mean: bool) -> int:
    """Programs per sample and layer: groups of heads times blocks of queries."""
    _, H, N, _ = student.shape
    return (1 if mean else H) * cdiv(N, blocks(N, mean)["BLOCK_Q"])


def _start(
    kernel: Any,
    students: list[Tensor],
    teachers: list[Tensor],
    mask: Tensor | None,
    mean: bool,
    layers: int,
    *others: Tensor | int,
) -> None:
    """Launch the forward or backward kernel unless there are no maps."""
    B, H, N, _ = students[0].shape
    programs = B * _programs(students[0], mean)
    if programs:
        kernel[(programs, len(students))](
            padded(students),
            padded(teachers),
            mask,
            *((1, H, teachers[0].shape[1]) if mean else (H, 1, 1)),
            layers,
            N,
            *others,
            SLOTS=slots(len(students)),
            MEAN=mean,
            HAS_MASK=mask is not None,
            **blocks(N, mean),
        )


def _forward_shapes(students, teachers, mask, mean, layers):
    B = students[0].shape[0]
    x = students[0]
    return x.new_empty(B, dtype=torch.float32), x.new_empty(B, dtype=torch.int32)


@operator(_forward_shapes)
def attention_forward(
    students: list[Tensor], teachers: list[Tensor], mask: Tensor | None, mean: bool, layers: int
) -> tuple[Tensor, Tensor]:
    """Losses (B,) of these layers, divided by ``layers``, and numbers of real tokens (B,)."""
    x = students[0]
    B, programs = x.shape[0], _programs(x, mean) * len(students)
    partial = torch.empty(B, programs, dtype=torch.float32, device=x.device)
    tokens = torch.empty(B, dtype=torch.int32, device=x.device)
    both = (students, teachers, mask, mean, layers)
    _start(attention_forward_kernel, *both, partial, tokens)
    return partial.sum(1), tokens


def _backward_shapes(students, teachers, mask, tokens, dloss, mean, layers):
    return students[0].new_empty(len(students), *students[0].shape)


@operator(_backward_shapes)
def attention_backward(
    students: list[Tensor],
    teachers: list[Tensor],
    mask: Tensor | None,
    tokens: Tensor,
    dloss: Tensor,
    mean: bool,
    layers: int,
) -> Tensor:
    """Stacked gradients of the students, in their dtype."""
    x = students[0]
    dx = torch.empty(len(students), *x.shape, dtype=x.dtype, device=x.device)
    both = (students, teachers, mask, mean, layers)
    _start(attention_backward_kernel, *both, tokens, dloss, dloss.stride(0), dx)
    return dx
