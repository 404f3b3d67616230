"""Hidden states: `distance`, the oracle; `RANDOM` calls against it; `subjects`."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

import fastkd
from tests.support import oracles
from tests.support.draw import Case, Draw, by_norm, module_case, projected_slopes, reduced
from tests.support.subject import D_S, D_T, Subject, of_module

KINDS = ("mse", "cosine", "smooth_l1")


def distance(student: Tensor, teacher: Tensor, kind: str, beta: float) -> Tensor:
    """The loss of every position (...), one after the other."""
    rows = []
    pairs = zip(student.flatten(0, -2), teacher.flatten(0, -2), strict=True)
    for s, t in pairs:
        d = s - t
        if kind == "mse":
            rows.append((d * d).sum() / len(d))
        elif kind == "cosine":
            rows.append(1 - oracles.cosine(s, t))
        else:
            size = (d * d.detach().sign()).clone()
            near = size < beta
            size[near] = d[near] ** 2 / (2 * beta) if beta else 0.0
            size[~near] = size[~near] - beta / 2
            rows.append(size.sum() / len(d))
    losses = torch.stack(rows) if rows else student.sum(-1).flatten()
    return losses.view(student.shape[:-1])


def random_hidden_states(draw: Draw) -> Case:
    rows, D = (draw.size(zero=True), draw.size()), draw.pick([1, 3, 16, 31, 100])
    kind, reduction = draw.pick(KINDS), draw.pick(["mean", "sum", "none"])
    beta = draw.pick([0.0, 0.5, 1.0])
    mask = draw.mask(*rows)
    weights, factors = draw.weights(mask)
    wide: tuple[float, ...] = (1e-3, 30.0)
    if kind == "cosine" and draw.dtype in (torch.float32, torch.bfloat16):
        wide = (1e-18, 1e15)
    largest = factors.abs().max().item() if factors.numel() else 1.0

    def oracle(student: Tensor, teacher: Tensor) -> Tensor:
        losses = distance(student, teacher, kind, beta).masked_fill(~mask, 0)
        return reduced(losses * factors, mask, reduction)

    return Case(
        lambda student, teacher, mask: fastkd.hidden_state_loss(
            student,
            teacher,
            mask,
            kind=kind,
            beta=beta,
            weights=weights,
            reduction=reduction,
            backend=draw.backend,
        ),
        oracle,
        {"student": draw.features(*rows, D, scales=wide)},
        {"teacher": draw.features(*rows, D, scales=wide)},
        {"mask": draw.mask_argument(mask)},
        mask=mask,
        scale=largest if kind == "cosine" else 0.0,
        slope=by_norm if kind == "cosine" else None,
    )


def random_module(draw: Draw) -> Case:
    B, N, D_s, D_t = (draw.size() for _ in range(4))
    kind, mask = draw.pick(KINDS), draw.mask(B, N)
    module = fastkd.HiddenStateLoss(kind, D_s, D_t, backend=draw.backend)

    def oracle(student: Tensor, teacher: Tensor, **parameters: Tensor) -> Tensor:
        if parameters:
            student = student @ parameters["projector.weight"].mT + parameters["projector.bias"]
        losses = distance(student, teacher, kind, 1.0).masked_fill(~mask, 0)
        return reduced(losses, mask, "mean")

    def slopes(student: Tensor, **inputs: Tensor) -> dict[str, float]:
        parameters = [x for name, x in inputs.items() if name.startswith("projector.")]
        if kind != "cosine" or not parameters:
            return {}
        sizes = projected_slopes(student[mask], *parameters)
        return dict(zip(("projector.weight", "projector.bias"), sizes, strict=True))

    case = module_case(draw, module, oracle, (B, N, D_s, D_t), mask)
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
