"""Cross-entropy of rows of logits, its gradient, and log Z = log Σ exp(logits/τ).

Data path. A program reads its rows in blocks of the vocabulary. Each thread keeps a running
maximum, the sum of exponentials, rescaled when its maximum grows, and for label smoothing the sum
of the logits; at the end of the row the threads combine these. Where a gradient is needed, the
program reads the row again, from its end, and writes to the logits' memory or elsewhere

    p (1 + 2λ log Z) − ε/V − (1 − ε) [v = label],    p = exp(z)/Z,

times a factor of each row, for label smoothing ε and z-loss λ. `fastkd.log_probs` needs log Z alone
in the forward pass. Its backward pass computes the logits again, but log Z is known: one read, and
softmax(logits/τ) times a factor of each row overwrites them.

With E = R·V logits of s bytes at least 2Es bytes move, Es read and Es written, or Es + 2E for a
gradient in bfloat16, and up to Es more of the second read: what the L2 cache doesn't hold of the
rows that are read at a time, as in `fastkd.kernels.soft_targets`. About 27E instructions, half in
each pass: bound by bandwidth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.operator import launch_kernel, operator
from fastkd.kernels.launch import cdiv
from fastkd.kernels.rounding import rounded
from fastkd.kernels.soft_targets import (
    LOG2_E,
    LONG,
    _base,
    _by_row,
    _columns,
    _from_end,
    _lane_max,
    _lane_sum,
    _load,
    _load_last,
    _shift,
)
from fastkd.kernels.soft_targets import blocks as blocks_of_divergences


def blocks(V: int, element_size: int, aligned: bool) -> dict[str, int]:
    """Block sizes and warps for a vocabulary of V: of rows up to LONG tokens those of a KL.

    With 32 warps, or 16 logits of a thread, longer rows took 4 to 9% more time on an H100.
    ``element_size`` is that of logits or gradient, whichever is smaller.
    """
    config = blocks_of_divergences(V, "forward_kl", element_size, aligned)
    if V > LONG:
        config |= {"BLOCK_V": 4096, "LANES": 512, "num_warps": 16}
    return config


@triton.jit(do_not_specialize=["R", "stride_factors", "gradient"])
def cross_entropy_kernel(
    logits_ptr,
    labels_ptr,  # (R,)
    factors_ptr,  # (R,), of the rows' gradients
    result_ptr,  # (R,): the loss or log Z, which "softmax" reads
    gradient_ptr,  # (R, V), written if ``gradient``; may be the logits, or narrower
    R,
    V,
    stride_logits,
    stride_factors,
    temperature,
    inverse,  # 1/τ
    slope,  # log2(e)/τ: all exponentials are powers of 2
    smoothing,
    z_loss,
    gradient,
    FORM: tl.constexpr,  # "loss", "log_total" or "softmax"
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    exists = row < R
    logits_row = logits_ptr + row * stride_logits
    columns = _columns(BLOCK_V // (LANES * WIDTH), LANES, WIDTH)
    to_p = tl.full([BLOCK_R], 1.0, tl.float32)  # factor of exp((z − base)/τ)
    if FORM == "softmax":
        base = tl.load(result_ptr + row, mask=exists, other=0.0) * temperature
    else:
        # Each lane has its own maximum, so threads do not wait for each other within a row.
        tops = tl.full([BLOCK_R, LANES], -float("inf"), tl.float32)
        sums = tl.zeros([BLOCK_R, LANES], dtype=tl.float32)
        plain = tl.zeros([BLOCK_R, LANES], dtype=tl.float32)
        for start in range(0, V, BLOCK_V):
            z = _load(logits_row, start + columns, V, exists)
            new = tl.maximum(tops, _lane_max(z))
            sums = sums * tl.exp2(_shift(tops, new) * slope)
            sums += _lane_sum(tl.exp2((z - _base(new)[:, None, :, None]) * slope))
            plain += _lane_sum(tl.where(start + columns < V, z, 0.0))
            tops = new
        top = tl.max(tops, axis=1)
        base = _base(top)
        total = tl.sum(rounded(sums * tl.exp2(_shift(tops, top[:, None]) * slope)), axis=1)
        log_z = base * inverse + tl.log(total)
        result = log_z
        if FORM == "loss":
            label = tl.load(labels_ptr + row, mask=exists, other=0).to(tl.int32)
            depth = top - tl.load(logits_row + label, mask=exists, other=0.0).to(tl.float32)
            tl.debug_barrier()  # other threads overwrite the logits
            uniform = top - tl.sum(plain, axis=1) / V  # may be infinite
            uniform = tl.where(smoothing == 0.0, 0.0, smoothing * uniform)
            result = (1.0 - smoothing) * depth + uniform + tl.log(total) + z_loss * log_z * log_z
            to_p = (1.0 + 2.0 * z_loss * log_z) / total
        tl.store(result_ptr + row, result, mask=exists)

    if gradient != 0:
        by = tl.load(factors_ptr + row * stride_factors, mask=exists, other=0.0)
        for done in range(0, V, BLOCK_V):
            start = _from_end(done, V, BLOCK_V)
            z = _load_last(logits_row, start + columns, V, exists)
            grad = tl.exp2((z - _by_row(base)) * slope) * _by_row(to_p)
            if FORM == "loss":
                at_label = tl.where(start + columns == _by_row(label), 1.0 - smoothing, 0.0)
                grad = grad - smoothing / V - at_label
            tl.store(
                _by_row(gradient_ptr + row * V) + start + columns,
                grad * _by_row(by),
                mask=_by_row(exists) & (start + columns < V),
                cache_modifier=".cs",
            )


def _row_shapes(logits, *rest):
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


@operator(_row_shapes, mutates=[3])
def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    factors: Tensor | None,
    out: Tensor | None,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """Loss (R,) of logits (R, V) with token ids (R,).

    With ``out`` (R, V), which may be the logits, or of bfloat16, the gradient times factors (R,) is
    written there.
    """
    loss = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _launch("loss", logits, labels, factors, loss, out, 1.0, label_smoothing, z_loss)
    return loss


@operator(_row_shapes)
def log_totals(logits: Tensor, temperature: float) -> Tensor:
    """log Σ exp(logits/τ) (R,) of logits (R, V)."""
    total = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _launch("log_total", logits, None, None, total, None, temperature)
    return total


@operator(lambda *_: None, mutates=[0])
def softmax_in_place(
    logits: Tensor, log_total: Tensor, factors: Tensor, temperature: float
) -> None:
    """Overwrite logits (R, V) with softmax(logits/τ) times factors (R,).

    ``log_total`` (R,) is that of `log_totals`.
    """
    _launch("softmax", logits, None, factors, log_total, logits, temperature)


def _launch(
    form: str,
    logits: Tensor,
    labels: Tensor | None,
    factors: Tensor | None,
    result: Tensor,
    out: Tensor | None,
    temperature: float,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> None:
    R, V = logits.shape
    gradient = out is not None
    out = logits if out is None else out
    assert not gradient or out.is_contiguous(), "the kernel finds the gradient's rows by V alone"
    if R == 0:
        return
    aligned = all(size % 16 == 0 for size in (V, logits.stride(0)))
    config = blocks(V, min(logits.element_size(), out.element_size()), aligned)
    launch_kernel(
        cross_entropy_kernel,
        (cdiv(R, config["BLOCK_R"]),),
        logits,
        labels,
        # One compiled form with and without a gradient: in its place another tensor is not read.
        result if factors is None else factors,
        result,
        out,
        R,
        V,
        logits.stride(0),
        0 if factors is None else factors.stride(0),
        temperature,
        1 / temperature,
        LOG2_E / temperature,
        label_smoothing,
        z_loss,
        int(gradient),
        FORM=form,
        **config,
    )
