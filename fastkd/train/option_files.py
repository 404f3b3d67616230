"""Options in TOML or YAML files, under their names on the command line."""

import contextlib
import os
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastkd._core.extras import require
from fastkd.train.errors import InputError
from fastkd.train.option_fields import fits, options_of


def tables(path: Path) -> Mapping[str, Any]:
    """Content of a TOML or YAML file."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        if path.suffix in (".yaml", ".yml"):
            yaml: Any = require("yaml", "train")
            try:
                found = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
            except yaml.YAMLError as error:
                raise ValueError(" ".join(str(error).split())) from None
            if not isinstance(found, Mapping):
                raise ValueError("it holds no names and values")
            return found
        try:
            toml: Any = require("tomllib", "train")
        except ModuleNotFoundError:  # Python 3.10
            toml = require("tomli", "train")
        return toml.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise InputError(f"{path} can't be read: {error}") from None


def check_tables(name: str, found: Any) -> Mapping[str, Mapping[str, Any]]:
    """``found`` if it is a table of tables; raises InputError otherwise."""
    if not isinstance(found, Mapping):
        raise InputError(f"{name} must be a table, got {found!r:.40}")
    for key, entry in found.items():
        if not isinstance(entry, Mapping):
            raise InputError(f"{name}.{key} must be a table, got {entry!r:.40}")
    return found


def check_types(
    where: str, values: Mapping[str, Any], cls: Any, keys: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise for the first of ``values`` that is no value of its field of ``cls``.

    A message calls it as ``keys`` do.
    """
    kinds = typing.get_type_hints(cls)
    for name, value in values.items():
        if not fits(value, kinds[name]):
            kind = getattr(kinds[name], "__name__", kinds[name])
            raise InputError(f"{where}{keys.get(name, name)} must be {kind}, got {value!r:.40}")


def check_name(where: str, name: str) -> None:
    """Raise unless a table's name can be a directory name."""
    if re.search(r"[^\w.-]", name):
        raise InputError(f"{where}: letters, digits and -_. only")


def resolve_path(where: str, given: Any, folder: Path) -> Path:
    """A path in a file, which counts from its ``folder``; $NAME is a variable's value."""
    if not isinstance(given, str):
        raise InputError(f"{where} must be a path, got {given!r:.40}")
    return folder / Path(os.path.expandvars(given)).expanduser()


def file_keys(cls: Any) -> dict[str, str]:
    """The fields of a dataclass of options by what a file calls them: ``eval``, ``set``."""
    return {
        meta.flag.removeprefix("--").replace("-", "_"): name
        for name, meta in options_of(cls).items()
    }


@contextlib.contextmanager
def errors_with_file_keys(where: str, cls: Any) -> Iterator[None]:
    """Mistakes in the options ``cls``, with a file's keys in the place of flags."""
    try:
        yield
    except InputError as error:
        flags = {
            meta.flag: key
            for key, meta in zip(file_keys(cls), options_of(cls).values(), strict=True)
        }
        message = re.sub(r"--[a-z-]+", lambda flag: flags.get(flag[0], flag[0]), str(error))
        raise InputError(f"{where}: {message}") from None
