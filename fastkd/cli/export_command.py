"""`fastkd export`: a model as ONNX, checked against the original model."""

import contextlib
import inspect
import io
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from fastkd._core.extras import require
from fastkd.cli.command_settings import ExportSettings
from fastkd.cli.display import say
from fastkd.train.errors import InputError, RunFailed
from fastkd.train.models import load_trained, longest
from fastkd.train.saving import add_to_manifest, check_new_file, saving, write_file
from fastkd.train.tasks.base import Task
from fastkd.train.trained_model import OnnxModel

# Far above float32 rounding of another order of sums, far below the error of a wrong graph.
TOLERANCE = 1e-3


class _Outputs(nn.Module):
    """The model with positional tensors and selected outputs, as an ONNX graph has them."""

    def __init__(self, model: nn.Module, names: list[str], task: Task):
        super().__init__()
        self.model, self.names, self.task = model, names, task

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        found = self.task.forward(self.model, dict(zip(self.names, inputs, strict=True)))
        return tuple(getattr(found, name) for name in self.task.outputs)


def export(settings: ExportSettings, console: Console) -> float:
    """Write the ONNX file; returns the largest relative difference of the outputs."""
    for module in ("onnx", "onnxscript", "onnxruntime"):
        require(module, "onnx")
    local = Path(settings.model).expanduser()
    out = settings.out or (local if local.is_dir() else Path()) / "model.onnx"
    check_new_file(out, settings.overwrite)
    remote = settings.trust_remote_code
    model, tokenizer, task = load_trained(settings.model, remote, settings.task)
    batches = task.samples(tokenizer, longest(tokenizer, model))
    known = inspect.signature(model.forward).parameters
    batches = [{k: v for k, v in batch.items() if k in known} for batch in batches]
    say(console, f"{settings.model}: writing ONNX and comparing outputs, about a minute ...")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        _write(model.float().eval(), batches[0], path, task)
        difference = max(_difference(model, path, batch, task) for batch in batches)
        if not difference <= TOLERANCE:
            raise RunFailed(
                f"--model {settings.model}: its ONNX form gives other outputs "
                f"(relative difference {difference:.1e}), so it is not kept"
            )
        with saving(out):
            write_file(out, path.read_bytes())
            add_to_manifest(out)
    say(console, f"{out}: outputs agree with ONNX Runtime's to {difference:.0e}")
    return difference


def _write(model: nn.Module, batch: dict[str, Tensor], path: Path, task: Task) -> None:
    names = list(batch)
    free = tuple(dict.fromkeys(range(x.dim()), torch.export.Dim.DYNAMIC) for x in batch.values())
    quiet = (contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()))
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with quiet[0], quiet[1], warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                _Outputs(model, names, task),
                tuple(batch.values()),
                str(path),
                input_names=names,
                output_names=list(task.outputs),
                dynamic_shapes=(free,),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except Exception as error:  # the exporter's own types, with pages of text
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise InputError(f"--model: {type(model).__name__} can't be exported ({reason})") from error
    finally:
        logging.disable(before)


def _difference(model: nn.Module, path: Path, batch: dict[str, Any], task: Task) -> float:
    with torch.no_grad():
        found = task.forward(model, batch), OnnxModel(path, task.outputs)(**batch)
    expected, actual = (
        torch.stack([getattr(one, name) for name in task.outputs]).double() for one in found
    )
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-12))
