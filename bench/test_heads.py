"""Heads of language models: soft targets and cross-entropy from hidden states."""

import functools
from collections.abc import Iterator
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fastkd import CrossEntropy
from fastkd._core.dispatch import Backend
from fastkd.lm.soft_targets import (
    DivergenceWord,
    Unmatched,
    linear_soft_target_loss,
    linear_soft_target_loss_ref,
)

from .case import Bound, Case, Provider, Work, leaves_of, unless_installed
from .features import features, labels
from .test_soft_targets import NAMES, half_matched, trl, why_no_liger

LOSS = "heads"


def make_linear(*, rows, Ds, Dt, V, device, dtype) -> dict[str, Tensor]:
    """Hidden states and vocabulary heads, scaled to logits with a standard deviation near 1."""
    make = functools.partial(features, device=device, dtype=torch.float32, cosine=0.0)
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
    """Case of soft targets: products for both models' logits and for two gradients."""
    return (rows + V) * (2 * Ds + Dt), 2 * rows * V * (3 * Ds + Dt)


def linear_case(*more: Any, divergence: DivergenceWord = "js", **rest: Any) -> Case:
    functions = linear_soft_target_loss_ref, linear_soft_target_loss, "linear_soft_target_loss"
    title, options = NAMES[divergence], {"divergence": divergence}
    peers: tuple[Provider, ...] = ()
    if divergence == "js":
        peers = liger_linear(), liger_chunked()
    peers += trl(divergence)
    work = Work(LOSS, title, make_linear, *functions, linear_cost, peers, options)
    return work.case(*more, **rest)


def matched_case(*more: Any, unmatched: Unmatched, **rest: Any) -> Case:
    """Hidden states and heads of `half_matched` vocabularies."""

    def call(function: Any, student_head: Tensor, **options: Any) -> Tensor:
        options |= {"vocabulary": half_matched(len(student_head)), "unmatched": unmatched}
        return function(student_head=student_head, **options)

    functions = (
        functools.partial(call, linear_soft_target_loss_ref),
        functools.partial(call, linear_soft_target_loss),
    )
    title = f"forward KL, matched, {unmatched}"
    return Work(LOSS, title, make_linear, *functions, "linear_soft_target_loss", linear_cost).case(
        *more, **rest
    )


def make_labelled(*, rows, D, V, device, dtype) -> dict[str, Tensor]:
    inputs = make_linear(rows=rows, Ds=D, Dt=1, V=V, device=device, dtype=dtype)
    student = {name: inputs[name] for name in ("student_hidden", "student_head")}
    return student | {"labels": labels(rows, V, device=device, seed=4)}


def cross_entropy_ref(student_hidden: Tensor, student_head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(student_hidden @ student_head.T, labels)


def cross_entropy(
    student_hidden: Tensor, student_head: Tensor, labels: Tensor, backend: Backend = "auto"
) -> Tensor:
    """Cross-entropy only: with weight 0 the teacher's logits are not computed."""
    teacher = student_hidden.detach(), student_head.detach()
    task = CrossEntropy(labels)
    return linear_soft_target_loss(
        student_hidden, student_head, *teacher, soft_weight=0.0, task=task, backend=backend
    )


def torch_linear(chunked: bool) -> Provider:
    """torch's linear cross-entropy (from 2.13 on), whose default stores all logits."""

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


def cut() -> Provider:
    """Apple's cut cross-entropy, which is Triton without an interpreter path."""

    def bind(inputs: dict[str, Any]) -> Bound:
        from cut_cross_entropy import linear_cross_entropy

        hidden, head, labels = inputs.values()
        return Bound(lambda: linear_cross_entropy(hidden, head, labels), leaves_of(inputs))

    def why_not(device: torch.device) -> str | None:
        if device.type != "cuda":
            return "its kernels need a CUDA device"
        return unless_installed("cut-cross-entropy", "cut_cross_entropy")(device)

    return Provider("cut-cross-entropy", bind, why_not)


def labelled_cost(*, rows, D, V) -> tuple[int, int]:
    """Case of cross-entropy: products for logits and for two gradients."""
    return (rows + V) * 2 * D, 6 * rows * V * D


def labelled_case(*more: Any, **rest: Any) -> Case:
    functions = cross_entropy_ref, cross_entropy, "linear_soft_target_loss"
    peers = torch_linear(False), torch_linear(True), cut()
    work = Work(LOSS, "cross-entropy", make_labelled, *functions, labelled_cost, peers)
    return work.case(*more, **rest)


def cases() -> Iterator[Case]:
    """On the CPU fastkd's default backend, beside plain PyTorch and the peers."""
    half = torch.bfloat16
    cpu: dict[str, Any] = {"compile": False, "as_called": True, "check_sizes": {"rows": 16}}
    for v in (8192, 32768, 151936):
        yield labelled_case("cpu", **cpu, sweep="V", rows=256, D=256, V=v)
    yield labelled_case("cpu", half, **cpu, rows=256, D=256, V=32768)
    for v in (8192, 32768, 151936):
        yield linear_case("cpu", **cpu, sweep="V", rows=64, Ds=256, Dt=256, V=v)
    for dtype in (torch.float32, half):
        yield linear_case("cpu", dtype, **cpu, rows=256, Ds=256, Dt=256, V=32768)
    for unmatched in get_args(Unmatched):
        yield matched_case("cpu", **cpu, unmatched=unmatched, rows=64, Ds=256, Dt=256, V=32768)
    gpu: dict[str, Any] = {"compile": False, "check_sizes": {"rows": 256}}  # all logits don't fit
    two: tuple[DivergenceWord, ...] = ("forward_kl", "js")
    for divergence in two:
        sizes: dict[str, Any] = {"rows": 8192, "Ds": 2048, "Dt": 4096, "V": 128256}
        yield linear_case("vocab", half, divergence=divergence, **gpu, **sizes)
    for rows in (1024, 8192):
        yield linear_case("vocab", half, **gpu, rows=rows, Ds=4096, Dt=4096, V=128256)
    for unmatched in get_args(Unmatched):
        yield matched_case("vocab", half, unmatched=unmatched, **gpu, **sizes)
    yield labelled_case("vocab", half, **gpu, rows=8192, D=2048, V=128256)


def test_heads(measure, case, provider):
    measure(case, provider)
