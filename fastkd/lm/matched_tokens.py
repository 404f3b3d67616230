"""Divergence of logits of two vocabularies, from kernels for one vocabulary.

The student's logits stay at their columns and the teacher's are gathered there, so that the
kernel's gradient needs no scatter. Unmatched columns are −inf on both sides: outcomes of
probability 0, which add nothing. All unmatched tokens together take one of these columns.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastkd._core.numerics import upcast
from fastkd.lm.reference import SoftTargetOptions


def matched_rows(
    divergence: Callable[[Tensor, list[Tensor]], Tensor],
    student: Tensor,
    teacher: Tensor,
    columns: Sequence[Tensor],
    unmatched: str,
    soft: SoftTargetOptions,
    factor: Tensor | float | None,
) -> Tensor:
    """Values (R,) of logits (R, V_s) and (R, V_t), with the factor τ² of ``soft.scale``.

    Args:
        divergence: takes logits (R, n) of the student's outcomes and a list of the teacher's,
            returns values (R,), and overwrites the student's with their gradient if there is a
            ``factor``.
        student: overwritten, by the gradient if there is a ``factor``.
        columns: `fastkd.VocabularyMatch.columns`.
        unmatched: "renormalise", "bucket" or "sorted".
        factor: of the sorted distance's gradient for the logits over τ, a number or (R, 1), or None
            if no gradient is needed.
    """
    teacher_of, ours, theirs = columns
    tau = soft.temperature
    barrier = student.new_zeros(student.shape[-1]).index_fill_(0, ours, -torch.inf)
    targets = upcast(teacher.index_select(-1, teacher_of.clamp(min=0))).add_(barrier)
    if unmatched == "renormalise" or not (len(ours) or len(theirs)):
        return divergence(student.add_(barrier), [targets])
    distance = slope = None
    if unmatched == "sorted" and len(ours) and len(theirs):
        p, p_t = ((upcast(z) / tau).softmax(-1) for z in (student, teacher))
        distance, slope = _sorted_distance(p, p_t.index_select(-1, theirs), ours, factor)
    part, log_rest = _softmax_and_logsumexp(student.index_select(-1, ours), tau)
    _, log_rest_t = _softmax_and_logsumexp(upcast(teacher.index_select(-1, theirs)), tau)
    outcomes, together = student.add_(barrier), (log_rest * tau, log_rest_t * tau)
    # Of equal outcomes "adaptive_kl" takes the lower index: there the unmatched ones come last.
    appended = len(ours) == 0 or soft.form == "adaptive_kl"
    if appended:
        outcomes, targets = (
            torch.cat(pair, -1) for pair in zip((outcomes, targets), together, strict=True)
        )
    else:
        for x, logit in zip((outcomes, targets), together, strict=True):
            x.index_copy_(-1, ours[:1], logit)
    value = divergence(outcomes, [targets])
    if factor is not None:
        grad = outcomes[:, -1:] if appended else outcomes.index_select(-1, ours[:1])
        if appended:
            student.copy_(outcomes[:, :-1])
        student.index_copy_(-1, ours, part.mul_(grad))
        if slope is not None:
            student.add_(slope)
    return value if distance is None else value + distance.to(value.dtype) * soft.scale


def _softmax_and_logsumexp(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """softmax(z/τ) (R, n), which overwrites z, and log Σ exp(z/τ) (R, 1): −inf for no column."""
    if logits.shape[-1] == 0:
        return logits, logits.new_full((len(logits), 1), -torch.inf)
    z = logits if temperature == 1 else logits.div_(temperature)
    top = z.amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)
    e = z.sub_(top).exp_()
    total = e.sum(-1, keepdim=True)
    log_total = total.log() + top
    return e.div_(total.masked_fill_(total == 0, 1)), log_total


def _sorted_distance(
    p: Tensor, p_t: Tensor, ours: Tensor, factor: Tensor | float | None
) -> tuple[Tensor, Tensor | None]:
    """Σ_k |s_k − t_k| of the sorted unmatched probabilities, and its gradient times ``factor``.

    The gradient is that for the student's logits over τ, and overwrites their softmax p (R, V_s).
    The token v of rank k gets p_v (σ_k − c), σ the sign of s_k − t_k and c = Σ p_u σ_u over the
    unmatched u; a matched one −p_v c.
    """
    own = p.index_select(-1, ours)
    ranked, order = own.sort(stable=True, dim=-1, descending=True)
    of_teacher = p_t.sort(-1, descending=True)[0]
    n, m = ranked.shape[-1], of_teacher.shape[-1]
    both = min(n, m)
    gap = ranked.clone()
    gap[:, :both] -= of_teacher[:, :both]
    distance = gap.abs().sum(-1) + of_teacher[:, both:].sum(-1)
    if factor is None:
        return distance, None
    sign = torch.empty_like(own).scatter_(-1, order, gap.sign_())
    weighted = own.mul_(sign)
    p.mul_(-weighted.sum(-1, keepdim=True))
    return distance, p.index_add_(-1, ours, weighted).mul_(factor)
