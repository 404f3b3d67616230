"""A study that ran once, its file, and folders of corpora that files of studies name."""

import pytest

from fastkd.cli import display
from fastkd.study import grid_report
from tests.support.runs import once
from tests.support.tiny import run, write_tsv
from tests.train.tasks.through import make_bare

SHARED = """
title = "Tiny"
teacher = "{tiny}"
finetune_teacher = 1
select = "none"
seeds = 2
steps = 4
student_layers = 2
learning_rate = 1e-2
device = "cpu"
[tasks.one]
train = "train.tsv"
eval = "dev.tsv"
labelled = 12
max_length = 12
"""
FEW = """
[methods]
labels = {}
fcd = {alpha = [0.1, 1.0]}
"""


def write(root, tiny, methods=FEW, shared=SHARED):
    path = root / "spec.toml"
    path.write_text(shared.replace("{tiny}", str(tiny)) + methods)
    return path


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A folder with a study that ran in ``out``; ``said`` is its output, a line for every step."""

    def make(root):
        make_bare(root / "tiny", layers=4)
        write_tsv(root / "train.tsv", 40, 0)
        write_tsv(root / "dev.tsv", 24, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(display, "LINE_EVERY", 0.0)
            said = run("study", write(root, root / "tiny"), out=root / "out")
        (root / "said").write_text(said)

    return once(tmp_path_factory, "study", make)


@pytest.fixture
def without_pictures(monkeypatch):
    """They take longer than all else of a report of few runs."""
    for picture in ("_forest", "_curves"):
        monkeypatch.setattr(grid_report, picture, lambda *_: b"")


@pytest.fixture(autouse=True)
def corpora(monkeypatch):
    for name in ("WIKIPEDIA", "AUGMENTED", "INSTRUCTIONS"):
        monkeypatch.setenv(name, "/data")
