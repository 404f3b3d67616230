"""What `make gpu-check` promises about time and failures, shown without a GPU."""

import argparse
import json
import subprocess
import time
from pathlib import Path

import pytest
import torch

from fastkd._core import machine
from tools import gpu_check


class Clock:
    """Time passes only where something is done."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def options(tmp_path, **others):
    return argparse.Namespace(minutes=9.5, out=str(tmp_path), resume=False, **others)


@pytest.mark.parametrize(
    "only", ["build,tests,graphs", "tests", "bench", ",".join(gpu_check.STAGES)]
)
def test_stages_together_end_in_time(tmp_path, only):
    """Also when each takes all that it may, and some break."""
    clock = Clock()

    def stage(job):
        clock.now += job.seconds
        if len(given) == 1:
            raise RuntimeError("a stage that breaks")
        return True

    given = {name: (stage, gpu_check.STAGES[name][1]) for name in only.split(",")}
    outcome = gpu_check.run_stages(given, options(tmp_path), clock)
    assert [name for name, _, _ in outcome] == list(given)
    assert clock.now - 1000 <= 600
    saved = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [row["stage"] for row in saved] == list(given)


def test_time_that_a_stage_leaves_goes_to_the_next(tmp_path):
    clock, allowed = Clock(), []

    def stage(job):
        allowed.append(job.seconds)
        clock.now += 10
        return True

    gpu_check.run_stages({"tests": (stage, 1), "bench": (stage, 1)}, options(tmp_path), clock)
    assert allowed == [285, 560]


def test_a_command_is_stopped_in_time(tmp_path):
    """With the processes that it started."""
    started = tmp_path / "pid"
    job = gpu_check.Job(options(tmp_path), seconds=1.0)
    assert not gpu_check.command(job, "sh", "-c", 'sleep 60 & echo $! > "$0"; wait', str(started))

    def runs():
        command = ["ps", "-o", "stat=", "-p", started.read_text().strip()]
        state = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        return state and not state.startswith("Z")

    deadline = time.monotonic() + 30  # until the system has taken it down
    while runs() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not runs()


CHILD = """
while read name; do
  case $name in
    crash) exit 7;;
    hang) exec sleep 60;;
    bad) echo '"wrong"'; exit;;
    good*) echo '""';;
  esac
done
"""


def test_a_process_that_dies_or_hangs_does_not_topple_the_rest():
    names = ["good 1", "crash", "good 2", "hang", "bad", "good 3"]
    answers = dict(gpu_check.ask_children(["sh", "-c", CHILD], names, 100, 2, patience=1.0))
    assert set(answers) == set(names)
    assert "ended (7)" in answers["crash"] and "hung" in answers["hang"]
    assert answers["bad"] == "wrong"
    assert all(answers[name] == "" for name in names if name.startswith("good"))


def test_no_question_is_asked_after_its_time():
    assert not list(gpu_check.ask_children(["sh", "-c", CHILD], ["good"], 0, 1, 1.0))


def test_sets_end_in_time_and_go_on_later(tmp_path, monkeypatch):
    """A set that was interrupted is measured again by the next call; finished ones are kept."""
    measured = []

    def command(job, *arguments, environment):
        assert job.seconds <= 30 and environment == {"FASTKD_COMMIT": "abc"}
        name, out = arguments[5], arguments[-1].partition("=")[2]
        measured.append(name)
        Path(out).write_text("{}")
        return len(measured) != 2

    monkeypatch.setattr(gpu_check, "command", command)
    given = argparse.Namespace(set="bert, long,step", out=str(tmp_path), resume=True, commit="abc")
    job = gpu_check.Job(given, 40.0)
    assert not gpu_check.bench(job) and measured == ["bert", "long", "step"]
    assert gpu_check.bench(job) and measured[3:] == ["long"]
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["bench-bert.json", "bench-long.json", "bench-step.json"]


def test_an_interrupted_command_writes_what_it_has(tmp_path):
    code = 'trap "printf partial > $0; exit" INT; sleep 60 & wait'
    job = gpu_check.Job(options(tmp_path), seconds=1.0)
    assert not gpu_check.command(job, "sh", "-c", code, str(tmp_path / "result"))
    assert (tmp_path / "result").read_text() == "partial"


def test_a_machine_without_git_or_an_installed_package_is_described(monkeypatch):
    def missing(*arguments, **others):
        raise FileNotFoundError("git")

    monkeypatch.setattr(machine.subprocess, "run", missing)
    assert machine.describe(torch.device("cpu"))["commit"].startswith("fastkd ")
