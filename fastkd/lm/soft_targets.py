"""Soft targets: divergence between the softened output distributions of teacher and student."""

import inspect
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import Tensor

from fastkd._core import check
from fastkd._core.dispatch import Backend, backend_of
from fastkd._core.module import LossModule
from fastkd._core.numerics import (
    apply,
    as_rows,
    autocast_off,
    dense_rows,
    empty,
    once_differentiable,
    save_for_backward,
    saveable,
    times_upstream,
    upcast,
    values_readable,
    working_dtype,
)
from fastkd._core.operator import operator
from fastkd._core.plans import planned
from fastkd.lm.divergences import DIVERGENCES, NAMES, Divergence, DivergenceWord
from fastkd.lm.heads import Head, as_head
from fastkd.lm.linear_soft_targets import (
    CHUNK_BYTES,
    MAIN_TERMS,
    TEACHER_TERMS,
    TERMS,
    HeadForm,
    LinearSoftTargets,
    LossOptions,
    Positions,
    divisor_of,
)
from fastkd.lm.reference import (
    CrossEntropyOptions,
    SoftTargetOptions,
    cross_entropy_rows,
    divergence_rows,
    soft_target_rows,
)
from fastkd.lm.row_losses import Match, divergence_in_cpp, divergence_in_place
from fastkd.lm.targets import (
    NO_DRAFT,
    CrossEntropy,
    Draft,
    ImportanceRatio,
    TopK,
    counted_labels,
)
from fastkd.lm.vocabulary_match import VocabularyMatch

if sys.version_info >= (3, 11):
    from typing import Unpack
else:
    Unpack = tuple  # for type checkers only

Reduction = Literal["batchmean", "sum", "none"]
Unmatched = Literal["renormalise", "bucket", "sorted"]
REDUCTIONS = get_args(Reduction)
UNMATCHED = get_args(Unmatched)


def soft_target_loss_ref(
    student_logits: Tensor,
    teacher_logits: Tensor | TopK,
    *,
    temperature: float = 1.0,
    divergence: DivergenceWord | Divergence = "forward_kl",
    mask: Tensor | None = None,
    reduction: Reduction = "batchmean",
    scale_by_t2: bool = True,
    denominator: float | Tensor | None = None,
    vocabulary: int | VocabularyMatch | None = None,
    unmatched: Unmatched = "renormalise",
    weights: Tensor | None = None,
) -> Tensor:
    """The divergences in plain PyTorch, as in the literature; see `soft_target_loss`."""
    if mask is None:
        mask = torch.ones(student_logits.shape[:-1], device=student_logits.device)
    real = mask.bool()[..., None]  # (..., 1)
    match, n = (vocabulary, None) if isinstance(vocabulary, VocabularyMatch) else (None, vocabulary)
    student = upcast(student_logits)[..., :n].where(real, 0)
    scale, pairs, tail, stored = temperature**2 if scale_by_t2 else 1.0, None, "", student.dtype
    if isinstance(teacher_logits, TopK):
        tail, stored = teacher_logits.tail, teacher_logits.log_probs.dtype
        K = teacher_logits.ids.shape[-1]
        log_probs = teacher_logits.log_probs.where(real, -math.log(2 * K))
        teacher = [teacher_logits.ids.long().where(real, 0), log_probs]
    else:
        teacher = [upcast(teacher_logits)[..., :n].where(real, 0)]
    if match is not None:
        order = match.student_ids.argsort()
        rest = match.columns(student.device)[1:]
        pairs = match.student_ids[order], match.teacher_ids[order], *rest
    soft = SoftTargetOptions(*_form_of(divergence), temperature, scale, tail)
    loss = soft_target_rows(student, teacher, soft, match=pairs, unmatched=unmatched, stored=stored)
    return _reduced_ref(
        _at_positions_ref(loss, weights, real[..., 0]), real, reduction, denominator
    )


def _form_of(divergence: DivergenceWord | Divergence) -> tuple[str, float]:
    return divergence.form if isinstance(divergence, Divergence) else (divergence, 0.0)


def _at_positions_ref(loss: Tensor, weights: Tensor | None, real: Tensor) -> Tensor:
    """Losses (...) times the weights of their positions; 0 where masked."""
    return (loss if weights is None else loss * weights.to(loss.dtype)).where(real, 0)


def _reduced_ref(
    loss: Tensor, real: Tensor, reduction: Reduction, denominator: float | Tensor | None
) -> Tensor:
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (real.sum().clamp(min=1) if denominator is None else denominator)


@planned
def soft_target_loss(
    student_logits: Tensor,
    teacher_logits: Tensor | TopK,
    *,
    temperature: float = 1.0,
    divergence: DivergenceWord | Divergence = "forward_kl",
    mask: Tensor | None = None,
    reduction: Reduction = "batchmean",
    scale_by_t2: bool = True,
    denominator: float | Tensor | None = None,
    vocabulary: int | VocabularyMatch | None = None,
    unmatched: Unmatched = "renormalise",
    weights: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Divergence between the softened output distributions of teacher and student.

    With p = softmax(z/τ) and KL(p ‖ q) = Σ p log(p/q) over the vocabulary:

    - ``"forward_kl"``: KL(p_t ‖ p_s)  (LRKD, eq. 1)
    - ``"reverse_kl"``: KL(p_s ‖ p_t)
    - ``"js"``: ½KL(p_t ‖ m) + ½KL(p_s ‖ m) with m = ½(p_s + p_t)
    - ``"adaptive_kl"``: w·KL(p_t ‖ p_s) + (1 − w)·KL(p_s ‖ p_t), w = g_head / (g_head + g_tail)
      (Wu et al. 2024, as in LRKD's Table 4). g sums the gaps |p_t − p_s| over the head and over
      the tail. The head is the teacher's most probable entries while their cumulative probability
      is at most ½: always the first entry, and of equal ones the lower index. w has no gradient.

    times τ² with ``scale_by_t2``. In Σ p log(p/q) an entry with p = 0 adds nothing, so entries may
    be masked with −inf in both logits.

    Args:
        student_logits: (..., V).
        teacher_logits: (..., V), same shape, dtype and device; must not require grad. Or a
            `fastkd.TopK` of the teacher's most probable tokens.
        temperature: τ > 0.
        divergence: one of the four above, or a `fastkd.Divergence` with its coefficient.
        mask: (...), bool or 0/1, 1 = real. Masked positions add nothing and get no gradient.
        reduction: "batchmean", the sum over the number of real positions; "sum"; or "none", one
            value for each position, 0 where masked.
        scale_by_t2: multiply by τ², which keeps the size of the gradient at all temperatures.
        denominator: a positive number, or a 0-d tensor of any real dtype and any device, that
            replaces this batch's number of positions as divisor (gradient accumulation); only with
            "batchmean". It doesn't change the dtype of the loss.
        vocabulary: n, if only the first n token ids of student and teacher have one meaning: all
            other ids, such as a head's padding, are removed from both distributions, and V may
            differ. Or a `fastkd.VocabularyMatch` of two vocabularies, V of the student and V' of
            the teacher: the outcomes compared then are the matched tokens, by ascending student id.
        unmatched: for a `VocabularyMatch`. "renormalise": p over the matched tokens alone.
            "bucket": p over the whole vocabulary, with all unmatched tokens as one more outcome. If
            student or teacher has no unmatched token, that outcome has probability 0 there, and
            KL can be infinite. "sorted": "bucket", plus Σ_k |s_k − t_k|, s and t the unmatched
            tokens' probabilities in descending order, the shorter padded with zeros (Boizard et al.
            2024; 0 if either has none).
        weights: (...), floating, any sign, without gradient: factors of the positions' losses. They
            don't change the divisor of "batchmean": a weight of 0 is not a mask, and an infinite
            loss times 0 is NaN.
        backend: "auto", "torch", "triton" or "cpp".

    Returns:
        Scalar, or (...) for "none", in float32 (float64 for float64). 0 without real positions.

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device or option, different vocabularies, or a
            teacher that requires grad.

    >>> student = torch.tensor([[0.0, 0.0]], requires_grad=True)
    >>> teacher = torch.tensor([[1.0, 3.0]]).log()
    >>> loss = soft_target_loss(student, teacher)
    >>> round(loss.item(), 4)  # ¼·log(½) + ¾·log(3/2)
    0.1308
    """
    match, n = _match_or_number(vocabulary, unmatched)
    student_logits, teacher = _cut_logits(student_logits, teacher_logits, match, n)
    form, coefficient = _check_options(temperature, divergence, reduction)
    leading, V = student_logits.shape[:-1], student_logits.shape[-1]
    if denominator is not None:
        denominator = _denominator(denominator, reduction, student_logits)
    if mask is not None:
        mask = check.mask(mask, leading, student_logits.device)
    if weights is not None:
        weights = check.weights(weights, leading, student_logits, mask)
    temperature *= 1.0  # a float, also in a plan, for which it is a parameter
    scale = temperature**2 if scale_by_t2 else 1.0
    tail, rows = "", []
    if isinstance(teacher, TopK):
        teacher.check(leading, V, student_logits.device, mask)
        tail, rows = teacher.tail, [saveable(x) for x in teacher.rows(mask)]
    else:
        rows = [as_rows(teacher)]
    if match is not None:
        rows += match.columns(student_logits.device)
    student = as_rows(student_logits)
    mask, weights = (None if x is None else x.flatten() for x in (mask, weights))
    runs_on = backend_of(backend, "soft_target_loss", student)
    soft = SoftTargetOptions(form, coefficient, temperature, scale, tail)
    options = _Options(soft, reduction, runs_on, "" if match is None else unmatched)
    function: type[torch.autograd.Function] = _SoftTargets
    if runs_on == "triton" and match is None:
        from fastkd.kernels.upstream import LossByKernel

        function = _TritonTopK if soft.tail else LossByKernel
    loss = apply(function, options, student, mask, denominator, weights, *rows)
    return loss.reshape(leading) if reduction == "none" else loss


def _match_or_number(
    vocabulary: int | VocabularyMatch | None, unmatched: str
) -> tuple[VocabularyMatch | None, int | None]:
    """The match of two vocabularies, or the number of tokens that they share."""
    check.choice("unmatched", unmatched, UNMATCHED)
    if not isinstance(vocabulary, VocabularyMatch):
        if unmatched != "renormalise":
            raise ValueError(
                f"unmatched={unmatched!r} needs a VocabularyMatch as vocabulary; pass one, or "
                "leave it out"
            )
        if not isinstance(vocabulary, int | None):
            raise TypeError(
                f"vocabulary must be an int or a VocabularyMatch, got {type(vocabulary).__name__}"
            )
        return None, vocabulary
    if unmatched == "renormalise" and not len(vocabulary.student_ids):
        raise ValueError(
            "vocabulary has no matched tokens, which unmatched='renormalise' compares; take "
            "'bucket' or 'sorted'"
        )
    return vocabulary, None


def _cut_logits(
    student: Tensor, teacher: Tensor | TopK, match: VocabularyMatch | None, n: int | None
) -> tuple[Tensor, Tensor | TopK]:
    """Student and teacher, checked, with the first ``n`` columns."""
    check.floating("student_logits", student)
    if isinstance(teacher, TopK):
        _check_no_match_of_top_k(match)
        check_vocabularies("logits", n, student)
        return student if n is None else student[..., :n], teacher
    check.floating("teacher_logits", teacher)
    check.like("teacher_logits", teacher, "student_logits", student)
    check.no_grad("teacher_logits", teacher)
    sizes = student.shape[-1], teacher.shape[-1]
    if match is not None:
        check_match("logits", match, *sizes)
        shape = (*student.shape[:-1], sizes[1])
        check.shape("teacher_logits", teacher, shape, "student_logits' positions, V'")
        return student, teacher
    check_vocabularies("logits", n, student, *sizes)
    if n is not None:  # a view of all columns would cost host time
        student, teacher = student[..., :n], teacher[..., :n]
    check.shape("teacher_logits", teacher, student.shape, "the shape of student_logits")
    return student, teacher


def _check_no_match_of_top_k(match: VocabularyMatch | None) -> None:
    if match is not None:
        raise ValueError(
            "vocabulary: a VocabularyMatch needs the teacher's whole distribution, which a TopK "
            "doesn't have; map the TopK's ids to the student's"
        )


def check_match(name: str, match: VocabularyMatch, student: int, teacher: int) -> None:
    """Raise unless the match has the vocabularies' sizes."""
    for side, size in (("student", student), ("teacher", teacher)):
        of_match = getattr(match, f"{side}_size")
        if size != of_match:
            raise ValueError(
                f"vocabulary has {side}_size {of_match} but {side}_{name} has {size} entries; pass "
                f"dataclasses.replace(vocabulary, {side}_size={size}) if its ids stay the same"
            )


def check_vocabularies(name: str, vocabulary: int | None, student: Tensor, *sizes: int) -> None:
    """Check the vocabulary's ``sizes`` of student and teacher, by default of the student alone."""
    of_student, *of_teacher = sizes or (student.shape[-1],)
    if vocabulary is not None:
        check.positive_int("vocabulary", vocabulary)
        least = min([of_student, *of_teacher])
        if vocabulary > least:
            raise ValueError(
                f"vocabulary must be at most {least}, the smaller vocabulary, got {vocabulary}"
            )
    elif of_teacher and of_teacher != [of_student]:
        raise ValueError(
            f"student_{name} has a vocabulary of {of_student} entries but teacher_{name} of "
            f"{of_teacher[0]}; if their first n token ids are the same, pass vocabulary=n"
        )
    if of_student == 0:
        raise ValueError(f"student_{name} must have vocabulary entries, got {tuple(student.shape)}")


def _check_options(
    temperature: float, divergence: DivergenceWord | Divergence, reduction: str
) -> tuple[str, float]:
    """Check the options; returns the divergence's `Divergence.form`."""
    check.number("temperature", temperature, above=0)
    check.choice("reduction", reduction, REDUCTIONS)
    if isinstance(divergence, Divergence):
        return divergence.form
    if divergence in NAMES and divergence not in DIVERGENCES:
        raise ValueError(f"divergence={divergence!r} is no word; pass Divergence({divergence!r})")
    check.choice("divergence", divergence, DIVERGENCES)
    return divergence, 0.0


def _denominator(denominator: float | Tensor | None, reduction: str, like: Tensor) -> Tensor | None:
    """The denominator, checked, as a 0-d tensor of the device and working dtype of ``like``.

    It doesn't synchronise: a number is an argument of the kernel's launch.
    """
    if denominator is None:
        return None
    if reduction != "batchmean":
        raise ValueError(f"denominator needs reduction='batchmean', got {reduction!r}")
    if isinstance(denominator, Tensor):
        if denominator.dim() != 0:
            raise ValueError(
                f"denominator must be a number or a 0-d tensor, got {tuple(denominator.shape)}"
            )
        if denominator.dtype == torch.bool or denominator.is_complex():
            raise TypeError(f"denominator must be a real number, got {denominator.dtype}")
        check.no_grad("denominator", denominator)
        if not values_readable(denominator):
            if denominator.device.type == "meta" != like.device.type:
                raise ValueError(
                    "denominator is on meta and has no value; pass it on a real device"
                )
            return denominator.to(like.device, working_dtype(like), non_blocking=True)
        denominator = denominator.item()
    check.number("denominator", denominator, above=0)
    if not isinstance(denominator, float):  # a float may be a plan's parameter, and stays as it is
        denominator = float(denominator)
    # Not torch.full, for which the compiler makes a graph for every number.
    return torch.ones((), dtype=working_dtype(like), device=like.device) * denominator


@dataclass(frozen=True)
class _Options:
    soft: SoftTargetOptions
    reduction: str
    runs_on: str
    unmatched: str  # of a `VocabularyMatch`; "" for one vocabulary
    stacked = False

    def triton(
        self, tensors: Sequence[Any], upstream: Tensor | None, needs: Sequence[bool]
    ) -> list[Tensor]:
        """Of one vocabulary's logits; see `LossByKernel`."""
        from fastkd.kernels.soft_targets import soft_targets

        _, mask, denominator, weights, _ = tensors
        student, teacher = dense_rows(tensors[0], tensors[-1])
        arguments = student, teacher, mask, weights, denominator, upstream
        return soft_targets(*arguments, self.reduction, *self.soft.per_row, needs[0])


class _SoftTargets(torch.autograd.Function):
    """Loss and gradient in one pass over the logits; in Triton those of two vocabularies."""

    @staticmethod
    def forward(ctx, options, student, mask, denominator, weights, *teacher):
        # student (R, V), mask and weights (R,); the teacher's logits (R, V), or its ids and
        # log_probs (R, K), or its logits (R, V') and `VocabularyMatch.columns`
        ctx.dtype, ctx.teachers = student.dtype, len(teacher)
        ctx.by_rows, needs_grad = options.reduction == "none", ctx.needs_input_grad[1]
        dtype, dstudent = working_dtype(student), None
        targets = list(teacher[:1] if options.unmatched else teacher)
        columns = list(teacher[len(targets) :])
        if options.runs_on == "cpp":
            if needs_grad:
                dstudent = empty(student.shape, dtype, student.device)
            student, *targets = dense_rows(student, *targets)
            call = student, targets, options.soft, dstudent, mask, weights
            match: dict[str, Any] = {}
            if columns:
                match = {"columns": columns, "unmatched": options.unmatched}
            reduction = options.reduction
            loss = divergence_in_cpp(*call, reduction=reduction, denominator=denominator, **match)
            if ctx.by_rows and weights is not None:
                loss = loss * weights
        else:
            divisor = divisor_of(student, mask, options.reduction, denominator)
            factors = None  # of the rows' gradients
            if needs_grad:
                factors = torch.ones(len(student), dtype=dtype, device=student.device) / divisor
                factors = factors if weights is None else factors * weights
            arguments = student, targets, mask, factors, columns, options.unmatched
            loss, *gradient = soft_targets_of_rows(*arguments, options.soft, options.runs_on)
            dstudent = gradient[0] if needs_grad else None
            loss = loss if weights is None else loss * weights
            loss = loss if ctx.by_rows else loss.sum() / divisor
        ctx.save_for_backward(dstudent, None if mask is None or not ctx.by_rows else saveable(mask))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        dstudent, mask = ctx.saved_tensors
        if ctx.by_rows:
            grad = (grad if mask is None else grad.masked_fill(~mask, 0))[:, None]
        dstudent = times_upstream(dstudent, grad, ctx.dtype)
        return None, dstudent, None, None, None, *[None] * ctx.teachers


def _shapes(student, teacher, mask, weights, columns, *options):
    rows = student.new_empty(student.shape[0], dtype=working_dtype(student))
    if weights is None:
        return [rows]
    return [rows, student.new_empty(student.shape, dtype=working_dtype(student))]


@operator(_shapes)
def soft_targets_of_rows(
    student: Tensor,
    teacher: list[Tensor],
    mask: Tensor | None,
    weights: Tensor | None,
    columns: list[Tensor],
    unmatched: str,
    soft: SoftTargetOptions,
    runs_on: str,
) -> list[Tensor]:
    """Values (R,) of logits (R, V) and, with weights (R,), the weighted gradient.

    Both are in the working dtype, and 0 where masked. ``teacher`` and ``columns`` are those of
    `divergence_in_place`.
    """
    own = student
    if runs_on == "triton" and mask is not None:  # masked logits may be NaN
        own, *teacher = (x.masked_fill(~mask[:, None], 0) for x in (student, *teacher))
    if runs_on == "triton" or weights is not None:  # overwritten, by a kernel row after row
        dense = torch.contiguous_format
        own = own.to(working_dtype(student), copy=own is student, memory_format=dense)
    match = Match(columns, unmatched) if columns else None
    options = soft, 1.0, runs_on, weights is not None, mask, weights
    with autocast_off(student):
        values = divergence_in_place(own, teacher, *options, match=match)
    return [values] if weights is None else [values, own]


class _TritonTopK(torch.autograd.Function):
    """Loss and the outcomes' gradient by kernels, and another that spreads it over the tokens."""

    @staticmethod
    def forward(ctx, options, student, mask, denominator, weights, ids, log_probs):
        from fastkd.kernels.soft_targets_top_k import top_k_forward

        student, ids = dense_rows(student, ids)
        soft, needs_grad = options.soft, ctx.needs_input_grad[1]
        ctx.kernel_options = soft.tail, soft.temperature
        arguments = student, ids, log_probs, mask, weights, denominator
        factors = soft.scale, soft.scale / soft.temperature, soft.coefficient
        row = soft.tail, soft.form, soft.temperature, *factors
        loss, *saved = top_k_forward(*arguments, options.reduction, *row, needs_grad)
        save_for_backward(ctx, student, ids, mask, *saved)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        from fastkd.kernels.soft_targets_top_k import top_k_backward

        student, ids, mask, *saved = ctx.saved_tensors
        dstudent = top_k_backward(student, ids, mask, saved, grad, *ctx.kernel_options)
        return None, dstudent, None, None, None, None, None


def linear_soft_target_loss_ref(
    student_hidden: Tensor,
    student_head: Tensor | Head,
    teacher_hidden: Tensor | TopK,
    teacher_head: Tensor | Head | None = None,
    *,
    soft_weight: float = 1.0,
    task: CrossEntropy | None = None,
    draft: Draft | None = None,
    ratio: ImportanceRatio | None = None,
    return_terms: bool | Sequence[str] = False,
    **options: Any,
) -> Any:
    """`soft_target_loss_ref` and cross-entropy of full logits; see `linear_soft_target_loss`."""
    draft = draft or NO_DRAFT
    rows, drafts, soft_mask = draft.rows, draft.vocabulary, draft.soft_mask
    student = as_head("student_head", student_head).logits(student_hidden)
    teacher: Any = teacher_hidden
    if not isinstance(teacher, TopK):
        teacher = as_head("teacher_head", teacher_head).logits(teacher)
    if rows is not None:
        teacher = teacher.flatten(0, -2)[rows]
    if drafts is not None and draft.mass == "renormalised":
        teacher = teacher[..., drafts]
    mask = options.pop("mask", None)
    if mask is None:
        mask = torch.ones(student.shape[:-1], device=student.device)
    mask = mask.bool()
    if task is not None:
        mask = mask & (task.labels.long() != task.ignore_index)
    reduction, denominator = options.pop("reduction", "batchmean"), options.pop("denominator", None)
    names = _names_of_terms(return_terms)
    match, V = _match_or_number(options.get("vocabulary"), options.get("unmatched", "renormalise"))
    logits = upcast(student)[..., :V].where(mask[..., None], 0)
    labels = None if task is None else task.labels.long().where(mask, 0)
    if drafts is not None and draft.mass == "whole":
        soft_rows = _whole_mass_ref(logits, upcast(teacher), drafts, mask, **options)
    else:
        soft_rows = soft_target_loss_ref(student, teacher, mask=mask, reduction="none", **options)
    taught = mask if soft_mask is None else mask & soft_mask.bool()
    soft_rows = soft_rows if ratio is None else soft_rows * _ratio_ref(logits, ratio, mask)
    soft_rows = soft_rows.where(taught, 0)
    task_rows, *rest = _task_ref(logits, mask, task)
    task_rows = _at_positions_ref(task_rows, task.weights if task else None, mask)
    found = dict(zip(MAIN_TERMS, (soft_rows, task_rows, *rest), strict=True))
    if set(names) - set(MAIN_TERMS):
        of_teacher = None if isinstance(teacher, TopK) else upcast(teacher)
        whole_of = drafts if draft.mass == "whole" else None
        found |= _terms_ref(logits, of_teacher, whole_of, labels, mask, match, V)
        found |= {x: found[x].where(taught, 0) for x in TEACHER_TERMS if x in found}
    found = {
        name: _reduced_ref(x.where(mask, 0), mask, reduction, denominator)
        for name, x in found.items()
    }
    loss = soft_weight * found["soft"]
    if task is not None:
        loss = loss + task.weight * found["task"]
    return (loss, {name: found[name].detach() for name in names}) if names else loss


def _ratio_ref(logits: Tensor, ratio: ImportanceRatio, mask: Tensor) -> Tensor:
    ids = ratio.ids.long().where(mask, 0)
    log_q = logits.detach().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return (log_q - ratio.old_log_probs.where(mask, 0)).exp().clamp(max=ratio.at_most)


def _whole_mass_ref(
    student: Tensor,
    teacher: Tensor,
    ids: Tensor,
    mask: Tensor,
    temperature: float = 1.0,
    divergence: DivergenceWord | Divergence = "forward_kl",
    scale_by_t2: bool = True,
    weights: Tensor | None = None,
) -> Tensor:
    """Losses of positions: the teacher's probabilities of its whole vocabulary, at ``ids``."""
    log_pt = (teacher.where(mask[..., None], 0) / temperature).log_softmax(-1)[..., ids]
    log_ps = (student / temperature).log_softmax(-1)
    name = divergence.name if isinstance(divergence, Divergence) else divergence
    loss = divergence_rows(log_ps, log_pt, *_form_of(divergence))
    if name == "total_variation":
        loss = loss + (1 - log_pt.exp().sum(-1)) / 2
    return _at_positions_ref(loss * (temperature**2 if scale_by_t2 else 1.0), weights, mask)


def _terms_ref(
    student: Tensor,
    teacher: Tensor | None,
    ids: Tensor | None,
    labels: Tensor | None,
    mask: Tensor,
    match: VocabularyMatch | None,
    V: int | None,
) -> dict[str, Tensor]:
    """The terms that compare teacher and student at temperature 1, for each position."""

    def at_labels(log_p: Tensor) -> Tensor:
        if labels is None:
            return torch.zeros_like(log_p[..., 0])
        return log_p.gather(-1, labels[..., None])[..., 0]

    log_ps = student.log_softmax(-1)
    found = {"log_prob": at_labels(log_ps)}
    if teacher is not None:
        log_pt = teacher[..., :V].where(mask[..., None], 0).log_softmax(-1)
        entropy = -(log_pt.exp() * log_pt.masked_fill(log_pt == -torch.inf, 0)).sum(-1)
        found["teacher_entropy"] = entropy
        if match is not None:
            return found
        log_pt = log_pt if ids is None else log_pt[..., ids]
        distance = (log_pt.exp() - log_ps.exp()).abs().sum(-1) + 1 - log_pt.exp().sum(-1)
        found |= {"teacher_log_prob": at_labels(log_pt), "total_variation": distance / 2}
    return found


def _task_ref(logits: Tensor, mask: Tensor, task: CrossEntropy | None) -> tuple[Tensor, ...]:
    """Cross-entropy, entropy and accuracy of each position."""
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(-1)
    if task is None:
        return torch.zeros_like(entropy), entropy, torch.zeros_like(entropy)
    labels = task.labels.long().where(mask, 0)[..., None]
    options = CrossEntropyOptions(task.label_smoothing, task.z_loss)
    loss = cross_entropy_rows(logits, labels[..., 0], options)
    return loss, entropy, (logits.argmax(-1) == labels[..., 0]).to(loss.dtype)


class SoftTargetKeywords(TypedDict, total=False):
    """Options that `linear_soft_target_loss` shares with `soft_target_loss`."""

    temperature: float
    divergence: DivergenceWord | Divergence
    mask: Tensor | None
    reduction: Reduction
    scale_by_t2: bool
    denominator: float | Tensor | None
    vocabulary: int | VocabularyMatch | None
    unmatched: Unmatched
    weights: Tensor | None


_DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(soft_target_loss).parameters.items()
    if name in SoftTargetKeywords.__annotations__
}
# Former options, which `Draft` has.
_MOVED = {
    "draft_vocabulary": "vocabulary", "teacher_mass": "mass", "soft_mask": "soft_mask",
    "rows": "rows",
}  # fmt: skip


def _shared_options(options: dict[str, Any]) -> dict[str, Any]:
    """The values of `SoftTargetKeywords`, with the defaults of `soft_target_loss`."""
    for name in options:
        if name in _MOVED:
            raise TypeError(
                f"{name} is {_MOVED[name]} of a Draft; pass draft=fastkd.Draft({_MOVED[name]}=...)"
            )
        if name not in _DEFAULTS:
            raise TypeError(
                f"linear_soft_target_loss() got an unexpected keyword argument {name!r}"
            )
    return _DEFAULTS | options


def linear_soft_target_loss(
    student_hidden: Tensor,
    student_head: Tensor | Head,
    teacher_hidden: Tensor | TopK,
    teacher_head: Tensor | Head | None = None,
    *,
    soft_weight: float = 1.0,
    task: CrossEntropy | None = None,
    draft: Draft | None = None,
    ratio: ImportanceRatio | None = None,
    return_terms: bool | Sequence[str] = False,
    chunk_bytes: int | None = None,
    backend: Backend = "auto",
    **options: Unpack[SoftTargetKeywords],
) -> Any:
    """`soft_target_loss` from hidden states and LM heads, without the full logits.

    Equals soft_target_loss(H_s W_sᵀ, H_t W_tᵀ, ...), computed for a few positions at a time, so
    that (positions, V) logits are never in memory. With a task it is
    ``soft_weight``·soft + ``task.weight``·cross-entropy of the same logits, with one gradient,
    computed in the forward pass. Logits are float32 (float64 for float64).

    Args:
        student_hidden: (..., Ds), the input of the student's head.
        student_head: the weight (V, Ds) of the student's LM head, or a `fastkd.Head`; any floating
            dtype.
        teacher_hidden: (..., Dt), the same leading dimensions and dtype; must not require grad. Or
            a `fastkd.TopK`, without ``teacher_head``.
        teacher_head: weight (V, Dt) or `fastkd.Head` of the same vocabulary, any floating dtype;
            must not require grad. If both models share a head, pass it here with ``.detach()``.
        soft_weight: of the soft targets, at least 0. At 0 the teacher's logits are computed only
            for terms.
        task: a `fastkd.CrossEntropy`. Positions left out by the mask or by ``ignore_index`` count
            in neither term.
        draft: a `fastkd.Draft`: the student's tokens, positions or soft targets are a part of the
            teacher's.
        ratio: a `fastkd.ImportanceRatio`, whose ratios multiply the positions' soft targets.
        return_terms: also return terms: True for the first four below, or names of those to
            compute.
        chunk_bytes: of logits in memory at a time, by default 64 MiB on the CPU and 2 GiB on a GPU.
            The result depends on it only by rounding error.
        backend: as in `soft_target_loss`. The labels' cross-entropy has kernels in C++ and runs in
            PyTorch under "triton".
        options: ``temperature``, ``divergence``, ``mask``, ``reduction``, ``scale_by_t2``,
            ``denominator``, ``vocabulary``, ``unmatched`` and ``weights`` of `soft_target_loss`.
            Mask and weights are over the leading dimensions; the weights are the soft targets',
            `CrossEntropy.weights` the labels'. Labels and terms of the student are over its whole
            vocabulary with a `fastkd.VocabularyMatch`.

    Returns:
        As `soft_target_loss`, with gradients to ``student_hidden`` and the tensors of the student's
        head. With ``return_terms`` also a dictionary of detached terms, reduced like the loss:
        "soft", "task", the student's "entropy" at temperature 1, and the "accuracy" of its most
        probable tokens. By name also, at temperature 1, the "total_variation" between teacher and
        student, the "teacher_entropy", and "log_prob" and "teacher_log_prob" of the labels. Terms
        of labels are 0 without a task.

    Raises:
        ValueError, TypeError: as `soft_target_loss`.

    >>> hidden, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(10, 4)
    >>> teacher = torch.randn(2, 3, 8), Head(torch.randn(10, 8), torch.zeros(10))
    >>> labels = torch.randint(10, (2, 3))
    >>> linear_soft_target_loss(hidden, weight, *teacher, task=CrossEntropy(labels)).shape
    torch.Size([])
    """
    shared = _shared_options(dict(options))
    _check_arguments(task, draft, ratio)
    draft, reduction = draft or NO_DRAFT, shared["reduction"]
    student = as_head("student_head", student_head)
    match, n = _match_or_number(shared["vocabulary"], shared["unmatched"])
    if draft.vocabulary is not None:
        if isinstance(teacher_hidden, TopK):
            raise ValueError("draft.vocabulary: a TopK has no head; leave it out, and map its ids")
        teacher_head = draft.head(student, teacher_head, shared["vocabulary"])
    whole = draft.vocabulary if draft.mass == "whole" else None
    teacher = _teacher(student_hidden, student, teacher_hidden, teacher_head, match, n, draft)
    form, coefficient = _check_options(shared["temperature"], shared["divergence"], reduction)
    denominator = _denominator(shared["denominator"], reduction, student_hidden)
    check.number("soft_weight", soft_weight, at_least=0)
    draft.check_divergence(form)
    names = _names_of_terms(return_terms, teacher, match)
    leading, V = student_hidden.shape[:-1], n or student.weight.shape[0]
    mask, labels = check.mask(shared["mask"], leading, student_hidden.device), None
    if task is not None:
        check.labels("labels", task.labels, tuple(leading), student_hidden.device)
        mask, labels = counted_labels(task.labels, V, mask, task.ignore_index)
    teacher_tensors: list[Tensor | None] = []
    teacher_form, tail = HeadForm(), ""
    if isinstance(teacher, TopK):
        teacher.check(leading, V, student_hidden.device, mask)
    if soft_weight or {"soft", *TEACHER_TERMS} & set(names):
        if isinstance(teacher, TopK):
            teacher_tensors, tail = [*teacher.rows(mask)], teacher.tail
        elif isinstance(teacher_hidden, Tensor):
            teacher_tensors, teacher_form = teacher.on(as_rows(teacher_hidden)), teacher.form
    student_tensors = student.on(as_rows(student_hidden), mask)
    temperature = float(shared["temperature"])
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES[int(student_hidden.is_cuda)]
    check.positive_int("chunk_bytes", chunk_bytes)
    tensors = *student_tensors, *teacher_tensors
    double = any(x is not None and x.dtype == torch.float64 for x in tensors)
    wider = student_hidden.double() if double else student_hidden
    smoothing, z_loss = (task.label_smoothing, task.z_loss) if task else (0.0, 0.0)
    scale = temperature**2 if shared["scale_by_t2"] else 1.0
    settings = LossOptions(
        reduction,
        backend_of(backend, "linear_soft_target_loss", wider),
        len(student_tensors),
        SoftTargetOptions(form, coefficient, temperature, scale, tail),
        CrossEntropyOptions(float(smoothing), float(z_loss)),
        soft_weight=float(soft_weight),
        task_weight=float(task.weight) if task else 0.0,
        student=student.form,
        teacher=teacher_form,
        vocabulary=n or 0,
        chunk_bytes=chunk_bytes,
        terms=" ".join(name for name in names if name not in ("soft", "task")),
        narrow=not torch.compiler.is_compiling(),
        largest_ratio=float(ratio.at_most) if ratio else 0.0,
        unmatched="" if match is None else shared["unmatched"],
    )
    of_loss = shared["weights"], task.weights if task else None
    positions = _positions(student_hidden, teacher_hidden, V, mask, labels, of_loss, draft, ratio)
    columns: Sequence[Tensor | None] = [None if whole is None else saveable(whole), None, None]
    columns = columns if match is None else match.columns(student_hidden.device)
    arguments = *tensors, *positions.tensors(), *columns
    loss, terms = apply(LinearSoftTargets, settings, denominator, *arguments)
    if reduction == "none":
        loss, terms = loss.reshape(leading), terms.reshape(len(terms), *leading)
    return (loss, {name: terms[TERMS.index(name)] for name in names}) if names else loss


def _check_arguments(
    task: CrossEntropy | None, draft: Draft | None, ratio: ImportanceRatio | None
) -> None:
    for name, x, kind in (
        ("task", task, CrossEntropy),
        ("draft", draft, Draft),
        ("ratio", ratio, ImportanceRatio),
    ):
        if x is not None and not isinstance(x, kind):
            article = "an" if kind is ImportanceRatio else "a"
            raise TypeError(f"{name} must be {article} {kind.__name__}, got {type(x).__name__}")


def _positions(
    student_hidden: Tensor,
    teacher_hidden: Tensor | TopK,
    V: int,
    mask: Tensor | None,
    labels: Tensor | None,
    weights: tuple[Tensor | None, Tensor | None],
    draft: Draft,
    ratio: ImportanceRatio | None,
) -> Positions:
    """Checked tensors of the positions; ``weights`` of the soft targets and of the labels."""
    leading, device = student_hidden.shape[:-1], student_hidden.device
    soft_mask = check.mask(
        draft.soft_mask, leading, device, "draft.soft_mask", "student_hidden", False
    )
    taught = mask if soft_mask is None else soft_mask if mask is None else mask & soft_mask
    soft_weights, task_weights = (
        check.weights(x, leading, student_hidden, counts, of="student_hidden")
        for x, counts in zip(weights, (taught, mask), strict=True)
    )
    ratios = (None, None) if ratio is None else ratio.rows(V, leading, student_hidden, taught)
    rows = draft.rows
    if rows is not None and mask is not None:
        rows = rows.masked_fill(~mask, 0)
    if rows is not None and isinstance(teacher_hidden, Tensor):
        check.ids_below("draft.rows", rows, as_rows(teacher_hidden).shape[0], "the teacher's rows")
    tensors = labels, mask, soft_mask, soft_weights, task_weights, rows, *ratios
    return Positions(*(None if x is None else saveable(x.flatten()) for x in tensors))


def _names_of_terms(
    return_terms: bool | Sequence[str],
    teacher: Head | TopK | None = None,
    match: VocabularyMatch | None = None,
) -> tuple[str, ...]:
    """Names of the terms; raises for terms that the teacher or a match doesn't have."""
    if isinstance(return_terms, bool):
        return MAIN_TERMS if return_terms else ()
    if isinstance(return_terms, str) or not isinstance(return_terms, Sequence):
        found = check.shown(return_terms)
        raise TypeError(f"return_terms must be a bool or a list of names, got {found}")
    for name in return_terms:
        check.choice("return_terms", name, TERMS)
    of_teacher = set(return_terms) & set(TEACHER_TERMS)
    if isinstance(teacher, TopK) and of_teacher:
        raise ValueError(
            f"return_terms: {min(of_teacher)!r} needs the teacher's whole distribution, which a "
            "TopK doesn't have; leave it out"
        )
    if match is not None and of_teacher - {"teacher_entropy"}:
        raise ValueError(
            f"return_terms: {max(of_teacher)!r} compares tokens of one vocabulary, and there are "
            "two; leave it out"
        )
    return tuple(return_terms)


def _teacher(
    student_hidden: Tensor,
    student: Head,
    teacher_hidden: Tensor | TopK,
    teacher_head: Tensor | Head | None,
    match: VocabularyMatch | None,
    n: int | None,
    draft: Draft,
) -> Head | TopK:
    """The teacher's head, or its `TopK`. Checks all inputs except the ids of a `TopK`."""
    check.floating("student_hidden", student_hidden)
    V, D = student.weight.shape
    check.device("student_head", student.weight, "student_hidden", student_hidden)
    if student_hidden.shape[-1] != D:
        shape = (V, student_hidden.shape[-1])
        check.shape("student_head", student.weight, shape, "the vocabulary, Ds")
    if isinstance(teacher_hidden, TopK):
        if teacher_head is not None:
            raise ValueError("teacher_head: a TopK has no hidden states and no head; leave it out")
        if draft.rows is not None:
            raise ValueError("draft.rows: a TopK has no hidden states; index its ids and log_probs")
        _check_no_match_of_top_k(match)
        check_vocabularies("head", n, student.weight, V)
        return teacher_hidden
    if teacher_head is None:
        raise TypeError("teacher_head must be a Tensor or Head, got None")
    teacher = as_head("teacher_head", teacher_head)
    check.floating("teacher_hidden", teacher_hidden)
    check.device("teacher_hidden", teacher_hidden, "student_hidden", student_hidden)
    check.device("teacher_head", teacher.weight, "student_hidden", student_hidden)
    check.like("teacher_hidden", teacher_hidden, "student_hidden", student_hidden)
    check.no_grad("teacher_hidden", teacher_hidden)
    for x in teacher.tensors:
        check.no_grad("teacher_head", x)
    if match is not None:
        check_match("head", match, V, teacher.weight.shape[0])
    elif draft.vocabulary is None or draft.mass != "whole":
        check_vocabularies("head", n, student.weight, V, teacher.weight.shape[0])
    leading, Dt = student_hidden.shape[:-1], teacher.weight.shape[1]
    shape, meaning = (*leading, Dt), "student_hidden's positions, Dt"
    if draft.rows is not None:
        shape, meaning = (*teacher_hidden.shape[:-1], Dt), "the teacher's rows, Dt"
        draft.check_rows(leading, student_hidden)
    check.shape("teacher_hidden", teacher_hidden, shape, meaning)
    return teacher


@dataclass(eq=False, repr=False)
class SoftTargetLoss(LossModule):
    """See `soft_target_loss`; stores its options.

    >>> loss = SoftTargetLoss(temperature=2.0, divergence="js")
    >>> loss(torch.zeros(2, 5), torch.zeros(2, 5)).item()
    0.0
    """

    temperature: float = 1.0
    divergence: DivergenceWord | Divergence = "forward_kl"
    reduction: Reduction = "batchmean"
    scale_by_t2: bool = True
    backend: Backend = "auto"

    def check_options(self) -> None:
        super().check_options()
        _check_options(self.temperature, self.divergence, self.reduction)

    def forward(
        self,
        student_logits: Tensor,
        teacher_logits: Tensor | TopK,
        mask: Tensor | None = None,
        denominator: float | Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """The loss; ``denominator`` and ``weights`` as in `soft_target_loss`."""
        options: dict[str, Any] = {"mask": mask, "denominator": denominator, "weights": weights}
        names = "temperature", "divergence", "reduction", "scale_by_t2", "backend"
        return soft_target_loss(student_logits, teacher_logits, **options, **self.options(*names))
