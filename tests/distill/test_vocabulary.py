"""Language models with tokens that the other model lacks, and caches of the most probable ones."""

import copy
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

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tokenizer(count, **other):
    words = SPECIAL + [f"word{i}" for i in range(len(SPECIAL), count)]
    return t.BertTokenizer(vocab={other.get(word, word): i for i, word in enumerate(words)})


def pair(student=60, teacher=64, family="llama", head="next word"):
    """A teacher and a student with embeddings of these sizes."""
    torch.manual_seed(0)
    taught = support.model_of(family, head).double().eval()
    learner = student_from_teacher(taught, [1, 3])
    for model, size in ((taught, teacher), (learner, student)):
        model.resize_token_embeddings(size, mean_resizing=False)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(std=0.2)
    return taught, learner


def data_of(family="llama", head="next word"):
    data = support.data_of(family, head)
    data["input_ids"] = data["input_ids"] % 50
    data["labels"] = data["labels"].where(data["labels"] < 0, data["labels"] % 50)
    return data


def test_columns_beyond_both_tokenizers_are_told():
    """That they aren't compared: test_by_hand.py."""
    teacher, student = pair()
    with pytest.warns(UserWarning, match="head has 60 tokens, the teacher's 64: the first 60 are"):
        Distiller(teacher, student, SoftTargets())
    given = tokenizer(50), tokenizer(50)
    words = "first 50 are compared, which the tokenizers share"
    with pytest.warns(UserWarning, match=words):
        Distiller(teacher, student, SoftTargets(), tokenizers=given)
    # Nor tokens of one tokenizer only; one tokenizer serves both models.
    longer, shorter, equal = tokenizer(57), tokenizer(50), pair(60, 60)
    for models, given in (
        ((teacher, student), (longer, shorter)), ((teacher, student), (shorter, longer)),
        (equal, shorter),
    ):  # fmt: skip
        with pytest.warns(UserWarning, match="the first 50 are"):
            Distiller(*models, SoftTargets(), tokenizers=given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Distiller(equal[0], copy.deepcopy(equal[1]), SoftTargets())


def test_tokenizers_that_do_not_fit_are_errors():
    small, shifted = tokenizer(50), tokenizer(50)
    ids = shifted.get_vocab()
    shifted.get_vocab = lambda: {word: i + 20 for word, i in ids.items()}
    renamed = tokenizer(50, word7="other")
    for given, words, error in (
        ((small, renamed), "id 7 is 'word7' for the student, 'other' for the teacher", ValueError),
        ((small, shifted), "share only ids below 0", ValueError),
        ([small] * 3, r"the student's and each teacher's \(2\), got 3", ValueError),
        ("gpt2", "must be transformers tokenizers, got str", TypeError),
    ):
        raises(words, Distiller, *pair(), SoftTargets(), error=error, tokenizers=given)
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    for change in ({"bos_token_id": 5}, dict.fromkeys(special)):
        teacher, student = pair()
        for name, value in change.items():
            setattr(student.config, name, value)
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


@pytest.mark.filterwarnings("ignore:the student's head has")
def test_one_cache_serves_distillers_of_several_vocabularies(tmp_path):
    (teacher, student), data = pair(60, 60), data_of()
    Distiller(teacher, student, SoftTargets()).cache_teacher([data], tmp_path)

    def distilled(cache, **options):
        return Distiller(cache, student, SoftTargets(), **options).eval()

    fresh = distilled(TeacherCache(tmp_path))(**data).loss
    cache = TeacherCache(tmp_path)
    fewer = distilled(cache, tokenizers=tokenizer(50))
    before = fewer(**data).loss
    wider = pair()[1]
    wider.resize_token_embeddings(64, mean_resizing=False)  # no special tokens tell what is shared
    raises("pass tokenizers=", Distiller, cache, wider, SoftTargets())
    assert torch.equal(distilled(cache)(**data).loss, fresh) and not torch.equal(before, fresh)
    assert torch.equal(fewer(**data).loss, before)


pytestmark = pytest.mark.filterwarnings("ignore:the student's head has")


def models(family="llama", head="next word"):
    return pair(60, 60, family, head)


def distilled(teacher, student, temperature=2.0, **options):
    method = SoftTargets(alpha=0.5, temperature=temperature)
    return Distiller(teacher, student, method, **options).eval()


def test_methods_of_one_teacher_have_one_temperature(tmp_path):
    teacher, student = models()
    data = data_of()

    def several(teacher, *temperatures):
        methods = [SoftTargets(alpha=1.0, temperature=t) for t in temperatures]
        without_soft_targets = SoftTargets(alpha=0.0, temperature=5.0)
        return Distiller(teacher, student, Several(*methods, without_soft_targets)).eval()

    live = several(teacher, 2.0, 2.0)
    cache = live.cache_teacher([data], tmp_path / "a", top_k=60)
    found, expected = several(cache, 2.0, 2.0)(**data).terms, live(**data).terms
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match=r"top_k: the methods have temperatures \[2\.0, 3\.0\]"):
        several(teacher, 3.0, 2.0).cache_teacher([data], tmp_path / "b", top_k=60)
    raises("top_k: the methods have temperatures", several, cache, 2.0, 3.0)


def test_temperature_of_a_method_of_your_own(tmp_path):
    class Own(Method):
        logit_terms = ("soft",)
        prediction_options = PredictionOptions(temperature=2.0)

        def weights(self, progress):
            return {"soft": 1.0}

        def soft(self, step):
            return WithSoftTargets.soft(self, step)

    teacher, student = models()
    live = Distiller(teacher, student, Own()).eval()
    cache = live.cache_teacher([data_of()], tmp_path, top_k=60)
    found = Distiller(cache, student, Own()).eval()(**data_of()).terms
    torch.testing.assert_close(found, live(**data_of()).terms, rtol=1e-5, atol=1e-7)


def test_bytes_of_a_token(tmp_path):
    teacher, student = models()
    data = data_of()
    cache = distilled(teacher, student).cache_teacher([data], tmp_path, top_k=5)
    tokens = int(data.get("attention_mask", torch.ones_like(data["input_ids"])).sum())
    files = list(tmp_path.glob("*.safetensors"))
    stored = sum(path.stat().st_size for path in files)
    samples = len(cache)
    assert tokens * 40 <= stored <= tokens * 40 + samples * 24 + 600 * len(files)
    assert not (tmp_path / "head.safetensors").exists()


def test_wrong_caches_raise_one_sentence(tmp_path):
    teacher, student = models()
    data = [data_of()]
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
