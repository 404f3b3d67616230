"""The code of docs/any_loop.md runs, block after block."""

import re
from pathlib import Path

import pytest
import torch

from fastkd.distill import DistillationTrainer, Distiller, SoftTargets
from fastkd.distill.verify import verify
from tests.distill import support
from tests.distill.models import set_dropout, split
from tests.distill.test_trainer import arguments

PAGE = Path(__file__).parents[2] / "docs" / "any_loop.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


@pytest.mark.filterwarnings("ignore")
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # Compiling takes seconds, and is in test_verify.py.
    monkeypatch.setitem(verify.__kwdefaults__, "compile_backend", None)
    names = {"__name__": "any_loop"}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), names)
    assert len(BLOCKS) == 13
    printed = capsys.readouterr().out
    assert all(way in printed for way in ("cached teacher", "resumed in the middle"))
    assert "differs" not in printed


def test_a_trainer_of_the_student_takes_the_steps_of_a_distillation_trainer(tmp_path):
    """Of unequal batches, two a step."""
    names: dict = {}
    exec(next(block for block in BLOCKS if "class Distilled" in block), names)
    teacher, data = (make("llama", "next word") for make in (support.model_of, support.data_of))
    rows = 2 * split(data)
    students = []
    for kind in (DistillationTrainer, names["Distilled"]):
        distiller = Distiller(teacher, support.model_of("llama", "next word"), SoftTargets())
        set_dropout(distiller)
        given = {"max_steps": 2, "per_device_train_batch_size": 1, "learning_rate": 1e-2}
        args = arguments(tmp_path, gradient_accumulation_steps=3, save_strategy="no", **given)
        own = kind is DistillationTrainer
        run = kind(model=distiller if own else distiller.student, args=args, train_dataset=rows)
        run.distiller = distiller
        run.train()
        students.append(distiller.student.state_dict())
    torch.testing.assert_close(*students, rtol=1e-6, atol=1e-7)
