"""Divergences of two distributions over words, row by row, with gradients written out.

A row function takes log-probabilities (R, V) of student and teacher, whether the gradient is
wanted, and a coefficient if it has one. It gives values (R,) and their gradients (R, V) with
respect to what the student's softmax was taken of. An entry of probability 0 on the side that
weighs it adds nothing, even against ∞.
"""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fastkd._core.checks import check_choice, check_fraction
from fastkd._torch.vocabulary_shard import ALL, Columns

DivergenceWord = Literal["forward_kl", "reverse_kl", "adaptive_kl", "js"]
DIVERGENCES = get_args(DivergenceWord)
NAMES = (*DIVERGENCES, "skew_kl", "skew_reverse_kl", "total_variation", "mixed")

Graded = tuple[Tensor, Tensor | None]  # values and their gradients, if wanted


@dataclass(frozen=True)
class Divergence:
    """A divergence with its coefficient, for ``divergence=`` of the soft-target losses.

    With m the mixture that each names, and KL(p ‖ q) = Σ p log(p/q):

    - ``"js"``: β·KL(p_t ‖ m) + (1 − β)·KL(p_s ‖ m), m = β·p_t + (1 − β)·p_s (Agarwal et al. 2024,
      in TRL's convention, by which β = 0 is forward and β = 1 reverse KL)
    - ``"skew_kl"``: KL(p_t ‖ α·p_t + (1 − α)·p_s), α = ``skew`` (DistiLLM, Ko et al. 2024)
    - ``"skew_reverse_kl"``: KL(p_s ‖ α·p_s + (1 − α)·p_t)
    - ``"total_variation"``: ½ Σ |p_t − p_s|
    - ``"mixed"``: ``mix``·KL(p_t ‖ p_s) + (1 − ``mix``)·KL(p_s ‖ p_t)
    - ``"forward_kl"``, ``"reverse_kl"``, ``"adaptive_kl"``: as the words

    A coefficient that its divergence does not name changes nothing.

    Args:
        name: one of these.
        beta, skew, mix: 0 to 1.

    Raises:
        ValueError, TypeError: another name, or a coefficient that is no number from 0 to 1.

    >>> Divergence("skew_kl", skew=0.2)
    Divergence(name='skew_kl', beta=0.5, skew=0.2, mix=0.5)
    """

    name: str
    _: KW_ONLY
    beta: float = 0.5
    skew: float = 0.1
    mix: float = 0.5

    def __post_init__(self) -> None:
        check_choice("name", self.name, NAMES)
        for coefficient in ("beta", "skew", "mix"):
            check_fraction(coefficient, getattr(self, coefficient))

    @property
    def form(self) -> tuple[str, float]:
        """The row function and its coefficient: of those that are the same, the plainest."""
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
        return self.name, 0.0


def row_divergence(
    form: str,
    coefficient: float,
    log_ps: Tensor,
    log_pt: Tensor,
    wants_grad: bool,
    columns: Columns = ALL,
) -> Graded:
    """Value (R,) and gradient (R, V) of a `Divergence.form`, over ``columns``."""
    sides = log_ps, log_pt, wants_grad, columns
    return _PLAIN[form](*sides) if form in _PLAIN else _WEIGHED[form](*sides, coefficient)


def _forward_kl(log_ps: Tensor, log_pt: Tensor, wants_grad: bool, columns: Columns) -> Graded:
    """KL(p_t ‖ p_s) of every row and its gradient with respect to z_s/τ: p_s − p_t."""
    p_t = log_pt.exp()
    value = _weighted_sum(p_t, log_pt - log_ps, columns)
    return value, log_ps.exp().sub_(p_t) if wants_grad else None


def _reverse_kl(log_ps: Tensor, log_pt: Tensor, wants_grad: bool, columns: Columns) -> Graded:
    """KL(p_s ‖ p_t) and its gradient: p_s (log p_s − log p_t − KL)."""
    p_s = log_ps.exp()
    ratio = log_ps - log_pt
    value = _weighted_sum(p_s, ratio, columns)
    return value, _expectation_grad(p_s, ratio, value) if wants_grad else None


def _js(log_ps: Tensor, log_pt: Tensor, wants_grad: bool, columns: Columns) -> Graded:
    """½KL(p_t ‖ m) + ½KL(p_s ‖ m) and its gradient: ½p_s (log p_s − log m − KL(p_s ‖ m))."""
    log_m = torch.logaddexp(log_ps, log_pt).sub_(math.log(2))
    p_s = log_ps.exp()
    ratio = log_ps - log_m
    student_side = _weighted_sum(p_s, ratio, columns)
    value = (student_side + _weighted_sum(log_pt.exp(), log_pt - log_m, columns)) / 2
    return value, _expectation_grad(p_s, ratio, student_side).div_(2) if wants_grad else None


def _adaptive_kl(log_ps: Tensor, log_pt: Tensor, wants_grad: bool, columns: Columns) -> Graded:
    """Forward and reverse KL weighted by the gap of the head and of the tail."""
    head = _head_share(log_ps.exp(), log_pt.exp())  # (R,)
    return _two_kl(log_ps, log_pt, wants_grad, columns, head)


def _mixed(
    log_ps: Tensor, log_pt: Tensor, wants_grad: bool, columns: Columns, mix: float
) -> Graded:
    """mix·KL(p_t ‖ p_s) + (1 − mix)·KL(p_s ‖ p_t)."""
    share = torch.full_like(log_ps[:, 0], mix)
    return _two_kl(log_ps, log_pt, wants_grad, columns, share)


def _two_kl(
    log_ps: Tensor, log_pt: Tensor, wants_grad: bool, columns: Columns, forward_share: Tensor
) -> Graded:
    """Forward KL times its share (R,), and reverse KL times the rest."""
    forward_value, forward_grad = _forward_kl(log_ps, log_pt, wants_grad, columns)
    reverse_value, reverse_grad = _reverse_kl(log_ps, log_pt, wants_grad, columns)
    value = _weigh(forward_share, forward_value) + _weigh(1 - forward_share, reverse_value)
    if forward_grad is None or reverse_grad is None:
        return value, None
    share = forward_share[:, None]
    return value, _weigh(share, forward_grad).add_(_weigh(1 - share, reverse_grad))


def _generalized_js(
    log_ps: Tensor, log_pt: Tensor, wants_grad: bool, columns: Columns, beta: float
) -> Graded:
    """β·KL(p_t ‖ m) + (1 − β)·KL(p_s ‖ m), its gradient (1 − β) p_s (log p_s/m − KL(p_s ‖ m))."""
    log_m = _log_mixture(log_pt, log_ps, beta)
    p_s = log_ps.exp()
    ratio = log_ps - log_m
    student_side = _weighted_sum(p_s, ratio, columns)
    value = beta * _weighted_sum(log_pt.exp(), log_pt - log_m, columns) + (1 - beta) * student_side
    if not wants_grad:
        return value, None
    return value, _expectation_grad(p_s, ratio, student_side).mul_(1 - beta)


def _skew_kl(
    log_ps: Tensor, log_pt: Tensor, wants_grad: bool, columns: Columns, skew: float
) -> Graded:
    """KL(p_t ‖ m) of m = α p_t + (1 − α) p_s, and p_s Σu − u with u = (1 − α) p_s p_t/m."""
    log_m = _log_mixture(log_pt, log_ps, skew)
    p_t = log_pt.exp()
    value = _weighted_sum(p_t, log_pt - log_m, columns)
    if not wants_grad:
        return value, None
    moved = (log_ps - log_m).exp_().mul_(1 - skew).mul_(p_t).masked_fill_(p_t == 0, 0)
    return value, log_ps.exp().mul_(columns.sum(moved)[:, None]).sub_(moved)


def _skew_reverse_kl(
    log_ps: Tensor, log_pt: Tensor, wants_grad: bool, columns: Columns, skew: float
) -> Graded:
    """KL(p_s ‖ m) of m = α p_s + (1 − α) p_t; p_s (x − Σ p_s x) with x = log p_s/m − α p_s/m."""
    ratio = log_ps - _log_mixture(log_ps, log_pt, skew)
    p_s = log_ps.exp()
    value = _weighted_sum(p_s, ratio, columns)
    if not wants_grad:
        return value, None
    slope = ratio.sub_(ratio.exp().mul_(skew))
    return value, _expectation_grad(p_s, slope, _weighted_sum(p_s, slope, columns))


def _total_variation(log_ps: Tensor, log_pt: Tensor, wants_grad: bool, columns: Columns) -> Graded:
    """½ Σ |p_t − p_s| and its gradient, in which the sign of no gap is 0."""
    p_s = log_ps.exp()
    gap = p_s - log_pt.exp()
    value = columns.sum(gap.abs()) / 2
    if not wants_grad:
        return value, None
    side = gap.sign_().div_(2)
    return value, _expectation_grad(p_s, side, _weighted_sum(p_s, side, columns))


_PLAIN = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "js": _js,
    "adaptive_kl": _adaptive_kl,
    "total_variation": _total_variation,
}
_WEIGHED = {
    "generalized_js": _generalized_js,
    "skew_kl": _skew_kl,
    "skew_reverse_kl": _skew_reverse_kl,
    "mixed": _mixed,
}


def _log_mixture(log_p: Tensor, log_q: Tensor, share: float) -> Tensor:
    """log(share·p + (1 − share)·q)."""
    if share == 1:
        return log_p
    return torch.logaddexp(log_p + math.log(share), log_q + math.log1p(-share))


def _weighted_sum(p: Tensor, x: Tensor, columns: Columns) -> Tensor:
    """Σ p·x over the vocabulary, where a probability of 0 counts nothing even against ∞."""
    return columns.sum((p * x).masked_fill_(p == 0, 0))


def _weigh(weight: Tensor, x: Tensor) -> Tensor:
    """weight · x, where a weight of 0 counts nothing even against ∞; not a lerp, which makes
    ∞ − ∞ of one infinite end."""
    return (weight * x).masked_fill_(weight == 0, 0)


def _expectation_grad(p: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    return (x - mean[:, None]).mul_(p).masked_fill_(p == 0, 0)


def _head_share(p_s: Tensor, p_t: Tensor) -> Tensor:
    """g_head / (g_head + g_tail) of every row; ½ where the distributions are the same."""
    gap = (p_t - p_s).abs_()
    total = gap.sum(-1)
    ranked, order = p_t.sort(dim=-1, descending=True, stable=True)
    mass = mass_by_first(ranked)
    in_head = mass <= mass[:, -1:] / 2  # teacher probability that the head may hold, μ = ½
    in_head[:, 0] = True
    head = gap.gather(-1, order).masked_fill_(~in_head, 0).sum(-1)
    return torch.where(total > 0, head / total, 0.5)


def mass_by_first(ranked: Tensor) -> Tensor:
    """What descending probabilities add up to, by the first: half of equal ones is half of it."""
    return (ranked / ranked[..., :1]).cumsum(-1)
