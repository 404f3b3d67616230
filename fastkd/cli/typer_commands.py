"""The command line of a dataclass of options."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastkd._core.extras import require
from fastkd.train.options import Option, assignments, options_of

typer: Any = require("typer", "train")


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """Options of a command that has none."""


def command(cls: Any, function: Callable[[Any], None]) -> Callable[..., None]:
    """``function(settings)`` as a function whose parameters are the options of ``cls``."""
    options, kinds = options_of(cls), typing.get_type_hints(cls)
    # Required ones first, as Python's signatures have them.
    fields = [field for field in dataclasses.fields(cls) if field.name in options]
    fields.sort(key=lambda field: not _required(field))

    def run(**values: Any) -> None:
        for name, meta in options.items():
            if kinds[name] == Mapping[str, Any]:
                values[name] = assignments(meta.flag, values[name] or [], meta.joined)
        function(cls(**values))

    parameters = [_parameter(f, kinds[f.name], options[f.name]) for f in fields]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _required(field: dataclasses.Field) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _parameter(field: dataclasses.Field, kind: Any, meta: Option) -> inspect.Parameter:
    default = None if field.default is dataclasses.MISSING else field.default
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
        default=inspect.Parameter.empty if _required(field) else default,
        annotation=Annotated[kind, shown],
    )
