"""Intra-class KNN: real labels, zeros, a teacher of its own, the projector."""

import warnings

import pytest
import torch

from fastkd.losses.knn import IntraClassKNNLoss, intra_class_similarity, knn_feature_loss
from tests.support.oracles import pooled

pytestmark = pytest.mark.usefixtures("tensors_on_device")


def test_real_labels_without_a_tolerance_warn():
    student, teacher = torch.randn(2, 4, 3)
    labels = torch.tensor([-0.5, 1.0, 2.0, 3.0])
    with pytest.warns(UserWarning, match="real numbers.* pass tolerance") as found:
        knn_feature_loss(student, teacher, labels)
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        knn_feature_loss(student, teacher, labels, tolerance=0.5)
        knn_feature_loss(student, teacher, labels.round())


def test_similarity_of_zeros_and_on_the_meta_device():
    zero = torch.zeros(3, 4, requires_grad=True)
    intra_class_similarity(zero, torch.zeros(3)).backward()
    assert not zero.grad.any()
    x, labels = torch.randn(4, 3, device="meta"), torch.zeros(4, device="meta")
    assert intra_class_similarity(x, labels).shape == ()


def test_a_teacher_with_masks_and_labels_of_its_own():
    student, teacher = torch.randn(4, 5, 6), torch.randn(7, 3, 6)
    labels, bank_labels = torch.arange(4) % 2, torch.arange(7) % 2
    bank_mask = torch.rand(7, 3) > torch.tensor([-1.0, 0.3, 0.3])
    hidden = teacher.masked_fill(~bank_mask[..., None], torch.nan)
    module = IntraClassKNNLoss(k=2, pool="mean")
    found = module(student, hidden, labels, bank_labels, teacher_mask=bank_mask)
    rows = pooled(teacher, bank_mask, "mean")
    wanted = knn_feature_loss(student.mean(1), rows, labels, bank_labels, k=2)
    torch.testing.assert_close(found, wanted)
    found = module(student.mean(1), hidden[:4], labels, mask=bank_mask[:4])  # tokens of one side
    torch.testing.assert_close(found, knn_feature_loss(student.mean(1), rows[:4], labels, k=2))
    half = IntraClassKNNLoss(student_dim=6, teacher_dim=3).bfloat16()  # projects in the wider dtype
    assert half(student, teacher[:4, :, :3], labels).dtype == torch.float32


def test_only_unequal_sizes_are_projected():
    for sizes in ((None, None), (4, None), (None, 5), (4, 4)):
        assert IntraClassKNNLoss(student_dim=sizes[0], teacher_dim=sizes[1]).projector is None
