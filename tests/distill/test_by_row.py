"""A teacher for each row: no rows of one, errors, processes; steps: test_by_hand.py."""

import torch
import transformers as t

from fastkd.distill import (
    FCD,
    MC3KD,
    ByRow,
    Distiller,
    Several,
    SoftTargets,
    student_from_teacher,
)
from tests.distill.models import VOCAB, batch, classifier, model, set_dropout, step
from tests.distill.processes import run_ranks
from tests.support.compare import raises

NUMBERS = torch.tensor([0, 1, 1, 0, 1])


def of_head(kind: str, narrow: bool = False):
    """Two teachers, and a student of the first, in float64 without dropout."""
    torch.manual_seed(0)
    if kind == "classifier":
        teachers = [classifier("bert") for _ in range(2)]
    else:
        sizes = [{}, {"n_embd": 8} if narrow else {}]  # GPT-2 has no float32 inside
        teachers = [model(t.GPT2LMHeadModel, "gpt2", **each) for each in sizes]
    student = student_from_teacher(teachers[0], [1, 4]).double()
    set_dropout(student)
    return [teacher.double() for teacher in teachers], student


def tokens() -> dict:
    torch.manual_seed(1)
    ids = torch.randint(3, VOCAB, (5, 9))
    mask = torch.arange(9) < torch.randint(4, 10, (5, 1))
    labels = ids.masked_fill(~mask, -100)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def assert_equal(one, two):
    (loss, gradients), (other, expected) = one, two
    torch.testing.assert_close(loss, other, rtol=1e-10, atol=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-7, atol=1e-10)


def test_rows_of_one_teacher_and_no_rows():
    teachers, student = of_head("decoder")
    distiller = Distiller(ByRow({"a": teachers[0], "b": teachers[1]}), student, SoftTargets())
    data = tokens()
    ran = []
    teachers[1].register_forward_pre_hook(lambda *_: ran.append(True))
    out = distiller(**data, teacher_id=["a"] * 5)
    expected = Distiller(teachers[0], student, SoftTargets())(**data)
    torch.testing.assert_close(out.loss, expected.loss)
    assert not ran
    empty = {name: x[:0] for name, x in data.items()}
    assert distiller(**empty, teacher_id=[]).loss == 0


def test_caches_of_all_tokens(tmp_path):
    teachers, student = of_head("decoder")
    data, names = tokens(), ("a", "b")
    caches = [
        Distiller(teacher, student, SoftTargets()).cache_teacher([data], tmp_path / name, top_k=60)
        for name, teacher in zip(names, teachers, strict=True)
    ]
    live, stored = (
        Distiller(ByRow(dict(zip(names, each, strict=True))), student, SoftTargets())
        for each in (teachers, caches)
    )
    found, expected = (x(**data, teacher_id=NUMBERS).terms for x in (stored, live))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_wrong_teachers_are_errors(tmp_path):
    teachers, student = of_head("classifier")
    distiller = Distiller(ByRow({"a": teachers[0], "b": teachers[1]}), student, SoftTargets())
    for given, words in (
        ({}, "teacher_id: missing; pass each row's teacher: a, b"),
        ({"teacher_id": ["a", "c"] * 2}, "'c' is none of the teachers; pass a, b, or numbers"),
        ({"teacher_id": torch.tensor([0, 2, 1, 0])}, "2 is none of the teachers"),
        ({"teacher_id": ["a", "b"]}, "names 2 rows, but labels has shape"),
    ):
        raises(words, distiller, **batch(rows=4), **given)
    teachers, student = of_head("decoder", narrow=True)
    both = ByRow({"a": teachers[0], "b": teachers[1]})
    raises(r"FCD compares layers, and 'b' .* has other sizes", Distiller, both, student, FCD())
    raises("MC3KD chooses layers of one teacher; pass layers=", Distiller, both, student, MC3KD())
    soft = Distiller(both, student, SoftTargets())
    raises("several teachers are cached one by one", soft.cache_teacher, [tokens()], tmp_path)
    raises("'b' is a str", ByRow, {"a": teachers[0], "b": "name"}, error=TypeError)
    raises("pass a dictionary", ByRow, teachers, error=TypeError)
    numbered = {1: teachers[0], 0: teachers[1]}
    raises("1 is no string; name each teacher", ByRow, numbered, error=TypeError)


def on_rank(rank, world):
    """Rows 0 and 3, of one teacher, on the first process; the others on the second."""
    teachers, student = of_head("classifier")
    method = Several(SoftTargets(), FCD(task_weight=0))
    distiller = Distiller(ByRow({"a": teachers[0], "b": teachers[1]}), student, method, gather=True)
    own = torch.arange(5)[rank == NUMBERS] if world > 1 else torch.arange(5)
    data = {name: x[own] for name, x in batch(rows=5).items()}
    out, gradients = step(distiller, {**data, "teacher_id": NUMBERS[own]})
    return out.loss.detach(), gradients


def test_a_process_without_rows_of_a_teacher(tmp_path):
    one, two = run_ranks(on_rank, 2, tmp_path, 2)
    (whole,) = run_ranks(on_rank, 1, tmp_path / "one", 1)
    mean = {name: (x + two[1][name]) / 2 for name, x in one[1].items()}
    assert_equal((one[0], mean), whole)
