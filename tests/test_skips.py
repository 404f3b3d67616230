"""Left-out cases, skipped tests, and the settings that emulate other processors."""

from types import SimpleNamespace

import pytest
import torch

from tests import conftest
from tools import check, machines
from tools.versions.__main__ import LEFT_OUT


@pytest.mark.left_out(where=lambda given: given["size"] == 4)
@pytest.mark.parametrize("size", [3, 4])
def test_left_out_marks_cases_with_nothing_to_test(size):
    assert size == 3


@pytest.mark.parametrize("runs_on", ["triton", "cpp"])
def test_only_unsupported_kernel_tests_are_skipped(runs_on):
    """Half-precision tests without options run; tests of unsupported options are skipped."""

    def left_out(**given):
        item = SimpleNamespace(
            callspec=SimpleNamespace(params={"backend": runs_on, **given}),
            module=SimpleNamespace(TRITON_FUNCTION="relation_loss"),
            iter_markers=lambda name: (),
            get_closest_marker=lambda name: name == "within_kernels",
        )
        return conftest._left_out(item)

    assert not left_out(dtype=torch.bfloat16) and not left_out(normalize="l2")
    assert left_out(dtype=torch.float64) == (runs_on == "triton")
    assert left_out(normalize="softmax") and left_out(distance="kl")


def test_table_of_skips():
    """Reports from other processes have lists instead of tuples."""
    lines = []
    reporter = SimpleNamespace(
        stats={"skipped": [SimpleNamespace(longrepr=["a.py", 1, f"Skipped: {x}"]) for x in "bab"]},
        write_sep=lambda *_: None,
        write_line=lines.append,
    )
    conftest.pytest_terminal_summary(reporter)
    assert lines == ["    2  b", "    1  a"]


def test_settings_of_other_processors():
    names = machines.playable()
    assert names and set(names) <= set(machines.SETTINGS)
    assert machines.turn(names) == machines.turn(names) in names
    assert {s["OMP_NUM_THREADS"] for s in machines.SETTINGS.values()} == set("1234")
    assert all((machines.ROOT / file).exists() for file in machines.CORE)


def test_core_names_existing_files():
    """A path that no longer exists would skip nothing, silently."""
    assert all((check.ROOT / path).exists() for path in (*check.WHOLE, *check.TRAINS, *LEFT_OUT))
