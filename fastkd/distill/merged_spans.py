"""Losses on spans of text that two tokenizers split into different numbers of tokens."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastkd._core import check
from fastkd._core.numerics import upcast
from fastkd.lm.heads import Head, as_head
from fastkd.lm.linear_soft_targets import CHUNK_BYTES
from fastkd.lm.log_probs import log_probs
from fastkd.lm.reference import sorted_distance
from fastkd.lm.vocabulary_match import VocabularyMatch

__all__ = ["merged_span_loss", "span_likelihood_loss"]

Kept = Literal["first", "last"]
LEAST = 1e-8  # probability, as in TRL's GOLD


def merged_span_loss(  # noqa: PLR0913 - a public loss
    student_hidden: Tensor,
    student_head: Tensor | Head,
    teacher_hidden: Tensor,
    teacher_head: Tensor | Head,
    *,
    student_ids: Tensor,
    teacher_ids: Tensor,
    student_spans: Tensor,
    teacher_spans: Tensor,
    vocabulary: VocabularyMatch | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    kept: Kept = "first",
    chunk_bytes: int | None = None,
) -> Tensor:
    """Distance between the merged distributions of spans, as in TRL's GOLD trainer.

    A span of several tokens has the distribution of its first token times the probabilities of its
    other tokens: P_s for the student, P_t for the teacher, not normalised. The distance of a span
    is Σ_k |sorted(P_s)_k − sorted(P_t)_k|, the shorter padded with zeros (ULD, Boizard et al.
    2024). With a match of n tokens it is w·JS + (1 − w)·U, w = n / V_t: U is that sum over the
    unmatched tokens (0 if either side has none), and JS = Σ β·P_t·log(P_t/m) +
    (1 − β)·P_s·log(P_s/m) over the matched ones, m = β·P_t + (1 − β)·P_s. Probabilities in
    products and logarithms are at least 1e-8.

    Computed for a few spans at a time: at most ``chunk_bytes`` of (spans, V) probabilities are in
    memory, and the backward pass computes them again.

    Args:
        student_hidden: (B, N, Ds); row n predicts with token n, as GOLD's "observed" strategy
            reads it. For predictions of token n itself ("bayesian") pass the states before it.
        student_head: weight (V_s, Ds) or `fastkd.Head`.
        teacher_hidden: (B, M, Dt), without grad.
        teacher_head: weight (V_t, Dt) or `fastkd.Head`, without grad.
        student_ids, teacher_ids: (B, N) and (B, M) int64, the tokens.
        student_spans, teacher_spans: (B, N) and (B, M), span numbers from `align_spans` or
            `TwoTokenizers`; −1 for tokens that aren't compared, whose states and ids have no
            effect.
        vocabulary: matched tokens, or None for none.
        beta: β of the matched tokens, 0 to 1.
        temperature: of both distributions.
        kept: "first", or "last": the distribution of the span's last token times the
            probabilities of the tokens before it.
        chunk_bytes: by default 64 MiB on the CPU and 2 GiB on a GPU.

    Returns:
        (), float32 (float64 for float64): the mean over the spans of each text, then over texts. A
        text without a shared span has a loss of 0.

    Raises:
        ValueError, TypeError: a wrong shape, dtype or number, a teacher with gradient, or a match
            of other vocabularies.

    >>> states, head = torch.zeros(1, 2, 3), torch.zeros(4, 3)
    >>> spans = {"student_spans": torch.tensor([[0, 0]]), "teacher_spans": torch.tensor([[0]])}
    >>> ids = {"student_ids": torch.tensor([[1, 2]]), "teacher_ids": torch.tensor([[3]])}
    >>> merged_span_loss(states, head, states[:, :1], head, **ids, **spans)  # 4 · |1/16 − 1/4|
    tensor(0.7500)
    """
    student, teacher = as_head("student_head", student_head), as_head("teacher_head", teacher_head)
    if vocabulary is not None and not isinstance(vocabulary, VocabularyMatch):
        raise TypeError(f"vocabulary must be a VocabularyMatch, got {type(vocabulary).__name__}")
    sides = (
        ("student", student_hidden, student, student_ids, student_spans),
        ("teacher", teacher_hidden, teacher, teacher_ids, teacher_spans),
    )
    for side, hidden, head, ids, spans in sides:
        check.floating(f"{side}_hidden", hidden, 3)
        for name, x in (("ids", ids), ("spans", spans)):
            check.shape(f"{side}_{name}", x, hidden.shape[:2], f"the tokens of {side}_hidden")
            check.integers(f"{side}_{name}", x)
        if vocabulary is not None and len(head.weight) != getattr(vocabulary, f"{side}_size"):
            raise ValueError(
                f"vocabulary has {side}_size {getattr(vocabulary, f'{side}_size')} but "
                f"{side}_head has {len(head.weight)} entries; pass the match of these heads"
            )
    check.no_grad("teacher_hidden", teacher_hidden)
    for x in teacher.tensors:
        check.no_grad("teacher_head", x)
    check.fraction("beta", beta)
    check.number("temperature", temperature, above=0)
    temperature = float(temperature)
    check.choice("kept", kept, get_args(Kept))
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES[int(student_hidden.is_cuda)]
    check.positive_int("chunk_bytes", chunk_bytes)

    groups, texts = _shared_spans(student_spans, teacher_spans)
    rows, factors = [], []
    for (_, hidden, head, ids, spans), group in zip(sides, groups, strict=True):
        hidden = hidden.where(spans[..., None] >= 0, 0)
        ids = ids.masked_fill(spans < 0, 0)
        own = log_probs(hidden, head, ids, temperature=temperature).flatten()
        row, others = _kept_rows(group, len(texts), kept)
        own = own.clamp(min=math.log(LEAST)).where(others, 0)
        # One more entry collects the tokens without a span.
        total = own.new_zeros(len(texts) + 1).index_add(0, group, own)
        rows.append(hidden.flatten(0, 1)[row])
        factors.append(total[:-1])

    def distances(states: Tensor, factor: Tensor, states_t: Tensor, factor_t: Tensor) -> Tensor:
        both = (student, states, factor), (teacher, states_t, factor_t)
        P_s, P_t = (
            (upcast(head.logits(x)) / temperature).softmax(-1) * log_factor.exp()[:, None]
            for head, x, log_factor in both
        )
        return _distances(P_s, P_t, vocabulary, beta)

    columns = len(student.weight) + len(teacher.weight)
    step = max(chunk_bytes // (columns * factors[0].element_size()), 1)
    parts = (x.split(step) for x in (rows[0], factors[0], rows[1], factors[1]))
    values = [
        checkpoint(distances, *part, use_reentrant=False) for part in zip(*parts, strict=True)
    ]
    B = len(student_spans)
    counts = torch.bincount(texts, minlength=B).clamp(min=1)
    each = torch.cat(values) / counts[texts]
    return each.sum() / max(B, 1)


def _shared_spans(student: Tensor, teacher: Tensor) -> tuple[list[Tensor], Tensor]:
    """Groups (B·N,) and (B·M,) of the tokens, and the text (G,) of each group.

    A group is a span that both sides have; tokens of no group have the number G.
    """
    B = len(student)
    S = max(int(x.max()) + 1 if x.numel() else 0 for x in (student, teacher))
    present = []
    for x in (student, teacher):
        found = torch.zeros(B, S + 1, dtype=torch.bool, device=x.device)
        present.append(found.scatter_(1, x.masked_fill(x < 0, S), True)[:, :S])
    shared = present[0] & present[1].to(student.device)
    texts = shared.nonzero()[:, 0]
    numbers = torch.full((B, S + 1), len(texts), device=student.device)
    numbers[:, :S][shared] = torch.arange(len(texts), device=student.device)
    return [
        numbers.to(x.device).gather(1, x.masked_fill(x < 0, S)).flatten()
        for x in (student, teacher)
    ], texts


def _kept_rows(group: Tensor, count: int, kept: Kept) -> tuple[Tensor, Tensor]:
    """Each group's row (G,) whose distribution is kept, and the mask of all other tokens."""
    places = torch.arange(len(group), device=group.device)
    row = places.new_zeros(count + 1)
    row.scatter_reduce_(0, group, places, "amin" if kept == "first" else "amax", include_self=False)
    return row[:-1], places != row[group]


def _distances(P_s: Tensor, P_t: Tensor, match: VocabularyMatch | None, beta: float) -> Tensor:
    """Distances (R,) of merged probabilities (R, V_s) and (R, V_t)."""
    if match is None:
        return sorted_distance(P_s, P_t)
    _, ours, theirs = match.columns(P_s.device)
    ids = match.student_ids.to(P_s.device), match.teacher_ids.to(P_s.device)
    log_s, log_t = (P[:, i].clamp(min=LEAST).log() for P, i in zip((P_s, P_t), ids, strict=True))
    if beta in (0, 1):
        p, q = (log_t, log_s) if beta == 0 else (log_s, log_t)
        js = (p.exp() * (p - q)).sum(-1)
    else:
        log_m = torch.logaddexp(log_s + math.log1p(-beta), log_t + math.log(beta))
        js = beta * (log_t.exp() * (log_t - log_m)).sum(-1)
        js = js + (1 - beta) * (log_s.exp() * (log_s - log_m)).sum(-1)
    weight = len(ids[0]) / match.teacher_size
    if not (len(ours) and len(theirs)):
        return weight * js
    return weight * js + (1 - weight) * sorted_distance(P_s[:, ours], P_t[:, theirs])


def span_likelihood_loss(
    student_log_probs: Tensor,
    teacher_log_probs: Tensor,
    student_spans: Tensor,
    teacher_spans: Tensor,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """Divergence of the spans' likelihoods alone, whatever the vocabularies.

    With ℓ the sum of a span's log-probabilities and p = exp(ℓ/τ), the divergence of a span is
    p_t·log(p_t/p_s) + (1 − p_t)·log((1 − p_t)/(1 − p_s)) (approximate likelihood matching,
    Minixhofer et al. 2025).

    Args:
        student_log_probs: (B, N), log-probabilities of the student's tokens, for example by
            `fastkd.log_probs`.
        teacher_log_probs: (B, M), without grad.
        student_spans, teacher_spans: (B, N) and (B, M), as in `merged_span_loss`. Tokens of span
            −1 may have any log-probability, NaN too.
        temperature: τ > 0.

    Returns:
        (), float32 (float64 for float64): the mean over the spans of each text, then over texts.

    Raises:
        ValueError, TypeError: a wrong shape or dtype, or a teacher that requires grad.

    >>> one, two = torch.tensor([[-1.0]]), torch.tensor([[-0.5, -0.5]])
    >>> span_likelihood_loss(one, two, torch.tensor([[0]]), torch.tensor([[0, 0]]))
    tensor(0.)
    """
    sides = (
        ("student", student_log_probs, student_spans),
        ("teacher", teacher_log_probs, teacher_spans),
    )
    for side, x, spans in sides:
        check.floating(f"{side}_log_probs", x, 2)
        check.shape(f"{side}_spans", spans, x.shape, f"the tokens of {side}_log_probs")
        check.integers(f"{side}_spans", spans)
    check.no_grad("teacher_log_probs", teacher_log_probs)
    check.number("temperature", temperature, above=0)
    temperature = float(temperature)
    groups, texts = _shared_spans(student_spans, teacher_spans)
    totals = []
    for (_, x, spans), group in zip(sides, groups, strict=True):
        own = upcast(x).where(spans >= 0, 0).flatten()
        total = own.new_zeros(len(texts) + 1).index_add(0, group, own)[:-1] / temperature
        totals.append(total.clamp(max=-torch.finfo(total.dtype).eps))  # 1 − p stays above 0
    log_s, log_t = totals
    rest_s, rest_t = ((-torch.expm1(x)).log() for x in (log_s, log_t))
    each = log_t.exp() * (log_t - log_s) + rest_t.exp() * (rest_t - rest_s)
    counts = torch.bincount(texts, minlength=len(student_spans)).clamp(min=1)
    return (each / counts[texts]).sum() / max(len(student_spans), 1)
