"""How long, how fast, in which precision and where to train."""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fastkd.distill.order import LABELLED_SHARE
from fastkd.distributed import world_size
from fastkd.train.errors import InputError

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TrainingConfig:
    """How long, how fast and where to train.

    A batch has ``batch_size`` rows, shared by all processes. ``trainer`` are further arguments of
    TrainingArguments, ``gradient_accumulation_steps`` among them: the batches of a step.
    ``labelled_share`` is the least share of a batch that has labels. A process reads its rows of a
    batch in ``accumulate`` micro-batches.
    """

    epochs: float = 3.0
    max_steps: int = -1
    batch_size: int = 32
    learning_rate: float = 5e-5
    weight_decay: float = 0.01
    warmup: float = 0.1
    precision: str = "fp32"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    labelled_share: float = LABELLED_SHARE
    accumulate: int = 1
    trainer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def own_rows(self) -> int:
        """Rows of a batch in one process."""
        return -(-self.batch_size // world_size())

    @property
    def batches_a_step(self) -> int:
        """Batches whose gradients a step adds up."""
        return self.trainer.get("gradient_accumulation_steps", 1)

    def steps(self, rows: int) -> tuple[int, int]:
        """Steps in all and steps in an epoch of so many rows."""
        per_epoch = math.ceil(math.ceil(rows / self.batch_size) / self.batches_a_step)
        total = self.max_steps if self.max_steps > 0 else math.ceil(self.epochs * per_epoch)
        return total, per_epoch


def choose_device(name: str, precision: str) -> torch.device:
    """The device called ``name``, or auto: CUDA if there is one; checks ``precision`` on it."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device here (see `fastkd doctor`)")
    chosen = "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"
    if precision == "fp16" and chosen == "cpu":
        raise InputError("--precision fp16 needs a CUDA device; use fp32 or bf16 on the CPU")
    return torch.device(chosen)


def autocast(training_config: TrainingConfig) -> contextlib.AbstractContextManager:
    """The precision of the plan, as Trainer applies it in training."""
    if training_config.precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(training_config.device.type, dtype=PRECISIONS[training_config.precision])
