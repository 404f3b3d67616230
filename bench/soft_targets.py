"""Soft targets: divergences between the logits of student and teacher."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastkd import CrossEntropy
from fastkd._core.dispatch import Backend
from fastkd.soft_targets import (
    DivergenceWord,
    linear_soft_target_loss,
    linear_soft_target_loss_ref,
    soft_target_loss,
    soft_target_loss_ref,
)

from .features import features, labels
from .harness import Bound, Case, Provider, Work, leaves_of, unless_installed

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
    return unless_installed("liger-kernel", "liger_kernel")(device)


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


def trl(divergence: DivergenceWord) -> tuple[Provider, ...]:
    """TRL's generalised Jensen-Shannon divergence of logits, or of hidden states and heads."""
    betas = {"forward_kl": 0.0, "js": 0.5, "reverse_kl": 1.0}

    def bind(inputs: dict[str, Any]) -> Bound:
        from trl.experimental.gkd import GKDTrainer

        def forward() -> Tensor:
            sides = list(inputs.values())
            if len(sides) == 4:
                sides = [sides[0] @ sides[1].T, sides[2] @ sides[3].T]
            student, teacher = (z[None] for z in sides)
            counted = torch.zeros(student.shape[:-1], dtype=torch.int64, device=student.device)
            return GKDTrainer.generalized_jsd_loss(
                student, teacher, labels=counted, beta=betas[divergence]
            )

        return Bound(forward, leaves_of(inputs))

    if divergence not in betas:
        return ()
    return (Provider("trl", bind, unless_installed("trl", "trl")),)


def cost(*, rows, V) -> tuple[int, int]:
    """One read of both logits, one write of the gradient."""
    return 3 * rows * V, 12 * rows * V


def case(*more: Any, divergence: DivergenceWord = "forward_kl", **rest: Any) -> Case:
    functions = soft_target_loss_ref, soft_target_loss, "soft_target_loss"
    title, options = NAMES[divergence], {"divergence": divergence}
    peers = liger(divergence) + trl(divergence)
    work = Work(LOSS, title, make, *functions, cost, peers, options)
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


def liger_chunked() -> Provider:
    """Liger's Jensen-Shannon divergence of chunks in PyTorch, which runs on the CPU too."""

    def bind(inputs: dict[str, Any]) -> Bound:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        loss = LigerFusedLinearJSDLoss(
            weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5, compiled=False
        )
        sides = list(inputs.values())
        counted = torch.zeros(len(sides[0]), dtype=torch.int64, device=sides[0].device)
        return Bound(lambda: loss(*sides, counted), leaves_of(inputs))

    why_not = unless_installed("liger-kernel", "liger_kernel")
    return Provider("liger-kernel, chunked", bind, why_not)


def linear_cost(*, rows, Ds, Dt, V) -> tuple[int, int]:
    """Logits of both sides, and the gradients of state and weight."""
    return (rows + V) * (2 * Ds + Dt), 2 * rows * V * (3 * Ds + Dt)


def linear_case(*more: Any, divergence: DivergenceWord = "js", **rest: Any) -> Case:
    functions = linear_soft_target_loss_ref, linear_soft_target_loss, "linear_soft_target_loss"
    title, options = f"from hidden states, {NAMES[divergence]}", {"divergence": divergence}
    peers: tuple[Provider, ...] = ()
    if divergence == "js":
        peers = liger_linear(), liger_chunked()
    peers += trl(divergence)
    work = Work(LOSS, title, make_linear, *functions, linear_cost, peers, options)
    return work.case(*more, compile=more[0] == "cpu", **rest)  # elsewhere all logits don't fit


def make_labelled(*, rows, D, V, device, dtype) -> dict[str, Tensor]:
    inputs = make_linear(rows=rows, Ds=D, Dt=1, V=V, device=device, dtype=dtype)
    student = {name: inputs[name] for name in ("student_hidden", "student_head")}
    return student | {"labels": labels(rows, V, device=device, seed=4)}


def cross_entropy_ref(student_hidden: Tensor, student_head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(student_hidden @ student_head.T, labels)


def cross_entropy(
    student_hidden: Tensor, student_head: Tensor, labels: Tensor, backend: Backend = "auto"
) -> Tensor:
    """The task alone: a teacher of weight 0 is asked for nothing."""
    teacher = student_hidden.detach(), student_head.detach()
    task = CrossEntropy(labels)
    return linear_soft_target_loss(
        student_hidden, student_head, *teacher, soft_weight=0.0, task=task, backend=backend
    )


def torch_linear(chunked: bool) -> Provider:
    """torch's own, from 2.13 on, whose default holds all logits."""

    def bind(inputs: dict[str, Any]) -> Bound:
        options = torch.nn.LinearCrossEntropyOptions() if chunked else None
        hidden, head, labels = inputs.values()
        return Bound(
            lambda: F.linear_cross_entropy(hidden, head, labels, options=options),
            leaves_of(inputs),
        )

    def why_not(device: torch.device) -> str | None:
        return None if hasattr(F, "linear_cross_entropy") else "it came with torch 2.13"

    return Provider("torch, chunked" if chunked else "torch, linear", bind, why_not)


def labelled_cost(*, rows, D, V) -> tuple[int, int]:
    """Logits, and the gradients of state and weight."""
    return (rows + V) * 2 * D, 6 * rows * V * D


def labelled_case(*more: Any, **rest: Any) -> Case:
    functions = cross_entropy_ref, cross_entropy, "linear_soft_target_loss"
    peers = torch_linear(False), torch_linear(True)
    title = "from hidden states, cross-entropy"
    work = Work(LOSS, title, make_labelled, *functions, labelled_cost, peers)
    return work.case(*more, **rest)


def words_cases() -> Iterator[Case]:
    """Heads of language models, as users call it, beside plain torch and what else there is.

    Where one step of the soft targets takes seconds there is the cross-entropy alone.
    """
    sizes = itertools.product((64, 512, 2048), (8192, 32768, 151936))
    for rows, v in sorted(sizes, key=math.prod):  # the small ones first, for want of time
        options: dict[str, Any] = {"as_called": True, "check_sizes": {"rows": 16}}
        for dtype in (torch.float32, torch.bfloat16):
            yield labelled_case("words", dtype, compile=False, **options, rows=rows, D=256, V=v)
            if rows * v < 1 << 27:
                yield linear_case("words", dtype, **options, rows=rows, Ds=256, Dt=256, V=v)


def cases() -> Iterator[Case]:
    yield from words_cases()
    half = torch.bfloat16
    fewer: dict[str, Any] = {"rows": 256}
    for divergence in ("forward_kl", "reverse_kl", "js", "adaptive_kl"):
        headline = divergence == "forward_kl"
        yield case("cpu", divergence=divergence, headline=headline, rows=4096, V=768)
    for v in (2048, 8192, 32768, 131072):
        yield case("cpu", sweep="V", rows=32, V=v)
    yield linear_case("cpu", rows=128, Ds=384, Dt=768, V=30522)
    yield labelled_case("cpu", rows=64, D=384, V=8192)
    yield labelled_case("cpu", rows=512, D=384, V=32768)
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
    for rows in (1024, 8192):
        sizes = {"rows": rows, "Ds": 4096, "Dt": 4096, "V": 128256}
        yield linear_case("vocab", half, check_sizes=fewer, **sizes)
    for v in (4096, 16384, 65536, 262144):
        yield case("sweep", half, compile=False, sweep="V", check_sizes=fewer, rows=4096, V=v)
