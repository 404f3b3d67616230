"""Distance of hidden states on every backend."""

import functools

import pytest
import torch
import torch.nn.functional as F

from fastkd.losses.hidden_states import HiddenStateLoss, hidden_state_loss, hidden_state_loss_ref
from tests.support.compare import DTYPES, assert_matches_reference, value_and_grad

TRITON_FUNCTION = "hidden_state_loss"
pytestmark = pytest.mark.usefixtures("tensors_on_device")
KINDS = ("mse", "cosine", "smooth_l1")

check = functools.partial(assert_matches_reference, hidden_state_loss, hidden_state_loss_ref)
each_kind = pytest.mark.parametrize("kind", KINDS)


def padding():
    """A mask: one sequence ends early, one is empty, one has a gap."""
    return torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 1]])


def states(B=3, N=5, D=9, dtype=torch.float32):
    return [torch.randn(B, N, D, dtype=torch.float64).to(dtype) for _ in range(2)]


@pytest.mark.within_kernels
@each_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 9), (1, 1, 1), (2, 3, 64), (1, 5, 257), (2, 2, 1030)])
def test_matches_reference(backend, shape, dtype, kind):
    # With one feature the cosine is ±1, and its gradient is rounding error only.
    floor = 1.0 if kind == "cosine" and shape[-1] == 1 else 1e-8
    check(backend, *states(*shape, dtype=dtype), kind=kind, gradient_floor=floor)


@each_kind
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_real_nan_is_never_hidden(backend, bad, side, kind):
    """Nor by a weight of 0, which is no mask."""
    pair = states()
    pair[side][2, 3, 4] = bad
    for weights in (None, torch.zeros(3, 5)):
        options = {"reduction": "none", "kind": kind, "backend": backend, "weights": weights}
        finite = hidden_state_loss(*pair, padding(), **options).isfinite()
        assert not finite[2, 3] and finite.sum() == finite.numel() - 1


@pytest.mark.parametrize("size", [1e-20, 1e-12, 1e12, 1e25])
@pytest.mark.parametrize("D", [7, 300])
def test_cosines_of_huge_and_tiny_states(backend, size, D):
    student, teacher = states(D=D)
    teacher[0, 0] = 0
    expected = value_and_grad(hidden_state_loss, student, teacher, kind="cosine")
    found = value_and_grad(
        hidden_state_loss, student * size, teacher / size, kind="cosine", backend=backend
    )
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1] * size, expected[1], rtol=1e-5, atol=1e-7)


def test_nearly_parallel_states_keep_their_digits(backend):
    student = torch.randn(4, 400, dtype=torch.float64)
    teacher = student + 1e-4 * torch.randn(4, 400, dtype=torch.float64)
    pair = student.float(), teacher.float()
    exact = 1 - F.cosine_similarity(*(x.double() for x in pair)).mean()
    loss = hidden_state_loss(*pair, kind="cosine", backend=backend)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)


def test_a_projection_where_widths_differ(backend):
    module = HiddenStateLoss("mse", 6, 9, backend=backend)
    student, teacher = torch.randn(3, 5, 6), torch.randn(3, 5, 9)
    weights = torch.rand(3, 5)
    found = module(
        student.masked_fill(~padding()[..., None].bool(), torch.nan), teacher, padding(), weights
    )
    projected = F.linear(student, module.projector.weight, module.projector.bias)
    expected = hidden_state_loss_ref(projected, teacher, padding(), weights=weights)
    torch.testing.assert_close(found, expected)
    found.backward()
    assert module.projector.weight.grad.abs().sum() > 0
    assert HiddenStateLoss("mse", 6, 6).projector is None
    assert HiddenStateLoss().projector is None
