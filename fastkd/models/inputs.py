"""How transformers models read a batch: arguments, padding side, audio frames, classified token."""

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastkd._core.numerics import values_readable

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


# Inputs that hold a vector (D,) or a box for each token.
TOKEN_VECTORS = ("inputs_embeds", "input_features", "bbox")


def pad_right(batch: Mapping[str, Any], side: str = "") -> tuple[dict[str, Any], Tensor | None]:
    """The batch with left padding moved to the right.

    Each row is rotated, so that every model counts positions from the first real token. Where the
    mask's values can't be read, all rows are rotated, by 0 if they have no left padding.

    Args:
        batch: inputs with ``attention_mask`` (B, N), or (B, C, N) for multiple choice.
        side: prefix of the input names: "decoder_" for a decoder's inputs.

    Returns:
        The inputs, and the position (B, 1) that each row's first real token had; None instead of
        positions if the batch is unchanged.
    """
    inputs, name = dict(batch), f"{side}attention_mask"
    mask = inputs.get(name)
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 3) or not mask.numel():
        return inputs, None
    tokens = [
        n for n, x in inputs.items() if n.startswith(side) and _has_token_rows(n, x, mask, side)
    ]
    if len(tokens) == 1 or "cu_seq_lens_q" in inputs:  # the mask alone, or one packed row
        return inputs, None
    if values_readable(mask) and bool(mask[..., 0].all()):
        return inputs, None
    first = mask.bool().to(torch.uint8).argmax(-1, keepdim=True)
    for n in tokens:
        inputs[n] = rotate(inputs[n], first, mask.dim() - 1)
    positions = inputs.get(f"{side}position_ids")
    if isinstance(positions, Tensor) and f"{side}position_ids" not in tokens:
        # One row for all samples, or three positions a token (M-RoPE): (3, B, N).
        positions = positions.expand(*positions.shape[:-2], *mask.shape)
        inputs[f"{side}position_ids"] = rotate(positions, first, -1)
    return inputs, first


def _has_token_rows(name: str, x: Any, mask: Tensor, side: str) -> bool:
    """Whether the input ``x`` has an entry, or a vector, for each token of ``mask``."""
    if not isinstance(x, Tensor) or (not side and name.startswith("decoder_")):
        return False
    rows = name.removeprefix(side) in TOKEN_VECTORS and x.dim() == mask.dim() + 1
    return x.shape == mask.shape or (rows and x.shape[:-1] == mask.shape)


def rotate(x: Tensor, first: Tensor, dim: int) -> Tensor:
    """``x`` rotated along ``dim``, so that each row begins with its entry ``first`` (B, 1)."""
    N = x.shape[dim]
    order = (torch.arange(N, device=first.device) + first) % N
    order = order.to(x.device).reshape(*order.shape, *(1,) * (x.dim() - 1 - dim % x.dim()))
    return x.gather(dim, order.expand_as(x))


def without_adapters(model: nn.Module) -> nn.Module:
    """The model inside PEFT's wrapper, or ``model`` itself."""
    inner: nn.Module = getattr(model, "get_base_model", lambda: model)()
    return inner


def arguments_of(model: nn.Module) -> set[str]:
    """Names of a model's arguments; PEFT's wrappers pass on those of the model inside."""
    return {*inspect.signature(without_adapters(model).forward).parameters}


def accepted(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """``inputs`` without those for which ``model`` has no argument, such as DistilBERT's.

    transformers separates documents by positions that start again, but only without a mask and a
    cache.
    """
    left_out = {"token_type_ids", "segments"} - arguments_of(model)
    if "position_ids" in inputs:
        inputs = {**inputs, "use_cache": False}
        left_out.add("attention_mask")
    return {name: value for name, value in inputs.items() if name not in left_out}
