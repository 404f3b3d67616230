"""A smaller student made of a teacher: of some of its layers, of some of its widths."""

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from fastkd._core.checks import check_choice, check_positive_int
from fastkd.distill.backbone import Backbone
from fastkd.distill.layers import check_layers, layer_map
from fastkd.distill.width import cut, narrowed, without_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def student_from_teacher(
    teacher: "PreTrainedModel",
    layers: int | Sequence[int] | None = None,
    *,
    config: Mapping[str, int] | None = None,
    weights: Literal["cut", "random"] = "cut",
) -> "PreTrainedModel":
    """A student of fewer layers or widths that starts from the teacher's weights.

    Layers: LayerDrop, FCD sec. 4.2. Widths: the axes of Minitron (Muralidharan et al. 2024, sec.
    2), hidden dimensions, attention heads and neurons, by norms of weights where Minitron takes
    activations, so without data. Hidden dimensions stay by their share in the squared gains of all
    norms times that in the squared weights that read them, the same ones in every layer: what a
    norm hands on has one variance but for its gain. Of a block's neurons those stay whose weights'
    norms have the largest products, of its heads those with the largest sum over their dimensions
    of |value|^2 |output|^2. Key and value heads stay with the query heads
    that share them. Smaller heads keep the dimensions with the largest |query|^2 |key|^2 and
    |value|^2 |output|^2; where positions turn them, the pairs that turn as fast as the student's,
    and queries are scaled as for the teacher's head size. Norms aren't changed for fewer
    dimensions.

    The student is built from the teacher's configuration with the layer count (and lists with an
    entry per layer) shortened, so ``save_pretrained`` and ``from_pretrained`` give the same model
    back. Embeddings, chosen blocks and head are copied; nothing is shared with the teacher. Of an
    encoder-decoder the decoder is shortened and the encoder stays whole, as generating takes its
    time in the decoder (Shleifer & Rush 2020); widths are those of both.

    Args:
        teacher: a transformers encoder, decoder or encoder-decoder whose blocks are a ModuleList,
            with any head.
        layers: teacher layers to keep, counted from 1, increasing; or how many, which
            ``layer_map("uniform", ...)`` then chooses, with layer 1 for the first of them where
            that block alone is of another kind (T5, ModernBERT). All of them if None.
        config: sizes of the student, by name: ``hidden_size``, ``intermediate_size``,
            ``num_attention_heads``, ``num_key_value_heads``, ``head_dim``, as far as the family has
            them, under these names or its own; ``num_hidden_layers`` instead of ``layers``. Others
            stay, or follow where the family has no choice: of BERT's the head size.
        weights: "cut" from the teacher; BERT, RoBERTa, ELECTRA, ALBERT, DistilBERT, GPT-2, LLaMA,
            Mistral, Qwen2, Qwen3 and T5 can be cut by width. "random": as the class begins, in any
            family, any size, and any number of its configuration.

    Returns:
        A model of the teacher's class, dtype and device, all parameters trainable.

    Raises:
        ValueError: layers that the teacher doesn't have, blocks that differ in shape, sizes that
            can't be, or a family that isn't cut by width.
        TypeError: not a transformers model, or ``layers`` the name of a map: call `layer_map`.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=4,
        ...                     num_attention_heads=2, intermediate_size=32)
        >>> student = student_from_teacher(BertModel(config), [2, 4])
        >>> student.config.num_hidden_layers
        2
        >>> student = student_from_teacher(BertModel(config), 2, config={"hidden_size": 8})
        >>> student.get_input_embeddings().weight.shape
        torch.Size([50, 8])
    """
    check_choice("weights", weights, ("cut", "random"))
    if hasattr(teacher, "peft_config"):
        raise ValueError(
            "teacher has PEFT adapters, which can't be shortened; merge them first: "
            "teacher = teacher.merge_and_unload()"
        )
    backbone = Backbone(teacher, "teacher")
    changes = dict(config or {})
    for name in {"num_hidden_layers", backbone.depth_name} & changes.keys():
        if layers is not None:
            raise ValueError(f"layers and {name} exclude each other")
        layers = changes.pop(name)
        check_positive_int(name, layers)
    if weights == "random":
        student = _random(backbone, layers, changes)
    else:
        student = _cut(backbone, layers, changes)
    first = next(backbone.inner.parameters())
    student.to(device=first.device, dtype=first.dtype)
    if getattr(backbone.inner, "generation_config", None) is not None:
        student.generation_config = copy.deepcopy(backbone.inner.generation_config)
    return student.train(teacher.training)


def _random(backbone: Backbone, layers: Any, changes: dict[str, Any]) -> Any:
    """A student that has learned nothing, of any size."""
    config = copy.deepcopy(backbone.config)
    depth = backbone.num_layers
    if layers is not None:
        if isinstance(layers, int) and layers > depth:
            chosen = [max(1, i * depth // layers) for i in range(1, layers + 1)]
        else:
            chosen = _chosen(layers, backbone)
        if backbone.shared_blocks:
            _shorten_shared(config, chosen)
        else:
            _shorten(_section(backbone, config), backbone.depth_name, chosen)
    narrow = narrowed(_section(backbone, config), changes, cut=False)
    if backbone.section:
        setattr(config, backbone.section, narrow)
    else:
        config = narrow
    try:
        return type(backbone.inner)(config)
    except ValueError as error:
        line = str(error).strip().splitlines()[0]
        name = type(backbone.inner).__name__
        raise ValueError(f"{name} can't be built with {changes}: {line}") from error


def _section(backbone: Backbone, config: Any) -> Any:
    """The part of a configuration that describes the blocks."""
    return getattr(config, backbone.section) if backbone.section else config


def _cut(backbone: Backbone, layers: Any, changes: dict[str, Any]) -> Any:
    """The student of the teacher's weights."""
    chosen = _chosen(layers, backbone)
    config = copy.deepcopy(backbone.config)
    if backbone.shared_blocks:
        blocks = _shorten_shared(config, chosen)
    else:
        blocks = [i - 1 for i in chosen]
        by_number = getattr(config, "scale_attn_by_inverse_layer_idx", False)
        if by_number and blocks != list(range(len(blocks))):
            raise ValueError(
                f"{type(backbone.inner).__name__} scales attention by the number of the layer "
                f"(scale_attn_by_inverse_layer_idx), which changes in layers {chosen}; keep the "
                "first ones"
            )
        _shorten(_section(backbone, config), backbone.depth_name, chosen)
    narrow = narrowed(config, changes, cut=True) if changes else config
    # In the teacher's dtype from the start: float32 would round a float64 teacher's weights.
    student: Any = type(backbone.inner)(narrow).to(backbone.dtype)
    made = Backbone(student, "student")
    if made.blocks_name != backbone.blocks_name:
        raise ValueError(
            f"the blocks of {type(student).__name__} are {backbone.blocks_name}, but with "
            f"{len(chosen)} of them {made.blocks_name} would be taken for its blocks; keep another "
            "number of layers"
        )
    weights = _select(backbone.inner.state_dict(), backbone.blocks_name, blocks)
    whole = without_memory(type(student), config) if changes else student
    try:
        whole.load_state_dict(weights, assign=bool(changes))
    except RuntimeError as error:
        name = type(backbone.inner).__name__
        if first_differs(backbone):
            raise ValueError(
                f"{name} can't be shortened to layers {chosen}: its first block holds what the "
                "others lack or lacks what they hold; keep layer 1"
            ) from error
        raise ValueError(
            f"{name} can't be shortened to layers {chosen}: its blocks are not alike, and its "
            "configuration fixes their order; keep the first layers"
        ) from error
    if changes:
        try:
            student.load_state_dict(cut(whole, narrow))
        except RuntimeError as error:
            name = type(student).__name__
            raise ValueError(f"{name} can't be cut to {changes}: {error}") from error
    return student


def first_differs(backbone: Backbone) -> bool:
    """Whether the first block alone has other parameters, so that a student needs it."""
    if backbone.shared_blocks:
        return False
    first, *others = (block.state_dict().keys() for block in backbone.blocks)
    return bool(others) and first != others[0] and all(kind == others[0] for kind in others)


def with_first(layers: list[int], backbone: Backbone) -> list[int]:
    """``layers``, the first replaced by layer 1 where a student needs that."""
    return [1, *layers[1:]] if first_differs(backbone) else layers


def layers_to_keep(scheme: str, backbone: Backbone, count: int) -> list[int]:
    """`layer_map` for making a student: but for "top" it begins with layer 1 where it has to."""
    layers = layer_map(scheme, backbone.num_layers, count)
    return layers if scheme == "top" else with_first(layers, backbone)


def _chosen(layers: Any, backbone: Backbone) -> list[int]:
    """Numbers of the layers to keep."""
    depth = backbone.num_layers
    if layers is None:
        return list(range(1, depth + 1))
    if isinstance(layers, str):
        raise TypeError(
            f"layers must be a number of layers or a list of teacher layers, got {layers!r}; a map "
            f'takes student_from_teacher(teacher, layer_map("uniform", {depth}, count))'
        )
    if isinstance(layers, int) and not isinstance(layers, bool):
        return layers_to_keep("uniform", backbone, layers)
    return check_layers(layers, depth)


def _shorten(config: Any, depth_name: str, chosen: list[int]) -> None:
    """Set the layer count, and cut lists with one entry per layer (such as ``layer_types``)."""
    layers = getattr(config, depth_name)
    lists = {
        name: value
        for name, value in vars(config).items()
        if ("layer" in name or name == "attention_window")  # Longformer's
        and isinstance(value, (list, tuple))
        and len(value) == layers
    }
    for name, value in lists.items():
        setattr(config, name, type(value)(value[i - 1] for i in chosen))
    setattr(config, depth_name, len(chosen))


def _shorten_shared(config: Any, chosen: list[int]) -> list[int]:
    """Set ALBERT's layer and group counts; returns the teacher's group for each student group."""
    per_group = config.num_hidden_layers / config.num_hidden_groups
    groups = [int((i - 1) / per_group) for i in chosen]
    distinct = sorted(set(groups))
    spread = [distinct[int(i / (len(chosen) / len(distinct)))] for i in range(len(chosen))]
    if spread != groups:  # uneven: a layer each
        distinct = groups
    config.num_hidden_layers, config.num_hidden_groups = len(chosen), len(distinct)
    return distinct


def _select(weights: dict[str, Tensor], name: str, blocks: list[int]) -> dict[str, Tensor]:
    """The student's state dict: block ``blocks[i]`` becomes block i, all else stays."""
    selected: dict[str, Tensor] = {}
    for key, value in weights.items():
        if not key.startswith(f"{name}."):
            selected[key] = value
            continue
        number, _, rest = key[len(name) + 1 :].partition(".")
        for i, block in enumerate(blocks):
            if int(number) == block:
                selected[f"{name}.{i}.{rest}"] = value
    return selected
