"""Divergences of two distributions over a vocabulary, for each row, with explicit gradients.

A row function takes log-probabilities (R, V) of student and teacher, whether the gradient is
needed, and a coefficient if it has one. It returns values (R,) and gradients (R, V) with respect to
the student's logits over τ. In Σ p·x an entry with p = 0 adds nothing, even if x is infinite.
"""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fastkd._core.checks import check_choice, check_fraction, check_number
from fastkd._core.numerics import cumulative_sum

DivergenceWord = Literal["forward_kl", "reverse_kl", "adaptive_kl", "js"]
DIVERGENCES = get_args(DivergenceWord)
NAMES = (
    *DIVERGENCES,
    "skew_kl",
    "skew_reverse_kl",
    "total_variation",
    "negative_log_acceptance",
    "lk",
    "mixed",
)

ValueAndGrad = tuple[Tensor, Tensor | None]  # the gradient is None unless needed


@dataclass(frozen=True)
class Divergence:
    """A divergence with its coefficient, as ``divergence=`` of the soft-target losses.

    With KL(p ‖ q) = Σ p log(p/q) and m the mixture given beside each divergence:

    - ``"js"``: β·KL(p_t ‖ m) + (1 − β)·KL(p_s ‖ m), m = β·p_t + (1 − β)·p_s (Agarwal et al. 2024,
      in TRL's convention: β = 0 is forward and β = 1 reverse KL)
    - ``"skew_kl"``: KL(p_t ‖ α·p_t + (1 − α)·p_s), α = ``skew`` (DistiLLM, Ko et al. 2024)
    - ``"skew_reverse_kl"``: KL(p_s ‖ α·p_s + (1 − α)·p_t)
    - ``"total_variation"``: TV = ½ Σ |p_t − p_s| = 1 − α, with α = Σ min(p_t, p_s), the rate at
      which speculative sampling accepts the student's tokens
    - ``"negative_log_acceptance"``: −log α (Samarin et al. 2026)
    - ``"lk"``: λ·KL(p_t ‖ p_s) + (1 − λ)·TV, λ = exp(−``rate``·α) without gradient (ibid.)
    - ``"mixed"``: ``mix``·KL(p_t ‖ p_s) + (1 − ``mix``)·KL(p_s ‖ p_t)
    - ``"forward_kl"``, ``"reverse_kl"``, ``"adaptive_kl"``: as in `fastkd.soft_target_loss`

    A coefficient that the divergence doesn't use has no effect.

    Args:
        name: one of these.
        beta, skew, mix: 0 to 1.
        rate: at least 0. The larger, the sooner "lk" turns from KL to total variation.

    Raises:
        ValueError, TypeError: another name, or a coefficient out of its range.

    >>> Divergence("skew_kl", skew=0.2)
    Divergence(name='skew_kl', beta=0.5, skew=0.2, mix=0.5, rate=3.0)
    """

    name: str
    _: KW_ONLY
    beta: float = 0.5
    skew: float = 0.1
    mix: float = 0.5
    rate: float = 3.0

    def __post_init__(self) -> None:
        check_choice("name", self.name, NAMES)
        for coefficient in ("beta", "skew", "mix"):
            check_fraction(coefficient, getattr(self, coefficient))
        check_number("rate", self.rate, at_least=0)

    @property
    def form(self) -> tuple[str, float]:
        """Name of the row function and its coefficient: the simplest of equal functions."""
        if self.name == "js" and self.beta == 0.5:
            return "js", 0.0
        if self.name == "js":
            ends = {0.0: "forward_kl", 1.0: "reverse_kl"}
            return ends.get(self.beta, "generalized_js"), float(self.beta)
        if self.name in ("skew_kl", "skew_reverse_kl"):
            plain = self.name.removeprefix("skew_") if self.name != "skew_kl" else "forward_kl"
            return (plain, 0.0) if self.skew == 0 else (self.name, float(self.skew))
        if self.name == "mixed":
            ends = {0.0: "reverse_kl", 1.0: "forward_kl"}
            return ends.get(self.mix, "mixed"), float(self.mix)
        if self.name == "lk":
            return ("lk", float(self.rate)) if self.rate else ("forward_kl", 0.0)
        return self.name, 0.0


def row_divergence(
    form: str,
    coefficient: float,
    log_ps: Tensor,
    log_pt: Tensor,
    needs_grad: bool,
) -> ValueAndGrad:
    """Value (R,) and gradient (R, V) of a `Divergence.form`."""
    if form in _WITHOUT_COEFFICIENT:
        return _WITHOUT_COEFFICIENT[form](log_ps, log_pt, needs_grad)
    return _WITH_COEFFICIENT[form](log_ps, log_pt, needs_grad, coefficient)


def _forward_kl(log_ps: Tensor, log_pt: Tensor, needs_grad: bool) -> ValueAndGrad:
    """KL(p_t ‖ p_s) and its gradient with respect to z_s/τ: p_s − p_t."""
    p_t = log_pt.exp()
    value = _weighted_sum(p_t, log_pt - log_ps)
    return value, log_ps.exp().sub_(p_t) if needs_grad else None


def _reverse_kl(log_ps: Tensor, log_pt: Tensor, needs_grad: bool) -> ValueAndGrad:
    """KL(p_s ‖ p_t) and its gradient: p_s (log p_s − log p_t − KL)."""
    p_s = log_ps.exp()
    ratio = log_ps - log_pt
    value = _weighted_sum(p_s, ratio)
    return value, _expectation_grad(p_s, ratio, value) if needs_grad else None


def _js(log_ps: Tensor, log_pt: Tensor, needs_grad: bool) -> ValueAndGrad:
    """½KL(p_t ‖ m) + ½KL(p_s ‖ m) and its gradient: ½p_s (log p_s − log m − KL(p_s ‖ m))."""
    log_m = torch.logaddexp(log_ps, log_pt).sub_(math.log(2))
    p_s = log_ps.exp()
    ratio = log_ps - log_m
    student_kl = _weighted_sum(p_s, ratio)
    value = (student_kl + _weighted_sum(log_pt.exp(), log_pt - log_m)) / 2
    return value, _expectation_grad(p_s, ratio, student_kl).div_(2) if needs_grad else None


def _adaptive_kl(log_ps: Tensor, log_pt: Tensor, needs_grad: bool) -> ValueAndGrad:
    """Forward and reverse KL, weighted by the gaps in the head and in the tail."""
    head = _head_weight(log_ps.exp(), log_pt.exp())  # (R,)
    return _two_kl(log_ps, log_pt, needs_grad, head)


def _mixed(log_ps: Tensor, log_pt: Tensor, needs_grad: bool, mix: float) -> ValueAndGrad:
    """mix·KL(p_t ‖ p_s) + (1 − mix)·KL(p_s ‖ p_t)."""
    weight = torch.full_like(log_ps[:, 0], mix)
    return _two_kl(log_ps, log_pt, needs_grad, weight)


def _two_kl(log_ps: Tensor, log_pt: Tensor, needs_grad: bool, weight: Tensor) -> ValueAndGrad:
    """weight·KL(p_t ‖ p_s) + (1 − weight)·KL(p_s ‖ p_t), with weight (R,)."""
    forward_value, forward_grad = _forward_kl(log_ps, log_pt, needs_grad)
    reverse_value, reverse_grad = _reverse_kl(log_ps, log_pt, needs_grad)
    value = _weighted(weight, forward_value) + _weighted(1 - weight, reverse_value)
    if forward_grad is None or reverse_grad is None:
        return value, None
    weight = weight[:, None]
    return value, _weighted(weight, forward_grad).add_(_weighted(1 - weight, reverse_grad))


def _generalized_js(log_ps: Tensor, log_pt: Tensor, needs_grad: bool, beta: float) -> ValueAndGrad:
    """β·KL(p_t ‖ m) + (1 − β)·KL(p_s ‖ m), its gradient (1 − β) p_s (log p_s/m − KL(p_s ‖ m))."""
    log_m = _log_mixture(log_pt, log_ps, beta)
    p_s = log_ps.exp()
    ratio = log_ps - log_m
    student_kl = _weighted_sum(p_s, ratio)
    value = beta * _weighted_sum(log_pt.exp(), log_pt - log_m) + (1 - beta) * student_kl
    if not needs_grad:
        return value, None
    return value, _expectation_grad(p_s, ratio, student_kl).mul_(1 - beta)


def _skew_kl(log_ps: Tensor, log_pt: Tensor, needs_grad: bool, skew: float) -> ValueAndGrad:
    """KL(p_t ‖ m) of m = α p_t + (1 − α) p_s, and p_s Σu − u with u = (1 − α) p_s p_t/m."""
    log_m = _log_mixture(log_pt, log_ps, skew)
    p_t = log_pt.exp()
    value = _weighted_sum(p_t, log_pt - log_m)
    if not needs_grad:
        return value, None
    moved = (log_ps + log_pt - log_m).exp_().mul_(1 - skew).masked_fill_(p_t == 0, 0)
    return value, log_ps.exp().mul_(moved.sum(-1)[:, None]).sub_(moved)


def _skew_reverse_kl(log_ps: Tensor, log_pt: Tensor, needs_grad: bool, skew: float) -> ValueAndGrad:
    """KL(p_s ‖ m) of m = α p_s + (1 − α) p_t; p_s (x − Σ p_s x) with x = log p_s/m − α p_s/m."""
    ratio = log_ps - _log_mixture(log_ps, log_pt, skew)
    p_s = log_ps.exp()
    value = _weighted_sum(p_s, ratio)
    if not needs_grad:
        return value, None
    slope = ratio.sub_(ratio.exp().mul_(skew))
    return value, _expectation_grad(p_s, slope, _weighted_sum(p_s, slope))


def _total_variation(log_ps: Tensor, log_pt: Tensor, needs_grad: bool) -> ValueAndGrad:
    """½ Σ |p_t − p_s| and its gradient."""
    p_s, p_t = log_ps.exp(), log_pt.exp()
    return (p_s - p_t).abs_().sum(-1) / 2, _overlap_grad(p_s, p_t, needs_grad)


def _overlap_grad(p_s: Tensor, p_t: Tensor, needs_grad: bool) -> Tensor | None:
    """Gradient of 1 − Σ min(p_t, p_s): p_s (Σ p_s b − b), b = 1 where p_s < p_t, ½ if equal."""
    if not needs_grad:
        return None
    below = (p_t - p_s).sign_().add_(1).div_(2)
    return ((p_s * below).sum(-1)[:, None] - below).mul_(p_s)


def _negative_log_acceptance(log_ps: Tensor, log_pt: Tensor, needs_grad: bool) -> ValueAndGrad:
    """−log α of α = Σ min(p_t, p_s), and its gradient: that of the total variation over α.

    For an acceptance of 0 the value is infinite and the gradient 0.
    """
    p_s, p_t = log_ps.exp(), log_pt.exp()
    acceptance = torch.minimum(p_s, p_t).sum(-1)
    grad = _overlap_grad(p_s, p_t, needs_grad)
    if grad is not None:
        grad.div_(acceptance.masked_fill(acceptance == 0, 1)[:, None])
    return -acceptance.log(), grad


def _lk(log_ps: Tensor, log_pt: Tensor, needs_grad: bool, rate: float) -> ValueAndGrad:
    """λ·KL(p_t ‖ p_s) + (1 − λ)·TV of λ = exp(−rate·α), α = Σ min(p_t, p_s)."""
    p_s, p_t = log_ps.exp(), log_pt.exp()
    weight = torch.minimum(p_s, p_t).sum(-1).mul_(-rate).exp_()
    kl, grad_of_kl = _forward_kl(log_ps, log_pt, needs_grad)
    value = _weighted(weight, kl) + (1 - weight) * (p_s - p_t).abs_().sum(-1) / 2
    grad = _overlap_grad(p_s, p_t, needs_grad)
    if grad is None or grad_of_kl is None:
        return value, None
    return value, grad.lerp_(grad_of_kl, weight[:, None])


_WITHOUT_COEFFICIENT = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "js": _js,
    "adaptive_kl": _adaptive_kl,
    "total_variation": _total_variation,
    "negative_log_acceptance": _negative_log_acceptance,
}
_WITH_COEFFICIENT = {
    "generalized_js": _generalized_js,
    "skew_kl": _skew_kl,
    "skew_reverse_kl": _skew_reverse_kl,
    "mixed": _mixed,
    "lk": _lk,
}


def _log_mixture(log_p: Tensor, log_q: Tensor, weight: float) -> Tensor:
    """log(weight·p + (1 − weight)·q)."""
    if weight == 1:
        return log_p
    return torch.logaddexp(log_p + math.log(weight), log_q + math.log1p(-weight))


def _weighted_sum(p: Tensor, x: Tensor) -> Tensor:
    """Σ p·x over the vocabulary, where p = 0 adds nothing even if x is infinite."""
    return (p * x).masked_fill_(p == 0, 0).sum(-1)


def _weighted(weight: Tensor, x: Tensor) -> Tensor:
    """weight · x, where a weight of 0 gives 0 even if x is infinite; a lerp would give ∞ − ∞."""
    return (weight * x).masked_fill_(weight == 0, 0)


def _expectation_grad(p: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    """p·(x − mean): gradient of Σ p·x with respect to the logits of p, for constant x."""
    return (x - mean[:, None]).mul_(p).masked_fill_(p == 0, 0)


def _head_weight(p_s: Tensor, p_t: Tensor) -> Tensor:
    """g_head / (g_head + g_tail) of each row; ½ where the distributions are equal."""
    gap = (p_t - p_s).abs_()
    total = gap.sum(-1)
    ranked, order = p_t.sort(dim=-1, descending=True, stable=True)
    mass = mass_by_first(ranked)
    in_head = mass <= mass[:, -1:] / 2  # the head has at most half of the probability, μ = ½
    in_head[:, 0] = True
    head = gap.gather(-1, order).masked_fill_(~in_head, 0).sum(-1)
    return torch.where(total > 0, head / total, 0.5)


def mass_by_first(ranked: Tensor) -> Tensor:
    """Cumulative sums of descending probabilities over the first: exact if all are equal."""
    return cumulative_sum(ranked / ranked[..., :1], -1)
