"""Losses on a model's predictions: labels and soft targets, from logits or from an LM head."""

import dataclasses
import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastkd._core import check
from fastkd._core.dispatch import backend_of
from fastkd._core.numerics import apply, upcast, values_readable, working_dtype
from fastkd.distill.step import Step
from fastkd.lm.linear_soft_targets import (
    CHUNK_BYTES,
    COLUMNS,
    LOSSES,
    HeadForm,
    LinearSoftTargets,
    LossOptions,
    Positions,
)
from fastkd.lm.reference import CrossEntropyOptions, SoftTargetOptions
from fastkd.lm.soft_targets import (
    DivergenceWord,
    check_match,
    check_vocabularies,
    soft_target_loss,
)
from fastkd.lm.targets import TopK, counted_labels
from fastkd.lm.vocabulary_match import VocabularyMatch
from fastkd.models.backbone import Model
from fastkd.models.inputs import IGNORED
from fastkd.models.outputs import Logits

LIST_COLUMNS = 3
FAR = -3e4  # far below any score or logit, and finite in float16


@dataclass(frozen=True)
class Lists:
    """The lists of R pairs: ``same`` (R, R), whether two are of one list; ``relevant`` and
    ``scores`` (R,)."""

    same: Tensor
    relevant: Tensor
    scores: Tensor

    @classmethod
    def of(cls, labels: Any, logits: Any) -> "Lists | None":
        """The lists in the ``labels`` of a head with one output; None for other labels."""
        if not (isinstance(labels, Tensor) and isinstance(logits, Tensor)):
            return None
        one = logits.shape[:1] == labels.shape[:1] and logits.shape[1:].numel() == 1
        if labels.shape[1:] != (LIST_COLUMNS,) or not one:
            return None
        number, relevant, scores = labels.unbind(1)
        return cls(number[:, None] == number, relevant > 0, scores)

    @property
    def weights(self) -> Tensor:
        """A list's weight of 1, divided among its pairs (R,)."""
        return 1 / self.same.sum(1)

    def rows(self, scores: Tensor) -> Tensor:
        """Scores (R, R): in each row those of the pair's list."""
        return scores.flatten().expand(len(scores), -1).masked_fill(~self.same, FAR)

    def divergence(self, student: Any, teacher: Any, options: "PredictionOptions") -> Tensor:
        """Divergence of the distributions over each pair's list (R,)."""
        return soft_target_loss(
            self.rows(upcast(student)),
            self.rows(upcast(teacher)),
            temperature=options.temperature,
            divergence=options.divergence,
            scale_by_t2=options.scale_by_t2,
            reduction="none",
        )

    def contrast(self, student: Tensor) -> Tensor:
        """Cross-entropy of each pair's list with its relevant documents (R,)."""
        wanted = (self.same & self.relevant).to(student.dtype)
        wanted = wanted / wanted.sum(1, keepdim=True).clamp(min=1)
        return -(wanted * self.rows(upcast(student)).log_softmax(-1)).sum(1)

    def any(self, mask: Tensor) -> Tensor:
        """Whether a pair of ``mask`` (R,) is in the list of each pair (R,)."""
        return (self.same & mask).any(1)

    def margins(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """The squared differences of margins, their means over each list's pairs of a relevant and
        another document summed over the lists, and the number of these lists."""
        pairs = self.same & self.relevant[:, None] & ~self.relevant
        s, t = (upcast(x).flatten() for x in (student, teacher))
        errors = (s[:, None] - s) - (t[:, None] - t).detach()
        counts = (self.same.to(s.dtype) @ pairs.sum(1).to(s.dtype)).clamp(min=1)  # of the list
        total = (torch.where(pairs, errors, 0).square().sum(1) / counts).sum()
        known = self.any(self.relevant) & self.any(~self.relevant)
        return total, (known * self.weights).sum()


REGRESSION, MULTI_LABEL = "regression", "multi_label_classification"
NO_LABELS = "the task term needs labels in the batch; pass labels, or set its weight to 0"


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


def task_loss(step: Step, options: PredictionOptions) -> Tensor:
    """Student's loss on the labels: cross-entropy, or MSE for regression.

    Labels (B, V) of floating type are probabilities of the classes, or the decisions of a
    multi-label head. Question answering: the mean over start and end.
    """
    if step.student.loss is not None and step.labels is None:
        return step.own_mean(step.student.loss)  # the head has targets of its own
    logits: Any = logits_of(step, "student", "task")
    labels = step.labels
    if labels is None:
        raise ValueError(NO_LABELS)
    problem = _problem(step, logits)
    lists = Lists.of(labels, logits)
    if lists is not None:
        return _list_loss(step, lists, logits, options)
    if isinstance(logits, tuple) or isinstance(labels, tuple):
        if not (isinstance(logits, tuple) and isinstance(labels, tuple)):
            raise ValueError(
                f"{step.student_model.class_name} takes start_positions and end_positions, not "
                "labels"
            )
        places = zip(logits, labels, strict=True)
        return torch.stack(
            [_place_loss(step, z, y, options.label_spread) for z, y in places]
        ).mean()
    if problem == REGRESSION:
        if labels.numel() != logits.numel():
            raise _misfit(labels, logits)
        numbers = labels.to(working_dtype(logits)).flatten()
        known = ~numbers.isnan() & _real_numbers(step, logits).flatten()
        errors = torch.where(known, upcast(logits).flatten() - numbers, 0).square()
        return step.mean(errors.sum(), known.sum())
    if problem == MULTI_LABEL:
        return _decision_loss(step, logits, labels)
    if labels.is_floating_point() and labels.shape == logits.shape and logits.dim() == 2:
        known = ~labels.isnan().any(-1)
        losses = F.cross_entropy(
            upcast(logits),
            labels.to(working_dtype(logits)).masked_fill(~known[:, None], 0),
            reduction="none",
            label_smoothing=options.label_smoothing(logits.shape[-1]),
        )
        return step.mean(losses.where(known, 0).sum(), known.sum())
    if labels.shape != logits.shape[:-1]:
        raise _misfit(labels, logits)
    logits = logits[..., : _shared(step)]
    (logits,), mask, aligned, weights = _aligned(step, logits)
    assert aligned is not None
    known = aligned != IGNORED
    wrong = known & ((aligned < 0) | (aligned >= logits.shape[-1]))
    if values_readable(aligned) and bool(wrong.any()):
        raise _no_class(int(aligned[wrong][0]), logits.shape[-1], step)
    total = F.cross_entropy(
        upcast(logits).flatten(0, -2),
        aligned.flatten(),
        ignore_index=IGNORED,
        reduction="sum" if weights is None else "none",
        label_smoothing=options.label_smoothing(logits.shape[-1]) if options.label_spread else 0.0,
    )
    if weights is not None:
        total = (total * weights.to(total.dtype).where(known, 0).flatten()).sum()
    return step.mean(total, known.sum(), over_tokens=mask is not None)


def _decision_loss(step: Step, logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the yes or no of each label."""
    known = ~labels.isnan() & (labels != IGNORED)
    if labels.shape != logits.shape:
        raise _misfit(labels, logits)
    decisions = labels.to(working_dtype(logits)).masked_fill(~known, 0)
    total = F.binary_cross_entropy_with_logits(
        upcast(logits), decisions, known.to(decisions.dtype), reduction="sum"
    )
    return step.mean(total, known.sum())


def _list_loss(step: Step, lists: Lists, logits: Tensor, options: PredictionOptions) -> Tensor:
    """Loss on the lists' scores, or on their relevant documents where a list has no score."""
    scored = ~lists.any(lists.scores.isnan())
    known = lists.any(lists.relevant) | scored
    of_scores = lists.divergence(logits, lists.scores.nan_to_num(), options)
    losses = torch.where(scored, of_scores, lists.contrast(logits))
    return step.mean((losses * lists.weights).where(known, 0).sum(), (known * lists.weights).sum())


def _no_class(label: int, classes: int, step: Step) -> ValueError:
    what = "tokens of the vocabulary" if step.student_model.predicts_words else "classes"
    return ValueError(
        f"labels: {label} is none of the {classes} {what} of the student's head "
        f"({step.student_model.class_name}); pass 0 to {classes - 1}, or {IGNORED} for none"
    )


def _place_loss(step: Step, logits: Tensor, places: Tensor, spread: float) -> Tensor:
    """Cross-entropy of an answer's start or end (B,) over the real tokens.

    transformers includes padding, so that a row's loss depends on the longest row of the batch.
    """
    N, places = logits.shape[-1], places.flatten()
    # As in transformers: a position beyond the text doesn't count.
    places = places.clamp(0, N).masked_fill((places >= N) | (places == IGNORED), IGNORED)
    if places.shape != logits.shape[:-1]:
        raise _misfit(places, logits)
    _aligned(step, logits)  # refuses packed rows
    mask = torch.ones_like(logits, dtype=torch.bool) if step.token_mask is None else step.token_mask
    log_p = upcast(logits.masked_fill(~mask, FAR)).log_softmax(-1)  # (B, N)
    index = places.clamp(min=0)[:, None]
    known = (places != IGNORED) & mask.gather(1, index).squeeze(1)
    at_index = log_p.gather(1, index).squeeze(1)
    others = torch.where(mask, log_p, 0).sum(-1) - at_index
    losses = -(at_index + spread * others) / (1 + (mask.sum(-1).to(log_p.dtype) - 1) * spread)
    return step.mean(torch.where(known, losses, 0).sum(), known.sum())


def margin_loss(step: Step, by_labels: bool = False) -> Tensor:
    """Mean squared difference of margins from the teacher's scores, or those of the labels."""
    student: Any = logits_of(step, "student", "margin")
    lists = Lists.of(step.labels, student)
    if lists is None:
        raise ValueError(
            "MarginMSE compares scores within lists; pass labels (R, 3): the number of the list, "
            "relevance and score of each pair, and a head with one output"
        )
    if not by_labels:
        teacher: Any = logits_of(step, "teacher", "margin")
        return step.mean(*lists.margins(student, teacher))
    scored = ~lists.any(lists.scores.isnan())
    if values_readable(scored) and not bool(scored.any()):
        raise ValueError("MarginMSE: no list of the batch has scores; pass them, or alpha=1")
    lists = dataclasses.replace(lists, relevant=lists.relevant & scored)
    return step.mean(*lists.margins(student, lists.scores.nan_to_num()))


def soft_sums(step: Step, options: PredictionOptions) -> list[tuple[Tensor, Any, bool]]:
    """Of each place that is predicted the sum, the number of items, and whether they are tokens."""
    student, top_k = logits_of(step, "student", "soft"), step.teacher.top_k
    teacher = student if top_k is not None else logits_of(step, "teacher", "soft")
    spans = isinstance(student, tuple)
    vocabulary = step.teacher_model.vocabulary
    sums: list[tuple[Tensor, Any, bool]] = []
    two, n = isinstance(vocabulary, VocabularyMatch), _shared(step)
    for z_s, z_t in zip(
        student if isinstance(student, tuple) else (student,),
        teacher if isinstance(teacher, tuple) else (teacher,),
        strict=True,
    ):
        z_s, z_t = z_s[..., :n], z_t[..., :n]
        if z_t.shape != z_s.shape and not two:
            raise ValueError(
                f"student logits have shape {tuple(z_s.shape)} but the teacher's "
                f"{tuple(z_t.shape)}; both need the same labels or vocabulary"
            )
        z_t = z_t.to(z_s.dtype)
        problem = _problem(step, student if spans else z_s)
        lists = Lists.of(step.labels, z_s)
        if lists is not None:
            total = (lists.divergence(z_s, z_t, options) * lists.weights).sum()
            sums.append((total, lists.weights.sum(), False))
            continue
        if problem == REGRESSION:
            real = _real_numbers(step, z_s)
            errors = torch.where(real, upcast(z_s) - upcast(z_t), 0).square()
            sums.append((errors.sum(), real.sum(), False))
            continue
        (z_s, z_t), mask, _, weights = _aligned(step, z_s, z_t)
        if spans and step.token_mask is not None:
            z_s, z_t = (z.masked_fill(~step.token_mask, FAR) for z in (z_s, z_t))
        if problem == MULTI_LABEL:
            z_s, z_t = (torch.stack([z, 0 * z], -1) for z in (z_s, z_t))
        counted, paired = mask, None if step.spans is None else _paired(step)
        if paired is not None:
            counted = paired if mask is None else mask & paired
        total = soft_target_loss(
            z_s,
            z_t if top_k is None else _top_k(step),
            temperature=options.temperature,
            divergence=options.divergence,
            mask=counted,
            weights=weights,
            reduction="sum",
            scale_by_t2=options.scale_by_t2,
            vocabulary=vocabulary if two and top_k is None else None,
            unmatched=step.teacher_model.unmatched if top_k is None else "renormalise",
        )
        count = z_s.shape[:-1].numel() if mask is None else mask.sum()
        sums.append((total, count, mask is not None))
    return sums


def head_loss(
    step: Step, weights: Mapping[str, float], options: PredictionOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted sum of "task" and "soft" from hidden states and LM heads, in one pass.

    Also returns each term of ``weights``, unweighted and detached.
    """
    if "task" in weights and step.labels is None:
        raise ValueError(NO_LABELS)
    sums = []
    for part in step.parts():
        settings, arguments, count = _head_arguments(part, weights, options)
        loss, terms = apply(LinearSoftTargets, settings, None, *arguments)
        terms = [terms[LOSSES.index(name)].to(loss.dtype) for name in weights]
        sums.append((torch.stack([loss, *terms]), count))
    totals, count = (functools.reduce(operator.add, x) for x in zip(*sums, strict=True))
    # Copies: AOTAutograd fails to replay the views of one tensor that a graph returns.
    loss, *means = (x.clone() for x in step.mean(totals, count, over_tokens=True))
    return loss, {name: x.detach() for name, x in zip(weights, means, strict=True)}


def _head_arguments(
    step: Step, weights: Mapping[str, float], options: PredictionOptions
) -> tuple[LossOptions, list[Tensor | None], Any]:
    """Options and tensors of `LinearSoftTargets`, and the number of items.

    They are not checked as in `linear_soft_target_loss`: the Distiller was made for these models.
    """
    assert step.student.head_inputs is not None
    states, head = step.student.head_inputs.states, step.student.head_inputs.head
    vocabulary, V = _shared(step), len(head.weight)
    soft, taught, match = "soft" in weights, list[Tensor](), None
    teacher = step.teacher.head_inputs if soft and step.teacher.top_k is None else None
    if teacher is not None:
        taught, both = [teacher.states.to(states.dtype)], step.teacher_model.vocabulary
        match = both if isinstance(both, VocabularyMatch) else None
        _check_sizes(step, V, len(teacher.head.weight))
    (states, *taught), mask, labels, factors = _aligned(step, states, *taught)
    assert mask is not None
    if values_readable(mask) and mask.numel() and not bool(mask.any()):
        check.mask(mask, mask.shape, mask.device)  # warns
    count, soft_mask = mask.sum(), None if step.spans is None else _paired(step)
    counted: Tensor | None = mask
    labels = labels if "task" in weights else None
    if labels is not None:
        if labels.is_floating_point():
            check.integers("labels", labels)
        counted, labels = counted_labels(labels, vocabulary or V, mask, IGNORED)
    theirs, form, tail = list[Tensor | None](), HeadForm(), ""
    if teacher is not None:
        theirs, form = teacher.head.on(taught[0].flatten(0, -2)), teacher.head.form
    elif soft:
        top_k = _top_k(step, vocabulary or V, counted)
        theirs, tail = [*top_k.rows(counted)], top_k.tail
    ours = head.on(states.flatten(0, -2), counted)
    factors = None if factors is None else factors.to(working_dtype(states)).masked_fill(~mask, 0)
    soft_factors = factors
    if factors is not None and soft_mask is not None:
        soft_factors = factors.masked_fill(~soft_mask, 0)
    double = any(x is not None and x.dtype == torch.float64 for x in (*ours, *theirs))
    scale = options.temperature**2 if options.scale_by_t2 else 1.0
    soft_weight, task_weight = (float(weights.get(name, 0.0)) for name in LOSSES)
    form_of, coefficient = getattr(options.divergence, "form", (options.divergence, 0.0))
    settings = LossOptions(
        "sum",
        backend_of("auto", "linear_soft_target_loss", states.double() if double else states),
        len(ours),
        SoftTargetOptions(form_of, coefficient, float(options.temperature), scale, tail),
        CrossEntropyOptions(options.label_spread and options.label_smoothing(vocabulary or V), 0.0),
        soft_weight,
        task_weight,
        head.form,
        form,
        vocabulary=vocabulary or 0,
        chunk_bytes=CHUNK_BYTES[int(states.is_cuda)],
        terms="",
        narrow=not torch.compiler.is_compiling(),
        unmatched="" if match is None else step.teacher_model.unmatched,
    )
    task_factors = None if labels is None else factors
    places = Positions(labels, counted, soft_mask, soft_factors, task_factors).tensors()
    rows = (None if x is None else x.flatten() for x in places)
    columns = [None] * COLUMNS if match is None else match.columns(states.device)
    return settings, [*ours, *theirs, *rows, *columns], count


def _check_sizes(step: Step, student: int, teacher: int) -> None:
    """Raise unless the heads have the vocabularies for which the Distiller was made."""
    vocabulary = step.teacher_model.vocabulary
    if isinstance(vocabulary, VocabularyMatch):
        check_match("head", vocabulary, student, teacher)
    elif min(student, teacher) < (vocabulary or max(student, teacher)):
        head: Any = step.student.head_inputs
        check_vocabularies("head", vocabulary, head.head.weight, student, teacher)


def _top_k(step: Step, V: int = 0, mask: Tensor | None = None) -> TopK:
    """The teacher's most probable tokens at the positions that `_aligned` keeps, as student ids.

    Tokens that the student doesn't have are left to the tail. With a number of tokens ``V`` the ids
    are checked.
    """
    top_k = step.teacher.top_k
    assert top_k is not None
    if step.student_model.causal:
        top_k = top_k.map(lambda x: x[:, :-1])
    match = step.teacher_model.vocabulary
    if isinstance(match, VocabularyMatch):
        ids = match.to_student_ids(top_k.ids)
        log_probs = top_k.log_probs.masked_fill(ids < 0, -torch.inf)
        # Of as many tokens as the student has, nothing would be left to the tail.
        log_probs, order = log_probs.topk(min(ids.shape[-1], match.student_size - 1))
        top_k = TopK(ids.gather(-1, order).clamp(min=0), log_probs, top_k.tail)
    if V:
        top_k.check(top_k.ids.shape[:-1], V, top_k.ids.device, mask)
    return top_k


def _shared(step: Step) -> int | None:
    """Number of first tokens that both vocabularies share; None for all, or for two of them."""
    vocabulary = step.teacher_model.vocabulary
    return None if isinstance(vocabulary, VocabularyMatch) else vocabulary


def _paired(step: Step) -> Tensor | None:
    """Mask of the predictions compared with a teacher of another vocabulary, else None."""
    assert step.spans is not None
    places = step.spans.paired
    if places is None or not isinstance(step.teacher_model.vocabulary, VocabularyMatch):
        return None
    return (places[:, 1:] if step.student_model.causal else places) >= 0


def logits_of(step: Step, side: str, term: str) -> Logits:
    """The logits of the "student" or the "teacher" for a term."""
    outputs = step.student if side == "student" else step.teacher
    model: Model = step.student_model if side == "student" else step.teacher_model
    if outputs.head_inputs is not None:  # only one of the two models has head inputs
        return outputs.head_inputs.logits()
    if outputs.logits is None and {"logits", "start_logits"} & {*outputs.names}:
        raise ValueError(
            f"logit_terms: a term reads the {side}'s logits, which are kept only for terms "
            f"named there; add it to logit_terms, as {term} is"
        )
    if outputs.logits is None:
        given = ", ".join(outputs.names) or "a tuple"
        raise ValueError(
            f"the {term} term needs logits, but the {side} ({model.class_name}) "
            f"returns {given}; use a model with a head, or set the term's weight to 0"
        )
    logits, size = outputs.logits, model.output_size
    # Without `in`, which Dynamo doesn't evaluate for dynamic sizes.
    if (
        isinstance(logits, Tensor)
        and logits.dim() != 3
        and size is not None
        and size != (logits.shape[-1] if logits.dim() > 1 else 1)
    ):
        raise ValueError(
            f"the {term} term needs logits of {size} labels in the last dimension, but the "
            f"{side} ({model.class_name}) returns {tuple(logits.shape)}; set num_labels of its "
            "configuration"
        )
    return logits


def _problem(step: Step, logits: Logits) -> str | None:
    """REGRESSION, MULTI_LABEL (by the labels if the model doesn't say, as in transformers) or None.

    Raises for weights of tokens if the head predicts something else than classes.
    """
    problem, labels = step.student_model.problem, step.labels
    if problem is None and isinstance(labels, Tensor) and isinstance(logits, Tensor):
        decides = labels.is_floating_point() and labels.shape == logits.shape
        problem = MULTI_LABEL if decides else None
    problem = problem if problem in (REGRESSION, MULTI_LABEL) else None
    if step.loss_weights is not None and (problem or isinstance(logits, tuple)):
        raise ValueError(
            "loss_weights are factors of the losses on classes of tokens, and the head of "
            f"{step.student_model.class_name} predicts something else; leave them out"
        )
    return problem


def _aligned(
    step: Step, *predictions: Tensor
) -> tuple[list[Tensor], Tensor | None, Tensor | None, Tensor | None]:
    """Predictions, mask of those that count, labels and loss weights, aligned to each other.

    Sequence heads have predictions (B, V), and every row counts: the mask is None. Token heads have
    (B, N, V): a causal language model's position n predicts label n + 1 of the same document;
    padding and ignored labels don't count.
    """
    labels = step.labels if isinstance(step.labels, Tensor) else None
    first, model = predictions[0], step.student_model
    if first.dim() == 2:
        if step.document_ids is not None:
            raise ValueError(
                f"the head of {model.class_name} gives one prediction a row, but rows are "
                "packed with several documents; leave out the task and soft terms, or don't "
                "pack"
            )
        return [*predictions], None, labels, step.loss_weights
    if labels is not None and labels.shape != first.shape[:-1]:
        raise _misfit(labels, first)
    mask, weights = step.token_mask, step.loss_weights
    if mask is None:
        mask = torch.ones(first.shape[:-1], dtype=torch.bool, device=first.device)
    mask, labels = countable(labels, mask, step.document_ids, model.causal)
    if not model.causal:
        return [*predictions], mask, labels, weights
    weights = None if weights is None else weights[:, 1:]
    return [x[:, :-1] for x in predictions], mask, labels, weights


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


def _real_numbers(step: Step, logits: Tensor) -> Tensor:
    """Mask of a regression's numbers (B, ...), or (B, N, ...) of tokens, without padding."""
    mask = step.token_mask
    if mask is None or not step.student_model.per_token:
        return torch.ones_like(logits, dtype=torch.bool)
    return mask.view(*mask.shape, *[1] * (logits.dim() - 2)).expand_as(logits)


def _misfit(labels: Tensor, logits: Tensor) -> ValueError:
    return ValueError(
        f"labels have shape {tuple(labels.shape)} but the student's logits {tuple(logits.shape)}"
    )
