"""FCD's relations: `relation`, the oracle.

`RANDOM` calls are held against it; `subjects` that keep every promise.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

import fastkd
from tests.support import oracles
from tests.support.draw import Case, Draw, by_norm
from tests.support.subject import Subject, of_module

# The kernels take a float32 unit row as two float16 numbers times 4096. The second is a multiple of
# 2⁻²⁴. SPACING is the rounding error of rows too short for unit length, in roundings of 1.
SPACING = 2**-24 / 4096 / torch.finfo(torch.float32).eps


def relation(
    student,
    teacher,
    mask,
    over,
    normalize,
    distance,
    temperature,
    eps,
    spacing=0.0,
    factors=None,
) -> Tensor:
    """FCD, eqs. 3-9: one relation a sample, or a token position, over its real members only.

    ``spacing``: of the entries of unit rows, in roundings of 1. ``factors`` of the samples' losses.
    """
    if over == "samples":
        student, teacher, mask = student.transpose(0, 1), teacher.transpose(0, 1), mask.mT
    losses, weights = [], []
    for i, (s, t, real) in enumerate(zip(student, teacher, mask, strict=True)):
        if int(real.sum()) < 2:
            continue
        weights.append(student.new_ones(()) if factors is None else factors[i])
        R_s, R_t = (_relation(x[real], normalize, spacing) for x in (s, t))
        if distance == "pearson":
            X, Y = R_s - R_s.mean(), R_t - R_t.mean()
            losses.append(1 - (X * Y).sum() / (oracles.norm(X) * oracles.norm(Y) + eps))
        elif distance == "mse":
            losses.append((R_s - R_t).square().mean() / 2)
        else:
            log_s, log_t = (torch.log_softmax(R.flatten() / temperature, 0) for R in (R_s, R_t))
            losses.append(temperature**2 * (log_t.exp() * (log_t - log_s)).sum())
    if not losses:
        return student.sum() * 0
    return (torch.stack(losses) * torch.stack(weights)).mean()


def _relation(x: Tensor, normalize: str, spacing: float) -> Tensor:
    if normalize == "l2":
        x = x / oracles.norm(x, dim=-1, keepdim=True).clamp_min(1e-12)
        x = oracles.rounded(x, len(x), 1)
        x = x + spacing * (oracles.rounded(torch.ones_like(x), *x.shape) - 1)
    elif normalize == "layer_norm":
        centred = x - x.mean(-1, keepdim=True)
        x = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    elif normalize == "softmax":
        x = oracles.rounded(x.softmax(-1), *x.shape)
    return x @ x.mT


def random_relation(draw: Draw) -> Case:
    B, N, D_s, D_t = (draw.size(zero=True) for _ in range(4))
    kernels, unit = draw.backend == "triton", draw.backend != "torch"
    options = {
        "over": draw.pick(["tokens", "samples"]),
        "normalize": "l2" if unit else draw.pick(["l2", "layer_norm", "softmax", "none"]),
        "distance": "pearson" if unit else draw.pick(["pearson", "mse", "kl"]),
        "temperature": draw.pick([1.0, 10.0]),
        "eps": draw.pick([1e-8, 1e-4]),
    }
    rows: tuple[int, ...] = (B, N)
    if options["over"] == "samples" and draw.chance(0.2):  # embeddings (B, D)
        rows, N = (B,), 1
    mask = draw.mask(*rows)
    weights, factors = None, None
    if options["over"] == "tokens":
        weights, factors = draw.weights(mask.sum(1) >= 2)
    wide = {"l2": (1e-18, 1e15, 1e30), "layer_norm": (0.1, 1e30)}.get(options["normalize"], (0.1,))
    if draw.dtype == torch.float16:
        wide = (0.1,)
    student, teacher = (draw.features(*rows, D, scales=wide) for D in (D_s, D_t))
    size = 1.0
    if options["normalize"] == "none" and student.numel() and teacher.numel():
        size = max(x.double().square().sum(-1).max().item() for x in (student, teacher))
    return Case(
        lambda student, teacher, mask: fastkd.relation_loss(
            student, teacher, mask, weights=weights, backend=draw.backend, **options
        ),
        lambda student, teacher: relation(
            student.reshape(B, N, D_s),
            teacher.reshape(B, N, D_t),
            mask.reshape(B, N),
            **options,
            spacing=SPACING if kernels else 0.0,
            factors=factors,
        ),
        {"student": student},
        {"teacher": teacher},
        {"mask": draw.mask_argument(mask)},
        scale={"mse": size**2, "kl": size * options["temperature"]}.get(options["distance"], 1.0),
        mask=mask,
        slope={"softmax": lambda x: x.new_ones(x.shape[:-1]), "none": None}.get(
            options["normalize"], by_norm
        ),
        products=draw.dtype if kernels and draw.dtype != torch.float32 else None,
    )


def random_fcd(draw: Draw) -> Case:
    B, N, layers = draw.size(), draw.size(), draw.pick([1, 2, 3])
    sizes = [(draw.size(), draw.size()) for _ in range(layers)]
    module = fastkd.FCDLoss(draw.pick([0.0, 1.0]), draw.pick([0.5, 1.0]), backend=draw.backend)
    mask = draw.mask(B, N)
    students = {f"s{i}": draw.features(B, N, s) for i, (s, _) in enumerate(sizes)}
    teachers = {f"t{i}": draw.features(B, N, t) for i, (_, t) in enumerate(sizes)}

    def oracle(**x: Tensor) -> Tensor:
        terms = [
            weight * relation(x[s], x[t], mask, over, "l2", "pearson", 10.0, 1e-8)
            for s, t in zip(students, teachers, strict=True)
            for weight, over in ((module.alpha, "tokens"), (module.beta, "samples"))
        ]
        return torch.stack(terms).sum() / layers

    return Case(
        lambda mask, **x: module([x[n] for n in students], [x[n] for n in teachers], mask),
        oracle,
        students,
        teachers,
        {"mask": draw.mask_argument(mask)},
        mask=mask,
        slope=by_norm,
        products=draw.dtype if draw.backend == "triton" and draw.dtype != torch.float32 else None,
    )


RANDOM = {"relation": random_relation, "fcd": random_fcd}


def subjects(backend: str) -> Iterator[Subject]:
    for over in ("tokens", "samples"):
        yield Subject(
            f"relation_loss over {over}",
            lambda s, t, m, over=over: fastkd.relation_loss(s, t, m, over=over, backend=backend),
        )
    yield of_module("FCDLoss", fastkd.FCDLoss(backend=backend))
