"""Other packages' kernels against PyTorch: Liger's, Automodel's soft cross-entropy."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.interpreter import of_compiled_code

pytest.importorskip("triton")
pytestmark = of_compiled_code
DTYPES = [torch.float32, torch.bfloat16]


def log_probabilities(rows, V, dtype):
    return (2 * torch.randn(rows, V)).log_softmax(-1).to(dtype)


def tolerance(dtype):
    return {"rtol": 2e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-3}


@pytest.mark.parametrize("V", [300, 5000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kl(V, dtype):
    pytest.importorskip("liger_kernel")
    from liger_kernel.ops.kl_div import kldiv_backward_triton, kldiv_forward_triton

    student, teacher = log_probabilities(3, V, dtype), log_probabilities(3, V, dtype)
    wide = student.double().requires_grad_()
    right = F.kl_div(wide, teacher.double(), log_target=True, reduction="batchmean")
    found = kldiv_forward_triton(student, teacher, True, "batchmean", 1e-10)
    torch.testing.assert_close(found.double(), right.detach(), **tolerance(dtype))
    grad = kldiv_backward_triton(teacher, torch.tensor(1.0), torch.empty_like(student), True)
    (expected,) = torch.autograd.grad(3 * right, wide)
    torch.testing.assert_close(grad.double(), expected, **tolerance(dtype))


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_jensen_shannon(beta, dtype):
    pytest.importorskip("liger_kernel")
    from liger_kernel.ops.jsd import _jsd_kernel

    rows, V = 3, 700
    student, teacher = log_probabilities(rows, V, dtype), log_probabilities(rows, V, dtype)
    labels = torch.tensor([1, -100, 2])
    loss, dx = torch.zeros(rows, V), torch.empty_like(student)
    _jsd_kernel[(rows,)](
        student, V, teacher, V, loss, V, dx, V, labels, beta, 2, -100, V,
        BLOCK_SIZE=512, HAS_LABEL=True,
    )  # fmt: skip
    wide = student.double().requires_grad_()
    x, y = wide, teacher.double()
    if beta in (0.0, 1.0):
        terms = y.exp() * (y - x) if beta == 0.0 else x.exp() * (x - y)
    else:
        mean = beta * y.exp() + (1 - beta) * x.exp()
        terms = beta * y.exp() * (y - mean.log()) + (1 - beta) * x.exp() * (x - mean.log())
    right = terms[[0, 2]].sum() / 2
    close = tolerance(dtype) | {"atol": 1e-2 if dtype == torch.bfloat16 else 1e-5}
    torch.testing.assert_close(loss.double().sum(), right.detach(), **close)
    (expected,) = torch.autograd.grad(right, wide)
    torch.testing.assert_close(dx.double(), expected, **close)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy(softcap, dtype):
    """It puts the gradient in the logits' place."""
    pytest.importorskip("liger_kernel")
    from liger_kernel.ops.cross_entropy import cross_entropy_forward

    logits, labels = (2 * torch.randn(4, 900)).to(dtype), torch.tensor([3, 899, -100, 0])
    wide = logits.double().requires_grad_()
    capped = wide if softcap is None else softcap * torch.tanh(wide / softcap)
    right = F.cross_entropy(capped, labels, label_smoothing=0.1)
    (expected,) = torch.autograd.grad(right, wide)
    given = logits.clone().requires_grad_()
    with torch.no_grad():
        found, *_ = cross_entropy_forward(
            given, labels, None, -100, 0.0, 0.1, "mean", softcap, False
        )
    torch.testing.assert_close(found.double(), right.detach(), **tolerance(dtype))
    torch.testing.assert_close(given.detach().double(), expected, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_cross_entropy(dtype):
    """It puts the gradient in the logits' place."""
    pytest.importorskip("nemo_automodel")
    from nemo_automodel.components.loss.triton.soft_cross_entropy import fused_soft_cross_entropy

    logits, teacher = (2 * torch.randn(1, 4, 900)).to(dtype), torch.randn(1, 4, 900).softmax(-1)
    teacher, mask = teacher.to(dtype), torch.tensor([1.0, 1.0, 0.0, 1.0]).view(1, 4, 1)
    wide = logits.double().requires_grad_()
    losses = -(teacher.double() * wide.log_softmax(-1)).sum(-1)
    right = losses[mask.squeeze(-1) > 0].mean()
    (expected,) = torch.autograd.grad(right, wide)
    given = logits.requires_grad_()
    found = fused_soft_cross_entropy(given, teacher, mask)
    (grad,) = torch.autograd.grad(found, given)
    torch.testing.assert_close(found.double(), right.detach(), **tolerance(dtype))
    torch.testing.assert_close(grad.double(), expected, **tolerance(dtype))
