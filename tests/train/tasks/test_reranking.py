"""Lists of documents for a query: their losses by hand, scores, forms of rows, every command."""

import json
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score
from transformers import BertConfig, BertForSequenceClassification

from fastkd.distill import Distiller, SoftTargets
from fastkd.distill.baselines import MarginMSE
from fastkd.train.data import describe, load
from fastkd.train.tasks.reranking import TASK, _ranked
from tests.support.runs import first_step
from tests.support.tiny import run, source, usual
from tests.train.tasks.through import queries, rows_of, through

NAN = math.nan
# Three lists: with scores, without, and again with scores; the second has two relevant documents.
LABELS = torch.tensor(
    [[0, 1, 2.0], [0, 0, -1.0], [0, 0, 0.5], [1, 1, NAN], [1, 1, NAN], [1, 0, NAN], [2, 1, 0.0],
     [2, 0, -3.0]]
)  # fmt: skip
LISTS = [slice(0, 3), slice(3, 6), slice(6, 8)]


def model(seed):
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=1,
        intermediate_size=16, problem_type="regression", initializer_range=0.5,
    )  # fmt: skip
    return BertForSequenceClassification(config).double().eval()


def test_losses_by_hand():
    student, teacher = model(0), model(1)
    batch = {"input_ids": torch.randint(0, 40, (8, 6)), "labels": LABELS.double()}
    s, t = (x(input_ids=batch["input_ids"]).logits[:, 0].detach() for x in (student, teacher))
    T = 2.0
    given = LABELS[:, 2].double()

    def kl(x, part):
        p = (x[part] / T).softmax(-1)
        return T**2 * (p * (p.log() - (s[part] / T).log_softmax(-1))).sum()

    soft = sum(kl(t, part) for part in LISTS) / 3
    first, third = (kl(given, LISTS[i]) for i in (0, 2))
    relevant = -s[LISTS[1]].log_softmax(-1)[:2].mean()
    found = Distiller(teacher, student, SoftTargets(temperature=T)).eval()(**batch).terms
    torch.testing.assert_close(found["soft"], soft)
    torch.testing.assert_close(found["task"], (first + relevant + third) / 3)

    def margin(x, positives, negatives):
        errors = [(s[i] - s[j] - x[i] + x[j]) ** 2 for i in positives for j in negatives]
        return sum(errors) / len(errors)

    pairs = [([0], [1, 2]), ([3, 4], [5]), ([6], [7])]
    for alpha, name, x, lists in ((1.0, "margin", t, pairs), (0.0, "task", given, pairs[::2])):
        distiller = Distiller(teacher, student, MarginMSE(alpha=alpha)).eval()
        out = distiller(**batch)
        torch.testing.assert_close(out.terms[name], sum(margin(x, *p) for p in lists) / len(lists))
        out.loss.backward()
    with pytest.raises(ValueError, match="MarginMSE: no list of the batch has scores"):
        distiller(**{**batch, "labels": LABELS.double().index_fill(1, torch.tensor(2), NAN)})
    with pytest.raises(ValueError, match="MarginMSE compares scores within lists"):
        distiller(**{**batch, "labels": torch.zeros(8).double()})
    # Equal scores count against a document.
    assert _ranked([1.0] * 3, [1.0, 0.0, 0.0]) == (pytest.approx(0.5), pytest.approx(1 / 3))


def test_every_command_takes_it(tiny, tmp_path):
    report = through(tmp_path, "reranking", finetune=False)
    told = report["told"]
    assert [(row["query"], row["pos"], row["neg"]) for row in told] == list(queries(12, 1))
    ranks = []
    for row in told:
        scores = row["pos_scores"] + row["neg_scores"]
        ranks.append((ndcg_score([[1] + [0] * len(row["neg"])], [scores], k=10),
                      1 / (1 + sum(x >= scores[0] for x in scores[1:]))))  # fmt: skip
    expected = dict(zip(("ndcg@10", "mrr"), np.mean(ranks, 0), strict=True))
    assert report["best"]["scores"] == pytest.approx(expected)
    # The CrossEncoder of sentence-transformers ranks by the same scores.
    encoder = pytest.importorskip("sentence_transformers").CrossEncoder(
        str(tmp_path / "run/student"), device="cpu"
    )
    row = told[0]
    pairs = [(row["query"], text) for text in row["pos"] + row["neg"]]
    found = encoder.predict(pairs, activation_fn=torch.nn.Identity())
    assert found.tolist() == pytest.approx(row["pos_scores"] + row["neg_scores"], abs=1e-5)
    assert "CrossEncoder" in report["card"]
    # What `predict` writes is a file with a teacher's scores.
    margin = {"method": "margin_mse", "set": "alpha=0"}
    more = {"task": "reranking", "train": tmp_path / "told.jsonl",
            "eval": tmp_path / "eval.jsonl", "teacher": tmp_path / "teacher", **margin}  # fmt: skip
    found, terms = first_step(**usual(tiny, tmp_path, **more))
    said = "\n".join(describe(found.data.corpus))
    assert "lists of 2 to 4 documents; 12 of 12 training lists have scores" in said
    assert set(terms) == {"total", "task"}
    for options, words in (
        ({**more, "accumulate": 2}, "--accumulate: a row of --task reranking is a list"),
        ({"method": "margin_mse"}, "MarginMSE compares scores"),
    ):
        assert words in run("distill", expect=2, **usual(tiny, tmp_path / "no", **options))
    bare = tmp_path / "bare.jsonl"
    bare.write_text(json.dumps({"query": "film", "documents": ["good", "bad film"]}))
    run("predict", model=tmp_path / "run/student", data=bare, device="cpu",
        out=tmp_path / "bare.csv")  # fmt: skip


def test_forms_of_rows(tmp_path):
    for row, label in (
        ({"query": "q", "pos": ["a"], "neg": ["b", "c"]}, [NAN] * 3),
        ({"query": "q", "pos": ["a"], "neg": ["b", "c"], "pos_scores": [2], "neg_scores": [1, 0]},
         [2.0, 1.0, 0.0]),
        ({"anchor": "q", "positive": "a", "negative_1": "b", "negative_2": "c", "label": [1, 3]},
         [0.0, -1.0, -3.0]),
        ({"query": "q", "positive": "a", "negative": ["b", "c"], "scores": [3, 2, 1]},
         [3.0, 2.0, 1.0]),
    ):  # fmt: skip
        rows = rows_of(tmp_path / "a.jsonl", TASK, json.dumps(row))
        ((text, pair, found),) = rows.columns("text", "pair", "label")
        assert (text, pair) == ("q", ["a", "b", "c"])
        assert found == pytest.approx([1.0, 0.0, 0.0, *label], nan_ok=True)
    path = tmp_path / "a.csv"
    path.write_text("anchor,positive,negative,label\nq,a,b,0.5\n")
    corpus = load(source(task="reranking", train=path, evals=path))
    assert list(corpus.train.column("label")) == [[1.0, 0.0, 0.0, -0.5]]
