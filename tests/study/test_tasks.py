"""Studies of tasks without one class for each row, and of metrics to minimise."""

import csv
import dataclasses
import json

import pytest
from transformers import BertConfig, BertForMaskedLM
from typer.testing import CliRunner

from fastkd.cli.main import app
from fastkd.study import spec, study_report
from fastkd.study.statistics import ABOVE, ALIKE, BELOW, gap_recovered, summarize
from fastkd.study.study_settings import StudySettings
from fastkd.train.errors import InputError
from fastkd.train.saving import read_json
from tests.study.test_statistics import study
from tests.study.test_study import study as run_study
from tests.support.tiny import make_teacher
from tests.train.tasks.test_causal_lm import make_decoder, write_text
from tests.train.tasks.test_multi_label import write_jsonl as write_labelled
from tests.train.tasks.test_seq2seq import make_writer, write_pairs
from tests.train.tasks.test_token_classification import write_conll

SHARED = """
teacher = "teacher"
seeds = 2
steps = 2
evaluations = 1
batch_size = 8
student_layers = 2
device = "cpu"
[methods]
labels = {}
fcd = {}
[tasks.one]
max_length = 12
teacher_steps = 2
"""


def make_masker(path):
    """A random masked language model."""
    make_teacher(path, head=False)
    BertForMaskedLM(BertConfig.from_pretrained(path)).save_pretrained(path)


def finished(root, task):
    """Page, rows of summary.csv, files of runs and the teacher's manifest of a tiny study."""
    (root / "spec.toml").write_text(SHARED.replace('"teacher"', f'"{root}/teacher"') + task)
    words = ["study", str(root / "spec.toml"), "--out", str(root / "out")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    out = root / "out"
    rows = {row["variant"]: row for row in csv.DictReader((out / "summary.csv").open())}
    runs = [json.loads(path.read_text()) for path in (out / "runs").glob("*.json")]
    assert len(runs) == 4 and set(rows) == {"labels", "fcd"}
    assert all(run["predictions"] == [] and 0 <= run["rccc"] <= 1 for run in runs)
    assert not [run for run in runs if "intra_class_similarity" in run]
    assert all(row["intra_class_similarity"] == row["rows_low"] == "" for row in rows.values())
    page = (out / "report.md").read_text()
    assert "Classes without" not in page and "same prediction" not in page and "chance" not in page
    assert (out / "forest.png").exists() and (out / "curves.png").exists()
    return page, rows, runs, read_json(next(out.glob("teachers/*/fastkd.json")))


def test_study_of_a_language_model(tmp_path):
    make_decoder(tmp_path / "teacher")
    for i, name in enumerate(("train.txt", "dev.txt")):
        write_text(tmp_path / name, 24, i)
    task = 'task = "causal-lm"\ntrain = "train.txt"\neval = "dev.txt"\n'
    page, rows, runs, teacher = finished(tmp_path, task)
    assert teacher["smaller"] == ["bits_per_byte", "perplexity"] and teacher["classes"] is None
    assert rows["fcd"]["metric"] == "perplexity" and rows["fcd"]["lower_is_better"] == "True"
    assert "Teacher: perplexity (lower is better)" in page
    assert set(runs[0]["scores"]) == {"perplexity", "bits_per_byte"}
    with pytest.raises(InputError, match=r"labelled: .*causal-lm have no labels"):
        spec_path = tmp_path / "spec.toml"
        spec_path.write_text(spec_path.read_text() + "labelled = 4\n")
        run_study(spec_path, tmp_path / "few")
    spec_path.write_text(spec_path.read_text().replace("labelled = 4", ""))
    with pytest.raises(InputError, match="knn on one: labels must be one per sample"):
        run_study(spec_path, tmp_path / "knn", methods="knn")
    assert not list((tmp_path / "knn").glob("teachers/*"))


def test_study_of_token_classification(tmp_path):
    make_teacher(tmp_path / "teacher", head=False)
    for i, name in enumerate(("train.conll", "dev.conll")):
        write_conll(tmp_path / name, 24, i)
    task = (
        'task = "token-classification"\ntrain = "train.conll"\neval = "dev.conll"\nlabelled = 3\n'
    )
    page, rows, runs, teacher = finished(tmp_path, task)
    assert teacher["classes"] == ["B-FILM", "B-GOOD", "I-GOOD", "O"] and teacher["smaller"] == []
    assert teacher["rows_of_classes"] is None and "fewer than the classes" not in page
    assert rows["fcd"]["metric"] == "f1" and "lower is better" not in page
    assert set(runs[0]["scores"]) == {"f1", "precision", "recall"}


OTHERS = {
    "masked-lm": (make_masker, write_text, "txt"),
    "multi-label": (lambda path: make_teacher(path, head=False), write_labelled, "jsonl"),
    "seq2seq": (make_writer, write_pairs, "jsonl"),
}


@pytest.mark.parametrize("task", OTHERS)
def test_study_of_other_tasks_with_a_cache_and_without(task, tmp_path):
    make, write, suffix = OTHERS[task]
    make(tmp_path / "teacher")
    for i, name in enumerate(("train", "dev")):
        write(tmp_path / f"{name}.{suffix}", 20, i)
    shared = SHARED.replace('"teacher"', f'"{tmp_path}/teacher"').replace("labels = {}", "")
    shared += f'task = "{task}"\ntrain = "train.{suffix}"\neval = "dev.{suffix}"\n'
    if task == "seq2seq":
        shared = shared.replace("student_layers = 2", "student_layers = 1") + 'metric = "loss"\n'
    found = []
    for cache in ("true", "false"):
        spec_path = tmp_path / f"{cache}.toml"
        spec_path.write_text(f"cache = {cache}\n{shared}")
        run_study(spec_path, tmp_path / cache, seeds=1)
        (path,) = (tmp_path / cache / "runs").glob("*.json")
        found.append(json.loads(path.read_text()))
        page = (tmp_path / cache / "report.md").read_text()
        assert "Classes without" not in page
        cached = cache == "true" and task != "masked-lm"  # whose rows each epoch masks anew
        assert found[-1]["measured"]["cached"] == cached
        assert f"seconds {'exclude' if cached else 'include'} the teacher's" in page
    one, other = found
    assert one["scores"] == pytest.approx(other["scores"], rel=1e-5) and 0 < one["rccc"] <= 1
    assert read_json(next(tmp_path.glob("true/teachers/*/fastkd.json")))["rows_of_classes"] is None


PERPLEXITIES = {
    "labels": (28.5, 28.9, 28.4),
    "lower": (23.7, 24.2, 23.5),
    "higher": (31.5, 31.8, 31.3),
    "alike": (28.4, 29.1, 28.3),
}
TEACHER = {
    "scores": {"perplexity": 20.0},
    "metrics": ["perplexity"],
    "smaller": ["perplexity"],
    "labels": [],
    "predictions": [],
    "classes": None,
    "rows": {"train": 10, "held out": 20},
}


@pytest.fixture
def table():
    """A study of perplexity with a paper's table, its runs and its summaries."""
    paper = {
        "title": "Perplexity", "columns": ["x"], "lower_is_better": True,
        "rows": {"labels": [28.5], "lower": [23.7], "higher": [27.0], "alike": [28.0]},
    }  # fmt: skip
    made = dataclasses.replace(study(PERPLEXITIES, 3), paper=paper)
    measured = {"seconds": 1.0, "peak_bytes": None}
    results = {
        ("t", name, seed): {
            "scores": {"perplexity": value}, "predictions": [], "rccc": 0.5, "measured": measured,
            "history": [{"step": 1, "scores": {"perplexity": value}}],
        }
        for name, values in PERPLEXITIES.items()
        for seed, value in enumerate(values)
    }  # fmt: skip
    return made, results, summarize(made, results, {"t": TEACHER})


def test_lower_perplexity_is_the_better_verdict(table):
    _, _, (summary,) = table
    rows = {row.variant: row for row in summary.rows}
    assert rows["lower"].verdict == BELOW and rows["lower"].quality == "better"
    assert rows["higher"].verdict == ABOVE and rows["higher"].quality == "worse"
    assert rows["alike"].verdict == ALIKE and rows["alike"].quality == ""
    assert rows["lower"].difference.mean == pytest.approx(-4.8)
    assert rows["lower"].rows_interval is None and not rows["lower"].constant
    assert rows["lower"].recovered.mean == pytest.approx(4.8 / 8.6, abs=0.01)
    assert rows["higher"].recovered.mean < 0
    text = study_report.findings(summary)
    assert "Below the baseline beyond noise: lower. Above it beyond noise: higher." in text
    assert "below (better)" in study_report.cells(rows["lower"])
    assert "above (worse)" in study_report.cells(rows["higher"])
    # None if the gap is small relative to the baseline, or if the teacher is not ahead.
    assert gap_recovered([(20.0, 20.1)], 20.0, True) is None
    assert gap_recovered([(20.0, 20.0)], 25.0, True) is None


def test_percentage_metrics_are_not_scaled_again(table, monkeypatch):
    made, results, _ = table
    percent = {**TEACHER, "smaller": [], "percent": ["perplexity"]}
    (summary,) = summarize(made, results, {"t": percent})
    monkeypatch.setattr(study_report, "_png", lambda figure: figure)
    (ax,) = study_report._forest(made, [summary], results).axes
    dots = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "o"]
    assert dots[0] == pytest.approx(-4.8)
    assert study_report.beside_paper(made, [summary])["rows"][1] == ["lower", "23.7", "23.8"]
    assert gap_recovered([(60.0, 60.5)], 61.0, percent=True) is None


def test_pictures_and_the_papers_table_of_a_metric_to_minimise(table, monkeypatch):
    made, results, summaries = table
    monkeypatch.setattr(study_report, "_png", lambda figure: figure)
    (ax,) = study_report._forest(made, summaries, results).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["higher", "alike", "lower"]
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    assert [line.get_color() for line in dots][::2] == ["#b42318", "#1a7f37"]
    assert dots[-1].get_xdata()[0] == pytest.approx(-4.8)  # not in percentage points
    assert ax.get_xlabel() == "perplexity (lower is better) above labels"
    (ax,) = study_report._curves(made, summaries, results).axes
    assert ax.get_title() == "t: perplexity (lower is better)"
    beside = study_report.beside_paper(made, summaries)
    assert beside["rows"][1] == ["lower", "23.7", "23.80"]
    lower, higher, alike = beside["order"]
    assert lower.startswith("t: lower is below labels in the paper (-4.8); here the same, beyond")
    assert higher.endswith("(-1.5); here the opposite, beyond noise (+2.93)")
    assert alike.endswith(f"(-0.5); here {ALIKE} (+0.00)")


def test_tasks_option_takes_the_task_from_the_name(tmp_path):
    tasks = {"causal-lm": "a.txt,b.txt", "reviews": "a.tsv,b.tsv", "rte": "hub", "chat": "hub"}
    for name in ("a.txt", "b.txt", "a.tsv", "b.tsv"):
        (tmp_path / name).touch()
    tasks = {name: value.replace("a.", f"{tmp_path}/a.").replace(",b.", f",{tmp_path}/b.")
             for name, value in tasks.items()}  # fmt: skip
    found = spec.read(StudySettings(tasks=tasks)).tasks
    assert [task.source.task for task in found] == ["causal-lm", None, "rte", None]
    assert found[-1].source.data == "chat"


def test_metric_option_selects_a_metric_to_minimise(tmp_path):
    make_teacher(tmp_path / "teacher", head=False)
    for name in ("train.tsv", "dev.tsv"):
        rows = [f"{'good' if i % 3 else 'bad'} film\t{i % 3 / 2}" for i in range(24)]
        (tmp_path / name).write_text("\n".join(["sentence\tlabel", *rows]))
    (tmp_path / "spec.toml").write_text(
        SHARED.replace('"teacher"', f'"{tmp_path}/teacher"')
        + 'train = "train.tsv"\neval = "dev.tsv"\nlabels = "numbers"\nmetric = "mse"\n'
    )
    run_study(tmp_path / "spec.toml", tmp_path / "out", seeds=1)
    (row, _) = csv.DictReader((tmp_path / "out" / "summary.csv").open())
    assert row["metric"] == "mse" and row["lower_is_better"] == "True"
