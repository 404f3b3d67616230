"""Directories that are all or nothing, sealed with what they hold, and a lock on an output.

A directory of ours carries `MARKER`, written last: a JSON object whose "files" gives the SHA-256 of
every other file, or null if it came later. It tells a complete directory from a cut-off one, a
damaged file from a sound one, and our files, the only ones ever deleted, from anybody else's.
"""

import contextlib
import csv
import errno
import hashlib
import io
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fastkd._core.atomic_files import staging_of, sync_names, write_file
from fastkd._core.extras import require
from fastkd.train.errors import InputError, SaveFailed, first_line

filelock: Any = require("filelock", "train")

MARKER = "fastkd.json"
LOCK = ".fastkd.lock"


def replace_directory(target: Path, write: Callable[[Path], dict[str, Any]]) -> None:
    """Let ``write`` fill a new directory, seal it with what it returns, put it at ``target``.

    The old ``target`` stays until the new one is complete and on the disk. `recover_directory`
    heals the one moment at which neither stands under its name.
    """
    staging = staging_of(target)
    with saving(target):
        shutil.rmtree(staging, ignore_errors=True)
        try:
            staging.mkdir(parents=True)
            seal(staging, write(staging))
            move_directory(staging, target)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            recover_directory(target)
            raise


def move_directory(source: Path, target: Path) -> None:
    """Put ``source`` in the place of ``target``, a directory of ours, which goes last."""
    backup = _backup(target)
    recover_directory(target)
    if target.exists():
        target.rename(backup)
    source.rename(target)
    sync_names(target.parent)
    if source.parent != target.parent and source.parent.exists():
        sync_names(source.parent)
    discard(backup)


def recover_directory(target: Path) -> None:
    """Undo or finish a replacement of ``target`` that was cut off between its renames."""
    backup = _backup(target)
    if not backup.exists():
        return
    if target.exists():
        discard(backup)
    else:
        backup.rename(target)


def _backup(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def discard(directory: Path) -> Path | None:
    """Remove a directory of ours; of a symbolic link only the link.

    Files that fastkd didn't write, or that have changed since, stay; returns where they are.
    """
    if directory.is_symlink():
        directory.unlink()
    if not directory.exists() or _empty(directory):
        return None
    base = directory.with_name(directory.name.removeprefix("."))
    number, kept = 2, base
    while kept.exists():
        number, kept = number + 1, base.with_name(f"{base.name}-{number}")
    directory.rename(kept)
    (kept / MARKER).unlink(missing_ok=True)  # last: without it nobody would go on from here
    return kept


def remove_own(directory: Path) -> None:
    """Delete the files of ``directory`` that are as its marker lists them, then the marker.

    Directories that are empty by then are deleted too. Cut off in the middle, the marker is still
    there, and the next call goes on.
    """
    if not _empty(directory) and read_marker(directory) is not None:
        (directory / MARKER).unlink()


def _empty(directory: Path) -> bool:
    """Delete all of ours but the marker, and with it the directory if nothing else is there."""
    for name, digest in _listed(directory).items():
        path = directory / name
        # A file that has changed since is no longer ours; one without a digest may change.
        if path.is_file() and digest in (None, _digest(path, sync=False)):
            path.unlink()
        staging_of(path).unlink(missing_ok=True)
    staging_of(directory / MARKER).unlink(missing_ok=True)
    for folder in sorted((p for p in directory.rglob("*") if p.is_dir()), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()
    if any(path.name != MARKER for path in directory.iterdir()):
        return False
    (directory / MARKER).unlink(missing_ok=True)
    directory.rmdir()
    return True


def seal(directory: Path, content: dict[str, Any]) -> None:
    """Write the marker of a directory whose files are all there, once they are on the disk."""
    files = {name: _digest(directory / name) for name in _files(directory)}
    for folder in (directory, *(p for p in directory.rglob("*") if p.is_dir())):
        sync_names(folder)
    write_json(directory / MARKER, {**content, "files": files})


def reseal(directory: Path, content: dict[str, Any], *written: str) -> None:
    """Replace what the marker says, not what it lists; ``written`` are new or changed files."""
    files = read_json(directory / MARKER)["files"]
    files.update({name: _digest(directory / name) for name in written})
    write_json(directory / MARKER, {**content, "files": files})


def enlist(path: Path) -> None:
    """List a file in the marker of its directory, with which it then goes, if that is ours.

    It may not be there yet. Without a digest: nothing is damaged if it is moved or changed.
    """
    marker = read_marker(path.parent)
    if marker is not None and isinstance(marker.get("files"), dict):
        files = {**marker["files"], path.name: None}
        write_json(path.parent / MARKER, {**marker, "files": files})


def damage(directory: Path) -> str | None:
    """What is wrong with a sealed directory: one of its files is missing, or isn't what it was."""
    marker = read_marker(directory)
    if marker is None or not isinstance(marker.get("files"), dict):
        there = (directory / MARKER).exists()
        return f"{MARKER} is damaged" if there else f"it has no {MARKER}, so it was cut off"
    for name, digest in marker["files"].items():
        if digest is None:  # see `enlist`
            continue
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if _digest(path, sync=False) != digest:
            return f"{name} is not what was written"
    return None


def foreign(directory: Path) -> list[str]:
    """Files in ``directory`` that its marker doesn't list."""
    listed = _listed(directory)
    return [name for name in _files(directory) if name not in listed]


def _listed(directory: Path) -> dict[str, str | None]:
    """Files in ``directory`` and their digests, as far as its marker can be read.

    What lies elsewhere, by a ``..``, an absolute path or a link, is left out, and the marker too.
    """
    files = (read_marker(directory) or {}).get("files")
    if not isinstance(files, dict):
        return {}
    home = directory.resolve()
    places = {name: (directory / name).parent.resolve() / Path(name).name for name in files}
    within = [name for name, place in places.items() if home in place.parents]
    return {name: files[name] for name in within if places[name] != home / MARKER}


def _files(directory: Path) -> Iterator[str]:
    """The files in ``directory`` but for the marker, by the names that it lists."""
    marker = directory / MARKER
    for path in sorted(directory.rglob("*")):
        if not path.is_dir() and path not in (marker, staging_of(marker)):
            yield path.relative_to(directory).as_posix()


def _digest(path: Path, sync: bool = True) -> str:
    """SHA-256 of a file; ``sync`` sees to it that it is on the disk."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
        if sync:
            os.fsync(file.fileno())
    return digest.hexdigest()


@contextlib.contextmanager
def saving(target: Path) -> Iterator[None]:
    """A save that fails is one sentence, whatever torch, safetensors or the system call it."""
    try:
        yield
    except Exception as error:
        # A tokenizer raises nothing more exact than Exception.
        told = isinstance(error, OSError | RuntimeError | SafetensorError)
        if not told and type(error) is not Exception:
            raise
        reason = first_line(error)
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        elif shutil.disk_usage(_existing(target)).free < 2**26 or "os error 28" in reason:
            reason = os.strerror(errno.ENOSPC)
        raise SaveFailed(
            f"{target} can't be saved: {reason}; what was saved before is intact"
        ) from error


def _existing(path: Path) -> Path:
    """The nearest parent of ``path`` that is there."""
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def free_bytes(path: Path) -> int:
    """Room on the disk that ``path`` is or will be on."""
    return shutil.disk_usage(_existing(path)).free


def check_new_file(path: Path | None, overwrite: bool) -> None:
    """Raise if --out, a file, is there and not to be overwritten, or can't be made."""
    if path is None:
        return
    try:
        if path.exists() and not overwrite:
            raise InputError(f"--out {path} is there already; pass --overwrite to replace it")
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {path} can't be used: {error.strerror}") from None
    if path.is_dir():
        raise InputError(f"--out {path} is a directory")


def check_directory(flag: str, path: Path) -> None:
    """Raise if the directory given with ``flag`` can't be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{flag} {path} can't be used: {reason}") from None


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as JSON, replacing ``path`` only once it is complete and on the disk."""
    write_file(path, json.dumps(content, indent=2) + "\n")


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as CSV, with a column for every name that one of them has."""
    listed, text = list(rows), io.StringIO()
    names = list(dict.fromkeys(name for row in listed for name in row))
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(listed)
    return text.getvalue()


def read_json(path: Path) -> Any:
    """The content of a JSON file, or None if it is missing or cut off."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def read_marker(directory: Path) -> dict[str, Any] | None:
    """What the marker of ``directory`` says, or None if it is missing, cut off or not ours."""
    found = read_json(directory / MARKER)
    return found if isinstance(found, dict) else None


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Make ``out`` and hold it; the system gives it back when the process ends, however.

    Directories made for it go again if nothing was put into them.

    Raises:
        InputError: another process holds it, or it can't be made or written.
    """
    path = out / LOCK
    try:
        made = [p for p in (out, *out.parents) if not p.exists()]
        out.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path, blocking=False)
        lock.acquire()
    except filelock.Timeout:
        raise InputError(
            f"--out {out} is in use by {_holder(path)}; wait for it, or give another --out"
        ) from None
    except OSError as error:
        what = "there is a file of that name" if out.is_file() else error.strerror
        raise InputError(f"--out {out} can't be used: {what}") from None
    try:
        with contextlib.suppress(OSError):
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
        for directory in made:
            with contextlib.suppress(OSError):
                directory.rmdir()


def _holder(lock: Path) -> str:
    try:
        return lock.read_text() or "another process"
    except OSError:
        return "another process"
