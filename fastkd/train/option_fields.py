"""Dataclass fields that declare an option's type, default, help and bounds.

The command line (`fastkd.cli.typer_commands`), the validation (`check`) and the saved settings
(`as_json`) are derived from the fields.
"""

import ast
import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fastkd.train.errors import InputError, nearest


@dataclasses.dataclass(frozen=True)
class Option:
    """What an option is besides its name, type and default.

    ``flag`` is needed only where it isn't the field's name, or as a word in capitals for an
    argument without one; an option that doesn't change the result is not ``saved``.
    """

    help: str
    flag: str = ""
    metavar: str | None = None
    panel: str | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: Callable[[], Iterable[str]] | Iterable[str] = ()
    saved: bool = True
    #: Of assignments: several may stand in one word, apart by commas.
    joined: bool = False

    def check(self, value: Any) -> None:
        """Raise InputError unless ``value`` lies within the bounds and among the choices."""
        known = list(self.choices() if callable(self.choices) else self.choices)
        if known and value not in known:
            raise InputError(f"{self.flag} {value!r} is not an option; {nearest(value, known)}")
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
    meta = Option(help, **more)
    if default is ...:
        return dataclasses.field(metadata={"option": meta})
    if isinstance(default, Mapping):
        return dataclasses.field(default_factory=dict, metadata={"option": meta})
    return dataclasses.field(default=default, metadata={"option": meta})


# The panels that several commands have; none of the last changes the result.
data_option = functools.partial(option, panel="Data")
model_option = functools.partial(option, panel="Teacher and student")
training_option = functools.partial(option, panel="Training")
run_option = functools.partial(option, panel="The run", saved=False)


def options_of(cls: Any) -> dict[str, Option]:
    """The options of a dataclass or its instance, by field name."""
    return {
        field.name: dataclasses.replace(
            field.metadata["option"],
            flag=field.metadata["option"].flag or "--" + field.name.replace("_", "-"),
        )
        for field in dataclasses.fields(cls)
        if "option" in field.metadata
    }


def check(settings: Any) -> None:
    """Raise InputError for the first value out of its bounds."""
    for name, meta in options_of(settings).items():
        value = getattr(settings, name)
        if value is not None:
            meta.check(value)


def given(settings: Any, *names: str) -> list[str]:
    """The flags among the fields ``names`` whose value isn't the default."""
    default, flags = defaults_of(settings), options_of(settings)
    return [flags[name].flag for name in names if getattr(settings, name) != default[name]]


def defaults_of(settings: Any) -> dict[str, Any]:
    """The defaults, by field name; of what has none `dataclasses.MISSING`."""
    return {
        field.name: field.default
        if field.default_factory is dataclasses.MISSING
        else field.default_factory()
        for field in dataclasses.fields(settings)
    }


def as_json(settings: Any) -> dict[str, Any]:
    """Everything that the result depends on, in JSON's types."""
    return {
        name: _jsonable(getattr(settings, name))
        for name, meta in options_of(settings).items()
        if meta.saved
    }


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _jsonable(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def assignments(flag: str, words: list[str], joined: bool = False) -> dict[str, Any]:
    """``["alpha=0.5", "pool=cls"]`` as a dictionary; values are Python literals or plain words.

    With ``joined`` a word may hold several: ``"heads=4,layers=2"``.
    """
    found: dict[str, Any] = {}
    for word in ",".join(words).split(",") if joined and words else words:
        name, equals, value = word.partition("=")
        name = name.strip()
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
