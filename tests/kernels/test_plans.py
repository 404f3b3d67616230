"""Plans do what the calls as written do; see `tests.kernels.planned`, which runs by itself."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.host_time.__main__ import environment

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


def printed(variables, *arguments):
    command = [sys.executable, "-m", "tests.kernels.planned", *arguments]
    process = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def test_plans_do_what_calls_as_written_do():
    found = printed(os.environ | {"TRITON_INTERPRET": "0"}, "--every", "150")
    assert found.pop("calls") > 35
    assert found == {"wrong": [], "off": None}


@pytest.mark.thorough
@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")
def test_a_wrong_program_is_refused_behind_triton_s_launcher():
    """The planted faults again: compiled kernels, whose launches a stub of libcuda receives."""
    found = printed(environment(ROOT), "--stub")
    assert found["kernels"] > 1
    assert found["wrong"] == []


def test_every_launch_can_be_recorded():
    """A kernel is started by `launch_kernel` only: a record would miss it otherwise."""
    wrong = []
    for path in sorted((ROOT / "kernels").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and "kernel" in ast.unparse(node.value):
                wrong.append(f"{path.name}: {ast.unparse(node)}")
    assert not wrong
