"""Symmetric matrix roots: parity with float64 eigh, derivatives at repeated eigenvalues, errors."""

import functools

import pytest
import torch
from torch import Tensor

from fastkd.linalg.roots import inv_sqrtm, inv_sqrtm_ref, sqrtm, sqrtm_ref
from tests.support.compare import DTYPES, assert_accurate, count_graphs, relative_error

# Around the sizes at which blocks of the extension and of LAPACK change.
SIZES = (1, 2, 3, 16, 31, 32, 33, 64, 127, 128, 129)
KINDS = [f"condition {c:g}" for c in (1.0, 1e2, 1e4, 1e6, 1e8)]
KINDS += ["diagonal", "repeated", "rank-deficient", "zero"]


def with_eigenvalues(values: Tensor) -> Tensor:
    """Random symmetric float64 matrices with these eigenvalues (*, n)."""
    return _rotated(
        values, torch.linalg.qr(torch.randn(*values.shape, values.shape[-1]).double()).Q
    )


def spectrum(n: int, condition: float) -> Tensor:
    return torch.logspace(0, -torch.tensor(condition).log10().item(), n, dtype=torch.float64)


@functools.cache
def matrix(n: int, kind: str) -> Tensor:
    """A float64 matrix of each of KINDS; matrices of one size share their eigenvectors."""
    if kind.startswith("condition"):
        return _rotated(spectrum(n, float(kind.removeprefix("condition "))), _basis(n))
    values = {
        "diagonal": torch.linspace(0.1, 1.0, n),
        "repeated": torch.arange(n).remainder(3) + 1.0,
        "rank-deficient": (torch.arange(n) % 3 == 0) * torch.linspace(1.0, 0.01, n),
        "zero": torch.zeros(n),
    }[kind].double()
    return values.diag() if kind == "diagonal" else _rotated(values, _basis(n))


@functools.cache
def _basis(n: int) -> Tensor:
    seeded = torch.Generator().manual_seed(n)
    return torch.linalg.qr(torch.randn(n, n, generator=seeded, dtype=torch.float64)).Q


def _rotated(values: Tensor, vectors: Tensor) -> Tensor:
    a = (vectors * values.double().unsqueeze(-2)) @ vectors.mT
    return (a + a.mT) / 2


def assert_inverse_root(inverse: Tensor, values: Tensor, vectors: Tensor, unit: float) -> None:
    """Error at most condition·unit, against float64 eigh of the input with its ridge."""
    condition = (values[-1] / values[0]).item() if len(values) else 1.0
    oracle = (vectors * values.rsqrt()) @ vectors.mT
    assert relative_error(inverse, oracle) <= condition * unit


# Hidden sizes of models take seconds for each case and use no other method.
PARITY = [(n, kind) for n in SIZES for kind in KINDS]
PARITY += [(256, "rank-deficient"), (512, "repeated"), (768, "condition 1e+08")]


@pytest.mark.parametrize("n, kind", PARITY)
def test_parity_with_float64_eigh(n, kind, device):
    for dtype, product_error, unit in ((torch.float32, 1e-5, 1e-6), (torch.float64, 1e-13, 1e-14)):
        a = matrix(n, kind).to(dtype)
        root = sqrtm(a.to(device)).cpu()
        inverse = inv_sqrtm(a.to(device)).cpu()
        assert root.dtype == inverse.dtype == dtype
        assert inverse.isfinite().all()
        assert relative_error(root.double() @ root.double(), a) <= product_error

        values, vectors = torch.linalg.eigh(a.double())
        roundings = 64 if dtype == torch.float64 else 8  # the documented threshold
        keep = values > roundings * torch.finfo(dtype).eps * values[-1]
        assert_inverse_root(inverse, values[keep], vectors[:, keep], unit)
        if values[0] > 0:
            assert_inverse_root(inverse, values, vectors, unit)
        ridge = 1e-4 * max(1.0, values[-1].item())
        inverse = inv_sqrtm(a.to(device), ridge).cpu()
        assert_inverse_root(inverse, values + ridge, vectors, unit)


# Larger sizes are slow: one condition number only.
@pytest.mark.left_out(where=lambda given: given["n"] > 129 and given["condition"][-2:] != "06")
@pytest.mark.parametrize("condition", ["condition 100", "condition 10000", "condition 1e+06"])
@pytest.mark.parametrize("n", [8, 33, 64, 65, 96, 97, 128, 129, 700])
def test_float32_error_is_at_most_that_of_rounding_the_matrix(n, condition, device):
    """Values and gradients within ten times that error, at sizes around each change of method."""
    exact = matrix(n, condition)
    upstream = torch.randn(n, n).double()
    upstream = upstream.float().double()

    def run(a: Tensor, root, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        a = a.to(device, dtype).requires_grad_()
        result = root(a)
        return result, torch.autograd.grad(result, a, upstream.to(device, dtype))[0]

    for root in (sqrtm, inv_sqrtm):
        results = run(exact.float(), root, torch.float32)
        rounded = run(exact.float(), root, torch.float64)
        for result, right, before in zip(
            results, rounded, run(exact, root, torch.float64), strict=True
        ):
            assert relative_error(result, right) <= 10 * relative_error(right, before)


def root_gradient_residual(a: Tensor, upstream: Tensor, root: Tensor, da: Tensor) -> float:
    """S² = A: S·dA + dA·S = G for the gradient dA that belongs to an upstream G."""
    return relative_error(root @ da + da @ root, (upstream + upstream.mT) / 2)


def inverse_gradient_residual(a: Tensor, upstream: Tensor, inverse: Tensor, da: Tensor) -> float:
    """X = S⁻¹: the same with −X·G·X instead of G."""
    root = a @ inverse
    return root_gradient_residual(a, -inverse @ upstream @ inverse, root, da)


@pytest.mark.left_out(where=lambda given: given["n"] > 129 and given["kind"] != "repeated")
@pytest.mark.parametrize("kind", ["condition 1", "condition 100", "condition 10000", "repeated"])
@pytest.mark.parametrize("n", [1, 3, 33, 64, 65, 128, 129, 512])
def test_gradients_solve_their_lyapunov_equations(n, kind, device):
    condition = float(kind.split()[1]) if " " in kind else 3.0
    upstream = torch.randn(n, n).double()
    for dtype, unit in ((torch.float32, 5e-6), (torch.float64, 1e-13)):
        for root, residual in (
            (sqrtm, root_gradient_residual),
            (inv_sqrtm, inverse_gradient_residual),
        ):
            a = matrix(n, kind).to(device, dtype).requires_grad_()
            (da,) = torch.autograd.grad(root(a), a, upstream.to(device, dtype))
            a = a.detach().double().cpu()
            exact = root(a)  # its own parity is tested above
            assert residual(a, upstream, exact, da.double().cpu()) <= condition * unit


@pytest.mark.parametrize("dtype", DTYPES)
def test_roots_match_the_reference_in_every_dtype(dtype, device):
    a = with_eigenvalues(torch.rand(5, 9) + 0.5).to(device, dtype).requires_grad_()
    working = torch.float64 if dtype == torch.float64 else torch.float32
    assert sqrtm(a).dtype == inv_sqrtm(a).dtype == sqrtm_ref(a).dtype == working
    assert_accurate(sqrtm(a), sqrtm_ref(a.double()), working)
    assert_accurate(inv_sqrtm(a, ridge=0.1), inv_sqrtm_ref(a.double(), ridge=0.1), working)
    assert all(torch.autograd.grad(f(a).sum(), a)[0].dtype == dtype for f in (sqrtm, inv_sqrtm))


@pytest.mark.parametrize(
    "values",
    [[0.7], [0.6, 1.3], [3.0] * 4, [1.0, 1.0, 4.0, 4.0], [1.0, 2.0, 2.0, 2.0, 2.0 + 1e-12]],
    ids=str,
)
def test_gradient_equals_finite_differences(values, device):
    """At repeated eigenvalues autograd through eigh gives NaN or rounding error."""
    values = torch.tensor(values).double()
    a = torch.stack([values.diag(), with_eigenvalues(values)]).to(device).requires_grad_()
    for root in (sqrtm, inv_sqrtm, functools.partial(inv_sqrtm, ridge=0.3)):
        assert torch.autograd.gradcheck(root, (a,))


def test_inverse_root_gradient_along_matrices_of_the_same_rank(device):
    """A(t) = F(t)F(t)ᵀ keeps its rank, and the pseudo-inverse root follows it smoothly."""
    factor, step = torch.randn(2, 5, 3).double().to(device)
    weights = torch.randn(5, 5).double().to(device)

    def value(t: float) -> Tensor:
        moved = factor + t * step
        return (inv_sqrtm(moved @ moved.mT) * weights).sum()

    a = (factor @ factor.mT).requires_grad_()
    (da,) = torch.autograd.grad((inv_sqrtm(a) * weights).sum(), a)
    slope = (da * (step @ factor.mT + factor @ step.mT)).sum()
    assert relative_error(slope, (value(1e-5) - value(-1e-5)) / 2e-5) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_eigenvalues_are_left_out_at_any_size(dtype, device):
    """A projection is its own pseudo-inverse; 1 over the rounding error of a 0 would be 1e7."""
    halves = torch.arange(96).remainder(2).expand(5, 96)
    a = with_eigenvalues(halves).to(device, dtype).requires_grad_()
    for root in (sqrtm, inv_sqrtm):
        result = root(a)
        (da,) = torch.autograd.grad(result.sum(), a)
        assert da.norm(dim=(1, 2)).max() <= 96
    assert relative_error(result, a) <= 100 * torch.finfo(dtype).eps


def test_only_the_symmetric_part_has_an_effect(device):
    a = with_eigenvalues(torch.rand(6) + 0.5).to(device)
    skew = torch.randn(6, 6).double().to(device)
    assert relative_error(sqrtm(a + skew - skew.mT), sqrtm(a)) <= 1e-12


@pytest.mark.parametrize("root", [sqrtm, inv_sqrtm])
def test_nan_and_inf_stay_in_their_matrix(root, device):
    a = with_eigenvalues(torch.rand(4, 5) + 0.5).to(device)
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
def test_empty(shape, device):
    a = torch.zeros(shape, requires_grad=True, device=device)
    for root in (sqrtm(a), inv_sqrtm(a)):
        assert root.shape == a.shape
        root.sum().backward()
    assert a.grad.shape == a.shape


def test_roots_are_equal_under_autocast(device):
    a = with_eigenvalues(torch.rand(6) + 0.5).to(device, torch.float32).requires_grad_()
    plain = sqrtm(a)
    (plain_grad,) = torch.autograd.grad(plain.sum(), a)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        cast = sqrtm(a)
        (cast_grad,) = torch.autograd.grad(cast.sum(), a)
    assert torch.equal(plain, cast)
    assert torch.equal(plain_grad, cast_grad)


def test_compiles_once_for_all_sizes(device):
    sizes = [(2, 4), (3, 5), (4, 12), (19, 57), (2, 130), (3, 140)]
    graphs = count_graphs(
        lambda x: sqrtm(x).sum() + inv_sqrtm(x, ridge=0.1).sum(),
        ([with_eigenvalues(torch.rand(size) + 0.5).to(device).requires_grad_()] for size in sizes),
        rtol=1e-9,
        atol=1e-9,
    )
    assert graphs <= 3  # the first size, a middle one, and one beyond the extension


@pytest.mark.parametrize("n", [3, 200])
def test_inference_mode_and_the_meta_device(n, device):
    with torch.inference_mode():
        a = with_eigenvalues(torch.rand(2, n) + 0.5).to(device)
    learnt = torch.zeros_like(a, requires_grad=True)
    for root in (sqrtm, inv_sqrtm):
        assert relative_error(root(a), root(a.clone())) == 0
        root(a + learnt).sum().backward()
        shapes = torch.empty(2, n, n, device="meta", requires_grad=True)
        root(shapes).sum().backward()
        assert shapes.grad.shape == shapes.shape


def test_bad_input():
    with pytest.raises(ValueError, match=r"a must hold square matrices .* \(2, 3\)"):
        sqrtm(torch.ones(2, 3))
    with pytest.raises(ValueError, match="a must have at least 2 dimensions"):
        inv_sqrtm(torch.ones(3))
    with pytest.raises(TypeError, match="a must be bfloat16"):
        sqrtm(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="ridge must be at least 0"):
        inv_sqrtm(torch.eye(2), ridge=-1.0)
