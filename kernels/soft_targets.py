"""Soft targets: divergence of softened teacher and student logits, and its gradient.

Data path. Forward: a program reads its rows in blocks of the vocabulary. Each thread keeps running
maxima, sums of exponentials and the Kullback-Leibler sum of the logits that it reads, rescaled when
its maximum grows; at the end of the row the threads combine these. So one read of student and
teacher logits is enough for either KL. All other divergences need the normalisers first and read
the logits twice; adaptive KL determines its head in between, by two histograms of the teacher's
logits. Each row stores its loss and six numbers for its gradient; one program adds the losses.
Backward: one read of the logits, and one write of the gradient, multiplied by the upstream
gradient. No other tensor has the size of the logits. Logits that are computed from hidden states in
chunks are overwritten by their gradient.

Exponentials are powers of 2, of (z − max)·log2(e)/τ. A fused multiply-add would save the
subtraction, but the exponent of the maximum itself would be a rounding error instead of 0.

Reads of the logits, forward + backward:

    forward_kl, reverse_kl    1 + 1 of student and teacher
    the same above HOT        2 + 1 of student and teacher
    adaptive_kl               2 + 1 of student and teacher, and 2 of the teacher
    all others                2 + 1 of student and teacher

Above the temperature HOT the losses are much smaller than the terms of a sum without normalisers:
multiplied by τ², the sum's rounding error would be as large as the loss.

With E = R·V elements of s bytes a KL moves 5Es bytes, adaptive_kl 9Es, all others 7Es. About 20E
operations for a KL, 40E for js. Bound by bandwidth, except for adaptive_kl's counting.

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

from fastkd._core.operator import operator
from fastkd.kernels.launch import cdiv
from fastkd.kernels.rounding import rounded

STATS = tl.constexpr(6)
HEAD_MASS = tl.constexpr(0.5)
LOG_2 = tl.constexpr(0.6931471805599453)
LOG2_E = 1.4426950408889634
BINS = tl.constexpr(256)  # of a histogram: one per thread
# More than the difference of two sums of rounded masses.
SLACK = tl.constexpr(1e-5)
HOT = 10.0  # above this temperature losses are summed from terms as small as the loss
# Divergences computed in one read of the logits, and divergences with another form above HOT.
ONE_READ = ("forward_kl", "reverse_kl")
WITH_HOT_FORM = (*ONE_READ, "js")
OF_MIXTURE = ("generalized_js", "skew_kl", "skew_reverse_kl")


def blocks(V: int, divergence: str) -> dict[str, int]:
    """Block sizes and warps for a vocabulary of V.

    There are only two shapes, for few compiled forms. Long rows are read in blocks of 4096 student
    and teacher logits, 16 per thread: enough loads in flight, and few enough registers for several
    programs per multiprocessor. Divergences with more intermediate values read half as many. Up to
    1024 tokens, 16 rows share a program; without a bound on its registers the assembler uses 80 and
    spills one value.
    """
    if V > 1024:
        block_v = 4096 if divergence in ONE_READ else 2048
        return {"BLOCK_R": 1, "BLOCK_V": block_v, "num_warps": 8}
    return {"BLOCK_R": 16, "BLOCK_V": 128, "num_warps": 8, "maxnreg": 168}


def forward_blocks(V: int, divergence: str, element_size: int, aligned: bool) -> dict[str, int]:
    """`blocks`, and the logits of a thread: WIDTH at a time, of one lane in each part of a block.

    A thread loads 16 bytes of aligned rows, otherwise one logit next to its neighbour's, and 4
    logits of short rows, to save registers. Short rows have one part and share 256 lanes;
    adaptive_kl has one row per program.
    """
    config = blocks(V, divergence)
    if V > 1024:
        if divergence in OF_MIXTURE:  # without a bound the assembler uses 64 and spills
            config["maxnreg"] = 128
        return config | {"LANES": 256, "WIDTH": 16 // element_size if aligned else 1}
    if divergence == "adaptive_kl":
        return config | {"BLOCK_R": 1, "BLOCK_V": 1024, "LANES": 256, "WIDTH": 4 if aligned else 1}
    return config | {"BLOCK_R": 8, "LANES": 32, "WIDTH": 4 if aligned else 1}


@triton.jit
def _load(row_ptr, column, V, is_real):
    """Logits (BLOCK_R, PARTS, LANES, WIDTH) in fp32, −inf outside the vocabulary."""
    inside = is_real[:, None, None, None] & (column < V)
    z = tl.load(row_ptr[:, None, None, None] + column, mask=inside, other=-float("inf"))
    return z.to(tl.float32)


@triton.jit
def _columns(PARTS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Column indices (1, PARTS, LANES, WIDTH) in a block; a lane's WIDTH columns are adjacent."""
    part = tl.arange(0, PARTS)[None, :, None, None] * (LANES * WIDTH)
    return part + (tl.arange(0, LANES) * WIDTH)[None, None, :, None] + tl.arange(0, WIDTH)


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
def _mixture(p_s, p_t, coefficient, DIVERGENCE: tl.constexpr):
    """Mixture m of the student's and the teacher's distribution."""
    if DIVERGENCE == "skew_reverse_kl":
        return coefficient * p_s + (1.0 - coefficient) * p_t
    return coefficient * p_t + (1.0 - coefficient) * p_s


@triton.jit
def _depth(row_ptr, column, V, is_real, base, slope):
    """Depth of the logits (BLOCK_V,) of a row below its maximum, in powers of 2."""
    z = tl.load(row_ptr + column, mask=is_real & (column < V), other=-float("inf"))
    return (base - z.to(tl.float32)) * slope


@triton.jit
def _bin(depth, start, width):
    """Bin of each depth, counted from ``start``; the last bin also holds all greater depths."""
    return tl.minimum(tl.maximum(depth - start, 0.0) / width, BINS - 1).to(tl.int32)


@triton.jit
def _adaptive(
    student_row,
    teacher_row,
    members_ptr,  # (2, BINS): depth and gap of the entries that may be the head's end
    is_real,
    V,
    base_s,
    sum_s,
    base_t,
    sum_t,
    slope,
    width,  # of a bin
    BLOCK_V: tl.constexpr,
):
    """g_head / (g_head + g_tail), KL(p_t ‖ p_s) and KL(p_s ‖ p_t) of one row.

    The head is the longest prefix of the teacher's tokens in descending order that has at most half
    of the mass. It is found by counting. A histogram over the depth below the maximum bounds the
    mass of every prefix, which leaves few bins for the head's end. A second histogram divides these
    bins by BINS again. The remaining candidates for the end, a thousandth apart, are few and are
    ranked exactly; more than BINS of them are ranked by index, like equal ones.
    """
    half = sum_t * HEAD_MASS
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], dtype=tl.int32)
    for start in range(0, V, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        depth = _depth(teacher_row, column, V, is_real, base_t, slope)
        inside = depth < BINS * width
        counts += tl.histogram(_bin(tl.where(inside, depth, 0.0), 0.0, width), BINS, inside)
    most = tl.cumsum(counts * tl.exp2(-bins * width), axis=0)
    least = tl.cumsum(counts * tl.exp2(-(bins + 1) * width), axis=0)
    first = tl.sum((most * (1.0 + SLACK) <= half).to(tl.int32), axis=0)
    last = tl.sum((least * (1.0 - SLACK) <= half).to(tl.int32), axis=0)
    first, last = tl.minimum(first, BINS - 1), tl.minimum(last, BINS - 1)

    from_depth = first * width
    narrow = (last + 1 - first) * width / BINS
    counts = tl.zeros([BINS], dtype=tl.int32)
    above = tl.zeros([BLOCK_V], dtype=tl.float32)
    for start in range(0, V, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        depth = _depth(teacher_row, column, V, is_real, base_t, slope)
        inside = depth < BINS * width
        depth = tl.where(inside, depth, 0.0)
        bin = _bin(depth, 0.0, width)
        above += tl.where(inside & (bin < first), tl.exp2(-depth), 0.0)
        between = inside & (bin >= first) & (bin <= last)
        counts += tl.histogram(_bin(depth, from_depth, narrow), BINS, between)
    surely = tl.sum(above, axis=0)
    lightest = counts * tl.exp2(-(from_depth + (bins + 1) * narrow))
    most = surely + tl.cumsum(counts * tl.exp2(-(from_depth + bins * narrow)), axis=0)
    least = surely + tl.cumsum(lightest, axis=0)
    low = tl.minimum(tl.sum((most * (1.0 + SLACK) <= half).to(tl.int32), axis=0), BINS - 1)
    high = tl.minimum(tl.sum((least * (1.0 - SLACK) <= half).to(tl.int32), axis=0), BINS - 1)
    members = tl.sum(tl.where((bins >= low) & (bins <= high), counts, 0), axis=0)
    above_members = surely + tl.sum(tl.where(bins < low, lightest, 0.0), axis=0)
    # The first token is always in the head.
    always = tl.where(above_members == 0.0, 1, 0)

    log_ratio = tl.log2(sum_t / sum_s)
    w_head = tl.zeros([BLOCK_V], dtype=tl.float32)
    g_head = tl.zeros([BLOCK_V], dtype=tl.float32)
    g_all = tl.zeros([BLOCK_V], dtype=tl.float32)
    forward_kl = tl.zeros([BLOCK_V], dtype=tl.float32)
    reverse_kl = tl.zeros([BLOCK_V], dtype=tl.float32)
    taken = 0
    for start in range(0, V, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        depth_s = _depth(student_row, column, V, is_real, base_s, slope)
        depth_t = _depth(teacher_row, column, V, is_real, base_t, slope)
        w_t = tl.exp2(-depth_t)
        p_s, p_t = tl.exp2(-depth_s) / sum_s, w_t / sum_t
        gap = tl.abs(p_t - p_s)
        g_all += gap
        r = ((depth_t - depth_s) + log_ratio) * LOG_2
        forward_kl += _excess(p_t, p_s, r)
        reverse_kl += _excess(p_s, p_t, -r)

        inside = depth_t < BINS * width
        depth = tl.where(inside, depth_t, 0.0)
        bin, part = _bin(depth, 0.0, width), _bin(depth, from_depth, narrow)
        between = inside & (bin >= first) & (bin <= last)
        shares = between & (part >= low) & (part <= high)
        place = taken + tl.cumsum(shares.to(tl.int32), axis=0)  # counts from 1
        taken += tl.sum(shares.to(tl.int32), axis=0)
        # Never beyond the row's list, even if this pass rounds a bin's edge differently.
        few = shares & (members <= BINS) & (place <= BINS)
        tl.store(members_ptr + place - 1, depth, mask=few)
        tl.store(members_ptr + BINS + place - 1, gap, mask=few)
        fits = (place * w_t <= half - above_members) | (place == always)
        in_head = (inside & (bin < first)) | (between & (part < low))
        w_head += tl.where(in_head, w_t, 0.0)
        in_head = in_head | (shares & (members > BINS) & fits)
        g_head += tl.where(in_head, gap, 0.0)

    tl.debug_barrier()  # all threads write members
    listed = tl.where(members <= BINS, tl.minimum(taken, BINS), 0)
    is_member = bins < listed
    depth = tl.load(members_ptr + bins, mask=is_member, other=float("inf"))
    gap = tl.load(members_ptr + BINS + bins, mask=is_member, other=0.0)
    before = tl.zeros([BINS], dtype=tl.float32)  # mass of the members ranked before each
    rank = tl.zeros([BINS], dtype=tl.int32)
    for start in range(0, listed, 16):
        other = start + tl.arange(0, 16)
        others = other < listed
        other_depth = tl.load(members_ptr + other, mask=others, other=float("inf"))
        precedes = other_depth[None, :] < depth[:, None]
        equal = other_depth[None, :] == depth[:, None]
        precedes = (precedes | (equal & (other[None, :] < bins[:, None]))) & others[None, :]
        before += tl.sum(tl.where(precedes, tl.exp2(-other_depth)[None, :], 0.0), axis=1)
        rank += tl.sum(precedes.to(tl.int32), axis=1)
    room = half - tl.sum(w_head, axis=0)
    fits = (before + tl.exp2(-depth) <= room) | (rank + 1 == always)
    head = tl.sum(g_head, axis=0) + tl.sum(tl.where(is_member & fits, gap, 0.0), axis=0)
    every = tl.sum(g_all, axis=0)
    share = tl.where(every > 0.0, tl.minimum(head / every, 1.0), 0.5)
    return share, tl.sum(forward_kl, axis=0), tl.sum(reverse_kl, axis=0)


@triton.jit(do_not_specialize=["R"])
def soft_target_forward_kernel(
    student_ptr,
    teacher_ptr,
    mask_ptr,
    log_mass_ptr,  # (R,): of the V tokens, if the teacher has more
    loss_ptr,  # (R,)
    stats_ptr,  # (R, STATS): maximum and sum of both sides, expectation, share of the head
    members_ptr,  # (R, 2, BINS), for adaptive_kl to put aside
    R,
    V,
    stride_student,
    stride_teacher,
    slope,  # log2(e)/τ: all exponentials are powers of 2
    scale,
    width,  # of a bin of adaptive_kl
    coefficient,  # of the divergence
    DIVERGENCE: tl.constexpr,
    IS_HOT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_MASS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_real = row < R
    if HAS_MASK:
        is_real = is_real & (tl.load(mask_ptr + row, mask=is_real, other=0) != 0)
    student_row = student_ptr + row * stride_student
    teacher_row = teacher_ptr + row * stride_teacher
    columns = _columns(BLOCK_V // (LANES * WIDTH), LANES, WIDTH)

    # Each lane has its own maximum, so threads do not wait for each other within a row.
    top_s = tl.full([BLOCK_R, LANES], -float("inf"), tl.float32)
    top_t = tl.full([BLOCK_R, LANES], -float("inf"), tl.float32)
    sum_s = tl.zeros([BLOCK_R, LANES], dtype=tl.float32)
    sum_t = tl.zeros([BLOCK_R, LANES], dtype=tl.float32)
    # Σ 2^{x_t} (x_t − x_s); for reverse_kl with s and t exchanged.
    cross = tl.zeros([BLOCK_R, LANES], dtype=tl.float32)
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
        sum_s = sum_s * shrink_s + _lane_sum(w_s)
        sum_t = sum_t * shrink_t + _lane_sum(w_t)

    # The lanes are rescaled to the row's maximum.
    shift_s = _shift(top_s, tl.max(top_s, axis=1)[:, None]) * slope
    shift_t = _shift(top_t, tl.max(top_t, axis=1)[:, None]) * slope
    base_s, base_t = _base(tl.max(top_s, axis=1)), _base(tl.max(top_t, axis=1))
    shrink_s, shrink_t = tl.exp2(shift_s), tl.exp2(shift_t)
    if DIVERGENCE == "forward_kl":
        cross = _times(shrink_t, cross + sum_t * (shift_t - shift_s))
    if DIVERGENCE == "reverse_kl":
        cross = _times(shrink_s, cross + sum_s * (shift_s - shift_t))
    total_s = tl.sum(rounded(sum_s * shrink_s), axis=1)  # (BLOCK_R,)
    total_t = tl.sum(rounded(sum_t * shrink_t), axis=1)
    if HAS_MASS:  # the sum over all tokens of the teacher
        total_t = total_t / tl.exp(tl.load(log_mass_ptr + row, mask=is_real, other=0.0))
    expectation = tl.zeros([BLOCK_R], dtype=tl.float32)
    share = tl.zeros([BLOCK_R], dtype=tl.float32)
    if DIVERGENCE == "forward_kl" and not IS_HOT:
        loss = LOG_2 * (tl.sum(cross, axis=1) / total_t) + tl.log(total_s / total_t)
    elif DIVERGENCE == "reverse_kl" and not IS_HOT:
        loss = LOG_2 * (tl.sum(cross, axis=1) / total_s) + tl.log(total_t / total_s)
        expectation = loss
    elif DIVERGENCE == "adaptive_kl":
        share_of_row, forward_kl, reverse_kl = _adaptive(
            student_ptr + tl.program_id(0).to(tl.int64) * stride_student,
            teacher_ptr + tl.program_id(0).to(tl.int64) * stride_teacher,
            members_ptr + tl.program_id(0).to(tl.int64) * 2 * BINS,
            tl.sum(is_real.to(tl.int32), axis=0) != 0,
            V,
            tl.sum(base_s, axis=0),
            tl.sum(total_s, axis=0),
            tl.sum(base_t, axis=0),
            tl.sum(total_t, axis=0),
            slope,
            width,
            BLOCK_V,
        )
        share, expectation = share + share_of_row, expectation + reverse_kl
        loss = _times(share, forward_kl) + _times(1.0 - share, expectation)
    else:
        to_student = tl.zeros([BLOCK_R, LANES], dtype=tl.float32)
        to_teacher = tl.zeros([BLOCK_R, LANES], dtype=tl.float32)
        log_s, log_t = tl.log2(total_s)[:, None, None, None], tl.log2(total_t)[:, None, None, None]
        log_ratio = tl.log2(total_t / total_s)[:, None, None, None]
        weighed = tl.zeros([BLOCK_R, LANES], dtype=tl.float32)
        distance = tl.zeros([BLOCK_R, LANES], dtype=tl.float32)
        overlap = tl.zeros([BLOCK_R, LANES], dtype=tl.float32)
        for start in range(0, V, BLOCK_V):
            z_s = _load(student_row, start + columns, V, is_real)
            z_t = _load(teacher_row, start + columns, V, is_real)
            x_s = (z_s - base_s[:, None, None, None]) * slope
            x_t = (z_t - base_t[:, None, None, None]) * slope
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
                to_student += _lane_sum(_excess(p_s, p_t, -r))
                to_teacher += _lane_sum(_excess(p_t, p_s, r))
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
            elif DIVERGENCE == "skew_kl":
                m = _mixture(p_s, p_t, coefficient, DIVERGENCE)
                to_teacher += _lane_sum(_excess(p_t, m, -tl.log(p_t / m)))
                weighed += _lane_sum(_times(p_t, (1.0 - coefficient) * p_s / m))
            elif DIVERGENCE == "skew_reverse_kl":
                m = _mixture(p_s, p_t, coefficient, DIVERGENCE)
                to_student += _lane_sum(_excess(p_s, m, -tl.log(p_s / m)))
                weighed += _lane_sum(_times(p_s, tl.log(p_s / m) - coefficient * p_s / m))
            elif DIVERGENCE == "generalized_js":
                m = _mixture(p_s, p_t, coefficient, DIVERGENCE)
                to_student += _lane_sum(_excess(p_s, m, -tl.log(p_s / m)))
                to_teacher += _lane_sum(_excess(p_t, m, -tl.log(p_t / m)))
                weighed += _lane_sum(_times(p_s, tl.log(p_s / m)))
            else:
                log_ps, log_pt = (x_s - log_s) * LOG_2, (x_t - log_t) * LOG_2
                gap = log_pt - log_ps
                # log p − log ½(p + q) = log 2 − log(1 + q/p)
                common = LOG_2 - _log_one_plus_exp(gap)
                to_student += _lane_sum(_times(tl.exp(log_ps), common - tl.maximum(gap, 0.0)))
                to_teacher += _lane_sum(_times(tl.exp(log_pt), common + tl.minimum(gap, 0.0)))
        expectation = tl.sum(to_student, axis=1)
        of_teacher = tl.sum(to_teacher, axis=1)
        loss = expectation + of_teacher
        if DIVERGENCE == "js":
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

    exists = row < R
    tl.store(loss_ptr + row, tl.where(is_real, loss * scale, 0.0), mask=exists)
    stats_ptr += row * STATS
    tl.store(stats_ptr, base_s, mask=exists)
    tl.store(stats_ptr + 1, total_s, mask=exists)
    tl.store(stats_ptr + 2, base_t, mask=exists)
    tl.store(stats_ptr + 3, total_t, mask=exists)
    tl.store(stats_ptr + 4, expectation, mask=exists)
    tl.store(stats_ptr + 5, share, mask=exists)


@triton.jit(do_not_specialize=["R"])
def soft_target_reduce_kernel(
    loss_ptr,  # (R,)
    mask_ptr,
    denominator_ptr,  # ()
    total_ptr,  # ()
    divisor_ptr,  # (): what the sum was divided by
    R,
    COUNTS: tl.constexpr,  # divide by the number of rows, or of real rows if there is a mask
    HAS_MASK: tl.constexpr,
    HAS_DENOMINATOR: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    total = tl.zeros([BLOCK_R], dtype=tl.float32)
    count = tl.zeros([BLOCK_R], dtype=tl.float32)
    for start in range(0, R, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        total += tl.load(loss_ptr + row, mask=row < R, other=0.0)
        if HAS_MASK:
            count += (tl.load(mask_ptr + row, mask=row < R, other=0) != 0).to(tl.float32)
        elif COUNTS:
            count += (row < R).to(tl.float32)
    divisor = 1.0
    if HAS_DENOMINATOR:
        divisor = tl.load(denominator_ptr)
    elif COUNTS:
        divisor = tl.maximum(tl.sum(count, axis=0), 1.0)
    tl.store(total_ptr, tl.sum(total, axis=0) / divisor)
    tl.store(divisor_ptr, divisor)


@triton.jit(do_not_specialize=["R", "stride_dloss"])
def soft_target_backward_kernel(
    student_ptr,
    teacher_ptr,
    mask_ptr,
    stats_ptr,  # (R, STATS)
    dloss_ptr,  # (R,), or () where the loss was reduced
    divisor_ptr,  # ()
    dstudent_ptr,  # (R, V)
    R,
    V,
    stride_student,
    stride_teacher,
    stride_dloss,
    slope,  # log2(e)/τ
    scale,
    coefficient,
    DIVERGENCE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    REDUCED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    exists = row < R
    is_real = exists
    if HAS_MASK:
        is_real = is_real & (tl.load(mask_ptr + row, mask=exists, other=0) != 0)
    student_row = student_ptr + row * stride_student
    teacher_row = teacher_ptr + row * stride_teacher
    stats_ptr += row * STATS
    base_s = tl.load(stats_ptr, mask=is_real, other=0.0)[:, None]
    sum_s = tl.load(stats_ptr + 1, mask=is_real, other=1.0)[:, None]
    base_t = tl.load(stats_ptr + 2, mask=is_real, other=0.0)[:, None]
    sum_t = tl.load(stats_ptr + 3, mask=is_real, other=1.0)[:, None]
    expectation = tl.load(stats_ptr + 4, mask=is_real, other=0.0)[:, None]
    share = tl.load(stats_ptr + 5, mask=is_real, other=0.0)[:, None]
    dloss = tl.load(dloss_ptr + row * stride_dloss, mask=is_real, other=0.0)[:, None] * scale
    if REDUCED:
        dloss = dloss / tl.load(divisor_ptr)
    # Outside, logits and maxima are 0 and sums are 1: every value is finite and multiplied by 0.
    dloss = tl.where(is_real[:, None], dloss, 0.0)
    to_student, to_teacher = dloss / sum_s, dloss / sum_t
    log_ratio = tl.log2(sum_t / sum_s)
    log_s, log_t = tl.log2(sum_s), tl.log2(sum_t)

    for start in range(0, V, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)[None, :]
        inside = is_real[:, None] & (column < V)
        z_s = tl.load(student_row[:, None] + column, mask=inside, other=0.0)
        z_t = tl.load(teacher_row[:, None] + column, mask=inside, other=0.0)
        x_s = (z_s.to(tl.float32) - base_s) * slope
        x_t = (z_t.to(tl.float32) - base_t) * slope
        w_s = tl.exp2(x_s)
        if DIVERGENCE == "forward_kl":
            grad = w_s * to_student - tl.exp2(x_t) * to_teacher
        elif (
            DIVERGENCE == "total_variation"
            or DIVERGENCE == "negative_log_acceptance"
            or DIVERGENCE == "lk"
        ):
            p_s, p_t = tl.exp2(x_s - log_s), tl.exp2(x_t - log_t)  # compared as in the forward pass
            grad = p_s * (expectation - _below(p_s, p_t))
            if DIVERGENCE == "negative_log_acceptance":
                grad = grad * share
            if DIVERGENCE == "lk":
                grad = share * (p_s - p_t) + (1.0 - share) * grad
            grad = grad * dloss
        elif (
            DIVERGENCE == "skew_kl"
            or DIVERGENCE == "skew_reverse_kl"
            or DIVERGENCE == "generalized_js"
        ):
            p_s, p_t = w_s / sum_s, tl.exp2(x_t) / sum_t
            m = _mixture(p_s, p_t, coefficient, DIVERGENCE)
            if DIVERGENCE == "skew_kl":
                grad = p_s * expectation - _times(p_t, (1.0 - coefficient) * p_s / m)
            elif DIVERGENCE == "skew_reverse_kl":
                grad = _times(p_s, tl.log(p_s / m) - coefficient * p_s / m - expectation)
            else:
                grad = (1.0 - coefficient) * _times(p_s, tl.log(p_s / m) - expectation)
            grad = grad * dloss
        else:
            ratio = ((x_s - x_t) + log_ratio) * LOG_2  # log(p_s/p_t)
            if DIVERGENCE == "js":
                ratio = 0.5 * (-_log_mean(-ratio) - expectation)  # log(p_s/m) − its mean
            else:
                ratio = ratio - expectation
            grad = _times(w_s * to_student, ratio)
            if DIVERGENCE == "adaptive_kl" or DIVERGENCE == "mixed":
                plain = w_s * to_student - tl.exp2(x_t) * to_teacher
                grad = _times(share, plain) + _times(1.0 - share, grad)
        tl.store(
            dstudent_ptr + row[:, None] * V + column,
            grad,
            mask=exists[:, None] & (column < V),
        )


def _forward_shapes(student, *rest):
    rows = student.shape[0]
    loss = student.new_empty(rows, dtype=torch.float32)
    return loss, student.new_empty(rows, STATS.value, dtype=torch.float32)


@operator(_forward_shapes)
def soft_target_forward(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    divergence: str,
    temperature: float,
    scale: float,
    coefficient: float = 0.0,
    log_mass: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss (R,) of every row and the rows' statistics; logits (R, V), mask (R,) bool.

    ``log_mass`` (R,) of float32: of these tokens, for a teacher with more tokens and a divergence
    of Σ min(p_t, p_s); total variation then lacks half the mass of the other tokens.
    """
    R = student.shape[0]
    loss = torch.empty(R, dtype=torch.float32, device=student.device)
    stats = torch.empty(R, STATS.value, dtype=torch.float32, device=student.device)
    is_hot = temperature > HOT
    rows = student, teacher, mask, loss, stats
    fill_loss(*rows, divergence, temperature, scale, coefficient, is_hot, log_mass)
    return loss, stats


def fill_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    loss: Tensor,
    stats: Tensor,
    divergence: str,
    temperature: float,
    scale: float,
    coefficient: float,
    is_hot: bool,
    log_mass: Tensor | None = None,
) -> None:
    """Write the rows' losses and statistics.

    ``is_hot``: the temperature is above HOT, also if the logits have been divided by it.
    """
    R, V = student.shape
    if R == 0:
        return
    aligned = all(size % 16 == 0 for size in (V, student.stride(0), teacher.stride(0)))
    config = forward_blocks(V, divergence, student.element_size(), aligned)
    members = None
    if divergence == "adaptive_kl":
        members = torch.empty(R, 2, BINS.value, dtype=torch.float32, device=student.device)
    soft_target_forward_kernel[(cdiv(R, config["BLOCK_R"]),)](
        student,
        teacher,
        _bytes(mask),
        log_mass,
        loss,
        stats,
        members,
        R,
        V,
        student.stride(0),
        teacher.stride(0),
        LOG2_E / temperature,
        scale,
        # At most V entries hold half the mass, so the largest of them is at least 1/2V.
        (math.log2(V) + 1.5) / BINS.value,
        coefficient,
        DIVERGENCE=divergence,
        IS_HOT=is_hot and divergence in WITH_HOT_FORM,
        HAS_MASK=mask is not None,
        HAS_MASS=log_mass is not None,
        **config,
    )


def _reduce_shapes(loss, mask, denominator, counts):
    return loss.new_empty(()), loss.new_empty(())


@operator(_reduce_shapes)
def soft_target_reduce(
    loss: Tensor, mask: Tensor | None, denominator: Tensor | None, counts: bool
) -> tuple[Tensor, Tensor]:
    """Sum of the losses (R,) over a divisor, and that divisor, both ().

    The divisor is the 0-d float32 ``denominator`` if given; with ``counts`` the number of rows,
    or of real rows if there is a mask; otherwise 1.
    """
    total = torch.empty((), dtype=torch.float32, device=loss.device)
    divisor = torch.empty((), dtype=torch.float32, device=loss.device)
    counts = counts and denominator is None
    mask = mask if counts else None
    soft_target_reduce_kernel[(1,)](
        loss,
        _bytes(mask),
        denominator,
        total,
        divisor,
        loss.shape[0],
        COUNTS=counts,
        HAS_MASK=mask is not None,
        HAS_DENOMINATOR=denominator is not None,
        BLOCK_R=1024,
    )
    return total, divisor


def _backward_shapes(student, *rest):
    return student.new_empty(student.shape)


@operator(_backward_shapes)
def soft_target_backward(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    stats: Tensor,
    divisor: Tensor | None,
    dloss: Tensor,
    divergence: str,
    temperature: float,
    scale: float,
    coefficient: float = 0.0,
) -> Tensor:
    """dstudent (R, V) in the dtype of student.

    The upstream gradient has shape (R,), or () with the divisor of `soft_target_reduce`.
    """
    dstudent = torch.empty(student.shape, dtype=student.dtype, device=student.device)
    options = divergence, temperature, scale, coefficient
    fill_gradient(dstudent, student, teacher, mask, stats, divisor, dloss, *options)
    return dstudent


def fill_gradient(
    dstudent: Tensor,
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    stats: Tensor,
    divisor: Tensor | None,
    dloss: Tensor,
    divergence: str,
    temperature: float,
    scale: float,
    coefficient: float = 0.0,
) -> None:
    """Write the gradient into dstudent, which may be student: a tile is read before it is written.

    This is no operator, since it writes to logits that are computed outside any graph.
    """
    R, V = student.shape
    assert dstudent.is_contiguous(), "the kernel finds the rows of dstudent by V alone"
    if R == 0:
        return
    config = blocks(V, divergence)
    soft_target_backward_kernel[(cdiv(R, config["BLOCK_R"]),)](
        student,
        teacher,
        _bytes(mask),
        stats,
        dloss,
        divisor,
        dstudent,
        R,
        V,
        student.stride(0),
        teacher.stride(0),
        0 if dloss.dim() == 0 else dloss.stride(0),
        LOG2_E / temperature,
        scale / temperature,
        coefficient,
        DIVERGENCE=divergence,
        HAS_MASK=mask is not None,
        REDUCED=divisor is not None,
        **config,
    )


def _bytes(mask: Tensor | None) -> Tensor | None:
    """The mask as bytes, the only type that all versions of Triton read in the same way."""
    return None if mask is None else mask.view(torch.uint8)
