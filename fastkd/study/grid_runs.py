"""The runs of a grid: each is a `fastkd distill`, in a directory of its own, with one result file.

Teachers that the runs fine-tune are trained once, with seed 0, and shared. Processes take the runs
that are neither done nor locked, so a study continues after a stop.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from fastkd._core.extras import require
from fastkd.study.grid import Cell, Grid
from fastkd.study.run_measurements import similarities
from fastkd.train import tasks
from fastkd.train.config import DistillConfig
from fastkd.train.distillation import run_distillation
from fastkd.train.errors import InputError, RunFailed, TrainingFailed
from fastkd.train.options import as_json
from fastkd.train.progress import Display, format_scores
from fastkd.train.run import Run
from fastkd.train.saving import read_json, write_json
from fastkd.train.settings import DistillOptions

filelock: Any = require("filelock", "train")

#: Options on which a fine-tuned teacher depends; all others are the defaults of `fastkd distill`.
OF_TEACHER = (
    "teacher", "task", "data", "data_config", "train_split", "eval_split", "train", "evals",
    "text_column", "text_pair_column", "label_column", "no_header", "labels", "metric",
    "max_train_rows", "max_eval_rows", "trust_remote_code", "attention", "max_length", "precision",
    "device_name", "finetune_teacher", "teacher_learning_rate",
)  # fmt: skip


#: Measurements of a run besides its scores.
MEASURED = ("predictions", "references", "rccc", "intra_class_similarity")


def measured(run: Run, student: PreTrainedModel) -> dict[str, Any]:
    """Predictions of the best student, the right ones, and the similarities of its layers."""
    rows, task = run.eval_rows[""], run.task
    return {
        "predictions": task.short_answers(run.answers[""], rows),
        "references": task.references(rows),
        **similarities(run, student),
    }


def key_of(options: Mapping[str, Any]) -> str:
    """Short hash of options."""
    text = json.dumps({k: str(v) for k, v in options.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


class GridRuns:
    """All runs of a grid in the directory ``out``."""

    def __init__(self, grid: Grid, out: Path, display: Display | None = None):
        self.grid, self.out, self.display = grid, out, display or Display()

    def path(self, cell: Cell) -> Path:
        """Result file of a run."""
        return self.out / "runs" / f"{cell.task}-{cell.seed}-{key_of(cell.options)}.json"

    def result(self, cell: Cell) -> dict[str, Any] | None:
        """Content of the result file; None before the run is done."""
        found = read_json(self.path(cell))
        return found if isinstance(found, dict) and "options" in found else None

    def check(self) -> None:
        """Raise for options of a run that exclude each other."""
        for cell in {key_of(c.options): c for c in self.grid.cells}.values():
            try:
                DistillOptions(**cell.options)
            except InputError as error:
                raise InputError(f"{cell.variant} on {cell.task}: {error}") from None

    def train(self, workers: int) -> bool:
        """Train all runs that are missing in ``workers`` processes; False if one of them died."""
        self.check()
        (self.out / "runs").mkdir(parents=True, exist_ok=True)
        if workers == 1:
            self.work()
            return True
        context = multiprocessing.get_context("spawn")
        threads = max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // workers))
        given = (self.grid, self.out, threads, self.display.shared())
        pool = [context.Process(target=_worker, args=given) for _ in range(workers)]
        for worker in pool:
            worker.start()
        for worker in pool:
            worker.join()
        return not any(worker.exitcode for worker in pool)

    def work(self) -> None:
        """Train runs until each is done or locked by another process."""
        cells = sorted(self.grid.cells, key=lambda cell: self.grid.seeds.index(cell.seed))
        for number, cell in enumerate(cells, 1):
            if self.result(cell) is not None:
                continue
            lock = filelock.FileLock(self.path(cell).with_suffix(".lock"), blocking=False)
            with contextlib.suppress(filelock.Timeout), lock:
                if self.result(cell) is None:
                    result = self._run(cell)
                    write_json(self.path(cell), result)
                    text = result.get("failed") or format_scores(result["scores"])
                    name = f"{cell.task}  {cell.variant}  seed {cell.seed}"
                    self.display.say(f"{number}/{len(cells)}  {name}:  {text}")

    def _run(self, cell: Cell) -> dict[str, Any]:
        """Run `fastkd distill` of a cell; its result."""
        folder = self.path(cell).with_suffix("")
        options: dict[str, Any] = {**self.options(cell), "out": folder}
        options["resume"] = folder.exists()
        config = DistillConfig(**options)
        about = {"options": as_json(config), "values": dict(cell.values), "variant": cell.variant,
                 "task": cell.task, "seed": cell.seed}  # fmt: skip
        about = json.loads(json.dumps(about, default=str))
        try:
            report = run_distillation(config, measure=measured)
        except TrainingFailed as error:
            return {**about, "failed": str(error)}
        finally:
            if (folder / "student").exists():
                shutil.rmtree(folder)
        test = report.get("test", {})
        return {
            **about,
            "scores": {**report["student"], **_mismatched(test.get("student", {}))},
            "teacher": {**report["teacher"], **_mismatched(test.get("teacher", {}))},
            "lower_is_better": sorted(tasks.named(report["task"]).lower_is_better),
            "best": report["best"]["epoch"],
            "seconds": report["seconds"]["training"],
            "recipe": report.get("recipe", {}),
            "parameters": report["parameters"],
            "history": report["history"],
            **{name: report[name] for name in MEASURED if name in report},
        }

    def options(self, cell: Cell) -> dict[str, Any]:
        """Options of `fastkd distill` for a cell, with its fine-tuned teacher."""
        options = dict(cell.options)
        if options.get("finetune_teacher") and not options.get("teacher_cache"):
            options["teacher"] = str(self._teacher(options))
            options = {
                k: v for k, v in options.items()
                if k not in ("finetune_teacher", "teacher_learning_rate")
            }  # fmt: skip
        return options

    def _teacher(self, options: Mapping[str, Any]) -> Path:
        """The fine-tuned teacher; whoever comes first trains it, beside a student of one step."""
        own = {name: options[name] for name in OF_TEACHER if name in options}
        folder = self.out / "teachers" / f"{options.get('task') or 'own'}-{key_of(own)}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.with_suffix(".lock")):
            if not (folder / "student").exists():
                self.display.say(f"fine-tuning {options['teacher']} on {options.get('task')} ...")
                steps = {"method": "labels", "student_layers": 1, "training_steps": 1, "seed": 0}
                where: dict[str, Any] = {"out": folder, "resume": folder.exists()}
                config = DistillConfig(**{**own, **steps, **where})
                run_distillation(config)
        return folder / "teacher"


def _mismatched(scores: Mapping[str, float]) -> dict[str, float]:
    """Scores of the test rows, which are MNLI's mismatched ones in GLUE's own files."""
    return {f"{name}_mm": value for name, value in scores.items()}


def _worker(
    grid: Grid, out: Path, threads: int, shared: Callable[[], AbstractContextManager[Display]]
) -> None:
    torch.set_num_threads(threads)
    try:
        with shared() as display:
            GridRuns(grid, out, display).work()
    except (InputError, RunFailed) as error:
        sys.exit(f"Error: {error}")
