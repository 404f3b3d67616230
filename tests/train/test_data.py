"""Rows of files and of the hub: GLUE's, columns of every task, and classes that are known.

Of drawn tables every kind of file gives the rows: texts with whatever a format can carry, and
labels of every kind. A failure prints the seed (FASTKD_TEST_SEED).
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
from fastkd.train.data import describe, load
from fastkd.train.errors import InputError
from fastkd.train.tasks.base import reorder_classes
from fastkd.train.tasks.classification import Classification
from fastkd.train.tasks.multi_label import MultiLabel
from fastkd.train.tasks.token_classification import TokenClassification
from tests.support.draw import FIRST
from tests.support.runs import made
from tests.support.tiny import make_teacher, run, source, write_tsv
from tests.train.tasks.through import rows_of, says

HEAD = "text\tlabel\n"
NAMES = ["good", "bad", "fair"]
TAGS = ("O", "B-LOC", "I-LOC")


@pytest.fixture
def loaded(tmp_path):
    """The corpus of two files of these texts, or rows of JSON; ``head`` is a finished teacher's."""

    def loaded(train, evals=None, kind="tsv", head=None, **options):
        paths = {}
        for name, rows in (("train", train), ("evals", train if evals is None else evals)):
            paths[name] = tmp_path / f"{name}.{kind}"
            text = rows if isinstance(rows, str) else "\n".join(map(json.dumps, rows))
            paths[name].write_text(text, encoding="utf-8")
        return load(source(**paths, **options), head)

    return loaded


ONE, TWO = ("text", "label"), ("text", "pair", "label")
#: Task, kind of file, text or rows of JSON, columns, their content, and the metrics of GLUE's.
FORMS = [
    ("sst2", "tsv", 'sentence\tlabel\nit "works\t1\nit doesn\'t \t0\nno " quote rules\t1\n', ONE,
     [('it "works', 1), ("it doesn't ", 0), ('no " quote rules', 1)], "accuracy"),
    ("cola", "tsv", "gj04\t1\t\tThey drank it.\ngj04\t0\t*\tThey drank the pub.", ONE,
     [("They drank it.", 1), ("They drank the pub.", 0)], "mcc"),
    ("cola", "csv", "sentence,label\nabc,1\ndef,0\n", ONE, [("abc", 1), ("def", 0)], "mcc"),
    ("stsb", "tsv", "sentence1\tsentence2\tscore\nA.\tB.\t5\nC.\tD.\t0.25\n", TWO,
     [("A.", "B.", 5.0), ("C.", "D.", 0.25)], "pearson", "spearman"),
    *((task, "tsv", f"{head}\nentailment\tA b.\tC d.\ncontradiction\tA b.\tC d.\n", TWO,
       [("A b.", "C d.", 1), ("A b.", "C d.", 0)], *metrics) for task, head, *metrics in (
        ("mrpc", "Quality\t#1 String\t#2 String", "f1", "accuracy"),
        ("qqp", "is_duplicate\tquestion1\tquestion2", "f1", "accuracy"),
        ("mnli", "gold_label\tsentence1\tsentence2", "accuracy"),
        ("qnli", "label\tquestion\tsentence", "accuracy"),
        ("rte", "label\tsentence1\tsentence2", "accuracy"),
    )),
    ("mnli", "jsonl", [{"premise": "p", "hypothesis": "h", "label": y} for y in (1, 0)], TWO,
     [("p", "h", 1), ("p", "h", 0)], "accuracy"),
    ("embedding", "csv", "anchor,positive,negative_1,negative_2\na,b,c,d\n",
     ("text", "pair", "negatives", "label"), [("a", "b", ["c", "d"], None)]),
    *(("embedding", "jsonl", [{"query": "a", "passage": "b", **more} for more in rows],
       ("pair", "negatives"), [("b", more.get("negatives", [])) for more in rows])
      for rows in ([{"negatives": ["c"]}, {}], [{}, {"negatives": ["c"]}])),
    ("embedding", "txt", "good film\nbad film\n", TWO[1:], [(None, None)] * 2),
    *(("reranking", "jsonl", [row], TWO, [("q", ["a", "b", "c"], [1.0, 0.0, 0.0, *label])])
      for row, label in (
        ({"query": "q", "pos": ["a"], "neg": ["b", "c"], "pos_scores": [2], "neg_scores": [1, 0]},
         [2.0, 1.0, 0.0]),
        ({"anchor": "q", "positive": "a", "negative_1": "b", "negative_2": "c", "label": [1, 3]},
         [0.0, -1.0, -3.0]),
        ({"query": "q", "positive": "a", "negative": ["b", "c"], "scores": [3, 2, 1]},
         [3.0, 2.0, 1.0]),
    )),
    ("reranking", "csv", "anchor,positive,negative,label\nq,a,b,0.5\n", ("number", "label"),
     [(2, [1.0, 0.0, 0.0, -0.5])]),
    ("multiple-choice", "csv", "id,sent1,sent2,ending0,ending1,label\n1,q,so,a,b,1\n", TWO,
     [("q", ["so a", "so b"], 1)]),
    # No-break spaces part no word, and comments are none.
    *(("token-classification", "conll", text, ("number", *ONE), [(*expected,)])
      for text, *expected in (
        ("1\u00a0000 B-NUM\nfilm\tO\n", 1, ["1\u00a0000", "film"], ["B-NUM", "O"]),
        ("# sent_id = 1\n# text = EU\n# NN B-X O\nEU NNP B-NP B-ORG\n\n# newdoc = x\n",
         3, ["#", "EU"], ["O", "B-ORG"]),
        ("\n# newdoc\n#sent_id = 1\nEU\tB-ORG\n# a note\n#\tO\n#eu\tO\n",
         4, ["EU", "#", "#eu"], ["B-ORG", "O", "O"]),
    )),
]  # fmt: skip


def test_forms_of_rows(loaded):
    for task, kind, text, columns, expected, *metrics in FORMS:
        corpus = loaded(text, kind=kind, task=task)
        assert [*corpus.train.columns(*columns)] == [*expected], task
        assert not metrics or corpus.metrics == (*metrics,)


def test_a_folder_is_read_file_by_file_and_parquet_fills_objects(tmp_path):
    path, talk = tmp_path / "a.parquet", [{"name": "Ada", **says("a film")[0]}, *says("", "b")[1:]]
    datasets.Dataset.from_list([{"messages": talk}]).to_parquet(path)
    assert [[*map(json.loads, x)] for x in rows_of(path, "chat").column("text")] == [talk]
    (folder := tmp_path / "folder").mkdir()
    for name, text in (("a.txt", "a\n\nb\n"), ("b.jsonl", '{"text": "c"}'), ("notes.md", "no")):
        (folder / name).write_text(text)
    assert rows_of(folder, "causal-lm").texts == ["a", "b", "c"]


def test_labels_are_classes_of_a_finished_model(tmp_path):
    unknown, otherwise = "row 2: label .* is no class of the", "as such .* numbered; pass --label"
    for names, labels, expected in (
        (["0", "1"], ("1.0", "00"), [1, 0]), (["1", "-1"], ("-1", "1", "+1"), [1, 0, 0]),
        ([str(i) for i in range(11)], ("1.0", "10"), [1, 10]),
        (["not_entailment", "entailment"], ("Not-Entailment", "ENTAILMENT"), [0, 1]),
        (["C", "c", "C++"], ("c", "C", "C++"), [1, 0, 2]), (["+", "-"], ("++",), unknown),
        (["0", "1"], ("-1",), unknown), (["C", "c"], ("C++",), unknown),
        # Numbers, some of which usually mean another class.
        (["neg", "pos"], "1", [1]), (["cat", "dog"], "0", [0]),
        (["entailment", "neutral", "contradiction"], "2", [2]),
        (["pos", "neg"], "1", otherwise), (["True", "False"], "0", otherwise),
        (["contradiction", "neutral", "entailment"], "2", otherwise),
        (["positive", "negative", "neutral"], "2", otherwise),
    ):  # fmt: skip
        text = HEAD + "".join(f"x\t{label}\n" for label in labels)
        rows, task = rows_of(tmp_path / "a.tsv", "classification", text), Classification((*names,))
        if isinstance(expected, str):
            with pytest.raises(InputError, match=expected):
                task.prepare(rows)
        else:
            assert task.prepare(rows).rows.labels.tolist() == expected
    assert task.prepare(rows, order="2,1,0").rows.labels.tolist() == [0]
    assert "2 is 'fair'" in " ".join(Classification(tuple(NAMES)).prepare(rows).notes)


def test_classes_of_two_files(loaded, tmp_path):
    sets = [{"text": "a", "labels": row} for row in ([1, 0], [0, 1])]
    multi = {"task": "multi-label", "kind": "jsonl"}
    corpus = loaded(HEAD + "x\tgood\ny\tbad\nz\tpositive\n", HEAD + "x\tGood\ny\tPOSITIVE\n")
    assert corpus.evals[""].labels.tolist() == [1, 2]
    for train, evals, options, words in (
        (HEAD + "a\t0\nb\t1\n", HEAD + "a\t-100\n", {}, "no row has a label, all are -100"),
        (sets, [sets[0], {"text": "b", "labels": [1]}], multi, "row 2: its labels are not the 2 "),
        ("text,toxic,rude\na,1,2\n", None, {**multi, "kind": "csv", "label_column": "toxic,rude"},
         "row 2: column 'rude' holds neither 0 nor 1 but '2'"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            loaded(train, evals, **options)
    hot = rows_of(tmp_path / "a.jsonl", MultiLabel, sets)
    notes = MultiLabel(("good", "bad")).read_labels(hot).notes
    assert "0 is 'good', 1 is 'bad'" in " ".join(notes)
    with pytest.raises(InputError, match="lists of 2 zeros and ones, and the model has 3"):
        MultiLabel(tuple(NAMES)).read_labels(hot)


def test_rows_and_classes_are_described(loaded, tmp_path):
    more, marked = tmp_path / "more.txt", HEAD + "a\t0\nb\t1\nc\t-100\n" * 3
    more.write_text("d\n")
    few, rare = HEAD + "a\tneg\nb\tpos\n" * 20, HEAD + "".join(f"x\tno {i}\n" for i in range(60))
    odd, head = HEAD + "x\t1\nx\t1.0\nx\tso_\nx\tSO\n", ("neg", "pos", "pso", "far", "none")
    for train, evals, options, *words in (
        (marked, None, {"unlabelled": more}, "4 rows without labels", "3 of 9 rows have no label"),
        (marked, None, {"labels": "numbers"}, "3 training labels are -100, a number here"),
        (rare, None, {"metric": "f1"}, "60 classes\n", "40 more classes are as rare",
         "f1 is the mean of those of all classes"),
        (odd, None, {"labels": "classes"}, "'1' and '1.0' look alike", "'SO' and 'so_' look alike"),
        (few + "c\tpso\nd\tfar\nd\tfar\n", few, {"head": Classification(head)},
         ": neg 20/20, pos 20/20, pso 1/0, far 2/0, none 0/0", "'far' has no evaluation row",
         "'pso' has a single training row, row 42; is it 'pos'", "'none' has no training row",
         "40 of the 40 evaluation rows are training rows too"),
    ):  # fmt: skip
        said = "\n".join(describe(loaded(train, evals, **options)))
        assert all(part in said for part in words), said


def test_classes_of_a_cache(tmp_path):
    """They are its teacher's, though the rows lack some or spell them otherwise."""
    train = write_tsv(tmp_path / "train.tsv", 12, label=lambda y: ["Good", "bad"][y])
    evals = write_tsv(tmp_path / "eval.tsv", 12, 1, label=lambda y: ["fair", "bad"][y])
    options = dict(method="soft_targets", train=train, eval=evals, device="cpu")
    teacher, cache = make_teacher(tmp_path / "teacher", NAMES), tmp_path / "cache"
    run("cache", **options, teacher=teacher, out=cache, max_length=9)
    _, models = made(**options, teacher_cache=cache)
    assert [*models.student.config.id2label.values()] == ["Good", "bad", "fair"]
    assert models.max_length == 9  # the cache's


def test_numbers_of_tags(loaded):
    """Of a finished teacher's tags, unless it has none."""
    rows = [{"tokens": ["good", "film"], "labels": [1, 0]}, {"tokens": ["film"], "labels": [2]}]
    tags = {"task": "token-classification", "kind": "jsonl"}
    corpus = loaded(rows, **tags, head=TokenClassification(TAGS))
    assert corpus.names == [*TAGS] and corpus.metrics[0] == "f1"
    assert next(corpus.train.column("label")) == ["B-LOC", "O"]
    assert "1 is 'B-LOC'" in " ".join(describe(corpus))
    none = TokenClassification(("LABEL_0", "LABEL_1", "LABEL_2"))
    assert loaded(rows, **tags, head=none).names == ["0", "1", "2"]


def declared(names, column="label", **columns):
    """A data set with these columns, one of which has numbers of ``names``."""
    kind = datasets.ClassLabel(names=[*names])
    kind = kind if column == "label" else datasets.List(kind)
    return datasets.Dataset.from_dict(columns).cast_column(column, kind)


def hub(monkeypatch, splits):
    """datasets.load_dataset answering from memory; returns the calls that were made."""
    calls = []

    def load_dataset(name, config=None, *, split):
        calls.append((name, config, split))
        rows = splits[split]
        return datasets.Dataset.from_dict(rows) if isinstance(rows, dict) else rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def test_rows_of_the_hub(monkeypatch):
    names = ["train", "validation_matched", "validation_mismatched"]
    rows = declared("enc", premise=["a", "b"], hypothesis=["c", "d"], label=[2, 0])
    splits = dict.fromkeys(names, rows)
    splits["dev"] = {"text": ["a", "b"], "label": [0.5, 1.0]}
    calls = hub(monkeypatch, splits)
    corpus = load(source(task="mnli"))
    assert calls == [("nyu-mll/glue", "mnli", name) for name in names]
    assert list(corpus.evals) == ["", "mm"] and corpus.names == ["e", "n", "c"]
    assert corpus.train.pairs == ["c", "d"] and corpus.train.labels.tolist() == [2, 0]
    corpus = load(source(data="some/set", train_split="dev", eval_split="dev"))
    assert calls[3:] == [("some/set", None, "dev")] * 2
    assert corpus.names is None and corpus.train.labels.tolist() == [0.5, 1.0]
    with pytest.raises(InputError, match="--task nyu-mll/glue, split 'none': 'none'"):
        load(source(task="sst2", train_split="none"))


def test_data_sets_with_names_of_classes(tmp_path):
    tags = {"tokens": [["a", "film"], ["good"]], "labels": [[1, 0], [-1]]}
    none = declared("xy", text=["a"], label=[None])
    folders = {"a": none, "b": none, "tags": declared(TAGS, "labels", **tags)}
    datasets.DatasetDict(folders).save_to_disk(tmp_path)
    (tmp_path / "b/data-00000-of-00001.arrow").write_bytes(b"no")
    for name, words in (
        ("", "several splits; give one of them: a, b, tags"), ("a", "row 1: no label"),
        ("b", "--train .*/b: can't be read"), ("tags", "row 2: no label"),
    ):  # fmt: skip
        path, task = tmp_path / name, "token-classification" if name == "tags" else None
        with pytest.raises(InputError, match=words):
            load(source(train=path, evals=path, task=task))
    folders["tags"].select([0]).save_to_disk(path := tmp_path / "one")
    corpus = load(source(train=path, evals=path, task="token-classification"))
    assert corpus.names == [*TAGS] and list(corpus.train.column("label")) == [["B-LOC", "O"]]


ODD = ["é", "\u2028", "\x0b", "'", "#", ";", "\U0001f4a9", "\x1c", "(a|b)", "\\", "  ", "�", "ﬁ"]
QUOTED = ['"', '""', ",", "\n", "\r\n", "\t"]
TABLES, ARROW = ["tsv", "csv"], ["parquet", "saved", "saved"]  # two saved ones are the hub's
SETS = {"task": "multi-label", "label_column": "label"}
HOT = [[1, 0], [0, 1], [1, 1]]
SOFT = [[0.25, 0.75, 0.0], [0.8, 0.1, 0.1], [0.25, 0.25, 0.5]]
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
    "soft lists": (SOFT, ["0", "1", "2"], SOFT),
    "soft words": (['{"no": 0.74, "yes": 0.25}', "yes", "no"], ["no", "yes"],
                   [[0.74 / 0.99, 0.25 / 0.99], [0, 1], [1, 0]]),
}  # fmt: skip
#: Kinds of which no row is drawn broken. The classes of some are those of a finished ``head``.
MORE = {
    "versions": (["1.5", "0.5", "1_0"], ["0.5", "1.5", "1_0"], [1, 0, 2], {"labels": "classes"}),
    "marked": ([1, 0, -100], ["-100", "0", "1"], [2, 1, 0], {"labels": "classes"}),
    "soft names": ([{"no": 0.75, "yes": 0.25}, {"yes": 0.9, "no": 0.1}, {"yes": 1.0}],
                   ["no", "yes"], [[0.75, 0.25], [0.1, 0.9], [0, 1]]),
    "soft head": (SOFT, [*"yes"], SOFT, {"head": [*"yes"]}),
    "declared": ([2, 0, 1], NAMES, [2, 0, 1]),
    "numbered": ([2, 0, 2], ["0", "1", "2"], [2, 0, 2], {"head": NAMES}),
    "spelled": (["BAD", "Bad", "GOOD"], ["GOOD", "bad", "fair"], [1, 1, 0], {"head": NAMES}),
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


def texts_of(rng, kinds):
    """Texts that all these kinds of file can carry; a quote alone is one in a .tsv."""
    between = [*ODD, '"'] if "tsv" in kinds else [*ODD, *QUOTED]
    while True:
        words = [rng.choice(["good", "film", "is", *between]) for _ in range(rng.randint(1, 6))]
        words += ["long" * 50_000] * (rng.random() < 0.01)  # more than Python's csv reads unasked
        yield f"{rng.choice('xyz')} {rng.choice(['', ' ']).join(words)} end"


class Table:
    """Rows, as written and as ``read``, for two ``kinds`` of file and one that a row ``breaks``."""

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
                cells = [*map(self.cell, row.values() if isinstance(row, dict) else row)]
                csv.writer(quoted := io.StringIO(newline="")).writerow(cells)
                line = "\t".join(cells) if kind == "tsv" else quoted.getvalue()[:-2]
            else:
                line = row if isinstance(row, str) else json.dumps(row, ensure_ascii=i % 2 == 0)
            before = ["[", ", "][i > 0] if kind == "json" else ""
            text += before + line + end
        text += "]" * (kind == "json")
        return self.rng.choice([text, text.removesuffix(end)]), numbers[len(head) :]

    def cell(self, value):
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
        wide = [[*row.values(), "wide"]]
        return self.rng.choice([*wrong, *(lines if self.breaks == "jsonl" else wide)])


def test_every_kind_of_file_gives_the_same_rows(tmp_path, monkeypatch):
    """And a data set of the hub: all of them, or a sample; and a broken row is named."""
    of_disk = datasets.load_from_disk
    monkeypatch.setattr(datasets, "load_dataset", lambda name, _, split: of_disk(f"{name}/{split}"))
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
        if corpus.names and not table.sets:  # a teacher may have its classes in another order
            turned = reorder_classes([*corpus.names[1:], corpus.names[0]], corpus).train
            assert (turned.labels == (corpus.train.labels - 1) % len(corpus.names)).all(), where
            if PROBABILITIES in table.stored:
                likely = [[*row[1:], row[0]] for row in corpus.train.column(PROBABILITIES)]
                assert [*turned.column(PROBABILITIES)] == likely, where
        for prefix, words in (("soft", "labels are probabilities"), ("hot", "labels are one-hot")):
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
