"""Cayley matrices, orthogonal projections and LRKD's dual projection loss."""

import copy
import subprocess
import sys

import pytest
import torch

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
    values_and_grads,
)

TRITON_FUNCTION = "layer_norm_mse"
WITHOUT_CPP = ("test_projection",)


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


@pytest.mark.parametrize(("n", "scale"), [(1, 1.0), (2, 30.0), (17, 1e-3), (40, 1.0), (33, 30.0)])
def test_cayley_is_orthogonal(n, scale):
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


def test_cayley_nan_stays_in_its_matrix():
    skew = skew_matrix(2, 4)
    skew[0, 1, 2] = float("nan")
    weight = cayley(skew)
    assert weight[0].isnan().any()
    torch.testing.assert_close(weight[1], cayley_ref(skew[1]))


# OrthogonalProjection


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


# LayerNorm-MSE


def value_and_grads(loss, x, y, **options):
    return values_and_grads(loss, [x, y], **options)


def check_against_oracle(x, y, backend, **options):
    functions = layer_norm_mse, layer_norm_mse_ref
    assert_matches_reference(*functions, backend, [x, y], **options)


def make_pair(*shape, dtype=torch.float32, device="cpu"):
    x, y = torch.randn(2, *shape, dtype=torch.float64)
    return (2 * x + 1).to(device, dtype), (y - 0.5).to(device, dtype)


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


def test_layer_norm_mse_of_one_tensor_twice(backend, device):
    x, _ = make_pair(3, 6, device=device)
    x.requires_grad_()

    def loss(x):
        y = x.detach()
        return sum(layer_norm_mse(*pair, backend=backend) for pair in ((x, x), (x, y), (y, y)))

    compiled, _ = counted(loss)
    assert compiled(x).item() == loss(x).item() == 0


@pytest.mark.parametrize("is_orthogonal", [True, False])
def test_projection_sizes_share_two_graphs(device, is_orthogonal):
    """Up to as many rows as columns; more are multiplied by W, one more graph."""
    module = OrthogonalProjection(16, 12, orthogonal=is_orthogonal, backend="torch").to(device)
    randomise(module)
    rows = (torch.randn(2, n, 16, device=device) for n in (4, 5, 7, 8, 30))
    calls = [(x.requires_grad_(),) for x in rows]
    assert count_graphs(module, calls, rtol=1e-4, atol=1e-5) <= 3


def test_rows_made_in_inference_mode(backend, device):
    """As either argument, and by a solve or a product with W."""
    with torch.inference_mode():
        x = torch.randn(4, 6, device=device)
    student = torch.randn(4, 6, device=device, requires_grad=True)
    layer_norm_mse(x, student, backend=backend).backward()
    for is_orthogonal in (True, False):
        module = DualProjectionLoss(8, 6, orthogonal=is_orthogonal, backend=backend).to(device)
        for rows in (x, x.repeat(5, 1)):
            module.teacher_projection(rows).sum().backward()


# DualProjectionLoss


def dual_grads(loss, module, student):
    return torch.autograd.grad(loss, [student, *module.parameters()])


def test_dual_loss_calls_projections_that_have_hooks():
    """FSDP's hooks gather the matrices of a projection that is sharded by itself."""
    module, seen = DualProjectionLoss(4, 6), []
    student, teacher = torch.randn(3, 4), torch.randn(3, 6)
    expected = module(student, teacher)
    module.teacher_projection.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    torch.testing.assert_close(module(student, teacher), expected)
    assert len(seen) == 1


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0)])
def test_dual_loss_without_tokens_of_one_model_is_zero(lengths):
    module = randomise(DualProjectionLoss(4, 6))
    student, teacher = (torch.randn(2, N, D) for N, D in zip(lengths, (4, 6), strict=True))
    loss = module(student.requires_grad_(), teacher)
    assert loss.item() == 0
    assert all((grad == 0).all() for grad in dual_grads(loss, module, student))


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


@pytest.mark.parametrize("sizes", [(5, 5), (4, 7), (7, 4), (1, 1)])
@pytest.mark.parametrize("is_orthogonal", [True, False])
def test_projection_and_its_weight(sizes, is_orthogonal):
    """Few rows are a solve, many a product with the weight, which starts as the identity."""
    module = OrthogonalProjection(*sizes, layers=3, orthogonal=is_orthogonal).double()
    torch.testing.assert_close(module.weight, torch.eye(*sizes, dtype=torch.float64))
    randomise(module)
    assert not is_orthogonal or orthogonality_error(module.weight) < 1e-12
    for lead in ((0,), (1,), (3,), (20,), (2, 3, 2), ()):
        x = torch.randn(*lead, sizes[0], dtype=torch.float64)
        torch.testing.assert_close(module(x), x @ module.weight)
    assert module._last_inverse is None  # factorised on the CPU


def test_a_teacher_with_tokens_of_its_own():
    module = randomise(DualProjectionLoss(4, 6))
    student, teacher, teacher_mask = torch.randn(2, 5, 4), torch.randn(2, 3, 6), torch.ones(2, 3)
    teacher_mask[0, 2] = 0
    pooled = torch.stack([teacher[0, :2].mean(0), teacher[1].mean(0)])
    found = module(student, teacher, torch.ones(2, 5), teacher_mask)
    torch.testing.assert_close(found, module(student.mean(1), pooled))
    torch.testing.assert_close(module(student, teacher), module(student.mean(1), teacher.mean(1)))
