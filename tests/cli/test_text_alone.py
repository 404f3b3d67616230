"""Distillation of a classifier from text alone: a finished teacher's soft targets, no label."""

import numpy as np
import pytest

from tests.support.runs import losses_of, report_of
from tests.support.tiny import make_teacher, run, usual, write_tsv
from tests.train.tasks.through import told, write_lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("alone")
    named = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    make_teacher(path / "teacher", **named)
    make_teacher(path / "scorer", labels=1)
    make_teacher(path / "tagger-of-labels", problem_type="multi_label_classification")
    write_lines(path / "texts.txt")
    write_lines(path / "held-out.txt", 12, 1)
    for name, rows, seed in (("dev", 12, 1), ("train", 40, 0)):
        write_tsv(path / f"{name}.tsv", rows, seed, label=lambda y: ["bad", "good"][y])
    return path


@pytest.fixture
def distill(folder, tmp_path):
    def distill(**options):
        alone = {"train": None, "unlabelled": folder / "texts.txt", "method": "soft_targets"}
        return run("distill", **usual(folder, tmp_path, **{**alone, **options}))

    return distill


@pytest.mark.parametrize("method", ["mc3kd", "knn", "fcd"])
def test_evaluation_by_the_agreement_with_the_teacher(distill, folder, tmp_path, method):
    said = distill(eval=folder / "held-out.txt", method=method)
    assert "24 rows without labels: soft targets alone" in said
    report = report_of(tmp_path / "out")
    assert report["teacher"] == {"agreement": 1.0} and report["labels"] == ["bad", "good"]
    both = [told(model, folder / "held-out.txt", tmp_path / f"{i}.jsonl", max_length=16)
            for i, model in enumerate((folder / "teacher", tmp_path / "out/student"))]  # fmt: skip
    same = [one["label"] == other["label"] for one, other in zip(*both, strict=True)]
    assert report["student"]["agreement"] == pytest.approx(np.mean(same))
    assert losses_of(tmp_path / "out").get("task", 0) == 0


def test_the_same_student_as_from_rows_whose_labels_count_nothing(distill, tmp_path):
    """alpha=1 leaves the task term out: labels or none, the losses are the same."""
    rows = write_tsv(tmp_path / "rows.tsv", 24, label=lambda y: ["bad", "good"][y])
    distill(set="alpha=1", out=tmp_path / "alone")
    distill(set="alpha=1", unlabelled=None, train=rows, out=tmp_path / "rows")
    one, other = (losses_of(tmp_path / name)["soft"] for name in ("alone", "rows"))
    assert one == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("teacher", ["scorer", "tagger-of-labels", "teacher"])
def test_evaluation_of_other_labels(distill, folder, tmp_path, teacher):
    """Numbers and several labels for a text, by agreement; classes by labels."""
    given = {"teacher": folder / teacher, "eval": folder / "held-out.txt"}
    given["task"] = "multi-label" if teacher == "tagger-of-labels" else None
    if teacher == "teacher":
        distill()
        assert set(report_of(tmp_path / "out")["student"]) == {"accuracy"}
        assert "already complete" in distill(resume=True)
    else:
        distill(**given)
        report = report_of(tmp_path / "out")
        assert report["teacher"]["agreement"] == pytest.approx(1.0)
        assert -1 <= report["student"]["agreement"] <= 1


def test_mistakes(distill, folder):
    held_out = {"eval": folder / "held-out.txt"}
    for options, words in (
        ({"eval": None}, "--eval is missing"),
        ({**held_out, "finetune_teacher": 1}, "text alone needs a teacher with a finished head"),
        ({**held_out, "metric": "f1"}, "no column 'label', which --metric f1 compares"),
        ({**held_out, "method": "labels"}, "--unlabelled and --method labels exclude each other"),
    ):
        assert words in distill(**options, expect=2)


def test_labels_of_few_rows_are_evaluated_as_often_as_other_methods(distill, folder, tmp_path):
    """An epoch of the labelled rows alone is one step, and each was followed by an evaluation."""
    few = {"unlabelled": None, "train": folder / "train.tsv", "labelled": 8, "steps": 12}
    for method in ("labels", "soft_targets"):
        distill(**few, epochs=None, method=method, out=tmp_path / method)
        history = report_of(tmp_path / method)["history"]
        assert [entry["step"] for entry in history] == [6, 12], method
