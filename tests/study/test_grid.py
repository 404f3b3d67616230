"""A grid of `fastkd distill` runs, and the papers' tables."""

import csv
import dataclasses
import functools
import json
import pickle
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from fastkd.study import budget, grid, grid_report, grid_runs
from fastkd.study.budget import Search
from fastkd.study.grid import StudySettings
from fastkd.study.grid_runs import GridRuns, write_result
from fastkd.train.config import Config
from fastkd.train.distillation import run_distillation
from fastkd.train.errors import RunFailed
from fastkd.train.options import read_options_file
from fastkd.train.progress import Display
from tests.support.draw import FIRST
from tests.support.runs import once, stop_at, terminate
from tests.support.tiny import make_teacher, run, sentences, write_tsv
from tests.train.tasks.test_two_tokenizers import byte_pairs
from tests.train.tasks.through import (
    make_chat_teacher,
    make_decoder,
    write_chats,
    write_squad,
    write_text,
)

FILE = """
title = "Tiny"
seeds = 2
epochs = 4
device = "cpu"
student_layers = [1, 2]
finetune_teacher = 1
teacher = "teacher"
max_length = 16
select = "dev"
[grid]
learning_rate = [1e-4, 1e-3]
[methods]
labels = {}
fcd = {alpha = [0.1, 1.0]}
[tasks.own]
train = "train.tsv"
eval = "dev.tsv"
"""
#: Columns of GLUE's own files that are read; CoLA's have no names.
COLUMNS = {
    **dict.fromkeys(("rte", "stsb", "mnli"), ("sentence1", "sentence2")), "sst2": ("sentence",),
    "mrpc": ("#1 String", "#2 String"), "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
}  # fmt: skip
LABELS = {
    "rte": ("label", "not_entailment", "entailment"), "stsb": ("score", "1.5", "4.0"),
    "qnli": ("label", "not_entailment", "entailment"), "mrpc": ("Quality", "0", "1"),
    "mnli": ("gold_label", "contradiction", "entailment", "neutral"),
    "qqp": ("is_duplicate", "0", "1"),
}  # fmt: skip


def write_glue(root):
    """Files as in GLUE's own download; two steps of 32 rows are an epoch."""
    for task in grid.GLUE_TASKS:
        files = grid.official(root, task).values()
        next(iter(files)).parent.mkdir(parents=True)
        heading, *labels = LABELS.get(task, ("label", "0", "1"))
        for seed, path in enumerate(files):
            lines = [(*COLUMNS[task], heading)] if task in COLUMNS else []
            for i, (text, _) in enumerate(sentences(12 if seed else 64, seed)):
                label = labels[i % len(labels)]
                texts = [text] * len(COLUMNS.get(task, ()))
                lines.append((*texts, label) if texts else ("gj04", label, "", text))
            path.write_text("".join("\t".join(x) + "\n" for x in lines))
    assert (root / "SST-2/dev.tsv").exists() and (root / "MNLI/dev_mismatched.tsv").exists()
    return root


@pytest.fixture
def root(tmp_path):
    (tmp_path / "teacher").mkdir()
    (tmp_path / "grid.toml").write_text(FILE)
    return tmp_path


@pytest.fixture
def done(finished):
    return GridRuns(grid.read(StudySettings(spec=finished / "spec.toml")), finished / "out")


def test_cells_of_a_file(root, tmp_path):
    found = grid.read(StudySettings(spec=root / "grid.toml"))
    assert found.variants == [
        f"{name}, student_layers={n}" for name in ("labels", "fcd") for n in (1, 2)
    ]
    assert len(found.cells) == 2 * 2 * (2 + 2 * 2)
    cell = found.cells[-1]
    assert cell.values == {"learning_rate": 1e-3, "--set alpha": 1.0} and cell.seed == 1
    assert cell.options == {
        "num_train_epochs": 4, "device_name": "cpu", "student_layers": 2, "max_length": 16,
        "teacher": str(root / "teacher"), "learning_rate": 1e-3, "method": "fcd", "seed": 1,
        "options": {"alpha": 1.0}, "train": root / "train.tsv", "evals": root / "dev.tsv",
        "finetune_teacher": 1,
    }  # fmt: skip
    (tmp_path / "all.toml").write_text(FILE.replace('"dev"', '"none"'))
    every = grid.read(StudySettings(spec=tmp_path / "all.toml"))
    assert "fcd, student_layers=2, learning_rate=0.001, alpha=1.0" in every.variants
    short = grid.read(StudySettings(spec=root / "grid.toml", steps=3, seeds=1))
    assert [c.options["training_steps"] for c in short.cells] == [3] * 12


def test_a_grid_equals_the_same_run_by_hand(done, tmp_path):
    """The runs share one fine-tuned teacher, equal to the command's."""
    cells, out = done.grid.cells, done.out
    # Of seed 0, as the shared teacher.
    report = run_distillation(Config.of(**cells[4].options, out=tmp_path / "hand"))
    result = done.result(cells[4])
    assert (result["teacher"], result["scores"]) == (report["teacher"], report["student"])
    assert result["best"] == report["best"]["epoch"]
    assert result["history"][0]["losses"] == report["history"][0]["losses"]
    assert len(list((out / "teachers").glob("*/teacher"))) == 1
    rows = list(csv.DictReader((out / "runs.csv").open()))
    assert len(rows) == len(cells) == 6 and rows[-1]["values"] == "alpha=1.0"
    assert float(rows[-1]["accuracy"]) == done.result(cells[-1])["scores"]["accuracy"]
    page = (out / "report.md").read_text()
    for part in ("| mean over tasks |", "compared with labels.", "## one"):
        assert part in page


@pytest.mark.usefixtures("without_pictures")
def test_a_stopped_study_goes_on_to_the_same_runs(finished, done, tmp_path, monkeypatch):
    given = {"out": tmp_path / "out", "seeds": 1, "methods": "labels"}
    with monkeypatch.context() as patch:
        stop_at(patch, 3, terminate)  # of the student: the teacher has two steps
        stopped = run("study", finished / "spec.toml", expect=143, **given)
    assert "is saved, the same command goes on" in stopped and "--resume" not in stopped
    assert list((tmp_path / "out" / "runs").glob("*/unfinished"))
    run("study", finished / "spec.toml", **given)
    assert not list((tmp_path / "out" / "runs").glob("*/"))
    again, cell = GridRuns(done.grid, tmp_path / "out"), done.cells[0]
    for name in ("scores", "teacher"):
        assert again.result(cell)[name] == done.result(cell)[name]


def test_the_best_cell_of_a_metric_to_minimise(root, tmp_path):
    found = grid.read(StudySettings(spec=root / "grid.toml", seeds=1))
    cells = [cell for cell in found.cells if cell.variant == found.variants[0]]
    for lower, best in (([], 2.0), (["perplexity"], 1.0)):
        runs = GridRuns(found, tmp_path / str(best))
        (runs.out / "runs").mkdir(parents=True)
        for cell, value in zip(cells, (1.0, 2.0), strict=True):
            result = {"options": {}, "scores": {"perplexity": value}, "lower_is_better": lower}
            write_result(runs.path(cell), result)
        (kept,) = grid_report.best_cells(runs).values()
        assert kept["scores"] == {"perplexity": best}


@pytest.mark.usefixtures("without_pictures")
def test_workers_train_what_is_missing_or_changed(finished, done, tmp_path, monkeypatch):
    """The work of a process is done here, when it starts; of one that died, nowhere.

    Real processes share the runs of a study in tests/cli/test_processes.py.
    """
    out = shutil.copytree(done.out, tmp_path / "out")
    runs = GridRuns(done.grid, out)
    changed, damaged, *kept = map(runs.path, runs.cells)
    edited = json.loads(changed.read_text())
    edited["scores"]["accuracy"] = 0.999
    changed.write_text(json.dumps(edited))
    damaged.write_text(damaged.read_text()[:100])
    assert [runs.done(cell) for cell in runs.cells[:3]] == [False, False, True]
    times = [path.stat().st_mtime_ns for path in kept]

    def process(target, args, daemon):
        work = functools.partial(target, *pickle.loads(pickle.dumps(args)))
        return SimpleNamespace(exitcode=code, is_alive=bool, start=bool if code else work)

    monkeypatch.setattr(
        grid_runs.multiprocessing, "get_context", {"spawn": SimpleNamespace(Process=process)}.get
    )
    given, code = {"out": out, "jobs": 2}, -9
    assert "a process died; the same command" in run(
        "study", finished / "spec.toml", expect=1, **given
    )
    assert "2 runs are not finished" in (out / "report.md").read_text()
    code = 0
    output = run("study", finished / "spec.toml", **given)
    assert changed.name in output and damaged.name in output and kept[0].name not in output
    assert [path.stat().st_mtime_ns for path in kept] == times
    for cell in runs.cells[:2]:
        for name in ("scores", "teacher", "predictions"):
            assert runs.result(cell)[name] == done.result(cell)[name]
    cell = done.cells[0]  # whose teacher has no head
    cell = dataclasses.replace(cell, options={**cell.options, "finetune_teacher": 0})
    bare = dataclasses.replace(done.grid, cells=(cell,))
    (tmp_path / "other" / "runs").mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"Error: labels on one: .*finetune_teacher"):
        grid_runs._worker(bare, tmp_path / "other", torch.get_num_threads(), Display)


# What is searched within some hours

CHANGES = {
    "[1, 2]": "1", "epochs = 4": "steps = 40", "finetune_teacher = 1\n": "",
    "[1e-4, 1e-3]": "[1e-4, 2e-4, 5e-4, 1e-3]", "[0.1, 1.0]": "[0.1, 0.2, 0.5, 1.0]",
}  # fmt: skip


@pytest.fixture
def searched(root):
    """The file with four values in each list."""
    text = FILE
    for old, new in CHANGES.items():
        assert old in text
        text = text.replace(old, new, 1)
    (root / "grid.toml").write_text(text)
    return root / "grid.toml"


@pytest.fixture
def study(searched):
    return grid.read(StudySettings(spec=searched))


@pytest.mark.parametrize(("limit", "expected"), [
    (1600, None),  # 2 seeds of 16 and 4 candidates, 40 seconds each
    (1599, Search(16, 2)),  # a sixteenth of 16, a quarter of 4, then 2 seeds; labels: of 4
    (279, Search(4, 2)),
    (239, Search(1, 2)),
    (159, Search(1, 1)),
    (40, Search(1, 1, 0.5)),
])  # fmt: skip
def test_the_widest_search_that_fits(study, limit, expected):
    arms = budget.arms_of(study)
    assert [len(cells) for cells in arms.values()] == [4, 16]
    seconds = dict.fromkeys(arms, 40.0)
    assert budget.plan(study, seconds, limit) == expected
    assert Search(16, 2).rungs(16) == [(16, 1 / 16), (4, 1 / 4)]
    assert Search(16, 2).cost(16, 40.0) + Search(16, 2).cost(4, 40.0) == 280


@pytest.fixture
def trained(monkeypatch):
    """Steps of the runs of each training, whose scores rise with alpha, learning rate and steps."""
    found = []

    def train(self, jobs):
        (self.out / "runs").mkdir(parents=True, exist_ok=True)
        found.append([cell.options.get("training_steps") for cell in self.grid.cells])
        for cell in self.grid.cells:
            score = cell.options["learning_rate"] + cell.options["options"].get("alpha", 0)
            result = {"scores": {"accuracy": score}, "lower_is_better": []}
            write_result(self.path(cell), result)
        return True

    monkeypatch.setattr(GridRuns, "train", train)
    monkeypatch.setattr(GridRuns, "steps", lambda self, cell: (40, 1.0))
    return found


def test_the_best_quarter_goes_on(study, trained, tmp_path, monkeypatch):
    said, display = [], Display()
    display.say = said.append
    found = budget.searched(GridRuns(study, tmp_path, display), 1500 / 3600, 1).grid
    assert trained == [[10] * 4 + [2] * 16, [10] * 4]
    assert [(c.variant, c.seed, c.options["training_steps"]) for c in found.cells] == [
        ("labels", 0, 40), ("labels", 1, 40), ("fcd", 0, 40), ("fcd", 1, 40)
    ]  # fmt: skip
    assert found.cells[-1].values == {"learning_rate": 1e-3, "--set alpha": 1.0}
    assert found.notes[1] == (
        "fcd on own: 16 of 16 values searched, best learning_rate=0.001, alpha=1.0."
    )
    assert said[1].startswith("all 40 runs take about 0.44 hours; these 0.078: at most 16 values")
    monkeypatch.setattr(GridRuns, "train", lambda self, jobs: False)
    with pytest.raises(RunFailed, match="a process died; the same command"):
        budget.searched(GridRuns(study, tmp_path), 1500 / 3600, 1)


def test_the_first_values_and_a_small_budget(searched, trained, tmp_path, monkeypatch):
    first = grid.read(StudySettings(spec=searched, grid="first"))
    assert len(first.cells) == 4 and first.cells[-1].options["options"] == {"alpha": 0.1}
    for name in ("train.tsv", "dev.tsv"):
        write_tsv(tmp_path / name)
    written = []
    monkeypatch.setattr(GridRuns, "check", bool)
    monkeypatch.setattr(grid_report, "write", lambda runs, out: written.append(runs.cells) or [])
    small = {"budget": 1e-15, "grid": "first", "methods": "labels"}
    output = run("study", searched, out=tmp_path / "out", **small)
    assert "then 1 seed with 0% of the steps" in output
    assert trained == [[1]] and [len(cells) for cells in written] == [1]
    assert "labels on own" not in output  # nothing was searched


# The plan of each table: variants, tasks, seeds, and options, typed from the papers.
GLUE8 = {"sst2", "mnli", "qnli", "qqp", "rte", "stsb", "mrpc", "cola"}
FCD_LR, KNN_LR = {1e-5, 2e-5, 5e-6}, {1e-5, 3e-5, 5e-5}
LRC_LR, MC_LR, LRKD_LR = {5e-5, 1e-4, 3e-4}, {2e-5, 3e-5, 5e-5}, {2e-5, 3e-5, 4e-5, 5e-5}
PLANS = {
    "fcd-1": ("fcd", 7, GLUE8, {"learning_rate": FCD_LR, "num_train_epochs": {3, 5, 10},
              "alpha": {0.1, 0.2, 0.4, 1.0}, "beta": {0.1, 0.2, 0.4, 1.0}}),
    "fcd-2": ("fcd", 3, {"mnli", "qqp", "rte"}, {"learning_rate": FCD_LR,
              "distance": {"pearson", "mse", "kl"}}),
    "fcd-3": ("fcd", 3, {"mnli", "cola"}, {"layers": {"top", "uniform", "bottom"}}),
    "fcd-4": ("fcd", 5, {"mnli", "qqp", "cola"}, {"distance": {"kl", "mse"},
              "normalize": {"layer_norm", "none", "softmax"}}),
    "fcd-figure-3": ("fcd", 12, GLUE8, {"teacher": {"bert-base-uncased", "bert-large-uncased",
                     "roberta-base", "roberta-large"}, "alpha": {0.0, 0.1, 0.2, 0.4, 1.0}}),
    "fcd-5": ("fcd", 4, {"squad1", "squad2"}, {"learning_rate": FCD_LR}),
    "knn-figure-2": ("knn", 2, {"mrpc", "rte"}, {"mse": {0.32}, "alpha2": {0.0}}),
    "knn-1": ("knn", 5, GLUE8 - {"cola"}, {"learning_rate": KNN_LR, "k": {1, 2, 3, 5},
              "alpha1": {0.1, 0.01, 0.001}, "finetune_teacher": {5}}),
    "lrc-bert-figure-5": ("lrc_bert", 2, {"mnli"}, {"perturb": {False}}),
    "lrc-bert-1": ("lrc_bert", 5, GLUE8, {"learning_rate": LRC_LR | {1e-5, 2e-5, 3e-5}}),
    "lrc-bert-2": ("lrc_bert", 1, {"mrpc"}, {}),
    "lrc-bert-3": ("lrc_bert", 4, {"mnli", "mrpc", "cola"}, {"learning_rate": LRC_LR}),
    "lrc-bert-4": ("lrc_bert", 2, {"mnli"}, {"first_stage": {0.0}}),
    "mc3kd-2": ("mc3kd", 4, GLUE8, {"learning_rate": MC_LR, "student_layers": {3, 6},
                "teacher": {"bert-base-uncased", "bert-large-uncased"},
                "alpha": {0.2, 0.5, 0.6, 0.7}, "beta": {0.1, 1.0, 10.0}}),
    "mc3kd-3": ("mc3kd", 6, {"cola", "rte", "mrpc", "stsb"}, {"student_layers": {3}}),
    "mc3kd-1": ("mc3kd", 4, {"rte"}, {"student_layers": {6}}),
    "mc3kd-7": ("mc3kd", 12, {"cola", "rte", "mrpc", "stsb"}, {"student_layers": {3, 6}}),
    "mc3kd-4": ("mc3kd", 3, {"cola", "rte", "mrpc", "stsb", "sst2"}, {"student_layers": {3}}),
    "mc3kd-5": ("mc3kd", 3, GLUE8, {"layers": {"uniform"}, "teacher_layers": {"select"}}),
    "mc3kd-6": ("mc3kd", 12, {"cola", "rte", "mrpc", "stsb", "sst2"}, {"student_layers": {3}}),
    "mc3kd-8": ("mc3kd", 1, GLUE8, {"student_layers": {6}, "teacher": {"bert-large-uncased"}}),
    "mc3kd-9": ("mc3kd", 4, {"wikitext"}, {"teacher": {"gpt2-medium", "gpt2-large"},
                "student": {"gpt2"}}),
    "lrkd-1": ("lrkd", 5, GLUE8, {"learning_rate": LRKD_LR, "batch_size": {16, 32},
               "beta": {1.0, 10.0, 15.0}, "temperature": {1.0, 2.0, 3.0, 4.0}}),
    "lrkd-2": ("lrkd", 1, {"mnli", "qnli", "qqp", "sst2"}, {}),
    "lrkd-figure-4": ("lrkd", 4, {"qnli", "sst2"}, {"projection_layers": {1, 2, 3, 4}}),
    "lrkd-3a": ("lrkd", 3, {"qnli", "sst2"}, {"student": {"bert-base-uncased"}}),
    "lrkd-3b": ("lrkd", 3, {"qnli", "sst2"}, {"teacher": {"bert-large-uncased"}}),
    "lrkd-4": ("lrkd", 7, {"dolly"}, {
        "teacher": {"meta-llama/Llama-2-7b-hf"}, "divergence": {"reverse_kl", "adaptive_kl"},
        "method": {"labels", "soft_targets", "lrkd"}, "beta": {1.0, 10.0, 15.0},
        "sample": {1.0}, "max_length": {512}, "max_new_tokens": {256}, "temperature": {1.0}}),
    "lrkd-figure-3": ("lrkd", 11, {"qnli"}, {"projection_layers": {1, 3}, "orthogonal": {False}}),
}  # fmt: skip


def test_the_tables_are_listed():
    assert set(grid.names_of_papers()) == {*PLANS}
    text = run("study", "paper:")
    assert all(f"paper:{name}" in text for name in PLANS)
    assert "no such table" in run("study", "paper:fcd-9", expect=2)


def test_a_table_without_its_corpus(monkeypatch):
    monkeypatch.delenv("WIKIPEDIA")
    error = run("study", "paper:lrc-bert-1", methods="LRC-BERT", expect=2)
    assert "methods.LRC-BERT.stages.wikipedia: train $WIKIPEDIA/train.txt: the environment" in error
    assert "WIKIPEDIA is not set; set it to the files' folder (WIKIPEDIA=DIR fastkd ...)" in error


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_of_a_table(name):
    recipe, variants, tasks, values = PLANS[name]
    spec = Path(f"paper:{name}")
    seeds = read_options_file(grid.path_of(spec)).get("seeds", 4)
    assert seeds == (1 if name in ("lrc-bert-2", "lrkd-2") else 4)
    found = grid.read(StudySettings(spec=spec, seeds=1))
    assert len(found.variants) == variants and set(found.tasks) == tasks
    seen: dict[str, set] = {}
    for cell in found.cells:
        assert cell.options["preset"] == "paper"
        assert (cell.options.get("recipe") or cell.options["method"]) == recipe
        for key, value in {**cell.options, **cell.options["options"]}.items():
            if isinstance(value, (str, int, float)):
                seen.setdefault(key, set()).add(value)
    assert {key: seen[key] for key in values} == values
    text = grid_report.plan(found)
    assert len(text) == 1 + variants * len(tasks)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models and rows of every table, in small."""

    def make(path):
        write_glue(path / "glue")
        make_teacher(path / "teacher", layers=6, longest=384, head=False)
        config = BertConfig.from_pretrained(path / "teacher")
        BertForMaskedLM(config).save_pretrained(path / "teacher")
        make_teacher(path / "student", layers=2, longest=128, head=False)
        byte_pairs(path / "roberta", 290, causal=False)
        make_decoder(path / "gpt2")
        make_chat_teacher(path / "chat", longest=512)
        for seed, name in enumerate(("train", "eval")):
            write_text(path / f"{name}.txt", 16, seed)
        for name in ("squad1", "squad2"):
            for i in range(2):
                write_squad(path / f"{name}-{i}.json", 8, i)
        for seed, name in enumerate(("train", "valid", *SETS)):
            write_chats(path / f"{name}.jsonl", 4, seed)
        shutil.copy(path / "glue" / "CoLA" / "train.tsv", path / "cola.tsv")

    return once(tmp_path_factory, "tables", make)


SETS = ["dolly", "self-inst", "vicuna", "sinst", "uinst"]
#: Teacher and student of tables, if not a BERT of six layers and one of two: two vocabularies.
OTHERS = {"lrkd-3a": ("roberta", "student"), "fcd-1": ("roberta", "roberta"),
          "fcd-5": ("teacher", "teacher"), "mc3kd-9": ("gpt2", "gpt2"),
          "lrkd-4": ("chat", "chat")}  # fmt: skip
#: Files of tables' tasks, if not GLUE's.
FILES = {
    "fcd-5": {name: f"{name}-0.json,{name}-1.json" for name in ("squad1", "squad2")},
    "mc3kd-9": {"wikitext": "train.txt,eval.txt"},
    "lrkd-4": {"dolly": ",".join(f"{name}.jsonl" for name in ("train", "valid", *SETS))},
}


def run_of_table(name, models, out):
    """A study of the table's variants, two steps each, on one task of GLUE, or its own files."""
    teacher, student = (str(models / x) for x in OTHERS.get(name, ("teacher", "student")))
    tasks = {
        task: ",".join(str(models / file) for file in files.split(","))
        for task, files in FILES.get(name, {}).items()
    } or {min(PLANS[name][2]): True}
    steps = {"steps": 2, "seeds": 1, "device_name": "cpu", "spec": Path(f"paper:{name}")}
    glue = {} if name in FILES else {"glue": models / "glue"}
    given = {"teacher": teacher, "student": student, "tasks": tasks, **steps, **glue}
    return GridRuns(grid.read(StudySettings(**given)), out)


def kind_of(name, cell):
    """What makes a run unlike others: its method, options, stages and vocabularies."""
    more = *cell.options["options"], *cell.options.get("stages", ())
    own = (name, cell.task) if name in FILES else (name * (name == "lrkd-3a"),)
    return cell.options["method"], *more, *own


@pytest.mark.parametrize("extent", ["drawn", pytest.param("all", marks=pytest.mark.thorough)])
def test_the_tables_run(models, tmp_path, monkeypatch, without_pictures, extent):
    """Four tables are checked and one runs, drawn anew each time; or runs of every kind."""
    for folder in ("WIKIPEDIA", "AUGMENTED"):
        monkeypatch.setenv(folder, str(models))
    drawn = random.Random(FIRST).sample([*PLANS], len(PLANS) if extent == "all" else 4)
    kinds, most = set(), len(PLANS) if extent == "all" else 2
    for number, name in enumerate(drawn):
        runs = run_of_table(name, models, tmp_path)
        runs.check()
        if extent == "drawn" and number:
            continue
        new = {}
        for cell in runs.grid.cells:
            new.setdefault(kind_of(name, cell), cell)
        cells = [cell for kind, cell in new.items() if kind not in kinds][:most]
        kinds |= new.keys()
        cells = tuple(cells or runs.grid.cells[:1])
        runs = GridRuns(dataclasses.replace(runs.grid, cells=cells), tmp_path)
        runs.train(1)
        grid_report.write(runs, tmp_path)
        check_results(name, runs, (tmp_path / "report.md").read_text())
    teachers = [json.loads(p.read_text()) for p in tmp_path.glob("teachers/*/teacher/fastkd.json")]
    assert len(teachers) < len(PLANS) / 2  # the tables share them


def check_results(name, runs, page):
    for cell in runs.grid.cells:
        result = runs.result(cell)
        assert "failed" not in result, (name, result)
        assert result["options"]["training_steps"] == 2 == result["history"][-1]["step"], name
        if name == "lrkd-4":  # five test sets beside the paper's
            assert result["recipe"]["given"].keys() >= {"learning_rate", "max_length"}
            scores = [result["scores"][f"rouge_l_{x}"] for x in SETS]
            assert f"{sum(scores) / 5:.4f} |" in page
    paper = read_options_file(grid.path_of(Path(f"paper:{name}"))).get("paper", {"title": ""})
    assert paper["title"] in page
    assert ("mnli accuracy | mnli accuracy_mm |" in page) == (runs.grid.tasks == ["mnli"])
    words = {"fcd-5": "squad1 f1", "mc3kd-9": "perplexity", "lrkd-4": "ours: VicunaEval"}
    assert words.get(name, "") in page
    if name == "lrkd-4":  # a teacher with adapters
        assert list(runs.out.glob("teachers/*/teacher/adapter"))


def test_stages_and_test_sets_of_tables():
    cells = grid.read(StudySettings(spec=Path("paper:lrc-bert-1"))).cells
    found = [cell.options["stages"] for cell in cells if cell.variant == "LRC-BERT"]
    assert ["wikipedia", "augmented", "task"] in [[*names] for names in found]
    trained = {str(x["augmented"]["train"]) for x in found if "augmented" in x}
    assert "/data/cola.tsv" in trained
    for cell in grid.read(StudySettings(spec=Path("paper:lrkd-4"))).cells:
        assert [path.stem for path in cell.options["test"]] == SETS
