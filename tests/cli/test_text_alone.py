"""Distillation of a classifier from text alone: a finished teacher's soft targets, no label."""

import numpy as np
import pytest

from fastkd.train.scoring import judge
from tests.support.runs import losses_of, made, report_of
from tests.support.tiny import make_teacher, run, usual, write_tsv
from tests.train.tasks.through import told, write_lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("alone")
    make_teacher(path / "teacher", ["bad", "good"])
    make_teacher(path / "scorer", labels=1)
    make_teacher(path / "tagger-of-labels", problem_type="multi_label_classification")
    write_lines(path / "texts.txt")
    write_lines(path / "held-out.txt", 12, 1)
    for name, rows, seed in (("dev", 12, 1), ("train", 40, 0)):
        write_tsv(path / f"{name}.tsv", rows, seed, label=lambda y: ["bad", "good"][y])
    return path


@pytest.fixture
def alone(folder, tmp_path):
    texts = {"train": None, "unlabelled": folder / "texts.txt", "method": "soft_targets"}
    return usual(folder, tmp_path, **texts)


def test_evaluation_by_the_agreement_with_the_teacher(alone, folder, tmp_path):
    given = {**alone, "eval": folder / "held-out.txt", "method": "mc3kd"}
    assert "24 rows without labels: soft targets alone" in run("distill", **given)
    assert "already complete" in run("distill", "--resume", **given)
    report = report_of(tmp_path / "out")
    assert report["teacher"] == {"agreement": 1.0} and report["labels"] == ["bad", "good"]
    both = [told(model, folder / "held-out.txt", tmp_path / f"{i}.jsonl", max_length=16)
            for i, model in enumerate((folder / "teacher", tmp_path / "out/student"))]  # fmt: skip
    same = [one["label"] == other["label"] for one, other in zip(*both, strict=True)]
    assert report["student"]["agreement"] == pytest.approx(np.mean(same))
    assert losses_of(tmp_path / "out").get("task", 0) == 0


@pytest.mark.parametrize("teacher", ["scorer", "tagger-of-labels", "teacher"])
def test_evaluation_of_other_labels(alone, folder, teacher):
    """Numbers and several labels for a text, by agreement; classes by labels."""
    given = {**alone, "teacher": folder / teacher}
    if teacher == "tagger-of-labels":
        given["task"] = "multi-label"
    if teacher != "teacher":
        given["eval"] = folder / "held-out.txt"
    found, models = made(**given)
    taught = judge(found, models.teacher, teacher=True).scores
    learned = judge(found, models.student).scores
    metric = "accuracy" if teacher == "teacher" else "agreement"
    assert taught.keys() == learned.keys() == {metric}
    assert metric == "accuracy" or taught[metric] == pytest.approx(1.0)
    assert -1 <= learned[metric] <= 1


def test_labels_of_few_rows_are_evaluated_as_often_as_other_methods(alone, folder, tmp_path):
    """An epoch of the labelled rows alone is one step, and each was followed by an evaluation."""
    few = {"unlabelled": None, "train": folder / "train.tsv", "labelled": 8, "steps": 12}
    run("distill", **{**alone, **few, "epochs": None, "method": "labels"})
    assert [entry["step"] for entry in report_of(tmp_path / "out")["history"]] == [6, 12]
