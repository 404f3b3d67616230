"""Multiple choice: reading, scores, and every command."""

import numpy as np
from transformers import AutoTokenizer

from fastkd.train.tasks.multiple_choice import TASK
from tests.train.tasks.through import (
    chosen,
    encoded,
    make_bare,
    rows_of,
    through,
    write_choices,
    write_jsonl,
)


def test_every_command_takes_it(tmp_path):
    more = ({"question": q, "choices": c} for q, c, _ in chosen(4, 2))
    more = write_jsonl(tmp_path / "more.jsonl", more)
    train = write_choices(tmp_path / "a.csv", 16)
    report = through(tmp_path, "multiple-choice", 16, train=train, unlabelled=more)
    assert report["rows"]["unlabelled"] == 4
    truth, told = list(chosen(16, 1)), report["told"]
    assert [(row["question"], row["choices"]) for row in told] == [(q, c) for q, c, _ in truth]
    found = [row["label"] for row in told]
    assert [row["choice"] for row in told] == [
        c[i] for (_, c, _), i in zip(truth, found, strict=True)
    ]
    right = np.mean([i == label for (_, _, label), i in zip(truth, found, strict=True)])
    assert report["best"]["scores"] == {"accuracy": right}
    assert "AutoModelForMultipleChoice" in report["card"]


def test_the_columns_of_swag(tmp_path):
    path = write_choices(tmp_path / "a.csv", 3)
    expected = [(q, [f"so {c}" for c in choices], y) for q, choices, y in chosen(3)]
    assert list(rows_of(path, TASK).columns("text", "pair", "label")) == expected
    tokenizer = AutoTokenizer.from_pretrained(make_bare(tmp_path / "bert"))
    tokens = encoded(path, TASK(), tokenizer)
    first = tokens[0]["input_ids"][3]
    assert first == tokenizer(expected[0][0], expected[0][1][3])["input_ids"]
    (batch,) = tokens.batches(TASK().collator(tokenizer), 3)
    assert batch["input_ids"].shape == (3, 4, max(tokens.lengths))
    assert batch["labels"].tolist() == [y for _, _, y in expected]
