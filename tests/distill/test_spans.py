"""A teacher with another tokenizer: spans by character offsets, and their comparison."""

import pytest
import torch
import transformers as t
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from fastkd.distill import FCD, LRKD, MC3KD, Distiller, TwoTokenizers, align_spans
from fastkd.distill.method import other_vocabulary
from tests.distill.models import classifier
from tests.support.compare import raises

pytestmark = pytest.mark.filterwarnings("ignore:CCALoss")

WORDS = ["play", "##ing", "well", "in", "the", "gar", "##den", "cat"]
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
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="?")


def pair():
    torch.manual_seed(0)
    return classifier("llama", hidden_size=24).double(), classifier("bert", layers=2).double()


def data():
    batch = TwoTokenizers(student=word_pieces(), teacher=characters())(TEXTS)
    return {**batch, "labels": torch.tensor([0, 1, 1, 0])}


def pieces(text, offsets, spans):
    found = {}
    for (start, end), span in zip(offsets.tolist(), spans.tolist(), strict=True):
        if span >= 0:
            first, last = found.get(span, (start, end))
            found[span] = min(first, start), max(last, end)
    return [text[a:b].strip() for a, b in (found[i] for i in sorted(found))]


def test_spans_are_the_same_text_for_both_tokenizers():
    ours, theirs = word_pieces(), characters()
    sides = [
        tok(TEXTS, padding=True, return_offsets_mapping=True, return_tensors="pt")["offset_mapping"]
        for tok in (ours, theirs)
    ]
    spans = align_spans(*sides)
    with torch.device("meta"):  # a default for others
        assert all(map(torch.equal, align_spans(*sides), spans))
    for row, text in enumerate(TEXTS):
        both = zip(sides, spans, strict=True)
        found = [pieces(text, side[row], span[row]) for side, span in both]
        assert found[0] == found[1]
        assert "".join(found[0]) == text.replace(" ", "")
    assert pieces(TEXTS[0], sides[0][0], spans[0][0]) == ["play", "ing", "in", "the", "gar", "den"]


def test_text_of_one_side_only_has_no_span():
    """Cut off within a word, in front, at the start; and bytes of one character."""
    for long, short, *expected in (
        (
            [[0, 4], [5, 9], [10, 14], [0, 0]], [[0, 2], [2, 4], [5, 7]],
            [0, -1, -1, -1], [0, 0, -1],
        ),
        (
            [[0, 0], [0, 4], [5, 9], [10, 14]], [[5, 9], [10, 12], [12, 14]],
            [-1, -1, 0, 1], [0, 1, 1],
        ),
        ([[0, 0], [0, 4], [5, 9], [10, 14]], [[7, 9], [10, 14]], [-1, -1, -1, 0], [-1, 0]),
        ([[0, 1], [0, 1], [0, 1], [1, 4]], [[0, 1], [1, 4]], [0, 0, 0, 1], [0, 1]),
    ):  # fmt: skip
        found = align_spans(torch.tensor([long]), torch.tensor([short]))
        assert [x[0].tolist() for x in found] == expected


def test_pairs_of_texts():
    """The second text's words are not the first's, though both begin at character 0."""
    texts = ["the cat", "cat"], ["in well", "the garden"]
    batch = TwoTokenizers(student=word_pieces(), teacher=characters())(*texts)
    for side in ("student", "teacher"):
        found = [set(row.tolist()) - {-1} for row in batch[f"{side}_spans"]]
        assert found == [{0, 1, 2, 3}, {0, 1, 2, 3}]


def test_pairs_with_a_truncated_first_text():
    """Tokens of one model at the end of the first text do not join the second text."""
    one, other = word_pieces("aa", "##aa", "x", "y"), word_pieces("aaaa", "x", "y")
    two = {"student": one, "teacher": other}
    tokenizers = TwoTokenizers(**two, truncation="only_first", max_length=7)
    batch = tokenizers(["aaaa aaaa aaaa", "aaaa"], ["x y", "y"])
    assert batch["student_spans"].tolist() == [[-1, 0, 0, -1, 1, 2, -1], [-1, 0, 0, -1, 1, -1, -1]]
    assert batch["teacher_spans"].tolist() == [
        [-1, 0, -1, -1, 1, 2, -1],
        [-1, 0, -1, 1, -1, -1, -1],
    ]
    raises("is_split_into_words: offsets of words", TwoTokenizers, **two, is_split_into_words=True)


def test_images_of_another_size():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "patch_size": 8}
    big, small = (
        t.ViTForImageClassification(t.ViTConfig(image_size=n, num_hidden_layers=k, **sizes))
        for n, k in ((24, 4), (16, 2))
    )
    images, labels = torch.randn(4, 3, 24, 24), torch.tensor([0, 1, 0, 1])
    own = {"pixel_values": F.interpolate(images, 16), "teacher_pixel_values": images}
    distiller = Distiller(big, small, MC3KD(layers="uniform", pool="cls"))
    distiller(**own, labels=labels).loss.backward()
    words = "compares tokens, but the teacher has inputs of its own"
    raises(words, Distiller(big, small, FCD()), **own, labels=labels)


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_teacher_on_another_device(devices):
    teacher, student = pair()
    expected = Distiller(teacher, student, FCD()).eval()(**data()).loss
    batch = {name: x.to(devices[1]) for name, x in data().items()}
    teacher, student = (model.to(device) for model, device in zip(pair(), devices, strict=True))
    loss = Distiller(teacher, student, FCD()).eval()(**batch).loss
    assert next(teacher.parameters()).device.type == devices[0]
    torch.testing.assert_close(loss.cpu(), expected)


def test_half_precision_and_wrong_arguments(tmp_path):
    batch, (teacher, student) = data(), pair()
    exact = Distiller(teacher, student, FCD()).eval()(**batch).loss
    rough = Distiller(teacher.bfloat16(), student, FCD()).eval()(**batch).loss
    assert exact.dtype == rough.dtype == torch.float64
    torch.testing.assert_close(rough, exact, atol=0.05, rtol=0)
    with pytest.raises(TypeError, match="positional"):  # a Distiller takes the teacher first
        TwoTokenizers(word_pieces(), characters())
    both = {"student": word_pieces(), "teacher": characters()}
    both["teacher"].pad_token = None
    raises("teacher: its tokenizer has no padding token", TwoTokenizers, **both)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    cache = Distiller(teacher.double(), student, FCD()).cache_teacher([inputs], tmp_path)
    cached = Distiller(cache, student, FCD())
    raises("sample 0 of the batch is not in", cached, error=KeyError, **batch)


def test_another_vocabulary_warns_once(recwarn):
    torch.manual_seed(0)
    teacher, student = classifier("bert"), classifier("bert", layers=2, vocab_size=50)
    distiller = Distiller(teacher, student, FCD())
    batch = {"input_ids": torch.randint(5, 50, (4, 6)), "labels": torch.tensor([0, 1, 1, 0])}

    def warnings():
        said = f"the student: {other_vocabulary(50, 60)}"
        return sum(str(w.message).startswith(said) for w in recwarn)

    for _ in range(2):
        distiller(**batch)
    assert warnings() == 1
    beyond = {**batch, "input_ids": torch.full((4, 6), 55)}
    raises(r"input_ids: the id 55 is not one of the 50 tokens", distiller, **beyond)
    # No warning with inputs of the teacher's own, or with compared tokenizers.
    distiller = Distiller(teacher, student, LRKD())
    distiller(**batch, teacher_input_ids=batch["input_ids"])
    Distiller(teacher, student, FCD(), tokenizers=word_pieces())(**batch)
    assert warnings() == 1
