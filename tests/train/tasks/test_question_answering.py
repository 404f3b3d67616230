"""Answers in a text: SQuAD's files, windows, spans, scores, and every command."""

import json
import math
import random

import numpy as np
import pytest
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from fastkd.train.data import Encoder, load
from fastkd.train.evaluation import score
from fastkd.train.tasks.question_answering import TASK, squad, squad_best
from tests.support.tiny import WORDS, make_teacher, run, source, write_onnx
from tests.train.tasks.through import refused, rows_of, through


def oracle(found, true):
    # Here, since the import takes a second of every process of the suite.
    return pytest.importorskip("torchmetrics.functional.text").squad(found, true)


def questions(rows, seed=0, empty=False):
    """What film it is: the word before "film"; some ask for one that isn't there."""
    rng = random.Random(seed)
    for i in range(rows):
        words = [*rng.choices(WORDS[:6], k=rng.randint(4, 16)), "film", "is", "so"]
        text = " ".join(words)
        answers = [{"text": words[-4], "answer_start": text.rindex(f"{words[-4]} film")}]
        without = empty and i % 3 == 0
        asked = "the dull film" if without else "the film"
        yield f"q{i}", asked, text, [] if without else answers


def write_squad(path, rows, seed=0, empty=False):
    paragraphs = [
        {"context": text, "qas": [{"id": name, "question": asked, "answers": answers}]}
        for name, asked, text, answers in questions(rows, seed, empty)
    ]
    half = rows // 2
    data = [{"title": "a", "paragraphs": part} for part in (paragraphs[:half], paragraphs[half:])]
    path.write_text(json.dumps({"version": "v2.0", "data": data}))
    return path


def scored(told, truth):
    found = [{"id": row["id"], "prediction_text": row["text"]} for row in told]
    gold = [
        {
            "id": name,
            "answers": {key: [a[key] for a in answers] for key in ("text", "answer_start")},
        }
        for name, _, _, answers in truth
    ]
    return {name: float(x) for name, x in oracle(found, gold).items()}


def test_every_command_takes_it(tmp_path):
    teacher = make_teacher(tmp_path / "bert", layers=2, head=False)
    train = write_squad(tmp_path / "train.json", 12)
    evals = write_squad(tmp_path / "eval.json", 12, 1)
    report = through(tmp_path, teacher, train, evals, task="question-answering", max_length=12)
    assert report["task"] == "question-answering" and report["no_answer"] is False
    truth, told = list(questions(12, 1)), report["told"]
    assert [(row["id"], row["question"], row["context"]) for row in told] == [
        row[:3] for row in truth
    ]
    assert all(row["text"] and row["text"] in row["context"] for row in told)
    scores = report["best"]["scores"]
    assert scores == pytest.approx(scored(told, truth), rel=1e-6)
    assert "AutoModelForQuestionAnswering" in (tmp_path / "run/student/README.md").read_text()
    student, onnx, said = (tmp_path / name for name in ("run/student", "x.onnx", "onnx.json"))
    model = AutoModelForQuestionAnswering.from_pretrained(student)
    write_onnx(model, onnx, "start_logits", "end_logits")
    run("evaluate", model=student, data=evals, onnx=onnx, out=said, device="cpu")
    found = json.loads(said.read_text())
    assert {name: found[name] for name in scores} == pytest.approx(scores)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    teacher = make_teacher(tmp_path_factory.mktemp("qa") / "bert", head=False)
    return AutoTokenizer.from_pretrained(teacher)


def encoded(path, tokenizer, length, task=None):
    return Encoder(tokenizer, length, task or TASK())(rows_of(path, TASK))


def test_windows_hold_the_whole_text_and_the_answer(tmp_path, tokenizer):
    path = write_squad(tmp_path / "a.json", 8)
    examples = encoded(path, tokenizer, 12)
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
    assert task.empty and list(task.describe(corpus)) == [
        "1 of 2 training questions have no answer"
    ]
    examples = encoded(path, tokenizer, 10, task)
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


def test_scores_are_squads():
    said = ["The cat!", "a dog", "red  house", ""]
    gold = [["cat", "a cat"], ["dogs", "big dog"], ["the red house of", "house"], ["it"]]
    found = [{"id": str(i), "prediction_text": text} for i, text in enumerate(said)]
    true = [
        {"id": str(i), "answers": {"text": texts, "answer_start": [0] * len(texts)}}
        for i, texts in enumerate(gold)
    ]
    expected = {name: float(x) for name, x in oracle(found, true).items()}
    assert squad(said, gold) == pytest.approx(expected, rel=1e-6)
    # evaluate-v1.1.py, unlike torchmetrics, gives such answers no common token.
    assert squad(["the"], [["an"]]) == {"exact_match": 100.0, "f1": 0.0}
    # SQuAD 2.0: only an empty prediction fits no answer; answers without words are empty.
    assert squad(["", "the", "cat"], [[], ["an"], []])["f1"] == pytest.approx(200 / 3)


def test_the_best_threshold():
    rng = random.Random(0)
    gold = [[] if i % 3 == 0 else [rng.choice(WORDS[:6])] for i in range(12)]
    said = [rng.choice(["dull", "fine film", *answers * 3]) for answers in gold]
    doubts = [rng.random() for _ in gold]
    tried = [
        squad([text if d <= most else "" for text, d in zip(said, doubts, strict=True)], gold)
        for most in (-1, *doubts)
    ]
    found = squad_best(said, gold, doubts)
    assert found["best_f1"] == pytest.approx(max(one["f1"] for one in tried))
    assert found["best_exact_match"] == pytest.approx(max(one["exact_match"] for one in tried))
    assert found["best_f1"] > squad(said, gold)["f1"]


def question(**changes):
    row = {"id": "q7", "question": "a", "answers": [{"text": "b", "answer_start": 2}], **changes}
    return json.dumps({"data": [{"paragraphs": [{"context": "a b", "qas": [row]}]}]})


def test_a_mistake_is_one_sentence(tmp_path):
    for text, words in (
        ('{"data": [{"paragraphs": 3}]}', r"data\[0\]: 'paragraphs' is not a list of objects"),
        ('{"data": [{"title": "a"}]}', r"data\[0\]: no column 'paragraphs'"),
        ('{"data": [{"paragraphs": [{"qas": [{"id": 1}]}]}]}', r"paragraphs\[0\]: no column 'con"),
        ('{\n"data": [{"par', "row 2: not JSON"),
        ('{"data": []}', "the file has no rows"),
        (question(question=3), "question 'q7': column 'question' is not text but 3"),
        (question(question=" "), "row 1: column 'question' is empty"),
        (question(answers=3), "question 'q7': column 'answers' is not a list of answers"),
        (question(answers=[{"text": "b", "answer_start": 1}]),
         "question 'q7': answer 'b' is not at character 1 of its text"),
        (question(answers=[{"text": "b"}]), "answer 'b' is not at character None"),
    ):  # fmt: skip
        refused(tmp_path, "question-answering", text, words, "a.json")
    for name in (["q"], {"q": 1}, None, True, 1.5):
        said = "column 'id' is not text but"
        refused(tmp_path, "question-answering", question(id=name), said, "a.json")
    row = {"question": "a", "context": "a b", "answers": {"text": ["b"], "answer_start": [2]}}
    for names, said in (
        (["q", ["r"]], r"row 2: column 'id' is not text but \['r'\]"),
        (["1", "2", 1], "row 3: question '1' occurs twice"),
        (["\ud800"], "row 1: column 'id' holds half a character"),
    ):
        lines = "\n".join(json.dumps({"id": name, **row}) for name in names)
        refused(tmp_path, "question-answering", lines, said, "a.jsonl")


def test_rows_line_by_line(tmp_path):
    found = {"text": ["b"], "answer_start": [2]}
    row = {"id": "q", "question": "a", "context": "a b", "answers": found}
    rows = rows_of(tmp_path / "a.jsonl", TASK, json.dumps(row))
    assert list(rows.columns("id", "label")) == [("q", found)]
    array = json.dumps([row, {**row, "id": "r"}])
    assert len(rows_of(tmp_path / "a.json", TASK, array)) == 2


def test_each_question_has_its_own_windows_though_all_stand_on_one_line(tmp_path, tokenizer):
    texts = ("good bad the poor nice film is so dull", "the film")
    found = {"text": [], "answer_start": []}
    rows = [{"id": i, "question": "a", "context": x, "answers": found} for i, x in enumerate(texts)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows))
    examples = encoded(path, tokenizer, 10)
    assert TASK(False).short_answers(list(answers_for(examples, 4, 8)), examples) == ["bad", "film"]
