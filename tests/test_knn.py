"""Intra-class KNN: selection and value against a loop, memory banks, labels with tolerance."""

import functools
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkd._core.products import HALF
from fastkd.losses.knn import (
    IntraClassKNNLoss,
    intra_class_similarity,
    knn_feature_loss,
    knn_feature_loss_ref,
)
from tests.losses.knn import class_similarity, nearest
from tests.support.compare import (
    DTYPES,
    assert_accurate,
    assert_matches_reference,
    count_graphs,
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


@pytest.mark.parametrize("function", [knn_feature_loss, knn_feature_loss_ref])
def test_worked_example(function):
    student = torch.tensor([[0.0, 0.0], [5.0, 5.0], [9.0, 9.0]])
    bank = torch.tensor([[0.0, 2.0], [1.0, 0.0], [5.0, 4.0], [0.0, 0.1]])
    labels = torch.tensor([0, 1, 7]), torch.tensor([0, 0, 1, 2])
    # Row 0: 1 and 4, over D = 2; row 1: only one of its label, at 1; row 2: none.
    assert torch.allclose(
        function(student, bank, *labels, k=1, reduction="none"), torch.tensor([0.5, 0.5, 0.0])
    )
    assert torch.allclose(
        function(student, bank, *labels, k=2, reduction="none"), torch.tensor([2.5, 0.5, 0.0])
    )
    assert function(student, bank, *labels, k=2) == 3
    assert function(student, bank, *labels, k=2, reduction="mean") == 1
    labels = torch.tensor([0.0, 1.0, 7.0]), torch.tensor([0.4, -0.5, 1.6, 6.9])
    losses = function(student, bank, *labels, k=2, tolerance=0.5, reduction="none")
    assert torch.allclose(losses, torch.tensor([2.5, 0.0, (81 + 8.9**2) / 2]))


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


@pytest.mark.parametrize("size", SIZES, ids=str)
@every_search
def test_equals_a_loop(size):
    *shape, k = size
    student, teacher, *labels = batch(*shape)
    for tolerance in (None, 1):
        expected = loop(student, teacher, *labels, k, tolerance)
        for function in (knn_feature_loss, knn_feature_loss_ref):
            losses, grad = value_and_grad(
                function, student, teacher, *labels, k=k, tolerance=tolerance, reduction="none"
            )
            assert torch.allclose(losses, expected[0], rtol=1e-12)
            assert torch.allclose(grad, expected[1], rtol=1e-10)


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

    student, teacher, *_ = batch(4, 5, 6, 1, dtype=torch.float32)
    student[0], teacher[1] = torch.nan, torch.inf
    labels = torch.tensor(labels), torch.tensor(bank)
    for reduction in ("sum", "mean"):
        options = {"k": 2, "reduction": reduction}
        check(backend, student, teacher, *labels, **options)
        loss, grad = value_and_grad(
            knn_feature_loss, student, teacher, *labels, backend=backend, **options
        )
        kept = [part[1:] for part in (student, labels[0])]
        expected = value_and_grad(
            knn_feature_loss, kept[0], teacher, kept[1], labels[1], backend=backend, **options
        )
        assert torch.equal(loss, expected[0])
        assert torch.equal(grad[1:], expected[1])
        assert (grad[0] == 0).all()
        nothing = knn_feature_loss(
            student, teacher, torch.full((4,), -100), labels[1], backend=backend, **options
        )
        assert nothing == 0
    # 156 is -100 in eight bits, but must not be ignored.
    labels = torch.full((4,), 156, dtype=torch.uint8)
    check(backend, student[1:], teacher[2:], labels[1:], labels[1:], reduction="mean")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bool, torch.float32])
def test_label_dtypes(backend, dtype):
    student, teacher, *labels = batch(9, 9, 5, 3 if dtype != torch.bool else 2, dtype=torch.float32)
    labels = [label.to(dtype) for label in labels]
    check(backend, student, teacher, *labels, k=2)
    check(backend, student, teacher, labels[0].long(), labels[1], k=2)
    if dtype != torch.bool:
        check(backend, student, teacher, *labels, k=2, tolerance=1)


def test_trailing_dimensions_and_strided_labels(backend):
    student, teacher = torch.randn(6, 5, 4), torch.randn(11, 5, 4)
    labels = torch.randint(0, 2, (12,))[::2], torch.randint(0, 2, (11,))
    check(backend, student, teacher, *labels, k=2)
    flat = knn_feature_loss(student.flatten(1), teacher.flatten(1), *labels, k=2, backend=backend)
    assert torch.equal(knn_feature_loss(student, teacher, *labels, k=2, backend=backend), flat)


@every_search
def test_ties_go_to_the_lower_index(backend):
    student = torch.zeros(3, 2)
    teacher = torch.tensor([[2.0, 0], [0, 1.0], [-1.0, 0], [0, -1.0], [1.0, 0]])
    labels = torch.tensor([0, 1, 0]), torch.zeros(5, dtype=torch.long)
    _, grad = value_and_grad(knn_feature_loss, student, teacher, *labels, k=2, backend=backend)
    assert torch.equal(grad, torch.tensor([[1.0, -1.0], [0, 0], [1.0, -1.0]]))
    # Also across labels, for every order of a search by label.
    labels = torch.zeros(3), torch.tensor([0.0, 0.4, 0.3, 0.2, 0.1])
    _, grad = value_and_grad(
        knn_feature_loss, student, teacher, *labels, tolerance=0.5, backend=backend
    )
    assert torch.equal(grad, torch.tensor([[0.0, -1.0]]).expand(3, 2))


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


@every_search
def test_many_ties_go_to_the_lower_index(backend):
    # Rows of equal norm: more than the list of candidates holds.
    teacher = torch.cat([2 * torch.eye(40)[:20], torch.eye(40), torch.eye(40)[:30]])
    student = torch.zeros(2, 40)
    for labels, tolerance in (
        ((torch.zeros(2), torch.zeros(90)), None),
        ((torch.zeros(2), torch.arange(90).flip(0) / 100), 1.0),
    ):
        _, grad = value_and_grad(
            knn_feature_loss, student, teacher, *labels, k=2, tolerance=tolerance, backend=backend
        )
        expected = torch.zeros(2, 40)
        expected[:, :2] = -2 / 40
        assert torch.equal(grad, expected)


@every_search
@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e18])
def test_extreme_scales(backend, scale):
    student, teacher, *labels = batch(6, 40, 8, 2, dtype=torch.float32)
    _, expected = value_and_grad(
        knn_feature_loss_ref, student.double(), teacher.double(), *labels, k=2
    )
    _, grad = value_and_grad(
        knn_feature_loss, student * scale, teacher * scale, *labels, k=2, backend=backend
    )
    assert_accurate(grad.double() / scale, expected, torch.float32)


def test_squares_beyond_float32(backend):
    teacher = torch.full((2, 400), 1.5e18)
    teacher[1] = 1e19
    student, labels = torch.zeros(2, 400), torch.arange(2)
    for reduction in ("none", "mean"):
        expected = knn_feature_loss_ref(
            student.double(), teacher.double(), labels, reduction=reduction
        )
        loss = knn_feature_loss(student, teacher, labels, reduction=reduction, backend=backend)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    # Two losses whose sum is beyond float32, and their mean, which is not.
    teacher[:] = 1.7e19
    loss = knn_feature_loss(student, teacher, labels, reduction="mean", backend=backend)
    assert loss.item() == pytest.approx(1.7e19**2, rel=1e-6)


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
def test_zero_and_constant_features(backend):
    labels = torch.tensor([0, 1, 0]), torch.tensor([0, 0, 1, 1])
    for value in (0.0, 0.1, 1e4):
        student, teacher = torch.full((3, 6), value), torch.full((4, 6), value)
        loss, grad = value_and_grad(
            knn_feature_loss, student, teacher, *labels, k=2, backend=backend
        )
        assert loss == 0
        assert (grad == 0).all()


def test_loss_without_neighbours_is_zero(backend):
    student, teacher, *_ = batch(3, 4, 5, 1, dtype=torch.float32)
    teacher[2] = torch.nan
    cases = [
        (student, teacher, torch.tensor([0, 1, 2]), torch.tensor([5, 6, 7, 8])),
        (student, teacher[:0], torch.tensor([0, 1, 2]), torch.zeros(0)),
        (student[:0], teacher, torch.zeros(0), torch.zeros(4)),
        (student[:, :0], teacher[:, :0], torch.zeros(3), torch.zeros(4)),
    ]
    for arguments in cases:
        assert knn_feature_loss_ref(*arguments, k=3) == 0
        for reduction in ("sum", "mean"):
            loss, grad = value_and_grad(
                knn_feature_loss, *arguments, k=3, reduction=reduction, backend=backend
            )
            assert loss == 0
            assert (grad == 0).all()


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


def test_two_graphs_serve_all_sizes():
    """The kernels, one operator in a graph, are in test_promises.py."""
    loss = functools.partial(knn_feature_loss, k=2, reduction="mean", backend="torch")

    def calls():
        for n in (4, 5, 8, 17, 64):
            student, teacher, *labels = batch(n, n + 1, n + 2, 3, dtype=torch.float32)
            yield student.requires_grad_(), teacher, *labels

    assert count_graphs(loss, calls()) <= 2


def test_compiles_with_a_tensor_given_twice(backend):
    student, labels = torch.randn(6, 5, requires_grad=True), torch.arange(6) % 3
    loss = functools.partial(knn_feature_loss, k=2, backend=backend)

    def call(student, labels):
        teacher = student.detach()
        return loss(student, teacher.flip(0), labels, labels) + loss(student, teacher, labels)

    assert count_graphs(call, [(student, labels)]) == 1


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


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 12), bank=st.integers(1, 30), size=st.integers(1, 6), k=st.integers(1, 6),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_loss_is_invariant_under_order_rotation_and_shift(rows, bank, size, k, seed):
    torch.manual_seed(seed)
    student, teacher, own, labels = batch(rows, bank, size, 3)
    losses = knn_feature_loss(student, teacher, own, labels, k=k, reduction="none")
    assert torch.allclose(losses, loop(student, teacher, own, labels, k)[0])
    order = torch.randperm(bank)
    rotation = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q
    moved = student @ rotation + 3, teacher[order] @ rotation + 3, own, labels[order]
    found = knn_feature_loss(*moved, k=k, reduction="none")
    assert torch.allclose(found, losses, atol=1e-10)
    # A row's loss depends on its own class only.
    far = torch.where((labels == own[0])[:, None], teacher, 1e6)
    assert torch.allclose(knn_feature_loss(student[:1], far, own[:1], labels, k=k), losses[0])


def test_module_pools_and_projects():
    student, teacher = torch.randn(4, 5, 6), torch.randn(4, 5, 6)
    labels = torch.tensor([0, 1, 0, 1])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [1, 0, 0, 0, 0]])
    noisy = [x.masked_fill(mask[..., None] == 0, torch.nan) for x in (student, teacher)]
    for pool in ("cls", "mean", "tokens"):

        def rows(x, pool=pool):
            return x * mask[..., None] if pool == "tokens" else pooled(x, mask.bool(), pool)

        loss = IntraClassKNNLoss(k=2, pool=pool)
        assert not list(loss.parameters())
        expected = knn_feature_loss(rows(student), rows(teacher), labels, k=2)
        assert torch.allclose(loss(*noisy, labels, mask=mask), expected)
        wide = torch.randn(7, 5, 6)
        bank_labels, bank_mask = torch.arange(7) % 2, torch.ones(7, 5)
        out = loss(noisy[0], wide, labels, bank_labels, mask=mask, teacher_mask=bank_mask)
        assert out.isfinite()

        # The projector's bias must not become a feature at padding.
        loss = IntraClassKNNLoss(k=2, student_dim=6, teacher_dim=3, pool=pool)
        narrow = noisy[1][..., :3]
        projected = rows(loss.projector(student))
        expected = knn_feature_loss(projected, rows(teacher[..., :3]), labels, k=2)
        actual = loss(noisy[0], narrow, labels, mask=mask)
        assert torch.allclose(actual, expected, rtol=1e-5)
        actual.backward()
        assert loss.projector.weight.grad.isfinite().all()
    features = torch.randn(4, 6), torch.randn(9, 6)
    bank_labels = torch.arange(9) % 2
    assert torch.equal(
        IntraClassKNNLoss(tolerance=1, reduction="mean")(*features, labels, bank_labels),
        knn_feature_loss(*features, labels, bank_labels, tolerance=1, reduction="mean"),
    )


@pytest.mark.parametrize("pool", ["cls", "mean", "tokens"])
def test_module_projects_in_the_wider_dtype(pool):
    loss = IntraClassKNNLoss(student_dim=6, teacher_dim=3, pool=pool)
    student, teacher, labels = torch.randn(4, 5, 6), torch.randn(4, 5, 3), torch.zeros(4)
    expected = loss(student, teacher, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss(student, teacher, labels), expected)
    half = loss(student.bfloat16(), teacher.bfloat16(), labels)
    same = loss(student.bfloat16().float(), teacher.bfloat16().float(), labels)
    torch.testing.assert_close(half, same, rtol=1e-2, atol=0)
    assert loss.bfloat16()(student, teacher, labels).dtype == torch.float32
    with pytest.raises(ValueError, match="student must have student_dim=6 features, got 7"):
        loss(torch.randn(4, 5, 7), teacher, labels)


@pytest.mark.parametrize("pool", ["cls", "mean", "tokens"])
def test_module_without_tokens_is_zero(pool):
    for mask in (None, torch.ones(3, 0)):
        student = torch.randn(3, 0, 4, requires_grad=True)
        loss = IntraClassKNNLoss(pool=pool)(
            student, torch.randn(3, 0, 4), torch.zeros(3), mask=mask
        )
        loss.backward()
        assert loss == 0 and student.grad.shape == student.shape


def test_mask_applies_to_both_models_or_is_refused():
    loss = IntraClassKNNLoss(pool="mean")
    student, teacher, labels = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.arange(2)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    padded = teacher.masked_fill(mask[..., None] == 0, torch.nan)
    rows = student.mean(1)
    assert loss(rows, padded, labels, mask=mask).isfinite()
    with pytest.raises(
        ValueError, match=r"mask has shape \(2, 3\), which doesn't fit teacher \(2, 5, 4\)"
    ):
        loss(student, torch.randn(2, 5, 4), labels, mask=mask)
    with pytest.raises(ValueError, match=r"mask: student \(2, 4\) has no tokens to mask"):
        loss(rows, rows, labels, mask=mask[:, 0])
    with pytest.raises(ValueError, match=r"teacher_mask: teacher \(2, 4\) has no tokens"):
        loss(student, rows, labels, mask=mask, teacher_mask=mask[:, 0])


@pytest.mark.parametrize("rows", [4, 700])
def test_ties_under_a_default_device(rows):
    teacher = torch.ones(rows, 3)
    arguments = torch.zeros(rows, 3), teacher, torch.zeros(rows)
    expected = knn_feature_loss(*arguments)
    with torch.device("meta"):
        assert torch.equal(knn_feature_loss(*arguments), expected)


def test_intra_class_similarity_on_the_meta_device():
    x, labels = torch.randn(4, 3, device="meta"), torch.zeros(4, device="meta")
    assert intra_class_similarity(x, labels).shape == ()


def test_intra_class_similarity():
    features = torch.randn(9, 5, dtype=torch.float64)
    features[4] = 0
    features[6:8] *= torch.tensor([[1e-200], [1e200]], dtype=torch.float64)
    labels = torch.tensor([3, 1, 3, -2, 3, 1, 1, 3, 1])
    expected = class_similarity(features, labels).item()
    assert intra_class_similarity(features, labels) == pytest.approx(expected, abs=1e-12)
    assert intra_class_similarity(features.float()[:0], labels[:0]) == 0
    features = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: intra_class_similarity(x, torch.tensor([0, 1, 0, 0, 1])), features
    )
    zero = torch.zeros(3, 4, requires_grad=True)
    intra_class_similarity(zero, torch.zeros(3)).backward()
    assert zero.grad.isfinite().all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"teacher": torch.randn(4, 7)}, ValueError, "as many features per row"),
        ({"teacher": torch.randn(6, 8)}, ValueError, "teacher_labels is missing"),
        ({"teacher_labels": torch.zeros(5)}, ValueError, r"teacher_labels must have shape \(4,\)"),
        ({"student_labels": torch.zeros(3)}, ValueError, r"student_labels must have shape \(4,\)"),
        ({"student_labels": None}, TypeError, "student_labels must be a Tensor"),
        ({"k": 0}, ValueError, "k must be at least 1"),
        ({"k": 1.5}, TypeError, "k must be an int"),
        ({"tolerance": -1.0}, ValueError, "tolerance must be at least 0"),
        ({"ignore_index": 0.5}, TypeError, "ignore_index must be an int"),
    ],
)
def test_bad_input(change, error, message):
    arguments = dict(zip(("student", "teacher"), torch.randn(2, 4, 8), strict=True))
    arguments["student_labels"] = torch.zeros(4)
    with pytest.raises(error, match=message):
        knn_feature_loss(**arguments | change)


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
