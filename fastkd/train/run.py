"""The job behind `fastkd distill`: check everything, fine-tune the teacher, train the student.

`fastkd.train.run_directory` describes the content of the output directory.
"""

import contextlib
import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, set_seed

import fastkd
from fastkd.distill.batch import split_inputs
from fastkd.distill.cache import TeacherCache
from fastkd.distill.distiller import Distiller
from fastkd.distill.method import Method
from fastkd.distributed import world_size
from fastkd.train import data, lora, processes, sharding, tasks, trainer_args
from fastkd.train.arrow_rows import Encoded, Encoder, Rows, fingerprint, tokenizer_fingerprint
from fastkd.train.card import CARD, write_card
from fastkd.train.corpus import Corpus
from fastkd.train.distill_settings import MAX_LENGTH, SELECT, Pairing, Settings
from fastkd.train.errors import InputError
from fastkd.train.evaluation import accepted, predict
from fastkd.train.models import (
    STUDENT,
    attention_for,
    be_quiet,
    count,
    fitting_length,
    layers_of,
    load_cached_teacher,
    load_teacher,
    load_tokenizers,
    make_method,
    make_student,
    num_bytes,
)
from fastkd.train.progress import Display, format_scores
from fastkd.train.run_directory import (
    CHECKPOINTS,
    EVAL_ROWS,
    RunDirectory,
    corpus_fingerprints,
    model_fingerprint,
)
from fastkd.train.saving import (
    MANIFEST,
    add_to_manifest,
    discard,
    find_damage,
    locked,
    read_json,
    read_manifest,
    replace_directory,
    saving,
    update_manifest,
)
from fastkd.train.tasks.base import Task
from fastkd.train.trainers import (
    OnPolicy,
    StepTrainer,
    StudentTrainer,
    TeacherTrainer,
    TwoTokenizerCollator,
)
from fastkd.train.training import (
    CallbackConfig,
    Checkpoints,
    check_trackers,
    stopping_at_once,
    train,
)
from fastkd.train.training_config import TrainingConfig, choose_device

# Rows that --teacher-layers select reads, as many as Trainer's prepare_batches of them.
SELECTION_ROWS = 2048


class Run:
    """Data, teacher and hyper-parameters of a distillation, and its steps."""

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Any,
        teacher: PreTrainedModel | TeacherCache,
        training_config: TrainingConfig,
        max_length: int,
        display: Display,
        cached: Mapping[str, Any] = MappingProxyType({}),
        pack: bool = False,
        teacher_tokenizer: Any = None,
    ):
        #: The report of `fastkd cache`, where its cache is the teacher.
        self.cached = cached
        #: Where it isn't the student's, the ``tokenizer``.
        self.teacher_tokenizer = teacher_tokenizer
        #: None if the teacher is a cache.
        self.teacher_model: Any = None if cached else teacher
        self.corpus, self.tokenizer = corpus, tokenizer
        self.teacher: Any = teacher
        self.training_config, self.display = training_config, display
        if corpus.reading:
            display.say(corpus.reading)

        self.task = corpus.task
        self.pack, self._asked_length = pack, max_length
        #: Longest text in tokens; the default is lowered where a model reads less.
        self.max_length = max_length
        if not cached:
            self._fit_length("teacher", teacher)
        self._encode()
        self.collate = self.task.collator(tokenizer)
        if teacher_tokenizer is not None:
            self.collate = TwoTokenizerCollator(self.collate, self.task.collator(teacher_tokenizer))

    def _fit_length(self, who: str, model: Any) -> bool:
        """Lower a default maximum length to what a model reads; returns whether it was lowered."""
        read = self.teacher_tokenizer if who == "teacher" else None
        length = fitting_length(self._asked_length, read or self.tokenizer, model, who)
        lower = length < self.max_length
        if lower:
            self.max_length = length
            self.display.say(f"--max-length {length}: the {who} reads no more tokens")
        return lower

    def fit_student(self, student: Any) -> None:
        """Encode the rows again if the student reads fewer tokens than the teacher."""
        if self._fit_length("student", student):
            self._encode()

    def _encode(self) -> None:
        """Encode all rows."""
        max_length, corpus = self.max_length, self.corpus
        encoded = learned = self._encoder(max_length)
        if self.pack:
            learned = Encoder(self.tokenizer, max_length, self.task.for_packing())
        self.train_rows = learned(corpus.train).with_teacher_tokens()
        #: Training rows of the student, including unlabelled ones.
        self.all_rows = self.train_rows
        if corpus.unlabelled is not None:
            self.all_rows = self.train_rows.followed_by(learned(corpus.unlabelled))
        self.eval_rows = {suffix: encoded(rows) for suffix, rows in corpus.evals.items()}
        self.test_rows = {} if corpus.test is None else {"": encoded(corpus.test)}

    def _encoder(self, max_length: int) -> Callable[[Rows], Encoded]:
        """The encoder of rows; with two tokenizers it also encodes for the teacher."""
        student = Encoder(self.tokenizer, max_length, self.task)
        if self.teacher_tokenizer is None:
            return student
        teacher = Encoder(self.teacher_tokenizer, max_length, self.task)

        def encode(rows: Rows) -> Encoded:
            encoded = student(rows)
            encoded.teacher_encoded = teacher(rows)
            return encoded

        return encode

    def size(self, name: str, measure: Callable[[nn.Module], int]) -> dict[str, int]:
        """The teacher's size by ``measure``, or from the cache's report under ``name``."""
        model = self.teacher_model
        return {"teacher": self.cached[name] if model is None else measure(model)}

    @property
    def device(self) -> torch.device:
        return self.training_config.device

    def score(
        self, model: nn.Module, sets: Mapping[str, Encoded] | None = None
    ) -> dict[str, float]:
        """All metrics of ``model`` on all ``sets`` of rows; by default the evaluation rows."""
        sets = self.eval_rows if sets is None else sets
        return self._scores(self._answers(model, sets), sets)

    def score_with_warnings(self, model: nn.Module, who: str) -> dict[str, float]:
        """Scores on the evaluation rows; prints a warning if the answers look useless."""
        answers = self._answers(model, self.eval_rows)
        for suffix, found in answers.items():
            examples = self.eval_rows[suffix]
            why = self.task.sanity_warning(found, examples)
            if why:
                rows = f"{len(examples)} evaluation rows{f' ({suffix})' if suffix else ''}"
                self.display.say(f"warning: the {who}'s answers to the {rows} {why}")
        return self._scores(answers, self.eval_rows)

    def _answers(self, model: nn.Module, sets: Mapping[str, Encoded]) -> dict[str, Any]:
        task, tokenizer = self.task, self.tokenizer
        teacher_answers = model is self.teacher_model
        read = dict(sets)
        if teacher_answers and self.teacher_tokenizer is not None:
            tokenizer = self.teacher_tokenizer
            read = {suffix: cast(Encoded, rows.teacher_encoded) for suffix, rows in sets.items()}
        found = {
            k: predict(model, rows, task, tokenizer, self.training_config)
            for k, rows in read.items()
        }
        if teacher_answers and task.compares_with_teacher(self.corpus.metrics):
            for suffix, answers in found.items():
                sets[suffix].teacher_answers = answers
        return found

    def _scores(self, answers: dict[str, Any], sets: Mapping[str, Encoded]) -> dict[str, float]:
        scores = {}
        for suffix, answer in answers.items():
            found = self.task.scores(self.corpus.metrics, answer, sets[suffix])
            scores.update({f"{k}_{suffix}" if suffix else k: v for k, v in found.items()})
        return scores

    def seconds_a_batch(self, student: nn.Module, rounds: int = 5) -> dict[str, float]:
        """Seconds for a forward pass of up to 32 rows: medians over interleaved repeats."""
        rows = self.eval_rows[""].with_teacher_tokens()
        batch = next(rows.batches(self.collate, 32, device=self.device))
        if not getattr(student.config, "is_encoder_decoder", False):  # a decoder reads their words
            batch = {k: v for k, v in batch.items() if k != "labels"}
        inputs, own, _ = split_inputs(batch)
        read = {"student": inputs, "teacher": own or inputs}
        models: dict[str, nn.Module] = {"student": student.eval()}
        if self.teacher_model is not None:
            models["teacher"] = self.teacher_model.eval()
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(1 + rounds):
            for name, model in models.items():
                self._synchronize()
                start = time.perf_counter()
                with torch.no_grad():
                    model(**accepted(model, read[name]))
                self._synchronize()
                seconds[name].append(time.perf_counter() - start)
        return {name: statistics.median(times[1:]) for name, times in seconds.items()}

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def finetune(self, training_config: TrainingConfig, **options: Any) -> list[dict]:
        """Train the teacher on the task, in place; ``options`` are fields of `CallbackConfig`."""
        self.teacher.requires_grad_(True).train()
        trainer = functools.partial(TeacherTrainer, model=self.teacher)
        return self._train(
            trainer, self.teacher, self.train_rows, training_config, "teacher", **options
        )

    def distil(
        self, distiller: Distiller, title: str, on_policy: float = 0.0, **options: Any
    ) -> list[dict]:
        """Train the student; ``options`` are fields of `CallbackConfig`.

        In a fraction ``on_policy`` of the steps the student trains on text that it generates.
        """
        own = None
        if on_policy:
            own = OnPolicy(
                on_policy, functools.partial(self.task.generated, tokenizer=self.tokenizer)
            )
        if not sharding.sharded(distiller):
            distiller.to(self.device)
        self._say_what_is_compared(distiller.method)
        trainer = functools.partial(StudentTrainer, model=distiller, on_policy=own)
        return self._train(
            trainer, distiller.student, self.all_rows, self.training_config, title, **options
        )

    def _say_what_is_compared(self, method: Method) -> None:
        """Print a line if a loss that compares samples sees only a part of a step."""
        batches, rows = self.training_config.batches_a_step, self.training_config.batch_size
        weights = {**method.weights(0.0), **method.weights(1.0)}
        terms = [term for term in method.across_samples if weights.get(term)]
        if batches > 1 and terms:
            self.display.say(
                f"gradient_accumulation_steps: {' and '.join(terms)} compares the {rows} rows of a "
                f"batch, not the {rows * batches} of a step; --batch-size {rows * batches} "
                f"--accumulate {batches} compares them all"
            )

    def _train(
        self,
        make_trainer: Callable[..., StepTrainer],
        model: nn.Module,
        rows: Encoded,
        training_config: TrainingConfig,
        title: str,
        **options: Any,
    ) -> list[dict]:
        main = self.corpus.metrics[0]
        minimise = main in self.task.lower_is_better
        # A cache holds the outputs of undrawn rows: the partial hides the collator's `for_epoch`.
        collate = functools.partial(self.collate) if self.cached else self.collate
        return train(
            make_trainer,
            rows,
            collate,
            training_config,
            self.display,
            title,
            CallbackConfig(
                lambda: self.score(model),
                main,
                lower_is_better=minimise,
                **options,
            ),
        )


def distill(settings: Settings, display: Display) -> dict[str, Any]:
    """Run `fastkd distill`; returns what fastkd.json holds.

    The ``display`` is entered after all checks have passed.

    Raises:
        InputError: an option, file or model cannot be used; raised before training.
    """
    started = time.perf_counter()
    be_quiet()
    with contextlib.ExitStack() as stack:
        stack.enter_context(stopping_at_once())
        processes.join(settings.device)
        with processes.errors_on_all():
            training_config = check(settings)
        stack.enter_context(processes.enter_on_first_process(locked(settings.out)))
        with processes.errors_on_all():
            stack.enter_context(display)
        out = processes.on_first_process(lambda: RunDirectory(settings))
        _report_moved_files(out, display)
        training_config = dataclasses.replace(
            training_config, batch_size=settings.batch_size * out.processes
        )
        with processes.errors_on_all():
            corpus = data.load(settings)
        if settings.method == "labels":  # unlabelled rows have no loss
            corpus = dataclasses.replace(corpus, unlabelled=None)
        for line in data.describe(corpus):
            display.say(line)
        if out.done is not None:
            out.begin(
                corpus_fingerprints(corpus.task.reorder_classes(out.done.get("labels"), corpus))
            )
            display.say(f"{settings.out}: this run is already complete")
            return out.done
        run, distiller = _load(settings, out, corpus, training_config, display)
        if settings.finetune_teacher:
            distiller = None  # its student is one of the teacher as it was
            _finetune(settings, out, run)
        report = _distil(settings, out, run, distiller)
        report["seconds"]["total"] += time.perf_counter() - started
        processes.on_first_process(lambda: _finish(settings, out, report))
        _report_moved_files(out, display)
        display.event("complete", **{k: report[k] for k in ("teacher", "student", "seconds")})
    return report


def check(settings: Settings) -> TrainingConfig:
    """The plan of a run whose options agree, as far as they tell without rows and models."""
    make_method(settings.method, settings.options, settings.preset)
    check_trackers(settings.report_to)
    if settings.fsdp and world_size() == 1:
        raise InputError(
            "--fsdp: shards models over processes, but there is one; start several by `torchrun "
            "--nproc-per-node N -m fastkd distill ...`"
        )
    kind = tasks.of_file(settings.kind, settings.train)
    if settings.finetune_teacher and not kind.supervised:
        raise InputError(
            f"--finetune-teacher: the rows of --task {kind.name()} have no labels to train on"
        )
    training_config = _plan(settings)
    if training_config.accumulate > 1 and training_config.batches_a_step > 1:
        raise InputError(
            "--accumulate and gradient_accumulation_steps of --trainer-args exclude each other"
        )
    if training_config.accumulate > 1 and world_size() > 1 and not settings.gather:
        raise InputError(
            "--accumulate: several processes share a step; pass --gather, which computes the loss "
            "over all its rows"
        )
    return training_config


def _finish(settings: Settings, out: RunDirectory, report: dict[str, Any]) -> None:
    with saving(settings.out):
        add_to_manifest(out.student / CARD)
        write_card(out.student, report)
        update_manifest(out.student, report, CARD)
        out.finish()


def _report_moved_files(out: RunDirectory, display: Display) -> None:
    if out.kept is not None:
        display.say(f"{out.kept}: files that fastkd did not write, or that have changed")
        out.kept = None


def _load(
    settings: Settings,
    out: RunDirectory,
    corpus: Corpus,
    training_config: TrainingConfig,
    display: Display,
) -> tuple[Run, Distiller | None]:
    """Load and check data and models, and start the run in the output directory."""
    with processes.errors_on_all():
        run, prints, distiller = _fit_together(settings, out, corpus, training_config, display)
    sizes = num_bytes(run.teacher), num_bytes(distiller.student)
    processes.on_first_process(lambda: out.check_room(*sizes))
    out.begin(prints)
    counts = ", ".join(f"{number} {name} rows" for name, number in _counts(run).items())
    display.say(f"{counts}, device {run.device}")
    if max(world_size(), out.processes) > 1:
        before = f", as in the {out.processes} that began" if out.processes != world_size() else ""
        rows = training_config.batch_size * training_config.batches_a_step
        display.say(f"{world_size()} processes: {rows} rows a step in all{before}")
    if not settings.fsdp:
        nn.Module.to(run.teacher, run.device)
    return run, distiller


def _fit_together(
    settings: Settings,
    out: RunDirectory,
    corpus: Corpus,
    training_config: TrainingConfig,
    display: Display,
) -> tuple[Run, dict[str, str], Distiller]:
    """The run, the fingerprints of its inputs, and its student and method."""
    run, prints = _with_teacher(settings, out, corpus, training_config, display)
    prints["tokenizer files"] = tokenizer_fingerprint(run.tokenizer)
    # Errors are raised now, not after the teacher's fine-tuning.
    distiller = assemble(settings, run, gather=settings.gather)
    student = cast(PreTrainedModel, distiller.student)
    if settings.student is not None:
        prints["student weights"] = model_fingerprint(student)
    if run.teacher_model is None:
        _check_cached(distiller, run)
    if run.teacher_tokenizer is not None:
        prints["teacher's tokenizer files"] = tokenizer_fingerprint(run.teacher_tokenizer)
    if settings.on_policy:
        _check_on_policy(distiller, run)
    return run, prints, distiller


def _check_on_policy(distiller: Distiller, run: Run) -> None:
    """Raise if the student cannot generate, or the method only has a loss on labels."""
    if type(run.task).generated is Task.generated:
        run.task.generated(distiller.student, {}, run.tokenizer, 0)
    method = distiller.method
    for progress in (0.0, 1.0):
        if not any(weight for name, weight in method.weights(progress).items() if name != "task"):
            raise InputError(
                f"--on-policy: {type(method).__name__} trains on labels alone, and generated "
                "text has none; take another --method"
            )


def _check_cached(distiller: Distiller, run: Run) -> None:
    """Raise unless the cache holds every training row; the processes share the check."""
    rows, cache, size = run.all_rows, run.teacher, 256
    rank, ranks = processes.rank(), world_size()
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


def _with_teacher(
    settings: Settings,
    out: RunDirectory,
    corpus: Corpus,
    training_config: TrainingConfig,
    display: Display,
) -> tuple[Run, dict[str, str]]:
    """The run with its teacher or teacher cache, and fingerprints of its inputs."""
    if settings.teacher_cache is not None:
        folder = settings.teacher_cache
        cache, about, tokenizer, corpus = load_cached_teacher(settings, folder, corpus)
        if corpus.task.compares_with_teacher(corpus.metrics):
            raise InputError(
                f"--teacher-cache {folder}: it doesn't hold what the teacher answers to the rows "
                f"to evaluate on, with which {corpus.metrics[0]} compares; pass --teacher"
            )
        prints = corpus_fingerprints(corpus)
        student = read_json(cache.path / STUDENT / MANIFEST)["files"]
        parts = [cache.digest, json.dumps(student, sort_keys=True)]
        prints["teacher cache"] = fingerprint(part.encode() for part in parts)
        length, pack = settings.max_length, settings.pack
        if length == MAX_LENGTH:
            length = about["settings"]["max_length"]
        return Run(corpus, tokenizer, cache, training_config, length, display, about, pack), prints
    assert settings.teacher is not None
    tokenizer, teachers = load_tokenizers(settings, corpus.task)
    fresh = bool(settings.finetune_teacher)
    finetuned = fresh and _is_complete(out.teacher)
    name = str(out.teacher) if finetuned else settings.teacher
    teacher, corpus = load_teacher(settings, name, corpus, teachers or tokenizer, fresh)
    prints = corpus_fingerprints(corpus)
    if not finetuned:
        prints["teacher weights"] = model_fingerprint(teacher)
    length, pack = settings.max_length, settings.pack
    run = Run(
        corpus,
        tokenizer,
        teacher,
        training_config,
        length,
        display,
        pack=pack,
        teacher_tokenizer=teachers,
    )
    return run, prints


def _plan(settings: Settings) -> TrainingConfig:
    return TrainingConfig(
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        warmup=settings.warmup,
        precision=settings.precision,
        device=choose_device(settings.device, settings.precision),
        seed=settings.seed,
        labelled_share=settings.labelled_share,
        accumulate=settings.accumulate,
        trainer=trainer_args.read(settings.trainer_args),
    )


def select(settings: Pairing, run: Run) -> list[int] | None:
    """Teacher layers chosen by --teacher-layers select, on the first process; else None."""
    if settings.teacher_layers != SELECT or run.cached:
        return None
    rows = run.train_rows
    order = np.random.default_rng(settings.seed).permutation(len(rows))[:SELECTION_ROWS].tolist()
    batches = rows.batches(run.collate, 32, order)
    found = processes.on_first_process(lambda: layers_of(settings, run.teacher, batches))
    run.display.say(f"teacher layers that differ most: {', '.join(map(str, found))}")
    return found


def assemble(
    settings: Pairing, run: Run, selected: list[int] | None = None, gather: bool = False
) -> Distiller:
    """A new student and method, the same for the same settings.

    ``selected`` layers (--teacher-layers select, or those of a cache) form the student, and the
    method compares them unless --set names others. Before the selection, uniform layers are used.
    """
    selected = selected or run.cached.get("selected")
    set_seed(settings.seed)
    # Weights stay in float32: 16 bits would round steps away. --precision sets the arithmetic.
    cache = run.teacher.path if run.cached else None
    own = run.teacher_tokenizer is not None
    student = make_student(
        settings, run.teacher, run.tokenizer, run.task, selected, cache, own
    ).float()
    run.fit_student(student)
    if settings.lora:
        student = lora.adapted(student, settings.lora, run.task.head, settings.student)
    task, teacher_answers = run.task, run.teacher_model
    configs = (student if teacher_answers is None else teacher_answers).config, student.config
    method = make_method(
        settings.method, settings.options, settings.preset, selected, task.headless(),
        task.method_options(*configs),
    )  # fmt: skip
    if method.by_class and run.train_rows.labels is None:
        raise InputError(
            f"--method {settings.method}: compares rows of one class, but rows of --task "
            f"{run.task.name()} have no class; take another --method"
        )
    try:
        distiller = Distiller(run.teacher, student, method, gather=gather)
    except (TypeError, ValueError) as error:
        eager = "; pass --attention eager" if "attn_implementation" in str(error) else ""
        message = f"--method {settings.method} with this student: {error}{eager}"
        raise InputError(message) from error
    wanted = method.layer_request("student")  # a teacher's layers may be chosen later
    inside = wanted.attentions or wanted.qkv
    if own and (inside or (wanted.layers and method.teacher_pool == "tokens")):
        raise InputError(
            f"--method {settings.method} compares tokens, and --student {settings.student} has "
            "others than the teacher; embeddings and lrkd compare texts"
        )
    return distiller


def _finetune(settings: Settings, out: RunDirectory, run: Run) -> None:
    """Fine-tune the teacher to its best evaluation, saved as OUT/teacher."""
    if processes.on_first_process(lambda: _is_complete(out.teacher)):
        return
    if settings.fsdp:
        sharding.shard(run.teacher, run.device)
    history = run.finetune(
        dataclasses.replace(
            run.training_config,
            epochs=settings.finetune_teacher,
            learning_rate=settings.teacher_learning_rate,
        ),
        **_callback_options(settings, out, run, out.teacher, run.teacher, {}),
    )
    attention = attention_for(settings.method, settings.attention)
    kind = type(sharding.without_shards(run.teacher))
    best = kind.from_pretrained(out.teacher, **attention)
    if settings.fsdp:  # the student is made of a whole one
        run.teacher = run.teacher_model = best
    else:
        run.teacher.load_state_dict(best.state_dict())

    def finish() -> None:
        report = {**read_json(out.teacher / MANIFEST), "complete": True, "history": history}
        with saving(out.teacher):
            update_manifest(out.teacher, report)
            Checkpoints(out.work / CHECKPOINTS["teacher"], {}).clear()

    processes.on_first_process(finish)


def _distil(
    settings: Settings, out: RunDirectory, run: Run, distiller: Distiller | None
) -> dict[str, Any]:
    """Train the student and save its best state as OUT/student; returns the report of the run.

    The ``distiller`` is None if the teacher was fine-tuned.
    """
    if settings.fsdp:
        distiller = distiller or assemble(settings, run, gather=settings.gather)
        sharding.shard_distiller(distiller, run.device)
    teacher_scores = _teacher_scores(run, out)
    if any(map(math.isnan, teacher_scores.values())):
        raise InputError(f"--teacher {settings.teacher}: its outputs are not finite")
    if teacher_scores:  # a cache may not have those of these rows
        run.display.say(f"teacher:  {format_scores(teacher_scores)}")
    selected = None
    if settings.teacher_layers == SELECT:
        selected = out.once("selected", lambda: select(settings, run))
    if distiller is None or selected:
        distiller = assemble(settings, run, selected, settings.gather)
    student = cast(PreTrainedModel, distiller.student)
    report: dict[str, Any] = {
        "fastkd": fastkd.__version__,
        "torch": torch.__version__,
        "rows": _counts(run),
        "parameters": {**run.size("parameters", count), "student": count(student)},
        "bytes": {**run.size("bytes", num_bytes), "student": num_bytes(student)},
        "layers": student.config.num_hidden_layers,
        "teacher_layers": _initial_layers(settings, run, selected),
        "task": run.task.name(),
        **run.task.report(),
        "paired": run.corpus.train.paired,
        "teacher": teacher_scores,
    }
    options = _callback_options(settings, out, run, out.student, student, report)
    began = time.perf_counter()
    history = run.distil(distiller, settings.method, settings.on_policy, **options)
    training = history[-1]["seconds"]
    before = max(0.0, training - (time.perf_counter() - began))  # --resume
    run.display.say("scoring and timing the best student ...")
    report.update(_evaluate_best(settings, out, run, student, report))
    # The report in the saved student is the published one. The first process reads it, before it
    # moves the directory.
    return {
        **processes.on_first_process(lambda: read_json(out.student / MANIFEST)),
        **report,
        "compared_layers": distiller.method.teacher_layers,
        "complete": True,
        "history": history,
        "seconds": {"training": training, "total": before},
    }


def _evaluate_best(
    settings: Settings,
    out: RunDirectory,
    run: Run,
    student: PreTrainedModel,
    report: dict[str, Any],
) -> dict[str, Any]:
    """Sizes, test scores and seconds per batch of the best student, read from its files."""
    attention = attention_for(settings.method, settings.attention)  # the teacher is timed with it
    kind = type(lora.plain(sharding.without_shards(student)))
    best: Any = kind.from_pretrained(out.student, **attention)
    found: dict[str, Any] = {}
    for size, measure in (("parameters", count), ("bytes", num_bytes)):
        # Adapters are no longer beside the weights.
        found[size] = {**report[size], "student": measure(best)}
    if settings.fsdp:
        sharding.shard(best, run.device, learns=False)
    else:
        best.to(run.device)
    run.score_with_warnings(best, "student")
    if run.test_rows:
        both = {"teacher": run.teacher_model, "student": best}
        found["test"] = {
            name: run.score(model, run.test_rows) for name, model in both.items() if model
        }
    if settings.fsdp:  # no process runs it alone
        seconds = processes.all_gather(run.seconds_a_batch(best))[0]
    else:
        seconds = processes.on_first_process(lambda: run.seconds_a_batch(best))
    return {**found, "seconds_a_batch": seconds}


def _initial_layers(settings: Settings, run: Run, selected: list[int] | None) -> list[int] | None:
    """Teacher layers that the student was initialised from; None if it was not."""
    own = settings.student is not None or settings.student_weights == "random"
    if own or run.teacher_model is None:
        return None
    return selected or layers_of(settings, run.teacher)


def _teacher_scores(run: Run, out: RunDirectory) -> dict[str, float]:
    """The teacher's scores; those in a cache if it was scored on the same rows."""
    if run.teacher_model is not None:
        return run.score_with_warnings(run.teacher_model, "teacher")
    same = run.cached["fingerprints"].get(EVAL_ROWS) == out.identity["fingerprints"][EVAL_ROWS]
    for name, value in (("max_length", run.max_length), ("precision", out.settings.precision)):
        same = same and run.cached["settings"].get(name) == value
    return run.cached["teacher"] if same else {}


def _counts(run: Run) -> dict[str, int]:
    """Number of rows of each kind that is present."""
    counts = {
        "train": len(run.train_rows),
        "eval": sum(map(len, run.eval_rows.values())),
        "test": sum(map(len, run.test_rows.values())),
        "unlabelled": len(run.all_rows) - len(run.train_rows),
    }
    return {name: number for name, number in counts.items() if number}


def _callback_options(
    settings: Settings,
    out: RunDirectory,
    run: Run,
    target: Path,
    model: PreTrainedModel,
    report: dict[str, Any],
) -> dict[str, Any]:
    """Fields of `CallbackConfig` that save the best ``model`` to ``target``, with checkpoints."""
    checkpoints = Checkpoints(
        out.work / CHECKPOINTS[target.name],
        {"run": out.identity["run"]},
        settings.checkpoint_every,
        settings.resume,
    )

    def clear_damage() -> None:
        why = find_damage(target) if target.exists() else None
        if why:
            run.display.say(f"{target} is damaged ({why}); its training starts again")
            discard(target)
            checkpoints.clear()

    processes.on_first_process(clear_damage)

    def save_best(entry: dict[str, Any], history: list[dict]) -> None:
        found = {"complete": False, "student": entry["scores"], "best": entry, "history": history}
        full = {**out.identity, **report, **found}
        whole = sharding.whole(model)
        processes.on_first_process(lambda: save_model(target, whole, run.tokenizer, full, run.task))

    trackers = tuple(filter(None, (settings.report_to or "").split(",")))
    return {
        "save_best": save_best,
        "checkpoints": checkpoints,
        "trackers": trackers,
        "log_directory": settings.out / "logs" / target.name,
    }


def _is_complete(directory: Path) -> bool:
    """Whether ``directory`` holds a complete, intact model."""
    report = read_manifest(directory)
    return bool(report and report.get("complete")) and find_damage(directory) is None


def save_model(
    target: Path,
    model: PreTrainedModel,
    tokenizer: Any,
    report: dict[str, Any],
    task: Task | None = None,
) -> None:
    """Save model, tokenizer, report and the task's own files to ``target``, atomically."""

    def write(directory: Path) -> dict[str, Any]:
        lora.save(model, directory)
        tokenizer.save_pretrained(directory)
        if task is not None:
            task.save(directory, model.config)
        return report

    replace_directory(target, write)
