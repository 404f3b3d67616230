"""relation_loss and FCDLoss: kernels at their blocks' edges, documents, layers, terms."""

import pytest
import torch
import torch.nn.functional as F

from fastkd.losses.relation import FCDLoss, relation_loss, relation_loss_ref
from tests.support.compare import (
    DTYPES,
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
MASKS = ("none", "full", "empty", "one", "alternating", "ragged", "random")


def features(B, N, D, cosine=0.0, dtype=torch.float64, device="cpu"):
    """Random rows with the given mean cosine between them."""
    common = F.normalize(torch.randn(D, dtype=torch.float64), dim=0)
    x = (cosine / (1 - cosine)) ** 0.5 * common + torch.randn(B, N, D).double() / D**0.5
    return x.to(dtype).to(device)


def shape_of(over, groups, members):
    """Shape (B, N) of features with this number and size of relations."""
    return (groups, members) if over == "tokens" else (members, groups)


def pair_of(over, groups, members, Ds, Dt, cosine=0.0, dtype=torch.float32, device="cpu"):
    """Student and teacher features with this number and size of relations."""
    shape = shape_of(over, groups, members)
    return [features(*shape, D, cosine, dtype, device) for D in (Ds, Dt)]


def make_mask(kind, B, N, device="cpu"):
    mask = torch.ones(B, N, dtype=torch.bool)
    if kind == "none":
        return None
    if kind == "empty":
        mask[:] = False
    elif kind == "one":
        mask[:] = False
        mask[:, 0] = True
    elif kind == "alternating":
        mask[:, 1::2] = False
    elif kind == "ragged":
        lengths = torch.arange(1, B + 1) * N // B
        mask = torch.arange(N) < lengths[:, None]
    elif kind == "random":
        mask = torch.rand(B, N) > 0.4
    return mask.to(device)


def in_tiles(given):
    """Whether Triton has its tiles, which are slow in the interpreter: fewer cases are enough."""
    return given["backend"] == "triton" and given["members"] == SIZES[1]


def check(student, teacher, mask, backend, **options):
    """Padding holds NaN. Triton multiplies in half precision, which rounds the value too."""
    if mask is not None:
        student, teacher = (x.masked_fill(~mask[..., None], torch.nan) for x in (student, teacher))
    options["products"] = student.dtype if backend == "triton" else None
    functions = relation_loss, relation_loss_ref
    assert_matches_reference(*functions, backend, student, teacher, mask, **options)


def errors(student, teacher, upstream=1.0, **kwargs):
    """Relative errors of value and gradient against the reference in float64."""
    actual = value_and_grad(relation_loss, student, teacher, upstream=upstream, **kwargs)
    kwargs.pop("backend", None)
    student, teacher = student.double(), teacher.double()
    oracle = value_and_grad(relation_loss_ref, student, teacher, upstream=upstream, **kwargs)
    return [relative_error(a, b) for a, b in zip(actual, oracle, strict=True)]


# The interpreter is slow: both relations at the edges of tiles, alternating elsewhere.
@pytest.mark.left_out(
    where=lambda given: (
        given["backend"] == "triton"
        and given["members"] not in (17, 129)
        and (given["over"] == "tokens") == (given["members"] % 2 == 0)
    )
)
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("members", [1, 2, 15, 16, 17, 127, 128, 129, 300])
def test_matches_reference_at_every_length(backend, device, over, members):
    student, teacher = pair_of(over, 2, members, 24, 17, device=device)
    if members == 2:  # one relation: ρ = 1 for any features, up to eps
        value, grad = value_and_grad(relation_loss, student, teacher, over=over, backend=backend)
        assert 0 < value < 1e-6
        assert grad.abs().max() < 1e-6
        return
    check(student, teacher, None, backend, over=over)


# Lengths of tiles without a mask are above.
@pytest.mark.left_out(where=lambda given: in_tiles(given) and given["kind"] in ("none", "full"))
@pytest.mark.within_kernels
@pytest.mark.parametrize(
    ("kind", "dtype", "over", "members"), every_two_meet(MASKS, DTYPES, OVER, SIZES)
)
def test_masks_and_dtypes(backend, device, kind, dtype, over, members):
    student, teacher = pair_of(over, 2, members, 48, 20, 0.5, dtype, device)
    mask = make_mask(kind, *student.shape[:2], device)
    check(student, teacher, mask, backend, over=over, upstream=-3.0)
    if kind == "random":
        options = dict(over=over, backend=backend)
        found, wanted = (relation_loss(student, teacher, x, **options) for x in (mask.long(), mask))
        assert torch.equal(found, wanted)


@pytest.mark.left_out(where=lambda given: in_tiles(given) and given["over"] == "samples")
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("members", SIZES)
def test_gradient_of_rows_too_short_to_normalise(backend, device, over, members):
    """Below a norm of 1e-12 F.normalize divides by 1e-12, and the gradient must too."""
    student, teacher = pair_of(over, 2, members, 8, 8, device=device)
    student[1, 1] = 0
    student[0, 1] *= 3e-13
    check(student, teacher, None, backend, over=over)


@pytest.mark.parametrize(("over", "members", "side"), every_two_meet(OVER, SIZES, (0, 1)))
def test_all_rows_too_short_to_normalise(backend, device, over, members, side):
    """Their relations are small, not lost: eps is no larger than a hundred times σ_sσ_t."""
    pair = pair_of(over, 2, members, 8, 8, device=device)
    pair[side] = pair[side] * 1e-17
    assert max(errors(*pair, over=over, backend=backend)) <= 1e-5


def test_tiles(backend, device):
    """What the general tests ask of small relations."""
    pair = pair_of("tokens", 2, SIZES[1], 8, 8, device=device)
    mask = make_mask("ragged", *pair[0].shape[:2], device)
    for x in pair:
        x[-1, 0, 2] = torch.nan
        assert relation_loss(*pair, mask, backend=backend).isnan()
        x[-1, 0, 2] = 1
    for over in OVER:
        shape = shape_of(over, 2, SIZES[1])
        same, other = (
            torch.randn(8, device=device).expand(*shape, 8),
            torch.randn(*shape, 300, device=device),
        )
        value, grad = value_and_grad(relation_loss, same, other, over=over, backend=backend)
        assert value.item() == pytest.approx(1) and grad.abs().max() < 1e-3
        usual, nothing = (
            value_and_grad(relation_loss, other, x, over=over, backend=backend)[1].norm()
            for x in (torch.randn(*shape, 8, device=device), same)
        )
        assert nothing <= 1e-5 * usual
    student = pair_of("tokens", 2, SIZES[1], 8, 8, 0.0, torch.float16, device)[0].requires_grad_()
    loss = relation_loss(student, torch.randn_like(student), backend=backend)
    (grad,) = torch.autograd.grad(loss, student, torch.full_like(loss, torch.inf))
    assert not grad.isfinite().all()


def test_layer_passed_twice_compiles(backend, device):
    """Dynamo rejects repeated tensors in autograd functions: here student and teacher layers."""
    a, b, c, d = torch.randn(4, 3, 9, 8, device=device)
    students, teachers = [a, a, b], [c, d, d]
    students[0].requires_grad_()
    layers = FCDLoss(backend=backend)

    def loss(students, teachers):
        return layers(students, teachers) + layers(students[:1], [students[0].detach()])

    actual, graphs = counted(loss, "aot_eager")
    values = [call(students, teachers) for call in (actual, loss)]
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*(torch.autograd.grad(x, students[0]) for x in values))
    assert len(graphs) == 1


def test_segments_under_a_default_device():
    features, segments = torch.randn(2, 6, 4), torch.tensor([[0, 0, 1, 1, 1, 2], [0] * 6])
    expected = relation_loss(features, features.sin(), segments=segments)
    with torch.device("meta"):
        assert torch.equal(relation_loss(features, features.sin(), segments=segments), expected)


def test_document_ids_that_can_not_be_read():
    compiled = torch.compile(FCDLoss(), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="give each document a row of its own"):
        compiled(*torch.randn(2, 2, 6, 4), segments=torch.zeros(2, 6).long())


# Compiled, the kernels are one operator in a graph.
@pytest.mark.left_out(
    where=lambda given: given["backend"] == "triton" and given["way"] == "compiled"
)
@pytest.mark.parametrize("way", ["plain", "segments", "compiled"])
def test_terms(backend, device, way):
    """The weighted sum, with and without terms: those equal the losses of single terms."""
    given = {}
    if way == "segments":
        given = {"segments": torch.arange(27).view(3, 9) // 4}
    widths = (8,) if way == "compiled" else (8, 8, 13)
    students = [torch.randn(3, 9, d, device=device, requires_grad=True) for d in widths]
    teachers = [torch.randn(3, 9, 5, device=device) for _ in students]
    mask = make_mask("ragged", 3, 9, device)

    def results(*weights, compiled=False, **options):
        module = FCDLoss(*weights, backend=backend)
        if compiled:
            module = torch.compile(module, fullgraph=True, backend="aot_eager")
        made = module(students, teachers, mask, **given, **options)
        loss, terms = made if options else (made, None)
        return loss, torch.autograd.grad(loss, students), terms

    loss, gradients, terms = results(0.4, 3.0, return_terms=True, compiled=way == "compiled")
    torch.testing.assert_close((loss, gradients), results(0.4, 3.0)[:2])
    assert list(terms) == ["tokens", "samples"]
    alone = [results(*weights)[:2] for weights in ((1, 0), (0, 1))]
    for term, (value, _) in zip(terms.values(), alone, strict=True):
        assert not term.requires_grad
        torch.testing.assert_close(term, value.detach())
    for gradient, *parts in zip(gradients, *(found for _, found in alone), strict=True):
        torch.testing.assert_close(gradient, 0.4 * parts[0] + 3.0 * parts[1])
    assert list(results(0, 2.0, return_terms=True)[2]) == ["samples"]


@pytest.mark.parametrize(("over", "members", "D"), every_two_meet(OVER, SIZES, (1, 3)))
def test_parallel_rows_of_any_length_have_no_gradient_along_them(over, members, D, backend, device):
    """Rows of one direction differ only by rounding error, which 1/eps would amplify.

    Across the rows the error is of the size of what rounding the rows once more would cost.
    """
    shape = shape_of(over, 2, members)
    lengths = torch.rand(*shape, 1, dtype=torch.float64) + 0.5
    student = (lengths * torch.randn(D, dtype=torch.float64)).float().to(device)
    teacher = torch.randn(*shape, 2, device=device)

    def gradient(x, teacher, backend):
        x = x.clone().requires_grad_()
        relation_loss(x, teacher, over=over, backend=backend).backward()
        return x.grad

    exact = gradient(student.double(), teacher.double(), "torch")
    rounding = torch.finfo(torch.float32).eps * (torch.rand_like(exact) - 0.5)
    moved = gradient(student.double() * (1 + rounding), teacher.double(), "torch")
    error = gradient(student, teacher, backend) - exact
    along = (error * F.normalize(student.double(), dim=-1)).sum(-1)
    assert along.norm() <= 1e-4
    assert error.norm() <= 2 * (moved - exact).norm() + 1e-4
