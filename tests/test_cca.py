"""Canonical correlation against eqs. 4-7, a float64 SVD of QR factors, and its invariances."""

import copy
import importlib
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fastkd._core import extension
from fastkd.linalg import cca_solver
from fastkd.losses import cca
from fastkd.losses.cca import CCALoss, canonical_correlations, cca_loss, cca_loss_ref
from tests.losses.cca import by_qr
from tests.support.compare import (
    DTYPES,
    assert_accurate,
    count_graphs,
    counted,
    every_two_meet,
    relative_error,
)
from tests.support.interpreter import MARKS


@pytest.fixture(autouse=True)
def _tensors_on_device(device):
    """Create every tensor on the suite's device."""
    with device:
        yield


@pytest.fixture
def tensors_on_cpu():
    """Create tensors on the CPU, for tests of behaviour on the CPU only."""
    with torch.device("cpu"):
        yield


needs_extension = pytest.mark.skipif(not extension.CPU, reason="fastkd._C is not built")
# How roots are made: eigenvectors, or a GPU's products of float64 matrices or of their digits.
SOLVERS = ["eigenvectors", pytest.param("products", marks=needs_extension)]
SOLVERS += [pytest.param("digits", marks=[needs_extension, *MARKS["triton"]])]


@pytest.fixture
def solver(request, monkeypatch):
    """Solver of a test's calls; that of a GPU must not wait."""
    if request.param != "eigenvectors":
        monkeypatch.setattr(cca_solver, "_rounding_of", lambda *_: None)
        monkeypatch.setattr(
            cca_solver,
            "symmetric_roots",
            lambda a, zero, digits: torch.ops.fastkd.roots_by_products(a, digits),
        )
        if request.param == "digits":
            monkeypatch.setattr(
                cca, "_uses_digits", lambda *_: bool(importlib.import_module("fastkd.kernels.cca"))
            )
    return request.param


MASKS = {
    "none": lambda shape: None,
    "full": lambda shape: torch.ones(shape, dtype=torch.bool),
    "random": lambda shape: torch.rand(shape) > 0.3,
    "alternating": lambda shape: torch.arange(shape[-1]).remainder(2).expand(shape).long(),
    "empty": lambda shape: torch.zeros(shape, dtype=torch.bool),
    "one": lambda shape: (torch.arange(shape[-1]) == 1).expand(shape),
    "uneven": lambda shape: (
        torch.arange(shape[-1]) < torch.linspace(0, shape[-1], shape[0]).unsqueeze(-1)
    ),
}


def related(*shape: int, dims: tuple[int, int], dtype=torch.float64) -> tuple[Tensor, Tensor]:
    """Student and teacher features that share some directions and have large means."""
    shared = torch.randn(*shape, 3, dtype=torch.float64)
    student, teacher = (
        shared @ torch.randn(3, d, dtype=torch.float64)
        + torch.randn(*shape, d, dtype=torch.float64)
        + 5 * torch.randn(d, dtype=torch.float64)
        for d in dims
    )
    return student.to(dtype), teacher.to(dtype)


def value_and_grad(loss, student: Tensor, *args, **options) -> tuple[Tensor, Tensor]:
    student = student.detach().clone().requires_grad_()
    value = loss(student, *args, **options)
    upstream = torch.linspace(0.5, 2, value.numel(), dtype=value.dtype).view(value.shape)
    return value.detach(), torch.autograd.grad(value, student, upstream)[0]


def with_correlations(values: Tensor, dims: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Float32 features of 300 observations with these correlations."""
    x = torch.randn(300, sum(dims)).double()
    x = torch.linalg.qr(x - x.mean(0)).Q * 300**0.5
    student, teacher = x[:, : dims[0]], x[:, dims[0] :].clone()
    teacher[:, : len(values)] = (
        values * student[:, : len(values)] + (1 - values**2).sqrt() * teacher[:, : len(values)]
    )
    turns = (torch.linalg.qr(torch.randn(d, d).double()).Q for d in dims)
    return (student @ next(turns)).float(), (teacher @ next(turns)).float()


# By hand: one dimension each, so the correlation is |Pearson|, shrunk by the ridges.


def test_one_dimension_is_pearson_by_hand(backend):
    student = torch.tensor([[1.0], [2.0], [3.0]])
    teacher = torch.tensor([[1.0], [3.0], [2.0]])
    # centred (-1,0,1) and (-1,1,0): variances 1 and 1, covariance 1/2
    assert cca_loss(student, teacher, ridge=0.0, backend=backend).item() == pytest.approx(-0.5)
    assert cca_loss_ref(student, teacher, ridge=0.0).item() == pytest.approx(-0.5)
    shrunk = -0.5 / (2.0**0.5 * 4.0**0.5)
    assert cca_loss(student, teacher, ridge=(1.0, 3.0)).item() == pytest.approx(shrunk)
    assert cca_loss_ref(student, teacher, ridge=(1.0, 3.0)).item() == pytest.approx(shrunk)
    assert canonical_correlations(student, teacher).tolist() == pytest.approx([0.5])


@pytest.mark.parametrize("dims", [(4, 4), (3, 7), (7, 3), (12, 12), (20, 15)])
def test_correlations_equal_the_svd_of_qr_factors(dims):
    x, y = related(2, 30, dims=dims)
    q_x, q_y = (torch.linalg.qr(z - z.mean(-2, keepdim=True)).Q for z in (x, y))
    expected = torch.linalg.svdvals(q_x.mT @ q_y)
    actual = canonical_correlations(x, y)
    assert actual.shape == (2, min(29, *dims))
    assert relative_error(actual, expected[..., : actual.shape[-1]]) <= 1e-12
    assert relative_error(canonical_correlations(x.float(), y.float()), expected) <= 1e-6
    if max(dims) < 30:
        loss = cca_loss(x, y, ridge=0.0, reduction="none")
        assert relative_error(-loss, expected.sum(-1)) <= 1e-12


@pytest.mark.parametrize(
    "mask, dims, options",
    every_two_meet(
        list(MASKS),
        [(5, 5), (4, 7), (8, 3)],
        [{}, {"ridge": (0.5, 0.01)}, {"top_k": 2, "ridge": 0.1}],
    ),
)
def test_matches_the_reference(mask, dims, options, backend):
    student, teacher = related(4, 20, dims=dims)
    mask = MASKS[mask]((4, 20))
    for reduction in ("sum", "mean", "none"):
        actual = value_and_grad(
            cca_loss, student, teacher, mask, **options, reduction=reduction, backend=backend
        )
        expected = value_and_grad(
            cca_loss_ref, student, teacher, mask, **options, reduction=reduction
        )
        assert_accurate(actual[0], expected[0], torch.float64)
        if mask is None or mask.sum(-1).min() > max(dims):  # otherwise eigh's derivative is NaN
            assert_accurate(actual[1], expected[1], torch.float64)
        assert actual[1].isfinite().all()


def features_of_kind(kind: str, m: int, d: int) -> tuple[Tensor, Tensor]:
    """Float32 features with a hard spectrum of their covariances or of their correlations."""
    teacher = torch.randn(m, d)
    student = 0.5 * teacher + torch.randn(m, d)
    if kind == "independent":
        student = torch.randn(m, d)
    elif kind.startswith("geometric"):
        values = torch.logspace(0, float(kind.split()[1]), d, dtype=torch.float64)
        student, teacher = (
            ((x * values) @ torch.linalg.qr(torch.randn(d, d).double()).Q).float()
            for x in (student, teacher)
        )
    elif kind == "low rank":
        teacher, student = (x[:, : d // 4] @ torch.randn(d // 4, d) for x in (teacher, student))
    elif kind == "means of 300 deviations":
        student, teacher = student + 300, teacher + 300
    if "LayerNorm" in kind:  # their sum is constant, but for rounding
        student, teacher = (F.layer_norm(x, (d,)) for x in (student, teacher))
    if "equal" in kind:
        student = teacher.clone()
    return student, teacher


KINDS_OF_FEATURES = ["independent", "geometric -3", "geometric -6", "low rank"]
KINDS_OF_FEATURES += ["means of 300 deviations", "equal", "LayerNorm", "equal LayerNorm"]


def check_against_svd(student, teacher, value, grad, precision, ridge=1e-4) -> None:
    """Against `by_qr`, which counts correlations of float32's rounding error as 0."""
    eps = torch.finfo(torch.float32).eps
    expected, expected_grad = by_qr(student, teacher, ridge, zero=eps)
    assert relative_error(value, expected) <= 1e-6
    assert relative_error(grad, 0.5 * expected_grad) <= precision


@pytest.mark.parametrize("kind", KINDS_OF_FEATURES)
@pytest.mark.parametrize("m, d", [(512, 128), (200, 128), (128, 128), (32, 256), (96, 30)])
@pytest.mark.parametrize("solver", SOLVERS, indirect=True)
@pytest.mark.left_out(
    where=lambda given: (
        given["solver"] == "digits"
        and (given["m"] != 96 or given["kind"] not in ("geometric -6", "low rank", "LayerNorm"))
    )
)
def test_float32_is_accurate(m, d, kind, solver):
    """Also 768 features of 4096 tokens, which a CPU reads in chunks."""
    student, teacher = features_of_kind(kind, m, d)
    value, grad = value_and_grad(cca_loss, student, teacher)
    assert -value <= min(m - 1, d)
    if solver == "eigenvectors":
        precision = 1e-5
    else:  # which blur correlations near rounding, many of two kinds
        blurred = kind in ("geometric -6", "low rank")
        precision = 1e-2 if blurred else 1e-4 if "LayerNorm" in kind else 1e-5
    check_against_svd(student, teacher, value, grad, precision)


@pytest.mark.usefixtures("tensors_on_cpu")
@pytest.mark.parametrize("kind", ["independent", "LayerNorm", "low rank", "equal"])
@pytest.mark.parametrize("chunk", [2**21, 3000])
def test_large_items_are_read_in_chunks(kind, chunk, monkeypatch):
    """Float32 products where they suffice; masked rows are left out."""
    monkeypatch.setattr(cca_solver, "CHUNK", chunk)
    m, d = (1100, 256) if chunk > 3000 else (300, 20)
    monkeypatch.setattr(cca_solver, "LARGE_ITEM", m * d)
    student, teacher = (torch.stack([x, x.flip(0)]) for x in features_of_kind(kind, m, d))
    mask = torch.ones(2, m)
    mask[1, m - 40 :] = 0
    student[1, m - 40 :] = torch.nan
    value, grad = value_and_grad(cca_loss, student, teacher, mask, reduction="none")
    upstreams = torch.tensor([0.5, 2.0])
    for i, end in enumerate((m, m - 40)):
        own = grad[i, :end] * 0.5 / upstreams[i]
        check_against_svd(student[i, :end], teacher[i, :end], value[i], own, 1e-5)
    assert not grad[1, m - 40 :].any()


@pytest.mark.parametrize("smallest", [1e-2, 2e-4, 5e-5, 1e-6])
@pytest.mark.parametrize("dims", [(30, 30), (30, 40), (40, 30)])
@pytest.mark.parametrize("solver", SOLVERS, indirect=True)
@pytest.mark.left_out(
    where=lambda given: (
        given["solver"] == "digits"
        and (given["dims"] != (30, 40) or given["smallest"] not in (2e-4, 1e-6))
    )
)
def test_gradient_where_a_correlation_is_small(smallest, dims, solver):
    """The direction of a small correlation enters the gradient with the same length as others."""
    correlations = torch.linspace(1, 0.1, 30).double()
    correlations[-1] = smallest
    student, teacher = with_correlations(correlations, dims)
    value, grad = value_and_grad(cca_loss, student, teacher)
    expected, expected_grad = by_qr(student, teacher, 1e-4)
    assert relative_error(value, expected) <= 1e-6
    assert relative_error(grad, 0.5 * expected_grad) <= 1e-3


@pytest.mark.parametrize("ridge", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("m, dtype", [(200, torch.float64), (30, torch.float32)])
@pytest.mark.parametrize("solver", SOLVERS[:2], indirect=True)
def test_a_large_column_does_not_change_the_ridge_of_others(m, ridge, dtype, solver):
    student, teacher = (torch.randn(m, 48).to(dtype).double() for _ in range(2))
    for x in (student, teacher):
        x[:, 1:40] = x[:, :1] + ridge**0.5 * x[:, 1:40]  # variances as small as the ridge
        x[:, 0] *= 1e3
    student, teacher = student.to(dtype), teacher.to(dtype)
    value, grad = value_and_grad(cca_loss, student, teacher, ridge=ridge)
    error = 1e-6 if dtype == torch.float64 else 1e-3
    expected, expected_grad = by_qr(student, teacher, ridge)
    assert relative_error(value, expected) <= error
    if ridge >= 1e-4 or dtype == torch.float64:
        assert relative_error(grad, 0.5 * expected_grad) <= error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("m", [200, 12])
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e9])
def test_directions_without_variance_have_no_gradient(m, scale, dtype):
    """Columns of the student, or of both, that are there twice: moving them apart does nothing."""
    student, teacher = related(m, dims=(20, 30), dtype=dtype)
    student, teacher = scale * student, scale * teacher
    student[:, 10:] = student[:, :10]
    for both in (False, True):
        if both:
            teacher[:, 15:] = teacher[:, :15]
        _, grad = value_and_grad(cca_loss, student, teacher)
        apart = grad[:, 10:] - grad[:, :10]
        assert apart.norm() <= 1e-5 * grad.norm()


@needs_extension
@pytest.mark.usefixtures("tensors_on_cpu")
@pytest.mark.parametrize("d", [64, 384, 768])
@pytest.mark.parametrize("m", [32, 4096])
def test_the_roots_are_one_call_of_the_operator(m, d):
    """Around it Cholesky factors and triangular systems alone."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "linalg" in str(func) or "fastkd." in str(func):
                names.append(str(func).removesuffix(".default"))
            return func(*args, **kwargs or {})

    names: list[str] = []
    student, teacher = related(m, dims=(d, d), dtype=torch.float32)
    with Seen():
        value_and_grad(cca_loss, student, teacher)
    assert names.count("fastkd.symmetric_roots") == 1
    around = {"fastkd.symmetric_roots", "aten.linalg_cholesky_ex", "aten.linalg_solve_triangular"}
    assert set(names) == around


# Without a ridge every correlation of more columns than rows is 1: a corner of the loss.
@pytest.mark.left_out(where=lambda given: given["ridge"] == 0.0 and max(given["dims"]) > 20)
@pytest.mark.parametrize("dims", [(5, 5), (4, 7), (40, 30), (30, 40), (20, 40)])
@pytest.mark.parametrize("ridge", [1.0, (0.1, 0.3), 0.0])
def test_gradcheck(dims, ridge, backend):
    student, teacher = related(21, dims=dims)
    student = student[:21].requires_grad_()
    for mask in (None, torch.arange(21) != 3):
        assert torch.autograd.gradcheck(
            lambda s, mask=mask: cca_loss(s, teacher, mask, ridge=ridge, backend=backend),
            (student,),
            fast_mode=True,
        )


def test_failed_factorisation_gives_nan():
    """LAPACK's partial result looks like a factor, and would be silently wrong."""
    good, bad = torch.eye(3), torch.tensor([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    factors = cca_solver._cholesky(torch.stack([good, bad]))
    assert torch.equal(factors[0], good)
    assert factors[1].isnan().all()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("shape", [(8, 32, 64), (16, 64, 96), (5, 80, 40)])
def test_items_do_not_depend_on_their_neighbours(shape, seed, backend):
    """Items with unequal numbers of observations, fewer and more than dimensions."""
    torch.manual_seed(seed)
    batch, m, _ = shape
    if backend == "triton":
        batch = 2
    student, teacher = torch.randn(2, batch, *shape[1:])
    mask = torch.arange(m) < torch.randint(2, m + 1, (batch, 1))
    found = value_and_grad(cca_loss, student, teacher, mask, reduction="none", backend=backend)
    for i, real in enumerate(mask.sum(-1).tolist()):
        alone = value_and_grad(
            cca_loss, student[i, :real], teacher[i, :real], reduction="none", backend=backend
        )
        upstream = torch.linspace(0.5, 2, batch)[i]
        assert relative_error(found[0][i], alone[0]) <= 1e-6
        assert relative_error(found[1][i, :real], 2 * upstream * alone[1]) <= 1e-5
        assert not found[1][i, real:].any()


def test_an_item_whose_ridge_is_lost_changes_no_other():
    """Its variances' rounding errors are larger, so it alone has eigenvectors."""
    student, teacher = torch.randn(2, 3, 40, 8)
    expected = value_and_grad(cca_loss, student, teacher, reduction="none")
    student[1] *= 1e9
    found = value_and_grad(cca_loss, student, teacher, reduction="none")
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x[[0, 2]], y[[0, 2]])
    assert relative_error(found[0][1], expected[0][1]) <= 1e-4


@pytest.mark.parametrize(
    "size, value, dtype",
    every_two_meet(
        [(30, (4, 5)), (4, (6, 5)), (5, (3, 8))],
        [torch.nan, torch.inf],
        [torch.float32, torch.float64],
    ),
)
def test_nan_in_real_data_gives_nan(size, value, dtype, backend):
    student, teacher = related(3, size[0], dims=size[1], dtype=dtype)
    for side in (student, teacher):
        bad = side.clone()
        bad[1, 2, 0] = value
        pair = (bad, teacher) if side is student else (student, bad)
        loss, grad = value_and_grad(cca_loss, *pair, reduction="none", backend=backend)
        assert loss.isnan().tolist() == [False, True, False]
        assert grad[[0, 2]].isfinite().all()
        assert grad[1].isnan().all()
        assert canonical_correlations(*pair)[1].isnan().all()


# Every pair of these.
@pytest.mark.parametrize(
    "shape, ridge, dtype, kind",
    every_two_meet(
        [(30, (4, 5)), (4, (6, 5)), (5, (3, 8)), (1, (3, 3)), (2, (1, 1))],
        [0.0, 1e-4],
        [torch.float32, torch.float64],
        ["zero", "constant", "duplicated", "tiny", "huge", "equal"],
    ),
)
def test_extreme_features_stay_finite_and_bounded(shape, ridge, dtype, kind, backend):
    m, dims = shape
    student, teacher = related(m, dims=dims, dtype=dtype)
    if kind == "zero":
        student = torch.zeros_like(student)
    elif kind == "constant":
        student = torch.full_like(student, 0.1)
    elif kind == "duplicated":
        student = student[:, :1].expand_as(student).contiguous()
    elif kind == "tiny":
        student, teacher = student * 1e-15, teacher * 1e-15
    elif kind == "huge":
        student, teacher = student * 1e15, teacher * 1e15
    elif kind == "equal":
        student, teacher = student[:, :3], student[:, :3].clone()
    loss, grad = value_and_grad(cca_loss, student, teacher, ridge=ridge, backend=backend)
    assert grad.isfinite().all()
    bound = min(m - 1, *dims) if kind not in ("duplicated",) else min(m - 1, 1)
    assert 0 <= -loss <= bound + (0 if kind != "duplicated" else 1e-3)
    correlations = canonical_correlations(student, teacher, ridge=ridge)
    assert (correlations <= 1).all()
    assert (correlations >= 0).all()
    if kind in ("zero", "constant"):
        assert abs(loss.item()) <= 1e-5
    if m == 1:
        assert loss == 0
        assert grad.count_nonzero() == 0


@pytest.mark.parametrize(
    ("shape", "dims"),
    [((0, 8), (3, 3)), ((2, 0), (3, 3)), ((2, 0, 8), (3, 3))]
    + [((2, 5), dims) for dims in ((0, 3), (3, 0), (0, 0))],
)
@pytest.mark.parametrize("options", [{}, {"ridge": 0.0}, {"top_k": 2}, {"reduction": "mean"}])
def test_empty(shape, dims, options, backend):
    student, teacher = (torch.randn(*shape, d) for d in dims)
    loss = cca_loss(student.requires_grad_(), teacher, **options, backend=backend)
    loss.backward()
    assert loss.item() == 0 and student.grad.count_nonzero() == 0
    correlations = canonical_correlations(student, teacher)
    assert correlations.shape == (*shape[:-1], max(0, min(shape[-1] - 1, *dims)))


# Every value of each once; test_promises.py compiles them with a mask and without an option.
@pytest.mark.parametrize(
    ("options", "masked", "few"),
    [({}, False, True), ({"ridge": 0.0}, True, False), ({"top_k": 2}, True, True)],
)
def test_compiles_once_for_all_sizes(options, masked, few, backend):
    """Four sizes of observations and of leading dimensions."""
    dims = (30, 40) if few else (4, 5)

    def loss(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
        return cca_loss(student, teacher, mask, **options, backend=backend)

    def calls() -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        for i in range(4):
            student, teacher = related(2 + i, 7 + i, dims=dims)
            mask = torch.rand(2 + i, 7 + i) > 0.2 if masked else None
            yield student.requires_grad_(), teacher, mask

    assert count_graphs(loss, calls(), rtol=1e-9, atol=1e-9) <= 2


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16), dims=st.tuples(st.integers(1, 6), st.integers(1, 6)))
def test_invariant_under_invertible_maps_at_small_ridge(seed, dims):
    torch.manual_seed(seed)
    student, teacher = related(40, dims=dims)
    maps = [torch.linalg.qr(torch.randn(d, d).double()).Q * (0.5 + torch.rand(d)) for d in dims]
    moved = student @ maps[0] + torch.randn(dims[0]), teacher @ maps[1] - 3.0
    before, after = (cca_loss(*pair, ridge=1e-9) for pair in ((student, teacher), moved))
    assert relative_error(after, before) <= 1e-6
    assert (
        relative_error(canonical_correlations(*moved), canonical_correlations(student, teacher))
        <= 1e-10
    )


def test_bad_input():
    x, y = torch.randn(2, 6, 3), torch.randn(2, 6, 4)
    with pytest.raises(ValueError, match=r"teacher must have shape \(2, 6, 4\)"):
        cca_loss(x, torch.randn(2, 5, 4))
    with pytest.raises(ValueError, match="student must have at least 2 dimensions"):
        cca_loss(x[0, 0], y[0, 0])
    with pytest.raises(ValueError, match="ridge must be at least 0"):
        cca_loss(x, y, ridge=-1e-3)
    with pytest.raises(ValueError, match="ridge must be a number or a pair"):
        cca_loss(x, y, ridge=(1.0, 2.0, 3.0))
    with pytest.raises(ValueError, match="top_k must be at least 1"):
        cca_loss(x, y, top_k=0)
    with pytest.raises(ValueError, match="did you mean 'mean'"):
        cca_loss(x, y, reduction="maen")
    for options in ({"ridge": 0.0}, {"top_k": 1}):
        with pytest.raises(ValueError, match="ridge=0 and top_k need eigenvectors"):
            cca_loss(x, y, **options, backend="triton")
    with pytest.raises(ValueError, match=r"y must have shape \(2, 6, 4\)"):
        canonical_correlations(x, torch.randn(2, 5, 4))
    with pytest.raises(ValueError, match="pool must be one of"):
        CCALoss(pool="max")
    with pytest.raises(ValueError, match="2 layers but teacher has 1"):
        CCALoss()([x, x], [y])


# The module: pooling, several layers, the warning.


def hidden_states(b: int = 30, n: int = 4, dims: tuple[int, int] = (5, 6)):
    student, teacher = related(b, n, dims=dims)
    mask = torch.arange(n) < torch.randint(1, n + 1, (b, 1))
    return student, teacher, mask


LAYER_SIZES = ((5, 6), (3, 4), (9, 2), (5, 6))


def layers_of_any_size(b: int, n: int) -> tuple[list[Tensor], list[Tensor]]:
    students, teachers = zip(*(related(b, n, dims=dims) for dims in LAYER_SIZES), strict=True)
    return [s.requires_grad_() for s in students], list(teachers)


def count_calls(monkeypatch) -> list[torch.Size]:
    calls = []
    solve = cca_solver.solve

    def counted(problem):
        calls.append(problem.student.shape)
        return solve(problem)

    monkeypatch.setattr(cca_solver, "solve", counted)
    return calls


def test_layers_under_autocast_of_the_other_half_precision():
    student, teacher = (
        torch.randn(2, 4, 8, 3).bfloat16().unbind(),
        torch.randn(2, 4, 8, 3).bfloat16().unbind(),
    )
    loss = CCALoss(ridge=0.1)(student, teacher)
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(CCALoss(ridge=0.1)(student, teacher), loss)


def test_module_averages_layers_of_any_size(monkeypatch, device):
    students, teachers = layers_of_any_size(30, 4)
    module = CCALoss(ridge=1e-3, top_k=3)
    expected = sum(module(s, t) for s, t in zip(students, teachers, strict=True)) / 4
    calls = count_calls(monkeypatch)
    assert relative_error(module(students, teachers), expected) <= 1e-12
    if device.type == "cpu":
        assert calls == [(2, 120, 5), (1, 120, 3), (1, 120, 9)]
    else:
        assert calls == [(4, 120, 9)]


@pytest.mark.filterwarnings("ignore:CCALoss")
@pytest.mark.parametrize(
    "ridges, top_k, masked, items",
    every_two_meet(
        [(0.1, 30), (0.1, 1), ((1e-3, 1e-2), 30), ((1e-3, 1e-2), 1), (0.0, 30)],
        [None, 2],
        [True, False],
        ["as it is", "one by one"],
    ),
)
def test_layers_padded_to_one_size(ridges, top_k, masked, items, monkeypatch):
    """One batch for all layers: the same values and gradients as one call per size."""
    ridge, b = ridges
    students, teachers = layers_of_any_size(b, 8)
    mask = torch.rand(b, 8) > 0.2 if masked else None
    module = CCALoss(ridge=ridge, top_k=top_k)

    def run() -> tuple[Tensor, ...]:
        loss = module(students, teachers, mask)
        return loss.detach(), *torch.autograd.grad(loss, students)

    monkeypatch.setattr(cca, "_pads_layers", lambda x: False)
    expected = run()
    calls = count_calls(monkeypatch)
    monkeypatch.setattr(cca, "_pads_layers", lambda x: True)
    if items == "one by one":
        monkeypatch.setattr(cca_solver, "LARGE_ITEM", 1)
    actual = run()
    assert calls[0] == (4, 8 * b, 9)
    assert relative_error(actual[0], expected[0]) <= 1e-10
    for grad, expected_grad in zip(actual[1:], expected[1:], strict=True):
        assert relative_error(grad, expected_grad) <= 1e-7


@pytest.mark.filterwarnings("ignore:CCALoss")
@pytest.mark.parametrize(("dtype", "m"), [*((dtype, 4) for dtype in DTYPES), (torch.float32, 400)])
def test_padded_layers_are_bounded_by_their_own_rank(dtype, m, monkeypatch):
    """Equal features correlate fully; rounding, here as large as 1, must not lift the sum."""
    sizes = (5, 7, 383)
    layers = [torch.randn(1, m, d).to(dtype) for d in sizes]
    polar = cca_solver._polar
    monkeypatch.setattr(cca_solver, "_polar", lambda *args: (1 + polar(*args)[0], polar(*args)[1]))
    monkeypatch.setattr(cca, "_pads_layers", lambda x: True)
    module, calls = CCALoss(ridge=1e-9), count_calls(monkeypatch)
    for missing in (0, 1):
        mean = module(layers, layers, torch.arange(m)[None] >= missing)
        assert -3 * mean.item() == pytest.approx(sum(min(m - 1 - missing, d) for d in sizes))
    assert calls == [(3, m, 383)] * 2


def test_module_warns_once_with_the_numbers():
    with torch.device("cpu"):  # a mask on a GPU is not read, since that would synchronise
        student, teacher, mask = hidden_states(b=3, n=4)  # sizes 5 and 6
    module, full = CCALoss(), torch.ones_like(mask)
    few = full.clone()
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
    with pytest.warns(UserWarning, match=r"10 .* for 4 \+ 6 .*; 1 of 4 .*memory="):
        module(student[..., :4], teacher, few)


# Memory of earlier batches.


def batches_of(count: int, m: int, dims: tuple[int, int] = (4, 6)) -> list[tuple[Tensor, Tensor]]:
    """Batches (m, 1, D) of features that share directions; their means differ by batch."""
    return [(s[:, None], t[:, None]) for s, t in (related(m, dims=dims) for _ in range(count))]


def test_only_training_updates_the_memory():
    (s, t), (s2, t2) = batches_of(2, 20)
    module = CCALoss(memory=50)
    module(s, t)  # no gradient
    module.eval()(s.requires_grad_(), t)
    with torch.no_grad():
        module.train()(s, t)
    assert module._memories[0].observations.item() == 0
    module(s, t)
    assert module._memories[0].observations.item() == 20
    before = [x.clone() for x in module._memories[0]]
    nan = s2.clone()
    nan[3] = torch.nan
    assert module(nan.requires_grad_(), t2).isnan()
    assert all(map(torch.equal, before, module._memories[0]))
    assert module(s2, t2).isfinite()


def test_auto_memory_holds_three_times_the_dimensions_less_the_batch():
    module = CCALoss(memory="auto")
    for student, teacher in batches_of(4, 12):
        module(student.requires_grad_(), teacher)
    assert module._memories[0].observations.item() == pytest.approx(3 * 10 - 12)


def test_memory_in_copies_and_state_dicts():
    first, second, third = batches_of(3, 12)
    module = CCALoss(memory=40, persistent=True)
    plain = CCALoss(memory=40)
    for x in (module, plain):
        x(first[0].requires_grad_(), first[1])
    assert not plain.state_dict()
    twin, resumed = copy.deepcopy(module), CCALoss(memory=40, persistent=True)
    resumed.load_state_dict(copy.deepcopy(module.state_dict()))
    expected = [module(s.requires_grad_(), t) for s, t in (second, third)]
    for other in (twin, resumed, plain):
        assert all(
            torch.equal(other(*pair), x) for pair, x in zip((second, third), expected, strict=True)
        )
    module.half()
    assert all(x.dtype == torch.float64 for x in module._memories[0])
    module.reset_parameters()
    assert list(module.state_dict()) == ["memory.batches"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"memory.batches"'):
        module.load_state_dict(plain.state_dict())
    twin(*first)
    with pytest.raises(ValueError, match="memory: it holds moments of other layers"):
        twin(first[0][..., :2], first[1])
    with pytest.raises(ValueError, match="memory must be at least 0"):
        CCALoss(memory=-1)


def test_gradient_of_faded_moments_is_that_of_their_value():
    """Faded moments have full rank: their correlations are as many as dimensions."""
    module, mixing = CCALoss(memory=20), torch.randn(24, 24).double()
    for _ in range(12):
        student = torch.randn(8, 1, 24).double().requires_grad_()
        value = module(student, student.detach() @ mixing)
    assert 23 < -value <= 24


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_memory_under_activation_checkpointing(use_reentrant):
    """A forward pass that is computed again has the same memory, and updates it once."""
    module, twin = CCALoss(memory=30), CCALoss(memory=30)
    for student, teacher in batches_of(4, 20):
        student.requires_grad_()
        (wanted,) = torch.autograd.grad(twin(student, teacher), student)
        checkpoint(module, student, teacher, use_reentrant=use_reentrant).backward()
        assert torch.equal(student.grad, wanted)
    module.state_dict()
    module.eval()(student, teacher)
    assert all(map(torch.equal, module._memories[0], twin._memories[0]))


def test_memory_of_several_processes(monkeypatch):
    """Two processes with the same rows: moments are added over them before the memory's."""

    class Twice:
        size = 2
        max = staticmethod(lambda rows, device: rows)
        sum = staticmethod(lambda x: 2 * x)

    module, whole = CCALoss(memory=40, gather=True), CCALoss(memory=40)
    monkeypatch.setattr(cca_solver, "moments_are_less", lambda *_: True)
    for student, teacher in batches_of(3, 12):
        both = [torch.cat([x, x]) for x in (student, teacher)]
        expected, expected_grad = value_and_grad(whole, *both)
        with monkeypatch.context() as patched:
            patched.setattr(cca, "ranks_of", lambda gather, group: Twice())
            value, grad = value_and_grad(module, student, teacher)
        assert relative_error(value, expected) <= 1e-12
        assert relative_error(grad, 2 * expected_grad[:12]) <= 1e-10
    for found, wanted in zip(module._memories[0], whole._memories[0], strict=True):
        assert relative_error(found, wanted) <= 1e-12


def test_memory_compiles():
    module, twin = CCALoss(memory=40), CCALoss(memory=40)
    pairs = [(s.requires_grad_(), t) for s, t in batches_of(3, 12)]
    for x in (module, twin):
        x(*pairs[0])
    compiled, graphs = counted(lambda s, t: module(s, t))
    for pair in pairs[1:]:
        assert relative_error(compiled(*pair), twin(*pair)) <= 1e-12
    assert len(graphs) == 1
    assert relative_error(module._memories[0].scatter_ts, twin._memories[0].scatter_ts) <= 1e-12
