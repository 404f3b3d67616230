"""Properties of the Triton kernels of hidden states alone."""

import pytest
import torch

pytest.importorskip("triton")

from fastkd.hidden_states import hidden_state_loss
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
        "hidden_states_forward_kernel",
        "hidden_states_backward_kernel",
    ]
    assert len(launches) <= 13 + 4 * weighted, launches


@pytest.mark.parametrize("kind", ["mse", "cosine", "smooth_l1"])
def test_no_difference_is_saved_for_the_backward_pass(device, kind):
    student = torch.randn(10, 300, device=device, requires_grad=True)
    teacher = torch.randn(10, 300, device=device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        hidden_state_loss(student, teacher, kind=kind, backend="triton")
    own = {x.data_ptr() for x in (student, teacher)}
    assert sum(x.numel() for x in kept if x.data_ptr() not in own) <= 4 * len(student)
