"""`fastkd evaluate` and `fastkd predict`: a finished model on a file."""

import csv
import inspect
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import DataCollatorWithPadding
from transformers.modeling_outputs import SequenceClassifierOutput

from fastkd._extras import require
from fastkd.cli.settings import AnalyzeSettings, EvaluateSettings, UseSettings
from fastkd.train.data import (
    file_columns,
    holds_text,
    read_file,
    to_classes,
    to_reals,
    unlabelled,
    with_labels,
    without,
)
from fastkd.train.display import format_scores, say
from fastkd.train.errors import InputError, RunFailed, nearest
from fastkd.train.files import check_file, first_row
from fastkd.train.models import be_quiet, class_names, load_classifier, longest
from fastkd.train.options import given
from fastkd.train.plan import Plan, choose_device
from fastkd.train.rows import Encoder, Rows
from fastkd.train.saving import check_new_file, read_marker, write_file, write_json
from fastkd.train.score import evaluate as score
from fastkd.train.score import predict as logits_of
from fastkd.train.settings import Source
from fastkd.train.tasks import CLASSIFICATION_METRICS, REGRESSION_METRICS, TASKS, Columns

COLUMNS = ("task", "text_column", "text_pair_column", "label_column")


class Use:
    """A model and how its rows are to be read."""

    def __init__(self, settings: UseSettings):
        be_quiet()
        check_new_file(settings.out, settings.overwrite)
        if settings.out is not None and settings.out.suffix not in FORMATS:
            raise InputError(f"--out {settings.out}: unknown kind of file; {nearest('', FORMATS)}")
        self.settings = settings
        #: What --max-length and the columns were, if fastkd has trained it.
        local = Path(settings.model).expanduser()
        self.trained = training_of(local)
        device = choose_device(settings.device, settings.precision)
        self.plan = Plan(
            batch_size=settings.batch_size, precision=settings.precision, device=device
        )
        self.model, self.tokenizer = load_classifier(settings.model, settings.trust_remote_code)
        self.names = class_names(self.model.config)
        #: The class whose F1 was a score in its training.
        self.positive = 0 if (read_marker(local) or {}).get("f1_of") == 0 else 1
        torch.nn.Module.to(self.model, device).eval()

    def read(self, labelled: bool) -> Rows:
        """The rows of --data; without labels also those without text."""
        settings, data = self.settings, self.settings.data
        columns = columns_of(settings, settings.model, self.trained, data, labelled)
        rows = read_file(data, columns, "--data", every=not labelled)
        return rows if labelled else unlabelled(rows, regression=self.names is None)

    def logits(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """(rows, classes), or (rows, 1) of a model that predicts a number; and the labels."""
        limit = longest(self.tokenizer, self.model)
        length = self.settings.max_length or min(limit, self.trained.get("max_length") or limit)
        if length > limit:
            raise InputError(f"--max-length {length}: the model reads at most {limit}")
        encoded = Encoder(self.tokenizer, length)(rows)
        model: Any = self.model
        if self.settings.onnx is not None:
            model = OnnxModel(self.settings.onnx)
        found = logits_of(model, encoded, DataCollatorWithPadding(self.tokenizer), self.plan)
        outputs = found[0].shape[-1]
        if outputs != self.model.config.num_labels:
            raise InputError(
                f"--onnx {self.settings.onnx}: it has {outputs} outputs, and --model "
                f"{self.settings.model} {self.model.config.num_labels}"
            )
        if not np.isfinite(found[0]).all():
            raise RunFailed(f"--model {self.settings.model}: its outputs are not finite")
        return found


def columns_of(
    settings: UseSettings | AnalyzeSettings,
    model: str,
    trained: dict[str, Any],
    path: Path,
    labelled: bool,
) -> Columns:
    """Those of --data that are given, or else those of the training where the file has them.

    Raises:
        InputError: the ``model`` was trained on pairs of texts, and there is no second one.
    """
    check_file(path, "--data")
    then: dict[str, Any] = {name: trained.get(name) for name in COLUMNS}
    known = Source(train=path, **then)
    before = file_columns(known, TASKS.get(known.task or ""), path, labelled)
    if not given(settings, *COLUMNS, "no_header") and before.header:
        names = {before.text, before.pair, before.label} - {None}
        if names <= set(first_row(path)):
            return before
    task = TASKS[settings.task] if settings.task else None
    columns = file_columns(settings, task, path, labelled)
    if before.pair is not None and columns.pair is None:
        raise InputError(
            f"{model} was trained on pairs of texts; --text-pair-column says where the second is "
            f"in {path}"
        )
    return columns


def training_of(model: Path) -> dict[str, Any]:
    """Length and columns of the training of a model, as far as its marker can be read."""
    settings = (read_marker(model) or {}).get("settings")
    if not isinstance(settings, dict):
        return {}
    found = {name: x for name in (*COLUMNS, "data") if isinstance(x := settings.get(name), str)}
    tasks = (found.pop("task", None), found.pop("data", None))
    length = settings.get("max_length")
    return {
        **found,
        "task": next((name for name in tasks if name in TASKS), None),
        "max_length": length if isinstance(length, int) and length >= 4 else None,
    }


class OnnxModel(torch.nn.Module):
    """An ONNX export in the place of the model it was made from."""

    def __init__(self, path: Path):
        super().__init__()
        runtime = require("onnxruntime", "onnx")
        if not path.is_file():
            raise InputError(f"--onnx {path}: no such file")
        try:
            self.session = runtime.InferenceSession(str(path))
        except Exception as error:  # its own types, one for each status
            reason = str(error).strip().splitlines()[0]
            raise InputError(f"--onnx {path}: can't be loaded ({reason})") from None
        self.path = path
        self.inputs = [entry.name for entry in self.session.get_inputs()]
        outputs = len(self.session.get_outputs())
        known = list(inspect.signature(self.forward).parameters)
        if outputs != 1 or not set(self.inputs) <= set(known):
            raise InputError(
                f"--onnx {path}: reads {', '.join(self.inputs)} and has {outputs} outputs; "
                f"it must read some of {', '.join(known)} and have one"
            )

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> SequenceClassifierOutput:
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
        }
        given = {name: inputs[name].cpu().numpy() for name in self.inputs}
        try:
            (logits,) = self.session.run(None, given)
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(f"--onnx {self.path}: can't be run ({reason})") from None
        return SequenceClassifierOutput(logits=torch.from_numpy(logits))


def evaluate(settings: EvaluateSettings, console: Console) -> dict[str, float]:
    """Print the scores on labelled rows, and write them to --out."""
    use = Use(settings)
    regression = use.names is None
    possible: tuple[str, ...] = REGRESSION_METRICS if regression else CLASSIFICATION_METRICS
    metrics = possible[:2] if regression else possible[:1]
    if settings.metric is not None:
        if settings.metric not in possible:
            known = nearest(settings.metric, possible)
            raise InputError(f"--metric {settings.metric} doesn't score this model; {known}")
        metrics = tuple(dict.fromkeys((settings.metric, *metrics)))
    rows = _labelled(use, settings, console)
    scores = score(metrics, *use.logits(rows), use.positive)
    say(console, f"{len(rows)} rows:  {format_scores(scores)}")
    if settings.out is not None:
        found = {"rows": len(rows), **scores}
        if settings.out.suffix == ".json":
            write_json(settings.out, found)
        else:
            write_file(settings.out, FORMATS[settings.out.suffix]([found]))
    return scores


def _labelled(use: Use, settings: EvaluateSettings, console: Console) -> Rows:
    """The rows of --data with the model's labels; how these were read, and what has none, is said.

    Raises:
        InputError: --label-order doesn't fit the model's classes.
    """
    rows, names = use.read(labelled=True), use.names
    order = None
    if settings.label_order is not None:
        order = [name.strip() for name in settings.label_order.split(",")]
        if names is None or len(set(order)) != len(order) or len(order) != len(names):
            has = "it predicts a number" if names is None else f"they are {', '.join(names)}"
            raise InputError(
                f"--label-order {settings.label_order}: must name the data's label for each class "
                f"of the model, and {has}"
            )
    if names is None:
        return to_reals(rows)
    rows, bare = with_labels(rows)
    if bare is not None:
        say(console, without(rows, bare))
    rows, reading = to_classes(rows, names, order)
    if reading:
        say(console, reading)
    return rows


def predict(settings: UseSettings, console: Console) -> None:
    """Print a line for each row, or write them to --out; one without text gets no answer."""
    use = Use(settings)
    rows = use.read(labelled=False)
    full = [i for i, texts in enumerate(rows.both_texts()) if holds_text(*texts)]
    if not full:
        raise InputError(f"--data {settings.data}: no row holds text")
    logits, _ = use.logits(rows if len(full) == len(rows) else rows.select(full))
    answers = dict(zip(full, _answers(logits, use.names), strict=True))
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


def _tsv(found: list[dict[str, Any]]) -> str:
    """Unquoted, as `fastkd` reads it: what separates cells and rows is a space within a text."""
    table = ([*found[0]], *(row.values() for row in found))
    return "".join("\t".join(map(_cell, row)) + "\n" for row in table)


def _cell(value: Any) -> str:
    return "" if value is None else re.sub(r"[\t\r\n]", " ", str(value))


def _csv(found: list[dict[str, Any]]) -> str:
    lines = io.StringIO()
    writer = csv.DictWriter(lines, list(found[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return lines.getvalue()


FORMATS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    ".tsv": _tsv,
    ".csv": _csv,
    ".json": lambda found: json.dumps(found, indent=1, ensure_ascii=False) + "\n",
    ".jsonl": lambda found: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found),
}
