"""Commands of README, CONTRIBUTING and docs: each runs here up to its work, or in a named test."""

import ast
import functools
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

import fastkd
import fastkd.distill
from fastkd._core.extras import how_to_get
from fastkd.cli.main import app
from fastkd.train.errors import RunFailed

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Commands that can't be stopped before their work: their beginning, and the test that runs them.
RUN_BY = {
    "fastkd doctor": "cli/test_doctor.py::test_all_backends_that_run_are_right",
    "pip install torch": "test_install.py::test_install_without_torch_",
    "pip install --no-build-isolation .": "test_install.py::test_install_without_torch_or_a_",
    "pip install ./fastkd-": "test_install.py::test_sdist_builds_a_wheel_that_installs",
    ".venv/bin/python -m pytest tests/test_relation.py": "test_relation.py::test_parallel",
    ".venv/bin/python -m tests.fuzz": "test_values.py::test_random_calls_agree_with_the_oracles",
    ".venv/bin/python -m tools.compile_report": "kernels/test_compile.py::test_compiles_without_",
    ".venv/bin/python -m tools.host_time": "tools/test_host_time.py::test_measures_calls_and_",
    "optimum-cli export onnx": "cli/test_use.py::test_onnx_files",
    "pytest bench": "bench/test_suite.py::test_a_group_is_timed_and_reported",
    ".venv/bin/pytest bench": "bench/test_suite.py::test_a_group_is_timed_and_reported",
    "pytest-benchmark compare": "bench/test_report.py::test_runs_of_one_machine_are_merged",
}


def documented():
    """Commands of the pages, also of their tables, without their environment variables."""
    for path in PAGES:
        text = path.read_text()
        blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, re.DOTALL)
        blocks += re.findall(r"(?m)^\| .+ \| `(fastkd [^`]+)` \|$", text)
        for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
            words = shlex.split(re.sub(r"^([A-Z_]+=\S* )*", "", line), comments=True)
            if words:
                yield pytest.param(words, id=f"{path.stem}: {' '.join(words)[:60]}")


COMMANDS = list(documented())


@functools.cache
def made() -> subprocess.CompletedProcess:
    """A dry run of all targets of the pages at once."""
    words = [word for param in COMMANDS for word in param.values[0][1:]
             if param.values[0][0] == "make"]  # fmt: skip
    return subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_of_the_docs_runs(words, monkeypatch):
    line = " ".join(words)
    if words[0] == "make":
        if shutil.which("make") is None:
            pytest.skip("no make here")
        assert made().returncode == 0, made().stderr
        return
    found = [test for start, test in RUN_BY.items() if line.startswith(start)]
    if found:
        path, _, name = found[0].partition("::")
        assert f"def {name}" in (ROOT / "tests" / path).read_text()
        return
    if words[0] == "torchrun":
        words = words[words.index("-m") + 1 :]
    assert words[0] == "fastkd", f"no test runs {line!r}: stop it before its work, or name one"
    assert all((ROOT / word).exists() for word in words if word.startswith("bench/"))
    assert "reached the work" in started(words[1:], monkeypatch)


def started(words, monkeypatch):
    """Output of a command that stops before its work: its options exist and are consistent."""
    stop = mock.Mock(side_effect=RunFailed("reached the work"))
    for place in (
        "train.distillation.run_distillation", "cli.demo.run_demo",
        "cli.predict_command.evaluate", "cli.predict_command.predict",
        "cli.analyze_command.run", "cli.cache_command.write", "cli.cache_command.verify",
        "cli.augment_command.run", "cli.study_command.run", "train.stages.read",
    ):  # fmt: skip
        monkeypatch.setattr(f"fastkd.{place}", stop)
    for early in ("cli.main.check_inputs", "study.grid.early"):  # of files of examples
        monkeypatch.setattr(f"fastkd.{early}", lambda settings: None)
    return CliRunner().invoke(app, words).stderr


PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
# Pages that other tests run, or that show an error of another tool.
RUN_ELSEWHERE = {"any_loop.md", "versions.md"}
WITH_CODE = [
    str(path.relative_to(ROOT))
    for path in PAGES
    if path.name not in RUN_ELSEWHERE and PYTHON.search(path.read_text())
]


@pytest.mark.parametrize("page", WITH_CODE)
def test_python_blocks_of_the_pages_run(page, capsys):
    for block in PYTHON.findall((ROOT / page).read_text()):
        exec(block, {})


def test_sketches_use_existing_names():
    """Blocks marked ```py, which need the reader's models, data and packages, are only checked."""
    files = ("sentence_transformers.py", "served_teacher.py", "top_k_files.py")
    losses = "".join((ROOT / "fastkd/integrations" / name).read_text() for name in files)
    known = {"SFTTrainer", "GKDTrainer", "SentenceTransformerTrainer"}
    known |= {*fastkd.__all__, *fastkd.distill.__all__, *re.findall(r"(?m)^class (\w+)", losses)}
    sketches = re.findall(r"```py\n(.*?)```", "".join(p.read_text() for p in PAGES), re.DOTALL)
    assert len(sketches) == 5
    for sketch in sketches:
        tree = ast.parse(sketch)
        made = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert {name for name in used if name[0].isupper()} <= known | made


def test_an_invalid_command_is_detected(monkeypatch):
    for words in (["distill", "--no-such-option"], ["evaluate", "--model", "x"]):
        assert "reached the work" not in started(words, monkeypatch)
    assert len(COMMANDS) > 15 and len(WITH_CODE) > 12


def test_pages_install_extras_by_one_command():
    """The command is that of `how_to_get`, which knows whether this is a checkout."""
    sources = [*ROOT.glob("fastkd/**/*.py"), *ROOT.glob("bench/*.py"), *PAGES]
    named = {p.name for p in sources if re.search(r"pip install \S*fastkd\[", p.read_text())}
    assert named <= {"extras.py", "design.md"}
    assert f"-e '{ROOT}[train]'" in how_to_get("train") or "-e '.[train]'" in how_to_get("train")
