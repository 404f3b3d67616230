"""The derivative rule that every loss keeps."""

import pytest
import torch

import fastkd
from fastkd._losses import LOSSES

FUNCTIONS = {
    name: (getattr(fastkd, name), inputs)
    for loss in LOSSES
    for name, inputs in loss.compared.items()
}
FUNCTIONS["relation_loss, plain autograd"] = (
    lambda *args, **options: fastkd.relation_loss(*args, distance="kl", **options),
    FUNCTIONS["relation_loss"][1],
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_gradient_penalty_raises(name):
    """Also when the upstream gradient is a constant, and the loss itself is in the sum."""
    function, inputs = FUNCTIONS[name]
    (x, *learning), given, options = inputs(torch.Generator().manual_seed(0))
    loss = function(x.requires_grad_(), *learning, *given, **options).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        (loss + gradient.square().sum()).backward()
