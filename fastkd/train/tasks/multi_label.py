"""Any number of labels for a text, or for two."""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from fastkd._core.extras import require
from fastkd.train.arrow_rows import UNLABELLED, Encoded, Rows
from fastkd.train.errors import InputError
from fastkd.train.input_columns import Columns, field, whole
from fastkd.train.labels import MOST_CLASSES_SHOWN, as_name
from fastkd.train.tasks.base import (
    TEXT,
    Corpus,
    ListedTask,
    Tokens,
    probabilities,
)

BETWEEN = "|"


@dataclass(frozen=True)
class MultiLabel(ListedTask):
    """Texts and lists of labels, which may be empty; tables split them by "|".

    Each output of the head is a separate decision: the label is predicted where it is above 0.
    """

    metrics = ("micro_f1", "macro_f1", "mean_average_precision")
    problem = "multi_label_classification"
    columns = Columns("text", None, "labels")
    stored: ClassVar[Mapping[str, Any]] = {"text": TEXT, "pair": TEXT, "label": [TEXT]}
    list_separator = BETWEEN
    summary = "Labels: {labels}."
    usage = (
        "from transformers import pipeline\n\n"
        'label = pipeline("$pipeline", "$directory", top_k=None)\n'
        "print(label($inputs))  # those with a score above 0.5"
    )

    @classmethod
    def row(cls, record: dict[str, Any], columns: Columns, where: str) -> dict[str, Any]:
        row = super().row(record, replace(columns, label=None), where)
        if columns.label is not None:
            row["label"] = _labels_of(record, columns.label, where)
        return row

    def describe(self, corpus: Corpus) -> Iterator[str]:
        if len(self.classes) > MOST_CLASSES_SHOWN:
            yield f"{len(self.classes)} labels"
            return
        train, evals = map(_counts, ([corpus.train], corpus.evals.values()))
        counts = (f"{name} {train[name]}/{evals[name]}" for name in self.classes)
        yield f"labels, training/evaluation rows: {', '.join(counts)}"

    def encode(self, batch: dict[str, list], tokenizer: Any, max_length: int) -> Tokens:
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

    def sanity_warning(self, answers: Any, examples: Encoded) -> str | None:
        if ((answers > 0) != (answers[:1] > 0)).any():
            return None
        return f"are all {BETWEEN.join(self._given(answers[0])) or 'no label'!r}"

    def _given(self, outputs: Any) -> list[str]:
        return [name for name, x in zip(self.classes, outputs, strict=True) if x > 0]

    def predictions(self, answers: Any, examples: Encoded) -> list[dict[str, Any]]:
        likely = torch.from_numpy(answers).double().sigmoid()
        return [
            {"labels": self._given(row), **probabilities(self.classes, each)}
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
    known = isinstance(value, list) and all(
        isinstance(name, str | int) and not isinstance(name, bool) for name in value
    )
    if not known:
        raise InputError(f"{where}: column {column!r} is not a list of labels but {value!r:.40}")
    names = [as_name(whole(name, column, where)) for name in value]
    if "" in names:
        raise InputError(f"{where}: label {names.index('') + 1} is empty")
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InputError(f"{where}: label {min(twice)!r:.60} occurs twice")
    return names


def _counts(sets: Iterable[Rows]) -> Counter[str]:
    """Number of rows with each label."""
    return Counter(name for rows in sets for row in rows.column("label") for name in row)


TASK = MultiLabel
