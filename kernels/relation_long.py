"""Relations of groups of more than 128 rows, one chunk of groups at a time.

Centred rows (`relation_centre_kernel`), lower-triangle tiles of both relations and their sums
(`relation_tiles_kernel`), A (`relation_difference_kernel`), then one product with the centred rows
(`relation_gradient_kernel`).
"""

import functools

import torch
import triton
import triton.language as tl

from fastkd._core.operator import launch_kernel
from fastkd.kernels import launch
from fastkd.kernels.halves import halves
from fastkd.kernels.launch import cdiv
from fastkd.kernels.relation_rows import (
    LARGEST_SCALE,
    OPERAND_SCALE,
    Layers,
    Term,
    centring_offset,
    derivative_scale,
    gradient_dtype,
    high_part,
    load_rows,
    low_part,
)

CENTRE_ROWS = 4  # of a program that centres rows: enough programs for all multiprocessors
TILE = 128  # rows and columns of a tile of a long relation
# Largest number of relation entries computed at once; bounds the workspace of long groups.
CHUNK_ENTRIES = 2**24


@triton.jit(do_not_specialize=["N", "stride_group", "stride_n"])
def relation_mean_kernel(
    x_ptr,  # (rows, D)
    scale_ptr,  # rows
    mean_ptr,  # (groups, D): mean of the unit rows
    size_ptr,  # (groups,): real rows
    N,
    D,
    stride_group,
    stride_n,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    totals = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)  # added up across rows after the loop
    size = tl.zeros((BLOCK_N,), tl.int32)
    for first in range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N).to(tl.int64)
        row = group * stride_group + n * stride_n
        scale = tl.load(scale_ptr + row, mask=n < N, other=0.0)
        totals += load_rows(x_ptr, row, scale != 0, d, D) * scale[:, None]
        size += (scale != 0).to(tl.int32)
    total, count = tl.sum(totals, axis=0), tl.sum(size, axis=0)
    tl.store(
        mean_ptr + group * D + d, tl.div_rn(total, tl.maximum(count, 1).to(tl.float32)), mask=d < D
    )
    if tl.program_id(1) == 0:
        tl.store(size_ptr + group, count)


@triton.jit(do_not_specialize=["first_group", "first_slot", "N", "stride_group", "stride_n"])
def relation_centre_kernel(
    x_ptr,  # (rows, D)
    scale_ptr,
    mean_ptr,
    size_ptr,
    centred_ptr,  # (parts, chunk, N, D): high parts, then with SPLIT low ones
    offset_ptr,  # from first_slot on (chunk, 2, N): h, then |s_i|²
    first_group,
    first_slot,
    N,
    D,
    stride_group,
    stride_n,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    slot = tl.program_id(1).to(tl.int64)
    group = first_group + slot
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = group * stride_group + n * stride_n
    scale = tl.load(scale_ptr + row, mask=n < N, other=0.0)
    valid = (scale != 0) & (tl.load(size_ptr + group) >= 2)
    along = tl.zeros((BLOCK_N,), tl.float32)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    length = 0.0
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        x = load_rows(x_ptr, row, valid, d, D)
        mean = tl.load(mean_ptr + group * D + d, mask=d < D, other=0.0)
        centred = tl.where(valid[:, None], x * scale[:, None] - mean[None, :], 0.0)
        along += tl.sum(centred * mean[None, :], axis=1)
        squares += tl.sum(centred * centred, axis=1)
        length += tl.sum(mean * mean, axis=0)
        centred *= OPERAND_SCALE
        target = centred_ptr + (slot * N + n)[:, None] * D + d[None, :]
        inside = (n < N)[:, None] & (d < D)[None, :]
        tl.store(target, high_part(centred), mask=inside)
        if SPLIT:
            tl.store(target + tl.num_programs(1) * N * D, low_part(centred), mask=inside)
    h = centring_offset(along, squares, length, scale, valid)
    offset_ptr += 2 * (first_slot + slot) * N
    tl.store(offset_ptr + n, h, mask=n < N)
    tl.store(offset_ptr + N + n, squares, mask=n < N)


@triton.jit(do_not_specialize=["first_group", "N", "stride_side", "stride_group", "stride_n"])
def relation_offsets_kernel(
    offset_ptr,  # (2·chunk, 2, N): h and |s_i|² become u and R̃_ii
    scale_ptr,  # of this layer: (2, stride_side)
    size_ptr,
    first_group,
    N,
    stride_side,
    stride_group,
    stride_n,
    BLOCK_N: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    side = tl.program_id(1).to(tl.int64)
    group = first_group + slot
    offset_ptr += 2 * (side * tl.num_programs(0) + slot) * N
    size = tl.load(size_ptr + group)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        total += tl.load(offset_ptr + n, mask=n < N, other=0.0)
    mean = tl.sum(total, axis=0) / tl.maximum(size, 1)
    for first in range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        row = side * stride_side + group * stride_group + n.to(tl.int64) * stride_n
        scale = tl.load(scale_ptr + row, mask=n < N, other=0.0)
        u = tl.load(offset_ptr + n, mask=n < N, other=0.0) - mean
        u = tl.where((scale != 0) & (size >= 2), u, 0.0)
        diagonal = tl.load(offset_ptr + N + n, mask=n < N, other=0.0) + 2 * u
        tl.store(offset_ptr + n, u, mask=n < N)
        tl.store(offset_ptr + N + n, diagonal, mask=n < N)


@triton.jit
def _triangle(tile):
    """Row and column (i, j), j ≤ i, of a tile of a lower triangle, counted row by row."""
    i = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    return i, tile - i * (i + 1) // 2


@triton.jit
def _products(
    centred_ptr,  # (N, D)
    i,
    j,
    N,
    D,
    low_parts,  # offset of the low parts
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Products of the centred rows i and j (TILE, TILE)."""
    R = tl.zeros((TILE, TILE), tl.float32)
    rows_i = centred_ptr + i.to(tl.int64)[:, None] * D
    rows_j = centred_ptr + j.to(tl.int64)[:, None] * D
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
    return R


@triton.jit
def _relation(products, offset_ptr, i, j, valid, N):
    """R̃ of a tile from its products, 0 at padding."""
    u_i = tl.load(offset_ptr + i, mask=i < N, other=0.0)
    u_j = tl.load(offset_ptr + j, mask=j < N, other=0.0)
    own = tl.load(offset_ptr + N + i, mask=i < N, other=0.0)
    R = products / (OPERAND_SCALE * OPERAND_SCALE) + u_i[:, None] + u_j[None, :]
    R = tl.where(i[:, None] == j[None, :], own[:, None], R)
    return tl.where(valid, R, 0.0)


@triton.jit(do_not_specialize=["first_group", "N", "stride_group", "stride_n"])
def relation_tiles_kernel(
    centred_s_ptr,  # (parts, chunk, N, Ds)
    centred_t_ptr,  # (parts, chunk, N, Dt)
    offset_ptr,  # (2, chunk, 2, N)
    scale_ptr,
    size_ptr,
    tiles_ptr,  # (2, chunk, tiles, TILE, TILE): R̃_s, R̃_t, lower triangle of tiles
    partial_ptr,  # (chunk, 3, tiles): sums of R̃_sR̃_t, R̃_s², R̃_t², in float64 as 1 − ρ cancels
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
    tiles, chunk = tl.num_programs(0), tl.num_programs(1).to(tl.int64)
    block_i, block_j = _triangle(tile)
    i = block_i * TILE + tl.arange(0, TILE)
    j = block_j * TILE + tl.arange(0, TILE)
    group = first_group + slot
    usable = tl.load(size_ptr + group) >= 2
    scale_ptr += group * stride_group
    scale_i = tl.load(scale_ptr + i.to(tl.int64) * stride_n, mask=i < N, other=0.0)
    scale_j = tl.load(scale_ptr + j.to(tl.int64) * stride_n, mask=j < N, other=0.0)
    valid = ((scale_i != 0) & usable)[:, None] & (scale_j != 0)[None, :]
    cell = tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    tiles_s = tiles_ptr + (slot * tiles + tile) * TILE * TILE + cell
    tiles_t = tiles_s + chunk * tiles * TILE * TILE

    R_t = _products(
        centred_t_ptr + slot * N * Dt, i, j, N, Dt, chunk * N * Dt, SPLIT, TILE, BLOCK_D
    )
    R_t = _relation(R_t, offset_ptr + 2 * (chunk + slot) * N, i, j, valid, N)
    tl.store(tiles_t, R_t)
    R_s = _products(
        centred_s_ptr + slot * N * Ds, i, j, N, Ds, chunk * N * Ds, SPLIT, TILE, BLOCK_D
    )
    R_s = _relation(R_s, offset_ptr + 2 * slot * N, i, j, valid, N)
    tl.store(tiles_s, R_s)
    tl.debug_barrier()  # a thread reads what others stored
    R_s, R_t = tl.load(tiles_s), tl.load(tiles_t)

    times = tl.where(block_i == block_j, 1.0, 2.0)  # 2 counts the upper triangle, too
    partial_ptr += slot * 3 * tiles + tile
    covariance = tl.sum(R_s * R_t, axis=1).to(tl.float64)
    tl.store(partial_ptr, times * tl.sum(covariance, axis=0))
    square_s = tl.sum(R_s * R_s, axis=1).to(tl.float64)
    tl.store(partial_ptr + tiles, times * tl.sum(square_s, axis=0))
    square_t = tl.sum(R_t * R_t, axis=1).to(tl.float64)
    tl.store(partial_ptr + 2 * tiles, times * tl.sum(square_t, axis=0))


@triton.jit(
    do_not_specialize=[
        "first_group",
        "first_loss",
        "groups",
        "N",
        "tiles",
        "stride_group",
        "stride_n",
    ]
)
def relation_coefficients_kernel(
    partial_ptr,  # (chunk, 3, tiles): sums of R̃_sR̃_t, R̃_s², R̃_t²
    offset_ptr,  # (2·chunk, 2, N)
    scale_ptr,  # of the student
    size_ptr,
    shares_ptr,  # (groups,)
    mix_ptr,  # (chunk, 2): A = mix_t·R̃_t + mix_s·R̃_s
    coefficient_ptr,  # (chunk, 2, N): what multiplies A·s and s of each row
    loss_ptr,  # from first_loss on (groups,)
    first_group,
    first_loss,
    groups,
    N,
    tiles,
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
    weight *= tl.load(shares_ptr + group) if HAS_MASK else tl.div_rn(1.0, groups * 1.0)
    partial_ptr += slot * 3 * tiles
    covariance = tl.zeros((BLOCK_N,), tl.float64)
    square_s = tl.zeros((BLOCK_N,), tl.float64)
    square_t = tl.zeros((BLOCK_N,), tl.float64)
    for first in range(0, tiles, BLOCK_N):
        tile = first + tl.arange(0, BLOCK_N)
        inside = tile < tiles
        covariance += tl.load(partial_ptr + tile, mask=inside, other=0.0)
        square_s += tl.load(partial_ptr + tiles + tile, mask=inside, other=0.0)
        square_t += tl.load(partial_ptr + 2 * tiles + tile, mask=inside, other=0.0)
    cov = tl.sum(covariance, axis=0)
    sigma_s, sigma_t = tl.sqrt(tl.sum(square_s, axis=0)), tl.sqrt(tl.sum(square_t, axis=0))
    denominator = sigma_s * sigma_t + eps
    loss = ((denominator - cov) / denominator).to(tl.float32)
    tl.store(loss_ptr + first_loss + group, tl.where(usable, weight * loss, 0.0))

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
        coefficient_ptr += slot * 2 * N
        for first in range(0, N, BLOCK_N):
            n = first + tl.arange(0, BLOCK_N)
            in_group = n < N
            row = group * stride_group + n.to(tl.int64) * stride_n
            scale = tl.load(scale_ptr + row, mask=in_group, other=0.0)
            short = scale >= LARGEST_SCALE
            u = tl.load(offset_s + n, mask=in_group, other=0.0)
            v = tl.load(offset_t + n, mask=in_group, other=0.0)
            own_s = tl.load(offset_s + N + n, mask=in_group, other=0.0)
            own_t = tl.load(offset_t + N + n, mask=in_group, other=0.0)
            row_sums = size * (mix_t * v + mix_s * u)
            own = tl.where(short, 0.0, mix_t * own_t + mix_s * own_s)  # A's diagonal
            tl.store(coefficient_ptr + n, factor / OPERAND_SCALE, mask=in_group)
            tl.store(coefficient_ptr + N + n, factor * (row_sums - own), mask=in_group)


@triton.jit(do_not_specialize=["first_group", "N", "stride_group", "stride_n"])
def relation_difference_kernel(
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
    tl.store(a_ptr + i[:, None] * side + j[None, :], high_part(A))
    if SPLIT:
        tl.store(a_ptr + low_parts + i[:, None] * side + j[None, :], low_part(A))
    if block_i != block_j:
        mirrored = tl.trans(A)
        tl.store(a_ptr + j[:, None] * side + i[None, :], high_part(mirrored))
        if SPLIT:
            tl.store(a_ptr + low_parts + j[:, None] * side + i[None, :], low_part(mirrored))


@triton.jit(do_not_specialize=["first_group", "N", "stride_group", "stride_n", "accumulate"])
def relation_gradient_kernel(
    a_ptr,  # (parts, chunk, side, side)
    centred_ptr,  # (parts, chunk, N, D)
    mean_ptr,  # (groups, D)
    scale_ptr,
    coefficient_ptr,  # (chunk, 2, N)
    dx_ptr,  # (rows, D)
    first_group,
    N,
    D,
    stride_group,
    stride_n,
    accumulate,  # whether to add to dx, before P_i
    HALF: tl.constexpr,
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

    in_group = n < N
    row = group * stride_group + n.to(tl.int64) * stride_n
    scale = tl.load(scale_ptr + row, mask=in_group, other=0.0)
    coefficient_ptr += slot * 2 * N + n
    of_product = tl.load(coefficient_ptr, mask=in_group, other=0.0)
    of_row = tl.load(coefficient_ptr + N, mask=in_group, other=0.0)
    # One quarter of the columns after the other: their rows need registers, too.
    left, right = halves(dx)
    parts = halves(left) + halves(right)
    quarter: tl.constexpr = BLOCK_D // 4
    for part in tl.static_range(4):
        d = tl.program_id(1) * BLOCK_D + part * quarter + tl.arange(0, quarter)
        inside = in_group[:, None] & (d < D)[None, :]
        own = centred_ptr + n.to(tl.int64)[:, None] * D + d[None, :]
        centred = tl.load(own, mask=inside, other=0.0).to(tl.float32)
        if SPLIT:
            centred += tl.load(own + centred_low, mask=inside, other=0.0).to(tl.float32)
        centred /= OPERAND_SCALE
        mean = tl.load(mean_ptr + group * D + d, mask=d < D, other=0.0)
        centred = tl.where((scale >= LARGEST_SCALE)[:, None], -mean[None, :], centred)
        dx = parts[part] * of_product[:, None] - of_row[:, None] * centred
        dx *= derivative_scale(scale, HALF)[:, None]
        dx = tl.where(inside & (scale != 0)[:, None], dx, 0.0)
        dx_rows = dx_ptr + row[:, None] * D + d[None, :]
        dx += tl.load(dx_rows, mask=inside & (accumulate != 0), other=0.0).to(tl.float32)
        tl.store(dx_rows, dx, mask=inside)


def launch_long(layers: Layers, term: Term, add: bool) -> None:
    """Compute the relations layer by layer, with as many groups at a time as the workspace holds.

    With ``add`` the gradient is added to the stored one.
    """
    N, split, losses, dx = term.N, layers.split, layers.losses, layers.dx
    blocks, parts = cdiv(N, TILE), 2 if split else 1
    tiles, side = blocks * (blocks + 1) // 2, blocks * TILE
    chunk = min(term.groups, max(1, CHUNK_ENTRIES // (side * side)))
    new = functools.partial(losses.new_empty, dtype=torch.float32)
    half = functools.partial(losses.new_empty, dtype=torch.float16)
    sizes = losses.new_empty(term.groups, dtype=torch.int32)  # real rows of each group
    means = [new(term.groups, D) for D in (layers.Ds, layers.Dt)]
    centred = [half(parts, chunk, N, D) for D in (layers.Ds, layers.Dt)]
    offsets = new(2, chunk, 2, N)  # of student and teacher: u and R̃_ii of each row
    relations, mix, coefficients = new(2, chunk, tiles, TILE, TILE), new(chunk, 2), new(chunk, 2, N)
    partial = losses.new_empty(chunk, 3, tiles, dtype=torch.float64)
    a = None if dx is None else half(parts, chunk, side, side)
    # Split operands need twice the memory in flight, and on an A100 (8) more registers.
    few = split and launch.capability(losses.device) == 8
    tile_d = 16 if few else 32 if split else 64
    wide = gradient_dtype(layers.dtype) == torch.float32
    block_d = 64 if wide else 128  # the rows are read at the end
    for layer in range(len(layers.students)):
        scale = layers.scale[layer]
        pair = layers.students[layer], layers.teachers[layer]
        for x, of_side, mean in zip(pair, scale, means, strict=True):
            D = x.shape[-1]
            launch_kernel(relation_mean_kernel, (term.groups, cdiv(D, 64)),
                x, of_side, mean, sizes, N, D, *term.strides,
                BLOCK_N=64, BLOCK_D=64, num_warps=4,
            )  # fmt: skip
        for first in range(0, term.groups, chunk):
            groups = min(chunk, term.groups - first)
            for i, x in enumerate(pair):
                launch_kernel(relation_centre_kernel, (cdiv(N, CENTRE_ROWS), groups),
                    x, scale[i], means[i], sizes, centred[i], offsets,
                    first, i * groups, N, x.shape[-1], *term.strides,
                    SPLIT=split, BLOCK_N=CENTRE_ROWS, BLOCK_D=512, num_warps=4,
                )  # fmt: skip
            launch_kernel(relation_offsets_kernel, (groups, 2),
                offsets, scale, sizes, first, N, layers.stride_side, *term.strides,
                BLOCK_N=1024, num_warps=4,
            )  # fmt: skip
            launch_kernel(relation_tiles_kernel, (tiles, groups),
                *centred, offsets, scale, sizes, relations, partial,
                first, N, layers.Ds, layers.Dt, *term.strides,
                SPLIT=split, TILE=TILE, BLOCK_D=tile_d, num_warps=8, num_stages=4,
            )  # fmt: skip
            launch_kernel(relation_coefficients_kernel, (groups,),
                partial, offsets, scale, sizes, term.shares,
                mix, coefficients, losses, first, term.first_loss + layer * term.groups,
                term.groups, N, tiles, *term.strides, term.weight, layers.eps,
                HAS_MASK=layers.masked, GRADIENT=dx is not None,
                BLOCK_N=1024, num_warps=8,
            )  # fmt: skip
            if dx is None:
                continue
            launch_kernel(relation_difference_kernel, (tiles, TILE // 32, groups),
                relations, mix, scale, a, first, N, *term.strides,
                SPLIT=split, TILE=TILE, BLOCK=32, num_warps=4,
            )  # fmt: skip
            launch_kernel(relation_gradient_kernel, (blocks, cdiv(layers.Ds, block_d), groups),
                a, centred[0], means[0], scale, coefficients, dx[layer],
                first, N, layers.Ds, *term.strides, int(add),
                HALF=layers.dtype == torch.float16, SPLIT=split,
                BLOCK_N=TILE, BLOCK_D=block_d, BLOCK_K=32 if split else 64,
                num_warps=8, num_stages=3,
            )  # fmt: skip
