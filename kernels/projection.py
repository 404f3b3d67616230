"""LayerNorm-MSE: ½‖norm(x) − norm(y)‖² over rows, and its gradients for x and y.

Data path. Forward: a program holds whole rows of x and y in registers, computes mean and variance,
and writes the loss and four numbers per row (mean and 1/√(var + eps) of x and of y). PyTorch sums
the weighted losses. Backward: a program reads the rows again, recomputes the normalised rows from
the four numbers, and writes dx and dy, multiplied by the upstream gradient.

With E = R·D elements of s bytes: forward reads 2Es, backward reads 2Es and writes 2Es (Es if only
one is needed), 6Es bytes in all, 8Es if both are needed for rows of more than 8192; about 10E
operations forward and 25E backward. Bound by bandwidth.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.operator import operator
from fastkd.kernels.launch import cdiv, next_power_of_2
from fastkd.kernels.rounding import rounded

# Variances outside this range are computed again from scaled rows.
SMALLEST_VARIANCE = tl.constexpr(1e-25)
LARGEST_VARIANCE = tl.constexpr(1e25)
# Ratio of mean to standard deviation from which the mean's rounding error matters.
LARGE_MEAN = tl.constexpr(1e3)

# Both gradients come from one launch up to here; beyond, their rows together would spill registers.
MOST_COLUMNS_OF_BOTH = 8192


@functools.cache
def blocks(D: int) -> dict[str, int]:
    """Block sizes and warps for rows of D.

    A program has at least 1024 elements of x and of y, so short rows share one, with 8 elements per
    thread: 4 up to 128 columns, where each row's statistics need registers, too; 16 at 4096, and
    more above 8192, where 32 warps would leave too few registers per thread.
    """
    block_d = max(next_power_of_2(D), 16)
    warps = {2048: 8, 4096: 8, 8192: 32} | dict.fromkeys((16, 32, 64, 128), 8)
    num_warps = warps.get(block_d, 16 if block_d > 8192 else 4)
    # Without a bound ptxas aims at 40 registers in some forms, and spills.
    bound = {"maxnreg": 128} if block_d in (256, 1024, 2048) else {}
    return {"BLOCK_R": max(1024 // block_d, 1), "BLOCK_D": block_d, "num_warps": num_warps} | bound


@triton.jit
def _normalise(x, inside, D, eps):
    """Rows minus mean, over √(var + eps); 0 outside, and in constant rows without eps."""
    mean = tl.sum(x, axis=1) / D
    centred = tl.where(inside, x - mean[:, None], 0.0)
    var = tl.sum(rounded(centred * centred), axis=1) / D + eps
    rstd = tl.where(var == 0.0, 0.0, 1.0 / tl.sqrt(var))
    unusual = (var < SMALLEST_VARIANCE) | (var > LARGEST_VARIANCE)
    unusual = unusual | (tl.abs(mean) * rstd > LARGE_MEAN)
    rest = tl.zeros_like(mean)
    if tl.max(unusual.to(tl.int32), axis=0) > 0:
        # The mean's rounding error; other rows of the block are unchanged.
        rest = tl.where(unusual, tl.sum(centred, axis=1) / D, 0.0)
        peak = tl.max(tl.where(inside, tl.abs(centred - rest[:, None]), 0.0), axis=1)
        scale = tl.where(unusual & (peak > 0.0), 1.0 / peak, 1.0)
        scaled = tl.where(inside, (centred - rest[:, None]) * scale[:, None], 0.0)
        var = tl.sum(rounded(scaled * scaled), axis=1) / D + eps * scale * scale
        rstd = tl.where(var == 0.0, 0.0, scale / tl.sqrt(var))
    norm = rounded((centred - rest[:, None]) * rstd[:, None])
    return tl.where(inside, norm, 0.0), mean, rstd


@triton.jit(do_not_specialize=["R"])
def layer_norm_mse_forward_kernel(
    x_ptr,
    y_ptr,
    losses_ptr,  # (R,)
    stats_ptr,  # (R, 4): mean and rstd of x, mean and rstd of y
    R,
    D,
    stride_x,
    stride_y,
    eps,
    scale,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_D)
    inside = (row < R)[:, None] & (column < D)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride_x + column[None, :], mask=inside, other=0.0)
    y = tl.load(y_ptr + row[:, None] * stride_y + column[None, :], mask=inside, other=0.0)
    norm_x, mean_x, rstd_x = _normalise(x.to(tl.float32), inside, D, eps)
    norm_y, mean_y, rstd_y = _normalise(y.to(tl.float32), inside, D, eps)
    difference = norm_x - norm_y  # (BLOCK_R, BLOCK_D)
    squares = tl.sum(rounded(difference * difference), axis=1)
    tl.store(losses_ptr + row, squares * scale, mask=row < R)

    tl.store(stats_ptr + row * 4, mean_x, mask=row < R)
    tl.store(stats_ptr + row * 4 + 1, rstd_x, mask=row < R)
    tl.store(stats_ptr + row * 4 + 2, mean_y, mask=row < R)
    tl.store(stats_ptr + row * 4 + 3, rstd_y, mask=row < R)


@triton.jit
def _normalised(x, mean, rstd, inside, D):
    """norm(x) with mean 0: in rows of few columns the rounding error of ``mean`` matters."""
    centred = tl.where(inside, x.to(tl.float32) - mean[:, None], 0.0)
    rest = tl.sum(centred, axis=1) / D
    return tl.where(inside, (centred - rest[:, None]) * rstd[:, None], 0.0)


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


@triton.jit(do_not_specialize=["R", "stride_dloss", "first"])
def layer_norm_mse_backward_kernel(
    x_ptr,
    y_ptr,
    stats_ptr,  # (R, 4)
    dloss_ptr,  # (R,)
    stride_dloss,  # 0 where all rows have the same
    dx_ptr,
    dy_ptr,
    R,
    D,
    stride_x,
    stride_y,
    eps,
    scale,
    first,  # of the statistics of x: 0, or 2 where the sides are swapped
    BOTH: tl.constexpr,  # dy too
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_D)
    inside = (row < R)[:, None] & (column < D)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride_x + column[None, :], mask=inside, other=0.0)
    y = tl.load(y_ptr + row[:, None] * stride_y + column[None, :], mask=inside, other=0.0)
    stats_x, stats_y = stats_ptr + row * 4 + first, stats_ptr + row * 4 + 2 - first
    mean_x = tl.load(stats_x, mask=row < R, other=0.0)
    rstd_x = tl.load(stats_x + 1, mask=row < R, other=0.0)
    mean_y = tl.load(stats_y, mask=row < R, other=0.0)
    rstd_y = tl.load(stats_y + 1, mask=row < R, other=0.0)

    norm_x = _normalised(x, mean_x, rstd_x, inside, D)
    norm_y = _normalised(y, mean_y, rstd_y, inside, D)
    dloss = tl.load(dloss_ptr + row * stride_dloss, mask=row < R, other=0.0) * scale
    out = row[:, None] * D + column[None, :]
    dx = _gradient(norm_x - norm_y, norm_x, rstd_x, eps)
    tl.store(dx_ptr + out, dx * (dloss * rstd_x)[:, None], mask=inside)
    if BOTH:
        dy = _gradient(norm_y - norm_x, norm_y, rstd_y, eps)
        tl.store(dy_ptr + out, dy * (dloss * rstd_y)[:, None], mask=inside)


def _forward_shapes(x, y, eps, divisor):
    R = x.shape[0]
    return x.new_empty(R, dtype=torch.float32), x.new_empty(R, 4, dtype=torch.float32)


@operator(_forward_shapes)
def layer_norm_mse_forward(x: Tensor, y: Tensor, eps: float, divisor: int) -> tuple[Tensor, Tensor]:
    """½‖norm(x) − norm(y)‖² / divisor (R,), and the rows' statistics, for x and y (R, D)."""
    R, D = x.shape
    config = blocks(D)
    programs = cdiv(R, config["BLOCK_R"])
    losses = torch.empty(R, dtype=torch.float32, device=x.device)
    stats = torch.empty(R, 4, dtype=torch.float32, device=x.device)
    if programs:
        scale = 0.5 / divisor
        layer_norm_mse_forward_kernel[(programs,)](
            x, y, losses, stats, R, D, x.stride(0), y.stride(0), eps, scale, **config
        )
    return losses, stats


def _backward_shapes(x, y, stats, dloss, eps, divisor, needs_dx, needs_dy):
    return [x.new_empty(x.shape) for needed in (needs_dx, needs_dy) if needed]


@operator(_backward_shapes)
def layer_norm_mse_backward(
    x: Tensor,
    y: Tensor,
    stats: Tensor,
    dloss: Tensor,
    eps: float,
    divisor: int,
    needs_dx: bool,
    needs_dy: bool,
) -> list[Tensor]:
    """dx, dy or both (R, D), as needed, in the dtype of x; ``dloss`` (R,) may be expanded."""
    R, D = x.shape
    config = blocks(D)
    programs = cdiv(R, config["BLOCK_R"])
    dx = torch.empty(R, D, dtype=x.dtype, device=x.device) if needs_dx else None
    dy = torch.empty(R, D, dtype=y.dtype, device=y.device) if needs_dy else None
    both = needs_dx and needs_dy and config["BLOCK_D"] <= MOST_COLUMNS_OF_BOTH
    launches = [(x, y, dx, dy if both else None, 0)] if needs_dx else []
    if needs_dy and not both:  # the loss is the same with its sides swapped
        launches.append((y, x, dy, None, 2))
    for a, b, da, db, first in launches if programs else ():
        layer_norm_mse_backward_kernel[(programs,)](
            a,
            b,
            stats,
            dloss,
            dloss.stride(0),
            da,
            db,
            R,
            D,
            a.stride(0),
            b.stride(0),
            eps,
            1.0 / divisor,
            first,
            BOTH=both,
            **config,
        )
    return [side for side in (dx, dy) if side is not None]
