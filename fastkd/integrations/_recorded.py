"""A teacher whose blocks are replaced by hidden states that an engine has written to files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastkd._core.extras import require


class Recordings:
    """Hidden states (T, L, D) in files, found by their tokens (T,)."""

    def __init__(self, folder: Path, layers: Sequence[int], hidden_size: int) -> None:
        self.folder, self.layers, self.hidden_size = folder, list(layers), hidden_size
        self.files: dict[tuple[int, ...], Path] = {}
        self.states: Tensor | None = None  # (B, N, L, D) of the current batch
        for path in sorted(folder.glob("*.safetensors")):
            tokens = self._open(path).get_tensor("token_ids")
            self.files[tuple(tokens.tolist())] = path
        if not self.files:
            raise FileNotFoundError(f"{folder} holds no file of hidden states (*.safetensors)")

    def _open(self, path: Path) -> Any:
        file = require("safetensors", "train").safe_open(path, "pt")
        if not {"token_ids", "hidden_states"} <= set(file.keys()):
            raise ValueError(
                f"{path} must hold token_ids and hidden_states, got {sorted(file.keys())}"
            )
        shape = file.get_slice("hidden_states").get_shape()
        wanted = [file.get_slice("token_ids").get_shape()[0], len(self.layers), self.hidden_size]
        if shape != wanted:
            raise ValueError(
                f"{path}: hidden_states must have shape {tuple(wanted)}, (tokens, layers, D), got "
                f"{tuple(shape)}; pass the layers that the engine was told to write"
            )
        return file

    def read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read the states of a batch, before the model runs on it."""
        ids: Tensor = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        mask = kwargs.get("attention_mask")
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        states = torch.zeros(*ids.shape, len(self.layers), self.hidden_size)
        for row, (tokens, kept) in enumerate(zip(ids.cpu(), real.cpu(), strict=True)):
            path = self.files.get(tuple(tokens[kept].tolist()))
            if path is None:
                raise KeyError(
                    f"the tokens of sample {row} of the batch are in no file of {self.folder} "
                    f"({len(self.files)} files); pass the tokens that the engine was given"
                )
            states[row, kept] = self._open(path).get_tensor("hidden_states").float()
        self.states = states.to(ids.device)


@dataclass(eq=False)
class RecordedBlock:
    """The forward method of block ``layer`` − 1: its output is hidden state ``layer``."""

    block: nn.Module
    following: nn.Module | None
    layer: int
    recordings: Recordings

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        known = self.recordings.layers
        if self.layer in known:
            assert self.recordings.states is not None
            return self.recordings.states[:, :, known.index(self.layer)].to(hidden_states)
        hooks = [*self.block._forward_hooks.values()]
        hooks += [] if self.following is None else self.following._forward_pre_hooks.values()
        # transformers has hooks of its own on every block.
        if any("fastkd" in hook.__module__ for hook in hooks):
            raise ValueError(
                f"layer {self.layer} of the teacher is compared, but {self.recordings.folder} has "
                f"layers {known}; have the engine write it"
            )
        return torch.full_like(hidden_states, torch.nan)  # not compared
