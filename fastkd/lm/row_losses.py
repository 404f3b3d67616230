"""Losses of rows of logits: divergence from a teacher, cross-entropy with labels."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastkd._core.fallback import in_chunks
from fastkd._core.numerics import values_readable
from fastkd.lm import reference
from fastkd.lm.matched_tokens import matched_rows
from fastkd.lm.reference import CrossEntropyOptions, SoftTargetOptions

# Logits of one chunk on the CPU: few enough that its buffers stay near the cache, and enough that
# threads don't wait for each other after every small operation.
CHUNK_LOGITS = 1 << 21


class Match(NamedTuple):
    """Two vocabularies: `fastkd.VocabularyMatch.columns`, and how unmatched tokens count."""

    columns: list[Tensor]
    unmatched: str


def divergence_in_place(
    student: Tensor,
    teacher: list[Tensor],
    soft: SoftTargetOptions,
    weight: float,
    runs_on: str,
    needs_grad: bool,
    mask: Tensor | None,
    weights: Tensor | None,
    log_mass: Tensor | None = None,
    teacher_rows: Tensor | None = None,
    terms: tuple[Tensor | None, Tensor] | None = None,
    match: Match | None = None,
) -> Tensor:
    """Divergences (R,) of logits in the working dtype, by any backend.

    If needed, their gradient times ``weight`` and weights (R,) overwrites ``student``. Kernels need
    the weights for it. Both are 0 where the mask (R,) is False. ``teacher`` and ``log_mass`` are
    those of `reference.soft_target_rows`. In C++ the teacher's logits may be (T, V), with
    ``teacher_rows`` (R,) of them, and ``terms`` be labels (R,) or None, and a tensor for the terms
    of `linear_soft_targets.TERMS` from "entropy" on. With a ``match`` of two vocabularies
    ``student`` is overwritten in Triton without a gradient, too.
    """
    if runs_on == "torch":
        pairs, unmatched = (None, "") if match is None else (_match_of(*match.columns), match[1])
        losses = functools.partial(
            reference_rows, soft=soft, match=pairs, unmatched=unmatched, stored=teacher[-1].dtype
        )
        factor = weight if weights is None else weights[:, None] * weight
        out = student if needs_grad else None
        return _by_reference(losses, student, out, factor, mask, log_mass, *teacher)
    if runs_on == "triton" and match is not None:
        divergence = functools.partial(
            divergence_in_place, soft=soft, weight=weight, runs_on=runs_on, needs_grad=needs_grad,
            mask=mask, weights=weights,
        )  # fmt: skip
        slope: Tensor | float | None = None  # factor of the sorted distance's gradient
        if needs_grad:
            slope = weight * soft.scale / soft.temperature
            slope = slope if weights is None else weights[:, None] * slope
            slope = slope if mask is None else mask[:, None] * slope
        value = matched_rows(divergence, student, teacher[0], *match, soft, slope)
        return value if mask is None else value.masked_fill(~mask, 0)
    if log_mass is not None and soft.form in ("forward_kl", "reverse_kl"):
        mass, call = log_mass.exp(), (student, teacher, soft, weight, runs_on, needs_grad, mask)
        if soft.form == "reverse_kl":
            kl = divergence_in_place(*call, weights, teacher_rows=teacher_rows)
            return kl - soft.scale * log_mass
        weights = mass if weights is None else mass * weights
        kl = divergence_in_place(*call, weights, teacher_rows=teacher_rows)
        return mass * kl + soft.scale * torch.xlogy(mass, mass)
    if runs_on == "cpp":
        if weights is not None and weight != 1:
            weights = weights * weight
        out, (labels, found) = student if needs_grad else None, terms or (None, None)
        arguments: dict[str, Any] = {} if match is None else match._asdict()
        arguments |= {"log_mass": log_mass, "teacher_rows": teacher_rows}
        arguments |= {"labels": labels, "terms": found}
        arguments = {name: x for name, x in arguments.items() if x is not None}
        loss = divergence_in_cpp(student, teacher, soft, out, mask, weights, **arguments)
    else:
        loss = _triton_in_place(
            student, teacher, soft, weight, mask, weights if needs_grad else None, log_mass
        )
    if log_mass is not None and soft.form == "total_variation":  # half of the other tokens' mass
        loss = loss - torch.expm1(log_mass) * (soft.scale / 2)
    return loss


def divergence_in_cpp(
    student: Tensor,
    teacher: Sequence[Tensor],
    soft: SoftTargetOptions,
    gradient: Tensor | None,
    mask: Tensor | None,
    weights: Tensor | None,
    *,
    columns: Sequence[Tensor] | None = None,
    **options: Any,
) -> Tensor:
    """Divergences (R,) in C++; the gradient times weights (R,) is written to ``gradient``.

    ``options`` are other arguments of the operator: with a ``reduction`` and a ``denominator`` it
    returns the weighted sum, and divides the gradient, too.
    """
    operators, out = torch.ops.fastkd_cpp, (gradient, mask, weights)
    options["divergence"], options["coefficient"] = soft.form, soft.coefficient
    options["temperature"], options["scale"] = soft.temperature, soft.scale
    loss: Tensor
    if soft.tail:
        bucket = soft.tail == "bucket"
        loss = operators.top_k_soft_targets(student, *teacher, *out, bucket=bucket, **options)
    elif columns is not None:
        loss = operators.matched_soft_targets(student, teacher[0], columns[0], *out, **options)
    else:
        loss = operators.soft_targets(student, teacher[0], *out, **options)
    return loss


def _triton_in_place(
    student: Tensor,
    teacher: list[Tensor],
    soft: SoftTargetOptions,
    weight: float,
    mask: Tensor | None,
    weights: Tensor | None,
    log_mass: Tensor | None,
) -> Tensor:
    """`divergence_in_place` in Triton, with the gradient if there are weights."""
    from fastkd.kernels import soft_targets as kernels
    from fastkd.kernels import soft_targets_top_k as of_top_k

    needs_grad, factor = weights is not None, soft.scale / soft.temperature * weight
    options = soft.form, soft.temperature, soft.scale, factor, soft.coefficient, needs_grad
    if not soft.tail:
        return kernels.soft_target_rows(student, teacher[0], mask, weights, log_mass, *options)
    ids, log_probs = teacher
    loss, *saved = of_top_k.top_k_forward(
        student, ids, log_probs, mask, None, None, "none", soft.tail, *options
    )
    if weights is not None:
        of_top_k.fill_top_k_gradient(
            student, student, ids, mask, saved, weights, soft.tail, soft.temperature
        )
    return loss


def reference_rows(
    student: Tensor,
    mask: Tensor | None,
    log_mass: Tensor | None,
    *teacher: Tensor,
    soft: SoftTargetOptions,
    match: list[Tensor] | None = None,
    unmatched: str = "",
    stored: torch.dtype = torch.float64,
) -> Tensor:
    """Divergences (R,), 0 where the mask (R,) is False, for `fastkd._core.fallback`."""
    targets = list(teacher)
    if mask is not None:
        student = student.where(mask[:, None], 0)
        targets = targets if soft.tail else [x.where(mask[:, None], 0) for x in targets]
    loss = reference.soft_target_rows(
        student, targets, soft, match=match, unmatched=unmatched, log_mass=log_mass, stored=stored
    )
    return loss if mask is None else loss.where(mask, 0)


def _match_of(teacher_of: Tensor, ours: Tensor, theirs: Tensor) -> list[Tensor]:
    """Matched and unmatched ids of student and teacher, without waiting for their number."""
    matched = (teacher_of < 0).argsort(stable=True)[: len(teacher_of) - len(ours)]
    return [matched, teacher_of[matched], ours, theirs]


def _by_reference(
    rows: Callable[..., Tensor],
    logits: Tensor,
    out: Tensor | None,
    factor: float | Tensor,
    *others: Tensor | None,
) -> Tensor:
    """Losses (R,) of logits; with ``out`` their gradient times a number or (R, 1) is stored."""
    entries = logits.shape[-1] + sum(x.shape[-1] for x in others if x is not None and x.dim() > 1)
    tensors, needs = [logits, *others], [out is not None, *[False] * len(others)]
    loss, _ = in_chunks(rows, entries, tensors, needs, [] if out is None else [out])
    if out is not None:
        out *= factor
    return loss


def row_chunks(logits: Tensor) -> list[slice]:
    """Slices of rows for one chunk each; a single slice on a GPU and in a graph."""
    if not values_readable(logits):
        return [slice(None)]
    rows, vocabulary = logits.shape
    step = max(CHUNK_LOGITS // vocabulary, 1)
    return [slice(start, start + step) for start in range(0, rows, step)]


def cross_entropy(
    runs_on: str,
    student: Tensor,
    labels: Tensor,
    task: CrossEntropyOptions,
    weights: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Cross-entropy (R,) of logits (R, V) with labels (R,).

    With ``out``, which may be ``student``, its gradient times weights (R,) is written there.
    """
    if runs_on == "torch":
        rows = functools.partial(reference.cross_entropy_rows, task=task)
        return _by_reference(
            rows, student, out, 1.0 if weights is None else weights[:, None], labels
        )
    options = task.label_smoothing, task.z_loss
    if runs_on == "cpp":
        loss: Tensor = torch.ops.fastkd_cpp.cross_entropy(student, labels, out, weights, *options)
        return loss
    from fastkd.kernels import cross_entropy as kernels

    return kernels.cross_entropy(student, labels, weights, out, *options)


def entropy_and_accuracy(student: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Entropy (R,), and 1 where the most probable token is the label; 0 without labels."""
    log_p = torch.log_softmax(student, -1)
    p = log_p.exp()
    entropy = -log_p.mul_(p).masked_fill_(p == 0, 0).sum(-1)
    correct = torch.zeros_like(entropy) if labels is None else student.argmax(-1) == labels
    return entropy, correct.to(entropy.dtype)


def log_mass_of(logits: Tensor, whole: Tensor, temperature: float, runs_on: str) -> Tensor:
    """Logarithm of the probability (R,) of the tokens of ``logits`` among those of ``whole``."""
    of_part, of_whole = (log_totals(x, temperature, runs_on) for x in (logits, whole))
    return of_part - of_whole


def log_totals(logits: Tensor, temperature: float, runs_on: str) -> Tensor:
    """log Σ exp(logits/τ) (R,) of logits (R, V)."""
    if runs_on == "cpp":
        totals: Tensor = torch.ops.fastkd_cpp.log_totals(logits, temperature)
        return totals
    if runs_on == "torch":
        return (logits / temperature).logsumexp(-1)
    from fastkd.kernels import cross_entropy as kernels

    return kernels.log_totals(logits, temperature)
