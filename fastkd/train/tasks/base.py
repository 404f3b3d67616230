"""Base classes of tasks: how rows are read, encoded, scored and predicted."""

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


class LabelInfo(NamedTuple):
    """Information on labels that the rows themselves do not hold."""

    labels: str = "auto"  # --labels
    glue: Glue | None = None
    declared_classes: list[str] | None = None  # class names that a data set on the hub declares


class FittedTask(NamedTuple):
    """A task fitted to the rows, and the rows with labels in its encoding."""

    task: "Task"
    train: Rows
    evals: dict[str, Rows]
    without_labels: Rows | None = None  # training rows that have no label
    notes: tuple[str, ...] = ()  # lines to print


@dataclass(frozen=True)
class Task:
    """How rows are read, encoded and scored, and which head predicts.

    A subclass is a file of `fastkd.train.tasks`, or a user's class named as
    ``--task package.module:Class``. It sets the class attributes and overrides the methods where it
    differs from one or two texts with one label. Instance fields hold what `fit` or `of` read from
    the rows or a head. Their ``repr`` must show their whole value, since it is part of the file
    name of the encoded rows.

    `row` reads a record into the columns (`features`) of an Arrow file. `encode` turns rows into
    tokens and may return more or fewer rows. `collator` builds batches. `answer` returns one small
    object for each row of a batch, because all of them are kept in memory; `scores` receives them
    in the order of the encoded rows, complete in every process.
    """

    #: All supported metrics; those reported by default, of which the first selects the best
    #: checkpoint; metrics to minimise; metrics that already are percentages.
    metrics: ClassVar[tuple[str, ...]]
    default_metrics: ClassVar[tuple[str, ...]]
    lower_is_better: ClassVar[frozenset[str]] = frozenset()
    percent: ClassVar[frozenset[str]] = frozenset()
    #: The Auto class of transformers that loads the model, and the head's name in messages.
    head: ClassVar[str] = "AutoModelForSequenceClassification"
    head_name: ClassVar[str] = "classification head"
    #: ``config.problem_type`` of transformers that identifies a model of this task.
    problem: ClassVar[str | None] = None
    #: Names of the model's outputs, and of the outputs of its ONNX export.
    outputs: ClassVar[tuple[str, ...]] = ("logits",)
    pipeline: ClassVar[str] = "text-classification"
    #: The library that loads a saved student, by its name on the hub.
    library: ClassVar[str] = "transformers"
    #: Whether rows have labels, so that a model can be trained without a teacher.
    supervised: ClassVar[bool] = True
    #: Whether the student may use a tokenizer other than the teacher's.
    two_tokenizers: ClassVar[bool] = False
    #: File suffixes that only this task reads.
    suffixes: ClassVar[tuple[str, ...]] = ()
    #: Default column names.
    columns: ClassVar[Columns] = Columns()
    #: Separator of the items of a list in a table's cell; None: the cell holds a JSON list.
    list_separator: ClassVar[str | None] = None

    @classmethod
    def name(cls) -> str:
        """The name that --task takes."""
        package, _, module = cls.__module__.rpartition(".")
        if package == __package__:
            return module.replace("_", "-")
        return f"{cls.__module__}:{cls.__qualname__}"

    @classmethod
    def headless(cls) -> bool:
        """Whether the models have no head and return hidden states."""
        return cls.head == "AutoModel"

    @classmethod
    def code(cls) -> list[str]:
        """Fingerprints of the source files of the class and its bases."""
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
    def resolve_columns(cls, columns: Columns, record: dict[str, Any], source: str) -> Columns:
        """``columns`` as a first ``record`` has them; raises where one is missing."""
        return settle_columns(columns, record, source)

    @classmethod
    def features(cls, columns: Columns) -> dict[str, Any]:
        """Columns of the Arrow file except ``number``, and their `datasets` types."""
        parts = {"text": True, "pair": columns.pair, LABEL: columns.label}
        return {name: "large_string" for name, there in parts.items() if there is not None}

    @classmethod
    def row(cls, record: dict[str, Any], columns: Columns, where: str) -> dict[str, Any]:
        """The `features` of a ``record``; ``where`` is the prefix of an InputError."""
        row = {"text": text_of(record, columns.text, where)}
        if columns.pair is not None:
            row["pair"] = text_of(record, columns.pair, where)
        if columns.label is not None:
            value = field(record, columns.label, where)
            row[LABEL] = label_json(whole(value, columns.label, where))
        return row

    @classmethod
    def has_text(cls, row: Mapping[str, Any]) -> bool:
        """Whether a stored row has any text."""
        return holds_text(row["text"], row.get("pair", ""))

    @classmethod
    def empty_column(cls, row: Mapping[str, Any], columns: Columns) -> str | None:
        """The empty column of a row without text, for the error message."""
        return columns.text

    @classmethod
    def hub_columns(cls, columns: Columns) -> list[str]:
        """The columns of a data set on the hub that `row` reads."""
        return [name for name in (columns.text, columns.pair, columns.label) if name is not None]

    @classmethod
    def declared_classes(cls, feature: Any) -> list[str] | None:
        """The class names that a data set on the hub declares for its column of labels."""
        return getattr(feature, "names", None)

    @classmethod
    def declared_name(cls, label: Any, declared_classes: list[str], where: str) -> Any:
        """The class name of an integer ``label`` of a data set that declares its classes."""
        if label is None or label < 0:
            raise InputError(f"{where}: no label (a hidden test split?)")
        return declared_classes[label]

    @classmethod
    def texts(cls, rows: Rows) -> list[str]:
        """One text for each row, as `fastkd analyze` reads them."""
        return rows.texts

    # Labels

    @classmethod
    def fit(cls, train: Rows, evals: dict[str, Rows], given: LabelInfo) -> FittedTask:
        """The task fitted to these rows. ``Rows.labels`` is set where a label is one number."""
        return FittedTask(cls(), train, evals)

    def unlabelled(self, rows: Rows) -> Rows:
        """``rows`` with labels that the losses ignore."""
        raise InputError(f"--unlabelled: the rows of --task {self.name()} have no labels")

    def for_evaluation(self, rows: Rows) -> "Task":
        """The task for evaluation on ``rows``, which may determine the metrics."""
        return self

    def for_prediction(self) -> "Task":
        """The task for `predictions`, which may encode rows differently from training."""
        return self

    def for_packing(self) -> "Task":
        """The task for --pack, where a training row holds several texts."""
        raise InputError(f"--pack: the rows of --task {self.name()} stand alone")

    def without_labels(self, rows: Rows) -> Rows:
        """``rows`` for prediction only, with placeholder labels where batches need them."""
        return rows

    @classmethod
    def row_classes(cls, rows: Rows, glue: Glue | None = None) -> list[int] | None:
        """Class ids of the rows as read from the source; None if rows have no class."""
        return None

    def strata(self, rows: Rows) -> Sequence[int]:
        """Class ids used for stratified sampling."""
        return [0] * len(rows)

    def describe(self, corpus: Corpus) -> Iterator[str]:
        """Lines to print: a summary of the labels, and warnings about likely mistakes."""
        return iter(())

    # The head

    @property
    def names(self) -> list[str] | None:
        """Class names of the head; None if it has none."""
        return None

    @property
    def num_labels(self) -> int | None:
        """Number of outputs of the head; None if the task does not determine it."""
        return None if self.names is None else len(self.names)

    @classmethod
    def of(cls, config: Any, report: Mapping[str, Any] | None = None) -> "Task":
        """The task of a trained model, from its ``config`` and its manifest (``report``)."""
        return cls()

    @classmethod
    def check_model(cls, config: Any, who: str) -> None:
        """Raise if a model with this ``config`` cannot do the task; ``who`` prefixes the error."""
        if cls.head == "AutoModelForCausalLM" and reads_whole_rows(config):
            raise InputError(
                f"{who}: a {config.model_type} model attends to both sides, and so sees the "
                "token to predict; use a decoder, or --task masked-lm"
            )

    def fits(self, config: Any) -> bool:
        """Whether a head with this ``config`` has as many outputs as the task needs."""
        return self.num_labels in (None, config.num_labels)

    def fit_config(self, config: Any) -> None:
        """Set number and names of the classes in ``config``."""
        if self.names is not None:
            config.num_labels = len(self.names)
            config.id2label = dict(enumerate(self.names))
            config.label2id = {label: i for i, label in enumerate(self.names)}

    def match(
        self, corpus: Corpus, head: "Task | None", asked: str | None, who: str, fresh: bool = False
    ) -> Corpus:
        """``corpus`` with its classes in the order of the classes of ``head``.

        ``asked``, the value of --label-order, takes precedence. Without a ``head``, or with one
        trained from scratch (``fresh``), any order is accepted. ``who`` prefixes errors.
        """
        if asked is not None:
            raise InputError(
                f"--label-order {asked}: the labels are numbers, not classes; leave it out"
            )
        return corpus

    def reorder_classes(self, names: list[str] | None, corpus: Corpus) -> Corpus:
        """``corpus`` with its classes reordered as in ``names``, if they are the same classes."""
        return corpus

    def read_labels(self, rows: Rows, asked: str | None) -> tuple[Rows, tuple[str, ...]]:
        """Rows with labels for a trained model, and lines to print (``asked``: --label-order)."""
        if asked is not None:
            raise InputError(
                f"--label-order {asked}: must name the data's label for each class of the model, "
                "and it has none"
            )
        return rows, ()

    # Tokens

    def added_tokens(self, tokenizer: Any, rows: Rows) -> tuple[int, str]:
        """Number of special tokens of a row, and what a row is: "a text" or "a pair"."""
        added = tokenizer.num_special_tokens_to_add(pair=rows.paired)
        return added, "a pair" if rows.paired else "a text"

    def encode(self, batch: dict[str, list], tokenizer: Any, max_length: int) -> Tokens:
        """Token columns of a batch of rows; ``batch["where"]`` holds the prefixes of errors.

        Columns in `evaluation_columns` go to the attribute of that name of `Encoded`, all others to
        the model. ``number`` gives the source row of each encoded row where that is not one to one.
        ``labels`` are included unless they are in ``Rows.labels``.
        """
        return tokenizer(batch["text"], batch.get("pair"), truncation=True, max_length=max_length)

    #: Columns of `encode` for `scores` and `predictions` only; the model does not get them.
    evaluation_columns: ClassVar[tuple[str, ...]] = ()

    def collator(self, tokenizer: Any) -> Collate:
        """A function that turns encoded rows into a batch, the same for the same rows.

        A collator may have a method ``for_epoch``, which returns the collator for (seed, epoch) of
        training. Its result for a row must not depend on the other rows of the batch.
        """
        transformers: Any = require("transformers", "train")
        return DefaultPaddingSide(transformers.DataCollatorWithPadding(tokenizer), tokenizer)

    def samples(self, tokenizer: Any, longest: int) -> list[dict[str, torch.Tensor]]:
        """Two batches of different sizes: an export is traced with one, compared on both."""
        texts = (["a short text", "another text, which is a little longer"], ["one more"] * 3)
        short = {"truncation": True, "max_length": longest, "return_tensors": "pt"}
        return [dict(tokenizer(some, padding=True, **short)) for some in texts]

    def method_options(self, teacher: Any, student: Any) -> dict[str, Any]:
        """Default options of methods, from the models' configurations; --set overrides them."""
        return {}

    # Scores and predictions

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        """Forward pass; the returned object has the attributes `outputs`."""
        return model(**batch)

    def answer(self, model: nn.Module, batch: dict[str, torch.Tensor], tokenizer: Any) -> Any:
        """Predictions of ``model`` for each row: here the logits, an array (rows, labels).

        Called in eval mode, without gradients, in the precision of the run.
        """
        return logits(model, batch).float().cpu().numpy()

    def generated(
        self, model: nn.Module, batch: Mapping[str, torch.Tensor], tokenizer: Any, seed: int
    ) -> list[dict[str, Any]]:
        """The rows of ``batch`` with answers sampled from ``model``, for --on-policy.

        A row's sample must depend on ``seed`` and that row alone, not on the rest of the batch.
        """
        raise InputError(
            f"--on-policy: models of --task {self.name()} do not generate text; leave it out"
        )

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        """The given metrics, by name; NaN if the answers are not finite."""
        raise NotImplementedError

    def finite(self, answers: Any) -> bool:
        """Whether all answers are finite."""
        return not isinstance(answers, np.ndarray) or bool(np.isfinite(answers).all())

    def compares_with_teacher(self, metrics: Sequence[str]) -> bool:
        """Whether these metrics need the teacher's answers, ``examples.taught``."""
        return False

    def sanity_warning(self, answers: Any, examples: Encoded) -> str | None:
        """Why the answers look useless, as the end of a sentence; None if they do not."""
        return None

    def predictions(self, answers: Any, examples: Encoded, tokenizer: Any) -> list[dict[str, Any]]:
        """The output columns of `fastkd predict` for each row."""
        raise NotImplementedError

    def shown_columns(self, rows: Rows) -> Iterator[dict[str, Any]]:
        """The input columns that `fastkd predict` repeats before the predictions."""
        texts = ("text", *("pair",) * rows.paired)
        return (dict(zip(texts, row, strict=True)) for row in rows.columns(*texts))

    def short_answers(self, answers: Any, examples: Encoded) -> list[Any]:
        """One number or word for each answer; a study stores them to compare students."""
        return []

    def references(self, examples: Encoded) -> list[Any]:
        """The correct value of each of `short_answers`."""
        return []

    def select_metrics(self, wanted: str | None, glue: Glue | None = None) -> tuple[str, ...]:
        """The metrics to report; the first selects the best checkpoint."""
        usual = self.default_metrics if glue is None else glue.metrics
        if wanted is None:
            return usual
        if wanted not in self.metrics:
            raise InputError(
                f"--metric {wanted!r}: no metric of --task {self.name()}; "
                f"{nearest(wanted, self.metrics)}"
            )
        return (wanted, *(m for m in usual if m != wanted))

    # Saved files

    def save(self, directory: Path, config: Any) -> None:
        """Write the task's own files into the folder of a saved model."""

    def report(self) -> dict[str, Any]:
        """Entries of the task in a student's manifest; `of` reads them back."""
        return {"labels": self.names}

    @classmethod
    def about(cls, report: Mapping[str, Any]) -> str:
        """A sentence on the labels for the model card, from the manifest."""
        names = report.get("labels")
        return f"Classes: {markdown_list(names)}." if names else ""

    @classmethod
    def usage(cls, report: Mapping[str, Any], directory: str) -> str:
        """Example code for the model card."""
        shown = f"print(classify({example_of(report)}))"
        return cls.pipeline_usage("classify", f'"{directory}"', shown)

    @classmethod
    def pipeline_usage(cls, name: str, arguments: str, shown: str) -> str:
        """Example code with a pipeline called ``name``; ``shown`` is the line that uses it."""
        made = f'{name} = pipeline("{cls.pipeline}", {arguments})'
        return f"from transformers import pipeline\n\n{made}\n{shown}"

    @classmethod
    def loading_code(cls, directory: str) -> str:
        """Example code that loads ``tokenizer`` and ``model`` without a pipeline."""
        return (
            f"from transformers import {cls.head}, AutoTokenizer\n\n"
            f'tokenizer = AutoTokenizer.from_pretrained("{directory}")\n'
            f'model = {cls.head}.from_pretrained("{directory}")\n'
        )


@dataclass(frozen=True)
class ClassTask(Task):
    """A task with named classes; a trained head determines their order."""

    classes: tuple[str, ...] = ()
    #: Whether the classes have an order of their own: whole numbers, or declared by a data set.
    numbered: bool = True

    @property
    def names(self) -> list[str]:
        return list(self.classes)

    def without_labels(self, rows: Rows) -> Rows:
        return self.unlabelled(rows)

    @classmethod
    def of(cls, config: Any, report: Mapping[str, Any] | None = None) -> Task:
        return cls(tuple(class_names(config)))

    def match(
        self, corpus: Corpus, head: Task | None, asked: str | None, who: str, fresh: bool = False
    ) -> Corpus:
        names = self.names
        if asked is not None:
            return self.reorder_classes(label_order(asked, names, "the data"), corpus)
        if head is None or head.names is None:
            return corpus
        order = by_names(names, head.names)
        if order is not None or fresh:
            return self.reorder_classes(order, corpus)
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

    def reorder_classes(self, names: list[str] | None, corpus: Corpus) -> Corpus:
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
        """The task with reordered ``classes``; old class i is ``new[i]``."""
        return replace(self, classes=classes)


@dataclass(frozen=True)
class ListedTask(ClassTask):
    """A task with a list of classes for each row, in the column `LABELS`."""

    #: What a class is called in messages.
    label_noun: ClassVar[str] = "label"

    @classmethod
    def declared_classes(cls, feature: Any) -> list[str] | None:
        return getattr(getattr(feature, "feature", None), "names", None)

    @classmethod
    def declared_name(cls, label: Any, declared_classes: list[str], where: str) -> list[str]:
        return [super(ListedTask, cls).declared_name(i, declared_classes, where) for i in label]

    @classmethod
    def fit(cls, train: Rows, evals: dict[str, Rows], given: LabelInfo) -> FittedTask:
        names = given.declared_classes or sorted(
            {x for (row,) in train.columns(LABELS) for x in row}
        )
        numbered = whole_numbers(names)
        if numbered and given.declared_classes is None:
            names.sort(key=int)
        if len(names) < 2:
            found = f"the only {cls.label_noun} is {names[0]!r}" if names else "no row has a label"
            raise InputError(f"{train.source}: {found}, and --task {cls.name()} needs two")
        task = cls(tuple(names), given.declared_classes is not None or numbered)
        for rows in evals.values():
            task.check_known(rows, "does not occur in the training rows")
        return FittedTask(task, train, evals)

    def check_known(self, rows: Rows, unknown: str) -> None:
        """Raise for the first label that is not a class of the task."""
        for number, row in rows.columns("number", LABELS):
            for name in row:
                if name not in self.classes:
                    raise InputError(
                        f"{rows.source}, row {number}: {self.label_noun} {name!r:.60} {unknown}; "
                        f"{nearest(name, self.classes)}"
                    )

    def unlabelled(self, rows: Rows) -> Rows:
        return rows.without(LABELS)

    def read_labels(self, rows: Rows, asked: str | None) -> tuple[Rows, tuple[str, ...]]:
        self.check_known(rows, "is none of the model's")
        return super().read_labels(rows, asked)


@dataclass(frozen=True)
class DefaultPaddingSide:
    """``collate`` with the padding side of the tokenizer's class, not of its files.

    Files may set "left" for generation. A model that counts positions from the first column would
    then read the tokens of a short text at shifted positions.
    """

    collate: Collate
    tokenizer: Any

    def __call__(self, rows: list[dict[str, Any]]) -> Mapping[str, Any]:
        with default_padding_side(self.tokenizer):
            return self.collate(rows)


@contextlib.contextmanager
def default_padding_side(tokenizer: Any) -> Iterator[None]:
    """Context in which the tokenizer pads on the default side of its class."""
    given = tokenizer.padding_side
    tokenizer.padding_side = type(tokenizer).padding_side
    try:
        yield
    finally:
        tokenizer.padding_side = given


def markdown_list(names: Iterable[str]) -> str:
    """Names joined by commas, with Markdown's special characters escaped."""
    return ", ".join(re.sub(r"([\\`*_\[\]<>|~&$])", r"\\\1", " ".join(x.split())) for x in names)


def example_of(report: Mapping[str, Any]) -> str:
    """The placeholder input in `Task.usage`: one text, or a pair."""
    return '{"text": "...", "text_pair": "..."}' if report.get("paired") else '"..."'


def probabilities(names: Iterable[Any], values: torch.Tensor) -> dict[str, float]:
    """Output columns ``P(name)`` with the rounded probabilities."""
    return {f"P({name})": round(float(x), 6) for name, x in zip(names, values, strict=True)}


def token_loss_sums(logits: torch.Tensor, targets: torch.Tensor) -> list[tuple[float, int]]:
    """The sum of -log p over each row's ``targets`` (B, N), and the number of targets."""
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="none", ignore_index=UNLABELLED
    )
    sums = losses.view_as(targets).double().sum(-1).tolist()
    return list(zip(sums, (targets != UNLABELLED).sum(-1).tolist(), strict=True))


def logits(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of ``model`` on a batch, computed without the labels."""
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    return model(**accepted(model, inputs)).logits
