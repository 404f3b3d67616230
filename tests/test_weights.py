"""Weights of positions, rows and samples, which several losses take; random calls have them too."""

import inspect

import pytest
import torch

import fastkd
from fastkd._core.registry import LOSSES, inputs_of
from tests.support.compare import counted, value_and_grad

TRITON_FUNCTION = "layer_norm_mse"  # every loss here has kernels in Triton and C++
OF_SAMPLES = ("attention_loss", "relation_loss")
each_loss = pytest.mark.parametrize(
    "name",
    [
        name
        for loss in LOSSES
        for name in loss.functions
        if "weights" in inspect.signature(getattr(fastkd, name)).parameters
    ],
)


def made(name, device, backend="auto"):
    """A call of features and weights, the features, and the shape of the weights."""
    learning, given, options = inputs_of(name)
    student, *rest = (x.to(device, torch.float32) for x in (*learning, *given))
    options = {option: x.to(device) for option, x in options.items() if option != "weights"}

    def call(student, weights):
        return getattr(fastkd, name)(student, *rest, weights=weights, backend=backend, **options)

    return call, student, student.shape[: 1 if name in OF_SAMPLES else -1]


@pytest.mark.thorough
@each_loss
def test_weights_in_a_graph(backend, name, device):
    """One graph of each function: weights multiply the losses of all its options."""
    call, student, shape = made(name, device, backend)
    weights = torch.randn(shape, device=device)
    plain = value_and_grad(call, student, weights)
    compiled, graphs = counted(call)
    torch.testing.assert_close(value_and_grad(compiled, student, weights), plain)
    assert len(graphs) == 1


@each_loss
def test_wrong_weights_are_named_or_visible(name):
    call, student, shape = made(name, "cpu")
    assert call(student, torch.full(shape, torch.nan)).isnan()
    remedy = "call it once for each" if name in ("relation_loss", "layer_norm_mse") else "none"
    for words, weights in (
        (r"weights must have shape .* leading dimensions of", torch.ones(*shape, 2)),
        ("weights must be bfloat16", torch.ones(shape, dtype=torch.int64)),
        (r"weights is on meta but .* is on cpu", torch.ones(shape, device="meta")),
        (f"weights requires grad.*{remedy}.*weights.detach", torch.ones(shape).requires_grad_()),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            call(student, weights)
