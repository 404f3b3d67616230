"""FCD relations with Pearson's correlation: loss and gradient, tokens and samples, all layers.

A group has one relation matrix: it is a sample (its N tokens) or a position (its B samples). Rows
are scaled to unit length and centred before any product: R̃_ij = s_i·s_j + u_i + u_j with s the
centred rows, which avoids cancellation (raw moments lose their digits at mean cosine 0.99). Half
precision inputs are multiplied as float16, bfloat16 too: s and A have a known range, and float16
has three more bits. float32 is split into two float16 parts with 22 bits together: three products,
more accurate than TF32x3 at half its work. Means and |s_i|² are always float32.
The gradient is a combination of the same rows, ∂L/∂x_i = P_i[Σ_j A_ij s_j − (Σ_j A_ij) s_i] / ‖x_i‖
with A = b − ρa without its diagonal, a = R̃_s/σ_s, b = R̃_t/σ_t; P_i removes the component parallel
to the row. The backward pass applies P_i, since it reads the gradient anyway. Projecting by the
rows themselves also removes the rounding error along them, which 1/eps can make large; a formula
would not.

Data path. Features are padded with zeros to multiples of 16. `relation_row_scale_kernel` reads
every row once and stores 1/‖x‖ (0 at padding) for both kinds of relation. Groups of up to 128 rows
are kept in registers (`relation_small`), longer groups in tiles in memory (`relation_long`); shared
code is in `relation_rows`. The forward pass computes everything except P_i and the upstream
gradient. Sums are partial sums with a second pass, never atomics: every run has the same bits.

Small groups, per layer with E = B·N·D elements of s bytes a side: 2Es bytes read for the norms,
3Es for each kind of relation, Es written, read and written again, and 3Es in the backward pass:
14Es bytes, part of them from the L2 cache, against 6·E·(N + B) operations. At B32 N128 D768 in
bf16 that is 88 MB (20 µs at 4.3 TB/s) and 3 GFLOP (4 µs): bound by bandwidth and latency. Long
groups: N²·(Ds + Dt) operations for the triangles and 2·N²·Ds for the gradient against 14·N²
bytes of tiles and A: bound by the tensor cores from D ≈ 500 on.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.operator import operator
from fastkd.kernels.launch import cdiv, next_power_of_2
from fastkd.kernels.pointers import padded, pick, slots
from fastkd.kernels.relation_long import launch_long
from fastkd.kernels.relation_rows import (
    LARGEST_SCALE,
    PART,
    Layers,
    Term,
    gradient_dtype,
    padded_size,
    relation_share_kernel,
    row_scale,
    same_layout,
)
from fastkd.kernels.relation_small import SMALL_GROUP, launch_small

MOST_COLUMNS_AT_ONCE = 4096  # largest D of rows that a backward program holds whole in registers


@triton.jit
def _row_tiles(x_rows, dx_rows, real, d, D):
    """Tiles of both tensors as float32, 0 at padding."""
    inside = real[:, None] & (d < D)
    x = tl.load(x_rows + d, mask=inside, other=0.0).to(tl.float32)
    return x, tl.load(dx_rows + d, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "N"])
def relation_project_kernel(
    dx_ptr,  # (layers, rows, D)
    x_ptrs,  # layers of (B, N, D)
    mask_ptr,  # (B, N) bytes
    factor_ptr,
    out_ptr,  # (layers, rows, D)
    rows,
    N,
    D,
    stride_x_b,
    stride_x_n,
    SLOTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WHOLE: tl.constexpr,  # a block holds whole rows, which are read once
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out = factor · dx, without its component along the rows that were normalised."""
    layer = tl.program_id(1).to(tl.int64)
    x_ptr = pick(x_ptrs, layer, SLOTS)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_rows = row < rows
    real = in_rows
    if HAS_MASK:
        real = real & (tl.load(mask_ptr + row, mask=real, other=0) != 0)
    x_rows = x_ptr + ((row // N) * stride_x_b + (row % N) * stride_x_n)[:, None]
    start = ((layer * rows + row) * D)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    if WHOLE:
        x, dx = _row_tiles(x_rows, dx_ptr + start, real, d, D)
        part = x * PART
        products, squares, part_squares = dx * x, x * x, part * part
    else:
        products = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
        squares = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
        part_squares = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
        for first in range(0, D, BLOCK_D):
            x, dx = _row_tiles(x_rows, dx_ptr + start, real, first + d, D)
            products += dx * x
            squares += x * x
            part_squares += x * PART * (x * PART)
    scale = row_scale(tl.sum(squares, axis=1), tl.sum(part_squares, axis=1))
    along = tl.where(scale >= LARGEST_SCALE, 0.0, tl.sum(products, axis=1) * scale)[:, None]
    factor = tl.load(factor_ptr).to(tl.float32)
    if WHOLE:
        dx = (dx - along * (x * scale[:, None])) * factor
        tl.store(out_ptr + start + d, dx, mask=in_rows[:, None] & (d < D))
    else:
        for first in range(0, D, BLOCK_D):
            x, dx = _row_tiles(x_rows, dx_ptr + start, real, first + d, D)
            dx = (dx - along * (x * scale[:, None])) * factor
            tl.store(out_ptr + start + first + d, dx, mask=in_rows[:, None] & (first + d < D))


def counts_of_losses(students: list[Tensor], tokens: float, samples: float) -> list[int]:
    """Number of losses that `relations` returns over tokens, and over samples."""
    B, N, _ = students[0].shape
    kinds = (B, N, tokens), (N, B, samples)
    return [len(students) * G * (weight != 0 and members >= 2) for G, members, weight in kinds]


def _relations_shapes(students, teachers, mask, weights, tokens, samples, eps, gradient):
    x = students[0]
    shape = len(students), *x.shape[:2], padded_size(x.shape[-1])
    losses = x.new_empty(sum(counts_of_losses(students, tokens, samples)), dtype=torch.float32)
    return [losses, x.new_empty(shape, dtype=gradient_dtype(x.dtype))] if gradient else [losses]


@operator(_relations_shapes)
def relations(
    students: list[Tensor],
    teachers: list[Tensor],
    mask: Tensor | None,
    weights: Tensor | None,
    tokens: float,
    samples: float,
    eps: float,
    gradient: bool,
) -> list[Tensor]:
    """tokens · loss over tokens + samples · loss over samples, summed over layers of one shape.

    ``weights`` (B,) are factors of the samples' losses over tokens.

    Returns the summands, one per group and layer, tokens first; with ``gradient`` also the
    gradients (layers, B, N, `padded_size` of Ds) for an upstream gradient of 1, before `projected`.
    """
    B, N, _ = students[0].shape
    shares = None, None
    if weights is not None and mask is None:  # with a mask a group's weight is read from memory
        mask = torch.ones(B, N, dtype=torch.bool, device=students[0].device)
    if mask is not None:
        mask = mask.contiguous().view(torch.uint8)
        of_terms = mask.new_empty((2, 4), dtype=torch.float32)
        relation_share_kernel[(2,)](mask, of_terms, B, N, BLOCK_G=32, BLOCK_N=128, num_warps=8)
        of_tokens = of_terms[0, :1]
        of_tokens = of_tokens.expand(B) if weights is None else of_tokens * weights
        shares = of_tokens, of_terms[1, :1].expand(N)
    layers = Layers(students, teachers, mask, eps)
    s_b, s_n, _ = layers.students[0].stride()
    t_b, t_n, _ = layers.teachers[0].stride()
    terms = [
        Term(B, N, (s_b, s_n), (t_b, t_n), (N, 1), tokens, shares[0]),
        Term(N, B, (s_n, s_b), (t_n, t_b), (1, N), samples, shares[1]),
    ]
    terms = [term for term in terms if term.weight != 0 and term.groups > 0 and term.N >= 2]
    if gradient:
        dx = layers.students[0].new_empty if terms else layers.students[0].new_zeros
        shape = len(students), B, N, layers.Ds
        layers.dx = dx(shape, dtype=gradient_dtype(layers.dtype))
    losses = layers.scale.new_empty(sum(counts_of_losses(students, tokens, samples)))
    done = 0
    for term in terms:
        launch = launch_small if term.N <= SMALL_GROUP else launch_long
        launch(layers, term, losses, done)
        done += len(students) * term.groups
    return [losses] if layers.dx is None else [losses, layers.dx]


def _projected_shapes(dx, students, mask, factor):
    return dx.new_empty((*dx.shape[:-1], students[0].shape[-1]), dtype=students[0].dtype)


@operator(_projected_shapes)
def projected(dx: Tensor, students: list[Tensor], mask: Tensor | None, factor: Tensor) -> Tensor:
    """factor · dx (layers, B, N, Ds) of `relations`, without its component along the rows."""
    layers, B, N, size = dx.shape
    D = students[0].shape[-1]
    out = torch.empty_like(dx, dtype=students[0].dtype)
    if out.numel():
        students = same_layout(students)
        if mask is not None:
            mask = mask.contiguous().view(torch.uint8)
        whole = size <= MOST_COLUMNS_AT_ONCE
        block_d = max(next_power_of_2(size), 128) if whole else 128
        block_r = max(2048 // block_d, 1)  # 32 elements a thread
        relation_project_kernel[(cdiv(B * N, block_r), layers)](
            dx,
            padded(students),
            mask,
            factor,
            out,
            B * N,
            N,
            size,
            *students[0].stride()[:2],
            SLOTS=slots(layers),
            HAS_MASK=mask is not None,
            WHOLE=whole,
            BLOCK_R=block_r,
            BLOCK_D=block_d,
            num_warps=block_r * block_d // 1024,
        )
    return out if size == D else out[..., :D].contiguous()
