"""The calls of fastkd/losses/knn.py; see `tools.calls`."""

import itertools

import torch

import fastkd
from tools.calls import (
    ALL_TYPES,
    HALF_AND_FULL,
    ON_A_GPU,
    Call,
    Calls,
    Made,
    given,
    learns,
    numbers,
    pair,
)  # fmt: skip


def calls() -> Calls:
    def rows(N: int, M: int, D: int, kind: torch.dtype, dtype: torch.dtype) -> dict[str, Made]:
        return {
            "student": learns(N, D, dtype=dtype),
            "teacher": given(M, D, dtype=dtype),
            "student_labels": numbers(N, dtype=kind),
            "teacher_labels": numbers(M, dtype=kind),
        }

    # Rows, rows of the bank, features: few and many, sorted by label or not, from products.
    sizes = [(N, M, D) for N in (32, 65) for M in (32, 1024) for D in (8, 16)]
    sizes += [(N, 32, D) for N in (1, 65) for D in (4096, 4097)]
    kinds = (torch.int64, torch.float32, torch.float64)
    for dtype, kind, (N, M, D), tolerance, k, reduction in itertools.product(
        HALF_AND_FULL, kinds, sizes, (None, 0.5), (1, 8, 32), ("sum", "mean")
    ):
        inputs = rows(N, M, D, kind, dtype)
        options = {"k": k, "tolerance": tolerance, "reduction": reduction}
        yield Call(fastkd.knn_feature_loss, inputs, options)
    sizes = [(1, 32, 8), (4096, 4096, 64), (17, 300, 70_000), (32, 65536, 768)]
    for dtype, kind, (N, M, D), tolerance, k in itertools.product(
        ALL_TYPES, (torch.int64, torch.float32), sizes, (None, 2.0**40), (1, 8)
    ):
        inputs = rows(N, M, D, kind, dtype)
        yield Call(fastkd.knn_feature_loss, inputs, {"k": k, "tolerance": tolerance})
    # More than 2^31 elements.
    sizes = [(2**20, 2**20, 64), (2**22, 2**12, 768), (64, 2**22, 768), (32, 32, 2**24)]
    for N, M, D in sizes:
        inputs = rows(N, M, D, torch.int64, torch.float32)
        yield Call(fastkd.knn_feature_loss, inputs, {"k": 4})
    others = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, *HALF_AND_FULL)
    for kind, tolerance, reduction in itertools.product(others, (None, 1), ("sum", "mean", "none")):
        inputs = pair(65, 16) | {"student_labels": numbers(65, dtype=kind)}
        options = {"tolerance": tolerance, "reduction": reduction}
        for backend in ("torch", "triton"):
            yield Call(fastkd.knn_feature_loss, inputs, options | {"backend": backend})
    for reduction, backend in itertools.product(("sum", "mean", "none"), ON_A_GPU):
        weighted = rows(65, 65, 16, torch.int64, torch.float32) | {"weights": given(65)}
        options = {"reduction": reduction, "backend": backend}
        yield Call(fastkd.knn_feature_loss, weighted, options)
    samples = {"labels": numbers(8), "mask": numbers(8, 16)}
    for pool, reduction, backend in itertools.product(
        ("cls", "mean", "tokens"), ("sum", "mean", "none"), ON_A_GPU
    ):
        inputs = pair(8, 16, 48, teacher=(8, 16, 64)) | samples
        options = {"k": 2, "student_dim": 48, "teacher_dim": 64, "pool": pool}
        options |= {"reduction": reduction, "backend": backend}
        yield Call(fastkd.IntraClassKNNLoss, inputs, options)
    bank = {"teacher_labels": numbers(300), "teacher_mask": numbers(300, 20)}
    inputs = pair(8, 16, 48, teacher=(300, 20, 48)) | samples | bank
    yield Call(fastkd.IntraClassKNNLoss, inputs, {})
    for dtype in ALL_TYPES:
        inputs = {"features": given(8, 16, dtype=dtype), "labels": numbers(8), "mask": numbers(8)}
        options = {"size": 32, "dim": 16, "dtype": dtype, "label_dtype": torch.int64}
        yield Call(fastkd.FeatureQueue, inputs, options)
        inputs = {"features": learns(8, 16, dtype=dtype), "labels": numbers(8)}
        yield Call(fastkd.intra_class_similarity, inputs, {})
