"""Whether the Hugging Face hub can be reached, tested once and quickly."""

import contextlib
import functools
import os
import sys
import threading
from pathlib import Path
from typing import Any

from fastkd._core.extras import require
from fastkd.train.errors import InputError, first_line

# The hub's own clients retry for half a minute and more.
SECONDS = 3.0
# --teacher whose log-probabilities are in the answers of --train.
COMPLETIONS = "completions"


def is_served(teacher: str | None) -> bool:
    """Whether --teacher is the URL of a server."""
    return teacher is not None and teacher.startswith(("http://", "https://"))


def is_stored(teacher: str | None) -> bool:
    """Whether --teacher is stored log-probabilities: in a directory of files, or in the rows."""
    if teacher is None or is_served(teacher):
        return False
    folder = Path(teacher).expanduser()
    if not folder.exists():
        return teacher == COMPLETIONS
    known = any((folder / name).exists() for name in ("config.json", "teacher.json"))
    return not known and any(map(any, (folder.glob("*.safetensors"), folder.glob("*.parquet"))))


def has_no_weights(teacher: str | None) -> bool:
    """Whether --teacher is known by its log-probabilities only."""
    return is_served(teacher) or is_stored(teacher)


def check_place(option: str, name: str) -> None:
    """Raise if the model ``name``, given as ``option``, is a path that holds no model."""
    local = Path(name).expanduser()
    if not local.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise InputError(f"{option} {name}: no such directory")
    if local.is_file():
        raise InputError(
            f"{option} {name}: this is a file; give the directory that holds the model"
        )
    if not (local / "config.json").exists() and (local / "student/config.json").exists():
        raise InputError(f"{option} {name}: it holds no model; did you mean {local / 'student'}?")


@functools.cache
def hub_answers() -> bool:
    """Whether the hub can be reached; if not, later calls read the local cache only."""
    hub = require("huggingface_hub", "train")
    if hub.constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):  # clients raise many unrelated types
            hub.utils.get_session().head(hub.constants.ENDPOINT, timeout=SECONDS)
            answered.set()

    # In a thread, since a name lookup has no timeout.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(SECONDS)
    if answered.is_set():
        return True
    os.environ["HF_HUB_OFFLINE"] = "1"
    hub.constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return False


def file_of(name: str, file: str) -> Path | None:
    """Path of a file in a folder or hub repository; None if it is missing."""
    transformers: Any = require("transformers.utils", "train")
    local = Path(name).expanduser()
    name = str(local) if local.exists() else name
    try:
        found = transformers.cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise InputError(f"{name}: its {file} can't be read ({why_not(error)})") from error
    return None if found is None else Path(found)


def why_not(error: Exception) -> str:
    """Reason for a failed download, in one line."""
    line = first_line(error)
    return line if hub_answers() else f"{line} (the hub can't be reached, only the cache)"
