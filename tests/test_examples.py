"""The scripts in examples/ run, offline and in seconds."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
# What an example needs besides fastkd[train].
NEEDS = {
    "lightning_module": "lightning",
    "peft_lora": "peft",
    "sentence_transformer": "sentence_transformers",
}
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"


def numbers(lines):
    return [
        float(line.split()[-1]) for line in lines if line.startswith(("step", "before", "after"))
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, capsys):
    assert len(path.read_text().splitlines()) < 60
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    if path.stem == "fsdp2":
        run = subprocess.run(
            [sys.executable, *TORCHRUN, str(path)], capture_output=True, text=True, timeout=120
        )
        assert run.returncode == 0, run.stderr
        lines = run.stdout.splitlines()
    else:
        runpy.run_path(str(path), run_name="__main__")
        lines = capsys.readouterr().out.splitlines()
    found = numbers(lines)
    if path.stem in ("custom_loop", "fsdp2", "peft_lora"):
        assert found[-1] < 0.6 * found[0]
    if path.stem in ("trainer", "peft_lora"):
        assert lines[-1].endswith("2 layers")
    if path.stem == "sentence_transformer":
        assert found[-1] > found[0]
    if path.stem == "lightning_module":  # the second stage, as progress tells
        assert {line.split(":")[0] for line in lines} >= {"cos_nce", "soft", "task", "total"}
