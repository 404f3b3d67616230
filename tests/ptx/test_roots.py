"""csrc/linalg/roots.cu as nvcc compiles it, executed."""

import functools
import struct

import pytest
import torch

import setup as recipe
from tools.cuda_source import ptx
from tools.ptx import entries, launch

NVCC = recipe.find_nvcc()
pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc")
# Limits of shared memory: a GPU's, one without room for matrices, one for nothing.
ALL, VECTORS, NOTHING = 227 * 1024, 6 * 1024, 0


@functools.cache
def kernel(capability, dtype, small):
    letter, lanes = {torch.float32: "If", torch.float64: "Id"}[dtype], ("Block", "Warp")[small]
    texts = entries(ptx(NVCC, capability))
    return next(text for name, text in texts.items() if f"{letter}NS_" in name and lanes in name)


def matrices(batch, n, dtype):
    x = torch.randn(batch, n, n, dtype=torch.float64)
    a = x @ x.mT / n + 0.1 * torch.eye(n, dtype=torch.float64)
    a[0] = 2 * torch.eye(n)  # every eigenvalue the same
    return a.to(dtype)


def decomposed(a, capability, most=ALL, inverse=False, ridge=0.0, with_root=True):
    """Root, eigenvalues and eigenvectors, started as roots.cu's launcher does.

    With less memory than a GPU has, small matrices have a block too: large ones take long.
    """
    batch, n, _ = a.shape
    small = n <= 32 and most == ALL
    matrix_bytes, vector_bytes = 16 * (4 * n if n < 4 else n * n), 8 * (6 * n + 32) + 16
    total, shared, scratch = matrix_bytes + vector_bytes, matrix_bytes + vector_bytes, None
    if total > most:
        shared = vector_bytes if vector_bytes <= most else 0
        scratch = torch.empty(batch * total, dtype=torch.uint8)
    root, vectors, values = torch.empty_like(a), torch.empty_like(a), torch.empty_like(a[..., 0])
    launch(
        kernel(capability, a.dtype, small),
        grid=(batch,),
        threads=32 if small else 512,
        shared=shared,
        args=[a, n, struct.pack("?7xd", inverse, ridge), root if with_root else None, values,
              vectors, scratch, total, vector_bytes <= most],
        fresh=[x for x in (root, vectors, values, scratch) if x is not None],
    )  # fmt: skip
    return root, values, vectors


@pytest.mark.parametrize(
    ("n", "dtype", "capability", "most"),
    [
        (1, torch.float64, 80, ALL), (2, torch.float32, 90, ALL), (5, torch.float32, 80, ALL),
        (32, torch.float64, 90, ALL), (33, torch.float32, 80, ALL),
        (20, torch.float32, 80, VECTORS), (19, torch.float64, 80, NOTHING),
    ],
)  # fmt: skip
def test_roots(n, dtype, capability, most):
    a = matrices(2, n, dtype)
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-12}[dtype]
    root, values, vectors = decomposed(a, capability, most)
    wide = a.double()
    right = torch.linalg.eigvalsh(wide)
    torch.testing.assert_close(values.double(), right, rtol=tolerance, atol=tolerance)
    V, R = vectors.double(), root.double()
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=20 * tolerance)
    close(V * values.double()[:, None, :] @ V.mT, wide)
    close(V.mT @ V, torch.eye(n, dtype=torch.float64).expand_as(V))
    close(R @ R, wide)


@pytest.mark.parametrize("n", [7, 34])
def test_inverse_roots_and_plain_decompositions(n):
    a = matrices(1, n, torch.float64)
    a[0, 0, :] = a[0, :, 0] = 0  # singular
    root, _, _ = decomposed(a, 90, inverse=True)
    values, right_vectors = torch.linalg.eigh(a)
    factors = torch.where(values > 1e-12, values.rsqrt(), 0.0)
    right = right_vectors * factors[:, None, :] @ right_vectors.mT
    torch.testing.assert_close(root, right, rtol=1e-10, atol=1e-10)
    root, _, _ = decomposed(a, 90, inverse=True, ridge=0.5)
    right = right_vectors * (values + 0.5).rsqrt()[:, None, :] @ right_vectors.mT
    torch.testing.assert_close(root, right, rtol=1e-10, atol=1e-10)
    _, plain, _ = decomposed(a, 90, with_root=False)
    torch.testing.assert_close(plain, values, rtol=1e-12, atol=1e-12)


def test_what_is_not_finite_is_nan():
    a = matrices(2, 6, torch.float32)
    a[1, 2, 3] = torch.inf
    root, values, vectors = decomposed(a, 90)
    assert root[0].isfinite().all() and values[0].isfinite().all() and vectors[0].isfinite().all()
    assert root[1].isnan().all() and values[1].isnan().all() and vectors[1].isnan().all()
