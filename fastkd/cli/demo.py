"""`fastkd demo`: a real teacher, real text, every method, no network.

A packaged sentence encoder learns to tell from a docstring which area of Python's library it comes
from. Then 3-layer students learn the same, each by another method, with the same budget and few
labels: most docstrings come without one, and only the teacher knows more about them. It is a small
study (`fastkd.study`) with its report, and the best student to take home.
"""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from fastkd.cli.command_settings import DemoSettings
from fastkd.cli.display import RichDisplay
from fastkd.distill.methods import METHODS
from fastkd.study import grid, grid_report
from fastkd.study.grid import Grid, StudySettings
from fastkd.study.grid_runs import GridRuns
from fastkd.study.statistics import Summary
from fastkd.train.config import Config
from fastkd.train.distillation import run_distillation
from fastkd.train.errors import InputError
from fastkd.train.launcher import leave_launcher
from fastkd.train.packaged_teacher import teacher_path
from fastkd.train.processes import choose_device
from fastkd.train.saving import locked, move_directory

#: Columns of the report's table that are printed beside the method's name.
COLUMNS = ("score", "difference", "95% over seeds", "seconds")
MOST_PROCESSES = 4

#: Fields of the study that set its size; it takes five to ten minutes on two CPU cores.
SIZE: dict[str, Any] = {
    # Rows of each area, to train on and held out.
    "tasks": {"docstrings": {"docstrings": "areas", "rows": [300, 60]}},
    "labelled": 24,
    "seeds": 3,
    "finetune_teacher": 1.9,
    "steps": 40,
    "batch_size": 32,
    "max_length": 20,
}
#: With --fast.
FAST = {
    "tasks": {"docstrings": {"docstrings": "areas", "rows": [8, 4]}}, "labelled": 8, "seeds": 2,
    "finetune_teacher": 0.1, "steps": 2, "batch_size": 4, "max_length": 12,
}  # fmt: skip


def make_study(size: dict[str, Any], settings: DemoSettings) -> Grid:
    """The demo as a study."""
    found = {
        **size,
        "seeds": [*range(settings.seed, settings.seed + size["seeds"])],
        "teacher": str(teacher_path()),
        "teacher_learning_rate": 3e-4,
        "student_layers": 3,
        "learning_rate": 2e-4,
        "device": settings.device_name,
        "methods": {name: {} for name in METHODS},
    }
    return grid.make(found, Path(), StudySettings(out=settings.out / "runs"))


def run_demo(settings: DemoSettings, display: RichDisplay) -> None:
    """Run `fastkd demo`."""
    began = time.perf_counter()
    os.environ["HF_HUB_OFFLINE"] = "1"
    teacher = teacher_path()
    size = dict(FAST if settings.fast else SIZE)
    if settings.steps is not None:
        size["steps"] = settings.steps
    study = make_study(size, settings)
    out = settings.out
    runs = GridRuns(study, out / "runs", display)
    if (out / "student").exists() and not (out / grid_report.FILES[0]).exists():
        raise InputError(f"--out {out} holds a student that isn't the demo's; give another --out")
    number, together = leave_launcher()
    if number:  # a launcher's other processes help the first
        runs.train(1)
        return
    with locked(out), display:
        grid_report.claim(out)
        device = choose_device(settings.device_name, "fp32")
        display.say(f"teacher: {teacher.parent.name}, device {device}, seed {settings.seed}")
        display.say("reading the docstrings of Python's standard library ...")
        runs.check()
        options = study.cells[0].options
        train, held_out = (
            [json.loads(line)["label"] for line in options[name].read_text().splitlines()]
            for name in ("train", "evals")
        )
        names = sorted(set(train))
        display.say(
            f"{len(train)} docstrings to train on, {size['labelled']} of them with a label "
            f"for the students, {len(held_out)} held out; "
            f"{len(names)} areas: {', '.join(names)} (chance: {1 / len(names):.3f})"
        )
        display.say(
            f"students: {len(study.variants)} methods, {size['seeds']} seeds, {size['steps']} "
            "steps each"
        )
        cores = min(MOST_PROCESSES, os.cpu_count() or 1)
        alone = settings.fast or together > 1 or device.type == "cuda"
        runs.train(1 if alone else cores)
        runs.finish()
        (summary,) = grid_report.write(runs, out)
        display.say("training the best student once more, to keep it ...")
        best = max((row for row in summary.rows if row.seeds), key=lambda row: row.mean).variant
        speedup = _keep_best(best, runs, out)
        sizes = summary.example["parameters"]
    _show(summary, display)
    for line in (
        f"a student has {sizes['student'] / sizes['teacher']:.0%} of the teacher's parameters and "
        f"answers {speedup:.1f} times as fast",
        grid_report.headline(study, [summary]),
        f"{time.perf_counter() - began:.0f} s in all; best student {best}, saved in "
        f"{out / 'student'}; report: {out / grid_report.FILES[0]}",
    ):
        display.say(line)


def _keep_best(best: str, runs: GridRuns, out: Path) -> float:
    """Train the best student again, the same bits; return how many times as fast it is."""
    cell = next(cell for cell in runs.cells if cell.variant == best)
    folder = runs.out / "best"
    shutil.rmtree(folder, ignore_errors=True)
    report = run_distillation(Config.of({**runs.options(cell), "out": folder}))
    move_directory(folder / "student", out / "student")
    seconds = report["seconds_a_batch"]
    return seconds["teacher"] / seconds["student"]


def _show(summary: Summary, display: RichDisplay) -> None:
    """Print the report's table: the columns of accuracy, gain and time."""
    table = Table("", box=box.SIMPLE_HEAD)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    table.add_row("teacher", f"{summary.teacher_score:.4f}")
    for row in summary.rows:
        cells = dict(zip(grid_report.HEADINGS, grid_report.cells(row), strict=True))
        table.add_row(row.variant, *(cells[name] for name in COLUMNS))
    display.console.print(table)
