"""`fastkd predict`: predictions of a trained model for the rows of a file."""

from rich.console import Console

from fastkd.cli.command_settings import PredictSettings
from fastkd.cli.display import say, stderr_display
from fastkd.cli.tables import begin, table
from fastkd.train.errors import InputError
from fastkd.train.saving import write_file


def predict(settings: PredictSettings, console: Console) -> None:
    """Print or write a line for each row; rows without text get no prediction."""
    model = begin(settings)
    task = model.task = model.task.for_prediction()
    rows = model.read(settings.data, settings.columns, settings.task, labelled=False)
    shown = list(task.shown_columns(rows))
    full = [i for i, row in enumerate(shown) if task.has_text(row)]
    if not full:
        raise InputError(f"--data {settings.data}: no row holds text")
    asked = rows if len(full) == len(rows) else rows.select(full)
    given = model.answers(asked, settings.max_length, stderr_display())
    found = task.predictions(*given, model.tokenizer)
    answers = dict(zip(full, found, strict=True))
    nothing = dict.fromkeys(found[0])
    numbers = (number for (number,) in rows.columns("number"))
    told = [
        {"row": number, **row, **answers.get(i, nothing)}
        for i, (number, row) in enumerate(zip(numbers, shown, strict=True))
    ]
    empty = len(rows) - len(full)
    kind = ".tsv" if settings.out is None else settings.out.suffix
    text = table(kind, told, task.list_separator)
    if settings.out is None:
        console.file.write(text)
    else:
        write_file(settings.out, text)
        bare = f", {empty} of them without text" if empty else ""
        say(console, f"{len(rows)} rows{bare}: {settings.out}")
