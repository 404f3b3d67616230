"""Malformed rows of every task: one sentence each, which names the file."""

import datetime
import gzip
import io
import json
import math
import os

import pyarrow
import pytest
from pyarrow import parquet

from fastkd.train.data import load
from fastkd.train.errors import InputError
from tests.support.tiny import source
from tests.train.tasks.through import says, write_choices, write_jsonl

AB = says("a", "b")


def user(**part):
    return {"messages": [{"role": "user", "content": [part]}, AB[1]]}


NONE = {"text": [], "answer_start": []}


def question(**changes):
    row = {"id": "q7", "question": "a", "answers": [{"text": "b", "answer_start": 2}], **changes}
    return {"data": [{"paragraphs": [{"context": "a b", "qas": [row]}]}]}


# A good value of a column, and values that are none.
TEXT = "a b", 3, None, "", " ", ["a"], "\ud800"
QUESTION = tuple(x for x in TEXT if x not in ("", " "))  # a choice may have none
WORDS = ["a", "b"], 3, None, "a", [], [3], [[]], ["a", " "], ["a"]
SCORES = [1, 2], [1], [math.nan, 1], ["x", 1], "x", 3
SOFT = {"yes": 0.8, "no": 0.2}
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
        SOFT, {"yes": 0.8, "no": 0.1}, {"yes": 1.2, "no": -0.2}, [-0.1, 1.1], [0.2, 0.3, 0.5], [],
        {"yes": "a", "no": 0.2},
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


#: By task: the suffix or name of a file, its text or its rows, and words of the sentence.
MISTAKES = {
    "causal-lm": [
        ("jsonl", [{"words": "a"}], "no column 'text'"),
        ("jsonl", [{"text": "a"}, {"text": 3}], "row 2: column 'text' is not text but 3"),
        ("jsonl", [{"text": "a"}, {"text": " "}], "row 2: column 'text' is empty"),
        ("txt", "\n", "the file is empty"),
        ("md", "a", "unknown kind of file"),
    ],
    "token-classification": [
        ("conll", "good B-GOOD\nfilm\n", "row 2: 1 columns where row 1 has 2"),
        ("conll", "EU NNP B-ORG\nrejects VBZ\n", "row 2: 2 columns where row 1 has 3"),
        ("conll", "EU NNP B-ORG\n\nrejects VBZ\n", "row 3: 2 columns where row 1 has 3"),
        ("conll", "EU B-ORG\n# a comment\n", "row 2: 3 columns where row 1 has 2"),
        ("conll", "# text = EU\n1\tEU" + 8 * "\t_" + "\n", "row 2: CoNLL-U"),
        ("conll", "1\u00a0000 B-NUM\n\u00a0\tO\n", "row 1: word 2 is empty"),
        ("conll", "good\nfilm\n", "no column 'labels'"),
        ("jsonl", [{"tokens": "a b", "labels": ["O"]}], "not a list of words but 'a b'"),
        ("jsonl", [{"tokens": ["a"], "labels": ["O"]}], "the only tag is 'O'"),
    ],
    "multi-label": [
        ("csv", "text,labels\na,x|y\nb,x|x\n", "row 3: label 'x' occurs twice"),
        ("csv", "text,labels\na,x\n", "the only label is 'x', and --task multi-label needs two"),
        ("csv", "text,labels\na,\n", "no row has a label"),
    ],
    "multiple-choice": [
        ("csv", "sent1,sent2,ending0,ending1,label\na,b,c,d,B\n", "row 2: label 'B' is none"),
        ("csv", "sent1,sent2,label\na,b,0\n", "no column 'question'"),
    ],
    "seq2seq": [
        ("jsonl", [{"source": "a"}], r"no column 'target' \(--label-column\)"),
        ("tsv", "source\ttarget\na\tb\tc\n", "row 2"),
    ],
    "reranking": [("jsonl", [{"q": "a"}], "which columns are the query and its documents")],
    "question-answering": [
        ("json", {"data": [{"paragraphs": 3}]}, r"data\[0\]: 'paragraphs' is not a list of obj"),
        ("json", {"data": [{"title": "a"}]}, r"data\[0\]: no column 'paragraphs'"),
        ("json", {"data": [{"paragraphs": [{"qas": [{"id": 1}]}]}]},
         r"paragraphs\[0\]: no column 'con"),
        ("json", '{\n"data": [{"par', "row 2: not JSON"),
        ("json", {"data": []}, "the file has no rows"),
        ("json", question(question=3), "question 'q7': column 'question' is not text but 3"),
        ("json", question(answers=[{"text": "b", "answer_start": 1}]),
         "question 'q7': answer 'b' is not at character 1 of its text"),
        ("json", question(id=["q"]), "column 'id' is not text but"),
        *(("json", [{"id": name, "question": "a", "context": "a b", "answers": NONE}
                    for name in names], words) for names, words in (
            (["1", "2", 1], "row 3: question '1' occurs twice"),
            (["q", ["r"]], r"row 2: column 'id' is not text but \['r'\]"),
        )),
    ],
    "embedding": [
        ("jsonl", [{"words": "a"}], "which columns are the texts"),
        ("jsonl", [{"query": "a", "pos": "b"}], "query or anchor with positive or .* known: query"),
        *(("jsonl", [row], words, given) for row, given, words in (
            ({"query": "a", "positive": "b"}, {"metric": "pearson"}, "have no scores"),
            ({"query": "a", "positive": "b"}, {"metric": "accuracy"}, "columns anchor, positive"),
            ({"text": "a"}, {"metric": "ndcg@10"}, "have no columns query and positive"),
            ({"text": "a", "s": 1}, {"label_column": "s"}, "pass --text-pair-column"),
            ({"text": "a"}, {"unlabelled": __file__}, "--unlabelled: rows of --task embedding"),
        )),
    ],
    "chat": [
        ("jsonl", [{"chat": []}], "no column 'messages'"),
        ("jsonl", [user(type="image_url", image_url={"url": "x"})],
         "message 1 has a part 'image_url', and --task chat reads text"),
        ("jsonl", [user(type="image", text="a film")], "message 1 has a part 'image', a"),
        ("jsonl", [{"conversations": [{"from": "cat", "value": "a"}]}],
         "message 1 is from 'cat'; known: "),
        ("jsonl", [{"conversations": [{"from": "human"}]}], "message 1 has no text 'content'"),
        ("jsonl", [{"messages": AB, "tools": "{"}], "column 'tools': not JSON"),
        ("jsonl", [{"prompt": "a", "chosen": "b"}], "no column 'completion'"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("task", MISTAKES)
def test_a_mistake_is_one_sentence(tmp_path, task):
    for kind, rows, words, *given in MISTAKES[task]:
        path = tmp_path / f"a.{kind}"
        if not isinstance(rows, str):
            rows = "\n".join(map(json.dumps, rows)) if kind == "jsonl" else json.dumps(rows)
        path.write_text(rows)
        with pytest.raises(InputError, match=words) as caught:
            load(source(task=task, train=path, evals=path, **dict(*given)))
        assert given or str(path) in str(caught.value)


def test_other_rows_than_those_of_the_training(tmp_path):
    train, other = tmp_path / "a.csv", tmp_path / "b.jsonl"
    train.write_text("text,labels\na,good|bad\n")
    other.write_text('{"text": "a", "labels": ["good"]}\n{"text": "b", "labels": ["god"]}')
    with pytest.raises(InputError, match="row 2: label 'god' does not occur in the training rows"):
        load(source(task="multi-label", train=train, evals=other))
    soft = tmp_path / "c.jsonl"
    write_jsonl(soft, ({"text": "a", "label": x} for x in (SOFT, {"yes": 0, "no": 1})))
    other.write_text(json.dumps({"text": "b", "label": {"yes": 0.5, "nope": 0.5}}))
    with pytest.raises(InputError, match="row 1: label 'nope' does not occur in the training"):
        load(source(train=soft, evals=other))
    train = write_choices(tmp_path / "d.jsonl", 4)
    other.write_text('{"question": "a", "choices": ["b", "c"]}')
    with pytest.raises(InputError, match="2 choices where the training rows have 4"):
        load(source(task="multiple-choice", train=train, evals=train, unlabelled=other))


def columns(text, label, names=("text", "label")):
    """A Parquet file, in bytes."""
    buffer, arrays = io.BytesIO(), [pyarrow.array(text), pyarrow.array(label)]
    parquet.write_table(pyarrow.Table.from_arrays(arrays, [*names]), buffer)
    return buffer.getvalue()


NOW = datetime.datetime(2020, 1, 1)
HEAD = "text\tlabel\n"
ZIPPED = gzip.compress(HEAD.encode() + b"good film\t1\n" * 5000)
WHOLE = columns(["a"], [1])
#: Files of labelled text, some of another kind than their names say: name, content, a part of the
#: error, and options. Broken rows of right files: tests/train/test_drawn_files.py.
FILES = [
    ("mac.tsv", "text\tlabel\rgood\t1\r", "no rows"),
    ("utf16.csv", "text,label\ngood,1\n".encode("utf-16-le"), "which column is the text"),
    ("latin.json", b'[{"text": "a", "label": 1},\n{"text": "\xfc"}]', "row 2: not UTF-8"),
    ("digits.jsonl", '{"text": "a", "label": ' + "9" * 5000 + "}\n", "row 1: not JSON"),
    ("object.json", '{"data": [{"text": "a", "label": 1}]}', "which column is the text"),
    ("none.json", "[]", "no rows"),
    ("deep.json", "[" * 100_000, "row 1: not JSON"),
    ("two.json", '[{"text": "a", "label": 1}]\n[]', "row 2: not JSON"),
    ("cut.json", '[{"text": "a", "label": 1},\n\n', "row 3: not JSON"),
    ("zip.csv", b"PK\x03\x04\xff\xfe", "row 1: not UTF-8"),
    ("names.csv", ",\na,1\n", "row 1: column '' occurs twice"),
    ("blank.csv", " , label\na,1\n", "which column is the text"),
    ("bars.csv", "text|label\na|1\n", "its columns are separated by '|'"),
    ("lead.csv", "\n\n\n \ntext,label\na,1\nb\n", "row 7: 1 columns where row 5 has 2"),
    ("open.csv", 'text,label\n"a\nb,1\n', 'row 2: its quote " is not closed'),
    ("after.csv", 'text,label\n"a"b,1\n', "row 2: "),
    ("space.tsv", HEAD + "\u3000\t1\n", "row 2: column 'text' is empty"),
    ("empty.tsv", "", "the file is empty"),
    ("cut.tsv.gz", ZIPPED[:-9], "can't be read"),
    ("sum.tsv.gz", ZIPPED[:-8] + b"\0" * 8, "can't be read"),
    ("more.tsv.gz", ZIPPED + b"xxx", "can't be read"),
    ("x.parquet", ZIPPED, "can't be read as Parquet"),
    *((f"{end}.parquet", WHOLE[:end], "can't be read as Parquet")
      for end in (4, len(WHOLE) // 2, len(WHOLE) - 1)),
    ("null.parquet", columns(["a", None], [1, 0]), "row 2: column 'text' is not text"),
    ("list.parquet", columns([["a"]], [1]), "row 1: column 'text' is not text"),
    *(("label.parquet", columns(["a", "b"], label), "row 1: label") for label in (
        [NOW, NOW], [math.nan, 0.0], [{"a": 2}, {"a": 3}])),
    ("twice.parquet", columns(["a"], ["b"], ["text", "text"]), "'text' occurs twice"),
    ("empty.parquet", columns(pyarrow.array([], pyarrow.string()), []), "no rows"),
    ("x.tsv.bz2", b"BZh", "unknown kind"),
    ("x", HEAD, "unknown kind"),
    (".tsv", HEAD, "unknown kind"),
    ("a.tsv", HEAD + "a\t1\n", "--label-column & 'label'", {"label_column": "Lable"}),
    ("a.tsv", HEAD + "a\t1\n", "--text-pair-column & 'b'", {"text_pair_column": "b"}),
    ("a.tsv", "a\tlabel\nx\t1\n", "--text-column & a, label"),
    ("a.tsv", HEAD + "a\t1\nb\t1\n", "every label is '1'"),
    ("a.tsv", HEAD + "a\t0.5\nb\thigh\n", "row 3 & 'high' & --labels classes"),
    ("a.tsv", HEAD + "a\t1_0\nb\t0.5\n", "label '1_0' is not a number"),
    ("a.tsv", HEAD + "a\tx\nb\tNaN\n", "row 3 & 'NaN' & --labels classes"),
    ("a.tsv", HEAD + "a\t1.5\nb\t1e39\n", "row 3 & '1e39'", {"labels": "numbers"}),
    ("a.tsv", HEAD + "a\t1\n", "--labels & mean 'classes'", {"labels": "class"}),
    ("a.tsv", HEAD + "a\t1\n", "--no-header & --text-column", {"no_header": True}),
    ("a.tsv", HEAD + "a\t1\n", "no column '2' & 0, 1",
     {"no_header": True, "text_column": "0", "label_column": "2"}),
    ("a.tsv", HEAD + "a\t1\nb\t0\n", "--metric & classification", {"metric": "pearson"}),
    ("a.tsv", HEAD + "a\t1\nb\t0\n", "--eval is missing", {"evals": None}),
    ("a.tsv", HEAD + "a\t1\nb\t0\n", "--train is missing", {"train": None}),
    ("a.tsv", HEAD, "no data", {"train": None, "evals": None}),
]  # fmt: skip


def test_a_mistake_in_a_file_is_one_sentence(tmp_path):
    os.mkfifo(tmp_path / "pipe.tsv")
    (tmp_path / "loop.tsv").symlink_to("loop.tsv")
    (tmp_path / "folder.tsv").mkdir()
    for name, content, words, *options in (
        *FILES, ("pipe.tsv", None, "not a regular file"), ("loop.tsv", None, "no such file"),
        ("folder.tsv", None, "directory"), ("\udcff.tsv", None, "no such file"),
        ("/dev/null", None, "--train"),
    ):  # fmt: skip
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(InputError) as error:
            load(source(**{"train": path, "evals": path, **dict(*options)}))
        said = str(error.value)
        assert all(part in said for part in words.split(" & ")), (name, said)
        assert options or path.name in said, (name, said)
