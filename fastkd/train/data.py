"""Labelled text for `fastkd distill`: GLUE tasks, any hub dataset, local TSV, CSV and JSON lines.

Every row is read and checked before anything is trained; a mistake is one InputError that names
the option, or the file and the row (counted as an editor does: the first line is row 1).
"""

import difflib
import itertools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastkd._core.extras import require
from fastkd.train.errors import InputError, nearest
from fastkd.train.files import check_file, first_row, is_text, records
from fastkd.train.hub import hub_answers, why_not
from fastkd.train.rows import Rows, file_fingerprint, label_json, stored
from fastkd.train.settings import Source
from fastkd.train.tasks import (
    CLASSIFICATION_METRICS,
    GLUE,
    REGRESSION_METRICS,
    TASKS,
    Columns,
    Task,
)

# The class of a row without one, as transformers has it.
UNLABELLED = -100
TEST = "test"
# What labels become.
LARGEST = float(torch.finfo(torch.float32).max)
MOST_CLASSES_SHOWN = 20
# What spreadsheets and data frames write where a label is missing.
NOT_LABELS = {"nan", "null", "none", "n/a", "#n/a", "<na>"}


@dataclass(frozen=True)
class Corpus:
    """Training and evaluation rows with encoded labels.

    ``names`` are the class names, label i being ``names[i]``; None for regression. They are
    ``numbered`` if that order is the data's own: whole numbers, or what a data set declares.
    ``evals`` maps the suffix of a metric's name to its rows: "" for the main set, "mm" for MNLI
    mismatched. ``test`` rows are scored once, at the end; ``unlabelled`` ones carry the label
    that losses on labels leave out.
    """

    train: Rows
    evals: dict[str, Rows]
    names: list[str] | None
    metrics: tuple[str, ...]
    numbered: bool = True
    test: Rows | None = None
    unlabelled: Rows | None = None
    #: The class whose F1 is a score, where there are two: the data's second.
    positive: int = 1
    #: Lines to be read: how many rows are marked as having no label, ...
    without_labels: tuple[str, ...] = ()
    #: ... and how numbers were read as the classes of a head.
    reading: str = ""

    def place(self, index: int) -> tuple[str, int]:
        """Source and number of a row to train on, the unlabelled ones behind the others."""
        behind = index - len(self.train)
        if behind < 0 or self.unlabelled is None:
            return self.train.source, self.train.number(index)
        return self.unlabelled.source, self.unlabelled.number(behind)

    @property
    def num_labels(self) -> int:
        return 1 if self.names is None else len(self.names)


def read_file(path: Path, columns: Columns, option: str, every: bool = False) -> Rows:
    """Read and check the rows of a file, see `fastkd.train.files`; messages name ``option``.

    Without a label column they have no labels. A row without text is an error, unless ``every``
    one is wanted.
    """

    def rows() -> Iterator[dict[str, Any]]:
        settled = None
        for number, record in records(path, columns.header, option, every):
            settled = settled or _settle_columns(columns, record, str(path))
            where = f"{path}, row {number}"
            row = _checked(record, settled, where, number)
            if not every and not holds_text(row["text"], row.get("pair", "")):
                raise InputError(f"{where}: column {settled.text!r} is empty")
            yield row
        if settled is None:
            raise InputError(f"{option} {path}: the file has no rows")

    check_file(path, option)
    parts = (file_fingerprint(path), "".join(path.suffixes[-2:]), repr((columns, every)))
    return stored(str(path), rows, parts, columns.pair is not None, columns.label is not None)


def holds_text(*texts: str) -> bool:
    """Whether there is anything to read in them."""
    return any(text.strip() for text in texts)


def _checked(record: dict, columns: Columns, where: str, number: int) -> dict[str, Any]:
    """The row that is kept of ``record``."""
    row = {"number": number, "text": _text_of(record, columns.text, where)}
    if columns.pair is not None:
        row["pair"] = _text_of(record, columns.pair, where)
    if columns.label is not None:
        row["label"] = label_json(
            _whole(_field(record, columns.label, where), columns.label, where)
        )
    return row


def _settle_columns(columns: Columns, record: dict, source: str) -> Columns:
    """``columns`` with the text column found, after checking that all of them are there."""
    text = columns.text
    if text is None:
        found = [name for name in ("text", "sentence") if name in record]
        if len(found) != 1:
            raise InputError(
                f"{source}: which column is the text? Pass --text-column; {nearest('', record)}"
            )
        text = found[0]
    for option, name in (
        ("--text-column", text),
        ("--text-pair-column", columns.pair),
        ("--label-column", columns.label),
    ):
        if name is not None and name not in record:
            raise InputError(f"{source}: no column {name!r} ({option}); {nearest(name, record)}")
    return replace(columns, text=text)


def _field(record: dict, name: str | None, where: str) -> Any:
    assert name is not None
    if name not in record:
        raise InputError(f"{where}: no column {name!r}; {nearest(name, record)}")
    return record[name]


def _text_of(record: dict, name: str | None, where: str) -> str:
    value = _field(record, name, where)
    if not isinstance(value, str):
        raise InputError(f"{where}: column {name!r} is not text but {value!r:.40}")
    return _whole(value, name, where)


def _whole(value: Any, name: str | None, where: str) -> Any:
    """``value``, after checking that UTF-8 can say it: JSON may hold halves of characters."""
    if isinstance(value, str) and re.search("[\ud800-\udfff]", value):
        raise InputError(f"{where}: column {name!r} holds half a character (a lone surrogate)")
    return value


def read_hub(
    name: str, config: str | None, split: str, columns: Columns, option: str
) -> tuple[Rows, list[str] | None]:
    """Read one split of a hub dataset; also its class names if the dataset declares them."""
    hub_answers()
    datasets = require("datasets", "train")
    try:
        data = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the hub client raises a dozen unrelated types
        raise InputError(f"{option} {name}, split {split!r}: {why_not(error)}") from error
    source = f"{name}{f'/{config}' if config else ''}, split {split}"
    if not len(data):
        raise InputError(f"{option} {source}: the split is empty")
    columns = _settle_columns(columns, dict.fromkeys(data.column_names), source)
    declared = getattr(data.features[columns.label], "names", None)
    wanted = [name for name in (columns.text, columns.pair, columns.label) if name is not None]

    def rows() -> Iterator[dict[str, Any]]:
        for number, record in enumerate(data.select_columns(wanted), 1):
            where = f"{source}, row {number}"
            if declared is not None:
                label = record[columns.label]
                if label is None or label < 0:
                    raise InputError(f"{where}: no label (a hidden test split?)")
                record[columns.label] = declared[label]
            yield _checked(record, columns, where, number)

    parts = (data._fingerprint, repr(columns), repr(declared))
    return stored(source, rows, parts, columns.pair is not None), declared


def _as_number(label: Any) -> float | None:
    if isinstance(label, bool) or label is None or "_" in str(label):  # Python reads 1_0 as 10
        return None
    try:
        number = float(label)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST else None


def _as_name(label: Any) -> str:
    return label.strip() if isinstance(label, str) else str(label)


def _not_a_class(label: Any, anything: bool) -> str | None:
    """Why ``label`` is no class; with ``anything`` every word is one."""
    name = _as_name(label) if isinstance(label, str | int | float) else ""
    if isinstance(label, float) and not math.isfinite(label):
        return f"the label is {label}"
    if label is not None and not isinstance(label, str | int | float):
        return f"the label is no word or number but {label!r:.40}"
    if not name:
        return "the label is empty"
    if not anything and name.casefold() in NOT_LABELS:
        return f"label {name!r} looks like a missing value; if it is a class, --labels classes"
    return None


def is_regression(train: Rows) -> bool:
    """Whether labels are real numbers: all numeric and not all whole."""
    real = bad = None
    for number, label in train.raw_labels():
        value = _as_number(label)
        if value is None:
            bad = bad or (number, label)
        elif value != int(value):
            real = real or (number, label)
    if real is not None and bad is not None:
        raise InputError(
            f"{train.source}, row {bad[0]}: label {_as_name(bad[1])!r:.60} is not a number while "
            f"row {real[0]} has {_as_name(real[1])}; mend it, or pass --labels classes if these "
            "are names"
        )
    return real is not None


def encode(
    train: Rows,
    evals: dict[str, Rows],
    regression: bool,
    names: Sequence[str] | None = None,
    anything: bool = False,
) -> tuple[Rows, dict[str, Rows], list[str] | None]:
    """Labels as numbers: reals for regression, else class ids in the order of ``names``.

    Without ``names`` the classes are those of the training rows: whole numbers in numeric order,
    else names in alphabetical order. A label that training never shows is an error, and so is one
    that looks like a missing value, unless ``anything`` may be a class.
    """
    if regression:
        return to_reals(train), {k: to_reals(rows) for k, rows in evals.items()}, None
    seen = _classes(train, anything)
    for rows in evals.values():
        _classes(rows, anything)
    if names is None:
        names = sorted(seen)
        if _whole_numbers(seen):  # 1 and 01 are two names of one number
            names.sort(key=int)
    if len(names) < 2:
        raise InputError(f"{train.source}: every label is {names[0]!r}; there is nothing to learn")
    ids = {name: i for i, name in enumerate(names)}

    def find(rows: Rows, number: int, name: str) -> int:
        if name not in ids:
            raise InputError(
                f"{rows.source}, row {number}: label {name!r:.60} does not occur in "
                f"the training rows; {nearest(name, ids)}"
            )
        return ids[name]

    def to_ids(rows: Rows) -> Rows:
        return rows.labelled((find(rows, n, _as_name(x)) for n, x in rows.raw_labels()), int)

    return to_ids(train), {k: to_ids(rows) for k, rows in evals.items()}, list(names)


def _classes(rows: Rows, anything: bool) -> set[str]:
    """The names that the labels of ``rows`` are; see `_not_a_class`."""
    seen = set()
    for number, label in rows.raw_labels():
        why = _not_a_class(label, anything)
        if why:
            raise InputError(f"{rows.source}, row {number}: {why}")
        seen.add(_as_name(label))
    return seen


def _whole_numbers(names: Iterable[str]) -> bool:
    return all(re.fullmatch(r"-?\d{1,18}", name) for name in names)


def with_labels(rows: Rows) -> tuple[Rows, Rows | None]:
    """The rows that have a class, and those that -100 marks as having none."""
    bare = [i for i, (_, label) in enumerate(rows.raw_labels()) if _as_number(label) == UNLABELLED]
    if not bare:
        return rows, None
    if len(bare) == len(rows):
        raise InputError(f"{rows.source}: no row has a label, all are {UNLABELLED}")
    return rows.select(sorted(set(range(len(rows))).difference(bare))), rows.select(bare)


def to_classes(
    rows: Rows, names: Sequence[str], order: Sequence[str] | None = None
) -> tuple[Rows, str]:
    """Labels as ids of a finished model's classes: by name, by meaning, or the ids themselves.

    Those that ``order`` names are the classes in its order. How numbers were read is a line, else
    empty.
    """
    if order is not None:
        names = order
    exact = {name: i for i, name in enumerate(names)}
    meanings = [meaning(name) for name in names]
    meant = {word: i for i, word in enumerate(meanings) if meanings.count(word) == 1}
    numbered = order is None and not _whole_numbers(names)
    numbered = numbered and _whole_numbers({_as_name(label) for _, label in rows.raw_labels()})
    as_ids: set[int] = set()

    def find(number: int, label: Any) -> int:
        name = _as_name(label)
        found = exact.get(name, meant.get(meaning(name)))
        if found is None and numbered and 0 <= int(name) < len(names):
            found = int(name)
            as_ids.add(found)
        if found is None:
            raise InputError(
                f"{rows.source}, row {number}: label {name!r:.60} is no class of the model; "
                f"{nearest(name, names)}"
            )
        return found

    found = rows.labelled((find(*row) for row in rows.raw_labels()), int)
    return found, read_as_ids({i: str(i) for i in sorted(as_ids)}, names, rows.source)


def read_as_ids(labels: Mapping[int, str], names: Sequence[str], where: str) -> str:
    """How numbered ``labels`` are read as the classes ``names`` of a head, by id; a line.

    Raises:
        InputError: such classes are usually numbered the other way round.
    """
    if not labels or all(name == f"LABEL_{i}" for i, name in enumerate(names)):
        return ""
    place = {meaning(name): i for i, name in enumerate(names)}
    for low, high in USUAL_ORDER:
        if place.get(low, -1) > place.get(high, len(names)):
            raise InputError(
                f"{where}: label {place[high]} is the model's class {names[place[high]]!r} by its "
                f"number, and {names[place[low]]!r} as such labels are usually numbered; pass "
                f"--label-order with the data's labels in the model's order ({', '.join(names)})"
            )
    shown = [f"{label} is {names[i]!r}" for i, label in labels.items()][:MOST_CLASSES_SHOWN]
    return f"labels are read as numbers of the model's classes: {', '.join(shown)}"


# Meanings of which the first has the smaller number in GLUE and wherever numbers are a scale.
USUAL_ORDER = (
    ("negative", "positive"),
    ("no", "yes"),
    ("unacceptable", "acceptable"),
    ("notequivalent", "equivalent"),
    ("entailment", "notentailment"),
    ("entailment", "contradiction"),
)
# Words that mean the same class.
SYNONYMS = {
    word: group[0]
    for group in (
        ("negative", "neg"),
        ("positive", "pos"),
        ("yes", "true"),
        ("no", "false"),
        ("entailment", "entail", "entails"),
        ("contradiction", "contradict", "contradicts"),
        ("notentailment", "nonentailment"),
        ("equivalent", "paraphrase"),
        ("notequivalent", "notparaphrase"),
        ("acceptable", "grammatical"),
        ("unacceptable", "ungrammatical"),
    )
    for word in group
}


def meaning(name: str) -> str:
    """A class's name without case, gaps and choice of synonym; of a number its value."""
    number = _as_number(name)
    if number is not None:
        return str(number)
    word = re.sub(r"[\s._-]+", "", name).casefold()
    return SYNONYMS.get(word, word) or name


def to_reals(rows: Rows) -> Rows:
    """Labels as real numbers."""

    def real(number: int, label: Any) -> float:
        value = _as_number(label)
        if value is None:
            raise InputError(
                f"{rows.source}, row {number}: label {_as_name(label)!r:.40} "
                f"is not a number of at most {LARGEST:.2g}, and this is a regression task"
            )
        return value

    return rows.labelled((real(*row) for row in rows.raw_labels()), float)


def load(source: Source) -> Corpus:
    """Read and check all rows that ``source`` names."""
    name, dataset = source.task, source.data
    if name is None and dataset in TASKS:
        name, dataset = dataset, None
    task = None if name is None else TASKS[name]
    declared = None
    if source.train is not None or source.evals is not None:
        train, evals = _read_files(source, task)
    else:
        train, evals, declared = _read_splits(source, name, dataset)

    regression = {"classes": False, "numbers": True}.get(source.labels)
    if regression is None and task is not None:
        regression = task.regression
    if regression is None:
        regression = declared is None and is_regression(train)
    anything = source.labels == "classes" or declared is not None
    if source.test is not None:
        evals[TEST] = read_file(
            source.test, file_columns(source.columns, task, source.test), "--test"
        )
    rest, bare = None, []
    if not regression and not anything:
        (train, rest), *others = map(with_labels, (train, *evals.values()))
        evals = {name: rows for name, (rows, _) in zip(evals, others, strict=True)}
        pairs = ((train, rest), *others)
        bare = [without(kept, out) for kept, out in pairs if out is not None]
    train, evals, names = encode(train, evals, regression, declared, anything)
    test, more = evals.pop(TEST, None), rest
    if source.unlabelled is not None:
        columns = file_columns(source.columns, task, source.unlabelled, labelled=False)
        more = read_file(source.unlabelled, columns, "--unlabelled")
        more = more if rest is None else rest.followed_by(more)
    return Corpus(
        train.sample(source.max_train_rows, source.seed),
        {k: rows.sample(source.max_eval_rows, source.seed) for k, rows in evals.items()},
        names,
        _metrics(source.metric, task, regression),
        declared is not None or _whole_numbers(names or ()),
        test,
        None if more is None else unlabelled(more, regression),
        without_labels=tuple(bare),
    )


def without(labelled: Rows, rest: Rows) -> str:
    """How many rows have no label, a line."""
    count, total = len(rest), len(labelled) + len(rest)
    return f"{rest.source}: {count} of {total} rows have no label ({UNLABELLED})"


def unlabelled(rows: Rows, regression: bool) -> Rows:
    """With the label of a row without one."""
    label, kind = (math.nan, float) if regression else (UNLABELLED, int)
    return rows.labelled(itertools.repeat(label, len(rows)), kind)


def _read_files(source: Source, task: Task | None) -> tuple[Rows, dict[str, Rows]]:
    if source.evals is None:
        raise InputError("--eval is missing: name the file to evaluate on")
    if source.train is None:
        raise InputError("--train is missing: name the file to train on")
    train = read_file(source.train, file_columns(source.columns, task, source.train), "--train")
    columns = file_columns(source.columns, task, source.evals)
    return train, {"": read_file(source.evals, columns, "--eval")}


def _read_splits(
    source: Source, name: str | None, dataset: str | None
) -> tuple[Rows, dict[str, Rows], list[str] | None]:
    """Training and evaluation splits of a GLUE task, or of any data set on the hub."""
    config, columns, option = source.data_config, Columns(), "--data"
    eval_splits: tuple[str, ...] = ("validation",)
    if name is not None:
        task = TASKS[name]
        dataset, config, option = GLUE, name, "--task"
        eval_splits, columns = task.eval_splits, task.hub
    if source.eval_split is not None:
        eval_splits = (source.eval_split,)
    columns = _override(source.columns, columns)
    assert dataset is not None
    train, declared = read_hub(dataset, config, source.train_split, columns, option)
    evals: dict[str, Rows] = {}
    for split in eval_splits:
        suffix = "mm" if split == "validation_mismatched" and evals else ""
        evals[suffix], _ = read_hub(dataset, config, split, columns, option)
    return train, evals, declared


def _metrics(wanted: str | None, task: Task | None, regression: bool) -> tuple[str, ...]:
    """The scores to report, the one that picks the best first."""
    possible: tuple[str, ...] = REGRESSION_METRICS if regression else CLASSIFICATION_METRICS
    metrics = possible[:2] if regression else possible[:1]
    if task is not None and task.regression == regression:
        metrics = task.metrics
    if wanted is None:
        return metrics
    if wanted not in possible:
        kind = "regression" if regression else "classification"
        raise InputError(f"--metric {wanted!r} does not score {kind}; {nearest(wanted, possible)}")
    return (wanted, *(m for m in metrics if m != wanted))


def describe(corpus: Corpus) -> Iterator[str]:
    """What the rows hold, and what looks like a mistake in them: lines to be read."""
    yield from corpus.without_labels
    if corpus.names is not None:
        names, train = corpus.names, _counts(corpus.train)
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
            yield f"warning: class {names[i]!r} has {_how_rare(corpus, i, train[i])}"
        if len(rare) > MOST_CLASSES_SHOWN:
            yield f"warning: {len(rare) - MOST_CLASSES_SHOWN} more classes are as rare"
        if len(names) == 2 and "f1" in corpus.metrics:
            yield f"f1 is that of class {names[corpus.positive]!r}"
    if corpus.unlabelled is not None:
        yield f"{len(corpus.unlabelled)} rows without labels"
    scored = [("evaluation", [*corpus.evals.values()])]
    if corpus.test is not None:
        scored.insert(0, ("test", [corpus.test]))
    for kind, sets in scored:
        for name, rows in (("training", corpus.train), ("unlabelled", corpus.unlabelled)):
            twice = 0 if rows is None else _also_in(rows, sets)
            if twice:
                total = sum(map(len, sets))
                yield f"warning: {twice} of the {total} {kind} rows are {name} rows too"


def _how_rare(corpus: Corpus, i: int, count: int) -> str:
    """What class ``i`` lacks, of which there are ``count`` training rows."""
    assert corpus.names is not None
    if not count:
        return "no training row"
    name = corpus.names[i]
    others = [other for other in corpus.names if other != name and not name.isdecimal()]
    near = difflib.get_close_matches(name, others, n=1)
    hint = f"; is it {near[0]!r}, misspelled?" if near else ""
    if count > 1:
        return f"no evaluation row{hint}"
    number = corpus.train.number(int(np.argmax(corpus.train.labels == i)))
    return f"a single training row, row {number}{hint}"


def _counts(rows: Rows) -> Counter[int]:
    """How many rows of each class there are."""
    assert rows.labels is not None
    classes, counts = np.unique(rows.labels, return_counts=True)
    return Counter(dict(zip(classes.tolist(), counts.tolist(), strict=True)))


def _also_in(train: Rows, sets: list[Rows]) -> int:
    """How many rows of ``sets`` have the texts of a training row; only their hashes are kept."""
    wanted = Counter(hash(texts) for rows in sets for texts in rows.both_texts())
    return sum(wanted.pop(hash(texts), 0) for texts in train.both_texts())


def _override(asked: Columns, columns: Columns) -> Columns:
    return Columns(
        asked.text or columns.text,
        asked.pair or columns.pair,
        asked.label or columns.label,
        columns.header and asked.header,
    )


def file_columns(asked: Columns, task: Task | None, path: Path, labelled: bool = True) -> Columns:
    """GLUE's own layout for a task's files, or the hub's columns where the header has them.

    The names that are ``asked`` for go before these.
    """
    columns = Columns()
    if task is not None:
        columns = task.file
        hub = {name for name in (task.hub.text, task.hub.pair, task.hub.label) if name is not None}
        if asked.header and hub <= set(first_row(path)):
            columns = task.hub
    elif not asked.header:
        needed = {"--text-column": asked.text}
        if labelled:
            needed["--label-column"] = asked.label
        if None in needed.values():
            raise InputError(
                f"--no-header needs {' and '.join(needed)} as numbers, the first being 0"
            )
    columns = _override(asked, columns)
    if is_text(path):
        if columns.pair is not None:
            raise InputError(
                f"{path}: a line is one text, and two are compared; use another format"
            )
        columns = replace(columns, text="text", header=True)
    return columns if labelled else replace(columns, label=None)
