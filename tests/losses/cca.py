"""Canonical correlation: `correlation`, the oracle.

`RANDOM` calls are held against it; `subjects` that keep every promise.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import fastkd
from tests.support import oracles
from tests.support.draw import REGULAR, Case, Draw, by_norm, poisoned
from tests.support.subject import Subject, of_module


def correlation(student, teacher, mask, ridge, top_k, covariance=False) -> Tensor:
    """MC3KD, eqs. 4-7, of one item: −Σ of the singular values of the whitened cross-covariance.

    ``covariance``: the cross-covariance may be rounded by its terms, as it is in float64; a small
    ridge makes much of that. Of float32 features it has digits to spare.
    """
    s, t = student[mask], teacher[mask]
    if len(s) < 2:
        return student.sum() * 0
    s, t = s - s.mean(0), t - t.mean(0)
    spread = len(s) - 1
    # The singular values are the same with any root of the covariances: here Cholesky's, from the
    # rows themselves, since a covariance has twice the digits to lose.
    white, roots = [], []
    for x, r in ((s, ridge[0]), (t, ridge[1])):
        x = x / spread**0.5
        root = torch.linalg.qr(torch.cat((x, r**0.5 * torch.eye(x.shape[1]).to(x)))).R.mT
        white.append(torch.linalg.solve_triangular(root, x.mT, upper=False))
        roots.append(root.detach())
    whitened = white[0] @ white[1].mT
    if covariance:
        size = (s.abs().mT @ t.abs()).detach() / spread
        rounding = oracles.rounded(size, *size.shape) - size
        rounding = torch.linalg.solve_triangular(roots[0], rounding, upper=False)
        whitened = whitened + torch.linalg.solve_triangular(roots[1], rounding.mT, upper=False).mT
    return -torch.linalg.svdvals(whitened)[:top_k].sum()


class Whitened(NamedTuple):
    features: Tensor  # (m, D) A·R⁻¹ with RᵀR = AᵀA + ridge·I, A centred over √(m − 1)
    factor: Tensor  # (D, D) R, upper triangular


def whitened(x: Tensor, ridge: float) -> Whitened:
    """By QR of A above √ridge·I, without squaring the condition number."""
    a = (x - x.mean(0)) / (x.shape[0] - 1) ** 0.5
    stacked = torch.cat([a, ridge**0.5 * torch.eye(a.shape[1]).double()])
    factor = torch.linalg.qr(stacked, mode="r").R
    return Whitened(torch.linalg.solve_triangular(factor, a, upper=True, left=False), factor)


def by_qr(
    student: Tensor, teacher: Tensor, ridge: float, top_k: int | None = None, zero: float = 1e-9
) -> tuple[Tensor, Tensor]:
    """Loss and gradient in float64 at any size, without eigenvectors of a covariance.

    Correlations up to ``zero`` times (Σσ⁴)^¼ count as 0.
    """
    s, t = whitened(student.double(), ridge), whitened(teacher.double(), ridge)
    u, values, vt = torch.linalg.svd(t.features.mT @ s.features, full_matrices=False)
    kept = min(top_k or len(values), int((values > zero * values.norm(4)).sum()))
    u, values, vt = u[:, :kept], values[:kept], vt[:kept]
    directions = torch.linalg.solve_triangular(s.factor, vt.mT, upper=True)
    rows = t.features @ u - s.features @ (vt.mT * values)
    return -values.sum(), -rows @ directions.mT / (student.shape[0] - 1) ** 0.5


def random_cca(draw: Draw) -> Case:
    batch, m, D_s, D_t = draw.pick([1, 2]), draw.size(), draw.size(), draw.size()
    ridge = draw.pick([1e-4, 1e-2, (1e-3, 1e-1)])
    top_k, reduction = draw.pick([None, None, 2]), draw.pick(["sum", "mean", "none"])
    kernels = draw.backend == "triton" and draw.dtype != torch.float64  # which they refuse
    top_k, backend = (None, "triton") if kernels else (top_k, "torch")
    mask = draw.mask(batch, m)
    pair = ridge if isinstance(ridge, tuple) else (ridge, ridge)
    columns = torch.ones(D_s, dtype=torch.float64)
    if draw.chance(0.3):  # one feature a thousand times the others
        columns[0] = 1000.0
    student = (draw.features(batch, m, D_s, scales=(0.1, 5.0), kinds=REGULAR) * columns).to(
        draw.dtype
    )

    def oracle(student: Tensor, teacher: Tensor) -> Tensor:
        losses = torch.stack(
            [
                correlation(*item, pair, top_k, covariance=draw.dtype == torch.float64)
                for item in zip(student, teacher, mask, strict=True)
            ]
        )
        mean = losses.sum() / (mask.sum(-1) > 1).sum().clamp(min=1)
        return {"none": losses, "sum": losses.sum(), "mean": mean}[reduction]

    return Case(
        lambda student, teacher, mask: fastkd.cca_loss(
            student, teacher, mask, ridge=ridge, top_k=top_k, reduction=reduction, backend=backend
        ),
        oracle,
        {"student": student},
        {"teacher": draw.features(batch, m, D_t, scales=(0.1, 5.0), kinds=REGULAR)},
        {"mask": draw.mask_argument(mask)},
        slope=lambda x: by_norm(x / columns),
        mask=mask,
    )


def random_cca_module(draw: Draw) -> Case:
    B, N, layers = draw.size(), draw.size(), draw.pick([1, 2])
    sizes = [(draw.size(), draw.size()) for _ in range(layers)]
    ridge, pool = draw.pick([1e-2, (1e-3, 1e-1)]), draw.pick(["tokens", "cls", "mean"])
    module, mask = fastkd.CCALoss(ridge, pool=pool), draw.mask(B, N)
    pair = ridge if isinstance(ridge, tuple) else (ridge, ridge)
    options = {"scales": (0.1, 5.0), "kinds": REGULAR}
    students = {f"s{i}": draw.features(B, N, s, **options) for i, (s, _) in enumerate(sizes)}
    teachers = {f"t{i}": draw.features(B, N, t, **options) for i, (_, t) in enumerate(sizes)}

    def observed(x: Tensor) -> Tensor:
        return x.flatten(0, 1) if pool == "tokens" else oracles.pooled(x, mask, pool)

    def oracle(**x: Tensor) -> Tensor:
        real = mask.flatten() if pool == "tokens" else mask.any(1)
        losses = [
            correlation(
                observed(x[s]),
                observed(x[t]),
                real,
                pair,
                None,
                covariance=draw.dtype == torch.float64,
            )
            for s, t in zip(students, teachers, strict=True)
        ]
        return torch.stack(losses).mean()

    return Case(
        lambda mask, **x: module([x[n] for n in students], [x[n] for n in teachers], mask),
        oracle,
        students,
        teachers,
        {"mask": draw.mask_argument(mask)},
        slope=by_norm,
        mask=mask,
    )


def random_correlations(draw: Draw) -> str | None:
    """A similarity measure, which has no gradient."""
    m, D_x, D_y = (draw.size() for _ in range(3))
    ridge, mask = draw.pick([1e-4, 1e-1, (1e-3, 1e-1)]), draw.mask(m)
    pair = ridge if isinstance(ridge, tuple) else (ridge, ridge)
    x, y = (draw.features(m, D, scales=(0.1, 5.0), kinds=REGULAR) for D in (D_x, D_y))
    found = fastkd.canonical_correlations(
        poisoned(x, mask), poisoned(y, mask), ridge=ridge, mask=draw.mask_argument(mask)
    )
    if found.shape != (min(m - 1, D_x, D_y),):
        return f"shape {tuple(found.shape)} of {m} observations of {D_x} and {D_y} features"
    wanted = -correlation(x.double(), y.double(), mask, pair, None)
    error = (found.double().sum() - wanted).abs().item()
    return f"the sum is {error:.3g} off" if error > 1e-5 * max(1, len(found)) else None


def random_hard_cca(draw: Draw) -> str | None:
    """Items of unlike lengths, scales and ranks in one batch, against a float64 SVD of each."""
    batch, m, D_s, D_t = draw.pick([1, 1, 2, 5, 64]), *(draw.pick(HARD_SIZES) for _ in range(3))
    if draw.backend == "triton":
        batch, m, D_s, D_t = min(batch, 2), min(m, 33), min(D_s, 33), min(D_t, 33)
    while batch * m * (D_s + D_t) > 2**19 or batch * min(m, D_s, D_t) ** 3 > 2**26:
        batch, m, D_s, D_t = max(batch // 2, 1), max(m // 2, 1), (D_s + 1) // 2, (D_t + 1) // 2
    half = draw.dtype in (torch.float16, torch.bfloat16)
    student, teacher, scales, ranks = [], [], [], []
    for _ in range(batch):
        kind, scale = draw.pick(HARD_KINDS), 10.0 ** draw.pick([0, 0, 0, 2, -2, *HARD_SCALES])
        scale = min(max(scale, 1e-3), 1e2) if half else scale
        t = draw.normal(m, D_t)
        s = draw.normal(m, D_s) + t @ draw.normal(D_t, D_s) / D_t**0.5
        if kind == "deficient":
            s, t = (x[:, : (x.shape[1] + 1) // 2].repeat(1, 2)[:, : x.shape[1]] for x in (s, t))
        elif kind in ("equal", "near"):
            s = t[:, torch.arange(D_s) % D_t] + (kind == "near") * 1e-5 * draw.normal(m, D_s)
        elif kind == "constant":
            s = s[:1].expand(m, -1)
        student.append((scale * s).to(draw.dtype))
        teacher.append((scale * t).to(draw.dtype))
        scales.append(scale)
        halves = (min(D_s, D_t) + 1) // 2
        ranks.append({"deficient": halves, "constant": 0}.get(kind, min(D_s, D_t)))
    lengths = torch.tensor([draw.pick([m, m, 0, 1, 2, m // 2 + 1]) for _ in range(batch)])
    mask = torch.arange(m) < lengths[:, None]
    s, t = torch.stack(student).requires_grad_(), torch.stack(teacher)
    backend = "triton" if draw.backend == "triton" and draw.dtype != torch.float64 else "torch"
    padded = s.masked_fill(~mask[..., None], torch.nan)
    losses = fastkd.cca_loss(padded, t, mask, reduction="none", backend=backend)
    (grad,) = torch.autograd.grad(losses.sum(), s)
    if not (losses.isfinite().all() and grad.isfinite().all() and not grad[~mask].any()):
        return f"not finite, or a gradient where masked: {losses.tolist()}"
    for i, real in enumerate(mask):
        most = max(min(int(real.sum()) - 1, ranks[i]), 0)
        found = -losses[i].item()
        if not 0 <= found <= most + 2e-6 * D_s:
            return f"item {i}: {found} of at most {most} correlations"
        # Beside larger variances an SVD loses the ridge; rank bounds the value.
        if scales[i] > 1e3 or most == 0:
            if most == 0 and grad[i].any():
                return f"item {i}: a gradient without correlations"
            continue
        eps = torch.finfo(torch.float32).eps
        wanted, right = by_qr(s[i][real].detach(), t[i][real], 1e-4, zero=eps)
        if abs(found + wanted.item()) > 2e-6 * max(1, most):
            return f"item {i}: {found} for {-wanted.item()}"
        error = (grad[i][real].double() - right).norm() / right.norm()
        if not half and scales[i] <= 1e2 and not error <= 1e-4:
            return f"item {i}, {most} correlations: a gradient {error:.1e} off"
    return None


HARD_SIZES = (1, 2, 3, 5, 8, 16, 31, 64, 100, 200, 384, 768)
HARD_SCALES = (-30, -10, -5, 5, 10, 30)
HARD_KINDS = ("normal", "normal", "deficient", "equal", "near", "constant")
RANDOM = {
    "cca": random_cca,
    "cca_hard": random_hard_cca,
    "cca_module": random_cca_module,
    "correlations": random_correlations,
}


def subjects(backend: str) -> Iterator[Subject]:
    def call(*given: Tensor | None) -> Tensor:
        if backend == "triton":  # all samples' tokens together: each item takes a quarter second
            given = tuple(
                x.flatten(0, 1) if isinstance(x, Tensor) and not x.is_sparse else x for x in given
            )
        return fastkd.cca_loss(*given, backend=backend)

    yield Subject("cca_loss", call)
    if backend != "torch":  # the Module chooses itself
        return
    for pool in ("tokens", "mean"):
        yield of_module(f"CCALoss {pool}", fastkd.CCALoss(ridge=0.1, pool=pool))


def random_cca_memory(draw: Draw) -> str | None:
    """Steps of a Module with a memory, against the moments of all rows with their faded weights."""
    n, rows, D_s, D_t = draw.pick([3, 20, 60]), draw.pick([2, 5, 9]), draw.size(), draw.size()
    module, ridge = fastkd.CCALoss(1e-2, memory=n), 1e-2
    s, t, w = torch.zeros(0, D_s).double(), torch.zeros(0, D_t).double(), torch.zeros(0).double()
    for step in range(3):
        student, teacher = draw.normal(rows, D_s), draw.normal(rows, D_t)
        leaf, exact = (student.clone().requires_grad_() for _ in range(2))
        loss = module(leaf[None], teacher[None])
        loss.backward()
        s_all, t_all = torch.cat([s, exact]), torch.cat([t, teacher])
        w = torch.cat([w, torch.ones(rows).double()])
        white = []
        for x in (s_all, t_all):
            x = (x - (w[:, None] * x).sum(0) / w.sum()) * (w / (w.sum() - 1)).sqrt()[:, None]
            root = torch.linalg.qr(torch.cat((x, ridge**0.5 * torch.eye(x.shape[1]).to(x)))).R.mT
            white.append(torch.linalg.solve_triangular(root, x.mT, upper=False))
        wanted = -torch.linalg.svdvals(white[0] @ white[1].mT).sum()
        wanted.backward()
        if abs(loss.item() - wanted.item()) > 1e-6 * max(1, min(D_s, D_t)):
            return f"step {step}, memory {n}: {loss.item()} for {wanted.item()}"
        right = exact.grad * w.sum() / rows  # of the scale of a batch alone
        error = (leaf.grad - right).norm() / right.norm().clamp_min(1e-6)
        if not error <= 1e-4:
            return f"step {step}, memory {n}: a gradient {error:.1e} off"
        s, t, w = s_all.detach(), t_all, w * min(1.0, n / w.sum().item())
    return None


RANDOM["cca_memory"] = random_cca_memory
