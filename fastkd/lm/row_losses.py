"""Losses of rows of logits: divergence from a teacher, cross-entropy with labels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastkd._core.numerics import autocast_off, upcast, values_readable, working_dtype
from fastkd.lm.divergences import row_divergence

# Logits of one chunk on the CPU: few enough that its buffers stay near the cache, and enough that
# threads don't wait for each other after every small operation.
CHUNK_LOGITS = 1 << 21


@dataclass(frozen=True)
class SoftTargetOptions:
    """Options of the divergence of a row."""

    form: str  # Divergence.form
    coefficient: float
    temperature: float
    scale: float  # τ² or 1
    tail: str = ""  # `fastkd.lm.targets.TopK.tail`; "" for a teacher of logits

    @property
    def per_row(self) -> tuple[str, float, float, float]:
        """Options that the kernels take."""
        return self.form, self.temperature, self.scale, self.coefficient


def soft_target_rows(
    student: Tensor,
    teacher: list[Tensor],
    needs_grad: bool,
    soft: SoftTargetOptions,
    log_mass: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Divergences (R,) of logits (R, V), and gradients with respect to student/τ, without scale.

    ``teacher`` is logits (R, V), or ids and log-probabilities (R, K). With ``log_mass`` (R,) the
    teacher has more tokens, and the logits' tokens together this probability: for divergences of
    Σ min(p_t, p_s), in which the student's probability of all other tokens is 0.
    """
    log_ps = log_softmax(student, soft.temperature)
    if soft.tail:
        ids, log_probs = teacher
        return _from_top_k(log_ps, ids, log_probs, needs_grad, soft)
    log_pt = log_softmax(teacher[0], soft.temperature)
    if log_mass is not None:
        log_pt += log_mass[:, None]
    return row_divergence(soft.form, soft.coefficient, log_ps, log_pt, needs_grad)


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
    teacher_of: Tensor | None = None,
    unmatched: str = "",
) -> Tensor:
    """Divergences (R,) of logits in the working dtype, by any backend.

    If needed, their gradient times ``weight`` and weights (R,) overwrites ``student``. Kernels need
    the weights for it. Both are 0 where the mask (R,) is False. ``teacher`` and ``log_mass`` are
    those of `soft_target_rows`. In C++ the teacher's logits may be (T, V), with ``teacher_rows``
    (R,) of them, and ``terms`` be labels (R,) or None, and a tensor for the terms of
    `linear_soft_targets.TERMS` from "entropy" on. ``teacher_of`` and ``unmatched`` then compare two
    vocabularies: the first of `fastkd.VocabularyMatch.columns`, and what becomes of the others.
    """
    if log_mass is not None and soft.form in ("forward_kl", "reverse_kl"):
        mass, call = log_mass.exp(), (student, teacher, soft, weight, runs_on, needs_grad, mask)
        if soft.form == "reverse_kl":
            kl = divergence_in_place(*call, weights, teacher_rows=teacher_rows)
            return kl - soft.scale * log_mass
        weights = mass if weights is None else mass * weights
        kl = divergence_in_place(*call, weights, teacher_rows=teacher_rows)
        return mass * kl + soft.scale * torch.xlogy(mass, mass)
    loss: Tensor
    if runs_on == "torch":
        value, grad = soft_target_rows(student, teacher, needs_grad, soft, log_mass)
        if grad is not None:
            factor: float | Tensor = weight * soft.scale / soft.temperature
            factor = factor if weights is None else weights[:, None] * factor
            torch.mul(grad, factor, out=student)
            if mask is not None:
                student.masked_fill_(~mask[:, None], 0)
        loss = value * soft.scale
        loss = loss if mask is None else loss.masked_fill(~mask, 0)
    elif runs_on == "cpp":
        if weights is not None and weight != 1:
            weights = weights * weight
        ids = teacher[0] if soft.tail else None
        rows = student, teacher[-1], ids, mask, weights if needs_grad else None
        options = *soft.per_row, soft.tail == "bucket", log_mass, teacher_rows
        loss = torch.ops.fastkd_cpp.soft_target_rows(
            *rows, *options, *(terms or (None, None)), teacher_of, unmatched
        )
    else:
        loss = _triton_in_place(
            student, teacher, soft, weight, mask, weights if needs_grad else None, log_mass
        )
    if log_mass is not None and soft.form == "total_variation":  # half of the other tokens' mass
        loss = loss - torch.expm1(log_mass) * (soft.scale / 2)
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


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    # Above it distributions differ so little, and τ² multiplies the rounding error of KL so much,
    # that float32 would leave few digits.
    largest_in_float32 = 10.0
    z = logits.double() if temperature > largest_in_float32 else upcast(logits)
    return torch.log_softmax(z if temperature == 1 else z / temperature, -1)


def _from_top_k(
    log_ps: Tensor, ids: Tensor, log_probs: Tensor, needs_grad: bool, soft: SoftTargetOptions
) -> tuple[Tensor, Tensor | None]:
    """Divergence over a teacher's k tokens and, for the tail "bucket", all others as one outcome.

    Let g be the gradient with respect to the logits of these K + 1 outcomes, the student's log q.
    A token of probability p in outcome j gets g_j p/q_j, which is g_j for an outcome of one token.
    """
    given, log_probs = log_probs, log_probs.to(log_ps.dtype)
    absent = log_probs == -torch.inf
    log_qs = log_ps.gather(-1, ids).masked_fill_(absent, -torch.inf)
    if soft.tail == "renormalise":
        log_qs, log_qt = log_qs.log_softmax(-1), log_probs.log_softmax(-1)
        value, g = row_divergence(soft.form, soft.coefficient, log_qs, log_qt, needs_grad)
        if g is None:
            return value, None
        return value, torch.zeros_like(log_ps).scatter_add_(-1, ids, g.masked_fill_(absent, 0))
    # An unused entry has any id, maybe one of the k tokens: it must not remove a token.
    removed = torch.full_like(log_qs, -torch.inf).masked_fill_(absent, torch.inf)
    rest = log_ps.scatter_reduce(-1, ids, removed, "amin")
    log_tail = rest.logsumexp(-1, keepdim=True)
    log_qs = torch.cat([log_qs, log_tail], -1)
    log_rest = probability_of_rest(given, log_ps.shape[-1], log_tail > -torch.inf).log()
    log_qt = torch.cat([given.double(), log_rest], -1).log_softmax(-1).to(log_ps.dtype)
    value, g = row_divergence(soft.form, soft.coefficient, log_qs, log_qt, needs_grad)
    if g is None:
        return value, None
    # A tail of probability 0 has no gradient to distribute.
    log_tail = log_tail.masked_fill(log_tail == -torch.inf, 0)
    grad = (rest - log_tail).exp_().mul_(g[:, -1:])
    return value, grad.scatter_add_(-1, ids, g[:, :-1].masked_fill(absent, 0))


def probability_of_rest(log_probs: Tensor, V: int, in_student: Tensor) -> Tensor:
    """Probability (..., 1) of all but the k tokens of a vocabulary of V, in float64.

    1 minus the sum, which rounding makes 0 or negative for a confident teacher; reverse KL would be
    infinite. So it is at least what rounding can hide: half an ε of float32's (float64's) sum, and
    of each stored log-probability. ``in_student`` (..., 1): whether the student's rest isn't 0.
    """
    log_p, used = log_probs.double(), log_probs != -torch.inf
    eps = torch.finfo(log_probs.dtype).eps
    entropy = torch.special.entr(log_p.exp()).sum(-1, keepdim=True)
    least = (min(eps, torch.finfo(torch.float32).eps) + eps * entropy) / 2
    rest = 1 - log_p.exp().sum(-1, keepdim=True)
    rest = torch.where(rest > least, rest, least * in_student)
    return rest.masked_fill(used.sum(-1, keepdim=True) == V, 0)


def scaled_soft_rows(
    student: Tensor,
    teacher: list[Tensor],
    mask: Tensor | None,
    needs_grad: bool,
    soft: SoftTargetOptions,
    divisor: Tensor | int,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Loss (R,) of each row times its weight, and its gradient (R, V) over ``divisor``.

    Both are 0 where masked; the weights (R,) must be too.

    The gradient stays in the working dtype: in half precision small probabilities would underflow
    before the loss scale is multiplied in.
    """
    factor = soft.scale / soft.temperature / divisor
    factors = None if weights is None else weights[:, None] * factor
    dtype = working_dtype(student)
    loss = student.new_empty(len(student), dtype=dtype)
    dstudent = student.new_empty(student.shape, dtype=dtype) if needs_grad else None
    with autocast_off(student):
        for chunk in row_chunks(student):
            logits = _unmasked(student[chunk], mask, chunk)
            targets = [x[chunk] if soft.tail else _unmasked(x[chunk], mask, chunk) for x in teacher]
            value, grad = soft_target_rows(logits, targets, needs_grad, soft)
            loss[chunk] = value * soft.scale
            if dstudent is not None and grad is not None:
                torch.mul(grad, factor if factors is None else factors[chunk], out=dstudent[chunk])
                if mask is not None:
                    dstudent[chunk].masked_fill_(~mask[chunk, None], 0)
        if weights is not None:
            loss *= weights
        if mask is not None:
            loss = loss.masked_fill(~mask, 0)
    return loss, dstudent


def row_chunks(logits: Tensor) -> list[slice]:
    """Slices of rows for one chunk each; a single slice on a GPU and in a graph."""
    if not values_readable(logits):
        return [slice(None)]
    rows, vocabulary = logits.shape
    step = max(CHUNK_LOGITS // vocabulary, 1)
    return [slice(start, start + step) for start in range(0, rows, step)]


def _unmasked(x: Tensor, mask: Tensor | None, chunk: slice) -> Tensor:
    return x if mask is None else x.masked_fill(~mask[chunk, None], 0)


@dataclass(frozen=True)
class CrossEntropyOptions:
    """Options of the cross-entropy of a row; see `fastkd.lm.targets.CrossEntropy`."""

    label_smoothing: float
    z_loss: float


def cross_entropy_rows(
    student: Tensor,
    labels: Tensor,
    needs_grad: bool,
    task: CrossEntropyOptions,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Cross-entropy (R,) of logits (R, V) with labels (R,), and its gradient.

    The gradient is written to ``out``, if given, which may be ``student``.
    """
    smoothing, V = task.label_smoothing, student.shape[-1]
    top = student.amax(-1)
    depth = top - student.gather(-1, labels[:, None])[:, 0]
    if smoothing:
        depth = (1 - smoothing) * depth + smoothing * (top - student.sum(-1) / V)
    grad = torch.sub(student, top[:, None], out=out).exp_()
    total = grad.sum(-1)
    log_total = total.log()
    value, factor = depth + log_total, total.reciprocal()
    if task.z_loss:
        log_z = top + log_total
        value = value + task.z_loss * log_z.square()
        factor = factor * (1 + 2 * task.z_loss * log_z)
    if not needs_grad:
        return value, None
    grad.mul_(factor[:, None])
    if smoothing:
        grad.sub_(smoothing / V)
    label = torch.full_like(value, smoothing - 1)
    return value, grad.scatter_add_(-1, labels[:, None], label[:, None])


def cross_entropy_by_kernel(
    runs_on: str,
    student: Tensor,
    labels: Tensor,
    task: CrossEntropyOptions,
    weights: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Cross-entropy (R,) of logits (R, V) with labels (R,), in C++ or Triton.

    With ``out``, which may be ``student``, its gradient times weights (R,) is written there.
    """
    options = task.label_smoothing, task.z_loss
    if runs_on == "cpp":
        loss: Tensor = torch.ops.fastkd_cpp.cross_entropy(student, labels, out, weights, *options)
        return loss
    from fastkd.kernels.cross_entropy import cross_entropy

    return cross_entropy(student, labels, weights, out, *options)


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


def total_variation(student: Tensor, teacher: Tensor, draft: Tensor | None) -> Tensor:
    """Total variation (R,) of logits at temperature 1.

    ``draft``: the teacher's token ids of the student's tokens, None for the same vocabulary. The
    student's probability of all other tokens is 0.
    """
    p_s, p_t = (torch.softmax(x, -1) for x in (student, teacher))
    p_t = p_t if draft is None else p_t[:, draft]
    outside = 0 if draft is None else 1 - p_t.sum(-1)
    return ((p_s - p_t).abs_().sum(-1) + outside) / 2
