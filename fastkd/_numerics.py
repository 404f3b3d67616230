"""Working precision and derivative rules that every loss keeps."""

import functools

import torch
from torch import Tensor


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype a loss accumulates and comes back in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def upcast(x: Tensor) -> Tensor:
    """``x`` in its working dtype."""
    return x.to(working_dtype(x))


def autocast_off(x: Tensor) -> torch.autocast:
    """Context in which autocast does not touch the loss; needed in forward and backward alike."""
    return torch.autocast(x.device.type, enabled=False)


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("fastkd's losses have first derivatives only")


def once_differentiable(backward):
    """Decorate the ``backward`` of a Function: a second derivative raises.

    PyTorch's decorator of this name does nothing when the upstream gradient is a constant, and a
    gradient penalty would silently lose its gradient.
    """

    @functools.wraps(backward)
    def once(ctx, *grads):
        with torch.no_grad():
            gradients = backward(ctx, *grads)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return gradients
        single = isinstance(gradients, Tensor)
        guarded = tuple(
            None if g is None else _NoSecondDerivative.apply(g.detach().requires_grad_())
            for g in ((gradients,) if single else gradients)
        )
        return guarded[0] if single else guarded

    return once


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
