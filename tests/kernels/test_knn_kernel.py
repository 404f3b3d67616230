"""What only the KNN kernels have: block edges, splits of bank and features, launches."""

import functools

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from fastkd._core.dispatch import triton_interpreted
from fastkd.kernels import knn as kernels
from fastkd.losses.knn import knn_feature_loss, knn_feature_loss_ref
from tests.kernels.launches import count_launches
from tests.losses.knn import nearest
from tests.support.compare import assert_accurate, assert_matches_reference, value_and_grad

pytestmark = pytest.mark.usefixtures("tensors_on_device")
in_the_interpreter = pytest.mark.skipif(
    not triton_interpreted(), reason="only the interpreter calls what a test puts in its place"
)
# Constants from which on the kernels sort the bank, divide it among programs, or the features.
SORTED = {"ROWS_TO_SORT": 1, "BANK_TO_SORT": 1}
PARTS = SORTED | {"PROGRAMS": 2}
TWO_PARTS = {"PROGRAMS": 1, "ROWS_AT_ONCE": 32}


def batch(rows, bank, features, classes, dtype=torch.float64, mean=0.0):
    student = torch.randn(rows, features, dtype=torch.float64) + mean
    teacher = torch.randn(bank, features, dtype=torch.float64) + mean
    labels = torch.randint(0, classes, (rows,)), torch.randint(0, classes, (bank,))
    return student.to(dtype), teacher.to(dtype), *labels


check = functools.partial(assert_matches_reference, knn_feature_loss, knn_feature_loss_ref)


def check_against_loop(student, teacher, *labels, k):
    """The paper's l_hidd by a loop: losses (N,) and gradient of their sum (N, D)."""
    expected = value_and_grad(nearest, student.double(), teacher.double(), *labels, k)
    options = {"k": k, "reduction": "none", "backend": "triton"}
    actual = value_and_grad(knn_feature_loss, student, teacher, *labels, **options)
    for a, e in zip(actual, expected, strict=True):
        assert_accurate(a, e, student.dtype)


@pytest.fixture
def form(request, monkeypatch):
    """Set a form's constants."""
    for name, value in getattr(request, "param", {}).items():
        monkeypatch.setattr(kernels, name, value)


def in_form(**forms):
    """A test in forms, by name."""
    return pytest.mark.parametrize("form", forms.values(), ids=forms, indirect=True)


@pytest.mark.parametrize(
    ("form", "rows", "bank", "size"),
    [({}, 33, 66, 33), (PARTS, 2, 127, 17), (PARTS, 33, 64, 32)],
    indirect=["form"],
)
def test_block_edges(form, rows, bank, size):
    """Also with a label that the bank lacks, and with ignored rows."""
    student, teacher, *labels = batch(rows, bank, size, 3, dtype=torch.float32, mean=0.5)
    labels[0][1] = 7
    options = {"k": 2, "reduction": "none", "upstream": torch.randn(rows)}
    check("triton", student, teacher, *labels, **options)
    labels[0][:1], labels[1][::3] = 1, 1
    student[:1], teacher[::3] = torch.nan, torch.inf
    check("triton", student, teacher, *labels, **options, ignore_index=1, tolerance=5)


@in_form(sorted=PARTS, products={"FEATURES_TO_SPLIT": 1}, far={"FAR_APART": 1})
def test_near_duplicates(form):
    """Rows of distant clusters, by less than rounding error apart."""
    student, teacher, *labels = batch(6, 80, 64, 2)
    centres = 30 * torch.randn(4, 64, dtype=torch.float64)
    near = (centres[torch.arange(len(x)) % 4] + 1e-4 * x for x in (student, teacher))
    check_against_loop(*(x.float() for x in near), *labels, k=3)


@in_form(sorted=TWO_PARTS | SORTED, unsorted=TWO_PARTS)
def test_neighbours_of_one_bucket(form):
    """A bucket stores its first row only; the other neighbours are found among its rows."""
    student, teacher = torch.randn(34, 8), 9 + torch.randn(140, 8)
    for rank, row in enumerate((135, 71, 103, 39)):
        teacher[row] = student[1] + 0.1 * (rank // 2)  # equal rows: the lower index first
        teacher[row + 1] = student[33] + 0.1 * rank
    labels = torch.ones(34), torch.zeros(140)  # other rows have no neighbours
    labels[0][[1, 33]] = 0
    check_against_loop(student, teacher, *labels, k=3)


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


@in_the_interpreter
@in_form(one=SORTED | {"PROGRAMS": 1})
def test_a_neighbour_whose_products_are_cut(form, monkeypatch):
    """All but one product of the nearest row are too small for the sum; other rows have none."""
    monkeypatch.setattr(InterpreterBuilder, "create_dot", cut_products)
    student = torch.full((1, 256), 2.0**-6)
    teacher = torch.zeros(100, 256)
    teacher[87] = student * (1 - 2.0**-8)
    student[:, 0] = teacher[:, 0] = 64
    kept, search = [], kernels._search
    monkeypatch.setattr(kernels, "_search", lambda *x: kept.append(search(*x)) or kept[-1])
    for dtype in (torch.float16, torch.bfloat16):
        given = student.to(dtype), teacher.to(dtype), torch.zeros(1), torch.zeros(100)
        check_against_loop(*given, k=1)
        assert 87 not in kept[-1][:, :, 2]  # first of no bucket


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_behind_rows_that_overflow(dtype):
    # All of these come first in the search, and outnumber the candidates.
    student, teacher = torch.ones(2, 6, dtype=dtype), torch.full((40, 6), 1e25, dtype=dtype)
    teacher[35, 2] = torch.nan
    labels = torch.tensor([0, 1]), (torch.arange(40) == 39).long()
    losses = knn_feature_loss(student, teacher, *labels, reduction="none", backend="triton")
    assert losses[0].isnan() and losses[1] == torch.inf


@in_the_interpreter
@in_form(four=SORTED | {"PROGRAMS": 4})
def test_few_exact_comparisons(form, monkeypatch):
    """Ordinary rows are proven without a second look, rows that differ by rounding aren't.

    At a mean cosine of .99, as of a language model, rounding decides between few rows.
    """
    distances, insert, compared, looks = kernels._distances, kernels._insert_exact, [], []

    def counted(s_ptr, t_ptr, rows, mask, *rest):
        compared.append(int(mask.handle.data.sum()))
        return distances(s_ptr, t_ptr, rows, mask, *rest)

    monkeypatch.setattr(kernels, "_distances", counted)
    monkeypatch.setattr(kernels, "_insert_exact", lambda *x: looks.append(x) or insert(*x))
    for dtype, k in ((torch.float32, 8), (torch.bfloat16, 1)):
        knn_feature_loss(*batch(8, 100, 64, 2, dtype=dtype, mean=0.5), k=k, backend="triton")
    assert not looks
    student, teacher, *labels = batch(8, 100, 64, 2)
    near = (30 + 1e-4 * x for x in (student, teacher))
    knn_feature_loss(*(x.float() for x in near), *labels, k=1, backend="triton")
    assert looks
    compared.clear()
    given = batch(2, 2048, 768, 1, dtype=torch.bfloat16, mean=99**0.5)
    knn_feature_loss(*given, k=4, backend="triton")
    assert sum(compared) <= 64 * 2


@in_form(few_rows={"ROWS_TO_SORT": 7, "BANK_TO_SORT": 40}, split={"FEATURES_TO_SPLIT": 1})
@pytest.mark.parametrize(
    ("options", "most"), [({}, 8), ({"reduction": "mean"}, 8), ({"tolerance": 1}, 40)]
)
def test_launches(form, options, most):
    """Few rows don't start a sort."""
    student, teacher, *labels = batch(6, 40, 8, 2, dtype=torch.float32)
    given = student.requires_grad_(), teacher, *labels
    with count_launches() as launches:
        knn_feature_loss(*given, k=3, backend="triton", **options).backward()
    names = ["knn_search_kernel", "knn_settle_kernel", "reduce_kernel", "knn_gradient_kernel"]
    split = ["knn_product_kernel"] * (kernels.FEATURES_TO_SPLIT == 1)
    assert launches.of_triton() == split + names and len(launches) <= most, launches
    assert "sort" not in " ".join(launches)
