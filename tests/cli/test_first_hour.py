"""Errors of a new user's first hour: each is true and names the remedy."""

import json
import shutil

import pytest

from fastkd.cli import main
from fastkd.train import packaged_teacher
from tests.support.tiny import make_teacher, run, sentences, write_tsv


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("first")
    make_teacher(path / "teacher")
    write_tsv(path / "train.tsv", 16)
    write_tsv(path / "dev.tsv", 8, 1)
    return path


def distill(folder, expect=0, **options):
    usual = {"train": folder / "train.tsv", "eval": folder / "dev.tsv", "method": "labels"}
    usual |= {"teacher": folder / "teacher", "device": "cpu", "epochs": 1}
    return run("distill", **{**usual, **options}, expect=expect)


def test_an_empty_label_says_how_many_and_the_way_out(folder, tmp_path):
    text = (folder / "train.tsv").read_text().replace("\t1\n", "\t\n")
    (tmp_path / "a.tsv").write_text(text)
    error = distill(folder, train=tmp_path / "a.tsv", out=tmp_path / "out", expect=2)
    assert "the label is empty, as in 8 rows; write -100" in error and "--unlabelled" in error
    error = distill(folder, accumulate=9, batch_size=8, out=tmp_path / "a", expect=2)
    assert "--accumulate 9: a step of 8 rows" in error


def test_resuming_where_there_is_no_run(folder, tmp_path):
    error = distill(folder, resume=True, out=tmp_path / "mistyped", expect=2)
    assert f"--resume: --out {tmp_path / 'mistyped'} does not exist" in error
    assert not (tmp_path / "mistyped").exists()
    (tmp_path / "out").mkdir()
    assert "no run to resume; this one begins" in distill(folder, resume=True, out=tmp_path / "out")


def test_f1_of_three_classes_says_what_it_is(folder, tmp_path):
    """And a student that is the teacher."""
    three, teacher = tmp_path / "three.tsv", make_teacher(tmp_path / "teacher", labels=3)
    rows = [f"{text}\t{i % 3}" for i, (text, _) in enumerate(sentences(12, 0))]
    three.write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    said = distill(
        folder, teacher=teacher, train=three, eval=three, metric="f1", out=tmp_path / "b",
        student=teacher,
    )  # fmt: skip
    assert "f1 is the mean of those of all classes" in said
    assert "warning: --student is the teacher" in said


def test_the_packaged_teacher(folder, tmp_path, monkeypatch):
    package = tmp_path / "package"
    shutil.copytree(folder / "teacher", package / "model")
    monkeypatch.setattr(packaged_teacher, "teacher_path", lambda: package / "model")
    distill(folder, teacher="packaged", out=tmp_path / "out")
    report = json.loads((tmp_path / "out/student/fastkd.json").read_text())
    assert report["settings"]["teacher"] == str(package / "model")
    run("cache", teacher="packaged", train=folder / "train.tsv", eval=folder / "dev.tsv",
        method="soft_targets", device="cpu", out=tmp_path / "cache")  # fmt: skip


def test_accelerate_that_starts_one_process(folder, tmp_path, monkeypatch):
    for name, value in (("ACCELERATE_USE_CPU", "True"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    error = distill(folder, out=tmp_path / "out", expect=2)
    assert "accelerate launch has started one process" in error and "torchrun" in error


def test_columns_are_checked_before_anything_is_imported(folder, tmp_path):
    (tmp_path / "a.csv").write_text("one;two\nx;y\n")
    for options, words in (
        ({"text_column": "review"}, "no column 'review' (--text-column); known: sentence, label"),
        ({"label_column": "stars"}, "no column 'stars' (--label-column)"),
        ({"train": tmp_path / "a.csv"}, "its columns are separated by ';'"),
        ({"unlabelled": tmp_path / "none.txt"}, "--unlabelled "),
        ({"task": "multi-label", "label_column": "label,x"}, "no column 'x' (--label-column)"),
        ({"teacher": "./none"}, "--teacher ./none: no such directory"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(main, "require", lambda *names: pytest.fail("imported"))
            assert words in distill(folder, **options, out=tmp_path / "out", expect=2)
