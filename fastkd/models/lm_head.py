"""Inputs of language-model heads, in place of the logits of all tokens."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fastkd.lm.heads import Head
from fastkd.models.backbone import Backbone
from fastkd.models.hooks import Hook, first_tokens, hooked

# Largest difference, relative to the largest logit, between a model's logits and those of its head:
# in float32 or float64, and in half precision.
EXACT, HALVED = 1e-3, 5e-2


@dataclass(eq=False)
class HeadInputs:
    """Inputs (B, N, D) of a language model's head, and the head."""

    states: Tensor
    head: Head

    def logits(self) -> Tensor:
        """Logits (B, N, V)."""
        return self.head.logits(self.states)


@contextlib.contextmanager
def stopped_at_head(backbone: Backbone) -> Iterator[list[HeadInputs]]:
    """Context in which an LM head runs over one token of each row; yields the head's inputs.

    The list stays empty, and the head computes all logits, if its computation isn't known.
    """
    found: list[HeadInputs] = []
    layer = backbone.inner.get_output_embeddings()

    def stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Read while the model runs, when adapters are enabled or disabled as in this run.
        head = _head_of(backbone) if args and args[0].dim() == 3 else None
        if head is None:
            return None
        found.append(_as_multiplied(args[0], head))
        return (first_tokens(args[0]), *args[1:]), kwargs

    with hooked([Hook(layer, "before", stop)] if _can_stop(backbone, layer) else []):
        yield found


def _can_stop(backbone: Backbone, layer: Any) -> bool:
    # What a model computes after its head is only known for transformers' models.
    known = layer is not None and backbone.shows_states and not backbone.compiled
    # A graph can't compare the head with the logits, and reading the result of an eager step would
    # recompile it.
    if known and torch.compiler.is_compiling():
        known = _ends_with_head(backbone.inner, layer) or backbone.head_tried
    return known and not backbone.other_head and not _sharded(backbone)


def _ends_with_head(inner: nn.Module, layer: nn.Module) -> bool:
    """Whether `Head.of` knows what the model computes after its output layer."""
    own = type(inner).__module__.startswith("transformers.")
    hooks = [*inner._forward_hooks.values(), *layer._forward_hooks.values()]
    # FSDP's hooks change no values. Marian's models have a nonzero bias after the head.
    strange = any(not getattr(x, "__module__", "").startswith("torch.") for x in hooks)
    return own and not strange and not hasattr(inner, "final_logits_bias")


def _sharded(backbone: Backbone) -> bool:
    """Whether parameters are sharded in another way than by one-dimensional FSDP2."""
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
    """Head inputs in autocast's dtype, if the model multiplies in that dtype."""
    device = states.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (states.dtype, head.weight.dtype):
        dtype = torch.get_autocast_dtype(device)
        return HeadInputs(states.to(dtype), head.map(lambda x: x.to(dtype)))
    return HeadInputs(states, head)


class _BackwardAfterOutput(torch.autograd.Function):
    """``states``, whose gradient flows on after ``output`` got a gradient of zeros."""

    @staticmethod
    def forward(ctx, states, output):
        ctx.output = output.shape, output.dtype
        return states.view_as(states)

    @staticmethod
    def backward(ctx, grad):
        shape, dtype = ctx.output
        return grad, grad.new_zeros(shape, dtype=dtype)


def gathered(backbone: Backbone, found: HeadInputs, logits: Tensor) -> HeadInputs:
    """Head inputs with a head that is gathered again, if FSDP2 has freed its weights.

    The backward pass gathers the weights when it reaches the model's output, here ``logits``.
    """
    if not isinstance(backbone.model, FSDPModule):
        return found
    states = found.states
    if states.requires_grad and logits.requires_grad:
        states = _BackwardAfterOutput.apply(states, logits)
    return _as_multiplied(states, Head.of(backbone.model))


def is_head(backbone: Backbone, found: HeadInputs, logits: Tensor) -> bool:
    """Whether the model's own ``logits`` (B, 1, V) are those of the head; compared once.

    A model of an unknown family may compute more after its output layer.
    """
    # Inkling removes its vocabulary's padding from the logits.
    if logits.shape[-1] != found.head.weight.shape[0]:
        backbone.other_head = True
        return False
    # `_can_stop` has checked models inside a graph.
    if torch.compiler.is_compiling() or backbone.head_tried or is_fake(logits):
        return True
    if any(part.dropout is not None for part in found.head.low_rank):
        return True
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        made = HeadInputs(first_tokens(found.states), found.head).logits().double()
        error = (made - logits.double()).abs().max()
        half = torch.float16 in (logits.dtype, found.states.dtype) or torch.bfloat16 in (
            logits.dtype,
            found.states.dtype,
        )
        same = bool(error <= (HALVED if half else EXACT) * made.abs().max())
    backbone.head_tried, backbone.other_head = same, not same
    return same
