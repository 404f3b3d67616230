"""Losses of rows of logits in plain PyTorch, as in the literature.

The references of the public functions and, in float64 and a few rows at a time, the backend
"torch". In Σ p·x an entry with p = 0 adds nothing, even if x is infinite.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastkd._core.numerics import cumulative_sum


@dataclass(frozen=True)
class SoftTargetOptions:
    """Options of the divergence of a row."""

    form: str  # `Divergence.form`
    coefficient: float
    temperature: float
    scale: float  # τ² or 1
    tail: str = ""  # `fastkd.lm.targets.TopK.tail`; "" for a teacher of logits

    @property
    def per_row(self) -> tuple[str, float, float, float]:
        """Options that the kernels take."""
        return self.form, self.temperature, self.scale, self.coefficient


@dataclass(frozen=True)
class CrossEntropyOptions:
    """Options of the cross-entropy of a row; see `fastkd.lm.targets.CrossEntropy`."""

    label_smoothing: float
    z_loss: float


def soft_target_rows(
    student: Tensor,
    teacher: Sequence[Tensor],
    soft: SoftTargetOptions,
    *,
    match: Sequence[Tensor] | None = None,
    unmatched: str = "",
    log_mass: Tensor | None = None,
    stored: torch.dtype = torch.float64,
) -> Tensor:
    """Divergences (...) of logits (..., V), times ``soft.scale``.

    Args:
        teacher: logits (..., V), or (..., V') with a ``match``, or ids and log-probabilities
            (..., K), of which ``stored`` is the dtype that rounded them.
        match: ids (n,) of the matched tokens of student and teacher, and of the unmatched ones.
        unmatched: "renormalise", "bucket" or "sorted".
        log_mass: (...), logarithm of the probability of the V tokens, if the teacher has more. The
            student's probability of all other tokens is 0.
    """
    log_ps = torch.log_softmax(student / soft.temperature, dim=-1)
    distance: float | Tensor = 0.0
    if soft.tail:
        ids, log_probs = teacher
        log_ps, log_pt = _outcomes_of_top_k(log_ps, ids, log_probs, soft.tail, stored)
    else:
        log_pt = torch.log_softmax(teacher[0] / soft.temperature, dim=-1)
    if match is not None:
        if unmatched == "sorted" and len(match[2]) and len(match[3]):
            rest = (x[..., ids].exp() for x, ids in zip((log_ps, log_pt), match[2:], strict=True))
            distance = sorted_distance(*rest)
        log_qs, log_qt = (x[..., ids] for x, ids in zip((log_ps, log_pt), match[:2], strict=True))
        if unmatched != "renormalise":
            pairs = (log_qs, log_ps, match[2]), (log_qt, log_pt, match[3])
            log_qs, log_qt = (torch.cat([q, _log_sum(x[..., ids])], -1) for q, x, ids in pairs)
        log_ps, log_pt = log_qs.log_softmax(-1), log_qt.log_softmax(-1)
    if log_mass is not None:
        log_pt = log_pt + log_mass[..., None]
        if soft.form == "total_variation":  # half of the other tokens' mass
            distance = -torch.expm1(log_mass) / 2
    return (divergence_rows(log_ps, log_pt, soft.form, soft.coefficient) + distance) * soft.scale


def divergence_rows(log_ps: Tensor, log_pt: Tensor, form: str, coefficient: float) -> Tensor:
    """A `Divergence.form` (...) of log-probabilities (..., V)."""
    p_s, p_t = log_ps.exp(), log_pt.exp()
    if form == "forward_kl":
        return _kl(p_t, log_pt, log_ps)
    if form == "reverse_kl":
        return _kl(p_s, log_ps, log_pt)
    if form in ("js", "generalized_js"):
        beta = 0.5 if form == "js" else coefficient
        log_m = _log_mixture(log_pt, log_ps, beta)
        return beta * _kl(p_t, log_pt, log_m) + (1 - beta) * _kl(p_s, log_ps, log_m)
    if form == "skew_kl":
        return _kl(p_t, log_pt, _log_mixture(log_pt, log_ps, coefficient))
    if form == "skew_reverse_kl":
        return _kl(p_s, log_ps, _log_mixture(log_ps, log_pt, coefficient))
    if form == "total_variation":
        return (p_t - p_s).abs().sum(-1) / 2
    if form in ("negative_log_acceptance", "lk"):
        acceptance = torch.minimum(p_t, p_s).sum(-1)
        if form == "lk":
            weight = torch.exp(-coefficient * acceptance.detach())  # λ
            total_variation = (p_t - p_s).abs().sum(-1) / 2
            return _weighted(weight, _kl(p_t, log_pt, log_ps)) + (1 - weight) * total_variation
        # Fill it too: in a backward pass 1/0 · 0 would be NaN.
        never = acceptance == 0
        return -torch.where(never, 1, acceptance).log().masked_fill(never, -torch.inf)
    weight = torch.full_like(log_ps[..., 0].detach(), coefficient)
    if form == "adaptive_kl":
        gap = (p_t - p_s).detach().abs()
        ranked, order = p_t.sort(dim=-1, descending=True, stable=True)
        # Cumulative sums over the first probability are exact if all are equal.
        mass = cumulative_sum(ranked / ranked[..., :1], -1)
        in_head = mass <= mass[..., -1:] / 2  # μ = ½ (Wu et al. 2024)
        in_head[..., 0] = True
        gap = gap.gather(-1, order)
        g_head, g_tail = gap.where(in_head, 0).sum(-1), gap.where(~in_head, 0).sum(-1)
        weight = torch.where(g_head + g_tail > 0, g_head / (g_head + g_tail), 0.5)
    forward_kl, reverse_kl = _kl(p_t, log_pt, log_ps), _kl(p_s, log_ps, log_pt)
    return _weighted(weight, forward_kl) + _weighted(1 - weight, reverse_kl)


def cross_entropy_rows(logits: Tensor, labels: Tensor, task: CrossEntropyOptions) -> Tensor:
    """Cross-entropies (...) of logits (..., V) with labels (...)."""
    log_p = logits.log_softmax(-1)
    loss = -(1 - task.label_smoothing) * log_p.gather(-1, labels[..., None])[..., 0]
    if task.label_smoothing:
        loss = loss - task.label_smoothing * log_p.mean(-1)
    if task.z_loss:
        loss = loss + task.z_loss * logits.logsumexp(-1).square()
    return loss


def _outcomes_of_top_k(
    log_ps: Tensor, ids: Tensor, log_probs: Tensor, tail: str, stored: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the k tokens and, for "bucket", of all others: student and teacher."""
    stored_log_probs, log_probs = log_probs, log_probs.to(log_ps.dtype)
    absent = log_probs == -torch.inf
    ids = ids.masked_fill(absent, 0)
    q_s, q_t = log_ps.exp().gather(-1, ids).masked_fill(absent, 0), log_probs.exp()
    if tail == "bucket":
        one_hot = torch.zeros_like(log_ps).scatter_add(-1, ids, (~absent).to(log_ps.dtype))
        of_student = log_ps.exp().masked_fill(one_hot > 0, 0).sum(-1, keepdim=True)
        of_teacher = probability_of_rest(stored_log_probs, log_ps.shape[-1], of_student > 0, stored)
        q_s, q_t = torch.cat([q_s, of_student], -1), torch.cat([q_t, of_teacher.to(q_t.dtype)], -1)
    q_s, q_t = (q / q.sum(-1, keepdim=True) for q in (q_s, q_t))
    log_qs, log_qt = (
        torch.where(q == 0, -torch.inf, torch.where(q == 0, 1, q).log()) for q in (q_s, q_t)
    )
    return log_qs, log_qt


def probability_of_rest(
    log_probs: Tensor, V: int, in_student: Tensor, stored: torch.dtype
) -> Tensor:
    """Probability (..., 1) of all but the k tokens of a vocabulary of V.

    1 minus the sum, which rounding makes 0 or negative for a confident teacher; reverse KL would be
    infinite. So it is at least what rounding can hide: half an ε of float32's (float64's) sum, and
    of each log-probability as ``stored``. ``in_student`` (..., 1): whether the student's rest isn't
    0.
    """
    log_p, used = log_probs, log_probs != -torch.inf
    log_p = log_p.double() if log_p.device.type != "mps" else log_p
    eps = torch.finfo(stored).eps
    entropy = torch.special.entr(log_p.exp()).sum(-1, keepdim=True)
    least = (min(eps, torch.finfo(torch.float32).eps) + eps * entropy) / 2
    rest = 1 - log_p.exp().sum(-1, keepdim=True)
    rest = torch.where(rest > least, rest, least * in_student)
    return rest.masked_fill(used.sum(-1, keepdim=True) == V, 0)


def _log_sum(log_p: Tensor) -> Tensor:
    """log Σ p (..., 1), with a gradient of 0 where all p are 0."""
    none = (log_p == -torch.inf).all(-1, keepdim=True)
    total = log_p.masked_fill(none, 0).logsumexp(-1, keepdim=True)
    return total.masked_fill(none, -torch.inf)


def sorted_distance(s: Tensor, t: Tensor) -> Tensor:
    """Σ_k |s_k − t_k| of sorted rows (..., n) and (..., m), the shorter padded with zeros."""
    s, t = (x.sort(dim=-1, descending=True, stable=True)[0] for x in (s, t))
    longest = max(s.shape[-1], t.shape[-1])
    s, t = (F.pad(x, (0, longest - x.shape[-1])) for x in (s, t))
    return (s - t).abs().sum(-1)


def _log_mixture(log_p: Tensor, log_q: Tensor, weight: float) -> Tensor:
    """log(weight·p + (1 − weight)·q)."""
    if weight == 1:
        return log_p + 0 * log_q.exp()  # a backward pass needs a function of both
    # In a backward pass the logarithm of 0 + 0 would be NaN.
    neither = (log_p == -torch.inf) & (log_q == -torch.inf)
    log_p, log_q = (x.masked_fill(neither, 0) for x in (log_p, log_q))
    mixture = torch.logaddexp(log_p + math.log(weight), log_q + math.log1p(-weight))
    return mixture.masked_fill(neither, -torch.inf)


def _kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) = Σ p (log p − log q), where 0 · log 0 = 0."""
    # Fill the difference too: in a backward pass 0 · inf would be NaN.
    nothing = p == 0
    return (p * (log_p - log_q).masked_fill(nothing, 0)).sum(-1)


def _weighted(weight: Tensor, loss: Tensor) -> Tensor:
    """weight · loss, where a weight of 0 gives 0 even if the loss is infinite."""
    return (weight * loss).masked_fill(weight == 0, 0)
