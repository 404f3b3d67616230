"""Precision, derivatives and large results of all losses."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from fastkd._core import extension
from fastkd._core.operator import RECORDING

# From this size the C library often returns memory to the system and requests it again each step.
LARGE = 1 << 22


def working_dtype(x: Tensor) -> torch.dtype:
    """Dtype of a loss and its sums: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, for what the forward pass of an autograd.Function returns.

    Such a result must not be another tensor of the forward pass under a second name, as ``.to`` of
    the same dtype or an operation in place returns: torch.compile of torch 2.11 drops its gradient.
    """
    return x if x.dtype == dtype else x.to(dtype)


def upcast(x: Tensor) -> Tensor:
    """``x`` in its working dtype."""
    return x.to(working_dtype(x))


def multiplies_in_float32() -> bool:
    """Whether products of float32 matrices may not be rounded to tf32 or bfloat16."""
    try:
        return torch._C._get_float32_matmul_precision() == "highest"
    except RuntimeError:  # the newer interface was written, as transformers' ``tf32=True`` does
        return torch.backends.cuda.matmul.fp32_precision in ("ieee", "none")


def values_readable(x: Tensor) -> bool:
    """Whether Python may read the values of ``x``: on the CPU, neither traced nor fake.

    On a GPU reading would wait for the device. Under torch.compile, torch.export and vmap, in a
    batch of upstream gradients, on the meta device and in fake tensors there are no values.
    """
    if torch.compiler.is_compiling():
        return False
    # A plain tensor is not fake, and `is_fake` costs more than the other checks together.
    plain = type(x) is Tensor and not torch._is_functional_tensor(x)
    return (
        x.is_cpu
        and (plain or not is_fake(x))
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and not torch._C._functorch.is_legacy_batchedtensor(x)
    )


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.empty`` on huge pages where the system has them: page faults cost less."""
    x = torch.empty(shape, dtype=dtype, device=device)
    large = extension.CPU and not torch.compiler.is_compiling() and x.nbytes >= LARGE
    if large and values_readable(x):
        torch.ops.fastkd_cpp.take_pages(x)
    return x


def saveable(x: Tensor) -> Tensor:
    """``x``, copied if it is an inference tensor, which autograd can't save."""
    # The compiler does not trace `is_inference`, and refuses inference tensors itself.
    return x.clone() if not torch.compiler.is_compiling() and x.is_inference() else x


def save_for_backward(ctx, *tensors: Tensor | None) -> None:
    """``ctx.save_for_backward`` of ``tensors``; inference tensors are copied."""
    ctx.save_for_backward(*(None if x is None else saveable(x) for x in tensors))


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply(*arguments)``, where a tensor may be passed twice, also under torch.compile.

    Under ``torch.no_grad`` the arguments are detached: ``ctx.needs_input_grad`` ignores that mode,
    and a function that computes gradients in its forward pass would compute them for nothing.

    Float constants must be literals in the code that ``function`` calls: with dynamic shapes the
    compiler treats a module's floats as inputs, and then fails at a second call.
    """
    if torch.compiler.is_compiling():
        given: list[Any] = []
        for argument in arguments:
            repeated = isinstance(argument, Tensor) and any(argument is other for other in given)
            given.append(argument.view_as(argument) if repeated else argument)
        arguments = tuple(given)
    if not torch.is_grad_enabled():
        arguments = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
    if not torch.compiler.is_compiling():
        recording = getattr(RECORDING, "active", None)
        if recording is not None:
            return recording.apply(function, arguments[0], arguments[1:])
    return function.apply(*arguments)


def as_rows(x: Tensor) -> Tensor:
    """(..., D) as (R, D). (R, D) is returned itself: a view costs host time, in backward too."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def dense_rows(*rows: Tensor) -> list[Tensor]:
    """Rows (R, D) whose last dimension is dense, as the kernels read them."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in rows]


def direction_ref(x: Tensor) -> Tensor:
    """x / ‖x‖, and zero for a zero vector, whose cosines are 0."""
    norm = x.norm(dim=-1, keepdim=True)
    return torch.where(norm == 0, 0, x / torch.where(norm == 0, 1, norm))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, bias):
        save_for_backward(ctx, a, b)
        with autocast_off(a):
            return a @ b if bias is None else torch.addmm(bias, a, b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        with autocast_off(grad):
            da = grad @ b.mT if ctx.needs_input_grad[0] else None
            db = a.mT @ grad if ctx.needs_input_grad[1] else None
        return da, db, grad.sum(0) if ctx.needs_input_grad[2] else None


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ b + bias (..., C) of a (..., D), without autocast, in the backward pass too.

    b is (D, C), or a batch like a's, then without bias.
    """
    if b.dim() > 2:
        return _Product.apply(a, b, bias)
    return _Product.apply(as_rows(a), b, bias).reshape(*a.shape[:-1], b.shape[-1])


class Projector(nn.Linear):
    """Linear layer that multiplies in the wider dtype of features and weight, without autocast."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Projected features (B, ..., C) of ``x`` (B, ..., D).

        Positions outside ``mask`` (bool, the leading dimensions of ``x``) give zeros, whatever they
        hold.
        """
        dtype = torch.promote_types(self.weight.dtype, x.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        projected = product(zero_padding(x, mask).to(dtype), self.weight.to(dtype).T, bias)
        return zero_padding(projected, mask)


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """``x`` (B, ..., D) with zeros at padded positions, even where they hold NaN."""
    return x if mask is None else torch.where(mask[..., None], x, 0)


def reduced(
    losses: Tensor, counted: Tensor | None, reduction: str, weights: Tensor | None = None
) -> Tensor:
    """Reduction ("none", "sum", or "mean" over ``counted``) of losses that are 0 elsewhere.

    All are counted where ``counted`` is None. ``weights`` are multiplied into the losses; the
    divisor of the mean stays the number counted.
    """
    if weights is not None:
        losses = losses * (weights if counted is None else weights.masked_fill(counted == 0, 0))
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    return total / (max(losses.numel(), 1) if counted is None else counted.sum().clamp_min(1))


def autocast_off(x: Tensor) -> AbstractContextManager:
    """Context without autocast; forward and backward both need it."""
    device = x.device.type
    if device == "meta":  # autocast refuses it
        return nullcontext()
    # Entering and leaving the context costs as much as a small loss; in a graph it costs nothing.
    if not torch.compiler.is_compiling() and not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def times_upstream(gradient: Tensor, upstream: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A gradient computed in the forward pass, times the upstream gradient, in ``dtype``.

    ``upstream`` is () for a scalar loss, of the gradient's first dimensions for several losses, or
    None for 1. The gradient may have a vocabulary's size: it is changed in place where its dtype is
    right. On the CPU an upstream of 1, as ``loss.backward()`` passes it, is recognised.
    """
    if upstream is None:
        return gradient.to(dtype)
    compiling = torch.compiler.is_compiling()
    # With ``retain_graph`` another pass may read what is saved, and a receiver may change it.
    shared = compiling or torch._C._autograd._get_current_graph_task_keep_graph()
    if upstream.dim() == 0 and values_readable(upstream) and upstream.item() == 1:
        return gradient.to(dtype, copy=gradient.dtype == dtype and shared)
    upstream = upstream.to(working_dtype(gradient))
    if upstream.dim():
        upstream = upstream[(...,) + (None,) * (gradient.dim() - upstream.dim())]
    if not shared and gradient.dtype == upstream.dtype == dtype:
        return gradient.mul_(upstream)
    if working_dtype(gradient) == dtype or compiling:
        return (upcast(gradient) * upstream).to(dtype)
    # Chunks of rows, so that the float32 product exists for one chunk at a time.
    product = torch.empty_like(gradient, dtype=dtype)
    step = max((1 << 24) // max(gradient[:1].numel(), 1), 1)
    parts = (x.split(step) for x in (gradient, upstream.expand_as(gradient), product))
    for rows, weight, part in zip(*parts, strict=True):
        torch.mul(upcast(rows), weight, out=part)
    return product


def once_differentiable(backward):
    """Decorate the ``backward`` of a Function: ``create_graph=True`` raises.

    PyTorch's decorator of this name raises only when the gradient is differentiated. That gradient
    doesn't depend on the inputs in the graph, so PyTorch skips the error and a Hessian is zeros.

    A batch of upstream gradients, of ``is_grads_batched=True`` or vmap, has a pass for each.
    """

    @functools.wraps(backward)
    def once(ctx, *grads):
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return backward(ctx, *grads)
        if torch.is_grad_enabled():
            raise RuntimeError("fastkd's losses have first derivatives only, no create_graph=True")
        if any(map(_is_batch, grads)):
            return _one_by_one(once, ctx, grads)
        return backward(ctx, *grads)

    return once


def _is_batch(x: Any) -> bool:
    functorch = torch._C._functorch
    return isinstance(x, Tensor) and (
        functorch.is_legacy_batchedtensor(x) or functorch.is_batchedtensor(x)
    )


def _one_by_one(backward: Callable[..., Any], ctx: Any, grads: Sequence[Any]) -> Any:
    """Gradients of a batch of upstream gradients, which kernels don't know."""
    functorch, first = torch._C._functorch, next(filter(_is_batch, grads))
    of_vmap = functorch.is_batchedtensor(first)
    level = functorch.maybe_get_level(first) if of_vmap else 1  # nothing nests is_grads_batched
    tools: Any = functorch if of_vmap else torch
    size = len(tools._remove_batch_dim(first, level, 1, 0))
    batches = [
        tools._remove_batch_dim(x, level, size, 0) if isinstance(x, Tensor) else [x] * size
        for x in grads
    ]
    each = SimpleNamespace(**(vars(ctx) | {"needs_input_grad": ctx.needs_input_grad}))
    saved, found = ctx.saved_tensors, []
    for of_one in zip(*batches, strict=True):
        # A pass may change what is saved.
        each.saved_tensors = tuple(None if x is None else x.clone() for x in saved)
        result = backward(each, *of_one)
        found.append(result if isinstance(result, tuple) else (result,))
    columns = zip(*found, strict=True)
    return tuple(
        None if x[0] is None else tools._add_batch_dim(torch.stack(x), 0, level) for x in columns
    )


class GradientInForward(torch.autograd.Function):
    """A loss whose gradients are computed in the forward pass; subclasses have ``forward``.

    ``forward`` saves a gradient for each argument that needs one, in their order, and the dtypes of
    these arguments in ``ctx.dtypes``. The gradients stay in the working dtype until the upstream
    gradient is known: in float16 they would underflow before the loss scale is multiplied in.
    """

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        found = iter([times_upstream(gradient, grad, dtype) for gradient, dtype in saved])
        return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)


class LossInCpp(GradientInForward):
    """A loss and its gradients by a C++ operator, which ``options.cpp(tensors, needs)`` calls."""

    # *tensors, because the compiler omits ctx where a call has as many arguments as forward has
    # parameters.
    @staticmethod
    def forward(ctx, options, *tensors):
        needs = ctx.needs_input_grad[1:]
        loss, *gradients = options.cpp(tensors, needs)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [tensors[i].dtype for i, needed in enumerate(needs) if needed]
        return loss


class _FirstOrderOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad


def first_order_only(x: Tensor) -> Tensor:
    """``x``, through which a second derivative raises an error instead of being silently wrong."""
    return _FirstOrderOnly.apply(x) if x.requires_grad else x


def cumulative_sum(x: Tensor, dim: int) -> Tensor:
    """``x.cumsum(dim)``, also on a GPU with deterministic algorithms, where torch's own raises."""
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        return sum_by_doubling(x, dim)
    return x.cumsum(dim)


def sum_by_doubling(x: Tensor, dim: int) -> Tensor:
    """Cumulative sums, in log2 of the length shifted additions."""
    length, step = x.shape[dim], 1
    while step < length:
        rest = length - step
        later = x.narrow(dim, step, rest) + x.narrow(dim, 0, rest)
        x, step = torch.cat([x.narrow(dim, 0, step), later], dim), 2 * step
    return x
