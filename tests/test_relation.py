"""relation_loss and FCDLoss: short and parallel rows, large groups, documents, terms."""

import pytest
import torch
import torch.nn.functional as F

from fastkd.losses.relation import FCDLoss, relation_loss, relation_loss_ref
from tests.support.compare import (
    assert_matches_reference,
    every_two_meet,
    relative_error,
    value_and_grad,
)

TRITON_FUNCTION = "relation_loss"

OVER = ("tokens", "samples")
# Triton's groups in registers and in tiles.
SIZES = (9, 140)


def shape_of(over, groups, members):
    """Shape (B, N) of features with this number and size of relations."""
    return (groups, members) if over == "tokens" else (members, groups)


@pytest.mark.parametrize(("over", "members", "side"), every_two_meet(OVER, SIZES, (0, 1)))
def test_rows_too_short_to_normalise(backend, over, members, side):
    """Their relations are small, not lost: eps is no larger than a hundred times σ_sσ_t.

    Below a norm of 1e-12 F.normalize divides by 1e-12, and the gradient must too.
    """
    pair = list(torch.randn(2, *shape_of(over, 2, members), 8))
    pair[side] = pair[side] * 1e-17
    found = value_and_grad(relation_loss, *pair, over=over, backend=backend)
    wanted = value_and_grad(relation_loss_ref, *(x.double() for x in pair), over=over)
    assert max(map(relative_error, found, wanted)) <= 1e-5
    student, teacher = torch.randn(2, *shape_of(over, 2, members), 8)
    student[1, 1] = 0
    student[0, 1] *= 3e-13
    functions = relation_loss, relation_loss_ref
    assert_matches_reference(*functions, backend, student, teacher, over=over)


@pytest.mark.parametrize(("over", "members", "D"), every_two_meet(OVER, SIZES, (1, 3)))
def test_parallel_rows_of_any_length_have_no_gradient_along_them(over, members, D, backend):
    """Rows of one direction differ only by rounding error, which 1/eps would amplify.

    Across the rows the error is of the size of what rounding the rows once more would cost.
    """
    shape = shape_of(over, 2, members)
    lengths = torch.rand(*shape, 1, dtype=torch.float64) + 0.5
    student = (lengths * torch.randn(D, dtype=torch.float64)).float()
    teacher = torch.randn(*shape, 2)

    def gradient(x, teacher, backend):
        return value_and_grad(relation_loss, x, teacher, over=over, backend=backend)[1]

    exact = gradient(student.double(), teacher.double(), "torch")
    rounding = torch.finfo(torch.float32).eps * (torch.rand_like(exact) - 0.5)
    moved = gradient(student.double() * (1 + rounding), teacher.double(), "torch")
    error = gradient(student, teacher, backend) - exact
    along = (error * F.normalize(student.double(), dim=-1)).sum(-1)
    assert along.norm() <= 1e-4
    assert error.norm() <= 2 * (moved - exact).norm() + 1e-4


def test_segments_under_a_default_device_and_in_a_graph():
    features, segments = torch.randn(2, 6, 4), torch.tensor([[0, 0, 1, 1, 1, 2], [0] * 6])
    expected = relation_loss(features, features.sin(), segments=segments)
    with torch.device("meta"):
        assert torch.equal(relation_loss(features, features.sin(), segments=segments), expected)
    compiled = torch.compile(FCDLoss(), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="give each document a row of its own"):
        compiled(features, features, segments=segments)


def test_terms_are_named_and_detached():
    student, teacher = torch.randn(3, 9, 8, requires_grad=True), torch.randn(3, 9, 5)
    terms = FCDLoss(0.4, 3.0)(student, teacher, return_terms=True)[1]
    assert list(terms) == ["tokens", "samples"]
    assert not any(x.requires_grad for x in terms.values())
    assert list(FCDLoss(0, 2.0)(student, teacher, return_terms=True)[1]) == ["samples"]
