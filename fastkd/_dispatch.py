"""The one place that decides which backend runs a loss."""

import importlib.util
import os

from torch import Tensor

from fastkd._checks import check_choice

BACKENDS = ("auto", "torch", "triton")

# Found once, at import; the package itself is imported only when a kernel starts.
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None

# Public functions and modules that have a Triton kernel.
TRITON_FUNCTIONS: set[str] = {
    "layer_norm_mse",
    "OrthogonalProjection",
    "soft_target_loss",
    "linear_soft_target_loss",
    "relation_loss",
    "cos_nce_loss",
    "knn_feature_loss",
}


class BackendUnavailable(RuntimeError, ValueError):
    """The backend that was asked for can't run this call here; the message says why."""


def triton_interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not_triton(function: str, x: Tensor, unsupported: str | None = None) -> str | None:
    """Why the Triton kernel of ``function`` can't run on ``x``, or None if it can.

    ``unsupported`` is the caller's own reason: an option that the kernel does not implement.
    """
    if function not in TRITON_FUNCTIONS:
        return f"{function} has no Triton kernel"
    if unsupported is not None:
        return unsupported
    if not TRITON_INSTALLED:
        return "the triton package is not installed"
    runs_on = ("cuda", "cpu") if triton_interpreted() else ("cuda",)
    if x.device.type not in runs_on:
        return f"student is on {x.device}, and Triton kernels run on CUDA"
    return None


def use_triton(backend: str, function: str, x: Tensor, unsupported: str | None = None) -> bool:
    """Whether ``function`` runs on Triton for input ``x``.

    ``auto`` takes Triton on CUDA when the kernel can run, else PyTorch; an explicit
    ``"triton"`` that can't run raises BackendUnavailable with the reason.
    """
    check_choice("backend", backend, BACKENDS)
    if backend == "torch":
        return False
    reason = why_not_triton(function, x, unsupported)
    if backend == "auto":
        return reason is None and x.device.type == "cuda"
    if reason is not None:
        raise BackendUnavailable(f"backend='triton' can't run {function}: {reason}")
    return True
