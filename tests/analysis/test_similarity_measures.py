"""Similarity measures against plain numpy on all features, for any split into batches."""

from itertools import product

import numpy as np
import pytest
import torch

from fastkd.analysis import similarity
from fastkd.analysis.similarity_measures import MEASURES, check_moments, matrix, moments_for
from tests.support.compare import raises

CLOSE = {"rtol": 0, "atol": 1e-9}


def basis(x, variance=1.0):
    """Orthonormal columns that span the leading directions of the centred rows."""
    u, s, _ = np.linalg.svd(x - x.mean(0), full_matrices=False)
    rank = int((s > s[0] * max(x.shape) * np.finfo(float).eps).sum())
    held = np.cumsum(s**2) / (s**2).sum() if rank else s
    kept = rank if variance == 1 else int((held < variance).sum()) + 1
    return np.linalg.qr(u[:, :kept] * s[:kept])[0]


def mean_cca(x, y, variance=1.0):
    return np.linalg.svd(basis(x, variance).T @ basis(y, variance), compute_uv=False).mean()


def pwcca(x, y):
    a, b = basis(x), basis(y)
    left, rho, right = np.linalg.svd(a.T @ b, full_matrices=False)
    h, z = (a @ left, x) if a.shape[1] <= b.shape[1] else (b @ right.T, y)
    alpha = np.abs(h.T @ (z - z.mean(0))).sum(1)
    return (alpha * rho).sum() / alpha.sum()


def hsic(k, j):
    """Biased estimator of Gretton et al., of centred Gram matrices."""
    return np.trace(k @ j)


def unbiased_hsic(k, j):
    """Unbiased estimator, Song et al. 2012, eq. 5."""
    n, k, j = len(k), k - np.diag(np.diag(k)), j - np.diag(np.diag(j))
    sums = k.sum() * j.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (k @ j).sum()
    return (np.trace(k @ j) + sums) / (n * (n - 3))


def cka(x, y, hsic=hsic):
    x, y = x - x.mean(0), y - y.mean(0)
    k, j = x @ x.T, y @ y.T
    return hsic(k, j) / np.sqrt(hsic(k, k) * hsic(j, j))


PLAIN = {
    "svcca": lambda x, y: mean_cca(x, y, 0.99), "pwcca": pwcca, "cca": mean_cca, "cka": cka,
    "unbiased_cka": lambda x, y: cka(x, y, unbiased_hsic),
}  # fmt: skip


def features(condition=1e3, rows=300, seed=0):
    """Two rotated layers with shared factors, large means and this ratio of singular values."""
    rng = np.random.default_rng(seed)
    causes = rng.standard_normal((rows, 12))
    made = []
    for size, mean in ((14, 3.0), (17, -200.0)):
        x = causes @ rng.standard_normal((12, size)) + 2 * rng.standard_normal((rows, size))
        turn = np.linalg.qr(rng.standard_normal((size, size)))[0]
        made.append(torch.tensor(x * np.geomspace(1, 1 / condition, size) @ turn + mean))
    return made


def streamed(measure, *layers, splits, measures=()):
    """The similarity of features in batches, which two processes read, and a third has none."""
    none, first, second = (moments_for(measures or [measure], 0.99) for _ in range(3))
    for number, parts in enumerate(zip(*(x.split(splits) for x in layers), strict=True)):
        (first if number % 3 else second).update(parts)
    first.merge(none)
    first.merge(second)
    assert first.count == len(layers[0])
    return matrix(first, measure, [0], [1])[0, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("measure", ["cca", "pwcca", "svcca"])
def test_rounding_errors_of_features_count_as_no_direction(measure, dtype):
    """Eight factors in 16 and 24 dimensions: the other directions are rounding errors."""
    torch.manual_seed(0)
    causes = torch.randn(1000, 8, dtype=torch.float64)
    x, y = (causes @ torch.randn(8, n, dtype=torch.float64) + 5 for n in (16, 24))
    found = similarity(x.to(dtype), y.to(dtype), measure, variance=1.0)
    assert found == pytest.approx(1.0, abs=2e-3)
    one = similarity(x[:, :1].to(dtype), torch.randn(1000, 9).to(dtype), measure)
    assert found.dtype == one.dtype == torch.float64 and one < 0.3


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("condition", [1, 1e3, 1e6])
def test_equals_numpy_on_all_features(measure, condition):
    for x, y in (features(condition), features(condition)[::-1]):
        expected = torch.tensor(PLAIN[measure](x.numpy(), y.numpy()))
        torch.testing.assert_close(similarity(x, y, measure), expected, **CLOSE)
        for splits, measures in (([1, 2, 0, 197, 100], ()), (7, ()), (37, MEASURES)):
            found = streamed(measure, x, y, splits=splits, measures=measures)
            torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("measure", MEASURES)
def test_degenerate_features_give_finite_similarities(measure):
    """Where other packages raise or return NaN, the remaining directions are compared."""
    rng = np.random.default_rng(0)
    wide = [rng.standard_normal((5, size)) for size in (30, 20)]
    few = PLAIN[measure](*wide) if "cka" in measure else 1.0  # five points always correlate fully
    assert similarity(*map(torch.tensor, wide), measure) == pytest.approx(few, abs=1e-9)
    x, y = features()
    repeated = torch.cat([x, x[:, :4] * 3 - 1, torch.ones(300, 2)], 1)
    for split in (300, 41):
        found = streamed(measure, repeated, y, splits=split)
        plain = PLAIN[measure](repeated.numpy(), y.numpy())
        assert found == pytest.approx(plain, abs=1e-9)
    if measure == "cca":
        assert found == pytest.approx(mean_cca(x.numpy(), y.numpy()), abs=1e-9)

    for value, dtype in product((1.0, 0.1, -1e6 / 3), (torch.float32, torch.float64)):
        constant = torch.full((300, 3), value, dtype=dtype)
        assert similarity(constant, y, measure) == 0.0
        assert streamed(measure, y, constant, splits=31) == 0.0
    assert similarity(torch.zeros(300, 3), torch.zeros(300, 3), measure) == 0.0
    assert similarity(y, y[:, :0], measure) == 0.0
    for size in (2.0**600, 2.0**-600):
        assert similarity(size * x, y, measure) == similarity(x, y, measure)
    assert similarity(x, x, measure) == pytest.approx(1.0, abs=1e-12)
    if measure != "unbiased_cka":
        assert similarity(x[:2], y[:2], measure) == pytest.approx(1.0, abs=1e-9)


def test_pwcca_where_correlations_are_equal():
    """With three equal correlations the solver's rotation within them has no effect."""
    torch.manual_seed(1)
    shared, *own = (torch.randn(200, n, dtype=torch.float64) for n in (3, 5, 6))
    x, y = (torch.cat([shared, z], 1) for z in own)
    x, y = (z @ torch.randn(z.shape[1], z.shape[1], dtype=torch.float64) for z in (x, y))
    expected = similarity(x, 2 * y.flip(1) - 1, "pwcca")
    for splits in (200, 50, [1, 199]):
        torch.testing.assert_close(streamed("pwcca", x, y, splits=splits), expected, **CLOSE)


def test_invalid_arguments_are_named():
    x = torch.randn(5, 3)
    for arguments, message in (
        ((x, torch.randn(4, 3)), "y must have shape"),
        ((x, x, "ckaa"), "measure must be"),
        ((x[:1], x[:1]), "at least two"),
        ((x[:3], x[:3], "unbiased_cka"), "at least four"),
        ((x, x.log().abs() * torch.nan), "y gave values that are not finite"),
    ):
        raises(message, similarity, *arguments)
    raises("variance", similarity, x, x, variance=0.0)
    raises(
        "at least two tokens are needed, got 0",
        check_moments,
        moments_for(["cca"], 0.9),
        ["cca"],
        [],
        "tokens",
    )
