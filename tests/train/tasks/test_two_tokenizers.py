"""Students with a tokenizer of their own: aligned rows, one or two tokenizers, every command."""

import collections
import json
import re
import shutil

import pytest
import torch
import transformers as t
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from fastkd.study.run_measurements import similarities
from fastkd.train.data import Encoder
from fastkd.train.errors import InputError
from fastkd.train.loading import TwoTokenizerCollator
from fastkd.train.saving import read_json
from fastkd.train.tasks import named
from tests.support.runs import first_step, made, report_of
from tests.support.tiny import run, sentences, usual, write_tsv
from tests.train.tasks import through

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}\n"
    "{% else %}<bot>{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
MARKS = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>",
         "mask_token": "<mask>"}  # fmt: skip


def byte_pairs(path, size, special=(), causal=True, head=0, seed=3, template=None):
    """A random GPT-2 or RoBERTa classifier with a byte-level BPE of ``size`` tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*MARKS.values()], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator([text for text, _ in sentences(50, seed)], trainer)
    if not causal:
        made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer = t.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=64, **MARKS)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    sizes = {"vocab_size": head or len(tokenizer), "bos_token_id": 0, "pad_token_id": 1}
    if causal:
        sizes |= {"hidden_size": 8, "eos_token_id": 2, **through.NO_DROPOUT}
        return through.save_model(path, t.GPT2LMHeadModel, "gpt2", 2, **sizes)
    sizes |= {"max_position_embeddings": 66, "type_vocab_size": 1}
    return through.save_model(path, t.RobertaForSequenceClassification, "roberta", **sizes)


def make_student(path):
    """A random GPT-2 with a byte-level BPE of the tests' words, and a chat template."""
    return byte_pairs(path, 295, special=["<user>", "<bot>"], template=TEMPLATE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Language models of two vocabularies, and texts."""
    path = tmp_path_factory.mktemp("two")
    through.make_chat_teacher(path / "teacher")
    make_student(path / "student")
    through.write_text(path / "a.txt", 20)
    return path


@pytest.fixture
def texts(folder, tmp_path):
    """Options of a student of language models."""
    given = {"task": "causal-lm", "student": folder / "student", "method": "soft_targets"}
    return usual(folder, tmp_path, train=folder / "a.txt", eval=folder / "a.txt", **given)


def words_of(folder, path, task, max_length):
    """Rows, each with the text of every span by student and teacher."""
    names = {"student": "", "teacher": "teacher_"}
    tokenizers = [t.AutoTokenizer.from_pretrained(folder / name) for name in names]
    rows = through.rows_of(path, task)
    for row in Encoder(tokenizers[0], max_length, named(task)(), tokenizers[1])(rows):
        sides = []
        for (name, prefix), tokenizer in zip(names.items(), tokenizers, strict=True):
            parts = collections.defaultdict(list)
            for token, span in zip(row[f"{prefix}input_ids"], row[f"{name}_spans"], strict=True):
                parts[span].append(token)
            sides.append([tokenizer.decode(parts[n]).strip() for n in sorted(parts) if n >= 0])
        yield row, *sides


@pytest.mark.parametrize("max_length", [5, 16])
def test_rows_have_the_same_text_in_both_vocabularies(folder, tmp_path, max_length):
    path, found, rows = tmp_path / "a.txt", [], []
    texts = "good film is very dull", "the film is fine so the film is nice"
    path.write_text("\n\n".join(texts))
    for row, ours, theirs in words_of(folder, path, "causal-lm", max_length):
        rows.append(row)
        assert max(len(row["input_ids"]), len(row["teacher_input_ids"])) <= max_length
        assert [word.replace("[SEP]", "</s>") for word in theirs] == ours and all(ours)
        assert row["labels"] == [-100, *row["input_ids"][1:]]
        found += ours
    assert " ".join(found).replace(" </s>", "") == " ".join(texts)
    one, two = (t.AutoTokenizer.from_pretrained(folder / name) for name in ("student", "teacher"))
    two.__class__ = type("Left", (type(two),), {"padding_side": "left"})  # as LLaMA's
    batch = TwoTokenizerCollator(named("causal-lm")(), one, two)(rows)
    assert not (batch["teacher_spans"] >= 0)[batch["teacher_attention_mask"] == 0].any()


def test_spans_of_conversations_are_in_the_answers(folder, texts, tmp_path):
    talk = through.says("good film", "film is nice", "good", "good")
    path = through.write_chats(tmp_path / "a.jsonl", [talk])
    ((row, ours, theirs),) = words_of(folder, path, "chat", 64)
    assert ours == ["film", "is", "nice", "</s>", "good", "</s>"]
    assert theirs == ["film", "is", "nice", "[SEP]", "good", "[SEP]"]
    assert [label != -100 for label in row["labels"]] == [x >= 0 for x in row["student_spans"]]
    data = through.write_chats(path, 8)
    chat = {"task": "chat", "train": data, "eval": data, "method": "fcd", "max_length": 32}
    found, _ = first_step(**{**texts, **chat})
    assert similarities(found, t.AutoModelForCausalLM.from_pretrained(folder / "student"))


def test_top_k_cache_and_errors(texts, tmp_path):
    cache = {**texts, "epochs": None, "learning_rate": None, "unmatched": "bucket"}
    said = run("cache", **cache | {"out": tmp_path / "cache"}, top_k=5)
    assert "VocabularyMatch(" in said and "% of the student's" in said
    assert "--top-k: top_k must be at most 17" in run("cache", **cache, top_k=99, expect=2)
    learn = {**texts, "teacher": None, "teacher_cache": tmp_path / "cache"}
    first_step(**learn, unmatched="bucket")
    own = "the student has a tokenizer of its own"
    for given, words in (
        (learn, "pass unmatched='bucket'"),
        ({**texts, "pack": True}, own),
        ({**texts, "on_policy": 0.5}, own),
        ({**texts, "student": None, "unmatched": "bucket"}, "teacher and student have one token"),
    ):
        assert words in run("distill", expect=2, **given)


def vocabulary(path):
    return t.AutoTokenizer.from_pretrained(path).get_vocab()


def test_which_vocabularies_are_one(texts, tmp_path):
    """Nested ones counted as one: the student's was replaced, or it was refused.

    A tokenizer is compared with the models' own; ids may fit though the tokens are others.
    """
    few, many = (byte_pairs(tmp_path / str(size), size) for size in (270, 290))
    large = byte_pairs(tmp_path / "large", 270, special=["<image>"], head=280)
    other = byte_pairs(tmp_path / "other", 290, seed=4)

    def changed(path, name, **changes):
        tokenizer = t.AutoTokenizer.from_pretrained(path)
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        merges = state["model"]["merges"]
        state["model"] |= {"merges": merges[: changes.pop("merges", None)], **changes}
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
        tokenizer.save_pretrained(shutil.copytree(path, tmp_path / name))
        return tmp_path / name

    def begun(teacher, student, tokenizer=None):
        return made(**{**texts, "teacher": teacher, "student": student}, tokenizer=tokenizer)[0]

    words, match = vocabulary(many), "VocabularyMatch("
    assert vocabulary(few).items() < words.items()
    both = {"!": words['"'], '"': words["!"]}  # which are in no training row
    swapped = changed(many, "swapped", vocab=words | both)
    for teacher, student in ((few, many), (many, few), (many, swapped)):
        found = begun(teacher, student)
        assert match in found.display.text
        assert found.data.tokenizer.get_vocab() == vocabulary(student)
    # Added special tokens and padded heads.
    for teacher, student in ((large, few), (few, large)):
        found = begun(teacher, student)
        assert match not in found.display.text and len(found.data.tokenizer) == 270
    # The same tokens, cut otherwise: a line with both readings.
    said = begun(many, None, changed(many, "fewer", merges=3)).display.text
    assert "tokenizer reads row 1 as ... " in said and f"that of --teacher {many} as" in said
    names = sorted(vocabulary(other), key=vocabulary(other).get)
    moved = [*names[:5], *names[6:], names[5]]
    shifted = changed(other, "shifted", vocab={name: i for i, name in enumerate(moved)})
    for student, tokenizer, words in (
        (None, shifted, "in the tokenizer of --teacher.* leave --tokenizer out"),
        (shifted, many, "in the tokenizer of --student"),
    ):
        with pytest.raises(InputError, match=words):
            begun(many, student, tokenizer)


def test_a_teacher_is_tuned_and_scored_on_its_own_tokens(tmp_path):
    """To the weights that it gets beside a student of its own tokens."""
    teacher = byte_pairs(tmp_path / "teacher", 290, causal=False)
    bert, found = through.make_bare(tmp_path / "bert"), []
    train, evals = (write_tsv(tmp_path / f"{n}.tsv", n, n) for n in (16, 12))
    for out, student in ((tmp_path / "one", None), (tmp_path / "two", bert)):
        given = {"finetune_teacher": 1, "method": "soft_targets", "train": train, "eval": evals}
        said = run("distill", **usual(tmp_path, tmp_path, **given, student=student, out=out))
        assert re.search(r"about \d+:\d\d for 2 steps of the teacher and \d+:\d\d for 2 of", said)
        scores = out / "scores.json"
        run("evaluate", model=out / "teacher", data=evals, device="cpu", out=scores)
        assert read_json(scores)["accuracy"] == report_of(out)["teacher"]["accuracy"]
        found.append(load_file(out / "teacher/model.safetensors"))
    assert vocabulary(out / "teacher") == vocabulary(teacher)
    assert vocabulary(out / "student") == vocabulary(bert)
    assert all(torch.equal(found[0][name], x) for name, x in found[1].items())
