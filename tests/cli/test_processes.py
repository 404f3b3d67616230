"""`fastkd distill` in two processes: the student of one with twice the batch, and its mistakes."""

import functools
import json
import os
import random
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from torch.distributed import run as torchrun

from fastkd.distill.labelled_order import LabelledOrder
from fastkd.train import processes
from fastkd.train.fitting import StepSampler
from fastkd.train.saving import find_damage
from tests.cli.launched import SELDOM, Launch, command, commands, packaged, result_of
from tests.cli.test_demo import write_packaged
from tests.support.draw import FIRST
from tests.support.runs import report_of, same_weights, stop_at, visible, weights_of
from tests.support.tiny import STILL, make_teacher, run, sentences, usual, words_of, write_tsv
from tests.train.tasks.test_two_tokenizers import make_student
from tests.train.tasks.through import (
    make_bare,
    make_chat_teacher,
    make_decoder,
    make_writer,
    write_chats,
    write_conll,
    write_targets,
    write_text,
)

# 13 rows, 8 a step: the last step of an epoch has 5.
ROWS, BATCH = 13, 8
CHAT = {
    "task": "chat", "lora": "r=2", "pack": True, "on_policy": 0.5, "epochs": 2,
    "learning_rate": 1e-2, "max_new_tokens": 4,
}  # fmt: skip
RUNS: dict[str, dict] = {
    "soft_targets": {},
    # Three rows of each batch have labels: one or two in each process.
    "few": {"max_train_rows": 9, "unlabelled": "more.txt", "labelled_share": 0.3, "epochs": 1},
    # Which compares samples with each other; tests/distill/test_splits.py has every method.
    "parts": {
        "task": "token-classification", "finetune_teacher": 1, "method": "mc3kd", "gather": True,
        "accumulate": 2, "epochs": 1,
    },
    "chat": CHAT,
    # No process holds a whole model.
    **{name: {"fsdp": True, "epochs": 1, **more} for name, more in {
        "sharded": {"finetune_teacher": 1, "checkpoint_every": 2, "method": "lrkd"},
        "sharded chat": CHAT,
        "sharded writer": {"task": "seq2seq", "teacher_layers": "1", "max_new_tokens": 4},
        # Whose steps in processes that hold whole models: tests/distill/test_by_hand.py.
        "sharded, two tokenizers": {
            "task": "causal-lm", "student": "student", "unmatched": "sorted", "method": "fcd",
            "gather": True, "accumulate": 2,
        },
    }.items()},
}  # fmt: skip
STOPPED = {"checkpoint_every": 2, "method": "lrkd", "max_train_rows": 12, "epochs": 3}  # six steps
# Two variants of two steps, for two seeds.
STUDY = """
seeds = 2
steps = 2
device = "cpu"
tasks.one = {train = "train.tsv", eval = "dev.tsv", finetune_teacher = 0.5, student_layers = 2}
methods = {labels = {}, fcd = {}}
"""
LONG = {"checkpoint_every": 3, "epochs": 6}


MODELS = {
    "teacher": (make_teacher, write_tsv, "tsv"),
    "token-classification": (functools.partial(make_bare, layers=4), write_conll, "conll"),
    "seq2seq": (lambda path, **_: make_writer(path, dropout=0.0), write_targets, "jsonl"),
    "causal-lm": (lambda path, **_: make_decoder(path), write_text, "jsonl"),
    "chat": (lambda path, **_: make_chat_teacher(path), write_chats, "jsonl"),
}  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """`fastkd distill` on tiny data without dropout; --batch-size is for one process."""
    folder = tmp_path_factory.mktemp("processes")
    for name, (make_model, write_rows, kind) in MODELS.items():
        make_model(folder / name, **STILL)
        for part, rows, seed in (("train", ROWS, 0), ("eval", 13, 1)):
            write_rows(folder / f"{name}.{part}.{kind}", rows, seed)
    (folder / "more.txt").write_text("\n".join(text for text, _ in sentences(30, seed=2)))
    make_student(folder / "student")

    def make(out, processes, command="distill", **options):
        for name in {"unlabelled", "student"} & options.keys():
            options[name] = folder / options[name]
        name = options.get("task", "teacher")
        given = {"teacher": folder / name, "batch_size": BATCH // processes, "epochs": 2}
        for part in ("train", "eval"):
            (given[part],) = folder.glob(f"{name}.{part}.*")
        given |= {"out": out, "method": "soft_targets", **options}
        return words_of(command, **usual(folder, folder, **given))

    return make


@pytest.fixture(scope="module")
def launched(words, tmp_path_factory):
    """Results of all commands that end by themselves, in one start of two processes.

    Of the sharded runs two are drawn. A result is (exit codes, outputs, errors), each by rank.
    Errors are those of the launcher.
    """
    folder = tmp_path_factory.mktemp("launch")
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, random.randint(4, 5), lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        run(*words(folder / "stopped", 1, **STOPPED), expect=130)
    left = random.Random(FIRST).sample([name for name in RUNS if "sharded" in name], 2)
    cut = {**STOPPED, "method": "tests.cli.launched:StopsOnce", "fsdp": True}
    # A teacher's cache is written by both, and read by both.
    kept = {"epochs": None, "learning_rate": None, "method": "soft_targets"}
    lines = {
        **{name: words(folder / name, 2, **RUNS[name]) for name in RUNS if name not in left},
        "cache": words(folder / "cache", 2, "cache", **kept),
        "cached": words(folder / "cached", 2, teacher_cache=folder / "cache", teacher=None),
        "stopped": words(folder / "stopped", 1, resume=True, **STOPPED),
        "cut": words(folder / "cut", 2, **cut),
        "cut, resumed": words(folder / "cut", 2, resume=True, **cut),
        "not cut": words(folder / "not cut", 2, **cut),
        "already holds a student": words(folder / "soft_targets", 2),
        "no such directory": words(folder / "x", 2, teacher="./nothing"),
        "not here": words(folder / "x", 2, method="tests.cli.launched:FailsInTheSecond"),
        "did you mean": words(folder / "x", 2, method="fdc"),
        "last": words(folder / "bug", 2, method="tests.cli.launched:BreaksInTheSecond"),
    }
    launch = Launch(folder, 2, commands, folder, lines, 0.01, interval=SELDOM)
    _, errors = launch.end(600)
    assert (folder / "0.json").exists() and launch.process.exitcode, errors
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    return folder, {k: tuple(zip(first[k], second[k], strict=True)) for k in first}, errors


# Scores that are means of real numbers.
REAL = {"perplexity", "bits_per_byte", "loss"}


def same_students(one, other):
    a, b = weights_of(one), weights_of(other)
    assert a.keys() == b.keys()
    for name, value in a.items():
        if not name.endswith("key.bias"):  # its gradient is of rounding errors only
            assert (value - b[name]).abs().max() <= 1e-5, name
    first, second = report_of(one), report_of(other)
    assert first["parameters"] == second["parameters"]
    for who in ("student", "teacher"):
        for name, score in first[who].items():  # what counts rows is equal, a mean of losses nearly
            real = name in REAL
            assert second[who][name] == (pytest.approx(score, rel=1e-5) if real else score)
    for ours, theirs in zip(first["history"], second["history"], strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)


@pytest.mark.slow
def test_two_processes_give_the_student_of_one_with_twice_the_batch(words, launched, tmp_path):
    folder, results, _ = launched
    for name in RUNS.keys() & results:
        codes, outputs, errors = results[name]
        assert codes == (0, 0), (name, errors)
        assert not outputs[1] and "2 processes: 8 rows a step in all" in outputs[0]
        tuned = "finetune_teacher" in RUNS[name]
        assert visible(folder / name) == ["student", *["teacher"] * tuned]
        one = folder / name.removeprefix("sharded ")  # by whole models, if it is there
        if name == one.name or not one.exists():
            one = tmp_path / name
            run(*words(one, 1, **{**RUNS[name], "fsdp": None, "accumulate": None}))
        same_students(folder / name, one)


def test_a_cache_of_two_processes_and_mistakes_that_are_told_once(launched):
    folder, results, last = launched
    for name in ("cache", "cached"):
        assert results[name][0] == (0, 0), results[name]
    assert len(list((folder / "cache").glob("shard-*"))) == 2
    same_students(folder / "cached", folder / "soft_targets")
    for part in ("already holds a student", "no such directory", "not here", "did you mean"):
        codes, _, errors = results[part]
        told = "".join(errors)
        assert codes == (2, 2) and part in told
        assert told.count("Error: ") == 1 and told.count("\n") == 1, errors
    assert not (folder / "x").exists()
    # A bug in one process ends the others.
    assert "ZeroDivisionError: a bug" in last and "Error: another process" not in last


@pytest.mark.slow
def test_a_run_in_two_processes_that_is_ended_goes_on_in_one(words, tmp_path):
    """After the death of a process, then of the launcher."""
    out = tmp_path / "out"
    for how, resume in (("a process is killed", None), ("the launcher is stopped", True)):
        log = tmp_path / how
        line = words(out, 2, log_json=log, resume=resume, **LONG)
        launch = Launch(tmp_path / f"launch{resume}", 2, command, line, interval=SELDOM)
        launch.wait_for_step(log, random.randint(4, 6) if resume is None else 8)
        if resume is None:
            os.kill(launch.pid(1), signal.SIGKILL)
            _, errors = launch.end()
            (error,) = re.findall("(?m)^Error: .*", errors)
            assert "another process of this run has ended" in error
        else:
            launch.process.terminate()
            _, errors = launch.end()
            assert errors.count("--resume continues the run") == 1, errors
        assert launch.process.exitcode
        # The kill may have interrupted a save.
        saved = (out / "unfinished" / "checkpoints").iterdir()
        sound = [path for path in saved if find_damage(path) is None]
        assert sound
        for checkpoint in sound:
            assert {"rng_state_0.pth", "rng_state_1.pth"} <= {p.name for p in checkpoint.iterdir()}
    resumed = run(*words(out, 2, resume=True, **LONG))
    assert "1 processes: 8 rows a step in all, as in the 2 that began" in resumed
    run(*words(tmp_path / "whole", 1, **LONG))
    same_students(out, tmp_path / "whole")


@pytest.mark.thorough
def test_the_launcher_starts_the_command(tmp_path):
    """In new interpreters, as a user does."""
    line = ["--nproc-per-node", "2", "-m", "fastkd", "--version"]
    launch = Launch(tmp_path / "launch", None, torchrun.main, line)
    printed, errors = launch.end()
    assert launch.process.exitcode == 0 and printed.count("fastkd") == 2, errors


def test_what_the_first_process_does_alone(words, tmp_path, monkeypatch):
    """It tells a mistake before processes meet, for which the others wait, and it predicts."""
    waited = []
    monkeypatch.setattr(processes.time, "sleep", waited.append)
    (tmp_path / "text.txt").write_text("good film\n")
    teacher = words(tmp_path, 2)[2]
    predict = ["predict", "--model", teacher, "--data", str(tmp_path / "text.txt")]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        code, _, errors = result_of(words(tmp_path / "x", 2, epochs=0))
        assert code == 2 and errors.count("Error: ") == 1 and "--epochs" in errors
        assert len(waited) == rank
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        out = tmp_path / f"{rank}.tsv"
        assert bool(run(*predict, "--out", str(out))) == out.exists() == (rank == 0)


@pytest.mark.slow
def test_a_run_in_one_process_goes_on_in_two(words, launched, tmp_path):
    """A sharded one goes on in as many to the same bits."""
    folder, results, _ = launched
    run(*words(tmp_path / "whole", 1, **STOPPED))
    assert results["stopped"][0] == (0, 0), results["stopped"]
    same_students(folder / "stopped", tmp_path / "whole")
    assert [results[name][0][0] for name in ("cut", "cut, resumed", "not cut")] == [130, 0, 0]
    assert same_weights(folder / "cut", folder / "not cut")
    past = [report_of(folder / name)["history"] for name in ("cut", "not cut")]
    assert [x["losses"] for x in past[0]] == [x["losses"] for x in past[1]]


@pytest.mark.parametrize("rows", [1, 7, 8, 45])
@pytest.mark.parametrize("ranks", [1, 2, 3, 16])
def test_every_row_is_read_once_an_epoch_in_the_same_order(rows, ranks):
    order, orders = LabelledOrder(np.ones(rows, dtype=bool), 8), []
    for epoch in (0, 1):
        alone = StepSampler(order, 3, epoch=[epoch].pop)
        shared = [StepSampler(order, 3, rank, ranks, [epoch].pop) for rank in range(ranks)]
        whole = [part.rows for part in alone]
        for rows_of_step, *parts in zip(whole, *shared, strict=True):
            assert [i for part in parts if part.share for i in part.rows] == rows_of_step
            shares = [len(part.rows) * ranks / len(rows_of_step) for part in parts]
            for part, share in zip(parts, shares, strict=True):
                assert part.share == pytest.approx(share) or part.share == 0
        orders.append([i for step in whole for i in step])
        assert sorted(orders[-1]) == list(range(rows))
    assert rows == 1 or orders[0] != orders[1]
    assert len(alone) == -(-rows // 8)


@pytest.mark.parametrize(("name", "options", "printed"), [
    ("demo", ["--fast", "--steps", "1", "--device", "cpu"], (
        r"2 areas: network, text \(chance: 0.500\)", "8 of them with a label",
        "2 seeds, 1 steps each",
        *(rf"(?m)^ *{name}\b.* [01]\.\d{{4}}\b" for name in ("teacher", "labels", "fcd")))),
    ("study", ["study.toml"], ("Nothing can be told with two seeds",)),
])  # fmt: skip
def test_processes_share_the_runs(tmp_path, monkeypatch, name, options, printed):
    """The demo has two methods here: tests/distill trains by all."""
    write_packaged(tmp_path)
    monkeypatch.chdir(tmp_path)
    write_tsv(Path("train.tsv"))
    write_tsv(Path("dev.tsv"), 20, 1)
    Path("study.toml").write_text(STUDY)
    out = tmp_path / "out"
    launch = Launch(tmp_path / "launch", 2, packaged, tmp_path, words_of(name, *options, out=out))
    said, errors = launch.end()
    assert launch.process.exitcode == 0, errors
    assert said.count("report:") == 1 and all(re.search(words, said) for words in printed), said
    assert (out / "report.html").stat().st_size > 1000
    assert len(list(out.glob("**/runs/*.json"))) == 4
    assert (out / "student" / "config.json").exists() == (name == "demo")
