"""Triton's launches on CPU tensors, compiled for a GPU and executed here."""

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._C._dynamo import guards

from .counting import Counts
from .launches import Written, execute, extent, flat
from .machine import program
from .memory import bytes_of

OnCompile = Callable[..., None]
ALLOCATING = (
    (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"),
    (Tensor, "new_empty"), (Tensor, "new_empty_strided"), (guards, "_empty_strided_cpu"),
)  # fmt: skip


class Compiled(NamedTuple):
    """A form of a kernel."""

    name: str
    ptx: str
    shared: int  # bytes of a CTA
    warps: int
    cubin: bytes


def compiled(
    kernel: Any,
    capability: int,
    signature: dict[str, Any],
    constants: dict[Any, Any],
    attributes: dict[Any, Any],
    options: dict[str, Any],
) -> Compiled:
    """A Triton kernel's form, which Triton keeps on disk."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, signature, constants, attributes)
    made = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    if getattr(made.metadata, "global_scratch_size", 0):
        raise NotImplementedError(f"{kernel.__name__}: a launch with scratch memory")
    code, about = made.asm, made.metadata
    return Compiled(kernel.__name__, code["ptx"], about.shared, about.num_warps, code["cubin"])


class Launches(list):
    """(kernel's name, `Counts`) of each launch, in order; ``forms`` has each kernel's last form."""

    def __init__(self) -> None:
        super().__init__()
        self.forms: dict[str, Compiled] = {}


class Fresh:
    """New tensors, filled with ones in every bit, and which of their bytes were written since.

    Where PyTorch or an extension wrote is seen by its bits, where a kernel did by its stores.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], tuple[Any, int, np.ndarray]] = {}

    def allocating(self, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Tensor:
            x = function(*args, **kwargs)
            if type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling():
                self.note(x)
            return x

        return call

    def note(self, x: Tensor) -> None:
        start, stop = extent(x)
        if start < stop and x.dtype != torch.bool and not x.is_inference():
            bytes_of((start, stop))[:] = 255
            entry = weakref.ref(x), x.element_size(), np.zeros(stop - start, bool)
            self.known[start, stop] = entry

    def written(self) -> Written:
        for key, (reference, size, written) in list(self.known.items()):
            if reference() is None:
                del self.known[key]
            else:
                changed = (bytes_of(key) != 255).reshape(-1, size).any(1)
                written |= np.repeat(changed, size)
        return {key: written for key, (_, _, written) in self.known.items()}


class _Kernel:
    """What JITFunction.run starts in place of a binary on a GPU."""

    function = packed_metadata = None

    def __init__(self, form: Compiled, signature: dict[str, Any], device: "_Device") -> None:
        self.form, self.device = form, device
        self.kinds = list(flat(list(signature.values())))
        self.signature = signature

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, x: int, y: int, z: int, *rest: Any) -> None:
        values = flat(list(rest[len(rest) - len(self.signature) :]))
        args = [v for v, kind in zip(values, self.kinds, strict=True) if kind != "constexpr"]
        threads = 32 * self.form.warps
        counts = execute(
            program(self.form.ptx), (x, y, z), (threads,), self.form.shared, args,
            self.device.fresh.written(),
        )  # fmt: skip
        self.device.launches.append((self.form.name, counts))
        self.device.launches.forms[self.form.name] = self.form


class _Device:
    """Triton's driver of a GPU that is executed here."""

    def __init__(self, capability: int, on_compile: OnCompile) -> None:
        self.capability, self.on_compile = capability, on_compile
        self.launches, self.fresh = Launches(), Fresh()

    def get_current_device(self) -> int:
        return 1000 + self.capability  # no other's: Triton keeps compiled forms by it

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def compile(self, kernel, key, signature, device, constants, options, attributes, warmup):
        """In place of Triton's own."""
        known = {at: x for at, x in attributes.items() if x}
        self.on_compile(kernel, self.capability, signature, constants, attributes, options)
        form = compiled(kernel, self.capability, signature, constants, known, dict(vars(options)))
        return _Kernel(form, signature, self)


@contextlib.contextmanager
def executing(capability: int, *, on_compile: OnCompile = lambda *_: None) -> Iterator[Launches]:
    """Context in which Triton's launches on CPU tensors are compiled and run here.

    Its value collects (kernel's name, `Counts`) of each launch.
    ``on_compile`` gets what Triton passes to its compiler: kernel, capability, signature,
    constants, attributes, options. TRITON_INTERPRET must be unset: the interpreter replaces
    kernels at import.
    """
    import triton
    from triton.runtime.jit import JITFunction

    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("executing: TRITON_INTERPRET=1 leaves nothing to compile; unset it")
    device = _Device(capability, on_compile)
    forms: dict[Any, _Kernel] = {}

    def form(kernel: Any, key: Any, *rest: Any) -> _Kernel:
        if (kernel, key) not in forms:
            forms[kernel, key] = device.compile(kernel, key, *rest)
        return forms[kernel, key]

    with contextlib.ExitStack() as stack:
        for target, name, replacement in (
            (triton.runtime.driver, "_active", device),
            (JITFunction, "_do_compile", form),
            (torch.cuda, "get_device_capability", lambda device=None: divmod(capability, 10)),
            *((place, name, device.fresh.allocating(getattr(place, name)))
              for place, name in ALLOCATING),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(target, name, replacement))
        yield device.launches


__all__ = ["Counts", "executing"]
