"""The derivative rule that every loss keeps."""

import pytest
import torch

import fastkd

FEATURES = torch.randn(4, 6, 8)
LABELS = torch.tensor([0, 0, 1, 1])

LOSSES = {
    "relation_loss": lambda x: fastkd.relation_loss(x, FEATURES),
    "relation_loss, plain autograd": lambda x: fastkd.relation_loss(x, FEATURES, distance="kl"),
    "knn_feature_loss": lambda x: fastkd.knn_feature_loss(x, FEATURES, LABELS),
    "cos_nce_loss": lambda x: fastkd.cos_nce_loss(x, FEATURES),
    "cca_loss": lambda x: fastkd.cca_loss(x, FEATURES),
    "layer_norm_mse": lambda x: fastkd.layer_norm_mse(x, FEATURES),
    "soft_target_loss": lambda x: fastkd.soft_target_loss(x, FEATURES),
    "linear_soft_target_loss": lambda x: fastkd.linear_soft_target_loss(
        x, FEATURES[0], FEATURES, FEATURES[1]
    ),
    "sqrtm": lambda x: fastkd.sqrtm(x @ x.mT).sum(),
    "cayley": lambda x: fastkd.cayley(x[..., :6] - x[..., :6].mT).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_gradient_penalty_raises(name):
    """Also when the upstream gradient is a constant, and the loss itself is in the sum."""
    x = torch.randn(4, 6, 8, requires_grad=True)
    loss = LOSSES[name](x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        (loss + gradient.square().sum()).backward()
