"""Dataclass fields that declare an option's type, default, help and bounds.

The command line (`fastkd.cli.main`), its checks, the options in a TOML or YAML file and
the saved settings of a run are derived from these fields.
"""

import ast
import contextlib
import dataclasses
import enum
import functools
import json
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fastkd._core.extras import require
from fastkd.train.errors import InputError, nearest

# --teacher whose log-probabilities are in the answers of --train.
COMPLETIONS = "completions"
SERVED, STORED = "served", "stored"


@dataclasses.dataclass(frozen=True)
class Option:
    """An option: a field's ``kind`` (type) and ``default``, and how it is given.

    A required option has the default `dataclasses.MISSING`. ``flag`` defaults to the field's name;
    a word in capitals is an argument without a flag.
    ``key``, the name in a run's saved settings, defaults to the field's name too; an option that
    does not change the result is not ``saved``. ``joined``: assignments separated by commas.
    ``names``: a word without "=" is a list of names, each with the value True. ``commands`` of a
    `fastkd.train.config.Config` that have the option.
    """

    help: str
    flag: str = ""
    key: str = ""
    metavar: str | None = None
    panel: str | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    commands: tuple[str, ...] = ("distill", "cache", "verify")
    saved: bool = True
    joined: bool = False
    names: bool = False
    kind: Any = None
    default: Any = None
    #: Whether the value is a list of paths; whether it is a path or such a list.
    several: bool = False
    is_path: bool = False

    @property
    def file_key(self) -> str:
        """Name of the option in a file: ``eval``, ``set``."""
        return self.flag.removeprefix("--").replace("-", "_")

    def check(self, value: Any) -> None:
        """Raise InputError unless ``value`` lies within the bounds and among the choices."""
        if self.choices and value not in self.choices:
            raise InputError(
                f"{self.flag} {value!r} is not an option; {nearest(value, self.choices)}"
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        if isinstance(value, int) and abs(value) >= 2**63:
            raise InputError(f"{self.flag} {str(value)[:20]}... is beyond all bounds")
        if self.above is not None and not self.above < value < math.inf:
            raise InputError(f"{self.flag} must be greater than {self.above}, got {value}")
        if self.least is not None and not self.least <= value < math.inf:
            raise InputError(f"{self.flag} must be at least {self.least}, got {value}")
        if self.most is not None and not value <= self.most:
            raise InputError(f"{self.flag} must be at most {self.most}, got {value}")


def option(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field that is an `Option`; ``...`` as the default makes it required."""
    metadata = {"option": Option(help, **more)}
    if default is ...:
        return dataclasses.field(metadata=metadata)
    if isinstance(default, Mapping):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


# Panels of several commands' help. Options of the last four belong to `fastkd distill` alone unless
# they name commands; options of the last one do not change the result.
data_option = functools.partial(option, panel="Data")
model_option = functools.partial(option, panel="Teacher and student")
method_option = functools.partial(option, panel="Method")
row_option = functools.partial(data_option, commands=("distill",))
teaching_option = functools.partial(model_option, commands=("distill",))
training_option = functools.partial(option, panel="Training", commands=("distill",))
run_option = functools.partial(option, panel="The run", saved=False, commands=("distill",))


class Checked:
    """Base class of options that checks their bounds when they are created."""

    def __post_init__(self) -> None:
        for name, meta in options_of(type(self)).items():
            if (value := vars(self)[name]) is not None:
                meta.check(value)


def _options_of(cls: Any) -> Mapping[str, Option]:
    kinds, found = typing.get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        if (meta := field.metadata.get("option")) is not None:
            many, kind = field.default_factory, kinds[field.name]
            parts = typing.get_args(kind)
            found[field.name] = dataclasses.replace(
                meta,
                flag=meta.flag or "--" + field.name.replace("_", "-"),
                key=meta.key or field.name,
                kind=kind,
                default=field.default if many is dataclasses.MISSING else many(),
                several=list[Path] in parts,
                is_path=not {Path, list[Path]}.isdisjoint((kind, *parts)),
            )
    return found


#: The options of a dataclass, by field name.
options_of: Callable[[Any], Mapping[str, Option]] = functools.cache(_options_of)


def as_paths(given: Any) -> list[Path] | None:
    """The value of an option that takes one path or several; None for an empty list."""
    many = given if isinstance(given, list | tuple) else [given]
    return [Path(each) for each in many if each is not None] or None


def set_flags(settings: Any, *names: str) -> list[str]:
    """The flags among the fields ``names`` whose value isn't the default."""
    options, values = options_of(type(settings)), vars(settings)
    return [options[name].flag for name in names if values[name] != options[name].default]


def as_json(settings: Any) -> dict[str, Any]:
    """The options that the result depends on, in JSON's types; paths are strings."""
    values, options = vars(settings), options_of(type(settings)).items()
    found = {meta.key: values[name] for name, meta in options if meta.saved}
    text = json.dumps(found, default=lambda x: dict(x) if isinstance(x, Mapping) else str(x))
    return json.loads(text)


def assignments(
    flag: str, words: list[str], joined: bool = False, names: bool = False
) -> dict[str, Any]:
    """``["alpha=0.5", "pool=cls"]`` as a dictionary; values are Python literals or plain words.

    With ``joined`` a word may hold several: ``"heads=4,layers=2"``.
    """
    found: dict[str, Any] = {}
    for word in ",".join(words).split(",") if joined and words else words:
        name, equals, value = word.partition("=")
        name = name.strip()
        if names and not equals and name:
            found.update(dict.fromkeys((part.strip() for part in name.split(",")), True))
            continue
        if not equals or not name:
            raise InputError(f"{flag} {word!r} is not of the form name=value")
        if name in found:
            raise InputError(f"{flag} {name} is given twice")
        found[name] = _literal(value.strip())
    return found


def _literal(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return list(value) if isinstance(value, tuple) else value


def fits(value: Any, kind: Any) -> bool:
    """Whether a value from a YAML or TOML file is of this type."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in typing.get_args(kind))
    kind = typing.get_origin(kind) or kind
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return isinstance(value, str)
    return not isinstance(kind, type) or isinstance(value, kind)


def read_options_file(path: Path) -> Mapping[str, Any]:
    """Content of a TOML or YAML file."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix not in (".yaml", ".yml"):
            toml: Any = require("tomllib" if sys.version_info >= (3, 11) else "tomli", "train")
            return toml.loads(text)
        yaml: Any = require("yaml", "train")
        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from None
        if not isinstance(found, Mapping):
            raise ValueError("it holds no names and values")
        return found
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


def check_types(where: str, values: Mapping[str, Any], cls: Any) -> None:
    """Raise for the first of ``values`` that has another type than its field of ``cls``."""
    kinds, options = typing.get_type_hints(cls), options_of(cls)
    for name, value in values.items():
        if not fits(value, kinds[name]):
            kind = getattr(kinds[name], "__name__", kinds[name])
            key = options[name].file_key if name in options else name
            raise InputError(f"{where}{key} must be {kind}, got {value!r:.40}")


def check_name(where: str, name: str) -> None:
    """Raise unless a table's name can be a directory name."""
    if re.search(r"[^\w.-]", name):
        raise InputError(f"{where}: letters, digits and -_. only")


def resolve_path(where: str, given: Any, folder: Path, several: bool = False) -> Any:
    """A path in a file, relative to its ``folder``; $NAME is an environment variable.

    ``several``: whether a list of paths is a value too.
    """
    if several and isinstance(given, list):
        return [resolve_path(where, each, folder) for each in given]
    if not isinstance(given, str):
        raise InputError(f"{where} must be a path, got {given!r:.40}")
    found = os.path.expandvars(given)
    if missing := re.search(r"\$\{?([A-Za-z_]\w*)", found):
        raise InputError(
            f"{where} {given}: the environment variable {missing[1]} is not set; set it to the "
            f"files' folder ({missing[1]}=DIR fastkd ...)"
        )
    return folder / Path(found).expanduser()


def without_weights(teacher: str | None) -> str:
    """Kind of a --teacher that is known by its log-probabilities only; "" for a model.

    `SERVED`: the URL of a server. `STORED`: a directory of files, or the rows have them.
    """
    if teacher is None or teacher.startswith(("http://", "https://")):
        return SERVED if teacher else ""
    folder = Path(teacher).expanduser()
    if not folder.exists():
        return STORED if teacher == COMPLETIONS else ""
    known = any((folder / name).exists() for name in ("config.json", "teacher.json"))
    files = any(map(any, (folder.glob("*.safetensors"), folder.glob("*.parquet"))))
    return STORED if files and not known else ""


def check_place(option: str, name: str) -> None:
    """Raise if the model ``name``, given as ``option``, is a path that holds no model."""
    local = Path(name).expanduser()
    if not local.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise InputError(f"{option} {name}: no such directory")
    if local.is_file():
        raise InputError(
            f"{option} {name}: this is a file; give the directory that holds the model"
        )
    if not (local / "config.json").exists() and (local / "student/config.json").exists():
        raise InputError(f"{option} {name}: it holds no model; did you mean {local / 'student'}?")


def file_keys(cls: Any, command: str = "") -> dict[str, str]:
    """Field names of a dataclass of options, by their names in a file; those of one command."""
    options = options_of(cls).items()
    return {m.file_key: name for name, m in options if not command or command in m.commands}


@contextlib.contextmanager
def errors_with_file_keys(where: str, cls: Any) -> Iterator[None]:
    """Context in which errors name the options of ``cls`` as a file does, not as flags."""
    try:
        yield
    except InputError as error:
        keys = {meta.flag: meta.file_key for meta in options_of(cls).values()}
        message = re.sub(r"--[a-z-]+", lambda flag: keys.get(flag[0], flag[0]), str(error))
        raise InputError(f"{where}: {message}") from None
