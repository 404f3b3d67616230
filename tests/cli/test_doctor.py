"""`fastkd doctor`: its report, and its exit code, 1 if a backend is wrong."""

import functools
import subprocess
import sys
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from fastkd._core import dispatch, extension
from fastkd._core.versions import TESTED
from fastkd.cli import doctor
from fastkd.cli.main import app


def examined():
    lines = []
    return doctor.examine(lines.append), "\n".join(lines)


def test_all_backends_that_run_are_right():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0 and "all right" in result.output, result.output
    for package, versions in TESTED.items():
        assert f"{package} {', '.join(versions)}\n" in result.output
    table = result.output.split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in table[2:]] == [trial.function for trial in doctor.TRIALS]
    assert max(map(len, table)) <= 80
    if extension.CPU:  # which computes roots, whatever the backend
        (cells,) = [line.split(maxsplit=5) for line in table if line.startswith("sqrtm ")]
        assert cells[1:5] == ["no", "kernel", "no", "kernel"] and cells[5].startswith("ok")


@pytest.mark.thorough
def test_the_losses_alone_check_themselves():
    extras = "typer rich transformers tokenizers datasets accelerate sklearn scipy pyarrow yaml"
    code = f"import sys; sys.modules.update(dict.fromkeys({extras.split()}))\n"
    code += "from fastkd import __main__; __main__.main()"
    for word, end, said in (("doctor", 0, "all right"), ("distill", 1, "needs the extra train (")):
        done = subprocess.run([sys.executable, "-c", code, word], capture_output=True, text=True)
        assert said in done.stdout + done.stderr and done.returncode == end, done


def test_the_verdict_counts_the_extension(monkeypatch):
    """One of narrow vectors, a broken one and a missing one, and Triton that is not installed."""
    monkeypatch.setattr(doctor, "TRIALS", doctor.TRIALS[:1])
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "TRIALS", ())
        if extension.CPU:  # as clang's builds have it, and those of gcc before 12
            patch.setattr(torch.ops.fastkd_cpp, "vector_bytes", lambda: 16)
            patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
            assert "s of 16 bytes; a build by g++ 12 or later takes those of AVX2" in examined()[1]
        broken = mock.Mock(side_effect=ImportError("undefined symbol: x\nmore"))
        patch.setattr(doctor.importlib, "import_module", broken)
        good, said = examined()
    assert not good and "something is wrong" in said and "(undefined symbol: x)" in said
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "TRITON_INSTALLED", False)
    monkeypatch.setattr(extension, "CPU", False)
    monkeypatch.setitem(sys.modules, "fastkd._C", None)
    good, said = examined()
    assert good and "all right" not in said and "triton package is not installed" in said
    assert "slower than it can be: no extension; in a checkout: pip install" in said


@pytest.mark.parametrize(("wrong", "said"), [
    (lambda right, x, *rest, **options: 1.01 * right(x, *rest, **options), "relative error"),
    (lambda right, x, *rest, **options: right(2 * x - x.detach(), *rest, **options), "relative"),
    (lambda right, x, *rest, **options: 1 / 0, "ZeroDivisionError: division by zero"),
])  # fmt: skip
def test_a_wrong_backend_fails(monkeypatch, wrong, said):
    right = doctor.TRIALS[0].load()
    monkeypatch.setattr(doctor, "TRIALS", doctor.TRIALS[:1])
    monkeypatch.setattr("fastkd.losses.relation.relation_loss", functools.partial(wrong, right))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1 and "something is wrong" in result.output
    assert f"failed        relation_loss, torch: {said}" in result.output


@pytest.mark.gpu
def test_reports_plans_on_a_gpu():
    """Each loss is called until its plan is recorded, proved and repeated."""
    assert "plans         on, and proved" in examined()[1]
