"""Progress on a terminal, in a file, and into a pipe that its reader closes."""

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
from fastkd.train.distillation import write_card
from fastkd.train.errors import RunFailed
from fastkd.train.progress import counted
from tests.cli.launched import Launch, command
from tests.support.runs import report_of
from tests.support.tiny import usual, words_of

TERMS = {"loss": 1.2345, "task": 0.6789, "tokens": 0.0123, "samples": 0.0456, "more": 3.0}


def test_progress_on_a_terminal_and_in_a_file(tiny, monkeypatch):
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with RichDisplay(console) as shown:
        shown.track("soft_targets", 0, 15000).advance(1234, TERMS)
        shown.progress.refresh()
    line = console.file.getvalue()
    assert re.search(r"soft_targets.* 1234/15000.*(-:--|\d:\d).* loss 1.2", line)
    monkeypatch.setattr(display, "LINE_EVERY", 0.0)
    console = Console(file=io.StringIO(), width=80)
    with RichDisplay(console) as shown:
        track = shown.track("fcd", 10, 100)
        track.advance(20)
        track.advance(20, TERMS)
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


def without_a_reader(words):
    reader, pipe = os.pipe()
    os.close(reader)
    os.dup2(pipe, 1)
    command(words)


def test_a_reader_may_go_away(tiny, tmp_path):
    words = words_of("distill", **usual(tiny, tmp_path, max_train_rows=8))
    launch = Launch(tmp_path / "launch", None, without_a_reader, words)
    _, errors = launch.end()
    assert launch.process.exitcode == 0 and "BrokenPipe" not in errors, errors
    assert report_of(tmp_path / "out")["complete"]


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
    for method, number in (
        ("flush", errno.EPIPE), ("write", errno.EPIPE), ("flush", errno.ENOSPC)
    ):  # fmt: skip
        output, error = io.TextIOWrapper(io.BytesIO()), OSError(number, os.strerror(number))
        setattr(output, method, mock.Mock(side_effect=error))
        lost = pytest.raises(RunFailed, match="the output can't be written: No space left")
        with lost if number == errno.ENOSPC else contextlib.nullcontext():
            show(output)


# What `show` and the model card read of a report.
SETTINGS = {"teacher": "./t", "task": None, "data": None, "method": "fcd", "evals": "dev.tsv"}
REPORT = {
    "fastkd": "0", "settings": {**SETTINGS, "test": ["a/one.tsv", "a/two.b.tsv"]},
    "rows": {"train": 4}, "layers": 2, "labels": ["<b>a|b</b>", "*c_d*\ne"], "paired": False,
    "parameters": {"teacher": 10, "student": 20}, "bytes": {"teacher": 10, "student": 20},
    "seconds_a_batch": {"teacher": 0.6, "student": 1.0}, "seconds": {"training": 1, "total": 2},
    "best": {"epoch": 0.285714, "losses": {"loss": 1.0}}, "teacher": {"accuracy": 0.9},
    "student": {"mcc": 0.25, "accuracy": 0.5},
    "test": {"student": {"accuracy_one": 0.75, "accuracy_two.b": 0.125}},
}  # fmt: skip
BARE = {"parameters": {"student": 20}, "bytes": {"student": 20}, "seconds_a_batch": {}}


@pytest.mark.parametrize(("more", "told"), [
    ({}, ("student is 1.7 times slower and 2.0 times larger", "epoch 0.29,", 'classify("...")',
          "2.0 times larger, 1.7 times slower on the machine", "| accuracy_two.b (test) |",
          "type: two.b.tsv", r"Classes: \<b\>a\|b\</b\>, \*c\_d\* e.")),
    ({"parameters": {"teacher": 100, "student": 99}, "paired": True},
     ("1.7 times slower and as large", 'classify({"text": "...", "text_pair": "..."})')),
    ({**BARE, "served_teacher": "9 rows/s"}, ("`./t`: in a server, 9 rows/s.",)),
    ({**BARE, "stored_teacher": "in files"}, ("`./t`: in files.",)),
    (BARE, ("`./t`: known by its log-probabilities.",)),
    ({"settings": {**REPORT["settings"], "teacher_offload": True}},
     ("0.0 MiB of weights on the device only while it ran",)),
])  # fmt: skip
def test_what_is_printed_of_a_report_and_its_card(tmp_path, more, told):
    """Metrics that a cache lacks for its teacher are empty cells, not shifted ones."""
    file, report = io.StringIO(), {**REPORT, **more}
    RichDisplay(Console(file=file, width=120)).results(report, tmp_path)
    write_card(tmp_path, report)
    said = file.getvalue()
    assert all(words in said + (tmp_path / "README.md").read_text() for words in told)
    rows = {line.split()[0]: line for line in said.splitlines() if line.strip()}
    assert rows["student"].split()[-4:] == ["0.2500", "0.5000", "0.7500", "0.1250"]
    assert ("the student is" in said) == ("teacher" in rows)
    if "teacher" in rows:
        assert rows["teacher"].split()[-1] == "0.9000"
        assert rows["teacher"].index("0.9000") == rows["student"].index("0.5000")
