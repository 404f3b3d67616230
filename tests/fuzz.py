"""Random calls of every public function and Module against the oracles of `tests/losses`.

    python -m tests.fuzz --seconds 600          # as `make fuzz`; --only knn --seed 7: from there on

Each case is drawn from its seed alone (`tests.support.draw`): sizes, dtypes, backends, masks with
NaN behind them, layouts, options set at construction or later, autocast, and how work is divided.
Value and every gradient are compared in float64, the gradient taken in one of `WAYS`; in some calls
a real number is NaN.

An error is allowed up to the table of `tests/support/compare.py`, relative to the larger of the
value and of the terms it is made of, plus ten times what rounding the inputs once would change.
"""

import argparse
import contextlib
import functools
import inspect
import itertools
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastkd._core.registry import LOSSES
from tests.losses import FILES
from tests.support import oracles
from tests.support.compare import TOLERANCE
from tests.support.draw import Case, Draw, poisoned
from tests.support.gathered import gathered

# Rounding errors of float64 are measurable in float64 only if they are larger. Those of float32
# keep their size: a gradient isn't linear in them where they are as large as an eps.
MAGNIFIED = {torch.float32: 1, torch.float64: 16}
# How a gradient is taken: in one backward pass, from a retained graph after the receiver of the
# first gradient overwrote it, as one of a batch, in a recomputed forward pass, of views.
WAYS = ("once", "once", "retained", "batched", "checkpoint", "views")
# Calls that failed once: name, backend and seed. Every run begins with them. A seed draws the same
# call only as long as the generator stays, so the fault's own test goes to the loss's rows.
FOUND: tuple[tuple[str, str, int], ...] = ()


FUNCTIONS: dict[str, Callable[[Draw], Case | str | None]] = {
    name: function for file in FILES.values() for name, function in file.RANDOM.items()
} | {"gathered": gathered}
TORCH_ONLY = {name for loss in LOSSES if not loss.triton for name in FILES[loss.name].RANDOM}
TORCH_ONLY.add("gathered")  # what is gathered doesn't depend on the kernels
CPP = {name for loss in LOSSES if loss.cpp for name in FILES[loss.name].RANDOM}
CPP.add("gathered")
# Functions without C++ kernels.
CPP -= {"cayley", "projection"}


def backends(name: str) -> tuple[str, ...]:
    """Backends of a function; those that `Draw.function` calls have a reference too."""
    triton = () if name in TORCH_ONLY else ("triton",)
    reference = ("reference",) if "draw.function(" in inspect.getsource(FUNCTIONS[name]) else ()
    cpp = ("cpp",) if name in CPP else ()
    return ("torch", *triton, *cpp, *reference)


def failure(name: str, backend: str, seed: int) -> str | None:
    """Description of this case's failure, or None."""
    torch.manual_seed(seed)
    draw = Draw(seed, backend)
    with draw.dividing():
        case = FUNCTIONS[name](draw)
        if not isinstance(case, Case):
            return case
        found = _wrong(case, draw)
    return f"{found}\n{described(case)}" if found else None


def described(case: Case) -> str:
    """The call's tensors and options."""
    shown = {n: x for n, x in (case.learning | case.given | case.options).items() if x is not None}
    tensors = (
        f"{n} {tuple(x.shape)} {x.dtype} {x.stride()}" if isinstance(x, Tensor) else f"{n}={x!r}"
        for n, x in shown.items()
    )
    module = "" if case.module is None else f"{case.module!r}: "
    return f"  {module}{', '.join(tensors)}"


def _lost(case: Case, draw: Draw) -> bool:
    """Make one real number NaN or infinite, in some calls; only the value is compared then."""
    if draw.backend == "reference" or not (case.of_rows and draw.chance(0.1)):
        return False
    features = case.learning | case.given
    x = features[draw.pick([name for name in features if name in (case.masked or features)])]
    if not x.numel():
        return False
    place = [draw.random.randrange(size) for size in x.shape]
    if case.mask is not None:
        real = case.mask.nonzero().tolist()
        if not real:
            return False
        place[: case.mask.dim()] = draw.pick(real)
    x[tuple(place)] = draw.pick([torch.nan, torch.inf])
    return True


def _wrong(case: Case, draw: Draw) -> str | None:
    """What is wrong with the call's value or gradients."""
    lost = _lost(case, draw)
    parameters = dict(case.module.named_parameters()) if case.module is not None else {}
    dtypes = {n: x.dtype for n, x in (case.learning | parameters | case.given).items()}

    exact = {n: x.detach().double() for n, x in (case.learning | parameters | case.given).items()}
    kept = draw.pick(case.learning)
    frozen = {n for n in case.learning if n != kept and draw.chance(0.2)}
    learning = [n for n in (*case.learning, *parameters) if n not in frozen and not lost]
    working = torch.float64 if torch.float64 in dtypes.values() else torch.float32
    wanted = dtypes[case.like] if case.like else working

    def upstream_of(value: Tensor) -> Tensor:
        """An upstream gradient, in float16 sometimes with a loss scale."""
        scale = draw.pick([1.0, 1024.0]) if draw.dtype == torch.float16 else 1.0
        return (scale * draw.normal(*value.shape)).to(wanted).double()

    (expected, *expected_grads), upstream = _evaluate(case.oracle, exact, learning, upstream_of)
    features = case.learning | case.given
    masked = case.masked or features
    poison = None if draw.backend == "reference" else case.mask
    passed = {n: poisoned(x, poison) if n in masked else x.detach() for n, x in features.items()}
    leaves = {n: passed[n].requires_grad_() for n in learning if n in features}
    way = "once" if draw.backend == "reference" else draw.pick(WAYS)
    passed |= case.options
    if way == "views":
        passed |= {n: x.view_as(x) for n, x in leaves.items()}
    context = torch.autocast("cpu", torch.bfloat16) if case.autocast else contextlib.nullcontext()
    with context:
        if way == "checkpoint":
            actual = checkpoint(case.call, use_reentrant=False, **passed)
        else:
            actual = case.call(**passed)
    if actual.dtype != wanted:
        return f"the result is {actual.dtype}, not {wanted}"
    if actual.shape != expected.shape:
        return f"the result has shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    if draw.backend == "reference" and not actual.requires_grad:  # nothing is compared
        actual = actual + sum(x.sum() * 0 for x in leaves.values())
    inputs = [*leaves.values(), *parameters.values()]
    gradients = _gradients(actual, inputs, draw.laid_out(upstream.to(actual.dtype)), way)
    if not lost and bool((expected.isinf() & actual.isnan()).any()):
        return "the result is NaN where the truth is infinite"
    pairs = list(zip([actual, *gradients], [expected, *expected_grads], strict=True))
    if case.unsure is not None:
        pairs = [
            tuple(x if x is None else x.masked_fill(_unsure(x, case.unsure), 0) for x in pair)
            for pair in pairs
        ]
    names = ["the result", *(f"the gradient of {n} ({way})" for n in learning)]
    kinds = [wanted, *(dtypes[n] for n in learning)]
    products = case.products or working

    def wrong(scales: list[float], noise: list[float]) -> str | None:
        for what, (a, e), scale, rounding, dtype in zip(
            names, pairs, scales, noise, kinds, strict=True
        ):
            found = _difference(a, e, scale, case.roundings * rounding, dtype, products)
            if found:
                return f"{what}: {found}"
        return None

    nothing = [0.0] * len(pairs)
    if wrong(nothing, nothing) is None:  # to know what more is allowed takes five evaluations
        return None
    scales = [case.scale, *_gradient_scales(case, exact, learning, upstream, draw)]
    base = [expected, *expected_grads]
    noise = functools.partial(_sensitivity, case, exact, base, learning, upstream, working, draw)
    return wrong(scales, noise(3)) and wrong(scales, noise(30))  # few may miss what a rounding does


def _gradients(
    value: Tensor, inputs: list[Tensor], upstream: Tensor, way: str
) -> list[Tensor | None]:
    """Gradients of the inputs, taken in one of `WAYS`."""
    if not inputs:
        return []
    grad = functools.partial(torch.autograd.grad, value, inputs, allow_unused=True)
    if way == "batched":
        batch = torch.stack([upstream * 2, upstream])
        return [None if g is None else g[1] for g in grad(batch, is_grads_batched=True)]
    if way == "retained":
        for g in grad(upstream, retain_graph=True):
            if g is not None:
                g.fill_(torch.nan)
    return list(grad(upstream))


def _unsure(x: Tensor, rows: Tensor) -> Tensor:
    """Mask of the entries of ``x`` that may be infinite."""
    return rows.any() if x.dim() == 0 else rows[(...,) + (None,) * (x.dim() - rows.dim())]


def _evaluate(
    oracle: Callable[..., Tensor],
    inputs: dict[str, Tensor],
    learning: list[str],
    upstream: Tensor | Callable[[Tensor], Tensor],
) -> tuple[list[Tensor], Tensor]:
    """The oracle's value and gradients, and the upstream gradient, which may need the value."""
    leaves = {n: x.clone().requires_grad_(n in learning) for n, x in inputs.items()}
    value = oracle(**leaves)
    upstream = upstream if isinstance(upstream, Tensor) else upstream(value)
    wanted = [leaves[n] for n in learning]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if value.requires_grad:
        found = torch.autograd.grad(value, wanted, upstream, allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for g, x in zip(found, wanted, strict=True)]
    return [value.detach(), *zeros], upstream


def _sensitivity(
    case: Case,
    exact: dict[str, Tensor],
    base: list[Tensor],
    learning: list[str],
    upstream: Tensor,
    working: torch.dtype,
    draw: Draw,
    trials: int,
) -> list[float]:
    """Largest change of value and gradients from rounding every input once, of some trials."""
    moved = [0.0] * len(base)
    step = MAGNIFIED[working] * torch.finfo(working).eps
    for _ in range(trials):
        near = {n: x * (1 + step * (draw.uniform(*x.shape) - 0.5)) for n, x in exact.items()}
        with mock.patch.object(oracles, "ROUNDED_ROWS", step):
            other, _ = _evaluate(case.oracle, near, learning, upstream)
        moved = [
            max(m, _size((a - b).nan_to_num()) / MAGNIFIED[working])
            for m, a, b in zip(moved, base, other, strict=True)
        ]
    return moved


def _gradient_scales(
    case: Case, exact: dict[str, Tensor], learning: list[str], upstream: Tensor, draw: Draw
) -> list[float]:
    """Norms of the gradients for an unrelated teacher: near its own teacher they cancel."""
    if case.scale == 0:
        return [0.0] * len(learning)
    if case.slope is not None or case.parameter_slopes is not None:
        size = case.scale * max(_size(upstream), 1e-30)
        slopes = {} if case.parameter_slopes is None else case.parameter_slopes(**exact)
        if case.slope is not None:
            slopes |= {n: _size(case.slope(exact[n])) for n in case.learning if n in learning}
        return [size * slopes.get(n, 1.0) for n in learning]
    strangers = {
        n: draw.normal(*x.shape) * (x.nan_to_num().abs().mean() if x.numel() else 1)
        if n in case.given
        else x
        for n, x in exact.items()
    }
    (_, *gradients), _ = _evaluate(case.oracle, strangers, learning, upstream)
    return [_size(g) for g in gradients]


def _size(x: Tensor) -> float:
    found = x.double().norm().item()
    return found if found < float("inf") else 0.0


def _difference(
    actual: Tensor | None,
    expected: Tensor,
    scale: float,
    rounding: float,
    dtype: torch.dtype,
    working: torch.dtype,
) -> str | None:
    if actual is None:
        return None if _size(expected) == 0 else "missing"
    actual = actual.detach().double()
    largest = torch.finfo(dtype).max
    comparable = expected.abs() < largest / 8
    if not bool((actual[~expected.isfinite()].isfinite() == 0).all()):
        return "finite where the truth is not"
    actual, expected = actual[comparable], expected[comparable]
    if not bool(actual.isfinite().all()):
        return "not finite where the truth is"
    error = _size(actual - expected)
    # Subnormal values have no promised accuracy.
    floor = torch.finfo(dtype).tiny * max(actual.numel(), 1) ** 0.5
    allowed = TOLERANCE[dtype] * _size(expected) + TOLERANCE[working] * scale
    allowed += rounding + floor
    return None if error <= allowed else f"error {error:.3g} > {allowed:.3g}"


def cases(only: str | None, first: int) -> Iterator[tuple[str, str, int]]:
    """Endless cases of every function and backend, with seeds from ``first``."""
    for seed in itertools.count(first):
        for name in FUNCTIONS:
            if only is None or name == only:
                for backend in backends(name):
                    yield name, backend, seed


def checked(name: str, backend: str, seed: int) -> str | None:
    """`failure`, with an exception reported as a failure."""
    try:
        return failure(name, backend, seed)
    except Exception:
        return traceback.format_exc(limit=-3)


def pasted(name: str, backend: str, seed: int) -> str:
    """A command that makes the call again."""
    call = f"print(__import__('tests.fuzz').fuzz.failure({name!r}, {backend!r}, {seed}))"
    return f'TRITON_INTERPRET=1 python -c "{call}"'


def main() -> None:
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long")
    parser.add_argument("--seed", type=int, default=0, help="the first; others follow")
    parser.add_argument("--only", choices=FUNCTIONS)
    options = parser.parse_args()
    deadline, count, failures = time.monotonic() + options.seconds, 0, 0
    for name, backend, seed in cases(options.only, options.seed):
        if time.monotonic() > deadline:
            break
        count += 1
        found = checked(name, backend, seed)
        if found:
            failures += 1
            print(pasted(name, backend, seed), found, sep="\n", flush=True)
    print(f"{count} cases, {failures} failures")
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    main()
