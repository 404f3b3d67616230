"""Labels that are distributions over the classes: their loss, scores and every command."""

import copy

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from fastkd.distill import LRCBERT, Distiller, IntraClassKNN, Labels
from fastkd.train.arrow_rows import PROBABILITIES
from fastkd.train.data import describe, load
from fastkd.train.saving import read_json
from tests.support.runs import first_step
from tests.support.tiny import STILL, make_teacher, run, sentences, source
from tests.train.tasks.through import told, write_jsonl

PROBS = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [torch.nan] * 3, [0.6, 0.2, 0.2]])
LISTS = [[0.75, 0.25], [0.1, 0.9]]
FORMS = {  # lists: test_drawn_files.py
    "names": [{"no": 0.75, "yes": 0.25}, {"yes": 0.9, "no": 0.1}],
    "mixed": [{"no": 0.75, "yes": 0.25}, "yes"],
}


def write(path, labels, rows=24, seed=0):
    """Texts whose class chooses one of two labels."""
    rows = ({"sentence": text, "label": labels[y]} for text, y in sentences(rows, seed))
    return write_jsonl(path, rows)


def test_the_loss_is_the_cross_entropy_with_the_distribution():
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=3,
        intermediate_size=16, problem_type="single_label_classification",
    )  # fmt: skip
    student = BertForSequenceClassification(config).double().eval()
    teacher = copy.deepcopy(student)
    batch = {"input_ids": torch.randint(0, 40, (4, 6))}
    log_q = student(**batch).logits.log_softmax(-1)
    known, hard = [0, 1, 3], torch.eye(3).double()[[0, 2, 1, 1]]
    smooth = LRCBERT(perturb=False, alpha=0.0, beta=0.0, first_stage=0.0, temperature=1.1)
    for method in (Labels(), smooth):
        distiller = Distiller(teacher, student, method).eval()
        spread = method.prediction_options.label_spread
        share = 3 * spread / (1 + 2 * spread)
        target = (1 - share) * PROBS[known].double() + share / 3
        found = distiller(**batch, labels=PROBS.double()).terms["task"]
        torch.testing.assert_close(found, -(target * log_q[known]).sum().detach() / 3)
        one, other = (distiller(**batch, labels=x).terms["task"] for x in (hard, hard.argmax(-1)))
        torch.testing.assert_close(one, other)
    knn = Distiller(teacher, student, IntraClassKNN(k=1)).eval()
    one, other = (
        knn(**batch, labels=x).terms["knn"] for x in (PROBS.double(), torch.tensor([2, 0, -100, 0]))
    )
    torch.testing.assert_close(one, other)


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
