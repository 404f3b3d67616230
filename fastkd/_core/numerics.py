"""Working precision and derivative rules that every loss keeps."""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype a loss accumulates and comes back in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def upcast(x: Tensor) -> Tensor:
    """``x`` in its working dtype."""
    return x.to(working_dtype(x))


def values_readable(x: Tensor) -> bool:
    """Whether Python may look at the values of ``x``: on the CPU, not traced, not made up.

    On a GPU reading would wait for the device; under torch.compile, torch.export, vmap, on the
    meta device and for fake tensors there is nothing to read.
    """
    if torch.compiler.is_compiling():
        return False
    # Plain tensors are not made up, and the full question costs more than all others.
    plain = type(x) is Tensor and not torch._is_functional_tensor(x)
    return (
        x.is_cpu
        and (plain or not is_fake(x))
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def saveable(x: Tensor) -> Tensor:
    """``x``, copied if it was made under ``torch.inference_mode``: autograd can't save that."""
    # The compiler does not trace the question, and refuses such inputs by itself.
    return x.clone() if not torch.compiler.is_compiling() and x.is_inference() else x


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply(*arguments)``, in which under torch.compile too a tensor may come twice.

    Under ``torch.no_grad`` no argument asks for its gradient: ``ctx.needs_input_grad`` doesn't know
    of that, and what makes gradients along with the loss would make them for nobody.

    A constant that is a float stands as a literal in what the function calls: the compiler takes a
    module's floats for inputs where all is dynamic, and then fails at a second call.
    """
    if torch.compiler.is_compiling():
        given: list[Any] = []
        for argument in arguments:
            repeated = isinstance(argument, Tensor) and any(argument is other for other in given)
            given.append(argument.view_as(argument) if repeated else argument)
        arguments = tuple(given)
    if not torch.is_grad_enabled():
        arguments = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
    return function.apply(*arguments)


def in_range(x: Tensor, or_tiny: bool = False) -> tuple[Tensor, Tensor | None]:
    """``x`` (..., D), rows whose squares would overflow times a power of two, and that (..., 1).

    The factor is 1 for other rows, and None where it can be seen that it is so for all. With
    ``or_tiny`` squares don't underflow either.
    """
    if x.shape[-1] == 0:
        return x, None
    peak = torch.linalg.vector_norm(x.detach(), torch.inf, dim=-1, keepdim=True)
    largest = torch.finfo(x.dtype).max
    extreme = (peak > largest**0.25) & (peak <= largest)
    if or_tiny:
        extreme |= (peak < largest**-0.25) & (peak >= torch.finfo(x.dtype).tiny)
    if values_readable(x) and not bool(extreme.any()):
        return x, None
    mantissa, _ = torch.frexp(peak)
    factor = torch.where(extreme, mantissa / peak, 1)
    return x * factor, factor


def as_rows(x: Tensor) -> Tensor:
    """(..., D) as (R, D); rows stay what they are, since a view costs the host backward too."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def project(linear: nn.Linear, x: Tensor, mask: Tensor | None) -> Tensor:
    """``linear`` of ``x`` (B, ..., D) in the wider of both dtypes, as outside autocast.

    Positions outside ``mask`` (bool, the leading dimensions of ``x``) enter no product, and come
    back as zeros.
    """
    dtype = torch.promote_types(linear.weight.dtype, x.dtype)
    x = zero_padding(x, mask)
    with autocast_off(x):
        if dtype == linear.weight.dtype:
            projected = linear(x.to(dtype))
        else:  # means of a half type's tokens are wider than its weight
            bias = None if linear.bias is None else linear.bias.to(dtype)
            projected = F.linear(x, linear.weight.to(dtype), bias)
    return zero_padding(projected, mask)


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """``x`` (B, ..., D) with the padded positions zeroed, whatever stood there."""
    return x if mask is None else torch.where(mask[..., None], x, 0)


def reduced(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    """``losses``, zero where they are not ``counted``: "none", "sum", or "mean" of the others."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / counted.sum().clamp_min(1)


def autocast_off(x: Tensor) -> AbstractContextManager:
    """Context in which autocast does not touch the loss; needed in forward and backward alike."""
    device = x.device.type
    if device == "meta":  # which autocast refuses
        return nullcontext()
    # Entering and leaving it costs as much as a small loss; in a graph it costs nothing.
    if not torch.compiler.is_compiling() and not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def times_upstream(gradient: Tensor, upstream: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A gradient made along with its loss, times the loss's own, in another dtype.

    ``upstream`` is that of one loss (), None for 1, or of losses of the first dimensions. The
    gradient may be of a vocabulary's size: it is copied only if it changes. An upstream of 1, as of
    a loss that stands alone, is known on the CPU.
    """
    if upstream is None or (
        upstream.dim() == 0 and values_readable(upstream) and upstream.item() == 1
    ):
        return gradient.to(dtype)
    upstream = upstream.to(working_dtype(gradient))
    if upstream.dim():
        upstream = upstream[(...,) + (None,) * (gradient.dim() - upstream.dim())]
    if working_dtype(gradient) == dtype or torch.compiler.is_compiling():
        return (upcast(gradient) * upstream).to(dtype)
    # In parts, so that no product of the whole stands beside it.
    product = torch.empty_like(gradient, dtype=dtype)
    step = max((1 << 24) // max(gradient[:1].numel(), 1), 1)
    parts = (x.split(step) for x in (gradient, upstream.expand_as(gradient), product))
    for rows, weight, part in zip(*parts, strict=True):
        torch.mul(upcast(rows), weight, out=part)
    return product


def once_differentiable(backward):
    """Decorate the ``backward`` of a Function: ``create_graph=True`` raises.

    A gradient that raised only once it is differentiated would hang on nothing, and PyTorch runs
    no more than leads to the inputs that are asked for: a Hessian would be zeros, as it is by
    PyTorch's decorator of this name.
    """

    @functools.wraps(backward)
    def once(ctx, *grads):
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return backward(ctx, *grads)
        if torch.is_grad_enabled():
            raise RuntimeError("fastkd's losses have first derivatives only, no create_graph=True")
        return backward(ctx, *grads)

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
