"""The border between Python and Triton: one callable a launcher, eager or compiled.

A launcher takes tensors (or lists of them) and plain numbers, allocates its results and starts
kernels. `operator` makes it what an autograd.Function calls:

    def _scaled_shapes(x, factor): return x.new_empty(x.shape)

    @operator(_scaled_shapes)
    def scaled(x: Tensor, factor: int) -> Tensor: ...  # allocate, kernel[grid](...), return

    class _Scaled(torch.autograd.Function):
        def forward(ctx, options, x): ctx.options = options; return scaled(x, options.factor)
        def backward(ctx, grad): return None, scaled(grad, ctx.options.factor)

    apply(_Scaled, Options(factor), x)  # `fastkd._core.numerics.apply`: a tensor may come twice

Options are one frozen dataclass, so that ``backward`` returns one None for them. They hold no
number made of sizes: a float of those is a new graph a size, and ``backward`` can't see an int of
them in a graph. It takes sizes from its tensors again, and the launcher divides.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Launcher = TypeVar("Launcher", bound=Callable[..., Any])


def operator(
    shapes: Callable[..., Any], mutates: Sequence[int] = ()
) -> Callable[[Launcher], Launcher]:
    """Decorate a launcher: a custom operator under torch.compile, the plain call otherwise.

    A custom operator costs more than the launches behind it, so only graphs get it. Its schema
    comes from the launcher's annotations; arguments are positional. ``shapes`` takes the same
    arguments and returns empty results; ``mutates`` gives the places of arguments that are written.

    The launcher runs on the device of its first tensor, and sees its tensors `aligned`, but for
    those that it writes to.
    """

    def decorate(launcher: Launcher) -> Launcher:
        @functools.wraps(launcher)
        def launch(*arguments: Any) -> Any:
            ready = [x if i in mutates else aligned(x) for i, x in enumerate(arguments)]
            with torch.cuda.device_of(_first_tensor(arguments)):
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
    """A tensor, or list of tensors, at addresses that are multiples of 16; copies only if not so.

    Triton compiles a kernel anew for a pointer that is none. Other values come back as they are.
    """
    if isinstance(x, Tensor):
        return x if x.data_ptr() % 16 == 0 else x.clone()
    if isinstance(x, list):
        return [aligned(one) if isinstance(one, Tensor) else one for one in x]
    return x


def _first_tensor(arguments: Sequence[Any]) -> Tensor:
    first = arguments[0]
    return first if isinstance(first, Tensor) else first[0]
