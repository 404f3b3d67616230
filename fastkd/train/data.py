"""The rows of `fastkd distill`: GLUE tasks, any hub dataset, local files, as their task reads them.

Every row is read and checked before training. An error is one InputError with the option, or with
the file and the row.
"""

import contextlib
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fastkd._core.extras import require
from fastkd.train import files, tasks
from fastkd.train.arrow_rows import (
    BATCH,
    UNLABELLED,
    Encoded,
    Rows,
    features_of,
    fingerprint,
    fingerprint_of,
    writing,
)
from fastkd.train.config import Config
from fastkd.train.conversations import KEEP
from fastkd.train.errors import EmptyLabel, InputError, nearest
from fastkd.train.files import Columns, field
from fastkd.train.glue import HUB, Glue
from fastkd.train.hub import hub_answers, why_not
from fastkd.train.tasks.base import AGREEMENT, TEXT, ClassTask, Corpus, LabelInfo, Task
from fastkd.train.tasks.classification import Classification


def read_file(
    path: Path,
    columns: Columns,
    option: str,
    every: bool = False,
    task: type[Task] = Classification,
) -> Rows:
    """Read and check the rows of a file for a task; errors name ``option``.

    Without a label column they have no labels. A row without text is an error, unless ``every``
    row is read.
    """

    files.check_file(path, option, task.readers, task.folders)
    declares = issubclass(task, ClassTask)
    classes = files.class_names(path, columns.label, option) if declares else None
    read = functools.partial(files.records, path, columns.header, option, every, task.readers)
    rows = functools.partial(_checked, read, columns, option, str(path), task, classes, every)
    parts = fingerprint_of(path), "".join(path.suffixes[-2:]), repr(every)
    return _stored(rows, columns, str(path), task, classes, parts)


def _stored(
    rows: Callable[[], Iterator[dict[str, Any]]],
    columns: Columns,
    source: str,
    task: type[Task],
    classes: list[str] | None,
    parts: Iterable[str],
) -> Rows:
    """What ``rows()`` yields, in a file of the cache.

    Its name is a hash of all that the rows depend on; ``parts`` are the source's.
    """
    library = require("datasets", "train")
    missing = [name for name in task.optional if getattr(columns, name) is None]
    kinds = {name: kind for name, kind in task.stored.items() if name not in missing}
    kinds |= {} if columns.teacher is None else {"teacher": TEXT}
    code = map(fingerprint_of, sorted(Path(__file__).parent.glob("*.py")))
    parts = (*parts, repr((columns, classes)), task.name(), fingerprint_of(task), *code)
    try:
        with writing(source):
            data = library.Dataset.from_generator(
                rows,
                features=features_of({"number": "int64", **kinds}),
                fingerprint=fingerprint(f"{x}\0".encode() for x in (*parts, library.__version__)),
                writer_batch_size=BATCH,
            )
    except library.exceptions.DatasetGenerationError as error:
        # The error of `_checked`, or of the writer.
        with writing(source):
            raise error.__cause__ or error from None
    return Rows(source, data, None if classes is None else tuple(classes))


def _checked(
    read: Callable[[], Iterable[tuple[int, dict[str, Any]]]],
    columns: Columns,
    option: str,
    source: str,
    task: type[Task],
    classes: list[str] | None,
    every: bool,
) -> Iterator[dict[str, Any]]:
    """The stored columns of each record of a ``source``; see `read_file`."""
    settled: Columns | None = None
    found = iter(read())
    for number, record in found:
        settled = settled or task.resolve_columns(columns, record, source)
        where = f"{source}, row {number}"
        if classes is not None:
            name_classes(record, settled.label, classes, where)
        try:
            row = {"number": number, **task.row(record, settled, where)}
            if columns.teacher is not None:
                row["teacher"] = str(field(record, columns.teacher, where))
        except EmptyLabel as error:
            count = 1
            with contextlib.suppress(InputError):
                for _, other in found:
                    label = other.get(settled.label or "")
                    count += label is None or (isinstance(label, str) and not label.strip())
            raise InputError(
                f"{error}, as in {count} row{'s' * (count > 1)}; write {UNLABELLED} (for "
                "classes), or put such rows into --unlabelled FILE"
            ) from None
        empty = None if every else empty_column(task, row)
        if empty is not None:
            raise InputError(f"{where}: column {getattr(settled, empty, empty)!r} is empty")
        yield row
    if settled is None:
        raise InputError(f"{option} {source}: the file has no rows")


def name_classes(
    record: dict[str, Any], column: str | None, classes: list[str], where: str
) -> None:
    """Replace the class ids in a ``column`` of ``record`` by their names in ``classes``."""

    def name(label: Any) -> Any:
        if isinstance(label, list):
            return [name(i) for i in label]
        if label is None or label == -1:
            raise InputError(f"{where}: no label (a hidden test split?)")
        if label == UNLABELLED:
            return label
        if not 0 <= label < len(classes):
            raise InputError(f"{where}: label {label} is none of the {len(classes)} classes")
        return classes[label]

    if column is not None:
        record[column] = name(record[column])


def empty_column(task: type[Task], row: dict[str, Any]) -> str | None:
    """The stored column without text in a row that has too little text; else None."""
    blank: list[str] = []
    full: list[str] = []
    for name in task.stored:
        texts = row.get(name) if name != "label" else None
        for text in texts if isinstance(texts, list) else [texts]:
            if text is not None:
                (full if text.strip() else blank).append(name)
    if task.every_text:
        return blank[0] if blank else None
    return None if full else "text"


def read_hub(
    name: str,
    config: str | None,
    split: str,
    columns: Columns,
    option: str,
    task: type[Task] = Classification,
) -> Rows:
    """Read one split of a hub dataset, with its class names if the dataset declares them."""
    hub_answers()
    datasets = require("datasets", "train")
    try:
        data = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the hub client raises a dozen unrelated types
        raise InputError(f"{option} {name}, split {split!r}: {why_not(error)}") from error
    source = f"{name}{f'/{config}' if config else ''}, split {split}"
    if not len(data):
        raise InputError(f"{option} {source}: the split is empty")
    classes = None
    if columns.label is not None and issubclass(task, ClassTask):
        classes = files.declared(data.features.get(columns.label))

    rows = functools.partial(
        _checked, lambda: enumerate(data, 1), columns, option, source, task, classes, True
    )
    return _stored(rows, columns, source, task, classes, (data._fingerprint,))


def load(config: Config, finished: Task | None = None) -> Corpus:
    """Read and check all rows that ``config`` names.

    ``finished``: the task of a finished teacher, of whose classes the rows may lack some.
    """
    kind = tasks.of_file(config.task, config.train)
    glue = config.glue
    if config.thinking != KEEP and not hasattr(kind, "thinking"):
        raise InputError(
            f"--thinking {config.thinking}: rows of --task {kind.name()} are no conversations; "
            "leave it out"
        )
    if kind.indivisible and config.accumulate > 1:
        raise InputError(
            f"--accumulate: a row of --task {kind.name()} is a list, which micro-batches would "
            "part; give a smaller --batch-size"
        )

    columns = replace(config.columns, teacher=config.teacher_column if config.teachers else None)

    def read(path: Path, option: str, labelled: bool = True) -> Rows:
        found = file_columns(columns, glue, path, kind, labelled)
        return read_file(path, found, option, task=kind)

    if config.train is None and config.unlabelled is not None and config.evals is not None:
        return _of_text_alone(config, finished, read)
    if config.train is None and config.evals is None:
        train, evals = _read_splits(config, kind, columns)
    elif config.evals is None:
        raise InputError("--eval is missing: name the file to evaluate on")
    elif config.train is None:
        raise InputError("--train is missing: name the file to train on")
    else:
        train, evals = read(config.train, "--train"), {"": read(config.evals, "--eval")}
    named = files.names_of(config.test) if config.test else {}
    tests = {k: read(path, "--test") for k, path in named.items()}
    head = None if finished is None else finished.names
    order = None if config.label_order is None else config.label_order.split(",")
    if head is not None and order is not None and len(order) == len(head):
        head = [name.strip() for name in order]
    declared = None if train.classes is None else list(train.classes)
    sets = {**evals, **{f"test {name}": rows for name, rows in tests.items()}}
    given = LabelInfo(config.labels, glue, declared, head, config.thinking)
    task = kind.fit(train, sets, given)
    unknown = "does not occur in the training rows"
    prepared = [task.read_labels(rows, unknown) for rows in (train, *sets.values())]
    train, *found = (one.rows for one in prepared)
    evals, more = dict(zip(evals, found, strict=False)), prepared[0].without_labels
    tests = dict(zip(tests, found[len(evals) :], strict=True))
    if config.unlabelled is not None:
        check_unlabelled(task)
        unlabelled = read(config.unlabelled, "--unlabelled", labelled=False)
        more = unlabelled if more is None else more.followed_by(unlabelled)
    return Corpus(
        train.sample(config.max_train_rows, config.seed),
        {k: rows.sample(config.max_eval_rows, config.seed) for k, rows in evals.items()},
        task,
        task.select_metrics(config.metric, glue),
        tests,
        None if more is None else task.without_labels(more),
        notes=tuple(dict.fromkeys(line for one in prepared for line in one.notes)),
    )


def few_labels(corpus: Corpus, labelled: int, seed: int) -> Corpus:
    """``labelled`` training rows, balanced over the classes; all others without labels."""
    rng, train = random.Random(seed), corpus.train
    labels = train.labels
    one_class = labels is not None and labels.dtype == np.int64
    groups: dict[int, list[int]] = {}
    for i, label in enumerate(labels.tolist() if one_class else [0] * len(train)):
        groups.setdefault(label, []).append(i)
    for group in groups.values():
        rng.shuffle(group)
    turns = itertools.zip_longest(*(groups[label][::-1] for label in sorted(groups)))
    kept = {*[i for turn in turns for i in turn if i is not None][:labelled]}
    rest, unlabelled = [i for i in range(len(train)) if i not in kept], corpus.unlabelled
    if rest:
        check_unlabelled(corpus.task, "--labelled")
        others = train.select(rest)
        others = others if unlabelled is None else others.followed_by(unlabelled)
        unlabelled = corpus.task.without_labels(others)
    return replace(
        corpus, train=train.select(sorted(kept)), unlabelled=unlabelled, teacher_train=train
    )


def _of_text_alone(config: Config, task: Task | None, read: Callable[..., Rows]) -> Corpus:
    """Rows of --unlabelled alone, for the soft targets of a finished teacher.

    Evaluation rows without the label column are scored by the agreement with the teacher.
    """
    evals, label = config.evals, config.label_column
    assert config.unlabelled is not None and evals is not None
    if task is None:
        raise InputError(
            "--train is missing: text alone needs a teacher with a finished head, for "
            "classification, regression, multi-label or token-classification"
        )
    check_unlabelled(task)
    if config.label_order is not None:
        raise InputError("--label-order: without --train no label is read; leave it out")
    train = task.without_labels(read(config.unlabelled, "--unlabelled", labelled=False))
    names = {label, task.columns.label} - {None}
    labelled = label is not None or bool(names & {*files.first_row(evals)})
    rows = read(evals, "--eval", labelled=labelled)
    notes: tuple[str, ...] = (f"{len(train)} rows without labels: soft targets alone",)
    metrics: tuple[str, ...] = (AGREEMENT,)
    if labelled:
        found = task.prepare(rows)
        task, rows, notes = found.task, found.rows, notes + found.notes
        metrics = task.select_metrics(config.metric, config.glue)
    elif AGREEMENT in task.metrics and config.metric in (None, AGREEMENT):
        rows = task.without_labels(rows)
    else:
        raise InputError(
            f"--eval {evals}: no column {task.columns.label!r}, which --metric "
            f"{config.metric or task.metrics[0]} compares; name it by --label-column"
        )
    return Corpus(
        train.sample(config.max_train_rows, config.seed),
        {"": rows.sample(config.max_eval_rows, config.seed)},
        task,
        metrics,
        {
            k: task.prepare(read(path, "--test")).rows
            for k, path in files.names_of(config.test or []).items()
        },
        notes=notes,
        labelled=False,
    )


def check_unlabelled(task: Task, option: str = "--unlabelled") -> None:
    """Raise unless rows without labels can train models of ``task``."""
    if not task.unlabelled:
        raise InputError(
            f"{option}: rows of --task {task.name()} have no labels, or cannot be trained on "
            "without them; leave it out"
        )


def _read_splits(config: Config, kind: type[Task], named: Columns) -> tuple[Rows, dict[str, Rows]]:
    """Training and evaluation splits of a GLUE task, or of any data set on the hub."""
    dataset, name, columns, option = config.data, config.data_config, kind.columns, "--data"
    eval_splits: tuple[str, ...] = ("validation",)
    if (glue := config.glue) is not None:
        dataset, name, option = HUB, glue.name, "--task"
        eval_splits, columns = glue.eval_splits, glue.hub
    if config.eval_split is not None:
        eval_splits = (config.eval_split,)
    columns = named.over(columns)
    assert dataset is not None
    train = read_hub(dataset, name, config.train_split, columns, option, kind)
    evals: dict[str, Rows] = {}
    for split in eval_splits:
        suffix = "mm" if split == "validation_mismatched" and evals else ""
        evals[suffix] = read_hub(dataset, name, split, columns, option, kind)
    return train, evals


def describe(corpus: Corpus) -> Iterator[str]:
    """Lines to print: a summary of the rows, and warnings about likely mistakes."""
    yield from corpus.notes
    if corpus.labelled:
        yield from corpus.task.describe(corpus)
    if corpus.unlabelled is not None:
        yield f"{len(corpus.unlabelled)} rows without labels"
    scored = [("evaluation", [*corpus.evals.values()])]
    if corpus.test:
        scored.insert(0, ("test", [*corpus.test.values()]))
    for kind, sets in scored:
        for name, rows in (("training", corpus.train), ("unlabelled", corpus.unlabelled)):
            if rows is None:
                continue
            # Hashes of the texts of all rows, which may exceed the memory.
            texts = (repr(x) for each in sets for x in each.without_label().columns())
            counts = Counter(map(hash, texts))
            own = map(repr, rows.without_label().columns())
            twice = sum(counts.pop(hash(x), 0) for x in own)
            if twice:
                total = sum(map(len, sets))
                yield f"warning: {twice} of the {total} {kind} rows are {name} rows too"


def file_columns(
    requested: Columns, glue: Glue | None, path: Path, task: type[Task], labelled: bool = True
) -> Columns:
    """Columns of a file: the ``requested`` ones, GLUE's, or the defaults of the task.

    A file of a GLUE task has GLUE's own layout, or the hub's columns if its header has them.
    """
    columns = task.columns
    if glue is not None:
        columns = glue.file
        hub = {name for name in (glue.hub.text, glue.hub.pair) if name is not None}
        hub |= {glue.hub.label} if labelled and glue.hub.label is not None else set()
        if requested.header and hub <= set(files.first_row(path)):
            columns = glue.hub
    elif not requested.header:
        needed = {"--text-column": requested.text}
        if labelled:
            needed["--label-column"] = requested.label
        if None in needed.values():
            raise InputError(
                f"--no-header needs {' and '.join(needed)} as numbers, the first being 0"
            )
    columns = requested.over(columns)
    if files.kind_of(path) == ".txt":
        if columns.pair is not None:
            raise InputError(
                f"{path}: a .txt file has one text a line, but two are compared; use another format"
            )
        columns = replace(columns, text="text", header=True)
    return columns if labelled else replace(columns, label=None)


FEW = 8  # with fewer rows, all tokens may be unknown


class Encoder:
    """Callable that encodes the rows of a task; results are cached on disk."""

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        task: Task,
        teachers: Any = None,
        by_row: Sequence[str] = (),
    ):
        self.tokenizer, self.max_length, self.task = tokenizer, max_length, task
        #: Names of the teachers of which each row has one, whose number is ``teacher_id``.
        self.by_row = by_row
        #: The teacher's tokenizer, of rows with the tokens of both models.
        self.teachers = teachers
        self.parts = [fingerprint_of(tokenizer), str(max_length)]
        if teachers is not None:
            self.parts.append(fingerprint_of(teachers))
        for module in ("transformers", "tokenizers"):
            self.parts.append(getattr(require(module, "train"), "__version__", ""))
        self.parts += [repr(task), *by_row, task.name(), fingerprint_of(type(task))]

    def __call__(self, rows: Rows) -> Encoded:
        data, task = rows.data, self.task
        paired = "pair" in data.column_names
        added = max(1, self.tokenizer.num_special_tokens_to_add(pair=paired))
        if added >= self.max_length:
            what = "a pair" if paired else "a text"
            raise InputError(
                f"--max-length {self.max_length}: leaves no room for text, as the tokenizer "
                f"adds {added} tokens to {what}; give a larger one"
            )
        name = fingerprint(f"{part}\0".encode() for part in (data._fingerprint, *self.parts))

        def encode(batch: dict[str, list]) -> dict[str, list]:
            batch = dict(batch)
            batch["where"] = [f"{rows.source}, row {number}" for number in batch["number"]]
            if self.teachers is None:
                found = dict(task.encode(batch, self.tokenizer, self.max_length))
            else:
                both = self.tokenizer, self.teachers
                found = dict(task.encode_both(batch, *both, self.max_length))
            found.setdefault("number", batch["number"])
            if self.by_row:
                numbers = map(self._teacher, batch["teacher"], batch["where"])
                number_of = dict(zip(batch["number"], numbers, strict=True))
                found["teacher_id"] = [number_of[row] for row in found["number"]]
            for number, ids in zip(found["number"], found["input_ids"], strict=True):
                if not ids:
                    raise InputError(f"{rows.source}, row {number}: no token is left of it")
            found.setdefault("length", [len(ids) for ids in found["input_ids"]])
            return found

        # One process at a time writes the file.
        filelock, lock = require("filelock", "train"), contextlib.nullcontext()
        if data.cache_files:
            lock = filelock.FileLock(Path(data.cache_files[0]["filename"]).parent / f"{name}.lock")
        with writing(rows.source), lock:
            tokens = data.map(
                encode,
                batched=True,
                batch_size=BATCH,
                writer_batch_size=BATCH,
                remove_columns=data.column_names,
                new_fingerprint=name,
            )
        aside = ["number", "length", *task.evaluation_columns]
        encoded = Encoded(
            tokens.remove_columns(aside), tokens.select_columns(aside), [rows], [len(tokens)]
        )
        # A tokenizer without its files raises no error itself: all tokens are unknown.
        first = encoded.tokens[:BATCH]["input_ids"]
        seen = {int(i) for ids in first for i in np.concatenate([np.ravel(x) for x in ids])}
        words = seen - {i for i in self.tokenizer.all_special_ids if i is not None}
        if not words and len(rows) >= FEW:
            raise InputError(
                f"{rows.source}: the tokenizer knows no word of the first "
                f"{min(BATCH, len(rows))} rows; its files are missing, or it is another's"
            )
        return encoded

    def _teacher(self, name: str, where: str) -> int:
        """The number of a row's teacher."""
        if name not in self.by_row:
            raise InputError(
                f"{where}: its teacher is {name!r}; {nearest(name, self.by_row)} (--teachers)"
            )
        return self.by_row.index(name)
