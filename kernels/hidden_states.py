"""Distance of hidden states (R, D): squared difference, cosine or smooth ℓ1, and the gradient.

Data path. A program reads BLOCK_R rows in tiles of BLOCK_D columns, and writes the rows' losses
and, where it is needed, the gradient, divided by the number of positions that count:
`fastkd.kernels.reduction` counts these before and adds the losses after. The cosine reads student
and teacher once for 1/‖x‖, once more for ½‖ŝ − t̂‖², which has no cancellation, unlike 1 − ŝ·t̂,
and once more for the gradient. Its programs have so few elements that the rows of all programs on
a multiprocessor fit its L1 cache: only the first read comes from memory.

The gradient is that for an upstream gradient of 1; `fastkd.kernels.upstream` multiplies it in the
backward pass, without work if that is 1. float16 would underflow, and "none" has many upstream
gradients: there the forward pass computes the losses alone, and the backward pass visits the rows
again.

With E = R·D elements of s bytes on each side: 2Es read and Es written, 3Es bytes in all, or 5Es
where the backward pass visits the rows again; about 8E operations, 14E for the cosine. Bound by
bandwidth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.numerics import as_rows
from fastkd._core.operator import launch_kernel, operator
from fastkd.kernels.launch import cdiv
from fastkd.kernels.reduction import bytes_of, counted, summed
from fastkd.kernels.rounding import rounded

# Values of the kernel's argument KIND.
KINDS = {"mse": 0, "cosine": 1, "smooth_l1": 2}
MSE = tl.constexpr(KINDS["mse"])
COSINE = tl.constexpr(KINDS["cosine"])


def blocks(kind: str, D: int) -> dict[str, int]:
    """Block sizes and warps: 8 elements per thread, one access of 16 bytes in half precision.

    With four rows per program, a few hundred rows are enough programs for all multiprocessors. The
    cosine reads long rows from the L1 cache, which has room for one row of each program. Without a
    bound on registers, the assembler keeps a value of an unaligned row in memory.
    """
    if kind != "cosine":
        return {"BLOCK_R": 4, "BLOCK_D": 256, "num_warps": 4}
    block_r = 1 if D > 1024 else 4
    return {"BLOCK_R": block_r, "BLOCK_D": 1024 // block_r, "num_warps": 4, "maxnreg": 96}


@triton.jit
def _tile(x_rows, first, real, D, BLOCK_D: tl.constexpr):
    """Columns of the rows as float32 (BLOCK_R, BLOCK_D), 0 outside."""
    d = (first + tl.arange(0, BLOCK_D))[None, :]
    return tl.load(x_rows + d, mask=real[:, None] & (d < D), other=0.0).to(tl.float32)


@triton.jit
def _inverse_norm(products, peaks, x_rows, real, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """1/‖x‖ (BLOCK_R,), 0 for zero rows, from sums of x² and largest |x| (BLOCK_R, BLOCK_D)."""
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


@triton.jit(do_not_specialize=["R", "stride_factors", "number", "gradient", "weighted", "divided"])
def hidden_states_kernel(
    student_ptr,  # (R, D)
    teacher_ptr,
    mask_ptr,  # (R,) bytes
    factors_ptr,  # (R,): of the losses and their gradients, unread unless weighted
    divisor_ptr,  # (): of the gradients, unread unless divided
    losses_ptr,  # (R,)
    dx_ptr,  # (R, D), unused without a gradient
    R,
    D,
    stride_s,
    stride_t,
    stride_factors,
    beta,
    number,  # divisor of the gradients without divisor_ptr
    gradient,
    weighted,
    divided,
    KIND: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    exists = row < R
    real = exists
    if HAS_MASK:
        real = real & (tl.load(mask_ptr + row, mask=exists, other=0) != 0)
    s_rows = student_ptr + (row * stride_s)[:, None]
    t_rows = teacher_ptr + (row * stride_t)[:, None]
    dx_rows = dx_ptr + (row * D)[:, None]
    written = (exists & (gradient != 0))[:, None]
    by = tl.load(factors_ptr + row * stride_factors, mask=real & (weighted != 0), other=1.0)
    factor = by / tl.load(divisor_ptr, mask=divided != 0, other=number)

    total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    if KIND == COSINE:
        squares_s = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
        squares_t = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
        peaks_s = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
        peaks_t = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
        for first in range(0, D, BLOCK_D):
            s = _tile(s_rows, first, real, D, BLOCK_D)
            t = _tile(t_rows, first, real, D, BLOCK_D)
            squares_s += s * s
            squares_t += t * t
            peaks_s = tl.maximum(peaks_s, tl.abs(s))
            peaks_t = tl.maximum(peaks_t, tl.abs(t))
        of_s = _inverse_norm(squares_s, peaks_s, s_rows, real, D, BLOCK_R, BLOCK_D)
        of_t = _inverse_norm(squares_t, peaks_t, t_rows, real, D, BLOCK_R, BLOCK_D)
        for first in range(0, D, BLOCK_D):
            a = rounded(_tile(s_rows, first, real, D, BLOCK_D) * of_s[:, None])
            d = a - rounded(_tile(t_rows, first, real, D, BLOCK_D) * of_t[:, None])
            total += d * d
        losses = tl.sum(total, axis=1) / 2
        known = of_s + of_t == of_s + of_t  # NaN beside a zero row stays NaN
        losses = tl.where(((of_s == 0.0) | (of_t == 0.0)) & known, 1.0, losses)
        if gradient != 0:
            factor = tl.where(of_t == 0.0, 0.0, factor * of_s)
            for first in range(0, D, BLOCK_D):
                a = rounded(_tile(s_rows, first, real, D, BLOCK_D) * of_s[:, None])
                d = a - rounded(_tile(t_rows, first, real, D, BLOCK_D) * of_t[:, None])
                dx = (d - a * losses[:, None]) * factor[:, None]
                _store(dx_rows, first, tl.where(real[:, None], dx, 0.0), written, D, BLOCK_D)
    else:
        factor = factor / D
        for first in range(0, D, BLOCK_D):
            d = _tile(s_rows, first, real, D, BLOCK_D) - _tile(t_rows, first, real, D, BLOCK_D)
            nan = d - d  # NaN where the difference is infinite
            if KIND == MSE:
                total += nan + d * d
                dx = 2.0 * d
            else:
                size = tl.abs(d)
                slope = d / tl.where(beta > 0.0, beta, 1.0)
                near = size < beta
                total += nan + tl.where(near, d * slope * 0.5, size - beta * 0.5)
                # 0 and NaN are unchanged.
                sign = tl.where(d > 0.0, 1.0, tl.where(d < 0.0, -1.0, d)) + nan
                dx = tl.where(near, slope, sign)
            dx = tl.where(real[:, None], dx * factor[:, None], 0.0)
            _store(dx_rows, first, dx, written, D, BLOCK_D)
        losses = tl.sum(total / D, axis=1)
    tl.store(losses_ptr + row, tl.where(real, losses * by, 0.0), mask=exists)


@triton.jit
def _store(x_rows, first, x, written, D, BLOCK_D: tl.constexpr):
    d = (first + tl.arange(0, BLOCK_D))[None, :]
    tl.store(x_rows + d, x, mask=written & (d < D))


def _shapes(student, teacher, mask, weights, upstream, kind, beta, reduction, gradient):
    scalar = upstream is None and reduction != "none"
    rows = () if scalar else (student.shape[:-1].numel(),)
    loss = student.new_empty(rows, dtype=torch.float32)
    return [loss, student.new_empty(student.shape)] if gradient else [loss]


@operator(_shapes)
def hidden_states(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    upstream: Tensor | None,
    kind: str,
    beta: float,
    reduction: str,
    gradient: bool,
) -> list[Tensor]:
    """Reduced loss of states (..., D), in R rows, and with ``gradient`` its gradient (..., D).

    The mask (R,) is bool, and the weights (R,) are float32. With ``upstream``, () or (R,) for
    "none", the gradient is multiplied by it, and the first result has no meaning.
    """
    dx = student.new_empty(student.shape) if gradient else None
    student, teacher = as_rows(student), as_rows(teacher)
    R, D = student.shape
    losses = torch.empty(R, dtype=torch.float32, device=student.device)
    divisor, number = counted(mask, R) if reduction == "mean" else (None, 1)
    factors = weights
    if upstream is not None:
        factors = upstream.expand(R) if weights is None else upstream * weights
    config = blocks(kind, D)
    if R:
        launch_kernel(
            hidden_states_kernel,
            (cdiv(R, config["BLOCK_R"]),),
            student,
            teacher,
            bytes_of(mask),
            # One compiled form with and without what these hold: in its place another is not read.
            losses if factors is None else factors,
            losses if divisor is None else divisor,
            losses,
            student if dx is None else dx,
            R,
            D,
            student.stride(0),
            teacher.stride(0),
            0 if factors is None else factors.stride(0),
            beta,
            float(number),
            int(gradient),
            int(factors is not None),
            int(divisor is not None),
            KIND=KINDS[kind],
            HAS_MASK=mask is not None,
            **config,
        )
    if upstream is None and reduction != "none":
        losses = summed(losses, divisor, number)
    return [losses] if dx is None else [losses, dx]
