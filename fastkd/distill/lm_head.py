"""Predictions of words as hidden states and a head: the logits of all tokens are never made."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fastkd.distill.backbone import Backbone
from fastkd.distill.hooks import Hooks, first_tokens
from fastkd.head import Head

# How far a head's logits may be from its model's, over the largest, before it is taken for another.
EXACT, HALVED = 1e-3, 5e-2


@dataclass(eq=False)
class HeadInputs:
    """What a language model's head multiplies, (B, N, D), and the head."""

    states: Tensor
    head: Head

    def logits(self) -> Tensor:
        """(B, N, V)."""
        return self.head.logits(self.states)

    def to(self, device: torch.device) -> "HeadInputs":
        return HeadInputs(self.states.to(device), self.head.map(lambda x: x.to(device)))

    def rows(self, count: int) -> "HeadInputs":
        """Of the first ``count`` samples."""
        return HeadInputs(self.states[:count], self.head)


@contextlib.contextmanager
def stopped_at_head(backbone: Backbone) -> Iterator[list[HeadInputs]]:
    """The head over a vocabulary reads a token of each row; yields what it would have read.

    Nothing, and the head reads all, where it isn't known what it does.
    """
    found: list[HeadInputs] = []
    hooks = Hooks()
    layer = backbone.inner.get_output_embeddings() if backbone.predicts_words else None
    layer = layer if _can_stop(backbone, layer) else None

    def stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Read here, where adapters are on or off as the model runs with them.
        head = _head_of(backbone) if args and args[0].dim() == 3 else None
        if head is None:
            return None
        found.append(_as_multiplied(args[0], head))
        return (first_tokens(args[0]), *args[1:]), kwargs

    if layer is not None:
        hooks.before(layer, stop)
    try:
        yield found
    finally:
        hooks.remove()


def _can_stop(backbone: Backbone, layer: Any) -> bool:
    # What a model does behind its head is known of transformers alone.
    known = layer is not None and backbone.shows_states and not backbone.compiled
    # A graph can't try the head out, and is made anew where it reads what an eager step has found.
    if known and torch.compiler.is_compiling():
        known = _ends_with_head(backbone.inner, layer) or backbone.head_tried
    return known and not backbone.other_head and not _sharded(backbone)


def _ends_with_head(inner: nn.Module, layer: nn.Module) -> bool:
    """Whether a model is one of those whose code behind the output layer `Head.of` knows."""
    own = type(inner).__module__.startswith("transformers.")
    hooks = [*inner._forward_hooks.values(), *layer._forward_hooks.values()]
    # Those of FSDP change no values. BART's bias behind the head is not zero in Marian's models.
    strange = any(not getattr(x, "__module__", "").startswith("torch.") for x in hooks)
    return own and not strange and not hasattr(inner, "final_logits_bias")


def _sharded(backbone: Backbone) -> bool:
    """Whether parts of it are whole only while they run, in another way than by FSDP2 alone."""
    parts = [p.device_mesh for p in backbone.inner.parameters() if isinstance(p, DTensor)]
    gathered = isinstance(backbone.model, FSDPModule) and all(mesh.ndim == 1 for mesh in parts)
    return bool(parts) and not gathered


def _head_of(backbone: Backbone) -> Head | None:
    try:
        head = Head.of(backbone.model)
    except (TypeError, ValueError):
        return None
    return None if any(x.is_meta for x in head.tensors) else head


def _as_multiplied(states: Tensor, head: Head) -> HeadInputs:
    """In the dtype of autocast, where the model multiplies in that."""
    device = states.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (states.dtype, head.weight.dtype):
        dtype = torch.get_autocast_dtype(device)
        return HeadInputs(states.to(dtype), head.map(lambda x: x.to(dtype)))
    return HeadInputs(states, head)


class _Behind(torch.autograd.Function):
    """``states``; ``output`` gets a gradient of zeros, before theirs goes on."""

    @staticmethod
    def forward(ctx, states, output):
        ctx.output = output.shape, output.dtype
        return states.view_as(states)

    @staticmethod
    def backward(ctx, grad):
        shape, dtype = ctx.output
        return grad, grad.new_zeros(shape, dtype=dtype)


def gathered(backbone: Backbone, words: HeadInputs, logits: Tensor) -> HeadInputs:
    """``words``, where FSDP2 lets the weights of a pass go: their head is gathered once more.

    The backward pass gathers them again when it comes to the model's output, here ``logits``.
    """
    if not isinstance(backbone.model, FSDPModule):
        return words
    states = words.states
    if states.requires_grad and logits.requires_grad:
        states = _Behind.apply(states, logits)
    return _as_multiplied(states, Head.of(backbone.model))


def is_head(backbone: Backbone, words: HeadInputs, logits: Tensor) -> bool:
    """Whether the model's own ``logits`` (B, 1, V) are the head's; tried out once.

    A model of a family that is not known may do more behind its output layer.
    """
    # Inkling leaves out what fills its vocabulary up.
    if logits.shape[-1] != words.head.weight.shape[0]:
        backbone.other_head = True
        return False
    # Of compiled code `_can_stop` has asked.
    if torch.compiler.is_compiling() or backbone.head_tried or is_fake(logits):
        return True
    if any(part.dropout is not None for part in words.head.low_rank):
        return True
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        made = HeadInputs(first_tokens(words.states), words.head).logits().double()
        error = (made - logits.double()).abs().max()
        half = torch.float16 in (logits.dtype, words.states.dtype) or torch.bfloat16 in (
            logits.dtype,
            words.states.dtype,
        )
        same = bool(error <= (HALVED if half else EXACT) * made.abs().max())
    backbone.head_tried, backbone.other_head = same, not same
    return same
