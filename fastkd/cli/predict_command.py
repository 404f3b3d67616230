"""`fastkd predict`: predictions of a trained model for the rows of a file."""

from rich.console import Console

from fastkd.cli.command_settings import PredictSettings
from fastkd.cli.display import say, stderr_display
from fastkd.cli.tables import begin, table
from fastkd.train.data import empty_column
from fastkd.train.errors import InputError
from fastkd.train.saving import write_file


def predict(settings: PredictSettings, console: Console) -> None:
    """Print or write a line for each row; rows without text get no prediction."""
    model = begin(settings)
    rows = model.read(settings.data, settings.columns, settings.task, labelled=False)
    records, kind = rows.data.to_list(), type(model.task)
    full = [i for i, row in enumerate(records) if empty_column(kind, row) is None]
    if not full:
        raise InputError(f"--data {settings.data}: no row holds text")
    asked = rows if len(full) == len(rows) else rows.select(full)
    model.task, asked, *_ = model.task.prepare(asked, labelled=False)
    found = model.task.predictions(*model.answers(asked, settings.max_length, stderr_display()))
    answers = dict(zip(full, found, strict=True))
    nothing = dict.fromkeys(found[0])
    lines = [
        {"row": row["number"], **kind.shown(row), **answers.get(i, nothing)}
        for i, row in enumerate(records)
    ]
    empty = len(rows) - len(full)
    suffix = ".tsv" if settings.out is None else settings.out.suffix
    text = table(suffix, lines, kind.list_separator)
    if settings.out is None:
        console.file.write(text)
    else:
        write_file(settings.out, text)
        note = f", {empty} of them without text" if empty else ""
        say(console, f"{len(rows)} rows{note}: {settings.out}")
