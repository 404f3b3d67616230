"""The one place that decides which backend runs a loss."""

import importlib.util
import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

from torch import Tensor

from fastkd._core import extension
from fastkd._core.checks import check_choice
from fastkd._core.registry import LOSSES

Backend = Literal["auto", "torch", "triton", "cpp"]
BACKENDS = get_args(Backend)

# Found once, at import; the package itself is imported only when a kernel starts.
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None

# What the kernels behind a public name can do.
TRITON_FUNCTIONS = {name: kernels for loss in LOSSES for name, kernels in loss.kernels.items()}
CPP_FUNCTIONS = {name: kernels for loss in LOSSES for name, kernels in loss.row_kernels.items()}


class BackendUnavailable(RuntimeError, ValueError):
    """The backend that was asked for can't run this call here; the message says why."""


def triton_interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not_triton(function: str, x: Tensor, facts: Mapping[str, Any] | None = None) -> str | None:
    """Why the Triton kernel of ``function`` can't run on ``x``, or None if it can.

    ``facts`` are the words and sizes that its `Kernels` are limited in; without them the answer is
    about the device and dtype of ``x`` alone.
    """
    if function not in TRITON_FUNCTIONS:
        return f"{function} has no Triton kernel"
    if facts is not None and (lack := TRITON_FUNCTIONS[function].lack(x.dtype, facts)):
        return lack
    if not TRITON_INSTALLED:
        return "the triton package is not installed"
    runs_on = ("cuda", "cpu") if triton_interpreted() else ("cuda",)
    if x.device.type not in runs_on:
        return f"student is on {x.device}, and Triton kernels run on CUDA"
    return extension.why_not_gpu(x.device) if x.is_cuda else None


def why_not_cpp(function: str, x: Tensor, facts: Mapping[str, Any] | None = None) -> str | None:
    """Why the C++ kernel of ``function`` can't run on ``x``, or None; as `why_not_triton`."""
    if function not in CPP_FUNCTIONS:
        return f"{function} has no C++ kernel"
    if facts is not None and (lack := CPP_FUNCTIONS[function].lack(x.dtype, facts)):
        return lack
    if not extension.CPU:
        return "the extension is not built"
    if x.device.type != "cpu":
        return f"student is on {x.device}, and C++ kernels run on the CPU"
    return None


def backend_of(
    backend: str, function: str, x: Tensor, unsupported: str | None = None, **facts: Any
) -> str:
    """What ``function`` runs on for input ``x``: "torch", "triton" or "cpp".

    ``facts`` as in `why_not_triton`; ``unsupported`` is the caller's own reason against Triton, of
    what is neither a word nor a size. ``auto`` takes Triton on CUDA and C++ on the CPU when the
    kernel can run, else PyTorch; an explicit backend that can't run raises BackendUnavailable with
    the reason.
    """
    check_choice("backend", backend, BACKENDS)
    if backend == "auto":
        on_cpu = x.device.type == "cpu"
        reason = unsupported or (why_not_cpp if on_cpu else why_not_triton)(function, x, facts)
        return "torch" if reason is not None else "cpp" if on_cpu else "triton"
    reason = None
    if backend != "torch":
        why_not = why_not_triton if backend == "triton" else why_not_cpp
        reason = unsupported or why_not(function, x, facts)
    if reason is not None:
        raise BackendUnavailable(f"backend={backend!r} can't run {function}: {reason}")
    return backend


def use_triton(
    backend: str, function: str, x: Tensor, unsupported: str | None = None, **facts: Any
) -> bool:
    """Whether ``function`` runs on Triton for input ``x``; see `backend_of`."""
    return backend_of(backend, function, x, unsupported, **facts) == "triton"
