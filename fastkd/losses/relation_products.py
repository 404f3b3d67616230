"""Losses between relation matrices, with their gradients, in PyTorch."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastkd._core.numerics import rescale_extreme_rows, upcast, working_dtype

# Under torch.compile and in the kernels (D, D) products never replace relations of up to this many
# rows: one graph serves all these sizes.
SIZES_OF_ONE_GRAPH = 128


@dataclass(frozen=True)
class Options:
    """Options shared by all layer pairs of one call."""

    tokens: float  # weight of relations between tokens, for each layer
    samples: float  # weight of relations between samples
    normalize: str = "l2"
    distance: str = "pearson"
    temperature: float = 10.0
    eps: float = 1e-8
    return_terms: bool = False  # the kernels compute the two terms only on request


def normalized(x: Tensor, normalize: str) -> Tensor:
    """Features (..., D), normalised for their relations (Table 4)."""
    if normalize == "l2":
        return F.normalize(x, dim=-1)
    if normalize == "layer_norm":
        return F.layer_norm(x, x.shape[-1:])
    return x.softmax(-1) if normalize == "softmax" else x


def relation_term(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    dx: Tensor | None,
    over: str,
    options: Options,
    feature_side: bool,
) -> Tensor:
    """Weighted loss of one layer pair ``over`` tokens or samples; adds its gradient to ``dx``.

    ``weights`` (B,) are factors of the samples' losses over tokens. With ``feature_side`` it is
    computed from (D, D) products.
    """
    if over == "samples":
        student, teacher = student.transpose(0, 1), teacher.transpose(0, 1)
        mask = None if mask is None else mask.transpose(0, 1)
        dx = None if dx is None else dx.transpose(0, 1)
    groups, N, Ds = student.shape  # a group has one (N, N) relation: a sample, or a position
    Dt = teacher.shape[-1]
    loss = student.new_zeros((), dtype=working_dtype(student))
    if groups == 0 or N < 2:
        return loss

    weight = loss + (options.tokens if over == "tokens" else options.samples)  # ()
    if mask is None:
        group_weight = weight / groups  # a Python float of sizes would compile a graph a size
    else:
        counts = mask.sum(1, keepdim=True) >= 2  # (groups, 1)
        mask = mask & counts
        group_weight = weight / counts.sum().clamp_min(1).to(loss.dtype)

    if over == "tokens" and weights is not None:
        group_weight = group_weight * weights  # (groups,)
    chunks = _chunks(student, Ds + Dt, feature_side)
    chunk = (groups + chunks - 1) // chunks
    for i in range(chunks):
        part = slice(i * chunk, (i + 1) * chunk)
        part_mask = None if mask is None else mask[part]
        s = Centred(student[part], part_mask, options.normalize)
        t = Centred(teacher[part], part_mask, options.normalize)
        part_dx = None if dx is None else dx[part]
        part_weight = group_weight[part] if group_weight.dim() else group_weight
        if feature_side:
            losses = pearson_by_features(s, t, part_weight, options.eps, part_dx)
        else:
            losses = _distance_by_relations(s, t, part_weight, options, part_dx)
        if part_mask is not None:
            losses = losses.masked_fill(~counts[part, 0], 0)
        loss = loss + (part_weight * losses).sum()
    return loss


def by_features(
    over: str, student: Tensor, teacher: Tensor, options: Options, gradient: bool, small: bool
) -> bool:
    """Whether the loss is computed from (D, D) products instead of (N, N) relations.

    ``small``: also in place of relations of few rows.
    """
    members = student.shape[1 if over == "tokens" else 0]
    return (
        options.distance == "pearson"
        and (members > SIZES_OF_ONE_GRAPH or small)
        and feature_side_is_cheaper(members, student.shape[-1], teacher.shape[-1], gradient)
    )


def feature_side_is_cheaper(N: int, Ds: int, Dt: int, gradient: bool) -> bool:
    """Whether (D, D) products need fewer multiplications for each of N rows than (N, N) ones."""
    relation_side = N * (Ds + Dt)
    feature_side = Ds * Ds + Ds * Dt + Dt * Dt
    if gradient:
        relation_side += N * Ds
        feature_side += Ds * Ds + Ds * Dt
    return feature_side < relation_side


def _chunks(x: Tensor, D: int, feature_side: bool) -> int:
    """Number of chunks for the relations of ``x`` (groups, N, Ds); ``D`` is Ds + Dt.

    Eager on the CPU a chunk should stay in the cache. Elsewhere it only bounds the memory, and long
    loops cost launches or compile time. A power of two gives few graphs as sizes change.
    """
    groups, N, _ = x.shape
    eager_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
    entries = groups * (N * D + (D * D if feature_side else 3 * N * N))
    most = 2**20 if eager_cpu else 2**26
    chunks = 1
    while chunks < groups and entries > chunks * most:
        chunks *= 2
    return chunks


class Centred:
    """Rows y of ``x`` (G, N, D), normalised by ``normalize``, minus their mean.

    Relations are computed from centred rows: at mean cosine 0.99 the moments of raw rows lose four
    digits. Normalised rows have a known length, |y_i|² = size·(1 − slack_i), and
    R_ij = ½|y_i|² + ½|y_j|² − ½|y_i − y_j|², which also keeps the rounding error of the row norms
    out of the relations.
    """

    def __init__(self, x: Tensor, mask: Tensor | None, normalize: str) -> None:
        half = x.dtype == torch.float16
        x = upcast(x)
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0)
        # Number of real rows: (G, 1), or (1, 1) for all groups.
        if mask is None:
            self.count = x.new_full((1, 1), x.shape[1])
        else:
            self.count = mask.sum(1, keepdim=True).clamp_min(1).to(x.dtype)
        self.normalized = normalize in ("l2", "layer_norm")
        self.size: int | Tensor = 1
        factor = None
        if self.normalized and not half:
            x, factor = rescale_extreme_rows(x)
        if normalize == "l2":
            smallest = 1e-12  # torch.nn.functional.normalize divides by max(‖x‖, this)
            norm = torch.linalg.vector_norm(x, dim=-1)  # (G, N)
            self.short = norm < smallest  # rows without the known length
            self.slack = self.short.to(x.dtype)
            # NaN where the norm overflows: with 1/inf the row would count as zero.
            self.scale = 1 / norm.clamp_min(smallest) + (norm - norm)  # (G, N)
        elif normalize == "layer_norm":
            # torch.nn.functional.layer_norm adds this to the variance.
            eps = 1e-5 if factor is None else 1e-5 * factor.squeeze(-1).square()
            self.size = x.shape[-1]
            columns = max(x.shape[-1], 1)
            x = x - x.sum(-1, keepdim=True) / columns
            x = x - x.sum(-1, keepdim=True) / columns  # the rounding error of a large mean
            variance = x.square().sum(-1) / columns
            self.short = torch.zeros_like(variance, dtype=torch.bool)
            self.slack = eps / (variance + eps)
            self.scale = (variance + eps).rsqrt() + (variance - variance)
        else:
            self.scale = x.new_ones(x.shape[:2])
        self.x, self.mask = x, mask
        mean = torch.bmm((self.scale / self.count)[:, None], x)  # (G, 1, D)
        rows = torch.addcmul(-mean, x, self.scale[..., None]) if self.normalized else x - mean
        # Between equal rows the rounding error of the mean, which depends on the processor's order
        # of summation, would count as a difference, and 1/eps multiplies it: centre again.
        real = torch.ones_like(self.scale)  # (G, N)
        if mask is not None:
            real.masked_fill_(~mask, 0)
        rest = torch.bmm((real / self.count)[:, None], rows)  # (G, 1, D)
        rows.sub_(rest)
        if mask is not None:
            rows.masked_fill_(~mask[..., None], 0)
        self.mean, self.rows = mean + rest, rows  # (G, 1, D), (G, N, D)
        if not self.normalized:
            # (G, 1); float64, because student and teacher sizes are subtracted.
            self.size = (mean.double() + rest).square().sum(-1)
        self.derivative = self.scale if factor is None else self.scale * factor.squeeze(-1)
        # float16 can't hold 1e12: there a row too short to normalise gets the gradient of its
        # normalised row.
        if half and normalize == "l2":
            self.derivative = self.scale.masked_fill(self.short, 1)

    def offsets(self, squares: Tensor, centred: bool = False) -> Tensor:
        """h (G, N) with R_ij = s_i·s_j + h_i + h_j + size; ``squares`` are |s_i|².

        Without normalisation ``size`` is the squared length of the mean. For normalised rows h has
        two equal forms: the error of the first grows with the squared length of the mean, that of
        the second with that of the centred rows. The first drops its constant if h will be
        ``centred`` and all rows use it: beside the constant, rows too short to normalise vanish.
        """
        h = torch.bmm(self.rows, self.mean.mT).squeeze(-1)  # (G, N)
        if self.normalized:
            length = torch.bmm(self.mean, self.mean.mT).squeeze(-1)  # (G, 1), squared
            spread = length < self.size / 2  # the mean is shorter than the centred rows
            constant = (length - self.size) / 2
            h = h + (constant.masked_fill(spread, 0) if centred else constant)
            known = -(squares + self.size * self.slack) / 2
            h = torch.where(spread | self.short, h, known)
        return h if self.mask is None else h.masked_fill(~self.mask, 0)

    def unscaled_gradient(self, h: Tensor, row_sums: Tensor) -> Tensor:
        """‖x_i‖ · ∂/∂x_i from H_i = Σ_j A_ij (s_j − s_i), overwriting ``h``, and Σ_j A_ij.

        The derivative of normalisation removes the component along a row of known length. It is
        computed from H_i and the row itself, which also removes the rounding error along the row.
        """
        along = row_sums
        if self.normalized:
            across = (h * self.x).sum(-1) * self.scale
            along = self.slack * row_sums - (across / self.size).masked_fill(self.short, 0)
        return h.addcmul_(self.x, (along * self.scale)[..., None])

    def centred_offsets(self, squares: Tensor) -> Tensor:
        """h minus its mean: R̃_ij = s_i·s_j + u_i + u_j is then the centred relation."""
        u = self.offsets(squares, centred=True)  # (G, N)
        for _ in range(2):  # equal rows must give exactly 0, without the mean's rounding error
            u = u - u.sum(1, keepdim=True) / self.count
            u = u if self.mask is None else u.masked_fill(~self.mask, 0)
        return u

    def relations(self, centred: bool) -> Tensor:
        """Relations (G, N, N) minus their mean if ``centred``, or minus ``size``; 0 at padding."""
        R = torch.bmm(self.rows, self.rows.mT)
        squares = R.diagonal(dim1=1, dim2=2)
        h = self.centred_offsets(squares) if centred else self.offsets(squares)
        R.add_(h[:, :, None]).add_(h[:, None, :])
        if self.mask is not None:
            R.masked_fill_(~(self.mask[:, :, None] & self.mask[:, None, :]), 0)
        return R


def _norms(x: Tensor) -> Tensor:
    return _norms_in_float64(x).to(x.dtype)


def _norms_in_float64(x: Tensor) -> Tensor:
    # By rows first: on the CPU a norm is one long sum, which loses digits.
    rows = torch.linalg.vector_norm(x, dim=2)
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)


def _reciprocal(x: Tensor) -> Tensor:
    """1/x where x > 0, else 0: the derivative of a norm at 0 is taken as 0."""
    return torch.where(x > 0, 1 / x, 0)


class _Distances(NamedTuple):
    """Losses of a chunk of relations, and their derivative ∂/∂R_s = k·A."""

    losses: Tensor  # (G,)
    A: Tensor  # (G, N, N), 0 at padding
    k: Tensor  # (G,)


def _distances(s: Centred, t: Centred, options: Options, gradient: bool) -> _Distances:
    pearson, temperature = options.distance == "pearson", options.temperature
    padding = None if s.mask is None else ~(s.mask[:, :, None] & s.mask[:, None, :])
    R_s, R_t = s.relations(pearson), t.relations(pearson)
    if pearson:
        # With a = R̃_s/σ_s and b = R̃_t/σ_t: 1 − cov/(σ_sσ_t + eps) without cancellation.
        sigma_s, sigma_t = _norms(R_s), _norms(R_t)
        denominator = sigma_s * sigma_t + options.eps
        a = R_s.mul_(_reciprocal(sigma_s)[:, None, None])
        b = R_t.mul_(_reciprocal(sigma_t)[:, None, None])
        A = b.sub_(a)
        losses = _norms(A).square() / 2
        losses = (sigma_s * sigma_t * losses + options.eps) / denominator
        if gradient:
            A.addcmul_(a, losses[:, None, None])  # b − ρ·a
        return _Distances(losses, A, -sigma_t / denominator)
    one = R_s.new_ones(R_s.shape[0])
    if options.distance == "mse":
        M = s.count.square().squeeze(1)
        constant = s.size - t.size
        if isinstance(constant, Tensor):
            constant = constant.to(R_s.dtype)[..., None]
        A = R_s - R_t + constant
        if padding is not None:
            A = A.masked_fill_(padding, 0)
        losses = _norms(A).square() / (2 * M)
        return _Distances(losses, A, one / M)
    # Softened relations differ little, and KL is quadratic in the difference: float32 would cancel.
    log_p_s = _log_softmax(R_s.double() / temperature, padding)
    log_p_t = _log_softmax(R_t.double() / temperature, padding)
    kl = (log_p_t.exp() * (log_p_t - log_p_s)).sum((1, 2))
    A = (log_p_s.exp() - log_p_t.exp()).to(R_s.dtype)
    if padding is not None:
        A = A.masked_fill_(padding, 0)
    return _Distances((temperature**2 * kl).to(R_s.dtype), A, one * temperature)


def _distance_by_relations(
    s: Centred, t: Centred, weight: Tensor, options: Options, dx: Tensor | None
) -> Tensor:
    """Losses (G,) from (N, N) relations; adds weight · their gradient to ``dx`` (G, N, Ds).

    ``weight`` is () or (G,).

    ∂/∂y_i = 2kΣ_j A_ij y_j = 2k(H_i + Σ_j A_ij y_i) with H_i = Σ_j A_ij (s_j − s_i). Σ_j A_ij y_j
    itself would lose digits between similar rows.
    """
    losses, A, k = _distances(s, t, options, dx is not None)
    if dx is None:
        return losses
    row_sums = A.sum(-1)  # (G, N)
    A.diagonal(dim1=1, dim2=2).sub_(row_sums)
    h = s.unscaled_gradient(torch.bmm(A, s.rows), row_sums)
    dx.addcmul_(h, ((2 * weight * k)[:, None] * s.derivative)[..., None])
    return losses


def _log_softmax(logits: Tensor, padding: Tensor | None) -> Tensor:
    """Log-probabilities of all (N, N) entries of a relation as one distribution; 0 at padding."""
    if padding is None:
        return logits.flatten(1).log_softmax(1).view_as(logits)
    logits = logits.masked_fill(padding, torch.finfo(logits.dtype).min)
    return logits.flatten(1).log_softmax(1).view_as(logits).masked_fill(padding, 0)


def pearson_by_features(
    s: Centred, t: Centred, weight: Tensor, eps: float, dx: Tensor | None
) -> Tensor:
    """`_distance_by_relations` for Pearson from (D, D) products: ⟨SSᵀ, TTᵀ⟩ = ‖TᵀS‖²."""
    u = s.centred_offsets(s.rows.square().sum(-1))  # (G, N)
    v = t.centred_offsets(t.rows.square().sum(-1))
    n = s.count
    StS = torch.bmm(s.rows.mT, s.rows)  # (G, Ds, Ds)
    TtS = torch.bmm(t.rows.mT, s.rows)  # (G, Dt, Ds)
    TtT = torch.bmm(t.rows.mT, t.rows)

    # In float64, since the loss is a small difference of such sums.
    def inner(x: Tensor, y: Tensor, product: Tensor) -> Tensor:
        linear = 2 * n * (x * y).sum(1, keepdim=True)
        return linear.squeeze(1) + _norms_in_float64(product).square()

    sigma_s, sigma_t = inner(u, u, StS).sqrt(), inner(v, v, TtT).sqrt()  # (G,)
    covariance = inner(u, v, TtS)
    denominator = sigma_s * sigma_t + eps
    losses = ((denominator - covariance) / denominator).to(n.dtype)
    if dx is None:
        return losses

    # ∂/∂R̃_s = p·R̃_t + q·R̃_s =: A
    p = -1 / denominator
    q = covariance / denominator.square() * sigma_t * _reciprocal(sigma_s)
    p, q = ((2 * weight * x)[:, None].to(n.dtype) for x in (p, q))  # (G, 1)
    w = p * v + q * u  # (G, N)
    row_sums = n * w
    # A·S = p·T(TᵀS) + q·S(SᵀS) + 1(wᵀS) + w(1ᵀS), where 1ᵀS is rounding error.
    h = torch.bmm(t.rows, TtS.mul_(p[..., None]))
    h.baddbmm_(s.rows, StS.mul_(q[..., None]))
    ones = torch.ones_like(w)
    h.baddbmm_(torch.stack((ones, w), 2), torch.bmm(torch.stack((w, ones), 1), s.rows))
    h.addcmul_(s.rows, row_sums[..., None], value=-1)
    h = s.unscaled_gradient(h, row_sums).mul_(s.derivative[..., None])
    dx += h if s.mask is None else h.masked_fill_(~s.mask[..., None], 0)
    return losses


def paired_loss(
    y_s: Tensor, y_t: Tensor, same: Tensor, options: Options, weights: Tensor | None = None
) -> Tensor:
    """Mean loss of the groups of rows in (G, M, D); ``same`` (G, M, M) is True within a group.

    ``weights`` (G,) are factors of the losses of all groups in a (M, D).

    A value of a group, such as its size, is repeated at each of its rows, and sums over a group
    are products with ``same``, which are deterministic. Autograd computes the gradient.
    """
    member = same.to(y_s.dtype)
    size = member.sum(-1)  # (G, M), of the row's group
    weight = torch.where(size >= 2, 1 / size.clamp_min(1), 0)  # of a row in its group
    size = size.clamp_min(1)
    first = same.to(torch.uint8).argmax(-1)  # (G, M), first row of the row's group

    def group_sum(x: Tensor) -> Tensor:
        return torch.bmm(member, x[..., None]).squeeze(-1)

    def relations(y: Tensor) -> Tensor:
        """R_ij = s_i·s_j + h_i + h_j of centred rows s, minus a constant of no effect."""
        # The group's first row is subtracted before its mean, so that equal rows give exactly 0.
        # It is detached: neither the centred rows nor the mean depend on it.
        origin = y.detach().gather(1, first[..., None].expand_as(y))
        mean = torch.bmm(member, y - origin) / size[..., None]
        rows = torch.where((size > 1)[..., None], y - origin - mean, 0)
        mean = origin + mean
        h = (rows * mean).sum(-1)
        shift = mean.square().sum(-1) / 2 if options.distance == "mse" else -group_sum(h) / size
        h = h + shift
        R = torch.bmm(rows, rows.mT) + h[:, :, None] + h[:, None, :]
        return torch.where(same, R, 0)

    R_s, R_t = relations(y_s), relations(y_t)
    if options.distance == "pearson":
        squares = [group_sum(R.square().sum(-1)) for R in (R_s, R_t)]
        sigma_s, sigma_t = (torch.where(x > 0, x, 1).sqrt() * (x > 0) for x in squares)
        a = R_s * _reciprocal(sigma_s)[..., None]
        b = R_t * _reciprocal(sigma_t)[..., None]
        losses = group_sum((b - a).square().sum(-1)) / 2
        losses = (sigma_s * sigma_t * losses + options.eps) / (sigma_s * sigma_t + options.eps)
    elif options.distance == "mse":
        losses = group_sum((R_s - R_t).square().sum(-1)) / (2 * size.square())
    else:
        log_p_s, log_p_t = (_log_softmax_of_groups(R, same, options) for R in (R_s, R_t))
        kl = (log_p_t.exp() * (log_p_t - log_p_s)).masked_fill(~same, 0).sum(-1)
        losses = options.temperature**2 * group_sum(kl.to(size.dtype))
    losses = losses * weight
    losses = losses if weights is None else losses * weights[:, None]
    return losses.sum() / weight.sum().clamp_min(1)


def _log_softmax_of_groups(R: Tensor, same: Tensor, options: Options) -> Tensor:
    lowest = torch.finfo(torch.float64).min
    logits = (R.double() / options.temperature).masked_fill(~same, lowest)
    rows = logits.logsumexp(-1)[:, None, :]  # (G, 1, M)
    return logits - rows.masked_fill(~same, lowest).logsumexp(-1, keepdim=True)
