"""Measurements of a case: errors, peak memory and ratios."""

import functools
import statistics
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from bench import case as cases
from bench import measure
from bench.case import Bound, Provider, call
from bench.group import Group
from tests.bench import case, reference

CPU = torch.device("cpu")


def timed(*providers, **options):
    """The group of a toy case, after its rounds."""
    group = Group(toy := case(*providers, **options), list(toy.providers))
    group.time(0.01, 5)
    return group


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_accurate_providers_are_timed_and_others_refused(dtype):
    error = RuntimeError("no such instruction\nsecond line")
    wrong = {
        "value": lambda x, y: (x * y).sin().sum() * 1.1,
        "gradient": lambda x, y: (x * y).sin().sum().detach() + (x * y).cos().sum() * 0,
        "value is off by inf": lambda x, y: (x * y).sin().sum() * float("nan"),
        "RuntimeError: no such instruction": mock.Mock(side_effect=error),
    }
    seen = []

    def same(x, y):
        seen.append(len(x))
        return reference(x, y)

    group = timed(
        Provider("same", call(same)),
        Provider("other", call(lambda x, y: (x * 2).sum()), own_objective=True),
        *(Provider(words, call(function)) for words, function in wrong.items()),
        dtype=dtype,
        check_sizes={"n": 8},
    )
    assert seen[0] == 8 and set(seen[1:]) == {64}  # errors may be measured at a smaller size
    assert [*group.samples] == ["reference", "same", "other"] and {*group.refused} == {*wrong}
    assert all(words in reason for words, reason in group.refused.items())
    assert all("\n" not in reason for reason in group.refused.values())
    assert group.info["same"]["value_error"] < 1e-2 > group.info["same"]["gradient_error"]
    assert "value_error" not in group.info["other"] and "peak_bytes" not in group.info["value"]
    assert group.info["same"]["peak_bytes"] > 64 * 64 * dtype.itemsize
    assert len(group.samples["same"]) == len(group.samples["reference"]) >= 5


def test_peak_memory():
    """Of a known allocation, and of an operation and its gradient."""
    n = 250_000

    def allocate():
        a = torch.empty(n)
        b = torch.empty(3 * n)
        del a
        return b, torch.empty(2 * n)

    x = torch.randn(500, 500, requires_grad=True)
    # exp saves its result for the backward pass; the gradient is a second tensor.
    for step, entries in ((allocate, 5), (Bound(lambda: x.exp().sum(), [x]).step, 2)):
        assert measure.peak_bytes(step, CPU) == pytest.approx(entries * n * 4, rel=0.01)


def test_broken_graphs_are_counted(monkeypatch):
    def broken(x, y):
        x = x * y
        torch._dynamo.graph_break()
        return x.sin().sum()

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    groups = [timed(cases.compiled(function)) for function in (broken, reference)]
    assert [group.info["torch.compile"]["graph_breaks"] for group in groups] == [1, 0]


def test_ratios_do_not_depend_on_the_machines_speed(monkeypatch):
    """A provider that takes half the time does so in every round, at any speed of the machine."""

    clock = SimpleNamespace(now=0.0, steps=0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(measure, "time", clock)

    def provider(seconds):
        def forward():
            clock.steps += 1
            clock.now += seconds * (3.0 if clock.steps // 40 % 2 else 1.0)
            return torch.zeros((), requires_grad=True)

        return Bound(forward, [])

    monkeypatch.setattr(torch.autograd, "grad", lambda loss, leaves: ())
    bound = {"reference": provider(0.02), "half": provider(0.01)}
    samples = measure.interleaved(bound, CPU, seconds=0.5, least=5)
    pairs = zip(samples["half"], samples["reference"], strict=True)
    assert statistics.median(x / y for x, y in pairs) == pytest.approx(0.5)
    assert max(samples["half"]) > 2.5 * min(samples["half"])
