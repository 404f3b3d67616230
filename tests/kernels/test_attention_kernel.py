"""Properties that only the Triton attention kernels have."""

import pytest
import torch

pytest.importorskip("triton")

from fastkd.losses.attention import AttentionLoss, attention_loss, attention_loss_ref
from tests.kernels.launches import count_launches
from tests.support.compare import assert_matches_reference

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


@pytest.mark.parametrize(("N", "dtype"), [(16, torch.bfloat16), (130, torch.float32)])
def test_block_edges(device, N, dtype):
    maps = (torch.randn(2, heads, N, N, device=device).to(dtype) for heads in (2, 2, 3))
    student, *teachers = maps
    mask = torch.arange(N, device=device) < torch.tensor([[N], [N // 2]], device=device)
    for teacher, heads in zip(teachers, ("match", "mean"), strict=True):
        functions = attention_loss, attention_loss_ref
        assert_matches_reference(*functions, "triton", student, teacher, mask, heads=heads)
