"""Distillation of a classifier from text alone: a finished teacher's soft targets, no label."""

import json

import numpy as np
import pytest

from tests.support.tiny import make_teacher, run, sentences, write_tsv


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("alone")
    named = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    make_teacher(path / "teacher", **named)
    make_teacher(path / "scorer", labels=1)
    make_teacher(path / "tagger-of-labels", problem_type="multi_label_classification")
    (path / "texts.txt").write_text("\n".join(text for text, _ in sentences(24, 0)) + "\n")
    (path / "held-out.txt").write_text("\n".join(text for text, _ in sentences(12, 1)) + "\n")
    write_tsv(path / "dev.tsv", 12, 1, label=lambda y: ["bad", "good"][y])
    return path


def distill(folder, expect=0, **options):
    usual = {"teacher": folder / "teacher", "unlabelled": folder / "texts.txt", "device": "cpu"}
    usual |= {"epochs": 1, "batch_size": 8, "method": "soft_targets"}
    return run("distill", **{**usual, **options}, expect=expect)


def predicted(model, data, out):
    run("predict", model=model, data=data, out=out, device="cpu", max_length=16)
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("method", ["mc3kd", "knn", "fcd"])
def test_evaluation_by_the_agreement_with_the_teacher(folder, tmp_path, method):
    said = distill(folder, eval=folder / "held-out.txt", method=method, out=tmp_path / "out",
                   learning_rate=1e-3)  # fmt: skip
    assert "24 rows without labels: soft targets alone" in said
    student = tmp_path / "out/student"
    report = json.loads((student / "fastkd.json").read_text())
    assert report["teacher"] == {"agreement": 1.0}
    assert report["labels"] == ["bad", "good"]
    models = {"a": folder / "teacher", "b": student}
    both = [predicted(model, folder / "held-out.txt", tmp_path / f"{name}.jsonl")
            for name, model in models.items()]  # fmt: skip
    same = [one["label"] == other["label"] for one, other in zip(*both, strict=True)]
    assert report["student"]["agreement"] == pytest.approx(np.mean(same))
    assert all(x["task"] == 0 for x in [report["history"][-1]["losses"]] if "task" in x)


def test_the_same_student_as_from_rows_whose_labels_count_nothing(folder, tmp_path):
    """alpha=1 leaves the task term out: labels or none, the losses are the same."""
    lines = (folder / "texts.txt").read_text().splitlines()
    rows = [f"{text}\t{'bad' if i % 2 else 'good'}" for i, text in enumerate(lines)]
    (tmp_path / "rows.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    options = {"eval": folder / "dev.tsv", "set": "alpha=1"}
    distill(folder, **options, out=tmp_path / "alone")
    distill(folder, **options, unlabelled=None, train=tmp_path / "rows.tsv", out=tmp_path / "rows")
    one, other = (
        json.loads((tmp_path / name / "student/fastkd.json").read_text())["history"][-1]["losses"]
        for name in ("alone", "rows")
    )
    assert one["soft"] == pytest.approx(other["soft"], rel=1e-6)


@pytest.mark.parametrize("teacher", ["scorer", "tagger-of-labels", "teacher"])
def test_evaluation_of_other_labels(folder, tmp_path, teacher):
    """Numbers and several labels for a text, by agreement; classes by labels."""
    rows = folder / ("dev.tsv" if teacher == "teacher" else "held-out.txt")
    given = {"teacher": folder / teacher, "eval": rows, "out": tmp_path / "out"}
    given["task"] = "multi-label" if teacher == "tagger-of-labels" else None
    distill(folder, **given)
    report = json.loads((tmp_path / "out/student/fastkd.json").read_text())
    if teacher == "teacher":
        assert set(report["student"]) == {"accuracy"}
        assert "already complete" in distill(folder, **given, resume=True)
    else:
        assert report["teacher"]["agreement"] == pytest.approx(1.0)
        assert -1 <= report["student"]["agreement"] <= 1


def test_mistakes(folder, tmp_path):
    held_out = {"eval": folder / "held-out.txt"}
    for options, words in (
        ({}, "--eval is missing"),
        ({**held_out, "finetune_teacher": 1}, "text alone needs a teacher with a finished head"),
        ({**held_out, "metric": "f1"}, "no column 'label', which --metric f1 compares"),
        ({**held_out, "method": "labels"}, "--unlabelled and --method labels exclude each other"),
    ):
        assert words in distill(folder, **options, out=tmp_path / "out", expect=2)
    words = {"model": folder / "teacher", "data": folder / "dev.tsv", "metric": "agreement"}
    error = run("evaluate", **words, expect=2)
    assert "agreement compares with the teacher, and there is none" in error


def test_labels_of_few_rows_are_evaluated_as_often_as_other_methods(folder, tmp_path):
    """An epoch of the labelled rows alone is one step, and each was followed by an evaluation."""
    write_tsv(tmp_path / "train.tsv", 40, 0, label=lambda y: ["bad", "good"][y])
    found = {}
    for method in ("labels", "soft_targets"):
        rows = {"train": tmp_path / "train.tsv", "eval": folder / "dev.tsv", "labelled": 8}
        budget = {"steps": 12, "epochs": None}
        distill(folder, unlabelled=None, **rows, **budget, method=method, out=tmp_path / method)
        report = json.loads((tmp_path / method / "student/fastkd.json").read_text())
        found[method] = [entry["step"] for entry in report["history"]]
    assert found["labels"] == found["soft_targets"] == [6, 12]
