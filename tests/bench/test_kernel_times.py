"""The table of kernels' durations; the durations are a GPU's."""

import subprocess

import pytest

from bench import kernel_times, report


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


def test_rows_measured_with_other_kernels_are_marked():
    command = ["git", "rev-parse", "HEAD"]
    head = subprocess.run(command, cwd=report.ROOT, capture_output=True, text=True).stdout.strip()
    if not head:
        pytest.skip("no checkout")
    changed = subprocess.run(["git", "diff", "--quiet", head, "--", "kernels"], cwd=report.ROOT)
    assert changed.returncode or report.mark("knn", f"{head}+") == ""
    assert report.mark("knn", "0" * 40) == " †"
