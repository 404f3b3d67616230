"""Intra-class KNN: which rows are neighbours, near duplicates, labels, a teacher of its own."""

import functools
import warnings

import pytest
import torch

from fastkd.losses.knn import (
    IntraClassKNNLoss,
    intra_class_similarity,
    knn_feature_loss,
    knn_feature_loss_ref,
)
from tests.losses.knn import edges, nearest
from tests.support.compare import assert_accurate, assert_matches_reference, value_and_grad
from tests.support.oracles import pooled

pytestmark = pytest.mark.usefixtures("tensors_on_device")

TRITON_FUNCTION = "knn_feature_loss"


def batch(rows, bank, features, classes, dtype=torch.float64, mean=0.0):
    student = torch.randn(rows, features, dtype=torch.float64) + mean
    teacher = torch.randn(bank, features, dtype=torch.float64) + mean
    labels = torch.randint(0, classes, (rows,)), torch.randint(0, classes, (bank,))
    return student.to(dtype), teacher.to(dtype), *labels


check = functools.partial(assert_matches_reference, knn_feature_loss, knn_feature_loss_ref)


def near_duplicates(rows, dtype=torch.float32, spread=1e-4, repeats=1):
    """Six students and four distant clusters; rows of one differ by less than rounding error."""
    clusters = 30 * torch.randn(4, 64, dtype=torch.float64)
    near = spread * torch.randn(4, rows, 64, dtype=torch.float64)
    teacher = (clusters[:, None] + near).flatten(0, 1)
    student = clusters[torch.tensor([0, 1, 2, 3, 0, 2])].repeat(repeats, 1)
    student = student + 2 * spread * torch.randn(len(student), 64, dtype=torch.float64)
    labels = torch.zeros(len(student)).long(), torch.zeros(4 * rows).long()
    return student.to(dtype), teacher.to(dtype), *labels


def check_against_loop(function, student, teacher, *labels, **options):
    """The paper's l_hidd by a loop: losses (N,) and gradient of their sum (N, D)."""
    wide = student.double(), teacher.double()
    expected = value_and_grad(nearest, *wide, *labels, options["k"])
    actual = value_and_grad(function, student, teacher, *labels, reduction="none", **options)
    for a, e in zip(actual, expected, strict=True):
        assert_accurate(a, e, student.dtype)


@pytest.fixture(params=[False, True], ids=["", "without looking"])
def searches(request, monkeypatch):
    """PyTorch's search on the CPU, and that of a GPU, which doesn't read values."""
    if request.param:
        monkeypatch.setattr("fastkd.losses.neighbours.values_readable", lambda x: False)


def both_searches(test):
    """The kernels have one."""
    of_kernels = pytest.mark.left_out(
        where=lambda given: given.get("backend") == "triton" and given["searches"]
    )
    return pytest.mark.usefixtures("searches")(of_kernels(test))


@both_searches
@pytest.mark.parametrize(
    ("rows", "k", "repeats"), [(12, 1, 1), (12, 3, 1), (80, 2, 1), (80, 2, 10)]
)
def test_near_duplicates_in_the_bank(backend, rows, k, repeats):
    """The last are too many to compare all pairs."""
    repeats = 1 if backend == "triton" else repeats
    given = near_duplicates(rows, repeats=repeats)
    check_against_loop(knn_feature_loss, *given, k=k, backend=backend)


def test_near_duplicates_in_halves(backend):
    # bfloat16 rows one unit of the last digit apart, far from the origin: exact products, long sums
    teacher = (40 + torch.randint(-1, 2, (40, 600)) / 4).bfloat16()
    student = (teacher[::10].float() + torch.randint(-1, 2, (4, 600)) / 4).bfloat16()
    labels = torch.zeros(4), torch.zeros(40)
    check_against_loop(knn_feature_loss, student, teacher, *labels, k=3, backend=backend)


@pytest.mark.parametrize("repeats", [1, 40])
def test_near_duplicates_in_float64(repeats):
    given = near_duplicates(30, torch.float64, spread=1e-10, repeats=repeats)
    check_against_loop(knn_feature_loss, *given, k=2)


def test_products_and_squares_that_overflow_choose_the_nearest():
    rows, labels = 6e18 * torch.randn(120, 4), torch.zeros(120).long()
    for k in (1, 3):  # 2 s·t is beyond float32, ‖s − t‖² is not
        options = {"k": k, "reduction": "none"}
        losses = knn_feature_loss(rows, rows, labels, **options, backend="torch")
        expected = knn_feature_loss_ref(rows.double(), rows.double(), labels, **options)
        assert_accurate(losses, expected, torch.float32)
    student = torch.tensor([[1e200], [-1e200]], dtype=torch.float64)
    teacher = torch.cat([1.5 * student[1:], student])
    losses = knn_feature_loss(student, teacher, torch.zeros(2), torch.zeros(3), reduction="none")
    assert losses.tolist() == [0, 0]


@both_searches
def test_a_far_row_of_the_bank_costs_the_others_no_digits(backend):
    student, teacher, *labels = batch(6, 20, 5, 1, dtype=torch.float32)
    teacher[3] = 1e19
    check_against_loop(knn_feature_loss, student, teacher, *labels, k=2, backend=backend)


@both_searches
def test_nan_affects_rows_of_its_own_label_only(backend):
    labels = torch.tensor([0, 1, 2, 0, 1, 3]), torch.arange(20) % 3
    lost = torch.tensor([False, True, False, True, True, False])
    for bad in (torch.nan, torch.inf, -torch.inf):
        student, teacher, *_ = batch(6, 20, 5, 1, dtype=torch.float32)
        options = {"k": 2, "reduction": "none"}
        loss = functools.partial(knn_feature_loss, backend=backend, **options)
        clean = value_and_grad(loss, student, teacher, *labels)
        teacher[4, 2] = bad  # label 1
        student[3, 0] = bad  # label 0
        found = value_and_grad(loss, student, teacher, *labels)
        for x, y in zip(found, clean, strict=True):
            assert x[lost].isnan().all() and torch.equal(x[~lost], y[~lost])
        plain = knn_feature_loss_ref(student, teacher, *labels, **options)
        assert torch.equal(plain.isnan(), lost)


@both_searches
def test_edges_of_every_search(backend):
    """The row's ties and degenerate banks."""
    for name, call, student, value, gradient, *_ in edges(backend):
        found = value_and_grad(call, student)
        assert found[0] == pytest.approx(value, rel=1e-6), name
        expected = torch.as_tensor(gradient, dtype=torch.float32).expand_as(student)
        torch.testing.assert_close(found[1], expected, msg=name)


# Labels


def matched(student_labels, teacher_labels, **options):
    """Indices of the bank's rows, up to eight, that each student row is compared with."""
    teacher = (4.0 ** torch.arange(len(teacher_labels))).sqrt()[:, None]
    labels = torch.tensor(student_labels), torch.tensor(teacher_labels)
    losses = knn_feature_loss(
        torch.zeros(len(student_labels), 1), teacher, *labels,
        k=len(teacher_labels), reduction="none", **options,
    )  # fmt: skip
    return [[j for j in range(len(teacher)) if int(loss) >> 2 * j & 1] for loss in losses]


def test_labels_equal_within_float64_rounding(backend):
    big, least, greatest = 2**53, -(2**63), 2**63 - 1
    for tolerance, expected in ((None, []), (0, []), (0.9, []), (1, [0, 2]), (2, [0, 1, 2])):
        for sign in (1, -1):
            bank = [sign * big, sign * (big + 3), sign * (big + 2)]
            options = {"tolerance": tolerance, "backend": backend}
            assert matched([sign * (big + 1)], bank, **options) == [expected]
    for tolerance, expected in (
        (1, [[1], [0]]),
        (2**63, [[1, 2], [0, 2]]),
        (1e30, [[0, 1, 2], [0, 1, 2]]),
    ):
        options = {"tolerance": tolerance, "backend": backend}
        assert matched([least, greatest], [greatest, least, 0], **options) == expected
    # The difference is the labels' own: 0.3 - 0.2 in float32 is a little more than 0.1.
    rows = torch.ones(1, 2)
    for pair in ((0.3, 0.2), (0.2, 0.1), (-0.1, 0.0), (2.5, 2.25), (1.1, 1.0)):
        for dtype in (torch.float32, torch.float64):
            own, other = (torch.tensor([label], dtype=dtype) for label in pair)
            found = knn_feature_loss(rows, 2 * rows, own, other, tolerance=0.1, backend=backend)
            assert found == float(abs(own.double() - other.double()) <= 0.1)


def test_ignored_rows_are_left_out(backend):
    labels, bank = [-100, 1, -101, 2], [1, -100, -100, -101, 2]
    floats = [float(label) for label in labels], [float(label) for label in bank]
    for given in ((labels, bank), floats):
        assert matched(*given, backend=backend) == [[], [0], [3], [4]]
    assert matched(labels, bank, tolerance=1, backend=backend) == [[], [0, 4], [3], [0, 4]]
    expected = [[1, 2, 3], [], [1, 2, 3], [4]]
    assert matched(labels, bank, tolerance=1, ignore_index=1, backend=backend) == expected
    # 156 is -100 in eight bits, but must not be ignored.
    narrow = torch.tensor([156], dtype=torch.uint8)
    assert knn_feature_loss(torch.zeros(1, 1), torch.ones(1, 1), narrow, narrow) == 1


def test_real_labels_without_a_tolerance_warn():
    student, teacher = torch.randn(2, 4, 3)
    labels = torch.tensor([0.5, 1.25, 2.0, 3.0])
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
    bank_mask = torch.rand(7, 3) > 0.3
    bank_mask[:, 0] = True
    hidden = teacher.masked_fill(~bank_mask[..., None], torch.nan)
    module = IntraClassKNNLoss(k=2, pool="mean")
    found = module(student, hidden, labels, bank_labels, teacher_mask=bank_mask)
    rows = pooled(teacher, bank_mask, "mean")
    wanted = knn_feature_loss(student.mean(1), rows, labels, bank_labels, k=2)
    torch.testing.assert_close(found, wanted)
    half = IntraClassKNNLoss(student_dim=6, teacher_dim=3).bfloat16()  # projects in the wider dtype
    assert half(student, teacher[:4, :, :3], labels).dtype == torch.float32


def test_only_unequal_sizes_are_projected():
    for sizes in ((None, None), (4, None), (None, 5), (4, 4)):
        assert IntraClassKNNLoss(student_dim=sizes[0], teacher_dim=sizes[1]).projector is None
    assert IntraClassKNNLoss(student_dim=4, teacher_dim=5).projector is not None
