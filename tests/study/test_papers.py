"""The papers' tables: their plans, small runs of them, and their own cells as our scores."""

import dataclasses
import functools
import random
import shutil
from pathlib import Path

import pytest
from transformers import BertConfig, BertForMaskedLM, RobertaConfig

from fastkd.study import grid, grid_report, paper_table
from fastkd.study.grid_runs import GridRuns
from fastkd.study.statistics import summarize
from fastkd.train.options import fits, read_options_file
from fastkd.train.recipes import PAPERS, RECIPES
from tests.study.conftest import read
from tests.support.draw import FIRST
from tests.support.runs import once
from tests.support.tiny import run, sentences
from tests.train.tasks import through

#: What each paper searches, typed from the papers.
GRIDS = {
    "fcd": {"num_train_epochs": {3, 5, 10}, "learning_rate": {5e-6, 1e-5, 2e-5},
            "alpha": {0.1, 0.2, 0.4, 1.0}, "beta": {0.1, 0.2, 0.4, 1.0}},
    "knn": {"learning_rate": {1e-5, 3e-5, 5e-5}, "k": {1, 2, 3, 5}, "alpha1": {0.1, 0.01, 0.001}},
    "lrc_bert": {"learning_rate": {5e-5, 1e-4, 3e-4}},
    "mc3kd": {"learning_rate": {2e-5, 3e-5, 5e-5}, "alpha": {0.2, 0.5, 0.6, 0.7},
              "beta": {0.1, 1.0, 10.0}},
    "lrkd": {"learning_rate": {2e-5, 3e-5, 4e-5, 5e-5}, "batch_size": {16, 32},
             "alpha": {0.7, 0.8, 0.9, 1.0}, "beta": {1.0, 10.0, 15.0},
             "temperature": {1.0, 2.0, 3.0, 4.0}},
}  # fmt: skip
#: What a table searches, if not all of that.
FEWER = {
    **dict.fromkeys(("lrc-bert-2", "lrc-bert-figure-5", "lrkd-2"), ()), "lrkd-4": ("beta",),
    **dict.fromkeys(("fcd-5", "knn-figure-2"), ("learning_rate",)),
    "mc3kd-1": ("learning_rate", "alpha"),
}  # fmt: skip
#: Numbers of a table that are not searched.
NUMBERS = {
    "knn-1": {"finetune_teacher": {5}}, "lrc-bert-4": {"first_stage": {0.0}},
    "lrkd-4": {"sample": {1.0}, "max_length": {512}, "max_new_tokens": {256}},
    "lrkd-figure-3": {"projection_layers": {1, 3}}, "mc3kd-8": {"student_layers": {6}},
    "lrkd-figure-4": {"projection_layers": {1, 2, 3, 4}}, "mc3kd-1": {"student_layers": {6}},
    **{f"mc3kd-{i}": {"student_layers": {3}} for i in (3, 4, 5, 6)},
}  # fmt: skip
#: Rows without a variant: quotations and teachers.
QUOTED = {
    "PD", "BERT-of-Theseus", "MetaDistil", "ReptileDistil", "CKD", "MGSKD", "MetaDistill",
    "ReAugKD", "ACKD", "AD-KD", "DynaKD", "teacher", "teacher of 6",
}  # fmt: skip
#: Printed averages that aren't those of the printed cells, and the right ones.
WRONG_AVERAGES = {
    ("fcd-1", "FCD, teacher=bert-base-uncased", 79.6): 79.69, ("lrkd-4", "teacher", 26.7): 26.64,
    ("lrkd-4", "RKL", 23.7): 23.64,
    ("lrkd-1", "ReAugKD", 81.8): None,  # has no cells for three of eight columns
}  # fmt: skip
SETS = ["dolly", "self-inst", "vicuna", "sinst", "uinst"]


def content_of(name):
    return read_options_file(grid.path_of(Path(f"paper:{name}")))


NAMES = grid.names_of_papers()
TABLES = [name for name in NAMES if "paper" in content_of(name)]


@functools.cache
def table(name, **options):
    """A paper's study with the first value of each searched list, and the table's rows."""
    study = read(Path(f"paper:{name}"), grid="first", **options)
    variants = study.variants, study.baseline, study.teacher
    return study, study.paper and paper_table.rows_of(study.paper, *variants)


def scores_of(spec):
    """Task and metric of each score of a column."""
    for score in [spec] if isinstance(spec, str) else spec:
        task, _, metric = score.partition(" ")
        if metric:
            yield task, metric


def test_the_tables_are_listed(monkeypatch):
    text = run("study", "paper:")
    assert len(NAMES) == 29 and all(f"paper:{name}  " in text for name in NAMES)
    assert "no such table" in run("study", "paper:fcd-9", expect=2)
    monkeypatch.delenv("WIKIPEDIA")
    error = run("study", "paper:lrc-bert-1", methods="LRC-BERT", expect=2)
    assert "methods.LRC-BERT.stages.wikipedia: train $WIKIPEDIA/train.txt: the environment" in error


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_of_a_table(name):
    """A row for each variant, a column for each data set, and searches as in the recipe."""
    found, paper = table(name)
    assert content_of(name)["seeds"] == (1 if name in ("lrc-bert-2", "lrkd-2") else 4)
    if "figure" not in name:  # figures print no numbers
        arms = {row for row in paper["rows"] if row.split(", ")[0] not in QUOTED}
        assert {*found.variants} == arms | ({"labels"} if name == "fcd-5" else {*()})
        specs = paper["columns"].values()
        assert {*found.tasks} == {task for spec in specs for task, _ in scores_of(spec)}
        own, rows = table(name, student="own")  # whose layers no list has
        assert rows["rows"].get(own.baseline) == paper["rows"].get(found.baseline)
    recipe = next(x for x in RECIPES if name.replace("-", "_").startswith(x))
    whole = read(Path(f"paper:{name}"), seeds=1, tasks={found.tasks[0]: True})
    assert len(grid_report.plan(whole)) == 1 + len(found.variants)
    searched, others, arms = {}, {}, {}
    for cell in whole.cells:
        options = {**cell.options, **cell.options["options"]}
        assert options["preset"] == "paper" and options.get("recipe", options["method"]) == recipe
        arms[cell.variant] = str(options)
        for key, value in options.items():
            if isinstance(value, (int, float)) and options["method"] != "tinybert":
                kind = searched if {key, f"--set {key}"} & cell.values.keys() else others
                kind.setdefault(key, set()).add(value)
    assert len({*arms.values()}) == len(arms)
    assert searched == {key: GRIDS[recipe][key] for key in FEWER.get(name, GRIDS[recipe])}
    numbers = NUMBERS.get(name, {})
    assert {key: others[key] for key in numbers} == numbers
    content = read_options_file(PAPERS / f"{recipe}.toml")
    content = {**content["training"], **content["loss"]}
    for key, values in searched.items():
        assert {*content[key.removeprefix("num_train_")]["grid"]} == values


def test_arms_in_stages():
    tinybert = content_of("lrc-bert-1")["methods"]["TinyBERT"]
    assert sorted(tinybert["learning_rate"]) == [1e-5, 2e-5, 3e-5]  # Jiao et al. 2020
    cells = [cell for cell in table("lrc-bert-1")[0].cells if cell.variant == "LRC-BERT"]
    for cell in cells:
        augmented = ["augmented"] * (cell.task in ("cola", "rte"))
        assert [*cell.options["stages"]] == ["wikipedia", *augmented, "task"]
    rows = {x["train"] for cell in cells if (x := cell.options["stages"].get("augmented"))}
    assert rows == {Path("/data/cola.tsv"), Path("/data/rte.tsv")}


#: Headings of GLUE's own files.
GLUE = {
    "rte": "label\tsentence1\tsentence2", "mrpc": "Quality\t#1 String\t#2 String",
    "mnli": "gold_label\tsentence1\tsentence2", "qnli": "label\tquestion\tsentence",
}  # fmt: skip
#: Models and files of other data sets.
OTHERS = {
    "squad1": ("teacher", "squad.json,squad.json"), "wikitext": ("chat", "train.txt,eval.txt"),
    "dolly": ("chat", ",".join(f"{name}.jsonl" for name in ["dolly", "dolly", *SETS])),
}  # fmt: skip


def make_models(path):
    """Models and rows of every table, in small."""
    for task, heading in GLUE.items():
        for seed, file in enumerate(grid.official(path, task).values()):
            file.parent.mkdir(exist_ok=True)
            lines = [f"{label}\t{text}\t{text}" for text, label in sentences(32, seed)]
            file.write_text("\n".join([heading, *lines]) + "\n")
    shutil.copy(path / "RTE" / "train.tsv", path / "rte.tsv")  # augmented
    through.make_bare(path / "teacher", layers=6, longest=384)
    BertForMaskedLM(BertConfig.from_pretrained(path / "teacher")).save_pretrained(path / "teacher")
    through.make_chat_teacher(path / "chat", longest=512)
    through.write_squad(path / "squad.json", 8)
    for name in ("train.txt", "eval.txt"):
        through.write_text(path / name, 16)
    for seed, name in enumerate(SETS):
        through.write_chats(path / f"{name}.jsonl", 4, seed)


@pytest.mark.parametrize("count", [1, pytest.param(len(NAMES), marks=pytest.mark.thorough)])
def test_the_tables_run(tmp_path_factory, tmp_path, monkeypatch, without_pictures, count):
    """Two runs of a drawn table, and one of GPT-2; the plans of more tables are checked."""
    models = once(tmp_path_factory, "tables", make_models)
    monkeypatch.chdir(models)
    for folder in ("WIKIPEDIA", "AUGMENTED"):
        monkeypatch.setenv(folder, str(models))
    draw = random.Random(FIRST)
    for number, name in enumerate(["mc3kd-9", *draw.sample(NAMES, max(4, count))]):
        task = next(task for task in (*GLUE, *OTHERS) if task in table(name)[0].tasks)
        model, files = OTHERS.get(task, ("teacher", True))
        given = {"teacher": model, "student": model, "tasks": {task: files}, "glue": models}
        study = read(Path(f"paper:{name}"), steps=2, seeds=1, device_name="cpu", **given)
        GridRuns(study, tmp_path).check()
        if number > count:
            continue
        cells = tuple(draw.sample(study.cells, min(1 + bool(number), len(study.cells))))
        runs = GridRuns(dataclasses.replace(study, cells=cells), tmp_path)
        runs.train(1)
        (summary,) = grid_report.write(runs, tmp_path)
        page = (tmp_path / "report.md").read_text()
        assert content_of(name).get("paper", {"title": ""})["title"] in page
        assert ("mnli accuracy | mnli accuracy_mm |" in page) == (task == "mnli")
        for result in map(runs.result, cells):
            assert "failed" not in result, (name, result)
            assert result["options"]["training_steps"] == 2 == result["history"][-1]["step"], name
            if task == "wikitext":  # rows without classes
                assert result["predictions"] == result["classes"] == [] and 0 <= result["rccc"] <= 1
                assert "intra_class_similarity" not in result and "lower is better" in page
                assert "Classes without" not in page and summary.rows[-1].rows_interval is None
            if task == "dolly":  # five test sets beside the paper's, a teacher with adapters
                assert result["recipe"]["given"].keys() >= {"learning_rate", "max_length"}
                mean = sum(result["scores"][f"rouge_l_{x}"] for x in SETS) / len(SETS)
                assert f"{mean:.4f} |" in page and "ours: VicunaEval" in page
                assert list(tmp_path.glob("teachers/*/teacher/adapter"))
    assert len(list(tmp_path.glob("teachers/*/teacher"))) < len(NAMES) / 2  # tables share them


def test_printed_averages_are_those_of_the_printed_cells():
    wrong = {}
    for name in TABLES:
        paper = content_of(name)["paper"]
        for row, cells in paper["rows"].items():
            printed = dict(zip(paper["columns"], cells, strict=True))
            for column, spec in paper["columns"].items():
                if isinstance(spec, str) or not {*spec} <= printed.keys():
                    continue  # no mean, or one of scores that the paper doesn't print
                mean = paper_table.value_of(spec, {}, printed.get)
                if mean is None or abs(mean - printed[column]) > 0.05 + 1e-9:
                    wrong[name, row, printed[column]] = mean and round(mean, 2)
    assert wrong == WRONG_AVERAGES


def beside(study, paper):
    """The paper's table beside scores that are its cells."""
    results = {}
    for cell in study.cells:
        if (cells := paper["rows"].get(cell.variant)) is None:
            continue
        run = {"scores": {}, "teacher": {}, "lower_is_better": ["perplexity"], "percent": []}
        run |= {"references": [], "predictions": [0, 1], "classes": [], "rows": {}, "seconds": 1.0}
        known = "teacher", *cell.variant.split(", ")[1:]
        taught = paper["rows"].get(", ".join(known[:2]), paper["rows"].get("teacher", cells))
        for *both, spec in zip(cells, taught, paper["columns"].values(), strict=True):
            value, of_teacher = (x if fits(x, float) else 50.0 for x in both)
            for task, metric in scores_of(spec):
                scale = 1 if metric == "perplexity" else 100
                if task == cell.task and metric in paper_table.FACTORS:
                    run[metric] = value / paper_table.FACTORS[metric]
                elif task == cell.task:
                    run["scores"][metric] = value / scale
                    run["teacher"][metric] = of_teacher / scale
        run["scores"] = run["scores"] or {"accuracy": 0.5}
        results[cell.variant, cell.task, cell.seed] = run
    return paper_table.beside(study, summarize(study, results), results)


#: A teacher of one's own, and the first cell of a row beside which its student stands.
OWN = [
    ("mc3kd-2", BertConfig(), "MC3KD, student_layers=6", 44.12),
    ("mc3kd-6", BertConfig(), "PKD 6 to 3", 53.07),  # no model of the table: the baseline's
    ("fcd-1", RobertaConfig(), "FCD", "82M"),
    ("mc3kd-3", BertConfig(num_hidden_layers=24), "KD", 14.89),
]


@pytest.mark.parametrize(
    ("name", "model", "own", "first"), [*((name, None, None, None) for name in TABLES), *OWN]
)
def test_the_papers_own_cells_are_the_same_everywhere(tmp_path, name, model, own, first):
    if model is not None:
        model.save_pretrained(tmp_path)
    study, paper = table(name, **({} if model is None else {"teacher": str(tmp_path)}))
    assert model is None or (paper["rows"][own][0] == first and study.baseline in paper["rows"])
    found = beside(study, paper)
    for (row, *cells), printed in zip(found["rows"], paper["rows"].values(), strict=True):
        named = dict(zip(found["columns"][1:], cells, strict=True))
        assert [named[f"paper: {column}"] for column in paper["columns"]] == [*map(str, printed)]
        for column, cell in zip(paper["columns"], printed, strict=True):
            ours = named.get(f"ours: {column}")
            if fits(cell, float) and ((row in study.variants and ours is not None) or ours):
                assert float(ours.split()[0]) == pytest.approx(cell, abs=0.101)
    assert all("; here the same, " in line for line in found["order"])
    assert len(found["order"]) >= len({*study.variants} & paper["rows"].keys()) - 1
