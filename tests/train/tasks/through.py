"""One task through every command, on a few rows: what every task's tests begin with."""

import json
from pathlib import Path
from typing import Any

from fastkd.train.saving import read_json
from tests.support.tiny import run


def through(out: Path, teacher: Path, train: Path, evals: Path, **options: Any) -> dict[str, Any]:
    """The report of a student whose teacher learned the task first, then used by each command.

    Its evaluation says the scores of the run, a cache of the teacher gives a student too, and a
    step passes `fastkd verify`.
    """
    rows = {"train": train, "eval": evals, "batch_size": 4, "device": "cpu", "max_length": 16}
    rows.update(options)
    first = {"teacher": teacher, "finetune_teacher": 1, "method": "soft_targets", "epochs": 1}
    run("distill", **rows, **first, out=out / "run")
    student = out / "run/student"
    report = read_json(student / "fastkd.json")
    scores = out / "scores.json"
    length = {"device": "cpu", "batch_size": 4}
    run("evaluate", model=student, data=evals, out=scores, **length)
    said = read_json(scores)
    for name, value in report["best"]["scores"].items():
        assert said[name] == value
    told = out / "told.jsonl"
    run("predict", model=student, data=evals, out=told, **length)
    report["told"] = [json.loads(line) for line in told.read_text().splitlines()]
    learned = out / "run/teacher"
    task = {"task": options.get("task")}
    cached = {**rows, **task, "teacher": learned, "method": "soft_targets"}
    run("cache", **cached, out=out / "cache")
    again = {**rows, "method": "soft_targets", "epochs": 1, "teacher_cache": out / "cache"}
    run("distill", **again, out=out / "again")
    assert read_json(out / "again/student/fastkd.json")["best"]["scores"]
    few = {**cached, "rows": 4, "ranks": 0}
    few.pop("batch_size")
    run("verify", **few)
    return report
