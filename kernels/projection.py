"""LayerNorm-MSE: ½‖norm(x) − norm(y)‖² over rows, and its gradients for x and y.

Data path. A program holds whole rows of x and y in registers, computes mean and variance, and
writes the losses and, where they are needed, dx and dy. `fastkd.kernels.reduction` adds the losses.

The gradients are those for an upstream gradient of 1; `fastkd.kernels.upstream` multiplies them in
the backward pass, without work if that is 1. float16 would underflow: there the forward pass
computes the losses alone, and the backward pass reads the rows again.

With E = R·D elements of s bytes: 2Es read and 2Es written, 4Es bytes in all (3Es if only one is
needed), 6Es if both are needed for rows of more than 8192, and 2Es more where the backward pass
reads the rows again; about 35E operations. Bound by bandwidth.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.numerics import as_rows
from fastkd._core.operator import launch_kernel, operator
from fastkd.kernels.launch import cdiv, next_power_of_2
from fastkd.kernels.reduction import summed
from fastkd.kernels.rounding import rounded

# Variances outside this range are computed again from scaled rows.
SMALLEST_VARIANCE = tl.constexpr(1e-25)
LARGEST_VARIANCE = tl.constexpr(1e25)
# Ratio of mean to standard deviation from which the mean's rounding error matters.
LARGE_MEAN = tl.constexpr(1e3)

# Both gradients come from one launch up to here; beyond, their rows together would spill registers.
MOST_COLUMNS_OF_BOTH = 8192


@functools.cache
def blocks(D: int, both: bool, size: int) -> dict[str, int]:
    """Block sizes and warps for rows of D elements of ``size`` bytes, and one or both gradients.

    A program has at least 1024 elements of x and of y, so short rows share one, with 8 elements per
    thread: 4 up to 128 columns, where each row's statistics need registers, too; 16 at 4096, and
    more above 8192, where 32 warps would leave too few registers per thread.
    """
    block_d = max(next_power_of_2(D), 16)
    warps = {2048: 8, 4096: 8, 8192: 32} | dict.fromkeys((16, 32, 64, 128), 8)
    num_warps = warps.get(block_d, 16 if block_d > 8192 else 4)
    # Without a bound ptxas aims at 40 registers in some forms, and spills.
    bound = {"maxnreg": 128} if block_d in (256, 1024, 2048) else {}
    if block_d == 4096 and both and size == 2 and D % 16 == 0:
        # At most 80 registers let three programs share a multiprocessor instead of two: 469 µs
        # instead of 640 for 32,768 rows of 4096 on an H100 with Triton 3.6.
        bound = {"maxnreg": 80}
    return {"BLOCK_R": max(1024 // block_d, 1), "BLOCK_D": block_d, "num_warps": num_warps} | bound


@triton.jit
def _normalise(x, inside, D, eps):
    """Rows minus mean, over √(var + eps); 0 outside, and in constant rows without eps."""
    mean = tl.sum(x, axis=1) / D
    centred = tl.where(inside, x - mean[:, None], 0.0)
    rest = tl.sum(centred, axis=1) / D  # the mean's rounding error, which matters in short rows
    var = tl.sum(rounded(centred * centred), axis=1) / D + eps
    rstd = tl.where(var == 0.0, 0.0, 1.0 / tl.sqrt(var))
    unusual = (var < SMALLEST_VARIANCE) | (var > LARGEST_VARIANCE)
    unusual = unusual | (tl.abs(mean) * rstd > LARGE_MEAN)
    if tl.max(unusual.to(tl.int32), axis=0) > 0:
        # Other rows of the block are unchanged.
        peak = tl.max(tl.where(inside, tl.abs(centred - rest[:, None]), 0.0), axis=1)
        scale = tl.where(unusual & (peak > 0.0), 1.0 / peak, 1.0)
        scaled = tl.where(inside, (centred - rest[:, None]) * scale[:, None], 0.0)
        again = tl.sum(rounded(scaled * scaled), axis=1) / D + eps * scale * scale
        again = tl.where(again == 0.0, 0.0, scale / tl.sqrt(again))
        rstd = tl.where(unusual, again, rstd)
    norm = rounded((centred - rest[:, None]) * rstd[:, None])
    return tl.where(inside, norm, 0.0), rstd


@triton.jit
def _gradient(along, norm, rstd, eps):
    """``along`` less its component along ``norm``, except for the fraction of it due to eps.

    The component is divided by norm·norm and not by D, which is larger by eps. If ``along`` is
    parallel to ``norm``, the difference would be a rounding error as large as this fraction.
    """
    squares = tl.sum(norm * norm, axis=1)
    part = tl.sum(along * norm, axis=1) / tl.where(squares == 0.0, 1.0, squares)
    rest = along - norm * part[:, None]
    # The rounding error along ``norm`` may be as large as this fraction.
    left = tl.sum(rest * norm, axis=1) / tl.where(squares == 0.0, 1.0, squares)
    return rest + norm * (part * (eps * rstd * rstd) - left)[:, None]


@triton.jit(do_not_specialize=["R", "stride_factors", "weighted", "gradient"])
def layer_norm_mse_kernel(
    x_ptr,
    y_ptr,
    factors_ptr,  # (R,): of the losses and their gradients, unread unless weighted
    losses_ptr,  # (R,)
    dx_ptr,  # unused without a gradient
    dy_ptr,
    R,
    D,
    stride_x,
    stride_y,
    stride_factors,  # 0 where all rows have the same
    eps,
    scale,
    weighted,
    gradient,
    BOTH: tl.constexpr,  # dy too
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    exists = row < R
    column = tl.arange(0, BLOCK_D)
    inside = exists[:, None] & (column < D)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride_x + column[None, :], mask=inside, other=0.0)
    y = tl.load(y_ptr + row[:, None] * stride_y + column[None, :], mask=inside, other=0.0)
    by = tl.load(factors_ptr + row * stride_factors, mask=exists & (weighted != 0), other=1.0)
    by *= scale
    norm_x, rstd_x = _normalise(x.to(tl.float32), inside, D, eps)
    norm_y, rstd_y = _normalise(y.to(tl.float32), inside, D, eps)
    difference = norm_x - norm_y  # (BLOCK_R, BLOCK_D)
    squares = tl.sum(rounded(difference * difference), axis=1)
    tl.store(losses_ptr + row, squares * (0.5 * by), mask=exists)
    if gradient != 0:
        out = row[:, None] * D + column[None, :]
        dx = _gradient(difference, norm_x, rstd_x, eps)
        tl.store(dx_ptr + out, dx * (by * rstd_x)[:, None], mask=inside)
        if BOTH:
            dy = _gradient(-difference, norm_y, rstd_y, eps)
            tl.store(dy_ptr + out, dy * (by * rstd_y)[:, None], mask=inside)


def _shapes(x, y, weights, upstream, eps, divisor, needs_dx, needs_dy):
    rows = () if upstream is None else (x.shape[:-1].numel(),)
    loss = x.new_empty(rows, dtype=torch.float32)
    return [loss, *(x.new_empty(x.shape) for needed in (needs_dx, needs_dy) if needed)]


@operator(_shapes)
def layer_norm_mse(
    x: Tensor,
    y: Tensor,
    weights: Tensor | None,
    upstream: Tensor | None,
    eps: float,
    divisor: int,
    needs_dx: bool,
    needs_dy: bool,
) -> list[Tensor]:
    """Sum of ½‖norm(x) − norm(y)‖² / divisor over the R rows of x and y (..., D), and dx, dy or
    both, as needed.

    Weights (R,) are float32. With ``upstream`` () the gradients are multiplied by it, and the first
    result has no meaning.
    """
    gradients = [x.new_empty(x.shape) for needed in (needs_dx, needs_dy) if needed]
    x, y = as_rows(x), as_rows(y)
    R, D = x.shape
    losses = torch.empty(R, dtype=torch.float32, device=x.device)
    factors = weights
    if upstream is not None:
        factors = upstream.expand(R) if weights is None else upstream * weights
    both = len(gradients) == 2 and D <= MOST_COLUMNS_OF_BOTH
    config = blocks(D, both, x.element_size())
    # The loss is the same with its sides swapped.
    launches = [(x, y)] if needs_dx or not needs_dy else []
    launches += [(y, x)] if needs_dy and not both else []
    for (a, b), da in zip(launches if R else (), gradients or [x], strict=False):
        launch_kernel(
            layer_norm_mse_kernel,
            (cdiv(R, config["BLOCK_R"]),),
            a,
            b,
            losses if factors is None else factors,
            losses,
            da,
            gradients[-1] if both else da,
            R,
            D,
            a.stride(0),
            b.stride(0),
            0 if factors is None else factors.stride(0),
            eps,
            1.0 / divisor,
            int(factors is not None),
            len(gradients),
            BOTH=both,
            **config,
        )
    return [summed(losses, None, 1) if upstream is None else losses, *gradients]
