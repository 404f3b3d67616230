"""What `make gpu-check` promises about time and failures, shown without a GPU."""

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch

from fastkd._core import machine
from tests.support.compare import raises
from tools import apart, gpu_check

# A child with a fake device: a fault of it leaves the process, and `release`, of no use.
CHILD = f"""
import os, signal, sys, time
sys.path.insert(0, {str(Path(apart.__file__).parent)!r})
import apart

broken = []

def run(name):
    print("printed by", name)
    if broken:
        raise RuntimeError("an illegal memory access was encountered")
    if "raises" in name or "poison" in name:
        broken.append(name if "poison" in name else "")
        raise ValueError("a " + name)
    if "leaves" in name:  # seen by none but the release
        broken.append(name)
    if "crash" in name:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "hang" in name:  # as in C: no signal is handled
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
        time.sleep(60)
    return os.getpid()

def release():
    if any(broken):
        raise RuntimeError("empty_cache: an illegal memory access was encountered")

class Items(dict):
    def __missing__(self, name):
        return apart.Item(name, lambda: run(name))

apart.serve(Items(), release)
"""
COMMAND = [sys.executable, "-c", CHILD]


def lines_of(names, seconds=100.0, workers=1, patience=2.0):
    lines = []
    items = [apart.Item(name, int, patience) for name in names]
    apart.ask(COMMAND, items, seconds, workers, lines.append)
    assert len(lines) == len({line["name"] for line in lines})
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("workers", [1, 2])
def test_an_item_that_fails_in_any_way_leaves_the_others_their_lines(workers):
    wrong = {
        "raises": "ValueError: a raises",
        "poison": "ValueError: a poison",
        "crash": "its process ended with -11",
        "hang": "hung",
    }
    good = [f"good {i}" for i in range(len(wrong) + 2)]
    pairs = zip(wrong, good[1:-1], strict=True)
    names = [good[0], "leaves a fault", *(x for pair in pairs for x in pair), good[-1]]
    found = lines_of(names, workers=workers)
    assert set(found) == {*wrong, *good, "leaves a fault"}
    for name, line in found.items():
        assert wrong.get(name, "") in line["problem"] and bool(line["problem"]) == (name in wrong)
    # A process without a fault goes on; after a fault, also of the release, there is a new one.
    if workers == 1:
        pids = [found[name]["result"] for name in good]
        assert found["leaves a fault"]["result"] == pids[0] and len(set(pids)) == len(wrong) + 1


def test_no_item_starts_after_the_time_and_none_outlasts_it():
    assert lines_of(["good"], seconds=0) == {}
    start = time.monotonic()
    (line,) = lines_of(["hang", "good"], seconds=1.0, patience=50.0).values()
    assert "when the time was over" in line["problem"] and time.monotonic() - start < 30


def options(tmp_path):
    given = {"minutes": 9.5, "out": str(tmp_path), "resume": False, "dry": True, "workers": 2}
    return argparse.Namespace(**given, commit=None)


def test_a_dry_run_with_a_poisoned_item_writes_all_other_lines(tmp_path, monkeypatch, capsys):
    """And the next call with --resume asks for that item alone."""
    names = [x.name for x in gpu_check.GROUPS["kernels"].items(options(tmp_path))]
    poisoned = names[1]
    child = CHILD.replace('"poison" in name', f"name == {poisoned!r}")
    monkeypatch.setattr(gpu_check, "CHILD", [sys.executable, "-c", child])
    arguments = ["--dry", "--out", str(tmp_path), "--workers", "2"]
    assert gpu_check.main(arguments) == 1
    lines = [json.loads(text) for text in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert {*names} < {x["name"] for x in lines}
    assert [x["name"] for x in lines if x["problem"]] == [poisoned]
    assert f"{poisoned}: ValueError" in capsys.readouterr().out
    monkeypatch.setattr(gpu_check, "CHILD", COMMAND)
    assert gpu_check.main([*arguments, "--resume"]) == 0
    again = (tmp_path / "lines.jsonl").read_text().splitlines()[len(lines) :]
    assert [json.loads(text)["name"] for text in again] == [poisoned]


def test_groups_together_end_in_time(tmp_path, monkeypatch):
    """The first groups have most of it; unused time is left to the next."""
    now, given = [1000.0], []

    def ask(command, items, seconds, workers, note):
        given.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(apart, "ask", ask)
    passed = gpu_check.run_groups(list(gpu_check.GROUPS), options(tmp_path), lambda: now[0])
    assert not passed and sum(given) <= 9.5 * 60 and given[0] == 90


def test_what_is_missing_leaves_out_its_own_items(monkeypatch):
    """Without the extension's CUDA part, nvcc and compute-sanitizer: a reason, no problem."""
    monkeypatch.setattr(gpu_check.extension, "CUDA", False)
    monkeypatch.setattr(gpu_check.recipe, "find_nvcc", lambda: None)
    monkeypatch.setattr(gpu_check.shutil, "which", lambda *_, **options: None)
    case, provider = next(iter(gpu_check.pairs().values()))
    provider = dataclasses.replace(provider, why_not=lambda device: "it isn't built")
    left_out = functools.partial(raises, error=gpu_check.LeftOut)
    left_out("no nvcc", gpu_check.build_extension)
    left_out("not installed", gpu_check.memcheck)
    left_out("it isn't built", gpu_check.right, case, provider)


def test_a_command_is_stopped_in_time_and_writes_what_it_has(tmp_path, monkeypatch):
    """With the processes that it started."""

    def runs():
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

    monkeypatch.setattr(gpu_check, "STOPPING", 2.0)
    code = 'trap "printf partial > $0; exit" INT; sleep 60 & echo $! > $0.pid; wait'
    with pytest.raises(RuntimeError, match="not finished after 1 s"):
        gpu_check.command("sh", "-c", code, str(tmp_path / "result"), seconds=1.0)
    assert (tmp_path / "result").read_text() == "partial"
    pid = int((tmp_path / "result.pid").read_text())
    deadline = time.monotonic() + 30  # until the system has taken it down
    while runs() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not runs()


def test_a_machine_without_git_or_an_installed_package_is_described(monkeypatch):
    missing = mock.Mock(side_effect=FileNotFoundError("git"))
    monkeypatch.setattr(machine.subprocess, "run", missing)
    assert machine.describe(torch.device("cpu"))["commit"].startswith("fastkd ")
