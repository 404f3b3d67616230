"""Base classes of tasks: how rows are read, encoded, scored and predicted."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fastkd._core.extras import require
from fastkd.models.inputs import accepted
from fastkd.train import files
from fastkd.train.arrow_rows import PROBABILITIES, TEACHER_PREFIX, UNLABELLED, Encoded, Rows
from fastkd.train.conversations import KEEP
from fastkd.train.errors import InputError, nearest
from fastkd.train.files import Columns, settle_columns, text_of, words_of
from fastkd.train.generation import Generation
from fastkd.train.glue import Glue
from fastkd.train.labels import (
    are_default_names,
    are_numbers_of,
    by_names,
    class_names,
    classes_by_name,
    in_order,
    label_order,
    label_text,
    read_as_ids,
    whole_numbers,
    with_classes_of,
)

Tokens = Mapping[str, list[Any]]  # columns by name
Collate = Callable[[list[dict[str, Any]]], Mapping[str, Any]]  # a batch of rows
TEXT = "large_string"
UNKNOWN = "is no class of the model"
# Columns that a tokenizer does not pad.
OWN_PADDING = ("position_ids", PROBABILITIES)
# Metric of the answers' agreement with the teacher's, for rows without labels.
AGREEMENT = "agreement"
# Example code for the model card that loads model and tokenizer without a pipeline.
LOADING = """from transformers import $head, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("$directory")
model = $head.from_pretrained("$directory")
"""


class LabelInfo(NamedTuple):
    """Information on labels that the rows themselves do not hold."""

    labels: str = "auto"  # --labels
    glue: Glue | None = None
    declared_classes: list[str] | None = None  # class names that the data set declares
    head: Sequence[str] | None = None  # class names of a finished teacher
    thinking: str = KEEP  # --thinking


class Prepared(NamedTuple):
    """A task and the rows that it reads."""

    task: "Task"
    rows: Rows
    notes: tuple[str, ...] = ()  # lines to print
    without_labels: Rows | None = None  # rows that have no label


@dataclass(frozen=True)
class Corpus:
    """Training and evaluation rows with the task fitted to them.

    ``evals`` maps the suffix of a metric's name to its rows: "" for the main set, "mm" for MNLI
    mismatched. ``test`` rows are scored once, at the end, also by suffix: "" for a single file,
    else the names of the files. ``unlabelled`` rows train all losses but
    those on labels. The first of the ``metrics`` selects the best model. ``teacher_train``: rows of
    the teacher's fine-tuning, where the student reads fewer labels.
    """

    train: Rows
    evals: dict[str, Rows]
    task: "Task"
    metrics: tuple[str, ...]
    test: Mapping[str, Rows] = dataclasses.field(default_factory=dict)
    unlabelled: Rows | None = None
    teacher_train: Rows | None = None
    #: Lines to print: how many rows have no label, ...
    notes: tuple[str, ...] = ()
    #: ... and how numbers were read as the classes of a head.
    reading: str = ""
    #: Whether the training rows have labels.
    labelled: bool = True

    @property
    def names(self) -> list[str] | None:
        """Class names of the head; None if it has none."""
        return self.task.names


@dataclass(frozen=True)
class Task:
    """How rows are read, encoded and scored, and which head predicts.

    A subclass is a file of `fastkd.train.tasks`, or a user's class named as
    ``--task package.module:Class``. It sets the class attributes and overrides the methods where it
    differs from one or two texts with one label. Instance fields hold what `fit` or `of` read from
    the rows or a head. Their ``repr`` must show their whole value, since it is part of the file
    name of the encoded rows.

    `row` reads a record into the columns (`stored`) of an Arrow file: ``text``, ``pair``,
    ``label``. `read_labels` turns labels into ids. `encode` turns rows into tokens and may return
    more or fewer rows. `collator` builds batches. `answer` returns one small object for each row of
    a batch, because all of them are kept in memory; `scores` and `predictions` receive them in the
    order of the encoded rows, complete in every process.
    """

    # Rows

    #: Default column names. The first two are the names of the texts in `fastkd predict`, too.
    columns: ClassVar[Columns] = Columns()
    #: `datasets` types of the stored columns; ``[type]`` stands for a list. An optional column is
    #: stored only if `Columns` names it.
    stored: ClassVar[Mapping[str, Any]] = {"text": TEXT, "pair": TEXT, "label": TEXT}
    optional: ClassVar[tuple[str, ...]] = ("pair", "label")
    #: Whether each text of a row must hold something, not only one of them.
    every_text: ClassVar[bool] = False
    #: Functions that read the rows of a file, by its suffix, and whether it may be a folder.
    readers: ClassVar[files.Readers] = files.READERS
    folders: ClassVar[bool] = False

    # Labels and metrics

    #: All supported metrics; those reported by default, of which the first selects the best
    #: checkpoint (none: all); those to minimise; those that already are percentages; and those that
    #: compare with the teacher's answers.
    metrics: ClassVar[tuple[str, ...]]
    default_metrics: ClassVar[tuple[str, ...]] = ()
    lower_is_better: ClassVar[frozenset[str]] = frozenset()
    percent: ClassVar[frozenset[str]] = frozenset()
    teacher_metrics: ClassVar[frozenset[str]] = frozenset()
    #: Whether rows have labels, so that a model can be trained without a teacher.
    supervised: ClassVar[bool] = True
    #: Whether rows without labels can be trained on (--unlabelled), and the label they get.
    unlabelled: ClassVar[bool] = False
    no_label: ClassVar[float | None] = None
    #: Whether a row has several samples, which --accumulate would part.
    indivisible: ClassVar[bool] = False
    #: Whether a row has one label, by which methods may compare rows of one class.
    by_class: ClassVar[bool] = False

    # The model

    #: The Auto class of transformers that loads the model, and the head's name in messages.
    head: ClassVar[str] = "AutoModelForSequenceClassification"
    head_name: ClassVar[str] = "classification head"
    #: Fields that follow from the model, not from the rows.
    of_model: ClassVar[tuple[str, ...]] = ()
    #: ``config.problem_type`` of transformers.
    problem: ClassVar[str | None] = None
    #: Names of the model's outputs, and of the outputs of an ONNX file (--onnx).
    outputs: ClassVar[tuple[str, ...]] = ("logits",)
    #: What is compared if the student has a tokenizer of its own: "texts", or "spans" of text,
    #: which `encode_both` numbers; "" if such a student is refused.
    two_tokenizers: ClassVar[Literal["", "texts", "spans"]] = ""
    #: The collator of transformers that pads batches.
    collator_class: ClassVar[str] = "DataCollatorWithPadding"
    #: Columns of `encode` for the metrics only; the model does not get them.
    evaluation_columns: ClassVar[tuple[str, ...]] = ()
    #: How models generate the text that is scored; None for models that generate none.
    generation: Generation | None = dataclasses.field(default=None, kw_only=True, repr=False)
    #: Method of a task that generates text: rows of ``batch`` with answers sampled from ``model``,
    #: called as ``generated(model, batch, tokenizer, seed)`` for --on-policy. A row's sample must
    #: depend on ``seed`` and that row alone.
    generated: ClassVar[Callable[..., list[dict[str, Any]]] | None] = None

    # The model card and the output of `fastkd predict`

    #: The column of `predictions` with the `short_answers`; "" if there are none.
    short_column: ClassVar[str] = ""
    pipeline: ClassVar[str] = "text-classification"
    #: The library that loads a saved student, by its name on the hub.
    library: ClassVar[str] = "transformers"
    #: A sentence on the model, with entries of its manifest in braces.
    summary: ClassVar[str] = ""
    #: Example code, with $directory, $head, $pipeline and $inputs.
    usage: ClassVar[str] = (
        "from transformers import pipeline\n\n"
        'classify = pipeline("$pipeline", "$directory")\nprint(classify($inputs))'
    )
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
    def resolve_columns(cls, columns: Columns, record: dict[str, Any], source: str) -> Columns:
        """``columns`` as a first ``record`` has them; raises where one is missing."""
        return settle_columns(columns, record, source)

    @classmethod
    def row(cls, record: dict[str, Any], columns: Columns, where: str) -> dict[str, Any]:
        """The `stored` columns of a ``record``; ``where`` is the prefix of an InputError."""
        row: dict[str, Any] = {}
        for role, name in (("text", columns.text), ("pair", columns.pair)):
            if name is not None:
                read = words_of if isinstance(cls.stored[role], list) else text_of
                row[role] = read(record, name, where)
        if columns.label is not None:
            row["label"] = label_text(record, columns.label, where)
        return row

    @classmethod
    def texts(cls, rows: Rows) -> tuple[list[str], list[str] | None]:
        """The texts of all rows, and the second texts if a model reads both."""
        if isinstance(cls.stored["text"], list):  # of words
            return [" ".join(words) for words in rows.column("text")], None
        if isinstance(cls.stored.get("pair"), list):
            return [" ".join((text, *more)) for text, more in rows.columns("text", "pair")], None
        return rows.texts, rows.pairs

    @classmethod
    def shown(cls, row: Mapping[str, Any]) -> dict[str, Any]:
        """The input columns of a stored row that `fastkd predict` repeats."""
        names = {"text": cls.columns.text or "text", "pair": cls.columns.pair or "pair"}
        return {name: row[role] for role, name in names.items() if row.get(role) is not None}

    # Labels

    @classmethod
    def fit(cls, train: Rows, evals: dict[str, Rows], given: LabelInfo) -> "Task":
        """The task of these rows, whose labels are those of the files."""
        return cls()

    def read_labels(self, rows: Rows, unknown: str = UNKNOWN) -> Prepared:
        """``rows`` with class ids or numbers as labels; ``unknown`` is the end of an error."""
        return Prepared(self, rows)

    def prepare(self, rows: Rows, labelled: bool = True, order: str | None = None) -> Prepared:
        """The task and ``rows`` for evaluation, or for prediction if they are not ``labelled``.

        ``labelled`` rows get labels as in `read_labels`; ``order`` is the value of --label-order.
        Others get placeholders where batches need labels.
        """
        if order is not None:
            raise InputError(
                f"--label-order {order}: must name the data's label for each class of the model, "
                "and it has none"
            )
        return self.read_labels(rows) if labelled else Prepared(self, self.without_labels(rows))

    def for_packing(self) -> "Task":
        """The task for --pack, where a training row has several texts."""
        raise InputError(f"--pack: rows of --task {self.name()} are not packed; leave it out")

    def without_labels(self, rows: Rows) -> Rows:
        """``rows`` without labels, or with labels that the losses ignore."""
        if self.no_label is None:
            return rows.without_label()
        return rows.with_labels(np.full(len(rows), self.no_label))

    def explain(self, metrics: Sequence[str]) -> Iterator[str]:
        """Lines to print on ``metrics`` whose name leaves something open."""
        return iter(())

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

    def match(
        self, corpus: Corpus, head: "Task | None", order: str | None, who: str, fresh: bool = False
    ) -> Corpus:
        """``corpus`` with the model's fields, and its classes in the order of those of ``head``.

        ``order``, the value of --label-order, takes precedence. Without a ``head``, or with one
        trained from scratch (``fresh``), any order is accepted. ``who`` prefixes errors.
        """
        if order is not None:
            raise InputError(
                f"--label-order {order}: the labels are numbers, not classes; leave it out"
            )
        found = {} if head is None else {name: getattr(head, name) for name in self.of_model}
        return replace(corpus, task=replace(self, **found))

    def method_options(self, teacher: Any, student: Any) -> dict[str, Any]:
        """Default options of methods, from the models' configurations; --set overrides them."""
        return {}

    # Tokens

    def encode(self, batch: dict[str, list], tokenizer: Any, max_length: int) -> Tokens:
        """Token columns of a batch of rows; ``batch["where"]`` holds the prefixes of errors.

        Columns in `evaluation_columns` go to the attribute of that name of `Encoded`, all others to
        the model. ``number`` gives the source row of each encoded row where that is not one to one.
        """
        tokens = tokenizer(batch["text"], batch.get("pair"), truncation=True, max_length=max_length)
        return {**tokens, "labels": batch["label"]} if "label" in batch else tokens

    def encode_both(
        self, batch: dict[str, list], tokenizer: Any, teachers: Any, max_length: int
    ) -> Tokens:
        """Columns of training rows for two tokenizers: the teacher's begin with ``teacher_``.

        For "spans" of `two_tokenizers` also ``student_spans`` and ``teacher_spans``, as of
        `fastkd.distill.align_spans`.
        """
        theirs = self.encode(batch, teachers, max_length)
        left_out = ("number", "labels", PROBABILITIES)
        inputs = {f"{TEACHER_PREFIX}{n}": x for n, x in theirs.items() if n not in left_out}
        return {**self.encode(batch, tokenizer, max_length), **inputs}

    def collator(self, tokenizer: Any) -> Collate:
        """A function that turns encoded rows into a batch, the same for the same rows.

        A collator may have a method ``for_epoch``, which returns the collator for (seed, epoch) of
        training. Its result for a row must not depend on the other rows of the batch.
        """
        collate = getattr(require("transformers", "train"), self.collator_class)
        own = copy.copy(tokenizer)
        own.padding_side = type(tokenizer).padding_side
        return Pad(collate(own), own.padding_side)

    # Scores and predictions

    def answer(self, model: nn.Module, batch: dict[str, torch.Tensor], tokenizer: Any) -> Any:
        """Predictions of ``model`` for each row: here the logits, an array (rows, labels).

        Called in eval mode, without gradients, in the precision of the run.
        """
        return logits(model, batch).float().cpu().numpy()

    def select_metrics(self, wanted: str | None, glue: Glue | None = None) -> tuple[str, ...]:
        """The metrics to report, the ``wanted`` one first."""
        usual = self.default_metrics or self.metrics
        if glue is not None and set(glue.metrics) <= set(self.metrics):
            usual = glue.metrics
        if wanted is not None and wanted not in self.metrics:
            raise InputError(
                f"--metric {wanted!r}: no metric of --task {self.name()}; "
                f"{nearest(wanted, self.metrics)}"
            )
        return tuple(dict.fromkeys((wanted, *usual) if wanted else usual))

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        """The given metrics but `agreement`'s, and perhaps others, by name, of finite answers."""
        raise NotImplementedError

    def agreement(self, answers: Any, examples: Encoded) -> dict[str, float]:
        """The `teacher_metrics`: here the agreement of decisions with the teacher's."""
        theirs = examples.teacher_answers
        if theirs is None:
            raise InputError(f"{AGREEMENT} compares with the teacher, and there is none")
        return {AGREEMENT: float((self.decisions(answers) == self.decisions(theirs)).mean())}

    def decisions(self, answers: Any) -> Any:
        """What `agreement` compares, an array."""
        return answers.argmax(-1)

    def sanity_warning(self, answers: Any, examples: Encoded) -> str | None:
        """Why finite answers look useless, as the end of a sentence; None if they do not."""
        found = self.short_answers(answers, examples)
        return f"are all {found[0]!r:.60}" if len(set(found)) == 1 < len(found) else None

    def predictions(self, answers: Any, examples: Encoded) -> list[dict[str, Any]]:
        """The output columns of `fastkd predict` for each row."""
        raise NotImplementedError

    def short_answers(self, answers: Any, examples: Encoded) -> list[Any]:
        """One number or word for each answer; a study stores them to compare students."""
        name = self.short_column
        return [row[name] for row in self.predictions(answers, examples)] if name else []

    def references(self, examples: Encoded) -> list[Any]:
        """The correct value of each of `short_answers`; empty if a study cannot compare them."""
        return [] if examples.labels is None else examples.labels.tolist()

    # Saved files

    def save(self, directory: Path, config: Any) -> None:
        """Write the task's own files into the folder of a saved model."""

    def report(self) -> dict[str, Any]:
        """Entries of the task in a student's manifest; `of` reads them back."""
        return {"labels": self.names}


@dataclass(frozen=True)
class ClassTask(Task):
    """A task with named classes; a trained head determines their order."""

    unlabelled: ClassVar[bool] = True
    summary: ClassVar[str] = "Classes: {labels}."

    classes: tuple[str, ...] = ()
    #: Whether the classes have an order of their own: whole numbers, or declared by a data set.
    numbered: bool = True

    @property
    def names(self) -> list[str]:
        return list(self.classes)

    @classmethod
    def of(cls, config: Any, report: Mapping[str, Any] | None = None) -> Task:
        return cls(tuple(class_names(config)))

    def match(
        self, corpus: Corpus, head: Task | None, order: str | None, who: str, fresh: bool = False
    ) -> Corpus:
        names = self.names
        if order is not None:
            return reorder_classes(label_order(order, names, "the data"), corpus)
        if head is None or head.names is None:
            return corpus
        ordered = by_names(names, head.names)
        if ordered is not None or fresh:
            return reorder_classes(ordered, corpus)
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


@dataclass(frozen=True)
class ListedTask(ClassTask):
    """A task with a list of class names for each row."""

    #: What a class is called in messages, and whether a row has it only once.
    label_noun: ClassVar[str] = "label"
    once: ClassVar[bool] = False

    #: Whether the files number the classes of a head with names.
    numbers: bool = False

    @classmethod
    def fit(cls, train: Rows, evals: dict[str, Rows], given: LabelInfo) -> Task:
        names, head = given.declared_classes, given.head or ()
        if names is None:
            names = in_order({name for row in train.column("label") for name in row})
        numbers = are_numbers_of(names, head) and not are_default_names(head)
        names = list(head) if numbers else with_classes_of(names, head)
        if len(names) < 2:
            found = f"the only {cls.label_noun} is {names[0]!r}" if names else "no row has a label"
            raise InputError(f"{train.source}: {found}, and --task {cls.name()} needs two")
        numbered = given.declared_classes is not None or whole_numbers(names)
        return cls(tuple(names), numbered, numbers=numbers)

    def read_labels(self, rows: Rows, unknown: str = UNKNOWN) -> Prepared:
        """``rows`` with lists of names of the classes; names may be spelled otherwise."""
        names = [str(i) for i in range(len(self.classes))] if self.numbers else self.classes
        class_of = classes_by_name(names)
        same = not self.numbers
        for number, row in rows.columns("number", "label"):
            where, found = f"{rows.source}, row {number}", list(map(class_of, row))
            if None in found:
                name = row[found.index(None)]
                raise InputError(
                    f"{where}: {self.label_noun} {name!r:.60} {unknown}; {nearest(name, names)}"
                )
            if self.once and len({*found}) < len(found):
                twice = next(x for x, i in zip(row, found, strict=True) if found.count(i) > 1)
                raise InputError(f"{where}: {self.label_noun} {twice!r:.60} occurs twice")
            same = same and all(names[i or 0] == x for i, x in zip(found, row, strict=True))
        if same:
            return Prepared(self, rows)
        labels = [[self.classes[class_of(x) or 0] for x in row] for row in rows.column("label")]
        notes = (read_as_ids(dict(enumerate(names)), self.classes, rows.source),)
        return Prepared(self, rows.with_labels(labels), notes if self.numbers else ())


def reorder_classes(names: list[str] | None, corpus: Corpus) -> Corpus:
    """``corpus`` with its classes in the order of ``names``, if they are the same classes."""
    task = corpus.task
    if not isinstance(task, ClassTask) or names is None or names == task.names:
        return corpus
    if sorted(names) != sorted(task.names):
        return corpus
    new = np.array([names.index(name) for name in task.names])

    def renumber(rows: Rows) -> Rows:
        if PROBABILITIES in rows.data.column_names:
            found = np.asarray(rows.data[PROBABILITIES][:])
            return rows.with_probabilities(found[:, np.argsort(new)])
        return rows if rows.labels is None else rows.with_labels(new[rows.labels])

    return replace(
        corpus,
        train=renumber(corpus.train),
        evals={k: renumber(rows) for k, rows in corpus.evals.items()},
        test={k: renumber(rows) for k, rows in corpus.test.items()},
        task=dataclasses.replace(task, classes=tuple(names)),
    )


def check_fast(task: Task, tokenizer: Any, lacks: str) -> None:
    """Raise for a slow tokenizer, which ``lacks`` what the task needs."""
    if not tokenizer.is_fast:
        raise InputError(
            f"--task {task.name()} needs a fast tokenizer, and {type(tokenizer).__name__} is none: "
            f"it does not give the {lacks}"
        )


@dataclass(frozen=True)
class Pad:
    """``collate`` for rows that may have ``position_ids``, on the padding side of the class.

    A tokenizer's files may set "left" for generation. A model that counts positions from the first
    column would then read the tokens of a short text at shifted positions. Probabilities of the
    classes are the labels of rows that have them.
    """

    collate: Collate
    side: str

    def __call__(self, rows: list[dict[str, Any]]) -> Mapping[str, Any]:
        positions, likely = (
            [torch.tensor(row[name]) for row in rows if name in row] for name in OWN_PADDING
        )
        rest = [{name: x for name, x in row.items() if name not in OWN_PADDING} for row in rows]
        batch = {name: x for name, x in self.collate(rest).items() if x is not None}
        if positions:
            pad = nn.utils.rnn.pad_sequence
            batch["position_ids"] = pad(positions, True, padding_side=self.side)
        if likely:
            batch["labels"] = torch.stack(likely)
        return batch


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
