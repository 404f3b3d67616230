"""Progress for people (bars on a terminal, lines in a file) and for programs (JSON lines)."""

import contextlib
import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

from fastkd.train.errors import InputError, RunFailed
from fastkd.train.launcher import rank
from fastkd.train.progress import Display, Track, clock, compared, format_scores

# Seconds between two lines of a log file.
LINE_EVERY = 10.0


@dataclass
class BestEffortStream:
    """An output stream that survives a closed reader (`| head`, a closed terminal).

    Characters that its encoding lacks are escaped. The last other write error is ``error``.
    """

    stream: Any
    error: OSError | None = None

    def write(self, text: str) -> int:
        if self.stream is not None:  # closed before Python began, or lost
            try:
                return self.stream.write(text)
            except UnicodeEncodeError:
                # The stream's: an error may name "charmap", which is no encoding.
                encoding = self.stream.encoding
                return self.write(text.encode(encoding, "backslashreplace").decode(encoding))
            except (OSError, ValueError) as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        if self.stream is not None:
            try:
                self.stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def _lose(self, error: Exception) -> None:
        """Stop writing; redirect the descriptor so that Python's final flush does not fail."""
        lost, self.stream = self.stream, None
        if isinstance(error, OSError) and error.errno not in (errno.EPIPE, errno.EIO):
            self.error = error
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), lost.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def new_display(plain: bool = False) -> Iterator["RichDisplay"]:
    """Display on standard output, silent in all but the first process.

    With ``plain`` it has no progress bars, since several processes cannot share a terminal.

    Raises:
        RunFailed: in the end, something could not be written.
    """
    stream: Any = BestEffortStream(sys.stdout)
    terminal = False if plain else None
    yield RichDisplay(Console(file=stream, quiet=rank() > 0, force_terminal=terminal))
    stream.flush()
    if stream.error is not None:  # such as a full disk
        raise RunFailed(f"the output can't be written: {stream.error.strerror}")


def stderr_display() -> "RichDisplay":
    """Display on standard error, for commands that write their result to standard output."""
    stream: Any = BestEffortStream(sys.stderr)
    return RichDisplay(Console(file=stream))


class RichDisplay(Display):
    """Lines and bars on a console; events in the file of --log-json."""

    def __init__(self, console: Console):
        self.console = console
        #: File of the events: --log-json.
        self.log_json: Path | None = None
        self.progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=16),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn(
                "{task.fields[terms]}",
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            console=console,
            transient=True,
            expand=True,
            disable=not console.is_terminal,
        )
        self._log: TextIO | None = None

    def __enter__(self) -> "RichDisplay":
        path = self.log_json
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._log = path.open("a", encoding="utf-8")
            except OSError as error:
                raise InputError(
                    f"--log-json {path}: can't be written ({error.strerror})"
                ) from None
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()
        if self._log is not None:
            self._log.close()

    def say(self, line: str) -> None:
        """Print a line as it is, above the bars if there are any."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def event(self, name: str, **values: Any) -> None:
        """A line of JSON."""
        if self._log is not None:
            line = json.dumps({"event": name, "time": round(time.time(), 3), **values})
            try:
                self._log.write(line + "\n")
                self._log.flush()
            except OSError as error:
                self._log = None
                self.say(f"--log-json: {error.strerror}; the run goes on without it")

    def track(self, title: str, first: int, total: int) -> Track:
        task = self.progress.add_task(title, total=total, completed=first, terms="")
        return RichTrack(self, title, first, total, task)

    def results(self, report: Mapping[str, Any], out: Path) -> None:
        """Print the results of a run: teacher and best student."""
        sets = {"": report, "test ": report.get("test", {})}
        table = Table(box=box.SIMPLE_HEAD)
        for heading in ("", "parameters", "MiB", "ms a batch"):
            table.add_column(heading, justify="right" if heading else "left")
        for prefix, scores in sets.items():
            for name in scores.get("student", {}):
                table.add_column(prefix + name, justify="right")
        for name in report["parameters"]:  # a server's teacher has none
            milliseconds = 1000 * report["seconds_a_batch"].get(name, math.nan)
            # A cache may have scored its teacher with other metrics than the student's.
            scores = (
                found.get(name, {}).get(k)
                for found in sets.values()
                for k in found.get("student", {})
            )
            table.add_row(
                name,
                f"{report['parameters'][name]:,}",
                f"{report['bytes'][name] / 2**20:.1f}",
                "" if math.isnan(milliseconds) else f"{milliseconds:.1f}",
                *("" if x is None else f"{x:.4f}" for x in scores),
            )
        self.console.print(table)
        seconds, best, batch = report["seconds"], report["best"], report["seconds_a_batch"]
        sizes = report["parameters"]
        if "teacher" in sizes:
            said = compared(sizes["teacher"] / sizes["student"], "smaller", "larger", "as large")
            if "teacher" in batch:
                times = batch["teacher"] / batch["student"]
                said = f"{compared(times, 'faster', 'slower', 'as fast')} and {said}"
            self.say(f"the student is {said}")
        self.say(
            f"best student: epoch {round(best['epoch'], 2):g}, {format_scores(best['losses'])}\n"
            f"{seconds['training']:.0f} s of training, {seconds['total']:.0f} s in all; "
            f"saved in {out / 'student'}"
        )

    def shared(self) -> Callable[[], contextlib.AbstractContextManager[Display]]:
        """See `Display.shared`; processes can't share a terminal's bars."""
        self.progress.stop()
        return _worker_display


@contextlib.contextmanager
def _worker_display() -> Iterator[Display]:
    with new_display(plain=True) as display, display:
        yield display


@dataclass
class RichTrack(Track):
    """Progress bar of a training; in a log file a line every few seconds."""

    display: RichDisplay
    title: str
    first: int
    total: int
    task: TaskID
    started: float = field(default_factory=time.perf_counter)
    #: When the last line was printed; seconds since the start.
    printed: float = 0.0

    def advance(self, step: int, losses: Mapping[str, float] | None = None, note: str = "") -> None:
        self.display.progress.update(self.task, completed=step)
        if losses is None:
            return
        now = time.perf_counter()
        rate = (step - self.first) / max(now - self.started, 1e-9)
        left = (self.total - step) / rate if rate else 0.0
        self.display.event(
            "step",
            title=self.title,
            step=step,
            steps=self.total,
            losses=dict(losses),
            steps_per_second=round(rate, 4),
            seconds_left=round(left, 1),
        )
        terms = "  ".join(filter(None, (format_scores(losses), note)))
        self.display.progress.update(self.task, terms=terms)
        if not self.display.console.is_terminal and now - self.started - self.printed >= LINE_EVERY:
            self.printed = now - self.started
            parts = (self.title, f"step {step}/{self.total}", terms, f"{rate:.3g} steps/s")
            self.display.say("  ".join((*filter(None, parts), f"{clock(left)} left")))

    def stop(self) -> None:
        self.display.progress.remove_task(self.task)
