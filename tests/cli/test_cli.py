"""`fastkd distill` from its command line: options, errors, results, stops and resuming."""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from typer.main import get_command
from typer.testing import CliRunner

import fastkd
from fastkd._core.extras import MissingExtra, require
from fastkd.analysis.similarity_measures import MEASURES
from fastkd.cli import command_settings
from fastkd.cli.main import COMMANDS, app
from fastkd.distill import METHODS, baselines, labelled_order
from fastkd.train import config, fitting, packaged_teacher, saving
from fastkd.train.config import Config
from fastkd.train.errors import InputError, SaveFailed
from fastkd.train.fitting import settled
from fastkd.train.options import as_json, assignments, options_of
from fastkd.train.run_directory import Checkpoints, RunDirectory
from fastkd.train.saving import MANIFEST, find_damage, replacing
from fastkd.train.scoring import judge
from tests.support.runs import (
    config_of,
    hang_up,
    made,
    once,
    press_ctrl_c,
    report_of,
    same_weights,
    stop_at,
    terminate,
    visible,
)
from tests.support.tiny import make_teacher, run, usual, write_tsv

# 40 rows in batches of 8: the teacher's fine-tuning has 3 steps, the training 8.
RUN = {"epochs": 1.6, "method": "mc3kd", "finetune_teacher": 0.6}


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Whole runs: `labels`, and `whole` of RUN, of which `stopped` got Ctrl-C in step 7 of 8."""

    def make(folder):
        labels = {"method": "labels", "student_layers": 2}
        run("distill", **usual(tiny, folder, out=folder / "labels", **labels))
        run("distill", **usual(tiny, folder, out=folder / "whole", **RUN))
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, 7, press_ctrl_c)
            run("distill", expect=130, **usual(tiny, folder, out=folder / "stopped", **RUN))

    return once(tmp_path_factory, "runs", make)


@pytest.fixture
def opened(tiny, tmp_path):
    """`RunDirectory` of the same options in Python."""

    def opened(out=tmp_path / "out", say=print, **options):
        return RunDirectory(settled(config_of(**usual(tiny, tmp_path, out=out, **options))), say)

    return opened


def test_trainer_args_reach_the_trainer(distill, tmp_path, monkeypatch):
    """And a step whose parts are compared within themselves only is warned of."""
    file = tmp_path / "args.yaml"
    file.write_text(
        "gradient_accumulation_steps: 2\nlr_scheduler_type: constant\nlogging_steps: 99\n"
        "torch_compile_backend: null\ntrain_sampling_strategy: group_by_length\n"
    )
    orders, made = [], fitting.LabelledOrder
    monkeypatch.setattr(fitting, "LabelledOrder", lambda *x: orders.append(made(*x)) or orders[-1])
    options = {"trainer_args": file, "epochs": 1.5, "checkpoint_every": 3, "method": "fcd"}
    output = " ".join(distill(**options).split())
    assert "compares samples (samples) within each accumulated batch only" in output
    assert "--batch-size 16 --accumulate 2 compares all rows of a step" in output
    report = report_of(tmp_path / "out")
    assert len(orders[0].lengths) == 40
    # 40 rows in batches of 8, two batches a step
    assert [entry["step"] for entry in report["history"]] == [3, 5]
    assert report["settings"]["trainer_args"]["lr_scheduler_type"] == "constant"
    assert "exclude each other" in distill(accumulate=2, trainer_args=file, expect=2)


@pytest.mark.parametrize(("text", "said"), [
    ("learning_rate: 1", "learning_rate is what --learning-rate sets"),
    ("optm: adafactor", "did you mean 'optim'"),
    ("fsdp: full_shard", "fsdp is what --fsdp sets"),
    ("eval_steps: 3", "eval_steps is settled by fastkd itself"),
    ("max_grad_norm: 1e0x", "max_grad_norm must be float, got '1e0x'"),
    ("lr_scheduler_type: constand", "constand"),
    ("optim: adamw_8bit", "bitsandbytes"),
    ("adam_beta1: 1.5", "Invalid beta parameter"),
    ("dataloader_num_workers: -1", "dataloader_num_workers must be at least 0"),
    ("torch_compile_backend: none", "not a valid DynamoBackend"),
    ("lr_scheduler_type: cosine_with_min_lr", "min_lr"),
    ("dataloader_persistent_workers: true", "needs dataloader_num_workers"),
    ("train_sampling_strategy: sequential", "must be random or group_by_length"),
    ("- a", "one 'name: value' a line"),
    ("a: [", "can't be read"),
])  # fmt: skip
def test_wrong_trainer_args_are_one_sentence(tmp_path, text, said):
    file = tmp_path / "args.yaml"
    file.write_text(text)
    config = Config.of(teacher="t", task="sst2", device_name="cpu", trainer_args=file)
    with pytest.raises(InputError) as error:
        settled(config)
    assert said in str(error.value) and f"--trainer-args {file}" in str(error.value)


def test_manifests_that_fastkd_did_not_write(opened, tmp_path):
    """Neither an odd one, nor one that lists files beyond its folder."""
    folder, mine = tmp_path / "out/student", tmp_path / "mine"
    folder.mkdir(parents=True)
    for manifest in ("[1]", '{"files": {}}', '{"run": 5, "settings": [], "fingerprints": {}}'):
        (folder / MANIFEST).write_text(manifest)
        with pytest.raises(InputError, match=f"{folder}.*{MANIFEST}"):
            opened(resume=True)
    (mine / "below").mkdir(parents=True)
    (mine / "below/thesis.txt").write_text("mine")
    (folder / "x").symlink_to(mine)
    (folder / "y").symlink_to(mine / "below")
    digest = hashlib.sha256(b"mine").hexdigest()
    listed = ("x/below/thesis.txt", "y/thesis.txt", "../../mine/below/thesis.txt", str(mine))
    (folder / MANIFEST).write_text(json.dumps({"files": dict.fromkeys(listed, digest)}))
    saving.discard(folder)
    assert (mine / "below/thesis.txt").exists() and not folder.exists()
    # Nor is a link's target replaced.
    saving.write_manifest(mine, {})
    folder.symlink_to(mine)
    with replacing(folder, {}):
        pass
    assert not folder.is_symlink() and find_damage(mine) is None


def test_results_are_not_replaced_unasked(distill, opened, runs, tmp_path):
    """Nor is a file of them that was changed, or that fastkd did not write, ever deleted."""
    out, same = shutil.copytree(runs / "labels", tmp_path / "out"), {"method": "labels"}
    same["student_layers"] = 2

    def refused(words, folder=out, **options):
        before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
        with pytest.raises(InputError, match=words):
            opened(folder, **options)
        assert before == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}

    assert "already complete" in distill("--resume", **same)
    refused("already holds a student; .*--overwrite")
    refused("seed = 0, now it is 1", **same, resume=True, seed=1)
    (out / "student" / "notes.txt").write_text("mine")
    refused(r"student holds notes.txt.*move it away", overwrite=True)
    # Put there, or changed, while the new run trains.
    (out / "student" / "README.md").write_text("a card of my own")
    with replacing(out / "student", {"run": "new"}):
        pass
    kept = out / "student.old"
    assert visible(kept) == ["README.md", "notes.txt"] and find_damage(out / "student") is None
    assert (kept / "README.md").read_text() == "a card of my own"
    half = shutil.copytree(runs / "stopped", tmp_path / "half")
    refused(r"unfinished run.*--resume.*--overwrite", half)
    (half / "unfinished/checkpoints/notes.txt").write_text("mine")
    opened(half, **RUN, overwrite=True)
    assert [*half.rglob("notes.txt")] == [half / "unfinished-2/checkpoints/notes.txt"]
    for place, flag in (
        ("new/unfinished/mine.txt", "resume"), ("new/unfinished/mine.txt", "overwrite"),
        ("other/student/model.safetensors", "overwrite"), ("third/unfinished", "overwrite"),
    ):  # fmt: skip
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        refused("fastkd did not write", tmp_path / place.split("/")[0], **{flag: True})


def test_the_lock_is_not_its_file(distill, tmp_path):
    """A killed process leaves the file."""
    with saving.locked(tmp_path / "own"):
        assert f"in use by process {os.getpid()} on" in distill(out=tmp_path / "own", expect=2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / saving.LOCK).write_text("process 1")
    with saving.locked(tmp_path / "out"):
        pass
    assert visible(tmp_path / "out") == []


def test_the_best_epoch_is_one_with_a_trained_head(distill, tmp_path):
    """LRC-BERT's first stage trains layers alone."""
    output = distill(method="lrc_bert", set="first_stage=0.5", epochs=4, max_train_rows=8)
    assert output.count("(head not trained yet)") == 2
    history = report_of(tmp_path / "out")["history"]
    assert [entry["best"] for entry in history[:3]] == [False, False, True]


def test_a_nan_loss_stops_with_the_best_student_kept(distill):
    error = distill(epochs=40, learning_rate=1e20, warmup=0, expect=1)
    assert "loss became nan" in error and "learning rate" in error
    assert "--precision" not in error  # it is fp32 already


# Every way to end, once; Ctrl-C: `runs`. test_kills.py has every place.
@pytest.mark.parametrize(("step", "how", "code", "every", "newest"), [
    (2, hang_up, 129, None, "teacher-checkpoints/checkpoint-2"),
    (8, terminate, 143, 8, "checkpoints/checkpoint-8"),  # the last step, in the middle of an epoch
])  # fmt: skip
def test_resuming_gives_the_same_result(distill, runs, tmp_path, step, how, code, every, newest):
    options, out = {**RUN, "checkpoint_every": every}, tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, step, how)
        assert "--resume" in distill(expect=code, **options)
    assert (out / "unfinished" / newest).exists()
    for folder in ("", newest, "student"):
        if (out / "unfinished" / folder).is_dir():
            (out / "unfinished" / folder / "notes.txt").write_text(f"mine: {folder}")
    put = len([*out.rglob("notes.txt")])
    said = distill("--resume", **options)
    moved = f"{out / 'unfinished-2'}: files that fastkd did not write"
    assert moved in " ".join(said.split()) and same_weights(out, runs / "whole")
    assert len([*out.rglob("notes.txt")]) == put >= 2  # the student's are in the result
    resumed, whole = report_of(out), report_of(runs / "whole")
    for name in ("student", "teacher", "compared_layers"):
        assert resumed[name] == whole[name]
    assert resumed["seconds"]["training"] <= resumed["seconds"]["total"]
    for a, b in zip(resumed["history"], whole["history"], strict=True):
        assert (a["step"], a["scores"], a["best"]) == (b["step"], b["scores"], b["best"])
        assert a["losses"] == pytest.approx(b["losses"]) and "loss" in b["losses"]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_off(path):
    """A checkpoint that a kill interrupted, beside a sound one."""
    path = path.with_name("checkpoint-8")
    path.mkdir()
    (path / "trainer_state.json").write_text('{"global_step":')


def older(path):
    """As they were when the teacher's trainer was another."""
    (path / "method.pt").unlink()
    saving.write_manifest(path, saving.read_json(path / saving.MANIFEST))


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(distill, runs, tmp_path):
    """Without the best student the training starts again."""
    for i, (harm, why, used) in enumerate((
        (lambda path: (path / MANIFEST).unlink(), MANIFEST, 5),
        (lambda path: (path / "optimizer.pt").unlink(), "optimizer.pt is missing", 5),
        (lambda path: flip(path / "model.safetensors"), "model.safetensors", 5),
        (cut_off, "incomplete", 7),
        (older, "an older", 5),
        (lambda path: saving.write_manifest(path, {"run": "x"}), "belongs to another run", 5),
    )):  # fmt: skip
        work = shutil.copytree(runs / "stopped", tmp_path / str(i)) / "unfinished"
        place, said = work / "checkpoints", []
        assert visible(place) == ["checkpoint-5", "checkpoint-7"]
        (place / "checkpoint-mine").mkdir()
        state = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "method.pt", "trainer_state.json"}
        assert state <= {*saving.read_json(place / "checkpoint-7" / saving.MANIFEST)["files"]}
        harm(place / "checkpoint-7")
        checkpoints = Checkpoints(place, json.loads((work / MANIFEST).read_text())["run"])
        assert checkpoints.newest(said.append) == place / f"checkpoint-{used}"
        (line,) = said
        assert ": cannot be used (" in line and "the one before it" in line and why in line
    out = shutil.copytree(runs / "stopped", tmp_path / "out")
    (out / "unfinished/student/model.safetensors").write_bytes(b"")
    output = distill("--resume", **RUN)
    assert "student is damaged" in output and "starts again" in output
    assert same_weights(out, runs / "whole")


def test_resume_wants_the_same_data_models_and_settings(distill, opened, runs, tiny, tmp_path):
    """Of a run that is complete, too."""
    own = shutil.copytree(tiny / "teacher", tmp_path / "own")
    train = Path(shutil.copy(tiny / "train.tsv", tmp_path / "train.tsv"))
    given = {**RUN, "teacher": own, "train": train, "expect": 2}
    for name, place in (("stopped", "unfinished"), ("whole", "student")):
        manifest = shutil.copytree(runs / name, tmp_path / name) / place / MANIFEST
        content = json.loads(manifest.read_text())
        content["settings"] |= {"teacher": str(own), "train": str(train)}
        manifest.write_text(json.dumps(content))
    out = tmp_path / "stopped"

    def refused(what, folder=out, **options):
        assert f"started with other {what}" in distill("--resume", **given, out=folder, **options)

    train.write_text(train.read_text().replace("film", "a film", 1))
    refused("training rows")
    refused("training rows", tmp_path / "whole")
    shutil.copy(tiny / "train.tsv", train)
    words = (own / "tokenizer.json").read_text()
    (own / "tokenizer.json").write_text(words.replace('"film"', '"mlif"'))
    refused("tokenizer files")
    shutil.rmtree(out / "unfinished/teacher")
    shutil.rmtree(own)
    make_teacher(own, initializer_range=0.1)
    refused("teacher weights")
    manifest = out / "unfinished" / MANIFEST
    manifest.write_text(manifest.read_text()[:50])
    with pytest.raises(InputError, match=f"{manifest} is damaged.*--overwrite"):
        opened(out, resume=True, seed=5)
    (tmp_path / "whole/student/model.safetensors").unlink()
    error = distill("--resume", **given, out=tmp_path / "whole")
    assert "its student is damaged (model.safetensors is missing)" in error
    (tmp_path / "empty").mkdir()
    said = distill("--resume", out=tmp_path / "empty", max_train_rows=8, method="labels")
    assert "no run to resume; this one begins" in said


def test_too_little_room(distill, runs, tmp_path, monkeypatch):
    """It is seen before any training; a disk that fills up leaves the old student."""
    room = [50_000]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**30, 0, room[0]))
    error = distill(expect=2)
    said = r"--out .*this run writes up to \d+ KiB, and the disk has 49 KiB left"
    assert re.search(said, error) and not (tmp_path / "out").exists()
    room[0] = 2**29
    shutil.copytree(runs / "labels", tmp_path / "out")

    def save(*args, **kwargs):
        raise RuntimeError("[enforce fail at inline_container.cc:664] unexpected pos")

    with monkeypatch.context() as patch:
        stop_at(patch, 5, lambda: room.__setitem__(0, 0))
        patch.setattr(torch, "save", save)
        message = distill("--overwrite", seed=2, expect=1)
    assert "cannot be saved (No space left on device)" in message and "intact" in message
    assert same_weights(tmp_path / "out", runs / "labels")
    assert visible(tmp_path / "out") == ["student", "unfinished"]


def test_what_writers_raise_on_a_full_disk(tmp_path):
    for error in (
        SafetensorError("Error while serializing: No space left (os error 28)"),
        Exception("No space left on device (os error 28)"),  # of a tokenizer
        OSError(errno.ENOSPC, "No space left on device"),
    ):
        said = r"cannot be saved \(No space left on device\)"
        with pytest.raises(SaveFailed, match=said), saving.saving(tmp_path):
            raise error


def test_help_and_defaults():
    """Each option's sentence: tests/tools/test_command_options.py."""
    for words in ([], ["-h"], ["--help"]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0 and all(command in result.output for command in COMMANDS)
    output = CliRunner().invoke(app, ["distill", "-h"], env={"COLUMNS": "160"}).output
    saved = as_json(Config.of(teacher="t", task="sst2", device_name="cpu"))
    for option in options_of(Config).values():
        assert (option.flag in output) == ("distill" in option.commands)
        assert (option.key in saved) == option.saved
    group = get_command(app)
    _, typed, _ = group.resolve_command(group.make_context("fastkd", ["distill"]), ["distill"])
    assert typed.make_context("distill", ["--eval", "a", "--eval", "b"], resilient_parsing=True)
    words = ["a=1,2", "b=true", "c=1e-3", "d=None", "e=cls", "f=[4]"]
    values = {"a": [1, 2], "b": True, "c": 1e-3, "d": None, "e": "cls", "f": [4]}
    assert assignments("--set", words) == values


def test_a_new_directory_is_synced_before_it_takes_a_name(tmp_path, monkeypatch):
    """What a kill leaves between the renames: test_kills.py."""
    done, rename = [], Path.rename
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(Path, "rename", lambda *paths: done.append("rename") or rename(*paths))
    with replacing(tmp_path / "model", {}) as directory:
        (directory / "w").write_text("new")
    files = [tmp_path / "model" / name for name in ("w", MANIFEST, ".")]
    assert {path.stat().st_ino for path in files} <= set(done[: done.index("rename")])
    assert done[-1] == tmp_path.stat().st_ino


def test_a_missing_extra_is_named_before_any_work(distill, tmp_path, monkeypatch):
    """From a checkout, pip install 'fastkd[train]' fetches some other fastkd, or nothing."""
    with pytest.raises(MissingExtra, match=r"nowhere is not installed.*-e '[^']*\[train\]'"):
        require("nowhere.at.all", "train")
    # The name of the package to install, not google's.
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(MissingExtra, match=r"^protobuf is not installed; get it with"):
        require("google.protobuf", "onnx")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    error = distill(expect=1)
    assert error.startswith("Error: scikit-learn is not installed; get it with: pip install ")
    assert not (tmp_path / "out").exists()


FILES = ["--train", "setup.py.tsv", "--eval", "setup.py.tsv"]
ROWS = ["--train", "rows.tsv", "--eval", "rows.tsv"]
LISTS_AND_MISTAKES = [
    ["--help"],
    ["--version"],
    ["nosuch"],
    ["--nosuch"],
    ["distill", "--help"],
    ["distill", "--teacher", "bert", *FILES],
    ["distill", "--teacher", "./nosuch", "--task", "sst2"],
    ["distill", "--teacher", "bert", "--task", "sst2", "--epochs", "0"],
    ["evaluate", "--model", "./nosuch", "--data", "pyproject.toml"],
    ["cache", "--teacher", "bert", *FILES],
    ["study", "--nosuch"],
    ["study", "paper:"],
    ["study", "spec.toml"],
    ["distill", "--teacher", "bert", *ROWS, "--label-column", "stars"],
    ["distill", "--teacher", "bert", *ROWS, "--unlabelled", "none.txt"],
]
WITHOUT_TORCH = f"""
import sys
from fastkd.__main__ import main
for words in {LISTS_AND_MISTAKES}:
    sys.argv[1:] = words
    try:
        main()
    except SystemExit:
        print("imported", words, {{"torch", "transformers", "numpy"}} & set(sys.modules))
"""


def test_lists_and_mistakes_import_no_torch(tiny, tmp_path):
    """Also a study's: its file names a column that a task's rows lack."""
    shutil.copy(tiny / "dev.tsv", tmp_path / "rows.tsv")
    files = 'train = "rows.tsv"\neval = "rows.tsv"\n'
    (tmp_path / "spec.toml").write_text(f'[tasks.one]\n{files}text_column = "txt"\n')
    command = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    for words in (
        "tasks.one: ", "no column 'txt' (text_column)", "--unlabelled none.txt",
        "no column 'stars' (--label-column); known: sentence, label",
    ):  # fmt: skip
        assert words in done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("imported")]
    assert found == [f"imported {words} set()" for words in LISTS_AND_MISTAKES]
    assert list(config.NAMES) == [*METHODS, *baselines.BASELINES]
    assert config.LABELLED_SHARE == labelled_order.LABELLED_SHARE
    assert command_settings.MEASURES == MEASURES
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"fastkd {fastkd.__version__}\n")


def test_scores_of_several_test_files_have_their_names(distill, tiny, tmp_path):
    files = [write_tsv(tmp_path / name, 10, i) for i, name in enumerate(("one.tsv", "two.b.tsv"))]
    given = usual(tiny, tmp_path, max_train_rows=8)

    def scores(*files):
        found, models = made(**given, test=[*files])
        return judge(found, models.student, found.sets.tests).scores

    both = scores(*files)
    for name, path in zip(("one", "two.b"), files, strict=True):
        assert both[f"accuracy_{name}"] == scores(path)["accuracy"]
    (tmp_path / "c").mkdir()
    same = write_tsv(tmp_path / "c/one.tsv")
    error = distill("--test", files[0], "--test", same, expect=2)
    assert "--test: two files have the same name" in error


def test_the_packaged_teacher_who_is_the_student_too(distill, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(packaged_teacher, "teacher_path", lambda: tiny / "teacher")
    packaged = {"teacher": "packaged", "method": "labels", "max_train_rows": 8}
    assert "warning: --student is the teacher" in distill(**packaged, student=tiny / "teacher")
    assert report_of(tmp_path / "out")["settings"]["teacher"] == str(tiny / "teacher")
