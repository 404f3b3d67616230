"""What is left out and what is skipped, and the settings that other processors are played by."""

from types import SimpleNamespace

import pytest

from tests import conftest
from tools import check, machines
from tools.versions.__main__ import LEFT_OUT


@pytest.mark.left_out(where=lambda given: given["size"] == 4)
@pytest.mark.parametrize("size", [3, 4])
def test_left_out(size):
    assert size == 3


def test_table_of_skips():
    """Of reports as they come from other processes: lists for tuples."""
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


def test_the_core_names_files_that_there_are():
    """A path that is gone leaves nothing out, without a word."""
    assert all((check.ROOT / path).exists() for path in (*check.WHOLE, *check.TRAINS, *LEFT_OUT))
