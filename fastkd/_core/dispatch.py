"""Choice of the backend that runs a call."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fastkd._core import check, extension
from fastkd._core.registry import LOSSES

Backend = Literal["auto", "torch", "triton", "cpp"]
BACKENDS = get_args(Backend)

# Looked up at import, without importing triton itself: that happens when a kernel starts.
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None

# Calls that the kernels of each public name support.
TRITON_FUNCTIONS = {name: kernels for loss in LOSSES for name, kernels in loss.triton.items()}
CPP_FUNCTIONS = {name: kernels for loss in LOSSES for name, kernels in loss.cpp.items()}


class BackendUnavailable(RuntimeError, ValueError):
    """The requested backend can't run this call on this machine; the message gives the reason."""


def triton_interpreted() -> bool:
    """Whether Triton kernels run on the CPU, in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_devices() -> tuple[str, ...]:
    """Types of the devices whose tensors Triton kernels run on."""
    return ("cuda", "cpu") if triton_interpreted() else ("cuda",)


def why_not(
    backend: str, function: str, x: Tensor, call: Mapping[str, Any] | None = None
) -> str | None:
    """Why the "triton" or "cpp" kernel of ``function`` can't run on ``x``, or None if it can.

    ``call`` maps the options and sizes that the function's `Kernels` limit to their values in this
    call. Without it only the device is checked.
    """
    triton = backend == "triton"
    functions, language = (TRITON_FUNCTIONS, "Triton") if triton else (CPP_FUNCTIONS, "C++")
    if function not in functions:
        return f"{function} has no {language} kernel"
    if call is not None:
        kernels = functions[function]
        if x.dtype not in kernels.dtypes:
            return f"{str(x.dtype).removeprefix('torch.')} is left to PyTorch"
        for name, values in kernels.options.items():
            if call[name] not in values:
                supported = " or ".join(map(repr, values))
                return f"its kernels support {name}={supported}, got {call[name]!r}"
        for name, largest in kernels.limits.items():
            if call[name] > largest:
                return f"its kernels take at most {largest} {name}, got {call[name]}"
    if not triton:
        if not extension.CPU:
            return "the extension is not built"
        return None if x.is_cpu else f"student is on {x.device}, and C++ kernels run on the CPU"
    if not TRITON_INSTALLED:
        return "the triton package is not installed"
    if x.device.type not in triton_devices():
        return f"student is on {x.device}, and Triton kernels run on CUDA"
    return extension.why_not_gpu(x.device) if x.is_cuda else None


def widest(layers: Sequence[Tensor]) -> Tensor:
    """The layer that decides the backend of all: a float64 one, or the first."""
    return next((x for x in layers if x.dtype == torch.float64), layers[0])


def backend_of(
    backend: str, function: str, x: Tensor, unsupported: str | None = None, **call: Any
) -> str:
    """The backend that runs ``function`` on ``x``: "torch", "triton" or "cpp".

    "auto" is Triton on CUDA and C++ on the CPU where the kernel supports the call, else PyTorch.

    Args:
        unsupported: the caller's own reason against kernels, beside those of `Kernels`.
        call: options and sizes, as in `why_not`.

    Raises:
        BackendUnavailable: the requested backend can't run the call; the message gives the reason.
    """
    check.choice("backend", backend, BACKENDS)
    if backend == "torch":
        return backend
    runs_on = backend
    if backend == "auto":
        runs_on = "cpp" if x.is_cpu else "triton"
    reason = unsupported or why_not(runs_on, function, x, call)
    if reason is None:
        return runs_on
    if backend == "auto":
        return "torch"
    raise BackendUnavailable(f"backend={backend!r} can't run {function}: {reason}")
