"""MiniLM and MiniLMv2: relations between queries, keys and values, as baselines."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from fastkd._core import check
from fastkd._core.numerics import product, upcast
from fastkd.distill.method import WithSoftTargets
from fastkd.distill.step import Step
from fastkd.models.backbone import Backbone, Model
from fastkd.models.inputs import reads_whole_rows

MOST_HEADS = 48  # MiniLMv2's relation heads, at a width of 768


def relation_divergence(
    pairs: Sequence[tuple[Tensor, Tensor]], mask: Tensor, causal: bool = False
) -> Tensor:
    """Losses (B,): mean over heads and real tokens of KL(R_T ‖ R_S), R = softmax(X Yᵀ/√d).

    Args:
        pairs: X and Y of the student and of the teacher, each (B, H, N, d); d may differ.
        mask: (B, N) bool, True = real token. Padded tokens are neither rows nor columns of R.
        causal: whether a token is related to itself and earlier tokens only.

    A sample without a real token has the loss 0.
    """
    related = mask[:, None, :, None] & mask[:, None, None, :]  # (B, 1, N, N)
    if causal:
        related = related & torch.ones_like(related).tril()
    ours, theirs = (
        (product(upcast(x), upcast(y).transpose(-1, -2)) / math.sqrt(x.shape[-1]))
        .masked_fill(~related, torch.finfo(upcast(x).dtype).min)
        .log_softmax(-1)
        for x, y in pairs
    )  # (B, H, N, N)
    kl = torch.where(related, theirs.exp() * (theirs - ours), 0).sum((1, 2, 3))
    return kl / (ours.shape[1] * mask.sum(1).clamp(min=1))


@dataclass(kw_only=True, eq=False, repr=False)
class _Relations(WithSoftTargets):
    """Relations of one layer of both models, beside task and soft targets."""

    headless = MappingProxyType({"task_weight": 0.0, "soft_weight": 0.0})

    layer: int | None = None
    task_weight: float = 1.0
    soft_weight: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer is not None:
            check.positive_int("layer", self.layer)

    def choose_layers(self, teacher: Model, student: Backbone) -> None:
        layer = teacher.num_layers if self.layer is None else self.layer
        if layer > teacher.num_layers:
            raise ValueError(f"layer={layer}: the teacher has {teacher.num_layers} layers")
        self.student_qkv, self.teacher_qkv = [student.num_layers], [layer]

    def weights(self, progress: float) -> dict[str, float]:
        return {"task": self.task_weight, "soft": self.soft_weight}

    def _mean(self, step: Step, losses: Tensor) -> Tensor:
        return step.mean(losses.sum(), step.real.any(1).sum())


@dataclass(kw_only=True, eq=False, repr=False)
class MiniLM(_Relations):
    """Deep self-attention distillation (MiniLM, Wang et al. 2020).

    L = task_weight·L_CE + soft_weight·L_soft + attention·L_AT + values·L_VR, of one layer:
    L_AT compares attention distributions softmax(QKᵀ/√d) (eq. 7), L_VR value relations
    softmax(VVᵀ/√d) (eqs. 8-9), each by KL, averaged over heads and tokens. Both models need the
    same number of heads; hidden sizes may differ. The paper distils text without labels
    (``task_weight=0``). Queries and keys are those before a rotation of positions.

    Args:
        attention, values: weights; 1 in the paper.
        layer: teacher layer that the student's last layer learns from; None for the last.
        task_weight, soft_weight: weights of the task loss and of the soft targets.
        temperature, divergence, scale_by_t2: as in `SoftTargets`.

    Terms: task, soft, attentions, value_relations.
    """

    attention: float = 1.0
    values: float = 1.0

    def choose_layers(self, teacher: Model, student: Backbone) -> None:
        super().choose_layers(teacher, student)
        self.causal = not reads_whole_rows(student.stack_config)

    def weights(self, progress: float) -> dict[str, float]:
        relations = {"attentions": self.attention, "value_relations": self.values}
        return {**super().weights(progress), **relations}

    def attentions(self, step: Step) -> Tensor:
        """L_AT, eq. 7."""
        pairs = []
        for queries, keys, _ in step.qkv(*self._layers()):
            groups = queries.shape[1] // keys.shape[1]  # of queries, each of which shares a key
            pairs.append((queries, keys.repeat_interleave(groups, 1)))
        _check_heads(*(queries for queries, _ in pairs))
        return self._mean(step, relation_divergence(pairs, step.real, self.causal))

    def value_relations(self, step: Step) -> Tensor:
        """L_VR, eq. 9."""
        pairs = [(x.values, x.values) for x in step.qkv(*self._layers())]
        _check_heads(*(values for values, _ in pairs))
        return self._mean(step, relation_divergence(pairs, step.real))

    def _layers(self) -> tuple[int, int]:
        return self.student_qkv[0], self.teacher_qkv[0]


@dataclass(kw_only=True, eq=False, repr=False)
class MiniLMv2(_Relations):
    """Multi-head self-attention relation distillation (MiniLMv2, Wang et al. 2021).

    L = task_weight·L_CE + soft_weight·L_soft + queries·L_Q + keys·L_K + values·L_V. Each compares
    the relations softmax(AAᵀ/√d_r) of queries, keys or values by KL, averaged over relation heads
    and tokens (eqs. 5-6). The heads of a layer are concatenated and split into relation heads, so
    numbers of heads and hidden sizes may differ. The paper distils text without labels
    (``task_weight=0``).

    Args:
        queries, keys, values: weights; 1 in the paper.
        relation_heads: number of relation heads; 48 in the paper for a width of 768, 64 for 1024.
            None takes the largest number up to 48 that divides the widths of both models.
        layer: teacher layer that the student's last layer learns from; None for the last, which the
            paper takes of base-size teachers (21 of BERT-large's 24, 19 of RoBERTa-large's).
        task_weight, soft_weight: weights of the task loss and of the soft targets.
        temperature, divergence, scale_by_t2: as in `SoftTargets`.

    Terms: task, soft, query_relations, key_relations, value_relations.
    """

    queries: float = 1.0
    keys: float = 1.0
    values: float = 1.0
    relation_heads: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.relation_heads is not None:
            check.positive_int("relation_heads", self.relation_heads)

    def weights(self, progress: float) -> dict[str, float]:
        relations = {"query_relations": self.queries, "key_relations": self.keys}
        return {**super().weights(progress), **relations, "value_relations": self.values}

    def query_relations(self, step: Step) -> Tensor:
        """L_Q."""
        return self._relations(step, "queries")

    def key_relations(self, step: Step) -> Tensor:
        """L_K."""
        return self._relations(step, "keys")

    def value_relations(self, step: Step) -> Tensor:
        """L_V."""
        return self._relations(step, "values")

    def _relations(self, step: Step, name: str) -> Tensor:
        found = step.qkv(self.student_qkv[0], self.teacher_qkv[0])
        joined = [getattr(qkv, name).transpose(1, 2).flatten(2) for qkv in found]  # (B, N, H·d)
        widths = [x.shape[-1] for x in joined]
        heads = self.relation_heads or max(
            h for h in range(1, MOST_HEADS + 1) if math.gcd(*widths) % h == 0
        )
        if any(width % heads for width in widths):
            raise ValueError(
                f"relation_heads={heads} doesn't divide the {name} of both models, {widths[0]} and "
                f"{widths[1]} wide"
            )
        split = [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in joined]
        return self._mean(step, relation_divergence([(x, x) for x in split], step.real))


def _check_heads(student: Tensor, teacher: Tensor) -> None:
    if student.shape[1] != teacher.shape[1]:
        raise ValueError(
            f"MiniLM compares head by head, but the student has {student.shape[1]} heads and the "
            f"teacher {teacher.shape[1]}; use MiniLMv2"
        )
