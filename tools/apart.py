"""Work in processes that may die: each item's line is known before anything else can happen.

A child process (`serve`) reads names of items, runs each, and answers with a line of JSON. After a
problem it is killed, as a fault of a GPU leaves nothing usable in its process, and the next item
gets a new one. `ask` hands the items out. No import of PyTorch, so that a test is fast.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RELEASE = ""  # asks a child to free memory; an answer says that it is alive


class Item(NamedTuple):
    """``run`` raises where something is wrong, and returns what JSON can say of a result."""

    name: str
    run: Callable[[], Any]
    seconds: float = 60.0  # after which its process is ended


Line = dict[str, Any]  # "name", "problem" ("" for none), "result", "seconds"


def serve(items: dict[str, Item], release: Callable[[], None]) -> None:
    """Answer the names on standard input. What items print goes to standard error."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            name, problem, result = line.rstrip("\n"), "", None
            start = time.monotonic()
            try:
                result = release() if name == RELEASE else items[name].run()
            except Exception as error:
                text = " ".join(str(error).split()) or "no message"
                problem = f"{type(error).__name__}: {text[:500]}"
            found = {"name": name, "problem": problem, "result": result}
            found["seconds"] = round(time.monotonic() - start, 2)
            print(json.dumps(found), file=answers, flush=True)
            if problem:
                return


def ask(
    command: list[str],
    items: Iterable[Item],
    seconds: float,
    workers: int,
    note: Callable[[Line], None],
) -> None:
    """Call ``note`` with each item's line, by ``workers`` processes at a time.

    A process that ends or does not answer in time is a problem of its item. Items left after
    ``seconds`` have no line.
    """
    end, left, lock = time.monotonic() + seconds, iter(list(items)), threading.Lock()

    def work() -> None:
        child: subprocess.Popen[str] | None = None
        while time.monotonic() < end:
            with lock:
                item = next(left, None)
            if item is None:
                break
            child = child or subprocess.Popen(
                command, cwd=ROOT, text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            line = _answer(child, item.name, min(item.seconds, end - time.monotonic()))
            if line is None:
                late = time.monotonic() >= end
                ended = stop(child)
                why = f"ended with {ended}" if ended != -signal.SIGKILL else "hung"
                why = "not finished when the time was over" if late else f"its process {why}"
                line = {"name": item.name, "problem": why, "result": None}
            with lock:
                note(line)
            # Only now memory is freed, which a fault before may make impossible.
            freed = None if line["problem"] else _answer(child, RELEASE, 20.0)
            if freed is None or freed["problem"]:
                stop(child)
                child = None
        if child is not None:
            stop(child)

    with ThreadPoolExecutor(max(workers, 1)) as pool:
        for done in [pool.submit(work) for _ in range(max(workers, 1))]:
            done.result()


def stop(process: "subprocess.Popen[Any]") -> int:
    """End a process, and those that it started, if it has not ended; its exit status."""
    ended = process.poll()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    return status if ended is None else ended


def _answer(child: "subprocess.Popen[str]", name: str, patience: float) -> Line | None:
    assert child.stdin is not None and child.stdout is not None
    try:
        print(name, file=child.stdin, flush=True)
    except BrokenPipeError:
        return None
    ready, _, _ = select.select([child.stdout], [], [], max(patience, 0.0))
    text = child.stdout.readline() if ready else ""
    if not text:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.0 if not ready else 5.0)  # its status, if it ended
        return None
    found: Line = json.loads(text)
    return found
