"""Methods of the papers: layers, loss terms, weights and schedules.

A micro-batch, in gradient accumulation or in one of several processes, affects the terms so:

- task, soft, FCD's tokens, LRKD's projection, AttentionMSE's maps and states: samples are
  independent, and equal micro-batches give the whole batch's gradient.
- FCD's samples, LRCBERT's cos_nce: samples are compared within their micro-batch only.
- MC3KD's cca: correlations are computed over the micro-batch's tokens.
- IntraClassKNN's knn: neighbours are searched within the micro-batch only. The sum over a
  micro-batch shrinks if a loop divides by the number of micro-batches; ``reduction="mean"`` avoids
  this.

With ``Distiller.accumulate`` and ``Distiller(gather=True)`` all terms have the whole batch's
gradient.
"""

import inspect
import math
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastkd._core import check
from fastkd._core.numerics import Projector, zero_padding
from fastkd._core.warn import warn_caller
from fastkd.analysis import adjacent_layer_cca
from fastkd.distill.method import Layers, Method, WithSoftTargets
from fastkd.distill.prediction_losses import PredictionOptions
from fastkd.distill.step import Step
from fastkd.distributed import world_size
from fastkd.losses.attention import AttentionLoss, Heads
from fastkd.losses.cca import CCALoss
from fastkd.losses.cos_nce import CosNCELoss, cos_nce_loss
from fastkd.losses.hidden_states import hidden_state_loss
from fastkd.losses.knn import IntraClassKNNLoss, Pool
from fastkd.losses.projection import DualProjectionLoss, Reduction
from fastkd.losses.relation import Distance, FCDLoss, Normalize
from fastkd.models.backbone import Backbone, Model
from fastkd.models.inputs import Batches
from fastkd.models.student import check_enough


def select_layers(
    teacher: nn.Module, batches: Batches, student_layers: int, *, last_layer: bool = True
) -> list[int]:
    """Teacher layers that differ most from the layer before them (MC3KD, Algorithm 1).

    These are the ``student_layers`` layers with the smallest C(l) = CCA(T_{l-1}, T_l) (eqs. 2-3),
    in the teacher's order. See `fastkd.analysis.adjacent_layer_cca`.

    Args:
        teacher: a transformers encoder or decoder.
        batches: dicts of the teacher's inputs, as in training; a few thousand tokens suffice.
        student_layers: number of layers to choose.
        last_layer: whether the last layer may be chosen, as in section 5.1; Algorithm 1 ends at
            N − 1.

    Returns:
        Layer numbers counted from 1, increasing.

    Raises:
        ValueError: more student layers than teacher layers, or no data.

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=24, num_hidden_layers=3)
    >>> ids = torch.arange(48).view(4, 12)
    >>> len(select_layers(BertModel(config), [{"input_ids": ids}], 2))
    2
    """
    check.positive_int("student_layers", student_layers)
    layers = Backbone(teacher, "teacher").num_layers
    check_enough(layers - (not last_layer), student_layers)
    correlation = adjacent_layer_cca(teacher, batches)
    if len(correlation) != layers:
        raise ValueError(
            f"teacher: it returns {len(correlation)} hidden states for {layers} layers; pass a "
            "list of layers"
        )
    kept = correlation if last_layer else correlation[:-1]
    smallest = torch.argsort(kept, stable=True)[:student_layers]
    return sorted(int(i) + 1 for i in smallest)


@dataclass(kw_only=True, eq=False, repr=False)
class FCD(WithSoftTargets):
    """Feature Correlation Distillation (Huang et al. 2023).

    L = task·L_g + alpha·L_t + beta·L_s  (eq. 10), L_t and L_s the token-level and sample-level
    relation losses (eqs. 8-9) between each student layer and its teacher layer, averaged over
    the layers; `fastkd.FCDLoss`. Hidden sizes may differ without a projection. Soft targets are
    not in the paper's loss (``preset="paper"`` omits them); docs/studies/scarce_labels.md
    measures their effect.

    Args:
        alpha: weight of the relations between tokens; {0.1, 0.2, 0.4, 1} in the paper.
        beta: weight of the relations between samples; the same grid.
        task_weight: weight of the task loss; 0 distils without labels.
        soft_weight: weight of the soft targets; None takes ``task_weight``, the paper has 0.
        layers: "uniform" (best in Table 3), "top", "bottom", or a teacher layer for each student
            layer.
        normalize: normalisation of the features, Table 4: "l2", "layer_norm", "softmax", "none".
        distance: distance between relations, Table 2: "pearson", "mse", "kl".
        layers_reduction: "mean" or "sum" over the layers; eqs. 8-10 name one layer.
        temperature, divergence, scale_by_t2: as in `SoftTargets`.

    With exactly two samples at a position their relations have one free number, so ρ is 1 for any
    student; such positions count in the mean of L_s all the same.

    Terms: task, soft, tokens, samples.
    """

    across_samples = ("samples",)
    head_terms = ("task", "soft")
    paper = MappingProxyType({"soft_weight": 0.0})
    headless = MappingProxyType({"task_weight": 0.0, "soft_weight": 0.0})

    alpha: float = 1.0
    beta: float = 1.0
    task_weight: float = 1.0
    soft_weight: float | None = None
    layers: Layers = "uniform"
    normalize: Normalize = "l2"
    distance: Distance = "pearson"
    layers_reduction: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.soft_weight = self.task_weight if self.soft_weight is None else self.soft_weight
        self.relations = FCDLoss(normalize=self.normalize, distance=self.distance)

    def choose_layers(self, teacher: Model, student: Backbone) -> None:
        self.pair_layers(self.layers, teacher, student)

    def weights(self, progress: float) -> dict[str, float]:
        logits = {"task": self.task_weight, "soft": self.soft_weight or 0.0}
        return {**logits, "tokens": self.alpha, "samples": self.beta}

    def compute(self, step: Step, weights: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
        loss, terms = super().compute(step, weights)
        factors = [weights.get(name, 0.0) for name in ("tokens", "samples")]
        if not any(factors):
            return loss, terms
        fcd = step.across(self.relations)
        fcd.alpha, fcd.beta = factors
        layers = step.layers(self.student_layers, self.teacher_layers)
        related, values = fcd(*layers, step.mask, return_terms=True)
        if self.layers_reduction == "sum":  # FCDLoss averages over the layers
            number = len(self.student_layers)
            related, values = number * related, {k: number * x for k, x in values.items()}
        return loss + related, {**terms, **values}


class Labels(Method):
    """Task loss on the labels only, without a teacher: the baseline of every method.

    Terms: task.
    """

    uses_teacher = False

    def weights(self, progress: float) -> dict[str, float]:
        return {"task": 1.0}


@dataclass(kw_only=True, eq=False, repr=False)
class SoftTargets(WithSoftTargets):
    """Plain knowledge distillation (Hinton et al. 2015; MC3KD eq. 1, LRKD eq. 1).

    L = (1 − alpha)·L_CE + alpha·T²·KL(p_T ‖ p_S).

    Args:
        alpha: weight of the soft targets, in [0, 1]; the task loss has 1 − alpha.
        temperature: T.
        divergence: "forward_kl", "reverse_kl", "adaptive_kl" (LRKD, Table 4) or "js".
        scale_by_t2: whether to multiply by T².

    Terms: task, soft.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check.fraction("alpha", self.alpha)

    def weights(self, progress: float) -> dict[str, float]:
        return {"task": 1 - self.alpha, "soft": self.alpha}


@dataclass(kw_only=True, eq=False, repr=False)
class IntraClassKNN(WithSoftTargets):
    """Intra-Class Similarity-Guided Feature Distillation (Saadi et al.).

    L = alpha1·L_hidd + alpha2·L_soft + alpha3·L_CE. L_hidd pulls the sentence token of the
    student's last hidden state to the k nearest teacher tokens with the same label in the batch,
    summed over the batch; L_soft is T²·KL as in DistilBERT. If hidden sizes differ, a trained
    linear projector maps the student's states. Each sample needs one label. For regression, labels
    within ``tolerance`` are the same class and the losses on the output are MSE.

    Args:
        alpha1: weight of L_hidd; {0.1, 0.01, 0.001} in the paper.
        alpha2: weight of the soft targets.
        alpha3: weight of the task loss.
        k: number of neighbours; {1, 2, 3, 5} in the paper.
        temperature: T; "tempered KL as in" DistilBERT, with T² (``scale_by_t2``).
        tolerance: largest distance between regression targets of one class.
        pool: compared features, "cls" (the sentence token), "mean" or "tokens".
        reduction: "sum" over the samples of a step in all processes, as in the paper. "mean"
            makes alpha1 independent of the batch size and the number of micro-batches.
        divergence, scale_by_t2: as in `SoftTargets`.

    Terms: task, soft, knn.
    """

    across_samples = ("knn",)
    by_class = True

    alpha1: float = 0.01
    alpha2: float = 0.5
    alpha3: float = 0.5
    k: int = 1
    temperature: float = 5.0
    tolerance: float = 0.5
    pool: Pool = "cls"
    reduction: Literal["sum", "mean"] = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive_int("k", self.k)
        self.teacher_pool = self.pool

    def choose_layers(self, teacher: Model, student: Backbone) -> None:
        self.student_layers, self.teacher_layers = [student.num_layers], [teacher.num_layers]

    def make_parts(self, teacher: Model, student: Backbone) -> None:
        sizes = student.hidden_size, teacher.hidden_size
        tolerance = self.tolerance if student.problem == "regression" else None
        self.loss = IntraClassKNNLoss(
            self.k, *sizes, self.pool, tolerance=tolerance, reduction=self.reduction
        )

    def weights(self, progress: float) -> dict[str, float]:
        return {"task": self.alpha3, "soft": self.alpha2, "knn": self.alpha1}

    def knn(self, step: Step) -> Tensor:
        """L_hidd."""
        features, mask = step.pooled(self.pool, *step.last())
        labels = step.sample_labels()
        loss: Tensor = step.across(self.loss)(*features, labels, mask=mask)
        # A loop averages over processes, but each process has summed over its own samples.
        return loss if step.ranks is not None or self.reduction == "mean" else loss * world_size()


@dataclass(kw_only=True, eq=False, repr=False)
class LRCBERT(WithSoftTargets):
    """LRC-BERT: latent-representation contrastive distillation (Fu et al. 2021).

    L = alpha·Σ_layers COS-NCE(h_S W, h_T, H_T) + beta·L_soft + gamma·L_hard  (eqs. 3-6).
    Negatives are the other samples of the batch at the same token position. The paper has two
    stages: for a ``first_stage`` fraction of the steps only the contrastive term has a weight
    (1:0:0), then the given weights apply (1:1:3). With ``perturb`` the loss is computed in a second
    forward pass over embeddings moved along the loss's gradient, normalised per sample (eqs. 7-8).
    L_hard softens the one-hot label by τ too (eq. 5); for regression both losses are MSE.

    The defaults differ from the paper's (``preset="paper"``), which were worse than labels alone
    in short runs: docs/studies.

    One matrix W is shared by all layers, as in TinyBERT, which the paper follows here. The second
    stage starts only if the loop calls ``Distiller.set_progress``.

    Args:
        alpha, beta, gamma: weights of the second stage; searched in {1, 2, 3, 4} in the paper.
        temperature: τ of eqs. 4-5; no factor τ² (eq. 4). In eq. 5 the label's class keeps
            1/(1 + (V−1)·exp(−1/τ)) of the target over V classes: 0.71 for two, 0.02 for 150, and
            almost nothing for a vocabulary or answer positions, which need a smaller τ or
            ``gamma=0``.
        first_stage: fraction of the training, 0.8 in the paper; 0 disables the stages (Table 4).
        perturb: whether to apply gradient perturbation (Fig. 5); True in the paper.
        pool: what eq. 3 compares: "tokens", each position with the same position of other samples;
            "sequence", the whole l × d matrix of a sample as one vector; or "mean", its mean row.
        perturb_norm: ‖g‖ of eq. 7, of each "sample" or over the whole "batch".
        layers: φ, as in `FCD`.
        divergence, scale_by_t2: as in `SoftTargets`.

    Terms: cos_nce, soft, task.
    """

    across_samples = ("cos_nce",)
    headless = MappingProxyType({"beta": 0.0, "gamma": 0.0})
    paper = MappingProxyType(
        {"alpha": 1.0, "beta": 1.0, "gamma": 3.0, "first_stage": 0.8, "perturb": True}
    )

    alpha: float = 0.1
    beta: float = 4.0
    gamma: float = 1.0
    temperature: float = 1.1
    first_stage: float = 0.0
    perturb: bool = False
    pool: Literal["tokens", "sequence", "mean"] = "tokens"
    perturb_norm: Literal["sample", "batch"] = "sample"
    layers: Layers = "uniform"
    scale_by_t2: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check.fraction("first_stage", self.first_stage)
        self.scheduled = self.first_stage > 0

    def choose_layers(self, teacher: Model, student: Backbone) -> None:
        self.pair_layers(self.layers, teacher, student)

    def make_parts(self, teacher: Model, student: Backbone) -> None:
        pool: Any = "mean" if self.pool == "mean" else "tokens"
        self.loss = CosNCELoss(student.hidden_size, teacher.hidden_size, pool=pool)
        single_label = student.problem in (None, "single_label_classification")
        classes = (single_label and student.output_size) or 1
        label_weight = 1 / (1 + (classes - 1) * math.exp(-1 / self.temperature))
        if self.gamma and label_weight < 0.1:
            warn_caller(
                f"LRCBERT softens labels by temperature={self.temperature} (eq. 5), which leaves "
                f"the right one of {classes} classes {label_weight:.1g} of the target; use a "
                "smaller temperature, or gamma=0 for no labels"
            )

    def weights(self, progress: float) -> dict[str, float]:
        if progress < self.first_stage:
            return {"cos_nce": 1.0, "soft": 0.0, "task": 0.0}
        return {"cos_nce": self.alpha, "soft": self.beta, "task": self.gamma}

    def cos_nce(self, step: Step) -> Tensor:
        """Σ over layers of L_T (eq. 3)."""
        layers = step.layers(self.student_layers, self.teacher_layers)
        if self.pool == "sequence":
            return self._of_sequences(step, *layers)
        loss: Tensor = step.across(self.loss)(*layers, step.mask)
        return len(self.student_layers) * loss  # CosNCELoss averages

    def _of_sequences(self, step: Step, students: list[Tensor], teachers: list[Tensor]) -> Tensor:
        """Eq. 3 of whole l × d matrices: rows (B, N·Dt), zeros at padding."""
        total = []
        options = {"mask": step.real.any(1), "backend": self.loss.backend, **step.gathering}
        for student, teacher in zip(students, teachers, strict=True):
            projected = self.loss.W(student, step.mask).flatten(1)
            taught = zero_padding(teacher, step.mask).flatten(1).to(projected.dtype)
            total.append(cos_nce_loss(projected, taught, **options))
        return torch.stack(total).sum()

    @property
    def prediction_options(self) -> PredictionOptions:
        # One-hot labels softened by the temperature: L_hard, eq. 5.
        spread = math.exp(-1 / self.temperature)
        options = self.temperature, self.divergence, self.scale_by_t2
        return PredictionOptions(*options, label_spread=spread)


@dataclass(kw_only=True, eq=False, repr=False)
class MC3KD(WithSoftTargets):
    """MC3KD: maximising canonical correlation coefficients (Fan et al.).

    L = alpha·KL + (1 − alpha)·CE + beta·L_CCC  (eqs. 1, 8), L_CCC = −Σ_layers corr(T_i, S_i)
    (eqs. 4-7). The teacher layers that differ most from the layer before them are compared
    (Algorithm 1); ``Distiller.prepare`` selects them once from data.

    Args:
        alpha: weight of the soft targets; {0.2, 0.5, 0.6, 0.7} in the paper. None removes the task
            and soft terms, for a student without a head.
        beta: weight of L_CCC; {0.1, 1, 10} in the paper. Eq. 7 sums hundreds of correlations when
            tokens are the observations: at beta = 1 its gradient was 94 times the task loss's
            (MiniLM, SST-2, batches of 32; 14 times with pool="cls"), so the default is 0.01.
        temperature: T; KL carries T² as in PKD, which the paper follows.
        layers: None selects layers from data; "uniform" is PKD-skip ("only MC3" in Table 5); or a
            list.
        last_layer: whether the teacher's last layer may be selected, as in section 5.1; Algorithm 1
            runs to N − 1.
        ridge: r_t = r_s of eq. 5.
        top_k: number of largest correlations to sum; None sums all.
        pool: observations: "tokens" (every real token of the batch), or "cls" or "mean" (one per
            sample; with fewer samples than dimensions all correlations are near 1 for any
            student).
        memory: number of earlier observations that are correlated with those of the batch; "auto"
            for 3·(Ds + Dt) less those of the batch, 0 for none, as in the paper. See
            `fastkd.CCALoss`. ``state_dict()`` has the memory.
        divergence, scale_by_t2: as in `SoftTargets`. Eq. 1 prints KL(S, T), no T²:
            divergence="reverse_kl" and scale_by_t2=False read it literally.

    Terms: task, soft, cca. The best cca is −(layer pairs)·min(D_S, D_T), or −(layer pairs)·top_k.
    """

    across_samples = ("cca",)
    paper = MappingProxyType({"beta": 0.1, "memory": 0})
    headless = MappingProxyType({"alpha": None})
    _without_head = "pass alpha=None"

    alpha: float | None = 0.5
    beta: float = 0.01
    temperature: float = 20.0
    layers: Layers | None = None
    last_layer: bool = True
    ridge: float = 1e-4
    top_k: int | None = None
    pool: Pool = "tokens"
    memory: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha is not None:
            check.fraction("alpha", self.alpha)
        self.teacher_pool = self.pool
        options = self.ridge, self.top_k, self.pool
        self.loss = CCALoss(*options, memory=self.memory, persistent=True)

    def choose_layers(self, teacher: Model, student: Backbone) -> None:
        # Also checks the number of layers if they are selected later.
        self.pair_layers(self.layers or "uniform", teacher, student)
        if self.layers is None:
            self._teacher_layers = None

    def prepare(self, teacher: nn.Module, batches: Batches) -> None:
        """Algorithm 1, lines 5-8. All processes of a distributed run use the first one's layers."""
        if self.layers is not None:
            return
        wanted = len(self.student_layers)
        chosen = [select_layers(teacher, batches, wanted, last_layer=self.last_layer)]
        if dist.is_available() and dist.is_initialized():
            dist.broadcast_object_list(chosen)
        self.teacher_layers = chosen[0]

    def get_extra_state(self) -> Tensor:
        """The selected layers, for a resumed run."""
        return torch.tensor(self._teacher_layers or [0])

    def set_extra_state(self, state: Tensor) -> None:
        chosen = [int(i) for i in state]
        if chosen != [0]:
            self.teacher_layers = chosen

    def weights(self, progress: float) -> dict[str, float]:
        if self.alpha is None:
            return {"cca": self.beta}
        return {"task": 1 - self.alpha, "soft": self.alpha, "cca": self.beta}

    def cca(self, step: Step) -> Tensor:
        """L_CCC, eq. 7."""
        layers = step.layers(self.student_layers, self.teacher_layers)
        pairs = [step.pooled(self.pool, s, t) for s, t in zip(*layers, strict=True)]
        students, teachers = [pair[0] for pair, _ in pairs], [pair[1] for pair, _ in pairs]
        mask = step.mask
        if self.pool != "tokens":  # one observation per sample
            students, teachers = [x[:, None] for x in students], [x[:, None] for x in teachers]
            mask = None if mask is None else mask.any(1, keepdim=True)
        loss: Tensor = step.across(self.loss)(students, teachers, mask)
        return len(students) * loss  # CCALoss averages


@dataclass(kw_only=True, eq=False, repr=False)
class LRKD(WithSoftTargets):
    """LRKD: learnable relational knowledge distillation.

    L = alpha·L_CE + (1 − alpha)·KL + beta·L_DPL  (eq. 13), with the dual projection loss between
    the mean-pooled last hidden states (eqs. 3-10); KL has the factor τ², unlike eq. 1. The
    projections train with the student and are discarded after training; hidden sizes may differ.

    Args:
        alpha: weight of the task loss; {0.7, 0.8, 0.9, 1.0} in the paper, where KL has a tenth of
            the task loss's gradient. None removes the task and soft terms, for a student without a
            head.
        beta: weight of L_DPL; {1, 10, 15} in the paper. At 1 its gradient is as large as the task
            loss's, as L_DPL is a mean over elements here; see `fastkd.DualProjectionLoss`.
        gamma: weight of the student's projection within L_DPL; "around 0.3".
        temperature: τ; {1, 2, 3, 4} in the paper.
        projection_layers: m, number of matrices in each projection; 2 in the paper.
        orthogonal: whether the projections are orthogonal; False for plain linear ones (Fig. 3b).
        reduction: ½‖·‖² of eqs. 7 and 9 as a "mean" over elements, "batchmean" over samples, or
            "sum" over both: at 32 × 768 the sum is 24,576 times the mean.
        start: first projections, "identity" or its slice, or "random".
        divergence: as in `SoftTargets`; Table 4 adds the method to reverse and adaptive KL.
        scale_by_t2: as in `SoftTargets`; False in the paper.

    Terms: task, soft, projection.
    """

    teacher_pool = "mean"
    paper = MappingProxyType({"alpha": 0.8, "scale_by_t2": False})
    headless = MappingProxyType({"alpha": None})
    _without_head = "pass alpha=None"

    alpha: float | None = 0.5
    beta: float = 1.0
    gamma: float = 0.3
    projection_layers: int = 2
    orthogonal: bool = True
    reduction: Reduction = "mean"
    start: Literal["identity", "random"] = "identity"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha is not None:
            check.fraction("alpha", self.alpha)
        check.fraction("gamma", self.gamma)
        check.positive_int("projection_layers", self.projection_layers)

    def choose_layers(self, teacher: Model, student: Backbone) -> None:
        self.student_layers, self.teacher_layers = [student.num_layers], [teacher.num_layers]

    def make_parts(self, teacher: Model, student: Backbone) -> None:
        sizes = student.hidden_size, teacher.hidden_size
        self.loss = DualProjectionLoss(
            *sizes, self.projection_layers, self.gamma, self.orthogonal, self.reduction
        )
        if self.start == "random":
            for matrix in self.loss.parameters():
                nn.init.normal_(matrix, std=matrix.shape[-1] ** -0.5)

    def weights(self, progress: float) -> dict[str, float]:
        if self.alpha is None:
            return {"projection": self.beta}
        return {"task": self.alpha, "soft": 1 - self.alpha, "projection": self.beta}

    def projection(self, step: Step) -> Tensor:
        """L_DPL, eq. 10."""
        student, teacher = step.last()
        not_empty = step.real.any(1)
        if step.teacher.pooled:
            loss = self.loss(student, teacher[:, 0], step.real, teacher_mask=not_empty)
        else:
            loss = self.loss(student, teacher, step.mask)
        if self.reduction == "sum":  # a loop averages over processes
            return loss * (world_size() if step.ranks is None else step.ranks.size)
        return step.mean(loss * not_empty.sum(), not_empty.sum())


@dataclass(kw_only=True, eq=False, repr=False)
class AttentionMSE(WithSoftTargets):
    """TinyBERT's distillation of the transformer layers (Jiao et al. 2020).

    L = task_weight·L_CE + soft_weight·L_pred + Σ_layers (attention·L_attn + hidden·L_hidn), with
    L_attn = (1/h) Σ_i MSE(A_i^S, A_i^T) of the attention maps (eq. 7; `fastkd.AttentionLoss`) and
    L_hidn = MSE(H^S W_h, H^T) of the hidden states (eq. 8). The sum of L_hidn begins with the
    embeddings (eq. 9). One W_h is shared by all layers and the embeddings, as in the authors' code.
    L_pred is the soft-target loss (eq. 10). The paper trains in two stages: layers first
    (``soft_weight=0``), then the output (``attention=0, hidden=0``).

    Both models need ``attn_implementation="eager"``. A are probabilities, not the paper's scores,
    as models return probabilities. The commands name this method tinybert and load models with
    eager attention.

    Args:
        attention: weight of L_attn.
        hidden: weight of L_hidn.
        soft_weight: weight of L_pred.
        task_weight: weight of the task loss; 0 in the paper.
        heads: "match" compares head by head; "mean" compares means over the heads, for models
            with different numbers of heads.
        layers: as in `FCD`; "uniform" in the paper.
        temperature: t of eq. 10; 1 in the paper.
        divergence, scale_by_t2: as in `SoftTargets`.

    Terms: task, soft, maps, states.
    """

    headless = MappingProxyType({"task_weight": 0.0, "soft_weight": 0.0})

    attention: float = 1.0
    hidden: float = 1.0
    soft_weight: float = 1.0
    task_weight: float = 0.0
    heads: Heads = "match"
    layers: Layers = "uniform"
    temperature: float = 1.0
    scale_by_t2: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.map_loss = AttentionLoss(self.heads)

    def choose_layers(self, teacher: Model, student: Backbone) -> None:
        self.pair_layers(self.layers, teacher, student)
        self.student_attentions, self.teacher_attentions = self.student_layers, self.teacher_layers
        self.student_layers = [0, *self.student_attentions]  # 0: the embeddings
        self.teacher_layers = [0, *self.teacher_attentions]

    def make_parts(self, teacher: Model, student: Backbone) -> None:
        self.W = Projector(student.hidden_size, teacher.hidden_size, bias=False)

    def weights(self, progress: float) -> dict[str, float]:
        layers = {"maps": self.attention, "states": self.hidden}
        return {"task": self.task_weight, "soft": self.soft_weight, **layers}

    def maps(self, step: Step) -> Tensor:
        """Σ over layers of L_attn, eq. 7."""
        students, teachers = step.attentions(self.student_attentions, self.teacher_attentions)
        samples = step.real.any(1).sum()
        # AttentionLoss averages over the layers.
        loss = len(students) * self.map_loss(students, teachers, step.mask)
        return step.mean(loss * samples, samples)

    def states(self, step: Step) -> Tensor:
        """Σ over embeddings and layers of L_hidn, eqs. 8 and 9, a mean over the real tokens."""
        totals = []
        layers = step.layers(self.student_layers, self.teacher_layers)
        for student, teacher in zip(*layers, strict=True):
            projected = self.W(student, step.mask)
            taught = teacher.to(projected.dtype)
            totals.append(hidden_state_loss(projected, taught, step.mask, reduction="sum"))
        return step.mean(torch.stack(totals).sum(), step.real.sum())


METHODS: dict[str, type[Method]] = {
    "labels": Labels,
    "soft_targets": SoftTargets,
    "fcd": FCD,
    "knn": IntraClassKNN,
    "lrc_bert": LRCBERT,
    "mc3kd": MC3KD,
    "lrkd": LRKD,
}


def resolve(name: str) -> type[Method]:
    """Method class by name: one of `METHODS`, or your own as "package.module:Class".

    Raises:
        ValueError: the name is unknown, or the class can't be imported.
        TypeError: the class is not a subclass of `Method`.

    >>> resolve("fcd") is resolve("fastkd.distill.methods:FCD")
    True
    """
    if ":" not in name:
        check.choice("method", name, METHODS)
        return METHODS[name]
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"method {name!r} can't be imported ({error}); use package.module:Class"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise TypeError(f"method {name!r} must be a subclass of fastkd.distill.Method, got {found}")
    return found


Preset = Literal["default", "paper"]


def method_by_name(name: str, *, preset: Preset = "default", **hyperparameters: Any) -> Method:
    """Method instance by name, as in `resolve`, with hyper-parameters.

    ``preset="paper"`` starts from the paper's hyper-parameters instead of the defaults.

    Raises:
        ValueError: the name, preset or a hyper-parameter is unknown; the message suggests the
            nearest one.

    >>> method_by_name("lrkd", beta=1.0).weights(0.0)["projection"]
    1.0
    >>> method_by_name("mc3kd", preset="paper").beta
    0.1
    """
    kind = resolve(name)
    known = inspect.signature(kind).parameters
    for option in hyperparameters:
        check.choice(f"hyper-parameter of {name}", option, known)
    return from_preset(kind, preset, hyperparameters)


def from_preset(kind: type[Method], preset: str, hyperparameters: Mapping[str, Any]) -> Method:
    """Method instance with the preset's hyper-parameters, overridden by ``hyperparameters``."""
    check.choice("preset", preset, get_args(Preset))
    return kind(**{**(kind.paper if preset == "paper" else {}), **hyperparameters})
