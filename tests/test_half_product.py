"""Products of bfloat16 with float32 sums, on CPUs with and without bfloat16 instructions."""

import pytest
import torch

from fastkd._core import extension, products
from tests.support.compare import raises


def has(unit: str) -> bool:
    return extension.CPU and torch.ops.fastkd_cpp.has_half_product(unit)


NEEDS = "needs a processor that multiplies bfloat16"


def needs(unit: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not has(unit), reason=f"{NEEDS} by {unit}")


# AMX and avx512_bf16, each by itself, whichever `has_half_product` would choose.
units = [pytest.param(unit, marks=needs(unit)) for unit in ("tiles", "vectors")]
each_unit = pytest.mark.parametrize("unit", units)
# (M, K, N): one number, parts of tiles, more than a block, a sum in slices.
SIZES = [(1, 1, 1), (1, 7, 300), (16, 32, 16), (33, 65, 47), (600, 40, 530), (70, 3000, 40)]


def matrix(rows, columns, dtype, dense=True, seed=0):
    """A matrix stored by rows or columns within a larger one of NaN."""
    shape = (rows + 3, columns + 5) if dense else (columns + 5, rows + 3)
    whole = torch.full(shape, float("nan"))
    part = (whole if dense else whole.T)[1 : rows + 1, 2 : columns + 2]
    part.copy_(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)))
    whole = whole.to(dtype)
    return (whole if dense else whole.T)[1 : rows + 1, 2 : columns + 2]


def assert_product(out, a, b, start=0.0):
    """Sums of products of a, rounded to bfloat16, with b have float32's error, and out's."""
    a, b = a.bfloat16().double(), b.double()
    exact, once = start + a @ b, 1.01 * 2.0**-8 * (out.dtype == torch.bfloat16)
    rounding = 2.0**-20 * (abs(start) + a.abs() @ b.abs()) + once * exact.abs()
    assert ((out - exact).abs() <= rounding).all()


def multiply(out, a, b, add=False, unit="fastest"):
    torch.ops.fastkd_cpp.half_product(out, a, b, add, unit)
    return out


@each_unit
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_product(size, dtype, kind, unit):
    """In a part of a larger matrix; products in bfloat16 are rounded once and not added.

    On several threads it has the same bits.
    """
    M, K, N = size
    for i in range(8 if kind == torch.float32 else 2):
        a = matrix(M, K, dtype, bool(i & 1))
        b = matrix(K, N, torch.bfloat16, bool(i & 2), seed=1)
        around = torch.full((M + 2, N + 7), 3.0).to(kind)
        out, add = around[1:-1, 3:-4], bool(i & 4)
        assert_product(multiply(out, a, b, add, unit), a, b, 3.0 * add)
        out.fill_(3)
        assert (around == 3).all()
    before, new = torch.get_num_threads(), torch.empty(M, N, dtype=kind)
    try:
        torch.set_num_threads(3)
        several = multiply(new, a, b, unit=unit).clone()
    finally:
        torch.set_num_threads(before)
    assert torch.equal(multiply(new, a, b, unit=unit), several)
    if kind == torch.bfloat16:
        raises("sums are of float32", multiply, out, a, b, True, unit, error=RuntimeError)


@each_unit
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strided_and_empty_matrices_nan_and_inf(dtype, unit):
    a, b = torch.randn(5, 18)[:, ::2], torch.randn(9, 14).bfloat16()[:, ::2]
    out = torch.empty(5, 7)
    assert_product(multiply(out, a, b, unit=unit), a, b)
    assert_product(multiply(out, a[:, :0], b[:0], True, unit), a, b)
    assert (multiply(out, a[:, :0], b[:0], unit=unit) == 0).all()
    multiply(out[:0], a[:0], b, unit=unit)
    a, b = matrix(40, 70, dtype).clone(), matrix(70, 40, torch.bfloat16, seed=1)
    a[3, 5], a[20, 69], a[33, 0] = float("inf"), float("nan"), -float("inf")
    wanted = (a.bfloat16().double() @ b.double()).float()  # they stay in their row
    found = multiply(torch.empty(40, 40), a, b, unit=unit)
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_unit", [pytest.param(True, marks=needs("fastest")), False])
def test_products_with_and_without_matrix_instructions(has_unit, monkeypatch):
    monkeypatch.setattr(products, "_has_half_product", lambda: has_unit)
    monkeypatch.setattr(products, "TILE_ENTRIES", (200, 200))
    x, weight = matrix(20, 33, torch.bfloat16), matrix(50, 33, torch.bfloat16, seed=1)
    grad = matrix(20, 50, torch.bfloat16, seed=2).float()
    assert products.multiplied_in_half(x) == has_unit
    assert products.scaled_for_products(grad, x.dtype) == (grad, None)
    assert_product(products.product(x, weight), x, weight.T)
    assert_product(products.product_back(grad, weight), grad, weight)
    total = torch.full((50, 33), float("nan"))
    for times in (1, 2):
        products.add_product(total, grad, x, None, first=times == 1)
        assert_product(total / times, grad.T, x)
    narrow = torch.empty(50, 33, dtype=torch.bfloat16)
    products.add_product(narrow, grad, x, None, first=True)
    torch.testing.assert_close(narrow, (total / 2).bfloat16(), rtol=2.0**-7, atol=1e-4)


def as_on_a_gpu(monkeypatch, dtype, adds):
    """With CUDA's forms of mm and addmm, which give float32, written for the CPU."""
    multiply = torch.matmul

    def mm(a, b, *, out_dtype, out=None):
        assert a.dtype == b.dtype == dtype and out_dtype == torch.float32
        return multiply(a.float(), b.float(), out=out)

    def addmm(total, a, b, *, out_dtype, out):
        assert out is total and total.dtype == out_dtype
        return out.add_(mm(a, b, out_dtype=out_dtype))

    monkeypatch.setattr(products, "_on_gpu", lambda x: True)
    monkeypatch.setattr(products, "_uses_half_product", lambda x: False)
    monkeypatch.setattr(products, "_adds_to_float32", lambda device: adds)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_on_a_gpu(dtype, adds, monkeypatch):
    as_on_a_gpu(monkeypatch, dtype, adds)
    monkeypatch.setattr(products, "TILE_ENTRIES", (200, 200))
    x, grad = matrix(20, 33, dtype), matrix(20, 50, dtype, seed=1).float() * 1e-6
    scaled, factor = products.scaled_for_products(grad, dtype)
    assert scaled.dtype == dtype and (factor is None) == (dtype == torch.bfloat16)
    total = torch.full((50, 33), float("nan"))
    for times in (1, 2):
        products.add_product(total, scaled, x, factor, first=times == 1)
        wanted = times * grad.T.double() @ x.double()
        torch.testing.assert_close(total.double(), wanted, rtol=1e-2, atol=1e-7)


@pytest.mark.skipif(not extension.CPU, reason="needs the extension")
def test_unsupported_instructions_are_refused():
    given = torch.empty(3, 4), matrix(3, 5, torch.float32), matrix(5, 4, torch.bfloat16), False
    words = {"gpu": "unit: must be fastest, tiles or vectors, got gpu"}
    words |= {x: "does not multiply bfloat16" for x in ("tiles", "vectors") if not has(x)}
    for unit, problem in words.items():
        raises(problem, multiply, *given, unit, error=RuntimeError)
