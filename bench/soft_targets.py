"""Soft targets: divergences between the logits of student and teacher."""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastkd.soft_targets import soft_target_loss, soft_target_loss_ref

from .features import features
from .harness import REFERENCE, Bound, Case, Provider, call, compiled, fastkd_providers, leaves_of

LOSS = "soft_targets"


def make(*, rows, V, device, dtype) -> dict[str, Tensor]:
    """Logits that disagree about most of the vocabulary."""
    make = functools.partial(features, rows, V, device=device, dtype=dtype, shared=0.0)
    return {
        "student_logits": make(seed=0, requires_grad=True),
        "teacher_logits": make(seed=1),
    }


def why_no_liger(device: torch.device) -> str | None:
    """Liger's kernels are Triton without an interpreter path."""
    if device.type != "cuda":
        return "its kernels need a CUDA device"
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed (pip install liger-kernel)"
    return None


def liger(divergence: str) -> list[Provider]:
    """Liger's KL and JSD; both take log-probabilities, so the softmax before them counts."""

    def bind(inputs: dict[str, Any]) -> Bound:
        from liger_kernel.transformers import LigerJSD, LigerKLDIVLoss

        student, teacher = inputs.values()
        loss: Callable[[Tensor, Tensor], Tensor]
        if divergence == "forward_kl":
            loss = LigerKLDIVLoss(reduction="batchmean", log_target=True)
        else:
            # Its beta is 1 for KL(student ‖ teacher), ½ for Jensen-Shannon.
            loss = LigerJSD(beta=1.0 if divergence == "reverse_kl" else 0.5)

        def forward() -> Tensor:
            return loss(F.log_softmax(student, -1), F.log_softmax(teacher, -1))

        return Bound(forward, leaves_of(inputs))

    if divergence == "adaptive_kl":
        return []
    return [Provider("liger-kernel", bind, why_no_liger)]


def case(
    set: str,
    dtype: torch.dtype = torch.float32,
    *,
    divergence: str = "forward_kl",
    compile: bool = True,
    sweep: str = "",
    check_sizes: dict[str, int] | None = None,
    **sizes: int,
) -> Case:
    """Sizes rows and V; one read of both logits, one write of the gradient."""
    entries = sizes["rows"] * sizes["V"]
    options = {"divergence": divergence}
    reference = functools.partial(soft_target_loss_ref, **options)
    return Case(
        loss=LOSS,
        title=divergence.replace("_kl", " KL").replace("js", "Jensen-Shannon"),
        set=set,
        sizes=sizes,
        dtype=dtype,
        make=make,
        providers=(
            Provider(REFERENCE, call(reference)),
            *([compiled(reference)] if compile else []),
            *fastkd_providers(functools.partial(soft_target_loss, **options), "soft_target_loss"),
            *liger(divergence),
        ),
        bytes_moved=3 * entries * dtype.itemsize,
        operations=12 * entries,
        check_sizes=check_sizes or {},
        sweep=sweep,
    )


def cases() -> Iterator[Case]:
    """Every size."""
    half = torch.bfloat16
    fewer = {"rows": 256}
    for divergence in ("forward_kl", "reverse_kl", "js", "adaptive_kl"):
        compile = divergence == "forward_kl"
        yield case("cpu", divergence=divergence, compile=compile, rows=4096, V=768)
    for v in (2048, 8192, 32768, 131072):
        yield case("cpu", compile=False, sweep="V", rows=32, V=v)
    yield case("bert", half, rows=4096, V=30522, check_sizes=fewer)
    yield case("bert", half, rows=32, V=2)
    for v in (32000, 128256, 152064):
        yield case("vocab", half, rows=8192, V=v, check_sizes=fewer)
    for divergence in ("reverse_kl", "js", "adaptive_kl"):
        sizes = {"rows": 8192, "V": 152064}
        yield case("vocab", half, divergence=divergence, check_sizes=fewer, **sizes)
    for v in (4096, 16384, 65536, 262144):
        yield case("sweep", half, compile=False, sweep="V", check_sizes=fewer, rows=4096, V=v)
