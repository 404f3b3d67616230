"""`fastkd predict`: predictions of a trained model for the rows of a file."""

import dataclasses
from pathlib import Path

from rich.console import Console

from fastkd.cli.command_settings import PredictSettings
from fastkd.cli.display import say, stderr_display
from fastkd.cli.tables import begin, table
from fastkd.train import glue_server
from fastkd.train.data import empty_column, read_hub
from fastkd.train.errors import InputError
from fastkd.train.glue import GLUE_TASKS, HUB
from fastkd.train.saving import check_new_file, write_file


def predict(settings: PredictSettings, console: Console) -> None:
    """Print or write a line for each row; rows without text get no prediction."""
    if settings.glue_zip is not None:
        assert settings.out is not None
        check_new_file(settings.out, settings.overwrite)
        folders = [Path(name) for name in settings.glue_zip.split(",")]
        filled = glue_server.pack(folders, settings.out)
        note = f"; constant answers for {', '.join(filled)}" if filled else ""
        say(console, f"{settings.out}: {len(glue_server.FILES)} files for the GLUE server{note}")
        return
    if settings.glue is not None:
        _for_glue(settings, console)
        return
    model = begin(settings)
    assert settings.data is not None
    rows = model.read(settings.data, settings.columns, settings.task, labelled=False)
    records, kind = rows.data.to_list(), type(model.task)
    full = [i for i, row in enumerate(records) if empty_column(kind, row) is None]
    if not full:
        raise InputError(f"--data {settings.data}: no row holds text")
    readable = rows if len(full) == len(rows) else rows.select(full)
    model.task, readable, *_ = model.task.prepare(readable, labelled=False)
    found = model.task.predictions(*model.answers(readable, settings.max_length, stderr_display()))
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


def _for_glue(settings: PredictSettings, console: Console) -> None:
    """Write the GLUE server's file of each test set of --task; every row gets an answer."""
    assert settings.glue is not None and settings.task is not None
    task = "mnli" if settings.task == "ax" else settings.task
    sets = glue_server.sets_of(settings.task, settings.data)
    targets = {name: settings.glue / f"{name}.tsv" for name in sets}
    for target in targets.values():
        check_new_file(target, settings.overwrite)
    model = begin(dataclasses.replace(settings, task=task))
    settings.glue.mkdir(parents=True, exist_ok=True)
    for name, path in sets.items():
        if path is None:
            columns = dataclasses.replace(GLUE_TASKS[task].hub, label=None)
            split, config = glue_server.FILES[name].split, settings.task
            rows = read_hub(HUB, config, split, columns, "--task", type(model.task))
        else:
            rows = model.read(path, settings.columns, task, labelled=False)
        model.task, prepared, *_ = model.task.prepare(rows, labelled=False)
        answers = model.answers(prepared, settings.max_length, stderr_display())
        found = model.task.predictions(*answers)
        if "value" in found[0]:
            content: list[str | float] = [float(row["value"]) for row in found]
        else:
            labels = glue_server.server_labels(name, model.task.names or [])
            content = [labels[row["label"]] for row in found]
        write_file(targets[name], glue_server.table(content))
        say(console, f"{len(found)} rows: {targets[name]}")
