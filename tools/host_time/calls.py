"""Run in the stub's environment: measures the calls and prints them as JSON; see `tools.host_time`.

It runs in older checkouts too, for a comparison.
"""

import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
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

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return 9, 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def use_stub() -> None:
    """Let fastkd take CPU tensors for those of a GPU, and Triton the stub for one."""
    import fastkd.public  # every loss
    from fastkd._core import dispatch

    assert fastkd.public
    driver.set_active(Stub())
    dispatch.triton_devices = lambda: ("cuda", "cpu")
    with contextlib.suppress(ImportError):  # a checkout without plans
        plans: Any = importlib.import_module("fastkd._core.plans")
        plans.on_gpu = lambda x: True
        plans._difference = lambda *_: lambda: False  # the stub writes nothing to compare
    for module in list(sys.modules.values()):
        of_fastkd = getattr(module, "__name__", "").startswith("fastkd")
        if of_fastkd and hasattr(module, "values_readable"):
            module.values_readable = lambda x: False  # type: ignore[attr-defined]


Case = tuple[list[torch.Tensor], Callable[[], torch.Tensor]]


def features(
    *shape: int, learns: bool = False, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_(learns)


def cases() -> dict[str, Case]:
    """By name: what learns, and a call on the Triton path."""
    import fastkd

    on = {"backend": "triton"}
    mask = torch.arange(128) < torch.randint(64, 129, (32, 1))
    s, t = features(32, 128, 768, learns=True), features(32, 128, 768)
    s16, t16 = features(16, 128, 768, learns=True), features(16, 128, 768)
    S6 = [features(32, 128, 768, learns=True) for _ in range(6)]
    T6 = [features(32, 128, 768) for _ in range(6)]
    fcd = fastkd.FCDLoss(backend="triton")
    a = features(32, 12, 128, 128, learns=True, dtype=torch.float32)
    b = features(32, 12, 128, 128, dtype=torch.float32)
    x, y = features(4096, 768, learns=True), features(4096, 768, learns=True)
    k1, k2, labels = features(32, 768, learns=True), features(32, 768), torch.randint(2, (32,))
    bank, of_bank = features(4096, 768), torch.randint(2, (4096,))
    z1, z2 = features(32, 2, learns=True), features(32, 2)
    z3, z4 = features(64, 30522, learns=True), features(64, 30522)
    knn, calls = fastkd.knn_feature_loss, itertools.count()

    def annealed() -> torch.Tensor:
        loss: torch.Tensor = fastkd.soft_target_loss(
            z1, z2, temperature=2 - next(calls) / 1e6, **on
        )
        return loss

    return {
        "cos_nce tokens B32": ([s], lambda: fastkd.cos_nce_loss(s, t, **on)),
        "cos_nce tokens B32 mask": ([s], lambda: fastkd.cos_nce_loss(s, t, mask=mask, **on)),
        "cos_nce tokens B16": ([s16], lambda: fastkd.cos_nce_loss(s16, t16, **on)),
        "FCD 6 layers": (S6, lambda: fcd(S6, T6)),
        "FCD 6 layers mask": (S6, lambda: fcd(S6, T6, mask)),
        "attention B32 H12 N128 mask": ([a], lambda: fastkd.attention_loss(a, b, mask, **on)),
        "LayerNorm-MSE 4096x768": ([x, y], lambda: fastkd.layer_norm_mse(x, y, **on)),
        "knn batch k=1": ([k1], lambda: knn(k1, k2, labels, **on)),
        "knn bank M4096": ([k1], lambda: knn(k1, bank, labels, of_bank, **on)),
        "forward KL 32x2": ([z1], lambda: fastkd.soft_target_loss(z1, z2, **on)),
        "forward KL 32x2, annealed": ([z1], annealed),
        "forward KL 64x30522": ([z3], lambda: fastkd.soft_target_loss(z3, z4, **on)),
        "hidden mse B32 mask": ([s], lambda: fastkd.hidden_state_loss(s, t, mask, **on)),
    }


def measured(case: Case, launched: Callable[[], int], repeat: int) -> list[float]:
    """Median µs of the forward pass and of the backward pass, and launches of both."""
    leaves, call = case
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
    chosen = {name: case for name, case in cases().items() if not names or name in names}
    return {name: measured(case, library.stub_launches, repeat) for name, case in chosen.items()}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), *sys.argv[2:])))
