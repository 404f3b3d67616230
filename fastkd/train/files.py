"""Rows of a file as (number, dictionary by column), whatever its format.

.tsv (unquoted, as GLUE's), .csv, .jsonl, .json (an array of objects, or lines), .parquet, .txt (one
text a line, in the column "text"), each also with .gz; and folders that `datasets` saved.

A number is the line on which the row begins, or its own in Parquet and in an array. The readers of
`datasets` name no row, and they change values without a word: its "json" reads a text such as
2020-01-01 as a time, its "csv" (pandas) fills a short row with nothing and takes text after a
closing quote as a part of the field.
"""

import csv
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastkd._core.extras import require
from fastkd.train.errors import InputError, first_line, nearest

HALF = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Columns:
    """Names of the columns of text, second text, label and teacher; without a header 0, 1, ..."""

    text: str | None = None
    pair: str | None = None
    label: str | None = "label"
    header: bool = True
    teacher: str | None = None

    def over(self, others: "Columns") -> "Columns":
        """These names, and those of ``others`` where these are None."""
        return Columns(
            self.text or others.text,
            self.pair or others.pair,
            self.label or others.label,
            others.header and self.header,
            self.teacher,
        )

    def labels_in(self, record: Container[str]) -> list[str]:
        """Names of the label columns: several where commas separate them; none without a label."""
        if self.label is None or self.label in record:
            return [] if self.label is None else [self.label]
        return [name.strip() for name in self.label.split(",")]


def settle_columns(columns: Columns, record: dict, source: str, search: bool = True) -> Columns:
    """``columns`` with the text column found, unless ``search`` is False.

    Raises for a column that is missing in ``record``.
    """
    text = columns.text
    if search and (text is None or text not in record):
        check_separators(record, source)
    if search and text is None:
        found = [name for name in ("text", "sentence") if name in record]
        if len(found) != 1:
            raise InputError(
                f"{source}: which column is the text? Pass --text-column; {nearest('', record)}"
            )
        columns = replace(columns, text=found[0])
    labels = [("--label-column", name) for name in columns.labels_in(record)]
    texts = ("--text-column", columns.text), ("--text-pair-column", columns.pair)
    for option, name in (*texts, *labels):
        if name is not None and name not in record:
            raise InputError(f"{source}: no column {name!r} ({option}); {nearest(name, record)}")
    return columns


def check_separators(record: Mapping[str, Any], source: str) -> None:
    """Raise if the only column of ``record`` holds the names of several."""
    names = list(record)
    found = [sep for sep in ";\t|," if len(names) == 1 and sep in names[0]]
    if found:
        raise InputError(
            f"{source}: its columns are separated by {found[0]!r}; a .csv file has commas, a .tsv "
            "file tabs"
        )


def field(record: dict, name: str | None, where: str) -> Any:
    """The value of column ``name`` of a row; ``where`` is the prefix of an InputError.

    It raises for text with a lone surrogate, which JSON allows and UTF-8 does not.
    """
    assert name is not None
    if name not in record:
        raise InputError(f"{where}: no column {name!r}; {nearest(name, record)}")
    value = record[name]
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and HALF.search(text):
            raise InputError(f"{where}: column {name!r} holds half a character (a lone surrogate)")
    return value


def text_of(record: dict, name: str | None, where: str) -> str:
    """The text in column ``name``."""
    value = field(record, name, where)
    if not isinstance(value, str):
        raise InputError(f"{where}: column {name!r} is not text but {value!r:.40}")
    return value


def words_of(record: dict, name: str | None, where: str) -> list[str]:
    """The list of words in column ``name``."""
    value = field(record, name, where)
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise InputError(f"{where}: column {name!r} is not a list of words but {value!r:.40}")
    return value


def holds_text(*texts: str) -> bool:
    """Whether one of ``texts`` is not blank."""
    return any(text.strip() for text in texts)


BATCH = 128  # rows of a Parquet file in memory
# Characters of a field in .csv: Python's own limit of 131,072 is shorter than many a document.
LONGEST_FIELD = 2**31 - 1
# Files of a data set that `datasets` saved, and of a folder with several.
SAVED, SPLITS = ("state.json", "dataset_info.json"), "dataset_dict.json"
Lines = Iterator[tuple[int, str]]
Records = Iterator[tuple[int, dict[str, Any]]]
#: Functions of a path, its option, whether it has a header, and whether blank lines are rows, by
#: the kind of file.
Readers = Mapping[str, Callable[[Path, str, bool, bool], Records]]


def records(
    path: Path, header: bool, option: str, blank: bool = False, readers: Readers | None = None
) -> Records:
    """The rows of ``path``, the file given by ``option``, or of the files of a folder.

    An array in .json is read whole, any other file in parts. With ``blank`` an empty line is a row
    of empty columns in .tsv, .csv and .txt.
    """
    readers = readers or READERS
    if is_saved(path):
        yield from enumerate(saved(path, option), 1)
        return
    for part in _files_in(path, readers) if path.is_dir() else [path]:
        yield from readers[kind_of(part)](part, option, header, blank)


def names_of(paths: Sequence[Path]) -> dict[str, Path]:
    """Files by name without endings: "" for a single one."""
    if len(paths) == 1:
        return {"": paths[0]}
    return {Path(path.name.removesuffix(".gz")).stem: path for path in paths}


def check_file(
    path: Path, option: str, readers: Readers | None = None, folders: bool = False
) -> None:
    """Raise unless one of ``readers`` reads ``path``, which may be one of ``folders``."""
    readers = readers or READERS
    if is_saved(path):
        return
    if (path / SPLITS).is_file():
        splits = sorted(part.name for part in path.iterdir() if is_saved(part))
        raise InputError(
            f"{option} {path}: holds several splits; give one of them: {', '.join(splits)}"
        )
    if folders and path.is_dir():
        if not _files_in(path, readers):
            raise InputError(f"{option} {path}: the folder has no file that can be read")
        return
    if not path.is_file():
        what = "is a directory, not a file" if path.is_dir() else "is not a regular file"
        raise InputError(f"{option} {path}: {what if path.exists() else 'no such file'}")
    if kind_of(path) not in readers:
        known = ", ".join(readers)
        raise InputError(f"{option} {path}: unknown kind of file; use {known}, also with .gz")


def _files_in(folder: Path, readers: Readers) -> list[Path]:
    """All files below ``folder`` that can be read, sorted."""
    return sorted(path for path in folder.rglob("*") if kind_of(path) in readers and path.is_file())


def is_saved(path: Path) -> bool:
    """Whether ``path`` is a folder of `datasets.Dataset.save_to_disk`."""
    return all((path / name).is_file() for name in SAVED)


def saved(path: Path, option: str) -> Any:
    """The data set in a folder of `datasets.Dataset.save_to_disk`."""
    datasets: Any = require("datasets", "train")
    try:
        return datasets.load_from_disk(str(path))
    except Exception as error:  # damaged files raise many unrelated types
        raise InputError(f"{option} {path}: can't be read ({first_line(error)})") from None


def class_names(path: Path, column: str | None, option: str) -> list[str] | None:
    """Class names of a ``column`` that a Parquet file or a saved data set declares, or None."""
    if column is None:
        return None
    if is_saved(path):
        features: Any = saved(path, option).features
    elif kind_of(path) == ".parquet":
        parquet: Any = require("pyarrow.parquet", "train")
        datasets: Any = require("datasets", "train")
        try:
            features = datasets.Features.from_arrow_schema(parquet.read_schema(path))
        except (OSError, ValueError, TypeError, KeyError):  # its reader says why
            return None
    else:
        return None
    return declared(features.get(column))


def declared(feature: Any) -> list[str] | None:
    """Class names of a column of `datasets`, or of the items of its lists; None without names."""
    return getattr(getattr(feature, "feature", feature), "names", None)


def first_row(path: Path) -> list[str]:
    """The column names of a file with a header; an empty list if it cannot be read."""
    try:
        check_file(path, "")
        return list(next(records(path, True, ""))[1])
    except (InputError, StopIteration):
        return []


def kind_of(path: Path) -> str:
    """The file's suffix in lower case, without .gz."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def text_lines(path: Path, option: str) -> Lines:
    """The lines of a file with their numbers, from the first line that is not blank."""
    started = False
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    raise InputError(f"{path}, row {number}: not UTF-8 text") from None
                started = started or bool(text.strip())
                if started:
                    yield number, text
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{option} {path}: can't be read ({error})") from None
    if not started:
        raise InputError(f"{option} {path}: the file is empty")


def _tsv(path: Path, option: str, header: bool, blank: bool) -> Records:
    lines = ((number, line.rstrip("\r\n")) for number, line in text_lines(path, option))
    rows = ((number, line.split("\t") if line.strip() else []) for number, line in lines)
    return _named((row for row in rows if blank or row[1]), str(path), header)


def _txt(path: Path, option: str, header: bool, blank: bool) -> Records:
    before = 0
    for number, line in text_lines(path, option):
        for skipped in range(before + 1, number) if blank else ():  # blank lines at the beginning
            yield skipped, {"text": ""}
        if blank or line.strip():
            yield number, {"text": line.strip()}
        before = number


def _csv(path: Path, option: str, header: bool, blank: bool) -> Records:
    lines = text_lines(path, option)
    top, first = next(lines)
    reader = csv.reader(itertools.chain([first], (line for _, line in lines)), strict=True)

    def rows() -> Iterator[tuple[int, list[str]]]:
        while True:
            number = top + reader.line_num
            limit = csv.field_size_limit(LONGEST_FIELD)  # of the whole process
            try:
                line = next(reader, None)
            except csv.Error as error:
                why = str(error)
                if why == "unexpected end of data":
                    why = 'its quote " is not closed; write "" for a quote within a field'
                raise InputError(f"{path}, row {number}: {why}") from None
            finally:
                csv.field_size_limit(limit)
            if line is None:
                return
            if line or blank:
                yield number, line

    return _named(rows(), str(path), header)


def _named(lines: Iterator[tuple[int, list[str]]], source: str, header: bool) -> Records:
    """Rows as dictionaries by column name; raises for a row of another length than the first."""
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
        raise InputError(f"{where}: column {min(twice)!r} occurs twice")


def _json_lines(path: Path, option: str, header: bool, blank: bool) -> Records:
    for number, line in text_lines(path, option):
        if line.strip():
            yield number, _object(loads(line.rstrip("\r\n"), path, number), path, number)


def json_rows(path: Path, option: str, header: bool, blank: bool) -> Records:
    """An array of objects, or else lines."""
    lines = list(text_lines(path, option))
    if not lines[0][1].lstrip().startswith("["):
        yield from _json_lines(path, option, header, blank)
        return
    content = loads("".join(line for _, line in lines), path, lines[0][0])
    for number, record in enumerate(content, 1):
        yield number, _object(record, path, number)


def loads(text: str, path: Path, row: int) -> Any:
    """The value of JSON ``text`` that begins on line ``row``."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason, line = getattr(error, "msg", str(error)), getattr(error, "lineno", 1)
        raise InputError(f"{path}, row {row + line - 1}: not JSON ({reason})") from None


def _object(record: Any, path: Path, number: int) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise InputError(f"{path}, row {number}: not a JSON object but {json.dumps(record):.40}")
    return record


def _parquet(path: Path, option: str, header: bool, blank: bool) -> Records:
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


READERS: Readers = {
    ".tsv": _tsv,
    ".csv": _csv,
    ".txt": _txt,
    ".jsonl": _json_lines,
    ".json": json_rows,
    ".parquet": _parquet,
}
