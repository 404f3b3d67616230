"""Hooks that keep or replace values inside a transformers model while it runs."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastkd.distill.backbone import Backbone


class Hooks:
    """Hooks on modules until `remove`, which torch.compile follows.

    It can't trace the counter behind the handles of the public functions, but what a module calls.
    """

    def __init__(self) -> None:
        self.handles: list[Any] = []
        self.before_traced: list[tuple[nn.Module, str, Any]] = []

    def before(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Call ``hook(module, args, kwargs)`` before the module runs."""
        if torch.compiler.is_compiling():
            self._trace(module, "_forward_pre_hooks", hook)
            self._trace(module, "_forward_pre_hooks_with_kwargs", True)
        else:
            self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def after(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Call ``hook(module, args, output)`` when the module has run."""
        if torch.compiler.is_compiling():
            self._trace(module, "_forward_hooks", hook)
        else:
            self.handles.append(module.register_forward_hook(hook))

    def _trace(self, module: nn.Module, kind: str, entry: Any) -> None:
        before = vars(module)[kind]  # getattr would leave a copy behind
        self.before_traced.append((module, kind, before))
        setattr(module, kind, {**before, f"fastkd {len(before)}": entry})

    def remove(self) -> None:
        """Leave the modules as they were."""
        for handle in self.handles:
            handle.remove()
        for module, kind, before in reversed(self.before_traced):
            setattr(module, kind, before)


@contextlib.contextmanager
def capture(backbone: Backbone, layers: Iterable[int]) -> Iterator[dict[int, Tensor]]:
    """Keep the hidden states ``(B, N, D)`` of ``layers`` (0 = embeddings) while the model runs.

    A block's result is read where the next one takes it, so what a model does between two
    blocks is included, and only the layers asked for stay in memory.
    """
    kept: dict[int, Tensor] = {}
    wanted = {*layers}  # torch 2.10 does not compile set() of a set
    hooks = Hooks()
    calls = 0

    def keep(layer: int, result: Any) -> None:
        hidden = result if isinstance(result, Tensor) else result[0]
        if backbone.streams > 1:
            hidden = hidden[:, : hidden.shape[1] // backbone.streams]
        kept[layer] = hidden.transpose(0, 1) if backbone.batch_dim == 1 else hidden

    def reader(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            keep(layer, _first(args, kwargs))

        return hook

    def count_calls(module: nn.Module, args: tuple, kwargs: dict) -> None:
        nonlocal calls
        if calls in wanted:
            keep(calls, _first(args, kwargs))
        calls += 1

    def read_last(module: nn.Module, args: tuple, output: Any) -> None:
        kept[backbone.num_layers] = backbone.last_hidden(output)

    try:
        if backbone.shared_blocks:
            for block in backbone.blocks:
                hooks.before(block, count_calls)
        else:
            for layer in wanted - {backbone.num_layers} if wanted else ():
                hooks.before(backbone.blocks[layer], reader(layer))
        if wanted and backbone.num_layers in wanted:
            if backbone.narrowing is not None:
                hooks.before(backbone.narrowing, reader(backbone.num_layers))
            else:
                for module in backbone.last_modules:
                    hooks.after(module, read_last)
        yield kept
    finally:
        hooks.remove()


@contextlib.contextmanager
def entering_blocks(backbone: Backbone) -> Iterator[dict[int, Tensor]]:
    """Keep what enters each block, also where a model calls ``block.forward``."""
    entered: dict[int, Tensor] = {}
    patched = []

    def reading(number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            hidden = _first(args, kwargs)
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
    """Whether a hidden state is what a block got, however that was laid out."""
    # Longformer's blocks see tokens behind those that it shows, SqueezeBERT's (B, D, N).
    ways = (found[:, : shown.shape[1]], found.mT)
    return any(x.shape == shown.shape and shown.allclose(x, equal_nan=True) for x in ways)


def _first(args: tuple, kwargs: dict[str, Any]) -> Any:
    """What enters a block."""
    if args:
        return args[0]
    return kwargs["hidden_states"] if "hidden_states" in kwargs else next(iter(kwargs.values()))


# Names of the projections in a block, as transformers' families call them.
SEPARATE = (
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
)
FUSED = ("c_attn", "Wqkv", "qkv_proj")  # queries, then keys, then values


@contextlib.contextmanager
def capture_qkv(backbone: Backbone, layers: Sequence[int]) -> Iterator[dict[int, list[Tensor]]]:
    """Keep queries, keys and values of ``layers``, before any rotation, while the model runs."""
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

    hooks = Hooks()
    try:
        for layer in layers:
            separate, fused = _projections(backbone, layer)
            for place, module in enumerate(separate):
                hooks.after(module, reader(layer, place))
            if fused is not None:
                hooks.after(fused, fused_reader(layer))
        yield kept
    finally:
        hooks.remove()


def _heads(backbone: Backbone) -> int:
    """Heads of attention; BART's decoder has a number of its own."""
    config = backbone.stack_config
    name = "decoder_attention_heads" if backbone.depth_name == "decoder_layers" else ""
    return int(getattr(config, name, None) or config.num_attention_heads)


def _projections(backbone: Backbone, layer: int) -> tuple[list[nn.Module], nn.Module | None]:
    """The modules that project to queries, keys and values: three, or one for all."""
    if not (backbone.shared_blocks or backbone.compiled):
        block = backbone.blocks[layer - 1]
        named: dict[str, nn.Module] = {}
        for path, module in block.named_modules():
            named.setdefault(path.rpartition(".")[2], module)  # cross-attention comes second
        for names in SEPARATE:
            found = [named[name] for name in names if name in named]
            # SqueezeBERT's convolutions have tokens behind features.
            if len(found) == 3 and not isinstance(found[0], nn.Conv1d):
                return found, None
        # Without it GPTBigCode holds those of one head together.
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
    """Put ``change(emb)`` in place of the embedding layer's output; yields what went on."""
    changed = backbone._replaced
    changed.clear()

    def hook(module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        # GPT-2 looks token types up in the same table; only the words are the embeddings.
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

    Side by side in memory: rows that are apart are multiplied one by one, with a copy of the head
    for each.
    """
    return states[..., :1, :].contiguous()


@contextlib.contextmanager
def reading_logits(backbone: Backbone, read: bool) -> Iterator[None]:
    """Where none are read the vocabulary's head, if a module, runs over one token of each row."""
    hooks, head = Hooks(), None
    # What a model does behind its head is known of transformers alone.
    if not read and backbone.shows_states and not backbone.compiled:
        head = backbone.inner.get_output_embeddings()
    if head is not None:
        hooks.before(
            head, lambda module, args, kwargs: ((first_tokens(args[0]), *args[1:]), kwargs)
        )
    try:
        yield
    finally:
        hooks.remove()
