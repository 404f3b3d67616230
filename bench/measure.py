"""Measurements of a case: errors against float64, times, peak memory, hardware limits."""

import contextlib
import ctypes
import functools
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map_only

from .case import REFERENCE, Bound, Case, Provider, call

# Largest allowed relative error of (value, gradients) beyond twice the reference's own error in
# the same dtype. This catches wrong code; the tests hold the tight bounds.
TOLERANCE = {
    torch.float64: (1e-9, 1e-8),
    torch.float32: (1e-4, 1e-3),
    torch.float16: (5e-3, 2e-2),
    torch.bfloat16: (2e-2, 5e-2),
}


class Oracle:
    """The reference in float64, and every provider's relative error against it."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(0)
        self.inputs = case.make(
            device=device, dtype=case.dtype, **{**case.sizes, **case.check_sizes}
        )
        self.dtype = case.dtype
        self.own_error = (0.0, 0.0)  # the reference's
        if case.providers[0].own_objective:
            return
        bind = call(case.oracle) if case.oracle else case.providers[0].bind
        self.truth = bind(tree_map_only(Tensor, _in_float64, self.inputs)).step()
        if not all(bool(x.isfinite().all()) for x in (self.truth[0], *self.truth[1])):
            raise ValueError(f"{case.key}: the float64 oracle is not finite")
        self.own_error = self._errors(case.providers[0])

    def check(self, provider: Provider) -> tuple[dict[str, float], str | None]:
        """Errors of value and gradients, and the reason to refuse the provider, or None."""
        if provider.own_objective:
            provider.bind(self.inputs).step()
            return {}, None
        errors = self.own_error if provider.name == REFERENCE else self._errors(provider)
        found = {"value_error": errors[0], "gradient_error": errors[1]}
        for what, error, own, tolerance in zip(
            ("value", "gradient"), errors, self.own_error, TOLERANCE[self.dtype], strict=True
        ):
            # A reference that fails in this dtype excuses only itself.
            allowed = tolerance + (2 * own if own < 0.1 else 0.0)
            if provider.name != REFERENCE and not error <= allowed:
                return found, (
                    f"{what} is off by {error:.2g} from the float64 reference "
                    f"({tolerance:.0e} allowed in {self.dtype})"
                )
        return found, None

    def _errors(self, provider: Provider) -> tuple[float, float]:
        loss, grads = provider.bind(self.inputs).step()
        gradient = 0.0 if provider.own_leaves else relative_error(grads, self.truth[1])
        return relative_error([loss], [self.truth[0]]), gradient


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


def interleaved(
    bound: dict[str, Bound], device: torch.device, seconds: float, least: int
) -> dict[str, list[float]]:
    """Seconds of one step, by provider and round: a round runs each once, in rotating order.

    There are at least ``least`` rounds, and ``seconds`` of timing for each provider on average.
    """
    flush = None
    if device.type == "cuda":
        # Larger than any L2 cache; written before each step, so that inputs come from memory.
        flush = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    steps, total = {}, 0.0
    for name, b in bound.items():
        once = seconds_of(b, device)
        if once < 0.1:  # the first step of a short provider is not representative
            once = seconds_of(b, device)
        # A CPU sample of less than a millisecond would measure the clock and the scheduler.
        steps[name] = 1 if flush is not None else max(1, math.ceil(1e-3 / max(once, 1e-7)))
        total += once * steps[name]
    rounds = max(least, min(100, int(seconds * len(bound) / max(total, 1e-9))))
    order = list(bound)
    samples: dict[str, list[float]] = {name: [] for name in order}
    with _collector_off():
        for turn in range(rounds):
            start = turn % len(order)
            for name in order[start:] + order[:start]:
                samples[name].append(_sample(bound[name], steps[name], flush))
    return samples


def seconds_of(bound: Bound, device: torch.device) -> float:
    """Seconds of one step."""
    start = time.perf_counter()
    bound.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _sample(bound: Bound, steps: int, flush: Tensor | None) -> float:
    """Mean seconds of ``steps`` steps; on CUDA from an idle GPU with a cold cache, by events."""
    if flush is not None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        bound.between()
        flush.zero_()
        torch.cuda.synchronize()
        # The GPU waits for the first launch, so launch costs on the host are part of the figure.
        start.record()
        bound.step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    total = 0.0
    for _ in range(steps):
        bound.between()
        begin = time.perf_counter()
        bound.step()
        total += time.perf_counter() - begin
    return total / steps


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) < 2:
        return dict.fromkeys(("q1", "median", "q3"), values[0])
    return dict(
        zip(
            ("q1", "median", "q3"),
            statistics.quantiles(values, n=4, method="inclusive"),
            strict=True,
        )
    )


def peak_bytes(step: Callable[[], Any], device: torch.device) -> int:
    """Peak of the bytes that ``step`` allocates at once.

    The step's results count. On CUDA this is the caching allocator's figure, on the CPU the sum of
    the profiler's allocation events; memory inside BLAS libraries is in neither.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = step()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated(device) - before
    # Some builds of torch print a line for every start and stop of the profiler.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
        result = step()
        del result
    events = [
        (event.start_ns(), event.nbytes())
        for event in trace.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    held = peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        held += size
        peak = max(peak, held)
    return peak


@functools.cache
def limits(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> dict[str, float]:
    """Copy bandwidth (bytes/s), "copy", and matrix rate (operations/s) of each dtype."""
    size = (2**30 if device.type == "cuda" else 2**28) // 4
    source, target = torch.ones(size, device=device), torch.empty(size, device=device)
    found = {"copy": 2 * 4 * size / _best_seconds(lambda: target.copy_(source), device)}
    for dtype in dtypes:
        found[str(dtype).removeprefix("torch.")] = _matrix_rate(device, dtype)
    for half in {"bfloat16", "float16"} & set(found):
        if device.type == "cpu":
            # Converted to float32 they multiply as fast; many processors have nothing faster.
            found[half] = max(found[half], _matrix_rate(device, torch.float32))
    if device.type == "cuda" and "float32" in found:
        # Three bfloat16 products give nearly float32 accuracy on tensor cores.
        found["float32"] = max(found["float32"], _matrix_rate(device, torch.bfloat16) / 3)
    return found


def _matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    largest = 8192 if device.type == "cuda" else 2048
    if dtype in (torch.float32, torch.float64):
        largest //= 2
    rate, seconds, n = 0.0, 0.0, largest if device.type == "cuda" else 256
    while n <= largest and seconds < 0.05:  # a processor without the type may take minutes
        a = torch.randn(n, n, device=device, dtype=torch.float32).to(dtype)
        seconds = _best_seconds(functools.partial(torch.mm, a, a), device)
        rate, n = max(rate, 2 * n**3 / seconds), 2 * n
    return rate


def _best_seconds(work: Callable[[], Any], device: torch.device) -> float:
    def synchronise() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    best = math.inf
    for _ in range(10):
        synchronise()
        start = time.perf_counter()
        work()
        synchronise()
        best = min(best, time.perf_counter() - start)
    return best


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def release(device: torch.device) -> None:
    """Return unused memory to the system: huge pages kept here would slow another process."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif hasattr(library := ctypes.CDLL(None), "malloc_trim"):  # of glibc
        library.malloc_trim(0)


def one_line(error: Exception) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
