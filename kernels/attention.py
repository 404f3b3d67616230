"""Squared differences of attention maps (B, H, N, N), and their gradient.

Data path. A program computes BLOCK_Q queries of one map, or of one sample if heads are averaged
first. It counts the sample's real tokens, then loops over the keys, reads student and teacher once
(padded queries are skipped), and writes one partial loss and, where it is needed, the gradient,
divided by the number of samples that count. `attention_count_kernel` counts these before, and
`fastkd.kernels.reduction` adds the partial losses after.

The gradient is that for an upstream gradient of 1; `fastkd.kernels.upstream` multiplies it in the
backward pass, without work if that is 1. float16 would underflow, and "none" has many upstream
gradients: there the forward pass computes the losses alone, and the backward pass reads the maps
again.

With E = B·H·N² elements of s bytes on each side: 2Es read and Es written, 3Es bytes in all, or 5Es
where the backward pass reads the maps again; about 5E operations. Bound by bandwidth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.operator import launch_kernel, operator
from fastkd.kernels.launch import cdiv
from fastkd.kernels.pointers import padded, pick, slots
from fastkd.kernels.reduction import bytes_of, summed

# Bytes of a sample's mask that a program reads at a time to count the real tokens.
BLOCK_TOKENS = tl.constexpr(256)


def blocks(N: int, mean: bool) -> dict[str, int]:
    """Tiles of 1024 pairs, 8 a thread; narrow ones for short sequences, for few compiled forms.

    Without a bound on registers, the assembler keeps one value of a mean of heads in memory.
    """
    block_k, bound = 32 if N <= 32 else 128, {"maxnreg": 248} if mean else {}
    return {"BLOCK_Q": 1024 // block_k, "BLOCK_K": block_k, "num_warps": 4, **bound}


@triton.jit
def _real(mask_ptr, sample, token, N, HAS_MASK: tl.constexpr):
    """Masks of tokens inside the sample, and of real tokens."""
    real = token < N
    if HAS_MASK:
        real = real & (tl.load(mask_ptr + sample * N + token, mask=real, other=0) != 0)
    return real


@triton.jit
def _tokens(mask_ptr, sample, N):
    """Number of the sample's real tokens, at least 1."""
    counts = tl.zeros((BLOCK_TOKENS,), tl.int32)
    for first in range(0, N, BLOCK_TOKENS):
        token = first + tl.arange(0, BLOCK_TOKENS)
        counts += _real(mask_ptr, sample, token, N, True).to(tl.int32)
    return tl.maximum(tl.sum(counts, axis=0), 1)


@triton.jit(do_not_specialize=["B", "N"])
def attention_count_kernel(
    mask_ptr,  # (B, N) bytes
    count_ptr,  # (): number of samples with a real token, at least 1
    B,
    N,
    BLOCK_B: tl.constexpr,
):
    count = tl.zeros((BLOCK_B,), tl.int32)
    for start in range(0, B, BLOCK_B):
        sample = start + tl.arange(0, BLOCK_B)
        row = mask_ptr + sample[:, None].to(tl.int64) * N
        real = tl.zeros((BLOCK_B,), tl.int32)
        for first in range(0, N, BLOCK_TOKENS):
            token = first + tl.arange(0, BLOCK_TOKENS)[None, :]
            inside = (sample < B)[:, None] & (token < N)
            mask = tl.load(row + token, mask=inside, other=0)
            real = tl.maximum(real, tl.max((mask != 0).to(tl.int32), axis=1))
        count += real
    tl.store(count_ptr, tl.maximum(tl.sum(count, axis=0), 1).to(tl.float32))


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


@triton.jit(
    do_not_specialize=[
        "groups", "heads_s", "heads_t", "layers", "stride_factors", "number", "gradient",
        "weighted", "divided",
    ]
)  # fmt: skip
def attention_kernel(
    student_ptrs,  # layers of (B, groups·heads_s, N, N)
    teacher_ptrs,
    mask_ptr,  # (B, N) bytes
    factors_ptr,  # (B,): of the losses and their gradients, unread unless weighted
    divisor_ptr,  # (): of the gradients, unread unless divided
    partial_ptr,  # (B, launched layers, groups, blocks of queries)
    dx_ptr,  # (launched layers, B, groups·heads_s, N, N), unused without a gradient
    groups,  # of heads: one per head, or a single one if the heads' mean is compared
    heads_s,  # in a group
    heads_t,
    layers,  # averaged in the loss
    N,
    stride_factors,
    number,  # divisor of the gradients without divisor_ptr
    gradient,
    weighted,
    divided,
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
    n = N
    if HAS_MASK:
        n = _tokens(mask_ptr, sample, N)
    n = tl.cast(n, tl.float32)
    pairs = n * n * groups * layers
    by = tl.load(factors_ptr + sample * stride_factors, mask=weighted != 0, other=1.0)
    factor = by / tl.load(divisor_ptr, mask=divided != 0, other=number)
    factor = 2.0 * factor / (pairs * heads_s)
    squares = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
    for first in range(0, N, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = real_q[:, None] & _real(mask_ptr, sample, k, N, HAS_MASK)[None, :]
        d = _map(student_ptr, heads_s, q, k, N, real_q, MEAN)
        d -= _map(teacher_ptr, heads_t, q, k, N, real_q, MEAN)
        squares += tl.where(inside, d * d, 0.0)
        dx = tl.where(inside, d * factor, 0.0)
        there = (q < N)[:, None] & (k < N)[None, :] & (gradient != 0)
        at = q[:, None] * N + k[None, :]
        if MEAN:
            for head in range(0, heads_s):
                tl.store(dx_ptr + tl.cast(head, tl.int64) * N * N + at, dx, mask=there)
        else:
            tl.store(dx_ptr + at, dx, mask=there)
    # Divided before the sum, which may overflow over a whole map.
    rows = tl.sum(squares, axis=1) / pairs
    programs = groups * query_blocks
    out = (sample * tl.num_programs(1) + layer) * programs + program % programs
    tl.store(partial_ptr + out, tl.sum(rows, axis=0) * by)


def _shapes(students, teachers, mask, weights, upstream, mean, layers, reduction, gradient):
    x = students[0]
    rows = () if upstream is None and reduction != "none" else x.shape[:1]
    loss = x.new_empty(rows, dtype=torch.float32)
    return [loss, x.new_empty(len(students), *x.shape)] if gradient else [loss]


@operator(_shapes)
def attention(
    students: list[Tensor],
    teachers: list[Tensor],
    mask: Tensor | None,
    weights: Tensor | None,
    upstream: Tensor | None,
    mean: bool,
    layers: int,
    reduction: str,
    gradient: bool,
) -> list[Tensor]:
    """Reduced loss of these layers over ``layers``, and with ``gradient`` the stacked gradients.

    The mask (B, N) is bool, weights (B,) are float32. With ``upstream``, () or (B,) for "none", the
    gradients are multiplied by it, and the first result has no meaning.
    """
    x = students[0]
    B, H, N, _ = x.shape
    config = blocks(N, mean)
    programs = (1 if mean else H) * cdiv(N, config["BLOCK_Q"])  # of a sample and layer
    partial = torch.empty(B, len(students) * programs, dtype=torch.float32, device=x.device)
    divisor, number = None, 1
    if reduction == "mean" and mask is None:
        number = max(B, 1)
    elif reduction == "mean":
        divisor = torch.empty((), dtype=torch.float32, device=x.device)
        counted = bytes_of(mask), divisor, B, N
        launch_kernel(attention_count_kernel, (1,), *counted, BLOCK_B=32, num_warps=8)
    dx = x.new_empty(len(students), *x.shape) if gradient else None
    factors = weights
    if upstream is not None:
        factors = upstream.expand(B) if weights is None else upstream * weights
    if B * programs:
        launch_kernel(
            attention_kernel,
            (B * programs, len(students)),
            padded(students),
            padded(teachers),
            bytes_of(mask),
            partial if factors is None else factors,
            partial if divisor is None else divisor,
            partial,
            x if dx is None else dx,
            *((1, H, teachers[0].shape[1]) if mean else (H, 1, 1)),
            layers,
            N,
            0 if factors is None else factors.stride(0),
            float(number),
            int(gradient),
            int(factors is not None),
            int(divisor is not None),
            SLOTS=slots(len(students)),
            MEAN=mean,
            HAS_MASK=mask is not None,
            **config,
        )
    if upstream is None and reduction != "none":
        loss = summed(partial, divisor, number)
    else:
        loss = partial.sum(1)
    return [loss] if dx is None else [loss, dx]
