"""The calls of fastkd/losses/relation.py; see `tools.calls`."""

import itertools

import torch

import fastkd
from tools.calls import (
    ALL_TYPES,
    BOTH,
    HALF_AND_FULL,
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
    def pair(B: int, N: int, D: int, dtype: torch.dtype, layers: int, learning: bool, masked: bool):
        student = learns if learning else given
        return {
            "student": [student(B, N, D, dtype=dtype)] * layers,
            "teacher": [given(B, N, 2 * D, dtype=dtype)] * layers,
            **mask_of(B, N, masked=masked),
        }

    sides = (2, 16, 17, 32, 33, 64, 65, 128, 129)
    for dtype, masked, layers, learning in itertools.product(HALF_AND_FULL, BOTH, LAYERS, BOTH):
        for B, N in zip(sides, sides[::-1], strict=True):
            # The kernels see features of any size and layout as multiples of 16.
            for precision in ("highest", "high") if dtype == torch.float32 else ("highest",):
                D = 8 if N % 2 else 16
                yield Call(
                    fastkd.FCDLoss,
                    pair(B, N, D, dtype, layers, learning, masked),
                    {"backend": "triton"},
                    precision,
                )
    # Rows that a program of the backward pass holds as they are, and ones too long for that.
    widths = (256, 512, 1024, 2048, 4096, 4112)
    for D, dtype, masked, layers in itertools.product(widths, HALF_AND_FULL, BOTH, LAYERS):
        yield Call(
            fastkd.FCDLoss, pair(2, 16, D, dtype, layers, True, masked), {"backend": "triton"}
        )
    for learning in BOTH:
        inputs = pair(32, 128, 768, torch.bfloat16, MANY_LAYERS, learning, True)
        yield Call(fastkd.FCDLoss, inputs, {})
    for normalize, distance, over in itertools.product(
        ("l2", "layer_norm", "softmax", "none"), ("pearson", "mse", "kl"), ("tokens", "samples")
    ):
        options = {"normalize": normalize, "distance": distance}
        for (B, N), backend, dtype in (
            *(((4, 16), "auto", dtype) for dtype in ALL_TYPES),
            ((2, 300), "torch", torch.bfloat16),
        ):
            yield Call(
                fastkd.relation_loss,
                {
                    "student": learns(B, N, 48, dtype=dtype),
                    "teacher": given(B, N, 48, dtype=dtype),
                    "mask": numbers(B, N),
                },
                options | {"over": over, "backend": backend},
            )
        inputs = pair(4, 16, 48, torch.float32, 2, True, True)
        yield Call(fastkd.FCDLoss, inputs, options)
    for backend in ("torch", "triton"):
        inputs = pair(4, 16, 48, torch.float32, 2, True, True)
        yield Call(fastkd.FCDLoss, inputs, {"backend": backend})
    for N, backend, masked in itertools.product((16, 300), ("auto", "torch", "triton"), BOTH):
        inputs = {"student": learns(4, N, 48), "teacher": given(4, N, 48), "weights": given(4)}
        inputs |= mask_of(4, N, masked=masked)
        yield Call(fastkd.relation_loss, inputs, {"backend": backend})
    # Sizes that Triton sees as 1, more than 2^31 elements, more blocks than a grid's second
    # dimension takes.
    for over, shape in itertools.product(
        ("tokens", "samples"),
        (
            (2, 1, 48),
            (1, 5, 48),
            (300, 16, 48),
            (2, 4096, 64),
            (100_000, 32, 768),
            (64, 8192, 4096),
            (2, 70_000, 16),
        ),
    ):
        yield Call(
            fastkd.relation_loss,
            {"student": learns(*shape), "teacher": given(*shape), "mask": numbers(*shape[:2])},
            {"over": over, "backend": "triton"},
        )
