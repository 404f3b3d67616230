"""Properties that only the Triton LayerNorm-MSE kernels have."""

import pytest
import torch

from fastkd.losses.projection import layer_norm_mse, layer_norm_mse_ref

pytest.importorskip("triton")

from fastkd._core.dispatch import TRITON_FUNCTIONS
from tests.kernels.launches import count_launches
from tests.support.compare import assert_matches_reference, raises

MOST_COLUMNS = TRITON_FUNCTIONS["layer_norm_mse"].limits["columns"]


def test_few_launches(device):
    x, y = torch.randn(2, 5, 40, device=device, requires_grad=True)
    with count_launches() as launches:
        layer_norm_mse(x, y, backend="triton").backward()
    assert launches.of_triton() == ["layer_norm_mse_kernel", "reduce_kernel", "upstream_kernel"]
    assert len(launches) <= 8, launches


@pytest.mark.parametrize("columns", [1, 17, 129, 1025, 8193, MOST_COLUMNS])
def test_block_edges(device, columns):
    pair = torch.randn(2, 3 if columns < 1000 else 2, columns, device=device)
    assert_matches_reference(layer_norm_mse, layer_norm_mse_ref, "triton", [*pair])


def test_rows_too_wide_say_so(device):
    x = torch.zeros(1, MOST_COLUMNS + 1, device=device)
    raises("at most 16384 columns, got 16385", layer_norm_mse, x, x, backend="triton")
    assert layer_norm_mse(x, x).item() == 0


def test_a_row_far_from_zero_changes_no_other_of_its_block(device):
    """Only rows that need it are computed again; other rows keep their bits."""
    x, y = torch.randn(2, 8, 64, device=device)
    x += 300
    gradients = []
    for far in (0.0, 1e6):
        moved = x.clone()
        moved[3] += far
        moved.requires_grad_()
        layer_norm_mse(moved, y, reduction="sum", backend="triton").backward()
        gradients.append(moved.grad)
    others = torch.arange(8, device=device) != 3
    assert torch.equal(gradients[0][others], gradients[1][others])
