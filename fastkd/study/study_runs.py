"""The runs of a study: one teacher for each data set, one JSON file for each run.

Every process goes through the same list and trains the runs that are neither done nor locked by
another process. A study therefore continues after a kill, and trains new entries of its file. The
processes may be those of a launcher, or run on other machines that share the directory.
"""

import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastkd._core.extras import require
from fastkd.study.spec import Study, TaskSpec, Variant
from fastkd.study.task_runs import TaskRuns, key_of
from fastkd.train.errors import InputError, RunFailed
from fastkd.train.models import be_quiet
from fastkd.train.progress import Display, clock
from fastkd.train.saving import read_json, write_json

filelock: Any = require("filelock", "train")


class Job(NamedTuple):
    """One run and its result file."""

    task: TaskSpec
    variant: Variant
    seed: int
    identity: dict[str, Any]
    path: Path


#: Fields of a study that change the result of every run.
BUDGET = (
    "steps", "seconds", "evaluations", "batch_size", "learning_rate", "labelled_share", "precision",
)  # fmt: skip
#: Field of a run's file with the hash of all other fields.
CHECKSUM = "sha256"


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write the file of a run, with its checksum."""
    content = json.loads(json.dumps(result, default=str))
    write_json(path, {**content, CHECKSUM: _checksum(content)})


def _result(job: Job) -> dict[str, Any] | None:
    """Content of the result file; None if missing, damaged, or of another run."""
    found = read_json(job.path)
    if not isinstance(found, dict) or found.pop(CHECKSUM, None) != _checksum(found):
        return None
    return found if key_of(found["run"]) == key_of(job.identity) else None


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _done(job: Job) -> bool:
    return _result(job) is not None


class StudyRuns:
    """All runs of a study in a directory, with their data sets and teachers."""

    def __init__(self, study: Study, out: Path, display: Display | None = None):
        self.study, self.out = study, out
        self.display = display or Display()
        self.tasks = {task.name: TaskRuns(study, task, out, self.display) for task in study.tasks}

    @functools.cached_property
    def jobs(self) -> list[Job]:
        """All runs, ordered by seed, so that an interrupted study covers all variants."""
        study, found = self.study, []
        methods = {variant.name: variant.json() for variant in study.variants}
        for seed, task, variant in itertools.product(study.seeds, study.tasks, study.variants):
            work = self.tasks[task.name]
            identity = {
                "task": task.name,
                **task.json(),
                "teacher": work.key,
                **methods[variant.name],
                "seed": seed,
                "student": work.student_key(variant),
                "student_layers": study.student_layers,
                **study.shape,
                **{name: getattr(study, name) for name in BUDGET},
                "device": str(work.device),
            }
            method = re.sub(r"[^\w.=]", "-", variant.method)
            name = f"{task.name}-{method}-s{seed}-{key_of(identity)}.json"
            found.append(Job(task, variant, seed, identity, self.out / "runs" / name))
        return found

    def results(self) -> dict[tuple[str, str, int], dict[str, Any]]:
        """Results of completed runs, by task, variant and seed."""
        found = ((job, _result(job)) for job in self.jobs)
        return {(job.task.name, job.variant.name, job.seed): x for job, x in found if x is not None}

    def finish(self) -> None:
        """Wait for the runs of other processes, and take over those of a process that died."""
        while not all(map(_done, self.jobs)):
            time.sleep(1)
            self.work()

    def train(self, workers: int) -> bool:
        """Train all missing runs in ``workers`` processes; False if one of them died."""
        (self.out / "runs").mkdir(parents=True, exist_ok=True)
        # Invalid input raises here: in one process, and before a teacher is fine-tuned.
        assert self.jobs
        for task in self.tasks.values():
            task.check()
        if workers == 1:
            self.work()
            return True
        context = multiprocessing.get_context("spawn")
        threads = max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // workers))
        given = (self.study, self.out, threads, self.display.shared())
        pool = [context.Process(target=_worker, args=given, daemon=True) for _ in range(workers)]
        for worker in pool:
            worker.start()
        while any(worker.is_alive() for worker in pool):
            pool[0].join(1.0)
            time.sleep(0.2)
        return not any(worker.exitcode for worker in pool)

    def work(self) -> None:
        """Train runs until each is done or locked by another process."""
        be_quiet()
        for task in self.tasks.values():  # each teacher in another process, if there are several
            task.make_teacher(blocking=False)
        progress = StudyProgress(self.jobs, self.display)
        for job in self.jobs:
            if _orphaned() or _done(job):
                continue
            lock = filelock.FileLock(job.path.with_suffix(".lock"), blocking=False)
            try:
                lock.acquire()
            except filelock.Timeout:
                continue
            try:
                if not _done(job):
                    task = self.tasks[job.task.name]
                    task.make_teacher()  # waits if another process is fine-tuning it
                    if job.path.exists():
                        self.display.say(
                            f"{job.path} has changed since it was written; its run starts again"
                        )
                    progress.begin()
                    result = {"run": job.identity, **task.train(job.variant, job.seed)}
                    write_result(job.path, result)
                    progress.report(job, result)
            finally:
                job.path.with_suffix(".lock").unlink(missing_ok=True)
                lock.release()
        progress.track.stop()


def _worker(
    study: Study, out: Path, threads: int, shared: Callable[[], AbstractContextManager[Display]]
) -> None:
    torch.set_num_threads(threads)
    try:
        with shared() as display:
            StudyRuns(study, out, display).work()
    except (InputError, RunFailed) as error:  # no traceback, as in the main process
        sys.exit(f"Error: {error}")


class StudyProgress:
    """Count of completed runs over all processes, and the estimated remaining time."""

    def __init__(self, jobs: list[Job], display: Display):
        self.missing = [job for job in jobs if not _done(job)]
        self.most, self.total = len(self.missing), len(jobs)
        self.display, self.began = display, 0.0
        self.track = display.track("runs", self.total - self.most, self.total)

    def begin(self) -> None:
        """Start the clock, at the first run."""
        self.began = self.began or time.perf_counter()

    def report(self, job: Job, result: dict[str, Any]) -> None:
        """Print the result of ``job`` and the remaining time."""
        self.missing = [job for job in self.missing if not _done(job)]
        missing = len(self.missing)
        left = (time.perf_counter() - self.began) / max(1, self.most - missing) * missing
        self.track.advance(self.total - missing)
        self.display.say(
            f"{self.total - missing}/{self.total}  {job.task.name}  {job.variant.name}  "
            f"seed {job.seed}:  {_result_text(result)}, {clock(left)} left"
        )


def _result_text(result: dict[str, Any]) -> str:
    """The score and training time of a run, or the reason of its failure."""
    if "failed" in result:
        return f"failed: {result['failed']}"
    name, value = next(iter(result["scores"].items()))
    return f"{name} {value:.4f}  ({result['measured']['seconds']:.1f} s)"


def _orphaned() -> bool:
    """Whether the process that started this worker has died."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()
