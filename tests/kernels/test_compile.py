"""Every kernel variant that a public call can choose compiles for every architecture."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from bench.compile_report import modules


@pytest.mark.parametrize("module", modules())
def test_compiles_without_spills(module):
    """In a process of its own: under TRITON_INTERPRET there is nothing to compile."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "bench.compile_report", module, "--json"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert rows, f"compile_variants() of {module} yields nothing"
    wrong = [
        f"{row['arch']} {row['kernel']} {row['variant']}: {'; '.join(row['problems'])}"
        for row in rows
        if row["problems"]
    ]
    assert not wrong, "\n".join(wrong)
