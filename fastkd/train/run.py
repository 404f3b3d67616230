"""Rows and models of a run, their scores, and the training of teacher and student."""

import contextlib
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, set_seed

from fastkd.distill.by_row import ByRow
from fastkd.distill.cache import TeacherCache
from fastkd.distill.distiller import Distiller
from fastkd.distill.labelled_order import LabelledOrder
from fastkd.distill.method import Method
from fastkd.distill.methods import Labels
from fastkd.integrations.served_teacher import ServedTeacher, ServerError
from fastkd.lm.vocabulary_match import Side, VocabularyMatch
from fastkd.models.inputs import accepted
from fastkd.train import lora, processes, sharding
from fastkd.train.arrow_rows import Encoded, Rows
from fastkd.train.config import TrainingConfig
from fastkd.train.encoding import Encoder
from fastkd.train.errors import InputError, Interrupted, TrainingFailed
from fastkd.train.evaluation import finite, predict, score
from fastkd.train.models import fitting_length, headless, layers_of, make_method, make_student
from fastkd.train.progress import Display
from fastkd.train.row_teachers import ByRowCollator
from fastkd.train.run_directory import Checkpoints
from fastkd.train.saving import replace_directory
from fastkd.train.settings import SELECT, Pairing
from fastkd.train.sharded_trainers import ShardedTrainer
from fastkd.train.signals import receiving_signals
from fastkd.train.tasks.base import Corpus, Task
from fastkd.train.trainers import OnPolicy, StepTrainer, TwoTokenizerCollator
from fastkd.train.training import (
    TrainingCallback,
    arguments_of,
    ended_state,
    history_of,
    logging_to,
)

# Rows whose tokens are counted for the report on two vocabularies.
MATCH_ROWS = 1024
TOKENS: dict[Side, str] = {"student": "input_ids", "teacher": "teacher_input_ids"}
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
        self.corpus, self.tokenizer = corpus, tokenizer
        self.teacher: Any = teacher
        self.training_config, self.display = training_config, display
        if corpus.reading:
            display.say(corpus.reading)

        self.task = corpus.task
        self.pack, self._asked_length = pack, max_length
        #: Longest text in tokens; the default is lowered where a model reads less.
        self.max_length = max_length
        #: Answers of the model that was scored last, by the suffix of their rows.
        self.answers: dict[str, Any] = {}
        #: Why the answers of a model look useless, by the model's name.
        self.warnings: dict[str, str] = {}
        for model in self.live_teachers:
            self._fit_length("teacher", model)
        self._encode()
        self.collate = self.task.collator(tokenizer)
        if self.by_row:
            self.collate = ByRowCollator(self.collate)
        #: Tokens of both models' vocabularies, if predictions of tokens are compared.
        self.match: VocabularyMatch | None = None
        if teacher_tokenizer is not None:
            self.collate = TwoTokenizerCollator(self.task, tokenizer, teacher_tokenizer)
            if self.task.two_tokenizers == "spans":
                self.match = VocabularyMatch.of(tokenizer, teacher_tokenizer)
                self._report_match(self.match)

    def _report_match(self, match: VocabularyMatch) -> None:
        """Print how many tokens of both vocabularies, and of a text, match."""
        rows = self.train_rows.__getitems__(range(min(len(self.train_rows), MATCH_ROWS)))
        ids = {side: [i for row in rows for i in row[name]] for side, name in TOKENS.items()}
        of_text = " and ".join(
            f"{match.coverage(tokens, side):.1%} of the {side}'s" for side, tokens in ids.items()
        ).replace("%", " %")
        self.display.say(f"{match!r}, {of_text} tokens in {len(rows)} training rows")

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
        elif self.by_row:
            learned = Encoder(self.tokenizer, max_length, self.task, by_row=self.by_row)
        elif self.teacher_tokenizer is not None:
            learned = Encoder(self.tokenizer, max_length, self.task, self.teacher_tokenizer)
        self.train_rows = learned(corpus.train)
        #: Rows of the teacher's fine-tuning.
        self.teacher_rows = self.train_rows
        if corpus.teacher_train is not None:
            self.teacher_rows = learned(corpus.teacher_train)
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
    def live_teachers(self) -> list[Any]:
        """The teachers that run here."""
        if isinstance(self.teacher, ByRow):
            return [*self.teacher.live.values()]
        return [] if self.teacher_model is None else [self.teacher]

    @property
    def by_row(self) -> tuple[str, ...]:
        """Names of the teachers of which each row has one; empty with one teacher."""
        return self.teacher.names if isinstance(self.teacher, ByRow) else ()

    def rows_by_teacher(self) -> dict[str, dict[str, Encoded]]:
        """For each teacher that has any, its evaluation rows by the suffix of a metric's name."""
        encoded, found = self._encoder(self.max_length), dict[str, dict[str, Encoded]]()
        if not self.by_row:
            return found
        for suffix, rows in self.corpus.evals.items():
            names = list(rows.column("teacher"))
            for name in self.by_row:
                own = [i for i, other in enumerate(names) if other == name]
                if own:
                    found.setdefault(name, {})[suffix] = encoded(rows.select(own))
        return found

    @property
    def device(self) -> torch.device:
        return self.training_config.device

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

    def seconds_a_batch(self, student: nn.Module, rounds: int = 5) -> dict[str, float]:
        """Seconds for a forward pass of up to 32 rows: medians over interleaved repeats."""
        rows, tokenizer = self.eval_rows[""], self.teacher_tokenizer
        theirs, collate = rows.teacher_encoded, self.task.collator(self.tokenizer)
        read = {"student": next(rows.batches(collate, 32, device=self.device))}
        read["teacher"] = read["student"]
        if theirs is not None:
            collate = self.task.collator(tokenizer)
            read["teacher"] = next(theirs.batches(collate, 32, device=self.device))
        if not getattr(student.config, "is_encoder_decoder", False):  # its decoder reads them
            read = {
                who: {k: v for k, v in batch.items() if k != "labels"}
                for who, batch in read.items()
            }
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

    def train_teacher(
        self,
        training_config: TrainingConfig,
        title: str = "teacher",
        shard: bool = False,
        gather: bool = False,
        **options: Any,
    ) -> list[dict]:
        """Train the teacher on the labels, in place; ``options`` are those of `train`."""
        teacher = self.teacher.requires_grad_(True)
        distiller = Distiller(cast(Any, _Untaught(teacher)), teacher, Labels(), gather=gather)
        if shard:
            sharding.shard(teacher, self.device)
        return self.train(distiller, title, self.teacher_rows, training_config, **options)

    def train(
        self,
        distiller: Distiller,
        title: str,
        rows: Encoded | None = None,
        training_config: TrainingConfig | None = None,
        on_policy: float = 0.0,
        checkpoints: Checkpoints | None = None,
        log_directory: Path | None = None,
        unread: int = 0,
        **options: Any,
    ) -> list[dict]:
        """Train the student of ``distiller``; returns its evaluations.

        They follow each epoch. Where the method leaves out ``unread`` unlabelled rows, they are as
        far apart as those of a method that reads them. With ``checkpoints`` the training can be
        cut off at any time and continued to the same result. In a fraction ``on_policy`` of the
        steps the student trains on text that it generates. ``options`` are those of
        `TrainingCallback`.
        """
        rows = self.all_rows if rows is None else rows  # rows may be an empty set
        config = training_config or self.training_config
        kind = ShardedTrainer if sharding.sharded(distiller) else StepTrainer
        if kind is StepTrainer:
            distiller.to(self.device)
        order = LabelledOrder(rows.labelled, config.batch_size, config.labelled_share)
        total, in_epoch = config.steps(order.rows)
        labelled = np.concatenate([rows.labelled, np.zeros(unread, bool)])
        everything = LabelledOrder(labelled, config.batch_size, config.labelled_share)
        between = in_epoch * max(1, round(config.steps(everything.rows)[1] / in_epoch))
        watcher = TrainingCallback(self, distiller.student, title, between, checkpoints, **options)
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: watcher.track.stop())
            if checkpoints is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            else:
                folder = checkpoints.incomplete
                stack.enter_context(receiving_signals(watcher.request_stop))
            stack.enter_context(logging_to(log_directory))
            own = None
            if on_policy:
                assert self.task.generated is not None
                generated = functools.partial(self.task.generated, tokenizer=self.tokenizer)
                own = OnPolicy(on_policy, generated)
            trainer = kind(
                model=distiller,
                args=arguments_of(config, folder, total, checkpoints is not None),
                train_dataset=rows,
                # A cache holds the outputs of undrawn rows: the partial hides `for_epoch`.
                data_collator=functools.partial(self.collate) if self.cached else self.collate,
                order=order,
                say=self.display.say,
                accumulate=config.accumulate,
                on_policy=own,
            )
            trainer.add_callback(watcher)  # after the method has prepared itself
            for chatty in (PrinterCallback, ProgressCallback):
                trainer.remove_callback(chatty)
            last = None
            if checkpoints and checkpoints.resume:
                last = processes.on_first_process(lambda: checkpoints.newest(self.display.say))
            # Dropout differs between the processes.
            set_seed((config.seed + processes.rank()) % 2**32)
            ended = ended_state(last)
            if ended is None:
                try:
                    trainer.train(resume_from_checkpoint=str(last) if last else None)
                except ServerError as error:
                    raise TrainingFailed(str(error)) from error
            else:
                trainer.state = ended
                trainer._load_from_checkpoint(str(last))
            watcher.sync_signals()
            if watcher.signum is not None:  # received in the last step
                raise Interrupted(trainer.state.global_step, watcher.signum)
        return history_of(trainer.state.log_history)


class _Untaught(nn.Module):
    """Stand-in for the teacher of a model that learns from labels alone."""

    def __init__(self, model: nn.Module):
        super().__init__()
        vars(self)["model"] = model  # not a submodule, whose parameters would be frozen

    def get_base_model(self) -> nn.Module:
        """The model whose sizes the method reads; see ``peft.PeftModel``."""
        base: nn.Module = vars(self)["model"]
        return base


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
    settings: Pairing,
    run: Run,
    selected: list[int] | None = None,
    gather: bool = False,
    outputs: TeacherCache | None = None,
) -> Distiller:
    """A new student and method, the same for the same options.

    ``outputs`` of the teacher take its place in the training.
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
    # Adapters and projections are drawn alike for a student from a cache and from its teacher.
    set_seed(settings.seed)
    if settings.lora:
        student = lora.adapted(student, settings.lora, run.task.head, settings.student)
    task, teacher_answers = run.task, run.teacher_model
    configs = (student if teacher_answers is None else teacher_answers).config, student.config
    method = make_method(
        settings.method, settings.options, settings.preset, selected, headless(task),
        {**task.method_options(*configs), **_text_options(own, run)},
    )  # fmt: skip
    check_classes(settings.method, method, run.task)
    if method.merges_spans and run.match is None:
        raise InputError(
            f"--method {settings.method}: compares language models of two tokenizers; pass a "
            "--student with its own, for --task causal-lm or chat"
        )
    try:
        distiller = Distiller(
            run.teacher if outputs is None else outputs,
            student,
            method,
            gather=gather,
            tokenizers=run.match or _one_tokenizer(run, student),
            unmatched=cast(Any, settings.unmatched if run.match else "renormalise"),
        )
    except (TypeError, ValueError) as error:
        eager = "; pass --attention eager" if "attn_implementation" in str(error) else ""
        message = f"--method {settings.method} with this student: {error}{eager}"
        raise InputError(message) from error
    wanted = method.layer_request("student")  # a teacher's layers may be chosen later
    inside = wanted.attentions or wanted.qkv
    if own and (
        inside or (run.match is None and wanted.layers and method.teacher_pool == "tokens")
    ):
        others = "soft_targets, knn, lrkd and embeddings compare texts"
        if run.match is not None:
            others = "take a method that compares hidden states or soft targets"
        raise InputError(
            f"--method {settings.method} compares tokens, and the student has others than the "
            f"teacher; {others}"
        )
    if settings.unmatched != "renormalise" and run.match is None:
        raise InputError(
            f"--unmatched {settings.unmatched}: teacher and student have one tokenizer; leave it "
            "out"
        )
    return distiller


def check_classes(name: str, method: Method, task: Task | type[Task]) -> None:
    """Raise if a method compares rows of one class, and the rows of ``task`` have none."""
    if method.by_class and not task.by_class:
        raise InputError(
            f"--method {name}: compares rows of one class, but rows of --task {task.name()} have "
            "no class; take another --method"
        )


def _text_options(own: bool, run: Run) -> dict[str, Any]:
    """Default options of methods where texts are compared, whose tokens two tokenizers made."""
    return {"pool": "cls"} if own and run.match is None and not headless(run.task) else {}


def _one_tokenizer(run: Run, student: PreTrainedModel) -> Any:
    """The tokenizer of language models whose heads are padded to unlike sizes, else None."""
    if run.task.two_tokenizers != "spans" or run.teacher_model is None or run.teacher_tokenizer:
        return None
    same = student.config.vocab_size == run.teacher.config.vocab_size
    return None if same else run.tokenizer


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
