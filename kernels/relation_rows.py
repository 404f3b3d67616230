"""Code shared by `relation_small` and `relation_long`: rows, counts, options of a launch."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.numerics import multiplies_in_float32
from fastkd._core.operator import launch_kernel
from fastkd.kernels.launch import cdiv
from fastkd.kernels.pointers import padded, pick, slots

ALIGNMENT = 16  # of a row's features and of addresses in bytes, for wide loads

SMALLEST_NORM = tl.constexpr(1e-12)  # of torch.nn.functional.normalize
LARGEST_SCALE = tl.constexpr(1e12)  # 1/‖x‖ of rows too short to normalise
# Rows with larger sums of squares are scaled by this factor first.
LARGEST_SQUARES = tl.constexpr(1e37)
PART = tl.constexpr(2.0**-80)
SMALLEST_SCALE = tl.constexpr(1.2e-38)
# Factor of centred rows as operands, which avoids float16's subnormal numbers.
OPERAND_SCALE = tl.constexpr(4096.0)


@triton.jit
def row_scale(squares, part_squares):
    """1/‖x‖ from Σx² and Σ(PART·x)²; NaN where x is not finite, or so long that 1/‖x‖ is 0.

    Rounded to nearest: relations of nearly equal rows depend on the last bit of a row's length.
    """
    huge = squares > LARGEST_SQUARES
    norm = tl.sqrt_rn(tl.where(huge, part_squares, squares))
    scale = tl.div_rn(1.0, tl.maximum(norm, SMALLEST_NORM))
    scale = tl.where(norm < SMALLEST_NORM, LARGEST_SCALE, scale)
    scale = tl.where(huge, scale * PART, scale)
    # A scale of 0 would mark the row as padding.
    return tl.where((norm - norm == 0.0) & (scale >= SMALLEST_SCALE), scale, float("nan"))


@triton.jit
def load_rows(x_ptr, row, valid, d, D):
    """Features d of rows of D numbers as float32 (rows, features), 0 where not ``valid``."""
    inside = valid[:, None] & (d < D)[None, :]
    return tl.load(x_ptr + (row * D)[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "stride_side"])
def relation_row_scale_kernel(
    s_ptrs,  # layers of (rows, Ds)
    t_ptrs,  # layers of (rows, Dt)
    mask_ptr,  # (rows,) bytes
    scale_ptr,  # (layers, 2, stride_side), rows used: 1/‖x‖, 0 at padding
    rows,
    Ds,
    Dt,
    stride_side,
    SLOTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    layer = tl.program_id(1)
    side = tl.program_id(2)
    teacher = side == 1
    x_ptr = tl.where(teacher, pick(t_ptrs, layer, SLOTS), pick(s_ptrs, layer, SLOTS))
    D = tl.where(teacher, Dt, Ds)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = row < rows
    if HAS_MASK:
        real = real & (tl.load(mask_ptr + row, mask=real, other=0) != 0)
    squares = tl.zeros((BLOCK_R,), tl.float32)
    part_squares = tl.zeros((BLOCK_R,), tl.float32)
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        x = load_rows(x_ptr, row, real, d, D)
        squares += tl.sum(x * x, axis=1)
        part = x * PART
        part_squares += tl.sum(part * part, axis=1)
    scale = tl.where(real, row_scale(squares, part_squares), 0.0)
    first = (2 * layer + side).to(tl.int64) * stride_side
    tl.store(scale_ptr + first + row, scale, mask=row < rows)


@triton.jit(do_not_specialize=["B", "N"])
def relation_share_kernel(
    mask_ptr,  # (B, N) bytes
    tokens_ptr,  # (B,): share of each sample in the average
    samples_ptr,  # (N,): share of each position
    B,
    N,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    over_samples = tl.program_id(0) == 1
    groups = tl.where(over_samples, N, B)
    members = tl.where(over_samples, B, N)
    stride_group = tl.where(over_samples, 1, N).to(tl.int64)
    stride_member = tl.where(over_samples, N, 1).to(tl.int64)
    counted = tl.zeros((BLOCK_G,), tl.int32)
    for first_group in range(0, groups, BLOCK_G):
        g = first_group + tl.arange(0, BLOCK_G)
        real = tl.zeros((BLOCK_G,), tl.int32)
        for first in range(0, members, BLOCK_N):
            n = first + tl.arange(0, BLOCK_N)
            mask = tl.load(
                mask_ptr + g[:, None] * stride_group + n[None, :] * stride_member,
                mask=(g < groups)[:, None] & (n < members)[None, :],
                other=0,
            )
            real += tl.sum((mask != 0).to(tl.int32), axis=1)
        counted += (real >= 2).to(tl.int32)
    share = tl.div_rn(1.0, tl.maximum(tl.sum(counted, axis=0), 1).to(tl.float32))
    for first_group in range(0, groups, BLOCK_G):
        g = first_group + tl.arange(0, BLOCK_G)
        tl.store(tl.where(over_samples, samples_ptr, tokens_ptr) + g, share, mask=g < groups)


@triton.jit
def high_part(x):
    """``x`` in the tensor cores' dtype; together with `low_part` it has 22 bits."""
    return x.to(tl.float16)


@triton.jit
def low_part(x):
    return (x - x.to(tl.float16).to(tl.float32)).to(tl.float16)


@triton.jit
def centring_offset(along, squares, length, scale, valid):
    """h with R_ij = s_i·s_j + h_i + h_j + a constant, from s_i·mean, |s_i|² and |mean|².

    For unit rows there are two equal forms. The first one's error grows with |mean|², the second
    one's with |s_i|². If the first is used for all rows, the constant is 0: a larger constant would
    absorb rows too short to normalise.
    """
    second = tl.where(scale >= LARGEST_SCALE, along + (length - 1) / 2, -squares / 2)
    return tl.where(valid, tl.where(length < 0.5, along, second), 0.0)


@triton.jit
def derivative_scale(scale, HALF: tl.constexpr):
    """Factor of the gradient of a normalised row: ``scale``.

    float16 (``HALF``) can't hold 1e12: the gradient of a row too short to normalise is not scaled.
    """
    return tl.where(scale >= LARGEST_SCALE, 1.0, scale) if HALF else scale


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the gradient before the upstream gradient is known: float16 would underflow."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


class Layers:
    """Layers of one launch: their features, mask, row scales and gradients."""

    def __init__(
        self,
        students: list[Tensor],
        teachers: list[Tensor],
        mask: Tensor | None,
        eps: float,
        losses: Tensor,
        dx: Tensor | None,
    ) -> None:
        self.students, self.teachers = padded_rows(students), padded_rows(teachers)
        self.mask, self.masked, self.eps = mask, mask is not None, eps
        self.losses, self.dx = losses, dx
        B, N, self.Ds = self.students[0].shape
        self.Dt, self.rows = self.teachers[0].shape[-1], B * N
        self.dtype = students[0].dtype
        # Products of float32 aren't to be rounded: they are split into two float16 parts.
        self.split = self.dtype == torch.float32 and multiplies_in_float32()
        self.pointers = padded(self.students), padded(self.teachers)
        self.slots = slots(len(students))
        self.stride_side = cdiv(self.rows, 4) * 4  # the next side is aligned, too

    @functools.cached_property
    def scale(self) -> Tensor:
        """1/‖x‖ of student and teacher rows (layers, 2, stride_side), for groups of any length."""
        layers, (block_r, block_d) = len(self.students), (16, 128)
        scale = self.students[0].new_empty(layers, 2, self.stride_side, dtype=torch.float32)
        launch_kernel(
            relation_row_scale_kernel,
            (cdiv(self.rows, block_r), layers, 2),
            *self.pointers,
            self.mask,
            scale,
            self.rows,
            self.Ds,
            self.Dt,
            self.stride_side,
            SLOTS=self.slots,
            HAS_MASK=self.masked,
            BLOCK_R=block_r,
            BLOCK_D=block_d,
            num_warps=8,
        )
        return scale


def padded_size(D: int) -> int:
    """Number of features of a row in a kernel. Padding with zeros changes no relation."""
    return cdiv(D, ALIGNMENT) * ALIGNMENT


def padded_rows(layers: list[Tensor]) -> list[Tensor]:
    """``layers`` with dense rows of `padded_size` features; copied where they aren't."""
    missing = padded_size(layers[0].shape[-1]) - layers[0].shape[-1]
    if missing:
        layers = [torch.nn.functional.pad(x, (0, missing)) for x in layers]
    return [x if x.is_contiguous() else x.contiguous() for x in layers]


class Term(NamedTuple):
    """One kind of relation, over tokens or samples: weight, groups and their strides."""

    groups: int
    N: int
    strides: tuple[int, int]  # of groups and their rows, in rows
    first_loss: int  # place in the losses
    weight: float
    shares: Tensor | None  # (groups,): the groups' fractions of the average, times their weights
