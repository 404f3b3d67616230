"""The GLUE tasks: their columns and metrics; files of the GLUE server.

A submission to the server is a zip of one file for each test set. A file has the header ``index
prediction``, separated by a tab, and a line for each test row, numbered from 0. Labels are 0 and 1
(CoLA, SST-2, MRPC, QQP, WNLI), words (MNLI, AX, QNLI, RTE) or a real number (STS-B).
"""

import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastkd.train.errors import InputError, nearest
from fastkd.train.files import Columns


@dataclass(frozen=True)
class Glue:
    """A GLUE task: its columns on the hub and in GLUE's own files, its metrics and splits."""

    name: str
    hub: Columns
    file: Columns
    metrics: tuple[str, ...] = ("accuracy",)
    regression: bool = False
    eval_splits: tuple[str, ...] = ("validation",)


_SENTENCES = Columns("sentence1", "sentence2")
HUB = "nyu-mll/glue"
_GLUE = (
    Glue("cola", Columns("sentence"), Columns("3", None, "1", header=False), ("mcc",)),
    Glue("sst2", Columns("sentence"), Columns("sentence")),
    Glue("mrpc", _SENTENCES, Columns("#1 String", "#2 String", "Quality"), ("f1", "accuracy")),
    Glue(
        "stsb",
        _SENTENCES,
        Columns("sentence1", "sentence2", "score"),
        ("pearson", "spearman"),
        regression=True,
    ),
    Glue(
        "qqp",
        Columns("question1", "question2"),
        Columns("question1", "question2", "is_duplicate"),
        ("f1", "accuracy"),
    ),
    Glue(
        "mnli",
        Columns("premise", "hypothesis"),
        Columns("sentence1", "sentence2", "gold_label"),
        eval_splits=("validation_matched", "validation_mismatched"),
    ),
    Glue("qnli", Columns("question", "sentence"), Columns("question", "sentence")),
    Glue("rte", _SENTENCES, _SENTENCES),
)
GLUE_TASKS = {glue.name: glue for glue in _GLUE}


HEADER = "index\tprediction"


@dataclass(frozen=True)
class TestSet:
    """A test set of the server.

    ``rows``: their number. ``labels``: the server's, in the order of the hub's classes; empty for
    real numbers. ``others``: names of these classes in data sets and models. ``split``: on the hub.
    ``source``: the official file in the folder of its task, by default named as the split.
    """

    task: str
    rows: int
    labels: tuple[str, ...] = ("0", "1")
    others: tuple[str, ...] = ()
    split: str = "test"
    source: str = ""


_WORDS = ("entailment", "neutral", "contradiction")
_TWO = ("entailment", "not_entailment")
#: Test sets by the name of their file.
FILES = {
    "AX": TestSet("ax", 1104, _WORDS, source="diagnostic.tsv"),
    "CoLA": TestSet("cola", 1063, others=("unacceptable", "acceptable")),
    "MNLI-m": TestSet("mnli", 9796, _WORDS, split="test_matched"),
    "MNLI-mm": TestSet("mnli", 9847, _WORDS, split="test_mismatched"),
    "MRPC": TestSet("mrpc", 1725, others=("not_equivalent", "equivalent")),
    "QNLI": TestSet("qnli", 5463, _TWO),
    "QQP": TestSet("qqp", 390965, others=("not_duplicate", "duplicate")),
    "RTE": TestSet("rte", 3000, _TWO),
    "SST-2": TestSet("sst2", 1821, others=("negative", "positive")),
    "STS-B": TestSet("stsb", 1379, ()),
    "WNLI": TestSet("wnli", 146),
}
#: Tasks of the server that fastkd predicts.
TASKS = tuple(dict.fromkeys(x.task for x in FILES.values() if x.task != "wnli"))


def sets_of(task: str, data: Path | None) -> dict[str, Path | None]:
    """Names of the test sets of ``task``, each with its file; None for the hub.

    ``data`` is a file, or the folder of the task in GLUE's own download.
    """
    names = [name for name, found in FILES.items() if found.task == task]
    if data is None:
        return dict.fromkeys(names)
    if data.is_dir():
        found = ((name, FILES[name]) for name in names)
        return {name: data / (test.source or f"{test.split}.tsv") for name, test in found}
    if task == "mnli":
        return {"MNLI-mm" if "mismatched" in data.name else "MNLI-m": data}
    return {names[0]: data}


def server_labels(name: str, classes: Sequence[str]) -> dict[str, str]:
    """The server's label for each class of a model."""
    file = FILES[name]
    known = {label: label for label in file.labels} | dict(
        zip(file.others, file.labels, strict=False)
    )
    for given in classes:
        if given not in known:
            raise InputError(
                f"--glue: the model's class {given!r} is no label of {name}; "
                f"{nearest(given, known)}"
            )
    return known


def table(answers: Iterable[str | float]) -> str:
    """The content of a file, from its server labels or the scores of STS-B, cut to 0 to 5."""
    cut = (f"{min(max(x, 0.0), 5.0):.6f}" if isinstance(x, float) else x for x in answers)
    lines = [f"{i}\t{x}" for i, x in enumerate(cut)]
    return "\n".join([HEADER, *lines]) + "\n"


def pack(folders: Sequence[Path], target: Path) -> list[str]:
    """Write the submission of the files in ``folders``; returns the names that were filled.

    The server needs a file of every test set: a missing one gets a constant answer.
    """
    found: dict[str, Path] = {}
    for folder in folders:
        for name in FILES:
            path = folder / f"{name}.tsv"
            if path.is_file():
                if name in found:
                    raise InputError(f"--glue-zip: {found[name]} and {path} are the same test set")
                found[name] = path
    if not found:
        raise InputError(f"--glue-zip {','.join(map(str, folders))}: no files of `--glue` there")
    for name, path in found.items():
        rows = path.read_text(encoding="utf-8").count("\n") - 1
        if rows != FILES[name].rows:
            raise InputError(
                f"--glue-zip: {path} has {rows} rows, and the server's {name} {FILES[name].rows}; "
                "predict its whole test set"
            )
    missing = [name for name in FILES if name not in found]
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, of in FILES.items():
            content = table([*(of.labels or ("0.0",))[:1]] * of.rows)
            if name in found:
                content = found[name].read_text(encoding="utf-8")
            packed.writestr(f"{name}.tsv", content)
    return missing
