"""Commands run in every process of a launcher, one after the other: what each process said.

python -m torch.distributed.run --nproc-per-node 2 -m tests.app.launched FOLDER
"""

import functools
import gc
import json
import multiprocessing
import os
import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from typer.testing import CliRunner

from fastkd.app import demo, docstrings, processes
from fastkd.app.cli import app
from fastkd.distill import Method
from fastkd.study import task

LEAVES_THE_LAUNCHER = "demo", "study"


def main(folder: Path) -> None:
    """Run FOLDER/commands.json, lists of words by name; results in FOLDER/<rank>.json.

    The last of them is the process's own: how it ends is the launcher's to see.
    The demo's teacher is FOLDER/teacher, and what it reads FOLDER/library.
    """
    demo.teacher_path = task.teacher_path = lambda: folder / "teacher"
    task.load_docstrings = functools.partial(docstrings.load_docstrings, root=folder / "library")
    gc.freeze()  # accelerate collects garbage once a run
    *commands, (_, last) = json.loads((folder / "commands.json").read_text()).items()
    with multiprocessing.get_context("fork").Pool(1) as apart:  # before there are threads
        results = {
            name: apart.apply(result_of, (words,))
            for name, words in commands
            if words[0] in LEAVES_THE_LAUNCHER
        }
    for name, words in commands:
        if name in results:
            continue
        results[name] = result_of(words)
        if dist.is_initialized():
            dist.barrier()
            if processes.first():
                dist.distributed_c10d._get_default_store().delete_key("fastkd failed")
            dist.barrier()
    (folder / f"{processes.rank()}.json").write_text(json.dumps(results))
    app(last)


def result_of(words: list[str]) -> tuple[int, str, str]:
    with mock.patch.dict(os.environ):
        result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


class FailsInTheSecond(Method):
    """A mistake that one process alone meets."""

    uses_teacher = False

    def __init__(self) -> None:
        super().__init__()
        if processes.rank() == 1:
            raise ValueError("not here")

    def weights(self, progress):
        return {"task": 1.0}


class BreaksInTheSecond(FailsInTheSecond):
    """A step that goes wrong in one process alone."""

    def __init__(self) -> None:
        Method.__init__(self)
        self.steps = 0

    def task(self, step):
        self.steps += 1
        if self.steps == 3 and processes.rank() == 1:
            raise ZeroDivisionError("a bug")
        return super().task(step)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
