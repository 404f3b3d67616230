"""Soft targets, in the tests that go through every loss."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import fastkd
from tests.calls import ALL_TYPES, BOTH, Call, Calls, Made, given, learns, mask_of, numbers
from tests.draw import SIZES, Case, Draw
from tests.subject import D_S, D_T, Subject, of_module


def soft_targets(student, teacher, temperature, divergence) -> Tensor:
    """The divergence of each row of logits, without τ²."""
    log_s, log_t = ((x / temperature).log_softmax(-1) for x in (student, teacher))
    if divergence == "forward_kl":
        return _kl(log_t, log_s)
    if divergence == "reverse_kl":
        return _kl(log_s, log_t)
    if divergence == "js":
        m = (log_s.exp() + log_t.exp()) / 2
        log_m = torch.where(m == 0, 0, torch.where(m == 0, 1, m).log())
        return (_kl(log_t, log_m) + _kl(log_s, log_m)) / 2
    weights = [
        _head_weight(s.exp(), t.exp())
        for s, t in zip(log_s.detach().flatten(0, -2), log_t.flatten(0, -2), strict=True)
    ]
    w = torch.tensor(weights, dtype=student.dtype).reshape(student.shape[:-1])
    forward, reverse = _kl(log_t, log_s), _kl(log_s, log_t)
    return w * forward + (1 - w) * reverse


def _head_weight(p_s: Tensor, p_t: Tensor) -> float:
    """g_head / (g_head + g_tail); the head is the most probable entries up to a mass of ½."""
    head, mass = 0.0, 0.0
    gap = (p_t - p_s).abs()
    for place, i in enumerate(p_t.argsort(descending=True, stable=True).tolist()):
        mass += p_t[i].item()
        if place > 0 and mass > 0.5:
            break
        head += gap[i].item()
    return head / gap.sum().item() if gap.sum() > 0 else 0.5


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    p = log_p.exp()
    nothing = p == 0
    return (p * (log_p - log_q).masked_fill(nothing, 0)).sum(-1)


def random_soft_targets(draw: Draw) -> Case:
    shape, V = (draw.size(zero=True),), draw.pick([*SIZES, 1030])
    options = {
        "temperature": draw.pick([1.0, 2.5]),
        "divergence": draw.pick(["forward_kl", "reverse_kl", "adaptive_kl", "js"]),
    }
    reduction, t2 = draw.pick(["batchmean", "sum", "none"]), draw.chance(0.5)
    denominator = None
    if reduction == "batchmean" and draw.chance(0.5):
        denominator = draw.pick([3, 2.5, torch.tensor(3.0), torch.tensor(7, dtype=torch.float64)])
    mask = draw.mask(*shape)
    student, teacher = (draw.features(*shape, V, scales=(0.01, 100.0)) for _ in range(2))
    if draw.chance(0.2) and V > 2:  # entries that no distribution can take, or that one can't
        for side in (student, teacher) if draw.chance(0.7) else (draw.pick([student, teacher]),):
            side[..., 0] = -torch.inf
    factor = options["temperature"] ** 2 if t2 else 1.0

    def oracle(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        rows = soft_targets(student_logits, teacher_logits, **options) * factor
        rows = torch.where(mask, rows, 0)
        if reduction == "none":
            return rows
        count = mask.sum().clamp_min(1) if denominator is None else denominator
        return rows.sum() / (count if reduction == "batchmean" else 1)

    common = {**options, "reduction": reduction, "scale_by_t2": t2, "backend": draw.backend}
    call = functools.partial(fastkd.soft_target_loss, **common, denominator=denominator)
    if draw.chance(0.5):
        call = functools.partial(fastkd.SoftTargetLoss(**common), denominator=denominator)
    finite = torch.cat([x[x.isfinite()].flatten() for x in (student, teacher)])
    return Case(
        call,
        oracle,
        {"student_logits": student},
        {"teacher_logits": teacher},
        {"mask": draw.mask_argument(mask)},
        scale=factor * (1 + finite.double().abs().max().item()) if finite.numel() else 1.0,
        mask=mask,
    )


def random_linear_soft_targets(draw: Draw) -> Case:
    R, V, D_s, D_t = draw.size(), draw.pick([2, 17, 64]), draw.size(), draw.size()
    if draw.dtype in (torch.float16, torch.bfloat16):
        draw.dtype = torch.float32  # the logits themselves are rounded in half types
    divergence, mask = draw.pick(["forward_kl", "reverse_kl", "js"]), draw.mask(R)

    def oracle(h_s: Tensor, w_s: Tensor, h_t: Tensor, w_t: Tensor) -> Tensor:
        rows = soft_targets(h_s @ w_s.mT, h_t @ w_t.mT, 2.0, divergence)
        return torch.where(mask, rows, 0).sum() / mask.sum().clamp_min(1)

    student = {"h_s": (R, D_s, 3.0), "w_s": (V, D_s, 2.0)}
    teacher = {"h_t": (R, D_t, 3.0), "w_t": (V, D_t, 2.0)}
    learning, given = (
        {n: draw.features(rows, D, scales=(scale,)) for n, (rows, D, scale) in side.items()}
        for side in (student, teacher)
    )
    heads = max(x.norm() for x in (*learning.values(), *given.values()))
    return Case(
        lambda h_s, w_s, h_t, w_t, mask: fastkd.linear_soft_target_loss(
            h_s,
            w_s,
            h_t,
            w_t,
            temperature=2.0,
            divergence=divergence,
            scale_by_t2=False,
            mask=mask,
            backend=draw.backend,
        ),
        oracle,
        learning,
        given,
        {"mask": draw.mask_argument(mask)},
        scale=10.0,
        mask=mask,
        masked=("h_s", "h_t"),
        slope=lambda x: x.new_full(x.shape[:-1], float(heads)),
    )


def calls() -> Calls:
    divergences = ("forward_kl", "reverse_kl", "adaptive_kl", "js")
    kinds = (torch.int8, torch.int64, *ALL_TYPES)
    denominators = [7, 2.5, *(numbers(dtype=kind) for kind in kinds)]
    reductions = ("batchmean", "sum", "none")
    choices: list[tuple[str, Any]] = [(reduction, None) for reduction in reductions]
    choices += [("batchmean", number) for number in denominators]
    for divergence, dtype, masked, V, (reduction, number) in itertools.product(
        divergences, ALL_TYPES, BOTH, (1, 50, 1024, 1025, 1040, 30522, 152_064), choices
    ):
        if number is not None and V not in (1024, 1025):
            continue
        options = {"divergence": divergence, "reduction": reduction}
        extras = mask_of(2, 3, masked=masked) | {"denominator": number}
        yield Call(
            fastkd.soft_target_loss,
            {
                "student_logits": learns(2, 3, V, dtype=dtype),
                "teacher_logits": given(2, 3, V, dtype=dtype),
                **extras,
            },
            options,
        )
        if isinstance(number, Made):
            continue
        yield Call(
            fastkd.linear_soft_target_loss,
            {
                "student_hidden": learns(2, 3, 48, dtype=dtype),
                "student_weight": learns(V, 48, dtype=dtype),
                "teacher_hidden": given(2, 3, 64, dtype=dtype),
                "teacher_weight": given(V, 64, dtype=dtype),
                **extras,
            },
            options,
        )
    for divergence, reduction, backend in itertools.product(
        divergences, ("batchmean", "sum", "none"), ("auto", "torch", "triton")
    ):
        options = {"divergence": divergence, "reduction": reduction, "backend": backend}
        for of in (fastkd.SoftTargetLoss, fastkd.soft_target_loss):
            yield Call(
                of, {"student_logits": learns(6, 50), "teacher_logits": given(6, 50)}, options
            )
        yield Call(
            fastkd.linear_soft_target_loss,
            {
                "student_hidden": given(3, 8),
                "student_weight": given(50, 8),
                "teacher_hidden": given(3, 8),
                "teacher_weight": given(50, 8),
            },
            options,
        )
    yield Call(
        fastkd.SoftTargetLoss,
        {
            "student_logits": learns(6, 50),
            "teacher_logits": given(6, 50),
            "mask": numbers(6),
            "denominator": numbers(),
        },
        {},
    )
    for divergence in ("forward_kl", "adaptive_kl"):
        yield Call(
            fastkd.soft_target_loss,
            {"student_logits": learns(2**15, 152_064), "teacher_logits": given(2**15, 152_064)},
            {"divergence": divergence},
        )


RANDOM = {"soft_targets": random_soft_targets, "linear_soft_targets": random_linear_soft_targets}


def subjects(backend: str) -> Iterator[Subject]:
    for divergence in ("forward_kl", "reverse_kl", "adaptive_kl", "js"):
        yield Subject(
            f"soft_target_loss {divergence}",
            lambda s, t, m, d=divergence: fastkd.soft_target_loss(
                s, t, mask=m, divergence=d, backend=backend
            ),
            same_size=True,
        )
    yield of_module("SoftTargetLoss", fastkd.SoftTargetLoss(backend=backend), same_size=True)
    heads = torch.randn(20, D_S), torch.randn(20, D_T)
    yield Subject(
        "linear_soft_target_loss",
        lambda s, t, m: fastkd.linear_soft_target_loss(
            s, heads[0].to(s), t, heads[1].to(t), mask=m, backend=backend
        ),
    )
