"""Files of the GLUE server: a submission is a zip of one file for each test set.

A file has the header ``index prediction``, separated by a tab, and a line for each test row,
numbered from 0. Labels are 0 and 1 (CoLA, SST-2, MRPC, QQP, WNLI), words (MNLI, AX, QNLI, RTE) or a
real number (STS-B).
"""

import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastkd.train.errors import InputError, nearest

HEADER = "index\tprediction"


@dataclass(frozen=True)
class TestSet:
    """A test set of the server.

    ``rows``: their number. ``labels``: the server's, in the order of the hub's classes; empty for
    real numbers. ``others``: names of these classes in data sets and models. ``split``: on the hub.
    ``source``: the official file in the folder of its task. ``filler``: a constant answer.
    """

    task: str
    rows: int
    labels: tuple[str, ...] = ("0", "1")
    others: tuple[str, ...] = ()
    split: str = "test"
    source: str = "test.tsv"
    filler: str = "0"


_WORDS = ("entailment", "neutral", "contradiction")
_TWO = ("entailment", "not_entailment")
#: Test sets by the name of their file.
FILES = {
    "AX": TestSet("ax", 1104, _WORDS, source="diagnostic.tsv", filler="entailment"),
    "CoLA": TestSet("cola", 1063, others=("unacceptable", "acceptable")),
    "MNLI-m": TestSet(
        "mnli", 9796, _WORDS, split="test_matched", source="test_matched.tsv", filler="entailment"
    ),
    "MNLI-mm": TestSet(
        "mnli", 9847, _WORDS, split="test_mismatched", source="test_mismatched.tsv",
        filler="entailment",
    ),
    "MRPC": TestSet("mrpc", 1725, others=("not_equivalent", "equivalent")),
    "QNLI": TestSet("qnli", 5463, _TWO, filler="entailment"),
    "QQP": TestSet("qqp", 390965, others=("not_duplicate", "duplicate")),
    "RTE": TestSet("rte", 3000, _TWO, filler="entailment"),
    "SST-2": TestSet("sst2", 1821, others=("negative", "positive")),
    "STS-B": TestSet("stsb", 1379, (), filler="0.0"),
    "WNLI": TestSet("wnli", 146),
}  # fmt: skip
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
        return {name: data / FILES[name].source for name in names}
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
            content = table([of.filler] * of.rows)
            if name in found:
                content = found[name].read_text(encoding="utf-8")
            packed.writestr(f"{name}.tsv", content)
    return missing
