"""Log-probabilities of a prompt from SGLang, as a `TopK`. SGLang itself isn't imported."""

from collections.abc import Sequence
from typing import Any

from fastkd.integrations._served import from_entries, positions_of
from fastkd.lm.targets import TopK

__all__ = ["top_k"]


def top_k(input_top_logprobs: Sequence[Sequence[Sequence[Any]] | None], k: int) -> TopK:
    """The k most probable tokens at each position of one prompt.

    Row i − 1 of the result is entry i, which predicts token i: compare it with the student's rows
    ``[:-1]``.

    Args:
        input_top_logprobs: N entries of ``meta_info["input_top_logprobs"]``, of the engine or in a
            server's JSON (``return_logprob=True, top_logprobs_num=k, logprob_start_len=0`` in the
            request; sgl-project/sglang, ``detokenize_top_logprobs_tokens``). The first is None (or
            empty); each other is a list of (log-probability, token id, text or None).
        k: tokens kept at a position, at least 1.

    Returns:
        As `fastkd.integrations.vllm.top_k`, with its errors, at the temperature that the server
        used: 1 by default.

    >>> top = top_k([None, [(-0.5, 3, None), (-1.5, 7, None)]], k=2)
    >>> top.ids
    tensor([[3, 7]])
    """
    entries = [
        [_pair(value, i) for value in entry or ()]
        for i, entry in enumerate(positions_of("input_top_logprobs", input_top_logprobs))
    ]
    return from_entries("input_top_logprobs", entries, k)


def _pair(value: Any, i: int) -> tuple[int, float]:
    match value:
        case [int() | float() as log_prob, int() as token, *_]:
            return token, log_prob
    raise TypeError(
        f"input_top_logprobs[{i}] must have (log-probability, token id, text or None) for each "
        f"token, got {value!r}"
    )
