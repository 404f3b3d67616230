"""Soft targets of two vocabularies: a `VocabularyMatch`, and three ways with its other tokens."""

import dataclasses

import pytest
import torch

from bench import measure
from bench.case import Bound
from fastkd import (
    Divergence,
    Draft,
    TopK,
    VocabularyMatch,
    linear_soft_target_loss,
    linear_soft_target_loss_ref,
    soft_target_loss,
    soft_target_loss_ref,
)
from fastkd._core import extension
from fastkd.lm import row_losses
from fastkd.lm.divergences import NAMES
from tests.support.compare import (
    assert_matches_reference,
    count_graphs,
    every_two_meet,
    values_and_grads,
)

TRITON_FUNCTION = "soft_target_loss"
UNMATCHED = ("renormalise", "bucket", "sorted")
# Matched tokens, student's and teacher's: some, none of the student's left, none of the teacher's,
# all, one of one.
SIZES = ((5, 9, 12), (9, 9, 12), (9, 12, 9), (6, 6, 6), (1, 1, 1))


def make_match(n, student, teacher):
    return VocabularyMatch(
        torch.randperm(student)[:n], torch.randperm(teacher)[:n], student, teacher
    )


def make_logits(match, rows=4, dtype=torch.float32, device="cpu"):
    sizes = match.student_size, match.teacher_size
    student, teacher = ((2 * torch.randn(rows, V)).to(device, dtype) for V in sizes)
    return student, teacher


def make_heads(match, dtype=torch.float32, device="cpu"):
    def tensor(*shape):
        return torch.randn(*shape).to(device, dtype)

    student = tensor(2, 3, 4), tensor(match.student_size, 4)
    return student, (tensor(2, 3, 5), tensor(match.teacher_size, 5))


@pytest.mark.parametrize(("unmatched", "name", "sizes"), every_two_meet(UNMATCHED, NAMES, SIZES))
def test_matches_reference(backend, device, unmatched, name, sizes):
    match = make_match(*sizes)
    student, teacher = make_logits(match, device=device)
    options = dict(divergence=Divergence(name), vocabulary=match, unmatched=unmatched)
    value = soft_target_loss_ref(student, teacher, **options)
    if value.isinf():  # one side has no unmatched tokens
        assert soft_target_loss(student, teacher, backend=backend, **options).isinf()
        return
    functions = soft_target_loss, soft_target_loss_ref
    mask, weights = torch.tensor([1, 1, 0, 1], device=device), torch.rand(4, device=device)
    options |= dict(mask=mask, weights=weights, temperature=1.7)
    if sizes == (1, 1, 1):  # one outcome: 0 but for rounding
        value, grad = values_and_grads(
            soft_target_loss, [student], teacher, backend=backend, **options
        )
        assert value.abs() < 1e-6 and grad.norm() < 1e-6
        return
    assert_matches_reference(*functions, backend, student, teacher, gradient_floor=1e-2, **options)


def test_terms_and_teacher_rows(backend, device):
    match = make_match(5, 9, 12)
    student, (hidden, weight) = make_heads(match, torch.float32, device)
    rows = torch.tensor([[0, 0, 2], [2, 1, 1]], device=device)
    names = "soft", "entropy", "teacher_entropy", "log_prob"
    options = dict(vocabulary=match, unmatched="sorted", draft=Draft(rows=rows))
    options["return_terms"] = names
    call = *student, hidden.flatten(0, 1)[:3], weight
    loss, terms = linear_soft_target_loss(*call, backend=backend, **options)
    expected, wanted = linear_soft_target_loss_ref(*call, **options)
    torch.testing.assert_close((loss, terms), (expected, wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_of_several_blocks(device, dtype):
    """Thousands of unmatched tokens whose sorted probabilities cross, tie and underflow."""
    match = make_match(1500, 4100, 3300)
    student, teacher = make_logits(match, rows=5, dtype=dtype, device=device)
    student[1], teacher[1] = 0.0, 0.0
    student[2] *= 20
    teacher[3, :3000] = -torch.inf
    unmatched_tokens = torch.ones(4100, dtype=torch.bool).index_fill(0, match.student_ids, False)
    student[4, unmatched_tokens.to(device)] = -torch.inf
    functions = soft_target_loss, soft_target_loss_ref
    for options in (dict(divergence="js"), dict(divergence="adaptive_kl", temperature=20.0)):
        for unmatched in UNMATCHED:
            options |= dict(vocabulary=match, unmatched=unmatched, reduction="none")
            assert_matches_reference(*functions, "auto", student[:4], teacher[:4], **options)
            if options["divergence"] == "js":
                assert_matches_reference(*functions, "auto", student, teacher, **options)


@pytest.mark.skipif(not extension.CPU, reason="needs the extension")
@pytest.mark.parametrize("heads", [False, True], ids=["logits", "heads"])
def test_memory_is_that_of_one_vocabulary(heads):
    match = make_match(3000, 5000, 6000)
    student, teacher = make_heads(match) if heads else ([x] for x in make_logits(match, 32))
    student[0].requires_grad_()
    loss = linear_soft_target_loss if heads else soft_target_loss

    def peak(teacher, **options):
        step = Bound(lambda: loss(*student, *teacher, **options), [student[0]]).step
        return measure.peak_bytes(step, torch.device("cpu"))

    # From heads a chunk has the teacher's logits too.
    equal = peak([x.detach() for x in student]) + heads * 6 * 1000 * 4
    for unmatched in UNMATCHED:
        assert peak(teacher, vocabulary=match, unmatched=unmatched) <= 1.02 * equal


def test_no_token_matched(backend, device):
    none = torch.zeros(0, dtype=torch.int64)
    match = VocabularyMatch(none, none, 3, 4)
    pair = make_logits(match, device=device)
    value, grad = values_and_grads(
        soft_target_loss, pair[:1], pair[1], vocabulary=match, unmatched="bucket", backend=backend
    )
    assert value == 0 and not grad.any()  # one outcome of probability 1
    options = dict(vocabulary=match, unmatched="sorted")
    assert_matches_reference(soft_target_loss, soft_target_loss_ref, backend, *pair, **options)


def test_unlike_probabilities_of_unmatched_tokens(device):
    """A student without unmatched tokens can't have the teacher's probability of its own."""
    match = make_match(3, 3, 5)
    student, teacher = make_logits(match, device=device)
    options = dict(vocabulary=match, unmatched="bucket")
    assert soft_target_loss(student, teacher, **options).isinf()
    assert soft_target_loss(student, teacher, divergence="js", **options).isfinite()


@pytest.mark.parametrize("unmatched", UNMATCHED)
def test_chunks_do_not_change_the_result(unmatched, monkeypatch):
    match = make_match(5, 9, 12)
    student, teacher = make_logits(match, rows=7, dtype=torch.float64)
    options = dict(vocabulary=match, unmatched=unmatched, backend="torch")
    whole = values_and_grads(soft_target_loss, [student], teacher, **options)
    monkeypatch.setattr(row_losses, "CHUNK_LOGITS", 20)
    chunked = values_and_grads(soft_target_loss, [student], teacher, **options)
    torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=0)


def test_compiles():
    match = make_match(5, 9, 12)

    def loss(student, teacher, heads):
        options = dict(vocabulary=match, unmatched="sorted")
        value = soft_target_loss(student, teacher, **options)
        states = student[:, :4], heads[0], teacher[:, :5], heads[1]
        return value + linear_soft_target_loss(*states, **options)

    heads = torch.randn(9, 4), torch.randn(12, 5)
    calls = []
    for rows in (3, 5, 6):
        student, teacher = make_logits(match, rows)
        calls.append((student.requires_grad_(), teacher, heads))
    assert count_graphs(loss, calls) <= 2


def test_wrong_arguments_raise_one_sentence():
    match = make_match(5, 9, 12)
    student, teacher = make_logits(match)
    none = torch.zeros(0, dtype=torch.int64)
    padded = dataclasses.replace(match, student_size=16)
    wrong = [
        (dict(vocabulary=match, unmatched="buckets"), "unmatched must be one of"),
        (dict(unmatched="bucket"), "needs a VocabularyMatch as vocabulary"),
        (dict(vocabulary=VocabularyMatch(none, none, 9, 12)), "has no matched tokens"),
        (dict(vocabulary=padded), "student_size 16 but student_logits has 9 entries"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            soft_target_loss(student, teacher, **options)
    with pytest.raises(ValueError, match="teacher_logits must have shape"):
        soft_target_loss(student, teacher[:2], vocabulary=match)
    with pytest.raises(TypeError, match="an int or a VocabularyMatch, got tuple"):
        soft_target_loss(student, teacher, vocabulary=(9, 12))
    top = TopK(torch.zeros(4, 1, dtype=torch.int64), torch.zeros(4, 1))
    with pytest.raises(ValueError, match="needs the teacher's whole distribution"):
        soft_target_loss(student, top, vocabulary=match)
    heads = torch.randn(9, 9), teacher, torch.randn(12, 12)
    with pytest.raises(ValueError, match="compares tokens of one vocabulary"):
        terms = ("total_variation",)
        linear_soft_target_loss(student, *heads, vocabulary=match, return_terms=terms)
    with pytest.raises(ValueError, match="teacher_size 12 but teacher_head has 11 entries"):
        linear_soft_target_loss(student, heads[0], teacher, heads[2][:11], vocabulary=match)
