"""The calls of fastkd/losses/attention.py; see `tools.calls`."""

import itertools

import fastkd
from tools.calls import (
    ALL_TYPES,
    BOTH,
    LAYERS,
    MANY_LAYERS,
    Call,
    Calls,
    given,
    learns,
    mask_of,
    numbers,
)


def calls() -> Calls:
    # Tokens: few and many, multiples of 16 or not.
    sizes = (1, 17, 32, 33, 128)
    for dtype, N, masked, layers, heads, learning in itertools.product(
        ALL_TYPES, sizes, BOTH, (*LAYERS, MANY_LAYERS), ("match", "mean"), BOTH
    ):
        student = learns if learning else given
        H_t = 4 if heads == "match" else 3
        yield Call(
            fastkd.AttentionLoss,
            {
                "student": [student(2, 4, N, N, dtype=dtype)] * layers,
                "teacher": [given(2, H_t, N, N, dtype=dtype)] * layers,
                **mask_of(2, N, masked=masked),
            },
            {"heads": heads},
        )
    for heads, reduction, backend in itertools.product(
        ("match", "mean"), ("mean", "sum", "none"), ("auto", "torch", "triton")
    ):
        inputs = {
            "student": learns(3, 4, 20, 20),
            "teacher": given(3, 4, 20, 20),
            "mask": numbers(3, 20),
        }
        options = {"heads": heads, "reduction": reduction, "backend": backend}
        for of in (fastkd.AttentionLoss, fastkd.attention_loss):
            yield Call(of, inputs, options)
        yield Call(fastkd.attention_loss, inputs | {"weights": given(3)}, options)
    # More than 2^31 elements.
    yield Call(
        fastkd.attention_loss,
        {"student": learns(64, 32, 4096, 4096), "teacher": given(64, 32, 4096, 4096)},
        {},
    )
