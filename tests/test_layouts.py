"""README's list of what every loss does: dtypes, padding, strides, autocast, devices."""

import importlib
import re
import warnings
from pathlib import Path

import pytest
import torch

import fastkd
from fastkd._core import check
from tests.support.compare import counted
from tests.support.every import (
    DEVICE,
    every_loss,
    every_loss_with_mask,
    features,
    padding,
    parameters,
    value_and_gradient,
)
from tests.support.subject import B, N


@pytest.mark.parametrize("loss", parameters("triton"), indirect=True)
def test_float64_is_left_to_pytorch(loss):
    with pytest.raises(ValueError, match="float64 is left to PyTorch"):
        loss.double()(*features(torch.float64), padding())


@every_loss_with_mask
def test_padding(loss):
    """ignores padding, whatever it holds, NaN included"""
    mask = padding()
    student, teacher = features()
    wanted = value_and_gradient(loss, student, teacher, mask)
    parameters = [p.grad.clone() for p in loss.parameters()]
    loss.zero_grad()
    student, teacher = (x.detach() for x in features())
    for x in (student, teacher):
        x[mask == 0] = torch.tensor([torch.nan, torch.inf], device=DEVICE).repeat(x.shape[-1] // 2)
    value, gradient = value_and_gradient(loss, student, teacher, mask)
    assert torch.equal(value, wanted[0]) and torch.equal(gradient, wanted[1])
    assert (gradient[mask == 0] == 0).all()
    for p, wanted_gradient in zip(loss.parameters(), parameters, strict=True):
        assert torch.equal(p.grad, wanted_gradient)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="to look at the values would wait for the GPU")
@pytest.mark.parametrize("loss", parameters("torch", masked=True), indirect=True)
def test_mask_without_a_real_token_warns_once(loss):
    student, teacher = features()
    for mask in (torch.zeros(B, N, dtype=torch.bool), torch.zeros(B, N)):  # torch's, and additive
        check._warn_of_empty_mask.cache_clear()
        with pytest.warns(UserWarning, match="mask has no real token"):
            loss(student, teacher, mask)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss(student, teacher, mask)
    check._warn_of_empty_mask.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "CCALoss: .* observations")  # has fewer than dimensions
        loss(student, teacher, padding())
        loss(student[:0], teacher[:0], padding()[:0])


def test_a_mask_without_a_real_token_in_a_graph():
    check._warn_of_empty_mask.cache_clear()
    student, teacher = features()
    call, graphs = counted(fastkd.FCDLoss())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert call(student, teacher, torch.zeros(B, N, device=DEVICE)) == 0
    assert len(graphs) == 1


@every_loss
def test_autocast(loss, wanted):
    """autocast"""
    with torch.autocast(DEVICE.type, torch.bfloat16):
        found = value_and_gradient(loss, *features(), padding())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@every_loss
def test_teacher_of_inference_mode(loss, wanted):
    """teachers made under inference_mode"""
    with torch.inference_mode():
        teacher, mask = features()[1].clone(), padding().clone()
        assert torch.equal(loss(*features(), padding()), wanted[0])
    found = value_and_gradient(loss, features()[0], teacher, mask)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@every_loss
def test_same_bits(loss, wanted):
    """the same bits on every run"""
    given = *features(), padding()
    with torch.device("meta"):  # what a loss allocates is on its features' device
        found = value_and_gradient(loss, *given)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    with torch.no_grad():
        assert torch.equal(loss(*given), wanted[0])


@every_loss
def test_meta_device_returns_shapes(loss):
    """Without data no kernel starts."""
    loss.to("meta")
    for batch in (B, 40):  # fewer samples than features, and more
        student, teacher = (x.detach().to("meta") for x in features(batch=batch))
        student.requires_grad_()
        if loss.runs_on != "torch":
            with pytest.raises(ValueError, match=r"is on meta, and .* kernels run on"):
                loss(student, teacher, padding(batch).to("meta"))
            continue
        value = loss(student, teacher, padding(batch).to("meta"))
        value.backward()
        assert value.is_meta and value.shape == ()
        assert student.grad.is_meta and student.grad.shape == student.shape


# Sentences of the README that no test here is about; random calls have all dtypes and layouts.
ELSEWHERE = {
    "takes bf16, fp16, fp32 or fp64 and sums in fp32 or better": "tests/fuzz.py",
    "contiguous or not": "tests/support/draw.py",
    "never synchronises a GPU with the host": "tests/test_dry_cuda.py",
    "except CCA with top_k or ridge=0": "tests/test_dry_cuda.py",
}


def test_every_sentence_of_the_readme_has_a_test():
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    items = readme.split("Every loss:\n\n")[1].split("\n\n")[0]
    promised = re.sub(r"\s+", " ", items).strip().rstrip(".")
    files = ("layouts", "edges", "errors", "compile", "derivatives", "distributed")
    modules = [vars(importlib.import_module(f"tests.test_{file}")) for file in files]
    kept = {
        function.__doc__
        for module in modules
        for name, function in module.items()
        if name.startswith("test_") and function.__doc__
    } | ELSEWHERE.keys()
    left = promised.replace("`", "")
    for sentence in sorted(kept, key=len, reverse=True):
        left = left.replace(sentence, "")
    assert re.fullmatch(r"([\s;,-]|and|works under)*", left), left
