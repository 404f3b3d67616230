"""FCD relations with Pearson's correlation: loss and gradient, tokens and samples, all layers.

A group is what has one relation: a sample (its N tokens) or a position (its B samples). Rows are
scaled to unit length and centred before any product: R̃_ij = s_i·s_j + u_i + u_j with s the
centred rows, so that nothing cancels (raw moments lose their digits at mean cosine 0.99). Half
inputs are multiplied as float16, bfloat16 too: s and A are of known size, and float16 has three
bits more. float32 is split in two float16 parts of 22 bits together, three products, more
accurate than TF32x3 and half its work; means and |s_i|² are always float32.
The gradient is a combination of the same rows, ∂L/∂x_i = P_i[Σ_j A_ij s_j − (Σ_j A_ij) s_i] / ‖x_i‖
with A = b − ρa less its diagonal, a = R̃_s/σ_s, b = R̃_t/σ_t; P_i takes out what is parallel to the
row. The backward pass does that, as it reads the gradient anyway: the rows themselves take the
rounding along them out too, which 1/eps can make large, and a formula would not.

Data path. Every kernel sees features in multiples of 16, padded with zeros where they are not.
`relation_row_scale_kernel` reads every row once and leaves 1/‖x‖ (0 at padding) for both kinds of
relation. Groups of up to 128 rows stay in registers (`relation_small`), longer ones go through
tiles in memory (`relation_long`); what both need is in `relation_rows`. The forward pass does it
all but P_i and the upstream gradient. Sums go through partial results and a second pass, never
atomics: the same bits on every run.

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

from fastkd.kernels.launch import cdiv, operator
from fastkd.kernels.pointers import layer_groups, padded, pick, slots
from fastkd.kernels.relation_long import launch_long
from fastkd.kernels.relation_rows import (
    SMALLEST_NORM,
    Layers,
    Term,
    gradient_dtype,
    padded_size,
    relation_share_kernel,
    same_layout,
)
from fastkd.kernels.relation_small import SMALL_GROUP, launch_small


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
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out = factor · dx, less its part along the rows that were normalised."""
    layer = tl.program_id(1).to(tl.int64)
    x_ptr = pick(x_ptrs, layer, SLOTS)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_rows = row < rows
    real = in_rows
    if HAS_MASK:
        real = real & (tl.load(mask_ptr + row, mask=real, other=0) != 0)
    start_x = (row // N) * stride_x_b + (row % N) * stride_x_n
    start_dx = (layer * rows + row) * D
    products = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    squares = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)[None, :]
        inside = real[:, None] & (d < D)
        x = tl.load(x_ptr + start_x[:, None] + d, mask=inside, other=0.0).to(tl.float32)
        dx = tl.load(dx_ptr + start_dx[:, None] + d, mask=inside, other=0.0).to(tl.float32)
        products += dx * x
        squares += x * x
    norm = tl.sqrt_rn(tl.sum(squares, axis=1))
    scale = tl.div_rn(1.0, tl.maximum(norm, SMALLEST_NORM))
    along = tl.where(norm < SMALLEST_NORM, 0.0, tl.sum(products, axis=1) * scale)
    factor = tl.load(factor_ptr).to(tl.float32)
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)[None, :]
        inside = real[:, None] & (d < D)
        x = tl.load(x_ptr + start_x[:, None] + d, mask=inside, other=0.0).to(tl.float32)
        dx = tl.load(dx_ptr + start_dx[:, None] + d, mask=inside, other=0.0).to(tl.float32)
        dx = (dx - along[:, None] * (x * scale[:, None])) * factor
        tl.store(out_ptr + start_dx[:, None] + d, dx, mask=in_rows[:, None] & (d < D))


def _relations_shapes(students, teachers, mask, tokens, samples, eps, gradient):
    loss = students[0].new_empty((), dtype=torch.float32)
    buffers = []
    for indices in layer_groups(list(zip(students, teachers, strict=True))) if gradient else []:
        first = students[indices[0]]
        shape = len(indices), *first.shape[:2], padded_size(first.shape[-1])
        buffers.append(first.new_empty(shape, dtype=gradient_dtype(first.dtype)))
    return [loss, *buffers]


@operator(_relations_shapes)
def relations(
    students: list[Tensor],
    teachers: list[Tensor],
    mask: Tensor | None,
    tokens: float,
    samples: float,
    eps: float,
    gradient: bool,
) -> list[Tensor]:
    """tokens · loss over tokens + samples · loss over samples, averaged over the layers.

    Returns the loss and, with ``gradient``, one (layers, B, N, `padded_size` of Ds) buffer of
    gradients for each of the `layer_groups`, for an upstream gradient of 1 and before `projected`.
    """
    B, N, _ = students[0].shape
    device = students[0].device
    terms = [
        (over, weight / len(students))
        for over, weight, groups, members in (
            ("tokens", tokens, B, N),
            ("samples", samples, N, B),
        )
        if weight != 0 and groups > 0 and members >= 2
    ]
    per_layer = sum(B if over == "tokens" else N for over, _ in terms)
    losses = torch.empty(len(students) * per_layer, dtype=torch.float32, device=device)
    shares = None
    if mask is not None:
        mask = mask.contiguous().view(torch.uint8)
        if terms:
            shares = torch.empty(2, 4, dtype=torch.float32, device=device)
            relation_share_kernel[(2,)](mask, shares, B, N, BLOCK_G=32, BLOCK_N=128, num_warps=8)
    buffers = []
    done = 0
    for indices in layer_groups(list(zip(students, teachers, strict=True))):
        layers = Layers([students[i] for i in indices], [teachers[i] for i in indices], mask)
        if gradient:
            allocate = torch.empty if terms else torch.zeros
            layers.dx = allocate(
                (len(indices), *layers.students[0].shape),
                dtype=gradient_dtype(layers.dtype),
                device=device,
            )
        for i, (over, weight) in enumerate(terms):
            term = _term(layers, over, weight, shares, eps, losses, done, accumulate=i > 0)
            _launch(layers, term)
            done += len(indices) * term.groups
        if layers.dx is not None:
            buffers.append(layers.dx)
    return [losses.sum(), *buffers]


def _term(
    layers: Layers,
    over: str,
    weight: float,
    shares: Tensor | None,
    eps: float,
    losses: Tensor,
    first_loss: int,
    accumulate: bool,
) -> Term:
    """One kind of relation on the layers of a launch."""
    s, t = layers.students[0], layers.teachers[0]
    tokens = over == "tokens"
    order = (0, 1) if tokens else (1, 0)
    return Term(
        *((layers.B, layers.N) if tokens else (layers.N, layers.B)),
        [s.stride(i) for i in order],
        [t.stride(i) for i in order],
        (layers.N, 1) if tokens else (1, layers.N),
        weight,
        None if shares is None else shares[order[0]],
        eps,
        losses,
        first_loss,
        accumulate,
    )


def _launch(layers: Layers, term: Term) -> None:
    if term.N <= SMALL_GROUP:
        launch_small(layers, term)
        return
    for layer in range(len(layers.students)):
        launch_long(layers, term, layer)


def _projected_shapes(dx, students, mask, factor):
    return dx.new_empty((*dx.shape[:-1], students[0].shape[-1]), dtype=students[0].dtype)


@operator(_projected_shapes)
def projected(dx: Tensor, students: list[Tensor], mask: Tensor | None, factor: Tensor) -> Tensor:
    """factor · dx (layers, B, N, Ds) for one of the buffers of `relations`, across the rows."""
    D = students[0].shape[-1]
    out = torch.empty_like(dx, dtype=students[0].dtype)
    if out.numel():
        students = same_layout(students)
        if mask is not None:
            mask = mask.contiguous().view(torch.uint8)
        layers, B, N, size = dx.shape
        block_r, block_d = 16, 128
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
            BLOCK_R=block_r,
            BLOCK_D=block_d,
            num_warps=8,
        )
    return out[..., :D].contiguous()  # itself, if without padding
