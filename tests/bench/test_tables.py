"""Tables beside the benchmark's: other packages, kernels' durations, FCD's operations."""

import dataclasses
import re

import pytest
import torch

from bench import fcd_complexity, kernel_times, other_packages, report
from bench.case import call

ROWS = other_packages.rows()
NAMES = [f"{row.package} {i}" for i, row in enumerate(ROWS)]


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_losses_equal_other_packages_formulas_in_float64(row):
    sizes = {"rows": 16, "D": 6, "V": 40, "device": torch.device("cpu")}
    inputs = row.make(dtype=torch.float64, **sizes)
    ours, theirs = (call(function)(inputs).step() for function in (row.fastkd, row.formula))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_the_table_of_other_packages_has_a_line_for_each_row(monkeypatch):
    small = dataclasses.replace(ROWS[0].case, sizes={"rows": 8, "D": 4, "V": 12}, check_sizes={})
    monkeypatch.setattr(other_packages.Row, "case", small)
    found = other_packages.measured(small, seconds=0.0)
    machine = {"cpu": "a processor", "threads": 1}
    where = {"machine": machine, "versions": {"torch": "2"}, "commit": "abc"}
    result = {"where": where, "rows": {small.title: found}}
    lines = other_packages.table(result).splitlines()
    assert sum(line.startswith("| ") for line in lines) == 1 + len(ROWS)
    assert all(found[name]["ms"] > 0 for name in ("reference", "fastkd"))


def test_the_table_names_fastkds_kernels_and_adds_the_others():
    kernels = {
        "soft_target_kernel": [1.0, 3000.0],
        "void fastkd::eigen_roots_kernel<double, fastkd::WarpLanes>(double const*)": [3.0, 900.0],
        "void trsm_left_kernel<int, double, 256>(cublas)": [1.0, 60.0],
        "nvjet_sm90_tss_320x128_64x3_1x2_h_bz_coopB_TNT": [2.0, 40.0],
    }
    case = {
        "loss": "soft_targets", "title": "forward KL", "sizes": {"rows": 8, "V": 100},
        "dtype": "bfloat16", "bytes": 2e9, "operations": 1e9, "kernels": kernels,
    }  # fmt: skip
    versions = {"torch": "2.11.0", "triton": "3.6.0"}
    result = {
        "machine": {"gpu": "Some GPU"}, "versions": versions, "commit": "abc1234",
        "date": "2026-01-02", "limits": {"copy": 1e12, "bfloat16": 1e14}, "cases": [case],
    }  # fmt: skip
    text = kernel_times.page(result)
    assert text.startswith("Some GPU, torch 2.11.0, Triton 3.6.0, commit abc1234, 2026-01-02.")
    own = "`soft_target` 3, `eigen_roots` (3) 0.9, libraries 0.1"
    assert f"| soft_targets: forward KL † | rows=8 V=100, bf16 | {own} | 2 | 4 | 2.0 |" in text
    assert report.CHANGED in text  # no such commit


def test_operations_of_fcd_are_those_of_the_paper(capsys):
    fcd_complexity.main(["-B", "4", "-N", "32", "-D", "192"])
    lines = [re.split(r" *\| *", line)[1:-1] for line in capsys.readouterr().out.splitlines()[1:]]
    names = ["FCD, fastkd", "FCD, as printed", "MiniLM", "MiniLMv2"]
    assert [line[0] for line in lines[2:]] == names
    printed, minilm = lines[3], lines[4]
    # 2BN²D + 2B²ND and 4BN²D; products alone are counted.
    assert printed[1] == printed[2] == f"{2 * (4 * 32**2 + 16 * 32) * 192 / 1e9:.4f}"
    assert minilm[1] == minilm[2] == f"{4 * 4 * 32**2 * 192 / 1e9:.4f}"
