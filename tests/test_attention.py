"""Attention maps: TinyBERT's eq. 7 on both backends."""

import functools

import pytest
import torch

from fastkd.losses.attention import AttentionLoss, attention_loss, attention_loss_ref
from tests.support.compare import DTYPES, assert_matches_reference, counted, value_and_grad

TRITON_FUNCTION = "attention_loss"
pytestmark = pytest.mark.usefixtures("tensors_on_device")

check = functools.partial(assert_matches_reference, attention_loss, attention_loss_ref)


def padding():
    """A mask: one sequence ends early, one is empty, one has a gap."""
    return torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 1]])


def maps(B=3, H=2, N=5, H_t=None, dtype=torch.float64):
    return (torch.randn(B, h, N, N, dtype=torch.float64).to(dtype) for h in (H, H_t or H))


@pytest.mark.within_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 2, 5), (1, 1, 1), (2, 3, 16), (1, 2, 33), (1, 2, 130)])
def test_matches_reference(backend, shape, dtype):
    check(backend, *maps(*shape, dtype=dtype))
    check(backend, *maps(*shape, H_t=4, dtype=dtype), heads="mean")


@pytest.mark.parametrize("heads", ["match", "mean"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_at_real_tokens_gives_nan(backend, bad, heads):
    for side in (0, 1):
        pair = [x.float() for x in maps()]
        pair[side][2, 1, 3, 4] = bad
        losses = attention_loss(*pair, padding(), reduction="none", heads=heads, backend=backend)
        assert not losses[2].isfinite() and losses[:2].isfinite().all()


def test_strides(backend):
    student, teacher = (x.transpose(1, 3) for x in maps(2, 6, 6, dtype=torch.float32))
    check(backend, student, teacher)
    wide = torch.randn(2, 3, 6, 13)[..., 1::2]
    check(backend, wide, wide.flip(2))
    shared = torch.randn(2, 1, 6, 6).expand(2, 3, 6, 6)
    check(backend, shared, torch.randn(2, 3, 6, 6))


def test_a_layer_passed_twice(backend):
    """Also in a graph."""
    student, teacher = maps(dtype=torch.float32)
    student.requires_grad_()
    module = AttentionLoss(backend=backend)
    expected = value_and_grad(attention_loss, student, teacher, padding(), backend=backend)
    for call in (module, counted(module)[0]):
        loss = call([student, student], [teacher, teacher], padding())
        found = loss.detach(), *torch.autograd.grad(loss, student)
        torch.testing.assert_close(found, expected)
