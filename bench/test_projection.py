"""LRKD: Cayley maps, LayerNorm-MSE and dual projection."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fastkd._core.dispatch import Backend
from fastkd.losses.projection import (
    DualProjectionLoss,
    cayley,
    cayley_ref,
    layer_norm_mse,
    layer_norm_mse_ref,
)

from .case import (
    REFERENCE,
    Bound,
    Case,
    Provider,
    Work,
    call,
    compiled,
    leaves_of,
    why_not_by,
)
from .features import features, weighted

LOSS = "projection"
KERNELS: tuple[Backend, ...] = ("torch", "cpp", "triton")


def make_pair(*, rows, D, device, dtype) -> dict[str, Tensor]:
    """Features of both models with gradients, as outputs or inputs of projections."""
    make = functools.partial(features, rows, D, device=device, dtype=dtype, requires_grad=True)
    return {"x": make(seed=0), "y": make(seed=1)}


def layer_norm_cost(*, rows, D) -> tuple[int, int]:
    return 4 * rows * D, 20 * rows * D


def make_skew(*, D, device, dtype) -> dict[str, Tensor]:
    """A skew-symmetric Q and the upstream gradient G."""
    raw = features(D, D, device=device, dtype=torch.float32, seed=0, cosine=0.0) * D**-0.5
    skew = (raw - raw.T) / 2
    weight = features(D, D, device=device, dtype=dtype, seed=1, cosine=0.0)
    return {"matrix": skew.to(dtype).requires_grad_(), "weight": weight}


def parametrized() -> Provider:
    """torch's Cayley parametrization, which owns its matrix: Q = A/2."""

    def bind(inputs: dict[str, Any]) -> Bound:
        skew = inputs["matrix"].detach()
        n = len(skew)
        layer: Any = nn.Linear(n, n, bias=False, device=skew.device, dtype=skew.dtype)
        parametrizations.orthogonal(layer, orthogonal_map="cayley", use_trivialization=False)
        raw = layer.parametrizations.weight.original
        with torch.no_grad():
            raw.copy_(2 * skew.tril())
        return Bound(lambda: (layer.weight * inputs["weight"]).sum(), [raw])

    return Provider("torch parametrization", bind, own_leaves=True)


def cayley_case(set: str, *, sweep: str = "", headline: bool = False, D: int) -> Case:
    """One inverse and, backward, two products."""
    dtype = torch.float32
    return Case(
        loss=LOSS,
        title="Cayley",
        set=set,
        sizes={"D": D},
        dtype=dtype,
        make=make_skew,
        providers=(
            Provider(REFERENCE, call(functools.partial(weighted, cayley_ref))),
            compiled(functools.partial(weighted, cayley_ref)),
            Provider("fastkd torch", call(functools.partial(weighted, cayley))),
            parametrized(),
        ),
        bytes_moved=4 * D * D * dtype.itemsize,
        operations=6 * D**3,
        sweep=sweep,
        headline=headline,
    )


def make_dual(*, B, Ds, Dt, device, dtype) -> dict[str, Tensor]:
    """Pooled features of student and teacher, and two layers of projection matrices for each."""
    side = max(Ds, Dt)
    make = functools.partial(features, device=device)
    raw = functools.partial(make, 2, side, side, dtype=torch.float32, cosine=0.0)
    return {
        "student": make(B, Ds, dtype=dtype, seed=0, requires_grad=True),
        "teacher": make(B, Dt, dtype=dtype, seed=1),
        "student_raw": (raw(seed=2) * 0.1).requires_grad_(),
        "teacher_raw": (raw(seed=3) * 0.1).requires_grad_(),
    }


def dual_ref(student: Tensor, teacher: Tensor, student_raw: Tensor, teacher_raw: Tensor) -> Tensor:
    """Eqs. 5-10 from the references of their parts."""

    def project(x: Tensor, raw: Tensor, size: int) -> Tensor:
        first, second = (cayley_ref((a - a.T) / 2) for a in raw)
        weight = (first @ second)[: x.shape[1], :size]
        return x.to(weight.dtype) @ weight

    to_teacher = project(student, student_raw, teacher.shape[1])
    to_student = project(teacher, teacher_raw, student.shape[1])
    student, teacher = student.to(to_teacher.dtype), teacher.to(to_teacher.dtype)
    return 0.3 * layer_norm_mse_ref(to_teacher, teacher) + 0.7 * layer_norm_mse_ref(
        to_student, student
    )


def dual(backend: Backend) -> Provider:
    """`DualProjectionLoss` with the inputs' matrices."""

    def bind(inputs: dict[str, Any]) -> Bound:
        student, teacher = inputs["student"], inputs["teacher"]
        loss = DualProjectionLoss(student.shape[1], teacher.shape[1], backend=backend)
        loss = loss.to(student.device)
        with torch.no_grad():
            loss.student_projection.raw.copy_(inputs["student_raw"])
            loss.teacher_projection.raw.copy_(inputs["teacher_raw"])
        raw = [loss.student_projection.raw, loss.teacher_projection.raw]

        def between() -> None:
            """A step of AdamW at learning rate 1e-3: with unchanged matrices we do less work."""
            with torch.no_grad():
                for matrix in raw:
                    matrix.add_(torch.randn_like(matrix).sign_(), alpha=1e-3)

        return Bound(lambda: loss(student, teacher), [*leaves_of([student]), *raw], between)

    return Provider(f"fastkd {backend}", bind, why_not_by("layer_norm_mse", backend))


def dual_case(set: str, *, headline: bool = False, **sizes: int) -> Case:
    """Case of sizes B, Ds, Dt; each model has two layers: a factorisation and solves of B rows."""
    B, Ds, Dt = (sizes[name] for name in ("B", "Ds", "Dt"))
    side = max(Ds, Dt)
    return Case(
        loss=LOSS,
        title="dual projection",
        set=set,
        sizes=sizes,
        dtype=torch.float32,
        make=make_dual,
        providers=(Provider(REFERENCE, call(dual_ref)), compiled(dual_ref), *map(dual, KERNELS)),
        bytes_moved=4 * (2 * 2 * 2 * side**2 + B * (2 * Ds + Dt)),
        operations=4 * (2 * side**3 // 3 + 6 * B * side**2),
        headline=headline,
    )


def cases() -> Iterator[Case]:
    functions = layer_norm_mse_ref, layer_norm_mse, "layer_norm_mse"
    layer_norm_case = Work(LOSS, "LayerNorm-MSE", make_pair, *functions, layer_norm_cost).case
    yield layer_norm_case("cpu", headline=True, rows=4096, D=768)
    for rows in (64, 512, 4096, 16384):
        yield layer_norm_case("cpu", sweep="rows", rows=rows, D=384)
    yield cayley_case("cpu", D=768)
    yield dual_case("cpu", headline=True, B=32, Ds=768, Dt=768)
    yield layer_norm_case("bert", torch.bfloat16, rows=4096, D=768)
    yield layer_norm_case("bert", rows=32, D=768)
    yield cayley_case("bert", D=768)
    yield dual_case("bert", B=32, Ds=768, Dt=768)
    yield layer_norm_case("long", torch.bfloat16, headline=True, rows=32768, D=4096)
    yield cayley_case("long", headline=True, D=4096)
    yield dual_case("long", B=32, Ds=2048, Dt=4096)
    for d in (256, 512, 1024, 2048, 4096):
        yield cayley_case("sweep", sweep="D", D=d)


def test_projection(measure, case, provider):
    measure(case, provider)
