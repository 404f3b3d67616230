"""Cayley matrices, orthogonal projections and LRKD's dual projection loss."""

import pytest
import torch

from fastkd import DualProjectionLoss, OrthogonalProjection, cayley, layer_norm_mse
from tests.distill.processes import run_ranks
from tests.support.compare import assert_accurate, counted

TRITON_FUNCTION = "layer_norm_mse"


def turned(module):
    """Set projections to matrices that are not the identity."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


@pytest.mark.parametrize("scale", [0.01, 10.0])
def test_large_cayley_matrices_are_orthogonal(scale):
    raw = scale * torch.randn(768, 768)
    weight = cayley(raw - raw.mT)
    assert (weight @ weight.mT - torch.eye(768)).abs().max() <= 1e-5


@pytest.mark.parametrize("rows", [2, 50])
def test_half_precision_leaves_the_parameters_in_float32(rows):
    module = turned(OrthogonalProjection(8, 8))
    before = module.raw.detach().clone()
    wrapped = torch.nn.Sequential(module, torch.nn.Linear(8, 8)).bfloat16()
    assert wrapped[1].weight.dtype == torch.bfloat16
    assert module.raw.dtype == torch.float32 and torch.equal(module.raw, before)
    x = torch.randn(rows, 8, dtype=torch.bfloat16, requires_grad=True)
    y = module(x)
    assert_accurate(y, x.double() @ module.weight.double(), torch.bfloat16)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.bfloat16,) * 2
    assert module.raw.grad.dtype == torch.float32 and module.double().raw.dtype == torch.float64


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


def test_factors_are_right_after_set_num_threads(tmp_path):
    """In a process of its own: batched LU factors from MKL then come out wrong from 384 rows on."""
    run_ranks(_factors_of_two_threads, 1, tmp_path)


def _factors_of_two_threads(rank: int) -> None:
    torch.set_num_threads(2)
    raw = torch.randn(4, 384, 384) / 100
    w = cayley(raw - raw.mT)
    assert (w.mT @ w - torch.eye(384)).abs().max() < 1e-5
    projection, x = OrthogonalProjection(384, 384), torch.randn(5, 384)
    projection.raw.data.copy_(raw[:2])
    torch.testing.assert_close(projection(x), x @ projection.weight, rtol=1e-5, atol=1e-4)
    DualProjectionLoss(384, 384)(x, x.flip(0)).backward()


# LayerNorm-MSE and the dual loss


def test_layer_norm_mse_of_one_tensor_twice(backend, device):
    x = torch.randn(3, 6, device=device, requires_grad=True)

    def loss(x):
        y = x.detach()
        return sum(layer_norm_mse(*pair, backend=backend) for pair in ((x, x), (x, y), (y, y)))

    assert counted(loss)[0](x).item() == loss(x).item() == 0


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


def test_dual_loss_calls_projections_that_have_hooks():
    """FSDP's hooks gather the matrices of a projection that is sharded by itself."""
    module, seen = DualProjectionLoss(4, 6), []
    student, teacher = torch.randn(3, 4), torch.randn(3, 6)
    expected = module(student, teacher)
    module.teacher_projection.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    torch.testing.assert_close(module(student, teacher), expected)
    assert len(seen) == 1


def test_dual_loss_of_tokens_and_of_rows_in_half_precision():
    module = turned(DualProjectionLoss(4, 6))
    student, teacher = torch.randn(2, 5, 4), torch.randn(2, 3, 6)
    rows = [student.mean(1), teacher.mean(1)]
    torch.testing.assert_close(module(student, teacher), module(*rows))
    half = [x.half() for x in rows]
    wanted = module(*(x.float() for x in half))  # projected rows are not rounded
    torch.testing.assert_close(module(*half), wanted, rtol=1e-6, atol=0)
