"""Several methods, of one teacher or each of its own, against the methods one by one."""

import pytest
import torch

from fastkd.distill import (
    FCD,
    LRCBERT,
    LRKD,
    MC3KD,
    Distiller,
    Several,
    SoftTargets,
    student_from_teacher,
)
from tests.distill.models import batch, classifier, set_dropout, step
from tests.support.compare import raises

pytestmark = pytest.mark.filterwarnings("ignore:CCALoss")


def models():
    torch.manual_seed(0)
    teachers = [classifier("bert").double(), classifier("roberta", layers=6).double()]
    student = student_from_teacher(teachers[0], [2, 4])
    set_dropout(student)
    return teachers, student


def test_shares_of_labels_and_terms_left_out():
    """Values and gradients: test_by_hand.py."""
    teachers, student = models()
    data = batch(rows=6)
    distiller = Distiller(teachers, student, Several(FCD(task_weight=0.5), LRKD(beta=2.0)))
    out = distiller(**data)
    distiller.method.label_share = 0.5  # as of a process that has fewer labels than others
    halved = distiller(**data).terms
    for name in ("0.task", "1.task"):
        torch.testing.assert_close(halved[name], out.terms[name] / 2)
    distiller.method.left_out = frozenset({"task"})  # as of text that the student wrote
    assert distiller(**data).terms.keys() == out.terms.keys() - {"0.task", "1.task"}
    assert not any(p.requires_grad for p in distiller.teacher.parameters())
    assert not any(name.startswith("teacher") for name in distiller.state_dict())


def test_perturbation_schedule_and_preparation(tmp_path):
    teachers, student = models()
    data = batch(rows=4)
    method = Several(LRCBERT(first_stage=0.5, perturb=True), MC3KD(beta=0.01))
    distiller = Distiller(teachers, student, method)
    raises(r"call distiller.prepare", distiller.eval(), error=RuntimeError, **data)
    distiller.train().prepare([data])
    assert method.prepared and len(method.each[1].teacher_layers) == 2
    distiller.set_progress(1.0)
    out, _ = step(distiller, data)
    assert out.loss.isfinite() and "0.soft" in out.terms
    raises("cached one by one", distiller.cache_teacher, [data], tmp_path / "both")


def test_wrong_arguments_are_errors():
    teachers, student = models()
    words, three = "several teachers need one method each", Several(FCD(), LRKD(), SoftTargets())
    raises(words, Distiller, teachers, student, FCD(), error=TypeError)
    raises(r"got . teachers for 3 methods", Distiller, teachers, student, three)
    raises("methods: none given", Several, error=TypeError)
    words = r"methods must be .*method_by_name\('lrkd'\)"
    raises(words, Several, FCD(), "lrkd", error=TypeError)
