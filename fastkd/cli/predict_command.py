"""`fastkd predict` and `fastkd evaluate`: a trained model on the rows of a file."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastkd.cli.command_settings import AnswerSettings, EvaluateSettings, PredictSettings
from fastkd.cli.display import RichDisplay, stderr_display
from fastkd.train import glue
from fastkd.train.data import empty_column, read_hub
from fastkd.train.errors import InputError, nearest
from fastkd.train.processes import Computation
from fastkd.train.progress import format_scores
from fastkd.train.saving import check_new_file, csv_text, tsv_line, write_file, write_json
from fastkd.train.scoring import score
from fastkd.train.trained_model import TrainedModel


def begin(settings: AnswerSettings) -> TrainedModel:
    """The model, loaded after the options are checked."""
    check_new_file(settings.out, settings.overwrite)
    if settings.out is not None and settings.out.suffix not in FORMATS:
        raise InputError(f"--out {settings.out}: unknown kind of file; {nearest('', FORMATS)}")
    computation = Computation.of(settings)
    remote = settings.trust_remote_code
    return TrainedModel(settings.model, computation, remote, settings.onnx, settings.task)


def table(kind: str, found: list[dict[str, Any]], between: str | None = None) -> str:
    """Rows as the text of a file of this kind; ``between`` is `Task.list_separator`."""
    if kind in TABLES:
        found = [{name: _joined(x, between) for name, x in row.items()} for row in found]
    return FORMATS[kind](found)


def _joined(value: Any, between: str | None) -> Any:
    """A list as the text of one cell."""
    if not isinstance(value, list):
        return value
    if between is not None and all(isinstance(x, str) and between not in x for x in value):
        return between.join(value)
    return json.dumps(value, ensure_ascii=False)


TABLES = (".tsv", ".csv")
FORMATS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    ".tsv": lambda found: "".join(map(tsv_line, (found[0], *(row.values() for row in found)))),
    ".csv": csv_text,
    ".json": lambda found: json.dumps(found, indent=1, ensure_ascii=False) + "\n",
    ".jsonl": lambda found: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found),
}


def predict(settings: PredictSettings, display: RichDisplay) -> None:
    """Print or write a line for each row; rows without text get no prediction."""
    if settings.glue_zip is not None:
        assert settings.out is not None
        check_new_file(settings.out, settings.overwrite)
        folders = [Path(name) for name in settings.glue_zip.split(",")]
        filled = glue.pack(folders, settings.out)
        note = f"; constant answers for {', '.join(filled)}" if filled else ""
        display.say(f"{settings.out}: {len(glue.FILES)} files for the GLUE server{note}")
        return
    if settings.glue is not None:
        _for_glue(settings, display)
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
        display.console.file.write(text)
    else:
        write_file(settings.out, text)
        note = f", {empty} of them without text" if empty else ""
        display.say(f"{len(rows)} rows{note}: {settings.out}")


def _for_glue(settings: PredictSettings, display: RichDisplay) -> None:
    """Write the GLUE server's file of each test set of --task; every row gets an answer."""
    assert settings.glue is not None and settings.task is not None
    task = "mnli" if settings.task == "ax" else settings.task
    sets = glue.sets_of(settings.task, settings.data)
    targets = {name: settings.glue / f"{name}.tsv" for name in sets}
    for target in targets.values():
        check_new_file(target, settings.overwrite)
    model = begin(dataclasses.replace(settings, task=task))
    settings.glue.mkdir(parents=True, exist_ok=True)
    for name, path in sets.items():
        if path is None:
            columns = dataclasses.replace(glue.GLUE_TASKS[task].hub, label=None)
            split, config = glue.FILES[name].split, settings.task
            rows = read_hub(glue.HUB, config, split, columns, "--task", type(model.task))
        else:
            rows = model.read(path, settings.columns, task, labelled=False)
        model.task, prepared, *_ = model.task.prepare(rows, labelled=False)
        answers = model.answers(prepared, settings.max_length, stderr_display())
        found = model.task.predictions(*answers)
        if "value" in found[0]:
            content: list[str | float] = [float(row["value"]) for row in found]
        else:
            labels = glue.server_labels(name, model.task.names or [])
            content = [labels[row["label"]] for row in found]
        write_file(targets[name], glue.table(content))
        display.say(f"{len(found)} rows: {targets[name]}")


def evaluate(settings: EvaluateSettings, display: RichDisplay) -> dict[str, float]:
    """Print the scores on labelled rows, and write them to --out."""
    model = begin(settings)
    known = model.task.metrics
    if settings.metric not in (None, *known):
        listed = nearest(settings.metric or "", known)
        raise InputError(f"--metric {settings.metric} doesn't score this model; {listed}")
    rows = model.read(settings.data, settings.columns, settings.task, labelled=True)
    model.task, rows, lines, _ = model.task.prepare(rows, order=settings.label_order)
    metrics = model.task.select_metrics(settings.metric)
    for line in (*lines, *model.task.explain(metrics)):
        display.say(line)
    answers = model.answers(rows, settings.max_length, stderr_display())
    scores = score(model.task, metrics, *answers)
    display.say(f"{len(rows)} rows:  {format_scores(scores)}")
    if settings.out is not None:
        found = {"rows": len(rows), **scores}
        if settings.out.suffix == ".json":
            write_json(settings.out, found)
        else:
            write_file(settings.out, table(settings.out.suffix, [found]))
    return scores
