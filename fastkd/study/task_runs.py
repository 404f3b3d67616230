"""A data set of a study: its rows, its teacher, the teacher's outputs, and training on them."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel, set_seed

from fastkd._core.extras import require
from fastkd.distill.cache import TeacherCache, teacher_request
from fastkd.distill.distiller import Distiller
from fastkd.distill.layers import select_layers
from fastkd.distill.method import Method
from fastkd.distill.methods import SoftTargets
from fastkd.models.backbone import Backbone, Model
from fastkd.models.layer_map import resolve_layers
from fastkd.models.student import layers_to_keep, student_from_teacher, with_first
from fastkd.study.docstrings import load_docstrings, load_pairs
from fastkd.study.run_measurements import PeakMemory, machine_of, similarities, without_labels
from fastkd.study.spec import PACKAGED, SELECT, STUDENTS, Study, TaskSpec, Variant, build
from fastkd.train import data
from fastkd.train.arrow_rows import Rows, file_fingerprint, fingerprint
from fastkd.train.computation import choose_device
from fastkd.train.config import TrainingConfig
from fastkd.train.encoding import code_fingerprints
from fastkd.train.errors import InputError, TrainingFailed
from fastkd.train.models import (
    check_causal,
    check_depth,
    check_same_tokens,
    fit_config,
    load,
    tokenizer_of,
)
from fastkd.train.options import errors_with_file_keys
from fastkd.train.packaged_teacher import teacher_path
from fastkd.train.progress import Display, format_scores
from fastkd.train.run import Run, save_model
from fastkd.train.run_directory import corpus_fingerprints
from fastkd.train.saving import find_damage
from fastkd.train.settings import Source
from fastkd.train.tasks.base import Corpus, Task

filelock: Any = require("filelock", "train")

SELECTION_ROWS = 256
TEACHER_SEED = 0
CALIBRATION_STEPS = 8
MODEL_FILES = (".json", ".safetensors", ".bin", ".txt", ".model")


def key_of(identity: Any) -> str:
    """Short hash of everything that a result depends on."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]


def _files_fingerprint(folder: Path) -> str:
    """Fingerprint of a model's files, with its tokenizer; empty for a name on the hub."""
    files = sorted(path for path in folder.glob("*") if path.suffix in MODEL_FILES)
    states = [(path, path.stat()) for path in files]
    prints = (_file_as_of(path, at.st_mtime_ns, at.st_size) for path, at in states)
    return fingerprint(f"{path.name} {x}".encode() for path, x in zip(files, prints, strict=True))


# Methods without a teacher, or that compare what a cache does not store.
UNCACHED = ("labels", "minilm", "minilmv2")


@functools.cache
def _file_as_of(path: Path, changed: int, size: int) -> str:
    return file_fingerprint(path)


def _from(
    name: str, attention: str, task: Task, labels: int | None = None, whose: str = "--teacher"
) -> Any:
    """A model with this implementation of attention, if its family has it."""
    auto: Any = getattr(transformers, task.head)
    options = {} if labels is None else {"num_labels": labels, "ignore_mismatched_sizes": True}
    try:
        model = load(whose, name, auto, False, attn_implementation=attention, **options)
    except InputError:
        model = load(whose, name, auto, False, **options)
    check_causal(task, model.config, f"{whose} {name}")
    return model


class TrainedStudent(NamedTuple):
    """A trained student with its run and history."""

    run: Run
    student: PreTrainedModel
    method: Method
    history: list[dict[str, Any]]
    peak_bytes: int | None


class _AllLayers(SoftTargets):
    """Method that requests the layers of all methods of a study, so that one cache serves all."""

    def __init__(self, layers: list[int]) -> None:
        super().__init__()
        self.layers = layers

    def choose_layers(self, teacher: Model, student: Backbone) -> None:
        self.student_layers, self.teacher_layers = [], self.layers


class TaskRuns:
    """A data set, its teacher and the runs on it; each loaded at its first use."""

    def __init__(self, study: Study, task: TaskSpec, out: Path, display: Display | None = None):
        self.study, self.task, self.out = study, task, out
        self.display = display or Display()
        self.device = choose_device(study.device, study.precision)

    @functools.cached_property
    def corpus(self) -> Corpus:
        if self.task.source is None:
            return (load_pairs if self.task.pairs else load_docstrings)(*self.task.rows)
        with errors_with_file_keys(f"tasks.{self.task.name} of the study", Source):
            return data.load(self.task.source)

    @functools.cached_property
    def name(self) -> str:
        """The teacher before it learns the task."""
        if self.study.teacher != PACKAGED:
            return self.study.teacher
        return str(teacher_path())

    @functools.cached_property
    def key(self) -> str:
        """Everything that the teacher depends on."""
        kind = self.corpus.task
        return key_of(
            {
                # A user's task is a file that may change between two runs.
                "task": code_fingerprints(type(kind)) if ":" in kind.name() else [kind.name()],
                "teacher": self.study.teacher,
                "files": _files_fingerprint(Path(self.name)),
                "rows": corpus_fingerprints(self.corpus),
                "classes": self.corpus.names,
                "metrics": self.corpus.metrics,
                "steps": self.task.teacher_steps,
                "learning_rate": self.task.teacher_learning_rate,
                "batch_size": self.study.batch_size,
                "precision": self.study.precision,
                "max_length": self.task.max_length,
            }
        )

    @functools.cached_property
    def tokenizer(self) -> Any:
        return tokenizer_of("--teacher", self.name, False)

    @property
    def folder(self) -> Path:
        return self.out / "teachers" / f"{self.task.name}-{self.key}"

    @functools.cached_property
    def teacher(self) -> PreTrainedModel:
        """Fine-tuned once, by whoever comes first."""
        return self._load("sdpa")

    @functools.cached_property
    def eager_teacher(self) -> PreTrainedModel:
        """The same with attention maps."""
        return self._load("eager")

    def make_teacher(self, blocking: bool = True) -> None:
        """Fine-tune the teacher unless it is there; without ``blocking``, unless another does."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(self.folder.with_suffix(".lock"), blocking=blocking)
        with contextlib.suppress(filelock.Timeout), lock:
            if not self.folder.exists() or find_damage(self.folder):
                self._finetune()

    def _load(self, attention: str) -> PreTrainedModel:
        self.make_teacher()
        return _from(str(self.folder), attention, self.corpus.task).to(self.device)

    def _pretrained(self, attention: str, name: str) -> PreTrainedModel:
        """The model that the teacher was, or another, with a fresh head."""
        task = self.corpus.task
        whose = "--teacher" if name == self.name else "student"
        model = _from(name, attention, task, task.num_labels, whose).to(self.device).float()
        if name != self.name:
            check_same_tokens(whose, name, self.tokenizer, False)
        fit_config(model.config, task, self.tokenizer)
        return model

    def _finetune(self) -> None:
        names, tokenizer = self.corpus.names, self.tokenizer
        set_seed(TEACHER_SEED)
        model = self._pretrained("sdpa", self.name)
        training_config = dataclasses.replace(
            self._plan(self.task.teacher_steps, TEACHER_SEED),
            learning_rate=self.task.teacher_learning_rate,
        )
        self.display.say(
            f"{self.task.name}: fine-tuning the teacher, {self.task.teacher_steps} steps of "
            f"{self.study.batch_size} rows"
        )
        run = self._run_of(self.corpus, model, training_config)
        history = run.train_teacher(
            training_config,
            f"{self.task.name}: teacher",
            every=self.task.teacher_steps,
            printed=False,
        )
        scores = history[-1]["scores"]
        self.display.say(
            f"{self.task.name}: teacher  {format_scores(scores)}  ({history[-1]['seconds']:.1f} s)"
        )
        kind = self.corpus.task
        truths = kind.references(run.eval_rows[""])
        report = {
            "scores": scores,
            "rows_of_classes": None
            if names is None or self.corpus.train.labels is None
            else np.bincount(self.corpus.train.labels, minlength=len(names)).tolist(),
            "predictions": kind.short_answers(run.answers[""], run.eval_rows[""]),
            "labels": truths,
            "classes": names,
            "rows": {"train": len(self.corpus.train), "held out": len(self.corpus.evals[""])},
            "seconds": history[-1]["seconds"],
            "parameters": model.num_parameters(),
            "metrics": list(self.corpus.metrics),
            "smaller": sorted(kind.lower_is_better.intersection(self.corpus.metrics)),
            "percent": sorted(kind.percent.intersection(self.corpus.metrics)),
        }
        save_model(self.folder, model, tokenizer, report)

    def _run_of(
        self,
        corpus: Corpus,
        teacher: PreTrainedModel,
        training_config: TrainingConfig,
        evals: int | None = None,
    ) -> Run:
        """A run that is evaluated on the first ``evals`` held-out rows, or on all."""
        rows = corpus.evals[""]
        kept = rows if evals is None else rows.select(list(range(evals)))
        corpus = dataclasses.replace(corpus, evals={"": kept})
        length = self.task.max_length
        return Run(corpus, self.tokenizer, teacher, training_config, length, self.display)

    def _plan(self, steps: int, seed: int) -> TrainingConfig:
        study = self.study
        return TrainingConfig(
            batch_size=study.batch_size,
            max_steps=steps,
            learning_rate=study.learning_rate,
            labelled_share=study.labelled_share,
            precision=study.precision,
            device_name=study.device,
            seed=seed,
        )

    @functools.cached_property
    def selected(self) -> list[int]:
        """The teacher layers that MC3KD's Algorithm 1 chooses."""
        return select_layers(self.teacher, self._batches(SELECTION_ROWS), self.study.student_layers)

    def _batches(self, rows: int | None = None) -> Iterator[dict[str, torch.Tensor]]:
        """Training rows without labels, the same every time."""
        run = self._run(1, TEACHER_SEED)
        order = range(len(run.all_rows))[:rows]
        for batch in run.all_rows.batches(run.collate, 32, order, device=self.device):
            yield without_labels(self.teacher, batch)

    def student_key(self, variant: Variant) -> str:
        """A variant's initial student: its layers, or the fingerprint of its directory."""
        made_of = self._initial_layers(variant)
        return _files_fingerprint(Path(made_of)) if Path(made_of).is_dir() else made_of

    def _initial_layers(self, variant: Variant) -> str:
        return variant.student or self.study.student

    def _layers(self, layers: Any, teacher: PreTrainedModel) -> list[int]:
        backbone, wanted = Backbone(teacher, "teacher"), self.study.student_layers
        check_depth("student_layers", wanted, backbone.num_layers)
        if isinstance(layers, str):
            return layers_to_keep(layers, backbone, wanted)
        return resolve_layers(layers, backbone.num_layers, wanted)

    def _method(self, variant: Variant, selected: list[int]) -> Method:
        layers = {"layers": selected} if variant.compares_selected else {}
        return build(variant.method, {**variant.options, **layers})

    def check(self) -> None:
        """Raise if a variant can't be trained, which shows before the teacher has learned."""
        if self.task.labelled is not None:
            with errors_with_file_keys(f"tasks.{self.task.name} of the study, labelled", Source):
                few_labels(self.corpus, self.task.labelled, TEACHER_SEED)
        if self.folder.exists():
            return
        for eager in sorted({variant.eager for variant in self.study.variants}):
            teacher = self._pretrained("eager" if eager else "sdpa", self.name)
            run = self._run_of(self.corpus, teacher, self._plan(1, TEACHER_SEED))
            order = range(min(self.study.batch_size, len(run.all_rows)))
            (batch,) = run.all_rows.batches(run.collate, len(order), order, device=self.device)
            for variant in self.study.variants:
                if variant.eager == eager:
                    with self._errors_named(variant):
                        stand_in = self._layers("uniform", teacher) if variant.selects else []
                        pair = self._pair(variant, teacher, teacher, stand_in).to(self.device)
                        pair(**batch)  # labels that a method can't read show here

    @contextlib.contextmanager
    def _errors_named(self, variant: Variant) -> Iterator[None]:
        try:
            yield
        except InputError:
            raise
        except (TypeError, ValueError) as error:
            raise InputError(f"{variant.name} on {self.task.name}: {error}") from error

    def _pair(
        self, variant: Variant, teacher: Any, source: PreTrainedModel, selected: list[int]
    ) -> Distiller:
        """A fresh student, of ``source`` or as the variant has it, and a method, beside the teacher
        or its cache."""
        made_of, student = self._initial_layers(variant), source
        if made_of != "teacher":
            name = self.name if made_of == "pretrained" else made_of
            student = self._pretrained("eager" if variant.eager else "sdpa", name)
        if made_of in STUDENTS:
            layers = variant.teacher_layers
            if layers == SELECT:
                layers = with_first(selected, Backbone(student, "teacher"))
            else:
                layers = self._layers(layers, student)
            shape: Any = {
                "config": self.study.student_config,
                "weights": self.study.student_weights,
            }
            student = cast(PreTrainedModel, student_from_teacher(student, layers, **shape))
        return Distiller(teacher, student, self._method(variant, selected))

    def _distiller(self, variant: Variant, cached: bool, seed: int | None = None) -> Distiller:
        """A fresh student and method; what is loaded for them draws nothing after the ``seed``."""
        teacher = self.eager_teacher if variant.eager else self.teacher
        with self._errors_named(variant):
            kept: Any = self.cache if cached and self._can_cache(variant) else teacher
            selected = self.selected if variant.selects else []
        if seed is not None:
            set_seed(seed)
        with self._errors_named(variant):
            return self._pair(variant, kept, teacher, selected)

    @functools.cached_property
    def caches(self) -> bool:
        """Whether the teacher's outputs are stored: not if each epoch draws other inputs."""
        collate = self.corpus.task.collator(self.tokenizer)
        return self.study.cache and not hasattr(collate, "for_epoch")

    def _can_cache(self, variant: Variant) -> bool:
        return self.caches and not variant.eager and variant.method not in UNCACHED

    @functools.cached_property
    def cache(self) -> TeacherCache:
        """The teacher's outputs on all training rows, for all methods of the study."""
        teacher, layers = self.teacher, set[int]()
        # How deep a student is decides on what methods want; they take their own student's size.
        uniform = self._layers("uniform", teacher)
        student = cast(PreTrainedModel, student_from_teacher(teacher, uniform))
        for variant in filter(self._can_cache, self.study.variants):
            selected = self.selected if variant.selects else []
            with self._errors_named(variant):
                if self._initial_layers(variant) in STUDENTS:
                    pair = Distiller(teacher, student, self._method(variant, selected))
                else:
                    pair = self._pair(variant, teacher, teacher, selected)
                layers.update(teacher_request(pair.method)["layers"])
        name = "-".join(map(str, sorted(layers)))
        folder = self.out / "cache" / f"{self.task.name}-{self.key}-{name}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        done = folder.with_suffix(".done")
        with filelock.FileLock(folder.with_suffix(".lock")):
            if not done.exists():
                self.display.say(f"{self.task.name}: keeping the teacher's outputs ...")
                distiller = Distiller(teacher, student, _AllLayers(sorted(layers)))
                distiller.cache_teacher(self._batches(), folder)
                done.touch()
        return TeacherCache(folder)

    def _run(
        self, steps: int, seed: int, labels_only: bool = False, evals: int | None = None
    ) -> Run:
        corpus = self.corpus
        if self.task.labelled is not None:
            corpus = few_labels(corpus, self.task.labelled, seed)
        if labels_only:
            corpus = dataclasses.replace(corpus, unlabelled=None)
        return self._run_of(corpus, self.teacher, self._plan(steps, seed), evals)

    def train_student(self, variant: Variant, seed: int) -> "TrainedStudent":
        """Train one student.

        Raises:
            TrainingFailed: the loss is not finite.
        """
        study = self.study
        steps = study.steps or self.steps_in(cast(float, study.seconds), variant)
        distiller = self._distiller(variant, cached=True, seed=seed)
        run = self._run(steps, seed, not distiller.method.uses_teacher)
        memory = PeakMemory(self.device)
        title = f"{self.task.name}: {variant.name}, seed {seed}"
        every = -(-steps // study.evaluations)
        history = run.train(distiller, title, every=every, printed=False)
        student = cast(PreTrainedModel, distiller.student).eval()
        return TrainedStudent(run, student, distiller.method, history, memory.read())

    def train(self, variant: Variant, seed: int) -> dict[str, Any]:
        """Train and score one student: what its file says."""
        method = self._method(variant, self.selected if variant.compares_selected else [])
        about = {"hyperparameters": method.hyperparameters()}
        try:
            trained = self.train_student(variant, seed)
        except TrainingFailed as error:
            return {**about, "failed": str(error), "measured": self._measured(None, None)}
        run, seconds = trained.run, [entry.pop("seconds") for entry in trained.history]
        return {
            **about,
            "steps": trained.history[-1]["step"],
            "teacher_layers": trained.method.teacher_layers,
            "scores": trained.history[-1]["scores"],
            "predictions": run.task.short_answers(run.answers[""], run.eval_rows[""]),
            "history": trained.history,
            "parameters": trained.student.num_parameters(),
            **similarities(run, trained.student),
            "measured": self._measured(seconds, trained.peak_bytes),
        }

    def steps_in(self, seconds: float, variant: Variant) -> int:
        """How many steps take so long, as a few of them say."""
        distiller = self._distiller(variant, cached=True)
        run = self._run(CALIBRATION_STEPS, 0, not distiller.method.uses_teacher, evals=1)
        half = CALIBRATION_STEPS // 2
        title = f"{self.task.name}: calibration"
        history = run.train(distiller, title, every=half, printed=False)
        a_step = (history[-1]["seconds"] - history[0]["seconds"]) / half
        return max(1, round(seconds / a_step))

    def _measured(self, seconds: list[float] | None, peak: int | None) -> dict[str, Any]:
        found = {"machine": machine_of(str(self.device)), "cached": self.caches}
        if seconds is not None:
            found.update(seconds=seconds[-1], at=seconds, peak_bytes=peak)
        return found


def _class_ids(rows: Rows) -> list[int]:
    """Class ids for stratified sampling; 0 for rows without a class."""
    if rows.labels is None or rows.labels.dtype != np.int64:
        return [0] * len(rows)
    return rows.labels.tolist()


def few_labels(corpus: Corpus, labelled: int, seed: int) -> Corpus:
    """``labelled`` training rows, as even over the classes as can be; the others without labels."""
    rng = random.Random(seed)
    train = corpus.train
    groups: dict[Any, list[int]] = {}
    for i, label in enumerate(_class_ids(train)):
        groups.setdefault(label, []).append(i)
    for group in groups.values():
        rng.shuffle(group)
    kept: set[int] = set()
    while len(kept) < min(labelled, len(train)):
        for label in sorted(groups):
            if groups[label] and len(kept) < labelled:
                kept.add(groups[label].pop())
    rest, unlabelled = [i for i in range(len(train)) if i not in kept], corpus.unlabelled
    if rest:
        data.check_unlabelled(corpus.task)
        others = train.select(rest)
        others = others if unlabelled is None else others.followed_by(unlabelled)
        unlabelled = corpus.task.without_labels(others)
    return dataclasses.replace(corpus, train=train.select(sorted(kept)), unlabelled=unlabelled)
