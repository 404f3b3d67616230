"""The rows of `fastkd distill`: GLUE tasks, any hub dataset, local files, as their task reads them.

Every row is read and checked before training. An error is one InputError with the option, or with
the file and the row.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastkd._core.extras import require
from fastkd.train import files, tasks
from fastkd.train.arrow_rows import Rows, file_fingerprint, stored
from fastkd.train.encoding import code_fingerprints
from fastkd.train.errors import InputError
from fastkd.train.glue import HUB, Glue
from fastkd.train.hub import hub_answers, why_not
from fastkd.train.input_columns import Columns
from fastkd.train.settings import Source
from fastkd.train.tasks.base import ClassTask, Corpus, LabelInfo, Task

TEST = "test"


def check_file(path: Path, option: str, task: type[Task]) -> None:
    """Raise unless ``path`` is a file, or a folder, that ``task`` can read."""
    files.check_file(path, option, task.suffixes, task.folders)


def read_file(
    path: Path, columns: Columns, option: str, every: bool = False, task: type[Task] | None = None
) -> Rows:
    """Read and check the rows of a file for a task; errors name ``option``.

    Without a label column they have no labels. A row without text is an error, unless ``every``
    row is read.
    """
    kind = tasks.named(None) if task is None else task

    def rows() -> Iterator[dict[str, Any]]:
        settled = None
        for number, record in kind.records(path, columns.header, option, every):
            settled = settled or kind.resolve_columns(columns, record, str(path))
            where = f"{path}, row {number}"
            row = {"number": number, **kind.row(record, settled, where)}
            empty = None if every else empty_column(kind, row)
            if empty is not None:
                raise InputError(f"{where}: column {getattr(settled, empty, empty)!r} is empty")
            yield row
        if settled is None:
            raise InputError(f"{option} {path}: the file has no rows")

    check_file(path, option, kind)
    parts = (file_fingerprint(path), "".join(path.suffixes[-2:]), repr((columns, every)))
    return stored(str(path), rows, (*parts, *code_fingerprints(kind)), _stored(kind, columns))


def _stored(task: type[Task], columns: Columns) -> dict[str, Any]:
    """The stored columns of a task with these ``columns``, and their types."""
    missing = [name for name in task.optional if getattr(columns, name) is None]
    return {name: kind for name, kind in task.stored.items() if name not in missing}


def empty_column(task: type[Task], row: dict[str, Any]) -> str | None:
    """The stored column without text in a row that has too little text; else None."""
    parts = [
        (name, text)
        for name in task.stored
        if name != "label" and row.get(name) is not None
        for text in _listed(row[name])
    ]
    blank = [name for name, text in parts if not text.strip()]
    if task.every_text:
        return blank[0] if blank else None
    return "text" if len(blank) == len(parts) else None


def _listed(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


def read_hub(
    name: str,
    config: str | None,
    split: str,
    columns: Columns,
    option: str,
    task: type[Task] | None = None,
) -> tuple[Rows, list[str] | None]:
    """Read one split of a hub dataset; also its class names if the dataset declares them."""
    kind = tasks.named(None) if task is None else task
    hub_answers()
    datasets = require("datasets", "train")
    try:
        data = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the hub client raises a dozen unrelated types
        raise InputError(f"{option} {name}, split {split!r}: {why_not(error)}") from error
    source = f"{name}{f'/{config}' if config else ''}, split {split}"
    if not len(data):
        raise InputError(f"{option} {source}: the split is empty")
    columns = kind.resolve_columns(columns, dict.fromkeys(data.column_names), source)
    feature = None
    if columns.label is not None and issubclass(kind, ClassTask):
        feature = data.features[columns.label]
        feature = getattr(feature, "feature", feature)  # of a list
    classes: list[str] | None = getattr(feature, "names", None)

    def class_name(label: Any, where: str) -> Any:
        if isinstance(label, list):
            return [class_name(i, where) for i in label]
        if label is None or label < 0:
            raise InputError(f"{where}: no label (a hidden test split?)")
        assert classes is not None
        return classes[label]

    def rows() -> Iterator[dict[str, Any]]:
        for number, record in enumerate(data, 1):
            where = f"{source}, row {number}"
            if classes is not None:
                record[columns.label] = class_name(record[columns.label], where)
            yield {"number": number, **kind.row(record, columns, where)}

    parts = (data._fingerprint, repr(columns), repr(classes), *code_fingerprints(kind))
    return stored(source, rows, parts, _stored(kind, columns)), classes


def load(source: Source) -> Corpus:
    """Read and check all rows that ``source`` names."""
    kind = tasks.of_file(source.kind, source.train)
    glue = source.glue
    declared_classes = None
    if source.train is not None or source.evals is not None:
        train, evals = _read_files(source, kind, glue)
    else:
        train, evals, declared_classes = _read_splits(source, kind, glue)
    if source.test is not None:
        columns = file_columns(source.columns, glue, source.test, kind)
        evals[TEST] = read_file(source.test, columns, "--test", task=kind)
    fitted = kind.fit(train, evals, LabelInfo(source.labels, glue, declared_classes))
    task, train, evals, more = fitted.task, fitted.train, fitted.evals, fitted.without_labels
    test = evals.pop(TEST, None)
    if source.unlabelled is not None:
        check_unlabelled(task)
        columns = file_columns(source.columns, glue, source.unlabelled, kind, labelled=False)
        own = more
        more = read_file(source.unlabelled, columns, "--unlabelled", task=kind)
        more = more if own is None else own.followed_by(more)
    return Corpus(
        train.sample(source.max_train_rows, source.seed),
        {k: rows.sample(source.max_eval_rows, source.seed) for k, rows in evals.items()},
        task,
        task.select_metrics(source.metric, glue),
        test,
        None if more is None else task.without_labels(more),
        without_labels=fitted.notes,
    )


def check_unlabelled(task: Task) -> None:
    """Raise unless rows without labels can train models of ``task``."""
    if not task.unlabelled:
        raise InputError(
            f"--unlabelled: rows of --task {task.name()} have no labels, or cannot be trained on "
            "without them; leave it out"
        )


def _read_files(
    source: Source, kind: type[Task], glue: Glue | None
) -> tuple[Rows, dict[str, Rows]]:
    if source.evals is None:
        raise InputError("--eval is missing: name the file to evaluate on")
    if source.train is None:
        raise InputError("--train is missing: name the file to train on")
    columns = file_columns(source.columns, glue, source.train, kind)
    train = read_file(source.train, columns, "--train", task=kind)
    columns = file_columns(source.columns, glue, source.evals, kind)
    return train, {"": read_file(source.evals, columns, "--eval", task=kind)}


def _read_splits(
    source: Source, kind: type[Task], glue: Glue | None
) -> tuple[Rows, dict[str, Rows], list[str] | None]:
    """Training and evaluation splits of a GLUE task, or of any data set on the hub."""
    dataset, config, columns, option = source.data, source.data_config, kind.columns, "--data"
    eval_splits: tuple[str, ...] = ("validation",)
    if glue is not None:
        dataset, config, option = HUB, source.glue_name, "--task"
        eval_splits, columns = glue.eval_splits, glue.hub
    if source.eval_split is not None:
        eval_splits = (source.eval_split,)
    columns = source.columns.over(columns)
    assert dataset is not None
    train, declared_classes = read_hub(dataset, config, source.train_split, columns, option, kind)
    evals: dict[str, Rows] = {}
    for split in eval_splits:
        suffix = "mm" if split == "validation_mismatched" and evals else ""
        evals[suffix], _ = read_hub(dataset, config, split, columns, option, kind)
    return train, evals, declared_classes


def describe(corpus: Corpus) -> Iterator[str]:
    """Lines to print: a summary of the rows, and warnings about likely mistakes."""
    yield from corpus.without_labels
    yield from corpus.task.describe(corpus)
    if corpus.unlabelled is not None:
        yield f"{len(corpus.unlabelled)} rows without labels"
    scored = [("evaluation", [*corpus.evals.values()])]
    if corpus.test is not None:
        scored.insert(0, ("test", [corpus.test]))
    for kind, sets in scored:
        for name, rows in (("training", corpus.train), ("unlabelled", corpus.unlabelled)):
            twice = 0 if rows is None else _count_duplicates(rows, sets)
            if twice:
                total = sum(map(len, sets))
                yield f"warning: {twice} of the {total} {kind} rows are {name} rows too"


def _count_duplicates(train: Rows, sets: list[Rows]) -> int:
    """How many rows of ``sets`` have the texts of a training row; compares hashes."""
    counts = Counter(hash(texts) for rows in sets for texts in rows.inputs())
    return sum(counts.pop(hash(texts), 0) for texts in train.inputs())


def file_columns(
    asked: Columns,
    glue: Glue | None,
    path: Path,
    task: type[Task] | None = None,
    labelled: bool = True,
) -> Columns:
    """Columns of a file: those ``asked`` for, GLUE's, or the defaults of the task.

    A file of a GLUE task has GLUE's own layout, or the hub's columns if its header has them.
    """
    columns = (task or tasks.named(None)).columns
    if glue is not None:
        columns = glue.file
        hub = {name for name in (glue.hub.text, glue.hub.pair, glue.hub.label) if name is not None}
        if asked.header and hub <= set(files.first_row(path)):
            columns = glue.hub
    elif not asked.header:
        needed = {"--text-column": asked.text}
        if labelled:
            needed["--label-column"] = asked.label
        if None in needed.values():
            raise InputError(
                f"--no-header needs {' and '.join(needed)} as numbers, the first being 0"
            )
    columns = asked.over(columns)
    if files.is_text(path):
        if columns.pair is not None:
            raise InputError(
                f"{path}: a .txt file has one text a line, but two are compared; use another format"
            )
        columns = replace(columns, text="text", header=True)
    return columns if labelled else replace(columns, label=None)
