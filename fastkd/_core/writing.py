"""Files that are there whole or not at all."""

import contextlib
import os
import uuid
from pathlib import Path


def staging_of(target: Path) -> Path:
    """Where ``target`` is written until it is complete; what lies there is ours."""
    return target.with_name(f".{target.name}.new")


def write_file(path: Path, content: str | bytes, shared: bool = False) -> None:
    """Write a file, replacing ``path`` only once it is complete and on the disk.

    A ``shared`` one may be written by several processes at a time: each writes beside the others.
    """
    staging = path.with_name(f".{uuid.uuid4().hex}") if shared else staging_of(path)
    try:
        with staging.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)
        sync_names(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            staging.unlink()
        raise


def sync_names(directory: Path) -> None:
    """See to it that the names in ``directory`` are on the disk, where a system offers that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
