"""`fastkd distill` from its command line: options, errors, results, stops and resuming."""

import errno
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError
from typer.testing import CliRunner

import fastkd
from fastkd._core.extras import MissingExtra, require
from fastkd.analysis.similarity_measures import MEASURES
from fastkd.cli import command_settings
from fastkd.cli.main import COMMANDS, app
from fastkd.distill import METHODS, baselines, labelled_order
from fastkd.train import config, fitting, packaged_teacher, saving
from fastkd.train.errors import InputError, SaveFailed
from fastkd.train.fitting import settled
from fastkd.train.run_directory import Checkpoints, RunDirectory
from fastkd.train.saving import MANIFEST, find_damage, replacing
from tests.support.runs import config_of, once, press_ctrl_c, report_of, same_weights, stop_at
from tests.support.tiny import make_teacher, run, usual

# 40 rows in batches of 8: the teacher's fine-tuning has 3 steps, the training 9.
RUN = {"epochs": None, "steps": 9, "method": "mc3kd", "finetune_teacher": 0.6}


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Whole runs: `labels`, and `whole` of RUN, of which `stopped` got Ctrl-C in step 7 of 9."""

    def make(folder):
        labels = {"method": "labels", "student_layers": 2}
        run("distill", **usual(tiny, folder, out=folder / "labels", **labels))
        run("distill", **usual(tiny, folder, out=folder / "whole", **RUN))
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, 7, press_ctrl_c)
            run("distill", expect=130, **usual(tiny, folder, out=folder / "stopped", **RUN))

    return once(tmp_path_factory, "runs", make)


def opened(tiny, out, **options):
    return RunDirectory(settled(config_of(**usual(tiny, out, **options, out=out))), print)


def test_trainer_args_reach_the_trainer(distill, tmp_path, monkeypatch):
    """And a step whose parts are compared within themselves only is warned of."""
    text = "gradient_accumulation_steps: 2\nlr_scheduler_type: constant\nlogging_steps: 99\n"
    text += "torch_compile_backend: null\ntrain_sampling_strategy: group_by_length\n"
    (file := tmp_path / "args.yaml").write_text(text)
    order = mock.Mock(side_effect=fitting.LabelledOrder)
    monkeypatch.setattr(fitting, "LabelledOrder", order)
    monkeypatch.setattr(fitting, "time", mock.Mock(perf_counter=iter([0, 1, 5, 6, 9]).__next__))
    options = {"trainer_args": file, "epochs": 1.5, "checkpoint_every": 3, "method": "fcd"}
    output = " ".join(distill(**options).split())
    assert "compares samples (samples) within each accumulated batch only" in output
    assert "--batch-size 16 --accumulate 2 compares all rows of a step" in output
    report, lengths = report_of(tmp_path / "out"), order.call_args_list[0].args[-1]
    # 40 rows in batches of 8 of like lengths, two batches a step
    assert len(lengths) == 40
    assert [(x["step"], x["seconds"]) for x in report["history"]] == [(3, 1), (5, 2)]  # of training
    assert report["settings"]["trainer_args"]["lr_scheduler_type"] == "constant"
    assert "exclude each other" in distill(accumulate=2, trainer_args=file, expect=2)


def test_an_output_is_not_replaced_unasked(tiny, runs, tmp_path):
    shutil.copytree(runs, tmp_path / "runs")
    # A file of an output, what it holds, options of a run to there, and words of the sentence.
    for place, text, options, words in (
        *(("new/unfinished/mine.txt", "mine", {option: True}, "new: fastkd did not write")
          for option in ("resume", "overwrite")),
        ("file/unfinished", "mine", {"overwrite": True}, "file: fastkd did not write"),
        ("other/student/model.safetensors", "mine", {"overwrite": True}, "fastkd did not write"),
        *((f"odd/student/{MANIFEST}", text, {"resume": True}, f"student has no readable {MANIFEST}")
          for text in ("[1]", '{"files": {}}', '{"run": 5, "settings": [], "fingerprints": {}}')),
        (f"cut/unfinished/{MANIFEST}", '{"run":', {"resume": True}, "json is damaged.*--overwrite"),
        ("labels/student/notes.txt", "mine", {}, "already holds a student; .*--overwrite"),
        ("labels/student/notes.txt", "mine", {"overwrite": True}, "holds notes.txt.*move it away"),
        ("whole/student/notes.txt", "mine", {**RUN, "resume": True, "seed": 1}, "0, now it is 1"),
        ("whole/student/model.safetensors", "", {**RUN, "resume": True}, "student is damaged .*te"),
        ("stopped/unfinished/notes.txt", "mine", {}, "unfinished run.*--resume.*--overwrite"),
    ):  # fmt: skip
        path = tmp_path / "runs" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
        with pytest.raises(InputError, match=words):
            opened(tiny, tmp_path / "runs" / place.partition("/")[0], **options)
        assert before == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}


def test_files_that_fastkd_did_not_write_are_never_deleted(tiny, runs, tmp_path):
    """Nor those that were changed: while a new run trains, or by a manifest that lists them."""
    student = shutil.copytree(runs / "labels", tmp_path / "out") / "student"
    for name in ("notes.txt", "README.md"):
        (student / name).write_text("mine")
    with replacing(student, {"run": "new"}):
        pass
    kept = student.with_name("student.old")
    assert sorted(os.listdir(kept)) == ["README.md", "notes.txt"] and find_damage(student) is None
    half = shutil.copytree(runs / "stopped", tmp_path / "half")
    (half / "unfinished/checkpoints/notes.txt").write_text("mine")
    opened(tiny, half, **RUN, overwrite=True)
    assert [*half.rglob("notes.txt")] == [half / "unfinished-2/checkpoints/notes.txt"]
    (folder := tmp_path / "folder").mkdir()
    (folder / "link").symlink_to(kept)
    listed = ("link/notes.txt", "../out/student.old/notes.txt", str(kept / "notes.txt"))
    digest = hashlib.sha256(b"mine").hexdigest()
    (folder / MANIFEST).write_text(json.dumps({"files": dict.fromkeys(listed, digest)}))
    saving.discard(folder)
    assert (kept / "notes.txt").exists() and not folder.exists()
    # Nor is a link's target replaced.
    saving.write_manifest(kept, {})
    folder.symlink_to(kept)
    with replacing(folder, {}):
        pass
    assert not folder.is_symlink() and find_damage(kept) is None


def test_the_lock_is_not_its_file(distill, tmp_path):
    (out := tmp_path / "out").mkdir()
    (out / saving.LOCK).write_text("process 1")  # of a killed process
    with saving.locked(out):
        assert f"in use by process {os.getpid()} on" in distill(expect=2)
    assert not (out / saving.LOCK).exists()


def test_the_best_epoch_is_one_with_a_trained_head(distill, tmp_path):
    """LRC-BERT's first stage trains layers alone. Its recipe is printed and recorded."""
    options = {"set": "first_stage=0.5", "epochs": 4, "max_train_rows": 8, "student_layers": 2}
    output = distill(method="lrc_bert", preset="paper", **options)
    assert output.count("(head not trained yet)") == 2
    report = report_of(tmp_path / "out")
    assert [x["best"] for x in report["history"][:3]] == [False, False, True]
    assert re.search(r"batch_size +8 +given by you: Distillation Setup: 16\n", output)
    assert report["recipe"]["given"]["batch_size"]["paper"] == 16
    card = (tmp_path / "out/student/README.md").read_text()
    assert "LRC-BERT; deviations: epochs 4 (Distillation Setup: 18); batch_size 8" in card


def test_a_nan_loss_stops_with_the_best_student_kept(distill):
    error = distill(epochs=40, learning_rate=1e20, warmup=0, expect=1)
    assert "loss became nan" in error and "learning rate" in error
    assert "--precision" not in error  # it is fp32 already


def test_resuming_gives_the_same_result(distill, runs, tmp_path):
    """Ctrl-C: `runs`; a kill at every place: test_kills.py."""
    out, options, flags = tmp_path / "out", {**RUN, "checkpoint_every": 8}, []
    for step, number, code, newest in (
        (2, signal.SIGHUP, 129, "teacher-checkpoints/checkpoint-2"),
        (9, signal.SIGTERM, 143, "checkpoints/checkpoint-9"),  # the last, one before an epoch's end
    ):
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, step, functools.partial(os.kill, os.getpid(), number))
            assert "--resume" in distill(*flags, expect=code, **options)
        assert (out / "unfinished" / newest).exists()
        flags = ["--resume"]
    for folder in ("", newest, "student"):
        (out / "unfinished" / folder / "notes.txt").write_text("mine")
    said = distill(*flags, **options)
    moved = f"{out / 'unfinished-2'}: files that fastkd did not write"
    assert moved in " ".join(said.split()) and same_weights(out, runs / "whole")
    past = [report_of(x)["history"] for x in (out, runs / "whole")]
    assert [x["scores"] for x in past[0]] == [x["scores"] for x in past[1]]
    assert len([*out.rglob("notes.txt")]) == 3  # the student's is in the result


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(distill, runs, tmp_path):
    """Without the best student the training starts again."""
    run_id = saving.read_json(runs / "stopped/unfinished" / MANIFEST)["run"]
    for missing, new_id, why in (
        (MANIFEST, None, "incomplete"),  # as a kill leaves it
        ("optimizer.pt", None, "optimizer.pt is missing"),
        ("method.pt", run_id, "an older fastkd wrote it"),
        (MANIFEST, "x", "belongs to another run"),
    ):
        place, said = tmp_path / why, []
        shutil.copytree(runs / "stopped/unfinished/checkpoints", place)
        (place / "checkpoint-mine").mkdir()
        newest = (place / "checkpoint-7").rename(place / "checkpoint-10")
        (newest / missing).unlink()
        if new_id is not None:
            saving.write_manifest(newest, {"run": new_id})
        assert Checkpoints(place, run_id).newest(said.append) == place / "checkpoint-5"
        assert re.search(rf"cannot be used \(.*{why}.*\); .* from the one before it", *said)
    out = shutil.copytree(runs / "stopped", tmp_path / "out")
    (out / "unfinished/student/model.safetensors").write_bytes(b"")
    output = distill("--resume", **RUN)
    assert "student is damaged" in output and "starts again" in output
    assert same_weights(out, runs / "whole")


def test_resume_wants_the_same_data_and_models(runs, tiny, tmp_path):
    own = shutil.copytree(tiny, tmp_path / "own")
    for name, place in (("stopped", "unfinished"), ("whole", "student")):
        manifest = shutil.copytree(runs / name, tmp_path / name) / place / MANIFEST
        manifest.write_text(manifest.read_text().replace(str(tiny), str(own)))

    def refused(what, name="stopped"):
        given = usual(own, tmp_path, **RUN, out=tmp_path / name)
        assert f"started with other {what};" in run("distill", "--resume", **given, expect=2)

    rows, words = own / "train.tsv", own / "teacher/tokenizer.json"
    rows.write_text(rows.read_text().replace("film", "a film", 1))
    refused("training rows")
    refused("training rows", "whole")  # it is complete
    shutil.copy(tiny / "train.tsv", rows)
    words.write_text(words.read_text().replace('"film"', '"mlif"'))
    refused("tokenizer files")
    for folder in (own / "teacher", tmp_path / "stopped/unfinished/teacher"):
        shutil.rmtree(folder)
    make_teacher(own / "teacher", initializer_range=0.1)
    refused("teacher weights")


def test_too_little_room(distill, runs, tmp_path, monkeypatch):
    """It is seen before any training; a disk that fills up leaves the old student."""
    room, out = [50_000], tmp_path / "out"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**30, 0, room[0]))
    said = r"--out .*this run writes up to \d+ KiB, and the disk has 49 KiB left"
    assert re.search(said, distill(expect=2)) and not out.exists()
    room[0] = 2**29
    shutil.copytree(runs / "labels", out)
    broken = mock.Mock(side_effect=RuntimeError("[enforce fail at inline_container.cc:664]"))
    with monkeypatch.context() as patch:
        stop_at(patch, 5, lambda: room.__setitem__(0, 0))
        patch.setattr(torch, "save", broken)
        message = distill("--overwrite", seed=2, expect=1)
    assert "cannot be saved (No space left on device)" in message and "intact" in message
    assert same_weights(out, runs / "labels") and {*os.listdir(out)} == {"student", "unfinished"}
    room[0], said = 2**29, r"cannot be saved \(No space left on device\)"
    full = OSError(errno.ENOSPC, "No space left on device")
    for error in (SafetensorError("No space left (os error 28)"), full):
        with pytest.raises(SaveFailed, match=said), saving.saving(tmp_path):
            raise error


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
    for name in ("google.protobuf", "sklearn"):
        monkeypatch.setitem(sys.modules, name, None)
    error = distill(expect=1)
    assert re.match(r"Error: scikit-learn is not installed; .*pip.* -e '[^']*\[train\]'", error)
    assert not (tmp_path / "out").exists()
    with pytest.raises(MissingExtra, match=r"^protobuf is not installed"):  # the package's name
        require("google.protobuf", "onnx")


def test_lists_and_mistakes_import_no_torch():
    for words, code in ((["--help"], 0), (["distill", "--teacher", "b", "--epochs", "0"], 2)):
        command = [sys.executable, "-X", "importtime", "-m", "fastkd", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        imported = {line.split("| ")[-1].strip() for line in done.stderr.splitlines()}
        assert done.returncode == code and "fastkd.cli.main" in imported
        assert not imported & {"torch", "transformers", "numpy"}
    # What is written twice, to import no torch.
    assert list(config.NAMES) == [*METHODS, *baselines.BASELINES]
    assert config.LABELLED_SHARE == labelled_order.LABELLED_SHARE
    assert command_settings.MEASURES == MEASURES
    first, *others = (CliRunner().invoke(app, words).output for words in ([], ["-h"], ["--help"]))
    assert [first] * 2 == others and all(command in first for command in COMMANDS)
    assert CliRunner().invoke(app, ["--version"]).output == f"fastkd {fastkd.__version__}\n"


def test_the_packaged_teacher_who_is_the_student_too(distill, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(packaged_teacher, "teacher_path", lambda: tiny / "teacher")
    (tmp_path / "out").mkdir()
    given = {"teacher": "packaged", "student": tiny / "teacher", "method": "lrc_bert"}
    said = distill("--resume", **given, set="first_stage=0.9")
    assert "no run to resume; this one begins" in said and "warning: --student is the teac" in said
    assert "beyond the last of 5 steps (at 80%)" in said
    assert report_of(tmp_path / "out")["settings"]["teacher"] == str(tiny / "teacher")
