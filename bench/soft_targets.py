"""Soft targets: divergences between the logits of student and teacher."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastkd.soft_targets import (
    DivergenceWord,
    linear_soft_target_loss,
    linear_soft_target_loss_ref,
    soft_target_loss,
    soft_target_loss_ref,
)

from .features import features
from .harness import Bound, Case, Provider, Work, leaves_of, why_not_installed

LOSS = "soft_targets"
NAMES = {
    "forward_kl": "forward KL",
    "reverse_kl": "reverse KL",
    "adaptive_kl": "adaptive KL",
    "js": "Jensen-Shannon",
}


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
    return why_not_installed("liger-kernel", "liger_kernel")


def liger(divergence: DivergenceWord) -> tuple[Provider, ...]:
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
        return ()
    return (Provider("liger-kernel", bind, why_no_liger),)


def cost(*, rows, V) -> tuple[int, int]:
    """One read of both logits, one write of the gradient."""
    return 3 * rows * V, 12 * rows * V


def case(*more: Any, divergence: DivergenceWord = "forward_kl", **rest: Any) -> Case:
    functions = soft_target_loss_ref, soft_target_loss, "soft_target_loss"
    title, options = NAMES[divergence], {"divergence": divergence}
    work = Work(LOSS, title, make, *functions, cost, liger(divergence), options)
    return work.case(*more, **rest)


def make_linear(*, rows, Ds, Dt, V, device, dtype) -> dict[str, Tensor]:
    """Hidden states and vocabulary heads, scaled so that the logits have a spread near 1."""
    make = functools.partial(features, device=device, dtype=torch.float32, shared=0.0)
    return {
        "student_hidden": make(rows, Ds, seed=0).to(dtype).requires_grad_(),
        "student_head": make(V, Ds, seed=1).mul_(Ds**-0.5).to(dtype).requires_grad_(),
        "teacher_hidden": make(rows, Dt, seed=2).to(dtype),
        "teacher_head": make(V, Dt, seed=3).mul_(Dt**-0.5).to(dtype),
    }


def liger_linear() -> Provider:
    """Liger's Jensen-Shannon divergence from hidden states."""

    def bind(inputs: dict[str, Any]) -> Bound:
        from liger_kernel.transformers import LigerFusedLinearJSD

        loss = LigerFusedLinearJSD(jsd_beta=0.5)
        return Bound(lambda: loss(*inputs.values(), None), leaves_of(inputs))

    return Provider("liger-kernel", bind, why_no_liger)


def linear_cost(*, rows, Ds, Dt, V) -> tuple[int, int]:
    """Logits of both sides, and the gradients of state and weight."""
    return (rows + V) * (2 * Ds + Dt), 2 * rows * V * (3 * Ds + Dt)


def linear_case(*more: Any, divergence: DivergenceWord = "js", **rest: Any) -> Case:
    functions = linear_soft_target_loss_ref, linear_soft_target_loss, "linear_soft_target_loss"
    title, options = f"from hidden states, {NAMES[divergence]}", {"divergence": divergence}
    peers = (liger_linear(),) if divergence == "js" else ()
    work = Work(LOSS, title, make_linear, *functions, linear_cost, peers, options)
    return work.case(*more, compile=False, **rest)


def cases() -> Iterator[Case]:
    """Every size."""
    half = torch.bfloat16
    fewer: dict[str, Any] = {"rows": 256}
    for divergence in ("forward_kl", "reverse_kl", "js", "adaptive_kl"):
        compile = divergence == "forward_kl"
        yield case(
            "cpu", divergence=divergence, compile=compile, headline=compile, rows=4096, V=768
        )
    for v in (2048, 8192, 32768, 131072):
        yield case("cpu", compile=False, sweep="V", rows=32, V=v)
    yield linear_case("cpu", rows=128, Ds=384, Dt=768, V=30522)
    yield case("bert", half, rows=4096, V=30522, check_sizes=fewer)
    yield case("bert", half, rows=32, V=2)
    for v in (32000, 128256, 152064):
        yield case("vocab", half, headline=v == 152064, rows=8192, V=v, check_sizes=fewer)
    others: tuple[DivergenceWord, ...] = ("reverse_kl", "js", "adaptive_kl")
    for divergence in others:
        sizes: dict[str, Any] = {"rows": 8192, "V": 152064}
        yield case("vocab", half, divergence=divergence, check_sizes=fewer, **sizes)
    two: tuple[DivergenceWord, ...] = ("forward_kl", "js")
    for divergence in two:
        sizes = {"rows": 8192, "Ds": 2048, "Dt": 4096, "V": 128256}
        yield linear_case("vocab", half, divergence=divergence, check_sizes=fewer, **sizes)
    for v in (4096, 16384, 65536, 262144):
        yield case("sweep", half, compile=False, sweep="V", check_sizes=fewer, rows=4096, V=v)
