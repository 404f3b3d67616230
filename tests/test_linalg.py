"""Symmetric matrix roots in inference mode and on the meta device."""

import pytest
import torch
from torch import Tensor

from fastkd.linalg.roots import inv_sqrtm, sqrtm
from tests.support.compare import relative_error


def with_eigenvalues(values: Tensor) -> Tensor:
    """Random symmetric float64 matrices with these eigenvalues (*, n)."""
    vectors = torch.linalg.qr(torch.randn(*values.shape, values.shape[-1]).double()).Q
    a = (vectors * values.double().unsqueeze(-2)) @ vectors.mT
    return (a + a.mT) / 2


@pytest.mark.parametrize("n", [3, 200])
def test_inference_mode_and_the_meta_device(n, device):
    with torch.inference_mode():
        a = with_eigenvalues(torch.rand(2, n) + 0.5).to(device)
    learnt = torch.zeros_like(a, requires_grad=True)
    for root in (sqrtm, inv_sqrtm):
        assert relative_error(root(a), root(a.clone())) == 0
        root(a + learnt).sum().backward()
        shapes = torch.empty(2, n, n, device="meta", requires_grad=True)
        root(shapes).sum().backward()
        assert shapes.grad.shape == shapes.shape
