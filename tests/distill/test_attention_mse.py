"""TinyBERT's losses of attention maps and states, against the paper's formulas."""

import pytest
import torch
from torch.nn import functional as F

from fastkd.distill import AttentionMSE, Distiller
from tests.distill.models import batch, classifier, eager
from tests.distill.test_methods import TEACHER_LAYERS, both, kl, pair, total

FAMILIES = ("bert", "gpt2")


def eager_pair(family):
    return eager(pair(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_mse_is_tinyberts_equations_7_to_10(family):
    teacher, student = eager_pair(family)
    inputs = batch()
    mask = inputs["attention_mask"].bool()
    (z_t, h_t), (z_s, h_s) = both(teacher, student, inputs)
    names = ("input_ids", "attention_mask")
    with torch.no_grad():
        a_t, a_s = (
            model(**{n: inputs[n] for n in names}, output_attentions=True).attentions
            for model in (teacher, student)
        )
    method = AttentionMSE(attention=2.0, hidden=0.5, soft_weight=0.7, task_weight=0.3)
    out = total(teacher, student, method, inputs)
    W = method.W.weight.T.detach()
    maps, states = 0.0, 0.0
    for i, j in zip((1, 2), TEACHER_LAYERS, strict=True):
        samples = [
            (s[:, real][:, :, real] - t[:, real][:, :, real]).square().mean()
            for s, t, real in zip(a_s[i - 1], a_t[j - 1], mask, strict=True)
        ]
        maps += torch.stack(samples).mean()
    for i, j in zip((0, 1, 2), (0, *TEACHER_LAYERS), strict=True):
        states += (h_s[i][mask] @ W - h_t[j][mask]).square().mean()
    torch.testing.assert_close(out.terms["maps"], maps)
    torch.testing.assert_close(out.terms["states"], states)
    task = F.cross_entropy(z_s, inputs["labels"])
    expected = 2 * maps + 0.5 * states + 0.7 * kl(z_t, z_s, 1.0) + 0.3 * task
    torch.testing.assert_close(out.loss, expected)


@pytest.mark.parametrize(("family", "term"), [("bert", "attention"), ("gpt2", "hidden")])
def test_attention_mse_has_gradients_for_the_student(family, term):
    teacher, student = eager_pair(family)
    method = AttentionMSE(**{"attention": 0.0, "hidden": 0.0, "soft_weight": 0.0, term: 1.0})
    Distiller(teacher, student, method)(**batch()).loss.backward()
    assert any(p.grad is not None and p.grad.any() for p in student.parameters())
    assert all(p.grad is None for p in teacher.parameters())
    assert (method.W.weight.grad is not None) == (term == "hidden")


def test_attention_mse_of_unequal_numbers_of_heads():
    teacher, _ = eager_pair("bert")
    student = classifier("bert", layers=2, num_attention_heads=4).double()
    student.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="compare their means with heads='mean'"):
        Distiller(teacher, student, AttentionMSE())(**batch())
    out = Distiller(teacher, student, AttentionMSE(heads="mean"))(**batch())
    out.loss.backward()
    assert out.loss.isfinite()
