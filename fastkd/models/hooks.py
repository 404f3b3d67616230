"""Hooks that read or replace values inside a model while it runs, or stop it at its LM head."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from fastkd.lm.heads import Head, SettledHead
from fastkd.models.backbone import Backbone


class Hook(NamedTuple):
    """``call(module, args, kwargs)`` before a module runs, or with its output after."""

    module: nn.Module
    when: str  # "before" or "after"
    call: Callable[..., Any]


@contextlib.contextmanager
def hooked(hooks: Iterable[Hook]) -> Iterator[None]:
    """Context with hooks on modules.

    Dynamo can't trace the handle counter of torch's public functions. Inside a graph the entries
    are therefore added to the modules' dictionaries of hooks.
    """
    handles: list[Any] = []
    replaced: list[tuple[nn.Module, str, Any]] = []
    try:
        for module, when, call in hooks:
            if not torch.compiler.is_compiling():
                handles.append(
                    module.register_forward_pre_hook(call, with_kwargs=True)
                    if when == "before"
                    else module.register_forward_hook(call)
                )
                continue
            entries: dict[str, Any] = {"_forward_hooks": call}
            if when == "before":
                entries = {"_forward_pre_hooks": call, "_forward_pre_hooks_with_kwargs": True}
            for name, entry in entries.items():
                previous = vars(module)[name]  # getattr would leave a copy in the module
                replaced.append((module, name, previous))
                setattr(module, name, {**previous, f"fastkd {len(previous)}": entry})
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, name, previous in reversed(replaced):
            setattr(module, name, previous)


@contextlib.contextmanager
def capture(backbone: Backbone, layers: Iterable[int]) -> Iterator[dict[int, Tensor]]:
    """Context that captures hidden states (B, N, D) of ``layers`` (0 = embeddings) by layer.

    The output of a block is read at the input of the next block, so that it includes what the model
    computes between the two.
    """
    captured: dict[int, Tensor] = {}
    requested = {*layers}  # torch 2.10 does not compile set() of a set
    last = backbone.num_layers if requested else 0
    calls = 0

    def read_input(layer: int | None, args: tuple, kwargs: dict[str, Any]) -> None:
        nonlocal calls
        if layer is None:  # shared blocks: the layer is the number of the call
            layer, calls = calls, calls + 1
            if layer not in requested:
                return
        entered = args[0] if args else _hidden_argument(kwargs)
        hidden = entered if isinstance(entered, Tensor) else entered[0]
        if backbone.streams > 1:
            hidden = hidden[:, : hidden.shape[1] // backbone.streams]
        hidden = backbone.one_stream(hidden)
        captured[layer] = hidden.transpose(0, 1) if backbone.batch_dim == 1 else hidden

    def read_output(module: nn.Module, args: tuple, output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        captured[last] = hidden.transpose(0, 1) if backbone.last_batch_dim == 1 else hidden

    read_by: list[tuple[nn.Module, int | None]] = []  # modules whose input is a layer's output
    hooks = []
    if backbone.shared_blocks:
        read_by = [(block, None) for block in backbone.blocks]
    elif requested:
        read_by = [(backbone.blocks[layer], layer) for layer in requested - {last}]
    if requested and last in requested:
        if backbone.narrowing is not None:
            read_by.append((backbone.narrowing, last))
        else:
            hooks = [Hook(module, "after", read_output) for module in backbone.last_modules]
    for module, layer in read_by:
        hooks.append(
            Hook(module, "before", lambda _, *given, layer=layer: read_input(layer, *given))
        )
    with hooked(hooks):
        yield captured


def _hidden_argument(kwargs: dict[str, Any]) -> Any:
    """The hidden states among a block's keyword arguments."""
    return kwargs["hidden_states"] if "hidden_states" in kwargs else next(iter(kwargs.values()))


@contextlib.contextmanager
def entering_blocks(backbone: Backbone) -> Iterator[dict[int, Tensor]]:
    """Context that captures the input of each block, also if the model calls ``block.forward``."""
    entered: dict[int, Tensor] = {}
    patched = []

    def reading(number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else _hidden_argument(kwargs)
            layer = len(entered) if backbone.shared_blocks else number
            entered[layer] = hidden.transpose(0, 1) if backbone.batch_dim == 1 else hidden
            return forward(*args, **kwargs)

        return read

    try:
        for number, block in enumerate(backbone.blocks):
            patched.append((block, vars(block).get("forward")))
            block.forward = reading(number, block.forward)
        yield entered
    finally:
        for block, before in patched:
            if before is None:
                del block.forward
            else:
                block.forward = before


def is_state(shown: Tensor, found: Tensor) -> bool:
    """Whether a hidden state in the model's output equals a block's input, in either layout."""
    # Longformer's blocks read extra tokens at the end, SqueezeBERT's blocks read (B, D, N).
    ways = (found[:, : shown.shape[1]], found.mT)
    return any(x.shape == shown.shape and shown.allclose(x, equal_nan=True) for x in ways)


# Names of the projections in a block in transformers' model families.
SEPARATE = (
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
)
FUSED = ("c_attn", "Wqkv", "qkv_proj")  # queries, then keys, then values


@contextlib.contextmanager
def capture_qkv(backbone: Backbone, layers: Sequence[int]) -> Iterator[dict[int, list[Tensor]]]:
    """Context that captures queries, keys and values of ``layers``, before any rotation."""
    kept: dict[int, list[Tensor]] = {}
    heads = _heads(backbone) if layers else 0

    def split(x: Tensor, size: int) -> Tensor:
        return x.unflatten(-1, (-1, size)).transpose(1, 2)  # (B, heads, N, size)

    def fused_reader(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, output: Tensor) -> None:
            groups = getattr(backbone.stack_config, "num_key_value_heads", None) or heads
            size = output.shape[-1] // (heads + 2 * groups)
            widths = [heads * size, groups * size, groups * size]
            kept[layer] = [split(x, size) for x in output.split(widths, -1)]

        return hook

    def reader(layer: int, place: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, output: Tensor) -> None:
            found = kept.setdefault(layer, [output] * 3)
            found[place] = output
            if place == 2:
                size = found[0].shape[-1] // heads
                kept[layer] = [split(x, size) for x in found]

        return hook

    hooks = []
    for layer in layers:
        separate, fused = _projections(backbone, layer)
        hooks += [Hook(x, "after", reader(layer, place)) for place, x in enumerate(separate)]
        if fused is not None:
            hooks.append(Hook(fused, "after", fused_reader(layer)))
    with hooked(hooks):
        yield kept


def _heads(backbone: Backbone) -> int:
    """Number of attention heads; BART's decoder has its own configuration entry."""
    config = backbone.stack_config
    name = "decoder_attention_heads" if backbone.depth_name == "decoder_layers" else ""
    return int(getattr(config, name, None) or config.num_attention_heads)


def _projections(backbone: Backbone, layer: int) -> tuple[list[nn.Module], nn.Module | None]:
    """The three modules that compute queries, keys and values, or one fused module."""
    if not (backbone.shared_blocks or backbone.compiled):
        block = backbone.blocks[layer - 1]
        named: dict[str, nn.Module] = {}
        for path, module in block.named_modules():
            named.setdefault(path.rpartition(".")[2], module)  # cross-attention comes second
        for names in SEPARATE:
            found = [named[name] for name in names if name in named]
            # SqueezeBERT's convolutions return (B, D, N).
            if len(found) == 3 and not isinstance(found[0], nn.Conv1d):
                return found, None
        # Without multi_query GPTBigCode interleaves queries, keys and values by head.
        if getattr(backbone.stack_config, "multi_query", True):
            for name in FUSED:
                if name in named:
                    return [], named[name]
    raise ValueError(
        f"{type(backbone.inner).__name__} doesn't show its queries, keys and values (shared or "
        "compiled blocks, or projections of other names)"
    )


@contextlib.contextmanager
def replaced_embeddings(
    backbone: Backbone, change: Callable[[Tensor], Tensor]
) -> Iterator[list[Tensor]]:
    """Context that replaces the embedding layer's output by ``change(emb)``; yields the result."""
    changed = backbone._replaced
    changed.clear()

    def hook(module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        # GPT-2 looks token types up in the same table after the tokens; they are left as they are.
        if changed:
            return None
        changed.append(change(output))
        return changed[0]

    handle = backbone.embeddings.register_forward_hook(hook)
    try:
        yield changed
    finally:
        handle.remove()
        backbone._replaced = []


def first_tokens(states: Tensor) -> Tensor:
    """The first token of each row, (..., 1, D).

    Contiguous: a strided batch would be multiplied row by row, with a copy of the head for each.
    """
    return states[..., :1, :].contiguous()


def head_skipped(backbone: Backbone) -> contextlib.AbstractContextManager[None]:
    """Context in which a vocabulary's head, if it is a module, runs over one token of each row.

    For outputs whose logits nobody reads. What a model computes after its head is only known for
    transformers' models.
    """
    head = None
    if backbone.shows_states and not backbone.compiled:
        head = backbone.inner.get_output_embeddings()

    def shorten(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        return (first_tokens(args[0]), *args[1:]), kwargs

    return hooked([] if head is None else [Hook(head, "before", shorten)])


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
    # A graph does not read what an eager step has found: it would be compiled again.
    eager = not torch.compiler.is_compiling()
    known = backbone.plain_head if eager else None
    if known is not None and (known[0] is not layer or type(layer.weight) is not nn.Parameter):
        known = backbone.plain_head = None

    def stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args or args[0].dim() != 3:
            return None
        if known is not None and not layer.weight.is_meta:
            head: Head = SettledHead(layer.weight, getattr(layer, "bias", None), *known[1:])
        else:
            try:
                # Read while the model runs, when adapters are enabled or disabled as in this run.
                head = Head.of(backbone.inner)
            except (TypeError, ValueError):
                return None
            if any(x.is_meta for x in head.tensors):
                return None
            wrapped = hasattr(layer, "modules_to_save") or hasattr(layer, "lora_A")
            if eager and not wrapped and head.weight is getattr(layer, "weight", None):
                backbone.plain_head = layer, head.scale, head.softcap
        autocast = torch.is_autocast_enabled(args[0].device.type)
        found.append(_as_multiplied(args[0], head) if autocast else HeadInputs(args[0], head))
        return (first_tokens(args[0]), *args[1:]), kwargs

    settled = known is not None and backbone.head_tried and not backbone.other_head
    with hooked([Hook(layer, "before", stop)] if settled or _can_stop(backbone, layer) else []):
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
    """Head inputs with a head that is gathered again, as FSDP2 has freed its weights.

    The backward pass gathers the weights when it reaches the model's output, here ``logits``.
    """
    states = found.states
    if states.requires_grad and logits.requires_grad:
        states = _BackwardAfterOutput.apply(states, logits)
    return _as_multiplied(states, Head.of(backbone.inner))


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
