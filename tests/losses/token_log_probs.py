"""Log-probabilities of tokens: `token_log_probs`, the oracle; `RANDOM` calls against it."""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import fastkd
from fastkd._core.products import multiplied_in_half
from tests.support.compare import TOLERANCE
from tests.support.draw import OF_HEADS, Case, Draw
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
    # More leading dimensions; of one row none.
    lead = draw.pick([(R,), (1, R), (R, 1, 1), *[()] * (R == 1)])

    def call(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        head = fastkd.Head(weight, bias, scale, cap)
        given = hidden.view(*lead, D), head, ids.view((*lead, *shape[1:]))
        if draw.backend == "reference":
            found = fastkd.functional.log_probs_ref(*given, temperature=temperature)
        else:  # a draw.function( without backends
            found = fastkd.log_probs(*given, temperature=temperature, chunk_bytes=chunk_bytes)
        return found.view(shape)

    def oracle(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        form = fastkd.Head(weight, bias, scale, cap)
        tokens = ids if ids.dim() == 2 else ids[:, None]
        found = token_log_probs(hidden, weight, bias, tokens, temperature, form, products)
        return found.view(shape)

    learning = {
        "hidden": draw.features(R, D, kinds=OF_HEADS),
        "weight": draw.features(V, D, kinds=OF_HEADS),
        "bias": draw.normal(V).to(draw.dtype),
    }
    products = draw.dtype if multiplied_in_half(learning["hidden"]) else None
    size = 30.0 * D**0.5 / temperature  # of the logits

    def slopes(hidden: Tensor, weight: Tensor, bias: Tensor) -> dict[str, float]:
        """Sizes of the gradients' terms 1[v = id] and q_v, which cancel where q is 1.

        q is wrong by the rounding of the largest logits, which the backward pass computes again.
        """
        longest = float(hidden.norm(dim=-1).amax() if R else 0) * float(weight.norm(dim=-1).amax())
        working = torch.float64 if draw.dtype == torch.float64 else torch.float32
        rounding = torch.finfo(working).eps / TOLERANCE[working] * scale * longest / temperature
        terms = 2 * scale / temperature / size * (1 + rounding)
        return {
            "hidden": terms * float(weight.norm(dim=-1).amax()),
            "weight": terms * float(hidden.norm()),
            "bias": terms * R**0.5,
        }

    return Case(
        call, oracle, learning, scale=size, parameter_slopes=slopes, autocast=draw.chance(0.3),
        of_rows=True,
    )  # fmt: skip


RANDOM = {"log_probs": random_log_probs}


def subjects(backend: str) -> Iterator[Subject]:
    """None: they compare no student with a teacher."""
    return iter(())


def edges(backend: str) -> Iterator[tuple]:
    loss = fastkd.functional.log_probs_ref if backend == "reference" else fastkd.log_probs
    hidden, none = torch.randn(3, 5), torch.zeros(3).long()
    yield "one token", lambda h: loss(h, torch.randn(1, 5), none), hidden, 0.0, 0.0, 0.0
    head = fastkd.Head(torch.randn(4, 5), torch.tensor([-torch.inf, 0, 0, 0]))
    yield "a token of probability 0", lambda h: loss(h, head, none).exp(), hidden, 0.0, 0.0
    # A gradient twice.
    weight, pair = torch.randn(4, 5), torch.tensor([[1, 1]] * 3)
    one = loss(hidden, weight, pair[:, 0])
    yield "repeated ids", lambda h: loss(h, weight, pair), hidden, one[:, None], None


def growing() -> dict[str, tuple]:
    def calls() -> Iterator[tuple]:
        for R in (4, 5, 8):
            hidden, weight = (torch.randn(n, 6, requires_grad=True) for n in (R, 20))
            yield hidden, weight, torch.randint(20, (R, 3))

    return {"log-probabilities": (functools.partial(fastkd.log_probs, chunk_bytes=170), calls())}


def bad() -> Iterator[tuple[str, Callable]]:
    right = {
        "hidden": torch.zeros(2, 3, 4), "head": torch.zeros(9, 4), "ids": torch.ones(2, 3).long()
    }  # fmt: skip
    for words, change in (
        ("hidden must have 4 features", {"hidden": torch.zeros(2, 3, 5)}),
        ("hidden must be bfloat16", {"hidden": torch.zeros(2, 3, 4).long()}),
        ("head must have 2 dimensions", {"head": torch.zeros(9)}),
        ("head must be a Tensor or Head", {"head": "lm_head"}),
        ("ids must have shape", {"ids": torch.zeros(2, 2).long()}),
        ("ids must be integers", {"ids": torch.zeros(2, 3)}),
        ("ids must be a Tensor", {"ids": [[1, 2, 3]] * 2}),
        ("ids must be token ids 0 to 8, got 9", {"ids": torch.full((2, 3), 9)}),
        ("ids must be token ids 0 to 8, got -1", {"ids": torch.full((2, 3), -1)}),
        ("temperature must be greater than 0", {"temperature": 0.0}),
    ):
        yield words, functools.partial(fastkd.log_probs, **right | change)
    hidden, weight, of = torch.randn(7, 6), torch.randn(20, 6), fastkd.TopK.of
    yield "k must be at most the head's 20 tokens, got 21", lambda: of(hidden, weight, 21)
    yield "k must be at least 1", lambda: of(hidden, weight, 0)
    yield "hidden requires grad", lambda: of(hidden.clone().requires_grad_(), weight, 2)
    yield "tail must be one of", lambda: of(hidden, weight, 2, tail="rest")
