"""Rank of this process among those that a launcher such as torchrun started; signals that end it.

Read from the environment, without torch.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fastkd.train.errors import InputError, Stopped

# Environment variables that a launcher sets.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched() -> bool:
    """Whether a launcher started this process as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def check_launcher() -> None:
    """Raise if `accelerate launch --cpu` was to start several processes, which starts one."""
    single = "RANK" not in os.environ and "WORLD_SIZE" not in os.environ
    if single and {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= os.environ.keys():
        raise InputError(
            "accelerate launch has started one process, not several; on the CPU take `torchrun "
            "--nproc-per-node N -m fastkd ...`"
        )


def rank() -> int:
    """Rank of this process, 0 in a run of one: that process prints and writes files."""
    return int(os.environ["RANK"]) if launched() else 0


def leave_launcher() -> tuple[int, int]:
    """Rank and number of the launched processes; detaches this process from the launcher.

    For work that processes do not share: Trainer would share the rows of every step between them.
    """
    found = rank(), int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(local + 1))))
    if launched() and local < len(visible.split(",")):
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local]
    for name in LAUNCHER:
        os.environ.pop(name, None)
    return found


SIGNALS = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n)]


@contextlib.contextmanager
def receiving_signals(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Context in which ``handler`` receives the signals; ignored ones (nohup) stay ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.getsignal(n) for n in SIGNALS}
    heeded = [n for n, old in before.items() if old is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])


def stop_at_once(signum: int, frame: object) -> None:
    """Handle a signal by `Stopped`."""
    raise Stopped(signum)
