"""`make gpu-check` against executed code: here the GPU is the machine with `.approx` moved."""

import dataclasses

import pytest

pytest.importorskip("triton")
from bench import suite
from tests.support.interpreter import of_compiled_code
from tools import gpu_check
from tools.executed import executing

pytestmark = of_compiled_code


@pytest.fixture
def found():
    """Function of what `gpu_check.against_machine` finds of each case."""
    titles = "forward KL", "reverse KL", "total variation", "negative log acceptance"
    cases = [c for c in suite.every_case() if c.loss == "soft_targets" and c.title in titles]
    pairs = {
        case.key: (case, dataclasses.replace(provider, why_not=lambda device: None))
        for case in map(suite.toy, cases)
        for provider in case.providers
        if provider.name == "fastkd triton"
    }
    return lambda: [gpu_check.against_machine(*pair, 90) for pair in pairs.values()]


def test_right_results_pass(found):
    with executing(90, approximate=1):
        words = found()
    # Approximate results differ in bits.
    assert len(words) > 5 and set(words) == {"equal bits", "other last bits"}


def test_wrong_results_are_named(found, monkeypatch):
    right, turns = gpu_check.step, []

    def wrong(*arguments):
        turns.append(0)
        loss, *grads = right(*arguments)
        return [loss * (1.1 if len(turns) % 2 else 1.0), *grads]

    monkeypatch.setattr(gpu_check, "step", wrong)
    with executing(90), pytest.raises(AssertionError, match=r"the loss: 0\.1 off the executed"):
        found()
