"""Working precision and derivative rules that every loss keeps."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype a loss accumulates and comes back in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def upcast(x: Tensor) -> Tensor:
    """``x`` in its working dtype."""
    return x.to(working_dtype(x))


def autocast_off(x: Tensor) -> torch.autocast:
    """Context in which autocast does not touch the loss; needed in forward and backward alike."""
    return torch.autocast(x.device.type, enabled=False)


class _FirstOrderOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad


def first_order_only(x: Tensor) -> Tensor:
    """``x`` itself; a second derivative through it raises instead of being silently wrong."""
    return _FirstOrderOnly.apply(x) if x.requires_grad else x
