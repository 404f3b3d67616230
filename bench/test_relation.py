"""FCD: relations between tokens and between samples."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastkd._core.dispatch import Backend
from fastkd.losses.relation import OVER, FCDLoss, Over, relation_loss_ref

from .case import Case, Work
from .features import features, padding

LOSS = "relation"
Layers = list[Tensor]


def reference(
    student: Layers, teacher: Layers, mask: Tensor | None = None, *, over: Sequence[Over]
) -> Tensor:
    """Eq. 10 with weights 1, averaged over the layers."""
    pairs = zip(student, teacher, strict=True)
    losses = [relation_loss_ref(s, t, mask, over=kind) for s, t in pairs for kind in over]
    return torch.stack(losses).sum() / len(student)


def fcd(
    student: Layers,
    teacher: Layers,
    mask: Tensor | None = None,
    *,
    over: Sequence[Over],
    backend: Backend,
) -> Tensor:
    """`FCDLoss` with the same weights."""
    return FCDLoss(*(float(kind in over) for kind in OVER), backend=backend)(student, teacher, mask)


def make(*, B, N, Ds, Dt, device, dtype, layers=1, masked=False, cosine=0.5) -> dict[str, Any]:
    """Lists of student (B, N, Ds) and teacher (B, N, Dt) features, with a quarter padded."""
    new = functools.partial(features, device=device, dtype=dtype, cosine=cosine)
    inputs: dict[str, Any] = {
        "student": [new(B, N, Ds, seed=2 * i, requires_grad=True) for i in range(layers)],
        "teacher": [new(B, N, Dt, seed=2 * i + 1) for i in range(layers)],
    }
    return inputs | ({"mask": padding(B, N, device)} if masked else {})


def operations(groups: int, members: int, Ds: int, Dt: int) -> int:
    """Least operations for the relations of ``groups`` groups, by (N, N) or (D, D) products."""
    relation_side = members**2 * (3 * Ds + Dt)
    feature_side = members * (Ds**2 + Dt**2 + 4 * Ds * Dt + 2 * Ds**2)
    return groups * min(relation_side, feature_side)


def cost(over: Sequence[str], *, B, N, Ds, Dt, layers=1) -> tuple[int, int]:
    """Entries moved and operations."""
    kinds = {"tokens": operations(B, N, Ds, Dt), "samples": operations(N, B, Ds, Dt)}
    return layers * B * N * (2 * Ds + Dt), layers * sum(kinds[kind] for kind in over)


def case(
    set: str, title: str, *more: Any, masked: bool = False, cosine: float = 0.5, **rest: Any
) -> Case:
    inputs, over = functools.partial(make, masked=masked, cosine=cosine), title.split(" + ")
    if cosine != 0.5:
        rest["data"] = f"cosine {cosine}"
    given = reference, fcd, "relation_loss", functools.partial(cost, over)
    title = f"{title}, mask" if masked else title
    return Work(LOSS, title, inputs, *given, options={"over": over}).case(set, *more, **rest)


def cases() -> Iterator[Case]:
    bert: dict[str, Any] = {"B": 32, "N": 128, "Ds": 768, "Dt": 768}
    half = torch.bfloat16
    yield case("cpu", "tokens", headline=True, **bert)
    yield case("cpu", "samples", headline=True, **bert)
    yield case("cpu", "tokens", cosine=0.95, **bert)
    for n in (64, 128, 256, 512):
        sizes: dict[str, Any] = {"B": 8, "N": n, "Ds": 384, "Dt": 768}
        yield case("cpu", "tokens", sweep="N", **sizes)
    for d in (192, 384, 768, 1536):
        sizes = {"B": 8, "N": 128, "Ds": d, "Dt": d}
        yield case("cpu", "tokens", sweep="D", **sizes)
    for count in (6, 12):
        yield case("bert", "tokens + samples", half, headline=count == 6, **bert, layers=count)
    yield case("bert", "tokens + samples", half, masked=True, **bert, layers=6)
    yield case("bert", "tokens + samples", half, cosine=0.95, **bert, layers=6)
    yield case("bert", "tokens + samples", torch.float32, **bert, layers=6)
    for b, n, ds, dt in (
        (16, 1024, 1024, 1024),
        (8, 2048, 2048, 2048),
        (8, 4096, 2048, 4096),
        (2, 8192, 4096, 4096),
    ):
        yield case("long", "tokens", half, headline=n == 4096, B=b, N=n, Ds=ds, Dt=dt)
    for n in (128, 256, 512, 1024, 2048, 4096, 8192):
        yield case("sweep", "tokens", half, compile=False, sweep="N", B=4, N=n, Ds=1024, Dt=1024)
    for d in (256, 512, 1024, 2048, 4096):
        yield case("sweep", "tokens", half, compile=False, sweep="D", B=32, N=512, Ds=d, Dt=d)


def test_relation(measure, case, provider):
    measure(case, provider)
