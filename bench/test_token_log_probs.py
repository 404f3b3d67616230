"""Log-probabilities of tokens from hidden states and a head."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from fastkd.lm.log_probs import log_probs, log_probs_ref

from .case import REFERENCE, Case, Provider, WhyNot, call
from .features import features

LOSS = "token_log_probs"


def make(*, rows, D, V, K, device, dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(V, (rows, K), generator=generator).to(device)
    hidden = features(rows, D, device=device, dtype=dtype, seed=0, requires_grad=True)
    head = features(V, D, device=device, dtype=dtype, seed=1, cosine=0.0) * D**-0.5
    weight = features(rows, K, device=device, dtype=torch.float32, seed=2, cosine=0.0)
    return {"hidden": hidden, "head": head.requires_grad_(), "ids": ids, "weight": weight}


def weighted_sum(function, hidden, head, ids, weight) -> Tensor:
    return (function(hidden, head, ids) * weight).sum()


def only_on(kind: str) -> WhyNot:
    """Reason on other devices: the backend is chosen by the device."""
    return lambda device: None if device.type == kind else f"runs on {kind} alone"


def cases() -> Iterator[Case]:
    ours = call(functools.partial(weighted_sum, log_probs))
    for set, dtype, rows, D, V, sweep in (
        ("cpu", torch.float32, 1024, 256, 32000, ""),
        ("cpu", torch.float32, 256, 256, 32000, "rows"),
        ("cpu", torch.float32, 2048, 256, 32000, "rows"),
        ("long", torch.bfloat16, 8192, 4096, 128256, ""),
    ):
        yield Case(
            loss=LOSS,
            title="4 tokens",
            set=set,
            sizes={"rows": rows, "D": D, "V": V, "K": 4},
            dtype=dtype,
            make=make,
            providers=(
                Provider(REFERENCE, call(functools.partial(weighted_sum, log_probs_ref))),
                Provider("fastkd torch", ours, only_on("cpu")),
                Provider("fastkd triton", ours, only_on("cuda")),
            ),
            bytes_moved=3 * V * D * dtype.itemsize,
            operations=8 * rows * V * D,
            sweep=sweep,
        )


def test_token_log_probs(measure, case, provider):
    measure(case, provider)
