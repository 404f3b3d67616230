"""COS-NCE: `cos_nce`, the oracle; `RANDOM` calls against it; `subjects` that keep every promise."""

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

import fastkd
from tests.support import oracles
from tests.support.draw import Case, Draw, by_norm, module_case, projected_slopes, reduced
from tests.support.subject import D_S, D_T, Subject, labels, of_module


def cos_nce(student, teacher, negatives, labels, mask) -> tuple[Tensor, Tensor]:
    """LRC-BERT, eqs. 1-2, at every position (B, P), and a mask of positions with a negative."""
    B, P, _ = student.shape
    losses, compared = student.sum(-1) * 0, torch.zeros(B, P, dtype=torch.bool)
    rows = []
    for i, p in itertools.product(range(B), range(P)):
        if negatives is not None:
            others = list((negatives if negatives.dim() == 3 else negatives[i])[:, p])
        else:
            others = [
                teacher[j, p]
                for j in range(B)
                if mask[j, p] and (j != i if labels is None else labels[j] != labels[i])
            ]
        compared[i, p] = bool(mask[i, p]) and len(others) > 0
        if compared[i, p]:
            z = student[i, p]
            positive = 1 - oracles.cosine(teacher[i, p], z)
            terms = [2 - ((1 - oracles.cosine(n, z)) - positive) for n in others]
            rows.append((i, p, sum(terms) / (2 * len(others)) + positive))
    for i, p, value in rows:
        losses = losses.index_put((torch.tensor(i), torch.tensor(p)), value)
    return losses, compared


def random_cos_nce(draw: Draw) -> Case:
    B, P, D, K = draw.size(zero=True), draw.size(), draw.size(), draw.size()
    reduction = draw.pick(["mean", "sum", "none"])
    kind = draw.pick(["batch", "labels", "shared", "each"])
    wide = (1e-18, 1e15) if draw.dtype in (torch.float32, torch.bfloat16) else (1.0,)
    mask = draw.mask(B, P)
    labels = draw.labels(B) if kind == "labels" else None
    weights, factors = draw.weights(mask)
    given = {"teacher": draw.features(B, P, D, scales=wide)}
    if kind in ("shared", "each"):
        lead = (B, K) if kind == "each" else (K,)
        given["negatives"] = draw.features(*lead, P, D, scales=wide)

    def oracle(student: Tensor, teacher: Tensor, negatives: Tensor | None = None) -> Tensor:
        losses, compared = cos_nce(student, teacher, negatives, labels, mask)
        return reduced(losses * factors, compared, reduction)

    return Case(
        lambda student, teacher, mask, negatives=None: fastkd.cos_nce_loss(
            student,
            teacher,
            negatives=negatives,
            labels=labels,
            mask=mask,
            weights=weights,
            reduction=reduction,
            backend=draw.backend,
        ),
        oracle,
        {"student": draw.features(B, P, D, scales=wide)},
        given,
        {"mask": draw.mask_argument(mask)},
        scale=2.0 * factors.abs().max().item() if factors.numel() else 2.0,
        mask=mask,
        masked=("student", "teacher"),
        slope=by_norm,
    )


def random_cos_nce_module(draw: Draw) -> Case:
    B, N, D_s, D_t = (draw.size() for _ in range(4))
    pool = draw.pick(["tokens", "cls", "mean"])
    module = fastkd.CosNCELoss(D_s, D_t, pool=pool, backend=draw.backend)
    mask = draw.mask(B, N)

    real = mask if pool == "tokens" else mask.any(1, keepdim=True)

    def compared(x: Tensor) -> Tensor:
        return x if pool == "tokens" else oracles.pooled(x, mask, pool)[:, None]

    def oracle(student: Tensor, teacher: Tensor, **parameters: Tensor) -> Tensor:
        projected = compared(student) @ parameters["W.weight"].mT
        return reduced(*cos_nce(projected, compared(teacher), None, None, real), "mean")

    def slopes(student: Tensor, **inputs: Tensor) -> dict[str, float]:
        size, _ = projected_slopes(compared(student)[real], inputs["W.weight"])
        return {"W.weight": size}

    case = module_case(draw, module, oracle, (B, N, D_s, D_t), mask)
    return dataclasses.replace(case, parameter_slopes=slopes)


RANDOM = {"cos_nce": random_cos_nce, "cos_nce_module": random_cos_nce_module}


def subjects(backend: str) -> Iterator[Subject]:
    yield Subject(
        "cos_nce_loss",
        lambda s, t, m: fastkd.cos_nce_loss(s, t, mask=m, backend=backend),
        same_size=True,
    )
    yield Subject(
        "cos_nce_loss with labels",
        lambda s, t, m: fastkd.cos_nce_loss(s, t, mask=m, labels=labels(s), backend=backend),
        same_size=True,
    )
    for pool in ("tokens", "cls", "mean"):
        yield of_module(
            f"CosNCELoss {pool}", fastkd.CosNCELoss(D_S, D_T, pool=pool, backend=backend)
        )
