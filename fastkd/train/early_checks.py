"""Checks of files, columns and models by name, before torch and transformers are imported.

Their imports take seconds. Whatever is not checked here is checked when it is read.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from fastkd.train import files, tasks
from fastkd.train.config import ColumnOptions, Config
from fastkd.train.files import check_columns, settle_columns
from fastkd.train.hub import check_place, has_no_weights
from fastkd.train.options import options_of
from fastkd.train.row_teachers import teachers_of

# Fields of options with a path of rows, and with the name of a model.
ROWS = ("train", "evals", "test", "unlabelled", "data", "text")
MODELS = ("teacher", "student", "tokenizer", "model", "before", "mlm")
# Files whose first row is read within milliseconds, and their bytes at most where they are read
# whole.
QUICK, WHOLE, MOST = (".tsv", ".csv", ".jsonl"), ".json", 2**24
# Tasks whose rows are those of the file, in columns that are given or have default names.
PLAIN = (None, "classification", "regression")


def check_inputs(settings: Any) -> None:
    """Raise for a file that is missing, unreadable or without its columns, or a wrong directory.

    ``settings`` are the options of a command.
    """
    flags = {name: option.flag for name, option in options_of(settings).items()}
    values = vars(settings)
    for name in ROWS:
        value = values.get(name)
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, Path):
                _check_rows(settings, path, flags[name], labelled=name != "unlabelled")
    if values.get("teachers") is not None:
        teachers_of(values["teachers"])
    for name in MODELS:
        value = values.get(name)
        if isinstance(value, str) and not has_no_weights(value):
            check_place(flags[name], value)


def _check_rows(settings: Any, path: Path, option: str, labelled: bool) -> None:
    values = vars(settings)
    kind = tasks.kind_of(values.get("task"))
    known = files.kind_of(path) in files.READERS
    if not path.exists() or (kind in PLAIN and path.is_file() and known):
        files.check_file(path, option)
    columns = settings.columns if isinstance(settings, ColumnOptions) else None
    small = files.kind_of(path) == WHOLE and path.stat().st_size <= MOST
    quick = path.is_file() and option != "--text" and (files.kind_of(path) in QUICK or small)
    if columns is None or not quick or kind == "question-answering":
        return
    _, record = next(files.records(path, columns.header, option), (0, None))
    if record is None:
        return
    # `fastkd predict` reads no label.
    labelled = labelled and "label_order" in values
    columns = replace(columns, label=columns.label if labelled else None)
    if isinstance(settings, Config) and columns.header and kind in PLAIN and settings.glue is None:
        # Text alone may be evaluated without labels.
        label = columns.label or ("label" if labelled and settings.train is not None else None)
        settle_columns(replace(columns, label=label), record, str(path))
    else:
        check_columns(columns, record, str(path))
