"""The calls of fastkd/losses/cos_nce.py; see `tools.calls`."""

import itertools
from typing import Any

import torch

import fastkd
from tools.calls import (
    ALL_TYPES,
    BOTH,
    LAYERS,
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
    labels: list[torch.dtype | None] = [None, torch.int64, torch.float32, torch.bool, torch.float64]
    # A batch of up to 16, or of up to 32 without labels, is compared in one visit of a position.
    rows = [(6, None), (17, None), (6, (5, 3)), (6, (6, 5, 3))]
    for dtype, kind, (B, shape), masked, D in itertools.product(
        ALL_TYPES, labels, rows, BOTH, (8, 16)
    ):
        options: dict[str, Any] = {"labels": numbers(B, dtype=kind)} if kind else {}
        if shape:
            options["negatives"] = given(*shape, D, dtype=dtype)
            if masked == (D == 16):  # both sides masked or neither, else one of them
                kind_of_mask = torch.bool if masked else torch.int64
                options["negatives_mask"] = numbers(*shape, dtype=kind_of_mask)
            if kind:
                options["negatives_labels"] = numbers(*shape[:-1], dtype=kind)
        options |= mask_of(B, 3, masked=masked)
        for reduction in ("mean", "sum", "none"):
            inputs = pair(B, 3, D, dtype=dtype) | options
            yield Call(fastkd.cos_nce_loss, inputs, {"reduction": reduction})
        for layers in SOME_LAYERS if D == 16 and masked else LAYERS:
            if shape:
                options["negatives"] = [given(*shape, D, dtype=dtype)] * layers
            inputs = pair(B, 3, 48, teacher=(B, 3, D), dtype=dtype, layers=layers) | options
            sizes = {"student_dim": 48, "teacher_dim": D}
            yield Call(fastkd.CosNCELoss, inputs, sizes, dtype=dtype)
    for pool, reduction, backend in itertools.product(
        ("tokens", "cls", "mean"), ("mean", "sum"), ON_A_GPU
    ):
        sizes = {"student_dim": 48, "teacher_dim": 64}
        options = {"pool": pool, "reduction": reduction, "backend": backend}
        inputs = pair(4, 16, 48, teacher=(4, 16, 64), layers=3)
        yield Call(fastkd.CosNCELoss, inputs, sizes | options)
    for reduction, backend, masked, B in itertools.product(
        ("mean", "sum", "none"), ON_A_GPU, BOTH, (6, 17)
    ):
        inputs = pair(B, 3, 16) | {"weights": given(B, 3)} | mask_of(B, 3, masked=masked)
        yield Call(fastkd.cos_nce_loss, inputs, {"reduction": reduction, "backend": backend})
    for labelled, size in itertools.product(
        BOTH, ((2, 48), (1, 48), (33, 1, 768), (2**17, 32, 768), (64, 2**20, 64))
    ):
        inputs = pair(*size) | {"labels": numbers(size[0]) if labelled else None}
        for backend in ("torch", "triton") if len(size) == 2 else ("auto",):
            yield Call(fastkd.cos_nce_loss, inputs, {"backend": backend})
