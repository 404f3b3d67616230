"""A frozen model in the host's memory, whose weights are on the device while it runs."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class Offload:
    """The weights of one model, in two places; see `offload`."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device, self.runs = model, device, 0
        pin = device.type == "cuda"
        self.stored: list[tuple[Tensor, Tensor]] = []
        for tensor in (*model.parameters(), *model.buffers()):
            host = tensor.data.cpu()
            self.stored.append((tensor, host.pin_memory() if pin else host))

    def enter(self) -> None:
        if not self.runs:
            for tensor, host in self.stored:
                tensor.data = host.to(self.device, non_blocking=True)
        self.runs += 1

    def leave(self) -> None:
        self.runs -= 1
        if not self.runs:
            for tensor, host in self.stored:
                tensor.data = host

    # As bound methods a copy of the model has hooks of its own.
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.enter()
        return tree_map_only(Tensor, lambda x: x.to(self.device), (args, kwargs))

    def after(self, *given: Any) -> None:
        self.leave()

    def stay(self, *args: Any, **kwargs: Any) -> nn.Module:
        """The model's ``_apply``, by which ``to`` moves a module and all in it."""
        return self.model


def offload(model: nn.Module, device: torch.device | str) -> int:
    """Keep a frozen model's weights in the host's memory, and on ``device`` only while it runs.

    For a teacher that doesn't fit on a GPU beside the student's gradients, optimizer state and
    activations: its weights are copied to the device before each pass, and freed after it. The
    model stays where it is in ``to``, which reaches it as a part of a Distiller.

    Args:
        model: the teacher, changed in place. Its weights must not be trained.
        device: where it runs.

    Returns:
        The number of bytes of its weights and buffers.

    >>> from transformers import BertConfig, BertModel
    >>> teacher = BertModel(BertConfig(hidden_size=24, num_hidden_layers=1))
    >>> saved = offload(teacher, "cpu")
    """
    moved = Offload(model, torch.device(device))
    vars(model)["_fastkd_offload"] = moved
    vars(model)["_apply"] = moved.stay
    model.register_forward_pre_hook(moved.before, with_kwargs=True)
    model.register_forward_hook(moved.after, always_call=True)
    moved.runs = 1
    moved.leave()
    return sum(host.nbytes for _, host in moved.stored)


@contextlib.contextmanager
def on_device(model: nn.Module | None) -> Iterator[None]:
    """Context in which an offloaded model's weights stay on the device; others are as they are."""
    moved = vars(model).get("_fastkd_offload") if model is not None else None
    if moved is None:
        yield
        return
    moved.enter()
    try:
        yield
    finally:
        moved.leave()
