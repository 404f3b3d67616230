"""COS-NCE: NaN, one tensor as several arguments, blocks of samples."""

import functools

import pytest
import torch

from fastkd.losses.cos_nce import CosNCELoss, cos_nce_loss, cos_nce_loss_ref
from tests.support.compare import assert_accurate, assert_matches_reference, counted

pytestmark = pytest.mark.usefixtures("tensors_on_device")

TRITON_FUNCTION = "cos_nce_loss"


def features(*shape, dtype=torch.float64, mean=0.0):
    return [(torch.randn(*shape, dtype=torch.float64) + mean).to(dtype) for _ in range(2)]


check = functools.partial(assert_matches_reference, cos_nce_loss, cos_nce_loss_ref)


def test_nan_reaches_its_samples_only(backend):
    loss = functools.partial(cos_nce_loss, reduction="none", backend=backend)
    for bad, side in ((torch.nan, 0), (torch.nan, 1), (torch.inf, 0), (torch.inf, 1)):
        pair = features(4, 3, 8, dtype=torch.float32)
        pair[side][2, 1, 5] = bad
        losses = loss(*pair)
        assert losses[2, 1].isnan() and losses[:, [0, 2]].isfinite().all()
        # As a negative it reaches exactly the samples that it is a negative of.
        losses = loss(*pair, labels=torch.tensor([0, 0, 1, 1]))
        assert losses[2, 1].isnan() and losses[3, 1].isfinite()
        assert losses[:2, 1].isnan().all() == (side == 1)
    bank = torch.randn(5, 1, 6)
    bank[3, 0, 2] = torch.nan
    named = {"labels": torch.arange(4), "negatives_labels": torch.tensor([0, 0, 1, 2, 7])}
    losses = loss(*features(4, 1, 6, dtype=torch.float32), negatives=bank, **named)
    assert losses[:, 0].isnan().tolist() == [True, True, False, True]


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


def test_blocks_of_samples():
    """More than a block of the CPU holds."""
    student, teacher = features(70, 4, 2048)
    check("torch", student, teacher)
    labels, mask = torch.randint(0, 3, (70,)), torch.rand(70, 4) > 0.3
    check("torch", student, teacher, labels=labels, mask=mask)
    check("torch", student, teacher, negatives=torch.randn(90, 4, 2048, dtype=torch.float64))
