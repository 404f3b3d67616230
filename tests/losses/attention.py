"""Attention maps: `attention`, the oracle, and the tables of `tests/losses/__init__.py`."""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import fastkd
from tests.support.draw import BATCH, Case, Draw, reduced
from tests.support.subject import Subject, function_of


def attention(student: Tensor, teacher: Tensor, mask: Tensor, heads: str) -> Tensor:
    """TinyBERT, eq. 7, of each sample: the mean over heads of the MSE of the real tokens' pairs."""
    losses = []
    for A_s, A_t, real in zip(student, teacher, mask, strict=True):
        A_s, A_t = A_s[:, real][:, :, real], A_t[:, real][:, :, real]
        if not real.any():
            losses.append(A_s.sum())
        elif heads == "mean":
            losses.append((A_s.mean(0) - A_t.mean(0)).square().mean())
        else:
            pairs = zip(A_s, A_t, strict=True)
            losses.append(torch.stack([(s - t).square().mean() for s, t in pairs]).mean())
    return torch.stack(losses) if losses else student.sum((1, 2, 3))


def random_attention(draw: Draw) -> Case:
    B, N = draw.sizes(BATCH, (8, 130), most=2**9)
    B, H, layers = draw.pick([B, B, B, 0]), draw.pick([1, 2, 3]), draw.pick([1, 1, 2, 3])
    heads, reduction = draw.pick(["match", "mean"]), draw.pick(["mean", "sum", "none"])
    mask = draw.mask(B, N)
    argument = draw.mask_argument(mask)
    weights, factors = draw.weights(mask.any(1)) if layers == 1 else (None, mask.any(1).double())
    pair = mask[:, None, :, None] & mask[:, None, None, :]
    if draw.backend == "reference":
        layers = 1
    module = None
    if layers > 1 or (weights is None and draw.backend != "reference" and draw.chance(0.3)):
        module = draw.module(fastkd.AttentionLoss, heads=heads, reduction=reduction)

    def side(h: int) -> Tensor:
        x = draw.features(B, h, N, N)
        if draw.backend == "reference":
            return x
        # `failure` writes NaN to padded rows only; padded keys are in the rows of real tokens.
        return draw.laid_out(torch.where(pair, x, torch.tensor(float("nan"), dtype=x.dtype)))

    counts = [(H, H if heads == "match" else draw.pick([1, 2, 5])) for _ in range(layers)]
    if layers > 1 and draw.chance(0.3):
        counts[1] = (H + 1, H + 1)  # a layer with another number of heads
    students = {f"s{i}": side(h) for i, (h, _) in enumerate(counts)}
    teachers = {f"t{i}": side(h) for i, (_, h) in enumerate(counts)}
    loss = draw.function("attention_loss")

    def call(**x: Tensor) -> Tensor:
        if module is None:
            options = {"weights": weights, "heads": heads, "reduction": reduction}
            return loss(x["s0"], x["t0"], argument, **options)
        return module([x[n] for n in students], [x[n] for n in teachers], argument)

    def oracle(**x: Tensor) -> Tensor:
        pairs = zip(students, teachers, strict=True)
        losses = [attention(x[s], x[t], mask, heads) for s, t in pairs]
        return reduced(torch.stack(losses).mean(0) * factors, mask.any(1), reduction)

    return Case(call, oracle, students, teachers, scale=0.0, of_rows=True)


RANDOM = {"attention": random_attention}


def maps(x: Tensor) -> Tensor:
    """Two heads (B, 2, N, N) of features (B, N, D), with NaN in rows and columns of padding."""
    if not isinstance(x, Tensor) or x.is_sparse:
        return x
    heads = [x[..., i, None] for i in (0, 1)]
    return torch.stack([rows - 2 * rows.mT for rows in heads], 1)  # ∞ − ∞ is NaN


def subjects(backend: str) -> Iterator[Subject]:
    for name, options in (("", {}), (" of means", {"heads": "mean"})):
        yield Subject(
            f"attention_loss{name}",
            lambda s, t, m, options=options: fastkd.attention_loss(
                maps(s), maps(t), m, backend=backend, **options
            ),
        )
    module = fastkd.AttentionLoss(backend=backend)
    yield Subject("AttentionLoss", lambda s, t, m: module(maps(s), maps(t), m), module)


def examples(backend: str) -> Iterator[tuple]:
    loss = function_of("attention_loss", backend)
    student = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]], [[0.5, 0.5], [0.5, 0.5]]]])
    teacher = torch.tensor([[[[0.0, 1.0], [0.0, 1.0]], [[0.5, 0.5], [0.5, 0.5]]]])
    # Head by head: MSE ½ and 0. The means differ by ½ in two of four entries.
    yield "head by head", loss(student, teacher), 0.25
    yield "mean of heads", loss(student, teacher, heads="mean"), 0.125
    yield "one token", loss(student, teacher, torch.tensor([[1, 0]])), 0.5


def edges(backend: str) -> Iterator[tuple]:
    for heads in ("match", "mean"):
        loss = functools.partial(function_of("attention_loss", backend), heads=heads)
        x = torch.randn(2, 2, 5, 5)
        yield f"{heads}: itself", lambda s, loss=loss, x=x: loss(s, x), x, 0.0, 0.0, 0.0
        none = x[..., :0, :0]
        yield f"{heads}: no tokens", lambda s, loss=loss: loss(s, s.detach()), none, 0.0, 0.0
    loss = function_of("attention_loss", backend)
    large = torch.full((1, 8, 64, 64), 1e17)
    yield "large scores", lambda s: loss(s, 0 * large), large, 1e34, 2e17 / large.numel()


def bad() -> Iterator[tuple[str, Callable]]:
    right = {"student": torch.zeros(2, 3, 4, 4), "teacher": torch.zeros(2, 3, 4, 4)}
    for words, change in (
        ("student must have 4 dimensions", {"student": torch.zeros(2, 3, 4)}),
        ("queries and keys of the same tokens", {"student": torch.zeros(2, 3, 4, 5)}),
        ("must have at least one head, got 0 and 3", {"student": torch.zeros(2, 0, 4, 4)}),
        ("has 2 heads .* heads='mean'", {"student": torch.zeros(2, 2, 4, 4)}),
    ):
        yield words, functools.partial(fastkd.attention_loss, **right | change)
    module, x = fastkd.AttentionLoss, right["student"]
    yield "student has 2 layers but teacher has 1", lambda: module()([x, x], [x])
    for y in (x[:1], x[..., :3, :3]):
        yield "layers of the same samples and tokens", lambda y=y: module()([x, y], [x, y])
