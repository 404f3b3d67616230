"""Roots of symmetric matrices: `root`, the oracle.

`RANDOM` calls are held against it; no loss, so no `subjects`.
"""

import torch
from torch import Tensor

import fastkd
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
    n, inverse = draw.pick([1, 2, 5, 16, 33, 63, 64, 65, 100, 129]), draw.chance(0.5)
    ridge = draw.pick([0.0, 1e-3]) if inverse else 0.0
    condition = draw.pick([1.0, 1e2, 1e4, 1e6])
    basis = torch.linalg.qr(draw.normal(n, n)).Q
    spectrum = torch.logspace(0, -torch.tensor(condition).log10(), n, dtype=torch.float64)
    a = ((basis * spectrum) @ basis.mT).to(draw.pick([torch.float32, torch.float64]))
    options = {"ridge": ridge} if inverse else {}
    double = a.dtype == torch.float64  # float32 input is computed in float64 as well
    return Case(
        lambda a: (fastkd.inv_sqrtm if inverse else fastkd.sqrtm)(a, **options),
        lambda a: root(oracles.decomposed(a) if double else a, inverse, ridge),
        {"a": draw.laid_out(a)},
        roundings=ROUNDINGS if double else 0.1,
    )


def random_hard_roots(draw: Draw) -> str | None:
    """Matrices of unlike ranks and scales, subnormal ones too, against float64 eigenvectors."""
    n, batch = draw.pick([1, 2, 3, 17, 64, 96, 97, 200]), draw.pick([1, 2, 7])
    dtype = draw.pick([torch.float32, torch.float64])
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
    for found, power in ((fastkd.sqrtm(a), 0.5), (fastkd.inv_sqrtm(a), -0.5)):
        for i, x in enumerate(a.double()):
            size = x.abs().max()
            if size < torch.finfo(torch.float64).tiny:
                wanted = torch.zeros_like(x)
            else:
                values, vectors = torch.linalg.eigh(x / size)
                roundings = 64 if dtype == torch.float64 else 8
                kept = values > roundings * torch.finfo(dtype).eps * values[-1]
                wanted = (vectors * torch.where(kept, values, 1.0).pow(power) * kept) @ vectors.mT
                wanted = wanted * size**power
            error = (found[i].double() - wanted).norm() / wanted.norm().clamp_min(1e-300)
            if not error <= (1e-5 if dtype == torch.float32 else 1e-11):
                return f"power {power} of {n}, {dtype}, largest {size:.1e}: {error:.1e} off"
    return None


RANDOM = {"roots": random_roots, "roots_hard": random_hard_roots}
