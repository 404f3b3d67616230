"""Measurements of a case: errors, peak memory and ratios."""

import functools
import statistics

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
    toy = case(*providers, **options)
    group = Group(toy, list(toy.providers))
    group.time(0.01, 5)
    return group


def test_accurate_provider_is_timed():
    group = timed(Provider("same", call(lambda x, y: (y * x).sin().sum())))
    assert not group.refused
    assert group.info["same"]["value_error"] < 1e-5 > group.info["same"]["gradient_error"]
    assert group.info["same"]["peak_bytes"] > 64 * 64 * 4
    assert len(group.samples["same"]) == len(group.samples["reference"]) >= 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "wrong, what",
    [
        (lambda x, y: (x * y).sin().sum() * 1.1, "value"),
        (lambda x, y: (x * y).sin().sum().detach() + (x * y).cos().sum() * 0, "gradient"),
        (lambda x, y: (x * y).sin().sum() * float("nan"), "value"),
    ],
)
def test_inaccurate_provider_is_refused(wrong, what, dtype):
    group = timed(Provider("planted", call(wrong)), dtype=dtype)
    assert what in group.refused["planted"]
    assert "planted" not in group.samples and "peak_bytes" not in group.info["planted"]


def test_a_provider_that_fails_gives_its_error_as_the_reason():
    def fails(x, y):
        raise RuntimeError("no such instruction\nsecond line")

    other = Provider("other", call(lambda x, y: (x * 2).sum()), own_objective=True)
    group = timed(Provider("broken", call(fails)), other)
    assert group.refused == {"broken": "RuntimeError: no such instruction"}
    assert "value_error" not in group.info["other"] and group.samples["other"]


def test_errors_may_be_measured_at_a_smaller_size():
    seen = []

    def spy(x, y):
        seen.append(x.shape[0])
        return reference(x, y)

    timed(Provider("spy", call(spy)), check_sizes={"n": 8})
    assert seen[0] == 8 and set(seen[1:]) == {64}


@pytest.mark.parametrize("elements", [1000, 250_000])
def test_peak_memory_of_a_known_allocation(elements):
    def step():
        a = torch.empty(elements)
        b = torch.empty(3 * elements)
        del a
        c = torch.empty(2 * elements)
        return b, c

    assert measure.peak_bytes(step, CPU) == pytest.approx(5 * elements * 4, rel=0.01)


def test_peak_memory_of_an_operation_and_its_gradient():
    n = 512
    x = torch.randn(n, n, requires_grad=True)
    # exp saves its result for the backward pass; the gradient is a second tensor.
    peak = measure.peak_bytes(Bound(lambda: x.exp().sum(), [x]).step, CPU)
    assert peak == pytest.approx(2 * n * n * 4, rel=0.01)


def test_broken_graphs_are_counted(monkeypatch):
    def broken(x, y):
        x = x * y
        torch._dynamo.graph_break()
        return x.sin().sum()

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    groups = [timed(cases.compiled(function)) for function in (broken, reference)]
    assert [group.info["torch.compile"]["graph_breaks"] for group in groups] == [1, 0]


def test_leaves_are_found_in_lists():
    a, b, c = (torch.zeros(1, requires_grad=flag) for flag in (True, False, True))
    assert cases.leaves_of({"x": [a, b], "y": c, "k": 3, "name": "x"}) == [a, c]


def test_ratios_do_not_depend_on_the_machines_speed(monkeypatch):
    """A provider that takes half the time does so in every round, at any speed of the machine."""

    class Clock:
        now, steps = 0.0, 0

        def perf_counter(self):
            return self.now

    clock = Clock()
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
