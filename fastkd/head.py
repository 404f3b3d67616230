"""The vocabulary head of a language model: what makes words' logits of its last hidden states."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastkd._core.checks import FLOATING, check_device, check_floating, check_number, check_shape
from fastkd._core.numerics import autocast_off, upcast
from fastkd._torch.linear_soft_targets import HeadForm
from fastkd._torch.vocabulary_shard import ALL, Columns

# Attributes of transformers' configurations by which models change the products of their head:
# a cap, a factor, a divisor.
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
DIVISORS = ("logits_scaling",)
MULTIPLIED_BY_DIVISOR = ("hyperclovax",)
# Whose output layer is a part of what multiplies.
MORE_THAN_A_LAYER = ("mobilebert",)
# The dimensions of a mesh in which weights are parts of one model.
TENSOR_PARALLEL = ("tp",)


@dataclass(frozen=True, eq=False)
class LowRank:
    """scale · (dropout(h) Aᵀ) Bᵀ, beside the product with a head's weight: LoRA, unmerged."""

    down: Tensor  # A (r, D)
    up: Tensor  # B (V, r)
    scale: float = 1.0
    dropout: Callable[[Tensor], Tensor] | None = None

    def states(self, hidden: Tensor) -> Tensor:
        """What B multiplies (..., r), in the working dtype: a half type would round it."""
        hidden = hidden.to(self.down.dtype)
        hidden = hidden if self.dropout is None else self.dropout(hidden)
        with autocast_off(hidden):
            return upcast(hidden) @ upcast(self.down).T * self.scale


class Head:
    """logits = cap·tanh(scale·(h Wᵀ + b)/cap), or scale·(h Wᵀ + b) without a cap.

    Goes wherever a head's weight does. `Head.of` reads a model's.

    A vocabulary-parallel head is a DTensor that is sharded over V in a mesh whose one dimension is
    called "tp", as torch's and transformers' tensor-parallel meshes are; a mesh of another name is
    taken for data-parallel, of which a weight is no part of a head but a head in parts. A loss
    then multiplies by each process's own words. **Hidden states, labels and mask have to be the
    same in all processes of the mesh**, and all have to call it. Value and gradients are the whole
    head's in each; a few sums a row go through all in the forward pass, and the gradient of the
    hidden states once. Top-k targets, "adaptive_kl", adapters on the head, a bias that isn't
    sharded likewise, and fewer words than processes gather the head instead.

    Args:
        weight: W (V, D), any floating dtype.
        bias: b (V), sharded as the weight.
        scale: of all logits, as Granite and Cohere have it.
        softcap: cap > 0 that no logit exceeds, as Gemma has it.

    Raises:
        ValueError, TypeError: a shape, dtype or number that can't be.

    >>> head = Head(torch.randn(10, 4), torch.zeros(10), softcap=30.0)
    >>> head.logits(torch.randn(2, 3, 4)).shape
    torch.Size([2, 3, 10])
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        check_floating("weight", own_words(weight), 2)
        if bias is not None:
            check_floating("bias", own_words(bias))
            check_shape("bias", bias, (weight.shape[0],), "the vocabulary")
            check_device("bias", bias, "weight", weight)
        check_number("scale", scale)
        if softcap is not None:
            check_number("softcap", softcap, above=0)
        self.weight = weight
        self.bias = bias
        self.scale = float(scale)
        self.softcap = None if softcap is None else float(softcap)
        self.low_rank: tuple[LowRank, ...] = ()

    @staticmethod
    def of(model: nn.Module) -> "Head":
        """The head of a causal or masked language model from transformers, sharing its tensors.

        Tied weights are the embeddings'; PEFT's LoRA on the head stays beside the weight as a
        product of low rank, in which what learns learns; a quantised head that dequantises itself
        is dequantised. A weight that is sharded over processes (FSDP2, also beside tensor
        parallelism) is gathered here, once, and its gradient goes back as the mean over them. So
        read the head anew at each step. A vocabulary-parallel one stays in its parts: `Head`.

        The hidden states that belong to it are those that go into the model's output layer
        (`output_layer`): a decoder's after its final norm, which transformers call
        ``hidden_states[-1]``. A masked model has a transform before that layer (a dense layer, an
        activation and a norm): they are those that come out of it, not the encoder's.

        Args:
            model: with ``get_output_embeddings()``; PEFT's, DistributedDataParallel's and compiled
                ones too.

        Raises:
            TypeError, ValueError: without a head, or with one that is not one product: packed
                weights, adapters other than LoRA, MobileBERT's.

        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=2))
        >>> Head.of(model)
        Head(50 words of 8, bias=False, scale=1.0, softcap=None)
        """
        layer = output_layer(model)
        low_rank: list[LowRank] = []
        if hasattr(layer, "lora_A"):
            layer, low_rank = _without_lora(layer)
        scale, softcap = _form_of(_unwrapped(model))
        bias = getattr(layer, "bias", None)
        weight, bias = (None if x is None else _taken(x) for x in (_dense(layer), bias))
        assert weight is not None
        head = Head(weight, bias, scale, softcap)
        head.low_rank = tuple(
            LowRank(_whole(x.down), _whole(x.up), x.scale, x.dropout) for x in low_rank
        )
        return head

    @property
    def tensors(self) -> list[Tensor]:
        """All that it is made of."""
        more = [x for part in self.low_rank for x in (part.down, part.up)]
        return [x for x in (self.weight, self.bias, *more) if x is not None]

    @property
    def form(self) -> HeadForm:
        return HeadForm(self.scale, self.softcap or 0.0)

    @property
    def columns(self) -> Columns:
        """Which words it is multiplied by in this process."""
        alike = self.bias is None or columns_of(self.bias) == columns_of(self.weight)
        return columns_of(self.weight) if alike and not self.low_rank else ALL

    def whole(self) -> "Head":
        """The same with all words in every process."""
        return self.map(_whole) if any(map(_is_sharded, self.tensors)) else self

    def on(self, hidden: Tensor, columns: Columns = ALL) -> list[Tensor | None]:
        """Itself on hidden states (R, D), as `fastkd._torch.linear_soft_targets` takes heads."""

        def own(x: Tensor) -> Tensor:
            if columns_of(x).group:
                return own_words(x)  # type: ignore[no-any-return]
            # A slice of all would cost another matrix of the head's size in the backward pass.
            last = columns.first + columns.most
            return x[columns.first : last] if columns.group else x

        pairs = [(hidden, self.weight), *((x.states(hidden), x.up) for x in self.low_rank)]
        tensors: list[Tensor | None] = []
        for states, weight in pairs:
            dtype = torch.promote_types(states.dtype, weight.dtype)
            tensors += [states.to(dtype), own(weight).to(dtype)]
        return [*tensors, None if self.bias is None else own(self.bias)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., D), in the widest of their dtypes."""
        if columns_of(self.weight).group:
            return self.whole().logits(hidden)
        dtype = torch.promote_types(hidden.dtype, self.weight.dtype)
        logits = hidden.to(dtype) @ self.weight.to(dtype).T
        for part in self.low_rank:
            logits = logits + part.states(hidden).to(part.up.dtype) @ part.up.T
        if self.bias is not None:
            logits = logits + self.bias
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def map(self, change: Callable[[Tensor], Tensor]) -> "Head":
        """The same with ``change`` of each of its tensors."""
        bias = None if self.bias is None else change(self.bias)
        head = Head(change(self.weight), bias, self.scale, self.softcap)
        head.low_rank = tuple(
            LowRank(change(x.down), change(x.up), x.scale, x.dropout) for x in self.low_rank
        )
        return head

    def detach(self) -> "Head":
        """The same without gradients: the teacher's side of a head that both share."""
        return self.map(Tensor.detach)

    def __repr__(self) -> str:
        V, D = self.weight.shape
        return (
            f"Head({V} words of {D}, bias={self.bias is not None}, scale={self.scale}, "
            f"softcap={self.softcap})"
        )


def as_head(name: str, head: Tensor | Head | None) -> Head:
    """A head, or the head of a weight (V, D)."""
    if isinstance(head, Head):
        return head
    if not isinstance(head, Tensor):
        raise TypeError(f"{name} must be a Tensor or Head, got {type(head).__name__}")
    check_floating(name, own_words(head), 2)
    return Head(head)


def columns_of(x: Tensor) -> Columns:
    """The words that this process has of a weight or bias (V, ...); see `Head` for the rule."""
    if not _is_sharded(x):
        return ALL
    sharded: Any = x
    mesh, placements = sharded.device_mesh, sharded.placements
    if mesh.mesh_dim_names != TENSOR_PARALLEL or not placements[0].is_shard(0):
        return ALL
    V, processes = x.shape[0], mesh.size()
    most = -(-V // processes)  # as torch.chunk
    first = min(mesh.get_local_rank() * most, V)
    return Columns(mesh.get_group().group_name, first, most, V)


def _is_sharded(x: Tensor) -> bool:
    return hasattr(x, "full_tensor")


def own_words(x: Any) -> Any:
    """This process's part of a vocabulary-parallel tensor, or ``x`` itself."""
    if not (isinstance(x, Tensor) and columns_of(x).group):
        return x
    sharded: Any = x
    return sharded.to_local(grad_placements=sharded.placements)


def output_layer(model: nn.Module) -> nn.Module:
    """The layer that multiplies by the vocabulary's weight; its input belongs to `Head.of`."""
    inner = _unwrapped(model)
    if not hasattr(inner, "get_output_embeddings"):
        raise TypeError(
            f"model must be a transformers language model, got {type(model).__name__}; "
            "for another, make a Head of its weight"
        )
    layer = inner.get_output_embeddings()
    name = type(inner).__name__
    if layer is None:
        raise ValueError(f"{name} has no vocabulary head; take a causal or masked language model")
    if getattr(inner.config, "model_type", "") in MORE_THAN_A_LAYER:
        raise ValueError(f"{name} multiplies by more than its output layer; make a Head of it")
    if hasattr(layer, "modules_to_save") and hasattr(layer, "original_module"):  # PEFT's copy
        chosen = [x for x in layer.active_adapters if x in layer.modules_to_save]
        whole = layer.disable_adapters or not chosen
        layer = layer.original_module if whole else layer.modules_to_save[chosen[0]]
    return layer


def _unwrapped(model: nn.Module) -> Any:
    """The model of a compiled, a data-parallel and a PEFT one."""
    inner: Any = model
    while True:
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = inner.module
        elif hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        else:
            return inner


def _form_of(model: Any) -> tuple[float, float | None]:
    """Factor and cap of a model's logits, by its configuration."""
    config = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config

    def first(names: tuple[str, ...]) -> float | None:
        return next(
            (x for n in names if isinstance(x := getattr(config, n, None), (int, float))), None
        )

    factor, divisor = first(FACTORS), first(DIVISORS)
    if divisor is not None:
        divided = config.model_type not in MULTIPLIED_BY_DIVISOR
        factor = (factor or 1.0) * (1 / divisor if divided else divisor)
    return 1.0 if factor is None else float(factor), first(CAPS)


def _dense(layer: nn.Module) -> Tensor:
    """The weight (V, D) of an output layer, dequantised by itself if it has to be."""
    weight = getattr(layer, "weight", None)
    if hasattr(layer, "dequantize"):
        weight = layer.dequantize()  # type: ignore[operator]
    elif weight is not None and type(weight).dequantize is not Tensor.dequantize:
        weight = weight.dequantize()
    plain = isinstance(weight, Tensor) and weight.dtype in FLOATING and weight.dim() == 2
    if not plain or not isinstance(weight, Tensor):
        kind = "no weight" if weight is None else f"a weight of {weight.dtype}"
        raise ValueError(
            f"the model's output layer {type(layer).__name__} has {kind}, which can't be read; "
            'leave the head out of the quantisation, by llm_int8_skip_modules=["lm_head"] or alike'
        )
    return weight


def _taken(x: Tensor) -> Tensor:
    """What a `Head` has of a model's weight or bias."""
    return x if columns_of(x).group else _whole(x)


class _MeanOverProcesses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, whole, processes):
        ctx.processes = processes
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.processes, None


def _whole(x: Tensor) -> Tensor:
    """A DTensor in one piece in every process; its gradient is the mean of theirs, as FSDP's is."""
    if not _is_sharded(x):
        return x
    sharded: Any = x
    from torch.distributed.tensor import Partial

    mesh = sharded.device_mesh
    whole = sharded.full_tensor(grad_placements=[Partial() for _ in range(mesh.ndim)])
    return _MeanOverProcesses.apply(whole, mesh.size())


def _without_lora(layer: Any) -> tuple[nn.Module, list[LowRank]]:
    """The layer under PEFT's LoRA, and what the active adapters add to it."""
    base = layer.get_base_layer()
    if layer.disable_adapters or layer.merged:
        return base, []
    low_rank = []
    for name in (x for x in layer.active_adapters if x in layer.lora_A):
        down, up = layer.lora_A[name], layer.lora_B[name]
        if name in getattr(layer, "lora_variant", {}) or up.bias is not None:
            raise ValueError(
                f"the adapter {name!r} on the model's head is no plain LoRA; merge it first: "
                "model = model.merge_and_unload()"
            )
        dropout = layer.lora_dropout[name]
        none = isinstance(dropout, nn.Identity) or not dropout.training
        scale = float(layer.scaling[name])
        low_rank.append(LowRank(down.weight, up.weight, scale, None if none else dropout))
    return base, low_rank
