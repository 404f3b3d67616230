"""Dual projection: `cayley`, `layer_norm_mse` and `projected`, the oracles.

`RANDOM` calls are held against them; `subjects` that keep every promise.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import fastkd
from fastkd.losses.projection import REDUCTIONS
from tests.support import oracles
from tests.support.draw import ROUNDINGS, Case, Draw, module_case
from tests.support.subject import D_S, D_T, Subject, of_module


def cayley(skew: Tensor) -> Tensor:
    """LRKD, eq. 6: (I + Q)(I − Q)⁻¹."""
    identity = torch.eye(skew.shape[-1], dtype=skew.dtype)
    return (identity + skew) @ torch.linalg.inv(identity - skew)


def layer_norm_mse(x: Tensor, y: Tensor, eps: float) -> Tensor:
    """½ ‖norm(x) − norm(y)‖² of each row."""
    x, y = (
        (v - v.mean(-1, keepdim=True)) / (v.var(-1, correction=0, keepdim=True) + eps).sqrt()
        for v in (x, y)
    )
    return (x - y).square().sum(-1) / 2


def random_cayley(draw: Draw) -> Case:
    n = draw.size(zero=True)
    raw = draw.normal(draw.pick([1, 2]), n, n) * draw.pick([0.01, 1.0])
    skew = draw.laid_out((raw - raw.mT).to(draw.dtype))
    call = functools.partial(fastkd.cayley, backend=draw.backend)
    return Case(call, cayley, {"skew": skew}, like="skew")


def random_layer_norm(draw: Draw) -> Case:
    shape = (draw.size(zero=True), draw.size())
    eps, reduction = draw.pick([1e-5, 1e-12]), draw.pick(REDUCTIONS)
    divisor = {"mean": shape[0] * shape[1], "batchmean": shape[0], "sum": 1}[reduction]
    wide = (1e-3, 30.0) if draw.dtype == torch.float16 else (1e-3, 30.0, 1e30)
    weights, factors = draw.weights(torch.ones(shape[0], dtype=torch.bool))
    return Case(
        lambda x, y: fastkd.layer_norm_mse(
            x, y, eps=eps, reduction=reduction, backend=draw.backend, weights=weights
        ),
        lambda x, y: (layer_norm_mse(x, y, eps) * factors).sum() / max(divisor, 1),
        {"x": draw.features(*shape, scales=wide), "y": draw.features(*shape, scales=wide)},
        scale=float(shape[1]) if reduction != "mean" else 1.0,
        slope=lambda x: (x.var(-1, correction=0) + eps).rsqrt(),
    )


def moved(draw: Draw, module: torch.nn.Module) -> torch.nn.Module:
    """Set a projection to a matrix other than the identity."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * draw.normal(*parameter.shape).float()
    return module


def projected(x: Tensor, matrices: Sequence[Tensor], orthogonal: bool, columns: int) -> Tensor:
    """Eq. 6 on the rows of x: by the Cayley matrices of the skew parts, or plain ones."""
    if orthogonal:
        (raw,) = matrices
        matrices = list(cayley((raw - raw.mT) / 2))
    return x @ functools.reduce(torch.matmul, matrices)[: x.shape[-1], :columns]


def random_projection(draw: Draw) -> Case:
    D_in, D_out, layers = draw.size(), draw.size(), draw.pick([1, 2, 3])
    orthogonal = draw.chance(0.7)
    module = fastkd.OrthogonalProjection(D_in, D_out, layers, orthogonal, backend=draw.backend)
    moved(draw, module)
    if draw.dtype == torch.float64:
        module.double()

    def oracle(x: Tensor, **parameters: Tensor) -> Tensor:
        return projected(x, list(parameters.values()), orthogonal, D_out)

    x = draw.features(draw.size(zero=True), draw.size(), D_in)
    return Case(
        module,
        oracle,
        {"x": x},
        module=module,
        like="x",
        slope=lambda x: x.norm(dim=-1),
        roundings=ROUNDINGS * layers,  # kernels that multiply rounded rows
    )


def random_dual_projection(draw: Draw) -> Case:
    B, N, D_s, D_t = (draw.size() for _ in range(4))
    orthogonal = draw.chance(0.5)
    module = fastkd.DualProjectionLoss(D_s, D_t, orthogonal=orthogonal, backend=draw.backend)
    moved(draw, module)
    mask = draw.mask(B, N)

    def oracle(student: Tensor, teacher: Tensor, **parameters: Tensor) -> Tensor:
        h_s, h_t = (oracles.pooled(x, mask, "mean") for x in (student, teacher))
        real = mask.any(1)
        h_s, h_t = h_s[real], h_t[real]
        of_s, of_t = (
            [x for name, x in parameters.items() if name.startswith(side)]
            for side in ("student", "teacher")
        )
        to_t = layer_norm_mse(projected(h_s, of_s, orthogonal, D_t), h_t, 1e-5)
        to_s = layer_norm_mse(projected(h_t, of_t, orthogonal, D_s), h_s, 1e-5)
        loss = 0.3 * to_t.sum() / D_t + 0.7 * to_s.sum() / D_s
        return loss / real.sum().clamp_min(1)

    case = module_case(draw, module, oracle, (B, N, D_s, D_t), mask)
    return dataclasses.replace(case, roundings=ROUNDINGS * module.student_projection.layers)


RANDOM = {
    "cayley": random_cayley,
    "layer_norm": random_layer_norm,
    "projection": random_projection,
    "dual_projection": random_dual_projection,
}


def subjects(backend: str) -> Iterator[Subject]:
    yield Subject(
        "layer_norm_mse",
        lambda s, t, m: fastkd.layer_norm_mse(s, t, backend=backend),
        masked=False,
        same_size=True,
    )
    layers = 1 if backend == "triton" else 2  # the interpreter inverts matrices one by one
    module = fastkd.DualProjectionLoss(D_S, D_T, layers=layers, backend=backend)
    yield of_module("DualProjectionLoss", module)
