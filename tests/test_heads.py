"""Soft targets and labels of whole heads, top-k targets and the divergences with coefficients."""

import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import fastkd
from fastkd import CrossEntropy, Divergence, Draft, Head, ImportanceRatio, TopK
from fastkd._core import extension, products
from fastkd.lm import linear_soft_targets
from fastkd.lm.heads import LowRank
from fastkd.lm.soft_targets import (
    linear_soft_target_loss,
    linear_soft_target_loss_ref,
    soft_target_loss,
    soft_target_loss_ref,
)
from tests.losses.soft_targets import cross_entropies
from tests.support.compare import (
    assert_accurate,
    assert_matches_reference,
    every_two_meet,
    relative_error,
    value_and_grad,
)

TRITON_FUNCTION = "soft_target_loss"

DIVERGENCES = [
    "forward_kl",
    "adaptive_kl",
    Divergence("js", beta=0.2),
    Divergence("js", beta=0.0),
    Divergence("js", beta=1.0),
    Divergence("skew_kl"),
    Divergence("skew_reverse_kl", skew=0.3),
    Divergence("total_variation"),
    Divergence("negative_log_acceptance"),
    Divergence("lk"),
    Divergence("mixed", mix=0.3),
]
V = 13


def top_k(*shape, k, tail="bucket", dtype=torch.float64, words=V):
    """The k most probable tokens of random distributions, and the distributions."""
    full = (2 * torch.randn(*shape, words, dtype=dtype)).log_softmax(-1)
    log_probs, words = full.topk(k)
    return TopK(words, log_probs, tail), full


# Divergences against explicit formulas and each other


WITH_COEFFICIENT = DIVERGENCES[2:]


@pytest.mark.parametrize(
    ("divergence", "dtype", "words", "temperature"),
    every_two_meet(
        WITH_COEFFICIENT,
        [torch.float64, torch.float32, torch.float16, torch.bfloat16],
        [1, 2, 129, 1030, 4100],
        [1.0, 0.5, 20.0],
    ),
)
def test_divergences_of_every_dtype_and_size(
    backend, device, divergence, dtype, words, temperature
):
    student, teacher = ((2 * torch.randn(3, words)).to(device, dtype) for _ in range(2))
    options = dict(divergence=divergence, temperature=temperature, gradient_floor=1e-6)
    functions = soft_target_loss, soft_target_loss_ref
    if words == 1:  # value and gradient are 0, but for rounding error times τ²
        if backend == "triton" and dtype == torch.float64:
            return
        del options["gradient_floor"]
        found = value_and_grad(functions[0], student, teacher, backend=backend, **options)
        assert all(x.abs().max() < 1e-6 * temperature**2 for x in found)
    else:
        assert_matches_reference(*functions, backend, student, teacher, **options)


# Whole heads


def heads(*leading, dtype=torch.float64, learns=True):
    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64).to(dtype)

    student = draw(*leading, 6), draw(V, 6), draw(V)
    teacher = draw(*leading, 5), draw(V + 2, 5), draw(V + 2)
    return [x.requires_grad_(learns) for x in student], teacher


TEACHERS = ("logits", "bucket", "renormalise")


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_cross_entropy_equals_torch(softcap):
    (h, w, b), (h_t, w_t, _) = heads(20)
    labels = torch.randint(V, (20,))
    labels[3] = -1
    task = CrossEntropy(labels, label_smoothing=0.2, ignore_index=-1)
    loss, terms = linear_soft_target_loss(
        h, Head(w, b, softcap=softcap), h_t, w_t[:V], soft_weight=0.0, task=task, return_terms=True
    )
    logits = h @ w.T + b
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    wanted = F.cross_entropy(logits, labels, ignore_index=-1, label_smoothing=0.2)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(loss, (h, w, b)), torch.autograd.grad(wanted, (h, w, b))
    )
    kept = labels != -1
    right = (logits.argmax(-1) == labels)[kept].double().mean()
    torch.testing.assert_close(terms["accuracy"], right)
    entropy = torch.distributions.Categorical(logits=logits[kept].detach()).entropy().mean()
    torch.testing.assert_close(terms["entropy"], entropy)


def test_soft_weight_0_computes_no_teacher_logits():
    (h, w, _), (h_t, w_t, _) = heads(4)
    h_t[1] = torch.nan
    task = CrossEntropy(torch.randint(V, (4,)))
    options = dict(soft_weight=0.0, task=task)
    assert linear_soft_target_loss(h, w, h_t, w_t[:V], **options).isfinite()
    loss, terms = linear_soft_target_loss(h, w, h_t, w_t[:V], return_terms=True, **options)
    assert loss.isfinite() and terms["soft"].isnan()


def test_the_heads_gradient_is_allocated_once():
    """An operation between head and loss would allocate another gradient of the head's size."""
    (h, w, _), (h_t, w_t, _) = heads(4)
    loss = linear_soft_target_loss(h, w, h_t, w_t[:V])
    below = [node for node, _ in loss.grad_fn.next_functions if node is not None]
    accumulate = [node for node in below if hasattr(node, "variable")]
    assert any(node.variable is w for node in accumulate)


@pytest.mark.skipif(not extension.CPU, reason="needs the extension")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("V", [1, 17, 3001])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.2, 0.1)])
def test_cross_entropy_rows_in_cpp(dtype, V, smoothing, z_loss):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, V + 3, generator=generator).to(dtype)[:, :V] * 4
    labels, weights = torch.arange(5) * 7 % V, torch.rand(5, generator=generator)
    if V > 2 and smoothing == 0:
        logits[0, V - 1] = -torch.inf
    value, grad = cross_entropies(logits.double(), labels, smoothing, z_loss, weights)
    call = torch.ops.fastkd_cpp.cross_entropy
    assert_accurate(call(logits, labels, None, None, smoothing, z_loss), value, dtype)
    beside, inside = torch.empty_like(logits), logits.clone()
    for z, out in ((logits, beside), (inside, inside)):
        assert_accurate(call(z, labels, out, weights, smoothing, z_loss), value, dtype)
        assert_accurate(out, grad, dtype)
    for label in (V, -1):
        with pytest.raises(RuntimeError, match="is not one of the"):
            call(logits, torch.tensor([0, label, 0, 0, 0]), beside, weights, smoothing, z_loss)


@pytest.mark.skipif(not extension.CPU, reason="needs the extension")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("words", [None, 1024])
def test_cross_entropy_of_one_chunk(dtype, with_bias, words, monkeypatch):
    """One operator computes the values and only the required gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = (9, 40), (1100, 40), (1100,)
    h, w, b = given = [torch.randn(x, generator=generator).to(dtype) for x in shapes]
    b = given[2] = torch.stack([b, torch.full_like(b, torch.nan)], 1)[:, 0]
    labels = torch.randint(601, (9,), generator=generator)
    labels[4] = -100
    task = CrossEntropy(labels, 0.3, label_smoothing=0.1, z_loss=0.02)
    options = dict(soft_weight=0.0, task=task, vocabulary=words)

    def loss(call, h, w, b):
        head = Head(w, b if with_bias else None, 0.5)
        return call(h, head, h.detach(), head.detach(), **options)

    def made(call, given, learning):
        leaves = [x.detach().requires_grad_(i in learning) for i, x in enumerate(given)]
        value = loss(call, *leaves)
        grads = torch.autograd.grad(value, [leaves[i] for i in learning]) if learning else ()
        return value.detach(), *grads

    monkeypatch.setattr(linear_soft_targets, "_ChunkedPass", None)
    if dtype == torch.bfloat16 and not products.multiplied_in_half(h):
        pytest.skip("needs a processor that multiplies bfloat16")
    every = (0, 1, 2) if with_bias else (0, 1)
    wide = [x.double() for x in given]
    for count in range(len(every) + 1):
        for learning in itertools.combinations(every, count):
            found = made(linear_soft_target_loss, given, learning)
            exact = made(linear_soft_target_loss_ref, wide, learning)
            for x, y in zip(found, exact, strict=True):
                assert_accurate(x, y, dtype)
    rows = loss(functools.partial(linear_soft_target_loss, reduction="none"), h, w, b)
    exact = loss(functools.partial(linear_soft_target_loss_ref, reduction="none"), *wide)
    assert_accurate(rows, exact, dtype)


@pytest.mark.skipif(not extension.CPU, reason="needs the extension")
def test_cross_entropy_of_one_chunk_on_the_meta_device():
    h, w, b = torch.randn(4, 6), torch.randn(9, 6), torch.randn(9)
    call = torch.ops.fastkd_cpp.cross_entropy_of_states
    rest = torch.arange(4), torch.rand(4), None
    numbers = dict(vocabulary=7, scale=1.0, factor=1.0, label_smoothing=0.0, z_loss=0.0)
    names = "count", "needs_hidden", "needs_weight", "needs_bias"
    for values in itertools.product([0, 2], *[[False, True]] * 3):
        more = dict(zip(names, values, strict=True), **numbers, narrow=True)
        torch.library.opcheck(call, (h, w, b, *rest), more, test_utils="test_faketensor")
    with pytest.raises(RuntimeError, match="is not one of the"):
        call(h, w, b, torch.full((4,), 7), None, None, **more)
    with pytest.raises(RuntimeError, match="gradients of rows need their weights"):
        call(h, w, b, torch.arange(4), None, None, **more | {"count": 0})


def test_terms_are_returned_by_name():
    (h, w, _), (h_t, w_t, _) = heads(4)
    given = h, w, h_t, w_t[:V]
    options = dict(soft_weight=0.0, task=CrossEntropy(torch.randint(V, (4,))))
    _, every = linear_soft_target_loss(*given, return_terms=True, **options)
    for names in (["accuracy", "task"], ["soft"]):
        _, terms = linear_soft_target_loss(*given, return_terms=names, **options)
        torch.testing.assert_close(terms, {name: every[name] for name in names})
    with pytest.raises(TypeError, match="must be a bool or a list of names, got 'soft'"):
        linear_soft_target_loss(*given, return_terms="soft")


def test_micro_batches_add_up():
    (h, w, b), (h_t, w_t, _) = heads(6)
    labels = torch.tensor([1, -100, 3, 4, -100, 6])

    def loss(rows, denominator=None):
        task = CrossEntropy(labels[rows], 0.3)
        given = h[rows], Head(w, b), h_t[rows], w_t[:V]
        return linear_soft_target_loss(*given, task=task, denominator=denominator)

    parts = loss(slice(0, 1), 4) + loss(slice(1, 6), 4)
    torch.testing.assert_close(parts, loss(slice(None)))


def test_gradients_of_each_trained_tensor():
    """Gradients of states, weight or bias only; a head shared by both models; no gradient."""
    student, (h_t, w_t, b_t) = heads(5)
    teacher = h_t, Head(w_t, b_t)
    options = dict(vocabulary=V)
    whole = torch.autograd.grad(
        linear_soft_target_loss(student[0], Head(*student[1:]), *teacher, **options), student
    )
    for subset in itertools.product([False, True], repeat=3):
        parts = [x.detach().requires_grad_(n) for x, n in zip(student, subset, strict=True)]
        loss = linear_soft_target_loss(parts[0], Head(*parts[1:]), *teacher, **options)
        assert loss.requires_grad == any(subset)
        if any(subset):
            grads = torch.autograd.grad(loss, [x for x in parts if x.requires_grad])
            wanted = [g for g, needed in zip(whole, subset, strict=True) if needed]
            torch.testing.assert_close(list(grads), wanted)
    h, w, b = student
    own = linear_soft_target_loss(h, Head(w, b), h.detach(), Head(w, b).detach())
    assert own.abs() < 1e-12


@pytest.mark.parametrize("teacher", TEACHERS)
def test_compiled_loss_equals_eager(teacher):
    def step(h, w, b, h_t, w_t, labels, words, log_probs):
        given = (h_t, Head(w_t)) if teacher == "logits" else (TopK(words, log_probs, teacher),)
        loss, terms = linear_soft_target_loss(
            h,
            Head(w, b, softcap=5.0),
            *given,
            divergence=Divergence("mixed"),
            task=CrossEntropy(labels),
            return_terms=True,
        )
        return loss + 0 * terms["soft"]

    student, (h_t, w_t, _) = heads(6, dtype=torch.float32)
    top, _ = top_k(6, k=3, dtype=torch.float32)
    labels = torch.tensor([1, 2, -100, 0, 5, 6])
    given = *student, h_t, w_t[:V].clone(), labels, top.ids, top.log_probs
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = [(x := run(*given), *torch.autograd.grad(x, student)) for run in (compiled, step)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("has_unit", [True, False])
@pytest.mark.parametrize("chunk_bytes", [None, 6 * 4000 * 8])
def test_the_gradient_of_a_head_in_bf16_needs_no_wider_one(chunk_bytes, has_unit, monkeypatch):
    """With a single chunk; also with an upstream gradient that is not a power of two."""
    if has_unit and not products._has_half_product():
        pytest.skip("needs a processor that multiplies bfloat16")
    monkeypatch.setattr(products, "_has_half_product", lambda: has_unit)
    generator = torch.Generator().manual_seed(0)
    shapes = (24, 64), (4000, 64), (24, 32), (4000, 32)
    h, w, h_t, w_t = (torch.randn(s, generator=generator).bfloat16() for s in shapes)
    labels = torch.arange(24) * 150

    def step(loss, h, w, *teacher, **options):
        h, w = h.detach().requires_grad_(), (w / 4).detach().requires_grad_()
        return loss(h, w, *teacher, task=CrossEntropy(labels), **options), (h, w)

    loss, leaves = step(linear_soft_target_loss, h, w, h_t, w_t / 4, chunk_bytes=chunk_bytes)
    (kept,) = (x for x in loss.grad_fn.saved_tensors if x.shape == w.shape)
    assert kept.dtype == (torch.bfloat16 if chunk_bytes is None else torch.float32)
    given = (x.double() for x in (h, w, h_t, w_t / 4))
    truth, of_truth = step(linear_soft_target_loss_ref, *given)
    found = {}
    for upstream in (1.0, 0.3, 0.25):
        factor = torch.tensor(upstream)
        grads = torch.autograd.grad(loss, leaves, factor, retain_graph=True)
        exact = torch.autograd.grad(truth, of_truth, factor.double(), retain_graph=True)
        for x, right in zip(grads, exact, strict=True):
            assert relative_error(x, right) <= 2 * relative_error(right.bfloat16(), right)
        found[upstream] = grads[1]
    assert torch.equal(found[0.25], found[1.0] * 0.25)


def test_an_adapter_in_bf16_is_rounded_once():
    """The input of its second factor is not rounded."""
    generator = torch.Generator().manual_seed(0)
    shapes = (24, 512), (8000, 512), (16, 512), (8000, 16), (24, 256), (8000, 256)
    widths = 1, 512 / 9, 512, 16, 1, 256 / 9
    parts = [
        (torch.randn(s, generator=generator) / width**0.5).bfloat16()
        for s, width in zip(shapes, widths, strict=True)
    ]

    def grads(loss, h, w, down, up, *teacher):
        learning = [x.detach().requires_grad_() for x in (h, w, down, up)]
        head = Head(learning[1])
        head.low_rank = (LowRank(learning[2], learning[3], 1.7),)
        return torch.autograd.grad(loss(learning[0], head, *teacher), learning)

    exact = grads(linear_soft_target_loss_ref, *(x.double() for x in parts))
    for found, right in zip(grads(linear_soft_target_loss, *parts), exact, strict=True):
        assert relative_error(found, right) <= 2 * relative_error(right.bfloat16(), right)


# Vocabularies


# Top k


@pytest.mark.parametrize(
    ("tail", "divergence", "reduction", "dtype", "words", "k", "temperature"),
    every_two_meet(
        ["bucket", "renormalise"],
        ["reverse_kl", "js", *DIVERGENCES],
        ["batchmean", "none"],
        [torch.float64, torch.float32, torch.bfloat16],
        [13, 1100],
        [4, 40],
        [1.6, 20.0],
    ),
)
def test_top_k_of_logits(
    backend, device, tail, divergence, reduction, dtype, words, k, temperature
):
    student = (2 * torch.randn(5, words)).to(device, dtype)
    top, _ = top_k(5, k=min(k, words - 1), tail=tail, dtype=torch.float32, words=words)
    top.log_probs[0, 2] = -torch.inf  # an unused entry, with the id of another one
    top.ids[0, 2] = top.ids[0, 0]
    top = TopK(top.ids.to(device), top.log_probs.to(device), tail)
    options = dict(divergence=divergence, temperature=temperature, reduction=reduction)
    options |= dict(mask=torch.tensor([1, 0, 1, 1, 1]), weights=torch.rand(5) + 0.5)
    options |= dict(upstream=torch.rand(5) if reduction == "none" else 3.0)
    options = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    functions = soft_target_loss, soft_target_loss_ref
    assert_matches_reference(*functions, backend, student, top, gradient_floor=1e-6, **options)


@pytest.mark.parametrize(
    ("tail", "reduction", "divergence"),
    every_two_meet(
        ["bucket", "renormalise"], ["batchmean", "none"], ["forward_kl", Divergence("lk")]
    ),
)
def test_top_k_of_hidden_states(backend, device, tail, reduction, divergence):
    """With all other options that a teacher's top k can have."""
    h, w, b = (torch.randn(*n, device=device) for n in ((9, 6), (V, 6), (V,)))
    top, _ = top_k(9, k=4, tail=tail, dtype=torch.float32)
    top = TopK(top.ids.to(device), top.log_probs.to(device), tail)
    labels = torch.randint(V, (9,)).masked_fill(torch.arange(9) % 4 == 0, -100).to(device)
    ratio = fastkd.ImportanceRatio(labels.clamp_min(0), top.log_probs[:, 0], at_most=1.3)
    options = dict(divergence=divergence, temperature=1.7, soft_weight=0.4, reduction=reduction)
    weights, mask = (x.to(device) for x in (torch.rand(9) + 0.5, torch.arange(9) != 5))
    options |= dict(task=CrossEntropy(labels, 0.7), ratio=ratio, weights=weights, mask=mask)
    options |= dict(return_terms=["soft", "entropy", "log_prob"])

    def found(loss, dtype, **more):
        student = [x.to(dtype).requires_grad_() for x in (h, w, b)]
        value, terms = loss(student[0], Head(student[1], student[2]), top, **options, **more)
        return value.detach(), *torch.autograd.grad(value.sum(), student), *terms.values()

    right = found(linear_soft_target_loss_ref, torch.float64)
    actual = found(linear_soft_target_loss, torch.float32, backend=backend, chunk_bytes=500)
    for x, exact in zip(actual, right, strict=True):
        assert_accurate(x, exact, torch.float32)


def test_a_small_rest_of_the_student_is_exact(backend, device):
    """The other tokens have a millionth of the probability: subtracting would lose their sum."""
    student = torch.zeros(3, 2000, device=device)
    student[:, 7:9] = 22.0
    top = TopK(torch.tensor([[7, 8]] * 3), torch.tensor([[0.5, 0.4]] * 3).log())
    top = TopK(top.ids.to(device), top.log_probs.to(device))
    options = dict(divergence="reverse_kl", reduction="none")
    for x, right in zip(
        value_and_grad(soft_target_loss, student, top, backend=backend, **options),
        value_and_grad(soft_target_loss_ref, student.double(), top, **options),
        strict=True,
    ):
        torch.testing.assert_close(x.double(), right, rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    ("divergence", "tail"), zip(DIVERGENCES, itertools.cycle(["bucket", "renormalise"])), ids=str
)
def test_top_k_of_a_student_of_nan(backend, device, tail, divergence):
    top, _ = top_k(3, k=4, tail=tail, dtype=torch.float32)
    top = TopK(top.ids.to(device), top.log_probs.to(device), tail)
    student = torch.randn(3, V, device=device)
    student[1] = torch.nan
    for loss in (functools.partial(soft_target_loss, backend=backend), soft_target_loss_ref):
        value = loss(student, top, divergence=divergence, reduction="none")
        assert value[1].isnan() and value[[0, 2]].isfinite().all()


@pytest.mark.parametrize("k", [2, V])
def test_masked_top_k_entries_have_no_effect(k):
    student = torch.randn(3, V, dtype=torch.float64)
    top, _ = top_k(3, k=k)
    mask = torch.tensor([1, 0, 1])
    loss = functools.partial(
        value_and_grad, soft_target_loss, student, mask=mask, divergence="reverse_kl"
    )
    wanted = loss(top)
    top.ids[1], top.log_probs[1] = -5, torch.nan
    assert all(map(torch.equal, loss(top), wanted))
    assert wanted[1].isfinite().all() and (wanted[1][1] == 0).all()


def test_rounded_log_probabilities_add_up_to_no_more_than_1():
    """Log-probabilities from an inference server, in half precision."""
    student = torch.randn(20, V)
    top, _ = top_k(20, k=V - 1, dtype=torch.float32)
    rounded = TopK(top.ids, (top.log_probs * 0.99).to(torch.bfloat16))
    value, grad = value_and_grad(soft_target_loss, student, rounded)
    assert value >= 0 and grad.isfinite().all()


def test_small_tail_is_computed_in_float64():
    student = 3 * torch.randn(128, 1000)
    log_probs, words = (3 * torch.randn(128, 1000)).double().log_softmax(-1).topk(990)
    log_probs = log_probs.float()
    options = dict(divergence="reverse_kl", reduction="none")
    top = TopK(words, log_probs)
    found = soft_target_loss(student, top, **options)
    wanted = soft_target_loss_ref(student.double(), top, **options)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert wanted.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name", ["forward_kl", "reverse_kl", "js", "adaptive_kl", "mixed", "skew_reverse_kl"]
)
def test_tokens_that_add_up_to_1_leave_a_small_rest(name, dtype, backend):
    """Of a confident teacher's rest the least probability is what rounding can hide."""
    rows = 8 if backend == "triton" else 50
    logits, student = torch.randn(rows, 64, dtype=torch.float64) * 12, torch.randn(rows, 64)
    log_probs, ids = logits.log_softmax(-1).topk(16)
    top = TopK(ids, log_probs.to(dtype))
    options = dict(divergence=Divergence(name), reduction="none")
    found, grad = value_and_grad(
        soft_target_loss, student, top, upstream=torch.ones(rows), backend=backend, **options
    )
    wanted = soft_target_loss_ref(student.double(), top, **options)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    assert found.isfinite().all() and grad.isfinite().all()
    if dtype == torch.float32 and name != "adaptive_kl":
        whole = soft_target_loss_ref(student.double(), logits, **options)
        assert (found <= whole * (1 + 1e-5) + 1e-5).all()


@pytest.mark.parametrize("off", [-3e-8, 0.0, 3e-8])
def test_rounding_gives_no_rest_to_a_student_without_one(off, backend):
    student = torch.tensor([[0.0, 0.0, -torch.inf]])
    top = TopK(torch.tensor([[0, 1]]), torch.tensor([[0.75, 0.25 + off]]).log())
    found = soft_target_loss(student, top, backend=backend)
    wanted = soft_target_loss(student[:, :2], torch.tensor([[0.75, 0.25]]).log())
    torch.testing.assert_close(found, wanted)


def test_a_padded_list_of_the_vocabularys_length_has_a_rest(backend):
    student, log_probs = torch.zeros(1, 3), torch.tensor([[0.5, 0.25, 0.0]]).log()
    padded = TopK(torch.tensor([[0, 1, 0]]), log_probs)
    short = TopK(torch.tensor([[0, 1]]), log_probs[:, :2])
    found = [soft_target_loss(student, x, backend=backend) for x in (padded, short)]
    torch.testing.assert_close(*found)


def test_tail_excluded_by_the_student_gives_infinite_loss():
    student = torch.tensor([[0.0, 0.0, -torch.inf]])
    top = TopK(torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.25]]).log())
    assert soft_target_loss(student, top) == torch.inf
    value, grad = value_and_grad(soft_target_loss, student, top, divergence="js")
    assert value.isfinite() and grad.isfinite().all()


@pytest.mark.parametrize(("dtype", "words"), [(torch.uint8, 300), (torch.int16, 40000)])
def test_token_ids_in_a_narrow_dtype(dtype, words):
    """Neither ignore_index nor the vocabulary's size wraps: as uint8, -100 would be 156."""
    hidden, *heads = torch.randn(2, 4), torch.randn(words, 4), torch.randn(words, 4)
    labels, log_probs = torch.tensor([156, 3]), torch.tensor([[0.6, 0.3]]).log()

    def losses(kind: torch.dtype) -> list[float]:
        task, top = CrossEntropy(labels.to(kind)), TopK(labels[None].to(kind), log_probs)
        of_labels = linear_soft_target_loss(hidden, heads[0], hidden, heads[1], task=task)
        return [of_labels.item(), linear_soft_target_loss(hidden[:1], heads[0], top).item()]

    assert losses(dtype) == losses(torch.int64)


@pytest.mark.parametrize("tail", ["bucket", "renormalise"])
def test_top_k_of_one_position_without_leading_dimensions(tail):
    student, (top, _) = torch.randn(1, V), top_k(1, k=3, tail=tail, dtype=torch.float32)
    value, grad = value_and_grad(soft_target_loss, student, top)
    one = TopK(top.ids[0], top.log_probs[0], tail)
    value_of_one, grad_of_one = value_and_grad(soft_target_loss, student[0], one)
    assert value == value_of_one and torch.equal(grad[0], grad_of_one)


# Draft models: shared teacher rows, a part of the vocabulary, row terms, importance ratios

EXTRA_TERMS = ["total_variation", "teacher_entropy", "log_prob", "teacher_log_prob"]


def test_nothing_counts_where_there_is_no_soft_target(backend, device):
    """NaN of weights and of old log-probabilities, ids out of range, and the teacher's terms."""
    student, teacher = (torch.randn(4, D, device=device) for D in (4, 5))
    heads = torch.randn(9, 4, device=device), torch.randn(9, 5, device=device)
    kept = torch.tensor([1, 0, 1, 0], device=device)
    names = ["teacher_entropy", "total_variation", "teacher_log_prob"]

    def found(loss, junk, **more):
        weights = torch.tensor([1.0, junk, 2.0, junk], device=device)
        old = torch.tensor([-1.0, junk, -2.0, junk], device=device)
        ids = torch.tensor([1, 3, 2, 3], device=device)
        ids[1] = 99 if math.isnan(junk) and loss is linear_soft_target_loss else 3
        value, terms = loss(
            student.requires_grad_(), heads[0], teacher, heads[1], weights=weights,
            ratio=ImportanceRatio(ids, old, at_most=2.0), draft=Draft(soft_mask=kept),
            return_terms=names, task=CrossEntropy(torch.arange(4, device=device)), **more,
        )  # fmt: skip
        return value.detach(), torch.autograd.grad(value, student)[0], terms

    wanted = found(linear_soft_target_loss_ref, 1.0)
    torch.testing.assert_close(found(linear_soft_target_loss_ref, math.nan)[0], wanted[0])
    for junk in (1.0, math.nan):
        torch.testing.assert_close(found(linear_soft_target_loss, junk, backend=backend), wanted)


@pytest.mark.parametrize("divergence", ["total_variation", "negative_log_acceptance"])
def test_whole_mass_of_a_draft_vocabulary(backend, device, divergence):
    """A student with no part of a row's teacher, and a teacher with its mass on these tokens."""
    part = torch.tensor([3, 0, 18, 7, 9], device=device)
    student = [torch.randn(*n, device=device) for n in ((6, 5), (5, 5), (5,))]
    teacher = torch.randn(6, 4, device=device), torch.randn(19, 4, device=device)
    teacher[0][0], teacher[0][1] = 30 * teacher[1][1], 30 * teacher[1][18]
    options = dict(divergence=Divergence(divergence), draft=Draft(part, "whole"), temperature=1.7)
    options |= dict(weights=torch.rand(6, device=device) + 0.5)

    def call(h, w, b, loss=linear_soft_target_loss, **more):
        return loss(h, Head(w, b), *(x.to(h.dtype) for x in teacher), **options, **more)

    reference = functools.partial(call, loss=linear_soft_target_loss_ref)
    assert_matches_reference(call, reference, backend, student)


def test_teacher_rows_are_multiplied_once(monkeypatch):
    """Four student positions for each teacher row: five products of rows instead of eight."""
    sizes = []

    def counted(self, chunk):
        result = multiply(self, chunk)
        sizes.append(result.numel() * self.states[0].shape[1])
        return result

    multiply = linear_soft_targets.HeadOnStates.products
    monkeypatch.setattr(linear_soft_targets.HeadOnStates, "products", counted)
    hidden, head = torch.randn(4, 32, 6), torch.randn(V, 6)
    teacher = torch.randn(40, 6), torch.randn(V, 6)  # of which 8 have no position
    rows = torch.randperm(40)[:32].expand(4, 32)
    linear_soft_target_loss(hidden, head, *teacher, draft=Draft(rows=rows), chunk_bytes=40 * V * 8)
    # A row at the edge of two chunks is multiplied in both.
    assert sum(sizes) <= (128 + 32 + 3) * V * 6


@pytest.mark.parametrize("reduction", ["batchmean", "none"])
def test_draft_options_compiled_and_on_the_meta_device(reduction):
    student = [torch.randn(4, 6, 5), torch.randn(7, 5, requires_grad=True)]
    teacher, part = (torch.randn(8, 6), torch.randn(19, 6)), torch.arange(7) * 2
    rows, weights = torch.randint(8, (4, 6)), torch.randn(4, 6)
    ids, old = torch.randint(7, (4, 6)), -torch.rand(4, 6)

    def loss(h, w, h_t, w_t, rows, part, weights, ids, old):
        return linear_soft_target_loss(
            h, w, h_t, w_t, draft=Draft(part, "whole", rows=rows),
            weights=weights, ratio=fastkd.ImportanceRatio(ids, old, at_most=2.0),
            return_terms=EXTRA_TERMS, reduction=reduction,
        )[0].sum()  # fmt: skip

    given = *student, *teacher, rows, part, weights, ids, old
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    results = [
        (x := run(*given), torch.autograd.grad(x, student[1])[0]) for run in (compiled, loss)
    ]
    torch.testing.assert_close(*results)
    assert loss(*(x.to("meta") for x in given)).shape == ()


def test_subset_of_a_head():
    head = Head(torch.randn(9, 4, requires_grad=True), torch.randn(9), 0.5, softcap=3.0)
    head.low_rank = (LowRank(torch.randn(2, 4), torch.randn(9, 2), 1.7),)
    hidden, ids = torch.randn(3, 4), torch.tensor([8, 0, 5])
    part = head.subset(ids)
    torch.testing.assert_close(part.logits(hidden), head.logits(hidden)[:, ids])
    assert torch.autograd.grad(part.logits(hidden).sum(), head.weight)[0].shape == (9, 4)


# Mistakes


def ratio_of(tokens, at_most=2.0):
    return ImportanceRatio(tokens, torch.zeros(3), at_most=at_most)


def wrong_options():
    """Options that a call with two whole heads refuses, each after its error."""
    labels, whole = torch.tensor([0, 1, 2]), torch.arange(13)
    return [
        ("labels must be token ids 0 to 12 .* got 99", dict(task=CrossEntropy(labels + 97))),
        ("labels must have shape", dict(task=CrossEntropy(labels[:2]))),
        ("task must be a CrossEntropy", dict(task=labels)),
        ("soft_weight must be at least 0", dict(soft_weight=-1)),
        ("chunk_bytes must be at least 1", dict(chunk_bytes=0)),
        ("vocabulary must be at most 13", dict(vocabulary=14)),
        (r"is no word; pass Divergence\(.skew_kl.\)", dict(divergence="skew_kl")),
        ("rows must be int64", dict(draft=Draft(rows=labels.int()))),
        ("rows must have shape", dict(draft=Draft(rows=labels[:2]))),
        ("rows must be the teacher's rows 0 to 2, got 4", dict(draft=Draft(rows=labels + 2))),
        ("draft.vocabulary must have shape .13,.", dict(draft=Draft(labels))),
        ("draft.vocabulary must be int64", dict(draft=Draft(labels.int()))),
        (
            "draft.vocabulary must be token ids 0 to 12, got 14",
            dict(draft=Draft(torch.arange(2, 15))),
        ),
        (
            r"draft.vocabulary must not have a token twice; of offsets .* d2t \+ torch.arange",
            dict(draft=Draft(whole // 4)),
        ),
        ("draft.vocabulary must not have a token twice$", dict(draft=Draft(whole * 5 % 12))),
        ("vocabulary has no use beside", dict(vocabulary=3, draft=Draft(whole))),
        ("draft must be a Draft", dict(draft=whole)),
        ("pass draft=fastkd.Draft.mass=", dict(teacher_mass="whole")),
        ("pass draft=fastkd.Draft.vocabulary=", dict(draft_vocabulary=whole)),
        ("unexpected keyword argument 'tau'", dict(tau=2.0)),
        (
            "draft.mass='whole' needs divergence",
            dict(divergence="js", draft=Draft(whole, "whole")),
        ),
        ("return_terms must be one of 'soft'", dict(return_terms=["kl"])),
        ("ratio must be an ImportanceRatio", dict(ratio=labels)),
        ("ids must be token ids 0 to 12, got 13", dict(ratio=ratio_of(labels + 11))),
    ]


def wrong_calls():
    (h, w, b), (h_t, w_t, _) = heads(3)
    w_t, labels = w_t[:V], torch.tensor([0, 1, 2])
    top, _ = top_k(3, k=2)
    loss, log_probs = linear_soft_target_loss, top.log_probs
    return [
        *(
            (message, functools.partial(loss, h, w, h_t, w_t, **options))
            for message, options in wrong_options()
        ),
        ("bias must have shape", lambda: Head(w, b[:3])),
        ("softcap must be greater than 0", lambda: Head(w, softcap=0.0)),
        ("name must be one of .* did you mean 'skew_kl'", lambda: Divergence("skew")),
        ("rate must be at least 0", lambda: Divergence("lk", rate=-1)),
        ("beta must be at most 1", lambda: Divergence("js", beta=2)),
        ("labels must be integers", lambda: CrossEntropy(labels.float())),
        ("label_smoothing must be at most 1", lambda: CrossEntropy(labels, label_smoothing=2)),
        ("weight must be at least 0", lambda: CrossEntropy(labels, -1.0)),
        ("teacher_head must be a Tensor or Head, got None", lambda: loss(h, w, h_t)),
        ("teacher_head: a TopK has no hidden states", lambda: loss(h, w, top, w_t)),
        ("teacher_head requires grad", lambda: loss(h, w, h_t, Head(w_t, b))),
        ("student_head must be a Tensor or Head", lambda: loss(h, "head", h_t, w_t)),
        ("ids must have shape", lambda: TopK(top.ids[:2], log_probs)),
        ("ids must be integers", lambda: TopK(top.ids.float(), log_probs)),
        ("tail must be one of", lambda: TopK(top.ids, log_probs, "rest")),
        ("ids must be token ids 0 to 12", lambda: loss(h, w, TopK(top.ids + 13, log_probs))),
        ("a token twice", lambda: loss(h, w, TopK(top.ids * 0, log_probs))),
        ("log_probs must be logarithms", lambda: loss(h, w, TopK(top.ids, -log_probs))),
        ("the student's positions, K", lambda: soft_target_loss(torch.randn(4, V), top)),
        ("mass must be one of", lambda: Draft(mass="part")),
        ("rows: a TopK has no hidden", lambda: loss(h, w, top, draft=Draft(rows=labels))),
        ("draft.vocabulary: a TopK", lambda: loss(h, w, top, draft=Draft(labels))),
        (
            "return_terms: 'teacher_entropy' needs the teacher's whole distribution",
            lambda: loss(h, w, top, return_terms=["teacher_entropy"]),
        ),
        ("at_most must be greater than 0", lambda: ratio_of(labels, at_most=0.0)),
        ("ids must have shape", lambda: ratio_of(labels[:2])),
        ("ids must be integers", lambda: ratio_of(labels.float())),
        ("ids must be int64", lambda: Head(w).subset(labels.int())),
    ]


def test_invalid_arguments_are_named():
    for message, call in wrong_calls():
        with pytest.raises((ValueError, TypeError), match=message) as raised:
            call()
        assert "\n" not in str(raised.value)
