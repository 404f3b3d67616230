"""Drawn tables: every kind of file gives their rows, which are known without reading them.

A table has texts with whatever a format can carry, and labels of every kind. It is written as drawn
kinds of file, with line ends, a mark of UTF-8, blank lines, other columns, with or without a
header, and compression. A failure prints the seed (FASTKD_TEST_SEED).
"""

import csv
import gzip
import io
import json
import math
import random

import datasets
import numpy as np
import pytest

from fastkd.train.arrow_rows import PROBABILITIES
from fastkd.train.data import load
from fastkd.train.errors import InputError
from fastkd.train.tasks.classification import Classification
from fastkd.train.tasks.multi_label import MultiLabel
from tests.support.draw import FIRST
from tests.support.tiny import source

ODD = ["é", "\u2028", "\x0b", "'", "#", ";", "\U0001f4a9", "\x1c", "(a|b)", "\\", "  ", "�", "ﬁ"]
QUOTED = ['"', '""', ",", "\n", "\r\n", "\t"]
TABLES, ARROW = ["tsv", "csv"], ["parquet", "saved", "saved"]  # two saved ones are the hub's
NAMES = ["good", "bad", "fair"]
SETS = {"task": "multi-label", "label_column": "label"}
HOT = [[1, 0], [0, 1], [1, 1]]
SOFT = [[0.25, 0.75], [0.9, 0.1], [0.5, 0.5]]
#: By kind: labels as written, the names of all classes in order (None for numbers), labels as read
#: (those of "soft" are probabilities), and options.
LABELS = {
    "padded": (["2", "1", "01"], ["01", "1", "2"], [2, 1, 0]),
    "counts": ([3, 1, 2], None, [3, 1, 2], {"labels": "numbers"}),
    "names": (["good", "bad", " fair "], ["bad", "fair", "good"], [2, 0, 1]),
    "cases": (["B", "a", "A"], ["A", "B", "a"], [1, 2, 0]),
    "whole": ([10, 9, -1], ["-1", "9", "10"], [2, 1, 0]),
    "unmarked": ([1, 0, -100], ["0", "1"], [1, 0, -100]),
    "floats": ([0.5, 1.0, 2.0], None, [0.5, 1.0, 2.0]),
    "halves": ([1.0, 0.0, 3.0], ["0.0", "1.0", "3.0"], [1, 0, 2]),
    "true": ([True, False, True], ["False", "True"], [1, 0, 1]),
    "soft lists": (SOFT, ["0", "1"], SOFT),
    "soft words": (['{"no": 0.75, "yes": 0.25}', "yes", "no"], ["no", "yes"],
                   [[0.75, 0.25], [0, 1], [1, 0]]),
}  # fmt: skip
#: Kinds of which no row is drawn broken. The classes of some are those of a finished ``head``.
MORE = {
    "versions": (["1.5", "0.5", "1_0"], ["0.5", "1.5", "1_0"], [1, 0, 2], {"labels": "classes"}),
    "marked": ([1, 0, -100], ["-100", "0", "1"], [2, 1, 0], {"labels": "classes"}),
    "soft names": ([{"no": 0.75, "yes": 0.25}, {"yes": 0.9, "no": 0.1}, {"yes": 1.0}],
                   ["no", "yes"], [[0.75, 0.25], [0.1, 0.9], [0, 1]]),
    "soft head": (SOFT, ["no", "yes"], SOFT, {"head": ["no", "yes"]}),
    "declared": ([2, 0, 1], NAMES, [2, 0, 1]),
    "numbered": ([2, 0, 2], ["0", "1", "2"], [2, 0, 2], {"head": NAMES}),
    "spelled": (["bad", "Bad", "GOOD"], ["GOOD", "bad", "fair"], [1, 1, 0], {"head": NAMES}),
    "sets": ([["b"], [], ["b", "a"]], ["a", "b"], [["b"], [], ["b", "a"]], SETS),
    "sets of numbers": ([[0, 1], [2], []], ["0", "1", "2"], [["0", "1"], ["2"], []], SETS),
    "sets numbered": ([[0], [2, 1], []], NAMES, [["good"], ["fair", "bad"], []],
                      {**SETS, "head": NAMES}),
    "sets spelled": ([["bad", "GOOD"], ["Bad"], ["fair"]], ["GOOD", "bad", "fair"],
                     [["bad", "GOOD"], ["bad"], ["fair"]], {**SETS, "head": NAMES}),
    **{f"hot {kind.__name__}": ([[*map(kind, row)] for row in HOT], ["0", "1"],
       [["0"], ["1"], ["0", "1"]], SETS) for kind in (int, float, bool)},
    "hot head": (HOT, ["no", "yes"], [["no"], ["yes"], ["no", "yes"]],
                 {**SETS, "head": ["no", "yes"]}),
    "columns": ([[1.0, 0], [0.0, 1], [1.0, 1]], ["rude", "toxic"],
                [["toxic"], ["rude"], ["toxic", "rude"]], {**SETS, "label_column": "toxic,rude"}),
}  # fmt: skip
NOTES = {"soft": "labels are probabilities", "hot": "labels are one-hot"}


def texts_of(rng, kinds):
    """Texts that all these kinds of file can carry; a quote alone is one in a .tsv."""
    between = [*ODD, '"'] if "tsv" in kinds else [*ODD, *QUOTED]
    while True:
        words = [rng.choice(["good", "film", "is", *between]) for _ in range(rng.randint(1, 6))]
        words += ["long" * 50_000] * (rng.random() < 0.01)  # more than Python's csv reads unasked
        yield f"{rng.choice('xyz')} {rng.choice(['', ' ']).join(words)} end"


class Table:
    """Rows for two drawn ``kinds`` of file, and for a kind with a row that ``breaks`` it.

    ``read`` has the columns ``stored`` of each row as they are read.
    """

    def __init__(self, rng, of):
        labels, self.classes, read, options = (*{**LABELS, **MORE}[of], {})[:4]
        self.rng, self.of, self.sets, head = rng, of, "task" in options, options.get("head")
        self.head = head and (MultiLabel if self.sets else Classification)(tuple(head))
        columns = options.get("label_column", "label").split(",")
        known = ARROW if of == "declared" else [*TABLES, "jsonl", "json", *ARROW]
        self.bare = len(columns) == 1 and "csv" in known and rng.random() < 0.2
        self.kinds = rng.choices(TABLES if self.bare else known, k=2)
        self.breaks = rng.choice([*TABLES, *["jsonl"] * (not self.bare)])
        pair, more = (["pair"] * rng.randint(0, 1), ["more"] * rng.randint(0, 1))
        self.names = ["text", *pair, *columns, *more]
        rng.shuffle(self.names)
        given = {"text_pair_column": "pair"} if pair else {}
        if self.bare:
            given |= {"text_column": "text", "label_column": "label"}
            given = {option: str(self.names.index(name)) for option, name in given.items()}
            given["no_header"] = True
        self.options = {name: x for name, x in options.items() if name != "head"} | given
        self.stored = ["text", *pair, PROBABILITIES if of.startswith("soft") else "label"]
        made, self.rows, self.read = texts_of(rng, [*self.kinds, self.breaks]), [], []
        for y in [0, 1, 2, *rng.choices(range(3), k=rng.randint(3, 37))]:
            row = {name: next(made) for name in self.names}
            row |= zip(columns, labels[y] if columns[1:] else [labels[y]], strict=True)
            self.rows.append(row)
            self.read.append((*(row[name] for name in ("text", *pair)), read[y]))

    def save(self, path, kind, rows):
        """The path of a file of ``rows``, and the number of each row."""
        path.parent.mkdir(exist_ok=True)
        path = path.with_suffix("" if kind == "saved" else f".{kind}")
        if kind in ARROW:
            data = datasets.Dataset.from_list(rows)
            if self.of == "declared":
                data = data.cast_column("label", datasets.ClassLabel(names=self.classes))
            data.to_parquet(path) if kind == "parquet" else data.save_to_disk(path)
            return path, [*range(1, len(rows) + 1)]
        text, numbers = self.written(kind, rows)
        content = self.rng.choice(["", "\ufeff"]).encode() + text.encode("utf-8", "surrogateescape")
        path = path.with_name(path.name + self.rng.choice(["", ".gz"]))
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        return path, numbers

    def written(self, kind, rows):
        """The text of a file of ``rows``, dictionaries or as written, and the number of each."""
        text, numbers, end = "", [], self.rng.choice(["\n", "\r\n"])
        head, blank = [self.names] * (kind in TABLES and not self.bare), self.rng.random() < 0.3
        for i, row in enumerate([*head, *rows]):
            text += end * (blank and i == 2)
            numbers.append(1 + (i if kind == "json" else text.count("\n")))
            if kind in TABLES:
                cells = map(self.cell, row.values() if isinstance(row, dict) else row)
                line = "\t".join(cells) if kind == "tsv" else quoted(cells)
            else:
                line = row if isinstance(row, str) else json.dumps(row, ensure_ascii=i % 2 == 0)
            before = ["[", ", "][i > 0] if kind == "json" else ""
            text += before + line + end
        text += "]" * (kind == "json")
        return self.rng.choice([text, text.removesuffix(end)]), numbers[len(head) :]

    def cell(self, value):
        """A value in a table."""
        if self.sets and isinstance(value, list):
            return "|".join(x if isinstance(x, str) else str(int(x)) for x in value)
        return json.dumps(value) if isinstance(value, list | dict) else str(value)

    def broken(self):
        """What a file has in place of a row: a dictionary, cells, or a line of JSON."""
        row = self.rows[0]
        changes = [("label", x) for x in ("", "nan", "NULL")]
        changes += [("text", x) for x in ("", " ") if "pair" not in row]  # one of two may be empty
        if self.breaks == "jsonl":
            changes += [("label", x) for x in (None, {}, [1], math.nan, math.inf)]
            changes += [("text", x) for x in (5, None, "\udcfc")]
        elif "\n" not in "".join(map(str, row.values())):  # the error names a line
            changes.append(("text", "\udcfc"))
        wrong = [{**row, name: x} for name, x in changes]
        wrong += [{n: x for n, x in row.items() if n != name} for name in ("text", "label")]
        lines = [json.dumps(row)[:-1], "[1]", "5", "null", "word", "[" * 100_000]
        return self.rng.choice(
            [*wrong, *(lines if self.breaks == "jsonl" else [[*row.values(), "wide"]])]
        )


def quoted(cells):
    """A line of a .csv file."""
    line = io.StringIO(newline="")
    csv.writer(line).writerow(cells)
    return line.getvalue().removesuffix("\r\n")


def test_every_kind_of_file_gives_the_same_rows(tmp_path, monkeypatch):
    """And a data set of the hub: all of them, or a sample; and a broken row is named."""
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, _, split: datasets.load_from_disk(f"{name}/{split}")
    )
    rng, limit = random.Random(FIRST), csv.field_size_limit()
    for of in (*LABELS, *MORE):
        table, folder = Table(rng, of), tmp_path / of
        (train, at), (evals, others) = (
            table.save(folder / name, kind, table.rows)
            for name, kind in zip(("train", "validation"), table.kinds, strict=True)
        )
        files = {"train": train, "evals": evals}
        files = {"data": str(folder)} if table.kinds == ["saved"] * 2 else files
        limits = {f"max_{name}_rows": rng.choice([None, None, 4, 30]) for name in ("train", "eval")}
        corpus = load(source(**files, **table.options, **limits), table.head)
        where = f"seed {FIRST}, {of}, {table.kinds}"
        assert corpus.names == table.classes, where
        for prefix, words in NOTES.items():
            assert (words in " ".join(corpus.notes)) == of.startswith(prefix), where
        for rows, numbers, most in (
            (corpus.train, at, limits["max_train_rows"]), (corpus.unlabelled, at, None),
            (corpus.evals[""], others, limits["max_eval_rows"]),
        ):  # fmt: skip
            every = [(n, *row) for n, row in zip(numbers, table.read, strict=True)]
            every = [x for x in every if (x[-1] == -100) == (rows is corpus.unlabelled)]
            found = [] if rows is None else [*rows.columns("number", *table.stored)]
            kept = {row[0] for row in found}
            assert found == [row for row in every if row[0] in kept], where
            assert len(found) == min(most or len(every), len(every)), where
            if PROBABILITIES in table.stored and found:
                assert rows.labels.tolist() == [np.argmax(row[-1]) for row in found], where
        for _ in range(2 * (of in LABELS)):
            at = rng.randint(3, len(table.rows))
            rows = [*table.rows[:at], table.broken(), *table.rows[at:]]
            wrong, numbers = table.save(folder / "wrong", table.breaks, rows)
            files = rng.choice([{"train": wrong, "evals": evals}, {"train": train, "evals": wrong}])
            with pytest.raises(InputError) as error:
                load(source(**files, **table.options))
            assert f"{wrong.name}, row {numbers[at]}: " in str(error.value), (where, error.value)
    assert csv.field_size_limit() == limit
