"""COS-NCE: loss and gradient per position, in-batch, label-filtered and given negatives.

A position's loss is 2 + ẑ·a with a = w·S − v·t̂ (see `fastkd.losses.cos_nce`): S is the sum of its
negatives' directions, w is 1/2 over their number (0 if nothing is compared), and v is 3/2, or
w + 3/2 if S includes the position's own teacher.

Data path of up to 16 samples whose negatives are those of the batch. One program of
`cos_nce_position_kernel` visits a position: it reads the rows of student and teacher once, for
three 16 × 16 products ẑ·ẑ, t̂·t̂ and ẑ·t̂ that give norms and cosines, then again from the caches
for the gradient a = M t̂ with M_ij = w − v·(i = j), and writes it. `cos_nce_reduce_kernel` adds the
positions' losses. With a mask or labels `cos_nce_count_kernel` first counts the positions of the
mean. `fastkd.kernels.upstream` multiplies the gradient by the upstream gradient, without work if
that is 1. With E = B·P·D elements of s bytes on each side: 2Es read and Es written in the forward
pass, 3Es bytes, or 5Es with an upstream gradient other than 1. float16 would underflow, and
"none" has many upstream gradients: there the backward pass visits the positions again, 5Es.
16·8·E operations on the tensor cores. Bound by bandwidth.

Data path of 17 to 32 samples whose negatives are those of the batch, without labels. One program of
`cos_nce_batch_kernel` visits a position: it reads the rows of both sides for their norms, again
from the caches for S and the two cosines, and a third time for S and the gradient. Other kernels
and bytes are the same: 3Es while the rows that are visited at a time fit the L2 cache, as at D 768,
and 7Es at most, where they don't. About 25E operations. Bound by sums in shared memory at D 768.

Data path of other calls. `cos_nce_norm_kernel` reads every row once for 1/‖x‖. A second kernel
reads the teacher (or the given negatives) and computes S and the number of negatives.
`cos_nce_sum_kernel` computes one sum for all samples of a position, or one per sample if each has
its own negatives. `cos_nce_labelled_sum_kernel` computes one sum per sample over the rows of other
labels: tiles of the 0/1 matrix of negatives are multiplied by the directions, so no sum is a
difference of two sums. `cos_nce_loss_kernel` reads student, teacher and S for the two cosines and
stores w and ẑ·a; `cos_nce_reduce_kernel` adds its programs' partial losses.
`cos_nce_gradient_kernel` reads the same tensors again and writes the gradient, multiplied by the
upstream gradient. All layers of a call share each launch.

With E = B·P·D elements of s bytes on each side: norms 2Es, sum Es, loss 2Es, gradient 3Es: 8Es
bytes, and about 20E operations. One S per sample is written once and read twice, 12E more bytes.
Labels need 2·B·E operations on the tensor cores. Bound by bandwidth; five launches, and
one more for the norms of given negatives.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.dispatch import triton_interpreted
from fastkd._core.operator import launch_kernel, operator
from fastkd.kernels.launch import cdiv, next_power_of_2
from fastkd.kernels.pointers import padded, pick, slots
from fastkd.kernels.reduction import sum_of
from fastkd.kernels.rounding import PRECISE

# Rows summed by one program. More rows are split over programs, and a second pass adds the sums.
ROWS_PER_SUM = 2048

# Names of the tensors that `cos_nce` returns for the gradient.
SAVED = 5


def blocks(each: bool) -> dict[str, int]:
    """Blocks and warps of loss and gradient, the same for every shape.

    16 samples of one position share a program and with it S: 8 elements a thread of each side,
    enough loads in flight, and few enough registers where every element has an address of its
    own; 4 where each sample has an S of its own.
    """
    return {"BLOCK_I": 16, "BLOCK_D": 64 if each else 128, "num_warps": 8}


# Rows and features of a tile if rows are only read: 16 elements per thread.
ROW_BLOCKS = {"BLOCK_R": 16, "BLOCK_D": 128, "num_warps": 4}

# The same if rows are summed. In one warp a thread has all rows of its features, so that the sum
# needs no shared memory.
SUM_BLOCKS = {"BLOCK_R": 8, "BLOCK_D": 256, "num_warps": 1}

# The same if few programs sum many rows: fewer features each, and more rows at a time.
LONG_SUM_BLOCKS = {"BLOCK_R": 64, "BLOCK_D": 32, "num_warps": 4}
WARPS = 528  # fewer leave processors of a large GPU idle

# Most samples of a batch whose positions are visited once; twice as many without labels.
SMALL_BATCH = 16
# Samples of a tile there. Few warps share the sum over samples, which they add in shared memory.
BATCH_BLOCKS = {"BLOCK_I": 2 * SMALL_BATCH, "num_warps": 4}


def position_blocks(dtype: torch.dtype, aligned: bool) -> dict[str, int]:
    """Rows of a visit, a warp's features of a tile of both sides, those of the gradient's tile.

    Directions in float32, which are made where operands are not bfloat16, need more registers, and
    so do rows that are not ``aligned``, with an address for each element. Without a bound the
    assembler uses 128 registers on Blackwell and spills a few values.
    """
    block_d = 128 if dtype == torch.bfloat16 else 64
    blocks = {"ROWS": SMALL_BATCH, "BLOCK_K": 128 // dtype.itemsize, "BLOCK_D": block_d}
    most = 168 if dtype == torch.bfloat16 and aligned else 255
    return {**blocks, "WARPS": 4, "num_warps": 4, "maxnreg": most}


# Positions of a program that counts those compared.
COUNT_BLOCK = 128

# Samples, rows and features of a tile of the negatives' product: 8 elements per thread.
LABELLED_BLOCKS = {"BLOCK_I": 16, "BLOCK_R": 16, "BLOCK_D": 64, "num_warps": 4}


@triton.jit
def _real(inside, mask_ptr, offsets, HAS_MASK: tl.constexpr):
    """Mask of real positions among those ``inside``."""
    if HAS_MASK:
        inside = inside & (tl.load(mask_ptr + offsets, mask=inside, other=0) != 0)
    return inside


@triton.jit
def _tile(x_ptr, start, inside, first, D, BLOCK_D: tl.constexpr):
    """Features of rows (BLOCK_R,) from ``first`` on, as float32."""
    d = first + tl.arange(0, BLOCK_D)
    where = inside[:, None] & (d < D)[None, :]
    return tl.load(x_ptr + start[:, None] + d[None, :], mask=where, other=0.0).to(tl.float32)


@triton.jit
def _inverse_norm(squares, x_ptr, start, inside, D, BLOCK_D: tl.constexpr):
    """1/‖x‖, 0 for zero rows. Squares that overflow or underflow are computed from scaled rows."""
    unusual = (squares < 1e-25) | (squares > 1e25)
    scale = tl.full(squares.shape, 1.0, tl.float32)
    if tl.max(unusual.to(tl.int32), axis=0) > 0:
        peak = tl.zeros_like(squares)
        for first in range(0, D, BLOCK_D):
            x = _tile(x_ptr, start, inside, first, D, BLOCK_D)
            peak = tl.maximum(peak, tl.max(tl.abs(x), axis=1))
        scale = tl.where(unusual, 1.0 / tl.where(peak == 0.0, 1.0, peak), 1.0)
        squares = tl.zeros_like(squares)
        for first in range(0, D, BLOCK_D):
            x = _tile(x_ptr, start, inside, first, D, BLOCK_D) * scale[:, None]
            squares += tl.sum(x * x, axis=1)
    return tl.where(squares == 0.0, 0.0, scale / tl.sqrt(squares))


@triton.jit(do_not_specialize=["rows", "P"])
def cos_nce_norm_kernel(
    s_ptrs,  # layers of (R, P, D)
    t_ptrs,  # the same, for the second side of the grid
    mask_ptr,  # (R, P) bytes
    inverse_ptr,  # (sides, layers, R, P): 1/‖x‖, 0 for zero rows and padding
    rows,  # R·P
    P,
    D,
    stride_s_r,
    stride_s_p,
    stride_t_r,
    stride_t_p,
    SLOTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    layer = tl.program_id(1)
    second = tl.program_id(2) == 1
    x_ptr = tl.where(second, pick(t_ptrs, layer, SLOTS), pick(s_ptrs, layer, SLOTS))
    stride_r = tl.where(second, stride_t_r, stride_s_r).to(tl.int64)
    stride_p = tl.where(second, stride_t_p, stride_s_p).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = _real(row < rows, mask_ptr, row, HAS_MASK)
    start = (row // P) * stride_r + (row % P) * stride_p
    products = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for first in range(0, D, BLOCK_D):
        x = _tile(x_ptr, start, inside, first, D, BLOCK_D)
        products += x * x
    inverse = _inverse_norm(tl.sum(products, axis=1), x_ptr, start, inside, D, BLOCK_D)
    tensor = (tl.program_id(2) * tl.num_programs(1) + layer).to(tl.int64)
    tl.store(inverse_ptr + tensor * rows + row, inverse, mask=row < rows)


@triton.jit(do_not_specialize=["R", "P", "groups", "rows_per_split"])
def cos_nce_sum_kernel(
    x_ptrs,  # layers of (O·R, P, D)
    mask_ptr,  # (O·R, P) bytes
    inverse_ptr,  # (layers, O·R, P)
    sum_ptr,  # (splits, layers, O·P, D)
    count_ptr,  # (splits, layers, O·P): rows in each sum
    R,
    P,
    D,
    stride_r,
    stride_p,
    rows_per_split,
    groups,  # O·P
    SLOTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    blocks_d = tl.cdiv(D, BLOCK_D)
    group = (tl.program_id(0) // blocks_d).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2).to(tl.int64)
    x_ptr = pick(x_ptrs, layer, SLOTS)
    p = group % P
    first_row = (group // P) * R
    d = (tl.program_id(0) % blocks_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    count = tl.zeros((BLOCK_R,), tl.float32)
    last = tl.minimum((split + 1) * rows_per_split, R)
    for first in range(split * rows_per_split, last, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        row = first_row + r
        inside = _real(r < last, mask_ptr, row * P + p, HAS_MASK)
        x = tl.load(
            x_ptr + row[:, None] * stride_r + p * stride_p + d[None, :],
            mask=inside[:, None] & (d < D)[None, :],
            other=0.0,
        ).to(tl.float32)
        inverse_at = layer * groups * R + row * P + p
        inverse = tl.load(inverse_ptr + inverse_at, mask=inside, other=0.0)
        total += x * inverse[:, None]
        count += inside.to(tl.float32)
    out = (split * tl.num_programs(1) + layer) * groups + group
    tl.store(sum_ptr + out * D + d, tl.sum(total, axis=0), mask=d < D)
    if tl.program_id(0) % blocks_d == 0:
        tl.store(count_ptr + out, tl.sum(count, axis=0))


@triton.jit(do_not_specialize=["B", "R", "P", "rows_per_split"])
def cos_nce_labelled_sum_kernel(
    x_ptrs,  # layers of (R, P, D)
    mask_ptr,  # (R, P) bytes
    inverse_ptr,  # (layers, R, P)
    sum_ptr,  # (splits, layers, B, P, D)
    count_ptr,  # (splits, layers, B, P)
    R,
    P,
    D,
    stride_r,
    stride_p,
    rows_per_split,
    labels_ptr,  # (B,)
    row_labels_ptr,  # (R,)
    B,
    SLOTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    blocks_d = tl.cdiv(D, BLOCK_D)
    tile = (tl.program_id(0) // blocks_d).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2).to(tl.int64)
    x_ptr = pick(x_ptrs, layer, SLOTS)
    p = tile % P
    i = (tile // P) * BLOCK_I + tl.arange(0, BLOCK_I)
    d = (tl.program_id(0) % blocks_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    labels = tl.load(labels_ptr + i, mask=i < B, other=0)
    total = tl.zeros((BLOCK_I, BLOCK_D), tl.float32)
    count = tl.zeros((BLOCK_I,), tl.float32)
    last = tl.minimum((split + 1) * rows_per_split, R)
    for first in range(split * rows_per_split, last, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        inside = _real(r < last, mask_ptr, r * P + p, HAS_MASK)
        row_labels = tl.load(row_labels_ptr + r, mask=r < last, other=0)
        counts = (labels[:, None] != row_labels[None, :]) & inside[None, :]  # (BLOCK_I, BLOCK_R)
        inverse = tl.load(inverse_ptr + (layer * R + r) * P + p, mask=inside, other=0.0)
        # NaN · 0 would reach samples not compared with the row, so the count carries the NaN.
        one = 1.0 + (inverse - inverse)
        count += tl.sum(tl.where(counts, one[None, :], 0.0), axis=1)
        finite = inside & (inverse == inverse)
        x = _direction(
            x_ptr, tl.where(finite, inverse, 0.0), r, p, d, finite, D, stride_r, stride_p
        )
        total = tl.dot(counts.to(tl.float32), x, total, input_precision=PRECISE)
    out = ((split * tl.num_programs(1) + layer) * B + i) * P + p
    tl.store(sum_ptr + out[:, None] * D + d[None, :], total, (i < B)[:, None] & (d < D)[None, :])
    if tl.program_id(0) % blocks_d == 0:
        tl.store(count_ptr + out, count, mask=i < B)


@triton.jit
def _direction(x_ptr, inverse, i, p, d, real, D, stride_i, stride_p):
    """x / ‖x‖ (BLOCK_I, BLOCK_D) of samples i at position p, 0 outside."""
    x = tl.load(
        x_ptr + i[:, None] * stride_i + p * stride_p + d[None, :],
        mask=real[:, None] & (d < D)[None, :],
        other=0.0,
    )
    return x.to(tl.float32) * inverse[:, None]


@triton.jit
def _negative_sum(sum_ptr, i, p, d, real, P, D, EACH: tl.constexpr):
    """S at position p: (BLOCK_I, BLOCK_D), or (1, BLOCK_D) if the samples share it."""
    if EACH:
        out = (i[:, None] * P + p) * D + d[None, :]
        total = tl.load(sum_ptr + out, mask=real[:, None] & (d < D)[None, :], other=0.0)
    else:
        total = tl.load(sum_ptr + p * D + d, mask=d < D, other=0.0)[None, :]
    return total


@triton.jit
def _program(
    student_ptrs,
    teacher_ptrs,
    mask_ptr,
    inverse_ptr,
    sum_ptr,
    B,
    P,
    D,
    SLOTS: tl.constexpr,
    EACH: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Sample indices, position, layer, offsets and 1/‖x‖ of a loss or gradient program."""
    program = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    p = program % P
    i = (program // P) * BLOCK_I + tl.arange(0, BLOCK_I)
    real = _real(i < B, mask_ptr, i * P + p, HAS_MASK)
    z_ptr = pick(student_ptrs, layer, SLOTS)
    t_ptr = pick(teacher_ptrs, layer, SLOTS)
    offsets = (layer * B + i) * P + p
    z_inverse = tl.load(inverse_ptr + offsets, mask=real, other=0.0)
    t_inverse = tl.load(inverse_ptr + tl.num_programs(1) * B * P + offsets, mask=real, other=0.0)
    sums = layer * P
    if EACH:
        sums = sums * B
    return i, p, real, offsets, z_ptr, t_ptr, z_inverse, t_inverse, sum_ptr + sums * D


@triton.jit(do_not_specialize=["B", "P", "own"])
def cos_nce_loss_kernel(
    student_ptrs,  # layers of (B, P, D)
    teacher_ptrs,
    mask_ptr,  # (B, P) bytes
    inverse_ptr,  # (2·layers, B, P)
    sum_ptr,  # (layers, P, D), or (layers, B, P, D) if EACH
    B,
    P,
    D,
    own,  # 1 if S includes each position's own teacher, else 0
    stride_s_b,
    stride_s_p,
    stride_t_b,
    stride_t_p,
    count_ptr,  # (layers, P), or (layers, B, P) if EACH
    weight_ptr,  # (layers, B, P): w, 0 where nothing is compared
    pull_ptr,  # (layers, B, P): ẑ·a
    losses_ptr,  # (layers, B, P)
    partial_ptr,  # (layers, programs): sums of losses; then (programs,): positions compared
    SLOTS: tl.constexpr,
    EACH: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i, p, real, offsets, z_ptr, t_ptr, z_inverse, t_inverse, sum_ptr = _program(
        student_ptrs, teacher_ptrs, mask_ptr, inverse_ptr, sum_ptr,
        B, P, D, SLOTS, EACH, HAS_MASK, BLOCK_I,
    )  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    if EACH:
        count = tl.load(count_ptr + offsets, mask=real, other=0.0) - own
    else:
        count = tl.load(count_ptr + layer * P + p + i * 0) - own
    compared = real & ~(count <= 0.0)
    w = tl.where(compared, 0.5 / tl.where(count <= 0.0, 1.0, count), 0.0)

    cos_t = tl.zeros((BLOCK_I, BLOCK_D), tl.float32)  # added up across columns after the loop
    cos_n = tl.zeros((BLOCK_I, BLOCK_D), tl.float32)
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        z = _direction(z_ptr, z_inverse, i, p, d, real, D, stride_s_b, stride_s_p)
        t = _direction(t_ptr, t_inverse, i, p, d, real, D, stride_t_b, stride_t_p)
        s = _negative_sum(sum_ptr, i, p, d, real, P, D, EACH)
        cos_t += z * t
        cos_n += z * s
    pull = w * tl.sum(cos_n, axis=1) - (1.5 + w * own) * tl.sum(cos_t, axis=1)
    losses = tl.where(compared, 2.0 + pull, 0.0)
    inside = i < B
    tl.store(weight_ptr + offsets, w, mask=inside)
    tl.store(pull_ptr + offsets, pull, mask=inside)
    tl.store(losses_ptr + offsets, losses, mask=inside)
    partial_ptr += layer * tl.num_programs(0) + program
    tl.store(partial_ptr, tl.sum(losses, axis=0))
    if layer == tl.num_programs(1) - 1:
        tl.store(partial_ptr + tl.num_programs(0), tl.sum(compared.to(tl.float32), axis=0))


@triton.jit(do_not_specialize=["B", "P", "own"])
def cos_nce_gradient_kernel(
    student_ptrs,  # layers of (B, P, D)
    teacher_ptrs,
    mask_ptr,  # (B, P) bytes
    inverse_ptr,  # (2·layers, B, P)
    sum_ptr,  # (layers, P, D), or (layers, B, P, D) if EACH
    B,
    P,
    D,
    own,
    stride_s_b,
    stride_s_p,
    stride_t_b,
    stride_t_p,
    weight_ptr,  # (layers, B, P)
    pull_ptr,  # (layers, B, P)
    dloss_ptr,  # (), or (B, P) if PER_POSITION
    scale_ptr,  # ()
    dx_ptr,  # (layers, B, P, D)
    SLOTS: tl.constexpr,
    EACH: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PER_POSITION: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i, p, real, offsets, z_ptr, t_ptr, z_inverse, t_inverse, sum_ptr = _program(
        student_ptrs, teacher_ptrs, mask_ptr, inverse_ptr, sum_ptr,
        B, P, D, SLOTS, EACH, HAS_MASK, BLOCK_I,
    )  # fmt: skip
    inside = i < B
    w = tl.load(weight_ptr + offsets, mask=inside, other=0.0)
    v = 1.5 + w * own
    pull = tl.load(pull_ptr + offsets, mask=inside, other=0.0)
    if PER_POSITION:
        dloss = tl.load(dloss_ptr + i * P + p, mask=inside, other=0.0)
    else:
        dloss = tl.load(dloss_ptr) * tl.load(scale_ptr)
    outer = dloss * z_inverse
    compared = inside & (w != 0.0)
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        z = _direction(z_ptr, z_inverse, i, p, d, real, D, stride_s_b, stride_s_p)
        t = _direction(t_ptr, t_inverse, i, p, d, real, D, stride_t_b, stride_t_p)
        s = _negative_sum(sum_ptr, i, p, d, real, P, D, EACH)
        dx = (w[:, None] * s - v[:, None] * t - pull[:, None] * z) * outer[:, None]
        dx = tl.where(compared[:, None], dx, 0.0)
        tl.store(dx_ptr + offsets[:, None] * D + d[None, :], dx, inside[:, None] & (d < D)[None, :])


@triton.jit
def _others(labels_ptr, i, p, real, B):
    """Which rows are negatives of each row of a visit: (ROWS, ROWS)."""
    if labels_ptr is None:
        other = i[:, None] != i[None, :]
    else:
        labels = tl.load(labels_ptr + i, mask=i < B, other=0)
        other = labels[:, None] != labels[None, :]
    return other & (p[:, None] == p[None, :]) & real[:, None] & real[None, :]


@triton.jit
def _features(x_ptr, rows, inside, first, D, WARPS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Tile (WARPS, ROWS, BLOCK_K) of rows: WARPS · BLOCK_K features from ``first`` on."""
    part = tl.arange(0, WARPS)[:, None, None] * BLOCK_K
    d = first + part + tl.arange(0, BLOCK_K)[None, None, :]
    return tl.load(x_ptr + rows[None, :, None] + d, inside[None, :, None] & (d < D), other=0.0)


@triton.jit
def _gram(x, y, total):
    return tl.dot(x, tl.permute(y, (0, 2, 1)), total, input_precision=PRECISE)


@triton.jit
def _squares(gram, equal):
    """Diagonal (ROWS,) of the warps' sum, and whether float32 holds it well."""
    squares = tl.sum(tl.where(equal, tl.sum(gram, axis=0), 0.0), axis=1)
    return squares, (squares >= 1e-25) & (squares <= 1e25)


@triton.jit
def _peak(peaks):
    peak = tl.max(tl.max(peaks, axis=2), axis=0)
    return tl.where(peak == 0.0, 1.0, peak)


@triton.jit
def _inverse(squares):
    return tl.where(squares == 0.0, 0.0, 1.0 / tl.sqrt(squares))


@triton.jit
def _in_parts(m):
    """``m`` as the sum of three bfloat16, which have 24 bits together."""
    high = m.to(tl.bfloat16)
    rest = m - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit(
    do_not_specialize=[
        "B", "P", "samples", "stride_u_b", "stride_u_p", "counted", "scale",
    ]
)  # fmt: skip
def cos_nce_position_kernel(
    student_ptrs,  # layers of (B, P, D)
    teacher_ptrs,
    labels_ptr,  # (B,)
    mask_ptr,  # (B, P) bytes
    weights_ptr,  # (B, P)
    upstream_ptr,  # (B, P)
    counts_ptr,  # (counted,): positions compared, for a mean; else none
    losses_ptr,  # (layers, B, P)
    partial_ptr,  # (layers, programs): sums of losses
    dx_ptr,  # (layers, B, P, D)
    B,
    P,
    D,
    samples,  # rows of one position, at least B
    stride_s_b,
    stride_s_p,
    stride_t_b,
    stride_t_p,
    stride_u_b,
    stride_u_p,
    counted,
    scale,
    SLOTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WIDEN: tl.constexpr,
    WARPS: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, ROWS)
    i = (row % samples).to(tl.int64)
    p = program * (ROWS // samples) + row // samples
    offsets = i * P + p
    inside = (i < B) & (p < P)
    real = _real(inside, mask_ptr, offsets, HAS_MASK)
    z_ptr = pick(student_ptrs, layer, SLOTS)
    t_ptr = pick(teacher_ptrs, layer, SLOTS)
    z_rows = i * stride_s_b + p * stride_s_p
    t_rows = i * stride_t_b + p * stride_t_p
    equal = row[:, None] == row[None, :]

    zt = tl.zeros((WARPS, ROWS, ROWS), tl.float32)
    zz = tl.zeros((WARPS, ROWS, ROWS), tl.float32)
    tt = tl.zeros((WARPS, ROWS, ROWS), tl.float32)
    for first in range(0, D, WARPS * BLOCK_K):
        z = _features(z_ptr, z_rows, real, first, D, WARPS, BLOCK_K)
        t = _features(t_ptr, t_rows, real, first, D, WARPS, BLOCK_K)
        if WIDEN:
            z, t = z.to(tl.float32), t.to(tl.float32)
        zt = _gram(z, t, zt)
        zz = _gram(z, z, zz)
        tt = _gram(t, t, tt)
    z_squares, z_usual = _squares(zz, equal)
    t_squares, t_usual = _squares(tt, equal)
    z_scale = tl.full((ROWS,), 1.0, tl.float32)
    t_scale = tl.full((ROWS,), 1.0, tl.float32)
    # Squares that overflow or underflow are computed again from scaled rows.
    if tl.max((real & ~(z_usual & t_usual)).to(tl.int32), axis=0) > 0:
        z_peaks = tl.zeros((WARPS, ROWS, 16), tl.float32)
        t_peaks = tl.zeros((WARPS, ROWS, 16), tl.float32)
        for first in range(0, D, WARPS * 16):
            z = _features(z_ptr, z_rows, real, first, D, WARPS, 16).to(tl.float32)
            t = _features(t_ptr, t_rows, real, first, D, WARPS, 16).to(tl.float32)
            z_peaks = tl.maximum(z_peaks, tl.abs(z))
            t_peaks = tl.maximum(t_peaks, tl.abs(t))
        z_scale = tl.where(z_usual, 1.0, 1.0 / _peak(z_peaks))
        t_scale = tl.where(t_usual, 1.0, 1.0 / _peak(t_peaks))
        zt = tl.zeros((WARPS, ROWS, ROWS), tl.float32)
        zz = tl.zeros((WARPS, ROWS, ROWS), tl.float32)
        tt = tl.zeros((WARPS, ROWS, ROWS), tl.float32)
        for first in range(0, D, WARPS * 16):
            z = _features(z_ptr, z_rows, real, first, D, WARPS, 16).to(tl.float32)
            t = _features(t_ptr, t_rows, real, first, D, WARPS, 16).to(tl.float32)
            z *= z_scale[None, :, None]
            t *= t_scale[None, :, None]
            zt = _gram(z, t, zt)
            zz = _gram(z, z, zz)
            tt = _gram(t, t, tt)
        z_squares, _ = _squares(zz, equal)
        t_squares, _ = _squares(tt, equal)
    z_inverse = _inverse(z_squares)
    t_inverse = _inverse(t_squares)
    cosines = tl.sum(zt, axis=0) * z_inverse[:, None] * t_inverse[None, :]

    others = _others(labels_ptr, i, p, real, B)
    count = tl.sum(others.to(tl.float32), axis=1)
    compared = real & (count > 0.0)
    w = 0.5 / tl.where(compared, count, 1.0)
    # M, the coefficients of the teacher's directions. A NaN reaches samples compared with its row.
    m = tl.where(others, w[:, None], 0.0) - tl.where(equal, 1.5, 0.0)
    pull = tl.sum(tl.where(others | equal, m * cosines, 0.0), axis=1)
    losses = tl.where(compared, 2.0 + pull, 0.0)
    factor = tl.full((ROWS,), 1.0, tl.float32)
    if weights_ptr is not None:
        factor = tl.load(weights_ptr + offsets, mask=inside, other=0.0)
        losses = tl.where(compared, losses * factor, 0.0)
    tl.store(losses_ptr + layer * B * P + offsets, losses, mask=inside)
    tl.store(partial_ptr + layer * tl.num_programs(0) + program, tl.sum(losses, axis=0))

    if dx_ptr is not None:
        factor *= scale / tl.maximum(sum_of(counts_ptr, counted, 1024), 1.0)
        if upstream_ptr is not None:
            place = i * stride_u_b + p * stride_u_p
            factor *= tl.load(upstream_ptr + place, mask=inside, other=0.0)
        z_inverse *= z_scale
        t_inverse *= t_scale
        outer = factor * z_inverse
        # A row of NaN is no operand: 0 · NaN would reach every sample. Its samples' ẑ·a is NaN.
        z_finite = real & (z_inverse == z_inverse)
        t_finite = real & (t_inverse == t_inverse)
        z_inverse = tl.where(z_finite, z_inverse, 0.0)
        t_inverse = tl.where(t_finite, t_inverse, 0.0)
        own = tl.where(equal, -pull[:, None], 0.0)
        z_high, z_middle, z_low = _in_parts(own * z_inverse[None, :])
        t_high, t_middle, t_low = _in_parts(m * t_inverse[None, :])
        dx_rows = dx_ptr + (layer * B * P + offsets) * D
        for first in range(0, D, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)
            columns = (d < D)[None, :]
            at = d[None, :]
            z = tl.load(z_ptr + z_rows[:, None] + at, z_finite[:, None] & columns, other=0.0)
            t = tl.load(t_ptr + t_rows[:, None] + at, t_finite[:, None] & columns, other=0.0)
            if z.dtype == tl.bfloat16 and not WIDEN:
                dx = tl.dot(t_high, t)
                dx = tl.dot(t_middle, t, dx)
                dx = tl.dot(t_low, t, dx)
                dx = tl.dot(z_high, z, dx)
                dx = tl.dot(z_middle, z, dx)
                dx = tl.dot(z_low, z, dx)
            else:
                dx = tl.dot(m, t.to(tl.float32) * t_inverse[:, None], input_precision=PRECISE)
                z = z.to(tl.float32) * z_inverse[:, None]
                dx = tl.dot(own, z, dx, input_precision=PRECISE)
            dx = tl.where(compared[:, None], dx * outer[:, None], 0.0)
            tl.store(dx_rows[:, None] + at, dx, inside[:, None] & columns)


@triton.jit(
    do_not_specialize=["B", "P", "stride_u_b", "stride_u_p", "counted", "scale"],
)
def cos_nce_batch_kernel(
    student_ptrs,  # layers of (B, P, D)
    teacher_ptrs,
    mask_ptr,  # (B, P) bytes
    weights_ptr,  # (B, P)
    upstream_ptr,  # (B, P)
    counts_ptr,  # (counted,): positions compared, for a mean; else none
    losses_ptr,  # (layers, B, P)
    partial_ptr,  # (layers, P): sums of losses
    dx_ptr,  # (layers, B, P, D)
    B,
    P,
    D,
    stride_s_b,
    stride_s_p,
    stride_t_b,
    stride_t_p,
    stride_u_b,
    stride_u_p,
    counted,
    scale,
    SLOTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    p = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK_I).to(tl.int64)
    offsets = i * P + p
    inside = i < B
    real = _real(inside, mask_ptr, offsets, HAS_MASK)
    z_ptr = pick(student_ptrs, layer, SLOTS)
    t_ptr = pick(teacher_ptrs, layer, SLOTS)
    z_start = i * stride_s_b + p * stride_s_p
    t_start = i * stride_t_b + p * stride_t_p

    zz = tl.zeros((BLOCK_I, BLOCK_D), tl.float32)
    tt = tl.zeros((BLOCK_I, BLOCK_D), tl.float32)
    for first in range(0, D, BLOCK_D):
        z = _tile(z_ptr, z_start, real, first, D, BLOCK_D)
        t = _tile(t_ptr, t_start, real, first, D, BLOCK_D)
        zz += z * z
        tt += t * t
    z_inverse = _inverse_norm(tl.sum(zz, axis=1), z_ptr, z_start, real, D, BLOCK_D)
    t_inverse = _inverse_norm(tl.sum(tt, axis=1), t_ptr, t_start, real, D, BLOCK_D)

    cos_t = tl.zeros((BLOCK_I, BLOCK_D), tl.float32)
    cos_n = tl.zeros((BLOCK_I, BLOCK_D), tl.float32)
    for first in range(0, D, BLOCK_D):
        z = _tile(z_ptr, z_start, real, first, D, BLOCK_D) * z_inverse[:, None]
        t = _tile(t_ptr, t_start, real, first, D, BLOCK_D) * t_inverse[:, None]
        cos_t += z * t
        cos_n += z * tl.sum(t, axis=0)[None, :]
    exists = real.to(tl.float32)
    count = tl.sum(exists, axis=0) - exists
    compared = real & (count > 0.0)
    w = 0.5 / tl.maximum(count, 1.0)
    pull = w * tl.sum(cos_n, axis=1) - (1.5 + w) * tl.sum(cos_t, axis=1)
    factor = tl.full((BLOCK_I,), 1.0, tl.float32)
    if weights_ptr is not None:
        factor = tl.load(weights_ptr + offsets, mask=inside, other=0.0)
    losses = tl.where(compared, (2.0 + pull) * factor, 0.0)
    tl.store(losses_ptr + layer * B * P + offsets, losses, mask=inside)
    tl.store(partial_ptr + layer * P + p, tl.sum(losses, axis=0))

    if dx_ptr is not None:
        factor *= scale / tl.maximum(sum_of(counts_ptr, counted, 1024), 1.0)
        if upstream_ptr is not None:
            place = i * stride_u_b + p * stride_u_p
            factor *= tl.load(upstream_ptr + place, mask=inside, other=0.0)
        outer = factor * z_inverse
        dx_rows = dx_ptr + (layer * B * P + offsets) * D
        for first in range(0, D, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)
            z = _tile(z_ptr, z_start, real, first, D, BLOCK_D) * z_inverse[:, None]
            t = _tile(t_ptr, t_start, real, first, D, BLOCK_D) * t_inverse[:, None]
            s = tl.sum(t, axis=0)[None, :]
            dx = w[:, None] * s - (1.5 + w)[:, None] * t - pull[:, None] * z
            dx = tl.where(compared[:, None], dx * outer[:, None], 0.0)
            tl.store(dx_rows[:, None] + d[None, :], dx, inside[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["B", "P"])
def cos_nce_count_kernel(
    labels_ptr,  # (B,)
    mask_ptr,  # (B, P) bytes
    counts_ptr,  # (programs,): positions compared
    B,
    P,
    HAS_MASK: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    i = tl.arange(0, BLOCK_I)
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    inside = (i < B)[:, None] & (p < P)[None, :]
    real = _real(inside, mask_ptr, i[:, None] * P + p[None, :], HAS_MASK)
    others = tl.zeros((BLOCK_I, BLOCK_P), tl.int32)
    for j in range(0, B):
        if labels_ptr is None:
            other = i != j
        else:
            labels = tl.load(labels_ptr + i, mask=i < B, other=0)
            other = labels != tl.load(labels_ptr + j)
        row = _real(p < P, mask_ptr, j * P + p, HAS_MASK)
        others += (other[:, None] & row[None, :]).to(tl.int32)
    compared = (real & (others > 0)).to(tl.float32)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(tl.sum(compared, axis=1), axis=0))


@triton.jit(
    do_not_specialize=["partials", "counts", "scale"],
    do_not_specialize_on_alignment=["counts_ptr"],
)
def cos_nce_reduce_kernel(
    partial_ptr,  # (partials,)
    counts_ptr,  # (counts,): positions compared, for a mean; else none
    loss_ptr,  # ()
    scale_ptr,  # (): what the upstream gradient is multiplied by
    partials,
    counts,
    scale,
    BLOCK: tl.constexpr,
):
    scale = scale / tl.maximum(sum_of(counts_ptr, counts, BLOCK), 1.0)
    tl.store(loss_ptr, sum_of(partial_ptr, partials, BLOCK) * scale)
    if scale_ptr is not None:
        tl.store(scale_ptr, scale)


def _cos_nce_shapes(
    students, teachers, negatives, labels, mask, row_labels, row_mask, each, reduction
):
    B, P, D = students[0].shape
    layers = len(students)
    new = functools.partial(students[0].new_empty, dtype=torch.float32)
    loss = new((B, P) if reduction == "none" else ())
    total = new((layers, B, P, D) if each or labels is not None else (layers, P, D))
    return [loss, new((2 * layers, B, P)), total, *(new((layers, B, P)) for _ in "wp"), new(())]


@operator(_cos_nce_shapes)
def cos_nce(
    students: list[Tensor],
    teachers: list[Tensor],
    negatives: list[Tensor],
    labels: Tensor | None,
    mask: Tensor | None,
    row_labels: Tensor | None,
    row_mask: Tensor | None,
    each: bool,
    reduction: str,
) -> list[Tensor]:
    """Loss, averaged over layers, and the tensors that `cos_nce_gradient` needs.

    Students and teachers are (B, P, D) with equal shapes and strides, the last stride 1. Given
    negatives are (K, P, D), or (B·K, P, D) if ``each`` sample has its own, with labels (K,) and a
    mask (K, P) or (B, K, P). Returns the loss (for "none", of one layer, (B, P)), then 1/‖x‖, S, w,
    ẑ·a and the scale of the upstream gradient.
    """
    B, P, D = students[0].shape
    layers = len(students)
    mask = None if mask is None else mask.view(torch.uint8)
    inverse = _inverse_norms((students, teachers), mask)
    own = not negatives and labels is None
    if negatives:
        row_mask = None if row_mask is None else row_mask.view(torch.uint8)
        norms = _inverse_norms((negatives,), row_mask)
        rows = (negatives, row_mask, norms)
    else:
        rows = (teachers, mask, inverse[layers:])
    total, count = _direction_sums(*rows, B if each else 1, labels, row_labels)
    each = each or labels is not None
    total = total.view(layers, B, P, D) if each else total

    programs = P * cdiv(B, blocks(each)["BLOCK_I"])
    weight, pull, losses = (inverse.new_empty(layers, B, P) for _ in range(3))
    partial = inverse.new_empty(layers + 1, programs)
    both = (students, teachers, mask, inverse, total, own)
    _start(cos_nce_loss_kernel, *both, count, weight, pull, losses, partial)
    loss, scale = inverse.new_empty(()), inverse.new_empty(())
    if reduction == "none":
        return [losses[0], inverse, total, weight, pull, scale]
    counted = programs if reduction == "mean" else 0
    launch_kernel(
        cos_nce_reduce_kernel,
        (1,),
        partial,
        partial[layers],
        loss,
        scale,
        programs * layers,
        counted,
        1 / layers,
        BLOCK=1024,
    )
    return [loss, inverse, total, weight, pull, scale]


def _position_shapes(students, teachers, labels, mask, weights, upstream, reduction, gradient):
    x, layers = students[0], len(students)
    loss = x.new_empty(x.shape[:2] if reduction == "none" else (), dtype=torch.float32)
    return [loss, x.new_empty(layers, *x.shape)] if gradient else [loss]


@operator(_position_shapes)
def cos_nce_positions(
    students: list[Tensor],
    teachers: list[Tensor],
    labels: Tensor | None,
    mask: Tensor | None,
    weights: Tensor | None,
    upstream: Tensor | None,
    reduction: str,
    gradient: bool,
) -> list[Tensor]:
    """`cos_nce` of at most SMALL_BATCH samples, without given negatives.

    ``weights`` (B, P) are factors of the losses. Returns the loss, and with ``gradient`` the
    gradient (layers, B, P, D), times ``upstream`` (), or (B, P) for "none", if that is given.
    """
    B, P, D = students[0].shape
    layers = len(students)
    new = functools.partial(students[0].new_empty, dtype=torch.float32)
    mask = None if mask is None else mask.view(torch.uint8)
    if labels is not None:
        labels = _comparable(labels, labels.is_floating_point())
    small = B <= SMALL_BATCH
    samples = next_power_of_2(B)
    programs = cdiv(P, SMALL_BATCH // samples) if small else P
    losses, partial, loss = new(layers, B, P), new(layers, programs), new(())
    counts, counted, scale = partial, 0, 1 / layers
    if reduction == "mean" and mask is None and labels is None:
        scale /= B * P  # all positions are compared, or, in a batch of one, none
    elif reduction == "mean":
        counted = cdiv(P, COUNT_BLOCK)
        counts = new(counted)
        launch_kernel(
            cos_nce_count_kernel,
            (counted,),
            labels,
            mask,
            counts,
            B,
            P,
            mask is not None,
            SMALL_BATCH if small else 2 * SMALL_BATCH,
            COUNT_BLOCK,
        )
    if upstream is not None:
        upstream = upstream.expand(B, P)
    strides = _strides(students[0], teachers[0])
    dx = students[0].new_empty(layers, B, P, D) if gradient else None
    flags = {"SLOTS": slots(layers), "HAS_MASK": mask is not None}
    aligned = math.gcd(D, *strides) % 16 == 0
    if small:
        flags |= position_blocks(students[0].dtype, aligned)
        flags["WIDEN"] = students[0].dtype == torch.bfloat16 and triton_interpreted()
    else:
        flags |= {**BATCH_BLOCKS, "BLOCK_D": 128 if aligned else 32}
    launch_kernel(
        cos_nce_position_kernel if small else cos_nce_batch_kernel,
        (programs, layers),
        padded(students),
        padded(teachers),
        *([labels] if small else []),
        mask,
        weights,
        upstream,
        counts,
        losses,
        partial,
        dx,
        B,
        P,
        D,
        *([samples] if small else []),
        *strides,
        *((0, 0) if upstream is None else upstream.stride()),
        counted,
        scale,
        **flags,
    )
    if reduction == "none":
        loss = losses[0]
    else:
        launch_kernel(
            cos_nce_reduce_kernel,
            (1,),
            partial,
            counts,
            loss,
            None,
            layers * programs,
            counted,
            scale,
            BLOCK=1024,
        )
    return [loss] if dx is None else [loss, dx]


def _gradient_shapes(students, teachers, mask, saved, dloss, own):
    return students[0].new_empty(len(students), *students[0].shape)


@operator(_gradient_shapes)
def cos_nce_gradient(
    students: list[Tensor],
    teachers: list[Tensor],
    mask: Tensor | None,
    saved: list[Tensor],
    dloss: Tensor,
    own: bool,
) -> Tensor:
    """Gradient (layers, B, P, D) for ``dloss`` () or (B, P); ``saved`` as `cos_nce` returned it.

    ``own``: negatives are the batch's, without labels.
    """
    inverse, total, weight, pull, scale = saved
    dx = students[0].new_empty(len(students), *students[0].shape)
    mask = None if mask is None else mask.view(torch.uint8)
    both = (students, teachers, mask, inverse, total, own)
    others = (weight, pull, dloss.contiguous(), scale, dx)
    _start(cos_nce_gradient_kernel, *both, *others, PER_POSITION=dloss.dim() > 0)
    return dx


def _start(
    kernel: Any,
    students: list[Tensor],
    teachers: list[Tensor],
    mask: Tensor | None,
    inverse: Tensor,
    total: Tensor,
    own: bool,
    *others: Tensor,
    **flags: bool,
) -> None:
    """Launch the loss or the gradient kernel, which have the same grid."""
    B, P, D = students[0].shape
    layers, each = len(students), total.dim() == 4
    config = blocks(each)
    launch_kernel(
        kernel,
        (P * cdiv(B, config["BLOCK_I"]), layers),
        padded(students),
        padded(teachers),
        mask,
        inverse,
        total,
        B,
        P,
        D,
        int(own),
        *_strides(students[0], teachers[0]),
        *others,
        SLOTS=slots(layers),
        EACH=each,
        HAS_MASK=mask is not None,
        **flags,
        **config,
    )


def _strides(first: Tensor, second: Tensor) -> tuple[int, int, int, int]:
    return first.stride(0), first.stride(1), second.stride(0), second.stride(1)


def _inverse_norms(sides: Sequence[list[Tensor]], mask: Tensor | None) -> Tensor:
    """1/‖x‖ (sides·layers, R, P) of one or two lists of (R, P, D), each with equal strides."""
    first, second = sides[0], sides[-1]
    R, P, D = first[0].shape
    layers = len(first)
    inverse = first[0].new_empty(len(sides) * layers, R, P, dtype=torch.float32)
    if R * P:
        launch_kernel(
            cos_nce_norm_kernel,
            (cdiv(R * P, ROW_BLOCKS["BLOCK_R"]), layers, len(sides)),
            padded(first),
            padded(second),
            mask,
            inverse,
            R * P,
            P,
            D,
            *_strides(first[0], second[0]),
            SLOTS=slots(layers),
            HAS_MASK=mask is not None,
            **ROW_BLOCKS,
        )
    return inverse


def _direction_sums(
    tensors: list[Tensor],
    mask: Tensor | None,
    inverse: Tensor,
    runs: int,
    labels: Tensor | None,
    row_labels: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Σ x/‖x‖ over rows (runs·R, P, D), and how many: (layers, runs·P, D) and (layers, runs·P).

    With ``labels`` (B,) B sums, each over the rows (R, P, D) of other labels, in place of the runs.
    Rows without labels of their own are then the samples themselves.
    """
    rows, P, D = tensors[0].shape
    rows //= runs
    layers = len(tensors)
    groups = P * (runs if labels is None else labels.shape[0])
    splits = max(cdiv(rows, ROWS_PER_SUM), 1)
    sums = (layers, groups) if splits == 1 else (splits, layers, groups)
    total, count = inverse.new_empty(*sums, D), inverse.new_empty(sums)
    strides = tensors[0].stride()[:2]
    arguments = (padded(tensors), mask, inverse, total, count, rows, P, D, *strides)
    arguments = (*arguments, cdiv(rows, splits))
    flags = {"SLOTS": slots(layers), "HAS_MASK": mask is not None}
    if labels is None:
        config = SUM_BLOCKS
        if rows >= 256 and groups * cdiv(D, config["BLOCK_D"]) * layers * splits < WARPS:
            config = LONG_SUM_BLOCKS
        tiles = groups * cdiv(D, config["BLOCK_D"])
        launch_kernel(
            cos_nce_sum_kernel, (tiles, layers, splits), *arguments, groups, **flags, **config
        )
    else:
        given = [labels] if row_labels is None else [labels, row_labels]
        B, real = labels.shape[0], any(x.is_floating_point() for x in given)
        tiles = cdiv(B, LABELLED_BLOCKS["BLOCK_I"]) * cdiv(D, LABELLED_BLOCKS["BLOCK_D"])
        compared = [_comparable(x, real, place) for x, place in zip(given, (0, B), strict=False)]
        launch_kernel(
            cos_nce_labelled_sum_kernel,
            (P * tiles, layers, splits),
            *arguments,
            compared[0],
            compared[-1],
            B,
            **flags,
            **LABELLED_BLOCKS,
        )
    return (total, count) if splits == 1 else (total.sum(0), count.sum(0))


def _comparable(labels: Tensor, real: bool, place: int = 0) -> Tensor:
    """Labels as int64, for few compiled forms: real numbers by their bits, -0 as 0.

    NaN labels equal no other label: each gets different bits, numbered from ``place``.
    """
    if not real:
        return labels.to(torch.int64)
    bits = (labels.double() + 0.0).view(torch.int64)
    last = torch.iinfo(torch.int64).max - place
    numbered = torch.arange(last, last - len(labels), -1, device=labels.device)
    return torch.where(labels.isnan(), numbered, bits)
