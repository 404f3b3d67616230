"""Drawn tables: every kind of file gives their rows, which are known without reading them.

A row that is drawn to be broken is named in the error.

A table has texts with whatever a format can carry, sometimes two of them, and labels of a drawn
kind. It is written as a drawn kind of file, with line ends, a mark of UTF-8, blank lines, other
columns, with or without a header, and compression. A failure prints the seed (FASTKD_TEST_SEED).
"""

import csv
import gzip
import io
import json
import math
import random

import pyarrow
import pyarrow.parquet
import pytest

from fastkd.train.data import load
from fastkd.train.errors import InputError
from tests.support.draw import FIRST
from tests.support.tiny import source

ODD = ["é", "\u2028", "\x0b", "'", "#", ";", "\U0001f4a9", "\x1c", "(a|b)", "\\", "  ", "�", "ﬁ"]
QUOTED = ['"', '""', ",", "\n", "\r\n", "\t"]
#: By kind: labels as written, the names of all classes in order (None for numbers), and options.
LABELS = {
    "padded": (["2", "1", "01"], ["01", "1", "2"]),
    "versions": (["1.5", "0.5", "1_0"], ["0.5", "1.5", "1_0"], {"labels": "classes"}),
    "counts": ([3, 1, 2], None, {"labels": "numbers"}),
    "names": (["good", "bad", " fair "], ["bad", "fair", "good"]),
    "cases": (["B", "a", "A"], ["A", "B", "a"]),
    "whole": ([10, 9, -1], ["-1", "9", "10"]),
    "unmarked": ([1, 0, -100], ["0", "1"]),
    "floats": ([0.5, 1.0, 2.0], None),
    "halves": ([1.0, 0.0, 3.0], ["0.0", "1.0", "3.0"]),
    "true": ([True, False, True], ["False", "True"]),
    "soft": ([[0.25, 0.75], [0.9, 0.1], [0.5, 0.5]], ["0", "1"]),
}


def texts_of(rng, kind):
    """Texts that a kind of file can carry; a quote alone is one in a .tsv."""
    between = [*ODD, '"'] if kind == "tsv" else [*ODD, *QUOTED]
    while True:
        words = [rng.choice(["good", "film", "is", *between]) for _ in range(rng.randint(1, 6))]
        words += ["long" * 50_000] * (rng.random() < 0.01)  # more than Python's csv reads unasked
        yield f"{rng.choice('xyz')} {rng.choice(['', ' ']).join(words)} end"


def written(rng, kind, names, rows):
    """Bytes of the rows' file, with or without ``names``, and the number of each row."""
    end, blank = rng.choice(["\n", "\r\n"]), rng.random() < 0.3
    lines, numbers, at, head = [], [], 1, [names] * (kind in ("tsv", "csv") and names is not None)
    if kind in ("tsv", "csv"):
        rows = [*head, *(list(row.values()) if isinstance(row, dict) else row for row in rows)]
    for i, row in enumerate(rows):
        if kind == "csv":
            buffer = io.StringIO(newline="")
            csv.writer(buffer).writerow(row)
            line = buffer.getvalue().removesuffix("\r\n")
        elif kind == "tsv":
            line = "\t".join(map(str, row))
        else:
            line = row if isinstance(row, str) else json.dumps(row, ensure_ascii=i % 2 == 0)
        if kind == "json":
            line = f"{'[' if i == 0 else ', '}{line}"
        if blank and i == 2:
            lines.append("")
            at += 1
        numbers.append(i + 1 if kind == "json" else at)
        lines.append(line)
        at += 1 + line.count("\n")
    lines += ["]"] * (kind == "json")
    text = end.join(lines) + rng.choice([end, ""])
    content = text.encode("utf-8", "surrogateescape")
    return rng.choice([b"", b"\xef\xbb\xbf"]) + content, numbers[len(head) :]


def broken(rng, kind, row, text):
    """What a file has in place of a row: cells, or a line of JSON."""
    empty = ["", " "] * ("pair" not in row)  # one of two texts may be empty
    if kind == "jsonl":
        changes = [(text, x) for x in (5, None, "\udcfc", *empty)]
        changes += [("label", x) for x in (None, "", {}, [1], math.nan, math.inf)]
        lines = [{**row, name: x} for name, x in changes]
        lines += [{n: x for n, x in row.items() if n != name} for name in (text, "label")]
        lines = [json.dumps(x, ensure_ascii=False) for x in lines]
        return rng.choice([*lines, lines[0][:-1], "[1]", "5", "null", "word", "[" * 100_000])
    changes = [("label", ""), ("label", "nan"), ("label", "NULL"), *((text, x) for x in empty)]
    if "\n" not in "".join(map(str, row.values())):  # the error names a line
        changes.append((text, "\udcfc"))
    rows = [[*{**row, name: x}.values()] for name, x in changes]
    return rng.choice([*rows, [*row.values()][:-1], [*row.values(), "wide"]])


def drawn(rng, folder, breaks=False):
    """A file's path, its options, and its content: numbers, texts, second texts, labels, names.

    Or, if one of them ``breaks``, another file with a broken row, and the row's number.
    """
    kind = rng.choice(["tsv", "csv", "jsonl", *["json", "parquet"] * (not breaks)])
    of = rng.choice([x for x in LABELS if not breaks or x != "versions"])
    labels, classes, *options = LABELS[of]
    made, pair = texts_of(rng, kind), rng.random() < 0.4
    names = [
        rng.choice(["text", "sentence"]),
        *["pair"] * pair,
        "label",
        *["more"] * rng.randint(0, 1),
    ]
    rng.shuffle(names)
    if of == "soft" and kind in ("tsv", "csv"):
        labels = [json.dumps(x) for x in labels]
    rows, ys = [], []
    for i in range(rng.randint(6, 40)):
        ys.append(i % 3 if i < 3 else rng.randrange(3))
        rows.append({n: labels[ys[-1]] if n == "label" else next(made) for n in names})
    bare = kind in ("tsv", "csv") and rng.random() < 0.3

    def save(rows):
        path = folder / f"{rng.randrange(10**9)}.{kind}"
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
            return path, [*range(1, len(rows) + 1)]
        content, numbers = written(rng, kind, None if bare else names, rows)
        path = path.with_name(path.name + rng.choice(["", ".gz"]))
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        return path, numbers

    path, numbers = save(rows)
    (text,) = {"text", "sentence"} & {*names}
    given = {"text_pair_column": "pair"} if pair else {}
    if bare:
        columns = {"text_column": text, "label_column": "label", **given}
        given = {name: str(names.index(x)) for name, x in columns.items()} | {"no_header": True}
    given |= dict(*options)
    if breaks:
        at = rng.randint(3, len(rows))
        wrong, numbers = save([*rows[:at], broken(rng, kind, rows[0], text), *rows[at:]])
        return path, given, (wrong, numbers[at])
    kept = [i for i, y in enumerate(ys) if labels[y] != -100]
    seconds = [rows[i]["pair"] for i in kept] if pair else None
    firsts, known = [rows[i][text] for i in kept], [labels[ys[i]] for i in kept]
    return path, given, ([numbers[i] for i in kept], firsts, seconds, known, classes)


def label_of(label, classes):
    """The label that training rows have: a number, or the id of a class."""
    if classes is None:
        return float(label)
    if isinstance(label, list | str) and str(label).startswith("["):
        found = json.loads(label) if isinstance(label, str) else label
        return found.index(max(found))
    return classes.index(str(label).strip())


def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    rng, limit = random.Random(FIRST), csv.field_size_limit()
    for _ in range(30):
        path, given, (numbers, texts, pairs, labels, classes) = drawn(rng, tmp_path)
        corpus = load(source(train=path, evals=path, **given))
        where, train = f"seed {FIRST}, {path.name}", corpus.train
        assert corpus.names == classes, where
        assert [train.number(i) for i in range(len(train))] == numbers, where
        assert (train.texts, train.pairs) == (texts, pairs), where
        assert train.labels.tolist() == [label_of(x, classes) for x in labels], where
    assert csv.field_size_limit() == limit


def test_a_broken_row_is_named(tmp_path):
    """Among the training rows, or the evaluation rows."""
    rng = random.Random(FIRST)
    for _ in range(20):
        path, given, (wrong, number) = drawn(rng, tmp_path, breaks=True)
        train, evals = rng.choice([(wrong, path), (path, wrong)])
        with pytest.raises(InputError) as error:
            load(source(train=train, evals=evals, **given))
        said = str(error.value)
        assert f"{wrong.name}, row {number}: " in said, f"seed {FIRST}: {said}"
