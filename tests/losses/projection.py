"""Dual projection: `cayley`, `layer_norm_mse`, `projected`, the oracles, and the tables."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

import fastkd
from fastkd.losses.projection import REDUCTIONS
from tests.support import oracles
from tests.support.draw import BATCH, LENGTH, ROUNDINGS, WIDTH, Case, Draw, module_case, poisoned
from tests.support.subject import D_S, D_T, Subject, function_of, of_module


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
    raw = draw.normal(*draw.pick([(), (1,), (2,), (2, 3), (0,)]), n, n) * draw.pick([0.01, 1.0])
    # The gradient holds for any matrix.
    skew = draw.pick([1.0, 1.0, 30.0]) * (raw - raw.mT) if draw.chance(0.7) else 0.02 * raw
    skew = draw.laid_out(skew.to(draw.dtype))
    autocast = draw.chance(0.3) and draw.backend != "reference"
    return Case(draw.function("cayley"), cayley, {"skew": skew}, like="skew", autocast=autocast)


def random_layer_norm(draw: Draw) -> Case:
    rows, columns = draw.sizes(LENGTH, WIDTH, most=2**17)
    shape = (draw.pick([rows, 0, rows]), columns)
    eps, reduction = draw.pick([1e-5, 1e-12, 1e-3]), draw.pick(REDUCTIONS)
    divisor = {"mean": shape[0] * shape[1], "batchmean": shape[0], "sum": 1}[reduction]
    wide = (1e-3, 30.0)
    if draw.dtype != torch.float16:  # squares that are 0 or inf in float32
        wide = (*wide, 1e-30, 1e-20, 1e20, 1e36)
    weights, factors = draw.weights(torch.ones(shape[0], dtype=torch.bool))
    loss = draw.function("layer_norm_mse")
    features = {name: draw.features(*shape, scales=wide) for name in "xy"}
    if all((x.double().var(-1, correction=0) > 0).all() for x in features.values()):
        eps = draw.pick([eps, 0.0])
    return Case(
        lambda x, y: loss(x, y, eps=eps, reduction=reduction, weights=weights),
        lambda x, y: (layer_norm_mse(x, y, eps) * factors).sum() / max(divisor, 1),
        features,
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
    rows, D_in, D_out = draw.sizes(LENGTH, (8, 256), (8, 256), most=2**20, zero=True)
    D_in, D_out, layers = max(D_in, 1), max(D_out, 1), draw.pick([1, 2, 3, 4])
    orthogonal = draw.chance(0.7)
    module = fastkd.OrthogonalProjection(D_in, D_out, layers, orthogonal, backend=draw.backend)
    moved(draw, module)
    if draw.dtype == torch.float64:
        module.double()

    def oracle(x: Tensor, **parameters: Tensor) -> Tensor:
        return projected(x, list(parameters.values()), orthogonal, D_out)

    x = draw.features(*draw.pick([(), (rows,), (rows, draw.pick([1, 3]))]), D_in)
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
    B, N, D_s, D_t = draw.sizes(BATCH, LENGTH, (8, 64), (8, 64))
    orthogonal, layers = draw.chance(0.5), draw.pick([1, 2, 3])
    gamma, reduction = draw.pick([0.3, 0.0, 0.8]), draw.pick(REDUCTIONS)
    kind = functools.partial(fastkd.DualProjectionLoss, D_s, D_t, layers, orthogonal=orthogonal)
    module = moved(draw, draw.module(kind, gamma=gamma, reduction=reduction))
    mask = of_teacher = draw.mask(B, N)
    options = {}
    if draw.chance(0.3):  # a teacher of another tokenizer
        of_teacher = draw.mask(B, draw.size())
        options["teacher_mask"] = of_teacher
    real = mask.any(1) & of_teacher.any(1)
    samples = max(int(real.sum()), 1)
    to_t, to_s = (
        {"mean": samples * D, "batchmean": samples, "sum": 1}[reduction] for D in (D_t, D_s)
    )

    def oracle(student: Tensor, teacher: Tensor, **parameters: Tensor) -> Tensor:
        sides = (student, mask), (teacher, of_teacher)
        h_s, h_t = (oracles.pooled(*side, "mean")[real] for side in sides)
        of_s, of_t = (
            [x for name, x in parameters.items() if name.startswith(side)]
            for side in ("student", "teacher")
        )
        spl = layer_norm_mse(projected(h_s, of_s, orthogonal, D_t), h_t, 1e-5).sum() / to_t
        tpl = layer_norm_mse(projected(h_t, of_t, orthogonal, D_s), h_s, 1e-5).sum() / to_s
        return gamma * spl + (1 - gamma) * tpl

    scale = {"mean": 1.0, "batchmean": max(D_s, D_t), "sum": samples * max(D_s, D_t)}[reduction]
    sizes = B, N, D_s, D_t
    case = module_case(draw, module, oracle, sizes, mask, scale=float(scale), **options)
    if options:
        x = draw.features(*of_teacher.shape, D_t)
        case.given, case.masked = {"teacher": poisoned(x, of_teacher)}, ("student",)
    return dataclasses.replace(case, roundings=ROUNDINGS * layers)


RANDOM = {
    "layer_norm": random_layer_norm,
    "cayley": random_cayley,
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


def examples(backend: str) -> Iterator[tuple]:
    loss = function_of("layer_norm_mse", backend)
    # norm(1, 2, 3) = (−a, 0, a) and norm(3, 1, 2) = (a, −a, 0) with a = √1.5: ½(4 + 1 + 1)a².
    x, y = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[3.0, 1.0, 2.0]])
    for reduction, value in (("sum", 4.5), ("batchmean", 4.5), ("mean", 1.5)):
        yield reduction, loss(x, y, eps=0.0, reduction=reduction), value
    if backend != "cpp":
        # Q = [[0, −t], [t, 0]] with t = tan(θ/2) turns the plane by θ.
        theta = torch.tensor(0.7)
        sin, cos, t = theta.sin(), theta.cos(), (theta / 2).tan()
        zero = torch.zeros_like(t)
        skew = torch.stack([zero, -t, t, zero]).reshape(2, 2)
        turned = torch.stack([cos, -sin, sin, cos]).reshape(2, 2)
        yield "rotation", function_of("cayley", backend)(skew), turned


def edges(backend: str) -> Iterator[tuple]:
    loss = function_of("layer_norm_mse", backend)
    y = torch.randn(3, 48)
    centred, variance = y - y.mean(-1, keepdim=True), y.double().var(-1, correction=0)
    for number, eps in itertools.product((0.0, 0.7, 1000.1, -3.1e4, 1e30), (0.0, 1e-8, 1e-5)):
        if backend == "reference" and (eps == 0 or number == 1e30):
            continue  # autograd's 0/0
        value = (24 * variance / (variance + eps)).sum()  # zeros against a row of variance 1
        gradient = -centred / (variance[:, None] + eps).sqrt() / eps**0.5 if eps else 0.0
        # A mean that is no number of the dtype makes a row that isn't quite constant.
        gradient = None if eps and number in (1000.1, -3.1e4) else gradient
        call, x = functools.partial(loss, y=y, eps=eps, reduction="sum"), torch.full_like(y, number)
        yield f"constant {number}, eps {eps}", call, x, value, gradient, 1e-3
    yield "itself", lambda s: loss(s, s), y, 0.0, 0.0
    yield "no features", lambda s: loss(s, y[:, :0]), y[:, :0], 0.0, 0.0
    if backend == "torch":
        dual, teacher = fastkd.DualProjectionLoss(4, 6), torch.randn(2, 3, 6)
        yield "no token of the student", lambda s: dual(s, teacher), torch.randn(2, 0, 4), 0.0, 0.0
        none = teacher[:, :0]
        yield "no token of the teacher", lambda s: dual(s, none), torch.randn(2, 3, 4), 0.0, 0.0
        skew, identity = torch.zeros(2, 3, 3), torch.eye(3)
        skew[0, 1, 2] = torch.nan  # it stays in its matrix
        yield "NaN in a matrix", lambda s: fastkd.cayley(s)[1], skew, identity, ...


def growing() -> dict[str, tuple]:
    def rows(*sizes: int) -> list[tuple]:
        return [(torch.randn(2, n, 16, requires_grad=True),) for n in sizes]

    projection = functools.partial(fastkd.OrthogonalProjection, 16, 12, backend="torch")
    # More rows than columns are multiplied by the matrix.
    return {"few rows": (projection(), rows(4, 5, 8)), "many rows": (projection(), rows(30, 31))}


def bad() -> Iterator[tuple[str, Callable]]:
    x = torch.randn(3, 6)
    yield r"skew must be square .* got \(3, 6\)", lambda: fastkd.cayley(x)
    yield "at least 2 dimensions", lambda: fastkd.cayley(x[0])
    yield "skew must be bfloat16", lambda: fastkd.cayley(torch.zeros(3, 3).long())
    projection, dual = fastkd.OrthogonalProjection, fastkd.DualProjectionLoss
    yield "layers must be at least 1", lambda: projection(4, 4, layers=0)
    yield "in_dim must be an int", lambda: projection(4.0, 4)
    yield r"x must have 4 columns \(in_dim\), got \(3, 6\)", lambda: projection(4, 4)(x)
    module = dual(4, 6)
    yield r"student must have 4 columns \(student_dim\)", lambda: module(x, x)
    yield r"teacher must have 6 columns \(teacher_dim\)", lambda: module(x[:, :4], x[:, :4])
    yield "3 samples but teacher has 2", lambda: module(x[:, :4], x[:2])
    yield r"student must be \(B, D\) or \(B, N, D\)", lambda: module(torch.randn(1, 1, 3, 4), x)
    tokens = torch.randn(2, 5, 4), torch.randn(2, 3, 6)
    yield "pass teacher_mask too", lambda: module(*tokens, torch.ones(2, 5))
    yield "gamma must be at most 1", lambda: dual(4, 6, gamma=1.5)
