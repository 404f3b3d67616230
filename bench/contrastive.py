"""LRC-BERT: COS-NCE."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from fastkd.contrastive import cos_nce_loss, cos_nce_loss_ref

from .features import features
from .harness import REFERENCE, Case, Provider, call, compiled, fastkd_providers

LOSS = "contrastive"


def make(*, B, D, device, dtype, N=0) -> dict[str, Tensor]:
    """Student and teacher (B, D), or (B, N, D)."""
    shape = (B, N, D) if N else (B, D)
    make = functools.partial(features, *shape, device=device, dtype=dtype)
    return {"student": make(seed=0, requires_grad=True), "teacher": make(seed=1)}


def case(
    set: str,
    title: str,
    dtype: torch.dtype = torch.float32,
    *,
    compile: bool = True,
    sweep: str = "",
    headline: bool = False,
    **sizes: int,
) -> Case:
    """Sizes B, D and, for tokens, N; a dozen operations an entry."""
    entries = sizes["B"] * sizes.get("N", 1) * sizes["D"]
    return Case(
        loss=LOSS,
        title=title,
        set=set,
        sizes=sizes,
        dtype=dtype,
        make=make,
        providers=(
            Provider(REFERENCE, call(cos_nce_loss_ref)),
            *([compiled(cos_nce_loss_ref)] if compile else []),
            *fastkd_providers(cos_nce_loss, "cos_nce_loss"),
        ),
        bytes_moved=3 * entries * dtype.itemsize,
        operations=12 * entries,
        sweep=sweep,
        headline=headline,
    )


def cases() -> Iterator[Case]:
    """Every size."""
    half = torch.bfloat16
    yield case("cpu", "tokens", headline=True, B=32, N=128, D=768)
    for b in (64, 128, 256, 512, 1024):
        yield case("cpu", "cls", compile=False, sweep="B", B=b, D=768)
    yield case("bert", "tokens", half, headline=True, B=32, N=128, D=768)
    yield case("bert", "cls", half, B=32, D=768)
    yield case("long", "tokens", half, B=8, N=4096, D=4096)
    for b in (64, 256, 1024, 4096, 16384):
        yield case("sweep", "cls", half, compile=False, sweep="B", B=b, D=768)
