"""K nearest rows of one class: `nearest` and `class_similarity`, the oracles, and the tables."""

import functools
import math
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

import fastkd
from fastkd.losses import neighbours
from tests.support import oracles
from tests.support.compare import value_and_grad
from tests.support.draw import (
    BATCH,
    KINDS,
    LENGTH,
    ROUNDINGS,
    WIDTH,
    Case,
    Draw,
    by_norm,
    module_case,
)
from tests.support.subject import D_S, D_T, Subject, function_of, labels, of_module


def of_one_label(labels, bank_labels, tolerance, ignore_index) -> Tensor:
    """Whether row and bank row have one label, (N, M)."""
    rows = [
        (label == other if tolerance is None else abs(label - other) <= tolerance)
        and ignore_index not in (label, other)
        for label in labels.tolist()
        for other in bank_labels.tolist()
    ]
    return torch.tensor(rows, dtype=torch.bool).view(len(labels), len(bank_labels))


def nearest(student, teacher, labels, bank_labels, k, tolerance=None, ignore_index=None) -> Tensor:
    """Per row (1/D) Σ of the squared distances to its k nearest rows of the same label."""
    student, teacher = student.flatten(1), teacher.flatten(1)
    losses = []
    for x, same in zip(
        student, of_one_label(labels, bank_labels, tolerance, ignore_index), strict=True
    ):
        squares = (teacher[same] - x).square().sum(-1)  # at most the number of rows with its label
        order = squares.detach().argsort(stable=True)[:k]
        total = squares[order].sum()
        # NaN in any row of its label gives NaN, selected or not.
        losses.append((total + 0 * squares.detach().sum()) / max(student.shape[1], 1))
    return torch.stack(losses) if losses else student.sum(1)


def class_similarity(features: Tensor, labels: Tensor) -> Tensor:
    """M_ICS: mean cosine of each sample with the samples of its class, itself included."""
    means = [
        oracles.cosine(x, features[labels == label]).mean()
        for x, label in zip(features, labels, strict=True)
    ]
    return torch.stack(means).mean() if means else features.sum()


def random_knn(draw: Draw) -> Case:
    N, M, D = draw.sizes(BATCH, LENGTH, WIDTH, most=2**15, zero=True)
    if draw.backend == "torch" and draw.chance(0.01):  # a search by blocks instead of all pairs
        N, M, D = draw.pick([(300, 700, 6), (1300, 40, 24)])
    shape = (D,) if draw.chance(0.7) else (D, draw.pick([1, 2, 5]))
    given = M != N or draw.chance(0.5)
    labels, bank_labels = draw.labels(N), draw.labels(M)
    tolerance, ignored = draw.pick([None, None, 0.5, 1]), draw.pick([-100, -100, 1])
    labels, bank_labels = (x.where(draw.uniform(len(x)) < 0.8, -100) for x in (labels, bank_labels))
    kind = draw.pick(["plain", "plain", "large", "tenths", "small", "bool", "real"])
    if kind == "large" and tolerance is not None:  # closer than float64 can distinguish
        least = draw.pick([2**53, -(2**53) - 8, 2**54, -(2**63) + 100, 2**63 - 8])
        labels, bank_labels = labels + least, bank_labels + least
        tolerance = draw.pick([tolerance, 2, 2**63])
    elif kind == "tenths" and tolerance is not None:  # of another dtype than the students'
        dtype = draw.pick([torch.float32, torch.float64])
        least, tolerance = draw.pick([(10, 0.1), (-8, 0.5)])
        labels, bank_labels = (labels + least).to(dtype) / 10, (bank_labels + least).double() / 10
    elif kind == "small":  # where −100 is 156
        labels, bank_labels = labels.to(torch.uint8), bank_labels.to(torch.int32)
    elif kind == "bool" and tolerance is None:
        labels, bank_labels = labels > 0, bank_labels > 0
    elif kind == "real" and tolerance is not None:
        dtype = draw.pick([torch.float32, torch.float64])
        labels, bank_labels = (5 * draw.uniform(rows).to(dtype) for rows in (N, M))
        bank_labels[:1], bank_labels[1:2] = torch.nan, torch.inf
        tolerance = draw.pick([0.0, 0.05, 0.3, 10.0])
    if not given:
        bank_labels = labels
    k, reduction = draw.pick([1, 2, 5, 16]), draw.pick(["sum", "mean", "none"])
    real = torch.tensor([label != ignored for label in labels.tolist()], dtype=torch.bool)
    weights, factors = draw.weights(real)
    wide = (1e-30, 1e19, 1.0) if draw.dtype in (torch.float32, torch.bfloat16) else (1.0,)
    rule = {"k": k, "tolerance": tolerance, "ignore_index": ignored}
    divisor = real.sum().clamp_min(1) if reduction == "mean" else 1
    # The reference's distances are of products, which near duplicates are too close for.
    by_products = draw.backend == "reference"
    kinds = ("clusters",) if draw.chance(0.15) and not by_products else KINDS
    student, teacher = (draw.features(x, *shape, scales=wide, kinds=kinds) for x in (N, M))
    plain = nearest(student.double(), teacher.double(), labels, bank_labels, **rule)
    # Sizes of the terms of value and gradient, which weights of both signs cancel.
    terms, steps = (
        (factors * x.nan_to_num(0, 0, 0)).abs() / divisor
        for x in (plain, 2 * (k * plain / max(math.prod(shape), 1)).sqrt())
    )
    scale = float(terms.sum())
    loss = draw.function("knn_feature_loss")
    banked = bank_labels if given else None
    # A GPU's search doesn't read values.
    readable = draw.pick([neighbours.values_readable] * 2 + [lambda x: False])

    def call(student: Tensor, teacher: Tensor) -> Tensor:
        with mock.patch.object(neighbours, "values_readable", readable):
            options = {"weights": weights, "reduction": reduction, **rule}
            return loss(student, teacher, labels, banked, **options)

    def oracle(student: Tensor, teacher: Tensor) -> Tensor:
        losses = nearest(student, teacher, labels, bank_labels, **rule) * factors
        return losses if reduction == "none" else losses.sum() / divisor

    return Case(
        call,
        oracle,
        {"student": student},
        {"teacher": teacher},
        scale=scale,
        slope=lambda x: steps / scale,
        roundings=ROUNDINGS if by_products else 0.0,  # all is computed from differences
        of_rows=True,
        # If a loss overflows, its product with a weight may be finite, and a mean too.
        unsure=tied(student, teacher, labels, bank_labels, **rule)
        | ((factors != 1) | (reduction != "none"))
        & (plain.abs() > torch.finfo(torch.float32).max / 8),
    )


def tied(student, teacher, labels, bank_labels, k, tolerance, ignore_index) -> Tensor:
    """Rows whose k-th neighbour is as far as an unlike row: rounding decides between them."""
    s, t = student.double().flatten(1), teacher.double().flatten(1)
    same = of_one_label(labels, bank_labels, tolerance, ignore_index)
    d = (s[:, None] - t).square().sum(-1).masked_fill(~same, torch.inf)
    if min(d.shape) == 0 or k >= d.shape[1]:
        return torch.zeros(len(s), dtype=torch.bool)
    last, index = d.sort(-1)[0][:, k - 1 : k], d.argsort(-1)[:, k - 1]
    return (((d - last).abs() <= 1e-12 * last) & (t != t[index][:, None]).any(-1)).any(-1)


def random_knn_module(draw: Draw) -> Case:
    B, N, D_s, D_t = draw.sizes(BATCH, LENGTH, WIDTH, WIDTH)
    k, pool = draw.pick([1, 2, 3]), draw.pick(["cls", "mean", "tokens"])
    tolerance, ignored = draw.pick([None, 1]), draw.pick([-100, 0])
    rule = {"k": k, "tolerance": tolerance, "ignore_index": ignored}
    reduction = draw.pick(["sum", "mean"])
    module = draw.module(
        functools.partial(fastkd.IntraClassKNNLoss, student_dim=D_s, teacher_dim=D_t),
        **rule, pool=pool, reduction=reduction,
    )  # fmt: skip
    labels, mask = draw.labels(B), draw.mask(B, N)
    bank_labels, bank_mask, given = labels, mask, {"labels": labels}
    if draw.chance(0.3):  # a bank of other samples, whose tokens are all real
        bank_labels, bank_mask = draw.labels(B + 1), torch.ones(B + 1, N, dtype=torch.bool)
        given["teacher_labels"] = bank_labels

    def oracle(student: Tensor, teacher: Tensor, **parameters: Tensor) -> Tensor:
        def projected(x: Tensor) -> Tensor:
            if not parameters:
                return x
            return x @ parameters["projector.weight"].mT + parameters["projector.bias"]

        if pool == "tokens":
            student = torch.where(mask[..., None], projected(student), 0).flatten(1)
            teacher = torch.where(bank_mask[..., None], teacher, 0).flatten(1)
        else:
            student = projected(oracles.pooled(student, mask, pool))
            teacher = oracles.pooled(teacher, bank_mask, pool)
        losses = nearest(student, teacher, labels, bank_labels, **rule)
        divisor = (labels != ignored).sum().clamp_min(1) if reduction == "mean" else 1
        return losses.sum() / divisor

    case = module_case(draw, module, oracle, (B, N, D_s, D_t), mask, scale=0.0, **given)
    if bank_labels is not labels:
        case.given, case.masked = {"teacher": draw.features(B + 1, N, D_t)}, ("student",)
    return case


def random_class_similarity(draw: Draw) -> Case:
    N, D = draw.sizes(BATCH, WIDTH, zero=True)
    labels = draw.labels(N)
    return Case(
        lambda features: fastkd.intra_class_similarity(features, labels),
        lambda features: class_similarity(features, labels),
        {
            "features": draw.features(
                N, D, scales=(1e-30, 1e18, 1.0) if draw.dtype == torch.float32 else (1.0,)
            )
        },
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


def examples(backend: str) -> Iterator[tuple]:
    loss = function_of("knn_feature_loss", backend)
    student = torch.tensor([[0.0, 0.0], [5.0, 5.0], [9.0, 9.0]])
    bank = torch.tensor([[0.0, 2.0], [1.0, 0.0], [5.0, 4.0], [0.0, 0.1]])
    call = functools.partial(
        loss, student, bank, torch.tensor([0, 1, 7]), torch.tensor([0, 0, 1, 2])
    )
    # Row 0: 1 and 4, over D = 2; row 1: only one of its label, at 1; row 2: none.
    yield "k=1", call(k=1, reduction="none"), [0.5, 0.5, 0.0]
    yield "k=2", call(k=2, reduction="none"), [2.5, 0.5, 0.0]
    yield "sum", call(k=2), 3.0
    yield "mean", call(k=2, reduction="mean"), 1.0
    labels = torch.tensor([0.0, 1.0, 7.0]), torch.tensor([0.4, -0.5, 1.6, 6.9])
    losses = loss(student, bank, *labels, k=2, tolerance=0.5, reduction="none")
    yield "tolerance", losses, [2.5, 0.0, (81 + 8.9**2) / 2]


def edges(backend: str) -> Iterator[tuple]:
    yield from edges_of_search(backend, neighbours.values_readable)
    if backend == "torch":  # a GPU's search doesn't read values
        yield from edges_of_search(backend, lambda x: False)


def edges_of_search(backend: str, readable: Callable[[Tensor], bool]) -> Iterator[tuple]:
    def loss(bank: Tensor, own: Tensor, others: Tensor | None, **options) -> Callable:
        given = {"teacher": bank, "student_labels": own, "teacher_labels": others}

        def call(student: Tensor) -> Tensor:
            with mock.patch.object(neighbours, "values_readable", readable):
                return function_of("knn_feature_loss", backend)(student, **given, **options)

        return call

    # Of equally near rows the one with the lower index, in any order of the labels.
    bank, zeros = torch.tensor([[2.0, 0], [0, 1.0], [-1.0, 0], [0, -1.0], [1.0, 0]]), torch.zeros
    call = loss(bank, torch.tensor([0, 1, 0]), zeros(5).long(), k=2)
    yield "ties", call, zeros(3, 2), 2.0, torch.tensor([[1.0, -1.0], [0, 0], [1.0, -1.0]]), 0.0
    call = loss(bank, zeros(3), torch.tensor([0.0, 0.4, 0.3, 0.2, 0.1]), tolerance=0.5)
    yield "ties across labels", call, zeros(3, 2), 1.5, torch.tensor([0.0, -1.0]), 0.0
    tenths = torch.tensor([-0.8, -0.3], dtype=torch.float64)  # −0.8 + 0.5 is below −0.3
    call = loss(bank[:1], tenths[:1], tenths[1:], tolerance=0.5)
    yield "a label at the tolerance", call, zeros(1, 2), 2.0, torch.tensor([-2.0, 0.0]), 0.0
    # More ties than the list of candidates holds.
    many, first = torch.cat([2 * torch.eye(40)[:20], torch.eye(40), torch.eye(40)[:30]]), zeros(40)
    first[:2] = -2 / 40
    for others, tolerance in ((zeros(90), None), (torch.arange(90).flip(0) / 100, 1.0)):
        call = loss(many, zeros(2), others, k=2, tolerance=tolerance)
        yield f"many ties within {tolerance}", call, zeros(2, 40), 4 / 40, first, 0.0
    holed = torch.randn(4, 5)
    holed[2] = torch.nan
    call = loss(holed, torch.full((3,), -100), zeros(4), k=3, reduction="mean")
    if backend != "reference":
        yield "ignored rows of NaN", call, holed[:3], 0.0, 0.0, 0.0
        yield "NaN and an empty bank", loss(holed[:0], zeros(4), zeros(0)), holed, 0.0, 0.0, 0.0
    # NaN and inf reach the rows of their label alone.
    rows, bank = torch.randn(6, 5), torch.randn(20, 5)
    own, others = torch.tensor([0, 1, 2, 0, 1, 3]), torch.arange(20) % 3
    losses = loss(bank, own, others, k=2, reduction="none")(rows.requires_grad_())
    clean = torch.autograd.grad(losses.sum(), rows)[0]
    lost = torch.tensor([False, True, False, True, True, False])
    for bad in (torch.nan, torch.inf, -torch.inf):
        student, teacher = rows.detach().clone(), bank.clone()
        student[3, 0] = teacher[4, 2] = bad
        value = losses.detach().masked_fill(lost, torch.nan)
        gradient = clean.masked_fill(lost[:, None], torch.nan)
        call = loss(teacher, own, others, k=2, reduction="none")
        yield f"{bad} in two rows", call, student, value, gradient
    # More rows than candidates, apart by less than the rounding error of a product.
    if backend != "triton":  # whose test of near duplicates is smaller
        centres = 30 * torch.randn(4, 64)
        for n, m in ((60, 1320), (12, 80)):  # by a search of two blocks, and of all pairs
            s, t = (centres.repeat(k // 4, 1) + 1e-4 * torch.randn(k, 64) for k in (n, m))
            wanted = value_and_grad(nearest, s.double(), t.double(), zeros(n), zeros(m), 2)
            call = loss(t, zeros(n), zeros(m), k=2, reduction="none")
            yield f"{n} near duplicates", call, s, *wanted, 0.0
    # A far row of the bank costs the others no digits.
    far, zero = torch.randn(20, 5), (zeros(6), zeros(20))
    far[3] = 1e19
    wanted = value_and_grad(nearest, rows.double(), far.double(), *zero, 2)
    yield "a far row", loss(far, *zero, k=2, reduction="none"), rows, *wanted
    # Products beyond float64, whose differences are not.
    if backend == "torch":
        student = torch.tensor([[1e200], [-1e200]], dtype=torch.float64)
        call = loss(torch.cat([1.5 * student[1:], student]), zeros(2), zeros(3))
        yield "products beyond float64", call, student, 0.0, 0.0
    # The mean of two losses whose sum is beyond float32.
    huge = loss(torch.full((2, 400), 1.7e19), torch.arange(2), None, reduction="mean")
    yield "squares beyond float32", huge, zeros(2, 400), 1.7e19**2, -1.7e19 / 400


def growing() -> dict[str, tuple]:
    def calls():
        for n in (4, 8, 17, 64):
            student, bank = torch.randn(n, n + 2, requires_grad=True), torch.randn(n + 1, n + 2)
            yield student, bank, torch.arange(n) % 3, torch.arange(n + 1) % 3

    loss = functools.partial(fastkd.knn_feature_loss, k=2, reduction="mean", backend="torch")
    return {"knn": (loss, calls())}


def bad() -> Iterator[tuple[str, Callable]]:
    x, y = torch.randn(2, 4, 8)
    zeros = torch.zeros(4)
    for words, change in (
        ("as many features per row", {"teacher": y[:, :7]}),
        ("teacher_labels is missing", {"teacher": torch.randn(6, 8)}),
        (r"teacher_labels must have shape \(4,\)", {"teacher_labels": torch.zeros(5)}),
        (r"student_labels must have shape \(4,\)", {"student_labels": torch.zeros(3)}),
        ("student_labels must be integers or real", {"student_labels": zeros + 0j}),
        ("ignore_index must be an int", {"ignore_index": 0.5}),
    ):
        right = {"student": x, "teacher": y, "student_labels": zeros}
        yield words, functools.partial(fastkd.knn_feature_loss, **right | change)
    bank = torch.randn(40, 8), zeros, torch.zeros(40)
    many = functools.partial(fastkd.knn_feature_loss, x, *bank, k=33, backend="triton")
    yield "at most 32 neighbours, got 33", many
    tokens, labels = torch.randn(2, 3, 4), torch.arange(2)
    mask, rows = torch.tensor([[1, 1, 0], [1, 1, 1]]), torch.randn(2, 4)
    sized, loss = fastkd.IntraClassKNNLoss(1, 6, 4), fastkd.IntraClassKNNLoss(pool="mean")
    words = "student must have student_dim=6 features, got 4"
    yield words, lambda: sized(tokens, tokens, labels)
    longer, deep = torch.randn(2, 5, 4), torch.randn(2, 3, 1, 4)
    no_tokens = {"mask": mask, "teacher_mask": mask[:, 0]}
    for words, pair, masks in (
        (r"mask has shape \(2, 3\), .* fit teacher \(2, 5, 4\)", (tokens, longer), {"mask": mask}),
        (r"mask: student \(2, 4\) has no tokens to mask", (rows, rows), {"mask": mask[:, 0]}),
        (r"teacher_mask: teacher \(2, 4\) has no tokens", (tokens, rows), no_tokens),
        (r"student must be \(B, D\) or \(B, N, D\)", (deep, tokens), {}),
    ):
        yield words, functools.partial(loss, *pair, labels, **masks)
