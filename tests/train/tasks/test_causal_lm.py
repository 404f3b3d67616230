"""Language models: documents, packing, scores, and every command."""

import json
import math
from dataclasses import replace

import pytest
import torch
import transformers as t
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from fastkd.train.arrow_rows import UNLABELLED
from fastkd.train.data import Encoder, read_file
from fastkd.train.evaluation import score
from fastkd.train.tasks.causal_lm import TASK, _token_bytes, _with_offsets
from tests.support.tiny import make_teacher, run, sentences
from tests.train.tasks.through import loss_of, refused, through


def make_decoder(path, longest=32):
    make_teacher(path, head=False, longest=longest)
    shape = {"vocab_size": 17, "n_positions": longest, "n_embd": 16, "n_layer": 4, "n_head": 2}
    config = t.GPT2Config(
        **shape, **dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
    )
    config.bos_token_id = config.eos_token_id = 3
    torch.manual_seed(0)
    t.GPT2LMHeadModel(config).save_pretrained(path)
    return path


def write_text(path, rows, seed=0):
    texts = [text for text, _ in sentences(rows, seed)]
    if path.suffix == ".jsonl":
        texts = [json.dumps({"text": text}) for text in texts]
    path.write_text(("\n" if path.suffix == ".jsonl" else "\n\n").join(texts) + "\n")
    return path


def read(path):
    return read_file(path, TASK.columns, "--train", task=TASK)


def test_every_command_takes_it(tmp_path):
    teacher = make_decoder(tmp_path / "gpt2")
    train, evals = (write_text(tmp_path / f"{i}.txt", 24, i) for i in range(2))
    report = through(tmp_path, teacher, train, evals, task="causal-lm")
    assert report["task"] == "causal-lm" and report["labels"] is None
    assert set(report["student"]) == {"perplexity", "bits_per_byte"}
    # A uniform guess among the 17 tokens has 17.
    assert 1 < report["student"]["perplexity"] < 20
    assert [row["text"] for row in report["told"]] == [text for text, _ in sentences(24, 1)]
    assert all(row["perplexity"] > 1 for row in report["told"])
    history = [entry["scores"]["perplexity"] for entry in report["history"]]
    assert report["best"]["scores"]["perplexity"] == min(history)
    assert "text-generation" in (tmp_path / "run/student/README.md").read_text()


def test_documents_are_packed_and_their_bytes_counted(tmp_path):
    tokenizer = t.AutoTokenizer.from_pretrained(make_decoder(tmp_path / "gpt2"))
    path = tmp_path / "a.txt"
    path.write_text("good  film\nis\n\n\nbad film\n")
    rows = read(path)
    assert list(rows.columns("number", "text")) == [(1, "good  film\nis"), (5, "bad film")]
    encoded = Encoder(tokenizer, 4, TASK())(rows)
    end = tokenizer.sep_token
    words = [tokenizer.convert_ids_to_tokens(ids) for ids in encoded.tokens["input_ids"]]
    assert words == [["good", "film", "is", end], ["bad", "film", end]]
    assert encoded.evaluation_columns["bytes"][:] == [len("  film\nis"), len(" film")]
    assert [encoded.source_of(i)[1] for i in range(2)] == [1, 5]
    # The last of six tokens would be a row of its own.
    longer = Encoder(tokenizer, 6, TASK())(rows)
    assert [len(ids) for ids in longer.tokens["input_ids"]] == [5, 2]
    assert [row["position_ids"] for row in longer] == [[0, 1, 2, 3, 0], [0, 1]]
    assert [row["labels"][0] for row in longer] == [UNLABELLED, UNLABELLED]
    assert longer[0]["labels"][4] == UNLABELLED
    assert longer.evaluation_columns["bytes"][:] == [len("  film\nis"), 0]


def test_tokens_of_bytes_share_the_bytes_of_a_character(tmp_path):
    """A row that begins within a character has a part of its bytes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = "日é🙂 a"
    backend.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet))
    tokenizer = t.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    _, spans = _with_offsets(text, tokenizer)
    assert _token_bytes(text, spans) == [1] * len(text.encode()) + [0]
    assert _token_bytes("a日b", [(0, 2), (1, 3)]) == [1 + 1, 2 + 1]
    assert _token_bytes(" a  b", [(1, 2), (4, 5)]) == [2, 3]


def test_documents_in_a_row_are_scored_and_learned_as_if_alone(tmp_path):
    path = make_decoder(tmp_path / "gpt2")
    tokenizer = t.AutoTokenizer.from_pretrained(path)
    model = t.GPT2LMHeadModel.from_pretrained(path).eval()
    task = TASK.of(model.config)
    assert task.separate_documents
    rows = read(write_text(tmp_path / "a.txt", 4))  # so few that none is cut

    def loss(task):
        encoded = Encoder(tokenizer, 30, task)(rows)
        collate = task.collator(tokenizer)
        with torch.no_grad():
            answers = [
                one
                for batch in encoded.batches(collate, 4)
                for one in task.answer(model, batch, tokenizer)
            ]
        return len(encoded), [sum(x) for x in zip(*answers, strict=True)]

    (packed, together), (apart, alone) = loss(task), loss(replace(task, predicting=True))
    assert packed == 1 and apart == 4
    assert together == pytest.approx(alone, rel=1e-5)
    assert loss(replace(task, separate_documents=False))[1] != pytest.approx(alone, rel=1e-2)


@pytest.mark.parametrize("kind", [t.GPT2Config, t.BloomConfig, t.JambaConfig, t.BertConfig])
def test_models_that_know_documents_by_positions(kind):
    """Bloom takes no position_ids; Jamba's state carries over to the next document."""
    assert TASK.of(kind()).separate_documents == (kind is t.GPT2Config)


def test_an_encoder_would_see_what_it_is_to_predict(tmp_path):
    teacher = make_teacher(tmp_path / "bert", head=False)
    train, evals = (write_text(tmp_path / f"{i}.txt", 12, i) for i in range(2))
    rows = {"train": train, "eval": evals, "task": "causal-lm", "max_length": 16, "device": "cpu"}
    rows |= {"teacher": teacher, "finetune_teacher": 1, "out": tmp_path / "run"}
    said = run("distill", **rows, expect=2)
    assert "a bert model attends to both sides" in said and "--task masked-lm" in said


def test_scores_are_those_of_the_whole_text(tmp_path):
    path = make_decoder(tmp_path / "gpt2")
    tokenizer = t.AutoTokenizer.from_pretrained(path)
    model = t.GPT2LMHeadModel.from_pretrained(path).eval()
    task = TASK(separate_documents=False)
    encoded = Encoder(tokenizer, 8, task)(read(write_text(tmp_path / "a.txt", 12)))
    answers, loss = loss_of(task, model, tokenizer, encoded)
    found = task.scores(("perplexity", "bits_per_byte"), answers, encoded)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    size = sum(encoded.evaluation_columns["bytes"][:])
    total = loss * sum(len(ids) - 1 for ids in encoded.tokens["input_ids"])
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-5)
    assert math.isnan(score(task, ("perplexity",), [(math.nan, 3)], encoded)["perplexity"])


def test_a_folder_is_read_file_by_file(tmp_path):
    """Of the kinds that hold rows; a mistake in one is a sentence."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.jsonl").write_text('{"text": "bad film"}\n')
    write_text(folder / "a.txt", 2)
    (folder / "notes.md").write_text("not read")
    assert read(folder).texts == [*(text for text, _ in sentences(2, 0)), "bad film"]
    for name, text, words in (
        ("a.jsonl", '{"words": "a"}', "no column 'text'"),
        ("a.jsonl", '{"text": "a"}\n{"text": 3}', "row 2: column 'text' is not text but 3"),
        ("a.jsonl", '{"text": "a"}\n{"text": " "}', "row 2: column 'text' is empty"),
        ("a.txt", "\n", "the file is empty"),
        ("a.md", "a", "unknown kind of file"),
    ):
        refused(tmp_path, "causal-lm", text, words, name)
