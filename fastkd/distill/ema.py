"""A teacher that is the student: an exponential moving average of its parameters."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastkd._core import check
from fastkd.models.blocks import Blocks
from fastkd.models.inputs import without_adapters

HALF = (torch.bfloat16, torch.float16)


class EMATeacher(nn.Module):
    """Exponential moving average of a student's parameters, as its teacher.

    θ_t ← decay·θ_t + (1 − decay)·θ_s after each optimizer step: call `update`. A
    `DistillationTrainer` calls it itself. With decay 1 the teacher stays the student of the start.
    The teacher may get inputs of its own, ``teacher_...`` in a batch, such as a prompt with a
    demonstration (SDFT) or with feedback (SDPO): see `fastkd.distill.Distiller.forward`.

    The average is part of the Distiller's ``state_dict()`` and of a Trainer's checkpoints, so that
    a resumed run goes on with it. Under DistributedDataParallel each process updates its own copy,
    by equal parameters. Under FSDP2 make the teacher first, then shard its ``model`` as the
    student: each process averages its shards, and a Trainer must not save checkpoints.

    Args:
        student: a transformers model, also with PEFT adapters. It is copied here.
        decay: 0 to 1. Parameters in half precision are averaged in float32.

    Raises:
        ValueError, TypeError: a decay out of range, or a student described by `Blocks`.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from fastkd.distill import Distiller, SoftTargets
    >>> student = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=2))
    >>> teacher = EMATeacher(student, decay=0.99)
    >>> distiller = Distiller(teacher, student, SoftTargets())
    >>> optimizer = torch.optim.SGD(distiller.parameters(), lr=0.1)
    >>> ids = torch.arange(20).view(2, 10)
    >>> distiller(input_ids=ids, labels=ids).loss.backward()
    >>> optimizer.step()
    >>> teacher.update()  # after each optimizer step
    """

    def __init__(self, student: nn.Module, decay: float) -> None:
        super().__init__()
        check.fraction("decay", decay)
        if isinstance(student, Blocks):
            raise TypeError("student: EMATeacher averages transformers models, got Blocks")
        self.decay = float(decay)
        student = getattr(student, "_orig_mod", student)
        self.__dict__["student"] = student  # no submodule, whose mode and state would be its own
        self.model = copy.deepcopy(student).requires_grad_(False).eval()
        self._wide: dict[str, Tensor] = {}  # averages of half-precision parameters, in float32

    def get_base_model(self) -> nn.Module:
        """See ``peft.PeftModel``: the model whose layers are read."""
        return without_adapters(self.model)

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the student; call it after each optimizer step.

        Raises:
            ValueError: the student has other parameters than when it was copied.
        """
        student = self.__dict__["student"]
        for module in (*self.model.modules(), *student.modules()):
            if hasattr(module, "reshard"):  # FSDP2 may hold whole parameters after a forward pass
                module.reshard()
        ours, theirs = (dict(x.named_parameters()) for x in (self.model, student))
        if ours.keys() != theirs.keys():
            changed = sorted(ours.keys() ^ theirs.keys())[0]
            raise ValueError(
                f"student: its parameters have changed since EMATeacher copied it, {changed} for "
                "one; make the teacher after adapters are added"
            )
        for name, average in ours.items():
            current = _like(theirs[name], average)
            if average.dtype in HALF:
                wide = self._wide.setdefault(name, average.float()).to(average.device)
                self._wide[name] = wide.lerp_(current.float(), 1 - self.decay)
                average.copy_(wide)
            else:
                average.lerp_(current.to(average.dtype), 1 - self.decay)
        for average, current in zip(self.model.buffers(), student.buffers(), strict=True):
            average.copy_(current)

    def get_extra_state(self) -> dict[str, Tensor]:
        """Averages of half-precision parameters in float32, for ``state_dict()``."""
        return self._wide

    def set_extra_state(self, state: Mapping[str, Tensor]) -> None:
        self._wide = {name: x.clone() for name, x in state.items()}


def _like(current: Tensor, average: Tensor) -> Tensor:
    """The student's parameter on the average's device, whole if the average is."""
    whole: Any = current
    if hasattr(current, "full_tensor") and not hasattr(average, "full_tensor"):
        whole = whole.full_tensor()
    moved: Tensor = whole if hasattr(average, "full_tensor") else whole.to(average.device)
    return moved


def averaging_teachers(teacher: nn.Module) -> dict[str, EMATeacher]:
    """The averages in a Distiller's ``teacher`` by their names in it, "" for itself."""
    return {name: x for name, x in teacher.named_modules() if isinstance(x, EMATeacher)}
