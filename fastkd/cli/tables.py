"""The files that `fastkd evaluate` and `fastkd predict` write."""

import json
import re
from collections.abc import Callable
from typing import Any

from fastkd.cli.command_settings import AnswerSettings
from fastkd.train.computation import Computation
from fastkd.train.errors import InputError, nearest
from fastkd.train.saving import check_new_file, csv_text
from fastkd.train.trained_model import TrainedModel


def begin(settings: AnswerSettings) -> TrainedModel:
    """The model, loaded after the options are checked."""
    check_new_file(settings.out, settings.overwrite)
    if settings.out is not None and settings.out.suffix not in FORMATS:
        raise InputError(f"--out {settings.out}: unknown kind of file; {nearest('', FORMATS)}")
    computation = Computation.of(settings)
    remote = settings.trust_remote_code
    return TrainedModel(settings.model, computation, remote, settings.onnx, settings.task)


def table(kind: str, found: list[dict[str, Any]], between: str | None = None) -> str:
    """Rows as the text of a file of this kind; ``between`` is `Task.list_separator`."""
    if kind in TABLES:
        found = [{name: _joined(x, between) for name, x in row.items()} for row in found]
    return FORMATS[kind](found)


def _joined(value: Any, between: str | None) -> Any:
    """A list as the text of one cell."""
    if not isinstance(value, list):
        return value
    if between is not None and all(isinstance(x, str) and between not in x for x in value):
        return between.join(value)
    return json.dumps(value, ensure_ascii=False)


def _tsv(found: list[dict[str, Any]]) -> str:
    """Unquoted, as `fastkd` reads it; separators inside a text become spaces."""
    rows = ([*found[0]], *(row.values() for row in found))
    return "".join("\t".join(map(_cell, row)) + "\n" for row in rows)


def _cell(value: Any) -> str:
    return "" if value is None else re.sub(r"[\t\r\n]", " ", str(value))


TABLES = (".tsv", ".csv")
FORMATS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    ".tsv": _tsv,
    ".csv": csv_text,
    ".json": lambda found: json.dumps(found, indent=1, ensure_ascii=False) + "\n",
    ".jsonl": lambda found: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found),
}
