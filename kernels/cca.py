"""Products for canonical correlations that need more digits than float32, on tensor cores.

**Digits.** A float64 matrix is stored as integers of 8n − 2 bits, times a power of 2 for each row
or each column, in n digits of base 256 from −128 to 127 (the Ozaki scheme). A product of two
matrices is the sum of the products of their digits i and j, whose int32 sums are exact. Those with
i + j ≥ ``orders`` are left out. With four digits and all seven orders a Gram matrix is exactly that
of features rounded to 30 bits.

**Polar factor.** `polar` has the steps of `fastkd.linalg.roots.polar`. The first steps have digits,
the others matrices as sums of two float16 matrices, as in `fastkd.kernels.cayley`: three products
with an error of 2^-22. Each launch stores both parts of the next launch's matrix.

Matrices are read and written in float64, but no float64 product is computed.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.operator import launch_kernel
from fastkd.kernels.cayley import LOW
from fastkd.kernels.launch import capability, cdiv

# Terms of an int32 sum: 4 pairs of digits of 2^14 each stay below 2^31.
MOST_TERMS = tl.constexpr(2**15)
# Factor of the polar factor's float16 matrices, whose elements are below 8.
SCALE = tl.constexpr(2.0**8)
# Steps of the polar factor by digits.
DIGIT_STEPS = 2
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
    scale_ptr,  # (B, R), or (B, K) without BY_ROW
    digits_ptr,  # (B, DIGITS, rows, columns), highest digit first
    R,
    K,
    rows,
    columns,
    DIGITS: tl.constexpr,
    BY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Digits of x / scale, with |x| ≤ scale, and zeros around."""
    b = tl.program_id(2).to(tl.int64)
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)[:, None]
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)[None, :]
    inside = (r < R) & (k < K)
    x = tl.load(x_ptr + b * stride_x_b + r * stride_x_r + k * stride_x_k, mask=inside, other=0.0)
    if BY_ROW:
        scale = tl.load(scale_ptr + b * R + r, mask=r < R, other=1.0)
    else:
        scale = tl.load(scale_ptr + b * K + k, mask=k < K, other=1.0)
    rest = tl.floor(x * (2.0 ** (8 * DIGITS - 2) / scale) + 0.5)
    rest = rest.to(tl.int64) if DIGITS > 4 else rest.to(tl.int32)
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
    a_ptr,  # (B, A_DIGITS, rows, K)
    b_ptr,  # (B, B_DIGITS, columns, K)
    scale_a_ptr,  # (B, M), with SCALES_A
    scale_b_ptr,  # (B, N)
    out_ptr,  # (B, M, N)
    M,
    N,
    rows,
    columns,
    K,
    A_DIGITS: tl.constexpr,
    B_DIGITS: tl.constexpr,
    ORDERS: tl.constexpr,
    SCALES_A: tl.constexpr,
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
        a = a_ptr + (b * A_DIGITS * rows + row) * K + (i[:, None] * K + k[None, :])
        b_t = b_ptr + (b * B_DIGITS * columns + column) * K + (j[:, None] * K + k[None, :])
        to_a, to_b = tl.cast(rows, tl.int64) * K, tl.cast(columns, tl.int64) * K
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float64)
        for down in range(0, ORDERS):
            order = ORDERS - 1 - down  # the smallest terms first
            total *= 1 / 256
            first_digit, last_digit = (
                tl.maximum(0, order - B_DIGITS + 1),
                tl.minimum(order, A_DIGITS - 1),
            )
            for start in range(0, K, MOST_TERMS):
                end = tl.minimum(start + MOST_TERMS, K)
                terms = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
                for digit in range(first_digit, last_digit + 1):
                    left, right = a + digit * to_a, b_t + (order - digit) * to_b
                    for at in range(start, end, BLOCK_K):
                        terms = tl.dot(
                            tl.load(left + at), tl.load(right + at).T, terms, out_dtype=tl.int32
                        )
                total += terms.to(tl.float64)
        i, j = row + i, column + j
        total *= tl.load(scale_b_ptr + b * N + j, mask=j < N, other=0.0)[None, :]
        if SCALES_A:
            total *= tl.load(scale_a_ptr + b * M + i, mask=i < M, other=0.0)[:, None]
        total *= 2.0**-12
        inside = (i < M)[:, None] & (j < N)[None, :]
        at = b * M * N + (i.to(tl.int64)[:, None] * N + j[None, :])
        tl.store(out_ptr + at, total, mask=inside)
        if SYMMETRIC:
            at = b * M * N + (j.to(tl.int64)[None, :] * N + i[:, None])
            tl.store(out_ptr + at, total, mask=inside)


@triton.jit
def polar_product_kernel(
    a_ptr,  # high and low parts: (2, B, rows, K), or (2, B, K, rows) with TRANSPOSED
    b_ptr,  # (2, B, K, columns)
    out_ptr,  # (2, B, rows, columns)
    added_ptr,  # (2, B, rows, columns)
    times,
    by,
    ones,
    rows,
    columns,
    K,
    TRANSPOSED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """times·a·b, with ADDS + by·added + ones·I, in parts; with SYMMETRIC see above.

    Tensor cores round sums toward 0, an error that grows with their length. So their sums have
    BLOCK_K terms, and are added in float32.
    """
    row, column = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    if (SYMMETRIC == 0) | (column <= row):
        matrix, B = tl.program_id(2).to(tl.int64), tl.num_programs(2)
        i, k = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
        to_a, to_b = B * rows.to(tl.int64) * K, B * columns.to(tl.int64) * K
        b = b_ptr + matrix * columns * K + column + (k[:, None] * columns + i[None, :])
        if TRANSPOSED:
            a = a_ptr + matrix * rows * K + row + (k[:, None] * rows + i[None, :])
        else:
            a = a_ptr + (matrix * rows + row) * K + (i[:, None] * K + k[None, :])
        product = tl.zeros((BLOCK, BLOCK), tl.float32)
        small = tl.zeros((BLOCK, BLOCK), tl.float32)
        for at in range(0, K, BLOCK_K):
            left = a + tl.cast(at, tl.int64) * (rows if TRANSPOSED else 1)
            right = b + tl.cast(at, tl.int64) * columns
            high, low = tl.load(left), tl.load(left + to_a)
            if TRANSPOSED:
                high, low = high.T, low.T
            high_b, low_b = tl.load(right), tl.load(right + to_b)
            small = tl.dot(low, high_b, small)
            small = tl.dot(high, low_b, small)
            # This option keeps the compiler from adding to ``product`` in the tensor cores.
            product += tl.dot(high, high_b, max_num_imprecise_acc=1)
        product += small * (1 / LOW)
        product *= times
        area = matrix * rows * columns
        to = area + row.to(tl.int64) * columns + column + (i[:, None] * columns + i[None, :])
        to_low = B * rows.to(tl.int64) * columns
        if ADDS:
            added = tl.load(added_ptr + to + to_low).to(tl.float32) * (1 / LOW)
            product += by * (tl.load(added_ptr + to).to(tl.float32) + added)
            product += tl.where((row - column) + i[:, None] == i[None, :], ones, 0.0)
        high = product.to(tl.float16)
        low = ((product - high.to(tl.float32)) * LOW).to(tl.float16)
        tl.store(out_ptr + to, high)
        tl.store(out_ptr + to + to_low, low)
        if SYMMETRIC:
            to = area + column.to(tl.int64) * columns + row + (i[:, None] * columns + i[None, :])
            tl.store(out_ptr + to, high.T)
            tl.store(out_ptr + to + to_low, low.T)


class Digits(NamedTuple):
    """Integers times ``scale``, of a matrix (B, R, K)."""

    values: Tensor  # (B, digits, rows, columns), padded with zeros
    scale: Tensor  # (B, R, 1), or (B, 1, K)
    shape: torch.Size
    by_row: bool


def scale_of(x: Tensor, dim: int) -> Tensor:
    """Powers of 2 from the largest absolute values along ``dim``, which is kept; NaN for NaN."""
    size = torch.linalg.vector_norm(x, float("inf"), dim, keepdim=True)
    return size.clamp_min(2.0**-900).log2().ceil().exp2()


def split(x: Tensor, scale: Tensor | None = None, digits: int = 4) -> Digits:
    """Digits of x (B, R, K) in float64; by default each row has its ``scale``."""
    B, R, K = x.shape
    by_row = scale is None
    scale = scale_of(x, -1) if scale is None else scale
    rows, columns = _padded(R), _padded(K)
    values = torch.empty(B, digits, rows, columns, dtype=torch.int8, device=x.device)
    size = SPLIT_BLOCK if rows % SPLIT_BLOCK == columns % SPLIT_BLOCK == 0 else 32
    launch_kernel(digits_kernel, (rows // size, columns // size, B),
        x, *x.stride(), scale.contiguous(), values, R, K, rows, columns,
        DIGITS=digits, BY_ROW=by_row, BLOCK=size, num_warps=4,
    )  # fmt: skip
    return Digits(values, scale, x.shape, by_row)


def product(a: Digits, b: Digits, orders: int = 4, symmetric: bool = False) -> Tensor:
    """A·Bᵀ (B, M, N) in float64 of A (B, M, K) and B (B, N, K).

    If A's columns have the scales, B must be multiplied by them. Only the lower half of a
    ``symmetric`` product is computed.
    """
    (B, M, _), N = a.shape, b.shape[1]
    out = torch.empty(B, M, N, dtype=torch.float64, device=a.values.device)
    rows, columns = a.values.shape[-2], b.values.shape[-2]
    tile = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8}
    if rows % 128 or columns % 128:
        tile = {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4}
    tile |= {"BLOCK_K": 32 if a.values.shape[-1] % 128 else 128, "num_stages": 3}
    grid = (rows // tile["BLOCK_M"], columns // tile["BLOCK_N"], B)
    launch_kernel(digit_product_kernel, grid,
        a.values, b.values, a.scale, b.scale, out, M, N, rows, columns, a.values.shape[-1],
        A_DIGITS=a.values.shape[1], B_DIGITS=b.values.shape[1], ORDERS=orders,
        SCALES_A=a.by_row, SYMMETRIC=symmetric, **tile,
    )  # fmt: skip
    return out


def polar(m: Tensor, steps: list[tuple[float, float, float]]) -> Tensor:
    """Polar factor (B, R, C) in float64 of ``m``; see `fastkd.linalg.roots.polar`.

    The first steps have digits: float16 pairs would turn the vectors of singular values near 1e-6.
    """
    if m.shape[-2] < m.shape[-1]:
        return polar(m.mT, steps).mT
    for a, b, c in steps[:DIGIT_STEPS]:
        columns = split(m.mT)
        gram = product(columns, columns, 5, symmetric=True)
        rows = split(gram)
        inner = product(rows, rows, 5, symmetric=True).mul_(c).add_(gram, alpha=b)
        inner.diagonal(dim1=-2, dim2=-1).add_(a)
        m = product(split(m), split(inner), 5)
    return _by_pairs(m, steps[DIGIT_STEPS:])


def _by_pairs(m: Tensor, steps: list[tuple[float, float, float]]) -> Tensor:
    B, R, C = m.shape
    large = capability(m.device) in (9, 10)  # 128 rows spill registers on others
    block = 32 if C <= SMALL else 128 if C >= 512 and large else 64
    rows, columns = cdiv(R, block) * block, cdiv(C, block) * block
    scaled = F.pad(m * SCALE.value, (0, columns - C, 0, rows - R)).float()
    high = scaled.half()
    x = torch.stack([high, ((scaled - high.float()) * LOW.value).half()])
    gram, inner = (x.new_empty(2, B, columns, columns) for _ in range(2))
    tile = {"BLOCK": block, "BLOCK_K": 32, "num_warps": 8 if block == 128 else 4, "num_stages": 3}

    def multiply(left, right, out, times=1.0, added=None, by=0.0, ones=0.0):
        launch_kernel(
            polar_product_kernel, (out.shape[-2] // block, out.shape[-1] // block, B),
            left, right, out, out if added is None else added, times / SCALE.value, by,
            ones * SCALE.value, out.shape[-2], out.shape[-1], right.shape[-2],
            TRANSPOSED=out is gram, SYMMETRIC=out is not following, ADDS=added is not None, **tile,
        )  # fmt: skip

    for a, b, c in steps:
        following = torch.empty_like(x)
        multiply(x, x, gram)
        multiply(gram, gram, inner, c, gram, b, a)
        multiply(x, inner, following)
        x = following
    return (x[0].double() + x[1].double() / LOW.value)[:, :R, :C] / SCALE.value


def _padded(size: int) -> int:
    """Size of whole tiles."""
    block = 32 if size <= SMALL else 128
    return cdiv(size, block) * block
