"""Running a model once, with the hidden states, attention and logits that a method requests."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from fastkd._core.pooling import pool_tokens
from fastkd.lm.targets import TopK
from fastkd.models.backbone import Backbone, Model
from fastkd.models.hooks import (
    HeadInputs,
    capture,
    capture_qkv,
    entering_blocks,
    gathered,
    head_skipped,
    is_head,
    is_state,
    stopped_at_head,
)
from fastkd.models.inputs import DESCRIBE, in_eval_mode

Logits = Tensor | tuple[Tensor, Tensor]
HeadOutput = Literal["logits", "inputs", "none"]


class LayerRequest(NamedTuple):
    """Layers whose hidden states, attention maps, and queries, keys and values are captured."""

    layers: tuple[int, ...] = ()
    attentions: tuple[int, ...] = ()
    qkv: tuple[int, ...] = ()


class QKV(NamedTuple):
    """Queries (B, H, N, D), keys and values (B, G, N, D) of a layer, with G key-value heads."""

    queries: Tensor
    keys: Tensor
    values: Tensor


@dataclass
class Outputs:
    """Captured outputs of one model's run.

    Attributes:
        hidden, attentions, qkv: hidden states (B, N, D), attention maps (B, H, N, N), and queries,
            keys and values, by layer.
        logits: a (start, end) pair for question answering; None without a head, and with
            ``head_inputs``.
        head_inputs: inputs of a language model's head, if the run stopped before the head.
        loss: the model's own loss, of a head with targets of its own.
        names: names of the model's outputs.
    """

    hidden: dict[int, Tensor]
    logits: Logits | None
    loss: Tensor | None = None
    names: tuple[str, ...] = ()
    pooled: bool = False  # hidden states have one row per sample, (B, 1, D)
    attentions: dict[int, Tensor] = field(default_factory=dict)
    qkv: dict[int, QKV] = field(default_factory=dict)
    spans: bool = False  # hidden states are the sentence token, then means of spans
    head_inputs: HeadInputs | None = None
    top_k: TopK | None = None  # of a cached teacher (B, N, K), in place of head inputs
    router: Tensor | None = None  # load-balancing loss of a mixture of experts
    # Position (B,) of the token that a decoder's head for whole rows reads; None if that is the
    # last real token, or the first.
    sentence: Tensor | None = None

    @property
    def at_head(self) -> bool:
        """Whether predictions are the inputs of an LM head, or a top k, in place of logits."""
        return self.head_inputs is not None or self.top_k is not None

    def to(self, device: torch.device) -> "Outputs":
        head = self.head_inputs
        tensors = [] if head is None else [head.states, head.head.weight]
        pairs = self.logits if isinstance(self.logits, tuple) else (self.logits, self.sentence)
        tensors += [x for x in (*self.all_features(), *pairs) if x is not None]
        if self.top_k is None and all(x.device == device for x in tensors):
            return self
        # Blocking: a non-blocking copy to the CPU could be read before it is complete.
        moved = self.samples(lambda x: x.to(device))
        head = moved.head_inputs
        if head is not None:
            head = HeadInputs(head.states, head.head.map(lambda x: x.to(device)))
        return dataclasses.replace(moved, head_inputs=head)

    def without_logits(self) -> "Outputs":
        """The outputs that terms on features read."""
        return dataclasses.replace(self, logits=None, head_inputs=None, top_k=None)

    def samples(self, change: Callable[[Tensor], Tensor]) -> "Outputs":
        """The outputs with ``change`` applied to every tensor with a row for each sample."""
        sentence = None if self.sentence is None else change(self.sentence)
        changed = self.features(lambda x, tokens: change(x)).predictions(change)
        return dataclasses.replace(changed, sentence=sentence)

    def predictions(self, change: Callable[[Tensor], Tensor]) -> "Outputs":
        """The outputs with ``change`` applied to the logits, the head's inputs and the top k."""
        head = self.head_inputs
        return dataclasses.replace(
            self,
            logits=tree_map_only(Tensor, change, self.logits),
            head_inputs=None if head is None else HeadInputs(change(head.states), head.head),
            top_k=None if self.top_k is None else self.top_k.map(change),
        )

    def features(self, change: Callable[[Tensor, int], Tensor]) -> "Outputs":
        """The outputs with ``change(x, tokens)`` applied to every feature.

        ``tokens`` is the number of token dimensions: 1 for (B, ..., N, D), 2 for (B, H, N, N).
        """
        return dataclasses.replace(
            self,
            hidden={layer: change(x, 1) for layer, x in self.hidden.items()},
            attentions={layer: change(x, 2) for layer, x in self.attentions.items()},
            qkv={layer: QKV(*(change(x, 1) for x in qkv)) for layer, qkv in self.qkv.items()},
        )

    def all_features(self) -> list[Tensor]:
        """Every feature, in the order of `features`."""
        qkv = [x for layer in self.qkv.values() for x in layer]
        return [*self.hidden.values(), *self.attentions.values(), *qkv]

    def joined(self, others: "Sequence[Outputs]") -> "Outputs":
        """The outputs with the features of ``others``, of the same layers, as further samples."""
        rows = zip(*(each.all_features() for each in (self, *others)), strict=True)
        features = iter([torch.cat(parts) for parts in rows])
        sentence = self.sentence
        if sentence is not None:
            sentence = torch.cat(
                [sentence, *(x.sentence for x in others if x.sentence is not None)]
            )
        joined = self.features(lambda x, tokens: next(features))
        return dataclasses.replace(joined, sentence=sentence)

    def padded(self, more: int) -> "Outputs":
        """The outputs with ``more`` tokens of zeros appended."""
        if not more or self.pooled:
            return self
        return self.features(lambda x, tokens: F.pad(x, (0, more * (tokens - 1), 0, more)))


def model_outputs(
    backbone: Backbone, inputs: dict[str, Any], request: LayerRequest, head: HeadOutput = "logits"
) -> Outputs:
    """Run a model on ``inputs`` and return the requested outputs.

    ``head`` selects what is returned of the head: "logits"; "inputs" for the head's inputs in place
    of a language model's logits, if its logits are known to be those of the head; "none".
    """
    if backbone.layerdrop and backbone.inner.training and any(request):
        _check_layerdrop(backbone, request)
    if request.attentions or request.qkv:
        _check_checkpointing(backbone)
    inputs = {**inputs, "output_attentions": True} if request.attentions else dict(inputs)
    hidden: dict[int, Tensor] = {}
    qkv: dict[int, list[Tensor]] = {}
    heads: list[HeadInputs] = []
    with contextlib.ExitStack() as stack:
        if request.qkv:
            qkv = stack.enter_context(capture_qkv(backbone, request.qkv))
        if head == "none":
            stack.enter_context(head_skipped(backbone))
        elif head == "inputs" and backbone.predicts_words:
            heads = stack.enter_context(stopped_at_head(backbone))
        # A model compiled by itself is traced into the graph if the Distiller is compiled too.
        reached = backbone._hooks_reach or (backbone.compiled and torch.compiler.is_compiling())
        if not request.layers:
            output = backbone.run(inputs)
        elif reached:
            with capture(backbone, request.layers) as hidden:
                output = backbone.run(inputs)
        if not hidden.keys() >= {*request.layers}:
            output, hidden = _run_with_shown_states(backbone, inputs, {*request.layers}, hidden)
    attentions = _attention_maps(backbone, output, request.attentions)
    setattr(output, backbone.attentions_name, None)  # not to hold maps that nobody reads
    logits = getattr(output, "logits", None)
    ends = [getattr(output, f"{end}_logits", None) for end in ("start", "end")]
    if logits is None and all(isinstance(x, Tensor) for x in ends):
        logits = tuple(ends)
    router = getattr(output, "aux_loss", None)
    outputs = Outputs(
        hidden,
        None if head == "none" else logits,
        getattr(output, "loss", None),
        tuple(output.keys()) if hasattr(output, "keys") else (),
        router=router if isinstance(router, Tensor) else None,
        attentions=attentions,
        qkv={layer: QKV(*qkv[layer]) for layer in request.qkv},
    )
    if not heads or not isinstance(logits, Tensor):
        return outputs
    found = heads[-1]
    if isinstance(backbone.model, FSDPModule):
        found = gathered(backbone, found, logits)
    tried = backbone.head_tried and logits.shape[-1] == len(found.head.weight)
    if not tried and not is_head(backbone, found, logits):
        backbone.forget_run()
        return model_outputs(backbone, inputs, request)
    return dataclasses.replace(outputs, logits=None, head_inputs=found)


def _attention_maps(backbone: Backbone, output: Any, layers: tuple[int, ...]) -> dict[int, Tensor]:
    """The attention maps of ``layers`` in the model's output."""
    attentions, maps = {}, getattr(output, backbone.attentions_name, None)
    for layer in layers:
        if not maps or maps[layer - 1] is None:
            raise ValueError(
                f"{backbone} returns no attention map of layer {layer}; use another method"
            )
        if maps[layer - 1].shape[-1] != maps[layer - 1].shape[-2]:
            raise ValueError(
                f"{backbone} attends within windows, whose attention maps can't be compared; use "
                "another method"
            )
        attentions[layer] = maps[layer - 1]
    return attentions


def _run_with_shown_states(
    backbone: Backbone, inputs: dict[str, Any], layers: set[int], captured: Mapping[int, Tensor]
) -> tuple[Any, dict[int, Tensor]]:
    """The model's output and hidden states of ``layers`` from the output's list.

    For models in which hooks captured only the layers of ``captured``.
    """
    if not backbone.shows_states:
        missing = ", ".join(map(str, sorted(layers - captured.keys())))
        raise ValueError(
            f"{backbone} ran without calling its blocks for layers {missing} as modules, so hooks "
            "can't read them; call block(x), not block.forward(x)"
        )
    opaque = backbone.compiled and not torch.compiler.is_compiling()
    backbone._hooks_reach = False
    backbone.forget_run()
    _check_checkpointing(backbone)
    _check_shown(backbone, inputs, layers, opaque)
    # Holds every layer, and works for every model whose hidden states transformers returns.
    last: set[int] = set() if opaque else {backbone.num_layers}
    with capture(backbone, last) as captured:
        output = backbone.run({**inputs, "output_hidden_states": True})
    states = getattr(output, backbone.hidden_states_name, None)
    if states is None or len(states) != backbone.num_layers + 1:
        raise ValueError(
            f"{backbone} doesn't return the hidden states of its {backbone.num_layers} layers; "
            f"{DESCRIBE}"
        )
    setattr(output, backbone.hidden_states_name, None)
    # Vision models end their list before the final norm.
    shown = {i: x for i, x in enumerate(states) if i < backbone.num_layers}
    shown = {i: backbone.one_stream(x) for i, x in shown.items()}
    found = {backbone.num_layers: states[-1], **shown, **captured}
    return output, {layer: found[layer] for layer in layers}


def _check_shown(
    backbone: Backbone, inputs: dict[str, Any], layers: set[int], opaque: bool
) -> None:
    """Raise unless entry l of the returned hidden states is the output of layer l.

    The first call compares all entries in an uncompiled pass: entry l with the input of the next
    block, the last entry with the input of the head.
    """
    if backbone._shown_wrong is None:
        with (
            torch.no_grad(),
            in_eval_mode(backbone.inner),
            entering_blocks(backbone) as entered,
            capture(backbone, {backbone.num_layers}) as captured,
        ):
            output = backbone.run({**inputs, "output_hidden_states": True}, compiled=False)
        torch.clear_autocast_cache()  # weights cast under no_grad would get no gradient later
        backbone.forget_run()
        states = getattr(output, backbone.hidden_states_name, None) or ()
        found = {**entered, **captured}
        backbone._shown_wrong = {
            i for i, x in enumerate(states) if i in found and not is_state(x, found[i])
        }
    # Without a compiled graph a hook reads the last layer.
    wrong = layers & backbone._shown_wrong - (set() if opaque else {backbone.num_layers})
    if wrong:
        what = "is compiled" if opaque else "doesn't call its blocks as modules"
        numbers = ", ".join(map(str, sorted(wrong)))
        raise ValueError(
            f"{backbone} {what}, and its hidden states {numbers} are not the outputs of these "
            f"layers; {'pass it uncompiled, or compile the Distiller' if opaque else DESCRIBE}"
        )


def _check_checkpointing(backbone: Backbone) -> None:
    """Raise if checkpointing would cut the gradient of tensors captured inside the blocks."""
    if not torch.is_grad_enabled() or not backbone.inner.training:
        return
    for module in backbone.inner.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        options = getattr(function, "keywords", {})
        if getattr(module, "gradient_checkpointing", False) and options.get("use_reentrant"):
            raise ValueError(
                f"{backbone}: checkpointing with use_reentrant=True cuts the gradient of tensors "
                "inside the blocks; pass use_reentrant=False"
            )


def _check_layerdrop(backbone: Backbone, request: LayerRequest) -> None:
    """Raise if LayerDrop may skip a requested block; the last hidden states always exist."""
    value = getattr(backbone.stack_config, backbone.layerdrop, 0.0)
    if value and request != LayerRequest((backbone.num_layers,)):
        raise ValueError(
            f"the {backbone} skips layers at random in training ({backbone.layerdrop}={value}), "
            f"and skipped layers can't be compared; set {backbone.layerdrop}=0 in its configuration"
        )


@dataclass
class EnsembleOutputs(Outputs):
    """Outputs of an ensemble of teachers, in their order."""

    parts: tuple[Outputs, ...] = ()

    def _each(self, change: Callable[[Outputs], Outputs]) -> "EnsembleOutputs":
        return dataclasses.replace(self, parts=tuple(map(change, self.parts)))

    def without_logits(self) -> "Outputs":
        return self._each(Outputs.without_logits)

    def joined(self, others: Sequence[Outputs]) -> "Outputs":
        each = zip(self.parts, *(other.parts for other in others), strict=True)  # type: ignore[attr-defined]
        parts = tuple(first.joined(rest) for first, *rest in each)
        return dataclasses.replace(self, parts=parts)

    def padded(self, more: int) -> "Outputs":
        return self._each(lambda part: part.padded(more))


def pooled_rows(
    pool: str, model: Model, hidden: Tensor, mask: Tensor | None, sentence: Tensor | None = None
) -> Tensor:
    """One row per sample (B, D) from hidden states (B, N, D): the "cls" token or the "mean".

    ``sentence`` (B,) is the position of the "cls" token; see `Outputs`.
    """
    if pool == "mean":
        return pool_tokens(hidden, mask, "mean")
    return model.sentence_token(hidden, mask, sentence)
