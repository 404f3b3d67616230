"""Feature correlation distillation (FCD): relations between tokens and between samples."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fastkd._core import check
from fastkd._core.dispatch import Backend, backend_of, widest
from fastkd._core.fallback import by_reference
from fastkd._core.module import LossModule
from fastkd._core.numerics import (
    GradientInForward,
    apply,
    dense_rows,
    once_differentiable,
    reduced,
    times_upstream,
    upcast,
    values_readable,
    working_dtype,
)
from fastkd._core.plans import planned
from fastkd.distributed import Group, InGroup, Ranks, ranks_of

Over = Literal["tokens", "samples"]
OVER = get_args(Over)
Normalize = Literal["l2", "layer_norm", "softmax", "none"]
NORMALIZE = get_args(Normalize)
Distance = Literal["pearson", "mse", "kl"]
DISTANCE = get_args(Distance)


def relation_loss_ref(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None = None,
    *,
    over: Over = "tokens",
    normalize: Normalize = "l2",
    distance: Distance = "pearson",
    temperature: float = 10.0,
    eps: float = 1e-8,
    segments: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """`relation_loss` as the paper writes it: full (N, N) relations and autograd."""
    if segments is not None:
        pairs = [(student, teacher)]
        [(student, teacher)], mask, weights = _unpacked(pairs, mask, weights, segments)
    if over == "samples":
        student, teacher = student.transpose(0, 1), teacher.transpose(0, 1)
        # Compiled by Inductor, a transposed view of a mask gives a wrong gradient.
        mask = None if mask is None else mask.T.contiguous()
    if mask is None:
        mask = torch.ones(student.shape[:2], dtype=torch.bool, device=student.device)
    rows = upcast(student), upcast(teacher), mask != 0
    gamma = _distances(_products, normalize, distance, temperature, eps, *rows)
    return reduced(gamma, mask.bool().sum(1) >= 2, "mean", weights)  # eqs. 8, 9


def _products(F_hat: Tensor, mask: Tensor) -> Tensor:
    return F_hat @ F_hat.mT  # eqs. 3, 4: (B, N, N), over samples (N, B, B)


def _distances(
    relations: Callable[[Tensor, Tensor], Tensor],
    normalize: str,
    distance: str,
    tau: float,
    eps: float,
    F_s: Tensor,
    F_t: Tensor,
    mask: Tensor,
) -> Tensor:
    """γ (G,) between the relations of the rows (G, N, D) of each group; 0 of fewer than two."""
    F_s, F_t = F_s.masked_fill(~mask[..., None], 0), F_t.masked_fill(~mask[..., None], 0)
    F_s, F_t = normalized(F_s, normalize), normalized(F_t, normalize)
    R_s, R_t = relations(F_s, mask).flatten(1), relations(F_t, mask).flatten(1)
    pair = (mask[:, :, None] & mask[:, None, :]).flatten(1)
    M = pair.sum(1).clamp_min(1)  # valid entries of each relation

    if distance == "pearson":  # eqs. 6, 7
        X = (R_s - (R_s * pair).sum(1, keepdim=True) / M[:, None]) * pair
        Y = (R_t - (R_t * pair).sum(1, keepdim=True) / M[:, None]) * pair
        gamma = 1 - (X * Y).sum(1) / (X.norm(dim=1) * Y.norm(dim=1) + eps)
    elif distance == "mse":  # eq. 13
        gamma = ((R_s - R_t) * pair).square().sum(1) / (2 * M)
    else:  # eq. 11
        lowest = torch.finfo(R_s.dtype).min
        log_p_s = (R_s / tau).masked_fill(~pair, lowest).log_softmax(1)
        log_p_t = (R_t / tau).masked_fill(~pair, lowest).log_softmax(1)
        gamma = tau**2 * (log_p_t.exp() * (log_p_t - log_p_s) * pair).sum(1)
    return gamma.masked_fill(mask.sum(1) < 2, 0)  # one token alone has no relation


def _by_differences(unit: bool, F_hat: Tensor, mask: Tensor) -> Tensor:
    """F̂F̂ᵀ of rows, ``unit`` or of any length, from products of their differences.

    With u = f − f_1, f_i·f_j is u_i·u_j + (‖f_i‖² − ‖u_i‖² + ‖f_j‖² − ‖u_j‖²)/2, and lengths of
    unit rows are constants. The product F̂F̂ᵀ rounds the entries of equal rows unlike each other, as
    the BLAS library does, and Pearson's correlation would multiply these errors by 1/eps.
    """
    first = mask & (mask.cumsum(1) == 1)
    u = F_hat - F_hat.detach().masked_fill(~first[..., None], 0).sum(1, keepdim=True)
    length = F_hat.square().sum(-1)
    if unit:  # a row too short to normalise isn't of length 1
        length = torch.where(length > 0.9999, length.detach(), length)
    rest = (length - u.square().sum(-1)) / 2
    return u @ u.mT + rest[:, :, None] + rest[:, None, :]


def normalized(x: Tensor, normalize: str) -> Tensor:
    """Features (..., D), normalised for their relations (Table 4)."""
    if normalize == "l2":
        return F.normalize(x, dim=-1)
    if normalize == "l2 of float16":  # which can't hold 1/1e-12, the gradient's factor at 0
        return torch.where(x.detach().norm(dim=-1, keepdim=True) == 0, x, F.normalize(x, dim=-1))
    if normalize == "layer_norm":
        return F.layer_norm(x, x.shape[-1:])
    return x.softmax(-1) if normalize == "softmax" else x


def relation_loss(  # noqa: PLR0913 - a public loss
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None = None,
    *,
    over: Over = "tokens",
    normalize: Normalize = "l2",
    distance: Distance = "pearson",
    temperature: float = 10.0,
    eps: float = 1e-8,
    segments: Tensor | None = None,
    weights: Tensor | None = None,
    backend: Backend = "auto",
    gather: bool = False,
    group: Group = None,
) -> Tensor:
    """Distance between the relation matrices of student and teacher (FCD, eqs. 3-9).

    R = F̂F̂ᵀ with F̂ the normalised features: for ``over="tokens"`` the (N, N) relations between
    the tokens of a sample, averaged over samples (eqs. 3, 8); for ``"samples"`` the (B, B)
    relations between the samples at a token position, averaged over positions (eqs. 4, 9). With
    the defaults the distance is 1 − ρ(R_s, R_t), Pearson's correlation (eqs. 6, 7), and the loss
    equals the paper's Figure 4. The hidden sizes may differ.

    Args:
        student: (B, N, Ds) features, floating. Over samples also (B, Ds), one embedding a sample.
        teacher: (B, N, Dt) or (B, Dt), of the same dtype and device, without gradient.
        mask: (B, N) or (B,), bool or 0/1, 1 = real token. Pairs with a padded member are left out.
            Samples (positions) with fewer than two real members don't count in the average.
        over: ``"tokens"`` or ``"samples"``.
        normalize: ``"l2"``, ``"layer_norm"`` (without affine), ``"softmax"`` (over the features)
            or ``"none"``.
        distance: ``"pearson"``; ``"mse"``, ½·mean (R_s − R_t)² (eq. 13); or ``"kl"``,
            τ²·KL(softmax(R_t/τ) ‖ softmax(R_s/τ)) over all entries of a relation (eq. 11).
        temperature: τ of ``"kl"``.
        eps: added to the product of the two norms in Pearson's denominator, as in Figure 4.
        segments: (B, N) integers, document ids of the tokens where a row packs several documents:
            the loss is that of one padded row per document. On the CPU and outside of a graph:
            elsewhere their values can't be read.
        weights: (B,) floating, factors of the samples' losses over tokens, of any sign and without
            gradient. A weight of 0 is no mask: the sample still counts in the average. With
            ``segments`` all documents of a row have its weight. Not over samples.
        backend: ``"auto"``, ``"torch"``; ``"cpp"``, ``"triton"`` (only ``"l2"``, ``"pearson"``).
        gather, group: compare the samples of all processes, or of a group; see
            `fastkd.distributed`.

    Returns:
        Scalar in float32 (float64 for float64 input); 0 where nothing can be compared.

    Raises:
        TypeError, ValueError: a wrong shape, dtype, device or option, or a teacher that requires
            grad.

    >>> student = torch.randn(2, 16, 64, requires_grad=True)
    >>> teacher = torch.randn(2, 16, 128)
    >>> loss = relation_loss(student, teacher, over="samples")
    >>> loss.backward()
    >>> loss.shape, student.grad.shape
    (torch.Size([]), torch.Size([2, 16, 64]))
    """
    check.choice("over", over, OVER)
    _check_options(normalize, distance, temperature, eps)
    if weights is not None and over == "samples":
        raise ValueError(
            "weights are those of samples, and over='samples' compares pairs of samples; leave "
            "them out, or take over='tokens'"
        )
    terms = float(over == "tokens"), float(over == "samples")
    options = Options(*terms, normalize, distance, temperature, eps)
    pairs = [(student, teacher)]
    ranks = ranks_of(gather, group)
    return _relations(pairs, mask, segments, options, backend, ranks, weights)[0]


@dataclass(eq=False, repr=False)
class FCDLoss(LossModule, InGroup):
    """alpha · relations between tokens + beta · relations between samples (eq. 10).

    See `relation_loss`. Takes one layer pair or lists of them, whose losses are averaged; stores
    its options and no parameters.

    Args:
        alpha, beta: weights, at least 0, and one of them above it.
        normalize, distance, temperature, eps, backend, gather, group: as in `relation_loss`.

    ``forward(student, teacher, mask=None, *, segments=None, return_terms=False)``.

    >>> student, teacher = torch.randn(4, 8, 16, requires_grad=True), torch.randn(4, 8, 32)
    >>> FCDLoss(beta=0.5)(student, teacher, mask=torch.ones(4, 8)).shape
    torch.Size([])
    """

    alpha: float = 1.0
    beta: float = 1.0
    normalize: Normalize = "l2"
    distance: Distance = "pearson"
    _: KW_ONLY
    temperature: float = 10.0
    eps: float = 1e-8
    backend: Backend = "auto"
    gather: bool = False
    group: Group = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_weights()

    def check_options(self) -> None:
        super().check_options()
        check.number("alpha", self.alpha, at_least=0)
        check.number("beta", self.beta, at_least=0)
        _check_options(self.normalize, self.distance, self.temperature, self.eps)

    def _check_weights(self) -> None:
        if self.alpha == self.beta == 0:
            raise ValueError("alpha and beta are both 0, which compares nothing; raise one of them")

    def forward(
        self,
        student: Tensor | Sequence[Tensor],
        teacher: Tensor | Sequence[Tensor],
        mask: Tensor | None = None,
        *,
        segments: Tensor | None = None,
        return_terms: bool = False,
    ) -> Any:
        """Loss of student (B, N, Ds) and teacher (B, N, Dt) features, or of lists of them.

        With ``alpha=0`` also of (B, Ds) and (B, Dt). With ``return_terms`` the result is
        ``(loss, {"tokens": ..., "samples": ...})``: the terms whose weight isn't 0, unweighted and
        detached, from the same pass.
        """
        self._check_weights()
        pairs = check.layer_pairs(student, teacher)
        options = Options(
            self.alpha / len(pairs),
            self.beta / len(pairs),
            self.normalize,
            self.distance,
            # In a dynamic graph a float that is first read inside of an autograd.Function belongs
            # to the function's graph, where a second call can't read it.
            self.temperature * 1.0,
            self.eps * 1.0,
            return_terms,
        )
        ranks = ranks_of(self.gather, self.group)
        loss, terms = _relations(pairs, mask, segments, options, self.backend, ranks)
        if terms is None or not return_terms:
            return loss
        weighted = zip(OVER, terms.unbind(), (self.alpha, self.beta), strict=True)
        return loss, {over: term / weight for over, term, weight in weighted if weight}


def _check_options(normalize: str, distance: str, temperature: float, eps: float) -> None:
    check.choice("normalize", normalize, NORMALIZE)
    check.choice("distance", distance, DISTANCE)
    check.number("temperature", temperature, above=0)
    check.number("eps", eps, above=0)


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


Pairs = Sequence[tuple[Tensor, Tensor]]  # student and teacher features of each layer


@planned
def _relations(
    pairs: Pairs,
    mask: Tensor | None,
    segments: Tensor | None,
    options: Options,
    backend: str,
    ranks: Ranks | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Weighted loss () of all layers, and its two terms (2,) in the order of OVER, detached.

    The terms may be None without ``options.return_terms``. ``weights`` (B,) are factors of the
    samples' losses over tokens.
    """
    dims = 0
    for student, teacher in pairs:
        check.pair(student, teacher, min_ndim=2)
        dims = dims or min(student.dim(), 3)
        if not student.dim() == teacher.dim() == dims:
            check.floating("student", student, dims)
            check.floating("teacher", teacher, dims)
    if dims == 2:
        pairs, mask = _with_one_token(pairs, mask, segments, options)
    first = pairs[0][0]
    rows = first.shape[:2]
    for student, teacher in pairs:
        check.shape("student", student, (*rows, student.size(2)), "(B, N) of the first layer")
        check.shape("teacher", teacher, (*rows, teacher.size(2)), "(B, N) of student")
    mask = check.mask(mask, rows, first.device)
    remedy = "call it once for each sample whose weight learns"
    related = None if weights is None or mask is None else mask.sum(1) >= 2
    weights = check.weights(weights, rows[:1], first, related, remedy=remedy)
    if segments is not None:
        pairs, mask, weights = _unpacked(pairs, mask, weights, segments)
    if ranks is not None:
        return _across_ranks(pairs, mask, weights, options, backend, ranks)

    call = {"normalize": options.normalize, "distance": options.distance}
    runs_on = backend_of(backend, "relation_loss", widest([x for x, _ in pairs]), **call)
    if runs_on == "torch":
        return _by_reference(pairs, mask, weights, options)
    if runs_on == "cpp":
        results = [apply(_CppRelations, options, mask, weights, *pair) for pair in pairs]
    else:
        from fastkd.kernels.pointers import layer_groups

        # Layers of one shape share their launches.
        groups = [itertools.chain(*(pairs[i] for i in group)) for group in layer_groups(pairs)]
        results = [apply(_TritonRelations, options, mask, weights, *group) for group in groups]
    losses, terms = zip(*results, strict=True)
    added = functools.partial(functools.reduce, torch.add)
    return added(losses), None if terms[0] is None else added(terms)


def _with_one_token(
    pairs: Pairs, mask: Tensor | None, segments: Tensor | None, options: Options
) -> tuple[Pairs, Tensor | None]:
    """Embeddings (B, D) and their mask (B,) as samples of one token."""
    if options.tokens:
        raise ValueError(
            "student is (B, D), which has no tokens to relate; pass (B, N, D), or compare samples "
            "only: over='samples', FCDLoss(alpha=0)"
        )
    if segments is not None:
        raise ValueError(
            "segments are document ids of tokens, and student (B, D) has no tokens; leave them out"
        )
    mask = check.mask(mask, pairs[0][0].shape[:1], pairs[0][0].device)
    mask = None if mask is None else mask[:, None]
    return [(student[:, None], teacher[:, None]) for student, teacher in pairs], mask


def _by_reference(
    pairs: Pairs, mask: Tensor | None, weights: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """`_relations` by `_distances`, a chunk of relations at a time."""
    first = pairs[0][0]
    if mask is None:
        mask = first.new_ones(first.shape[:2], dtype=torch.bool)
    normalize = options.normalize
    relations = functools.partial(_by_differences, normalize == "l2")
    if normalize == "l2" and first.dtype == torch.float16:
        normalize = "l2 of float16"
    choices = relations, normalize, options.distance, options.temperature, options.eps
    zero = functools.reduce(torch.add, (upcast(student.detach()[:0]).sum() for student, _ in pairs))
    terms = []
    for over, weight in zip(OVER, (options.tokens, options.samples), strict=True):
        term = zero
        for student, teacher in pairs if weight else ():
            rows = student, teacher, mask
            if over == "samples":
                rows = student.transpose(0, 1), teacher.transpose(0, 1), mask.T
            N, D = rows[0].shape[1], student.shape[2] + teacher.shape[2]
            gamma = by_reference(functools.partial(_distances, *choices), N * (N + D), *rows)
            of_groups = weights if over == "tokens" else None
            term = term + weight * reduced(gamma, rows[2].sum(1) >= 2, "mean", of_groups)
        terms.append(term)
    return terms[0] + terms[1], torch.stack(terms).detach()


def _across_ranks(
    pairs: Pairs,
    mask: Tensor | None,
    weights: Tensor | None,
    options: Options,
    backend: str,
    ranks: Ranks,
) -> tuple[Tensor, Tensor]:
    """`_relations` of the samples of all processes.

    Relations between tokens stay within a sample: only their mean is taken over all processes.
    """
    first = pairs[0][0]
    tokens = samples = first.new_zeros((), dtype=working_dtype(first))
    if options.tokens:
        of_tokens = dataclasses.replace(options, samples=0.0)
        own, _ = _relations(pairs, mask, None, of_tokens, backend, weights=weights)
        real = first.new_ones(first.shape[:2], dtype=torch.bool) if mask is None else mask
        count = (real.sum(1) >= 2).sum()
        tokens = ranks.total(own * count) / ranks.sum(count).clamp_min(1)
    if options.samples:
        features, mask = ranks.gather_samples(list(itertools.chain(*pairs)), mask)
        options = dataclasses.replace(options, tokens=0.0)
        pairs = list(zip(features[::2], features[1::2], strict=True))
        samples, _ = _relations(pairs, mask, None, options, backend)
    return tokens + samples, torch.stack((tokens, samples)).detach()


def _unpacked(
    pairs: Pairs, mask: Tensor | None, weights: Tensor | None, segments: Tensor
) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor | None]:
    """Features (B, N, D) with each document in a row of its own, and their mask and weights."""
    check.integers("segments", segments)
    check.shape("segments", segments, pairs[0][0].shape[:2], "the leading dimensions of student")
    if not values_readable(segments):
        raise ValueError(
            "segments: the ids can't be read on a GPU or in a graph; pass them on the CPU and "
            "outside of the graph, or give each document a row of its own"
        )
    B, N = segments.shape
    token = torch.arange(B * N, device="cpu")
    # An id stands for one document per row; its tokens keep their order.
    row_and_id = torch.stack((token // max(N, 1), segments.flatten().cpu()), 1)
    _, document, lengths = torch.unique(row_and_id, dim=0, return_inverse=True, return_counts=True)
    tokens = document.argsort(stable=True).split(lengths.tolist())
    index = pad_sequence(tokens, batch_first=True, padding_value=-1) if B * N else row_and_id[:, :0]
    index = index.to(pairs[0][0].device, non_blocking=True)
    real = index >= 0
    if mask is not None:
        real = real & (mask.flatten() != 0)[index]
    if weights is not None:
        row = row_and_id.new_zeros(len(index)).index_copy_(0, document, row_and_id[:, 0])
        weights = weights[row.to(weights.device, non_blocking=True)]
    return [(s.flatten(0, 1)[index], t.flatten(0, 1)[index]) for s, t in pairs], real, weights


class _CppRelations(GradientInForward):
    """Both kinds of relation of a layer in one operator."""

    @staticmethod
    def forward(ctx, options, mask, weights, student, teacher):
        factors, needs_grad = (options.tokens, options.samples), ctx.needs_input_grad[3]
        terms, *gradient = torch.ops.fastkd_cpp.relation_terms(
            *dense_rows(student, teacher), mask, weights, *factors, options.eps, needs_grad
        )
        ctx.dtypes = [student.dtype] * len(gradient)
        ctx.save_for_backward(*gradient)
        ctx.mark_non_differentiable(terms)
        return terms.sum(), terms


class _TritonRelations(torch.autograd.Function):
    """Layers of one shape, with ℓ2-normalised rows and Pearson's correlation only."""

    # *tensors: see `LossInCpp`.
    @staticmethod
    def forward(ctx, options, *tensors):
        from fastkd.kernels.relation import relations

        mask, weights, *features = tensors
        students, teachers = list(features[::2]), list(features[1::2])
        factors = options.tokens, options.samples
        ctx.dtype, gradient = students[0].dtype, any(ctx.needs_input_grad)
        losses, *dx = relations(students, teachers, mask, weights, *factors, options.eps, gradient)
        ctx.save_for_backward(*dx)
        if not options.return_terms:
            return losses.sum(), None
        of_tokens = len(students) * len(students[0])
        terms = torch.stack([losses[:of_tokens].sum(), losses[of_tokens:].sum()])
        ctx.mark_non_differentiable(terms)
        return terms.sum(), terms

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        from fastkd.kernels.upstream import scaled

        (dx,) = ctx.saved_tensors
        dx = scaled([dx], grad)[0] if dx.dtype == ctx.dtype else times_upstream(dx, grad, ctx.dtype)
        needs = ctx.needs_input_grad[3::2]
        found = (
            (x if needed else None, None) for x, needed in zip(dx.unbind(), needs, strict=True)
        )
        return (None, None, None, *itertools.chain(*found))
