"""Attention maps: `attention`, the oracle; `RANDOM` calls against it; `subjects` of features."""

from collections.abc import Iterator

import torch
from torch import Tensor

import fastkd
from tests.support.draw import Case, Draw, reduced
from tests.support.subject import Subject


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
    B, H, N, layers = draw.size(zero=True), draw.pick([1, 2, 3]), draw.size(), draw.pick([1, 2])
    heads, reduction = draw.pick(["match", "mean"]), draw.pick(["mean", "sum", "none"])
    H_t = H if heads == "match" else draw.pick([1, 2, 5])
    options = {"heads": heads, "reduction": reduction, "backend": draw.backend}
    mask = draw.mask(B, N)
    argument = draw.mask_argument(mask)
    weights, factors = draw.weights(mask.any(1)) if layers == 1 else (None, mask.any(1).double())
    pair = mask[:, None, :, None] & mask[:, None, None, :]

    def side(h: int) -> Tensor:
        x = draw.features(B, h, N, N)
        # `failure` writes NaN to padded rows only; padded keys are in the rows of real tokens.
        return draw.laid_out(torch.where(pair, x, torch.tensor(float("nan"), dtype=x.dtype)))

    students = {f"s{i}": side(H) for i in range(layers)}
    teachers = {f"t{i}": side(H_t) for i in range(layers)}

    def call(**x: Tensor) -> Tensor:
        if layers == 1:
            return fastkd.attention_loss(x["s0"], x["t0"], argument, weights=weights, **options)
        sides = [x[n] for n in students], [x[n] for n in teachers]
        return fastkd.AttentionLoss(**options)(*sides, argument)

    def oracle(**x: Tensor) -> Tensor:
        pairs = zip(students, teachers, strict=True)
        losses = [attention(x[s], x[t], mask, heads) for s, t in pairs]
        return reduced(torch.stack(losses).mean(0) * factors, mask.any(1), reduction)

    return Case(call, oracle, students, teachers, scale=0.0)


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
