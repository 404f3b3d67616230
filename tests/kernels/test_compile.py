"""Kernels of public calls compile without spills: a sample here, all forms in test-all."""

import itertools
import json
import runpy

import pytest

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from tools.compile_report import (
    PROVEN,
    Form,
    choices,
    covering,
    modules,
    not_interpreted,
    strip,
)


@pytest.fixture(scope="module")
def compiled():
    return json.loads(not_interpreted("tests.kernels.compiled").splitlines()[-1])


def test_compiles_without_spills(compiled):
    """Any two choices that meet in a form, on one architecture; every form of every one is
    compiled by ``make test-all``, after which kernels/proven.json knows the modules' states.
    """
    rows = compiled["forms"]
    known = {row["module"].rpartition(".")[2] for row in rows} | json.loads(
        PROVEN.read_text()
    ).keys()
    assert known >= set(modules()), (
        f"no call of tests/losses starts a kernel of {set(modules()) - known}"
    )
    wrong = [
        f"{row['arch']} {row['kernel']} {row['variant']}: {'; '.join(row['problems'])}"
        for row in rows
        if row["problems"]
    ]
    assert not wrong, "\n".join(wrong)


def test_accesses_are_wide(compiled):
    """No kernel of the benchmarks reads or writes aligned rows less than 16 bytes at a time."""
    assert compiled["narrow"] == []


def test_compiles_for_amd():
    """A module with matrix products; every form of every module: ``make test-all``."""
    report = not_interpreted("tools.amd", "cayley", "--workers", "1")
    assert report.endswith("forms compiled for gfx942, 0 failed\n"), report


def test_rounds_end_with_a_barrier(compiled):
    """Some threads load from global memory what others stored: a race without the barrier."""
    assert compiled["ends_with_barriers"] == 1


def test_a_key_is_of_the_code_alone(tmp_path):
    """Comments, docstrings and moved lines compile no form again."""
    keys = []
    for text in ("x = y", '"""What."""\n    # Why.\n    x = y', "x = y + y"):
        file = tmp_path / f"kernel_{len(keys)}.py"
        file.write_text("\n" * len(keys) + f"def kernel(y):\n    {text}\n")
        function = JITFunction(runpy.run_path(str(file))["kernel"])
        strip(function)
        keys.append(function.cache_key)
    assert keys[0] == keys[1] != keys[2]


def test_covering_meets_every_pair_of_choices():
    launch = (("num_warps", 4), ("num_stages", 3))
    forms = [
        Form(
            *("module", "kernel", 90),
            types=(("x_ptr", dtype), ("N", "i32"), ("A", "constexpr"), ("B", "constexpr")),
            values=(("A", a), ("B", b)),
            known=(((1,), (("tt.divisibility", 16),)),) if aligned else (),
            launch=launch,
        )
        for dtype, aligned, a, b in itertools.product(("*fp16", "*fp32"), *[(0, 1)] * 3)
    ]
    chosen = covering(forms)
    assert len(forms) == 16 and len(chosen) <= 6

    def pairs(some):
        return {
            pair
            for form in some
            for pair in itertools.combinations(sorted(choices(form).items()), 2)
        }

    assert pairs(chosen) == pairs(forms)
