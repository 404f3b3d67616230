"""Labels that are distributions over the classes: forms, scores and every command."""

import pytest
import torch

from fastkd.train.arrow_rows import PROBABILITIES
from fastkd.train.data import describe, load
from fastkd.train.saving import read_json
from tests.support.runs import first_step
from tests.support.tiny import STILL, make_teacher, run, sentences, source
from tests.train.tasks.through import told, write_jsonl

LISTS = [[0.75, 0.25], [0.1, 0.9]]
FORMS = {  # lists: test_drawn_files.py
    "names": [{"no": 0.75, "yes": 0.25}, {"yes": 0.9, "no": 0.1}],
    "mixed": [{"no": 0.75, "yes": 0.25}, "yes"],
}


def write(path, labels, rows=24, seed=0):
    """Texts whose class chooses one of two labels."""
    rows = ({"sentence": text, "label": labels[y]} for text, y in sentences(rows, seed))
    return write_jsonl(path, rows)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_every_form(tmp_path, form):
    path = write(tmp_path / "a.jsonl", FORMS[form])
    corpus = load(source(train=path, evals=path))
    assert corpus.names == ["no", "yes"]
    found = dict(corpus.train.columns("label", PROBABILITIES))
    assert found[0] == pytest.approx(LISTS[0])
    assert found[1] == pytest.approx([0.0, 1.0] if form == "mixed" else LISTS[1])
    lines = " ".join(describe(corpus))
    assert "labels are probabilities" in lines and "12/12" in lines


def test_every_command_takes_them(tmp_path):
    teacher = make_teacher(tmp_path / "teacher", ["yes", "no"], **STILL)  # in another order
    train, evals = (write(tmp_path / f"{i}.jsonl", FORMS["names"], seed=i) for i in range(2))
    options = {"train": train, "eval": evals, "teacher": teacher, "device": "cpu", "epochs": 1,
               "max_length": 16, "batch_size": 8}  # fmt: skip
    run("distill", **options, labelled=8, finetune_teacher=1, out=tmp_path / "run")
    report = read_json(tmp_path / "run/student/fastkd.json")
    assert report["labels"] == ["yes", "no"] and report["rows"]["unlabelled"] == 16
    # The most probable class is the label of the scores.
    for data in (evals, write(tmp_path / "hard.jsonl", ["no", "yes"], seed=1)):
        out = tmp_path / f"{data.stem}.json"
        run("evaluate", model=tmp_path / "run/student", data=data, device="cpu", out=out)
        assert read_json(out)["accuracy"] == report["student"]["accuracy"]
    few = {"max_train_rows": 8, "accumulate": 2, "out": tmp_path / "parts"}
    run("distill", method="lrc_bert", **options, **few)
    # At the first step: -(.75 log q + .25 log q) of a row, by the teacher's own weights.
    one = write(tmp_path / "one.jsonl", FORMS["names"], rows=2)
    options |= {"student": teacher, "method": "labels", "train": one}
    _, terms = first_step(**options)
    rows = told(teacher, one, tmp_path / "told.jsonl")
    q = torch.tensor([[row["P(no)"], row["P(yes)"]] for row in rows])
    by_hand = -(torch.tensor(LISTS) * q.log()).sum(-1).mean()
    assert terms["task"].item() == pytest.approx(by_hand.item(), rel=1e-4)
