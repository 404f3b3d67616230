"""Trainer of a run with --fsdp, whose checkpoints hold full models."""

import contextlib
import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from fastkd.train import processes, sharding
from fastkd.train.trainers import StepTrainer


class ShardedTrainer(StepTrainer):
    """`StepTrainer` of sharded models, with checkpoints of full models."""

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: the shards are on their devices."""

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        model = super()._wrap_model(model, *args, **kwargs)
        # Autocast only: FSDP averages the gradients itself.
        model = self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        vars(model)["_is_accelerate_prepared"] = True
        return model

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        distiller = self.distiller
        places = (distiller, "student"), (distiller, "method"), (self, "optimizer")
        full = [sharding.full_state(getattr(*place)) for place in places]  # all processes gather
        with contextlib.ExitStack() as stack:
            for place, value in zip(places, full, strict=True) if processes.first() else ():
                stack.enter_context(sharding.replaced(*place, value))
            super()._save_checkpoint(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any) -> None:
        distiller = self.distiller
        student, full = distiller.student, sharding.unread(distiller.student)
        method = sharding.StateDictProxy(distiller.method)
        with (
            sharding.replaced(distiller, "student", full),
            sharding.replaced(distiller, "method", method),
        ):
            super()._load_from_checkpoint(resume_from_checkpoint, *args)
        sharding.take(student, full)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        read = functools.partial(torch.load, map_location="cpu", weights_only=True)
        sharding.load_optimizer(self.optimizer, read(Path(checkpoint) / OPTIMIZER_NAME, mmap=True))
        self.lr_scheduler.load_state_dict(read(Path(checkpoint) / SCHEDULER_NAME))
