"""Methods of other papers, as baselines for comparison."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastkd._core import check
from fastkd._core.numerics import Projector, upcast
from fastkd.distill.attention_relations import MiniLM, MiniLMv2
from fastkd.distill.merged_spans import merged_span_loss, span_likelihood_loss
from fastkd.distill.method import Layers, Method, check_fields
from fastkd.distill.methods import AttentionMSE, SoftTargets
from fastkd.distill.prediction_losses import margin_loss
from fastkd.distill.step import Step
from fastkd.lm.heads import Head
from fastkd.lm.log_probs import log_probs
from fastkd.lm.vocabulary_match import VocabularyMatch
from fastkd.losses.cca import CCALoss, Ridge
from fastkd.losses.cos_nce import cos_nce_loss
from fastkd.losses.hidden_states import Kind, hidden_state_loss
from fastkd.losses.relation import Distance, FCDLoss
from fastkd.models.backbone import Backbone, Model
from fastkd.models.inputs import IGNORED


@dataclass(kw_only=True, eq=False, repr=False)
class PKD(SoftTargets):
    """Patient knowledge distillation (Sun et al. 2019).

    L = (1 − alpha)·CE + alpha·T²·KL + beta·L_PT, L_PT = Σ_layers mean over the samples of
    ‖h_S/‖h_S‖ − h_T/‖h_T‖‖² of the sentence tokens (eqs. 6-7). As in the paper, the last layer is
    not compared.

    Args:
        alpha, temperature: {0.2, 0.5, 0.7} and {5, 10, 20} in the paper.
        beta: {10, 100, 500, 1000} in the paper.
        layers: "uniform" is PKD-skip, "top" PKD-last.
        divergence, scale_by_t2: as in `SoftTargets`.

    Terms: task, soft, patient.
    """

    temperature: float = 5.0
    beta: float = 10.0
    layers: Layers = "uniform"

    def choose_layers(self, teacher: Model, student: Backbone) -> None:
        if teacher.hidden_size != student.hidden_size:
            raise ValueError(
                f"PKD: the hidden sizes {student.hidden_size} and {teacher.hidden_size} differ; "
                "use a student of the teacher's hidden size"
            )
        self.pair_layers(self.layers, teacher, student)
        if student.num_layers > 1:
            self.student_layers = self.student_layers[:-1]
            self.teacher_layers = self.teacher_layers[:-1]

    def weights(self, progress: float) -> dict[str, float]:
        return {**super().weights(progress), "patient": self.beta}

    def patient(self, step: Step) -> Tensor:
        """L_PT, eq. 7."""
        pairs = zip(*step.layers(self.student_layers, self.teacher_layers), strict=True)
        total = []
        has_tokens = step.real.any(1)  # (B,), samples with a real token
        for student, teacher in pairs:
            (s, t), _ = step.pooled("cls", student, teacher)
            difference = F.normalize(upcast(s), dim=-1) - F.normalize(upcast(t), dim=-1)
            squares = torch.where(has_tokens, difference.square().sum(-1), 0)
            total.append(step.mean(squares.sum(), has_tokens.sum()))
        return torch.stack(total).sum()


@dataclass(kw_only=True, eq=False, repr=False)
class DistilBERT(SoftTargets):
    """The losses of DistilBERT (Sanh et al. 2019), with the task loss instead of masked tokens.

    L = (1 − alpha)·CE + alpha·T²·KL + beta·(1 − cos(H_S, H_T)), where H are the last hidden states,
    compared token by token.

    Args:
        alpha, temperature, divergence, scale_by_t2: as in `SoftTargets`; the paper weights soft to
            task 5:2, with T = 2.
        beta: weight of the cosine term; 1 in the paper, beside 5 and 2.

    Terms: task, soft, cosine.
    """

    alpha: float = 0.7
    beta: float = 0.15

    def choose_layers(self, teacher: Model, student: Backbone) -> None:
        if teacher.hidden_size != student.hidden_size:
            raise ValueError(
                f"DistilBERT: the hidden sizes {student.hidden_size} and {teacher.hidden_size} "
                "differ; use a student of the teacher's hidden size"
            )
        self.student_layers, self.teacher_layers = [student.num_layers], [teacher.num_layers]

    def weights(self, progress: float) -> dict[str, float]:
        return {**super().weights(progress), "cosine": self.beta}

    def cosine(self, step: Step) -> Tensor:
        distances = hidden_state_loss(*step.last(), step.mask, kind="cosine", reduction="sum")
        return step.mean(distances, step.real.sum())


@dataclass(kw_only=True, eq=False, repr=False)
class Embeddings(Method):
    """Distillation of embedding models: one embedding per sample, compared with the teacher's.

    L = task_weight·L_g + cos_nce·L_NCE + cosine·(1 − cos) + mse·MSE + relations·L_s + cca·L_CCC:
    COS-NCE (LRC-BERT, eqs. 1-2), the mean of 1 − cos(s, t), the mean square of s − t over elements,
    the relations between the samples of a batch (FCD, eq. 9) and −Σ of the canonical correlations
    (MC3KD, eq. 7). Hidden states of other layers are not compared. With unequal widths COS-NCE uses
    a trained projection, initialised to a slice of the identity; cosine and MSE need equal widths.

    Args:
        cos_nce, cosine, mse, relations, cca: weights.
        task_weight: weight of the task loss; unused for models without a head.
        pooling: "mean" of a sample's last hidden states, or "cls", the state that a classification
            head reads. `fastkd distill --task embedding` uses the teacher's pooling.
        unit_length: normalise embeddings to length 1, which changes mse and cca only; the command
            normalises if the teacher does.
        distance: distance between relations, as in `fastkd.relation_loss`.
        ridge: ridge of the correlations, as in `fastkd.CCALoss`; use a large one for batches
            with fewer samples than an embedding has dimensions.

    Terms: task, contrast, angles, squares, samples, correlations.
    """

    across_samples = ("contrast", "samples", "correlations")
    head_terms = ("task", "soft")
    headless = MappingProxyType({"task_weight": 0.0})

    cos_nce: float = 1.0
    cosine: float = 0.0
    mse: float = 0.0
    relations: float = 0.0
    cca: float = 0.0
    task_weight: float = 1.0
    pooling: Literal["mean", "cls"] = "mean"
    unit_length: bool = True
    distance: Distance = "pearson"
    ridge: Ridge = 0.1

    def __post_init__(self) -> None:
        super().__init__()
        check_fields(self)
        self.teacher_pool = self.pooling
        self.relation_loss = FCDLoss(0.0, 1.0, "l2", self.distance)
        self.cca_loss = CCALoss(self.ridge)

    def choose_layers(self, teacher: Model, student: Backbone) -> None:
        widths = student.hidden_size, teacher.hidden_size
        if (self.cosine or self.mse) and widths[0] != widths[1]:
            raise ValueError(
                f"cosine, mse: the student's embeddings have {widths[0]} dimensions, the teacher's "
                f"{widths[1]}; set both weights to 0, as only cos_nce, relations and cca compare "
                "embeddings of two widths"
            )
        self.student_layers, self.teacher_layers = [student.num_layers], [teacher.num_layers]

    def make_parts(self, teacher: Model, student: Backbone) -> None:
        self.W = None
        if self.cos_nce and student.hidden_size != teacher.hidden_size:
            self.W = Projector(student.hidden_size, teacher.hidden_size, bias=False)
            nn.init.eye_(self.W.weight)  # type: ignore[arg-type]

    def weights(self, progress: float) -> dict[str, float]:
        return {
            "task": self.task_weight,
            "contrast": self.cos_nce,
            "angles": self.cosine,
            "squares": self.mse,
            "samples": self.relations,
            "correlations": self.cca,
        }

    def compute(self, step: Step, weights: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
        loss, terms = super().compute(step, weights)
        for name, term in self._embedding_terms(step, [x for x in weights if x != "task"]):
            loss, terms[name] = loss + weights[name] * term, term.detach()
        return loss, terms

    def _embedding_terms(self, step: Step, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Terms of embeddings (B, Ds) and (B, Dt), pooled once for all terms."""
        if not names:
            return
        (student, teacher), _ = step.pooled(self.pooling, *step.last())
        student, teacher = upcast(student), upcast(teacher)
        if self.unit_length:
            student, teacher = F.normalize(student, dim=-1), F.normalize(teacher, dim=-1)
        real = step.real.any(1)  # (B,), samples with a real token
        rows = student[:, None], teacher[:, None], real[:, None]
        for name in names:
            if name == "contrast":  # LRC-BERT, eq. 1
                projected = student if self.W is None else self.W(student, real)
                taught = teacher.to(projected.dtype)
                yield name, cos_nce_loss(projected, taught, mask=real, **step.gathering)
            elif name == "samples":  # FCD, eq. 9
                yield name, step.across(self.relation_loss)(student, teacher, real)
            elif name == "correlations":  # MC3KD, eq. 7
                yield name, step.across(self.cca_loss)(*rows)
            else:
                kind: Kind = "cosine" if name == "angles" else "mse"
                total = hidden_state_loss(student, teacher, real, kind=kind, reduction="sum")
                yield name, step.mean(total, real.sum())


@dataclass(kw_only=True, eq=False, repr=False)
class GOLD(Method):
    """Spans of text of a teacher with another tokenizer, as in TRL's GOLD trainer.

    L = task_weight·CE + merged_weight·merged + likelihood_weight·likelihood, of the spans that
    `TwoTokenizers` aligns, where a label counts: `fastkd.distill.merged_span_loss`, a distance of
    distributions, and `fastkd.distill.span_likelihood_loss`, a divergence of the spans'
    probabilities. A mean over the spans of a text, then over texts. The defaults are TRL's.

    The Distiller needs ``tokenizers=VocabularyMatch.of(...)`` and causal language models.

    Args:
        temperature: of both models.
        hybrid: whether matched tokens are compared one by one, by the generalised Jensen-Shannon
            divergence, and only the others by their sorted probabilities.
        beta: of that divergence.
        merge: "observed" merges the prediction at a span's first token; "bayesian" those of its
            tokens themselves, one position before, into the last one's.

    Terms: task, merged, likelihood.
    """

    logit_terms = head_terms = ("task", "merged", "likelihood")
    merges_spans = True

    task_weight: float = 0.0
    merged_weight: float = 1.0
    likelihood_weight: float = 0.0
    temperature: float = 1.0
    hybrid: bool = False
    beta: float = 0.5
    merge: Literal["observed", "bayesian"] = "observed"

    def __post_init__(self) -> None:
        super().__init__()
        check.number("temperature", self.temperature, above=0)
        check_fields(self)

    def weights(self, progress: float) -> dict[str, float]:
        return {
            "task": self.task_weight,
            "merged": self.merged_weight,
            "likelihood": self.likelihood_weight,
        }

    def merged(self, step: Step) -> Tensor:
        """Distance of the merged distributions."""
        bayesian = self.merge == "bayesian"
        student, teacher = _span_tokens(step, shifted=bayesian)
        vocabulary = step.teacher_model.vocabulary
        assert isinstance(vocabulary, VocabularyMatch)
        loss = merged_span_loss(
            student.states,
            student.head,
            teacher.states.to(student.states.dtype),
            teacher.head.detach(),
            student_ids=student.ids,
            teacher_ids=teacher.ids,
            student_spans=student.spans,
            teacher_spans=teacher.spans,
            vocabulary=vocabulary if self.hybrid else None,
            beta=self.beta,
            temperature=self.temperature,
            kept="last" if bayesian else "first",
        )
        return step.mean(loss * len(student.ids), len(student.ids))

    def likelihood(self, step: Step) -> Tensor:
        """Divergence of the spans' probabilities."""
        sides = _span_tokens(step, shifted=True)
        own = [
            log_probs(x.states, head, x.ids.masked_fill(x.spans < 0, 0))
            for x, head in zip(sides, (sides[0].head, sides[1].head.detach()), strict=True)
        ]
        spans = (x.spans for x in sides)
        loss = span_likelihood_loss(*own, *spans, temperature=self.temperature)
        return step.mean(loss * len(sides[0].ids), len(sides[0].ids))


class SpanTokens(NamedTuple):
    """One model's states at an LM head, with the tokens and spans that they are compared with."""

    states: Tensor  # (B, N, D)
    head: Head
    ids: Tensor  # (B, N)
    spans: Tensor  # (B, N)


def _span_tokens(step: Step, shifted: bool) -> list[SpanTokens]:
    """Student's and teacher's tokens; ``shifted`` gives each its own prediction."""
    inputs = step.student.head_inputs, step.teacher.head_inputs
    two = isinstance(step.teacher_model.vocabulary, VocabularyMatch)
    if not two or step.spans is None or step.spans.rows is None or None in inputs:
        raise ValueError(
            "GOLD compares spans of two tokenizers from hidden states and LM heads; pass "
            "tokenizers=VocabularyMatch.of(...) and batches of TwoTokenizers, without keep_logits"
        )
    ours, theirs = step.spans.rows
    if isinstance(step.labels, Tensor):
        ours = ours.masked_fill(step.labels == IGNORED, -1)
    found = []
    for given, ids, spans in zip(inputs, step.spans.ids, (ours, theirs), strict=True):
        assert given is not None and ids is not None
        states = given.states.to(step.student_model.dtype)
        if shifted:
            states, ids, spans = states[:, :-1], ids[:, 1:], spans[:, 1:]
        found.append(SpanTokens(states, given.head, ids, spans))
    return found


@dataclass(kw_only=True, eq=False, repr=False)
class MarginMSE(Method):
    """Margins of a reranker's scores (Hofstätter et al. 2020).

    L = (1 − alpha)·L_labels + alpha·L_margin. L_margin is the mean over a list's pairs of a
    relevant and another document of ((s₊ − s₋) − (t₊ − t₋))², then over the lists; L_labels is that
    of the labels' scores, which alpha = 0 takes as the teacher. Labels (R, 3) of R pairs of query
    and document have the number of the pair's list, whether the document is relevant, and its
    score, NaN without one.

    Terms: task, margin.
    """

    logit_terms = ("task", "margin")

    alpha: float = 1.0

    def __post_init__(self) -> None:
        Method.__init__(self)
        check.fraction("alpha", self.alpha)

    def weights(self, progress: float) -> dict[str, float]:
        return {"task": 1 - self.alpha, "margin": self.alpha}

    def choose_layers(self, teacher: Model, student: Backbone) -> None:
        if student.output_size != 1 or student.per_token:
            raise ValueError(
                f"MarginMSE compares scores, and the head of {student.class_name} has other "
                "outputs; use a cross-encoder with num_labels=1"
            )

    def task(self, step: Step) -> Tensor:
        return margin_loss(step, by_labels=True)

    def margin(self, step: Step) -> Tensor:
        return margin_loss(step)


BASELINES: dict[str, type[Method]] = {
    "tinybert": AttentionMSE,
    "pkd": PKD,
    "distilbert": DistilBERT,
    "minilm": MiniLM,
    "minilmv2": MiniLMv2,
    "embeddings": Embeddings,
    "gold": GOLD,
    "margin_mse": MarginMSE,
}
#: Names of all methods, for the commands.
