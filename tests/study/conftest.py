"""A study's file as a grid, and what the tests of studies leave out."""

import pytest

from fastkd.study import grid, grid_report

#: Folders that files of studies name.
FOLDERS = (
    "WIKIPEDIA", "AUGMENTED", "INSTRUCTIONS", "GLUE", "TEXTS", "CONLL", "DECODER", "GENERAL"
)  # fmt: skip


def read(path=None, **options):
    return grid.read(grid.StudySettings(spec=path, **options))


@pytest.fixture
def without_pictures(monkeypatch):
    """They take longer than all else of a report of few runs."""
    for picture in ("_forest", "_curves"):
        monkeypatch.setattr(grid_report, picture, lambda *_: b"")


@pytest.fixture(autouse=True)
def corpora(monkeypatch):
    for name in FOLDERS:
        monkeypatch.setenv(name, "/data")
