"""A model as fastkd reads it: blocks, embeddings, head and sentence token."""

import difflib
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastkd._core import check
from fastkd.lm.soft_targets import Unmatched
from fastkd.lm.vocabulary_match import VocabularyMatch
from fastkd.models.inputs import (
    NoLayers,
    find_stack,
    is_a,
    is_encoder_decoder,
    passed_on,
    predicts_next_token,
    reads_last_token,
    reads_whole_rows,
    rows_of,
    without_adapters,
)

# Class names of models with a head that are their own base: Whisper's audio classifier, T5 for
# question answering.
HEADS = ("Classification", "QuestionAnswering")


class Model:
    """A model as a method reads it: sizes, head and sentence token."""

    class_name: str
    num_layers: int
    hidden_size: int
    has_head: bool
    output_size: int | None
    per_token: bool
    sentence_last: bool
    #: Id that a decoder's head for whole rows takes for padding: the head reads the last token of
    #: another id, with −1 the last position. None if the head reads another token, or is unknown.
    head_padding: int | None = None
    #: End of the text, whose last one an encoder-decoder's head for whole rows reads.
    head_end: int | None = None
    #: transformers' ``problem_type``; None if neither the model nor its configuration has one.
    problem: str | None = None
    #: Whether the model is an encoder-decoder that generates tokens.
    writes: bool = False
    #: Whether the logits are over a vocabulary.
    predicts_words: bool = False
    tokenizer: Any = None
    #: Of a teacher: number of first vocabulary entries that the student shares, None for all, or
    #: the match of two vocabularies.
    vocabulary: int | VocabularyMatch | None = None
    #: Of a teacher with another vocabulary: see ``unmatched`` of `fastkd.soft_target_loss`.
    unmatched: Unmatched = "renormalise"
    #: Class names in the order of the logits, if known.
    class_labels: Sequence[str] = ()
    #: Position of the first token without ``position_ids``.
    first_position: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number and width of the layers; empty if the layers can't be compared."""
        return (self.num_layers, self.hidden_size)

    def sentence_token(
        self, hidden: Tensor, mask: Tensor | None, position: Tensor | None = None
    ) -> Tensor:
        """The token (B, D) that the classification head reads, from hidden states (B, N, D).

        The first token in encoders. In other models the token at ``position`` (B,), where
        the head's own rule is known (`head_tokens`), or else the last real token, with padding on
        either side.
        """
        if not self.sentence_last:
            return hidden[:, 0]
        if position is None:
            if mask is None:
                return hidden[:, -1]
            position = last_of(mask)
        index = position.to(hidden.device)[:, None, None].expand(-1, 1, hidden.shape[2])
        return hidden.gather(1, index).squeeze(1)

    def head_tokens(self, batch: dict[str, Any]) -> Tensor | None:
        """Mask (B, N) of the tokens of which a head for whole rows reads the last one.

        None if the head reads the last real token, or the first.
        """
        tokens = batch.get("input_ids")
        if self.head_end is not None:
            return tokens.flatten(0, -2) == self.head_end if isinstance(tokens, Tensor) else None
        if self.head_padding is None:
            return None
        if isinstance(tokens, Tensor):
            mask = batch.get("attention_mask")
            if self.head_padding < 0 and isinstance(mask, Tensor):
                # A cached teacher's rows may have been rotated, with padding at the end.
                return mask.bool().flatten(0, -2)
            return tokens.flatten(0, -2) != self.head_padding
        # Without ids no padding is recognised.
        given = batch.get("inputs_embeds")
        return torch.ones_like(given[..., 0], dtype=torch.bool) if given is not None else None

    def check_eager(self, method: str) -> None:
        """Raise unless the model computes attention maps."""


class Backbone(Model):
    """Blocks, embeddings and sentence token of a transformers encoder or decoder.

    In an encoder-decoder the blocks are the decoder's.

    Layer 0 is the input of the first block and layer l the output of block l. The last layer is
    the input of the head (after a final norm, before a projection to the head's size).

    transformers numbers its ``hidden_states`` alike, with exceptions: those of Mamba, Falcon-Mamba
    and Mamba2 begin with the output of block 1, and the last ones of ViT, of Wav2Vec2 with
    ``do_stable_layer_norm`` and of opt-350m are not the head's input.
    """

    #: Whether the model can return its hidden states.
    shows_states = True
    #: Why the model has no layers to compare; None if it has some.
    no_layers: str | None = None
    encoder_decoder = False
    #: Configuration section of the layers, and its entry with their number.
    section, depth_name = "", "num_hidden_layers"
    #: Number of streams of token positions in the blocks' hidden states (ProphetNet).
    streams = 1
    #: Projection of the last hidden states to the head's width, after the blocks (opt-350m).
    narrowing: nn.Module | None = None
    #: Whether the loss aligns the head's outputs with labels (CTC).
    aligns = False
    #: Whether ``problem`` selects the head's loss; heads for tokens, answers and choices have one.
    uses_problem_type = True
    #: Fields of the model's output with hidden states and attention maps.
    hidden_states_name, attentions_name = "hidden_states", "attentions"
    #: Configuration entry with the probability of skipping a block in training; "" without one.
    layerdrop = ""
    #: Output layer, scale and cap of an LM head of one whole weight, once its logits were compared.
    plain_head: tuple[Any, float, float | None] | None = None
    #: Dimension of the samples in the output of `last_modules`.
    last_batch_dim = 0

    def __init__(self, model: nn.Module, name: str = "model") -> None:
        inner: Any = without_adapters(model)
        inner = getattr(inner, "_orig_mod", inner)
        config, base = getattr(inner, "config", None), getattr(inner, "base_model", None)
        if config is None or not isinstance(base, nn.Module):
            raise TypeError(
                f"{name} must be a transformers model, got {type(model).__name__}; describe any "
                "other with fastkd.distill.Blocks"
            )
        _check_no_virtual_tokens(model, name)
        self.model, self.inner, self.base, self.config = model, inner, base, config
        self.uncompiled: nn.Module = getattr(model, "_orig_mod", model)
        self.class_name, self._name = type(inner).__name__, name
        #: Whether hidden states, attention and predictions are those of a decoder with an encoder.
        self.encoder_decoder = is_encoder_decoder(inner)
        vocabulary_head: Any = inner.get_output_embeddings()  # type: ignore[operator]
        if self.encoder_decoder:
            self.hidden_states_name = "decoder_hidden_states"
            self.attentions_name = "decoder_attentions"
        self.writes = self.encoder_decoder and bool(vocabulary_head)
        self.has_head = base is not inner or bool(vocabulary_head) or is_a(inner, *HEADS)
        self.aligns = is_a(inner, "ForCTC", "ForRNNT", "ForTDT")
        #: Number of labels or vocabulary entries of the head, if fixed.
        self.output_size = rows_of(vocabulary_head) if vocabulary_head else config.num_labels
        if is_a(inner, "ForMultipleChoice"):
            self.output_size = None  # one logit per choice
        self.predicts_words = words = bool(vocabulary_head)
        self.per_token = words or is_a(inner, "ForTokenClassification")
        answers = is_a(inner, "ForQuestionAnswering")
        #: Whether the head makes one prediction for a row of tokens.
        self.has_head_of_rows = self.has_head and not self.per_token and not answers
        self.uses_problem_type = not (self.per_token or answers or is_a(inner, "ForMultipleChoice"))
        if self.uses_problem_type:
            self.problem = getattr(config, "problem_type", None)
            if self.problem is None and self.has_head and config.num_labels == 1:
                self.problem = "regression"
        try:
            table = inner.get_input_embeddings()  # type: ignore[operator]
        except (AttributeError, NotImplementedError):
            table = None
        #: Rows of the token embedding table; None without one.
        self.num_tokens = table.num_embeddings if isinstance(table, nn.Embedding) else None
        self.sentence_last = self.encoder_decoder or reads_last_token(config)
        self._find_head_end()
        self.causal = predicts_next_token(inner)
        # Hooks on blocks don't run in compiled code, or if a model calls block.forward.
        self.compiled = (
            hasattr(model, "_orig_mod") or getattr(inner, "_compiled_call_impl", None) is not None
        )
        #: Whether the logits were compared with those of `Head.of`, and whether they differ.
        self.head_tried = self.other_head = False
        # Longformer pads the blocks' tokens to a multiple of the window and cuts its states.
        self._hooks_reach = not self.compiled and config.model_type != "longformer"
        #: Layers whose entry in ``hidden_states`` is wrong; None before the check.
        self._shown_wrong: set[int] | None = None
        self._replaced: list[Tensor] = []  # embeddings of the current run
        #: Kinds of packed inputs whose documents are known to be independent.
        self.known_apart: set[tuple[Any, ...]] = set()
        self._accepts = set(inspect.signature(inner.forward).parameters)
        #: Names of the inputs that the model or a module inside accepts.
        self.known_inputs = self._accepts | passed_on(inner, base)
        #: Inputs that PEFT's wrapper takes and does not pass on.
        answers_in_peft = type(self.uncompiled).__name__ == "PeftModelForQuestionAnswering"
        self._dropped = {"token_type_ids", "position_ids"} if answers_in_peft else set[str]()
        self._read_layers()

    def _find_head_end(self) -> None:
        """Find the token that a head of rows reads."""
        config, name = self.config, self._name
        if self.has_head_of_rows and self.encoder_decoder:
            if config.model_type.startswith("t5gemma"):
                raise ValueError(
                    f"{name}: classifiers of T5Gemma ({self.class_name}) can't be read; pass a T5"
                )
            self.head_end = config.eos_token_id
        elif self.has_head_of_rows and self.sentence_last:
            padding = config.get_text_config().pad_token_id
            whole = padding is None or config.model_type == "xlnet"
            self.head_padding = -1 if whole else padding

    def _read_layers(self) -> None:
        """Find the blocks, or the reason why their hidden states can't be read."""
        # ALBERT calls a few groups of weights repeatedly: each call is a layer.
        self.shared_blocks = self.config.model_type == "albert"
        # XLNet's blocks read (N, B, D).
        self.batch_dim = 1 if self.config.model_type == "xlnet" else 0
        # ProphetNet's blocks read the tokens, then one stream of predictions per n-gram.
        if self.config.model_type == "prophetnet":
            self.streams = 1 + self.config.ngram
        self.stack: nn.Module = self.base
        #: Configuration of the blocks: a section of its own in models with several parts.
        self.stack_config: Any = self.config
        self.last_modules: set[nn.Module] = {self.base}
        try:
            found = find_stack(self.inner)
        except NoLayers as error:
            self.no_layers = str(error)
            return
        self.section, self.depth_name = found.section, found.depth_name
        if self.section:
            self.stack_config = getattr(self.config, self.section)
        names = ("decoder_layerdrop", "layerdrop") if self.encoder_decoder else ("layerdrop",)
        self.layerdrop = next((x for x in names if getattr(self.stack_config, x, 0.0)), "")
        self.blocks_name, self.blocks = found.blocks_name, found.blocks
        self.num_layers = int(getattr(self.stack_config, found.depth_name))
        self.hidden_size = int(self.stack_config.hidden_size)
        #: The module that calls the blocks.
        self.stack = self.inner.get_submodule(self.blocks_name.rpartition(".")[0])
        self.narrowing = getattr(self.stack, "project_out", None)
        # OPT's head calls the decoder itself. In other models the last module before the head is
        # the base model, unless the model with the head is its own base.
        own = self.encoder_decoder or (self.base is self.inner and self.has_head)
        self.last_modules = {self.stack} if own else {self.stack, self.base}

    def __str__(self) -> str:
        return f"{self._name} ({self.class_name})"

    def one_stream(self, hidden: Tensor) -> Tensor:
        """Hidden states (B, N, D) of a block's input, which may have several residual streams.

        Of hyper-connections (DeepSeek-V4, HY-V4, GLM-5-Next; Qwen4-Exp) the streams' mean, of AltUp
        (Gemma 3n) the stream that the block computes.
        """
        config = self.stack_config
        if (streams := getattr(config, "hc_count", 1)) > 1:  # (B, N, streams · D)
            hidden = hidden.unflatten(-1, (streams, self.hidden_size))
        if max(streams, getattr(config, "hc_mult", 1)) > 1 and hidden.dim() == 4:
            return hidden.mean(2)  # (B, N, streams, D)
        if getattr(config, "altup_num_inputs", 1) > 1 and hidden.dim() == 4:
            return hidden[config.altup_active_idx]  # (streams, B, N, D)
        return hidden

    @property
    def sizes(self) -> tuple[int, ...]:
        return () if self.no_layers else (self.num_layers, self.hidden_size)

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
        # T5's encoder has an embedding table tied to the model's.
        owner: Any = self.stack if hasattr(self.stack, "get_input_embeddings") else self.base
        try:
            return owner.get_input_embeddings()  # type: ignore[no-any-return]
        except NotImplementedError:
            raise ValueError(
                f"the {self} has no embeddings, which the method perturbs; set its perturb=False"
            ) from None

    @property
    def dtype(self) -> torch.dtype:
        return next(self.inner.parameters()).dtype

    @property
    def first_position(self) -> int:  # type: ignore[override]
        """Position of the first token: RoBERTa and MPNet count from the padding id plus one."""
        embeddings = getattr(self.base, "embeddings", None)
        padding: Any = getattr(embeddings, "padding_idx", None)
        by_padding = padding is not None and hasattr(embeddings, "position_embeddings")
        return int(padding) + 1 if by_padding else 0

    @property
    def class_labels(self) -> list[str]:  # type: ignore[override]
        """Class names, if the configuration has one per logit."""
        names = getattr(self.config, "id2label", None) or {}
        return [str(names[i]) for i in sorted(names)] if len(names) == self.output_size else []

    def reads_last_position(self, batch: dict[str, Any]) -> bool:
        """Whether a head for whole rows may read the last position even if it is padding.

        True for XLNet, whose positions are relative and whose tokenizer pads on the left, and for
        decoders that can't recognise padding by its id.
        """
        if getattr(self.config, "model_type", None) == "xlnet":
            return True
        if self.head_padding is None:
            return False
        return batch.get("input_ids") is None or self.head_padding == -1

    def takes(self, argument: str) -> bool:
        """Whether the model, or its base model, has an argument of this name, not only **kwargs."""
        below = inspect.signature(self.base.forward).parameters
        return argument in self._accepts or argument in below

    @property
    def mixes_documents(self) -> bool:
        """Whether the model family reads a packed row as one document."""
        return reads_whole_rows(self.config)

    def readable(self, batch: dict[str, Any]) -> dict[str, Any]:
        """``batch`` without token types, if only the other model accepts them."""
        unread = {"token_type_ids"} - self.known_inputs
        return {name: x for name, x in batch.items() if name not in unread}

    def with_decoder_inputs(self, batch: dict[str, Any], labels: Any) -> dict[str, Any]:
        """``batch`` with decoder inputs: by default the labels shifted right."""
        given = ("decoder_input_ids", "decoder_inputs_embeds")
        if not self.writes or any(batch.get(name) is not None for name in given):
            return batch
        if not isinstance(labels, Tensor):
            raise ValueError(
                f"the {self} is an encoder-decoder; pass labels (B, M), or decoder_input_ids"
            )
        return {**batch, given[0]: self._shifted_right(labels)}

    def _shifted_right(self, labels: Tensor) -> Tensor:
        shift = getattr(self.inner, "prepare_decoder_input_ids_from_labels", None)
        if shift is not None:
            return shift(labels=labels)  # type: ignore[no-any-return]
        shifted = labels.roll(1, -1)  # Whisper
        shifted[:, 0] = self.stack_config.decoder_start_token_id
        return shifted.masked_fill(shifted == -100, self.stack_config.pad_token_id)

    def run(self, batch: dict[str, Any], *, compiled: bool = True) -> Any:
        """Run the model on ``batch`` without key-value caches; raise for unknown inputs."""
        inputs = dict(batch)
        if "token_type_ids" not in self.known_inputs:  # only the other model accepts them
            inputs.pop("token_type_ids", None)
        if not self.known_inputs.issuperset(inputs):
            self.check_inputs(inputs)
        if not self._dropped.isdisjoint(inputs):
            raise ValueError(
                f"{self._name}: PEFT's wrapper for question answering drops "
                f"{min(self._dropped.intersection(inputs))}; make the adapters without task_type, "
                'with modules_to_save=["qa_outputs"]'
            )
        in_groups = getattr(self.config, "_experts_implementation", None) == "grouped_mm"
        if in_groups and self.dtype == torch.float64:
            raise ValueError(
                f"{self} is in float64, but torch's product of grouped experts is not; call its "
                'set_experts_implementation("eager")'
            )
        for cache in ("use_cache", "use_mems"):
            if cache in self.known_inputs:
                inputs.setdefault(cache, False)
        if "return_dict" in self.known_inputs:
            inputs["return_dict"] = True
        if not compiled:
            return self.inner._call_impl(**inputs)
        # Dynamo can't trace a compiled model inside a graph.
        model = self.uncompiled if torch.compiler.is_compiling() else self.model
        return model(**inputs)

    def check_inputs(self, inputs: Iterable[str]) -> None:
        """Raise unless the model accepts inputs of these names."""
        for argument in inputs:
            if argument not in self.known_inputs:
                near = difflib.get_close_matches(argument, [*self.known_inputs, "labels"], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"{self} takes no input {argument!r}{hint}")

    def forget_run(self) -> None:
        """Discard the last run's embeddings, before another run on the same batch."""
        self._replaced.clear()

    def check_eager(self, method: str) -> None:
        """Raise unless the model computes attention maps."""
        used = getattr(self.config, "_attn_implementation", "eager")
        if used != "eager":
            raise ValueError(
                f"{method} compares attention maps, which {used} attention omits; load the "
                f'{self._name} with attn_implementation="eager", or call '
                f'{self._name}.set_attn_implementation("eager")'
            )


def _check_no_virtual_tokens(model: nn.Module, name: str) -> None:
    """Raise if PEFT puts virtual tokens into the rows; a prefix is in the blocks' cache."""
    for module in model.modules():
        config: Any = getattr(module, "active_peft_config", None)
        if not getattr(config, "is_prompt_learning", False):
            continue
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind not in ("PREFIX_TUNING", "CARTRIDGE"):
            raise ValueError(
                f"{name}: PEFT's {kind} puts {config.num_virtual_tokens} virtual tokens before "
                "each row, which have no counterpart in the batch; use LoRA, or prefix tuning"
            )


def last_of(mask: Tensor) -> Tensor:
    """Position (B,) of the last True of each row (B, N)."""
    return (torch.arange(mask.shape[1], device=mask.device) * mask).argmax(-1)


def placed_for(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs on the model's device, floating-point inputs in the model's dtype.

    accelerate's hooks move the inputs of a model whose weights it has offloaded.
    """
    first = next(model.parameters(), None)
    if first is None:
        return inputs

    device = None if first.is_meta else first.device
    dtype = first.dtype if first.is_floating_point() else None
    return tree_map_only(
        Tensor,
        lambda x: x.to(device or x.device, dtype if x.is_floating_point() else None),
        inputs,
    )


class Blocks(nn.Module):
    """Any model with a list of blocks, as a Distiller's teacher or student.

    A block takes hidden states (B, N, D), such as tokens of a text or patches of an image, as its
    first argument. It returns hidden states, alone or as the first entry of a tuple. Inputs are
    passed to the model by name. ``attention_mask`` (B, N) marks the real tokens; the model
    receives it only if its ``forward`` accepts it.

    Args:
        model: the model; it returns logits alone, as the first entry of a tuple, or as ``.logits``.
        blocks: name of its ModuleList or Sequential, such as "encoder.layers".
        hidden_size: D.
        output_size: number of classes or vocabulary entries of the logits; None for a model
            without a head, whose output is not read.
        final: name of the module whose output the head reads, such as the last norm; by default
            the last block.
        embeddings: name of the module whose output LRC-BERT perturbs.
        batch_first: False where hidden states are (N, B, D).
        per_token: the head makes a prediction for each token.
        causal: the logits at a position predict the next token.
        sentence_last: the head reads the last token, not the first.
        regression: the head predicts numbers.

    Raises:
        ValueError: the model has no module of this name, or ``blocks`` is no list of modules.

    >>> import torch
    >>> from fastkd.distill import FCD, Distiller
    >>> def model(layers):
    ...     return nn.Sequential(nn.Embedding(50, 16), nn.Sequential(
    ...         *(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    ...           for _ in range(layers))))
    >>> sides = [Blocks(model(n), "1", hidden_size=16) for n in (4, 2)]
    >>> out = Distiller(*sides, FCD(task_weight=0))(input=torch.arange(48).view(4, 12))
    >>> sorted(out.terms)
    ['samples', 'tokens', 'total']
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: str,
        *,
        hidden_size: int,
        output_size: int | None = None,
        final: str | None = None,
        embeddings: str | None = None,
        batch_first: bool = True,
        per_token: bool = False,
        causal: bool = False,
        sentence_last: bool = False,
        regression: bool = False,
    ) -> None:
        super().__init__()
        check.positive_int("hidden_size", hidden_size)
        for name, path in (("blocks", blocks), ("final", final), ("embeddings", embeddings)):
            try:
                model.get_submodule(path or "")
            except AttributeError as error:
                raise ValueError(
                    f"{name}: {type(model).__name__} has no module {path!r}; "
                    "pass a name from named_modules()"
                ) from error
        found = model.get_submodule(blocks)
        if not isinstance(found, (nn.ModuleList, nn.Sequential)) or not len(found):
            raise ValueError(
                f"blocks: {blocks!r} is a {type(found).__name__} of {len(list(found.children()))} "
                "modules; pass the name of a filled ModuleList or Sequential"
            )
        self.model, self.blocks = model, blocks
        self.hidden_size, self.output_size = hidden_size, output_size
        self.final, self.embeddings = final, embeddings
        self.batch_first, self.per_token, self.causal = batch_first, per_token, causal
        self.sentence_last, self.regression = sentence_last, regression

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


@dataclass
class BlocksOutput:
    """What is read of the output of a model that `Blocks` describes."""

    logits: Tensor | None


class BlocksBackbone(Backbone):
    """`Backbone` of a model that `Blocks` describes."""

    shows_states = False
    mixes_documents = False  # unknown; tested with a packed batch
    num_tokens = None

    def __init__(self, model: Blocks, name: str) -> None:
        inner: Any = model.model
        self.model: Any = model
        self.uncompiled = model
        self.inner, self.base = inner, inner
        self.config: Any = getattr(inner, "config", None)
        self.stack_config = self.config
        self.problem = "regression" if model.regression else None
        self.has_head, self.output_size = model.output_size is not None, model.output_size
        self.class_name, self._name = type(inner).__name__, name
        self.per_token, self.causal = model.per_token, model.causal
        self.sentence_last = model.sentence_last
        self.hidden_size, self.blocks_name = model.hidden_size, model.blocks
        self.blocks: Any = inner.get_submodule(model.blocks)
        self.num_layers = len(self.blocks)
        self.batch_dim = self.last_batch_dim = 0 if model.batch_first else 1
        self.shared_blocks = self.compiled = False
        self._hooks_reach = True
        self._replaced: list[Tensor] = []
        self.known_apart = set()
        self.last_modules = {inner.get_submodule(model.final) if model.final else self.blocks[-1]}
        parameters = inspect.signature(inner.forward).parameters
        self.known_inputs = self._accepts = set(parameters)
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    @property
    def embeddings(self) -> nn.Module:
        if self.model.embeddings is None:
            raise ValueError(
                f"embeddings: the method perturbs the embeddings of the {self._name} "
                f"({self.class_name}), but Blocks names none; pass embeddings=..., or set the "
                "method's perturb=False"
            )
        return self.inner.get_submodule(self.model.embeddings)

    def reads_last_position(self, batch: dict[str, Any]) -> bool:
        # The head may read the last position, padding or not.
        return self.has_head and self.sentence_last and not self.per_token

    def run(self, batch: dict[str, Any], *, compiled: bool = True) -> Any:
        inputs = dict(batch)
        if not self._takes_all:
            if "attention_mask" not in self.known_inputs:
                inputs.pop("attention_mask", None)
            self.check_inputs(inputs)
        output = self.model(**inputs)
        if not self.has_head:
            return BlocksOutput(None)
        if isinstance(output, (tuple, list)):
            output = output[0]
        elif not isinstance(output, Tensor):
            output = output["logits"] if isinstance(output, dict) else output.logits
        return BlocksOutput(output)

    def check_eager(self, method: str) -> None:
        raise ValueError(
            f"{method} compares attention maps, which only transformers models return "
            f"({self.class_name} is none); use another method"
        )


def backbone_of(model: nn.Module, name: str) -> Backbone:
    return BlocksBackbone(model, name) if isinstance(model, Blocks) else Backbone(model, name)
