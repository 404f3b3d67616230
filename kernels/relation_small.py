"""Relations of up to 128 rows: one program per group and layer, with both relations in registers.

`relation_small_mean_kernel` computes the mean of a group's unit rows for some of the features: in
the programs of the other kernels, warps would wait for each other in each sum over rows.
`relation_small_groups_kernel` reads the rows once, for R̃_s and R̃_t, and stores the losses. For the
gradient of the call's last kind of relation it stores A and two numbers per row, far less than the
rows; for another kind it reads the student again and writes the gradient.
`relation_small_gradient_kernel` computes the gradient from A and the student, adds the other kind's
gradient and applies P_i. Every second launch begins with the last layers, which the one before left
in the L2 cache.
"""

import functools

import torch
import triton
import triton.language as tl

from fastkd._core.operator import launch_kernel
from fastkd.kernels import launch
from fastkd.kernels.launch import cdiv, next_power_of_2
from fastkd.kernels.pointers import pick
from fastkd.kernels.relation_rows import (
    LARGEST_SCALE,
    OPERAND_SCALE,
    Layers,
    Term,
    centring_offset,
    derivative_scale,
    high_part,
    load_rows,
    low_part,
)
from fastkd.kernels.rounding import rounded

SMALL_GROUP = 128  # largest group whose relations both fit into registers


@triton.jit
def _unit_rows(x, scale):
    """The rows over their lengths, times OPERAND_SCALE, as means and centred rows are."""
    return rounded(x * (scale * OPERAND_SCALE)[:, None])


@triton.jit
def _minus_of_valid(x, valid, y):
    """x - y in the rows that are ``valid``, x in others: one instruction in place of a choice."""
    return x - valid.to(tl.float32)[:, None] * y[None, :]


@triton.jit
def _members(scale):
    """Rows of a group that exist, those that have a relation, and 1 over their number."""
    exists = scale != 0
    real = tl.sum(exists.to(tl.int32), axis=0)
    return exists, exists & (real >= 2), tl.div_rn(1.0, tl.maximum(real, 1).to(tl.float32))


@triton.jit
def _gradient_tile(x, high, low, scale, valid, mean, left, row_sums, SPLIT: tl.constexpr):
    """A's product with rows, before P_i, of one block of features."""
    centred = _minus_of_valid(_unit_rows(x, scale), valid, mean)
    dx = tl.dot(high, high_part(centred))
    if SPLIT:
        dx = tl.dot(high, low_part(centred), dx)
        dx = tl.dot(low, high_part(centred), dx)
    dx = dx * (left / OPERAND_SCALE)[:, None] + (row_sums / OPERAND_SCALE)[:, None] * mean[None, :]
    return tl.where(valid[:, None], dx, 0.0)


@triton.jit
def _centred_relation(
    x_ptr,
    row,
    mean_ptr,
    scale,
    valid,
    share,
    D,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """R̃ (BLOCK_N, BLOCK_N), 0 at padding."""
    R = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
    along = tl.zeros((BLOCK_N,), tl.float32)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    lengths = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        mean = tl.load(mean_ptr + d, mask=d < D, other=0.0)
        unit = _unit_rows(load_rows(x_ptr, row, valid, d, D), scale)
        centred = _minus_of_valid(unit, valid, mean)
        along += tl.sum(centred * mean[None, :], axis=1)
        squares += tl.sum(centred * centred, axis=1)
        lengths += mean * mean
        high = high_part(centred)
        R = tl.dot(high, tl.trans(high), R)
        if SPLIT:
            low = low_part(centred)
            R = tl.dot(high, tl.trans(low), R)
            R = tl.dot(low, tl.trans(high), R)
    SQUARE: tl.constexpr = 1 / (OPERAND_SCALE * OPERAND_SCALE)
    squares *= SQUARE
    length = tl.sum(lengths, axis=0) * SQUARE
    h = centring_offset(along * SQUARE, squares, length, scale, valid)
    u = tl.where(valid, h - tl.sum(h, axis=0) * share, 0.0)
    diagonal = squares + 2 * u
    n = tl.arange(0, BLOCK_N)
    R = R * SQUARE + u[:, None] + u[None, :]
    R = tl.where(n[:, None] == n[None, :], diagonal[:, None], R)
    return tl.where(valid[:, None] & valid[None, :], R, 0.0)


@triton.jit(do_not_specialize=["N", "stride_side", "stride_group", "stride_n"])
def relation_small_mean_kernel(
    s_ptrs,  # layers of (rows, Ds)
    t_ptrs,  # layers of (rows, Dt)
    scale_ptr,  # (layers, 2, stride_side): 1/‖x‖, 0 at padding
    mean_s_ptr,  # (layers, groups, Ds): means of the unit rows
    mean_t_ptr,  # (layers, groups, Dt)
    N,
    Ds,
    Dt,
    stride_group,  # of rows
    stride_n,
    stride_side,
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Programs that follow each other read the same rows.
    blocks_d = tl.cdiv(tl.maximum(Ds, Dt), BLOCK_D)
    group = (tl.program_id(0) // blocks_d).to(tl.int64)
    groups = tl.num_programs(0) // blocks_d
    d = tl.program_id(0) % blocks_d * BLOCK_D + tl.arange(0, BLOCK_D)
    layer = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    teacher = tl.program_id(2) == 0
    n = tl.arange(0, BLOCK_N).to(tl.int64)
    row = group * stride_group + n * stride_n
    scale_ptr += (2 * layer + tl.where(teacher, 1, 0)) * stride_side
    scale = tl.load(scale_ptr + row, mask=n < N, other=0.0)
    _, valid, share = _members(scale)
    x_ptr = tl.where(teacher, pick(t_ptrs, layer, SLOTS), pick(s_ptrs, layer, SLOTS))
    D = tl.where(teacher, Dt, Ds)
    unit = _unit_rows(load_rows(x_ptr, row, valid, d, D), scale)  # (BLOCK_N, BLOCK_D)
    mean = rounded(tl.sum(unit, axis=0) * share)
    # Equal rows have no relation: this makes their mean the row, to the last bit.
    mean += tl.sum(_minus_of_valid(unit, valid, mean), axis=0) * share
    out = tl.where(teacher, mean_t_ptr, mean_s_ptr) + (layer * groups + group) * D
    tl.store(out + d, mean, mask=d < D)


@triton.jit(
    do_not_specialize=[
        "N", "stride_side", "stride_group", "stride_n", "first_loss"
    ]
)  # fmt: skip
def relation_small_groups_kernel(
    s_ptrs,  # layers of (rows, Ds)
    t_ptrs,  # layers of (rows, Dt)
    scale_ptr,  # (layers, 2, stride_side)
    stride_side,
    mean_s_ptr,  # (layers, groups, Ds), from `relation_small_mean_kernel`
    mean_t_ptr,  # (layers, groups, Dt)
    shares_ptr,  # (groups,): the groups' shares in the average, times their weights
    dx_ptr,  # (layers, rows, Ds), if GRADIENT
    a_ptr,  # (layers, groups, parts, BLOCK_N, BLOCK_N), if KEEP
    values_ptr,  # (layers, groups, 2, BLOCK_N), if KEEP
    loss_ptr,  # from first_loss on (layers, groups): weighted losses
    N,
    Ds,
    Dt,
    stride_group,  # of rows
    stride_n,
    first_loss,
    weight,
    eps,
    SLOTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    GRADIENT: tl.constexpr,
    KEEP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    groups = tl.num_programs(0)
    s_ptr = pick(s_ptrs, layer, SLOTS)
    t_ptr = pick(t_ptrs, layer, SLOTS)
    n = tl.arange(0, BLOCK_N)
    in_group = n < N
    row = group * stride_group + n.to(tl.int64) * stride_n
    scale_ptr += 2 * layer * stride_side + row
    scale_s = tl.load(scale_ptr, mask=in_group, other=0.0)
    scale_t = tl.load(scale_ptr + stride_side, mask=in_group, other=0.0)
    _, valid, share = _members(scale_s)
    real = tl.sum((scale_s != 0).to(tl.int32), axis=0)
    count = tl.maximum(real, 1).to(tl.float32)
    mean_t_ptr += (layer * groups + group) * Dt
    R_t = _centred_relation(
        t_ptr, row, mean_t_ptr, scale_t, valid, share, Dt, SPLIT, BLOCK_N, BLOCK_D
    )
    # a = R̃_s/σ_s and b = R̃_t/σ_t, both times n: entries near 1.
    sigma_t = tl.sqrt(tl.sum(R_t * R_t))
    scale_b = tl.where(sigma_t > 0, count / sigma_t, 0.0)
    b = rounded(R_t * scale_b)
    if not SPLIT:  # halves the registers while the student's relation is computed
        b = b.to(tl.float16)
    if KEEP:
        values_ptr += (layer * groups + group) * 2 * BLOCK_N + n
        tl.store(values_ptr, scale_s)
    mean_s_ptr += (layer * groups + group) * Ds
    R_s = _centred_relation(
        s_ptr, row, mean_s_ptr, scale_s, valid, share, Ds, SPLIT, BLOCK_N, BLOCK_D
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
        weight *= tl.load(shares_ptr + group)
    weight = tl.where(real >= 2, weight, 0.0)
    tl.store(
        loss_ptr + first_loss + layer * groups + group, tl.where(real >= 2, weight * loss, 0.0)
    )

    if GRADIENT or KEEP:
        # A = b − ρa, with minus its row sums as diagonal: its product is one with s_j − s_i.
        # Rows that are not of unit length keep their diagonal.
        short = scale_s >= LARGEST_SCALE
        A = b.to(tl.float32) - (1 - loss) * a
        cleared = (n[:, None] == n[None, :]) & (short == 0)[:, None]
        A = tl.where(cleared, 0.0, A)
        row_sums = tl.sum(A, axis=1)
        A = tl.where(cleared, -row_sums[:, None], A)
        high = high_part(A)
        low = low_part(A) if SPLIT else high
        derivative = derivative_scale(scale_s, s_ptr.dtype.element_ty == tl.float16)
        left = (-2 * weight * sigma_t / (denominator * count)) * derivative
        if KEEP:
            tl.store(values_ptr + BLOCK_N, left)
            parts: tl.constexpr = 2 if SPLIT else 1
            a_ptr += (layer * groups + group) * parts * BLOCK_N * BLOCK_N
            a_tile = a_ptr + n[:, None] * BLOCK_N + n[None, :]
            tl.store(a_tile, high)
            if SPLIT:
                tl.store(a_tile + BLOCK_N * BLOCK_N, low)
        else:
            row_sums = tl.where(short, row_sums * left, 0.0)
            dx_rows = dx_ptr + (layer * groups * N + row) * Ds
            for first in range(0, Ds, BLOCK_D):
                d = first + tl.arange(0, BLOCK_D)
                x = load_rows(s_ptr, row, valid, d, Ds)
                mean = tl.load(mean_s_ptr + d, mask=d < Ds, other=0.0)
                dx = _gradient_tile(x, high, low, scale_s, valid, mean, left, row_sums, SPLIT)
                inside = in_group[:, None] & (d < Ds)[None, :]
                tl.store(dx_rows[:, None] + d[None, :], dx, mask=inside)


@triton.jit(do_not_specialize=["N", "stride_group", "stride_n"])
def relation_small_gradient_kernel(
    s_ptrs,  # layers of (rows, D)
    mean_ptr,  # (layers, groups, D)
    a_ptr,  # (layers, groups, parts, BLOCK_N, BLOCK_N)
    values_ptr,  # (layers, groups, 2, BLOCK_N): 1/‖x‖ of each row, and the factor of A's row
    dx_ptr,  # (layers, rows, D), read if ADD
    N,
    D,
    stride_group,  # of rows
    stride_n,
    SLOTS: tl.constexpr,
    ADD: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dx (+)= A's gradient, without its component along the normalised rows."""
    group = tl.program_id(0).to(tl.int64)
    layer = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    groups = tl.num_programs(0)
    s_ptr = pick(s_ptrs, layer, SLOTS)
    n = tl.arange(0, BLOCK_N)
    values_ptr += (layer * groups + group) * 2 * BLOCK_N + n
    scale = tl.load(values_ptr)
    left = tl.load(values_ptr + BLOCK_N)
    parts: tl.constexpr = 2 if SPLIT else 1
    a_ptr += (layer * groups + group) * parts * BLOCK_N * BLOCK_N
    a_tile = a_ptr + n[:, None] * BLOCK_N + n[None, :]
    high = tl.load(a_tile)
    low = tl.load(a_tile + BLOCK_N * BLOCK_N) if SPLIT else high
    A = high.to(tl.float32) + low if SPLIT else high.to(tl.float32)
    row_sums = tl.where(scale >= LARGEST_SCALE, tl.sum(A, axis=1) * left, 0.0)
    exists, valid, _ = _members(scale)
    mean_ptr += (layer * groups + group) * D
    row = group * stride_group + n.to(tl.int64) * stride_n
    dx_ptr += layer * groups * N * D
    along = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)  # added up across features after the loop
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        x = load_rows(s_ptr, row, exists, d, D)
        mean = tl.load(mean_ptr + d, mask=d < D, other=0.0)
        dx = _gradient_tile(x, high, low, scale, valid, mean, left, row_sums, SPLIT)
        if ADD:
            dx += load_rows(dx_ptr, row, exists, d, D)
        along += dx * x
    along = tl.where(scale >= LARGEST_SCALE, 0.0, tl.sum(along, axis=1) * scale)
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        x = load_rows(s_ptr, row, exists, d, D)
        mean = tl.load(mean_ptr + d, mask=d < D, other=0.0)
        dx = _gradient_tile(x, high, low, scale, valid, mean, left, row_sums, SPLIT)
        if ADD:
            dx += load_rows(dx_ptr, row, exists, d, D)
        dx -= along[:, None] * (x * scale[:, None])
        inside = (n < N)[:, None] & (d < D)[None, :]
        tl.store(dx_ptr + (row * D)[:, None] + d[None, :], dx, mask=inside)


# Fastest blocks on an H100 that spill nothing.
# Key: rows, SPLIT, the gradient's kernel. Value: BLOCK_D, warps, steps in flight.
HOPPER = {
    (128, False, False): (64, 8, 1),
    (64, False, False): (64, 4, 3),
    (32, False, False): (128, 4, 3),
    (128, True, False): (32, 8, 1),
    (32, True, False): (32, 2, 3),
    (64, False, True): (128, 8, 3),
    (32, False, True): (128, 8, 3),
    (16, False, True): (256, 8, 1),
    (32, True, True): (64, 8, 3),
}


@functools.cache
def small_blocks(
    N: int, dtype: torch.dtype, split: bool, capability: int, gradient: bool
) -> dict[str, int]:
    """Both relations of a group live in registers: 64 floats a thread each at N = 128.

    Blackwell (10) reads accumulators from tensor memory all at once, which leaves no registers for
    loads in flight, and too few for split float32. An A100 (8) spills with three steps in flight.
    """
    n = max(next_power_of_2(N), 16)
    measured = HOPPER.get((n, split, gradient)) if split or dtype != torch.float32 else None
    if capability == 9 and measured:
        d, warps, stages = measured
        return {"BLOCK_N": n, "BLOCK_D": d, "num_warps": warps, "num_stages": stages}
    stages = 1 if capability >= 10 else 3 if capability == 9 else 2
    if n == 128:
        d, warps = 16 if dtype == torch.float32 else 32, 8
        stages = 1 if split else stages
    else:
        d = 32 if split else 64
        warps = 2 if n == 16 else 4 if n == 32 else 8
    # Without a bound the assembler uses 96 to 168 registers for small groups, and spills a few.
    bound = {} if n == 128 else {"maxnreg": 255 if split and n == 64 else 224}
    return {"BLOCK_N": n, "BLOCK_D": d, "num_warps": warps, "num_stages": stages, **bound}


def launch_small(layers: Layers, term: Term, add: bool, last: bool) -> None:
    """Relations of up to SMALL_GROUP rows, all layers in one launch; see `launch_long`.

    The ``last`` kind of relation adds its gradient, and applies P_i to the sum.
    """
    sizes = len(layers.students), term.groups
    new = functools.partial(layers.losses.new_empty, dtype=torch.float32)
    means = new(*sizes, layers.Ds), new(*sizes, layers.Dt)
    device = launch.capability(layers.losses.device)
    blocks = functools.partial(small_blocks, term.N, layers.dtype, layers.split, device)
    keep, n = last and layers.dx is not None, blocks(gradient=False)["BLOCK_N"]
    a = values = None
    if keep:
        a = layers.losses.new_empty(*sizes, 2 if layers.split else 1, n, n, dtype=torch.float16)
        values = new(*sizes, 2, n)
    mean_d = (4096 if n > 32 else 2048) // n
    columns = cdiv(max(layers.Ds, layers.Dt), mean_d)
    launch_kernel(
        relation_small_mean_kernel,
        (term.groups * columns, sizes[0], 2),
        *layers.pointers,
        layers.scale,
        *means,
        term.N,
        layers.Ds,
        layers.Dt,
        *term.strides,
        layers.stride_side,
        SLOTS=layers.slots,
        BLOCK_N=n,
        BLOCK_D=mean_d,
        num_warps=1,  # sums over rows of several pass through shared memory
    )
    launch_kernel(
        relation_small_groups_kernel,
        (term.groups, sizes[0]),
        *layers.pointers,
        layers.scale,
        layers.stride_side,
        *means,
        term.shares,
        None if keep else layers.dx,
        a,
        values,
        layers.losses,
        term.N,
        layers.Ds,
        layers.Dt,
        *term.strides,
        term.first_loss,
        term.weight if layers.masked else term.weight / term.groups,
        layers.eps,
        SLOTS=layers.slots,
        HAS_MASK=layers.masked,
        GRADIENT=layers.dx is not None and not keep,
        KEEP=keep,
        SPLIT=layers.split,
        **blocks(gradient=False),
    )
    if keep:
        launch_kernel(
            relation_small_gradient_kernel,
            (term.groups, sizes[0]),
            layers.pointers[0],
            means[0],
            a,
            values,
            layers.dx,
            term.N,
            layers.Ds,
            *term.strides,
            SLOTS=layers.slots,
            ADD=add,
            SPLIT=layers.split,
            **blocks(gradient=True),
        )
