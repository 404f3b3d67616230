"""One task through every command, on a few rows: what every task's tests begin with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastkd.distill.verify import _Step
from fastkd.train.arrow_rows import Encoded
from fastkd.train.data import load, read_file
from fastkd.train.errors import InputError
from fastkd.train.saving import read_json
from fastkd.train.tasks import Task
from tests.support.runs import crash, same_weights, stop_at
from tests.support.tiny import run, source


def through(
    out: Path,
    teacher: Path,
    train: Path,
    evals: Path,
    *,
    method: str = "soft_targets",
    finetune: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Report of a student of a fine-tuned teacher, after a run of every command on the student.

    The same command finds it complete, `evaluate` prints the scores of the run, a cache of the
    teacher gives a student too, and a step passes `fastkd verify`.
    """
    rows = {"train": train, "eval": evals, "batch_size": 8, "device": "cpu", "max_length": 16}
    rows.update(options)
    first = {"teacher": teacher, "method": method, "epochs": 1}
    if finetune:
        first["finetune_teacher"] = 1
    run("distill", **rows, **first, out=out / "run")
    assert "already complete" in run("distill", **rows, **first, resume=True, out=out / "run")
    student = out / "run/student"
    report = read_json(student / "fastkd.json")
    scores = out / "scores.json"
    length = {"device": "cpu", "batch_size": 8}
    run("evaluate", model=student, data=evals, out=scores, **length)
    said = read_json(scores)
    for name, value in report["best"]["scores"].items():
        assert said[name] == value
    told = out / "told.jsonl"
    run("predict", model=student, data=evals, out=told, **length)
    report["told"] = [json.loads(line) for line in told.read_text().splitlines()]
    learned = out / "run/teacher" if finetune else teacher
    task = {"task": options.get("task")}
    cached = {**rows, **task, "teacher": learned, "method": method}
    run("cache", **cached, out=out / "cache")
    rows.pop("teacher_layers", None)  # the cache has the student
    again = {**rows, "method": method, "epochs": 1, "teacher_cache": out / "cache"}
    run("distill", **again, out=out / "again")
    assert read_json(out / "again/student/fastkd.json")["best"]["scores"]
    cached.pop("batch_size")
    verified(**cached)
    return report


def verified(**options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Compiling a model takes longer than all else: tests/distill/test_verify.py does.
        patch.setattr(_Step, "compiled", lambda step, backend: step.again())
        run("verify", **options, rows=4, ranks=0)


def loss_of(task: Task, model: nn.Module, tokenizer: Any, rows: Encoded) -> tuple[Any, float]:
    """Answers for all rows in one batch, and the loss that transformers computes of it."""
    batch = task.collator(tokenizer)(rows.__getitems__(range(len(rows))))
    with torch.no_grad():
        return task.answer(model, batch, tokenizer), model(**batch).loss.item()


def rows_of(path: Path, task: type[Task], text: str | None = None) -> Any:
    """The rows of a file, which is written first if a text is given."""
    if text is not None:
        path.write_text(text, encoding="utf-8")
    return read_file(path, task.columns, "--train", task=task)


def refused(folder: Path, task: str, text: str, words: str, name: str = "a.jsonl") -> None:
    """Assert that a file is refused by a sentence that names it."""
    path = folder / name
    path.write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        load(source(task=task, train=path, evals=path))
    assert str(path) in str(caught.value)


def killed_and_resumed(out: Path, teacher: Path, train: Path, evals: Path, **options: Any) -> None:
    """Assert that a run interrupted after step 3 and resumed equals one without interruption."""
    rows = {"teacher": teacher, "train": train, "eval": evals, "device": "cpu", "max_length": 16}
    rows |= {"batch_size": 4, "epochs": 2, "checkpoint_every": 2, **options}
    run("distill", **rows, out=out / "whole")
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 3, crash)
        run("distill", **rows, out=out / "killed", expect=130)
    run("distill", **rows, resume=True, out=out / "killed")
    assert same_weights(out / "whole", out / "killed")
    past = [read_json(out / name / "student/fastkd.json") for name in ("whole", "killed")]
    scores = [[entry["scores"] for entry in report["history"]] for report in past]
    assert scores[0] == scores[1] and len(scores[0]) == 2
