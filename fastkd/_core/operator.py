"""Triton launchers as operators: one callable for eager and compiled code.

A launcher takes tensors (or lists of them) and plain numbers, allocates its results and starts
kernels. The decorator `operator` makes it callable from an autograd.Function:

    def _scaled_shapes(x, factor): return x.new_empty(x.shape)

    @operator(_scaled_shapes)
    def scaled(x: Tensor, factor: int) -> Tensor: ...  # allocate, kernel[grid](...), return

    class _Scaled(torch.autograd.Function):
        def forward(ctx, options, x): ctx.options = options; return scaled(x, options.factor)
        def backward(ctx, grad): return None, scaled(grad, ctx.options.factor)

    apply(_Scaled, Options(factor), x)  # `fastkd._core.numerics.apply`: x may be passed twice

Options are one frozen dataclass, so that ``backward`` returns one None for them. They hold no
number computed from sizes: under torch.compile such a float compiles a graph for each size, and an
int isn't visible in ``backward``. So ``backward`` reads sizes from its tensors, and the launcher
divides by them.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Launcher = TypeVar("Launcher", bound=Callable[..., Any])

# ``RECORDING.of``: what records this thread's launches, if anything; see `fastkd._core.plans`.
RECORDING = threading.local()


def launch_kernel(kernel: Any, grid: Sequence[int], *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel. Every launcher does so here, where a launch can be recorded."""
    compiled = kernel[grid](*arguments, **options)
    recording = getattr(RECORDING, "of", None)
    if recording is not None:
        recording.launch(kernel, compiled, grid, arguments, options)


def operator(
    shapes: Callable[..., Any], mutates: Sequence[int] = ()
) -> Callable[[Launcher], Launcher]:
    """Decorate a launcher: a custom operator under torch.compile, a plain call in eager mode.

    In eager mode a custom operator would cost more than its kernel launches. Its schema comes from
    the launcher's annotations, and its arguments are positional. The launcher runs on the device of
    its first tensor; its tensors are `aligned`, except for those that it writes to.

    Args:
        shapes: takes the launcher's arguments and returns empty results.
        mutates: positions of the arguments that the launcher writes to.
    """

    def decorate(launcher: Launcher) -> Launcher:
        @functools.wraps(launcher)
        def launch(*arguments: Any) -> Any:
            ready = [x if i in mutates else aligned(x) for i, x in enumerate(arguments)]
            first = arguments[0]
            with torch.cuda.device_of(first if isinstance(first, Tensor) else first[0]):
                return launcher(*ready)

        names = launcher.__code__.co_varnames
        compiled = torch.library.custom_op(
            f"fastkd::{launcher.__name__}", launch, mutates_args=[names[i] for i in mutates]
        )
        compiled.register_fake(shapes)

        @functools.wraps(launcher)
        def call(*arguments: Any) -> Any:
            return (compiled if torch.compiler.is_compiling() else launch)(*arguments)

        return cast(Launcher, call)

    return decorate


def aligned(x: Any) -> Any:
    """``x`` with its tensors at addresses that are multiples of 16, copied where they are not.

    Triton compiles another kernel for an unaligned pointer. ``x`` may be a tensor, a list, or any
    other value, which is returned unchanged.
    """
    if isinstance(x, Tensor):
        return x if x.data_ptr() % 16 == 0 else x.clone()
    if isinstance(x, list):
        return [aligned(one) if isinstance(one, Tensor) else one for one in x]
    return x
