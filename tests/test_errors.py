"""Wrong input raises one sentence that names the argument."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator

import pytest
import torch

import fastkd
from fastkd._core.registry import LOSSES, inputs_of
from fastkd.analysis import rccc
from fastkd.distill import merged_span_loss, span_likelihood_loss
from tests.losses import FILES
from tests.support.compare import raises
from tests.support.every import DEVICE, every_loss, features, padding

WRONG = {
    "a teacher that requires grad": (lambda s, t, m: (s, t.requires_grad_(), m), "detach"),
    "a teacher that is no leaf": (lambda s, t, m: (s, t.requires_grad_() * 2, m), "detach"),
    "another number of samples": (lambda s, t, m: (s, t[:-1], m), "teacher|y must"),
    "integers": (lambda s, t, m: (s.detach().long(), t.long(), m), "float"),
    "two dtypes": (lambda s, t, m: (s, t.double(), m), "dtype|float64"),
    "a list of numbers": (lambda s, t, m: (s.tolist(), t, m), "Tensor|tensor"),
    "a mask of another shape": (lambda s, t, m: (s, t, m[:, :-1]), "mask"),
    "a mask of other numbers": (lambda s, t, m: (s, t, m * 2), "mask"),
    "an additive mask": (lambda s, t, m: (s, t, (m - 1.0) * 1e4), "mask"),
    "sparse tensors": (lambda s, t, m: (s.detach().to_sparse(), t, m), "must be dense"),
    "the meta device for one": (lambda s, t, m: (s, t.to("meta"), m), "meta"),
}
OF_VALUES = ("a mask of other numbers", "an additive mask")  # reading them would wait for a GPU
# Some losses have no frozen teacher; for lists of layers this test has no dtype to compare.
NO_MISTAKE = {
    ("layer_norm_mse", "a teacher that requires grad"),
    ("layer_norm_mse", "a teacher that is no leaf"),
    ("linear_soft_target_loss", "a list of numbers"),
}


@every_loss
def test_wrong_input(loss):
    """rejects wrong input in one sentence that names the argument"""
    for mistake, (change, words) in WRONG.items():
        if (loss.name, mistake) in NO_MISTAKE or ("mask" in mistake and not loss.masked):
            continue
        if mistake in OF_VALUES and DEVICE.type == "cuda":
            continue
        with pytest.raises((ValueError, TypeError), match=words) as raised:
            loss(*change(*features(), padding()))
        assert "\n" not in str(raised.value), mistake


@pytest.mark.parametrize("name", [name for name in FILES if hasattr(FILES[name], "bad")])
def test_mistakes_of_the_rows(name):
    for words, call in FILES[name].bad():
        with pytest.raises((ValueError, TypeError), match=words) as raised:
            call()
        assert "\n" not in str(raised.value), words


WEIGHTED = [
    name
    for loss in LOSSES
    for name in loss.functions
    if "weights" in inspect.signature(getattr(fastkd, name)).parameters
]


@pytest.mark.parametrize("name", WEIGHTED)
def test_wrong_weights_are_named_or_visible(name):
    """Weights of positions, rows or samples; random calls have right ones."""
    (student, *learning), given, options = inputs_of(name)
    shape = student.shape[: 1 if name in ("attention_loss", "relation_loss") else -1]

    def call(weights: torch.Tensor) -> torch.Tensor:
        rest = options | {"weights": weights}
        return getattr(fastkd, name)(student, *learning, *given, **rest)

    assert call(torch.full(shape, torch.nan)).isnan()
    remedy = "call it once for each" if name in ("relation_loss", "layer_norm_mse") else "none"
    for words, weights in (
        (r"weights must have shape .* leading dimensions of", torch.ones(*shape, 2)),
        ("weights must be bfloat16", torch.ones(shape, dtype=torch.int64)),
        (r"weights is on meta but .* is on cpu", torch.ones(shape, device="meta")),
        (f"weights requires grad.*{remedy}.*weights.detach", torch.ones(shape).requires_grad_()),
    ):
        raises(words, call, weights, error=(TypeError, ValueError))


GARBAGE = (
    None, "typo", -5, 2.5, float("nan"), 10**30, True, [], {}, object(), range(3), torch.float32,
    torch.zeros(0), torch.zeros(2, 3), torch.zeros(2, 3, 4, 5).long(), torch.zeros(3).half(),
    torch.zeros(2, 3).to(torch.complex64), torch.zeros(2, 3, device="meta"),
    torch.zeros(2, 3).to_sparse(), torch.zeros(2, 3, requires_grad=True),
)  # fmt: skip
# Nothing that is no word and no number of theirs, nor a negative number, is accepted by chance.
NEVER = "typo", -5
X, Y, LABELS = torch.randn(4, 5, 6), torch.randn(4, 5, 7), torch.tensor([0, 1, 0, 1])
NEEDED = {
    "student_dim": 6, "teacher_dim": 7, "in_dim": 6, "out_dim": 7, "size": 5, "dim": 3,
    "name": "js", "weight": torch.randn(9, 6), "labels": LABELS, "ids": torch.tensor([[1, 2]]),
    "log_probs": torch.tensor([[0.5, 0.2]]).log(), "student_ids": torch.arange(3),
    "teacher_ids": torch.arange(3), "student_size": 5, "teacher_size": 6,
    "old_log_probs": torch.zeros(1, 2), "student": X, "teacher": Y, "student_logits": X,
    "teacher_logits": X.sin(), "x": X, "features": torch.randn(4, 3),
}  # fmt: skip
SAME = {"teacher": X.cos()}  # of losses that need one width
MAPS = {"student": torch.rand(2, 3, 4, 4), "teacher": torch.rand(2, 3, 4, 4)}


def calls() -> Iterator[tuple[str, Callable, dict]]:
    """Every public function, class, and call of a Module, with arguments that are right."""
    for name in (name for loss in LOSSES for name in loss.with_reference):
        learning, given, options = inputs_of(name)
        function = getattr(fastkd, name)
        named = dict(zip(inspect.signature(function).parameters, (*learning, *given), strict=False))
        yield name, function, named | options
    ids, spans = torch.zeros(2, 4).long(), torch.tensor([[0, 0, 1, 2]] * 2)
    head, ours, theirs = torch.randn(20, 6), torch.randn(2, 4, 6), torch.randn(2, 4, 6)
    both = {"student_spans": spans, "teacher_spans": spans}
    yield from (
        ("log_probs", fastkd.log_probs, {"hidden": ours, "head": head, "ids": ids}),
        ("TopK.of", fastkd.TopK.of, {"hidden": ours, "head": head, "k": 3}),
        ("canonical_correlations", fastkd.canonical_correlations, {"x": X, "y": Y}),
        ("rccc", rccc, {"matrix": torch.rand(4, 4)}),
        (
            "span_likelihood_loss", span_likelihood_loss,
            {"student_log_probs": -torch.rand(2, 4), "teacher_log_probs": -torch.rand(2, 4)} | both,
        ),
        (
            "merged_span_loss", merged_span_loss,
            {"student_hidden": ours, "student_head": head, "teacher_hidden": theirs,
             "teacher_head": head.clone(), "student_ids": ids, "teacher_ids": ids} | both,
        ),
    )  # fmt: skip
    for name, kind in vars(fastkd).items():
        if name in fastkd.__all__ and inspect.isclass(kind):
            given = {x: NEEDED[x] for x in needed(kind)}
            given |= {"at_most": 2.0} if name == "ImportanceRatio" else {}
            yield name, kind, given
            if issubclass(kind, torch.nn.Module) and name != "IntraClassKNNLoss":
                module = kind(**given)
                call = getattr(module, "enqueue", module.forward)
                given = {x: NEEDED[x] for x in needed(call)}
                given |= {"HiddenStateLoss": SAME, "AttentionLoss": MAPS}.get(name, {})
                yield f"{name}()", call, given


def needed(function: Callable) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [x.name for x in parameters if x.kind == plain and x.default is x.empty]


# Functions, and Modules whose options are checked as they are made.
OPTIONS = {name for loss in LOSSES for name in (*loss.with_reference, *loss.modules)}
CALLS = {name: (function, given) for name, function, given in calls()}


@pytest.mark.parametrize("name", CALLS)
def test_garbage_is_refused_in_one_sentence(name):
    """One argument is of another kind; what is accepted by chance is no mistake."""
    function, given = CALLS[name]
    function(**given)
    for option, parameter in inspect.signature(function).parameters.items():
        flag = option in FREE or (name, option) == ("FCDLoss()", "return_terms")
        for wrong in () if flag or parameter.kind == parameter.VAR_KEYWORD else GARBAGE:
            found = error_of(lambda **x: function(**given | x), **{option: wrong})
            words = (*given, option, "hidden")
            assert found is None or "\n" not in found, (option, wrong, found)
            assert found is None or any(x in found for x in words), (option, wrong, found)
            never = isinstance(wrong, str | int) and wrong in NEVER and name in OPTIONS
            assert found or not never or option == "ignore_index", (option, wrong)


def error_of(call: Callable[..., object], **given: object) -> str | None:
    """The sentence of a call that is refused."""
    try:
        call(**given)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


SIZES = {"student_dim": 4, "teacher_dim": 6, "in_dim": 4, "out_dim": 6}
# Options without a wrong value: flags, and a group of processes.
FREE = {"gather", "group", "persistent", "scale_by_t2", "orthogonal"}


@pytest.mark.parametrize("name", [name for loss in LOSSES for name in loss.modules])
def test_options_are_checked_whenever_they_are_set(name):
    """An option of a Module that is changed afterwards is refused as in the constructor."""
    kind = getattr(fastkd, name)
    options = {x.name for x in dataclasses.fields(kind)}
    sizes = {x: size for x, size in SIZES.items() if x in options}
    module = kind(**sizes)
    for option in options - FREE:
        before = getattr(module, option)
        wrong = {option: -5 if isinstance(before, float) else "typo"}
        later = error_of(lambda wrong=wrong: [setattr(module, *x) for x in wrong.items()])
        assert later is not None and getattr(module, option) is before, option
        made = error_of(lambda wrong=wrong: kind(**sizes | wrong))
        assert later == made or f"{option} is fixed" in later, option
