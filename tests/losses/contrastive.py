"""COS-NCE: `cos_nce`, the oracle, and the tables of `tests/losses/__init__.py`."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import fastkd
from tests.support import oracles
from tests.support.draw import (
    BATCH,
    LENGTH,
    WIDTH,
    Case,
    Draw,
    by_norm,
    projected_slopes,
    reduced,
)
from tests.support.subject import D_S, D_T, Subject, function_of, labels, of_module


def cos_nce(
    student, teacher, negatives, labels, mask, negatives_mask=None, negatives_labels=None
) -> tuple[Tensor, Tensor]:
    """LRC-BERT, eqs. 1-2, at every position (B, P), and a mask of positions with a negative."""
    losses, compared = [], []
    for i, z in enumerate(student):
        if negatives is None:
            bank, real, given = teacher, mask.clone(), labels
            real[i] = False  # a sample is never its own negative
        else:
            each = negatives.dim() == 4
            bank, real, given = (
                x[i] if each and x is not None else x
                for x in (negatives, negatives_mask, negatives_labels)
            )
            real = torch.ones(bank.shape[:2], dtype=torch.bool) if real is None else real
        if labels is not None:
            own = labels[i].item()  # float32 would round it
            other = [x != own for x in given.tolist()]
            real = real & torch.tensor(other).bool()[:, None]
        positive = 1 - oracles.cosine(teacher[i], z)
        g = 1 - oracles.cosine(bank, z)  # (K, P)
        count = real.sum(0)
        terms = torch.where(real, 2 - (g - positive), 0).sum(0) / (2 * count).clamp_min(1)
        compared.append(mask[i] & (count > 0))
        losses.append(torch.where(compared[-1], terms + positive, 0))
    if not losses:
        return student.sum(-1), mask
    return torch.stack(losses), torch.stack(compared)


def bank_of(draw: Draw, B: int, P: int, D: int, wide: tuple[float, ...]) -> tuple[dict, dict]:
    """Negatives, shared by all samples or each sample's own, and their masks and labels."""
    K = draw.size(zero=True)
    lead = draw.pick([(K,), (B, K)])
    tensors = {"negatives": draw.features(*lead, P, D, scales=wide)}
    rest: dict[str, Any] = {}
    if draw.chance(0.5):
        rest["negatives_mask"] = draw.mask(*lead, P)
    if draw.chance(0.5):
        rest["negatives_labels"] = torch.randint(0, 4, lead, generator=draw.generator)
    return tensors, rest


def random_cos_nce(draw: Draw) -> Case:
    B, P, D = draw.sizes(BATCH, LENGTH, WIDTH, zero=True)
    reduction = draw.pick(["mean", "sum", "none"])
    wide = (1e-18, 1e15, 1.0) if draw.dtype in (torch.float32, torch.bfloat16) else (1.0,)
    mask = draw.mask(B, P)
    labels = draw.labels(B) if draw.chance(0.5) else None
    banked, rest = bank_of(draw, B, P, D, wide) if draw.chance(0.5) else ({}, {})
    if banked and (labels is None) != ("negatives_labels" not in rest):
        labels = None if "negatives_labels" not in rest else draw.labels(B)
    if labels is not None and draw.chance(0.2):  # a sample without a label is unlike all others
        labels = torch.where(draw.uniform(B) < 0.5, labels.double(), torch.nan)
    elif labels is not None and draw.chance(0.5):  # float32 would round them
        labels = labels + 2**24
        if "negatives_labels" in rest:
            rest["negatives_labels"] = (rest["negatives_labels"] + 2**24).float()
    given = {"teacher": draw.features(B, P, D, scales=wide)} | banked
    student = draw.features(B, P, D, scales=wide)
    flat = {n: x.double() for n, x in given.items()}
    bank = flat.get("negatives")
    _, compared = cos_nce(student.double(), flat["teacher"], bank, labels, mask, **rest)
    weights, factors = draw.weights(compared)
    loss = draw.function("cos_nce_loss")

    def oracle(student: Tensor, teacher: Tensor, negatives: Tensor | None = None) -> Tensor:
        losses, _ = cos_nce(student, teacher, negatives, labels, mask, **rest)
        return reduced(losses * factors, compared, reduction)

    def call(student: Tensor, teacher: Tensor, mask, negatives: Tensor | None = None) -> Tensor:
        if "negatives_mask" in rest and draw.backend != "reference":
            negatives = negatives.masked_fill(~rest["negatives_mask"][..., None], torch.nan)
        options = {"mask": mask, "weights": weights, "reduction": reduction, **rest}
        return loss(student, teacher, labels=labels, negatives=negatives, **options)

    return Case(
        call,
        oracle,
        {"student": student},
        given,
        {"mask": draw.mask_argument(mask)},
        scale=2.0 * factors.abs().max().item() if factors.numel() else 2.0,
        mask=mask,
        masked=("student", "teacher"),
        slope=by_norm,
        of_rows=True,
    )


def slope_through(rows: Tensor, weight: Tensor) -> float:
    """`by_norm` of rows that ``weight`` projects, which may be short of long ones."""
    return (by_norm(rows @ weight.mT).norm() * torch.linalg.matrix_norm(weight, 2)).item()


def random_cos_nce_module(draw: Draw) -> Case:
    """A layer or lists of layers, pooled or with their negatives."""
    B, N, D_s, D_t = draw.sizes(BATCH, LENGTH, WIDTH, WIDTH)
    layers = range(draw.pick([1, 1, 2, 3]))
    pool, reduction = draw.pick(["tokens", "tokens", "cls", "mean"]), draw.pick(["mean", "sum"])
    module = draw.module(
        functools.partial(fastkd.CosNCELoss, D_s, D_t), pool=pool, reduction=reduction
    )
    if draw.dtype == torch.float64:
        module.double()
    mask, labels = draw.mask(B, N), draw.labels(B) if draw.chance(0.5) else None
    real = mask if pool == "tokens" else mask.any(1, keepdim=True)
    count = max(int(real.sum()), 1) if reduction == "sum" else 1
    banked = pool == "tokens" and labels is None and draw.chance(0.5)
    students = {f"s{i}": draw.features(B, N, D_s) for i in layers}
    teachers = {f"t{i}": draw.features(B, N, D_t) for i in layers}
    banks = {f"n{i}": draw.features(4, N, D_t) for i in layers if banked}

    def compared(x: Tensor) -> Tensor:
        return x if pool == "tokens" else oracles.pooled(x, mask, pool)[:, None]

    def call(mask: Tensor | None, **x: Tensor) -> Tensor:
        sides = [tuple(x[name] for name in names) for names in (students, teachers, banks)]
        if len(layers) == 1:  # without a list
            sides = [side[0] if side else None for side in sides]
        negatives = sides[2] if banked else None
        return module(*sides[:2], mask, labels=labels, negatives=negatives)

    def oracle(**x: Tensor) -> Tensor:
        losses = []
        for i in layers:
            projected, bank = compared(x[f"s{i}"]) @ x["W.weight"].mT, x.get(f"n{i}")
            found = cos_nce(projected, compared(x[f"t{i}"]), bank, labels, real)
            losses.append(reduced(*found, reduction))
        return torch.stack(losses).mean()

    def slopes(**x: Tensor) -> dict[str, float]:
        rows, weight = {name: compared(x[name]) for name in students}, x["W.weight"]
        size, _ = projected_slopes(torch.cat([y[real] for y in rows.values()]), weight)
        return {n: slope_through(y, weight) for n, y in rows.items()} | {"W.weight": size * count}

    return Case(
        call,
        oracle,
        students,
        teachers | banks,
        {"mask": draw.mask_argument(mask)},
        module=module,
        mask=mask,
        masked=(*students, *teachers),
        autocast=draw.chance(0.5),
        scale=float(count),
        parameter_slopes=slopes,
    )


RANDOM = {
    "cos_nce": random_cos_nce,
    "cos_nce_module": random_cos_nce_module,
}


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


def examples(backend: str) -> Iterator[tuple]:
    loss = function_of("cos_nce_loss", backend)
    pair = torch.tensor([[1.0, 0.0], [3.0, 4.0]]), torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    # Sample 0: g(n, z) = 1, g(t, z) = 0, so (2 - 1)/2 + 0. Sample 1: g(n, z) = 0.4,
    # g(t, z) = 0.2, so (2 - 0.2)/2 + 0.2.
    yield "none", loss(*pair, reduction="none"), [0.5, 1.1]
    yield "mean", loss(*pair), 0.8
    yield "sum", loss(*pair, reduction="sum"), 1.6


def edges(backend: str) -> Iterator[tuple]:
    loss = function_of("cos_nce_loss", backend)
    x, y = torch.randn(2, 4, 3, 6)
    constant = torch.full((4, 3, 8), 0.1)
    yield "constant", lambda s: loss(s, constant), constant, 1.0, 0.0, 1e-5  # 2 + 1/2 - 3/2
    # The cosine of a vector without entries is 0, as that of a zero vector.
    yield "zeros", lambda s: loss(s, y), 0 * x, 2.0, 0.0
    yield "zero teacher", lambda s: loss(s, 0 * y), x, 2.0, 0.0
    yield "no features", lambda s: loss(s, y[..., :0]), x[..., :0], 2.0, 0.0
    pooled = functools.partial(fastkd.CosNCELoss(6, 6, "cls"), teacher=y[:, :0])
    yield "no tokens", pooled, x[:, :0], 0.0, 0.0
    if backend != "reference":  # more layers than a launch takes
        nine = fastkd.CosNCELoss(6, 6, backend=backend)
        yield "nine layers", lambda s: nine([s] * 9, [y] * 9), x, nine(x, y).detach(), None
    with torch.inference_mode():
        bank = torch.randn(5, 3, 6)
    yield "a bank of inference mode", lambda s: loss(s, y, negatives=bank), x, None, None
    lost = torch.full((4, 3), torch.nan)
    for name, options in (
        ("one sample", {}),
        ("one label", {"labels": torch.full((4,), 2)}),
        ("an empty bank", {"negatives": torch.empty(0, 3, 6)}),
        ("an empty bank of each", {"negatives": torch.empty(4, 0, 3, 6)}),
    ):
        rows = x[:1] if name == "one sample" else x
        call = functools.partial(loss, teacher=y[: len(rows)], weights=lost[: len(rows)], **options)
        yield f"no negatives: {name}", call, rows, 0.0, 0.0, 0.0
    # One sample of another label: its sum must not be a difference of two large ones.
    many, labels = torch.randn(65, 1, 16) + 1, torch.zeros(65).long()
    labels[40] = 1
    each = (2 - (1 - torch.cosine_similarity(many[40, 0], many[:, 0], dim=-1))) / 2
    others = torch.where(labels == 0, each, loss(many, many, labels=labels, reduction="none")[:, 0])
    call = functools.partial(loss, teacher=many, labels=labels, reduction="none")
    yield "few negatives", call, many, others[:, None], None


def growing() -> dict[str, tuple]:
    def loss(student, teacher, labels, negatives, bank_labels):
        return fastkd.cos_nce_loss(
            student, teacher, labels=labels, negatives=negatives, negatives_labels=bank_labels,
            reduction="none", backend="torch",
        )  # fmt: skip

    def calls() -> Iterator[tuple]:
        for n in (4, 5, 9):
            student, bank = torch.randn(n, 8, requires_grad=True), torch.randn(2 * n, 8)
            yield student, torch.randn(n, 8), torch.arange(n), bank, torch.arange(2 * n)

    return {"labelled bank": (loss, calls())}


def bad() -> Iterator[tuple[str, Callable]]:
    right = {"student": torch.randn(4, 3, 8), "teacher": torch.randn(4, 3, 8)}
    bank = {"negatives": torch.randn(6, 3, 8)}
    for words, change in (
        ("student must have at least 2 dimensions", {"student": torch.randn(8)}),
        (r"labels must have shape \(4,\)", {"labels": torch.zeros(5)}),
        (r"negatives must have shape \(K, 3, 8\)", {"negatives": torch.randn(6, 2, 8)}),
        (r"or \(4, K, 3, 8\), got", {"negatives": torch.randn(5, 6, 3, 8)}),
        (r"or \(4, K, 3, 8\), got", {"negatives": torch.randn(4, 6, 2, 8)}),
        ("negatives are given; pass both or neither", bank | {"labels": torch.zeros(4)}),
        ("pass both or neither", bank | {"negatives_labels": torch.zeros(6)}),
        ("negatives_mask belongs to negatives", {"negatives_mask": torch.ones(6, 3)}),
        (
            r"negatives_mask must have shape \(6, 3\) \(the leading dimensions of negatives\)",
            bank | {"negatives_mask": torch.ones(6)},
        ),
        (
            r"negatives_labels must have shape \(6,\)",
            bank | {"labels": torch.zeros(4), "negatives_labels": torch.zeros(4, 6)},
        ),
    ):
        yield words, functools.partial(fastkd.cos_nce_loss, **right | change)
    module, x, y = fastkd.CosNCELoss(6, 8), torch.randn(2, 3, 6), torch.randn(2, 3, 8)
    yield r"student must have 6 columns \(student_dim\)", lambda: module(y, y)
    kernels = fastkd.CosNCELoss(6, 8, backend="triton")
    words = "float64 is left to|on cpu|not installed"
    yield words, lambda: kernels([x, x.double()], [y, y.double()])
    of_two = functools.partial(module, [x, x], [y, y])
    yield "negatives has 1 layers but student has 2", lambda: of_two(negatives=[y])
    yield r"student must have shape \(2, 3, 8\) \(leading", lambda: module([x, x[:1]], [y, y[:1]])
