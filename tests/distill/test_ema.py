"""A teacher that is the student's exponential moving average."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fastkd.distill import DistillationTrainer, Distiller, EMATeacher, SoftTargets
from tests.distill.models import batch, classifier, set_dropout
from tests.distill.processes import run_ranks
from tests.distill.test_trainer import arguments
from tests.support.compare import raises


def made(decay=0.9, dtype=torch.float32):
    torch.manual_seed(0)
    student = classifier("bert", 2).to(dtype)
    teacher = EMATeacher(student, decay)
    distiller = Distiller(teacher, student, SoftTargets())
    set_dropout(distiller)
    return distiller, teacher


def train(distiller, steps=3, wrapped=None, start=0):
    teacher = distiller.teacher
    optimizer = torch.optim.SGD([p for p in distiller.parameters() if p.requires_grad], lr=0.1)
    for step in range(start, start + steps):
        torch.manual_seed(step)
        (wrapped or distiller)(**batch(rows=8)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        teacher.update()


@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
def test_the_average_of_all_steps(decay):
    distiller, teacher = made(decay)
    expected = [p.detach().clone() for p in distiller.student.parameters()]
    for _ in range(3):
        train(distiller, 1)
        for average, p in zip(expected, distiller.student.parameters(), strict=True):
            average.mul_(decay).add_(p.detach(), alpha=1 - decay)
    for average, p in zip(expected, teacher.model.parameters(), strict=True):
        torch.testing.assert_close(p, average)
        assert not p.requires_grad
    assert not teacher.model.training and distiller.student.training


def test_half_precision_does_not_round_small_steps_away():
    distiller, teacher = made(0.995, torch.bfloat16)
    learned, found = (next(m.parameters()) for m in (distiller.student, teacher.model))
    with torch.no_grad():
        learned.fill_(1.0)
        found.fill_(2.0)
    for _ in range(60):
        teacher.update()
    torch.testing.assert_close(found, torch.full_like(found, 1 + 0.995**60))


WAYS = [("DDP", torch.float32), ("FSDP2", torch.float32), ("FSDP2", torch.bfloat16)]


def test_data_parallel_and_sharded_averages_resume_and_equal_one_process(tmp_path):
    expected = {}
    for dtype in (torch.float32, torch.bfloat16):
        distiller, teacher = made(dtype=dtype)
        train(distiller)
        expected[dtype] = [p.detach().clone() for p in teacher.model.parameters()]
    tolerance = {torch.float32: (1e-4, 1e-6), torch.bfloat16: (1.6e-2, 1e-3)}
    for ways in run_ranks(_parallel, 2, tmp_path):
        for (name, dtype), found in zip(WAYS, ways, strict=True):
            rtol, atol = tolerance[dtype]
            for ours, theirs in zip(found, expected[dtype], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, msg=name)


def _parallel(rank):
    """The averages of both ways; a trainer would save the shards of the first process only."""
    distiller, teacher = made()
    fully_shard(teacher.model, mesh=init_device_mesh("cpu", (2,)))
    words = "can't save an EMATeacher that is sharded by FSDP2"
    given = {"args": arguments("unused"), "train_dataset": [{"labels": 0}]}
    raises(words, DistillationTrainer, model=distiller, **given)
    return [_resumed(*way) for way in WAYS]


def _resumed(name, dtype):
    """The average of three steps, of which the last runs after a restart."""
    state = None
    for start, steps in ((0, 2), (2, 1)):
        distiller, teacher = made(dtype=dtype)
        wrapped = None
        if name == "DDP":
            wrapped = DistributedDataParallel(distiller, find_unused_parameters=True)
        else:
            mesh = init_device_mesh("cpu", (2,))
            for one in (teacher.model, distiller.student):
                for block in one.bert.encoder.layer:
                    fully_shard(block, mesh=mesh)
                fully_shard(one, mesh=mesh)
        if state is not None:
            distiller.load_state_dict(state)
        train(distiller, steps, wrapped, start=start)
        state = copy.deepcopy(distiller.state_dict())
    found = teacher.model.parameters()
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in found]


def test_wrong_arguments_are_errors():
    distiller, teacher = made()
    state = distiller.state_dict()
    del state["teacher.model.classifier.weight"]
    words = r"Missing key.*teacher.model.classifier.weight"
    raises(words, distiller.load_state_dict, state, error=RuntimeError)
    raises("decay must be at most 1", EMATeacher, distiller.student, 1.5)
    distiller.student.bert.extra = torch.nn.Linear(2, 2)
    raises(r"bert.extra.bias for one; make the teacher after", teacher.update)
