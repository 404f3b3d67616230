"""Options of draft models and on-policy students: degenerate rows, half precision, mistakes."""

import functools

import pytest
import torch

from fastkd import (
    CrossEntropy,
    Divergence,
    Draft,
    Head,
    ImportanceRatio,
    TopK,
    hidden_state_loss,
    linear_soft_target_loss,
    log_probs,
    soft_target_loss,
)
from fastkd.functional import linear_soft_target_loss_ref
from fastkd.lm.divergences import DIVERGENCES
from fastkd.lm.linear_soft_targets import TERMS
from tests.support.compare import value_and_grad, values_and_grads

NAMES = tuple(DIVERGENCES)
OF_WHOLE = ("forward_kl", "reverse_kl", "total_variation", "negative_log_acceptance")
OF_OVERLAP = ("total_variation", "negative_log_acceptance", "lk")
INF = float("inf")
each_divergence = pytest.mark.parametrize("name", NAMES)
every_way = pytest.mark.parametrize(
    ("mass", "name"),
    [("renormalised", name) for name in NAMES] + [("whole", name) for name in OF_WHOLE],
)
on_cpu = pytest.mark.parametrize("runs_on", ["torch", "auto"])


def of(name):
    return "adaptive_kl" if name == "adaptive_kl" else Divergence(name)


def drafts(rows=4, D=5, V=9, dtype=torch.float64):
    """Hidden states and heads of a student with three of the teacher's V tokens."""
    shapes = (2, rows, D), (3, D), (rows, D + 1), (V, D + 1)
    return [torch.randn(shape).to(dtype) for shape in shapes], torch.tensor([7, 0, 4])


def everything(ids, mass, rows=4):
    """Options that may be passed together."""
    return {
        "draft": Draft(ids, mass, rows=torch.randint(rows, (2, rows))),
        "weights": torch.randn(2, rows),
        "mask": torch.rand(2, rows) < 0.8,
        "ratio": ImportanceRatio(
            torch.randint(3, (2, rows)), -3 * torch.rand(2, rows), at_most=1.5
        ),
        "task": CrossEntropy(torch.randint(3, (2, rows)), 0.5, weights=torch.randn(2, rows)),
    }


# Degenerate rows


@every_way
@on_cpu
def test_equal_distributions_have_no_loss(mass, name, runs_on):
    """Two products of equal numbers may differ by rounding error.

    |p_s − p_t| has a kink there: total variation's gradient is p_s (Σ p_s b − b) with any b from 0
    to 1, and those of the negative log acceptance and "lk" are at most as large.
    """
    for seed in range(20):
        torch.manual_seed(seed)
        hidden, weight, bias = torch.randn(1, 5), torch.randn(9, 5), torch.randn(9)
        ids = torch.randperm(9) if mass == "whole" else torch.tensor([7, 0, 4])
        teacher = Head(weight, bias)

        def loss(bias, given=(hidden, weight, teacher, ids)):
            hidden, weight, teacher, ids = given
            return linear_soft_target_loss(
                hidden, Head(weight, bias).subset(ids), hidden, teacher, divergence=of(name),
                draft=Draft(ids, mass, rows=torch.zeros(1).long()), weights=-torch.ones(1),
                backend=runs_on,
            )  # fmt: skip

        value, grad = value_and_grad(loss, bias)
        assert abs(value) < 1e-6
        if name not in OF_OVERLAP:
            assert grad.abs().max() < 1e-6
            continue
        p = teacher.logits(hidden)[0, ids].softmax(-1)
        least, largest = (grad[ids] / p).aminmax()
        assert abs(grad.sum()) < 1e-6 and largest - least <= 1 + 1e-5


@pytest.mark.parametrize("runs_on", ["torch", "auto", "triton"])
@pytest.mark.parametrize("name", OF_WHOLE)
def test_a_teacher_that_excludes_the_drafts_tokens(name, runs_on):
    """Its probability of them is 0."""
    (h, w, h_t, w_t), ids = drafts(dtype=torch.float32)
    bias = torch.zeros(9)
    bias[ids] = -INF
    given = h_t.expand(2, -1, -1), Head(w_t, bias)
    options = dict(divergence=Divergence(name), draft=Draft(ids, "whole"))
    value, *grads = values_and_grads(
        linear_soft_target_loss, (h, w), *given, backend=runs_on, **options
    )
    finite = {"forward_kl": 0.0, "total_variation": 1.0}
    assert value.item() == pytest.approx(finite.get(name, INF))
    if name in finite:
        assert all(x.abs().max() < 1e-6 for x in grads)


@on_cpu
@pytest.mark.parametrize("name", OF_WHOLE)
def test_a_teacher_whose_tokens_the_draft_lacks(name, runs_on):
    """Its probability of the draft's tokens is e⁻²⁰⁰ or less."""
    (h, w, h_t, w_t), ids = drafts()
    bias = torch.zeros(9, dtype=torch.float64)
    bias[ids] = -300
    given = h_t.expand(2, -1, -1), Head(w_t, bias)
    options = dict(divergence=Divergence(name), draft=Draft(ids, "whole"))
    value, *grads = values_and_grads(
        linear_soft_target_loss, (h, w), *given, backend=runs_on, **options
    )
    wanted = values_and_grads(linear_soft_target_loss_ref, (h, w), *given, **options)
    torch.testing.assert_close([value, *grads], [*wanted], rtol=1e-6, atol=1e-12)
    least = {"forward_kl": -1e-9, "total_variation": 1 - 1e-9}.get(name, 200)
    most = {"forward_kl": 1e-9, "total_variation": 1 + 1e-9}.get(name, 400)
    assert least <= value <= most and all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("runs_on", ["torch", "auto", "triton"])
def test_lk_of_the_whole_mass_as_its_page_composes_it(runs_on):
    """λ·Σ p log(p/q) + (1 − λ)·TV of the draft's tokens, λ = exp(−rate·(1 − TV)) a constant."""
    rate, (tensors, ids) = 2.0, drafts(dtype=torch.float32)
    h, w, h_t, w_t = (x.requires_grad_(i < 2) for i, x in enumerate(tensors))
    h_t = h_t.expand(2, -1, -1)
    options = dict(draft=Draft(ids, "whole"), reduction="none", backend=runs_on)
    kl, tv = (
        linear_soft_target_loss(h, w, h_t, w_t, divergence=Divergence(name), **options)
        for name in ("forward_kl", "total_variation")
    )
    weight = torch.exp(-rate * (1 - tv.detach()))
    found = weight * kl + (1 - weight) * tv
    wide = [x.detach().double().requires_grad_() for x in (h, w)]
    log_q = (wide[0] @ wide[1].T).log_softmax(-1)
    p = (h_t.double() @ w_t.double().T).softmax(-1)[..., ids]
    acceptance = torch.minimum(p, log_q.exp()).sum(-1)
    weight = torch.exp(-rate * acceptance.detach())
    expected = weight * (p * (p.log() - log_q)).sum(-1) + (1 - weight) * (1 - acceptance)
    torch.testing.assert_close(found, expected.float())
    grads = (torch.autograd.grad(x.sum(), y) for x, y in ((found, (h, w)), (expected, wide)))
    torch.testing.assert_close(next(grads), tuple(x.float() for x in next(grads)))


@on_cpu
def test_a_weight_of_zero_is_not_a_mask(runs_on):
    """An infinite loss times 0 is NaN, as documented; the finite gradient times 0 is 0."""
    student, teacher = torch.tensor([[0.0, -INF], [0.0, 1.0]]), torch.zeros(2, 2)
    options = dict(reduction="none", backend=runs_on, upstream=torch.ones(2))
    weights = torch.tensor([0.0, 2.0])
    value, grad = value_and_grad(soft_target_loss, student, teacher, weights=weights, **options)
    assert value[0].isnan() and value[1].isfinite()
    assert (grad[0] == 0).all() and (grad[1] != 0).all()
    mask = torch.tensor([False, True])
    masked, _ = value_and_grad(
        soft_target_loss, student, teacher, weights=weights, mask=mask, **options
    )
    assert masked[0] == 0


def test_ratios_at_the_ends():
    (h, w, *teacher), _ = drafts()
    student, ids = h[0].float(), torch.tensor([0, 1, 2, 1])
    teacher, head = torch.randn(4, 5), torch.randn(3, 5)
    loss = functools.partial(
        linear_soft_target_loss, student, w.float(), teacher, head, reduction="none"
    )
    plain, q = loss(), (student @ w.float().T).softmax(-1).gather(-1, ids[:, None])[:, 0]
    for old, ratio in ((-INF, 2.0), (-1e4, 2.0), (0.0, q), (200.0, 0.0), (torch.nan, torch.nan)):
        found = loss(ratio=ImportanceRatio(ids, torch.full((4,), old), at_most=2.0))
        torch.testing.assert_close(found, plain * ratio, equal_nan=True)
    one = ImportanceRatio(torch.tensor(1), torch.tensor(-1.0), at_most=2.0)
    assert linear_soft_target_loss(student[0], w.float(), teacher[0], head, ratio=one).shape == ()
    none = ImportanceRatio(ids[:0], torch.zeros(0), at_most=2.0)
    nothing = linear_soft_target_loss(student[:0], w.float(), teacher[:0], head, ratio=none)
    assert nothing == 0


@pytest.mark.filterwarnings("ignore:mask has no real token")
def test_rows_of_one_teacher_row_and_of_no_position():
    (h, w, h_t, _), _ = drafts()
    head = torch.randn(3, 6).double()
    rows = torch.zeros(2, 4).long()
    found = linear_soft_target_loss(h, w, h_t[:1], head, draft=Draft(rows=rows))
    torch.testing.assert_close(found, linear_soft_target_loss(h, w, h_t[:1].expand(2, 4, 6), head))
    assert linear_soft_target_loss(h[:0], w, h_t, head, draft=Draft(rows=rows[:0])) == 0
    masked = torch.zeros(2, 4).bool()
    value, grad = value_and_grad(
        linear_soft_target_loss, h, w, h_t, head, draft=Draft(rows=rows - 5), mask=masked
    )
    assert value == 0 and (grad == 0).all()


@each_divergence
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_terms_of_many_tokens(name, temperature):
    """Several blocks of the C++ pass; with rows, −inf, and two equal largest logits.

    Products of small integers are exact in any order of their terms.
    """
    h, w, h_t, w_t = (
        torch.randint(-2, 3, shape).double() for shape in ((6, 5), (2500, 5), (3, 4), (2500, 4))
    )
    w[3] = w[2000] = h.sum(0) * 9
    labels, bias = torch.tensor([3, 2000, 7, 1500, 2499, 3]), torch.zeros(2500).double()
    bias[1024:1030] = -INF
    given = (h, w), h_t, Head(w_t, bias)
    options = dict(draft=Draft(rows=torch.tensor([2, 0, 0, 1, 2, 2])))
    options |= dict(
        task=CrossEntropy(labels, 0.5),
        divergence=of(name),
        temperature=temperature,
        return_terms=TERMS,
    )
    for more in ({"reduction": "none"}, {"mask": labels != 7}):
        (loss, terms), (ref, wanted) = (
            call(*given[0], *given[1:], **options, **more)
            for call in (linear_soft_target_loss, linear_soft_target_loss_ref)
        )
        torch.testing.assert_close((loss, terms), (ref, wanted), rtol=1e-9, atol=1e-9)
        if "mask" not in more:
            assert terms["accuracy"][[0, 5]].sum() > 0 and terms["accuracy"][1] == 0


def test_log_probs_and_top_k_of_few_tokens():
    hidden, head = torch.randn(3, 5), Head(torch.randn(4, 5), torch.tensor([-INF, 0, 0, 0]))
    value, grad = value_and_grad(
        log_probs, hidden, head, torch.tensor([0, 1, 2]), upstream=torch.ones(3)
    )
    assert value[0] == -INF and value[1:].isfinite().all() and grad[1:].isfinite().all()
    found = value_and_grad(
        log_probs, hidden, torch.randn(1, 5), torch.zeros(3).long(), upstream=1.0
    )
    assert all((x == 0).all() for x in found)

    ties = TopK.of(torch.zeros(2, 5), torch.randn(4, 5), 4)
    assert (ties.ids.sort(-1)[0] == torch.arange(4)).all()
    torch.testing.assert_close(ties.log_probs.exp(), torch.full((2, 4), 0.25))
    one = TopK.of(hidden, torch.randn(1, 5), 1)
    assert (one.ids == 0).all() and (one.log_probs == 0).all()
    assert TopK.of(hidden[:0], head, 2).ids.shape == (0, 2)
    assert TopK.of(hidden[0], head, 2).ids.shape == (2,)
    assert TopK.of(hidden, head, 4).log_probs[:, -1].tolist() == [-INF] * 3  # padding of a TopK
    whole = TopK.of(hidden, head, 4)
    torch.testing.assert_close(
        linear_soft_target_loss(hidden, head, whole), torch.tensor(0.0), atol=1e-6, rtol=0
    )


# Half precision and autocast


@pytest.mark.parametrize("mass", ["renormalised", "whole"])
def test_autocast_changes_nothing(mass):
    (h, w, *teacher), ids = drafts(dtype=torch.float32)
    options = everything(ids, mass)
    terms = ["total_variation", "teacher_entropy", "log_prob", "teacher_log_prob"]

    def call(h, w):
        loss, found = linear_soft_target_loss(h, w, *teacher, return_terms=terms, **options)
        return torch.stack([loss, *found.values()])

    plain = values_and_grads(call, (h, w))
    top = TopK.of(h, w, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = values_and_grads(call, (h, w))
        assert torch.equal(TopK.of(h, w, 2).log_probs, top.log_probs)
    assert all(map(torch.equal, under, plain))


# Mistakes


def on_another_device():
    """Calls with one tensor on another device, and the tensor's name."""
    states, ids, far = (
        torch.randn(3, 5),
        torch.tensor([0, 1, 2]),
        functools.partial(torch.ones, device="meta"),
    )
    head, no_ids = torch.randn(6, 5), torch.zeros(3, dtype=torch.int64, device="meta")
    linear = functools.partial(linear_soft_target_loss, states, head, states, head)
    part = functools.partial(linear_soft_target_loss, states, head[:3], states, head)

    def ratio(ids, old):
        return ImportanceRatio(ids, old, at_most=2.0)

    return {
        "draft.rows": lambda: linear(draft=Draft(rows=no_ids)),
        "draft.vocabulary": lambda: part(draft=Draft(no_ids)),
        "weights": lambda: linear(weights=far(3)),
        "weights ": lambda: linear(task=CrossEntropy(ids, weights=far(3))),
        "labels": lambda: linear(task=CrossEntropy(no_ids)),
        "ids": lambda: linear(ratio=ratio(no_ids, torch.zeros(3))),
        "old_log_probs": lambda: linear(ratio=ratio(ids, far(3))),
        "ids ": lambda: log_probs(states, head, no_ids),
        "head": lambda: log_probs(states, far(6, 5), ids),
        "head ": lambda: TopK.of(states, far(6, 5), 2),
        "ids of a part": lambda: Head(head).subset(no_ids),
        "ids of a TopK": lambda: soft_target_loss(states, TopK(no_ids[:, None], far(3, 1))),
        "teacher": lambda: hidden_state_loss(states, far(3, 5)),
        "mask": lambda: hidden_state_loss(states, states, far(3)),
        "weights of states": lambda: hidden_state_loss(states, states, weights=far(3)),
    }


@pytest.mark.parametrize("name", on_another_device())
def test_another_device_is_an_error(name):
    with pytest.raises(ValueError, match=f"^{name.split()[0]} is on meta but .* on cpu") as raised:
        on_another_device()[name]()
    assert "\n" not in str(raised.value)
