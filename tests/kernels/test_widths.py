"""No kernel of the benchmarks reads or writes aligned rows less than 16 bytes at a time."""

import json

import pytest

pytest.importorskip("triton")

from tools.compile_report import not_interpreted


@pytest.mark.slow
def test_accesses_are_wide():
    """Slow, unless kernels/proven.json holds the state of these kernels and benchmarks."""
    assert json.loads(not_interpreted("tools.widths", "--unproven")) == []
