"""Two tokenizers: spans of the same text, tokens that one model lacks, and caches of few tokens.

Steps: test_by_hand.py.
"""

import re

import pytest
import torch
import transformers as t
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F

from fastkd import Head, VocabularyMatch, distill
from fastkd.distill import FCD, Distiller, Several, SoftTargets, TwoTokenizers
from fastkd.distill.baselines import GOLD
from fastkd.distill.method import other_vocabulary
from fastkd.lm.heads import LowRank
from tests.distill import support
from tests.distill.models import classifier, model
from tests.support.compare import raises

pytestmark = pytest.mark.filterwarnings("ignore:CCALoss", "ignore:the student's head has")

WORDS = ["play", "##ing", "well", "in", "the", "gar", "##den", "cat"]
OTHERS = ["play", "##ing", "well", "in", "the", "garden", "cat"]
WHOLE = ["cat", "the", "in", "well", "gar", "##den", "playing"]
TEXTS = ["playing in the garden", "the cat", "cat in garden well", "well playing cat"]


def word_pieces(*words):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(words or WORDS)]
    return t.BertTokenizer(vocab={word: i for i, word in enumerate(words)})


def characters():
    """Tokens as of a byte-level decoder: one for each character, without special tokens."""
    letters = sorted({c for text in TEXTS for c in text} | {"?"})
    vocab = {c: i + 1 for i, c in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, **vocab}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return t.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="?")


def read_in_characters():
    """A teacher of characters, a student of word pieces, and a batch."""
    torch.manual_seed(0)
    teacher, student = classifier("llama", hidden_size=24), classifier("bert", layers=2)
    batch = TwoTokenizers(student=word_pieces(), teacher=characters())(TEXTS)
    return teacher.double(), student.double(), {**batch, "labels": torch.tensor([0, 1, 1, 0])}


def test_spans_are_the_same_text_for_both_tokenizers():
    """Not text of one side only, cut off within a word, in front, at the start; bytes of one."""
    for long, short, *expected in (
        ([[0, 4], [5, 9], [10, 14], [0, 0]], [[0, 2], [2, 4], [5, 7]], [0, -1, -1, -1], [0, 0, -1]),
        ([[0, 0], [0, 4], [5, 9], [10, 14]], [[5, 9], [10, 12], [12, 14]], [-1, -1, 0, 1],
         [0, 1, 1]),
        ([[0, 0], [0, 4], [5, 9], [10, 14]], [[7, 9], [10, 14]], [-1, -1, -1, 0], [-1, 0]),
        ([[0, 1], [0, 1], [0, 1], [1, 4]], [[0, 1], [1, 4]], [0, 0, 0, 1], [0, 1]),
        ([[0, 4], [4, 9]], [[1, 4], [5, 9]], [0, 1], [0, 1]),  # with the blanks and without them
    ):  # fmt: skip
        sides = torch.tensor([long]), torch.tensor([short])
        with torch.device("meta"):  # a default for other tensors
            found = distill.align_spans(*sides)
        assert [x[0].tolist() for x in found] == expected


def test_pairs_of_texts():
    """The second text's words are not the first's, though both begin at character 0.

    Nor do tokens of one model at the end of a truncated first text join the second text.
    """
    texts = ["the cat", "cat"], ["in well", "the garden"]
    words = [["the", "cat", "in", "well"], ["cat", "the", "gar", "den"]]
    batch = TwoTokenizers(student=word_pieces(), teacher=characters())(*texts)
    for side, ids, tokenizer in (
        ("student", "input_ids", word_pieces()), ("teacher", "teacher_input_ids", characters())
    ):  # fmt: skip
        for row, spans, expected in zip(batch[ids], batch[f"{side}_spans"], words, strict=True):
            tokens = [tokenizer.convert_ids_to_tokens(row[spans == n]) for n in range(5)]
            assert ["".join(x).strip(" #") for x in tokens] == [*expected, ""]
    two = {"student": word_pieces("aa", "##aa", "x", "y"), "teacher": word_pieces("aaaa", "x", "y")}
    tokenizers = TwoTokenizers(**two, truncation="only_first", max_length=7)
    batch = tokenizers(["aaaa aaaa aaaa", "aaaa"], ["x y", "y"])
    for side, first, second in (
        ("student", [-1, 0, 0, -1, 1, 2, -1], [-1, 0, 0, -1, 1, -1, -1]),
        ("teacher", [-1, 0, -1, -1, 1, 2, -1], [-1, 0, -1, 1, -1, -1, -1]),
    ):
        assert batch[f"{side}_spans"].tolist() == [first, second]
    raises("is_split_into_words: offsets of words", TwoTokenizers, **two, is_split_into_words=True)
    raises("positional", TwoTokenizers, *two.values(), error=TypeError)
    two["teacher"].pad_token = None
    raises("teacher: its tokenizer has no padding token", TwoTokenizers, **two)


def test_images_of_another_size():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "patch_size": 8}
    configs = (t.ViTConfig(image_size=n, num_hidden_layers=n // 6, **sizes) for n in (24, 16))
    big, small = map(t.ViTForImageClassification, configs)
    images, labels = torch.randn(4, 3, 24, 24), torch.tensor([0, 1, 0, 1])
    own = {"pixel_values": F.interpolate(images, 16), "teacher_pixel_values": images}
    distiller = Distiller(big, small, distill.MC3KD(layers="uniform", pool="cls"))
    distiller(**own, labels=labels).loss.backward()
    words = "compares tokens, but the teacher has inputs of its own"
    raises(words, Distiller(big, small, FCD()), **own, labels=labels)


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_teacher_on_another_device(devices):
    teacher, student, batch = read_in_characters()
    expected = Distiller(teacher, student, FCD()).eval()(**batch).loss
    batch = {name: x.to(devices[1]) for name, x in batch.items()}
    teacher, student = (x.to(at) for x, at in zip((teacher, student), devices, strict=True))
    loss = Distiller(teacher, student, FCD()).eval()(**batch).loss
    assert next(teacher.parameters()).device.type == devices[0]
    torch.testing.assert_close(loss.cpu(), expected)


def test_another_vocabulary_warns_once(recwarn):
    torch.manual_seed(0)
    teacher, student = classifier("bert"), classifier("bert", layers=2, vocab_size=50)
    distiller = Distiller(teacher, student, FCD())
    batch = {"input_ids": torch.randint(5, 50, (4, 6)), "labels": torch.tensor([0, 1, 1, 0])}
    for _ in range(2):
        distiller(**batch)
    # No warning with inputs of the teacher's own, or with compared tokenizers.
    distiller = Distiller(teacher, student, distill.LRKD())
    distiller(**batch, teacher_input_ids=batch["input_ids"])
    Distiller(teacher, student, FCD(), tokenizers=word_pieces())(**batch)
    said = f"the student: {other_vocabulary(50, 60)}"
    assert sum(str(w.message).startswith(said) for w in recwarn) == 1


def tokenizer(count, shift=0, **other):
    made = word_pieces(*(f"word{i}" for i in range(5, count)))
    ids = {other.get(word, word): i + shift for word, i in made.get_vocab().items()}
    made.get_vocab = lambda: ids
    return made


def pair(student=60, teacher=60):
    """A teacher and a student with embeddings of these sizes."""
    torch.manual_seed(0)
    taught = support.model_of("llama", "next word").double().eval()
    learner = distill.student_from_teacher(taught, [1, 3])
    for side, size in ((taught, teacher), (learner, student)):
        side.resize_token_embeddings(size, mean_resizing=False)
    return taught, learner


def words():
    data = support.data_of("llama", "next word")
    data["input_ids"] = data["input_ids"] % 50
    data["labels"] = data["labels"].where(data["labels"] < 0, data["labels"] % 50)
    return data


def distilled(teacher, student, temperature=2.0, **options):
    method = SoftTargets(alpha=0.5, temperature=temperature)
    return Distiller(teacher, student, method, **options).eval()


def test_columns_beyond_both_tokenizers_are_told():
    """One tokenizer serves both models, and each teacher of several shares its own tokens."""
    longer, shorter = tokenizer(57), tokenizer(50)
    for both, given, said in (
        (pair(60, 64), None, "head has 60 tokens, the teacher's 64: the first 60 are"),
        (pair(60, 64), (shorter, shorter), "the first 50 are compared, which the tokenizers share"),
        (pair(60, 64), (shorter, longer), "the first 50 are"),
        (pair(), shorter, "the first 50 are"),
    ):
        with pytest.warns(UserWarning, match=said):
            Distiller(*both, SoftTargets(), tokenizers=given)
    (first, student), (second, _) = pair(60, 64), pair(60, 58)
    with pytest.warns(UserWarning) as said:
        Distiller(*pair(), SoftTargets())
        distiller = Distiller([first, second], student, Several(SoftTargets(), SoftTargets()))
    counts = [re.findall(r"the first (\d+)", str(x.message)) for x in said]
    assert counts == [["60"], ["58"]]
    distiller(**words()).loss.backward()


def test_tokenizers_that_do_not_fit_are_errors():
    small, shifted, renamed = tokenizer(50), tokenizer(50, 20), tokenizer(50, word7="other")
    for given, said, error in (
        ((small, renamed), "id 7 is 'word7' for the student, 'other' for the teacher", ValueError),
        ((small, shifted), "share only ids below 0", ValueError),
        ([small] * 3, r"the student's and each teacher's \(2\), got 3", ValueError),
        ("gpt2", "must be transformers tokenizers, got str", TypeError),
    ):
        raises(said, Distiller, *pair(60, 64), SoftTargets(), error=error, tokenizers=given)
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    for change in ({"bos_token_id": 5}, dict.fromkeys(special)):
        teacher, student = pair(60, 64)
        vars(student.config).update(change)
        said = r"60 labels or vocabulary entries.*pass tokenizers="
        raises(said, Distiller, teacher, student, SoftTargets())


def test_one_cache_serves_distillers_of_several_vocabularies(tmp_path):
    (teacher, student), data = pair(), words()
    distilled(teacher, student).cache_teacher([data], tmp_path)
    fresh = distilled(distill.TeacherCache(tmp_path), student)(**data).loss
    cache = distill.TeacherCache(tmp_path)
    fewer = distilled(cache, student, tokenizers=tokenizer(50))
    before = fewer(**data).loss
    assert torch.equal(distilled(cache, student)(**data).loss, fresh)
    assert torch.equal(fewer(**data).loss, before) and not torch.equal(before, fresh)
    # No special tokens tell what is shared.
    raises("pass tokenizers=", distilled, cache, pair(64)[1])


def test_a_cache_of_few_tokens(tmp_path):
    """It has one temperature, and 8 bytes for each token stored."""
    (teacher, student), data = pair(), words()

    def several(teacher, *temperatures):
        methods = [SoftTargets(alpha=1.0, temperature=t) for t in temperatures]
        without_soft_targets = SoftTargets(alpha=0.0, temperature=5.0)
        return Distiller(teacher, student, Several(*methods, without_soft_targets)).eval()

    live = several(teacher, 2.0, 2.0)
    cache = live.cache_teacher([data], tmp_path / "all", top_k=60)
    found, expected = several(cache, 2.0, 2.0)(**data).terms, live(**data).terms
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    said = r"top_k: the methods have temperatures \[2\.0, 3\.0\]"
    raises(said, several(teacher, 3.0, 2.0).cache_teacher, [data], tmp_path / "b", top_k=60)
    raises("top_k: the methods have temperatures", several, cache, 3.0, 2.0)

    live, few = distilled(teacher, student), tmp_path / "few"
    cache = live.cache_teacher([data], few, top_k=5)
    tokens, files = int(data["attention_mask"].sum()), list(few.glob("*.safetensors"))
    stored = sum(path.stat().st_size for path in files)
    assert tokens * 40 <= stored <= tokens * 40 + len(cache) * 24 + 600 * len(files)
    assert not (few / "head.safetensors").exists()
    raises(r"has temperature 3\.0, but", distilled, cache, student, temperature=3.0)
    said = r"share 50 tokens, but .* stores log-probabilities of 60"
    raises(said, distilled, cache, student, tokenizers=tokenizer(50))
    other, (teacher, student, match) = tmp_path / "other", two_models()
    gold = Distiller(teacher, student, GOLD(), tokenizers=match)
    teacher = support.model_of("bert", "sequence")
    classes = Distiller(teacher, distill.student_from_teacher(teacher, [1]), SoftTargets())
    for said, made, rows, path, options in (
        (r"other settings \(top_k: k: \[5\], now \[6\]\)", live, data, few, {"top_k": 6}),
        ("was written with other settings", live, data, few, {}),
        ("top_k must be at most 60", live, data, other, {"top_k": 61}),
        ("top_k must be at least 1", live, data, other, {"top_k": 0}),
        ("top_k: SoftTargets reads no predictions of tokens", classes,
         support.data_of("bert", "sequence"), other, {"top_k": 2}),
        ("top_k: GOLD compares all tokens of the teacher; leave", gold, matched(), other,
         {"top_k": 2}),
    ):  # fmt: skip
        raises(said, made.cache_teacher, [rows], path, **options)
    assert not (other / "teacher.json").exists()


def decoder(vocabulary, hidden):
    return model(t.LlamaForCausalLM, "llama", 1, vocab_size=vocabulary, hidden_size=hidden)


def two_models():
    """A teacher, a student, and the match of their tokens."""
    torch.manual_seed(0)
    match = VocabularyMatch.of(word_pieces(*OTHERS), word_pieces(*WHOLE))
    teacher = decoder(match.teacher_size + 3, 24)  # a padded head
    return teacher, decoder(match.student_size, 16), match


def matched(*texts):
    both = TwoTokenizers(student=word_pieces(*OTHERS), teacher=word_pieces(*WHOLE))
    batch = both(list(texts) or [TEXTS[0], "cat well in", "the well garden cat playing"])
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


@pytest.mark.parametrize("keep_logits", [False, True])
def test_unpaired_tokens_have_no_effect(keep_logits):
    """A weight of 0 would give NaN where the divergence is infinite."""
    teacher, student, match = two_models()
    options = {"tokenizers": match, "keep_logits": keep_logits}
    distiller = Distiller(teacher, student, SoftTargets(), **options)

    def step():
        out = distiller(**matched(TEXTS[0]))
        return out.loss, *torch.autograd.grad(out.loss, student.lm_head.weight)

    expected, zero = step(), torch.tensor([0])
    # The first word has several tokens of the student: the teacher's prediction isn't compared.
    teacher.model.norm.register_forward_hook(lambda _, x, out: out.index_fill(1, zero, torch.inf))
    torch.testing.assert_close(step(), expected)


def test_wrong_matches_and_their_caches_are_errors(tmp_path):
    """A top-k cache of all tokens is the bucket."""
    teacher, student, match = two_models()
    wrong = VocabularyMatch(torch.tensor([90]), torch.tensor([0]), 100, 100)
    size = teacher.config.vocab_size
    for said, other, options in (
        ("student_ids must be token ids 0 to", student, {"tokenizers": wrong}),
        ("unmatched='bucket' needs a VocabularyMatch", decoder(size, 8), {"unmatched": "bucket"}),
    ):
        raises(said, Distiller, teacher, other, SoftTargets(), **options)
    bucket, given = {"tokenizers": match, "unmatched": "bucket"}, {"tokenizers": match}
    Distiller(teacher, student, SoftTargets(alpha=0.0), **bucket)(**matched())  # labels alone
    batch = {k: x for k, x in matched().items() if not k.startswith(("teacher", "student"))}
    batch["input_ids"] = batch["input_ids"].clamp(max=5)
    own = Distiller(teacher, decoder(size, 16), SoftTargets())
    cache = own.cache_teacher([batch], tmp_path / "own")
    cached = Distiller(cache, student, SoftTargets(), **given)
    raises("sample 0 of the batch is not in", cached, error=KeyError, **matched())
    method = SoftTargets(temperature=2.0)
    live = Distiller(teacher, student, method, **bucket)
    cache = live.cache_teacher([matched()], tmp_path / "all", top_k=size)
    cached = Distiller(cache, student, method, **bucket)
    values = [distiller(**matched()).terms["soft"] for distiller in (live, cached)]
    torch.testing.assert_close(*values)
    raises("stores the teacher's top k", Distiller, cache, student, method, **given)
    said = r"GOLD compares all tokens .* the \d+ most probable ones"
    raises(said, Distiller, cache, student, GOLD(), **given)


def test_gold_beside_other_methods():
    (teacher, student, match), batch = two_models(), matched()
    gold, soft = GOLD(likelihood_weight=1.0), SoftTargets(alpha=1.0)

    def terms(teachers, method):
        return Distiller(teachers, student, method, tokenizers=match)(**batch).terms

    expected = terms(teacher, gold)
    for found in (
        terms(teacher, Several(gold, distill.LRKD(alpha=None))),
        terms([teacher, teacher], Several(gold, soft)),
    ):
        for name in ("merged", "likelihood"):
            torch.testing.assert_close(found[f"0.{name}"], expected[name])
    assert torch.equal(found["1.soft"], terms(teacher, soft)["soft"])
    said = "method: SoftTargets reads the teacher's predictions at"
    raises(said, terms, teacher, Several(gold, soft))


MATCH = VocabularyMatch(torch.arange(12), torch.arange(3, 15), 20, 30)


@pytest.fixture
def batch():
    """Arguments of `merged_span_loss`; spans have several tokens, one or none."""
    torch.manual_seed(0)
    made = {}
    for side, N, D, V in (("student", 9, 6, 20), ("teacher", 12, 8, 30)):
        spans = torch.randint(-1, 5, (2, N)).sort(-1).values
        made |= {f"{side}_ids": torch.randint(V, (2, N)), f"{side}_spans": spans}
        made |= {f"{side}_hidden": torch.randn(2, N, D), f"{side}_head": torch.randn(V, D)}
    return made


def merged(batch, **changes):
    return distill.merged_span_loss(**{**batch, **changes})


@pytest.mark.parametrize("match", [None, MATCH])
def test_chunks_and_a_backward_pass_inside_autocast_change_nothing(batch, match):
    """Also of the head's weight and of LoRA on it, whose dropout is drawn again in the backward."""
    head = Head(batch["student_head"].clone().requires_grad_(), softcap=3.0)
    both = [merged(batch, student_head=head, vocabulary=match, chunk_bytes=x) for x in (1, None)]
    torch.testing.assert_close(*both)
    torch.testing.assert_close(*(torch.autograd.grad(x, head.weight) for x in both))
    V, D = head.weight.shape
    leaves = [torch.randn(shape).requires_grad_() for shape in ((V, D), (2, D), (V, 2))]
    leaves.append(batch["student_hidden"].clone().requires_grad_())
    head = Head(leaves[0])
    head.low_rank = (LowRank(*leaves[1:3], dropout=torch.nn.Dropout(0.5)),)
    gradients, given = [], {"student_hidden": leaves[3], "student_head": head}
    for inside in (False, True):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = merged(batch, **given, vocabulary=match, chunk_bytes=2000)
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            gradients.append(torch.autograd.grad(loss, leaves))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_without_a_span_have_no_effect(batch, dtype):
    """In half precision either."""
    hidden, without = batch["student_hidden"].to(dtype), batch["student_spans"] < 0
    head = batch["student_head"].to(dtype).requires_grad_()
    hidden = hidden.masked_fill(without[..., None], torch.nan).requires_grad_()
    found = merged(batch, student_hidden=hidden, student_head=head)
    found.backward()
    assert found.dtype == torch.float32 and hidden.grad.dtype == dtype
    rtol = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, merged(batch), rtol=rtol, atol=0)
    assert head.grad.isfinite().all() and hidden.grad.isfinite().all()
    assert not hidden.grad[without].any()


def test_no_shared_span_is_zero_and_certain_spans_are_finite():
    none = dict(student_spans=torch.full((1, 2), -1), teacher_spans=torch.zeros(1, 1).long())
    ids = dict(student_ids=torch.zeros(1, 2).long(), teacher_ids=torch.zeros(1, 1).long())
    states, head = torch.randn(1, 2, 3, requires_grad=True), torch.randn(4, 3)
    loss = distill.merged_span_loss(states, head, torch.randn(1, 1, 3), head, **ids, **none)
    loss.backward()
    assert loss == 0 and not states.grad.any()
    assert distill.span_likelihood_loss(torch.zeros(1, 2), torch.zeros(1, 1), *none.values()) == 0
    certain, span = torch.zeros(1, 1, requires_grad=True), torch.zeros(1, 1).long()
    loss = distill.span_likelihood_loss(certain, torch.full((1, 1), -5.0), span, span)
    loss.backward()
    assert loss.isfinite() and certain.grad.isfinite().all()


def test_wrong_arguments_raise_one_sentence(batch):
    raises("merge must be one of", GOLD, merge="first")
    match, ids = VocabularyMatch(*[torch.zeros(1).long()] * 2, 3, 4), torch.zeros(1, 1).long()
    for said, change in (
        ("beta must be at most 1", {"beta": 2}),
        ("kept must be one of", {"kept": "middle"}),
        ("temperature must be greater than 0", {"temperature": 0}),
        ("student_size 3", {"vocabulary": match}),
        ("student_ids must have shape", {"student_hidden": batch["student_hidden"][:, 1:]}),
    ):
        raises(said, merged, batch, **change)
    learned = torch.zeros(1, 1, requires_grad=True)
    said = "teacher_log_probs requires grad"
    raises(said, distill.span_likelihood_loss, learned, learned, ids, ids)
