"""Square roots of symmetric positive semi-definite matrices, batched and differentiable.

Differentiating ``torch.linalg.eigh`` divides by λ_i − λ_j and gives NaN where eigenvalues repeat.
The roots themselves are smooth there: their derivatives are divided differences of √λ.
"""

import torch
from torch import Tensor

from fastkd._checks import check_floating, check_number
from fastkd._numerics import autocast_off, once_differentiable, working_dtype

# An eigenvalue below this many roundings of the largest one counts as zero.
ZERO_EIGENVALUE = 10.0


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

    The gradient is Q [(QᵀGQ) / (√λ_i + √λ_j)] Qᵀ: right for repeated eigenvalues. Where two
    eigenvalues are both zero the root has no derivative, and their part of the gradient is zero.
    Eigenvalues below zero (rounding) count as zero. A matrix that holds NaN or inf gives NaN for
    that matrix alone.

    Args:
        a: (*, n, n), symmetric; only its symmetric part (A + Aᵀ)/2 is used.

    Returns:
        (*, n, n), in float64 for float64, else float32.

    Raises:
        TypeError: ``a`` is not a floating tensor.
        ValueError: ``a`` is not square.

    Example:
        >>> import torch
        >>> from fastkd.linalg import sqrtm
        >>> sqrtm(torch.tensor([[4.0, 0.0], [0.0, 9.0]]))
        tensor([[2., 0.],
                [0., 3.]])
    """
    _check_square(a)
    return _MatrixRoot.apply(a, False, 0.0)


def inv_sqrtm(a: Tensor, ridge: float = 0.0) -> Tensor:
    """Symmetric inverse square roots (A + ridge·I)^{−½} of symmetric positive semi-definite A.

    The gradient is −Q [(QᵀGQ) / (√λ_i √λ_j (√λ_i + √λ_j))] Qᵀ with λ the eigenvalues of
    A + ridge·I: right for repeated eigenvalues. With ``ridge=0`` zero eigenvalues (below 10
    roundings of the largest) are left out, as in a pseudo-inverse, and the gradient is the one
    along matrices of the same rank. A matrix that holds NaN or inf gives NaN for that matrix alone.

    Args:
        a: (*, n, n), symmetric; only its symmetric part (A + Aᵀ)/2 is used.
        ridge: added to every eigenvalue, at least 0.

    Returns:
        (*, n, n), in float64 for float64, else float32.

    Raises:
        TypeError: ``a`` is not a floating tensor.
        ValueError: ``a`` is not square, or ``ridge`` is negative.

    Example:
        >>> import torch
        >>> from fastkd.linalg import inv_sqrtm
        >>> inv_sqrtm(torch.tensor([[4.0, 0.0], [0.0, 15.0]]), ridge=1.0)[1, 1]
        tensor(0.2500)
    """
    _check_square(a)
    check_number("ridge", ridge, at_least=0.0)
    return _MatrixRoot.apply(a, True, float(ridge))


def _check_square(a: Tensor) -> None:
    check_floating("a", a, min_ndim=2)
    if a.shape[-1] != a.shape[-2]:
        raise ValueError(f"a must hold square matrices (*, n, n), got shape {tuple(a.shape)}")


def _symmetric(a: Tensor) -> Tensor:
    return 0.5 * (a + a.mT)


def nonzero_eigenvalues(values: Tensor) -> Tensor:
    """Which of the ascending eigenvalues (*, n) stand above the rounding of the largest one."""
    largest = values[..., -1:].clamp_min(0)
    return values > ZERO_EIGENVALUE * torch.finfo(values.dtype).eps * largest


def eigh_finite(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(values, vectors, finite)`` of symmetric ``a``; a matrix with NaN or inf counts as zero.

    LAPACK refuses the whole batch for one NaN; ``finite`` (*) tells the caller which results to
    overwrite with NaN.
    """
    finite = a.isfinite().flatten(-2).all(-1)
    values, vectors = torch.linalg.eigh(a.masked_fill(~finite[..., None, None], 0.0))
    return values, vectors, finite


class _MatrixRoot(torch.autograd.Function):
    """Value and gradient from one eigendecomposition."""

    @staticmethod
    def forward(ctx, a, inverse, ridge):
        with autocast_off(a):
            if a.shape[-1] == 0:
                ctx.save_for_backward()
                return a.to(working_dtype(a)).clone()
            values, vectors, finite = eigh_finite(_symmetric(a.to(working_dtype(a))))
            values = values.clamp_min(0) + ridge
            if inverse:
                keep = values > 0 if ridge else nonzero_eigenvalues(values)
                roots = torch.where(keep, values, 1.0).rsqrt().masked_fill(~keep, 0.0)
            else:
                roots = values.sqrt()
            ctx.inverse = inverse
            ctx.dtype = a.dtype
            ctx.save_for_backward(values, roots, vectors, finite)
            root = (vectors * roots.unsqueeze(-2)) @ vectors.mT
            return root.masked_fill(~finite[..., None, None], torch.nan)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        with autocast_off(grad):
            if not ctx.saved_tensors:
                return grad, None, None
            values, roots, vectors, finite = ctx.saved_tensors
            inner = vectors.mT @ _symmetric(grad) @ vectors
            if ctx.inverse:
                factors = _inverse_root_differences(values, roots)
            else:
                factors = _root_differences(values, roots)
            da = vectors @ (inner * factors) @ vectors.mT
            return da.masked_fill(~finite[..., None, None], torch.nan).to(ctx.dtype), None, None


def _root_differences(values: Tensor, roots: Tensor) -> Tensor:
    """(√λ_i − √λ_j) / (λ_i − λ_j) = 1 / (√λ_i + √λ_j), zero where both are zero."""
    keep = nonzero_eigenvalues(values)
    either = keep.unsqueeze(-1) | keep.unsqueeze(-2)
    total = roots.unsqueeze(-1) + roots.unsqueeze(-2)
    return torch.where(either, total, 1.0).reciprocal().masked_fill(~either, 0.0)


def _inverse_root_differences(values: Tensor, roots: Tensor) -> Tensor:
    """Divided differences of λ^{−½}; a left-out eigenvalue is λ = 0 with value 0.

    With u = λ^{−½} both kept: −u_i² u_j² / (u_i + u_j); one kept: u_i³; none: 0.
    """
    ui, uj = roots.unsqueeze(-1), roots.unsqueeze(-2)
    keep = roots > 0
    both = keep.unsqueeze(-1) & keep.unsqueeze(-2)
    total = torch.where(both, ui + uj, 1.0)
    # As products of ratios: u⁴ would overflow float32 for small eigenvalues.
    smooth = -(ui / total) * uj * (ui * uj)
    return torch.where(both, smooth, (ui + uj) ** 3)
