"""Properties that only the Triton kernels of hidden states have."""

import pytest
import torch

pytest.importorskip("triton")

from fastkd.losses.hidden_states import hidden_state_loss
from tests.kernels.launches import count_launches


@pytest.mark.parametrize("kind", ["mse", "cosine", "smooth_l1"])
@pytest.mark.parametrize("weighted", [False, True])
def test_few_launches(device, kind, weighted):
    student, teacher = torch.randn(2, 2, 5, 40, device=device).unbind()
    mask = torch.ones(2, 5, dtype=torch.bool, device=device)
    weights = torch.rand(2, 5, device=device) if weighted else None
    student.requires_grad_()
    with count_launches() as launches:
        loss = hidden_state_loss(
            student, teacher, mask, kind=kind, weights=weights, backend="triton"
        )
        loss.backward()
    assert launches.of_triton() == [
        "count_kernel",
        "hidden_states_kernel",
        "reduce_kernel",
        "upstream_kernel",
    ]
    # The interpreter on the CPU also looks whether the mask holds only 0 and 1.
    assert len(launches) <= 8 + 2 * weighted, launches


@pytest.mark.parametrize("kind", ["mse", "cosine", "smooth_l1"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_the_gradient_is_saved_for_the_backward_pass(device, kind, dtype):
    """float16 can't hold it before the loss scale is multiplied in."""
    student = torch.randn(10, 300, device=device, dtype=dtype, requires_grad=True)
    teacher = torch.randn(10, 300, device=device, dtype=dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        hidden_state_loss(student, teacher, kind=kind, backend="triton")
        hidden_state_loss(student.detach(), teacher, kind=kind, backend="triton")
    own = {x.data_ptr() for x in (student, teacher)}
    gradients = [x for x in kept if x.data_ptr() not in own]
    assert [x.shape for x in gradients] == [student.shape] * (dtype == torch.bfloat16)
