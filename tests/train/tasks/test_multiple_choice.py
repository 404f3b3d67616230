"""Multiple choice: reading, scores, and every command."""

import csv
import json
import random

import numpy as np
import pytest
from transformers import AutoTokenizer

from fastkd.train.data import Encoder, load, read_file
from fastkd.train.errors import InputError
from fastkd.train.tasks.multiple_choice import TASK
from tests.support.tiny import WORDS, make_teacher, source
from tests.train.tasks.through import refused, through


def asked(rows, seed=0):
    rng = random.Random(seed)
    for _ in range(rows):
        said = [" ".join(rng.choices(WORDS, k=rng.randint(1, 3))) for _ in range(5)]
        yield said[0], said[1:], rng.randrange(4)


def write_jsonl(path, rows, seed=0):
    lines = (json.dumps({"question": q, "choices": c, "label": y}) for q, c, y in asked(rows, seed))
    path.write_text("\n".join(lines))
    return path


def write_swag(path, rows, seed=0):
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        names = ["video-id", "sent1", "sent2", *(f"ending{i}" for i in range(4)), "label"]
        table.writerow(names)
        for question, choices, label in asked(rows, seed):
            table.writerow([1, question, "so", *choices, label])
    return path


def test_every_command_takes_it(tmp_path):
    teacher = make_teacher(tmp_path / "bert", layers=2, head=False)
    train = write_swag(tmp_path / "train.csv", 16)
    evals = write_jsonl(tmp_path / "eval.jsonl", 16, 1)
    more = tmp_path / "more.jsonl"
    lines = (json.dumps({"question": q, "choices": c}) for q, c, _ in asked(4, 2))
    more.write_text("\n".join(lines))
    report = through(tmp_path, teacher, train, evals, task="multiple-choice", unlabelled=more)
    assert report["task"] == "multiple-choice" and report["rows"]["unlabelled"] == 4
    truth = list(asked(16, 1))
    told = report["told"]
    assert [(row["question"], row["choices"]) for row in told] == [(q, c) for q, c, _ in truth]
    found = [row["label"] for row in told]
    assert [row["choice"] for row in told] == [
        c[i] for (_, c, _), i in zip(truth, found, strict=True)
    ]
    right = np.mean([i == label for (_, _, label), i in zip(truth, found, strict=True)])
    assert report["best"]["scores"] == {"accuracy": right}
    assert "AutoModelForMultipleChoice" in (tmp_path / "run/student/README.md").read_text()


def test_the_columns_of_swag(tmp_path):
    path = write_swag(tmp_path / "a.csv", 3)
    rows = read_file(path, TASK.columns, "--train", task=TASK)
    expected = [(q, [f"so {c}" for c in choices], y) for q, choices, y in asked(3)]
    assert list(rows.columns("text", "pair", "label")) == expected
    tokenizer = AutoTokenizer.from_pretrained(make_teacher(tmp_path / "bert", head=False))
    encoded = Encoder(tokenizer, 16, TASK())(rows)
    first = encoded[0]["input_ids"][3]
    assert first == tokenizer(expected[0][0], expected[0][1][3])["input_ids"]
    (batch,) = encoded.batches(TASK().collator(tokenizer), 3)
    assert batch["input_ids"].shape == (3, 4, max(encoded.lengths))
    assert batch["labels"].tolist() == [y for _, _, y in expected]


def test_a_mistake_is_one_sentence(tmp_path):
    for name, text, words in (
        ("a.jsonl", '{"question": "a", "choices": "b", "label": 0}', "not a list of words but 'b'"),
        ("a.jsonl", '{"question": "a", "label": 0}', "no column 'choices'"),
        ("a.jsonl", '{"question": "a", "choices": ["b", "c"]}', "no column 'label'"),
        ("a.jsonl", '{"question": "a", "choices": ["b"], "label": 0}', "row 1: .* holds 1 choices"),
        ("a.jsonl", '{"question": "a", "choices": ["b", "c"], "label": 2}',
         "row 1: label 2 is none of the choices 0 to 1"),
        ("a.jsonl", '{"question": "a", "choices": ["b", "c"], "label": 1}\n'
         '{"question": "a", "choices": ["b", "c", "d"], "label": 1}',
         "row 2: 3 choices where row 1 has 2"),
        ("a.csv", "sent1,sent2,ending0,ending1,label\na,b,c,d,B\n", "row 2: label 'B' is none"),
        ("a.csv", "sent1,sent2,label\na,b,0\n", "no column 'question'"),
    ):  # fmt: skip
        refused(tmp_path, "multiple-choice", text, words, name)
    train, more = write_jsonl(tmp_path / "a.jsonl", 4), tmp_path / "b.jsonl"
    more.write_text('{"question": "a", "choices": ["b", "c"]}')
    with pytest.raises(InputError, match="2 choices where the training rows have 4"):
        load(source(task="multiple-choice", train=train, evals=train, unlabelled=more))
