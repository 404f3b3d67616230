"""`fastkd distill` in two processes: the student of one with twice the batch, and its mistakes."""

import csv
import functools
import json
import random
import re

import numpy as np
import pytest

from fastkd.distill.labelled_order import LabelledOrder
from fastkd.train import processes
from fastkd.train.fitting import StepSampler
from fastkd.train.saving import find_damage
from tests.cli.launched import Launch, commands, packaged, result_of, without_pictures
from tests.cli.test_demo import write_packaged
from tests.support.draw import FIRST
from tests.support.runs import press_ctrl_c, report_of, same_weights, stop_at, visible, weights_of
from tests.support.tiny import STILL, make_teacher, run, sentences, usual, words_of, write_tsv
from tests.train.tasks.test_every_task import TASKS
from tests.train.tasks.test_two_tokenizers import make_student
from tests.train.tasks.through import write_rows

# 13 rows, 8 a step: the last step of an epoch has 5.
ROWS, BATCH = 13, 8
CHAT = {
    "task": "chat", "lora": "r=2", "pack": True, "on_policy": 0.5, "learning_rate": 1e-2,
    "max_new_tokens": 4,
}  # fmt: skip
RUNS: dict[str, dict] = {
    # Three rows of each batch have labels: one or two in each process.
    "few": {"max_train_rows": 9, "unlabelled": "more.txt", "labelled_share": 0.3},
    # Which compares samples with each other; tests/distill/test_splits.py has every method.
    "parts": {
        "task": "token-classification", "finetune_teacher": 1, "method": "mc3kd", "gather": True,
        "accumulate": 2,
    },
    "chat": CHAT,
    # No process holds a whole model.
    **{name: {"fsdp": True, **more} for name, more in {
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
STOPPED = {"checkpoint_every": 2, "method": "lrkd", "epochs": 2}  # four steps
# Methods of tests.cli.launched that end the last command in its third step, and words it prints.
ENDINGS = {
    "Dies": "\nError: another process of this run has ended",
    "StopsTheLauncher": "--resume continues the run",
    "Breaks": "\nZeroDivisionError: a bug",
}
# Two variants of two steps, for two seeds.
STUDY = """
seeds = 2
steps = 2
device = "cpu"
tasks.one = {train = "train.tsv", eval = "eval.tsv", finetune_teacher = 0.5, student_layers = 2}
methods = {labels = {}, fcd = {}}
"""
SHARED = {
    "study": (["study.toml"], ["Nothing can be told with two seeds"]),
    "demo": (["--fast", "--steps", "1", "--device", "cpu"], [
        r"2 areas: network, text \(chance: 0.500\)", "2 seeds, 1 steps each",
        *(rf"(?m)^ *{name}\b.* [01]\.\d{{4}}\b" for name in ("teacher", "labels", "fcd")),
    ]),
}  # fmt: skip
# Each run of the tests draws what the processes do.
DRAW = random.Random(FIRST)
DRAWN, ENDING, COMMAND = (DRAW.choice([*table]) for table in (RUNS, ENDINGS, SHARED))
BEGAN = DRAW.choice([1, 2])
ENDED = {**STOPPED, "method": f"tests.cli.launched:{ENDING}"}

WITHOUT_DROPOUT = {"seq2seq": {"dropout": 0.0}, "causal-lm": {}, "chat": {}}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """`fastkd distill` on tiny data without dropout; --batch-size is for one process."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "more.txt").write_text("\n".join(text for text, _ in sentences(30, seed=2)))
    make_student(folder / "student")

    def make(out, processes, command="distill", **options):
        for name in {"unlabelled", "student"} & options.keys():
            options[name] = folder / options[name]
        task = options.get("task", "classification")
        make_model, kind, _ = TASKS[task]
        write = functools.partial(write_rows, task)
        if task == "classification":
            make_model, kind, write = functools.partial(make_teacher, layers=2), "tsv", write_tsv
        given = {"teacher": folder / task, "batch_size": BATCH // processes, "out": out}
        if not given["teacher"].exists():
            make_model(folder / task, **WITHOUT_DROPOUT.get(task, STILL))
        for seed, part in enumerate(("train", "eval")):
            given[part] = write(folder / f"{task}.{part}.{kind}", ROWS, seed)
        given |= {"method": "soft_targets", **options}
        return words_of(command, **usual(folder, folder, **given))

    return make


@pytest.fixture(scope="module")
def launched(words, tmp_path_factory):
    """Results of commands by name, in one start of two processes; the launcher's outputs.

    A result is (exit codes, outputs, errors), each by rank.
    """
    folder = tmp_path_factory.mktemp("launch")
    if BEGAN == 1:
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, 1, press_ctrl_c)
            run(*words(folder / "ended", 1, **ENDED), expect=130)
    cut = {**STOPPED, "method": "tests.cli.launched:StopsOnce", "fsdp": True}
    lines = {
        DRAWN: words(folder / DRAWN, 2, **RUNS[DRAWN]),
        # A teacher's cache is written by both, and read by both.
        "cache": words(folder / "cache", 2, "cache", epochs=None, learning_rate=None),
        "cached": words(folder / "cached", 2, teacher_cache=folder / "cache", teacher=None),
        "cut": words(folder / "cut", 2, **cut),
        "cut, resumed": words(folder / "cut", 2, resume=True, **cut),
        "not cut": words(folder / "not cut", 2, **cut),
        "analyze": analyze(words, folder, "two"),
        "already holds a student": words(folder / "cached", 2),
        "no such directory": words(folder / "x", 2, teacher="./nothing"),
        "not here": words(folder / "x", 2, method="tests.cli.launched:FailsInTheSecond"),
        "did you mean": words(folder / "x", 2, method="fdc"),
        "last": words(folder / "ended", BEGAN, resume=BEGAN == 1 or None, **ENDED),
    }
    # Where a process fails the launcher looks so seldom that the other learns of it first.
    launch = Launch(folder, 2, commands, folder, lines, interval="3")
    said = launch.end()
    assert (folder / "0.json").exists() and launch.process.exitcode, said[1]
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    return folder, {k: tuple(zip(first[k], second[k], strict=True)) for k in first}, said


def analyze(words, folder, out):
    """`fastkd analyze` of the cached teacher's student."""
    teacher, rows = (words(folder, 1)[i] for i in (2, 4))
    return words_of(
        "analyze", model=teacher, student=folder / "cached/student", data=rows, measures="pwcca",
        device="cpu", out=folder / out, batch_size=5,
    )  # fmt: skip


def same_students(one, other):
    a, b = weights_of(one), weights_of(other)
    assert a.keys() == b.keys()
    for name, value in a.items():
        error = (value - b[name]).abs()
        # Gradients of the keys' biases are of rounding errors only.
        if name.endswith("c_attn.bias"):  # of queries, keys and values
            error = error.view(3, -1)[::2]
        if not name.endswith("key.bias"):
            assert error.max() <= 1e-5, name
    first, second = report_of(one), report_of(other)
    assert first["parameters"] == second["parameters"]
    for who in ("student", "teacher"):
        for name, score in first[who].items():  # what counts rows is equal, a mean of losses nearly
            real = name in {"perplexity", "bits_per_byte", "loss"}
            assert second[who][name] == (pytest.approx(score, rel=1e-5) if real else score)
    for ours, theirs in zip(first["history"], second["history"], strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)


@pytest.mark.slow
def test_two_processes_give_the_student_of_one_with_twice_the_batch(
    words, launched, tmp_path, monkeypatch
):
    """And so are an analysis's measures."""
    folder, results, _ = launched
    for name, options in ((DRAWN, RUNS[DRAWN]), ("cached", {})):
        codes, outputs, errors = results[name]
        assert codes == (0, 0), (name, errors)
        assert not outputs[1] and "2 processes: 8 rows a step in all" in outputs[0]
        tuned = "finetune_teacher" in options
        assert visible(folder / name) == ["student", *["teacher"] * tuned]
        run(*words(tmp_path / name, 1, **{**options, "fsdp": None, "accumulate": None}))
        same_students(folder / name, tmp_path / name)
    assert len(list((folder / "cache").glob("shard-*"))) == 2
    codes, outputs, errors = results["analyze"]
    assert codes == (0, 0) and "RCCC" in outputs[0] and not outputs[1], errors
    without_pictures(monkeypatch.setattr)
    run(*analyze(words, folder, "one"))
    tables = [csv.DictReader((folder / name / "layers.csv").open()) for name in ("one", "two")]
    one, two = ([float(row["value"]) for row in table] for table in tables)
    assert one == pytest.approx(two)


def test_mistakes_are_told_once(launched):
    folder, results, _ = launched
    for part in ("already holds a student", "no such directory", "not here", "did you mean"):
        codes, _, errors = results[part]
        told = "".join(errors)
        assert codes == (2, 2) and part in told
        assert told.count("Error: ") == 1 and told.count("\n") == 1, errors
    assert not (folder / "x").exists()


@pytest.mark.slow
def test_a_run_that_ends_goes_on_in_another_number_of_processes(words, launched, tmp_path):
    """It begins in one process or two, ends in two, and goes on in one.

    A sharded one goes on in as many, to the same bits.
    """
    folder, results, (printed, errors) = launched
    *_, last = errors.rpartition("did you mean")
    assert last.count(ENDINGS[ENDING]) == 1, last
    assert last.count("\nError: another process") == (ENDING == "Dies")
    saved = folder / "ended/unfinished/checkpoints"
    assert not any(map(find_damage, saved.iterdir()))
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {path.name for path in saved.rglob("*")}
    printed += run(*words(folder / "ended", BEGAN, resume=True, **ENDED))
    assert f"8 rows a step in all, as in the {BEGAN} that began" in printed
    assert [results[name][0][0] for name in ("cut", "cut, resumed", "not cut")] == [130, 0, 0]
    run(*words(tmp_path / "whole", 1, **STOPPED))
    for name in ("ended", "not cut"):
        same_students(folder / name, tmp_path / "whole")
    assert same_weights(folder / "cut", folder / "not cut")
    past = [report_of(folder / name)["history"] for name in ("cut", "not cut")]
    assert [x["losses"] for x in past[0]] == [x["losses"] for x in past[1]]


@pytest.mark.slow
def test_processes_share_the_runs(tmp_path, monkeypatch):
    flags, printed = SHARED[COMMAND]
    write_packaged(tmp_path)
    monkeypatch.chdir(tmp_path)
    for seed, part in enumerate(("train", "eval")):
        write_tsv(tmp_path / f"{part}.tsv", 20, seed)
    (tmp_path / "study.toml").write_text(STUDY)
    line = words_of(COMMAND, *flags, out=tmp_path / "out")
    launch = Launch(tmp_path / "launch", 2, packaged, tmp_path, line)
    said, errors = launch.end()
    assert launch.process.exitcode == 0, errors
    assert said.count("report:") == 1 and all(re.search(words, said) for words in printed), said
    assert (tmp_path / "out/report.html").stat().st_size > 1000
    assert len(list(tmp_path.glob("out/**/runs/*.json"))) == 4
    assert (tmp_path / "out/student/config.json").exists() == (COMMAND == "demo")


def test_what_the_first_process_does_alone(words, tmp_path, monkeypatch):
    """It tells a mistake before processes meet, for which the others wait, and it predicts."""
    waited = []
    monkeypatch.setattr(processes.time, "sleep", waited.append)
    (tmp_path / "text.txt").write_text("good film\n")
    teacher = words(tmp_path, 2)[2]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        code, _, errors = result_of(words(tmp_path / "x", 2, epochs=0))
        assert code == 2 and errors.count("Error: ") == 1 and "--epochs" in errors
        out = tmp_path / f"{rank}.tsv"
        said = run("predict", model=teacher, data=tmp_path / "text.txt", out=out)
        assert bool(said) == out.exists() == (rank == 0) and len(waited) == 1


@pytest.mark.parametrize("rows", [1, 7, 8, 45])
@pytest.mark.parametrize("ranks", [1, 2, 3, 16])
def test_every_row_is_read_once_an_epoch_in_the_same_order(rows, ranks):
    order, orders = LabelledOrder(np.ones(rows, dtype=bool), 8), []
    for epoch in (0, 1):
        alone = [part.rows for part in StepSampler(order, 3, epoch=[epoch].pop)]
        shared = [StepSampler(order, 3, rank, ranks, [epoch].pop) for rank in range(ranks)]
        for rows_of_step, *parts in zip(alone, *shared, strict=True):
            assert [i for part in parts if part.share for i in part.rows] == rows_of_step
            for part in parts:
                share = len(part.rows) * ranks / len(rows_of_step)
                assert part.share == pytest.approx(share) or part.share == 0
        orders.append([i for step in alone for i in step])
        assert sorted(orders[-1]) == list(range(rows))
    assert rows == 1 or orders[0] != orders[1]
    assert len(alone) == -(-rows // 8)
