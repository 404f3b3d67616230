"""csrc/linalg/roots.cu as nvcc compiles it, executed."""

import functools
import re

import pytest
import torch

import setup as recipe
from tests.test_extension import KINDS, check_eigh, matrix
from tools.cuda_source import ptx
from tools.ptx import Hazard, entries, launch

NVCC = recipe.find_nvcc()
pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc")
# Limits of shared memory: a GPU's, one without room for matrices, one for nothing.
ALL, VECTORS, NOTHING = 227 * 1024, 6 * 1024, 0


@functools.cache
def kernel(capability, small):
    lanes = ("Block", "Warp")[small]
    return next(text for name, text in entries(ptx(NVCC, capability)).items() if lanes in name)


def matrices(batch, n):
    x = torch.randn(batch, n, n, dtype=torch.float64)
    a = x @ x.mT / n + 0.1 * torch.eye(n, dtype=torch.float64)
    half = torch.linalg.qr(x[0]).Q[:, : (n + 1) // 2]
    a[0] = 2 * half @ half.mT  # eigenvalues of 2 and of 0
    return a


def decomposed(a, capability, most=ALL):
    """Eigenvalues and eigenvectors, started as roots.cu's launcher does.

    With less memory than a GPU has, small matrices have a block too: large ones take long.
    """
    batch, n, _ = a.shape
    small = n <= 32 and most == ALL
    matrix_bytes, vector_bytes = 16 * (4 * n if n < 4 else n * n), 8 * (6 * n + 32) + 16
    total, shared, scratch = matrix_bytes + vector_bytes, matrix_bytes + vector_bytes, None
    if total > most:
        shared = vector_bytes if vector_bytes <= most else 0
        scratch = torch.empty(batch * total, dtype=torch.uint8)
    vectors, values = torch.empty_like(a), torch.empty_like(a[..., 0])
    launch(
        kernel(capability, small),
        grid=(batch,),
        threads=32 if small else 512,
        shared=shared,
        args=[a, n, values, vectors, scratch, total, vector_bytes <= most],
        fresh=[x for x in (vectors, values, scratch) if x is not None],
    )
    return values, vectors


@pytest.mark.parametrize(
    ("n", "capability", "most"),
    [
        (1, 80, ALL), (2, 80, ALL), (5, 80, ALL), (20, 80, VECTORS), (19, 80, NOTHING),
        *(pytest.param(*large, ALL, marks=pytest.mark.thorough) for large in ((32, 90), (33, 80))),
    ],
)  # fmt: skip
def test_eigenvectors(n, capability, most):
    a = matrices(2, n)
    values, V = decomposed(a, capability, most)
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=2e-11)
    close(values, torch.linalg.eigvalsh(a))
    close(V * values[:, None, :] @ V.mT, a)
    close(V.mT @ V, torch.eye(n, dtype=torch.float64).expand_as(V))


@pytest.mark.parametrize("number", [0, 2, 4, 6, 8])
def test_a_missing_barrier_is_a_race(number, monkeypatch):
    parts = re.split(r"(bar\.sync\s+0;)", kernel(80, small=False))
    text = "".join(parts[: 2 * number + 1] + parts[2 * number + 2 :])
    monkeypatch.setattr("tests.ptx.test_roots.kernel", lambda capability, small: text)
    with pytest.raises(Hazard) as raised:
        decomposed(matrices(1, 5), 80, VECTORS)
    assert len(parts) == 19 and raised.value.kind == "race"


@pytest.mark.parametrize(("capability", "most"), [(80, ALL), (90, NOTHING)])
def test_eigenvectors_of_every_kind(capability, most):
    a = torch.stack([matrix(9, kind) for kind in KINDS])
    values, V = decomposed(a, capability, most)
    for each in zip(a, values, V, strict=True):
        check_eigh(*each)


def test_what_is_not_finite_is_nan():
    a = matrices(2, 6)
    a[1, 2, 3] = torch.inf
    for x in decomposed(a, 90):
        assert x[0].isfinite().all()
        assert x[1].isnan().all()
