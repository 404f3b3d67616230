"""A trained model: its training options and its predictions."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fastkd._core.extras import require
from fastkd.train.arrow_rows import Encoded, Rows
from fastkd.train.data import Encoder, file_columns, read_file
from fastkd.train.errors import InputError, RunFailed, first_line
from fastkd.train.files import Columns, check_file, check_separators, records
from fastkd.train.glue import GLUE_TASKS, Glue
from fastkd.train.models import load_trained, longest
from fastkd.train.processes import Computation
from fastkd.train.progress import Display
from fastkd.train.saving import MANIFEST, read_json
from fastkd.train.scoring import finite, predict
from fastkd.train.tasks.base import Task

NO_COLUMNS = Columns(label=None)


@dataclass(frozen=True)
class TrainingRecord:
    """Training options of a model, as far as its manifest is readable."""

    columns: Columns = NO_COLUMNS
    glue: Glue | None = None
    max_length: int | None = None


def read_training_record(model: Path) -> TrainingRecord | None:
    """The training record of a model; None if fastkd did not train it."""
    settings = read_json(model / MANIFEST).get("settings")
    if not isinstance(settings, dict):
        return None
    names = ("text_column", "text_pair_column", "label_column", "task", "data")
    text, pair, label, task, data = (
        x if isinstance(x := settings.get(name), str) else None for name in names
    )
    length = settings.get("max_length")
    return TrainingRecord(
        Columns(text, pair, label),
        GLUE_TASKS.get(task or "", GLUE_TASKS.get(data or "")),
        length if isinstance(length, int) and length >= 4 else None,
    )


def columns_of(
    requested: Columns,
    task: str | None,
    path: Path,
    labelled: bool,
    model: str,
    training: TrainingRecord | None,
    kind: type[Task],
) -> Columns:
    """Columns of --data: the requested ones, else those of the training if the file has them.

    Raises:
        InputError: the ``model`` was trained on pairs of texts, and the file has no second text.
    """
    check_file(path, "--data", kind.readers, kind.folders)
    glue, then = GLUE_TASKS.get(task or ""), training or TrainingRecord()
    before = file_columns(then.columns, then.glue, path, kind, labelled)
    if requested == NO_COLUMNS and glue is None and before.header:
        _, first = next(records(path, True, "--data", readers=kind.readers), (1, {}))
        texts = {before.text, before.pair} - {None}
        # Where the texts are there, the label is missing, which the reader says.
        if texts <= first.keys() and (
            before.pair is not None or first.keys() >= {*before.labels_in(first)}
        ):
            return before
        check_separators(first, str(path))
    columns = file_columns(requested, glue, path, kind, labelled)
    if before.pair is not None and columns.pair is None:
        raise InputError(
            f"{model} was trained on pairs of texts; --text-pair-column says where the second is "
            f"in {path}"
        )
    return columns


class TrainedModel:
    """A trained model, or an ONNX file of it."""

    def __init__(
        self,
        name: str,
        computation: Computation,
        remote_code: bool,
        onnx: Path | None = None,
        task: str | None = None,
    ):
        local = Path(name).expanduser()
        self.name, self.computation, self.onnx = name, computation, onnx
        self.training = read_training_record(local)
        self.model, self.tokenizer, self.task = load_trained(name, remote_code, task)
        torch.nn.Module.to(self.model, computation.device).eval()

    def read(self, path: Path, requested: Columns, task: str | None, labelled: bool) -> Rows:
        """The rows of --data; unless ``labelled``, rows without text are included."""
        kind = type(self.task)
        columns = columns_of(requested, task, path, labelled, self.name, self.training, kind)
        return read_file(path, columns, "--data", not labelled, kind)

    def answers(self, rows: Rows, max_length: int | None, display: Display) -> tuple[Any, Encoded]:
        """Predictions for each row, see `Task.answer`, and the encoded rows.

        ``max_length`` defaults to that of the training.
        """
        limit = longest(self.tokenizer, self.model)
        trained = None if self.training is None else self.training.max_length
        length = max_length or min(limit, trained or limit)
        if length > limit:
            raise InputError(f"--max-length {length}: the model reads at most {limit}")
        task = self.task
        encoded = Encoder(self.tokenizer, length, task)(rows)
        model: Any = self.model if self.onnx is None else OnnxModel(self.onnx, task.outputs)
        with display:
            found = predict(model, encoded, task, self.tokenizer, self.computation, display)
        outputs = task.num_labels
        if isinstance(found, np.ndarray) and outputs not in (None, found.shape[-1]):
            one, other = f"--model {self.name}", f"--task {task.name()}"
            if self.onnx is not None:
                one, other = f"--onnx {self.onnx}", one
            raise InputError(f"{one}: it has {found.shape[-1]} outputs, and {other} {outputs}")
        if not finite(found):
            raise RunFailed(f"--model {self.name}: its outputs are not finite")
        return found, encoded


class OnnxModel(torch.nn.Module):
    """An ONNX file with the interface of the model."""

    def __init__(self, path: Path, outputs: tuple[str, ...] = ("logits",)):
        super().__init__()
        runtime = require("onnxruntime", "onnx")
        if not path.is_file():
            raise InputError(f"--onnx {path}: no such file")
        try:
            self.session = runtime.InferenceSession(str(path))
        except Exception as error:  # its own types, one for each status
            reason = first_line(error)
            raise InputError(f"--onnx {path}: can't be loaded ({reason})") from None
        self.path = path
        self.inputs = [entry.name for entry in self.session.get_inputs()]
        found = [entry.name for entry in self.session.get_outputs()]
        known = list(inspect.signature(self.forward).parameters)
        # A single output may have any name; of several those of the task are read.
        self.read = found if len(found) == len(outputs) == 1 else list(outputs)
        if not {*self.read} <= {*found} or not {*self.inputs} <= {*known}:
            raise InputError(
                f"--onnx {path}: reads {', '.join(self.inputs)} and has the outputs "
                f"{', '.join(found)}; it must read some of {', '.join(known)} and have "
                f"{' and '.join(outputs)}"
            )
        self.outputs = outputs

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> SimpleNamespace:
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
        }
        given = {name: inputs[name].cpu().numpy() for name in self.inputs}
        try:
            found = self.session.run(self.read, given)
        except Exception as error:
            reason = first_line(error)
            raise InputError(f"--onnx {self.path}: can't be run ({reason})") from None
        named = zip(self.outputs, map(torch.from_numpy, found), strict=True)
        return SimpleNamespace(**dict(named))
