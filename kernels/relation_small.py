"""Relations of up to 128 rows: one program per group and layer, with both relations in registers.

It reads student and teacher over D, keeps R̃_s and R̃_t, and reads the student again for the
gradient. The term over tokens writes the gradient, the term over samples adds to it.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd.kernels import launch
from fastkd.kernels.launch import next_power_of_2
from fastkd.kernels.pointers import pick
from fastkd.kernels.relation_rows import (
    LARGEST_SCALE,
    OPERAND_SCALE,
    Layers,
    Term,
    centring_offset,
    derivative_scale,
    high_part,
    low_part,
)
from fastkd.kernels.rounding import rounded

SMALL_GROUP = 128  # largest group whose relations both fit into registers


@triton.jit
def _centred_tile(x_ptr, start, scale, valid, share, d, D):
    """Mean of the unit rows, and the centred rows, of one block of features."""
    x = tl.load(
        x_ptr + start[:, None] + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0
    ).to(tl.float32)
    unit = rounded(x * scale[:, None])  # (BLOCK_N, BLOCK_D)
    mean = rounded(tl.sum(unit, axis=0) * share)  # (BLOCK_D,)
    return mean, tl.where(valid[:, None], unit - mean[None, :], 0.0)


@triton.jit
def _centred_relation(
    x_ptr,
    start,
    scale,
    valid,
    share,
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
        mean, centred = _centred_tile(x_ptr, start, scale, valid, share, d, D)
        # Equal rows have no relation: their centred rows are only the mean's rounding error.
        # Selecting the remainder spills nothing; selecting the difference spills 8 bytes.
        rest = tl.sum(centred, axis=0) * share
        mean += rest
        centred -= tl.where(valid[:, None], rest[None, :], 0.0)
        along += tl.sum(centred * mean[None, :], axis=1)
        squares += tl.sum(centred * centred, axis=1)
        length += tl.sum(mean * mean, axis=0)
        centred *= OPERAND_SCALE
        high = high_part(centred)
        R = tl.dot(high, tl.trans(high), R)
        if SPLIT:
            low = low_part(centred)
            R = tl.dot(high, tl.trans(low), R)
            R = tl.dot(low, tl.trans(high), R)
    h = centring_offset(along, squares, length, scale, valid)
    u = tl.where(valid, h - tl.sum(h, axis=0) * share, 0.0)
    diagonal = squares + 2 * u
    n = tl.arange(0, BLOCK_N)
    R = R / (OPERAND_SCALE * OPERAND_SCALE) + u[:, None] + u[None, :]
    R = tl.where(n[:, None] == n[None, :], diagonal[:, None], R)
    return tl.where(valid[:, None] & valid[None, :], R, 0.0), diagonal


@triton.jit(
    do_not_specialize=[
        "N",
        "rows",
        "stride_share",
        "stride_side",
        "stride_group",
        "stride_n",
        "first_loss",
        "accumulate",
    ]
)
def relation_small_groups_kernel(
    s_ptrs,  # layers of (groups, N, Ds)
    t_ptrs,  # layers of (groups, N, Dt)
    scale_ptr,  # (layers, 2, stride_side)
    shares_ptr,  # (groups,): the groups' shares in the average, times their weights
    stride_share,  # 0 if all groups have the same
    dx_ptr,  # (layers, rows, Ds)
    loss_ptr,  # from first_loss on (layers, groups): weighted losses
    N,
    Ds,
    Dt,
    rows,
    stride_s_group,
    stride_s_n,
    stride_t_group,
    stride_t_n,
    stride_side,
    stride_group,  # of rows in scale and dx
    stride_n,
    first_loss,
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
    in_group = n < N
    row = group * stride_group + n.to(tl.int64) * stride_n
    scale_ptr += 2 * layer * stride_side
    scale_s = tl.load(scale_ptr + row, mask=in_group, other=0.0)
    scale_t = tl.load(scale_ptr + stride_side + row, mask=in_group, other=0.0)
    real = tl.sum((scale_s != 0).to(tl.int32), axis=0)
    valid = (scale_s != 0) & (real >= 2)
    count = tl.maximum(real, 1).to(tl.float32)
    share = tl.div_rn(1.0, count)

    start_t = group * stride_t_group + n.to(tl.int64) * stride_t_n
    R_t, own_t = _centred_relation(
        t_ptr, start_t, scale_t, valid, share, Dt, SPLIT, BLOCK_N, BLOCK_D
    )
    # a = R̃_s/σ_s and b = R̃_t/σ_t, both times n: entries near 1.
    sigma_t = tl.sqrt(tl.sum(R_t * R_t))
    scale_b = tl.where(sigma_t > 0, count / sigma_t, 0.0)
    b = rounded(R_t * scale_b)
    sum_b = tl.sum(b, axis=1)
    if not SPLIT:  # halves the registers while the student's relation is computed
        b = b.to(tl.float16)
    start_s = group * stride_s_group + n.to(tl.int64) * stride_s_n
    R_s, own_s = _centred_relation(
        s_ptr, start_s, scale_s, valid, share, Ds, SPLIT, BLOCK_N, BLOCK_D
    )
    sigma_s = tl.sqrt(tl.sum(R_s * R_s))
    scale_a = tl.where(sigma_s > 0, count / sigma_s, 0.0)
    a = rounded(R_s * scale_a)

    # 1 − cov/(σ_sσ_t + eps) from the difference b − a: no cancellation.
    denominator = sigma_s * sigma_t + eps
    difference = b.to(tl.float32) - a
    loss = sigma_s * sigma_t * tl.sum(difference * difference) / (2 * count * count)
    loss = tl.where(denominator == eps, 1.0, (loss + eps) / denominator)
    if HAS_MASK:
        weight *= tl.load(shares_ptr + group * stride_share)
    weight = tl.where(real >= 2, weight, 0.0)
    loss_ptr += first_loss + layer * tl.num_programs(0)
    tl.store(loss_ptr + group, tl.where(real >= 2, weight * loss, 0.0))

    if GRADIENT:
        # A = b − ρa. Rows that are not of unit length keep its diagonal.
        short = scale_s >= LARGEST_SCALE
        rho = 1 - loss
        own_A = own_t * scale_b - rho * own_s * scale_a
        row_sums = sum_b - rho * tl.sum(a, axis=1)
        row_sums = tl.where(short, row_sums, row_sums - own_A)
        A = b.to(tl.float32) - rho * a
        A = tl.where((n[:, None] == n[None, :]) & (short == 0)[:, None], 0.0, A)
        high = high_part(A)
        if SPLIT:
            low = low_part(A)
        derivative = derivative_scale(scale_s, s_ptr.dtype.element_ty == tl.float16)
        left = (-2 * weight * sigma_t / (denominator * count)) * derivative
        row_sums *= left
        left /= OPERAND_SCALE
        dx_rows = dx_ptr + (layer * rows + row) * Ds
        for first in range(0, Ds, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)
            mean, centred = _centred_tile(s_ptr, start_s, scale_s, valid, share, d, Ds)
            scaled = centred * OPERAND_SCALE
            dx = tl.dot(high, high_part(scaled))
            if SPLIT:
                dx = tl.dot(high, low_part(scaled), dx)
                dx = tl.dot(low, high_part(scaled), dx)
            own = tl.where(short[:, None], -mean[None, :], centred)
            dx = dx * left[:, None] - row_sums[:, None] * own
            dx = tl.where(valid[:, None], dx, 0.0)
            inside = in_group[:, None] & (d < Ds)[None, :]
            dx_tile = dx_rows[:, None] + d[None, :]
            dx += tl.load(dx_tile, mask=inside & (accumulate != 0), other=0.0).to(tl.float32)
            tl.store(dx_tile, dx, mask=inside)


@functools.cache
def small_blocks(N: int, dtype: torch.dtype, split: bool, capability: int) -> dict[str, int]:
    """Both relations of a group live in registers: 64 floats a thread each at N = 128.

    Blackwell (10) reads accumulators from tensor memory all at once, which leaves no registers for
    loads in flight, and too few for split float32. Before Hopper (9) blocks have half the features.
    """
    n = max(16, next_power_of_2(N))
    if n == 128:
        d = (32 if dtype == torch.float32 else 64) // (1 if capability >= 9 else 2)
        warps, stages = 8, 1 if capability >= 10 or split else 2
    else:
        d = 32 if split else 64
        warps = 2 if n == 16 else 4 if n == 32 else 8
        stages = 1 if capability >= 10 else 2
    return {"BLOCK_N": n, "BLOCK_D": d, "num_warps": warps, "num_stages": stages}


def launch_small(layers: Layers, term: Term, losses: Tensor, first_loss: int) -> None:
    """Relations of up to SMALL_GROUP rows, all layers in one launch; see `launch_long`."""
    relation_small_groups_kernel[(term.groups, len(layers.students))](
        *layers.pointers,
        layers.scale,
        term.shares,
        term.stride_share,
        layers.dx,
        losses,
        term.N,
        layers.Ds,
        layers.Dt,
        layers.rows,
        *term.strides_s,
        *term.strides_t,
        layers.stride_side,
        *term.strides,
        first_loss,
        term.weight if layers.masked else term.weight / term.groups,
        layers.eps,
        int(first_loss > 0),
        SLOTS=layers.slots,
        HAS_MASK=layers.masked,
        GRADIENT=layers.dx is not None,
        SPLIT=layers.split,
        **small_blocks(term.N, layers.dtype, layers.split, launch.capability(layers.scale.device)),
    )
