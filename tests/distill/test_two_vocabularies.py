"""Soft targets of a teacher with another vocabulary, at the tokens that spans pair one by one."""

import pytest
import torch
import transformers as t

from fastkd import VocabularyMatch
from fastkd.distill import Distiller, SoftTargets, TwoTokenizers
from tests.support.compare import raises

TEXTS = ["playing in the garden", "cat well in", "the well garden cat playing"]
ZERO = torch.tensor([0])
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = {
    "student": [*SPECIAL, "play", "##ing", "well", "in", "the", "garden", "cat"],
    "teacher": [*SPECIAL, "[MASK]", "cat", "the", "in", "well", "gar", "##den", "playing"],
}


def tokenizer(side):
    return t.BertTokenizer(vocab={word: i for i, word in enumerate(WORDS[side])})


def decoder(vocabulary, hidden):
    sizes = {"hidden_size": hidden, "intermediate_size": 32, "num_hidden_layers": 1}
    config = t.LlamaConfig(vocab_size=vocabulary, **sizes, num_attention_heads=2, pad_token_id=0)
    return t.LlamaForCausalLM(config)


def two_models():
    """A teacher, a student, and the match of their tokens."""
    torch.manual_seed(0)
    match = VocabularyMatch.of(tokenizer("student"), tokenizer("teacher"))
    teacher = decoder(match.teacher_size + 3, 24)  # a padded head
    return teacher, decoder(match.student_size, 16), match


def data():
    batch = TwoTokenizers(student=tokenizer("student"), teacher=tokenizer("teacher"))(TEXTS)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


@pytest.mark.parametrize("keep_logits", [False, True])
def test_unpaired_tokens_have_no_effect(keep_logits):
    """A weight of 0 would give NaN where the divergence is infinite."""
    teacher, student, match = two_models()
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


def test_wrong_tokens_are_errors(tmp_path):
    teacher, student, match = two_models()
    batch = {k: x for k, x in data().items() if not k.startswith(("teacher", "student"))}
    wrong = VocabularyMatch(torch.tensor([90]), torch.tensor([0]), 100, 100)
    words = "student_ids must be token ids 0 to"
    raises(words, Distiller, teacher, student, SoftTargets(), tokenizers=wrong)
    batch["input_ids"] = batch["input_ids"].clamp(max=5)
    own = Distiller(teacher, decoder(teacher.config.vocab_size, 16), SoftTargets())
    cache = own.cache_teacher([batch], tmp_path)
    distiller = Distiller(cache, student, SoftTargets(), tokenizers=match)
    raises("sample 0 of the batch is not in", distiller, error=KeyError, **data())


def test_top_k_cache_of_all_tokens_is_the_bucket(tmp_path):
    teacher, student, match = two_models()
    method, batch = SoftTargets(temperature=2.0), data()
    live = Distiller(teacher, student, method, tokenizers=match, unmatched="bucket")
    cache = live.cache_teacher([batch], tmp_path, top_k=teacher.config.vocab_size)
    cached = Distiller(cache, student, method, tokenizers=match, unmatched="bucket")
    values = [distiller(**batch).terms["soft"] for distiller in (live, cached)]
    torch.testing.assert_close(*values)
    raises("stores the teacher's top k", Distiller, cache, student, method, tokenizers=match)


def test_wrong_matches_are_errors():
    teacher, student, match = two_models()
    words = "unmatched='bucket' needs a VocabularyMatch"
    raises(words, Distiller, teacher, decoder(15, 8), SoftTargets(), unmatched="bucket")
    labels_alone, options = SoftTargets(alpha=0.0), {"tokenizers": match, "unmatched": "bucket"}
    Distiller(teacher, student, labels_alone, **options)(**data())
