"""Texts written after others: files, scores as the libraries', and every command."""

import json

import pytest
import sacrebleu
import torch
from rouge_score.rouge_scorer import RougeScorer
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

from fastkd.train.data import Encoder, read_file
from fastkd.train.generation import Generation
from fastkd.train.tasks.seq2seq import TASK
from tests.support.tiny import make_teacher, sentences
from tests.train.tasks.through import loss_of, refused, through


def make_writer(path, dropout=0.1):
    make_teacher(path, head=False)
    config = T5Config(
        vocab_size=17, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=dropout,
        pad_token_id=0, eos_token_id=3, decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    T5ForConditionalGeneration(config).save_pretrained(path)
    return path


def write_pairs(path, rows, seed=0, names=("source", "target")):
    texts = [text for text, _ in sentences(rows, seed)]
    lines = [json.dumps(dict(zip(names, (text, text.split()[0]), strict=True))) for text in texts]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def files(tmp_path):
    train, evals = (write_pairs(tmp_path / f"{i}.jsonl", 16, i) for i in range(2))
    return make_writer(tmp_path / "t5"), train, evals


def test_every_command_takes_it(tmp_path, files):
    # T5's first block has parameters that other blocks lack.
    report = through(tmp_path, *files, task="seq2seq", teacher_layers="1")
    assert report["task"] == "seq2seq"
    assert list(report["student"]) == ["chrf", "rouge_l", "loss"]
    told = [row["target"] for row in report["told"]]
    pairs = [json.loads(line) for line in files[2].read_text().splitlines()]
    assert [row["source"] for row in report["told"]] == [pair["source"] for pair in pairs]
    true = [pair["target"] for pair in pairs]
    # The libraries' scores of the output of `fastkd predict`.
    scorer = RougeScorer(["rougeL"])
    each = [scorer.score(a, b)["rougeL"].fmeasure for a, b in zip(true, told, strict=True)]
    said = json.loads((tmp_path / "scores.json").read_text())
    assert said["rouge_l"] == pytest.approx(sum(each) / len(each), rel=1e-12)
    assert said["chrf"] == sacrebleu.corpus_chrf(told, [true]).score
    assert 0 < said["loss"] < 10


def test_the_loss_is_the_mean_over_the_targets(tmp_path, files):
    model = T5ForConditionalGeneration.from_pretrained(files[0]).eval()
    tokenizer, task = AutoTokenizer.from_pretrained(files[0]), TASK()
    encoded = Encoder(tokenizer, 16, task)(read_file(files[2], TASK.columns, "--eval", task=TASK))
    answers, expected = loss_of(task, model, tokenizer, encoded)
    assert task.scores(("loss",), answers, encoded)["loss"] == pytest.approx(expected, rel=1e-5)


def test_sampled_text_depends_on_seed_and_source(files):
    model = T5ForConditionalGeneration.from_pretrained(files[0]).eval()
    tokenizer = AutoTokenizer.from_pretrained(files[0])
    rows = [tokenizer(text) for text, _ in sentences(6, 0)]

    def texts(rows, *generation):
        batch = tokenizer.pad([{k: r[k] for k in ("input_ids", "attention_mask")} for r in rows],
                              return_tensors="pt")  # fmt: skip
        task = TASK(generation=Generation(*generation))
        return [text for text, *_ in task.answer(model, dict(batch), tokenizer)]

    drawn = texts(rows, 4, 1.0, 0)
    assert drawn == [x for row in rows for x in texts([row], 4, 1.0, 0)] != texts(rows, 4, 1.0, 1)
    assert texts(rows, 4, 1e-6, 0) == texts(rows, 4) and max(len(x.split()) for x in drawn) <= 4


def test_a_mistake_is_one_sentence(tmp_path):
    for name, text, words in (
        ("a.jsonl", '{"source": "a"}', r"no column 'target' \(--label-column\)"),
        ("a.jsonl", '{"source": "a", "target": "b"}\n{"source": "a", "target": 3}',
         "row 2: column 'target' is not text but 3"),
        ("a.jsonl", '{"source": "a", "target": " "}', "row 1: column 'target' is empty"),
        ("a.jsonl", '{"source": "", "target": "a"}', "row 1: column 'source' is empty"),
        ("a.tsv", "source\ttarget\na\tb\tc\n", "row 2"),
    ):  # fmt: skip
        refused(tmp_path, "seq2seq", text, words, name)
