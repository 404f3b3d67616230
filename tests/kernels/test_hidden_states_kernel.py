"""Properties that only the Triton kernels of hidden states have."""

import pytest
import torch

pytest.importorskip("triton")

from fastkd.losses.hidden_states import hidden_state_loss, hidden_state_loss_ref
from tests.kernels.launches import count_launches
from tests.support.compare import assert_matches_reference


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
@pytest.mark.parametrize(("D", "dtype"), [(64, torch.bfloat16), (1030, torch.float32)])
def test_block_edges(device, kind, D, dtype):
    student, teacher = torch.randn(2, 3, 5, D, device=device, dtype=torch.float64).to(dtype)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 1]], device=device)
    functions = hidden_state_loss, hidden_state_loss_ref
    assert_matches_reference(*functions, "triton", student, teacher, mask, kind=kind)
