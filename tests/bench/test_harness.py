"""The harness: a wrong provider is refused, memory is counted right, ratios hold."""

import json
import random

import pytest
import torch

from fastkd.bench import compare, harness, runner, table
from fastkd.bench.harness import Bound, Case, Provider, call

CPU = torch.device("cpu")


def make(*, device, dtype, n):
    x = torch.randn(n, n, device=device, dtype=dtype)
    return {"x": x.requires_grad_(), "y": torch.randn(n, n, device=device, dtype=dtype)}


def reference(x, y):
    return (x * y).sin().sum()


def case(*providers, dtype=torch.float32, n=64, **options):
    return Case(
        loss="toy",
        title="sine",
        set="cpu",
        sizes={"n": n},
        dtype=dtype,
        make=make,
        providers=(Provider("reference", call(reference)), *providers),
        bytes_moved=3 * n * n * 4,
        operations=n * n,
        **options,
    )


def measured(*providers, budget=0.05, **options):
    return harness.measure(case(*providers, **options), CPU, budget)["providers"]


def test_a_right_provider_is_timed():
    result = measured(Provider("same", call(lambda x, y: (y * x).sin().sum())))["same"]
    assert result["value_error"] < 1e-5 and result["gradient_error"] < 1e-5
    for part in ("forward", "backward", "both", "ratio"):
        assert 0 < result[part]["q1"] <= result[part]["median"] <= result[part]["q3"]
    assert result["rounds"] >= 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "wrong, what",
    [
        (lambda x, y: (x * y).sin().sum() * 1.1, "value"),
        (lambda x, y: (x * y).sin().sum().detach() + (x * y).cos().sum() * 0, "gradient"),
        (lambda x, y: (x * y).sin().sum() * float("nan"), "value"),
    ],
)
def test_a_wrong_provider_is_refused(wrong, what, dtype):
    result = measured(Provider("planted", call(wrong)), dtype=dtype)["planted"]
    assert what in result["refused"]
    assert "both" not in result and "peak_bytes" not in result


def test_a_provider_that_cannot_run_says_why():
    def fails(x, y):
        raise RuntimeError("no such instruction\nsecond line")

    result = measured(
        Provider("elsewhere", call(reference), why_not=lambda device: f"not on {device}"),
        Provider("broken", call(fails)),
        Provider("other", call(lambda x, y: (x * 2).sum()), own_objective=True),
    )
    assert result["elsewhere"] == {"skipped": "not on cpu"}
    assert result["broken"] == {"skipped": "RuntimeError: no such instruction"}
    assert "own objective" in result["other"]["note"] and "both" in result["other"]


def test_a_case_that_does_not_fit_leaves_the_others_alone(tmp_path):
    def too_large(**sizes):
        raise torch.OutOfMemoryError("tried to allocate 900 GiB")

    toy = case()
    broken = Case(**{**vars(toy), "make": too_large, "title": "huge"})
    rows = runner.run_cases([broken, toy], CPU, tmp_path / "x.json", seconds=0.05)["rows"]
    assert "900 GiB" in rows[0]["providers"]["reference"]["skipped"]
    assert "both" in rows[1]["providers"]["reference"]


def test_the_oracle_may_be_smaller():
    seen = []

    def spy(x, y):
        seen.append((x.shape[0], x.dtype))
        return reference(x, y)

    measured(Provider("spy", call(spy)), check_sizes={"n": 8})
    assert seen[0] == (8, torch.float32)
    assert {n for n, _ in seen[1:]} == {64}


@pytest.mark.parametrize("elements", [1000, 250_000])
def test_peak_memory_of_a_known_allocation(elements):
    def step():
        a = torch.empty(elements)
        b = torch.empty(3 * elements)
        del a
        c = torch.empty(2 * elements)
        return b, c

    peak = harness.peak_bytes(step, CPU)
    assert peak == pytest.approx(5 * elements * 4, rel=0.01)


def test_peak_memory_of_an_operation_and_its_gradient():
    n = 512
    x = torch.randn(n, n, requires_grad=True)
    # exp keeps its result for the backward; the gradient is made beside it.
    peak = harness.peak_bytes(Bound(lambda: x.exp().sum(), [x]).step, CPU)
    assert peak == pytest.approx(2 * n * n * 4, rel=0.01)


def test_operations_are_counted_without_views():
    x = torch.randn(4, 4)
    assert harness.count_operations(lambda: (x[:2] + 1).view(-1).exp()) == 2


def test_leaves_are_found_in_lists():
    a, b, c = (torch.zeros(1, requires_grad=flag) for flag in (True, False, True))
    assert harness.leaves_of({"x": [a, b], "y": c, "k": 3, "name": "x"}) == [a, c]


class Clock:
    """A clock that only the providers move, with a busy machine's noise on every step."""

    def __init__(self, seed):
        self.now, self.random = 0.0, random.Random(seed)

    def perf_counter(self):
        return self.now

    def provider(self, name, seconds):
        def run(x, y):
            # Everybody is slow at the same times; every step also scatters by itself.
            drift = 1.3 if int(self.now) % 2 else 1.0
            self.now += seconds * drift * self.random.lognormvariate(0, 0.05)
            return reference(x, y)

        return Provider(name, call(run))


def results_of(monkeypatch, seconds, seed):
    clock = Clock(seed)
    monkeypatch.setattr(harness, "time", clock)
    toy = case()
    providers = (clock.provider("reference", 0.01), clock.provider("work", seconds))
    row = harness.measure(Case(**{**vars(toy), "providers": providers}), CPU, budget=1.0)
    return {"machine": {"name": "here"}, "rows": [row]}


@pytest.mark.parametrize("seed", range(5))
def test_compare_flags_a_planted_slowdown_and_not_noise(monkeypatch, seed):
    first, again, slower = (
        results_of(monkeypatch, seconds, 10 * seed + i)
        for i, seconds in enumerate((0.004, 0.004, 0.0048))
    )
    assert compare.compare(first, again) == []
    (line,) = compare.compare(first, slower)
    assert "toy/sine" in line and "work" in line
    assert compare.compare(slower, first) == []


def result(ratio, spread, rounds=20, **more):
    return {
        "rounds": rounds,
        "both": {"median": 1.0, "q1": 1.0, "q3": 1.0},
        "ratio": {"median": ratio, "q1": ratio * (1 - spread), "q3": ratio * (1 + spread)},
        **more,
    }


def files(before, after):
    return [
        {"machine": {"name": "m"}, "rows": [{"key": "k", "providers": {"p": r}}]}
        for r in (before, after)
    ]


@pytest.mark.parametrize("ratio", [0.02, 0.5, 1.3])
def test_twenty_per_cent_is_flagged_within_usual_noise(ratio):
    assert compare.compare(*files(result(ratio, 0.05), result(1.2 * ratio, 0.05)))
    assert not compare.compare(*files(result(ratio, 0.05), result(1.02 * ratio, 0.05)))
    # Five rounds that scatter by half can't tell.
    assert not compare.compare(*files(result(ratio, 0.5, 5), result(1.2 * ratio, 0.5, 5)))


def test_memory_launches_and_lost_rows_are_flagged():
    before = result(1.0, 0.01, peak_bytes=10 << 20, launches=4)
    found = compare.compare(*files(before, result(1.0, 0.01, peak_bytes=12 << 20, launches=5)))
    assert [("memory" in line, "launches" in line) for line in found] == [
        (True, False),
        (False, True),
    ]
    assert "no longer measured (broke)" in compare.compare(*files(before, {"skipped": "broke"}))[0]


def test_results_are_written_and_resumed(tmp_path, capsys):
    path = tmp_path / "deep" / "here.json"
    calls = []

    def spy(x, y):
        calls.append(1)
        return reference(x, y)

    cases = [case(Provider("spy", call(spy)))]
    runner.run_cases(cases, CPU, path, seconds=0.05, commit="abc")
    written = json.loads(path.read_text())
    assert written["commit"] == "abc" and written["versions"]["torch"] == torch.__version__
    row = written["rows"][0]
    assert row["floor_ms"] > 0 and row["providers"]["spy"]["peak_bytes"] > 0
    printed = capsys.readouterr().out
    assert "toy: sine (n=64, float32" in printed and "spy" in printed
    before = len(calls)
    runner.run_cases(cases, CPU, path, seconds=0.05, commit="abc", resume=True)
    assert len(calls) == before
    runner.run_cases(cases, CPU, path, seconds=0.05, commit="other", resume=True)
    assert len(calls) > before


def test_the_table_names_what_could_not_run():
    row = {
        "loss": "toy",
        "title": "sine",
        "sizes": {"n": 2},
        "dtype": "float32",
        "floor_ms": 0.5,
        "providers": {
            "reference": result(1.0, 0.1) | {"value_error": 0.0, "gradient_error": 1e-7},
            "peer": {"skipped": "needs CUDA"},
            "wrong": {"refused": "value is off"},
        },
    }
    lines = table.row_lines(row)
    assert "1e-07" in lines[2] and "2.0" in lines[2]
    assert lines[3:] == ["  peer: needs CUDA", "  wrong: value is off"]


def test_compare_from_the_command_line(tmp_path, capsys):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, content in zip(paths, files(result(1.0, 0.01), result(1.3, 0.01)), strict=True):
        path.write_text(json.dumps(content))
    assert compare.main([str(paths[0]), str(paths[0])]) == 0
    assert "nothing got worse in 1 rows" in capsys.readouterr().out
    assert compare.main([str(path) for path in paths]) == 1
    assert "k, p: 1 -> 1.3 of the reference's time (1.30×)" in capsys.readouterr().out
