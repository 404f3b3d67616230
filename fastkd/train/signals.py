"""Signals that end a command."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fastkd.train.errors import Stopped

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


def stopping_at_once() -> contextlib.AbstractContextManager[None]:
    """Context in which a signal raises `Stopped`."""

    def stop(signum: int, frame: object) -> None:
        raise Stopped(signum)

    return receiving_signals(stop)
