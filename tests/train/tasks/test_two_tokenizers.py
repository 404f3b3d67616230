"""Decoders whose student has a tokenizer of its own: aligned rows, and every command."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from fastkd.train.encoding import Encoder
from fastkd.train.tasks import named
from tests.support.tiny import run, sentences
from tests.train.tasks.test_causal_lm import make_decoder, read, write_text
from tests.train.tasks.test_chat import make_chat_teacher, says, talks, write_jsonl
from tests.train.tasks.test_chat import read as read_chats
from tests.train.tasks.through import killed_and_resumed, through

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}\n"
    "{% else %}<bot>{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def make_student(path):
    """A random GPT-2 beside a byte-level BPE of the tests' words."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    special = ["</s>", "<user>", "<bot>"]
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([text for text, _ in sentences(50, 3)], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="</s>", pad_token="</s>", model_max_length=64
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    shape = {"vocab_size": len(tokenizer), "n_positions": 64, "n_embd": 8, "n_layer": 1}
    still = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
    torch.manual_seed(1)
    config = GPT2Config(**shape, **still, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("two")
    make_decoder(path / "teacher")
    make_student(path / "student")
    write_text(path / "train.txt", 20)
    write_text(path / "eval.txt", 8, seed=1)
    return path


def given(folder):
    return [folder / name for name in ("teacher", "train.txt", "eval.txt")]


def encoded(folder, task, rows, max_length):
    both = (AutoTokenizer.from_pretrained(folder / name) for name in ("student", "teacher"))
    student, teacher = both
    found = Encoder(student, max_length, named(task)(), teacher)(rows)
    return student, teacher, found.__getitems__(range(len(found)))


def spans_of(tokenizer, ids, spans):
    """The text of each span."""
    return {
        n: tokenizer.decode([i for i, s in zip(ids, spans, strict=True) if s == n]).strip()
        for n in sorted({*spans} - {-1})
    }


@pytest.mark.parametrize("max_length", [5, 16])
def test_rows_have_the_same_text_in_both_vocabularies(folder, tmp_path, max_length):
    path = tmp_path / "a.txt"
    path.write_text("good film is very dull\n\nthe film is fine so the film is nice\n")
    student, teacher, rows = encoded(folder, "causal-lm", read(path), max_length)
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


def test_spans_of_conversations_are_in_the_answers(folder, tmp_path):
    make_chat_teacher(tmp_path / "teacher")
    make_student(tmp_path / "student")
    talk = says("good film", "film is nice", "good", "good")
    path = write_jsonl(tmp_path / "a.jsonl", [talk])
    student, teacher, (row,) = encoded(tmp_path, "chat", read_chats(path), 64)
    ours = spans_of(student, row["input_ids"], row["student_spans"])
    theirs = spans_of(teacher, row["teacher_input_ids"], row["teacher_spans"])
    assert [*ours.values()] == ["film", "is", "nice", "</s>", "good", "</s>"]
    assert [*theirs.values()] == ["film", "is", "nice", "[SEP]", "good", "[SEP]"]
    counted = [i for i, label in enumerate(row["labels"]) if label != -100]
    assert counted == [i for i, span in enumerate(row["student_spans"]) if span >= 0]


def test_every_command_takes_a_student_with_its_own_tokenizer(folder, tmp_path):
    report = through(
        tmp_path,
        *given(folder),
        task="causal-lm",
        student=folder / "student",
        unmatched="bucket",
        finetune=False,
    )
    assert report["student"]["bits_per_byte"] > 0
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    written = run("export", model=tmp_path / "run/student", out=tmp_path / "model.onnx")
    assert "outputs agree with ONNX Runtime's" in written
    words = {"model": tmp_path / "run/student", "data": folder / "eval.txt", "device": "cpu"}
    error = run("evaluate", onnx=tmp_path / "model.onnx", **words, expect=2)
    assert "--onnx: --task causal-lm separates documents by positions" in error
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/student")
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(folder / "student").get_vocab()


def test_killed_and_resumed_to_the_same_bits(folder, tmp_path):
    killed_and_resumed(
        tmp_path, *given(folder), task="causal-lm", method="soft_targets",
        student=folder / "student", learning_rate=0.01,
    )  # fmt: skip


def test_top_k_cache_and_errors(folder, tmp_path):
    teacher, train, evals = given(folder)
    options = dict(task="causal-lm", method="soft_targets", train=train, eval=evals, device="cpu")
    options |= dict(max_length=16, student=folder / "student")
    out = tmp_path / "cache"
    made = run("cache", teacher=teacher, out=out, top_k=5, unmatched="bucket", **options)
    assert "VocabularyMatch(" in made and "% of the student's" in made
    learn = dict(teacher_cache=out, epochs=1, out=tmp_path / "run", **options)
    assert "pass unmatched='bucket'" in run("distill", **learn, expect=2)
    run("distill", **learn, unmatched="bucket")
    learn |= dict(teacher_cache=None, teacher=teacher, out=tmp_path / "b")
    for flag in ({"pack": True}, {"on_policy": 0.5}, {"finetune_teacher": 1}):
        assert "the student has a tokenizer of its own" in run("distill", **learn, **flag, expect=2)
    learn["student"] = None
    assert "teacher and student have one tokenizer" in run(
        "distill", **learn, unmatched="bucket", expect=2
    )


def test_chats(folder, tmp_path):
    make_chat_teacher(tmp_path / "teacher")
    make_student(tmp_path / "student")
    files = [write_jsonl(tmp_path / f"{n}.jsonl", talks(8, n)) for n in range(2)]
    run(
        "distill", task="chat", teacher=tmp_path / "teacher", student=tmp_path / "student",
        train=files[0], eval=files[1], method="fcd", epochs=1, max_length=32, device="cpu",
        out=tmp_path / "run",
    )  # fmt: skip
    assert (tmp_path / "run/student/model.safetensors").exists()
