"""Log-probabilities of tokens from hidden states and a head, without all logits in memory."""

import torch
from torch import Tensor

from fastkd._core import check
from fastkd._core.dispatch import backend_of
from fastkd._core.numerics import apply, as_rows, saveable, upcast
from fastkd.lm.chunked_log_probs import TokenLogProbs, TokenOptions, token_log_probs
from fastkd.lm.heads import Head, as_head
from fastkd.lm.linear_soft_targets import CHUNK_BYTES


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
    options = _options(hidden, head, temperature, chunk_bytes)
    each = isinstance(ids, Tensor) and ids.dim() == hidden.dim()
    shape = (*hidden.shape[:-1], *(ids.shape[-1:] if each else ()))
    check.token_ids("ids", ids, shape, len(head.weight), hidden.device)
    rows = as_rows(saveable(hidden))
    tokens = ids.long().reshape(len(rows), ids.shape[-1] if each else 1)
    return apply(TokenLogProbs, options, tokens, *head.on(rows)).reshape(ids.shape)


@torch.no_grad()
def top_k(
    hidden: Tensor, head: Tensor | Head, k: int, temperature: float, chunk_bytes: int | None
) -> tuple[Tensor, Tensor]:
    """ids and log-probabilities (..., k) of the most probable tokens, for `fastkd.TopK.of`."""
    head = as_head("head", head)
    options = _options(hidden, head, temperature, chunk_bytes)
    check.positive_int("k", k)
    if k > len(head.weight):
        raise ValueError(f"k must be at most the head's {len(head.weight)} tokens, got {k}")
    tensors = head.on(as_rows(hidden))
    values, _, ids = token_log_probs(tensors, None, k, options)
    shape = (*hidden.shape[:-1], k)
    return ids.reshape(shape), values.reshape(shape)


def _options(
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
