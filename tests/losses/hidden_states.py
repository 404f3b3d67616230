"""Hidden states: `distance`, the oracle, and the tables of `tests/losses/__init__.py`."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

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
    module_case,
    projected_slopes,
    reduced,
)
from tests.support.subject import D_S, D_T, Subject, function_of, of_module

KINDS = ("mse", "cosine", "smooth_l1")


def distance(student: Tensor, teacher: Tensor, kind: str, beta: float) -> Tensor:
    """The loss of every position (...)."""
    if kind == "cosine":
        return 1 - oracles.cosine(student, teacher)
    d = student - teacher
    if kind == "mse":
        return (d * d).mean(-1)
    size = d * d.detach().sign()
    if beta:
        size = torch.where(size.detach() < beta, d * d / (2 * beta), size - beta / 2)
    return size.mean(-1)


def random_hidden_states(draw: Draw) -> Case:
    *rows, D = draw.sizes(BATCH, LENGTH, WIDTH, most=2**17)
    D = draw.pick([*[D] * 6, *[100] * 3, 1030])
    rows = draw.pick([rows, rows, [0, rows[1]], rows[1:]])
    kind, reduction = draw.pick(KINDS), draw.pick(["mean", "sum", "none"])
    beta = draw.pick([0.0, 0.3, 0.5, 1.0, 2.0])
    mask = draw.mask(*rows)
    weights, factors = draw.weights(mask)
    wide: tuple[float, ...] = (1e-3, 30.0)
    if kind == "cosine" and draw.dtype in (torch.float32, torch.bfloat16):
        wide = (1e-18, 1e15, 1.0)
    largest = factors.abs().max().item() if factors.numel() else 1.0
    loss = draw.function("hidden_state_loss")
    student, teacher = (draw.features(*rows, D, scales=wide) for _ in range(2))

    def oracle(student: Tensor, teacher: Tensor) -> Tensor:
        losses = distance(student, teacher, kind, beta).masked_fill(~mask, 0)
        return reduced(losses * factors, mask, reduction)

    return Case(
        lambda student, teacher, mask: loss(
            student, teacher, mask, kind=kind, beta=beta, weights=weights, reduction=reduction
        ),
        oracle,
        {"student": student},
        {"teacher": teacher},
        {"mask": draw.mask_argument(mask)},
        mask=mask,
        scale=largest if kind == "cosine" else 0.0,
        slope=by_norm if kind == "cosine" else None,
        of_rows=True,
    )


def random_module(draw: Draw) -> Case:
    B, N, D_s, D_t = draw.sizes(BATCH, LENGTH, WIDTH, WIDTH, most=2**16)
    kind, mask = draw.pick(KINDS), draw.mask(B, N)
    beta, reduction = draw.pick([0.0, 0.3, 1.0]), draw.pick(["mean", "sum"])
    module = draw.module(
        functools.partial(fastkd.HiddenStateLoss, student_dim=D_s, teacher_dim=D_t),
        kind=kind, beta=beta, reduction=reduction,
    )  # fmt: skip
    weights, factors = draw.weights(mask)

    def oracle(student: Tensor, teacher: Tensor, **parameters: Tensor) -> Tensor:
        if parameters:
            student = student @ parameters["projector.weight"].mT + parameters["projector.bias"]
        losses = distance(student, teacher, kind, beta).masked_fill(~mask, 0)
        return reduced(losses * factors, mask, reduction)

    largest = max(float(factors.abs().sum()), 1.0)
    terms = largest if reduction == "sum" else largest / max(int(mask.sum()), 1)

    def slopes(student: Tensor, teacher: Tensor, **parameters: Tensor) -> dict[str, float]:
        """Sizes of the rows' terms, which weights of both signs cancel."""
        names, x = ("projector.weight", "projector.bias"), student[mask]
        if not parameters:
            return {}
        if kind == "cosine":
            return dict(zip(names, projected_slopes(x, *parameters.values()), strict=True))
        weight, bias = (parameters[name].detach() for name in names)
        out = (x @ weight.mT + bias).requires_grad_()
        (grad,) = torch.autograd.grad(distance(out, teacher[mask], kind, beta).sum(), out)
        sizes = grad.norm(dim=-1) * factors[mask].abs() / (1 if reduction == "sum" else len(x) or 1)
        of_weight = float((sizes * x.norm(dim=-1)).sum())
        return {"projector.weight": of_weight, "projector.bias": float(sizes.sum())}

    scale = terms if kind == "cosine" else 1.0
    case = module_case(
        draw, module, oracle, (B, N, D_s, D_t), mask, scale=max(scale, 1.0), weights=weights
    )
    return dataclasses.replace(case, parameter_slopes=slopes)


RANDOM = {"hidden_states": random_hidden_states, "hidden_states_module": random_module}


def subjects(backend: str) -> Iterator[Subject]:
    for kind in KINDS:
        yield Subject(
            f"hidden_state_loss {kind}",
            lambda s, t, m, kind=kind: fastkd.hidden_state_loss(
                s, t, m, kind=kind, backend=backend
            ),
            same_size=True,
        )
    yield of_module("HiddenStateLoss", fastkd.HiddenStateLoss("mse", D_S, D_T, backend=backend))


def examples(backend: str) -> Iterator[tuple]:
    loss = function_of("hidden_state_loss", backend)
    pair = torch.tensor([[3.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 0.0], [2.0, 2.0]])
    yield "mse", loss(*pair), (4.5 + 1) / 2
    yield "smooth L1", loss(*pair, kind="smooth_l1"), (1.25 + 0.5) / 2
    yield "L1", loss(*pair, kind="smooth_l1", beta=0.0), (1.5 + 1) / 2
    # A zero vector has no direction: its cosine is 0.
    yield "cosine", loss(*pair, kind="cosine"), 0.5
    yield "mask", loss(*pair, torch.tensor([0, 1])), 1.0
    yield "weights", loss(*pair, weights=torch.tensor([0.0, -2.0])), -1.0


def edges(backend: str) -> Iterator[tuple]:
    loss = function_of("hidden_state_loss", backend)
    x = torch.randn(3, 5, 100)
    for kind in KINDS:
        call = functools.partial(loss, kind=kind)
        yield f"{kind} of itself", lambda s, c=call: c(s, x), x, 0.0, 0.0, 1e-7
    cosine = functools.partial(loss, kind="cosine")
    yield "cosine of twice itself", lambda s: cosine(s, 2 * x), x, 0.0, 0.0, 1e-7
    yield "cosine of zeros", lambda s: cosine(s, x), 0 * x, 1.0, 0.0
    yield "cosine with zeros", lambda s: cosine(s, 0 * x), x, 1.0, 0.0
    yield "cosine of zeros with NaN", lambda s: cosine(s, torch.nan * x), 0 * x, torch.nan, ...
    near = x + 1e-4 * torch.randn_like(x)
    exact = 1 - torch.cosine_similarity(x.double(), near.double(), dim=-1).mean()
    yield "nearly parallel", lambda s: cosine(s, near), x, exact, None, 0.01 * exact.item()
    yield "L1 at its kink", lambda s: loss(s, x, kind="smooth_l1", beta=0.0), x, 0.0, 0.0, 0.0
    # Squares that overflow a sum alone.
    large = torch.full((1, 4096), 5e17)
    yield "large squares", lambda s: loss(s, 0 * large), large, 2.5e35, 2 * 5e17 / 4096
    call = functools.partial(loss, kind="smooth_l1")
    yield "large differences", lambda s: call(s, 0 * large), large, 5e17, 1 / 4096


def bad() -> Iterator[tuple[str, Callable]]:
    none, module = torch.zeros(2, 3, 0), fastkd.HiddenStateLoss
    yield "student must have at least one feature", lambda: fastkd.hidden_state_loss(none, none)
    yield "pass both or neither", lambda: module("mse", 4)
    yield "pass both or neither", lambda: module("mse", teacher_dim=4)
    yield "student_dim=4", lambda: module("mse", 4, 6)(torch.zeros(2, 5), torch.zeros(2, 6))
