"""The options of `fastkd study`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastkd.app.options import option
from fastkd.app.settings import RUN, TRAINING, Checked, device

WHAT = "What is compared"


@dataclass(frozen=True, kw_only=True)
class StudySettings(Checked):
    """The options of `fastkd study`; what is given goes before what the file says."""

    spec: Path | None = option(None, "The study: a .toml or .yaml file.", flag="SPEC", saved=False)
    out: Path = option(
        Path("runs/study"), "Directory of the runs and the report.", panel=RUN, saved=False
    )
    runs: Path | None = option(
        None, "Directory of runs and teachers that studies share (--out).", panel=RUN, saved=False
    )
    methods: str | None = option(None, "Methods, separated by commas.", panel=WHAT)
    options: Mapping[str, Any] = option(
        {},
        "Values of a method's option, one run each; repeatable.",
        flag="--set",
        metavar="METHOD.NAME=VALUE,VALUE",
        panel=WHAT,
    )
    tasks: Mapping[str, Any] = option(
        {},
        "A data set: NAME=TRAIN,EVAL (files), NAME=hub (GLUE), NAME=docstrings; repeatable.",
        metavar="NAME=FILES",
        panel=WHAT,
    )
    seeds: int | None = option(None, "How many seeds.", panel=WHAT, least=1)
    teacher: str | None = option(
        None, "Teacher: a directory, a hub name, or packaged (the demo's).", panel=WHAT
    )
    steps: int | None = option(None, "Training steps of every run.", panel=TRAINING, least=1)
    seconds: float | None = option(
        None, "Training time of every run, instead of steps.", panel=TRAINING, above=0
    )
    device: str = device()
    jobs: int = option(1, "Processes that run at a time.", panel=RUN, least=1, saved=False)
