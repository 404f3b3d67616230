"""What only the COS-NCE kernels have: block edges, launches, sums split among programs."""

import pytest
import torch

pytest.importorskip("triton")

from fastkd.losses.cos_nce import CosNCELoss, cos_nce_loss
from tests.kernels.launches import count_launches
from tests.test_contrastive import check, features


@pytest.fixture(autouse=True)
def _tensors_on_device(device):
    with device:
        yield


@pytest.mark.parametrize(
    "shape",
    [(15, 1, 127), (16, 2, 128), (17, 1, 129), (33, 2, 65), (2, 3, 300), (129, 1, 16)],
    ids=str,
)
@pytest.mark.parametrize("how", [(), ("mask",), ("mask", "labels")], ids="-".join)
def test_block_edges(shape, how):
    """33 samples have one label, so nothing is compared."""
    student, teacher = features(*shape, dtype=torch.float32, mean=0.5)
    classes = 4 if shape[0] != 33 else 1
    options = {"mask": torch.rand(shape[:2]) > 0.3, "labels": torch.randint(0, classes, shape[:1])}
    options = {name: options[name] for name in how}
    upstream = torch.randn(shape[:2])
    check("triton", student, teacher, upstream=upstream, reduction="none", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [2, 9, 16, 17, 32])
def test_gradient_of_the_forward_pass(batch, dtype):
    student, teacher = features(batch, 3, 40, dtype=dtype, mean=0.5)
    mask, weights = torch.rand(batch, 3) > 0.3, torch.randn(batch, 3)
    labels = torch.arange(batch) % 3
    upstream = torch.tensor(-2.5)
    check("triton", student, teacher, reduction="sum")
    for options in ({}, {"mask": mask, "labels": labels}, {"weights": weights}):
        check("triton", student, teacher, upstream=upstream, **options)


def test_many_negatives_are_added_in_two_passes(monkeypatch):
    monkeypatch.setattr("fastkd.kernels.contrastive.ROWS_PER_SUM", 16)
    student, teacher = features(37, 1, 8, dtype=torch.float32)
    mask = torch.rand(37, 1) > 0.3
    check("triton", student, teacher, mask=mask)
    check("triton", student, teacher, negatives=torch.randn(50, 1, 8))
    check("triton", student, teacher, negatives=torch.randn(37, 20, 1, 8))
    bank = {"negatives": torch.randn(50, 1, 8), "negatives_mask": torch.rand(50, 1) > 0.3}
    check("triton", student, teacher, **bank)
    labels = {"labels": torch.arange(37) % 5, "negatives_labels": torch.arange(50) % 7}
    check("triton", student, teacher, **bank, **labels)


@pytest.mark.parametrize(("layers", "batch"), [(6, 4), (6, 17), (1, 33)])
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
