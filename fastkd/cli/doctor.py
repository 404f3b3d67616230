"""`fastkd doctor`: what is installed, which backends run, and whether they compute rightly."""

import importlib
import importlib.metadata
import inspect
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fastkd
from fastkd._core.dispatch import why_not_cpp, why_not_triton
from fastkd._core.losses import LOSSES, Inputs
from fastkd._core.versions import TESTED
from fastkd.cli.display import say
from fastkd.train.errors import first_line

PACKAGES = ("triton", "numpy", "transformers", "datasets", "accelerate", "scikit-learn")
# Far above what float32 loses, far below what a wrong kernel gives.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Trial:
    """One public function against its reference in float64, on the same random input."""

    module: str
    function: str
    inputs: Inputs

    def load(self, suffix: str = "") -> Callable[..., Tensor]:
        return getattr(importlib.import_module(f"fastkd.{self.module}"), self.function + suffix)

    def error(self, backend: str, device: torch.device) -> float:
        """Largest relative error of value and gradients."""
        function = self.load()
        extra = {"backend": backend} if has_backends(function) else {}
        actual = self._run(function, device, torch.float32, extra)
        oracle = self._run(self.load("_ref"), torch.device("cpu"), torch.float64, {})
        return max(_relative(a, b) for a, b in zip(actual, oracle, strict=True))

    def _run(
        self,
        function: Callable[..., Tensor],
        device: torch.device,
        dtype: torch.dtype,
        extra: dict[str, Any],
    ) -> Iterator[Tensor]:
        learning, given, options = self.inputs(torch.Generator().manual_seed(0))
        learning = [x.to(device, dtype).requires_grad_() for x in learning]
        given = [x.to(device, dtype) for x in given]
        options = {name: value.to(device) for name, value in options.items()}
        result = function(*learning, *given, **options, **extra)
        yield result
        yield from torch.autograd.grad(result.square().sum(), learning)


def has_backends(function: Callable) -> bool:
    """Whether the caller can choose the backend of ``function``."""
    return "backend" in inspect.signature(function).parameters


def _relative(actual: Tensor, oracle: Tensor) -> float:
    actual, oracle = actual.detach().double().cpu(), oracle.detach().double().cpu()
    error = (actual - oracle).norm() / oracle.norm().clamp_min(1e-12)
    return float("inf") if error.isnan() else error.item()


TRIALS = tuple(
    Trial(loss.name, function, inputs)
    for loss in LOSSES
    for function, inputs in loss.compared.items()
)


def examine(console: Console) -> bool:
    """Print the report; whether every backend that runs here is right."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def line(name: str, value: str) -> None:
        say(console, f"{name:<14}{value}")

    line("fastkd", f"{fastkd.__version__}, installed as {_version('fastkd')}")
    line("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    line("torch", f"{torch.__version__}, {torch.get_num_threads()} threads")
    for package in PACKAGES:
        line(package, _version(package))
    for package, versions in TESTED.items():
        line("tested with", f"{package} {', '.join(versions)}")
    line("device", _describe(device))
    line("extension", _extension())

    table = Table("check", "torch", "triton", "cpp", box=box.SIMPLE_HEAD)
    good = True
    for trial in TRIALS:
        cells = []
        for backend in ("torch", "triton", "cpp"):
            reason = _unavailable(trial, backend, device)
            if reason is None:
                cell, right = _verdict(trial, backend, device)
                good = good and right
            else:
                cell = reason.removeprefix(f"{trial.function} has ")
            cells.append(cell)
        table.add_row(trial.function, *cells)
    console.print(table)
    line("verdict", "all right" if good else "something is wrong: see the failed checks")
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


def _extension() -> str:
    try:
        importlib.import_module("fastkd._C")
    except ModuleNotFoundError:
        return "fastkd._C is not built; matrix roots and row kernels run on PyTorch code"
    except Exception as error:
        return f"fastkd._C is built but can't be loaded ({first_line(error)})"
    return "fastkd._C is built"


def _unavailable(trial: Trial, backend: str, device: torch.device) -> str | None:
    if backend == "torch":
        return None
    why_not, kernel = {
        "triton": (why_not_triton, "Triton"),
        "cpp": (why_not_cpp, "C++"),
    }[backend]
    if not has_backends(trial.load()):
        return f"{trial.function} has no {kernel} kernel"
    return why_not(trial.function, torch.empty(0, device=device))


def _verdict(trial: Trial, backend: str, device: torch.device) -> tuple[str, bool]:
    try:
        error = trial.error(backend, device)
    except Exception as raised:
        return f"[red]failed[/red]: {type(raised).__name__}: {first_line(raised)}", False
    right = error <= TOLERANCE
    return f"{'ok' if right else '[red]failed[/red]'}, relative error {error:.1e}", right
