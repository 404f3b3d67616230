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
