"""Names of the columns that a task reads, and checked access to their values."""

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastkd.train.errors import InputError, nearest


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


def settle_columns(columns: Columns, record: dict, source: str) -> Columns:
    """``columns`` with the text column found; raises if one of them is missing in ``record``."""
    text = columns.text
    if text is None or text not in record:
        check_separators(record, source)
    if text is None:
        found = [name for name in ("text", "sentence") if name in record]
        if len(found) != 1:
            raise InputError(
                f"{source}: which column is the text? Pass --text-column; {nearest('', record)}"
            )
        text = found[0]
    for option, name in (
        ("--text-column", text),
        ("--text-pair-column", columns.pair),
        ("--label-column", columns.label),
    ):
        _check_column(option, name, record, source)
    return replace(columns, text=text)


def check_columns(columns: Columns, record: dict, source: str) -> None:
    """Raise if a ``record`` lacks one of ``columns``."""
    _check_column("--text-column", columns.text, record, source)
    _check_column("--text-pair-column", columns.pair, record, source)
    for label in columns.labels_in(record):
        _check_column("--label-column", label, record, source)


def _check_column(option: str, name: str | None, record: dict, source: str) -> None:
    if name is not None and name not in record:
        raise InputError(f"{source}: no column {name!r} ({option}); {nearest(name, record)}")


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
    """The value of column ``name`` of a row; ``where`` is the prefix of an InputError."""
    assert name is not None
    if name not in record:
        raise InputError(f"{where}: no column {name!r}; {nearest(name, record)}")
    return record[name]


def text_of(record: dict, name: str | None, where: str) -> str:
    """The text in column ``name``."""
    value = field(record, name, where)
    if not isinstance(value, str):
        raise InputError(f"{where}: column {name!r} is not text but {value!r:.40}")
    return whole(value, name, where)


def words_of(record: dict, name: str | None, where: str) -> list[str]:
    """The list of words in column ``name``."""
    value = field(record, name, where)
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise InputError(f"{where}: column {name!r} is not a list of words but {value!r:.40}")
    return [whole(word, name, where) for word in value]


def whole(value: Any, name: str | None, where: str) -> Any:
    """``value``; raises for text with a lone surrogate, which JSON allows and UTF-8 does not."""
    if isinstance(value, str) and re.search("[\ud800-\udfff]", value):
        raise InputError(f"{where}: column {name!r} holds half a character (a lone surrogate)")
    return value


def holds_text(*texts: str) -> bool:
    """Whether one of ``texts`` is not blank."""
    return any(text.strip() for text in texts)
