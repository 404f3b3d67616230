"""Inverses of I − Q for skew-symmetric Q by products only, from an initial guess (the last S).

Newton's step S' = S + S R with R = I − (I − Q)S squares the residual, R' = R R. A training step
changes Q a little, so the last S is only a few steps away. Each program decides on the device what
a launch does with its matrix, from the sums of squares that the programs of the previous launch
stored. So the host always starts the same launches and never waits, and launches for a finished
matrix return at once. `cayley_step_kernel` is launched often enough for a warm guess, then for
fewer than MANY_ROWS rows `cayley_finish_kernel` once: a single program per matrix, which continues
until the matrix is finished. It runs on one multiprocessor, and only a call with a large change of
Q needs it.

Products. A matrix is stored as two float16 matrices, x = (high + low / 2^11) / scale, with an error
of 2^-24, or of 2^-44 of 1 if that is more. An exact product is three products on the tensor cores,
low·high + high·low + high·high, with an error of 2^-22. A fast product is high·high alone, with an
error of 2^-11.

Refinement, from ‖R‖ below ½, or 0.9 after a start (all norms here are Frobenius norms unless
marked). R is measured, then S' = S + S R, until the next residual is sure to be a rounding error.
An error of S' is part of the next measured R, so the product S R is fast, and R exact. If the first
measured residual is a rounding error, S is bitwise unchanged: a call with an unchanged Q returns
its guess. ‖R‖ of a large matrix may be above ½ although ‖R‖₂ is small: if it is below √n/2, R R is
computed in a step, and the guess is dropped only if its norm is not small either.

Start. From any other guess S = f(I + Q)/b² with b² >= ‖I − Q‖₂² = 1 + ‖Q²‖₂: the smaller one of
1 + ‖Q²‖ and 1 + ‖Q‖²/2, since the eigenvalues of Q are pairs ±iq. Without f the eigenvalues of
(I − Q)S lie in [1/b², 1], and the steps always converge. Until R is small, R' is computed from R in
the launch of S' instead of being measured. A factor f of S and of each S' maps [low, 1] to
[f low, f] around 1, which makes a step worth two while ``low`` is small (the scaled iteration of
Pan and Schreiber, SIAM J. Sci. Stat. Comput. 12, 1991): about log₄ b² + 4 steps in all.

Rounding. Products are exact while an eigenvalue may be below 1/64, for ‖I − Q‖ above 1024, and if
measured residuals do not decrease. Computed residuals drift from those of S by a factor up to b²,
so R is measured again after every few steps.

The result is NaN if the steps do not converge: for a Q with NaN or inf, or with ‖Q‖ above about
1e5, where float32 has few digits of the inverse left.

With n rows per matrix: one exact product of 2n³ operations if Q is unchanged, 4 products after a
training step, half of them exact, and about 16 from a start, two of them exact; at least 12n²
bytes, since Q and the guess are read and S is written. Bound by the tensor cores for large n and by
launches for small n. Q and two buffers of S and R need five times the memory of Q during a call.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.operator import launch_kernel, operator
from fastkd.kernels.halves import halves
from fastkd.kernels.launch import capability, cdiv
from fastkd.kernels.reduction import sum_of

# Steps after which a computed residual is measured: each further step would double the drift.
STEPS = tl.constexpr(6)

# Launches before the single program, enough for a guess with ‖R‖ < ½, and without a guess for ‖Q‖
# up to 300. Large matrices, which a single program would take long for, have launches for 1e5.
WARM_LAUNCHES = 11
COLD_LAUNCHES = 20
LARGE_LAUNCHES = 36
MANY_ROWS = 2048
# Rounds of the single program.
MOST_ROUNDS = tl.constexpr(40)

# A matrix's state between launches, initially zeros except for the phase: its phase, the buffer
# that holds S and R, a lower bound on the eigenvalues of (I − Q)S, ‖Q‖², ‖S‖², the ‖R‖² measured
# last, the number of products, of steps since R was measured, and its start: 0 if S is refined from
# the guess, 1 after a start, 2 if the steps after it need exact products.
STATE = tl.constexpr(9)
PRODUCTS = 6
MEASURE = tl.constexpr(0)  # R must be measured
COLD = tl.constexpr(1)  # there is no guess
MEASURED = tl.constexpr(2)
SQUARED = tl.constexpr(3)  # R's buffer holds Q Q / ‖Q‖²
COMPUTED = tl.constexpr(4)  # R was computed from the R before it
DONE = tl.constexpr(5)

# Actions of a round.
NOTHING = tl.constexpr(0)
RESIDUAL = tl.constexpr(1)
SQUARE = tl.constexpr(2)
START = tl.constexpr(3)
STEP = tl.constexpr(4)
REFINE = tl.constexpr(5)

# Sums of squares that a round stores for the next round: of R and S, and first of Q.
SUMS = tl.constexpr(3)
# Factor of the low parts, which keeps them in float16's range as long as the high parts are.
LOW = tl.constexpr(2.0**11)
# Factors of S and R, whose elements are at most 1 where they are used, and of Q.
SCALE = tl.constexpr(2.0**8)
Q_SCALE = tl.constexpr(2.0**-4)
# Rounding error of a measured residual relative to ‖I − Q‖·‖S‖: several times the largest observed
# error, so that a finished S is recognised in the next call.
ROUNDING = tl.constexpr(2.0**-25)
# A fast product S R rounds S if ‖R‖ / √n is above this.
FAST_ROUNDING = tl.constexpr(2.0**-13)
# Limits of fast products: their error is relative to ‖I − Q‖·‖S‖, and must be small beside the
# lowest eigenvalue.
LARGEST_FAST = tl.constexpr(1024.0**2)
LOWEST_FAST = tl.constexpr(1 / 64)
# Smallest eigenvalue bound for the factor: keeps eigenvalues away from 2, above which the steps
# diverge.
MARGIN = tl.constexpr(0.02)
PARTIALS_AT_ONCE = tl.constexpr(256)
# Rows of tiles whose programs run together and share columns of the right matrix in the L2 cache.
GROUP = tl.constexpr(8)


def blocks(n: int, device: torch.device) -> dict[str, int]:
    """Tile, warps and stages: small tiles for small matrices, larger tiles to read less.

    A program computes WIDE tiles of a fast product at once.
    """
    if n <= 256:
        tile = {"BLOCK": 32, "BLOCK_K": 32, "WIDE": 1}
        return tile | {"num_warps": 4, "num_stages": 3}
    if n < MANY_ROWS:
        tile = {"BLOCK": 64, "BLOCK_K": 64, "WIDE": 1}
        return tile | {"num_warps": 4, "num_stages": 4}
    # 192 kB of shared memory on Hopper, 128 kB on Blackwell's data-center GPUs, else 96 kB.
    major = capability(device)
    tile = {"BLOCK": 128, "BLOCK_K": 64, "WIDE": 2 if major == 9 else 1}
    return tile | {"num_warps": 8, "num_stages": 4 if major in (9, 10) else 3}


@triton.jit
def _corner(tile, n, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Row and column of a tile; consecutive tiles lie in groups of ``GROUP`` rows of tiles."""
    across, down = tl.cdiv(n, BLOCK_N), tl.cdiv(n, BLOCK)
    first = tile // (GROUP * across) * GROUP
    rows = tl.minimum(down - first, GROUP)
    tile = tile % (GROUP * across)
    return (first + tile % rows) * BLOCK, tile // rows * BLOCK_N


@triton.jit
def _at(x_ptr, row, column, n, BLOCK: tl.constexpr):
    """Pointers to a tile: 64-bit to its corner, with 32-bit offsets, which saves registers."""
    i, j = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    return x_ptr + (row.to(tl.int64) * n + column) + (i[:, None] * n + j[None, :])


@triton.jit
def _identity(row, column, BLOCK: tl.constexpr):
    i, j = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    return ((row - column) + i[:, None] == j[None, :]).to(tl.float32)


@triton.jit
def _inside(size, row, column, BLOCK: tl.constexpr):
    i, j = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    return (i < size - row)[:, None] & (j < size - column)[None, :]


@triton.jit
def _store_parts(x_ptr, to_low, x, row, column, n, mirrors, BLOCK: tl.constexpr):
    """Store x in parts, and with ``mirrors`` its transpose above the diagonal."""
    high = x.to(tl.float16)
    low = ((x - high.to(tl.float32)) * LOW).to(tl.float16)
    at = _at(x_ptr, row, column, n, BLOCK)
    tl.store(at, high)
    tl.store(at + to_low, low)
    if mirrors:
        at = _at(x_ptr, column, row, n, BLOCK)
        tl.store(at, tl.trans(high))
        tl.store(at + to_low, tl.trans(low))


@triton.jit
def _fast_product(
    a_ptr,
    b_ptr,
    row,
    column,
    n,
    product,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``product`` + the tile of a·b at ``row`` and ``column``."""
    i, j, k = tl.arange(0, BLOCK), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    a_ptr += row.to(tl.int64) * n
    b_ptr += column
    for first in range(0, n, BLOCK_K):
        a = tl.load(a_ptr + first + (i[:, None] * n + k[None, :]))
        b = tl.load(b_ptr + tl.cast(first, tl.int64) * n + (k[:, None] * n + j[None, :]))
        product = tl.dot(a, b, product)
    return product


@triton.jit
def _exact_product(
    a_ptr,
    b_ptr,
    to_low,
    row,
    column,
    n,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The tile of a·b at ``row`` and ``column``: low·high + high·low + high·high.

    Tensor cores round sums toward 0, an error that grows with their length. So the sums of
    high·high have BLOCK_K terms, and are added in float32.
    """
    product = tl.zeros((BLOCK, BLOCK), tl.float32)
    for part in range(0, 2):
        left, right = a_ptr + (1 - part) * to_low, b_ptr + part * to_low
        product = _fast_product(left, right, row, column, n, product, BLOCK, BLOCK, BLOCK_K)
    product *= 1 / LOW
    i, j, k = tl.arange(0, BLOCK), tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    a_ptr += row.to(tl.int64) * n
    b_ptr += column
    for first in range(0, n, BLOCK_K):
        a = tl.load(a_ptr + first + (i[:, None] * n + k[None, :]))
        b = tl.load(b_ptr + tl.cast(first, tl.int64) * n + (k[:, None] * n + j[None, :]))
        # This option keeps the compiler from adding to ``product`` in the tensor cores.
        product += tl.dot(a, b, max_num_imprecise_acc=1)
    return product


@triton.jit
def _read(state_ptr):
    phase = tl.load(state_ptr).to(tl.int32)
    where = tl.load(state_ptr + 1).to(tl.int64)
    lowest, q_squares = tl.load(state_ptr + 2), tl.load(state_ptr + 3)
    s_squares, before = tl.load(state_ptr + 4), tl.load(state_ptr + 5)
    products, since = tl.load(state_ptr + 6), tl.load(state_ptr + 7)
    started = tl.load(state_ptr + 8)
    return phase, where, lowest, q_squares, s_squares, before, products, since, started


@triton.jit
def _write(state_ptr, state):
    phase, where, lowest, q_squares, s_squares, before, products, since, started = state
    tl.store(state_ptr, phase.to(tl.float32))
    tl.store(state_ptr + 1, where.to(tl.float32))
    tl.store(state_ptr + 2, lowest)
    tl.store(state_ptr + 3, q_squares)
    tl.store(state_ptr + 4, s_squares)
    tl.store(state_ptr + 5, before)
    tl.store(state_ptr + 6, products)
    tl.store(state_ptr + 7, since)
    tl.store(state_ptr + 8, started)


@triton.jit
def _decide(state, partial_ptr, tiles, n):
    """Action of the round, buffer of S, factor, parts of the product, whether S' is the result,
    and the new state."""
    phase, where, lowest, q_squares, s_squares, before, products, since, started = state
    measured, computed, squared = phase == MEASURED, phase == COMPUTED, phase == SQUARED
    r_squares = tl.full((), 0.0, tl.float32)
    if measured | computed | squared:
        r_squares = sum_of(partial_ptr, tiles, PARTIALS_AT_ONCE)
    elif products == 0.0:
        q_squares = sum_of(partial_ptr + 2 * tiles, tiles, PARTIALS_AT_ONCE)

    squares = n + q_squares  # ‖I − Q‖²
    refines = measured & (r_squares < tl.where(started > 0.0, 0.81, 0.25))
    improves = r_squares < tl.where(before > 0.0, before / 16, n / 4.0)
    # ‖R‖₂ may be small although ‖R‖ is not.
    tries = measured & ~refines & (started == 0.0) & (products == 1.0) & improves
    lowest = tl.where(tries, 1.0, lowest)
    started = tl.where(measured & (started > 0.0) & ~refines & ~improves, 2.0, started)
    exact = (squares >= LARGEST_FAST) | (started == 2.0) | (refines & ~improves)
    exact |= (started == 1.0) & (lowest < LOWEST_FAST) & (measured | computed)
    # ‖R R‖ is at most ‖R‖₂‖R‖, and ‖R‖₂ at most 1 − ``lowest``.
    gap = 1.001 - lowest
    limit = tl.where(started > 0.0, tl.minimum(0.01 / (gap * gap), n / 64.0), 0.64)
    is_small = computed & (r_squares < tl.where(lowest > 7 / 8, limit, 1 / 16))
    fails = computed & ~is_small & (started == 0.0) & ~(r_squares < n / 4.0)
    stays = refines & (products == 1.0) & (r_squares <= squares * s_squares * ROUNDING * ROUNDING)
    is_fine = exact | (r_squares <= n * FAST_ROUNDING * FAST_ROUNDING)
    is_done = stays | (refines & is_fine & (r_squares <= tl.sqrt(squares) * ROUNDING))
    # A fast product Q Q may have an error of 2^-11.
    b_squares = 1.0 + q_squares * tl.minimum(tl.sqrt(r_squares) * (1 + 2**-8), 0.5)
    squares_again = squared & (since == 0.0) & (b_squares * LOWEST_FAST > 1.0)

    action = tl.where(computed | tries | (started > 0.0), STEP, SQUARE)
    action = tl.where(squared, tl.where(squares_again, SQUARE, START), action)
    action = tl.where(fails, SQUARE, action)
    action = tl.where(refines | (is_small & ~exact), REFINE, action)
    again = (is_small & exact) | (computed & ~is_small & ~fails & (since >= STEPS))
    action = tl.where((phase == MEASURE) | again, RESIDUAL, action)
    is_hopeless = squared & ~(r_squares < float("inf"))  # NaN too
    action = tl.where((phase == DONE) | is_hopeless, NOTHING, action)
    starts, steps = action == START, action == STEP
    if action == RESIDUAL:
        s_squares = sum_of(partial_ptr + tiles, tiles, PARTIALS_AT_ONCE)

    parts = tl.where((action == RESIDUAL) | exact | squares_again, 3, 1)
    parts = tl.where(starts | stays, 0, parts)
    # Lowest eigenvalue of (I − Q)S before the factor, where the largest one may be 1.
    unscaled = tl.where(starts, 1.0 / b_squares, lowest * (2.0 - lowest))
    factor = 2.0 / (1.0 + tl.maximum(unscaled, MARGIN))
    lowest = tl.where(starts | steps, factor * unscaled, lowest)
    factor = tl.where(starts, factor / b_squares, tl.where(steps, factor, 1.0))

    next_phase = tl.where(starts | steps, COMPUTED, phase)
    next_phase = tl.where(action == RESIDUAL, MEASURED, next_phase)
    next_phase = tl.where(action == SQUARE, SQUARED, next_phase)
    next_phase = tl.where(action == REFINE, tl.where(is_done, DONE, MEASURE), next_phase)
    next_phase = tl.where(is_hopeless, DONE, next_phase)
    to = tl.where(steps | (action == REFINE), 1 - where, where)
    made = tl.where(steps, 2.0, tl.where((action == NOTHING) | starts | stays, 0.0, 1.0))
    products += made
    since = tl.where(steps, since + 1.0, tl.where(squares_again, 1.0, 0.0))
    before = tl.where(measured, r_squares, tl.where(action == SQUARE, 0.0, before))
    started = tl.where(action == SQUARE, 1.0, started)
    state = (next_phase, to, lowest, q_squares, s_squares, before, products, since, started)
    return action, where, factor, parts, is_done, state


@triton.jit
def _epilogue(
    product,
    added_ptr,
    to_ptr,
    guess_ptr,
    out_ptr,
    partial_ptr,
    to_low,
    row,
    column,
    size,
    n,
    times,
    by,
    ones,
    adds,
    copies,
    mirrors,
    is_done,
    BLOCK: tl.constexpr,
):
    """Store ``times`` the product + ``by`` added + ``ones`` I, and its sum of squares.

    Of a symmetric result a tile above the diagonal is that below it.
    """
    x = times * product + ones * _identity(row, column, BLOCK)
    if adds:
        high = tl.load(_at(added_ptr, row, column, n, BLOCK))
        low = tl.load(_at(added_ptr + to_low, row, column, n, BLOCK))
        x += by * (high.to(tl.float32) + low.to(tl.float32) / LOW)
    if is_done:
        inside = _inside(size, row, column, BLOCK)
        if copies:
            guess = _at(guess_ptr, row, column, size, BLOCK)
            x = tl.load(guess, mask=inside, other=0.0)
        tl.store(_at(out_ptr, row, column, size, BLOCK), x, mask=inside)
    else:
        mirrors &= column < row
        _store_parts(to_ptr, to_low, x * SCALE, row, column, n, mirrors, BLOCK)
    squares = tl.sum(tl.sum(x * x, axis=1), axis=0)
    tl.store(partial_ptr, tl.where(mirrors, 2.0, 1.0) * squares)


@triton.jit
def _round(
    q_ptr,  # high part of Q (n, n); the low part follows after ``to_low`` elements
    s_ptr,  # high part of S in its buffer; that of R follows after 2 ``to_low`` elements
    next_ptr,  # high part of S in the buffer that a step writes
    guess_ptr,  # (size, size)
    out_ptr,  # (size, size)
    partial_ptr,
    to_low,
    action,
    factor,
    parts,
    is_done,
    started,
    q_squares,
    tile,
    tiles,
    size,
    n,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One tile: of S if ``tile`` is below ``tiles``, else of R.

    RESIDUAL: R = I − S + Q S.  SQUARE: R = Q Q / ‖Q‖².  START, with f for f/b²: S = f(I + Q),
    R = (1 − f)I + f ‖Q‖² R.  STEP: S' = f(S + S R), R' = (1 − f)I + f R R.
    REFINE: S' = S + S R alone, into ``out`` when done.
    """
    for_r = tile >= tiles
    starts, steps = action == START, (action == STEP) | (action == REFINE)
    if (for_r & (action != REFINE)) | ((for_r == 0) & (starts | steps)):
        partial_ptr += tl.where(for_r, 0, tiles)
        tile = tile % tiles
        row, column = _corner(tile // WIDE, n, BLOCK, BLOCK * WIDE)
        column += tile % WIDE * BLOCK
        r_ptr = s_ptr + 2 * to_low
        left = tl.where(steps, tl.where(for_r, r_ptr, s_ptr), q_ptr)
        right = tl.where(steps, r_ptr, tl.where(action == RESIDUAL, s_ptr, q_ptr))
        # The product is scaled by the factors of its matrices. S, Q or R are added to it, and I.
        times = tl.where(steps, factor / (SCALE * SCALE), 1 / (SCALE * Q_SCALE))
        if action == SQUARE:
            times = 1 / (tl.maximum(q_squares, 1e-30) * Q_SCALE * Q_SCALE)
        added = tl.where(starts, tl.where(for_r, r_ptr, q_ptr), s_ptr)
        by = tl.where(action == RESIDUAL, -1.0, factor) / SCALE
        if starts:
            by = factor * tl.where(for_r, q_squares / SCALE, 1 / Q_SCALE)
        ones = tl.where(for_r, 1.0 - factor, tl.where(starts, factor, 0.0))
        ones = tl.where(action == RESIDUAL, 1.0, tl.where(action == SQUARE, 0.0, ones))
        adds = (for_r == 0) | starts | (action == RESIDUAL)
        to = tl.where(steps, next_ptr, s_ptr) + tl.where(for_r, 2 * to_low, 0)
        # Q Q and, after a start, R R are symmetric: only tiles below the diagonal are computed.
        mirrors = for_r & ((action == SQUARE) | ((action == STEP) & (started > 0.0)))
        if mirrors & (column > row):
            tl.store(partial_ptr + tile, 0.0)
        elif parts != 1:
            product = tl.zeros((BLOCK, BLOCK), tl.float32)
            if parts > 1:
                product = _exact_product(left, right, to_low, row, column, n, BLOCK, BLOCK_K)
            _epilogue(
                product, added, to, guess_ptr, out_ptr, partial_ptr + tile, to_low, row, column,
                size, n, times, by, ones, adds, parts == 0, mirrors, is_done, BLOCK,
            )  # fmt: skip
        elif tile % WIDE == 0:
            product = tl.zeros((BLOCK, BLOCK * WIDE), tl.float32)
            product = _fast_product(
                left, right, row, column, n, product, BLOCK, BLOCK * WIDE, BLOCK_K
            )
            if WIDE == 2:
                product, second = halves(product)
                if (mirrors & (column + BLOCK > row)) == 0:
                    _epilogue(
                        second, added, to, guess_ptr, out_ptr, partial_ptr + tile + 1, to_low, row,
                        column + BLOCK, size, n, times, by, ones, adds, False, mirrors, is_done,
                        BLOCK,
                    )  # fmt: skip
            _epilogue(
                product, added, to, guess_ptr, out_ptr, partial_ptr + tile, to_low, row, column,
                size, n, times, by, ones, adds, False, mirrors, is_done, BLOCK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["slot"])
def cayley_split_kernel(
    x_ptr,  # (B, size, size) with these strides
    stride_x_b,
    stride_x_i,
    stride_x_j,
    largest_ptr,  # (B,) with HAS_LARGEST
    parts_ptr,  # (2, B, n, n): high and low parts
    partial_ptr,  # (B, SUMS, tiles)
    slot,
    scale,
    inner,
    outer,
    size,
    n,
    BLOCK: tl.constexpr,
    HAS_LARGEST: tl.constexpr,
):
    """Parts of ``scale`` times x + ``inner`` I, padded with ``outer`` I, and its sum of squares.

    With HAS_LARGEST of x divided by its largest absolute value, which the caller knows.
    """
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    matrix, B = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    area = tl.cast(n, tl.int64) * n
    if HAS_LARGEST:
        scale /= tl.maximum(tl.load(largest_ptr + matrix), 1e-30)
    row, column = _corner(tile, n, BLOCK, BLOCK)
    i, j = row + tl.arange(0, BLOCK), column + tl.arange(0, BLOCK)
    inside = (i < size)[:, None] & (j < size)[None, :]
    at = i.to(tl.int64)[:, None] * stride_x_i + j.to(tl.int64)[None, :] * stride_x_j
    x = tl.load(x_ptr + matrix * stride_x_b + at, mask=inside, other=0.0)
    x += tl.where(inside, inner, outer) * _identity(row, column, BLOCK)
    _store_parts(parts_ptr + matrix * area, B * area, x * scale, row, column, n, False, BLOCK)
    squares = tl.sum(tl.sum(x * x, axis=1), axis=0)
    tl.store(partial_ptr + (matrix * SUMS + slot) * tiles + tile, squares)


@triton.jit(do_not_specialize=["reads"])
def cayley_step_kernel(
    q_ptr,  # (2, B, n, n): high and low parts
    x_ptr,  # (2, 2, 2, B, n, n): two buffers of S and R in parts
    guess_ptr,  # (B, size, size)
    out_ptr,  # (B, size, size)
    state_ptr,  # (2, B, STATE): this launch reads one half and writes the other
    partial_ptr,  # (2, B, SUMS, tiles): likewise
    size,
    n,
    reads,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One round, with a program per tile: the first half for S, the second half for R."""
    tile, tiles = tl.program_id(0), tl.num_programs(0) // 2
    matrix, B = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    area = tl.cast(n, tl.int64) * n
    old_partial = partial_ptr + (reads * B + matrix) * SUMS * tiles
    new_partial = partial_ptr + ((1 - reads) * B + matrix) * SUMS * tiles
    state = _read(state_ptr + (reads * B + matrix) * STATE)
    action, where, factor, parts, is_done, state = _decide(state, old_partial, tiles, n)
    if tile == 0:
        _write(state_ptr + ((1 - reads) * B + matrix) * STATE, state)
    if action != NOTHING:
        s_ptr = x_ptr + (where * 4 * B + matrix) * area
        next_ptr = x_ptr + ((1 - where) * 4 * B + matrix) * area
        outside = matrix * size * size
        _round(
            q_ptr + matrix * area, s_ptr, next_ptr, guess_ptr + outside, out_ptr + outside,
            new_partial, B * area, action, factor, parts, is_done, state[8], state[3], tile, tiles,
            size, n, BLOCK, BLOCK_K, WIDE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tiles", "reads"])
def cayley_finish_kernel(
    q_ptr,  # (2, B, n, n)
    x_ptr,  # (2, 2, 2, B, n, n)
    guess_ptr,  # (B, size, size)
    out_ptr,  # (B, size, size)
    state_ptr,  # (2, B, STATE)
    partial_ptr,  # (2, B, SUMS, tiles)
    size,
    n,
    tiles,
    reads,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The remaining rounds, with one program per matrix."""
    matrix, B = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    area = tl.cast(n, tl.int64) * n
    outside = matrix * size * size
    phase, where, lowest, q_squares, s_squares, before, products, since, started = _read(
        state_ptr + (reads * B + matrix) * STATE
    )
    rounds = tl.full((), 0, tl.int32)
    while (phase != DONE) & (rounds < MOST_ROUNDS):
        old_partial = partial_ptr + (reads * B + matrix) * SUMS * tiles
        new_partial = partial_ptr + ((1 - reads) * B + matrix) * SUMS * tiles
        state = (phase, where, lowest, q_squares, s_squares, before, products, since, started)
        action, now, factor, parts, is_done, state = _decide(state, old_partial, tiles, n)
        s_ptr = x_ptr + (now * 4 * B + matrix) * area
        next_ptr = x_ptr + ((1 - now) * 4 * B + matrix) * area
        for tile in range(0, 2 * tiles):
            _round(
                q_ptr + matrix * area, s_ptr, next_ptr, guess_ptr + outside, out_ptr + outside,
                new_partial, B * area, action, factor, parts, is_done, state[8], state[3], tile,
                tiles, size, n, BLOCK, BLOCK_K, WIDE,
            )  # fmt: skip
        phase, where, lowest, q_squares, s_squares, before, products, since, started = state
        reads = 1 - reads
        rounds += 1
        tl.debug_barrier()  # threads read other threads' values in the next round
    _write(
        state_ptr + (2 * B + matrix) * STATE,
        (phase, where, lowest, q_squares, s_squares, before, products, since, started),
    )


@triton.jit
def cayley_product_kernel(
    a_ptr,  # (2, B, n, n): high and low parts
    b_ptr,  # (2, B, n, n)
    parts_ptr,  # (2, B, n, n)
    out_ptr,  # (B, size, size)
    largest_ptr,  # (B,)
    size,
    n,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_LAST: tl.constexpr,
):
    """a·b in parts, or with IS_LAST in float32 times ½ ``largest``."""
    tile = tl.program_id(0)
    matrix, B = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    area = tl.cast(n, tl.int64) * n
    to_low = B * area
    row, column = _corner(tile, n, BLOCK, BLOCK)
    a_ptr += matrix * area
    b_ptr += matrix * area
    product = _exact_product(a_ptr, b_ptr, to_low, row, column, n, BLOCK, BLOCK_K)
    if IS_LAST:
        product *= 0.5 * tl.maximum(tl.load(largest_ptr + matrix), 1e-30)
        out_ptr += matrix * size * size
        inside = _inside(size, row, column, BLOCK)
        tl.store(_at(out_ptr, row, column, size, BLOCK), product, mask=inside)
    else:
        parts_ptr += matrix * area
        _store_parts(parts_ptr, to_low, product, row, column, n, False, BLOCK)


class _Tiles:
    """Sizes of B matrices in parts, padded to whole tiles, and of the launches for them."""

    def __init__(self, x: Tensor):
        self.B, self.size, _ = x.shape
        self.config = blocks(self.size, x.device)
        block = self.config["BLOCK"]
        whole = block * self.config["WIDE"]
        self.n = cdiv(self.size, whole) * whole
        self.number = (self.n // block) ** 2
        self.device = x.device

    def empty(self, *leading: int) -> Tensor:
        """Parts of B matrices."""
        shape = (*leading, 2, self.B, self.n, self.n)
        return torch.empty(shape, dtype=torch.float16, device=self.device)

    def partial(self) -> Tensor:
        shape = (2, self.B, SUMS.value, self.number)
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def split(
        self,
        x: Tensor,
        parts: Tensor,
        partial: Tensor,
        slot: int,
        scale: float = 1.0,
        inner: float = 0.0,
        outer: float = 0.0,
        largest: Tensor | None = None,
    ) -> None:
        launch_kernel(cayley_split_kernel, (self.number, self.B), 
            x, *x.stride(), partial if largest is None else largest, parts, partial, slot, scale,
            inner, outer, self.size, self.n, self.config["BLOCK"],
            HAS_LARGEST=largest is not None, num_warps=self.config["num_warps"],
        )  # fmt: skip


def refine(skew: Tensor, guess: list[Tensor], launches: int) -> tuple[Tensor, Tensor]:
    """(I − Q)⁻¹ (B, n, n) of skew-symmetric Q, and the number of products of each (B,), in float32.

    The guess is B matrices (n, n), split over several tensors, with any values, or no tensor. The
    result is NaN for a matrix that has NaN or inf or did not converge. Matrices are padded with
    rows of I to whole tiles. ``launches`` of many programs precede the single program.
    """
    tiles = _Tiles(skew)
    B, n = tiles.B, tiles.n
    out = torch.full_like(skew, float("nan"), memory_format=torch.contiguous_format)
    q, x, partial = tiles.empty(), tiles.empty(2, 2), tiles.partial()
    state = torch.zeros(3, B, STATE.value, dtype=torch.float32, device=skew.device)
    tiles.split(skew, q, partial, 2, Q_SCALE.value)
    first = out
    if guess:
        first = torch.cat(guess) if len(guess) > 1 else guess[0].contiguous()
        tiles.split(first, x, partial, 1, SCALE.value, outer=1.0)
    else:
        state[0, :, 0] = COLD.value
    shared = (q, x, first, out, state, partial, tiles.size, n)
    step = functools.partial(launch_kernel, cayley_step_kernel, (2 * tiles.number, B))
    for i in range(launches):
        step(*shared, i % 2, **tiles.config)
    last = launches % 2
    if tiles.size < MANY_ROWS:
        # The loop keeps the state in registers, which 4 warps spill on an A100.
        config = tiles.config | {"num_warps": 8}
        launch_kernel(cayley_finish_kernel, (B,), *shared, tiles.number, last, **config)
        last = 2
    return out, state[last, :, PRODUCTS]


def _inverse_shapes(skew, guess):
    return torch.empty_like(skew, memory_format=torch.contiguous_format)


@operator(_inverse_shapes)
def cayley_inverse(skew: Tensor, guess: list[Tensor]) -> Tensor:
    """(I − Q)⁻¹ (B, n, n), see `refine`."""
    launches = WARM_LAUNCHES if guess else COLD_LAUNCHES
    return refine(skew, guess, LARGE_LAUNCHES if skew.shape[-1] >= MANY_ROWS else launches)[0]


def _gradient_shapes(w, grad):
    return torch.empty_like(w, memory_format=torch.contiguous_format)


@operator(_gradient_shapes)
def cayley_gradient(w: Tensor, grad: Tensor) -> Tensor:
    """Gradient ½ (I + W)ᵀ G (I + W)ᵀ (B, n, n) of Q, by exact products."""
    tiles = _Tiles(w)
    transposed, other, first = tiles.empty(), tiles.empty(), tiles.empty()
    partial, out = tiles.partial(), torch.empty_like(w, memory_format=torch.contiguous_format)
    largest = torch.linalg.vector_norm(grad, float("inf"), dim=(1, 2))
    tiles.split(w.mT, transposed, partial, 0, inner=1.0)
    tiles.split(grad, other, partial, 0, largest=largest)
    config = {name: x for name, x in tiles.config.items() if name != "WIDE"}
    product = functools.partial(launch_kernel, cayley_product_kernel, (tiles.number, tiles.B))
    sizes = (largest, tiles.size, tiles.n)
    product(transposed, other, first, out, *sizes, IS_LAST=False, **config)
    product(first, transposed, first, out, *sizes, IS_LAST=True, **config)
    return out
