"""docs/distill.md has every option of every command, as the code has it, each in a sentence."""

import re

import pytest

pytest.importorskip("typer")
from fastkd.cli.main import COMMANDS, options_for
from fastkd.train.errors import InputError
from tests.support.compare import raises
from tools import command_options

# Words that name neither what an option sets nor its unit.
VAGUE = re.compile(r"so many|don't tell|doesn't say|what becomes|it thinks|\beverything\b|^Which\b")
NUMBERS = (int, float, int | None, float | None)


def test_the_tables_are_current():
    """A row has placeholder, default and help."""
    text = command_options.PAGE.read_text()
    assert command_options.page(text) == text, "run python -m tools.command_options"
    rows = command_options.rows("distill")
    assert rows["weight_decay"] == "| `--weight-decay NUMBER` | `0.01` | Weight decay of AdamW. |"
    assert rows["resume"].startswith("| `--resume` |  | Continue")
    assert command_options.rows("cache")["teacher"].startswith("| `--teacher TEXT` | required |")


@pytest.mark.parametrize("title", COMMANDS)
def test_help_is_one_sentence_with_a_default(title):
    """Typer prints a default that is a value; the sentence names what a number left out means.

    A number beyond its bounds is refused.
    """
    for meta in options_for(title).values():
        text = f"{title} {meta.flag}: {meta.help}"
        assert re.fullmatch(r"[A-Z].*[^.]\.", meta.help), text
        assert len(meta.help) <= 330 and not VAGUE.search(meta.help), text
        assert not re.search(r"[.?!] +[A-Z]", meta.help), text
        if meta.default is None and meta.kind in NUMBERS:
            assert "default: " in text, text
        if meta.kind not in NUMBERS:
            continue
        bounds = (meta.least, -1), (meta.most, 1), (meta.above, 0)
        for beyond in [bound + step for bound, step in bounds if bound is not None]:
            words = f"^{meta.flag} must be .* got {beyond}"
            raises(words, meta.check, beyond, error=InputError)
        for value in (meta.least, meta.most):
            if value is not None:
                meta.check(value)
