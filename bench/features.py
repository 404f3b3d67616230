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
    shared: float = 1.0,
) -> Tensor:
    """Normal features plus ``shared`` in every entry: at 1.0 the mean cosine of two rows is ½."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)
    return x.add_(shared).to(dtype).requires_grad_(requires_grad)


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
