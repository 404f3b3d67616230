"""Smaller students cut from a teacher, by layers and by width."""

import copy
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fastkd._core import check
from fastkd.models.backbone import Backbone
from fastkd.models.width import cut, narrowed, on_meta

SCHEMES = ("uniform", "top", "bottom")


def layer_map(scheme: str, teacher_layers: int, student_layers: int) -> list[int]:
    """Teacher layer, counted from 1, of each student layer (FCD, Table 3).

    ``"uniform"`` chooses every (teacher_layers / student_layers)-th layer up to the last, ``"top"``
    the last layers, ``"bottom"`` the first layers.

    Args:
        scheme: "uniform", "top" or "bottom".
        teacher_layers, student_layers: their numbers; the student has at most as many.

    Returns:
        One teacher layer per student layer, increasing.

    Raises:
        ValueError: an unknown scheme, or more student layers than teacher layers.

    >>> layer_map("uniform", 12, 6)
    [2, 4, 6, 8, 10, 12]
    """
    check.choice("scheme", scheme, SCHEMES)
    check.positive_int("teacher_layers", teacher_layers)
    check.positive_int("student_layers", student_layers)
    check_enough(teacher_layers, student_layers)
    if scheme == "uniform":
        return [i * teacher_layers // student_layers for i in range(1, student_layers + 1)]
    start = teacher_layers - student_layers if scheme == "top" else 0
    return list(range(start + 1, start + student_layers + 1))


def spread_layers(kinds: Sequence[str], count: int) -> list[int]:
    """``count`` layers, evenly spread, with each of the ``kinds`` of all layers in its share.

    Shares are rounded by Sainte-Laguë's method, each to at least 1. With one kind the layers are
    those of ``layer_map("uniform", ...)``.

    >>> spread_layers(["conv", "conv", "attention"] * 4, 4)
    [2, 5, 9, 11]
    """
    total = Counter(kinds)
    quota = Counter(total.keys())
    while quota.total() < count:
        quota[max(total, key=lambda kind: total[kind] / (2 * quota[kind] + 1))] += 1
    layers: list[int] = []
    for even in layer_map("uniform", len(kinds), count):
        # The kind that is furthest behind its part of the layers so far, and its nearest layer.
        due = quota - Counter(kinds[layer - 1] for layer in layers)
        passed = Counter(kinds[:even])
        kind = max(due, key=lambda kind: due[kind] + (passed[kind] / total[kind] - 1) * quota[kind])
        own = (i for i, each in enumerate(kinds, 1) if each == kind and i not in layers)
        layers.append(min(own, key=lambda i: abs(i - even)))
    return sorted(layers)


def resolve_layers(
    layers: str | Sequence[int], teacher_layers: int, student_layers: int
) -> list[int]:
    """Teacher layer of each student layer, by the name of a scheme or from a checked list."""
    if isinstance(layers, str):
        return layer_map(layers, teacher_layers, student_layers)
    chosen = check_layers(layers, teacher_layers)
    if len(chosen) != student_layers:
        raise ValueError(
            f"layers: {chosen} has {len(chosen)} teacher layers for {student_layers} student "
            "layers; pass one for each"
        )
    return chosen


def check_layers(layers: Sequence[int], teacher_layers: int) -> list[int]:
    """``layers`` as a list; raise unless its entries are increasing numbers of teacher layers."""
    chosen = list(layers) if isinstance(layers, Iterable) else []
    valid = all(isinstance(i, int) and not isinstance(i, bool) for i in chosen) and all(
        1 <= i <= teacher_layers for i in chosen
    )
    if not valid or not chosen or any(a >= b for a, b in itertools.pairwise(chosen)):
        raise ValueError(
            f"layers must be increasing numbers from 1 to {teacher_layers} "
            f"(the teacher's layers), got {chosen or layers!r}"
        )
    return chosen


def check_enough(teacher_layers: int, student_layers: int) -> None:
    if student_layers > teacher_layers:
        raise ValueError(
            f"student_layers: the student has {student_layers} layers but the teacher only "
            f"{teacher_layers}; use a student with at most {teacher_layers} layers"
        )


if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Lists of a configuration with an entry for each layer, without "layer" in their names: those of
# Longformer and Gemma 3n.
BY_LAYER = ("attention_window", "intermediate_size", "activation_sparsity_pattern")
# Lists of a configuration with the indices of some layers: those of Bamba and of Qwen's mixtures.
INDICES = ("attn_layer_indices", "mlp_only_layers")
# Weights with a part for each layer along a dimension (Gemma 3n, Gemma 4).
PER_LAYER = {"embed_tokens_per_layer": 1, "per_layer_model_projection": 0}


def student_from_teacher(
    teacher: "PreTrainedModel",
    layers: int | Sequence[int] | None = None,
    *,
    config: Mapping[str, int] | None = None,
    weights: Literal["cut", "random"] = "cut",
) -> "PreTrainedModel":
    """A student of fewer layers or widths that starts from the teacher's weights.

    Layers are chosen as in LayerDrop and FCD, sec. 4.2. Widths are cut along the axes of Minitron
    (Muralidharan et al. 2024, sec. 2): hidden dimensions, attention heads and neurons. They are
    ranked by norms of weights, not by activations as in Minitron, so no data is needed:

    - Hidden dimensions, the same in every layer: the fraction of the norms' squared gains, times
      the fraction of the squared weights that read the dimension. The output of a norm has equal
      variance in every dimension, except for its gain.
    - Neurons of a block: the product of the norms of their weights.
    - Query heads of a block: the sum over a head's dimensions of |value|^2 |output|^2. Key and
      value heads are kept with the query heads that share them.
    - Dimensions of a head: |query|^2 |key|^2 and |value|^2 |output|^2. With rotary positions, the
      pairs whose frequencies are those of the student's head.

    Queries are scaled as for the teacher's head size. Norms are not rescaled for fewer dimensions.

    The student's configuration is the teacher's with fewer layers, and shorter lists that have an
    entry per layer, so ``from_pretrained`` loads what ``save_pretrained`` saved. Embeddings,
    chosen blocks and head are copied, not shared. Of an encoder-decoder only the decoder loses
    layers, since generation spends its time there (Shleifer & Rush 2020); both lose width.

    Args:
        teacher: a transformers encoder, decoder or encoder-decoder whose blocks are a ModuleList,
            with any head.
        layers: increasing numbers of the teacher layers to keep, counted from 1, or their number.
            ``layer_map("uniform", ...)`` then chooses them, with layer 1 as the first if only that
            block is of another kind (T5, ModernBERT). Of a hybrid teacher, such as LFM2, each kind
            of layer (the configuration's ``layer_types``) keeps about its share. None keeps all
            layers.
        config: sizes of the student, by name: ``hidden_size``, ``intermediate_size``,
            ``num_attention_heads``, ``num_key_value_heads`` and ``head_dim``, if the family has
            them, under these names or its own; ``num_hidden_layers`` instead of ``layers``. Other
            sizes are the teacher's, unless they follow from these (BERT's head size).
        weights: "cut" from the teacher; BERT, RoBERTa, ELECTRA, ALBERT, DistilBERT, GPT-2, LLaMA,
            Mistral, Qwen2, Qwen3 and T5 can be cut by width. "random": newly initialised weights,
            for any family, any size and any other number in its configuration.

    Returns:
        A model of the teacher's class, dtype and device, all parameters trainable.

    Raises:
        ValueError: layers that the teacher doesn't have, blocks of different shapes, no attention
            layer of a hybrid teacher, impossible sizes, or a family that can't be cut by width.
        TypeError: ``teacher`` is no transformers model, or ``layers`` is the name of a map: call
            `layer_map`.

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
    check.choice("weights", weights, ("cut", "random"))
    if hasattr(teacher, "peft_config"):
        raise ValueError(
            "teacher: it has PEFT adapters, which can't be cut; merge them first: "
            "teacher = teacher.merge_and_unload()"
        )
    backbone = Backbone(teacher, "teacher")
    changes = dict(config or {})
    for name in {"num_hidden_layers", backbone.depth_name} & changes.keys():
        if layers is not None:
            raise ValueError(f"layers, {name}: both set the number of layers; pass one of them")
        layers = changes.pop(name)
        check.positive_int(name, layers)
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
    """Student of any size with newly initialised weights."""
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
    smaller = narrowed(_section(backbone, config), changes, cut=False)
    if backbone.section:
        setattr(config, backbone.section, smaller)
    else:
        config = smaller
    try:
        return type(backbone.inner)(config)
    except ValueError as error:
        line = str(error).strip().splitlines()[0]
        name = type(backbone.inner).__name__
        raise ValueError(
            f"config: {name} can't be built with {changes} ({line}); choose other sizes"
        ) from error


def _section(backbone: Backbone, config: Any) -> Any:
    """Section of the configuration that describes the blocks."""
    return getattr(config, backbone.section) if backbone.section else config


def _cut(backbone: Backbone, layers: Any, changes: dict[str, Any]) -> Any:
    """Student with weights cut from the teacher."""
    chosen = _chosen(layers, backbone)
    config = copy.deepcopy(backbone.config)
    if backbone.shared_blocks:
        blocks = _shorten_shared(config, chosen)
    else:
        blocks = [i - 1 for i in chosen]
        by_number = getattr(config, "scale_attn_by_inverse_layer_idx", False)
        if by_number and blocks != list(range(len(blocks))):
            raise ValueError(
                f"layers: {type(backbone.inner).__name__} scales attention by the layer's number "
                f"(scale_attn_by_inverse_layer_idx), which would change for layers {chosen}; keep "
                "the first layers"
            )
        _shorten(_section(backbone, config), backbone.depth_name, chosen)
    smaller = narrowed(config, changes, cut=True) if changes else config
    # Built in the teacher's dtype: float32 would round a float64 teacher's weights.
    student: Any = type(backbone.inner)(smaller).to(backbone.dtype)
    made = Backbone(student, "student")
    if made.blocks_name != backbone.blocks_name:
        raise ValueError(
            f"layers: the blocks of {type(student).__name__} are {backbone.blocks_name}, but with "
            f"{len(chosen)} layers {made.blocks_name} can't be told from its blocks; keep another "
            "number of layers"
        )
    weights = _select(
        backbone.inner.state_dict(), backbone.blocks_name, blocks, len(backbone.blocks)
    )
    whole = on_meta(type(student), config) if changes else student
    try:
        whole.load_state_dict(weights, assign=bool(changes))
    except RuntimeError as error:
        name = type(backbone.inner).__name__
        if first_differs(backbone):
            raise ValueError(
                f"{name} can't be cut to layers {chosen}: its first block has other parameters "
                "than the other blocks; keep layer 1"
            ) from error
        kinds = kinds_of(backbone)
        least = max(len(chosen), 1 + max(map(kinds.index, set(kinds)), default=0))
        raise ValueError(
            f"{name} can't be cut to layers {chosen}: its blocks differ, and its configuration "
            f"fixes their order; keep layers 1 to {least}"
        ) from error
    if changes:
        try:
            student.load_state_dict(cut(whole, smaller))
        except RuntimeError as error:
            name = type(student).__name__
            raise ValueError(
                f"config: {name} can't be cut to {changes} ({error}); choose other sizes"
            ) from error
    return student


def first_differs(backbone: Backbone) -> bool:
    """Whether only the first block has other parameters, so that a student must keep it."""
    if backbone.shared_blocks:
        return False
    first, *others = (block.state_dict().keys() for block in backbone.blocks)
    return bool(others) and first != others[0] and all(kind == others[0] for kind in others)


def with_first(layers: list[int], backbone: Backbone) -> list[int]:
    """``layers`` with the first replaced by layer 1 if a student must keep that layer."""
    return [1, *layers[1:]] if first_differs(backbone) else layers


def kinds_of(backbone: Backbone) -> list[str]:
    """The kind of each layer, such as "conv" or "full_attention"; empty if none is named."""
    config = backbone.stack_config
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return list(kinds) if kinds and len(kinds) == backbone.num_layers else []


def _attends(kind: str) -> bool:
    return kind == "hybrid" or ("attention" in kind and kind != "linear_attention")


def layers_to_keep(scheme: str, backbone: Backbone, count: int) -> list[int]:
    """`layer_map` of a student's layers.

    "uniform" keeps about the share of each kind of layer. Layer 1 stays if it must, except by
    "top".
    """
    layers = layer_map(scheme, backbone.num_layers, count)
    kinds = kinds_of(backbone)
    if scheme == "uniform" and kinds:
        if shared := getattr(backbone.stack_config, "num_kv_shared_layers", None):
            kinds[-shared:] = [f"{kind}, shared" for kind in kinds[-shared:]]
        if len(set(kinds)) > count:
            kinds = ["attention" if _attends(kind) else kind for kind in kinds]
        if (fewest := len(set(kinds))) > count:
            raise ValueError(
                f"layers: {backbone.class_name} has {fewest} kinds of layers "
                f"({', '.join(dict.fromkeys(kinds))}), and {count} can't keep each; keep {fewest} "
                f"or more, or name the layers, such as {spread_layers(kinds, fewest)}"
            )
        layers = spread_layers(kinds, count)
    return layers if scheme == "top" else with_first(layers, backbone)


def _chosen(layers: Any, backbone: Backbone) -> list[int]:
    depth = backbone.num_layers
    if layers is None:
        return list(range(1, depth + 1))
    if isinstance(layers, str):
        raise TypeError(
            f"layers: must be a number of layers or a list of teacher layers, got {layers!r}; "
            f'for a map pass layer_map("uniform", {depth}, count)'
        )
    if isinstance(layers, int) and not isinstance(layers, bool):
        return layers_to_keep("uniform", backbone, layers)
    chosen, kinds = check_layers(layers, depth), kinds_of(backbone)
    attending = [i for i, kind in enumerate(kinds, 1) if _attends(kind)]
    if attending and not set(attending) & set(chosen):
        raise ValueError(
            f"layers: {chosen} of {backbone.class_name} have no attention, without which the "
            f"student can't generate; include one of {attending}"
        )
    return chosen


def _shorten(config: Any, depth_name: str, chosen: list[int]) -> None:
    """Set the layer count and shorten lists with an entry per layer, such as ``layer_types``."""
    layers = getattr(config, depth_name)
    lists = {
        name: value
        for name, value in vars(config).items()
        if ("layer" in name or name in BY_LAYER)
        and isinstance(value, (list, tuple))
        and len(value) == layers
    }
    for name, value in lists.items():
        setattr(config, name, type(value)(value[i - 1] for i in chosen))
    for name in INDICES:
        if (kept := getattr(config, name, None)) and name not in lists:
            setattr(config, name, [n for n, i in enumerate(chosen) if i - 1 in kept])
    overrides = config.to_dict().get("per_layer_config") or {}  # by a layer's index (Gemma 4)
    shared = getattr(config, "num_kv_shared_layers", None)
    if shared:  # the last layers, which read keys and values of earlier ones
        config.num_kv_shared_layers = sum(i > layers - shared for i in chosen)
        types = lists.get("layer_types", ["layer"] * layers)
        unshared = {types[i - 1] for i in chosen if i <= layers - shared}
        if missing := {types[i - 1] for i in chosen} - unshared:
            raise ValueError(
                f"layers: the last {shared} of {layers} layers read keys and values of earlier "
                f"ones, and {chosen} has no such {min(missing)} layer; add one"
            )
    setattr(config, depth_name, len(chosen))
    if overrides:
        own = {int(i): options for i, options in overrides.items()}
        config.per_layer_config = {n: own[i - 1] for n, i in enumerate(chosen) if i - 1 in own}


def _shorten_shared(config: Any, chosen: list[int]) -> list[int]:
    """Set ALBERT's layer and group counts; returns the teacher's group for each student group."""
    per_group = config.num_hidden_layers / config.num_hidden_groups
    groups = [int((i - 1) / per_group) for i in chosen]
    distinct = sorted(set(groups))
    spread = [distinct[int(i / (len(chosen) / len(distinct)))] for i in range(len(chosen))]
    if spread != groups:  # groups of unequal size: one group per layer
        distinct = groups
    config.num_hidden_layers, config.num_hidden_groups = len(chosen), len(distinct)
    return distinct


def _select(
    weights: dict[str, Tensor], name: str, blocks: list[int], depth: int
) -> dict[str, Tensor]:
    """The student's state dict: block ``blocks[i]`` becomes block i, other keys stay."""
    selected: dict[str, Tensor] = {}
    stack = name.rpartition(".")[0]
    for key, value in weights.items():
        if not key.startswith(f"{name}."):
            parent, _, own = key.rpartition(".weight")[0].rpartition(".")
            if parent == stack and own in PER_LAYER:
                rows = value.unflatten(PER_LAYER[own], (depth, -1))
                index = torch.tensor(blocks, device=value.device)
                value = rows.index_select(PER_LAYER[own], index).flatten(
                    PER_LAYER[own], PER_LAYER[own] + 1
                )
            selected[key] = value
            continue
        number, _, rest = key[len(name) + 1 :].partition(".")
        for i, block in enumerate(blocks):
            if int(number) == block:
                selected[f"{name}.{i}.{rest}"] = value
    return selected
