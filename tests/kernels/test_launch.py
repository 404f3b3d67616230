"""Launchers as operators: aligned tensors, rounded sizes, what they save."""

import pytest
import torch

pytest.importorskip("triton")

import triton

import fastkd
from fastkd._core.operator import aligned
from fastkd.kernels.launch import cdiv, next_power_of_2


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


SAVING = {
    "attention": (fastkd.attention_loss, (2, 3, 40, 40), {}),
    **{
        f"hidden states, {kind}": (fastkd.hidden_state_loss, (10, 300), {"kind": kind})
        for kind in ("mse", "cosine", "smooth_l1")
    },
}


@pytest.mark.parametrize("name", SAVING)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_the_gradient_is_saved_for_the_backward_pass(device, name, dtype):
    """float16 can't hold it before the loss scale is multiplied in."""
    loss, shape, options = SAVING[name]
    student, teacher = torch.rand(2, *shape, device=device, dtype=dtype).unbind()
    own, kept = {x.data_ptr() for x in (student, teacher)}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        loss(student.detach().requires_grad_(), teacher, backend="triton", **options)
        loss(student, teacher, backend="triton", **options)
    gradients = [x for x in kept if x.data_ptr() not in own]
    assert [x.numel() for x in gradients] == [student.numel()] * (dtype == torch.bfloat16)
