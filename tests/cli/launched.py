"""Functions for tests that start several processes by torchrun.

The processes are forks of one process with all imports done; the launcher is torch's own.
"""

import faulthandler
import functools
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from torch.distributed import run as torchrun
from typer.testing import CliRunner

from fastkd import __main__ as entry
from fastkd.cli import analyze_command, demo
from fastkd.cli.main import app
from fastkd.distill import LRKD, METHODS
from fastkd.study import docstrings
from fastkd.train import packaged_teacher, processes, scoring
from tests.distill.processes import CONTEXT

scoring.REPEATS = 1  # as in tests.support.tiny
# What commands import late, and every fork would anew.
for late in ("typer._adapters", "datasets.io.generator", "transformers.models.bert.modeling_bert"):
    importlib.import_module(late)
LONGEST = 600  # seconds, after which a process that hangs says where, and ends


class Launch:
    """``function(*arguments)`` in ``ranks`` processes of a launcher; their files are in ``folder``.

    Without ``ranks`` in one process, which has no launcher; it looks every ``interval`` seconds.
    """

    def __init__(self, folder: Path, ranks: int | None, function, *arguments, interval="0.1"):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        arguments = folder, ranks, interval, function, arguments
        self.process = CONTEXT.Process(target=_launch, args=arguments)
        self.process.start()

    def end(self) -> tuple[str, str]:
        """Output and errors."""
        self.process.join()
        return tuple((self.folder / name).read_text() for name in ("out", "err"))


def _launch(folder: Path, ranks: int | None, interval: str, function, arguments) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.fsync = lambda descriptor: None  # as in tests/conftest.py
    if ranks is None:
        _work(function, arguments)
        return
    words = ["--nproc-per-node", str(ranks), "--monitor-interval", interval, "function"]
    words[:0] = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]  # any free port
    config, *_ = torchrun.config_from_args(torchrun.parse_args(words))
    config.start_method = "fork"
    torchrun.elastic_launch(config, _work)(function, arguments)


def _work(function, arguments) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    gc.freeze()  # accelerate collects garbage once a run
    try:
        function(*arguments)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def command(words: list[str]) -> None:
    """What ``python -m fastkd`` does."""
    sys.argv[1:] = words
    entry.main()


def packaged(folder: Path, words: list[str]) -> None:
    """A command whose packaged teacher is FOLDER/teacher, and Python's library FOLDER/library.

    Of the demo's methods two are enough for processes to share.
    """
    demo.METHODS = {name: METHODS[name] for name in ("labels", "fcd")}
    demo.teacher_path = packaged_teacher.teacher_path = lambda: folder / "teacher"
    load = functools.partial(docstrings.load_docstrings, root=folder / "library")
    docstrings.SETS["areas"] = load
    command(words)


def commands(folder: Path, lines: dict[str, list[str]]) -> None:
    """Run command lines by name, one after the other; results in FOLDER/<rank>.json.

    The last of them is the process's own: how it ends is the launcher's to see. The second process
    is a little late each time that the first one has told it something. No picture is drawn.
    """
    without_pictures(setattr)
    on_first = processes.on_first_process
    if processes.rank():
        processes.on_first_process = lambda work: (on_first(work), time.sleep(0.01))[0]
    *most, (_, last) = lines.items()
    results = {}
    for name, words in most:
        results[name] = result_of(words)
        if results[name][0]:  # the others may wait for this process in vain
            print(name, *results[name], file=sys.stderr, flush=True)
        dist.barrier()
        if processes.rank() == 0:
            dist.distributed_c10d._get_default_store().delete_key("fastkd failed")
        dist.barrier()
    (folder / f"{processes.rank()}.json").write_text(json.dumps(results))
    command(last)


def without_pictures(change) -> None:
    """Drawing takes longer than all else of `fastkd analyze` on few rows."""
    for name in ("plot_layer_panels", "plot_sentence"):
        change(analyze_command, name, lambda *arguments, **options: None)


def result_of(words: list[str]) -> tuple[int, str, str]:
    with mock.patch.dict(os.environ):
        result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    bug = None if isinstance(result.exception, SystemExit) else result.exception
    told = "" if bug is None else "".join(traceback.format_exception(bug))
    return result.exit_code, result.stdout, result.stderr + told


class FailsInTheSecond(LRKD):
    def __init__(self) -> None:
        super().__init__()
        if processes.rank() == 1:
            raise ValueError("not here")


class StopsOnce(LRKD):
    """``end`` in the third step of all that each of two processes takes with it."""

    steps = 0

    def task(self, step):
        type(self).steps += 1
        if type(self).steps == 3 and processes.launched():
            self.end()
        return super().task(step)

    def end(self):
        raise KeyboardInterrupt


class Dies(StopsOnce):
    def end(self):
        if processes.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class StopsTheLauncher(StopsOnce):
    def end(self):
        if processes.rank() == 1:
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(2)  # it ends both processes


class Breaks(StopsOnce):
    def end(self):
        if processes.rank() == 1:
            raise ZeroDivisionError("a bug")
