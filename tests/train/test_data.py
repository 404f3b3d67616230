"""Rows of files and of the hub: layouts, forms of labels, classes that are declared or known."""

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
from fastkd.train.labels import by_names
from fastkd.train.tasks import Columns
from fastkd.train.tasks.classification import Classification
from fastkd.train.tasks.multi_label import MultiLabel
from fastkd.train.tasks.token_classification import TokenClassification
from tests.support.runs import first_step, made
from tests.support.tiny import make_teacher, run, sentences, source, write_tsv
from tests.train.tasks.through import rows_of, says, write_jsonl, write_text

NAN = math.nan
HEAD = "text\tlabel\n"
NAMES = ["good", "bad", "fair"]
TAGS = ["O", "B-LOC", "I-LOC"]


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


@pytest.fixture
def prepared(tmp_path):
    """Rows with these labels, read by a finished classifier of these classes."""

    def prepared(names, *labels, **options):
        path = tmp_path / "rows.tsv"
        path.write_text(HEAD + "".join(f"x\t{label}\n" for label in labels))
        rows = read_file(path, Columns("text"), "--data")
        return Classification(tuple(names)).prepare(rows, **options)

    return prepared


def content(rows):
    """All that rows hold, in lists."""
    labels = None if rows.labels is None else rows.labels.tolist()
    return [rows.number(i) for i in range(len(rows))], rows.texts, rows.pairs, labels


PAIR = "{}\nentailment\tA b.\tC d.\ncontradiction\tA b.\tC d.\n"
PAIRED = (["A b."] * 2, ["C d."] * 2, [1, 0])
# The files of GLUE: task, file, kind of file; texts, second texts, labels and metrics.
GLUE = [
    ("sst2", 'sentence\tlabel\nit "works\t1\nit doesn\'t \t0\nno " quote rules\t1\n', "tsv",
     ['it "works', "it doesn't ", 'no " quote rules'], None, [1, 0, 1], ("accuracy",)),
    ("cola", "gj04\t1\t\tThey drank it.\ngj04\t0\t*\tThey drank the pub.", "tsv",
     ["They drank it.", "They drank the pub."], None, [1, 0], ("mcc",)),
    ("cola", "sentence,label\nabc,1\ndef,0\n", "csv", ["abc", "def"], None, [1, 0], ("mcc",)),
    ("stsb", "sentence1\tsentence2\tscore\nA.\tB.\t5\nC.\tD.\t0.25\n", "tsv",
     ["A.", "C."], ["B.", "D."], [5.0, 0.25], ("pearson", "spearman")),
    *((task, PAIR.format(head), "tsv", *PAIRED, metrics) for task, head, metrics in (
        ("mrpc", "Quality\t#1 String\t#2 String", ("f1", "accuracy")),
        ("qqp", "is_duplicate\tquestion1\tquestion2", ("f1", "accuracy")),
        ("mnli", "gold_label\tsentence1\tsentence2", ("accuracy",)),
        ("qnli", "label\tquestion\tsentence", ("accuracy",)),
        ("rte", "label\tsentence1\tsentence2", ("accuracy",)),
    )),
    ("mnli", '{"premise": "p", "hypothesis": "h", "label": 1}\n'
     '{"premise": "p", "hypothesis": "h", "label": 0}', "jsonl",
     ["p"] * 2, ["h"] * 2, [1, 0], ("accuracy",)),
]  # fmt: skip


def test_files_of_glue(loaded):
    for task, text, kind, texts, pairs, labels, metrics in GLUE:
        corpus = loaded(text, kind=kind, task=task)
        assert content(corpus.train)[1:] == (texts, pairs, labels), task
        assert corpus.metrics == metrics and (corpus.names is None) == (task == "stsb")


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
    row, answer = {"name": "Ada", **says("a film")[0]}, says("", "good")[1]
    path, folder = tmp_path / "a.parquet", tmp_path / "folder"
    pyarrow.parquet.write_table(pyarrow.table({"messages": [[row, answer]]}), path)
    (found,) = rows_of(path, "chat").column("text")
    assert [*map(json.loads, found)] == [row, answer]
    folder.mkdir()
    write_text(folder / "a.txt", 2)
    write_jsonl(folder / "b.jsonl", [{"text": "bad film"}])
    (folder / "notes.md").write_text("not read")
    texts = [*(text for text, _ in sentences(2, 0)), "bad film"]
    assert rows_of(folder, "causal-lm").texts == texts


def test_evaluation_rows_may_spell_a_class_otherwise(loaded):
    train = HEAD + "x\tgood\ny\tbad\nz\tpositive\n"
    corpus = loaded(train, HEAD + "x\tGood\ny\tPOSITIVE\nz\tbad\n")
    assert corpus.evals[""].labels.tolist() == [1, 2, 0]
    with pytest.raises(InputError, match="row 2: label 'GOOD' does not occur in the training rows"):
        loaded(train + "x\tGood\n", HEAD + "x\tGOOD\n")
    assert by_names(["no", "yes"], ["Yes", "NO"]) == ["yes", "no"]
    for names in (["No", "Yes", "NO"], ["No", "perhaps"]):  # a class twice, another one
        assert by_names(["no", "yes"], names) is None


def test_labels_are_classes_of_a_finished_model(prepared):
    for names, labels, expected in (
        (["0", "1"], ("1.0", "00"), [1, 0]), (["1", "-1"], ("-1", "1", "+1"), [1, 0, 0]),
        ([str(i) for i in range(11)], ("1.0", "10"), [1, 10]),
        (["not_entailment", "entailment"], ("Not-Entailment", "ENTAILMENT"), [0, 1]),
        (["C", "c", "C++"], ("c", "C", "C++"), [1, 0, 2]), (["+", "-"], "-+", [1, 0]),
        (NAMES, ("bad", "Bad", "GOOD", "fair"), [1, 1, 0, 2]),
    ):  # fmt: skip
        assert prepared(names, *labels).rows.labels.tolist() == expected
    for names, label in ((["0", "1"], "-1"), (["C", "c"], "C++"), (["+", "-"], "++")):
        with pytest.raises(InputError, match=r"row 2: label .* is no class of the model"):
            prepared(names, label)


@pytest.mark.parametrize(("names", "label", "taken"), [
    (["neg", "pos"], 1, 1),
    (["pos", "neg"], 1, None),
    (["positive", "negative", "neutral"], 2, None),
    (["entailment", "neutral", "contradiction"], 2, 2),
    (["contradiction", "neutral", "entailment"], 2, None),
    (["True", "False"], 0, None),
    (["cat", "dog"], 0, 0),
])  # fmt: skip
def test_numbers_that_usually_mean_another_class(prepared, names, label, taken):
    if taken is not None:
        _, found, (said,), _ = prepared(names, label)
        assert found.labels.tolist() == [taken] and f"{label} is {names[taken]!r}" in said
        return
    with pytest.raises(InputError, match="as such labels are usually numbered; pass --label-o"):
        prepared(names, label)
    order = ",".join(map(str, reversed(range(len(names)))))
    assert prepared(names, label, order=order).rows.labels.tolist() == [len(names) - 1 - label]


def test_rows_that_are_marked_as_without_label(loaded, tmp_path):
    text = HEAD + "a\t0\nb\t1\nc\t-100\n" * 3
    corpus = loaded(text)
    assert corpus.names == ["0", "1"] and len(corpus.train) == 6
    assert corpus.unlabelled.labels.tolist() == [-100] * 3 and corpus.unlabelled.texts == ["c"] * 3
    assert corpus.unlabelled.number(1) == 7
    assert f"{tmp_path / 'train.tsv'}: 3 of 9 rows have no label (-100)" in [*describe(corpus)]
    more = tmp_path / "more.txt"
    more.write_text("d\n")
    assert loaded(text, unlabelled=more).unlabelled.texts == ["c", "c", "c", "d"]
    task = loaded(text, labels="classes").task
    assert task.names == ["-100", "0", "1"]
    rows = read_file(tmp_path / "train.tsv", Columns("text"), "--data")
    assert len(task.prepare(rows).rows) == 9  # also when it is evaluated
    numbers = loaded(text, labels="numbers")
    assert numbers.train.labels.min() == -100
    assert "warning: 3 training labels are -100, a number here" in "".join(describe(numbers))
    with pytest.raises(InputError, match="no row has a label, all are -100"):
        loaded(text, HEAD + "a\t-100\n")


def test_many_rare_classes_are_told_in_a_few_lines(loaded):
    lines = [*describe(loaded(HEAD + "".join(f"x\tname {i}\n" for i in range(900)), metric="f1"))]
    assert len(lines) < 30 and "880 more classes are as rare" in lines[-3]
    assert "f1 is the mean of those of all classes" in lines
    alike = HEAD + "x\t1\nx\t1.0\nx\tnot_this\nx\tNot this\n" * 2
    lines = [*describe(loaded(alike, labels="classes"))]
    for pair in ("'1' and '1.0'", "'Not this' and 'not_this'"):
        assert any(f"classes {pair} look alike" in line for line in lines)


def test_sampling_is_seeded_and_keeps_classes(loaded):
    text = HEAD + "".join(f"t{i}\t{i % 4}\n" for i in range(40))
    first, second, other = (
        loaded(text, max_train_rows=5, max_eval_rows=3, seed=seed) for seed in (1, 1, 2)
    )
    assert content(first.train) == content(second.train) != content(other.train)
    assert len(first.train) == 5 and len(first.evals[""]) == 3
    assert first.task.num_labels == 4
    assert all(int(t[1:]) % 4 == y for t, y in zip(first.train.texts, first.train.labels, strict=1))


def test_probabilities_of_classes(loaded):
    """By name, and beside labels; lists: test_drawn_files.py."""
    soft = [{"text": x, "label": {"no": 0.75, "yes": 0.25}} for x in "abc"]
    for other, expected in (({"yes": 0.9, "no": 0.1}, [0.1, 0.9]), ("yes", [0.0, 1.0])):
        corpus = loaded([*soft, {"text": "d", "label": other}], kind="jsonl")
        assert corpus.names == ["no", "yes"]
        (*_, last) = (x for _, x in corpus.train.columns("label", PROBABILITIES))
        assert last == pytest.approx(expected)
        assert "labels are probabilities" in " ".join(describe(corpus))


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


@pytest.mark.parametrize("number", [int, float, bool])
def test_one_hot_rows(loaded, tmp_path, number):
    def rows(*labels):
        return [{"text": f"row {i}", "labels": x} for i, x in enumerate(labels)]

    given = {"task": "multi-label", "kind": "jsonl"}
    hot = rows(*([number(x) for x in row] for row in ([1, 0], [0, 1], [0, 0], [1, 1])))
    corpus = loaded(hot, **given)
    assert corpus.names == ["0", "1"]
    assert list(corpus.train.column("label")) == [["0"], ["1"], [], ["0", "1"]]
    assert "labels are one-hot, 2 zeros and ones for each row" in " ".join(describe(corpus))
    # With a finished model the lists have the order of its classes.
    raw = rows_of(tmp_path / "train.jsonl", MultiLabel)
    found = MultiLabel(("good", "bad")).read_labels(raw)
    assert list(found.rows.column("label")) == [["good"], ["bad"], [], ["good", "bad"]]
    assert "0 is 'good', 1 is 'bad'" in " ".join(found.notes)
    with pytest.raises(InputError, match="lists of 2 zeros and ones, and the model has 3"):
        MultiLabel(("a", "b", "c")).read_labels(raw)
    with pytest.raises(InputError, match="row 2: its labels are not the 2 zeros and ones"):
        loaded(hot, rows([0, 1], [1]), **given)
    assert loaded(rows([0, 1], [2], []), **given).names == ["0", "1", "2"]


def test_a_column_for_each_label(loaded):
    given = {"task": "multi-label", "kind": "csv", "label_column": "toxic,rude"}
    text = "text,toxic,rude\na,1,0\nb,0,1\nc,0,0\nd,1.0,1\n"
    corpus = loaded(text, **given)
    assert corpus.names == ["rude", "toxic"]
    assert list(corpus.train.column("label")) == [["toxic"], ["rude"], [], ["toxic", "rude"]]
    with pytest.raises(InputError, match=r"no column 'rud'.*did you mean 'rude'"):
        loaded(text, **{**given, "label_column": "toxic,rud"})
    with pytest.raises(InputError, match="row 2: column 'rude' holds neither 0 nor 1 but '2'"):
        loaded("text,toxic,rude\na,1,2\n", **given)


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


def test_spellings_and_rare_tags_of_a_finished_teacher(loaded):
    text = "text,label\n" + "".join(f"row,{word}\n" for word in ("bad", "Bad", "GOOD", "fair"))
    corpus = loaded(text, kind="csv", head=Classification(tuple(NAMES)))
    assert corpus.names == ["GOOD", "bad", "fair"] and corpus.train.labels.tolist() == [1, 1, 0, 2]
    several = {"task": "multi-label", "kind": "csv", "head": MultiLabel(tuple(NAMES))}
    corpus = loaded("text,labels\nrow,bad|GOOD\nrow,Bad|fair\n", **several)
    assert list(corpus.train.column("label")) == [["bad", "GOOD"], ["bad", "fair"]]
    with pytest.raises(InputError, match="row 2: label 'bad' occurs twice"):
        loaded("text,labels\nrow,bad|Bad\nrow,fair\n", **several)
    rows = [{"tokens": x.split(), "labels": ["O"] * len(x.split())} for x, _ in sentences(4, 0)]
    rows[0]["labels"][0] = "B-LOC"
    tags = {"task": "token-classification", "kind": "jsonl"}
    assert loaded(rows, **tags, head=TokenClassification(tuple(TAGS))).names == TAGS
    numbers = [{**row, "labels": [TAGS.index(x) for x in row["labels"]]} for row in rows]
    corpus = loaded(numbers, **tags, head=TokenClassification(tuple(TAGS)))
    assert corpus.names == TAGS and corpus.metrics[0] == "f1"
    assert next(corpus.train.column("label")) == rows[0]["labels"]
    assert "1 is 'B-LOC'" in " ".join(describe(corpus))
    bare = TokenClassification(("LABEL_0", "LABEL_1", "LABEL_2"))
    assert loaded(numbers, **tags, head=bare).names == ["0", "1", "2"]


def hub(monkeypatch, splits, features=None):
    """datasets.load_dataset answering from memory; returns the calls that were made."""
    calls = []

    def load_dataset(name, config=None, *, split):
        calls.append((name, config, split))
        if split not in splits:
            raise ValueError(f'Unknown split "{split}".\nmore')
        return datasets.Dataset.from_dict(splits[split], features=features)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def features(names, *texts):
    return datasets.Features(
        {**{t: datasets.Value("string") for t in texts}, "label": datasets.ClassLabel(names=names)}
    )


def test_rows_of_the_hub(monkeypatch):
    rows = {"sentence": ["a", "b"], "label": [1, 0]}
    named = features(["unacceptable", "acceptable"], "sentence")
    calls = hub(monkeypatch, {"train": rows, "validation": rows}, named)
    corpus = load(source(task="cola"))
    assert calls == [("nyu-mll/glue", "cola", "train"), ("nyu-mll/glue", "cola", "validation")]
    assert corpus.names == ["unacceptable", "acceptable"]
    assert corpus.train.labels.tolist() == [1, 0]
    assert content(load(source(data="cola")).train) == content(corpus.train)

    rows = {"premise": ["a", "b"], "hypothesis": ["c", "d"], "label": [2, 0]}
    splits = dict.fromkeys(("train", "validation_matched", "validation_mismatched"), rows)
    hub(monkeypatch, splits, features(["e", "n", "c"], "premise", "hypothesis"))
    corpus = load(source(task="mnli"))
    assert list(corpus.evals) == ["", "mm"] and corpus.train.pairs == ["c", "d"]

    rows = {"text": ["a", "b"], "score": [0.5, 1.0]}
    calls = hub(monkeypatch, {"train": rows, "test": rows})
    corpus = load(source(data="some/set", label_column="score", eval_split="test"))
    assert calls[1] == ("some/set", None, "test")
    assert corpus.names is None and corpus.train.labels.tolist() == [0.5, 1.0]


def test_hub_mistakes(monkeypatch):
    hidden = {"sentence": ["a", "b"], "label": [0, -1]}
    none = {"sentence": ["a", None], "label": [0, 1]}
    hub(monkeypatch, {"train": none, "test": hidden}, features(["x", "y"], "sentence"))
    for options, words in (
        ({"task": "sst2", "train_split": "test"}, "split test, row 2: .*no label"),
        ({"task": "sst2", "train_split": "nope"},
         "--task nyu-mll/glue, split 'nope': Unknown split"),
        ({"task": "sst2"}, "split train, row 2: column 'sentence' is not text"),
        ({"data": "sst2", "text_column": "sentense"}, "mean 'sentence'"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            load(source(**options))
    tags = datasets.List(datasets.ClassLabel(names=["O", "B-GOOD"]))
    tagged = {"tokens": datasets.List(datasets.Value("string")), "labels": tags}
    rows = {"tokens": [["a", "film"], ["good"]], "labels": [[0, 0], [-1]]}
    hub(monkeypatch, {"train": rows}, datasets.Features(tagged))
    with pytest.raises(InputError, match="split train, row 2: no label"):
        load(source(data="some/set", task="token-classification"))
