"""Soft targets: `soft_targets`, `of_top_k`, `of_match`, the oracles, and the tables."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastkd
from fastkd import Divergence
from fastkd._core.products import HALF, multiplied_in_half
from fastkd.lm.divergences import NAMES
from fastkd.lm.heads import LowRank
from fastkd.lm.soft_targets import DIVERGENCES, MAIN_TERMS, REDUCTIONS
from fastkd.lm.targets import OF_WHOLE_MASS
from tests.support.compare import TOLERANCE, value_and_grad
from tests.support.draw import OF_HEADS, SIZES, Case, Draw
from tests.support.oracles import rounded_gradient
from tests.support.subject import D_S, D_T, B, Subject, function_of, of_module


def soft_targets(student, teacher, temperature, divergence, working=torch.float64) -> Tensor:
    """The divergence of each row of logits, without τ².

    A probability that ``working`` can't hold is 0, and weighs nothing even against an infinity.
    """
    p_s, p_t = (_held(x / temperature, working) for x in (student, teacher))
    logs = ((x / temperature).log_softmax(-1) for x in (student, teacher))
    return between(p_s, p_t, *logs, divergence)


def between(p_s, p_t, log_s, log_t, divergence: str | Divergence) -> Tensor:
    """The divergence of distributions, named by a word or by an object."""

    def log_mixture(p: Tensor, q: Tensor, share: float) -> Tensor:
        m = share * p + (1 - share) * q
        # Half of the least subnormal number is 0.
        return torch.where(m == 0, 0, torch.where(m == 0, 1, m).log())

    of = Divergence(divergence) if isinstance(divergence, str) else divergence
    forward, reverse = _kl(p_t, log_t, log_s), _kl(p_s, log_s, log_t)
    # A mixture's logarithm loses what is below the least number; plain ones don't.
    plain = {"forward_kl": forward, "reverse_kl": reverse, "js 0": forward, "js 1": reverse,
             "mixed 0": reverse, "mixed 1": forward, "skew_kl 0": forward,
             "skew_reverse_kl 0": reverse}  # fmt: skip
    coefficient = {"js": of.beta, "mixed": of.mix}.get(of.name, of.skew)
    for name in (of.name, f"{of.name} {coefficient:g}"):
        if name in plain:
            return plain[name]
    if of.name == "js":
        beta = of.beta
        log_m = log_mixture(p_t, p_s, beta)
        return beta * _kl(p_t, log_t, log_m) + (1 - beta) * _kl(p_s, log_s, log_m)
    if of.name == "skew_kl":
        return _kl(p_t, log_t, log_mixture(p_t, p_s, of.skew))
    if of.name == "skew_reverse_kl":
        return _kl(p_s, log_s, log_mixture(p_s, p_t, of.skew))
    if of.name == "total_variation":
        return (p_t - p_s).abs().sum(-1) / 2
    if of.name in ("negative_log_acceptance", "lk"):
        accepted = torch.minimum(p_t, p_s).sum(-1)
        if of.name == "lk":
            share = torch.exp(-of.rate * accepted.detach())
            return share * forward + (1 - share) * (1 - accepted)
        return -torch.where(accepted == 0, 1, accepted).log()
    if of.name == "mixed":
        return of.mix * forward + (1 - of.mix) * reverse
    flat = (p.detach().reshape(-1, p.shape[-1]) for p in (p_s, p_t))
    weights = [_head_weight(s, t) for s, t in zip(*flat, strict=True)]
    w = torch.tensor(weights, dtype=p_s.dtype).reshape(p_s.shape[:-1])
    return torch.where(w == 0, 0, w * forward) + torch.where(w == 1, 0, (1 - w) * reverse)


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
    return between(q_s, q_t, *logs, divergence)


def of_match(student: Tensor, teacher: Tensor, match, unmatched: str, temperature, divergence):
    """The divergence of each row over the matched tokens, and the unmatched ones' outcome."""
    pairs = sorted(zip(match.student_ids.tolist(), match.teacher_ids.tolist(), strict=True))
    logs, rest = [], []
    for z, ids in zip((student, teacher), zip(*pairs, strict=True), strict=True):
        log_p = (z / temperature).log_softmax(-1)
        logs.append(log_p[:, list(ids)])
        rest.append(log_p[:, sorted({*range(z.shape[-1])}.difference(ids))])
    if unmatched == "renormalise":
        logs = [x.log_softmax(-1) for x in logs]
    else:
        others = (x.logsumexp(-1, keepdim=True) for x in rest)
        logs = [torch.cat(pair, -1) for pair in zip(logs, others, strict=True)]
    value = between(*(x.exp() for x in logs), *logs, divergence)
    if unmatched == "sorted" and all(x.shape[-1] for x in rest):
        longest = max(x.shape[-1] for x in rest)
        s, t = (
            F.pad(x.exp().sort(dim=-1, descending=True, stable=True)[0], (0, longest - x.shape[-1]))
            for x in rest
        )
        value = value + (s - t).abs().sum(-1)
    return value


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
        unsure |= small.any(-1) & (other == -torch.inf).any(-1)
    return unsure


def gradient_terms(student, teacher, working, temperature, divergence) -> Tensor:
    """Size of the two terms whose difference is a row's gradient, without τ².

    A student that is sure of a word has a gradient p (log p/q − KL) of nearly 0 there, but a
    rounding of the two logarithms makes one of their size.
    """
    log_s, log_t = ((x / temperature).log_softmax(-1) for x in (student, teacher))
    p_s, p_t = log_s.exp(), log_t.exp()
    other = ((p_s + p_t) / 2).log() if divergence == "js" else log_t
    # Equal distributions have a ratio of rounding errors only, a few of the logarithms' and one of
    # the sum of exponentials, which is 1 or more.
    ratio = (log_s - other).abs() + 0.05 * (log_s.abs() + other.abs())
    ratio += torch.finfo(working).eps / TOLERANCE[working]
    weighed = (p_s * ratio.nan_to_num(0, 0, 0)).sum(-1)
    plain = p_s.norm(dim=-1) + p_t.norm(dim=-1)
    terms = {"forward_kl": plain, "reverse_kl": 2 * weighed, "js": 2 * weighed}
    return terms.get(divergence, plain + 2 * weighed) / temperature


def _head_weight(p_s: Tensor, p_t: Tensor) -> float:
    """g_head / (g_head + g_tail); the head is the most probable entries up to a mass of ½."""
    head, mass = 0.0, 0.0
    gap = (p_t - p_s).abs()
    for place, i in enumerate(p_t.argsort(descending=True, stable=True).tolist()):
        mass += p_t[i].item()
        if place > 0 and mass > 0.5 + 1e-12:  # half of equal tokens has mass ½, up to rounding
            break
        head += gap[i].item()
    return head / gap.sum().item() if gap.sum() > 0 else 0.5


VOCABULARIES = (2, 3, *(17, 64) * 6, 1100, 4100)  # the last of more than a kernel's block
OF_OVERLAP = ("total_variation", "negative_log_acceptance", "lk")


def _kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    return (p * (log_p - log_q).masked_fill(p == 0, 0)).sum(-1)


def random_soft_targets(draw: Draw) -> Case:
    """A call with logits, against logits, those of a matched vocabulary, or a top k."""
    shape = draw.pick([(draw.size(zero=True),), (draw.size(), draw.pick([1, 3])), ()])
    R = math.prod(shape)
    of = RandomTeacher(draw, R, ("logits", "logits", "match", "top k"))
    plain = of.kind == "logits"
    tau = draw.pick([0.5, 1.0, 2.5, 20.0, 100.0] if plain else [1.0, 2.5])
    reduction, t2 = draw.pick(REDUCTIONS), plain and draw.chance(0.5)
    denominator = None
    if reduction == "batchmean" and draw.chance(0.5):
        kinds = torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64
        denominator = draw.pick([3, 2.5, *(torch.tensor(7, dtype=kind) for kind in kinds)])
    mask = draw.mask(*shape)
    scales = {"logits": (0.01, 100.0), "match": (0.5, 5.0), "top k": (0.01, 5.0)}[of.kind]
    student, teacher = (draw.features(*shape, n, scales=scales) for n in (of.V, of.V_t))
    if draw.chance(0.1):
        teacher = teacher.round()  # many equal tokens
    if plain and draw.chance(0.2) and of.used > 2:  # entries invalid for both, or for one
        of_one = isinstance(of.divergence, str) and draw.chance(0.3)
        for side in (draw.pick([student, teacher]),) if of_one else (student, teacher):
            side[..., 0] = -torch.inf
    factor = tau**2 if t2 else 1.0
    weights = draw.normal(*shape) if draw.chance(0.3) else None
    factors = factor if weights is None else factor * weights
    working = torch.float64 if draw.dtype == torch.float64 else torch.float32
    count = 1
    if reduction == "batchmean":
        count = mask.sum().clamp_min(1) if denominator is None else denominator

    def oracle(student_logits: Tensor, teacher_logits: Tensor | None = None) -> Tensor:
        sides = student_logits, student_logits if teacher_logits is None else teacher_logits
        sides = (torch.where(mask[..., None], z, 0).reshape(R, z.shape[-1]) for z in sides)
        rows = of.soft(*sides, tau, working).view(shape) * factors
        rows = torch.where(mask, rows, 0)
        return rows if reduction == "none" else rows.sum() / count

    common = {"temperature": tau, "divergence": of.divergence}
    common |= {"reduction": reduction, "scale_by_t2": t2}
    rest = {"denominator": denominator, "weights": weights}
    loss = functools.partial(draw.function("soft_target_loss"), **common, **rest, **of.options)
    if plain and not of.options and draw.backend != "reference" and draw.chance(0.5):
        loss = functools.partial(draw.module(fastkd.SoftTargetLoss, **common), **rest)

    given = {"teacher_logits": teacher}
    if of.top is not None:
        given, unread = {}, ~mask if draw.backend != "reference" else mask & False
        loss = functools.partial(loss, teacher_logits=of.stored(unread))
    largest, most = _sizes([student, teacher], weights) if plain else (1.0, 1.0)
    of_plain = functools.partial(_slope, of, teacher, working, tau, mask, largest * count)
    return Case(
        loss,
        oracle,
        {"student_logits": student},
        given,
        {"mask": draw.mask_argument(mask)},
        scale=factor * largest * most if plain else 10.0,
        mask=mask,
        slope=of_plain if plain else lambda x: x.new_ones(x.shape[:-1]),
        unsure=_unsure(draw, of, student, teacher, tau, working) & mask,
        of_rows=plain,
    )


def _sizes(logits: list[Tensor], weights: Tensor | None) -> tuple[float, float]:
    """The largest logit and the largest weight, each beside 1."""
    finite = torch.cat([x[x.isfinite()].flatten() for x in logits]).double()
    found = (finite, torch.zeros(0) if weights is None else weights)
    largest, most = (1 + x.abs().max().item() if x.numel() else 1.0 for x in found)
    return largest, most


def _slope(of: "RandomTeacher", teacher, working, tau, mask, divisor, student: Tensor) -> Tensor:
    sides = (z[..., : of.used].double() for z in (student, teacher))
    return gradient_terms(*sides, working, tau, of.divergence) * mask / divisor


def _unsure(draw: Draw, of: "RandomTeacher", student, teacher, tau, working) -> Tensor:
    """Rows in which rounding decides what is compared, or whether the loss is infinite."""
    if of.kind == "match" and of.options["unmatched"] == "sorted":
        return at_kink(student, teacher, of.options["vocabulary"], tau)
    if of.kind != "logits":
        return torch.tensor(False)
    student, teacher = (x[..., : of.used] for x in (student, teacher))
    unsure = nearly_held(student, teacher, tau, working)
    if getattr(of.divergence, "name", "") == "negative_log_acceptance":
        # A sum of probabilities that are subnormal may be 0, and its logarithm infinite.
        both = ((z.double() / tau).softmax(-1) for z in (student, teacher))
        unsure |= torch.minimum(*both).sum(-1) < of.used * torch.finfo(working).tiny
    if draw.backend == "reference" and (teacher == -torch.inf).any():
        # Of an infinite loss autograd makes 0·∞ of a probability of 0.
        exact = soft_targets(student, teacher, tau, of.divergence, working)
        unsure |= ((student / tau).softmax(-1) == 0).any(-1) & exact.isinf()
    return unsure


def cross_entropies(logits, labels, smoothing, z_loss, weights) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row, and the gradient of their weighted sum, by torch's function."""
    z = logits.detach().clone().requires_grad_()
    value = F.cross_entropy(z, labels, reduction="none", label_smoothing=smoothing)
    value = value + z_loss * z.logsumexp(-1).square() if z_loss else value
    return value.detach(), torch.autograd.grad(value, z, weights.to(z))[0]


def task_losses(student: Tensor, labels: Tensor, smoothing, z_loss, weights) -> Tensor:
    """Cross-entropy of each row of logits, 0 to n − 1 of whose tokens are labels."""
    log_p = student.log_softmax(-1)
    right = log_p.gather(-1, labels.clamp(0, student.shape[-1] - 1)[:, None])[:, 0]
    losses = -(1 - smoothing) * right - smoothing * log_p.mean(-1)
    losses = losses + z_loss * student.logsumexp(-1).square()
    return losses if weights is None else losses * weights


def _any_divergence(draw: Draw) -> str | Divergence:
    share = draw.pick([0.1, 0.3, 0.5, 0.9, 1e-30, 1e-4, 0.999, 0.0, 1.0])
    plain = ["forward_kl", "reverse_kl", "js"]
    names = [name for name in NAMES if name not in (*plain[:2], "adaptive_kl")]
    objects = [Divergence(name, beta=share, skew=share, mix=share, rate=share) for name in names]
    return draw.pick([*plain, *objects])


def product(draw: Draw, hidden: Tensor, weight: Tensor) -> Tensor:
    """A head's product; its gradient is rounded if the loss multiplies in half precision."""
    logits = hidden @ weight.mT
    in_half = multiplied_in_half(torch.empty(0, dtype=draw.dtype))
    return rounded_gradient(logits, draw.dtype) if in_half else logits


def chunks(draw: Draw) -> dict[str, Any]:
    """Bytes of logits at a time; a reference has no chunks."""
    return {} if draw.backend == "reference" else {"chunk_bytes": draw.pick([None, 1, 3000])}


def random_rows(draw: Draw, mask: Tensor) -> Tensor | None:
    """Rows of the teacher, none of which the mask fills with NaN."""
    kept = mask.nonzero()[:, 0]
    if draw.chance(0.6) or not len(kept):
        return None
    rows = kept[torch.randint(len(kept), mask.shape, generator=draw.generator)]
    return rows.masked_fill(~mask, -1)


def random_task(
    draw: Draw, R: int, n: int, ignores: bool = True
) -> tuple[fastkd.CrossEntropy, Tensor, Callable]:
    """A task, which of its labels count, and its losses of the student's logits."""
    ignored = draw.pick([-100, -100, 1])  # a token of the vocabulary, too
    labels = torch.randint(n, (R,), generator=draw.generator)
    labels = labels.masked_fill(draw.uniform(R) < 0.2, ignored) if ignores else labels
    smoothing, z_loss = draw.pick([0.0, 0.1]), draw.pick([0.0, 0.01])
    weights = draw.normal(R) if draw.chance(0.3) else None
    rest = {"label_smoothing": smoothing, "z_loss": z_loss, "weights": weights}
    narrow = labels.to(draw.pick([torch.int64, torch.int64, torch.int32, torch.int16]))
    task = fastkd.CrossEntropy(narrow, 0.7, ignore_index=ignored, **rest)
    losses = functools.partial(
        task_losses, labels=labels, smoothing=smoothing, z_loss=z_loss, weights=weights
    )
    return task, labels != ignored, losses


def _random_match(draw: Draw) -> tuple[fastkd.VocabularyMatch, str]:
    """Pairs of random ids; both vocabularies have unmatched tokens, so that no KL is infinite."""
    sizes = [draw.pick(VOCABULARIES) for _ in range(2)]
    n = draw.pick([1, max((min(sizes)) // 2, 1), min(sizes) - 1])
    ids = (torch.randperm(size, generator=draw.generator)[:n] for size in sizes)
    return fastkd.VocabularyMatch(*ids, *sizes), draw.pick(["renormalise", "bucket", "sorted"])


def at_kink(student: Tensor, teacher: Tensor, match, temperature: float) -> Tensor:
    """Rows where rounding decides a sign of s_k − t_k, or which token has rank k."""
    s, t = (
        (z.double() / temperature).softmax(-1).index_fill(-1, ids, 0).sort(-1, descending=True)[0]
        for z, ids in ((student, match.student_ids), (teacher, match.teacher_ids))
    )
    most = min(s.shape[-1] - len(match.student_ids), t.shape[-1] - len(match.teacher_ids))
    crossing = (s[..., :most] - t[..., :most]).abs() <= 1e-13 * s[..., :most]
    equal = (s[..., 1:] - s[..., :-1]).abs() <= 1e-13 * s[..., 1:]
    return crossing.any(-1) | (equal & (s[..., 1:] > 0))[..., :most].any(-1)


def of_whole_mass(student: Tensor, teacher: Tensor, ids: Tensor, temperature, name) -> Tensor:
    """Student over the tokens ``ids`` against the teacher's probabilities over all tokens."""
    log_t = (teacher / temperature).log_softmax(-1)[:, ids]
    log_s = (student / temperature).log_softmax(-1)
    value = between(log_s.exp(), log_t.exp(), log_s, log_t, name)
    return value + (1 - log_t.exp().sum(-1)) / 2 * (name == "total_variation")


def terms_at_1(
    student: Tensor, teacher: Tensor, ids: Tensor, labels: Tensor, mass: str
) -> dict[str, Tensor]:
    """A row's terms at temperature 1."""
    whole = teacher if mass == "whole" else teacher[:, ids]
    log_s, log_t = student.log_softmax(-1), whole.log_softmax(-1)
    entropy = -(log_t.exp() * log_t).sum(-1)
    log_t = log_t[:, ids] if mass == "whole" else log_t
    distance = ((log_t.exp() - log_s.exp()).abs().sum(-1) + 1 - log_t.exp().sum(-1)) / 2
    of_s, of_t = (x.gather(-1, labels[:, None])[:, 0] for x in (log_s, log_t))
    return {
        "entropy": -(log_s.exp() * log_s).sum(-1), "log_prob": of_s, "teacher_entropy": entropy,
        "total_variation": distance, "teacher_log_prob": of_t,
    }  # fmt: skip


STUDENT_TERMS = ("soft", "task", "entropy", "log_prob")
TEACHER_TERMS = ("total_variation", "teacher_entropy", "teacher_log_prob")


class RandomTeacher:
    """What R rows of a student's V tokens are compared with.

    Logits or a head, a draft's part of a head, another vocabulary's, or a top k.
    """

    def __init__(self, draw: Draw, R: int, kinds: tuple[str, ...]) -> None:
        self.kind, self.options, self.top = draw.pick(kinds), dict[str, Any](), None
        own = draw.pick([*SIZES, *SIZES, 129, 300, 1030, 2500, 4100])
        V = own if self.kind == "logits" else draw.pick(VOCABULARIES)
        self.V, self.V_t, self.ids, self.used = V, V, torch.arange(V), V
        words = self.kind == "logits" and draw.chance(0.6)
        self.divergence = draw.pick(DIVERGENCES) if words else _any_divergence(draw)
        self.terms = TEACHER_TERMS if self.kind in ("head", "part", "whole") else ()
        if self.kind == "head":  # columns of both heads that pad them
            self.used = draw.pick([V, max(V - 3, 1)])
        elif self.kind == "logits":
            extra = draw.pick([0] * 5 + [3])
            self.V, self.V_t = V + extra, V + 2 * extra
        elif self.kind == "match":
            match, unmatched = _random_match(draw)
            self.options = {"vocabulary": match, "unmatched": unmatched}
            self.used = self.V = match.student_size
            self.V_t = match.teacher_size
        elif self.kind == "top k":
            self.top = self._top(draw, R, V)
        else:
            self.ids = torch.randperm(V, generator=draw.generator)[: draw.pick([1, 2, V])]
            self.used = self.V = len(self.ids)
        if self.kind in ("head", "logits", "match"):
            self.ids = torch.arange(self.used)
            if self.used < self.V:
                self.options["vocabulary"] = self.used
        if self.kind == "whole":
            name = draw.pick(OF_WHOLE_MASS)
            self.divergence = name if name in DIVERGENCES else Divergence(name)

    def _top(self, draw: Draw, R: int, V: int) -> fastkd.TopK:
        K = self.known = draw.pick([1, min(V, 4), min(V, 40), V])
        # In float64 a confident teacher's rest would be rounding error.
        spread = 2 if draw.dtype == torch.float64 else draw.pick([2, 12])
        log_probs, ids = (spread * draw.normal(R, V)).log_softmax(-1).topk(K)
        # A server's may not add up.
        log_probs = log_probs.to(draw.dtype) * draw.pick([1.0, 1.0, 0.99])
        if K > 1 and draw.chance(0.3):  # an entry that pads a row
            self.known, log_probs[:, -1] = K - 1, -torch.inf
            ids[:, -1] = ids[:, 0] if draw.chance(0.5) else draw.pick([-1, V])
        return fastkd.TopK(ids, log_probs, draw.pick(["bucket", "renormalise"]))

    def stored(self, unread: Tensor) -> fastkd.TopK:
        """The top k at positions (...), with junk where nobody may read."""
        top = self.top.ids, self.top.log_probs
        ids, log_probs = (x.view(*unread.shape, x.shape[1]) for x in top)
        ids = ids.masked_fill(unread[..., None], -5)
        return fastkd.TopK(ids, log_probs.masked_fill(unread[..., None], torch.nan), self.top.tail)

    def soft(self, student: Tensor, teacher: Tensor, tau: float, working=torch.float64) -> Tensor:
        """The divergence of each row."""
        if self.top is not None:
            top = self.top.ids[:, : self.known], self.top.log_probs[:, : self.known]
            return of_top_k(student, *top, self.top.tail, tau, self.divergence)
        if self.kind == "match":
            match, unmatched = self.options.values()
            return of_match(student, teacher, match, unmatched, tau, self.divergence)
        if self.kind == "whole":
            name = getattr(self.divergence, "name", self.divergence)
            return of_whole_mass(student, teacher, self.ids, tau, name)
        sides = student[:, : self.used], teacher[:, self.ids]
        return soft_targets(*sides, tau, self.divergence, working)

    def draft(self, **options: Any) -> fastkd.Draft:
        ids = self.ids if self.kind in ("part", "whole") else None
        return fastkd.Draft(ids, "whole" if self.kind == "whole" else "renormalised", **options)


class RandomHeads:
    """Options of a call with hidden states and heads: all that a position may have."""

    def __init__(self, draw: Draw) -> None:
        self.product = functools.partial(product, draw)
        self.R = R = draw.size()
        self.teacher = RandomTeacher(draw, R, ("head", "part", "whole", "match", "top k"))
        self.mask, self.has_soft = draw.mask(R), draw.mask(R)
        self.soft_mask = draw.mask_argument(self.has_soft)
        self.scale, self.cap = draw.pick([1, 0.5]), draw.pick([None, None, 4.0])
        alone = draw.chance(0.15)  # the labels, which C++ has one operator for
        if alone:
            self.mask, self.cap = torch.ones(R).bool(), None
        task, has_label, self.of_labels = random_task(draw, R, self.teacher.used, ignores=not alone)
        self.task = task if alone or draw.chance(0.7) else None
        self.labels = torch.where(has_label, task.labels.long(), 0)
        self.counted = self.mask & has_label if self.task else self.mask
        self.terms: tuple[str, ...] = ()
        if self.task and not alone and draw.chance(0.4):
            every = [*STUDENT_TERMS, *self.teacher.terms]
            self.terms = tuple(draw.random.sample(every, draw.pick([1, 2, len(every)])))
        self.adapted, self.with_ratio = not alone and draw.chance(0.2), draw.chance(0.3)
        self.weights = draw.normal(R) if draw.chance(0.4) else None
        self.old, self.at_most = -3 * draw.normal(R).abs(), draw.pick([0.5, 2.0])
        self.rows = None if self.teacher.kind == "top k" else random_rows(draw, self.counted)
        self.reduction = draw.pick(["batchmean", "batchmean", "none"])
        self.tau, self.soft_weight = draw.pick([0.7, 1.0, 2.0]), draw.pick([1.0, 0.3, 0])
        self.soft_weight = 0 if alone else self.soft_weight
        self.options = {"temperature": self.tau, "scale_by_t2": draw.chance(0.5)} | chunks(draw)
        self.options |= {"reduction": self.reduction, "soft_weight": self.soft_weight}
        if self.reduction == "batchmean" and draw.chance(0.2):
            self.options["denominator"] = draw.pick([3, 2.5, torch.tensor(7.0)])
        # What nobody may read where nothing counts; a reference multiplies it by 0.
        self.junk = ~(self.counted & self.has_soft)
        if draw.backend == "reference":
            self.junk = torch.zeros(R).bool()
        read = self.soft_weight or self.terms or draw.backend == "reference"
        self.unread = self.junk if read else torch.ones(R).bool()
        self.lead = (R,) if self.rows is not None else draw.pick([(R,), (1, R), *[()] * (R == 1)])
        if self.task:
            rest = {"labels": self.led(task.labels), "weights": self.led(task.weights)}
            self.task = dataclasses.replace(task, **rest)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        z = self.scale * (self.product(hidden, weight) + bias)
        return z if self.cap is None else self.cap * (z / self.cap).tanh()

    def oracle(self, **x: Tensor) -> Tensor:
        of = self.teacher
        head = x["student_head"] + (1.7 * x["up"] @ x["down"] if self.adapted else 0)
        student = self.logits(x["student_hidden"], head, x["student_bias"])[:, : of.used]
        teacher = student
        if of.kind != "top k":
            teacher = self.logits(*(x[f"teacher_{name}"] for name in ("hidden", "head", "bias")))
        teacher = teacher if self.rows is None else teacher[self.rows]
        soft = of.soft(student, teacher, self.tau)
        soft = soft * self.tau**2 if self.options["scale_by_t2"] else soft
        soft = soft if self.weights is None else soft * self.weights
        if self.with_ratio:
            log_q = student.detach().log_softmax(-1).gather(-1, self.labels[:, None])[:, 0]
            soft = soft * (log_q - self.old).exp().clamp(max=self.at_most)
        soft = torch.where(self.has_soft, soft, 0)
        losses = self.soft_weight * soft if self.soft_weight else torch.zeros_like(soft)
        if self.task:
            losses = losses + 0.7 * self.of_labels(student)
        if self.terms:
            known = teacher if of.terms else student[:, :1].expand(self.R, len(of.ids))
            terms = terms_at_1(student, known, of.ids, self.labels, of.kind)
            terms |= {"soft": soft, "task": self.of_labels(student)}
            for name in self.terms:
                term = terms[name].detach()
                losses = losses + (
                    torch.where(self.has_soft, term, 0) if name in TEACHER_TERMS else term
                )
        losses = torch.where(self.counted, losses, 0)
        if self.reduction == "none":
            return losses
        return losses.sum() / self.options.get("denominator", self.counted.sum().clamp_min(1))

    def call(self, loss: Callable[..., Any], mask: Tensor | None, **x: Tensor) -> Tensor:
        student = fastkd.Head(x["student_head"], x["student_bias"], self.scale, self.cap)
        student.low_rank = (LowRank(x["down"], x["up"], 1.7),) if self.adapted else ()
        teacher: tuple[Any, ...] = ()
        top = self.teacher.top
        if top is not None:
            teacher = (fastkd.TopK(self.led(top.ids), self.led(top.log_probs), top.tail),)
        else:
            hidden = x["teacher_hidden"]
            if self.rows is None:
                hidden = hidden.masked_fill(self.unread[:, None], torch.nan)
            head = fastkd.Head(x["teacher_head"], x["teacher_bias"], self.scale, self.cap)
            teacher = self.led(hidden), head
        labels, old, weights = (
            None if y is None else self.led(y.masked_fill(self.junk, junk))
            for y, junk in ((self.labels, 9999), (self.old, torch.nan), (self.weights, torch.nan))
        )
        ratio = fastkd.ImportanceRatio(labels, old, at_most=self.at_most)
        found = loss(
            self.led(x["student_hidden"]), student, *teacher, mask=self.led(mask), weights=weights,
            task=self.task, ratio=ratio if self.with_ratio else None,
            return_terms=self.terms or False,
            draft=self.teacher.draft(rows=self.rows, soft_mask=self.led(self.soft_mask)),
            divergence=self.teacher.divergence, **self.teacher.options, **self.options,
        )  # fmt: skip
        found = found[0] + sum(found[1].values()) if self.terms else found
        return found.view(self.R) if self.reduction == "none" else found

    def led(self, x: Tensor | None) -> Tensor | None:
        """``x`` (R, ...) with the call's leading dimensions."""
        return x if x is None or len(self.lead) == 1 else x.reshape((*self.lead, *x.shape[1:]))


def random_heads(draw: Draw) -> Case:
    loss, of = draw.function("linear_soft_target_loss"), RandomHeads(draw)
    wide = torch.float32 if draw.dtype in HALF and draw.chance(0.2) else draw.dtype
    D_s, D_t = draw.size(), draw.size()
    learning, given = (
        {
            f"{side}_hidden": draw.features(of.R, D, scales=(3.0,), kinds=OF_HEADS),
            f"{side}_head": draw.features(V, D, scales=(2.0,), kinds=OF_HEADS).to(wide),
            f"{side}_bias": draw.laid_out(draw.normal(V).to(draw.dtype)),
        }
        for side, D, V in (("student", D_s, of.teacher.V), ("teacher", D_t, of.teacher.V_t))
    )
    given = {} if of.teacher.kind == "top k" else given
    if of.adapted:
        learning["down"] = draw.laid_out(draw.normal(2, D_s).to(draw.dtype))
        learning["up"] = draw.laid_out(draw.normal(of.teacher.V, 2).to(draw.dtype))
    largest = float(max(x.double().norm() for x in (*learning.values(), *given.values())))
    return Case(
        functools.partial(of.call, loss), of.oracle, learning, given,
        {"mask": draw.mask_argument(of.mask)}, scale=10.0, mask=of.mask,
        masked=("student_hidden", "teacher_hidden"),
        slope=lambda x: x.new_full(x.shape[:1], 1 + largest),
    )  # fmt: skip


RANDOM = {
    "soft_targets": random_soft_targets,
    "heads": random_heads,
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


def examples(backend: str) -> Iterator[tuple]:
    loss = function_of("soft_target_loss", backend)

    def value(p_s: list[float], p_t: list[float], divergence: Any, **options: Any) -> Tensor:
        student, teacher = (torch.tensor([p]).log() for p in (p_s, p_t))
        return loss(student, teacher, divergence=divergence, **options)

    log = math.log
    # Only the first and last tokens differ: ±log 2 weighted with ¼ and ½.
    three = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    yield "forward KL", value(*three, "forward_kl"), 0.25 * log(2)
    yield "reverse KL", value(*three, "reverse_kl"), 0.25 * log(2)
    # m = (3/8, 1/4, 3/8): both halves are ¼·log(2/3) + ½·log(4/3).
    yield "JS", value(*three, "js"), 0.25 * log(2 / 3) + 0.5 * log(4 / 3)
    # In the teacher's order .35, .30, .20, .15 the second already passes one half: the head is
    # the last token alone, with a gap of 0.05; the rest is 0.05 + 0.1 + 0.1. Of four equal tokens
    # the first two are just one half: 0 + 0.15, and 0.05 + 0.2.
    for p_s, p_t, w in (
        ([0.1, 0.3, 0.2, 0.4], [0.15, 0.2, 0.3, 0.35], 0.05 / 0.3),
        ([0.25, 0.4, 0.3, 0.05], [0.25, 0.25, 0.25, 0.25], 0.15 / 0.4),
    ):
        forward = sum(t * log(t / s) for s, t in zip(p_s, p_t, strict=True))
        reverse = sum(s * log(s / t) for s, t in zip(p_s, p_t, strict=True))
        yield "adaptive KL", value(p_s, p_t, "adaptive_kl"), w * forward + (1 - w) * reverse
    two = [0.5, 0.5], [0.75, 0.25]
    forward = 0.75 * log(3 / 2) + 0.25 * log(1 / 2)
    reverse = 0.5 * log(2 / 3) + 0.5 * log(2)
    for divergence, expected in (
        (Divergence("total_variation"), 0.25),
        (Divergence("negative_log_acceptance"), -log(0.75)),
        # λ = exp(−2·¾)
        (Divergence("lk", rate=2.0), math.exp(-1.5) * forward + (1 - math.exp(-1.5)) * 0.25),
        (Divergence("skew_kl", skew=0.5), 0.75 * log(6 / 5) + 0.25 * log(2 / 3)),
        (Divergence("skew_reverse_kl", skew=0.5), 0.5 * log(4 / 5) + 0.5 * log(4 / 3)),
        (  # m = 0.2·p_t + 0.8·p_s = (0.55, 0.45)
            Divergence("js", beta=0.2),
            0.2 * (0.75 * log(0.75 / 0.55) + 0.25 * log(0.25 / 0.45))
            + 0.8 * (0.5 * log(0.5 / 0.55) + 0.5 * log(0.5 / 0.45)),
        ),
        (Divergence("js", beta=0.0), forward),
        (Divergence("js", beta=1.0), reverse),
        (Divergence("mixed", mix=0.25), 0.25 * forward + 0.75 * reverse),
    ):
        yield str(divergence), value(*two, divergence), expected
    # Sorted, 0.3 and 0.2 of the student's other tokens meet the teacher's 0.6 and nothing.
    match = fastkd.VocabularyMatch(torch.tensor([0]), torch.tensor([1]), 3, 2)
    pair = torch.tensor([[0.5, 0.2, 0.3]]).log(), torch.tensor([[0.6, 0.4]]).log()
    bucket = 0.4 * log(0.4 / 0.5) + 0.6 * log(0.6 / 0.5)
    for unmatched, expected in (("renormalise", 0.0), ("bucket", bucket), ("sorted", bucket + 0.5)):
        yield unmatched, loss(*pair, vocabulary=match, unmatched=unmatched), expected
    # Teacher ½, ¼, ¼ of three tokens; the student has the first two, at ¾ and ¼.
    linear = function_of("linear_soft_target_loss", backend)
    head, teacher = (torch.tensor(p)[:, None].log() for p in ([3.0, 1.0], [2.0, 1.0, 1.0]))
    one = torch.ones(1, 1)
    for name, whole, part in (
        ("forward_kl", log(2 / 3) / 2, 2 / 3 * log(8 / 9) + log(4 / 3) / 3),
        ("reverse_kl", 0.75 * log(3 / 2), 0.75 * log(9 / 8) + 0.25 * log(3 / 4)),
        ("total_variation", 0.25, 1 / 12),
        ("negative_log_acceptance", -log(0.75), -log(11 / 12)),
    ):
        for mass, expected in (("whole", whole), ("renormalised", part)):
            draft = fastkd.Draft(torch.tensor([0, 1]), mass)
            found = linear(one, head, one, teacher, divergence=Divergence(name), draft=draft)
            yield f"{name} of the {mass} mass", found, expected


def edges(backend: str) -> Iterator[tuple]:
    loss, inf = function_of("soft_target_loss", backend), torch.inf
    x, y = 2 * torch.randn(2, 4, 50)
    row = torch.zeros(1, 2)
    others = (Divergence(name) for name in NAMES if name not in DIVERGENCES)
    for divergence in (*DIVERGENCES, *others):
        call = functools.partial(loss, divergence=divergence)
        name = str(divergence)
        # |p_s − p_t| has a kink where they are equal: any gradient between the one-sided ones.
        overlap = isinstance(divergence, Divergence) and divergence.name in OF_OVERLAP
        gradient = None if overlap else 0.0
        yield f"{name}: itself", lambda s, c=call: c(s, x), x, 0.0, gradient
        yield f"{name}: one token", lambda s, c=call: c(s, y[:, :1]), x[:, :1], 0.0, 0.0
        top = fastkd.TopK(torch.zeros(4, 1).long(), torch.zeros(4, 1))
        yield f"{name}: a TopK of one token", lambda s, c=call, t=top: c(s, t), x[:, :1], 0.0, 0.0
        # Tokens that neither can have are left out.
        both = [torch.cat([z, torch.full((4, 3), -inf)], 1) for z in (x, y)]
        with_both = functools.partial(call, teacher_logits=both[1])
        yield f"{name}: impossible tokens", with_both, both[0], call(x, y), None
        far = torch.tensor([[0.0, -500.0, 3.0, -2e4], [9e4, 0.0, -9e4, 1.0]])
        if not overlap:
            yield f"{name}: far apart and equal", lambda s, c=call, t=far: c(s, t), far, 0.0, 0.0
            other = torch.tensor([[-800.0, 0.0, 1.0, -3e4], [9e4, 1.0, -9e4, 0.0]])
            wanted = soft_targets(far.double(), other.double(), 1.0, divergence).mean()
            yield f"{name}: far apart", lambda s, c=call, t=other: c(s, t), far, wanted, None, 0.1
    only, some = torch.tensor([[0.0, -inf]]), torch.tensor([[0.0, 1.0]])
    for divergence, student, teacher, value in (
        ("forward_kl", only, some, inf),
        ("forward_kl", some, only, math.log(1 + math.e)),
        ("reverse_kl", some, only, inf),
        ("adaptive_kl", some, only, inf),
        ("adaptive_kl", only, some, inf),
        ("js", some, only, None),
        (Divergence("total_variation"), only, only.flip(-1), 1.0),
        (Divergence("negative_log_acceptance"), only, only.flip(-1), inf),
        (Divergence("lk"), only, only.flip(-1), inf),
    ):
        call = functools.partial(loss, divergence=divergence)
        name, gradient = f"{divergence}: excluded", ... if value == inf else None
        yield name, lambda s, c=call, t=teacher: c(s, t), student, value, gradient
    # Nearly sure of different tokens: α = 2·e⁻⁴⁰, whose gradient does not vanish.
    call = functools.partial(loss, divergence=Divergence("negative_log_acceptance"))
    student = torch.tensor([[40.0, 0.0]])
    half = torch.tensor([[0.5, -0.5]])
    yield "a small acceptance", lambda s: call(s, student.flip(-1)), student, 40 - math.log(2), half
    # The infinite forward KL has weight 0: the head, one token, has no gap in float64.
    sure = torch.tensor([[0.0, -50.0]])
    adaptive = functools.partial(loss, teacher_logits=sure, divergence="adaptive_kl")
    yield "an infinite KL of weight 0", adaptive, only, 0.0, None
    zeros, head = torch.randn(5, 0), torch.randn(5, 2)
    linear, state = function_of("linear_soft_target_loss", backend), torch.zeros(1, 2)
    call = functools.partial(linear, teacher_hidden=state, teacher_head=head)
    yield "no features", lambda s: call(s, zeros), row[:, :0], 0.0, 0.0
    if backend != "reference":  # whose 0·∞ is NaN
        bias = torch.tensor([0.0, 0.0, 0.0, 0.0, -inf])
        task = {"soft_weight": 0.0, "task": fastkd.CrossEntropy(torch.tensor([1]))}
        task |= {"divergence": "reverse_kl", "teacher_head": fastkd.Head(head, bias.flip(0))}
        task |= {"student_head": fastkd.Head(head, bias), "return_terms": MAIN_TERMS}
        terms = functools.partial(call, **task)
        yield "terms alone", lambda s: terms(s)[0] + terms(s)[1]["entropy"], row, None, None
    yield from edges_of_rests(backend)
    yield from edges_of_drafts(linear)


def edges_of_drafts(linear: Callable) -> Iterator[tuple]:
    """A teacher without the draft's tokens, with nearly none of their mass, and the same model."""
    h, h_t, w, ids = *torch.randn(2, 4, 6), torch.randn(9, 6), torch.tensor([7, 0, 4])
    for name in OF_WHOLE_MASS:
        call = functools.partial(linear, h, divergence=Divergence(name))
        draft = fastkd.Draft(torch.arange(9), "whole")
        same = {"teacher_hidden": h, "teacher_head": w, "draft": draft}
        yield f"{name}: the same model", functools.partial(call, **same), w, 0.0, None
        for mass in (-torch.inf, -30.0):
            head = fastkd.Head(w, torch.zeros(9).index_fill(0, ids, mass))
            other = {"teacher_head": head, "draft": fastkd.Draft(ids, "whole")}
            value = {"forward_kl": 0.0, "total_variation": 1.0}.get(name)
            expected = (torch.inf, ...) if mass == -torch.inf else (None, None)
            expected = expected if value is None else (value, 0.0)
            without = functools.partial(call, teacher_hidden=h_t, **other)
            yield f"{name}: exp({mass}) of the mass", without, w[:3], *expected


def edges_of_rests(backend: str) -> Iterator[tuple]:
    """Tokens besides a top k, besides a match, and weights of 0."""
    loss, inf = function_of("soft_target_loss", backend), torch.inf
    x, y, row = torch.randn(4, 50), torch.randn(4, 50), torch.zeros(1, 2)
    only = torch.tensor([[0.0, -inf]])
    # A student without a rest, of which rounding makes none; one that excludes the rest.
    lacking, pair = torch.tensor([[0.0, 0.0, -inf]]), torch.tensor([[0, 1]])
    two = torch.tensor([[0.75, 0.25]]).log()
    for off in (-3e-8, 0.0, 3e-8):
        top = fastkd.TopK(pair, torch.tensor([[0.75, 0.25 + off]]).log())
        wanted = ... if backend == "reference" else loss(row, two)
        yield f"no rest, {off}", lambda s, t=top: loss(s, t), lacking, wanted, ...
    half = fastkd.TopK(pair, torch.tensor([[0.5, 0.25]]).log())
    wanted = loss(row, torch.tensor([[2.0, 1.0]]).log())
    yield "no other token", lambda s: loss(s, half), row, wanted, None
    yield "an excluded rest", lambda s: loss(s, half), lacking, inf, ...
    yield "JS, an excluded rest", lambda s: loss(s, half, divergence="js"), lacking, None, None
    none = torch.zeros(0).long()
    call = functools.partial(loss, teacher_logits=y, unmatched="bucket")
    match = fastkd.VocabularyMatch(none, none, 50, 50)
    yield "no token matched", lambda s: call(s, vocabulary=match), x, 0.0, 0.0
    few = fastkd.VocabularyMatch(torch.arange(3), torch.arange(3), 3, 50)
    yield "no rest of the student", lambda s: call(s, vocabulary=few), x[:, :3], inf, ...
    js = functools.partial(call, divergence="js")
    yield "JS, no rest of the student", lambda s: js(s, vocabulary=few), x[:, :3], None, None
    longer = {"vocabulary": dataclasses.replace(few, student_size=9), "unmatched": "sorted"}
    wanted = value_and_grad(of_match, x[:, :9].double(), y.double(), *longer.values(), 2.0, "js")
    longer |= {"temperature": 2.0, "scale_by_t2": False, "reduction": "none"}
    yield "a longer rest", functools.partial(js, **longer), x[:, :9], *wanted
    three, impossible = dataclasses.replace(few, student_size=50), x.clone()
    impossible[:, 3:] = -inf
    yield "JS, an impossible rest", lambda s: js(s, vocabulary=three), impossible, None, None
    some = torch.tensor([1.0, 1.0, 0.0, 1.0])
    each = functools.partial(loss, teacher_logits=y, mask=some, reduction="none")
    yield "divided by no position", lambda s: (each(s) / some).nansum(), x, None, None
    # An infinite loss times 0 is NaN, as documented; the finite gradient times 0 is 0.
    once = functools.partial(loss, teacher_logits=row, weights=torch.zeros(1))
    zero = 0.0 if backend != "reference" else ...
    yield "a weight of zero is not a mask", once, only, torch.tensor(torch.nan), zero
    yield "masked", functools.partial(once, mask=torch.zeros(1)), only, 0.0, 0.0


def growing() -> dict[str, tuple]:
    sizes = ((4, 4), (5, 6), (16, 64))

    def learning(*shape: int) -> Tensor:
        return torch.randn(*shape, requires_grad=True)

    def logits() -> Iterator[tuple]:
        for n, V in sizes:
            yield learning(n, 2, V), torch.randn(n, 2, V), torch.ones(n, 2), torch.randn(n, 2)

    def heads() -> Iterator[tuple]:
        for n, V in sizes:
            yield learning(n, 2, 6), learning(V, 6), torch.randn(n, 2, 9), torch.randn(V, 9)

    def adaptive(student: Tensor, teacher: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        return fastkd.soft_target_loss(
            student, teacher, mask=mask, weights=weights, divergence="adaptive_kl", backend="torch"
        )

    options = {"reduction": "none", "chunk_bytes": 264, "backend": "torch"}
    linear = functools.partial(fastkd.linear_soft_target_loss, **options)
    return {"adaptive KL": (adaptive, logits()), "rows of heads": (linear, heads())}


def bad() -> Iterator[tuple[str, Callable]]:
    x, y = torch.randn(2, 3, 5)
    loss = fastkd.soft_target_loss
    for words, options in (
        ("temperature must be greater than 0", {"temperature": 0.0}),
        ("temperature must be finite", {"temperature": math.nan}),
        ("did you mean 'forward_kl'", {"divergence": "forward"}),
        (r"'lk' is no word; pass Divergence\('lk'\)", {"divergence": "lk"}),
        ("denominator needs reduction", {"reduction": "sum", "denominator": 3}),
        ("denominator must be greater than 0", {"denominator": 0}),
        ("denominator must be greater than 0", {"denominator": torch.tensor(0)}),
        ("denominator must be a real number", {"denominator": torch.tensor(True)}),
        ("denominator must be a real number", {"denominator": torch.tensor(1j)}),
        ("denominator is on meta", {"denominator": torch.ones((), device="meta")}),
        ("0-d tensor", {"denominator": torch.ones(2)}),
        ("pass vocabulary=n", {"teacher_logits": y[:, :4]}),
        ("vocabulary must be at most 4", {"teacher_logits": y[:, :4], "vocabulary": 5}),
    ):
        yield words, functools.partial(loss, **{"student_logits": x, "teacher_logits": y} | options)
    yield from bad_heads()
    yield from bad_matches()


def bad_heads() -> Iterator[tuple[str, Callable]]:
    h, w, h_t, w_t = torch.randn(3, 6), torch.randn(13, 6), torch.randn(3, 4), torch.randn(13, 4)
    loss, linear = fastkd.soft_target_loss, fastkd.linear_soft_target_loss
    labels, whole, far = torch.tensor([0, 1, 2]), torch.arange(13), torch.ones(3, device="meta")
    task, draft, divergence = fastkd.CrossEntropy, fastkd.Draft, Divergence
    ratio, no_ids = functools.partial(fastkd.ImportanceRatio, at_most=2.0), far.long()
    old = torch.zeros(3)
    for words, options in (
        ("labels must be token ids 0 to 12 .* got 13", {"task": task(labels + 11)}),
        ("labels must have shape", {"task": task(labels[:2])}),
        ("labels is on meta but", {"task": task(no_ids)}),
        ("vocabulary must be at most 13", {"vocabulary": 14}),
        ("rows must be int64", {"draft": draft(rows=labels.int())}),
        ("rows must have shape", {"draft": draft(rows=labels[:2])}),
        ("rows must be the teacher's rows 0 to 2, got 4", {"draft": draft(rows=labels + 2)}),
        ("draft.rows is on meta but", {"draft": draft(rows=no_ids)}),
        ("draft.vocabulary must have shape .13,.", {"draft": draft(labels)}),
        ("draft.vocabulary must be int64", {"draft": draft(labels.int())}),
        ("draft.vocabulary must be token ids 0 to 12, got 14", {"draft": draft(whole + 2)}),
        (
            r"not have a token twice; of offsets .* d2t \+ torch.arange",
            {"draft": draft(whole // 4)},
        ),
        ("draft.vocabulary must not have a token twice$", {"draft": draft(whole * 5 % 12)}),
        ("draft.vocabulary is on meta but", {"draft": draft(whole.to("meta"))}),
        ("vocabulary has no use beside", {"vocabulary": 3, "draft": draft(whole)}),
        ("pass draft=fastkd.Draft.mass=", {"teacher_mass": "whole"}),
        ("pass draft=fastkd.Draft.vocabulary=", {"draft_vocabulary": whole}),
        ("unexpected keyword argument 'tau'", {"tau": 2.0}),
        (
            "draft.mass='whole' needs divergence",
            {"divergence": "js", "draft": draft(whole, "whole")},
        ),
        ("return_terms must be one of 'soft'", {"return_terms": ["kl"]}),
        ("must be a bool or a list of names, got 'soft'", {"return_terms": "soft"}),
        ("ids must be token ids 0 to 12, got 13", {"ratio": ratio(labels + 11, old)}),
        (r"weights must have shape \(3,\) ", {"task": task(labels, weights=torch.ones(4))}),
        ("weights is on meta", {"weights": far}),
        ('weights requires grad.*"none"', {"weights": torch.ones(3, requires_grad=True)}),
        ("ids is on meta but", {"ratio": ratio(no_ids, old)}),
        ("old_log_probs is on meta but", {"ratio": ratio(labels, far)}),
    ):
        yield words, functools.partial(linear, h, w, h_t, w_t, **options)
    top = fastkd.TopK(torch.tensor([[0, 3]] * 3), torch.tensor([[0.5, 0.4]] * 3).log())
    ids, log_probs, head, of_words = top.ids, top.log_probs, fastkd.Head, fastkd.TopK
    yield from (
        ("pass vocabulary=n", lambda: linear(h, w, h_t, w_t[:5])),
        ("teacher_hidden must have shape", lambda: linear(h, w, h_t[:2], w_t)),
        ("student_head must have shape", lambda: linear(h, w[:, :5], h_t, w_t)),
        ("teacher_hidden is torch", lambda: linear(h, w, h_t.double(), w_t)),
        ("student_head must have vocabulary entries", lambda: linear(h, w[:0], h_t, w_t[:0])),
        ("bias must have shape", lambda: head(w, w[:3, 0])),
        ("softcap must be greater than 0", lambda: head(w, softcap=0.0)),
        ("ids must be int64", lambda: head(w).subset(labels.int())),
        ("ids is on meta but", lambda: head(w).subset(no_ids)),
        ("name must be one of .* did you mean 'skew_kl'", lambda: divergence("skew")),
        ("rate must be at least 0", lambda: divergence("lk", rate=-1)),
        ("beta must be at most 1", lambda: divergence("js", beta=2)),
        ("labels must be integers", lambda: task(labels.float())),
        ("label_smoothing must be at most 1", lambda: task(labels, label_smoothing=2)),
        ("weight must be at least 0", lambda: task(labels, -1.0)),
        ("mass must be one of", lambda: draft(mass="part")),
        ("at_most must be greater than 0", lambda: ratio(labels, old, at_most=0.0)),
        ("ids must have shape", lambda: ratio(labels[:2], old)),
        ("ids must be integers", lambda: ratio(labels.float(), old)),
        ("teacher_head must be a Tensor or Head, got None", lambda: linear(h, w, h_t)),
        ("teacher_head: a TopK has no hidden states", lambda: linear(h, w, top, w_t)),
        (
            "teacher_head requires grad",
            lambda: linear(h, w, h_t, head(w_t, (w_t[:, 0] + 0).requires_grad_())),
        ),
        ("student_head must be a Tensor or Head", lambda: linear(h, "head", h_t, w_t)),
        ("ids must have shape", lambda: of_words(ids[:2], log_probs)),
        ("ids must be integers", lambda: of_words(ids.float(), log_probs)),
        ("tail must be one of", lambda: of_words(ids, log_probs, "rest")),
        ("ids must be token ids 0 to 12", lambda: linear(h, w, of_words(ids + 13, log_probs))),
        ("a token twice", lambda: linear(h, w, of_words(ids * 0, log_probs))),
        ("log_probs must be logarithms", lambda: linear(h, w, of_words(ids, log_probs + 0.72))),
        ("the student's positions, K", lambda: loss(torch.randn(4, 13), top)),
        ("ids is on meta but", lambda: loss(w[:3], of_words(no_ids[:, None], far[:, None]))),
        ("rows: a TopK has no hidden", lambda: linear(h, w, top, draft=draft(rows=labels))),
        ("draft.vocabulary: a TopK", lambda: linear(h, w, top, draft=draft(labels))),
        (
            "'teacher_entropy' needs the teacher's whole",
            lambda: linear(h, w, top, return_terms=["teacher_entropy"]),
        ),
    )


def bad_matches() -> Iterator[tuple[str, Callable]]:
    student, teacher, none = torch.randn(4, 9), torch.randn(4, 12), torch.zeros(0).long()
    match = fastkd.VocabularyMatch(torch.arange(5), torch.arange(5), 9, 12)
    loss, linear = fastkd.soft_target_loss, fastkd.linear_soft_target_loss
    heads, top = (torch.randn(9, 9), teacher, torch.randn(12, 12)), fastkd.TopK
    padded = dataclasses.replace(match, student_size=16)
    for words, options in (
        ("unmatched must be one of", {"vocabulary": match, "unmatched": "buckets"}),
        ("needs a VocabularyMatch as vocabulary", {"unmatched": "bucket"}),
        ("has no matched tokens", {"vocabulary": fastkd.VocabularyMatch(none, none, 9, 12)}),
        ("student_size 16 but student_logits has 9 entries", {"vocabulary": padded}),
        ("teacher_logits must have shape", {"teacher_logits": teacher[:2], "vocabulary": match}),
        (
            "needs the teacher's whole distribution",
            {
                "teacher_logits": top(torch.zeros(4, 1).long(), torch.zeros(4, 1)),
                "vocabulary": match,
            },
        ),
    ):
        right = {"student_logits": student, "teacher_logits": teacher}
        yield words, functools.partial(loss, **right | options)
    linear = functools.partial(linear, student, vocabulary=match)
    terms = {"return_terms": ("total_variation",)}
    yield "compares tokens of one vocabulary", lambda: linear(*heads, **terms)
    words = "teacher_size 12 but teacher_head has 11 entries"
    yield words, lambda: linear(*heads[:2], heads[2][:11])
    ids = torch.tensor([0, 1])
    for words, change in (
        ("student_ids must be a Tensor, got list", {"student_ids": [0, 1]}),
        ("student_ids must be int64", {"student_ids": ids.float()}),
        ("teacher_ids must be int64", {"teacher_ids": ids.int()}),
        (r"student_ids must have shape \(n,\)", {"student_ids": ids[None]}),
        ("student_ids must be token ids 0 to 3, got 4", {"student_ids": ids * 4}),
        ("teacher_ids must be token ids 0 to 7, got -1", {"teacher_ids": ids - 1}),
        ("teacher_ids must not repeat an id, got 0 twice", {"teacher_ids": ids * 0}),
        ("one id for each of student_ids, got 1 for 2", {"teacher_ids": ids[:1]}),
        ("student_size", {"student_size": 0}),
    ):
        sizes = {"student_size": 4, "teacher_size": 8}
        right = {"student_ids": ids, "teacher_ids": ids + 2} | sizes
        yield words, functools.partial(fastkd.VocabularyMatch, **right | change)
