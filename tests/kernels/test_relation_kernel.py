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
from tests.support.compare import assert_matches_reference, relative_error


def results(loss, students, teachers, mask=None):
    """The value and the students' gradients."""
    value = loss(students, teachers, mask)
    return [value.detach(), *torch.autograd.grad(value, students)]


def assert_alike(actual, expected, allowed=1e-5):
    for a, b in zip(actual, expected, strict=True):
        assert relative_error(a, b) < allowed


@pytest.mark.parametrize(("dtype", "masked"), [(torch.bfloat16, True), (torch.float16, False)])
def test_six_layers_in_few_launches(device, masked, dtype):
    """Up to 128 samples and tokens the kernels are the same."""
    B, N, D = 3, 4, 16
    students = [torch.randn(B, N, D, device=device, dtype=dtype) for _ in range(6)]
    teachers = [torch.randn(B, N, D, device=device, dtype=dtype) for _ in range(6)]
    for student in students:
        student.requires_grad_()
    mask = torch.ones(B, N, dtype=torch.bool, device=device) if masked else None
    loss = FCDLoss(backend="triton")
    with count_launches() as launches:
        loss(students, teachers, mask).backward()
    # The interpreter on the CPU also looks whether the mask has a real token, and for a 1 upstream.
    checks = (2 * masked + (dtype == torch.float16)) if device.type == "cpu" else 0
    assert len(launches) - checks <= 10, launches
    assert launches.of_triton().count("relation_small_groups_kernel") == 2


def test_more_layers_than_a_launch_takes(device):
    count = LAYERS_PER_LAUNCH + 1
    students = [torch.randn(2, 4, 8, device=device, requires_grad=True) for _ in range(count)]
    teachers = [torch.randn(2, 4, 8, device=device) for _ in range(count)]
    assert_alike(*(results(FCDLoss(backend=b), students, teachers) for b in ("triton", "torch")))


@pytest.mark.parametrize(("D", "masked"), [(200, False), (4100, True)])
def test_rows_of_many_features(device, D, masked):
    """A program of the backward pass holds one row or several."""
    student = torch.randn(1, 5, D, device=device, requires_grad=True)
    teacher = torch.randn(1, 5, 7, device=device)
    mask = torch.tensor([[1, 1, 1, 0, 1]], device=device) if masked else None
    found = [results(FCDLoss(backend=b), [student], [teacher], mask) for b in ("triton", "torch")]
    # Tensor cores cut what a step of 16 features adds to a product, and don't round it: D/16 such
    # errors go in one direction.
    assert_alike(*found, allowed=max(1e-5, D / 16 * 2.0**-22))


@pytest.mark.parametrize("over", ["tokens", "samples"])
@pytest.mark.parametrize(
    ("members", "dtype"), [(16, torch.bfloat16), (128, torch.float32), (129, torch.float16)]
)
def test_block_edges(device, over, members, dtype):
    """With a mask of unlike lengths and NaN behind it."""
    shape = (2, members) if over == "tokens" else (members, 2)
    student, teacher = (torch.randn(*shape, D, device=device).to(dtype) for D in (24, 17))
    mask = torch.arange(shape[1], device=device) < torch.arange(1, shape[0] + 1)[:, None] * shape[1]
    mask[0, shape[1] // 2 :] = False
    pair = (x.masked_fill(~mask[..., None], torch.nan) for x in (student, teacher))
    functions = relation_loss, relation_loss_ref
    assert_matches_reference(*functions, "triton", *pair, mask, over=over, products=dtype)


@pytest.mark.parametrize("over", ["tokens", "samples"])
def test_chunks_of_long_groups(device, over, monkeypatch):
    """More groups than the workspace holds at once, and a last chunk that is smaller."""
    groups, members = 3, 130
    monkeypatch.setattr(long, "CHUNK_ENTRIES", 2 * 256 * 256)
    shape = (groups, members) if over == "tokens" else (members, groups)
    student = torch.randn(*shape, 8, device=device, requires_grad=True)
    teacher = torch.randn(*shape, 8, device=device)
    losses = (functools.partial(relation_loss, over=over, backend=b) for b in ("triton", "torch"))
    assert_alike(*(results(loss, student, teacher) for loss in losses))
    student.data[0, 1, 2] = torch.nan
    assert relation_loss(student, teacher, over=over, backend="triton").isnan()


def test_bfloat16_gradients_are_rounded_to_nearest(device):
    """Tokens', with the samples' added, and by the upstream gradient: three roundings, no bias."""
    student, teacher = torch.randn(2, 16, 16, 32, device=device, dtype=torch.bfloat16)
    loss = FCDLoss(backend="triton")
    (_, rounded), (_, exact) = (
        results(loss, student.to(dtype).requires_grad_(), teacher.to(dtype))
        for dtype in (torch.bfloat16, torch.float32)
    )
    error = (rounded.double() - exact) / exact.norm()
    assert error.norm() <= 3**0.5 * 2**-9
    assert (error * exact).sum().abs() <= 2**-12 * exact.norm()


def test_less_precise_products_on_demand(device):
    student, teacher = torch.randn(2, 2, 20, 64, device=device)
    exact = relation_loss(student, teacher, backend="triton")
    torch.set_float32_matmul_precision("high")
    try:
        loss = relation_loss(student, teacher, backend="triton")
    finally:
        torch.set_float32_matmul_precision("highest")
    expected = relation_loss(student.double(), teacher.double())
    assert relative_error(exact, expected) < relative_error(loss, expected) < 1e-3


@pytest.mark.parametrize(("name", "value"), [("normalize", "layer_norm"), ("distance", "mse")])
def test_options_left_to_pytorch(device, name, value):
    student, teacher = torch.randn(2, 2, 5, 8, device=device)
    with pytest.raises(dispatch.BackendUnavailable, match=f"support {name}='.*', got '{value}'"):
        relation_loss(student, teacher, backend="triton", **{name: value})
    assert relation_loss(student, teacher, **{name: value}).isfinite()
