"""The code of docs/any_loop.md runs, block after block."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "any_loop.md"


@pytest.mark.filterwarnings("ignore")
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names = {"__name__": "any_loop"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert len(blocks) == 9
    printed = capsys.readouterr().out
    assert "cached teacher" in printed and "differs" not in printed
