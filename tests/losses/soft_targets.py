"""Soft targets, in the tests that go through every loss."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

import fastkd
from fastkd.soft_targets import DIVERGENCES, REDUCTIONS
from tests.draw import SIZES, Case, Draw
from tests.subject import D_S, D_T, Subject, of_module


def soft_targets(student, teacher, temperature, divergence, working=torch.float64) -> Tensor:
    """The divergence of each row of logits, without τ².

    A probability that ``working`` can't hold is 0, and weighs nothing even against an infinity.
    """
    log_s, log_t, log_m = _log_probabilities(student, teacher, temperature)
    p_s, p_t = (_held(x / temperature, working) for x in (student, teacher))
    if divergence == "js":
        return (_kl(p_t, log_t, log_m) + _kl(p_s, log_s, log_m)) / 2
    forward, reverse = _kl(p_t, log_t, log_s), _kl(p_s, log_s, log_t)
    if divergence == "forward_kl":
        return forward
    if divergence == "reverse_kl":
        return reverse
    weights = [
        _head_weight(s, t)
        for s, t in zip(p_s.detach().flatten(0, -2), p_t.flatten(0, -2), strict=True)
    ]
    w = torch.tensor(weights, dtype=student.dtype).reshape(student.shape[:-1])
    return torch.where(w == 0, 0, w * forward) + torch.where(w == 1, 0, (1 - w) * reverse)


def _log_probabilities(student: Tensor, teacher: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Of the student, of the teacher and of their mean."""
    log_s, log_t = ((x / temperature).log_softmax(-1) for x in (student, teacher))
    m = (log_s.exp() + log_t.exp()) / 2
    return log_s, log_t, torch.where(m == 0, 0, torch.where(m == 0, 1, m).log())


def _held(z: Tensor, working: torch.dtype) -> Tensor:
    """The distribution of logits without what ``working`` rounds to 0."""
    return z.masked_fill(z.softmax(-1).to(working) == 0, -torch.inf).softmax(-1)


def nearly_held(student: Tensor, teacher: Tensor, temperature: float, working) -> Tensor:
    """Rows with a probability that ``working`` holds with few digits or none, against an infinity.

    In exact numbers the divergence is infinite, and in those that round the probability to 0 it is
    not; the kernels round it a part at a time.
    """
    unsure = torch.zeros(student.shape[:-1], dtype=torch.bool)
    for x, other in ((student, teacher), (teacher, student)):
        p = (x.double() / temperature).softmax(-1)
        small = (p > 0) & (p < torch.finfo(working).tiny)
        unsure |= (small & (other == -torch.inf)).any(-1)
    return unsure


def gradient_terms(student, teacher, temperature, divergence) -> Tensor:
    """How large what a row's gradient is the difference of is, without τ².

    A student that is sure of a word has a gradient p (log p/q − KL) of nearly 0 there, but a
    rounding of the two logarithms makes one of their size.
    """
    log_s, log_t, log_m = _log_probabilities(student, teacher, temperature)
    p_s, p_t = log_s.exp(), log_t.exp()
    ratio = (log_s - (log_m if divergence == "js" else log_t)).nan_to_num(0, 0, 0)
    weighed, plain = (p_s * ratio).abs().sum(-1), p_s.norm(dim=-1) + p_t.norm(dim=-1)
    terms = {"forward_kl": plain, "adaptive_kl": plain + 2 * weighed}
    return terms.get(divergence, 2 * weighed) / temperature


def _head_weight(p_s: Tensor, p_t: Tensor) -> float:
    """g_head / (g_head + g_tail); the head is the most probable entries up to a mass of ½."""
    head, mass = 0.0, 0.0
    gap = (p_t - p_s).abs()
    for place, i in enumerate(p_t.argsort(descending=True, stable=True).tolist()):
        mass += p_t[i].item()
        if place > 0 and mass > 0.5 + 1e-12:  # half of equal words is half, but for rounding
            break
        head += gap[i].item()
    return head / gap.sum().item() if gap.sum() > 0 else 0.5


def _kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    return (p * (log_p - log_q).masked_fill(p == 0, 0)).sum(-1)


def random_soft_targets(draw: Draw) -> Case:
    shape, V = (draw.size(zero=True),), draw.pick([*SIZES, 1030])
    options = {
        "temperature": draw.pick([1.0, 2.5, 100.0]),
        "divergence": draw.pick(DIVERGENCES),
    }
    reduction, t2 = draw.pick(REDUCTIONS), draw.chance(0.5)
    denominator = None
    if reduction == "batchmean" and draw.chance(0.5):
        denominator = draw.pick([3, 2.5, torch.tensor(3.0), torch.tensor(7, dtype=torch.float64)])
    mask = draw.mask(*shape)
    student, teacher = (draw.features(*shape, V, scales=(0.01, 100.0)) for _ in range(2))
    if draw.chance(0.2) and V > 2:  # entries that no distribution can take, or that one can't
        for side in (student, teacher) if draw.chance(0.7) else (draw.pick([student, teacher]),):
            side[..., 0] = -torch.inf
    factor = options["temperature"] ** 2 if t2 else 1.0
    working = torch.float64 if draw.dtype == torch.float64 else torch.float32
    count = 1
    if reduction == "batchmean":
        count = mask.sum().clamp_min(1) if denominator is None else denominator

    def oracle(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        sides = (torch.where(mask[..., None], z, 0) for z in (student_logits, teacher_logits))
        rows = soft_targets(*sides, **options, working=working) * factor
        rows = torch.where(mask, rows, 0)
        return rows if reduction == "none" else rows.sum() / count

    common = {**options, "reduction": reduction, "scale_by_t2": t2, "backend": draw.backend}
    call = functools.partial(fastkd.soft_target_loss, **common, denominator=denominator)
    if draw.chance(0.5):
        call = functools.partial(fastkd.SoftTargetLoss(**common), denominator=denominator)
    finite = torch.cat([x[x.isfinite()].flatten() for x in (student, teacher)])
    largest = 1 + finite.double().abs().max().item() if finite.numel() else 1.0
    return Case(
        call,
        oracle,
        {"student_logits": student},
        {"teacher_logits": teacher},
        {"mask": draw.mask_argument(mask)},
        scale=factor * largest,
        mask=mask,
        slope=lambda x: gradient_terms(x, teacher.double(), **options) * mask / (largest * count),
        unsure=nearly_held(student, teacher, options["temperature"], working) & mask,
    )


def random_linear_soft_targets(draw: Draw) -> Case:
    R, V, D_s, D_t = draw.size(), draw.pick([2, 17, 64]), draw.size(), draw.size()
    if draw.dtype in (torch.float16, torch.bfloat16):
        draw.dtype = torch.float32  # the logits themselves are rounded in half types
    divergence, mask = draw.pick(["forward_kl", "reverse_kl", "js"]), draw.mask(R)

    def oracle(student_hidden, student_head, teacher_hidden, teacher_head) -> Tensor:
        student, teacher = student_hidden @ student_head.mT, teacher_hidden @ teacher_head.mT
        rows = soft_targets(student, teacher, 2.0, divergence)
        return torch.where(mask, rows, 0).sum() / mask.sum().clamp_min(1)

    learning, given = (
        {
            f"{side}_hidden": draw.features(R, D, scales=(3.0,)),
            f"{side}_weight": draw.features(V, D, scales=(2.0,)),
        }
        for side, D in (("student", D_s), ("teacher", D_t))
    )
    largest = max(x.norm() for x in (*learning.values(), *given.values()))
    options = {"divergence": divergence, "scale_by_t2": False, "backend": draw.backend}
    return Case(
        functools.partial(fastkd.linear_soft_target_loss, temperature=2.0, **options),
        oracle,
        learning,
        given,
        {"mask": draw.mask_argument(mask)},
        scale=10.0,
        mask=mask,
        masked=("student_hidden", "teacher_hidden"),
        slope=lambda x: x.new_full(x.shape[:-1], float(largest)),
    )


RANDOM = {"soft_targets": random_soft_targets, "linear_soft_targets": random_linear_soft_targets}


def subjects(backend: str) -> Iterator[Subject]:
    for divergence in DIVERGENCES:
        yield Subject(
            f"soft_target_loss {divergence}",
            lambda s, t, m, d=divergence: fastkd.soft_target_loss(
                s, t, mask=m, divergence=d, backend=backend
            ),
            same_size=True,
        )
    yield of_module("SoftTargetLoss", fastkd.SoftTargetLoss(backend=backend), same_size=True)
    weights = torch.randn(20, D_S), torch.randn(20, D_T)
    yield Subject(
        "linear_soft_target_loss",
        lambda s, t, m: fastkd.linear_soft_target_loss(
            s, weights[0].to(s), t, weights[1].to(t), mask=m, backend=backend
        ),
    )
