"""What a result was measured on: machine, versions, commit, and the hardware's own limits."""

import datetime
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fastkd

HERE = Path(__file__).resolve().parent
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "liger-kernel",
    "pykeops",
    "cca-zoo",
)


def describe(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """Everything that a reader needs to know about where the numbers come from."""
    return {
        "machine": _machine(device),
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": commit or _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def slug(device: torch.device) -> str:
    """A file name for the machine."""
    if device.type == "cuda":
        text = torch.cuda.get_device_name(device)
    else:
        text = f"cpu {_cpu_name()} {torch.get_num_threads()} threads"
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", text.lower())).strip("-")


@functools.cache
def roofline(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> dict[str, float]:
    """Copy bandwidth (bytes/s) and matrix rate (operations/s) per dtype, best of several runs."""
    limits = {"copy_bytes_per_s": _copy_bandwidth(device)}
    for dtype in dtypes:
        limits[f"{str(dtype).removeprefix('torch.')}_ops_per_s"] = _matrix_rate(device, dtype)
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
    n = 8192 if device.type == "cuda" else 2048
    if dtype in (torch.float32, torch.float64):
        n //= 2
    a = torch.randn(n, n, device=device, dtype=torch.float32).to(dtype)
    return 2 * n**3 / _best_seconds(lambda: a @ a, device)


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


def _machine(device: torch.device) -> dict[str, Any]:
    machine: dict[str, Any] = {
        "name": slug(device),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine["gpu"] = properties.name
        machine["gpu_memory_bytes"] = properties.total_memory
        machine["capability"] = f"sm_{properties.major}{properties.minor}"
    return machine


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _commit() -> str:
    """The checkout's commit, with "+" for local changes; the package's version outside one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(HERE), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != HERE.parent:
            raise FileNotFoundError(HERE)
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!bench/results")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return f"fastkd {fastkd.__version__}"
