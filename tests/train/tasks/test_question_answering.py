"""Answers in a text: SQuAD's files, windows, spans, scores, and every command."""

import json
import math

import numpy as np
import pytest
from transformers import AutoTokenizer

from fastkd.train.data import load
from fastkd.train.scoring import score
from fastkd.train.tasks.question_answering import TASK
from tests.support.tiny import source
from tests.train.tasks.through import (
    encoded,
    questions,
    rows_of,
    write_squad,
)


@pytest.fixture
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "teacher")


def test_windows_hold_the_whole_text_and_the_answer(tmp_path, tokenizer):
    examples = encoded(write_squad(tmp_path / "a.json", 8), TASK(), tokenizer, 12)
    truth = list(questions(8))
    seen = {number: set() for number in range(1, 9)}
    answered = set()
    for row, beside in zip(examples.tokens, examples.evaluation_columns, strict=True):
        number = beside["number"]
        _, _, text, (answer,) = truth[number - 1]
        spans = list(zip(beside["starts"], beside["ends"], strict=True))
        seen[number].update(span for span in spans if span[0] >= 0)
        start, end = row["start_positions"], row["end_positions"]
        assert (start == 0) == (end == 0) and len(row["input_ids"]) <= 12
        if start:
            answered.add(number)
            assert text[spans[start][0] : spans[end][1]] == answer["text"]
            assert spans[start][0] == answer["answer_start"]
    assert len(examples) > 8 and answered == set(seen)
    for number, found in seen.items():
        assert len(found) == len(truth[number - 1][2].split())


def answers_for(examples, start, end, none=0.0):
    """Logits that are 1 where a context's character ``start`` begins a token, and ``end`` ends."""
    for beside in examples.evaluation_columns:
        logits = np.zeros((2, beside["length"]), dtype=np.float32)
        logits[0][[x == start for x in beside["starts"]]] = 1
        logits[1][[x == end for x in beside["ends"]]] = 1
        logits[:, 0] = none
        yield logits


def test_answers_of_windows_and_none(tmp_path, tokenizer):
    path = tmp_path / "a.json"
    text = "good bad the poor nice film is so dull"
    rows = [
        {"id": "x", "question": "a film", "answers": [{"text": "poor nice", "answer_start": 13}]},
        {"id": "y", "question": "film", "answers": [], "is_impossible": True},
    ]
    data = {"data": [{"paragraphs": [{"context": text, "qas": rows}]}]}
    path.write_text(json.dumps(data, indent=1))
    corpus = load(source(task="question-answering", train=path, evals=path))
    task = corpus.task
    said = ["1 of 2 training questions have no answer"]
    assert task.empty and list(task.describe(corpus)) == said
    examples = encoded(path, task, tokenizer, 10)
    assert len(examples) > 2
    answers = list(answers_for(examples, 13, 22))
    told = task.predictions(answers, examples)
    assert told == [{"text": "poor nice", "score": 2.0, "no_answer": 0.0}] * 2
    assert task.scores(task.default_metrics, answers, examples) == {"f1": 50.0, "exact_match": 50.0}
    none = list(answers_for(examples, 13, 22, 1.5))
    assert [row["text"] for row in task.predictions(none, examples)] == ["", ""]
    # If all training rows have answers, each question gets an answer.
    assert TASK(False).short_answers(none, examples) == ["poor nice"] * 2
    for logits, beside in zip(answers, examples.evaluation_columns, strict=True):
        logits[:, 0] = beside["number"] / 4  # less sure of the second question
    best = {"best_f1": 100.0, "best_exact_match": 100.0}
    assert task.scores(task.metrics, answers, examples) == {"f1": 50, "exact_match": 50, **best}
    none[0][0, 1] = math.nan
    assert math.isnan(score(task, ("f1",), none, examples)["f1"])


def test_rows_line_by_line_and_in_one(tmp_path, tokenizer):
    """Each question has windows of its own, though all stand on one line."""
    found = {"text": ["b"], "answer_start": [2]}
    row = {"id": "q", "question": "a", "context": "a b", "answers": found}
    rows = rows_of(tmp_path / "a.jsonl", TASK, json.dumps(row))
    assert list(rows.columns("id", "label")) == [("q", found)]
    texts = ("good bad the poor nice film is so dull", "the film")
    found = {"text": [], "answer_start": []}
    rows = [{"id": i, "question": "a", "context": x, "answers": found} for i, x in enumerate(texts)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows))
    examples = encoded(path, TASK(), tokenizer, 10)
    assert TASK(False).short_answers(list(answers_for(examples, 4, 8)), examples) == ["bad", "film"]
