"""K nearest rows of the same class, in the tests that go through every loss."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

import fastkd
from tests import oracles
from tests.calls import ALL_TYPES, HALF_AND_FULL, Call, Calls, Made, given, learns, numbers
from tests.draw import Case, Draw, by_norm, module_case
from tests.subject import D_S, D_T, Subject, labels, of_module


def nearest(student, teacher, labels, bank_labels, k, tolerance=None) -> Tensor:
    """Per row (1/D) Σ of the squared distances to its k nearest rows of the same label."""
    student, teacher = student.flatten(1), teacher.flatten(1)
    losses = []
    for x, label in zip(student, labels.tolist(), strict=True):
        same = [
            j
            for j, other in enumerate(bank_labels.tolist())
            if (label == other if tolerance is None else abs(label - other) <= tolerance)
        ]
        squares = (teacher[same] - x).square().sum(-1)  # as many as there are of its label
        order = squares.detach().argsort(stable=True)[:k]
        total = squares[order].sum()
        # A row of its label that is no number poisons it, chosen or not.
        losses.append((total + 0 * squares.detach().sum()) / max(student.shape[1], 1))
    return torch.stack(losses) if losses else student.sum(1)


def class_similarity(features: Tensor, labels: Tensor) -> Tensor:
    """M_ICS: mean cosine of each sample with the samples of its class, itself included."""
    means = [
        torch.stack([oracles.cosine(x, y) for y in features[labels == label]]).mean()
        for x, label in zip(features, labels, strict=True)
    ]
    return torch.stack(means).mean() if means else features.sum()


def random_knn(draw: Draw) -> Case:
    N, M, D = draw.size(zero=True), draw.size(zero=True), draw.size()
    shape = (D,) if draw.chance(0.7) else (D, draw.size())
    given = M != N or draw.chance(0.5)
    labels, bank_labels = draw.labels(N), draw.labels(M)
    tolerance = draw.pick([None, None, 0.5])
    if tolerance is not None and draw.chance(0.3):  # beyond what float64 tells apart
        labels, bank_labels = labels + 2**54, bank_labels + 2**54
    if not given:
        bank_labels = labels
    k, reduction = draw.pick([1, 2, 5, 16]), draw.pick(["sum", "mean", "none"])
    wide = (1e-30, 1e19) if draw.dtype in (torch.float32, torch.bfloat16) else (1.0,)

    def reduced(losses: Tensor) -> Tensor:
        if reduction == "none":
            return losses
        return losses.sum() / (max(N, 1) if reduction == "mean" else 1)

    return Case(
        lambda student, teacher: fastkd.knn_feature_loss(
            student,
            teacher,
            labels,
            bank_labels if given else None,
            k=k,
            tolerance=tolerance,
            reduction=reduction,
            backend=draw.backend,
        ),
        lambda student, teacher: reduced(
            nearest(student, teacher, labels, bank_labels, k, tolerance)
        ),
        {"student": draw.features(N, *shape, scales=wide)},
        {"teacher": draw.features(M, *shape, scales=wide)},
        scale=0.0,
    )


def random_knn_module(draw: Draw) -> Case:
    B, N, D_s, D_t = (draw.size() for _ in range(4))
    pool = draw.pick(["cls", "mean", "tokens"])
    module = fastkd.IntraClassKNNLoss(2, D_s, D_t, pool=pool, backend=draw.backend)
    labels, mask = draw.labels(B), draw.mask(B, N)

    def oracle(student: Tensor, teacher: Tensor, **parameters: Tensor) -> Tensor:
        def projected(x: Tensor) -> Tensor:
            if not parameters:
                return x
            return x @ parameters["projector.weight"].mT + parameters["projector.bias"]

        if pool == "tokens":
            student = torch.where(mask[..., None], projected(student), 0).flatten(1)
            teacher = torch.where(mask[..., None], teacher, 0).flatten(1)
        else:
            student = projected(oracles.pooled(student, mask, pool))
            teacher = oracles.pooled(teacher, mask, pool)
        return nearest(student, teacher, labels, labels, 2, None).sum()

    return module_case(draw, module, oracle, (B, N, D_s, D_t), mask, scale=0.0, labels=labels)


def random_class_similarity(draw: Draw) -> Case:
    N = draw.size(zero=True)
    labels = draw.labels(N)
    return Case(
        lambda features: fastkd.intra_class_similarity(features, labels),
        lambda features: class_similarity(features, labels),
        {"features": draw.features(N, draw.size())},
        slope=by_norm,
    )


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
        for backend in ("torch", "triton"):
            yield Call(
                fastkd.knn_feature_loss,
                {
                    "student": learns(65, 16),
                    "teacher": given(65, 16),
                    "student_labels": numbers(65, dtype=kind),
                },
                {"tolerance": tolerance, "reduction": reduction, "backend": backend},
            )
    for pool, reduction, backend in itertools.product(
        ("cls", "mean", "tokens"), ("sum", "mean", "none"), ("auto", "torch", "triton")
    ):
        yield Call(
            fastkd.IntraClassKNNLoss,
            {
                "student": learns(8, 16, 48),
                "teacher": given(8, 16, 64),
                "labels": numbers(8),
                "mask": numbers(8, 16),
            },
            {
                "k": 2,
                "student_dim": 48,
                "teacher_dim": 64,
                "pool": pool,
                "reduction": reduction,
                "backend": backend,
            },
        )
    yield Call(
        fastkd.IntraClassKNNLoss,
        {
            "student": learns(8, 16, 48),
            "teacher": given(300, 20, 48),
            "labels": numbers(8),
            "mask": numbers(8, 16),
            "teacher_labels": numbers(300),
            "teacher_mask": numbers(300, 20),
        },
        {},
    )
    for dtype in ALL_TYPES:
        yield Call(
            fastkd.FeatureQueue,
            {"features": given(8, 16, dtype=dtype), "labels": numbers(8), "mask": numbers(8)},
            {"size": 32, "dim": 16, "dtype": dtype, "label_dtype": torch.int64},
        )
        yield Call(
            fastkd.intra_class_similarity,
            {"features": learns(8, 16, dtype=dtype), "labels": numbers(8)},
            {},
        )


RANDOM = {
    "knn": random_knn,
    "knn_module": random_knn_module,
    "class_similarity": random_class_similarity,
}


def subjects(backend: str) -> Iterator[Subject]:
    yield Subject(
        "knn_feature_loss",
        lambda s, t, m: fastkd.knn_feature_loss(s, t, labels(s), backend=backend),
        masked=False,
        same_size=True,
    )
    for pool in ("cls", "mean", "tokens"):
        yield of_module(
            f"IntraClassKNNLoss {pool}",
            fastkd.IntraClassKNNLoss(2, D_S, D_T, pool=pool, backend=backend),
            labelled=True,
        )
