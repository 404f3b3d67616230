"""`--method auto`, the default: the method of each kind of task, printed, recorded and kept."""

import re
from pathlib import Path

from fastkd.study import grid
from fastkd.study.grid import StudySettings
from fastkd.train import models, tasks
from fastkd.train.config import NAMES, Config
from fastkd.train.models import METHODS, Choice, choose
from fastkd.train.tasks.base import Task
from fastkd.train.tasks.causal_lm import CausalLM
from tests.support.runs import made, press_ctrl_c, report_of, stop_at
from tests.support.tiny import usual

ROOT = Path(__file__).parents[2]


def test_the_pages_have_the_same_table():
    rows = re.findall(
        r"(?m)^\| `([\w-]+)` \| `(\w+)` \| (.+) \|$", (ROOT / models.PAGE).read_text()
    )
    assert {kind: Choice(method, why) for kind, method, why in rows} == METHODS
    assert len(rows) == len(METHODS) and list(METHODS) == sorted(tasks.NAMES)
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    short = re.findall(r"(?m)^\| ((?:`[\w-]+`(?:, )?)+) \| `(\w+)` \|$", pages)  # one page has it
    named = {kind: method for kinds, method in short for kind in re.findall(r"[\w-]+", kinds)}
    assert named == {kind: choice.method for kind, choice in METHODS.items()}
    distill = (ROOT / "docs" / "distill.md").read_text()
    assert all(f"| `{name}`" in distill or f", `{name}`" in distill for name in NAMES)


def test_methods_of_tasks():
    for kind, choice in METHODS.items():
        why = f"--task {kind}: {choice.why} ({models.PAGE})"
        assert choice.method in NAMES and choose(tasks.named(kind)) == (choice.method, why)
    # A user's task derives from one of fastkd's, or has a head as one of them, or another.
    assert choose(type("Own", (CausalLM,), {})) == choose(tasks.named("causal-lm"))
    headed = type("Headed", (Task,), {"head": "AutoModelForTokenClassification"})
    assert choose(headed) == choose(tasks.named("token-classification"))
    other = type("Other", (Task,), {"head": "AutoModelForImageClassification"})
    assert choose(other).method == "soft_targets"
    assert choose(tasks.named("causal-lm"), own_tokens=True).method == "soft_targets"
    embedding = tasks.named("embedding")  # which has no soft targets
    assert choose(embedding, own_tokens=True) == choose(embedding)


def test_a_run_records_its_method_and_keeps_it(distill, tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "classification", Choice("lrkd", "a reason"))
    with monkeypatch.context() as patch:
        stop_at(patch, 2, press_ctrl_c)
        distill(expect=130, max_train_rows=16)
    monkeypatch.setitem(METHODS, "classification", Choice("fcd", "another reason"))
    said = distill("--resume", max_train_rows=16)
    assert "method lrkd (--method auto): as the run began" in said
    found, _ = made(**usual(tiny, tmp_path))
    why = f"--task classification: another reason ({models.PAGE})"
    assert f"method fcd (--method auto): {why}" in found.display.lines
    report = report_of(tmp_path / "out")
    assert (report["settings"]["method"], report["method"]) == ("auto", "lrkd")
    assert set(report["best"]["losses"]) == {"loss", "task", "soft", "projection"}
    card = (tmp_path / "out/student/README.md").read_text()
    assert "lrkd student of" in card and "the method `lrkd` (`--method auto`)" in card
    study = grid.read(StudySettings(methods="labels,auto", tasks={"x": "docstrings"}, out=tmp_path))
    assert [cell.options["method"] for cell in study.cells][-1] == "auto" == study.variants[1]
    for cell in study.cells:
        Config.of(**cell.options)
