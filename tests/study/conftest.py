"""Folders of corpora that files of studies name."""

import pytest


@pytest.fixture(autouse=True)
def corpora(monkeypatch):
    for name in ("WIKIPEDIA", "AUGMENTED", "INSTRUCTIONS"):
        monkeypatch.setenv(name, "/data")
