"""Counts of compiled kernels."""

import random

import pytest
import torch

pytest.importorskip("triton")

from bench import suite
from fastkd import cos_nce_loss, knn_feature_loss, soft_target_loss
from tests.support.draw import FIRST
from tests.support.interpreter import of_compiled_code
from tools.executed import count, executing


def test_every_case_is_a_benchmark():
    known = {case.key: case for case in suite.every_case()}
    for key, fewer in count.CASES.items():
        assert all(n < known[key].sizes[name] for name, n in fewer.items())


@of_compiled_code
def test_forward_kl_reads_and_writes_each_byte_once():
    case = next(x for x in suite.every_case() if "forward KL/rows8192 V152064" in x.key)
    rows, _, upstream = count.of_case(case, 90)
    read = rows.counts.global_bytes_read / rows.elements
    assert read == pytest.approx(4, rel=1e-3)  # both sides in bfloat16
    assert rows.counts.global_bytes_written / rows.elements == pytest.approx(2, rel=1e-3)
    assert upstream.counts.global_bytes_written == 0


@of_compiled_code
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_over_rows_have_no_bank_conflicts(dtype):
    student = torch.randn(40, 256, dtype=dtype, requires_grad=True)
    teacher, labels = torch.randn(40, 256, dtype=dtype), torch.arange(40) % 2
    with executing(90) as launches:
        knn_feature_loss(student, teacher, labels, labels, backend="triton")
        cos_nce_loss(student[:, None], teacher[:, None], backend="triton")
    found = count.costs(launches, student.numel())
    conflicts = {cost.kernel: cost.counts.shared_conflicts for cost in found}
    assert conflicts["knn_search_kernel"] == conflicts["cos_nce_sum_kernel"] == 0


@of_compiled_code
def test_few_reads_of_the_logits():
    """Each side for the loss and the gradient; adaptive KL also samples and lists the teacher."""
    student, teacher = torch.randn(2, 2, 3000)
    student.requires_grad_()
    row = 3000 * 4 / 32  # sectors of fp32
    sides = {"forward_kl": 4, "reverse_kl": 4, "js": 6, "adaptive_kl": 7}
    for divergence, reads in random.Random(FIRST).sample([*sides.items()], 2):
        with executing(80) as launches:
            soft_target_loss(student, teacher, divergence=divergence, backend="triton")
        counts = count.costs(launches, student.numel())[0].counts
        assert reads * 2 * row <= counts.global_sectors_read < 1.4 * reads * 2 * row
        once = counts.global_bytes_read + counts.global_bytes_written
        assert 3 <= once / (2 * 3000 * 4) < 3.3
