"""Inverses of I − Q for skew-symmetric Q by products alone, from a first guess such as the last S.

Newton's step S' = S + S R with R = I − (I − Q)S squares the residual, R' = R R, so one launch does
both products, which don't depend on each other. A training step changes Q a little, and the last S
is then a few steps away. What a matrix needs is decided on the device, by every program for
itself, from the sums of squares that the programs of the launch before have left: the host starts
the same launches every time, waits for nothing, and those of a finished matrix return at once.

Start. From a guess with ‖R‖₂ ≥ 1 the steps would diverge, so they go on only if one of them leaves
‖R'‖ below 0.9 (all norms here are Frobenius norms unless marked). Else `cayley_start_kernel` begins
again at S = (I − Q)ᵀ/b², b² = 1 + ‖Q‖²/2 >= ‖I − Q‖₂² since the eigenvalues of Q come in pairs ±iq.
The eigenvalues of (I − Q)S then lie in [1/b², 1]: steps from there always converge. While the bound
on the lowest one is small, a factor in front of S' makes a step worth two (the scaled iteration of
Pan and Schreiber, SIAM J. Sci. Stat. Comput. 12, 1991), about log₄ b² + 5 steps in all.

Rounding. R' = R R drifts away from the residual of S', by no more than rounding where R was below
½ when it was measured, by a factor up to b² after a start. So `cayley_residual_kernel` measures it
anew after every few steps, and a matrix is finished only by a step that follows a measured ‖R‖ < ½,
or with a measured residual that is rounding itself: S then stays as it is, bit for bit, and a call
with unchanged Q gives back its guess. Products are exact to about 2^-22 (tf32x3).

What has not converged after all launches is NaN: a Q with NaN or inf, or one with ‖Q‖ beyond about
1e5, where float32 has few digits of the inverse left.

With n rows a matrix: 2t products of 2n³ operations for t steps, at least two products or 4n³
operations when Q has changed (one when it has not); at least 12n² bytes, as Q and the guess are
read and S is written. Bound by the tensor cores where n is large and by launches where it is
small. Two buffers of S and R take four times the memory of Q for the time of a call.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fastkd.kernels.launch import operator

# Steps after a measured residual, and how often it is measured: enough for ‖Q‖ up to 1e5. Each
# further step in a row would let the drift grow by a factor of 2.
STEPS = 6
CYCLES = 4

# The launches of a call; "measured" is a step that follows a measured residual.
SCHEDULE = (
    *("first", "measured", "start", *("step",) * (STEPS - 1)),
    *("residual", "measured", *("step",) * (STEPS - 1)) * (CYCLES - 1),
    *("residual", "measured"),
)

# A matrix's state between launches: its phase, which of the two buffers holds S and R, a lower
# bound on the eigenvalues of (I − Q)S (1 switches the factor off), ‖Q‖², the number of steps.
STATE = tl.constexpr(5)
UNSURE = tl.constexpr(0)  # the residual that is tracked may have drifted
SURE = tl.constexpr(1)  # it was measured below ½
RESTING = tl.constexpr(2)  # it is tiny if it has not drifted; to be measured
DONE = tl.constexpr(3)

# Sums of squares that a launch leaves for the next: of R, S and Q.
SUMS = tl.constexpr(3)
# Rounding of a measured residual relative to ‖I − Q‖·‖S‖: several times what was seen, so that a
# finished S is found to be finished again.
ROUNDING = tl.constexpr(2.0**-25)
# Least value of the bound on eigenvalues in the factor: keeps them away from 2, where rounding
# could push them out of reach.
MARGIN = tl.constexpr(0.02)
PARTIALS_AT_ONCE = tl.constexpr(256)


def blocks(n: int) -> dict[str, int]:
    """Tile and warps: small tiles where there are few of them, larger ones to read less."""
    block_m, block_n = (32, 32) if n <= 256 else (64, 64) if n < 2048 else (128, 64)
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": 32,
        "num_warps": 8 if block_m == 128 else 4,
    }


@triton.jit
def _tile(n, tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """First row and column of a tile."""
    across = tl.cdiv(n, BLOCK_N)
    return tile // across * BLOCK_M, tile % across * BLOCK_N


@triton.jit
def _inside(n, row, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of the tile from ``row`` and ``column``: addresses, which elements exist, which are 1 in I.

    Addresses are 64-bit at the tile's corner and 32-bit within it, which saves registers.
    """
    i, j = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    offsets = row.to(tl.int64) * n + column + (i[:, None] * n + j[None, :])
    inside = (i < n - row)[:, None] & (j < n - column)[None, :]
    identity = ((row - column) + i[:, None] == j[None, :]).to(tl.float32)
    return offsets, inside, identity


@triton.jit
def _product(
    a_ptr,
    b_ptr,
    row,
    column,
    n,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The tile of a b from ``row`` and ``column`` on, summed over ``depth`` columns of a."""
    i, j, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    a_ptr += row.to(tl.int64) * n
    b_ptr += column
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, depth, BLOCK_K):
        a = tl.load(
            a_ptr + first + (i[:, None] * n + k[None, :]),
            mask=(i < n - row)[:, None] & (k < depth - first)[None, :],
            other=0.0,
        )
        b = tl.load(
            b_ptr + tl.cast(first, tl.int64) * n + (k[:, None] * n + j[None, :]),
            mask=(k < depth - first)[:, None] & (j < n - column)[None, :],
            other=0.0,
        )
        product = tl.dot(a, b, product, input_precision="tf32x3")
    return product


@triton.jit
def _sum_of_squares(x, inside):
    return tl.sum(tl.sum(tl.where(inside, x * x, 0.0), axis=1), axis=0)


@triton.jit
def _total(partial_ptr, tiles):
    """The sum of what all programs of a matrix have left, in the same order for every reader."""
    total = tl.zeros((PARTIALS_AT_ONCE,), tl.float32)
    for first in range(0, tiles, PARTIALS_AT_ONCE):
        i = first + tl.arange(0, PARTIALS_AT_ONCE)
        total += tl.load(partial_ptr + i, mask=i < tiles, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _read(state_ptr):
    phase = tl.load(state_ptr).to(tl.int32)
    where = tl.load(state_ptr + 1).to(tl.int64)
    return phase, where, tl.load(state_ptr + 2), tl.load(state_ptr + 3), tl.load(state_ptr + 4)


@triton.jit
def _write(state_ptr, phase, where, lowest, q_squares, steps):
    tl.store(state_ptr, phase.to(tl.float32))
    tl.store(state_ptr + 1, where.to(tl.float32))
    tl.store(state_ptr + 2, lowest)
    tl.store(state_ptr + 3, q_squares)
    tl.store(state_ptr + 4, steps)


@triton.jit(do_not_specialize=["reads"])
def cayley_residual_kernel(
    q_ptr,  # (B, n, n)
    guess_ptr,  # (B, n, n)
    x_ptr,  # (2, 2, B, n, n): two buffers of S and R
    state_ptr,  # (2, B, STATE): this launch reads one half and writes the other
    partial_ptr,  # (2, B, SUMS, tiles): likewise
    n,
    reads,
    FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """R = I − (I − Q)S. The first time S is the guess, which goes into a buffer too."""
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    matrix, B = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    area = tl.cast(n, tl.int64) * n
    old_state = state_ptr + (reads * B + matrix) * STATE
    new_state = state_ptr + ((1 - reads) * B + matrix) * STATE
    partial_ptr += ((1 - reads) * B + matrix) * SUMS * tiles + tile
    q_ptr += matrix * area

    if FIRST:
        phase = tl.full((), UNSURE, tl.int32)
        where = tl.full((), 0, tl.int64)
        lowest = tl.full((), 1.0, tl.float32)
        q_squares = tl.full((), 0.0, tl.float32)
        steps = tl.full((), 0.0, tl.float32)
        s = guess_ptr + matrix * area
    else:
        phase, where, lowest, q_squares, steps = _read(old_state)
        s = x_ptr + (where * 2 * B + matrix) * area

    if phase != DONE:
        phase = tl.full((), UNSURE, tl.int32)
        row, column = _tile(n, tile, BLOCK_M, BLOCK_N)
        product = _product(q_ptr, s, row, column, n, n, BLOCK_M, BLOCK_N, BLOCK_K)
        offsets, inside, identity = _inside(n, row, column, BLOCK_M, BLOCK_N)
        s_tile = tl.load(s + offsets, mask=inside, other=0.0)
        q_tile = tl.load(q_ptr + offsets, mask=inside, other=0.0)
        r = identity - s_tile + product
        tl.store(x_ptr + ((where * 2 + 1) * B + matrix) * area + offsets, r, mask=inside)
        if FIRST:
            tl.store(x_ptr + matrix * area + offsets, s_tile, mask=inside)
        tl.store(partial_ptr, _sum_of_squares(r, inside))
        tl.store(partial_ptr + tiles, _sum_of_squares(s_tile, inside))
        tl.store(partial_ptr + 2 * tiles, _sum_of_squares(q_tile, inside))
    if tile == 0:
        _write(new_state, phase, where, lowest, q_squares, steps)


@triton.jit(do_not_specialize=["reads"])
def cayley_start_kernel(
    q_ptr,  # (B, n, n)
    x_ptr,  # (2, 2, B, n, n)
    state_ptr,  # (2, B, STATE)
    partial_ptr,  # (2, B, SUMS, tiles)
    n,
    reads,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Where the step from the guess has not left ‖R‖ < 0.9: S = (I + Q)/b² and its residual."""
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    matrix, B = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    area = tl.cast(n, tl.int64) * n
    old_partial = partial_ptr + (reads * B + matrix) * SUMS * tiles
    new_partial = partial_ptr + ((1 - reads) * B + matrix) * SUMS * tiles + tile
    q_ptr += matrix * area

    phase, where, lowest, q_squares, steps = _read(state_ptr + (reads * B + matrix) * STATE)
    if phase <= SURE:
        r_squares = _total(old_partial, tiles)
        if r_squares < 0.81:
            tl.store(new_partial, tl.load(old_partial + tile))
        else:  # NaN too
            phase = tl.full((), UNSURE, tl.int32)
            lowest = 1.0 / (1.0 + 0.5 * q_squares)
            row, column = _tile(n, tile, BLOCK_M, BLOCK_N)
            product = _product(q_ptr, q_ptr, row, column, n, n, BLOCK_M, BLOCK_N, BLOCK_K)
            offsets, inside, identity = _inside(n, row, column, BLOCK_M, BLOCK_N)
            q_tile = tl.load(q_ptr + offsets, mask=inside, other=0.0)
            r = (1.0 - lowest) * identity + lowest * product
            s = x_ptr + (where * 2 * B + matrix) * area
            tl.store(s + offsets, lowest * (identity + q_tile), mask=inside)
            tl.store(s + B * area + offsets, r, mask=inside)
            tl.store(new_partial, _sum_of_squares(r, inside))
    if tile == 0:
        new_state = state_ptr + ((1 - reads) * B + matrix) * STATE
        _write(new_state, phase, where, lowest, q_squares, steps)


@triton.jit(do_not_specialize=["reads"])
def cayley_step_kernel(
    x_ptr,  # (2, 2, B, n, n)
    out_ptr,  # (B, n, n)
    state_ptr,  # (2, B, STATE)
    partial_ptr,  # (2, B, SUMS, tiles)
    n,
    reads,
    MEASURED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """S' = f(S + S R) in one half of the programs, R' = (1 − f)I + f R R in the other.

    The last step, with f = 1 and no R', writes ``out``. MEASURED: R was measured.
    """
    tiles = tl.num_programs(0) // 2
    tile = tl.program_id(0) % tiles
    for_r = tl.program_id(0) >= tiles
    matrix, B = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    area = tl.cast(n, tl.int64) * n
    old_partial = partial_ptr + (reads * B + matrix) * SUMS * tiles
    new_partial = partial_ptr + ((1 - reads) * B + matrix) * SUMS * tiles + tile
    new_state = state_ptr + ((1 - reads) * B + matrix) * STATE

    phase, where, lowest, q_squares, steps = _read(state_ptr + (reads * B + matrix) * STATE)
    if phase <= SURE:
        r_squares = _total(old_partial, tiles)
        depth = n
        if MEASURED:
            s_squares = _total(old_partial + tiles, tiles)
            q_squares = _total(old_partial + 2 * tiles, tiles)
            is_sure = r_squares < 0.25
            phase = tl.where(is_sure, SURE, UNSURE)
            lowest = tl.where(is_sure, 1.0, lowest)
            rounding = (n + q_squares) * s_squares * ROUNDING * ROUNDING
            # S stays as it is.
            depth = tl.where(is_sure & (r_squares <= rounding), 0, n)
        is_last = (depth == 0) | (r_squares <= tl.sqrt(n + q_squares) * ROUNDING)
        is_done = is_last & (phase == SURE)
        after = lowest * (2.0 - lowest)
        factor = tl.where(is_last, 1.0, 2.0 / (1.0 + tl.maximum(after, MARGIN)))
        if tl.program_id(0) == 0:
            phase = tl.where(is_done, DONE, tl.where(is_last, RESTING, phase))
            steps += tl.where(depth == 0, 0.0, 1.0)
            _write(new_state, phase, 1 - where, factor * after, q_squares, steps)

        if not (for_r & is_last):
            s = x_ptr + (where * 2 * B + matrix) * area
            r = s + B * area
            left = s + tl.where(for_r, B * area, 0)
            row, column = _tile(n, tile, BLOCK_M, BLOCK_N)
            product = _product(left, r, row, column, n, depth, BLOCK_M, BLOCK_N, BLOCK_K)
            offsets, inside, identity = _inside(n, row, column, BLOCK_M, BLOCK_N)
            s_tile = tl.load(s + offsets, mask=inside & (for_r == 0), other=0.0)
            x = factor * (s_tile + product) + tl.where(for_r, 1.0 - factor, 0.0) * identity
            if is_done:
                tl.store(out_ptr + matrix * area + offsets, x, mask=inside)
            else:
                to = x_ptr + (((1 - where) * 2 + for_r.to(tl.int64)) * B + matrix) * area
                tl.store(to + offsets, x, mask=inside)
            tl.store(new_partial, _sum_of_squares(x, inside), mask=for_r)
    elif tl.program_id(0) == 0:
        _write(new_state, phase, where, lowest, q_squares, steps)


def refine(skew: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
    """(I − Q)⁻¹ (B, n, n) of skew-symmetric Q, and how many steps each took (B,), in float32.

    The guess (B, n, n) may be anything. NaN for a matrix that has NaN or inf in it or did not
    converge. Sizes are filled up with rows of I to multiples of 16, for wide loads.
    """
    B, size, _ = skew.shape
    missing = -size % 16
    if missing:
        skew, guess = (F.pad(matrix, (0, missing, 0, missing)) for matrix in (skew, guess))
        guess.diagonal(dim1=1, dim2=2)[:, size:] = 1
    skew, guess = skew.contiguous(), guess.contiguous()
    n = size + missing
    config = blocks(n)
    tiles = triton.cdiv(n, config["BLOCK_M"]) * triton.cdiv(n, config["BLOCK_N"])
    out = torch.full_like(skew, float("nan"))
    x = torch.empty(2, 2, B, n, n, dtype=torch.float32, device=skew.device)
    state = torch.empty(2, B, STATE.value, dtype=torch.float32, device=skew.device)
    partial = torch.empty(2, B, SUMS.value, tiles, dtype=torch.float32, device=skew.device)

    shared = (state, partial, n)
    reads = 0
    for name in SCHEDULE:
        if name in ("first", "residual"):
            cayley_residual_kernel[(tiles, B)](
                skew, guess, x, *shared, reads, FIRST=name == "first", **config
            )
        elif name == "start":
            cayley_start_kernel[(tiles, B)](skew, x, *shared, reads, **config)
        else:
            cayley_step_kernel[(2 * tiles, B)](
                x, out, *shared, reads, MEASURED=name == "measured", **config
            )
        reads = 1 - reads
    return out[:, :size, :size].contiguous(), state[reads, :, 4]


def _inverse_shapes(skew, guess):
    return torch.empty_like(skew, memory_format=torch.contiguous_format)


@operator(_inverse_shapes)
def cayley_inverse(skew: Tensor, guess: Tensor | None) -> Tensor:
    """(I − Q)⁻¹ (B, n, n), see `refine`; without a guess from I."""
    if guess is None:
        n = skew.shape[-1]
        guess = torch.eye(n, dtype=skew.dtype, device=skew.device).expand_as(skew)
    return refine(skew, guess)[0]
