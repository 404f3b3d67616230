"""Several labels for a text: scores, and every command."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, f1_score

from fastkd.train.data import load
from fastkd.train.saving import read_json
from fastkd.train.scoring import score
from fastkd.train.tasks.multi_label import TASK
from tests.support.tiny import run, source
from tests.train.tasks.through import (
    NAMED,
    labelled,
    rows_of,
    through,
    write_jsonl,
)


def test_every_command_takes_it(tmp_path):
    train = tmp_path / "train.csv"
    lines = (f"{text},{'|'.join(names)}" for text, names in labelled(24))
    train.write_text("\n".join(["text,labels", *lines]) + "\n")
    more = tmp_path / "more.txt"
    more.write_text("good film\nbad film\n")
    report = through(tmp_path, "multi-label", 24, train=train, unlabelled=more)
    assert report["labels"] == list(NAMED)
    told, evals = report["told"], tmp_path / "eval.jsonl"
    assert [row["text"] for row in told] == [text for text, _ in labelled(24, 1)]
    true = np.array([[name in names for name in NAMED] for _, names in labelled(24, 1)])
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
    again = rows_of(tmp_path / "told.csv", TASK)
    assert list(again.columns("label")) == [(row["labels"],) for row in told]
    (student / "fastkd.json").unlink()
    run("evaluate", model=student, data=evals, out=tmp_path / "a.json", device="cpu", max_length=16)
    assert read_json(tmp_path / "a.json")["micro_f1"] == pytest.approx(scores["micro_f1"])


def test_scores_of_rows_and_labels_that_nothing_has(tmp_path):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, ({"text": "a", "labels": numbers} for numbers in ([10, 9], [])))
    corpus = load(source(task="multi-label", train=path, evals=path))
    assert corpus.task.classes == ("9", "10")
    encoded = SimpleNamespace(rows=corpus.train)
    task = TASK(("9", "10", "11"))
    answers = np.array([[3.0, 1.0, -1.0], [-1.0, 2.0, -1.0]], dtype=np.float32)
    found = task.scores(task.default_metrics, answers, encoded)
    assert found["micro_f1"] == pytest.approx(4 / 5)
    assert found["macro_f1"] == pytest.approx((1 + 2 / 3) / 3)
    assert found["mean_average_precision"] == pytest.approx((1 + 1 / 2) / 3)
    assert math.isnan(score(task, ("micro_f1",), answers * math.nan, encoded)["micro_f1"])
    assert task.sanity_warning(answers, encoded) is None
    assert "'10'" in task.sanity_warning(answers[[1, 1]], encoded)
    # scikit-learn takes one column for the classes yes and no: accuracy, and the mean of both.
    write_jsonl(path, ({"text": "a", "labels": names} for names in (["good"], [], ["b"], [])))
    rows = load(source(task="multi-label", train=path, evals=path)).train
    answers = np.array([[1.0], [2.0], [-1.0], [-1.0]])
    scores = TASK(("good",)).scores(TASK.default_metrics, answers, SimpleNamespace(rows=rows))
    f1 = pytest.approx(2 / 3)  # precision 1/2, recall 1
    assert scores == {"micro_f1": f1, "macro_f1": f1, "mean_average_precision": 0.5}
