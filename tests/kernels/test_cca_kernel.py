"""Products by integer digits, the polar factor by float16 pairs, and what is left in float64."""

import operator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from fastkd.kernels import cca as kernels
from fastkd.linalg import cca_solver
from fastkd.linalg.cca_solver import Options, Plan, Problem
from fastkd.linalg.roots import POLAR_STEPS, polar
from tests.support.compare import relative_error


@pytest.mark.parametrize("M, N, K", [(5, 3, 40), (40, 130, 9), (33, 32, 200), (20, 3, 1)])
@pytest.mark.parametrize("orders, precision", [(4, 2.0**-22), (5, 2.0**-28), (7, 2.0**-28)])
def test_products_by_digits(M, N, K, orders, precision, device):
    a = torch.randn(2, M, K, dtype=torch.float64, device=device)
    b = torch.randn(2, K, N, dtype=torch.float64, device=device).mT
    a, b = a * torch.logspace(0, 9, K).to(a), b / torch.logspace(0, 9, K).to(b)
    a[1], columns = a[1] * 1e-30, kernels.scale_of(a, -2)
    left, right = kernels.split(a, columns), kernels.split(b * columns)
    found = kernels.product(left, right, orders)
    for x, y in zip(found, a @ b.mT, strict=True):
        assert relative_error(x, y) <= precision
    assert torch.equal(found, kernels.product(left, kernels.split(b * columns), orders))


def test_a_gram_matrix_is_that_of_nearby_features(device):
    """All seven orders: the products of whole integers are exact, as are those of many rows."""
    x = torch.randint(-(2**30), 2**30, (1, 7, 33000), device=device).double()
    digits = kernels.split(x)
    gram = kernels.product(digits, digits, 7, symmetric=True)
    assert torch.equal(gram, gram.mT)
    rows = [list(map(int, row)) for row in x[0].tolist()]
    exact = [[float(sum(map(operator.mul, a, b))) for b in rows] for a in rows]
    assert relative_error(gram[0], torch.tensor(exact, dtype=torch.float64)) <= 1e-15
    one = torch.tensor([[[1.0, -1.0, 2.0**-29]]], dtype=torch.float64, device=device)
    digits = kernels.split(one)
    assert kernels.product(digits, digits, 7).item() == 2 + 2.0**-58


def test_nan_stays_in_its_matrix(device):
    x = torch.randn(3, 20, 20, dtype=torch.float64, device=device)
    x[1, 2, 3] = torch.nan
    x[2] = 0.0
    found = kernels.product(kernels.split(x), kernels.split(x))
    assert found[1, 2].isnan().all() and found[[0, 2]].isfinite().all()
    assert not found[2].any()


@pytest.mark.parametrize("rows, columns", [(40, 7), (7, 40), (140, 135)])
def test_polar_factor(rows, columns, device):
    m = torch.randn(2, rows, columns, dtype=torch.float64, device=device)
    m = m / torch.linalg.matrix_norm(m, ord=2, keepdim=True)
    if rows > 100:  # several tiles need few steps
        m = polar(m) * (1 + 0.1 * m)
    steps = POLAR_STEPS if rows <= 100 else POLAR_STEPS[-4:]
    assert relative_error(kernels.polar(m, steps), _steps(m, steps)) <= 3e-6


def _steps(m: Tensor, steps: list[tuple[float, float, float]]) -> Tensor:
    for a, b, c in steps:
        gram = m.mT @ m
        m = a * m + m @ (b * gram + c * gram @ gram)
    return m


class Float64Operations(TorchDispatchMode):
    """Number of operations of float64 products, factorisations and solvers."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        x = args[0]
        if not isinstance(x, Tensor) or x.dtype != torch.float64:
            return out
        if func._opname in ("bmm", "baddbmm", "mm", "baddbmm_"):
            left, right = args[-2:]
            self.number += 2 * left.numel() * right.shape[-1]
        elif "cholesky" in func._opname:
            self.number += x.numel() * x.shape[-1] // 3
        elif "solve_triangular" in func._opname:
            self.number += x.numel() * args[1].shape[-1]
        return out


def test_float64_has_a_fifteenth_of_the_operations(monkeypatch):
    """Six pairs of 4096 x 768: 2.2e10 for 3.7e11 of float64 products alone."""
    monkeypatch.setattr(kernels, "launch_kernel", lambda *_, **__: None)
    features = torch.empty(6, 4096, 768, device="meta")
    problem = Problem(features, features, None, Options((1e-4, 1e-4), kernels=True), True)
    with Float64Operations() as found:
        cca_solver.solve(problem)
    monkeypatch.setattr(cca_solver, "make_plan", lambda _: Plan(False, True))
    with Float64Operations() as alone:
        cca_solver.solve(problem)
    assert 0 < 15 * found.number <= alone.number
