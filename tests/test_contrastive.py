"""COS-NCE: the closed form against the explicit sum, in-batch, given and label-filtered."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkd.losses.cos_nce import CosNCELoss, cos_nce_loss, cos_nce_loss_ref
from tests.losses.contrastive import cos_nce
from tests.support.compare import (
    DTYPES,
    assert_accurate,
    assert_matches_reference,
    count_graphs,
    counted,
    every_two_meet,
    value_and_grad,
)
from tests.support.oracles import pooled

pytestmark = pytest.mark.usefixtures("tensors_on_device")

TRITON_FUNCTION = "cos_nce_loss"

SHAPES = [(1, 1, 1), (2, 1, 3), (3, 2, 16), (5, 7, 7), (17, 3, 33), (4, 129)]


def features(*shape, dtype=torch.float64, mean=0.0):
    student, teacher = (torch.randn(*shape, dtype=torch.float64) + mean for _ in range(2))
    return student.to(dtype), teacher.to(dtype)


check = functools.partial(assert_matches_reference, cos_nce_loss, cos_nce_loss_ref)


@pytest.mark.parametrize("function", [cos_nce_loss, cos_nce_loss_ref])
def test_worked_example(function):
    student = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    teacher = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    # Sample 0: g(n, z) = 1, g(t, z) = 0, so (2 - 1)/2 + 0. Sample 1: g(n, z) = 0.4,
    # g(t, z) = 0.2, so (2 - 0.2)/2 + 0.2.
    losses = function(student, teacher, reduction="none")
    assert torch.allclose(losses, torch.tensor([0.5, 1.1]))
    assert torch.allclose(function(student, teacher), torch.tensor(0.8))
    assert torch.allclose(function(student, teacher, reduction="sum"), torch.tensor(1.6))


@pytest.mark.parametrize("function", [cos_nce_loss, cos_nce_loss_ref])
def test_equals_the_explicit_sum(function):
    student, teacher = features(4, 3, 5)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 1]])
    labels, bank = torch.tensor([1, 0, 1, 5]), torch.randn(6, 3, 5, dtype=torch.float64)
    for options in ({}, {"labels": labels}, {"negatives": bank}):
        given = {"negatives": None, "labels": None} | options
        expected, _ = cos_nce(student, teacher, **given, mask=mask)
        losses = function(student, teacher, mask=mask, reduction="none", **options)
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)


@pytest.mark.within_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(backend, shape, dtype):
    student, teacher = features(*shape, dtype=dtype, mean=0.5)
    # With one feature there are two directions: the gradient's two terms over ‖z‖ cancel to 0.
    floor = (1 / student.double()).norm().item() if shape[-1] == 1 else 1e-8
    for options in (
        {},
        {"labels": torch.randint(0, 3, shape[:1])},
        {"negatives": features(4, *shape[1:], dtype=dtype)[0]},
        {"negatives": features(shape[0], 3, *shape[1:], dtype=dtype)[0]},
    ):
        check(backend, student, teacher, gradient_floor=floor, **options)


def test_loss_without_negatives_is_zero(backend):
    student, teacher = features(1, 4, 6, dtype=torch.float32)
    many = student.expand(3, 4, 6), teacher.expand(3, 4, 6)
    for pair, options in (
        ((student, teacher), {}),
        (many, {"labels": torch.tensor([2, 2, 2])}),
        (many, {"negatives": torch.empty(0, 4, 6)}),
    ):
        loss, grad = value_and_grad(cos_nce_loss, *pair, backend=backend, **options)
        assert loss == 0 and (grad == 0).all()


@pytest.mark.parametrize("scale", [1e-36, 1e-20, 1e20, 1e36])
def test_extreme_scales(backend, scale):
    student, teacher = features(4, 3, 8, dtype=torch.float32)
    expected = value_and_grad(cos_nce_loss_ref, student.double(), teacher.double())
    actual = value_and_grad(cos_nce_loss, student * scale, teacher * scale, backend=backend)
    assert_accurate(actual[0], expected[0], torch.float32)
    assert_accurate(actual[1].double() * scale, expected[1], torch.float32)


def test_zero_and_constant_features(backend):
    student, teacher = features(4, 3, 8, dtype=torch.float32)
    student[1], teacher[2, 0] = 0, 0
    check(backend, student, teacher)
    _, grad = value_and_grad(cos_nce_loss, student, teacher, backend=backend)
    assert (grad[1] == 0).all()
    constant = torch.full((4, 3, 8), 0.1)
    loss, grad = value_and_grad(cos_nce_loss, constant, constant, backend=backend)
    assert loss.item() == pytest.approx(1.0, abs=1e-6)  # 2 + 1/2 - 3/2
    assert grad.abs().max() < 1e-5


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_in_real_data_gives_nan(backend, bad):
    for side in (0, 1):
        pair = [x.float() for x in features(4, 3, 8)]
        pair[side][2, 1, 5] = bad
        losses = cos_nce_loss(*pair, reduction="none", backend=backend)
        assert losses[2, 1].isnan()
        assert losses[:, [0, 2]].isfinite().all()
        assert cos_nce_loss(*pair, backend=backend).isnan()
        # As a negative it reaches exactly the samples that it is a negative of.
        losses = cos_nce_loss(
            *pair, labels=torch.tensor([0, 0, 1, 1]), reduction="none", backend=backend
        )
        assert losses[2, 1].isnan()
        assert losses[:2, 1].isnan().all() == (side == 1)
        assert losses[3, 1].isfinite()


def test_few_negatives_among_many_samples(backend):
    # One sample of another label: its sum must not be a difference of two large ones.
    student, teacher = features(65, 1, 16, dtype=torch.float32, mean=1.0)
    labels = torch.zeros(65, dtype=torch.long).index_fill(0, torch.tensor([40]), 1)
    options = {"labels": labels, "reduction": "none", "upstream": torch.randn(65, 1)}
    check(backend, student, teacher, **options)


SIZES = (4, 5, 9, 17)
GROWING = {
    "samples and positions": lambda n: (
        *sized(n, n + 1, 8),
        torch.rand(n, n + 1) > 0.3,
        torch.arange(n) % 3,
    ),
    "labelled bank": lambda n: (
        *(*sized(n, 8), None, torch.arange(n)),
        *(torch.randn(2 * n, 8), torch.arange(2 * n)),
    ),
    "each": lambda n: (*sized(n, 8), None, None, torch.randn(n, n, 8)),
}


def sized(*shape):
    """Student and teacher."""
    return torch.randn(*shape, requires_grad=True), torch.randn(*shape)


# The kernels are one operator in a graph; here with the most common arguments.
@pytest.mark.left_out(
    where=lambda given: given["backend"] != "torch" and given["growing"] != "labelled bank"
)
@pytest.mark.parametrize("growing", GROWING)
def test_sizes_share_two_graphs(backend, growing):
    """Alternating reductions."""
    reduction = ("mean", "none")[list(GROWING).index(growing) % 2]

    def loss(student, teacher, mask=None, labels=None, negatives=None, negatives_labels=None):
        return cos_nce_loss(
            student,
            teacher,
            mask=mask,
            labels=labels,
            negatives=negatives,
            negatives_labels=negatives_labels,
            reduction=reduction,
            backend=backend,
        )

    assert count_graphs(loss, [GROWING[growing](n) for n in SIZES], rtol=1e-5, atol=1e-6) <= 2


def test_module_of_layers_shares_two_graphs():
    loss = CosNCELoss(8, 6)

    def make(n):
        return [torch.randn(n, 3, 8) for _ in range(2)], [torch.randn(n, 3, 6) for _ in range(2)]

    calls = [(*make(n), torch.ones(n, 3)) for n in (4, 5, 7, 9)]
    assert count_graphs(loss, calls, rtol=1e-5, atol=1e-6) <= 2


def test_compiles_with_one_tensor_as_several_arguments(backend, device):
    student, teacher = sized(4, 3, 8)
    module = CosNCELoss(8, 8, backend=backend).to(device)
    loss = functools.partial(cos_nce_loss, backend=backend)

    def call(s, t):
        real = t[..., 0] > 0
        return (
            loss(s, t, negatives=t)
            + loss(s, s.detach())
            + loss(t, t)
            + loss(s, t, negatives=t, mask=real, negatives_mask=real)
            + module([s, s], [t, t], negatives=[t, t])
        )

    compiled, graphs = counted(call)
    traced, eager = (f(student, teacher) for f in (compiled, call))
    assert_accurate(traced, eager, torch.float32)
    (traced,), (eager,) = (torch.autograd.grad(x, student) for x in (traced, eager))
    assert_accurate(traced, eager, torch.float32)
    assert len(graphs) == 1


@pytest.mark.parametrize("shape", [(3, 2, 0), (3, 0), (0, 2, 4), (3, 0, 4), (0, 0, 0), (0, 4)])
def test_empty_features(backend, shape):
    """The cosine of a vector without entries is 0, as that of a zero vector."""
    student, teacher = sized(*shape)
    own, bank = {"labels": torch.arange(shape[0])}, {"negatives": torch.zeros(2, *shape[1:])}
    for options in ({}, own, bank, own | bank | {"negatives_labels": torch.full((2,), -1)}):
        losses, grad = value_and_grad(
            cos_nce_loss, student, teacher, reduction="none", backend=backend, **options
        )
        assert torch.equal(losses, torch.full(shape[:-1], 2.0))
        reference = cos_nce_loss_ref(student, teacher, reduction="none", **options)
        assert_accurate(losses, reference, torch.float32)
        assert grad.shape == shape


def test_inference_mode_and_the_meta_device_with_a_bank(device):
    """With given negatives, which test_promises.py has not."""
    student, _ = sized(4, 3, 8)
    with torch.inference_mode():
        teacher, bank = torch.randn(4, 3, 8), torch.randn(5, 3, 8)
    options = {"negatives": bank, "negatives_mask": bank[..., 0] > 0}
    cos_nce_loss(student, teacher, **options).backward()
    cos_nce_loss(student, teacher, labels=torch.arange(4)).backward()

    def meta(*shape):
        return torch.randn(*shape, device="meta")

    options = {"mask": meta(4, 3) > 0, "reduction": "none"}
    losses = cos_nce_loss(meta(4, 3, 8), meta(4, 3, 8), labels=meta(4), **options)
    assert losses.is_meta and losses.shape == (4, 3)
    module = CosNCELoss(8, 6).to("meta")
    assert module(meta(4, 3, 8), meta(4, 3, 6), options["mask"], negatives=meta(5, 3, 6)).is_meta


# Given negatives that are masked or have labels


def bank_of(*leading, positions=(3,), size=6):
    features = torch.randn(*leading, *positions, size)
    mask = torch.rand(features.shape[:-1]) > 0.4
    return features.masked_fill(~mask[..., None], torch.nan), mask


@pytest.mark.parametrize(
    ("leading", "positions", "reduction"),
    every_two_meet([(7,), (5, 7), (40,), (0,), (5, 0)], [(), (3,), (2, 2)], ["mean", "none"]),
    ids=str,
)
def test_masked_and_labelled_negatives(backend, leading, positions, reduction):
    student, teacher = features(5, *positions, 6, dtype=torch.float32)
    bank, bank_mask = bank_of(*leading, positions=positions)
    mask = torch.rand(5, *positions) > 0.2
    labels, bank_labels = torch.tensor([0, 3, 0, 5, 1]), torch.randint(0, 4, leading)
    upstream = torch.randn(5, *positions) if reduction == "none" else torch.tensor(-2.0)
    named = {"labels": labels, "negatives_labels": bank_labels}
    masked = {"negatives": bank, "negatives_mask": bank_mask}
    whole = {"negatives": bank.nan_to_num(0.5)}
    for options in (
        masked,
        masked | {"mask": mask},
        masked | named | {"mask": mask},
        whole | named,
        whole | {"labels": labels.double() / 2, "negatives_labels": bank_labels},
    ):
        check(backend, student, teacher, upstream=upstream, reduction=reduction, **options)


def test_negatives_equal_to_the_batch_give_the_in_batch_loss(backend):
    student, teacher = features(6, 3, 8, dtype=torch.float32)
    mask, labels = torch.rand(6, 3) > 0.3, torch.tensor([0, 1, 1, 2, 0, 5])
    options = {"mask": mask, "labels": labels, "backend": backend}
    expected = value_and_grad(cos_nce_loss, student, teacher, **options)
    bank = {"negatives": teacher, "negatives_mask": mask, "negatives_labels": labels}
    each = {name: x.expand(6, *x.shape) for name, x in bank.items()}
    for negatives in (bank, each):
        actual = value_and_grad(cos_nce_loss, student, teacher, **negatives, **options)
        for found, wanted in zip(actual, expected, strict=True):
            assert_accurate(found, wanted, torch.float32)


@pytest.mark.parametrize("kind", ["batch", "shared", "each", "same"])
def test_nan_label_matches_no_other(backend, kind):
    student, teacher = features(5, 2, 6, dtype=torch.float32)
    nan = torch.nan
    labels, bank = torch.tensor([nan, 0.0, nan, 0.0, 1.5]), torch.tensor([nan, nan, 0.0, 1.5])
    # The same result with unique labels in place of NaN.
    plain, plain_bank = torch.tensor([7, 0.0, 8, 0.0, 1.5]), torch.tensor([11, 12, 0.0, 1.5])
    if kind == "same":  # one tensor for both: a bank's row of a number is not the sample's own
        bank, plain_bank = labels, torch.tensor([11, 0.0, 12, 0.0, 1.5])
    named, as_named = {"labels": labels}, {"labels": plain}
    if kind != "batch":
        lead = (5, 4) if kind == "each" else bank.shape
        given = {"negatives": torch.randn(*lead, 2, 6)}
        named |= given | {"negatives_labels": bank if kind == "same" else bank.expand(lead)}
        as_named |= given | {"negatives_labels": plain_bank.expand(lead)}
    assert_matches_reference(cos_nce_loss, cos_nce_loss_ref, backend, student, teacher, **named)
    found, wanted = (
        cos_nce_loss(student, teacher, reduction="none", backend=backend, **options)
        for options in (named, as_named)
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", ["shared", "each"])
def test_integer_labels_are_not_rounded_to_floating_negative_labels(backend, kind):
    student, teacher = features(2, 1, 6, dtype=torch.float32)
    lead = (2,) if kind == "shared" else (2, 2)
    options = {
        "labels": torch.tensor([2**24, 2**24 + 1]),
        "negatives": torch.randn(*lead, 1, 6),
        "negatives_labels": torch.tensor([2.0**24, 2.0**25]).expand(lead),
    }
    assert_matches_reference(cos_nce_loss, cos_nce_loss_ref, backend, student, teacher, **options)
    named = {**options, "labels": torch.tensor([0, 1]), "reduction": "none"}
    named["negatives_labels"] = torch.tensor([0, 5]).expand(lead)
    found = cos_nce_loss(student, teacher, backend=backend, **options | {"reduction": "none"})
    torch.testing.assert_close(found, cos_nce_loss(student, teacher, backend=backend, **named))


def test_nan_in_a_negative_reaches_its_samples_only(backend):
    student, teacher = features(4, 1, 6, dtype=torch.float32)
    bank = torch.randn(5, 1, 6)
    bank[3, 0, 2] = torch.nan
    named = {"labels": torch.arange(4), "negatives_labels": torch.tensor([0, 0, 1, 2, 7])}
    losses = cos_nce_loss(
        student, teacher, negatives=bank, reduction="none", backend=backend, **named
    )
    assert losses[:, 0].isnan().tolist() == [True, True, False, True]


def test_module_takes_a_masked_bank(backend, device):
    loss = CosNCELoss(8, 6, pool="mean", backend=backend).to(device)
    layers = list(torch.randn(2, 4, 3, 8)), list(torch.randn(2, 4, 3, 6))
    bank, filled = torch.randn(2, 9, 6), torch.arange(9) < 5
    labels = {"labels": torch.arange(4)}
    masked = loss(
        *layers, **labels, negatives=list(bank.masked_fill(~filled[:, None], torch.inf)),
        negatives_mask=filled, negatives_labels=torch.arange(9),
    )  # fmt: skip
    kept = loss(*layers, **labels, negatives=list(bank[:, :5]), negatives_labels=torch.arange(5))
    assert_accurate(masked, kept, torch.float32)
    with pytest.raises(ValueError, match=r"student must have 8 columns \(student_dim\)"):
        loss(layers[1], layers[1])


@settings(max_examples=20, deadline=None)
@given(
    batch=st.integers(2, 9), positions=st.integers(1, 4), size=st.integers(1, 9),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_loss_is_invariant_under_order_scale_and_rotation(batch, positions, size, seed):
    torch.manual_seed(seed)
    student, teacher = features(batch, positions, size)
    labels, mask = torch.randint(0, 3, (batch,)), torch.rand(batch, positions) > 0.3
    losses = cos_nce_loss(student, teacher, labels=labels, mask=mask, reduction="none")
    order = torch.randperm(batch)
    rotation = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q
    again = cos_nce_loss(
        3 * student[order] @ rotation,
        0.5 * teacher[order] @ rotation,
        labels=labels[order],
        mask=mask[order],
        reduction="none",
    )
    assert torch.allclose(again, losses[order], atol=1e-9)
    rounding = 4 * torch.finfo(torch.float64).eps
    assert -rounding <= cos_nce_loss(student, teacher) <= 4 + rounding


def test_blocks_of_samples_do_not_change_the_result(monkeypatch):
    monkeypatch.setattr("fastkd.losses.cos_nce.BLOCK_ELEMENTS", 50)
    student, teacher = features(7, 3, 8)
    check("torch", student, teacher)
    check("torch", student, teacher, labels=torch.randint(0, 3, (7,)), mask=torch.rand(7, 3) > 0.3)
    check("torch", student, teacher, negatives=torch.randn(9, 3, 8, dtype=torch.float64))


def test_module_projects_and_pools():
    student, teacher = torch.randn(4, 5, 6), torch.randn(4, 5, 8)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [1, 0, 0, 0, 0]])
    loss = CosNCELoss(6, 8)
    assert [name for name, _ in loss.named_parameters()] == ["W.weight"]
    projected = student @ loss.W.weight.T
    expected = cos_nce_loss(projected, teacher, mask=mask)
    assert torch.allclose(loss(student, teacher, mask), expected)
    loss(student, teacher, mask).backward()
    assert loss.W.weight.grad.isfinite().all()

    noisy = [x.masked_fill(mask[..., None] == 0, torch.nan) for x in (student, teacher)]
    for pool in ("cls", "mean"):
        pooling = CosNCELoss(6, 8, pool=pool)
        pooling.load_state_dict(loss.state_dict())
        expected = cos_nce_loss(*(pooled(x, mask.bool(), pool) for x in (projected, teacher)))
        assert torch.allclose(pooling(*noisy, mask), expected, atol=1e-6)


def test_module_averages_layers(backend, device):
    loss = CosNCELoss(6, 8, backend=backend).to(device)
    students, teachers = list(torch.randn(10, 3, 2, 6)), list(torch.randn(10, 3, 2, 8))
    mask, negatives = torch.rand(3, 2) > 0.3, list(torch.randn(10, 2, 2, 8))
    for options in ({"mask": mask}, {"negatives": negatives}):

        def each(i, options=options):
            own = {name: x[i] if name == "negatives" else x for name, x in options.items()}
            return loss(students[i], teachers[i], **own)

        together = loss(students, teachers, **options)
        apart = torch.stack([each(i) for i in range(10)]).mean()
        assert_accurate(together, apart, torch.float32)
        weight = loss.W.weight
        assert_accurate(
            torch.autograd.grad(together, weight)[0],
            torch.autograd.grad(apart, weight)[0],
            torch.float32,
        )
    with pytest.raises(ValueError, match="negatives has 1 layers but student has 10"):
        loss(students, teachers, negatives=torch.randn(2, 2, 8))
    with pytest.raises(ValueError, match=r"student must have shape \(3, 2, 8\) \(leading"):
        loss([students[0], students[1][:2]], [teachers[0], teachers[1][:2]])


BANK = {"negatives": torch.randn(6, 3, 8)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"student": torch.randn(8)}, "student must have at least 2 dimensions"),
        ({"labels": torch.zeros(5)}, r"labels must have shape \(4,\)"),
        ({"negatives": torch.randn(6, 2, 8)}, r"negatives must have shape \(K, 3, 8\)"),
        ({"negatives": torch.randn(5, 6, 3, 8)}, "negatives must have shape"),
        (BANK | {"labels": torch.zeros(4)}, "negatives are given; pass both or neither"),
        (BANK | {"negatives_labels": torch.zeros(6)}, "pass both or neither"),
        ({"negatives_mask": torch.ones(6, 3)}, "negatives_mask belongs to negatives"),
        (
            BANK | {"negatives_mask": torch.ones(6)},
            r"negatives_mask must have shape \(6, 3\) \(the leading dimensions of negatives\)",
        ),
        (
            BANK | {"labels": torch.zeros(4), "negatives_labels": torch.zeros(4, 6)},
            r"negatives_labels must have shape \(6,\)",
        ),
        ({"reduction": "means"}, "did you mean 'mean'"),
    ],
)
def test_bad_input(change, message):
    arguments = {"student": torch.randn(4, 3, 8), "teacher": torch.randn(4, 3, 8)} | change
    with pytest.raises(ValueError, match=message):
        cos_nce_loss(**arguments)


def test_a_nan_weight_of_a_position_without_negatives(backend, device):
    student, teacher = torch.randn(2, 2, 3, 4, device=device)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], device=device)
    options = dict(mask=mask, backend=backend)
    weights = torch.ones(2, 3, device=device)
    wanted = value_and_grad(cos_nce_loss, student, teacher, weights=weights, **options)
    weights[0, 2] = torch.nan
    found = value_and_grad(cos_nce_loss, student, teacher, weights=weights, **options)
    torch.testing.assert_close(found, wanted)
