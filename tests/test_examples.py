"""The scripts in examples/ run, offline and in seconds."""

import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launched import Launch
from tests.support.draw import FIRST

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
# Packages that an example needs besides fastkd[train].
NEEDS = {
    "lightning_module": "lightning",
    "lora_decoder": "peft",
    "peft_lora": "peft",
    "sentence_transformer": "sentence_transformers",
    "trl_sft": "trl",
}

# Examples that print their loss at some steps.
FALLING = (
    "custom_loop", "fsdp2", "lora_decoder", "packed_rows", "peft_lora", "quantized_student",
    "served_hidden_states", "top_k_server", "trl_sft",
)  # fmt: skip

# Options that make an example short, and lines of those that train both models.
SHORT = {"draft_model": "--decoder-steps 80 --draft-steps 50 --rows 4 --contexts 256"}
LINES = {"draft_model": 170, "served_hidden_states": 90}
LONG = ("draft_model", "served_hidden_states")
# A half of the others is drawn anew in each run; make test-all runs all.
DRAWN = random.Random(FIRST).sample([x.stem for x in EXAMPLES if x.stem not in LONG], 7)
# Examples that start a process, which imports the script.
STARTING = ("served_hidden_states",)


def numbers(lines):
    return [
        float(line.split()[-1]) for line in lines if line.startswith(("step", "before", "after"))
    ]


@pytest.mark.filterwarnings("ignore", "error::DeprecationWarning:__main__")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.thorough] * (path.stem not in DRAWN))
        for path in EXAMPLES
    ],
)
def test_example_runs(path, capsys, tmp_path, monkeypatch):
    assert len(path.read_text().splitlines()) < LINES.get(path.stem, 60)
    monkeypatch.setattr("sys.argv", [str(path), *SHORT.get(path.stem, "").split()])
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    if path.stem == "fsdp2":
        launch = Launch(tmp_path, 2, runpy.run_path, str(path), None, "__main__")
        out, errors = launch.end()
        assert launch.process.exitcode == 0, errors
        lines = out.splitlines()
    elif path.stem in STARTING:
        command = [sys.executable, str(path)]
        lines = subprocess.run(
            command, check=True, text=True, stdout=subprocess.PIPE
        ).stdout.splitlines()
    else:
        runpy.run_path(str(path), run_name="__main__")
        lines = capsys.readouterr().out.splitlines()
    found = numbers(lines)
    if path.stem in FALLING:
        assert found[-1] < 0.6 * found[0]
    if path.stem in ("trainer", "lora_decoder", "peft_lora"):
        assert lines[-1].endswith("2 layers")
    if path.stem in ("sentence_transformer", "draft_model"):
        assert found[-1] > found[0]
    if path.stem == "lightning_module":  # the second stage, by the progress of training
        assert {line.split(":")[0] for line in lines} >= {"cos_nce", "soft", "task", "total"}
