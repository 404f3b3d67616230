"""`fastkd study`, from its options to its report."""

import os

from fastkd.cli.display import RichDisplay
from fastkd.study import budget, grid, grid_report
from fastkd.study.grid import StudySettings
from fastkd.study.grid_runs import GridRuns
from fastkd.train.errors import InputError, RunFailed
from fastkd.train.launcher import leave_launcher
from fastkd.train.saving import check_directory


def run(settings: StudySettings, display: RichDisplay) -> None:
    """Train the missing runs of a study, then write the report of all that are finished."""
    study = grid.read(settings)
    number, together = leave_launcher()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    check_directory("--out", settings.out)
    if settings.runs is not None:
        check_directory("--runs", settings.runs)
    if not number:
        grid_report.claim(settings.out)
    with display:
        for line in grid_report.table(grid_report.plan(study)):
            display.say(line)
        runs = GridRuns(study, settings.runs or settings.out, display)
        if settings.budget is not None:
            if together > 1:
                raise InputError("--budget: one process plans the runs; pass --jobs, no launcher")
            runs.check()
            runs = budget.searched(runs, settings.budget, settings.jobs)
            study = runs.grid
        whole = runs.train(1 if together > 1 else settings.jobs)
        if number:  # the first of a launcher's processes writes the report
            return
        if together > 1:
            runs.finish()
        summaries = grid_report.write(runs, settings.out)
        for line in (*study.notes, grid_report.headline(study, summaries)):
            display.say(line)
        for summary in summaries:
            display.say(f"{summary.task}: {grid_report.findings(summary)}")
        display.say(f"report: {settings.out / 'report.html'}")
    if not whole:
        raise RunFailed("a process died; the same command trains the runs that it left")
