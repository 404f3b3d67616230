"""Divergences of two distributions over a vocabulary, with their coefficients."""

from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

from fastkd._core import check

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
        check.choice("name", self.name, NAMES)
        for coefficient in ("beta", "skew", "mix"):
            check.fraction(coefficient, getattr(self, coefficient))
        check.number("rate", self.rate, at_least=0)

    @property
    def form(self) -> tuple[str, float]:
        """Name of the row function and its coefficient: the simplest of equal functions."""
        # Comparisons and products alone: a coefficient may be a parameter of a plan.
        if self.name == "js" and self.beta == 0.5:
            return "js", 0.0
        if self.name == "js":
            return _between(self.beta, "forward_kl", "generalized_js", "reverse_kl")
        if self.name in ("skew_kl", "skew_reverse_kl"):
            plain = self.name.removeprefix("skew_") if self.name != "skew_kl" else "forward_kl"
            return (plain, 0.0) if self.skew == 0 else (self.name, self.skew * 1.0)
        if self.name == "mixed":
            return _between(self.mix, "reverse_kl", "mixed", "forward_kl")
        if self.name == "lk":
            return ("lk", self.rate * 1.0) if self.rate else ("forward_kl", 0.0)
        return self.name, 0.0


def _between(x: float, at_0: str, between: str, at_1: str) -> tuple[str, float]:
    return at_0 if x == 0 else at_1 if x == 1 else between, x * 1.0
