"""A teacher that is the student's exponential moving average; in processes: test_splits.py."""

import copy

import pytest
import torch

from fastkd.distill import Distiller, EMATeacher, SoftTargets
from tests.distill.models import classifier, set_dropout
from tests.support.compare import raises


def made(decay=0.9, dtype=torch.float32):
    torch.manual_seed(0)
    student = classifier("bert", 2).to(dtype)
    teacher = EMATeacher(student, decay)
    distiller = Distiller(teacher, student, SoftTargets())
    set_dropout(distiller)
    return distiller, teacher


@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
def test_the_average_of_all_steps(decay):
    distiller, teacher = made(decay)
    expected = [p.detach().clone() for p in distiller.student.parameters()]
    for _ in range(3):
        with torch.no_grad():
            for p in distiller.student.parameters():
                p += torch.randn_like(p)
        teacher.update()
        for average, p in zip(expected, distiller.student.parameters(), strict=True):
            average.mul_(decay).add_(p.detach(), alpha=1 - decay)
    for average, p in zip(expected, teacher.model.parameters(), strict=True):
        torch.testing.assert_close(p, average)
        assert not p.requires_grad
    assert not teacher.model.training and distiller.student.training


def test_half_precision_does_not_round_small_steps_away():
    """Nor does a restart."""
    (distiller, teacher), (again, other) = (made(0.995, torch.bfloat16) for _ in range(2))
    learned, found = (next(m.parameters()) for m in (distiller.student, teacher.model))
    with torch.no_grad():
        learned.fill_(1.0)
        found.fill_(2.0)
    for _ in range(30):
        teacher.update()
    again.load_state_dict(copy.deepcopy(distiller.state_dict()))
    for _ in range(30):
        teacher.update()
        other.update()
    torch.testing.assert_close(found, torch.full_like(found, 1 + 0.995**60))
    torch.testing.assert_close(again.state_dict(), distiller.state_dict(), rtol=0, atol=0)


def test_wrong_arguments_are_errors():
    distiller, teacher = made()
    state = distiller.state_dict()
    del state["teacher.model.classifier.weight"]
    words = r"Missing key.*teacher.model.classifier.weight"
    raises(words, distiller.load_state_dict, state, error=RuntimeError)
    raises("decay must be at most 1", EMATeacher, distiller.student, 1.5)
    distiller.student.bert.extra = torch.nn.Linear(2, 2)
    raises(r"bert.extra.bias for one; make the teacher after", teacher.update)
