"""FCD: relations between tokens and between samples."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastkd._core.dispatch import Backend
from fastkd.losses.relation import FCDLoss, relation_loss, relation_loss_ref

from .case import Case, Work
from .features import features, padding

LOSS = "relation"


def layers_ref(student: list[Tensor], teacher: list[Tensor], mask: Tensor | None = None) -> Tensor:
    """Eq. 10 with weights 1, averaged over the layers."""
    losses = [
        relation_loss_ref(s, t, mask, over=over)
        for s, t in zip(student, teacher, strict=True)
        for over in ("tokens", "samples")
    ]
    return torch.stack(losses).sum() / len(student)


def layers(
    student: list[Tensor], teacher: list[Tensor], mask: Tensor | None = None, *, backend: Backend
) -> Tensor:
    """`FCDLoss` with the same weights."""
    return FCDLoss(backend=backend)(student, teacher, mask)


def make_layers(*, layers: int, **options) -> dict[str, list[Tensor]]:
    """Lists of ``layers`` pairs."""
    made = [make_pair(seed=layer, **options) for layer in range(layers)]
    return {side: [pair[side] for pair in made] for side in ("student", "teacher")}


def make_masked(**options) -> dict[str, Any]:
    """`make_layers` with a quarter of the positions padded."""
    mask = padding(options["B"], options["N"], options["device"])
    return make_layers(**options) | {"mask": mask}


def make_pair(*, B, N, Ds, Dt, device, dtype, seed=0) -> dict[str, Tensor]:
    """One layer's student (B, N, Ds) and teacher (B, N, Dt)."""
    make = functools.partial(features, device=device, dtype=dtype)
    return {
        "student": make(B, N, Ds, seed=2 * seed, requires_grad=True),
        "teacher": make(B, N, Dt, seed=2 * seed + 1),
    }


def operations(groups: int, members: int, Ds: int, Dt: int) -> int:
    """Least operations for the relations of ``groups`` groups, by (N, N) or (D, D) products."""
    relation_side = members**2 * (3 * Ds + Dt)
    feature_side = members * (Ds**2 + Dt**2 + 4 * Ds * Dt + 2 * Ds**2)
    return groups * min(relation_side, feature_side)


def cost(over: str, *, B, N, Ds, Dt, layers=1) -> tuple[int, int]:
    """Case of relations between "tokens", "samples", or for a list of layers "tokens + samples"."""
    kinds = {"tokens": operations(B, N, Ds, Dt), "samples": operations(N, B, Ds, Dt)}
    return layers * B * N * (2 * Ds + Dt), layers * sum(kinds[kind] for kind in over.split(" + "))


def case(set: str, over: str, *more: Any, masked: bool = False, **rest: Any) -> Case:
    name, least = "relation_loss", functools.partial(cost, over)
    work = Work(LOSS, over, make_layers, layers_ref, layers, name, least)
    if over in ("tokens", "samples"):
        functions = relation_loss_ref, relation_loss, name
        work = Work(LOSS, over, make_pair, *functions, least, options={"over": over})
    if masked:
        work = Work(LOSS, f"{over}, mask", make_masked, layers_ref, layers, name, least)
    return work.case(set, *more, **rest)


def cases() -> Iterator[Case]:
    bert: dict[str, Any] = {"B": 32, "N": 128, "Ds": 768, "Dt": 768}
    half = torch.bfloat16
    yield case("cpu", "tokens", headline=True, **bert)
    yield case("cpu", "samples", headline=True, **bert)
    for n in (64, 128, 256, 512):
        sizes: dict[str, Any] = {"B": 8, "N": n, "Ds": 384, "Dt": 768}
        yield case("cpu", "tokens", sweep="N", **sizes)
    for d in (192, 384, 768, 1536):
        sizes = {"B": 8, "N": 128, "Ds": d, "Dt": d}
        yield case("cpu", "tokens", sweep="D", **sizes)
    for count in (6, 12):
        yield case("bert", "tokens + samples", half, headline=count == 6, **bert, layers=count)
    yield case("bert", "tokens + samples", half, masked=True, **bert, layers=6)
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
