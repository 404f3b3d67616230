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


def create_file(path: Path, content: str) -> None:
    """Write a complete file unless another process has written ``path`` first, which then stays."""
    own = path.with_name(f".{uuid.uuid4().hex}")
    write_file(own, content, shared=True)
    try:
        os.link(own, path)
        own.unlink()
    except FileExistsError:
        own.unlink()
    except OSError:  # a file system without hard links: the last one stays
        os.replace(own, path)
    sync_names(path.parent)


def sync_names(directory: Path) -> None:
    """See to it that the names in ``directory`` are on the disk, where a system offers that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
