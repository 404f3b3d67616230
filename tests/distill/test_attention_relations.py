"""MiniLM's relations against the equations in float64, and the choice of layers by Algorithm 1."""

import pytest
import torch
from torch.nn import functional as F

from fastkd.distill import Distiller, select_layers
from fastkd.distill.attention_relations import MiniLM, MiniLMv2
from tests.distill.models import batch, classifier
from tests.distill.test_methods import pair
from tests.support.compare import raises

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def states(model, inputs):
    names = ("input_ids", "attention_mask")
    out = model(**{n: inputs[n] for n in names}, output_hidden_states=True)
    return out.logits, out.hidden_states


def gradients(student, loss):
    student.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}


def assert_equal(distiller, inputs, oracle):
    distiller.eval()
    loss = distiller(**inputs).loss
    own = gradients(distiller.student, loss)
    expected = oracle()
    theirs = gradients(distiller.student, expected)
    torch.testing.assert_close(loss, expected, **EXACT)
    assert own.keys() == theirs.keys() and own
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, theirs[name], **EXACT)


def test_the_last_layer_of_algorithm_1(monkeypatch):
    teacher = classifier("bert")
    found = torch.tensor([0.5, 0.9, 0.8, 0.1])
    monkeypatch.setattr("fastkd.distill.methods.adjacent_layer_cca", lambda *_: found)
    assert select_layers(teacher, [], 2) == [1, 4]
    assert select_layers(teacher, [], 2, last_layer=False) == [1, 3]
    with pytest.raises(ValueError):
        select_layers(teacher, [], 4, last_layer=False)


def heads_of(model, layer, inputs, heads):
    """Queries, keys and values (B, H, N, d) of a BERT layer, from its own weights."""
    hidden = states(model, inputs)[1][layer - 1]
    own = model.bert.encoder.layer[layer - 1].attention.self
    return [
        projection(hidden).unflatten(-1, (heads, -1)).transpose(1, 2)
        for projection in (own.query, own.key, own.value)
    ]


def relation_kl(student, teacher, mask):
    """(1 / (A |x|)) Σ_a Σ_t KL(R^T_{a,t} ‖ R^S_{a,t}) of each text without its padding."""
    losses = []
    for i, real in enumerate(mask):
        total = 0
        heads = student[0].shape[1]
        for a in range(heads):
            logs = []
            for x, y in (student, teacher):
                rows, columns = x[i, a][real], y[i, a][real]
                logs.append((rows @ columns.T / rows.shape[-1] ** 0.5).log_softmax(-1))
            total += (logs[1].exp() * (logs[1] - logs[0])).sum()
        losses.append(total / (heads * real.sum()))
    return torch.stack(losses).mean()


def test_minilm_is_its_equations():
    teacher, student = pair("bert")
    inputs = batch()
    mask = inputs["attention_mask"].bool()
    method = MiniLM(attention=0.5, values=2.0, task_weight=0.3)
    heads = student.config.num_attention_heads

    def oracle():
        with torch.no_grad():
            q_t, k_t, v_t = heads_of(teacher, 4, inputs, heads)
        q, k, v = heads_of(student, 2, inputs, heads)
        task = F.cross_entropy(states(student, inputs)[0], inputs["labels"])
        at = relation_kl((q, k), (q_t, k_t), mask)
        return 0.5 * at + 2.0 * relation_kl((v, v), (v_t, v_t), mask) + 0.3 * task

    assert_equal(Distiller(teacher, student, method), inputs, oracle)


@pytest.mark.parametrize(("relation_heads", "layer"), [(4, None), (None, 3)])
def test_minilmv2_is_its_equations(relation_heads, layer):
    teacher, student = pair("bert")
    inputs = batch()
    mask = inputs["attention_mask"].bool()
    method = MiniLMv2(
        queries=0.5, keys=2.0, relation_heads=relation_heads, layer=layer, task_weight=0.0
    )
    heads = relation_heads or max(h for h in range(1, 49) if student.config.hidden_size % h == 0)

    def oracle():
        with torch.no_grad():
            theirs = heads_of(teacher, layer or 4, inputs, heads)
        ours = heads_of(student, 2, inputs, heads)
        weights = zip((0.5, 2.0, 1.0), ours, theirs, strict=True)
        return sum(w * relation_kl((s, s), (t, t), mask) for w, s, t in weights)

    assert_equal(Distiller(teacher, student, method), inputs, oracle)


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


def test_minilm_of_a_decoder_compares_its_attention():
    """softmax(QKᵀ/√d) over earlier tokens is GPT-2's own map."""
    teacher, student = (model.eval() for model in pair("gpt2"))
    inputs = batch(padding=0)
    for model in (teacher, student):
        model.set_attn_implementation("eager")
    with torch.no_grad():
        a_t, a_s = (
            model(input_ids=inputs["input_ids"], output_attentions=True).attentions[-1]
            for model in (teacher, student)
        )
    expected = torch.where(a_t > 0, a_t * (a_t / a_s).log(), 0).sum(-1).mean()
    method = MiniLM(values=0.0, task_weight=0.0)
    out = Distiller(teacher, student, method).eval()(**inputs)
    torch.testing.assert_close(out.loss.detach(), expected, **EXACT)
