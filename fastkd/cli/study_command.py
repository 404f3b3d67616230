"""`fastkd study`, from its options to its report."""

import math
import os
from pathlib import Path

from rich.console import Console

from fastkd.cli.display import RichDisplay, say
from fastkd.study import grid, grid_report, study_report
from fastkd.study.grid_runs import GridRuns
from fastkd.study.spec import read
from fastkd.study.study_runs import StudyRuns
from fastkd.study.study_settings import StudySettings
from fastkd.train.errors import RunFailed
from fastkd.train.launcher import leave_launcher
from fastkd.train.options import read_options_file
from fastkd.train.saving import check_directory


def run(settings: StudySettings, console: Console) -> None:
    """Train what isn't there yet, then write the report of all that is.

    Raises:
        InputError: something in the study can't be used; raised before anything is trained.
        RunFailed: a process died, and the report is without its runs.
    """
    if str(settings.spec) == grid.PAPER:
        _list_papers(console)
        return
    path = grid.path_of(settings.spec)
    if path is not None and grid.is_grid(path):
        _run_grid(settings, path, console)
        return
    study = read(settings)
    number, together = leave_launcher()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    check_directory("--out", settings.out)
    if settings.runs is not None:
        check_directory("--runs", settings.runs)
    if not number:
        study_report.claim(settings.out)
    with RichDisplay(console) as display:
        parts = {"data set": study.tasks, "variant": study.variants, "seed": study.seeds}
        count = math.prod(map(len, parts.values()))
        names = (f"{len(x)} {name}{'s' * (len(x) != 1)}" for name, x in parts.items())
        display.say(f"{count} run{'s' * (count != 1)}: {', '.join(names)}, {study.budget} each")
        runs = StudyRuns(study, settings.runs or settings.out, display)
        whole = runs.train(1 if together > 1 else settings.jobs)
        if number:  # the first of a launcher's processes writes the report
            return
        if together > 1:
            runs.finish()
        summaries = study_report.write(runs, settings.out)
        for summary in summaries:
            display.say(f"{summary.task}: {study_report.findings(summary)}")
        display.say(f"report: {settings.out / 'report.html'}")
    if not whole:
        raise RunFailed("a process died; the same command trains the runs that it left")


def _list_papers(console: Console) -> None:
    """Print the packaged tables, and why some can't be run."""
    for name in grid.names_of_papers():
        found = read_options_file(grid.PAPERS / f"{name}.toml")
        why = f"; can't be run: {found['why_not']}" if "why_not" in found else ""
        say(console, f"{grid.PAPER}{name}  {found['title']}{why}")


def _run_grid(settings: StudySettings, path: Path, console: Console) -> None:
    """Train the missing runs of a grid, then write the report of all that are finished."""
    study = grid.read(settings, path)
    number, together = leave_launcher()
    check_directory("--out", settings.out)
    with RichDisplay(console) as display:
        for line in grid_report.table(grid_report.plan(study)):
            display.say(line)
        runs = GridRuns(study, settings.runs or settings.out, display)
        whole = runs.train(1 if together > 1 else settings.jobs)
        if number:
            return
        grid_report.write(runs, settings.out)
        display.say(f"report: {settings.out / 'report.md'}")
    if not whole:
        raise RunFailed("a process died; the same command trains the runs that it left")
