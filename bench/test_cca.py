"""MC3KD: canonical correlation between student and teacher layers."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastkd.losses.cca import cca_loss, cca_loss_ref

from .case import Bound, Case, Provider, Work, leaves_of, unless_installed
from .features import features

LOSS = "cca"
RIDGE = 1e-4


def make(*, pairs, m, Ds, Dt, device, dtype) -> dict[str, Tensor]:
    """``pairs`` layer pairs of m observations; the teacher explains half of the student."""
    make = functools.partial(features, device=device, dtype=torch.float32)
    teacher = make(pairs, m, Dt, seed=1)
    student = make(pairs, m, Ds, seed=0)
    shared = min(Ds, Dt)
    student[..., :shared] += teacher[..., :shared]
    return {"student": student.to(dtype).requires_grad_(), "teacher": teacher.to(dtype)}


def oracle(student: Tensor, teacher: Tensor) -> Tensor:
    """Eqs. 4-7 through Cholesky factors: the same value, with a gradient at m < D too.

    The reference differentiates ``eigh``, which fails where the ridge repeats as an eigenvalue.
    """
    m = student.shape[-2]
    student, teacher = (x - x.mean(-2, keepdim=True) for x in (student, teacher))
    roots = []
    for x in (student, teacher):
        identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        roots.append(torch.linalg.cholesky(x.mT @ x / (m - 1) + RIDGE * identity))
    cross = torch.linalg.solve_triangular(roots[1], teacher.mT @ student / (m - 1), upper=False)
    whitened = torch.linalg.solve_triangular(roots[0], cross.mT, upper=False)
    return -torch.linalg.svdvals(whitened).sum()


def cca_zoo() -> Provider:
    """cca-zoo's deep CCA loss: the sum of squared correlations, one pair at a time."""

    def bind(inputs: dict[str, Any]) -> Bound:
        from cca_zoo.deep.objectives import CCALoss

        loss = CCALoss(reg_covar=RIDGE)
        student, teacher = inputs["student"], inputs["teacher"]
        return Bound(
            lambda: torch.stack(
                [loss([t, s]) for s, t in zip(student, teacher, strict=True)]
            ).sum(),
            leaves_of(inputs),
        )

    why_not = unless_installed("cca-zoo", "cca_zoo")
    return Provider("cca-zoo", bind, why_not, own_objective=True)


def operations(m: int, Ds: int, Dt: int) -> int:
    """Products of one pair on the smaller side: covariances, Cholesky factors, gradient."""
    if m < min(Ds, Dt):
        return m**2 * (Ds + Dt) + 2 * m**2 * Ds + 10 * m**3
    covariances = m * (Ds**2 + Dt**2 + 2 * Ds * Dt)
    factors = (Ds**3 + Dt**3) // 3 + 2 * Ds * Dt * (Ds + Dt)
    return covariances + factors + 2 * m * Ds * (Ds + Dt)


def cost(*, pairs, m, Ds, Dt) -> tuple[int, int]:
    return pairs * m * (2 * Ds + Dt), pairs * operations(m, Ds, Dt)


def work(*peers: Provider) -> Callable[..., Case]:
    functions, options = (cca_loss_ref, cca_loss, "cca_loss"), {"ridge": RIDGE}
    timed = Work(LOSS, "observations", make, *functions, cost, peers, options)
    return functools.partial(timed.case, oracle=oracle)


def cases() -> Iterator[Case]:
    case = work(cca_zoo())
    yield case("cpu", headline=True, pairs=1, m=32, Ds=768, Dt=768)
    yield case("cpu", headline=True, pairs=1, m=4096, Ds=768, Dt=768)
    for d in (64, 128, 256, 512):
        yield work()("cpu", sweep="D", pairs=1, m=2048, Ds=d, Dt=d)
    yield case("bert", pairs=6, m=32, Ds=768, Dt=768)
    yield case("bert", headline=True, pairs=6, m=4096, Ds=768, Dt=768)
    yield case("bert", torch.bfloat16, pairs=6, m=4096, Ds=768, Dt=768)
    for d in (256, 512, 768):
        yield case("sweep", compile=False, sweep="D", pairs=24, m=4096, Ds=d, Dt=d)


def test_cca(measure, case, provider):
    measure(case, provider)
