"""Lists of documents for a query: their losses by hand."""

import math

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from fastkd.distill import Distiller, SoftTargets
from fastkd.distill.baselines import MarginMSE
from fastkd.train.tasks.reranking import _ranked

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
