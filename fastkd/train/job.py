"""The job of a training: its options, rows and models, and the steps from loading to saving.

`fastkd.train.run_directory` describes the content of the output directory.
"""

import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, set_seed

import fastkd
from fastkd._core.extras import require
from fastkd.distill.by_row import ByRow
from fastkd.distill.cache import TeacherCache, teacher_request
from fastkd.distill.distiller import Distiller
from fastkd.distill.labelled_order import LabelledOrder
from fastkd.distill.method import Method
from fastkd.distill.methods import Labels
from fastkd.distributed import world_size
from fastkd.integrations.served_teacher import ServedTeacher, ServerError
from fastkd.lm.vocabulary_match import Side, VocabularyMatch
from fastkd.models.inputs import accepted
from fastkd.train import auto_method, data, lora, processes, recipes, sharding
from fastkd.train.arrow_rows import Encoded, Rows, fingerprint
from fastkd.train.card import CARD, write_card
from fastkd.train.config import TrainingConfig
from fastkd.train.encoding import Encoder
from fastkd.train.errors import InputError, Interrupted, TrainingFailed
from fastkd.train.evaluation import finite, predict, score
from fastkd.train.generation import MAX_NEW_TOKENS, Generation
from fastkd.train.hub import is_served
from fastkd.train.models import (
    attention_for,
    finished_task,
    fitting_length,
    headless,
    layers_of,
    load_cached_teacher,
    load_teacher,
    load_tokenizers,
    make_method,
    make_student,
    row_teachers,
    served_teacher,
)
from fastkd.train.progress import Display, format_scores
from fastkd.train.row_teachers import ByRowCollator
from fastkd.train.run_directory import (
    CHECKPOINTS,
    EVAL_ROWS,
    Checkpoints,
    RunDirectory,
    is_complete,
    model_fingerprint,
    rows_of,
)
from fastkd.train.saving import (
    MANIFEST,
    discard,
    find_damage,
    read_json,
    replace_directory,
    save_tokenizer,
    saving,
    update_manifest,
)
from fastkd.train.settings import MAX_LENGTH, SELECT
from fastkd.train.signals import receiving_signals
from fastkd.train.tasks.base import Task, reorder_classes
from fastkd.train.trainers import ShardedTrainer, StepTrainer, TwoTokenizerCollator
from fastkd.train.training import (
    TrainingCallback,
    arguments_of,
    ended_state,
    history_of,
    logging_to,
)

filelock: Any = require("filelock", "train")

# Rows whose tokens are counted for the report on two vocabularies.
MATCH_ROWS = 1024
TOKENS: dict[Side, str] = {"student": "input_ids", "teacher": "teacher_input_ids"}
# Rows that --teacher-layers select reads, as many as Trainer's prepare_batches of them.
SELECTION_ROWS = 2048


class Job:
    """Options, rows, tokenizers and models of a training, and its output directory.

    ``training_config`` has the rows of a batch over all processes. Without a directory ``out``
    (`fastkd cache`, `fastkd verify`) nothing is trained.
    """

    teacher: Any
    tokenizer: Any
    #: The teacher's tokenizer, where it isn't the student's.
    teacher_tokenizer: Any = None
    #: Tokens of both models' vocabularies, if predictions of tokens are compared.
    match: VocabularyMatch | None = None

    def __init__(
        self,
        settings: Any,
        training_config: TrainingConfig,
        display: Display,
        out: RunDirectory | None = None,
    ):
        self.settings = settings
        self.training_config, self.display, self._out = training_config, display, out
        self.pack = getattr(settings, "pack", False)
        #: The report of `fastkd cache`, where its cache is the teacher.
        self.cached: Mapping[str, Any] = {}
        #: Answers of the model that was scored last, by the suffix of their rows.
        self.answers: dict[str, Any] = {}
        #: Why the answers of a model look useless, by the model's name.
        self.warnings: dict[str, str] = {}
        #: Evaluation rows and scores of each of several teachers.
        self.by_teacher: dict[str, dict[str, Any]] = {}
        corpus = data.load(settings, finished_task(settings))
        if getattr(settings, "labelled", None) is not None:
            corpus = data.few_labels(corpus, settings.labelled, settings.seed)
        #: Number of rows without a loss.
        self.unread = 0
        if settings.method == "labels" and corpus.unlabelled is not None:
            self.unread = len(corpus.unlabelled)
            corpus = dataclasses.replace(corpus, unlabelled=None)
        if corpus.task.generation is not None and hasattr(settings, "max_new_tokens"):
            new = settings.max_new_tokens or MAX_NEW_TOKENS
            chosen = Generation(new, settings.sample, settings.seed)
            task = dataclasses.replace(corpus.task, generation=chosen)
            corpus = dataclasses.replace(corpus, task=task)
        self.corpus = corpus

    @property
    def out(self) -> RunDirectory:
        """The output directory of a training."""
        assert self._out is not None
        return self._out

    @property
    def task(self) -> Task:
        return self.corpus.task

    @property
    def device(self) -> torch.device:
        return self.training_config.device

    @property
    def teacher_model(self) -> Any:
        """The teacher; None if it is a cache, runs in a server, or each row has its own."""
        elsewhere = isinstance(self.teacher, ServedTeacher | ByRow)
        return None if self.cached or elsewhere else self.teacher

    @property
    def served(self) -> list[ServedTeacher]:
        """The teachers that run in a server."""
        return [x for x in self.teacher.modules() if isinstance(x, ServedTeacher)]

    @property
    def row_teachers(self) -> tuple[str, ...]:
        """Names of the teachers of which each row has one; empty with one teacher."""
        return self.teacher.names if isinstance(self.teacher, ByRow) else ()

    # Rows and models

    def load(self, fresh_head: bool = False) -> dict[str, Any]:
        """Load teacher and tokenizers, settle the method, and encode the rows.

        A teacher with ``fresh_head`` may have a random head. Returns rows, tokenizers and models on
        which the result depends, by their names in messages.
        """
        settings, corpus = self.settings, self.corpus
        self.max_length = settings.max_length
        if getattr(settings, "teacher_cache", None) is not None:
            self.teacher, self.cached, self.tokenizer, self.teacher_tokenizer, corpus = (
                load_cached_teacher(settings, settings.teacher_cache, corpus)
            )
            if self.max_length == MAX_LENGTH:
                self.max_length = self.cached["settings"]["max_length"]
            inputs = {"teacher cache": self.teacher}
        elif getattr(settings, "teachers", None) is not None:
            self.teacher, self.tokenizer, corpus = row_teachers(settings, corpus)
            each = zip(self.teacher.names, self.teacher.models, strict=True)
            inputs = {f"teacher {name}": model for name, model in each}
        elif is_served(settings.teacher) and hasattr(settings, "teacher_model"):
            self.teacher, self.tokenizer = served_teacher(settings)
            inputs = {"served teacher": self.teacher}
        else:
            self.tokenizer, self.teacher_tokenizer = load_tokenizers(settings, corpus, self.display)
            fresh = fresh_head or bool(getattr(settings, "finetune_teacher", 0))
            tuned = fresh and self._out is not None and is_complete(self.out.teacher)
            name = str(self.out.teacher) if tuned else settings.teacher
            read = self.teacher_tokenizer or self.tokenizer
            self.teacher, corpus = load_teacher(settings, name, corpus, read, fresh)
            inputs = {} if tuned else {"teacher weights": self.teacher}
        if self.teacher_tokenizer is not None:
            self._check_two_tokenizers()
            inputs["teacher's tokenizer files"] = self.teacher_tokenizer
        inputs["tokenizer files"] = self.tokenizer
        self.corpus, self._given_length = corpus, self.max_length
        began = None if self._out is None else self.out.manifest.get("method")
        own = self.teacher_tokenizer is not None
        self.settings, why = auto_method.settled(settings, self.task, own, began)
        if why:
            self.display.say(why)
        if corpus.reading:
            self.display.say(corpus.reading)
        live = [] if self.teacher_model is None else [self.teacher]
        for model in self.teacher.live.values() if self.row_teachers else live:
            self._fit_length("teacher", model)
        self._encode()
        self._make_collator()
        return {**rows_of(corpus), **inputs}

    def _check_two_tokenizers(self) -> None:
        """Raise for options that need one tokenizer."""
        for name, remedy in (
            ("pack", "leave it out"),
            ("on_policy", "leave it out"),
            ("finetune_teacher", "train the teacher in another run"),
        ):
            if getattr(self.settings, name, False):
                raise InputError(
                    f"--{name.replace('_', '-')}: the student has a tokenizer of its own, and the "
                    f"teacher reads other tokens; {remedy}"
                )

    def _fit_length(self, who: str, model: Any) -> bool:
        """Lower a default maximum length to what a model reads; returns whether it was lowered."""
        read = self.teacher_tokenizer if who == "teacher" else None
        length = fitting_length(self._given_length, read or self.tokenizer, model, who)
        lower = length < self.max_length
        if lower:
            self.max_length = length
            self.display.say(f"--max-length {length}: the {who} reads no more tokens")
        return lower

    def _encode(self) -> None:
        """Encode all rows."""
        corpus, encoded = self.corpus, self._encoder()
        task = self.task.for_packing() if self.pack else self.task
        more = self.teacher_tokenizer, self.row_teachers
        train = Encoder(self.tokenizer, self.max_length, task, *more)
        self.train_rows = train(corpus.train)
        #: Rows of the teacher's fine-tuning.
        self.teacher_rows = self.train_rows
        if corpus.teacher_train is not None:
            self.teacher_rows = train(corpus.teacher_train)
        #: Training rows of the student, including unlabelled ones.
        self.all_rows = self.train_rows
        if corpus.unlabelled is not None:
            self.all_rows = self.train_rows.followed_by(train(corpus.unlabelled))
        self.eval_rows = {suffix: encoded(rows) for suffix, rows in corpus.evals.items()}
        self.test_rows = {suffix: encoded(rows) for suffix, rows in corpus.test.items()}

    def _encoder(self) -> Callable[[Rows], Encoded]:
        """The encoder of rows; with two tokenizers it also encodes for the teacher."""
        student = Encoder(self.tokenizer, self.max_length, self.task)
        if self.teacher_tokenizer is None:
            return student
        teacher = Encoder(self.teacher_tokenizer, self.max_length, self.task)

        def encode(rows: Rows) -> Encoded:
            encoded = student(rows)
            encoded.teacher_encoded = teacher(rows)
            return encoded

        return encode

    def _make_collator(self) -> None:
        """Set the collator of training rows, and the tokens that both vocabularies have."""
        self.collate = self.task.collator(self.tokenizer)
        if self.row_teachers:
            self.collate = ByRowCollator(self.collate)
        if self.teacher_tokenizer is None:
            return
        both = self.tokenizer, self.teacher_tokenizer
        self.collate = TwoTokenizerCollator(self.task, *both)
        if self.task.two_tokenizers == "spans":
            self.match = VocabularyMatch.of(*both)
            rows = self.train_rows.__getitems__(range(min(len(self.train_rows), MATCH_ROWS)))
            ids = {side: [i for row in rows for i in row[name]] for side, name in TOKENS.items()}
            of_text = " and ".join(
                f"{self.match.coverage(tokens, side):.1%} of the {side}'s"
                for side, tokens in ids.items()
            ).replace("%", " %")
            self.display.say(f"{self.match!r}, {of_text} tokens in {len(rows)} training rows")

    def counts(self) -> dict[str, int]:
        """Number of rows of each kind that is present."""
        counts = {
            "train": len(self.train_rows),
            "eval": sum(map(len, self.eval_rows.values())),
            "test": sum(map(len, self.test_rows.values())),
            "unlabelled": len(self.all_rows) - len(self.train_rows),
        }
        return {name: number for name, number in counts.items() if number}

    # Student and method

    def select(self) -> list[int] | None:
        """Teacher layers chosen by --teacher-layers select, on the first process; else None."""
        if self.settings.teacher_layers != SELECT or self.cached:
            return None
        rows, rng = self.train_rows, np.random.default_rng(self.settings.seed)
        batches = rows.batches(
            self.collate, 32, rng.permutation(len(rows))[:SELECTION_ROWS].tolist()
        )
        layers = processes.on_first_process(lambda: layers_of(self.settings, self.teacher, batches))
        self.display.say(f"teacher layers that differ most: {', '.join(map(str, layers))}")
        return layers

    def assemble(
        self, selected: list[int] | None = None, outputs: TeacherCache | None = None
    ) -> Distiller:
        """A new student and method, the same for the same options.

        ``outputs`` of the teacher take its place in the training.
        ``selected`` layers (--teacher-layers select, or those of a cache) form the student, and the
        method compares them unless --set names others. Before the selection, uniform layers are
        used.
        """
        settings, task, match = self.settings, self.task, self.match
        selected = selected or self.cached.get("selected")
        set_seed(settings.seed)
        # Weights stay in float32: 16 bits would round steps away. --precision sets the arithmetic.
        cache = self.teacher.path if self.cached else None
        own = self.teacher_tokenizer is not None
        student = make_student(
            settings, self.teacher, self.tokenizer, task, selected, cache, own
        ).float()
        if self._fit_length("student", student):
            self._encode()
        # Adapters and projections are drawn alike for a student from a cache and from its teacher.
        set_seed(settings.seed)
        if settings.lora:
            student = lora.adapted(student, settings.lora, task.head, settings.student)
        configs = [x.config for x in (self.teacher_model, student) if x is not None]
        defaults = task.method_options(configs[0], configs[-1])
        texts = own and match is None  # their tokens are of two tokenizers
        if texts and not headless(task):
            defaults = {**defaults, "pool": "cls"}
        method = make_method(
            settings.method, settings.options, settings.preset, selected, headless(task), defaults
        )
        check_classes(settings.method, method, task)
        if method.merges_spans and match is None:
            raise InputError(
                f"--method {settings.method}: compares language models of two tokenizers; pass a "
                "--student with its own, for --task causal-lm or chat"
            )
        try:
            distiller = Distiller(
                self.teacher if outputs is None else outputs,
                student,
                method,
                gather=getattr(settings, "gather", False),
                tokenizers=match or self._one_tokenizer(student),
                unmatched=settings.unmatched if match else "renormalise",
            )
        except (TypeError, ValueError) as error:
            eager = "; pass --attention eager" if "attn_implementation" in str(error) else ""
            message = f"--method {settings.method} with this student: {error}{eager}"
            raise InputError(message) from error
        request = method.layer_request("student")  # a teacher's layers may be chosen later
        by_token = texts and request.layers and method.teacher_pool == "tokens"
        if own and (request.attentions or request.qkv or by_token):
            others = "soft_targets, knn, lrkd and embeddings compare texts"
            if match is not None:
                others = "take a method that compares hidden states or soft targets"
            raise InputError(
                f"--method {settings.method} compares tokens, and the student has others than the "
                f"teacher; {others}"
            )
        if settings.unmatched != "renormalise" and match is None:
            raise InputError(
                f"--unmatched {settings.unmatched}: teacher and student have one tokenizer; leave "
                "it out"
            )
        return distiller

    def _one_tokenizer(self, student: PreTrainedModel) -> Any:
        """The tokenizer of language models whose heads are padded to unlike sizes, else None."""
        one = self.teacher_model is not None and self.teacher_tokenizer is None
        if self.task.two_tokenizers != "spans" or not one:
            return None
        same = student.config.vocab_size == self.teacher.config.vocab_size
        return None if same else self.tokenizer

    # Scores

    def score(
        self, model: nn.Module, sets: Mapping[str, Encoded] | None = None, who: str = ""
    ) -> dict[str, float]:
        """All metrics of ``model`` on all ``sets`` of rows; by default the evaluation rows.

        For a model called ``who`` it prints a warning if the answers look useless.
        """
        task, metrics, scores = self.task, self.corpus.metrics, dict[str, float]()
        is_teacher = model is self.teacher_model
        for suffix, rows in (self.eval_rows if sets is None else sets).items():
            read, tokenizer = rows, self.tokenizer
            if is_teacher and self.teacher_tokenizer is not None:
                read, tokenizer = cast(Encoded, rows.teacher_encoded), self.teacher_tokenizer
            answers = predict(model, read, task, tokenizer, self.training_config)
            if is_teacher and not task.teacher_metrics.isdisjoint(metrics):
                rows.teacher_answers = answers
            self.answers[suffix] = answers
            why = task.sanity_warning(answers, rows) if who and finite(answers) else None
            if why:
                where = f"{len(rows)} evaluation rows{f' ({suffix})' if suffix else ''}"
                self.display.say(f"warning: the {who}'s answers to the {where} {why}")
                self.warnings[who] = why
            found = score(task, metrics, answers, rows)
            scores.update({f"{k}_{suffix}" if suffix else k: v for k, v in found.items()})
        return scores

    def _rows_by_teacher(self) -> dict[str, dict[str, Encoded]]:
        """For each teacher that has any, its evaluation rows by the suffix of a metric's name."""
        found = dict[str, dict[str, Encoded]]()
        for suffix, rows in self.corpus.evals.items() if self.row_teachers else ():
            names = list(rows.column("teacher"))
            for name in self.row_teachers:
                own = [i for i, other in enumerate(names) if other == name]
                if own:
                    found.setdefault(name, {})[suffix] = self._encoder()(rows.select(own))
        return found

    def _score_teacher(self) -> dict[str, float]:
        """The teacher's scores; those in a cache if it was scored on the same rows."""
        if self.teacher_model is not None:
            scores = self.score(self.teacher_model, who="teacher")
        elif not self.cached:  # a server has no scores
            scores = {}
        else:
            prints, before = self.cached["fingerprints"], self.cached["settings"]
            same = prints.get(EVAL_ROWS) == self.out.manifest["fingerprints"][EVAL_ROWS]
            same = same and before.get("max_length") == self.max_length
            same = same and before.get("precision") == self.settings.precision
            # `fastkd cache` scores greedy text.
            same = same and self.task.generation in (None, Generation(seed=self.settings.seed))
            scores = self.cached["teacher"] if same else {}
        if any(map(math.isnan, scores.values())):
            raise InputError(f"--teacher {self.settings.teacher}: its outputs are not finite")
        if scores:
            self.display.say(f"teacher:  {format_scores(scores)}")
        return scores

    def _score_row_teachers(self) -> None:
        """Score each teacher on its evaluation rows, with --teachers."""
        live = self.teacher.live if self.row_teachers else {}
        for name, sets in self._rows_by_teacher().items():
            found = self.by_teacher[name] = {"rows": sum(map(len, sets.values()))}
            if name in live:
                scores = self.score(live[name], sets, who=f"teacher {name}")
                if any(map(math.isnan, scores.values())):
                    raise InputError(f"--teachers {name}: its outputs are not finite")
                found["teacher"] = scores
                self.display.say(f"teacher {name} on its rows:  {format_scores(scores)}")

    def _score_best(self, student: PreTrainedModel, measure: "Measure | None") -> dict[str, Any]:
        """Sizes, test scores and seconds per batch of the best student, read from its files."""
        best = self._best(self.out.student, student)
        models = {"teacher": self.teacher_model, "student": best}
        sizes: dict[str, Mapping[str, Any]] = {
            who: sizes_of(model) for who, model in models.items() if model is not None
        }
        if "parameters" in self.cached:  # not of a server's cache
            sizes = {"teacher": self.cached, **sizes}
        found: dict[str, Any] = {
            name: {who: each[name] for who, each in sizes.items()}
            for name in ("parameters", "bytes")
        }
        if self.settings.shard:
            sharding.shard(best, self.device, trained=False)
        else:
            best.to(self.device)
        self.score(best, who="student")
        measured = None if measure is None else measure(self, best)
        for name, sets in self._rows_by_teacher().items():
            scores = self.by_teacher[name]["student"] = self.score(best, sets)
            self.display.say(f"student on rows of {name}:  {format_scores(scores)}")
        if self.test_rows:
            found["test"] = {
                who: self.score(model, self.test_rows) for who, model in models.items() if model
            }
        if measured is not None:
            return {**found, "seconds_a_batch": {}, **measured}
        if self.settings.shard:  # no process runs it alone
            seconds = processes.all_gather(self.seconds_a_batch(best))[0]
        else:
            seconds = processes.on_first_process(lambda: self.seconds_a_batch(best))
        return {**found, "seconds_a_batch": seconds}

    def seconds_a_batch(self, student: nn.Module, rounds: int = 5) -> dict[str, float]:
        """Seconds for a forward pass of up to 32 rows: medians over interleaved repeats."""
        rows, tokenizers = self.eval_rows[""], {"student": self.tokenizer}
        models: dict[str, nn.Module] = {"student": student.eval()}
        if self.teacher_model is not None:
            models["teacher"] = self.teacher_model.eval()
            tokenizers["teacher"] = self.teacher_tokenizer or self.tokenizer
        inputs, seconds = {}, dict[str, list[float]]()
        for who, tokenizer in tokenizers.items():
            read = rows if who == "student" else rows.teacher_encoded or rows
            collate = self.task.collator(tokenizer)
            inputs[who] = next(read.batches(collate, 32, device=self.device))
            if not getattr(student.config, "is_encoder_decoder", False):  # its decoder reads them
                inputs[who].pop("labels", None)
        for _ in range(1 + rounds):
            for who, model in models.items():
                self._synchronize()
                start = time.perf_counter()
                with torch.no_grad():
                    model(**accepted(model, inputs[who]))
                self._synchronize()
                seconds.setdefault(who, []).append(time.perf_counter() - start)
        return {who: statistics.median(times[1:]) for who, times in seconds.items()}

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # Training

    def begin(self) -> Distiller:
        """Load and check rows and models, and start the run in the output directory."""
        out, display = self.out, self.display
        with processes.errors_on_all():
            inputs = self.load()
            # Errors of student and method are raised now, not after the teacher's fine-tuning.
            distiller = self.assemble()
            self._check(distiller)
        settings, student = self.settings, cast(PreTrainedModel, distiller.student)
        #: The paper's recipe and what deviates from it, with --preset paper.
        self.recipe = recipes.compared(settings, distiller.method)
        for line in recipes.lines(self.recipe):
            display.say(line)
        if settings.student is not None:
            inputs["student weights"] = student
        size = student.get_memory_footprint(return_buffers=False)
        tuned = self.teacher.get_memory_footprint(False) if settings.finetune_teacher else 0
        processes.on_first_process(lambda: out.check_room(tuned, size))
        out.begin(inputs)
        out.once("method", lambda: settings.method)
        counts = ", ".join(f"{number} {name} rows" for name, number in self.counts().items())
        display.say(f"{counts}, device {self.device.type}")
        if max(world_size(), out.processes) > 1:
            begun = out.processes
            before = f", as in the {begun} that began" if begun != world_size() else ""
            rows = self.training_config.batch_size * settings.gradient_accumulation_steps
            display.say(f"{world_size()} processes: {rows} rows a step in all{before}")
        if not settings.shard:
            nn.Module.to(self.teacher, self.device)
        return distiller

    def check_done(self) -> None:
        """Check that the complete run had the same rows."""
        self.out.begin(rows_of(reorder_classes(self.out.done.get("labels"), self.corpus)))
        self.display.say(f"{self.settings.out}: this run is already complete")

    def _check(self, distiller: Distiller) -> None:
        """Raise unless a cache holds every training row, and an on-policy student has a loss."""
        if self.cached:
            self._check_cached(distiller)
        if not self.settings.on_policy:
            return
        if self.task.generated is None:
            raise InputError(
                f"--on-policy: models of --task {self.task.name()} do not generate text; leave it "
                "out"
            )
        for progress in (0.0, 1.0):
            weights = distiller.method.weights(progress)
            if not any(weight for name, weight in weights.items() if name != "task"):
                raise InputError(
                    f"--on-policy: {type(distiller.method).__name__} trains on labels alone, and "
                    "generated text has none; take another --method"
                )

    def _check_cached(self, distiller: Distiller) -> None:
        """Raise unless the cache holds every training row; the processes share the check."""
        rows, cache, size = self.all_rows, self.teacher, 256
        rank, ranks = processes.rank(), world_size()
        batches = rows.batches(self.collate, size, rank=rank, ranks=ranks)
        for number, batch in enumerate(batches):
            if all(key in cache for key in distiller.sample_keys(batch)):
                continue
            for i in range(len(batch["input_ids"])):
                row = {name: x[i : i + 1] for name, x in batch.items()}
                if not all(key in cache for key in distiller.sample_keys(row)):
                    source, number = rows.source_of((number * ranks + rank) * size + i)
                    raise InputError(
                        f"--teacher-cache {cache.path}: {source}, row {number} is not in it; write "
                        "it from the same rows with the same --max-length"
                    )

    def finetune_teacher(self) -> None:
        """Fine-tune the teacher on the labels to its best evaluation, saved as OUT/teacher."""
        settings, target = self.settings, self.out.teacher
        if processes.on_first_process(lambda: is_complete(target)):
            return
        config = dataclasses.replace(
            self.training_config,
            num_train_epochs=settings.finetune_teacher,
            training_steps=None,
            max_steps=-1,
            learning_rate=settings.teacher_learning_rate,
        )
        teacher = self.teacher.requires_grad_(True)
        untaught = cast(Any, _Untaught(teacher))
        if settings.teacher_lora:
            set_seed(settings.seed)
            adapters, head = settings.teacher_lora, self.task.head
            teacher = lora.adapted(teacher, adapters, head, settings.teacher, "--teacher-lora")
            self.teacher = teacher
        distiller = Distiller(untaught, teacher, Labels(), gather=settings.gather)
        if settings.shard:
            sharding.shard(teacher, self.device)
        history = self.train(distiller, target, self.teacher_rows, config, "teacher", {})
        name = teacher.config.name_or_path
        self.teacher = self._best(target, teacher)
        # The student's adapters name the teacher as it was given, not the folder of a running run.
        self.teacher.config.name_or_path = name
        if not settings.shard:  # which initialises the student from a whole teacher first
            self.teacher.to(self.device)

        def finish() -> None:
            report = {**read_json(target / MANIFEST), "complete": True, "history": history}
            with saving(target):
                update_manifest(target, report)
                Checkpoints(self.out.work / CHECKPOINTS["teacher"]).clear()

        processes.on_first_process(finish)

    def train_student(
        self,
        distiller: Distiller | None,
        measure: "Measure | None" = None,
        cache: Path | None = None,
    ) -> dict[str, Any]:
        """Train the student and save its best state as OUT/student; returns the run's report.

        The ``distiller`` is None if the teacher was fine-tuned.
        """
        settings, out = self.settings, self.out
        if settings.shard:
            distiller = distiller or self.assemble()
            sharding.shard_distiller(distiller, self.device)
        teacher_scores = self._score_teacher()
        self._score_row_teachers()
        selected = None
        if settings.teacher_layers == SELECT:
            selected = out.once("selected", self.select)
        if distiller is None or selected:
            distiller = self.assemble(selected)
        if cache is not None and self._can_cache(distiller):
            distiller = self.assemble(selected, self._cache(distiller, cache))
        student = cast(PreTrainedModel, distiller.student)
        report: dict[str, Any] = {
            "fastkd": fastkd.__version__,
            "torch": torch.__version__,
            "rows": self.counts(),
            "layers": student.config.num_hidden_layers,
            "teacher_layers": self._initial_layers(selected),
            "task": self.task.name(),
            **self.task.report(),
            "paired": self.corpus.train.paired,
            "teacher": teacher_scores,
            **({"teachers": self.by_teacher} if self.by_teacher else {}),
            **({"recipe": self.recipe} if self.recipe else {}),
        }
        began = time.perf_counter()
        history = self.train(
            distiller, out.student, self.all_rows, self.training_config, settings.method, report
        )
        if self.served:
            report["served_teacher"] = ", ".join(x.throughput() for x in self.served)
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
        settings, method = self.settings, distiller.method
        alone = world_size() == 1 and not settings.shard and not settings.on_policy
        draws = hasattr(self.collate, "for_epoch")  # inputs of its own in each epoch
        reads = method.uses_teacher and method.prepared and not teacher_request(method)["inside"]
        return alone and not draws and reads and isinstance(self.teacher_model, nn.Module)

    def _cache(self, distiller: Distiller, folder: Path) -> TeacherCache:
        """The teacher's outputs on all training rows; only missing ones are computed."""
        request = json.dumps(teacher_request(distiller.method))
        parts = (model_fingerprint(self.teacher), request, self.settings.precision)
        path = folder / fingerprint(map(str.encode, parts))
        path.mkdir(parents=True, exist_ok=True)
        order = self.all_rows.by_length
        rows = self.all_rows.batches(self.collate, 32, order, device=self.device)
        with filelock.FileLock(path.with_suffix(".lock")), self.training_config.autocast():
            return distiller.cache_teacher(rows, path)

    def _initial_layers(self, selected: list[int] | None) -> list[int] | None:
        """Teacher layers that the student was initialised from; None if it was not."""
        own = self.settings.student is not None or self.settings.student_weights == "random"
        if own or self.teacher_model is None:
            return None
        return selected or layers_of(self.settings, self.teacher)

    def train(
        self,
        distiller: Distiller,
        target: Path,
        rows: Encoded,
        config: TrainingConfig,
        title: str,
        report: Mapping[str, Any],
    ) -> list[dict]:
        """Train the student of ``distiller`` on ``rows``; returns its evaluations.

        They follow each epoch. Where the method leaves out unlabelled rows, they are as far apart
        as those of a method that reads them.
        The best state is saved to ``target``, with ``report`` in its manifest. The training can be
        cut off at any time and continued to the same result.
        """
        settings, out = self.settings, self.out
        checkpoints = Checkpoints(
            out.work / CHECKPOINTS[target.name],
            out.manifest["run"],
            settings.checkpoint_every,
            settings.resume,
        )

        def clear_damage() -> None:
            why = find_damage(target) if target.exists() else None
            if why:
                self.display.say(f"{target} is damaged ({why}); its training starts again")
                discard(target)
                checkpoints.clear()

        def save_best(entry: dict[str, Any], history: list[dict]) -> None:
            found = {
                "complete": False, "student": entry["scores"], "best": entry, "history": history
            }  # fmt: skip
            manifest, whole = {**out.manifest, **report, **found}, sharding.whole(distiller.student)
            processes.on_first_process(
                lambda: save_model(target, whole, self.tokenizer, manifest, self.task)
            )

        processes.on_first_process(clear_damage)
        kind = ShardedTrainer if sharding.sharded(distiller) else StepTrainer
        if kind is StepTrainer:
            distiller.to(self.device)
        order = LabelledOrder(rows.labelled, config.batch_size, config.labelled_share)
        total, in_epoch = config.steps(order.rows)
        unread = np.zeros(self.unread if target == out.student else 0, bool)
        labelled = np.concatenate([rows.labelled, unread])
        everything = LabelledOrder(labelled, config.batch_size, config.labelled_share)
        between = in_epoch * max(1, round(config.steps(everything.rows)[1] / in_epoch))
        callback = TrainingCallback(self, distiller.student, title, between, checkpoints, save_best)
        generated = self.task.generated
        # Trackers read their directory when the trainer is made.
        logs = settings.out / "logs" / target.name
        with receiving_signals(callback.request_stop), logging_to(logs):
            trainer = kind(
                model=distiller,
                args=arguments_of(config, checkpoints.incomplete, total),
                train_dataset=rows,
                # A cache holds the outputs of undrawn rows: the partial hides `for_epoch`.
                data_collator=functools.partial(self.collate) if self.cached else self.collate,
                order=order,
                say=self.display.say,
                on_policy=settings.on_policy if target == out.student else 0.0,
                generated=generated and functools.partial(generated, tokenizer=self.tokenizer),
            )
            trainer.add_callback(callback)  # after the method has prepared itself
            for chatty in (PrinterCallback, ProgressCallback):
                trainer.remove_callback(chatty)
            try:
                self._run(trainer, checkpoints, config.seed)
                callback.sync_signals()
            finally:
                callback.track.stop()
        if callback.signum is not None:  # received in the last step
            raise Interrupted(trainer.state.global_step, callback.signum)
        return history_of(trainer.state.log_history)

    def _run(self, trainer: StepTrainer, checkpoints: Checkpoints, seed: int) -> None:
        """Run a trainer from the last checkpoint, if there is one to resume from."""
        last = None
        if checkpoints.resume:
            last = processes.on_first_process(lambda: checkpoints.newest(self.display.say))
        # Dropout differs between the processes.
        set_seed((seed + processes.rank()) % 2**32)
        ended = ended_state(last)
        if ended is not None:
            trainer.state = ended
            trainer._load_from_checkpoint(str(last))
            return
        try:
            trainer.train(resume_from_checkpoint=str(last) if last else None)
        except ServerError as error:
            raise TrainingFailed(str(error)) from error

    def _best(self, target: Path, model: nn.Module) -> Any:
        """The saved best model, of the class of ``model`` without adapters and shards."""
        kind = type(lora.plain(sharding.without_shards(model)))
        # Teacher and student are timed with the same attention.
        attention = attention_for(self.settings.method, self.settings.attention)
        return kind.from_pretrained(target, **attention)

    def finish(self, report: dict[str, Any]) -> None:
        """Complete the student's directory and move the results to --out."""
        student = self.out.student

        def publish() -> None:
            with saving(self.settings.out):
                write_card(student, report)
                update_manifest(student, report, CARD)
                self.out.finish()

        processes.on_first_process(publish)
        self.out.report_moved_files(self.display)
        self.display.event("complete", **{k: report[k] for k in ("teacher", "student", "seconds")})


#: Measurements of a run's best student, by name.
Measure = Callable[[Job, PreTrainedModel], dict[str, Any]]


class _Untaught(nn.Module):
    """Stand-in for the teacher of a model that learns from labels alone."""

    def __init__(self, model: nn.Module):
        super().__init__()
        vars(self)["model"] = model  # not a submodule, whose parameters would be frozen

    def get_base_model(self) -> nn.Module:
        """The model whose sizes the method reads; see ``peft.PeftModel``."""
        base: nn.Module = vars(self)["model"]
        return base


def sizes_of(model: PreTrainedModel) -> dict[str, int]:
    """Parameters and bytes of a model."""
    memory = model.get_memory_footprint(return_buffers=False)
    return {"parameters": model.num_parameters(), "bytes": memory}


def check_classes(name: str, method: Method, task: Task | type[Task]) -> None:
    """Raise if a method compares rows of one class, and the rows of ``task`` have none."""
    if method.by_class and not task.by_class:
        raise InputError(
            f"--method {name}: compares rows of one class, but rows of --task {task.name()} have "
            "no class; take another --method"
        )


def save_model(
    target: Path, model: PreTrainedModel, tokenizer: Any, report: dict[str, Any], task: Task
) -> None:
    """Save model, tokenizer, report and the task's own files to ``target``, atomically."""

    def write(directory: Path) -> dict[str, Any]:
        lora.save(model, directory)
        save_tokenizer(tokenizer, directory)
        task.save(directory, model.config)
        return report

    replace_directory(target, write)
