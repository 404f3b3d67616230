"""`fastkd distill`: the run, and the table of its results."""

import math
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from fastkd.cli.display import RichDisplay
from fastkd.train import distillation, processes, stages
from fastkd.train.config import Config
from fastkd.train.progress import compared, format_scores


def run(settings: Config, display: RichDisplay) -> None:
    """Run `fastkd distill`; see `fastkd.train.distillation` and `fastkd.train.stages`."""
    display.log_json = None if processes.rank() else settings.log_json
    if settings.stages is None:
        show(distillation.run_distillation(settings, display), settings.out, display)
        return
    ordered = stages.read(settings)
    stages.check(settings, ordered)
    for stage in ordered:
        display.say(f"stage {stage.number} of {len(ordered)}: {stage.name}")
        show(stages.run_stage(stage, display), stage.out, display)
    display.say(f"the student of the last stage: {stages.link(ordered)}")


def show(report: dict[str, Any], out: Path, display: RichDisplay) -> None:
    """Print the results of a run: teacher and best student."""
    sets = {"": report, "test ": report.get("test", {})}
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("", "parameters", "MiB", "ms a batch"):
        table.add_column(heading, justify="right" if heading else "left")
    for prefix, scores in sets.items():
        for name in scores.get("student", {}):
            table.add_column(prefix + name, justify="right")
    for name in report["parameters"]:  # a server's teacher has none
        milliseconds = 1000 * report["seconds_a_batch"].get(name, math.nan)
        # A cache may have scored its teacher with other metrics than the student's.
        scores = (
            found.get(name, {}).get(k) for found in sets.values() for k in found.get("student", {})
        )
        table.add_row(
            name,
            f"{report['parameters'][name]:,}",
            f"{report['bytes'][name] / 2**20:.1f}",
            "" if math.isnan(milliseconds) else f"{milliseconds:.1f}",
            *("" if x is None else f"{x:.4f}" for x in scores),
        )
    display.console.print(table)
    seconds, best, batch = report["seconds"], report["best"], report["seconds_a_batch"]
    sizes = report["parameters"]
    if "teacher" in sizes:
        said = compared(sizes["teacher"] / sizes["student"], "smaller", "larger", "as large")
        if "teacher" in batch:
            times = batch["teacher"] / batch["student"]
            said = f"{compared(times, 'faster', 'slower', 'as fast')} and {said}"
        display.say(f"the student is {said}")
    display.say(
        f"best student: epoch {round(best['epoch'], 2):g}, {format_scores(best['losses'])}\n"
        f"{seconds['training']:.0f} s of training, {seconds['total']:.0f} s in all; "
        f"saved in {out / 'student'}",
    )
