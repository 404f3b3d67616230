"""Weights of positions, rows and samples, masks and reductions, which several losses take."""

import functools
import itertools

import pytest
import torch

import fastkd
from fastkd import functional
from tests.support.compare import assert_matches_reference, counted, value_and_grad

TRITON_FUNCTION = "layer_norm_mse"  # every loss here has kernels in Triton and C++
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
LABELS = torch.tensor([0, 1, -100, 0])


class Weighted:
    """A loss, shapes of its inputs, and which of its weights belong to something that counts."""

    def __init__(self, name, shape, counted=None, teacher=(), like=None, **options):
        self.function, self.reference = getattr(fastkd, name), getattr(functional, f"{name}_ref")
        self.shape, self.options = shape, options
        self.counted = torch.ones(like or shape[:1]).bool() if counted is None else counted.bool()
        self.teacher = teacher or shape

    def inputs(self, dtype=torch.float32):
        return [torch.randn(shape).to(dtype) for shape in (self.shape, self.teacher)]

    def call(self, student, teacher, weights=None, reference=False, **options):
        function = self.reference if reference else self.function
        return function(student, teacher, weights=weights, **self.options | options)

    def masks(self):
        """Options with each mask: of integers, of bool, full and empty; without one, none."""
        given = [MASK, MASK.bool(), torch.ones(4, 5), torch.zeros(4, 5)]
        return [{"mask": mask} for mask in given] if "mask" in self.options else [{}]


LOSSES = {
    "knn": Weighted("knn_feature_loss", (4, 9), LABELS != -100, student_labels=LABELS),
    "cos_nce": Weighted("cos_nce_loss", (4, 5, 9), MASK, mask=MASK),
    "cos_nce by labels": Weighted(
        "cos_nce_loss", (4, 5, 9), MASK, mask=MASK, labels=torch.tensor([0, 1, 0, 1])
    ),
    "layer_norm": Weighted("layer_norm_mse", (4, 5, 70), like=(4, 5)),
    "attention": Weighted("attention_loss", (4, 2, 5, 5), MASK.any(1), mask=MASK),
    "attention of means": Weighted(
        "attention_loss", (4, 2, 5, 5), MASK.any(1), (4, 3, 5, 5), mask=MASK, heads="mean"
    ),
    "relation": Weighted("relation_loss", (4, 5, 9), MASK.sum(1) >= 2, (4, 5, 7), mask=MASK),
    "relation without a mask": Weighted("relation_loss", (4, 5, 9), None, (4, 5, 7)),
    "relation by features": Weighted("relation_loss", (4, 40, 3), None, (4, 40, 2)),
    "relation of many tokens": Weighted("relation_loss", (2, 140, 6), None, (2, 140, 5)),
    "hidden_states": Weighted("hidden_state_loss", (4, 5, 9), MASK, mask=MASK),
    "hidden_states by cosine": Weighted(
        "hidden_state_loss", (4, 5, 9), MASK, mask=MASK, kind="cosine"
    ),
    "hidden_states by smooth L1": Weighted(
        "hidden_state_loss", (4, 5, 9), MASK, mask=MASK, kind="smooth_l1"
    ),
    "soft_targets": Weighted("soft_target_loss", (4, 5, 9), MASK, mask=MASK),
}
ONCE = {loss.function: loss for loss in reversed(LOSSES.values())}.values()  # of each function
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
# Reductions of a loss's weights.
REDUCTIONS = {
    "relation_loss": (),
    "layer_norm_mse": ("mean", "batchmean", "sum"),
    "soft_target_loss": ("batchmean", "sum", "none"),
}


def reductions(loss):
    return REDUCTIONS.get(loss.function.__name__, ("mean", "sum", "none"))


@pytest.mark.left_out(
    where=lambda given: given["backend"] == "triton" and given["dtype"] == torch.float64
)
@each_loss
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_weights_match_the_reference(backend, loss, dtype):
    """And gradients that of autograd: with every reduction, in float32 also with every mask."""
    student, teacher = loss.inputs(dtype)
    weights = torch.randn(loss.counted.shape, dtype=torch.float64)  # negative ones too
    weights.flatten()[0] = 0
    options = [{"reduction": name} for name in reductions(loss)] or [{}]
    masks = loss.masks() if dtype == torch.float32 else [{}]
    # The Triton kernels of relations multiply half precision, and the value has its rounding.
    products = dtype if backend == "triton" and options == [{}] else None
    for reduction, mask in itertools.product(options, masks):
        call = functools.partial(loss.call, **reduction, **mask)
        of_rows = reduction == {"reduction": "none"}
        assert_matches_reference(
            call,
            functools.partial(call, reference=True),
            backend,
            student,
            teacher,
            weights,
            upstream=torch.randn(loss.counted.shape) if of_rows else torch.tensor(-2.5),
            products=products,
        )


# Many tokens are slow in the interpreter, and multiplied by their weights as few are.
few_tokens = pytest.mark.left_out(
    where=lambda given: given["backend"] == "triton" and given["loss"].shape[1] > 100
)


@few_tokens
@each_loss
def test_weights_of_one_change_nothing_and_of_zero_still_count(backend, loss):
    student, teacher = loss.inputs()
    plain = value_and_grad(loss.call, student, teacher, backend=backend)
    ones = torch.ones(loss.counted.shape, dtype=torch.bfloat16)
    torch.testing.assert_close(
        value_and_grad(loss.call, student, teacher, ones, backend=backend), plain
    )
    half = torch.where(torch.arange(ones.numel()).view_as(ones) % 2 == 0, 0.0, 1.0)
    parts = [
        value_and_grad(loss.call, student, teacher, x, backend=backend) for x in (half, 1 - half)
    ]
    for a, b, whole in zip(*parts, plain, strict=True):  # the divisor is that of all
        torch.testing.assert_close(a + b, whole)


@pytest.mark.left_out(where=lambda given: given["loss"].counted.all())
@each_loss
def test_weights_behind_the_mask_change_nothing(backend, loss):
    student, teacher = loss.inputs()
    weights = torch.randn(loss.counted.shape)
    clean = value_and_grad(loss.call, student, teacher, weights, backend=backend)
    dirty = weights.masked_fill(~loss.counted, torch.nan)
    found = value_and_grad(loss.call, student, teacher, dirty, backend=backend)
    assert torch.equal(found[0], clean[0]) and torch.equal(found[1], clean[1])


@few_tokens
@each_loss
def test_a_weight_of_nan_or_of_a_strided_tensor(backend, loss):
    student, teacher = loss.inputs()
    weights = torch.randn(*loss.counted.shape, 2)[..., 0]
    found = loss.call(student, teacher, weights, backend=backend)
    torch.testing.assert_close(found, loss.call(student, teacher, weights.clone(), backend=backend))
    assert loss.call(student, teacher, weights * torch.nan, backend=backend).isnan()


# One graph of each function: weights multiply the losses of all its options.
@pytest.mark.left_out(where=lambda given: given["loss"] not in ONCE)
@each_loss
def test_weights_under_compile_and_autocast(backend, loss):
    student, teacher = loss.inputs()
    weights = torch.randn(loss.counted.shape)
    plain = value_and_grad(loss.call, student, teacher, weights, backend=backend)
    compiled, graphs = counted(loss.call)
    found = value_and_grad(compiled, student, teacher, weights, backend=backend)
    torch.testing.assert_close(found, plain)
    assert len(graphs) == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = value_and_grad(loss.call, student, teacher, weights, backend=backend)
    assert torch.equal(under[0], plain[0]) and torch.equal(under[1], plain[1])


@each_loss
def test_wrong_weights_are_named(loss):
    student, teacher = loss.inputs()
    shape = loss.counted.shape
    with pytest.raises(ValueError, match=r"weights must have shape .* leading dimensions of"):
        loss.call(student, teacher, torch.ones(*shape, 2))
    with pytest.raises(TypeError, match="weights must be bfloat16"):
        loss.call(student, teacher, torch.ones(shape, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"weights is on meta but .* is on cpu"):
        loss.call(student, teacher, torch.ones(shape, device="meta"))
    remedy = 'reduction="none"' if "none" in reductions(loss) else "call it once for each"
    with pytest.raises(ValueError, match=f"weights requires grad.*{remedy}.*weights.detach"):
        loss.call(student, teacher, torch.ones(shape, requires_grad=True))
