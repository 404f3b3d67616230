"""A class for a text, or for two."""

import difflib
import functools
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from fastkd.train.arrow_rows import UNLABELLED, Encoded, Rows
from fastkd.train.classes import (
    MOST_CLASSES_SHOWN,
    class_names,
    meaning,
    read_as_ids,
    whole_numbers,
)
from fastkd.train.corpus import Corpus
from fastkd.train.errors import InputError, nearest
from fastkd.train.evaluation import doubt, evaluate
from fastkd.train.glue import Glue
from fastkd.train.label_values import as_name, as_number
from fastkd.train.tasks.base import ClassTask, FittedTask, LabelInfo, Task, probabilities
from fastkd.train.tasks.regression import Regression

# What spreadsheets and data frames write where a label is missing.
NOT_LABELS = {"nan", "null", "none", "n/a", "#n/a", "<na>"}


@dataclass(frozen=True)
class Classification(ClassTask):
    """One of two or more classes; labels that are real numbers make it a `Regression`."""

    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "mcc", "f1")
    default_metrics: ClassVar[tuple[str, ...]] = ("accuracy",)

    #: The class whose F1 is a score, where there are two: the data's second.
    positive: int = 1

    @classmethod
    def fit(cls, train: Rows, evals: dict[str, Rows], given: LabelInfo) -> FittedTask:
        regression = {"classes": False, "numbers": True}.get(given.labels)
        if regression is None and given.glue is not None:
            regression = given.glue.regression
        if regression is None:
            regression = given.declared_classes is None and is_regression(train)
        if regression:
            return Regression.fit(train, evals, given)
        anything = given.labels == "classes" or given.declared_classes is not None
        rest, notes = None, []
        if not anything:
            (train, rest), *others = map(with_labels, (train, *evals.values()))
            evals = {name: rows for name, (rows, _) in zip(evals, others, strict=True)}
            pairs = ((train, rest), *others)
            notes = [without(kept, out) for kept, out in pairs if out is not None]
        train, evals, names = encode(train, evals, given.declared_classes, anything)
        task = cls(tuple(names), given.declared_classes is not None or whole_numbers(names))
        return FittedTask(task, train, evals, rest, tuple(notes))

    def unlabelled(self, rows: Rows) -> Rows:
        return replace(rows, labels=np.full(len(rows), UNLABELLED))

    @classmethod
    def row_classes(cls, rows: Rows, glue: Glue | None = None) -> list[int] | None:
        if is_regression(rows) if glue is None else glue.regression:
            return None
        labels, which = rows.raw_labels
        groups = [UNLABELLED if _is_no_label(label) else i for i, label in enumerate(labels)]
        return np.array(groups)[which].tolist()

    def strata(self, rows: Rows) -> Sequence[int]:
        return np.asarray(rows.labels).tolist()

    def describe(self, corpus: Corpus) -> Iterator[str]:
        names, train = self.names, _counts(corpus.train)
        evals = sum(map(_counts, corpus.evals.values()), Counter())
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
        if len(names) == 2 and "f1" in corpus.metrics:
            yield f"f1 is that of class {names[self.positive]!r}"

    @classmethod
    def of(cls, config: Any, report: Mapping[str, Any] | None = None) -> Task:
        if config.num_labels == 1:
            return Regression.of(config, report)
        positive = 0 if (report or {}).get("f1_of") == 0 else 1
        return cls(tuple(class_names(config)), positive=positive)

    def fit_config(self, config: Any) -> None:
        super().fit_config(config)
        config.problem_type = "single_label_classification"

    def renumbered(self, classes: tuple[str, ...], new: list[int]) -> Task:
        return replace(self, classes=classes, positive=new[self.positive])

    def read_labels(self, rows: Rows, asked: str | None) -> tuple[Rows, tuple[str, ...]]:
        names, order = self.names, None
        if asked is not None:
            order = [name.strip() for name in asked.split(",")]
            if len(set(order)) != len(order) or len(order) != len(names):
                raise InputError(
                    f"--label-order {asked}: must name the data's label for each class of the "
                    f"model, and they are {', '.join(names)}"
                )
        rows, bare = with_labels(rows)
        notes = [] if bare is None else [without(rows, bare)]
        rows, reading = to_classes(rows, names, order)
        return rows, tuple(filter(None, (*notes, reading)))

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        return evaluate(metrics, answers, examples.targets, self.positive)

    def sanity_warning(self, answers: Any, examples: Encoded) -> str | None:
        return doubt(answers, examples.targets, self.names)

    def predictions(self, answers: Any, examples: Encoded, tokenizer: Any) -> list[dict[str, Any]]:
        names, likely = self.names, torch.from_numpy(answers).double().softmax(-1)
        return [{"label": names[int(x.argmax())], **probabilities(names, x)} for x in likely]

    def short_answers(self, answers: Any, examples: Encoded) -> list[Any]:
        return answers.argmax(-1).tolist()

    def references(self, examples: Encoded) -> list[Any]:
        return examples.targets.tolist()

    def select_metrics(self, wanted: str | None, glue: Glue | None = None) -> tuple[str, ...]:
        return super().select_metrics(wanted, None if glue is None or glue.regression else glue)

    def report(self) -> dict[str, Any]:
        return {"labels": self.names, "f1_of": self.positive}


TASK = Classification


def encode(
    train: Rows,
    evals: dict[str, Rows],
    names: Sequence[str] | None = None,
    anything: bool = False,
) -> tuple[Rows, dict[str, Rows], list[str]]:
    """Labels as class ids in the order of ``names``.

    Without ``names`` the classes are those of the training rows: whole numbers in numeric order,
    else names in alphabetical order. Evaluation rows may spell a class otherwise ("Good" for
    "good"), as in `to_classes`. A label that training never shows is an error, and so is one that
    looks like a missing value, unless ``anything`` may be a class.
    """
    read = functools.partial(_class_of, anything=anything)
    seen, *_ = [set(rows.map_labels(read)) for rows in (train, *evals.values())]
    if names is None:
        names = sorted(seen)
        if whole_numbers(seen):  # 1 and 01 are two names of one number
            names.sort(key=int)
    if len(names) < 2:
        raise InputError(f"{train.source}: every label is {names[0]!r}; there is nothing to learn")
    class_of = _classes_by_name(names)

    def find(label: Any) -> int:
        name = as_name(label)
        found = class_of(name)
        if found is None:
            raise InputError(
                f"label {name!r:.60} does not occur in the training rows; {nearest(name, names)}"
            )
        return found

    labelled = {k: rows.labelled(find, int) for k, rows in evals.items()}
    return train.labelled(find, int), labelled, list(names)


def _classes_by_name(names: Sequence[str]) -> Callable[[str], int | None]:
    """The number of the class of a name, or of the one class with its meaning."""
    exact = {name: i for i, name in enumerate(names)}
    meanings = [meaning(name) for name in names]
    meant = {word: i for i, word in enumerate(meanings) if meanings.count(word) == 1}
    return lambda name: exact.get(name, meant.get(meaning(name)))


def with_labels(rows: Rows) -> tuple[Rows, Rows | None]:
    """The rows that have a class, and those that -100 marks as having none."""
    labels, which = rows.raw_labels
    bare = np.array([_is_no_label(label) for label in labels])[which]
    if not bare.any():
        return rows, None
    if bare.all():
        raise InputError(f"{rows.source}: no row has a label, all are {UNLABELLED}")
    return rows.select(np.flatnonzero(~bare).tolist()), rows.select(np.flatnonzero(bare).tolist())


def _is_no_label(label: Any) -> bool:
    return as_number(label) == UNLABELLED


def to_classes(
    rows: Rows, names: Sequence[str], order: Sequence[str] | None = None
) -> tuple[Rows, str]:
    """Labels as ids of a finished model's classes: by name, by meaning, or the ids themselves.

    Those that ``order`` names are the classes in its order. How numbers were read is a line, else
    empty.
    """
    if order is not None:
        names = order
    class_of = _classes_by_name(names)
    numbered = order is None and not whole_numbers(names)
    numbered = numbered and whole_numbers(map(as_name, rows.raw_labels[0]))
    as_ids: set[int] = set()

    def find(label: Any) -> int:
        name = as_name(label)
        found = class_of(name)
        if found is None and numbered and 0 <= int(name) < len(names):
            found = int(name)
            as_ids.add(found)
        if found is None:
            raise InputError(f"label {name!r:.60} is no class of the model; {nearest(name, names)}")
        return found

    found = rows.labelled(find, int)
    return found, read_as_ids({i: str(i) for i in sorted(as_ids)}, names, rows.source)


def _class_of(label: Any, anything: bool) -> str:
    """The name that ``label`` is; with ``anything`` every word is one."""
    name = as_name(label) if isinstance(label, str | int | float) else ""
    if isinstance(label, float) and not math.isfinite(label):
        raise InputError(f"the label is {label}")
    if label is not None and not isinstance(label, str | int | float):
        raise InputError(f"the label is no word or number but {label!r:.40}")
    if not name:
        raise InputError("the label is empty")
    if not anything and name.casefold() in NOT_LABELS:
        why = "looks like a missing value; if it is a class, --labels classes"
        raise InputError(f"label {name!r} {why}")
    return name


def is_regression(train: Rows) -> bool:
    """Whether labels are real numbers: all numeric and not all whole."""
    labels, _ = train.raw_labels
    values = [as_number(label) for label in labels]
    bad = next((i for i, x in enumerate(values) if x is None), None)
    real = next((i for i, x in enumerate(values) if x is not None and x != int(x)), None)
    if real is not None and bad is not None:
        rows = train.first_row_with_label(bad), train.first_row_with_label(real)
        raise InputError(
            f"{train.source}, row {rows[0]}: label {as_name(labels[bad])!r:.60} is not a number "
            f"while row {rows[1]} has {as_name(labels[real])}; mend it, or pass --labels classes "
            "if these are names"
        )
    return real is not None


def without(labelled: Rows, rest: Rows) -> str:
    """How many rows have no label, a line."""
    count, total = len(rest), len(labelled) + len(rest)
    return f"{rest.source}: {count} of {total} rows have no label ({UNLABELLED})"


def _how_rare(corpus: Corpus, names: list[str], i: int, count: int) -> str:
    """What class ``i`` lacks, of which there are ``count`` training rows."""
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


def _counts(rows: Rows) -> Counter[int]:
    assert rows.labels is not None
    classes, counts = np.unique(rows.labels, return_counts=True)
    return Counter(dict(zip(classes.tolist(), counts.tolist(), strict=True)))
