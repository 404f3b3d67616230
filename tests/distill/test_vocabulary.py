"""Language models with tokens that the other model lacks, and caches of the most probable ones."""

import warnings

import pytest
import torch
import transformers as t

from fastkd.distill import (
    Distiller,
    Method,
    Several,
    SoftTargets,
    TeacherCache,
    student_from_teacher,
)
from fastkd.distill.method import WithSoftTargets
from fastkd.distill.prediction_losses import PredictionOptions
from tests.distill import support
from tests.support.compare import raises

pytestmark = pytest.mark.filterwarnings("ignore:the student's head has")
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tokenizer(count, shift=0, **other):
    words = SPECIAL + [f"word{i}" for i in range(len(SPECIAL), count)]
    made = t.BertTokenizer(vocab={other.get(word, word): i for i, word in enumerate(words)})
    ids = {word: i + shift for word, i in made.get_vocab().items()}
    made.get_vocab = lambda: ids
    return made


def pair(student=60, teacher=60):
    """A teacher and a student with embeddings of these sizes."""
    torch.manual_seed(0)
    taught = support.model_of("llama", "next word").double().eval()
    learner = student_from_teacher(taught, [1, 3])
    for model, size in ((taught, teacher), (learner, student)):
        model.resize_token_embeddings(size, mean_resizing=False)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(std=0.2)
    return taught, learner


def data_of():
    data = support.data_of("llama", "next word")
    data["input_ids"] = data["input_ids"] % 50
    data["labels"] = data["labels"].where(data["labels"] < 0, data["labels"] % 50)
    return data


def test_columns_beyond_both_tokenizers_are_told():
    """Nor tokens of one tokenizer only are compared: test_by_hand.py. One serves both models."""
    longer, shorter = tokenizer(57), tokenizer(50)
    for models, given, words in (
        (pair(60, 64), None, "head has 60 tokens, the teacher's 64: the first 60 are"),
        (pair(60, 64), (shorter, shorter), "the first 50 are compared, which the tokenizers share"),
        (pair(60, 64), (longer, shorter), "the first 50 are"),
        (pair(60, 64), (shorter, longer), "the first 50 are"),
        (pair(), shorter, "the first 50 are"),
    ):
        with pytest.warns(UserWarning, match=words):
            Distiller(*models, SoftTargets(), tokenizers=given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Distiller(*pair(), SoftTargets())


def test_tokenizers_that_do_not_fit_are_errors():
    small, shifted, renamed = tokenizer(50), tokenizer(50, 20), tokenizer(50, word7="other")
    for given, words, error in (
        ((small, renamed), "id 7 is 'word7' for the student, 'other' for the teacher", ValueError),
        ((small, shifted), "share only ids below 0", ValueError),
        ([small] * 3, r"the student's and each teacher's \(2\), got 3", ValueError),
        ("gpt2", "must be transformers tokenizers, got str", TypeError),
    ):
        raises(words, Distiller, *pair(60, 64), SoftTargets(), error=error, tokenizers=given)
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    for change in ({"bos_token_id": 5}, dict.fromkeys(special)):
        teacher, student = pair(60, 64)
        vars(student.config).update(change)
        words = r"60 labels or vocabulary entries.*pass tokenizers="
        raises(words, Distiller, teacher, student, SoftTargets())


def test_each_teacher_of_an_ensemble_shares_its_own_tokens():
    (first, student), (second, _) = pair(60, 64), pair(60, 58)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        distiller = Distiller([first, second], student, Several(SoftTargets(), SoftTargets()))
    for count, times in ((60, [1, 0]), (58, [0, 1])):
        assert [str(x.message).count(f"the first {count}") for x in said] == times
    distiller(**data_of()).loss.backward()


def test_one_cache_serves_distillers_of_several_vocabularies(tmp_path):
    (teacher, student), data = pair(), data_of()
    distilled(teacher, student).cache_teacher([data], tmp_path)
    fresh = distilled(TeacherCache(tmp_path), student)(**data).loss
    cache = TeacherCache(tmp_path)
    fewer = distilled(cache, student, tokenizers=tokenizer(50))
    before = fewer(**data).loss
    assert torch.equal(distilled(cache, student)(**data).loss, fresh)
    assert torch.equal(fewer(**data).loss, before) and not torch.equal(before, fresh)
    # No special tokens tell what is shared.
    raises("pass tokenizers=", distilled, cache, pair(64)[1])


def distilled(teacher, student, temperature=2.0, **options):
    method = SoftTargets(alpha=0.5, temperature=temperature)
    return Distiller(teacher, student, method, **options).eval()


def several(teacher, student, *temperatures):
    methods = [SoftTargets(alpha=1.0, temperature=t) for t in temperatures]
    without_soft_targets = SoftTargets(alpha=0.0, temperature=5.0)
    return Distiller(teacher, student, Several(*methods, without_soft_targets)).eval()


class Own(Method):
    """A method of a user's, with a temperature."""

    logit_terms = ("soft",)
    prediction_options = PredictionOptions(temperature=2.0)

    def weights(self, progress):
        return {"soft": 1.0}

    def soft(self, step):
        return WithSoftTargets.soft(self, step)


def test_a_cache_has_one_temperature(tmp_path):
    (teacher, student), data = pair(), data_of()

    def own(teacher):
        return Distiller(teacher, student, Own()).eval()

    for i, make in enumerate((own, lambda teacher: several(teacher, student, 2.0, 2.0))):
        live = make(teacher)
        cache = live.cache_teacher([data], tmp_path / str(i), top_k=60)
        found, expected = make(cache)(**data).terms, live(**data).terms
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    words, two = r"top_k: the methods have temperatures \[2\.0, 3\.0\]", (3.0, 2.0)
    live = several(teacher, student, *two)
    raises(words, live.cache_teacher, [data], tmp_path / "b", top_k=60)
    raises("top_k: the methods have temperatures", several, cache, student, *two)


def test_bytes_of_a_token(tmp_path):
    data = data_of()
    cache = distilled(*pair()).cache_teacher([data], tmp_path, top_k=5)
    tokens, files = int(data["attention_mask"].sum()), list(tmp_path.glob("*.safetensors"))
    stored = sum(path.stat().st_size for path in files)
    assert tokens * 40 <= stored <= tokens * 40 + len(cache) * 24 + 600 * len(files)
    assert not (tmp_path / "head.safetensors").exists()


def test_wrong_caches_raise_one_sentence(tmp_path):
    (teacher, student), data = pair(), [data_of()]
    live = distilled(teacher, student)
    cache = live.cache_teacher(data, tmp_path, top_k=5)
    raises(r"has temperature 3\.0, but", distilled, cache, student, temperature=3.0)
    words = r"share 50 tokens, but .* stores log-probabilities of 60"
    raises(words, distilled, cache, student, tokenizers=tokenizer(50))
    other = tmp_path / "other"
    for words, path, options in (
        (r"other settings \(top_k: k: \[5\], now \[6\]\)", tmp_path, {"top_k": 6}),
        ("was written with other settings", tmp_path, {}),
        ("top_k must be at most 60", other, {"top_k": 61}),
        ("top_k must be at least 1", other, {"top_k": 0}),
    ):
        raises(words, live.cache_teacher, data, path, **options)
    teacher = support.model_of("bert", "sequence")
    live = Distiller(teacher, student_from_teacher(teacher, [1]), SoftTargets())
    data = [support.data_of("bert", "sequence")]
    words = "top_k: SoftTargets reads no predictions of tokens"
    raises(words, live.cache_teacher, data, other, top_k=2)
    assert not (other / "teacher.json").exists()
