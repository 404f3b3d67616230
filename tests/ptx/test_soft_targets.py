"""The compiled soft-target and cross-entropy kernels against float64 references."""

import random

import pytest
import torch

pytest.importorskip("triton")

import fastkd
from fastkd import Divergence
from fastkd.kernels import cross_entropy as labels_kernels
from fastkd.lm.soft_targets import soft_target_loss_ref
from tests.losses.soft_targets import cross_entropies
from tests.support.compare import relative_error, value_and_grad
from tests.support.draw import FIRST
from tests.support.interpreter import of_compiled_code
from tools.executed import executing

pytestmark = of_compiled_code

DIVERGENCES = (
    "adaptive_kl",
    Divergence("total_variation"),
    Divergence("negative_log_acceptance"),
    Divergence("lk"),
    Divergence("mixed", mix=0.3),
    Divergence("skew_kl"),
    Divergence("skew_reverse_kl"),
    Divergence("js", beta=0.2),
)


def errors_of(student, teacher, capability, divergence):
    """Relative errors of value and gradient."""
    options = {"divergence": divergence, "weights": torch.tensor([0.5, 2.0])}
    exact = teacher.double() if torch.is_tensor(teacher) else teacher
    right = value_and_grad(soft_target_loss_ref, student.double(), exact, **options)
    with executing(capability):
        found = value_and_grad(
            fastkd.soft_target_loss, student, teacher, backend="triton", **options
        )
    return [relative_error(x, y) for x, y in zip(found, right, strict=True)]


def logits():
    student, teacher = 2 * torch.randn(2, 2, 140)
    student[:, 5] = teacher[:, 5] = -torch.inf
    return student, teacher


# Compiling takes long: each run draws what is compiled, and for which architecture.
draw = random.Random(FIRST)


def test_values_and_gradients():
    student, teacher = logits()
    for divergence in draw.sample(DIVERGENCES, 3):
        capability = draw.choice((80, 90))
        errors = errors_of(student, teacher, capability, divergence)
        assert max(errors) < 5e-6, (divergence, capability)


def test_tails_of_a_top_k():
    student, teacher = logits()
    log_probs, ids = teacher.log_softmax(-1).topk(5)
    for tail, capability in zip(("bucket", "renormalise"), draw.sample((80, 90), 2), strict=True):
        errors = errors_of(student, fastkd.TopK(ids, log_probs, tail), capability, "forward_kl")
        assert max(errors) < 5e-6, (tail, capability)


def test_cross_entropy_and_log_totals():
    """Short and long rows, aligned or not, in place."""
    for i, V in enumerate(draw.sample((45, 48, 1040, 16_401), 2)):
        logits, labels, weights = 4 * torch.randn(3, V), torch.tensor([0, V - 1, 7]), torch.rand(3)
        value, grad = cross_entropies(logits.double(), labels, 0.1, 0.1, weights)
        right = logits.double() / 2.5
        with executing((80, 90)[i % 2]):
            total = labels_kernels.log_totals(logits, 2.5)
            q = logits.clone()
            labels_kernels.softmax_in_place(q, total, weights, 2.5)
            rounded = torch.empty_like(logits, dtype=torch.bfloat16)
            labels_kernels.cross_entropy(logits, labels, weights, rounded, 0.1, 0.1)
            found = labels_kernels.cross_entropy(logits, labels, weights, logits, 0.1, 0.1)
        assert relative_error(rounded, logits) < 2**-8, V
        assert relative_error(found, value) < 1e-6, V
        assert relative_error(logits, grad) < 5e-6, V
        assert relative_error(total, right.logsumexp(-1)) < 1e-6, V
        assert relative_error(q, right.softmax(-1) * weights[:, None]) < 5e-6, V
