"""Plans do what the calls as written do; see `tests.kernels.planned`, which runs by itself."""

import ast
import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.support.draw import FIRST
from tools.compile_report import not_interpreted
from tools.host_time.__main__ import environment

ROOT = Path(__file__).resolve().parents[2]


def test_plans_do_what_calls_as_written_do():
    """Other calls in each run."""
    chosen = "--every", "300", "--first", str(FIRST)
    found = json.loads(not_interpreted("tests.kernels.planned", *chosen).splitlines()[-1])
    assert found.pop("count") > 8  # calls
    assert found == {"wrong": [], "off": None}


@pytest.mark.thorough
@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")
def test_a_wrong_program_is_refused_behind_triton_s_launcher(monkeypatch):
    """The planted faults again: compiled kernels, whose launches a stub of libcuda receives."""
    for name, value in environment(ROOT).items():
        monkeypatch.setenv(name, value)
    found = json.loads(not_interpreted("tests.kernels.planned", "--stub").splitlines()[-1])
    assert found["count"] > 1 and found["wrong"] == []  # kernels


def test_every_launch_can_be_recorded():
    """A kernel is started by `launch_kernel` only: a record would miss it otherwise."""
    wrong = []
    for path in sorted((ROOT / "kernels").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and "kernel" in ast.unparse(node.value):
                wrong.append(f"{path.name}: {ast.unparse(node)}")
    assert not wrong
