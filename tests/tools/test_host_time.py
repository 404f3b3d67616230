"""``python -m tools.host_time`` runs every call over its stub of libcuda."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia")

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "tools.host_time", "--repeat", "5", *arguments]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")
def test_measures_calls_and_counts_launches():
    names = ["hidden mse B32 mask", "forward KL 32x2"]
    found = json.loads(run("--json", *names))
    assert set(found) == set(names)
    for forward, backward, launches in found.values():
        assert 1 < forward < 1e5 and 1 < backward < 1e5
        assert launches >= 2
    table = run(*names).splitlines()
    assert table[0].split() == ["call", "forward", "backward", "launches"]
    assert {line[:28].strip() for line in table[1:]} == set(names)
