"""The hardware's own limits, and what no implementation can be faster than."""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def roofline(
    device: torch.device, dtypes: tuple[torch.dtype, ...], number: int = 1
) -> dict[str, float]:
    """Copy bandwidth (bytes/s) and matrix rate (operations/s) per dtype, best of several runs.

    Once for each pass of a ``number``: on a shared machine the limits of a moment are too low.
    """
    limits = {"copy_bytes_per_s": _copy_bandwidth(device)}
    for dtype in dtypes:
        limits[f"{str(dtype).removeprefix('torch.')}_ops_per_s"] = _matrix_rate(device, dtype)
    halves = [name for name in limits if name.startswith(("bfloat16", "float16"))]
    if device.type == "cpu" and halves:
        # Widened they are multiplied as fast as float32, and many processors have no more.
        widened = limits.get("float32_ops_per_s") or _matrix_rate(device, torch.float32)
        limits.update({name: max(limits[name], widened) for name in halves})
    if device.type == "cuda" and torch.float32 in dtypes:
        # Three bfloat16 products give nearly float32 accuracy on tensor cores.
        bfloat16 = _matrix_rate(device, torch.bfloat16)
        limits["float32_ops_per_s"] = max(limits["float32_ops_per_s"], bfloat16 / 3)
    return limits


def floor_ms(limits: dict[str, float], bytes_moved: int, operations: int, dtype: str) -> float:
    """No implementation can be faster: bytes over bandwidth or operations over rate."""
    rate = limits[f"{dtype}_ops_per_s"]
    return 1e3 * max(bytes_moved / limits["copy_bytes_per_s"], operations / rate)


def _copy_bandwidth(device: torch.device) -> float:
    size = (2**30 if device.type == "cuda" else 2**28) // 4
    source, target = torch.ones(size, device=device), torch.empty(size, device=device)
    return 2 * 4 * size / _best_seconds(lambda: target.copy_(source), device)


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

    best = float("inf")
    for _ in range(10):
        synchronise()
        start = time.perf_counter()
        work()
        synchronise()
        best = min(best, time.perf_counter() - start)
    return best
