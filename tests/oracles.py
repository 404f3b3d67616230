"""What the losses mean, in float64 and in the simplest way: written from the papers' equations.

Nothing here is taken from the package, whose references have oracles of their own in these
functions. They loop where the equation sums, are differentiable, and take float64 tensors; masks
are bool, True = real. Section numbers and equations are those of `docs/math.md`.
"""

import itertools

import torch
from torch import Tensor

# How far a unit row may be from norm 1: rounding a norm scales a whole row, which changes every
# relation of nearly parallel rows by as much, and no method can take it out.
ROUNDED_NORMS = 0.0


def relation(student, teacher, mask, over, normalize, distance, temperature, eps) -> Tensor:
    """FCD, eqs. 3-9: one relation a sample, or a token position, over its real members only."""
    if over == "samples":
        student, teacher, mask = student.transpose(0, 1), teacher.transpose(0, 1), mask.mT
    losses = []
    for s, t, real in zip(student, teacher, mask, strict=True):
        if int(real.sum()) < 2:
            continue
        R_s, R_t = (_relation(x[real], normalize) for x in (s, t))
        if distance == "pearson":
            X, Y = R_s - R_s.mean(), R_t - R_t.mean()
            losses.append(1 - (X * Y).sum() / (_norm(X) * _norm(Y) + eps))
        elif distance == "mse":
            losses.append((R_s - R_t).square().mean() / 2)
        else:
            log_s, log_t = (torch.log_softmax(R.flatten() / temperature, 0) for R in (R_s, R_t))
            losses.append(temperature**2 * (log_t.exp() * (log_t - log_s)).sum())
    return torch.stack(losses).mean() if losses else student.sum() * 0


def _relation(x: Tensor, normalize: str) -> Tensor:
    if normalize == "l2":
        x = x / _norm(x, dim=-1, keepdim=True).clamp_min(1e-12)
        x = x * (1 + ROUNDED_NORMS * (torch.rand(len(x), 1, dtype=x.dtype) - 0.5))
    elif normalize == "layer_norm":
        centred = x - x.mean(-1, keepdim=True)
        x = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    elif normalize == "softmax":
        x = x.softmax(-1)
    return x @ x.mT


def _norm(x: Tensor, **dim) -> Tensor:
    """‖x‖ with gradient 0 at 0, and without overflow or underflow of its squares."""
    return torch.linalg.vector_norm(x, **dim)


def nearest(student, teacher, labels, bank_labels, k, tolerance) -> Tensor:
    """Per row (1/D) Σ of the squared distances to its k nearest rows of the same label."""
    student, teacher = student.flatten(1), teacher.flatten(1)
    losses = []
    for x, label in zip(student, labels.tolist(), strict=True):
        same = [
            j
            for j, other in enumerate(bank_labels.tolist())
            if (label == other if tolerance is None else abs(label - other) <= tolerance)
        ]
        squares = (teacher[same] - x).square().sum(-1)  # as many as there are of its label
        order = squares.detach().argsort(stable=True)[:k]
        total = squares[order].sum()
        # A row of its label that is no number poisons it, chosen or not.
        losses.append((total + 0 * squares.detach().sum()) / max(student.shape[1], 1))
    return torch.stack(losses) if losses else student.sum(1)


def cos_nce(student, teacher, negatives, labels, mask) -> tuple[Tensor, Tensor]:
    """LRC-BERT, eqs. 1-2, of every position (B, P), and which positions compare anything."""
    B, P, _ = student.shape
    losses, compared = student.sum(-1) * 0, torch.zeros(B, P, dtype=torch.bool)
    rows = []
    for i, p in itertools.product(range(B), range(P)):
        if negatives is not None:
            others = list((negatives if negatives.dim() == 3 else negatives[i])[:, p])
        else:
            others = [
                teacher[j, p]
                for j in range(B)
                if mask[j, p] and (j != i if labels is None else labels[j] != labels[i])
            ]
        compared[i, p] = bool(mask[i, p]) and len(others) > 0
        if compared[i, p]:
            z = student[i, p]
            positive = 1 - _cosine(teacher[i, p], z)
            terms = [2 - ((1 - _cosine(n, z)) - positive) for n in others]
            rows.append((i, p, sum(terms) / (2 * len(others)) + positive))
    for i, p, value in rows:
        losses = losses.index_put((torch.tensor(i), torch.tensor(p)), value)
    return losses, compared


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    x, y = (v / v.detach().abs().max() if v.any() else v for v in (x, y))
    if not (x.any() and y.any()):  # a zero vector has no direction: cosine and gradient are 0
        return (x * y).sum() * 0
    return (x * y).sum() / (_norm(x) * _norm(y))


def correlation(student, teacher, mask, ridge, top_k) -> Tensor:
    """MC3KD, eqs. 4-7, of one item: −Σ of the singular values of the whitened cross-covariance."""
    s, t = student[mask], teacher[mask]
    if len(s) < 2:
        return student.sum() * 0
    s, t = s - s.mean(0), t - t.mean(0)
    spread = len(s) - 1
    # The singular values are the same with any root of the covariances: here Cholesky's.
    C_s, C_t = (
        torch.linalg.cholesky(x.mT @ x / spread + r * torch.eye(x.shape[1], dtype=x.dtype))
        for x, r in ((s, ridge[0]), (t, ridge[1]))
    )
    half = torch.linalg.solve_triangular(C_t, t.mT @ s / spread, upper=False)
    whitened = torch.linalg.solve_triangular(C_s, half.mT, upper=False)
    return -torch.linalg.svdvals(whitened)[:top_k].sum()


def root(a: Tensor, inverse: bool, ridge: float) -> Tensor:
    """A^½ or (A + ridge·I)^-½ with the gradient of `docs/math.md` by divided differences."""
    return _Root.apply((a + a.mT) / 2, inverse, ridge)


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, inverse, ridge):
        values, vectors = torch.linalg.eigh(a)
        values = values.clamp_min(0) + ridge
        ctx.save_for_backward(values.sqrt(), vectors)
        ctx.inverse = inverse
        f = values.rsqrt() if inverse else values.sqrt()
        return (vectors * f[..., None, :]) @ vectors.mT

    @staticmethod
    def backward(ctx, grad):
        r, vectors = ctx.saved_tensors
        sums = r[..., :, None] + r[..., None, :]
        scale = torch.where(sums == 0, 0, 1 / torch.where(sums == 0, 1, sums))
        if ctx.inverse:
            scale = -scale / (r[..., :, None] * r[..., None, :])
        inner = vectors.mT @ ((grad + grad.mT) / 2) @ vectors
        return vectors @ (inner * scale) @ vectors.mT, None, None


def cayley(skew: Tensor) -> Tensor:
    """LRKD, eq. 6: (I + Q)(I − Q)⁻¹."""
    identity = torch.eye(skew.shape[-1], dtype=skew.dtype)
    return (identity + skew) @ torch.linalg.inv(identity - skew)


def layer_norm_mse(x: Tensor, y: Tensor, eps: float) -> Tensor:
    """½ ‖norm(x) − norm(y)‖² of each row."""
    x, y = (
        (v - v.mean(-1, keepdim=True)) / (v.var(-1, correction=0, keepdim=True) + eps).sqrt()
        for v in (x, y)
    )
    return (x - y).square().sum(-1) / 2


def attention(student: Tensor, teacher: Tensor, mask: Tensor, heads: str) -> Tensor:
    """TinyBERT, eq. 7, of each sample: the mean over heads of the MSE of the real tokens' pairs."""
    losses = []
    for A_s, A_t, real in zip(student, teacher, mask, strict=True):
        A_s, A_t = A_s[:, real][:, :, real], A_t[:, real][:, :, real]
        if not real.any():
            losses.append(A_s.sum())
        elif heads == "mean":
            losses.append((A_s.mean(0) - A_t.mean(0)).square().mean())
        else:
            pairs = zip(A_s, A_t, strict=True)
            losses.append(torch.stack([(s - t).square().mean() for s, t in pairs]).mean())
    return torch.stack(losses) if losses else student.sum((1, 2, 3))


def soft_targets(student, teacher, temperature, divergence) -> Tensor:
    """The divergence of each row of logits, without τ²."""
    log_s, log_t = ((x / temperature).log_softmax(-1) for x in (student, teacher))
    if divergence == "forward_kl":
        return _kl(log_t, log_s)
    if divergence == "reverse_kl":
        return _kl(log_s, log_t)
    if divergence == "js":
        m = (log_s.exp() + log_t.exp()) / 2
        log_m = torch.where(m == 0, 0, torch.where(m == 0, 1, m).log())
        return (_kl(log_t, log_m) + _kl(log_s, log_m)) / 2
    weights = [
        _head_weight(s.exp(), t.exp())
        for s, t in zip(log_s.detach().flatten(0, -2), log_t.flatten(0, -2), strict=True)
    ]
    w = torch.tensor(weights, dtype=student.dtype).reshape(student.shape[:-1])
    forward, reverse = _kl(log_t, log_s), _kl(log_s, log_t)
    return w * forward + (1 - w) * reverse


def _head_weight(p_s: Tensor, p_t: Tensor) -> float:
    """g_head / (g_head + g_tail); the head is the most probable entries up to a mass of ½."""
    head, mass = 0.0, 0.0
    gap = (p_t - p_s).abs()
    for place, i in enumerate(p_t.argsort(descending=True, stable=True).tolist()):
        mass += p_t[i].item()
        if place > 0 and mass > 0.5:
            break
        head += gap[i].item()
    return head / gap.sum().item() if gap.sum() > 0 else 0.5


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    p = log_p.exp()
    nothing = p == 0
    return (p * (log_p - log_q).masked_fill(nothing, 0)).sum(-1)


def class_similarity(features: Tensor, labels: Tensor) -> Tensor:
    """M_ICS: mean cosine of each sample with the samples of its class, itself included."""
    means = [
        torch.stack([_cosine(x, y) for y in features[labels == label]]).mean()
        for x, label in zip(features, labels, strict=True)
    ]
    return torch.stack(means).mean() if means else features.sum()


def canonical_correlations(x: Tensor, y: Tensor) -> Tensor:
    """Cosines of the principal angles between the centred columns' spans."""
    bases = []
    for v in (x, y):
        u, s, _ = torch.linalg.svd(v - v.mean(0), full_matrices=False)
        bases.append(u[:, s > 1e-10 * s.max().clamp_min(1e-300)])
    found = torch.linalg.svdvals(bases[0].mT @ bases[1])
    count = max(0, min(len(x) - 1, x.shape[1], y.shape[1]))
    return torch.cat([found.clamp_max(1), x.new_zeros(count)])[:count]


def pooled(x: Tensor, mask: Tensor, how: str) -> Tensor:
    """(B, N, D) to (B, D): the first real token, or the mean of the real ones; zeros without."""
    rows = []
    for sample, real in zip(x, mask, strict=True):
        tokens = sample[real]
        empty = x.new_zeros(x.shape[-1])
        rows.append(empty if not len(tokens) else tokens[0] if how == "cls" else tokens.mean(0))
    return torch.stack(rows) if rows else x.sum(1)
