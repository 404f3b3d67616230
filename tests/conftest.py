"""Fixtures for every test: backends, fixed seeds, outputs pre-filled with NaN."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from fastkd import _dispatch


@pytest.fixture(autouse=True)
def _seeded_and_poisoned():
    """Fixed seed; torch.empty returns NaN, so an element nobody wrote is seen."""
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """CUDA where there is one, else the CPU (Triton then runs in its interpreter)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["torch", "triton"])
def backend(request) -> str:
    """Both backends; a module whose loss has a Triton kernel names it in ``TRITON_FUNCTION``."""
    if request.param == "triton":
        function = getattr(request.module, "TRITON_FUNCTION", None)
        if function not in _dispatch.TRITON_FUNCTIONS or not _dispatch.TRITON_INSTALLED:
            pytest.skip("no Triton kernel, or triton is not installed")
    return request.param


@pytest.fixture
def tensors_on_device(request, device):
    """A test of both backends makes its tensors where the kernels run, without saying so."""
    if device.type == "cpu" or "backend" not in request.fixturenames:
        yield
        return
    with device:
        yield
