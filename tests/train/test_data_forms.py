"""Forms of labelled rows: declared classes, saved data sets, one-hot lists, a column each."""

import json
import math

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from fastkd.train.arrow_rows import PROBABILITIES
from fastkd.train.data import describe, load, read_file
from fastkd.train.errors import InputError
from fastkd.train.tasks import Columns
from fastkd.train.tasks.classification import Classification
from fastkd.train.tasks.multi_label import MultiLabel
from fastkd.train.tasks.token_classification import TokenClassification
from tests.support.runs import first_step, made
from tests.support.tiny import make_teacher, run, sentences, source, write_tsv
from tests.train.tasks.through import rows_of, says, write_jsonl, write_text

NAN = math.nan
TALK = says("a film", "good", "so", "bad")
#: Task, kind of file, its text or rows of JSON, columns, and their content.
FORMS = [
    ("embedding", "jsonl", [{"sentence1": "a", "sentence2": "b", "score": 3}],
     ("text", "pair", "label"), [("a", "b", 3.0)]),
    ("embedding", "csv", "anchor,positive,negative_1,negative_2\na,b,c,d\n",
     ("text", "pair", "negatives", "label"), [("a", "b", ["c", "d"], None)]),
    *(("embedding", "jsonl", [{"query": "a", "passage": x, **more} for x, more in rows],
       ("pair", "negatives"), [(x, more.get("negatives", [])) for x, more in rows])
      for one in [("b", {"negatives": ["c"]})] for rows in ([one, ("d", {})], [("d", {}), one])),
    ("embedding", "txt", "good film\nbad film\n", ("pair", "label"), [(None, None)] * 2),
    *(("reranking", "jsonl", [row], ("text", "pair", "label"),
       [("q", ["a", "b", "c"], [1.0, 0.0, 0.0, *label])]) for row, label in (
        ({"query": "q", "pos": ["a"], "neg": ["b", "c"]}, [NAN] * 3),
        ({"query": "q", "pos": ["a"], "neg": ["b", "c"], "pos_scores": [2], "neg_scores": [1, 0]},
         [2.0, 1.0, 0.0]),
        ({"anchor": "q", "positive": "a", "negative_1": "b", "negative_2": "c", "label": [1, 3]},
         [0.0, -1.0, -3.0]),
        ({"query": "q", "positive": "a", "negative": ["b", "c"], "scores": [3, 2, 1]},
         [3.0, 2.0, 1.0]),
    )),
    ("reranking", "csv", "anchor,positive,negative,label\nq,a,b,0.5\n", ("label",),
     [([1.0, 0.0, 0.0, -0.5],)]),
    ("multiple-choice", "csv", "id,sent1,sent2,ending0,ending1,label\n1,q,so,a,b,1\n",
     ("text", "pair", "label"), [("q", ["so a", "so b"], 1)]),
    ("question-answering", "jsonl", [{"id": "q", "question": "a", "context": "a b", "answers": {
        "text": ["b"], "answer_start": [2]}}], ("id", "label"),
     [("q", {"text": ["b"], "answer_start": [2]})]),
    # No-break spaces part no word, and comments are none.
    *(("token-classification", "conll", text, names, [expected]) for text, names, expected in (
        ("1\u00a0000 B-NUM\nfilm\tO\n", ("text", "label"),
         (["1\u00a0000", "film"], ["B-NUM", "O"])),
        ("# sent_id = 1\n# text = EU\n# NN B-X O\nEU NNP B-NP B-ORG\n\n# newdoc = x\n",
         ("text", "label"), (["#", "EU"], ["O", "B-ORG"])),
        ("\n# newdoc\n#sent_id = 1\nEU\tB-ORG\n# a note\n#\tO\n#eu\tO\n", ("number", "text"),
         (4, ["EU", "#", "#eu"])),
    )),
    ("chat", "csv", "instruction,output\nSay good.,good\n", ("text",),
     [([*map(json.dumps, says("Say good.", "good"))],)]),
]  # fmt: skip


@pytest.mark.parametrize(("task", "kind", "text", "columns", "expected"), FORMS)
def test_forms_of_rows(tmp_path, task, kind, text, columns, expected):
    found = [*rows_of(tmp_path / f"a.{kind}", task, text).columns(*columns)]
    if task == "chat":
        found = [tuple([json.dumps(json.loads(x)) for x in row] for row in each) for each in found]
    if len(columns) == 1:
        found = [x if isinstance(x, tuple) else (x,) for x in found]
    np.testing.assert_equal(found, expected)  # NaN is NaN


def test_a_folder_is_read_file_by_file_and_parquet_fills_objects(tmp_path):
    row, folder = {"name": "Ada", **TALK[0]}, tmp_path / "folder"
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"messages": [[row, TALK[1]]]}), path)
    (found,) = rows_of(path, "chat").column("text")
    assert [*map(json.loads, found)] == [row, TALK[1]]
    folder.mkdir()
    write_text(folder / "a.txt", 2)
    write_jsonl(folder / "b.jsonl", [{"text": "bad film"}])
    (folder / "notes.md").write_text("not read")
    texts = [*(text for text, _ in sentences(2, 0)), "bad film"]
    assert rows_of(folder, "causal-lm").texts == texts


def test_probabilities_of_classes(tmp_path):
    """By name, and beside labels; lists: test_drawn_files.py."""
    soft = {"no": 0.75, "yes": 0.25}
    for other, expected in (({"yes": 0.9, "no": 0.1}, [0.1, 0.9]), ("yes", [0.0, 1.0])):
        path = write_jsonl(tmp_path / "a.jsonl", [{"text": x, "label": soft} for x in "abc"]
                           + [{"text": "d", "label": other}])  # fmt: skip
        corpus = load(source(train=path, evals=path))
        assert corpus.names == ["no", "yes"]
        (*_, last) = (x for _, x in corpus.train.columns("label", PROBABILITIES))
        assert last == pytest.approx(expected) and "labels are probabilities" in " ".join(
            describe(corpus)
        )


NAMES = ["good", "bad", "fair"]
TAGS = ["O", "B-LOC", "I-LOC"]


def data_set(columns, **features):
    kinds = {"text": datasets.Value("string"), **features}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


@pytest.mark.parametrize("form", ["parquet", "folder"])
def test_declared_classes_count(tmp_path, form):
    """The names in a file's metadata were ignored: numbers took the order of the teacher's head."""

    def saved(data, name):
        path = tmp_path / (f"{name}.parquet" if form == "parquet" else name)
        data.to_parquet(path) if form == "parquet" else data.save_to_disk(path)
        return {"train": path, "evals": path}

    columns = {"text": ["a", "b", "c"], "label": [2, 0, 1]}
    data = data_set(columns, label=datasets.ClassLabel(names=NAMES))
    corpus = load(source(**saved(data, "rows")))
    assert corpus.names == NAMES and corpus.train.labels.tolist() == [2, 0, 1]
    # Integer tags with names.
    tags = data_set(
        {"tokens": [["a", "b"]], "ner_tags": [[1, 0]], "text": [""]},
        tokens=datasets.List(datasets.Value("string")),
        ner_tags=datasets.List(datasets.ClassLabel(names=TAGS)),
    )
    options = {"task": "token-classification", "label_column": "ner_tags"}
    corpus = load(source(**options, **saved(tags, "tags")))
    assert corpus.names == TAGS and list(corpus.train.column("label")) == [["B-LOC", "O"]]
    assert corpus.metrics[0] == "f1"


def test_mistakes_in_declared_classes(tmp_path):
    one, both = tmp_path / "a.parquet", tmp_path / "both"
    for label in (-1, None):
        data = data_set({"text": ["a"], "label": [label]}, label=datasets.ClassLabel(names=NAMES))
        data.to_parquet(one)
        with pytest.raises(InputError, match="row 1: no label"):
            load(source(train=one, evals=one))
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(both)
    with pytest.raises(InputError, match="several splits; give one of them: test, train"):
        load(source(train=both, evals=both))
    (both / "train/data-00000-of-00001.arrow").write_bytes(b"no")
    with pytest.raises(InputError, match=r"--train .*both/train: can't be read"):
        load(source(train=both / "train", evals=one))


def write_rows(path, *labels):
    rows = [{"text": f"row {i}", "labels": x} for i, x in enumerate(labels)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("number", [int, float, bool])
def test_one_hot_rows(tmp_path, number):
    rows = ([1, 0], [0, 1], [0, 0], [1, 1])
    path = write_rows(tmp_path / "a.jsonl", *([number(x) for x in row] for row in rows))
    corpus = load(source(task="multi-label", train=path, evals=path))
    assert corpus.names == ["0", "1"]
    assert list(corpus.train.column("label")) == [["0"], ["1"], [], ["0", "1"]]
    assert "labels are one-hot, 2 zeros and ones for each row" in " ".join(describe(corpus))
    # With a finished model the lists have the order of its classes.
    raw = rows_of(path, MultiLabel)
    found = MultiLabel(("good", "bad")).read_labels(raw)
    assert list(found.rows.column("label")) == [["good"], ["bad"], [], ["good", "bad"]]
    assert "0 is 'good', 1 is 'bad'" in " ".join(found.notes)
    with pytest.raises(InputError, match="lists of 2 zeros and ones, and the model has 3"):
        MultiLabel(("a", "b", "c")).read_labels(raw)
    odd = write_rows(tmp_path / "b.jsonl", [0, 1], [1])
    with pytest.raises(InputError, match="row 2: its labels are not the 2 zeros and ones"):
        load(source(task="multi-label", train=path, evals=odd))
    ids = write_rows(tmp_path / "c.jsonl", [0, 1], [2], [])
    assert load(source(task="multi-label", train=ids, evals=ids)).names == ["0", "1", "2"]


def test_a_column_for_each_label(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,toxic,rude\na,1,0\nb,0,1\nc,0,0\nd,1.0,1\n")
    given = source(task="multi-label", train=path, evals=path, label_column="toxic,rude")
    corpus = load(given)
    assert corpus.names == ["rude", "toxic"]
    assert list(corpus.train.column("label")) == [["toxic"], ["rude"], [], ["toxic", "rude"]]
    with pytest.raises(InputError, match=r"no column 'rud'.*did you mean 'rude'"):
        load(source(task="multi-label", train=path, evals=path, label_column="toxic,rud"))
    path.write_text("text,toxic,rude\na,1,2\n")
    with pytest.raises(InputError, match="row 2: column 'rude' holds neither 0 nor 1 but '2'"):
        load(given)


def test_a_finished_teachers_classes(tmp_path):
    teacher = make_teacher(tmp_path / "teacher", NAMES)
    train = write_tsv(tmp_path / "train.tsv", 12, label=lambda y: ["Good", "bad"][y])
    evals = write_tsv(tmp_path / "eval.tsv", 12, 1, label=lambda y: ["fair", "bad"][y])
    options = dict(teacher=teacher, method="soft_targets", epochs=1, device="cpu", batch_size=8)
    found, models = made(**options, train=train, eval=evals)
    assert "class 'fair' has no training row" in "\n".join(describe(found.data.corpus))
    assert [*models.student.config.id2label.values()] == ["Good", "bad", "fair"]
    # Numbers of classes, of which one is missing.
    numbered = write_tsv(tmp_path / "numbers.tsv", 12, label=lambda y: [0, 2][y])
    found = load(source(train=numbered, evals=numbered), Classification(tuple(NAMES)))
    assert found.names == ["0", "1", "2"] and {*found.train.labels.tolist()} == {0, 2}
    run("cache", teacher=teacher, train=numbered, eval=numbered, device="cpu",
        method="soft_targets", out=tmp_path / "cache")  # fmt: skip
    cached = {**options, "teacher": None, "teacher_cache": tmp_path / "cache"}
    first_step(**cached, train=numbered, eval=numbered)
    # Another class is refused as before.
    other = write_tsv(tmp_path / "other.tsv", 12, label=lambda y: ["good", "x"][y])
    with pytest.raises(InputError, match="no head for 2 labels"):
        made(**options, train=other, eval=other)


def test_spellings_of_a_finished_heads_classes(tmp_path):
    words = ["bad", "Bad", "GOOD", "fair"]
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "".join(f"row,{word}\n" for word in words))
    head = Classification(tuple(NAMES))
    corpus = load(source(train=path, evals=path), head)
    assert corpus.names == ["GOOD", "bad", "fair"] and corpus.train.labels.tolist() == [1, 1, 0, 2]
    rows = read_file(path, Columns("text"), "--data")
    assert head.prepare(rows).rows.labels.tolist() == [1, 1, 0, 2]
    path.write_text("text,labels\nrow,bad|GOOD\nrow,Bad|fair\n")
    corpus = load(source(task="multi-label", train=path, evals=path), MultiLabel(tuple(NAMES)))
    assert list(corpus.train.column("label")) == [["bad", "GOOD"], ["bad", "fair"]]
    path.write_text("text,labels\nrow,bad|Bad\nrow,fair\n")
    with pytest.raises(InputError, match="row 2: label 'bad' occurs twice"):
        load(source(task="multi-label", train=path, evals=path), MultiLabel(tuple(NAMES)))


def test_rare_tags_of_a_finished_tagger(tmp_path):
    path = tmp_path / "a.jsonl"
    words = [text.split() for text, _ in sentences(4, 0)]
    rows = [{"tokens": tokens, "labels": ["O"] * len(tokens)} for tokens in words]
    rows[0]["labels"][0] = "B-LOC"
    path.write_text("\n".join(map(json.dumps, rows)))
    given = source(task="token-classification", train=path, evals=path)
    assert load(given, TokenClassification(tuple(TAGS))).names == TAGS
    numbers = [{**row, "labels": [TAGS.index(x) for x in row["labels"]]} for row in rows]
    path.write_text("\n".join(map(json.dumps, numbers)))
    corpus = load(given, TokenClassification(tuple(TAGS)))
    assert corpus.names == TAGS and corpus.metrics[0] == "f1"
    assert next(corpus.train.column("label")) == rows[0]["labels"]
    assert "1 is 'B-LOC'" in " ".join(describe(corpus))
    bare = TokenClassification(("LABEL_0", "LABEL_1", "LABEL_2"))
    assert load(given, bare).names == ["0", "1", "2"]
