"""Distillation of a classifier from text alone: a finished teacher's soft targets, no label."""

import numpy as np
import pytest

from fastkd.train.scoring import judge
from tests.support.runs import losses_of, made, report_of
from tests.support.tiny import make_teacher, run, usual, write_tsv
from tests.train.tasks.through import told, write_lines


@pytest.fixture
def alone(tmp_path):
    make_teacher(tmp_path / "teacher", ["bad", "good"])
    write_tsv(tmp_path / "dev.tsv", 12, 1, label=lambda y: ["bad", "good"][y])
    texts = write_lines(tmp_path / "texts.txt")
    write_lines(tmp_path / "held-out.txt", 12, 1)
    given = {"train": None, "unlabelled": texts, "method": "soft_targets"}
    return usual(tmp_path, tmp_path, **given)


def test_evaluation_by_the_agreement_with_the_teacher(alone, tmp_path):
    rows = tmp_path / "held-out.txt"
    given = {**alone, "eval": rows, "method": "mc3kd"}
    assert "24 rows without labels: soft targets alone" in run("distill", **given)
    assert "already complete" in run("distill", "--resume", **given)
    report = report_of(tmp_path / "out")
    assert report["teacher"] == {"agreement": 1.0} and report["labels"] == ["bad", "good"]
    both = [
        told(tmp_path / model, rows, tmp_path / model / "told.jsonl", max_length=16)
        for model in ("teacher", "out/student")
    ]
    same = [one["label"] == other["label"] for one, other in zip(*both, strict=True)]
    assert report["student"]["agreement"] == pytest.approx(np.mean(same))
    assert losses_of(tmp_path / "out").get("task", 0) == 0


def test_evaluation_of_numbers_several_labels_and_classes(alone, tmp_path):
    """Numbers and several labels for a text by agreement, classes by the labels of the rows."""
    make_teacher(tmp_path / "numbers", labels=1)
    make_teacher(tmp_path / "several", problem_type="multi_label_classification")
    held_out = {"eval": tmp_path / "held-out.txt"}
    for teacher, metric, options in (
        ("numbers", "agreement", held_out),
        ("several", "agreement", {**held_out, "task": "multi-label"}),
        ("teacher", "accuracy", {}),
    ):
        found, models = made(**{**alone, "teacher": tmp_path / teacher, **options})
        (taught,) = judge(found, models.teacher, teacher=True).scores.items()
        (learned,) = judge(found, models.student).scores.items()
        assert taught[0] == learned[0] == metric and -1 <= learned[1] <= 1
        assert metric == "accuracy" or taught[1] == pytest.approx(1.0)


def test_labels_of_few_rows_are_evaluated_as_often_as_other_methods(alone, tmp_path):
    """An epoch of the labelled rows alone is one step, and each was followed by an evaluation."""
    rows = write_tsv(tmp_path / "train.tsv", label=lambda y: ["bad", "good"][y])
    few = {"unlabelled": None, "train": rows, "labelled": 8, "steps": 12, "epochs": None}
    run("distill", **{**alone, **few, "method": "labels"})
    assert [entry["step"] for entry in report_of(tmp_path / "out")["history"]] == [6, 12]
