"""The harness: a wrong provider is refused, memory is counted right, ratios hold."""

import dataclasses
import functools
import json

import pytest
import torch

from fastkd.bench import harness, passes, roofline, runner, suite, table
from fastkd.bench.harness import Bound, Case, Provider, call
from tests.bench import case, reference

CPU = torch.device("cpu")


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
    rows = runner.run_cases([broken, toy], CPU, tmp_path / "x.json", seconds=0.05, passes=1)["rows"]
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


def test_broken_graphs_are_counted(monkeypatch):
    def broken(x, y):
        x = x * y
        torch._dynamo.graph_break()
        return x.sin().sum()

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    names = []
    for function in (broken, reference):
        row = harness.measure(case(harness.compiled(function)), torch.device("cpu"), budget=0.0)
        result = row["providers"]["torch.compile"]
        names.append(table.cells(row, "torch.compile", result)[0])
    assert names == ["torch.compile, 1 graph break", "torch.compile"]


def test_leaves_are_found_in_lists():
    a, b, c = (torch.zeros(1, requires_grad=flag) for flag in (True, False, True))
    assert harness.leaves_of({"x": [a, b], "y": c, "k": 3, "name": "x"}) == [a, c]


def test_a_row_is_the_median_of_its_passes():
    row = case(Provider("fastkd torch", call(reference)), Provider("peer", call(reference)))
    row = harness.row_of(row, {"reference": {}, "fastkd torch": {"peak_bytes": 1}, "peer": {}})

    def times(factor, *names):
        spread = {"median": factor, "q1": 0.9 * factor, "q3": 1.1 * factor}
        return {name: {"rounds": 3, "both": spread, "ratio": spread} for name in names}

    harness.add_pass(row, times(1.0, "reference", "fastkd torch", "peer"))
    for factor in (9.0, 2.0):
        harness.add_pass(row, times(factor, "reference", "fastkd torch"))
    # A pass in which the case did not fit takes nothing away.
    harness.add_pass(row, {})
    own, peer = row["providers"]["fastkd torch"], row["providers"]["peer"]
    assert own["ratio"] == {"median": 2.0, "q1": 1.8, "q3": 2.2, "passes": [1.0, 9.0, 2.0]}
    assert own["rounds"] == 9 and own["peak_bytes"] == 1
    assert peer["ratio"]["passes"] == [1.0] and peer["rounds"] == 3
    assert len(row["passes"]) == 4


def test_later_passes_time_the_reference_and_fastkd_only():
    timed = {"both": {}}
    names = ("reference", "torch.compile", "fastkd torch", "pykeops")
    row = {"loss": "knn", "providers": {name: timed for name in names}}
    assert passes.timed_again(row) == ["reference", "fastkd torch"]
    row["providers"]["fastkd torch"] = {"refused": "value is off"}
    assert passes.timed_again(row) == []
    row = {"loss": "step", "providers": {name: timed for name in ("reference", "FCD")}}
    assert passes.timed_again(row) == ["reference", "FCD"]


def test_results_are_written_and_resumed(tmp_path, capsys):
    path = tmp_path / "deep" / "here.json"
    calls = []

    def spy(x, y):
        calls.append(1)
        return reference(x, y)

    cases = [case(Provider("spy", call(spy)))]
    runner.run_cases(cases, CPU, path, seconds=0.05, passes=1, commit="abc")
    written = json.loads(path.read_text())
    assert written["commit"] == "abc" and written["versions"]["torch"] == torch.__version__
    row = written["rows"][0]
    assert row["floor_ms"] > 0 and row["providers"]["spy"]["peak_bytes"] > 0
    printed = capsys.readouterr().out
    assert "toy: sine (n=64, float32" in printed and "spy" in printed
    before = len(calls)
    runner.run_cases(cases, CPU, path, seconds=0.05, passes=1, commit="abc", resume=True)
    assert len(calls) == before
    runner.run_cases(cases, CPU, path, seconds=0.05, passes=1, commit="other", resume=True)
    assert len(calls) > before


def cheap():
    """A case of the suite, which another process finds; compiling it would take longer than all."""
    found = suite.cases(["cpu"], ["linalg"])[0]
    kept = tuple(p for p in found.providers if p.name != harness.COMPILED)
    return [dataclasses.replace(found, providers=kept)]


def test_later_passes_run_in_processes_of_their_own_and_are_resumed(tmp_path, capfd, monkeypatch):
    path = tmp_path / "x.json"
    run_pass = runner.run_pass
    monkeypatch.setattr(runner, "run_pass", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    options = {"seconds": 0.02, "passes": 2, "commit": "abc"}
    # The machine shows what it can do in the second pass alone.
    seen = {"copy_bytes_per_s": 1e9, "float32_ops_per_s": 1e20}
    limits = {1: seen, 2: {"copy_bytes_per_s": 2e9, "float32_ops_per_s": 1e19}}
    monkeypatch.setattr(
        runner.roofline, "roofline", lambda device, of, number=1: dict(limits[number])
    )
    with pytest.raises(KeyboardInterrupt):
        runner.run_cases(cheap(), CPU, path, **options)
    (interrupted,) = json.loads(path.read_text())["rows"]
    assert len(interrupted["passes"]) == 1 and "both" in interrupted["providers"]["fastkd"]

    monkeypatch.setattr(runner, "run_pass", run_pass)
    monkeypatch.setattr(runner, "measure", None)
    runner.run_cases(cheap(), CPU, path, **options, resume=True)
    (row,) = json.loads(path.read_text())["rows"]
    first, second = row["providers"]["fastkd"]["ratio"]["passes"]
    assert first == interrupted["providers"]["fastkd"]["ratio"]["median"] and second > 0
    assert "passes" not in row
    assert row["floor_ms"] == interrupted["floor_ms"] / 2 == 1e3 * row["bytes_moved"] / 2e9
    assert "pass 2/2 ." in capfd.readouterr().out


def test_half_types_are_no_slower_than_float32_on_a_cpu(monkeypatch):
    """Nor are large matrices multiplied in a type that a processor has no products of."""
    monkeypatch.setattr(roofline, "_copy_bandwidth", lambda device: 1e9)
    sizes = []

    def seconds(work, device):
        a, _ = work.args
        sizes.append((a.dtype, len(a)))
        return 2 * len(a) ** 3 / (1e9 if a.dtype == torch.bfloat16 else 1e11)

    monkeypatch.setattr(roofline, "_best_seconds", seconds)
    limits = roofline.roofline.__wrapped__(CPU, (torch.bfloat16,))
    assert limits["bfloat16_ops_per_s"] == pytest.approx(1e11)
    assert max(n for dtype, n in sizes if dtype == torch.bfloat16) <= 512
    assert (torch.float32, 1024) in sizes


def test_passes_of_different_code_are_never_mixed(tmp_path, capfd, monkeypatch):
    row = harness.row_of(cheap()[0], {})
    with pytest.raises(passes.PassFailed):
        list(passes.run_pass([row], CPU, 0.01, "other code"))
    assert "the code has changed" in capfd.readouterr().err

    path = tmp_path / "x.json"
    options = {"seconds": 0.02, "passes": 1, "commit": "abc"}
    before = runner.run_cases(cheap(), CPU, path, **options)
    for name, other in (("code_digest", lambda: "other"), ("PASSES", {"cpu": 3})):
        with monkeypatch.context() as changed:
            changed.setattr(runner, name, other)
            changed.setattr(runner, "_later_pass", lambda *a: None)
            options["passes"] = 1 if name == "code_digest" else None
            again = runner.run_cases(cheap(), CPU, path, **options, resume=True)
        assert again["rows"][0]["seconds"] != before["rows"][0]["seconds"]


def test_the_table_names_what_could_not_run():
    times = {"median": 1.0, "q1": 0.9, "q3": 1.1}
    providers = {
        "reference": {"both": times, "value_error": 0.0, "gradient_error": 1e-7},
        "peer": {"skipped": "needs CUDA"},
        "wrong": {"refused": "value is off"},
    }
    row = {"loss": "toy", "title": "sine", "sizes": {"n": 2}, "dtype": "float32", "floor_ms": 0.5}
    row["providers"] = providers
    lines = table.row_lines(row)
    assert "1e-07" in lines[2] and "2.0" in lines[2]
    assert lines[3:] == ["  peer: needs CUDA", "  wrong: value is off"]
