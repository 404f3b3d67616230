"""`fastkd distill --stages`: consecutive runs, each starting from the previous run's student.

A file has the options of all stages first, then one table per stage, in order:

    teacher = "./teacher"
    [stages.general]
    train = "much.tsv"
    eval = "dev.tsv"
    student_layers = 6
    [stages.task]
    train = "few.tsv"
    eval = "dev.tsv"
    unlabelled = "much.txt"

``teacher = "stages.NAME"`` takes the student of an earlier stage as the teacher: a teacher
assistant (Mirzadeh et al. 2020). Such a stage may make a student of its own, for example by
``student_layers``; otherwise it goes on with the student of the stage before.
"""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from fastkd.train import data, distillation, processes, tasks
from fastkd.train.config import OF_ALL_STAGES, STAGES, Config, option_values
from fastkd.train.errors import InputError, nearest
from fastkd.train.loading import finished_task
from fastkd.train.models import check_depth, load
from fastkd.train.options import check_name, check_tables, errors_with_file_keys, read_options_file
from fastkd.train.progress import Display
from fastkd.train.recipes import MAKES
from fastkd.train.run_directory import RESULTS
from fastkd.train.saving import MANIFEST, STUDENT, read_json

LAST = "student"


@dataclasses.dataclass(frozen=True)
class Stage:
    """One of several consecutive runs.

    ``before``: the student that it starts from. ``assistant``: the stage whose student teaches it.
    """

    name: str
    number: int
    config: Config
    before: Path | None
    assistant: "Stage | None" = None

    @property
    def out(self) -> Path:
        """Output directory of the stage."""
        return self.config.out


def read(config: Config) -> list[Stage]:
    """The stages in the file --stages."""
    path = config.stages
    assert path is not None
    found = dict(read_options_file(path))
    tables = check_tables("stages", found.pop("stages", {}))
    if not tables:
        raise InputError(f"{path} has no stages; a table [stages.NAME] is one")
    shared = _values(f"{path}", found, path.parent)
    given = {
        name: _values(f"stages.{name} of {path}", table, path.parent)
        for name, table in tables.items()
    }
    run = {name: vars(config)[name] for name in OF_ALL_STAGES}
    return make(shared, given, {**run, "stages": None}, f" of {path}")


def make(
    shared: Mapping[str, Any],
    given: Mapping[str, Mapping[str, Any]],
    run: Mapping[str, Any],
    where: str,
) -> list[Stage]:
    """The stages with ``given`` options of their own beside ``shared`` ones, by field name.

    A value None of a stage leaves out a shared one. ``run``: options of all runs, whose ``out`` is
    their folder. ``where`` ends the name of a stage in messages.
    """
    stages: list[Stage] = []
    for number, (name, own) in enumerate(given.items(), 1):
        check_name(f"stages.{name}", name)
        before = stages[-1].out / "student" if stages else None
        out, place = run["out"] / f"{number}-{name}", f"stages.{name}{where}"
        values = {k: v for k, v in {**shared, **own}.items() if v is not None}
        assistant = _assistant(place, values.get("teacher"), stages)
        makes = next((key for key in MAKES if key in (own if assistant else values)), None)
        if assistant is not None:
            values["teacher"] = str(assistant.out / "student")
            before = None if makes else before
            if before == assistant.out / "student":
                raise InputError(
                    f"{place}: teacher and student are both the student of the stage "
                    f"{assistant.name}; give student_layers, or another option that makes a student"
                )
        elif before is not None and makes:
            raise InputError(f"{place}: {makes} is for the first stage; others take its student")
        if before is not None:
            values = {key: x for key, x in values.items() if key not in MAKES}
            values["student"] = str(before)
        with errors_with_file_keys(place, Config):
            stage = Config.of({**run, **values, "out": out})
        stages.append(Stage(name, number, stage, before, assistant))
    return stages


def _assistant(where: str, teacher: str | None, before: list[Stage]) -> Stage | None:
    """The earlier stage that ``teacher = "stages.NAME"`` names; None for another teacher."""
    if teacher is None or not teacher.startswith(STAGES):
        return None
    name, known = teacher.removeprefix(STAGES), {stage.name: stage for stage in before}
    if name not in known:
        raise InputError(f"{where}: teacher {teacher!r}: no earlier stage; {nearest(name, known)}")
    return known[name]


def _values(where: str, table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Fields of `Config` that a stage's table gives."""
    for key in table:
        if key in OF_ALL_STAGES:
            raise InputError(f"{where}: {key} is of all stages; give it on the command line")
    return option_values(where, table, folder)


def check(config: Config, stages: list[Stage]) -> None:
    """Check options, files, rows and models of all stages before the first one begins.

    All processes call it.
    """
    processes.join(stages[0].config.device_name)
    with processes.errors_on_all():
        _check_out(config, stages)
        check_runs(stages, f" of {config.stages}")


def check_runs(stages: list[Stage], where: str) -> None:
    """Check options, files, rows and models of all stages."""
    known: dict[str, tuple[int, int | None]] = {}
    for stage in stages:
        with errors_with_file_keys(f"stages.{stage.name}{where}", Config):
            known[stage.name] = _check(stage, known)


def _check(stage: Stage, known: Mapping[str, tuple[int, int | None]]) -> tuple[int, int | None]:
    """Check a stage; returns vocabulary size and number of layers of its student.

    ``known`` has those of the stages before; the number is None where only the model tells.
    """
    config, remote = stage.config, stage.config.trust_remote_code
    distillation.check(dataclasses.replace(config, resume=False))  # it may not have begun
    depth: int | None
    if (assistant := stage.assistant) is not None:
        words, depth = known[assistant.name]
        kinds = [tasks.of_file(x.task, x.train) for x in (config, assistant.config)]
        if kinds[0].head != kinds[1].head and not config.finetune_teacher:
            raise InputError(
                f"--teacher: the student of the stage {assistant.name} is of --task "
                f"{kinds[1].name()}, and this stage of {kinds[0].name()}; pass --finetune-teacher "
                "EPOCHS to train its head first"
            )
        if depth is not None and config.student_layers is not None:
            check_depth("--student-layers", config.student_layers, depth)
    else:
        option, name = "--teacher", str(config.teacher)
        if config.teacher_cache is not None:
            option, name = "--teacher-cache", str(config.teacher_cache / STUDENT)
        teacher = load(option, name, AutoConfig, remote)
        words, depth = int(teacher.vocab_size), getattr(teacher, "num_hidden_layers", None)
        before = next(iter(known.values()))[0] if known else words
        if words != before:
            raise InputError(
                f"{option} {name}: its vocabulary has {words} tokens where the stage "
                f"before has {before}; both must read the same tokens"
            )
    if stage.before is not None:
        depth = list(known.values())[-1][1]
    elif config.student is not None:
        depth = load("--student", config.student, AutoConfig, remote).num_hidden_layers
    else:
        depth = config.student_layers or (depth and max(1, depth // 2))
    # An assistant's classes are those of its stage's rows.
    data.load(config, None if stage.assistant else finished_task(config))
    return words, depth


def _check_out(config: Config, stages: list[Stage]) -> None:
    last = config.out / LAST
    if last.exists() and not last.is_symlink():
        raise InputError(f"--out {config.out} holds a student of a run without --stages")
    distillation.check_resume(config)
    if config.resume or config.overwrite:
        return
    for stage in stages:
        if any((stage.out / name).exists() for name in (*RESULTS, "unfinished")):
            raise InputError(
                f"--out {config.out} already holds {stage.out.name}; pass --resume to go on from "
                "there, --overwrite to start again, or another --out"
            )


def run_stage(
    stage: Stage,
    display: Display,
    measure: distillation.Measure | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Run or resume a stage; returns its report. See `fastkd.train.distillation.run_distillation`.

    Results that started from another student are overwritten.
    """
    config = stage.config
    if config.resume and not processes.on_first_process(config.out.exists):
        config = dataclasses.replace(config, resume=False)  # the first stages were run
    sources = [] if stage.before is None else [stage.before]
    sources += [] if stage.assistant is None else [stage.assistant.out / "student"]
    if sources:
        follows = processes.on_first_process(
            lambda: ",".join(str(read_json(path / MANIFEST).get("run")) for path in sources)
        )
        config = dataclasses.replace(config, follows=follows)
        if config.resume and processes.on_first_process(lambda: _began_with_other_student(config)):
            config = dataclasses.replace(config, resume=False, overwrite=True)
    return distillation.run_distillation(config, display, measure, cache)


def _began_with_other_student(config: Config) -> bool:
    """Whether the run in --out, finished or not, started from another student."""
    places = (config.out / name / MANIFEST for name in ("unfinished", "student"))
    manifests = [manifest for manifest in map(read_json, places) if manifest]
    return any(m.get("settings", {}).get("follows") != config.follows for m in manifests)


def link(stages: list[Stage]) -> Path:
    """Path of a link to the last student; of the student itself where links are not supported."""
    last = stages[-1].out
    path, target = last.parent / LAST, Path(last.name) / "student"

    def make() -> Path:
        new = path.with_name(f".{LAST}.new")
        with contextlib.suppress(NotImplementedError, OSError):
            new.unlink(missing_ok=True)
            new.symlink_to(target, target_is_directory=True)
            os.replace(new, path)
            return path
        return last / "student"

    return processes.on_first_process(make)
