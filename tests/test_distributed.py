"""Samples of several processes: what is sent, what can't be; every loss in a model under DDP.

Random calls over samples of several processes: tests/support/gathered.py.
"""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastkd import CCALoss, CosNCELoss, FCDLoss, FeatureQueue, IntraClassKNNLoss
from fastkd.distributed import AcrossRanks, Ranks, gather_rows
from fastkd.losses.cos_nce import cos_nce_loss
from fastkd.losses.knn import knn_feature_loss
from fastkd.losses.relation import relation_loss
from tests.distill.processes import run_ranks
from tests.losses import subjects
from tests.support.compare import raises, relative_error
from tests.support.every import features, padding
from tests.support.gathered import made
from tests.support.subject import D_S


def test_deep_copy_of_a_module_has_the_same_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        given = {"gather": True, "group": group}
        for module in (
            FCDLoss(alpha=0.5, **given), CosNCELoss(3, 4, **given), CCALoss(**given),
            IntraClassKNNLoss(student_dim=3, teacher_dim=4, **given),
            FeatureQueue(3, 4, **given), AcrossRanks(FCDLoss(), group),
        ):  # fmt: skip
            copied, *_ = copy.deepcopy(torch.nn.ModuleList([module]))
            assert copied is not module and copied.group is group
            assert repr(copied) == repr(module)
            for own, x in zip(module.parameters(), copied.parameters(), strict=True):
                assert torch.equal(own, x) and own is not x
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "call", [lambda x: Ranks().gather(x), lambda x: x + Ranks().max(len(x), x.device)]
)
def test_fullgraph_with_gather_raises_with_the_reason(call):
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    words, error = "gather=True reads the other processes'", torch._dynamo.exc.Unsupported
    raises(words, compiled, torch.ones(2), error=error)


# The table of `fastkd.distributed` for 10 samples of 5 tokens in float32 in each process.
SENT = {
    "relations over samples": (partial(relation_loss, over="samples"), "stm", 50 * (4 * 7 + 1)),
    "relations over tokens": (relation_loss, "stm", 0),
    "KNN": (partial(IntraClassKNNLoss, 1, 4, 3), "sty", 10 * (4 * 3 + 8)),
    "COS-NCE": (partial(CosNCELoss, 4, 3), "stmy", 10 * (5 * (2 * 4 * 3 + 1) + 8)),
    "CCA, features": (partial(CCALoss, pool="mean"), "stm", 10 * (4 * 7 + 1)),
    "CCA, moments": (CCALoss, "stm", 8 * (16 + 9 + 12)),
}


def bytes_sent(rank):
    """Bytes sent, without a few integers and means."""
    sent = []

    def watched(collective):
        def call(*arguments, **options):
            tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
            sent.extend(x.nbytes for x in tensors if x.numel() > 8)
            return collective(*arguments, **options)

        return call

    watch = {name: watched(getattr(dist, name)) for name in ("all_gather", "all_reduce")}
    torch.manual_seed(0)
    data = dict(s=torch.randn(10, 5, 4), t=torch.randn(10, 5, 3), m=torch.ones(10, 5))
    data["y"], found = torch.arange(10), {}
    for name, (loss, arguments, _) in SENT.items():
        criterion = made(loss, torch.float32, gather=True)
        sent.clear()
        with mock.patch.multiple(dist, **watch):
            criterion(*map(data.get, arguments))
        found[name] = sum(sent)
    return found


@pytest.mark.filterwarnings("ignore:CCALoss")
def test_bytes_sent_equal_the_documented_table(tmp_path):
    for found in run_ranks(bytes_sent, 2, tmp_path):
        assert found == {name: expected for name, (_, _, expected) in SENT.items()}


def gather_all(rank):
    kinds = (torch.float32, torch.bfloat16, torch.bool, torch.int64)
    found = [gather_rows(torch.full((rank + 1, 2), rank + 1).to(kind)) for kind in kinds]
    queue = FeatureQueue(4, 1, gather=True)
    rows = torch.tensor([[0.0], [1.0], [2.0]])[: 2 + rank] + 10 * rank
    kept = torch.tensor([True, rank == 0, True])[: 2 + rank]
    own, count = Ranks(), torch.tensor([rank + 1.0], requires_grad=True)
    total = own.total(count)
    assert total.item() == own.sum(count).item() == 3 and own.max(5 + rank, count.device) == 6
    assert torch.autograd.grad(total, count)[0].item() == 2
    queue.enqueue(rows, torch.arange(2 + rank), kept)
    found.append(queue)
    raises(r"shapes \(2, 3\), \(2, 4\) on ranks 0 to 1", gather_rows, torch.ones(2, 3 + rank))
    return found


def called_differently(rank):
    """Error of each process for calls that differ, and for tensors that can't be gathered."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    student, teacher = (torch.randn(8, 5, D, dtype=torch.float64) for D in (6, 7))
    labels = torch.arange(8) % 3
    half, some = (torch.float32, student[:0]) if rank else (torch.float64, student)
    calls = [
        lambda: gather_rows(torch.tensor(1.0)),
        lambda: gather_rows(student.to(half)),
        lambda: relation_loss(student.to(half), teacher.to(half), over="samples", gather=True),
        lambda: relation_loss(student, teacher[..., rank:], over="samples", gather=True),
        lambda: knn_feature_loss(some, some, labels[: len(some)].to(half), gather=True),
        lambda: cos_nce_loss(student, student, labels=labels if rank else None, gather=True),
        lambda: cos_nce_loss(*[student[:, 0]] * 2, gather=True, negatives=student[:, rank:]),
    ]
    said = []
    for call in calls:
        with pytest.raises(ValueError) as raised:
            call()
        said.append(str(raised.value))
    sharded = DTensor.from_local(student, init_device_mesh("cpu", (2,)), [Shard(0)])
    words = r"student must be whole .* got a DTensor"
    raises(words, relation_loss, sharded, teacher, error=TypeError)
    groups = [dist.new_group([other]) for other in range(2)]
    alone = AcrossRanks(lambda batch: batch["x"].sum())
    assert alone({"x": torch.ones(1 + rank)}) == 3
    gathered = partial(relation_loss, student, teacher, gather=True)
    raises("group doesn't contain this process", gathered, group=groups[1 - rank])
    assert gathered(group=groups[rank]) == relation_loss(student, teacher)
    return said


def test_different_calls_raise_in_every_process(tmp_path):
    for rank, (no_rows, *said) in enumerate(run_ranks(called_differently, 2, tmp_path)):
        assert "no rows" in no_rows
        for sentence in said:
            assert sentence.startswith(f"rank {rank} gathers ")
            assert f"but rank {1 - rank} something else" in sentence and "\n" not in sentence


def test_rows_of_every_dtype_and_count(tmp_path):
    for *found, bank in run_ranks(gather_all, 2, tmp_path):
        assert bank.features.tolist() == [[0], [1], [10], [12]]
        assert bank.labels.tolist() == [0, 1, 0, 2] and bank.mask.all()
        for x in found:
            expected = torch.tensor([[1, 1], [2, 2], [2, 2]]).to(x.dtype)
            assert torch.equal(x, expected)


def test_ddp(tmp_path):
    """DDP"""
    run_ranks(_ddp_process, 2, tmp_path)


class _Step(nn.ModuleDict):
    """A student of one layer, and its loss."""

    def forward(self, x: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        return self["loss"](self["body"](x), teacher, mask)


def _ddp_process(rank: int) -> None:
    cpu = torch.device("cpu")  # a forked process can't use the GPU
    inputs = *features(device=cpu), padding(device=cpu)
    halves = list(zip(*(x.detach().chunk(2) for x in inputs), strict=True))
    for subject in subjects("torch"):
        torch.manual_seed(0)
        model = _Step({"body": nn.Linear(D_S, D_S), "loss": subject})
        wrapped = DistributedDataParallel(model)  # alive until its gradients are there
        wrapped(*halves[rank]).backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        for half in halves:
            (model(*half) / 2).backward()
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            assert relative_error(gradient, parameter.grad) <= 1e-5, subject.name
