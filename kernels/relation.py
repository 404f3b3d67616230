"""FCD relations with Pearson's correlation: loss and gradient, tokens and samples, all layers.

A group has one relation matrix: it is a sample (its N tokens) or a position (its B samples). Rows
are scaled to unit length and centred before any product: R̃_ij = s_i·s_j + u_i + u_j with s the
centred rows, which avoids cancellation (raw moments lose their digits at mean cosine 0.99). Half
precision inputs are multiplied as float16, bfloat16 too: s and A have a known range, and float16
has three more bits. float32 is split into two float16 parts with 22 bits together: three products,
more accurate than TF32x3 at half its work. Means and |s_i|² are always float32.
The gradient is a combination of the same rows, ∂L/∂x_i = P_i[Σ_j A_ij s_j − (Σ_j A_ij) s_i] / ‖x_i‖
with A = b − ρa without its diagonal, a = R̃_s/σ_s, b = R̃_t/σ_t; P_i removes the component parallel
to the row. Projecting by the rows themselves also removes the rounding error along them, which
1/eps can make large; a formula would not.

Data path. Features are padded with zeros to multiples of 16. `relation_row_scale_kernel` computes
1/‖x‖ of all rows. Groups of up to 128 rows are kept in registers (`relation_small`), longer groups
in tiles in memory (`relation_long`); shared code is in `relation_rows`. Long groups come first. The
last kind of relation applies P_i to the sum of both gradients; the backward pass only multiplies by
the upstream gradient (`upstream`). Sums are partial sums with a second pass, never atomics: every
run has the same bits.

Small groups, per layer with E = B·N·D elements of s bytes a side, each byte counted once per
launch: 2Es bytes read for the row lengths, and 4Es for each kind of relation, half of them for the
means; Es written for the gradient over tokens, 3Es to add the one over samples: student, the first
gradient and the sum. Both kinds: 14Es bytes, and A of N·B² elements written and read; one kind: 8Es
and A. Layers follow each other in the L2 cache, so the means' rows and half of the others are often
there. Both kinds at B32 N128 D768 in bf16: 88 MB a layer (26 µs at 3.35 TB/s) against 6·E·(N + B)
operations, 3 GFLOP (4 µs). Long groups: N²·(Ds + Dt) operations for the triangles and 2·N²·Ds for
the gradient against 14·N² bytes of tiles and A: bound by the tensor cores from D ≈ 500 on.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.operator import launch_kernel, operator
from fastkd.kernels.launch import cdiv, next_power_of_2
from fastkd.kernels.pointers import pick
from fastkd.kernels.relation_long import launch_long
from fastkd.kernels.relation_rows import (
    LARGEST_SCALE,
    PART,
    Layers,
    Term,
    gradient_dtype,
    load_rows,
    padded_size,
    relation_share_kernel,
    row_scale,
)
from fastkd.kernels.relation_small import SMALL_GROUP, launch_small


@triton.jit(do_not_specialize=["rows"])
def relation_project_kernel(
    dx_ptr,  # (layers, rows, D)
    x_ptrs,  # layers of (rows, D)
    mask_ptr,  # (rows,) bytes
    rows,
    D,
    SLOTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,  # at least D: whole rows, which are read once
):
    """Remove the component of dx along the rows that were normalised."""
    layer = tl.program_id(1).to(tl.int64)
    x_ptr = pick(x_ptrs, layer, SLOTS)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = row < rows
    if HAS_MASK:
        real = real & (tl.load(mask_ptr + row, mask=real, other=0) != 0)
    d = tl.arange(0, BLOCK_D)
    x = load_rows(x_ptr, row, real, d, D)
    dx_ptr += layer * rows * D
    dx = load_rows(dx_ptr, row, real, d, D)
    part = x * PART
    scale = row_scale(tl.sum(x * x, axis=1), tl.sum(part * part, axis=1))
    along = tl.where(scale >= LARGEST_SCALE, 0.0, tl.sum(dx * x, axis=1) * scale)[:, None]
    dx -= along * (x * scale[:, None])
    tl.store(dx_ptr + (row * D)[:, None] + d[None, :], dx, mask=real[:, None] & (d < D)[None, :])


def kinds(B: int, N: int, tokens: float, samples: float) -> list[int]:
    """Dimensions of (B, N) that have relations: 1 over tokens, 0 over samples; long groups first.

    The kernel of small groups applies P_i to the sum of the gradients.
    """
    sizes, weights = (B, N), (samples, tokens)
    found = [x for x in (1, 0) if weights[x] != 0 and sizes[x] >= 2 and sizes[1 - x] > 0]
    return sorted(found, key=lambda over: sizes[over] <= SMALL_GROUP)


def _relations_shapes(students, teachers, mask, weights, tokens, samples, eps, gradient):
    x, layers = students[0], len(students)
    losses = x.new_empty(layers * (x.size(0) + x.size(1)), dtype=torch.float32)
    dx = x.new_empty((layers, *x.shape), dtype=gradient_dtype(x.dtype))
    return [losses, dx] if gradient else [losses]


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

    Returns the summands: (layers, B) over tokens, then (layers, N) over samples; with ``gradient``
    also the students' gradients (layers, B, N, Ds), in float32 for float16, which would underflow.
    """
    B, N, D = students[0].shape
    related = kinds(B, N, tokens, samples)
    of_tokens = of_samples = None  # shares in the averages
    if weights is not None and mask is None:  # with a mask a group's weight is read from memory
        mask = torch.ones(B, N, dtype=torch.bool, device=students[0].device)
    if mask is not None:
        mask = mask.contiguous().view(torch.uint8)
        of_tokens, of_samples = (mask.new_empty(n, dtype=torch.float32) for n in (B, N))
        launch_kernel(relation_share_kernel, (2,),
            mask, of_tokens, of_samples, B, N, BLOCK_G=32, BLOCK_N=128, num_warps=8,
        )  # fmt: skip
        of_tokens = of_tokens if weights is None else of_tokens * weights
    new = students[0].new_empty if len(related) == 2 else students[0].new_zeros
    losses = new(len(students) * (B + N), dtype=torch.float32)
    dx = None
    if gradient:
        new = students[0].new_empty if related else students[0].new_zeros
        size = len(students), B, N, padded_size(D)
        dx = new(size, dtype=gradient_dtype(students[0].dtype))
    layers = Layers(students, teachers, mask, eps, losses, dx)
    terms = {
        1: Term(B, N, (N, 1), 0, tokens, of_tokens),
        0: Term(N, B, (1, N), len(students) * B, samples, of_samples),
    }
    for over in related:
        add, last = over != related[0], over == related[-1]
        if terms[over].N <= SMALL_GROUP:
            launch_small(layers, terms[over], add, last)
            continue
        launch_long(layers, terms[over], add)
        if last and dx is not None:
            _project(layers, dx)
    if dx is None:
        return [losses]
    return [losses, dx if padded_size(D) == D else dx[..., :D].contiguous()]


def _project(layers: Layers, dx: Tensor) -> None:
    """Remove the component of ``dx`` along the rows."""
    block_d = max(next_power_of_2(layers.Ds), 128)
    block_r = max(2048 // block_d, 1)  # 32 elements a thread, of at most 1,024 threads
    launch_kernel(
        relation_project_kernel,
        (cdiv(layers.rows, block_r), len(dx)),
        dx,
        layers.pointers[0],
        layers.mask,
        layers.rows,
        layers.Ds,
        SLOTS=layers.slots,
        HAS_MASK=layers.masked,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        num_warps=min(block_r * block_d // 1024, 32),
    )
