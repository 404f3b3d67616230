"""GOLD: merged distributions of spans, their likelihoods, and its terms in a Distiller.

Values and gradients: test_by_hand.py.
"""

from types import SimpleNamespace

import pytest
import torch

from fastkd import Head, VocabularyMatch
from fastkd.distill import (
    LRKD,
    Distiller,
    Several,
    SoftTargets,
    merged_span_loss,
    span_likelihood_loss,
)
from fastkd.distill.baselines import GOLD
from fastkd.lm.heads import LowRank
from tests.distill.test_two_vocabularies import data, two_models
from tests.support.compare import raises


def test_beside_other_methods():
    (teacher, student, match), batch = two_models(), data()
    gold, soft = GOLD(likelihood_weight=1.0), SoftTargets(alpha=1.0)

    def terms(teachers, method):
        return Distiller(teachers, student, method, tokenizers=match)(**batch).terms

    expected = terms(teacher, gold)
    for found in (
        terms(teacher, Several(gold, LRKD(alpha=None))),
        terms([teacher, teacher], Several(gold, soft)),
    ):
        for name in ("merged", "likelihood"):
            torch.testing.assert_close(found[f"0.{name}"], expected[name])
    assert torch.equal(found["1.soft"], terms(teacher, soft)["soft"])
    words = "method: SoftTargets reads the teacher's predictions at"
    raises(words, terms, teacher, Several(gold, soft))


def test_wrong_use_raises_one_sentence(tmp_path):
    (teacher, student, match), batch = two_models(), data()
    distiller = Distiller(teacher, student, GOLD(), tokenizers=match)
    words = "top_k: GOLD compares all tokens of the teacher; leave"
    raises(words, distiller.cache_teacher, [batch], tmp_path, top_k=2)
    soft = Distiller(teacher, student, SoftTargets(temperature=1), tokenizers=match)
    cache = soft.cache_teacher([batch], tmp_path, top_k=2)
    words = r"GOLD compares all tokens .* the 2 most probable ones"
    raises(words, Distiller, cache, student, GOLD(), tokenizers=match)
    raises("merge must be one of", GOLD, merge="first")


MATCH = VocabularyMatch(torch.arange(12), torch.arange(3, 15), 20, 30)


@pytest.fixture
def batch():
    """Both models' states, heads, ids and spans, some of several tokens or none."""
    torch.manual_seed(0)
    made = {}
    for side, N, D, V in (("student", 9, 6, 20), ("teacher", 12, 8, 30)):
        spans = torch.randint(-1, 5, (2, N)).sort(-1).values
        ids, hidden, head = torch.randint(V, (2, N)), torch.randn(2, N, D), torch.randn(V, D)
        made[side] = SimpleNamespace(ids=ids, spans=spans, hidden=hidden, head=head)
    return made


def merged(batch, hidden=None, head=None, **options):
    student, teacher = batch["student"], batch["teacher"]
    return merged_span_loss(
        student.hidden if hidden is None else hidden, student.head if head is None else head,
        teacher.hidden, teacher.head, student_ids=student.ids, teacher_ids=teacher.ids,
        student_spans=student.spans, teacher_spans=teacher.spans, **options,
    )  # fmt: skip


def test_chunks_do_not_change_the_result(batch):
    head = Head(batch["student"].head.clone().requires_grad_(), softcap=3.0)
    for match in (None, MATCH):
        found = merged(batch, head=head, vocabulary=match, chunk_bytes=1)
        expected = merged(batch, head=head, vocabulary=match)
        torch.testing.assert_close(found, expected)
        grads = (torch.autograd.grad(x, head.weight)[0] for x in (found, expected))
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("matched", [False, True])
def test_backward_inside_autocast(batch, matched):
    """Also of the head's weight and of LoRA on it, whose dropout is drawn again in the backward."""
    student = batch["student"]
    V, D = student.head.shape
    torch.manual_seed(0)
    leaves = [torch.randn(shape).requires_grad_() for shape in ((V, D), (2, D), (V, 2))]
    leaves.append(student.hidden.clone().requires_grad_())
    head = Head(leaves[0])
    head.low_rank = (LowRank(*leaves[1:3], dropout=torch.nn.Dropout(0.5)),)
    gradients = []
    for inside in (False, True):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            match = MATCH if matched else None
            loss = merged(batch, leaves[3], head, vocabulary=match, chunk_bytes=2000)
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            gradients.append(torch.autograd.grad(loss, leaves))
    torch.testing.assert_close(*gradients)


def test_tokens_without_a_span_have_no_effect(batch):
    student = batch["student"]
    hidden = student.hidden.clone()
    hidden[student.spans < 0] = torch.nan
    hidden.requires_grad_()
    head = student.head.clone().requires_grad_()
    found = merged(batch, hidden, head)
    torch.testing.assert_close(found, merged(batch))
    found.backward()
    assert head.grad.isfinite().all() and hidden.grad.isfinite().all()
    assert not hidden.grad[student.spans < 0].any()


def test_no_shared_span_is_zero_and_certain_spans_are_finite():
    none = dict(student_spans=torch.full((1, 2), -1), teacher_spans=torch.zeros(1, 1).long())
    ids = dict(student_ids=torch.zeros(1, 2).long(), teacher_ids=torch.zeros(1, 1).long())
    states, head = torch.randn(1, 2, 3, requires_grad=True), torch.randn(4, 3)
    loss = merged_span_loss(states, head, torch.randn(1, 1, 3), head, **ids, **none)
    loss.backward()
    assert loss == 0 and not states.grad.any()
    assert span_likelihood_loss(torch.zeros(1, 2), torch.zeros(1, 1), *none.values()) == 0
    certain, span = torch.zeros(1, 1, requires_grad=True), torch.zeros(1, 1).long()
    loss = span_likelihood_loss(certain, torch.full((1, 1), -5.0), span, span)
    loss.backward()
    assert loss.isfinite() and certain.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(batch, dtype):
    student = batch["student"]
    hidden, head = (x.to(dtype).requires_grad_() for x in (student.hidden, student.head))
    found = merged(batch, hidden, head)
    found.backward()
    assert found.dtype == torch.float32 and hidden.grad.dtype == dtype
    torch.testing.assert_close(found, merged(batch), rtol=2e-2, atol=0)


def test_wrong_arguments_raise_one_sentence(batch):
    match, ids = VocabularyMatch(*[torch.zeros(1).long()] * 2, 3, 4), torch.zeros(1, 1).long()
    for words, change in (
        ("beta must be at most 1", {"beta": 2}),
        ("kept must be one of", {"kept": "middle"}),
        ("temperature must be greater than 0", {"temperature": 0}),
        ("student_size 3", {"vocabulary": match}),
        ("student_ids must have shape", {"hidden": batch["student"].hidden[:, 1:]}),
    ):
        raises(words, merged, batch, **change)
    learned = torch.zeros(1, 1, requires_grad=True)
    words = "teacher_log_probs requires grad"
    raises(words, span_likelihood_loss, learned, learned, ids, ids)
