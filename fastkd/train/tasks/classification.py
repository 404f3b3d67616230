"""A class for a text, or for two."""

import difflib
import json
import math
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fastkd._core.extras import require
from fastkd.train.arrow_rows import PROBABILITIES, UNLABELLED, Encoded, Rows
from fastkd.train.errors import InputError, nearest
from fastkd.train.files import Columns
from fastkd.train.glue import Glue
from fastkd.train.labels import (
    MOST_CLASSES_SHOWN,
    SUM_TOLERANCE,
    as_number,
    class_names,
    classes_by_name,
    in_order,
    meaning,
    read_as_ids,
    read_distribution,
    whole_numbers,
    with_classes_of,
)
from fastkd.train.tasks import base
from fastkd.train.tasks.regression import Regression

# Values that spreadsheets and data frames write for a missing label.
NOT_LABELS = {"nan", "null", "none", "n/a", "#n/a", "<na>"}


@dataclass(frozen=True)
class Classification(base.ClassTask):
    """One of two or more classes; labels that are real numbers make it a `Regression`.

    A label may be a distribution over the classes: the target of the cross-entropy. Everything else
    takes its most probable class.
    """

    metrics = ("accuracy", "mcc", "f1", base.AGREEMENT)
    teacher_metrics = frozenset({base.AGREEMENT})
    default_metrics = ("accuracy",)
    problem = "single_label_classification"
    no_label = UNLABELLED
    by_class = True
    two_tokenizers = "texts"

    #: The class whose F1 is a metric, where there are two; None: the second.
    f1_class: str | None = None
    #: Whether labels of the training are distributions.
    soft: bool = False

    @property
    def positive(self) -> int:
        """The id of `f1_class`."""
        return 1 if self.f1_class is None else self.classes.index(self.f1_class)

    @classmethod
    def row(cls, record: dict[str, Any], columns: Columns, where: str) -> dict[str, Any]:
        """A label may be a distribution, a list in the order of the classes or an object by their
        names, also as JSON."""
        label = record.get(columns.label or "")
        found = read_distribution(label) if isinstance(label, str) else label
        if isinstance(found, Mapping):  # Parquet has None for the names of other rows
            found = {str(name).strip(): x for name, x in found.items() if x is not None}
        elif not isinstance(found, list):
            return super().row(record, columns, where)
        what = f"{where}: label {label!r:.60}"
        values = [*(found.values() if isinstance(found, Mapping) else found)]
        if not values or any(isinstance(x, bool) or not isinstance(x, int | float) for x in values):
            raise InputError(
                f"{what} is no distribution over the classes: its entries are no numbers"
            )
        wrong = next((x for x in values if not 0 <= x <= 1), None)
        if wrong is not None:
            raise InputError(f"{what} has the probability {wrong}; probabilities are 0 to 1")
        total = math.fsum(values)
        if abs(total - 1) > SUM_TOLERANCE:
            raise InputError(f"{what}: its probabilities sum to {total:g}, not to 1")
        row = super().row(record, replace(columns, label=None), where)
        return {**row, "label": json.dumps(found)}

    @classmethod
    def fit(cls, train: Rows, evals: dict[str, Rows], given: base.LabelInfo) -> base.Task:
        regression = {"classes": False, "numbers": True}.get(given.labels)
        if regression is None and given.glue is not None:
            regression = given.glue.regression
        distributions = [*filter(None, map(read_distribution, train.raw_labels[0]))]
        if regression is None:
            regression = given.declared_classes is None and is_regression(train)
        if regression:
            return Regression()
        names = given.declared_classes
        if names is None:
            if given.labels != "classes":
                train, _ = split_unlabelled(train)
                train.map_labels(_check_present)
            found = {name for name in train.raw_labels[0] if read_distribution(name) is None}
            found.update(*(one for one in distributions if isinstance(one, dict)))
            size = max((len(one) for one in distributions if isinstance(one, list)), default=0)
            names = in_order(found)
            if size and not names:  # lists alone: numbers, or the names of a head
                head = list(given.head or ())
                names = head if len(head) == size else [str(i) for i in range(size)]
        data, names = names, with_classes_of(names, given.head or ())
        if len(names) < 2:
            raise InputError(
                f"{train.source}: every label is {names[0]!r}; there is nothing to learn"
            )
        numbered = given.declared_classes is not None or whole_numbers(names)
        of_f1 = names[1] if len(names) == len(data) else in_order(names)[1]
        return cls(tuple(names), numbered, of_f1, bool(distributions))

    def read_labels(
        self, rows: Rows, unknown: str = base.UNKNOWN, names: Sequence[str] | None = None
    ) -> base.Prepared:
        """``rows`` with class ids; ``names`` are the data's labels in the order of the classes.

        A label is one of the names, or has the meaning of one of them ("Good" is "good").
        """
        names = names or self.classes
        class_of = classes_by_name(names)

        def find(name: str) -> int:
            found = class_of(name)
            if found is None:
                raise InputError(f"label {name!r:.60} {unknown}; {nearest(name, names)}")
            return found

        def distribution(label: str) -> np.ndarray:
            found, p = read_distribution(label), np.zeros(len(names))
            if isinstance(found, list) and len(found) != len(names):
                raise InputError(
                    f"label {label!r:.60} has {len(found)} probabilities, and there are "
                    f"{len(names)} classes"
                )
            entries = found or {label: 1.0}
            pairs = entries.items() if isinstance(entries, dict) else enumerate(entries)
            for name, x in pairs:
                p[name if isinstance(name, int) else find(name)] += x
            return p / p.sum()

        rest, notes = None, []
        if UNLABELLED not in map(as_number, self.classes):
            total = len(rows)
            rows, rest = split_unlabelled(rows)
            if rest is not None:
                count = f"{len(rest)} of {total} rows have no label ({UNLABELLED})"
                notes = [f"{rows.source}: {count}"]
        if not any(map(read_distribution, rows.raw_labels[0])):
            return base.Prepared(self, rows.with_labels(rows.map_labels(find)), tuple(notes), rest)
        notes.append(
            f"{rows.source}: labels are probabilities; scores take the most probable class"
        )
        rows = rows.with_probabilities(rows.map_labels(distribution))
        return base.Prepared(self, rows, tuple(notes), rest)

    def encode(self, batch: dict[str, list], tokenizer: Any, max_length: int) -> base.Tokens:
        tokens = super().encode(batch, tokenizer, max_length)
        if not self.soft or "labels" not in tokens:
            return tokens
        classes = range(len(self.classes))
        hard = [[math.nan if y == UNLABELLED else float(y == i) for i in classes]
                for y in tokens["labels"]]  # fmt: skip
        return {**tokens, PROBABILITIES: batch.get(PROBABILITIES, hard)}

    def describe(self, corpus: base.Corpus) -> Iterator[str]:
        names, train = self.names, Counter(corpus.train.labels.tolist())
        evals = Counter(y for rows in corpus.evals.values() for y in rows.labels.tolist())
        if len(names) <= MOST_CLASSES_SHOWN:
            counts = (f"{name} {train[i]}/{evals[i]}" for i, name in enumerate(names))
            yield f"classes, training/evaluation rows: {', '.join(counts)}"
        else:
            yield f"{len(names)} classes"
        alike: dict[str, str] = {}
        for name in names:
            other = alike.setdefault(meaning(unicodedata.normalize("NFKC", name)), name)
            if other != name:
                yield f"warning: classes {other!r} and {name!r} look alike"
        rare = [i for i in range(len(names)) if train[i] < 2 or not evals[i]]
        for i in rare[:MOST_CLASSES_SHOWN]:
            yield f"warning: class {names[i]!r} has {_how_rare(corpus, names, i, train[i])}"
        if len(rare) > MOST_CLASSES_SHOWN:
            yield f"warning: {len(rare) - MOST_CLASSES_SHOWN} more classes are as rare"
        yield from self.explain(corpus.metrics)

    def explain(self, metrics: Sequence[str]) -> Iterator[str]:
        if "f1" in metrics:
            two = f"that of class {self.classes[self.positive]!r}"
            yield f"f1 is {two if len(self.classes) == 2 else 'the mean of those of all classes'}"

    @classmethod
    def of(cls, config: Any, report: Mapping[str, Any] | None = None) -> base.Task:
        if config.num_labels == 1:
            return Regression.of(config, report)
        names = class_names(config)
        return cls(tuple(names), f1_class=names[(report or {}).get("f1_of") != 0])

    def prepare(self, rows: Rows, labelled: bool = True, order: str | None = None) -> base.Prepared:
        """Whole numbers that name no class are read as class ids."""
        if not labelled:
            return super().prepare(rows, labelled)
        names = self.names
        if order is not None:
            given = [name.strip() for name in order.split(",")]
            if len(set(given)) != len(given) or len(given) != len(names):
                raise InputError(
                    f"--label-order {order}: must name the data's label for each class of the "
                    f"model, and they are {', '.join(names)}"
                )
            return self.read_labels(rows, names=given)
        class_of = classes_by_name(names)
        labels = [label for label in rows.raw_labels[0] if as_number(label) != UNLABELLED]
        named = whole_numbers(names) or any(class_of(label) is not None for label in labels)
        if named or not whole_numbers(labels):
            return self.read_labels(rows)
        found = self.read_labels(rows, names=[str(i) for i in range(len(names))])
        seen = {i: str(i) for i in np.unique(found.rows.labels).tolist()}
        reading = read_as_ids(seen, names, rows.source)
        return found._replace(notes=(*found.notes, reading) if reading else found.notes)

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        """F1 is that of `positive` of two classes, or the mean over more.

        The correlation with a constant is 0.
        """
        labels, found = examples.labels, answers.argmax(-1)
        scores = {"accuracy": (found == labels).mean()}
        if scores.keys() >= {*metrics}:  # without the second that scikit-learn's import takes
            return scores
        library: Any = require("sklearn.metrics", "train")
        average = "binary" if answers.shape[-1] == 2 else "macro"
        constant = np.ptp(found) == 0 or np.ptp(labels) == 0
        options = {"average": average, "pos_label": self.positive, "zero_division": 0.0}
        mcc = 0.0 if constant else library.matthews_corrcoef(labels, found)
        return {**scores, "mcc": mcc, "f1": library.f1_score(labels, found, **options)}

    def sanity_warning(self, answers: Any, examples: Encoded) -> str | None:
        return useless_classes(answers.argmax(-1), examples.labels, self.names)

    def predictions(self, answers: Any, examples: Encoded) -> list[dict[str, Any]]:
        names, likely = self.names, torch.from_numpy(answers).double().softmax(-1)
        return [{"label": names[int(x.argmax())], **base.probabilities(names, x)} for x in likely]

    def short_answers(self, answers: Any, examples: Encoded) -> list[Any]:
        return answers.argmax(-1).tolist()

    def report(self) -> dict[str, Any]:
        return {"labels": self.names, "f1_of": self.positive}


TASK = Classification


def _check_present(label: str) -> None:
    """Raise for a label that looks like a missing value."""
    if label.casefold() in NOT_LABELS:
        raise InputError(
            f"label {label!r} looks like a missing value; if it is a class, --labels classes"
        )


def split_unlabelled(rows: Rows) -> tuple[Rows, Rows | None]:
    """Rows with a class, and rows with label -100, which have none."""
    labels, which = rows.raw_labels
    empty = np.array([as_number(label) == UNLABELLED for label in labels])[which]
    if not empty.any():
        return rows, None
    if empty.all():
        raise InputError(f"{rows.source}: no row has a label, all are {UNLABELLED}")
    return rows.select(np.flatnonzero(~empty).tolist()), rows.select(np.flatnonzero(empty).tolist())


def row_classes(rows: Rows, glue: Glue | None = None) -> list[int] | None:
    """Class ids of rows as read from the source; None if the labels are real numbers."""
    if is_regression(rows) if glue is None else glue.regression:
        return None
    labels, which = rows.raw_labels
    ids = [UNLABELLED if as_number(x) == UNLABELLED else i for i, x in enumerate(labels)]
    return np.array(ids)[which].tolist()


def is_regression(train: Rows) -> bool:
    """Whether labels are real numbers: all numeric and not all whole."""
    labels, _ = train.raw_labels
    values = [as_number(label) for label in labels]
    bad = next((i for i, x in enumerate(values) if x is None), None)
    real = next((i for i, x in enumerate(values) if x is not None and x != int(x)), None)
    if real is not None and bad is not None:
        rows = train.first_row_with_label(bad), train.first_row_with_label(real)
        raise InputError(
            f"{train.source}, row {rows[0]}: label {labels[bad]!r:.60} is not a number "
            f"while row {rows[1]} has {labels[real]}; mend it, or pass --labels classes "
            "if these are names"
        )
    return real is not None


def _how_rare(corpus: base.Corpus, names: list[str], i: int, count: int) -> str:
    """Rows that class ``i`` lacks; it has ``count`` training rows."""
    if not count:
        return "no training row"
    name = names[i]
    others = [other for other in names if other != name and not name.isdecimal()]
    near = difflib.get_close_matches(name, others, n=1)
    hint = f"; is it {near[0]!r}, misspelled?" if near else ""
    if count > 1:
        return f"no evaluation row{hint}"
    number = corpus.train.number(int(np.argmax(corpus.train.labels == i)))
    return f"a single training row, row {number}{hint}"


def useless_classes(answers: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> str | None:
    """Why class ids look useless: constant, or no better than a random permutation."""
    if np.ptp(labels) == 0:
        return None
    if np.ptp(answers) == 0:
        return f"are all {names[answers[0]]!r}"
    # Accuracy above that of randomly permuted answers.
    rows, classes = len(labels), len(names)
    given, true = (np.bincount(x, minlength=classes) / rows for x in (answers, labels))
    right, chance = int((answers == labels).sum()), float(given @ true)
    stats: Any = require("scipy.stats", "train")
    better = stats.binomtest(right, rows, chance, alternative="greater").pvalue < 0.05
    return None if better else "are no better than chance"
