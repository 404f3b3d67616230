"""Losses where no kernel runs: the reference in float64, a chunk of groups at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fastkd._core.numerics import GradientInForward, apply, autocast_off, saveable, working_dtype

# Types of devices without float64. In float32 rows that hardly differ lose digits: at a mean cosine
# of 0.99 relations have gradients with errors of 1e-4, and equal rows may give a wrong gradient.
NO_FLOAT64 = ("mps",)


class _Call(NamedTuple):
    losses: Callable[..., Tensor]
    entries: int


def by_reference(losses: Callable[..., Tensor], entries: int, *tensors: Tensor | None) -> Tensor:
    """Losses (G,) of groups that don't depend on each other, with first derivatives.

    Args:
        losses: losses (g,) of some groups from their parts (g, ...) of ``tensors``, differentiable.
            Floating-point tensors come in float64, or float32 on a device without float64.
        entries: numbers that ``losses`` computes for one group.
        tensors: (G, ...) or None.
    """
    given = (x if x is None else saveable(x) for x in tensors)
    return apply(_ByReference, _Call(losses, entries), *given)


class _ByReference(GradientInForward):
    """Memory beyond the gradients is that of one chunk."""

    # The compiler omits ctx where a call has as many arguments as forward has parameters, here two.
    @staticmethod
    def forward(ctx, *arguments):
        call, *tensors = arguments
        needs = ctx.needs_input_grad[1:]
        losses, gradients = in_chunks(call.losses, call.entries, tensors, needs)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [x.dtype for x, needed in zip(tensors, needs, strict=True) if needed]
        return losses


def in_chunks(
    losses: Callable[..., Tensor],
    entries: int,
    tensors: Sequence[Tensor | None],
    needs: Sequence[bool],
    out: Sequence[Tensor] = (),
) -> tuple[Tensor, list[Tensor]]:
    """Losses (G,) and gradients of their sum, without a graph; arguments as in `by_reference`.

    Args:
        needs: which tensors need a gradient.
        out: for the gradients, if given; it may be the tensors themselves.
    """
    first = tensors[0]
    assert first is not None
    groups = first.shape[0]
    learning = [x for x, needed in zip(tensors, needs, strict=True) if needed and x is not None]
    gradients = list(out) or [torch.empty_like(x, dtype=working_dtype(x)) for x in learning]
    chunks = _chunks(first, groups * entries)
    step = (groups + chunks - 1) // chunks
    found = []
    with autocast_off(first):
        for i in range(chunks):
            part = slice(i * step, (i + 1) * step)
            given = []
            for x in tensors:  # a comprehension would fix the sizes in a compiled graph
                if x is not None:
                    x = x[part].to(wide_dtype(x)) if x.is_floating_point() else x[part]
                given.append(x)
            of_part, pulled = _with_gradients(losses, given, needs)
            found.append(of_part)
            for gradient, x in zip(gradients, pulled, strict=True):
                gradient[part] = x
    return torch.cat(found).to(working_dtype(first)), gradients


def _with_gradients(losses, given, needs):
    """Losses, and the gradients of their sum for the tensors that learn."""
    learning = [x for x, needed in zip(given, needs, strict=True) if needed]

    def losses_of_needed(*learning):
        rest = iter(learning)
        return losses(*(next(rest) if n else x for x, n in zip(given, needs, strict=True)))

    if not learning:
        return losses_of_needed(), []
    if torch.compiler.is_compiling():
        found, pull_back = torch.func.vjp(losses_of_needed, *learning)
        return found, pull_back(torch.ones_like(found))
    # Hooks on saved tensors, as checkpointing sets them, are for the graph around this function;
    # the innermost ones alone are called. An output saved with its graph would hold itself.
    learning = [x.detach().requires_grad_() for x in learning]
    with _autograd(), torch.enable_grad(), saved_tensors_hooks(Tensor.detach, lambda x: x):
        found = losses_of_needed(*learning)
        gradients = torch.autograd.grad(found.sum(), learning)
    return found.detach(), gradients


@contextmanager
def _autograd() -> Iterator[None]:
    """Context with autograd, also inside a custom operator, which runs below it."""
    key, set_of = torch._C.DispatchKey, torch._C.DispatchKeySet
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    exclude = exclude - set_of(key.AutogradFunctionality) - set_of(key.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        yield


def wide_dtype(x: Tensor) -> torch.dtype:
    """Floating-point type in which references compute on the device of ``x``."""
    return torch.float32 if x.device.type in NO_FLOAT64 else torch.float64


def _chunks(x: Tensor, entries: int) -> int:
    """Number of chunks: on the CPU they should stay in the cache, elsewhere they bound the memory.

    A power of two, which gives few graphs as sizes change.
    """
    eager_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
    most = 2**18 if eager_cpu else 2**25
    chunks = 1
    while chunks < x.shape[0] and entries > chunks * most:
        chunks *= 2
    return chunks
