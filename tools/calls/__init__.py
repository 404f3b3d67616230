"""Public calls that tools/dry_cuda.py runs without a GPU, and whose kernels are compiled.

Every public function and Module, every value of a Literal option and every choice of a launcher
(dtype, size, alignment, mask, number of layers) has a call in `calls` of the loss's file;
tests/test_dry_cuda.py names missing ones. Tensors are created when a call runs.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

HALF_AND_FULL = (torch.bfloat16, torch.float16, torch.float32)
ALL_TYPES = (*HALF_AND_FULL, torch.float64)
BOTH = (False, True)
ON_A_GPU = ("auto", "torch", "triton")
DEVICE = torch.device("cuda")  # of tensors and Modules
# One layer has a launch of its own, up to 8 share one.
LAYERS = (1, 2)
MANY_LAYERS = 9
SOME_LAYERS = (*LAYERS, MANY_LAYERS)


class Made(NamedTuple):
    """A tensor of a call."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool = False

    def tensor(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=DEVICE, requires_grad=self.learns)


def learns(*shape: int, dtype: torch.dtype = torch.float32) -> Made:
    return Made(shape, dtype, True)


def given(*shape: int, dtype: torch.dtype = torch.float32) -> Made:
    """A teacher's features."""
    return Made(shape, dtype)


def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Made:
    """Labels, or a mask."""
    return Made(shape, dtype)


def pair(
    *shape: int,
    teacher: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    layers: int | None = None,
    learning: bool = True,
) -> dict[str, Any]:
    """Features of student and teacher, of the same shape by default; lists with ``layers``."""
    student, other = Made(shape, dtype, learning), Made(teacher or shape, dtype)
    sides = {"student": student, "teacher": other}
    return sides if layers is None else {name: [x] * layers for name, x in sides.items()}


def mask_of(*shape: int, masked: bool) -> dict[str, Made]:
    return {"mask": numbers(*shape)} if masked else {}


def made(x: Any) -> Any:
    """An input with its `Made` tensors created."""
    if isinstance(x, list):
        return [made(y) for y in x]
    return x.tensor() if isinstance(x, Made) else x


class Call(NamedTuple):
    """A public function or Module class, its tensors, and its options."""

    of: Callable[..., Any]
    inputs: dict[str, Any]
    options: dict[str, Any]
    precision: str = "highest"  # of float32 matrix products
    dtype: torch.dtype = torch.float32  # of the Module's parameters
    waits: bool = False  # for the device, as its documentation says

    def run(self) -> None:
        """Run forward and backward pass."""
        with self.multiplying():
            inputs = {name: made(x) for name, x in self.inputs.items()}
            if isinstance(self.of, type):
                self.module()(**inputs)
            else:
                self.of(**inputs, **self.options)

    @contextlib.contextmanager
    def multiplying(self) -> Iterator[None]:
        """Context in which float32 matrix products have the call's precision."""
        torch.set_float32_matmul_precision(self.precision)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision("highest")

    def module(self) -> torch.nn.Module:
        """The Module on `DEVICE` in the call's dtype; moving it later would be a copy."""
        torch.set_default_dtype(self.dtype)
        try:
            with DEVICE:
                return self.of(**self.options)
        finally:
            torch.set_default_dtype(torch.float32)

    def given(self) -> set[str]:
        """Names of the arguments that are not None."""
        return {name for name, x in (self.inputs | self.options).items() if x is not None}

    def __str__(self) -> str:
        words = ", ".join(
            f"{name}={_summary(x)}" for name, x in (self.inputs | self.options).items()
        )
        return f"{self.of.__name__}({words})"


Calls = Iterator[Call]

FILES = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__")


def of(loss: str) -> Calls:
    """Calls of a loss."""
    return importlib.import_module(f"tools.calls.{loss}").calls()


def _summary(x: Any) -> Any:
    if isinstance(x, list):
        return f"{len(x)} x {_summary(x[0])}"
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, Made) else x
