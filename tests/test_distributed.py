"""Losses over the samples of several processes, against one process with all of them."""

import copy
import inspect
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fastkd import (
    CCALoss,
    CosNCELoss,
    FCDLoss,
    FeatureQueue,
    IntraClassKNNLoss,
    cca_loss,
    cos_nce_loss,
    knn_feature_loss,
    relation_loss,
)
from fastkd.distributed import AcrossRanks, Ranks, gather_rows, world_size
from tests.distill.processes import run_ranks
from tests.support.compare import raises

CLOSE = {"atol": 1e-10, "rtol": 1e-10}
SIZES = [(5, 3), (4, 0, 3)]  # samples of each rank


def test_deep_copy_of_a_module_has_the_same_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        given = {"gather": True, "group": group}
        modules = (
            FCDLoss(alpha=0.5, **given),
            CosNCELoss(3, 4, **given),
            IntraClassKNNLoss(student_dim=3, teacher_dim=4, **given),
            CCALoss(**given),
            FeatureQueue(3, 4, **given),
            AcrossRanks(FCDLoss(), group),
        )
        for module in modules:
            copied, *_ = copy.deepcopy(torch.nn.ModuleList([module]))
            assert copied is not module and copied.group is group
            assert repr(copied) == repr(module)
            for own, x in zip(module.parameters(), copied.parameters(), strict=True):
                assert torch.equal(own, x) and own is not x
    finally:
        dist.destroy_process_group()


# Calls with student, teacher, mask and labels of one process, trimmed to its longest row.
# With `gather` on each process's samples they have to equal one process with all samples.
LOSSES = {
    "relation_loss": (relation_loss, lambda s, t, m, y: ((s, t, m), {"over": "samples"})),
    "relations of packed rows": (
        relation_loss,
        lambda s, t, m, y: ((s, t, m), {"over": "samples", "segments": (m.cumsum(1) > 2).long()}),
    ),
    "FCDLoss": (FCDLoss, lambda s, t, m, y: (([s, 2 * s], [t, t.exp()]), {"mask": m})),
    "knn_feature_loss": (
        knn_feature_loss, lambda s, t, m, y: ((s[:, 0], t[:, 0, :6], y), {"k": 2})
    ),
    "knn, none, bank": (
        knn_feature_loss,
        lambda s, t, m, y: (
            (s[:, 0], t[:, :2, :6].flatten(0, 1), y, y.repeat_interleave(2)),
            {"reduction": "none", "k": 3},
        ),
    ),
    "IntraClassKNNLoss": (
        partial(IntraClassKNNLoss, 2, 6, 7, pool="mean"),
        lambda s, t, m, y: ((s, t, y), {"mask": m}),
    ),
    "IntraClassKNNLoss, tokens": (
        partial(IntraClassKNNLoss, 2, 6, 7, pool="tokens"),
        lambda s, t, m, y: ((s, t, y), {"mask": m}),
    ),
    "cos_nce_loss": (
        cos_nce_loss,
        lambda s, t, m, y: ((s, t[..., :6]), {"mask": m, "labels": y, "weights": t[..., 0]}),
    ),
    "cos_nce_loss, none": (
        cos_nce_loss, lambda s, t, m, y: ((s[:, 0], t[:, 0, :6]), {"reduction": "none"})
    ),
    "cos_nce_loss, bank": (
        cos_nce_loss,
        lambda s, t, m, y: (
            (s, t[..., :6]),
            {"mask": m, "labels": y, "negatives": t[..., :6].exp(), "negatives_mask": m,
             "negatives_labels": y},
        ),
    ),
    "cos_nce_loss, negatives": (
        cos_nce_loss,
        lambda s, t, m, y: ((s, t[..., :6]), {"mask": m, "negatives": t[:, None, :, 1:].sin()}),
    ),
    "knn, weights": (
        knn_feature_loss,
        lambda s, t, m, y: (
            (s[:, 0], t[:, 0, :6], y - 1),
            {"weights": t[:, 0, 0], "reduction": "mean", "ignore_index": 1},
        ),
    ),
    "relations over tokens, weights": (
        relation_loss, lambda s, t, m, y: ((s, t, m), {"weights": t[:, 0, 0]})
    ),
    "CosNCELoss": (
        partial(CosNCELoss, 6, 7), lambda s, t, m, y: (([s, s.sin()], [t, t]), {"mask": m})
    ),
    "cca_loss": (cca_loss, lambda s, t, m, y: ((s[:, 0], t[:, 0]), {"ridge": 1e-2})),
    "cca_loss, layers": (
        cca_loss,
        lambda s, t, m, y: (
            (torch.stack([s[:, 0], s[:, 0].sin()]), torch.stack([t[:, 0], t[:, 0].cos()])),
            {"ridge": (1e-2, 1e-1), "top_k": 3, "reduction": "none"},
        ),
    ),
    "cca_loss, mean of layers": (  # the last process has nothing to compare
        cca_loss,
        lambda s, t, m, y: (
            (s[:, :2].movedim(1, 0), t[:, :2].movedim(1, 0), torch.stack([m[:, 0], y > 5])),
            {"ridge": 1e-2, "reduction": "mean"},
        ),
    ),
    "cca_loss, moments": (
        cca_loss,
        lambda s, t, m, y: (
            (s[..., :2].flatten(0, 1)[None], t[..., :2].flatten(0, 1)[None], m.flatten()[None]),
            {"ridge": 0.0, "reduction": "none"},
        ),
    ),
    "CCALoss": (
        partial(CCALoss, ridge=1e-2), lambda s, t, m, y: (([s, s.sin()], [t, t]), {"mask": m})
    ),
    "CCALoss, mean": (
        partial(CCALoss, ridge=1e-2, pool="mean"), lambda s, t, m, y: ((s, t), {"mask": m})
    ),
    # No process has anything to compare.
    "relation_loss of nothing": (relation_loss, lambda s, t, m, y: ((s, t, m & False), {})),
    "knn of nothing": (
        knn_feature_loss,
        lambda s, t, m, y: (
            (s[:, 0], t[:, 0, :6], 0 * y), {"ignore_index": 0, "reduction": "mean"}
        ),
    ),
    "cos_nce_loss of nothing": (
        cos_nce_loss, lambda s, t, m, y: ((s, t[..., :6]), {"mask": m & False})
    ),
    "CCALoss of nothing": (
        partial(CCALoss, ridge=1e-2), lambda s, t, m, y: ((s, t), {"mask": m & False})
    ),
}  # fmt: skip


def features(seed=0, rows=8):
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(rows, 5, 6, generator=generator, dtype=torch.float64)
    teacher = torch.randn(rows, 5, 7, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, 5, generator=generator) > 0.2
    mask[:, 0] = mask[0] = True
    mask[4:, 3:] = False  # a process with fewer samples
    return student, teacher, mask, torch.arange(rows) % 3


def part(data, start, stop):
    """Samples of one process, trimmed to its longest row."""
    student, teacher, mask, labels = (x[start:stop] for x in data)
    length = int(mask.any(0).nonzero().max()) + 1 if stop > start else 2
    return student[:, :length], teacher[:, :length], mask[:, :length], labels


def step(loss, arguments, data):
    """Value, gradient at the student's features, and the parameters' gradients."""
    student, *others = data
    student = student.clone().requires_grad_()
    options, named = arguments(student, *others)
    value = loss(*options, **named)
    upstream = torch.linspace(1, 2, max(1, value.numel()), dtype=value.dtype).view(value.shape)
    parameters = list(loss.parameters()) if isinstance(loss, torch.nn.Module) else []
    gradients = torch.autograd.grad(
        value, [student, *parameters], upstream, allow_unused=True, materialize_grads=True
    )
    return value.detach(), gradients[0], gradients[1:]


def made(loss, **gather):
    """The loss: a Module with its parameters, or a function."""
    if inspect.isfunction(getattr(loss, "func", loss)):
        return partial(loss, **gather)
    torch.manual_seed(0)
    return loss(**gather).double()


def each_rank(rank, sizes):
    """Losses with `gather`, and in `AcrossRanks`, which needs rows of one length."""
    results = {}
    ends = sum(sizes[:rank]), sum(sizes[: rank + 1])
    whole = features(rows=sum(sizes))
    for name, (loss, arguments) in LOSSES.items():
        gathered = step(made(loss, gather=True), arguments, part(whole, *ends))
        results[name] = [gathered]
        if "layers" not in name and "moments" not in name:
            around = AcrossRanks(made(loss))
            results[name].append(step(around, arguments, [x[slice(*ends)] for x in whole]))
        for _, _, weights in results[name]:
            for gradient in weights:  # data-parallel training averages gradients
                dist.all_reduce(gradient)
                gradient /= len(sizes)
    return results


@pytest.mark.filterwarnings("ignore:CCALoss", "ignore:mask has no real token")
@pytest.mark.parametrize("sizes", SIZES)
def test_values_and_gradients_equal_those_of_one_process(sizes, tmp_path):
    ranks = run_ranks(each_rank, len(sizes), tmp_path, sizes)
    whole = features(rows=sum(sizes))
    for name, (loss, arguments) in LOSSES.items():
        value, gradient, weights = step(made(loss), arguments, whole)
        assert (gradient.abs().max() > 1e-6) != name.endswith("of nothing"), name
        for ways in zip(*(rank[name] for rank in ranks), strict=True):
            for own_value, _, own_weights in ways:
                torch.testing.assert_close(own_value, value, **CLOSE, msg=name)
                for a, b in zip(own_weights, weights, strict=True):
                    torch.testing.assert_close(a, b, **CLOSE, msg=name)
            # The average over the processes takes their number out of each sample's gradient.
            parts = [F.pad(own[1], (0, 0, 0, 5 - own[1].shape[1])) for own in ways]
            torch.testing.assert_close(torch.cat(parts) / len(sizes), gradient, **CLOSE, msg=name)


@pytest.mark.parametrize(
    "call", [lambda x: Ranks().gather(x), lambda x: x + Ranks().max(len(x), x.device)]
)
def test_fullgraph_with_gather_raises_with_the_reason(call):
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="gather=True reads the other processes' sample counts"
    ):
        compiled(torch.ones(2))


# The table of `fastkd.distributed` for 10 samples of 5 tokens in float32 in each process.
SENT = {
    "relations over samples": (
        partial(relation_loss, over="samples"), lambda s, t, m, y: (s, t, m), 10 * 5 * (4 * 7 + 1)
    ),
    "relations over tokens": (relation_loss, lambda s, t, m, y: (s, t, m), 0),
    "KNN": (partial(IntraClassKNNLoss, 1, 4, 3), lambda s, t, m, y: (s, t, y), 10 * (4 * 3 + 8)),
    "COS-NCE": (
        partial(CosNCELoss, 4, 3),
        lambda s, t, m, y: (s, t, m, y),
        10 * (5 * (2 * 4 * 3 + 1) + 8),
    ),
    "CCA, features": (
        partial(CCALoss, pool="mean"), lambda s, t, m, y: (s, t, m), 10 * (4 * 7 + 1)
    ),
    "CCA, moments": (CCALoss, lambda s, t, m, y: (s, t, m), 8 * (16 + 9 + 12)),
}  # fmt: skip


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
    data = torch.randn(10, 5, 4), torch.randn(10, 5, 3), torch.ones(10, 5), torch.arange(10)
    found = {}
    for name, (loss, arguments, _) in SENT.items():
        criterion = made(loss, gather=True)
        if isinstance(criterion, torch.nn.Module):
            criterion.float()
        sent.clear()
        with mock.patch.multiple(dist, **watch):
            criterion(*arguments(*data))
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
    queue.enqueue(rows, torch.arange(2 + rank), kept)
    found.append(queue)
    raises(r"shapes \(2, 3\), \(2, 4\) on ranks 0 to 1", gather_rows, torch.ones(2, 3 + rank))
    return found


def called_differently(rank):
    """Error of each process for calls that differ, and for tensors that can't be gathered."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    student, teacher, _, labels = features()
    half = torch.float32 if rank else torch.float64
    calls = [
        lambda: gather_rows(torch.tensor(1.0)),
        lambda: gather_rows(student.to(half)),
        lambda: relation_loss(student.to(half), teacher.to(half), over="samples", gather=True),
        lambda: relation_loss(student, teacher[..., rank:], over="samples", gather=True),
        lambda: (
            knn_feature_loss(student, student, labels[: 8 - rank].to(half), gather=True)
            if rank == 0
            else knn_feature_loss(student[:0], student[:0], torch.tensor([]), gather=True)
        ),
        lambda: cos_nce_loss(student, student, labels=labels if rank else None, gather=True),
        lambda: cos_nce_loss(
            student[:, 0], student[:, 0], gather=True, negatives=student[:, rank:]
        ),
    ]
    said = []
    for call in calls:
        with pytest.raises(ValueError) as raised:
            call()
        said.append(str(raised.value))
    sharded = DTensor.from_local(student, init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(TypeError, match=r"student must be whole .* got a DTensor"):
        relation_loss(sharded, teacher)
    groups = [dist.new_group([other]) for other in range(2)]
    alone = AcrossRanks(lambda batch: batch["x"].sum())
    assert alone({"x": torch.ones(1 + rank)}) == 3
    with pytest.raises(ValueError, match="group doesn't contain this process"):
        relation_loss(student, teacher, gather=True, group=groups[1 - rank])
    own = relation_loss(student, teacher, gather=True, group=groups[rank])
    assert own == relation_loss(student, teacher)
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


@pytest.mark.filterwarnings("ignore:CCALoss")
@pytest.mark.parametrize("name", LOSSES)
def test_gather_without_a_process_group(name):
    loss, arguments = LOSSES[name]
    expected = step(made(loss), arguments, features())
    for criterion in (made(loss, gather=True), AcrossRanks(made(loss))):
        torch.testing.assert_close(step(criterion, arguments, features()), expected, atol=0, rtol=0)
    assert world_size() == 1 and gather_rows(expected[0]) is expected[0]
