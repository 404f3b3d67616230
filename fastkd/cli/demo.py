"""`fastkd demo`: a real teacher, real text, every method, no network.

A packaged sentence encoder learns to tell from a docstring which area of Python's library it comes
from. Then 3-layer students learn the same, each by another method, with the same budget and few
labels: most docstrings come without one, and only the teacher knows more about them. It is a small
study (`fastkd.study`), with a picture, and the best student to take home.
"""

import dataclasses
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import fastkd
from fastkd.analysis import plot_relations
from fastkd.analysis.pictures import new_figure
from fastkd.cli.command_settings import DemoSettings
from fastkd.cli.display import RichDisplay, say
from fastkd.distill.methods import METHODS
from fastkd.study import grid
from fastkd.study.grid import Grid, StudySettings
from fastkd.study.grid_report import best_cells
from fastkd.study.grid_runs import GridRuns
from fastkd.study.statistics import LEVEL, Difference, summarize
from fastkd.train.config import Config
from fastkd.train.distillation import run_distillation
from fastkd.train.errors import InputError
from fastkd.train.launcher import leave_launcher
from fastkd.train.packaged_teacher import teacher_path
from fastkd.train.processes import choose_device
from fastkd.train.saving import locked, move_directory, read_manifest, write_json
from fastkd.train.scoring import Trained, seconds_a_batch

LABELS_ONLY = "labels"
TITLES = {
    LABELS_ONLY: "labels only",
    "soft_targets": "soft targets",
    "fcd": "FCD",
    "knn": "intra-class KNN",
    "lrc_bert": "LRC-BERT",
    "mc3kd": "MC3KD",
    "lrkd": "LRKD",
}
MOST_PROCESSES = 4


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the demo's data and runs; the defaults take five minutes on two CPU cores."""

    train_rows: int = 300  # of each area
    eval_rows: int = 60
    labelled: int = 24
    seeds: int = 3
    teacher_epochs: float = 1.9
    student_steps: int = 40
    batch_size: int = 32
    max_length: int = 20
    student_layers: int = 3
    timing_rounds: int = 9


#: With --fast.
FAST = Size(
    train_rows=8, eval_rows=4, labelled=8, seeds=2, teacher_epochs=0.1, student_steps=2,
    batch_size=4, max_length=12, timing_rounds=1,
)  # fmt: skip


def make_study(size: Size, settings: DemoSettings) -> Grid:
    """The demo as a study."""
    seed, rows = settings.seed, [size.train_rows, size.eval_rows]
    found = {
        "teacher": str(teacher_path()),
        "finetune_teacher": size.teacher_epochs,
        "teacher_learning_rate": 3e-4,
        "student_layers": size.student_layers,
        "steps": size.student_steps,
        "batch_size": size.batch_size,
        "learning_rate": 2e-4,
        "max_length": size.max_length,
        "labelled": size.labelled,
        "device": settings.device_name,
        "seeds": [*range(seed, seed + size.seeds)],
        "methods": {name: {} for name in METHODS},
        "tasks": {"docstrings": {"docstrings": "areas", "rows": rows}},
    }
    return grid.make(found, Path(), StudySettings(out=settings.out / "runs"))


def run_demo(settings: DemoSettings, console: Console) -> dict[str, Any]:
    """Run `fastkd demo`; returns the content of demo.json."""
    began = time.perf_counter()
    os.environ["HF_HUB_OFFLINE"] = "1"
    teacher = teacher_path()
    size = FAST if settings.fast else Size()
    if settings.steps is not None:
        size = dataclasses.replace(size, student_steps=settings.steps)
    study = make_study(size, settings)
    out, display = settings.out, RichDisplay(console)
    runs = GridRuns(study, out / "runs", display)
    if (out / "student").exists() and not (out / "demo.json").exists():
        raise InputError(f"--out {out} holds a student that isn't the demo's; give another --out")
    number, together = leave_launcher()
    if number:  # a launcher's other processes help the first
        runs.train(1)
        return {}
    with locked(out), display:
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
            f"{len(train)} docstrings to train on, {size.labelled} of them with a label for "
            f"the students, {len(held_out)} held out; "
            f"{len(names)} areas: {', '.join(names)} (chance: {1 / len(names):.3f})"
        )
        display.say(
            f"students: {len(study.variants)} methods, {size.seeds} seeds, {size.student_steps} "
            "steps each"
        )
        cores = min(MOST_PROCESSES, os.cpu_count() or 1)
        alone = settings.fast or together > 1 or device.type == "cuda"
        runs.train(1 if alone else cores)
        runs.finish()
        report = {**_report(runs, size), "areas": names, "processes": together}
        display.say("training the best student once more, to keep it ...")
        _keep_best(report, runs, size, out)
        report["seconds"] = time.perf_counter() - began
        write_json(out / "demo.json", report)
        _draw(report, out / "students.png")
    _show(report, settings, console)
    return report


def _report(runs: GridRuns, size: Size) -> dict[str, Any]:
    """What demo.json holds, from the files of the runs."""
    found = best_cells(runs)
    (summary,) = summarize(runs.grid, found)
    example = summary.example
    trained = read_manifest(Path(example["options"]["teacher"]))
    rows, seed = {row.variant: row for row in summary.rows}, runs.grid.seeds[0]
    return {
        "fastkd": fastkd.__version__,
        "torch": torch.__version__,
        "device": str(choose_device(example["options"]["device_name"], "fp32")),
        "threads": torch.get_num_threads(),
        "seeds": list(runs.grid.seeds),
        "size": dataclasses.asdict(size),
        "rows": {
            "train": example["rows"]["train"] + example["rows"].get("unlabelled", 0),
            "held out": example["rows"]["eval"],
        },
        "teacher": {
            "scores": example["teacher"],
            "parameters": example["parameters"]["teacher"],
            "seconds": trained["history"][-1]["seconds"],
        },
        "students": {
            name: {
                "accuracy": row.mean,
                "spread": row.std,
                "difference": row.difference and dataclasses.asdict(row.difference),
                "recovered": row.recovered and dataclasses.asdict(row.recovered),
                "verdict": row.verdict,
                "seconds": row.seconds,
                "parameters": found[name, summary.task, seed]["parameters"]["student"],
                "failed": row.failed,
            }
            for name, row in rows.items()
        },
        "best": max((row for row in summary.rows if row.seeds), key=lambda row: row.mean).variant,
    }


def _keep_best(report: dict[str, Any], runs: GridRuns, size: Size, out: Path) -> None:
    """Train the best student again, the same bits; save it, time it, draw what it sees."""

    def draw(trained: Trained) -> dict[str, Any]:
        run, student, teacher = trained.run, trained.student, trained.teacher
        seconds = seconds_a_batch(run, student, teacher, size.timing_rounds)
        report["speedup"] = seconds["teacher"] / seconds["student"]
        held_out = run.sets.evals[""]
        batch = run.sets.collate([held_out[int(held_out.lengths.argmax())]])
        inputs = {k: v.to(run.computation.device) for k, v in batch.items() if k != "labels"}
        tokens = run.data.tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())

        def features(model: nn.Module) -> torch.Tensor:
            with torch.no_grad():
                return model.eval()(**inputs, output_hidden_states=True).hidden_states[-1]

        pair = features(student), features(teacher)
        plot_relations(*pair, inputs["attention_mask"], out / "relations.png", tokens=[tokens])
        return {}

    cell = next(cell for cell in runs.cells if cell.variant == report["best"])
    folder = runs.out / "best"
    shutil.rmtree(folder, ignore_errors=True)
    run_distillation(Config.of({**runs.options(cell), "out": folder}), measure=draw)
    move_directory(folder / "student", out / "student")


def _draw(report: dict[str, Any], path: Any) -> None:
    """Draw each method's accuracy between labels only and the teacher."""
    students = report["students"]
    names = sorted(students, key=lambda name: students[name]["accuracy"])
    base = students[LABELS_ONLY]["accuracy"]
    teacher = report["teacher"]["scores"]["accuracy"]
    figure = new_figure(8.4, 4.2)
    ax = figure.subplots()
    reach = teacher  # right end of the bars, where the text begins
    for i, name in enumerate(names):
        row = students[name]
        colour = "#1a7f37" if _ahead(row) else "#9aa0a6"
        ax.barh(i, 100 * row["accuracy"], color=colour, height=0.6)
        if row["difference"]:
            low, high = (base + row["difference"][k] for k in ("low", "high"))
            ax.plot([100 * low, 100 * high], [i, i], color="black", linewidth=1.2)
            reach = max(reach, high)
        text = f"{100 * row['accuracy']:.1f}"
        ax.text(1, i, text, va="center", color="white", fontsize=9)
    for i, name in enumerate(names):
        share = students[name]["recovered"]
        if share:
            ax.text(100 * reach + 2, i, f"{share['mean']:.0%} of the gap", va="center")
    ax.axvline(100 * base, color="black", linestyle=":", linewidth=1)
    ax.axvline(100 * teacher, color="black", linewidth=1.5)
    top = len(names) - 0.4
    ax.text(100 * teacher, top, f"teacher {100 * teacher:.1f}", ha="center", va="bottom")
    ax.set_ylim(-0.6, top)
    ax.set_yticks(range(len(names)), [TITLES[name] for name in names])
    ax.set_xticks(range(0, 101, 10))
    ax.set_xlim(0, 100 * reach + 18)
    ax.set_xlabel(
        f"accuracy on held-out docstrings, %, with {LEVEL:.0%} intervals of the gain over labels "
        "only (dotted);\ngreen: the whole interval lies above it"
    )
    size = report["size"]
    ax.set_title(
        f"{size['student_layers']}-layer students with {size['labelled']} labels among "
        f"{report['rows']['train']} docstrings, {len(report['seeds'])} seeds",
        pad=18,
    )
    figure.savefig(path, dpi=130)


def _show(report: dict[str, Any], settings: DemoSettings, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("", "accuracy", "points gained", "gap recovered", "seconds"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    teacher = report["teacher"]
    rows = [["teacher", f"{teacher['scores']['accuracy']:.3f}", "", "100%"]]
    seconds = [teacher["seconds"]]
    for name, row in report["students"].items():
        score = f"{row['accuracy']:.3f} ± {row['spread']:.3f}"
        gained = _interval(row["difference"], "+.1f", 100)
        rows.append([TITLES[name], score, gained, _interval(row["recovered"], ".0f", 100, "%")])
        seconds.append(row["seconds"])
    for cells, taken in zip(rows, seconds, strict=True):
        table.add_row(*cells, f"{taken:.0f}")
    console.print(table)
    smaller = report["students"][report["best"]]["parameters"] / teacher["parameters"]
    ahead = [TITLES[name] for name, row in report["students"].items() if _ahead(row)]
    out = settings.out
    pictures = ", ".join(sorted(path.name for path in out.glob("*.png")))
    for line in (
        f"a student has {smaller:.0%} of the teacher's parameters and answers "
        f"{report['speedup']:.1f} times as fast",
        f"ahead of labels only, with a {LEVEL:.0%} interval over {len(report['seeds'])} seeds "
        f"above 0: {', '.join(ahead) or 'none'}",
        f"{report['seconds']:.0f} s in all; best student {TITLES[report['best']]}, saved in "
        f"{out / 'student'}; pictures in {out}: {pictures}",
    ):
        say(console, line)


def _ahead(row: dict[str, Any]) -> bool:
    return row["difference"] is not None and row["difference"]["low"] > 0


def _interval(value: dict[str, Any] | None, form: str, scale: float, unit: str = "") -> str:
    if value is None:
        return ""
    d = Difference(**value)
    low, high = (format(scale * x, form) for x in (d.low, d.high))
    return f"{scale * d.mean:{form}}{unit} [{low}, {high}]"
