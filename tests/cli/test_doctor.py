"""`fastkd doctor`: its report, and its exit code, 1 if a backend is wrong."""

import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from fastkd._core import dispatch, extension
from fastkd._core.extras import how_to_get
from fastkd._core.versions import TESTED
from fastkd.cli import doctor
from fastkd.cli.main import app

TRIALS = doctor.TRIALS


def run():
    return CliRunner().invoke(app, ["doctor"])


def test_all_backends_that_run_are_right():
    """In a table of 80 columns."""
    result = run()
    assert result.exit_code == 0, result.output
    names = ("python", "torch", "triton", "transformers", "device", "extension", "all right")
    for part in (*names, *(trial.function for trial in doctor.TRIALS)):
        assert part in result.output
    for package, versions in TESTED.items():
        assert f"{package} {', '.join(versions)}\n" in result.output
    table = result.output.split("\n\n")[1].splitlines()
    assert max(map(len, table)) <= 80 and len(table) == 2 + len(doctor.TRIALS)
    if extension.CPU:  # which computes roots, whatever the backend
        (cells,) = [line.split(maxsplit=5) for line in table if line.startswith("sqrtm ")]
        assert cells[1:5] == ["no", "kernel", "no", "kernel"] and cells[5].startswith("ok")


@pytest.mark.thorough
def test_the_losses_alone_check_themselves_and_have_a_help():
    """With only the packages of the losses installed."""
    extras = ("typer", "rich", "transformers", "datasets", "accelerate", "sklearn", "scipy",
              "matplotlib", "safetensors", "pyarrow", "yaml", "tokenizers")  # fmt: skip
    code = f"""
import sys
sys.modules.update(dict.fromkeys({extras}))
from fastkd.__main__ import main
from fastkd.cli import doctor
doctor.TRIALS = doctor.TRIALS[:1]
for word in ("--version", "--help", "doctor", "distill"):
    sys.argv[1:] = [word]
    try:
        main()
    except SystemExit as end:
        print("=", end.code or 0, "=")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    version, helped, checked, trained, _ = re.split(r"(?<=\d) =\n", result.stdout)
    assert version.startswith("fastkd ") and "fastkd doctor" in helped
    assert f"need the extra train; {how_to_get('train')}" in " ".join(helped.split())
    assert doctor.TRIALS[0].function in checked and "verdict" in checked
    ends = [part[-1] for part in (version, helped, checked, trained)]
    assert ends == ["0", "0", "0", "1"], result.stderr
    words = r"^Error: fastkd distill needs the extra train \(rich is not installed\); get it with: "
    assert re.search(words, result.stderr, re.MULTILINE), result.stderr


def test_the_verdict_counts_the_extension(monkeypatch):
    """A missing one, a broken one, and Triton that is not installed."""
    monkeypatch.setattr(doctor, "TRIALS", ())
    real = doctor.importlib.import_module

    def broken(name):
        if name == "fastkd._C":
            raise ImportError("undefined symbol: x\nmore")
        return real(name)

    with monkeypatch.context() as patch:
        patch.setattr(doctor.importlib, "import_module", broken)
        result = run()
    assert "can't be loaded (undefined symbol: x)" in result.output
    assert result.exit_code == 1 and "something is wrong" in result.output
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "TRITON_INSTALLED", False)
    monkeypatch.setattr(extension, "CPU", False)
    monkeypatch.setitem(sys.modules, "fastkd._C", None)
    result = run()
    assert result.exit_code == 0
    assert "slower than it can be: no extension; in a checkout: pip install" in result.output
    assert "all right" not in result.output
    monkeypatch.setattr(doctor, "TRIALS", TRIALS[:1])
    assert "triton package is not installed" in run().output


@pytest.mark.skipif(not extension.CPU, reason="fastkd._C is not built")
def test_names_the_vectors_in_use(monkeypatch):
    monkeypatch.setattr(doctor, "TRIALS", ())
    assert f"vectors of {torch.ops.fastkd_cpp.vector_bytes()} bytes\n" in run().output
    # As clang's builds, and those of gcc before 12.
    monkeypatch.setattr(torch.ops.fastkd_cpp, "vector_bytes", lambda: 16)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert "16 bytes; a build by g++ 12 or later takes those of AVX2" in run().output


@pytest.mark.parametrize("mistake", ["value", "gradient", "error"])
def test_a_wrong_backend_fails(monkeypatch, mistake):
    trial = doctor.TRIALS[0]
    right = trial.load()

    def wrong(student, *args, backend="auto", **options):
        if mistake == "error":
            raise RuntimeError("no such kernel")
        if mistake == "gradient":
            student = 2 * student - student.detach()
        return right(student, *args, **options) * (1.01 if mistake == "value" else 1)

    monkeypatch.setattr(doctor, "TRIALS", (trial,))
    monkeypatch.setattr("fastkd.losses.relation.relation_loss", wrong)
    result = run()
    assert result.exit_code == 1
    assert "failed" in result.output and "something is wrong" in result.output
    assert ("no such kernel" in result.output) == (mistake == "error")


@pytest.mark.gpu
def test_reports_plans_on_a_gpu():
    """Each loss is called until its plan is recorded, proved and repeated."""
    assert "plans         on, and proved" in run().output
