"""Inverses of I − Q for skew-symmetric Q by products only, from an initial guess (the last S).

Newton's step S' = S + S R with R = I − (I − Q)S squares the residual, R' = R R. A training step
changes Q a little, so the last S is only a few steps away. Each program decides on the device what
a launch does with its matrix, from the sums of squares that the programs of the previous launch
stored. So the host always starts the same launches and never waits, and launches for a finished
matrix return at once. `cayley_step_kernel` is launched often enough for a warm guess, then
`cayley_finish_kernel` once: a single program per matrix, which continues until the matrix is
finished. It runs on one multiprocessor, and only a call with a large change of Q needs it.

Refinement, from ‖R‖ below ½, or 0.9 after a start (all norms here are Frobenius norms unless
marked). R is measured, then S' = S + S R, until the next residual is sure to be a rounding error.
An error of S' is part of the next measured R, so the product S R needs a few digits only (one tf32
product), and R all of them. If the first measured residual is a rounding error, S is bitwise
unchanged: a call with an unchanged Q returns its guess.

Start. From any other guess S = f(I + Q)/b² with b² >= ‖I − Q‖₂² = 1 + ‖Q²‖₂: the smaller one of
1 + ‖Q²‖ and 1 + ‖Q‖²/2, since the eigenvalues of Q are pairs ±iq. Without f the eigenvalues of
(I − Q)S lie in [1/b², 1], and the steps always converge. Until R is small, R' is computed from R in
the launch of S' instead of being measured. A factor f of S and of each S' maps [low, 1] to
[f low, f] around 1, which makes a step worth two while ``low`` is small (the scaled iteration of
Pan and Schreiber, SIAM J. Sci. Stat. Comput. 12, 1991): about log₄ b² + 4 steps in all.

Rounding. Exact products have an error of about 2^-22 (tf32x3), others of 2^-10. These are not used
while an eigenvalue may be below 1/64, for ‖I − Q‖ above 128, or if R, measured after the start, is
too large. Computed residuals drift from those of S by a factor up to b², so R is measured again
after every few steps.

The result is NaN if the steps do not converge: for a Q with NaN or inf, or with ‖Q‖ above about
1e5, where float32 has few digits of the inverse left.

With n rows per matrix: one exact product of 2n³ operations if Q is unchanged, 4 to 6 products after
a training step, half of them exact, and 16 from a start at n 4096 with ‖Q‖ = 45; at least 12n²
bytes, since Q and the guess are read and S is written. Bound by the tensor cores for large n and by
launches for small n. Two buffers of S and R need four times the memory of Q during a call.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.operator import operator
from fastkd.kernels.launch import cdiv
from fastkd.kernels.rounding import FAST, PRECISE

# Steps after which a computed residual is measured: each further step would double the drift.
STEPS = tl.constexpr(6)

# Launches before the single program, enough for a guess with ‖R‖ < ½. Without a guess, or for
# matrices so large that launches cost little, they are enough for ‖Q‖ up to 1e5.
WARM_LAUNCHES = 11
COLD_LAUNCHES = 31
MANY_ROWS = 2048
# Rounds of the single program.
MOST_ROUNDS = tl.constexpr(40)

# A matrix's state between launches, initially zeros: its phase, the buffer that holds S and R, a
# lower bound on the eigenvalues of (I − Q)S, ‖Q‖², the number of products, of steps since R was
# measured, and its start: 0 if S is refined from the guess, 1 after a start, 2 if the steps
# after it need exact products.
STATE = tl.constexpr(7)
MEASURE = tl.constexpr(0)  # R must be measured
MEASURED = tl.constexpr(1)
SQUARED = tl.constexpr(2)  # R's buffer holds Q Q
COMPUTED = tl.constexpr(3)  # R was computed from the R before it
DONE = tl.constexpr(4)

# Actions of a round.
NOTHING = tl.constexpr(0)
RESIDUAL = tl.constexpr(1)
SQUARE = tl.constexpr(2)
START = tl.constexpr(3)
STEP = tl.constexpr(4)
REFINE = tl.constexpr(5)

# Sums of squares that a round stores for the next round: of R, S and Q.
SUMS = tl.constexpr(3)
# Rounding error of a measured residual relative to ‖I − Q‖·‖S‖: several times the largest observed
# error, so that a finished S is recognised in the next call.
ROUNDING = tl.constexpr(2.0**-25)
# Limits of products with few digits: their error is relative to ‖I − Q‖·‖S‖, and must be small
# beside the lowest eigenvalue.
LARGEST_FAST = tl.constexpr(128.0**2)
LOWEST_FAST = tl.constexpr(1 / 64)
# Smallest eigenvalue bound for the factor: keeps eigenvalues away from 2, above which the steps
# diverge.
MARGIN = tl.constexpr(0.02)
PARTIALS_AT_ONCE = tl.constexpr(256)


def blocks(n: int) -> dict[str, int]:
    """Tile and warps: small tiles for small matrices, larger tiles to read less."""
    block_m, block_n = (32, 32) if n <= 256 else (64, 64) if n < 2048 else (128, 64)
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": 32,
        "num_warps": 8 if block_m == 128 else 4,
    }


@triton.jit
def _inside(n, row, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Addresses of the tile at ``row`` and ``column``, its mask, and its elements of I.

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
    PRECISION: tl.constexpr,
):
    """The tile of a·b at ``row`` and ``column``, summed over ``depth`` columns of a."""
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
        product = tl.dot(a, b, product, input_precision=PRECISION)
    return product


@triton.jit
def _sum_of_squares(x, inside):
    return tl.sum(tl.sum(tl.where(inside, x * x, 0.0), axis=1), axis=0)


@triton.jit
def _total(partial_ptr, tiles):
    """Sum of the partial sums of a matrix's programs, in the same order for every reader."""
    total = tl.zeros((PARTIALS_AT_ONCE,), tl.float32)
    for first in range(0, tiles, PARTIALS_AT_ONCE):
        i = first + tl.arange(0, PARTIALS_AT_ONCE)
        total += tl.load(partial_ptr + i, mask=i < tiles, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _read(state_ptr):
    phase = tl.load(state_ptr).to(tl.int32)
    where = tl.load(state_ptr + 1).to(tl.int64)
    lowest, q_squares = tl.load(state_ptr + 2), tl.load(state_ptr + 3)
    products, since = tl.load(state_ptr + 4), tl.load(state_ptr + 5)
    return phase, where, lowest, q_squares, products, since, tl.load(state_ptr + 6)


@triton.jit
def _write(state_ptr, state):
    phase, where, lowest, q_squares, products, since, started = state
    tl.store(state_ptr, phase.to(tl.float32))
    tl.store(state_ptr + 1, where.to(tl.float32))
    tl.store(state_ptr + 2, lowest)
    tl.store(state_ptr + 3, q_squares)
    tl.store(state_ptr + 4, products)
    tl.store(state_ptr + 5, since)
    tl.store(state_ptr + 6, started)


@triton.jit
def _decide(state, partial_ptr, tiles, n):
    """Action of the round, buffer of S, factor, depth and exactness of the product, whether S' is
    the result, and the new state."""
    phase, where, lowest, q_squares, products, since, started = state
    measured = phase == MEASURED
    r_squares = tl.full((), 0.0, tl.float32)
    s_squares = tl.full((), 0.0, tl.float32)
    if (phase != DONE) & (phase != MEASURE):
        r_squares = _total(partial_ptr, tiles)
    if measured:
        s_squares = _total(partial_ptr + tiles, tiles)
        q_squares = _total(partial_ptr + 2 * tiles, tiles)

    squares = n + q_squares  # ‖I − Q‖²
    refines = measured & (r_squares < tl.where(started > 0.0, 0.81, 0.25))
    stays = refines & (products == 1.0) & (r_squares <= squares * s_squares * ROUNDING * ROUNDING)
    is_done = stays | (refines & (r_squares <= tl.sqrt(squares) * ROUNDING))
    # ‖R R‖ is at most ‖R‖₂‖R‖, and ‖R‖₂ at most 1 − ``lowest``.
    is_small = r_squares < tl.where(lowest > 7 / 8, 0.64, 1 / 16)
    again = (phase == COMPUTED) & (is_small | (since >= STEPS))
    is_hopeless = (phase == SQUARED) & ~(r_squares < float("inf"))  # NaN too
    started = tl.where(measured & ~refines & (started > 0.0), 2.0, started)

    action = tl.where(started > 0.0, STEP, SQUARE)
    action = tl.where(phase == SQUARED, START, action)
    action = tl.where(refines, REFINE, action)
    action = tl.where((phase == MEASURE) | again, RESIDUAL, action)
    action = tl.where((phase == DONE) | is_hopeless, NOTHING, action)
    steps_on = (action == STEP) | (action == REFINE)

    few_digits = squares < LARGEST_FAST
    few_digits &= (action == REFINE) | ((action == STEP) & (lowest >= LOWEST_FAST))
    exact = ~few_digits | (started == 2.0)
    # Q Q may have an error of 2^-10.
    b_squares = 1.0 + tl.minimum(tl.sqrt(r_squares) * (1 + 2**-8), 0.5 * q_squares)
    # Lowest eigenvalue of (I − Q)S before the factor, where the largest one may be 1.
    before = tl.where(action == START, 1.0 / b_squares, lowest * (2.0 - lowest))
    factor = 2.0 / (1.0 + tl.maximum(before, MARGIN))
    lowest = tl.where((action == START) | (action == STEP), factor * before, lowest)
    factor = tl.where(action == START, factor / b_squares, factor)
    factor = tl.where((action == START) | (action == STEP), factor, 1.0)
    depth = tl.where(stays | (action == START), 0, n)

    next_phase = tl.where((action == START) | (action == STEP), COMPUTED, phase)
    next_phase = tl.where(action == RESIDUAL, MEASURED, next_phase)
    next_phase = tl.where(action == SQUARE, SQUARED, next_phase)
    next_phase = tl.where(action == REFINE, tl.where(is_done, DONE, MEASURE), next_phase)
    next_phase = tl.where(is_hopeless, DONE, next_phase)
    to = tl.where(steps_on, 1 - where, where)
    made = tl.where(action == STEP, 2.0, 1.0)
    made = tl.where((action == NOTHING) | (action == START) | stays, 0.0, made)
    products = products + made
    since = tl.where(action == STEP, since + 1.0, 0.0)
    started = tl.where(action == SQUARE, 1.0, started)
    state = (next_phase, to, lowest, q_squares, products, since, started)
    return action, where, factor, depth, exact, is_done, state


@triton.jit
def _round(
    q_ptr,  # (n, n)
    s_ptr,  # S in its buffer; R follows after ``to_r`` elements
    next_ptr,  # S in the buffer that a step writes
    out_ptr,  # (n, n)
    partial_ptr,  # of this tile
    to_r,
    action,
    factor,
    depth,
    exact,
    is_done,
    tile,
    tiles,
    n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile: of S if ``tile`` is below ``tiles``, else of R.

    RESIDUAL: R = I − S + Q S.  SQUARE: R = Q Q.  START, with f for f/b² and R still Q Q:
    S = f(I + Q), R = (1 − f)I + f R.  STEP: S' = f(S + S R), R' = (1 − f)I + f R R.
    REFINE: S' = S + S R alone, into ``out`` when done.
    """
    for_r = tile >= tiles
    tile = tile % tiles
    across = tl.cdiv(n, BLOCK_N)
    row, column = tile // across * BLOCK_M, tile % across * BLOCK_N
    r_ptr = s_ptr + to_r
    steps = (action == STEP) | (action == REFINE)
    starts = action == START
    if (action == RESIDUAL) & (for_r == 0):
        offsets, inside, identity = _inside(n, row, column, BLOCK_M, BLOCK_N)
        s_tile = tl.load(s_ptr + offsets, mask=inside, other=0.0)
        q_tile = tl.load(q_ptr + offsets, mask=inside, other=0.0)
        tl.store(partial_ptr + tiles + tile, _sum_of_squares(s_tile, inside))
        tl.store(partial_ptr + 2 * tiles + tile, _sum_of_squares(q_tile, inside))
    elif action != tl.where(for_r, REFINE, SQUARE):
        left = tl.where(steps, tl.where(for_r, r_ptr, s_ptr), q_ptr)
        right = tl.where(steps, r_ptr, tl.where(action == RESIDUAL, s_ptr, q_ptr))
        if exact:
            product = _product(
                left, right, row, column, n, depth, BLOCK_M, BLOCK_N, BLOCK_K, PRECISE
            )
        else:
            product = _product(left, right, row, column, n, depth, BLOCK_M, BLOCK_N, BLOCK_K, FAST)
        # The summands beside the product: S, Q or Q Q, and I.
        offsets, inside, identity = _inside(n, row, column, BLOCK_M, BLOCK_N)
        added_ptr = tl.where(starts, tl.where(for_r, r_ptr, q_ptr), s_ptr)
        adds = (for_r == 0) | starts | (action == RESIDUAL)
        added = tl.load(added_ptr + offsets, inside & adds, 0.0)
        ones = tl.where(for_r, 1.0 - factor, tl.where(starts, factor, 0.0))
        x = factor * (added + product) + ones * identity
        if action == RESIDUAL:
            x = identity - added + product
        to = tl.where(steps, next_ptr, s_ptr) + tl.where(for_r, to_r, 0)
        to = tl.where(is_done, out_ptr, to)
        tl.store(to + offsets, x, mask=inside)
        tl.store(partial_ptr + tile, _sum_of_squares(x, inside), mask=for_r)


@triton.jit(do_not_specialize=["reads"])
def cayley_step_kernel(
    q_ptr,  # (B, n, n)
    x_ptr,  # (2, 2, B, n, n): two buffers of S and R
    out_ptr,  # (B, n, n)
    state_ptr,  # (2, B, STATE): this launch reads one half and writes the other
    partial_ptr,  # (2, B, SUMS, tiles): likewise
    n,
    reads,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One round, with a program per tile: the first half for S, the second half for R."""
    tile, tiles = tl.program_id(0), tl.num_programs(0) // 2
    matrix, B = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    area = tl.cast(n, tl.int64) * n
    old_partial = partial_ptr + (reads * B + matrix) * SUMS * tiles
    new_partial = partial_ptr + ((1 - reads) * B + matrix) * SUMS * tiles
    state = _read(state_ptr + (reads * B + matrix) * STATE)
    action, where, factor, depth, exact, is_done, state = _decide(state, old_partial, tiles, n)
    if action != NOTHING:
        s_ptr = x_ptr + (where * 2 * B + matrix) * area
        next_ptr = x_ptr + ((1 - where) * 2 * B + matrix) * area
        _round(
            q_ptr + matrix * area, s_ptr, next_ptr, out_ptr + matrix * area, new_partial, B * area,
            action, factor, depth, exact, is_done, tile, tiles, n, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if tile == 0:
        _write(state_ptr + ((1 - reads) * B + matrix) * STATE, state)


@triton.jit(do_not_specialize=["tiles", "reads"])
def cayley_finish_kernel(
    q_ptr,  # (B, n, n)
    x_ptr,  # (2, 2, B, n, n)
    out_ptr,  # (B, n, n)
    state_ptr,  # (2, B, STATE)
    partial_ptr,  # (2, B, SUMS, tiles)
    n,
    tiles,
    reads,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The remaining rounds, with one program per matrix."""
    matrix, B = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    area = tl.cast(n, tl.int64) * n
    phase, where, lowest, q_squares, products, since, started = _read(
        state_ptr + (reads * B + matrix) * STATE
    )
    rounds = tl.full((), 0, tl.int32)
    while (phase != DONE) & (rounds < MOST_ROUNDS):
        old_partial = partial_ptr + (reads * B + matrix) * SUMS * tiles
        new_partial = partial_ptr + ((1 - reads) * B + matrix) * SUMS * tiles
        state = (phase, where, lowest, q_squares, products, since, started)
        action, now, factor, depth, exact, is_done, state = _decide(state, old_partial, tiles, n)
        s_ptr = x_ptr + (now * 2 * B + matrix) * area
        next_ptr = x_ptr + ((1 - now) * 2 * B + matrix) * area
        for tile in range(0, 2 * tiles):
            _round(
                q_ptr + matrix * area, s_ptr, next_ptr, out_ptr + matrix * area, new_partial,
                B * area, action, factor, depth, exact, is_done, tile, tiles, n,
                BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        phase, where, lowest, q_squares, products, since, started = state
        reads = 1 - reads
        rounds += 1
        tl.debug_barrier()  # threads read other threads' values in the next round
    _write(
        state_ptr + (2 * B + matrix) * STATE,
        (phase, where, lowest, q_squares, products, since, started),
    )


def refine(skew: Tensor, guess: list[Tensor], launches: int) -> tuple[Tensor, Tensor]:
    """(I − Q)⁻¹ (B, n, n) of skew-symmetric Q, and the number of products of each (B,), in float32.

    The guess is B matrices (n, n), split over several tensors, with any values. The result is NaN
    for a matrix that has NaN or inf or did not converge. Matrices are padded with rows of I to
    multiples of 16, for wide loads. ``launches`` of many programs precede the single program.
    """
    B, size, _ = skew.shape
    missing = -size % 16
    if missing:
        skew, *guess = (F.pad(x, (0, missing, 0, missing)) for x in (skew, *guess))
        for x in guess:
            x.diagonal(dim1=1, dim2=2)[:, size:] = 1
    skew = skew.contiguous()
    n = size + missing
    config = blocks(n)
    tiles = cdiv(n, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"])
    out = torch.full_like(skew, float("nan"))
    x = torch.empty(2, 2, B, n, n, dtype=torch.float32, device=skew.device)
    torch.cat(guess, out=x[0, 0])
    state = torch.zeros(3, B, STATE.value, dtype=torch.float32, device=skew.device)
    partial = torch.empty(2, B, SUMS.value, tiles, dtype=torch.float32, device=skew.device)
    shared = (skew, x, out, state, partial, n)
    step = cayley_step_kernel[(2 * tiles, B)]
    for i in range(launches):
        step(*shared, i % 2, **config)
    config["num_warps"] = 8  # its loop keeps the state in registers, which 4 warps spill on an A100
    cayley_finish_kernel[(B,)](*shared, tiles, launches % 2, **config)
    out = out[:, :size, :size].contiguous() if missing else out
    return out, state[2, :, 4]


def _inverse_shapes(skew, guess):
    return torch.empty_like(skew, memory_format=torch.contiguous_format)


@operator(_inverse_shapes)
def cayley_inverse(skew: Tensor, guess: list[Tensor]) -> Tensor:
    """(I − Q)⁻¹ (B, n, n), see `refine`; the default guess is I."""
    n = skew.shape[-1]
    is_cold = not guess or n >= MANY_ROWS
    if not guess:
        guess = [torch.eye(n, dtype=skew.dtype, device=skew.device).expand_as(skew)]
    return refine(skew, guess, COLD_LAUNCHES if is_cold else WARM_LAUNCHES)[0]
