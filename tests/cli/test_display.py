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
from fastkd.cli.display import BestEffortStream, RichDisplay, new_console, say
from fastkd.cli.distill_command import show
from fastkd.cli.main import app
from fastkd.distill.verify import _Step
from fastkd.train.card import write_card
from fastkd.train.errors import RunFailed
from fastkd.train.progress import counted
from tests.cli.launched import Launch, command
from tests.support.runs import report_of
from tests.support.tiny import usual, words_of

TERMS = {"loss": 1.2345, "task": 0.6789, "tokens": 0.0123, "samples": 0.0456, "more": 3.0}


@pytest.fixture
def every_line(monkeypatch):
    """The file has every step; the screen skips some."""
    monkeypatch.setattr(display, "LINE_EVERY", 0.0)


def test_a_log_file_gets_lines(every_line):
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


@pytest.mark.parametrize("command", ["evaluate", "predict", "cache", "analyze", "verify"])
def test_progress_is_beside_the_answer(tiny, tmp_path, every_line, monkeypatch, command):
    rows = {"model": tiny / "teacher", "data": tiny / "dev.tsv", "batch_size": 5}
    (tmp_path / "a.txt").write_text("good film\nbad film so\n" * 10)
    options, said = {
        "evaluate": (rows, "20 rows  step 2/2"),
        "predict": (rows, "20 rows  step 2/2"),
        "analyze": ({"model": tiny / "teacher", "text": tmp_path / "a.txt", "batch_size": 7,
                     "measures": "svcca"}, "20 rows  step 3/3"),
    }.get(command, (None, None))  # fmt: skip
    if options is None:
        options = usual(tiny, tmp_path, epochs=None, learning_rate=None, batch_size=None)
        more = {"cache": {"batch_size": 8}, "verify": {"out": None, "rows": 4, "ranks": 0}}
        options |= {"method": "soft_targets", **more[command]}
        said = {"cache": "teacher  step 5/5", "verify": "checks  step "}[command]
    monkeypatch.setattr(_Step, "compiled", lambda step, backend: step.again())  # it takes long
    result = CliRunner().invoke(app, words_of(command, **options), env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    alone = command in ("evaluate", "predict")
    assert said in (result.stderr if alone else result.output)
    assert not alone or (result.stdout and "step" not in result.stdout)


def test_eighty_columns_keep_count_and_time():
    file = io.StringIO()
    with RichDisplay(Console(file=file, width=80, force_terminal=True)) as shown:
        shown.track("soft_targets", 0, 15000).advance(1234, TERMS)
        shown.progress.refresh()
        bar = shown.progress.get_renderable()
        text = Console(width=80, file=io.StringIO())
        text.print(bar)
        (line,) = text.file.getvalue().rstrip().splitlines()
        assert (
            "soft_targets" in line and "1234/15000" in line and re.search(r"-:--:--|\d:\d\d", line)
        )
        assert "loss 1.2" in line


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
        with told if number == errno.ENOSPC else contextlib.nullcontext(), new_console() as console:
            say(console, "labels")
    monkeypatch.setattr(sys, "stdout", None)  # closed
    with new_console() as console:
        say(console, "labels")
    for encoding in ("ascii", "koi8-r"):
        stream = Stream(encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        with new_console() as console:
            say(console, "größer")
            say(console, "kleiner")
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


def shown(report, path):
    """What the command prints of a report."""
    file = io.StringIO()
    show(report, path, Console(file=file, width=120))
    return file.getvalue()


def card_of(report, path):
    write_card(path, report)
    return (path / "README.md").read_text()


def test_scores_stand_under_their_names(tmp_path):
    """Metrics that a cache lacks for its teacher are empty cells, not shifted ones."""
    test = {"student": {"mcc": 0.75, "accuracy": 0.125}}
    lines = shown(report_with(test=test), tmp_path).splitlines()
    (teacher,) = (line for line in lines if line.startswith("  teacher"))
    (student,) = (line for line in lines if line.startswith("  student"))
    assert student.split()[-4:] == ["0.2500", "0.5000", "0.7500", "0.1250"]
    assert teacher.split()[-1] == "0.9000"
    assert teacher.index("0.9000") == student.index("0.5000")


def test_what_is_slower_and_larger_is_called_so(tmp_path):
    report = report_with()
    said, card = shown(report, tmp_path), card_of(report, tmp_path)
    assert "the student is 1.7 times slower and 2.0 times larger" in said
    assert "2.0 times larger, 1.7 times slower on the machine" in card
    assert 'classify("...")' in card
    pair = 'classify({"text": "...", "text_pair": "..."})'
    assert pair in card_of(report_with(paired=True), tmp_path)
    # Equal sizes, and class names of the card.
    sizes = {"teacher": 100, "student": 99}
    report = report_with(labels=["<b>a|b</b>", "*c_d*\ne"], parameters=sizes)
    report["best"]["epoch"] = 0.285714
    said, card = shown(report, tmp_path), card_of(report, tmp_path)
    assert "1.7 times slower and as large" in said and "best student: epoch 0.29," in said
    assert r"Classes: \<b\>a\|b\</b\>, \*c\_d\* e." in card and "`./t`: as large, " in card
