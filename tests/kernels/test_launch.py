"""Launchers as operators: `fastkd._core.operator`, `fastkd._core.numerics.apply`."""

import pytest
import torch

pytest.importorskip("triton")

import triton

from fastkd import layer_norm_mse
from fastkd._core.operator import aligned
from fastkd.kernels.launch import cdiv, next_power_of_2

TRITON_FUNCTION = "layer_norm_mse"


def test_a_tensor_may_come_twice(backend, device):
    """Dynamo rejects repeated tensors in autograd functions."""
    torch._dynamo.reset()
    x = torch.randn(3, 8, device=device, requires_grad=True)
    compiled = torch.compile(
        lambda x: layer_norm_mse(x, x, backend=backend), fullgraph=True, backend="aot_eager"
    )
    (dx,) = torch.autograd.grad(compiled(x), x)
    assert dx.eq(0).all()


def test_tensors_are_aligned():
    x = torch.arange(8.0)
    assert aligned(x) is x and aligned(3) == 3
    for moved in (aligned(x[1:]), *aligned([x[1:], x[1:]])):
        assert moved.data_ptr() % 16 == 0
        assert moved.equal(x[1:])


def test_sizes_are_rounded_as_triton_does():
    for n in (1, 2, 3, 16, 17, 1000, 2**31 + 1):
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        for size in (1, 7, 16):
            assert cdiv(n, size) == triton.cdiv(n, size)
    assert cdiv(0, 16) == 0
