"""The options of `fastkd study`."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastkd.train.config import ColumnOptions, device
from fastkd.train.options import option, run_option, training_option

comparison_option = functools.partial(option, panel="What is compared")


@dataclass(frozen=True, kw_only=True)
class StudySettings(ColumnOptions):
    """The options of `fastkd study`; an option overrides the field of the study's file.

    The column options apply to every data set of ``tasks``.
    """

    spec: Path | None = option(
        None,
        "File of the study, .toml or .yaml; paper:NAME is a paper's table, and paper: lists them.",
        flag="SPEC",
        saved=False,
    )
    out: Path = run_option(Path("runs/study"), "Output directory for the runs and the report.")
    runs: Path | None = run_option(
        None, "Directory of runs and teachers, which several studies may share; --out if not given."
    )
    methods: str | None = comparison_option(None, "Methods to compare, separated by commas.")
    options: Mapping[str, Any] = comparison_option(
        {},
        "Values of a method's hyper-parameter or option, one run for each; repeatable.",
        flag="--set",
        metavar="METHOD.NAME=VALUE,VALUE",
    )
    tasks: Mapping[str, Any] = comparison_option(
        {},
        "Data set: NAME=TRAIN,EVAL,TEST,... (files; NAME may be a task), NAME=hub (a GLUE task), "
        "NAME=docstrings or NAME=pairs (of docstrings); or names of the study's, separated by "
        "commas; repeatable.",
        metavar="NAME=FILES",
        names=True,
    )
    glue: Path | None = option(
        None,
        "Folder of GLUE's own download, instead of the hub.",
        metavar="DIR",
        panel="What is compared",
    )
    seeds: int | None = comparison_option(
        None, "Number of seeds; default: those of the study's file, or 4.", least=1
    )
    teacher: str | None = comparison_option(
        None, "Teacher model: a directory, a hub name, or packaged (the demo's)."
    )
    student: str | None = comparison_option(
        None, "Student model of every run: a directory or a hub name."
    )
    finetune_teacher: float | None = comparison_option(
        None,
        "Number of epochs to fine-tune the teacher first; default: as the study's file says, or 0.",
        metavar="EPOCHS",
        least=0,
    )
    steps: int | None = training_option(
        None,
        "Training steps of each run; of a paper's table a small try: one value of each searched "
        "list, one step of the teacher; default: as the study's file says, or 3 epochs.",
        least=1,
    )
    seconds: float | None = training_option(
        None,
        "Training time of each run in seconds, instead of --steps; default: none.",
        above=0,
    )
    grid: str = training_option(
        "all", "Values of each searched list: all, or the first.", choices=("all", "first")
    )
    budget: float | None = training_option(
        None,
        "Hours for the whole study: a search by successive halving, then the seeds, as far as they "
        "fit; default: every run.",
        metavar="HOURS",
        above=0,
    )
    device_name: str = device()
    jobs: int = run_option(1, "Number of runs at a time, each in its own process.", least=1)
