"""Options of draft models and on-policy students beside the same call without them.

A group's first call is the one that the others are compared with, in the same rounds.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastkd import (
    CrossEntropy,
    Divergence,
    ImportanceRatio,
    TopK,
    linear_soft_target_loss,
    soft_target_loss,
)

from .case import REFERENCE, Bound, Case, Provider, leaves_of
from .features import labels
from .test_heads import make_linear
from .test_soft_targets import make, make_top_k

SHARE = 4  # positions of a teacher row, and tokens of the vocabulary for one of the draft's
TERMS = ("total_variation", "teacher_entropy", "log_prob", "teacher_log_prob")


class Forward(Bound):
    """A provider whose step runs the forward pass alone, without gradients."""

    def step(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        with torch.no_grad():
            return self.forward(), ()


@dataclass(frozen=True)
class Option:
    """A call of the group's inputs; ``at_most``: bound of its time over the first call's."""

    name: str
    call: Callable[..., Tensor]
    at_most: float | None = None


@dataclass(frozen=True)
class Group:
    """Calls on the same inputs, timed together."""

    title: str
    sizes: dict[str, int]
    make: Callable[..., dict[str, Any]]
    options: tuple[Option, ...]
    bound: type[Bound] = Bound

    @property
    def case(self) -> Case:
        return Case(
            loss="draft options", title=self.title, set="cpu", sizes=self.sizes,
            dtype=torch.float32, make=self.make,
            providers=tuple(
                Provider(REFERENCE if i == 0 else option.name, self.bind(option.call),
                         own_objective=True)
                for i, option in enumerate(self.options)
            ),
            bytes_moved=0, operations=0,
        )  # fmt: skip

    def bind(self, call: Callable[..., Tensor]) -> Callable[[dict[str, Any]], Bound]:
        return lambda inputs: self.bound(lambda: call(**inputs), leaves_of(inputs))


def make_states(*, rows: int, D: int, V: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Hidden states and heads, and what the options take."""
    inputs: dict[str, Any] = make_linear(rows=rows, Ds=D, Dt=D, V=V, device=device, dtype=dtype)
    ids = labels(rows, V, device=device, seed=4)
    old = torch.full((rows,), -3.0, device=device)
    return inputs | {
        "weights": torch.linspace(-1, 1, rows, device=device),
        "rows": torch.arange(rows, device=device),
        "ratio": ImportanceRatio(ids, old, at_most=2.0),
        "ids": ids,
    }


def make_shared(*, rows: int, **sizes: Any) -> Any:
    """Hidden states of ``SHARE`` positions for each teacher row."""
    inputs = make_states(rows=rows, **sizes)
    inputs["teacher_hidden"] = inputs["teacher_hidden"][: rows // SHARE].clone()
    return inputs | {"rows": inputs["rows"] // SHARE}


def make_drafts(*, V: int, **sizes: Any) -> Any:
    """A student whose head has every ``SHARE``-th token."""
    inputs = make_states(V=V, **sizes)
    drafts = torch.arange(0, V, SHARE, device=inputs["rows"].device)
    part = inputs["teacher_head"][drafts]
    head = inputs["student_head"].detach()[drafts].clone().requires_grad_()
    return inputs | {"student_head": head, "drafts": drafts, "part": part}


def make_logits(*, K: int, rows: int, V: int, **types: Any) -> Any:
    inputs = make_top_k(rows=rows, V=V, K=K, **types) | make(rows=rows, V=V, **types)
    return inputs | {"weights": torch.linspace(-1, 1, rows, device=types["device"])}


def states(*names: str, **options: Any) -> Callable[..., Tensor]:
    """`linear_soft_target_loss` with the inputs of these names and with ``options``."""

    def call(student_hidden, student_head, teacher_hidden, teacher_head, **inputs):
        heads = student_hidden, student_head, teacher_hidden, teacher_head
        return linear_soft_target_loss(*heads, **{name: inputs[name] for name in names}, **options)

    return call


def labelled(weighted: bool = False, **options: Any) -> Callable[..., Tensor]:
    """The same with cross-entropy; terms are left out of the value."""

    def call(student_hidden, student_head, teacher_hidden, teacher_head, ids, weights, **_):
        heads = student_hidden, student_head, teacher_hidden, teacher_head
        task = CrossEntropy(ids, 0.5, weights=weights if weighted else None)
        found = linear_soft_target_loss(*heads, task=task, **options)
        return found[0] if options else found

    return call


def separate(student_hidden, student_head, teacher_hidden, teacher_head, **_) -> Tensor:
    """A call for each of a teacher row's positions."""
    parts = student_hidden.view(-1, SHARE, student_hidden.shape[-1]).unbind(1)
    losses = [linear_soft_target_loss(x, student_head, teacher_hidden, teacher_head) for x in parts]
    return torch.stack(losses).mean()


def drafts(mass: str | None) -> Callable[..., Tensor]:
    """The draft vocabulary with a teacher's mass, or the same head gathered before the call."""

    def call(student_hidden, student_head, teacher_hidden, teacher_head, drafts, part, **_):
        if mass is None:
            return linear_soft_target_loss(student_hidden, student_head, teacher_hidden, part)
        return linear_soft_target_loss(
            student_hidden, student_head, teacher_hidden, teacher_head, draft_vocabulary=drafts,
            teacher_mass=mass,
        )  # fmt: skip

    return call


def logits(*names: str, **options: Any) -> Callable[..., Tensor]:
    """`soft_target_loss` with the inputs of these names and with ``options``."""

    def call(student_logits, teacher_logits, **inputs):
        given = {name: inputs[name] for name in names}
        return soft_target_loss(student_logits, teacher_logits, **given, **options)

    return call


def top_k(tail: str) -> Callable[..., Tensor]:
    return lambda student_logits, ids, log_probs, **_: soft_target_loss(
        student_logits, TopK(ids, log_probs, tail)
    )


def groups() -> list[Group]:
    sizes = {"rows": 256, "D": 256, "V": 32768}
    plain = Option("`linear_soft_target_loss(h, w, h_t, w_t)`", states())
    with_labels = Option("the same with `task=CrossEntropy(labels)`", labelled())
    four = Option("four calls of 64 positions", separate)
    rows = Option("one with `rows`", states("rows"), 0.65)
    by_row = functools.partial(Group, make=make_shared, options=(four, rows))
    part = Option("the same with heads of a quarter of the tokens", drafts(None))
    kl = Option("`soft_target_loss(s, t)`", logits())
    names = "total_variation", "negative_log_acceptance", "lk"
    tails = [Option(f'`TopK(ids, log_probs, "{x}")` of 64', top_k(x), 1.0)
             for x in ("bucket", "renormalise")]  # fmt: skip
    return [
        Group("hidden states", sizes, make_states, (
            plain, Option("`weights`", states("weights"), 1.05),
            Option("`rows`, one position a row", states("rows"), 1.05),
            Option("`ratio`", states("ratio"), 1.05),
        )),
        Group("hidden states and labels", sizes, make_states, (
            with_labels, Option("`CrossEntropy(weights=)`", labelled(weighted=True), 1.05),
            Option("`return_terms=True`", labelled(return_terms=True), 1.05),
            Option("`return_terms` of the other four", labelled(return_terms=TERMS), 1.05),
        )),
        by_row("a teacher row for four positions, forward", sizes, bound=Forward),
        by_row("a teacher row for four positions", sizes),
        Group("draft vocabulary", sizes | {"rows": 1024}, make_drafts, (
            part, Option("`draft_vocabulary`", drafts("renormalised"), 1.05),
            Option('with `teacher_mass="whole"`', drafts("whole")),
        )),
        Group("draft vocabulary, few positions", sizes, make_drafts, (
            part, Option("`draft_vocabulary`", drafts("renormalised")),
        )),
        Group("logits", {"rows": 256, "V": 32768, "K": 64}, make_logits, (
            kl, Option("`weights`", logits("weights"), 1.05),
            *(Option(f'`Divergence("{x}")`', logits(divergence=Divergence(x)), 1.15)
              for x in names), *tails,
        )),
        Group("few logits", {"rows": 32, "V": 32768, "K": 64}, make_logits, (kl, *tails)),
    ]  # fmt: skip
