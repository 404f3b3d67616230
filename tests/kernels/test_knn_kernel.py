"""What only the KNN kernels have: block edges, sorted banks, splits of bank and features."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from fastkd._core.dispatch import triton_interpreted
from fastkd.kernels import knn as kernels
from fastkd.losses.knn import knn_feature_loss
from tests.kernels.launches import count_launches
from tests.test_knn import batch, check, check_against_loop, near_duplicates


@pytest.fixture(autouse=True)
def _tensors_on_device(device):
    with device:
        yield


def sort_always(monkeypatch):
    monkeypatch.setattr("fastkd.kernels.knn.ROWS_TO_SORT", 1)
    monkeypatch.setattr("fastkd.kernels.knn.BANK_TO_SORT", 1)


@pytest.mark.parametrize(
    ("rows", "bank", "size"),
    [
        (1, 16, 15),
        (2, 127, 17),
        (31, 65, 16),
        (33, 128, 32),
        (65, 66, 33),
        (3, 129, 129),
        (2, 300, 20),
    ],
)
def test_block_edges(rows, bank, size):
    student, teacher, *labels = batch(rows, bank, size, 3, dtype=torch.float32, mean=0.5)
    check("triton", student, teacher, *labels, k=2, reduction="none", upstream=torch.randn(rows))


@pytest.mark.parametrize(("classes", "programs"), [(1, 1), (3, 8), (40, 2)])
def test_sorted_by_label(monkeypatch, classes, programs):
    sort_always(monkeypatch)
    monkeypatch.setattr("fastkd.kernels.knn.PROGRAMS", programs)
    student, teacher, *labels = batch(34, 100, 5, classes, dtype=torch.float32)
    labels[0][3] = classes  # a label that the bank does not have
    upstream = torch.randn(34)
    check("triton", student, teacher, *labels, k=3, reduction="none", upstream=upstream)
    check("triton", student, teacher, *labels, tolerance=1, reduction="none", upstream=upstream)


@pytest.mark.parametrize("copied", [True, False])
def test_sorted_in_half_precision(monkeypatch, copied):
    sort_always(monkeypatch)
    if not copied:
        monkeypatch.setattr("fastkd.kernels.knn.MOST_BYTES_TO_COPY", 0)
    monkeypatch.setattr("fastkd.kernels.knn.PROGRAMS", 1)
    student, teacher, *labels = batch(9, 70, 336, 1, dtype=torch.bfloat16, mean=0.5)
    check("triton", student, teacher, *labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sorted_real_labels(monkeypatch, dtype):
    sort_always(monkeypatch)
    student, teacher, *_ = batch(10, 100, 5, 1, dtype=torch.float32)
    labels = 5 * torch.rand(10, dtype=dtype), 5 * torch.rand(100, dtype=dtype)
    labels[0][2], labels[1][7], labels[1][9] = torch.nan, torch.nan, torch.inf
    check("triton", student, teacher, *labels, k=2, tolerance=0.3)
    student, teacher = torch.randn(40, 5), torch.randn(40, 5)
    check("triton", student, teacher, torch.randint(0, 3, (40,)), None, k=2)


def test_sorted_ignored_labels(monkeypatch):
    sort_always(monkeypatch)
    student, teacher, *labels = batch(40, 100, 5, 3, dtype=torch.float32)
    labels[0][::4], labels[1][::3] = 1, 1
    teacher[::3], student[::4] = torch.nan, torch.inf
    for tolerance in (None, 1, 5):
        options = {"tolerance": tolerance, "ignore_index": 1, "reduction": "mean"}
        check("triton", student, teacher, *labels, k=2, **options)


def test_labels_of_one_class_leave_work_for_all_programs(monkeypatch):
    # The bank rows of one tile are divided among programs, not the whole bank.
    sort_always(monkeypatch)
    student, teacher, *_ = batch(5, 400, 4, 1, dtype=torch.float32)
    labels = torch.full((5,), 7), torch.arange(400) // 40
    check("triton", student, teacher, *labels, k=3)
    scores = []
    monkeypatch.setattr(
        "fastkd.kernels.knn._search",
        lambda *arguments, search=kernels._search: scores.append(search(*arguments)) or scores[-1],
    )
    knn_feature_loss(student, teacher, *labels, backend="triton")
    busy = scores[0].view(torch.float32)[:, :, 0].isfinite().any(2).any(0)  # of the splits
    assert busy.sum() == -(-40 // kernels.sorted_blocks(4, False, 9)["BLOCK_M"])


@pytest.mark.parametrize("rows", [1, 64])
def test_few_rows_start_no_sort(monkeypatch, rows):
    monkeypatch.setattr("fastkd.kernels.knn.PROGRAMS", 1)
    student, teacher, *labels = batch(rows, 1500, 4, 2, dtype=torch.float32)
    for options in ({}, {"tolerance": 1}):
        with count_launches() as launches:
            knn_feature_loss(student, teacher, *labels, backend="triton", **options)
        assert not [name for name in launches if "sort" in name], launches
        names = ["knn_search_kernel", "knn_settle_kernel", "reduce_kernel"]
        assert launches.of_triton() == names


def test_slices_that_are_not_aligned():
    student, teacher, *labels = batch(9, 33, 16, 2, dtype=torch.float32)
    aligned = knn_feature_loss(student[1:], teacher[1:], labels[0][1:], labels[1][1:].clone())
    shifted = torch.zeros(34 * 16 + 1)[1:].view(34, 16)
    shifted[:33] = teacher
    loss = knn_feature_loss(
        student[1:], shifted[1:33], labels[0][1:], labels[1][1:], backend="triton"
    )
    torch.testing.assert_close(loss, aligned)


def test_features_split_among_programs(monkeypatch):
    monkeypatch.setattr("fastkd.kernels.knn.FEATURES_TO_SPLIT", 1000)
    student, teacher, *labels = batch(9, 33, 2500, 2, dtype=torch.float32, mean=0.5)
    check("triton", student, teacher, *labels, k=3)
    student[2, 2300], teacher[4, 10] = torch.nan, torch.inf
    losses = knn_feature_loss(student, teacher, *labels, reduction="none", backend="triton")
    lost = labels[0] == labels[1][4]
    lost[2] = True
    assert torch.equal(losses.isnan(), lost)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_neighbours_of_one_bucket(monkeypatch, is_sorted):
    """A bucket stores its first row only; the other neighbours are found among its rows."""
    monkeypatch.setattr("fastkd.kernels.knn.PROGRAMS", 1)  # large tiles
    monkeypatch.setattr("fastkd.kernels.knn.ROWS_AT_ONCE", 128)
    if is_sorted:
        sort_always(monkeypatch)
    student, teacher = torch.randn(130, 48), 9 + torch.randn(200, 48)
    for rank, row in enumerate((135, 71, 103, 39)):
        teacher[row] = student[1] + 0.1 * (rank // 2)  # equal rows: the lower index first
        teacher[row + 1] = student[129] + 0.1 * rank
    labels = torch.zeros(130), torch.zeros(200)
    for k in (1, 3):
        check_against_loop(knn_feature_loss, student, teacher, *labels, k=k, backend="triton")


@pytest.mark.parametrize("way", ["sorted", "sorted and split", "from products", "far apart"])
def test_near_duplicates(monkeypatch, way):
    student, teacher, *labels = near_duplicates(20)
    labels[1][::3] = 1  # of another label
    if way in ("from products", "far apart"):
        name = "FEATURES_TO_SPLIT" if way == "from products" else "FAR_APART"
        monkeypatch.setattr(f"fastkd.kernels.knn.{name}", 1)
    else:
        sort_always(monkeypatch)
        monkeypatch.setattr("fastkd.kernels.knn.PROGRAMS", 2 if way == "sorted and split" else 1)
    for tolerance in (None, 0.5):
        check_against_loop(
            knn_feature_loss, student, teacher, *labels, k=3, tolerance=tolerance, backend="triton"
        )


def cut_products(self, a, b, d, *_):
    """Four products at a time, cut at 2^-24 of the largest term, and the sum at 2^-23."""
    total = d.data.astype(np.float64)
    for first in range(0, a.data.shape[1], 4):
        part = slice(first, first + 4)
        terms = a.data[:, None, part].astype(np.float64) * b.data.T[None, :, part]
        terms = np.concatenate((terms, total[..., None]), -1)
        last_bit = 2.0 ** (np.frexp(abs(terms).max(-1))[1] - 25)
        total = (np.trunc(terms / last_bit[..., None]) * last_bit[..., None]).sum(-1)
        last_bit = 2.0 ** (np.frexp(total)[1] - 24)
        total = np.trunc(total / last_bit) * last_bit
    return TensorHandle(total.astype(np.float32), d.dtype.scalar)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_neighbour_whose_products_are_cut(monkeypatch, dtype):
    """All but one product of the nearest row are too small for the sum; other rows have none."""
    if not triton_interpreted():
        pytest.skip("the products of the interpreter are replaced")
    sort_always(monkeypatch)
    monkeypatch.setattr("fastkd.kernels.knn.PROGRAMS", 1)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", cut_products)
    student = torch.full((1, 256), 2.0**-6)
    teacher = torch.zeros(100, 256)
    teacher[87] = student * (1 - 2.0**-8)
    student[:, 0] = teacher[:, 0] = 64
    labels = torch.zeros(1), torch.zeros(100)
    kept = []

    def search(*arguments, search=kernels._search):
        kept.append(search(*arguments))
        return kept[-1]

    monkeypatch.setattr("fastkd.kernels.knn._search", search)
    arguments = student.to(dtype), teacher.to(dtype), *labels
    check_against_loop(knn_feature_loss, *arguments, k=1, backend="triton")
    assert 87 not in kept[0][:, :, 2]  # first of no bucket


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_behind_rows_that_overflow(dtype):
    # All of these come first in the search, and outnumber the candidates.
    student, teacher = torch.ones(2, 6, dtype=dtype), torch.full((40, 6), 1e25, dtype=dtype)
    teacher[35, 2] = torch.nan
    labels = torch.tensor([0, 1]), (torch.arange(40) == 39).long()
    losses = knn_feature_loss(student, teacher, *labels, reduction="none", backend="triton")
    assert losses[0].isnan()
    assert losses[1] == torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ordinary_rows_are_proven_without_a_second_look(monkeypatch, dtype):
    if not triton_interpreted():
        pytest.skip("only the interpreter calls what a test puts in a function's place")

    def second_look(*arguments):
        raise AssertionError("a second look")

    monkeypatch.setattr("fastkd.kernels.knn._insert_exact", second_look)
    student, teacher, *labels = batch(8, 200, 64, 2, dtype=dtype, mean=0.5)
    for k in (1, 8):
        knn_feature_loss(student, teacher, *labels, k=k, backend="triton")
    with pytest.raises(Exception, match="a second look"):
        knn_feature_loss(*near_duplicates(20), k=1, backend="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_one_direction_need_few_exact_comparisons(monkeypatch, dtype):
    """A mean cosine of .99, as of a language model: rounding decides between few rows."""
    if not triton_interpreted():
        pytest.skip("only the interpreter calls what a test puts in a function's place")
    sort_always(monkeypatch)
    monkeypatch.setattr("fastkd.kernels.knn.PROGRAMS", 4)
    distances, compared = kernels._distances, []

    def counted(s_ptr, t_ptr, rows, mask, *rest):
        compared.append(int(mask.handle.data.sum()))
        return distances(s_ptr, t_ptr, rows, mask, *rest)

    monkeypatch.setattr("fastkd.kernels.knn._distances", counted)
    student, teacher, *labels = batch(8, 4096, 768, 1, dtype=dtype, mean=99**0.5)
    knn_feature_loss(student, teacher, *labels, k=4, backend="triton")
    assert sum(compared) <= 64 * len(student)


def test_launches(monkeypatch):
    student, teacher, *labels = batch(6, 40, 8, 2, dtype=torch.float32)
    student.requires_grad_()
    for rows_to_sort, features_to_split in ((1000, 1000), (1, 1000), (1, 1)):
        monkeypatch.setattr("fastkd.kernels.knn.BANK_TO_SORT", rows_to_sort)
        monkeypatch.setattr("fastkd.kernels.knn.FEATURES_TO_SPLIT", features_to_split)
        for reduction in ("sum", "mean"):
            student.grad = None
            with count_launches() as launches:
                loss = knn_feature_loss(
                    student, teacher, *labels, k=3, reduction=reduction, backend="triton"
                )
                loss.backward()
            assert len(launches) <= 8, launches
            expected = 5 if features_to_split == 1 else 4
            assert len(launches.of_triton()) == expected, launches


def test_limits():
    student, teacher, *labels = batch(6, 40, 8, 2, dtype=torch.float32)
    with pytest.raises(ValueError, match="at most 32 neighbours, got 33"):
        knn_feature_loss(student, teacher, *labels, k=33, backend="triton")
