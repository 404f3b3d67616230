"""Losses on a model's predictions: labels and soft targets, from logits or from an LM head.

Every function returns sums with their numbers of items: a step divides them by the number of its
own batch, of all micro-batches, or of all processes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fastkd._core.numerics import upcast, working_dtype
from fastkd.analysis.model_inputs import IGNORED
from fastkd.distill.backbone import Backbone
from fastkd.distill.lm_head import HeadInputs
from fastkd.soft_targets import DivergenceWord, linear_soft_target_loss, soft_target_loss
from fastkd.targets import CrossEntropy

REGRESSION, MULTI_LABEL = "regression", "multi_label_classification"
NO_LABELS = "the task term needs labels in the batch; pass labels, or set its weight to 0"

Logits = Tensor | tuple[Tensor, Tensor]
Labels = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class PredictionOptions:
    """Options of a method's terms on predictions.

    ``temperature``, ``divergence`` and ``scale_by_t2`` are those of the soft targets. In the
    target of the labels' cross-entropy each class but the label has ``label_spread`` times the
    label's weight.
    """

    temperature: float = 1.0
    divergence: DivergenceWord = "forward_kl"
    scale_by_t2: bool = True
    label_spread: float = 0.0

    def label_smoothing(self, classes: int) -> float:
        """`torch.nn.functional.cross_entropy`'s ``label_smoothing`` over so many classes."""
        return classes * self.label_spread / (1 + (classes - 1) * self.label_spread)


@dataclass(frozen=True)
class Sum:
    """Sum of losses over ``count`` items: samples, numbers, or tokens of a token-level head."""

    total: Tensor
    count: Tensor | int
    over_tokens: bool = False


@dataclass(frozen=True)
class Targets:
    """Labels of a batch, and the facts that align predictions with them."""

    model: Backbone  # the student
    labels: Labels | None
    mask: Tensor | None  # (B, N) real tokens, of token-level logits as the model returns them
    document_ids: Tensor | None  # (B, N), where rows are packed
    vocabulary: int | None  # number of leading logits that student and teacher share
    loss_weights: Tensor | None = None  # (B, N) factors of the tokens' losses

    @property
    def aligned_weights(self) -> Tensor | None:
        """Weights of the predictions: a causal head's position n predicts token n + 1."""
        weights = self.loss_weights
        return weights if weights is None or not self.model.causal else weights[:, 1:]

    def check_unweighted(self) -> None:
        """Raise if there are weights, for heads whose losses don't take them."""
        if self.loss_weights is not None:
            raise ValueError(
                "loss_weights are factors of the losses on classes of tokens, and the head of "
                f"{self.model.class_name} predicts something else; leave them out"
            )

    @property
    def regression(self) -> bool:
        """Whether the head predicts numbers: losses on its outputs are squared errors."""
        return self.model.problem == REGRESSION

    def multi_label(self, logits: Tensor) -> bool:
        """Whether each logit is a yes-or-no decision; by the labels, as in transformers."""
        problem, labels = self.model.problem, self.labels
        if problem is not None or not isinstance(labels, Tensor):
            return problem == MULTI_LABEL
        return labels.is_floating_point() and labels.shape == logits.shape

    def counted(self, logits: Tensor, labels: Labels | None) -> tuple[Tensor | None, Tensor | None]:
        """Mask of the positions that count, None for sequence heads, and the labels aligned to it.

        Sequence heads return (B, V), and every row counts. Token heads return (B, N, V): a causal
        language model's position n predicts label n + 1 of the same document; padding and ignored
        labels don't count.
        """
        labels = labels if isinstance(labels, Tensor) else None
        if logits.dim() == 2:
            if self.document_ids is not None:
                raise ValueError(
                    f"the head of {self.model.class_name} gives one prediction a row, but rows are "
                    "packed with several documents; leave out the task and soft terms, or don't "
                    "pack"
                )
            return None, labels
        if labels is not None and labels.shape != logits.shape[:-1]:
            raise _misfit(labels, logits)
        mask = self.mask
        if mask is None:
            mask = torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
        return countable(labels, mask, self.document_ids, self.model.causal)

    def real_numbers(self, logits: Tensor) -> Tensor:
        """Mask of a regression's numbers (B, ...), or (B, N, ...) of tokens, without padding."""
        if self.mask is None or not self.model.per_token:
            return torch.ones_like(logits, dtype=torch.bool)
        return self.mask.view(*self.mask.shape, *[1] * (logits.dim() - 2)).expand_as(logits)


def countable(
    labels: Tensor | None, mask: Tensor, document_ids: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """Mask (B, N) of the counted token predictions, and their labels.

    Both are (B, N − 1) for a ``causal`` head, whose last position predicts no token.
    """
    if causal:
        mask = mask[:, 1:] & mask[:, :-1]
        labels = None if labels is None else labels[:, 1:]
        if document_ids is not None:
            mask = mask & (document_ids[:, 1:] == document_ids[:, :-1])
    if labels is None:
        return mask, None
    # Left padding precedes the first token and must not be trained to predict it.
    labels = labels.masked_fill(~mask, IGNORED)
    return labels != IGNORED, labels


def label_losses(logits: Logits, targets: Targets, options: PredictionOptions) -> list[Sum]:
    """Sums of the loss on the labels, whose means are averaged: two for answer spans, else one."""
    labels = targets.labels
    if labels is None:
        raise ValueError(NO_LABELS)
    if isinstance(logits, tuple) or targets.regression or targets.multi_label(logits):
        targets.check_unweighted()
    if isinstance(logits, tuple) or isinstance(labels, tuple):
        if not (isinstance(logits, tuple) and isinstance(labels, tuple)):
            raise ValueError(
                f"{targets.model.class_name} takes start_positions and end_positions, not labels"
            )
        N = logits[0].shape[-1]
        ends = [x.flatten() for x in labels]
        # As in transformers: a position beyond the text doesn't count.
        ends = [y.clamp(0, N).masked_fill((y >= N) | (y == IGNORED), IGNORED) for y in ends]
        pairs = zip(logits, ends, strict=True)
        return [_place_loss(z, y, targets, options.label_spread) for z, y in pairs]
    if targets.regression:
        if labels.numel() != logits.numel():
            raise _misfit(labels, logits)
        numbers = labels.to(working_dtype(logits)).flatten()
        known = ~numbers.isnan() & targets.real_numbers(logits).flatten()
        errors = torch.where(known, upcast(logits).flatten() - numbers, 0).square()
        return [Sum(errors.sum(), known.sum())]
    if targets.multi_label(logits):
        known = ~labels.isnan() & (labels != IGNORED)
        if labels.shape != logits.shape:
            raise _misfit(labels, logits)
        decisions = labels.to(working_dtype(logits)).masked_fill(~known, 0)
        total = F.binary_cross_entropy_with_logits(
            upcast(logits), decisions, known.to(decisions.dtype), reduction="sum"
        )
        return [Sum(total, known.sum())]
    if labels.shape != logits.shape[:-1]:
        raise _misfit(labels, logits)
    logits = logits[..., : targets.vocabulary]
    mask, aligned = targets.counted(logits, labels)
    assert aligned is not None
    if mask is not None and targets.model.causal:
        logits = logits[:, :-1]
    weights = targets.aligned_weights
    total = F.cross_entropy(
        upcast(logits).flatten(0, -2),
        aligned.flatten(),
        ignore_index=IGNORED,
        reduction="sum" if weights is None else "none",
        label_smoothing=options.label_smoothing(logits.shape[-1]) if options.label_spread else 0.0,
    )
    if weights is not None:
        known = aligned != IGNORED
        total = (total * weights.to(total.dtype).where(known, 0).flatten()).sum()
    return [Sum(total, (aligned != IGNORED).sum(), mask is not None)]


def _place_loss(logits: Tensor, places: Tensor, targets: Targets, spread: float) -> Sum:
    """Cross-entropy of an answer's start or end (B,) over the real tokens.

    transformers includes padding, so that a row's loss depends on the longest row of the batch.
    """
    if places.shape != logits.shape[:-1]:
        raise _misfit(places, logits)
    targets.counted(logits, places)  # refuses packed rows
    mask = targets.mask
    mask = torch.ones_like(logits, dtype=torch.bool) if mask is None else mask
    log_p = upcast(_without_padding(logits, mask)).log_softmax(-1)  # (B, N)
    place = places.clamp(min=0)[:, None]
    known = (places != IGNORED) & mask.gather(1, place).squeeze(1)
    at_place = log_p.gather(1, place).squeeze(1)
    others = torch.where(mask, log_p, 0).sum(-1) - at_place
    losses = -(at_place + spread * others) / (1 + (mask.sum(-1) - 1) * spread)
    return Sum(torch.where(known, losses, 0).sum(), known.sum())


def soft_losses(
    student: Logits, teacher: Logits, targets: Targets, options: PredictionOptions
) -> list[Sum]:
    """Divergence between softened output distributions, or squared errors for regression.

    Answer spans have two sums, for start and end, each a distribution over the real tokens.
    Multi-label heads have a distribution over yes and no for each label.
    """
    sums = []
    spans = isinstance(student, tuple)
    for z_s, z_t in zip(
        student if spans else (student,),
        teacher if isinstance(teacher, tuple) else (teacher,),
        strict=True,
    ):
        z_s, z_t = z_s[..., : targets.vocabulary], z_t[..., : targets.vocabulary]
        if z_t.shape != z_s.shape:
            raise ValueError(
                f"student logits have shape {tuple(z_s.shape)} but the teacher's "
                f"{tuple(z_t.shape)}; both need the same labels or vocabulary"
            )
        z_t = z_t.to(z_s.dtype)
        if targets.regression or isinstance(student, tuple) or targets.multi_label(z_s):
            targets.check_unweighted()
        if targets.regression:
            real = targets.real_numbers(z_s)
            errors = torch.where(real, upcast(z_s) - upcast(z_t), 0).square()
            sums.append(Sum(errors.sum(), real.sum()))
            continue
        mask, _ = targets.counted(z_s, targets.labels)
        if spans and targets.mask is not None:
            z_s, z_t = (_without_padding(z, targets.mask) for z in (z_s, z_t))
        if targets.multi_label(z_s):
            z_s, z_t = (torch.stack([z, 0 * z], -1) for z in (z_s, z_t))
        if mask is not None and targets.model.causal:
            z_s, z_t = z_s[:, :-1], z_t[:, :-1]
        total = soft_target_loss(
            z_s,
            z_t,
            temperature=options.temperature,
            divergence=options.divergence,
            mask=mask,
            weights=targets.aligned_weights,
            reduction="sum",
            scale_by_t2=options.scale_by_t2,
        )
        count = z_s.shape[:-1].numel() if mask is None else mask.sum()
        sums.append(Sum(total, count, over_tokens=mask is not None))
    return sums


def head_losses(
    student: HeadInputs,
    teacher: HeadInputs | None,
    targets: Targets,
    options: PredictionOptions,
    weights: Mapping[str, float],
) -> Sum:
    """Weighted loss of "task" and "soft" from hidden states and LM heads, in one pass.

    ``teacher`` may be None without a weight of "soft". The total is (1 + terms,): the weighted
    loss, then each term of ``weights``, unweighted and detached.
    """
    if "task" in weights and targets.labels is None:
        raise ValueError(NO_LABELS)
    mask, aligned = targets.counted(student.states, targets.labels)
    states = student.states
    classes = targets.vocabulary or student.head.weight.shape[0]
    taught = HeadInputs(states.detach(), student.head) if teacher is None else teacher
    known = taught.states.to(states.dtype)
    if targets.model.causal:
        states, known = states[:, :-1], known[:, :-1]
    task = None
    if "task" in weights:
        assert aligned is not None
        smoothing = options.label_smoothing(classes)
        task = CrossEntropy(
            aligned,
            weights["task"],
            label_smoothing=smoothing,
            ignore_index=IGNORED,
            weights=targets.aligned_weights,
        )
    loss, terms = linear_soft_target_loss(
        states,
        student.head,
        known,
        taught.head.detach(),
        temperature=options.temperature,
        divergence=options.divergence,
        scale_by_t2=options.scale_by_t2,
        mask=mask,
        weights=targets.aligned_weights,
        reduction="sum",
        vocabulary=targets.vocabulary,
        soft_weight=weights.get("soft", 0.0),
        task=task,
        return_terms=tuple(weights),
    )
    totals = torch.stack([loss, *(terms[name].to(loss.dtype) for name in weights)])
    count = states.shape[:-1].numel() if mask is None else mask.sum()
    return Sum(totals, count, over_tokens=mask is not None)


def _misfit(labels: Tensor, logits: Tensor) -> ValueError:
    return ValueError(
        f"labels have shape {tuple(labels.shape)} but the student's logits {tuple(logits.shape)}"
    )


def _without_padding(logits: Tensor, mask: Tensor) -> Tensor:
    """Logits (B, N) over positions, with no probability for padding."""
    return logits.masked_fill(~mask, -3e4)  # far below any logit, and finite in float16
