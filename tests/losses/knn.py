"""K nearest rows of the same class: `nearest` and `class_similarity`, the oracles.

`RANDOM` calls are held against them; `subjects` that keep every promise.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

import fastkd
from tests.support import oracles
from tests.support.draw import Case, Draw, by_norm, module_case
from tests.support.subject import D_S, D_T, Subject, labels, of_module


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
        squares = (teacher[same] - x).square().sum(-1)  # at most the number of rows with its label
        order = squares.detach().argsort(stable=True)[:k]
        total = squares[order].sum()
        # NaN in any row of its label gives NaN, selected or not.
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
    if tolerance is not None and draw.chance(0.3):  # closer than float64 can distinguish
        labels, bank_labels = labels + 2**54, bank_labels + 2**54
    if not given:
        bank_labels = labels
    k, reduction = draw.pick([1, 2, 5, 16]), draw.pick(["sum", "mean", "none"])
    weights, factors = draw.weights(torch.ones(N, dtype=torch.bool))
    wide = (1e-30, 1e19) if draw.dtype in (torch.float32, torch.bfloat16) else (1.0,)

    def reduced(losses: Tensor) -> Tensor:
        if reduction == "none":
            return losses
        return losses.sum() / (max(N, 1) if reduction == "mean" else 1)

    student, teacher = (draw.features(rows, *shape, scales=wide) for rows in (N, M))
    plain = nearest(student.double(), teacher.double(), labels, bank_labels, k, tolerance)
    return Case(
        lambda student, teacher: fastkd.knn_feature_loss(
            student,
            teacher,
            labels,
            bank_labels if given else None,
            k=k,
            tolerance=tolerance,
            weights=weights,
            reduction=reduction,
            backend=draw.backend,
        ),
        lambda student, teacher: reduced(
            nearest(student, teacher, labels, bank_labels, k, tolerance) * factors
        ),
        {"student": student},
        {"teacher": teacher},
        scale=0.0,
        # If the loss overflows, a weight of 0 gives NaN.
        unsure=(factors == 0) & (plain.abs() > torch.finfo(torch.float32).max / 8),
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
