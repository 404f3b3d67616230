"""Soft targets of a teacher with another vocabulary, at the tokens that spans pair one by one."""

import copy
import dataclasses

import pytest
import torch
import transformers as t
from torch.nn import functional as F

from fastkd import VocabularyMatch, soft_target_loss
from fastkd.distill import FCD, ByRow, Distiller, SoftTargets, TwoTokenizers
from fastkd.distill.verify import verify
from tests.distill.processes import start_by_fork
from tests.support.compare import raises

TEXTS = ["playing in the garden", "cat well in", "the well garden cat playing"]
ZERO = torch.tensor([0])
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = {
    "student": [*SPECIAL, "play", "##ing", "well", "in", "the", "garden", "cat"],
    "teacher": [*SPECIAL, "[MASK]", "cat", "the", "in", "well", "gar", "##den", "playing"],
}


def tokenizer(side, padding_side="right"):
    vocab = {word: i for i, word in enumerate(WORDS[side])}
    return t.BertTokenizer(vocab=vocab, padding_side=padding_side)


def decoder(vocabulary, hidden):
    sizes = {"hidden_size": hidden, "intermediate_size": 32, "num_hidden_layers": 1}
    config = t.LlamaConfig(vocab_size=vocabulary, **sizes, num_attention_heads=2, pad_token_id=0)
    return t.LlamaForCausalLM(config)


@pytest.fixture
def models():
    torch.manual_seed(0)
    match = VocabularyMatch.of(tokenizer("student"), tokenizer("teacher"))
    teacher = decoder(match.teacher_size + 3, 24)  # a padded head
    return teacher, decoder(match.student_size, 16), match


def data(left=False, labels=True):
    student = tokenizer("student", "left" if left else "right")
    batch = TwoTokenizers(student=student, teacher=tokenizer("teacher"))(TEXTS)
    if labels:
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def by_hand(models, batch):
    teacher, student, match = models
    logits = student(batch["input_ids"], batch["attention_mask"]).logits
    logits_t = teacher(batch["teacher_input_ids"], batch["teacher_attention_mask"]).logits
    total, count, pairs = 0.0, 0, 0
    for row in range(len(logits)):
        ours, theirs = batch["student_spans"][row], batch["teacher_spans"][row]
        count += int(batch["attention_mask"][row].sum()) - 1
        for span in range(int(ours.max()) + 1):
            n, m = ((x == span).nonzero()[:, 0].tolist() for x in (ours, theirs))
            if len(n) == len(m) == 1 and n[0] > 0 and batch["attention_mask"][row, n[0] - 1]:
                z, z_t = logits[row, n[0] - 1], logits_t[row, m[0] - 1]
                pair = z[match.student_ids][None], z_t[match.teacher_ids][None]
                total, pairs = total + soft_target_loss(*pair, temperature=2.0), pairs + 1
    assert 1 < pairs < count
    return total / count


@pytest.mark.parametrize(("keep_logits", "left"), [(False, True), (True, False)])
def test_soft_term_by_hand(models, keep_logits, left):
    teacher, student, match = models
    method = SoftTargets(temperature=2.0, alpha=0.5)
    distiller = Distiller(teacher, student, method, tokenizers=match, keep_logits=keep_logits)
    out, right = distiller(**data(left)), data()
    expected = by_hand(models, right)
    torch.testing.assert_close(out.terms["soft"], expected.detach())
    logits = student(right["input_ids"], right["attention_mask"]).logits[:, :-1]
    task = F.cross_entropy(logits.flatten(0, 1), right["labels"][:, 1:].flatten())
    torch.testing.assert_close(out.terms["task"], task.detach())  # of every token
    both = (out.loss, 0.5 * task + 0.5 * expected)
    grads = [torch.autograd.grad(x, student.lm_head.weight)[0] for x in both]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("weight", [None, 3.0])
def test_without_labels_and_with_loss_weights(models, weight):
    teacher, student, match = models
    method = SoftTargets(temperature=2.0, alpha=1.0)
    distiller = Distiller(teacher, student, method, tokenizers=match)
    batch, expected = data(labels=weight is not None), by_hand(models, data()).detach()
    if weight is not None:
        batch["loss_weights"] = torch.full(batch["labels"].shape, weight)
    torch.testing.assert_close(distiller(**batch).terms["soft"], (weight or 1) * expected)


@pytest.mark.parametrize("keep_logits", [False, True])
def test_a_teacher_for_each_row(models, keep_logits):
    teacher, student, match = models
    teachers = {"a": teacher, "b": decoder(match.teacher_size + 3, 16)}
    options = {"tokenizers": match, "keep_logits": keep_logits}
    batch, rows = data(), {"a": [0, 2], "b": [1]}
    both = Distiller(ByRow(teachers), student, SoftTargets(temperature=2.0), **options)
    out, expected, total = both(**batch, teacher_id=["a", "b", "a"]), 0.0, 0
    for name, own in rows.items():
        alone = Distiller(teachers[name], student, SoftTargets(temperature=2.0), **options)
        part = {key: x[own] for key, x in batch.items()}
        count = int(alone.count_items(part))
        expected, total = expected + count * alone(**part).loss, total + count
    torch.testing.assert_close(out.loss, expected / total)
    grads = [torch.autograd.grad(x, student.lm_head.weight)[0] for x in (out.loss, expected)]
    torch.testing.assert_close(grads[0], grads[1] / total)


@pytest.mark.parametrize("keep_logits", [False, True])
def test_unpaired_tokens_have_no_effect(models, keep_logits):
    """A weight of 0 would give NaN where the divergence is infinite."""
    teacher, student, match = models
    distiller = Distiller(
        teacher, student, SoftTargets(), tokenizers=match, keep_logits=keep_logits
    )
    batch = TwoTokenizers(student=tokenizer("student"), teacher=tokenizer("teacher"))(TEXTS[:1])
    batch["labels"] = batch["input_ids"]

    def step():
        out = distiller(**batch)
        return out.loss, *torch.autograd.grad(out.loss, student.lm_head.weight)

    expected = step()
    # The first word has several tokens of the student: the teacher's prediction isn't compared.
    teacher.model.norm.register_forward_hook(lambda _, x, out: out.index_fill(1, ZERO, torch.inf))
    for found, value in zip(step(), expected, strict=True):
        torch.testing.assert_close(found, value)


def test_split_steps_equal_the_whole(models, monkeypatch):
    start_by_fork(monkeypatch)
    teacher, student, match = models
    distiller = Distiller(teacher, student, SoftTargets(alpha=0.5), tokenizers=match)
    batch = data()
    checks = verify(distiller, batch, ranks=2, compile_backend="eager")
    assert checks and all(check.ok for check in checks), checks


def test_wrong_tokens_are_errors(models, tmp_path):
    teacher, student, match = models
    batch = {k: x for k, x in data().items() if not k.startswith(("teacher", "student"))}
    distiller = Distiller(teacher, student, SoftTargets(), tokenizers=match)
    words = "teacher_spans: the teacher has another vocabulary"
    raises(words, distiller, input_ids=batch["input_ids"], labels=batch["labels"])
    wrong = VocabularyMatch(torch.tensor([90]), torch.tensor([0]), 100, 100)
    words = "student_ids must be token ids 0 to"
    raises(words, Distiller, teacher, student, SoftTargets(), tokenizers=wrong)
    batch["input_ids"] = batch["input_ids"].clamp(max=5)
    own = Distiller(teacher, decoder(teacher.config.vocab_size, 16), SoftTargets())
    cache = own.cache_teacher([batch], tmp_path)
    distiller = Distiller(cache, student, SoftTargets(), tokenizers=match)
    raises("sample 0 of the batch is not in", distiller, error=KeyError, **data())


@pytest.mark.parametrize("method", [SoftTargets(temperature=2.0), FCD()])
def test_cache_of_the_teachers_own_tokens(models, method, tmp_path):
    teacher, student, match = models
    options = dict(tokenizers=match, unmatched="bucket")
    live, batch, steps = Distiller(teacher, student, method, **options), data(), []
    cache = live.cache_teacher([batch, batch], tmp_path)
    assert len(cache) == len(TEXTS)
    assert all(key in cache for key in live.sample_keys(batch))
    for distiller in (live, Distiller(cache, student, copy.deepcopy(method), **options)):
        out = distiller(**batch)
        steps.append((out.loss.detach(), *torch.autograd.grad(out.loss, student.lm_head.weight)))
    torch.testing.assert_close(*steps, rtol=0, atol=0)


def test_top_k_cache_of_all_tokens_is_the_bucket(models, tmp_path):
    teacher, student, match = models
    method, batch = SoftTargets(temperature=2.0), data()
    live = Distiller(teacher, student, method, tokenizers=match, unmatched="bucket")
    cache = live.cache_teacher([batch], tmp_path, top_k=teacher.config.vocab_size)
    cached = Distiller(cache, student, method, tokenizers=match, unmatched="bucket")
    values = [distiller(**batch).terms["soft"] for distiller in (live, cached)]
    torch.testing.assert_close(*values)
    raises("stores the teacher's top k", Distiller, cache, student, method, tokenizers=match)


@pytest.mark.parametrize("keep_logits", [False, True])
def test_unmatched_tokens_are_one_outcome(models, keep_logits):
    teacher, student, match = models
    batch, method = data(), SoftTargets()
    match = dataclasses.replace(match, teacher_size=teacher.config.vocab_size)
    options = dict(tokenizers=match, keep_logits=keep_logits)
    values = set()
    for unmatched in ("renormalise", "bucket", "sorted"):
        distiller = Distiller(teacher, student, method, unmatched=unmatched, **options)
        values.add(distiller(**batch).terms["soft"].item())
    assert len(values) == 3
    labels_alone = SoftTargets(alpha=0.0)
    Distiller(teacher, student, labels_alone, unmatched="bucket", **options)(**batch)
    words = "unmatched='bucket' needs a VocabularyMatch"
    raises(words, Distiller, teacher, decoder(15, 8), method, unmatched="bucket")


def test_no_prediction_of_the_teachers_first_token(models):
    """The student's input begins with a special token, which the teacher's doesn't have."""
    teacher, student, match = models
    batch = data()
    own = {n: x[:, 1:] for n, x in batch.items() if n.startswith("teacher_")}
    distiller = Distiller(teacher, student, SoftTargets(), tokenizers=match)
    step = distiller.read({**batch, **own})
    first = own["teacher_spans"][:, :1]
    paired = step.spans.paired >= 0
    assert paired.any() and not (paired & (batch["student_spans"] == first)).any()
