"""Malformed rows of every task: one sentence each, which names the file."""

import datetime
import gzip
import io
import json
import math

import pyarrow
import pytest
from pyarrow import parquet

from fastkd.train.data import load
from fastkd.train.errors import InputError
from tests.support.tiny import source
from tests.train.tasks.through import SOFT, says, write_jsonl

AB = says("a", "b")
# A good value of a column, and values that are none.
TEXT = "a b", 3, None, "", " ", ["a"], "\ud800"
QUESTION = tuple(x for x in TEXT if x not in ("", " "))  # a choice may have none
WORDS = ["a", "b"], 3, None, "a", [], [3], [[]], ["a", " "], ["a"]
SCORES = [1, 2], [1], [math.nan, 1], ["x", 1], "x", 3
TALK = (
    AB, 3, None, "a", [], ["a"], says("a"), says("a", " "), [{"role": "user"}], says("", "a")[1:],
    [{"content": "b"}, *AB], [*says("a"), {"role": "assistant", "tool_calls": [{"id": 3}]}],
)  # fmt: skip
#: By task: forms of a row, each a good value and values that are none of each column.
ROWS = {
    "causal-lm": [{"text": TEXT}],
    "token-classification": [{"tokens": WORDS, "labels": WORDS}],
    "multi-label": [{"text": TEXT, "labels": (["a", "b"], 3, None, [True, "a"], ["a", " "])}],
    "multiple-choice": [{"question": QUESTION, "choices": (*WORDS[:-2], ["a"], ["a", "b", "c"]),
                         "label": (1, "x", 2, -1, 0.5, None, [0])}],
    "seq2seq": [{"source": TEXT, "target": TEXT}],
    "reranking": [
        {"query": TEXT, "pos": WORDS, "neg": WORDS, "pos_scores": SCORES, "neg_scores": SCORES},
        {"query": TEXT, "pos": WORDS, "neg": WORDS, "scores": ([1, 2, 3, 4], *SCORES)},
    ],
    "question-answering": [{
        "id": ("q", None, ["q"], {"q": 1}, True, 1.5, "\ud800"), "question": TEXT, "context": TEXT,
        "answers": ({"text": ["b"], "answer_start": [2]}, 3, None, {"text": ["b"]},
                    *({"text": ["b"], "answer_start": at} for at in ([1], [2, 3]))),
    }],
    "embedding": [
        {"anchor": TEXT, "positive": TEXT, "negatives": (["b"], 3, [3], ["a", " "])},
        {"sentence1": TEXT, "sentence2": TEXT, "score": (0.5, "x", math.nan, None, [1], {})},
        {"text": TEXT},
    ],
    "classification": [{"text": TEXT, "label": (
        SOFT[0], {"yes": 0.8, "no": 0.1}, {"yes": 1.2, "no": -0.2}, [-0.1, 1.1], [0.2, 0.3, 0.5],
        [], {"yes": "a", "no": 0.2},
    )}],
    "chat": [
        {"messages": TALK}, {"conversations": TALK},
        *({x: TEXT, y: TEXT} for x, y in (("instruction", "output"), ("prompt", "completion"))),
        {"instruction": TEXT, "output": TEXT, "system": ("a", 3, ["a"]),
         "history": ([["a", "b"]], ["c"], [["a"]], 3)},
    ],
}  # fmt: skip


@pytest.mark.parametrize("task", ROWS)
def test_a_row_with_a_wrong_value_is_named(tmp_path, task):
    """The third row, which also lacks each column once that may not be left out."""
    optional = {"pos_scores", "neg_scores", "scores", "negatives", "system", "history"}
    for form in ROWS[task]:
        good = {name: values[0] for name, values in form.items()}
        for name, (_, *values) in form.items():
            wrong = [{**good, name: value} for value in values]
            if name not in optional:
                wrong.append({x: y for x, y in good.items() if x != name})
            for row in wrong:
                rows = [{**good, "id": "x"}, {**good, "id": "y"}, row]
                path = write_jsonl(tmp_path / "a.jsonl", rows)
                with pytest.raises(InputError, match=f"{path}, row 3"):
                    load(source(task=task, train=path, evals=path))


def columns(text, label, names=("text", "label")):
    """A Parquet file, in bytes."""
    buffer, arrays = io.BytesIO(), [pyarrow.array(text), pyarrow.array(label)]
    parquet.write_table(pyarrow.Table.from_arrays(arrays, [*names]), buffer)
    return buffer.getvalue()


ANSWER = {"text": [], "answer_start": []}
NOW = datetime.datetime(2020, 1, 1)
HEAD = "text\tlabel\n"
ZIPPED = gzip.compress(HEAD.encode() + b"good film\t1\n" * 50)
#: By --task: name or suffix of a file, its text or rows, parts of the sentence, and options, where
#: rows are another file. Broken rows of right files: tests/train/test_data.py.
MISTAKES = {
    None: [
        ("none.json", "[]", "no rows"),
        ("cut.json", '[{"text": "a", "label": 1},\n\n', "row 3: not JSON"),
        ("names.csv", ",\na,1\n", "row 1: column '' occurs twice"),
        ("bars.csv", "text|label\na|1\n", "its columns are separated by '|'"),
        ("lead.csv", "\n\n\n \ntext,label\na,1\nb\n", "row 7: 1 columns where row 5 has 2"),
        ("open.csv", 'text,label\n"a\nb,1\n', 'row 2: its quote " is not closed'),
        ("empty.tsv", "", "the file is empty"),
        ("cut.tsv.gz", ZIPPED[:-9], "can't be read"),
        ("sum.tsv.gz", ZIPPED[:-8] + b"\0" * 8, "can't be read"),
        ("x.parquet", ZIPPED, "can't be read as Parquet"),
        *(("label.parquet", columns(["a", "b"], label), "row 1: label")
          for label in ([NOW, NOW], [math.nan, 0.0])),
        ("twice.parquet", columns(["a"], ["b"], ["text", "text"]), "'text' occurs twice"),
        ("x.tsv.bz2", b"BZh", "unknown kind"),
        ("none.tsv", None, "no such file"),
        ("folder.tsv", None, "directory"),
        ("tsv", HEAD + "a\t1\n", "--label-column & 'label'", {"label_column": "Lable"}),
        ("tsv", "a\tlabel\nx\t1\n", "--text-column & a, label"),
        ("tsv", HEAD + "a\t1\nb\t1\n", "every label is '1'"),
        ("tsv", HEAD + "a\t0.5\nb\thigh\n", "row 3 & 'high' & --labels classes"),
        ("tsv", HEAD + "a\t1_0\nb\t0.5\n", "label '1_0' is not a number"),
        ("tsv", HEAD + "a\t1.5\nb\t1e39\n", "row 3 & '1e39'", {"labels": "numbers"}),
        ("tsv", HEAD + "a\t1\nb\t0\n", "--metric & classification", {"metric": "pearson"}),
        ("tsv", HEAD + "a\t1\nb\t0\n", "--eval is missing", {"evals": None}),
        ("tsv", HEAD + "a\t1\nb\t0\n", "--train is missing", {"train": None}),
        ("jsonl", [{"text": "a", "label": x} for x in SOFT],
         "row 1: label 'nope' does not occur in the training rows",
         {"evals": [{"text": "b", "label": {"yes": 0.5, "nope": 0.5}}]}),
        ("tsv", HEAD, "--thinking drop: rows of --task classification are no conversations",
         {"thinking": "drop"}),
    ],
    "token-classification": [
        ("conll", "EU NNP B-ORG\n\nrejects VBZ\n", "row 3: 2 columns where row 1 has 3"),
        ("conll", "# text = EU\n1\tEU" + 8 * "\t_" + "\n", "row 2: CoNLL-U"),
        ("jsonl", [{"tokens": ["a"], "labels": ["O"]}], "the only tag is 'O'"),
    ],
    "multi-label": [
        ("csv", "text,labels\na,x|y\nb,x|x\n", "row 3: label 'x' occurs twice"),
        ("csv", "text,labels\na,\n", "no row has a label"),
        ("csv", "text,labels\na,good|bad\n", "row 1: label 'god' does not occur in the training",
         {"evals": [{"text": "b", "labels": ["god"]}]}),
    ],
    "multiple-choice": [
        ("jsonl", [{"question": "a", "choices": [*"bcd"], "label": 0}],
         "2 choices where the training rows have 3",
         {"unlabelled": [{"question": "a", "choices": ["b", "c"]}]}),
    ],
    "reranking": [("jsonl", [{"q": "a"}], "which columns are the query and its documents")],
    "question-answering": [
        ("json", {"data": [{"paragraphs": 3}]}, "data[0]: 'paragraphs' is not a list of obj"),
        ("json", {"data": [{"paragraphs": [{"qas": [{"id": 1}]}]}]}, "paragraphs[0]: no column"),
        ("json", '{\n"data": [{"par', "row 2: not JSON"),
        ("json", [{"id": name, "question": "a", "context": "b", "answers": ANSWER}
                  for name in ("1", "2", 1)], "row 3: question '1' occurs twice"),
    ],
    "embedding": [
        ("jsonl", [{"words": "a"}], "which columns are the texts & query or anchor with positive"),
        *(("jsonl", [row], words, given) for row, given, words in (
            ({"query": "a", "positive": "b"}, {"metric": "pearson"}, "have no scores"),
            ({"query": "a", "positive": "b"}, {"metric": "accuracy"}, "columns anchor, positive"),
            ({"text": "a"}, {"metric": "ndcg@10"}, "have no columns query and positive"),
            ({"text": "a", "s": 1}, {"label_column": "s"}, "pass --text-pair-column"),
            ({"text": "a"}, {"unlabelled": []}, "--unlabelled: rows of --task embedding"),
        )),
    ],
    "chat": [
        ("jsonl", [{"chat": []}], "no column 'messages'"),
        ("jsonl", [{"messages": [{"role": "user", "content": [{"type": "image", "text": "a"}]}]}],
         "message 1 has a part 'image', and --task chat reads text"),
        ("jsonl", [{"conversations": [{"from": "cat", "value": "a"}]}],
         "message 1 is from 'cat'; known: "),
        ("jsonl", [{"messages": AB, "tools": "{"}], "column 'tools': not JSON"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("task", MISTAKES)
def test_a_mistake_is_one_sentence(tmp_path, task):
    (tmp_path / "folder.tsv").mkdir()
    for name, content, words, *options in MISTAKES[task]:
        path, given = tmp_path / (name if "." in name else f"a.{name}"), dict(*options)
        if isinstance(content, list) and path.suffix == ".jsonl":
            write_jsonl(path, content)
        elif content is not None:
            text = content if isinstance(content, str | bytes) else json.dumps(content)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        for option, rows in given.items():
            if isinstance(rows, list):
                given[option] = write_jsonl(tmp_path / f"{option}.jsonl", rows)
        with pytest.raises(InputError) as error:
            load(source(**{"task": task, "train": path, "evals": path, **given}))
        said = str(error.value)
        assert all(part in said for part in words.split(" & ")), (name, said)
        assert given or path.name in said, (name, said)
