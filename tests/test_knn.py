"""Intra-class KNN: selection and value against a loop, memory banks, labels with tolerance."""

import functools
import warnings

import pytest
import torch

from fastkd._core.products import HALF
from fastkd.losses.knn import (
    IntraClassKNNLoss,
    intra_class_similarity,
    knn_feature_loss,
    knn_feature_loss_ref,
)
from tests import fuzz
from tests.losses.knn import edges, nearest
from tests.support.compare import (
    DTYPES,
    assert_accurate,
    assert_matches_reference,
    counted,
    value_and_grad,
)
from tests.support.oracles import pooled

pytestmark = pytest.mark.usefixtures("tensors_on_device")

TRITON_FUNCTION = "knn_feature_loss"

# rows, bank, features, classes, k
SIZES = [
    (1, 1, 1, 1, 1),
    (2, 15, 3, 2, 2),
    (16, 17, 16, 3, 1),
    (17, 16, 33, 4, 5),
    (5, 129, 7, 2, 3),
    (40, 40, 8, 40, 4),
    (9, 70, 12, 2, 32),
]


def batch(rows, bank, features, classes, dtype=torch.float64, mean=0.0):
    student = torch.randn(rows, features, dtype=torch.float64) + mean
    teacher = torch.randn(bank, features, dtype=torch.float64) + mean
    labels = torch.randint(0, classes, (rows,)), torch.randint(0, classes, (bank,))
    return student.to(dtype), teacher.to(dtype), *labels


check = functools.partial(assert_matches_reference, knn_feature_loss, knn_feature_loss_ref)
# The paper's l_hidd by a loop: losses (N,) and gradient of their sum (N, D).
loop = functools.partial(value_and_grad, nearest)


@pytest.fixture(params=["small", "large", "without looking"])
def searches(request, monkeypatch):
    """PyTorch's three searches: small problems, large problems, and without reading values."""
    if request.param == "small":
        return
    monkeypatch.setattr("fastkd.losses.neighbours.SMALL_PROBLEM", 0)
    if request.param == "without looking":
        monkeypatch.setattr("fastkd.losses.neighbours.values_readable", lambda x: False)


def every_search(test):
    """Run each of PyTorch's searches; the kernels have one."""
    of_kernels = pytest.mark.left_out(
        where=lambda given: given.get("backend") == "triton" and given["searches"] != "small"
    )
    return pytest.mark.usefixtures("searches")(of_kernels(test))


# The interpreter is slow: few sizes in half precision, which differs in loads and stores alone.
@pytest.mark.left_out(
    where=lambda given: (
        given["backend"] == "triton"
        and given["dtype"] in HALF
        and SIZES.index(given["size"]) % 4 != HALF.index(given["dtype"])
    )
)
@pytest.mark.within_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_matches_reference(backend, size, dtype, monkeypatch):
    *shape, k = size
    if backend == "torch":
        monkeypatch.setattr("fastkd.losses.neighbours.SMALL_PROBLEM", 0)
    student, teacher, *labels = batch(*shape, dtype=dtype, mean=0.5)
    upstream = torch.randn(len(student))
    arguments = backend, student, teacher, *labels
    check(*arguments, k=k)
    check(*arguments, k=k, reduction="none", upstream=upstream)
    options = {"tolerance": 1.0, "reduction": "mean", "upstream": torch.tensor(-3.0)}
    check(*arguments, k=k, **options)


def test_real_valued_labels(backend):
    student, teacher, *_ = batch(20, 50, 6, 1, dtype=torch.float32)
    labels = 5 * torch.rand(20), 5 * torch.rand(50)
    for tolerance in (0.0, 0.3, 10.0):
        check(backend, student, teacher, *labels, k=3, tolerance=tolerance)
    # The difference is the labels' own: 0.3 - 0.2 in float32 is a little more than 0.1.
    for labels in ((0.3, 0.2), (0.2, 0.1), (-0.1, 0.0), (2.5, 2.25), (1.1, 1.0)):
        for dtype in (torch.float32, torch.float64):
            some = [torch.tensor([label], dtype=dtype) for label in labels]
            check(backend, student[:1], teacher[:1], *some, tolerance=0.1)
    values = torch.arange(20, dtype=torch.float64) / 10
    check(backend, student, teacher[:20], values, values.flip(0), k=20, tolerance=0.3)


def matched(student_labels, teacher_labels, **options):
    """Indices of the bank's rows, up to eight, that each student row is compared with."""
    teacher = (4.0 ** torch.arange(len(teacher_labels))).sqrt()[:, None]
    losses = knn_feature_loss(
        torch.zeros(len(student_labels), 1),
        teacher,
        torch.tensor(student_labels),
        torch.tensor(teacher_labels),
        k=len(teacher_labels),
        reduction="none",
        **options,
    )
    return [[j for j in range(len(teacher)) if int(loss) >> 2 * j & 1] for loss in losses]


def test_labels_equal_within_float64_rounding(backend):
    big, least, greatest = 2**53, -(2**63), 2**63 - 1
    for tolerance, expected in ((None, []), (0, []), (0.9, []), (1, [0, 2]), (2, [0, 1, 2])):
        options = {"tolerance": tolerance, "backend": backend}
        assert matched([big + 1], [big, big + 3, big + 2], **options) == [expected]
        assert matched([-big - 1], [-big, -big - 3, -big - 2], **options) == [expected]
    ends = [greatest, least, 0]
    for tolerance, expected in (
        (1, [[1], [0]]),
        (2**63, [[1, 2], [0, 2]]),
        (1e30, [[0, 1, 2], [0, 1, 2]]),
    ):
        assert matched([least, greatest], ends, tolerance=tolerance, backend=backend) == expected


def test_ignored_rows_are_left_out(backend):
    labels, bank = [-100, 1, -101, 2], [1, -100, -100, -101, 2]
    assert matched(labels, bank, backend=backend) == [[], [0], [3], [4]]
    assert matched(labels, bank, tolerance=1, backend=backend) == [[], [0, 4], [3], [0, 4]]
    expected = [[1, 2, 3], [], [1, 2, 3], [4]]
    assert matched(labels, bank, tolerance=1, ignore_index=1, backend=backend) == expected
    floats = [float(label) for label in labels], [float(label) for label in bank]
    assert matched(*floats, backend=backend) == [[], [0], [3], [4]]

    # 156 is -100 in eight bits, but must not be ignored.
    student, teacher, *_ = batch(3, 3, 6, 1, dtype=torch.float32)
    labels = torch.full((3,), 156, dtype=torch.uint8)
    check(backend, student, teacher, labels, labels, reduction="mean")


def near_duplicates(rows, dtype=torch.float32, spread=1e-4):
    """Six students and four distant clusters; rows of one differ by less than rounding error."""
    clusters = 30 * torch.randn(4, 64, dtype=torch.float64)
    near = spread * torch.randn(4, rows, 64, dtype=torch.float64)
    teacher = (clusters[:, None] + near).flatten(0, 1)
    student = clusters[torch.tensor([0, 1, 2, 3, 0, 2])]
    student = student + 2 * spread * torch.randn(6, 64, dtype=torch.float64)
    labels = torch.zeros(6, dtype=torch.long), torch.zeros(4 * rows, dtype=torch.long)
    return student.to(dtype), teacher.to(dtype), *labels


def check_against_loop(function, student, teacher, *labels, **options):
    expected = loop(student.double(), teacher.double(), *labels, options["k"])
    actual = value_and_grad(function, student, teacher, *labels, reduction="none", **options)
    for a, e in zip(actual, expected, strict=True):
        assert_accurate(a, e, student.dtype)


@every_search
@pytest.mark.parametrize(("rows", "k"), [(12, 1), (12, 3), (80, 2)])
def test_near_duplicates_in_the_bank(backend, rows, k):
    check_against_loop(knn_feature_loss, *near_duplicates(rows), k=k, backend=backend)


def test_near_duplicates_in_halves(backend):
    # bfloat16 rows one unit of the last digit apart, far from the origin: exact products, long sums
    teacher = (40 + torch.randint(-1, 2, (100, 600)) / 4).bfloat16()
    student = (teacher[::25].float() + torch.randint(-1, 2, (4, 600)) / 4).bfloat16()
    labels = torch.zeros(4), torch.zeros(100)
    check_against_loop(knn_feature_loss, student, teacher, *labels, k=3, backend=backend)


@pytest.mark.parametrize("small_problem", [0, 2**20])
def test_near_duplicates_in_float64(monkeypatch, small_problem):
    monkeypatch.setattr("fastkd.losses.neighbours.SMALL_PROBLEM", small_problem)
    check_against_loop(knn_feature_loss, *near_duplicates(30, torch.float64, spread=1e-10), k=2)


def test_rows_of_all_scales_in_one_bank(backend):
    # The nearest is found among rows whose squares underflow and others whose squares overflow.
    student, teacher, *labels = batch(9, 60, 8, 3, dtype=torch.float32)
    scale = torch.tensor([1e-30, 1e-12, 1.0, 1e12, 1e25])
    student, teacher = student * scale[:3].repeat(3)[:, None], teacher * scale.repeat(12)[:, None]
    for k in (1, 3):
        _, grad = value_and_grad(
            knn_feature_loss, student, teacher, *labels, k=k, backend=backend, reduction="none"
        )
        _, expected = loop(student.double(), teacher.double(), *labels, k)
        for g, e in zip(grad, expected, strict=True):
            assert_accurate(g, e, torch.float32)


def test_products_beyond_float32_choose_the_nearest():
    # 2 s·t is beyond float32, ‖s − t‖² is not.
    rows, labels = 6e18 * torch.randn(120, 4), torch.zeros(120, dtype=torch.long)
    own = knn_feature_loss(rows, rows, labels, reduction="none", backend="torch")
    assert not own.any()
    options = {"k": 3, "reduction": "none"}
    losses = knn_feature_loss(rows, rows, labels, **options, backend="torch")
    expected = knn_feature_loss_ref(rows.double(), rows.double(), labels, **options)
    assert_accurate(losses, expected, torch.float32)


def test_squares_beyond_float64_choose_the_nearest():
    student = torch.tensor([[1e200], [-1e200]], dtype=torch.float64)
    teacher = torch.tensor([[-1.5e200], [1e200], [-1e200]], dtype=torch.float64)
    labels = torch.zeros(2, dtype=torch.long), torch.zeros(3, dtype=torch.long)
    losses = knn_feature_loss(student, teacher, *labels, reduction="none")
    assert losses.tolist() == [0, 0]


@every_search
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_affects_rows_of_its_own_label_only(backend, bad):
    student, teacher, *_ = batch(6, 20, 5, 1, dtype=torch.float32)
    labels = torch.tensor([0, 1, 2, 0, 1, 3]), torch.arange(20) % 3
    clean = value_and_grad(
        knn_feature_loss, student, teacher, *labels, k=2, reduction="none", backend=backend
    )
    teacher[4, 2] = bad  # label 1
    student[3, 0] = bad  # label 0
    losses, grad = value_and_grad(
        knn_feature_loss, student, teacher, *labels, k=2, reduction="none", backend=backend
    )
    lost = torch.tensor([False, True, False, True, True, False])
    assert losses[lost].isnan().all()
    assert grad[lost].isnan().all()
    assert torch.equal(losses[~lost], clean[0][~lost])
    assert torch.equal(grad[~lost], clean[1][~lost])
    assert torch.equal(
        knn_feature_loss_ref(student, teacher, *labels, k=2, reduction="none").isnan(), lost
    )


def test_compiles_without_graph_breaks():
    """Also the path for a GPU without Triton, which doesn't read values."""
    compiled, _ = counted(knn_feature_loss)
    student, teacher, *labels = batch(20, 70, 6, 3, dtype=torch.float32, mean=2.0)
    teacher[3, 1] = torch.nan
    for options in ({"k": 3, "reduction": "none"}, {"tolerance": 0.5, "reduction": "none"}):
        options["backend"] = "torch"
        eager = value_and_grad(knn_feature_loss, student, teacher, *labels, **options)
        traced = value_and_grad(compiled, student, teacher, *labels, **options)
        torch.testing.assert_close(traced, eager, equal_nan=True)
    check_against_loop(compiled, *near_duplicates(80), k=1, backend="torch")
    student, teacher, labels, _ = batch(8, 8, 6, 3, dtype=torch.float32)
    student[:2] = 1e25
    eager = value_and_grad(knn_feature_loss, student, teacher, labels, backend="torch")
    traced = value_and_grad(compiled, student, teacher, labels, backend="torch")
    torch.testing.assert_close(traced, eager)


@pytest.mark.parametrize(("k", "own"), [(1, 256), (4, 70), (1, 20), (4, 1)])
def test_many_blocks_match_the_reference(monkeypatch, k, own):
    # Blocks of 64 rows that begin and end within a label, or with it; banks in several parts.
    monkeypatch.setattr("fastkd.losses.neighbours.MAX_BLOCK_ROWS", 64)
    monkeypatch.setattr("fastkd.losses.neighbours.ROWS_OF_OWN", own)
    monkeypatch.setattr("fastkd.losses.neighbours.PAIR_ELEMENTS", 100)
    student, teacher, *labels = batch(300, 700, 6, 4)
    labels[1][labels[1] == 2] = 1  # a label that the bank does not have
    check("torch", student, teacher, *labels, k=k)
    check("torch", student, teacher, *labels, k=k, tolerance=1)
    reals = torch.rand(300, dtype=torch.float64), torch.rand(700)
    reals[0][5], reals[1][9], reals[1][10] = torch.nan, torch.nan, torch.inf
    reals[1][100:500] = torch.nan  # the common cases of a search among sorted labels
    check("torch", student, teacher, *reals, k=k, tolerance=0.05)


def test_intra_class_similarity_on_the_meta_device():
    x, labels = torch.randn(4, 3, device="meta"), torch.zeros(4, device="meta")
    assert intra_class_similarity(x, labels).shape == ()


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


@every_search
def test_edges_of_every_search(backend):
    """The row's ties and degenerate banks, by each of PyTorch's searches and by the kernels."""
    for name, call, student, value, gradient, *_ in edges(backend):
        found = value_and_grad(call, student)
        assert found[0] == pytest.approx(value, rel=1e-6), name
        expected = torch.as_tensor(gradient, dtype=torch.float32).expand_as(student)
        torch.testing.assert_close(found[1], expected, msg=name)


@pytest.mark.usefixtures("searches")
def test_random_calls_of_every_search():
    for seed in range(40):
        assert not fuzz.checked("knn", "torch", seed)


def test_intra_class_similarity_gradient():
    features = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1, 0, 0, 1])
    assert torch.autograd.gradcheck(lambda x: intra_class_similarity(x, labels), features)
    zero = torch.zeros(3, 4, requires_grad=True)
    intra_class_similarity(zero, torch.zeros(3)).backward()
    assert not zero.grad.any()


def test_a_teacher_with_masks_and_labels_of_its_own():
    student, teacher = torch.randn(4, 5, 6), torch.randn(7, 3, 6)
    labels, bank_labels, bank_mask = (
        torch.arange(4) % 2,
        torch.arange(7) % 2,
        torch.rand(7, 3) > 0.3,
    )
    bank_mask[:, 0] = True
    found = IntraClassKNNLoss(k=2, pool="mean")(
        student, teacher.masked_fill(~bank_mask[..., None], torch.nan), labels, bank_labels,
        teacher_mask=bank_mask,
    )  # fmt: skip
    rows = pooled(teacher, bank_mask, "mean")
    torch.testing.assert_close(
        found, knn_feature_loss(student.mean(1), rows, labels, bank_labels, k=2)
    )
    half = IntraClassKNNLoss(student_dim=6, teacher_dim=3).bfloat16()  # projects in the wider dtype
    assert half(student, teacher[:4, :, :3], labels).dtype == torch.float32
