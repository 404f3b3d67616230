"""What vLLM computes of a teacher: log-probabilities and hidden states. vLLM isn't imported."""

import inspect
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastkd._core.extras import require
from fastkd.integrations._served import NONE, from_entries, positions_of
from fastkd.lm.targets import TopK


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


__all__ = ["recorded_teacher", "top_k"]


def top_k(prompt_logprobs: Sequence[Mapping[Any, Any] | None], k: int) -> TopK:
    """The k most probable tokens at each position of one prompt.

    Entry i predicts token i from the tokens before it, as the student's output at i − 1 does.
    So row i − 1 of the result is entry i: compare with the student's rows ``[:-1]``.

    Args:
        prompt_logprobs: N entries of ``RequestOutput.prompt_logprobs`` or of the field of the same
            name in a server's JSON (``prompt_logprobs=k`` in the request; vllm-project/vllm,
            ``PromptLogprobs`` and ``Logprob``). The first is None (or empty); each other maps token
            ids, in JSON strings, to a ``Logprob`` or a dict with "logprob". vLLM adds the prompt's
            own token where it isn't among the k most probable.
        k: tokens kept at a position, at least 1.

    Returns:
        ids int64 and log-probabilities float32 (N − 1, k), most probable first, with
        ``tail="bucket"``. They are at temperature 1, unless the engine returns processed
        log-probabilities. −inf, −9999 in JSON, is −inf: an entry without effect.

    Raises:
        ValueError, TypeError: k below 1, fewer than two positions, a first entry with tokens, a
            later one with none, with fewer than k, or with only −inf; NaN, a log-probability
            above 0, or probabilities that add up to more than 1; values of another form.

    >>> top = top_k([None, {"7": {"logprob": -1.5}, "3": {"logprob": -0.5}}], k=2)
    >>> top.ids
    tensor([[3, 7]])
    """
    entries = [
        [(_token(key, i), _value(value, i)) for key, value in _mapping(entry, i).items()]
        for i, entry in enumerate(positions_of("prompt_logprobs", prompt_logprobs))
    ]
    return from_entries("prompt_logprobs", entries, k)


def recorded_teacher(
    model: nn.Module, folder: str | os.PathLike[str], layers: Sequence[int]
) -> nn.Module:
    """``model`` with its blocks replaced by the hidden states that vLLM has written.

    It is a teacher for a `fastkd.distill.Distiller`, and `Distiller.cache_teacher` writes its
    outputs into a `TeacherCache`. Each row's real tokens must be those of one file. The final norm
    and the head are the model's own; the blocks' weights are freed.

    The files are those of vLLM's ``ExampleHiddenStatesConnector`` (speculative method
    "extract_hidden_states"), and of speculators' data generation, which uses it: safetensors with
    ``token_ids`` (T,) and ``hidden_states`` (T, L, D).

    Args:
        model: the teacher as a transformers decoder, such as Llama's, with its embeddings, final
            norm and head. Changed in place.
        folder: the connector's ``shared_storage_path``.
        layers: L numbers, ``eagle_aux_hidden_state_layer_ids`` of the request. Layer l is the
            output of block l, from 1; the last one, before the final norm, gives the logits.

    Raises:
        ValueError, TypeError: layers beyond the model's, a file with other shapes, a method that
            compares a layer that isn't in the files, a family whose blocks return more than a
            Tensor.
        FileNotFoundError: no file.
        KeyError: a batch with tokens that are in no file.
    """
    from fastkd.models.backbone import Backbone

    backbone = Backbone(model, "model")
    blocks: Any = backbone.blocks
    returned = inspect.signature(type(blocks[0]).forward).return_annotation
    if returned not in (Tensor, "torch.Tensor"):
        raise TypeError(
            f"model: a {type(blocks[0]).__name__} of {backbone.class_name} doesn't return a Tensor "
            "alone; pass a decoder such as Llama, Qwen3 or GPT-OSS"
        )
    wrong = [layer for layer in layers if not 1 <= layer <= backbone.num_layers]
    if wrong or len(set(layers)) < len(layers):
        raise ValueError(
            f"layers must be different numbers from 1 to {backbone.num_layers}, got {list(layers)}"
        )
    recordings = Recordings(Path(folder), layers, backbone.hidden_size)
    for i, block in enumerate(blocks):
        following = blocks[i + 1] if i + 1 < len(blocks) else None
        for name, _ in list(block.named_children()):
            delattr(block, name)
        block.forward = RecordedBlock(block, following, i + 1, recordings)
    backbone.stack.register_forward_pre_hook(recordings.read, with_kwargs=True)
    return model


def _mapping(entry: Any, i: int) -> Mapping[Any, Any]:
    if not isinstance(entry, Mapping | None):
        raise TypeError(f"prompt_logprobs[{i}] must be a dict or None, got {type(entry).__name__}")
    return entry or {}


def _token(key: Any, i: int) -> int:
    try:
        return int(key)
    except ValueError:
        raise ValueError(
            f"prompt_logprobs[{i}] must have token ids as keys, got {key!r}; request no token texts"
        ) from None


def _value(entry: Any, i: int) -> float:
    value = entry.get("logprob") if isinstance(entry, Mapping) else getattr(entry, "logprob", None)
    if not isinstance(value, int | float):
        raise TypeError(
            f"prompt_logprobs[{i}] must map token ids to Logprob or to dicts with a number as "
            f'"logprob", got {entry!r}'
        )
    return value if math.isnan(value) or value > NONE else -math.inf
