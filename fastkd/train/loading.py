"""What a training reads: rows with their task, tokenizers, and the order of the classes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from fastkd.lm.vocabulary_match import Side, VocabularyMatch
from fastkd.models.batch import split_inputs
from fastkd.train import data as rows_of_source
from fastkd.train import models, tasks
from fastkd.train.arrow_rows import TEACHER_PREFIX, Encoded, Rows
from fastkd.train.config import AUTO, MAX_LENGTH, Config
from fastkd.train.data import Encoder
from fastkd.train.errors import InputError
from fastkd.train.generation import MAX_NEW_TOKENS, Generation
from fastkd.train.options import as_json, set_flags, without_weights
from fastkd.train.progress import Display
from fastkd.train.recipes import MAKES
from fastkd.train.row_teachers import ByRowCollator, teachers_of
from fastkd.train.saving import MANIFEST, STUDENT, TEACHERS_TOKENIZER, read_json
from fastkd.train.tasks.base import ClassTask, Corpus, Task
from fastkd.train.tasks.regression import Regression

# Rows whose tokens are counted for the report on two vocabularies.
MATCH_ROWS = 1024
TOKENS: dict[Side, str] = {"student": "input_ids", "teacher": "teacher_input_ids"}


@dataclass(frozen=True)
class Data:
    """Rows with their task, and the tokenizers of both models.

    ``max_length`` is that of the options, or of the teacher's cache.
    """

    corpus: Corpus
    tokenizer: Any
    max_length: int
    #: The teacher's tokenizer, where it isn't the student's.
    teacher_tokenizer: Any = None
    #: Tokens of both models' vocabularies, if predictions of tokens are compared.
    match: VocabularyMatch | None = None
    #: Names of the teachers of which each row has one; empty with one teacher.
    row_teachers: tuple[str, ...] = ()
    #: The report of `fastkd cache`, where its cache is the teacher.
    cached: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: Number of rows without a loss.
    unread: int = 0

    @property
    def task(self) -> Task:
        return self.corpus.task


@dataclass(frozen=True)
class Sets:
    """Encoded rows, and the collator of the training rows.

    ``train`` has the labelled rows, ``all`` the unlabelled ones too, and ``teacher`` those of the
    teacher's fine-tuning. ``evals`` and ``tests`` are by the suffix of a metric's name.
    """

    train: Encoded
    all: Encoded
    teacher: Encoded
    evals: dict[str, Encoded]
    tests: dict[str, Encoded]
    collate: Any
    #: Number of rows of each kind that is present.
    counts: Mapping[str, int]


def load_data(config: Config, display: Display) -> Data:
    """The rows and tokenizers that ``config`` names, with the classes in the teacher's order."""
    corpus = rows_of_source.load(config, finished_task(config))
    if config.labelled is not None:
        corpus = rows_of_source.few_labels(corpus, config.labelled, config.seed)
    unread = 0
    if config.method == "labels" and corpus.unlabelled is not None:
        unread = len(corpus.unlabelled)
        corpus = dataclasses.replace(corpus, unlabelled=None)
    if corpus.task.generation is not None:
        new = config.max_new_tokens or MAX_NEW_TOKENS
        chosen = Generation(new, config.sample, config.seed)
        task = dataclasses.replace(corpus.task, generation=chosen)
        corpus = dataclasses.replace(corpus, task=task)
    cached: Mapping[str, Any] = {}
    names = () if config.teachers is None else tuple(teachers_of(config.teachers))
    teachers, max_length, remote = None, config.max_length, config.trust_remote_code
    if config.teacher_cache is not None:
        folder = config.teacher_cache
        cached = cache_report(config, folder)
        read = functools.partial(models.tokenizer_of, "--teacher-cache", remote_code=remote)
        tokenizer, theirs = read(str(folder / STUDENT)), folder / TEACHERS_TOKENIZER
        teachers = read(str(theirs)) if theirs.is_dir() else None
        if max_length == MAX_LENGTH:
            max_length = cached["settings"]["max_length"]
    elif names or without_weights(config.teacher):
        tokenizer = models.load_tokenizer(config, "student")
    else:
        tokenizer, teachers = models.load_tokenizers(config, corpus, display)
    corpus = in_order_of_head(config, corpus)
    if corpus.reading:
        display.say(corpus.reading)
    match = None
    if teachers is not None:
        for flag in set_flags(config, "pack", "on_policy"):
            raise InputError(
                f"{flag}: the student has a tokenizer of its own, and the teacher reads other "
                "tokens; leave it out"
            )
        if corpus.task.two_tokenizers == "spans":
            match = VocabularyMatch.of(tokenizer, teachers)
    return Data(corpus, tokenizer, max_length, teachers, match, names, cached, unread)


def finished_task(config: Config) -> Task | None:
    """The task of the teacher's head if that is finished, else None."""
    kind = tasks.of_file(config.task, config.train)
    if not issubclass(kind, ClassTask | Regression) or config.finetune_teacher:
        return None
    cache = config.teacher_cache
    if without_weights(config.teacher) or config.teachers is not None:
        return None
    if cache is None:
        head = models.load("--teacher", str(config.teacher), AutoConfig, config.trust_remote_code)
    elif (cache / STUDENT).is_dir():
        head = cached_config(config, cache)
    else:
        return None  # `cache_report` says what is missing
    return kind.of(head) if _has_head(head, kind) else None


def _has_head(model: Any, kind: type[Task]) -> bool:
    """Whether a model's configuration names the class with the head of a task."""
    ending = kind.head.removeprefix("AutoModel")
    return any(name.endswith(ending) for name in model.architectures or ())


def in_order_of_head(config: Config, corpus: Corpus) -> Corpus:
    """``corpus`` with its classes in the order of the teachers' heads, and the model's fields."""
    order, remote = None, config.trust_remote_code
    #: Of each teacher with a configuration: its option, its name in errors, and its place.
    heads: list[tuple[str, str, str]] = []
    if config.teacher_cache is not None:
        option = "--teacher-cache"
        heads = [(option, f"{option} {config.teacher_cache}", str(config.teacher_cache / STUDENT))]
    elif config.teachers is not None:
        for who, entry in teachers_of(config.teachers).items():
            if "url" not in entry:
                cache = entry.get("cache")
                place = entry["model"] if cache is None else str(Path(cache) / STUDENT)
                heads.append(("--teachers", f"--teachers {who}", place))
    elif not without_weights(config.teacher):
        heads = [("--teacher", f"--teacher {config.teacher}", str(config.teacher))]
    for option, who, name in heads:
        task, fresh = corpus.task, bool(config.finetune_teacher) or config.command == "verify"
        model = models.load(option, name, AutoConfig, remote)
        fitting = task.num_labels in (None, model.num_labels)
        if config.teacher_cache is not None and not fitting:
            raise InputError(
                f"{who}: its teacher's head has {model.num_labels} outputs, the data needs "
                f"{task.num_labels}"
            )
        known = fitting and (not isinstance(task, ClassTask) or _has_head(model, type(task)))
        head = type(task).of(model) if known else None
        corpus = task.match(corpus, head, config.label_order, who, fresh)
        names = corpus.task.names
        if order not in (None, names):
            raise InputError(
                f"{who}: its classes are {', '.join(names or [])}, those of the first "
                f"{', '.join(order or [])}; all heads need one order"
            )
        order = names
    return corpus


def cached_config(config: Config, folder: Path) -> Any:
    """Configuration of the student in a cache, whose head is the teacher's."""
    return models.load(
        "--teacher-cache", str(folder / STUDENT), AutoConfig, config.trust_remote_code
    )


def cache_report(config: Config, folder: Path) -> Mapping[str, Any]:
    """The report of a cache; raises if an option of the student has another value than there."""
    option, about = "--teacher-cache", read_json(folder / MANIFEST)
    if not (folder / STUDENT).is_dir() or not about:
        raise InputError(f"{option} {folder}: no complete cache there; `fastkd cache` writes one")
    again = as_json(config)
    for flag in set_flags(config, *MAKES[1:]):
        name = flag.removeprefix("--").replace("-", "_")
        written = about["settings"][name]
        if again[name] != written:
            raise InputError(
                f"{option} {folder} was written with {flag} {written or 'left out'}, not "
                f"{again[name]}; leave {flag} out, or write another cache"
            )
    return about


def settled_method(config: Config, data: Data, display: Display, kept: str | None = None) -> Config:
    """``config`` with the method that auto takes, of which a line says why.

    ``kept``: the method of the run that is resumed.
    """
    if config.method != AUTO:
        return config
    own_tokens = data.teacher_tokenizer is not None
    found, why = (kept, "as the run began") if kept else models.choose(data.task, own_tokens)
    display.say(f"method {found} (--method {AUTO}): {why}")
    return dataclasses.replace(config, method=found)


def encode(config: Config, data: Data, max_length: int) -> Sets:
    """All rows in the tokens of both models."""
    corpus, encoded = data.corpus, encoder(data, max_length)
    train = training_encoder(config, data, max_length)
    rows = train(corpus.train)
    every = rows if corpus.unlabelled is None else rows.followed_by(train(corpus.unlabelled))
    teacher = rows if corpus.teacher_train is None else train(corpus.teacher_train)
    evals = {suffix: encoded(rows) for suffix, rows in corpus.evals.items()}
    tests = {suffix: encoded(rows) for suffix, rows in corpus.test.items()}
    counts = {
        "train": len(rows),
        "eval": sum(map(len, evals.values())),
        "test": sum(map(len, tests.values())),
        "unlabelled": len(every) - len(rows),
    }
    counts = {name: number for name, number in counts.items() if number}
    if data.teacher_tokenizer is not None:
        collate: Any = TwoTokenizerCollator(data.task, data.tokenizer, data.teacher_tokenizer)
    else:
        collate = data.task.collator(data.tokenizer)
        collate = ByRowCollator(collate) if data.row_teachers else collate
    return Sets(rows, every, teacher, evals, tests, collate, counts)


def training_encoder(config: Config, data: Data, max_length: int) -> Encoder:
    """The encoder of training rows."""
    task = data.task.for_packing() if config.pack else data.task
    return Encoder(data.tokenizer, max_length, task, data.teacher_tokenizer, data.row_teachers)


def encoder(data: Data, max_length: int) -> Callable[[Rows], Encoded]:
    """The encoder of evaluation rows; with two tokenizers it also encodes for the teacher."""
    student = Encoder(data.tokenizer, max_length, data.task)
    if data.teacher_tokenizer is None:
        return student
    teacher = Encoder(data.teacher_tokenizer, max_length, data.task)

    def encode(rows: Rows) -> Encoded:
        return dataclasses.replace(student(rows), teacher_encoded=teacher(rows))

    return encode


class TwoTokenizerCollator:
    """Collator of batches with two tokenizers: the teacher's tokens are in ``teacher_...``."""

    def __init__(self, task: Task, tokenizer: Any, teachers: Any):
        self.student, self.teacher = task.collator(tokenizer), task.collator(teachers)
        #: Side on which each model's spans are padded, as its tokens are.
        self.sides = {
            "student_spans": type(tokenizer).padding_side,
            "teacher_spans": type(teachers).padding_side,
        }

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        both = [split_inputs(row) for row in rows]
        batch = dict(self.student([own for own, _, _ in both]))
        theirs = self.teacher([theirs for _, theirs, _ in both])
        batch |= {f"{TEACHER_PREFIX}{name}": x for name, x in theirs.items()}
        spans = zip(*(spans for _, _, spans in both if spans is not None), strict=True)
        for (name, side), numbers in zip(self.sides.items(), spans, strict=False):
            batch[name] = torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(row) for row in numbers], True, -1, side
            )
        return batch


def say_match(match: VocabularyMatch, train: Encoded, display: Display) -> None:
    """Print a line on the tokens that two vocabularies have in common."""
    rows = train.__getitems__(range(min(len(train), MATCH_ROWS)))
    ids = {side: [i for row in rows for i in row[name]] for side, name in TOKENS.items()}
    of_text = " and ".join(
        f"{match.coverage(tokens, side):.1%} of the {side}'s" for side, tokens in ids.items()
    ).replace("%", " %")
    display.say(f"{match!r}, {of_text} tokens in {len(rows)} training rows")
