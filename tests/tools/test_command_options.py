"""docs/distill.md has every option of every command, as the code has it."""

import pytest

pytest.importorskip("typer")
from tools import command_options


def test_the_tables_are_current():
    text = command_options.PAGE.read_text()
    assert command_options.page(text) == text, "run python -m tools.command_options"


def test_a_row_has_placeholder_default_and_help():
    rows = command_options.rows("distill")
    assert rows["num_train_epochs"] == "| `--epochs NUMBER` | `3.0` | Epochs of distillation. |"
    assert rows["resume"].startswith("| `--resume` |  | Continue")
    assert command_options.rows("cache")["teacher"].startswith("| `--teacher TEXT` | required |")
