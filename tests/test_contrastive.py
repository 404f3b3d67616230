"""COS-NCE: one tensor as several arguments, a bank of inference mode."""

import functools

import pytest
import torch

from fastkd.losses.cos_nce import CosNCELoss, cos_nce_loss
from tests.support.compare import assert_accurate, counted

pytestmark = pytest.mark.usefixtures("tensors_on_device")

TRITON_FUNCTION = "cos_nce_loss"


@pytest.mark.thorough
def test_compiles_with_one_tensor_as_several_arguments(backend, device):
    student, teacher = torch.randn(4, 3, 8, requires_grad=True), torch.randn(4, 3, 8)
    module = CosNCELoss(8, 8, backend=backend).to(device)
    loss = functools.partial(cos_nce_loss, backend=backend)

    def call(s, t):
        real = t[..., 0] > 0
        return (
            loss(s, t, negatives=t)
            + loss(s, s.detach())
            + loss(t, t)
            + loss(s, t, negatives=t, mask=real, negatives_mask=real)
            + module([s, s], [t, t], negatives=[t, t])
        )

    compiled, graphs = counted(call)
    traced, eager = (f(student, teacher) for f in (compiled, call))
    assert_accurate(traced, eager, torch.float32)
    (traced,), (eager,) = (torch.autograd.grad(x, student) for x in (traced, eager))
    assert_accurate(traced, eager, torch.float32)
    assert len(graphs) == 1


def test_a_bank_of_inference_mode_and_the_meta_device():
    student = torch.randn(4, 3, 8, requires_grad=True)
    with torch.inference_mode():
        teacher, bank = torch.randn(4, 3, 8), torch.randn(5, 3, 8)
    options = {"negatives": bank, "negatives_mask": bank[..., 0] > 0}
    cos_nce_loss(student, teacher, **options).backward()
    pair, labels = torch.randn(2, 4, 3, 8, device="meta"), torch.zeros(4, device="meta")
    assert cos_nce_loss(*pair, labels=labels, reduction="none").shape == (4, 3)
