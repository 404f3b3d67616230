"""docs/distill.md has every option of every command, as the code has it, each in a sentence."""

import re

import pytest

pytest.importorskip("typer")
from fastkd.cli.main import COMMANDS, options_for
from fastkd.train.errors import InputError
from tools import command_options

# Words that name neither what an option sets nor its unit.
VAGUE = re.compile(r"so many|don't tell|doesn't say|what becomes|it thinks|\beverything\b|^Which\b")
OPTIONS = [
    pytest.param(meta, id=f"{title} {meta.flag}")
    for title in COMMANDS
    for meta in options_for(title).values()
]


NUMBERS = (int, float, int | None, float | None)


def test_the_tables_are_current():
    text = command_options.PAGE.read_text()
    assert command_options.page(text) == text, "run python -m tools.command_options"


def test_a_row_has_placeholder_default_and_help():
    rows = command_options.rows("distill")
    assert rows["weight_decay"] == "| `--weight-decay NUMBER` | `0.01` | Weight decay of AdamW. |"
    assert rows["resume"].startswith("| `--resume` |  | Continue")
    assert command_options.rows("cache")["teacher"].startswith("| `--teacher TEXT` | required |")


@pytest.mark.parametrize("meta", OPTIONS)
def test_help_is_one_sentence_with_a_default(meta):
    """Typer prints a default that is a value; the sentence names what a number left out means."""
    text = meta.help
    assert re.fullmatch(r"[A-Z].*[^.]\.", text) and not re.search(r"[.?!] +[A-Z]", text), text
    assert len(text) <= 330 and not VAGUE.search(text), text
    if meta.default is None and meta.kind in NUMBERS:
        assert "default: " in text, text


@pytest.mark.parametrize("meta", [x for x in OPTIONS if x.values[0].kind in NUMBERS])
def test_a_number_beyond_its_bounds_is_refused(meta):
    beyond = [
        *([meta.least - 1] if meta.least is not None else []),
        *([meta.most + 1] if meta.most is not None else []),
        *([meta.above] if meta.above is not None else []),
    ]
    for value in beyond:
        with pytest.raises(InputError, match=f"^{meta.flag} must be .* got {value}"):
            meta.check(value)
    for value in (meta.least, meta.most):
        if value is not None:
            meta.check(value)
