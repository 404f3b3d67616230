"""Square roots of symmetric positive semi-definite matrices, batched and differentiable.

The derivative of ``torch.linalg.eigh`` divides by λ_i − λ_j and gives NaN where eigenvalues
repeat. The roots themselves are smooth there: their derivatives are divided differences of √λ.
"""

import torch
from torch import Tensor

from fastkd._core import check, extension
from fastkd._core.numerics import (
    autocast_off,
    cast,
    once_differentiable,
    values_readable,
    working_dtype,
)
from fastkd._core.operator import operator
from fastkd._core.products import symmetric_product

# Largest n for the extension on the CPU: beyond it LAPACK is faster on one core.
CPU_LARGEST = 96
# Singular values below this fraction of the largest are solved for again: their squares have lost
# four digits or more.
SMALL_ROOT = 1e-2

# Coefficients (a, b, c) of `polar`'s steps: polynomials of degree 5 that stretch small values most
# while the others stay below 2, with a margin of 1% for rounding, then those that gather large
# values at 1 (Amsel et al. 2025, "The Polar Express"). The last two send the others to 0.
POLAR_STEPS = [
    (7.5657, -17.8052, 10.7894),
    *[(4.1199, -2.8752, 0.5167)] * 7,
    (2.7983, -1.7271, 0.3015),
    (2.1328, -1.5145, 0.4028),
    (1.879, -1.2542, 0.3752),
    *[(0.0, 2.5, -1.5)] * 2,
]


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
            large matrices on a GPU (from torch 2.12 on n above 64), and waits for it.

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
            large matrices on a GPU (from torch 2.12 on n above 64), and waits for it.
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


def _roots_shapes(a: Tensor, may_wait: bool) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape[:-1]), torch.empty_like(a, memory_format=torch.contiguous_format)


@operator(_roots_shapes)
def symmetric_roots(a: Tensor, may_wait: bool) -> tuple[Tensor, Tensor]:
    """Roots r = √λ (*, n), ascending, and vectors Q of float64 matrices A = Q diag(λ) Qᵀ.

    The root is Q diag(r) Qᵀ, the inverse root Q diag(1/r) Qᵀ. `sqrtm`, `inv_sqrtm` and the
    solver of `cca_loss` have theirs from here. Small matrices are decomposed by the extension,
    which spreads a batch over the cores, or over a GPU, and never waits; others by PyTorch, which
    waits for a GPU. With ``may_wait`` PyTorch decomposes all matrices that it is faster at.
    """
    if _use_extension(a, may_wait):
        values, vectors = torch.ops.fastkd.eigh(a)
        return values.clamp_min(0).sqrt(), vectors
    bad = _not_finite(a)
    values, vectors = torch.linalg.eigh(a.masked_fill(bad, 0.0))
    roots = values.clamp_min(0).sqrt().masked_fill(bad[..., 0], torch.nan)
    return roots, vectors.masked_fill_(bad, torch.nan)


def _not_finite(a: Tensor) -> Tensor:
    """Matrices (*, 1, 1) with NaN or inf: LAPACK rejects a batch for one, so zeros replace it."""
    return ~a.isfinite().flatten(-2).all(-1)[..., None, None]


def _use_extension(a: Tensor, may_wait: bool) -> bool:
    """Whether the extension decomposes the matrices: where it takes less time than PyTorch."""
    if extension.runs_cuda_roots(a):
        return extension.kernel_is_faster(a.shape[-1], a.shape[:-2].numel(), may_wait)
    return extension.CPU and a.device.type == "cpu" and a.shape[-1] <= CPU_LARGEST


def singular(m: Tensor, zero: float) -> tuple[Tensor, Tensor, Tensor]:
    """``(U, σ, V)``, σ descending, of M = U diag(σ) Vᵀ by the roots of MᵀM, or of MMᵀ if smaller.

    In half the time of LAPACK's SVD, which is used for tensors whose values can't be read. Squares
    lose the digits of small singular values. The vectors of the small values span an accurate
    space: M times these vectors, without the parts along the large left vectors, is solved again.
    Vectors of values up to ``zero`` are left as they are.
    """
    if m.shape[-2] < m.shape[-1]:
        left, values, right = singular(m.mT, zero)
        return right, values, left
    if not values_readable(m):
        return _svd(m)
    roots, right = _descending(symmetric_product(m.mT, m), may_wait=True)
    left = m @ right
    values = torch.linalg.vector_norm(left, dim=-2)
    left /= values.clamp_min(torch.finfo(m.dtype).tiny).unsqueeze(-2)
    low = _number_of_small(roots)
    if low and bool((values[..., -low:] > zero).any()):
        large, span = left[..., :-low], right[..., -low:]
        rest = m @ span
        rest -= large @ (large.mT @ rest)
        left[..., -low:], values[..., -low:], turn = singular(rest, zero)
        right[..., -low:] = span @ turn
    return left, values, right


def left_roots(sides: list[Tensor], refine: bool) -> list[tuple[Tensor, Tensor]]:
    """Singular values, descending, and left vectors of each A (*, m, D) by the roots of AAᵀ.

    With ``refine``, as in `singular`. Without, no value is read and values up to √rounding are 0:
    float64 has enough digits for a loss of float32 features.
    """
    if refine and not values_readable(sides[0]):
        return [(values, left) for left, values, _ in map(_svd, sides)]
    roots, left = _descending(torch.cat([symmetric_product(a, a.mT) for a in sides]), refine)
    rounding = roots.shape[-1] * torch.finfo(torch.float64).eps
    if not refine:
        roots = roots.masked_fill(roots <= rounding**0.5 * roots[..., :1], 0.0)
    elif low := _number_of_small(roots):
        spans = left[..., -low:]
        rests = [span.mT @ a for span, a in zip(spans.chunk(len(sides)), sides, strict=True)]
        norms = torch.cat([torch.linalg.vector_norm(x, dim=-1) for x in rests])
        if bool((norms > rounding * roots[..., :1]).any()):
            again = left_roots(rests, refine)
            norms = torch.cat([values for values, _ in again])
            left[..., -low:] = spans @ torch.cat([turn for _, turn in again])
        roots[..., -low:] = norms
    return list(zip(roots.chunk(len(sides)), left.chunk(len(sides)), strict=True))


def _svd(m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    bad = _not_finite(m)
    left, values, right = torch.linalg.svd(m.masked_fill(bad, 0.0), full_matrices=False)
    values = values.masked_fill_(bad[..., 0], torch.nan)
    return left.masked_fill_(bad, torch.nan), values, right.mT


def _descending(square: Tensor, may_wait: bool) -> tuple[Tensor, Tensor]:
    roots, vectors = symmetric_roots(square, may_wait)
    return roots.flip(-1), vectors.flip(-1)


def _number_of_small(roots: Tensor) -> int:
    """Roots, of any matrix of the batch, that have lost digits."""
    return int((roots < SMALL_ROOT * roots[..., :1]).sum(-1).max()) if roots.numel() else 0


def polar(m: Tensor) -> Tensor:
    """Orthogonal polar factor UVᵀ of M = U diag(σ) Vᵀ with σ ≤ 1.1, by products alone.

    Singular values above 1e-6 are mapped to 1, those between to between 0 and 1, and those below
    1e-7, float32's rounding error, to 0, up to 1e-5.
    X ← X·(a·I + b·XᵀX + c·(XᵀX)²) maps σ to aσ + bσ³ + cσ⁵.
    """
    if m.shape[-2] < m.shape[-1]:
        return polar(m.mT).mT
    x = m
    for a, b, c in POLAR_STEPS:
        gram = x.mT @ x
        inner = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        inner.diagonal(dim1=-2, dim2=-1).add_(a)
        x = x @ inner
    return x


def _root_values(roots: Tensor, inverse: bool, ridge: float, dtype: torch.dtype) -> Tensor:
    """√λ, or (λ + ridge)^{−½}; zero for eigenvalues that `inv_sqrtm` leaves out."""
    if not inverse:
        return roots
    values = roots.square() + ridge
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
    """Root and gradient from one decomposition.

    Computed in float64: the error of float32 solvers is √n times that of rounding the matrix.
    """

    @staticmethod
    def forward(ctx, a, inverse, ridge):
        with autocast_off(a):
            dtype = working_dtype(a)
            roots, vectors = symmetric_roots(_symmetric(a.double()), True)
            ctx.inverse, ctx.ridge, ctx.dtypes = inverse, ridge, (dtype, a.dtype)
            ctx.save_for_backward(roots, vectors)
            factors = _root_values(roots, inverse, ridge, dtype)
            root = symmetric_product(vectors * factors.unsqueeze(-2), vectors.mT)
            return cast(root, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        roots, vectors = ctx.saved_tensors
        with autocast_off(grad):
            dtype, result = ctx.dtypes
            factors = _root_values(roots, ctx.inverse, ctx.ridge, dtype)
            if ctx.inverse:
                inner = _inverse_root_differences(factors)
            else:
                inner = _root_differences(roots, _nonzero(roots.square(), dtype))
            inner *= symmetric_product(vectors.mT @ _symmetric(grad.double()), vectors)
            return symmetric_product(vectors @ inner, vectors.mT).to(result), None, None


def _root_differences(roots: Tensor, keep: Tensor) -> Tensor:
    """(√λ_i − √λ_j) / (λ_i − λ_j) = 1 / (√λ_i + √λ_j), zero where neither is kept."""
    either = keep.unsqueeze(-1) | keep.unsqueeze(-2)
    total = roots.unsqueeze(-1) + roots.unsqueeze(-2)
    return torch.where(either, total, 1.0).reciprocal().masked_fill(~either, 0.0)


def _inverse_root_differences(roots: Tensor) -> Tensor:
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
