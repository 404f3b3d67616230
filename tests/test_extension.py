"""Matrix roots: the compiled ones against float64 eigh, registration, inference mode.

The CUDA kernels as nvcc compiles them: tests/ptx/test_roots.py.
"""

import itertools

import pytest
import torch

import setup as recipe
from fastkd._core import extension
from fastkd.linalg.roots import inv_sqrtm, sqrtm
from tests.support.compare import raises, relative_error
from tools import cuda_source

needs_extension = pytest.mark.skipif(
    not extension.CPU, reason="fastkd._C is not built (python setup.py build_ext --inplace)"
)


def with_eigenvalues(values: torch.Tensor) -> torch.Tensor:
    """Random symmetric float64 matrices with these eigenvalues (*, n)."""
    vectors = torch.linalg.qr(torch.randn(*values.shape, values.shape[-1]).double()).Q
    a = (vectors * values.double().unsqueeze(-2)) @ vectors.mT
    return (a + a.mT) / 2


DEVICE = torch.device("cuda" if extension.CUDA and torch.cuda.is_available() else "cpu")
CONDITIONS = {f"condition {c:g}": c for c in (1.0, 1e2, 1e4, 1e6, 1e8)}
KINDS = [*CONDITIONS, "diagonal", "repeated", "rank-deficient", "zero"]


def matrix(n: int, kind: str) -> torch.Tensor:
    """A float64 matrix of each of KINDS."""
    if kind == "diagonal":
        return torch.linspace(0.1, 1.0, n).double().diag()
    falling = torch.linspace(0, 1, n, dtype=torch.float64)
    values = {
        "repeated": torch.arange(n).remainder(3) + 1.0,
        "rank-deficient": (torch.arange(n) % 3 == 0) * torch.linspace(1.0, 0.01, n),
        "zero": torch.zeros(n),
    }.get(kind, CONDITIONS.get(kind, 1.0) ** -falling)
    return with_eigenvalues(values)


def check_eigh(a: torch.Tensor, values: torch.Tensor, vectors: torch.Tensor) -> None:
    """A = V diag(λ) Vᵀ with ascending λ and orthogonal V."""
    assert (values.diff() >= 0).all()
    assert relative_error((vectors * values.unsqueeze(-2)) @ vectors.mT, a) <= 1e-13
    identity = torch.eye(a.shape[-1]).double()
    assert relative_error(vectors.mT @ vectors, identity.expand_as(a)) <= 1e-13


def eigh(a: torch.Tensor) -> list[torch.Tensor]:
    return [x.cpu() for x in torch.ops.fastkd.eigh(a.to(DEVICE))]


@needs_extension
@pytest.mark.parametrize("n", [0, 1, 2, 33, 129, 300])
def test_eigenvalues_and_vectors(n):
    """Also for matrices that are not positive definite."""
    a = torch.randn(3, n, n).double()
    a[1] = a[1].tril().mT @ a[1].tril()
    a[2] = torch.eye(n)
    found = eigh(a + a.mT)
    assert relative_error(found[0], torch.linalg.eigvalsh(a + a.mT)) <= 1e-13
    check_eigh(a + a.mT, *found)
    for kind in KINDS if n else ():
        a = matrix(n, kind)
        check_eigh(a, *eigh(a))


@needs_extension
@pytest.mark.parametrize("kept, smallest", [(2, 0.01), (3, 0.01), (3, 1.0)])
def test_matrices_of_low_rank_converge(kept, smallest):
    """Two thirds or half of the couplings are rounding errors, which no shift resolves."""
    values = (torch.arange(300) % kept == 0) * torch.linspace(1.0, smallest, 300)
    a = with_eigenvalues(values.expand(8, 300))
    check_eigh(a, *eigh(a))


@needs_extension
@pytest.mark.parametrize("exponent", [-1060, -950, -600, 600, 1018])
def test_scales_by_powers_of_two_change_no_bit(exponent):
    """Matrices below the least normal number are zero."""
    a = with_eigenvalues(torch.linspace(1.0, 0.1, 40).expand(2, 40)).to(DEVICE)
    a[1] = a[1].tril(3).triu(-3)
    scale = torch.tensor(2.0).double().ldexp(torch.tensor(exponent - 1)).to(DEVICE)
    (values, vectors), (scaled, same) = map(torch.ops.fastkd.eigh, (a, a * scale))
    if exponent == -1060:
        assert not scaled.any() and torch.equal(same, torch.eye(40).to(same).expand_as(a))
    else:
        assert torch.equal(scaled, values * scale) and torch.equal(same, vectors)


@needs_extension
def test_nan_and_inf_stay_in_their_matrix():
    for value, n in itertools.product((torch.nan, torch.inf, -torch.inf), (1, 2, 5, 40)):
        a = with_eigenvalues(torch.rand(4, n) + 0.5)
        a[2, n - 1, 0] = value
        for x in eigh(a):
            assert x[2].isnan().all() and x[[0, 1, 3]].isfinite().all()


@needs_extension
def test_invalid_input_is_named_and_the_operator_registered():
    for bad, problem in (
        (torch.eye(2, dtype=torch.float32), "a must be float64"),
        (torch.ones(2, 3).double(), "a must hold square matrices"),
        (torch.ones(3).double(), "a must have at least 2 dimensions"),
    ):
        raises(problem, torch.ops.fastkd.eigh, bad, error=RuntimeError)
    a = with_eigenvalues(torch.rand(3, 6) + 0.5).to(DEVICE)
    for x in (a, a[:0]):
        torch.library.opcheck(torch.ops.fastkd.eigh.default, (x,))


@pytest.mark.slow
@pytest.mark.thorough
def test_cuda_source_compiles_without_spills():
    nvcc = recipe.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not installed, so csrc/linalg/roots.cu was not compiled")
    assert not cuda_source.problems(nvcc, ["90"])  # `make test-all` compiles for all


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
