"""Runs of `fastkd distill` in tests: what they leave, and ways to stop them."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from fastkd.cli.cache_command import begin
from fastkd.train import fitting
from fastkd.train.assembling import Models
from fastkd.train.config import Config
from fastkd.train.distillation import check
from fastkd.train.options import assignments, options_of
from fastkd.train.progress import Display
from fastkd.train.scoring import Run


class Lines(Display):
    """A display that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def config_of(**options: Any) -> Config:
    """A Config of options that are named as its fields or as the command's, as `usual` has them."""
    fields = {meta.file_key: name for name, meta in options_of(Config).items()}
    given = {fields.get(name, name): x for name, x in options.items() if x is not None}
    for name, value in given.items():
        if isinstance(value, Path) and name in ("teacher", "student", "tokenizer"):
            given[name] = str(value)
        elif isinstance(value, str) and name in ("options", "student_config", "lora"):
            given[name] = assignments(name, value.split(","))
    return Config.of(**{"device_name": "cpu", **given})


def made(**options: Any) -> tuple[Run, Models]:
    """Rows and models of `fastkd distill`, without a training; `run.display` has the lines."""
    return begin(check(config_of(**options)), Lines())


def first_step(**options: Any) -> tuple[Run, dict[str, torch.Tensor]]:
    """A run as `made`, and the terms of its first batch, with gradients."""
    run, models = made(**options)
    batch = next(run.sets.all.batches(run.sets.collate, 8))
    torch.manual_seed(0)
    models.distiller.prepare([batch])
    out = models.distiller(**batch)
    out.loss.backward()
    assert out.loss.isfinite()
    return run, out.terms


def report_of(out: Path) -> dict:
    return json.loads((out / "student" / "fastkd.json").read_text())


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "student" / "model.safetensors")


def losses_of(out: Path) -> dict[str, float]:
    """The losses of a run's last evaluation."""
    return report_of(out)["history"][-1]["losses"]


def once(factory: pytest.TempPathFactory, name: str, make) -> Path:
    """A folder that ``make(folder)`` fills once for all processes of the tests."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"once-{name}"
    with FileLock(f"{folder}.lock"):
        if not (folder / ".made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / ".made").touch()
    return folder


def visible(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def same_weights(a: Path, b: Path) -> bool:
    a, b = weights_of(a), weights_of(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, how) -> None:
    """Call ``how`` after a step of a training."""
    original = fitting.TrainingCallback.on_step_end

    def on_step_end(self, args, state, control, **rest):
        if state.global_step == step:
            how()
        return original(self, args, state, control, **rest)

    monkeypatch.setattr(fitting.TrainingCallback, "on_step_end", on_step_end)


def crash() -> None:
    raise KeyboardInterrupt


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
