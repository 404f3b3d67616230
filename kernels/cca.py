"""Products of float64 matrices on integer tensor cores, for GPUs without fast float64.

A matrix is stored as integers of 54 bits, times a power of 2 for each row, in seven digits of base
256 from −128 to 127 (the Ozaki scheme). A product of two matrices is the sum of the products of
their digits i and j, whose int32 sums are exact. Those with i + j ≥ 7 are left out: they are below
2^-54 of the largest terms. So 28 integer products replace one of float64, and no float64 product is
computed. See docs/kernels.md for the GPUs on which this is faster.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.operator import launch_kernel
from fastkd.kernels.launch import cdiv

DIGITS = tl.constexpr(7)
# Terms of an int32 sum: 7 pairs of digits of 2^14 each stay below 2^31.
MOST_TERMS = tl.constexpr(2**14)
# Rows and columns of a tile of digits that one program computes.
SPLIT_BLOCK = 64
# Smaller matrices have small tiles.
SMALL = 128


@triton.jit
def digits_kernel(
    x_ptr,  # (B, R, K) with these strides
    stride_x_b,
    stride_x_r,
    stride_x_k,
    scale_ptr,  # (B, R)
    digits_ptr,  # (B, DIGITS, rows, columns), highest digit first
    R,
    K,
    rows,
    columns,
    BLOCK: tl.constexpr,
):
    """Digits of x / scale, with |x| ≤ scale, and zeros around."""
    b = tl.program_id(2).to(tl.int64)
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)[:, None]
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)[None, :]
    inside = (r < R) & (k < K)
    x = tl.load(x_ptr + b * stride_x_b + r * stride_x_r + k * stride_x_k, mask=inside, other=0.0)
    scale = tl.load(scale_ptr + b * R + r, mask=r < R, other=1.0)
    rest = tl.floor(x * (2.0 ** (8 * DIGITS - 2) / scale) + 0.5).to(tl.int64)
    digits_ptr += b * DIGITS * rows * columns + r * columns + k
    for i in tl.static_range(DIGITS):
        digit = rest
        if i < DIGITS - 1:
            digit = ((rest + 128) & 255) - 128
        place = tl.cast(DIGITS - 1 - i, tl.int64) * rows * columns
        tl.store(digits_ptr + place, digit.to(tl.int8))
        rest = (rest - digit) >> 8


@triton.jit
def digit_product_kernel(
    a_ptr,  # (B, DIGITS, rows, K)
    b_ptr,  # (B, DIGITS, columns, K)
    scale_a_ptr,  # (B, M)
    scale_b_ptr,  # (B, N)
    out_ptr,  # (B, M, N)
    M,
    N,
    rows,
    columns,
    K,
    SYMMETRIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of a·bᵀ in float64; with SYMMETRIC also its mirror image, which is not computed."""
    row, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    b = tl.program_id(2).to(tl.int64)
    if (SYMMETRIC == 0) | (column < row + BLOCK_M):
        i, j, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        a = a_ptr + (b * DIGITS * rows + row) * K + (i[:, None] * K + k[None, :])
        b_t = b_ptr + (b * DIGITS * columns + column) * K + (j[:, None] * K + k[None, :])
        to_a, to_b = tl.cast(rows, tl.int64) * K, tl.cast(columns, tl.int64) * K
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float64)
        for down in range(0, DIGITS):
            order = DIGITS - 1 - down  # the smallest terms first
            total *= 1 / 256
            for start in range(0, K, MOST_TERMS):
                end = tl.minimum(start + MOST_TERMS, K)
                terms = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
                for digit in range(0, order + 1):
                    left, right = a + digit * to_a, b_t + (order - digit) * to_b
                    for at in range(start, end, BLOCK_K):
                        terms = tl.dot(
                            tl.load(left + at), tl.load(right + at).T, terms, out_dtype=tl.int32
                        )
                total += terms.to(tl.float64)
        i, j = row + i, column + j
        total *= tl.load(scale_b_ptr + b * N + j, mask=j < N, other=0.0)[None, :]
        total *= tl.load(scale_a_ptr + b * M + i, mask=i < M, other=0.0)[:, None]
        total *= 2.0**-12
        inside = (i < M)[:, None] & (j < N)[None, :]
        at = b * M * N + (i.to(tl.int64)[:, None] * N + j[None, :])
        tl.store(out_ptr + at, total, mask=inside)
        if SYMMETRIC:
            at = b * M * N + (j.to(tl.int64)[None, :] * N + i[:, None])
            tl.store(out_ptr + at, total, mask=inside)


def launch_digit_product(a: Tensor, b: Tensor, symmetric: bool = False) -> Tensor:
    """A·B (batch, M, N) of float64 matrices; of a ``symmetric`` one the lower half is computed."""
    B, M, N = a.shape[0], a.shape[1], b.shape[-1]
    out = torch.empty(B, M, N, dtype=torch.float64, device=a.device)
    (left, scale_a), (right, scale_b) = _split(a), _split(b.mT)
    rows, columns, inner = left.shape[-2], right.shape[-2], left.shape[-1]
    tile = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8}
    if rows % 128 or columns % 128:
        tile = {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4}
    tile |= {"BLOCK_K": 32 if inner % 128 else 128, "num_stages": 3}
    launch_kernel(
        digit_product_kernel, (rows // tile["BLOCK_M"], columns // tile["BLOCK_N"], B),
        left, right, scale_a, scale_b, out, M, N, rows, columns, inner,
        SYMMETRIC=symmetric, **tile,
    )  # fmt: skip
    return out


# An operator, because the extension's roots are products too.
digit_product = torch.library.custom_op(
    "fastkd::digit_product", launch_digit_product, mutates_args=()
)


@digit_product.register_fake
def _(a, b, symmetric=False):
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Digits (B, DIGITS, rows, columns) of x (B, R, K), padded with zeros, and scales (B, R).

    Scales are powers of 2; NaN for a row with NaN.
    """
    B, R, K = x.shape
    scale = x.abs().amax(-1).clamp_min(2.0**-900).log2().ceil().exp2()
    rows, columns = _padded(R), _padded(K)
    digits = torch.empty(B, DIGITS.value, rows, columns, dtype=torch.int8, device=x.device)
    size = SPLIT_BLOCK if rows % SPLIT_BLOCK == columns % SPLIT_BLOCK == 0 else 32
    launch_kernel(digits_kernel, (rows // size, columns // size, B),
        x, *x.stride(), scale, digits, R, K, rows, columns, BLOCK=size, num_warps=4,
    )  # fmt: skip
    return digits, scale


def _padded(size: int) -> int:
    """Size of whole tiles."""
    block = 32 if size <= SMALL else 128
    return cdiv(size, block) * block
