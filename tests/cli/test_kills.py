"""A run may be killed at any file operation: resumed, it gives the same bits and leaves no litter.

An audit hook of Python sees every open, rename, mkdir and removal below the output, and torch's and
safetensors' own writers are wrapped. The "kill" is an exception that nothing catches, after which
every further operation fails too, so that no clean-up code can act after the process's death.
"""

import gc
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers.modeling_utils
from safetensors.torch import load_file
from typer.testing import CliRunner

from fastkd.cli.main import app
from fastkd.train.saving import find_damage, unlisted_files
from tests.support.draw import FIRST
from tests.support.tiny import usual, words_of, write_tsv
from tests.train.tasks.through import make_bare

EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}


class Killed(BaseException):
    """The process is dead."""


class Killer:
    """Counts the operations that change ``root``; from number ``last`` on, none is done."""

    def __init__(self):
        self.root, self.count, self.last = None, 0, None
        self.renamed = {}  # by path: number of its last rename

    def hook(self, event, arguments):
        if self.root is None or event not in EVENTS or not self.concerns(arguments[0]):
            return
        if event == "open":
            mode, flags = arguments[1], arguments[2]
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if not writes and (mode is None or not set(mode) & set("wax+")):
                return
        self.operation()
        if event == "os.rename":
            self.renamed[os.path.relpath(arguments[0], self.root)] = self.count

    def concerns(self, path):
        return isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith(
            self.root
        )

    def operation(self, half_written=None):
        self.count += 1
        if self.last is not None and self.count >= self.last:
            if half_written is not None and self.count == self.last:
                root, self.root = self.root, None
                half_written.write_bytes(b"half")
                self.root = root
            raise Killed

    def wrap(self, monkeypatch, module, name, place):
        original = getattr(module, name)

        def wrapped(*args, **kwargs):
            path = args[place] if len(args) > place else kwargs.get("filename")
            if self.root is not None and self.concerns(path):
                self.operation(Path(path))
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, wrapped)

    def watch(self, monkeypatch):
        # Not on import: a hook stays, and slows Dynamo and the interpreter in all other tests.
        sys.addaudithook(self.hook)
        self.wrap(monkeypatch, torch, "save", 1)
        self.wrap(monkeypatch, safetensors.torch, "save_file", 1)
        self.wrap(monkeypatch, transformers.modeling_utils, "safe_save_file", 1)


@pytest.fixture(scope="module")
def killer():
    found = Killer()
    with pytest.MonkeyPatch.context() as patch:
        found.watch(patch)
        yield found


@pytest.fixture(scope="module")
def run(killer, tmp_path_factory):
    """A run with a fine-tuned teacher, two epochs and checkpoints, killed at operation ``last``."""
    path = tmp_path_factory.mktemp("kills")
    make_bare(path / "teacher")
    write_tsv(path / "train.tsv", 8), write_tsv(path / "dev.tsv", 8, seed=1)
    more = {"finetune_teacher": 1, "epochs": 2, "checkpoint_every": 1, "method": "lrkd"}
    given = {**usual(path, path, **more), "learning_rate": 1e-2}

    def run(out, *flags, last=None):
        gc.collect()  # frames of a killed run hold its lock, which a dead process does not
        killer.root, killer.count, killer.last = str(out), 0, last
        try:
            return CliRunner().invoke(app, words_of("distill", *flags, **{**given, "out": out}))
        except Killed:
            return None
        finally:
            killer.root = None

    return run


def contents(out):
    """The results' files, which are all that there is and sound, and their weights."""
    for name in ("student", "teacher"):
        assert find_damage(out / name) is None and not unlisted_files(out / name)
    found = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    return found, [load_file(out / x / "model.safetensors") for x in ("student", "teacher")]


@pytest.fixture(scope="module")
def whole(run, killer, tmp_path_factory):
    """Old results; those of a run that replaces them, its operations, and two of these."""
    old, out = (tmp_path_factory.mktemp("whole") / name for name in ("old", "out"))
    assert run(old, "--seed", "5").exit_code == 0
    shutil.copytree(old, out)
    result = run(out, "--overwrite")
    assert result.exit_code == 0, result.output
    seal = killer.renamed["unfinished/student/.fastkd.json.new"]
    return old, contents(out), killer.count, (seal, killer.renamed["student"] + 1)


def test_every_kill_resumes_to_the_same_bits(run, whole, tmp_path):
    """At any moment a complete student is there, the old one or the new one.

    Two of all the places are drawn; FASTKD_KILLS=all tries each.
    """
    old, (files, models), total, named = whole
    places = range(1, total + 1)
    if os.environ.get("FASTKD_KILLS") != "all":
        places = random.Random(FIRST).sample(places, 2)
    # And the last seal, between the renames of a replacement, and the end; the first operations
    # make a new output.
    kills = [
        *((True, x) for x in (*places, *named, total)),
        (False, random.Random(FIRST).randint(2, 8)),
    ]
    for replaces, last in kills:
        out = tmp_path / f"out{last}{replaces}"
        if replaces:
            shutil.copytree(old, out)
        flags = ["--overwrite"] * replaces
        result = run(out, *flags, last=last)
        assert result is None or result.exit_code, f"operation {last} was not the end"
        if replaces and not (out / "student").exists():
            assert (out / ".student.old").exists()
        elif replaces:
            assert find_damage(out / "student") is None
        if (out / "unfinished" / "fastkd.json").exists():
            refused = run(out)
            assert refused.exit_code == 2 and "--resume" in refused.stderr
            assert (out / "student").exists() == replaces  # also between the renames
            flags = ["--resume"]
        elif last > total - 40:
            flags = ["--resume"]
        result = run(out, *flags)
        assert result.exit_code == 0, (last, result.output)
        found = contents(out)
        assert found[0] == files, last
        for model, weights in zip(found[1], models, strict=True):
            assert all(torch.equal(model[name], value) for name, value in weights.items()), last
