"""Any number of labels for a text, or for two."""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np
import torch

from fastkd._core.extras import require
from fastkd.train.arrow_rows import UNLABELLED, Encoded, Rows
from fastkd.train.errors import InputError
from fastkd.train.files import Columns, field
from fastkd.train.labels import MOST_CLASSES_SHOWN, as_number, read_as_ids
from fastkd.train.tasks import base

BETWEEN = "|"
ONE_HOT = {"0", "1"}


@dataclass(frozen=True)
class MultiLabel(base.ListedTask):
    """Texts and lists of labels, which may be empty; tables split them by "|".

    Lists of zeros and ones that are equally long in all rows are one-hot: one entry for each class.
    Several columns, separated by commas in `Columns.label`, are a column of zeros and ones for each
    class. Each output of the head is a separate decision: the label is predicted where it is above
    0.
    """

    metrics = ("micro_f1", "macro_f1", "mean_average_precision", base.AGREEMENT)
    default_metrics = metrics[:3]
    teacher_metrics = frozenset({base.AGREEMENT})
    problem = "multi_label_classification"
    columns = Columns("text", None, "labels")
    stored: ClassVar[Mapping[str, Any]] = {
        "text": base.TEXT,
        "pair": base.TEXT,
        "label": [base.TEXT],
    }
    list_separator = BETWEEN
    once = True
    two_tokenizers = "texts"
    summary = "Labels: {labels}."
    usage = (
        "from transformers import pipeline\n\n"
        'label = pipeline("$pipeline", "$directory", top_k=None)\n'
        "print(label($inputs))  # those with a score above 0.5"
    )

    #: Whether the rows that the task was fitted to are one-hot; None: not fitted.
    one_hot: bool | None = None

    @classmethod
    def row(cls, record: dict[str, Any], columns: Columns, where: str) -> dict[str, Any]:
        row = super().row(record, replace(columns, label=None), where)
        names = columns.labels_in(record)
        if len(names) > 1:
            row["label"] = [name for name in names if _is_set(record, name, where)]
        elif columns.label is not None:
            row["label"] = _labels_of(record, columns.label, where)
        return row

    @classmethod
    def fit(cls, train: Rows, evals: dict[str, Rows], given: base.LabelInfo) -> base.Task:
        size = one_hot_size(train) if given.declared_classes is None else 0
        if size:
            head = given.head if len(given.head or ()) == size else None
            given = given._replace(declared_classes=[str(i) for i in range(size)], head=head)
        task = cast(MultiLabel, super().fit(train, evals, given))
        return replace(task, one_hot=bool(size))

    def read_labels(self, rows: Rows, unknown: str = base.UNKNOWN) -> base.Prepared:
        """``rows`` with lists of names; one-hot lists are in the order of the classes."""
        size = one_hot_size(rows) if self.one_hot is None else len(self.classes) * self.one_hot
        if not size:
            return super().read_labels(rows, unknown)
        if size != len(self.classes):
            raise InputError(
                f"{rows.source}: lists of {size} zeros and ones, and the model has "
                f"{len(self.classes)} classes"
            )
        labels = []
        for number, row in rows.columns("number", "label"):
            if len(row) != size or not ONE_HOT.issuperset(row):
                raise InputError(
                    f"{rows.source}, row {number}: its labels are not the {size} zeros and ones "
                    "that other rows have"
                )
            labels.append([name for name, x in zip(self.classes, row, strict=True) if x == "1"])
        notes = [f"{rows.source}: labels are one-hot, {size} zeros and ones for each row"]
        if self.one_hot is None or self.numbers:
            names = {i: str(i) for i in range(size)}
            notes.append(read_as_ids(names, self.classes, rows.source))
        return base.Prepared(self, rows.with_labels(labels), tuple(filter(None, notes)))

    def describe(self, corpus: base.Corpus) -> Iterator[str]:
        if len(self.classes) > MOST_CLASSES_SHOWN:
            yield f"{len(self.classes)} labels"
            return
        train, evals = (
            Counter(name for rows in sets for row in rows.column("label") for name in row)
            for sets in ([corpus.train], corpus.evals.values())
        )
        counts = (f"{name} {train[name]}/{evals[name]}" for name in self.classes)
        yield f"labels, training/evaluation rows: {', '.join(counts)}"

    def encode(self, batch: dict[str, list], tokenizer: Any, max_length: int) -> base.Tokens:
        tokens = super().encode(batch, tokenizer, max_length)
        if "label" in batch:
            labels = [[float(name in row) for name in self.classes] for row in batch["label"]]
        else:
            labels = [[float(UNLABELLED)] * len(self.classes)] * len(batch["text"])
        return {**tokens, "labels": labels}

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        scorers: Any = require("sklearn.metrics", "train")
        rows = examples.rows.column("label")
        true = np.array([[name in row for name in self.classes] for row in rows], dtype=int)
        found = (answers > 0).astype(int)

        def f1(average: str) -> float:
            # With one column scikit-learn would average over "yes" and "no".
            average = average if len(self.classes) > 1 else "binary"
            return scorers.f1_score(true, found, average=average, zero_division=0)

        with warnings.catch_warnings():  # a label without a row counts as 0
            warnings.filterwarnings("ignore", "No positive class found")
            precision = scorers.average_precision_score(true, answers, average="macro")
        return {
            "micro_f1": f1("micro"),
            "macro_f1": f1("macro"),
            "mean_average_precision": precision,
        }

    def decisions(self, answers: Any) -> Any:
        return answers > 0

    def sanity_warning(self, answers: Any, examples: Encoded) -> str | None:
        if ((answers > 0) != (answers[:1] > 0)).any():
            return None
        return f"are all {BETWEEN.join(self._given(answers[0])) or 'no label'!r}"

    def _given(self, outputs: Any) -> list[str]:
        return [name for name, x in zip(self.classes, outputs, strict=True) if x > 0]

    def predictions(self, answers: Any, examples: Encoded) -> list[dict[str, Any]]:
        likely = torch.from_numpy(answers).double().sigmoid()
        return [
            {"labels": self._given(row), **base.probabilities(self.classes, each)}
            for row, each in zip(answers, likely, strict=True)
        ]

    def short_answers(self, answers: Any, examples: Encoded) -> list[Any]:
        return [BETWEEN.join(self._given(row)) for row in answers]

    def references(self, examples: Encoded) -> list[Any]:
        rows = examples.rows.column("label")
        return [BETWEEN.join(name for name in self.classes if name in row) for row in rows]


def _labels_of(record: dict[str, Any], column: str, where: str) -> list[str]:
    value = field(record, column, where)
    if isinstance(value, str):
        value = value.split(BETWEEN) if value.strip() else []
    if isinstance(value, list) and {*map(type, value)} in ({float}, {bool}):  # one-hot
        value = [int(x) if x in (0, 1) else x for x in value]
    known = isinstance(value, list) and all(
        isinstance(name, str | int) and not isinstance(name, bool) for name in value
    )
    if not known:
        raise InputError(f"{where}: column {column!r} is not a list of labels but {value!r:.40}")
    names = [str(name).strip() for name in value]
    if "" in names:
        raise InputError(f"{where}: label {names.index('') + 1} is empty")
    return names


def _is_set(record: dict[str, Any], column: str, where: str) -> bool:
    """Whether the column of a class holds 1 and not 0."""
    value = field(record, column, where)
    number = float(value) if isinstance(value, bool) else as_number(value)
    if number not in (0, 1):
        raise InputError(f"{where}: column {column!r} holds neither 0 nor 1 but {value!r:.40}")
    return number == 1


def one_hot_size(rows: Rows) -> int:
    """Length of the one-hot lists of ``rows``; 0 if they are lists of labels.

    Read as class ids, lists of equally many zeros and ones would name a class twice, or would all
    name both classes.
    """
    size = len(next(rows.column("label"), []))
    alike = (len(row) == size and ONE_HOT.issuperset(row) for row in rows.column("label"))
    return size if size > 1 and all(alike) else 0


TASK = MultiLabel
