"""Properties of the Triton relation kernels alone: launches, options left to PyTorch."""

import functools

import pytest
import torch

pytest.importorskip("triton")

from fastkd._core import dispatch
from fastkd.kernels import relation_long as long
from fastkd.kernels.pointers import LAYERS_PER_LAUNCH
from fastkd.losses.relation import FCDLoss, relation_loss, relation_loss_ref
from tests.kernels.launches import count_launches
from tests.support.compare import assert_matches_reference, raises, relative_error

pytestmark = pytest.mark.usefixtures("tensors_on_device")


def results(loss, students, teachers, mask=None):
    """The value and the students' gradients."""
    value = loss(students, teachers, mask)
    return [value.detach(), *torch.autograd.grad(value, students)]


def assert_as_pytorch(loss, *given, allowed=1e-5):
    """A loss of a backend, of features and perhaps a mask."""
    found, wanted = (results(loss(backend=backend), *given) for backend in ("triton", "torch"))
    assert max(map(relative_error, found, wanted)) < allowed


@pytest.mark.parametrize(("dtype", "masked"), [(torch.bfloat16, True), (torch.float16, False)])
def test_six_layers_in_few_launches(device, masked, dtype):
    """Up to 128 samples and tokens the kernels are the same."""
    students, teachers = torch.randn(2, 6, 3, 4, 16, dtype=dtype)
    students = [x.requires_grad_() for x in students.unbind()]
    mask = torch.ones(3, 4, dtype=torch.bool) if masked else None
    loss = FCDLoss(backend="triton")
    with count_launches() as launches:
        loss(students, [*teachers], mask).backward()
    # The interpreter on the CPU also looks whether the mask has a real token, and for a 1 upstream.
    checks = (2 * masked + (dtype == torch.float16)) if device.type == "cpu" else 0
    assert len(launches) - checks <= 10, launches
    assert launches.of_triton().count("relation_small_groups_kernel") == 2


def test_more_layers_than_a_launch_takes():
    students, teachers = torch.randn(2, LAYERS_PER_LAUNCH + 1, 2, 4, 8)
    given = [x.requires_grad_() for x in students.unbind()], [*teachers]
    assert_as_pytorch(FCDLoss, *given)
    terms = [FCDLoss(backend=x)(*given, return_terms=True)[1] for x in ("triton", "torch")]
    torch.testing.assert_close(*terms)


@pytest.mark.parametrize(("D", "masked"), [(200, False), (4100, True)])
def test_rows_of_many_features(D, masked):
    """A program of the backward pass holds one row or several."""
    student, teacher = torch.randn(1, 5, D, requires_grad=True), torch.randn(1, 5, 7)
    mask = torch.tensor([[1, 1, 1, 0, 1]]) if masked else None
    # Tensor cores cut what a step of 16 features adds to a product, and don't round it: D/16 such
    # errors go in one direction.
    allowed = max(1e-5, D / 16 * 2.0**-22)
    assert_as_pytorch(FCDLoss, [student], [teacher], mask, allowed=allowed)


@pytest.mark.parametrize("over", ["tokens", "samples"])
@pytest.mark.parametrize(
    ("members", "dtype"), [(16, torch.bfloat16), (128, torch.float32), (129, torch.float16)]
)
def test_block_edges(over, members, dtype):
    """With a mask of unlike lengths and NaN behind it."""
    shape = (2, members) if over == "tokens" else (members, 2)
    student, teacher = (torch.randn(*shape, D).to(dtype) for D in (24, 17))
    mask = torch.arange(shape[1]) < torch.arange(1, shape[0] + 1)[:, None] * shape[1]
    mask[0, shape[1] // 2 :] = False
    pair = (x.masked_fill(~mask[..., None], torch.nan) for x in (student, teacher))
    functions = relation_loss, relation_loss_ref
    assert_matches_reference(*functions, "triton", *pair, mask, over=over, products=dtype)


@pytest.mark.parametrize("over", ["tokens", "samples"])
def test_chunks_of_long_groups(over, monkeypatch):
    """More groups than the workspace holds at once, and a last chunk that is smaller."""
    monkeypatch.setattr(long, "CHUNK_ENTRIES", 2 * 256 * 256)
    shape = (3, 129) if over == "tokens" else (129, 3)
    student, teacher = torch.randn(*shape, 8, requires_grad=True), torch.randn(*shape, 8)
    of_backend = functools.partial(functools.partial, relation_loss, over=over)
    assert_as_pytorch(of_backend, student, teacher)
    student.data[0, 1, 2] = torch.nan
    assert relation_loss(student, teacher, over=over, backend="triton").isnan()


def test_bfloat16_gradients_are_rounded_to_nearest():
    """Tokens', with the samples' added, and by the upstream gradient: three roundings, no bias."""
    student, teacher = torch.randn(2, 16, 16, 32, dtype=torch.bfloat16)
    (_, rounded), (_, exact) = (
        results(FCDLoss(backend="triton"), student.to(dtype).requires_grad_(), teacher.to(dtype))
        for dtype in (torch.bfloat16, torch.float32)
    )
    error = (rounded.double() - exact) / exact.norm()
    assert error.norm() <= 3**0.5 * 2**-9
    assert (error * exact).sum().abs() <= 2**-12 * exact.norm()


def test_less_precise_products_on_demand():
    student, teacher = torch.randn(2, 2, 20, 64)
    losses = []
    for precision in ("high", "highest"):
        torch.set_float32_matmul_precision(precision)
        losses.append(relation_loss(student, teacher, backend="triton"))
    expected = relation_loss(student.double(), teacher.double())
    high, highest = (relative_error(loss, expected) for loss in losses)
    assert highest < high < 1e-3


def test_options_left_to_pytorch():
    student, teacher = torch.randn(2, 2, 5, 8)
    for name, value in (("normalize", "layer_norm"), ("distance", "mse")):
        loss = functools.partial(relation_loss, student, teacher, **{name: value})
        words, error = f"support {name}='.*', got '{value}'", dispatch.BackendUnavailable
        raises(words, loss, backend="triton", error=error)
        assert loss().isfinite()
