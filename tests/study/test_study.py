"""`fastkd study` on a tiny teacher: its file, runs, kills and report."""

import csv
import dataclasses
import itertools
import json
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModel
from typer.testing import CliRunner

from fastkd.cli import display
from fastkd.cli import study_command as command
from fastkd.cli.display import new_console
from fastkd.cli.main import app
from fastkd.distill.baselines import BASELINES
from fastkd.study import spec, study_report, study_runs
from fastkd.study.study_settings import StudySettings
from fastkd.study.task_runs import TaskRuns, few_labels
from fastkd.train.arrow_rows import UNLABELLED
from fastkd.train.errors import InputError
from fastkd.train.progress import Display
from fastkd.train.run import Run
from fastkd.train.saving import read_json
from tests.cli.test_cli import stop_at, terminate
from tests.distill.processes import CONTEXT
from tests.support.tiny import make_teacher, read_otherwise, write_tsv

SHARED = """
title = "Tiny"
teacher = "{tiny}"
seeds = 2
steps = 3
evaluations = 2
batch_size = 8
student_layers = 2
device = "cpu"
[tasks.one]
train = "train.tsv"
eval = "dev.tsv"
teacher_steps = 4
labelled = 12
max_length = 12
"""
FEW = """
[methods]
labels = {}
fcd = {alpha = [0.1, 1.0]}
"MC3KD, top" = {method = "mc3kd", layers = "top", teacher_layers = "bottom"}
"""


def with_rows(folder):
    write_tsv(folder / "train.tsv", 40, 0)
    write_tsv(folder / "dev.tsv", 24, 1)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A teacher next to every test's folder, so that equal files specify equal runs."""
    return make_teacher(tmp_path_factory.getbasetemp() / "tiny", head=False)


@pytest.fixture
def root(tmp_path, tiny):
    return with_rows(tmp_path)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, tiny):
    """Output of the command, with a line for every step, and its folder."""
    root = with_rows(tmp_path_factory.mktemp("finished"))
    words = ["study", str(write(root)), "--out", str(root / "out")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(display, "LINE_EVERY", 0.0)
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return result.output, root / "out"


def write(root, methods=FEW, shared=SHARED):
    path = root / "spec.toml"
    path.write_text(shared.replace("{tiny}", str(root.parent / "tiny")) + methods)
    return path


def runs(out):
    """Content of the runs' files without measurements and checksums."""
    found = {}
    for path in (out / "runs").glob("*.json"):
        content = json.loads(path.read_text())
        del content["measured"], content["sha256"]
        found[path.name] = content
    return found


def study(path, out, **options):
    with new_console() as console:
        command.run(StudySettings(spec=path, out=out, **options), console)


def test_study_writes_runs_and_report_and_trains_only_new_seeds(root, finished):
    output, out = finished[0], shutil.copytree(finished[1], root / "out")
    assert "8 runs: 1 data set, 4 variants, 2 seeds, 3 steps each" in output
    found = runs(out)
    assert len(found) == 8
    for run in found.values():
        assert run["history"][-1]["step"] == 3 and run["history"][-1]["scores"] == run["scores"]
        assert len(run["predictions"]) == 24 and run["steps"] == 3
        assert 0 <= run["rccc"] <= 1 and -1 <= run["intra_class_similarity"] <= 1
    layers = {tuple(run["teacher_layers"]) for name, run in found.items() if "mc3kd" in name}
    assert layers == {(3, 4)}
    page = (out / "report.html").read_text()
    assert "http" not in page.replace("http-equiv", "") and page.count("data:image/png") == 2
    assert "MC3KD, top" in page and "commit" in page
    assert "<li>difference: to the baseline, paired by seed</li>" in page
    assert next(csv.DictReader((out / "runs.csv").open()))["task"] == "one"
    rows = {row["variant"]: row for row in csv.DictReader((out / "summary.csv").open())}
    assert list(rows) == ["labels", "fcd, alpha=0.1", "fcd, alpha=1.0", "MC3KD, top"]
    assert rows["labels"]["seeds"] == "2" and rows["labels"]["difference_mean"] == ""
    assert "| labels " in (out / "report.md").read_text()

    before = {p: p.stat().st_mtime_ns for p in (out / "runs").glob("*.json")}
    study(write(root), out, seeds=3)
    assert len(runs(out)) == 12
    assert all(p.stat().st_mtime_ns == at for p, at in before.items())


@pytest.mark.slow
def test_killed_study_resumes_to_the_same_results(root, finished, monkeypatch):
    methods = FEW + "lrkd = {}\n"  # has parameters of its own
    path, whole = write(root, methods), shutil.copytree(finished[1], root / "whole")
    study(path, whole, seeds=1)
    out = root / "killed"
    process = CONTEXT.Process(target=study, args=(path, out), kwargs={"seeds": 1})
    process.start()
    deadline = time.monotonic() + 120
    while process.is_alive() and time.monotonic() < deadline:
        if len(list((out / "runs").glob("*.json"))) >= 2:
            process.kill()
        time.sleep(0.01)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(runs(out)) < 5
    (out / "runs" / "left.lock").touch()
    # Forked workers import less than spawned ones and get the same arguments.
    monkeypatch.setattr(study_runs.multiprocessing, "get_context", {"spawn": CONTEXT}.__getitem__)
    study(path, out, seeds=1, jobs=2)
    expected = {name: run for name, run in runs(whole).items() if run["run"]["seed"] == 0}
    assert runs(out) == expected and len(expected) == 5


@pytest.mark.parametrize("step", [None, 2])  # before the first run, or within one
def test_stopped_study_names_the_command_that_continues(root, monkeypatch, step):
    if step is None:
        monkeypatch.setattr(TaskRuns, "make_teacher", lambda *_, **__: terminate())
    else:
        stop_at(monkeypatch, step, terminate)
    words = ["study", str(write(root)), "--out", str(root / "out")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 143, result.output
    assert result.stderr.splitlines()[-1] == (
        "Stopped; what was saved before is intact, the same command goes on"
    )


def test_every_baseline_trains(root):
    """Also a student of selected layers. tests/cli/test_demo.py has every method."""
    baselines = [name for name in BASELINES if name != "gold"]  # it compares two tokenizers
    methods = "[methods]\n" + "\n".join(f"{name} = {{}}" for name in ("labels", *baselines))
    methods += '\nselected = {method = "fcd", layers = "select", teacher_layers = "select"}\n'
    shared = SHARED.replace("steps = 3\nevaluations = 2", "steps = 1\nevaluations = 1")
    study(write(root, methods, shared), root / "out", seeds=1)
    found = runs(root / "out")
    assert len(found) == len(baselines) + 2
    assert not [run for run in found.values() if "failed" in run]


def test_results_with_and_without_cache_are_equal(root, finished):
    study(write(root, shared="cache = false\n" + SHARED), root / "plain", seeds=1)
    assert (finished[1] / "cache").exists() and not (root / "plain" / "cache").exists()
    cached, plain = runs(finished[1]), runs(root / "plain")
    assert len(plain) == 4
    for name, other in plain.items():
        run = cached[name]
        assert run["predictions"] == other["predictions"] and run["scores"] == other["scores"]
        # The cache is written in other batches, whose padding changes the last bits.
        for one, two in zip(run["history"], other["history"], strict=True):
            assert one["losses"] == pytest.approx(two["losses"], rel=1e-4)


def test_pretrained_student_has_the_weights_before_fine_tuning(root, tiny):
    found = spec.read(StudySettings(spec=write(root, shared='student = "pretrained"\n' + SHARED)))
    task = TaskRuns(found, found.tasks[0], root / "out")
    for variant in found.variants[:2]:
        starts = [task._distiller(variant, cached=False).student for _ in range(2)]
        word = "embeddings.word_embeddings.weight"
        before = AutoModel.from_pretrained(tiny).get_parameter(word)
        assert torch.equal(starts[0].get_parameter(f"bert.{word}"), before)
        assert not torch.equal(task.teacher.get_parameter(f"bert.{word}"), before)
        assert not torch.equal(starts[0].classifier.weight, starts[1].classifier.weight)


def test_student_of_a_directory_has_its_weights_and_depth(root, tiny, tmp_path):
    mine = tmp_path / "mine"
    model = AutoModel.from_pretrained(tiny)
    with torch.no_grad():
        model.get_parameter("embeddings.word_embeddings.weight").add_(1.0)
    model.save_pretrained(mine)
    methods = f'[methods]\nlabels = {{}}\nbefore = {{method = "fcd", student = "{mine}"}}\n'
    path = write(root, methods)
    found = spec.read(StudySettings(spec=path))
    task = TaskRuns(found, found.tasks[0], root / "out")
    cut, loaded = (task._distiller(variant, cached=False).student for variant in found.variants)
    word = "embeddings.word_embeddings.weight"
    assert torch.equal(loaded.get_parameter(f"bert.{word}"), model.get_parameter(word))
    assert loaded.config.num_hidden_layers == model.config.num_hidden_layers
    assert cut.config.num_hidden_layers == found.student_layers
    cached = task._distiller(found.variants[1], cached=True)  # another depth, so other layers
    assert len(cached.method.teacher_layers) == model.config.num_hidden_layers
    kept = [job.path for job in study_runs.StudyRuns(found, root / "out").jobs]
    with torch.no_grad():
        model.get_parameter(word).add_(1.0)
    model.save_pretrained(mine)
    now = [job.path for job in study_runs.StudyRuns(found, root / "out").jobs]
    assert [a == b for a, b in zip(kept, now, strict=True)] == [True, False] * (len(now) // 2)
    shutil.copy(tiny / "vocab.txt", mine)
    read_otherwise(mine)
    with pytest.raises(InputError, match=r"student .*mine: 'so' is token 5 of its tokenizer"):
        task._distiller(found.variants[1], cached=False)
    methods = methods.replace(str(mine), "./none")
    none = spec.read(StudySettings(spec=write(root, methods)))
    with pytest.raises(InputError, match=r"student .*none"):
        TaskRuns(none, none.tasks[0], root / "out")._distiller(none.variants[1], cached=False)


def test_student_config_and_random_weights(root):
    shape = 'student_weights = "random"\n'
    shape += "student_config = {hidden_size = 24, num_attention_heads = 3}\n"
    found = spec.read(StudySettings(spec=write(root, shared=shape + SHARED)))
    task = TaskRuns(found, found.tasks[0], root / "out")
    student = task._distiller(found.variants[0], cached=False).student
    assert student.config.hidden_size == 24 and student.config.num_hidden_layers == 2
    same = spec.read(StudySettings(spec=write(root)))
    kept, other = (study_runs.StudyRuns(each, root / "out").jobs[0] for each in (same, found))
    assert other.identity["student_weights"] == "random" and other.path != kept.path
    assert not {"student_weights", "student_config"} & kept.identity.keys()


def test_budget_in_seconds_is_converted_into_steps(root, monkeypatch):
    """By a calibration: here a step takes 0.1 s, or 0.2 s."""
    step_seconds = {"labels": 0.1, "lrc_bert": 0.2}

    def train(run, distiller, title, every, printed):
        assert title == "one: calibration"
        a_step = step_seconds["lrc_bert" if distiller.method.uses_teacher else "labels"]
        return [{"seconds": 9.0}, {"seconds": 9.0 + every * a_step}]

    methods = "[methods]\nlabels = {}\nlrc_bert = {}\n"
    found = spec.read(StudySettings(spec=write(root, methods), seconds=2.0))
    task = TaskRuns(found, found.tasks[0], root / "out")
    task.make_teacher()
    monkeypatch.setattr(Run, "train", train)
    assert [task.steps_in(2.0, variant) for variant in found.variants] == [20, 10]


def test_options_specify_the_same_study_as_a_file(root):
    path = write(root)
    options = {
        "methods": "labels, fcd",
        "options": {"fcd.alpha": [0.1, 1], "fcd.layers": "top,bottom"},
        "tasks": {"one": f"{root}/train.tsv,{root}/dev.tsv", "docs": "docstrings", "p": "pairs"},
        "seeds": 3,
        "seconds": 2.0,
    }
    found = spec.read(StudySettings(spec=path, **options))
    assert [v.name for v in found.variants] == [
        "labels",
        "fcd, alpha=0.1, layers=top",
        "fcd, alpha=0.1, layers=bottom",
        "fcd, alpha=1, layers=top",
        "fcd, alpha=1, layers=bottom",
    ]
    assert found.seeds == (0, 1, 2) and found.steps is None and found.budget == "2 seconds"
    assert [task.source is None for task in found.tasks] == [False, True, True]
    assert [task.pairs for task in found.tasks] == [False, False, True]
    assert spec.read(StudySettings(tasks={"sst2": "hub"})).tasks[0].source.task == "sst2"


def test_column_options_apply_to_all_data_sets_of_tasks(root):
    columns = {"text_column": "one", "text_pair_column": "two", "label_column": "class"}
    tasks = {name: f"{root}/train.tsv,{root}/dev.tsv" for name in ("a", "b")}
    found = spec.read(StudySettings(tasks=tasks, **columns))
    for task in found.tasks:
        assert {name: getattr(task.source, name) for name in columns} == columns
    with pytest.raises(InputError, match="--text-column: applies to --tasks NAME=FILES only"):
        spec.read(StudySettings(spec=write(root), text_column="one"))
    with pytest.raises(InputError, match="docstrings and text_column exclude each other"):
        spec.read(StudySettings(tasks={"docs": "docstrings"}, text_column="one"))


@pytest.mark.parametrize(
    "methods, message",
    [
        ("[methods]\nfdc = {}\n", "fdc"),
        ("[methods]\nfcd = {alfa = 1}\n", "alfa"),
        ("[methods]\nfcd = {alpha = -1}\n", "alpha"),
        ('[methods]\nfcd = {layers = "tops"}\n', "top"),
        ('[methods]\nlrc_bert = {preset = "papers"}\n', "paper"),
        ("[tasks.two]\nfiles = 1\n", "files"),
        ("[methods\n", "can't be read"),
        ("[tasks.'a b']\ndocstrings = true\n", "letters"),
    ],
)
def test_invalid_methods_and_tasks_raise_before_any_run(root, methods, message):
    with pytest.raises(InputError, match=message):
        study(write(root, methods), root / "out")
    assert not (root / "out").exists()


@pytest.mark.parametrize(
    "line, message",
    [
        ("budget = 3", "budget"),
        ('baseline = "none"', "none"),
        ("steps = 0", "steps"),
        ('precision = "fp8"', "precision"),
        ("seeds = 0", "seeds"),
        ("seeds = [0, 1, 0]", "none twice"),
        ("seeds = [-1]", "whole numbers"),
        ("seeds = true", "a number or a list"),
        ("steps = 2.5", "steps must be int"),
        ("seconds = 3", "steps and seconds exclude each other"),
        ("batch_size = 2.5", "batch_size must be int"),
        ("student_layers = 0", "student_layers must be at least 1, got 0"),
        ('student_weights = "new"', "student_weights 'new' is not an option; known: cut, random"),
        ("student_config = 5", "student_config must be Mapping"),
        ("student_config = {num_hidden_layers = 2}", "set student_layers"),
        ("student_config = {hidden_size = 15}", "one: hidden_size: 15 is no multiple"),
        ("student_layers = 9", "student_layers 9: the teacher has only 4 layers"),
        ('device = "gpu"', "device 'gpu' is not an option; known: auto, cpu, cuda"),
        ('cache = "no"', "cache must be bool"),
        ("titel = 5", "no field 'titel'; known: methods, tasks, .*; did you mean 'title'"),
        ('paper = {title = "x"}', "paper must have a title"),
        ("methods = 5", "methods must be a table"),
        ("tasks = 5", "tasks must be a table"),
        ('teacher = "/nowhere"', "--teacher /nowhere: no such directory"),
    ],
)
def test_invalid_field_of_a_study_is_named(root, line, message):
    name = line.split(" ")[0]
    shared = "\n".join(x for x in SHARED.splitlines() if x.split(" ")[0] != name)
    shared = shared[: shared.find("[tasks")] if name in ("methods", "tasks") else shared
    with pytest.raises(InputError, match=message):
        methods = "" if name == "methods" else FEW
        study(write(root, methods, line + "\n" + shared), root / "out")


@pytest.mark.parametrize(
    "line, message",
    [
        ("teacher_steps = 0", "tasks.one: teacher_steps must be at least 1"),
        ("teacher_learning_rate = nan", "teacher_learning_rate must be greater than 0"),
        ('labelled = "x"', "labelled must be int"),
        ("max_length = 3", "max_length must be at least 4"),
        ("docstrings = 5", "docstrings must be true"),
        ("docstrings = true", "docstrings and eval"),
        ('pairs = "docstrings"', "pairs and eval"),
        ("pairs = true", 'pairs must be "docstrings", got True'),
        ("rows = 5", "rows must be two whole numbers"),
        ("train = 5", "train must be a path"),
        ('label_order = "1,0"', "tasks.one has no field 'label_order'"),
        ('test = "dev.tsv"', "tasks.one has no field 'test'"),
        ('max_train_rows = "x"', "max_train_rows must be int"),
        ('unlabelled = "train.tsv"', "labelled and unlabelled exclude each other"),
    ],
)
def test_invalid_field_of_a_data_set_is_named(root, line, message):
    name = line.split(" ")[0]
    shared = "\n".join(x for x in SHARED.splitlines() if x.split(" ")[0] != name)
    with pytest.raises(InputError, match=message):
        study(write(root, shared=f"{shared}\n{line}\n"), root / "out")


def test_invalid_yaml_and_missing_rows_raise_with_several_processes(root):
    path = root / "spec.yaml"
    for text in ("tasks: [1", "- 1"):
        path.write_text(text)
        with pytest.raises(InputError, match=r"spec\.yaml can't be read"):
            study(path, root / "out")
    (root / "dev.tsv").unlink()
    with pytest.raises(InputError, match=r"dev\.tsv: no such file"):
        study(write(root), root / "out", jobs=2)


def test_key_of_a_teacher_changes_with_its_weights(root, tiny):
    mine = shutil.copytree(tiny, root / "tiny")
    path = write(root)
    path.write_text(path.read_text().replace(str(tiny), str(mine)))

    def key():
        found = spec.read(StudySettings(spec=path))
        return TaskRuns(found, found.tasks[0], root / "out").key

    before = key()
    assert key() == before
    model = AutoModel.from_pretrained(mine)
    torch.nn.init.zeros_(model.get_parameter("embeddings.word_embeddings.weight"))
    model.save_pretrained(mine)
    assert key() != before


def test_metric_of_a_task_changes_the_summary(root, finished):
    out = shutil.copytree(finished[1], root / "out")
    study(write(root, shared=SHARED + 'metric = "mcc"\n'), out, methods="labels", seeds=1)
    (row,) = csv.DictReader((out / "summary.csv").open())
    assert row["metric"] == "mcc" and row["seeds"] == "1"


def test_runs_with_changed_or_damaged_files_are_trained_again(root, finished, capsys):
    out = shutil.copytree(finished[1], root / "out")
    whole, files = runs(out), sorted((out / "runs").glob("*.json"))
    edited = read_json(files[0])
    edited["scores"]["accuracy"] = 0.999
    without_checksum = {name: x for name, x in read_json(files[1]).items() if name != "sha256"}
    broken = (
        json.dumps(edited),
        json.dumps(without_checksum),
        files[2].read_text()[:100],
        "{}",
        "[]",
    )
    for path, content in zip(files, broken, strict=False):
        path.write_text(content)
    study(write(root), out)
    assert runs(out) == whole
    output = capsys.readouterr().out
    assert [x.name in output for x in files] == [True] * len(broken) + [False] * 3


def test_damaged_teacher_is_trained_again(root, finished):
    """Also if all runs are complete: the report needs the teacher's scores."""
    out = shutil.copytree(finished[1], root / "out")
    before = (out / "summary.csv").read_text()
    next(out.glob("teachers/*/fastkd.json")).write_text("[1]")
    study(write(root), out)
    assert (out / "summary.csv").read_text() == before


def test_report_does_not_overwrite_files_that_fastkd_did_not_write(root, finished):
    for name in (*study_report.FILES, "fastkd.json"):
        out = root / name
        out.mkdir()
        (out / name).write_text("mine")
        with pytest.raises(InputError, match=f"{name}, which `fastkd study` did not write"):
            study(write(root), out)
        assert (out / name).read_text() == "mine" and len(list(out.iterdir())) == 1
    shutil.copytree(finished[1], root / "ours")
    study(write(root), root / "ours")


def test_invalid_student_raises_before_the_teacher_is_fine_tuned(root, monkeypatch):
    monkeypatch.setattr(TaskRuns, "make_teacher", None)
    for methods, message in (
        ("fcd = {teacher_layers = [2, 9]}", "9"),
        ("fcd = {layers = [1]}", "fcd on one: "),
    ):
        with pytest.raises(InputError, match=message):
            study(write(root, f"[methods]\n{methods}\n"), root / "out")
    shared = SHARED.replace("student_layers = 2", "student_layers = 9")
    with pytest.raises(InputError, match="student_layers 9: the teacher has only 4 layers"):
        study(write(root, shared=shared), root / "out")


def test_progress_lines_name_teacher_runs_and_time_left(finished):
    lines = finished[0].splitlines()
    assert "one: fine-tuning the teacher, 4 steps of 8 rows" in lines
    for start, end in (
        ("one: teacher  step 4/4  loss", "left"),
        ("one: teacher  accuracy 0.", "s)"),
        ("one: labels, seed 0  step 3/3", "left"),
        ("1/8  one  labels  seed 0:  accuracy", "left"),
        ("8/8  one  MC3KD, top  seed 1:  accuracy", " 0:00 left"),
    ):
        found = [line for line in lines if line.startswith(start)]
        assert found and found[0].endswith(end), (start, lines)


def test_error_in_rows_names_the_field_of_the_file(root):
    shared = SHARED.replace("[tasks.one]", "[tasks.one]\nno_header = true")
    (root / "train.tsv").write_text("a\tb\tc\n")
    with pytest.raises(InputError, match=r"tasks\.one of the study: .*text_column") as caught:
        study(write(root, shared=shared), root / "out")
    assert "--" not in str(caught.value)


def test_dead_process_is_an_error_after_the_report(root, finished, monkeypatch):
    out = shutil.copytree(finished[1], root / "out")
    next((out / "runs").glob("*.json")).unlink()
    dead = SimpleNamespace(exitcode=-9, start=bool, is_alive=bool)
    context = SimpleNamespace(Process=lambda **_: dead)
    monkeypatch.setattr(study_runs.multiprocessing, "get_context", lambda _: context)
    words = ["study", str(write(root)), "--out", str(out), "--jobs", "2"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1 and "a process died; the same command" in result.stderr
    assert "1 runs are not finished" in (out / "report.md").read_text()


def test_error_in_a_worker_is_one_sentence(root, finished):
    out = shutil.copytree(finished[1], root / "out")
    shared = SHARED.replace("student_layers = 2", "student_layers = 9")
    found = spec.read(StudySettings(spec=write(root, shared=shared)))
    with pytest.raises(SystemExit, match="Error: student_layers 9: the teacher has only 4 layers"):
        study_runs._worker(found, out, torch.get_num_threads(), Display)


def test_learning_curves_average_runs_of_different_lengths(root, finished, monkeypatch):
    """With a budget in seconds each run has its own number of steps."""
    found = spec.read(StudySettings(spec=write(root), seconds=1.0))
    results = {}
    for variant, seed in itertools.product(found.variants, found.seeds):
        steps = (4, 8) if seed else (2, 4, 5)
        results["one", variant.name, seed] = {
            "history": [{"step": n, "scores": {"accuracy": n / steps[-1]}} for n in steps],
            "scores": {"accuracy": 1.0},
            "predictions": [0] * 24,
            "rccc": 0.5,
            "measured": {"seconds": 1.0, "peak_bytes": None},
        }
    teacher = read_json(next(finished[1].glob("teachers/*/fastkd.json")))
    summaries = study_report.summarize(found, results, {"one": teacher})
    monkeypatch.setattr(study_report, "_png", lambda figure: figure)
    (ax,) = study_report._curves(found, summaries, results).axes
    _, *lines = ax.lines  # the first is the teacher's
    assert ax.get_xlabel() == "fraction of the steps" and len(lines) == len(found.variants)
    for line in lines:
        assert list(line.get_xdata()) == pytest.approx([0.4, 0.8, 1.0])
        assert list(line.get_ydata()) == pytest.approx([(0.4 + 0.5) / 2, 0.8, 1.0])


def test_variant_has_one_colour_on_all_data_sets(root, finished, monkeypatch):
    """Also if another variant has no runs on one of them."""
    found = spec.read(StudySettings(spec=write(root)))
    found = dataclasses.replace(
        found, tasks=(found.tasks[0], dataclasses.replace(found.tasks[0], name="two"))
    )
    teacher = read_json(next(finished[1].glob("teachers/*/fastkd.json")))
    known = study_runs.StudyRuns(spec.read(StudySettings(spec=write(root))), finished[1]).results()
    results = {("two", *rest): run for (_, *rest), run in known.items()}
    left_out = found.variants[1].name
    results |= {key: run for key, run in known.items() if key[1] != left_out}
    summaries = study_report.summarize(found, results, {"one": teacher, "two": teacher})
    monkeypatch.setattr(study_report, "_png", lambda figure: figure)
    figure = study_report._curves(found, summaries, results)
    (legend,) = figure.legends
    colours = {
        text.get_text(): line.get_color()
        for text, line in zip(legend.get_texts(), legend.get_lines(), strict=True)
    }
    assert set(colours) == {"teacher", *(variant.name for variant in found.variants)}
    for ax in figure.axes:
        assert all(colours[line.get_label()] == line.get_color() for line in ax.lines)


def test_pictures_show_coinciding_lines_and_agreeing_seeds(root, finished, monkeypatch):
    found = spec.read(StudySettings(spec=write(root)))
    names = [variant.name for variant in found.variants]
    results = {}
    for i, (name, seed) in enumerate(itertools.product(names, found.seeds)):
        last = 0.5 if name != names[-1] else 0.6 + 0.1 * seed
        results["one", name, seed] = {
            "history": [{"step": n, "scores": {"accuracy": x}} for n, x in ((1, 0.4), (2, last))],
            "scores": {"accuracy": last},
            "predictions": [0] * 23 + [i % 2],
            "rccc": 0.5,
            "measured": {"seconds": 1.0, "peak_bytes": None},
        }
    teacher = read_json(next(finished[1].glob("teachers/*/fastkd.json")))
    summaries = study_report.summarize(found, results, {"one": teacher})
    monkeypatch.setattr(study_report, "_png", lambda figure: figure)
    (ax,) = study_report._curves(found, summaries, results).axes
    widths = [line.get_linewidth() for line in ax.lines[1:]]
    assert widths[0] > widths[1] > widths[2] == widths[3]
    figure = study_report._forest(found, summaries, results)
    assert "hollow: all seeds agree" in figure.get_suptitle()
    dots = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    hollow = [line.get_markerfacecolor() == "white" for line in dots]
    assert hollow == [True, True, False]


def test_preset_is_an_option_of_a_variant(root):
    methods = '[methods]\nlabels = {}\nlrc_bert = {preset = ["paper", "default"]}\n'
    _, paper, ours = spec.read(StudySettings(spec=write(root, methods))).variants
    assert paper.json()["options"]["first_stage"] == 0.8 != ours.json()["options"]["first_stage"]
    assert "preset" not in ours.json()["options"]


def test_few_labels_balances_classes_and_depends_on_the_seed(root):
    task = TaskRuns(spec.read(StudySettings(spec=write(root))), None, root)
    task.task = task.study.tasks[0]
    corpora = [few_labels(task.corpus, 10, seed) for seed in (0, 0, 1)]
    labelled = [set(corpus.train.columns("number")) for corpus in corpora]
    assert labelled[0] == labelled[1] != labelled[2]
    for corpus, numbers in zip(corpora, labelled, strict=True):
        assert sorted(corpus.train.labels) == [0] * 5 + [1] * 5
        assert set(corpus.unlabelled.labels) == {UNLABELLED} and len(corpus.unlabelled) == 30
        assert not numbers & set(corpus.unlabelled.columns("number"))
    more = few_labels(corpora[0], 4, 0)  # rows without labels stay unlabelled
    assert (len(more.train), len(more.unlabelled)) == (4, 36)
    assert set(more.unlabelled.labels) == {UNLABELLED}


def test_report_compares_each_row_with_the_papers(root, finished):
    paper = """
baseline = "fcd, alpha=1.0"
[paper]
title = "A paper's table"
columns = ["x", "y"]
rows = {"fcd, alpha=1.0" = [50.0, 60.0], "fcd, alpha=0.1" = [40.0, 50.0]}
"""
    head, tasks = SHARED.split("[tasks.one]")
    path = write(root, "", shared=head + paper.strip() + "\n[tasks.one]" + tasks + FEW)
    study(path, root / "out", runs=finished[1])
    page = (root / "out" / "report.md").read_text()
    assert "fcd, alpha=0.1 is below fcd, alpha=1.0 in the paper (-10.0); here" in page
    assert "paper: x" in page and "ours: one" in page


FILES = sorted((Path(__file__).resolve().parents[2] / "bench" / "studies").glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_study_files_of_bench_are_valid(path):
    found = spec.read(StudySettings(spec=path))
    assert len(found.seeds) >= 3 and len(found.variants) >= 2
    if found.paper is not None:
        names = {variant.name for variant in found.variants}
        assert set(found.paper["rows"]) <= names and found.baseline in names
        assert all(len(v) == len(found.paper["columns"]) for v in found.paper["rows"].values())
    assert study_report.beside_paper(found, []) is None or found.paper
