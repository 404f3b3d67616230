"""Losses of draft models and on-policy students beside other packages' formulas for the same.

`python -m bench.other_packages` checks that both give one value and one gradient, times them in
interleaved rounds, writes bench/results/other_packages/MACHINE.json, and the table of
docs/coming_from.md from it. `--page` writes the table from the file that is there.

A formula is written as in its package's source, in eager PyTorch. TRL's functions are called where
TRL is installed.
"""

import argparse
import functools
import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastkd import (
    CrossEntropy,
    Divergence,
    Draft,
    ImportanceRatio,
    TopK,
    linear_soft_target_loss,
    soft_target_loss,
)
from fastkd._core.machine import describe
from fastkd.functional import log_probs

from .case import REFERENCE, Case, Provider, call
from .features import features
from .group import DEVICE, Group
from .measure import quartiles
from .report import RESULTS, fill, milliseconds

PAGE = Path(__file__).parents[1] / "docs/coming_from.md"
FOLDER = RESULTS / "other_packages"
STEPS, GAMMA, DECAY, EPS = 4, 0.8, 4.0, 1e-5
THEIRS, OURS = REFERENCE, "fastkd"


@dataclass(frozen=True)
class Row:
    """A call of another package and its equivalent; functions take the tensors of ``make``."""

    package: str
    theirs: str
    ours: str
    make: Callable[..., dict[str, Tensor]]
    formula: Callable[..., Tensor]
    fastkd: Callable[..., Tensor]
    installed: Callable[..., Tensor] | None = None  # the package's own function

    @property
    def case(self) -> Case:
        theirs = self.installed if self.installed and is_installed("trl") else self.formula
        return Case(
            loss="other packages", title=f"{self.package}, {self.theirs}", set="cpu",
            sizes={"rows": 256, "D": 256, "V": 32768}, dtype=torch.float32, make=self.make,
            providers=(Provider(THEIRS, call(theirs)), Provider(OURS, call(self.fastkd))),
            bytes_moved=0, operations=0, check_sizes={"rows": 16, "D": 24, "V": 512},
            oracle=self.formula,
        )  # fmt: skip


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def positions(rows: int, device: torch.device) -> dict[str, Tensor]:
    """A mask and the step of each position in its draft."""
    steps = torch.arange(rows, device=device) % STEPS
    return {"mask": (torch.arange(rows, device=device) % 7 != 3)[None], "steps": steps[None]}


def of_logits(*, rows: int, V: int, device: torch.device, dtype: torch.dtype, **_: int) -> Any:
    """Logits (1, rows, V)."""
    make = functools.partial(features, rows, V, device=device, dtype=dtype, cosine=0.2)
    logits = {"s": make(seed=0)[None].requires_grad_(), "t": make(seed=1)[None]}
    return logits | positions(rows, device)


def of_states(
    *, rows: int, D: int, V: int, device: torch.device, dtype: torch.dtype, part: int = 1
) -> Any:
    """Hidden states (1, rows, D), heads of V tokens (V/part for the student), and token ids."""
    make = functools.partial(features, device=device, dtype=torch.float32, cosine=0.2)
    generator = torch.Generator().manual_seed(4)
    drafts = torch.zeros(V, dtype=torch.bool)
    drafts[torch.randperm(V, generator=generator)[: V // part]] = True
    ids = torch.randint(V // part, (1, rows), generator=generator)
    old = -2 - 3 * torch.rand(1, rows, generator=generator)
    return {
        "h": make(rows, D, seed=0)[None].to(dtype).requires_grad_(),
        "w": make(V // part, D, seed=2).mul_(D**-0.5).to(dtype).requires_grad_(),
        "h_t": make(rows, D, seed=1)[None].to(dtype),
        "w_t": make(V, D, seed=3).mul_(D**-0.5).to(dtype),
        "drafts": drafts.to(device),
        "ids": ids.to(device),
        "old": old.to(device, dtype),
        **positions(rows, device),
    }


of_draft_heads = functools.partial(of_states, part=4)


# vllm-project/speculators, losses/eager.py and losses/utils.py.


def overlap(s: Tensor, t: Tensor) -> Tensor:
    return torch.minimum(s.softmax(-1), t.softmax(-1)).sum(-1)


def forward_kl(s: Tensor, t: Tensor) -> Tensor:
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)


def reverse_kl(s: Tensor, t: Tensor) -> Tensor:
    log_q, log_p = s.log_softmax(-1), t.log_softmax(-1)
    return F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)


def js(s: Tensor, t: Tensor) -> Tensor:
    log_q, log_p = s.log_softmax(-1), t.log_softmax(-1)
    log_m = torch.logaddexp(log_q, log_p) - math.log(2)
    parts = [F.kl_div(log_m, x, reduction="none", log_target=True).sum(-1) for x in (log_p, log_q)]
    return (parts[0] + parts[1]) / 2


def lk_hybrid(s: Tensor, t: Tensor, eta: float = 3.0) -> Tensor:
    alpha = overlap(s, t)
    weight = torch.exp(-eta * alpha.detach())
    return weight * forward_kl(s, t) + (1 - weight) * (1 - alpha)


def ce_of_argmax(s: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(s.flatten(0, -2), t.argmax(-1).flatten(), reduction="none").view(
        s.shape[:-1]
    )


SPECULATORS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "kl_div": (forward_kl, "forward_kl"),
    "rkl": (reverse_kl, "reverse_kl"),
    "jsd": (js, "js"),
    "tv": (lambda s, t: 1 - overlap(s, t), "total_variation"),
    "nla": (lambda s, t: -overlap(s, t).clamp_min(EPS).log(), "negative_log_acceptance"),
    "lk_hybrid": (lk_hybrid, "lk"),
}


def by_step(steps: Tensor, like: Tensor) -> Tensor:
    """Weights γˢ of speculators' ``exp_loss_decay``."""
    return torch.tensor(GAMMA, dtype=like.dtype, device=like.device) ** steps


def reduced(losses: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    return ((losses * mask * weights).sum(1) / (mask.sum(1) + EPS)).mean()


def speculators() -> Iterator[Row]:
    for name, (formula, divergence) in SPECULATORS.items():

        def theirs(s: Tensor, t: Tensor, mask: Tensor, steps: Tensor, formula=formula) -> Tensor:
            return reduced(formula(s, t), mask, by_step(steps, s))

        def ours(s: Tensor, t: Tensor, mask: Tensor, steps: Tensor, name=divergence) -> Tensor:
            return soft_target_loss(
                s, t, divergence=Divergence(name), mask=mask, weights=by_step(steps, s),
                denominator=mask.sum() + EPS,
            )  # fmt: skip

        yield Row(
            "speculators",
            f'`loss_function(s, t, mask, step, "{name}", exp_loss_decay)`',
            f'`soft_target_loss(s, t, divergence=Divergence("{divergence}"), mask=mask, '
            "weights=gamma**step)`",
            of_logits, theirs, ours,
        )  # fmt: skip

    def mixed(
        h: Tensor, w: Tensor, h_t: Tensor, w_t: Tensor, mask: Tensor, steps: Tensor, **_: Any
    ):
        s, t = h @ w.T, h_t @ w_t.T
        weights = by_step(steps, h)
        ce = reduced(ce_of_argmax(s, t), mask, weights)
        return 0.1 * ce + 0.9 * reduced(1 - overlap(s, t), mask, weights)

    def ours_mixed(
        h: Tensor, w: Tensor, h_t: Tensor, w_t: Tensor, mask: Tensor, steps: Tensor, **_: Any
    ):
        weights = by_step(steps, h)
        task = CrossEntropy(TopK.of(h_t, w_t, 1).ids[..., 0], 0.1, weights=weights)
        return linear_soft_target_loss(
            h, w, h_t, w_t, divergence=Divergence("total_variation"), soft_weight=0.9, task=task,
            mask=mask, weights=weights, denominator=mask.sum() + EPS,
        )  # fmt: skip

    yield Row(
        "speculators",
        '`compound_loss(h @ w.T, h_t @ w_t.T, mask, step, {"ce": 0.1, "tv": 0.9}, exp_loss_decay)`',
        "`linear_soft_target_loss(h, w, h_t, w_t, divergence=Divergence(\"total_variation\"), "
        "soft_weight=0.9, task=CrossEntropy(TopK.of(h_t, w_t, 1).ids[..., 0], 0.1, "
        "weights=gamma**step), mask=mask, weights=gamma**step)`",
        of_states, mixed, ours_mixed,
    )  # fmt: skip


# sgl-project/SpecForge, core/compact_teacher.py, core/lk_loss.py, algorithms/common (DSpark).


def compact_teacher(h_t: Tensor, w_t: Tensor, drafts: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """p over the drafts' tokens, renormalised and not, and positions whose best token is theirs."""
    with torch.no_grad():
        logits = h_t @ w_t[drafts].T
        whole = h_t @ w_t.T
        on_drafts = (logits - whole.logsumexp(-1, keepdim=True)).exp()
        return logits.softmax(-1), on_drafts, drafts[whole.argmax(-1)] & mask


def soft_cross_entropy(logits: Tensor, p: Tensor, mask: Tensor) -> Tensor:
    return -(mask[..., None] * p * logits.log_softmax(-1)).sum(-1).mean()


def specforge_kl(h, w, h_t, w_t, drafts, mask, **_):
    p, _, counted = compact_teacher(h_t, w_t, drafts, mask)
    return soft_cross_entropy(h @ w.T, p, counted)


def specforge_alpha(h, w, h_t, w_t, drafts, mask, **_):
    _, p, counted = compact_teacher(h_t, w_t, drafts, mask)
    alpha = torch.minimum((h @ w.T).softmax(-1), p).sum(-1)
    losses = torch.where(alpha > 0, alpha.log(), 0)
    return -(losses * counted).sum() / counted.sum()


def specforge_lambda(h, w, h_t, w_t, drafts, mask, decay=3.0, **_):
    part, p, counted = compact_teacher(h_t, w_t, drafts, mask)
    logits = h @ w.T
    alpha = (torch.minimum(logits.softmax(-1), p).sum(-1) * counted).sum() / counted.sum()
    weight = torch.exp(-decay * alpha.detach())
    return weight * soft_cross_entropy(logits, part, counted) + (1 - weight) * (1 - alpha)


def counted_drafts(h_t, w_t, drafts, mask):
    """The draft's token ids, and positions whose most probable token is one of them."""
    return drafts.nonzero()[:, 0], drafts[TopK.of(h_t, w_t, 1).ids[..., 0]] & mask


def our_kl(h, w, h_t, w_t, drafts, mask, counted=None, **_):
    ids, found = counted_drafts(h_t, w_t, drafts, mask) if counted is None else counted
    loss, terms = linear_soft_target_loss(
        h, w, h_t, w_t, draft=Draft(ids), mask=found, denominator=found.numel(),
        return_terms=["teacher_entropy"],
    )  # fmt: skip
    return loss + terms["teacher_entropy"]


def our_distance(h, w, h_t, w_t, counted, divergence):
    ids, found = counted
    return linear_soft_target_loss(
        h, w, h_t, w_t, draft=Draft(ids, "whole"), mask=found,
        divergence=Divergence(divergence),
    )  # fmt: skip


def our_alpha(h, w, h_t, w_t, drafts, mask, **_):
    counted = counted_drafts(h_t, w_t, drafts, mask)
    return our_distance(h, w, h_t, w_t, counted, "negative_log_acceptance")


def our_lambda(h, w, h_t, w_t, drafts, mask, decay=3.0, **_):
    counted = counted_drafts(h_t, w_t, drafts, mask)
    tv = our_distance(h, w, h_t, w_t, counted, "total_variation")
    weight = torch.exp(-decay * (1 - tv.detach()))
    return weight * our_kl(h, w, h_t, w_t, drafts, mask, counted) + (1 - weight) * tv


def dspark(h, w, h_t, w_t, ids, mask, steps, **_):
    logits = h @ w.T
    with torch.no_grad():
        p = (h_t @ w_t.T).softmax(-1)
    weights = mask * torch.exp(-steps / DECAY).to(h.dtype)
    ce = F.cross_entropy(logits[0], ids[0], reduction="none")[None]
    l1 = (logits.softmax(-1) - p).abs().sum(-1)
    return (0.1 * (ce * weights).sum() + 0.9 * (l1 * weights).sum()) / (weights.sum() + 1e-6)


def our_dspark(h, w, h_t, w_t, ids, mask, steps, **_):
    weights = torch.exp(-steps / DECAY).to(h.dtype)
    return linear_soft_target_loss(
        h, w, h_t, w_t, divergence=Divergence("total_variation"), soft_weight=1.8,
        task=CrossEntropy(ids, 0.1, weights=weights), mask=mask, weights=weights,
        denominator=(weights * mask).sum() + 1e-6,
    )  # fmt: skip


def specforge() -> Iterator[Row]:
    states = "h, w, h_t, w_t, draft=Draft(ids"
    yield Row(
        "SpecForge", "`LogSoftmaxLoss` of `compute_target_from_hidden(h_t, w_t, t2d, mask)`",
        f"`linear_soft_target_loss({states}), mask=found, denominator=B * N)`, with `ids = "
        "t2d.nonzero()[:, 0]` and `found = t2d[TopK.of(h_t, w_t, 1).ids[..., 0]] & mask`; theirs "
        "has the teacher's entropy (`return_terms`) in addition",
        of_draft_heads, specforge_kl, our_kl,
    )  # fmt: skip
    yield Row(
        "SpecForge", '`compute_lk_loss(..., lk_loss_type="alpha")` of the same teacher',
        f'`linear_soft_target_loss({states}, "whole"), mask=found, '
        'divergence=Divergence("negative_log_acceptance"))`',
        of_draft_heads, specforge_alpha, our_alpha,
    )  # fmt: skip
    yield Row(
        "SpecForge", 'the same with `"lambda"`',
        "`weight * kl + (1 - weight) * tv`, with `kl` of the first row, `tv` of the second with "
        '`"total_variation"`, and `weight = kl_scale * (-kl_decay * (1 - tv.detach())).exp()`; '
        '`Divergence("lk")` weighs each position by its own α',
        of_draft_heads, specforge_lambda, our_lambda,
    )  # fmt: skip
    yield Row(
        "SpecForge", "DSpark, 0.1·CE + 0.9·L1 of positions weighted exp(−step/γ)",
        '`linear_soft_target_loss(h, w, h_t, w_t, divergence=Divergence("total_variation"), '
        "soft_weight=1.8, task=CrossEntropy(ids, 0.1, weights=weights), mask=mask, "
        "weights=weights, denominator=(weights * mask).sum())`; L1 is twice total variation",
        of_states, dspark, our_dspark,
    )  # fmt: skip


# huggingface/trl, trainer/distillation_trainer.py and experimental/sdpo/loss_utils.py.


def generalised_js(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    log_m = torch.logaddexp(log_q + math.log(1 - beta), log_p + math.log(beta))
    of_teacher = (log_p.exp() * (log_p - log_m)).sum(-1)
    return beta * of_teacher + (1 - beta) * (log_q.exp() * (log_q - log_m)).sum(-1)


def chunked_js(h, w, h_t, w_t, mask, beta=0.3, temperature=2.0, **_):
    log_q, log_p = ((x / temperature).log_softmax(-1) for x in (h @ w.T, h_t @ w_t.T))
    return (generalised_js(log_q, log_p, beta) * mask).sum() / mask.sum()


def trl_chunked_js(h, w, h_t, w_t, mask, beta=0.3, temperature=2.0, **_):
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    return _chunked_divergence_loss(h, h_t, w, w_t, mask, beta, temperature=temperature)[0]


def our_chunked_js(h, w, h_t, w_t, mask, beta=0.3, temperature=2.0, **_):
    return linear_soft_target_loss(
        h, w, h_t, w_t, divergence=Divergence("js", beta=beta), mask=mask, temperature=temperature,
        scale_by_t2=False,
    )  # fmt: skip


def sdpo(name: str, **options: Any) -> Callable[..., Tensor]:
    """The mean of a loss of TRL's SDPO over positions."""

    def loss(s, t, **_):
        from trl.experimental.sdpo import loss_utils

        return getattr(loss_utils, f"compute_{name}_self_distillation_loss")(s, t, **options).mean()

    return loss


def of_whole(s, t, beta=0.3, **_):
    return generalised_js(s.log_softmax(-1), t.log_softmax(-1), beta).mean()


def our_whole(s, t, beta=0.3, **_):
    losses = soft_target_loss(s, t, divergence=Divergence("js", beta=beta), reduction="none")
    return losses.mean()


def of_top_k(s, t, k=20, beta=0.3, **_):
    ids = s.topk(k).indices
    log_q, log_p = (x.log_softmax(-1).gather(-1, ids) for x in (s, t))
    rest = [torch.log1p(-x.exp().sum(-1, keepdim=True)) for x in (log_q, log_p)]
    log_q, log_p = torch.cat([log_q, rest[0]], -1), torch.cat([log_p, rest[1]], -1)
    return generalised_js(log_q, log_p, beta).mean()


def our_top_k(s, t, k=20, beta=0.3, **_):
    ids = s.detach().topk(k).indices
    top = TopK(ids, t.gather(-1, ids) - t.logsumexp(-1, keepdim=True), "bucket")
    divergence = Divergence("js", beta=beta)
    return soft_target_loss(s, top, divergence=divergence, reduction="none").mean()


def at_ids(h: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    return (h @ w.T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def of_sampled(h, w, h_t, w_t, ids, **_):
    log_q, log_p = at_ids(h, w, ids), at_ids(h_t, w_t, ids)
    return ((log_q - log_p).detach() * log_q).mean()


def our_sampled(h, w, h_t, w_t, ids, **_):
    log_q = log_probs(h, w, ids)
    return ((log_q - log_probs(h_t, w_t, ids)).detach() * log_q).mean()


def of_clipped(h, w, h_t, w_t, ids, old, clip=2.0, **_):
    ratio = (at_ids(h, w, ids) - old).detach().clamp(-20, 20).exp().clamp(max=clip)
    return (reverse_kl(h @ w.T, h_t @ w_t.T) * ratio).mean()


def trl_clipped(h, w, h_t, w_t, ids, old, clip=2.0, **_):
    from trl.experimental.sdpo.loss_utils import apply_importance_sampling_clipping

    losses = reverse_kl(h @ w.T, h_t @ w_t.T)
    return apply_importance_sampling_clipping(losses, at_ids(h, w, ids), old, clip).mean()


def our_clipped(h, w, h_t, w_t, ids, old, clip=2.0, **_):
    ratio = ImportanceRatio(ids, old, at_most=clip)
    return linear_soft_target_loss(h, w, h_t, w_t, divergence="reverse_kl", ratio=ratio)


def trl() -> Iterator[Row]:
    yield Row(
        "TRL", "`_chunked_divergence_loss(h, h_t, w, w_t, mask, beta, temperature=T)`",
        '`linear_soft_target_loss(h, w, h_t, w_t, divergence=Divergence("js", beta=beta), '
        "mask=mask, temperature=T, scale_by_t2=False)`; `num_items_in_batch=n` is `denominator=n`",
        of_states, chunked_js, our_chunked_js, trl_chunked_js,
    )  # fmt: skip
    yield Row(
        "TRL SDPO", "`compute_full_logit_self_distillation_loss(s, t, distillation_alpha=a)`",
        '`soft_target_loss(s, t, divergence=Divergence("js", beta=a), reduction="none")`; '
        '"forward_kl" at 0, "reverse_kl" at 1',
        of_logits, of_whole, our_whole, sdpo("full_logit", distillation_alpha=0.3),
    )  # fmt: skip
    yield Row(
        "TRL SDPO", "`compute_topk_self_distillation_loss(s, t, distillation_topk=k, "
        "distillation_alpha=a, distillation_add_tail=True)`",
        "the same with `TopK(ids, log_p, \"bucket\")` in the teacher's place, `ids = "
        "s.detach().topk(k).indices`, `log_p = t.log_softmax(-1).gather(-1, ids)`; from hidden "
        "states `TopK.of(h.detach(), w, k).ids` and `log_probs(h_t, w_t, ids)`; without a tail "
        '`"renormalise"`',
        of_logits, of_top_k, our_top_k,
        sdpo("topk", distillation_topk=20, distillation_alpha=0.3, distillation_add_tail=True),
    )  # fmt: skip
    yield Row(
        "TRL SDPO", "`compute_sampled_token_self_distillation_loss(h @ w.T, h_t @ w_t.T, ids, "
        "distillation_alpha=1.0)`",
        "`lp = log_probs(h, w, ids)`, `(lp - log_probs(h_t, w_t, ids)).detach() * lp`",
        of_states, of_sampled, our_sampled,
        lambda h, w, h_t, w_t, ids, **_: sdpo(
            "sampled_token", completion_ids=ids, distillation_alpha=1.0
        )(h @ w.T, h_t @ w_t.T),
    )  # fmt: skip
    yield Row(
        "TRL SDPO", "`apply_importance_sampling_clipping(losses, lp, old, clip)` of reverse KL",
        '`linear_soft_target_loss(h, w, h_t, w_t, divergence="reverse_kl", '
        "ratio=ImportanceRatio(ids, old, at_most=clip))`",
        of_states, of_clipped, our_clipped, trl_clipped,
    )  # fmt: skip


def rows() -> list[Row]:
    return [*speculators(), *specforge(), *trl()]


def measured(case: Case, seconds: float = 0.5, least: int = 5) -> dict[str, Any]:
    """Each provider's median time, times over the first provider's, peak memory and errors."""
    group = Group(case, list(case.providers))
    group.time(seconds, least)
    if group.refused:
        raise ValueError(f"{case.title}: {group.refused}")
    first = group.samples[REFERENCE]
    return {
        name: {
            "ms": 1e3 * quartiles(times)["median"],
            "ratio": quartiles([x / y for x, y in zip(times, first, strict=True)]),
            **group.info[name],
        }
        for name, times in group.samples.items()
    }


def cost(found: dict[str, Any]) -> str:
    return f"{milliseconds(found)} ms, {found['peak_bytes'] / 2**20:.3g} MiB"


def table(result: dict[str, Any]) -> str:
    """Markdown table of all rows, with a line about the machine."""
    where = result["where"]
    lines = ["| other package | fastkd | theirs | ours |", "|---|---|---:|---:|"]
    for row in rows():
        found = result["rows"][row.case.title]
        cells = [cost(found[name]) for name in (THEIRS, OURS)]
        lines.append(f"| {row.package} {row.theirs} | {row.ours} | {cells[0]} | {cells[1]} |")
    machine, versions = where["machine"], where["versions"]
    about = (
        "Forward and backward of 256 positions in float32: 32,768 tokens (8,192 of a compact "
        "teacher's draft), hidden states of 256. Medians of interleaved rounds, and the peak of "
        f"what a step allocates. {machine['cpu']}, threads: {machine['threads']}; torch "
        f"{versions['torch']}, TRL {versions.get('trl', 'missing')}; commit {where['commit']}."
    )
    return "\n".join([*lines, "", about])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write the table without measuring")
    where = describe(DEVICE)
    file = FOLDER / f"{where['machine']['name']}.json"
    if not parser.parse_args().page:
        result = {
            "where": where,
            "rows": {x.case.title: measured(x.case) for x in rows()},
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n")
    result = json.loads(file.read_text())
    marks = "<!-- other packages -->", "<!-- end -->"
    PAGE.write_text(fill(PAGE.read_text(), table(result), *marks))


if __name__ == "__main__":
    main()
