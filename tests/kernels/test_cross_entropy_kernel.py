"""The Triton kernel of cross-entropy and of log Z against PyTorch, and the losses that use it."""

import functools

import pytest
import torch

from fastkd import CrossEntropy, Head
from fastkd._core import products
from fastkd.lm import linear_soft_targets
from fastkd.lm.log_probs import log_probs_ref
from fastkd.lm.soft_targets import linear_soft_target_loss, linear_soft_target_loss_ref
from tests.losses.soft_targets import cross_entropies
from tests.support.compare import assert_accurate, assert_matches_reference, values_and_grads
from tests.test_half_product import as_on_a_gpu

pytest.importorskip("triton")

from fastkd.kernels import cross_entropy as kernels
from fastkd.kernels.soft_targets import LONG
from tests.kernels.launches import count_launches
from tools.calls import of_tokens

pytestmark = pytest.mark.usefixtures("tensors_on_device")
INF = torch.inf


def rows(V, kind="plain"):
    """Logits, labels at both ends and between, and weights, of which one is 0."""
    labels = torch.tensor([0, V - 1, V // 2, V // 3, V - 1])
    weights = torch.tensor([0.5, 2.0, 0.0, 1.0, -1.5])
    logits = (3e4 if kind == "large" else 4.0) * torch.randn(5, V)
    if kind == "large":
        logits[0], logits[0, 0] = -1e30, 1e30
    elif kind == "infinite":
        logits, labels, weights = torch.randn(V).repeat(7, 1), torch.full((7,), 9), torch.ones(7)
        logits[0, 5] = logits[1, 9] = -INF
        logits[2], logits[3, 5], logits[4, 9], logits[5, 5] = -INF, INF, INF, torch.nan
    return logits, labels, weights


@pytest.mark.parametrize("V", [33, LONG + 17])
@pytest.mark.parametrize(
    ("kind", "smoothing", "z_loss"),
    [("plain", 0.0, 0.0), ("plain", 0.2, 0.1), ("plain", 1.0, 0.0)]
    + [(kind, smoothing, 0.0) for kind in ("large", "infinite") for smoothing in (0.0, 0.3)],
)
def test_rows(V, kind, smoothing, z_loss):
    """As in PyTorch: −inf is a probability of 0; NaN and inf affect their own row only."""
    logits, labels, weights = rows(V, kind)
    exact, plain = (
        cross_entropies(x, labels, smoothing, z_loss, weights) for x in (logits.double(), logits)
    )
    beside, inside = torch.empty_like(logits), logits.clone()
    values = [
        kernels.cross_entropy(x, labels, weights, out, smoothing, z_loss)
        for x, out in ((logits, None), (logits, beside), (inside, inside))
    ]
    if kind == "infinite":
        found = values[0].double(), beside.double()
        torch.testing.assert_close(found, exact, equal_nan=True, rtol=1e-5, atol=1e-6)
        assert values[0].isnan().tolist() == [False, False, True, True, True, True, False]
        return
    assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])
    assert torch.equal(beside, inside)
    rounded = torch.empty_like(logits, dtype=torch.bfloat16)
    kernels.cross_entropy(logits, labels, weights, rounded, smoothing, z_loss)
    torch.testing.assert_close(rounded.float(), beside, rtol=2.0**-8, atol=1e-6)
    assert_accurate(values[0], exact[0], torch.float32, plain[0])
    assert_accurate(beside, exact[1], torch.float32, plain[1])
    # A weight of 0, and a probability of 1, have the gradient 0 to the last bit.
    assert (beside[2] == 0).all() and (kind != "large" or smoothing or (beside[0] == 0).all())


@pytest.mark.parametrize("V", [1, 33, LONG + 16])
@pytest.mark.parametrize("temperature", [1.0, 20.0])
def test_log_totals_and_softmax(V, temperature):
    logits, _, factors = rows(V)
    logits[4, : V - 1] = -INF
    total = kernels.log_totals(logits, temperature)
    exact = logits.double() / temperature
    torch.testing.assert_close(total.double(), exact.logsumexp(-1), rtol=1e-6, atol=1e-6)
    kernels.softmax_in_place(logits, total, factors, temperature)
    wanted = exact.softmax(-1) * factors[:, None]
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-4, atol=1e-6)
    nothing = torch.full((2, V), -INF)
    assert (kernels.log_totals(nothing, temperature) == -INF).all()


def heads():
    labels = torch.randint(40, (6,))
    labels[1] = -100
    return [torch.randn(6, 8), torch.randn(40, 8), torch.randn(40)], labels


def of_labels(h, w, *bias, function, **options):
    """A head's loss of labels alone."""
    return function(h, Head(w, *bias), h.detach(), w.detach(), soft_weight=0.0, **options)


FUNCTIONS = linear_soft_target_loss, linear_soft_target_loss_ref


def test_products_on_a_gpu_take_the_rounded_gradient(monkeypatch):
    """The kernel rounds a bfloat16 gradient for the products; float16 would underflow."""
    as_on_a_gpu(monkeypatch, torch.bfloat16, adds=False)
    given, scaled = [], products.scaled_for_products

    def noted(grad, dtype):
        given.append(grad.dtype)
        return scaled(grad, dtype)

    monkeypatch.setattr(linear_soft_targets, "scaled_for_products", noted)
    learning, labels = heads()
    chunked, exact = (
        functools.partial(of_labels, function=each, task=CrossEntropy(labels)) for each in FUNCTIONS
    )
    for count, dtype in ((2, torch.bfloat16), (3, torch.float32)):
        halves = [x.bfloat16() for x in learning[:count]]
        found = values_and_grads(chunked, halves, backend="triton", chunk_bytes=3 * 40 * 6)
        right = values_and_grads(exact, [x.double() for x in halves])
        assert given == [dtype] * 2
        given.clear()
        for x, y in zip(found[1:], right[1:], strict=True):
            assert_accurate(x, y, torch.bfloat16)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_log_probs(softcap, temperature):
    learning, _ = heads()
    ids = torch.randint(40, (6, 4))
    ids[:, 1] = ids[:, 0]  # a gradient twice

    def call(h, w, b, function=log_probs_ref, **options):
        return function(h, Head(w, b, 0.5, softcap), ids, temperature=temperature, **options)

    chunked = functools.partial(call, function=of_tokens, chunk_bytes=4 * 40 * 4)
    with count_launches() as launches:
        assert_matches_reference(chunked, call, "triton", learning)
    assert launches.of_triton() == ["cross_entropy_kernel"] * 4
