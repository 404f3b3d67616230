"""Rows of a file as (number, dictionary by column), whatever its format.

.tsv (unquoted, as GLUE's), .csv (also with semicolons), .jsonl, .json (an array of objects, or
lines), .parquet, .txt (a text a line, in the column "text"); each also with .gz.

A number is the line on which the row begins, as an editor counts; in Parquet the row itself.
"""

import contextlib
import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastkd._core.extras import require
from fastkd.train.errors import InputError

BLANK = re.compile(r"[ \t\r\n]*")
BATCH = 128  # rows of a Parquet file in memory
CHUNK = 2**20  # characters of a JSON array read at a time
# Where JSON that is only cut off looks wrong: not further from the end than this.
LONGEST_TOKEN = 16
# Characters of a field in .csv: Python's own limit of 131,072 is shorter than many a document.
LONGEST_FIELD = 2**31 - 1
Lines = Iterator[tuple[int, str]]
Records = Iterator[tuple[int, dict[str, Any]]]


def records(path: Path, header: bool, option: str, blank: bool = False) -> Records:
    """The rows of ``path``, the file given by ``option``, a few in memory at a time.

    With ``blank`` a line without anything is a row of empty columns in .tsv, .csv and .txt.
    """
    check_file(path, option)
    if kind_of(path) == ".parquet":
        yield from _parquet(path, option)
        return
    if blank and kind_of(path) in LINES:
        yield from LINES[kind_of(path)](path, option, header, blank=True)
    else:
        yield from READERS[kind_of(path)](path, option, header)


def check_file(path: Path, option: str, more: tuple[str, ...] = ()) -> None:
    """Raise unless ``path`` is a file of a kind that is known, or of ``more``."""
    if not path.is_file():
        what = "is a directory, not a file" if path.is_dir() else "is not a regular file"
        raise InputError(f"{option} {path}: {what if path.exists() else 'no such file'}")
    kinds = (*READERS, ".parquet", *more)
    if kind_of(path) not in kinds:
        known = ", ".join(kinds)
        raise InputError(f"{option} {path}: unknown kind of file; use {known}, also with .gz")


def first_row(path: Path) -> list[str]:
    """The column names of a file with a header; none if it can't be read."""
    if kind_of(path) not in (*READERS, ".parquet"):
        return []
    try:
        if kind_of(path) in (".tsv", ".csv"):
            _, line = next(text_lines(path, ""))
            separator = "\t" if kind_of(path) == ".tsv" else _separator(line)
            return next(csv.reader([line.strip()], delimiter=separator), [])
        return list(next(records(path, True, ""))[1])
    except (InputError, StopIteration, csv.Error):
        return []


def is_text(path: Path) -> bool:
    """Whether the file holds nothing but a text a line."""
    return kind_of(path) == ".txt"


def kind_of(path: Path) -> str:
    """What its name ends in, whether it is compressed or not."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


@contextlib.contextmanager
def _opened(path: Path, option: str) -> Iterator[Any]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{option} {path}: can't be read ({error})") from None


def text_lines(path: Path, option: str) -> Lines:
    """The lines of a file and their numbers, from the first that isn't blank on."""
    started = False
    with _opened(path, option) as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise InputError(f"{path}, row {number}: not UTF-8 text") from None
            started = started or bool(text.strip())
            if started:
                yield number, text
    if not started:
        raise InputError(f"{option} {path}: the file is empty")


def _tsv(path: Path, option: str, header: bool, blank: bool = False) -> Records:
    lines = ((n, line.rstrip("\r\n")) for n, line in text_lines(path, option))
    rows = ((n, line.split("\t") if line.strip() else []) for n, line in lines)
    return _named((row for row in rows if blank or row[1]), str(path), header)


def _txt(path: Path, option: str, header: bool, blank: bool = False) -> Records:
    before = 0
    for number, line in text_lines(path, option):
        for skipped in range(before + 1, number) if blank else ():  # blank ones that it begins with
            yield skipped, {"text": ""}
        if blank or line.strip():
            yield number, {"text": line.strip()}
        before = number


def _separator(line: str) -> str:
    """A comma, or a semicolon where only that splits the first line."""
    line = line.strip().partition("\r")[0]
    with _long_fields():
        fields = next(csv.reader([line]), [])
    return ";" if len(fields) < 2 and ";" in line else ","


@contextlib.contextmanager
def _long_fields() -> Iterator[None]:
    """Raise the limit of `csv`, which is one for the whole process."""
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _csv(path: Path, option: str, header: bool, blank: bool = False) -> Records:
    lines = text_lines(path, option)
    before, first = next(lines)
    # A lone carriage return ends a line, too.
    parts = (
        part
        for _, line in itertools.chain([(before, first)], lines)
        for part in io.StringIO(line, newline="")
    )
    reader = csv.reader(parts, strict=True, delimiter=_separator(first))

    def rows() -> Iterator[tuple[int, list[str]]]:
        while True:
            number = before + reader.line_num
            try:
                with _long_fields():
                    line = next(reader, None)
            except csv.Error as error:
                raise InputError(f"{path}, row {number}: {error}") from None
            if line is None:
                return
            if line or blank:
                yield number, line

    return _named(rows(), str(path), header)


def _named(lines: Iterator[tuple[int, list[str]]], source: str, header: bool) -> Records:
    """Rows as dictionaries by column name; a row of another length than the first is an error."""
    top, first = next(lines)
    names = [name.strip() for name in first] if header else [str(i) for i in range(len(first))]
    _check_names(names, f"{source}, row {top}")
    if not header:
        yield top, dict(zip(names, first, strict=True))
    for number, line in lines:
        line = line or [""] * len(names)
        if len(line) != len(names):
            raise InputError(
                f"{source}, row {number}: {len(line)} columns where row {top} has {len(names)}"
            )
        yield number, dict(zip(names, line, strict=True))


def _check_names(names: list[str], where: str) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InputError(f"{where}: column {min(twice)!r} stands there twice")


def _json_lines(path: Path, option: str, header: bool) -> Records:
    for number, line in text_lines(path, option):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}, row {number}: not JSON ({error})") from None
            yield number, _object(record, line.strip(), path, number)


def _json(path: Path, option: str, header: bool) -> Records:
    """An array of objects; anything else is read as lines."""
    array = _JsonArray(path, option)
    return array.records() if array.next() == "[" else _json_lines(path, option, header)


class _JsonArray:
    """Reads an array object by object, wherever its lines end."""

    def __init__(self, path: Path, option: str):
        self.path, self.option = path, option
        self.parts = self._read()
        # What was read and not yet used begins at ``place``, on line ``row``.
        self.text, self.place, self.row = "", 0, 1

    def records(self) -> Records:
        self.place += 1
        if self.next() != "]":
            yield self._decode()
            while self.next() == ",":
                self.place += 1
                self.next()
                yield self._decode()
            if self.next() != "]":
                raise self._wrong("Expecting ',' delimiter")
        self.place += 1
        if self.next():
            raise self._wrong("text after the array")

    def next(self) -> str:
        """Go to the next character that isn't blank; "" if there is none."""
        while True:
            stop = BLANK.match(self.text, self.place).end()  # type: ignore[union-attr]
            self._go(stop)
            if stop < len(self.text) or not self._read_on():
                return self.text[stop : stop + 1]

    def _decode(self) -> tuple[int, dict[str, Any]]:
        while True:
            try:
                record, stop = json.JSONDecoder().raw_decode(self.text, self.place)
            except (ValueError, RecursionError) as error:
                reason, at = getattr(error, "msg", str(error)), getattr(error, "pos", 0)
                cut = at > len(self.text) - LONGEST_TOKEN or reason.startswith("Unterminated")
                if cut and self._read_on():
                    continue
                raise self._wrong(reason) from None
            found = self.row, _object(record, self.text[self.place : stop], self.path, self.row)
            self._go(stop)
            return found

    def _go(self, place: int) -> None:
        self.row += self.text.count("\n", self.place, place)
        self.place = place

    def _wrong(self, reason: str) -> InputError:
        return InputError(f"{self.path}, row {self.row}: not JSON ({reason})")

    def _read_on(self) -> bool:
        """Forget what was used and read as much again as is left; False at the end of the file."""
        left = self.text[self.place :]
        more = list(itertools.islice(self.parts, 1 + len(left) // CHUNK))
        self.text, self.place = "".join([left, *more]), 0
        return bool(more)

    def _read(self) -> Iterator[str]:
        try:
            with _opened(self.path, self.option) as file:
                text = io.TextIOWrapper(file, "utf-8-sig", newline="")
                yield from iter(lambda: text.read(CHUNK), "")
        except UnicodeDecodeError:
            for _ in text_lines(self.path, self.option):  # it knows the row
                pass


def _object(record: Any, text: str, path: Path, number: int) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise InputError(f"{path}, row {number}: not a JSON object but {text[:40]}")
    return record


def _parquet(path: Path, option: str) -> Records:
    parquet: Any = require("pyarrow.parquet", "train")
    try:
        file, number = parquet.ParquetFile(path), 0
        _check_names(file.schema_arrow.names, str(path))
        for batch in file.iter_batches(batch_size=BATCH):
            for record in batch.to_pylist():
                number += 1
                yield number, record
    except InputError:
        raise
    except (OSError, ValueError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{option} {path}: can't be read as Parquet ({reason})") from None


LINES = {".tsv": _tsv, ".csv": _csv, ".txt": _txt}
READERS = {**LINES, ".jsonl": _json_lines, ".json": _json}
