"""`make gpu-check` against executed code: here the GPU is the machine with `.approx` moved."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")
from bench import suite
from tests.support.interpreter import of_compiled_code
from tools import gpu_check
from tools.executed import executing

pytestmark = of_compiled_code


@pytest.fixture
def found(monkeypatch):
    """Function of the problem and equality of bits of each case."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    titles = "forward KL", "reverse KL", "total variation", "negative log acceptance"
    every = [
        suite.toy(case)
        for case in suite.every_case()
        if case.loss == "soft_targets" and case.title in titles
    ]
    pairs = {
        case.key: (case, dataclasses.replace(provider, why_not=lambda device: None))
        for case in every
        for provider in case.providers
        if provider.name == "fastkd triton"
    }
    cpu = torch.device("cpu")
    return lambda: [gpu_check.against_machine(*pair, cpu) for pair in pairs.values()]


def test_right_results_pass(found):
    with executing(90, approximate=1):
        problems, equal = zip(*found(), strict=True)
    assert len(problems) > 5 and not any(problems)
    assert any(equal) and not all(equal)  # approximate results differ in bits


def test_wrong_results_are_named(found, monkeypatch):
    right, turns = gpu_check.step, []

    def wrong(*arguments):
        turns.append(0)
        loss, *grads = right(*arguments)
        return [loss * (1.1 if len(turns) % 2 else 1.0), *grads]

    monkeypatch.setattr(gpu_check, "step", wrong)
    with executing(90):
        assert all("the loss: differs by 0.1" in why for why, _ in found())


def test_differences():
    x, nan = torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")])
    assert gpu_check.difference([x, x], [x, x * (1 + 1e-6)], 1e-4) == ""
    assert "gradient 1" in gpu_check.difference([x, x], [x, x + 1], 1e-4)
    assert "NaN" in gpu_check.difference([nan], [x], 1e-4)
    assert "float64" in gpu_check.difference([x.double()], [x], 1e-4)
