"""Attention maps: TinyBERT's eq. 7 on both backends."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize("function", [attention_loss, attention_loss_ref])
def test_worked_example(function):
    student = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]], [[0.5, 0.5], [0.5, 0.5]]]])
    teacher = torch.tensor([[[[0.0, 1.0], [0.0, 1.0]], [[0.5, 0.5], [0.5, 0.5]]]])
    # Head by head: MSE ½ and 0. The means differ by ½ in two of four entries.
    assert function(student, teacher).item() == 0.25
    assert function(student, teacher, heads="mean").item() == 0.125
    assert function(student, teacher, torch.tensor([[1, 0]])).item() == 0.5


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


@pytest.mark.parametrize("heads", ["match", "mean"])
def test_equal_maps_and_no_tokens_give_zero(backend, heads):
    student, teacher = maps(dtype=torch.float32)
    for pair in ((student, student), (student[..., :0, :0], teacher[..., :0, :0])):
        loss, grad = value_and_grad(attention_loss, *pair, heads=heads, backend=backend)
        assert loss == 0 and (grad == 0).all()


def test_large_scores_do_not_overflow_in_a_sum(backend):
    student = torch.full((1, 8, 64, 64), 1e17)
    loss = attention_loss(student, torch.zeros_like(student), backend=backend)
    assert loss.item() == pytest.approx(1e34, rel=1e-6)


def test_strides(backend):
    student, teacher = (x.transpose(1, 3) for x in maps(2, 6, 6, dtype=torch.float32))
    check(backend, student, teacher)
    wide = torch.randn(2, 3, 6, 13)[..., 1::2]
    check(backend, wide, wide.flip(2))
    shared = torch.randn(2, 1, 6, 6).expand(2, 3, 6, 6)
    check(backend, shared, torch.randn(2, 3, 6, 6))


@settings(max_examples=15, deadline=None)
@given(B=st.integers(1, 3), N=st.integers(1, 20), seed=st.integers(0, 10**6))
def test_loss_is_invariant_under_order_of_tokens_and_heads(B, N, seed):
    torch.manual_seed(seed)
    student, teacher = maps(B, 2, N)
    mask, order = torch.rand(B, N) < 0.7, torch.randperm(N)
    loss = attention_loss(student, teacher, mask)
    moved = [x[:, :, order][:, :, :, order] for x in (student, teacher)]
    torch.testing.assert_close(attention_loss(*moved, mask[:, order]), loss)
    torch.testing.assert_close(attention_loss(student.flip(1), teacher.flip(1), mask), loss)


@pytest.mark.parametrize("layers", [2, 9])
def test_layers_are_averaged(backend, layers):
    heads = [2 if i != 1 else 3 for i in range(layers)]  # a layer with another shape
    students = [next(maps(H=h, dtype=torch.float32)).requires_grad_() for h in heads]
    teachers = [next(maps(H=h, dtype=torch.float32)) for h in heads]
    for reduction in ("mean", "none"):
        module = AttentionLoss(reduction=reduction, backend=backend)
        loss = module(students, teachers, padding())
        apart = [
            attention_loss(s, t, padding(), reduction=reduction)
            for s, t in zip(students, teachers, strict=True)
        ]
        expected = torch.stack(apart).mean(0)
        torch.testing.assert_close(loss, expected)
        weight = torch.arange(1, loss.numel() + 1).view(loss.shape).float()
        torch.testing.assert_close(
            torch.autograd.grad(loss, students, weight),
            torch.autograd.grad(expected, students, weight),
        )


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


@pytest.mark.parametrize(
    "change, message",
    [
        ({"student": torch.zeros(2, 3, 4)}, "student must have 4 dimensions"),
        ({"student": torch.zeros(2, 3, 4, 5)}, "queries and keys of the same tokens"),
        ({"student": torch.zeros(2, 0, 4, 4)}, "must have at least one head, got 0 and 3"),
        ({"student": torch.zeros(2, 2, 4, 4)}, "has 2 heads .* heads='mean'"),
        ({"heads": "means"}, "did you mean 'mean'"),
    ],
)
def test_invalid_arguments_are_named(change, message):
    right = {"student": torch.zeros(2, 3, 4, 4), "teacher": torch.zeros(2, 3, 4, 4)}
    with pytest.raises(ValueError, match=message):
        attention_loss(**(right | change))


def test_invalid_layers_are_named():
    student, teacher = maps(2, 3, 4)
    with pytest.raises(ValueError, match="student has 2 layers but teacher has 1"):
        AttentionLoss()([student, student], [teacher])
    with pytest.raises(ValueError, match="pass layers of the same samples and tokens"):
        AttentionLoss()([student, student[:1]], [teacher, teacher[:1]])
    with pytest.raises(ValueError, match="did you mean 'match'"):
        AttentionLoss(heads="macht")
