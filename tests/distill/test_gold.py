"""GOLD: merged distributions of spans, their likelihoods, and its terms in a Distiller."""

import functools
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fastkd import Head, VocabularyMatch
from fastkd.distill import (
    LRKD,
    Distiller,
    Several,
    SoftTargets,
    TwoTokenizers,
    align_spans,
    merged_span_loss,
    span_likelihood_loss,
)
from fastkd.distill.baselines import GOLD
from fastkd.lm.heads import LowRank
from tests.distill.test_two_vocabularies import decoder
from tests.support.compare import raises

TEXTS = (
    "distillation trains a small model on the outputs of a large one",
    "the student reads the same text in other tokens than its teacher",
)


@functools.cache
def tokenizers():
    made = {}
    for side, model, trainer, more in (
        ("student", models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer, 60),
        ("teacher", models.BPE(unk_token="[UNK]"), trainers.BpeTrainer, 40),
    ):
        one = Tokenizer(model)
        one.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        special = ["[PAD]", "[UNK]"]
        one.train_from_iterator(
            TEXTS, trainer(vocab_size=more, special_tokens=special, show_progress=False)
        )
        made[side] = PreTrainedTokenizerFast(
            tokenizer_object=one, pad_token="[PAD]", unk_token="[UNK]"
        )
    return made


@pytest.fixture
def setting():
    return make_setting(tokenizers(), TEXTS)


def make_setting(both, texts):
    torch.manual_seed(0)
    match = VocabularyMatch.of(both["student"], both["teacher"])
    decoders = [decoder(match.teacher_size, 12), decoder(match.student_size, 8)]
    batch = TwoTokenizers(**both, add_special_tokens=False)(texts)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return *decoders, match, batch


def test_beside_other_methods(setting):
    teacher, student, match, batch = setting
    gold = GOLD(likelihood_weight=1.0)
    soft = SoftTargets(alpha=1.0)

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
    with pytest.raises(ValueError, match="method: SoftTargets reads the teacher's predictions at"):
        terms(teacher, Several(gold, soft))


def test_wrong_use_raises_one_sentence(setting, tmp_path):
    teacher, student, match, batch = setting
    distiller = Distiller(teacher, student, GOLD(), tokenizers=match)
    words = "top_k: GOLD compares all tokens of the teacher; leave"
    raises(words, distiller.cache_teacher, [batch], tmp_path, top_k=2)
    soft = Distiller(teacher, student, SoftTargets(temperature=1), tokenizers=match)
    cache = soft.cache_teacher([batch], tmp_path, top_k=2)
    words = r"GOLD compares all tokens .* the 2 most probable ones"
    raises(words, Distiller, cache, student, GOLD(), tokenizers=match)
    raises("merge must be one of", GOLD, merge="first")
    kept = Distiller(teacher, student, GOLD(), tokenizers=match, keep_logits=True)
    raises("GOLD compares spans of two tokenizers", kept, **batch)


SIZES = {"student": 6, "teacher": 8}


@pytest.fixture(scope="module")
def batch():
    """Both models' states, heads, ids, offsets and spans of the texts; the last token has none."""
    torch.manual_seed(0)
    made = {}
    for side, D in SIZES.items():
        one = tokenizers()[side].backend_tokenizer
        encoded = [one.encode(text) for text in TEXTS]
        longest = max(len(e.ids) for e in encoded) + 1
        ids = torch.zeros(2, longest, dtype=torch.int64)
        offsets = torch.zeros(2, longest, 2, dtype=torch.int64)
        for row, e in enumerate(encoded):
            ids[row, : len(e.ids)] = torch.tensor(e.ids)
            offsets[row, : len(e.ids)] = torch.tensor(e.offsets)
            offsets[row, len(e.ids)] = offsets[row, len(e.ids) - 1, 1]
        V = one.get_vocab_size()
        made[side] = SimpleNamespace(
            ids=ids, offsets=offsets, lengths=[len(e.ids) for e in encoded],
            hidden=torch.randn(2, longest, D), head=torch.randn(V, D), vocabulary=one.get_vocab(),
        )  # fmt: skip
    spans = align_spans(made["student"].offsets, made["teacher"].offsets)
    made["student"].spans, made["teacher"].spans = spans
    return made


def merged(batch, hidden=None, head=None, **options):
    student, teacher = batch["student"], batch["teacher"]
    return merged_span_loss(
        student.hidden if hidden is None else hidden, student.head if head is None else head,
        teacher.hidden, teacher.head, student_ids=student.ids, teacher_ids=teacher.ids,
        student_spans=student.spans, teacher_spans=teacher.spans, **options,
    )  # fmt: skip


def match_by_name(batch):
    student, teacher = batch["student"].vocabulary, batch["teacher"].vocabulary
    both = sorted(student.keys() & teacher.keys())
    ids = (torch.tensor([v[t] for t in both]) for v in (student, teacher))
    return VocabularyMatch(*ids, len(student), len(teacher))


def gold(batch, hidden, head, hybrid, strategy):
    """TRL's own loss of whole logits, with the defaults of its configuration."""
    trainer = pytest.importorskip("trl.experimental.gold.gold_trainer")
    fields = trainer.GOLDConfig.__dataclass_fields__
    config = SimpleNamespace(**{n: f.default for n, f in fields.items() if n != "beta"})
    config.beta, config.uld_use_hybrid_loss = fields["beta"].default, hybrid
    config.uld_token_merge_strategy = strategy
    student, teacher = batch["student"], batch["teacher"]
    named = (SimpleNamespace(get_vocab=lambda x=x: x.vocabulary) for x in (student, teacher))
    loss = trainer.ULDLoss(config, *named)
    labels = []
    for side in (student, teacher):
        labels.append(torch.full_like(side.ids, -100))
        for row, length in enumerate(side.lengths):
            labels[-1][row, : length + 1] = side.ids[row, : length + 1]  # GOLD skips the last
    logits = hidden @ head.T, teacher.hidden @ teacher.head.T
    return loss(*logits, *labels, student.ids, teacher.ids, student.offsets, teacher.offsets)


@pytest.mark.slow
@pytest.mark.parametrize("hybrid", [False, True])
def test_equals_gold_on_two_tokenizers(batch, hybrid):
    spans = batch["student"].spans, batch["teacher"].spans
    several = [(x[x >= 0].unique(return_counts=True)[1] > 1).any() for x in spans]
    assert all(several)  # spans of several tokens on either side
    student = batch["student"]
    leaves = [x.clone().requires_grad_() for x in (student.hidden, student.head)]
    match, made = match_by_name(batch) if hybrid else None, GOLD()
    options = {"beta": made.beta, "temperature": made.temperature}
    found = merged(batch, *leaves, vocabulary=match, **options)
    expected = gold(batch, *leaves, hybrid, made.merge)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves)
    )


def test_chunks_do_not_change_the_result(batch):
    head = Head(batch["student"].head.clone().requires_grad_(), softcap=3.0)
    for match in (None, match_by_name(batch)):
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
            match = match_by_name(batch) if matched else None
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
