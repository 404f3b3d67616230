"""Machine, versions and commit that a result was measured with."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "transformers", "numpy", "liger-kernel", "trl", "pykeops", "cca-zoo")


def describe(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """Machine, package versions, commit and date, for a file of results."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "machine": _machine(device),
        "versions": versions,
        "commit": commit or _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def slug(device: torch.device) -> str:
    """Name of the machine for a file: its GPU, or its CPU and threads."""
    if device.type == "cuda":
        text = torch.cuda.get_device_name(device)
    else:
        text = f"cpu {_cpu_name()} {torch.get_num_threads()} threads"
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", text.lower())).strip("-")


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
    """CPU and vector instructions that PyTorch uses; in a cloud one name covers several models."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(x.partition(":")[2].strip() for x in lines if x.startswith("model name"))
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def _commit() -> str:
    """Commit of the checkout, with "+" for local changes; without a checkout fastkd's version."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != ROOT:
            raise FileNotFoundError(ROOT)
        # Results and their pages are what a measurement changes.
        results = (":!bench/results", ":!docs", ":!README.md")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", *results)
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return f"fastkd {importlib.metadata.version('fastkd')}"
