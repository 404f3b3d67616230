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
few_examples = settings(max_examples=15, deadline=None)


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
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_masks_and_reductions(backend, reduction, heads):
    student, teacher = maps(dtype=torch.float32)
    upstream = torch.randn(3) if reduction == "none" else torch.tensor(-2.5)
    for kind in (torch.bool, torch.int64):
        for mask in (padding(), torch.ones(3, 5), torch.zeros(3, 5)):
            options = {"reduction": reduction, "heads": heads, "upstream": upstream}
            check(backend, student, teacher, mask.to(kind), **options)


@pytest.mark.parametrize("heads", ["match", "mean"])
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_values_at_padding_have_no_effect(backend, bad, heads):
    student, teacher = maps(dtype=torch.float32)
    real = padding().bool()
    padded = ~(real[:, None, :, None] & real[:, None, None, :]).expand_as(student)
    clean = value_and_grad(
        attention_loss, student, teacher, padding(), heads=heads, backend=backend
    )
    dirty = value_and_grad(
        attention_loss,
        student.masked_fill(padded, bad),
        teacher.masked_fill(padded, bad),
        padding(),
        heads=heads,
        backend=backend,
    )
    assert torch.equal(dirty[0], clean[0]) and torch.equal(dirty[1], clean[1])
    assert (dirty[1][padded] == 0).all()


@pytest.mark.parametrize("heads", ["match", "mean"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_at_real_tokens_gives_nan(backend, bad, heads):
    for side in (0, 1):
        pair = [x.float() for x in maps()]
        pair[side][2, 1, 3, 4] = bad
        losses = attention_loss(*pair, padding(), reduction="none", heads=heads, backend=backend)
        assert not losses[2].isfinite() and losses[:2].isfinite().all()


def test_loss_without_real_tokens_is_zero(backend):
    student, teacher = maps(dtype=torch.float32)
    cases = [
        (student, teacher, torch.zeros(3, 5)),
        (student, student, None),
        (student[:0], teacher[:0], None),
        (student[..., :0, :0], teacher[..., :0, :0], None),
    ]
    for s, t, mask in cases:
        for heads in ("match", "mean"):
            loss, grad = value_and_grad(attention_loss, s, t, mask, heads=heads, backend=backend)
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


@few_examples
@given(B=st.integers(1, 3), N=st.integers(1, 20), seed=st.integers(0, 10**6))
def test_loss_is_invariant_under_order_and_padding_of_tokens(B, N, seed):
    """Tokens in another order, and more padding behind them."""
    torch.manual_seed(seed)
    student, teacher = maps(B, 2, N)
    mask = torch.rand(B, N) < 0.7
    loss = attention_loss(student, teacher, mask)
    order = torch.randperm(N)
    moved = [x[:, :, order][:, :, :, order] for x in (student, teacher)]
    torch.testing.assert_close(attention_loss(*moved, mask[:, order]), loss)
    longer = [torch.nn.functional.pad(x, (0, 3, 0, 3), value=torch.nan) for x in (student, teacher)]
    more = torch.nn.functional.pad(mask, (0, 3))
    torch.testing.assert_close(attention_loss(*longer, more), loss)
    # The heads may be permuted too, equally for student and teacher.
    torch.testing.assert_close(attention_loss(student.flip(1), teacher.flip(1), mask), loss)


@pytest.mark.parametrize("heads", ["match", "mean"])
def test_gradcheck(heads):
    student, teacher = maps(3, 2, 5, H_t=2)
    student.requires_grad_()
    for reduction in ("mean", "sum", "none"):
        options = {"heads": heads, "reduction": reduction}
        assert torch.autograd.gradcheck(
            lambda x: attention_loss(x, teacher, padding(), **options),  # noqa: B023
            student,
        )


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


def test_same_tensor_twice_and_backward_twice(backend):
    student, teacher = maps(dtype=torch.float32)
    student.requires_grad_()
    loss = AttentionLoss(backend=backend)([student, student], [teacher, teacher], padding())
    first = torch.autograd.grad(loss, student, retain_graph=True)
    assert torch.equal(torch.autograd.grad(loss, student)[0], first[0])
    expected = value_and_grad(attention_loss, student, teacher, padding(), backend=backend)
    torch.testing.assert_close((loss.detach(), first[0]), expected)


@pytest.mark.parametrize("heads", ["match", "mean"])
def test_loss_is_equal_under_autocast(backend, heads):
    student, teacher = maps(dtype=torch.float32)
    plain = value_and_grad(
        attention_loss, student, teacher, padding(), heads=heads, backend=backend
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = value_and_grad(
            attention_loss, student, teacher, padding(), heads=heads, backend=backend
        )
    assert torch.equal(under[0], plain[0]) and torch.equal(under[1], plain[1])


def test_one_graph_under_compile(backend):
    module = AttentionLoss(backend=backend)
    compiled, _ = counted(module)
    student, teacher = maps(dtype=torch.float32)
    students = [student.requires_grad_()] * 2
    for inputs in ((students, [teacher, teacher], padding()), (student, teacher)):
        results = []
        for function in (module, compiled):
            loss = function(*inputs)
            results.append((loss, *torch.autograd.grad(loss, student)))
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"student": torch.zeros(2, 3, 4)}, ValueError, "student must have 4 dimensions"),
        ({"student": torch.zeros(2, 3, 4, 5)}, ValueError, "queries and keys of the same tokens"),
        (
            {"student": torch.zeros(2, 0, 4, 4)},
            ValueError,
            "must have at least one head, got 0 and 3",
        ),
        ({"student": torch.zeros(2, 2, 4, 4)}, ValueError, "has 2 heads .* heads='mean'"),
        ({"teacher": torch.zeros(2, 3, 5, 5)}, ValueError, "teacher must have shape"),
        ({"teacher": torch.zeros(2, 3, 4, 4).half()}, TypeError, "teacher is torch.float16"),
        ({"teacher": torch.zeros(2, 3, 4, 4).requires_grad_()}, ValueError, "teacher requires"),
        ({"mask": torch.ones(2, 5)}, ValueError, "mask must have shape"),
        ({"mask": torch.full((2, 4), 2)}, ValueError, "mask must hold only 0"),
        ({"heads": "means"}, ValueError, "did you mean 'mean'"),
        ({"reduction": "batchmean"}, ValueError, "reduction must be one of"),
        ({"backend": "cuda"}, ValueError, "backend must be one of"),
    ],
)
def test_invalid_arguments_are_named(change, error, message):
    right = {"student": torch.zeros(2, 3, 4, 4), "teacher": torch.zeros(2, 3, 4, 4)}
    with pytest.raises(error, match=message):
        attention_loss(**(right | change))


def test_invalid_layers_are_named():
    student, teacher = maps(2, 3, 4)
    with pytest.raises(ValueError, match="student has 2 layers but teacher has 1"):
        AttentionLoss()([student, student], [teacher])
    with pytest.raises(ValueError, match="pass layers of the same samples and tokens"):
        AttentionLoss()([student, student[:1]], [teacher, teacher[:1]])
    with pytest.raises(ValueError, match="did you mean 'match'"):
        AttentionLoss(heads="macht")
    with pytest.raises(ValueError, match="float64 is left to PyTorch"):
        attention_loss(student, teacher, backend="triton")
