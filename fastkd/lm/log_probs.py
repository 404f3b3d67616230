"""Log-probabilities of tokens from hidden states and a head, without all logits in memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fastkd._core import check
from fastkd._core.dispatch import backend_of
from fastkd._core.fallback import wide_dtype
from fastkd._core.numerics import (
    apply,
    as_rows,
    autocast_off,
    empty,
    once_differentiable,
    save_for_backward,
    saveable,
    upcast,
    working_dtype,
)
from fastkd._core.operator import operator
from fastkd.lm.heads import Head, as_head
from fastkd.lm.linear_soft_targets import CHUNK_BYTES, HeadForm, HeadOnStates, equal_chunks
from fastkd.lm.row_losses import log_totals


@dataclass(frozen=True)
class TokenOptions:
    form: HeadForm
    temperature: float
    chunk_bytes: int
    runs_on: str  # backend of the passes over the logits: "torch" or "triton"


class TokenLogProbs(torch.autograd.Function):
    """log q(id) (R, K) of ids (R, K); ``tensors`` are those of `fastkd.lm.heads.Head.on`."""

    @staticmethod
    def forward(ctx, options, ids, *tensors):
        values, log_total = token_log_probs(list(tensors), ids, 0, options)
        save_for_backward(ctx, ids, log_total, *tensors)
        ctx.options = options
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ids, log_total, *tensors = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[2:])
        call = tensors, ids, log_total, grad.contiguous(), needs
        found = iter(token_log_probs_backward(*call, ctx.options))
        dtypes = [None if x is None else x.dtype for x in tensors]
        grads = (next(found).to(x) if need else None for x, need in zip(dtypes, needs, strict=True))
        return None, None, *grads


class _Chunks:
    """Logits, a chunk of positions after the other."""

    def __init__(self, tensors: list[Tensor | None], options: TokenOptions) -> None:
        assert tensors[0] is not None and tensors[1] is not None
        self.rows, vocabulary = len(tensors[0]), len(tensors[1])
        self.head = HeadOnStates(tensors, options.form, vocabulary)
        self.temperature, self.runs_on = options.temperature, options.runs_on
        bytes_each = working_dtype(tensors[0]).itemsize * vocabulary
        self.most = max(options.chunk_bytes // bytes_each, 1)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for chunk in equal_chunks(self.rows, self.most):
            yield chunk, upcast(self.head.finish(self.head.products(chunk)))

    def scaled(self, logits: Tensor) -> Tensor:
        """``logits`` over the temperature, in the same memory."""
        return logits if self.temperature == 1 else logits.div_(self.temperature)

    def log_total(self, logits: Tensor) -> Tensor:
        """log Σ exp(logits/τ) (R,); the logits may be overwritten."""
        if self.runs_on == "torch":
            return self.scaled(logits).logsumexp(-1)
        return log_totals(logits, self.temperature, self.runs_on)

    def most_probable(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """log Σ (R,), and the k largest log-probabilities and their ids (R, k), in float64.

        Rounded once: the mass of the other tokens, 1 − Σ q, may be smaller than the rounding error
        of log Σ in float32. The logits are overwritten.
        """
        z, ids = logits.topk(k, -1)
        peak = z[:, :1]
        sums = logits.sub_(peak).div_(self.temperature).exp_().sum(-1, dtype=wide_dtype(logits))
        peak, z = peak.to(sums.dtype), z.to(sums.dtype)
        log_sums = sums.log()
        values = (z - peak) / self.temperature - log_sums[:, None]
        return peak[:, 0] / self.temperature + log_sums, values, ids

    def softmax(self, logits: Tensor, log_total: Tensor, factors: Tensor) -> Tensor:
        """q times factors (R,), in the memory of the logits."""
        if self.runs_on == "torch":
            q = self.scaled(logits).sub_(log_total[:, None]).exp_()
            return q.mul_(factors[:, None])
        from fastkd.kernels.cross_entropy import softmax_in_place

        softmax_in_place(logits, log_total, factors, self.temperature)
        return logits


def _shapes(tensors, ids, k, *options):
    new, dtype = tensors[0].new_empty, working_dtype(tensors[0])
    shape = (len(tensors[0]), k) if ids is None else ids.shape
    found = [new(shape, dtype=dtype), new(shape[0], dtype=dtype)]
    return [*found, new(shape, dtype=torch.int64)] if ids is None else found


# Operators for PyTorch too: else each number of chunks would compile its own graph.
@operator(_shapes)
def token_log_probs(
    tensors: list[Tensor | None], ids: Tensor | None, k: int, options: TokenOptions
) -> list[Tensor]:
    """log q(id) (R, K) of ``ids`` and log Σ exp(logits/τ) (R,).

    Without ids those of the k most probable tokens, in descending order, and their ids (R, k).
    """
    hidden = tensors[0]
    assert hidden is not None
    found = _shapes(tensors, ids, k)
    values, log_total = found[:2]
    with autocast_off(hidden):
        chunks = _Chunks(tensors, options)
        for chunk, logits in chunks:
            if ids is None:
                log_total[chunk], values[chunk], found[2][chunk] = chunks.most_probable(logits, k)
            else:
                z_of_ids = logits.gather(-1, ids[chunk])
                log_total[chunk] = chunks.log_total(logits)
                values[chunk] = z_of_ids / options.temperature - log_total[chunk, None]
    return found


def _backward_shapes(tensors, ids, log_total, grad, needs, *options):
    needed = (x for x, need in zip(tensors, needs, strict=True) if need)
    return [x.new_empty(x.shape, dtype=working_dtype(x)) for x in needed]


@operator(_backward_shapes)
def token_log_probs_backward(
    tensors: list[Tensor | None],
    ids: Tensor,
    log_total: Tensor,
    grad: Tensor,
    needs: list[bool],
    options: TokenOptions,
) -> list[Tensor]:
    """Gradients of the tensors that need one, in the working dtype, for ``grad`` (R, K)."""
    hidden = tensors[0]
    assert hidden is not None
    grads = {
        i: empty(x.shape, working_dtype(x), x.device)
        for i, (x, need) in enumerate(zip(tensors, needs, strict=True))
        if need and x is not None
    }
    bias = len(tensors) - 1
    for i in grads if len(hidden) == 0 else grads.keys() & {bias}:
        grads[i].zero_()  # each chunk adds to it; the first overwrites the others
    with autocast_off(hidden):
        chunks = _Chunks(tensors, options)
        head = chunks.head
        for chunk, logits in chunks:
            slope = head.slope(logits)
            # ∂/∂z = (Σ_k g_k (1[v = id_k] − q_v)) / τ, then through the cap and the scale.
            g = grad[chunk] * (options.form.scale / options.temperature)
            dz = chunks.softmax(logits, log_total[chunk], -g.sum(-1))
            dz.scatter_add_(-1, ids[chunk], g)
            dz = dz if slope is None else dz.mul_(slope)
            head.back(chunk, dz, grads)
    return [grads[i] for i in sorted(grads)]


def log_probs_ref(
    hidden: Tensor, head: Tensor | Head, ids: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """`log_probs` in plain PyTorch."""
    hidden, head = upcast(hidden), as_head("head", head).map(upcast)
    log_q = (head.logits(hidden) / temperature).log_softmax(-1)  # (..., V)
    each = ids.dim() == hidden.dim()
    found = log_q.gather(-1, ids if each else ids[..., None])
    return found if each else found.squeeze(-1)


def log_probs(
    hidden: Tensor,
    head: Tensor | Head,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    chunk_bytes: int | None = None,
) -> Tensor:
    """log q(id) of tokens, with q = softmax(logits/τ) of a head on hidden states.

    At most ``chunk_bytes`` of (positions, V) logits are in memory at a time, in forward and
    backward pass; the backward pass computes them again. Differentiable in hidden states and head.

    Args:
        hidden: (..., D) last hidden states, floating.
        head: (V, D) weight, or a `Head`.
        ids: (...) integers, a token for each position, or (..., K), K tokens for each.
        temperature: τ > 0.
        chunk_bytes: of logits in memory at a time, by default 64 MiB on the CPU and 2 GiB on a GPU.

    Returns:
        The shape of ``ids``, in float32 (float64 for float64).

    Raises:
        ValueError, TypeError: a wrong shape, dtype or device, or ids out of range.

    >>> hidden, head = torch.zeros(2, 3), torch.randn(4, 3)
    >>> log_probs(hidden, head, torch.tensor([0, 3])).exp()
    tensor([0.2500, 0.2500])
    """
    head = as_head("head", head)
    options = token_options(hidden, head, temperature, chunk_bytes)
    each = isinstance(ids, Tensor) and ids.dim() == hidden.dim()
    shape = (*hidden.shape[:-1], *(ids.shape[-1:] if each else ()))
    check.token_ids("ids", ids, shape, len(head.weight), hidden.device)
    rows = as_rows(saveable(hidden))
    tokens = ids.long().reshape(len(rows), ids.shape[-1] if each else 1)
    return apply(TokenLogProbs, options, tokens, *head.on(rows)).reshape(ids.shape)


def token_options(
    hidden: Tensor, head: Head, temperature: float, chunk_bytes: int | None
) -> TokenOptions:
    check.floating("hidden", hidden)
    D = head.weight.shape[1]
    if hidden.shape[-1] != D:
        raise ValueError(
            f"hidden must have {D} features, the columns of head, got {tuple(hidden.shape)}"
        )
    check.device("head", head.weight, "hidden", hidden)
    check.number("temperature", temperature, above=0)
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES[int(hidden.is_cuda)]
    check.positive_int("chunk_bytes", chunk_bytes)
    # The kernels are those of the labels' losses; on the CPU PyTorch runs.
    runs_on = backend_of("auto", "linear_soft_target_loss", hidden)
    runs_on = runs_on if runs_on == "triton" else "torch"
    return TokenOptions(head.form, float(temperature), chunk_bytes, runs_on)
