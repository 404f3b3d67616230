"""Rows of files and of the hub: GLUE's, columns of every task, and classes that are known.

Labels in every kind of file are drawn in test_drawn_files.py.
"""

import json
import math

import datasets
import numpy as np
import pytest

from fastkd.train.data import describe, load
from fastkd.train.errors import InputError
from fastkd.train.tasks.classification import Classification
from fastkd.train.tasks.multi_label import MultiLabel
from fastkd.train.tasks.token_classification import TokenClassification
from tests.support.runs import made
from tests.support.tiny import make_teacher, run, source, write_tsv
from tests.train.tasks.through import rows_of, says

NAN = math.nan
HEAD = "text\tlabel\n"
NAMES = ("good", "bad", "fair")
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
    *(("token-classification", "conll", text, ("number", *ONE), [expected])
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
        found = [*map(list, corpus.train.columns(*columns))]
        np.testing.assert_equal(found, [*map(list, expected)], task)  # NaN is NaN
        assert not metrics or corpus.metrics == (*metrics,)


def test_a_folder_is_read_file_by_file_and_parquet_fills_objects(tmp_path):
    path, talk = tmp_path / "a.parquet", [{"name": "Ada", **says("a film")[0]}, *says("", "b")[1:]]
    datasets.Dataset.from_list([{"messages": talk}]).to_parquet(path)
    assert [[*map(json.loads, x)] for x in rows_of(path, "chat").column("text")] == [talk]
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, text in (("a.txt", "a\n\nb\n"), ("b.jsonl", '{"text": "c"}'), ("notes.md", "no")):
        (folder / name).write_text(text)
    assert rows_of(folder, "causal-lm").texts == ["a", "b", "c"]


UNKNOWN, OTHERWISE = "row 2: label .* is no class of the model", "as such .* numbered; pass --label"


def test_labels_are_classes_of_a_finished_model(tmp_path):
    for names, labels, expected in (
        (["0", "1"], ("1.0", "00"), [1, 0]), (["1", "-1"], ("-1", "1", "+1"), [1, 0, 0]),
        ([str(i) for i in range(11)], ("1.0", "10"), [1, 10]),
        (["not_entailment", "entailment"], ("Not-Entailment", "ENTAILMENT"), [0, 1]),
        (["C", "c", "C++"], ("c", "C", "C++"), [1, 0, 2]), (["+", "-"], ("++",), UNKNOWN),
        (NAMES, ("bad", "Bad", "GOOD", "fair"), [1, 1, 0, 2]),
        (["0", "1"], ("-1",), UNKNOWN), (["C", "c"], ("C++",), UNKNOWN),
        # Numbers, some of which usually mean another class.
        (["neg", "pos"], "1", [1]), (["cat", "dog"], "0", [0]),
        (["entailment", "neutral", "contradiction"], "2", [2]),
        (["pos", "neg"], "1", OTHERWISE), (["True", "False"], "0", OTHERWISE),
        (["contradiction", "neutral", "entailment"], "2", OTHERWISE),
        (["positive", "negative", "neutral"], "2", OTHERWISE),
    ):  # fmt: skip
        text = HEAD + "".join(f"x\t{label}\n" for label in labels)
        rows, task = rows_of(tmp_path / "a.tsv", "classification", text), Classification((*names,))
        if isinstance(expected, str):
            with pytest.raises(InputError, match=expected):
                task.prepare(rows)
        else:
            assert task.prepare(rows).rows.labels.tolist() == expected
    assert task.prepare(rows, order="2,1,0").rows.labels.tolist() == [0]
    assert "2 is 'fair'" in " ".join(Classification(NAMES).prepare(rows).notes)


HOT = [{"text": "a", "labels": row} for row in ([1, 0], [0, 1])]
SETS = {"task": "multi-label", "kind": "jsonl"}


def test_classes_of_two_files(loaded, tmp_path):
    corpus = loaded(HEAD + "x\tgood\ny\tbad\nz\tpositive\n", HEAD + "x\tGood\ny\tPOSITIVE\n")
    assert corpus.evals[""].labels.tolist() == [1, 2]
    for train, evals, options, words in (
        (HEAD + "a\t0\nb\t1\n", HEAD + "a\t-100\n", {}, "no row has a label, all are -100"),
        (HOT, [HOT[0], {"text": "b", "labels": [1]}], SETS, "row 2: its labels are not the 2 "),
        ("text,toxic,rude\na,1,2\n", None, {**SETS, "kind": "csv", "label_column": "toxic,rude"},
         "row 2: column 'rude' holds neither 0 nor 1 but '2'"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            loaded(train, evals, **options)
    hot = rows_of(tmp_path / "a.jsonl", MultiLabel, HOT)
    assert "0 is 'good', 1 is 'bad'" in " ".join(MultiLabel(NAMES[:2]).read_labels(hot).notes)
    with pytest.raises(InputError, match="lists of 2 zeros and ones, and the model has 3"):
        MultiLabel(NAMES).read_labels(hot)


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
    run("cache", **options, teacher=teacher, out=cache)
    _, models = made(**options, teacher_cache=cache)
    assert [*models.student.config.id2label.values()] == ["Good", "bad", "fair"]


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
    """Of GLUE, and of any data set: test_drawn_files.py."""
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
    folders["tags"].select([0]).save_to_disk(tmp_path / "one")
    path = tmp_path / "one"
    corpus = load(source(train=path, evals=path, task="token-classification"))
    assert corpus.names == [*TAGS] and list(corpus.train.column("label")) == [["B-LOC", "O"]]
