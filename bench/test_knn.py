"""Intra-class similarity: nearest neighbours of the same class."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastkd.losses.knn import knn_feature_loss, knn_feature_loss_ref

from .case import Bound, Case, Provider, Work, leaves_of, unless_installed
from .features import features, labels

LOSS = "knn"


def make(*, N, M, D, classes, device, dtype, cosine=0.5) -> dict[str, Tensor]:
    """N queries against a bank of M rows."""
    make = functools.partial(features, device=device, dtype=dtype, cosine=cosine)
    return {
        "student": make(N, D, seed=0, requires_grad=True),
        "teacher": make(M, D, seed=1),
        "student_labels": labels(N, classes, device=device, seed=2),
        "teacher_labels": labels(M, classes, device=device, seed=3),
    }


def keops(k: int) -> Provider:
    """pykeops: the k nearest by a symbolic distance plus a penalty for another label."""

    def bind(inputs: dict[str, Any]) -> Bound:
        import pykeops
        from pykeops.torch import LazyTensor

        pykeops.set_verbose(False)
        student, teacher, mine, theirs = inputs.values()
        x, y = (
            side.detach().float() if side.dtype != torch.float64 else side.detach()
            for side in (student, teacher)
        )
        a, b = (side.to(x.dtype)[:, None] for side in (mine, theirs))

        def forward() -> Tensor:
            distance = ((LazyTensor(x[:, None]) - LazyTensor(y[None])) ** 2).sum(-1)
            other = (LazyTensor(a[:, None]) - LazyTensor(b[None])) ** 2
            nearest = (distance + 1e6 * other.sum(-1)).argKmin(k, dim=1)  # (N, k)
            difference = student[:, None].to(x.dtype) - y[nearest]
            return difference.square().sum() / student.shape[1]

        return Bound(forward, leaves_of(inputs))

    return Provider("pykeops", bind, unless_installed("pykeops", "pykeops"))


def products(k: int) -> Provider:
    """The k nearest by one product of the given dtype, a mask of the labels and ``topk``."""

    def bind(inputs: dict[str, Any]) -> Bound:
        student, teacher, mine, theirs = inputs.values()

        def forward() -> Tensor:
            with torch.no_grad():
                squares = torch.linalg.vector_norm(teacher, dim=1, dtype=torch.float32).square()
                scores = squares - 2 * (student @ teacher.T)  # (N, M)
                scores = scores.masked_fill(mine[:, None] != theirs, torch.inf)
                least, nearest = scores.topk(min(k, len(teacher)), largest=False)
            difference = student[:, None].float() - teacher[nearest].float()
            difference = difference.masked_fill(least.isinf()[..., None], 0)
            return difference.square().sum() / student.shape[1]

        return Bound(forward, leaves_of(inputs))

    # Of two rows whose scores round to one, it may take the other: another gradient.
    return Provider("mm + mask + topk", bind, own_objective=True)


def cost(*, N, M, D, classes) -> tuple[int, int]:
    """Case of KNN; operations count pairs of one class only."""
    return (2 * N + M) * D, 2 * N * M * D // classes


def case(
    set: str, title: str, *more: Any, k: int = 1, peer: bool = False, cosine: float = 0.5,
    **options: Any,
) -> Case:  # fmt: skip
    """``peer`` adds pykeops, where its scalar loops (a CPU) or its unrolled ones (D beyond a few
    thousand, minutes to compile) can finish.
    """
    functions = knn_feature_loss_ref, knn_feature_loss, "knn_feature_loss"
    peers = (keops(k),) if peer else ()
    if set in ("bert", "bank") and options["N"] * options["M"] <= 2**28:
        peers = (products(k), *peers)
    inputs = functools.partial(make, cosine=cosine)
    work = Work(LOSS, f"{title}, k={k}", inputs, *functions, cost, peers, {"k": k})
    if cosine != 0.5:
        options["data"] = f"cosine {cosine}"
    return work.case(set, *more, **options)


def cases() -> Iterator[Case]:
    half = torch.bfloat16
    yield case("cpu", "batch", N=32, M=32, D=128 * 768, classes=2)
    yield case("cpu", "bank", headline=True, N=2048, M=16384, D=768, classes=2)
    yield case("cpu", "bank", cosine=0.98, N=2048, M=16384, D=768, classes=2)
    for m in (1024, 4096, 16384):
        yield case("cpu", "bank", peer=True, sweep="M", N=32, M=m, D=768, classes=2)
    for k in (1, 8):
        yield case("bert", "batch", half, k=k, N=32, M=32, D=768, classes=2)
    yield case("bert", "tokens", half, N=32, M=32, D=128 * 768, classes=2)
    for k in (1, 8):
        yield case(
            "bank", "bank", half, peer=True, headline=k == 1, k=k, N=32, M=65536, D=768, classes=2
        )
    yield case("bank", "bank", half, peer=True, k=4, N=2048, M=65536, D=768, classes=2)
    for n in (32, 2048):
        yield case("bank", "bank", half, cosine=0.99, k=4, N=n, M=65536, D=768, classes=2)
    whole: dict[str, Any] = {"N": 65536, "M": 65536, "D": 768, "classes": 2}
    yield case("bank", "all pairs", half, compile=False, check_sizes={"N": 2048}, **whole)
    for m in (1024, 4096, 16384, 65536):
        sizes: dict[str, Any] = {"N": 32, "M": m, "D": 768, "classes": 2}
        yield case("sweep", "bank", half, compile=False, sweep="M", **sizes)


def test_knn(measure, case, provider):
    measure(case, provider)
