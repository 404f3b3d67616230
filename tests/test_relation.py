"""relation_loss and FCDLoss against oracle and reference, and their invariances."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from fastkd.losses.relation import FCDLoss, relation_loss, relation_loss_ref
from tests.support.compare import (
    DTYPES,
    TOLERANCE,
    assert_matches_reference,
    count_graphs,
    counted,
    every_two_meet,
    relative_error,
    value_and_grad,
)
from tests.support.interpreter import MARKS

from .losses.relation import relation

TRITON_FUNCTION = "relation_loss"

OVER = ("tokens", "samples")
OPTIONS = [
    (normalize, distance)
    for normalize in ("l2", "layer_norm", "softmax", "none")
    for distance in ("pearson", "mse", "kl")
]
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


@pytest.mark.parametrize(("option", "over", "kind"), every_two_meet(OPTIONS, OVER, MASKS), ids=str)
def test_reference_equals_the_oracle(option, over, kind):
    student, teacher = features(4, 6, 5), features(4, 6, 7)
    mask = make_mask(kind, 4, 6)
    real = torch.ones(4, 6, dtype=torch.bool) if mask is None else mask
    options = {"over": over, "normalize": option[0], "distance": option[1], "temperature": 0.7}
    found = value_and_grad(relation_loss_ref, student, teacher, mask, **options)
    expected = value_and_grad(relation, student, teacher, real, **options, eps=1e-8)
    torch.testing.assert_close(found, expected)


def test_pearson_by_hand(backend, device):
    """Three unit rows at right angles against rows of which two coincide."""
    student = torch.eye(3, device=device)[None]
    teacher = torch.tensor([[[2.0, 0.0], [5.0, 0.0], [0.0, 3.0]]], device=device)
    # R_s = I, R_t = [[1,1,0],[1,1,0],[0,0,1]]: covariance 3 − 3·5/9, variances 3 − 1, 5 − 25/9.
    rho = (3 - 15 / 9) / (2 * (5 - 25 / 9)) ** 0.5
    loss = relation_loss(student, teacher, backend=backend)
    assert loss.item() == pytest.approx(1 - rho, rel=1e-6)


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


@pytest.mark.within_kernels
@pytest.mark.parametrize(
    ("normalize", "distance", "kind", "over"),
    [(*o, *rest) for o, *rest in every_two_meet(OPTIONS, ["none", "one", "random"], OVER)],
)
def test_matches_reference_with_every_option(backend, device, normalize, distance, kind, over):
    for dtype, N in itertools.product((torch.float64, torch.float32), (6, 25)):
        if backend == "triton" and dtype == torch.float64:
            continue
        pair = pair_of("tokens", 4, N, 11, 7, 0.3, dtype, device)
        options = dict(over=over, normalize=normalize, distance=distance, temperature=0.7)
        check(*pair, make_mask(kind, 4, N, device), backend, **options)


@pytest.mark.parametrize(
    ("shape", "anisotropy", "over", "near"),
    every_two_meet(
        [(3, 60, 8, 5), (3, 20, 31, 40), (8, 3, 8, 5)],
        [(0.9, 1e-5), (0.99, 2e-5), (0.999, 3e-4)],
        OVER,
        [False, True],
    ),
)
def test_fp32_accuracy_on_anisotropic_features(backend, device, shape, anisotropy, over, near):
    cosine, allowed = anisotropy
    groups, members, Ds, Dt = shape
    student, teacher = pair_of(over, groups, members, Ds, Dt, cosine, device=device)
    if near:
        teacher = student + 0.1 / Ds**0.5 * torch.randn_like(student)
    assert max(errors(student, teacher, over=over, backend=backend)) <= allowed


@pytest.mark.parametrize("masked", [False, True])
def test_embeddings_are_samples_of_one_token(backend, device, masked):
    student, teacher = pair_of("tokens", 7, 1, 16, 24, device=device)
    mask = (torch.arange(7, device=device) % 3 < 2) if masked else None
    tokens = None if mask is None else mask[:, None]
    options = dict(over="samples", backend=backend)
    wanted = value_and_grad(relation_loss, student, teacher, tokens, **options)
    rows = student[:, 0], teacher[:, 0], mask
    value, grad = value_and_grad(relation_loss, *rows, **options)
    assert torch.equal(value, wanted[0]) and torch.equal(grad, wanted[1][:, 0])
    loss = FCDLoss(alpha=0, backend=backend)
    torch.testing.assert_close(loss([rows[0]] * 2, [rows[1]] * 2, mask), value)
    with pytest.raises(ValueError, match=r"mask must have shape \(7,\)"):
        loss(*rows[:2], torch.ones(7, 1, device=device))
    with pytest.raises(ValueError, match=r"student is \(B, D\), which has no tokens to relate"):
        FCDLoss(backend=backend)(*rows)
    with pytest.raises(ValueError, match="segments are document ids of tokens"):
        loss(*rows, segments=torch.zeros(7, dtype=torch.long))


@pytest.mark.within_kernels
@pytest.mark.parametrize(
    ("size", "over", "normalize"), every_two_meet([1e20, 1e30, 1e34], OVER, ["l2", "layer_norm"])
)
def test_huge_rows_are_normalised(backend, device, over, normalize, size):
    """Squares of the rows overflow float32; infinite rows still give NaN."""
    students, teachers = features(3, 5, 16), features(3, 5, 16)
    sizes = torch.ones(3, 5, 1, dtype=torch.float64)
    sizes[1], sizes[:, 2] = size, size
    student, teacher = ((x * sizes).float().to(device) for x in (students, teachers))
    options = dict(over=over, normalize=normalize)
    value, grad = value_and_grad(relation_loss, student, teacher, backend=backend, **options)
    wide = student.double(), teacher.double()
    oracle, oracle_grad = value_and_grad(relation_loss_ref, *wide, **options)
    assert relative_error(value, oracle) < 1e-5
    sizes = sizes.to(device)
    assert relative_error(grad * sizes, oracle_grad * sizes) < 1e-5
    student[1, 1, 3] = torch.inf
    assert relation_loss(student, teacher, backend=backend, **options).isnan()


@pytest.mark.left_out(where=lambda given: in_tiles(given) and given["dtype"] != torch.float16)
@pytest.mark.within_kernels
@pytest.mark.parametrize(("dtype", "over", "members"), every_two_meet(DTYPES, OVER, SIZES))
def test_degenerate_features(backend, device, dtype, over, members):
    """Constant features give ρ = 0, zero rows the formula's value."""
    B, N = shape_of(over, 2, members)
    good = features(B, N, 8, dtype=dtype, device=device)
    constant = good[:1, :1].expand_as(good)
    for student, teacher in ((constant, good), (good, constant), (constant, constant)):
        value, grad = value_and_grad(relation_loss, student, teacher, over=over, backend=backend)
        assert value.item() == pytest.approx(1, abs=1e-5)
        assert grad.isfinite().all()

    zero = good.clone()
    zero[1, 1] = 0
    zero[0] = 0
    for student, teacher in ((zero, good), (good, zero), (zero, zero)):
        value, grad = value_and_grad(relation_loss, student, teacher, over=over, backend=backend)
        oracle = relation_loss_ref(student.double(), teacher.double(), over=over)
        assert relative_error(value, oracle, floor=1e-3) < max(1e-4, TOLERANCE[dtype])
        assert grad.isfinite().all()


@pytest.mark.parametrize("normalize", ["l2", "layer_norm", "softmax", "none"])
def test_teacher_with_equal_rows_gives_zero_gradient(normalize):
    """Like the embeddings' [CLS] rows: rounding error of the mean must not become a relation."""
    student, teacher = torch.randn(31, 16, 768), torch.randn(31, 16, 768)
    usual, nothing = (
        value_and_grad(relation_loss, student, x, over="samples", normalize=normalize)[1].norm()
        for x in (teacher, teacher[:1].expand_as(teacher))
    )
    assert nothing < 1e-3 * usual


@pytest.mark.parametrize("members", [20, 127])
def test_teacher_with_equal_rows_gives_zero_gradient_in_registers(backend, device, members):
    student, teacher = (features(2, members, D, device=device).float() for D in (7, 64))
    usual, nothing = (
        value_and_grad(relation_loss, student, x, backend=backend)[1].norm()
        for x in (teacher, teacher[:1, :1].expand_as(teacher))
    )
    assert nothing <= 1e-6 * usual


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


def test_nan_in_real_data_of_tiles(backend, device):
    """As test_promises.py has it for small relations."""
    pair = pair_of("tokens", 2, 140, 8, 8, device=device)
    mask = make_mask("ragged", *pair[0].shape[:2], device)
    for x in pair:
        x[-1, 0, 2] = torch.nan
        assert relation_loss(*pair, mask, backend=backend).isnan()
        x[-1, 0, 2] = 1


@pytest.mark.within_kernels
@pytest.mark.parametrize("normalize", ["l2", "layer_norm", "softmax", "none"])
@pytest.mark.parametrize(
    "shape",
    [(0, 4, 8), (3, 0, 8), (1, 4, 8), (4, 1, 8), (1, 1, 8), (2, 5, 0), (0, 0, 0), (1, 1, 1)],
)
def test_loss_without_relations_is_zero(backend, device, normalize, shape):
    student = torch.randn(shape, device=device)
    teacher = torch.randn(*shape[:2], 7, device=device)
    for mask, (over, members) in itertools.product(
        (None, torch.ones(shape[:2], device=device)), zip(OVER, shape[1::-1], strict=True)
    ):
        kwargs = {"over": over, "normalize": normalize}
        found = value_and_grad(relation_loss, student, teacher, mask, backend=backend, **kwargs)
        value, grad = found
        assert value.isfinite()
        if members < 2 or student.numel() == 0:
            assert value == relation_loss_ref(student, teacher, mask, **kwargs)
            assert members >= 2 or value == 0
            assert grad.eq(0).all()


def test_float16_gradient_survives_a_loss_scale(backend, device):
    """The gradient is rounded to float16 after multiplication with the upstream gradient."""
    student, teacher = pair_of("tokens", 6, 16, 32, 32, 0.0, torch.float16, device)
    _, grad = errors(300 * student, teacher, upstream=65536.0, backend=backend)
    assert grad < 1e-3


@pytest.mark.parametrize("members", SIZES)
@pytest.mark.parametrize("upstream", [float("inf"), float("nan"), 2.0**40])
def test_float16_gradient_overflow_is_visible_to_grad_scaler(backend, device, members, upstream):
    """A GradScaler looks for inf and NaN to find that its scale is too large."""
    student, teacher = pair_of("tokens", 2, members, 8, 8, 0.0, torch.float16, device)
    student[0, 1] = 0
    _, grad = value_and_grad(relation_loss, student, teacher, upstream=upstream, backend=backend)
    assert not grad.isfinite().all()


@pytest.mark.left_out(where=lambda given: in_tiles(given) and given["over"] == "tokens")
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("members", [9, 32, 140])
def test_gradient_of_identical_rows(backend, device, over, members):
    """The gradient is 0: 1/eps must multiply differences of rows, not rows."""
    B, N = shape_of(over, 2, members)
    student = features(1, 1, 24, dtype=torch.float32, device=device).expand(B, N, 24)
    for D in (17, 300):
        teacher = features(B, N, D, dtype=torch.float32, device=device)
        value, grad = value_and_grad(relation_loss, student, teacher, over=over, backend=backend)
        assert value.item() == pytest.approx(1)
        assert grad.abs().max() < {"triton": 1e-3, "torch": 1e-8, "cpp": 1e-8}[backend]
    for normalize in ["layer_norm", "none"] if backend == "torch" else []:
        assert relation_loss(student, teacher, over=over, normalize=normalize) == pytest.approx(1)


# Every normalisation and distance once. In Triton tokens and samples change their order.
@pytest.mark.parametrize(
    ("runs_on", "weights", "normalize", "distance", "masked"),
    [
        ("torch", (1, 0), "l2", "pearson", True),
        ("torch", (0, 1), "layer_norm", "kl", False),
        ("torch", (0, 1), "softmax", "mse", False),
        pytest.param("triton", (1, 1), "l2", "pearson", False, marks=MARKS["triton"]),
    ],
)
def test_sizes_stay_symbolic(device, runs_on, weights, normalize, distance, masked):
    """At most two graphs for all sizes up to 64; none of the sizes equals another."""
    loss = FCDLoss(*weights, normalize=normalize, distance=distance, backend=runs_on)

    def calls():
        for B, N in (
            ((3, 4), (9, 17), (5, 8)) if runs_on == "triton" else ((3, 4), (64, 41), (11, 64))
        ):
            student, teacher = (features(B, N, D, device=device).float() for D in (24, 16))
            mask = make_mask("ragged", B, N, device) if masked else None
            yield student.requires_grad_(), teacher, mask

    assert count_graphs(loss, calls(), rtol=1e-4, atol=1e-6) <= 2


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


class TestSegments:
    """Packed rows give the loss of their documents in separate rows."""

    #: Documents of 3, 4 and 2 tokens, of 5, 1 and 3, and of 9; the rest of a row is padding.
    ids = torch.tensor(
        [[4] * 3 + [-2] * 4 + [9] * 2 + [7], [4] * 5 + [-2] + [9] * 3 + [7], [4] * 9 + [7]]
    )

    def unpacked(self, x):
        """Documents (8, 9, ...) in rows of their own, of x (3, 10, ...)."""
        documents = [(b, n) for b in range(3) for n in self.ids[b, :9].unique()]
        return pad_sequence([x[b][self.ids[b] == n] for b, n in documents], batch_first=True)

    def pair(self, dtype=torch.float64, device="cpu"):
        """Packed features and their mask; a masked token keeps its position."""
        mask = self.ids != 7
        mask[0, 5] = mask[2, 0] = False
        pair = pair_of("tokens", 3, 10, 8, 5, 0.5, dtype)
        pair = [x.masked_fill(~mask[..., None], torch.nan) for x in pair]
        return [x.to(device) for x in pair], mask.to(device)

    def both(self, loss, dtype, device):
        """Value and gradient of the documents, packed and in separate rows."""
        pair, mask = self.pair(dtype, device)
        return (
            value_and_grad(lambda *packed: loss(*packed, segments=self.ids), *pair, mask),
            value_and_grad(lambda *packed: loss(*map(self.unpacked, packed)), *pair, mask),
        )

    @pytest.mark.parametrize(("option", "over"), every_two_meet(OPTIONS, OVER), ids=str)
    def test_equal_unpacked_rows(self, device, option, over):
        options = dict(over=over, normalize=option[0], distance=option[1], temperature=0.7)
        for loss, more in ((relation_loss, {"backend": "torch"}), (relation_loss_ref, {})):
            loss = functools.partial(loss, **options, **more)
            actual, expected = self.both(loss, torch.float64, device)
            torch.testing.assert_close(actual[0], expected[0], rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(actual[1], expected[1], rtol=1e-10, atol=1e-12)

    def test_fcd_loss(self, backend, device):
        actual, expected = self.both(FCDLoss(0.3, 2.0, backend=backend), torch.float32, device)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)

    def test_ids_that_can_not_be_read(self):
        pair, mask = self.pair(torch.float32)
        compiled = torch.compile(FCDLoss(), fullgraph=True, backend="eager")
        with pytest.raises(Exception, match="give each document a row of its own"):
            compiled(*pair, mask, segments=self.ids)

    def test_bad_segments(self):
        student = torch.randn(2, 5, 8)
        with pytest.raises(ValueError, match=r"segments must have shape \(2, 5\)"):
            relation_loss(student, student, segments=torch.zeros(2, 4, dtype=torch.long))
        with pytest.raises(TypeError, match=r"segments must be integers, got torch\.float32"):
            relation_loss(student, student, segments=torch.zeros(2, 5))
        empty = torch.randn(2, 0, 8)
        assert relation_loss(empty, empty, segments=torch.zeros(2, 0, dtype=torch.long)) == 0
        with pytest.raises(TypeError, match="segments must be a Tensor, got list"):
            relation_loss(student, student, segments=[0] * 5)


class TestFCDLoss:
    def test_averages_layers(self, backend, device):
        """Layers of different hidden sizes, one of them twice, and one that doesn't learn."""
        a, b, c = (torch.randn(3, 9, D, device=device, requires_grad=D != 7) for D in (8, 7, 13))
        students, mask = [a, b, c, a], make_mask("ragged", 3, 9, device)
        teachers = [torch.randn(3, 9, D, device=device) for D in (8, 5, 5, 8)]
        loss = FCDLoss(backend=backend)
        value = loss(students, teachers, mask)
        alone = [value_and_grad(loss, s.detach(), t, mask)
                 for s, t in zip(students, teachers, strict=True)]  # fmt: skip
        torch.testing.assert_close(value.detach(), torch.stack([v for v, _ in alone]).mean())
        found = torch.autograd.grad(value, (a, c))
        torch.testing.assert_close(found, ((alone[0][1] + alone[3][1]) / 4, alone[2][1] / 4))

    # Compiled, the kernels are one operator in a graph.
    @pytest.mark.left_out(
        where=lambda given: given["backend"] == "triton" and given["way"] == "compiled"
    )
    @pytest.mark.parametrize("way", ["plain", "segments", "compiled"])
    def test_terms(self, backend, device, way):
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


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    a=st.floats(0.05, 1.0),
    side=st.sampled_from(["student", "teacher"]),
    over=st.sampled_from(OVER),
    cosine=st.sampled_from([0.0, 0.9]),
    N=st.sampled_from([6, 40]),
)
def test_invariant_under_positive_affine_maps_of_the_relation(seed, a, side, over, cosine, N):
    """Rows √a·x̂ with a common part √(1−a) have the relation a·R + (1 − a)."""
    torch.manual_seed(seed)
    student, teacher = features(5, N, 8, cosine), features(5, N, 8, cosine)
    x = F.normalize(student if side == "student" else teacher, dim=-1)
    common = torch.full((*x.shape[:2], 1), (1 - a) ** 0.5, dtype=x.dtype)
    mapped = torch.cat([a**0.5 * x, common], -1)
    pair = (mapped, teacher) if side == "student" else (student, mapped)
    expected = relation_loss_ref(student, teacher, over=over)
    actual = relation_loss(pair[0].float(), pair[1].float(), over=over)
    assert actual.item() == pytest.approx(expected.item(), rel=2e-5)


PAIR = torch.randn(2, 2, 5, 8)
OTHER = PAIR[:, :, :4]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((PAIR[0, 0], PAIR[1, 0]), ValueError, "student is .B, D., which has no tokens to relate"),
        ((PAIR[0, 0, 0], PAIR[1, 0, 0]), ValueError, "student must have at least 2 dimensions"),
        ((PAIR[0], PAIR[1, 0]), ValueError, "teacher must have 3 dimensions"),
        ((PAIR[:1], PAIR[1:]), ValueError, "student must have 3 dimensions"),
        ((PAIR[0], OTHER[1]), ValueError, r"teacher must have shape \(2, 5, 8\)"),
        (([PAIR[0]] * 2, [PAIR[1]]), ValueError, "student has 2 layers but teacher has 1"),
        (list(zip(PAIR, OTHER, strict=True)), ValueError, r"student must have shape \(2, 5, 8\)"),
    ],
)
def test_bad_input(arguments, error, message):
    for loss in (FCDLoss(), relation_loss):
        if loss is not relation_loss or isinstance(arguments[0], torch.Tensor):
            with pytest.raises(error, match=message):
                loss(*arguments)


@pytest.mark.parametrize(
    ("loss", "option", "message"),
    [
        (relation_loss, {"over": "token"}, "over must be one of .* mean 'tokens'"),
        (relation_loss, {"normalize": "layernorm"}, "normalize must be one of .* 'layer_norm'"),
        (relation_loss, {"distance": "person"}, "distance must be one of .* mean 'pearson'"),
        (relation_loss, {"temperature": 0.0}, "temperature must be greater than 0"),
        (FCDLoss, {"eps": 0.0}, "eps must be greater than 0"),
        (FCDLoss, {"alpha": -1.0}, "alpha must be at least 0"),
    ],
)
def test_bad_options(loss, option, message):
    with pytest.raises(ValueError, match=message):
        loss(**option) if loss is FCDLoss else loss(*PAIR, **option)


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
