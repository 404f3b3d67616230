"""TinyBERT: squared differences of attention maps."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from fastkd.attention import attention_loss, attention_loss_ref

from .features import features
from .harness import REFERENCE, Case, Provider, call, compiled, fastkd_providers

LOSS = "attention"


def make_maps(*, B, H, N, device, dtype) -> dict[str, Tensor]:
    """Probabilities, and a mask whose last sample is half padding."""
    make = functools.partial(features, B, H, N, N, device=device, dtype=torch.float32)
    student, teacher = (make(seed=seed).softmax(-1).to(dtype) for seed in (0, 1))
    mask = torch.ones(B, N, dtype=torch.bool, device=device)
    mask[-1, N // 2 :] = False
    return {"student": student.requires_grad_(), "teacher": teacher, "mask": mask}


def attention_case(
    set: str, dtype: torch.dtype = torch.float32, *, headline: bool = False, **sizes: int
) -> Case:
    """Sizes B, H, N."""
    entries = sizes["B"] * sizes["H"] * sizes["N"] ** 2
    return Case(
        loss=LOSS,
        title="maps",
        set=set,
        sizes=sizes,
        dtype=dtype,
        make=make_maps,
        providers=(
            Provider(REFERENCE, call(attention_loss_ref)),
            compiled(attention_loss_ref),
            *fastkd_providers(attention_loss, "attention_loss"),
        ),
        bytes_moved=3 * entries * dtype.itemsize,
        operations=6 * entries,
        headline=headline,
    )


def cases() -> Iterator[Case]:
    """Every size."""
    yield attention_case("cpu", headline=True, B=32, H=12, N=128)
    yield attention_case("bert", torch.bfloat16, B=32, H=12, N=128)
    yield attention_case("bert", headline=True, B=32, H=12, N=128)
    yield attention_case("long", torch.bfloat16, headline=True, B=4, H=32, N=2048)
