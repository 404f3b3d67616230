"""Soft targets of a teacher's top k tokens.

The divergence is that of few outcomes: the k tokens and, in a bucket, all other tokens as one. A
kernel computes the outcomes' log-probabilities of student and teacher, the kernels of
`fastkd.kernels.soft_targets` the divergence and its gradient g with respect to them, in float32.
In the backward pass another kernel spreads g, times the upstream gradient, over the student's row:
g_j at token j of the k, and g_rest·softmax over the other tokens. Only the student has rows of V
logits. With E = R·V logits of s bytes a bucket moves 3Es bytes forward and backward, renormalised
outcomes only the Es bytes of the gradient.

The sum over the other tokens must not contain the k tokens: subtracted from the sum over all, they
would leave a rounding error in place of a small rest. A bit for each token marks them, V/8 bytes a
row, set with an atomic OR: its result doesn't depend on the order of the threads.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.operator import launch_kernel, operator
from fastkd.kernels.launch import cdiv
from fastkd.kernels.reduction import bytes_of
from fastkd.kernels.rounding import rounded
from fastkd.kernels.soft_targets import (
    HOT,
    LOG2_E,
    _base,
    _columns,
    _lane_max,
    _lane_sum,
    _load,
    _shift,
    divisor_of,
    fill,
    reduced,
)

# Outcomes are stored in rows of a multiple of this size: one compiled form of the kernels on them.
PADDING = 16

EPSILON_32 = tl.constexpr(2.0**-23)


def blocks(V: int, element_size: int, aligned: bool) -> dict[str, int]:
    """Block sizes and warps for a vocabulary of V, as in `soft_targets.blocks`.

    Without a bound on its registers the assembler uses few in some forms and spills a few values.
    """
    if V > 1024:
        config = {"BLOCK_R": 1, "BLOCK_V": 4096, "LANES": 256, "num_warps": 8, "maxnreg": 128}
        return config | {"WIDTH": 16 // element_size if aligned else 1}
    config = {"BLOCK_R": 8, "BLOCK_V": 128, "LANES": 32, "num_warps": 8, "maxnreg": 168}
    return config | {"WIDTH": 4 if aligned else 1}


@triton.jit(do_not_specialize=["R", "K"])
def top_k_outcomes_kernel(
    student_ptr,
    ids_ptr,  # (R, K)
    log_probs_ptr,  # (R, K), −inf where unused
    mask_ptr,
    marks_ptr,  # (R, words of 32 bits)
    student_outcomes_ptr,  # (R, width): log-probabilities, up to a constant of each row
    teacher_outcomes_ptr,  # (R, width)
    rest_ptr,  # (R, 2): maximum and sum of the other tokens
    R,
    V,
    K,
    width,
    words,
    stride_student,
    inverse,  # 1/τ
    slope,  # log2(e)/τ
    EPSILON: tl.constexpr,  # of the stored log-probabilities
    BUCKET: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    exists = row < R
    is_real = exists
    if HAS_MASK:
        is_real = is_real & (tl.load(mask_ptr + row, mask=exists, other=0) != 0)
    student_row = student_ptr + row * stride_student
    marks_row = marks_ptr + row * words
    lane = tl.arange(0, LANES)[None, :]
    listed_row = row[:, None] * K

    if BUCKET:
        for start in range(0, words, LANES):
            tl.store(
                marks_row[:, None] + start + lane, 0, mask=exists[:, None] & (start + lane < words)
            )
        tl.debug_barrier()  # a thread marks in words that another one cleared
    top = tl.full([BLOCK_R, LANES], -float("inf"), tl.float32)
    # float32's rounding error of the sum would be as large as a small tail.
    listed = tl.zeros([BLOCK_R, LANES], dtype=tl.float64)
    entropy = tl.zeros([BLOCK_R, LANES], dtype=tl.float32)
    used = tl.zeros([BLOCK_R, LANES], dtype=tl.int32)
    for start in range(0, K, LANES):
        inside = is_real[:, None] & (start + lane < K)
        at = listed_row + start + lane
        log_p = tl.load(log_probs_ptr + at, mask=inside, other=-float("inf"))
        is_used = log_p != -float("inf")
        id = tl.load(ids_ptr + at, mask=is_used, other=0)
        z = tl.load(student_row[:, None] + id, mask=is_used, other=-float("inf"))
        top = tl.maximum(top, z.to(tl.float32))
        if BUCKET:
            p = tl.exp(log_p.to(tl.float64))
            listed += p
            entropy -= tl.where(is_used, p.to(tl.float32) * log_p.to(tl.float32), 0.0)
            used += is_used.to(tl.int32)
            bit = tl.full([BLOCK_R, LANES], 1, tl.int32) << (id & 31).to(tl.int32)
            tl.atomic_or(marks_row[:, None] + (id >> 5), bit, mask=is_used, sem="relaxed")
    top = tl.max(top, axis=1)

    base_r = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total_r = tl.zeros([BLOCK_R], dtype=tl.float32)
    if BUCKET:
        tl.debug_barrier()  # all threads mark
        top_r = tl.full([BLOCK_R, LANES], -float("inf"), tl.float32)
        sum_r = tl.zeros([BLOCK_R, LANES], dtype=tl.float32)
        columns = _columns(BLOCK_V // (LANES * WIDTH), LANES, WIDTH)
        firsts = _columns(BLOCK_V // (LANES * WIDTH), LANES, 1) * WIDTH  # of a lane's columns
        for start in range(0, V, BLOCK_V):
            z = _load(student_row, start + columns, V, is_real)
            inside = is_real[:, None, None, None] & (start + firsts < V)
            word = marks_row[:, None, None, None] + (start + firsts) // 32
            marks = tl.load(word, mask=inside, other=0)
            is_listed = ((marks >> (columns & 31)) & 1) != 0
            z = tl.where(is_listed, -float("inf"), z)
            new = tl.maximum(top_r, _lane_max(z))
            shrink = tl.exp2(_shift(top_r, new) * slope)
            top_r = new
            weights = tl.exp2((z - _base(top_r)[:, None, :, None]) * slope)
            sum_r = sum_r * shrink + _lane_sum(weights)
        base_r = tl.max(top_r, axis=1)
        shrink = tl.exp2(_shift(top_r, base_r[:, None]) * slope)
        total_r = tl.sum(rounded(sum_r * shrink), axis=1)
    base = _base(tl.maximum(top, base_r))
    log_rest_s = (_base(base_r) - base) * inverse + tl.log(total_r)
    # As `fastkd.lm.row_losses.probability_of_rest`, whose docstring explains the least one.
    least = 0.5 * (EPSILON_32 + EPSILON * tl.sum(entropy, axis=1))
    rest_of_teacher = (1.0 - tl.sum(listed, axis=1)).to(tl.float32)
    hidden = tl.where(total_r == 0.0, 0.0, least)
    rest_of_teacher = tl.where(rest_of_teacher <= least, hidden, rest_of_teacher)
    rest_of_teacher = tl.where(tl.sum(used, axis=1) < V, rest_of_teacher, 0.0)
    log_rest_t = tl.log(rest_of_teacher)
    tl.store(rest_ptr + row * 2, _base(base_r), mask=exists)
    tl.store(rest_ptr + row * 2 + 1, total_r, mask=exists)

    for start in range(0, width, LANES):
        place = start + lane
        inside = is_real[:, None] & (place < K)
        log_p = tl.load(log_probs_ptr + listed_row + place, mask=inside, other=-float("inf"))
        is_used = log_p != -float("inf")
        id = tl.load(ids_ptr + listed_row + place, mask=is_used, other=0)
        z = tl.load(student_row[:, None] + id, mask=is_used, other=-float("inf")).to(tl.float32)
        log_q, log_p = (z - base[:, None]) * inverse, log_p.to(tl.float32)
        if BUCKET:
            log_q = tl.where(place == K, log_rest_s[:, None], log_q)
            log_p = tl.where(place == K, log_rest_t[:, None], log_p)
        at = row[:, None] * width + place
        inside = exists[:, None] & (place < width)
        tl.store(student_outcomes_ptr + at, log_q, mask=inside)
        tl.store(teacher_outcomes_ptr + at, log_p, mask=inside)


@triton.jit(do_not_specialize=["R", "K", "stride_upstream"])
def top_k_gradient_kernel(
    student_ptr,
    ids_ptr,  # (R, K)
    mask_ptr,
    teacher_outcomes_ptr,  # (R, width), −inf where unused
    gradient_ptr,  # (R, width), of the outcomes
    rest_ptr,  # (R, 2)
    upstream_ptr,  # (R,) or ()
    dstudent_ptr,  # (R, V)
    R,
    V,
    K,
    width,
    stride_student,
    stride_upstream,
    slope,  # log2(e)/τ
    BUCKET: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    exists = row < R
    is_real = exists
    if HAS_MASK:
        is_real = is_real & (tl.load(mask_ptr + row, mask=exists, other=0) != 0)
    outcomes = row[:, None] * width
    upstream = tl.load(upstream_ptr + row * stride_upstream, mask=is_real, other=0.0)[:, None]
    if BUCKET:
        base = tl.load(rest_ptr + row * 2, mask=is_real, other=0.0)[:, None]
        total = tl.load(rest_ptr + row * 2 + 1, mask=is_real, other=0.0)[:, None]
        of_rest = tl.load(gradient_ptr + outcomes + K, mask=is_real[:, None], other=0.0)
        # A rest of probability 0 has no gradient to spread.
        factor = tl.where(total == 0.0, 0.0, of_rest / total * upstream)
    for start in range(0, V, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)[None, :]
        grad = tl.zeros([BLOCK_R, BLOCK_V], dtype=tl.float32)
        if BUCKET:
            inside = is_real[:, None] & (column < V)
            z = tl.load(
                student_ptr + row[:, None] * stride_student + column, mask=inside, other=0.0
            )
            grad = tl.exp2((z.to(tl.float32) - base) * slope) * factor
        tl.store(
            dstudent_ptr + row[:, None] * V + column, grad, mask=exists[:, None] & (column < V)
        )
    tl.debug_barrier()  # the k tokens are written twice, by different threads
    for start in range(0, K, BLOCK_K):
        place = start + tl.arange(0, BLOCK_K)[None, :]
        inside = is_real[:, None] & (place < K)
        log_p = tl.load(teacher_outcomes_ptr + outcomes + place, mask=inside, other=-float("inf"))
        is_used = log_p != -float("inf")
        id = tl.load(ids_ptr + row[:, None] * K + place, mask=is_used, other=0)
        grad = tl.load(gradient_ptr + outcomes + place, mask=is_used, other=0.0)
        tl.store(dstudent_ptr + row[:, None] * V + id, grad * upstream, mask=is_used)


def _width(K: int) -> int:
    return cdiv(K + 1, PADDING) * PADDING


def _forward_shapes(student, ids, log_probs, mask, weights, denominator, reduction, *rest):
    new = functools.partial(student.new_empty, dtype=torch.float32)
    R, width = student.shape[0], _width(ids.shape[1])
    loss = new(R if reduction == "none" else ())
    return [loss, new(R, width), new(R, width), new(R, 2)] if rest[-1] else [loss]


@operator(_forward_shapes)
def top_k_forward(
    student: Tensor,
    ids: Tensor,
    log_probs: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    denominator: Tensor | None,
    reduction: str,
    tail: str,
    divergence: str,
    temperature: float,
    scale: float,
    factor: float,
    coefficient: float,
    gradient: bool,
) -> list[Tensor]:
    """`soft_targets.soft_targets` of token ids and log-probabilities (R, K).

    With ``gradient`` three tensors follow the loss: the gradient of the outcomes times ``factor``,
    the teacher's outcomes, and sums of the other tokens.
    """
    (R, V), K = student.shape, ids.shape[1]
    ids, log_probs = ids.contiguous(), log_probs.contiguous()
    aligned = all(size % 16 == 0 for size in (V, student.stride(0)))
    new = functools.partial(student.new_empty, dtype=torch.float32)
    loss, outcomes, of_teacher, rest = new(R), new(R, _width(K)), new(R, _width(K)), new(R, 2)
    if R:
        words = cdiv(V, 32) if tail == "bucket" else 0
        config = blocks(V, student.element_size(), aligned)
        launch_kernel(
            top_k_outcomes_kernel,
            (cdiv(R, config["BLOCK_R"]),),
            student,
            ids,
            log_probs,
            bytes_of(mask),
            torch.empty(R, words, dtype=torch.int32, device=student.device),
            outcomes,
            of_teacher,
            rest,
            R,
            V,
            K,
            _width(K),
            words,
            student.stride(0),
            1 / temperature,
            LOG2_E / temperature,
            EPSILON=torch.finfo(log_probs.dtype).eps,
            BUCKET=tail == "bucket",
            HAS_MASK=mask is not None,
            **config,
        )
    divisor, number = divisor_of(student, mask, denominator, reduction)
    fill(
        outcomes, of_teacher, mask, divisor, weights, loss, outcomes if gradient else None,
        divergence, 1.0, scale, factor / number, coefficient, temperature > HOT,
    )  # fmt: skip
    loss = reduced(loss, weights, divisor, number, reduction)
    return [loss, outcomes, of_teacher, rest] if gradient else [loss]


def _backward_shapes(student, *rest):
    return student.new_empty(student.shape)


@operator(_backward_shapes)
def top_k_backward(
    student: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    saved: list[Tensor],
    upstream: Tensor,
    tail: str,
    temperature: float,
) -> Tensor:
    """dstudent (R, V) in the dtype of student.

    ``saved``: results of `top_k_forward` after the loss. The upstream gradient is (), or (R,).
    """
    dstudent = torch.empty(student.shape, dtype=student.dtype, device=student.device)
    fill_top_k_gradient(dstudent, student, ids, mask, saved, upstream, tail, temperature)
    return dstudent


def fill_top_k_gradient(
    dstudent: Tensor,
    student: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    saved: list[Tensor],
    upstream: Tensor,
    tail: str,
    temperature: float,
) -> None:
    """Write the gradient into dstudent, which may be student: a tile is read before it is written.

    This is no operator, since it writes to logits that are computed outside any graph.
    """
    gradient, teacher_outcomes, rest = saved
    (R, V), K = student.shape, ids.shape[1]
    assert dstudent.is_contiguous(), "the kernel finds the rows of dstudent by V alone"
    if R == 0:
        return
    config = {"BLOCK_R": 1, "BLOCK_V": 4096, "BLOCK_K": 256, "num_warps": 8}
    if V <= 1024:
        config = {"BLOCK_R": 8, "BLOCK_V": 128, "BLOCK_K": 32, "num_warps": 8}
    launch_kernel(
        top_k_gradient_kernel,
        (cdiv(R, config["BLOCK_R"]),),
        student,
        ids.contiguous(),
        bytes_of(mask),
        teacher_outcomes,
        gradient,
        rest,
        upstream,
        dstudent,
        R,
        V,
        K,
        _width(K),
        student.stride(0),
        0 if upstream.dim() == 0 else upstream.stride(0),
        LOG2_E / temperature,
        BUCKET=tail == "bucket",
        HAS_MASK=mask is not None,
        **config,
    )
