"""Students with a tokenizer of their own: aligned rows, one or two tokenizers, every command."""

import json
import re
import shutil

import pytest
import torch
import transformers as t
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from fastkd.train.data import Encoder
from fastkd.train.tasks import named
from tests.support.runs import first_step, made, report_of
from tests.support.tiny import run, sentences, usual, write_tsv
from tests.train.tasks.through import (
    make_bare,
    make_chat_teacher,
    rows_of,
    says,
    write_chats,
    write_text,
)

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}\n"
    "{% else %}<bot>{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def byte_pairs(path, size, special=(), causal=True, head=0, seed=3, template=None):
    """A random GPT-2 or RoBERTa classifier with a byte-level BPE of ``size`` tokens."""
    marks = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    names = ("bos_token", "pad_token", "eos_token", "unk_token", "mask_token")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=marks, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator([text for text, _ in sentences(50, seed)], trainer)
    if not causal:
        made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    named = dict(zip(names, marks, strict=True))
    tokenizer = t.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=64, **named)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    rows = head or len(tokenizer)
    torch.manual_seed(1)
    if causal:
        shape = {"vocab_size": rows, "n_positions": 64, "n_embd": 8, "n_layer": 2, "n_head": 2}
        still = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
        config = t.GPT2Config(**shape, **still, bos_token_id=0, eos_token_id=2)
        t.GPT2LMHeadModel(config).save_pretrained(path)
    else:
        config = t.RobertaConfig(
            vocab_size=rows, hidden_size=16, num_hidden_layers=4, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=66, type_vocab_size=1,
            initializer_range=0.2,
        )  # fmt: skip
        t.RobertaForSequenceClassification(config).save_pretrained(path)
    return path


def make_student(path):
    """A random GPT-2 with a byte-level BPE of the tests' words, and a chat template."""
    return byte_pairs(path, 295, special=["<user>", "<bot>"], template=TEMPLATE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Language models, and as many classifiers, of two vocabularies."""
    path = tmp_path_factory.mktemp("two")
    make_chat_teacher(path / "teacher")
    make_student(path / "student")
    write_text(path / "train.txt", 20)
    write_text(path / "eval.txt", 8, seed=1)
    byte_pairs(path / "roberta", 290, causal=False)
    make_bare(path / "bert")
    write_tsv(path / "train.tsv", 16)
    write_tsv(path / "eval.tsv", 12, 1)
    return path


@pytest.fixture
def texts(folder, tmp_path):
    """Options of a student of language models."""
    given = {"train": folder / "train.txt", "eval": folder / "eval.txt", "task": "causal-lm"}
    given |= {"teacher": folder / "teacher", "student": folder / "student"}
    return usual(folder, tmp_path, **given, method="soft_targets")


@pytest.fixture
def classes(folder, tmp_path):
    """Options of a BERT that learns from a RoBERTa."""
    names = {"teacher": "roberta", "student": "bert", "train": "train.tsv", "eval": "eval.tsv"}
    return usual(folder, tmp_path, **{name: folder / file for name, file in names.items()})


def encoded(folder, task, path, max_length):
    student, teacher = (
        t.AutoTokenizer.from_pretrained(folder / name) for name in ("student", "teacher")
    )
    found = Encoder(student, max_length, named(task)(), teacher)(rows_of(path, task))
    return student, teacher, found.__getitems__(range(len(found)))


def vocabulary(path):
    return t.AutoTokenizer.from_pretrained(path).get_vocab()


def spans_of(tokenizer, ids, spans):
    return {
        n: tokenizer.decode([i for i, s in zip(ids, spans, strict=True) if s == n]).strip()
        for n in sorted({*spans} - {-1})
    }


@pytest.mark.parametrize("max_length", [5, 16])
def test_rows_have_the_same_text_in_both_vocabularies(folder, tmp_path, max_length):
    path = tmp_path / "a.txt"
    path.write_text("good film is very dull\n\nthe film is fine so the film is nice\n")
    student, teacher, rows = encoded(folder, "causal-lm", path, max_length)
    texts = []
    for row in rows:
        ours, theirs = (
            spans_of(one, row[f"{prefix}input_ids"], row[f"{side}_spans"])
            for one, side, prefix in ((student, "student", ""), (teacher, "teacher", "teacher_"))
        )
        assert max(len(row["input_ids"]), len(row["teacher_input_ids"])) <= max_length
        ends = [x for x in ours if ours[x] == "</s>"]
        assert all(theirs.pop(x) == "[SEP]" and ours.pop(x) for x in ends)
        assert ours == theirs and all(ours.values())
        assert row["labels"][1:] == row["input_ids"][1:] and row["labels"][0] == -100
        texts.append(" ".join(ours.values()))
    assert " ".join(texts) == "good film is very dull the film is fine so the film is nice"


def test_spans_of_conversations_are_in_the_answers(folder, texts, tmp_path):
    talk = says("good film", "film is nice", "good", "good")
    path = write_chats(tmp_path / "a.jsonl", [talk])
    student, teacher, (row,) = encoded(folder, "chat", path, 64)
    ours = spans_of(student, row["input_ids"], row["student_spans"])
    theirs = spans_of(teacher, row["teacher_input_ids"], row["teacher_spans"])
    assert [*ours.values()] == ["film", "is", "nice", "</s>", "good", "</s>"]
    assert [*theirs.values()] == ["film", "is", "nice", "[SEP]", "good", "[SEP]"]
    counted = [i for i, label in enumerate(row["labels"]) if label != -100]
    assert counted == [i for i, span in enumerate(row["student_spans"]) if span >= 0]
    files = [write_chats(tmp_path / f"{n}.jsonl", 8, n) for n in range(2)]
    texts |= {"task": "chat", "train": files[0], "eval": files[1], "method": "fcd"}
    first_step(**{**texts, "max_length": 32})


def test_top_k_cache_and_errors(texts, tmp_path):
    cache = {**texts, "epochs": None, "learning_rate": None, "out": tmp_path / "cache"}
    made = run("cache", **cache, top_k=5, unmatched="bucket")
    assert "VocabularyMatch(" in made and "% of the student's" in made
    more = {**cache, "out": tmp_path / "c", "top_k": 99, "unmatched": "bucket", "expect": 2}
    assert "--top-k: top_k must be at most 17" in run("cache", **more)
    learn = {**texts, "teacher": None, "teacher_cache": tmp_path / "cache"}
    assert "pass unmatched='bucket'" in run("distill", **learn, expect=2)
    first_step(**learn, unmatched="bucket")
    learn = {**texts, "out": tmp_path / "b", "expect": 2}
    for flag in ({"pack": True}, {"on_policy": 0.5}):
        assert "the student has a tokenizer of its own" in run("distill", **learn, **flag)
    error = run("distill", **{**learn, "student": None}, unmatched="bucket")
    assert "teacher and student have one tokenizer" in error


def changed(path, change, out):
    """A model's tokenizer after a ``change`` of its vocabulary or merges."""
    tokenizer = t.AutoTokenizer.from_pretrained(path)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    change(state["model"])
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.save_pretrained(out)


def test_vocabularies_that_are_nested_or_read_the_rows_alike_may_be_two(texts, tmp_path):
    """One that holds the other may cut texts differently; other tokens may be in no training row.

    Nested ones counted as one: the student's was replaced, or it was refused in both directions.
    """
    few, many = (byte_pairs(tmp_path / str(n), n) for n in (270, 290))
    swapped = shutil.copytree(many, tmp_path / "swapped")
    both = {"!": vocabulary(many)['"'], '"': vocabulary(many)["!"]}
    changed(many, lambda model: model["vocab"].update(both), swapped)
    words = {path: vocabulary(path) for path in (few, many, swapped)}
    assert words[few].items() < words[many].items()
    for teacher, student in ((few, many), (many, few), (many, swapped)):
        found, _ = made(**{**texts, "teacher": teacher, "student": student})
        assert "VocabularyMatch(" in found.display.text
        assert found.data.tokenizer.get_vocab() == words[student]


@pytest.mark.parametrize("larger", ["teacher", "student"])
def test_added_special_tokens_and_padded_heads_stay_one_vocabulary(texts, tmp_path, larger):
    small = byte_pairs(tmp_path / "small", 270, head=270)
    large = byte_pairs(tmp_path / "large", 270, special=["<image>"], head=280)
    teacher, student = (large, small) if larger == "teacher" else (small, large)
    found, _ = made(**{**texts, "teacher": teacher, "student": student})
    assert "VocabularyMatch(" not in found.display.text and len(found.data.tokenizer) == 270


def test_a_tokenizer_is_compared_with_the_models_own(texts, tmp_path):
    """A tokenizer with fitting ids but other tokens is refused, also that of --student."""
    teacher, other = (byte_pairs(tmp_path / str(seed), 290, seed=seed) for seed in (3, 4))
    wrong, fewer = tmp_path / "wrong", tmp_path / "fewer"

    def shift(model):
        names = sorted(model["vocab"], key=model["vocab"].get)
        shifted = names[:5] + names[6:] + names[5:6]
        model["vocab"] = {name: i for i, name in enumerate(shifted)}

    changed(other, shift, wrong)
    options = {**texts, "teacher": teacher, "student": None}
    error = run("distill", **options, tokenizer=wrong, expect=2)
    assert "in the tokenizer of --teacher" in error and "leave --tokenizer out" in error
    byte_pairs(tmp_path / "student", 290)
    shutil.copytree(wrong, tmp_path / "student", dirs_exist_ok=True)
    options["student"] = tmp_path / "student"
    error = run("distill", **options, tokenizer=teacher, expect=2)
    assert "in the tokenizer of --student" in error
    # The same tokens, cut otherwise: a line with both readings.
    changed(teacher, lambda model: model.update(merges=model["merges"][:3]), fewer)
    said = made(**{**options, "student": None}, tokenizer=fewer)[0].display.text
    assert "tokenizer reads row 1 as ... " in said and f"that of --teacher {teacher} as" in said


def test_a_teacher_is_tuned_and_scored_on_its_own_tokens(classes, folder, tmp_path):
    """To the weights that it gets beside a student of its own tokens."""
    own, scores = {"data": classes["eval"], "device": "cpu"}, tmp_path / "own.json"
    for name, student in (("two", {}), ("one", {"student": None})):
        options = {**classes, "finetune_teacher": 1, "out": tmp_path / name, **student}
        said = run("distill", **options, method="soft_targets")
        assert re.search(r"about \d+:\d\d for 2 steps of the teacher and \d+:\d\d for 2 of", said)
        report = report_of(tmp_path / name)
        run("evaluate", model=tmp_path / name / "teacher", **own, out=scores, overwrite=True)
        assert json.loads(scores.read_text())["accuracy"] == report["teacher"]["accuracy"]
    assert vocabulary(tmp_path / "two/teacher") == vocabulary(folder / "roberta")
    assert vocabulary(tmp_path / "two/student") == vocabulary(folder / "bert")
    one, two = (load_file(tmp_path / name / "teacher/model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], x) for name, x in two.items())
