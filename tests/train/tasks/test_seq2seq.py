"""Texts written after others: files, scores as the libraries', and every command."""

import json

import pytest
import sacrebleu
from transformers import AutoTokenizer, T5ForConditionalGeneration

from fastkd.train.generation import Generation, rouge_l
from fastkd.train.tasks.seq2seq import TASK
from tests.support.tiny import sentences
from tests.train.tasks.through import encoded, loss_of, make_writer, through, write_targets


def test_every_command_takes_it(tmp_path):
    # T5's first block has parameters that other blocks lack.
    report = through(tmp_path, "seq2seq", 16, teacher_layers="1")
    assert list(report["student"]) == ["chrf", "rouge_l", "loss"]
    told = [row["target"] for row in report["told"]]
    pairs = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert [row["source"] for row in report["told"]] == [pair["source"] for pair in pairs]
    true = [pair["target"] for pair in pairs]
    # The scores of the output of `fastkd predict`.
    said = json.loads((tmp_path / "scores.json").read_text())
    assert said["rouge_l"] == pytest.approx(rouge_l(told, true), rel=1e-12)
    assert said["chrf"] == sacrebleu.corpus_chrf(told, [true]).score
    assert 0 < said["loss"] < 10


def test_the_loss_and_sampled_text(tmp_path):
    """The loss is the mean over the targets; text depends on seed and source alone."""
    path = make_writer(tmp_path / "t5")
    model = T5ForConditionalGeneration.from_pretrained(path).eval()
    tokenizer, task = AutoTokenizer.from_pretrained(path), TASK()
    tokens = encoded(write_targets(tmp_path / "a.jsonl", 16), task, tokenizer)
    answers, expected = loss_of(task, model, tokenizer, tokens)
    assert task.scores(("loss",), answers, tokens)["loss"] == pytest.approx(expected, rel=1e-5)
    right = [(x, *one) for x, (_, *one) in zip(tokens.rows.column("label"), answers, strict=True)]
    found = task.scores((), right, tokens)
    assert (found["rouge_l"], found["chrf"]) == pytest.approx((1, 100))
    rows = [tokenizer(text) for text, _ in sentences(6, 0)]

    def texts(rows, *generation):
        batch = tokenizer.pad([{k: r[k] for k in ("input_ids", "attention_mask")} for r in rows],
                              return_tensors="pt")  # fmt: skip
        task = TASK(generation=Generation(*generation))
        return [text for text, *_ in task.answer(model, dict(batch), tokenizer)]

    drawn = texts(rows, 4, 1.0, 0)
    assert drawn == [x for row in rows for x in texts([row], 4, 1.0, 0)] != texts(rows, 4, 1.0, 1)
    assert texts(rows, 4, 1e-6, 0) == texts(rows, 4) and max(len(x.split()) for x in drawn) <= 4
