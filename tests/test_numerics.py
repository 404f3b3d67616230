"""The rules of precision and derivatives that every loss keeps."""

import copy
import functools

import pytest
import torch

import fastkd
from fastkd._core import extension
from fastkd._core.numerics import multiplies_in_float32, sum_by_doubling, times_upstream
from fastkd.models.outputs import Outputs
from fastkd.models.spans import Spans
from tests.support.compare import relative_error, values_and_grads
from tests.test_projection import turned


@pytest.mark.skipif(not extension.CPU, reason="needs the extension")
def test_pages_of_any_memory_are_taken():
    small = torch.arange(7.0)[1::2]
    torch.ops.fastkd_cpp.take_pages(small)
    torch.ops.fastkd_cpp.take_pages(small[:0])
    assert small.tolist() == [1, 3, 5]


def test_half_precision_gradient_is_multiplied_in_float32():
    gradient, upstream = torch.randn(5, 7).bfloat16(), torch.tensor(1 / 3)
    found = times_upstream(gradient, upstream, torch.bfloat16)
    assert torch.equal(found, (gradient.float() / 3).bfloat16())


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 3.0


def means_over_spans(x):
    """Over 514 tokens, which bfloat16 can't represent."""

    class Model:
        @staticmethod
        def sentence_token(x, mask, tokens=None):
            return x[:, 0]

    spans = (torch.arange(x.shape[1]) // 514).expand(x.shape[:2])
    pooled = Spans.of(spans, spans).pool(Outputs({1: x}, None), 0, Model, None)
    return pooled.hidden[1][:, 1:]


over_samples = functools.partial(fastkd.relation_loss, over="samples")
# A function or Module, and the shapes of its features; the first requires grad.
SUMS = {
    "means over spans": (lambda: means_over_spans, (2, 2570, 8)),
    "CosNCELoss": (lambda: fastkd.CosNCELoss(24, 32), (16, 7, 24), (16, 7, 32)),
    "CosNCELoss mean": (lambda: fastkd.CosNCELoss(24, 32, "mean"), (16, 700, 24), (16, 700, 32)),
    "KNN": (lambda: LabelledKNN(1, 24, 32, pool="mean"), (16, 700, 24), (16, 700, 32)),
    "CCALoss": (lambda: fastkd.CCALoss(), (64, 7, 12), (64, 7, 16)),
    "DualProjectionLoss": (lambda: fastkd.DualProjectionLoss(24, 32), (16, 7, 24), (16, 7, 32)),
    "OrthogonalProjection": (lambda: turned(fastkd.OrthogonalProjection(24, 32)), (700, 24)),
    "relation_loss": (lambda: fastkd.relation_loss, (2, 600, 64), (2, 600, 96)),
    "relation_loss over samples": (lambda: over_samples, (24, 7, 256), (24, 7, 384)),
    "FCDLoss": (lambda: fastkd.FCDLoss(), (16, 24, 256), (16, 24, 384)),
    "layer_norm_mse of long rows": (lambda: fastkd.layer_norm_mse, (2, 65536), (2, 65536)),
    "cos_nce_loss of many samples": (lambda: fastkd.cos_nce_loss, (65536, 4), (65536, 4)),
}  # fmt: skip


class LabelledKNN(fastkd.IntraClassKNNLoss):
    def forward(self, student, teacher):
        return super().forward(student, teacher, torch.arange(len(student)) % 3)


@pytest.mark.parametrize("name", SUMS)
def test_half_precision_sums_are_rounded_last(name):
    """The error of bfloat16 is at most twice the rounding error of the exact result."""
    make, *shapes = SUMS[name]
    torch.manual_seed(0)
    function = make()
    exact = function
    if isinstance(function, torch.nn.Module):
        exact = copy.deepcopy(function.bfloat16()).double()
    features = [normal(*shape, seed=i).bfloat16() for i, shape in enumerate(shapes)]
    found = values_and_grads(function, features[:1], *features[1:], upstream=1.0)
    features = [x.double() for x in features]
    wanted = values_and_grads(exact, features[:1], *features[1:], upstream=1.0)
    for x, y in zip(found, wanted, strict=True):
        # A single number is rounded by anything up to half of this.
        rounding = relative_error(y.bfloat16(), y) if y.dim() else 2.0**-8
        assert relative_error(x, y) <= 2 * rounding


@pytest.mark.parametrize("shape", [(0, 2), (1, 2), (2, 3), (13, 2), (64, 1)])
def test_deterministic_cumulative_sums(shape):
    """Of a GPU's float tensor torch's own raise where deterministic algorithms are required."""
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(sum_by_doubling(x, 0), x.cumsum(0))
    torch.testing.assert_close(sum_by_doubling(x.T, -1), x.T.cumsum(-1))
    ones = torch.ones(1000)
    assert torch.equal(sum_by_doubling(ones, 0), torch.arange(1.0, 1001))


@pytest.mark.parametrize("precision", ["high", "medium", "tf32"])
def test_precision_of_float32_products_is_read(precision):
    """By either interface; transformers' ``TrainingArguments(tf32=True)`` writes the newer one."""
    backends = torch.backends
    if precision == "tf32":
        backends.cuda.matmul.fp32_precision = "none"  # as in a process that never wrote it
        backends.fp32_precision = precision
    else:
        torch.set_float32_matmul_precision(precision)
    try:
        assert not multiplies_in_float32()
    finally:
        if precision == "tf32":
            backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
    assert multiplies_in_float32()
