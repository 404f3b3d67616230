"""Symmetric matrix roots."""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fastkd.linalg.roots import inv_sqrtm, inv_sqrtm_ref, sqrtm, sqrtm_ref

from .case import REFERENCE, Case, Provider, call, compiled
from .features import features, weighted

LOSS = "linalg"
RIDGE = 1e-4


def make(*, batch, n, device, dtype) -> dict[str, Tensor]:
    """Covariances of 2n observations, and the upstream gradient."""
    x = features(batch, 2 * n, n, device=device, dtype=torch.float32, seed=0, cosine=0.0)
    covariance = x.mT @ x / (2 * n)
    weight = features(batch, n, n, device=device, dtype=dtype, seed=1, cosine=0.0)
    return {"matrix": covariance.to(dtype).requires_grad_(), "weight": weight}


# Reference and function, by title.
ROOTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "root": (sqrtm_ref, sqrtm),
    "inverse root": (
        functools.partial(inv_sqrtm_ref, ridge=RIDGE),
        functools.partial(inv_sqrtm, ridge=RIDGE),
    ),
}


def case(set: str, title: str, *, sweep: str = "", batch: int, n: int) -> Case:
    """``title`` is "root" or "inverse root"; 10n³ is the least that a tridiagonal solver needs."""
    reference, fast = (functools.partial(weighted, root) for root in ROOTS[title])

    def wide(matrix: Tensor, weight: Tensor) -> Tensor:
        return reference(matrix.double(), weight.double())

    return Case(
        loss=LOSS,
        title=title,
        set=set,
        sizes={"batch": batch, "n": n},
        dtype=torch.float32,
        make=make,
        providers=(
            Provider(REFERENCE, call(reference)),
            *([compiled(reference)] if set == "cpu" else []),
            Provider("fastkd", call(fast)),
            # The digits that fastkd gives float32 matrices.
            *([Provider("reference in float64", call(wide))] if set == "cpu" else []),
        ),
        bytes_moved=4 * batch * n * n * 4,
        operations=batch * 10 * n**3,
        sweep=sweep,
    )


def cases() -> Iterator[Case]:
    for title in ("root", "inverse root"):
        for n in (32, 128, 768):
            yield case("cpu", title, sweep="n", batch=1, n=n)
        yield case("bert", title, batch=500, n=32)
        yield case("bert", title, batch=24, n=768)
    for n in (32, 64, 128, 256, 512, 1024):
        yield case("sweep", "inverse root", sweep="n", batch=24, n=n)


def test_linalg(measure, case, provider):
    measure(case, provider)
