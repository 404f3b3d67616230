"""Progress on a terminal and in a file, and an output that is lost."""

import contextlib
import errno
import io
import os
import re
import sys
from unittest import mock

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fastkd.cli import display
from fastkd.cli.display import RichDisplay, new_display
from fastkd.cli.main import app
from fastkd.train.errors import RunFailed
from fastkd.train.progress import counted
from tests.support.tiny import words_of


def test_progress_on_a_terminal_and_in_a_file(tiny, monkeypatch):
    terms = {"loss": 1.2345, "task": 0.6789, "tokens": 0.0123, "samples": 0.0456, "more": 3.0}
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with RichDisplay(console) as shown:
        shown.track("soft_targets", 0, 15000).advance(1234, terms)
        shown.progress.refresh()
    line = r"soft_targets.* 1234/15000.*(-:--|\d:\d).* loss 1.2"
    assert re.search(line, console.file.getvalue())
    monkeypatch.setattr(display, "LINE_EVERY", 0.0)
    console = Console(file=io.StringIO(), width=80)
    with RichDisplay(console) as shown:
        track = shown.track("fcd", 10, 100)
        track.advance(20)
        track.advance(20, terms)
        track.stop()
        assert list(counted("abc", shown, "rows", 3)) == ["a", "b", "c"]
        with contextlib.closing(counted("abc", shown, "cut off", 3)) as items:
            next(items)
        assert not shown.progress.tasks
    lines = console.file.getvalue().splitlines()
    assert re.match(r"fcd  step 20/100  loss 1.234 .* steps/s  \d+:\d\d left$", lines[0]), lines
    assert re.match(r"rows  step 2/3  \S+ steps/s  0:00 left$", lines[2]) and len(lines) == 4
    # Beside an answer it is on the standard error.
    words = words_of("predict", model=tiny / "teacher", data=tiny / "dev.tsv", batch_size=5)
    result = CliRunner().invoke(app, words)
    assert "20 rows  step 2/2" in result.stderr
    assert result.stdout.startswith("row\ttext") and "step" not in result.stdout


def test_an_output_that_is_lost_or_knows_few_letters(monkeypatch):
    def show(output):
        monkeypatch.setattr(sys, "stdout", output)
        with new_display() as shown:
            shown.say("größer")
            shown.say("kleiner")

    show(None)  # closed
    for encoding in ("ascii", "koi8-r"):
        show(io.TextIOWrapper(file := io.BytesIO(), encoding))
        assert file.getvalue() == b"gr\\xf6\\xdfer\nkleiner\n"
    lost = pytest.raises(RunFailed, match="the output can't be written: No space left")
    unread, full = (OSError(x, os.strerror(x)) for x in (errno.EPIPE, errno.ENOSPC))
    for method, error in (("flush", unread), ("write", unread), ("flush", full)):
        output = mock.MagicMock(io.TextIOWrapper(io.BytesIO()), encoding="ascii")
        getattr(output, method).side_effect = error
        with lost if error is full else contextlib.nullcontext():
            show(output)
