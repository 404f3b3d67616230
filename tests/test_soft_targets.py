"""Soft-target losses against worked examples, torch's own KL and the float64 reference."""

import functools

import pytest
import torch

from fastkd import CrossEntropy, Divergence, Head
from fastkd._core import fallback
from fastkd.lm.divergences import NAMES
from fastkd.lm.linear_soft_targets import _ChunkedPass
from fastkd.lm.soft_targets import (
    DIVERGENCES,
    linear_soft_target_loss,
    linear_soft_target_loss_ref,
    soft_target_loss,
    soft_target_loss_ref,
)
from tests.support import compare
from tests.support.compare import (
    DTYPES,
    assert_accurate,
    assert_matches_reference,
    count_graphs,
    counted,
    every_two_meet,
    values_and_grads,
)
from tests.support.interpreter import MARKS

TRITON_FUNCTION = "soft_target_loss"
WITHOUT_CPP = ("linear",)

divergences = pytest.mark.parametrize("divergence", DIVERGENCES)


value_and_grad = functools.partial(compare.value_and_grad, upstream=3.0)


def make_logits(*shape, dtype=torch.float64, device="cpu", spread=2.0):
    student = (spread * torch.randn(*shape, dtype=torch.float64)).to(device, dtype)
    teacher = (spread * torch.randn(*shape, dtype=torch.float64)).to(device, dtype)
    return student.requires_grad_(), teacher


def oracle(student, teacher, **options):
    return value_and_grad(soft_target_loss_ref, student.double(), teacher.double(), **options)


def check_against_oracle(student, teacher, backend, **options):
    functions = soft_target_loss, soft_target_loss_ref
    assert_matches_reference(*functions, backend, student, teacher, **options)


# Worked examples


@pytest.mark.within_kernels
@pytest.mark.parametrize("V", [2, 3, 8, 10, 14])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_adaptive_kl_head_of_equal_tokens_is_their_first_half(backend, device, V, dtype):
    student, teacher = torch.randn(3, V, device=device).to(dtype), torch.full((3, V), 0.5)
    options = dict(divergence="adaptive_kl", reduction="none")
    found = soft_target_loss(student, teacher.to(student), backend=backend, **options)
    p = student.double().softmax(-1)
    gap = (p - 1 / V).abs()
    head = gap[:, : max(V // 2, 1)].sum(-1) / gap.sum(-1)
    forward, reverse = -(p * V).log().mean(-1), (p * (p * V).log()).sum(-1)
    assert_accurate(found, head * forward + (1 - head) * reverse, dtype)
    plain = soft_target_loss_ref(student, teacher.to(student), **options)
    torch.testing.assert_close(found, plain)


def test_adaptive_kl_of_many_equal_tokens(backend, device):
    """More equal tokens than one block of the search holds, before and after the head's end."""
    student, _ = make_logits(3, 2500, dtype=torch.float32, device=device)
    teacher = torch.randint(4, student.shape).to(student)
    check_against_oracle(student, teacher, backend, divergence="adaptive_kl")


# Against the float64 reference


@pytest.mark.within_kernels
@divergences
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(backend, device, divergence, dtype):
    student, teacher = make_logits(3, 5, 37, dtype=dtype, device=device)
    mask = torch.rand(3, 5, device=device) < 0.6
    options = dict(divergence=divergence, temperature=1.7, scale_by_t2=dtype != torch.float32)
    check_against_oracle(student, teacher, backend, mask=mask, **options)


VOCABULARIES = (1, 2, 15, 16, 17, 127, 128, 129, 300, 1025, 4097)
WIDTHS = [*((3, V) for V in VOCABULARIES), (9,)]
RAGGED = [*WIDTHS, *((rows, 6) for rows in (1, 2, 17, 129))]
SUMS = [d for d in DIVERGENCES if d != "adaptive_kl"]


# The search for the head at each edge of a tile; other divergences, sums of rows, alternate.
@pytest.mark.parametrize(
    ("divergence", "shape"),
    [
        (divergence, shape)
        for i, shape in enumerate(RAGGED)
        for divergence in ["adaptive_kl"] * (shape in WIDTHS) + [SUMS[i % len(SUMS)]]
    ],
)
def test_ragged_shapes(backend, device, divergence, shape):
    student, teacher = make_logits(*shape, dtype=torch.float32, device=device)
    check_against_oracle(student, teacher, backend, divergence=divergence)


@divergences
def test_chunks_do_not_change_the_result(divergence, monkeypatch):
    student, teacher = make_logits(7, 10)
    loss = functools.partial(soft_target_loss, backend="torch", divergence=divergence)
    whole = value_and_grad(loss, student, teacher)
    monkeypatch.setattr(fallback, "_chunks", lambda *_: 4)
    chunked = value_and_grad(loss, student, teacher)
    torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=0)


# Weights of positions


def signed_weights(*shape, device="cpu", dtype=torch.float32):
    """Weights of both signs, the first of them 0."""
    weights = torch.randn(*shape, dtype=torch.float64)
    weights.view(-1)[0] = 0
    return weights.to(device, dtype)


def test_linear_terms_are_weighted_like_the_loss():
    heads = make_heads(6)
    weights, of_task = (signed_weights(6, dtype=torch.float64) for _ in range(2))
    task = CrossEntropy(torch.arange(6), 0.3, weights=of_task)
    loss, terms = linear_soft_target_loss(
        *heads, weights=weights, task=task, soft_weight=0.7, return_terms=True
    )
    torch.testing.assert_close(loss.detach(), 0.7 * terms["soft"] + 0.3 * terms["task"])
    plain = linear_soft_target_loss(*heads, task=CrossEntropy(task.labels), return_terms=True)[1]
    assert terms["entropy"] == plain["entropy"] and terms["soft"] != plain["soft"]


KINDS_OF_SEVEN = [
    7,
    7.0,
    *(torch.tensor(7, dtype=dtype) for dtype in (torch.uint8, torch.int16, torch.int64, *DTYPES)),
]


@pytest.mark.parametrize("denominator", [2.5, *KINDS_OF_SEVEN])
def test_denominator_replaces_the_count(backend, device, denominator):
    """The loss keeps its dtype for every type and device of the denominator."""
    student, teacher = make_logits(4, 9, dtype=torch.float32, device=device)
    mask = torch.tensor([1, 1, 0, 1], device=device)
    options = dict(mask=mask, backend=backend)
    loss = functools.partial(value_and_grad, soft_target_loss, student, teacher, **options)
    if isinstance(denominator, torch.Tensor):
        on_cpu = loss(denominator=denominator.cpu())
        denominator = denominator.to(device)
        assert torch.equal(on_cpu[0], loss(denominator=denominator)[0])
    total, total_grad = loss(reduction="sum")
    value, grad = loss(denominator=denominator)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, total / float(denominator))
    torch.testing.assert_close(grad, total_grad / float(denominator))


# Masks, infinities, extremes


@pytest.mark.parametrize("kernels", ["torch", pytest.param("cpp", marks=MARKS["cpp"])])
@pytest.mark.parametrize("name", ["js", "skew_kl", "skew_reverse_kl"])
def test_mixtures_of_subnormal_probabilities(kernels, name):
    # A share of a subnormal number may be 0; multiplied by the upstream gradient it is not.
    tails, flat = torch.linspace(-112, -70, 200), torch.zeros(200)
    student = torch.stack([tails, tails - 3, tails, tails - 30])
    teacher = torch.stack([tails - 3, tails, flat, flat - 300])
    student = torch.cat([torch.tensor([0.0, -0.5]).expand(4, 2), student], 1).requires_grad_()
    teacher = torch.cat([torch.tensor([-0.5, 0.0]).expand(4, 2), teacher], 1)
    divergence = Divergence(name, beta=0.3, skew=0.3)
    options = {"divergence": divergence, "reduction": "none", "upstream": torch.full((4,), 1e4)}
    check_against_oracle(student, teacher, kernels, **options)


MIXTURES = {
    "skew_kl": [1e-30, 1e-4, 0.999],
    "skew_reverse_kl": [1e-30, 1e-4, 1.0],
    "js": [1e-30, 1e-3, 0.999],
}


@pytest.mark.parametrize(
    ("name", "coefficient"), [(name, x) for name, each in MIXTURES.items() for x in each]
)
@pytest.mark.parametrize("linear", [False, True])
def test_mixtures_with_a_coefficient_near_its_ends(backend, device, name, coefficient, linear):
    """Its product with a probability underflows."""
    student, teacher = (20 * torch.randn(2, 6, 50, device=device)).unbind()
    student[1, 5:9] = teacher[1, 5:9] = -torch.inf
    teacher[0, :3], student[4, 0], teacher[4, 0] = -torch.inf, 300, -200
    divergence = Divergence(name, beta=coefficient, skew=coefficient)
    options = dict(divergence=divergence, reduction="none", upstream=torch.ones(6))

    def loss(student, teacher, **options):
        if not linear:
            return soft_target_loss(student, teacher, **options)
        ids, head = torch.eye(6, device=device), student.T.contiguous()
        return linear_soft_target_loss(ids, head, ids, teacher.T.contiguous(), **options)

    if linear:  # −inf · 0 is NaN
        student, teacher = student.clamp_min(-1e4), teacher.clamp_min(-1e4)
    found = value_and_grad(loss, student, teacher, backend=backend, **options)
    wanted = value_and_grad(soft_target_loss_ref, student.double(), teacher.double(), **options)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-5)  # an ulp of logits


@divergences
def test_log_probabilities_far_below_minus_100(backend, device, divergence):
    student = torch.tensor([[0.0, -500.0, 3.0, -2e4], [9e4, 0.0, -9e4, 1.0]], device=device)
    teacher = torch.tensor([[-800.0, 0.0, 1.0, -3e4], [9e4, 1.0, -9e4, 0.0]], device=device)
    check_against_oracle(student, teacher, backend, divergence=divergence)


@pytest.mark.parametrize(
    ("divergence", "side", "bad"),
    every_two_meet(
        [*DIVERGENCES, *map(Divergence, NAMES)], ["student", "teacher"], [torch.nan, torch.inf]
    ),
    ids=str,
)
def test_nan_and_inf_in_real_rows_give_nan(backend, device, divergence, side, bad):
    student, teacher = make_logits(3, 6, dtype=torch.float32, device=device)
    student, teacher = student.detach(), teacher.clone()
    (student if side == "student" else teacher)[1, 2] = bad
    value = soft_target_loss(
        student, teacher, divergence=divergence, reduction="none", backend=backend
    )
    assert value[1].isnan()
    assert value[[0, 2]].isfinite().all()


@pytest.mark.parametrize("divergence", ["reverse_kl", "js"])
def test_gradients_are_accurate_at_high_temperature(backend, device, divergence):
    """Gradients differ from their mean by less than the rounding error of the normalisers."""
    student, teacher = make_logits(7, 17, dtype=torch.float32, device=device, spread=0.01)
    options = dict(temperature=100.0, divergence=divergence, scale_by_t2=False)
    _, expected = oracle(student, teacher, **options)
    _, found = value_and_grad(soft_target_loss, student, teacher, backend=backend, **options)
    assert_accurate(found, expected, torch.float32, floor=0)


@pytest.mark.parametrize(
    ("divergence", "offset", "temperature"),
    every_two_meet(DIVERGENCES, [0.0, -1000.0], [20.0, 1000.0]),
)
def test_losses_are_accurate_at_high_temperature(backend, device, divergence, offset, temperature):
    """The divergence is of the size of the gaps squared over τ², and multiplied by τ²."""
    student, teacher = (z.detach().float() + offset for z in make_logits(6, 50, device=device))
    options = dict(temperature=temperature, divergence=divergence, reduction="none")
    loss = soft_target_loss(student, teacher, **options, backend=backend)
    right = soft_target_loss_ref(student.double(), teacher.double(), **options)
    torch.testing.assert_close(loss.double(), right, rtol=5e-6, atol=0)


# Derivative rules


@pytest.mark.left_out(where=lambda given: given["backend"] == "triton")
@pytest.mark.parametrize("reduction", ["batchmean", "none"])
def test_gradients_are_computed_in_the_forward_pass(backend, device, reduction):
    """The backward pass needs no logits, and may run twice."""
    student, teacher = make_logits(4, 9, dtype=torch.float32, device=device)
    options = dict(divergence="js", reduction=reduction)
    upstream = torch.rand(4 if reduction == "none" else (), device=device)
    _, expected = oracle(student, teacher, upstream=upstream.double(), **options)
    loss = soft_target_loss(student, teacher, backend=backend, **options)
    for z in (student, teacher):
        z.detach().fill_(float("nan"))
    once, twice = (torch.autograd.grad(loss, student, upstream, True)[0] for _ in range(2))
    assert torch.equal(once, twice)
    assert_accurate(once, expected, torch.float32)


@pytest.mark.parametrize("kind", [int, float])
def test_denominators_stay_symbolic(device, kind):
    """The number of items changes at every step."""
    count_graphs(
        lambda s, t, denominator: soft_target_loss(s, t, denominator=denominator, backend="torch"),
        (
            (*make_logits(4, 7, dtype=torch.float32, device=device), kind(items))
            for items in (3, 5, 8, 13)
        ),
    )


def test_no_view_between_loss_and_logits(backend, device):
    """A view would cost the backward pass of a small loss as much as the gradient."""
    student, teacher = make_logits(3, 7, dtype=torch.float32, device=device)
    loss = soft_target_loss(student.requires_grad_(), teacher, backend=backend)
    node, found = loss.grad_fn, []
    while type(node).__name__ != "AccumulateGrad":
        found.append(type(node).__name__)
        ((node, _),) = [x for x in node.next_functions if x[0]]
    assert len(found) == 1 or backend == "torch"
    assert not any("View" in name for name in found)


def test_student_and_teacher_with_shared_storage(backend, device):
    pair = torch.randn(2, 4, 6, device=device)
    loss = functools.partial(soft_target_loss, backend=backend)
    for compiled in (loss, counted(loss)[0]):
        assert compiled(pair[0], pair[0]).item() == pytest.approx(0, abs=1e-7)
        student = pair[0].clone().requires_grad_()
        assert compiled(student, student.detach()).item() == pytest.approx(0, abs=1e-7)
        expected = soft_target_loss_ref(pair[0].clone(), pair[1].clone())
        torch.testing.assert_close(compiled(pair[0], pair[1]), expected)


# Properties


# From hidden states


def make_heads(*leading, vocabulary=11, dtype=torch.float64, device="cpu"):
    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64).to(device, dtype)

    student = draw(*leading, 6), draw(vocabulary, 6)
    teacher = draw(*leading, 9), draw(vocabulary, 9)
    return (*(x.requires_grad_() for x in student), *teacher)


def exact_dtype(backend):
    """The most precise dtype that the backend supports."""
    return torch.float32 if backend == "triton" else torch.float64


def linear_value_and_grads(loss, heads, **options):
    return values_and_grads(loss, heads[:2], *heads[2:], **options)


def check_linear(heads, backend, chunk_bytes=None, **options):
    loss = functools.partial(linear_soft_target_loss, chunk_bytes=chunk_bytes)
    functions = loss, linear_soft_target_loss_ref
    assert_matches_reference(*functions, backend, heads[:2], *heads[2:], **options)


@pytest.fixture
def chunks(monkeypatch):
    """Number of positions in each chunk of logits."""
    seen = []

    def spy(self, chunk, *rest):
        seen.append(len(range(*chunk.indices(self.terms.shape[1]))))
        return add(self, chunk, *rest)

    add = _ChunkedPass.add
    monkeypatch.setattr(_ChunkedPass, "add", spy)
    return seen


@pytest.mark.parametrize(
    ("rows", "chunk_bytes", "sizes"),
    [(200, 150 * 11 * 8, [128, 72]), (7, 3 * 11 * 8 + 5, [3, 3, 1])],
)
def test_linear_chunks_of_whole_tiles(backend, device, chunks, rows, chunk_bytes, sizes):
    check_linear(make_heads(rows, dtype=torch.float32, device=device), backend, chunk_bytes)
    assert chunks == sizes


@divergences
def test_linear_long_vocabulary(backend, device, divergence):
    heads = make_heads(3, vocabulary=1100, dtype=exact_dtype(backend), device=device)
    check_linear(heads, backend, divergence=divergence, temperature=2.0)


@pytest.mark.left_out(
    where=lambda given: (given["backend"] == "torch") == (given["reduction"] == "none")
)
@pytest.mark.parametrize("reduction", ["batchmean", "none"])
def test_linear_shared_head_compiled(backend, device, reduction):
    """A frozen head is one tensor passed twice, a trained one shares its storage."""
    h_s, h_t = torch.randn(2, 4, 6, device=device)
    head = torch.randn(11, 6, device=device)
    loss = functools.partial(linear_soft_target_loss, reduction=reduction, backend=backend)
    compiled, _ = counted(loss)
    expected = linear_soft_target_loss_ref(h_s, head, h_t, head, reduction=reduction)
    h_s.requires_grad_()
    torch.testing.assert_close(compiled(h_s, head, h_t, head), expected)
    learnt = head.clone().requires_grad_()
    value = compiled(h_s, learnt, h_t, learnt.detach())
    torch.testing.assert_close(value, expected)
    assert torch.autograd.grad(value.sum(), learnt)[0].isfinite().all()
    torch.testing.assert_close(
        compiled(h_t, learnt, h_t, head), torch.zeros_like(expected), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("reduction", ["batchmean", "none"])
def test_linear_heads_wider_than_the_states(backend, device, reduction):
    """Under autocast the states are bfloat16 and the weights stay float32."""
    wide = make_heads(6, dtype=torch.float32, device=device)
    h_s, h_t = wide[0].bfloat16(), wide[2].bfloat16()
    upstream = torch.rand(6, device=device) if reduction == "none" else 3.0
    options = dict(reduction=reduction, upstream=upstream)
    exact = linear_value_and_grads(
        linear_soft_target_loss_ref,
        [x.double() for x in (h_s, wide[1], h_t, wide[3])],
        **options,
    )
    for teacher_head in (wide[3], wide[3].bfloat16()):
        heads = h_s, wide[1], h_t, teacher_head
        value, dh, dw = linear_value_and_grads(
            linear_soft_target_loss, heads, backend=backend, **options
        )
        assert (dh.dtype, dw.dtype) == (torch.bfloat16, torch.float32)
        if teacher_head.dtype == torch.float32:
            assert_accurate(value, exact[0], torch.float32)
            assert_accurate(dh, exact[1], torch.bfloat16)
            assert_accurate(dw, exact[2], torch.float32)
        else:
            torch.testing.assert_close(value.double(), exact[0], rtol=3e-2, atol=3e-2)


def test_losses_of_rows_on_the_meta_device():
    heads = [x.detach().to("meta") for x in make_heads(2, 3)]
    assert linear_soft_target_loss(*heads, reduction="none").shape == (2, 3)
    logits = torch.empty(2, 2, 3, 9, device="meta")
    assert soft_target_loss(*logits, reduction="none").shape == (2, 3)


@pytest.fixture(scope="module")
def wide_heads():
    """Logits of standard deviation 3, and enough tokens for rounding errors to add up."""
    generator = torch.Generator().manual_seed(0)
    shapes = (24, 512), (8000, 512), (24, 512), (8000, 512)
    heads = [torch.randn(shape, generator=generator) for shape in shapes]
    return [x if len(x) == 24 else x * 3 / 512**0.5 for x in heads]


@pytest.mark.parametrize(
    ("divergence", "dtype", "labelled"),
    every_two_meet(DIVERGENCES, [torch.bfloat16, torch.float16], [False, True]),
)
def test_linear_half_precision_is_rounded_once(wide_heads, divergence, dtype, labelled):
    """Logits are never rounded to half precision, also for labels."""
    heads = [x.to(dtype) for x in wide_heads]

    def loss(function, h, w, *teacher):
        task = CrossEntropy(torch.arange(24) * 300, 0.5) if labelled else None
        softcap = 30.0 if labelled else None
        return function(h, Head(w, softcap=softcap), *teacher, divergence=divergence, task=task)

    exact = linear_value_and_grads(
        functools.partial(loss, linear_soft_target_loss_ref), [x.double() for x in heads]
    )
    found = linear_value_and_grads(functools.partial(loss, linear_soft_target_loss), heads)
    assert_accurate(found[0], exact[0], torch.float32)
    for gradient, right in zip(found[1:], exact[1:], strict=True):
        assert gradient.dtype == dtype
        rounded = compare.relative_error(right.to(dtype), right)
        assert compare.relative_error(gradient, right) <= 2 * rounded


# Options and messages
