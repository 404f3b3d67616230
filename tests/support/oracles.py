"""Code shared by the oracles of `tests/losses`: float64, simple, from the papers.

An oracle is a loss's definition. It imports nothing from the package, whose references have
oracles of their own in these functions. They loop where the equation sums, are differentiable, and
take float64 tensors; masks are bool, True = real. Section numbers and equations are those of
`docs/math.md`.
"""

import torch
from torch import Tensor

# How far a unit row may be from norm 1: rounding a norm scales a whole row, which changes every
# relation of nearly parallel rows by as much, and no method can take it out. And how far a
# probability may be from what it is: near 1/D it is rounded by more than small logits were.
ROUNDED_ROWS = 0.0


def norm(x: Tensor, **dim) -> Tensor:
    """‖x‖ with gradient 0 at 0, and without overflow or underflow of its squares."""
    return torch.linalg.vector_norm(x, **dim)


def rounded(x: Tensor, *shape: int) -> Tensor:
    """``x`` times factors of ``shape`` within half of ROUNDED_ROWS of 1."""
    return x * (1 + ROUNDED_ROWS * (torch.rand(shape, dtype=x.dtype) - 0.5))


def rounded_gradient(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x``, whose gradient products in ``dtype`` round once: four times, to allow for chance."""
    step = 0.4 * ROUNDED_ROWS / torch.finfo(torch.float32).eps * torch.finfo(dtype).eps
    if step and x.requires_grad:
        x.register_hook(lambda g: g * (1 + step * (torch.rand(g.shape, dtype=g.dtype) - 0.5)))
    return x


def decomposed(a: Tensor) -> Tensor:
    """``a`` (n, n) with an error like an eigensolver's: rounding error of the matrix's norm.

    That of small entries, which may be all that a small eigenvalue is made of, is less.
    """
    if not ROUNDED_ROWS:
        return a
    x = torch.randn(a.shape, dtype=a.dtype)
    x = (x + x.mT) / (32 * len(a)) ** 0.5  # of norm ½, nearly
    return a + ROUNDED_ROWS * torch.linalg.matrix_norm(a.detach(), 2) * x


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Cosines of the rows of ``x`` and ``y`` (..., D), which broadcast.

    A zero vector has no direction: cosine and gradient are 0.
    """
    x, y = (
        (v / _or_one(v.detach().abs().amax(-1, keepdim=True)) for v in (x, y))
        if x.shape[-1]
        else (x, y)
    )
    sizes = norm(x, dim=-1) * norm(y, dim=-1)
    return (x * y).sum(-1) / _or_one(sizes) * (sizes.detach() != 0)


def _or_one(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1, x)


def pooled(x: Tensor, mask: Tensor, how: str) -> Tensor:
    """(B, N, D) to (B, D): the first real token, or the mean of the real ones; zeros without."""
    rows = []
    for sample, real in zip(x, mask, strict=True):
        tokens = sample[real]
        empty = x.new_zeros(x.shape[-1])
        rows.append(empty if not len(tokens) else tokens[0] if how == "cls" else tokens.mean(0))
    return torch.stack(rows) if rows else x.sum(1)
