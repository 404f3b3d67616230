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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_the_gradient_is_saved_for_the_backward_pass(device, dtype):
    """float16 can't hold it before the loss scale is multiplied in."""
    student = torch.rand(2, 3, 40, 40, device=device, dtype=dtype, requires_grad=True)
    teacher = torch.rand(2, 3, 40, 40, device=device, dtype=dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        AttentionLoss(backend="triton")(student, teacher)
        AttentionLoss(backend="triton")(student.detach(), teacher)
    own = {x.data_ptr() for x in (student, teacher)}
    gradients = [x for x in kept if x.data_ptr() not in own]
    assert [x.numel() for x in gradients] == [student.numel()] * (dtype == torch.bfloat16)
