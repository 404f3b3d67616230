"""Weights of the tokens of a batch, in soft and task terms."""

import pytest
import torch
import transformers as t

from fastkd.distill import Distiller, SoftTargets
from tests.distill.models import batch, classifier, model, set_dropout
from tests.support.compare import raises

pytestmark = pytest.mark.filterwarnings("ignore:mask")


def made(keep_logits=False):
    torch.manual_seed(0)
    teacher, student = (model(t.AutoModelForCausalLM, "llama", layers) for layers in (3, 2))
    method = SoftTargets(alpha=0.4, temperature=2.0)
    distiller = Distiller(teacher, student, method, keep_logits=keep_logits)
    set_dropout(distiller)
    return distiller


def data():
    torch.manual_seed(1)
    ids, mask = torch.randint(1, 60, (3, 8)), torch.ones(3, 8, dtype=torch.int64)
    for row, length in enumerate((8, 5, 6)):
        mask[row, length:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 2] = -100
    weights = torch.randn(3, 8).masked_fill(mask == 0, torch.nan)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "loss_weights": weights}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keep_logits", [False, True])
def test_weights_of_zero_and_of_the_other_sign(keep_logits, dtype):
    """Also under autocast, with weights in the model's half precision."""
    distiller, given = made(keep_logits=keep_logits), data()
    weights = given.pop("loss_weights").nan_to_num().to(dtype)
    found = {}
    for factor in (0, 1, -1):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = distiller(**given, loss_weights=factor * weights)
        (grad,) = torch.autograd.grad(out.loss, distiller.student.lm_head.weight)
        found[factor] = torch.stack([out.terms["soft"], out.terms["task"]]), grad
    assert all((x == 0).all() for x in found[0])
    for ours, theirs in zip(found[-1], found[1], strict=True):
        torch.testing.assert_close(ours, -theirs)
        assert (ours != 0).any()


def test_wrong_weights_are_errors():
    distiller, given = made(), data()
    for wrong, error, words in (
        (torch.ones(3, 7), ValueError, "loss_weights must have shape"),
        (torch.ones(3, 8).long(), TypeError, "loss_weights must be bfloat16"),
        (torch.ones(3, 8, requires_grad=True), ValueError, "loss_weights requires grad"),
    ):
        raises(words, distiller, error=error, **given | {"loss_weights": wrong})
    sequence = Distiller(classifier("bert", 3), classifier("bert", 2), SoftTargets())
    words = "gives one prediction a row; leave them out"
    raises(words, sequence, **batch(), loss_weights=torch.ones(2, 2))
