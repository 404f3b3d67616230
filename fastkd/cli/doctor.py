"""`fastkd doctor`: installed versions, the backends that run here, and a check of each.

It needs no package but those of the losses, so that an installation of these can check itself.
"""

import importlib
import importlib.metadata
import inspect
import math
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fastkd
from fastkd._core import extension, plans
from fastkd._core.dispatch import CPP_FUNCTIONS, TRITON_FUNCTIONS, why_not
from fastkd._core.registry import LOSSES, inputs_of
from fastkd._core.versions import TESTED
from fastkd.train.errors import first_line

PACKAGES = ("triton", "numpy", "transformers", "datasets", "accelerate", "scikit-learn")
BACKENDS = ("torch", "triton", "cpp")
NO_KERNEL = "no kernel"
TO_BUILD = "in a checkout: pip install --no-build-isolation --no-deps ."
# Calls after which a GPU's plan is recorded, proved and repeated.
CALLS_ON_GPU = plans.SIGHTS + 4
# Far above float32 rounding, far below the error of a wrong kernel.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Settings:
    """The command has no options."""


@dataclass(frozen=True)
class Trial:
    """One public function against its reference in float64, on the same random input."""

    module: str
    function: str

    def load(self, suffix: str = "") -> Callable[..., Tensor]:
        return getattr(importlib.import_module(self.module), self.function + suffix)

    def error(self, backend: str, device: torch.device) -> float:
        """Largest relative error of value and gradients, of several calls on a GPU."""
        function = self.load()
        extra = {"backend": backend} if has_backends(function) else {}
        reference = self._run(self.load("_ref"), torch.device("cpu"), torch.float64, {})
        oracle = [x.detach() for x in reference]
        errors = []
        for _ in range(CALLS_ON_GPU if device.type == "cuda" else 1):
            found = self._run(function, device, torch.float32, extra)
            for actual, right in zip(found, oracle, strict=True):
                error = (actual.detach().double().cpu() - right).norm()
                relative = error / right.norm().clamp_min(1e-12)
                errors.append(math.inf if relative.isnan() else relative.item())
        return max(errors)

    def _run(
        self,
        function: Callable[..., Tensor],
        device: torch.device,
        dtype: torch.dtype,
        extra: dict[str, Any],
    ) -> Iterator[Tensor]:
        learning, given, options = inputs_of(self.function)
        learning = [x.to(device, dtype).requires_grad_() for x in learning]
        given = [x.to(device, dtype) for x in given]
        options = {name: value.to(device) for name, value in options.items()}
        result = function(*learning, *given, **options, **extra)
        yield result
        yield from torch.autograd.grad(result.square().sum(), learning)


def has_backends(function: Callable) -> bool:
    """Whether the caller can choose the backend of ``function``."""
    return "backend" in inspect.signature(function).parameters


TRIALS = tuple(Trial(loss.module, function) for loss in LOSSES for function in loss.with_reference)


def run(settings: object, display: Any) -> bool:
    """Run `fastkd doctor`; returns whether every backend that runs here is right."""
    return examine(display.say)


def examine(write: Callable[[str], object]) -> bool:
    """Write the report line by line; return whether every backend that runs here is right."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def line(name: str, value: str) -> None:
        write(f"{name:<14}{value}")

    line("fastkd", f"{fastkd.__version__}, installed as {_version('fastkd')}")
    line("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    line("torch", f"{torch.__version__}, {torch.get_num_threads()} threads")
    for package in PACKAGES:
        line(package, _version(package))
    for package, versions in TESTED.items():
        line("tested with", f"{package} {', '.join(versions)}")
    line("device", _describe(device))
    state, extension_is_right = _extension()
    line("extension", state)

    good = _check(write, device) and extension_is_right
    if device.type == "cuda":
        off = plans.why_off()
        line("plans", f"off: {off}" if off else "on, and proved by the calls above")
        good = good and plans.problem is None
    if not good:
        line("verdict", "something is wrong: see the extension, plans and the failed checks")
    elif extension.CPU:
        line("verdict", "all right")
    else:
        line("verdict", f"right, but slower than it can be: no extension; {TO_BUILD}")
    return good


def _check(write: Callable[[str], object], device: torch.device) -> bool:
    """Write the table of checks and the reasons for skipped ones; returns whether all passed."""
    write("\nErrors relative to the references in float64")
    row = "{:<26}{:<16}{:<16}{}"
    write(row.format("", *BACKENDS))
    notes: list[str] = []
    good = True
    for trial in TRIALS:
        cells = []
        for backend in BACKENDS:
            reason = _unavailable(trial, backend, device)
            note = reason and f"{backend:<14}not here: {reason}"
            if reason is None:
                cell, failure = _verdict(trial, backend, device)
                good = good and failure is None
                note = failure and f"{'failed':<14}{trial.function}, {backend}: {failure}"
            elif reason == NO_KERNEL:
                cell, note = reason, None
            else:
                cell = "not here"
            cells.append(cell)
            if note is not None and note not in notes:
                notes.append(note)
        write(row.format(trial.function, *cells))
    write("\n".join(["", *notes]))
    return good


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        built = torch.version.cuda
        why = f"torch is built for CUDA {built}, but finds none" if built else "torch without CUDA"
        return f"cpu ({why})"
    name = torch.cuda.get_device_name(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda: {name}, sm_{major}{minor}, CUDA {torch.version.cuda}"


def _extension() -> tuple[str, bool]:
    """State of ``fastkd._C``, and whether it is right; not built counts as right."""
    try:
        importlib.import_module("fastkd._C")
    except ModuleNotFoundError:
        return "fastkd._C is not built; matrix roots and row kernels run on PyTorch code", True
    except Exception as error:
        return f"fastkd._C is built but can't be loaded ({first_line(error)})", False
    if not extension.CPU:
        return "fastkd._C is of another version of fastkd, and not used; build it again", False
    taken = torch.ops.fastkd_cpp.vector_bytes()
    kind = torch.backends.cpu.get_cpu_capability()
    narrow = taken < {"AVX2": 32, "AVX512": 64}.get(kind, 0)
    why = f"; a build by g++ 12 or later takes those of {kind}" if narrow else ""
    return f"fastkd._C is built, vectors of {taken} bytes{why}", True


def _unavailable(trial: Trial, backend: str, device: torch.device) -> str | None:
    """Why ``backend`` can't run the function here, or None."""
    if any(trial.function in loss.without_choice for loss in LOSSES):
        return None if backend == ("cpp" if extension.CPU else "torch") else NO_KERNEL
    if backend == "torch":
        return None
    functions = {"triton": TRITON_FUNCTIONS, "cpp": CPP_FUNCTIONS}[backend]
    if trial.function not in functions or not has_backends(trial.load()):
        return NO_KERNEL
    return why_not(backend, trial.function, torch.empty(0, device=device))


def _verdict(trial: Trial, backend: str, device: torch.device) -> tuple[str, str | None]:
    """The table's cell, and the failure, if any."""
    try:
        error = trial.error(backend, device)
    except Exception as raised:
        return "failed", f"{type(raised).__name__}: {first_line(raised)}"
    if error <= TOLERANCE:
        return f"ok {error:.1e}", None
    return "failed", f"relative error {error:.1e}"
