"""Square roots of symmetric positive semi-definite matrices, batched and differentiable.

The derivative of ``torch.linalg.eigh`` divides by λ_i − λ_j and gives NaN where eigenvalues
repeat. The roots themselves are smooth there: their derivatives are divided differences of √λ.
"""

import torch
from torch import Tensor

from fastkd._core import extension
from fastkd._core.checks import check_floating, check_number
from fastkd._core.numerics import autocast_off, cast, once_differentiable, working_dtype
from fastkd._core.products import symmetric_product

# Largest n for the extension on the CPU: beyond it LAPACK is faster on one core.
CPU_LARGEST = 96
# Largest n whose gradient is computed in float32: a product's rounding error grows with √n.
FLOAT32_LARGEST = 96


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

    Example:
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

    Example:
        >>> import torch
        >>> from fastkd.linalg.roots import inv_sqrtm
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


def _use_extension(a: Tensor) -> bool:
    """Whether the extension computes the roots, which it does for small n.

    It spreads a batch over the cores, or over a GPU, and takes a fifth to all of LAPACK's time.
    """
    if extension.runs_cuda_roots(a):
        return extension.kernel_is_faster(a.shape[-1], a.shape[:-2].numel())
    return extension.CPU and a.device.type == "cpu" and a.shape[-1] <= CPU_LARGEST


def _roots_by_eigh(a: Tensor, inverse: bool, ridge: float) -> tuple[Tensor, Tensor, Tensor]:
    """Root, eigenvalues and eigenvectors, like ``torch.ops.fastkd.sqrtm`` and ``inv_sqrtm``.

    Computed in float64, as in the extension: the error of float32 solvers is √n times that of
    rounding the matrix to float32. LAPACK rejects a batch for one NaN, so a matrix with NaN is
    decomposed as zeros and its result overwritten.
    """
    bad = ~a.isfinite().flatten(-2).all(-1)[..., None, None]
    values, vectors = torch.linalg.eigh(_symmetric(a.double()).masked_fill(bad, 0.0))
    values = (values.clamp_min(0) + ridge).masked_fill(bad[..., 0], torch.nan)
    roots = _root_values(values, inverse, ridge, a.dtype)
    root = symmetric_product(vectors * roots.unsqueeze(-2), vectors.mT).masked_fill(bad, torch.nan)
    vectors = vectors.masked_fill(bad, torch.nan)
    return cast(root, a.dtype), values.to(a.dtype), vectors.to(a.dtype)


def _root_values(values: Tensor, inverse: bool, ridge: float, dtype: torch.dtype) -> Tensor:
    """√λ or λ^{−½} of the eigenvalues; zero for eigenvalues that `inv_sqrtm` leaves out."""
    if not inverse:
        return values.sqrt()
    zero = values <= 0 if ridge else ~_nonzero(values, dtype)
    return values.masked_fill(zero, 1.0).rsqrt().masked_fill(zero, 0.0)


def _nonzero(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Which ascending eigenvalues (*, n) are above the rounding error of a matrix in ``dtype``.

    An eigenvalue below eight rounding errors of the largest counts as zero: in float32 covariances
    of low rank zeros have up to four, and a condition number of 1e6 is still regular. In float64,
    where the solver rounds too, zeros have up to twenty.
    """
    roundings = 64 if dtype == torch.float64 else 8
    return ~(values <= roundings * torch.finfo(dtype).eps * values[..., -1:])


class _MatrixRoot(torch.autograd.Function):
    """Root and gradient from one eigendecomposition."""

    @staticmethod
    def forward(ctx, a, inverse, ridge):
        with autocast_off(a):
            work = a.to(working_dtype(a))
            if not _use_extension(work):
                root, values, vectors = _roots_by_eigh(work, inverse, ridge)
            elif inverse:
                root, values, vectors = torch.ops.fastkd.inv_sqrtm(work, ridge)
            else:
                root, values, vectors = torch.ops.fastkd.sqrtm(work)
            ctx.inverse, ctx.ridge, ctx.dtype = inverse, ridge, a.dtype
            ctx.save_for_backward(values, vectors)
            return root

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        values, vectors = ctx.saved_tensors
        with autocast_off(grad):
            roots = _root_values(values, ctx.inverse, ctx.ridge, values.dtype)
            differences = _inverse_root_differences if ctx.inverse else _root_differences
            inner = differences(values, roots)
            if vectors.shape[-1] > FLOAT32_LARGEST:
                inner, vectors, grad = inner.double(), vectors.double(), grad.double()
            inner *= symmetric_product(vectors.mT @ _symmetric(grad), vectors)
            da = symmetric_product(vectors @ inner, vectors.mT)
            return da.to(ctx.dtype), None, None


def _root_differences(values: Tensor, roots: Tensor) -> Tensor:
    """(√λ_i − √λ_j) / (λ_i − λ_j) = 1 / (√λ_i + √λ_j), zero where both are zero."""
    keep = _nonzero(values, values.dtype)
    either = keep.unsqueeze(-1) | keep.unsqueeze(-2)
    total = roots.unsqueeze(-1) + roots.unsqueeze(-2)
    return torch.where(either, total, 1.0).reciprocal().masked_fill(~either, 0.0)


def _inverse_root_differences(values: Tensor, roots: Tensor) -> Tensor:
    """Divided differences of λ^{−½}; a left-out eigenvalue is λ = 0 with value 0.

    With u = λ^{−½}: −u_i² u_j² / (u_i + u_j) if both are kept, u_i³ if one is, 0 if none is.
    """
    ui, uj = roots.unsqueeze(-1), roots.unsqueeze(-2)
    keep = ~(roots <= 0)
    both = keep.unsqueeze(-1) & keep.unsqueeze(-2)
    total = torch.where(both, ui + uj, 1.0)
    # As products of ratios: u⁴ would overflow float32 for small eigenvalues.
    smooth = -(ui / total) * uj * (ui * uj)
    return torch.where(both, smooth, (ui + uj) ** 3)
