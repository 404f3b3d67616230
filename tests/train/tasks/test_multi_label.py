"""Several labels for a text: reading, scores, and every command."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, f1_score

from fastkd.train.data import load, read_file
from fastkd.train.errors import InputError
from fastkd.train.evaluation import score
from fastkd.train.tasks.multi_label import TASK
from tests.support.tiny import make_teacher, run, sentences, source
from tests.train.tasks.through import refused, through

NAMED = ("bad", "film", "good", "so")


def labelled(rows, seed=0):
    for text, _ in sentences(rows, seed):
        yield text, [name for name in NAMED if name in text.split()]


def write_jsonl(path, rows, seed=0):
    lines = (json.dumps({"text": text, "labels": names}) for text, names in labelled(rows, seed))
    path.write_text("\n".join(lines))
    return path


def write_csv(path, rows, seed=0):
    lines = (f"{text},{'|'.join(names)}" for text, names in labelled(rows, seed))
    path.write_text("\n".join(["text,labels", *lines]) + "\n")
    return path


def truth(rows, seed):
    return np.array([[name in names for name in NAMED] for _, names in labelled(rows, seed)])


def test_every_command_takes_it(tmp_path):
    teacher = make_teacher(tmp_path / "bert", layers=2, head=False)
    train = write_csv(tmp_path / "train.csv", 24)
    evals = write_jsonl(tmp_path / "eval.jsonl", 24, 1)
    more = tmp_path / "more.txt"
    more.write_text("good film\nbad film\n")
    report = through(tmp_path, teacher, train, evals, task="multi-label", unlabelled=more)
    assert report["task"] == "multi-label" and report["labels"] == list(NAMED)
    told = report["told"]
    assert [row["text"] for row in told] == [text for text, _ in labelled(24, 1)]
    true = truth(24, 1)
    chances = np.array([[row[f"P({name})"] for name in NAMED] for row in told])
    found = np.array([[name in row["labels"] for name in NAMED] for row in told])
    assert (found == (chances > 0.5)).all()
    scores = report["best"]["scores"]
    assert scores["micro_f1"] == f1_score(true, found, average="micro", zero_division=0)
    assert scores["macro_f1"] == f1_score(true, found, average="macro", zero_division=0)
    assert scores["mean_average_precision"] == pytest.approx(
        average_precision_score(true, chances, average="macro"), abs=1e-9
    )
    # A written table is read back; without fastkd's manifest the configuration gives the task.
    student = tmp_path / "run/student"
    run("predict", model=student, data=evals, out=tmp_path / "told.csv", device="cpu")
    again = read_file(tmp_path / "told.csv", TASK.columns, "--train", task=TASK)
    assert list(again.columns("label")) == [(row["labels"],) for row in told]
    (student / "fastkd.json").unlink()
    run("evaluate", model=student, data=evals, out=tmp_path / "by-config.json", device="cpu",
        max_length=16)  # fmt: skip
    by_config = json.loads((tmp_path / "by-config.json").read_text())
    assert by_config["micro_f1"] == pytest.approx(scores["micro_f1"])


def test_scores_of_rows_and_labels_that_nothing_has(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "labels": [10, 9]}\n{"text": "b", "labels": []}\n')
    corpus = load(source(task="multi-label", train=path, evals=path))
    assert corpus.task.classes == ("9", "10")
    rows = corpus.train
    encoded = type("Encoded", (), {"rows": rows})()
    task = TASK(("9", "10", "11"))
    answers = np.array([[3.0, 1.0, -1.0], [-1.0, 2.0, -1.0]], dtype=np.float32)
    found = task.scores(task.default_metrics, answers, encoded)
    assert found["micro_f1"] == pytest.approx(4 / 5)
    assert found["macro_f1"] == pytest.approx((1 + 2 / 3) / 3)
    assert found["mean_average_precision"] == pytest.approx((1 + 1 / 2) / 3)
    assert math.isnan(score(task, ("micro_f1",), answers * math.nan, encoded)["micro_f1"])
    assert task.sanity_warning(answers, encoded) is None
    assert "'10'" in task.sanity_warning(answers[[1, 1]], encoded)


def test_scores_of_one_label_are_of_its_rows(tmp_path):
    """scikit-learn takes one column for the classes yes and no: accuracy, and the mean of both."""
    path = tmp_path / "rows.csv"
    path.write_text("text,labels\na,good\nb,\nc,bad\nd,\n")
    rows = load(source(task="multi-label", train=path, evals=path)).train
    answers = np.array([[1.0], [2.0], [-1.0], [-1.0]])
    scores = TASK(("good",)).scores(TASK.default_metrics, answers, SimpleNamespace(rows=rows))
    f1 = pytest.approx(2 / 3)  # precision 1/2, recall 1
    assert scores == {"micro_f1": f1, "macro_f1": f1, "mean_average_precision": 0.5}


def test_a_mistake_is_one_sentence(tmp_path):
    for name, text, words in (
        ("a.jsonl", '{"text": "a"}', "no column 'labels'"),
        ("a.jsonl", '{"text": "a", "labels": 3}', "row 1: column 'labels' is not a list of labels"),
        ("a.jsonl", '{"text": "a", "labels": [true, "a"]}', "not a list of labels but"),
        ("a.jsonl", '{"text": "a", "labels": ["x", " "]}', "row 1: label 2 is empty"),
        ("a.csv", "text,labels\na,x|y\nb,x|x\n", "row 3: label 'x' occurs twice"),
        ("a.csv", "text,labels\na,x\n", "the only label is 'x', and --task multi-label needs two"),
        ("a.csv", "text,labels\na,\n", "no row has a label"),
    ):
        refused(tmp_path, "multi-label", text, words, name)
    train, evals = tmp_path / "a.csv", tmp_path / "b.csv"
    train.write_text("text,labels\na,good|bad\n")
    evals.write_text("text,labels\na,good\nb,god\n")
    with pytest.raises(InputError, match="row 3: label 'god' does not occur in the training rows"):
        load(source(task="multi-label", train=train, evals=evals))
