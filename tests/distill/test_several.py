"""Several methods, of one teacher or each of its own, and a teacher for each row.

Steps: test_by_hand.py.
"""

import pytest
import torch
import transformers as t

from fastkd.distill import (
    FCD,
    LRKD,
    MC3KD,
    ByRow,
    Distiller,
    Several,
    SoftTargets,
    student_from_teacher,
)
from tests.distill.models import batch, classifier, model, set_dropout
from tests.support.compare import raises

pytestmark = pytest.mark.filterwarnings("ignore:CCALoss")


def test_shares_of_labels_and_terms_left_out():
    teachers, data = [classifier("bert") for _ in range(2)], batch(rows=6)
    student = student_from_teacher(teachers[0], [1, 4])
    set_dropout(student)
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


def test_a_teacher_for_each_row(tmp_path):
    """No rows, and what doesn't fit."""
    teachers = [model(t.GPT2LMHeadModel, "gpt2", n_embd=size) for size in (16, 8)]
    student = student_from_teacher(teachers[0], [1, 4])
    both = ByRow({"a": teachers[0], "b": teachers[1]})
    soft, data = Distiller(both, student, SoftTargets()), batch()
    data["labels"] = data["input_ids"]
    assert soft(**{name: x[:0] for name, x in data.items()}, teacher_id=[]).loss == 0
    raises("several teachers are cached one by one", soft.cache_teacher, [data], tmp_path)
    raises(r"FCD compares layers, and 'b' .* has other sizes", Distiller, both, student, FCD())
    raises("MC3KD chooses layers of one teacher; pass layers=", Distiller, both, student, MC3KD())
    for words, given in (
        ("'b' is a str", {"a": teachers[0], "b": "name"}),
        ("pass a dictionary", teachers),
        ("1 is no string; name each teacher", {1: teachers[0], 0: teachers[1]}),
    ):
        raises(words, ByRow, given, error=TypeError)
    raises("methods: none given", Several, error=TypeError)
    words = r"methods must be .*method_by_name\('lrkd'\)"
    raises(words, Several, FCD(), "lrkd", error=TypeError)
