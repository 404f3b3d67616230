"""Atomic directories with a manifest of checksums, and a lock on the output directory.

A directory that fastkd wrote holds the manifest `MANIFEST`, written last: a JSON object whose
"files" maps every other file to its SHA-256, or to null if the file was added later. The manifest
distinguishes complete directories from interrupted ones, damaged files from intact ones, and
fastkd's files, the only ones ever deleted, from files that fastkd did not write.
"""

import contextlib
import csv
import errno
import hashlib
import io
import json
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fastkd._core.atomic_files import staging_of, sync_names, write_file
from fastkd._core.extras import require
from fastkd.train.errors import InputError, SaveFailed, first_line

filelock: Any = require("filelock", "train")

MANIFEST = "fastkd.json"
LOCK = ".fastkd.lock"
# Directory in a cache of `fastkd cache`: the initial student with its tokenizer.
STUDENT = "student"
# Directory in such a cache: the teacher's tokenizer, if it isn't the student's.
TEACHERS_TOKENIZER = "tokenizer"
# Name of an old directory while a new one takes its place.
BACKUP = ".{}.old"


@contextlib.contextmanager
def replacing(target: Path, content: dict[str, Any]) -> Iterator[Path]:
    """Context with an empty directory, which then replaces ``target`` atomically.

    ``content`` is that of its manifest. The old ``target`` stays until the new one is complete and
    on the disk. `recover_directory` repairs an interruption between the two renames.
    """
    staging = staging_of(target)
    with saving(target):
        shutil.rmtree(staging, ignore_errors=True)
        try:
            staging.mkdir(parents=True)
            yield staging
            write_manifest(staging, content)
            move_directory(staging, target)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            recover_directory(target)
            raise


def move_directory(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``; an old ``target`` of fastkd is deleted last."""
    backup = target.with_name(BACKUP.format(target.name))
    recover_directory(target)
    if target.exists():
        target.rename(backup)
    source.rename(target)
    sync_names(target.parent)
    if source.parent != target.parent and source.parent.exists():
        sync_names(source.parent)
    discard(backup)


def recover_directory(target: Path) -> None:
    """Undo or finish a replacement of ``target`` that was interrupted between its renames."""
    backup = target.with_name(BACKUP.format(target.name))
    if not backup.exists():
        return
    if target.exists():
        discard(backup)
    else:
        backup.rename(target)


def discard(directory: Path) -> Path | None:
    """Remove a directory that fastkd wrote; of a symbolic link, the link alone.

    Files that fastkd did not write, or that have changed, are kept; returns their directory.
    """
    if directory.is_symlink():
        directory.unlink()
    if not directory.exists():
        return None
    for name, digest in _listed(directory).items():
        path = directory / name
        # A file that has changed is the user's; one without a checksum may change.
        if path.is_file() and digest in (None, _digest(path, sync=False)):
            path.unlink()
        staging_of(path).unlink(missing_ok=True)
    staging_of(directory / MANIFEST).unlink(missing_ok=True)
    for folder in sorted((p for p in directory.rglob("*") if p.is_dir()), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()
    if all(path.name == MANIFEST for path in directory.iterdir()):
        (directory / MANIFEST).unlink(missing_ok=True)
        directory.rmdir()
        return None
    base = directory.with_name(directory.name.removeprefix("."))
    number, kept = 2, base
    while kept.exists():
        number, kept = number + 1, base.with_name(f"{base.name}-{number}")
    directory.rename(kept)
    (kept / MANIFEST).unlink(missing_ok=True)  # last: an interrupted removal needs it to continue
    return kept


def write_manifest(
    directory: Path, content: dict[str, Any], written: Iterable[str] | None = None
) -> None:
    """Write the manifest of a complete directory, after syncing its files to the disk.

    ``written`` names new or changed files of a directory that has a manifest; default: all files.
    """
    files = {} if written is None else read_json(directory / MANIFEST)["files"]
    for name in _files(directory) if written is None else written:
        files[name] = _digest(directory / name)
    for folder in (directory, *(p for p in directory.rglob("*") if p.is_dir())):
        sync_names(folder)
    write_json(directory / MANIFEST, {**content, "files": files})


def find_damage(directory: Path) -> str | None:
    """The first problem of a directory against its manifest; None if it is intact."""
    files = read_json(directory / MANIFEST).get("files")
    if not isinstance(files, dict):
        there = (directory / MANIFEST).exists()
        return f"{MANIFEST} is damaged" if there else f"it has no {MANIFEST}, so it is incomplete"
    for name, digest in files.items():
        if digest is None:  # it may change or move
            continue
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if _digest(path, sync=False) != digest:
            return f"{name} has changed since it was written"
    return None


def unlisted_files(directory: Path) -> list[str]:
    """Files in ``directory`` that fastkd did not write."""
    listed = _listed(directory)
    return [name for name in _files(directory) if name not in listed]


def _listed(directory: Path) -> dict[str, str | None]:
    """Checksums by file name from the manifest of ``directory``; empty if it is unreadable.

    Paths outside the directory (``..``, absolute, links) are left out, and the manifest itself.
    """
    files = read_json(directory / MANIFEST).get("files")
    if not isinstance(files, dict):
        return {}
    home = directory.resolve()
    places = {name: (directory / name).parent.resolve() / Path(name).name for name in files}
    within = [name for name, place in places.items() if home in place.parents]
    return {name: files[name] for name in within if places[name] != home / MANIFEST}


def _files(directory: Path) -> Iterator[str]:
    """Relative names of the files in ``directory``, except the manifest."""
    manifest = directory / MANIFEST
    for path in sorted(directory.rglob("*")):
        if not path.is_dir() and path not in (manifest, staging_of(manifest)):
            yield path.relative_to(directory).as_posix()


def _digest(path: Path, sync: bool = True) -> str:
    """SHA-256 of a file; ``sync`` also flushes the file to the disk."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
        if sync:
            os.fsync(file.fileno())
    return digest.hexdigest()


@contextlib.contextmanager
def saving(target: Path, kept: str = "what was saved before is intact") -> Iterator[None]:
    """Context that turns errors of torch, safetensors or the system into one SaveFailed.

    ``kept`` is the end of its sentence.
    """
    try:
        yield
    except Exception as error:
        # A tokenizer raises nothing more exact than Exception.
        expected = isinstance(error, OSError | RuntimeError | SafetensorError)
        if not expected and type(error) is not Exception:
            raise
        reason = first_line(error)
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        elif free_bytes(target) < 2**26 or "os error 28" in reason:
            reason = os.strerror(errno.ENOSPC)
        raise SaveFailed(f"{target}: cannot be saved ({reason}); {kept}") from error


def free_bytes(path: Path) -> int:
    """Free bytes on the disk that holds ``path``, which need not exist."""
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    return shutil.disk_usage(there).free


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Save a tokenizer without truncation and padding of its last call, which are no part of it."""
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(directory)


def check_new_file(path: Path | None, overwrite: bool) -> None:
    """Raise if the file --out exists without --overwrite, or cannot be created."""
    if path is None:
        return
    try:
        if path.exists() and not overwrite:
            raise InputError(f"--out {path}: the file exists; pass --overwrite to replace it")
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out {path}: cannot be written ({error.strerror}); give another --out"
        ) from None
    if path.is_dir():
        raise InputError(f"--out {path}: this is a directory; give a file")


def check_directory(flag: str, path: Path) -> None:
    """Create the directory given with ``flag``; raise if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{flag} {path}: cannot be created ({reason}); give another directory"
        ) from None


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as JSON, replacing ``path`` only once it is complete and on the disk."""
    write_file(path, json.dumps(content, indent=2) + "\n")


def tsv_line(cells: Iterable[Any]) -> str:
    """An unquoted line of .tsv; separators inside a text become spaces."""
    texts = ("" if cell is None else re.sub(r"[\t\r\n]", " ", str(cell)) for cell in cells)
    return "\t".join(texts) + "\n"


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as CSV, with the union of their columns."""
    listed, text = list(rows), io.StringIO()
    names = list(dict.fromkeys(name for row in listed for name in row))
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(listed)
    return text.getvalue()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, such as a manifest; empty if it is missing or unreadable."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Create ``out`` and lock it; the system releases the lock when the process ends.

    Directories created here are removed again if they are still empty.

    Raises:
        InputError: another process holds the lock, or ``out`` cannot be created or written.
    """
    path = out / LOCK
    try:
        created = [p for p in (out, *out.parents) if not p.exists()]
        out.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path, blocking=False)
        lock.acquire()
    except filelock.Timeout:
        holder = ""
        with contextlib.suppress(OSError):
            holder = path.read_text()
        raise InputError(
            f"--out {out}: in use by {holder or 'another process'}; wait for it, or give another "
            "--out"
        ) from None
    except OSError as error:
        what = "there is a file of that name" if out.is_file() else error.strerror
        raise InputError(f"--out {out}: cannot be used ({what}); give another --out") from None
    try:
        with contextlib.suppress(OSError):
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
        for directory in created:
            with contextlib.suppress(OSError):
                directory.rmdir()
