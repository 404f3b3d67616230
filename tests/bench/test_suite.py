"""The suite as pytest runs it, and its cases."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from bench import report, suite
from tests.bench import write_pages_to
from tests.cli.launched import Launch
from tools import gpu_check

ROOT = Path(__file__).resolve().parents[2]


def run_pytest(words):
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]  # a worker of pytest-xdist times nothing
    os.chdir(ROOT)
    sys.exit(pytest.main(words))


def test_a_group_is_timed_and_reported(tmp_path, monkeypatch, capsys):
    """From the command line to the pages."""
    result = tmp_path / "attention.json"
    words = [
        "bench/test_attention.py", "-k", "reference or cpp", "-m", "headline",
        "--benchmark-max-time=0.01", "--benchmark-min-rounds=2", "-p", "no:xdist",
        f"--benchmark-json={result}",
    ]  # fmt: skip
    launch = Launch(tmp_path / "launch", None, run_pytest, words)
    out, errors = launch.end()
    assert launch.process.exitcode == 0, out + errors
    assert "'attention/maps/B32 H12 N128/float32': 2 tests" in out
    reference, own = json.loads(result.read_text())["benchmarks"]
    info = own["extra_info"]
    assert (own["name"], own["group"]) == ("fastkd cpp", reference["group"])
    assert info["commit"] and info["processor"] and info["versions"]["torch"] == torch.__version__
    assert info["bytes"] == 3 * 32 * 12 * 128**2 * 4 and info["ratio"]["median"] > 0
    assert info["peak_bytes"] < reference["extra_info"]["peak_bytes"]
    assert own["stats"]["rounds"] == reference["stats"]["rounds"] >= 2
    write_pages_to(tmp_path, monkeypatch)
    assert report.main([str(result), str(result)]) == 0
    for name in ("README", "PAGE"):
        text = (tmp_path / name).read_text()
        assert "| attention: maps | B=32 H=12 N=128, fp32 | " in text
        assert text.startswith("before\n") and text.endswith("\nafter\n")


def test_selection_of_cases_by_set_and_loss():
    cases = suite.every_case()
    assert {case.set for case in cases} == set(suite.SETS)
    assert {case.loss for case in suite.cases(["cpu"])} == set(suite.LOSSES)
    assert len([case for case in suite.cases(["cpu"]) if case.headline]) == 10
    # Every loss has a sweep of sizes, except whole steps.
    assert {c.loss for c in suite.cases(["cpu"]) if c.sweep} == {*suite.LOSSES} - {"step"}


def test_floors_of_known_work():
    """At 790 TFLOP/s and 4.3 TB/s."""
    known = {
        # 8 samples of 4096 tokens, 2048 and 4096 features.
        "relation/tokens/B8 N4096 Ds2048 Dt4096/bfloat16": 1.74,
        # Logits in bfloat16, two reads and a write.
        "soft_targets/forward KL/rows8192 V152064/bfloat16": 1.74,
    }
    cases = {case.key: case for case in suite.cases(["long", "vocab"])}
    for key, milliseconds in known.items():
        floor = max(cases[key].operations / 790e12, cases[key].bytes_moved / 4.3e12) * 1e3
        assert floor == pytest.approx(milliseconds, rel=0.01)


def test_digests_are_reproducible():
    """Digests that gpu-check compares between processes, here on the CPU."""
    first, second = (list(gpu_check.digests("toy")) for _ in range(2))
    assert first == second and len(first) >= 10
