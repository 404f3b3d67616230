"""Canonical correlation: `correlation`, the oracle.

`RANDOM` calls are held against it; `subjects` that keep every promise.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fastkd
from fastkd.linalg import cca_solver
from fastkd.losses import cca
from tests.support import oracles
from tests.support.draw import BATCH, LENGTH, REGULAR, WIDTH, Case, Draw, by_norm, poisoned, reduced
from tests.support.subject import Subject, function_of, of_module


def both(ridge: float | tuple[float, float]) -> tuple[float, float]:
    return ridge if isinstance(ridge, tuple) else (ridge, ridge)


def whitened(x: Tensor, ridge: float, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A·R⁻¹ (m, D) and upper R with RᵀR = AᵀA + ridge·I, A (m, D) centred over √(m − 1).

    By QR of A above √ridge·I, without squaring the condition number. ``weights`` of observations.
    """
    w = x.new_ones(len(x), 1) if weights is None else weights[:, None]
    a = (x - (w * x).sum(0) / w.sum()) * (w / (w.sum() - 1)).sqrt()
    stacked = torch.cat([a, ridge**0.5 * torch.eye(a.shape[1]).to(a)])
    factor = torch.linalg.qr(stacked, "reduced" if x.requires_grad else "r").R
    return torch.linalg.solve_triangular(factor, a, upper=True, left=False), factor


def correlation(student, teacher, mask, ridge, top_k, covariance=False, weights=None) -> Tensor:
    """MC3KD, eqs. 4-7, of one item: −Σ of the singular values of the whitened cross-covariance.

    ``covariance``: the cross-covariance may be rounded by its terms, as it is in float64; a small
    ridge makes much of that. Of float32 features it has digits to spare.
    """
    if mask.sum() < 2:
        return student.sum() * 0
    pairs = zip((student, teacher), both(ridge), strict=True)
    (s, root_s), (t, root_t) = (whitened(x[mask], r, weights) for x, r in pairs)
    cross = t.mT @ s  # the singular values are the same with any root of the covariances
    if covariance:
        size = (t @ root_t).abs().mT.detach() @ (s @ root_s).abs().detach()
        rounding = oracles.rounded(size, *size.shape) - size
        rounding = torch.linalg.solve_triangular(root_s.detach(), rounding, upper=True, left=False)
        cross = cross + torch.linalg.solve_triangular(root_t.detach().mT, rounding, upper=False)
    return -torch.linalg.svdvals(cross)[:top_k].sum()


def by_qr(student: Tensor, teacher: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Loss and gradient in float64 at any size, without eigenvectors of a covariance.

    Correlations up to a rounding error of float32 times (Σσ⁴)^¼ count as 0.
    """
    (s, root), (t, _) = whitened(student.double(), ridge), whitened(teacher.double(), ridge)
    u, values, vt = torch.linalg.svd(t.mT @ s, full_matrices=False)
    kept = int((values > torch.finfo(torch.float32).eps * values.norm(4)).sum())
    u, values, vt = u[:, :kept], values[:kept], vt[:kept]
    directions = torch.linalg.solve_triangular(root, vt.mT, upper=True)
    rows = t @ u - s @ (vt.mT * values)
    return -values.sum(), -rows @ directions.mT / (student.shape[0] - 1) ** 0.5


def random_cca(draw: Draw) -> Case:
    batch, m, D_s, D_t = draw.sizes(BATCH, LENGTH, WIDTH, WIDTH, most=2**15)
    batch = min(batch, 2) if draw.backend == "triton" else batch
    ridge, full = draw.pick([1e-4, 1e-4, 1e-4, 1e-2, (1e-3, 1e-1)]), draw.chance(0.2)
    top_k, reduction = draw.pick([None, None, 2]), draw.pick(["sum", "mean", "none"])
    if draw.backend == "triton":
        top_k = None
    elif full or draw.backend == "reference":  # whose derivative is NaN elsewhere
        m, ridge = 2 * max(D_s, D_t) + 3, draw.pick([ridge, 0.0])
    mask = draw.mask(batch, m)
    if m > 2 * max(D_s, D_t):
        mask[mask.sum(-1) <= max(D_s, D_t) + 1] = True
    columns = torch.ones(D_s, dtype=torch.float64)
    # A reference decomposes covariances as they are, and loses digits of nearly parallel rows, and
    # beside a feature a thousand times the others.
    kinds = REGULAR
    if draw.backend == "reference":
        kinds = tuple(kind for kind in REGULAR if kind != "parallel")
    elif draw.chance(0.3):
        columns[0] = 1000.0
    student = draw.features(batch, m, D_s, scales=(0.1, 5.0), kinds=kinds) * columns

    def oracle(student: Tensor, teacher: Tensor) -> Tensor:
        covariance = draw.dtype == torch.float64
        items = zip(student, teacher, mask, strict=True)
        losses = torch.stack([correlation(*x, ridge, top_k, covariance) for x in items])
        return reduced(losses, mask.sum(-1) > 1, reduction)

    options = {"ridge": ridge, "top_k": top_k, "reduction": reduction}
    return Case(
        functools.partial(draw.function("cca_loss"), **options),
        oracle,
        {"student": student.to(draw.dtype)},
        {"teacher": draw.features(batch, m, D_t, scales=(0.1, 5.0), kinds=kinds)},
        {"mask": draw.mask_argument(mask)},
        slope=lambda x: by_norm(x / columns),
        mask=mask,
    )


def random_cca_module(draw: Draw) -> Case:
    B, N, layers = draw.size(), draw.size(), draw.pick([1, 2])
    sizes = [(draw.size(), draw.size()) for _ in range(layers)]
    if draw.chance(0.5):
        sizes = sizes[:1] * layers
    ridge, pool = draw.pick([1e-2, (1e-3, 1e-1)]), draw.pick(["tokens", "cls", "mean"])
    top_k, mask = draw.pick([None, None, 2]), draw.mask(B, N)
    observed_rows = mask.sum() if pool == "tokens" else mask.any(1).sum()
    if observed_rows > 1 + 2 * max(map(max, sizes)):
        ridge = draw.pick([ridge, 0.0])
    module = fastkd.CCALoss(ridge, top_k=top_k, pool=pool)
    large = draw.pick([1, cca_solver.LARGE_ITEM])  # whose items a CPU solves one by one
    options = {"scales": (0.1, 5.0), "kinds": REGULAR}
    students = {f"s{i}": draw.features(B, N, s, **options) for i, (s, _) in enumerate(sizes)}
    teachers = {f"t{i}": draw.features(B, N, t, **options) for i, (_, t) in enumerate(sizes)}

    def observed(x: Tensor) -> Tensor:
        return x.flatten(0, 1) if pool == "tokens" else oracles.pooled(x, mask, pool)

    def oracle(**x: Tensor) -> Tensor:
        real = mask.flatten() if pool == "tokens" else mask.any(1)
        covariance = draw.dtype == torch.float64
        pairs = [(observed(x[s]), observed(x[t])) for s, t in zip(students, teachers, strict=True)]
        losses = [correlation(*pair, real, ridge, top_k, covariance) for pair in pairs]
        return torch.stack(losses).mean()

    def call(mask: Tensor | None, **x: Tensor) -> Tensor:
        with mock.patch.object(cca_solver, "LARGE_ITEM", large):
            return module([x[n] for n in students], [x[n] for n in teachers], mask)

    return Case(
        call,
        oracle,
        students,
        teachers,
        {"mask": draw.mask_argument(mask)},
        slope=by_norm,
        mask=mask,
        autocast=draw.chance(0.3),
    )


def random_correlations(draw: Draw) -> str | None:
    """A similarity measure, which has no gradient."""
    m, D_x, D_y = (draw.size() for _ in range(3))
    mask = draw.mask(m)
    full = mask.sum() > max(D_x, D_y) + 1
    ridge = draw.pick([1e-4, 1e-1, (1e-3, 1e-1), *[0.0] * 3 * bool(full)])
    x, y = (draw.features(m, D, scales=(0.1, 5.0), kinds=REGULAR) for D in (D_x, D_y))
    if draw.chance(0.3):  # directions of unlike variances
        x = (x * torch.logspace(0, -4, D_x)).to(draw.dtype)
    found = fastkd.canonical_correlations(
        poisoned(x, mask), poisoned(y, mask), ridge=ridge, mask=draw.mask_argument(mask)
    )
    if found.shape != (min(m - 1, D_x, D_y),):
        return f"shape {tuple(found.shape)} of {m} observations of {D_x} and {D_y} features"
    wanted = torch.zeros(0)
    if mask.sum() > 1:
        pairs = zip((x, y), both(ridge), strict=True)
        white_x, white_y = (whitened(z[mask].double(), r)[0] for z, r in pairs)
        wanted = torch.linalg.svdvals(white_x.mT @ white_y)[: len(found)]
    error = (found.double() - torch.nn.functional.pad(wanted, (0, len(found) - len(wanted)))).norm()
    allowed = 1e-10 if draw.dtype == torch.float64 else 1e-6
    return f"{error:.3g} off {wanted.tolist()}" if error > allowed else None


def hard_pair(draw: Draw, kind: str, m: int, D_s: int, D_t: int) -> tuple[Tensor, Tensor, int]:
    """Features whose covariances or correlations have a hard spectrum, and their joint rank."""
    t = draw.normal(m, D_t)
    s = draw.normal(m, D_s) + t @ draw.normal(D_t, D_s) / D_t**0.5
    rank = {"constant": 0, "doubled": (min(D_s, D_t) + 1) // 2, "low rank": D_s // 4 + 1}.get(kind)
    if kind == "independent":
        s = draw.normal(m, D_s)
    elif kind.startswith("geometric"):
        s, t = (
            x
            * torch.logspace(0, float(kind.split()[1]), x.shape[1], dtype=torch.float64)
            @ torch.linalg.qr(draw.normal(x.shape[1], x.shape[1])).Q
            for x in (s, t)
        )
    elif kind == "doubled":  # every column is there twice
        s, t = (x[:, : (x.shape[1] + 1) // 2].repeat(1, 2)[:, : x.shape[1]] for x in (s, t))
    elif kind == "low rank":
        s, t = (x[:, :rank] @ draw.normal(min(rank, x.shape[1]), x.shape[1]) for x in (s, t))
    elif kind in ("equal", "near", "equal LayerNorm"):
        s = t[:, torch.arange(D_s) % D_t] + (kind == "near") * 1e-5 * draw.normal(m, D_s)
    elif kind.startswith("small") and m > D_s + D_t:  # the smallest correlation
        n, rows = min(D_s, D_t), torch.cat((s, t), 1)
        values = torch.linspace(1, 0.1, n, dtype=torch.float64)
        values[-1] = 10 ** float(kind.split()[1])
        s, t = torch.linalg.qr(rows - rows.mean(0)).Q.mul(m**0.5).split((D_s, D_t), 1)
        t = torch.cat((s[:, :n] * values + t[:, :n] * (1 - values**2).sqrt(), t[:, n:]), 1)
        s, t = (x @ torch.linalg.qr(draw.normal(x.shape[1], x.shape[1])).Q for x in (s, t))
    elif kind == "constant":
        s = s[:1].expand(m, -1)
    elif kind == "far":
        s, t = s + 300, t + 300
    if "LayerNorm" in kind:  # the sum of a row is constant, but for rounding
        s, t = (torch.nn.functional.layer_norm(x, x.shape[1:]) for x in (s, t))
    return s, t, min(D_s, D_t) if rank is None else rank


def random_hard_cca(draw: Draw) -> str | None:
    """Items of unlike lengths, scales and ranks in one batch, against a float64 SVD of each."""
    batch, m, D_s, D_t = draw.pick([1, 1, 2, 5, 64]), *(draw.pick(HARD_SIZES) for _ in range(3))
    if draw.backend == "triton":
        batch, m, D_s, D_t = min(batch, 2), min(m, 33), min(D_s, 33), min(D_t, 33)
    # The time of the SVD.
    while batch * m * (D_s + D_t) > 2**19 or batch * max(D_s, D_t) ** 3 > 2**28:
        batch, m, D_s, D_t = max(batch // 2, 1), max(m // 2, 1), (D_s + 1) // 2, (D_t + 1) // 2
    half = draw.dtype in (torch.float16, torch.bfloat16)
    backend = "triton" if draw.backend == "triton" and draw.dtype != torch.float64 else "torch"
    ridge = 1e-4 if backend == "triton" else draw.pick([1e-4, 1e-4, 1e-4, 0.0])
    pairs, items = [], []
    for _ in range(batch):
        kind, scale = draw.pick(HARD_KINDS), 10.0 ** draw.pick([0, 0, 0, 2, -2, *HARD_SCALES])
        scale = min(max(scale, 1e-3), 1e2) if half else scale
        s, t, rank = hard_pair(draw, kind, m, D_s, D_t)
        rank = min(D_s, D_t) if half and kind == "low rank" else rank  # it is rounded
        pairs.append([(scale * x).to(draw.dtype) for x in (s, t)])
        items.append((kind, scale, rank))
        if kind == "lost":
            draw.pick(pairs[-1])[0, 0] = draw.pick([torch.nan, torch.inf])
    lengths = torch.tensor([draw.pick([m, m, 0, 1, 2, m // 2 + 1]) for _ in range(batch)])
    mask = torch.arange(m) < lengths[:, None]
    s, t = map(torch.stack, zip(*pairs, strict=True))
    padded = s.requires_grad_().masked_fill(~mask[..., None], torch.nan)
    # A CPU reads large items one by one, and those in chunks of rows.
    rows = (1 + m // draw.pick([1, 2, 3, 8])) * (1 if m > min(D_s, D_t) else batch)
    large, chunk = draw.pick([(cca_solver.LARGE_ITEM, cca_solver.CHUNK), (1, rows * (D_s + D_t))])
    with (
        mock.patch.object(cca_solver, "LARGE_ITEM", large),
        mock.patch.object(cca_solver, "CHUNK", chunk),
    ):
        losses = fastkd.cca_loss(padded, t, mask, ridge=ridge, reduction="none", backend=backend)
    (grad,) = torch.autograd.grad(losses.sum(), s)
    if grad[~mask].any():
        return "a gradient where masked"
    each = fastkd.canonical_correlations(padded, t, ridge=ridge, mask=mask) if batch < 3 else None
    for i, (real, (kind, scale, rank)) in enumerate(zip(mask, items, strict=True)):
        own = (x[i][real].detach() for x in (s, t, grad))
        wrong = wrong_item(*own, -losses[i].item(), kind, scale, rank, ridge)
        if each is not None and real.sum() > 1:
            fine = each[i].isnan() if kind == "lost" else (each[i] >= 0) & (each[i] <= 1)
            wrong = wrong or (None if fine.all() else f"correlations {each[i].tolist()}")
        if wrong:
            return f"item {i}, {kind} at {scale:.0e}, rank {rank}: {wrong}"
    return None


def wrong_item(s, t, grad, found, kind, scale, rank, ridge) -> str | None:
    """What is wrong with the value and gradient of one item's real rows."""
    half, most, D_s = s.element_size() == 2, max(min(len(s) - 1, rank), 0), s.shape[1]
    if kind == "lost":
        lost = len(s) < 2 or (torch.tensor(found).isnan() and grad.isnan().all())
        return None if lost else "a number"
    overflows = ridge == 0 and (s.dtype == torch.float16 or scale < 1e-15)
    slack = 2e-6 * D_s if rank < min(D_s, t.shape[1]) else 0
    if not (0 <= found <= most + slack and (overflows or grad.isfinite().all())):
        return f"the sum of {most} is {found}, and the gradient's norm {grad.norm()}"
    if most == 0:
        return "a gradient" if grad.any() else None
    # Where all correlations are 1 the gradient is of the size of the ridge.
    norm, lost, first = grad.double().norm(), 1e-11 / scale, (D_s + 1) // 2
    apart = (grad[:, first:] - grad[:, : D_s - first]).double().norm()
    exact = not half and not 1 < scale < 1e9  # where a ridge is little above rounding
    if kind == "doubled" and exact and apart > 1e-5 * norm + lost:
        return f"a gradient {apart / norm:.1e} of which moves equal columns apart"
    # Beside larger variances an SVD loses the ridge, and such spectra end in float32's rounding.
    if scale > (1.0 if kind in SPECTRA else 1e3) or ridge == 0:
        return None
    wanted, right = by_qr(s, t, ridge)
    if abs(found + wanted.item()) > (1e-6 if scale <= 1e2 else 2e-6) * max(1, most):
        return f"{found} for {-wanted.item()}"
    error = (grad.double() - right).norm()
    allowed = (1e-4 if kind in BLURRED else 1e-5) * right.norm() + lost
    wrong = scale <= 1e2 and not half and not error <= allowed
    return f"a gradient {error:.1e} off its {right.norm():.1e}" if wrong else None


class Twice:
    """Two processes with the same rows."""

    size = 2
    max = staticmethod(lambda rows, device: rows)
    sum = staticmethod(lambda x: 2 * x)


def random_cca_memory(draw: Draw) -> str | None:
    """Steps of a Module with a memory, against the moments of all rows with their faded weights.

    Between them are copies and calls that store nothing; a step may be computed again.
    """
    rows, D_s, D_t, ridge = draw.pick([2, 5, 9]), draw.size(), draw.size(), 1e-2
    n, processes = draw.pick([3, 20, 60, "auto"]), draw.pick([1, 1, 1, 2])
    if n == "auto" and draw.chance(0.5):  # it is less than three steps have
        D_s, D_t = draw.pick([1, 2]), 1
    module, layers = fastkd.CCALoss(ridge, memory=n, persistent=True), draw.pick([1, 1, 2])
    n = max(3 * (D_s + D_t) - processes * rows, 0) if n == "auto" else n
    large = draw.pick([1, cca_solver.LARGE_ITEM])  # whose items a CPU solves one by one
    s, t, w = draw.normal(layers, 0, D_s), draw.normal(layers, 0, D_t), draw.normal(0)

    def of_layers(student: Tensor, teacher: Tensor, loss: Callable[..., Tensor]) -> Tensor:
        return loss(list(student[:, None]), list(teacher[:, None]))

    for step in range(3):
        student, teacher = draw.normal(layers, rows, D_s), draw.normal(layers, rows, D_t)
        leaf, exact, lost = (student.clone().requires_grad_() for _ in range(3))
        if draw.chance(0.3):
            pair = lost, teacher.clone()
            draw.pick(pair).detach()[:, 0, 0] = torch.nan
            if not of_layers(*pair, module).isnan():
                return f"step {step}: a number"
            of_layers(student, teacher, module)
            of_layers(leaf, teacher, module.eval())
            module.train()
        if draw.chance(0.3):
            module, before = copy.deepcopy(module), module
            if draw.chance(0.5):
                other = functools.partial(of_layers, 2 * exact, teacher, module)
                draw.pick([module.reset_parameters, other])()  # what it has stored is replaced
                module.load_state_dict(before.state_dict())
                of_layers(exact, teacher, before)  # which goes on by itself
        call = of_layers
        if draw.chance(0.3):
            call = functools.partial(checkpoint, of_layers, use_reentrant=draw.chance(0.5))
        with (
            mock.patch.object(cca, "ranks_of", lambda *_: Twice() if processes > 1 else None),
            mock.patch.object(cca_solver, "moments_are_less", lambda *_: True),
            mock.patch.object(cca_solver, "LARGE_ITEM", large),
        ):
            loss = call(leaf, teacher, module)
            loss.backward()
        s, t = torch.cat([s, *[exact] * processes], 1), torch.cat([t, *[teacher] * processes], 1)
        w = torch.cat([w, w.new_ones(processes * rows)])
        each = [correlation(*x, w >= 0, ridge, None, weights=w) for x in zip(s, t, strict=True)]
        wanted = torch.stack(each).mean()
        wanted.backward()
        if abs(loss.item() - wanted.item()) > 1e-6 * max(1, min(D_s, D_t)):
            return f"step {step}, memory {n}: {loss.item()} for {wanted.item()}"
        right = exact.grad * w.sum() / (processes * rows)  # of the scale of a batch alone
        error = (leaf.grad - right).norm() / right.norm().clamp_min(1e-6)
        if not error <= 1e-4:
            return f"step {step}, memory {n}: a gradient {error:.1e} off"
        s, w = s.detach(), w * min(1.0, n / w.sum().item())
    return None


HARD_SIZES = (1, 2, 3, 5, 8, 16, 31, 64, 100, 200, 384, 768)
HARD_SCALES = (-30, -10, -5, 5, 10, 30)
BLURRED = ("geometric -6", "low rank")  # correlations near rounding, many of them
SPECTRA = (*BLURRED, "geometric -3", "far", "LayerNorm", "equal LayerNorm")
SPECTRA += ("small -2", "small -4", "small -6")
HARD_KINDS = ("normal", "normal", "doubled", "equal", "near", "constant", "independent", "lost")
HARD_KINDS += ("lost", *SPECTRA)
RANDOM = {
    "cca": random_cca,
    "cca_hard": random_hard_cca,
    "cca_memory": random_cca_memory,
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


def examples(backend: str) -> Iterator[tuple]:
    loss = function_of("cca_loss", backend)
    # Centred (−1, 0, 1) and (−1, 1, 0): variances 1 and 1, covariance ½.
    pair = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [3.0], [2.0]])
    yield "ridges", loss(*pair, ridge=(1.0, 3.0)), -0.5 / (2.0**0.5 * 4.0**0.5)
    if backend != "triton":
        yield "no ridge", loss(*pair, ridge=0.0), -0.5
    yield "correlations", fastkd.canonical_correlations(*pair), [0.5]


def edges(backend: str) -> Iterator[tuple]:
    loss = function_of("cca_loss", backend)
    none = [((2, 1), 3, 3)]
    if backend != "reference":
        none += [((0, 8), 3, 3), ((2, 0, 8), 3, 3), ((2, 5), 0, 3), ((2, 5), 3, 0)]
    for shape, D_s, D_t in none:
        for options in ({"reduction": "mean"}, {"top_k": 2}, {"ridge": 0.0}):
            if backend == "torch" or "reduction" in options:
                call = functools.partial(loss, teacher=torch.randn(*shape, D_t), **options)
                yield f"{D_s}, {D_t} of {shape}", call, torch.randn(*shape, D_s), 0.0, 0.0
    # Rows whose products round alike: the error of their sums grows with the features.
    rows, teacher = 300.0 + 2 * torch.randint(-1, 2, (5, 768)), torch.randn(5, 20)
    yield "equal roundings", lambda s: loss(s, teacher), rows, -4.0, None, 1e-4
    if backend == "torch":
        x, y = torch.randn(1, 2**17, 2), torch.randn(1, 2**17, 1)
        alone = functools.partial(loss, teacher=y, mask=torch.zeros(1, 2**17))
        yield "a large item without a token", alone, x, 0.0, 0.0
        x, y = torch.randn(2**14, 200) + torch.randn(2**14, 1), torch.randn(2**14, 5)
        call = functools.partial(loss, teacher=y, ridge=0.0)
        yield "chunks of a wide item", call, x, *by_qr(x, y, 0.0)
        x, y = torch.randn(2, 60, 3).double() @ torch.randn(2, 3, 8).double()
        call = functools.partial(loss, teacher=y, ridge=1e-12)
        yield "top_k above the rank", functools.partial(call, top_k=5), x, call(x, top_k=3), None
        x, y = torch.randn(2, 3, 9, 2)
        found = fastkd.canonical_correlations(x, y)
        x[1, 2, 0] = found[1] = torch.nan
        of_each = fastkd.canonical_correlations
        yield "correlations of NaN", lambda s: of_each(x, y) + 0 * s.sum(), y, found, ...
        two, rest = torch.randn(9, 2), torch.randn(9, 3)
        wanted = torch.nn.functional.pad(of_each(two, rest), (0, 1))
        three = torch.cat([two, two @ torch.tensor([[0.3], [0.7]])], 1)
        yield "of a sum of features", lambda s: of_each(s, rest) + 0 * s.sum(), three, wanted, ...


def growing() -> dict[str, tuple]:
    def calls(D_s: int, D_t: int) -> Iterator[tuple]:
        for i in range(4):
            shape = 2 + i, 7 + i
            student = torch.randn(*shape, D_s, requires_grad=True)
            yield student, torch.randn(*shape, D_t), torch.rand(shape) > 0.2

    loss = functools.partial(fastkd.cca_loss, backend="torch")
    return {
        "few features": (functools.partial(loss, ridge=0.0), calls(4, 5)),
        "few observations": (functools.partial(loss, top_k=2), calls(30, 40)),
    }


def bad() -> Iterator[tuple[str, Callable]]:
    x, y = torch.randn(2, 6, 3), torch.randn(2, 6, 4)
    short, loss = torch.randn(2, 5, 4), functools.partial(fastkd.cca_loss, x, y)
    yield r"teacher must have shape \(2, 6, 4\)", lambda: fastkd.cca_loss(x, short)
    yield "student must have at least 2 dimensions", lambda: fastkd.cca_loss(x[0, 0], y[0, 0])
    yield "ridge must be a number or a pair", lambda: loss(ridge=(1.0, 2.0, 3.0))
    for options in ({"ridge": (1.0, 0.0)}, {"top_k": 1}):
        kernels = functools.partial(loss, **options, backend="triton")
        yield "ridge=0 and top_k need eigenvectors", kernels
    yield r"y must have shape \(2, 6, 4\)", lambda: fastkd.canonical_correlations(x, short)
    of_first = functools.partial(fastkd.CCALoss(pool="cls"), [x, x[:, :5]], [y, short])
    yield r"student must have shape \(2, 6, 3\) \(the first layer's", of_first
    yield "memory must be at least 0", lambda: fastkd.CCALoss(memory=-1)
    module = fastkd.CCALoss(memory=9)
    module(x, y)
    yield "memory: it holds moments of other layers", lambda: module(x[..., :2], y)
