"""Cayley matrices, orthogonal projections and LRKD's dual projection loss."""

import copy
import functools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkd.losses.projection import (
    DualProjectionLoss,
    OrthogonalProjection,
    cayley,
    cayley_ref,
    layer_norm_mse,
    layer_norm_mse_ref,
)
from tests.support.compare import (
    DTYPES,
    assert_accurate,
    assert_matches_reference,
    count_graphs,
    counted,
    every_two_meet,
    values_and_grads,
)

TRITON_FUNCTION = "layer_norm_mse"
WITHOUT_CPP = ("test_projection",)

few_examples = settings(max_examples=20, deadline=None)


def skew_matrix(*shape, dtype=torch.float64, scale=1.0):
    raw = scale * torch.randn(*shape, shape[-1], dtype=dtype)
    return raw - raw.mT


def randomise(module, scale=0.3):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(scale * torch.randn_like(parameter))
    return module


def orthogonality_error(weight):
    short = weight if weight.shape[0] <= weight.shape[1] else weight.mT
    return (short @ short.mT - torch.eye(short.shape[0], dtype=weight.dtype)).abs().max().item()


# Cayley


def test_cayley_of_a_plane_rotation():
    # Q = [[0, −t], [t, 0]] with t = tan(θ/2) turns the plane by θ.
    theta = torch.tensor(0.7, dtype=torch.float64)
    t = (theta / 2).tan()
    zero = torch.zeros_like(t)
    skew = torch.stack([zero, -t, t, zero]).reshape(2, 2)
    rotation = torch.stack([theta.cos(), -theta.sin(), theta.sin(), theta.cos()]).reshape(2, 2)
    torch.testing.assert_close(cayley_ref(skew), rotation)
    torch.testing.assert_close(cayley(skew), rotation)


@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (3, 7, 7), (2, 3, 5, 5), (0, 4, 4), (0, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cayley_matches_reference(shape, dtype):
    skew, upstream = skew_matrix(*shape[:-1], scale=0.5).to(dtype), torch.randn(shape)
    options = {"upstream": upstream, "of_value": dtype}
    assert_matches_reference(cayley, cayley_ref, "torch", skew, **options)


def test_cayley_gradient():
    raw = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: cayley(a - a.mT), raw)
    # The gradient holds for any matrix, not for skew-symmetric ones only.
    assert torch.autograd.gradcheck(cayley, raw)


@few_examples
@given(n=st.integers(1, 40), scale=st.floats(1e-3, 30), seed=st.integers(0, 10**6))
def test_cayley_is_orthogonal(n, scale, seed):
    torch.manual_seed(seed)
    skew = skew_matrix(n, dtype=torch.float32, scale=scale)
    weight = cayley(skew)
    # An inverse errs by a rounding times the condition of I − Q.
    condition = (1 + torch.linalg.matrix_norm(skew, 2).item() ** 2) ** 0.5
    assert orthogonality_error(weight) <= max(1e-5, torch.finfo(torch.float32).eps * condition)
    # Cayley matrices never have the eigenvalue −1, so the determinant is +1.
    assert torch.linalg.det(weight.double()).item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_cayley_is_orthogonal_at_model_size(scale):
    assert orthogonality_error(cayley(skew_matrix(768, dtype=torch.float32, scale=scale))) <= 1e-5


def test_cayley_of_strided_input_under_autocast():
    skew = skew_matrix(2, 12, dtype=torch.float32)[:, ::2, ::2].requires_grad_()
    plain = cayley(skew)
    (expected,) = torch.autograd.grad(plain.square().sum(dim=-1).cos().sum(), skew)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = cayley(skew)
        (grad,) = torch.autograd.grad(under.square().sum(dim=-1).cos().sum(), skew)
    assert torch.equal(under, plain)
    assert torch.equal(grad, expected)


def test_cayley_on_the_meta_device():
    assert cayley(torch.randn(3, 4, 4, device="meta")).shape == (3, 4, 4)


def test_cayley_nan_stays_in_its_matrix():
    skew = skew_matrix(2, 4)
    skew[0, 1, 2] = float("nan")
    weight = cayley(skew)
    assert weight[0].isnan().any()
    torch.testing.assert_close(weight[1], cayley_ref(skew[1]))


def test_cayley_bad_input():
    with pytest.raises(ValueError, match=r"skew must be square .* got \(3, 4\)"):
        cayley(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        cayley(torch.zeros(3))
    with pytest.raises(TypeError, match="skew must be bfloat16"):
        cayley(torch.zeros(3, 3, dtype=torch.long))


# OrthogonalProjection


@pytest.mark.parametrize("sizes", [(5, 5), (4, 7), (7, 4), (1, 6), (1, 1)])
@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("is_orthogonal", [True, False])
def test_projection_applies_its_weight(sizes, layers, is_orthogonal):
    module = OrthogonalProjection(*sizes, layers=layers, orthogonal=is_orthogonal).double()
    torch.testing.assert_close(module.weight, torch.eye(*sizes, dtype=torch.float64))
    randomise(module)
    assert module.weight.shape == sizes
    if is_orthogonal:
        assert orthogonality_error(module.weight) < 1e-12
    for rows in (0, 1, 3, 20):  # few rows: a solve; many rows: a product with W
        x = torch.randn(rows, sizes[0], dtype=torch.float64)
        torch.testing.assert_close(module(x), x @ module.weight)
    x = torch.randn(2, 3, 2, sizes[0], dtype=torch.float64)
    torch.testing.assert_close(module(x), x @ module.weight)
    torch.testing.assert_close(module(x[0, 0, 0]), x[0, 0, 0] @ module.weight)
    assert module._last_inverse is None  # factorised on the CPU


def test_projection_is_the_product_of_cayley_matrices():
    module = randomise(OrthogonalProjection(4, 6, layers=3).double())
    factors = [cayley_ref((raw - raw.mT) / 2) for raw in module.raw]
    expected = (factors[0] @ factors[1] @ factors[2])[:4]
    torch.testing.assert_close(module.weight, expected)


@pytest.mark.parametrize("rows", [3, 12])
@pytest.mark.parametrize("sizes", [(4, 4), (3, 5), (5, 3)])
def test_projection_gradcheck(rows, sizes):
    module = randomise(OrthogonalProjection(*sizes).double())
    x = torch.randn(rows, sizes[0], dtype=torch.float64, requires_grad=True)

    def function(x, raw):
        return torch.func.functional_call(module, {"raw": raw}, (x,))

    assert torch.autograd.gradcheck(function, (x, module.raw.detach().requires_grad_()))


@pytest.mark.parametrize("rows", [8, 700])
def test_projection_keeps_angles_in_float32(rows):
    module = randomise(OrthogonalProjection(256, 256, layers=4), scale=1.0)
    x = torch.randn(rows, 256)
    y = module(x)
    torch.testing.assert_close(y @ y.mT, x @ x.mT, rtol=0, atol=1e-5 * 256)
    assert orthogonality_error(module.weight) <= 1e-5
    exact = x.double() @ copy.deepcopy(module).double().weight
    assert_accurate(y, exact, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 50])
def test_half_precision_leaves_the_parameters_in_float32(dtype, rows):
    module = randomise(OrthogonalProjection(8, 8))
    before = module.raw.detach().clone()
    wrapped = torch.nn.Sequential(module, torch.nn.Linear(8, 8)).to(dtype)
    assert wrapped[1].weight.dtype == dtype
    assert module.raw.dtype == torch.float32
    assert torch.equal(module.raw, before)
    x = torch.randn(rows, 8, dtype=dtype, requires_grad=True)
    y = module(x)
    assert y.dtype == dtype
    assert_accurate(y, x.double() @ module.weight.double(), dtype)
    y.sum().backward()
    assert x.grad.dtype == dtype
    assert module.raw.grad.dtype == torch.float32
    assert module.double().raw.dtype == torch.float64


@pytest.mark.parametrize("value", [1000.1, 1e6])
def test_layer_norm_mse_of_large_means_and_constants(backend, device, value):
    x, y = torch.randn(2, 5, 9, device=device)
    x[:3], y[2:4] = value, -value
    x[3] = value + torch.arange(9, device=device) % 2
    x, y = x.requires_grad_(), y.requires_grad_()
    for eps in (1e-5, 1e-8):
        loss = layer_norm_mse(x, y, eps=eps, backend=backend)
        exact = layer_norm_mse_ref(x.double(), y.double(), eps)
        assert_accurate(loss, exact, torch.float32)
        constant = layer_norm_mse(x[:3], y[:3].detach(), eps=eps, backend=backend)
        assert torch.autograd.grad(constant, x)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 50])
@pytest.mark.parametrize("orthogonal", [True, False])
def test_parameters_of_half_precision_rows_have_gradients_of_float32(dtype, rows, orthogonal):
    module = randomise(OrthogonalProjection(3, 4, orthogonal=orthogonal))
    x, upstream = torch.randn(rows, 3).to(dtype), torch.randn(rows, 4).to(dtype)
    found = torch.autograd.grad(module(x), [*module.parameters()], upstream)
    exact = copy.deepcopy(module).double()
    wanted = torch.autograd.grad(exact(x.double()), [*exact.parameters()], upstream.double())
    for gradient, truth in zip(found, wanted, strict=True):
        assert_accurate(gradient, truth, torch.float32)


@pytest.mark.parametrize("orthogonal", [True, False])
def test_projection_under_other_default_dtypes_and_devices(orthogonal):
    """Under a default dtype of half precision, or on the meta device followed by to_empty."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        projection = OrthogonalProjection(3, 5, orthogonal=orthogonal)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        other = OrthogonalProjection(3, 5, orthogonal=orthogonal)
    other.to_empty(device="cpu").reset_parameters()
    for made in (projection, other):
        assert made.weight.dtype == torch.float32
        assert torch.equal(made.weight, torch.eye(3, 5))


def test_projection_under_autocast():
    module = randomise(OrthogonalProjection(8, 8))
    for rows in (3, 30):
        x = torch.randn(rows, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(module(x), module(x.clone()))
            assert module.weight.dtype == torch.float32
            under = module(x)
        assert torch.equal(under, module(x))


def test_projection_bad_input():
    with pytest.raises(ValueError, match=r"backend must be .* did you mean 'torch'"):
        OrthogonalProjection(4, 4, backend="pytorch")
    with pytest.raises(ValueError, match="layers must be at least 1"):
        OrthogonalProjection(4, 4, layers=0)
    with pytest.raises(TypeError, match="in_dim must be an int"):
        OrthogonalProjection(4.0, 4)
    with pytest.raises(ValueError, match=r"x must have 4 columns \(in_dim\), got \(2, 5\)"):
        OrthogonalProjection(4, 4)(torch.zeros(2, 5))


# LayerNorm-MSE


def value_and_grads(loss, x, y, **options):
    return values_and_grads(loss, [x, y], **options)


def check_against_oracle(x, y, backend, **options):
    functions = layer_norm_mse, layer_norm_mse_ref
    assert_matches_reference(*functions, backend, [x, y], **options)


def make_pair(*shape, dtype=torch.float32, device="cpu"):
    x, y = torch.randn(2, *shape, dtype=torch.float64)
    return (2 * x + 1).to(device, dtype), (y - 0.5).to(device, dtype)


def test_layer_norm_mse_by_hand():
    # norm(1, 2, 3) = (−a, 0, a) and norm(3, 1, 2) = (a, −a, 0) with a = √1.5: ½(4 + 1 + 1)a².
    x, y = torch.tensor([[1.0, 2.0, 3.0]]).double(), torch.tensor([[3.0, 1.0, 2.0]]).double()
    for function in (layer_norm_mse_ref, layer_norm_mse):
        assert function(x, y, eps=0.0, reduction="sum").item() == pytest.approx(4.5)
        assert function(x, y, eps=0.0, reduction="batchmean").item() == pytest.approx(4.5)
        assert function(x, y, eps=0.0).item() == pytest.approx(1.5)


def test_layer_norm_mse_is_one_minus_the_correlation():
    # With eps = 0 the mean over elements is 1 − the mean Pearson correlation of the rows.
    x, y = make_pair(6, 20, dtype=torch.float64)
    rho = torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(x, y, strict=True)])
    torch.testing.assert_close(layer_norm_mse(x, y, eps=0.0), 1 - rho.mean())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "batchmean", "sum"])
def test_layer_norm_mse_matches_reference(backend, device, dtype, reduction):
    x, y = make_pair(3, 5, 24, dtype=dtype, device=device)
    check_against_oracle(x, y, backend, reduction=reduction)


COLUMNS = (1, 2, 15, 16, 17, 127, 128, 129, 300, 1025)
RAGGED = [*((3, D) for D in COLUMNS), *((rows, 12) for rows in (1, 2, 15, 16, 17, 129)), (12,)]


@pytest.mark.parametrize("shape", RAGGED)
def test_layer_norm_mse_ragged_shapes(backend, device, shape):
    check_against_oracle(*make_pair(*shape, device=device), backend, reduction="batchmean")


def test_layer_norm_mse_gradient_of_one_input(backend, device):
    x, y = make_pair(4, 10, device=device)
    _, dx, dy = value_and_grads(layer_norm_mse_ref, x, y)
    for first in (True, False):
        a, b = x.clone().requires_grad_(first), y.clone().requires_grad_(not first)
        (3 * layer_norm_mse(a, b, backend=backend)).backward()
        torch.testing.assert_close(a.grad if first else b.grad, dx if first else dy)
        assert (b.grad if first else a.grad) is None


@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30, 1e36])
def test_layer_norm_mse_at_every_scale(backend, device, scale, eps):
    """Also where squares are 0 or inf in float32, where plain PyTorch gives NaN."""
    x, y = make_pair(4, 33, device=device)
    actual = value_and_grads(layer_norm_mse, x * scale, y, eps=eps, backend=backend)
    right = value_and_grads(layer_norm_mse_ref, (x * scale).double(), y.double(), eps=eps)
    for a, r in zip(actual, right, strict=True):
        assert_accurate(a.double() / r.double().norm(), r / r.norm(), torch.float32)


@pytest.mark.parametrize("number", [0.0, 0.7, -3.1e4, 1e30])
def test_layer_norm_mse_of_a_constant_row_without_eps(backend, device, number):
    x, y = make_pair(3, 48, device=device)
    x[1] = number
    options = dict(eps=0.0, reduction="sum", backend=backend)
    loss, dx, dy = value_and_grads(layer_norm_mse, x, y, **options)
    rest = value_and_grads(layer_norm_mse, x[::2], y[::2], **options)
    torch.testing.assert_close(loss, rest[0] + 48 / 2)  # zeros against a row of variance 1
    torch.testing.assert_close((dx[::2], dy[::2]), rest[1:])
    assert (dx[1] == 0).all() and dy[1].abs().max() < 1e-5


@pytest.mark.parametrize("columns", [3, 64])
def test_layer_norm_mse_offset(backend, device, columns):
    """More accurate than torch's layer_norm if a row's mean is much larger than its deviation."""
    x, y = make_pair(4, columns, device=device)
    x, y = x + 3000, y - 200
    check_against_oracle(x, y, backend)
    right = layer_norm_mse_ref(x.double(), y.double())
    assert_accurate(layer_norm_mse(x, y, backend=backend), right, torch.float32)


def test_layer_norm_mse_constant_rows(backend, device):
    x, y = make_pair(3, 16, device=device)
    x[0], y[0] = 2.0, 0.0
    x[1] = 0.0
    check_against_oracle(x, y, backend)
    _, dx, dy = value_and_grads(layer_norm_mse, x, y, backend=backend)
    assert (dx[0] == 0).all() and (dy[0] == 0).all()
    assert dx.isfinite().all() and dy.isfinite().all()


@few_examples
@given(seed=st.integers(0, 10**6), gain=st.floats(0.1, 10), shift=st.floats(-10, 10))
def test_layer_norm_mse_ignores_positive_affine_maps_of_rows(seed, gain, shift):
    torch.manual_seed(seed)
    x, y = make_pair(3, 9, dtype=torch.float64)
    plain = layer_norm_mse(x, y, eps=0.0)
    torch.testing.assert_close(layer_norm_mse(gain * x + shift, y, eps=0.0), plain)
    torch.testing.assert_close(layer_norm_mse(y, x, eps=0.0), plain)
    assert 0 <= plain <= 2


def test_layer_norm_mse_bad_input():
    x, y = make_pair(3, 6)
    with pytest.raises(ValueError, match="did you mean 'batchmean'"):
        layer_norm_mse(x, y, reduction="batch_mean")
    with pytest.raises(ValueError, match="eps must be at least 0"):
        layer_norm_mse(x, y, eps=-1.0)


def test_layer_norm_mse_of_one_tensor_twice(backend, device):
    x, _ = make_pair(3, 6, device=device)
    x.requires_grad_()

    def loss(x):
        y = x.detach()
        return sum(layer_norm_mse(*pair, backend=backend) for pair in ((x, x), (x, y), (y, y)))

    compiled, _ = counted(loss)
    assert compiled(x).item() == loss(x).item() == 0


# Sizes that change: in PyTorch, the kernels being one operator in a graph, as in test_promises.py


def learns(*shape, device="cpu"):
    return torch.randn(*shape, device=device, requires_grad=True)


@pytest.mark.parametrize(
    ("reduction", "make"),
    [("mean", lambda n: (4, n)), ("batchmean", lambda n: (3, n, 8))],
    ids=["mean", "batchmean"],
)
def test_layer_norm_mse_sizes_share_two_graphs(device, reduction, make):
    """Reductions differ in a divisor, which is symbolic for the sizes that it counts."""
    loss = functools.partial(layer_norm_mse, reduction=reduction, backend="torch")
    calls = [[learns(*make(n), device=device) for _ in "xy"] for n in (4, 5, 9, 33)]
    assert count_graphs(loss, calls, rtol=1e-4, atol=1e-5) <= 2


@pytest.mark.parametrize("make", [lambda n: (n, n), lambda n: (2, n, 4, 4)])
def test_cayley_sizes_share_two_graphs(make):
    assert (
        count_graphs(cayley, [(learns(*make(n)),) for n in (4, 5, 9, 33)], rtol=1e-4, atol=1e-5)
        <= 2
    )


@pytest.mark.parametrize("is_orthogonal", [True, False])
def test_projection_sizes_share_two_graphs(device, is_orthogonal):
    """Up to as many rows as columns; more are multiplied by W, one more graph."""
    module = OrthogonalProjection(16, 12, orthogonal=is_orthogonal, backend="torch").to(device)
    randomise(module)
    calls = [(learns(2, n, 16, device=device),) for n in (4, 5, 7, 8, 30)]
    assert count_graphs(module, calls, rtol=1e-4, atol=1e-5) <= 3


def test_dual_loss_sizes_share_two_graphs(device):
    """Changing numbers of samples and tokens."""
    module = DualProjectionLoss(16, 12, backend="torch").to(device)
    calls = [
        (
            learns(n, n + 2, 16, device=device),
            torch.randn(n, n + 2, 12, device=device),
            torch.ones(n, n + 2, device=device),
        )
        for n in (4, 5, 9, 15)
    ]
    assert count_graphs(module, calls, rtol=1e-4, atol=1e-5) <= 2


def test_rows_made_in_inference_mode(backend, device):
    """As either argument, and by a solve or a product with W."""
    with torch.inference_mode():
        x = torch.randn(4, 6, device=device)
    layer_norm_mse(x, learns(4, 6, device=device), backend=backend).backward()
    for is_orthogonal in (True, False):
        module = DualProjectionLoss(8, 6, orthogonal=is_orthogonal, backend=backend).to(device)
        for rows in (x, x.repeat(5, 1)):
            module.teacher_projection(rows).sum().backward()


@pytest.mark.parametrize(
    ("is_orthogonal", "rows", "bad"),
    every_two_meet([True, False], [3, 12], [float("nan"), float("inf")]),
)
def test_samples_without_real_tokens_have_no_effect(backend, device, is_orthogonal, rows, bad):
    module = randomise(DualProjectionLoss(6, 4, orthogonal=is_orthogonal, backend=backend)).to(
        device
    )
    mask = torch.arange(rows, device=device) % 3 != 1
    results = []
    for padding in (0.0, bad):
        torch.manual_seed(1)
        student, teacher = (
            torch.randn(rows, size, device=device).masked_fill(~mask[:, None], padding)
            for size in (6, 4)
        )
        student.requires_grad_()
        loss = module(student, teacher, mask)
        results.append((loss, *dual_grads(loss, module, student)))
    for clean, padded in zip(*results, strict=True):
        torch.testing.assert_close(padded, clean, rtol=1e-5, atol=1e-7)


# DualProjectionLoss


def dual_loss_as_written(module, student, teacher):
    """Eqs. 6-10 on pooled features, with the mean over elements."""
    p_s, p_t = module.student_projection.weight, module.teacher_projection.weight
    norm = lambda h: F.layer_norm(h, h.shape[-1:])  # noqa: E731
    spl = 0.5 * (norm(student @ p_s) - norm(teacher)).square().mean()
    tpl = 0.5 * (norm(teacher @ p_t) - norm(student)).square().mean()
    return module.gamma * spl + (1 - module.gamma) * tpl


def dual_grads(loss, module, student):
    return torch.autograd.grad(loss, [student, *module.parameters()])


@pytest.mark.parametrize(
    ("sizes", "layers", "is_orthogonal", "samples"),
    every_two_meet([(6, 6), (4, 7), (7, 4)], [1, 2, 4], [True, False], [3, 12]),
)
def test_dual_loss_equals_the_equations(sizes, layers, is_orthogonal, samples):
    module = randomise(DualProjectionLoss(*sizes, layers, 0.3, is_orthogonal).double())
    student = torch.randn(samples, sizes[0], dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(samples, sizes[1], dtype=torch.float64)
    loss = module(student, teacher)
    expected = dual_loss_as_written(module, student, teacher)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        dual_grads(loss, module, student), dual_grads(expected, module, student)
    )


def test_dual_loss_calls_projections_that_have_hooks():
    """FSDP's hooks gather the matrices of a projection that is sharded by itself."""
    module, seen = DualProjectionLoss(4, 6), []
    student, teacher = torch.randn(3, 4), torch.randn(3, 6)
    expected = module(student, teacher)
    module.teacher_projection.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    torch.testing.assert_close(module(student, teacher), expected)
    assert len(seen) == 1


def test_dual_loss_reductions():
    student, teacher = torch.randn(5, 4).double(), torch.randn(5, 6).double()
    losses = {}
    for reduction in ("mean", "batchmean", "sum"):
        module = DualProjectionLoss(4, 6, gamma=1.0, reduction=reduction).double()
        losses[reduction] = module(student, teacher)
    torch.testing.assert_close(losses["sum"], losses["batchmean"] * 5)
    torch.testing.assert_close(losses["sum"], losses["mean"] * 5 * 6)


def test_dual_loss_starts_from_the_identity():
    x = torch.randn(5, 8)
    assert DualProjectionLoss(8, 8)(x, x.clone()).item() < 1e-10


def test_dual_loss_pools_real_tokens():
    module = randomise(DualProjectionLoss(4, 6).double())
    student = torch.randn(4, 5, 4, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(4, 5, 6, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]])
    pooled = [
        torch.stack([side[i][mask[i].bool()].mean(0) for i in (0, 1, 3)])
        for side in (student, teacher)
    ]
    # The sample without a token is in neither sum nor count.
    expected = dual_loss_as_written(module, *pooled)
    right = dual_grads(expected, module, student)
    for given_mask, padding in ((mask, 0.0), (mask.bool(), float("nan")), (mask, float("inf"))):
        x, y = (z.detach().masked_fill(mask[..., None] == 0, padding) for z in (student, teacher))
        loss = module(x.requires_grad_(), y, given_mask)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(dual_grads(loss, module, x), right)


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0)])
def test_dual_loss_without_tokens_of_one_model_is_zero(lengths):
    module = randomise(DualProjectionLoss(4, 6))
    student, teacher = (torch.randn(2, N, D) for N, D in zip(lengths, (4, 6), strict=True))
    loss = module(student.requires_grad_(), teacher)
    assert loss.item() == 0
    assert all((grad == 0).all() for grad in dual_grads(loss, module, student))


def test_dual_loss_teacher_with_its_own_tokens():
    module = randomise(DualProjectionLoss(4, 6).double())
    student, teacher = torch.randn(2, 5, 4).double(), torch.randn(2, 3, 6).double()
    mask, teacher_mask = torch.ones(2, 5), torch.tensor([[1, 1, 0], [1, 1, 1]])
    loss = module(student, teacher, mask, teacher_mask)
    pooled = torch.stack([teacher[0, :2].mean(0), teacher[1].mean(0)])
    torch.testing.assert_close(loss, dual_loss_as_written(module, student.mean(1), pooled))
    torch.testing.assert_close(module(student, teacher), module(student.mean(1), teacher.mean(1)))
    with pytest.raises(ValueError, match="pass teacher_mask too"):
        module(student, teacher, mask)


def test_dual_loss_learns_a_rotation():
    torch.manual_seed(1)
    rotation = cayley(skew_matrix(8, dtype=torch.float32, scale=0.3))
    module = DualProjectionLoss(8, 8)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    for _ in range(150):
        h = torch.randn(32, 8)
        loss = module(h, (h - h.mean(1, keepdim=True)) @ rotation)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.15


def test_dual_loss_bad_input():
    module = DualProjectionLoss(4, 6)
    student, teacher = torch.randn(3, 4), torch.randn(3, 6)
    with pytest.raises(ValueError, match=r"student must have 4 columns \(student_dim\)"):
        module(teacher, teacher)
    with pytest.raises(ValueError, match=r"teacher must have 6 columns \(teacher_dim\)"):
        module(student, student)
    with pytest.raises(ValueError, match="3 samples but teacher has 2"):
        module(student, teacher[:2])
    with pytest.raises(ValueError, match=r"student must be \(B, D\) or \(B, N, D\)"):
        module(torch.randn(1, 1, 3, 4), teacher)
    with pytest.raises(ValueError, match="gamma must be at most 1"):
        DualProjectionLoss(4, 6, gamma=1.5)
    with pytest.raises(ValueError, match="did you mean 'mean'"):
        DualProjectionLoss(4, 6, reduction="means")


def test_factors_are_right_after_set_num_threads():
    # In a process of its own: batched LU factors from MKL then come out wrong from n = 384 on.
    code = """
import torch, fastkd
torch.set_num_threads(2)
torch.manual_seed(0)
raw = torch.randn(4, 384, 384) / 100
w = fastkd.cayley(raw - raw.mT)
print((w.mT @ w - torch.eye(384)).abs().max().item() < 1e-5)
projection = fastkd.OrthogonalProjection(384, 384)
projection.raw.data.copy_(raw[:2])
x = torch.randn(5, 384)
print(torch.allclose(projection(x), x @ projection.weight, atol=1e-4))
fastkd.DualProjectionLoss(384, 384)(x, x.flip(0)).backward()
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["True", "True"]
