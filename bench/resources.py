"""What one step takes besides time: peak memory, launches, dispatched operations."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode


def peak_bytes(step: Callable[[], Any], device: torch.device) -> int:
    """Largest number of bytes that ``step`` held at once beyond what was there before it.

    Its results count. On CUDA this is the caching allocator's figure, on the CPU the sum of the
    profiler's allocation events; memory inside BLAS libraries is not seen by either.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = step()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated(device) - before
    with _profiler([ProfilerActivity.CPU], memory=True) as trace:
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


def count_operations(step: Callable[[], Any]) -> int:
    """Tensor operations that ``step`` dispatches, views left out."""
    counter = _OperationCounter()
    with counter:
        step()
    return counter.count


class _OperationCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count += not getattr(func, "is_view", False)
        return result


def device_work(step: Callable[[], Any]) -> dict[str, Any]:
    """Device kernels (copies and fills included) of one step, and their summed milliseconds."""
    torch.cuda.synchronize()
    with _profiler([ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    work = [
        event.duration_ns()
        for event in trace.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0
    ]
    return {"launches": len(work), "device_ms": sum(work) / 1e6}


def _profiler(activities: list[Any], memory: bool = False) -> Any:
    # Some builds of torch print a line for every start and stop of the profiler.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    return profile(activities=activities, profile_memory=memory, acc_events=True)
