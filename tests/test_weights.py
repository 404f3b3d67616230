"""Weights of positions, rows and samples, which several losses take; random calls have them too."""

import itertools

import pytest
import torch

import fastkd
from fastkd import functional
from tests.support.compare import assert_matches_reference, counted, value_and_grad

TRITON_FUNCTION = "layer_norm_mse"  # every loss here has kernels in Triton and C++
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
LABELS = torch.tensor([0, 1, -100, 0])
# Shapes of student and teacher, which weights belong to something that counts, and options.
MASKED, STATES = {"mask": MASK}, ((4, 5, 9), (4, 5, 9))
LOSSES = {
    "knn_feature_loss": ((4, 9), (4, 9), LABELS != -100, {"student_labels": LABELS}),
    "cos_nce_loss": (*STATES, MASK, MASKED),
    "layer_norm_mse": ((4, 5, 70), (4, 5, 70), MASK + 1, {}),
    "attention_loss": ((4, 2, 5, 5), (4, 2, 5, 5), MASK.any(1), MASKED),
    "relation_loss": ((4, 5, 9), (4, 5, 7), MASK.sum(1) >= 2, MASKED),
    "hidden_state_loss": (*STATES, MASK, MASKED),
    "soft_target_loss": (*STATES, MASK, MASKED),
}
each_loss = pytest.mark.parametrize("name", LOSSES)


def made(name, backend="auto"):
    """A call with weights, features, and a mask of the weights that count."""
    *shapes, counts, options = LOSSES[name]
    student, teacher = map(torch.randn, shapes)

    def call(student, teacher, weights, **more):
        return getattr(fastkd, name)(
            student, teacher, weights=weights, **options, **{"backend": backend} | more
        )

    return call, student, teacher, counts.bool()


@pytest.mark.parametrize("name", ["attention_loss", "hidden_state_loss", "soft_target_loss"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_stays_in_its_loss(backend, name, bad):
    """A weight of 0, which is no mask, hides it neither."""
    call, *pair, counts = made(name, backend)
    for side, weights in itertools.product(pair, (None, torch.zeros(counts.shape))):
        kept, side[2, 0, 3] = side[2, 0, 3].clone(), bad
        finite = call(*pair, weights, reduction="none").isfinite()
        side[2, 0, 3] = kept
        assert not finite.flatten(1)[2, 0] if finite.dim() > 1 else not finite[2]
        assert finite.sum() == finite.numel() - 1


@each_loss
def test_weights_under_compile_and_autocast(backend, name):
    """One graph of each function: weights multiply the losses of all its options."""
    call, student, teacher, counts = made(name, backend)
    weights = torch.randn(counts.shape)
    plain = value_and_grad(call, student, teacher, weights)
    compiled, graphs = counted(call)
    torch.testing.assert_close(value_and_grad(compiled, student, teacher, weights), plain)
    assert len(graphs) == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = value_and_grad(call, student, teacher, weights)
    assert all(map(torch.equal, under, plain))
    assert call(student, teacher, weights * torch.nan).isnan()


@each_loss
def test_wrong_weights_are_named(name):
    call, student, teacher, counts = made(name)
    shape = counts.shape
    remedy = "call it once for each" if name in ("relation_loss", "layer_norm_mse") else "none"
    for words, weights in (
        (r"weights must have shape .* leading dimensions of", torch.ones(*shape, 2)),
        ("weights must be bfloat16", torch.ones(shape, dtype=torch.int64)),
        (r"weights is on meta but .* is on cpu", torch.ones(shape, device="meta")),
        (f"weights requires grad.*{remedy}.*weights.detach", torch.ones(shape).requires_grad_()),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            call(student, teacher, weights)


@pytest.mark.parametrize("lead", [(140,), (40,)])
def test_weights_of_many_tokens(backend, lead):
    """Relations in tiles, and by features."""
    student, teacher = torch.randn(2, *lead, 6), torch.randn(2, *lead, 5)
    functions = fastkd.relation_loss, functional.relation_loss_ref
    weights = torch.tensor([0.7, -1.5])
    assert_matches_reference(*functions, backend, student, teacher, weights=weights)
