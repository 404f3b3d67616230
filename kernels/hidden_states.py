"""Distance of hidden states (R, D): squared difference, cosine or smooth ℓ1, and the gradient.

Data path. A program reads BLOCK_R rows in tiles of BLOCK_D columns and writes the rows' losses;
PyTorch weights and sums them. The cosine reads student and teacher once for 1/‖x‖, and once more
for ½‖ŝ − t̂‖², which has no cancellation, unlike 1 − ŝ·t̂. It stores 1/‖x‖ for the backward pass.
Backward: a program reads the same tiles and writes the gradient, multiplied by the upstream
gradient.

With E = R·D elements of s bytes on each side: forward reads 2Es (the cosine twice, the second time
from the L2 cache), backward reads 2Es and writes Es, 5Es bytes in all; about 4E operations forward
and 4E backward, 8E and 6E for the cosine. Bound by bandwidth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.operator import operator
from fastkd.kernels.launch import cdiv
from fastkd.kernels.rounding import rounded

# Values of the kernels' argument KIND.
KINDS = {"mse": 0, "cosine": 1, "smooth_l1": 2}
MSE = tl.constexpr(KINDS["mse"])
COSINE = tl.constexpr(KINDS["cosine"])

# 8 elements per thread and tensor: one access of 16 bytes in half precision. With four rows per
# program, a few hundred rows are enough programs for all multiprocessors.
BLOCKS = {"BLOCK_R": 4, "BLOCK_D": 256, "num_warps": 4}


@triton.jit
def _rows(x_ptr, mask_ptr, R, stride, HAS_MASK: tl.constexpr, BLOCK_R: tl.constexpr):
    """Indices of a program's rows, their offsets in x, and the mask of real rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = row < R
    if HAS_MASK:
        real = real & (tl.load(mask_ptr + row, mask=real, other=0) != 0)
    return row, x_ptr + (row * stride)[:, None], real


@triton.jit
def _tile(x_rows, first, real, D, BLOCK_D: tl.constexpr):
    """Columns of the rows as float32 (BLOCK_R, BLOCK_D), 0 outside."""
    d = (first + tl.arange(0, BLOCK_D))[None, :]
    return tl.load(x_rows + d, mask=real[:, None] & (d < D), other=0.0).to(tl.float32)


@triton.jit
def _inverse_norm(x_rows, real, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """1/‖x‖ (BLOCK_R,), 0 for zero rows."""
    products = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    peaks = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for first in range(0, D, BLOCK_D):
        x = _tile(x_rows, first, real, D, BLOCK_D)
        products += x * x
        peaks = tl.maximum(peaks, tl.abs(x))
    squares = tl.sum(products, axis=1)
    peak = tl.max(peaks, axis=1)
    # Squares that overflow or underflow are computed again from scaled rows.
    unusual = (squares < 1e-25) | (squares > 1e25)
    scale = tl.where(unusual & (peak > 0.0), 1.0 / tl.where(peak > 0.0, peak, 1.0), 1.0)
    if tl.max(unusual.to(tl.int32), axis=0) > 0:
        products = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
        for first in range(0, D, BLOCK_D):
            x = _tile(x_rows, first, real, D, BLOCK_D) * scale[:, None]
            products += x * x
        squares = tl.where(unusual, tl.sum(products, axis=1), squares)
    zero = squares == 0.0
    return tl.where(zero, 0.0, scale / tl.sqrt(tl.where(zero, 1.0, squares)))


@triton.jit(do_not_specialize=["R"])
def hidden_states_forward_kernel(
    student_ptr,  # (R, D)
    teacher_ptr,
    mask_ptr,  # (R,) bytes
    losses_ptr,  # (R,)
    inverse_ptr,  # (2, R): 1/‖x‖ of both sides, for the cosine
    R,
    D,
    stride_s,
    stride_t,
    beta,
    KIND: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row, s_rows, real = _rows(student_ptr, mask_ptr, R, stride_s, HAS_MASK, BLOCK_R)
    t_rows = teacher_ptr + (row * stride_t)[:, None]
    total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    if KIND == COSINE:
        of_s = _inverse_norm(s_rows, real, D, BLOCK_R, BLOCK_D)
        of_t = _inverse_norm(t_rows, real, D, BLOCK_R, BLOCK_D)
        for first in range(0, D, BLOCK_D):
            a = rounded(_tile(s_rows, first, real, D, BLOCK_D) * of_s[:, None])
            d = a - rounded(_tile(t_rows, first, real, D, BLOCK_D) * of_t[:, None])
            total += d * d
        losses = tl.sum(total, axis=1) / 2
        losses = tl.where((of_s == 0.0) | (of_t == 0.0), 1.0, losses)
        tl.store(inverse_ptr + row, of_s, mask=row < R)
        tl.store(inverse_ptr + R + row, of_t, mask=row < R)
    else:
        for first in range(0, D, BLOCK_D):
            d = _tile(s_rows, first, real, D, BLOCK_D) - _tile(t_rows, first, real, D, BLOCK_D)
            total += d - d  # NaN where the difference is infinite
            if KIND == MSE:
                total += d * d
            else:
                size = tl.abs(d)
                near = d * (d / tl.where(beta > 0.0, beta, 1.0)) * 0.5
                total += tl.where(size < beta, near, size - beta * 0.5)
        losses = tl.sum(total / D, axis=1)
    tl.store(losses_ptr + row, tl.where(real, losses, 0.0), mask=row < R)


@triton.jit(do_not_specialize=["R", "stride_dloss"])
def hidden_states_backward_kernel(
    student_ptr,  # (R, D)
    teacher_ptr,
    mask_ptr,  # (R,) bytes
    losses_ptr,  # (R,)
    inverse_ptr,  # (2, R), for the cosine
    dloss_ptr,  # (R,)
    stride_dloss,
    dx_ptr,  # (R, D)
    R,
    D,
    stride_s,
    stride_t,
    beta,
    KIND: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row, s_rows, real = _rows(student_ptr, mask_ptr, R, stride_s, HAS_MASK, BLOCK_R)
    t_rows = teacher_ptr + (row * stride_t)[:, None]
    dloss = tl.load(dloss_ptr + row * stride_dloss, mask=real, other=0.0)
    if KIND == COSINE:
        of_s = tl.load(inverse_ptr + row, mask=real, other=0.0)
        of_t = tl.load(inverse_ptr + R + row, mask=real, other=0.0)
        along = tl.load(losses_ptr + row, mask=real, other=0.0)
        factor = tl.where(of_t == 0.0, 0.0, dloss * of_s)
    else:
        factor = dloss / D
    for first in range(0, D, BLOCK_D):
        s = _tile(s_rows, first, real, D, BLOCK_D)
        t = _tile(t_rows, first, real, D, BLOCK_D)
        if KIND == COSINE:
            a = rounded(s * of_s[:, None])
            dx = a - rounded(t * of_t[:, None]) - a * along[:, None]
        else:
            d = s - t
            if KIND == MSE:
                dx = 2.0 * d
            else:
                # 0 and NaN are unchanged.
                sign = tl.where(d > 0.0, 1.0, tl.where(d < 0.0, -1.0, d)) + (d - d)
                near = d / tl.where(beta > 0.0, beta, 1.0)
                dx = tl.where(tl.abs(d) < beta, near, sign)
        dx = tl.where(real[:, None], dx * factor[:, None], 0.0)
        d_out = (first + tl.arange(0, BLOCK_D))[None, :]
        tl.store(dx_ptr + row[:, None] * D + d_out, dx, mask=(row < R)[:, None] & (d_out < D))


def _forward_shapes(student, teacher, mask, kind, beta):
    R = student.shape[0]
    losses = student.new_empty(R, dtype=torch.float32)
    return [losses, losses.new_empty(2, R)] if kind == "cosine" else [losses]


@operator(_forward_shapes)
def hidden_states_forward(
    student: Tensor, teacher: Tensor, mask: Tensor | None, kind: str, beta: float
) -> list[Tensor]:
    """Losses (R,) of rows (R, D), 0 where masked; for the cosine also 1/‖x‖ of both (2, R)."""
    R, D = student.shape
    losses = torch.empty(R, dtype=torch.float32, device=student.device)
    results = [losses, losses.new_empty(2, R)] if kind == "cosine" else [losses]
    if R:
        hidden_states_forward_kernel[(cdiv(R, BLOCKS["BLOCK_R"]),)](
            student,
            teacher,
            None if mask is None else mask.contiguous().view(torch.uint8),
            losses,
            results[-1],
            R,
            D,
            student.stride(0),
            teacher.stride(0),
            beta,
            KIND=KINDS[kind],
            HAS_MASK=mask is not None,
            **BLOCKS,
        )
    return results


def _backward_shapes(student, teacher, mask, losses, inverse, dloss, kind, beta):
    return student.new_empty(student.shape)


@operator(_backward_shapes)
def hidden_states_backward(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    losses: Tensor,
    inverse: list[Tensor],
    dloss: Tensor,
    kind: str,
    beta: float,
) -> Tensor:
    """The student's gradient (R, D) for ``dloss`` (R,), in the student's dtype.

    ``losses`` and ``inverse`` are the results of `hidden_states_forward`.
    """
    R, D = student.shape
    dx = torch.empty(R, D, dtype=student.dtype, device=student.device)
    if R:
        hidden_states_backward_kernel[(cdiv(R, BLOCKS["BLOCK_R"]),)](
            student,
            teacher,
            None if mask is None else mask.contiguous().view(torch.uint8),
            losses,
            inverse[0] if inverse else losses,
            dloss,
            dloss.stride(0),
            dx,
            R,
            D,
            student.stride(0),
            teacher.stride(0),
            beta,
            KIND=KINDS[kind],
            HAS_MASK=mask is not None,
            **BLOCKS,
        )
    return dx
