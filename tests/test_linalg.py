"""Symmetric matrix roots: values, derivatives where eigenvalues repeat or vanish, bad input."""

import pytest
import torch
from torch import Tensor

from fastkd.linalg import inv_sqrtm, inv_sqrtm_ref, sqrtm, sqrtm_ref

from .compare import DTYPES, assert_accurate, relative_error

SIZES = (1, 2, 3, 16, 31, 32, 33, 64, 127, 128, 129, 256)


def with_eigenvalues(values: Tensor) -> Tensor:
    """Random symmetric float64 matrices with these eigenvalues (*, n)."""
    vectors = torch.linalg.qr(torch.randn(*values.shape, values.shape[-1]).double()).Q
    a = (vectors * values.double().unsqueeze(-2)) @ vectors.mT
    return (a + a.mT) / 2


def spectrum(n: int, condition: float) -> Tensor:
    return torch.logspace(0, -torch.tensor(condition).log10().item(), n, dtype=torch.float64)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("condition", [1.0, 1e4, 1e8])
def test_roots_have_the_accuracy_of_their_dtype(n, condition):
    a = with_eigenvalues(spectrum(n, condition))
    for dtype, product_error, inverse_error in (
        (torch.float32, 1e-5, 1e-6 * condition),
        (torch.float64, 1e-13, 1e-14 * condition),
    ):
        root, inverse = sqrtm(a.to(dtype)), inv_sqrtm(a.to(dtype))
        assert root.dtype == inverse.dtype == dtype
        assert relative_error(root.double() @ root.double(), a) <= product_error
        if inverse_error < 1:
            assert relative_error(inverse, inv_sqrtm_ref(a)) <= inverse_error
        assert inverse.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_roots_match_the_reference_in_every_dtype(dtype):
    a = with_eigenvalues(torch.rand(5, 9) + 0.5).to(dtype)
    working = torch.float64 if dtype == torch.float64 else torch.float32
    assert sqrtm(a).dtype == inv_sqrtm(a).dtype == sqrtm_ref(a).dtype == working
    assert_accurate(sqrtm(a), sqrtm_ref(a.double()), working)
    assert_accurate(inv_sqrtm(a, ridge=0.1), inv_sqrtm_ref(a.double(), ridge=0.1), working)


@pytest.mark.parametrize(
    "values",
    [[1.0] * 6, [0.0] * 6, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0], [0.0], [5.0], [0.0, 3.0]],
    ids=["identity", "zero", "rank-deficient", "one-zero", "one", "two"],
)
def test_repeated_and_zero_eigenvalues(values):
    values = torch.tensor(values, dtype=torch.float64)
    for a in (with_eigenvalues(values), values.diag()):
        for dtype in (torch.float32, torch.float64):
            x = a.to(dtype).requires_grad_()
            root, inverse = sqrtm(x), inv_sqrtm(x)
            assert relative_error(root @ root, a) <= 1e-6
            projection = with_rank(a)
            assert relative_error(inverse @ x.detach() @ inverse, projection) <= 1e-5
            root.sum().backward()
            inverse.sum().backward()
            assert x.grad.isfinite().all()


def with_rank(a: Tensor) -> Tensor:
    """The projector on the range of ``a``."""
    return torch.linalg.pinv(a, hermitian=True, rtol=1e-6) @ a


@pytest.mark.parametrize("n", [1, 2, 5])
def test_gradcheck(n):
    a = with_eigenvalues(torch.rand(2, n) + 0.5).requires_grad_()
    assert torch.autograd.gradcheck(sqrtm, (a,))
    assert torch.autograd.gradcheck(inv_sqrtm, (a,))
    assert torch.autograd.gradcheck(lambda x: inv_sqrtm(x, ridge=0.3), (a,))


def test_gradient_equals_finite_differences_at_repeated_eigenvalues():
    """Where autograd through eigh gives NaN."""
    for a in (3 * torch.eye(4).double(), with_eigenvalues(torch.tensor([1.0, 1.0, 4.0, 4.0]))):
        a = a.double().requires_grad_()
        assert torch.autograd.gradcheck(sqrtm, (a,))
        assert torch.autograd.gradcheck(inv_sqrtm, (a,))


def test_root_gradient_solves_the_lyapunov_equation():
    """S² = A, so S·dA + dA·S = G for the gradient dA that belongs to an upstream G."""
    a = with_eigenvalues(torch.tensor([0.5, 2.0, 2.0, 2.0, 7.0])).requires_grad_()
    upstream = torch.randn(5, 5).double()
    root = sqrtm(a)
    (da,) = torch.autograd.grad(root, a, upstream)
    assert relative_error(root @ da + da @ root, (upstream + upstream.mT) / 2) <= 1e-12


def test_inverse_root_gradient_along_matrices_of_the_same_rank():
    """A(t) = F(t)F(t)ᵀ keeps its rank, and the pseudo-inverse root follows it smoothly."""
    factor, step = torch.randn(2, 5, 3).double()
    weights = torch.randn(5, 5).double()

    def value(t: float) -> Tensor:
        moved = factor + t * step
        return (inv_sqrtm(moved @ moved.mT) * weights).sum()

    a = (factor @ factor.mT).requires_grad_()
    (da,) = torch.autograd.grad((inv_sqrtm(a) * weights).sum(), a)
    slope = (da * (step @ factor.mT + factor @ step.mT)).sum()
    assert relative_error(slope, (value(1e-5) - value(-1e-5)) / 2e-5) <= 1e-6


def test_backward_twice_and_non_unit_upstream():
    a = with_eigenvalues(torch.rand(3, 6) + 0.1).requires_grad_()
    root = sqrtm(a)
    upstream = torch.randn_like(root)
    first = torch.autograd.grad(root, a, upstream, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(root, a, upstream)[0])
    reference = torch.autograd.grad(sqrtm_ref(a), a, upstream)[0]
    assert relative_error(first, reference) <= 1e-9


def test_gradient_comes_in_the_dtype_of_the_input():
    a = with_eigenvalues(torch.rand(4) + 0.5).bfloat16().requires_grad_()
    sqrtm(a).sum().backward()
    assert a.grad.dtype == torch.bfloat16


def test_only_the_symmetric_part_counts():
    a = with_eigenvalues(torch.rand(6) + 0.5)
    skew = torch.randn(6, 6).double()
    assert relative_error(sqrtm(a + skew - skew.mT), sqrtm(a)) <= 1e-12


@pytest.mark.parametrize("root", [sqrtm, inv_sqrtm])
def test_nan_and_inf_stay_in_their_matrix(root):
    a = with_eigenvalues(torch.rand(4, 5) + 0.5)
    clean = root(a)
    a[1, 2, 3] = torch.nan
    a[3, 0, 0] = torch.inf
    a.requires_grad_()
    result = root(a)
    assert result[[1, 3]].isnan().all()
    assert torch.equal(result[[0, 2]], clean[[0, 2]])
    result.sum().backward()
    assert a.grad[[0, 2]].isfinite().all()
    assert a.grad[[1, 3]].isnan().all()


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 0), (2, 0, 4, 4)])
def test_empty(shape):
    a = torch.zeros(shape, requires_grad=True)
    for root in (sqrtm(a), inv_sqrtm(a)):
        assert root.shape == a.shape
        root.sum().backward()
    assert a.grad.shape == a.shape


def test_large_batch_and_strides():
    a = with_eigenvalues(torch.rand(500, 4) + 0.1)
    strided = a.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert relative_error(sqrtm(strided), sqrtm_ref(a)) <= 1e-12
    assert relative_error(inv_sqrtm(strided.expand(2, -1, -1, -1))[1], inv_sqrtm_ref(a)) <= 1e-11


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_tiny_and_huge_matrices(scale):
    a = with_eigenvalues(torch.rand(8) + 0.5)
    small = (a * scale).float().requires_grad_()
    assert relative_error(sqrtm(small) / scale**0.5, sqrtm_ref(a)) <= 1e-5
    assert relative_error(inv_sqrtm(small) * scale**0.5, inv_sqrtm_ref(a)) <= 1e-5
    sqrtm(small).sum().backward()
    assert small.grad.isfinite().all()


def test_autocast_changes_nothing():
    a = with_eigenvalues(torch.rand(6) + 0.5).float().requires_grad_()
    plain = sqrtm(a)
    (plain_grad,) = torch.autograd.grad(plain.sum(), a)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = sqrtm(a)
        (cast_grad,) = torch.autograd.grad(cast.sum(), a)
    assert torch.equal(plain, cast)
    assert torch.equal(plain_grad, cast_grad)


def test_compiles_without_graph_breaks():
    a = with_eigenvalues(torch.rand(3, 6) + 0.5)

    def value(x: Tensor) -> Tensor:
        return sqrtm(x).sum() + inv_sqrtm(x, ridge=0.1).sum()

    eager, compiled = a.clone().requires_grad_(), a.clone().requires_grad_()
    value(eager).backward()
    torch.compile(value, fullgraph=True, backend="aot_eager")(compiled).backward()
    assert relative_error(compiled.grad, eager.grad) <= 1e-12


def test_second_derivative_raises():
    a = with_eigenvalues(torch.rand(3) + 0.5).requires_grad_()
    (da,) = torch.autograd.grad(sqrtm(a).square().sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        da.sum().backward()


def test_bad_input():
    with pytest.raises(ValueError, match=r"a must hold square matrices .* \(2, 3\)"):
        sqrtm(torch.ones(2, 3))
    with pytest.raises(ValueError, match="a must have at least 2 dimensions"):
        inv_sqrtm(torch.ones(3))
    with pytest.raises(TypeError, match="a must be bfloat16"):
        sqrtm(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="ridge must be at least 0"):
        inv_sqrtm(torch.eye(2), ridge=-1.0)
