"""Degenerate inputs: the edges that each row states, and batches that every loss must survive."""

import itertools

import pytest
import torch

from tests.support.every import every_loss, features, inputs_of, padding, rows, value_and_gradient


@pytest.mark.parametrize(("file", "runs_on"), rows("edges", "reference"))
def test_edges_of_the_rows(file, runs_on, device):
    """Value and gradient: a number or tensor, None for anything finite, ... for anything.

    A reference has autograd's gradient, which may be NaN there.
    """
    with inputs_of(runs_on, device):
        for name, call, student, value, gradient, *tolerance in file.edges(runs_on):
            student = student.detach().requires_grad_()
            result = call(student)
            parts = [("value", result.detach(), value)]
            if runs_on != "reference":
                grad = torch.autograd.grad(result, student, torch.ones_like(result))[0]
                parts.append(("gradient", grad, gradient))
            for part, found, expected in parts:
                if expected is None:
                    assert found.isfinite().all(), (name, part)
                elif expected is not ...:
                    expected = torch.as_tensor(expected).to(found).expand_as(found)
                    atol = tolerance[0] if tolerance else 1e-6
                    error = f"{name}, {part}: {found}, not {expected}"
                    torch.testing.assert_close(
                        found, expected, rtol=1e-5, atol=atol, equal_nan=True, msg=error
                    )


DEGENERATE = {
    "one sample": lambda x: x[:1],
    "one token": lambda x: x[:, :1],
    "zeros": torch.zeros_like,
    "constant": lambda x: torch.full_like(x, 0.7),
    "equal samples": lambda x: x[:1].expand_as(x).contiguous(),
    "equal tokens": lambda x: x[:, :1].expand_as(x).contiguous(),
    "no sample": lambda x: x[:0],
    "no token": lambda x: x[:, :0],
    "padding alone": lambda x: x,
}


@every_loss
def test_degenerate_batches(loss):
    """gives finite gradients for degenerate batches (one token, equal rows, zero vectors)"""
    for kind, make in DEGENERATE.items():
        student, teacher = (make(x.detach()) for x in features())
        mask = padding(len(student))[:, : student.shape[1]] * (kind != "padding alone")
        value, gradient = value_and_gradient(loss, student, teacher, mask)
        gradients = [gradient, *(p.grad for p in loss.parameters() if p.grad is not None)]
        assert value.isfinite() and all(x.isfinite().all() for x in gradients), kind
        nothing = student.numel() == 0 or (kind == "padding alone" and loss.masked)
        if nothing and not loss.name.startswith("IntraClassKNNLoss"):  # which projects zeros
            assert value == 0 and not any(x.any() for x in gradients), kind
        loss.zero_grad()


@every_loss
def test_nan_in_real_data(loss):
    """returns NaN if real data holds NaN"""
    for side, bad in itertools.product((0, 1), (torch.nan, torch.inf)):
        pair = [x.detach().clone() for x in features()]
        pair[side][1, 0, 0] = bad
        assert loss(*pair, padding()).isnan(), (("student", "teacher")[side], bad)
