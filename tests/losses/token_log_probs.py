"""Log-probabilities of tokens: `token_log_probs`, the oracle; `RANDOM` calls against it."""

from collections.abc import Iterator

import torch
from torch import Tensor

import fastkd
from fastkd._core.products import multiplied_in_half
from tests.support.draw import Case, Draw
from tests.support.oracles import rounded_gradient
from tests.support.subject import Subject


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    ids: Tensor,
    temperature: float,
    form: fastkd.Head,
    products: torch.dtype | None = None,
) -> Tensor:
    """log q of each id, one position after the other; ``products`` of the backward pass."""
    rows = []
    for h, tokens in zip(hidden, ids, strict=True):
        logits = weight @ h
        logits = logits if products is None else rounded_gradient(logits, products)
        z = form.scale * (logits + bias)
        if form.softcap is not None:
            z = form.softcap * torch.tanh(z / form.softcap)
        z = (z - z.max().detach()) / temperature
        rows.append(z[tokens] - torch.exp(z).sum().log())
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
        found = token_log_probs(hidden, weight, bias, tokens, temperature, form, products)
        return found.view(shape)

    learning = {
        "hidden": draw.features(R, D),
        "weight": draw.features(V, D),
        "bias": draw.normal(V).to(draw.dtype),
    }
    products = draw.dtype if multiplied_in_half(learning["hidden"]) else None
    size = 30.0 * D**0.5 / temperature  # of the logits

    def slopes(hidden: Tensor, weight: Tensor, bias: Tensor) -> dict[str, float]:
        """Sizes of the gradients' terms 1[v = id] and q_v, which cancel where q is 1."""
        terms = 2 * scale / temperature / size
        return {
            "hidden": terms * float(weight.norm(dim=-1).amax()),
            "weight": terms * float(hidden.norm()),
            "bias": terms * R**0.5,
        }

    return Case(
        call, oracle, learning, scale=size, parameter_slopes=slopes, autocast=draw.chance(0.3)
    )


RANDOM = {"log_probs": random_log_probs}


def subjects(backend: str) -> Iterator[Subject]:
    """None: they compare no student with a teacher."""
    return iter(())
