"""Cayley matrices (I + Q)(I − Q)⁻¹ and their products with rows."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastkd._core.numerics import autocast_off, cast, once_differentiable, upcast
from fastkd._core.plans import planned


@planned
def inverse_by_products(skew: Tensor, guess: list[Tensor]) -> Tensor:
    """(I − Q)⁻¹ of (*, n, n), starting from guesses (B₁, n, n), (B₂, n, n), … or from I."""
    from fastkd.kernels.cayley import cayley_inverse

    with autocast_off(skew):
        return cayley_inverse(skew.reshape(-1, *skew.shape[-2:]), guess).view(skew.shape)


class Cayley(torch.autograd.Function):
    """W = 2(I − Q)⁻¹ − I: one inverse forward, unless given, and two products backward.

    A given inverse was computed by the Triton kernels, which compute the two products as well.
    """

    @staticmethod
    def forward(ctx, skew, inverse):
        ctx.by_kernels = inverse is not None
        with autocast_off(skew):
            if inverse is None:
                q = upcast(skew)
                inverse = _inverse(torch.eye(q.shape[-1], dtype=q.dtype, device=q.device) - q)
            w = 2 * inverse
            w.diagonal(dim1=-2, dim2=-1).sub_(1)
        ctx.save_for_backward(w)
        return cast(w, skew.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        if ctx.by_kernels:
            from fastkd.kernels.cayley import cayley_gradient

            n = w.shape[-1]
            dq = cayley_gradient(w.reshape(-1, n, n), grad.to(w.dtype).reshape(-1, n, n))
            return dq.view(grad.shape).to(grad.dtype), None
        with autocast_off(grad):
            identity = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
            half = ((w + identity) / 2).mT  # (I − Q)⁻ᵀ
            return (2 * (half @ grad.to(w.dtype) @ half)).to(grad.dtype), None


def _lu_factor(a: Tensor) -> tuple[Tensor, Tensor]:
    """LU factors and pivots of (*, n, n).

    The _ex form does not read the error flag, which would synchronise with a GPU. On the CPU one
    matrix at a time: after torch.set_num_threads MKL's results are wrong for batches from n = 384.
    """
    if a.device.type != "cpu" or a.dim() == 2 or a.numel() == 0:
        return torch.linalg.lu_factor_ex(a)[:2]
    factors = [torch.linalg.lu_factor_ex(matrix)[:2] for matrix in a.flatten(0, -3)]
    lu, pivots = (torch.stack(parts) for parts in zip(*factors, strict=True))
    return lu.view(a.shape), pivots.view(a.shape[:-1])


def _inverse(a: Tensor) -> Tensor:
    """Inverses of (*, n, n), with the precautions of `_lu_factor`."""
    if a.device.type != "cpu" or a.dim() == 2:
        return torch.linalg.inv_ex(a).inverse
    return _inverse_one_by_one(a.flatten(0, -3)).view(a.shape)


# An operator, since a loop in Python would fix the number of matrices in a compiled graph.
@torch.library.custom_op("fastkd::inverse_one_by_one", mutates_args=())
def _inverse_one_by_one(a: Tensor) -> Tensor:
    inverse = torch.empty_like(a, memory_format=torch.contiguous_format)
    for matrix, out in zip(a, inverse, strict=True):
        out.copy_(torch.linalg.inv_ex(matrix).inverse)
    return inverse


@_inverse_one_by_one.register_fake
def _(a):
    return torch.empty_like(a, memory_format=torch.contiguous_format)


def _solve(factors: tuple[Tensor, ...], x: Tensor, adjoint: bool = False) -> Tensor:
    """x (I − Q)⁻¹, or x (I − Q)⁻ᵀ if ``adjoint``, from LU factors and pivots or the inverse."""
    if len(factors) == 1:
        return _times(x, factors[0].mT if adjoint else factors[0])
    return torch.linalg.lu_solve(*factors, x, left=False, adjoint=adjoint)


def _times(a: Tensor, b: Tensor) -> Tensor:
    """a b of two matrices or two batches of matrices; @ needs six operations to choose."""
    return a.mm(b) if a.dim() == 2 else a.bmm(b)


class RowsTimesCayley(torch.autograd.Function):
    """x W₁ W₂ … for few rows x, without forming any W.

    x W = x(I + Q)(I − Q)⁻¹ = 2z − x with z = x(I − Q)⁻¹: a product with the inverse where it is
    given, else one factorisation and a solve with as many right-hand sides as there are rows.
    The backward pass solves once more, p = g(I − Q)⁻ᵀ, and ∂L/∂Q = 2zᵀp has the rank of x. Several
    projections run as one batch, stacked in here, so that autograd stores and runs nothing for it.
    """

    # *tensors, because the compiler omits ctx where a call has as many arguments as forward has
    # parameters.
    @staticmethod
    def forward(ctx, count, *tensors):
        # The `stacked` inverses or None, the rows (R, in_dim) of ``count`` projections, and their
        # matrices (L, n, n).
        inverse, *projections = tensors
        rows, raw = projections[:count], projections[count:]
        n = raw[0].shape[-1]
        x = stacked(rows, n)  # (S, R, n), or (R, n) of one side
        with autocast_off(x):
            factors: tuple[Tensor, ...] = (inverse,)
            if inverse is None:
                identity = torch.eye(n, dtype=x.dtype, device=x.device)
                factors = _lu_factor(identity - skew_part(stacked(raw, n)))
            solutions = []
            for of_layer in _of_layers(factors, count):
                solutions.append(_solve(of_layer, x))
                x = torch.lerp(x, solutions[-1], 2)
        ctx.save_for_backward(*factors, *solutions)
        ctx.factors, ctx.in_dims = len(factors), [x.shape[-1] for x in rows]
        return x if count == 1 else x.unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        saved = ctx.saved_tensors  # read once: under checkpointing a second read fails
        factors, solutions = saved[: ctx.factors], saved[ctx.factors :]
        count = len(grads)
        grad = grads[0] if count == 1 else torch.stack(grads)
        with autocast_off(grad):
            outer = []
            for of_layer, z in reversed([*zip(_of_layers(factors, count), solutions, strict=True)]):
                p = _solve(of_layer, grad, adjoint=True)
                outer.append(_times(z.mT, p))  # (S, n, n), or (n, n)
                grad = torch.lerp(grad, p, 2)
            products = torch.stack(outer[::-1], dim=-3)
            draw = products - products.mT
        drows, draws = ([grad], [draw]) if count == 1 else (grad.unbind(), draw.unbind())
        return None, None, *map(first_columns, drows, ctx.in_dims), *draws


def stacked(tensors: Sequence[Tensor], n: int) -> Tensor:
    """Tensors (..., D) padded with zeros to n columns: (S, ..., n), or (..., n) of a single one."""
    tensors = [x if x.shape[-1] == n else F.pad(x, (0, n - x.shape[-1])) for x in tensors]
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors)


def first_columns(x: Tensor, columns: int) -> Tensor:
    """The first columns of (R, n); ``x`` itself, without a view, if these are all."""
    return x if x.shape[-1] == columns else x[:, :columns]


def _of_layers(factors: tuple[Tensor, ...], count: int) -> list[tuple[Tensor, ...]]:
    """Factors of each layer, for `_solve`; the layer dimension is second if ``count`` > 1."""
    return list(zip(*(part.unbind(int(count > 1)) for part in factors), strict=True))


def skew_part(raw: Tensor) -> Tensor:
    return (raw - raw.mT) / 2
