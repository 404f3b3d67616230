"""What a task is to the commands: rows, tokens, head, scores and predictions."""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fastkd._core.extras import require
from fastkd.distill.families import reads_whole_rows
from fastkd.train import files
from fastkd.train.arrow_rows import UNLABELLED, Encoded, Rows, file_fingerprint, label_json
from fastkd.train.classes import by_names, class_names, label_order, read_as_ids, whole_numbers
from fastkd.train.corpus import Corpus
from fastkd.train.errors import InputError, nearest
from fastkd.train.evaluation import accepted
from fastkd.train.glue import Glue
from fastkd.train.input_columns import Columns, field, holds_text, settle_columns, text_of, whole

LABEL, LABELS = "label", "labels"

Tokens = Mapping[str, list[Any]]  # columns of them
Collate = Callable[[list[dict[str, Any]]], Mapping[str, Any]]  # a batch of rows


class Given(NamedTuple):
    """What is known of labels beside the rows."""

    labels: str = "auto"  # --labels
    glue: Glue | None = None
    declared: list[str] | None = None  # class names that a data set on the hub declares


class Fitted(NamedTuple):
    """A task that has seen the rows, and these with labels as it has them."""

    task: "Task"
    train: Rows
    evals: dict[str, Rows]
    bare: Rows | None = None  # training rows without a label
    notes: tuple[str, ...] = ()  # lines to be read


@dataclass(frozen=True)
class Task:
    """How rows of a task are read, encoded and scored, and which head answers them.

    A subclass is one file of `fastkd.train.tasks`, or one's own as ``--task package.module:Class``.
    It sets the class attributes, and replaces the methods in which it differs from one text, or
    two, and one label. Fields of its instances hold what it learned from the rows or from a head,
    in types whose ``repr`` says all of them: it is part of the name of the encoded rows' file.

    Rows are read by `row` into columns (`features`) of an Arrow file, made into tokens by
    `encode`, which may give more rows or fewer, and into batches by `collator`. A model's `answer`
    to a batch is one object for each of its rows, small, since all are kept; `scores` gets them in
    the order of the encoded rows, all of them in every process.
    """

    #: Scores that it knows; those that are told unless asked, of which the first picks the best
    #: model; those of which less is better; and those that are told in percent.
    metrics: ClassVar[tuple[str, ...]]
    usual: ClassVar[tuple[str, ...]]
    smaller: ClassVar[frozenset[str]] = frozenset()
    percent: ClassVar[frozenset[str]] = frozenset()
    #: The class of transformers that loads such models, what its head is called in messages, and
    #: the pipeline that uses it.
    head: ClassVar[str] = "AutoModelForSequenceClassification"
    head_name: ClassVar[str] = "classification head"
    #: transformers' word for what such a head does, by which alone a model may be known.
    problem: ClassVar[str | None] = None
    #: What a model gives out, and so its export.
    outputs: ClassVar[tuple[str, ...]] = ("logits",)
    pipeline: ClassVar[str] = "text-classification"
    #: The library that loads a finished folder, as the hub calls it.
    library: ClassVar[str] = "transformers"
    #: Whether rows say what is right, so that a model learns without a teacher.
    supervised: ClassVar[bool] = True
    #: Whether a student may read the texts in other tokens than the teacher.
    two_tokenizers: ClassVar[bool] = False
    #: Kinds of files that no other task reads.
    suffixes: ClassVar[tuple[str, ...]] = ()
    #: Where the parts of a row stand unless somebody says otherwise.
    columns: ClassVar[Columns] = Columns()
    #: What is between the words of a list in a table's cell, where `row` reads them so; without it
    #: they are a list in JSON.
    between: ClassVar[str | None] = None

    @classmethod
    def name(cls) -> str:
        """What --task calls it."""
        package, _, module = cls.__module__.rpartition(".")
        if package == __package__:
            return module.replace("_", "-")
        return f"{cls.__module__}:{cls.__qualname__}"

    @classmethod
    def headless(cls) -> bool:
        """Whether its models end with hidden states."""
        return cls.head == "AutoModel"

    @classmethod
    def code(cls) -> list[str]:
        """Fingerprints of the files that say what it does."""
        own = (part for part in cls.__mro__ if part is not object)
        return [file_fingerprint(Path(inspect.getfile(part))) for part in own]

    # Rows

    @classmethod
    def check_file(cls, path: Path, option: str) -> None:
        """Raise unless ``path`` is a file, or a folder, that `records` can read."""
        files.check_file(path, option, cls.suffixes)

    @classmethod
    def records(cls, path: Path, header: bool, option: str, every: bool = False) -> files.Records:
        """Rows of a file as (number, dictionary by column); see `fastkd.train.files.records`."""
        return files.records(path, header, option, every)

    @classmethod
    def settle(cls, columns: Columns, record: dict[str, Any], source: str) -> Columns:
        """``columns`` as a first ``record`` has them; raises where one is missing."""
        return settle_columns(columns, record, source)

    @classmethod
    def features(cls, columns: Columns) -> dict[str, Any]:
        """Columns of the Arrow file but ``number``, with their types as `datasets` names them."""
        parts = {"text": True, "pair": columns.pair, LABEL: columns.label}
        return {name: "large_string" for name, there in parts.items() if there is not None}

    @classmethod
    def row(cls, record: dict[str, Any], columns: Columns, where: str) -> dict[str, Any]:
        """The `features` of a ``record``; a mistake is an InputError that begins ``where``."""
        row = {"text": text_of(record, columns.text, where)}
        if columns.pair is not None:
            row["pair"] = text_of(record, columns.pair, where)
        if columns.label is not None:
            value = field(record, columns.label, where)
            row[LABEL] = label_json(whole(value, columns.label, where))
        return row

    @classmethod
    def full(cls, row: Mapping[str, Any]) -> bool:
        """Whether a row as it was kept holds anything to read."""
        return holds_text(row["text"], row.get("pair", ""))

    @classmethod
    def lacking(cls, row: Mapping[str, Any], columns: Columns) -> str | None:
        """The column that a row which isn't `full` lacks."""
        return columns.text

    @classmethod
    def wanted(cls, columns: Columns) -> list[str]:
        """The columns of a data set on the hub that `row` reads."""
        return [name for name in (columns.text, columns.pair, columns.label) if name is not None]

    @classmethod
    def declared(cls, feature: Any) -> list[str] | None:
        """The class names that a data set on the hub declares for its column of labels."""
        return getattr(feature, "names", None)

    @classmethod
    def spelled(cls, label: Any, declared: list[str], where: str) -> Any:
        """A ``label`` of such a column by its name."""
        if label is None or label < 0:
            raise InputError(f"{where}: no label (a hidden test split?)")
        return declared[label]

    @classmethod
    def texts(cls, rows: Rows) -> list[str]:
        """A text for each row, as `fastkd analyze` lets models read it."""
        return rows.texts

    # Labels

    @classmethod
    def fit(cls, train: Rows, evals: dict[str, Rows], given: Given) -> Fitted:
        """The task of these rows; with labels in ``Rows.labels`` if they are a number a row."""
        return Fitted(cls(), train, evals)

    def unlabelled(self, rows: Rows) -> Rows:
        """``rows`` whose labels the losses leave out."""
        raise InputError(f"--unlabelled: the rows of --task {self.name()} have no labels")

    def facing(self, rows: Rows) -> "Task":
        """This task where ``rows`` are scored, which may decide on `chosen`."""
        return self

    def predicting(self) -> "Task":
        """This task where `predictions` are wanted, for which a row may be encoded otherwise."""
        return self

    def packing(self) -> "Task":
        """This task where rows to train on hold as many texts as there is room for: --pack."""
        raise InputError(f"--pack: the rows of --task {self.name()} stand alone")

    def bare(self, rows: Rows) -> Rows:
        """``rows`` of which only predictions are wanted, such as a batch can be made of."""
        return rows

    @classmethod
    def groups(cls, rows: Rows, glue: Glue | None = None) -> list[int] | None:
        """A class for each row as it was read, by which rows can be told apart; None: none."""
        return None

    def strata(self, rows: Rows) -> Sequence[int]:
        """Groups of which a draw of few rows takes alike many."""
        return [0] * len(rows)

    def describe(self, corpus: Corpus) -> Iterator[str]:
        """What the labels are, and what looks like a mistake in them: lines to be read."""
        return iter(())

    # The head

    @property
    def names(self) -> list[str] | None:
        """The classes of the head, if it has classes."""
        return None

    @property
    def num_labels(self) -> int | None:
        """Outputs of the head, where the task decides on them."""
        return None if self.names is None else len(self.names)

    @classmethod
    def of(cls, config: Any, report: Mapping[str, Any] | None = None) -> "Task":
        """The task that a finished model with this ``config`` answers; ``report``: its marker."""
        return cls()

    @classmethod
    def check_model(cls, config: Any, who: str) -> None:
        """Raise if a loaded model with this ``config``, called ``who``, can't be for this task."""
        if cls.head == "AutoModelForCausalLM" and reads_whole_rows(config):
            raise InputError(
                f"{who}: a {config.model_type} model reads rows from both sides, and sees the "
                "token that it is to predict; take a decoder, or --task masked-lm"
            )

    def fits(self, config: Any) -> bool:
        """Whether the head of such a model has the outputs that this task needs."""
        return self.num_labels in (None, config.num_labels)

    def fit_config(self, config: Any) -> None:
        """Make ``config`` one for this task, whatever it was trained on before."""
        if self.names is not None:
            config.num_labels = len(self.names)
            config.id2label = dict(enumerate(self.names))
            config.label2id = {label: i for i, label in enumerate(self.names)}

    def match(
        self, corpus: Corpus, head: "Task | None", asked: str | None, who: str, fresh: bool = False
    ) -> Corpus:
        """``corpus`` with its classes in the order of those of ``who``'s ``head``.

        What is ``asked`` with --label-order goes before it. A ``head`` of None, or one that learns
        these rows ``fresh``, takes any order.
        """
        if asked is not None:
            raise InputError("--label-order is about classes, and the labels are numbers")
        return corpus

    def in_order_of(self, names: list[str] | None, corpus: Corpus) -> Corpus:
        """``corpus`` with the classes in the order of ``names``, if these are its classes."""
        return corpus

    def read_labels(self, rows: Rows, asked: str | None) -> tuple[Rows, tuple[str, ...]]:
        """Rows to evaluate a finished model on, and lines to be read; ``asked``: --label-order."""
        if asked is not None:
            raise InputError(
                f"--label-order {asked}: must name the data's label for each class of the model, "
                "and it has none"
            )
        return rows, ()

    # Tokens

    def room(self, tokenizer: Any, rows: Rows) -> tuple[int, str]:
        """Tokens that are added to each row, and what to: ("a text")."""
        added = tokenizer.num_special_tokens_to_add(pair=rows.paired)
        return added, "a pair" if rows.paired else "a text"

    def encode(self, batch: dict[str, list], tokenizer: Any, max_length: int) -> Tokens:
        """Tokens of a batch of rows, by column; "where" each stands begins a message.

        Columns of `inputs` go to the model; the others stay in ``Encoded.beside``. Where a row
        isn't one row of tokens, ``number`` says of which row each is. ``labels`` are among them
        unless they are in ``Rows.labels``.
        """
        return tokenizer(batch["text"], batch.get("pair"), truncation=True, max_length=max_length)

    #: Columns of `encode` that only `scores` and `predictions` read.
    beside: ClassVar[tuple[str, ...]] = ()

    def collator(self, tokenizer: Any) -> Collate:
        """Makes a batch of encoded rows, always the same one of the same rows.

        One with a method ``drawn`` is another in each epoch of training: that which this gives for
        (seed, epoch). What it makes of a row is not to depend on the rows beside it.
        """
        transformers: Any = require("transformers", "train")
        return OnOwnSide(transformers.DataCollatorWithPadding(tokenizer), tokenizer)

    def samples(self, tokenizer: Any, longest: int) -> list[dict[str, torch.Tensor]]:
        """Two batches of other sizes, by which an export is made and compared."""
        texts = (["a short text", "another text, which is a little longer"], ["one more"] * 3)
        short = {"truncation": True, "max_length": longest, "return_tensors": "pt"}
        return [dict(tokenizer(some, padding=True, **short)) for some in texts]

    def compared(self, teacher: Any, student: Any) -> dict[str, Any]:
        """Options of methods that have them, by models' configurations; --set goes before."""
        return {}

    # Scores and predictions

    def give(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        """What has the `outputs` as its attributes."""
        return model(**batch)

    def answer(self, model: nn.Module, batch: dict[str, torch.Tensor], tokenizer: Any) -> Any:
        """What ``model`` answers to each row: here its logits, as an array (rows, labels).

        It is called in eval mode without gradients, in the precision of the run.
        """
        return logits(model, batch).float().cpu().numpy()

    def drawn(
        self, model: nn.Module, batch: Mapping[str, torch.Tensor], tokenizer: Any, seed: int
    ) -> list[dict[str, Any]]:
        """The rows of ``batch`` with what ``model`` draws in the place of answers: --on-policy.

        ``seed`` and a row are to say what is drawn for it, whatever rows stand beside it.
        """
        raise InputError(f"--on-policy: the models of --task {self.name()} write nothing")

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        """The named scores; NaN if the answers are not finite."""
        raise NotImplementedError

    def finite(self, answers: Any) -> bool:
        """Whether no answer is NaN or infinite."""
        return not isinstance(answers, np.ndarray) or bool(np.isfinite(answers).all())

    def beside_teacher(self, metrics: Sequence[str]) -> bool:
        """Whether these scores read what the teacher answers, ``examples.taught``."""
        return False

    def doubt(self, answers: Any, examples: Encoded) -> str | None:
        """Why these answers are worth nothing, as the end of a sentence."""
        return None

    def predictions(self, answers: Any, examples: Encoded, tokenizer: Any) -> list[dict[str, Any]]:
        """The columns that `fastkd predict` writes for each row that was asked."""
        raise NotImplementedError

    def shown(self, rows: Rows) -> Iterator[dict[str, Any]]:
        """The columns of each row before those of its answer."""
        texts = ("text", *("pair",) * rows.paired)
        return (dict(zip(texts, row, strict=True)) for row in rows.columns(*texts))

    def marks(self, answers: Any, examples: Encoded) -> list[Any]:
        """The answers, a number or word each, that a study keeps to compare students."""
        return []

    def truths(self, examples: Encoded) -> list[Any]:
        """What these should have been."""
        return []

    def chosen(self, wanted: str | None, glue: Glue | None = None) -> tuple[str, ...]:
        """The scores to report, the one that picks the best first."""
        usual = self.usual if glue is None else glue.metrics
        if wanted is None:
            return usual
        if wanted not in self.metrics:
            raise InputError(
                f"--metric {wanted!r} does not score {self.name()}; {nearest(wanted, self.metrics)}"
            )
        return (wanted, *(m for m in usual if m != wanted))

    # What is written of it

    def save(self, directory: Path, config: Any) -> None:
        """Write what stands beside a model with this ``config`` and its tokenizer."""

    def report(self) -> dict[str, Any]:
        """What the marker of a student says of it."""
        return {"labels": self.names}

    @classmethod
    def about(cls, report: Mapping[str, Any]) -> str:
        """A sentence on the labels for the model card, from the marker."""
        names = report.get("labels")
        return f"Classes: {listed(names)}." if names else ""

    @classmethod
    def usage(cls, report: Mapping[str, Any], directory: str) -> str:
        """Lines of Python for the model card."""
        shown = f"print(classify({example_of(report)}))"
        return cls.piped("classify", f'"{directory}"', shown)

    @classmethod
    def piped(cls, name: str, arguments: str, shown: str) -> str:
        """`usage` of a pipeline with these ``arguments``, called ``name`` where it is ``shown``."""
        made = f'{name} = pipeline("{cls.pipeline}", {arguments})'
        return f"from transformers import pipeline\n\n{made}\n{shown}"

    @classmethod
    def loaded(cls, directory: str) -> str:
        """How `usage` begins without a pipeline: ``tokenizer`` and ``model``."""
        return (
            f"from transformers import {cls.head}, AutoTokenizer\n\n"
            f'tokenizer = AutoTokenizer.from_pretrained("{directory}")\n'
            f'model = {cls.head}.from_pretrained("{directory}")\n'
        )


@dataclass(frozen=True)
class ClassTask(Task):
    """A task with a head of named classes, whose order is that of a finished head."""

    classes: tuple[str, ...] = ()
    #: Whether that order is the data's own: whole numbers, or what a data set declares.
    numbered: bool = True

    @property
    def names(self) -> list[str]:
        return list(self.classes)

    def bare(self, rows: Rows) -> Rows:
        return self.unlabelled(rows)

    @classmethod
    def of(cls, config: Any, report: Mapping[str, Any] | None = None) -> Task:
        return cls(tuple(class_names(config)))

    def match(
        self, corpus: Corpus, head: Task | None, asked: str | None, who: str, fresh: bool = False
    ) -> Corpus:
        names = self.names
        if asked is not None:
            return self.in_order_of(label_order(asked, names, "the data"), corpus)
        if head is None or head.names is None:
            return corpus
        order = by_names(names, head.names)
        if order is not None or fresh:
            return self.in_order_of(order, corpus)
        elsewhere = any(
            name in head.names and head.names.index(name) != i for i, name in enumerate(names)
        )
        if not self.numbered or (elsewhere and not whole_numbers(names)):
            raise InputError(
                f"{who}: its head names its classes {', '.join(head.names)}, the data "
                f"{', '.join(names)}; pass --label-order with the data's classes in the head's "
                "order"
            )
        return replace(corpus, reading=read_as_ids(dict(enumerate(names)), head.names, who))

    def in_order_of(self, names: list[str] | None, corpus: Corpus) -> Corpus:
        old = self.names
        if names is None or names == old or sorted(names) != sorted(old):
            return corpus
        new = [names.index(name) for name in old]

        def renumber(rows: Rows) -> Rows:
            return rows if rows.labels is None else replace(rows, labels=np.array(new)[rows.labels])

        return replace(
            corpus,
            train=renumber(corpus.train),
            evals={k: renumber(rows) for k, rows in corpus.evals.items()},
            test=corpus.test and renumber(corpus.test),
            task=self.renumbered(tuple(names), new),
        )

    def renumbered(self, classes: tuple[str, ...], new: list[int]) -> Task:
        """This task with these classes; class i now is ``new[i]``."""
        return replace(self, classes=classes)


@dataclass(frozen=True)
class ListedTask(ClassTask):
    """A task with any number of classes a row, in the column `LABELS`."""

    #: What a class is called in messages.
    called: ClassVar[str] = "label"

    @classmethod
    def declared(cls, feature: Any) -> list[str] | None:
        return getattr(getattr(feature, "feature", None), "names", None)

    @classmethod
    def spelled(cls, label: Any, declared: list[str], where: str) -> list[str]:
        return [super(ListedTask, cls).spelled(i, declared, where) for i in label]

    @classmethod
    def fit(cls, train: Rows, evals: dict[str, Rows], given: Given) -> Fitted:
        names = given.declared or sorted({x for (row,) in train.columns(LABELS) for x in row})
        numbered = whole_numbers(names)
        if numbered and given.declared is None:
            names.sort(key=int)
        if len(names) < 2:
            found = f"the only {cls.called} is {names[0]!r}" if names else "no row has a label"
            raise InputError(f"{train.source}: {found}, and --task {cls.name()} needs two")
        task = cls(tuple(names), given.declared is not None or numbered)
        for rows in evals.values():
            task.check_known(rows, "does not occur in the training rows")
        return Fitted(task, train, evals)

    def check_known(self, rows: Rows, unknown: str) -> None:
        """Raise for the first label of the rows that is no class."""
        for number, row in rows.columns("number", LABELS):
            for name in row:
                if name not in self.classes:
                    raise InputError(
                        f"{rows.source}, row {number}: {self.called} {name!r:.60} {unknown}; "
                        f"{nearest(name, self.classes)}"
                    )

    def unlabelled(self, rows: Rows) -> Rows:
        return rows.without(LABELS)

    def read_labels(self, rows: Rows, asked: str | None) -> tuple[Rows, tuple[str, ...]]:
        self.check_known(rows, "is none of the model's")
        return super().read_labels(rows, asked)


@dataclass(frozen=True)
class OnOwnSide:
    """``collate`` with padding where the tokenizer's family has it, whatever its files say.

    They may say "left" for generating, by which a model whose positions are counted from the first
    column would read a short text as one that begins late.
    """

    collate: Collate
    tokenizer: Any

    def __call__(self, rows: list[dict[str, Any]]) -> Mapping[str, Any]:
        with on_own_side(self.tokenizer):
            return self.collate(rows)


@contextlib.contextmanager
def on_own_side(tokenizer: Any) -> Iterator[None]:
    """Padding where the tokenizer's family has it."""
    given = tokenizer.padding_side
    tokenizer.padding_side = type(tokenizer).padding_side
    try:
        yield
    finally:
        tokenizer.padding_side = given


def listed(names: Iterable[str]) -> str:
    """Names in a sentence of Markdown, whose marks they may hold."""
    return ", ".join(re.sub(r"([\\`*_\[\]<>|~&$])", r"\\\1", " ".join(x.split())) for x in names)


def example_of(report: Mapping[str, Any]) -> str:
    """A text for `Task.usage`, or two."""
    return '{"text": "...", "text_pair": "..."}' if report.get("paired") else '"..."'


def probabilities(names: Iterable[Any], values: torch.Tensor) -> dict[str, float]:
    """A column of predictions for each of the ``names``."""
    return {f"P({name})": round(float(x), 6) for name, x in zip(names, values, strict=True)}


def sums_of_losses(logits: torch.Tensor, targets: torch.Tensor) -> list[tuple[float, int]]:
    """The sum of -log p of each row's ``targets`` (B, N), and how many count."""
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="none", ignore_index=UNLABELLED
    )
    sums = losses.view_as(targets).double().sum(-1).tolist()
    return list(zip(sums, (targets != UNLABELLED).sum(-1).tolist(), strict=True))


def logits(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Those of ``model`` to a batch whose labels it doesn't see."""
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    return model(**accepted(model, inputs)).logits
