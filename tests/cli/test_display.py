"""Progress on a terminal, in a file, and into a pipe that its reader closes."""

import contextlib
import errno
import io
import os
import re
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fastkd.cli import display
from fastkd.cli.display import BestEffortStream, RichDisplay, new_display
from fastkd.cli.main import app
from fastkd.train.distillation import write_card
from fastkd.train.errors import RunFailed
from fastkd.train.progress import counted
from tests.cli.launched import Launch, command
from tests.support.runs import report_of
from tests.support.tiny import usual, words_of

TERMS = {"loss": 1.2345, "task": 0.6789, "tokens": 0.0123, "samples": 0.0456, "more": 3.0}


def test_a_log_file_gets_lines(monkeypatch):
    monkeypatch.setattr(display, "LINE_EVERY", 0.0)
    file = io.StringIO()
    with RichDisplay(Console(file=file, width=80)) as shown:
        track = shown.track("fcd", 10, 100)
        track.advance(20)
        track.advance(20, TERMS)
        track.stop()
        assert list(counted("abc", shown, "rows", 3)) == ["a", "b", "c"]
        with contextlib.closing(counted("abc", shown, "cut off", 3)) as items:
            next(items)
        assert not shown.progress.tasks
    line, *lines = file.getvalue().splitlines()
    assert re.match(r"fcd  step 20/100  loss 1.234 .* steps/s  \d+:\d\d left$", line), line
    assert len(lines) == 3
    assert re.match(r"rows  step 2/3  \S+ steps/s  0:00 left$", lines[1]), lines


def test_progress_is_beside_the_answer(tiny, monkeypatch):
    """Of other commands it is on the screen; their functions count by `counted`, too."""
    monkeypatch.setattr(display, "LINE_EVERY", 0.0)
    words = words_of("predict", model=tiny / "teacher", data=tiny / "dev.tsv", batch_size=5)
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert "20 rows  step 2/2" in result.stderr
    assert result.stdout.startswith("row\ttext") and "step" not in result.stdout


def test_eighty_columns_keep_count_and_time():
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with RichDisplay(console) as shown:
        shown.track("soft_targets", 0, 15000).advance(1234, TERMS)
        shown.progress.refresh()
        text = Console(width=80, file=io.StringIO())
        text.print(shown.progress.get_renderable())
    (line,) = text.file.getvalue().rstrip().splitlines()
    for part in ("soft_targets", "1234/15000", r"-:--:--|\d:\d\d", "loss 1.2"):
        assert re.search(part, line)


def test_a_reader_may_go_away(tiny, tmp_path):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    console = Console(file=BestEffortStream(Closed()))
    with RichDisplay(console) as shown:
        shown.say("nobody reads this")
        shown.track("x", 0, 2).advance(1, TERMS)

    words = words_of("distill", **usual(tiny, tmp_path, max_train_rows=8))
    launch = Launch(tmp_path / "launch", None, without_a_reader, words)
    _, errors = launch.end()
    assert launch.process.exitcode == 0, errors
    assert "BrokenPipe" not in errors
    assert report_of(tmp_path / "out")["complete"]


class Stream(io.TextIOWrapper):
    """A stream whose flush always fails with this error."""

    def __init__(self, failing=0, encoding="utf-8"):
        super().__init__(io.BytesIO(), encoding)
        self.failing = failing

    def flush(self):
        if self.failing:
            raise OSError(self.failing, os.strerror(self.failing))
        super().flush()


def test_an_output_that_is_lost_or_knows_few_letters(monkeypatch):
    for number in (errno.ENOSPC, errno.EPIPE):
        monkeypatch.setattr(sys, "stdout", Stream(number))
        told = pytest.raises(RunFailed, match="the output can't be written: No space left")
        with told if number == errno.ENOSPC else contextlib.nullcontext(), new_display() as shown:
            shown.say("labels")
    monkeypatch.setattr(sys, "stdout", None)  # closed
    with new_display() as shown:
        shown.say("labels")
    for encoding in ("ascii", "koi8-r"):
        stream = Stream(encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        with new_display() as shown:
            shown.say("größer")
            shown.say("kleiner")
        assert stream.buffer.getvalue() == b"gr\\xf6\\xdfer\nkleiner\n"


def without_a_reader(words):
    reader, pipe = os.pipe()
    os.close(reader)
    os.dup2(pipe, 1)
    command(words)


def report_with(**changes):
    """What `show` and the model card read of a report."""
    return {
        "fastkd": "0", "settings": {"teacher": "./t", "task": None, "data": None, "method": "fcd",
                                    "evals": "dev.tsv", "test": None},
        "rows": {"train": 4}, "layers": 2, "labels": ["no", "yes"], "paired": False,
        "parameters": {"teacher": 10, "student": 20}, "bytes": {"teacher": 10, "student": 20},
        "seconds_a_batch": {"teacher": 0.6, "student": 1.0}, "seconds": {"training": 1, "total": 2},
        "best": {"epoch": 1.0, "losses": {"loss": 1.0}}, "teacher": {"accuracy": 0.9},
        "student": {"mcc": 0.25, "accuracy": 0.5}, **changes,
    }  # fmt: skip


def printed(path, **changes):
    """What the command prints of a report, and its card."""
    file, report = io.StringIO(), report_with(**changes)
    RichDisplay(Console(file=file, width=120)).results(report, path)
    write_card(path, report)
    return file.getvalue(), (path / "README.md").read_text()


def test_scores_stand_under_their_names(tmp_path):
    """Metrics that a cache lacks for its teacher are empty cells, not shifted ones."""
    test = {"student": {"accuracy_one": 0.75, "accuracy_two.b": 0.125}}
    settings = {**report_with()["settings"], "test": ["a/one.tsv", "a/two.b.tsv"]}
    said, card = printed(tmp_path, test=test, settings=settings)
    assert "| accuracy_two.b (test) |" in card and "type: two.b.tsv" in card
    teacher, student = (
        next(line for line in said.splitlines() if line.startswith(f"  {name}"))
        for name in ("teacher", "student")
    )
    assert student.split()[-4:] == ["0.2500", "0.5000", "0.7500", "0.1250"]
    assert teacher.split()[-1] == "0.9000"
    assert teacher.index("0.9000") == student.index("0.5000")


def test_what_is_slower_and_larger_is_called_so(tmp_path):
    said, card = printed(tmp_path)
    assert "the student is 1.7 times slower and 2.0 times larger" in said
    assert "2.0 times larger, 1.7 times slower on the machine" in card
    assert 'classify("...")' in card
    # Pairs, equal sizes, and class names of the card.
    said, card = printed(
        tmp_path, labels=["<b>a|b</b>", "*c_d*\ne"], parameters={"teacher": 100, "student": 99},
        best={"epoch": 0.285714, "losses": {"loss": 1.0}}, paired=True,
    )  # fmt: skip
    assert "1.7 times slower and as large" in said and "best student: epoch 0.29," in said
    assert r"Classes: \<b\>a\|b\</b\>, \*c\_d\* e." in card and "`./t`: as large, " in card
    assert 'classify({"text": "...", "text_pair": "..."})' in card


def test_where_a_teacher_is_whose_weights_are_elsewhere(tmp_path):
    sizes = {"parameters": {"student": 20}, "bytes": {"student": 20}, "teacher": {}}
    for more, words in (
        ({"served_teacher": "9 rows/s"}, "`./t`: in a server, 9 rows/s."),
        ({"stored_teacher": "in files"}, "`./t`: in files."),
        ({}, "`./t`: known by its log-probabilities."),
    ):
        said, card = printed(tmp_path, **sizes, seconds_a_batch={"student": 1.0}, **more)
        assert words in card and "the student is" not in said
    settings = {**report_with()["settings"], "teacher_offload": True}
    _, card = printed(tmp_path, settings=settings)
    assert "0.0 MiB of weights on the device only while it ran" in card
