"""The scripts in examples/ run, offline and in seconds."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    if path.stem == "custom_loop":
        losses = [float(line.split()[-1]) for line in lines]
        assert losses[-1] < 0.5 * losses[0]
    if path.stem == "trainer":
        assert lines[-1] == "2 layers"
