"""The runs of a study: each is a `fastkd distill`, in a directory of its own, with one result file.

Teachers that the runs fine-tune are trained once, with seed 0, and shared. Processes take the runs
that are neither done nor locked, so a study continues after a stop. They may be those of a
launcher, or run on other machines that share the directory.
"""

import contextlib
import functools
import gc
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from fastkd._core.extras import require
from fastkd.study import docstrings
from fastkd.study.grid import OF_FINETUNING, ONE_STEP, Cell, Grid
from fastkd.study.paper_table import TIMED as TIMED_MODELS
from fastkd.study.run_measurements import PeakMemory, intra_class, machine_of, similarities
from fastkd.train import data, distillation, stages, tasks
from fastkd.train.arrow_rows import fingerprint_of
from fastkd.train.config import MODELS, STAGES, Config
from fastkd.train.errors import InputError, RunFailed, TrainingFailed
from fastkd.train.files import names_of
from fastkd.train.fitting import steps_of
from fastkd.train.hub import file_of
from fastkd.train.loading import finished_task
from fastkd.train.models import check_depth, load
from fastkd.train.options import (
    SERVED,
    as_paths,
    errors_with_file_keys,
    options_of,
    without_weights,
)
from fastkd.train.packaged_teacher import resolved
from fastkd.train.processes import choose_device
from fastkd.train.progress import Display, Track, clock, format_scores
from fastkd.train.row_teachers import teachers_of
from fastkd.train.run_directory import rows_of
from fastkd.train.saving import find_damage, read_json, write_json
from fastkd.train.scoring import Judged, Run, seconds_a_batch

filelock: Any = require("filelock", "train")

#: Options on which a fine-tuned teacher depends; all others are the defaults of `fastkd distill`.
OF_TEACHER = (
    "teacher", "task", "data", "data_config", "train_split", "eval_split", "train", "evals",
    "text_column", "text_pair_column", "label_column", "no_header", "labels", "metric",
    "max_train_rows", "max_eval_rows", "trust_remote_code", "attention", "max_length", "precision",
    "device_name", "finetune_teacher", "teacher_learning_rate", "teacher_lora", "tokenizer",
    "max_new_tokens", "sample", "label_order", "trainer_args",
)  # fmt: skip
#: Options that choose the rows of a data set on the hub.
ROWS = (
    "task", "data", "data_config", "train_split", "eval_split", "text_column", "text_pair_column",
    "label_column", "labels", "label_order",
)  # fmt: skip
#: Field of a result file with the hash of all other fields.
CHECKSUM = "sha256"
#: Steps of the two short runs that time a step, for a budget in seconds.
TIMED = (4, 12)


def key_of(options: Mapping[str, Any]) -> str:
    """Short hash of options, and of the content of all files and models that they name."""
    found = {**options, "content": sorted(_contents(options))}
    text = json.dumps({k: str(v) for k, v in found.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _contents(options: Mapping[str, Any]) -> Iterator[str]:
    """Fingerprints of rows, models and caches; a model on the hub has its commit."""
    options = {**options}
    for own in options.pop("stages", {}).values():
        yield from _contents({**options, **own})
    for name in (name for name, option in options_of(Config).items() if option.is_path):
        for path in as_paths(options.get(name)) or []:
            yield from _files(name, path)
    models = {name: options.get(name) for name in MODELS}
    if options.get("teachers") is not None:
        entries = teachers_of(Path(options["teachers"])).items()
        models |= {name: entry.get("cache", entry.get("model")) for name, entry in entries}
    for name, model in models.items():
        if model is None or without_weights(model) == SERVED or model.startswith(STAGES):
            continue
        local = Path(resolved(model)).expanduser()
        yield from _files(name, local) if local.is_dir() else [f"{name} {_commit(model)}"]
    if options.get("train") is options.get("evals") is None:
        kept = {k: v for k, v in options.items() if k in ROWS and v is not None}
        yield _hub_rows(json.dumps(kept, sort_keys=True))


def _files(name: str, path: Path) -> Iterator[str]:
    """Fingerprint of each file in a folder, or of one file."""
    for file in [path] if path.is_file() else filter(Path.is_file, path.rglob("*")):
        stat = file.stat()
        yield f"{name} {file.name} {_fingerprint(file, stat.st_mtime_ns, stat.st_size)}"


@functools.cache
def _fingerprint(path: Path, changed: int, size: int) -> str:
    return fingerprint_of(path)


@functools.cache
def _commit(model: str) -> str:
    """Commit of a model on the hub: the name of the folder that holds its files."""
    path = file_of(model, "config.json") or file_of(model, "tokenizer_config.json")
    return "" if path is None else path.parent.name


@functools.cache
def _hub_rows(source: str) -> str:
    """Fingerprints of the rows of a hub data set; ``source`` has its options as JSON."""
    corpus = data.load(Config.of(json.loads(source), "verify"))
    prints = {name: fingerprint_of(rows) for name, rows in rows_of(corpus).items()}
    return json.dumps(prints, sort_keys=True)


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write the file of a run, with its checksum."""
    content = json.loads(json.dumps(result, default=str))
    write_json(path, {**content, CHECKSUM: _checksum(content)})


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class GridRuns:
    """All runs of a grid in the directory ``out``."""

    def __init__(self, grid: Grid, out: Path, display: Display | None = None):
        self.grid, self.out, self.display = grid, out, display or Display()
        cells = enumerate(grid.cells)
        order = sorted(cells, key=lambda x: (grid.seeds.index(x[1].seed), x[0]))
        #: All runs, ordered by seed, so that an interrupted study covers all variants.
        self.cells = [cell for _, cell in order]

    def path(self, cell: Cell) -> Path:
        """Result file of a run."""
        about = {"seconds": self.grid.seconds, "cache": self.grid.cache or None}
        given = {k: v for k, v in about.items() if v is not None}
        return (
            self.out / "runs" / f"{cell.task}-{cell.seed}-{key_of({**cell.options, **given})}.json"
        )

    def result(self, cell: Cell) -> dict[str, Any] | None:
        """Content of the result file; None if it is missing or has changed."""
        found = read_json(self.path(cell))
        return found if found.pop(CHECKSUM, None) == _checksum(found) else None

    def done(self, cell: Cell) -> bool:
        """Whether a run is done."""
        return self.result(cell) is not None

    def check(self) -> None:
        """Raise for an invalid run, before one is trained: options, files, rows, layers."""
        self._write_docstrings()
        seen: set[tuple[str, ...]] = set()
        for cell in {str(c.options): c for c in self.grid.cells}.values():
            with self._errors_named(cell):
                config = Config.of({k: v for k, v in cell.options.items() if k != "stages"})
                new = {(cell.task,), (cell.variant, cell.task)} - seen
                if not new:
                    continue
                if "stages" in cell.options:
                    stages.check_runs(self._stages(cell.options, self.out / "new", False), "")
                    seen |= {(cell.variant, cell.task)}
                    continue
                distillation.check(config)
                name, wanted = config.teacher, config.student_layers
                if wanted is not None and name is not None and without_weights(name) != SERVED:
                    teacher = load("--teacher", name, AutoConfig, config.trust_remote_code)
                    check_depth("--student-layers", wanted, layers_in(teacher))
                if (cell.task,) in new:
                    corpus = data.load(config, finished_task(config))
                    if config.labelled is not None:
                        data.few_labels(corpus, config.labelled, config.seed)
            seen |= new

    def _measured(self, run: Run, teacher: Any, student: Any, judged: Judged) -> dict[str, Any]:
        """Predictions of the best student, the right ones, and the similarities of its layers.

        Both models' speed, if the paper's table has it.
        """
        corpus, rows = run.data.corpus, run.sets.evals[""]
        labels, names = corpus.train.labels, corpus.names or []
        references = corpus.task.references(rows)
        one_class = bool(names and references) and isinstance(references[0], int)
        found: dict[str, Any] = {
            "predictions": corpus.task.short_answers(judged.answers[""], rows),
            "references": references,
            "classes": names if one_class else [],
            **similarities(run, student),
        }
        if one_class and labels is not None:
            found["training_rows"] = np.bincount(labels, minlength=len(names)).tolist()
        columns = str(self.grid.paper["columns"]) if self.grid.paper else ""
        if any(name in columns for name in TIMED_MODELS):
            seconds = seconds_a_batch(run, student, teacher)
            of_teacher = seconds.get("teacher", math.nan)
            faster = {who: of_teacher / each for who, each in seconds.items()}
            found |= {"seconds_a_batch": seconds, "speedup": faster}
        return found

    @staticmethod
    def _stages(options: Mapping[str, Any], folder: Path, resume: bool) -> list[stages.Stage]:
        """The stages of a run, below ``folder``."""
        shared = {k: v for k, v in options.items() if k != "stages"}
        return stages.make(shared, options["stages"], {"out": folder, "resume": resume}, "")

    def _errors_named(self, cell: Cell) -> AbstractContextManager[None]:
        return errors_with_file_keys(f"{cell.variant} on {cell.task}", Config)

    def _write_docstrings(self) -> None:
        """Write the rows of docstrings that the runs read."""
        for folder in {
            Path(c.options["train"]).parent for c in self.grid.cells if "train" in c.options
        }:
            kind, *rows = folder.name.split("-")
            if folder.parent == self.out / "data" and kind in docstrings.SETS:
                docstrings.write(kind, int(rows[0]), int(rows[1]), folder)

    def train(self, workers: int) -> bool:
        """Train all runs that are missing in ``workers`` processes; False if one of them died."""
        self.check()
        (self.out / "runs").mkdir(parents=True, exist_ok=True)
        if workers == 1:
            self.work()
            return True
        context = multiprocessing.get_context("spawn")
        threads = max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // workers))
        given = (self.grid, self.out, threads, self.display.shared())
        pool = [context.Process(target=_worker, args=given, daemon=True) for _ in range(workers)]
        for worker in pool:
            worker.start()
        while any(worker.is_alive() for worker in pool):
            pool[0].join(1.0)
            time.sleep(0.2)
        return not any(worker.exitcode for worker in pool)

    def finish(self) -> None:
        """Wait for the runs of other processes, and take over those of a process that died."""
        while not all(map(self.done, self.cells)):
            time.sleep(1)
            self.work()

    def work(self) -> None:
        """Train runs until each is done or locked by another process."""
        missing = [cell for cell in self.cells if not self.done(cell)]
        total, most, began = len(self.cells), len(missing), time.perf_counter()
        track = self.display.track("runs", total - most, total)
        gc.freeze()  # each run collects garbage twice; what is loaded already is none
        try:
            for cell, result in self._trained():
                missing = [each for each in missing if not self.done(each)]  # of all processes
                done, spent = total - len(missing), time.perf_counter() - began
                track.advance(done)
                left = spent / max(1, most - len(missing)) * len(missing)
                said = f"failed: {result['failed']}" if "failed" in result else (
                    f"{format_scores(result['scores'])}  ({result['seconds']:.1f} s)"
                )  # fmt: skip
                self.display.say(
                    f"{done}/{total}  {cell.task}  {cell.variant}  seed {cell.seed}:  {said}, "
                    f"{clock(left)} left"
                )
        finally:
            gc.unfreeze()
            track.stop()

    def _trained(self) -> Iterator[tuple[Cell, dict[str, Any]]]:
        """Each run that this process trains, with its result."""
        parent = multiprocessing.parent_process()
        for cell in self.cells:
            if (parent is not None and not parent.is_alive()) or self.done(cell):
                continue
            path = self.path(cell)
            lock = filelock.FileLock(path.with_suffix(".lock"), blocking=False)
            with contextlib.suppress(filelock.Timeout), lock:
                if self.done(cell):
                    continue
                if path.exists():
                    self.display.say(
                        f"{path} has changed since it was written; its run starts again"
                    )
                result = self._run(cell, self.options(cell))
                write_result(path, result)
                yield cell, result

    def _run(self, cell: Cell, options: dict[str, Any]) -> dict[str, Any]:
        """Run `fastkd distill` with the ``options`` of a cell; its result."""
        folder = self.path(cell).with_suffix("")
        before: list[stages.Stage] = []
        last, resume = folder, folder.exists()
        if "stages" in options:
            *before, stage = self._stages(options, folder, resume)
            config, last = stage.config, stage.out
        else:
            config = Config.of({**options, "out": folder, "resume": resume})
        about = {
            "variant": cell.variant, "task": cell.task, "seed": cell.seed, "values": cell.values,
            "options": options,
        }  # fmt: skip
        device = choose_device(config.device_name, config.precision)
        memory = PeakMemory(device)
        display = Bars(self.display, f"{cell.task}: {cell.variant}, seed {cell.seed}")
        cache = self.out / "cache" if self.grid.cache else None
        try:
            with self._errors_named(cell):
                reports = [stages.run_stage(each, display) for each in before]
                if before:
                    reports.append(stages.run_stage(stage, display, self._measured, cache))
                else:
                    # M_ICS is of studies with intra-class KNN.
                    knn = any(each.options["method"] == "knn" for each in self.cells)
                    measures = self._measured, cache, intra_class if knn else None
                    reports.append(distillation.run_distillation(config, display, *measures))
        except TrainingFailed as error:
            return {**about, "failed": str(error)}
        finally:
            if (last / "student").exists():
                shutil.rmtree(folder)
        report = reports[-1]
        kind, sets = tasks.named(report["task"]), names_of(config.test or [])
        # The test rows of MNLI are its mismatched ones in GLUE's own files.
        only = "mm" if config.glue is not None and config.glue.name == "mnli" else "test"
        tests = {
            who: {(f"{k}_{only}" if "" in sets else k): x for k, x in scores.items()}
            for who, scores in report.get("test", {}).items()
        }
        suffixes = ["", *(f"_{name or only}" for name in sets)]
        copied = (
            "predictions", "references", "classes", "warnings", "training_rows", "rccc",
            "intra_class_similarity", "history", "rows", "parameters", "compared_layers",
            "seconds_a_batch", "speedup",
        )  # fmt: skip
        return {
            **about,
            "scores": {**report["student"], **tests.get("student", {})},
            "teacher": {**report["teacher"], **tests.get("teacher", {})},
            "lower_is_better": sorted(f"{x}{y}" for x in kind.lower_is_better for y in suffixes),
            "tests": suffixes[1:] if len(sets) > 1 else [],
            "percent": sorted(f"{x}{y}" for x in kind.percent for y in suffixes),
            "best": report["best"]["epoch"],
            "recipe": report.get("recipe", {}),
            **{name: report[name] for name in copied if name in report},
            "seconds": sum(each["seconds"]["training"] for each in reports),
            "peak_bytes": memory.read(),
            "machine": machine_of(str(device)),
        }

    def options(self, cell: Cell) -> dict[str, Any]:
        """Options of `fastkd distill` for a cell, with its fine-tuned teacher and its budget."""
        options = dict(cell.options)
        if options.get("finetune_teacher") and not options.get("teacher_cache"):
            options["teacher"] = str(self._teacher(cell))
            options = {k: v for k, v in options.items() if k not in OF_FINETUNING}
        if self.grid.seconds is not None:
            each = self._timed(_last_stage(options))["seconds"]
            options["training_steps"] = max(1, round(self.grid.seconds / each))
        return options

    def _teacher(self, cell: Cell) -> Path:
        """The fine-tuned teacher; whoever comes first trains it, beside a student of one step."""
        own = {name: cell.options[name] for name in OF_TEACHER if name in cell.options}
        folder = self.out / "teachers" / key_of(own)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.with_suffix(".lock")), self._errors_named(cell):
            teacher = folder / "teacher"
            if (folder / "student").exists() and not find_damage(teacher):
                return teacher
            if teacher.exists() and find_damage(teacher):
                shutil.rmtree(folder)
            self.display.say(f"{cell.task}: fine-tuning the teacher {own['teacher']}")
            steps = {"method": "labels", "student_layers": 1, "training_steps": 1, "seed": 0}
            where: dict[str, Any] = {"out": folder, "resume": folder.exists()}
            config = Config.of({**own, **steps, **where})
            display = Bars(self.display, f"{cell.task}: teacher")
            report = distillation.run_distillation(config, display, lambda *_: {})
            self.display.say(f"{cell.task}: teacher  {format_scores(report['teacher'])}")
        return teacher

    def steps(self, cell: Cell) -> tuple[int, float]:
        """Steps of a whole run and seconds of each, with a teacher that is tuned for one step."""
        options = _last_stage(cell.options)
        if options.get("finetune_teacher"):
            options["finetune_teacher"] = ONE_STEP
        found = self._timed(options)
        seconds = found["seconds"] * len(cell.options.get("stages", [""]))
        return _count(options, found["rows"]), seconds

    def teacher_seconds(self, cell: Cell) -> float:
        """Seconds of a teacher's fine-tuning: those of a student with all of its layers."""
        own = {name: cell.options[name] for name in OF_TEACHER if name in cell.options}
        remote = own.get("trust_remote_code", False)
        teacher = load("--teacher", resolved(own["teacher"]), AutoConfig, remote)
        tuning = {"method": "labels", "student_layers": layers_in(teacher), "seed": 0}
        epochs = {"num_train_epochs": own["finetune_teacher"]}
        found = self._timed({**own, **tuning, "finetune_teacher": ONE_STEP})
        return _count({**own, **epochs}, found["rows"]) * found["seconds"]

    def _timed(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Seconds of a step, by two short runs, and the number of rows; the same for all seeds."""
        own = {k: v for k, v in options.items() if k not in ("seed", "num_train_epochs")}
        path = self.out / "steps" / f"{key_of(own)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_suffix(".lock")):
            if not (found := read_json(path)):
                times = []
                for steps in TIMED:
                    folder = path.with_suffix(f".{steps}")
                    shutil.rmtree(folder, ignore_errors=True)
                    config = Config.of(
                        {**own, "training_steps": steps, "max_eval_rows": 32, "out": folder}
                    )
                    report = distillation.run_distillation(config, measure=lambda *_: {})
                    times.append(report["seconds"]["training"])
                    shutil.rmtree(folder)
                rows = report["rows"]
                each = max(1e-9, (times[1] - times[0]) / (TIMED[1] - TIMED[0]))
                found = {"seconds": each, "rows": rows["train"] + rows.get("unlabelled", 0)}
                write_json(path, found)
        return found


def _last_stage(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a run, or of its last stage with the teacher of all."""
    last = [{}, *options.get("stages", {}).values()][-1]
    found = {**options, **{k: v for k, v in last.items() if k != "teacher"}}
    return {k: v for k, v in found.items() if k != "stages" and v is not None}


def _count(options: Mapping[str, Any], rows: int) -> int:
    """Steps of a run with this number of ``rows``."""
    config = Config.of(options)
    return steps_of(config, config.batch_size, rows)[0]


def layers_in(config: Any) -> int:
    """Number of layers in a model's configuration."""
    text = config.get_text_config()
    return int(getattr(text, "num_hidden_layers", 0) or 2**31)


def _worker(
    grid: Grid, out: Path, threads: int, shared: Callable[[], AbstractContextManager[Display]]
) -> None:
    torch.set_num_threads(threads)
    try:
        with shared() as display:
            GridRuns(grid, out, display).work()
    except (InputError, RunFailed) as error:  # no traceback, as in the main process
        sys.exit(f"Error: {error}")


@dataclass
class Bars(Display):
    """The bars of one run of a study; its lines are left out."""

    display: Display
    title: str

    def track(self, title: str, first: int, total: int) -> Track:
        return self.display.track(self.title, first, total)
