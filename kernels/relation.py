"""FCD relations with Pearson's correlation: loss and gradient, tokens and samples, all layers.

A group has one relation matrix: it is a sample (its N tokens) or a position (its B samples). Rows
are scaled to unit length and centred before any product: R̃_ij = s_i·s_j + u_i + u_j with s the
centred rows, which avoids cancellation (raw moments lose their digits at mean cosine 0.99). Half
precision inputs are multiplied as float16, bfloat16 too: s and A have a known range, and float16
has three more bits. float32 is split into two float16 parts with 22 bits together: three products,
more accurate than TF32x3 at half its work. Means and |s_i|² are always float32.
The gradient is a combination of the same rows, ∂L/∂x_i = P_i[Σ_j A_ij s_j − (Σ_j A_ij) s_i] / ‖x_i‖
with A = b − ρa without its diagonal, a = R̃_s/σ_s, b = R̃_t/σ_t; P_i removes the component parallel
to the row. The backward pass applies P_i, since it reads the student anyway. Projecting by the
rows themselves also removes the rounding error along them, which 1/eps can make large; a formula
would not.

Data path. Features are padded with zeros to multiples of 16. `relation_row_scale_kernel` computes
1/‖x‖ of all rows. Groups of up to 128 rows are kept in registers (`relation_small`), longer groups
in tiles in memory (`relation_long`); shared code is in `relation_rows`. Long groups come first.
Their forward pass computes everything except P_i and the upstream gradient. The last kind of small
groups leaves its gradient to the backward pass: A is far smaller than the rows. Sums are partial
sums with a second pass, never atomics: every run has the same bits.

Small groups, per layer with E = B·N·D elements of s bytes a side, each byte counted once per
launch: 2Es bytes read for the row lengths, and 4Es for each kind of relation, half of them for the
means; Es written for the gradient over tokens, 3Es in the backward pass: student, that gradient and
the result. Both kinds: 14Es bytes, and A of N·B² elements written and read; one kind: 8Es and A.
Layers follow each other in the L2 cache, so the means' rows and half of the others are often there.
Both kinds at B32 N128 D768 in bf16: 88 MB a layer (26 µs at 3.35 TB/s) against 6·E·(N + B)
operations, 3 GFLOP (4 µs). Long groups: N²·(Ds + Dt) operations for the triangles and 2·N²·Ds for
the gradient against 14·N² bytes of tiles and A: bound by the tensor cores from D ≈ 500 on.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.operator import launch_kernel, operator
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
    splits,
)
from fastkd.kernels.relation_small import (
    SMALL_GROUP,
    Kept,
    launch_small,
    launch_small_gradient,
    new_kept,
)


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
    BLOCK_D: tl.constexpr,  # at least D: whole rows, which are read once
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
    inside = real[:, None] & (d < D)
    x = tl.load(x_rows + d, mask=inside, other=0.0).to(tl.float32)
    dx = tl.load(dx_ptr + start + d, mask=inside, other=0.0).to(tl.float32)
    part = x * PART
    scale = row_scale(tl.sum(x * x, axis=1), tl.sum(part * part, axis=1))
    along = tl.where(scale >= LARGEST_SCALE, 0.0, tl.sum(dx * x, axis=1) * scale)[:, None]
    dx = (dx - along * (x * scale[:, None])) * tl.load(factor_ptr).to(tl.float32)
    tl.store(out_ptr + start + d, dx, mask=in_rows[:, None] & (d < D))


def kinds(B: int, N: int, tokens: float, samples: float) -> list[int]:
    """Dimensions of (B, N) that have relations: 1 over tokens, 0 over samples; a kept one last.

    Long groups come first: small ones leave their gradient to the backward pass.
    """
    sizes, weights = (B, N), (samples, tokens)
    found = [x for x in (1, 0) if weights[x] != 0 and sizes[x] >= 2 and sizes[1 - x] > 0]
    # Not sorted: in a graph comparisons of sizes are symbolic, and have no order.
    long = [x for x in found if sizes[x] > SMALL_GROUP]
    return [*long, *(x for x in found if sizes[x] <= SMALL_GROUP)]


def kept_kind(B: int, N: int, tokens: float, samples: float) -> int | None:
    """Dimension whose gradient is computed in the backward pass, if any."""
    last = kinds(B, N, tokens, samples)[-1:]
    return next((over for over in last if (B, N)[over] <= SMALL_GROUP), None)


def counts_of_losses(students: list[Tensor], tokens: float, samples: float) -> list[int]:
    """Number of losses that `relations` returns over tokens, and over samples."""
    B, N, _ = students[0].shape
    related = kinds(B, N, tokens, samples)
    return [len(students) * groups if over in related else 0 for over, groups in ((1, B), (0, N))]


def _new_gradient(
    students: list[Tensor], tokens: float, samples: float
) -> tuple[Tensor | None, Kept | None]:
    """Empty gradient of the forward pass, and what is kept for the backward pass."""
    x, layers = students[0], len(students)
    B, N, D = x.shape
    related = kinds(B, N, tokens, samples)
    over = kept_kind(B, N, tokens, samples)
    dx = kept = None
    if over is None or len(related) > 1:
        dx = x.new_empty((layers, B, N, padded_size(D)), dtype=gradient_dtype(x.dtype))
    if over is not None:
        members, groups = (B, N)[over], (B, N)[1 - over]
        kept = new_kept(x, layers, groups, members, splits(x.dtype))
    return dx, kept


def _relations_shapes(students, teachers, mask, weights, tokens, samples, eps, gradient):
    x = students[0]
    losses = x.new_empty(sum(counts_of_losses(students, tokens, samples)), dtype=torch.float32)
    dx, kept = _new_gradient(students, tokens, samples) if gradient else (None, None)
    return [losses, *([] if dx is None else [dx]), *(kept or ())]


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

    Returns the summands, one per group and layer, tokens first; with ``gradient`` also the tensors
    from which `relation_gradients` computes the gradients: those of the kinds that are not kept
    (layers, B, N, `padded_size` of Ds) for an upstream gradient of 1, before P_i, and `Kept`.
    """
    B, N, _ = students[0].shape
    shares = None, None
    if weights is not None and mask is None:  # with a mask a group's weight is read from memory
        mask = torch.ones(B, N, dtype=torch.bool, device=students[0].device)
    if mask is not None:
        mask = mask.contiguous().view(torch.uint8)
        of_terms = mask.new_empty((2, 4), dtype=torch.float32)
        launch_kernel(
            relation_share_kernel, (2,), mask, of_terms, B, N, BLOCK_G=32, BLOCK_N=128, num_warps=8
        )
        of_tokens = of_terms[0, :1]
        of_tokens = of_tokens.expand(B) if weights is None else of_tokens * weights
        shares = of_tokens, of_terms[1, :1].expand(N)
    layers = Layers(students, teachers, mask, eps)
    s_b, s_n, _ = layers.students[0].stride()
    t_b, t_n, _ = layers.teachers[0].stride()
    terms = {
        1: Term(B, N, (s_b, s_n), (t_b, t_n), (N, 1), tokens, shares[0]),
        0: Term(N, B, (s_n, s_b), (t_n, t_b), (1, N), samples, shares[1]),
    }
    related = kinds(B, N, tokens, samples)
    counts = counts_of_losses(students, tokens, samples)
    losses = students[0].new_empty(sum(counts), dtype=torch.float32)
    dx, kept = _new_gradient(students, tokens, samples) if gradient else (None, None)
    layers.dx = dx if dx is None or related else dx.zero_()
    for position, over in enumerate(related):
        first_loss = 0 if over == 1 else counts[0]
        if terms[over].N > SMALL_GROUP:
            launch_long(layers, terms[over], losses, first_loss, position > 0)
        else:
            last = position == len(related) - 1
            launch_small(layers, terms[over], losses, first_loss, kept if last else None)
    return [losses, *([] if dx is None else [dx]), *(kept or ())]


def _gradients_shapes(saved, students, mask, factor, tokens, samples):
    x = students[0]
    return x.new_empty(len(students), *x.shape)


@operator(_gradients_shapes)
def relation_gradients(
    saved: list[Tensor],
    students: list[Tensor],
    mask: Tensor | None,
    factor: Tensor,
    tokens: float,
    samples: float,
) -> Tensor:
    """Gradients (layers, B, N, Ds) for the upstream gradient ``factor``, from `relations`."""
    B, N, D = students[0].shape
    over, size = kept_kind(B, N, tokens, samples), padded_size(D)
    out = students[0].new_empty(len(students), B, N, size)
    students = same_layout(students)
    if over is not None:
        *dx, a, values, mean = saved
        launch_small_gradient(students, *(dx or [None]), Kept(a, values, mean), factor, out, over)
    elif out.numel():
        _project(saved[0], students, mask, factor, out)
    return out if size == D else out[..., :D].contiguous()


def _project(
    dx: Tensor, students: list[Tensor], mask: Tensor | None, factor: Tensor, out: Tensor
) -> None:
    """Write factor · dx, without its component along the rows."""
    layers, B, N, size = dx.shape
    if mask is not None:
        mask = mask.contiguous().view(torch.uint8)
    block_d = max(next_power_of_2(size), 128)
    block_r = max(2048 // block_d, 1)  # 32 elements a thread, of at most 1,024 threads
    launch_kernel(
        relation_project_kernel,
        (cdiv(B * N, block_r), layers),
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
        num_warps=min(block_r * block_d // 1024, 32),
    )
