"""References in float64, a chunk of groups at a time."""

import pytest
import torch

import fastkd
from fastkd._core import fallback
from tests.support.compare import relative_error, value_and_grad


@pytest.mark.parametrize("groups", [0, 1, 7, 16])
def test_chunks_change_nothing(groups, monkeypatch):
    """Losses, and gradients of two tensors of different dtypes; the third is not there."""

    def losses(x, y, absent):
        assert x.dtype == y.dtype == torch.float64 and absent is None
        sizes.append(len(x))
        return (x * y).sum(-1).sin()

    x = torch.randn(groups, 3, requires_grad=True)
    y = torch.randn(groups, 3).half().requires_grad_()
    found = []
    for chunks in (1, 4):
        sizes: list[int] = []
        monkeypatch.setattr(fallback, "_chunks", lambda *_, n=chunks: n)
        value = fallback.by_reference(losses, 1, x, y, None)
        found.append((value, *torch.autograd.grad(value, (x, y), torch.arange(groups) + 1.0)))
        assert sum(sizes) == groups and len(sizes) == chunks
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][0].dtype == torch.float32 and found[0][2].dtype == torch.float16


def test_a_device_without_float64_takes_float32(monkeypatch):
    student, teacher = torch.randn(2, 4, 9, 8)
    exact = value_and_grad(fastkd.relation_loss, student, teacher, backend="torch")
    monkeypatch.setattr(fallback, "NO_FLOAT64", ("cpu",))
    found = value_and_grad(fastkd.relation_loss, student, teacher, backend="torch")
    errors = [relative_error(a, b) for a, b in zip(found, exact, strict=True)]
    assert 0 < max(errors) < 1e-5
