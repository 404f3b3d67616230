"""Device, precision and batch size of a computation."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from fastkd.distributed import world_size
from fastkd.train.errors import InputError

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(name: str, precision: str) -> torch.device:
    """The device called ``name``, or auto: CUDA if there is one; checks ``precision`` on it."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device here (see `fastkd doctor`)")
    chosen = "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"
    if precision == "fp16" and chosen == "cpu":
        raise InputError("--precision fp16 needs a CUDA device; use fp32 or bf16 on the CPU")
    return torch.device(chosen)


@dataclass(frozen=True)
class Computation:
    """Device, precision, and the rows of a batch over all processes."""

    device: torch.device
    precision: str
    batch_size: int

    @classmethod
    def of(cls, options: Any, processes: int = 1) -> "Computation":
        """That of a command's ``options``, with --batch-size rows for each process."""
        device = choose_device(options.device_name, options.precision)
        return cls(device, options.precision, options.batch_size * processes)

    @property
    def own_rows(self) -> int:
        """Rows of a batch in one process."""
        return -(-self.batch_size // world_size())

    def autocast(self) -> contextlib.AbstractContextManager:
        """Context of the precision, as Trainer applies it in training."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=PRECISIONS[self.precision])
