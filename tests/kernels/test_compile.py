"""Kernels of public calls compile without spills, and fit."""

import json

import pytest

pytest.importorskip("triton")

from tools.compile_report import modules, not_interpreted


def compiled(*what):
    return json.loads(not_interpreted("tests.kernels.compiled", *what).splitlines()[-1])


def problems(rows):
    return [
        f"{row['arch']} {row['kernel']} {row['variant']}: {'; '.join(row['problems'])}"
        for row in rows
        if row["problems"]
    ]


@pytest.mark.thorough
def test_compiles_without_spills():
    """A form of each kernel on sm_90.

    Rounds end with a barrier: threads load from global memory what other threads stored.
    """
    found = compiled()
    known = {row["module"].rpartition(".")[2] for row in found["forms"]}
    missing = set(modules()) - known
    assert not missing, f"no call of tests/losses starts a kernel of {missing}"
    assert not problems(found["forms"]) and found["barriers"] == 1


@pytest.mark.thorough
def test_the_largest_blocks_fit_a_consumer_card():
    """On sm_120, which has 99 kB."""
    assert not problems(compiled("consumer")["forms"])
