"""COS-NCE: loss and gradient per position, in-batch, label-filtered and given negatives.

A position's loss is 2 + ẑ·a with a = w·S − v·t̂ (see `fastkd.contrastive`): S is the sum of its
negatives' directions, w is 1/2 over their number (0 if nothing is compared), and v is 3/2, or
w + 3/2 if S includes the position's own teacher.

Data path. `cos_nce_norm_kernel` reads every row once for 1/‖x‖. A second kernel reads the teacher
(or the given negatives) and computes S and the number of negatives. `cos_nce_sum_kernel` computes
one sum for all samples of a position, or one per sample if each has its own negatives.
`cos_nce_labelled_sum_kernel` computes one sum per sample over the rows of other labels: tiles of
the 0/1 matrix of negatives are multiplied by the directions, so no sum is a difference of two sums.
`cos_nce_loss_kernel` reads student, teacher and S for the two cosines and stores w and ẑ·a;
`cos_nce_reduce_kernel` adds its programs' partial losses. `cos_nce_gradient_kernel` reads the same
tensors again and writes the gradient, multiplied by the upstream gradient. All layers of a call
share each launch.

With E = B·P·D elements of s bytes on each side: norms 2Es, sum Es, loss 2Es, gradient 3Es: 8Es
bytes, and about 20E operations. One S per sample is written once and read twice, 12E more bytes.
Labels need 2·B·E operations on the tensor cores. Bound by bandwidth; five launches, and
one more for the norms of given negatives.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.operator import operator
from fastkd.kernels.launch import cdiv
from fastkd.kernels.pointers import padded, pick, slots
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

# Samples, rows and features of a tile of the negatives' product: 8 elements per thread.
LABELLED_BLOCKS = {"BLOCK_I": 16, "BLOCK_R": 16, "BLOCK_D": 64, "num_warps": 4}


@triton.jit
def _real(inside, mask_ptr, offsets, HAS_MASK: tl.constexpr):
    """Mask of real positions among those ``inside``."""
    if HAS_MASK:
        inside = inside & (tl.load(mask_ptr + offsets, mask=inside, other=0) != 0)
    return inside


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
    peaks = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        where = inside[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + start[:, None] + d[None, :], mask=where, other=0.0).to(tl.float32)
        products += x * x
        peaks = tl.maximum(peaks, tl.abs(x))
    squares = tl.sum(products, axis=1)
    peak = tl.max(peaks, axis=1)
    peak = tl.where(peak == 0.0, 1.0, peak)
    # Squares that overflow or underflow are computed again from scaled rows.
    unusual = (squares < 1e-25) | (squares > 1e25)
    scale = tl.where(unusual, 1.0 / peak, 1.0)
    if tl.max(unusual.to(tl.int32), axis=0) > 0:
        squares = tl.zeros((BLOCK_R,), tl.float32)
        for first in range(0, D, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)
            where = inside[:, None] & (d < D)[None, :]
            x = tl.load(x_ptr + start[:, None] + d[None, :], mask=where, other=0.0).to(tl.float32)
            x = x * scale[:, None]
            squares += tl.sum(x * x, axis=1)
    inverse = tl.where(squares == 0.0, 0.0, scale / tl.sqrt(squares))
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


@triton.jit(do_not_specialize=["programs", "layers"])
def cos_nce_reduce_kernel(
    partial_ptr,  # (layers + 1, programs)
    loss_ptr,  # ()
    scale_ptr,  # (): what the upstream gradient is multiplied by
    programs,
    layers,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    partials = layers * programs
    counted_ptr = partial_ptr + partials
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, partials, BLOCK):
        i = first + tl.arange(0, BLOCK)
        total += tl.load(partial_ptr + i, mask=i < partials, other=0.0)
    scale = 1.0 / layers
    if MEAN:
        counted = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, programs, BLOCK):
            i = first + tl.arange(0, BLOCK)
            counted += tl.load(counted_ptr + i, mask=i < programs, other=0.0)
        scale = scale / tl.maximum(tl.sum(counted, axis=0), 1.0)
    tl.store(loss_ptr, tl.sum(total, axis=0) * scale)
    tl.store(scale_ptr, scale)


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
    cos_nce_reduce_kernel[(1,)](
        partial,
        loss,
        scale,
        programs,
        layers,
        MEAN=reduction == "mean",
        BLOCK=1024,
        num_warps=4,
    )
    return [loss, inverse, total, weight, pull, scale]


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
    kernel[(P * cdiv(B, config["BLOCK_I"]), layers)](
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
        cos_nce_norm_kernel[(cdiv(R * P, ROW_BLOCKS["BLOCK_R"]), layers, len(sides))](
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
        cos_nce_sum_kernel[(tiles, layers, splits)](*arguments, groups, **flags, **config)
    else:
        given = [labels] if row_labels is None else [labels, row_labels]
        B, real = labels.shape[0], any(x.is_floating_point() for x in given)
        tiles = cdiv(B, LABELLED_BLOCKS["BLOCK_I"]) * cdiv(D, LABELLED_BLOCKS["BLOCK_D"])
        compared = [_comparable(x, real, place) for x, place in zip(given, (0, B), strict=False)]
        cos_nce_labelled_sum_kernel[(P * tiles, layers, splits)](
            *arguments, compared[0], compared[-1], B, **flags, **LABELLED_BLOCKS
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
