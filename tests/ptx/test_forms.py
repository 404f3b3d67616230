"""Calls whose forms are executed are compared with PyTorch in float64."""

import pytest
import torch

pytest.importorskip("triton")

from fastkd._core.numerics import values_readable
from tests.ptx import forms
from tests.support.interpreter import of_compiled_code
from tools import calls
from tools.calls import Call, given
from tools.executed import executing

pytestmark = of_compiled_code


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


def test_as_on_a_gpu_no_values_are_read_and_products_have_the_calls_precision(monkeypatch):
    monkeypatch.setattr(calls, "DEVICE", torch.device("cpu"))

    def of(x, backend):
        return torch.tensor([values_readable(x), torch.get_float32_matmul_precision() == "high"])

    call = Call(of, {"x": given(2)}, {}, precision="high")
    for backend, readable in (("triton", False), ("torch", True)):
        (found,) = forms.results(call, forms.Inputs(), None, backend)
        assert found.tolist() == [readable, True]
    assert torch.get_float32_matmul_precision() == "highest"
