"""The options of `fastkd study`."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastkd.train.options import option, run_option, training_option
from fastkd.train.settings import ColumnOptions, device

comparison_option = functools.partial(option, panel="What is compared")


@dataclass(kw_only=True)
class StudySettings(ColumnOptions):
    """The options of `fastkd study`; an option overrides the field of the study's file.

    The column options apply to every data set of ``tasks``.
    """

    spec: Path | None = option(None, "The study: a .toml or .yaml file.", flag="SPEC", saved=False)
    out: Path = run_option(Path("runs/study"), "Directory of the runs and the report.")
    runs: Path | None = run_option(
        None, "Directory of runs and teachers that studies share (--out)."
    )
    methods: str | None = comparison_option(None, "Methods, separated by commas.")
    options: Mapping[str, Any] = comparison_option(
        {},
        "Values of a method's option, one run each; repeatable.",
        flag="--set",
        metavar="METHOD.NAME=VALUE,VALUE",
    )
    tasks: Mapping[str, Any] = comparison_option(
        {},
        "A data set: NAME=TRAIN,EVAL (files; NAME may be their task), NAME=hub (GLUE), "
        "NAME=docstrings, NAME=pairs (of docstrings); repeatable.",
        metavar="NAME=FILES",
    )
    seeds: int | None = comparison_option(None, "How many seeds.", least=1)
    teacher: str | None = comparison_option(
        None, "Teacher: a directory, a hub name, or packaged (the demo's)."
    )
    steps: int | None = training_option(None, "Training steps of every run.", least=1)
    seconds: float | None = training_option(
        None, "Training time of every run, instead of steps.", above=0
    )
    device: str = device()
    jobs: int = run_option(1, "Processes that run at a time.", least=1)
