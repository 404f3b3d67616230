"""Canonical correlation: a GPU's products, operators, layers of many sizes, the memory."""

import copy
import importlib
import warnings

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fastkd._core import extension
from fastkd.linalg import cca_solver
from fastkd.losses import cca
from fastkd.losses.cca import CCALoss, cca_loss
from tests.losses.cca import BLURRED, SPECTRA, by_qr, hard_pair
from tests.support.compare import DTYPES, counted, relative_error, value_and_grad
from tests.support.draw import Draw
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


@pytest.mark.parametrize("kind", ["independent", "equal", *SPECTRA])
@pytest.mark.parametrize("m, d", [(512, 128), (200, 128), (128, 128), (32, 256), (96, 30)])
@pytest.mark.parametrize("solver", SOLVERS, indirect=True)
@pytest.mark.left_out(
    where=lambda given: {
        "eigenvectors": given["kind"] not in BLURRED,  # random calls have the others
        "digits": given["m"] != 96 or given["kind"] not in (*BLURRED, "LayerNorm"),
    }.get(given["solver"], False)
)
def test_float32_is_accurate(m, d, kind, solver, device):
    with torch.device("cpu"):
        pair = hard_pair(Draw(0, "torch"), kind, m, d, d)[:2]
    student, teacher = (x.to(device, torch.float32) for x in pair)
    value, grad = value_and_grad(cca_loss, student, teacher)
    expected, expected_grad = by_qr(student, teacher, 1e-4, zero=torch.finfo(torch.float32).eps)
    assert -value <= min(m - 1, d)
    assert relative_error(value, expected) <= 1e-6
    precision = 1e-2 if kind in BLURRED else 1e-4 if "LayerNorm" in kind else 1e-5
    precision = 1e-5 if solver == "eigenvectors" else precision
    assert relative_error(grad, expected_grad) <= precision


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
    assert relative_error(grad, expected_grad) <= 1e-3


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
        assert relative_error(grad, expected_grad) <= error


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


def test_failed_factorisation_gives_nan():
    """LAPACK's partial result looks like a factor, and would be silently wrong."""
    good, bad = torch.eye(3), torch.tensor([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    factors = cca_solver._cholesky(torch.stack([good, bad]))
    assert torch.equal(factors[0], good)
    assert factors[1].isnan().all()


def test_an_item_whose_ridge_is_lost_changes_no_other():
    """Its variances' rounding errors are larger, so it alone has eigenvectors."""
    student, teacher = torch.randn(2, 3, 40, 8)
    upstream = torch.ones(3)
    expected = value_and_grad(cca_loss, student, teacher, reduction="none", upstream=upstream)
    student[1] *= 1e9
    found = value_and_grad(cca_loss, student, teacher, reduction="none", upstream=upstream)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x[[0, 2]], y[[0, 2]])
    assert relative_error(found[0][1], expected[0][1]) <= 1e-4


# The module: pooling, several layers, the warning.


LAYER_SIZES = ((5, 6), (3, 4), (9, 2), (5, 6))


def count_calls(monkeypatch) -> list[torch.Size]:
    calls = []
    solve = cca_solver.solve

    def counted(problem):
        calls.append(problem.student.shape)
        return solve(problem)

    monkeypatch.setattr(cca_solver, "solve", counted)
    return calls


def test_layers_of_one_size_are_one_batch(monkeypatch, device):
    students, teachers = zip(*(related(30, 4, dims=dims) for dims in LAYER_SIZES), strict=True)
    calls = count_calls(monkeypatch)
    CCALoss()(students, teachers)
    if device.type == "cpu":
        assert calls == [(2, 120, 5), (1, 120, 3), (1, 120, 9)]
    else:
        assert calls == [(4, 120, 9)]


@pytest.mark.filterwarnings("ignore:CCALoss")
@pytest.mark.parametrize(("dtype", "m"), [*((dtype, 4) for dtype in DTYPES), (torch.float32, 400)])
def test_padded_layers_are_bounded_by_their_own_rank(dtype, m, monkeypatch):
    """Equal features correlate fully; rounding, here as large as 1, must not lift the sum."""
    sizes = (5, 7, 383)
    layers = [torch.randn(1, m, d).to(dtype) for d in sizes]
    wider = [torch.cat([x, x], -1) for x in layers]
    polar = cca_solver._polar
    monkeypatch.setattr(cca_solver, "_polar", lambda *args: (1 + polar(*args)[0], polar(*args)[1]))
    monkeypatch.setattr(cca, "_pads_layers", lambda x: True)
    module, calls = CCALoss(ridge=1e-9), count_calls(monkeypatch)
    for missing in (0, 1):
        mean = module(layers, wider, torch.arange(m)[None] >= missing)
        assert -3 * mean.item() == pytest.approx(sum(min(m - 1 - missing, d) for d in sizes))
    assert calls == [(3, m, 383)] * 2


def test_module_warns_once_with_the_numbers():
    with torch.device("cpu"):  # a mask on a GPU is not read, since that would synchronise
        student, teacher = related(3, 4, dims=(5, 6))
        module, full = CCALoss(), torch.ones(3, 4)
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
