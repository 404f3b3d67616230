"""Run in the stub's environment: measures the calls and prints them as JSON; see `tools.host_time`.

It runs in older checkouts too, for a comparison.
"""

import ctypes
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
from triton.runtime import driver

torch.set_num_threads(1)


class Stub(CudaDriver):
    """Triton's driver over a libcuda that does nothing."""

    def __init__(self) -> None:
        self.utils = CudaUtils()
        self.launcher_cls = CudaLauncher

    def get_current_device(self, *_: int) -> int:
        return 0

    get_current_stream = get_current_device

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return 9, 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def use_stub() -> None:
    """Let fastkd take CPU tensors for those of a GPU, and Triton the stub for one."""
    import fastkd.public  # every loss
    from fastkd._core import dispatch, plans

    assert fastkd.public
    driver.set_active(Stub())
    dispatch.triton_devices = lambda: ("cuda", "cpu")
    plans.on_gpu = lambda x: True
    plans._difference = lambda *_: lambda: False  # the stub writes nothing to compare
    for module in list(sys.modules.values()):
        of_fastkd = getattr(module, "__name__", "").startswith("fastkd")
        if of_fastkd and hasattr(module, "values_readable"):
            module.values_readable = lambda x: False  # type: ignore[attr-defined]


def cases(names: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Key and bound Triton path of the benchmark's BERT cases that start kernels only."""
    from bench import suite

    for case in suite.cases(["bert"]):
        multiplies = case.loss in ("cca", "linalg") or case.title in ("Cayley", "dual projection")
        if not multiplies and (not names or case.key in names):
            provider = next(p for p in case.providers if p.name == "fastkd triton")
            inputs = case.make(device=torch.get_default_device(), dtype=case.dtype, **case.sizes)
            yield case.key, provider.bind(inputs)


def measured(bound: Any, launched: Callable[[], int], repeat: int) -> list[float]:
    """Median µs of the forward pass and of the backward pass, and launches of both."""
    leaves, call = bound.leaves, bound.forward
    for _ in range(40):  # a plan is recorded, proved and repeated
        torch.autograd.grad(call(), leaves)
    forward, backward = [], []
    gc.disable()
    before = launched()
    for _ in range(repeat):
        start = time.perf_counter()
        loss = call()
        between = time.perf_counter()
        torch.autograd.grad(loss, leaves)
        forward.append(between - start)
        backward.append(time.perf_counter() - between)
    gc.enable()
    µs = [round(statistics.median(times) * 1e6, 1) for times in (forward, backward)]
    return [*µs, (launched() - before) / repeat]


def main(repeat: int, *names: str) -> dict[str, Any]:
    use_stub()
    library = ctypes.CDLL("libcuda.so.1")
    library.stub_launches.restype = ctypes.c_long
    return {key: measured(bound, library.stub_launches, repeat) for key, bound in cases(names)}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), *sys.argv[2:])))
