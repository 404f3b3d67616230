"""Properties that only the Triton attention kernels have."""

import pytest
import torch

pytest.importorskip("triton")

from fastkd.losses.attention import AttentionLoss
from tests.kernels.launches import count_launches

KERNELS = ["attention_kernel", "attention_count_kernel", "reduce_kernel", "upstream_kernel"]


@pytest.mark.parametrize(("layers", "launches_each"), [(1, 1), (8, 1), (9, 2)])
@pytest.mark.parametrize("heads", ["match", "mean"])
def test_few_launches(device, layers, launches_each, heads):
    student = [torch.rand(2, 3, 7, 7, device=device, requires_grad=True) for _ in range(layers)]
    teacher = [torch.rand(2, 3, 7, 7, device=device) for _ in range(layers)]
    mask = torch.ones(2, 7, dtype=torch.bool, device=device)
    with count_launches() as launches:
        AttentionLoss(heads, backend="triton")(student, teacher, mask).backward()
    ours = launches.of_triton()
    assert sorted(ours) == sorted(KERNELS * launches_each)
    if layers == 1:
        assert len(launches) <= 13, launches
