"""``python -m tools.command_options``: the tables of options in docs/distill.md, from the code."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin

from bench.report import fill
from fastkd.cli.main import COMMANDS, options_for
from fastkd.train.options import Option

PAGE = Path(__file__).parents[1] / "docs" / "distill.md"
BEGIN = "<!-- Options, by `python -m tools.command_options` -->"
END = "<!-- end of options -->"
PLACEHOLDERS = {int: "N", float: "NUMBER", Path: "PATH", str: "TEXT", Mapping: "NAME=VALUE"}


def usage(meta: Option) -> str:
    """An option with the placeholder of its value: ``--epochs NUMBER``."""
    kind = meta.kind
    if isinstance(kind, UnionType):
        kind = next(each for each in get_args(kind) if each is not type(None))
    if kind is bool or not meta.flag.startswith("-"):
        return meta.flag
    return f"{meta.flag} {meta.metavar or PLACEHOLDERS[get_origin(kind) or kind]}"


def rows(command: str) -> dict[str, str]:
    """Table row of each option of a command, by field name."""
    found = {}
    for name, meta in options_for(command).items():
        default = meta.default
        shown = "required" if default is MISSING else f"`{default}`"
        if default is None or default is False or default == {} or default == "":
            shown = ""
        help = meta.help.replace("|", "\\|").replace("<", "&lt;")
        cells = (f"`{usage(meta)}`", shown, help)
        found[name] = f"| {' | '.join(cells)} |"
    return found


def table(command: str) -> Iterator[str]:
    """Lines on a command's options; `cache` and `verify` refer to those of `distill`."""
    yield f"### Options of {command}\n"
    own, flags = rows(command), options_for(command)
    if COMMANDS[command].options == COMMANDS["distill"].options and command != "distill":
        distill = rows("distill")
        shared = [name for name, row in own.items() if row == distill.get(name)]
        own = {name: row for name, row in own.items() if name not in shared}
        names = ", ".join(f"`{flags[name].flag}`" for name in shared)
        yield f"As in [distill](#options-of-distill): {names}.\n"
    if not own:
        yield "No options.\n"
        return
    yield "| option | default | |\n|---|---|---|"
    yield from own.values()
    yield ""


def page(text: str) -> str:
    """``text`` with its tables as the code has them."""
    return fill(text, "\n".join(line for name in COMMANDS for line in table(name)), BEGIN, END)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
