"""Dual projection, in the tests that go through every loss."""

import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

import fastkd
from tests import oracles
from tests.calls import ALL_TYPES, BOTH, Call, Calls, given, learns, mask_of, numbers
from tests.draw import Case, Draw, module_case
from tests.subject import D_S, D_T, Subject, of_module


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
    eps, reduction = draw.pick([1e-5, 1e-12]), draw.pick(["mean", "batchmean", "sum"])
    divisor = {"mean": shape[0] * shape[1], "batchmean": shape[0], "sum": 1}[reduction]
    return Case(
        lambda x, y: fastkd.layer_norm_mse(
            x, y, eps=eps, reduction=reduction, backend=draw.backend
        ),
        lambda x, y: layer_norm_mse(x, y, eps).sum() / max(divisor, 1),
        {"x": draw.features(*shape), "y": draw.features(*shape)},
        scale=float(shape[1]) if reduction != "mean" else 1.0,
        slope=lambda x: (x.var(-1, correction=0) + eps).rsqrt(),
    )


def random_projection(draw: Draw) -> Case:
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
            factors = list(cayley((raw - raw.mT) / 2))
        else:
            factors = list(parameters.values())
        weight = functools.reduce(torch.matmul, factors)
        return x @ weight[:D_in, :D_out]

    x = draw.features(draw.size(zero=True), draw.size(), D_in)
    return Case(module, oracle, {"x": x}, module=module, like="x", slope=lambda x: x.norm(dim=-1))


def random_dual_projection(draw: Draw) -> Case:
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
            factors = list(cayley((raw - raw.mT) / 2))
        else:
            factors = [parameters[f"{side}_projection.matrices.{i}"] for i in range(2)]
        return (factors[0] @ factors[1])[: shape[0], : shape[1]]

    def oracle(student: Tensor, teacher: Tensor, **parameters: Tensor) -> Tensor:
        h_s, h_t = (oracles.pooled(x, mask, "mean") for x in (student, teacher))
        real = mask.any(1)
        h_s, h_t = h_s[real], h_t[real]
        to_t = layer_norm_mse(h_s @ weight("student", parameters, (D_s, D_t)), h_t, 1e-5)
        to_s = layer_norm_mse(h_t @ weight("teacher", parameters, (D_t, D_s)), h_s, 1e-5)
        loss = 0.3 * to_t.sum() / D_t + 0.7 * to_s.sum() / D_s
        return loss / real.sum().clamp_min(1)

    return module_case(draw, module, oracle, (B, N, D_s, D_t), mask)


def calls() -> Calls:
    for dtype in ALL_TYPES:
        yield Call(fastkd.cayley, {"skew": learns(3, 20, 20, dtype=dtype)}, {})
    for backend in ("torch", "triton"):
        yield Call(fastkd.cayley, {"skew": learns(48, 48)}, {"backend": backend})
    columns = [1, 15, 16, 17, 48, 770, 9000, 20000]
    columns += [size for log in range(5, 15) for size in (2**log - 1, 2**log)]
    for dtype, D, (x, y) in itertools.product(
        ALL_TYPES, columns, ((learns, given), (given, learns), (learns, learns))
    ):
        yield Call(
            fastkd.layer_norm_mse, {"x": x(5, D, dtype=dtype), "y": y(5, D, dtype=dtype)}, {}
        )
    for reduction, backend in itertools.product(
        ("mean", "batchmean", "sum"), ("auto", "torch", "triton")
    ):
        yield Call(
            fastkd.layer_norm_mse,
            {"x": learns(2, 3, 48), "y": learns(2, 3, 48)},
            {"reduction": reduction, "backend": backend},
        )
    yield Call(fastkd.layer_norm_mse, {"x": learns(2**22, 768), "y": learns(2**22, 768)}, {})
    for (n, out), rows, backend in itertools.product(
        ((1, 1), (48, 32), (48, 64), (256, 256), (257, 257), (2047, 2047), (2048, 2048)),
        (4, 4096),
        ("auto", "torch", "triton"),
    ):
        yield Call(
            fastkd.OrthogonalProjection,
            {"x": learns(rows, n)},
            {"in_dim": n, "out_dim": out, "backend": backend},
        )
    for shape, orthogonal, reduction, backend in itertools.product(
        ((8,), (8, 16)), BOTH, ("mean", "batchmean", "sum"), ("auto", "torch", "triton")
    ):
        yield Call(
            fastkd.DualProjectionLoss,
            {
                "student": learns(*shape, 48),
                "teacher": given(*shape, 64),
                **mask_of(*shape, masked=len(shape) == 2),
            },
            {"student_dim": 48, "teacher_dim": 64, "orthogonal": orthogonal}
            | {"reduction": reduction, "backend": backend},
        )
    yield Call(
        fastkd.DualProjectionLoss,
        {
            "student": learns(8, 16, 48),
            "teacher": given(8, 20, 64),
            "mask": numbers(8, 16),
            "teacher_mask": numbers(8, 20),
        },
        {"student_dim": 48, "teacher_dim": 64},
    )


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
    yield of_module("DualProjectionLoss", fastkd.DualProjectionLoss(D_S, D_T, backend=backend))
