"""Rows of a file as (number, dictionary by column), whatever its format.

.tsv (unquoted, as GLUE's), .csv (also with semicolons), .jsonl, .json (an array of objects, or
lines), .parquet, .txt (a text a line, in the column "text"); each also with .gz.

A number is the line on which the row begins, as an editor counts; in Parquet the row itself.
"""

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastkd._extras import require
from fastkd.app.errors import InputError

BETWEEN = re.compile(r"[,\s]*")
Records = Iterator[tuple[int, dict[str, Any]]]


def records(path: Path, header: bool, option: str) -> Records:
    """The rows of ``path``, the file given by ``option``."""
    if not path.is_file():
        what = "is a directory, not a file" if path.is_dir() else "no such file"
        raise InputError(f"{option} {path}: {what}")
    kind = _kind(path)
    if kind == ".parquet":
        yield from _parquet(path, option)
        return
    reader = READERS.get(kind)
    if reader is None:
        known = ", ".join([*READERS, ".parquet"])
        raise InputError(f"{option} {path}: unknown kind of file; use {known}, also with .gz")
    text = _text(path, option)
    if not text.strip():
        raise InputError(f"{option} {path}: the file is empty")
    yield from reader(text, str(path), header)


def first_row(path: Path) -> list[str]:
    """The column names of a file with a header; none if it can't be read."""
    try:
        if _kind(path) in (".tsv", ".csv"):
            line = _text(path, "").lstrip().partition("\n")[0]
            separator = "\t" if _kind(path) == ".tsv" else _separator(line)
            return next(csv.reader([line.rstrip("\r")], delimiter=separator), [])
        return list(next(records(path, True, ""))[1])
    except (InputError, StopIteration, csv.Error):
        return []


def _kind(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def _text(path: Path, option: str) -> str:
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{option} {path}: can't be read ({error})") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = content[: error.start].count(b"\n") + 1
        raise InputError(f"{path}, row {row}: not UTF-8 text") from None


def _tsv(text: str, source: str, header: bool) -> Records:
    lines = (
        (number, line.rstrip("\r").split("\t"))
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    )
    return _named(lines, source, header)


def _txt(text: str, source: str, header: bool) -> Records:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, {"text": line.strip()}


def _separator(line: str) -> str:
    """A comma, or a semicolon where only that splits the first line."""
    return ";" if len(next(csv.reader([line]), [])) < 2 and ";" in line else ","


def _csv(text: str, source: str, header: bool) -> Records:
    first = text.lstrip().partition("\n")[0]
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=_separator(first))

    def lines() -> Iterator[tuple[int, list[str]]]:
        while True:
            number = reader.line_num + 1
            try:
                line = next(reader, None)
            except csv.Error as error:
                raise InputError(f"{source}, row {number}: {error}") from None
            if line is None:
                return
            if line:
                yield number, line

    return _named(lines(), source, header)


def _named(lines: Iterator[tuple[int, list[str]]], source: str, header: bool) -> Records:
    """Rows as dictionaries by column name; a row of another length than the first is an error."""
    number, first = next(lines)
    names = [name.strip() for name in first] if header else [str(i) for i in range(len(first))]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InputError(f"{source}, row {number}: column {min(twice)!r} stands there twice")
    if not header:
        yield number, dict(zip(names, first, strict=True))
    for number, line in lines:
        if len(line) != len(names):
            raise InputError(
                f"{source}, row {number}: {len(line)} columns where row 1 has {len(names)}"
            )
        yield number, dict(zip(names, line, strict=True))


def _json_lines(text: str, source: str, header: bool) -> Records:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{source}, row {number}: not JSON ({error})") from None
            yield number, _object(record, line.strip(), source, number)


def _json(text: str, source: str, header: bool) -> Records:
    """An array of objects; anything else is read as lines."""
    if not text.lstrip().startswith("["):
        yield from _json_lines(text, source, header)
        return
    decoder, end = json.JSONDecoder(), text.index("[") + 1
    number, counted = 1, 0
    while True:
        start = BETWEEN.match(text, end).end()  # type: ignore[union-attr]
        number, counted = number + text.count("\n", counted, start), start
        if text[start : start + 1] == "]":
            return
        try:
            record, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)
            raise InputError(f"{source}, row {number}: not JSON ({reason})") from None
        yield number, _object(record, text[start:end], source, number)


def _object(record: Any, text: str, source: str, number: int) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise InputError(f"{source}, row {number}: not a JSON object but {text[:40]}")
    return record


def _parquet(path: Path, option: str) -> Records:
    parquet: Any = require("pyarrow.parquet", "train")
    try:
        batches = parquet.ParquetFile(path).iter_batches()
        number = 0
        for batch in batches:
            for record in batch.to_pylist():
                number += 1
                yield number, record
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{option} {path}: can't be read as Parquet ({reason})") from None


READERS = {
    ".tsv": _tsv,
    ".csv": _csv,
    ".jsonl": _json_lines,
    ".json": _json,
    ".txt": _txt,
}
