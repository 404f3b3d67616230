"""Saves that are all or nothing: whatever interrupts them, the last complete one is still there."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def replace_directory(target: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` fill a new directory and put it in the place of ``target``.

    The old ``target`` stays until the new one is complete. `recover_directory` heals the one
    moment at which neither stands under its name.
    """
    staging, backup = _beside(target)
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        with full_disk_is_oserror(staging):
            write(staging)
        recover_directory(target)
        if target.exists():
            target.rename(backup)
        staging.rename(target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        recover_directory(target)
        raise
    shutil.rmtree(backup, ignore_errors=True)


def recover_directory(target: Path) -> None:
    """Undo or finish a replacement of ``target`` that was cut off between its two renames."""
    _, backup = _beside(target)
    if backup.exists():
        if target.exists():
            shutil.rmtree(backup)
        else:
            backup.rename(target)


@contextlib.contextmanager
def full_disk_is_oserror(directory: Path) -> Iterator[None]:
    """torch.save and safetensors call a full disk many names; give it the one Python has."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if shutil.disk_usage(directory).free < 2**20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory)) from error
        raise


def _beside(target: Path) -> tuple[Path, Path]:
    return target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as JSON, replacing ``path`` only once it is complete."""
    staging = path.with_name(f".{path.name}.new")
    try:
        staging.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(staging, path)
    except BaseException:
        with contextlib.suppress(OSError):
            staging.unlink()
        raise


def read_json(path: Path) -> Any:
    """The content of a JSON file, or None if it is missing or cut off."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
