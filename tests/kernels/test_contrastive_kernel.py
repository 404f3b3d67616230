"""What only the COS-NCE kernels have: block edges and launches."""

import pytest
import torch

pytest.importorskip("triton")

from fastkd.losses.cos_nce import CosNCELoss, cos_nce_loss, cos_nce_loss_ref
from tests.kernels.launches import count_launches
from tests.support.compare import assert_matches_reference


@pytest.fixture(autouse=True)
def _tensors_on_device(device):
    with device:
        yield


def check(student, teacher, **options):
    functions = cos_nce_loss, cos_nce_loss_ref
    assert_matches_reference(*functions, "triton", student, teacher, **options)


@pytest.mark.parametrize("shape", [(16, 2, 128), (17, 1, 129), (33, 2, 65), (129, 1, 16)], ids=str)
def test_block_edges(shape):
    """33 samples have one label, so nothing is compared."""
    student, teacher = torch.randn(2, *shape) + 0.5
    labels = torch.randint(0, 4 if shape[0] != 33 else 1, shape[:1])
    options = {"mask": torch.rand(shape[:2]) > 0.3, "labels": labels}
    check(student, teacher, reduction="none", upstream=torch.randn(shape[:2]), **options)
    check(student.bfloat16(), teacher.bfloat16(), weights=torch.randn(shape[:2]), **options)


def test_many_negatives_are_added_in_two_passes(monkeypatch):
    monkeypatch.setattr("fastkd.kernels.contrastive.ROWS_PER_SUM", 16)
    student, teacher = torch.randn(2, 37, 1, 8)
    bank = {"negatives": torch.randn(50, 1, 8), "negatives_mask": torch.rand(50, 1) > 0.3}
    labels = {"labels": torch.arange(37) % 5, "negatives_labels": torch.arange(50) % 7}
    for options in ({}, bank, bank | labels, {"negatives": torch.randn(37, 20, 1, 8)}):
        check(student, teacher, **options)


@pytest.mark.parametrize(("layers", "batch"), [(2, 4), (2, 17), (1, 33)])
def test_launches(layers, batch):
    students = [torch.randn(batch, 3, 8, requires_grad=True) for _ in range(layers)]
    teachers = [torch.randn(batch, 3, 8) for _ in range(layers)]
    mask = torch.ones(batch, 3, dtype=torch.bool)
    labels = torch.arange(batch)
    negatives = [torch.randn(5, 3, 8) for _ in range(layers)]
    loss = CosNCELoss(8, 8, backend="triton")
    own, labelled = 4 if batch <= 32 else 5, 4 if batch <= 16 else 5
    negative = {"negatives": negatives}
    for options, expected in (({}, own), ({"labels": labels}, labelled), (negative, 6)):
        with count_launches() as launches:
            loss(students, teachers, mask, **options).backward()
        assert len(launches.of_triton()) == expected, launches

    for options, expected in (
        ({}, own),
        ({"labels": labels}, labelled),
        ({"negatives": negatives[0]}, 6),
        ({"negatives": negatives[0], "negatives_mask": torch.ones(5, 3, dtype=torch.bool)}, 6),
        ({"negatives": negatives[0], "labels": labels, "negatives_labels": torch.arange(5)}, 6),
        ({"reduction": "sum"}, own - (batch <= 32)),
    ):
        with count_launches() as launches:
            total = cos_nce_loss(students[0], teachers[0], mask=mask, backend="triton", **options)
            total.backward()
        assert len(launches.of_triton()) == expected, launches
        # The interpreter on the CPU also looks whether the mask has a real token.
        checks = 2 if total.device.type == "cpu" else 0
        assert len(launches) - checks <= 8, launches
