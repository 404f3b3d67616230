"""The calls of fastkd/losses/attention.py; see `tools.calls`."""

import itertools

import fastkd
from tools.calls import (
    ALL_TYPES,
    BOTH,
    ON_A_GPU,
    SOME_LAYERS,
    Call,
    Calls,
    given,
    mask_of,
    numbers,
    pair,
)  # fmt: skip


def calls() -> Calls:
    # Tokens: few and many, multiples of 16 or not.
    for dtype, N, masked, layers, heads, learning in itertools.product(
        ALL_TYPES, (1, 17, 32, 33, 128), BOTH, SOME_LAYERS, ("match", "mean"), BOTH
    ):
        teacher = (2, 4 if heads == "match" else 3, N, N)
        maps = pair(2, 4, N, N, teacher=teacher, dtype=dtype, layers=layers, learning=learning)
        yield Call(fastkd.AttentionLoss, maps | mask_of(2, N, masked=masked), {"heads": heads})
    for heads, reduction, backend in itertools.product(
        ("match", "mean"), ("mean", "sum", "none"), ON_A_GPU
    ):
        inputs = pair(3, 4, 20, 20) | {"mask": numbers(3, 20)}
        options = {"heads": heads, "reduction": reduction, "backend": backend}
        for function in (fastkd.AttentionLoss, fastkd.attention_loss):
            yield Call(function, inputs, options)
        yield Call(fastkd.attention_loss, inputs | {"weights": given(3)}, options)
    # More than 2^31 elements.
    yield Call(fastkd.attention_loss, pair(64, 32, 4096, 4096), {})
