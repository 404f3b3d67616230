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


def test_the_last_backward_pass_scales_the_saved_gradient_in_place():
    """Another tensor of the features' size would double the peak memory."""
    x = torch.randn(3, 2, requires_grad=True)
    loss = 2 * by_reference(lambda x: x.square().sum(-1), 2, x).sum()
    node = loss.grad_fn.next_functions[0][0].next_functions[0][0]
    saved = node.saved_tensors[0].data_ptr()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (last,) = torch.autograd.grad(loss, x)
    assert last.data_ptr() == saved != first.data_ptr()
    torch.testing.assert_close(first, 4 * x.detach())
    torch.testing.assert_close(last, first)
