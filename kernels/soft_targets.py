"""Soft targets: divergence of softened teacher and student logits, and its gradient.

Data path. Forward: a program walks along its rows in blocks of the vocabulary and keeps running
maxima, sums of exponentials and the two Kullback-Leibler sums (shifted along whenever a maximum
grows), so one read of both logits gives either KL. Jensen-Shannon needs the normalisers first and
reads both logits twice. Adaptive KL selects its head between two reads of both: radix selection
by the bits of the teacher's logits, two bits a read, of the teacher alone.
Each row leaves its loss and the six numbers that its gradient needs; one program adds the losses.
Backward: one read of both logits, one write of the gradient with the upstream gradient applied.
Nothing else is of the size of the logits. Logits that nobody else needs, such as those made from
hidden states a chunk at a time, are replaced by their gradient.

Reads of the logits, forward + backward:

    forward_kl, reverse_kl    1 + 1 of both sides
    js                        2 + 1 of both sides
    adaptive_kl               2 + 1 of both sides, and 8 (16 in float32) of the teacher

The third of js and adaptive_kl can't be saved: their losses need the normalisers, and their
gradients the losses. With E = R·V elements of s bytes a KL moves 5Es bytes, js 7Es, adaptive_kl
(7 + 4s)Es. About 20E operations for a KL, 40E for js, (80 + 30s)E for adaptive_kl. Bound by
bandwidth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd.kernels.launch import operator

STATS = tl.constexpr(6)
HEAD_MASS = tl.constexpr(0.5)
LOG_2 = tl.constexpr(0.6931471805599453)


def blocks(V: int, divergence: str) -> dict[str, int]:
    """Block sizes and warps for a vocabulary of V.

    Two shapes only, to keep the compiled forms few. Long rows stream 4096 logits of each side at
    a time, 16 a thread: enough loads in flight, and few enough registers for several programs on
    a multiprocessor; js has more intermediate values, and half the logits. Up to 1024 words, 16
    rows share a program; adaptive_kl, with more numbers a row, spreads them over more warps.
    """
    if V > 1024:
        return {"BLOCK_R": 1, "BLOCK_V": 2048 if divergence == "js" else 4096, "num_warps": 8}
    return {"BLOCK_R": 16, "BLOCK_V": 128, "num_warps": 16 if divergence == "adaptive_kl" else 8}


@triton.jit
def _load(row_ptr, column, V, is_real):
    """Logits (BLOCK_R, BLOCK_V) in their own dtype, −inf beyond the vocabulary."""
    inside = is_real[:, None] & (column < V)[None, :]
    return tl.load(row_ptr[:, None] + column[None, :], mask=inside, other=-float("inf"))


@triton.jit
def _base(top):
    """The maximum to subtract: 0 while only −inf was seen, as −inf − (−inf) would be NaN."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def _shift(top, new_top):
    """How far the maximum moved, at most 0; 0 from −inf, when there is no sum to rescale yet."""
    return tl.where(top == -float("inf"), 0.0, top - new_top)


@triton.jit
def _times(p, x):
    """p·x where a probability of 0 counts nothing even against ∞."""
    return tl.where(p == 0.0, 0.0, p * x)


@triton.jit
def _log_one_plus_exp(gap):
    """log(1 + e^gap) less max(gap, 0): the same for gap and −gap."""
    return tl.log(1.0 + tl.exp(-tl.abs(gap)))


@triton.jit
def _sort_key(z, KEY_BITS: tl.constexpr):
    """Unsigned integers in the order of the logits, exact in their own dtype."""
    z = tl.where(z == 0.0, tl.zeros_like(z), z)  # −0 equals 0
    if KEY_BITS == 16:
        bits = z.to(tl.uint16, bitcast=True).to(tl.uint32)
    else:
        bits = z.to(tl.uint32, bitcast=True)
    sign = 1 << (KEY_BITS - 1)
    every = (1 << KEY_BITS) - 1
    return tl.where((bits & sign) != 0, bits ^ every, bits ^ sign)


@triton.jit
def _from_sort_key(key, dtype: tl.constexpr, KEY_BITS: tl.constexpr):
    """The logits that have these keys."""
    sign = 1 << (KEY_BITS - 1)
    every = (1 << KEY_BITS) - 1
    bits = tl.where((key & sign) != 0, key ^ sign, key ^ every)
    if KEY_BITS == 16:
        bits = bits.to(tl.uint16)
    return bits.to(dtype, bitcast=True)


@triton.jit
def _head_share(
    student_row,
    teacher_row,
    is_real,
    V,
    base_s,
    sum_s,
    base_t,
    sum_t,
    inv_temperature,
    KEY_BITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """g_head / (g_head + g_tail) of every row (BLOCK_R,).

    The head is the longest prefix of the teacher's descending order that holds at most half of
    its mass. Let the boundary be the largest key whose mass from there upwards exceeds one half:
    everything above it is in the head, nothing below, and of the entries that equal it the
    first few by index.
    """
    half = sum_t * HEAD_MASS
    boundary = tl.zeros([BLOCK_R], dtype=tl.uint32)
    above = tl.zeros([BLOCK_R], dtype=tl.float32)  # mass of the keys above all that it may become
    for step in range(KEY_BITS // 2):
        shift = KEY_BITS - 2 - 2 * step
        one = tl.full([BLOCK_R], 1, tl.uint32) << shift
        mass_1 = tl.zeros([BLOCK_R], dtype=tl.float32)
        mass_2 = tl.zeros([BLOCK_R], dtype=tl.float32)
        mass_3 = tl.zeros([BLOCK_R], dtype=tl.float32)
        for start in range(0, V, BLOCK_V):
            column = start + tl.arange(0, BLOCK_V)
            z_t = _load(teacher_row, column, V, is_real)
            key = _sort_key(z_t, KEY_BITS)
            w_t = tl.exp((z_t.to(tl.float32) - base_t[:, None]) * inv_temperature)
            mass_1 += tl.sum(tl.where(key >= (boundary + one)[:, None], w_t, 0.0), axis=1)
            mass_2 += tl.sum(tl.where(key >= (boundary + 2 * one)[:, None], w_t, 0.0), axis=1)
            mass_3 += tl.sum(tl.where(key >= (boundary + 3 * one)[:, None], w_t, 0.0), axis=1)
        digit = (
            (mass_1 > half).to(tl.uint32)
            + (mass_2 > half).to(tl.uint32)
            + (mass_3 > half).to(tl.uint32)
        )
        boundary += digit * one
        above = tl.where(digit == 2, mass_3, above)
        above = tl.where(digit == 1, mass_2, above)
        above = tl.where(digit == 0, mass_1, above)

    limit = _from_sort_key(boundary, teacher_row.dtype.element_ty, KEY_BITS).to(tl.float32)
    weight = tl.exp((limit - base_t) * inv_temperature)  # of one entry on the boundary
    room = tl.floor((half - above) / weight)
    room = tl.where(above == 0.0, tl.maximum(room, 1.0), room)

    g_head = tl.zeros([BLOCK_R], dtype=tl.float32)
    g_all = tl.zeros([BLOCK_R], dtype=tl.float32)
    taken = tl.zeros([BLOCK_R], dtype=tl.int32)
    for start in range(0, V, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        z_s = _load(student_row, column, V, is_real)
        z_t = _load(teacher_row, column, V, is_real)
        key = _sort_key(z_t, KEY_BITS)
        p_s = tl.exp((z_s.to(tl.float32) - base_s[:, None]) * inv_temperature) / sum_s[:, None]
        p_t = tl.exp((z_t.to(tl.float32) - base_t[:, None]) * inv_temperature) / sum_t[:, None]
        gap = tl.abs(p_t - p_s)
        is_equal = (key == boundary[:, None]).to(tl.int32)
        place = taken[:, None] + tl.cumsum(is_equal, axis=1)  # counts from 1
        in_head = (key > boundary[:, None]) | (
            (is_equal == 1) & (place.to(tl.float32) <= room[:, None])
        )
        g_head += tl.sum(tl.where(in_head, gap, 0.0), axis=1)
        g_all += tl.sum(gap, axis=1)
        taken += tl.sum(is_equal, axis=1)
    return tl.where(g_all > 0.0, g_head / g_all, 0.5)


@triton.jit(do_not_specialize=["R"])
def soft_target_forward_kernel(
    student_ptr,
    teacher_ptr,
    mask_ptr,
    loss_ptr,  # (R,)
    stats_ptr,  # (R, STATS): maximum and sum of both sides, expectation, share of the head
    R,
    V,
    stride_student,
    stride_teacher,
    inv_temperature,
    scale,
    DIVERGENCE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    KEY_BITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_real = row < R
    if HAS_MASK:
        is_real = is_real & (tl.load(mask_ptr + row, mask=is_real, other=0) != 0)
    student_row = student_ptr + row * stride_student
    teacher_row = teacher_ptr + row * stride_teacher

    top_s = tl.full([BLOCK_R], -float("inf"), tl.float32)
    top_t = tl.full([BLOCK_R], -float("inf"), tl.float32)
    sum_s = tl.zeros([BLOCK_R], dtype=tl.float32)
    sum_t = tl.zeros([BLOCK_R], dtype=tl.float32)
    # Σ e^{x_t} (x_t − x_s) and Σ e^{x_s} (x_s − x_t), x the logits minus their maximum.
    cross_t = tl.zeros([BLOCK_R], dtype=tl.float32)
    cross_s = tl.zeros([BLOCK_R], dtype=tl.float32)
    for start in range(0, V, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        z_s = _load(student_row, column, V, is_real).to(tl.float32)
        z_t = _load(teacher_row, column, V, is_real).to(tl.float32)
        new_s = tl.maximum(top_s, tl.max(z_s, axis=1))
        new_t = tl.maximum(top_t, tl.max(z_t, axis=1))
        shift_s = _shift(top_s, new_s) * inv_temperature
        shift_t = _shift(top_t, new_t) * inv_temperature
        top_s, top_t = new_s, new_t
        x_s = (z_s - _base(top_s)[:, None]) * inv_temperature
        x_t = (z_t - _base(top_t)[:, None]) * inv_temperature
        w_s, w_t = tl.exp(x_s), tl.exp(x_t)
        shrink_s, shrink_t = tl.exp(shift_s), tl.exp(shift_t)
        if DIVERGENCE == "forward_kl" or DIVERGENCE == "adaptive_kl":
            cross_t = _times(shrink_t, cross_t + sum_t * (shift_t - shift_s))
            cross_t += tl.sum(_times(w_t, x_t - x_s), axis=1)
        if DIVERGENCE == "reverse_kl" or DIVERGENCE == "adaptive_kl":
            cross_s = _times(shrink_s, cross_s + sum_s * (shift_s - shift_t))
            cross_s += tl.sum(_times(w_s, x_s - x_t), axis=1)
        sum_s = sum_s * shrink_s + tl.sum(w_s, axis=1)
        sum_t = sum_t * shrink_t + tl.sum(w_t, axis=1)

    base_s, base_t = _base(top_s), _base(top_t)
    expectation = tl.zeros([BLOCK_R], dtype=tl.float32)
    share = tl.zeros([BLOCK_R], dtype=tl.float32)
    if DIVERGENCE == "forward_kl":
        loss = cross_t / sum_t + tl.log(sum_s / sum_t)
    elif DIVERGENCE == "reverse_kl":
        loss = cross_s / sum_s + tl.log(sum_t / sum_s)
        expectation = loss
    elif DIVERGENCE == "adaptive_kl":
        forward_kl = cross_t / sum_t + tl.log(sum_s / sum_t)
        expectation = cross_s / sum_s + tl.log(sum_t / sum_s)
        share = _head_share(
            student_row,
            teacher_row,
            is_real,
            V,
            base_s,
            sum_s,
            base_t,
            sum_t,
            inv_temperature,
            KEY_BITS,
            BLOCK_R,
            BLOCK_V,
        )
        loss = _times(share, forward_kl) + _times(1.0 - share, expectation)
    else:
        teacher_side = tl.zeros([BLOCK_R], dtype=tl.float32)
        for start in range(0, V, BLOCK_V):
            column = start + tl.arange(0, BLOCK_V)
            z_s = _load(student_row, column, V, is_real).to(tl.float32)
            z_t = _load(teacher_row, column, V, is_real).to(tl.float32)
            log_ps = (z_s - base_s[:, None]) * inv_temperature - tl.log(sum_s)[:, None]
            log_pt = (z_t - base_t[:, None]) * inv_temperature - tl.log(sum_t)[:, None]
            gap = log_pt - log_ps
            # log p − log ½(p + q) = log 2 − log(1 + q/p)
            common = LOG_2 - _log_one_plus_exp(gap)
            to_student = _times(tl.exp(log_ps), common - tl.maximum(gap, 0.0))
            expectation += tl.sum(to_student, axis=1)
            to_teacher = _times(tl.exp(log_pt), common + tl.minimum(gap, 0.0))
            teacher_side += tl.sum(to_teacher, axis=1)
        loss = (expectation + teacher_side) * 0.5

    tl.store(loss_ptr + row, tl.where(is_real, loss * scale, 0.0), mask=row < R)
    stats_ptr += row * STATS
    tl.store(stats_ptr, base_s, mask=row < R)
    tl.store(stats_ptr + 1, sum_s, mask=row < R)
    tl.store(stats_ptr + 2, base_t, mask=row < R)
    tl.store(stats_ptr + 3, sum_t, mask=row < R)
    tl.store(stats_ptr + 4, expectation, mask=row < R)
    tl.store(stats_ptr + 5, share, mask=row < R)


@triton.jit(do_not_specialize=["R"])
def soft_target_reduce_kernel(
    loss_ptr,  # (R,)
    mask_ptr,
    denominator_ptr,  # ()
    total_ptr,  # ()
    divisor_ptr,  # (): what the sum was divided by
    R,
    COUNTS: tl.constexpr,  # divide by the number of rows, or of those that the mask keeps
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
    inv_temperature,
    scale,
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
    base_s = tl.load(stats_ptr, mask=exists, other=0.0)
    sum_s = tl.load(stats_ptr + 1, mask=exists, other=1.0)
    base_t = tl.load(stats_ptr + 2, mask=exists, other=0.0)
    sum_t = tl.load(stats_ptr + 3, mask=exists, other=1.0)
    expectation = tl.load(stats_ptr + 4, mask=exists, other=0.0)
    share = tl.load(stats_ptr + 5, mask=exists, other=0.0)
    dloss = tl.load(dloss_ptr + row * stride_dloss, mask=exists, other=0.0)
    dloss = dloss * (scale * inv_temperature)
    if REDUCED:
        dloss = dloss / tl.load(divisor_ptr)

    for start in range(0, V, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        z_s = _load(student_row, column, V, is_real).to(tl.float32)
        z_t = _load(teacher_row, column, V, is_real).to(tl.float32)
        x_s = (z_s - base_s[:, None]) * inv_temperature
        x_t = (z_t - base_t[:, None]) * inv_temperature
        p_s = tl.exp(x_s) / sum_s[:, None]
        if DIVERGENCE == "js":
            gap = (x_t - x_s) + tl.log(sum_s / sum_t)[:, None]
            common = LOG_2 - _log_one_plus_exp(gap)
            grad = 0.5 * _times(p_s, common - tl.maximum(gap, 0.0) - expectation[:, None])
        else:
            grad = p_s - tl.exp(x_t) / sum_t[:, None]
        if DIVERGENCE == "reverse_kl" or DIVERGENCE == "adaptive_kl":
            ratio = (x_s - x_t) + tl.log(sum_t / sum_s)[:, None]
            reverse = _times(p_s, ratio - expectation[:, None])
            if DIVERGENCE == "reverse_kl":
                grad = reverse
            else:
                grad = _times(share[:, None], grad) + _times(1.0 - share[:, None], reverse)
        grad = tl.where(is_real[:, None], grad * dloss[:, None], 0.0)
        inside = exists[:, None] & (column < V)[None, :]
        tl.store(dstudent_ptr + row[:, None] * V + column[None, :], grad, mask=inside)


def _forward_shapes(student, teacher, mask, *options):
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
) -> tuple[Tensor, Tensor]:
    """Loss (R,) of every row and the rows' statistics; logits (R, V), mask (R,) bool."""
    return _launch_forward(student, teacher, mask, divergence, temperature, scale)


def _launch_forward(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    divergence: str,
    temperature: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    R, V = student.shape
    config = blocks(V, divergence)
    loss = torch.empty(R, dtype=torch.float32, device=student.device)
    stats = torch.empty(R, STATS.value, dtype=torch.float32, device=student.device)
    if R:
        soft_target_forward_kernel[(triton.cdiv(R, config["BLOCK_R"]),)](
            student,
            teacher,
            _bytes(mask),
            loss,
            stats,
            R,
            V,
            student.stride(0),
            teacher.stride(0),
            1 / temperature,
            scale,
            DIVERGENCE=divergence,
            HAS_MASK=mask is not None,
            KEY_BITS=8 * teacher.element_size(),
            **config,
        )
    return loss, stats


def _reduce_shapes(loss, mask, denominator, counts):
    return loss.new_empty(()), loss.new_empty(())


@operator(_reduce_shapes)
def soft_target_reduce(
    loss: Tensor, mask: Tensor | None, denominator: Tensor | None, counts: bool
) -> tuple[Tensor, Tensor]:
    """Sum of the losses (R,) over a divisor, and that divisor, both ().

    The divisor is the 0-d float32 ``denominator``, else, if it ``counts``, the number of rows
    (that the mask keeps), else 1.
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
) -> Tensor:
    """dstudent (R, V) in the dtype of student.

    The upstream gradient is (R,), or () with the divisor of `soft_target_reduce`.
    """
    dstudent = torch.empty(student.shape, dtype=student.dtype, device=student.device)
    options = divergence, temperature, scale
    _launch_backward(dstudent, student, teacher, mask, stats, divisor, dloss, *options)
    return dstudent


def soft_target_replace(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    weights: Tensor,
    divergence: str,
    temperature: float,
    scale: float,
) -> Tensor:
    """Loss (R,) of every row; the contiguous logits of student become d(Σ weights·loss).

    Not an operator: its callers make logits where graphs do not see them.
    """
    options = divergence, temperature, scale
    loss, stats = _launch_forward(student, teacher, mask, *options)
    _launch_backward(student, student, teacher, mask, stats, None, weights, *options)
    return loss


def _launch_backward(
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
) -> None:
    """Fill dstudent, which may be student: each of its tiles is read before it is written."""
    R, V = student.shape
    if R == 0:
        return
    config = blocks(V, divergence)
    soft_target_backward_kernel[(triton.cdiv(R, config["BLOCK_R"]),)](
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
        1 / temperature,
        scale,
        DIVERGENCE=divergence,
        HAS_MASK=mask is not None,
        REDUCED=divisor is not None,
        **config,
    )


def _bytes(mask: Tensor | None) -> Tensor | None:
    """The mask in the one type that Triton's versions agree on."""
    return None if mask is None else mask.view(torch.uint8)
