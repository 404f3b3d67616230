"""Soft targets: divergence of softened teacher and student logits, and its gradient.

Data path. A program reads its rows in blocks of the vocabulary. Each thread keeps running maxima,
sums of exponentials and the Kullback-Leibler sum of the logits that it reads, rescaled when its
maximum grows; at the end of the row the threads combine these. So one read of student and teacher
logits is enough for the value of either KL. All other divergences need the normalisers first and
read the logits twice; adaptive KL lists the teacher's tokens near the end of its head meanwhile,
and selects it in passes over the list. Where a gradient is needed, the program then reads the row
again and writes its gradient, divided by the number of real rows, which `count_kernel` counts
before. `reduce_kernel` adds the rows' losses. No other tensor has the size of the logits. Logits
that are computed from hidden states in chunks are overwritten by their gradient.

The gradient is that for an upstream gradient of 1; `fastkd.kernels.upstream` multiplies it in the
backward pass, without work if that is 1. float16 would underflow, and "none" has many upstream
gradients: there the forward pass reads the logits for the loss alone, and the backward pass does
the whole work again.

Exponentials are powers of 2, of (z − max)·log2(e)/τ. A fused multiply-add would save the
subtraction, but the exponent of the maximum itself would be a rounding error instead of 0.

Reads of the logits, with the gradient's, of which only the first has to come from memory:

    forward_kl, reverse_kl    2 of student and teacher
    the same above HOT        3 of student and teacher
    all others                3 of student and teacher

Above the temperature HOT the losses are much smaller than the terms of a sum without normalisers:
multiplied by τ², the sum's rounding error would be as large as the loss.

With E = R·V elements of s bytes at least 3Es bytes move: 2Es read and Es written. About 40E
instructions for a KL, 90E for js, 135E for adaptive_kl. A KL is bound by bandwidth, the others by
instructions.

The head of adaptive_kl ends where half of the teacher's mass is above. A few tokens of the row tell
about where: the median of their mass, by bisection, give or take their sampling error. Their mean
lies far from it where few tokens have most of the mass. The first read adds the mass above two
edges there. The second read lists the tokens between them, a column for each thread: of 152,064
normal logits of σ 1, 2 and 3 3.4, 2.3 and 0.8%, by Zipf's law with exponents of 1 and 1.2 4.1 and
1.6% (emulated, means of 40 rows). Lists take at most 4 bytes a token (8 in float32) of the
programs' rows, so a program has several rows.

What comes from memory depends on the L2 cache. P programs at a time read rows of 2Vs bytes, and a
cache of C bytes holds the fraction f = min(1, C / 2PVs) of them. Each pass but the first runs
against the one before, so it finds that fraction in the cache and reads 2(1 − f)Es bytes from
memory. One program fills a multiprocessor (two where a thread has at most 32 registers), and
gradients are stored, and logits read for the last time, as data that is not read again. In
bfloat16, with one program:

    C, P                  3Es up to V = C / 2Ps     V = 128,256: KL, others    V = 152,064
    H100: 50 MB, 132       94,000                   3.5Es, 4.0Es               3.8Es, 4.5Es
    B200: 126 MB, 148     212,000                   3Es, 3Es                   3Es, 3Es

Measured on an H100, forward_kl at V = 152,064 takes the time of 4.3Es at the speed of a copy, and
total_variation that of 6.1Es: its cache keeps less than all of its 50 MB.

The gradients of the sums of a row, with respect to the student's logits over τ:

    total_variation           p_s (M − b), b = 1 where p_s < p_t and ½ if equal, M = Σ p_s b
    negative_log_acceptance   the same over α = Σ min(p_s, p_t)
    lk                        λ (p_s − p_t) + (1 − λ) p_s (M − b)
    mixed                     w (p_s − p_t) + (1 − w) p_s (log p_s/p_t − KL), w the coefficient
    generalized_js            (1 − β) p_s (log p_s/m − KL(p_s ‖ m)), m = β p_t + (1 − β) p_s
    skew_kl                   p_s Σu − u, u = (1 − a) p_s p_t/m, m = a p_t + (1 − a) p_s
    skew_reverse_kl           p_s (x − Σ p_s x), x = log p_s/m − a p_s/m, m = a p_s + (1 − a) p_t
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.operator import launch_kernel, operator
from fastkd.kernels.launch import cdiv, multiprocessors
from fastkd.kernels.reduction import bytes_of, counted, summed
from fastkd.kernels.rounding import rounded

HEAD_MASS = tl.constexpr(0.5)
GUESSES = tl.constexpr(5)  # halvings of the range of the guessed head's end
LOG_2 = tl.constexpr(0.6931471805599453)
LOG2_E = 1.4426950408889634
LEAST = tl.constexpr(-200.0)  # power of 2 that is 0 in float32
LEAST_NORMAL = tl.constexpr(-126.0)
LONG = 16384  # longest row of which several share a multiprocessor
HOT = 10.0  # above this temperature losses are summed from terms as small as the loss
# Divergences computed in one read of the logits, and divergences with another form above HOT.
ONE_READ = ("forward_kl", "reverse_kl")
WITH_HOT_FORM = (*ONE_READ, "js")
OF_MIXTURE = ("generalized_js", "skew_kl", "skew_reverse_kl")
# Long rows' divergences with half of the threads, and those with fewer logits at a time: they have
# more intermediate values, or registers for a second program.
HALF_THE_THREADS = (*OF_MIXTURE, "lk")
FEWER_AT_A_TIME = (*HALF_THE_THREADS, "mixed", "total_variation", "js", "adaptive_kl")


def blocks(V: int, divergence: str, element_size: int, aligned: bool) -> dict[str, int]:
    """Block sizes and warps for a vocabulary of V, and the logits of a thread.

    A lane reads WIDTH adjacent logits in each part of a block: 16 bytes of aligned rows, otherwise
    one logit next to its neighbour's, and 4 logits of short rows, to save registers. There are few
    shapes, for few compiled forms:

    - Up to 1024 tokens a warp reads a row, and 8 rows share a program. Without a bound on its
      registers the assembler uses 80 and spills one value.
    - Rows up to LONG tokens have a program of 8 warps, several of which share a multiprocessor.
    - Longer rows have a program that fills a multiprocessor, so that few rows are read at a time
      and the L2 cache still holds logits for the next pass. Divergences with more intermediate
      values read fewer logits at a time, and those of a mixture and lk have half as many threads.
      Not adaptive_kl of rows that are not aligned, whose addresses need more registers.
    """
    if V <= 1024:
        width = {"WIDTH": 4 if aligned else 1, "num_warps": 8, "maxnreg": 168}
        if divergence == "adaptive_kl":  # a row for each program
            return {"BLOCK_R": 1, "BLOCK_V": 1024, "LANES": 256, **width}
        return {"BLOCK_R": 8, "BLOCK_V": 128, "LANES": 32, **width}
    warps, logits = 8, 16 if divergence in ONE_READ else 8  # of a thread
    if V > LONG and (aligned or divergence != "adaptive_kl"):
        warps = 16 if divergence in HALF_THE_THREADS else 32
        logits = 8 if divergence in FEWER_AT_A_TIME else 32 // element_size
        if divergence == "adaptive_kl":
            logits = 16 // element_size
    lanes = 32 * warps
    config = {"BLOCK_R": 1, "BLOCK_V": logits * lanes, "LANES": lanes, "num_warps": warps}
    many = divergence in (*HALF_THE_THREADS, "js", "adaptive_kl")
    if warps < 32 and (many or (divergence in ONE_READ and not aligned)):
        config["maxnreg"] = 128  # without a bound the assembler uses 64 and spills
    return config | {"WIDTH": 16 // element_size if aligned else 1}


# Tuples of the functions below: ``rows`` are the pointers of student and teacher, the columns,
# which rows are real, V and slope; ``sums`` the base and the sum of exponentials of each side.


@triton.jit
def _by_row(x):
    """(BLOCK_R,) as (BLOCK_R, 1, 1, 1)."""
    return x[:, None, None, None]


@triton.jit
def _load(row_ptr, column, V, is_real):
    """Logits (BLOCK_R, PARTS, LANES, WIDTH) in fp32, −inf outside the vocabulary."""
    inside = _by_row(is_real) & (column < V)
    z = tl.load(_by_row(row_ptr) + column, mask=inside, other=-float("inf"))
    return z.to(tl.float32)


@triton.jit
def _load_last(row_ptr, column, V, is_real):
    """Logits that are not read again: the L2 cache keeps others. 0 outside the vocabulary."""
    inside = _by_row(is_real) & (column < V)
    z = tl.load(_by_row(row_ptr) + column, inside, other=0.0, eviction_policy="evict_first")
    return z.to(tl.float32)


@triton.jit
def _columns(PARTS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Column indices (1, PARTS, LANES, WIDTH) in a block; a lane's WIDTH columns are adjacent."""
    part = tl.arange(0, PARTS)[None, :, None, None] * (LANES * WIDTH)
    return part + (tl.arange(0, LANES) * WIDTH)[None, None, :, None] + tl.arange(0, WIDTH)


@triton.jit
def _from_end(done, V, BLOCK_V: tl.constexpr):
    """First column of the block to read after ``done`` columns, from the row's last block on.

    The pass before read these columns last, so they may still be in the L2 cache.
    """
    return tl.cdiv(V, BLOCK_V) * BLOCK_V - BLOCK_V - done


@triton.jit
def _lane_sum(x):
    """(BLOCK_R, PARTS, LANES, WIDTH) summed within each thread: (BLOCK_R, LANES)."""
    return tl.sum(tl.sum(x, axis=3), axis=1)


@triton.jit
def _lane_max(x):
    return tl.max(tl.max(x, axis=3), axis=1)


@triton.jit
def _base(top):
    """The maximum to subtract: 0 if all logits so far are −inf, as −inf − (−inf) would be NaN."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def _shift(top, new_top):
    """Old minus new maximum, at most 0; 0 for an old −inf, as there is no sum to rescale yet."""
    return tl.where(top == -float("inf"), 0.0, top - new_top)


@triton.jit
def _times(p, x):
    """p·x, with 0·∞ = 0."""
    return tl.where(p == 0.0, 0.0, p * x)


@triton.jit
def _log_one_plus_exp(gap):
    """log(1 + e^gap) − max(gap, 0), equal for gap and −gap."""
    return tl.log(1.0 + tl.exp(-tl.abs(gap)))


@triton.jit
def _above_mean(gap):
    """log2(p/m) for the larger p of two probabilities, 2^gap of the smaller, and their mean m.

    That is log2(2 / (1 + 2^−gap)) = −log2(1 − s/2) with s = 1 − 2^−gap, by a polynomial with a
    relative error of 2e-8. In float32 log2 would take twice as many instructions.
    """
    s = 1.0 - tl.exp2(-gap)
    series = 0.014175266 + s * (-0.0095567955 + s * 0.0040607017)
    series = 0.021893354 + s * (0.012155281 + s * (-0.0045881984 + s * series))
    return s * (0.7213475 + s * (0.1803343 + s * (0.06017853 + s * series)))


@triton.jit
def _excess(p, q, r):
    """q − p − p·r with r = log(q/p): non-negative terms whose sum is KL(p ‖ q).

    Σ −p·r would be a small difference of large terms if p and q are close.
    """
    # e^r − 1 − r, where the formula would cancel
    series = 1.0 / 720.0 + r * (1.0 / 5040.0 + r * (1.0 / 40320.0))
    series = 1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * series))
    series = r * r * (0.5 + r * series)
    return tl.where(tl.abs(r) < 0.5, p * series, q - p - _times(p, r))


@triton.jit
def _both_excesses(p_s, p_t, r):
    """The `_excess` of p_s over p_t and of p_t over p_s, with r = log(p_s/p_t)."""
    y = r * r
    even = y * (0.5 + y * (1.0 / 24.0 + y * (1.0 / 720.0 + y * (1.0 / 40320.0))))  # cosh r − 1
    odd = r * y * (1.0 / 6.0 + y * (1.0 / 120.0 + y * (1.0 / 5040.0)))  # sinh r − r
    of_teacher = (p_s - p_t) - p_t * tl.where(p_t == 0.0, 0.0, r)
    of_student = (p_t - p_s) + p_s * tl.where(p_s == 0.0, 0.0, r)
    is_near = tl.abs(r) < 0.5
    of_teacher = tl.where(is_near, p_t * (even + odd), of_teacher)
    return of_teacher, tl.where(is_near, p_s * (even - odd), of_student)


@triton.jit
def _log_mean(r):
    """log(½(1 + e^r)), accurate also near r = 0."""
    y = r * r / 4.0
    series = y * (0.5 + y * (-1.0 / 12.0 + y * (1.0 / 45.0 - y * (17.0 / 2520.0))))
    plain = tl.maximum(r, 0.0) + _log_one_plus_exp(r) - LOG_2
    return tl.where(tl.abs(r) < 0.5, r / 2.0 + series, plain)


@triton.jit
def _below(p_s, p_t):
    """1 if p_s < p_t, ½ if they are equal, else 0."""
    return tl.where(p_s < p_t, 1.0, tl.where(p_s == p_t, 0.5, 0.0))


@triton.jit
def _log_mixture(log_ps, log_pt, coefficient, DIVERGENCE: tl.constexpr):
    """log2 of the mixture m of the student's and the teacher's distribution.

    From the logarithms: coefficient · p would underflow where p alone doesn't.
    """
    first, second = log_pt, log_ps
    if DIVERGENCE == "skew_reverse_kl":
        first, second = log_ps, log_pt
    gap, other = second - first, 1.0 - coefficient
    ratio = tl.exp2(tl.maximum(-tl.abs(gap), LEAST_NORMAL))
    sum = tl.where(gap > 0.0, other + coefficient * ratio, coefficient + other * ratio)
    return tl.maximum(first, second) + tl.log2(sum)


@triton.jit
def _key(z, SHIFT: tl.constexpr):
    """Integers in the order of the logits z, without the SHIFT last bits, which are 0 in z."""
    bits = z.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) >> SHIFT


@triton.jit
def _logit(key, SHIFT: tl.constexpr):
    """The logit of a key."""
    bits = (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    bits = tl.where(key < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _row_sums(x, y):
    """Two (1, LANES, ...) summed over the lanes, in the registers of one sum."""
    return tl.split(tl.sum(tl.sum(tl.join(x, y), axis=1), axis=0))


@triton.jit
def _guesses(
    rows, BLOCK_V: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr
):
    """Two logits around the end of the head of a few tokens from the whole row."""
    _, teacher_row, _, is_real, V, slope = rows
    apart = tl.maximum(V // BLOCK_V, 1) * WIDTH
    columns = _columns(BLOCK_V // (LANES * WIDTH), LANES, 1) * apart + tl.arange(0, WIDTH)
    z = _load(teacher_row, columns, V, is_real)
    base = _base(tl.max(tl.max(_lane_max(z), axis=1), axis=0))
    x = tl.maximum((z - base) * slope, LEAST)
    weights = tl.exp2(x)
    mass, squares = _row_sums(_lane_sum(weights), _lane_sum(weights * weights))
    mean, second = _row_sums(_lane_sum(weights * x), _lane_sum(weights * x * x))
    mean, second = mean / mass, second / mass
    error = tl.minimum(tl.sqrt(squares) / mass, 0.4)  # twice the standard error of half the mass
    # No quantile is farther from the mean (Cantelli).
    reach = tl.sqrt(tl.maximum(second - mean * mean, 0.0) * (0.5 + error) / (0.5 - error)) / slope
    first, width = base + mean / slope - reach, 2.0 * reach
    last = first
    for _ in range(GUESSES):
        width *= 0.5
        above_first, above_last = _row_sums(
            _lane_sum(tl.where(z > first + width, weights, 0.0)),
            _lane_sum(tl.where(z > last + width, weights, 0.0)),
        )
        first += tl.where(above_first > mass * (HEAD_MASS - error), width, 0.0)
        last += tl.where(above_last > mass * (HEAD_MASS + error), width, 0.0)
    return _logit(_key(first + width, SHIFT), SHIFT), _logit(_key(last, SHIFT), SHIFT)


@triton.jit
def _edge(tries, place, around, far, high, low, SHIFT: tl.constexpr):
    """One of two logits between high and low, by turns interpolated in mass and even in keys."""
    first, last = _key(low, SHIFT) + 1, _key(high, SHIFT) - 1
    key = _key(high - (high - low) * tl.minimum(tl.maximum(far + around, 0.0), 1.0), SHIFT)
    even = last - ((last - first).to(tl.float32) * place).to(tl.int64)
    key = tl.where(tries % 2 == 0, key, even)
    return _logit(tl.minimum(tl.maximum(key, first), last), SHIFT)


@triton.jit
def _narrowed(edge_0, edge_1, mass_0, mass_1, more, half, high, low, above_high, above_low):
    """Bounds of the head's end and the mass above them, from masses above two edges."""
    mass_0, mass_1 = _row_sums(mass_0, mass_1)
    mass_0, mass_1 = more + mass_0, more + mass_1
    if (mass_1 > half) & (edge_1 >= low):
        low, above_low = edge_1, mass_1
    if (mass_0 > half) & (edge_0 >= low):
        low, above_low = edge_0, mass_0
    if (mass_0 <= half) & (edge_0 <= high):
        high, above_high = edge_0, mass_0
    if (mass_1 <= half) & (edge_1 <= high):
        high, above_high = edge_1, mass_1
    return high, low, above_high, above_low


@triton.jit
def _entry(z, place, SHIFT: tl.constexpr):
    """A logit and its place in its lane in one integer; half precision has SHIFT bits for it."""
    bits = z.to(tl.int32, bitcast=True)
    return bits | place if SHIFT else (bits.to(tl.int64) << 32) | place


@triton.jit
def _listed(near_ptr, at, end, SHIFT: tl.constexpr):
    """Logit and entry at a place of each list: −inf after its end."""
    entry = tl.load(near_ptr + at, mask=at < end, other=0)
    bits = entry >> SHIFT << SHIFT if SHIFT else entry >> 32
    return tl.where(at < end, bits.to(tl.int32).to(tl.float32, bitcast=True), -float("inf")), entry


@triton.jit
def _column(entry, lane, LANES: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr):
    place = (entry & ((1 << (SHIFT or 31)) - 1)).to(tl.int32)
    return place // WIDTH * (LANES * WIDTH) + lane * WIDTH + place % WIDTH


@triton.jit
def _gap(rows, column, z_t, chosen, sums):
    """|p_t − p_s| of the chosen tokens, 0 of others."""
    student_row, _, _, _, _, slope = rows
    base_s, sum_s, base_t, sum_t = sums
    z_s = tl.load(student_row[:, None] + column, mask=chosen, other=0.0).to(tl.float32)
    p_s = rounded(tl.exp2((z_s - base_s[:, None]) * slope) * (1.0 / sum_s[:, None]))
    p_t = rounded(tl.exp2((z_t - base_t[:, None]) * slope) * (1.0 / sum_t[:, None]))
    return tl.where(chosen, tl.abs(p_t - p_s), 0.0)


@triton.jit
def _adaptive(
    rows,  # (1,)
    near_ptr,  # `_entry` of the tokens near the end of the head, a list for each lane
    sums,
    edges,
    masses,  # (1, LANES): Σ exp((z_t − base_t) · slope) of the logits above an edge
    most,  # depth of the head's end, at most, in powers of 2
    BLOCK_V: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """g_head / (g_head + g_tail), KL(p_t ‖ p_s) and KL(p_s ‖ p_t) of one row, each (1,).

    The head is the longest prefix of the teacher's tokens in descending order that has at most half
    of the mass. The masses above two guessed edges bound its end, and the pass over the row lists
    the tokens between the bounds. Passes over the lists follow until one token is between the
    bounds or all tokens there have the same logit. The first of these, by index, still belong to
    the head.
    """
    student_row, teacher_row, columns, is_real, V, slope = rows
    base_s, sum_s, base_t, sum_t = sums
    base, total = tl.max(base_t, axis=0), tl.max(sum_t, axis=0)
    half = total * HEAD_MASS
    high, low, above_high, above_low = _narrowed(
        edges[0], edges[1], masses[0], masses[1], 0.0, half,
        base, _logit(_key(base - most / slope, SHIFT) - 1, SHIFT), total * 0.0, total,
    )  # fmt: skip

    log_ratio = _by_row(tl.log2(sum_t / sum_s))
    to_ps, to_pt = _by_row(1.0 / sum_s), _by_row(1.0 / sum_t)
    none, lane = tl.zeros([1, LANES], dtype=tl.float32), tl.arange(0, LANES)[None, :]
    g_head, g_all, forward_kl, reverse_kl, end = none, none, none, none, lane
    for done in range(0, V, BLOCK_V):
        start = _from_end(done, V, BLOCK_V)
        z_t = _load(teacher_row, start + columns, V, is_real)
        is_near = (z_t > low) & (z_t <= high)
        place = start // LANES + columns // (LANES * WIDTH) * WIDTH + columns % WIDTH
        entries, steps = _entry(z_t, place, SHIFT), tl.where(is_near, LANES, 0)
        for i in tl.static_range(WIDTH):  # a store of all would have another order of the threads
            chosen = tl.arange(0, WIDTH) == i
            step = tl.sum(tl.where(chosen, steps, 0), axis=3)
            at = end[:, None, :] + tl.cumsum(step, axis=1) - step
            entry = tl.sum(tl.where(chosen, entries, 0), axis=3)
            tl.store(near_ptr + at, entry, mask=step != 0)
            end += tl.sum(step, axis=1)
        z_s = _load(student_row, start + columns, V, is_real)
        x_s, x_t = (z_s - _by_row(base_s)) * slope, (z_t - _by_row(base_t)) * slope
        p_s, p_t = rounded(tl.exp2(x_s) * to_ps), rounded(tl.exp2(x_t) * to_pt)
        gap = tl.abs(p_t - p_s)
        to_teacher, to_student = _both_excesses(p_s, p_t, ((x_s - x_t) + log_ratio) * LOG_2)
        forward_kl += _lane_sum(to_teacher)
        reverse_kl += _lane_sum(to_student)
        g_all += _lane_sum(gap)
        g_head += _lane_sum(tl.where(z_t > high, gap, 0.0))
    tl.debug_barrier()  # other threads may read the lists
    longest = tl.max(tl.max(end - lane, axis=1), axis=0)

    more, tries = above_high, 0
    going = total > 0.0  # not in masked rows, nor with a NaN
    while going:
        lightest = tl.exp2((low - base) * slope)
        several = above_low - above_high > 1.9 * lightest
        going = several & (_key(high, SHIFT) - _key(low, SHIFT) > 1)
        if going:
            far = (half - above_high) / (above_low - above_high)
            edge_0 = _edge(tries, 1 / 3, -0.05, far, high, low, SHIFT)
            edge_1 = _edge(tries, 2 / 3, 0.05, far, high, low, SHIFT)
            mass_0, mass_1 = none, none
            for i in range(0, longest, LANES):
                z, _ = _listed(near_ptr, i + lane, end, SHIFT)
                weights = tl.exp2((z - base) * slope)
                mass_0 += tl.where(z > edge_0, weights, 0.0)
                mass_1 += tl.where(z > edge_1, weights, 0.0)
            high, low, above_high, above_low = _narrowed(
                edge_0, edge_1, mass_0, mass_1, more, half,
                high, low, above_high, above_low,
            )  # fmt: skip
            tries += 1

    # Tokens at the head's end that fit; the first token is always in the head.
    weight = tl.exp2((high - base) * slope)
    fit = ((half - above_high) / weight).to(tl.int32)
    fit = tl.where(above_high == 0.0, tl.maximum(fit, 1), fit)
    equal_end = lane
    for i in range(0, longest, LANES):
        z_t, entry = _listed(near_ptr, i + lane, end, SHIFT)
        column = _column(entry, lane, LANES, WIDTH, SHIFT)
        g_head += _gap(rows, column, z_t, z_t > high, sums)
        is_equal = (z_t == high) & (fit > 0)
        tl.store(near_ptr + equal_end, entry, mask=is_equal)  # at most where it was read
        equal_end += tl.where(is_equal, LANES, 0)
    longest = tl.max(tl.max(equal_end - lane, axis=1), axis=0)

    # The last of them, between two columns up to which there are fewer and at least as many.
    few, of_few, last = -1, 0, V - 1
    of_last = tl.maximum((above_low - above_high) / weight + 0.5, 0.0).to(tl.int32)
    turn = 0
    while (fit > 0) & (of_last > fit) & (last - few > 1):
        part = (fit - of_few).to(tl.float32) / (of_last - of_few)
        middle = tl.where(turn % 4 == 3, 0.5, part) * (last - few)
        middle = few + tl.minimum(tl.maximum(middle.to(tl.int32), 1), last - few - 1)
        count = tl.zeros([1, LANES], dtype=tl.int32)
        for i in range(0, longest, LANES):
            z_t, entry = _listed(near_ptr, i + lane, equal_end, SHIFT)
            before = (z_t == high) & (_column(entry, lane, LANES, WIDTH, SHIFT) <= middle)
            count += before.to(tl.int32)
        of_middle = tl.sum(tl.sum(count, axis=1), axis=0)
        if of_middle < fit:
            few, of_few = middle, of_middle
        else:
            last, of_last = middle, of_middle
        turn += 1
    for i in range(0, longest, LANES):
        z_t, entry = _listed(near_ptr, i + lane, equal_end, SHIFT)
        column = _column(entry, lane, LANES, WIDTH, SHIFT)
        chosen = (z_t == high) & (column <= last)
        g_head += _gap(rows, column, high, chosen, sums)
    of_head, of_all = _row_sums(tl.join(g_head, forward_kl), tl.join(g_all, reverse_kl))
    head, forward_kl = tl.split(of_head)
    every, reverse_kl = tl.split(of_all)
    share = tl.where(every > 0.0, tl.minimum(head / every, 1.0), 0.5)
    return share, forward_kl, reverse_kl


@triton.jit
def _write_gradient(
    rows,
    dstudent_row,
    exists,
    coefficient,
    by,  # factor of the gradient with respect to the logits over τ, 0 for masked rows
    sums,
    expectation,
    share,
    DIVERGENCE: tl.constexpr,
    IS_HOT: tl.constexpr,
    DESCENDS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write the gradients of rows from their statistics, each (BLOCK_R, 1, 1, 1)."""
    student_row, teacher_row, columns, is_real, V, slope = rows
    base_s, sum_s, base_t, sum_t = sums
    to_student, to_teacher = by / sum_s, by / sum_t
    log_ratio = tl.log2(sum_t / sum_s)
    log_s, log_t = tl.log2(sum_s), tl.log2(sum_t)
    for done in range(0, V, BLOCK_V):
        start = done
        if DESCENDS:
            start = _from_end(done, V, BLOCK_V)
        z_s = _load_last(student_row, start + columns, V, is_real)
        z_t = _load_last(teacher_row, start + columns, V, is_real)
        x_s, x_t = (z_s - base_s) * slope, (z_t - base_t) * slope
        if DIVERGENCE == "forward_kl":
            grad = tl.exp2(x_s) * to_student - tl.exp2(x_t) * to_teacher
        elif (
            DIVERGENCE == "total_variation"
            or DIVERGENCE == "negative_log_acceptance"
            or DIVERGENCE == "lk"
        ):
            p_s, p_t = tl.exp2(x_s - log_s), tl.exp2(x_t - log_t)  # compared as for the loss
            grad = p_s * (expectation - _below(p_s, p_t))
            if DIVERGENCE == "negative_log_acceptance":
                grad = grad * share
            if DIVERGENCE == "lk":
                grad = share * (p_s - p_t) + (1.0 - share) * grad
            grad = grad * by
        elif (
            DIVERGENCE == "skew_kl"
            or DIVERGENCE == "skew_reverse_kl"
            or DIVERGENCE == "generalized_js"
        ):
            log_ps, log_pt = tl.maximum(x_s - log_s, LEAST), tl.maximum(x_t - log_t, LEAST)
            ratio = log_ps - _log_mixture(log_ps, log_pt, coefficient, DIVERGENCE)  # log2(p_s/m)
            if DIVERGENCE == "skew_kl":
                grad = tl.exp2(log_ps) * expectation
                grad -= tl.exp2(log_pt) * ((1.0 - coefficient) * tl.exp2(ratio))
            elif DIVERGENCE == "skew_reverse_kl":
                ratio = ratio * LOG_2 - coefficient * tl.exp2(ratio)
                grad = tl.exp2(log_ps) * (ratio - expectation)
            else:
                grad = tl.exp2(log_ps) * ((1.0 - coefficient) * (ratio * LOG_2 - expectation))
            grad = grad * by
        elif DIVERGENCE == "js" and not IS_HOT:
            log_ps, log_pt = tl.maximum(x_s - log_s, LEAST), tl.maximum(x_t - log_t, LEAST)
            gap = log_pt - log_ps
            # log2(p_s/m) − its mean
            ratio = _above_mean(tl.abs(gap)) - (tl.maximum(gap, 0.0) + expectation)
            grad = tl.exp2(log_ps) * (0.5 * LOG_2 * by) * ratio
        else:
            ratio = ((x_s - x_t) + log_ratio) * LOG_2  # log(p_s/p_t)
            if DIVERGENCE == "js":
                ratio = 0.5 * (-_log_mean(-ratio) - expectation)  # log(p_s/m) − its mean
            else:
                ratio = ratio - expectation
            w_s = tl.exp2(x_s) * to_student
            grad = _times(w_s, ratio)
            if DIVERGENCE == "adaptive_kl" or DIVERGENCE == "mixed":
                plain = w_s - tl.exp2(x_t) * to_teacher
                grad = _times(share, plain) + _times(1.0 - share, grad)
        tl.store(
            dstudent_row + start + columns,
            grad,
            mask=exists & (start + columns < V),
            cache_modifier=".cs",
        )


@triton.jit
def _first_read(
    rows,
    edges,  # two logits, for adaptive_kl
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LANES: tl.constexpr,
    DIVERGENCE: tl.constexpr,
):
    """Maxima (BLOCK_R,) of student and teacher, and sums (BLOCK_R, LANES) of 2^x below them.

    Then Σ 2^{x_t} (x_t − x_s) of a KL (for reverse_kl with s and t exchanged), or Σ 2^{x_t} of the
    teacher's logits above each edge. Each lane has its own maximum until the end of the row, so
    threads do not wait for each other within it.
    """
    student_row, teacher_row, columns, is_real, V, slope = rows
    top_s = tl.full([BLOCK_R, LANES], -float("inf"), tl.float32)
    top_t = tl.full([BLOCK_R, LANES], -float("inf"), tl.float32)
    sum_s = tl.zeros([BLOCK_R, LANES], dtype=tl.float32)
    sum_t = tl.zeros([BLOCK_R, LANES], dtype=tl.float32)
    cross = tl.zeros([BLOCK_R, LANES], dtype=tl.float32)
    mass_0, mass_1 = cross, cross
    for start in range(0, V, BLOCK_V):
        z_s = _load(student_row, start + columns, V, is_real)
        z_t = _load(teacher_row, start + columns, V, is_real)
        new_s = tl.maximum(top_s, _lane_max(z_s))
        new_t = tl.maximum(top_t, _lane_max(z_t))
        shift_s, shift_t = _shift(top_s, new_s) * slope, _shift(top_t, new_t) * slope
        top_s, top_t = new_s, new_t
        x_s = (z_s - _base(top_s)[:, None, :, None]) * slope
        x_t = (z_t - _base(top_t)[:, None, :, None]) * slope
        w_s, w_t = tl.exp2(x_s), tl.exp2(x_t)
        shrink_s, shrink_t = tl.exp2(shift_s), tl.exp2(shift_t)
        if DIVERGENCE == "forward_kl":
            cross = _times(shrink_t, cross + sum_t * (shift_t - shift_s))
            cross += _lane_sum(_times(w_t, x_t - x_s))
        if DIVERGENCE == "reverse_kl":
            cross = _times(shrink_s, cross + sum_s * (shift_s - shift_t))
            cross += _lane_sum(_times(w_s, x_s - x_t))
        if DIVERGENCE == "adaptive_kl":
            mass_0 = mass_0 * shrink_t + _lane_sum(tl.where(z_t > edges[0], w_t, 0.0))
            mass_1 = mass_1 * shrink_t + _lane_sum(tl.where(z_t > edges[1], w_t, 0.0))
        sum_s = sum_s * shrink_s + _lane_sum(w_s)
        sum_t = sum_t * shrink_t + _lane_sum(w_t)

    # The lanes are rescaled to the row's maximum.
    if DIVERGENCE == "adaptive_kl":  # its loop over rows keeps registers for each reduction
        row_s, row_t = tl.split(tl.max(tl.join(top_s, top_t), axis=1))
    else:
        row_s, row_t = tl.max(top_s, axis=1), tl.max(top_t, axis=1)
    shift_s = _shift(top_s, row_s[:, None]) * slope
    shift_t = _shift(top_t, row_t[:, None]) * slope
    shrink_s, shrink_t = tl.exp2(shift_s), tl.exp2(shift_t)
    if DIVERGENCE == "forward_kl":
        cross = _times(shrink_t, cross + sum_t * (shift_t - shift_s))
    if DIVERGENCE == "reverse_kl":
        cross = _times(shrink_s, cross + sum_s * (shift_s - shift_t))
    sum_s, sum_t = rounded(sum_s * shrink_s), rounded(sum_t * shrink_t)
    return (
        _base(row_s), _base(row_t), sum_s, sum_t, cross, mass_0 * shrink_t, mass_1 * shrink_t,
    )  # fmt: skip


@triton.jit
def _second_read(
    rows,
    coefficient,
    sums,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LANES: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    IS_HOT: tl.constexpr,
):
    """Loss of rows with known normalisers, and the mean and the share of their gradients."""
    student_row, teacher_row, columns, is_real, V, slope = rows
    base_s, total_s, base_t, total_t = sums
    share = tl.zeros([BLOCK_R], dtype=tl.float32)
    to_student = tl.zeros([BLOCK_R, LANES], dtype=tl.float32)
    to_teacher = tl.zeros([BLOCK_R, LANES], dtype=tl.float32)
    log_s, log_t = _by_row(tl.log2(total_s)), _by_row(tl.log2(total_t))
    log_ratio = _by_row(tl.log2(total_t / total_s))
    weighed = tl.zeros([BLOCK_R, LANES], dtype=tl.float32)
    distance = tl.zeros([BLOCK_R, LANES], dtype=tl.float32)
    overlap = tl.zeros([BLOCK_R, LANES], dtype=tl.float32)
    for done in range(0, V, BLOCK_V):
        start = _from_end(done, V, BLOCK_V)
        z_s = _load(student_row, start + columns, V, is_real)
        z_t = _load(teacher_row, start + columns, V, is_real)
        x_s, x_t = (z_s - _by_row(base_s)) * slope, (z_t - _by_row(base_t)) * slope
        p_s, p_t = tl.exp2(x_s - log_s), tl.exp2(x_t - log_t)
        r = ((x_s - x_t) + log_ratio) * LOG_2  # log(p_s/p_t)
        if IS_HOT:
            if DIVERGENCE == "forward_kl":
                to_teacher += _lane_sum(_excess(p_t, p_s, r))
            elif DIVERGENCE == "reverse_kl":
                to_student += _lane_sum(_excess(p_s, p_t, -r))
                weighed += _lane_sum(_times(p_s, r))
            else:
                middle, log_middle = (p_s + p_t) * 0.5, _log_mean(-r)  # log(m/p_s)
                to_student += _lane_sum(_excess(p_s, middle, log_middle))
                to_teacher += _lane_sum(_excess(p_t, middle, _log_mean(r)))
                weighed -= _lane_sum(_times(p_s, log_middle))
        elif DIVERGENCE == "mixed":
            of_teacher, of_student = _both_excesses(p_s, p_t, r)
            to_student += _lane_sum(of_student)
            to_teacher += _lane_sum(of_teacher)
        elif (
            DIVERGENCE == "total_variation"
            or DIVERGENCE == "negative_log_acceptance"
            or DIVERGENCE == "lk"
        ):
            weighed += _lane_sum(p_s * _below(p_s, p_t))
            distance += _lane_sum(tl.abs(p_t - p_s))
            overlap += _lane_sum(tl.where(p_s < p_t, p_s, p_t))
            if DIVERGENCE == "lk":
                to_teacher += _lane_sum(_excess(p_t, p_s, r))
        elif (
            DIVERGENCE == "skew_kl"
            or DIVERGENCE == "skew_reverse_kl"
            or DIVERGENCE == "generalized_js"
        ):
            log_ps, log_pt = tl.maximum(x_s - log_s, LEAST), tl.maximum(x_t - log_t, LEAST)
            log_m = _log_mixture(log_ps, log_pt, coefficient, DIVERGENCE)
            p_s, p_t, m = tl.exp2(log_ps), tl.exp2(log_pt), tl.exp2(log_m)
            ratio = log_ps - log_m  # log2(p_s/m)
            if DIVERGENCE != "skew_kl":
                to_student += _lane_sum(_excess(p_s, m, ratio * -LOG_2))
            if DIVERGENCE != "skew_reverse_kl":
                to_teacher += _lane_sum(_excess(p_t, m, (log_m - log_pt) * LOG_2))
            if DIVERGENCE == "skew_kl":
                weighed += _lane_sum(p_t * ((1.0 - coefficient) * tl.exp2(ratio)))
            elif DIVERGENCE == "skew_reverse_kl":
                weighed += _lane_sum(p_s * (ratio * LOG_2 - coefficient * tl.exp2(ratio)))
            else:
                weighed += _lane_sum(p_s * (ratio * LOG_2))
        else:
            log_ps, log_pt = tl.maximum(x_s - log_s, LEAST), tl.maximum(x_t - log_t, LEAST)
            p_s, p_t, gap = tl.exp2(log_ps), tl.exp2(log_pt), log_pt - log_ps
            above = _above_mean(tl.abs(gap))
            to_student += _lane_sum(p_s * (above - tl.maximum(gap, 0.0)))
            to_teacher += _lane_sum(p_t * (above + tl.minimum(gap, 0.0)))
    expectation = tl.sum(to_student, axis=1)
    of_teacher = tl.sum(to_teacher, axis=1)
    loss = expectation + of_teacher
    if DIVERGENCE == "js" and not IS_HOT:
        # The maxima hide a NaN.
        expectation += 0.0 * (total_s + total_t)
        loss = 0.5 * LOG_2 * tl.sum(to_student + to_teacher, axis=1) + 0.0 * expectation
    elif DIVERGENCE == "js":
        loss *= 0.5
    elif DIVERGENCE == "generalized_js":
        loss = coefficient * of_teacher + (1.0 - coefficient) * expectation
    elif DIVERGENCE == "mixed":
        share += coefficient
        loss = coefficient * of_teacher + (1.0 - coefficient) * expectation
    elif DIVERGENCE == "total_variation":
        loss = tl.sum(distance, axis=1) * 0.5
    elif DIVERGENCE == "negative_log_acceptance":
        accepted = tl.sum(overlap, axis=1)
        share = tl.where(accepted == 0.0, 0.0, 1.0 / accepted)
        # Not only the logarithm: the minimum of two probabilities hides a NaN.
        loss = tl.sum(distance, axis=1) * 0.0 - tl.log(accepted)
    elif DIVERGENCE == "lk":
        share = tl.exp(-coefficient * tl.sum(overlap, axis=1))
        loss = _times(share, of_teacher) + (1.0 - share) * (tl.sum(distance, axis=1) * 0.5)
    if IS_HOT or (
        DIVERGENCE == "total_variation"
        or DIVERGENCE == "negative_log_acceptance"
        or DIVERGENCE == "lk"
        or DIVERGENCE == "skew_kl"
        or DIVERGENCE == "skew_reverse_kl"
        or DIVERGENCE == "generalized_js"
    ):
        # The gradient subtracts this mean from values with the same rounding.
        expectation = tl.sum(weighed, axis=1)
    if DIVERGENCE == "skew_kl" or DIVERGENCE == "skew_reverse_kl" or DIVERGENCE == "generalized_js":
        # The maxima hide a NaN.
        hidden = 0.0 * (tl.log(total_s) + tl.log(total_t))
        loss, expectation = loss + hidden, expectation + hidden
    return loss, expectation, share


@triton.jit
def _store(
    rows,
    pointers,  # divisor, factors, losses, gradients
    row,
    exists,
    numbers,  # the factors' stride, scale, factor, coefficient
    present,  # gradient, divided, weighted
    results,  # loss, expectation, share
    sums,
    DIVERGENCE: tl.constexpr,
    IS_HOT: tl.constexpr,
    DESCENDS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store losses of rows and, if asked for, their gradients."""
    _, _, _, is_real, V, _ = rows
    divisor_ptr, factors_ptr, loss_ptr, dstudent_ptr = pointers
    stride_factors, scale, factor, coefficient = numbers
    gradient, divided, weighted = present
    loss, expectation, share = results
    base_s, total_s, base_t, total_t = sums
    tl.store(loss_ptr + row, tl.where(is_real, loss * scale, 0.0), mask=exists)
    if gradient != 0:
        by = tl.load(factors_ptr + row * stride_factors, is_real & (weighted != 0), other=1.0)
        by = by * factor / tl.load(divisor_ptr, divided != 0, other=1.0)
        _write_gradient(
            rows, _by_row(dstudent_ptr + row * V), _by_row(exists), coefficient,
            # In masked rows every value is finite and multiplied by 0.
            _by_row(tl.where(is_real, by, 0.0)),
            (_by_row(base_s), _by_row(tl.where(is_real, total_s, 1.0)),
             _by_row(base_t), _by_row(tl.where(is_real, total_t, 1.0))),
            _by_row(tl.where(is_real, expectation, 0.0)),
            _by_row(tl.where(is_real, share, 0.0)),
            DIVERGENCE, IS_HOT, DESCENDS, BLOCK_V,
        )  # fmt: skip


@triton.jit(do_not_specialize=["R", "stride_factors", "gradient", "divided", "weighted"])
def soft_target_kernel(
    student_ptr,
    teacher_ptr,
    mask_ptr,
    log_mass_ptr,  # (R,): of the V tokens, if the teacher has more
    divisor_ptr,  # (), read if ``divided``
    factors_ptr,  # (R,) or (), of the rows' gradients; read if ``weighted``
    loss_ptr,  # (R,)
    dstudent_ptr,  # (R, V), written if ``gradient``; may be the student's logits
    R,
    V,
    stride_student,
    stride_teacher,
    stride_factors,
    slope,  # log2(e)/τ: all exponentials are powers of 2
    scale,
    factor,  # of the gradient
    coefficient,  # of the divergence
    gradient,
    divided,
    weighted,
    DIVERGENCE: tl.constexpr,
    IS_HOT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_MASS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Every divergence but adaptive_kl."""
    columns = _columns(BLOCK_V // (LANES * WIDTH), LANES, WIDTH)
    ONE_PASS: tl.constexpr = (
        DIVERGENCE == "forward_kl" or DIVERGENCE == "reverse_kl"
    ) and not IS_HOT
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    exists = row < R
    is_real = exists
    if HAS_MASK:
        is_real = is_real & (tl.load(mask_ptr + row, mask=is_real, other=0) != 0)
    student_row = student_ptr + row * stride_student
    teacher_row = teacher_ptr + row * stride_teacher
    rows = (student_row, teacher_row, columns, is_real, V, slope)
    base_s, base_t, sum_s, sum_t, cross, _, _ = _first_read(
        rows, (0.0, 0.0), BLOCK_R, BLOCK_V, LANES, DIVERGENCE
    )
    total_s, total_t = tl.sum(sum_s, axis=1), tl.sum(sum_t, axis=1)  # (BLOCK_R,)
    if HAS_MASS:  # the sum over all tokens of the teacher
        total_t = total_t / tl.exp(tl.load(log_mass_ptr + row, mask=is_real, other=0.0))
    sums = (base_s, total_s, base_t, total_t)
    if ONE_PASS:
        expectation = tl.zeros([BLOCK_R], dtype=tl.float32)
        share = tl.zeros([BLOCK_R], dtype=tl.float32)
        if DIVERGENCE == "forward_kl":
            loss = LOG_2 * (tl.sum(cross, axis=1) / total_t) + tl.log(total_s / total_t)
        else:
            loss = LOG_2 * (tl.sum(cross, axis=1) / total_s) + tl.log(total_t / total_s)
            expectation = loss
    else:
        loss, expectation, share = _second_read(
            rows, coefficient, sums, BLOCK_R, BLOCK_V, LANES, DIVERGENCE, IS_HOT
        )
    pointers = (divisor_ptr, factors_ptr, loss_ptr, dstudent_ptr)
    numbers, present = (stride_factors, scale, factor, coefficient), (gradient, divided, weighted)
    _store(
        rows, pointers, row, exists, numbers, present, (loss, expectation, share), sums,
        DIVERGENCE, IS_HOT,
        ONE_PASS,  # the pass before ended at the last block
        BLOCK_V,
    )  # fmt: skip


@triton.jit(do_not_specialize=["R", "stride_factors", "gradient", "divided", "weighted"])
def adaptive_kl_kernel(
    student_ptr,
    teacher_ptr,
    mask_ptr,
    divisor_ptr,  # these as in `soft_target_kernel`
    factors_ptr,
    loss_ptr,
    dstudent_ptr,
    near_ptr,  # (programs, blocks · BLOCK_V)
    R,
    V,
    stride_student,
    stride_teacher,
    stride_factors,
    slope,
    scale,
    factor,
    most,  # depth of the head's end, at most, in powers of 2
    gradient,
    divided,
    weighted,
    HAS_MASK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Programs have lists of their own, and several rows, one at a time."""
    columns = _columns(BLOCK_V // (LANES * WIDTH), LANES, WIDTH)
    DIVERGENCE: tl.constexpr = "adaptive_kl"
    of_float16: tl.constexpr = 13 if teacher_ptr.dtype.element_ty == tl.float16 else 0
    SHIFT: tl.constexpr = 16 if teacher_ptr.dtype.element_ty == tl.bfloat16 else of_float16
    of_program = tl.program_id(0).to(tl.int64) * tl.cdiv(V, BLOCK_V) * BLOCK_V
    for first in range(tl.program_id(0), R, tl.num_programs(0)):
        row = first + tl.arange(0, 1).to(tl.int64)
        exists = row < R
        is_real = exists
        if HAS_MASK:
            is_real = is_real & (tl.load(mask_ptr + row, mask=is_real, other=0) != 0)
        student_row = student_ptr + row * stride_student
        teacher_row = teacher_ptr + row * stride_teacher
        rows = (student_row, teacher_row, columns, is_real, V, slope)
        edges = _guesses(rows, BLOCK_V, LANES, WIDTH, SHIFT)
        base_s, base_t, sum_s, sum_t, _, mass_0, mass_1 = _first_read(
            rows, edges, 1, BLOCK_V, LANES, DIVERGENCE
        )
        sums = (base_s, tl.sum(sum_s, axis=1), base_t, tl.sum(sum_t, axis=1))
        share, forward_kl, expectation = _adaptive(
            rows, near_ptr + of_program, sums, edges, (mass_0, mass_1), most, BLOCK_V, LANES,
            WIDTH, SHIFT,
        )  # fmt: skip
        loss = _times(share, forward_kl) + _times(1.0 - share, expectation)
        pointers = (divisor_ptr, factors_ptr, loss_ptr, dstudent_ptr)
        numbers, present = (stride_factors, scale, factor, 0.0), (gradient, divided, weighted)
        _store(
            rows, pointers, row, exists, numbers, present, (loss, expectation, share), sums,
            DIVERGENCE, False, False, BLOCK_V,
        )  # fmt: skip


def _soft_target_shapes(student, teacher, mask, weights, denominator, upstream, reduction, *rest):
    rows = () if upstream is None and reduction != "none" else student.shape[:1]
    loss = student.new_empty(rows, dtype=torch.float32)
    return [loss, student.new_empty(student.shape)] if rest[-1] else [loss]


@operator(_soft_target_shapes)
def soft_targets(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    denominator: Tensor | None,
    upstream: Tensor | None,
    reduction: str,
    divergence: str,
    temperature: float,
    scale: float,
    coefficient: float,
    gradient: bool,
) -> list[Tensor]:
    """Reduced loss of logits (R, V), and with ``gradient`` its gradient (R, V).

    The mask (R,) is bool. Weights (R,) are factors of the rows' losses, and the 0-d denominator
    replaces the number of real rows as the divisor of "batchmean"; both are float32. With
    ``upstream``, () or (R,) for "none", the gradient is multiplied by it, and the first result has
    no meaning.
    """
    loss = torch.empty(len(student), dtype=torch.float32, device=student.device)
    divisor, number = divisor_of(student, mask, denominator, reduction)
    dstudent = student.new_empty(student.shape) if gradient else None
    factors = weights
    if upstream is not None:
        factors = upstream if weights is None else upstream * weights
    fill(
        student, teacher, mask, divisor, factors, loss, dstudent, divergence, temperature, scale,
        scale / temperature / number, coefficient, temperature > HOT,
    )  # fmt: skip
    if upstream is None:
        loss = reduced(loss, weights, divisor, number, reduction)
    return [loss] if dstudent is None else [loss, dstudent]


def divisor_of(
    student: Tensor, mask: Tensor | None, denominator: Tensor | None, reduction: str
) -> tuple[Tensor | None, int]:
    """Divisor of the sum over rows: a 0-d float32 tensor, or None, and a number."""
    if reduction != "batchmean" or denominator is not None:
        return denominator, 1
    return counted(mask, len(student))


def reduced(
    loss: Tensor, weights: Tensor | None, divisor: Tensor | None, number: int, reduction: str
) -> Tensor:
    """The rows' losses (R,) times their weights, or the sum of these over the divisor."""
    loss = loss if weights is None else loss * weights
    return loss if reduction == "none" else summed(loss, divisor, number)


def _rows_shapes(student, *rest):
    return student.new_empty(student.shape[0], dtype=torch.float32)


@operator(_rows_shapes, mutates=[0])
def soft_target_rows(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    factors: Tensor | None,
    log_mass: Tensor | None,
    divergence: str,
    temperature: float,
    scale: float,
    factor: float,
    coefficient: float,
    gradient: bool,
) -> Tensor:
    """Loss (R,) of every row; with ``gradient`` the gradients overwrite the student's logits.

    The arguments are those of `fill`.
    """
    loss = torch.empty(len(student), dtype=torch.float32, device=student.device)
    fill(
        student, teacher, mask, None, factors, loss, student if gradient else None, divergence,
        temperature, scale, factor, coefficient, temperature > HOT, log_mass,
    )  # fmt: skip
    return loss


def fill(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    divisor: Tensor | None,
    factors: Tensor | None,
    loss: Tensor,
    dstudent: Tensor | None,
    divergence: str,
    temperature: float,
    scale: float,
    factor: float,
    coefficient: float,
    is_hot: bool,
    log_mass: Tensor | None = None,
) -> None:
    """Write the rows' losses times ``scale``, and, where there is ``dstudent``, their gradients.

    These are multiplied by ``factor`` and factors (R,) or (), divided by ``divisor`` (), and may
    overwrite the student's logits: a row is read before, and a tile of it again as it is written.

    ``log_mass`` (R,) of float32: of these tokens, for a teacher with more tokens and a divergence
    of Σ min(p_t, p_s); total variation then lacks half the mass of the other tokens. ``is_hot``:
    the temperature is above HOT, also if the logits have been divided by it.
    """
    R, V = student.shape
    if dstudent is not None:
        assert dstudent.is_contiguous(), "the kernel finds the rows of dstudent by V alone"
    if R == 0:
        return
    aligned = all(size % 16 == 0 for size in (V, student.stride(0), teacher.stride(0)))
    config = blocks(V, divergence, student.element_size(), aligned)
    # One compiled form with and without what these hold: in its place another is not read.
    pointers = (
        loss if divisor is None else divisor,
        loss if factors is None else factors,
        loss,
        student if dstudent is None else dstudent,
    )
    sizes = (
        R, V, student.stride(0), teacher.stride(0),
        0 if factors is None or factors.dim() == 0 else factors.stride(0),
        LOG2_E / temperature, scale, factor,
    )  # fmt: skip
    present = int(dstudent is not None), int(divisor is not None), int(factors is not None)
    sides, has_mask = (student, teacher, bytes_of(mask)), mask is not None
    if divergence == "adaptive_kl":
        assert config.pop("BLOCK_R") == 1
        programs = min(R, multiprocessors(student.device) * (32 // config["num_warps"]))
        near = torch.empty(
            programs, cdiv(V, config["BLOCK_V"]) * config["BLOCK_V"], device=student.device,
            dtype=torch.int64 if teacher.itemsize == 4 else torch.int32,
        )  # fmt: skip
        # At most V tokens hold half the mass, so the largest of them is at least 1/2V.
        values = *sides, *pointers, near, *sizes, math.log2(V) + 1.5, *present
        launch_kernel(adaptive_kl_kernel, (programs,), *values, HAS_MASK=has_mask, **config)
        return
    values = *sides, log_mass, *pointers, *sizes, coefficient, *present
    launch_kernel(
        soft_target_kernel,
        (cdiv(R, config["BLOCK_R"]),),
        *values,
        DIVERGENCE=divergence,
        IS_HOT=is_hot and divergence in WITH_HOT_FORM,
        HAS_MASK=has_mask,
        HAS_MASS=log_mass is not None,
        **config,
    )
