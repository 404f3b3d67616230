"""Losses of one embedding for each sample equal direct calls of the functions."""

import pytest
import torch
from torch.nn import functional as F

from fastkd import cca_loss, cos_nce_loss, relation_loss
from fastkd.distill import Distiller
from fastkd.distill.baselines import Embeddings
from fastkd.distill.step import Step
from tests.distill.models import batch, classifier
from tests.support.compare import raises

ALL = {"cos_nce": 0.7, "relations": 0.5, "cca": 0.01, "task_weight": 0.3}
SAME_WIDTH = {"cosine": 0.2, "mse": 2.0}


def pair(width=16, family="bert"):
    size = {"hidden_size": width} if width != 16 else {}
    return classifier(family).double(), classifier(family, layers=2, **size).double()


def embedded(model, inputs, pooling, unit):
    names = ("input_ids", "attention_mask")
    states = model.base_model(**{name: inputs[name] for name in names}).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    last = inputs["attention_mask"].sum(1) - 1 if model.config.model_type == "gpt2" else 0
    token = states[torch.arange(len(states)), last]
    found = token if pooling == "cls" else (states * mask).sum(1) / mask.sum(1)
    return F.normalize(found, dim=-1) if unit else found


@pytest.mark.parametrize(
    ("family", "width", "pooling", "unit"),
    [("bert", 16, "mean", True), ("bert", 8, "cls", False), ("gpt2", 16, "cls", True)],
)
@pytest.mark.filterwarnings("ignore:CCALoss")
def test_terms_are_the_functions(family, width, pooling, unit):
    teacher, student = pair(width, family)
    inputs = batch()
    weights = {**ALL, **(SAME_WIDTH if width == 16 else {})}
    method = Embeddings(**weights, pooling=pooling, unit_length=unit)
    distiller = Distiller(teacher, student, method).eval()
    out = distiller(**inputs)
    s = embedded(student, inputs, pooling, unit)
    t = embedded(teacher, inputs, pooling, unit).detach()
    moved = s if method.W is None else s @ method.W.weight.T
    assert (method.W is None) == (width == 16)
    expected = {
        "task": F.cross_entropy(student(**inputs).logits, inputs["labels"]),
        "contrast": cos_nce_loss(moved, t),
        "samples": relation_loss(s, t, over="samples"),
        "correlations": cca_loss(s, t, ridge=0.1),
    }
    total = sum(w * x for w, x in zip((0.3, 0.7, 0.5, 0.01), expected.values(), strict=True))
    if width == 16:
        expected["angles"] = (1 - F.cosine_similarity(s, t)).mean()
        expected["squares"] = F.mse_loss(s, t)
        total = total + 0.2 * expected["angles"] + 2 * expected["squares"]
    for name, value in expected.items():
        torch.testing.assert_close(out.terms[name], value.detach())
    torch.testing.assert_close(out.loss, total)


@pytest.mark.filterwarnings("ignore:CCALoss")
def test_a_step_pools_once_for_all_terms(monkeypatch):
    calls = []
    pooled = Step.pooled
    monkeypatch.setattr(Step, "pooled", lambda *args: calls.append(1) or pooled(*args))
    Distiller(*pair(), Embeddings(**ALL, **SAME_WIDTH)).eval()(**batch())
    assert len(calls) == 1


def test_wrong_arguments_are_errors():
    words = "have 8 dimensions, the teacher's 16; set"
    raises(words, Distiller, *pair(8), Embeddings(mse=1.0))
    raises("pooling must be one of 'mean', 'cls', got 'max'", Embeddings, pooling="max")
    raises("relations must be", Embeddings, relations=-1.0)
