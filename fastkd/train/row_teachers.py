"""The teachers of `fastkd distill --teachers FILE`, of which each row names one.

The TOML file has a line for each teacher, under the name that the rows' column has:

    math = "runs/math"                                                # a directory or a hub name
    code = {url = "http://localhost:8000/v1", model = "NAME", top_k = 64}
    chat = {cache = "runs/chat-cache"}                                # of `fastkd cache`

Paths are relative to the file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastkd.train.errors import InputError, nearest
from fastkd.train.options import read_options_file, resolve_path

KINDS: dict[str, type] = {"model": str, "url": str, "top_k": int, "cache": str}


def teachers_of(path: Path) -> dict[str, dict[str, Any]]:
    """For each teacher its model, or its url, model and top_k, or its cache."""
    found = {}
    for name, given in read_options_file(path).items():
        entry = {"model": given} if isinstance(given, str) else given
        where = f"--teachers {path}: {name}"
        if not isinstance(entry, Mapping):
            raise InputError(f"{where} must be a directory, or a table with url or cache")
        for key, value in entry.items():
            if not isinstance(value, KINDS.get(key, type(None))):
                raise InputError(f"{where}: {key} = {value!r:.40}; {nearest(key, KINDS)}")
        kind = [key for key in ("url", "cache", "model") if key in entry][:1]
        if (
            not kind
            or (kind == ["url"] and "model" not in entry)
            or "://" in entry.get("model", "")
        ):
            raise InputError(f"{where}: a server needs url and model, another a directory or cache")
        for key in set(kind) & {"model", "cache"}:
            local = resolve_path(f"{where}.{key}", entry[key], path.parent)
            if key == "cache" or local.exists():  # else a name on the hub
                entry = {**entry, key: str(local)}
        found[name] = dict(entry)
    if not found:
        raise InputError(f"--teachers {path}: it names no teacher")
    return found


class ByRowCollator:
    """Collator of batches with ``teacher_id``, the number of each row's teacher."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate
        for_epoch = getattr(collate, "for_epoch", None)  # see `Task.collator`
        if for_epoch is not None:
            self.for_epoch = lambda draw: ByRowCollator(for_epoch(draw))

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        own = [{name: x for name, x in row.items() if name != "teacher_id"} for row in rows]
        numbers = [row["teacher_id"] for row in rows]
        return {**self.collate(own), "teacher_id": torch.tensor(numbers, dtype=torch.int64)}
