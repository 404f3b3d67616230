"""The calls of fastkd/losses/relation.py; see `tools.calls`."""

import itertools
from typing import Any

import torch

import fastkd
from tools.calls import (
    ALL_TYPES,
    BOTH,
    HALF_AND_FULL,
    LAYERS,
    MANY_LAYERS,
    ON_A_GPU,
    Call,
    Calls,
    given,
    mask_of,
    numbers,
    pair,
)  # fmt: skip


def calls() -> Calls:
    def layers_of(
        B: int, N: int, D: int, dtype: torch.dtype, layers: int, learning: bool, masked: bool
    ) -> dict[str, Any]:
        features = pair(
            B, N, D, teacher=(B, N, 2 * D), dtype=dtype, layers=layers, learning=learning
        )
        return features | mask_of(B, N, masked=masked)

    triton = {"backend": "triton"}
    sides = (2, 16, 17, 32, 33, 64, 65, 128, 129)
    for dtype, masked, layers, learning in itertools.product(HALF_AND_FULL, BOTH, LAYERS, BOTH):
        for B, N in zip(sides, sides[::-1], strict=True):
            # The kernels see features of any size and layout as multiples of 16.
            for precision in ("highest", "high") if dtype == torch.float32 else ("highest",):
                inputs = layers_of(B, N, 8 if N % 2 else 16, dtype, layers, learning, masked)
                yield Call(fastkd.FCDLoss, inputs, triton, precision)
    # Rows of which a program of the backward pass holds one or several.
    widths = (256, 512, 1024, 2048, 4096, 4112)
    for D, dtype, masked, layers in itertools.product(widths, HALF_AND_FULL, BOTH, LAYERS):
        yield Call(fastkd.FCDLoss, layers_of(2, 16, D, dtype, layers, True, masked), triton)
    for learning in BOTH:
        inputs = layers_of(32, 128, 768, torch.bfloat16, MANY_LAYERS, learning, True)
        yield Call(fastkd.FCDLoss, inputs, {})
    two_layers = layers_of(4, 16, 48, torch.float32, 2, True, True)
    for normalize, distance, over in itertools.product(
        ("l2", "layer_norm", "softmax", "none"), ("pearson", "mse", "kl"), ("tokens", "samples")
    ):
        options = {"normalize": normalize, "distance": distance}
        for (B, N), backend, dtype in (
            *(((4, 16), "auto", dtype) for dtype in ALL_TYPES),
            ((2, 300), "torch", torch.bfloat16),
        ):
            inputs = pair(B, N, 48, dtype=dtype) | {"mask": numbers(B, N)}
            yield Call(fastkd.relation_loss, inputs, options | {"over": over, "backend": backend})
        yield Call(fastkd.FCDLoss, two_layers, options)
    for backend in ("torch", "triton"):
        yield Call(fastkd.FCDLoss, two_layers, {"backend": backend})
    for N, backend, masked in itertools.product((16, 300), ON_A_GPU, BOTH):
        inputs = pair(4, N, 48) | {"weights": given(4)} | mask_of(4, N, masked=masked)
        yield Call(fastkd.relation_loss, inputs, {"backend": backend})
    # Sizes that Triton sees as 1, more than 2^31 elements, more blocks than a grid's second
    # dimension takes.
    shapes = [(2, 1, 48), (1, 5, 48), (300, 16, 48), (2, 4096, 64), (100_000, 32, 768)]
    shapes += [(64, 8192, 4096), (2, 70_000, 16)]
    for over, shape in itertools.product(("tokens", "samples"), shapes):
        inputs = pair(*shape) | {"mask": numbers(*shape[:2])}
        yield Call(fastkd.relation_loss, inputs, {"over": over} | triton)
