"""The stage ``measure`` of ``make gpu-check`` runs at tiny sizes, and keeps to its time."""

import json
import time

import pytest

pytest.importorskip("triton")
pytest.importorskip("transformers")

from bench import report
from tools import measure
from tools.measure import Item, Run

TINY = Run(tiny=True)


def test_every_item_runs_at_tiny_sizes(tmp_path, capsys):
    """In Triton's interpreter; a second call measures nothing again."""
    assert measure.main(["--tiny", "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    lines = (tmp_path / "measure.jsonl").read_text()
    names = [json.loads(line)["name"] for line in lines.splitlines()]
    assert names == [item.name for item in measure.items()]
    assert {name[0] for name in names} == set("abcdef")
    rows = report.load(tmp_path / "bench-measure.json")["groups"]
    assert all("reference" in group for group in rows.values())
    assert sum("fastkd triton" in group for group in rows.values()) > 20
    steps = json.loads((tmp_path / "measure.json").read_text())["steps"]
    assert all(step["of_reference"] > 0 for step in steps.values()) and len(steps) >= 12
    start = time.monotonic()
    measured = measure.measure(list(measure.items()), TINY, tmp_path, 60.0, {})
    assert len(measured) == len(names) and time.monotonic() - start < 5
    assert (tmp_path / "measure.jsonl").read_text() == lines


def sleeping(seconds):
    def work(run):
        time.sleep(seconds)
        return {"slept": seconds}

    return work


def test_items_that_do_not_fit_are_left_out_and_measured_later(tmp_path):
    items = [Item("a short", 0.1, sleeping(0)), Item("b long", 100, sleeping(0))]
    items.append(Item("c last", 100, sleeping(0)))
    first = measure.measure(items, TINY, tmp_path, 5.0, {"c last": 0.1})
    assert [line["name"] for line in first] == ["a short", "c last"]
    assert len(measure.measure(items, TINY, tmp_path, 1000.0, {})) == 3
    written = (tmp_path / "measure.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in written] == ["a short", "c last", "b long"]


def test_an_item_ends_after_its_time_and_a_failure_stops_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "PATIENCE", 0.2)

    def broken(run):
        raise ValueError("mistyped")

    items = [Item("a hangs", 1, sleeping(60)), Item("b breaks", 1, broken)]
    lines = measure.measure([*items, Item("c last", 1, sleeping(0))], TINY, tmp_path, 30.0, {})
    assert "not finished" in lines[0]["problem"] and lines[0]["seconds"] < 5
    assert lines[1]["problem"] == "ValueError: mistyped"
    assert lines[2]["result"] == {"slept": 0}


def test_nothing_is_measured_without_the_extension(tmp_path, monkeypatch):
    monkeypatch.setattr(measure.extension, "CPU", False)
    with pytest.raises(measure.Stop, match="build it first"):
        measure.measure(list(measure.items()), TINY, tmp_path, 30.0, {})


def test_lengths_are_those_of_the_last_run(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "LENGTHS", tmp_path)
    (tmp_path / "some-gpu.json").write_text(json.dumps({"seconds": {"a": 3.0}}))
    assert measure.lengths() == {"a": 3.0}
