"""The GPU path without a GPU: public calls on tensors that have shapes and a CUDA device, no data.

Everything runs except the arithmetic: checks, the choice of backend, forward and backward of the
autograd functions, and each kernel launch up to Triton's compiler. ``python -m tools.dry_cuda [LOSS
...]`` prints, as JSON, the problems of each loss's `calls` (all losses by default) and the kernel
forms that they launch. Problems are a tensor on another device, and waiting for the GPU: a value
read by the host, a copy to or from the CPU, or a solver that checks for errors.
"""

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from inspect import getattr_static
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from fastkd import VocabularyMatch
from fastkd._core import extension
from tools import calls
from tools.calls import Call, learns
from tools.compile_report import EVERY, Form, walked

# Operations that wait for the device, according to PyTorch's documentation.
WAITING = {
    "_linalg_check_errors",
    "_linalg_eigh",
    "_linalg_svd",
    "_local_scalar_dense",
    "equal",
    "masked_select",
    "nonzero",
}
# Largest second and third dimension of a launch grid.
LARGEST_GRID = 65535

CUDA, META = torch.device("cuda", 0), torch.device("meta")
# PyTorch's own getters, which the patches below replace.
DEVICE, IS_META = (getattr_static(Tensor, name).__get__ for name in ("device", "is_meta"))

# Compute capabilities. Calls that do not read the capability run on the first only.
FIRST, *OTHERS = sorted(EVERY, key=lambda capability: capability != 90)

# Planted mistakes that the walk must find; the tensor has shape (3, 3).
PLANTED: dict[str, Callable[[Tensor], Any]] = {
    "a value read": lambda x: x.sum().item(),
    "a choice": lambda x: bool(x.isnan().any()),
    "a selection": lambda x: x[x > 0],
    "a selection that is written": lambda x: x.index_put_((x > 0,), x[0]),
    "a copy to the CPU": lambda x: x.cpu(),
    "a copy from the CPU": lambda x: x + torch.tensor([1.0, 2.0, 3.0]).cuda(),
    "two devices": lambda x: x + torch.ones(3),
    "a solver": lambda x: torch.linalg.eigh(x.detach()),
}


class Waited(Exception):
    """The call would wait for the device."""


class _OnMeta(TorchDispatchMode):
    """Mode that creates CUDA tensors on the meta device and checks every operation on them.

    Results are cached by operation and shapes, because shape inference is slow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside = False  # inside an operation, which needs the real device
        self.known: dict[Any, Any] = {}

    def device_of(self, x: Tensor) -> torch.device:
        return CUDA if IS_META(x) and not self.inside else DEVICE(x)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in _leaves((*args, *kwargs.values())) if isinstance(x, Tensor)]
        here = any(map(IS_META, tensors))
        device = kwargs.get("device")
        if device is not None and device.type in ("cuda", "meta"):  # autograd's own say "meta"
            kwargs = {**kwargs, "device": META}
        elif here and (device is not None or waits(func, args)):
            raise Waited(f"{func} waits for the device")
        elif not here:
            return func(*args, **kwargs)
        if others := [x for x in tensors if not IS_META(x) and x.dim()]:
            raise Waited(f"{func} takes a tensor from {others[0].device}")
        self.inside = True
        try:
            return self.result(func, args, kwargs)
        finally:
            self.inside = False

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of an operation, from the cache if it is one tensor, new or written in place."""
        if func.is_view:
            return func(*args, **kwargs)
        key = (func, torch.get_default_dtype(), _described(args), _described(tuple(kwargs.items())))
        if key in self.known:
            make = self.known[key]
            return make() if make else args[0]
        made = func(*args, **kwargs)
        if func._schema.is_mutable:
            if made is args[0]:
                self.known[key] = None
        elif isinstance(made, Tensor):
            empty = functools.partial(torch.empty_strided, dtype=made.dtype, device=META)
            self.known[key] = functools.partial(empty, made.shape, made.stride())
        return made


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for x in values:
        if isinstance(x, (list, tuple)):
            yield from _leaves(x)
        else:
            yield x


def _described(x: Any) -> Any:
    """Key of an argument: everything that determines the shape of an operation's result."""
    if isinstance(x, Tensor):
        return IS_META(x), x.shape, x.stride(), x.dtype
    return tuple(map(_described, x)) if isinstance(x, (list, tuple)) else (type(x), x)


def waits(operation: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether an operation waits for the device, as those that count a mask's entries do."""
    if operation._opname in ("index", "index_put", "index_put_"):
        return any(x is not None and x.dtype == torch.bool for x in arguments[1])
    if operation._opname in ("eigh", "symmetric_roots"):  # csrc/linalg/roots.cu: `has_kernel`
        n, batch = arguments[0].shape[-1], arguments[0].shape[:-2].numel()
        chooses_zeros = operation._opname == "eigh" or any(x is not None for x in arguments[1:2])
        return chooses_zeros and (n > 256 or n * n > 5500 * batch)
    return operation._opname in WAITING


def _context(arguments: tuple[Any, ...]) -> SimpleNamespace:
    """Context of an autograd function; autograd's engine needs a real device."""
    context = SimpleNamespace(
        needs_input_grad=tuple(isinstance(x, Tensor) and x.requires_grad for x in arguments),
        saved_tensors=(),
        save_for_backward=lambda *tensors: setattr(context, "saved_tensors", tensors),
        mark_non_differentiable=lambda *tensors: None,
        set_materialize_grads=lambda value: None,
    )
    return context


@torch.no_grad()
def forward_and_backward(cls: Any, *arguments: Any) -> Any:
    """Result of ``cls.apply``; the backward pass runs too, as in autograd's engine."""
    context = _context(arguments)
    results = cls.forward(context, *arguments)
    outputs = results if isinstance(results, tuple) else (results,)
    tensors = [output for output in outputs if output is not None]
    for output in tensors:
        assert output.device.type == "cuda", f"{cls.__name__} returns a tensor on {output.device}"
    if any(context.needs_input_grad):
        upstream = (None if x is None else torch.empty_like(x) for x in outputs)
        # Outside of the engine torch expects a second backward pass; here none follows.
        kept = "_get_current_graph_task_keep_graph"
        with mock.patch.object(torch._C._autograd, kept, lambda: False):
            grads = cls.backward(context, *upstream)
        for argument, grad in zip(
            arguments, grads if isinstance(grads, tuple) else (grads,), strict=True
        ):
            if grad is not None:
                assert (grad.shape, grad.device) == (argument.shape, argument.device), cls.__name__
    # The next function's inputs still require grad.
    for output in tensors:
        output.requires_grad_(output.is_floating_point() and any(context.needs_input_grad))
    return results


def columns_on_device(match: VocabularyMatch, device: torch.device) -> tuple[Tensor, ...]:
    """Columns of a match without the copy to the device that its first call makes."""
    n = len(match.student_ids)
    sizes = match.student_size, match.student_size - n, match.teacher_size - n
    return tuple(torch.empty(size, dtype=torch.int64, device=device) for size in sizes)


class Device:
    """Fake GPU and Triton driver: launches record their forms and run nothing."""

    def __init__(self) -> None:
        self.capability = FIRST
        self.asked = False  # whether a launcher read the capability
        self.forms: dict[Form, None] = {}  # launched forms, in order

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        self.asked = True
        return divmod(self.capability, 10)

    def get_current_device(self) -> int:
        return self.capability  # Triton caches compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def compile(self, kernel: JITFunction, key, signature, device, constexprs, options, *rest):
        """The form of a launch, in place of a compiled kernel; Triton caches it."""
        form = Form.from_launch(kernel, self.capability, signature, constexprs, rest[0], options)
        kernel.device_caches[device][0][key] = form
        return form

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context in which CUDA tensors have no data and kernels do not run."""
        nothing, properties = contextlib.nullcontext, mock.Mock(multi_processor_count=132)
        run = JITFunction.run

        def checked(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            check_launch(kernel, args, grid)
            # A warm-up launch returns the compiled kernel, here the form.
            self.forms[run(kernel, *args, grid=grid, warmup=True, **kwargs)] = None

        tensors = _OnMeta()
        with contextlib.ExitStack() as stack:
            for target, name, replacement in (
                (torch.autograd.Function, "apply", classmethod(forward_and_backward)),
                (triton.runtime.driver, "_active", self),
                (JITFunction, "run", checked),
                (JITFunction, "_do_compile", lambda *args: self.compile(*args)),
                (Tensor, "data_ptr", lambda x: x.storage_offset() * x.element_size()),
                (Tensor, "device", property(tensors.device_of)),
                (Tensor, "is_cuda", property(lambda x: x.device.type == "cuda")),
                (Tensor, "is_meta", property(lambda x: x.device.type == "meta")),
                (torch.cuda, "_lazy_init", lambda: None),
                (torch.cuda, "device_of", lambda x: nothing()),
                (torch.cuda, "get_device_capability", self.get_device_capability),
                (torch.cuda, "get_device_properties", lambda device: properties),
                (torch.cuda, "is_current_stream_capturing", lambda: False),
                (VocabularyMatch, "columns", columns_on_device),
                (extension, "CUDA", extension.CPU),
                (extension, "why_not_gpu", lambda device: None),
            ):
                stack.enter_context(mock.patch.object(target, name, replacement))
            stack.enter_context(tensors)
            yield


def check_launch(kernel: JITFunction, args: Iterable[Any], grid: Iterable[int]) -> None:
    """Assert that tensors are on the device and that CUDA accepts the grid."""
    for argument in args:
        for x in argument if isinstance(argument, (tuple, list)) else (argument,):
            on_device = not isinstance(x, Tensor) or x.device.type == "cuda"
            assert on_device, f"{kernel.__name__}: a tensor on {x.device}"
    sizes = [int(size) for size in grid]
    fits = min(sizes) > 0 and max(sizes[1:], default=1) <= LARGEST_GRID
    assert fits, f"{kernel.__name__}: grid {sizes}"


def problem(call: Callable[..., Any], *arguments: Any) -> str | None:
    """Type and message of the exception that a call raises, or None."""
    try:
        call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return None


def walk(calls: Iterable[Call]) -> dict[str, Any]:
    """Problems by call, passed arguments by function, and forms on every architecture."""
    device = Device()
    problems: dict[str, str] = {}
    given: dict[str, set[str]] = {}
    forms: set[Form] = set()
    with device.running():
        for call in calls:
            given.setdefault(call.of.__name__, set()).update(call.given())
            for device.capability in (FIRST, *OTHERS):
                device.asked = False
                device.forms.clear()
                found = problem(call.run)
                if call.waits:
                    found = None if (found or "").startswith(Waited.__name__) else "doesn't wait"
                if found:
                    problems[str(call)] = found
                forms.update(device.forms)
                if not device.asked:
                    forms.update(f._replace(capability=c) for f in device.forms for c in OTHERS)
                    break
    return {
        "problems": problems,
        "given": {name: sorted(arguments) for name, arguments in given.items()},
        "forms": sorted(forms, key=str),
    }


def report(loss: str) -> dict[str, Any]:
    """Planted mistakes that were found, and `walk` of a loss's calls."""
    with Device().running():
        found = [name for name, call in PLANTED.items() if problem(call, learns(3, 3).tensor())]
    return {"planted": found, **walk(calls.of(loss))}


if __name__ == "__main__":
    print(json.dumps({loss: walked(loss) for loss in sys.argv[1:] or calls.LOSSES}))
