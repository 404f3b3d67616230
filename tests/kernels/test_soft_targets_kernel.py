"""Properties that only the Triton soft-target kernels have."""

import math

import pytest
import torch

import fastkd
from fastkd.lm.divergences import NAMES
from fastkd.lm.soft_targets import DIVERGENCES, soft_target_loss, soft_target_loss_ref
from tests.support.compare import assert_accurate, assert_matches_reference, every_two_meet

pytest.importorskip("triton")

from fastkd.kernels import soft_targets as kernels
from tests.kernels.launches import count_launches

pytestmark = pytest.mark.usefixtures("tensors_on_device")
FUNCTIONS = soft_target_loss, soft_target_loss_ref


BLOCKS = [*DIVERGENCES, fastkd.Divergence("lk"), fastkd.Divergence("skew_kl")], [129, 1025]


@pytest.mark.parametrize(
    ("divergence", "V", "dtype"), every_two_meet(*BLOCKS, [torch.float32, torch.bfloat16])
)
def test_block_edges(divergence, V, dtype):
    student, teacher = (2 * torch.randn(2, 3, V)).to(dtype)
    options = {"divergence": divergence, "mask": torch.tensor([1, 0, 1]), "temperature": 1.7}
    log_probs, ids = teacher.float().log_softmax(-1).topk(40)
    top = fastkd.TopK(ids, log_probs, "bucket" if V == 129 else "renormalise")
    for other in (teacher, top):
        given = student, other
        assert_matches_reference(*FUNCTIONS, "triton", *given, gradient_floor=1e-5, **options)


@pytest.mark.parametrize("form", ["mean", "rows", "labels"])
def test_few_passes_over_a_chunk_of_logits(form):
    """Two products make the logits, a kernel turns them into the gradient, two products more.

    Of labels alone one makes them. Single rows wait for their upstream gradient.
    """
    hidden, weight = (torch.randn(n, 8, requires_grad=True) for n in (6, 40))
    teacher = torch.randn(6, 8), torch.randn(40, 8)
    options, again = {"chunk_bytes": 3 * 40 * 8}, 2 * (form == "rows")
    if form == "labels":
        task = fastkd.CrossEntropy(torch.arange(6), 0.5)
        options = {"soft_weight": 0.0, "task": task, "chunk_bytes": 3 * 40 * 4}
    with count_launches() as launches:
        options |= {"reduction": "none" if again else "batchmean", "backend": "triton"}
        fastkd.linear_soft_target_loss(hidden, weight, *teacher, **options).sum().backward()
    kernel = "cross_entropy_kernel" if form == "labels" else "soft_target_kernel"
    assert launches.of_triton() == [kernel] * (again + 2)
    products = [name for name in launches if name.startswith(("aten.mm", "aten.addmm"))]
    assert len(products) == 2 * again + (3 if form == "labels" else 4) * 2, launches
    # Besides each chunk's losses and dh in their places and a few operations on rows: more of them
    # on a GPU, where Python doesn't read which labels count.
    others = [name for name in launches if name.startswith("aten.") and name not in products]
    assert others.count("aten.copy_.default") == again + 2 * 2, launches
    assert len(others) <= (30 if hidden.is_cuda and form == "labels" else 22), others


OTHERS = [fastkd.Divergence(name) for name in NAMES if name not in DIVERGENCES]


@pytest.mark.parametrize(
    "divergence", [*DIVERGENCES, *OTHERS, fastkd.Divergence("js", beta=0.2)], ids=str
)
def test_long_rows(divergence):
    """Two blocks of a row, each read in both directions, and a row of NaN that is masked."""
    student, teacher = 3 * torch.randn(2, 3, kernels.LONG + 17)
    student[:, -2] = teacher[:, -2] = -math.inf
    student[1] = math.nan
    options = {"divergence": divergence, "mask": torch.tensor([True, False, True])}
    assert_matches_reference(*FUNCTIONS, "triton", student, teacher, upstream=-2.5, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adaptive_heads_far_from_the_mean(monkeypatch, dtype):
    """The end is guessed around the mean; here it is the first token, in the tail, or a tie.

    A program has several rows, one of them masked.
    """
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 1)
    V = 1030
    teacher = torch.randn(6, V) / 8
    teacher[0, 500] += 9  # more than half of the mass
    teacher[1, 500] += 6.5  # less, with nothing between it and the tail
    teacher[2, ::3] = teacher[2].amax() + 1  # equal logits hold more than half
    teacher[3, :20], teacher[4, :515] = -60, torch.linspace(0.0, -0.0, 515)
    student, teacher = torch.randn(6, V).to(dtype), teacher.to(dtype)
    mask = torch.tensor([1, 1, 1, 1, 1, 0])
    options = {"divergence": "adaptive_kl", "reduction": "none", "mask": mask}
    value = soft_target_loss(student, teacher, backend="triton", **options)
    right = soft_target_loss_ref(student.double(), teacher.double(), **options)
    assert_accurate(value, right, torch.float32)


@pytest.mark.parametrize(("raised", "tolerance"), [(8.0, 5e-6), (2.0, 5e-6), (0.01, 1e-3)])
def test_adaptive_kl_of_close_distributions(raised, tolerance):
    """One word of 1030 differs: the KL is far smaller than the shift of the maximum in it."""
    teacher = torch.zeros(1, 1030)
    student = teacher.clone()
    student[0, 700] += raised
    value = soft_target_loss(student, teacher, divergence="adaptive_kl", backend="triton")
    right = soft_target_loss_ref(student.double(), teacher.double(), divergence="adaptive_kl")
    torch.testing.assert_close(value.double(), right, rtol=tolerance, atol=0)
