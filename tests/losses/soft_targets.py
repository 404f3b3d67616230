"""Soft targets: `soft_targets`, `of_top_k` and `divergence_with_coefficient`, the oracles.

`RANDOM` calls are held against them; `subjects` that keep every promise.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastkd
from fastkd import Divergence
from fastkd._core.products import multiplied_in_half
from fastkd.lm.divergences import NAMES
from fastkd.lm.soft_targets import DIVERGENCES, REDUCTIONS
from fastkd.lm.targets import OF_WHOLE_MASS
from tests.support.draw import SIZES, Case, Draw
from tests.support.oracles import rounded_gradient
from tests.support.subject import D_S, D_T, B, Subject, of_module


def soft_targets(student, teacher, temperature, divergence, working=torch.float64) -> Tensor:
    """The divergence of each row of logits, without τ².

    A probability that ``working`` can't hold is 0, and weighs nothing even against an infinity.
    """
    log_s, log_t, log_m = _log_probabilities(student, teacher, temperature)
    p_s, p_t = (_held(x / temperature, working) for x in (student, teacher))
    if isinstance(divergence, Divergence):
        return divergence_with_coefficient(p_s, p_t, log_s, log_t, divergence)
    if divergence == "js":
        return (_kl(p_t, log_t, log_m) + _kl(p_s, log_s, log_m)) / 2
    forward, reverse = _kl(p_t, log_t, log_s), _kl(p_s, log_s, log_t)
    if divergence == "forward_kl":
        return forward
    if divergence == "reverse_kl":
        return reverse
    weights = [
        _head_weight(s, t)
        for s, t in zip(p_s.detach().flatten(0, -2), p_t.flatten(0, -2), strict=True)
    ]
    w = torch.tensor(weights, dtype=student.dtype).reshape(student.shape[:-1])
    return torch.where(w == 0, 0, w * forward) + torch.where(w == 1, 0, (1 - w) * reverse)


def divergence_with_coefficient(p_s, p_t, log_s, log_t, divergence: Divergence) -> Tensor:
    def log_mixture(p: Tensor, q: Tensor, share: float) -> Tensor:
        m = share * p + (1 - share) * q
        return torch.where(m == 0, -torch.inf, torch.where(m == 0, 1, m).log())

    forward, reverse = _kl(p_t, log_t, log_s), _kl(p_s, log_s, log_t)
    if divergence.name == "js":
        beta = divergence.beta
        log_m = log_mixture(p_t, p_s, beta)
        return beta * _kl(p_t, log_t, log_m) + (1 - beta) * _kl(p_s, log_s, log_m)
    if divergence.name == "skew_kl":
        return _kl(p_t, log_t, log_mixture(p_t, p_s, divergence.skew))
    if divergence.name == "skew_reverse_kl":
        return _kl(p_s, log_s, log_mixture(p_s, p_t, divergence.skew))
    if divergence.name == "total_variation":
        return (p_t - p_s).abs().sum(-1) / 2
    if divergence.name in ("negative_log_acceptance", "lk"):
        accepted = torch.minimum(p_t, p_s).sum(-1)
        if divergence.name == "lk":
            share = torch.exp(-divergence.rate * accepted.detach())
            return share * forward + (1 - share) * (1 - accepted)
        return -torch.where(accepted == 0, 1, accepted).log()
    return divergence.mix * forward + (1 - divergence.mix) * reverse


def of_top_k(student: Tensor, ids: Tensor, log_probs: Tensor, tail: str, temperature, divergence):
    """The divergence over the k tokens, optionally with a bucket of all other tokens."""
    p_s, p_t = (student / temperature).softmax(-1), log_probs.double().exp()
    of_words = p_s[torch.arange(len(ids))[:, None], ids]
    if tail == "bucket":
        rest = p_s.scatter(-1, ids, 0).sum(-1, keepdim=True)
        # Half a unit in the last place of the sum, and of each stored logarithm.
        eps = torch.finfo(log_probs.dtype).eps
        hidden = (min(eps, 2**-23) - eps * (p_t * p_t.log()).sum(-1, keepdim=True)) / 2
        of_teacher = torch.maximum(1 - p_t.sum(-1, keepdim=True), hidden)
        if ids.shape[-1] == student.shape[-1]:
            of_teacher = 0 * of_teacher
        of_words, p_t = torch.cat([of_words, rest], -1), torch.cat([p_t, of_teacher], -1)
    q_s, q_t = (p / p.sum(-1, keepdim=True) for p in (of_words, p_t))
    logs = (torch.where(q == 0, -torch.inf, torch.where(q == 0, 1, q).log()) for q in (q_s, q_t))
    if isinstance(divergence, Divergence):
        return divergence_with_coefficient(q_s, q_t, *logs, divergence)
    return soft_targets(*logs, 1.0, divergence)


def of_match(student: Tensor, teacher: Tensor, match, unmatched: str, temperature, divergence):
    """The divergence of each row over the matched tokens, and the unmatched ones' outcome."""
    p_s, p_t = ((z / temperature).softmax(-1) for z in (student, teacher))
    pairs = sorted(zip(match.student_ids.tolist(), match.teacher_ids.tolist(), strict=True))
    q_s, q_t = (
        p[:, list(ids)] for p, ids in zip((p_s, p_t), zip(*pairs, strict=True), strict=True)
    )
    rest = [
        p[:, [i for i in range(p.shape[-1]) if i not in ids]]
        for p, ids in ((p_s, match.student_ids.tolist()), (p_t, match.teacher_ids.tolist()))
    ]
    if unmatched == "renormalise":
        q_s, q_t = (q / q.sum(-1, keepdim=True) for q in (q_s, q_t))
    else:
        q_s, q_t = (
            torch.cat([q, x.sum(-1, keepdim=True)], -1)
            for q, x in zip((q_s, q_t), rest, strict=True)
        )
    logs = [torch.where(q == 0, -torch.inf, torch.where(q == 0, 1, q).log()) for q in (q_s, q_t)]
    if isinstance(divergence, Divergence):
        value = divergence_with_coefficient(q_s, q_t, *logs, divergence)
    else:
        value = soft_targets(*logs, 1.0, divergence)
    if unmatched == "sorted" and all(x.shape[-1] for x in rest):
        longest = max(x.shape[-1] for x in rest)
        s, t = (
            torch.nn.functional.pad(
                x.sort(dim=-1, descending=True, stable=True)[0], (0, longest - x.shape[-1])
            )
            for x in rest
        )
        value = value + (s - t).abs().sum(-1)
    return value


def _log_probabilities(student: Tensor, teacher: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Log-probabilities of student, teacher and their mixture."""
    log_s, log_t = ((x / temperature).log_softmax(-1) for x in (student, teacher))
    m = (log_s.exp() + log_t.exp()) / 2
    return log_s, log_t, torch.where(m == 0, 0, torch.where(m == 0, 1, m).log())


def _held(z: Tensor, working: torch.dtype) -> Tensor:
    """Distribution of logits; probabilities that ``working`` rounds to 0 are 0."""
    return z.masked_fill(z.softmax(-1).to(working) == 0, -torch.inf).softmax(-1)


def nearly_held(student: Tensor, teacher: Tensor, temperature: float, working) -> Tensor:
    """Rows with a probability that is subnormal or 0 in ``working`` where the other is infinite.

    In exact numbers the divergence is infinite, and in those that round the probability to 0 it is
    not; the kernels round it a part at a time.
    """
    unsure = torch.zeros(student.shape[:-1], dtype=torch.bool)
    for x, other in ((student, teacher), (teacher, student)):
        p = (x.double() / temperature).softmax(-1)
        small = (p > 0) & (p < torch.finfo(working).tiny)
        unsure |= (small & (other == -torch.inf)).any(-1)
    return unsure


def gradient_terms(student, teacher, temperature, divergence) -> Tensor:
    """Size of the two terms whose difference is a row's gradient, without τ².

    A student that is sure of a word has a gradient p (log p/q − KL) of nearly 0 there, but a
    rounding of the two logarithms makes one of their size.
    """
    log_s, log_t, log_m = _log_probabilities(student, teacher, temperature)
    p_s, p_t = log_s.exp(), log_t.exp()
    ratio = (log_s - (log_m if divergence == "js" else log_t)).nan_to_num(0, 0, 0)
    weighed, plain = (p_s * ratio).abs().sum(-1), p_s.norm(dim=-1) + p_t.norm(dim=-1)
    terms = {"forward_kl": plain, "adaptive_kl": plain + 2 * weighed}
    return terms.get(divergence, 2 * weighed) / temperature


def _head_weight(p_s: Tensor, p_t: Tensor) -> float:
    """g_head / (g_head + g_tail); the head is the most probable entries up to a mass of ½."""
    head, mass = 0.0, 0.0
    gap = (p_t - p_s).abs()
    for place, i in enumerate(p_t.argsort(descending=True, stable=True).tolist()):
        mass += p_t[i].item()
        if (
            place > 0 and mass > 0.5 + 1e-12
        ):  # half of the equal tokens has probability ½, up to rounding
            break
        head += gap[i].item()
    return head / gap.sum().item() if gap.sum() > 0 else 0.5


def _kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    return (p * (log_p - log_q).masked_fill(p == 0, 0)).sum(-1)


def random_soft_targets(draw: Draw) -> Case:
    shape, V = (draw.size(zero=True),), draw.pick([*SIZES, 1030])
    options = {
        "temperature": draw.pick([1.0, 2.5, 100.0]),
        "divergence": draw.pick(DIVERGENCES),
    }
    reduction, t2 = draw.pick(REDUCTIONS), draw.chance(0.5)
    denominator = None
    if reduction == "batchmean" and draw.chance(0.5):
        denominator = draw.pick([3, 2.5, torch.tensor(3.0), torch.tensor(7, dtype=torch.float64)])
    mask = draw.mask(*shape)
    student, teacher = (draw.features(*shape, V, scales=(0.01, 100.0)) for _ in range(2))
    if draw.chance(0.2) and V > 2:  # entries that are invalid for both distributions, or for one
        for side in (student, teacher) if draw.chance(0.7) else (draw.pick([student, teacher]),):
            side[..., 0] = -torch.inf
    factor = options["temperature"] ** 2 if t2 else 1.0
    weights = draw.normal(*shape) if draw.chance(0.3) else None
    factors = factor if weights is None else factor * weights
    working = torch.float64 if draw.dtype == torch.float64 else torch.float32
    count = 1
    if reduction == "batchmean":
        count = mask.sum().clamp_min(1) if denominator is None else denominator

    def oracle(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        sides = (torch.where(mask[..., None], z, 0) for z in (student_logits, teacher_logits))
        rows = soft_targets(*sides, **options, working=working) * factors
        rows = torch.where(mask, rows, 0)
        return rows if reduction == "none" else rows.sum() / count

    common = {**options, "reduction": reduction, "scale_by_t2": t2, "backend": draw.backend}
    rest = {"denominator": denominator, "weights": weights}
    call = functools.partial(fastkd.soft_target_loss, **common, **rest)
    if draw.chance(0.5):
        call = functools.partial(fastkd.SoftTargetLoss(**common), **rest)
    finite = torch.cat([x[x.isfinite()].flatten() for x in (student, teacher)])
    largest = 1 + finite.double().abs().max().item() if finite.numel() else 1.0
    most = 1 + weights.abs().max().item() if weights is not None and weights.numel() else 1.0
    return Case(
        call,
        oracle,
        {"student_logits": student},
        {"teacher_logits": teacher},
        {"mask": draw.mask_argument(mask)},
        scale=factor * largest * most,
        mask=mask,
        slope=lambda x: gradient_terms(x, teacher.double(), **options) * mask / (largest * count),
        unsure=nearly_held(student, teacher, options["temperature"], working) & mask,
    )


def cross_entropies(logits, labels, smoothing, z_loss, weights) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row, and the gradient of their weighted sum, by torch's function."""
    z = logits.detach().clone().requires_grad_()
    value = F.cross_entropy(z, labels, reduction="none", label_smoothing=smoothing)
    value = value + z_loss * z.logsumexp(-1).square() if z_loss else value
    return value.detach(), torch.autograd.grad(value, z, weights.to(z))[0]


def _any_divergence(draw: Draw) -> str | Divergence:
    share = draw.pick([0.1, 0.3, 0.5, 0.9])
    plain = ["forward_kl", "reverse_kl", "js"]
    names = [name for name in NAMES if name not in (*plain[:2], "adaptive_kl")]
    objects = [Divergence(name, beta=share, skew=share, mix=share, rate=share) for name in names]
    return draw.pick([*plain, *objects])


def product(draw: Draw, hidden: Tensor, weight: Tensor) -> Tensor:
    """A head's product; its gradient is rounded if the loss multiplies in half precision."""
    logits = hidden @ weight.mT
    in_half = multiplied_in_half(torch.empty(0, dtype=draw.dtype))
    return rounded_gradient(logits, draw.dtype) if in_half else logits


def case_of_heads(
    draw: Draw,
    call: Callable[..., Tensor],
    oracle: Callable[..., Tensor],
    learning: dict[str, Tensor],
    given: dict[str, Tensor],
    mask: Tensor,
) -> Case:
    """A call with hidden states and heads of student and teacher."""
    largest = max(x.double().norm() for x in (*learning.values(), *given.values()))
    return Case(
        call,
        oracle,
        learning,
        given,
        {"mask": draw.mask_argument(mask)},
        scale=10.0,
        mask=mask,
        masked=("student_hidden", "teacher_hidden"),
        slope=lambda x: x.new_full(x.shape[:1], 1 + float(largest)),
    )


def random_linear_soft_targets(draw: Draw) -> Case:
    R, V, D_s, D_t = draw.size(), draw.pick([2, 17, 64]), draw.size(), draw.size()
    n = draw.pick([V, max(V - 3, 1)])
    scale, cap = draw.pick([1.0, 0.5]), draw.pick([None, 4.0])
    options: dict[str, Any] = {"divergence": _any_divergence(draw), "scale_by_t2": False}
    options |= {"vocabulary": None if n == V else n, "backend": draw.backend}
    options |= {"chunk_bytes": draw.pick([None, 1, 3000]), "soft_weight": draw.pick([1.0, 0.3])}
    mask, labels = draw.mask(R), torch.randint(n, (R,), generator=draw.generator)
    labelled = draw.chance(0.5)
    weights, of_task = (draw.normal(R) if draw.chance(0.3) else None for _ in range(2))
    options["weights"] = weights
    if labelled:
        labels = labels.masked_fill(torch.rand(R, generator=draw.generator) < 0.2, -100)
        smoothing, z_loss = draw.pick([0.0, 0.1]), draw.pick([0.0, 0.01])
        mask_of_both = mask & (labels != -100)
        rest = {"label_smoothing": smoothing, "z_loss": z_loss, "weights": of_task}
        options["task"] = fastkd.CrossEntropy(labels, 0.7, **rest)
        options["soft_weight"] = draw.pick([0.0, options["soft_weight"]])
    else:
        mask_of_both = mask

    kept = mask.nonzero()[:, 0]
    if draw.chance(0.3) and len(kept):  # rows of the teacher that the mask doesn't fill with NaN
        rows_of = kept[torch.randint(len(kept), (R,), generator=draw.generator)]
        options["draft"] = fastkd.Draft(rows=rows_of)

    def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        z = scale * (product(draw, hidden, weight) + bias)[:, :n]
        return z if cap is None else cap * (z / cap).tanh()

    def oracle(
        student_hidden, student_head, student_bias, teacher_hidden, teacher_head, teacher_bias
    ):
        student = logits_of(student_hidden, student_head, student_bias)
        teacher = logits_of(teacher_hidden, teacher_head, teacher_bias)
        teacher = teacher[options["draft"].rows] if "draft" in options else teacher
        rows = options["soft_weight"] * soft_targets(student, teacher, 2.0, options["divergence"])
        rows = rows if weights is None else rows * weights
        if labelled:
            log_p = student.log_softmax(-1)
            right = log_p.gather(-1, labels.clamp_min(0)[:, None])[:, 0]
            task = -(1 - smoothing) * right - smoothing * log_p.mean(-1)
            task = task + z_loss * student.logsumexp(-1).square()
            rows = rows + 0.7 * (task if of_task is None else task * of_task)
        return torch.where(mask_of_both, rows, 0).sum() / mask_of_both.sum().clamp_min(1)

    def call(
        student_hidden, student_head, student_bias, teacher_hidden, teacher_head, teacher_bias, mask
    ):
        student = fastkd.Head(student_head, student_bias, scale, cap)
        teacher = fastkd.Head(teacher_head, teacher_bias, scale, cap)
        return fastkd.linear_soft_target_loss(
            student_hidden, student, teacher_hidden, teacher, mask=mask, temperature=2.0, **options
        )

    learning, given = (
        {
            f"{side}_hidden": draw.features(R, D, scales=(3.0,)),
            f"{side}_head": draw.features(V, D, scales=(2.0,)),
            f"{side}_bias": draw.laid_out(draw.normal(V).to(draw.dtype)),
        }
        for side, D in (("student", D_s), ("teacher", D_t))
    )
    return case_of_heads(draw, call, oracle, learning, given, mask)


def random_top_k(draw: Draw) -> Case:
    R, V = draw.size(), draw.pick([3, 17, 64])
    K = draw.pick([1, 2, V])
    tail, temperature = draw.pick(["bucket", "renormalise"]), draw.pick([1.0, 2.5])
    divergence, mask = _any_divergence(draw), draw.mask(R)
    log_probs, ids = (2 * draw.normal(R, V)).log_softmax(-1).topk(K)
    given = log_probs.to(draw.dtype)
    weights = draw.normal(R) if draw.chance(0.5) else None
    reduction = draw.pick(["batchmean", "none"])

    def oracle(student_logits: Tensor) -> Tensor:
        real = student_logits[mask], ids[mask], given[mask]
        of_real = of_top_k(*real, tail, temperature, divergence)
        rows = student_logits.new_zeros(R).masked_scatter(mask, of_real)
        rows = rows if weights is None else rows * weights
        return rows if reduction == "none" else rows.sum() / mask.sum().clamp_min(1)

    def call(student_logits: Tensor, mask: Tensor) -> Tensor:
        return fastkd.soft_target_loss(
            student_logits,
            fastkd.TopK(ids, given, tail),
            temperature=temperature,
            divergence=divergence,
            mask=mask,
            reduction=reduction,
            weights=weights,
            scale_by_t2=False,
            backend=draw.backend,
        )

    return Case(
        call,
        oracle,
        {"student_logits": draw.features(R, V, scales=(0.01, 5.0))},
        options={"mask": draw.mask_argument(mask)},
        scale=10.0,
        mask=mask,
        slope=lambda x: x.new_ones(x.shape[:1]),
    )


def _random_match(draw: Draw) -> tuple[fastkd.VocabularyMatch, str]:
    """Pairs of random ids; both vocabularies have unmatched tokens, so that no KL is infinite."""
    sizes = [draw.pick([2, 3, 17, 64]) for _ in range(2)]
    n = draw.pick([1, max((min(sizes)) // 2, 1), min(sizes) - 1])
    ids = (torch.randperm(size, generator=draw.generator)[:n] for size in sizes)
    return fastkd.VocabularyMatch(*ids, *sizes), draw.pick(["renormalise", "bucket", "sorted"])


def random_matched_tokens(draw: Draw) -> Case:
    match, unmatched = _random_match(draw)
    R, temperature, divergence = draw.size(zero=True), draw.pick([1.0, 2.5]), _any_divergence(draw)
    mask = draw.mask(R)

    def oracle(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        real = student_logits[mask], teacher_logits[mask]
        rows = of_match(*real, match, unmatched, temperature, divergence)
        return rows.sum() / mask.sum().clamp_min(1)

    return Case(
        functools.partial(
            fastkd.soft_target_loss,
            vocabulary=match,
            unmatched=unmatched,
            temperature=temperature,
            divergence=divergence,
            scale_by_t2=False,
            backend=draw.backend,
        ),
        oracle,
        {"student_logits": draw.features(R, match.student_size, scales=(0.5, 5.0))},
        {"teacher_logits": draw.features(R, match.teacher_size, scales=(0.5, 5.0))},
        {"mask": draw.mask_argument(mask)},
        scale=10.0,
        mask=mask,
        slope=lambda x: x.new_ones(x.shape[:1]),
    )


def random_matched_heads(draw: Draw) -> Case:
    match, unmatched = _random_match(draw)
    R, D_s, D_t = draw.size(), draw.size(), draw.size()
    mask, divergence = draw.mask(R), _any_divergence(draw)
    V = match.student_size
    labels = torch.randint(V, (R,), generator=draw.generator)
    chunk_bytes = draw.pick([None, 1, 3000])
    has_soft = draw.mask(R)

    def oracle(student_hidden, student_head, teacher_hidden, teacher_head):
        student = product(draw, student_hidden, student_head)
        teacher = product(draw, teacher_hidden, teacher_head)
        rows = student.new_zeros(R)
        both = mask & has_soft
        rows[both] = of_match(student[both], teacher[both], match, unmatched, 1.0, divergence)
        task = -student.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
        return torch.where(mask, 0.5 * rows + task, 0).sum() / mask.sum().clamp_min(1)

    def call(student_hidden, student_head, teacher_hidden, teacher_head, mask):
        return fastkd.linear_soft_target_loss(
            student_hidden,
            student_head,
            teacher_hidden,
            teacher_head,
            vocabulary=match,
            unmatched=unmatched,
            divergence=divergence,
            mask=mask,
            chunk_bytes=chunk_bytes,
            soft_weight=0.5,
            draft=fastkd.Draft(soft_mask=draw.mask_argument(has_soft)),
            task=fastkd.CrossEntropy(labels),
            backend=draw.backend,
        )

    learning, given = (
        {
            f"{side}_hidden": draw.features(R, D, scales=(1.0,)),
            f"{side}_head": draw.laid_out(draw.normal(size, D).to(draw.dtype)),  # no equal tokens
        }
        for side, D, size in (("student", D_s, V), ("teacher", D_t, match.teacher_size))
    )
    return case_of_heads(draw, call, oracle, learning, given, mask)


def of_whole_mass(student: Tensor, teacher: Tensor, ids: Tensor, temperature, name) -> Tensor:
    """Student over the tokens ``ids`` against the teacher's probabilities over all tokens."""
    log_t = (teacher / temperature).log_softmax(-1)[:, ids]
    log_s = (student / temperature).log_softmax(-1)
    p_s, p_t = log_s.exp(), log_t.exp()
    if name == "forward_kl":
        return _kl(p_t, log_t, log_s)
    if name == "reverse_kl":
        return _kl(p_s, log_s, log_t)
    if name == "total_variation":
        return ((p_t - p_s).abs().sum(-1) + 1 - p_t.sum(-1)) / 2
    return -torch.minimum(p_s, p_t).sum(-1).log()


def terms_at_1(student: Tensor, teacher: Tensor, ids: Tensor, labels: Tensor, mass: str) -> Tensor:
    """Sum of a row's terms that `random_drafts` returns, at temperature 1."""
    whole = teacher if mass == "whole" else teacher[:, ids]
    log_s, log_t = student.log_softmax(-1), whole.log_softmax(-1)
    entropy = -(log_t.exp() * log_t).sum(-1)
    log_t = log_t[:, ids] if mass == "whole" else log_t
    distance = ((log_t.exp() - log_s.exp()).abs().sum(-1) + 1 - log_t.exp().sum(-1)) / 2
    of_label = (log_s + log_t).gather(-1, labels[:, None])[:, 0]
    return (entropy + distance + of_label - (log_s.exp() * log_s).sum(-1)).detach()


TERMS_OF_DRAFTS = ("entropy", "total_variation", "teacher_entropy", "log_prob", "teacher_log_prob")


def random_drafts(draw: Draw) -> Case:
    """A student with a part of the vocabulary, and all that a position may have besides."""
    R, V, D_s, D_t = draw.size(), draw.pick([3, 17, 64]), draw.size(), draw.size()
    ids = torch.randperm(V, generator=draw.generator)[: draw.pick([1, 2, V])]
    mass, divergence = draw.pick(["renormalised", "whole"]), _any_divergence(draw)
    if mass == "whole":
        name = draw.pick(OF_WHOLE_MASS)
        divergence = name if name in DIVERGENCES else Divergence(name)
    mask, labels = draw.mask(R), torch.randint(len(ids), (R,), generator=draw.generator)
    weights = draw.normal(R) if draw.chance(0.5) else None
    old, at_most = -3 * draw.normal(R).abs(), draw.pick([0.5, 2.0])
    with_ratio, with_terms = draw.chance(0.5), draw.chance(0.5)
    kept = mask.nonzero()[:, 0]
    rows = None
    if draw.chance(0.5) and len(kept):  # rows of the teacher that the mask doesn't fill with NaN
        rows = kept[torch.randint(len(kept), (R,), generator=draw.generator)]
    soft_weight = draw.pick([1.0, 0.3])

    def oracle(student_hidden, student_head, teacher_hidden, teacher_head) -> Tensor:
        student = product(draw, student_hidden, student_head)
        teacher = product(draw, teacher_hidden, teacher_head)
        teacher = teacher if rows is None else teacher[rows]
        if mass == "whole":
            name = divergence if isinstance(divergence, str) else divergence.name
            losses = of_whole_mass(student, teacher, ids, 2.0, name)
        else:
            losses = soft_targets(student, teacher[:, ids], 2.0, divergence)
        losses = losses if weights is None else losses * weights
        if with_ratio:
            log_q = student.detach().log_softmax(-1).gather(-1, labels[:, None])[:, 0]
            losses = losses * (log_q - old).exp().clamp(max=at_most)
        log_q = student.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
        losses = soft_weight * losses - 0.7 * log_q
        if with_terms:
            losses = losses + terms_at_1(student, teacher, ids, labels, mass)
        return torch.where(mask, losses, 0).sum() / mask.sum().clamp_min(1)

    def call(student_hidden, student_head, teacher_hidden, teacher_head, mask) -> Tensor:
        loss, terms = fastkd.linear_soft_target_loss(
            student_hidden,
            student_head,
            teacher_hidden,
            teacher_head,
            mask=mask,
            temperature=2.0,
            scale_by_t2=False,
            divergence=divergence,
            draft=fastkd.Draft(ids, mass, rows=rows),
            weights=weights,
            ratio=fastkd.ImportanceRatio(labels, old, at_most=at_most) if with_ratio else None,
            soft_weight=soft_weight,
            task=fastkd.CrossEntropy(labels, 0.7),
            return_terms=TERMS_OF_DRAFTS,
            chunk_bytes=draw.pick([None, 1, 3000]),
            backend=draw.backend,
        )
        return loss + sum(terms.values()) if with_terms else loss

    learning, given = (
        {
            f"{side}_hidden": draw.features(R, D, scales=(3.0,)),
            f"{side}_head": draw.features(tokens, D, scales=(2.0,)),
        }
        for side, D, tokens in (("student", D_s, len(ids)), ("teacher", D_t, V))
    )
    return case_of_heads(draw, call, oracle, learning, given, mask)


RANDOM = {
    "drafts": random_drafts,
    "matched_tokens": random_matched_tokens,
    "matched_heads": random_matched_heads,
    "soft_targets": random_soft_targets,
    "linear_soft_targets": random_linear_soft_targets,
    "top_k": random_top_k,
}


def subjects(backend: str) -> Iterator[Subject]:
    def first_two(x: Any) -> Any:
        return x[:2] if isinstance(x, Tensor) and not x.is_sparse and len(x) == B else x

    def call(s: Tensor, t: Tensor, m: Tensor | None, divergence: str) -> Tensor:
        if backend == "triton" and divergence == "adaptive_kl":  # its search is slow interpreted
            s, t, m = map(first_two, (s, t, m))
        return fastkd.soft_target_loss(s, t, mask=m, divergence=divergence, backend=backend)

    for divergence in DIVERGENCES:
        yield Subject(
            f"soft_target_loss {divergence}",
            functools.partial(call, divergence=divergence),
            same_size=True,
        )
    yield of_module("SoftTargetLoss", fastkd.SoftTargetLoss(backend=backend), same_size=True)
    weights = torch.randn(20, D_S), torch.randn(20, D_T)
    yield Subject(
        "linear_soft_target_loss",
        lambda s, t, m: fastkd.linear_soft_target_loss(
            s, weights[0].to(s), t, weights[1].to(t), mask=m, backend=backend
        ),
    )
