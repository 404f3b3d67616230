"""Random calls of every public function and Module against the oracles of `tests/oracles.py`.

    python -m tests.fuzz --seconds 600          # as `make fuzz`; --only knn, --seed 7 for one call

Each case is drawn from its seed alone: sizes 0, 1, primes and powers of two, all dtypes, both
backends, masks with NaN behind them, strided and repeated features, huge, tiny, constant and
nearly parallel ones, autocast. Value and every gradient are compared in float64. The last three
functions are uses of every loss: under torch.compile with changing sizes, with inputs of inference
mode and the meta device, with a gradient that overflows.

An error is allowed up to the table of `tests/compare.py`, relative to the larger of the value and
of the terms it is made of, plus ten times what rounding the inputs once would change.
"""

import argparse
import contextlib
import functools
import itertools
import os
import random
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fastkd
from tests import oracles
from tests import test_promises as promises
from tests.compare import TOLERANCE, relative_error

SIZES = (1, 2, 2, 3, 5, 7, 8, 13, 16, 17, 31)
KINDS = ("normal", "normal", "parallel", "scaled", "sparse", "few", "constant")
REGULAR = KINDS[:4]  # of full rank: elsewhere a sum of singular values has no derivative
ROUNDINGS = 10  # of the inputs, which any implementation may lose
MAGNIFIED = 16  # so that a rounding of float64 is seen in float64


@dataclass
class Case:
    """One call. Tensors of ``learning`` get gradients; ``given`` tensors and ``options`` not.

    ``oracle`` takes the same names in float64. ``scale`` is the size of the terms that the value
    is a difference of.
    """

    call: Callable[..., Tensor]
    oracle: Callable[..., Tensor]
    learning: dict[str, Tensor]
    given: dict[str, Tensor] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    module: torch.nn.Module | None = None
    mask: Tensor | None = None  # (B, N): positions whose features become NaN after the oracle
    masked: tuple[str, ...] = ()  # names of the features it belongs to
    autocast: bool = False
    # The size of d(result)/d(row) for a row of features (..., D): 1/‖x‖ where only angles count.
    slope: Callable[[Tensor], Tensor] | None = None
    # How many roundings of the inputs the result may cost.
    roundings: float = ROUNDINGS
    # The type whose numbers the kernel multiplies, where that is a half type.
    products: torch.dtype | None = None
    # Name of the argument whose dtype the result has; others come in the working dtype.
    like: str | None = None


def by_norm(x: Tensor) -> Tensor:
    norm = x.norm(dim=-1)
    return torch.where(norm == 0, 0, 1 / torch.where(norm == 0, 1, norm))


class Draw:
    """A seed's choices."""

    def __init__(self, seed: int, backend: str) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.backend = backend
        types = [torch.float32, torch.float32, torch.float16, torch.bfloat16]
        self.dtype = self.pick(types if backend == "triton" else [*types, torch.float64])

    def pick(self, choices: Any) -> Any:
        return self.random.choice(list(choices))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def size(self, zero: bool = False) -> int:
        return 0 if zero and self.chance(0.05) else self.pick(SIZES)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def features(
        self, *shape: int, scales: tuple[float, ...] = (1e-3, 30.0), kinds: tuple[str, ...] = KINDS
    ) -> Tensor:
        """(..., D) in the case's dtype, of some kind and some layout."""
        x = self.normal(*shape)
        kind = self.pick(kinds)
        if kind == "parallel":  # mean cosines of real language models, up to 0.9999
            x = x * self.pick([0.3, 0.1, 0.01]) + self.normal(shape[-1])
        elif kind == "scaled":
            x = x * self.pick(scales)
        elif kind == "sparse":
            x = torch.where(torch.rand(shape, generator=self.generator) < 0.5, x, 0)
        elif kind == "few" and x.numel():
            flat = x.reshape(-1, shape[-1])
            rows = torch.randint(min(3, len(flat)), (len(flat),), generator=self.generator)
            x = flat[rows].reshape(shape)
        elif kind == "constant":
            x = torch.ones(shape, dtype=torch.float64) * 0.5
        return self.laid_out(x.to(self.dtype))

    def laid_out(self, x: Tensor) -> Tensor:
        """The same numbers with other strides."""
        layout = self.pick(["dense", "dense", "sliced", "transposed", "offset"])
        if layout == "sliced":
            wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), float("nan"))
            wide[..., 1::2] = x
            return wide[..., 1::2]
        if layout == "transposed":
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        if layout == "offset":
            padded = x.new_full((x.numel() + 1,), float("nan"))
            padded[1:] = x.flatten()
            return padded[1:].view(x.shape)
        return x

    def mask(self, *shape: int) -> Tensor:
        kind = self.pick(["none", "random", "right", "left", "nothing"])
        if kind == "random":
            return torch.rand(shape, generator=self.generator) < 0.7
        if kind in ("right", "left"):
            lengths = torch.randint(0, shape[-1] + 1, (*shape[:-1], 1), generator=self.generator)
            places = torch.arange(shape[-1])
            return places < lengths if kind == "right" else places.flip(0) < lengths
        return torch.full(shape, kind == "none")

    def mask_argument(self, mask: Tensor) -> Tensor | None:
        """As users have it: none if all is real, bool, or the tokenizer's integers."""
        if bool(mask.all()) and self.chance(0.5):
            return None
        return mask.to(self.pick([torch.bool, torch.int64, torch.float32]))

    def labels(self, size: int) -> Tensor:
        return torch.randint(0, self.pick([1, 2, 3, 7]), (size,), generator=self.generator)


def relation(draw: Draw) -> Case:
    B, N, D_s, D_t = (draw.size(zero=True) for _ in range(4))
    kernels = draw.backend == "triton"
    options = {
        "over": draw.pick(["tokens", "samples"]),
        "normalize": "l2" if kernels else draw.pick(["l2", "layer_norm", "softmax", "none"]),
        "distance": "pearson" if kernels else draw.pick(["pearson", "mse", "kl"]),
        "temperature": draw.pick([1.0, 10.0]),
        "eps": draw.pick([1e-8, 1e-4]),
    }
    mask = draw.mask(B, N)
    wide = (1e-18, 1e15) if options["normalize"] == "l2" and draw.dtype != torch.float16 else (0.1,)
    student, teacher = draw.features(B, N, D_s, scales=wide), draw.features(B, N, D_t, scales=wide)
    size = 1.0
    if options["normalize"] == "none" and student.numel() and teacher.numel():
        size = max(x.double().square().sum(-1).max().item() for x in (student, teacher))
    return Case(
        lambda student, teacher, mask: fastkd.relation_loss(
            student, teacher, mask, backend=draw.backend, **options
        ),
        lambda student, teacher: oracles.relation(student, teacher, mask, **options),
        {"student": student},
        {"teacher": teacher},
        {"mask": draw.mask_argument(mask)},
        scale={"mse": size**2, "kl": size * options["temperature"]}.get(options["distance"], 1.0),
        mask=mask,
        masked=("student", "teacher"),
        slope={"softmax": lambda x: x.new_ones(x.shape[:-1]), "none": None}.get(
            options["normalize"], by_norm
        ),
        products=draw.dtype if kernels and draw.dtype != torch.float32 else None,
    )


def fcd(draw: Draw) -> Case:
    B, N, layers = draw.size(), draw.size(), draw.pick([1, 2, 3])
    sizes = [(draw.size(), draw.size()) for _ in range(layers)]
    module = fastkd.FCDLoss(draw.pick([0.0, 1.0]), draw.pick([0.5, 1.0]), backend=draw.backend)
    mask = draw.mask(B, N)
    students = {f"s{i}": draw.features(B, N, s) for i, (s, _) in enumerate(sizes)}
    teachers = {f"t{i}": draw.features(B, N, t) for i, (_, t) in enumerate(sizes)}

    def call(mask: Tensor | None, **x: Tensor) -> Tensor:
        return module([x[n] for n in students], [x[n] for n in teachers], mask)

    def oracle(**x: Tensor) -> Tensor:
        terms = [
            weight * oracles.relation(x[s], x[t], mask, over, "l2", "pearson", 10.0, 1e-8)
            for s, t in zip(students, teachers, strict=True)
            for weight, over in ((module.alpha, "tokens"), (module.beta, "samples"))
        ]
        return torch.stack(terms).sum() / layers

    names = (*students, *teachers)
    argument = {"mask": draw.mask_argument(mask)}
    return Case(
        call,
        oracle,
        students,
        teachers,
        argument,
        mask=mask,
        masked=names,
        slope=by_norm,
        products=draw.dtype if draw.backend == "triton" and draw.dtype != torch.float32 else None,
    )


def knn(draw: Draw) -> Case:
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
            oracles.nearest(student, teacher, labels, bank_labels, k, tolerance)
        ),
        {"student": draw.features(N, *shape, scales=wide)},
        {"teacher": draw.features(M, *shape, scales=wide)},
        scale=0.0,
    )


def knn_module(draw: Draw) -> Case:
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
        return oracles.nearest(student, teacher, labels, labels, 2, None).sum()

    return _module_case(
        draw,
        module,
        lambda student, teacher, mask: module(student, teacher, labels, mask=mask),
        oracle,
        {"student": draw.features(B, N, D_s)},
        {"teacher": draw.features(B, N, D_t)},
        mask,
        scale=0.0,
    )


def cos_nce(draw: Draw) -> Case:
    B, P, D, K = draw.size(zero=True), draw.size(), draw.size(), draw.size()
    reduction = draw.pick(["mean", "sum", "none"])
    kind = draw.pick(["batch", "labels", "shared", "each"])
    wide = (1e-18, 1e15) if draw.dtype in (torch.float32, torch.bfloat16) else (1.0,)
    mask = draw.mask(B, P)
    labels = draw.labels(B) if kind == "labels" else None
    given = {"teacher": draw.features(B, P, D, scales=wide)}
    if kind in ("shared", "each"):
        lead = (B, K) if kind == "each" else (K,)
        given["negatives"] = draw.features(*lead, P, D, scales=wide)

    def oracle(student: Tensor, teacher: Tensor, negatives: Tensor | None = None) -> Tensor:
        losses, compared = oracles.cos_nce(student, teacher, negatives, labels, mask)
        return _reduced(losses, compared, reduction)

    return Case(
        lambda student, teacher, mask, negatives=None: fastkd.cos_nce_loss(
            student,
            teacher,
            negatives=negatives,
            labels=labels,
            mask=mask,
            reduction=reduction,
            backend=draw.backend,
        ),
        oracle,
        {"student": draw.features(B, P, D, scales=wide)},
        given,
        {"mask": draw.mask_argument(mask)},
        scale=2.0,
        mask=mask,
        masked=("student", "teacher"),
        slope=by_norm,
    )


def _reduced(losses: Tensor, compared: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() / (compared.sum().clamp_min(1) if reduction == "mean" else 1)


def cos_nce_module(draw: Draw) -> Case:
    B, N, D_s, D_t = (draw.size() for _ in range(4))
    pool = draw.pick(["tokens", "cls", "mean"])
    module = fastkd.CosNCELoss(D_s, D_t, pool=pool, backend=draw.backend)
    mask = draw.mask(B, N)

    def oracle(student: Tensor, teacher: Tensor, **parameters: Tensor) -> Tensor:
        real = mask
        if pool != "tokens":
            student, teacher = (oracles.pooled(x, mask, pool)[:, None] for x in (student, teacher))
            real = mask.any(1, keepdim=True)
        student = student @ parameters["W.weight"].mT
        return _reduced(*oracles.cos_nce(student, teacher, None, None, real), "mean")

    return _module_case(
        draw,
        module,
        lambda student, teacher, mask: module(student, teacher, mask),
        oracle,
        {"student": draw.features(B, N, D_s)},
        {"teacher": draw.features(B, N, D_t)},
        mask,
    )


def cca(draw: Draw) -> Case:
    batch, m, D_s, D_t = draw.pick([1, 2]), draw.size(), draw.size(), draw.size()
    ridge = draw.pick([1e-4, 1e-2, (1e-3, 1e-1)])
    top_k, reduction = draw.pick([None, None, 2]), draw.pick(["sum", "mean", "none"])
    mask = draw.mask(batch, m)
    pair = ridge if isinstance(ridge, tuple) else (ridge, ridge)
    columns = torch.ones(D_s, dtype=torch.float64)
    if draw.chance(0.3):  # one feature a thousand times the others
        columns[0] = 1000.0
    student = (draw.features(batch, m, D_s, scales=(0.1, 5.0), kinds=REGULAR) * columns).to(
        draw.dtype
    )

    def oracle(student: Tensor, teacher: Tensor) -> Tensor:
        losses = torch.stack(
            [
                oracles.correlation(*item, pair, top_k)
                for item in zip(student, teacher, mask, strict=True)
            ]
        )
        return {"none": losses, "sum": losses.sum(), "mean": losses.mean()}[reduction]

    return Case(
        lambda student, teacher, mask: fastkd.cca_loss(
            student, teacher, mask, ridge=ridge, top_k=top_k, reduction=reduction
        ),
        oracle,
        {"student": student},
        {"teacher": draw.features(batch, m, D_t, scales=(0.1, 5.0), kinds=REGULAR)},
        {"mask": draw.mask_argument(mask)},
        slope=lambda x: by_norm(x / columns),
        mask=mask,
        masked=("student", "teacher"),
    )


def cca_module(draw: Draw) -> Case:
    B, N, layers = draw.size(), draw.size(), draw.pick([1, 2])
    sizes = [(draw.size(), draw.size()) for _ in range(layers)]
    ridge, pool = draw.pick([1e-2, (1e-3, 1e-1)]), draw.pick(["tokens", "cls", "mean"])
    module, mask = fastkd.CCALoss(ridge, pool=pool), draw.mask(B, N)
    pair = ridge if isinstance(ridge, tuple) else (ridge, ridge)
    options = {"scales": (0.1, 5.0), "kinds": REGULAR}
    students = {f"s{i}": draw.features(B, N, s, **options) for i, (s, _) in enumerate(sizes)}
    teachers = {f"t{i}": draw.features(B, N, t, **options) for i, (_, t) in enumerate(sizes)}

    def observed(x: Tensor) -> Tensor:
        return x.flatten(0, 1) if pool == "tokens" else oracles.pooled(x, mask, pool)

    def oracle(**x: Tensor) -> Tensor:
        real = mask.flatten() if pool == "tokens" else mask.any(1)
        losses = [
            oracles.correlation(observed(x[s]), observed(x[t]), real, pair, None)
            for s, t in zip(students, teachers, strict=True)
        ]
        return torch.stack(losses).mean()

    return Case(
        lambda mask, **x: module([x[n] for n in students], [x[n] for n in teachers], mask),
        oracle,
        students,
        teachers,
        {"mask": draw.mask_argument(mask)},
        slope=by_norm,
        mask=mask,
        masked=(*students, *teachers),
    )


def correlations(draw: Draw) -> str | None:
    """A measure without a gradient."""
    m, D_x, D_y = (draw.size() for _ in range(3))
    ridge, mask = draw.pick([1e-4, 1e-1, (1e-3, 1e-1)]), draw.mask(m)
    pair = ridge if isinstance(ridge, tuple) else (ridge, ridge)
    x, y = (draw.features(m, D, scales=(0.1, 5.0), kinds=REGULAR) for D in (D_x, D_y))
    found = fastkd.canonical_correlations(
        _poisoned(x, mask), _poisoned(y, mask), ridge=ridge, mask=draw.mask_argument(mask)
    )
    if found.shape != (min(m - 1, D_x, D_y),):
        return f"shape {tuple(found.shape)} of {m} observations of {D_x} and {D_y} features"
    wanted = -oracles.correlation(x.double(), y.double(), mask, pair, None)
    error = (found.double().sum() - wanted).abs().item()
    return f"the sum is {error:.3g} off" if error > 1e-5 * max(1, len(found)) else None


def roots(draw: Draw) -> Case:
    n, inverse = draw.pick([1, 2, 5, 16, 33, 63, 64, 65, 100, 129]), draw.chance(0.5)
    ridge = draw.pick([0.0, 1e-3]) if inverse else 0.0
    condition = draw.pick([1.0, 1e2, 1e4, 1e6])
    basis = torch.linalg.qr(draw.normal(n, n)).Q
    spectrum = torch.logspace(0, -torch.tensor(condition).log10(), n, dtype=torch.float64)
    a = ((basis * spectrum) @ basis.mT).to(draw.pick([torch.float32, torch.float64]))
    options = {"ridge": ridge} if inverse else {}
    return Case(
        lambda a: (fastkd.inv_sqrtm if inverse else fastkd.sqrtm)(a, **options),
        lambda a: oracles.root(a, inverse, ridge),
        {"a": draw.laid_out(a)},
        roundings=0.1 if a.dtype == torch.float32 else ROUNDINGS,  # which is computed in float64
    )


def cayley(draw: Draw) -> Case:
    n = draw.size(zero=True)
    raw = draw.normal(draw.pick([1, 2]), n, n) * draw.pick([0.01, 1.0])
    skew = draw.laid_out((raw - raw.mT).to(draw.dtype))
    return Case(fastkd.cayley, oracles.cayley, {"skew": skew}, like="skew")


def layer_norm(draw: Draw) -> Case:
    shape = (draw.size(zero=True), draw.size())
    eps, reduction = draw.pick([1e-5, 1e-12]), draw.pick(["mean", "batchmean", "sum"])
    divisor = {"mean": shape[0] * shape[1], "batchmean": shape[0], "sum": 1}[reduction]
    return Case(
        lambda x, y: fastkd.layer_norm_mse(
            x, y, eps=eps, reduction=reduction, backend=draw.backend
        ),
        lambda x, y: oracles.layer_norm_mse(x, y, eps).sum() / max(divisor, 1),
        {"x": draw.features(*shape), "y": draw.features(*shape)},
        scale=float(shape[1]) if reduction != "mean" else 1.0,
        slope=lambda x: (x.var(-1, correction=0) + eps).rsqrt(),
    )


def attention(draw: Draw) -> Case:
    B, H, N, layers = draw.size(zero=True), draw.pick([1, 2, 3]), draw.size(), draw.pick([1, 2])
    heads, reduction = draw.pick(["match", "mean"]), draw.pick(["mean", "sum", "none"])
    H_t = H if heads == "match" else draw.pick([1, 2, 5])
    options = {"heads": heads, "reduction": reduction, "backend": draw.backend}
    mask = draw.mask(B, N)
    argument = draw.mask_argument(mask)
    pair = mask[:, None, :, None] & mask[:, None, None, :]

    def side(h: int) -> Tensor:
        x = draw.features(B, h, N, N)
        # Padded rows alone are poisoned by `failure`; a padded key stands in the rows of others.
        return draw.laid_out(torch.where(pair, x, torch.tensor(float("nan"), dtype=x.dtype)))

    students = {f"s{i}": side(H) for i in range(layers)}
    teachers = {f"t{i}": side(H_t) for i in range(layers)}

    def call(**x: Tensor) -> Tensor:
        if layers == 1:
            return fastkd.attention_loss(x["s0"], x["t0"], argument, **options)
        sides = [x[n] for n in students], [x[n] for n in teachers]
        return fastkd.AttentionLoss(**options)(*sides, argument)

    def oracle(**x: Tensor) -> Tensor:
        pairs = zip(students, teachers, strict=True)
        losses = [oracles.attention(x[s], x[t], mask, heads) for s, t in pairs]
        return _reduced(torch.stack(losses).mean(0), mask.any(1), reduction)

    return Case(call, oracle, students, teachers, scale=0.0)


def projection(draw: Draw) -> Case:
    D_in, D_out = draw.size(), draw.size()
    module = fastkd.OrthogonalProjection(
        D_in, D_out, draw.pick([1, 2, 3]), draw.chance(0.7), backend=draw.backend
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * draw.normal(*parameter.shape).float()
    if draw.dtype == torch.float64:
        module.double()

    def oracle(x: Tensor, **parameters: Tensor) -> Tensor:
        if module.orthogonal:
            raw = parameters["raw"]
            factors = list(oracles.cayley((raw - raw.mT) / 2))
        else:
            factors = list(parameters.values())
        weight = functools.reduce(torch.matmul, factors)
        return x @ weight[:D_in, :D_out]

    x = draw.features(draw.size(zero=True), draw.size(), D_in)
    return Case(module, oracle, {"x": x}, module=module, like="x", slope=lambda x: x.norm(dim=-1))


def dual_projection(draw: Draw) -> Case:
    B, N, D_s, D_t = (draw.size() for _ in range(4))
    module = fastkd.DualProjectionLoss(
        D_s, D_t, gamma=0.3, orthogonal=draw.chance(0.5), backend=draw.backend
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * draw.normal(*parameter.shape).float()
    mask = draw.mask(B, N)

    def weight(side: str, parameters: dict[str, Tensor], shape: tuple[int, int]) -> Tensor:
        if module.student_projection.orthogonal:
            raw = parameters[f"{side}_projection.raw"]
            factors = list(oracles.cayley((raw - raw.mT) / 2))
        else:
            factors = [parameters[f"{side}_projection.matrices.{i}"] for i in range(2)]
        return (factors[0] @ factors[1])[: shape[0], : shape[1]]

    def oracle(student: Tensor, teacher: Tensor, **parameters: Tensor) -> Tensor:
        h_s, h_t = (oracles.pooled(x, mask, "mean") for x in (student, teacher))
        real = mask.any(1)
        h_s, h_t = h_s[real], h_t[real]
        to_t = oracles.layer_norm_mse(h_s @ weight("student", parameters, (D_s, D_t)), h_t, 1e-5)
        to_s = oracles.layer_norm_mse(h_t @ weight("teacher", parameters, (D_t, D_s)), h_s, 1e-5)
        loss = 0.3 * to_t.sum() / D_t + 0.7 * to_s.sum() / D_s
        return loss / real.sum().clamp_min(1)

    return _module_case(
        draw,
        module,
        lambda student, teacher, mask: module(student, teacher, mask),
        oracle,
        {"student": draw.features(B, N, D_s)},
        {"teacher": draw.features(B, N, D_t)},
        mask,
    )


def _module_case(
    draw: Draw,
    module: torch.nn.Module,
    call: Callable[..., Tensor],
    oracle: Callable[..., Tensor],
    learning: dict[str, Tensor],
    given: dict[str, Tensor],
    mask: Tensor,
    scale: float = 1.0,
) -> Case:
    """A Module with parameters in float32 (float64 for float64 features), often under autocast."""
    if draw.dtype == torch.float64:
        module.double()
    return Case(
        call,
        oracle,
        learning,
        given,
        {"mask": draw.mask_argument(mask)},
        module=module,
        mask=mask,
        masked=("student", "teacher"),
        autocast=draw.chance(0.5),
        scale=scale,
        slope=None if scale == 0 else by_norm,
    )


def soft_targets(draw: Draw) -> Case:
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
        rows = oracles.soft_targets(student_logits, teacher_logits, **options) * factor
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
        masked=("student_logits", "teacher_logits"),
    )


def linear_soft_targets(draw: Draw) -> Case:
    R, V, D_s, D_t = draw.size(), draw.pick([2, 17, 64]), draw.size(), draw.size()
    if draw.dtype in (torch.float16, torch.bfloat16):
        draw.dtype = torch.float32  # the logits themselves are rounded in half types
    divergence, mask = draw.pick(["forward_kl", "reverse_kl", "js"]), draw.mask(R)

    def oracle(h_s: Tensor, w_s: Tensor, h_t: Tensor, w_t: Tensor) -> Tensor:
        rows = oracles.soft_targets(h_s @ w_s.mT, h_t @ w_t.mT, 2.0, divergence)
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


def class_similarity(draw: Draw) -> Case:
    N = draw.size(zero=True)
    labels = draw.labels(N)
    return Case(
        lambda features: fastkd.intra_class_similarity(features, labels),
        lambda features: oracles.class_similarity(features, labels),
        {"features": draw.features(N, draw.size())},
        slope=by_norm,
    )


def compiled(draw: Draw) -> str | None:
    """As few graphs as `kl_div` for the same sizes, eager's numbers; a tensor may come twice."""
    subject = _subject(draw)
    call, graphs = _counted(subject)
    yardstick, fewest = _counted(lambda x, y: torch.nn.functional.kl_div(x, y, reduction="sum"))
    repeated = subject.same_size and draw.chance(0.3)
    for _ in range(4):
        # More samples and tokens than features: an algorithm may change where they cross.
        B, N = draw.random.randint(14, 40), draw.random.randint(14, 24)
        yardstick(torch.randn(B, N, promises.D_S), torch.randn(B, N, promises.D_S))
        x = draw.normal(B, N, promises.D_S).float()
        student, teacher = x.clone().requires_grad_(), draw.normal(B, N, promises.D_T).float()
        if repeated:
            student = teacher = teacher[..., : promises.D_S].contiguous()
        mask = draw.mask(B, N)
        found, wanted = call(student, teacher, mask), subject(student, teacher, mask)
        if relative_error(found, wanted, floor=1e-3) > 1e-4:
            return f"compiled {subject.name} gives {found}, not {wanted}"
        if not repeated:
            gradients = [torch.autograd.grad(x, student)[0] for x in (found, wanted)]
            if relative_error(*gradients, floor=1e-3) > 1e-3:
                return f"compiled {subject.name} has another gradient"
    if len(graphs) > max(2, len(fewest)):  # one for each size that begins to change
        return f"{len(graphs)} graphs of {subject.name} where kl_div has {len(fewest)}"
    return None


def _counted(function: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], list[Any]]:
    """The function compiled anew, and its graphs so far."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend), graphs


def made_elsewhere(draw: Draw) -> str | None:
    """A teacher of inference mode is a teacher; the meta device works or is refused in words."""
    subject = _subject(draw)
    shapes = (draw.size(), draw.size(), promises.D_S), (promises.D_T,)
    student = draw.normal(*shapes[0]).float().requires_grad_()
    teacher = draw.normal(*shapes[0][:2], *shapes[1]).float()
    wanted = torch.autograd.grad(subject(student, teacher), student)[0]
    with torch.inference_mode():
        made = teacher.clone()
    found = torch.autograd.grad(subject(student, made), student)[0]
    if not torch.equal(found, wanted):
        return f"{subject.name}: another gradient for a teacher of inference mode"
    try:
        result = subject.to("meta")(student.to("meta"), teacher.to("meta"))
    except (ValueError, TypeError) as error:
        return f"{subject.name} on meta: {error}" if "\n" in str(error) else None
    return None if result.device.type == "meta" else f"{subject.name} on meta: {result.device}"


def overflowing(draw: Draw) -> str | None:
    """An upstream gradient that is not finite stays so: GradScaler looks for it."""
    subject = _subject(draw)
    student = draw.normal(4, 5, promises.D_S).half().requires_grad_()
    teacher = draw.normal(4, 5, promises.D_T).half()
    loss = subject(student, teacher)
    (gradient,) = torch.autograd.grad(loss, student, torch.full_like(loss, torch.inf))
    return f"{subject.name} hides an infinite gradient" if gradient.isfinite().all() else None


def _subject(draw: Draw) -> promises.Subject:
    torch.manual_seed(draw.random.randrange(2**30))
    return draw.pick(list(promises.subjects(draw.backend)))


FUNCTIONS: dict[str, Callable[[Draw], Case | str | None]] = {
    "relation": relation,
    "fcd": fcd,
    "knn": knn,
    "knn_module": knn_module,
    "cos_nce": cos_nce,
    "cos_nce_module": cos_nce_module,
    "cca": cca,
    "cca_module": cca_module,
    "correlations": correlations,
    "roots": roots,
    "cayley": cayley,
    "layer_norm": layer_norm,
    "attention": attention,
    "projection": projection,
    "dual_projection": dual_projection,
    "soft_targets": soft_targets,
    "linear_soft_targets": linear_soft_targets,
    "class_similarity": class_similarity,
    "compiled": compiled,
    "made_elsewhere": made_elsewhere,
    "overflowing": overflowing,
}
# Without a backend to choose.
TORCH_ONLY = {"cca", "cca_module", "correlations", "roots", "cayley", "class_similarity"}


def backends(name: str) -> tuple[str, ...]:
    return ("torch",) if name in TORCH_ONLY else ("torch", "triton")


def failure(name: str, backend: str, seed: int) -> str | None:
    """What is wrong with this case, or None."""
    torch.manual_seed(seed)
    draw = Draw(seed, backend)
    case = FUNCTIONS[name](draw)
    if not isinstance(case, Case):
        return case
    parameters = dict(case.module.named_parameters()) if case.module is not None else {}
    dtypes = {n: x.dtype for n, x in (case.learning | parameters | case.given).items()}

    exact = {n: x.detach().double() for n, x in (case.learning | parameters | case.given).items()}
    learning = [*case.learning, *parameters]
    expected, expected_grads = _evaluate(case.oracle, exact, learning, None)
    upstream = torch.randn(expected.shape, generator=draw.generator, dtype=torch.float64)
    expected, expected_grads = _evaluate(case.oracle, exact, learning, upstream)

    actual_inputs = {
        n: _poisoned(x, case.mask) if n in case.masked else x.detach()
        for n, x in (case.learning | case.given).items()
    }
    leaves = {n: actual_inputs[n].requires_grad_() for n in case.learning}
    context = torch.autocast("cpu", torch.bfloat16) if case.autocast else contextlib.nullcontext()
    with context:
        actual = case.call(**(actual_inputs | leaves), **case.options)
    working = torch.float64 if torch.float64 in dtypes.values() else torch.float32
    wanted = dtypes[case.like] if case.like else working
    if actual.dtype != wanted:
        return f"the result is {actual.dtype}, not {wanted}"
    if actual.shape != expected.shape:
        return f"the result has shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    gradients = torch.autograd.grad(
        actual,
        [*leaves.values(), *parameters.values()],
        upstream.to(actual.dtype),
        allow_unused=True,
    )

    noise = _sensitivity(case, exact, learning, upstream, working, draw.generator)
    scales = [case.scale, *_gradient_scales(case, exact, learning, upstream, draw)]
    named = zip(
        ["the result", *(f"the gradient of {n}" for n in learning)],
        [actual, *gradients],
        [expected, *expected_grads],
        scales,
        noise,
        # An upstream gradient in a half type was rounded to it.
        [wanted, *(wanted if case.like else dtypes[n] for n in learning)],
        strict=True,
    )
    for what, a, e, scale, rounding, dtype in named:
        if what == "the result" and bool((expected.isinf() & actual.isnan()).any()):
            return "the result is NaN where the truth is infinite"
        allowed = case.roundings * rounding
        found = _difference(a, e, scale, allowed, dtype, case.products or working)
        if found:
            return f"{what}: {found}"
    return None


def _evaluate(
    oracle: Callable[..., Tensor],
    inputs: dict[str, Tensor],
    learning: list[str],
    upstream: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    leaves = {n: x.clone().requires_grad_(n in learning) for n, x in inputs.items()}
    value = oracle(**leaves)
    if upstream is None:
        return value.detach(), []
    wanted = [leaves[n] for n in learning]
    if not value.requires_grad:
        return value, [torch.zeros_like(x) for x in wanted]
    found = torch.autograd.grad(value, wanted, upstream, allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for g, x in zip(found, wanted, strict=True)]
    return value.detach(), zeros


def _sensitivity(
    case: Case,
    exact: dict[str, Tensor],
    learning: list[str],
    upstream: Tensor,
    working: torch.dtype,
    generator: torch.Generator,
) -> list[float]:
    """How far value and gradients move when every input is rounded once, the worst of three."""
    base = _flat(_evaluate(case.oracle, exact, learning, upstream))
    moved = [0.0] * len(base)
    step = MAGNIFIED * torch.finfo(working).eps
    for _ in range(3):
        near = {
            n: x * (1 + step * (torch.rand(x.shape, generator=generator, dtype=x.dtype) - 0.5))
            for n, x in exact.items()
        }
        with mock.patch.object(oracles, "ROUNDED_NORMS", step):
            other = _flat(_evaluate(case.oracle, near, learning, upstream))
        moved = [
            max(m, _size(a - b) / MAGNIFIED) for m, a, b in zip(moved, base, other, strict=True)
        ]
    return moved


def _gradient_scales(
    case: Case, exact: dict[str, Tensor], learning: list[str], upstream: Tensor, draw: Draw
) -> list[float]:
    """Sizes of the gradients at an unrelated teacher: near its teacher a student's all cancels."""
    if case.scale == 0:
        return [0.0] * len(learning)
    if case.slope is not None:
        size = case.scale * max(_size(upstream), 1e-30)
        return [
            size * _size(case.slope(exact[n])) if n in case.learning else size for n in learning
        ]
    strangers = {
        n: draw.normal(*x.shape) * (x.nan_to_num().abs().mean() if x.numel() else 1)
        if n in case.given
        else x
        for n, x in exact.items()
    }
    _, gradients = _evaluate(case.oracle, strangers, learning, upstream)
    return [_size(g) for g in gradients]


def _flat(evaluated: tuple[Tensor, list[Tensor]]) -> list[Tensor]:
    return [evaluated[0], *evaluated[1]]


def _size(x: Tensor) -> float:
    found = x.double().norm().item()
    return found if found < float("inf") else 0.0


def _poisoned(x: Tensor, mask: Tensor | None) -> Tensor:
    """``x`` with NaN and inf where it is padding, in the layout it has."""
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x.detach())
    if mask is not None:
        out[~mask] = torch.tensor([float("nan"), float("inf")])[out[~mask].numel() % 2].to(x.dtype)
    return out


def _difference(
    actual: Tensor | None,
    expected: Tensor,
    scale: float,
    rounding: float,
    dtype: torch.dtype,
    working: torch.dtype,
) -> str | None:
    if actual is None:
        return None if _size(expected) == 0 else "missing"
    actual = actual.detach().double()
    largest = torch.finfo(dtype).max
    comparable = expected.abs() < largest / 8
    if not bool((actual[~expected.isfinite()].isfinite() == 0).all()):
        return "finite where the truth is not"
    actual, expected = actual[comparable], expected[comparable]
    if not bool(actual.isfinite().all()):
        return "not finite where the truth is"
    error = _size(actual - expected)
    # Below the smallest normal number of its type nothing is promised.
    floor = torch.finfo(dtype).tiny * max(actual.numel(), 1) ** 0.5
    allowed = TOLERANCE[dtype] * _size(expected) + TOLERANCE[working] * scale
    allowed += rounding + floor
    return None if error <= allowed else f"error {error:.3g} > {allowed:.3g}"


def cases(only: str | None, first: int) -> Iterator[tuple[str, str, int]]:
    """Every function and backend, with seeds from ``first`` on, without end."""
    for seed in itertools.count(first):
        for name in FUNCTIONS:
            if only is None or name == only:
                for backend in backends(name):
                    yield name, backend, seed


def checked(name: str, backend: str, seed: int) -> str | None:
    """`failure`, with an exception as one too."""
    try:
        return failure(name, backend, seed)
    except Exception:
        return traceback.format_exc(limit=-3)


def main() -> None:
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=FUNCTIONS)
    options = parser.parse_args()
    deadline, count, failures = time.monotonic() + options.seconds, 0, 0
    for name, backend, seed in cases(options.only, options.seed):
        if time.monotonic() > deadline:
            break
        count += 1
        found = checked(name, backend, seed)
        if found:
            failures += 1
            print(f"--only {name} --seed {seed} ({backend}): {found}", flush=True)
    print(f"{count} cases, {failures} failures")
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    main()
