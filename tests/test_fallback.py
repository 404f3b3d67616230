"""The backend "torch": references in float64, a chunk at a time."""

import weakref

import torch

from fastkd._core.fallback import by_reference


def test_an_output_without_gradient_is_freed():
    """It would keep the memory of every chunk."""
    found = []

    def losses(x):
        unused = x.exp()  # its node saves its own output
        found.append(weakref.ref(unused))
        return x.square().sum(-1)

    x = torch.randn(3, 2, requires_grad=True)
    by_reference(losses, 2, x).sum().backward()
    assert [one() for one in found] == [None]
    torch.testing.assert_close(x.grad, 2 * x)
