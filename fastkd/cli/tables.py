"""The files that `fastkd evaluate` and `fastkd predict` write."""

import json
import re
from collections.abc import Callable
from typing import Any

from fastkd.cli.settings import UseSettings
from fastkd.train.errors import InputError, nearest
from fastkd.train.finished import Finished
from fastkd.train.models import be_quiet
from fastkd.train.plan import Plan, choose_device
from fastkd.train.saving import check_new_file, csv_text


def begin(settings: UseSettings) -> Finished:
    """The model, once nothing is in the way of its answers."""
    be_quiet()
    check_new_file(settings.out, settings.overwrite)
    if settings.out is not None and settings.out.suffix not in FORMATS:
        raise InputError(f"--out {settings.out}: unknown kind of file; {nearest('', FORMATS)}")
    device = choose_device(settings.device, settings.precision)
    plan = Plan(batch_size=settings.batch_size, precision=settings.precision, device=device)
    remote = settings.trust_remote_code
    return Finished(settings.model, plan, remote, settings.onnx, settings.task)


def _tsv(found: list[dict[str, Any]]) -> str:
    """Unquoted, as `fastkd` reads it: what separates cells and rows is a space within a text."""
    table = ([*found[0]], *(row.values() for row in found))
    return "".join("\t".join(map(_cell, row)) + "\n" for row in table)


def _cell(value: Any) -> str:
    return "" if value is None else re.sub(r"[\t\r\n]", " ", str(_joined(value)))


def _joined(value: Any) -> Any:
    """Words, or objects as JSON, that a table keeps in one cell."""
    if not isinstance(value, list):
        return value
    return " ".join(x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in value)


def _csv(found: list[dict[str, Any]]) -> str:
    return csv_text({name: _joined(value) for name, value in row.items()} for row in found)


FORMATS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    ".tsv": _tsv,
    ".csv": _csv,
    ".json": lambda found: json.dumps(found, indent=1, ensure_ascii=False) + "\n",
    ".jsonl": lambda found: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found),
}
