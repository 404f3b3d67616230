"""TinyBERT: squared differences of attention maps."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from fastkd.losses.attention import attention_loss, attention_loss_ref

from .case import Case, Work
from .features import features

LOSS = "attention"


def make_maps(*, B, H, N, device, dtype) -> dict[str, Tensor]:
    """Probabilities, and a mask whose last sample is half padding."""
    make = functools.partial(features, B, H, N, N, device=device, dtype=torch.float32)
    student, teacher = (make(seed=seed).softmax(-1).to(dtype) for seed in (0, 1))
    mask = torch.ones(B, N, dtype=torch.bool, device=device)
    mask[-1, N // 2 :] = False
    return {"student": student.requires_grad_(), "teacher": teacher, "mask": mask}


def cost(*, B, H, N) -> tuple[int, int]:
    return 3 * B * H * N**2, 6 * B * H * N**2


def cases() -> Iterator[Case]:
    case = Work(
        LOSS, "maps", make_maps, attention_loss_ref, attention_loss, "attention_loss", cost
    ).case
    yield case("cpu", headline=True, B=32, H=12, N=128)
    for n in (32, 64, 128, 256):
        yield case("cpu", sweep="N", B=8, H=12, N=n)
    yield case("bert", torch.bfloat16, B=32, H=12, N=128)
    yield case("bert", headline=True, B=32, H=12, N=128)
    yield case("long", torch.bfloat16, headline=True, B=4, H=32, N=2048)


def test_attention(measure, case, provider):
    measure(case, provider)
