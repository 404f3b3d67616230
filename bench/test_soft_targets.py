"""Soft targets: divergences between the logits of student and teacher."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fastkd import Divergence, TopK, VocabularyMatch
from fastkd.lm.soft_targets import Unmatched, soft_target_loss, soft_target_loss_ref

from .case import Bound, Case, Provider, Work, leaves_of, unless_installed
from .features import features, zipf

LOSS = "soft_targets"
NAMES = {
    "forward_kl": "forward KL",
    "reverse_kl": "reverse KL",
    "adaptive_kl": "adaptive KL",
    "js": "Jensen-Shannon",
    "total_variation": "total variation",
    "negative_log_acceptance": "negative log acceptance",
    "lk": "LK",
}


def make(*, rows, V, device, dtype) -> dict[str, Tensor]:
    """Logits of student and teacher that differ for most of the vocabulary."""
    make = functools.partial(features, rows, V, device=device, dtype=dtype, cosine=0.0)
    return {
        "student_logits": make(seed=0, requires_grad=True),
        "teacher_logits": make(seed=1),
    }


def make_zipf(*, rows, V, device, dtype) -> dict[str, Tensor]:
    """Logits of tokens by Zipf's law, with noise of each side."""
    exact, inputs = (
        zipf(rows, V, exponent=1.2, device=device),
        make(rows=rows, V=V, device=device, dtype=dtype),
    )
    with torch.no_grad():
        return {
            name: (x.float() / 2 + exact).to(dtype).requires_grad_(x.requires_grad)
            for name, x in inputs.items()
        }


def why_no_liger(device: torch.device) -> str | None:
    """Liger's kernels are Triton without an interpreter path."""
    if device.type != "cuda":
        return "its kernels need a CUDA device"
    return unless_installed("liger-kernel", "liger_kernel")(device)


def liger(divergence: str) -> tuple[Provider, ...]:
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

    if divergence not in ("forward_kl", "reverse_kl", "js"):
        return ()
    return (Provider("liger-kernel", bind, why_no_liger),)


def trl(divergence: str) -> tuple[Provider, ...]:
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


def eager(divergence: str) -> tuple[Provider, ...]:
    """Formula of a draft model's divergence in PyTorch, as in speculators and SpecForge."""

    def bind(inputs: dict[str, Any]) -> Bound:
        student, teacher = inputs.values()

        def forward() -> Tensor:
            p, q = teacher.softmax(-1), student.softmax(-1)
            accepted = torch.minimum(p, q).sum(-1)
            if divergence == "total_variation":
                return (1 - accepted).mean()
            if divergence == "negative_log_acceptance":
                return -accepted.log().mean()
            kl = F.kl_div(student.log_softmax(-1), p, reduction="none").sum(-1)
            weight = torch.exp(-3 * accepted.detach())
            return (weight * kl + (1 - weight) * (1 - accepted)).mean()

        return Bound(forward, leaves_of(inputs))

    if divergence not in ("total_variation", "negative_log_acceptance", "lk"):
        return ()
    return (Provider("speculators, eager", bind),)


def cost(*, rows, V) -> tuple[int, int]:
    """Case of soft targets on logits; bytes: both logits read, one gradient written."""
    return 3 * rows * V, 12 * rows * V


def case(*more: Any, divergence: str = "forward_kl", **rest: Any) -> Case:
    functions = soft_target_loss_ref, soft_target_loss, "soft_target_loss"
    title, options = NAMES[divergence], {"divergence": Divergence(divergence)}
    peers = liger(divergence) + trl(divergence) + eager(divergence)
    inputs = make_zipf if rest.get("data") else make
    work = Work(LOSS, title, inputs, *functions, cost, peers, options)
    return work.case(*more, **rest)


def make_top_k(*, rows, V, K, device, dtype) -> dict[str, Tensor]:
    inputs = make(rows=rows, V=V, device=device, dtype=dtype)
    log_probs, ids = inputs["teacher_logits"].float().log_softmax(-1).topk(K)
    return {"student_logits": inputs["student_logits"], "ids": ids, "log_probs": log_probs}


def top_k_cost(*, rows, V, K) -> tuple[int, int]:
    """Student's logits read, their gradient written; the k tokens hardly count."""
    return 2 * rows * V, 6 * rows * V


def top_k_case(*more: Any, **rest: Any) -> Case:
    def call(function: Any, student_logits: Tensor, ids: Tensor, log_probs: Tensor, **rest) -> Any:
        return function(student_logits, TopK(ids, log_probs), **rest)

    functions = (functools.partial(call, f) for f in (soft_target_loss_ref, soft_target_loss))
    work = Work(LOSS, "forward KL, top k", make_top_k, *functions, "soft_target_loss", top_k_cost)
    return work.case(*more, **rest)


@functools.cache
def half_matched(V: int) -> VocabularyMatch:
    """Two vocabularies of one size: half of the tokens match, in another order."""
    generator = torch.Generator().manual_seed(5)
    with torch.device("cpu"):
        ids = (torch.randperm(V, generator=generator)[: V // 2] for _ in range(2))
        return VocabularyMatch(*ids, V, V)


def matched_case(*more: Any, unmatched: Unmatched, **rest: Any) -> Case:
    """Logits of `half_matched` vocabularies."""

    def call(function: Any, student_logits: Tensor, **options: Any) -> Tensor:
        options |= {"vocabulary": half_matched(student_logits.shape[-1]), "unmatched": unmatched}
        return function(student_logits, **options)

    functions = (functools.partial(call, f) for f in (soft_target_loss_ref, soft_target_loss))
    title = f"forward KL, matched, {unmatched}"
    work = Work(LOSS, title, make, *functions, "soft_target_loss", cost)
    return work.case(*more, **rest)


def cases() -> Iterator[Case]:
    half = torch.bfloat16
    fewer: dict[str, Any] = {"rows": 256}
    for divergence in ("forward_kl", "reverse_kl", "js", "adaptive_kl"):
        headline = divergence == "forward_kl"
        yield case("cpu", divergence=divergence, headline=headline, rows=4096, V=768)
    yield case("cpu", divergence="adaptive_kl", data="Zipf's law", rows=4096, V=768)
    for v in (2048, 8192, 32768, 131072):
        yield case("cpu", sweep="V", rows=32, V=v)
    drafts: dict[str, Any] = {"compile": False, "check_sizes": {"rows": 16}}
    for divergence in ("forward_kl", "total_variation", "negative_log_acceptance", "lk"):
        yield case("cpu", divergence=divergence, **drafts, rows=256, V=32000)
    yield top_k_case("cpu", **drafts, rows=256, V=32000, K=64)
    for unmatched in get_args(Unmatched):
        yield matched_case("cpu", unmatched=unmatched, **drafts, rows=256, V=32000)
    yield case("bert", half, rows=4096, V=30522, check_sizes=fewer)
    yield case("bert", half, rows=32, V=2)
    for v in (32000, 128256, 152064):
        yield case("vocab", half, headline=v == 152064, rows=8192, V=v, check_sizes=fewer)
    for divergence in list(NAMES)[1:]:
        sizes: dict[str, Any] = {"rows": 8192, "V": 152064}
        yield case("vocab", half, divergence=divergence, check_sizes=fewer, **sizes)
    for divergence in ("forward_kl", "adaptive_kl"):
        data: dict[str, Any] = {"data": "Zipf's law", "check_sizes": fewer}
        yield case("vocab", half, divergence=divergence, **data, **sizes)
    yield top_k_case("vocab", half, check_sizes=fewer, rows=8192, V=152064, K=64)
    for v in (4096, 16384, 65536, 262144):
        yield case("sweep", half, compile=False, sweep="V", check_sizes=fewer, rows=4096, V=v)


def test_soft_targets(measure, case, provider):
    measure(case, provider)
