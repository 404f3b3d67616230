"""The command line of a dataclass of options."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastkd._core.extras import require
from fastkd.train.option_fields import Option, assignments, options_of

typer: Any = require("typer", "train")


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """Options of a command that has none."""


def command(cls: Any) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Turn ``function(settings)`` into a function whose parameters are the options of ``cls``."""

    def decorate(function: Callable[[Any], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**values: Any) -> None:
            for name, kind in kinds.items():
                if kind == Mapping[str, Any]:
                    meta = options[name]
                    values[name] = assignments(meta.flag, values[name] or [], meta.joined)
            function(cls(**values))

        kinds, options = typing.get_type_hints(cls), options_of(cls)
        parameters = [_parameter(f, kinds[f.name], options[f.name]) for f in _fields(cls)]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _fields(cls: Any) -> list[dataclasses.Field]:
    """The fields, required ones first."""
    return sorted(
        dataclasses.fields(cls),
        key=lambda f: not (f.default is f.default_factory is dataclasses.MISSING),
    )


def _parameter(field: dataclasses.Field, kind: Any, meta: Option) -> inspect.Parameter:
    default = None if field.default is dataclasses.MISSING else field.default
    if field.default is field.default_factory is dataclasses.MISSING:
        default = inspect.Parameter.empty
    if kind == Mapping[str, Any]:
        kind = list[str] | None
    if meta.flag.startswith("-"):
        shown = typer.Option(
            meta.flag, help=meta.help, metavar=meta.metavar, rich_help_panel=meta.panel
        )
    else:
        shown = typer.Argument(help=meta.help, metavar=meta.flag, rich_help_panel=meta.panel)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, shown],
    )
