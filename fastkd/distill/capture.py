"""Reading a transformers model: its blocks, the hidden states worth keeping, its embeddings."""

import contextlib
import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastkd.analysis.model_inputs import in_eval_mode, reads_last_token
from fastkd.distill.families import (
    DESCRIBE,
    NoLayers,
    find_stack,
    is_a,
    is_encoder_decoder,
    passed_on,
    predicts_next_token,
    reads_whole_rows,
    rows_of,
)

# Of models that are their own base: Whisper's audio classifier, T5 for answers.
HEADS = ("Classification", "QuestionAnswering")


class Wanted(NamedTuple):
    """Layers whose hidden states, attention maps, queries, keys and values to keep."""

    layers: tuple[int, ...] = ()
    attentions: tuple[int, ...] = ()
    qkv: tuple[int, ...] = ()


class QKV(NamedTuple):
    """Queries (B, H, N, D), keys and values (B, G, N, D) of a layer: G groups of heads."""

    queries: Tensor
    keys: Tensor
    values: Tensor


class Kept(NamedTuple):
    """What was wanted, by layer."""

    hidden: dict[int, Tensor]
    attentions: dict[int, Tensor]
    qkv: dict[int, QKV]


class Model:
    """What a method asks about a model: its sizes, its head, its sentence token."""

    class_name: str
    num_layers: int
    hidden_size: int
    has_head: bool
    output_size: int | None
    per_token: bool
    sentence_last: bool
    #: transformers' ``problem_type``, None where neither the model nor its configuration says.
    problem: str | None = None
    #: Whether it is an encoder-decoder that writes words, and reads those before them.
    writes: bool = False
    #: Whether its logits are those of a vocabulary's words, and the tokenizer that has them.
    predicts_words: bool = False
    tokenizer: Any = None
    #: Of a teacher: how many first words are the student's as well, None for all.
    vocabulary: int | None = None
    #: What a head for classes tells apart, in the order of its logits, where that is known.
    class_labels: Sequence[str] = ()
    #: Number of the first token where no ``position_ids`` are given.
    first_position: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number and width of the layers; none where they can't be compared."""
        return (self.num_layers, self.hidden_size)

    def sentence_token(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """The token that the classification head reads, (B, D) of (B, N, D).

        The first one in encoders; in decoders and XLNet the last real one, padded on either side.
        """
        if not self.sentence_last:
            return hidden[:, 0]
        if mask is None:
            return hidden[:, -1]
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        last = (positions * mask).argmax(-1)  # (B,)
        return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2])).squeeze(1)

    def check_eager(self, method: str) -> None:
        """Raise unless the model computes attention maps that can be kept."""


class Backbone(Model):
    """Where a transformers encoder or decoder keeps its blocks, embeddings and sentence token.

    Of an encoder-decoder it is the decoder's blocks that count.

    Layer 0 is what enters the first block, layer l what leaves block l, and the last layer what
    the head reads (after a final norm, before a projection to the head's size): the numbering of
    transformers' ``hidden_states``.
    """

    #: Whether the model can return its hidden states.
    shows_states = True
    #: Why there are no layers to compare, where there are none.
    no_layers: str | None = None
    encoder_decoder = False
    #: Section of the configuration that describes the layers, and their number in there.
    section, depth_name = "", "num_hidden_layers"
    #: Times that the blocks' hidden states hold the positions of the tokens.
    streams = 1
    #: What makes the last hidden states as narrow as the head, after the blocks (opt-350m).
    narrowing: nn.Module | None = None
    #: Whether the head's outputs are aligned with labels in the loss alone (CTC).
    aligns = False
    #: The teacher's problem, where logits are compared and the student doesn't say its own.
    taught_problem: str | None = None

    def __init__(self, model: nn.Module, name: str = "model") -> None:
        inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        inner = getattr(inner, "_orig_mod", inner)
        config, base = getattr(inner, "config", None), getattr(inner, "base_model", None)
        if config is None or not isinstance(base, nn.Module):
            raise TypeError(
                f"{name} must be a transformers model, got {type(model).__name__}; describe any "
                "other with fastkd.distill.Blocks"
            )
        self._model, self.inner, self.base, self.config = model, inner, base, config
        self._traced = getattr(model, "_orig_mod", model)
        self.class_name, self._name = type(inner).__name__, name
        #: Whether the hidden states, attention and predictions that count are a decoder's.
        self.encoder_decoder = is_encoder_decoder(inner)
        vocabulary_head: Any = inner.get_output_embeddings()  # type: ignore[operator]
        self.writes = self.encoder_decoder and bool(vocabulary_head)
        self.has_head = base is not inner or bool(vocabulary_head) or is_a(inner, *HEADS)
        self.aligns = is_a(inner, "ForCTC", "ForRNNT", "ForTDT")
        #: Labels or vocabulary entries that the head tells apart, where it says so.
        self.output_size = rows_of(vocabulary_head) if vocabulary_head else config.num_labels
        if is_a(inner, "ForMultipleChoice"):
            self.output_size = None  # a logit for each choice
        #: Whether the head predicts something for each token.
        self.predicts_words = bool(vocabulary_head)
        self.per_token = bool(vocabulary_head) or is_a(inner, "ForTokenClassification")
        self.sentence_last = self.encoder_decoder or reads_last_token(config)
        self.causal = predicts_next_token(inner)
        # Hooks on blocks are not seen by compiled code, nor where a model calls block.forward.
        self.compiled = (
            hasattr(model, "_orig_mod") or getattr(inner, "_compiled_call_impl", None) is not None
        )
        #: Whether the logits are known to be those of the head as it is read, or of another.
        self.head_tried = self.other_head = False
        # Longformer's blocks see tokens padded to a multiple of the window; its states are cut.
        self._hooks_reach = not self.compiled and config.model_type != "longformer"
        #: Layers whose states transformers doesn't show under their number; None before a try.
        self._shown_wrong: set[int] | None = None
        self._replaced: list[Tensor] = []  # embeddings of the run that goes on
        #: Kinds of packed inputs whose documents are known not to see each other.
        self.known_apart: set[tuple[Any, ...]] = set()
        self._accepts = set(inspect.signature(inner.forward).parameters)
        self._known = self._accepts | passed_on(inner, base)
        self._read_layers()

    def _read_layers(self) -> None:
        """Note where the blocks are, or why their hidden states can't be had."""
        # ALBERT calls a few groups of weights again and again: its layers are calls.
        self.shared_blocks = self.config.model_type == "albert"
        # XLNet's blocks see (N, B, D).
        self.batch_dim = 1 if self.config.model_type == "xlnet" else 0
        # ProphetNet's see the tokens, and behind them a stream of predictions for each n-gram.
        if self.config.model_type == "prophetnet":
            self.streams = 1 + self.config.ngram
        self.stack: nn.Module = self.base
        self.last_modules: set[nn.Module] = {self.base}
        try:
            found = find_stack(self.inner)
        except NoLayers as error:
            self.no_layers = str(error)
            return
        self.section, self.depth_name = found.section, found.depth_name
        self.blocks_name, self.blocks = found.blocks_name, found.blocks
        self.num_layers = int(getattr(self.stack_config, found.depth_name))
        self.hidden_size = int(self.stack_config.hidden_size)
        #: The module that calls the blocks.
        self.stack = self.inner.get_submodule(self.blocks_name.rpartition(".")[0])
        self.narrowing = getattr(self.stack, "project_out", None)
        # OPT's head calls the decoder itself; elsewhere the base model, which ends later, has the
        # last word, unless it is one with the head.
        own = self.encoder_decoder or (self.base is self.inner and self.has_head)
        self.last_modules = {self.stack} if own else {self.stack, self.base}

    @property
    def sizes(self) -> tuple[int, ...]:
        return () if self.no_layers else super().sizes

    @property
    def stack_config(self) -> Any:
        """What configures the blocks: a section of its own where a model has several parts."""
        return getattr(self.config, self.section) if self.section else self.config

    def __getattr__(self, name: str) -> Any:
        if name in ("num_layers", "hidden_size", "blocks", "blocks_name") and self.no_layers:
            raise ValueError(f"{self._name}: {self.no_layers}")
        raise AttributeError(f"{type(self).__name__} has no {name}")

    @property
    def embeddings(self) -> nn.Module:
        """The module whose output is the embedding layer's output (LRC-BERT's emb)."""
        module = getattr(self.base, "embeddings", None)
        if isinstance(module, nn.Module):
            return module
        # T5's encoder has a table of its own, tied to its model's.
        owner: Any = self.stack if hasattr(self.stack, "get_input_embeddings") else self.base
        try:
            return owner.get_input_embeddings()  # type: ignore[no-any-return]
        except NotImplementedError:
            raise ValueError(
                f"the {self._name} ({self.class_name}) has no embeddings, which the method moves; "
                "set its perturb=False"
            ) from None

    @property
    def num_tokens(self) -> int | None:
        """Rows of the table that ``input_ids`` are looked up in, where there is one."""
        try:
            table = self.inner.get_input_embeddings()  # type: ignore[operator]
        except (AttributeError, NotImplementedError):
            return None
        return table.num_embeddings if isinstance(table, nn.Embedding) else None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return next(self.inner.parameters()).dtype

    @property
    def problem(self) -> str | None:  # type: ignore[override]
        """transformers' ``problem_type``; one label means regression when it isn't set.

        Heads for tokens, answers and choices don't ask for it, whatever the configuration says.
        """
        if self.per_token or is_a(self.inner, "ForQuestionAnswering", "ForMultipleChoice"):
            return None
        problem = getattr(self.config, "problem_type", None)
        if problem is None and self.has_head and self.config.num_labels == 1:
            return "regression"
        return problem or self.taught_problem

    @property
    def first_position(self) -> int:  # type: ignore[override]
        """Number of the first token: RoBERTa and MPNet count from behind the padding's id."""
        embeddings = getattr(self.base, "embeddings", None)
        padding: Any = getattr(embeddings, "padding_idx", None)
        by_padding = padding is not None and hasattr(embeddings, "position_embeddings")
        return int(padding) + 1 if by_padding else 0

    @property
    def groups_experts(self) -> bool:
        """Whether a mixture of experts runs by torch's grouped product."""
        return getattr(self.config, "_experts_implementation", None) == "grouped_mm"

    @property
    def class_labels(self) -> list[str]:  # type: ignore[override]
        """Names of the classes, where the configuration has one for each logit."""
        names = getattr(self.config, "id2label", None) or {}
        return [str(names[i]) for i in sorted(names)] if len(names) == self.output_size else []

    def reads_last_position(self, batch: dict[str, Any]) -> bool:
        """Whether a head for whole rows may read the last position, padding or not.

        So do XLNet's, whose positions are relative and whose tokenizer pads left, and a decoder's
        that can't tell padding by its token.
        """
        if getattr(self.config, "model_type", None) == "xlnet":
            return True
        rows = self.has_head and not self.per_token and not is_a(self.inner, "ForQuestionAnswering")
        if not (rows and self.sentence_last) or self.encoder_decoder:
            return False
        padding = self.config.get_text_config().pad_token_id
        return batch.get("input_ids") is None or padding is None

    def takes(self, argument: str) -> bool:
        """Whether the model, or its base model, has an argument of this name, not only **kwargs."""
        below = inspect.signature(self.base.forward).parameters
        return argument in self._accepts or argument in below

    def last_hidden(self, output: Any) -> Tensor:
        """The last hidden states (B, N, D) of what one of `last_modules` returned."""
        last: Tensor = output[0]
        return last

    @property
    def mixes_documents(self) -> bool:
        """Whether the family is known to read a packed row as one document."""
        return reads_whole_rows(self.config)

    @property
    def known_inputs(self) -> set[str]:
        """Names of the inputs that the model takes, itself or further in."""
        return self._known

    def readable(self, batch: dict[str, Any]) -> dict[str, Any]:
        """``batch`` without token types where the model knows none, though another one may."""
        unread = {"token_type_ids"} - self._known
        return {name: x for name, x in batch.items() if name not in unread}

    def with_decoder_inputs(self, batch: dict[str, Any], labels: Any) -> dict[str, Any]:
        """``batch`` with what a decoder that writes ``labels`` reads, the words before them."""
        given = ("decoder_input_ids", "decoder_inputs_embeds")
        if not self.writes or any(batch.get(name) is not None for name in given):
            return batch
        if not isinstance(labels, Tensor):
            raise ValueError(
                f"the {self._name} ({self.class_name}) is an encoder-decoder; pass labels (B, M), "
                "or decoder_input_ids"
            )
        return {**batch, given[0]: self._words_before(labels)}

    def _words_before(self, labels: Tensor) -> Tensor:
        shift = getattr(self.inner, "prepare_decoder_input_ids_from_labels", None)
        if shift is not None:
            return shift(labels=labels)  # type: ignore[no-any-return]
        shifted = labels.roll(1, -1)  # Whisper
        shifted[:, 0] = self.stack_config.decoder_start_token_id
        return shifted.masked_fill(shifted == -100, self.stack_config.pad_token_id)

    @property
    def model(self) -> nn.Module:
        """What was given; in a graph what that was compiled of, as Dynamo can't take it twice."""
        return self._traced if torch.compiler.is_compiling() else self._model

    def run(self, batch: dict[str, Any]) -> Any:
        """The model on ``batch``, without caches; raises for inputs that it doesn't know."""
        if self.dtype == torch.float64 and self.groups_experts:
            raise ValueError(
                f"{self._name} ({self.class_name}) is in float64, in which torch can't multiply "
                'grouped experts; call its set_experts_implementation("eager")'
            )
        return self.model(**self._given(batch))

    def _given(self, batch: dict[str, Any]) -> dict[str, Any]:
        inputs = self.readable(batch)
        self.check_inputs(inputs)
        for cache in ("use_cache", "use_mems"):
            if cache in self._known:
                inputs.setdefault(cache, False)
        if "return_dict" in self._known:
            inputs["return_dict"] = True
        return inputs

    def check_inputs(self, inputs: Iterable[str]) -> None:
        """Raise unless the model knows the inputs of these names."""
        for argument in inputs:
            if argument not in self._known:
                near = difflib.get_close_matches(argument, [*self._known, "labels"], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(
                    f"{self._name} ({self.class_name}) takes no input {argument!r}{hint}"
                )

    def observe(self, batch: dict[str, Any], wanted: "Wanted") -> tuple[Any, "Kept"]:
        """The model's output on ``batch``, and what was wanted of its inside."""
        inputs = dict(batch)
        if self.inner.training and any(wanted) and wanted != Wanted((self.num_layers,)):
            self._check_kept()
        if wanted.attentions:
            inputs["output_attentions"] = True
        if wanted.attentions or wanted.qkv:
            self._check_checkpointing()
        with capture_qkv(self, wanted.qkv) as qkv:
            output, hidden = self._observe_layers(inputs, set(wanted.layers))
        attentions = {}
        for layer in wanted.attentions:
            maps = getattr(output, self._shown("attentions"), None)
            if not maps or maps[layer - 1] is None:
                raise ValueError(
                    f"{self._name} ({type(self.inner).__name__}) returns no attention map of "
                    f"layer {layer}"
                )
            if maps[layer - 1].shape[-1] != maps[layer - 1].shape[-2]:
                raise ValueError(
                    f"{self._name} ({type(self.inner).__name__}) attends within windows, whose "
                    "attention maps can't be compared; take another method"
                )
            attentions[layer] = maps[layer - 1]
        setattr(output, self._shown("attentions"), None)
        return output, Kept(hidden, attentions, {layer: QKV(*qkv[layer]) for layer in wanted.qkv})

    def forget_run(self) -> None:
        """Of a run that counts for nothing: one more follows on the same batch."""
        self._replaced.clear()

    def _shown(self, what: str) -> str:
        """The name that the model's output has for its hidden states or attention maps."""
        return f"decoder_{what}" if self.encoder_decoder else what

    def _observe_layers(
        self, inputs: dict[str, Any], wanted: set[int]
    ) -> tuple[Any, dict[int, Tensor]]:
        # What was compiled by itself is a part of the graph while one is made of the Distiller.
        opaque = self.compiled and not torch.compiler.is_compiling()
        if self._hooks_reach or (self.compiled and not opaque):
            with capture(self, wanted) as kept:
                output = self.run(inputs)
            if kept.keys() >= wanted:
                return output, kept
            if not self.shows_states:
                missing = ", ".join(map(str, sorted(wanted - kept.keys())))
                raise ValueError(
                    f"{self._name} ({self.class_name}) ran without calling its blocks for layers "
                    f"{missing} as modules"
                )
            self._hooks_reach = False
            self.forget_run()
        if not wanted:
            return self.run(inputs), {}
        self._check_checkpointing()
        self._check_shown(inputs, wanted, opaque)
        # Keeps every layer, and works wherever transformers itself can give them.
        last: set[int] = set() if opaque else {self.num_layers}
        with capture(self, last) as kept:
            output = self.run({**inputs, "output_hidden_states": True})
        states = getattr(output, self._shown("hidden_states"), None)
        if states is None or len(states) != self.num_layers + 1:
            raise ValueError(
                f"{self._name} ({type(self.inner).__name__}) doesn't show the hidden states of "
                f"its {self.num_layers} layers"
            )
        setattr(output, self._shown("hidden_states"), None)
        # Vision models end their list before the final norm.
        found = {**dict(enumerate(states)), **kept}
        return output, {layer: found[layer] for layer in wanted}

    def _check_shown(self, inputs: dict[str, Any], wanted: set[int], opaque: bool) -> None:
        """Raise unless hidden states are those of the layers that have their number.

        All are compared once, in a pass that isn't compiled: layer l with what enters the next
        block, the last one with what the head reads.
        """
        if self._shown_wrong is None:
            with (
                torch.no_grad(),
                in_eval_mode(self.inner),
                _entering_blocks(self) as entered,
                capture(self, {self.num_layers}) as kept,
            ):
                given = self._given({**inputs, "output_hidden_states": True})
                output = self.inner._call_impl(**given)  # not the compiled one
            torch.clear_autocast_cache()  # weights cast here would get no gradient later
            states = getattr(output, self._shown("hidden_states"), None) or ()
            found = {**entered, **kept}
            self._shown_wrong = {
                i for i, x in enumerate(states) if i in found and not _is_state(x, found[i])
            }
        # Without a compiled graph the last one is read by a hook.
        wrong = wanted & self._shown_wrong - (set() if opaque else {self.num_layers})
        if wrong:
            what = "is compiled" if opaque else "doesn't call its blocks as modules"
            layers = ", ".join(map(str, sorted(wrong)))
            raise ValueError(
                f"{self._name} ({self.class_name}) {what}, and its hidden states of the numbers "
                f"{layers} are not the results of these layers; "
                + ("pass it uncompiled, or compile the Distiller" if opaque else DESCRIBE)
            )

    def _check_checkpointing(self) -> None:
        """Raise where what is kept inside the blocks would have no gradient."""
        if not torch.is_grad_enabled() or not self.inner.training:
            return
        for module in self.inner.modules():
            function = getattr(module, "_gradient_checkpointing_func", None)
            options = getattr(function, "keywords", {})
            if getattr(module, "gradient_checkpointing", False) and options.get("use_reentrant"):
                raise ValueError(
                    "activations are checkpointed with use_reentrant=True, which hides the inside "
                    f"of the blocks of the {self._name} ({self.class_name}) from the backward "
                    "pass; pass use_reentrant=False"
                )

    def _check_kept(self) -> None:
        """Raise where training leaves out blocks at random, whose results would then be missing."""
        side = "decoder_" if self.encoder_decoder else ""
        for name in (f"{side}layerdrop", "layerdrop"):
            if getattr(self.stack_config, name, 0.0):
                raise ValueError(
                    f"the {self._name} ({self.class_name}) leaves out layers at random while it "
                    f"trains ({name}={getattr(self.stack_config, name)}), and those can't be "
                    f"compared; make it with {name}=0 in its configuration"
                )

    def check_eager(self, method: str) -> None:
        """Raise unless the model computes attention maps that can be kept."""
        used = getattr(self.config, "_attn_implementation", "eager")
        if used != "eager":
            raise ValueError(
                f"{method} compares attention maps, which {used} attention never holds; load the "
                f'{self._name} with attn_implementation="eager", or call '
                f'{self._name}.set_attn_implementation("eager")'
            )


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
def _entering_blocks(backbone: Backbone) -> Iterator[dict[int, Tensor]]:
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


def _is_state(shown: Tensor, found: Tensor) -> bool:
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


def placed_for(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs on the device of a model that may be elsewhere, numbers in its dtype."""
    first = next(model.parameters(), None)
    if first is None:
        return inputs

    def place(x: Tensor) -> Tensor:
        numbers = x.is_floating_point() and first.is_floating_point()
        return x.to(first.device, first.dtype if numbers else None)

    return {name: tree_map_only(Tensor, place, x) for name, x in inputs.items()}


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
