"""A grid of `fastkd distill` runs, and the papers' tables."""

import csv
import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
from transformers import BertConfig, BertForMaskedLM

from fastkd.study import grid, grid_report, grid_runs
from fastkd.study.grid import StudySettings
from fastkd.study.grid_runs import GridRuns, write_result
from fastkd.train import stages
from fastkd.train.config import Config
from fastkd.train.distillation import run_distillation
from fastkd.train.errors import InputError
from fastkd.train.options import read_options_file
from tests.distill.processes import CONTEXT
from tests.support.runs import stop_at, terminate
from tests.support.tiny import make_teacher, run, sentences, write_tsv
from tests.train.tasks.test_causal_lm import make_decoder, write_text
from tests.train.tasks.test_chat import make_chat_teacher, talks, write_jsonl
from tests.train.tasks.test_question_answering import write_squad
from tests.train.tasks.test_two_tokenizers import byte_pairs

FILE = """
title = "Tiny"
seeds = 2
epochs = 1
device = "cpu"
student_layers = [1, 2]
teacher = "teacher"
max_length = 16
select = "{select}"
[grid]
learning_rate = [1e-4, 1e-3]
[methods]
labels = {{}}
fcd = {{alpha = [0.1, 1.0]}}
[tasks.own]
train = "train.tsv"
eval = "dev.tsv"
"""
COLUMNS = {
    "rte": ("index", "sentence1", "sentence2", "label"),
    "mrpc": ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"),
    "sst2": ("sentence", "label"),
    "qnli": ("index", "question", "sentence", "label"),
    "qqp": ("id", "qid1", "qid2", "question1", "question2", "is_duplicate"),
    "stsb": ("index", "sentence1", "sentence2", "score"),
    "mnli": ("index", "sentence1", "sentence2", "gold_label"),
}
LABELS = {
    "rte": ("not_entailment", "entailment"),
    "qnli": ("not_entailment", "entailment"),
    "stsb": ("1.5", "4.0"),
    "mnli": ("contradiction", "entailment", "neutral"),
}


def write_glue(root):
    """Files in the shape of GLUE's own download; two steps of 32 rows are an epoch."""
    for task, (folder, evals, test) in grid.FOLDERS.items():
        (root / folder).mkdir(parents=True)
        for seed, name in enumerate(("train.tsv", evals, *filter(None, [test]))):
            lines = [] if task == "cola" else ["\t".join(COLUMNS[task])]
            labels = LABELS.get(task, ("0", "1"))
            for i, (text, label) in enumerate(sentences(12 if seed else 64, seed)):
                label = labels[i % len(labels)] if len(labels) > 2 else labels[label]
                known = {"index": str(i), "id": str(i), "qid1": "0", "qid2": "1"}
                names = ("label", "Quality", "is_duplicate", "score", "gold_label")
                known |= dict.fromkeys(names, label)
                cells = [known.get(c, text) for c in COLUMNS.get(task, ())]
                lines.append("\t".join(cells or ["gj04", label, "", text]))
            (root / folder / name).write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("grid")
    make_teacher(path / "teacher")
    write_tsv(path / "train.tsv", 16)
    write_tsv(path / "dev.tsv", 12, seed=1)
    (path / "grid.toml").write_text(FILE.format(select="dev"))
    return path


def test_cells_of_a_file(root):
    found = grid.read(StudySettings(spec=root / "grid.toml"))
    assert found.variants == [
        f"{name}, student_layers={n}" for name in ("labels", "fcd") for n in (1, 2)
    ]
    assert len(found.cells) == 2 * 2 * (2 + 2 * 2)
    cell = found.cells[-1]
    assert cell.values == {"learning_rate": 1e-3, "--set alpha": 1.0} and cell.seed == 1
    assert cell.options == {
        "num_train_epochs": 1, "device_name": "cpu", "student_layers": 2, "max_length": 16,
        "teacher": str(root / "teacher"), "learning_rate": 1e-3, "method": "fcd", "seed": 1,
        "options": {"alpha": 1.0}, "train": root / "train.tsv", "evals": root / "dev.tsv",
    }  # fmt: skip
    (root / "all.toml").write_text(FILE.format(select="none"))
    every = grid.read(StudySettings(spec=root / "all.toml"))
    assert "fcd, student_layers=2, learning_rate=0.001, alpha=1.0" in every.variants
    short = grid.read(StudySettings(spec=root / "grid.toml", steps=3, seeds=1))
    assert [c.options["training_steps"] for c in short.cells] == [3] * 12


def test_a_grid_equals_the_same_runs_by_hand(root, tmp_path):
    path, out = root / "hand.toml", tmp_path / "out"
    path.write_text(FILE.format(select="dev").replace("[1, 2]", "1"))
    run("study", path, out=out, seeds=1)
    found = grid.read(StudySettings(spec=path, seeds=1))
    runs = GridRuns(found, out)
    for i, cell in enumerate(found.cells[1::2]):
        report = run_distillation(Config.of(**cell.options, out=tmp_path / f"hand{i}"))
        assert runs.result(cell)["scores"] == report["student"]
        assert runs.result(cell)["best"] == report["best"]["epoch"]
        assert runs.result(cell)["history"][0]["losses"] == report["history"][0]["losses"]
    best = grid_report.best_cells(runs)
    for (variant, _, _), result in best.items():
        own = [runs.result(c)["scores"] for c in found.cells if c.variant == variant]
        assert result["scores"]["accuracy"] == max(scores["accuracy"] for scores in own)
    rows = list(csv.DictReader((out / "runs.csv").open()))
    assert len(rows) == len(found.cells) and rows[-1]["values"] == "learning_rate=0.001 alpha=1.0"
    assert float(rows[-1]["accuracy"]) == runs.result(found.cells[-1])["scores"]["accuracy"]
    page = (out / "report.md").read_text()
    assert "| mean over tasks |" in page and "compared with labels." in page
    before = {p: p.stat().st_mtime_ns for p in (out / "runs").glob("*.json")}
    run("study", path, out=out, seeds=1)
    assert all(p.stat().st_mtime_ns == at for p, at in before.items()) and len(before) == 6


def one_cell_a_method(text):
    for old, new in (("[1, 2]", "1"), ("[1e-4, 1e-3]", "1e-3"), ("[0.1, 1.0]", "1.0")):
        text = text.replace(old, new)
    return text


STAGED = """
teacher = "teacher"
epochs = 1
device = "cpu"
max_length = 16
{rows}
{arm}
"""


def test_an_arm_in_stages_equals_the_same_stages_by_hand(root, tmp_path):
    rows = 'train = "train.tsv"\neval = "dev.tsv"'
    arm = """[{at}.assistant]
student_layers = 2
[{at}.student]
teacher = "stages.assistant"
student_layers = 1
learning_rate = 1e-3
set = {{temperature = 3.0}}
"""
    by_hand = STAGED.format(rows=rows + '\nmethod = "soft_targets"', arm=arm.format(at="stages"))
    (root / "plan.toml").write_text(by_hand)
    run("distill", stages=root / "plan.toml", out=tmp_path / "hand")
    report = json.loads((tmp_path / "hand" / "student" / "fastkd.json").read_text())
    at = 'method = "soft_targets"\n' + arm.format(at="methods.TAKD.stages")
    (root / "arm.toml").write_text(
        STAGED.format(rows="seeds = 1\n[methods.TAKD]", arm=f"{at}[tasks.own]\n{rows}")
    )
    run("study", root / "arm.toml", out=tmp_path / "out")
    study = grid.read(StudySettings(spec=root / "arm.toml"))
    result = GridRuns(study, tmp_path / "out").result(study.cells[0])
    assert result["scores"] == report["student"]
    assert result["history"][0]["losses"] == report["history"][0]["losses"]
    assert "stages=assistant+student" in grid_report.plan(study)[1][3]
    assert not list((tmp_path / "out" / "runs").glob("*/"))


def test_a_shared_teacher_is_that_of_the_command(root, tmp_path):
    text, out = one_cell_a_method(FILE.format(select="dev")), tmp_path / "out"
    (root / "tuned.toml").write_text("finetune_teacher = 1\nteacher_learning_rate = 1e-3\n" + text)
    run("study", root / "tuned.toml", out=out)
    assert len(list((out / "teachers").glob("*/teacher"))) == 1
    found = grid.read(StudySettings(spec=root / "tuned.toml"))
    hand = run_distillation(Config.of(**found.cells[0].options, out=tmp_path / "hand"))
    result = GridRuns(found, out).result(found.cells[0])
    assert result["teacher"] == hand["teacher"] and result["scores"] == hand["student"]
    page = (out / "report.md").read_text()
    assert "## own" in page and "| fcd | 2 |" in page


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


@pytest.mark.parametrize(("old", "new", "error"), [
    ("learning_rate", "learning_rat", "'learning_rat' is no option"),
    ("alpha", "alfa", "methods.fcd has no option 'alfa'"),
    ("epochs = 1", "epoch = 1", "the study has no option 'epoch'"),
    ('"dev"', '"best"', "select must be"),
    ("epochs = 1", 'epochs = 1\nbaseline = "label"', "baseline 'label'"),
])  # fmt: skip
def test_mistakes_in_a_file(root, old, new, error):
    (root / "wrong.toml").write_text(FILE.format(select="dev").replace(old, new, 1))
    with pytest.raises(InputError, match=error):
        grid.read(StudySettings(spec=root / "wrong.toml"))


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
NUMBERS = {  # of a row of each paper's table
    "fcd-1": ("FCD, teacher=roberta-base", ["82M", 2.0, 93.8, 85.6, 92.0, 73.5, 72.5, 88.3, 89.6,
                                            60.3, 81.9]),
    "fcd-2": ("KL", [83.3, 71.2, 70.7, 75.1]),
    "fcd-3": ("Uniform", [83.8, 52.0]),
    "fcd-4": ("PreNorm + PLC", [83.3, 71.2, 51.7, 68.7]),
    "fcd-5": ("FCD", [88.2, 78.4]),
    "knn-1": ("Ours", [92.5, 92.5, 89.64, 89.7, 89.5, 87.7, 90.9, 84.5, 84.5, 90.8, 75.8]),
    "lrc-bert-1": ("LRC-BERT", [14.5, 83.1, 82.7, 72.2, 92.9, 88.7, 87.0, 63.1, 46.5, 81.2, 77.5]),
    "lrc-bert-2": ("LRC-BERT", [4, 312, 14.5, 12.7]),
    "lrc-bert-3": ("LRC-BERT C", [78.0, 78.2, 81.5, 37.0]),
    "lrc-bert-4": ("LRC-BERT2", [79.4]),
    "mc3kd-1": ("PKD, teacher=bert-large-uncased", [64.62, 71.25]),
    "mc3kd-3": ("MC3KD, teacher=bert-large-uncased", [20.05, 15.32, 61.73, 78.41, 92.28, 88.97,
                                                      70.75, 83.71, 83.50, 64.11]),
    "mc3kd-4": ("TAKD", [14.61, 55.67, 59.21, 80.38, 88.23, 82.60, 85.47, 82.22, 81.84, 77.36,
                         86.81, 3.41]),
    "mc3kd-6": ("PKD 6 to 3, teacher=deberta-base", [55.60, 17.21, 91.63, 25.71, 87.88, 81.62,
                                                     15.45, 32.80, 11.33, 78.52, 79.44, 20.81]),
    "mc3kd-7": ("KD, teacher=bert-base-uncased, student_layers=6", [42.97, 7.84, 65.70, 70.60,
                97.02, 95.83, 75.68, 88.18, 87.85, 78.48]),
    "mc3kd-9": ("MC3KD, teacher=gpt2-large", [23.57]),
    "lrkd-1": ("LRKD", [59.4, 83.5, 84.3, 92.3, 91.2, 91.4, 91.3, 70.9, 89.2, 83.7]),
    "lrkd-2": ("AD-KD", [9000, 3000, 14400, 1920]),
    "lrkd-3a": ("LRKD", [92.5, 94.2]),
    "lrkd-3b": ("LRKD", [91.0, 92.5]),
    "lrkd-4": ("AKL+LRKD", [27.1, 18.6, 19.1, 32.5, 32.5, 26.0]),
}  # fmt: skip


def test_the_tables_are_listed():
    assert set(grid.names_of_papers()) == {*PLANS}
    text = run("study", "paper:")
    assert all(f"paper:{name}" in text for name in PLANS)
    assert "no such table" in run("study", "paper:fcd-9", expect=2)


@pytest.fixture(autouse=True)
def corpora(monkeypatch):
    for name in ("WIKIPEDIA", "AUGMENTED", "INSTRUCTIONS"):
        monkeypatch.setenv(name, "/data")


def test_a_table_without_its_corpus(monkeypatch):
    monkeypatch.delenv("WIKIPEDIA")
    error = run("study", "paper:lrc-bert-1", methods="LRC-BERT", expect=2)
    assert "methods.LRC-BERT.stages.wikipedia: train $WIKIPEDIA/train.txt: the environment" in error
    assert "WIKIPEDIA is not set; set it to the files' folder (WIKIPEDIA=DIR fastkd ...)" in error


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_of_a_table(name):
    recipe, variants, tasks, values = PLANS[name]
    found = grid.read(StudySettings(spec=Path(f"paper:{name}")))
    assert len(found.variants) == variants and set(found.tasks) == tasks
    assert len(found.seeds) == (1 if name in ("lrc-bert-2", "lrkd-2") else 4)
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
    if name in NUMBERS:
        row, numbers = NUMBERS[name]
        assert found.paper["rows"][row] == numbers


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("tables")
    write_glue(path / "glue")
    make_teacher(path / "teacher", layers=6, longest=128, head=False)
    BertForMaskedLM(BertConfig.from_pretrained(path / "teacher")).save_pretrained(path / "teacher")
    make_teacher(path / "student", layers=2, longest=128, head=False)
    byte_pairs(path / "roberta", 290, causal=False)
    for name in ("train", "eval"):
        write_text(path / f"{name}.txt", 12)
    shutil.copy(path / "glue" / "CoLA" / "train.tsv", path / "cola.tsv")
    return path


#: Teacher and student of tables, if not a BERT: two vocabularies, and one RoBERTa.
OTHERS = {"lrkd-3a": ("roberta", "student"), "fcd-1": ("roberta", "roberta")}


GLUE_TABLES = [name for name in PLANS if name not in ("fcd-5", "mc3kd-9", "lrkd-4")]


def trained(study, cells, out):
    """The runs of some cells of a study, and its page."""
    runs = GridRuns(dataclasses.replace(study, cells=tuple(cells)), out)
    runs.train(1)
    grid_report.write(runs, out)
    return runs, (out / "report.md").read_text()


def test_every_table_of_glue_runs(models, tmp_path_factory, monkeypatch):
    """Two steps of each variant; the tables share teachers, and runs of one kind of options."""
    for picture in ("_forest", "_curves"):  # drawn in other tests
        monkeypatch.setattr(grid_report, picture, lambda *_: b"")
    for folder in ("WIKIPEDIA", "AUGMENTED"):
        monkeypatch.setenv(folder, str(models))
    out, kinds = tmp_path_factory.mktemp("shared"), set()
    for name in GLUE_TABLES:
        teacher, student = OTHERS.get(name, ("teacher", "student"))
        options = {
            "glue": models / "glue", "teacher": str(models / teacher), "steps": 2, "seeds": 1,
            "device_name": "cpu", "tasks": {min(PLANS[name][2]): True},
            "student": str(models / student), "spec": Path(f"paper:{name}"),
        }  # fmt: skip
        study, new = grid.read(StudySettings(**options)), {}
        for cell in study.cells:
            kind = (
                cell.options["method"],
                *cell.options["options"],
                *cell.options.get("stages", ()),
            )
            new.setdefault((*kind, name * (name == "lrkd-3a")), cell)
        cells = [cell for kind, cell in new.items() if kind not in kinds] or study.cells[:1]
        kinds |= new.keys()
        GridRuns(study, out).check()
        runs, page = trained(study, cells, out)
        for cell in cells:
            result = runs.result(cell)
            assert "failed" not in result, (name, result)
            assert result["options"]["training_steps"] == 2 == result["history"][-1]["step"]
        paper = read_options_file(grid.path_of(options["spec"])).get("paper", {"title": ""})
        assert paper["title"] in page
        assert ("mnli accuracy | mnli accuracy_mm |" in page) == (study.tasks == ["mnli"])
        if name == "lrc-bert-1":  # Wikipedia, augmented rows, the task
            (staged,) = (c for c in cells if c.variant == "LRC-BERT")
            assert list(staged.options["stages"]) == ["wikipedia", "augmented", "task"]
            assert staged.options["stages"]["augmented"]["train"] == models / "cola.tsv"
        if name in ("lrc-bert-1", "fcd-1"):
            assert re.search(r"^\| (LRC-BERT|FCD) \|.*\d\.\d\d \|", page, re.MULTILINE)
    teachers = [json.loads(p.read_text()) for p in out.glob("teachers/*/teacher/fastkd.json")]
    assert 1 <= len(teachers) < len(GLUE_TABLES) / 2
    shutil.rmtree(out)


def test_a_language_model_of_a_table(tmp_path):
    make_decoder(tmp_path / "teacher")
    files = [write_text(tmp_path / f"{i}.txt", 16, seed=i) for i in range(2)]
    model, rows = tmp_path / "teacher", f"wikitext={files[0]},{files[1]}"
    run("study", "paper:mc3kd-9", out=tmp_path / "out", tasks=rows, steps=1, seeds=1,
        teacher=model, student=model, device="cpu")  # fmt: skip
    assert "perplexity" in (tmp_path / "out" / "report.md").read_text()


def test_answers_of_a_table(tmp_path):
    make_teacher(tmp_path / "teacher", longest=384, head=False)
    model, tasks = str(tmp_path / "teacher"), {}
    for name in ("squad1", "squad2"):
        files = [write_squad(tmp_path / f"{name}-{i}.json", 8, i) for i in range(2)]
        tasks[name] = f"{files[0]},{files[1]}"
    options = {"tasks": tasks, "teacher": model, "student": model, "steps": 1, "seeds": 1}
    study = grid.read(StudySettings(spec=Path("paper:fcd-5"), device_name="cpu", **options))
    cells = tuple(cell for cell in study.cells if cell.variant == "FCD")
    page = trained(study, cells, tmp_path)[1]
    assert "squad1 f1" in page and "squad2 f1" in page and "| FCD |" in page


def test_conversations_of_a_table(tmp_path):
    """A teacher with adapters, sampled scores, and five test sets beside the paper's."""
    sets, spec = ["dolly", "self-inst", "vicuna", "sinst", "uinst"], Path("paper:lrkd-4")
    for cell in grid.read(StudySettings(spec=spec)).cells:
        assert [path.stem for path in cell.options["test"]] == sets
    make_chat_teacher(tmp_path / "teacher", longest=512)
    files = [
        write_jsonl(tmp_path / f"{name}.jsonl", talks(4, seed))
        for seed, name in enumerate(("train", "valid", *sets))
    ]
    model = str(tmp_path / "teacher")
    given = {"tasks": {"dolly": ",".join(map(str, files))}, "teacher": model, "student": model}
    study = grid.read(StudySettings(spec=spec, steps=1, seeds=1, device_name="cpu", **given))
    assert [cell.variant for cell in study.cells] == study.variants
    runs, page = trained(study, (study.cells[1], study.cells[-1]), tmp_path)
    (teacher,) = tmp_path.glob("teachers/*/teacher")
    assert (teacher / "adapter").is_dir()
    for cell in runs.cells:
        result = runs.result(cell)
        assert result["recipe"]["given"].keys() >= {"learning_rate", "max_length"}
        scores = [result["scores"][f"rouge_l_{name}"] for name in sets]
        assert f"{sum(scores) / 5:.4f} |" in page
    assert "paper: VicunaEval" in page and "ours: VicunaEval" in page


def test_two_processes_train_the_runs(root, tmp_path, monkeypatch):
    """Forked workers import less than spawned ones and get the same arguments."""
    (root / "jobs.toml").write_text(one_cell_a_method(FILE.format(select="dev")))
    monkeypatch.setattr(grid_runs.multiprocessing, "get_context", {"spawn": CONTEXT}.__getitem__)
    found = grid.read(StudySettings(spec=root / "jobs.toml", seeds=1))
    runs = {jobs: GridRuns(found, tmp_path / str(jobs)) for jobs in (1, 2)}
    assert all(each.train(jobs) for jobs, each in runs.items())
    for cell in found.cells:
        one, two = (each.result(cell) for each in runs.values())
        assert one["scores"] == two["scores"]


def test_a_stopped_run_goes_on(root, tmp_path, monkeypatch):
    text = one_cell_a_method(FILE.format(select="dev").replace("labels = {}\n", ""))
    (root / "one.toml").write_text(text.replace("epochs = 1", "epochs = 2\nbatch_size = 8"))
    options = {"out": tmp_path / "out", "seeds": 1}
    with monkeypatch.context() as patch:
        stop_at(patch, 3, terminate)
        stopped = run("study", root / "one.toml", expect=143, **options)
    assert "is saved, the same command goes on" in stopped and "--resume" not in stopped
    assert list((tmp_path / "out" / "runs").glob("*/unfinished"))
    run("study", root / "one.toml", **options)
    found = grid.read(StudySettings(spec=root / "one.toml", seeds=1))
    runs = GridRuns(found, tmp_path / "out")
    hand = run_distillation(Config.of(**found.cells[0].options, out=tmp_path / "hand"))
    assert runs.result(found.cells[0])["scores"] == hand["student"]
    assert not list((tmp_path / "out" / "runs").glob("*/"))


def test_files_of_the_pages_are_valid(tmp_path):
    for page in (Path(__file__).parents[2] / "docs" / "papers").glob("*.md"):
        for text in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL):
            path = tmp_path / "file.toml"
            path.write_text(text)
            if "[stages." in text:
                assert len(stages.read(Config.of(stages=path))) == 2
            else:
                assert grid.read(StudySettings(spec=path)).cells
