"""A run may be killed at any file operation: resumed, it gives the same bits and leaves no litter.

An audit hook of Python sees every open, rename, mkdir and removal below the output, and torch's and
safetensors' own writers are wrapped. The "kill" is an exception that nothing catches, after which
every further operation fails too, so that no clean-up code can act after the process's death.
"""

import functools
import gc
import os
import random
import shutil
import sys
from pathlib import Path

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
WRITERS = (
    (torch, "save"), (safetensors.torch, "save_file"),
    (transformers.modeling_utils, "safe_save_file"),
)  # fmt: skip


class Killed(BaseException):
    """The process is dead."""


class Killer:
    """Counts the operations that change ``root``; from number ``last`` on, none is done."""

    def __init__(self, monkeypatch):
        self.root, self.count, self.last = None, 0, None
        self.renamed = {}  # by path: number of its last rename
        # Not on import: a hook stays, and slows Dynamo and the interpreter in all other tests.
        sys.addaudithook(self.hook)
        for module, name in WRITERS:
            wrapped = functools.partial(self.write, getattr(module, name))
            monkeypatch.setattr(module, name, wrapped)

    def concerns(self, path):
        return self.root is not None and str(path).startswith(self.root)

    def hook(self, event, arguments):
        if event not in EVENTS or not self.concerns(arguments[0]):
            return
        if event == "open":
            _, mode, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if not writes and not set(mode or "") & set("wax+"):
                return
        self.operation()
        if event == "os.rename":
            self.renamed[os.path.relpath(arguments[0], self.root)] = self.count

    def write(self, original, content, filename, *args, **kwargs):
        if self.concerns(filename):
            self.operation(Path(filename))
        return original(content, filename, *args, **kwargs)

    def operation(self, half_written=None):
        self.count += 1
        if self.last is not None and self.count >= self.last:
            if half_written is not None and self.count == self.last:
                root, self.root = self.root, None
                half_written.write_bytes(b"half")
                self.root = root
            raise Killed

    def run(self, out, given, *flags, last=None):
        """``fastkd distill``, which dies at operation ``last``."""
        gc.collect()  # frames of a killed run hold its lock, which a dead process does not
        self.root, self.count, self.last = str(out), 0, last
        try:
            return CliRunner().invoke(app, words_of("distill", *flags, **{**given, "out": out}))
        except Killed:
            return None
        finally:
            self.root = None


def contents(out):
    """The results' files, which are all that there is and sound, and their weights."""
    for name in ("student", "teacher"):
        assert find_damage(out / name) is None and not unlisted_files(out / name)
    found = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    return found, [load_file(out / x / "model.safetensors") for x in ("student", "teacher")]


def test_every_kill_resumes_to_the_same_bits(monkeypatch, tmp_path):
    """A fine-tuned teacher, two epochs and checkpoints, in place of old results or of none.

    At any moment a complete student is there, the old one or the new one.
    Two of all the places are drawn; FASTKD_KILLS=all tries each.
    """
    killer = Killer(monkeypatch)
    make_bare(tmp_path / "teacher")
    for seed, name in enumerate(("train", "dev")):
        write_tsv(tmp_path / f"{name}.tsv", 8, seed)
    more = {"finetune_teacher": 1, "epochs": 2, "checkpoint_every": 1, "method": "lrkd"}
    given = usual(tmp_path, tmp_path, **more, learning_rate=1e-2)
    old, whole = tmp_path / "old", tmp_path / "whole"
    assert killer.run(old, given, "--seed", "5").exit_code == 0
    shutil.copytree(old, whole)
    assert killer.run(whole, given, "--overwrite").exit_code == 0
    (files, models), total = contents(whole), killer.count
    places = range(1, total + 1)
    if os.environ.get("FASTKD_KILLS") != "all":
        places = random.Random(FIRST).sample(places, 2)
    # And the last seal, between the renames of a replacement, and the end; the first operations
    # make a new output.
    seal = killer.renamed["unfinished/student/.fastkd.json.new"]
    kills = [(True, x) for x in {*places, seal, killer.renamed["student"] + 1, total}]
    for replaces, last in (*kills, (False, random.Random(FIRST).randint(2, 8))):
        out = tmp_path / f"out{last}{replaces}"
        if replaces:
            shutil.copytree(old, out)
        flags = ["--overwrite"] * replaces
        result = killer.run(out, given, *flags, last=last)
        assert result is None or result.exit_code, f"operation {last} was not the end"
        if replaces and not (out / "student").exists():
            assert (out / ".student.old").exists()
        elif replaces:
            assert find_damage(out / "student") is None
        if (out / "unfinished" / "fastkd.json").exists():
            refused = killer.run(out, given)
            assert refused.exit_code == 2 and "--resume" in refused.stderr
            assert (out / "student").exists() == replaces  # also between the renames
            flags = ["--resume"]
        elif last > total - 40:
            flags = ["--resume"]
        result = killer.run(out, given, *flags)
        assert result.exit_code == 0, (last, result.output)
        found = contents(out)
        assert found[0] == files, last
        for model, weights in zip(found[1], models, strict=True):
            assert all(torch.equal(model[name], value) for name, value in weights.items()), last
