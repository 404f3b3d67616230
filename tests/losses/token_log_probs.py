"""Log-probabilities of tokens: `token_log_probs`, the oracle; `RANDOM` calls against it."""

from collections.abc import Iterator

import torch
from torch import Tensor

import fastkd
from tests.support.draw import Case, Draw
from tests.support.subject import Subject


def token_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor, ids: Tensor, temperature: float, form: fastkd.Head
) -> Tensor:
    """log q of each id, one position after the other."""
    rows = []
    for h, tokens in zip(hidden, ids, strict=True):
        z = form.scale * (weight @ h + bias)
        if form.softcap is not None:
            z = form.softcap * torch.tanh(z / form.softcap)
        q = torch.exp((z - z.max().detach()) / temperature)
        rows.append((q[tokens] / q.sum()).log())
    return torch.stack(rows) if rows else hidden.sum() * ids


def random_log_probs(draw: Draw) -> Case:
    R, D, V = draw.size(zero=True), draw.size(), draw.size()
    temperature, cap = draw.pick([0.5, 1.0, 2.0]), draw.pick([None, 5.0])
    scale, chunk_bytes = draw.pick([1.0, 0.25]), draw.pick([None, 1, 300])
    shape = (R, draw.pick([1, 3])) if draw.chance(0.5) else (R,)
    ids = torch.randint(V, shape, generator=draw.generator)

    def call(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        head = fastkd.Head(weight, bias, scale, cap)
        options = {"temperature": temperature, "chunk_bytes": chunk_bytes}
        return fastkd.log_probs(hidden, head, ids, **options)

    def oracle(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        form = fastkd.Head(weight, bias, scale, cap)
        tokens = ids if ids.dim() == 2 else ids[:, None]
        found = token_log_probs(hidden, weight, bias, tokens, temperature, form)
        return found.view(shape)

    return Case(
        call,
        oracle,
        {
            "hidden": draw.features(R, D),
            "weight": draw.features(V, D),
            "bias": draw.normal(V).to(draw.dtype),
        },
        scale=30.0 * D**0.5 / temperature,
        autocast=draw.chance(0.3),
    )


RANDOM = {"log_probs": random_log_probs}


def subjects(backend: str) -> Iterator[Subject]:
    """None: they compare no student with a teacher."""
    return iter(())
