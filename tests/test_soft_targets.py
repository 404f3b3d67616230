"""Soft targets of logits, LM heads, top k, drafts and matched vocabularies: what only they have."""

import functools

import pytest
import torch

from bench import measure
from bench.case import Bound
from fastkd import CrossEntropy, Divergence, Draft, Head, ImportanceRatio, TopK, VocabularyMatch
from fastkd import linear_soft_target_loss as of_heads
from fastkd import linear_soft_target_loss_ref as of_heads_ref
from fastkd._core import extension
from fastkd.lm.heads import LowRank
from fastkd.lm.soft_targets import DIVERGENCES, soft_target_loss, soft_target_loss_ref
from tests.support import compare
from tests.support.compare import assert_accurate, every_two_meet, relative_error

TRITON_FUNCTION = "soft_target_loss"
MIXED, INF = Divergence("mixed", mix=0.3), torch.inf


def make_heads(rows=4, V=13, dtype=torch.float64):
    """States, weight and bias of the student, states and weight of the teacher."""
    shapes = (rows, 6), (V, 6), (V,), (rows, 5), (V, 5)
    made = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.requires_grad_(i < 3) for i, x in enumerate(made)]


def both(student, teacher, backend, upstream=1.0, **options):
    """Value and gradient, and the reference's in float64."""
    options["upstream"] = upstream
    wide = teacher if isinstance(teacher, TopK) else teacher.double()
    found = compare.value_and_grad(soft_target_loss, student, teacher, backend=backend, **options)
    return found, compare.value_and_grad(soft_target_loss_ref, student.double(), wide, **options)


# Accuracy


@pytest.mark.parametrize(
    ("divergence", "offset", "temperature"),
    every_two_meet(DIVERGENCES, [0.0, -1000.0], [20.0, 1000.0]),
)
def test_digits_at_high_temperature(backend, divergence, offset, temperature):
    """The divergence is of the size of the gaps squared over τ², and multiplied by τ²."""
    student, teacher = 2 * torch.randn(2, 6, 50) + offset
    options = dict(temperature=temperature, divergence=divergence, reduction="none")
    found, right = both(student, teacher, backend, torch.ones(6), **options)
    torch.testing.assert_close(found[0].double(), right[0], rtol=5e-6, atol=0)
    if offset == 0:
        assert_accurate(found[1], right[1], torch.float32, floor=1e-3)


@pytest.mark.parametrize("name", ["js", "skew_kl", "skew_reverse_kl"])
@pytest.mark.parametrize("share", [1e-30, 1e-4, 0.3, 0.999])
def test_mixtures_of_small_probabilities(backend, name, share):
    """A share of a subnormal number may be 0; multiplied by the upstream gradient it is not."""
    divergence, tails = Divergence(name, beta=share, skew=share), torch.linspace(-112, -70, 200)
    student, teacher = (20 * torch.randn(2, 5, 202)).unbind()
    student[:2, 2:] = torch.stack([tails, tails - 3])
    teacher[:2, 2:] = torch.stack([tails - 3, tails])
    student[2, 5:9] = teacher[2, 5:9] = teacher[3, :3] = -INF
    for factor in (1.0, 1e4):
        options = dict(divergence=divergence, reduction="none", upstream=torch.full((5,), factor))
        found, right = both(student, teacher, backend, **options)
        for x, y, divisor in zip(found, right, (1.0, factor), strict=True):
            torch.testing.assert_close(x.double() / divisor, y / divisor, rtol=1e-4, atol=1e-5)


def test_small_rests_are_exact(backend, device):
    """A rest of a millionth: subtracting would lose it."""
    student = torch.zeros(3, 2000, device=device)
    student[:, 7:9] = 22.0
    ids, log_probs = torch.tensor([[7, 8]] * 3), torch.tensor([[0.5, 0.4]] * 3).log()
    top = TopK(ids.to(device), log_probs.to(device))
    options = dict(divergence="reverse_kl", reduction="none")
    found, right = both(student, top, backend, torch.ones(3), **options)
    torch.testing.assert_close([x.double() for x in found], [*right], rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    ("divergence", "dtype", "labelled", "adapted"),
    every_two_meet(["forward_kl", "js", MIXED], [torch.bfloat16, torch.float16], [0, 1], [0, 1]),
)
def test_half_precision_is_rounded_once(divergence, dtype, labelled, adapted):
    """Neither logits nor the input of an adapter's second factor are rounded.

    Logits of standard deviation 3, long sums, and a student with an adapter.
    """
    shapes = (24, 512), (4000, 512), (16, 512), (4000, 16), (24, 256), (4000, 256)
    widths = 1, 512 / 9, 512, 16, 1, 256 / 9
    parts = [(torch.randn(s) / w**0.5).to(dtype) for s, w in zip(shapes, widths, strict=True)]

    def step(loss, h, w, down, up, *teacher):
        head = Head(w, softcap=30.0 if labelled else None)
        head.low_rank = (LowRank(down, up, 1.7),) if adapted else ()
        task = CrossEntropy(torch.arange(24) * 150, 0.5) if labelled else None
        return loss(h, head, *teacher, divergence=divergence, task=task)

    count = 4 if adapted else 2
    found, exact = (
        [x.detach().requires_grad_(i < count) for i, x in enumerate(given)]
        for given in (parts, [x.double() for x in parts])
    )
    value, right = step(of_heads, *found), step(of_heads_ref, *exact)
    assert_accurate(value, right, torch.float32)
    for upstream in (1.0, 0.3):  # also one that is no power of two
        factor = torch.tensor(upstream)
        grads = torch.autograd.grad(value, found[:count], factor, retain_graph=True)
        wanted = torch.autograd.grad(right, exact[:count], factor.double(), retain_graph=True)
        for x, y in zip(grads, wanted, strict=True):
            assert x.dtype == dtype and relative_error(x, y) <= 2 * relative_error(y.to(dtype), y)


@pytest.mark.skipif(not extension.CPU, reason="needs the extension")
def test_memory_of_a_match_is_that_of_one_vocabulary():
    student, teacher = torch.randn(32, 5000, requires_grad=True), torch.randn(32, 6000)

    def peak(teacher, **options):
        step = Bound(lambda: soft_target_loss(student, teacher, **options), [student]).step
        return measure.peak_bytes(step, torch.device("cpu"))

    ids = (torch.randperm(size)[:3000] for size in (5000, 6000))
    match, most = VocabularyMatch(*ids, 5000, 6000), 1.02 * peak(student.detach())
    for unmatched in ("renormalise", "bucket", "sorted"):
        assert peak(teacher, vocabulary=match, unmatched=unmatched) <= most


# Options of heads


def test_the_heads_gradient_is_allocated_once():
    """An operation between head and loss would allocate another gradient of the head's size."""
    h, w, _, h_t, w_t = make_heads()
    below = of_heads(h, w, h_t, w_t).grad_fn.next_functions
    assert any(getattr(node, "variable", None) is w for node, _ in below)


@pytest.mark.parametrize(("dtype", "V"), [(torch.uint8, 300), (torch.int16, 40000)])
def test_token_ids_in_a_narrow_dtype(dtype, V):
    """Neither ignore_index nor the vocabulary's size wraps: as uint8, -100 would be 156."""
    hidden, *heads = torch.randn(2, 4), torch.randn(V, 4), torch.randn(V, 4)
    labels, log_probs = torch.tensor([156, 3]), torch.tensor([[0.6, 0.3]]).log()

    def losses(kind: torch.dtype) -> list[float]:
        task, top = CrossEntropy(labels.to(kind)), TopK(labels[None].to(kind), log_probs)
        of_labels = of_heads(hidden, heads[0], hidden, heads[1], task=task)
        return [of_labels.item(), of_heads(hidden[:1], heads[0], top).item()]

    assert losses(dtype) == losses(torch.int64)


def test_subset_of_a_head():
    head = Head(torch.randn(9, 4, requires_grad=True), torch.randn(9), 0.5, softcap=3.0)
    head.low_rank = (LowRank(torch.randn(2, 4), torch.randn(9, 2), 1.7),)
    hidden, ids = torch.randn(3, 4), torch.tensor([8, 0, 5])
    part = head.subset(ids)
    torch.testing.assert_close(part.logits(hidden), head.logits(hidden)[:, ids])
    assert torch.autograd.grad(part.logits(hidden).sum(), head.weight)[0].shape == (9, 4)


# Drafts


def test_ratios_at_the_ends():
    h, w, _, h_t, w_t = make_heads(4, 3, torch.float32)
    ids = torch.tensor([0, 1, 2, 1])
    loss = functools.partial(of_heads, h, w, h_t, w_t, reduction="none")
    plain, q = loss(), (h @ w.T).softmax(-1).gather(-1, ids[:, None])[:, 0]
    for old, ratio in ((-INF, 2.0), (-1e4, 2.0), (0.0, q), (200.0, 0.0), (torch.nan, torch.nan)):
        found = loss(ratio=ImportanceRatio(ids, torch.full((4,), old), at_most=2.0))
        torch.testing.assert_close(found, plain * ratio, equal_nan=True)


@pytest.mark.parametrize("runs_on", ["auto", "torch"])
def test_accuracy_of_many_tokens(runs_on):
    """Several blocks of the C++ pass; with −inf, and two equal largest logits, of the first row.

    Products of small integers are exact in any order of their terms.
    """
    h, w = (torch.randint(-2, 3, (rows, 5)).double() for rows in (6, 2500))
    w[3] = w[2000] = h.sum(0) * 9
    bias = torch.zeros(2500).double()
    bias[1024:1030] = -INF
    head = Head(w, bias)
    task = CrossEntropy((head.logits(h).argmax(-1) + torch.arange(6) % 2) % 2500)
    options = dict(return_terms=["accuracy"], reduction="none", backend=runs_on)
    _, terms = of_heads(h, head, h, head, task=task, **options)
    assert terms["accuracy"].tolist() == [1, 0, 1, 0, 1, 0]


# In a graph


def of_labels(h, w, b, h_t, w_t):
    task, head = CrossEntropy(torch.tensor([1, 2, -100, 0, 5, 6])), Head(w, b, softcap=5.0)
    options = dict(divergence=Divergence("mixed"), task=task, return_terms=True)
    loss, terms = of_heads(h, head, h_t, w_t, **options)
    return loss + 0 * terms["soft"]


def of_a_draft(h, w, b, h_t, w_t):
    ids = torch.arange(6) % 7
    return of_heads(
        h, w[:7], h_t, w_t, draft=Draft(torch.arange(7), "whole", rows=ids % 3),
        weights=b[:6].detach(), ratio=ImportanceRatio(ids, -torch.rand(6), at_most=2.0),
        return_terms=["total_variation", "teacher_log_prob"], reduction="none",
    )[0].sum()  # fmt: skip


MATCH = VocabularyMatch(torch.arange(5), torch.arange(5) + 3, 13, 13)


def of_a_match(h, w, b, h_t, w_t):
    options = dict(vocabulary=MATCH, unmatched="sorted")
    loss = soft_target_loss(h @ w.T + b, h_t @ w_t.T, **options)
    return loss + of_heads(h, w, h_t, w_t, **options)


IN_A_GRAPH = {
    "labels": of_labels,
    "draft": of_a_draft,
    "match": of_a_match,
    # A frozen head is one tensor passed twice, a trained one shares its storage.
    "shared head": lambda h, w, *_: of_heads(h, w, h.sin().detach(), w.detach()),
    "top k": lambda h, w, b, h_t, w_t: of_heads(
        h, w, TopK(*(h_t @ w_t.T).log_softmax(-1).topk(3)[::-1])
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.thorough] * (x != "labels")) for x in IN_A_GRAPH]
)
def test_compiled_and_on_the_meta_device(name):
    step, given = IN_A_GRAPH[name], make_heads(6, dtype=torch.float32)
    torch.manual_seed(0)
    compiled, graphs = compare.counted(step, "aot_eager")
    values = []
    for run in (compiled, step):
        torch.manual_seed(0)
        value = run(*given)
        values.append((value, *torch.autograd.grad(value, given[:2])))
    torch.testing.assert_close(*values)
    assert len(graphs) == 1
    if name == "labels":
        on_meta = [x.detach().to("meta") for x in given]
        rows = of_heads(*on_meta[:2], *on_meta[3:], reduction="none")
        assert rows.is_meta and rows.shape == (6,)
