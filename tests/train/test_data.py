"""Reading labelled text: formats, layouts, labels, scores, and one sentence for every mistake."""

import datasets
import pytest

from fastkd.train.data import describe, load, read_file
from fastkd.train.errors import InputError
from fastkd.train.labels import by_names
from fastkd.train.tasks import Columns
from fastkd.train.tasks.classification import Classification
from tests.support.tiny import source


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def files(tmp_path, train, evals=None, suffix=".tsv"):
    return {
        "train": write(tmp_path / f"train{suffix}", train),
        "evals": write(tmp_path / f"dev{suffix}", train if evals is None else evals),
    }


def content(rows):
    """All that rows hold, in lists."""
    labels = None if rows.labels is None else rows.labels.tolist()
    return [rows.number(i) for i in range(len(rows))], rows.texts, rows.pairs, labels


HEAD = "text\tlabel\n"
PAIR = "{}\nentailment\tA b.\tC d.\ncontradiction\tA b.\tC d.\n"
PAIRED = (["A b."] * 2, ["C d."] * 2, [1, 0])
# The files of GLUE: task, file, kind of file; texts, second texts, labels and metrics.
GLUE = [
    ("sst2", 'sentence\tlabel\nit "works\t1\nit doesn\'t \t0\nno " quote rules\t1\n', ".tsv",
     ['it "works', "it doesn't ", 'no " quote rules'], None, [1, 0, 1], ("accuracy",)),
    ("cola", "gj04\t1\t\tThey drank it.\ngj04\t0\t*\tThey drank the pub.", ".tsv",
     ["They drank it.", "They drank the pub."], None, [1, 0], ("mcc",)),
    ("cola", "sentence,label\nabc,1\ndef,0\n", ".csv", ["abc", "def"], None, [1, 0], ("mcc",)),
    ("stsb", "sentence1\tsentence2\tscore\nA.\tB.\t5\nC.\tD.\t0.25\n", ".tsv",
     ["A.", "C."], ["B.", "D."], [5.0, 0.25], ("pearson", "spearman")),
    ("mrpc", PAIR.format("Quality\t#1 String\t#2 String"), ".tsv", *PAIRED, ("f1", "accuracy")),
    ("qqp", PAIR.format("is_duplicate\tquestion1\tquestion2"), ".tsv", *PAIRED,
     ("f1", "accuracy")),
    ("mnli", PAIR.format("gold_label\tsentence1\tsentence2"), ".tsv", *PAIRED, ("accuracy",)),
    ("mnli", '{"premise": "p", "hypothesis": "h", "label": 1}\n'
     '{"premise": "p", "hypothesis": "h", "label": 0}', ".jsonl",
     ["p"] * 2, ["h"] * 2, [1, 0], ("accuracy",)),
    ("qnli", PAIR.format("label\tquestion\tsentence"), ".tsv", *PAIRED, ("accuracy",)),
    ("rte", PAIR.format("label\tsentence1\tsentence2"), ".tsv", *PAIRED, ("accuracy",)),
]  # fmt: skip


def test_files_of_glue(tmp_path):
    for task, text, kind, texts, pairs, labels, metrics in GLUE:
        corpus = load(source(task=task, **files(tmp_path, text, suffix=kind)))
        assert content(corpus.train)[1:] == (texts, pairs, labels), task
        assert corpus.metrics == metrics and (corpus.names is None) == (task == "stsb")


def test_evaluation_rows_may_spell_a_class_otherwise(tmp_path):
    train = "text\tlabel\nx\tgood\ny\tbad\nz\tpositive\n"
    given = files(tmp_path, train, "text\tlabel\nx\tGood\ny\tPOSITIVE\nz\tbad\n")
    assert load(source(**given)).evals[""].labels.tolist() == [1, 2, 0]
    given = files(tmp_path, train + "x\tGood\n", "text\tlabel\nx\tGOOD\n")
    with pytest.raises(InputError, match="row 2: label 'GOOD' does not occur in the training rows"):
        load(source(**given))
    assert by_names(["no", "yes"], ["Yes", "NO"]) == ["yes", "no"]
    for names in (["No", "Yes", "NO"], ["No", "perhaps"]):  # a class twice, another one
        assert by_names(["no", "yes"], names) is None


def test_labels_are_classes_of_a_finished_model(tmp_path):
    def ids(names, *labels):
        text = "text\tlabel\n" + "".join(f"x\t{label}\n" for label in labels)
        path = write(tmp_path / "rows.tsv", text)
        rows = read_file(path, Columns("text"), "--data")
        return Classification(tuple(names)).prepare(rows).rows.labels.tolist()

    assert ids(["0", "1"], "1.0", "00") == [1, 0]
    assert ids(["1", "-1"], "-1", "1", "+1") == [1, 0, 0]
    assert ids([str(i) for i in range(11)], "1.0", "10") == [1, 10]
    assert ids(["not_entailment", "entailment"], "Not-Entailment", "ENTAILMENT") == [0, 1]
    assert ids(["C", "c", "C++"], "c", "C", "C++") == [1, 0, 2]
    assert ids(["+", "-"], "-", "+") == [1, 0]
    for names, label in ((["0", "1"], "-1"), (["C", "c"], "C++"), (["+", "-"], "++")):
        with pytest.raises(InputError, match=r"row 2: label .* is no class of the model"):
            ids(names, label)


@pytest.mark.parametrize(("names", "label", "taken"), [
    (["neg", "pos"], 1, 1),
    (["pos", "neg"], 1, None),
    (["positive", "negative", "neutral"], 2, None),
    (["entailment", "neutral", "contradiction"], 2, 2),
    (["contradiction", "neutral", "entailment"], 2, None),
    (["True", "False"], 0, None),
    (["cat", "dog"], 0, 0),
])  # fmt: skip
def test_numbers_that_usually_mean_another_class(tmp_path, names, label, taken):
    path = write(tmp_path / "rows.tsv", f"{HEAD}x\t{label}\n")
    rows, task = read_file(path, Columns("text"), "--data"), Classification(tuple(names))
    if taken is not None:
        _, found, (said,), _ = task.prepare(rows)
        assert found.labels.tolist() == [taken] and f"{label} is {names[taken]!r}" in said
        return
    with pytest.raises(InputError, match="as such labels are usually numbered; pass --label-o"):
        task.prepare(rows)
    order = ",".join(map(str, reversed(range(len(names)))))
    found = task.prepare(rows, order=order).rows
    assert found.labels.tolist() == [len(names) - 1 - label]


def test_rows_that_are_marked_as_without_label(tmp_path):
    text = "text\tlabel\n" + "a\t0\nb\t1\nc\t-100\n" * 3
    given = files(tmp_path, text)
    corpus = load(source(**given))
    assert corpus.names == ["0", "1"] and len(corpus.train) == 6
    assert corpus.unlabelled.labels.tolist() == [-100] * 3 and corpus.unlabelled.texts == ["c"] * 3
    assert corpus.unlabelled.number(1) == 7
    lines = [*describe(corpus)]
    assert f"{given['train']}: 3 of 9 rows have no label (-100)" in lines
    more = write(tmp_path / "more.txt", "d\n")
    assert load(source(**given, unlabelled=more)).unlabelled.texts == ["c", "c", "c", "d"]
    task = load(source(**given, labels="classes")).task
    assert task.names == ["-100", "0", "1"]
    rows = read_file(given["train"], Columns("text"), "--data")
    assert len(task.prepare(rows).rows) == 9  # also when it is evaluated
    numbers = load(source(**given, labels="numbers"))
    assert numbers.train.labels.min() == -100
    assert "warning: 3 training labels are -100, a number here" in "".join(describe(numbers))
    bare = files(tmp_path, text, "text\tlabel\na\t-100\n")
    with pytest.raises(InputError, match="no row has a label, all are -100"):
        load(source(**bare))


def test_many_rare_classes_are_told_in_a_few_lines(tmp_path):
    text = HEAD + "".join(f"x\tname {i}\n" for i in range(900))
    lines = [*describe(load(source(**files(tmp_path, text), metric="f1")))]
    assert len(lines) < 30 and "880 more classes are as rare" in lines[-3]
    assert "f1 is the mean of those of all classes" in lines
    alike = HEAD + "x\t1\nx\t1.0\nx\tnot_this\nx\tNot this\n" * 2
    lines = [*describe(load(source(**files(tmp_path, alike), labels="classes")))]
    for pair in ("'1' and '1.0'", "'Not this' and 'not_this'"):
        assert any(f"classes {pair} look alike" in line for line in lines)


def test_sampling_is_seeded_and_keeps_classes(tmp_path):
    text = "text\tlabel\n" + "".join(f"t{i}\t{i % 4}\n" for i in range(40))
    paths = files(tmp_path, text)
    first, second, other = (
        load(source(max_train_rows=5, max_eval_rows=3, seed=seed, **paths)) for seed in (1, 1, 2)
    )
    assert content(first.train) == content(second.train) != content(other.train)
    assert len(first.train) == 5 and len(first.evals[""]) == 3
    assert first.task.num_labels == 4
    assert all(int(t[1:]) % 4 == y for t, y in zip(first.train.texts, first.train.labels, strict=1))


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
