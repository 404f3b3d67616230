"""The GPU path without a GPU: public calls on tensors that have shapes and a CUDA device, no data.

Everything runs but the arithmetic: checks, the choice of backend, forward and backward of the
autograd functions, every launch of a kernel up to where Triton would compile it.
``python -m tests.dry_cuda LOSS`` prints, as JSON, what went wrong in each of the loss's `calls`,
and the forms of kernels that they start. Two things would go wrong: a tensor on another device, and
waiting for the GPU, which a value read by the host, a copy to or from the CPU, or a solver that
looks at errors does.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from filelock import FileLock
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from bench.compile_report import KEPT, SHARED_MEMORY, Form
from fastkd import _extension
from tests.calls import Call, learns
from tests.losses import FILES

# Operations that wait for the device, as PyTorch's documentation of them says.
WAITING = {
    "_linalg_check_errors",
    "_linalg_eigh",
    "_linalg_svd",
    "_local_scalar_dense",
    "equal",
    "masked_select",
    "nonzero",
}
# Blocks' and groups' edges in the second and third dimension of a launch.
LARGEST_GRID = 65535

# Compute capabilities; what does not depend on them is seen on the first alone.
FIRST, *OTHERS = sorted(SHARED_MEMORY, key=lambda capability: capability != 90)

# Mistakes that have to be found, with a tensor (3, 3).
PLANTED: dict[str, Callable[[Tensor], Any]] = {
    "a value read": lambda x: x.sum().item(),
    "a choice": lambda x: bool(x.isnan().any()),
    "a selection": lambda x: x[x > 0],
    "a copy to the CPU": lambda x: x.cpu(),
    "a copy from the CPU": lambda x: x + torch.tensor([1.0, 2.0, 3.0]).cuda(),
    "two devices": lambda x: x + torch.ones(3),
    "a solver": lambda x: torch.linalg.eigh(x.detach()),
}


class Waited(Exception):
    """The call would wait for the device."""


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname in WAITING:
            raise Waited(f"{func} waits for the device")
        result = func(*args, **(kwargs or {}))
        if func._opname in ("_to_copy", "copy_"):
            source = args[0] if func._opname == "_to_copy" else args[1]
            if source.device.type != result.device.type and source.dim():
                raise Waited(f"{func} from {source.device} to {result.device}")
        return result


class _Context:
    """Stands for an autograd function's; the engine itself needs a real device."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(x, Tensor) and x.requires_grad for x in arguments)
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


@torch.no_grad()
def forward_and_backward(cls: Any, *arguments: Any) -> Any:
    """What ``cls.apply`` and the engine would do."""
    context = _Context(arguments)
    results = cls.forward(context, *arguments)
    outputs = results if isinstance(results, tuple) else (results,)
    for output in outputs:
        assert output.device.type == "cuda", f"{cls.__name__} returns a tensor on {output.device}"
    if any(context.needs_input_grad):
        grads = cls.backward(context, *(torch.empty_like(output) for output in outputs))
        for argument, grad in zip(
            arguments, grads if isinstance(grads, tuple) else (grads,), strict=True
        ):
            if grad is not None:
                assert (grad.shape, grad.device) == (argument.shape, argument.device), cls.__name__
    # The next function's inputs still require grad.
    for output in outputs:
        output.requires_grad_(output.is_floating_point() and any(context.needs_input_grad))
    return results


class Device:
    """A GPU that is not there, also as Triton's driver: it compiles, and runs nothing."""

    def __init__(self) -> None:
        self.capability = FIRST
        self.asked = False  # whether a launcher chose by the capability
        self.forms: dict[Form, None] = {}  # what launches ask Triton to compile, in order

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        self.asked = True
        return divmod(self.capability, 10)

    def get_current_device(self) -> int:
        return self.capability  # what Triton keeps for one architecture serves no other

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def compile(self, kernel: JITFunction, _key, signature, _device, constexprs, options, *rest):
        """In place of Triton's own, which a launch of a new form comes to."""
        form = Form.asked_for(kernel, self.capability, signature, constexprs, rest[0], options)
        self.forms[form] = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, CUDA tensors have no data and kernels don't run."""
        nothing = contextlib.nullcontext
        run = JITFunction.run

        def checked(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            check_launch(kernel, args, grid)
            return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

        with contextlib.ExitStack() as stack:
            for target, name, replacement in (
                (torch.autograd.Function, "apply", classmethod(forward_and_backward)),
                (triton.runtime.driver, "_active", self),
                (JITFunction, "run", checked),
                (JITFunction, "_do_compile", lambda *args: self.compile(*args)),
                (FakeTensor, "data_ptr", lambda x: x.storage_offset() * x.element_size()),
                (torch.cuda, "device_of", lambda x: nothing()),
                (torch.cuda, "get_device_capability", self.get_device_capability),
                (_extension, "CUDA", _extension.CPU),
            ):
                stack.enter_context(mock.patch.object(target, name, replacement))
            stack.enter_context(FakeTensorMode())
            stack.enter_context(_Watch())
            yield


def check_launch(kernel: JITFunction, args: Iterable[Any], grid: Iterable[int]) -> None:
    """Tensors on the device, a grid that CUDA takes; the rest Triton checks itself."""
    for argument in args:
        for x in argument if isinstance(argument, (tuple, list)) else (argument,):
            on_device = not isinstance(x, Tensor) or x.device.type == "cuda"
            assert on_device, f"{kernel.__name__}: a tensor on {x.device}"
    sizes = [int(size) for size in grid]
    fits = min(sizes) > 0 and max(sizes[1:], default=1) <= LARGEST_GRID
    assert fits, f"{kernel.__name__}: grid {sizes}"


def problem(call: Callable[..., Any], *arguments: Any) -> str | None:
    """Type and message of what a call raises."""
    try:
        call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return None


def walk(calls: Iterable[Call]) -> dict[str, Any]:
    """Problems by call, arguments that are given, forms started on every architecture."""
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


def load_guard() -> None:
    """Load the few lines without which CUDA tensors need a torch with CUDA; compiled once."""
    source = Path(__file__).with_name("no_cuda_guard.cpp")
    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = KEPT / f"no_cuda_guard-{key}.so"
    KEPT.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{library}.lock"):
        if not library.exists():
            paths = [f"-I{path}" for path in cpp_extension.include_paths()]
            paths += [f"-L{path}" for path in cpp_extension.library_paths()]
            command = [os.environ.get("CXX", "c++"), "-std=c++20", "-shared", "-fPIC", *paths]
            subprocess.run([*command, str(source), "-lc10", "-o", f"{library}.part"], check=True)
            os.replace(f"{library}.part", library)
    torch.ops.load_library(library)


def main() -> None:
    load_guard()
    with Device().running():
        found = [name for name, call in PLANTED.items() if problem(call, learns(3, 3).tensor())]
    print(json.dumps({"planted": found, **walk(FILES[sys.argv[1]].calls())}))


if __name__ == "__main__":
    main()
