"""relation_loss and FCDLoss: short and parallel rows, large groups, documents, terms."""

import pytest
import torch
import torch.nn.functional as F

from fastkd.losses.relation import FCDLoss, relation_loss, relation_loss_ref
from tests.support.compare import (
    assert_matches_reference,
    counted,
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


def ragged(B, N):
    return torch.arange(N) < (torch.arange(1, B + 1) * N // B)[:, None]


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


@pytest.mark.thorough
def test_layer_passed_twice_compiles(backend, device):
    """Dynamo rejects repeated tensors in autograd functions: here student and teacher layers."""
    a, b, c, d = torch.randn(4, 3, 9, 8, device=device)
    students, teachers = [a.requires_grad_(), a, b], [c, d, d]
    layers = FCDLoss(backend=backend)

    def loss(students, teachers):
        return layers(students, teachers) + layers(students[:1], [students[0].detach()])

    actual, graphs = counted(loss)
    values = [call(students, teachers) for call in (actual, loss)]
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*(torch.autograd.grad(x, a) for x in values))
    assert len(graphs) == 1


def test_segments_under_a_default_device_and_in_a_graph():
    features, segments = torch.randn(2, 6, 4), torch.tensor([[0, 0, 1, 1, 1, 2], [0] * 6])
    expected = relation_loss(features, features.sin(), segments=segments)
    with torch.device("meta"):
        assert torch.equal(relation_loss(features, features.sin(), segments=segments), expected)
    compiled = torch.compile(FCDLoss(), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="give each document a row of its own"):
        compiled(features, features, segments=segments)


@pytest.mark.thorough
def test_terms_in_a_graph(backend, device):
    student = torch.randn(3, 9, 8, device=device, requires_grad=True)
    teacher, mask = torch.randn(3, 9, 5, device=device), ragged(3, 9).to(device)
    module = FCDLoss(0.4, 3.0, backend=backend)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found, wanted = (call(student, teacher, mask, return_terms=True) for call in (compiled, module))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(x[0], student) for x in (found, wanted)))
    assert list(found[1]) == ["tokens", "samples"]
    assert not any(x.requires_grad for x in found[1].values())
    assert list(FCDLoss(0, 2.0)(student, teacher, return_terms=True)[1]) == ["samples"]
