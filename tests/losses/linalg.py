"""Roots of symmetric matrices: `root`, the oracle.

`RANDOM` calls are held against it; no loss, so no `subjects`.
"""

import functools
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

import fastkd
from fastkd import functional
from fastkd._core import extension
from tests.support import oracles
from tests.support.draw import ROUNDINGS, Case, Draw


def root(a: Tensor, inverse: bool, ridge: float) -> Tensor:
    """A^½ or (A + ridge·I)^-½ with the gradient of `docs/math.md` by divided differences."""
    return _Root.apply((a + a.mT) / 2, inverse, ridge)


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, inverse, ridge):
        values, vectors = torch.linalg.eigh(a)
        values = values.clamp_min(0) + ridge
        ctx.save_for_backward(values.sqrt(), vectors)
        ctx.inverse = inverse
        f = values.rsqrt() if inverse else values.sqrt()
        return (vectors * f[..., None, :]) @ vectors.mT

    @staticmethod
    def backward(ctx, grad):
        r, vectors = ctx.saved_tensors
        sums = r[..., :, None] + r[..., None, :]
        scale = torch.where(sums == 0, 0, 1 / torch.where(sums == 0, 1, sums))
        if ctx.inverse:
            scale = -scale / (r[..., :, None] * r[..., None, :])
        inner = vectors.mT @ ((grad + grad.mT) / 2) @ vectors
        return vectors @ (inner * scale) @ vectors.mT, None, None


def random_roots(draw: Draw) -> Case:
    n, inverse = draw.pick([1, 2, 5, 16, 33, 63, 64, 65, 96, 97, 100, 128, 129]), draw.chance(0.5)
    if draw.chance(0.03):
        n = 300
    reference, name = draw.backend == "reference", "inv_sqrtm" if inverse else "sqrtm"
    ridge = draw.pick([0.0, 1e-3]) if inverse else 0.0
    condition = draw.pick([1e2, 1e4] if reference else [1.0, 1e2, 1e4, 1e6])
    basis = torch.eye(n).double() if draw.chance(0.1) else torch.linalg.qr(draw.normal(n, n)).Q
    spectrum = torch.logspace(0, -torch.tensor(condition).log10(), n, dtype=torch.float64)
    if draw.chance(0.2) and not reference:  # whose gradient is then NaN
        spectrum = torch.arange(n).remainder(3) + 1.0
    a, skew = (basis * spectrum) @ basis.mT, draw.normal(n, n) * draw.pick([0.0, 0.1])
    a = (a + skew - skew.mT).to(draw.dtype)
    if draw.dtype in (torch.float16, torch.bfloat16):  # rounding leaves it positive definite
        a = a + 0.5 * torch.eye(n, dtype=a.dtype)
    options = {"ridge": ridge} if inverse else {}
    double = a.dtype == torch.float64  # other input is computed in float64 as well
    built = draw.pick([extension.CPU, False])  # without it PyTorch computes them

    def call(a: Tensor) -> Tensor:
        with mock.patch.object(extension, "CPU", built):
            return (draw.function(name) if reference else getattr(fastkd, name))(a, **options)

    return Case(
        call,
        lambda a: root(oracles.decomposed(a) if double else a, inverse, ridge),
        {"a": draw.laid_out(a)},
        roundings=ROUNDINGS if double else 0.1,
        autocast=draw.chance(0.2) and not reference,
    )


def random_hard_roots(draw: Draw) -> str | None:
    """Matrices of unlike ranks and scales, subnormal ones too, against float64 eigenvectors."""
    n, batch = draw.pick([1, 2, 3, 17, 64, 96, 97, 200]), draw.pick([1, 2, 7])
    dtype, lost = draw.pick([torch.float32, torch.float64]), draw.random.randrange(2 * batch)
    matrices = []
    for _ in range(batch):
        rank = draw.pick([0, 1, (n + 1) // 2, n, n])
        values = draw.pick([torch.ones(n), torch.linspace(1, 0.1, n), 1 + 1e-9 * torch.arange(n)])
        values = values.double() * (torch.arange(n) < rank)
        basis = torch.linalg.qr(draw.normal(n, n)).Q
        scale = 10.0 ** draw.pick([0, 0, -30, 30, *((-310, 300) if dtype == torch.float64 else ())])
        matrices.append((basis * values) @ basis.mT * scale)
    a = torch.stack(matrices)
    a = ((a + a.mT) / 2).to(dtype)
    a[lost : lost + 1, 0, n - 1] = draw.pick([torch.nan, torch.inf])
    a.requires_grad_()
    for found, power in ((fastkd.sqrtm(a), 0.5), (fastkd.inv_sqrtm(a), -0.5)):
        (grad,) = torch.autograd.grad(found.sum(), a)
        for i, x in enumerate(a.detach().double()):
            if i == lost:
                if not (found[i].isnan().all() and grad[i].isnan().all()):
                    return f"power {power} of {n}, {dtype}: NaN is a number"
                continue
            size = x.abs().max()
            if 1e-3 < size < 1e3 and not grad[i].norm() <= 100 * n:  # eigenvalues 0.1 to 1, and 0
                return f"power {power} of {n}, {dtype}: the gradient's norm is {grad[i].norm():.1e}"
            if size < torch.finfo(torch.float64).tiny:
                wanted = torch.zeros_like(x)
            else:
                values, vectors = torch.linalg.eigh(x / size)
                roundings = 64 if dtype == torch.float64 else 8
                kept = values > roundings * torch.finfo(dtype).eps * values[-1]
                wanted = (vectors * torch.where(kept, values, 1.0).pow(power) * kept) @ vectors.mT
                wanted = wanted * size**power
            error = (found[i].double() - wanted).norm() / wanted.norm().clamp_min(1e-300)
            if not error <= (1e-5 if dtype == torch.float32 else 1e-12):
                return f"power {power} of {n}, {dtype}, largest {size:.1e}: {error:.1e} off"
    return None


RANDOM = {"roots": random_roots, "roots_hard": random_hard_roots}


def edges(backend: str) -> Iterator[tuple]:
    for name in ("sqrtm", "inv_sqrtm"):
        call = getattr(functional, name + "_ref" * (backend == "reference"))
        for shape in ((0, 3, 3), (2, 0, 0), (2, 0, 4, 4)):
            yield f"{name} of {shape}", call, torch.zeros(shape), 0.0, 0.0
    singular, gradient = torch.tensor([4.0, 0.0]).diag(), torch.tensor([[0.25, 0.5], [0.5, 0.0]])
    root = functional.sqrtm_ref if backend == "reference" else fastkd.sqrtm
    yield "a singular root", root, singular, torch.tensor([2.0, 0.0]).diag(), gradient
    if backend != "reference":
        found, gradient = torch.tensor([0.5, 0.0]).diag(), torch.tensor([[-0.5, 1.0], [1.0, 0.0]])
        yield "a singular inverse root", fastkd.inv_sqrtm, singular, found, gradient / 8
    for name, low in (("a negative eigenvalue", -1e-6), ("bfloat16", 0.25)):
        a, wanted = torch.tensor([4.0, low]).diag(), torch.tensor([2.0, max(low, 0) ** 0.5]).diag()
        yield name, root, a.bfloat16() if name == "bfloat16" else a, wanted, None
    # A ridge below float32's rounding is no rounding error.
    call, wanted = functools.partial(call, ridge=1e-8), torch.tensor([1.0, 1e4]).diag()
    gradient = torch.tensor([[-0.5, -1e4 / 1.0001], [-1e4 / 1.0001, -5e11]])
    yield "a small ridge", call, torch.tensor([1.0, 0.0]).diag(), wanted, gradient


def growing() -> dict[str, tuple]:
    def calls(*sizes: tuple[int, int]) -> list[tuple]:
        x = [torch.randn(batch, n, 2 * n).double() for batch, n in sizes]
        return [((y @ y.mT / y.shape[-1]).requires_grad_(),) for y in x]

    def roots(x: Tensor) -> Tensor:
        return fastkd.sqrtm(x).sum() + fastkd.inv_sqrtm(x, ridge=0.1).sum()

    small = calls((2, 4), (3, 5), (4, 12), (19, 57))
    return {"roots": (roots, small), "beyond the extension": (roots, calls((2, 130), (3, 140)))}


def bad() -> Iterator[tuple[str, Callable]]:
    yield r"a must hold square matrices .* \(2, 3\)", lambda: fastkd.sqrtm(torch.ones(2, 3))
    yield "a must have at least 2 dimensions", lambda: fastkd.inv_sqrtm(torch.ones(3))
    yield "a must be bfloat16", lambda: fastkd.sqrtm(torch.ones(2, 2).long())
