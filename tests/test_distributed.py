"""Losses over the samples of several processes, against one process with all of them."""

import pytest
import torch
import torch.distributed as dist

from fastkd import (
    CCALoss,
    CosNCELoss,
    FCDLoss,
    IntraClassKNNLoss,
    cca_loss,
    cos_nce_loss,
    knn_feature_loss,
    relation_loss,
)
from fastkd.distributed import AcrossRanks, gather_rows, world_size
from tests.distill.processes import run_ranks

SIZES = [(5, 3), (4, 0, 3)]  # samples of each rank

# Called with student, teacher, mask, labels.
LOSSES = {
    "relation_loss": (
        relation_loss, lambda s, t, m, y: ((s, t, m), {"over": "samples"})
    ),
    "FCDLoss": (FCDLoss(), lambda s, t, m, y: (([s, 2 * s], [t, t.exp()]), {"mask": m})),
    "knn_feature_loss": (
        knn_feature_loss,
        lambda s, t, m, y: ((s[:, 0], t[:, 0, :6], y), {"k": 2}),
    ),
    "IntraClassKNNLoss": (
        IntraClassKNNLoss(2, 6, 7, pool="mean").double(),
        lambda s, t, m, y: ((s, t, y), {"mask": m}),
    ),
    "cos_nce_loss": (
        cos_nce_loss, lambda s, t, m, y: ((s, t[..., :6]), {"mask": m, "labels": y})
    ),
    "CosNCELoss": (CosNCELoss(6, 7).double(), lambda s, t, m, y: ((s, t), {"mask": m})),
    "cca_loss": (
        cca_loss, lambda s, t, m, y: ((s[:, 1], t[:, 1]), {"ridge": 1e-2})
    ),
    "CCALoss": (CCALoss(ridge=1e-2), lambda s, t, m, y: (([s, s.sin()], [t, t]), {"mask": m})),
}  # fmt: skip


def features(seed=0, rows=8):
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(rows, 5, 6, generator=generator, dtype=torch.float64)
    teacher = torch.randn(rows, 5, 7, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, 5, generator=generator) > 0.2
    mask[:, 0] = True
    return student, teacher, mask, torch.arange(rows) % 3


def initialise(loss):
    torch.manual_seed(0)
    for parameter in loss.parameters() if isinstance(loss, torch.nn.Module) else ():
        torch.nn.init.normal_(parameter)


def rank_of_all(rank, sizes):
    results = {}
    start = sum(sizes[:rank])
    own = slice(start, start + sizes[rank])
    for name, (loss, arguments) in LOSSES.items():
        initialise(loss)
        data = [x[own] for x in features(rows=sum(sizes))]
        results[name] = step(AcrossRanks(loss), arguments, data)
        # What data-parallel training does with gradients.
        for gradient in results[name][2]:
            dist.all_reduce(gradient)
            gradient /= len(sizes)
    return results


def step(loss, arguments, data):
    student, *others = data
    student = student.clone().requires_grad_()
    options, named = arguments(student, *others)
    value = loss(*options, **named)
    module = loss.loss if isinstance(loss, AcrossRanks) else loss
    parameters = list(module.parameters()) if isinstance(module, torch.nn.Module) else []
    gradients = torch.autograd.grad(3 * value, [student, *parameters], allow_unused=True)
    return value.detach(), gradients[0], gradients[1:]


@pytest.mark.parametrize("sizes", SIZES)
def test_values_and_gradients_are_those_of_one_process(sizes, tmp_path):
    ranks = run_ranks(rank_of_all, len(sizes), tmp_path, sizes)
    for name, (loss, arguments) in LOSSES.items():
        initialise(loss)
        value, gradient, weights = step(loss, arguments, features(rows=sum(sizes)))
        for rank in ranks:
            torch.testing.assert_close(rank[name][0], value, atol=1e-10, rtol=1e-10)
            for a, b in zip(rank[name][2], weights, strict=True):
                torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
        # The average over the processes takes their number out of each sample's gradient.
        parts = torch.cat([rank[name][1] for rank in ranks]) / len(sizes)
        torch.testing.assert_close(parts, gradient, atol=1e-10, rtol=1e-10)


def gather_all(rank):
    kinds = (torch.float32, torch.bfloat16, torch.bool, torch.int64)
    found = [gather_rows(torch.full((rank + 1, 2), rank + 1).to(kind)) for kind in kinds]
    with pytest.raises(ValueError, match=r"shapes \(2, 3\), \(2, 4\) on ranks 0 to 1"):
        gather_rows(torch.ones(2, 3 + rank))
    return found


def test_rows_of_every_dtype_and_count(tmp_path):
    for found in run_ranks(gather_all, 2, tmp_path):
        for x in found:
            expected = torch.tensor([[1, 1], [2, 2], [2, 2]]).to(x.dtype)
            assert torch.equal(x, expected)


def test_one_process_needs_no_group():
    student, teacher, mask, _ = features()
    loss = FCDLoss()
    assert world_size() == 1 and gather_rows(student) is student
    expected = loss(student, teacher, mask)
    assert torch.equal(AcrossRanks(loss)(student, teacher, mask), expected)
