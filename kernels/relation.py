"""FCD relations with Pearson's correlation: loss and gradient, tokens and samples, all layers.

A group is what has one relation: a sample (its N tokens) or a position (its B samples). Rows are
scaled to unit length and centred before any product: R̃_ij = s_i·s_j + u_i + u_j with s the
centred rows, so that nothing cancels (raw moments lose their digits at mean cosine 0.99). Half
inputs are multiplied as float16, bfloat16 too: s and A are of known size, and float16 has three
bits more. float32 is split in two float16 parts of 22 bits together, three products, more
accurate than TF32x3 and half its work; means and |s_i|² are always float32.
The gradient is a combination of the same rows, ∂L/∂x_i = [Σ_j A_ij s_j − (Σ_j A_ij) s_i − κ_i x̂_i]
/ ‖x_i‖ with A = b − ρa less its diagonal, a = R̃_s/σ_s, b = R̃_t/σ_t, and κ_i what is parallel to
the row.

Data path. Every kernel sees features in multiples of 16, padded with zeros where they are not.
`row_scale_kernel` reads every row once and leaves 1/‖x‖ (0 at padding) for both kinds of
relation. Groups of up to 128 rows: `small_groups_kernel`, one program a group and layer, streams
both sides over D, keeps both relations in registers, and streams the student again for the
gradient; tokens write it, samples add to it. Longer groups, a chunk at a time: centred rows
(`centre_kernel`), lower-triangle tiles of both relations with their sums
(`relation_tiles_kernel`), A (`difference_kernel`), then one product with the centred rows
(`gradient_kernel`). The forward pass does it all; the backward pass scales by the upstream
gradient. Sums go through partial results and a second pass, never atomics: the same bits on
every run.

Small groups, per layer with E = B·N·D elements of s bytes a side: 2Es bytes read for the norms,
3Es for each kind of relation, Es written, read and written again, and 2Es in the backward pass:
13Es bytes, part of them from the L2 cache, against 6·E·(N + B) operations. At B32 N128 D768 in
bf16 that is 82 MB (19 µs at 4.3 TB/s) and 3 GFLOP (4 µs): bound by bandwidth and latency. Long
groups: N²·(Ds + Dt) operations for the triangles and 2·N²·Ds for the gradient against 14·N²
bytes of tiles and A: bound by the tensor cores from D ≈ 500 on.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd.kernels.launch import operator
from fastkd.kernels.pointers import LAYERS_PER_LAUNCH, padded, pick, slots

# Groups of up to this many rows keep both their relations in registers.
SMALL_GROUP = 128
# Sizes of features and bytes of addresses in multiples of this make wide loads.
ALIGNMENT = 16
# Rows and columns of a tile of a long relation.
TILE = 128
# Entries of the relations that are worked on at once; bounds the workspace of long groups.
CHUNK_ENTRIES = 2**24

SMALLEST_NORM = tl.constexpr(1e-12)  # of torch.nn.functional.normalize
LARGEST_SCALE = tl.constexpr(1e12)  # 1/‖x‖ of rows that are too short to normalise
# Centred rows are multiplied by this as operands, clear of float16's subnormal numbers.
OPERAND_SCALE = tl.constexpr(4096.0)


@triton.jit(do_not_specialize=["rows", "N"])
def row_scale_kernel(
    s_ptrs,  # layers of (B, N, Ds)
    t_ptrs,  # layers of (B, N, Dt)
    mask_ptr,  # (B, N) bytes
    scale_ptr,  # (layers, 2, B·N): 1/‖x‖, 0 at padding
    rows,
    N,
    Ds,
    Dt,
    stride_s_b,
    stride_s_n,
    stride_t_b,
    stride_t_n,
    SLOTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    layer = tl.program_id(1)
    side = tl.program_id(2)
    teacher = side == 1
    x_ptr = tl.where(teacher, pick(t_ptrs, layer, SLOTS), pick(s_ptrs, layer, SLOTS))
    D = tl.where(teacher, Dt, Ds)
    stride_b = tl.where(teacher, stride_t_b, stride_s_b)
    stride_n = tl.where(teacher, stride_t_n, stride_s_n)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    there = row < rows
    if HAS_MASK:
        there = there & (tl.load(mask_ptr + row, mask=there, other=0) != 0)
    start = (row // N) * stride_b + (row % N) * stride_n
    squares = tl.zeros((BLOCK_R,), tl.float32)
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        x = tl.load(
            x_ptr + start[:, None] + d[None, :],
            mask=there[:, None] & (d < D)[None, :],
            other=0.0,
        ).to(tl.float32)  # (BLOCK_R, BLOCK_D)
        squares += tl.sum(x * x, axis=1)
    norm = tl.sqrt(squares)
    scale = tl.where(norm < SMALLEST_NORM, LARGEST_SCALE, 1.0 / tl.maximum(norm, SMALLEST_NORM))
    scale += norm - norm  # NaN where the norm overflows, as inf must not pass for a short row
    scale = tl.where(there, scale, 0.0)
    at = (2 * layer + side).to(tl.int64)
    tl.store(scale_ptr + at * rows + row, scale, mask=row < rows)


@triton.jit(do_not_specialize=["B", "N"])
def count_groups_kernel(
    mask_ptr,  # (B, N) bytes
    counts_ptr,  # (2,): samples and positions with at least two real members
    B,
    N,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    over_samples = tl.program_id(0) == 1
    groups = tl.where(over_samples, N, B)
    members = tl.where(over_samples, B, N)
    stride_group = tl.where(over_samples, 1, N).to(tl.int64)
    stride_member = tl.where(over_samples, N, 1).to(tl.int64)
    counted = tl.zeros((BLOCK_G,), tl.int32)
    for first_group in range(0, groups, BLOCK_G):
        g = first_group + tl.arange(0, BLOCK_G)
        real = tl.zeros((BLOCK_G,), tl.int32)
        for first in range(0, members, BLOCK_N):
            n = first + tl.arange(0, BLOCK_N)
            mask = tl.load(
                mask_ptr + g[:, None] * stride_group + n[None, :] * stride_member,
                mask=(g < groups)[:, None] & (n < members)[None, :],
                other=0,
            )
            real += tl.sum((mask != 0).to(tl.int32), axis=1)
        counted += (real >= 2).to(tl.int32)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(counted, axis=0).to(tl.float32))


@triton.jit
def _centred_tile(x_ptr, start, scale, valid, count, d, D):
    """Unit rows, their mean and the centred rows of one block of features."""
    x = tl.load(
        x_ptr + start[:, None] + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0
    ).to(tl.float32)
    unit = x * scale[:, None]  # (BLOCK_N, BLOCK_D)
    mean = tl.sum(unit, axis=0) / count  # (BLOCK_D,)
    return unit, mean, tl.where(valid[:, None], unit - mean[None, :], 0.0)


@triton.jit
def _high(x):
    """``x`` as the tensor cores take it; with `_low`, 22 bits of it."""
    return x.to(tl.float16)


@triton.jit
def _low(x):
    return (x - x.to(tl.float16).to(tl.float32)).to(tl.float16)


@triton.jit
def _offset(along, squares, length, scale, valid):
    """h with R_ij = s_i·s_j + h_i + h_j + 1, from s_i·mean, |s_i|² and |mean|².

    Of two equal forms for unit rows the first errs with |mean|², the second with |s_i|².
    """
    direct = along + (length - 1) / 2
    h = tl.where(scale >= LARGEST_SCALE, direct, tl.where(length < 0.5, direct, -squares / 2))
    return tl.where(valid, h, 0.0)


@triton.jit
def _derivative(scale, dtype: tl.constexpr):
    """What the gradient of a normalised row is multiplied by: ``scale``.

    float16 could not hold 1e12: there a row too short to normalise keeps that gradient.
    """
    return tl.where(scale >= LARGEST_SCALE, 1.0, scale) if dtype == tl.float16 else scale


@triton.jit
def _centred_relation(
    x_ptr,
    start,
    scale,
    valid,
    count,
    D,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """R̃ (BLOCK_N, BLOCK_N), 0 at padding, and its diagonal."""
    R = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
    along = tl.zeros((BLOCK_N,), tl.float32)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    length = 0.0
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        _unit, mean, centred = _centred_tile(x_ptr, start, scale, valid, count, d, D)
        along += tl.sum(centred * mean[None, :], axis=1)
        squares += tl.sum(centred * centred, axis=1)
        length += tl.sum(mean * mean, axis=0)
        centred *= OPERAND_SCALE
        high = _high(centred)
        R = tl.dot(high, tl.trans(high), R)
        if SPLIT:
            low = _low(centred)
            R = tl.dot(high, tl.trans(low), R)
            R = tl.dot(low, tl.trans(high), R)
    h = _offset(along, squares, length, scale, valid)
    u = tl.where(valid, h - tl.sum(h, axis=0) / count, 0.0)
    diagonal = squares + 2 * u
    n = tl.arange(0, BLOCK_N)
    R = R / (OPERAND_SCALE * OPERAND_SCALE) + u[:, None] + u[None, :]
    R = tl.where(n[:, None] == n[None, :], diagonal[:, None], R)
    return tl.where(valid[:, None] & valid[None, :], R, 0.0), diagonal


@triton.jit(do_not_specialize=["N", "rows", "stride_group", "stride_n", "accumulate"])
def small_groups_kernel(
    s_ptrs,  # layers of (groups, N, Ds)
    t_ptrs,  # layers of (groups, N, Dt)
    scale_ptr,  # (layers, 2, rows)
    counts_ptr,  # (1,): groups that count in the average
    dx_ptr,  # (layers, rows, Ds)
    loss_ptr,  # (layers, groups): weighted losses
    N,
    Ds,
    Dt,
    rows,
    stride_s_group,
    stride_s_n,
    stride_t_group,
    stride_t_n,
    stride_group,  # of rows in scale and dx
    stride_n,
    weight,
    eps,
    accumulate,
    SLOTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    GRADIENT: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    s_ptr = pick(s_ptrs, layer, SLOTS)
    t_ptr = pick(t_ptrs, layer, SLOTS)
    n = tl.arange(0, BLOCK_N)
    there = n < N
    row = group * stride_group + n.to(tl.int64) * stride_n
    scale_ptr += 2 * layer * rows
    scale_s = tl.load(scale_ptr + row, mask=there, other=0.0)
    scale_t = tl.load(scale_ptr + rows + row, mask=there, other=0.0)
    real = tl.sum((scale_s != 0).to(tl.int32), axis=0)
    valid = (scale_s != 0) & (real >= 2)
    count = tl.maximum(real, 1).to(tl.float32)
    if HAS_MASK:
        weight = weight / tl.maximum(tl.load(counts_ptr), 1.0)

    start_t = group * stride_t_group + n.to(tl.int64) * stride_t_n
    R_t, own_t = _centred_relation(
        t_ptr, start_t, scale_t, valid, count, Dt, SPLIT, BLOCK_N, BLOCK_D
    )
    # a = R̃_s/σ_s and b = R̃_t/σ_t, both times n: entries near 1.
    sigma_t = tl.sqrt(tl.sum(R_t * R_t))
    b = R_t * tl.where(sigma_t > 0, count / sigma_t, 0.0)
    sum_b = tl.sum(b, axis=1)
    if not SPLIT:  # half the registers while the student's relation is made
        b = b.to(tl.float16)
    start_s = group * stride_s_group + n.to(tl.int64) * stride_s_n
    R_s, own_s = _centred_relation(
        s_ptr, start_s, scale_s, valid, count, Ds, SPLIT, BLOCK_N, BLOCK_D
    )
    sigma_s = tl.sqrt(tl.sum(R_s * R_s))
    a = R_s * tl.where(sigma_s > 0, count / sigma_s, 0.0)

    # 1 − cov/(σ_sσ_t + eps) from the difference b − a: no cancellation.
    denominator = sigma_s * sigma_t + eps
    difference = b.to(tl.float32) - a
    loss = sigma_s * sigma_t * tl.sum(difference * difference) / (2 * count * count)
    loss = (loss + eps) / denominator
    weight = tl.where(real >= 2, weight, 0.0)
    groups = tl.num_programs(0)
    tl.store(loss_ptr + layer * groups + group, tl.where(real >= 2, weight * loss, 0.0))

    if GRADIENT:
        # A = b − ρa. Rows that are not of unit length keep its diagonal; nothing is parallel.
        short = scale_s >= LARGEST_SCALE
        own_a = own_s * tl.where(sigma_s > 0, count / sigma_s, 0.0)
        rho = 1 - loss
        own_A = own_t * tl.where(sigma_t > 0, count / sigma_t, 0.0) - rho * own_a
        row_sums = sum_b - rho * tl.sum(a, axis=1)
        A = b.to(tl.float32) - rho * a
        parallel = sigma_s / count * (tl.sum(A * a, axis=1) - own_A * own_a)
        parallel -= own_s * (row_sums - own_A)
        parallel = tl.where(short, -row_sums, parallel)
        row_sums = tl.where(short, row_sums, row_sums - own_A)
        A = tl.where((n[:, None] == n[None, :]) & (short == 0)[:, None], 0.0, A)
        high = _high(A)
        if SPLIT:
            low = _low(A)
        derivative = _derivative(scale_s, s_ptr.dtype.element_ty)
        left = (-2 * weight * sigma_t / (denominator * count)) * derivative
        row_sums *= left
        parallel *= left
        left /= OPERAND_SCALE
        dx_rows = dx_ptr + (layer * rows + row) * Ds
        for first in range(0, Ds, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)
            unit, _mean, centred = _centred_tile(s_ptr, start_s, scale_s, valid, count, d, Ds)
            scaled = centred * OPERAND_SCALE
            dx = tl.dot(high, _high(scaled))
            if SPLIT:
                dx = tl.dot(high, _low(scaled), dx)
                dx = tl.dot(low, _high(scaled), dx)
            dx = dx * left[:, None] - row_sums[:, None] * centred - parallel[:, None] * unit
            dx = tl.where(valid[:, None], dx, 0.0)
            inside = there[:, None] & (d < Ds)[None, :]
            dx_tile = dx_rows[:, None] + d[None, :]
            dx += tl.load(dx_tile, mask=inside & (accumulate != 0), other=0.0).to(tl.float32)
            tl.store(dx_tile, dx, mask=inside)


@triton.jit(do_not_specialize=["N", "stride_group", "stride_n"])
def mean_kernel(
    x_ptr,  # (groups, N, D)
    scale_ptr,  # rows
    mean_ptr,  # (groups, D): mean of the unit rows
    size_ptr,  # (groups,): rows that are there
    N,
    D,
    stride_x_group,
    stride_x_n,
    stride_group,
    stride_n,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    size = tl.zeros((BLOCK_N,), tl.int32)
    for first in range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N).to(tl.int64)
        row = group * stride_group + n * stride_n
        scale = tl.load(scale_ptr + row, mask=n < N, other=0.0)
        x = tl.load(
            x_ptr + group * stride_x_group + n[:, None] * stride_x_n + d[None, :],
            mask=(scale != 0)[:, None] & (d < D)[None, :],
            other=0.0,
        ).to(tl.float32)
        total += tl.sum(x * scale[:, None], axis=0)
        size += (scale != 0).to(tl.int32)
    count = tl.sum(size, axis=0)
    tl.store(mean_ptr + group * D + d, total / tl.maximum(count, 1), mask=d < D)
    if tl.program_id(1) == 0:
        tl.store(size_ptr + group, count)


@triton.jit(do_not_specialize=["first_group", "N", "stride_group", "stride_n"])
def centre_kernel(
    x_ptr,  # (groups, N, D)
    scale_ptr,
    mean_ptr,
    size_ptr,
    centred_ptr,  # (parts, chunk, N, D): high parts, then with SPLIT low ones
    offset_ptr,  # (chunk, 2, N): h, then |s_i|²
    first_group,
    N,
    D,
    stride_x_group,
    stride_x_n,
    stride_group,
    stride_n,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    slot = tl.program_id(1).to(tl.int64)
    group = first_group + slot
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    scale = tl.load(scale_ptr + group * stride_group + n * stride_n, mask=n < N, other=0.0)
    valid = (scale != 0) & (tl.load(size_ptr + group) >= 2)
    along = tl.zeros((BLOCK_N,), tl.float32)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    length = 0.0
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        x = tl.load(
            x_ptr + group * stride_x_group + n[:, None] * stride_x_n + d[None, :],
            mask=valid[:, None] & (d < D)[None, :],
            other=0.0,
        ).to(tl.float32)
        mean = tl.load(mean_ptr + group * D + d, mask=d < D, other=0.0)
        centred = tl.where(valid[:, None], x * scale[:, None] - mean[None, :], 0.0)
        along += tl.sum(centred * mean[None, :], axis=1)
        squares += tl.sum(centred * centred, axis=1)
        length += tl.sum(mean * mean, axis=0)
        centred *= OPERAND_SCALE
        target = centred_ptr + (slot * N + n)[:, None] * D + d[None, :]
        inside = (n < N)[:, None] & (d < D)[None, :]
        tl.store(target, _high(centred), mask=inside)
        if SPLIT:
            tl.store(target + tl.num_programs(1) * N * D, _low(centred), mask=inside)
    h = _offset(along, squares, length, scale, valid)
    tl.store(offset_ptr + 2 * slot * N + n, h, mask=n < N)
    tl.store(offset_ptr + (2 * slot + 1) * N + n, squares, mask=n < N)


@triton.jit(do_not_specialize=["first_group", "N", "rows", "groups", "stride_group", "stride_n"])
def centre_offsets_kernel(
    offset_ptr,  # (2·chunk, 2, N): h and |s_i|² become u and R̃_ii
    scale_ptr,  # of this layer: (2, rows)
    size_ptr,  # (2, groups)
    first_group,
    N,
    rows,
    groups,
    stride_group,
    stride_n,
    BLOCK_N: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    side = tl.program_id(1).to(tl.int64)
    group = first_group + slot
    offset_ptr += 2 * (side * tl.num_programs(0) + slot) * N
    size = tl.load(size_ptr + side * groups + group)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        total += tl.load(offset_ptr + n, mask=n < N, other=0.0)
    mean = tl.sum(total, axis=0) / tl.maximum(size, 1)
    for first in range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        row = side * rows + group * stride_group + n.to(tl.int64) * stride_n
        scale = tl.load(scale_ptr + row, mask=n < N, other=0.0)
        u = tl.load(offset_ptr + n, mask=n < N, other=0.0) - mean
        u = tl.where((scale != 0) & (size >= 2), u, 0.0)
        diagonal = tl.load(offset_ptr + N + n, mask=n < N, other=0.0) + 2 * u
        tl.store(offset_ptr + n, u, mask=n < N)
        tl.store(offset_ptr + N + n, diagonal, mask=n < N)


@triton.jit
def _triangle(tile):
    """(i, j) with j ≤ i of the tile-th tile of a lower triangle, row by row."""
    i = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    return i, tile - i * (i + 1) // 2


@triton.jit(do_not_specialize=["first_group", "N", "stride_group", "stride_n"])
def relation_tiles_kernel(
    centred_s_ptr,  # (parts, chunk, N, Ds)
    centred_t_ptr,  # (parts, chunk, N, Dt)
    offset_ptr,  # (2, chunk, 2, N)
    scale_ptr,
    size_ptr,
    tiles_ptr,  # (2, chunk, tiles, TILE, TILE): R̃_s, R̃_t, lower triangle of tiles
    first_group,
    N,
    Ds,
    Dt,
    stride_group,
    stride_n,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tile = tl.program_id(0)
    slot = tl.program_id(1).to(tl.int64)
    teacher = tl.program_id(2) == 1
    tiles, chunk = tl.num_programs(0), tl.num_programs(1)
    at = tl.where(teacher, chunk + slot, slot)
    D = tl.where(teacher, Dt, Ds)
    centred_ptr = tl.where(teacher, centred_t_ptr, centred_s_ptr) + slot * N * D
    offset_ptr += 2 * at * N
    block_i, block_j = _triangle(tile)
    i = block_i * TILE + tl.arange(0, TILE)
    j = block_j * TILE + tl.arange(0, TILE)

    R = tl.zeros((TILE, TILE), tl.float32)
    rows_i = centred_ptr + i.to(tl.int64)[:, None] * D
    rows_j = centred_ptr + j.to(tl.int64)[:, None] * D
    low_parts = chunk.to(tl.int64) * N * D
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)[None, :]
        inside_i, inside_j = (i < N)[:, None] & (d < D), (j < N)[:, None] & (d < D)
        left = tl.load(rows_i + d, mask=inside_i, other=0.0)
        right = tl.load(rows_j + d, mask=inside_j, other=0.0)
        R = tl.dot(left, tl.trans(right), R)
        if SPLIT:
            low = tl.load(rows_j + low_parts + d, mask=inside_j, other=0.0)
            R = tl.dot(left, tl.trans(low), R)
            low = tl.load(rows_i + low_parts + d, mask=inside_i, other=0.0)
            R = tl.dot(low, tl.trans(right), R)

    group = first_group + slot
    usable = tl.load(size_ptr + group) >= 2
    scale_ptr += group * stride_group
    scale_i = tl.load(scale_ptr + i.to(tl.int64) * stride_n, mask=i < N, other=0.0)
    scale_j = tl.load(scale_ptr + j.to(tl.int64) * stride_n, mask=j < N, other=0.0)
    valid_i, valid_j = (scale_i != 0) & usable, (scale_j != 0) & usable
    u_i = tl.load(offset_ptr + i, mask=i < N, other=0.0)
    u_j = tl.load(offset_ptr + j, mask=j < N, other=0.0)
    own = tl.load(offset_ptr + N + i, mask=i < N, other=0.0)
    R = R / (OPERAND_SCALE * OPERAND_SCALE) + u_i[:, None] + u_j[None, :]
    R = tl.where(i[:, None] == j[None, :], own[:, None], R)
    R = tl.where(valid_i[:, None] & valid_j[None, :], R, 0.0)
    cell = tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    tl.store(tiles_ptr + (at * tiles + tile) * TILE * TILE + cell, R)


@triton.jit(do_not_specialize=["N"])
def sums_kernel(
    tiles_ptr,  # (2, chunk, tiles, TILE, TILE)
    partial_ptr,  # (chunk, blocks, 3, N): row sums of R̃_sR̃_t, R̃_s², R̃_t²
    N,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0)
    slot = tl.program_id(1).to(tl.int64)
    tiles, chunk = tl.num_programs(0), tl.num_programs(1)
    block_i, block_j = _triangle(tile)
    j = tl.arange(0, TILE)
    tiles_s = tiles_ptr + (slot * tiles + tile) * TILE * TILE
    tiles_t = tiles_s + chunk.to(tl.int64) * tiles * TILE * TILE
    # Rows of block i get this tile's sums in place j, and rows of block j theirs in place i.
    blocks = tl.cdiv(N, TILE)
    at_i = partial_ptr + (slot * blocks + block_j) * 3 * N
    product_j = tl.zeros((TILE,), tl.float32)
    square_s_j = tl.zeros((TILE,), tl.float32)
    square_t_j = tl.zeros((TILE,), tl.float32)
    for first in range(0, TILE, BLOCK):
        i = first + tl.arange(0, BLOCK)
        R_s = tl.load(tiles_s + i[:, None] * TILE + j[None, :])
        R_t = tl.load(tiles_t + i[:, None] * TILE + j[None, :])
        row = block_i * TILE + i
        product, square_s, square_t = R_s * R_t, R_s * R_s, R_t * R_t
        tl.store(at_i + row, tl.sum(product, axis=1), mask=row < N)
        tl.store(at_i + N + row, tl.sum(square_s, axis=1), mask=row < N)
        tl.store(at_i + 2 * N + row, tl.sum(square_t, axis=1), mask=row < N)
        product_j += tl.sum(product, axis=0)
        square_s_j += tl.sum(square_s, axis=0)
        square_t_j += tl.sum(square_t, axis=0)
    if block_i != block_j:
        row = block_j * TILE + j
        at_j = partial_ptr + (slot * blocks + block_i) * 3 * N + row
        tl.store(at_j, product_j, mask=row < N)
        tl.store(at_j + N, square_s_j, mask=row < N)
        tl.store(at_j + 2 * N, square_t_j, mask=row < N)


@triton.jit(do_not_specialize=["first_group", "groups", "N", "stride_group", "stride_n"])
def coefficients_kernel(
    sums_ptr,  # (chunk, 3, N): row sums of R̃_sR̃_t, R̃_s², R̃_t²
    offset_ptr,  # (2·chunk, 2, N)
    scale_ptr,  # of the student
    size_ptr,
    counts_ptr,
    mix_ptr,  # (chunk, 2): A = mix_t·R̃_t + mix_s·R̃_s
    coefficient_ptr,  # (chunk, 3, N): what multiplies A·s, s and x̂ of each row
    loss_ptr,  # (groups,)
    first_group,
    groups,
    N,
    stride_group,
    stride_n,
    weight,
    eps,
    HAS_MASK: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    group = first_group + slot
    size = tl.load(size_ptr + group)
    usable = size >= 2
    weight = weight / (tl.maximum(tl.load(counts_ptr), 1.0) if HAS_MASK else groups * 1.0)
    sums_ptr += slot * 3 * N
    covariance = tl.zeros((BLOCK_N,), tl.float64)
    square_s = tl.zeros((BLOCK_N,), tl.float64)
    square_t = tl.zeros((BLOCK_N,), tl.float64)
    for first in range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        covariance += tl.load(sums_ptr + n, mask=n < N, other=0.0).to(tl.float64)
        square_s += tl.load(sums_ptr + N + n, mask=n < N, other=0.0).to(tl.float64)
        square_t += tl.load(sums_ptr + 2 * N + n, mask=n < N, other=0.0).to(tl.float64)
    # In float64, as 1 − ρ cancels.
    cov = tl.sum(covariance, axis=0)
    sigma_s, sigma_t = tl.sqrt(tl.sum(square_s, axis=0)), tl.sqrt(tl.sum(square_t, axis=0))
    denominator = sigma_s * sigma_t + eps
    loss = ((denominator - cov) / denominator).to(tl.float32)
    tl.store(loss_ptr + group, tl.where(usable, weight * loss, 0.0))

    if GRADIENT:
        # A is b − ρa times about n: entries near 1, for float16.
        spread = tl.minimum(tl.maximum(size, 1), 16384).to(tl.float32)
        mix_t = tl.where(sigma_t > 0, spread / sigma_t, 0.0).to(tl.float32)
        mix_s = tl.where(sigma_s > 0, -spread / sigma_s * (cov / denominator), 0.0).to(tl.float32)
        factor = (-2 * sigma_t / denominator).to(tl.float32) * weight / spread
        factor = tl.where(usable, factor, 0.0)
        tl.store(mix_ptr + 2 * slot, mix_s)
        tl.store(mix_ptr + 2 * slot + 1, mix_t)
        offset_s = offset_ptr + 2 * slot * N
        offset_t = offset_ptr + 2 * (tl.num_programs(0) + slot) * N
        coefficient_ptr += slot * 3 * N
        for first in range(0, N, BLOCK_N):
            n = first + tl.arange(0, BLOCK_N)
            there = n < N
            row = group * stride_group + n.to(tl.int64) * stride_n
            scale = tl.load(scale_ptr + row, mask=there, other=0.0)
            short = scale >= LARGEST_SCALE
            u = tl.load(offset_s + n, mask=there, other=0.0)
            v = tl.load(offset_t + n, mask=there, other=0.0)
            own_s = tl.load(offset_s + N + n, mask=there, other=0.0)
            own_t = tl.load(offset_t + N + n, mask=there, other=0.0)
            product = tl.load(sums_ptr + n, mask=there, other=0.0)
            square = tl.load(sums_ptr + N + n, mask=there, other=0.0)
            row_sums = size * (mix_t * v + mix_s * u)
            without = row_sums - (mix_t * own_t + mix_s * own_s)  # less the diagonal
            parallel = mix_t * (product - own_s * own_t) + mix_s * (square - own_s * own_s)
            parallel = tl.where(short, -row_sums, parallel - own_s * without)
            row_sums = tl.where(short, row_sums, without)
            tl.store(coefficient_ptr + n, factor / OPERAND_SCALE, mask=there)
            tl.store(coefficient_ptr + N + n, factor * row_sums, mask=there)
            tl.store(coefficient_ptr + 2 * N + n, factor * parallel, mask=there)


@triton.jit(do_not_specialize=["first_group", "N", "stride_group", "stride_n"])
def difference_kernel(
    tiles_ptr,  # (2, chunk, tiles, TILE, TILE)
    mix_ptr,  # (chunk, 2)
    scale_ptr,  # of the student
    a_ptr,  # (parts, chunk, side, side): both triangles of A, side a multiple of TILE
    first_group,
    N,
    stride_group,
    stride_n,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    side = tl.cdiv(N, TILE) * TILE
    tile = tl.program_id(0)
    slot = tl.program_id(2).to(tl.int64)
    block_i, block_j = _triangle(tile)
    part = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = block_j * TILE + tl.arange(0, TILE)
    i = block_i * TILE + part
    cell = part[:, None] * TILE + tl.arange(0, TILE)[None, :]
    tiles, chunk = tl.num_programs(0), tl.num_programs(2).to(tl.int64)
    tiles_ptr += (slot * tiles + tile) * TILE * TILE
    R_s = tl.load(tiles_ptr + cell)
    R_t = tl.load(tiles_ptr + chunk * tiles * TILE * TILE + cell)
    A = tl.load(mix_ptr + 2 * slot) * R_s + tl.load(mix_ptr + 2 * slot + 1) * R_t
    row = (first_group + slot) * stride_group + i.to(tl.int64) * stride_n
    scale = tl.load(scale_ptr + row, mask=i < N, other=0.0)
    A = tl.where((i[:, None] == j[None, :]) & (scale < LARGEST_SCALE)[:, None], 0.0, A)
    a_ptr += slot * side * side
    i, j = i.to(tl.int64), j.to(tl.int64)
    low_parts = tl.num_programs(2).to(tl.int64) * side * side
    tl.store(a_ptr + i[:, None] * side + j[None, :], _high(A))
    if SPLIT:
        tl.store(a_ptr + low_parts + i[:, None] * side + j[None, :], _low(A))
    if block_i != block_j:
        mirrored = tl.trans(A)
        tl.store(a_ptr + j[:, None] * side + i[None, :], _high(mirrored))
        if SPLIT:
            tl.store(a_ptr + low_parts + j[:, None] * side + i[None, :], _low(mirrored))


@triton.jit(do_not_specialize=["first_group", "N", "stride_group", "stride_n", "accumulate"])
def gradient_kernel(
    a_ptr,  # (parts, chunk, side, side)
    centred_ptr,  # (parts, chunk, N, D)
    x_ptr,  # (groups, N, D)
    scale_ptr,
    coefficient_ptr,  # (chunk, 3, N)
    dx_ptr,  # (rows, D)
    first_group,
    N,
    D,
    stride_x_group,
    stride_x_n,
    stride_group,
    stride_n,
    accumulate,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    side = tl.cdiv(N, BLOCK_N) * BLOCK_N
    slot = tl.program_id(2).to(tl.int64)
    group = first_group + slot
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    k = tl.arange(0, BLOCK_K)
    centred_ptr += slot * N * D
    a_rows = a_ptr + slot * side * side + n.to(tl.int64)[:, None] * side + k[None, :]
    a_low = tl.num_programs(2).to(tl.int64) * side * side
    centred_low = tl.num_programs(2).to(tl.int64) * N * D
    inside_d = d < D
    dx = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for first in range(0, N, BLOCK_K):
        rows = first + k
        inside = (rows < N)[:, None] & inside_d[None, :]
        b_rows = centred_ptr + rows.to(tl.int64)[:, None] * D + d[None, :]
        a = tl.load(a_rows + first)
        b = tl.load(b_rows, mask=inside, other=0.0)
        dx = tl.dot(a, b, dx)
        if SPLIT:
            dx = tl.dot(tl.load(a_rows + a_low + first), b, dx)
            dx = tl.dot(a, tl.load(b_rows + centred_low, mask=inside, other=0.0), dx)

    there = n < N
    inside = there[:, None] & inside_d[None, :]
    row = group * stride_group + n.to(tl.int64) * stride_n
    scale = tl.load(scale_ptr + row, mask=there, other=0.0)
    valid = inside & (scale != 0)[:, None]
    start = group * stride_x_group + n.to(tl.int64) * stride_x_n
    unit = tl.load(x_ptr + start[:, None] + d[None, :], mask=valid, other=0.0).to(tl.float32)
    unit *= scale[:, None]
    own = centred_ptr + n.to(tl.int64)[:, None] * D + d[None, :]
    centred = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    if SPLIT:
        centred += tl.load(own + centred_low, mask=inside, other=0.0).to(tl.float32)
    centred /= OPERAND_SCALE
    coefficient_ptr += slot * 3 * N + n
    dx *= tl.load(coefficient_ptr, mask=there, other=0.0)[:, None]
    dx -= tl.load(coefficient_ptr + N, mask=there, other=0.0)[:, None] * centred
    dx -= tl.load(coefficient_ptr + 2 * N, mask=there, other=0.0)[:, None] * unit
    dx *= _derivative(scale, x_ptr.dtype.element_ty)[:, None]
    dx = tl.where(valid, dx, 0.0)
    dx_rows = dx_ptr + row[:, None] * D + d[None, :]
    dx += tl.load(dx_rows, mask=inside & (accumulate != 0), other=0.0).to(tl.float32)
    tl.store(dx_rows, dx, mask=inside)


@triton.jit(do_not_specialize=["numel"])
def scale_kernel(x_ptr, factor_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    """out = x · factor, in float32."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < numel, other=0.0).to(tl.float32)
    x *= tl.load(factor_ptr).to(tl.float32)
    tl.store(out_ptr + i, x, mask=i < numel)


class Blocks(NamedTuple):
    """Block sizes and launch options of one kernel."""

    n: int
    d: int
    num_warps: int
    num_stages: int


def small_blocks(
    N: int, dtype: torch.dtype, split: bool, gradient: bool, blackwell: bool
) -> Blocks:
    """Both relations of a group live in registers: 64 floats a thread each at N = 128.

    Blackwell, whose accumulators come out of tensor memory all at once, has no registers left
    for loads in flight, and split float32 without the gradient just too few.
    """
    n = max(16, triton.next_power_of_2(N))
    if n == 128:
        stages = 1 if blackwell or (split and not gradient) else 2
        return Blocks(n, 16 if dtype == torch.float32 else 32, 8, stages)
    stages = 1 if blackwell else 2
    return Blocks(n, 32 if split and n > 16 else 64, 4 if n <= 32 else 8, stages)


def is_blackwell(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10


def tile_blocks(split: bool) -> Blocks:
    """One accumulator of TILE × TILE, and twice the operands in flight where they are split."""
    return Blocks(TILE, 32 if split else 64, 8, 3)


def gradient_blocks(dtype: torch.dtype, split: bool) -> tuple[Blocks, int]:
    """One accumulator and in the end the rows; the last number is the block of the summed rows."""
    wide = gradient_dtype(dtype) == torch.float32
    return Blocks(TILE, 64 if wide else 128, 8, 3), 32 if split else 64


def splits(dtype: torch.dtype) -> bool:
    """float32 in two float16 parts, unless torch.set_float32_matmul_precision asks for less."""
    return dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"


def layer_groups(students: list[Tensor], teachers: list[Tensor]) -> list[list[int]]:
    """Layers that share a launch: equal shapes and dtype, at most LAYERS_PER_LAUNCH."""
    groups: list[tuple[Any, list[int]]] = []
    for i, (student, teacher) in enumerate(zip(students, teachers, strict=True)):
        kind = student.shape, teacher.shape, student.dtype  # sizes in a graph have no hash
        for other, indices in groups:
            if kind == other and len(indices) < LAYERS_PER_LAUNCH:
                indices.append(i)
                break
        else:
            groups.append((kind, [i]))
    return [indices for _, indices in groups]


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the gradient before the upstream one is known: float16 would underflow."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _relations_shapes(students, teachers, mask, tokens, samples, eps, gradient):
    loss = students[0].new_empty((), dtype=torch.float32)
    buffers = []
    for indices in layer_groups(students, teachers) if gradient else []:
        first = students[indices[0]]
        shape = len(indices), *first.shape
        buffers.append(first.new_empty(shape, dtype=gradient_dtype(first.dtype)))
    return [loss, *buffers]


@operator(_relations_shapes)
def relations(
    students: list[Tensor],
    teachers: list[Tensor],
    mask: Tensor | None,
    tokens: float,
    samples: float,
    eps: float,
    gradient: bool,
) -> list[Tensor]:
    """tokens · loss over tokens + samples · loss over samples, averaged over the layers.

    Returns the loss and, with ``gradient``, one (layers, B, N, Ds) buffer of gradients for each
    of `layer_groups`, for an upstream gradient of 1.
    """
    B, N, _ = students[0].shape
    device = students[0].device
    terms = [
        (over, weight / len(students))
        for over, weight, groups, members in (
            ("tokens", tokens, B, N),
            ("samples", samples, N, B),
        )
        if weight != 0 and groups > 0 and members >= 2
    ]
    per_layer = sum(B if over == "tokens" else N for over, _ in terms)
    partial = torch.empty(len(students) * per_layer, dtype=torch.float32, device=device)
    buffers = []
    counts = None
    if mask is not None:
        mask = mask.contiguous().view(torch.uint8)
        if terms:
            counts = torch.empty(2, dtype=torch.float32, device=device)
            count_groups_kernel[(2,)](mask, counts, B, N, BLOCK_G=32, BLOCK_N=128, num_warps=8)
    done = 0
    for indices in layer_groups(students, teachers):
        layers = _Layers([students[i] for i in indices], [teachers[i] for i in indices], mask)
        if gradient:
            allocate = torch.empty if terms else torch.zeros
            layers.dx = allocate(
                (len(indices), *layers.students[0].shape),
                dtype=gradient_dtype(layers.dtype),
                device=device,
            )
        for term, (over, weight) in enumerate(terms):
            groups = B if over == "tokens" else N
            losses = partial[done : done + len(indices) * groups]
            done += len(indices) * groups
            _launch_term(layers, over, weight, counts, eps, losses, accumulate=term > 0)
        if layers.dx is not None:
            D = students[indices[0]].shape[-1]
            buffers.append(layers.dx[..., :D].contiguous())  # itself, if without padding
    return [partial.sum(), *buffers]


class _Layers:
    """Layers of one launch: their features, row scales and gradients."""

    def __init__(self, students: list[Tensor], teachers: list[Tensor], mask: Tensor | None):
        self.students, self.teachers = _same_layout(students), _same_layout(teachers)
        self.masked = mask is not None
        self.B, self.N, self.Ds = self.students[0].shape
        self.Dt = self.teachers[0].shape[-1]
        self.rows = self.B * self.N
        self.dtype = students[0].dtype
        self.split = splits(self.dtype)
        self.dx: Tensor | None = None
        self.scale = torch.empty(
            (len(students), 2, self.rows), dtype=torch.float32, device=students[0].device
        )
        if self.rows == 0:
            return
        block_r, block_d = 16, 128
        row_scale_kernel[(triton.cdiv(self.rows, block_r), len(students), 2)](
            padded(self.students),
            padded(self.teachers),
            mask,
            self.scale,
            self.rows,
            self.N,
            self.Ds,
            self.Dt,
            *self.students[0].stride()[:2],
            *self.teachers[0].stride()[:2],
            SLOTS=slots(len(students)),
            HAS_MASK=self.masked,
            BLOCK_R=block_r,
            BLOCK_D=block_d,
            num_warps=8,
        )


def _same_layout(layers: list[Tensor]) -> list[Tensor]:
    """Equal strides, all sizes multiples of ALIGNMENT; copies only where that isn't so already.

    Features of other sizes are padded with zeros, which change no relation: an address for every
    element would take more registers than a thread has left.
    """
    first = layers[0]
    sizes = first.shape[-1], *first.stride()[:2], *(x.data_ptr() for x in layers)
    alike = first.stride(-1) == 1 and all(x.stride() == first.stride() for x in layers)
    if alike and not any(size % ALIGNMENT for size in sizes):
        return layers
    missing = -first.shape[-1] % ALIGNMENT
    return [torch.nn.functional.pad(x, (0, missing)).contiguous() for x in layers]


def _launch_term(
    layers: _Layers,
    over: str,
    weight: float,
    counts: Tensor | None,
    eps: float,
    losses: Tensor,
    accumulate: bool,
) -> None:
    """One kind of relation on all layers of a launch."""
    s, t = layers.students[0], layers.teachers[0]
    if over == "tokens":
        groups, N, order, index = layers.B, layers.N, (0, 1), 0
        strides = (layers.N, 1)
    else:
        groups, N, order, index = layers.N, layers.B, (1, 0), 1
        strides = (1, layers.N)
    term = _Term(
        groups,
        N,
        [s.stride(i) for i in order],
        [t.stride(i) for i in order],
        strides,
        weight,
        None if counts is None else counts[index:],
        eps,
        accumulate,
    )
    if N > SMALL_GROUP:
        for layer in range(len(layers.students)):
            _launch_long(layers, term, layer, losses[layer * groups :])
        return
    gradient = layers.dx is not None
    blocks = small_blocks(N, layers.dtype, layers.split, gradient, is_blackwell(s.device))
    small_groups_kernel[(groups, len(layers.students))](
        padded(layers.students),
        padded(layers.teachers),
        layers.scale,
        term.counts,
        layers.dx,
        losses,
        N,
        layers.Ds,
        layers.Dt,
        layers.rows,
        *term.strides_s,
        *term.strides_t,
        *term.strides,
        weight if counts is not None else weight / groups,
        eps,
        int(accumulate),
        SLOTS=slots(len(layers.students)),
        HAS_MASK=layers.masked,
        GRADIENT=gradient,
        SPLIT=layers.split,
        BLOCK_N=blocks.n,
        BLOCK_D=blocks.d,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


class _Term(NamedTuple):
    """One kind of relation: its groups and how to step through them."""

    groups: int
    N: int
    strides_s: list[int]  # from group to group and from row to row
    strides_t: list[int]
    strides: tuple[int, int]  # the same in the (B, N) arrays
    weight: float
    counts: Tensor | None
    eps: float
    accumulate: bool


def _launch_long(layers: _Layers, term: _Term, layer: int, losses: Tensor) -> None:
    """Relations of more than SMALL_GROUP rows, a chunk of groups at a time."""
    N, groups = term.N, term.groups
    student, teacher = layers.students[layer], layers.teachers[layer]
    scale = layers.scale[layer]  # (2, rows)
    dx = None if layers.dx is None else layers.dx[layer]
    gradient = dx is not None
    blocks_n = triton.cdiv(N, TILE)
    tiles, side = blocks_n * (blocks_n + 1) // 2, blocks_n * TILE
    chunk = min(groups, max(1, CHUNK_ENTRIES // (side * side)))

    def workspace(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=student.device)

    parts = 2 if layers.split else 1
    size = workspace(2, groups, dtype=torch.int32)
    means = [workspace(groups, layers.Ds), workspace(groups, layers.Dt)]
    both = (
        (student, layers.Ds, term.strides_s, scale[0], means[0], size[0]),
        (teacher, layers.Dt, term.strides_t, scale[1], means[1], size[1]),
    )
    for x, D, strides_x, row_scale, mean, count in both:
        mean_kernel[(groups, triton.cdiv(D, 64))](
            x, row_scale, mean, count, N, D, *strides_x, *term.strides,
            BLOCK_N=64, BLOCK_D=64, num_warps=4,
        )  # fmt: skip

    centred = [workspace(parts, chunk, N, D, dtype=torch.float16) for D in (layers.Ds, layers.Dt)]
    offsets = workspace(2, chunk, 2, N)
    partial = workspace(chunk, blocks_n, 3, N)
    packed = workspace(2, chunk, tiles, TILE, TILE)
    a = workspace(parts, chunk, side, side, dtype=torch.float16) if gradient else None
    mix, coefficients = workspace(chunk, 2), workspace(chunk, 3, N)
    tile, (block, block_k) = tile_blocks(layers.split), gradient_blocks(layers.dtype, layers.split)
    for first in range(0, groups, chunk):
        here = min(chunk, groups - first)
        offset = offsets.view(-1)[: 2 * here * 2 * N].view(2, here, 2, N)
        for (x, D, strides_x, row_scale, mean, count), rows, h in zip(
            both, centred, offset, strict=True
        ):
            centre_kernel[(triton.cdiv(N, 32), here)](
                x, row_scale, mean, count, rows, h, first, N, D, *strides_x, *term.strides,
                SPLIT=layers.split, BLOCK_N=32, BLOCK_D=128, num_warps=8,
            )  # fmt: skip
        centre_offsets_kernel[(here, 2)](
            offset, scale, size, first, N, layers.rows, groups, *term.strides,
            BLOCK_N=1024, num_warps=4,
        )  # fmt: skip
        relation_tiles_kernel[(tiles, here, 2)](
            *centred, offset, scale, size, packed,
            first, N, layers.Ds, layers.Dt, *term.strides,
            SPLIT=layers.split, TILE=TILE, BLOCK_D=tile.d,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        sums_kernel[(tiles, here)](packed, partial, N, TILE=TILE, BLOCK=32, num_warps=4)
        sums = partial[:here].sum(1)  # (here, 3, N)
        coefficients_kernel[(here,)](
            sums, offset, scale, size, term.counts, mix, coefficients, losses,
            first, groups, N, *term.strides, term.weight, term.eps,
            HAS_MASK=layers.masked, GRADIENT=gradient,
            BLOCK_N=1024, num_warps=4,
        )  # fmt: skip
        if not gradient:
            continue
        difference_kernel[(tiles, TILE // 32, here)](
            packed, mix, scale, a, first, N, *term.strides,
            SPLIT=layers.split, TILE=TILE, BLOCK=32, num_warps=4,
        )  # fmt: skip
        gradient_kernel[(side // block.n, triton.cdiv(layers.Ds, block.d), here)](
            a, centred[0], student, scale, coefficients, dx,
            first, N, layers.Ds, *term.strides_s, *term.strides, int(term.accumulate),
            SPLIT=layers.split,
            BLOCK_N=block.n, BLOCK_D=block.d, BLOCK_K=block_k,
            num_warps=block.num_warps, num_stages=block.num_stages,
        )  # fmt: skip


def _scaled_shapes(x, factor, dtype):
    return torch.empty_like(x, dtype=dtype)


@operator(_scaled_shapes)
def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x · factor for a scalar tensor, computed in float32."""
    out = torch.empty_like(x, dtype=dtype)
    if x.numel():
        scale_kernel[(triton.cdiv(x.numel(), 4096),)](
            x, factor, out, x.numel(), BLOCK=4096, num_warps=8
        )
    return out
