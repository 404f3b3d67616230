"""`fastkd predict`: what a finished model answers to the rows of a file."""

from typing import Any

import numpy as np
import torch
from rich.console import Console

from fastkd.cli.display import say
from fastkd.cli.settings import UseSettings
from fastkd.cli.tables import FORMATS, begin
from fastkd.train.data import holds_text
from fastkd.train.errors import InputError
from fastkd.train.saving import write_file


def predict(settings: UseSettings, console: Console) -> None:
    """Print a line for each row, or write them to --out; one without text gets no answer."""
    model = begin(settings)
    rows = model.read(settings.data, settings.columns, settings.task, labelled=False)
    full = [i for i, texts in enumerate(rows.both_texts()) if holds_text(*texts)]
    if not full:
        raise InputError(f"--data {settings.data}: no row holds text")
    asked = rows if len(full) == len(rows) else rows.select(full)
    logits, _ = model.logits(asked, settings.max_length)
    answers = dict(zip(full, _answers(logits, model.classes), strict=True))
    nothing = dict.fromkeys(next(iter(answers.values())))
    texts = ("number", "text", *("pair",) * rows.paired)
    found = [
        {**dict(zip(("row", *texts[1:]), row, strict=True)), **answers.get(i, nothing)}
        for i, row in enumerate(rows.columns(*texts))
    ]
    empty = len(rows) - len(full)
    kind = ".tsv" if settings.out is None else settings.out.suffix
    text = FORMATS[kind](found)
    if settings.out is None:
        console.file.write(text)
    else:
        write_file(settings.out, text)
        bare = f", {empty} of them without text" if empty else ""
        say(console, f"{len(rows)} rows{bare}: {settings.out}")


def _answers(logits: np.ndarray, names: list[str] | None) -> list[dict[str, Any]]:
    """The columns of each row's answer."""
    if names is None:
        return [{"value": float(value)} for value in logits[:, 0]]
    shares = torch.from_numpy(logits).double().softmax(-1)
    heads = [f"P({name})" for name in names]
    return [
        {
            "label": names[int(row.argmax())],
            **{head: round(float(x), 6) for head, x in zip(heads, row, strict=True)},
        }
        for row in shares
    ]
