"""COS-NCE: the closed form against the explicit sum, in-batch, given and label-filtered."""

import functools

import pytest
import torch

from fastkd.losses.cos_nce import CosNCELoss, cos_nce_loss, cos_nce_loss_ref
from tests.support.compare import (
    DTYPES,
    assert_accurate,
    assert_matches_reference,
    counted,
    every_two_meet,
)

pytestmark = pytest.mark.usefixtures("tensors_on_device")

TRITON_FUNCTION = "cos_nce_loss"

SHAPES = [(1, 1, 1), (2, 1, 3), (3, 2, 16), (5, 7, 7), (17, 3, 33), (4, 129)]


def features(*shape, dtype=torch.float64, mean=0.0):
    student, teacher = (torch.randn(*shape, dtype=torch.float64) + mean for _ in range(2))
    return student.to(dtype), teacher.to(dtype)


check = functools.partial(assert_matches_reference, cos_nce_loss, cos_nce_loss_ref)


@pytest.mark.within_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(backend, shape, dtype):
    student, teacher = features(*shape, dtype=dtype, mean=0.5)
    # With one feature there are two directions: the gradient's two terms over ‖z‖ cancel to 0.
    floor = (1 / student.double()).norm().item() if shape[-1] == 1 else 1e-8
    for options in (
        {},
        {"labels": torch.randint(0, 3, shape[:1])},
        {"negatives": features(4, *shape[1:], dtype=dtype)[0]},
        {"negatives": features(shape[0], 3, *shape[1:], dtype=dtype)[0]},
    ):
        check(backend, student, teacher, gradient_floor=floor, **options)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_in_real_data_gives_nan(backend, bad):
    for side in (0, 1):
        pair = [x.float() for x in features(4, 3, 8)]
        pair[side][2, 1, 5] = bad
        losses = cos_nce_loss(*pair, reduction="none", backend=backend)
        assert losses[2, 1].isnan()
        assert losses[:, [0, 2]].isfinite().all()
        assert cos_nce_loss(*pair, backend=backend).isnan()
        # As a negative it reaches exactly the samples that it is a negative of.
        losses = cos_nce_loss(
            *pair, labels=torch.tensor([0, 0, 1, 1]), reduction="none", backend=backend
        )
        assert losses[2, 1].isnan()
        assert losses[:2, 1].isnan().all() == (side == 1)
        assert losses[3, 1].isfinite()


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


def test_inference_mode_and_the_meta_device_with_a_bank(device):
    """With given negatives, which the general tests have not."""
    student = torch.randn(4, 3, 8, requires_grad=True)
    with torch.inference_mode():
        teacher, bank = torch.randn(4, 3, 8), torch.randn(5, 3, 8)
    options = {"negatives": bank, "negatives_mask": bank[..., 0] > 0}
    cos_nce_loss(student, teacher, **options).backward()
    cos_nce_loss(student, teacher, labels=torch.arange(4)).backward()

    def meta(*shape):
        return torch.randn(*shape, device="meta")

    options = {"mask": meta(4, 3) > 0, "reduction": "none"}
    losses = cos_nce_loss(meta(4, 3, 8), meta(4, 3, 8), labels=meta(4), **options)
    assert losses.is_meta and losses.shape == (4, 3)
    module = CosNCELoss(8, 6).to("meta")
    assert module(meta(4, 3, 8), meta(4, 3, 6), options["mask"], negatives=meta(5, 3, 6)).is_meta


# Given negatives that are masked or have labels


def bank_of(*leading, positions=(3,), size=6):
    features = torch.randn(*leading, *positions, size)
    mask = torch.rand(features.shape[:-1]) > 0.4
    return features.masked_fill(~mask[..., None], torch.nan), mask


@pytest.mark.parametrize(
    ("leading", "positions", "reduction"),
    every_two_meet([(7,), (5, 7), (40,), (0,), (5, 0)], [(), (3,), (2, 2)], ["mean", "none"]),
    ids=str,
)
def test_masked_and_labelled_negatives(backend, leading, positions, reduction):
    student, teacher = features(5, *positions, 6, dtype=torch.float32)
    bank, bank_mask = bank_of(*leading, positions=positions)
    mask = torch.rand(5, *positions) > 0.2
    labels, bank_labels = torch.tensor([0, 3, 0, 5, 1]), torch.randint(0, 4, leading)
    upstream = torch.randn(5, *positions) if reduction == "none" else torch.tensor(-2.0)
    named = {"labels": labels, "negatives_labels": bank_labels}
    masked = {"negatives": bank, "negatives_mask": bank_mask}
    whole = {"negatives": bank.nan_to_num(0.5)}
    for options in (
        masked,
        masked | {"mask": mask},
        masked | named | {"mask": mask},
        whole | named,
        whole | {"labels": labels.double() / 2, "negatives_labels": bank_labels},
    ):
        check(backend, student, teacher, upstream=upstream, reduction=reduction, **options)


def test_nan_in_a_negative_reaches_its_samples_only(backend):
    student, teacher = features(4, 1, 6, dtype=torch.float32)
    bank = torch.randn(5, 1, 6)
    bank[3, 0, 2] = torch.nan
    named = {"labels": torch.arange(4), "negatives_labels": torch.tensor([0, 0, 1, 2, 7])}
    losses = cos_nce_loss(
        student, teacher, negatives=bank, reduction="none", backend=backend, **named
    )
    assert losses[:, 0].isnan().tolist() == [True, True, False, True]


def test_blocks_of_samples_do_not_change_the_result(monkeypatch):
    monkeypatch.setattr("fastkd.losses.cos_nce.BLOCK_ELEMENTS", 50)
    student, teacher = features(7, 3, 8)
    check("torch", student, teacher)
    check("torch", student, teacher, labels=torch.randint(0, 3, (7,)), mask=torch.rand(7, 3) > 0.3)
    check("torch", student, teacher, negatives=torch.randn(9, 3, 8, dtype=torch.float64))
