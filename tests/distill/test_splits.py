"""One gradient of a batch in one piece, in micro-batches and over processes; averaging teachers."""

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


def data_of(kind="classifier"):
    torch.manual_seed(2)
    lengths = torch.tensor([4, 6, 10, 9, 5, 12, 8, 3, 7])
    ids = torch.randint(5, 60, (9, 12))
    mask = (torch.arange(12) < lengths[:, None]).long()
    labels = torch.arange(9) % 3 if kind == "classifier" else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


assert_equal = functools.partial(torch.testing.assert_close, atol=1e-10, rtol=1e-10)


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
    for rows in (9, 1):
        taken(distiller, cut(data, *range(0, 10, rows)))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_of_all_steps(dtype):
    """Half precision doesn't round small steps away, nor does a restart after each."""
    student = classifier("bert", 2).to(dtype)
    teacher, again = EMATeacher(student, 0.995), EMATeacher(student, 0.995)
    learned, found = (next(m.parameters()) for m in (student, teacher.model))
    with torch.no_grad():
        learned.fill_(1.0)
        found.fill_(2.0)
    for number in range(60):
        teacher.update()
        if number > 29:
            again.update()
        if number >= 29:
            again.load_state_dict(copy.deepcopy((teacher, again)[number > 29].state_dict()))
    torch.testing.assert_close(found, torch.full_like(found, 1 + 0.995**60))
    torch.testing.assert_close(again.state_dict(), teacher.state_dict(), rtol=0, atol=0)
    assert not teacher.model.training and not any(p.requires_grad for p in teacher.parameters())


def test_wrong_averages_are_errors():
    distiller = made("average")
    state = distiller.state_dict()
    del state["teacher.model.classifier.weight"]
    words = r"Missing key.*teacher.model.classifier.weight"
    raises(words, distiller.load_state_dict, state, error=RuntimeError)
    raises("decay must be at most 1", EMATeacher, distiller.student, 1.5)
    distiller.student.bert.extra = torch.nn.Linear(2, 2)
    raises(r"bert.extra.bias for one; make the teacher after", distiller.teacher.update)


# Rows of each process, in micro-batches for the first way.
ROWS_OF = (0, 2, 4, 6), (6, 9)
# Methods that compare samples or have parameters, a language model, and averaging teachers; the
# random steps (test_by_hand.py) have every method, in processes that are threads.
WAYS = {
    "find_unused_parameters": ("fcd", "lrc_bert", "words", "average"),
    "static_graph": ("knn", "mc3kd"),
    "fsdp2": ("lrkd", "average", "average in half precision"),
}
OPTIONS = {"lrc_bert": {"pool": "mean", "perturb": True, "perturb_norm": "batch"}}


def made(name, gather=False):
    if not name.startswith("average"):
        kind = "language model" if name == "words" else "classifier"
        method = "soft_targets" if name == "words" else name
        return exact(method, kind, gather=gather, **OPTIONS.get(name, {}))
    student = exact("soft_targets").student
    student = student.bfloat16() if "half" in name else student
    return Distiller(EMATeacher(student, 0.9), student, SoftTargets(), gather=gather)


def sharded(*models):
    mesh = init_device_mesh("cpu", (2,))
    for model in models:
        blocks = model.bert.encoder.layer if hasattr(model, "bert") else ()
        for module in (*blocks, model):
            if list(module.parameters()):
                fully_shard(module, mesh=mesh)


def rows_of(data, rank):
    return cut(data, ROWS_OF[rank][0], ROWS_OF[rank][-1])[0]


def curve(name, way="", rank=None):
    """Terms and last state of a plain loop over a process's rows; with an average it restarts."""
    terms, state, model = [], None, None
    data = data_of("language model" if name == "words" else "classifier")
    if rank is not None:
        parts = way == "find_unused_parameters"
        data = cut(data, *ROWS_OF[rank]) if parts else rows_of(data, rank)
    for steps in (2, 1) if way and name.startswith("average") else (3,):
        distiller = made(name, bool(way))
        averages = [distiller.teacher] * name.startswith("average")
        if way == "fsdp2":
            sharded(distiller.student, distiller.method, *(x.model for x in averages))
        elif way:
            model = DistributedDataParallel(distiller, **{way: True})
        if state is not None:
            distiller.load_state_dict(state)
        learning = [p for p in distiller.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(learning, lr=0.05)
        for _ in range(steps):
            terms.append(taken(distiller, data, model)[0])
            optimizer.step()
            for average in averages:
                average.update()
        state = copy.deepcopy(distiller.state_dict())
    tensors = {n: x for n, x in state.items() if isinstance(x, torch.Tensor)}
    return terms, {n: getattr(x, "full_tensor", x.clone)().detach() for n, x in tensors.items()}


def knn_loss(rank):
    """Of a process's own rows."""
    distiller = exact("knn", alpha1=1.0, alpha2=0.0, alpha3=0.0)
    return taken(distiller, rows_of(data_of(), rank))[0]["loss"]


def in_process(rank):
    """Its curves, KNN's loss, and the step of rows of which nothing counts in any process."""
    distiller = made("average")  # of which a trainer would save the first process's shards
    sharded(distiller.teacher.model)
    given = {"args": arguments("unused"), "train_dataset": [{"labels": 0}]}
    words = "can't save an EMATeacher that is sharded by FSDP2"
    raises(words, DistillationTrainer, model=distiller, **given)
    found = {(way, name): curve(name, way, rank) for way, names in WAYS.items() for name in names}
    nothing = data_of("language model")
    nothing["labels"].fill_(-100)
    return found, knn_loss(rank), taken(made("words", True), nothing)


def test_two_processes_equal_one_process(tmp_path):
    """Terms of micro-batches are the process's shares; their average is the whole."""
    curves, spread, nothing = zip(*run_ranks(in_process, 2, tmp_path), strict=True)
    for terms, gradients in nothing:
        assert not any(map(torch.any, (*terms.values(), *gradients.values())))
    # Without gather KNN sums over its samples: the loop's average is the sum over all.
    assert_equal(sum(spread) / 2, knn_loss(0) + knn_loss(1))
    alone = {name: curve(name) for name in {name for _, name in curves[0]}}
    for way, name in curves[0]:
        close = {"rtol": 1.6e-2, "atol": 1e-2} if "half" in name else {"rtol": 0, "atol": 1e-10}
        expected, state = alone[name]
        both, states = zip(*(found[way, name] for found in curves), strict=True)
        means = [{n: (x[n] + y[n]) / 2 for n in x} for x, y in zip(*both, strict=True)]
        torch.testing.assert_close(means, expected, **close)
        for found in states:
            torch.testing.assert_close(found, state, **close)
