"""Canonical correlation: a GPU's products, operators, layers of many sizes, the memory."""

import importlib
import warnings
from unittest import mock

import pytest
import torch
from torch import Tensor

from fastkd._core import extension
from fastkd.linalg import cca_solver
from fastkd.losses import cca
from fastkd.losses.cca import CCALoss, cca_loss
from tests.losses.cca import BLURRED, by_qr, hard_pair
from tests.support.compare import Operations, counted, relative_error, value_and_grad
from tests.support.draw import Draw
from tests.support.interpreter import MARKS

pytestmark = pytest.mark.usefixtures("tensors_on_device")
needs_extension = pytest.mark.skipif(not extension.CPU, reason="fastkd._C is not built")
# Allowed error of the gradient by products of float32 features.
PRECISION = dict.fromkeys(("independent", "equal", "geometric -3", "far", "small -2"), 1e-5)
PRECISION |= dict.fromkeys(("LayerNorm", "equal LayerNorm"), 1e-4)
PRECISION |= dict.fromkeys(("small -4", "small -6"), 1e-3) | dict.fromkeys(BLURRED, 1e-2)
SIZES = [(32, 256, 256), (96, 30, 40)]
OF_DIGITS = (30, "geometric -6"), (30, "LayerNorm")


@needs_extension
@pytest.mark.parametrize("kind", PRECISION)
@pytest.mark.parametrize("m, d_s, d_t", [*SIZES, (96, 40, 30)])
@pytest.mark.parametrize("digits", [False, pytest.param(True, marks=MARKS["triton"])])
@pytest.mark.left_out(
    where=lambda given: given["digits"] and (given["d_s"], given["kind"]) not in OF_DIGITS
)
def test_float32_is_accurate_by_products(m, d_s, d_t, kind, digits, device, monkeypatch):
    """As on a GPU, which must not wait."""
    if digits:
        importlib.import_module("fastkd.kernels.cca")
    monkeypatch.setattr(cca, "_uses_digits", lambda *_: digits)
    monkeypatch.setattr(cca_solver, "_rounding_of", lambda *_: None)
    by_products = torch.ops.fastkd.roots_by_products
    monkeypatch.setattr(cca_solver, "symmetric_roots", lambda a, _, digits: by_products(a, digits))
    with torch.device("cpu"):
        pair = hard_pair(Draw(0, "torch"), kind, m, d_s, d_t)[:2]
    student, teacher = (x.to(device, torch.float32) for x in pair)
    value, grad = value_and_grad(cca_loss, student, teacher)
    expected, expected_grad = by_qr(student, teacher, 1e-4)
    assert -value <= min(m - 1, d_s, d_t)
    assert relative_error(value, expected) <= 1e-6
    assert relative_error(grad, expected_grad) <= PRECISION[kind]


@needs_extension
@pytest.mark.parametrize(("m", "d"), [(32, 768), (4096, 64)])
def test_the_roots_are_one_call_of_the_operator(m, d):
    """Around it Cholesky factors and triangular systems alone."""
    with Operations() as found:
        value_and_grad(cca_loss, *torch.randn(2, m, d, device="cpu"))
    names = [str(name).removesuffix(".default") for name, _ in found.calls]
    assert names.count("fastkd.symmetric_roots") == 1
    around = {"fastkd.symmetric_roots", "aten.linalg_cholesky_ex", "aten.linalg_solve_triangular"}
    assert {name for name in names if "linalg" in name or "fastkd." in name} == around


def test_failed_factorisation_gives_nan():
    """LAPACK's partial result looks like a factor, and would be silently wrong."""
    good, bad = torch.eye(3), torch.tensor([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    factors = cca_solver._cholesky(torch.stack([good, bad]))
    assert torch.equal(factors[0], good) and factors[1].isnan().all()


def test_layers_of_one_size_are_one_batch():
    sizes = ((5, 6), (3, 4), (9, 2), (5, 6))
    layers = [[torch.randn(30, 4, size) for size in one] for one in zip(*sizes, strict=True)]
    with mock.patch.object(cca_solver, "solve", wraps=cca_solver.solve) as solve:
        CCALoss()(*layers)
    found = [call.args[0].student.shape for call in solve.call_args_list]
    assert found == [(2, 120, 5), (1, 120, 3), (1, 120, 9)]


def test_module_warns_once_with_the_numbers():
    with torch.device("cpu"):  # a mask on a GPU is not read, since that would synchronise
        student, teacher, full = torch.randn(3, 4, 5), torch.randn(3, 4, 6), torch.ones(3, 4)
    module, few = CCALoss(), full.clone()
    few[1, 2:] = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(student, teacher, full)  # 12 observations: 11 = Ds + Dt
        CCALoss(memory=2)(student[:1], teacher[:1])  # faded moments have full rank
        CCALoss(memory="auto")(student[:1], teacher[:1])
    with pytest.warns(UserWarning, match=r"10 observations for 5 \+ 6 .*; 2 of 5 correlations"):
        module(student, teacher, few)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(student, teacher, few)
    with pytest.warns(UserWarning, match=r"10 .* for 10 \+ 12 .*; 9 of 9 .*memory="):
        module(student.repeat(1, 1, 2), teacher.repeat(1, 1, 2), few)


# The memory; random calls have its steps.


def steps(count: int) -> list[tuple[Tensor, Tensor]]:
    """Batches (12, 1, D) of student and teacher."""
    student, teacher = (torch.randn(count, 12, 1, d, dtype=torch.float64) for d in (4, 6))
    return [(s.requires_grad_(), t) for s, t in zip(student, teacher, strict=True)]


def test_memory_in_state_dicts():
    pair = steps(1)[0]
    module, plain = CCALoss(memory=40, persistent=True), CCALoss(memory=40)
    for x in (module, plain):
        x(*pair)
    assert not plain.state_dict()
    assert all(x.dtype == torch.float64 for x in module.half()._memories[0])
    with pytest.raises(RuntimeError, match=r'Missing key.*"memory.batches"'):
        module.load_state_dict(plain.state_dict())
    module.reset_parameters()
    assert list(module.state_dict()) == ["memory.batches"]


def test_memory_compiles():
    module, twin = CCALoss(memory=40), CCALoss(memory=40)
    pairs = steps(3)
    for x in (module, twin):
        x(*pairs[0])
    compiled, graphs = counted(lambda s, t: module(s, t))
    for pair in pairs[1:]:
        assert relative_error(compiled(*pair), twin(*pair)) <= 1e-12
    assert len(graphs) == 1
    assert relative_error(module._memories[0].scatter_ts, twin._memories[0].scatter_ts) <= 1e-12
