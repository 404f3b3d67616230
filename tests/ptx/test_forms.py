"""Calls whose forms are executed are compared with PyTorch in float64."""

import os

import pytest
import torch

pytest.importorskip("triton")

from tools import calls
from tools.ptx import executing, forms

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="of compiled code: make test-compiled"
)


def test_a_wrong_gradient_is_named(monkeypatch):
    monkeypatch.setattr(calls, "DEVICE", torch.device("cpu"))
    call = next(call for call in calls.of("hidden_states") if call.inputs["student"].learns)
    right = forms.results
    with executing(80):
        assert forms.wrong(call) is None

        def off(call, inputs, dtype, backend, moved=0.0):
            value, *grads = right(call, inputs, dtype, backend, moved)
            return [value, *(x * (1.1 if backend == "triton" else 1.0) for x in grads)]

        monkeypatch.setattr(forms, "results", off)
        assert forms.wrong(call).startswith("gradient 1: error 0.1, PyTorch's ")
