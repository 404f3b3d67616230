"""How everything is measured: checks and timing, the same for every loss.

A `Case` is one row: inputs of some sizes, and the providers that do the same work on them. Every
provider's value and gradients are compared with the reference in float64 before it is timed; one
that is wrong is refused. Rounds are interleaved: each round runs every provider once, in rotating
order, and ratios are taken within a round, so a slow moment of the machine hits both sides.
Between processes and minutes the ratios still move, so a run has several passes (`passes`): the
first is `measure`, the later ones `measure_again`.
"""

import contextlib
import ctypes
import functools
import gc
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .resources import count_operations, device_work, peak_bytes

REFERENCE = "reference"

# Of the result file; `compare` refuses others.
FORMAT = 2

# A provider whose step takes longer (seconds) is left out: five rounds of it take minutes.
SLOWEST = 60.0

# Largest allowed relative error of (value, gradients) beyond twice the reference's own error in
# the same dtype. This catches wrong code; the tests hold the tight bounds.
TOLERANCE = {
    torch.float64: (1e-9, 1e-8),
    torch.float32: (1e-4, 1e-3),
    torch.float16: (5e-3, 2e-2),
    torch.bfloat16: (2e-2, 5e-2),
}


class Bound:
    """A provider with its inputs: ``forward()``, then ``backward(loss)`` to the leaves.

    ``between()`` comes before every timed step, untimed: what training changes from step to step.
    """

    def __init__(
        self,
        forward: Callable[[], Tensor],
        leaves: Sequence[Tensor],
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self.forward = forward
        self.leaves = list(leaves)
        self.between = between

    def backward(self, loss: Tensor) -> tuple[Tensor, ...]:
        """Gradients of ``loss`` with respect to the leaves."""
        return torch.autograd.grad(loss, self.leaves) if self.leaves else ()

    def step(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Forward and backward."""
        loss = self.forward()
        return loss.detach(), self.backward(loss)


class GraphBound(Bound):
    """Forward and backward captured once in a CUDA graph; a step is one replay."""

    def __init__(self, bound: Bound) -> None:
        super().__init__(bound.forward, bound.leaves, bound.between)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                bound.step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = bound.step()

    def step(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        self.graph.replay()
        return self.result


@dataclass(frozen=True)
class Provider:
    """One way to compute a case's loss.

    ``bind`` takes the inputs. ``why_not`` says why it can't run on a device, or None.
    ``own_objective`` marks a peer that minimises something else: timed, not compared.
    ``own_leaves`` marks one whose trained tensors are not the inputs': only its value is compared.
    """

    name: str
    bind: Callable[[dict[str, Any]], Bound]
    why_not: Callable[[torch.device], str | None] = lambda device: None
    own_objective: bool = False
    own_leaves: bool = False


@dataclass(frozen=True, eq=False)
class Case:
    """One row of the benchmark. The first provider is the reference.

    ``make(device=, dtype=, **sizes)`` gives the inputs; those that require grad are the leaves.
    ``bytes_moved`` and ``operations`` are the least that forward and backward can do with: each
    input read once, each gradient written once. ``check_sizes`` replaces sizes for the check
    where a float64 oracle of the full size would not fit. ``oracle`` is what runs in float64 for
    the check where autograd of the reference gives no gradient. ``sweep`` names the size that grows
    along a family of cases of equal title. ``headline`` puts the row into the README.
    """

    loss: str
    title: str
    set: str
    sizes: dict[str, int]
    dtype: torch.dtype
    make: Callable[..., dict[str, Any]]
    providers: tuple[Provider, ...]
    bytes_moved: int
    operations: int
    check_sizes: dict[str, int] = field(default_factory=dict)
    oracle: Callable[..., Tensor] | None = None
    sweep: str = ""
    headline: bool = False

    @property
    def key(self) -> str:
        """What identifies the row across result files."""
        sizes = " ".join(f"{name}{value}" for name, value in self.sizes.items())
        return f"{self.loss}/{self.title}/{sizes}/{str(self.dtype).removeprefix('torch.')}"


def call(function: Callable[..., Tensor], **options: Any) -> Callable[[dict[str, Any]], Bound]:
    """Bind ``function(**inputs, **options)``; leaves are the inputs that require grad."""

    def bind(inputs: dict[str, Any]) -> Bound:
        return Bound(lambda: function(**inputs, **options), leaves_of(inputs))

    return bind


def leaves_of(inputs: Any) -> list[Tensor]:
    """Tensors that require grad, in order, through dicts and lists."""
    return [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.requires_grad]


COMPILED = "torch.compile"


def compiled(function: Callable[..., Tensor]) -> Provider:
    """The reference under torch.compile, in several graphs where it can't be one."""

    def bind(inputs: dict[str, Any]) -> Bound:
        # Every case recompiles the same function; past a limit dynamo would stay eager, silently.
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        return call(torch.compile(function, dynamic=False))(inputs)

    return Provider(COMPILED, bind)


def why_not_by(name: str, backend: str) -> Callable[[torch.device], str | None]:
    """Says why a public function's ``backend`` can't run on a device."""
    from fastkd._core import dispatch

    def why_not(device: torch.device) -> str | None:
        x = torch.empty(0, device=device)
        if backend == "cpp":
            return dispatch.why_not_cpp(name, x)
        if name in dispatch.TRITON_FUNCTIONS and device.type != "cuda":
            return "Triton kernels need a CUDA device"
        return dispatch.why_not_triton(name, x)

    return (lambda device: None) if backend == "torch" else why_not


def fastkd_providers(function: Callable[..., Tensor], name: str) -> list[Provider]:
    """``function`` on PyTorch, in C++ rows, on Triton, and the better of the first and the last
    replayed from a CUDA graph."""
    no_triton = why_not_by(name, "triton")

    def no_graph(device: torch.device) -> str | None:
        return None if device.type == "cuda" else "CUDA graphs need a CUDA device"

    bind_torch, bind_triton, bind_cpp = (
        call(function, backend=backend) for backend in ("torch", "triton", "cpp")
    )

    def bind_graph(inputs: dict[str, Any]) -> Bound:
        device = leaves_of(inputs)[0].device
        return GraphBound((bind_torch if no_triton(device) else bind_triton)(inputs))

    return [
        Provider("fastkd torch", bind_torch),
        Provider("fastkd cpp", bind_cpp, why_not_by(name, "cpp")),
        Provider("fastkd triton", bind_triton, no_triton),
        Provider("fastkd, CUDA graph", bind_graph, no_graph),
    ]


@dataclass(frozen=True)
class Work:
    """What a loss's cases have in common: `fastkd_providers` of ``function`` beside a reference.

    ``cost(**sizes)`` gives the entries that are moved and the operations, as `Case` counts them;
    ``peers`` are other packages that do the same.
    """

    loss: str
    title: str
    make: Callable[..., dict[str, Any]]
    reference: Callable[..., Tensor]
    function: Callable[..., Tensor]
    name: str  # of the public function
    cost: Callable[..., tuple[int, int]]
    peers: tuple[Provider, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)  # of both functions

    def case(
        self, set: str, dtype: torch.dtype = torch.float32, *, compile: bool = True,
        as_called: bool = False, sweep: str = "", headline: bool = False,
        check_sizes: dict[str, int] | None = None, oracle: Callable[..., Tensor] | None = None,
        **sizes: int,
    ) -> Case:  # fmt: skip
        """A row; ``compile`` adds the reference under torch.compile.

        ``as_called``: of fastkd what users get who name no backend, in the place of each of them.
        """
        entries, operations = self.cost(**sizes)
        reference = functools.partial(self.reference, **self.options)
        function = functools.partial(self.function, **self.options)
        own = [Provider("fastkd", call(function))]
        if not as_called:
            own = fastkd_providers(function, self.name)
        return Case(
            loss=self.loss,
            title=self.title,
            set=set,
            sizes=sizes,
            dtype=dtype,
            make=self.make,
            providers=(
                Provider(REFERENCE, call(reference)),
                *([compiled(reference)] if compile else []),
                *own,
                *self.peers,
            ),
            bytes_moved=entries * dtype.itemsize,
            operations=operations,
            check_sizes=check_sizes or {},
            oracle=oracle,
            sweep=sweep,
            headline=headline,
        )


def unless_installed(package: str, name: str) -> Callable[[torch.device], str | None]:
    """Says, on any device, whether ``package``, imported as ``name``, is missing."""
    missing = f"{package} is not installed (pip install {package})"
    return lambda device: None if importlib.util.find_spec(name) else missing


def ours(loss: str, name: str) -> bool:
    """Whether a provider is fastkd's own code: timed in every pass, and judged by `compare`."""
    return name.startswith("fastkd") or (loss == "step" and name != REFERENCE)


def measure(
    case: Case, device: torch.device, budget: float = 1.5, fewest: int = 5
) -> dict[str, Any]:
    """The first pass: check, then time every provider.

    ``budget`` is the seconds of timing, ``fewest`` the rounds, however long they take.
    """
    torch.manual_seed(0)
    providers: dict[str, dict[str, Any]] = {}
    bound: dict[str, Bound] = {}
    oracle = oracle_of(case, device)
    inputs = case.make(device=device, dtype=case.dtype, **case.sizes)
    for provider in case.providers:
        reason = provider.why_not(device)
        if reason is None:
            try:
                result = check(oracle, provider)
                if "refused" not in result:
                    candidate = provider.bind(inputs)
                    reason = _too_slow(candidate, device, SLOWEST)
                    if reason is None:
                        result.update(_resources(candidate, provider, device))
                        bound[provider.name] = candidate
                if reason is None:
                    providers[provider.name] = result
                    continue
            except Exception as error:
                bound.pop(provider.name, None)
                reason = one_line(error)
                release(device)
        providers[provider.name] = {"skipped": reason}
    # The oracle's float64 copies must not sit in memory while others are timed.
    del oracle
    release(device)
    row = row_of(case, providers)
    add_pass(row, time_interleaved(bound, device, budget, fewest))
    return row


def measure_again(
    case: Case, device: torch.device, names: Sequence[str], budget: float
) -> dict[str, dict[str, Any]]:
    """A later pass: times of the providers ``names`` with newly made inputs, unchecked."""
    torch.manual_seed(0)
    inputs = case.make(device=device, dtype=case.dtype, **case.sizes)
    bound = {p.name: p.bind(inputs) for p in case.providers if p.name in names}
    return time_interleaved(bound, device, budget, fewest=3)


def row_of(case: Case, providers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A case and its providers' figures as they stand in the result file, before any timing.

    ``passes`` holds the times of each pass; a row with all of its passes drops it.
    """
    return {
        "key": case.key,
        "loss": case.loss,
        "title": case.title,
        "set": case.set,
        "sizes": case.sizes,
        "dtype": str(case.dtype).removeprefix("torch."),
        "sweep": case.sweep,
        "headline": case.headline,
        "bytes_moved": case.bytes_moved,
        "operations": case.operations,
        "providers": providers,
        "passes": [],
    }


def add_pass(row: dict[str, Any], times: dict[str, dict[str, Any]]) -> None:
    """Take one more pass into ``row``: every figure is the median of those of its passes.

    ``ratio.passes`` keeps each pass's median ratio to the reference.
    """
    row["passes"].append(times)
    for name in times:
        of_passes = [one[name] for one in row["passes"] if name in one]
        result = row["providers"][name]
        result["rounds"] = sum(one["rounds"] for one in of_passes)
        for part in ("forward", "backward", "both", "ratio"):
            if part in of_passes[0]:
                result[part] = {
                    figure: statistics.median(one[part][figure] for one in of_passes)
                    for figure in ("median", "q1", "q3")
                }
        if "ratio" in result:
            result["ratio"]["passes"] = [one["ratio"]["median"] for one in of_passes]


class Oracle:
    """The reference in float64, and every provider's distance from it."""

    def __init__(self, case: Case, device: torch.device) -> None:
        sizes = {**case.sizes, **case.check_sizes}
        self.inputs = case.make(device=device, dtype=case.dtype, **sizes)
        self.dtype = case.dtype
        bind = call(case.oracle) if case.oracle else case.providers[0].bind
        self.truth = bind(tree_map_only(Tensor, _in_float64, self.inputs)).step()
        if not all(bool(x.isfinite().all()) for x in (self.truth[0], *self.truth[1])):
            raise ValueError(f"{case.key}: the float64 oracle is not finite")
        self.reference_error = (0.0, 0.0)

    def check(self, provider: Provider) -> dict[str, Any]:
        """Relative errors of value and gradients, and ``refused`` where they are too large."""
        loss, grads = provider.bind(self.inputs).step()
        errors = (
            relative_error([loss], [self.truth[0]]),
            0.0 if provider.own_leaves else relative_error(grads, self.truth[1]),
        )
        result: dict[str, Any] = {"value_error": errors[0], "gradient_error": errors[1]}
        if provider.name == REFERENCE:
            self.reference_error = errors
            return result
        for what, error, own, tolerance in zip(
            ("value", "gradient"), errors, self.reference_error, TOLERANCE[self.dtype], strict=True
        ):
            # A reference that fails in this dtype is no excuse for others.
            if not error <= tolerance + (2 * own if own < 0.1 else 0.0):
                result["refused"] = (
                    f"{what} is off by {error:.2g} from the float64 reference "
                    f"({tolerance:.0e} allowed in {self.dtype})"
                )
                break
        return result


def oracle_of(case: Case, device: torch.device) -> Oracle | None:
    """The case's oracle, or None where every provider has its own objective."""
    return None if all(p.own_objective for p in case.providers) else Oracle(case, device)


def check(oracle: Oracle | None, provider: Provider) -> dict[str, Any]:
    """Errors of ``provider`` against the oracle, with ``refused`` where they are too large."""
    if oracle is None or provider.own_objective:
        return {"note": "its own objective: timed, not compared"}
    return oracle.check(provider)


def relative_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """‖actual − expected‖ / ‖expected‖ over all tensors together, in float64; inf for NaN."""
    if [x.shape for x in actual] != [x.shape for x in expected]:
        return math.inf
    difference = norm = 0.0
    for x, y in zip(actual, expected, strict=True):
        difference += float((x.detach().double() - y.detach().double()).square().sum())
        norm += float(y.detach().double().square().sum())
    error = math.sqrt(difference) / max(math.sqrt(norm), 1e-30) if difference else difference
    return math.inf if math.isnan(error) else error


def _in_float64(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x


def time_interleaved(
    bound: dict[str, Bound], device: torch.device, budget: float, fewest: int = 5
) -> dict[str, dict[str, Any]]:
    """Milliseconds of forward, backward and both, and the ratio to the reference, by name.

    Every figure is {median, q1, q3} over the rounds, of which there are at least ``fewest``.
    Bigger ratios are slower than the reference.
    """
    sample = _sample_cuda if device.type == "cuda" else _sample_cpu
    flush = None
    if device.type == "cuda":
        # Larger than any L2, written before each sample so that inputs come from memory.
        flush = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    inner, seconds = {}, 0.0
    for name, b in bound.items():
        once = sum(sample(b, 1, flush)) / 1e3
        # The first step of a short one says little about the next.
        if once < 0.1 or flush is not None:
            once = sum(sample(b, 1, flush)) / 1e3
        # A CPU sample of less than a millisecond would measure the clock and the scheduler.
        inner[name] = 1 if flush is not None else max(1, math.ceil(1e-3 / max(once, 1e-7)))
        seconds += once * inner[name]
    most = 50 if flush is None else 100
    rounds = max(fewest, min(most, int(budget / max(seconds, 1e-9))))
    order = list(bound)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in order}
    with _collector_off():
        for turn in range(rounds):
            start = turn % max(len(order), 1)
            for name in order[start:] + order[:start]:
                samples[name].append(sample(bound[name], inner[name], flush))
    result: dict[str, dict[str, Any]] = {}
    reference = [sum(pair) for pair in samples.get(REFERENCE, [])]
    for name, pairs in samples.items():
        both = [sum(pair) for pair in pairs]
        result[name] = {"rounds": rounds, "both": spread(both)}
        if not isinstance(bound[name], GraphBound):
            result[name]["forward"] = spread([pair[0] for pair in pairs])
            result[name]["backward"] = spread([pair[1] for pair in pairs])
        if reference:
            ratios = [x / y for x, y in zip(both, reference, strict=True)]
            result[name]["ratio"] = spread(ratios)
    return result


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def _sample_cpu(bound: Bound, inner: int, flush: Tensor | None) -> tuple[float, float]:
    """Mean milliseconds of forward and of backward over ``inner`` steps."""
    forward = backward = 0.0
    for _ in range(inner):
        bound.between()
        start = time.perf_counter()
        loss = bound.forward()
        middle = time.perf_counter()
        grads = bound.backward(loss)
        end = time.perf_counter()
        del loss, grads
        forward += middle - start
        backward += end - middle
    return forward * 1e3 / inner, backward * 1e3 / inner


def _sample_cuda(bound: Bound, inner: int, flush: Tensor | None) -> tuple[float, float]:
    """Milliseconds of forward and of backward of one step from an idle GPU with a cold cache.

    The GPU waits for the first launch, so launch costs on the host are part of the figure.
    """
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    bound.between()
    if flush is not None:
        flush.zero_()
    torch.cuda.synchronize()
    start.record()
    if isinstance(bound, GraphBound):
        bound.step()
        end.record()
        torch.cuda.synchronize()
        return 0.0, start.elapsed_time(end)
    loss = bound.forward()
    middle.record()
    grads = bound.backward(loss)
    end.record()
    torch.cuda.synchronize()
    del loss, grads
    return start.elapsed_time(middle), middle.elapsed_time(end)


def _too_slow(bound: Bound, device: torch.device, limit: float) -> str | None:
    """A reason if a step, after a first that fills caches, takes over ``limit`` seconds."""
    for _ in range(2):
        start = time.perf_counter()
        bound.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if seconds < limit:
            return None
    return f"one step takes {seconds:.0f} s, too long to time"


def _resources(bound: Bound, provider: Provider, device: torch.device) -> dict[str, Any]:
    """Peak memory and launches of a warm step, and where torch.compile had to stop."""
    graph = isinstance(bound, GraphBound)
    result: dict[str, Any] = {} if graph else {"peak_bytes": peak_bytes(bound.step, device)}
    if device.type == "cuda":
        result.update(device_work(bound.step))
    elif provider.name != COMPILED:
        result["operations_dispatched"] = count_operations(bound.step)
    if provider.name == COMPILED:
        result["graph_breaks"] = sum(torch._dynamo.utils.counters["graph_break"].values())
    return result


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def release(device: torch.device) -> None:
    """Give back memory that nobody holds any more.

    What this process keeps of the best, as large pages are, another's steps would lack: by half.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif hasattr(library := ctypes.CDLL(None), "malloc_trim"):  # of glibc
        library.malloc_trim(0)


def one_line(error: Exception) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
