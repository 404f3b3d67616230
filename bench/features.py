"""Inputs that look like a language model's: every token shares a direction with all others."""

from collections.abc import Callable

import torch
from torch import Tensor


def features(
    *shape: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    requires_grad: bool = False,
    cosine: float = 0.5,
) -> Tensor:
    """Normal features plus a number in every entry, for this mean cosine of two rows."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)
    return x.add_((cosine / (1 - cosine)) ** 0.5).to(dtype).requires_grad_(requires_grad)


def zipf(rows: int, V: int, *, exponent: float, device: torch.device) -> Tensor:
    """Log-probabilities by Zipf's law (rows, V), the tokens in an order of each row."""
    generator = torch.Generator(device=device).manual_seed(9)
    ranks = torch.rand(rows, V, generator=generator, device=device).argsort(1)
    return ranks.add(1).float().log_().mul_(-exponent)


def padding(B: int, N: int, device: torch.device) -> Tensor:
    """A mask (B, N) of samples between N/2 and N tokens long."""
    lengths = torch.linspace(N / 2, N, B, device=device).round()
    return torch.arange(N, device=device) < lengths[:, None]


def labels(count: int, classes: int, *, device: torch.device, seed: int) -> Tensor:
    """Random labels of equally likely classes."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randint(classes, (count,), generator=generator, device=device)


def weighted(function: Callable[..., Tensor], matrix: Tensor, weight: Tensor) -> Tensor:
    """A scalar, whose gradient with respect to the function's result is ``weight``."""
    return (function(matrix) * weight).sum()
