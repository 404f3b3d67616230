"""LRC-BERT: COS-NCE."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastkd.losses.cos_nce import cos_nce_loss, cos_nce_loss_ref

from .case import Case, Work
from .features import features, padding

LOSS = "contrastive"


def make(*, B, D, device, dtype, N=0) -> dict[str, Tensor]:
    """Student and teacher (B, D), or (B, N, D)."""
    shape = (B, N, D) if N else (B, D)
    make = functools.partial(features, *shape, device=device, dtype=dtype)
    return {"student": make(seed=0, requires_grad=True), "teacher": make(seed=1)}


def make_masked(**sizes: Any) -> dict[str, Tensor]:
    """`make` with a quarter of the positions padded."""
    return make(**sizes) | {"mask": padding(sizes["B"], sizes["N"], sizes["device"])}


def cost(*, B, D, N=1) -> tuple[int, int]:
    """Case of COS-NCE; about twelve operations for each entry."""
    return 3 * B * N * D, 12 * B * N * D


def cases() -> Iterator[Case]:
    functions = cos_nce_loss_ref, cos_nce_loss, "cos_nce_loss"
    tokens, cls = (Work(LOSS, title, make, *functions, cost).case for title in ("tokens", "cls"))
    half = torch.bfloat16
    yield tokens("cpu", headline=True, B=32, N=128, D=768)
    for b in (64, 128, 256, 512, 1024):
        yield cls("cpu", sweep="B", B=b, D=768)
    yield tokens("bert", half, headline=True, B=32, N=128, D=768)
    masked = Work(LOSS, "tokens, mask", make_masked, *functions, cost).case
    yield masked("bert", half, B=32, N=128, D=768)
    yield cls("bert", half, B=32, D=768)
    yield tokens("long", half, B=8, N=4096, D=4096)
    for b in (64, 256, 1024, 4096, 16384):
        yield cls("sweep", half, compile=False, sweep="B", B=b, D=768)


def test_contrastive(measure, case, provider):
    measure(case, provider)
