"""Facts of transformers' model families: arguments, padding, blocks, and what their heads read."""

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batches = Iterable[Mapping[str, Any]]
IGNORED = -100  # label of unlabelled samples and tokens


def reads_last_token(config: Any) -> bool:
    """Whether a model family's classification head reads the last token instead of the first."""
    from transformers.models.auto import modeling_auto

    kind = getattr(config, "model_type", None)
    if kind == "xlnet":
        return config.summary_type != "first"
    code = getattr(config, "auto_map", None) or {}  # classes shipped with the checkpoint
    encoder = kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    decoder = kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return (decoder or "AutoModelForCausalLM" in code) and not (
        encoder or "AutoModelForMaskedLM" in code
    )


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Context with the model in eval mode; on exit every submodule returns to its own mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def frames_mask(model: Any, batch: Mapping[str, Any], mask: Tensor | None) -> Tensor | None:
    """Mask (B, N) of the real hidden states.

    An audio model turns samples into frames: the mask of its samples is converted to one of frames.
    For all other models ``mask``, the mask of the inputs, is returned unchanged.
    """
    find = getattr(model, "_get_feature_vector_attention_mask", None)
    if find is None or mask is None or "input_values" not in batch:
        return mask
    frames = model._get_feat_extract_output_lengths(torch.tensor(mask.shape[1], device="cpu"))
    return find(int(frames), mask.long()).bool()  # type: ignore[no-any-return]


def without_adapters(model: nn.Module) -> nn.Module:
    """The model inside PEFT's wrapper, or ``model`` itself."""
    inner: nn.Module = getattr(model, "get_base_model", lambda: model)()
    return inner


def accepted(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """``inputs`` without those for which ``model`` has no argument, such as DistilBERT's.

    transformers separates documents by positions that start again, but only without a mask and a
    cache.
    """
    # PEFT's wrappers pass on the arguments of the model inside.
    arguments = inspect.signature(without_adapters(model).forward).parameters
    left_out = {"token_type_ids", "segments"} - arguments.keys()
    if "position_ids" in inputs:
        inputs = {**inputs, "use_cache": False}
        left_out.add("attention_mask")
    return {name: value for name, value in inputs.items() if name not in left_out}


#: Remedy in errors about models whose blocks can't be found.
DESCRIBE = "describe it with fastkd.distill.Blocks"


class NoLayers(ValueError):
    """A model without one list of blocks; the message says why."""


@dataclass(frozen=True)
class Stack:
    """The blocks of a model whose hidden states are compared: the only ones, or the decoder's."""

    blocks_name: str  # within the model
    blocks: nn.ModuleList
    section: str  # of the configuration that describes them, "" for the whole
    depth_name: str  # of their number in there


def is_encoder_decoder(inner: Any) -> bool:
    """Whether the model has a decoder; the configuration of an encoder alone claims one, too."""
    if not getattr(inner.config, "is_encoder_decoder", False):
        return False
    return inner.get_decoder() not in (inner, inner.base_model)


def find_stack(inner: Any) -> Stack:
    """The blocks of a transformers model.

    Raises:
        NoLayers: no list of blocks was found, or several; the message says which.
    """
    name, config = type(inner).__name__, inner.config
    root, section = inner.base_model, ""
    if is_encoder_decoder(inner):
        root = inner.get_decoder()
        section = "decoder" if getattr(config, "decoder", None) is not None else ""
    elif not hasattr(config, "num_hidden_layers"):
        section = _language_section(inner)
        root = inner.get_decoder() if section else root
    part = getattr(config, section) if section else config
    decodes = section == "decoder" or root is not inner.base_model
    decodes = decodes or getattr(root.config, "is_decoder", False)
    decodes = decodes or is_a(root, "Decoder", "DecoderWrapper")
    names = ("decoder_layers", "num_decoder_layers") if decodes else ()
    depth_name = next((n for n in (*names, "num_hidden_layers") if hasattr(part, n)), None)
    if depth_name is None or not hasattr(part, "hidden_size"):
        raise NoLayers(
            f"the configuration of {name} has no num_hidden_layers and hidden_size, without which "
            f"its layers can't be compared; take a method that compares none, or {DESCRIBE}"
        )
    shared = part.model_type == "albert"
    count = int(part.num_hidden_groups if shared else getattr(part, depth_name))
    blocks = _find_blocks(name, inner, root, count)
    blocks_name = next(path for path, module in inner.named_modules() if module is blocks)
    return Stack(blocks_name, blocks, section, depth_name)


def _language_section(inner: Any) -> str:
    """Configuration section of a multimodal model's language part; "" if it has one part."""
    config = inner.config
    parts = [n for n in getattr(config, "sub_configs", {}) if getattr(config, n, None) is not None]
    if not parts:
        return ""
    says_words = inner.get_output_embeddings() or hasattr(inner.base_model, "language_model")
    text = config.get_text_config()
    section = next((n for n in parts if getattr(config, n) is text), None)
    if section is None or not says_words:
        raise NoLayers(
            f"{type(inner).__name__} has several parts with layers of their own "
            f"({', '.join(parts)}); pass one of these parts, or take a method that compares no "
            "layers"
        )
    return section


def _find_blocks(name: str, inner: nn.Module, root: nn.Module, count: int) -> nn.ModuleList:
    """The only outermost list of ``count`` blocks in ``root``."""
    found: dict[str, nn.ModuleList] = {}
    for path, module in root.named_modules():
        inside = any(path.startswith(f"{other}.") for other in found)
        if isinstance(module, nn.ModuleList) and len(module) == count and not inside:
            found[path] = module
    # Classes whose outputs transformers records as hidden states, if the model names them.
    kinds: list[Any] = []
    for module in root.modules():
        recorded: Any = getattr(module, "_can_record_outputs", None) or {}
        shown = recorded.get("hidden_states")
        for each in shown if isinstance(shown, (list, tuple)) else [shown]:
            kinds.append(getattr(each, "target_class", each))
    recorded_kinds = tuple(kind for kind in kinds if isinstance(kind, type))
    for rule in (
        lambda block: isinstance(block, recorded_kinds),
        lambda block: any("Attention" in type(part).__name__ for part in block.modules()),
    ):
        ruled = {path: each for path, each in found.items() if any(map(rule, each))}
        found = ruled or found
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise NoLayers(f"{name} has no ModuleList of its {count} blocks; fastkd.distill needs one")
    prefix = next(path for path, module in inner.named_modules() if module is root)
    lists = [".".join(filter(None, (prefix, path))) for path in found]
    raise NoLayers(
        f"{name} has several lists of {count} modules that may be its blocks "
        f"({', '.join(lists)}); say which, with fastkd.distill.Blocks(model, {lists[0]!r}, ...)"
    )


def rows_of(head: nn.Module) -> int | None:
    """Number of vocabulary entries of an LM head."""
    weight: Any = getattr(head, "weight", None)
    if weight is None:
        return None
    weight = weight() if callable(weight) else weight  # torch.ao's quantised layers
    shape = getattr(weight, "ds_shape", weight.shape)  # before DeepSpeed's ZeRO-3 partitioned it
    return int(shape[0])


def passed_on(inner: nn.Module, base: nn.Module) -> set[str]:
    """Arguments that ``inner`` passes as ``**kwargs`` to its base model or its attention."""
    parameters = inspect.signature(inner.forward).parameters.values()
    if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters):
        return set()
    from transformers.utils.generic import TransformersKwargs

    below = inspect.signature(base.forward).parameters
    # Before it was listed, in transformers 5.0, the collator for packed rows already made seq_idx.
    return {*below, *TransformersKwargs.__annotations__, "return_dict", "seq_idx"}


def predicts_next_token(model: Any) -> bool:
    """Whether logits at position n predict the label at position n + 1."""
    from transformers.models.auto import modeling_auto

    # These language models predict the position itself.
    if is_a(model, "XLNetLMHeadModel", "WithLMHeadModel") or is_encoder_decoder(model):
        return False
    decoders = {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values(),
    }
    # Audio models and models with two heads, the last two names, are in neither mapping.
    names = "ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "DoubleHeadsModel"
    return is_a(model, *names, *decoders)


def reads_whole_rows(config: Any) -> bool:
    """Whether tokens attend to the whole row, even if positions restart.

    True for text encoders, except with flash attention, which takes the documents' boundaries.
    """
    from transformers.models.auto import modeling_auto

    decodes = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    flash = "flash" in (getattr(config, "_attn_implementation", None) or "")
    words = config.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return words and not decodes and not flash


def is_a(model: nn.Module, *endings: str) -> bool:
    """Whether the name of the model's class, or of a base class, ends with one of ``endings``."""
    return any(kind.__name__.endswith(endings) for kind in type(model).__mro__)
