"""LM heads: the layer that computes a language model's logits from its last hidden states."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastkd._core import check
from fastkd._core.numerics import empty, product, upcast, values_readable
from fastkd.lm.linear_soft_targets import HeadForm

# Attributes of transformers' configurations that change the head's products: a cap, a factor, a
# divisor.
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
DIVISORS = ("logits_scaling",)
MULTIPLIED_BY_DIVISOR = ("hyperclovax",)
# Models whose head has another weight besides the output layer.
MORE_THAN_A_LAYER = ("mobilebert",)


@dataclass(frozen=True, eq=False)
class LowRank:
    """Unmerged LoRA: scale · (dropout(h) Aᵀ) Bᵀ, added to the product with the head's weight."""

    down: Tensor  # A (r, D)
    up: Tensor  # B (V, r)
    scale: float = 1.0
    dropout: Callable[[Tensor], Tensor] | None = None

    def states(self, hidden: Tensor) -> Tensor:
        """scale · dropout(h) Aᵀ (..., r), in the working dtype: half precision would round it."""
        hidden = hidden.to(self.down.dtype)
        hidden = hidden if self.dropout is None else self.dropout(hidden)
        return product(upcast(hidden), upcast(self.down).T) * self.scale


class Head:
    """logits = cap·tanh(scale·(h Wᵀ + b)/cap), or scale·(h Wᵀ + b) without a cap.

    Losses accept it wherever they accept a head's weight. `Head.of` reads a model's head.

    All its tensors are whole in this process: `Head.of` gathers a model's sharded head.

    Args:
        weight: W (V, D), any floating dtype.
        bias: b (V).
        scale: factor of all logits, as in Granite and Cohere.
        softcap: cap > 0 of the logits' absolute value, as in Gemma.

    Raises:
        ValueError, TypeError: a wrong shape, dtype or number.

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
        check.floating("weight", weight, 2)
        if bias is not None:
            check.floating("bias", bias)
            check.shape("bias", bias, (weight.shape[0],), "the vocabulary")
            check.device("bias", bias, "weight", weight)
        check.number("scale", scale)
        if softcap is not None:
            check.number("softcap", softcap, above=0)
        self.weight = weight
        self.bias = bias
        self.scale = float(scale)
        self.softcap = None if softcap is None else float(softcap)
        self.low_rank: tuple[LowRank, ...] = ()
        self.form = HeadForm(self.scale, self.softcap or 0.0)

    @staticmethod
    def of(model: nn.Module) -> "Head":
        """The head of a causal or masked language model from transformers, sharing its tensors.

        Tied weights are the embeddings. PEFT's LoRA on the head stays a separate low-rank product,
        whose matrices are trained. A quantised head is dequantised if it has a method for that. A
        weight sharded over processes (FSDP2, tensor parallelism) is gathered here, once, and its
        gradient is the mean over the processes, so call ``Head.of`` again at each step.

        The matching hidden states are the input of the model's output layer (`output_layer`): in a
        decoder the states after its final norm, transformers' ``hidden_states[-1]``. A masked
        model has a transform before that layer (a dense layer, an activation and a norm): use the
        transform's output, not the encoder's.

        Args:
            model: has ``get_output_embeddings()``; may be wrapped by PEFT, DistributedDataParallel
                or torch.compile.

        Raises:
            TypeError, ValueError: a model without a head, or whose head is not one product with
                its weight: packed or fake-quantised weights, adapters other than LoRA, MobileBERT.

        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=2))
        >>> Head.of(model)
        Head(vocabulary=50, hidden=8, bias=False, scale=1.0, softcap=None)
        """
        layer = output_layer(model)
        low_rank: list[LowRank] = []
        if hasattr(layer, "lora_A"):
            layer, low_rank = _without_lora(layer)
        scale, softcap = _form_of(_unwrapped(model))
        bias = getattr(layer, "bias", None)
        head = Head(_whole(_dense(layer)), None if bias is None else _whole(bias), scale, softcap)
        head.low_rank = tuple(
            LowRank(_whole(x.down), _whole(x.up), x.scale, x.dropout) for x in low_rank
        )
        return head

    @property
    def tensors(self) -> list[Tensor]:
        """The head's tensors: weight, bias and low-rank factors."""
        more = [x for part in self.low_rank for x in (part.down, part.up)]
        return [x for x in (self.weight, self.bias, *more) if x is not None]

    def on(self, hidden: Tensor, mask: Tensor | None = None) -> list[Tensor | None]:
        """Tensors of the head on states (R, D), for `fastkd.lm.linear_soft_targets`.

        Masked states, which may be NaN, are 0 where an adapter multiplies them.
        """
        real = hidden
        if mask is not None and self.low_rank:
            real = hidden.where(mask.reshape(-1, 1), 0)
        pairs = [(hidden, self.weight), *((x.states(real), x.up) for x in self.low_rank)]
        tensors: list[Tensor | None] = []
        for states, weight in pairs:
            dtype = torch.promote_types(states.dtype, weight.dtype)
            tensors += [states.to(dtype), weight.to(dtype)]
        return [*tensors, self.bias]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., D), in the widest dtype of states and head."""
        dtype = torch.promote_types(hidden.dtype, self.weight.dtype)
        logits = product(hidden.to(dtype), self.weight.to(dtype).T)
        for part in self.low_rank:
            logits = logits + product(part.states(hidden).to(part.up.dtype), part.up.T)
        if self.bias is not None:
            logits = logits + self.bias
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def map(self, change: Callable[[Tensor], Tensor]) -> "Head":
        """The head with ``change`` applied to each of its tensors."""
        bias = None if self.bias is None else change(self.bias)
        low_rank = tuple(
            LowRank(change(x.down), change(x.up), x.scale, x.dropout) for x in self.low_rank
        )
        return SettledHead(change(self.weight), bias, self.scale, self.softcap, low_rank)

    def subset(self, ids: Tensor) -> "Head":
        """The head of the token ids (n,) alone, in their order; gradients reach the whole head."""
        check.vocabulary_part("ids", ids, self.weight.shape[0])
        check.device("ids", ids, "the head", self.weight)
        bias = None if self.bias is None else self.bias[ids]
        low_rank = tuple(
            LowRank(x.down, _select(x.up, ids), x.scale, x.dropout) for x in self.low_rank
        )
        return SettledHead(_select(self.weight, ids), bias, self.scale, self.softcap, low_rank)

    def detach(self) -> "Head":
        """The head without gradients, for a teacher that shares the student's head."""
        return self.map(Tensor.detach)

    def __repr__(self) -> str:
        V, D = self.weight.shape
        return (
            f"Head(vocabulary={V}, hidden={D}, bias={self.bias is not None}, scale={self.scale}, "
            f"softcap={self.softcap})"
        )


class SettledHead(Head):
    """A head made of a checked one, of which nothing is checked again."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        softcap: float | None,
        low_rank: tuple[LowRank, ...] = (),
    ) -> None:
        self.weight, self.bias, self.scale, self.softcap = weight, bias, scale, softcap
        self.low_rank, self.form = low_rank, HeadForm(scale, softcap or 0.0)


def _select(weight: Tensor, ids: Tensor) -> Tensor:
    """The rows ``ids`` of a weight; ``weight[ids]`` takes seven times as long on the CPU."""
    if weight.requires_grad or not values_readable(weight):
        return weight.index_select(0, ids)
    out = empty((len(ids), weight.shape[1]), weight.dtype, weight.device)
    return torch.index_select(weight, 0, ids, out=out)


def as_head(name: str, head: Tensor | Head | None) -> Head:
    """``head`` itself, or a `Head` of a weight (V, D)."""
    if isinstance(head, Head):
        return head
    if not isinstance(head, Tensor):
        raise TypeError(f"{name} must be a Tensor or Head, got {type(head).__name__}")
    check.floating(name, head, 2)
    return Head(head)


def output_layer(model: nn.Module) -> nn.Module:
    """The layer that multiplies by the head's weight; its input are the states for `Head.of`."""
    inner = _unwrapped(model)
    if not hasattr(inner, "get_output_embeddings"):
        raise TypeError(
            f"model must be a transformers language model, got {type(model).__name__}; "
            "for other models pass Head(weight)"
        )
    layer = inner.get_output_embeddings()
    name = type(inner).__name__
    if layer is None:
        raise ValueError(f"{name} has no LM head; pass a causal or masked language model")
    if getattr(inner.config, "model_type", "") in MORE_THAN_A_LAYER:
        raise ValueError(
            f"{name} multiplies by more than its output layer; pass a Head of the joined weights"
        )
    if hasattr(layer, "modules_to_save") and hasattr(layer, "original_module"):  # PEFT's copy
        chosen = [x for x in layer.active_adapters if x in layer.modules_to_save]
        whole = layer.disable_adapters or not chosen
        layer = layer.original_module if whole else layer.modules_to_save[chosen[0]]
    return layer


def _unwrapped(model: nn.Module) -> Any:
    """The model inside wrappers: compiled, data-parallel, PEFT."""
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
    """Scale and cap of a model's logits, from its configuration."""
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
    """The weight (V, D) of an output layer, dequantised if it is quantised."""
    weight = getattr(layer, "weight", None)
    weight = weight if isinstance(weight, Tensor) else None  # a method of torch.ao's layers
    if hasattr(layer, "dequantize"):
        weight = layer.dequantize()  # type: ignore[operator]
    elif weight is not None and type(weight).dequantize is not Tensor.dequantize:
        weight = weight.dequantize()
    elif isinstance(layer, nn.Linear) and type(layer).forward is not nn.Linear.forward:
        raise ValueError(
            f"the model's output layer {type(layer).__name__} multiplies by more than its weight, "
            "which can't be read; exclude the head from quantisation, or pass the logits"
        )
    if hasattr(weight, "ds_shape"):
        raise ValueError(
            "the model's head is partitioned by DeepSpeed's ZeRO-3; gather it, or pass the logits"
        )
    plain = isinstance(weight, Tensor) and weight.dtype in check.FLOATING and weight.dim() == 2
    if not plain or not isinstance(weight, Tensor):
        kind = "no weight" if weight is None else f"a weight of {weight.dtype}"
        raise ValueError(
            f"the model's output layer {type(layer).__name__} has {kind}, which can't be read; "
            'exclude the head from quantisation, for example llm_int8_skip_modules=["lm_head"]'
        )
    return weight


class _MeanOverProcesses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, whole, processes):
        ctx.processes = processes
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.processes, None


def _whole(x: Tensor) -> Tensor:
    """A DTensor gathered in every process; its gradient is the mean over them, as in FSDP."""
    if not hasattr(x, "full_tensor"):
        return x
    sharded: Any = x
    from torch.distributed.tensor import Partial

    mesh = sharded.device_mesh
    whole = sharded.full_tensor(grad_placements=[Partial() for _ in range(mesh.ndim)])
    return _MeanOverProcesses.apply(whole, mesh.size())


def _without_lora(layer: Any) -> tuple[nn.Module, list[LowRank]]:
    """The layer under PEFT's LoRA, and the low-rank products of its active adapters."""
    base = layer.get_base_layer()
    if layer.disable_adapters or layer.merged:
        return base, []
    low_rank = []
    for name in (x for x in layer.active_adapters if x in layer.lora_A):
        down, up = layer.lora_A[name], layer.lora_B[name]
        if name in getattr(layer, "lora_variant", {}) or up.bias is not None:
            raise ValueError(
                f"the adapter {name!r} on the model's head is not plain LoRA; merge it first: "
                "model = model.merge_and_unload()"
            )
        dropout = layer.lora_dropout[name]
        none = isinstance(dropout, nn.Identity) or not dropout.training
        scale = float(layer.scaling[name])
        low_rank.append(LowRank(down.weight, up.weight, scale, None if none else dropout))
    return base, low_rank
