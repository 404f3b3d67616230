"""Square roots of symmetric positive semi-definite matrices, batched and differentiable.

The derivative of ``torch.linalg.eigh`` divides by λ_i − λ_j and gives NaN where eigenvalues
repeat. The roots themselves are smooth there: their derivatives are divided differences of √λ.
"""

import torch
from torch import Tensor

from fastkd._core import check, extension
from fastkd._core.numerics import autocast_off, cast, once_differentiable, working_dtype
from fastkd._core.products import symmetric_product


def sqrtm_ref(a: Tensor) -> Tensor:
    """A^{½} = Q diag(√λ) Qᵀ with A = Q diag(λ) Qᵀ; see `sqrtm`."""
    values, vectors = torch.linalg.eigh(_symmetric(a.to(working_dtype(a))))
    return (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT


def inv_sqrtm_ref(a: Tensor, ridge: float = 0.0) -> Tensor:
    """(A + ridge·I)^{−½} = Q diag((λ + ridge)^{−½}) Qᵀ of a regular matrix; see `inv_sqrtm`."""
    values, vectors = torch.linalg.eigh(_symmetric(a.to(working_dtype(a))))
    return (vectors * (values + ridge).rsqrt().unsqueeze(-2)) @ vectors.mT


def sqrtm(a: Tensor) -> Tensor:
    """Symmetric square roots A^{½} = Q diag(√λ) Qᵀ of symmetric positive semi-definite matrices.

    The gradient is Q [(QᵀGQ) / (√λ_i + √λ_j)] Qᵀ, also for repeated eigenvalues. Where two
    eigenvalues are both zero the root has no derivative, and their part of the gradient is zero.
    Eigenvalues below zero (rounding error) count as zero. NaN or inf in a matrix gives NaN for that
    matrix alone.

    Args:
        a: (*, n, n), symmetric; only its symmetric part (A + Aᵀ)/2 is used. PyTorch decomposes
            large matrices on a GPU, and waits for it.

    Returns:
        (*, n, n), in float64 for float64, else float32.

    Raises:
        TypeError: ``a`` is not a floating tensor.
        ValueError: ``a`` is not square.

    >>> import torch
    >>> from fastkd.linalg.roots import sqrtm
    >>> sqrtm(torch.tensor([[4.0, 0.0], [0.0, 9.0]]))
    tensor([[2., 0.],
            [0., 3.]])
    """
    _check_square(a)
    return _MatrixRoot.apply(a, False, 0.0)


def inv_sqrtm(a: Tensor, ridge: float = 0.0) -> Tensor:
    """Symmetric inverse square roots (A + ridge·I)^{−½} of symmetric positive semi-definite A.

    The gradient is −Q [(QᵀGQ) / (√λ_i √λ_j (√λ_i + √λ_j))] Qᵀ with λ the eigenvalues of
    A + ridge·I, also for repeated eigenvalues. With ``ridge=0`` zero eigenvalues (below 8 rounding
    errors of the largest, 64 in float64) are left out, as in a pseudo-inverse, and the gradient is
    the one along matrices of the same rank. NaN or inf in a matrix gives NaN for that matrix alone.

    Args:
        a: (*, n, n), symmetric; only its symmetric part (A + Aᵀ)/2 is used. PyTorch decomposes
            large matrices on a GPU, and waits for it.
        ridge: added to every eigenvalue, at least 0.

    Returns:
        (*, n, n), in float64 for float64, else float32.

    Raises:
        TypeError: ``a`` is not a floating tensor.
        ValueError: ``a`` is not square, or ``ridge`` is negative.

    >>> import torch
    >>> from fastkd.linalg.roots import inv_sqrtm
    >>> inv_sqrtm(torch.tensor([[4.0, 0.0], [0.0, 15.0]]), ridge=1.0)[1, 1]
    tensor(0.2500)
    """
    _check_square(a)
    check.number("ridge", ridge, at_least=0.0)
    return _MatrixRoot.apply(a, True, float(ridge))


def _check_square(a: Tensor) -> None:
    check.floating("a", a, min_ndim=2)
    if a.shape[-1] != a.shape[-2]:
        raise ValueError(f"a must hold square matrices (*, n, n), got shape {tuple(a.shape)}")


def _symmetric(a: Tensor) -> Tensor:
    return 0.5 * (a + a.mT)


def symmetric_roots(
    a: Tensor, zero: Tensor | None = None, digits: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """A^{½} and A^{−½} (*, n, n) and rank (*) of symmetric positive semi-definite A.

    Eigenvalues up to ``zero`` times the largest count as zero; by default up to 64 rounding errors
    of float64, or 8 of float32. So does a matrix below the least normal number. The extension's
    operator computes all sizes, in float64. On a GPU it waits where matrices are too large for the
    kernel and ``zero`` is given. ``digits``: by products of `fastkd.kernels.cca`, once imported.
    """
    if extension.CPU:
        return torch.ops.fastkd.symmetric_roots(a, zero, digits)
    values, vectors = eigh(a.double())
    fraction = values.new_tensor(_zero_of(a.dtype)) if zero is None else zero
    least = values[..., -1:] * (fraction.unsqueeze(-1) if fraction.dim() else fraction)
    dropped = values <= least.clamp_min(torch.finfo(values.dtype).tiny)
    root = values.masked_fill(dropped, 0.0).sqrt()
    inverse = root.reciprocal().masked_fill(dropped, 0.0)
    root, inverse = (
        (vectors * x.unsqueeze(-2) @ vectors.mT).to(working_dtype(a)) for x in (root, inverse)
    )
    return root, inverse, (~dropped).sum(-1)


def eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of float64 matrices; NaN stays in its matrix.

    On a GPU it waits where matrices are too large for the extension's kernel.
    """
    if extension.CPU:
        return torch.ops.fastkd.eigh(a)
    # LAPACK rejects a batch for one NaN or inf: such matrices become zero.
    poison = (a - a).sum((-2, -1), keepdim=True)
    values, vectors = torch.linalg.eigh(_symmetric(a).masked_fill(poison.isnan(), 0.0))
    return values + poison.squeeze(-1), vectors + poison


def _zero_of(dtype: torch.dtype, ridge: float = 0.0) -> float:
    """Fraction of the largest eigenvalue up to which others are rounding errors of ``dtype``.

    In float32 covariances of low rank zeros have up to four, and a condition number of 1e6 is still
    regular. In float64, where the solver rounds too, zeros have up to twenty. With a ridge
    only the solver's rounding makes zeros.
    """
    wide = dtype == torch.float64 or ridge > 0
    return (64 if wide else 8) * torch.finfo(torch.float64 if wide else torch.float32).eps


class _MatrixRoot(torch.autograd.Function):
    """Computed in float64: the error of float32 solvers is √n times that of rounding the matrix."""

    @staticmethod
    def forward(ctx, a, inverse, ridge):
        with autocast_off(a):
            ctx.inverse, ctx.ridge = inverse, ridge
            ctx.save_for_backward(a)
            zero = a.new_full((), _zero_of(a.dtype, ridge), dtype=torch.float64)
            return cast(symmetric_roots(_with_ridge(a, ridge), zero)[inverse], working_dtype(a))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (a,) = ctx.saved_tensors
        with autocast_off(grad):
            values, vectors = eigh(_with_ridge(a, ctx.ridge))
            zero = values <= _zero_of(a.dtype, ctx.ridge) * values[..., -1:]
            inner = _differences(values.masked_fill(zero, 0.0).sqrt(), ctx.inverse)
            inner *= symmetric_product(vectors.mT @ _symmetric(grad.double()), vectors)
            return symmetric_product(vectors @ inner, vectors.mT).to(a.dtype), None, None


def _with_ridge(a: Tensor, ridge: float) -> Tensor:
    """A + ridge·I in float64."""
    wide = a.double()
    if ridge:
        wide = wide.clone() if wide is a else wide
        wide.diagonal(dim1=-2, dim2=-1).add_(ridge)
    return wide


def _differences(roots: Tensor, inverse: bool) -> Tensor:
    """Divided differences of √λ, or of u = 1/√λ, which is 0 where λ is.

    (√λ_i − √λ_j) / (λ_i − λ_j) = 1 / (√λ_i + √λ_j), zero where both are zero. Those of u are this
    times −u_i u_j, or times u_i² where λ_j is zero.
    """
    total = roots.unsqueeze(-1) + roots.unsqueeze(-2)
    found = torch.where(total == 0, 0.0, total.reciprocal())
    if not inverse:
        return found
    u = torch.where(roots == 0, 0.0, roots.reciprocal())
    ui, uj = u.unsqueeze(-1), u.unsqueeze(-2)
    product = ui * uj
    return found.mul_(torch.where(product == 0, ui.square() + uj.square(), -product))
