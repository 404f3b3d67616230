"""Distance of hidden states: squared difference, cosine and smooth ℓ1."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from fastkd.losses.hidden_states import hidden_state_loss, hidden_state_loss_ref

from .case import Case, Work
from .features import features

LOSS = "hidden_states"


def make_states(*, B, N, D, device, dtype) -> dict[str, Tensor]:
    """Hidden states, and a mask whose last sample is half padding."""
    make = functools.partial(features, B, N, D, device=device, dtype=dtype)
    mask = torch.ones(B, N, dtype=torch.bool, device=device)
    mask[-1, N // 2 :] = False
    return {"student": make(seed=0, requires_grad=True), "teacher": make(seed=1), "mask": mask}


def cost(*, B, N, D) -> tuple[int, int]:
    return 3 * B * N * D, 8 * B * N * D


def cases() -> Iterator[Case]:
    for kind in ("mse", "cosine", "smooth_l1"):
        functions = (
            functools.partial(function, kind=kind)
            for function in (hidden_state_loss_ref, hidden_state_loss)
        )
        case = Work(LOSS, kind, make_states, *functions, "hidden_state_loss", cost).case
        yield case("cpu", B=32, N=128, D=768)
        if kind == "mse":
            for n in (32, 128, 512):
                yield case("cpu", sweep="N", B=8, N=n, D=768)
        yield case("bert", torch.bfloat16, B=32, N=128, D=768)
        yield case("long", torch.bfloat16, B=8, N=4096, D=4096)


def test_hidden_states(measure, case, provider):
    measure(case, provider)
