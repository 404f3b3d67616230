"""COS-NCE: loss and gradient per position, in-batch, label-filtered and given negatives.

A position's loss is 2 + ẑ·a with a = w·S − v·t̂ (see `fastkd.contrastive`): S sums its negatives'
directions, w is half of one over their number (0 where nothing is compared), v = 3/2, or w + 3/2
where S holds the position's own teacher.

Data path. `inverse_norm_kernel` reads every row once for 1/‖x‖. `direction_sum_kernel` reads the
teacher (or the given negatives) for S, one sum a position that stays in the L2 cache.
`loss_kernel` reads both sides for the two cosines and leaves w and ẑ·a; `reduce_kernel` adds up
what its programs leave. `gradient_kernel` reads both sides again and writes the gradient with the
upstream gradient applied. With labels there is no S in memory: each tile of samples multiplies the
matrix of who counts with the teacher's directions, from the cache, so that a sum is never a
difference of two sums. All layers of a call share each launch.

With E = B·P·D elements of s bytes on each side: norms 2Es, sum Es, loss 2Es, gradient 3Es: 8Es
bytes, and about 20E operations (with labels 4·B·E more on the tensor cores, fewer than the bytes
cost up to B of some hundreds). Bound by bandwidth; five launches.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd.kernels.pointers import LAYERS_PER_LAUNCH, padded, pick, slots
from fastkd.kernels.variants import Variant, forms

# Rows that one program adds up; more are split among programs and added in a second pass.
ROWS_PER_SUM = 2048

# Squared norms outside are computed again from scaled rows.
SMALLEST_SQUARE = tl.constexpr(1e-25)
LARGEST_SQUARE = tl.constexpr(1e25)


def blocks(negatives: str) -> dict[str, int]:
    """Block sizes and warps, the same for every shape.

    16 samples of one position share a program and with it S: 8 elements a thread of each side,
    enough loads in flight, and few enough registers where every element has an address of its
    own; 4 where each sample has an S of its own. With labels the matrix product asks for at least
    16 on every side; half the features keep its operands in registers.
    """
    block_d = 64 if negatives in ("labels", "each") else 128
    return {"BLOCK_I": 16, "BLOCK_J": 16, "BLOCK_D": block_d, "num_warps": 8}


def row_blocks() -> dict[str, int]:
    """Rows and features of a tile where rows are only read: 16 elements a thread."""
    return {"BLOCK_R": 16, "BLOCK_D": 128, "num_warps": 4}


@triton.jit(do_not_specialize=["rows", "P"])
def inverse_norm_kernel(
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
    there = row < rows
    if HAS_MASK:
        there = there & (tl.load(mask_ptr + row, mask=there, other=0) != 0)
    start = (row // P) * stride_r + (row % P) * stride_p
    squares = tl.zeros((BLOCK_R,), tl.float32)
    peak = tl.zeros((BLOCK_R,), tl.float32)
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        inside = there[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + start[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
        squares += tl.sum(x * x, axis=1)
        peak = tl.maximum(peak, tl.max(tl.abs(x), axis=1))
    peak = tl.where(peak == 0.0, 1.0, peak)
    unusual = (squares < SMALLEST_SQUARE) | (squares > LARGEST_SQUARE)
    scale = tl.where(unusual, 1.0 / peak, 1.0)
    if tl.max(unusual.to(tl.int32), axis=0) > 0:
        squares = tl.zeros((BLOCK_R,), tl.float32)
        for first in range(0, D, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)
            inside = there[:, None] & (d < D)[None, :]
            x = tl.load(x_ptr + start[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
            x = x * scale[:, None]
            squares += tl.sum(x * x, axis=1)
    inverse = tl.where(squares == 0.0, 0.0, scale / tl.sqrt(squares))
    tensor = (tl.program_id(2) * tl.num_programs(1) + layer).to(tl.int64)
    tl.store(inverse_ptr + tensor * rows + row, inverse, mask=row < rows)


@triton.jit(do_not_specialize=["R", "P", "groups", "rows_per_split"])
def direction_sum_kernel(
    x_ptrs,  # layers of (O·R, P, D)
    mask_ptr,  # (R, P) bytes
    inverse_ptr,  # (layers, O·R, P)
    sum_ptr,  # (splits, layers, O·P, D)
    R,
    P,
    D,
    groups,  # O·P
    stride_r,
    stride_p,
    rows_per_split,
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
    total = tl.zeros((BLOCK_D,), tl.float32)
    last = tl.minimum((split + 1) * rows_per_split, R)
    for first in range(split * rows_per_split, last, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        there = r < last
        if HAS_MASK:
            there = there & (tl.load(mask_ptr + r * P + p, mask=there, other=0) != 0)
        row = first_row + r
        x = tl.load(
            x_ptr + row[:, None] * stride_r + p * stride_p + d[None, :],
            mask=there[:, None] & (d < D)[None, :],
            other=0.0,
        ).to(tl.float32)
        at = layer * groups * R + row * P + p
        inverse = tl.load(inverse_ptr + at, mask=there, other=0.0)
        total += tl.sum(x * inverse[:, None], axis=0)
    out = (split * tl.num_programs(1) + layer) * groups + group
    tl.store(sum_ptr + out * D + d, total, mask=d < D)


@triton.jit
def _real(mask_ptr, i, p, B, P, HAS_MASK: tl.constexpr):
    """Which samples have a real token at position p."""
    real = i < B
    if HAS_MASK:
        real = real & (tl.load(mask_ptr + i * P + p, mask=real, other=0) != 0)
    return real


@triton.jit
def _direction(x_ptr, inverse, i, p, d, real, D, stride_i, stride_p):
    """x / ‖x‖ (BLOCK_I, BLOCK_D) of samples i at position p, 0 where there is none."""
    x = tl.load(
        x_ptr + i[:, None] * stride_i + p * stride_p + d[None, :],
        mask=real[:, None] & (d < D)[None, :],
        other=0.0,
    )
    return x.to(tl.float32) * inverse[:, None]


@triton.jit
def _negative_sum(
    sum_ptr,
    t_ptr,
    labels_ptr,
    mask_ptr,
    t_inverse_ptr,
    labels,
    i,
    p,
    d,
    real,
    B,
    P,
    D,
    stride_t_b,
    stride_t_p,
    NEGATIVES: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """S at position p: (BLOCK_I, BLOCK_D), or (1, BLOCK_D) where the samples share it."""
    if NEGATIVES == "labels":
        total = tl.zeros((BLOCK_I, BLOCK_D), tl.float32)
        for first in range(0, B, BLOCK_J):
            j = (first + tl.arange(0, BLOCK_J)).to(tl.int64)
            real_j = _real(mask_ptr, j, p, B, P, HAS_MASK)
            other = tl.load(labels_ptr + j, mask=j < B, other=0)
            counts = (labels[:, None] != other[None, :]) & real_j[None, :]  # (BLOCK_I, BLOCK_J)
            inverse = tl.load(t_inverse_ptr + j * P + p, mask=real_j, other=0.0)
            # A NaN times 0 would reach samples that it does not count for; `_count` reports it.
            whole = real_j & (inverse == inverse)
            t = _direction(
                t_ptr, tl.where(whole, inverse, 0.0), j, p, d, whole, D, stride_t_b, stride_t_p
            )
            total = tl.dot(counts.to(tl.float32), t, total, input_precision="tf32x3")
    elif NEGATIVES == "each":
        at = (i[:, None] * P + p) * D + d[None, :]
        total = tl.load(sum_ptr + at, mask=real[:, None] & (d < D)[None, :], other=0.0)
    else:
        total = tl.load(sum_ptr + p * D + d, mask=d < D, other=0.0)[None, :]
    return total


@triton.jit
def _count(
    labels_ptr,
    mask_ptr,
    t_inverse_ptr,
    labels,
    p,
    B,
    P,
    K,
    NEGATIVES: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Negatives of each sample at position p, NaN where one of them holds a NaN or inf."""
    count = tl.zeros((BLOCK_I,), tl.float32)
    if NEGATIVES == "labels":
        for first in range(0, B, BLOCK_J):
            j = (first + tl.arange(0, BLOCK_J)).to(tl.int64)
            real_j = _real(mask_ptr, j, p, B, P, HAS_MASK)
            other = tl.load(labels_ptr + j, mask=j < B, other=0)
            counts = (labels[:, None] != other[None, :]) & real_j[None, :]
            inverse = tl.load(t_inverse_ptr + j * P + p, mask=real_j, other=0.0)
            one = 1.0 + (inverse - inverse)
            count += tl.sum(tl.where(counts, one[None, :], 0.0), axis=1)
    elif NEGATIVES == "batch":
        if HAS_MASK:
            real = tl.zeros((BLOCK_J,), tl.float32)
            for first in range(0, B, BLOCK_J):
                j = (first + tl.arange(0, BLOCK_J)).to(tl.int64)
                real += _real(mask_ptr, j, p, B, P, HAS_MASK).to(tl.float32)
            count += tl.sum(real, axis=0) - 1.0
        else:
            count += B - 1.0
    else:
        count += K * 1.0
    return count


@triton.jit(do_not_specialize=["B", "P", "K"])
def loss_kernel(
    student_ptrs,  # layers of (B, P, D)
    teacher_ptrs,
    labels_ptr,  # (B,)
    mask_ptr,  # (B, P) bytes
    inverse_ptr,  # (2·layers, B, P)
    sum_ptr,  # (layers, P, D), or (layers, B, P, D) for "each"
    weight_ptr,  # (layers, B, P): w, 0 where nothing is compared
    pull_ptr,  # (layers, B, P): ẑ·a
    losses_ptr,  # (layers, B, P)
    partial_ptr,  # (layers, programs): sums of losses
    counted_ptr,  # (programs,): positions that compare something
    B,
    P,
    D,
    K,
    stride_s_b,
    stride_s_p,
    stride_t_b,
    stride_t_p,
    SLOTS: tl.constexpr,
    NEGATIVES: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    p = program % P
    i = (program // P) * BLOCK_I + tl.arange(0, BLOCK_I)
    real = _real(mask_ptr, i, p, B, P, HAS_MASK)
    z_ptr = pick(student_ptrs, layer, SLOTS)
    t_ptr = pick(teacher_ptrs, layer, SLOTS)
    z_inverse = tl.load(inverse_ptr + layer * B * P + i * P + p, mask=real, other=0.0)
    t_inverse_ptr = inverse_ptr + (tl.num_programs(1) + layer) * B * P
    t_inverse = tl.load(t_inverse_ptr + i * P + p, mask=real, other=0.0)
    labels = i
    if NEGATIVES == "labels":
        labels = tl.load(labels_ptr + i, mask=i < B, other=0)
    elif NEGATIVES == "each":
        sum_ptr += layer * B * P * D
    else:
        sum_ptr += layer * P * D

    cos_t = tl.zeros((BLOCK_I,), tl.float32)
    cos_n = tl.zeros((BLOCK_I,), tl.float32)  # summed over the negatives
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        z = _direction(z_ptr, z_inverse, i, p, d, real, D, stride_s_b, stride_s_p)
        t = _direction(t_ptr, t_inverse, i, p, d, real, D, stride_t_b, stride_t_p)
        s = _negative_sum(
            sum_ptr, t_ptr, labels_ptr, mask_ptr, t_inverse_ptr, labels, i, p, d, real, B, P, D,
            stride_t_b, stride_t_p, NEGATIVES, HAS_MASK, BLOCK_I, BLOCK_J, BLOCK_D,
        )  # fmt: skip
        cos_t += tl.sum(z * t, axis=1)
        cos_n += tl.sum(z * s, axis=1)

    count = _count(
        labels_ptr, mask_ptr, t_inverse_ptr, labels, p, B, P, K, NEGATIVES, HAS_MASK,
        BLOCK_I, BLOCK_J,
    )  # fmt: skip
    compared = real & ~(count <= 0.0)
    w = tl.where(compared, 0.5 / tl.where(count <= 0.0, 1.0, count), 0.0)
    v = 1.5
    if NEGATIVES == "batch":
        v = 1.5 + w
    pull = w * cos_n - v * cos_t
    losses = tl.where(compared, 2.0 + pull, 0.0)
    inside = i < B
    if layer == 0:
        tl.store(counted_ptr + program, tl.sum(compared.to(tl.float32), axis=0))
    tl.store(weight_ptr + layer * B * P + i * P + p, w, mask=inside)
    tl.store(pull_ptr + layer * B * P + i * P + p, pull, mask=inside)
    tl.store(losses_ptr + layer * B * P + i * P + p, losses, mask=inside)
    tl.store(partial_ptr + layer * tl.num_programs(0) + program, tl.sum(losses, axis=0))


@triton.jit(do_not_specialize=["partials", "counts", "layers"])
def reduce_kernel(
    partial_ptr,  # (partials,)
    counted_ptr,  # (counts,)
    loss_ptr,  # ()
    scale_ptr,  # (): what the upstream gradient is multiplied by
    partials,
    counts,
    layers,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, partials, BLOCK):
        i = first + tl.arange(0, BLOCK)
        total += tl.load(partial_ptr + i, mask=i < partials, other=0.0)
    scale = 1.0 / layers
    if MEAN:
        counted = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, counts, BLOCK):
            i = first + tl.arange(0, BLOCK)
            counted += tl.load(counted_ptr + i, mask=i < counts, other=0.0)
        scale = scale / tl.maximum(tl.sum(counted, axis=0), 1.0)
    tl.store(loss_ptr, tl.sum(total, axis=0) * scale)
    tl.store(scale_ptr, scale)


@triton.jit(do_not_specialize=["B", "P"])
def gradient_kernel(
    student_ptrs,  # layers of (B, P, D)
    teacher_ptrs,
    labels_ptr,  # (B,)
    mask_ptr,  # (B, P) bytes
    inverse_ptr,  # (2·layers, B, P)
    sum_ptr,  # (layers, P, D), or (layers, B, P, D) for "each"
    weight_ptr,  # (layers, B, P)
    pull_ptr,  # (layers, B, P)
    dloss_ptr,  # (), or (B, P) if PER_POSITION
    scale_ptr,  # ()
    dx_ptr,  # (layers, B, P, D)
    B,
    P,
    D,
    stride_s_b,
    stride_s_p,
    stride_t_b,
    stride_t_p,
    SLOTS: tl.constexpr,
    NEGATIVES: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PER_POSITION: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    p = program % P
    i = (program // P) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside = i < B
    real = _real(mask_ptr, i, p, B, P, HAS_MASK)
    z_ptr = pick(student_ptrs, layer, SLOTS)
    t_ptr = pick(teacher_ptrs, layer, SLOTS)
    at = layer * B * P + i * P + p
    z_inverse = tl.load(inverse_ptr + at, mask=real, other=0.0)
    t_inverse_ptr = inverse_ptr + (tl.num_programs(1) + layer) * B * P
    t_inverse = tl.load(t_inverse_ptr + i * P + p, mask=real, other=0.0)
    w = tl.load(weight_ptr + at, mask=inside, other=0.0)
    pull = tl.load(pull_ptr + at, mask=inside, other=0.0)
    v = tl.full((BLOCK_I,), 1.5, tl.float32)
    if NEGATIVES == "batch":
        v = v + w
    if PER_POSITION:
        dloss = tl.load(dloss_ptr + i * P + p, mask=inside, other=0.0)
    else:
        dloss = tl.load(dloss_ptr) * tl.load(scale_ptr)
    outer = dloss * z_inverse
    compared = inside & (w != 0.0)
    labels = i
    if NEGATIVES == "labels":
        labels = tl.load(labels_ptr + i, mask=inside, other=0)
    elif NEGATIVES == "each":
        sum_ptr += layer * B * P * D
    else:
        sum_ptr += layer * P * D

    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        z = _direction(z_ptr, z_inverse, i, p, d, real, D, stride_s_b, stride_s_p)
        t = _direction(t_ptr, t_inverse, i, p, d, real, D, stride_t_b, stride_t_p)
        s = _negative_sum(
            sum_ptr, t_ptr, labels_ptr, mask_ptr, t_inverse_ptr, labels, i, p, d, real, B, P, D,
            stride_t_b, stride_t_p, NEGATIVES, HAS_MASK, BLOCK_I, BLOCK_J, BLOCK_D,
        )  # fmt: skip
        dx = (w[:, None] * s - v[:, None] * t - pull[:, None] * z) * outer[:, None]
        dx = tl.where(compared[:, None], dx, 0.0)
        out = ((layer * B + i) * P + p)[:, None] * D + d[None, :]
        tl.store(dx_ptr + out, dx, mask=inside[:, None] & (d < D)[None, :])


def cos_nce(
    students: list[Tensor],
    teachers: list[Tensor],
    negatives: list[Tensor],
    labels: Tensor | None,
    mask: Tensor | None,
    kind: str,
    reduction: str,
) -> list[Tensor]:
    """Loss over all layers and positions, averaged over layers, and what the gradient needs.

    Students and teachers are (B, P, D), all alike in shape and strides, the last one 1; ``kind``
    is "batch", "labels", "shared" with negatives (K, P, D), or "each" with (B·K, P, D). Returns
    the loss (for "none", of one layer, (B, P)), then 1/‖x‖, S, w, ẑ·a and the scale of the
    upstream gradient.
    """
    B, P, D = students[0].shape
    layers = len(students)
    labels = _comparable(labels)
    mask_bytes = None if mask is None else mask.view(torch.uint8)
    inverse = _inverse_norms((students, teachers), mask_bytes)
    K = 0
    if kind == "labels":
        total = inverse.new_empty(0)
    elif kind == "batch":
        total = _direction_sum(teachers, mask_bytes, inverse[layers:], B, P)
    else:
        K = negatives[0].shape[0] // (B if kind == "each" else 1)
        norms = _inverse_norms((negatives,), None)
        total = _direction_sum(negatives, None, norms, K, B * P if kind == "each" else P)

    config = blocks(kind)
    programs = P * triton.cdiv(B, config["BLOCK_I"])
    weight, pull, losses = (inverse.new_empty(layers, B, P) for _ in range(3))
    partial, counted = inverse.new_empty(layers, programs), inverse.new_empty(programs)
    with torch.cuda.device_of(students[0]):
        loss_kernel[(programs, layers)](
            padded(students),
            padded(teachers),
            labels,
            mask_bytes,
            inverse,
            total,
            weight,
            pull,
            losses,
            partial,
            counted,
            B,
            P,
            D,
            K,
            *_strides(students[0], teachers[0]),
            SLOTS=slots(layers),
            NEGATIVES=kind,
            HAS_MASK=mask is not None,
            **config,
        )
    loss, scale = inverse.new_empty(()), inverse.new_empty(())
    if reduction == "none":
        return [losses[0], inverse, total, weight, pull, scale]
    with torch.cuda.device_of(students[0]):
        reduce_kernel[(1,)](
            partial,
            counted,
            loss,
            scale,
            layers * programs,
            programs,
            layers,
            MEAN=reduction == "mean",
            BLOCK=1024,
            num_warps=4,
        )
    return [loss, inverse, total, weight, pull, scale]


def cos_nce_gradient(
    students: list[Tensor],
    teachers: list[Tensor],
    labels: Tensor | None,
    mask: Tensor | None,
    saved: list[Tensor],
    dloss: Tensor,
    kind: str,
) -> Tensor:
    """Gradient (layers, B, P, D) for ``dloss`` () or (B, P); ``saved`` as `cos_nce` returned it."""
    inverse, total, weight, pull, scale = saved
    B, P, D = students[0].shape
    layers = len(students)
    dx = students[0].new_empty(layers, B, P, D)
    labels = _comparable(labels)
    config = blocks(kind)
    with torch.cuda.device_of(students[0]):
        gradient_kernel[(P * triton.cdiv(B, config["BLOCK_I"]), layers)](
            padded(students),
            padded(teachers),
            labels,
            None if mask is None else mask.view(torch.uint8),
            inverse,
            total,
            weight,
            pull,
            dloss,
            scale,
            dx,
            B,
            P,
            D,
            *_strides(students[0], teachers[0]),
            SLOTS=slots(layers),
            NEGATIVES=kind,
            HAS_MASK=mask is not None,
            PER_POSITION=dloss.dim() > 0,
            **config,
        )
    return dx


def _comparable(labels: Tensor | None) -> Tensor | None:
    """Labels in one of two types, for few compiled forms."""
    if labels is None:
        return None
    return labels.to(torch.float64 if labels.is_floating_point() else torch.int64)


def _strides(first: Tensor, second: Tensor) -> tuple[int, int, int, int]:
    return first.stride(0), first.stride(1), second.stride(0), second.stride(1)


def _inverse_norms(sides: Sequence[list[Tensor]], mask: Tensor | None) -> Tensor:
    """1/‖x‖ (sides·layers, R, P) of one or two lists of (R, P, D), each alike in strides."""
    first, second = sides[0], sides[-1]
    R, P, D = first[0].shape
    layers = len(first)
    inverse = torch.empty(len(sides) * layers, R, P, dtype=torch.float32, device=first[0].device)
    if inverse.numel():
        config = row_blocks()
        with torch.cuda.device_of(inverse):
            inverse_norm_kernel[(triton.cdiv(R * P, config["BLOCK_R"]), layers, len(sides))](
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
                **config,
            )
    return inverse


def _direction_sum(
    tensors: list[Tensor], mask: Tensor | None, inverse: Tensor, rows: int, groups: int
) -> Tensor:
    """Σ x/‖x‖ over runs of ``rows`` rows: (layers, groups, D); a group is a run and a position."""
    _, P, D = tensors[0].shape
    layers = len(tensors)
    splits = max(triton.cdiv(rows, ROWS_PER_SUM), 1)
    total = inverse.new_empty(splits, layers, groups, D)
    config = row_blocks()
    with torch.cuda.device_of(tensors[0]):
        direction_sum_kernel[(groups * triton.cdiv(D, config["BLOCK_D"]), layers, splits)](
            padded(tensors),
            mask,
            inverse,
            total,
            rows,
            P,
            D,
            groups,
            tensors[0].stride(0),
            tensors[0].stride(1),
            triton.cdiv(rows, splits),
            SLOTS=slots(layers),
            HAS_MASK=mask is not None,
            **config,
        )
    return total[0] if splits == 1 else total.sum(0)


cos_nce_op = torch.library.custom_op("fastkd::cos_nce", cos_nce, mutates_args=())
cos_nce_gradient_op = torch.library.custom_op(
    "fastkd::cos_nce_gradient", cos_nce_gradient, mutates_args=()
)


@cos_nce_op.register_fake
def _(students, teachers, negatives, labels, mask, kind, reduction):
    B, P, D = students[0].shape
    layers = len(students)
    new = functools.partial(students[0].new_empty, dtype=torch.float32)
    groups = {"labels": (0,), "each": (layers, B * P, D)}.get(kind, (layers, P, D))
    rows = (layers, B, P)
    loss = new((B, P) if reduction == "none" else ())
    return [loss, new((2 * layers, B, P)), new(groups), new(rows), new(rows), new(())]


@cos_nce_gradient_op.register_fake
def _(students, teachers, labels, mask, saved, dloss, kind):
    return students[0].new_empty(len(students), *students[0].shape)


def compile_variants() -> Iterator[Variant]:
    """What `cos_nce` and `cos_nce_gradient` can start."""
    for dtype, layers, masked in itertools.product(
        ("*bf16", "*fp16", "*fp32"), (1, LAYERS_PER_LAUNCH), (False, True)
    ):
        count = slots(layers)
        features = (dtype,) * count
        types: dict[str, Any] = {"mask_ptr": "*u8" if masked else None}
        types |= dict.fromkeys(("s_ptrs", "t_ptrs", "x_ptrs"), features)
        types |= dict.fromkeys(("student_ptrs", "teacher_ptrs"), features)
        types["dx_ptr"] = dtype
        config: dict[str, Any] = row_blocks()
        num_warps = config.pop("num_warps")
        config |= {"SLOTS": count, "HAS_MASK": masked}
        yield from forms(inverse_norm_kernel, types, config, num_warps=num_warps)
        yield from forms(direction_sum_kernel, types, config, num_warps=num_warps)
        for kind, labels in (
            ("batch", None),
            ("labels", "*i64"),
            ("labels", "*fp64"),
            ("shared", None),
            ("each", None),
        ):
            types["labels_ptr"] = labels
            config = blocks(kind)
            options = {"num_warps": config.pop("num_warps"), "tensor_cores": kind == "labels"}
            config |= {"SLOTS": count, "NEGATIVES": kind, "HAS_MASK": masked}
            yield from forms(loss_kernel, types, config, **options)
            # Only one layer at a time has a loss for every position.
            for per_position in (False, True) if layers == 1 else (False,):
                flags = config | {"PER_POSITION": per_position}
                yield from forms(gradient_kernel, types, flags, **options)
    for mean in (True, False):
        yield from forms(reduce_kernel, {}, {"MEAN": mean, "BLOCK": 1024})
