"""Commands run in every process of a launcher, one after the other: what each process said.

python -m torch.distributed.run --nproc-per-node 2 -m tests.app.launched FOLDER
"""

import json
import os
import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from typer.testing import CliRunner

from fastkd.app import demo, processes
from fastkd.app.cli import app
from fastkd.distill import Method
from fastkd.study import task


def main(folder: Path) -> None:
    """Run FOLDER/commands.json, a list of lists of words; results in FOLDER/<rank>.json.

    The demo's teacher is FOLDER/teacher.
    """
    demo.teacher_path = task.teacher_path = lambda: folder / "teacher"
    results = []
    for words in json.loads((folder / "commands.json").read_text()):
        with mock.patch.dict(os.environ):  # a study leaves the launcher
            result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
        results.append([result.exit_code, result.stdout, result.stderr])
        if dist.is_initialized():
            dist.barrier()
            if processes.first():
                dist.distributed_c10d._get_default_store().delete_key("fastkd failed")
            dist.barrier()
        (folder / f"{processes.rank()}.json").write_text(json.dumps(results))


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
