"""Functions for tests that start several processes by torchrun.

The processes are forks of one process with all imports done; the launcher is torch's own.
"""

import faulthandler
import functools
import gc
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from unittest import mock

import psutil
import torch.distributed as dist
from torch.distributed import run as torchrun
from typer.testing import CliRunner

from fastkd import __main__ as entry
from fastkd.cli import demo
from fastkd.cli.main import app
from fastkd.distill import LRKD, METHODS, Method
from fastkd.study import docstrings
from fastkd.train import packaged_teacher, processes
from tests.distill.processes import CONTEXT

# Seconds between two looks of the launcher: where a process fails it looks so seldom that the
# others learn of it before they are stopped themselves.
MONITOR_INTERVAL, SELDOM = "0.1", "3"


class Launch:
    """``function(*arguments)`` in ``ranks`` processes of a launcher; their files are in ``folder``.

    Without ``ranks`` in one process, which has no launcher; it looks every ``interval`` seconds.
    """

    def __init__(
        self, folder: Path, ranks: int | None, function, *arguments, interval=MONITOR_INTERVAL
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        arguments = folder, ranks, interval, function, arguments
        self.process = CONTEXT.Process(target=_launch, args=arguments)
        self.process.start()

    def end(self, seconds: float = 240) -> tuple[str, str]:
        """Output and errors; whatever hangs is ended."""
        self.process.join(seconds)
        hangs = self.process.is_alive()
        if hangs:
            those = psutil.Process(self.process.pid).children(recursive=True)
            for process in those:
                process.send_signal(signal.SIGUSR1)
            time.sleep(1)
            for process in (*those, self.process):
                process.kill()
        said = tuple((self.folder / name).read_text() for name in ("out", "err"))
        assert not hangs, said
        return said

    def pid(self, rank: int) -> int:
        return int((self.folder / f"{rank}.pid").read_text())

    def wait_for_step(self, log: Path, step: int) -> None:
        """Wait until the progress log has this number of steps."""
        for _ in range(4800):
            lines = log.read_text().splitlines() if log.exists() else []
            if any(json.loads(line).get("step", 0) >= step for line in lines):
                return
            assert self.process.is_alive(), self.end()
            time.sleep(0.05)
        raise AssertionError("no progress")


def _launch(folder: Path, ranks: int | None, interval: str, function, arguments) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if ranks is None:
        _work(folder, function, arguments)
        return

    def forking(args):
        config, *_ = configure(args)
        config.start_method = "fork"
        return config, _work, (folder, function, arguments)

    configure = torchrun.config_from_args
    words = "--nproc-per-node", str(ranks), "--monitor-interval", interval, "function"
    with mock.patch.object(torchrun, "config_from_args", forking):
        torchrun.main(words)


def _work(folder: Path, function, arguments) -> None:
    for name in ("SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    (folder / f"{processes.rank()}.pid").write_text(str(os.getpid()))
    faulthandler.register(signal.SIGUSR1)
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


def commands(folder: Path, lines: dict[str, list[str]], late: float = 0.0) -> None:
    """Run command lines by name, one after the other; results in FOLDER/<rank>.json.

    The last of them is the process's own: how it ends is the launcher's to see. So many seconds
    ``late`` are the others each time that the first process has told them something.
    """
    *most, (_, last) = lines.items()
    results = {}
    if late and processes.rank() > 0:
        processes.on_first_process = slow_to_go_on(processes.on_first_process, late)
    for name, words in most:
        results[name] = result_of(words)
        if results[name][0]:  # the others may wait for this process in vain
            print(name, *results[name], file=sys.stderr, flush=True)
        if dist.is_initialized():
            dist.barrier()
            if processes.rank() == 0:
                dist.distributed_c10d._get_default_store().delete_key("fastkd failed")
            dist.barrier()
    (folder / f"{processes.rank()}.json").write_text(json.dumps(results))
    command(last)


def result_of(words: list[str]) -> tuple[int, str, str]:
    with mock.patch.dict(os.environ):
        result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    bug = None if isinstance(result.exception, SystemExit) else result.exception
    told = "" if bug is None else "".join(traceback.format_exception(bug))
    return result.exit_code, result.stdout, result.stderr + told


def slow_to_go_on(on_first_process, seconds):
    def wrapped(work):
        result = on_first_process(work)
        time.sleep(seconds)
        return result

    return wrapped


class StopsOnce(LRKD):
    """Ctrl-C in the fifth step of all that this process takes with it."""

    steps = 0

    def task(self, step):
        StopsOnce.steps += 1
        if StopsOnce.steps == 5:
            raise KeyboardInterrupt
        return super().task(step)


class FailsInTheSecond(Method):
    uses_teacher = False

    def __init__(self) -> None:
        super().__init__()
        if processes.rank() == 1:
            raise ValueError("not here")

    def weights(self, progress):
        return {"task": 1.0}


class BreaksInTheSecond(FailsInTheSecond):
    def __init__(self) -> None:
        Method.__init__(self)
        self.steps = 0

    def task(self, step):
        self.steps += 1
        if self.steps == 3 and processes.rank() == 1:
            raise ZeroDivisionError("a bug")
        return super().task(step)
