"""The directory of --out: one run at a time; old results stay until new ones are complete.

student/      the best student, complete
teacher/      the fine-tuned teacher (with --finetune-teacher)
unfinished/   a run in progress, described by its manifest; --resume continues it
"""

import contextlib
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastkd.distill.trainer import METHOD_FILE
from fastkd.distributed import world_size
from fastkd.train import processes, saving
from fastkd.train.arrow_rows import fingerprint_of
from fastkd.train.config import Config
from fastkd.train.errors import InputError
from fastkd.train.options import as_json
from fastkd.train.scoring import Run
from fastkd.train.tasks.base import Corpus

RESULTS = ("student", "teacher")
# Directories of checkpoints in ``unfinished/``, by the trained model.
CHECKPOINTS = {"student": "checkpoints", "teacher": "teacher-checkpoints"}
EVAL_ROWS = "evaluation rows"
KEPT_CHECKPOINTS = 2
# Directory of checkpoints that are still being written.
NEW = ".new"


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints of a training, from which it can be resumed.

    Trainer writes a checkpoint to `NEW`; with its manifest it is moved to ``directory``. The
    manifest holds the id of the ``run``, which continues its own checkpoints only.
    """

    directory: Path
    run: str = ""

    def newest(self, say: Callable[[str], None]) -> Path | None:
        """The newest intact checkpoint of this run; damaged ones are reported and removed."""
        shutil.rmtree(self.directory / NEW, ignore_errors=True)
        for path in self._all():
            why = saving.find_damage(path)
            if why is None and saving.read_json(path / saving.MANIFEST).get("run") != self.run:
                why = "it belongs to another run"
            if why is None and not (path / METHOD_FILE).exists():
                why = "an older fastkd wrote it"
            if why is None:
                return path
            say(f"{path}: cannot be used ({why}); resuming from the one before it")
            saving.discard(path)
        return None

    def complete(self, step: int) -> None:
        """Complete the checkpoint at ``step`` and delete the oldest ones."""
        name = f"checkpoint-{step}"
        with saving.saving(self.directory):
            saving.write_manifest(self.directory / NEW / name, {"run": self.run})
            saving.move_directory(self.directory / NEW / name, self.directory / name)
            with contextlib.suppress(OSError):
                (self.directory / NEW).rmdir()
        for old in self._all()[KEPT_CHECKPOINTS:]:
            saving.discard(old)

    def clear(self) -> None:
        """Remove all checkpoints, except files that fastkd did not write."""
        shutil.rmtree(self.directory / NEW, ignore_errors=True)
        for path in self._all():
            saving.discard(path)
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    def _all(self) -> list[Path]:
        found = [(p.name.partition("-")[2], p) for p in self.directory.glob("checkpoint-*")]
        steps = [(int(step), path) for step, path in found if step.isdecimal()]
        return [path for _, path in sorted(steps, reverse=True)]


class RunDirectory:
    """State of --out; used under `saving.locked` only.

    The first process creates it and broadcasts it to the others.

    Raises:
        InputError: --out has content that --resume cannot continue or --overwrite may not replace.
    """

    def __init__(self, config: Config, say: Callable[[str], object]):
        self.path, self.resume, self.overwrite = config.out, config.resume, config.overwrite
        #: Options on which the result depends.
        self.saved = as_json(config)
        self.work = self.path / "unfinished"
        self.student, self.teacher = self.work / "student", self.work / "teacher"
        # A killed run may have left directory moves unfinished.
        for name in RESULTS:
            for parent in (self.path, self.work):
                saving.recover_directory(parent / name)
        manifest, result = _run_manifest(self.work), _run_manifest(self.path / "student")
        if manifest and result and result["run"] == manifest["run"] and not self.student.exists():
            self.finish(say)
        #: The manifest of the run, part of each of its reports and checkpoints; empty before it.
        self.manifest = self._read_manifest()
        #: The report of the complete run that --resume finds; empty if there is one to continue.
        self.done: dict[str, Any] = {}
        if self.resume:
            self.done = {} if self.manifest else _run_manifest(self.path / "student")
            self._check_settings()
        else:
            self._refuse_or_clear(say)
        #: Number of processes the run was started with, each with --batch-size rows of a step.
        self.processes = self.manifest.get("processes", 1) if self.manifest else world_size()

    def _read_manifest(self) -> dict[str, Any]:
        link = self.work.is_symlink()
        if not (link or self.work.exists()):
            return {}
        path = self.work / saving.MANIFEST
        manifest = _run_manifest(self.work)
        half = f".{saving.MANIFEST}.new"  # the run was killed as it began
        folder = self.work.is_dir() and not link
        others = [entry for entry in self.work.iterdir() if entry.name != half] if folder else []
        if not folder or (others and not (manifest or path.exists())):
            raise InputError(
                f"--out {self.path}: fastkd did not write {self.work}; move it, or give another"
            )
        damaged = path.exists() and not manifest
        if self.resume and damaged:
            raise InputError(
                f"--resume: {path} is damaged, so its options are lost; "
                "pass --overwrite to start again"
            )
        return {"settings": {}, "run": ""} if damaged else manifest

    def _check_settings(self) -> None:
        """Raise unless the existing run was started with the same options."""
        before = self.manifest or self.done
        if not before and (self.path / "student").exists():
            raise InputError(
                f"--resume: {self.path / 'student'} has no readable {saving.MANIFEST} of a run; "
                "move it away, or give another --out"
            )
        if not before:
            return
        for name, value in self.saved.items():
            then = before["settings"].get(name)
            if then != value:
                raise InputError(
                    f"--resume: the run in {self.path} was started with {name} = {then!r}, "
                    f"now it is {value!r}; give the same options, or another --out"
                )
        why = None if self.manifest else saving.find_damage(self.path / "student")
        if why:
            raise InputError(
                f"--resume: the run in {self.path} is complete but its student is damaged ({why}); "
                "pass --overwrite to train it again"
            )

    def _refuse_or_clear(self, say: Callable[[str], object]) -> None:
        """Without --resume: raise if results would be lost; with --overwrite remove old work."""
        if self.manifest and not self.overwrite:
            raise InputError(
                f"--out {self.path} holds an unfinished run; pass --resume to continue it, "
                "--overwrite to start again, or another --out"
            )
        for name in RESULTS:
            directory = self.path / name
            if not directory.exists():
                continue
            if not self.overwrite:
                raise InputError(
                    f"--out {self.path} already holds a {name}; pass --resume to continue that "
                    "run, --overwrite to replace it once a new one is complete, or another --out"
                )
            others = saving.unlisted_files(directory)
            if others:
                raise InputError(
                    f"--overwrite: {directory} holds {others[0]}, which fastkd did not write; "
                    "move it away, or give another --out"
                )
        if self.manifest:
            self._clear(say)
            self.manifest = {}

    def begin(self, inputs: dict[str, Any], method: str = "") -> None:
        """Start a run of ``method`` with these ``inputs``, or check that the run to resume has the
        same inputs.

        All processes call this method. An input that no longer exists, such as a teacher that has
        since been fine-tuned, is left out.
        """
        prints = {name: fingerprint_of(value) for name, value in inputs.items()}
        everywhere = processes.all_gather(prints)
        for number, others in enumerate(everywhere):
            for name, value in everywhere[0].items():
                if others[name] != value:
                    raise InputError(f"process {number} reads other {name} than process 0")
        before = (self.manifest or self.done).get("fingerprints", {})
        for name, value in prints.items():
            if before.get(name, value) != value:
                raise InputError(
                    f"--resume: the run in {self.path} was started with other {name}; "
                    "put them back, or give another --out"
                )
        if not self.manifest and not self.done:
            new = {
                "run": secrets.token_hex(8),
                "processes": world_size(),
                "settings": self.saved,
                "fingerprints": prints,
                "method": method,
            }
            self.manifest = processes.on_first_process(lambda: self._write(new))

    def _write(self, manifest: dict[str, Any]) -> dict[str, Any]:
        with saving.saving(self.work):
            self.work.mkdir(parents=True, exist_ok=True)
            saving.write_json(self.work / saving.MANIFEST, manifest)
        return manifest

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """``make()``, stored in the manifest for a resumed run; all processes call this method."""
        if name not in self.manifest:
            more = {**self.manifest, name: make()}
            self.manifest = processes.on_first_process(lambda: self._write(more))
        return self.manifest[name]

    def check_room(self, teacher: int, student: int) -> None:
        """Raise if the disk lacks room for models of this size in bytes; 0: not trained."""
        # A model, its successor, and three checkpoints of weights and two moments.
        needed = max(11 * teacher, teacher + 11 * student)
        needed -= sum(path.stat().st_size for path in self.work.rglob("*") if path.is_file())
        free = saving.free_bytes(self.path)
        if needed > free:
            raise InputError(
                f"--out {self.path}: this run writes up to {size_text(needed)}, "
                f"and the disk has {size_text(free)} left"
            )

    def finish(self, say: Callable[[str], object]) -> None:
        """Move the results to --out and remove the rest; may be interrupted and repeated."""
        for name in RESULTS:
            if (self.work / name).exists():
                saving.move_directory(self.work / name, self.path / name)
        self._clear(say)

    def _clear(self, say: Callable[[str], object]) -> None:
        """Remove the run's files from `work`, the manifest last."""
        for name in RESULTS:
            shutil.rmtree(saving.staging_of(self.work / name), ignore_errors=True)
            saving.discard(self.work / name)
            Checkpoints(self.work / CHECKPOINTS[name]).clear()
        if (kept := saving.discard(self.work)) is not None:
            say(f"{kept}: files that fastkd did not write, or that have changed")


@dataclass(frozen=True)
class Training(Run):
    """A command that trains, with its output directory."""

    out: RunDirectory


def size_text(count: int) -> str:
    """A number of bytes as text, in KiB or MiB."""
    return f"{count / 2**20:,.0f} MiB" if count >= 10 * 2**20 else f"{count / 2**10:,.0f} KiB"


def _run_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a run of `fastkd distill` in ``directory``; empty if there is none."""
    found = saving.read_json(directory / saving.MANIFEST)
    kinds = {"run": str, "settings": dict, "fingerprints": dict}
    return found if all(isinstance(found.get(k), kind) for k, kind in kinds.items()) else {}


def is_complete(directory: Path) -> bool:
    """Whether ``directory`` holds a complete, intact model."""
    return (
        bool(saving.read_json(directory / saving.MANIFEST).get("complete"))
        and saving.find_damage(directory) is None
    )


def rows_of(corpus: Corpus) -> dict[str, Any]:
    """All sets of rows, by their names in messages."""
    sets = {
        "training rows": corpus.train,
        EVAL_ROWS: [*corpus.evals.values()],
        **{f"test rows {name}".strip(): rows for name, rows in corpus.test.items()},
        "unlabelled rows": corpus.unlabelled,
    }
    return {name: rows for name, rows in sets.items() if rows is not None}
