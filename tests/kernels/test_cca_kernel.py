"""Products by integer digits, and what is left in float64."""

import operator
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from fastkd.kernels import cca as kernels
from fastkd.kernels.cca import digit_product
from fastkd.linalg import cca_solver
from fastkd.linalg.cca_solver import Options, Problem
from tests.support.compare import Operations, relative_error

pytestmark = pytest.mark.usefixtures("tensors_on_device")


@pytest.mark.parametrize("M, N, K", [(5, 3, 40), (40, 130, 9), (33, 32, 200), (20, 3, 1)])
def test_products_by_digits(M, N, K):
    a = torch.randn(2, M, K, dtype=torch.float64)
    b = torch.randn(2, N, K, dtype=torch.float64).mT
    a[0] *= torch.logspace(-9, 9, M).to(a)[:, None]
    a[1] *= 1e-30
    for x, y in zip(digit_product(a, b), a @ b, strict=True):
        assert relative_error(x, y) <= 1e-14
    gram = digit_product(a, a.mT, True)
    assert torch.equal(gram, gram.mT) and relative_error(gram, a @ a.mT) <= 1e-14


def test_products_of_whole_numbers_are_exact():
    """Also of more rows than are added at a time."""
    size = 1, 3, kernels.MOST_TERMS.value + 100
    x = torch.randint(-(2**30), 2**30, size).double()
    rows = [list(map(int, row)) for row in x[0].tolist()]
    exact = [[float(sum(map(operator.mul, a, b))) for b in rows] for a in rows]
    found = digit_product(x, x.mT, True)
    assert relative_error(found[0], torch.tensor(exact, dtype=torch.float64)) <= 1e-15
    one = torch.tensor([[[1.0, -1.0, 2.0**-26]]], dtype=torch.float64)
    assert digit_product(one, one.mT).item() == 2 + 2.0**-52


def test_nan_stays_in_its_matrix():
    x = torch.randn(3, 20, 20, dtype=torch.float64)
    x[1, 2, 3] = torch.nan
    x[2] = 0.0
    found = digit_product(x, x)
    assert found[1, 2].isnan().all() and found[0].isfinite().all() and (found[2] == 0).all()


@pytest.mark.thorough
def test_the_first_call_of_a_process_registers_the_product():
    code = "import torch, fastkd; x = torch.randn(9, 4); fastkd.cca_loss(x, x, backend='triton')"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_all_large_products_are_of_digits(monkeypatch):
    """Six pairs of 4096 x 768, whose roots are products too."""
    monkeypatch.setattr(kernels, "launch_kernel", lambda *_, **__: None)
    roots = torch.ops.fastkd.roots_by_products
    monkeypatch.setattr(cca_solver, "symmetric_roots", lambda a, _, digits: roots(a, digits))
    features = torch.empty(6, 4096, 768, device="meta")
    problem = Problem(features, features, None, Options((1e-4, 1e-4), digits=True), True)
    with Operations() as found:
        cca_solver.solve(problem)
    assert [args[1:] for func, args in found.calls if func is roots.default] == [(True,)]
    products = [args[-2:] for func, args in found.calls if "bmm" in str(func)]
    assert max(a.numel() * b.shape[-1] for a, b in products) <= 6 * 768**2
