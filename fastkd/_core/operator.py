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

Options are one frozen dataclass, so that ``backward`` returns one None for them. A launcher may
take one too; its fields are arguments of the custom operator. They hold no number computed from
sizes: under torch.compile such a float compiles a graph for each size, and an int isn't visible in
``backward``. So ``backward`` reads sizes from its tensors, and the launcher divides by them.
"""

import dataclasses
import functools
import inspect
import threading
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Launcher = TypeVar("Launcher", bound=Callable[..., Any])

# ``RECORDING.active``: what records this thread's launches, if anything; see `fastkd._core.plans`.
RECORDING = threading.local()


def launch_kernel(kernel: Any, grid: Sequence[int], *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel. Every launcher does so here, where a launch can be recorded."""
    recording = getattr(RECORDING, "active", None)
    if recording is None:
        kernel[grid](*arguments, **options)
    else:
        recording.launch(kernel, grid, arguments, options)


def operator(
    shapes: Callable[..., Any], mutates: Sequence[int] = ()
) -> Callable[[Launcher], Launcher]:
    """Decorate a launcher: a custom operator under torch.compile, a plain call in eager mode.

    In eager mode a custom operator would cost more than its kernel launches. Its schema comes from
    the launcher's annotations, a dataclass as its fields, and its arguments are positional. The
    launcher runs on the device of its first tensor; its tensors are `aligned`, except for those
    that it writes to.

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

        written = inspect.signature(launcher)
        kinds = {name: x.annotation for name, x in written.parameters.items()}
        leaves = [leaf for name, kind in kinds.items() for leaf in _leaves(kind, name)]
        signature = inspect.Signature(
            [
                inspect.Parameter("_".join(path), inspect.Parameter.POSITIONAL_OR_KEYWORD,
                                  annotation=kind)
                for path, kind in leaves
            ],
            return_annotation=written.return_annotation,
        )  # fmt: skip

        def of_leaves(function: Callable[..., Any]) -> Callable[..., Any]:
            def flat(*values: Any) -> Any:
                rest = iter(values)
                return function(*(_filled(kind, rest) for kind in kinds.values()))

            vars(flat)["__signature__"] = signature
            return flat

        compiled = torch.library.custom_op(
            f"fastkd::{launcher.__name__}",
            of_leaves(launch),
            mutates_args=[list(kinds)[i] for i in mutates],
        )
        compiled.register_fake(of_leaves(shapes))

        @functools.wraps(launcher)
        def call(*arguments: Any) -> Any:
            if not torch.compiler.is_compiling():
                return launch(*arguments)
            given = dict(zip(kinds, arguments, strict=True))
            return compiled(*(_value(given[name], path) for (name, *path), _ in leaves))

        return cast(Launcher, call)

    return decorate


_hints = functools.cache(typing.get_type_hints)
_has_fields: Callable[[Any], bool] = dataclasses.is_dataclass


def _leaves(kind: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Path and type of an argument, or of each field of a dataclass."""
    if not _has_fields(kind):
        yield path, kind
    else:
        for name, of_field in _hints(kind).items():
            yield from _leaves(of_field, *path, name)


def _value(x: Any, path: Sequence[str]) -> Any:
    for name in path:
        x = getattr(x, name)
    return x


def _filled(kind: Any, values: Iterator[Any]) -> Any:
    """An argument of the type ``kind``, from the values of its `_leaves`."""
    if not _has_fields(kind):
        return next(values)
    return kind(*(_filled(of_field, values) for of_field in _hints(kind).values()))


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
