"""Files that are written completely or not at all."""

import contextlib
import os
import uuid
from pathlib import Path


def staging_of(target: Path) -> Path:
    """Temporary path beside ``target`` for writing; fastkd may delete whatever is there."""
    return target.with_name(f".{target.name}.new")


def write_file(path: Path, content: str | bytes, shared: bool = False) -> None:
    """Write a file, replacing ``path`` only once the new one is complete and on the disk.

    With ``shared`` several processes may write it at a time: each has a temporary file of its own.
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


def create_file(path: Path, content: str) -> None:
    """Write a complete file, unless another process has written ``path`` first."""
    own = path.with_name(f".{uuid.uuid4().hex}")
    write_file(own, content, shared=True)
    try:
        os.link(own, path)
        own.unlink()
    except FileExistsError:
        own.unlink()
    except OSError:  # a file system without hard links: the last file written wins
        os.replace(own, path)
    sync_names(path.parent)


def sync_names(directory: Path) -> None:
    """Flush the names in ``directory`` to the disk, where the system supports that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
