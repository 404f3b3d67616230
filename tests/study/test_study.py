"""`fastkd study` on a tiny teacher: its file, runs, stops and report."""

import csv
import itertools
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from fastkd.distill.cache import TeacherCache
from fastkd.study import docstrings, grid, grid_report, grid_runs
from fastkd.study.grid import StudySettings
from fastkd.study.grid_runs import GridRuns
from fastkd.train import assembling, data
from fastkd.train.arrow_rows import UNLABELLED
from fastkd.train.config import Config
from fastkd.train.errors import InputError
from fastkd.train.saving import read_json
from tests.study.conftest import FEW, SHARED, write
from tests.support.tiny import run, source
from tests.train.tasks.through import make_decoder, write_text
from tests.train.test_data import hub


@pytest.fixture
def tiny(finished):
    return finished / "tiny"


@pytest.fixture
def root(finished, tmp_path):
    for name in ("train.tsv", "dev.tsv"):
        shutil.copy(finished / name, tmp_path)
    return tmp_path


@pytest.fixture
def written(root, tiny):
    """A study's file."""
    return lambda *texts: write(root, tiny, *texts)


def read(path, **options):
    return grid.read(StudySettings(spec=path, **options))


def check(path, **options):
    GridRuns(read(path, **options), path.parent / "out").check()


def test_report_of_a_study(finished):
    output, out = (finished / "said").read_text(), finished / "out"
    files = [json.loads(path.read_text()) for path in (out / "runs").glob("*.json")]
    assert len(files) == 6 and not list((out / "runs").glob("*/"))
    for result in files:
        last = result["history"][-1]
        assert last["step"] == 4 and last["scores"] == result["scores"]
        assert len(result["predictions"]) == len(result["references"]) == 24
        assert 0 <= result["rccc"] <= 1 and -1 <= result["intra_class_similarity"] <= 1
        unlabelled = {} if result["variant"] == "labels" else {"unlabelled": 28}
        assert result["rows"] == {"train": 12, "eval": 24, **unlabelled}
    page = (out / "report.html").read_text()
    assert "http" not in page.replace("http-equiv", "") and page.count("data:image/png") == 2
    parts = ["<h1>Tiny</h1>", "told with two seeds.", "<table>", "<img", "6 runs of",
             "<h2>one</h2>"]  # fmt: skip
    assert sorted(parts, key=page.index) == parts
    assert "RCCC" not in page and "M_ICS" not in page  # there is neither MC3KD nor KNN
    rows = {row["variant"]: row for row in csv.DictReader((out / "summary.csv").open())}
    assert list(rows) == ["labels", "fcd, alpha=0.1", "fcd, alpha=1.0"]
    assert rows["labels"]["seeds"] == "2" and rows["labels"]["difference_mean"] == ""
    trained = read_json(next(out.glob("teachers/*/teacher/fastkd.json")))
    assert trained["history"][-1]["step"] == 2  # one epoch of all 40 labels
    for line in (
        "one: fine-tuning the teacher.*tiny", r"one: teacher  accuracy 0\.\d+",
        "one: labels, seed 0  step 4/4.*left", "6/6  one  fcd, alpha=1.0  seed 1:.* 0:00 left",
    ):  # fmt: skip
        assert re.search(f"(?m)^{line}$", output), line


def test_a_cache_gives_the_same_scores(written, root, finished, monkeypatch):
    taught, made = [], assembling.Distiller

    def distiller(teacher, *rest, **more):
        taught.append(teacher)
        return made(teacher, *rest, **more)

    monkeypatch.setattr(assembling, "Distiller", distiller)
    found = read(written(FEW, "cache = true\n" + SHARED), seeds=1)
    runs = GridRuns(found, root / "out")
    (root / "out" / "runs").mkdir(parents=True)
    plain = GridRuns(read(finished / "spec.toml", seeds=1), finished / "out")
    cell = found.cells[1]
    (other,) = (plain.result(c) for c in plain.cells if c.variant == cell.variant)
    result = runs._run(cell, other["options"])
    (kept,) = (root / "out" / "cache").glob("*/")
    assert isinstance(taught[1], TeacherCache) and taught[1].path == kept
    assert list(kept.glob("*.safetensors"))
    assert result["predictions"] == other["predictions"] and result["scores"] == other["scores"]
    # The cache is written in other batches, whose padding changes the last bits.
    assert result["history"][0]["losses"] == pytest.approx(other["history"][0]["losses"], rel=1e-4)
    assert grid_runs.GridRuns(found, root).path(cell).name != plain.path(cell).name


def test_budget_in_seconds_is_converted_into_steps(written, root, tiny, monkeypatch):
    """Two short runs time a step, once for all seeds: here it takes 0.1 s, after 9 s."""
    found = read(written(), seconds=2.0)
    timed = []

    def run(config, *_, **__):
        timed.append((config.method, config.training_steps))
        config.out.mkdir()
        seconds = {"training": 9.0 + 0.1 * config.training_steps}
        return {"seconds": seconds, "rows": {"train": 12, "unlabelled": 28}}

    monkeypatch.setattr(grid_runs.distillation, "run_distillation", run)
    monkeypatch.setattr(GridRuns, "_teacher", lambda *_: tiny)
    runs = GridRuns(found, root / "out")
    labels = [cell for cell in found.cells if cell.variant == "labels"]
    assert [runs.options(cell)["training_steps"] for cell in labels] == [20, 20]
    assert timed == [("labels", steps) for steps in grid_runs.TIMED]
    assert "training_steps" not in labels[0].options and "epochs" not in found.cells[0].options


def test_options_specify_the_same_study_as_a_file(written, root):
    files = f"{root}/train.tsv,{root}/dev.tsv"
    options = {
        "methods": "labels, fcd", "options": {"fcd.alpha": [0.1, 1], "fcd.layers": "top,bottom"},
        "tasks": {"one": files, "docs": "docstrings", "p": "pairs"}, "seeds": 3, "seconds": 2.0,
    }  # fmt: skip
    found = read(written(), **options)
    variants = [f"fcd, alpha={x}, layers={y}" for x in (0.1, 1) for y in ("top", "bottom")]
    assert found.variants == ["labels", *variants]
    assert found.seeds == (0, 1, 2) and found.seconds == 2.0
    assert "training_steps" not in found.cells[0].options
    tasks = {cell.task: cell.options for cell in found.cells}
    assert list(tasks) == ["one", "docs", "p"] and tasks["p"]["task"] == "regression"
    assert tasks["docs"]["train"] == Path("runs/study/data/areas-350-60/train.jsonl")
    alone = grid.read(StudySettings(tasks={"sst2": "hub", "causal-lm": "a.txt,b.txt", "x": "hub"}))
    tasks = {cell.task: cell.options for cell in alone.cells}
    assert [tasks[name].get("task") for name in tasks] == ["sst2", "causal-lm", None]
    given = {"teacher": "packaged", "data": "x", "method": "lrkd", "seed": 3, "options": {}}
    assert tasks["x"] == given  # all other options have the defaults of distill
    assert alone.variants[:2] == ["labels", "soft_targets"] and alone.select == "none"

    # A teacher is fine-tuned as the command says.
    path = written(FEW, SHARED.replace("er = 1", "er = 1\nteacher_learning_rate = 1e-3", 1))
    assert read(path, finetune_teacher=2.0).cells[0].options["finetune_teacher"] == 2
    ready = read(path, finetune_teacher=0.0).cells[0].options
    assert not ready["finetune_teacher"] and "teacher_learning_rate" not in ready
    Config.of(ready)

    # Columns are those of all data sets of --tasks.
    columns = {"text_column": "one", "text_pair_column": "two", "label_column": "class"}
    for cell in grid.read(StudySettings(tasks=dict.fromkeys("ab", files), **columns)).cells:
        assert {name: cell.options[name] for name in columns} == columns
    with pytest.raises(InputError, match="--text-column: applies to --tasks NAME=FILES only"):
        read(written(), text_column="one")
    with pytest.raises(InputError, match="docstrings and text_column exclude each other"):
        grid.read(StudySettings(tasks={"docs": "docstrings"}, text_column="one"))


def without(name):
    """The shared part of a file without a field."""
    return "\n".join(x for x in SHARED.splitlines() if x.split(" ")[0] != name)


# Lines of the file, of its methods, and after "data: " of its data set.
@pytest.mark.parametrize(("line", "message"), [
    ('select = "best"', "select must be"),
    ("[grid]\nlearning_rat = [1e-4]", "'learning_rat' is no option"),
    ('baseline = "none"', "baseline 'none'"),
    ("steps = 0", "steps must be at least 1"),
    ("seeds = 0", "seeds must be at least one"),
    ("seeds = [0, 1, 0]", "none twice"),
    ("seeds = [-1]", "whole numbers"),
    ("seeds = true", "a number or a list"),
    ("steps = 2.5", "steps must be int"),
    ("seconds = 3", "steps and seconds exclude each other"),
    ("student_layers = 9", "labels on one: student_layers 9: the teacher has only 4 layers"),
    ('cache = "no"', "cache must be bool"),
    ("titel = 5", "no option 'titel'; .*did you mean 'title'"),
    ('paper = {title = "x"}', "paper must have a title"),
    ('paper = {title = "x", columns = 3}', "paper.* must"),
    ('paper = {title = "x", columns = ["a"], rows = {labels = [1, 2]}}', "paper.rows.* must"),
    ('teacher = "/nowhere"', "teacher /nowhere: no such directory"),
    ("[methods]\nfdc = {}", "fdc"),
    ("[methods]\nfcd = {alfa = 1}", "alfa"),
    ("[methods]\nfcd = {alpha = -1}", "alpha"),
    ('[methods]\nfcd = {layers = "tops"}', "top"),
    ('[methods]\nlrc_bert = {preset = "papers"}', "paper"),
    ("[methods]\nfcd = 5", "methods.fcd must be a table"),
    ('data: labelled = "x"', "labelled must be int"),
    ('data: docstrings = "area"', "docstrings must be areas or pairs"),
    ('data: docstrings = "areas"', "docstrings and eval exclude each other"),
    ("data: train = 5", "train must be a path"),
    ("data: files = 5", "tasks.one has no option 'files'"),
    ('data: task = "causal-lm"', "column"),
    ('data: train = "none.tsv"', r"none\.tsv: no such file"),
])  # fmt: skip
def test_an_invalid_field_is_named(written, line, message):
    _, of_data, field = line.rpartition("data: ")
    others = without(field.split(" ")[0])
    shared = f"{others}\n{field}\n" if of_data else f"{field}\n{others}"
    given = (f"{line}\n", SHARED) if line.startswith("[") else (FEW, shared)
    with pytest.raises(InputError, match=message):
        check(written(*given))


def test_unreadable_files(root):
    path = root / "spec.yaml"
    for text in ("tasks: [1", "- 1"):
        path.write_text(text)
        with pytest.raises(InputError, match=r"spec\.yaml can't be read"):
            read(path)


def test_a_run_belongs_to_the_content_of_its_files(written, root, tiny, monkeypatch):
    mine = shutil.copytree(tiny, root / "mine")
    found = read(written(), teacher=str(mine), seeds=1)
    runs, (cell, *_) = GridRuns(found, root / "out"), found.cells
    seen = {runs.path(cell)}
    for path, text in ((root / "dev.tsv", "sentence\tlabel\n"), (mine / "model.safetensors", "x")):
        of_teacher = {"teacher": str(mine), "train": root / "train.tsv"}
        before = grid_runs.key_of(of_teacher)
        path.write_text(text)
        assert runs.path(cell) not in seen and runs.path(cell) == runs.path(cell)
        assert (grid_runs.key_of(of_teacher) == before) == (path.parent != mine)
        seen.add(runs.path(cell))
    keys = set()
    for labels, commit in (([0, 1], "a"), ([1, 0], "a"), ([1, 0], "b")):
        monkeypatch.setattr(grid_runs, "file_of", lambda *_, at=commit: Path(root, at, "x"))
        rows = {"sentence": ["a", "b"], "label": labels}
        hub(monkeypatch, dict.fromkeys(("train", "validation"), rows))
        for cached in (grid_runs._commit, grid_runs._hub_rows):
            cached.cache_clear()
        keys.add(grid_runs.key_of({"task": "sst2", "teacher": "bert-base-uncased"}))
    assert len(keys) == 3


def test_report_does_not_overwrite_files_that_fastkd_did_not_write(root, finished):
    for name in (*grid_report.FILES, "fastkd.json"):
        out = root / name
        out.mkdir()
        (out / name).write_text("mine")
        with pytest.raises(InputError, match=f"{name}, which `fastkd study` did not write"):
            grid_report.claim(out)
        assert (out / name).read_text() == "mine" and len(list(out.iterdir())) == 1
    grid_report.claim(finished / "out")


def test_few_labels_balances_classes_and_depends_on_the_seed(root):
    corpus = data.load(source(train=root / "train.tsv", evals=root / "dev.tsv"))
    corpora = [data.few_labels(corpus, 10, seed) for seed in (0, 0, 1)]
    labelled = [set(corpus.train.columns("number")) for corpus in corpora]
    assert labelled[0] == labelled[1] != labelled[2]
    for found, numbers in zip(corpora, labelled, strict=True):
        assert sorted(found.train.labels) == [0] * 5 + [1] * 5
        assert set(found.unlabelled.labels) == {UNLABELLED} and len(found.unlabelled) == 30
        assert not numbers & set(found.unlabelled.columns("number"))
        assert len(found.teacher_train) == 40
    more = data.few_labels(corpora[0], 4, 0)  # rows without labels stay unlabelled
    assert (len(more.train), len(more.unlabelled)) == (4, 36)


def test_docstrings_are_written_as_files(tmp_path, monkeypatch):
    for kind, count in (("areas", 2), ("pairs", 5)):
        texts = [f"text {i} of {kind}" for i in range(20)]
        rows = [{"text": text, "label": i % count} for i, text in enumerate(texts)]
        for row, label, pair in zip(rows, ["files", "text"] * 10, texts[::-1], strict=True):
            row |= {"text_pair": pair} if kind == "pairs" else {"label": label}
        monkeypatch.setitem(docstrings.SETS, kind, lambda *_, rows=rows: [rows, rows])
    path = tmp_path / "docs.toml"
    path.write_text(
        'steps = 1\n[methods]\nlabels = {}\n[tasks.a]\ndocstrings = "areas"\nrows = [10, 2]\n'
        '[tasks.b]\ndocstrings = "pairs"\n'
    )
    found = grid.read(StudySettings(spec=path, runs=tmp_path))
    GridRuns(found, tmp_path)._write_docstrings()
    one, two = (data.load(source(**{
        k: v for k, v in cell.options.items() if k in ("train", "evals", "task", "text_pair_column")
    })) for cell in found.cells[::4])  # fmt: skip
    assert one.names == ["files", "text"] and Counter(one.train.labels.tolist()) == {0: 10, 1: 10}
    assert two.names is None and two.train.pairs == two.train.texts[::-1]
    assert sorted(set(two.train.labels.tolist())) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_study_of_rows_without_classes(tmp_path, without_pictures):
    make_decoder(tmp_path / "teacher")
    for i, name in enumerate(("train", "dev")):
        write_text(tmp_path / f"{name}.txt", 20, i)
    shared = SHARED[: SHARED.index("[tasks")].replace("finetune_teacher = 1\n", "")
    text = f'{shared}[tasks.one]\ntask = "causal-lm"\ntrain = "train.txt"\neval = "dev.txt"\n'
    with pytest.raises(InputError, match="knn on one: method knn: compares rows of one class"):
        check(write(tmp_path, tmp_path / "teacher", "[methods]\nknn = {}\n", text))
    path = write(tmp_path, tmp_path / "teacher", "[methods]\nfcd = {}\n", text)
    run("study", path, out=tmp_path / "out", seeds=1, steps=1)
    (row,) = csv.DictReader((tmp_path / "out" / "summary.csv").open())
    (path,) = (tmp_path / "out" / "runs").glob("*.json")
    result, page = read_json(path), (tmp_path / "out" / "report.md").read_text()
    assert result["predictions"] == [] and result["classes"] == [] and 0 <= result["rccc"] <= 1
    assert "intra_class_similarity" not in result and row["rows_low"] == ""
    assert row["metric"] == "perplexity" and "lower is better" in page
    assert "Classes without" not in page and "same prediction" not in page


ROOT = Path(__file__).resolve().parents[2]


def test_files_of_bench_and_of_the_pages_are_valid(tmp_path, monkeypatch):
    """A plan in stages: tests/cli/test_stages.py."""
    for name in ("GLUE", "TEXTS", "CONLL", "DECODER", "GENERAL"):
        monkeypatch.setenv(name, "/data")
    pages = [*(ROOT / "docs/papers").glob("*.md"), ROOT / "docs/studies/README.md"]
    blocks = re.findall(r"```toml\n(.*?)```", "".join(p.read_text() for p in pages), re.DOTALL)
    assert len(blocks) == 3
    for i, text in enumerate(blocks):
        (tmp_path / f"{i}.toml").write_text(text)
        assert read(tmp_path / f"{i}.toml").cells
    for path in (ROOT / "bench/studies").glob("*.toml"):
        found = read(path)
        assert len(found.seeds) >= 3 and len(found.variants) >= 2
        runs = {(cell.variant, cell.task): cell.options for cell in found.cells}
        assert runs.keys() == {*itertools.product(found.variants, found.tasks)}
        for options in runs.values():
            Config.of(**options)
        paper = found.paper or {"rows": {}}
        assert paper["rows"].keys() <= {*found.variants}
        assert all(len(v) == len(paper["columns"]) for v in paper["rows"].values())
