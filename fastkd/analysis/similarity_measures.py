"""Similarity measures of two layers, computed from their `Moments`."""

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from fastkd._core import check
from fastkd.analysis.moments import EPS, Covariances, Factors, Moments

Measure = Literal["svcca", "pwcca", "cca", "cka", "unbiased_cka"]
MEASURES = get_args(Measure)

# Covariances give SVCCA to 1e-9 up to this fraction of the variance, which bounds κ² by 100·D.
WELL_CONDITIONED = 0.99
# Canonical correlations that differ by less count as equal: their directions are not unique.
TIED = 1e-12


def similarity(
    x: Tensor, y: Tensor, measure: Measure = "svcca", *, variance: float = 0.99
) -> Tensor:
    """Similarity of two sets of features of the same observations, from 0 to 1.

    With x̄, ȳ the centred features and ρ_1 ≥ ρ_2 ≥ ... their canonical correlations:

    - ``"cca"``: the mean of the ρ_i (Raghu et al. 2017); their number is the lower rank.
    - ``"svcca"``: the mean of the ρ_i of the leading singular directions of x̄ and ȳ that hold
      ``variance`` of each one's variance (Raghu et al. 2017; MC3KD, section 3.2).
    - ``"pwcca"``: Σ α_i ρ_i / Σ α_i, α_i = Σ_j |⟨h_i, x̄_j⟩| with the canonical variates h_i of x
      and its features x̄_j (Morcos et al. 2018), or of y if its rank is lower. For equal ρ_i, whose
      h_i are not unique, the h_i are the principal directions of their span.
    - ``"cka"``: ‖x̄ᵀȳ‖²_F / (‖x̄ᵀx̄‖_F ‖ȳᵀȳ‖_F) (Kornblith et al. 2019).
    - ``"unbiased_cka"``: CKA with the unbiased HSIC (Song et al. 2012), whose expectation doesn't
      depend on the number of observations; may be below 0.

    Features may have any rank, fewer rows than dimensions, or be constant; constant features have
    similarity 0. All computation is in float64. The error of a correlation is about κ·1e-16, where
    κ is the ratio of the largest singular value to the smallest that counts.

    Args:
        x: (n, Dx), a row for each observation.
        y: (n, Dy).
        measure: one of the above.
        variance: fraction of the variance that SVCCA keeps, in (0, 1].

    Returns:
        Scalar, float64, on the CPU.

    Raises:
        TypeError: inputs that are not floating-point tensors.
        ValueError: fewer than two rows (four for the unbiased CKA), values that are not finite, or
            a wrong shape or option.

    >>> x = torch.randn(100, 8, dtype=torch.float64)
    >>> found = similarity(x, x @ torch.randn(8, 8, dtype=torch.float64) + 1.0, "pwcca")
    >>> round(found.item(), 6)
    1.0
    """
    check.floating("x", x, ndim=2)
    check.floating("y", y, ndim=2)
    check.shape("y", y, (len(x), y.shape[1]), "a row for each of x's")
    check_measures([measure], variance)
    moments = moments_for([measure], variance)
    moments.update([_near_one(x), _near_one(y)], [x.dtype, y.dtype])
    check_moments(moments, [measure], ("x", "y"))
    return matrix(moments, measure, [0], [1], variance)[0, 0]


def _near_one(x: Tensor) -> Tensor:
    """Features times a power of two, so that their fourth powers don't overflow float64."""
    x = x.detach().cpu().double()
    largest = float(x.abs().amax()) if x.numel() else 0.0
    return x / 2.0 ** (math.frexp(largest)[1] - 1) if 0 < largest < math.inf else x


def check_measures(measures: Sequence[str], variance: float) -> None:
    """Raise unless ``measures`` are known and ``variance`` is in (0, 1]."""
    for measure in measures:
        check.choice("measure", measure, MEASURES)
    check.number("variance", variance, above=0.0)
    if variance > 1:
        raise ValueError(f"variance must be at most 1, got {variance}")


def moments_for(measures: Sequence[str], variance: float) -> Moments:
    """Empty moments that suffice for these measures."""
    exact = not {"cca", "pwcca"}.isdisjoint(measures)
    exact = exact or ("svcca" in measures and variance > WELL_CONDITIONED)
    return (Factors if exact else Covariances)(fourth="unbiased_cka" in measures)


def check_moments(
    moments: Moments, measures: Sequence[str], names: Sequence[str], rows: str = "rows"
) -> None:
    """Raise unless there were enough rows, all finite; the error names the layer."""
    least, word = (4, "four") if "unbiased_cka" in measures else (2, "two")
    if moments.count < least:
        raise ValueError(f"at least {word} {rows} are needed, got {moments.count}")
    for name, mean in zip(names, moments.split(moments.mean), strict=True):
        if not bool(mean.isfinite().all()):
            raise ValueError(f"{name} gave values that are not finite")


def matrix(
    moments: Moments,
    measure: Measure,
    rows: Sequence[int],
    columns: Sequence[int],
    variance: float = 0.99,
) -> Tensor:
    """Matrix of the measure between the layers ``rows`` and ``columns``, on the CPU."""
    found = torch.empty(len(rows), len(columns), dtype=torch.float64, device="cpu")
    value = _VALUES[measure]
    done: dict[tuple[int, int], Tensor] = {}
    for a, i in enumerate(rows):
        for b, j in enumerate(columns):
            if measure != "pwcca" and (j, i) in done:
                done[i, j] = done[j, i]
            else:
                done[i, j] = value(moments, i, j, variance)
            found[a, b] = done[i, j]
    return found


def svcca(moments: Moments, i: int, j: int, variance: float) -> Tensor:
    """Mean canonical correlation of the leading directions of layers i and j."""
    kept = moments.directions(i).leading(variance), moments.directions(j).leading(variance)
    if min(kept) == 0:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    if i == j:
        return torch.ones((), dtype=torch.float64, device="cpu")
    return torch.linalg.svdvals(moments.overlap(i, j, kept)).clamp(0, 1).mean()


def _pwcca(moments: Moments, i: int, j: int, variance: float) -> Tensor:
    ranks = moments.directions(i).leading(1.0), moments.directions(j).leading(1.0)
    if min(ranks) == 0 or i == j:
        return svcca(moments, i, j, 1.0)
    left, rho, right = torch.linalg.svd(moments.overlap(i, j, ranks), full_matrices=False)
    rho = rho.clamp(0, 1)
    own = i if ranks[0] <= ranks[1] else j
    turns = left.T if own == i else right
    found = moments.directions(own)
    features = turns @ (found.values[:, None] * found.vectors)  # ⟨h_i, x̄_j⟩
    ends = (rho.diff().abs() > TIED).nonzero().flatten().add(1).tolist()
    parts = []
    for part in features.tensor_split(ends):
        if len(part) > 1:
            _, values, vectors = torch.linalg.svd(part, full_matrices=False)
            part = values[:, None] * vectors
        parts.append(part.abs().sum(1))
    alpha = torch.cat(parts)
    return (alpha * rho).sum() / alpha.sum()


def _unbiased_cka(moments: Moments, i: int, j: int, variance: float) -> Tensor:
    """HSIC_1 of linear kernels: n(n-3)·HSIC = ‖S_xy‖² - n/(n-2)·Σpq + ΣpΣq/((n-1)(n-2))."""
    n = moments.count
    pairs, squares = moments.pairs()

    def hsic(a: int, b: int) -> Tensor:
        whole = moments.energy(a, b) + squares[a] * squares[b] / ((n - 1) * (n - 2))
        return whole - pairs[a, b] * (n / (n - 2))

    return _ratio(moments, hsic, i, j)


def _ratio(moments: Moments, hsic: Callable[[int, int], Tensor], i: int, j: int) -> Tensor:
    """hsic(i, j) / √(hsic(i, i)·hsic(j, j)); 0 if hsic(i, i) or hsic(j, j) is rounding error."""
    xy, *own = hsic(i, j), hsic(i, i), hsic(j, j)
    for a, x in zip((i, j), own, strict=True):
        if float(x) <= max(moments.rounding(a) ** 4, float(moments.energy(a, a)) * EPS):
            return xy.new_zeros(())
    return xy / (own[0].sqrt() * own[1].sqrt())


_VALUES: dict[str, Callable[[Moments, int, int, float], Tensor]] = {
    "svcca": svcca,
    "cca": lambda moments, i, j, variance: svcca(moments, i, j, 1.0),
    "pwcca": _pwcca,
    "cka": lambda moments, i, j, variance: _ratio(moments, moments.energy, i, j),
    "unbiased_cka": _unbiased_cka,
}
