"""Configuration and weights of a narrower student, cut from the teacher's.

The meaning of each dimension of each tensor is found by experiment: the model is built on the meta
device with one size of its configuration changed at a time, and the dimensions that change belong
to this size. Attention projections are found by their names, since in most encoders the heads
together are as wide as the hidden states.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Model types whose attention projections all have the names in `ROLES`.
FAMILIES = (
    "albert", "bert", "camembert", "distilbert", "electra", "gpt2", "llama", "mistral", "mt5",
    "qwen2", "qwen3", "roberta", "t5", "xlm-roberta",
)  # fmt: skip
ROLES = {
    "query": ("query", "q_lin", "q_proj", "q"),
    "key": ("key", "k_lin", "k_proj", "k"),
    "value": ("value", "v_lin", "v_proj", "v"),
    "fused": ("attn.c_attn",),
    "output": (
        "attention.output.dense",
        "attention.dense",
        "out_lin",
        "o_proj",
        "o",
        "attn.c_proj",
    ),
}
UNSCALED = ("t5", "mt5")  # attention scores are not divided by the root of the head size

# Sizes that may change, with families' own names that are not in attribute_map.
SIZES: dict[str, tuple[str, ...]] = {
    "hidden_size": (),
    "intermediate_size": ("hidden_dim", "n_inner", "d_ff"),
    "num_attention_heads": (),
    "num_key_value_heads": (),
    "head_dim": (),
}


class Widths(NamedTuple):
    """The sizes of a configuration."""

    hidden: int
    intermediate: int | None  # None if the configuration has no such field
    heads: int
    kv_heads: int
    head: int

    @classmethod
    def of(cls, config: Any) -> "Widths":
        hidden, heads = config.hidden_size, config.num_attention_heads
        inner = fields_of(config).get("intermediate_size")
        return cls(
            hidden,
            None if inner is None else getattr(config, inner) or 4 * hidden,  # GPT-2
            heads,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or hidden // heads,
        )


def fields_of(config: Any) -> dict[str, str]:
    """The configuration's field name for each of the `SIZES` that it has."""
    found = {}
    for size, others in SIZES.items():
        names = (config.attribute_map.get(size, size), *others)
        name = next((name for name in names if hasattr(config, name)), None)
        if name is not None:
            found[size] = name
    return found


def narrowed(config: Any, changes: Mapping[str, Any], cut: bool) -> Any:
    """A copy of the configuration with other sizes.

    If only the number of query heads changes, as many as before share a key and value head.

    Raises:
        ValueError: an unknown name, impossible sizes, or, with ``cut``, sizes that can't be cut.
    """
    fields = fields_of(config)
    known = {**fields, **{name: name for name in fields.values()}}
    if not cut:
        numbers = (name for name, value in config.to_dict().items() if type(value) is int)
        known.update({name: name for name in numbers})
    new = copy.deepcopy(config)
    for name, value in changes.items():
        if name not in known:
            sizes = ", ".join(("num_hidden_layers", *fields))
            raise ValueError(f"config: {type(config).__name__} has no size {name!r}; use {sizes}")
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        setattr(new, known[name], value)
    if "num_attention_heads" not in fields:
        return new
    before = Widths.of(config)
    shared = fields.get("num_key_value_heads")
    if shared is not None and shared not in changes and new.num_attention_heads != before.heads:
        each = before.heads // before.kv_heads
        if new.num_attention_heads % each:
            raise ValueError(
                f"num_attention_heads: {new.num_attention_heads} is no multiple of the {each} that "
                "share a key and value head; pass num_key_value_heads, too"
            )
        setattr(new, shared, new.num_attention_heads // each)
    _check(config, new, cut)
    return new


def _check(old: Any, new: Any, cut: bool) -> None:
    before, after = Widths.of(old), Widths.of(new)
    if "head_dim" not in fields_of(new) and after.hidden % after.heads:
        raise ValueError(
            f"hidden_size: {after.hidden} is no multiple of num_attention_heads {after.heads}; "
            "choose a multiple"
        )
    if after.heads % after.kv_heads:
        raise ValueError(
            f"num_attention_heads: {after.heads} is no multiple of num_key_value_heads "
            f"{after.kv_heads}; choose a multiple"
        )
    if after.head % 2 and getattr(new, "rope_parameters", None) is not None:
        raise ValueError(
            f"head_dim: {after.head} dimensions can't be rotated in pairs; choose an even number"
        )
    if not cut:
        return
    sizes = {name: (a, b) for name, a, b in zip(SIZES, before, after, strict=True)}
    per_group = "query heads per key and value head"
    sizes[per_group] = (before.heads // before.kv_heads, after.heads // after.kv_heads)
    for name, (a, b) in sizes.items():
        if a is not None and b is not None and b > a:
            raise ValueError(
                f"{name}: {b} is more than the teacher's {a}; choose at most {a}, or random "
                "weights, which allow any size"
            )
    if old.model_type not in FAMILIES:
        raise ValueError(
            f"{type(old).__name__}: only {', '.join(FAMILIES)} can be cut by width; use random "
            "weights"
        )


class Projection(NamedTuple):
    """Path of an attention projection, and the dimension of its weight that the heads share."""

    path: str
    dim: int


class Cut(NamedTuple):
    """Indices that are kept of an attention: dimensions of each projection, and heads."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    heads: Tensor


def cut(model: Any, smaller: Any) -> dict[str, Tensor]:
    """State dict of a model, cut to the sizes of the configuration ``smaller``.

    Raises:
        ValueError: a tensor can't be cut.
    """
    wide, weights = model.config, model.state_dict()
    before, after = Widths.of(wide), Widths.of(smaller)
    attentions = _attentions(model)
    axes = _axes(model, attentions)
    kept: dict[tuple[str, str], Tensor] = {}  # by axis and group
    hidden = _hidden_scores(model, axes)
    kept["hidden", ""] = _largest(hidden, after.hidden)
    for group, size in _neuron_scores(axes, weights).items():
        assert after.intermediate is not None
        kept["neurons", group] = _largest(size, after.intermediate)
    rotates = any("rotary_emb" in name for name, _ in model.named_modules())
    pairs = _pairs(before.head, after.head, hidden.device) if rotates else None
    if pairs is not None:
        kept["head", ""] = pairs
    for group, found in _cut_attentions(attentions, weights, before, after, pairs).items():
        kept.update({(role, group): part for role, part in found._asdict().items()})
        parts = (found.query, found.key + before.heads * before.head)
        both = (before.heads + before.kv_heads) * before.head
        kept["fused", group] = torch.cat((*parts, found.value + both))
    result = {}
    for name, tensor in weights.items():
        for dim, axis in enumerate(axes[name]):
            if axis is not None:
                group = "" if axis in ("hidden", "head") else _group(name)
                tensor = tensor.index_select(dim, kept[axis, group])
        result[name] = tensor
    if wide.model_type not in UNSCALED and getattr(wide, "scale_attn_weights", True):
        _rescale(result, attentions, before, after)
    return result


def _rescale(
    weights: dict[str, Tensor],
    attentions: Mapping[str, Mapping[str, Projection]],
    before: Widths,
    after: Widths,
) -> None:
    """Scale queries so that scores are divided by the root of the teacher's head size."""
    if before.head == after.head:
        return
    factor = (after.head / before.head) ** 0.5
    for projections in attentions.values():
        path, dim = projections.get("query") or projections["fused"]
        norm = re.sub(r"q_proj$", "q_norm.weight", path)
        for name in [norm] if norm in weights else [f"{path}.weight", f"{path}.bias"]:
            if name in weights:
                last = dim if weights[name].dim() == 2 else 0
                queries = after.heads * after.head if name != norm else after.head
                weights[name].narrow(last, 0, queries).mul_(factor)


def on_meta(kind: type, config: Any) -> Any:
    """Model on the meta device, which allocates no memory."""
    with torch.device("meta"):
        return kind(copy.deepcopy(config))


def _attentions(model: Any) -> dict[str, dict[str, Projection]]:
    """Projections of each attention by role, by the name of the attention's block."""
    found: dict[str, dict[str, Projection]] = defaultdict(dict)
    for path, module in model.named_modules():
        for role, names in ROLES.items():
            if path.endswith(tuple(f".{name}" for name in names)):
                group = _group(path)
                if role in found[group]:
                    raise ValueError(
                        f"{type(model).__name__}: {group} has several attentions, which can't be "
                        "cut; use random weights"
                    )
                transposed = type(module).__name__ == "Conv1D"
                found[group][role] = Projection(path, int((role == "output") != transposed))
    return dict(found)


def _group(name: str) -> str:
    """Name of the block that holds a module or tensor: its path up to the last number."""
    found = re.match(r"(.*\.\d+)\.", name)
    return found[1] if found else ""


def _axes(
    model: Any, attentions: Mapping[str, Mapping[str, Projection]]
) -> dict[str, list[str | None]]:
    """Axis of each dimension of each tensor; None if no width changes it."""
    roles: dict[tuple[str, int], str] = {}
    for projections in attentions.values():
        for role, (path, dim) in projections.items():
            roles[f"{path}.weight", dim] = role
            if role != "output":
                roles[f"{path}.bias", 0] = role
    sizes, shapes = _probes(model)
    axes: dict[str, list[str | None]] = {}
    for name, tensor in model.state_dict().items():
        axes[name] = []
        for dim, size in enumerate(tensor.shape):
            changed = [axis for axis in shapes if shapes[axis][name][dim] != size]
            known = roles.get((name, dim))
            if known is None and changed and (len(changed) > 1 or size != sizes[changed[0]]):
                raise ValueError(
                    f"{type(model).__name__}: {name} can't be cut, as its dimension {dim} of "
                    f"{size} depends on {' and '.join(changed)}; use random weights"
                )
            axes[name].append(known or next(iter(changed), None))
    return axes


def _probes(model: Any) -> tuple[dict[str, int | None], dict[str, dict[str, torch.Size]]]:
    """Size of each axis, and all tensors' shapes after a change of only this size."""
    widths, fields = Widths.of(model.config), fields_of(model.config)
    inner, shared = fields.get("intermediate_size"), fields.get("num_key_value_heads")
    changes = {"hidden": {fields["hidden_size"]: widths.hidden + 2 * widths.heads}}
    if inner is not None and widths.intermediate is not None:
        changes["hidden"][inner] = widths.intermediate  # GPT-2's would follow the hidden size
        changes["neurons"] = {inner: widths.intermediate + 1}
    if "head_dim" in fields:
        changes["heads"] = {fields["num_attention_heads"]: 2 * widths.heads}
        if shared is not None:
            changes["heads"][shared] = 2 * widths.kv_heads
        changes["head"] = {fields["head_dim"]: 2 * widths.head}
    shapes = {}
    for axis, values in changes.items():
        config = copy.deepcopy(model.config)
        for name, value in values.items():
            setattr(config, name, value)
        weights = on_meta(type(model), config).state_dict()
        shapes[axis] = {name: tensor.shape for name, tensor in weights.items()}
    sizes = {
        "hidden": widths.hidden, "neurons": widths.intermediate, "heads": widths.heads,
        "head": widths.head,
    }  # fmt: skip
    return sizes, shapes


def _squared_norms(weight: Tensor, dim: int) -> Tensor:
    """Squared norm of each slice along a dimension."""
    return weight.float().square().movedim(dim, 0).reshape(weight.shape[dim], -1).sum(1)


def _largest(sizes: Tensor, count: int) -> Tensor:
    """Increasing indices of the ``count`` largest in the last dimension; ties: the first."""
    return sizes.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(-1).values


def _hidden_scores(model: Any, axes: Mapping[str, list[str | None]]) -> Tensor:
    """Importance of each hidden dimension: its fraction of the norms' squared gains, times its
    fraction of the squared weights of the layers that read it.

    The output of a norm has equal variance in every dimension, times the squared gain.
    """
    gains, readers = [], []
    for path, module in model.named_modules():
        name, kind = f"{path}.weight", type(module).__name__
        if name not in axes:
            continue
        inputs = {"Linear": 1, "Conv1D": 0}.get(kind)
        if inputs is not None and axes[name][inputs] == "hidden":
            readers.append(_fractions(module.weight, inputs))
        elif "Norm" in kind and axes[name] == ["hidden"]:
            gains.append(_fractions(module.weight, 0))
    return torch.stack(gains).sum(0) * torch.stack(readers).sum(0)


def _fractions(weight: Tensor, dim: int) -> Tensor:
    """Fraction of a tensor's squared norm in each slice."""
    size = _squared_norms(weight.detach(), dim)
    return size / size.sum().clamp_min(torch.finfo(size.dtype).tiny)


def _neuron_scores(
    axes: Mapping[str, list[str | None]], weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Importance of each neuron of each block: the product of its weights' norms."""
    found: dict[str, Tensor] = {}
    for name, dims in axes.items():
        if "neurons" in dims and len(dims) > 1:
            size, group = _squared_norms(weights[name], dims.index("neurons")).sqrt(), _group(name)
            found[group] = found[group] * size if group in found else size
    return found


def _pairs(before: int, after: int, device: torch.device) -> Tensor:
    """Dimensions of a head whose rotary frequencies are nearest those of a smaller head."""
    steps = torch.arange(after // 2, device=device)
    first = (2 * steps * before + after) // (2 * after)
    return torch.cat((first, first + before // 2))


def _cut_attentions(
    attentions: Mapping[str, Mapping[str, Projection]],
    weights: Mapping[str, Tensor],
    before: Widths,
    after: Widths,
    pairs: Tensor | None,
) -> dict[str, Cut]:
    """Indices that are kept of each attention."""
    each = before.heads // before.kv_heads
    terms: dict[str, tuple[Tensor, Tensor]] = {}
    heads: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()))
    shared = any("relative_attention_bias" in name for name in weights)
    alike = {
        group: re.sub(r"\.\d+", "", group, count=1) if shared else group for group in attentions
    }
    for group, projections in attentions.items():
        sizes = {
            role: _squared_norms(weights[f"{path}.weight"], dim)
            for role, (path, dim) in projections.items()
        }
        if "fused" in sizes:
            sizes.update(zip(("query", "key", "value"), sizes["fused"].chunk(3), strict=True))
        by_head = {role: size.view(-1, before.head) for role, size in sizes.items()}
        scores = by_head["query"] * by_head["key"].repeat_interleave(each, 0)  # (heads, head)
        values = by_head["output"] * by_head["value"].repeat_interleave(each, 0)
        terms[group] = scores, values
        heads[alike[group]] = heads[alike[group]].to(values.device) + values.sum(1)
    return {
        group: _cut_attention(*terms[group], heads[alike[group]], before, after, pairs)
        for group in attentions
    }


def _cut_attention(
    scores: Tensor,
    values: Tensor,
    heads: Tensor,
    before: Widths,
    after: Widths,
    pairs: Tensor | None,
) -> Cut:
    """Indices that are kept, by the importance (heads, head) of each term of scores and values."""
    groups = heads.view(before.kv_heads, -1)  # (kv_heads, query heads that share it)
    each = after.heads // after.kv_heads
    best = _largest(groups, each)  # (kv_heads, each)
    kept = _largest(groups.gather(1, best).sum(1), after.kv_heads)
    queries = kept[:, None] * groups.shape[1] + best[kept]  # (kept, each): head indices
    if pairs is None:
        inner = _largest(scores[queries].sum(1), after.head)  # (kept, after.head)
    else:
        inner = pairs.expand(len(kept), -1)
    outer = _largest(values[queries].sum(1), after.head)

    def indices(head: Tensor, dims: Tensor) -> Tensor:
        return (head[..., None] * before.head + dims).flatten()

    return Cut(
        query=indices(queries, inner[:, None]),
        key=indices(kept, inner),
        value=indices(kept, outer),
        output=indices(queries, outer[:, None]),
        heads=queries.flatten(),
    )
