"""Wrong input raises one sentence that names the argument."""

import dataclasses
import inspect
from collections.abc import Callable

import pytest

import fastkd
from fastkd._core.registry import LOSSES, inputs_of
from tests.losses import FILES
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


@pytest.mark.parametrize("name", [name for loss in LOSSES for name in loss.with_reference])
def test_options_of_functions_are_checked(name):
    """A word that is none of theirs, and a negative number."""
    learning, given, options = inputs_of(name)
    function = getattr(fastkd, name)
    parameters = inspect.signature(function).parameters
    for option in parameters.keys() - FREE - {"return_terms", "ignore_index"}:
        if parameters[option].default is not inspect.Parameter.empty:
            for wrong in ("typo", -5):
                changed = options | {option: wrong}
                found = error_of(lambda changed=changed: function(*learning, *given, **changed))
                assert found is not None and option in found, (option, wrong)


def error_of(loss: Callable[[], object]) -> str | None:
    """The sentence of a call that is refused."""
    try:
        loss()
    except (ValueError, TypeError) as error:
        return str(error)
    return None


SIZES = {"student_dim": 4, "teacher_dim": 6, "in_dim": 4, "out_dim": 6}
# Options without a wrong value: flags, and a group of processes.
FREE = {"gather", "group", "persistent", "scale_by_t2"}


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
