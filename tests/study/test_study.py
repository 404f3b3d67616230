"""`fastkd study` on a tiny teacher: its file, runs, stops, searches and report."""

import csv
import dataclasses
import functools
import itertools
import pickle
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fastkd.cli import display
from fastkd.distill.cache import TeacherCache
from fastkd.study import budget, docstrings, grid_report, grid_runs
from fastkd.study.budget import Search
from fastkd.study.grid_runs import GridRuns, write_result
from fastkd.train import assembling, data
from fastkd.train.config import Config
from fastkd.train.distillation import run_distillation
from fastkd.train.errors import InputError, RunFailed
from fastkd.train.progress import Display
from fastkd.train.saving import read_json
from tests.study.conftest import read
from tests.support.runs import Lines, once, stop_at, terminate
from tests.support.tiny import run, source, write_tsv
from tests.train.tasks.through import make_bare
from tests.train.test_data import hub

SHARED = """
title = "Tiny <i>"
teacher = "tiny"
finetune_teacher = 1
select = "none"
seeds = 2
steps = 4
student_layers = 2
learning_rate = 1e-2
device = "cpu"
[tasks.one]
train = "train.tsv"
eval = "dev.tsv"
labelled = 12
max_length = 12
"""
FEW = "[methods]\nlabels = {}\nfcd = {alpha = [1.0]}\n"
SEARCH = """
[grid]
learning_rate = [1e-4, 2e-4, 5e-4, 1e-3]
[methods]
labels = {}
fcd = {alpha = [0.1, 0.2, 0.5, 1.0]}
"""


def write(folder, methods=FEW, shared=SHARED):
    path = folder / "spec.toml"
    path.write_text(shared + methods)
    return path


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A folder with a study that ran in ``out``; ``said`` is its output, a line for every step."""

    def make(root):
        make_bare(root / "tiny", layers=4)
        write_tsv(root / "train.tsv", 40, 0)
        write_tsv(root / "dev.tsv", 24, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(display, "LINE_EVERY", 0.0)
            said = run("study", write(root), out=root / "out")
        (root / "said").write_text(said)

    return once(tmp_path_factory, "study", make)


@pytest.fixture
def done(finished):
    return GridRuns(read(finished / "spec.toml"), finished / "out")


@pytest.fixture
def folder(finished, tmp_path):
    """Teacher and rows of the study that ran."""
    shutil.copytree(finished, tmp_path, ignore=shutil.ignore_patterns("out"), dirs_exist_ok=True)
    return tmp_path


def test_report_of_a_study(finished, done, tmp_path):
    """Its runs are those of `fastkd distill`, with one fine-tuned teacher, equal to its own."""
    results, out = [done.result(cell) for cell in done.grid.cells], done.out
    for result in results:
        last = result["history"][-1]
        assert last["step"] == 4 and last["scores"] == result["scores"]
        assert len(result["predictions"]) == len(result["references"]) == 24
        assert 0 <= result["rccc"] <= 1 and -1 <= result["intra_class_similarity"] <= 1
        unlabelled = {} if result["variant"] == "labels" else {"unlabelled": 28}
        assert result["rows"] == {"train": 12, "eval": 24, **unlabelled}
        assert result["training_rows"] == [6, 6]
    # Of seed 0, as the shared teacher.
    report = run_distillation(Config.of(**done.grid.cells[2].options, out=tmp_path / "hand"))
    expected = report["teacher"], report["student"], report["best"]["epoch"]
    assert tuple(results[2][name] for name in ("teacher", "scores", "best")) == expected
    assert results[2]["history"][0]["losses"] == report["history"][0]["losses"]
    (trained,) = out.glob("teachers/*/teacher")
    assert read_json(trained / "fastkd.json")["history"][-1]["step"] == 2  # an epoch of 40 labels
    page = (out / "report.html").read_text()
    top, middle, _ = page.split("<img")
    assert "<h1>Tiny &lt;i&gt;</h1>" in top and "told with two seeds." in top
    assert "4 runs of" in middle and "<h2>one</h2>" in middle
    assert "http" not in page.replace("http-equiv", "") and page.count("data:image/png") == 2
    assert "RCCC" not in page and "M_ICS" not in page  # there is neither MC3KD nor KNN
    text = (out / "report.md").read_text()
    assert "| mean over tasks |" in text and "None" not in text
    summary, runs = ([*csv.DictReader(out.joinpath(x).open())] for x in ("summary.csv", "runs.csv"))
    assert [row["variant"] for row in summary] == ["labels", "fcd, alpha=1.0"]
    assert summary[0]["seeds"] == "2" and summary[0]["difference_mean"] == ""
    assert len(runs) == 4 and runs[-1]["values"] == "alpha=1.0"
    assert float(runs[-1]["accuracy"]) == results[-1]["scores"]["accuracy"]
    for line in (
        "one: fine-tuning the teacher.*tiny", r"one: teacher  accuracy 0\.\d+",
        "one: labels, seed 0  step 4/4.*left", "4/4  one  fcd, alpha=1.0  seed 1:.* 0:00 left",
    ):  # fmt: skip
        assert re.search(f"(?m)^{line}$", (finished / "said").read_text()), line


@pytest.mark.usefixtures("without_pictures")
def test_a_stopped_study_trains_what_is_missing_or_changed(finished, done, tmp_path, monkeypatch):
    """To the same results. The work of a process is done here; of one that died, nowhere.

    Real processes share the runs of a study in tests/cli/test_processes.py.
    """
    command, out = ("study", finished / "spec.toml"), shutil.copytree(done.out, tmp_path / "out")
    runs = GridRuns(done.grid, out)
    changed, damaged, *kept = map(runs.path, runs.cells)
    next(out.glob("teachers/*/teacher/model.safetensors")).write_bytes(b"x")  # tuned again
    changed.write_text(changed.read_text().replace('"seed": 0', '"seed": 9'))
    damaged.write_text(damaged.read_text()[:100])
    assert [runs.done(cell) for cell in runs.cells[:3]] == [False, False, True]
    times = [path.stat().st_mtime_ns for path in kept]
    with monkeypatch.context() as patch:
        stop_at(patch, 3, terminate)
        stopped = run(*command, expect=143, out=out)
    assert "is saved, the same command goes on" in stopped and "--resume" not in stopped
    assert list(changed.with_suffix("").glob("unfinished"))

    def process(target, args, daemon):
        work = functools.partial(target, *pickle.loads(pickle.dumps(args)))
        return SimpleNamespace(exitcode=code, is_alive=bool, start=bool if code else work)

    context = {"spawn": SimpleNamespace(Process=process)}.get
    monkeypatch.setattr(grid_runs.multiprocessing, "get_context", context)
    code = -9
    said = run(*command, expect=1, out=out, jobs=2)
    assert "a process died; the same command" in said
    assert "2 runs are not finished" in (out / "report.md").read_text()
    code = 0
    said = run(*command, out=out, jobs=2)
    assert changed.name in said and damaged.name in said and kept[0].name not in said
    assert [path.stat().st_mtime_ns for path in kept] == times and not list(out.glob("runs/*/"))
    for cell in runs.cells[:2]:
        for name in ("scores", "teacher", "predictions"):
            assert runs.result(cell)[name] == done.result(cell)[name]
    monkeypatch.setattr(GridRuns, "work", mock.Mock(side_effect=InputError("labels on one")))
    with pytest.raises(SystemExit, match="Error: labels on one"):
        grid_runs._worker(done.grid, out, torch.get_num_threads(), Display)


def test_a_cache_gives_the_same_scores(folder, done, monkeypatch):
    made = mock.Mock(wraps=assembling.Distiller)
    monkeypatch.setattr(assembling, "Distiller", made)
    study = read(write(folder, FEW, "cache = true\n" + SHARED), seeds=1)
    runs, other = GridRuns(study, folder / "out"), done.result(done.cells[1])
    (folder / "out" / "runs").mkdir(parents=True)
    cell = runs.cells[1]
    result = runs._run(cell, other["options"])
    (kept,) = (folder / "out" / "cache").glob("*/")
    taught = made.call_args.args[0]
    assert isinstance(taught, TeacherCache) and taught.path == kept
    assert result["predictions"] == other["predictions"] and result["scores"] == other["scores"]
    # The cache is written in other batches, whose padding changes the last bits.
    assert result["history"][0]["losses"] == pytest.approx(other["history"][0]["losses"], rel=1e-4)
    studies = (dataclasses.replace(study, **x) for x in ({}, {"cache": False}, {"seconds": 5.0}))
    assert len({GridRuns(x, runs.out).path(cell) for x in studies}) == 3


def test_cells_of_a_file(folder):
    """A list at the top makes variants, and a searched one if each of its values is reported."""
    shared = SHARED.replace("layers = 2", "layers = [1, 2]")
    every = read(write(folder, SEARCH, shared), steps=3, seeds=1)
    assert "fcd, student_layers=2, learning_rate=0.001, alpha=1.0" in every.variants
    assert [cell.options["training_steps"] for cell in every.cells] == [3] * 40
    found = read(write(folder, SEARCH, shared.replace('"none"', '"dev"')))
    variants = [f"{name}, student_layers={n}" for name in ("labels", "fcd") for n in (1, 2)]
    assert found.variants == variants and len(found.cells) == 2 * 2 * (4 + 4 * 4)
    cell = found.cells[-1]
    assert cell.values == {"learning_rate": 1e-3, "--set alpha": 1.0} and cell.seed == 1
    values = {"learning_rate": 1e-3, "options": {"alpha": 1.0}, "student_layers": 2, "seed": 1}
    assert {**cell.options, **values} == cell.options


def test_options_specify_the_same_study_as_a_file(folder):
    files = f"{folder}/train.tsv,{folder}/dev.tsv"
    tasks = {"one": files, "docs": "docstrings", "p": "pairs"}
    lists = {"fcd.alpha": [0.1, 1], "fcd.layers": "top,bottom"}
    given = {"methods": "labels, fcd", "options": lists, "tasks": tasks}
    found = read(write(folder), seeds=3, seconds=2.0, **given)
    variants = [f"fcd, alpha={x}, layers={y}" for x in (0.1, 1) for y in ("top", "bottom")]
    assert found.variants == ["labels", *variants]
    assert found.seeds == (0, 1, 2) and found.seconds == 2.0
    tasks = {cell.task: cell.options for cell in found.cells}
    pairs = {"task": "regression", "text_pair_column": "text_pair", "metric": "spearman"}
    assert pairs.items() <= tasks["p"].items()
    assert tasks["docs"]["train"] == Path("runs/study/data/areas-350-60/train.jsonl")
    alone = read(tasks={"sst2": "hub", "causal-lm": "a.txt,b.txt", "x": "hub"})
    tasks = {cell.task: cell.options for cell in alone.cells}
    assert [tasks[name].get("task") for name in tasks] == ["sst2", "causal-lm", None]
    given = {"teacher": "packaged", "data": "x", "method": "lrkd", "seed": 3, "options": {}}
    assert tasks["x"] == given  # all other options have the defaults of distill
    assert alone.variants[:2] == ["labels", "soft_targets"] and alone.select == "none"
    # A teacher is fine-tuned as the command says.
    path = write(folder, FEW, SHARED.replace("er = 1", "er = 1\nteacher_learning_rate = 1e-3", 1))
    assert read(path, finetune_teacher=2.0).cells[0].options["finetune_teacher"] == 2
    ready = read(path, finetune_teacher=0.0).cells[0].options
    assert not ready["finetune_teacher"] and "teacher_learning_rate" not in ready
    # Columns are those of all data sets of --tasks.
    columns = {"text_column": "one", "text_pair_column": "two", "label_column": "class"}
    cells = read(tasks=dict.fromkeys("ab", files), **columns).cells
    assert all(columns.items() <= cell.options.items() for cell in cells)
    with pytest.raises(InputError, match="--text-column: applies to --tasks NAME=FILES only"):
        read(path, text_column="one")
    with pytest.raises(InputError, match="docstrings and text_column exclude each other"):
        read(tasks={"docs": "docstrings"}, text_column="one")


# Lines of the file, of its methods, and after "data: " of its data set.
@pytest.mark.parametrize(("line", "message"), [
    ('select = "best"', "select must be"),
    ("[grid]\nlearning_rat = [1e-4]", "'learning_rat' is no option"),
    ('baseline = "none"', "baseline 'none'"),
    ("seeds = [0, 1, 0]", "none twice"),
    ("seeds = [-1]", "whole numbers"),
    ("seeds = true", "a number or a list"),
    ("seconds = 3", "steps and seconds exclude each other"),
    ("student_layers = 9", "labels on one: student_layers 9: the teacher has only 4 layers"),
    ('cache = "no"', "cache must be bool"),
    ("titel = 5", "no option 'titel'; .*did you mean 'title'"),
    ('paper = {title = "x"}', "paper must have a title"),
    ('paper = {title = "x", columns = ["a"], rows = {labels = [1, 2]}}', "paper.rows.* must"),
    ("[methods]\nfcd = {alfa = 1}", "alfa"),
    ("[methods]\nfcd = 5", "methods.fcd must be a table"),
    ('data: labelled = "x"', "labelled must be int"),
    ('data: docstrings = "area"', "docstrings must be areas or pairs"),
    ('data: docstrings = "areas"', "docstrings and eval exclude each other"),
    ('data: docstrings = "areas"\nrows = [5, 0]', "rows must be two positive numbers"),
    ('data: task = "causal-lm"', "column"),
    ('data: train = "none.tsv"', r"none\.tsv: no such file"),
])  # fmt: skip
def test_an_invalid_field_is_named(folder, line, message):
    _, of_data, field = line.rpartition("data: ")
    others = "\n".join(x for x in SHARED.splitlines() if x.split(" ")[0] != field.split(" ")[0])
    shared = f"{others}\n{field}\n" if of_data else f"{field}\n{others}\n"
    given = (f"{line}\n", SHARED) if line.startswith("[") else (FEW, shared)
    with pytest.raises(InputError, match=message):
        GridRuns(read(write(folder, *given)), folder / "out").check()


def test_a_run_belongs_to_the_content_of_its_files(folder, monkeypatch):
    runs = GridRuns(read(write(folder), seeds=1), folder / "out")
    cell = runs.cells[0]
    of_teacher = {"teacher": str(folder / "tiny"), "train": folder / "train.tsv"}
    for name in ("dev.tsv", "tiny/model.safetensors"):
        path, teacher = runs.path(cell), grid_runs.key_of(of_teacher)
        assert runs.path(cell) == path
        (folder / name).write_bytes((folder / name).read_bytes()[::-1])  # as long
        assert runs.path(cell) != path
        assert (grid_runs.key_of(of_teacher) == teacher) == (name == "dev.tsv")
    keys = set()
    for labels, commit in (([0, 1], "a"), ([1, 0], "a"), ([1, 0], "b")):
        monkeypatch.setattr(grid_runs, "file_of", lambda *_, at=commit: Path(at, "x"))
        rows = {"sentence": ["a", "b"], "label": labels}
        hub(monkeypatch, dict.fromkeys(("train", "validation"), rows))
        for cached in (grid_runs._commit, grid_runs._hub_rows):
            cached.cache_clear()
        keys.add(grid_runs.key_of({"task": "sst2", "teacher": "bert-base-uncased"}))
    assert len(keys) == 3


def test_report_does_not_overwrite_files_that_fastkd_did_not_write(tmp_path, finished):
    for name in (*grid_report.FILES, "fastkd.json"):
        out = tmp_path / name
        out.mkdir()
        (out / name).write_text("mine")
        with pytest.raises(InputError, match=f"{name}, which `fastkd study` did not write"):
            grid_report.claim(out)
        assert (out / name).read_text() == "mine" and len(list(out.iterdir())) == 1
    grid_report.claim(finished / "out")


def test_few_labels_are_drawn_by_the_seed(folder):
    corpus = data.load(source(train=folder / "train.tsv", evals=folder / "dev.tsv"))
    same, found, other = (data.few_labels(corpus, 10, seed) for seed in (0, 0, 1))
    kept, *others = ({*x.train.columns("number")} for x in (found, same, other))
    assert kept == others[0] != others[1] and not kept & {*found.unlabelled.columns("number")}
    assert sorted(found.train.labels) == [0] * 5 + [1] * 5 and {*found.unlabelled.labels} == {-100}
    more = data.few_labels(found, 4, 0)  # rows without labels stay unlabelled
    assert (len(more.train), len(more.unlabelled), len(found.teacher_train)) == (4, 36, 40)


def test_docstrings_are_written_as_files(tmp_path, monkeypatch):
    made = {kind: mock.Mock(return_value=[[{"text": kind}], []]) for kind in ("areas", "pairs")}
    monkeypatch.setattr(docstrings, "SETS", made)
    study = read(tasks={"a": "docstrings", "b": "pairs"}, methods="labels", runs=tmp_path, seeds=1)
    for _ in range(2):
        GridRuns(study, tmp_path)._write_docstrings()
    for cell, (kind, rows_of) in zip(study.cells, made.items(), strict=True):
        rows_of.assert_called_once_with(350, 60)
        assert read_json(cell.options["train"]) == {"text": kind}
        assert cell.options["evals"].read_text() == ""


def test_files_of_bench_and_of_the_pages_are_valid(tmp_path):
    """A plan in stages: tests/cli/test_stages.py."""
    root = Path(__file__).resolve().parents[2]
    pages = [*(root / "docs/papers").glob("*.md"), root / "docs/studies/README.md"]
    blocks = re.findall(r"```toml\n(.*?)```", "".join(p.read_text() for p in pages), re.DOTALL)
    assert len(blocks) == 3
    for text in blocks:
        assert read(write(tmp_path, "", text)).cells
    for path in (root / "bench/studies").glob("*.toml"):
        found = read(path)
        assert len(found.seeds) >= 3 and len(found.variants) >= 2
        runs = {(cell.variant, cell.task): cell.options for cell in found.cells}
        assert runs.keys() == {*itertools.product(found.variants, found.tasks)}
        for options in runs.values():
            Config.of(**options)
        assert found.paper is None or found.paper["rows"].keys() <= {*found.variants}
    for text in ("tasks: [1", "- 1"):
        (tmp_path / "spec.yaml").write_text(text)
        with pytest.raises(InputError, match=r"spec\.yaml can't be read"):
            read(tmp_path / "spec.yaml")


# What is searched, and within some seconds or hours


def searching(folder, **options):
    """Two seeds of 4 candidates of one arm and 16 of the other."""
    return read(write(folder, SEARCH, SHARED.replace('"none"', '"dev"')), **options)


def test_the_best_cell_of_a_metric_to_minimise(folder):
    found = searching(folder, seeds=1, methods="labels")
    for lower, best in (([], 4), (["perplexity"], 2)):
        runs = GridRuns(found, folder / str(best))
        (runs.out / "runs").mkdir(parents=True)
        write_result(runs.path(found.cells[0]), {"failed": "not finite"})
        for value, cell in enumerate(found.cells[1:], 2):
            result = {"scores": {"perplexity": value}, "lower_is_better": lower}
            write_result(runs.path(cell), result)
        (kept,) = grid_report.best_cells(runs).values()
        assert kept["scores"] == {"perplexity": best}


def test_a_budget_in_seconds_is_converted_into_steps(folder, monkeypatch):
    """Two short runs time a step, once for all seeds: here it takes 0.1 s, after 9 s."""
    timed = []

    def run(config, *_, **__):
        timed.append((config.method, config.training_steps))
        config.out.mkdir()
        seconds = {"training": 9.0 + 0.1 * config.training_steps}
        return {"seconds": seconds, "rows": {"train": 12, "unlabelled": 28}}

    monkeypatch.setattr(grid_runs.distillation, "run_distillation", run)
    monkeypatch.setattr(GridRuns, "_teacher", lambda *_: folder / "tiny")
    runs = GridRuns(read(write(folder), seconds=2.0), folder / "out")
    labels = runs.grid.cells[:2]
    assert [runs.options(cell)["training_steps"] for cell in labels] == [20, 20]
    assert timed == [("labels", steps) for steps in grid_runs.TIMED]
    two = dataclasses.replace(labels[0], options=labels[0].options | {"stages": {"a": {}, "b": {}}})
    found = [*zip(*map(runs.steps, (labels[0], two)), strict=True)]
    assert found == [(6, 6), pytest.approx((0.1, 0.2))]  # 3 epochs of 40 rows, 32 in a batch
    assert "training_steps" not in labels[0].options


def test_the_widest_search_that_fits(folder):
    study = searching(folder)
    arms = budget.arms_of(study)
    assert [len(cells) for cells in arms.values()] == [4, 16]
    for limit, expected in (
        (1600, None),  # 2 seeds of 16 and 4 candidates, 40 seconds each
        (1599, Search(16, 2)),  # a sixteenth of 16, a quarter of 4, then 2 seeds; labels: of 4
        (280, Search(16, 2)), (279, Search(4, 2)),
        (240, Search(4, 2)), (239, Search(1, 2)),
        (160, Search(1, 2)), (159, Search(1, 1)), (40, Search(1, 1, 0.5)),
    ):  # fmt: skip
        assert budget.plan(study, dict.fromkeys(arms, 40.0), limit) == expected, limit


@pytest.fixture
def trained(monkeypatch):
    """Steps of the runs of each training, whose scores rise with alpha and learning rate."""
    found = []

    def train(self, jobs):
        (self.out / "runs").mkdir(parents=True, exist_ok=True)
        found.append([cell.options["training_steps"] for cell in self.grid.cells])
        for cell in self.grid.cells:
            score = cell.options["learning_rate"] + cell.options["options"].get("alpha", 0)
            result = {"scores": {"accuracy": score}, "lower_is_better": []}
            write_result(self.path(cell), result)
        return True

    monkeypatch.setattr(GridRuns, "train", train)
    monkeypatch.setattr(GridRuns, "steps", lambda self, cell: (40, 1.0))
    monkeypatch.setattr(GridRuns, "teacher_seconds", lambda self, cell: 100.0)
    return found


def test_the_best_quarter_goes_on(folder, trained, monkeypatch):
    lines, study = Lines(), searching(folder, steps=40, options={"fcd.alpha": [1, 2, 3, 4, 5]})
    found = budget.searched(GridRuns(study, folder, lines), 1600 / 3600, 1).grid
    assert trained == [[10] * 4 + [1] * 20, [2] * 5, [10] * 2]
    assert [(c.variant, c.seed, c.options["training_steps"]) for c in found.cells] == [
        ("labels", 0, 40), ("labels", 1, 40), ("fcd", 0, 40), ("fcd", 1, 40)
    ]  # fmt: skip
    assert found.cells[-1].values == {"learning_rate": 1e-3, "--set alpha": 5}
    best = "fcd on one: 20 of 20 values searched, best learning_rate=0.001, alpha=5."
    assert found.notes[1] == best
    said = "all 48 runs take about 0.53 hours, and their teachers 0.028; these 0.068: at most 20"
    assert lines.lines[1].startswith(said)
    monkeypatch.setattr(GridRuns, "train", lambda self, jobs: False)
    with pytest.raises(RunFailed, match="a process died; the same command"):
        budget.searched(GridRuns(study, folder), 1600 / 3600, 1)


def test_the_first_values_and_a_small_budget(folder, trained, monkeypatch):
    first = searching(folder, grid="first")
    assert len(first.cells) == 4 and first.cells[-1].options["options"] == {"alpha": 0.1}
    written = []
    monkeypatch.setattr(grid_report, "write", lambda runs, out: written.append(runs.cells) or [])
    small = {"out": folder / "out", "budget": 1e-15, "grid": "first", "methods": "labels"}
    output = run("study", folder / "spec.toml", **small)
    assert "then 1 seed with 0% of the steps" in output
    assert trained == [[1]] and [len(cells) for cells in written] == [1]
    assert "labels on one:" not in output  # nothing was searched
