"""The same batch in one piece, in micro-batches, and over processes: one gradient in float64."""

import copy
import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fastkd.distill import METHODS, DistillationTrainer, Distiller, EMATeacher, SoftTargets
from fastkd.distill.verify import taken
from tests.distill.models import classifier, cut, exact, ready, set_dropout, step
from tests.distill.processes import run_ranks
from tests.distill.test_trainer import arguments
from tests.support.compare import raises

pytestmark = pytest.mark.filterwarnings("ignore:CCALoss")

ROWS = 9
ENDS = 0, 2, 7, 9  # of uneven parts, and of unequal lengths


def data_of(kind="classifier"):
    torch.manual_seed(2)
    lengths = torch.tensor([4, 6, 10, 9, 5, 12, 8, 3, 7])
    ids = torch.randint(5, 60, (ROWS, 12))
    mask = (torch.arange(12) < lengths[:, None]).long()
    labels = torch.arange(ROWS) % 3 if kind == "classifier" else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


assert_equal = functools.partial(torch.testing.assert_close, atol=1e-10, rtol=1e-10)


# Terms on tokens and on samples, from logits, heads and layers; the random steps (test_by_hand.py)
# have every method, in micro-batches, under autocast and in processes that are threads.
CASES = [
    ("classifier", "fcd", {}),
    ("classifier", "lrc_bert", {"pool": "mean", "perturb": True, "perturb_norm": "batch"}),
    ("language model", "soft_targets", {}),
]


def test_the_second_run_repeats_the_dropout_of_the_first():
    distiller, data = exact("fcd", dropout=0.3), data_of()
    torch.manual_seed(3)
    expected = taken(distiller, data)
    torch.manual_seed(3)
    assert_equal(taken(distiller, [data]), expected)
    after = torch.rand(1)
    torch.manual_seed(3)
    distiller(**data)
    assert torch.equal(torch.rand(1), after)


def test_gradients_of_a_methods_parameters_are_not_summed_in_half_precision():
    torch.manual_seed(0)
    models = classifier("bert"), classifier("bert", 2, hidden_size=32, intermediate_size=64)
    set_dropout(models[1])
    distiller = ready(*(each.bfloat16() for each in models), "lrc_bert", perturb=False)
    data = {name: x[:, :3] if x.dim() > 1 else x for name, x in data_of().items()}
    found = []
    for rows in (ROWS, 1):
        taken(distiller, cut(data, *range(0, ROWS + 1, rows)))
        found.append(distiller.method.loss.W.weight.grad.float())
    assert (found[1] - found[0]).norm() <= 2 * 2**-9 * found[0].norm()


def test_a_batch_without_rows_has_no_loss(tmp_path):
    [nothing] = cut(data_of(), 3, 3)
    for name in METHODS:
        distiller = exact(name)
        out, gradients = step(distiller, nothing)
        assert out.loss == 0 and out.logits.shape == (0, 3)
        assert gradients and not any(g.any() for g in gradients.values())
        cache = distiller.cache_teacher([data_of(), nothing], tmp_path / name)
        assert Distiller(cache, distiller.student, distiller.method)(**nothing).loss == 0
    distiller = exact("soft_targets")
    for model in (distiller.teacher, distiller.student):
        model.config.problem_type = "multi_label_classification"
    assert distiller(**nothing | {"labels": torch.zeros(0, 3)}).loss == 0  # decisions, no list


# Processes


def gathered(rank, ends):
    """Each case's step with a process's rows in one piece, and in micro-batches.

    Also the step of rows without labels, of which nothing counts in any process, and KNN's loss
    of a process's own rows.
    """
    results = []
    for kind, name, options in CASES:
        distiller = exact(name, kind, gather=True, **options)
        model = DistributedDataParallel(distiller, find_unused_parameters=True)
        parts = cut(data_of(kind), *ends[rank])
        (piece,) = cut(data_of(kind), ends[rank][0], ends[rank][-1])
        results.append([taken(distiller, rows, model) for rows in (piece, parts)])
    nothing = data_of("language model")
    nothing["labels"].fill_(-100)
    nothing = taken(exact("soft_targets", "language model", gather=True), nothing)
    return results, nothing, knn_loss(ends[rank])


def knn_loss(ends):
    [part] = cut(data_of(), ends[0], ends[-1])
    return taken(exact("knn", alpha1=1.0, alpha2=0.0, alpha3=0.0), part)[0]["loss"]


def check_gathered(ranks, nothing, spread, ends):
    # Without gather KNN sums over its samples: the loop's average is the sum over all.
    assert_equal(sum(spread) / 2, sum(map(knn_loss, ends)))
    for terms, gradients in nothing:
        assert not any(map(torch.any, (*terms.values(), *gradients.values())))
    for (kind, name, options), *found in zip(CASES, *ranks, strict=True):
        expected, gradients = taken(exact(name, kind, **options), data_of(kind))
        for piece, _ in found:
            assert_equal(piece, (expected, gradients))
        # Terms on logits of micro-batches are the process's shares; their average is the whole.
        names = expected.keys() - {"total", "loss"}
        terms = {name: sum(parts[0][name] for _, parts in found) / 2 for name in names}
        assert_equal(terms, {name: expected[name] for name in names})
        for _, (_, own) in found:
            assert_equal(own, gradients)


# Ways of data parallelism besides, by methods that compare samples or have parameters, and by
# averaging teachers.
WAYS = {
    "static_graph": ("knn", "mc3kd"), "find_unused_parameters": ("average",),
    "fsdp2": ("fcd", "lrkd", "average", "average in half precision"),
}  # fmt: skip


def made(name, gather):
    if not name.startswith("average"):
        return exact(name, gather=gather)
    student = exact("soft_targets").student
    student = student.bfloat16() if "half" in name else student
    return Distiller(EMATeacher(student, 0.9), student, SoftTargets(), gather=gather)


def curve(name, way="", rank=None):
    """Losses and states of a plain loop, with a process's part of the batch, and a restart."""
    losses, state, model = [], None, None
    data = data_of() if rank is None else cut(data_of(), 0, 5, ROWS)[rank]
    for _ in range(2 if way else 1):
        distiller = made(name, bool(way))
        distiller.register_forward_hook(lambda module, args, out: losses.append(out.loss.item()))
        teacher = distiller.teacher if name.startswith("average") else None
        if way == "fsdp2":
            mesh, method = init_device_mesh("cpu", (2,)), distiller.method
            own = [method] if list(method.parameters()) else []
            for one in (distiller.student, *([teacher.model] if teacher else [])):
                for module in (*one.bert.encoder.layer, one):
                    fully_shard(module, mesh=mesh)
            for module in own:
                fully_shard(module, mesh=mesh)
        elif way:
            model = DistributedDataParallel(distiller, **{way: True})
        if state is not None:
            distiller.load_state_dict(state)
        learning = [p for p in distiller.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(learning, lr=0.05)
        for _ in range(2 if way else 4):
            taken(distiller, data, model)
            optimizer.step()
            if teacher:
                teacher.update()
        state = copy.deepcopy(distiller.state_dict())
    tensors = {n: x for n, x in state.items() if isinstance(x, torch.Tensor)}
    return losses, {n: getattr(x, "full_tensor", x.clone)().detach() for n, x in tensors.items()}


def in_processes(rank, ends):
    """The steps and curves; a trainer would save an average's shards of the first process only."""
    distiller = made("average", True)
    fully_shard(distiller.teacher.model, mesh=init_device_mesh("cpu", (2,)))
    given = {"args": arguments("unused"), "train_dataset": [{"labels": 0}]}
    words = "can't save an EMATeacher that is sharded by FSDP2"
    raises(words, DistillationTrainer, model=distiller, **given)
    found = {(way, name): curve(name, way, rank) for way, names in WAYS.items() for name in names}
    return gathered(rank, ends), found


def test_two_processes_equal_one_process(tmp_path):
    ends = [(0, 2, 4, 6), (6, 9)]
    steps, both = zip(*run_ranks(in_processes, 2, tmp_path, ends), strict=True)
    check_gathered(*zip(*steps, strict=True), ends)
    for name in {name for names in WAYS.values() for name in names}:
        expected, half = curve(name), "half" in name
        close = {"rtol": 1.6e-2, "atol": 1e-2} if half else {"rtol": 0, "atol": 1e-10}
        for found in both:
            for way in (way for way, names in WAYS.items() if name in names):
                torch.testing.assert_close(found[way, name], expected, **close)
