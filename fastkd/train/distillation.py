"""The job behind `fastkd distill`: check everything, fine-tune the teacher, train the student.

`fastkd.train.run_directory` describes the content of the output directory.
"""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

import fastkd
from fastkd._core.extras import require
from fastkd.distill.cache import TeacherCache, teacher_request
from fastkd.distill.distiller import Distiller
from fastkd.distributed import world_size
from fastkd.integrations.served_teacher import ServedTeacher
from fastkd.models.layer_map import SCHEMES
from fastkd.train import auto_method, data, lora, processes, recipes, sharding, tasks
from fastkd.train.arrow_rows import fingerprint, tokenizer_fingerprint
from fastkd.train.card import CARD, write_card
from fastkd.train.config import DistillConfig
from fastkd.train.errors import InputError, nearest
from fastkd.train.hub import is_served
from fastkd.train.models import (
    STUDENT,
    attention_for,
    be_quiet,
    finished_task,
    layers_of,
    load_cached_teacher,
    load_teacher,
    load_tokenizers,
    make_method,
    row_teachers,
    served_teacher,
)
from fastkd.train.options import given as set_flags
from fastkd.train.progress import Display, format_scores
from fastkd.train.run import Run, assemble, check_classes, save_model, select
from fastkd.train.run_directory import (
    CHECKPOINTS,
    EVAL_ROWS,
    Checkpoints,
    RunDirectory,
    corpus_fingerprints,
    model_fingerprint,
)
from fastkd.train.saving import (
    MANIFEST,
    discard,
    find_damage,
    locked,
    read_json,
    read_manifest,
    saving,
    update_manifest,
)
from fastkd.train.settings import AUTO, MAX_LENGTH, SELECT
from fastkd.train.tasks.base import reorder_classes

filelock: Any = require("filelock", "train")

#: Measurements of a run's best student, by name.
Measure = Callable[[Run, PreTrainedModel], dict[str, Any]]


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
        job = Distillation(config, display)
        if job.out.done:
            job.check_done()
            return job.out.done
        distiller: Distiller | None = job.begin()
        if config.finetune_teacher:
            distiller = None  # its student has the weights before fine-tuning
            job.finetune_teacher()
        report = job.train_student(distiller, measure, cache)
        report["seconds"]["total"] += time.perf_counter() - started
        job.finish(report)
    return report


def check(config: DistillConfig) -> None:
    """Raise for options that do not fit method, task or processes, before anything is read."""
    if config.shard and world_size() == 1:
        raise InputError(
            "--fsdp: shards models over processes, but there is one; start several by `torchrun "
            "--nproc-per-node N -m fastkd distill ...`"
        )
    if config.resume and not config.out.exists():
        raise InputError(
            f"--resume: --out {config.out} does not exist; give that of the run, or leave --resume "
            "out"
        )
    for flag in set_flags(config, "teacher_model", "top_k"):
        if not is_served(config.teacher):
            raise InputError(f"{flag}: belongs to a --teacher that is a server's URL; leave it out")
    kind = tasks.of_file(config.kind, config.train)
    if config.method != AUTO:
        method = make_method(config.method, config.options, config.preset)
        check_classes(config.method, method, kind)
    layers = config.options.get("layers")
    if isinstance(layers, str) and layers not in SCHEMES:
        raise InputError(f"--set layers={layers}: {nearest(layers, SCHEMES)}")
    if config.finetune_teacher and not kind.supervised:
        raise InputError(
            f"--finetune-teacher: the rows of --task {kind.name()} have no labels to train on"
        )


class Distillation:
    """A run of `fastkd distill`: options, output directory, rows and models."""

    run: Run
    #: The paper's recipe and what deviates from it, with --preset paper.
    recipe: dict[str, Any]

    def __init__(self, config: DistillConfig, display: Display):
        self.config, self.display = config, display
        self.out = processes.on_first_process(lambda: RunDirectory(config))
        self._report_moved_files()
        if config.resume and not (self.out.manifest or self.out.done):
            display.say(f"{config.out}: no run to resume; this one begins")
        if config.student is not None and config.student == config.teacher:
            display.say("warning: --student is the teacher; --student-layers makes a smaller one")
        with processes.errors_on_all():
            corpus = data.load(config, finished_task(config))
            if config.labelled is not None:
                corpus = data.few_labels(corpus, config.labelled, config.seed)
        #: Number of rows without a loss.
        self.unread = 0
        if config.method == "labels" and corpus.unlabelled is not None:
            self.unread = len(corpus.unlabelled)
            corpus = dataclasses.replace(corpus, unlabelled=None)
        for line in data.describe(corpus):
            display.say(line)
        self.corpus = corpus

    def check_done(self) -> None:
        """Check that the complete run had the same rows."""
        corpus = reorder_classes(self.out.done.get("labels"), self.corpus)
        self.out.begin(corpus_fingerprints(corpus))
        self.display.say(f"{self.config.out}: this run is already complete")

    def begin(self) -> Distiller:
        """Load and check data and models, and start the run in the output directory."""
        config, out, display = self.config, self.out, self.display
        with processes.errors_on_all():
            prints = self._load()
            own, kept = self.run.teacher_tokenizer is not None, out.manifest.get("method")
            self.config, why = auto_method.settled(config, self.run.task, own, kept)
            config = self.config
            # Errors of student and method are raised now, not after the teacher's fine-tuning.
            distiller = assemble(config, self.run, gather=config.gather)
            self._check(distiller)
        if why:
            display.say(why)
        student = cast(PreTrainedModel, distiller.student)
        self.recipe = recipes.compared(config, distiller.method)
        for line in recipes.lines(self.recipe):
            display.say(line)
        if config.student is not None:
            prints["student weights"] = model_fingerprint(student)
        run = self.run
        size = student.get_memory_footprint(return_buffers=False)
        fine_tuned = run.teacher.get_memory_footprint(False) if config.finetune_teacher else 0
        processes.on_first_process(lambda: out.check_room(fine_tuned, size))
        out.begin(prints)
        out.once("method", lambda: config.method)
        counts = ", ".join(f"{number} {name} rows" for name, number in self._counts().items())
        display.say(f"{counts}, device {run.device.type}")
        if max(world_size(), out.processes) > 1:
            begun = out.processes
            before = f", as in the {begun} that began" if begun != world_size() else ""
            rows = run.training_config.batch_size * config.gradient_accumulation_steps
            display.say(f"{world_size()} processes: {rows} rows a step in all{before}")
        if not config.shard:
            nn.Module.to(run.teacher, run.device)
        return distiller

    def _load(self) -> dict[str, str]:
        """Set `run`, with its teacher or teacher cache; returns fingerprints of its inputs."""
        config, options = self.config, dict[str, Any]()
        length, corpus = config.max_length, self.corpus
        teacher: Any
        if config.teacher_cache is not None:
            teacher, about, tokenizer, teachers, corpus = load_cached_teacher(
                config, config.teacher_cache, corpus
            )
            options["cached"] = about
            if length == MAX_LENGTH:
                length = about["settings"]["max_length"]
            student = read_json(teacher.path / STUDENT / MANIFEST)["files"]
            parts = teacher.digest, json.dumps(student, sort_keys=True)
            prints = {"teacher cache": fingerprint(part.encode() for part in parts)}
        elif config.teachers is not None:
            teacher, tokenizer, corpus = row_teachers(config, corpus)
            teachers, prints = None, {f"teacher {name}": _print_of(x) for name, x in
                                      zip(teacher.names, teacher.models, strict=True)}  # fmt: skip
        elif is_served(config.teacher):
            (teacher, tokenizer), teachers = served_teacher(config), None
            prints = {"served teacher": _print_of(teacher)}
        else:
            tokenizer, teachers = load_tokenizers(config, corpus, self.display)
            fresh = bool(config.finetune_teacher)
            finetuned = fresh and _is_complete(self.out.teacher)
            name = str(self.out.teacher if finetuned else config.teacher)
            teacher, corpus = load_teacher(config, name, corpus, teachers or tokenizer, fresh)
            prints = {} if finetuned else {"teacher weights": model_fingerprint(teacher)}
        if teachers is not None:
            self._check_two_tokenizers()
            options["teacher_tokenizer"] = teachers
            prints["teacher's tokenizer files"] = tokenizer_fingerprint(teachers)
        training = dataclasses.replace(config, batch_size=config.batch_size * self.out.processes)
        self.run = Run(
            corpus, tokenizer, teacher, training, length, self.display, pack=config.pack, **options
        )
        prints["tokenizer files"] = tokenizer_fingerprint(tokenizer)
        return {**corpus_fingerprints(corpus), **prints}

    def _check_two_tokenizers(self) -> None:
        """Raise for options that need one tokenizer."""
        config = self.config
        for flag, given, remedy in (
            ("--pack", config.pack, "leave it out"),
            ("--on-policy", config.on_policy, "leave it out"),
            ("--finetune-teacher", config.finetune_teacher, "train the teacher in another run"),
        ):
            if given:
                raise InputError(
                    f"{flag}: the student has a tokenizer of its own, and the teacher reads other "
                    f"tokens; {remedy}"
                )

    def _check(self, distiller: Distiller) -> None:
        """Raise unless a cache holds every training row, and an on-policy student has a loss."""
        run, method = self.run, distiller.method
        if run.cached:
            self._check_cached(distiller)
        if not self.config.on_policy:
            return
        if run.task.generated is None:
            raise InputError(
                f"--on-policy: models of --task {run.task.name()} do not generate text; leave it "
                "out"
            )
        for progress in (0.0, 1.0):
            weights = method.weights(progress)
            if not any(weight for name, weight in weights.items() if name != "task"):
                raise InputError(
                    f"--on-policy: {type(method).__name__} trains on labels alone, and generated "
                    "text has none; take another --method"
                )

    def _check_cached(self, distiller: Distiller) -> None:
        """Raise unless the cache holds every training row; the processes share the check."""
        run, size = self.run, 256
        rows, cache, rank, ranks = run.all_rows, run.teacher, processes.rank(), world_size()
        for number, batch in enumerate(rows.batches(run.collate, size, rank=rank, ranks=ranks)):
            if all(key in cache for key in distiller.sample_keys(batch)):
                continue
            for i in range(len(batch["input_ids"])):
                row = {name: x[i : i + 1] for name, x in batch.items()}
                if not all(key in cache for key in distiller.sample_keys(row)):
                    source, number = rows.place((number * ranks + rank) * size + i)
                    raise InputError(
                        f"--teacher-cache {cache.path}: {source}, row {number} is not in it; write "
                        "it from the same rows with the same --max-length"
                    )

    def finetune_teacher(self) -> None:
        """Fine-tune the teacher to its best evaluation, saved as OUT/teacher."""
        config, run, target = self.config, self.run, self.out.teacher
        if processes.on_first_process(lambda: _is_complete(target)):
            return
        training = dataclasses.replace(
            run.training_config,
            num_train_epochs=config.finetune_teacher,
            training_steps=None,
            max_steps=-1,
            learning_rate=config.teacher_learning_rate,
        )
        options = self._saving_options(target, run.teacher, {})
        history = run.train_teacher(training, shard=config.shard, gather=config.gather, **options)
        name = run.teacher.config.name_or_path
        run.teacher = self._best(target, run.teacher)
        # The student's adapters name the teacher as it was given, not the folder of a running run.
        run.teacher.config.name_or_path = name
        if not config.shard:  # which initialises the student from a whole teacher first
            run.teacher.to(run.device)

        def finish() -> None:
            report = {**read_json(target / MANIFEST), "complete": True, "history": history}
            with saving(target):
                update_manifest(target, report)
                Checkpoints(self.out.work / CHECKPOINTS["teacher"]).clear()

        processes.on_first_process(finish)

    def train_student(
        self,
        distiller: Distiller | None,
        measure: Measure | None = None,
        cache: Path | None = None,
    ) -> dict[str, Any]:
        """Train the student and save its best state as OUT/student; returns the run's report.

        The ``distiller`` is None if the teacher was fine-tuned.
        """
        config, run, out = self.config, self.run, self.out
        if config.shard:
            distiller = distiller or assemble(config, run, gather=config.gather)
            sharding.shard_distiller(distiller, run.device)
        teacher_scores, by_teacher = self._score_teacher(), self._score_by_teacher()
        selected = None
        if config.teacher_layers == SELECT:
            selected = out.once("selected", lambda: select(config, run))
        if distiller is None or selected:
            distiller = assemble(config, run, selected, config.gather)
        if cache is not None and self._can_cache(distiller):
            kept = self._cache(distiller, cache)
            distiller = assemble(config, run, selected, config.gather, kept)
        student = cast(PreTrainedModel, distiller.student)
        report: dict[str, Any] = {
            "fastkd": fastkd.__version__,
            "torch": torch.__version__,
            "rows": self._counts(),
            "layers": student.config.num_hidden_layers,
            "teacher_layers": self._initial_layers(selected),
            "task": run.task.name(),
            **run.task.report(),
            "paired": run.corpus.train.paired,
            "teacher": teacher_scores,
            **({"teachers": by_teacher} if by_teacher else {}),
            **({"recipe": self.recipe} if self.recipe else {}),
        }
        options = self._saving_options(out.student, student, report)
        began = time.perf_counter()
        options |= {"unread": self.unread, "on_policy": config.on_policy}
        history = run.train(distiller, config.method, **options)
        if run.served:
            report["served_teacher"] = ", ".join(x.throughput() for x in run.served)
            self.display.say(report["served_teacher"])
        training = history[-1]["seconds"]
        before = max(0.0, training - (time.perf_counter() - began))  # of a resumed run
        self.display.say("scoring and timing the best student ...")
        report.update(self._score_best(student, measure))
        # The manifest of the saved student has its scores. The first process reads it, before it
        # moves the directory.
        return {
            **processes.on_first_process(lambda: read_json(out.student / MANIFEST)),
            **report,
            "compared_layers": distiller.method.teacher_layers,
            "complete": True,
            "history": history,
            "seconds": {"training": training, "total": before},
        }

    def _can_cache(self, distiller: Distiller) -> bool:
        """Whether a cache has all that the method reads in a training."""
        run, method, config = self.run, distiller.method, self.config
        alone = world_size() == 1 and not config.shard and not config.on_policy
        draws = hasattr(run.collate, "for_epoch")  # inputs of its own in each epoch
        reads = method.uses_teacher and method.prepared and not teacher_request(method)["inside"]
        return alone and not draws and reads and isinstance(run.teacher_model, nn.Module)

    def _cache(self, distiller: Distiller, folder: Path) -> TeacherCache:
        """The teacher's outputs on all training rows; only missing ones are computed."""
        run, config = self.run, self.config
        request = teacher_request(distiller.method)
        parts = (model_fingerprint(run.teacher), json.dumps(request), config.precision)
        path = folder / fingerprint(map(str.encode, parts))
        path.mkdir(parents=True, exist_ok=True)
        rows = run.all_rows.batches(run.collate, 32, run.all_rows.by_length, device=run.device)
        with filelock.FileLock(path.with_suffix(".lock")), run.training_config.autocast():
            return distiller.cache_teacher(rows, path)

    def finish(self, report: dict[str, Any]) -> None:
        """Complete the student's directory and move the results to --out."""
        student = self.out.student

        def publish() -> None:
            with saving(self.config.out):
                write_card(student, report)
                update_manifest(student, report, CARD)
                self.out.finish()

        processes.on_first_process(publish)
        self._report_moved_files()
        self.display.event("complete", **{k: report[k] for k in ("teacher", "student", "seconds")})

    def _report_moved_files(self) -> None:
        if self.out.kept is not None:
            self.display.say(
                f"{self.out.kept}: files that fastkd did not write, or that have changed"
            )
            self.out.kept = None

    def _best(self, target: Path, model: nn.Module) -> Any:
        """The saved best model, of the class of ``model`` without adapters and shards."""
        kind = type(lora.plain(sharding.without_shards(model)))
        # Teacher and student are timed with the same attention.
        return kind.from_pretrained(
            target, **attention_for(self.config.method, self.config.attention)
        )

    def _score_best(self, student: PreTrainedModel, measure: Measure | None) -> dict[str, Any]:
        """Sizes, test scores and seconds per batch of the best student, read from its files."""
        run, best = self.run, self._best(self.out.student, student)
        found: dict[str, Any] = {"parameters": {}, "bytes": {}}
        if "parameters" in run.cached:  # not of a server's cache
            found = {name: {"teacher": run.cached[name]} for name in found}
        models = {"teacher": run.teacher_model, "student": best}
        for who, model in models.items():
            if model is not None:
                found["parameters"][who] = model.num_parameters()
                found["bytes"][who] = model.get_memory_footprint(return_buffers=False)
        if self.config.shard:
            sharding.shard(best, run.device, trained=False)
        else:
            best.to(run.device)
        run.score(best, who="student")
        measured = None if measure is None else measure(run, best)
        for name, sets in run.rows_by_teacher().items():
            self.by_teacher[name]["student"] = run.score(best, sets)
            shown = format_scores(self.by_teacher[name]["student"])
            self.display.say(f"student on rows of {name}:  {shown}")
        if run.test_rows:
            both = {"teacher": run.teacher_model, "student": best}
            found["test"] = {
                name: run.score(model, run.test_rows) for name, model in both.items() if model
            }
        if measured is not None:
            return {**found, "seconds_a_batch": {}, **measured}
        if self.config.shard:  # no process runs it alone
            seconds = processes.all_gather(run.seconds_a_batch(best))[0]
        else:
            seconds = processes.on_first_process(lambda: run.seconds_a_batch(best))
        return {**found, "seconds_a_batch": seconds}

    def _initial_layers(self, selected: list[int] | None) -> list[int] | None:
        """Teacher layers that the student was initialised from; None if it was not."""
        config = self.config
        own = config.student is not None or config.student_weights == "random"
        if own or self.run.teacher_model is None:
            return None
        return selected or layers_of(config, self.run.teacher)

    def _score_teacher(self) -> dict[str, float]:
        """The teacher's scores; those in a cache if it was scored on the same rows."""
        run, config = self.run, self.config
        if run.teacher_model is not None:
            scores = run.score(run.teacher_model, who="teacher")
        elif not run.cached:  # a server has no scores
            scores = {}
        else:
            prints, settings = run.cached["fingerprints"], run.cached["settings"]
            same = prints.get(EVAL_ROWS) == self.out.manifest["fingerprints"][EVAL_ROWS]
            for name, value in (("max_length", run.max_length), ("precision", config.precision)):
                same = same and settings.get(name) == value
            scores = run.cached["teacher"] if same else {}
        if any(map(math.isnan, scores.values())):
            raise InputError(f"--teacher {config.teacher}: its outputs are not finite")
        if scores:
            self.display.say(f"teacher:  {format_scores(scores)}")
        return scores

    def _score_by_teacher(self) -> dict[str, dict[str, Any]]:
        """Each teacher's evaluation rows and its scores on them, with --teachers."""
        run, found = self.run, dict[str, dict[str, Any]]()
        live = run.teacher.live if run.by_row else {}
        for name, sets in run.rows_by_teacher().items():
            found[name] = {"rows": sum(map(len, sets.values()))}
            if name in live:
                scores = run.score(live[name], sets, who=f"teacher {name}")
                if any(map(math.isnan, scores.values())):
                    raise InputError(f"--teachers {name}: its outputs are not finite")
                found[name]["teacher"] = scores
                self.display.say(f"teacher {name} on its rows:  {format_scores(scores)}")
        self.by_teacher = found
        return found

    def _counts(self) -> dict[str, int]:
        """Number of rows of each kind that is present."""
        run = self.run
        counts = {
            "train": len(run.train_rows),
            "eval": sum(map(len, run.eval_rows.values())),
            "test": sum(map(len, run.test_rows.values())),
            "unlabelled": len(run.all_rows) - len(run.train_rows),
        }
        return {name: number for name, number in counts.items() if number}

    def _saving_options(
        self, target: Path, model: PreTrainedModel, report: dict[str, Any]
    ) -> dict[str, Any]:
        """Options of `Run.train`: checkpoints, and the best ``model`` saved to ``target``."""
        out, run, config = self.out, self.run, self.config
        checkpoints = Checkpoints(
            out.work / CHECKPOINTS[target.name],
            out.manifest["run"],
            config.checkpoint_every,
            config.resume,
        )

        def clear_damage() -> None:
            why = find_damage(target) if target.exists() else None
            if why:
                self.display.say(f"{target} is damaged ({why}); its training starts again")
                discard(target)
                checkpoints.clear()

        processes.on_first_process(clear_damage)

        def save_best(entry: dict[str, Any], history: list[dict]) -> None:
            found = {
                "complete": False, "student": entry["scores"], "best": entry, "history": history
            }  # fmt: skip
            full, whole = {**out.manifest, **report, **found}, sharding.whole(model)
            processes.on_first_process(
                lambda: save_model(target, whole, run.tokenizer, full, run.task)
            )

        return {
            "save_best": save_best,
            "checkpoints": checkpoints,
            "log_directory": config.out / "logs" / target.name,
        }


def _print_of(teacher: Any) -> str:
    """Fingerprint of a teacher: a cache, a server or a model."""
    if isinstance(teacher, TeacherCache):
        return teacher.digest
    if isinstance(teacher, ServedTeacher):
        return fingerprint([json.dumps(teacher.configuration()).encode()])
    return model_fingerprint(teacher)


def _is_complete(directory: Path) -> bool:
    """Whether ``directory`` holds a complete, intact model."""
    report = read_manifest(directory)
    return bool(report and report.get("complete")) and find_damage(directory) is None
