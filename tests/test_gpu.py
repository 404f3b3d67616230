"""Tests that need a CUDA device; `make gpu-check` runs them with the parity suite.

Its items compare the benchmark's cases with their oracles, their bits of call after call, and
capture them.
"""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fastkd
from bench.measure import peak_bytes
from tools import gpu_check

pytestmark = pytest.mark.gpu
# No subjects without a GPU, where every test would be skipped.
PAIRS = gpu_check.pairs() if torch.cuda.is_available() else {}


@pytest.fixture(autouse=True)
def _plain_empty():
    """Capture and synchronisation checks look at the losses, not at the NaN poisoning."""
    torch.utils.deterministic.fill_uninitialized_memory = False


@pytest.mark.parametrize("case, provider", PAIRS.values(), ids=PAIRS)
def test_calls_do_not_synchronise_with_the_host(case, provider, device):
    reason = provider.why_not(device)
    if reason is None and gpu_check.waits(case):
        reason = "PyTorch's eigh waits for the device"
    if reason is not None:
        pytest.skip(reason)
    bound = provider.bind(case.make(device=device, dtype=case.dtype, **case.sizes))
    bound.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        bound.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_peak_memory_of_a_known_allocation(device):
    def step():
        a = torch.empty(5 << 20, device=device)
        b = torch.empty(3 << 20, device=device)
        del a
        return b, torch.empty(4 << 20, device=device)

    assert peak_bytes(step, device) == pytest.approx(8 * 4 * 2**20, rel=0.01)


def features(device, seed=0):
    """Features of student and teacher, and a mask."""
    generator = torch.Generator(device=device).manual_seed(seed)
    new = functools.partial(torch.randn, 32, 128, 768, device=device, generator=generator)
    mask = torch.rand(32, 128, device=device, generator=generator) < 0.8
    return new().requires_grad_(), new(), mask


def results(student, teacher, mask):
    """Losses and gradients of three Triton kernels."""
    found = []
    for function in (fastkd.relation_loss, fastkd.hidden_state_loss, fastkd.cos_nce_loss):
        loss = function(student, teacher, mask=mask, backend="triton")
        found += [loss.detach(), *torch.autograd.grad(loss, student)]
    return found


def test_another_stream_gives_the_same_bits(device):
    """First call, recorded plan, replayed plan."""
    right = results(*features(device))
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            found = results(*features(device))
            torch.cuda.synchronize()
            assert all(map(torch.equal, found, right))


def test_two_threads_at_a_time_give_the_same_bits(device):
    rights = [results(*features(device, seed)) for seed in range(2)]

    def work(seed):
        calls = (results(*features(device, seed)) for _ in range(50))
        return [all(map(torch.equal, found, rights[seed])) for found in calls]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [[True] * 50] * 2


def test_last_rows_of_more_than_2_to_31_logits(device):
    rows, V = 16896, 2**17
    new = functools.partial(torch.randn, V, device=device, dtype=torch.bfloat16)
    student, teacher = (new().repeat(rows, 1) for _ in range(2))
    student += torch.arange(rows, device=device, dtype=torch.bfloat16)[:, None] / rows
    student.requires_grad_()
    function = functools.partial(fastkd.soft_target_loss, reduction="none", backend="triton")
    found = function(student, teacher)
    (gradient,) = torch.autograd.grad(found[-4:].sum(), student)
    last = student.detach()[-4:].clone().requires_grad_()
    right = function(last, teacher[-4:])
    assert torch.equal(found[-4:], right)
    assert torch.equal(gradient[-4:], *torch.autograd.grad(right.sum(), last))
    assert not gradient[:-4].any()


@pytest.mark.parametrize("calls_before", [0, 4, 5, 20], ids=["seen", "record", "proof", "proved"])
def test_graphed_callables(device, calls_before):
    """As on docs/any_loop.md, around the call that is recorded: three calls precede a capture."""
    fastkd.clear_plans()
    loss = fastkd.FCDLoss(backend="triton")
    right = []
    for seed in [*[0] * calls_before, *range(3)]:
        student, teacher, mask = features(device, seed)
        value = loss(student, teacher, mask)
        right.append((value.detach(), *torch.autograd.grad(value, student)))
    graphed = torch.cuda.make_graphed_callables(loss, features(device, 0))
    for seed, (value, gradient) in enumerate(right[-3:]):
        student, teacher, mask = features(device, seed)
        found = graphed(student, teacher, mask)
        assert torch.equal(found.detach(), value)
        assert torch.equal(*torch.autograd.grad(found, student), gradient)


def test_reduce_overhead(device):
    """``torch.compile(mode="reduce-overhead")`` captures CUDA graphs."""

    def call(student, teacher, mask):
        return fastkd.relation_loss(student * 2.0, teacher, mask=mask, backend="triton")

    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    for seed in range(3):
        student, teacher, mask = features(device, seed)
        expected, found = call(student, teacher, mask), compiled(student, teacher, mask)
        torch.testing.assert_close(found.detach(), expected.detach())
        gradients = [torch.autograd.grad(loss, student)[0] for loss in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
    torch._dynamo.reset()
