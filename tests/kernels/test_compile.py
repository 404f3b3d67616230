"""Kernels of public calls compile without spills, and fit: some here, all forms in test-all."""

import json

import pytest

pytest.importorskip("triton")

from tools.compile_report import modules, not_interpreted


@pytest.fixture(scope="module")
def compiled():
    return json.loads(not_interpreted("tests.kernels.compiled").splitlines()[-1])


def test_compiles_without_spills(compiled):
    """A form of each kernel on sm_90, and the largest blocks on sm_120, which has 99 kB.

    ``make test-all`` compiles every form.
    """
    rows = compiled["forms"]
    known = {row["module"].rpartition(".")[2] for row in rows}
    assert known >= set(modules()), (
        f"no call of tests/losses starts a kernel of {set(modules()) - known}"
    )
    wrong = [
        f"{row['arch']} {row['kernel']} {row['variant']}: {'; '.join(row['problems'])}"
        for row in rows
        if row["problems"]
    ]
    assert not wrong, "\n".join(wrong)


def test_rounds_end_with_a_barrier(compiled):
    """Threads load from global memory what other threads stored: a race without the barrier."""
    assert compiled["ends_with_barriers"] == 1
