"""`fastkd distill`: check everything, fine-tune the teacher, train the student."""

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

from fastkd.distill.distiller import Distiller
from fastkd.distributed import world_size
from fastkd.models.layer_map import SCHEMES
from fastkd.train import data, processes, tasks
from fastkd.train.config import DistillConfig
from fastkd.train.errors import InputError, nearest
from fastkd.train.job import Job, Measure, check_classes
from fastkd.train.models import be_quiet, make_method
from fastkd.train.options import set_flags
from fastkd.train.progress import Display
from fastkd.train.run_directory import RunDirectory
from fastkd.train.saving import locked
from fastkd.train.settings import AUTO


def run_distillation(
    config: DistillConfig,
    display: Display | None = None,
    measure: Measure | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Run `fastkd distill`; returns the content of the student's manifest.

    The ``display`` is entered after all options are checked. ``measure`` takes the place of the
    timing of both models. Runs with the same directory ``cache`` share their teachers' outputs.

    Raises:
        InputError: an option, file or model cannot be used; raised before training.
    """
    started = time.perf_counter()
    display = display or Display()
    be_quiet()
    with contextlib.ExitStack() as stack:
        with processes.errors_on_all():
            check(config)
        stack.enter_context(processes.enter_on_first_process(locked(config.out)))
        with processes.errors_on_all():
            stack.enter_context(display)
        out = processes.on_first_process(lambda: RunDirectory(config))
        out.report_moved_files(display)
        if config.resume and not (out.manifest or out.done):
            display.say(f"{config.out}: no run to resume; this one begins")
        if config.student is not None and config.student == config.teacher:
            display.say("warning: --student is the teacher; --student-layers makes a smaller one")
        with processes.errors_on_all():
            whole = dataclasses.replace(config, batch_size=config.batch_size * out.processes)
            job = Job(config, whole, display, out)
        for line in data.describe(job.corpus):
            display.say(line)
        if out.done:
            job.check_done()
            return out.done
        distiller: Distiller | None = job.begin()
        if config.finetune_teacher:
            distiller = None  # its student has the weights before fine-tuning
            job.finetune_teacher()
        report = job.train_student(distiller, measure, cache)
        report["seconds"]["total"] += time.perf_counter() - started
        job.finish(report)
    return report


def check_resume(config: DistillConfig) -> None:
    """Raise if --resume names no directory."""
    if config.resume and not config.out.exists():
        raise InputError(
            f"--resume: --out {config.out} does not exist; give the directory of the run, or leave "
            "--resume out"
        )


def check(config: DistillConfig) -> None:
    """Raise for options that do not fit method, task or processes, before anything is read."""
    if config.shard and world_size() == 1:
        raise InputError(
            "--fsdp: shards models over processes, but there is one; start several by `torchrun "
            "--nproc-per-node N -m fastkd distill ...`"
        )
    check_resume(config)
    kind = tasks.of_file(config.kind, config.train)
    if config.method != AUTO:
        method = make_method(config.method, config.options, config.preset)
        check_classes(config.method, method, kind)
    layers = config.options.get("layers")
    if isinstance(layers, str) and layers not in SCHEMES:
        raise InputError(f"--set layers={layers}: {nearest(layers, SCHEMES)}")
    for flag in set_flags(config, "max_new_tokens", "sample") if kind.generation is None else ():
        raise InputError(
            f"{flag}: models of --task {kind.name()} don't generate the text that is scored; "
            "leave it out"
        )
    if config.finetune_teacher and not kind.supervised:
        raise InputError(
            f"--finetune-teacher: the rows of --task {kind.name()} have no labels to train on"
        )
