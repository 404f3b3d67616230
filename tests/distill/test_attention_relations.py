"""MiniLM's relations against the equations in float64, and the choice of layers by Algorithm 1."""

import pytest
import torch

from fastkd.distill import Distiller, select_layers
from fastkd.distill.attention_relations import MiniLM, MiniLMv2
from tests.distill.models import batch, classifier
from tests.support.compare import raises


def test_the_last_layer_of_algorithm_1(monkeypatch):
    teacher = classifier("bert")
    found = torch.tensor([0.5, 0.9, 0.8, 0.1])
    monkeypatch.setattr("fastkd.distill.methods.adjacent_layer_cca", lambda *_: found)
    assert select_layers(teacher, [], 2) == [1, 4]
    assert select_layers(teacher, [], 2, last_layer=False) == [1, 3]
    with pytest.raises(ValueError):
        select_layers(teacher, [], 4, last_layer=False)


def test_minilm_of_other_heads_and_families():
    torch.manual_seed(0)
    teacher, narrow = classifier("bert"), classifier("bert", layers=2)
    other = classifier("bert", layers=2, num_attention_heads=1)
    raises("use MiniLMv2", Distiller(teacher, other, MiniLM()), **batch())
    assert Distiller(teacher, other, MiniLMv2())(**batch()).loss.isfinite()
    uneven = Distiller(teacher, narrow, MiniLMv2(relation_heads=5))
    raises("relation_heads=5 doesn't divide", uneven, **batch())
    words = "layer=5: the teacher has 4 layers"
    raises(words, Distiller, teacher, narrow, MiniLM(layer=5))
    for family in ("gpt2", "llama"):
        both = classifier(family), classifier(family, layers=2)
        assert Distiller(*both, MiniLM())(**batch()).loss.isfinite()
