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
    load_rows,
    padded_rows,
    padded_size,
    relation_share_kernel,
    row_scale,
    splits,
)
from fastkd.kernels.relation_small import (
    SMALL_GROUP,
    Kept,
    launch_small,
    launch_small_gradient,
    new_kept,
)


@triton.jit(do_not_specialize=["rows"])
def relation_project_kernel(
    dx_ptr,  # (layers, rows, D)
    x_ptrs,  # layers of (rows, D)
    mask_ptr,  # (rows,) bytes
    factor_ptr,
    out_ptr,  # (layers, rows, D)
    rows,
    D,
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
    d = tl.arange(0, BLOCK_D)
    x = load_rows(x_ptr, row, real, d, D)
    start = layer * rows * D
    dx = load_rows(dx_ptr + start, row, real, d, D)
    part = x * PART
    scale = row_scale(tl.sum(x * x, axis=1), tl.sum(part * part, axis=1))
    along = tl.where(scale >= LARGEST_SCALE, 0.0, tl.sum(dx * x, axis=1) * scale)[:, None]
    dx = (dx - along * (x * scale[:, None])) * tl.load(factor_ptr).to(tl.float32)
    out = out_ptr + start + (row * D)[:, None] + d[None, :]
    tl.store(out, dx, mask=in_rows[:, None] & (d < D)[None, :])


def kinds(B: int, N: int, tokens: float, samples: float) -> list[int]:
    """Dimensions of (B, N) that have relations: 1 over tokens, 0 over samples; a kept one last.

    Long groups come first: small ones leave their gradient to the backward pass.
    """
    sizes, weights = (B, N), (samples, tokens)
    found = [x for x in (1, 0) if weights[x] != 0 and sizes[x] >= 2 and sizes[1 - x] > 0]
    # Not sorted: in a graph comparisons of sizes are symbolic, and have no order.
    long = [x for x in found if sizes[x] > SMALL_GROUP]
    return [*long, *(x for x in found if sizes[x] <= SMALL_GROUP)]


def _new_results(students, teachers, mask, weights, tokens, samples, eps, gradient):
    """Empty results of `relations`, and zeros where a kind has no relation."""
    x, layers = students[0], len(students)
    B, N, D = x.shape
    related = kinds(B, N, tokens, samples)
    new_losses = x.new_empty if len(related) == 2 else x.new_zeros
    results = [new_losses(layers * (B + N), dtype=torch.float32)]
    kept = [over for over in related[-1:] if (B, N)[over] <= SMALL_GROUP]
    if gradient and len(related) > len(kept):
        results.append(x.new_empty((layers, B, N, padded_size(D)), dtype=gradient_dtype(x.dtype)))
    for over in kept if gradient else ():
        results += new_kept(x, layers, (B, N)[1 - over], (B, N)[over], splits(x.dtype))
    return results


def _parts(saved: list[Tensor]) -> tuple[Tensor | None, Kept | None]:
    """Gradient of the forward pass, and what is kept for the backward pass."""
    dx = saved[0] if len(saved) in (1, 4) else None
    return dx, Kept(*saved[-3:]) if len(saved) >= 3 else None


@operator(_new_results)
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
    also the tensors from which `relation_gradients` computes the gradients: those of the kinds that
    are not kept (layers, B, N, `padded_size` of Ds) for an upstream gradient of 1, before P_i, and
    `Kept`.
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
    terms = {
        1: Term(B, N, (N, 1), tokens, shares[0]),
        0: Term(N, B, (1, N), samples, shares[1]),
    }
    results = _new_results(students, teachers, mask, weights, tokens, samples, eps, gradient)
    losses = results[0]
    layers.dx, kept = _parts(results[1:])
    related = kinds(B, N, tokens, samples)
    for position, over in enumerate(related):
        first_loss = 0 if over == 1 else len(students) * B
        if terms[over].N > SMALL_GROUP:
            launch_long(layers, terms[over], losses, first_loss, position > 0)
        else:
            last = position == len(related) - 1
            launch_small(layers, terms[over], losses, first_loss, kept if last else None)
    return results


def _gradients_shapes(students, saved, mask, factor, tokens, samples):
    return students[0].new_empty(len(students), *students[0].shape)


@operator(_gradients_shapes)
def relation_gradients(
    students: list[Tensor],
    saved: list[Tensor],
    mask: Tensor | None,
    factor: Tensor,
    tokens: float,
    samples: float,
) -> Tensor:
    """Gradients (layers, B, N, Ds) for the upstream gradient ``factor``, from `relations`."""
    B, N, D = students[0].shape
    size = padded_size(D)
    out = students[0].new_empty(len(students), B, N, size)
    students = padded_rows(students)
    dx, kept = _parts(saved)
    if kept is not None:
        over = kinds(B, N, tokens, samples)[-1]
        launch_small_gradient(students, dx, kept, factor, out, over)
    elif dx is not None:
        _project(dx, students, mask, factor, out)
    else:
        out.zero_()
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
        size,
        SLOTS=slots(layers),
        HAS_MASK=mask is not None,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        num_warps=min(block_r * block_d // 1024, 32),
    )
