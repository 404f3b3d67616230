"""Feature correlation distillation (FCD): relations between tokens and between samples."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fastkd._core.checks import (
    check_choice,
    check_floating,
    check_mask,
    check_number,
    check_pair,
    check_shape,
    layer_pairs,
)
from fastkd._core.dispatch import Backend, backend_of
from fastkd._core.numerics import (
    apply,
    autocast_off,
    first_order_only,
    in_range,
    once_differentiable,
    saveable,
    times_upstream,
    upcast,
    values_readable,
    working_dtype,
    zero_padding,
)
from fastkd.distributed import Group, InGroup, Ranks, ranks_of

Over = Literal["tokens", "samples"]
OVER = get_args(Over)
Normalize = Literal["l2", "layer_norm", "softmax", "none"]
NORMALIZE = get_args(Normalize)
Distance = Literal["pearson", "mse", "kl"]
DISTANCE = get_args(Distance)

# Up to this many rows a relation is never replaced by products of its features under
# torch.compile, nor in the kernels: one graph serves all these sizes.
SIZES_OF_ONE_GRAPH = 128


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
) -> Tensor:
    """`relation_loss` as the paper writes it: both (N, N) relations in full, autograd behind."""
    if segments is not None:
        [student, teacher], mask = _unpacked([student, teacher], mask, segments)
    F_s, F_t = upcast(student), upcast(teacher)  # (B, N, D)
    if mask is None:
        mask = torch.ones(F_s.shape[:2], dtype=torch.bool, device=F_s.device)
    mask = mask != 0
    F_s, F_t = F_s.masked_fill(~mask[..., None], 0), F_t.masked_fill(~mask[..., None], 0)
    F_s, F_t = normalized(F_s, normalize), normalized(F_t, normalize)
    if over == "samples":
        F_s, F_t, mask = F_s.transpose(0, 1), F_t.transpose(0, 1), mask.transpose(0, 1)

    R_s = (F_s @ F_s.mT).flatten(1)  # eqs. 3, 4: (B, N·N), over samples (N, B·B)
    R_t = (F_t @ F_t.mT).flatten(1)
    pair = (mask[:, :, None] & mask[:, None, :]).flatten(1)
    M = pair.sum(1).clamp_min(1)  # valid entries of each relation

    if distance == "pearson":  # eqs. 6, 7
        X = (R_s - (R_s * pair).sum(1, keepdim=True) / M[:, None]) * pair
        Y = (R_t - (R_t * pair).sum(1, keepdim=True) / M[:, None]) * pair
        gamma = 1 - (X * Y).sum(1) / (X.norm(dim=1) * Y.norm(dim=1) + eps)
    elif distance == "mse":  # eq. 13
        gamma = ((R_s - R_t) * pair).square().sum(1) / (2 * M)
    else:  # eq. 11
        tau = temperature
        lowest = torch.finfo(R_s.dtype).min
        log_p_s = (R_s / tau).masked_fill(~pair, lowest).log_softmax(1)
        log_p_t = (R_t / tau).masked_fill(~pair, lowest).log_softmax(1)
        gamma = tau**2 * (log_p_t.exp() * (log_p_t - log_p_s) * pair).sum(1)

    counts = mask.sum(1) >= 2  # one token alone has no relation
    return gamma.masked_fill(~counts, 0).sum() / counts.sum().clamp_min(1)  # eqs. 8, 9


def relation_loss(
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
        student: (B, N, Ds) features, floating; the gradient goes here. Over samples also (B, Ds),
            one embedding a sample.
        teacher: (B, N, Dt) or (B, Dt), of the same dtype and device, without gradient.
        mask: (B, N) or (B,), bool or 0/1, 1 = real token. Pairs with a padded member are left out,
            and samples (positions) with fewer than two real members don't count in the average.
        over: ``"tokens"`` or ``"samples"``.
        normalize: ``"l2"``, ``"layer_norm"`` (without affine), ``"softmax"`` (over the features)
            or ``"none"``.
        distance: ``"pearson"``; ``"mse"``, ½·mean (R_s − R_t)² (eq. 13); or ``"kl"``,
            τ²·KL(softmax(R_t/τ) ‖ softmax(R_s/τ)) over all entries of a relation (eq. 11).
        temperature: τ of ``"kl"``.
        eps: added to the product of the two norms in Pearson's denominator, as in Figure 4.
        segments: (B, N) integers, the document of each token where a row packs several: the loss
            is that of the documents in rows of their own, padded. On the CPU (whatever the device
            of the features) or the device. Values on a GPU or in a graph can't be read, and are
            compared in all pairs: that takes N² numbers for each row, and (B·N)² over samples.
        backend: ``"auto"``, ``"torch"``; ``"cpp"``, ``"triton"`` (only ``"l2"``, ``"pearson"``).
        gather: take the samples of all processes for one batch; see `fastkd.distributed`.
        group: the processes that gather, by default all.

    Returns:
        Scalar in float32 (float64 for float64 input); 0 where nothing can be compared.

    Raises:
        TypeError, ValueError: a wrong shape, dtype, device or option, or a teacher that requires
            grad.
        BackendUnavailable: the backend asked for can't run this call.

    Example:
        >>> student = torch.randn(2, 16, 64, requires_grad=True)
        >>> teacher = torch.randn(2, 16, 128)
        >>> loss = relation_loss(student, teacher, over="samples")
        >>> loss.backward()
        >>> loss.shape, student.grad.shape
        (torch.Size([]), torch.Size([2, 16, 64]))
    """
    check_choice("over", over, OVER)
    options = Options({over: 1.0}, normalize, distance, temperature, eps)
    options.check()
    layers, ranks = _Layers([student], [teacher]), ranks_of(gather, group)
    return _weighted_relations(layers, mask, segments, options, backend, ranks).loss


class FCDLoss(InGroup):
    """alpha · relations between tokens + beta · relations between samples (eq. 10).

    See `relation_loss`. Takes one layer pair or lists of them, whose losses are averaged; stores
    its options and no parameters.

    Args:
        alpha, beta: weights, at least 0.
        normalize, distance, temperature, eps, backend, gather, group: as in `relation_loss`.

    ``forward(student, teacher, mask=None, *, segments=None, return_terms=False)``.

    >>> student, teacher = torch.randn(4, 8, 16, requires_grad=True), torch.randn(4, 8, 32)
    >>> FCDLoss(beta=0.5)(student, teacher, mask=torch.ones(4, 8)).shape
    torch.Size([])
    """

    def __init__(
        self,
        alpha: float = 1.0,
        beta: float = 1.0,
        normalize: Normalize = "l2",
        distance: Distance = "pearson",
        *,
        temperature: float = 10.0,
        eps: float = 1e-8,
        backend: Backend = "auto",
        gather: bool = False,
        group: Group = None,
    ) -> None:
        super().__init__()
        check_number("alpha", alpha, at_least=0)
        check_number("beta", beta, at_least=0)
        self.alpha, self.beta = alpha, beta
        self.normalize, self.distance = normalize, distance
        self.temperature, self.eps, self.backend = temperature, eps, backend
        self.gather, self.group = gather, group
        Options({}, normalize, distance, temperature, eps).check()

    def forward(
        self,
        student: Tensor | Sequence[Tensor],
        teacher: Tensor | Sequence[Tensor],
        mask: Tensor | None = None,
        *,
        segments: Tensor | None = None,
        return_terms: bool = False,
    ) -> Any:
        """Loss of (B, N, Ds) student and (B, N, Dt) teacher features, or of lists of them.

        With ``alpha=0`` also of (B, Ds) and (B, Dt). With ``return_terms`` it is
        ``(loss, {"tokens": ..., "samples": ...})``: the terms whose weight isn't 0, before
        weighting and detached, from the same pass.
        """
        given = self.normalize, self.distance, self.temperature, self.eps
        options = Options({"tokens": self.alpha, "samples": self.beta}, *given, terms=return_terms)
        ranks = ranks_of(self.gather, self.group)
        return relations_of_layers(student, teacher, mask, segments, options, self.backend, ranks)

    def extra_repr(self) -> str:
        return (
            f"alpha={self.alpha}, beta={self.beta}, normalize={self.normalize!r}, "
            f"distance={self.distance!r}"
        )


@dataclasses.dataclass(frozen=True)
class Options:
    """What stays the same for every layer of a call."""

    weights: dict[str, float]  # of a layer's relations, of each kind
    normalize: str
    distance: str
    temperature: float = 10.0
    eps: float = 1e-8
    terms: bool = False  # asked for, beside the loss
    in_cpp: bool = False  # but for what products of features do

    def check(self) -> None:
        check_choice("normalize", self.normalize, NORMALIZE)
        check_choice("distance", self.distance, DISTANCE)
        check_number("temperature", self.temperature, above=0)
        check_number("eps", self.eps, above=0)

    def only(self, *kinds: str) -> "Options":
        """Of these kinds of relation."""
        weights = {over: weight for over, weight in self.weights.items() if over in kinds}
        return dataclasses.replace(self, weights=weights)


def relations_of_layers(
    student: Tensor | Sequence[Tensor],
    teacher: Tensor | Sequence[Tensor],
    mask: Tensor | None,
    segments: Tensor | None,
    options: Options,
    backend: str,
    ranks: Ranks | None,
) -> Any:
    """See `FCDLoss`, whose weights are the ``options``' of all layers together."""
    pairs, weights = layer_pairs(student, teacher), options.weights
    each = {over: weight / len(pairs) for over, weight in weights.items()}
    options = dataclasses.replace(options, weights=each)
    options.check()
    layers = _Layers(*(list(side) for side in zip(*pairs, strict=True)))
    loss, terms = _weighted_relations(layers, mask, segments, options, backend, ranks)
    if terms is None:
        return loss
    named = zip(weights.items(), terms.unbind(), strict=True)
    return loss, {over: term / weight for (over, weight), term in named if weight}


class _Layers(NamedTuple):
    """Features of both sides, one of each a layer."""

    students: list[Tensor]
    teachers: list[Tensor]

    @classmethod
    def of(cls, features: Sequence[Tensor]) -> "_Layers":
        """From all features, the students' first."""
        half = len(features) // 2
        return cls(list(features[:half]), list(features[half:]))

    @property
    def features(self) -> list[Tensor]:
        """What `of` takes."""
        return [*self.students, *self.teachers]

    @property
    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Student and teacher of one layer after the other."""
        return zip(self.students, self.teachers, strict=True)


class _Value(NamedTuple):
    """The loss and, where asked for, the terms that it is the sum of."""

    loss: Tensor  # ()
    terms: Tensor | None = None  # (2,), in the order of OVER, detached


def _weighted_relations(
    layers: _Layers,
    mask: Tensor | None,
    segments: Tensor | None,
    options: Options,
    backend: str,
    ranks: Ranks | None,
) -> _Value:
    """Σ_over weights[over] · loss over ``over`` of all layers: the one way in."""
    if _are_embeddings(layers):
        _check_embeddings(options, segments)
        layers = _Layers.of([x[:, None] for x in layers.features])
        mask = check_mask(mask, layers.students[0].shape[:1], layers.students[0].device)
        mask = None if mask is None else mask[:, None]
    first, rows = layers.students[0], layers.students[0].shape[:2]
    for student, teacher in layers.pairs:
        check_shape("student", student, (*rows, student.size(2)), "(B, N) of the first layer")
        check_shape("teacher", teacher, (*rows, teacher.size(2)), "(B, N) of student")
    mask = check_mask(mask, rows, first.device)
    if segments is not None:
        _check_segments(segments, first)
    if not any(options.weights.values()):  # a zero that hangs on the students, as every loss does
        segments = ranks = None
    # Rows of other processes are of other lengths: their documents can't be compared by pairs.
    if segments is not None and (ranks is not None or values_readable(segments)):
        unpacked, mask = _unpacked(layers.features, mask, segments)
        layers, segments = _Layers.of(unpacked), None
    if ranks is None:
        return _relations_of(layers, mask, segments, options, backend)
    return _across_ranks(layers, mask, options, backend, ranks)


def _are_embeddings(layers: _Layers) -> bool:
    dims = 0
    for student, teacher in layers.pairs:
        check_pair(student, teacher, min_ndim=2)
        dims = dims or min(student.dim(), 3)
        if not student.dim() == teacher.dim() == dims:
            check_floating("student", student, dims)
            check_floating("teacher", teacher, dims)
    return dims == 2


def _check_embeddings(options: Options, segments: Tensor | None) -> None:
    if options.weights.get("tokens"):
        raise ValueError(
            "student is (B, D), which has no tokens to relate; pass (B, N, D), or ask for samples "
            "only: over='samples', FCDLoss(alpha=0)"
        )
    if segments is not None:
        raise ValueError("segments are documents of packed tokens, and student (B, D) has none")


def _relations_of(
    layers: _Layers,
    mask: Tensor | None,
    segments: Tensor | None,
    options: Options,
    backend: str,
) -> _Value:
    """The loss of these layers; ``segments`` are those whose values can't be read."""
    first = layers.students[0]
    widest = next((x for x in layers.students if x.dtype == torch.float64), first)
    unsupported = None
    if segments is not None:
        unsupported = "its kernels need segments whose values can be read, on the CPU"
    words = {"normalize": options.normalize, "distance": options.distance}
    runs_on = backend_of(backend, "relation_loss", widest, unsupported, **words)
    if runs_on == "triton":
        return _by_kernels(layers, mask, options, backend)
    options = dataclasses.replace(options, in_cpp=runs_on == "cpp")
    with autocast_off(first):
        if segments is not None:
            return _of_segments(layers, mask, segments, options)
        if options.normalize == "softmax":
            students = [_softmax(first_order_only(x), mask) for x in layers.students]
            layers = _Layers(students, [_softmax(x, mask) for x in layers.teachers])
        return _applied(_Relations, options, mask, layers.features)


def _applied(
    function: type[torch.autograd.Function],
    options: Options,
    mask: Tensor | None,
    features: Sequence[Tensor],
) -> _Value:
    made = apply(function, options, mask, *features)
    return _Value(*made) if options.terms else _Value(made)


def _by_kernels(layers: _Layers, mask: Tensor | None, options: Options, backend: str) -> _Value:
    """Layers alike share their launches; some relations ``auto`` leaves to PyTorch."""
    from fastkd.kernels.pointers import layer_groups

    left = _left_to_features(layers, options) if backend == "auto" else []
    kinds = [over for over in options.weights if over not in left]
    kernels = options.only(*kinds) if left else options
    values = []
    for group in layer_groups(list(layers.pairs)) if kinds else []:
        features = [side[i] for side in layers for i in group]
        values.append(_applied(_TritonRelations, kernels, mask, features))
    if left:
        values.append(_applied(_Relations, options.only(*left), mask, layers.features))
    losses = functools.reduce(torch.add, (value.loss for value in values))
    terms = [value.terms for value in values if value.terms is not None]
    return _Value(losses, functools.reduce(torch.add, terms) if terms else None)


def _across_ranks(
    layers: _Layers, mask: Tensor | None, options: Options, backend: str, ranks: Ranks
) -> _Value:
    """The loss of the samples of all processes.

    Between tokens every sample stands for itself, and only the mean is taken over all.
    """
    first = layers.students[0]
    losses = dict.fromkeys(OVER, first.new_zeros((), dtype=working_dtype(first)))
    if options.weights.get("tokens"):
        own = _relations_of(layers, mask, None, options.only("tokens"), backend).loss
        real = first.new_ones(first.shape[:2], dtype=torch.bool) if mask is None else mask
        count = (real.sum(1) >= 2).sum()
        losses["tokens"] = ranks.total(own * count) / ranks.sum(count).clamp_min(1)
    if options.weights.get("samples"):
        rows, mask = ranks.gather_samples(layers.features, mask)
        options = options.only("samples")
        losses["samples"] = _relations_of(_Layers.of(rows), mask, None, options, backend).loss
    return _of_terms(losses, options)


def _of_terms(losses: dict[str, Tensor], options: Options) -> _Value:
    """Of the weighted losses over each kind."""
    terms = torch.stack([losses[over] for over in OVER])
    return _Value(terms.sum(), terms.detach() if options.terms else None)


def _check_segments(segments: Tensor, student: Tensor) -> None:
    if not isinstance(segments, Tensor):
        raise TypeError(f"segments must be a Tensor, got {type(segments).__name__}")
    if segments.is_floating_point() or segments.is_complex() or segments.dtype == torch.bool:
        raise TypeError(f"segments must be integers, got {segments.dtype}")
    check_shape("segments", segments, student.shape[:2], "the leading dimensions of student")
    if segments.device not in (student.device, torch.device("cpu")):
        raise ValueError(f"segments is on {segments.device} but student is on {student.device}")


def _unpacked(
    features: Sequence[Tensor], mask: Tensor | None, segments: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Features (B, N, D) with every document in a row of its own, and the mask of these rows."""
    B, N = segments.shape
    token = torch.arange(B * N, device="cpu")
    # A document is a number of ``segments`` in one row; its tokens keep their order.
    named = torch.stack((token // max(N, 1), segments.flatten().cpu()), 1)
    _, document, lengths = torch.unique(named, dim=0, return_inverse=True, return_counts=True)
    tokens = document.argsort(stable=True).split(lengths.tolist())
    index = pad_sequence(tokens, batch_first=True, padding_value=-1) if B * N else named[:, :0]
    index = index.to(features[0].device, non_blocking=True)
    there = index >= 0
    if mask is not None:
        there = there & (mask.flatten() != 0)[index]
    return [x.flatten(0, 1)[index] for x in features], there


def _of_segments(
    layers: _Layers, mask: Tensor | None, segments: Tensor, options: Options
) -> _Value:
    """The loss where values of ``segments`` can't be read: relations of all pairs, masked."""
    first = layers.students[0]
    losses = dict.fromkeys(OVER, first.new_zeros((), dtype=working_dtype(first)))
    same = segments[:, :, None] == segments[:, None, :]  # (B, N, N)
    position = same.tril(-1).sum(-1).view(1, -1)  # (1, B·N), in its document
    valid = torch.ones_like(same[..., 0]) if mask is None else mask  # (B, N)
    for over, weight in options.weights.items():
        if weight == 0:
            continue
        whole = over == "samples"  # every token may meet every other
        alike = position[:, :, None] == position[:, None, :] if whole else same
        there = valid.view(1, -1) if whole else valid
        alike = alike & there[:, :, None] & there[:, None, :]
        for student, teacher in layers.pairs:
            y_s, y_t = (
                normalized(
                    zero_padding(upcast(x.flatten(0, 1)[None] if whole else x), there),
                    options.normalize,
                )
                for x in (first_order_only(student), teacher)
            )
            losses[over] = losses[over] + weight * _mean_of_groups(y_s, y_t, alike, options)
    return _of_terms(losses, options)


def normalized(x: Tensor, normalize: str) -> Tensor:
    """Features (..., D) as their relations take them (Table 4)."""
    if normalize == "l2":
        return F.normalize(x, dim=-1)
    if normalize == "layer_norm":
        return F.layer_norm(x, x.shape[-1:])
    return x.softmax(-1) if normalize == "softmax" else x


def _mean_of_groups(y_s: Tensor, y_t: Tensor, alike: Tensor, options: Options) -> Tensor:
    """Mean loss of the groups within each of (G, M, D) rows; ``alike`` (G, M, M) pairs them.

    What a group has one of stands at each of its M_i rows, and sums over a group are products
    with ``alike``: the same bits on every run. Autograd gives the gradient.
    """
    weight = alike.to(y_s.dtype)
    size = weight.sum(-1)  # (G, M), of the group of each row
    share = torch.where(size >= 2, 1 / size.clamp_min(1), 0)  # of each row in its group
    size = size.clamp_min(1)
    first = alike.to(torch.uint8).argmax(-1)  # (G, M), member of the group of each row

    def group_sum(x: Tensor) -> Tensor:
        return torch.bmm(weight, x[..., None]).squeeze(-1)

    def relations(y: Tensor) -> Tensor:
        """R_ij = s_i·s_j + h_i + h_j of centred rows s, less what a distance does not see."""
        # Less a row of the group, which rows alike have no difference from, and which no gradient
        # comes to: neither the rows nor the mean depend on it.
        one = y.detach().gather(1, first[..., None].expand_as(y))
        mean = torch.bmm(weight, y - one) / size[..., None]
        rows = torch.where((size > 1)[..., None], y - one - mean, 0)
        mean = one + mean
        h = (rows * mean).sum(-1)
        shift = mean.square().sum(-1) / 2 if options.distance == "mse" else -group_sum(h) / size
        h = h + shift
        R = torch.bmm(rows, rows.mT) + h[:, :, None] + h[:, None, :]
        return torch.where(alike, R, 0)

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
        log_p_s, log_p_t = (_log_softmax_of_groups(R, alike, options) for R in (R_s, R_t))
        kl = (log_p_t.exp() * (log_p_t - log_p_s)).masked_fill(~alike, 0).sum(-1)
        losses = options.temperature**2 * group_sum(kl.to(size.dtype))
    return (losses * share).sum() / share.sum().clamp_min(1)


def _log_softmax_of_groups(R: Tensor, alike: Tensor, options: Options) -> Tensor:
    lowest = torch.finfo(torch.float64).min
    logits = (R.double() / options.temperature).masked_fill(~alike, lowest)
    rows = logits.logsumexp(-1)[:, None, :]  # (G, 1, M)
    return logits - rows.masked_fill(~alike, lowest).logsumexp(-1, keepdim=True)


def _left_to_features(layers: _Layers, options: Options) -> list[str]:
    """Kinds of relation so long against their features that D×D products win on a GPU.

    These are plain matrix products, in float32 by PyTorch; the kernels' N×N products run on tensor
    cores, about eight times as fast for half types and three times for float32.
    """
    B, N, _ = layers.students[0].shape
    return [
        over
        for over in options.weights
        if (members := N if over == "tokens" else B) > SIZES_OF_ONE_GRAPH
        and all(
            _feature_side_is_cheaper(
                members // (3 if student.dtype == torch.float32 else 8),
                student.shape[-1],
                teacher.shape[-1],
                student.requires_grad,
            )
            for student, teacher in layers.pairs
        )
    ]


def _softmax(x: Tensor, mask: Tensor | None) -> Tensor:
    return zero_padding(upcast(x), mask).softmax(-1)


class _Relations(torch.autograd.Function):
    """Weighted sum of relation losses over layers and both kinds of relation.

    The gradient is computed in the forward pass, one chunk of relations at a time, so that no
    (N, N) buffer outlives its chunk. It stays in the working dtype until the upstream gradient
    is known: float16 would lose what a loss scale is there to save.
    """

    # The compiler leaves ctx out where it counts as many arguments as parameters: no more of them.
    @staticmethod
    def forward(ctx, options, *tensors):
        mask, *features = tensors
        layers = _Layers.of(features)
        needs_grad = ctx.needs_input_grad[2 : 2 + len(layers.students)]
        made = []
        with autocast_off(features[0]):
            for pair, wanted in zip(layers.pairs, needs_grad, strict=True):
                made.append(_relation_terms(*pair, mask, options, wanted))
        terms = functools.reduce(torch.add, (terms for terms, _ in made))
        ctx.dtypes = [student.dtype for student in layers.students]
        ctx.save_for_backward(*(dx for _, dx in made))
        if not options.terms:
            return terms.sum()
        ctx.mark_non_differentiable(terms)
        return terms.sum(), terms

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        with autocast_off(grad):
            gradients = [
                None if dx is None else times_upstream(dx, grad, dtype)
                for dx, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
            ]
        return (None, None, *gradients, *(None for _ in gradients))


class _TritonRelations(torch.autograd.Function):
    """The same for ℓ2-normalised rows and Pearson's correlation, of layers alike."""

    @staticmethod
    def forward(ctx, options, *tensors):
        from fastkd.kernels import relation as kernels

        mask, *features = tensors
        layers = _Layers.of(features)
        count = len(layers.students)
        ctx.needs_grad = ctx.needs_input_grad[2 : 2 + count]
        tokens, samples = (float(options.weights.get(over, 0)) for over in OVER)
        losses, *dx = kernels.relations(
            *layers, mask, tokens, samples, options.eps, any(ctx.needs_grad)
        )
        if dx:
            ctx.save_for_backward(mask, *dx, *(saveable(x) for x in layers.students))
        if not options.terms:
            return losses.sum()
        parts = losses.split(kernels.counts_of_losses(layers.students, tokens, samples))
        terms = torch.stack([part.sum() for part in parts])
        ctx.mark_non_differentiable(terms)
        return terms.sum(), terms

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        from fastkd.kernels import relation as kernels

        mask, dx, *students = ctx.saved_tensors
        gradients = [
            dx if wanted else None
            for dx, wanted in zip(
                kernels.projected(dx, students, mask, grad).unbind(), ctx.needs_grad, strict=True
            )
        ]
        return (None, None, *gradients, *(None for _ in gradients))


def _relation_terms(
    student: Tensor, teacher: Tensor, mask: Tensor | None, options: Options, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The weighted losses of one layer (2,), and the gradient of both where that is wanted."""
    kinds = [over for over in OVER if options.weights.get(over)]
    if options.in_cpp:
        kinds = [over for over in kinds if _by_features(over, student, teacher, options, gradient)]
        student, teacher = (x if x.stride(-1) == 1 else x.contiguous() for x in (student, teacher))
        weights = (0.0 if over in kinds else float(options.weights.get(over, 0)) for over in OVER)
        operator = torch.ops.fastkd_cpp.relation_terms
        terms, *made = operator(student, teacher, mask, *weights, options.eps, gradient)
        dx = made[0] if made else None
    else:
        terms = student.new_zeros(2, dtype=working_dtype(student))
        dx = torch.zeros_like(student, dtype=terms.dtype) if gradient else None
    if not kinds:
        return terms, dx
    losses = [
        loss + _relation_term(student, teacher, mask, dx, over, options) if over in kinds else loss
        for over, loss in zip(OVER, terms.unbind(), strict=True)
    ]
    return torch.stack(losses), dx


def _relation_term(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    dx: Tensor | None,
    over: str,
    options: Options,
) -> Tensor:
    """One layer's share of the loss ``over`` one kind; its gradient is added to ``dx``."""
    feature_side = _by_features(over, student, teacher, options, dx is not None)
    if over == "samples":
        student, teacher = student.transpose(0, 1), teacher.transpose(0, 1)
        mask = None if mask is None else mask.transpose(0, 1)
        dx = None if dx is None else dx.transpose(0, 1)
    groups, N, Ds = student.shape  # from here on a group is what has one (N, N) relation
    Dt = teacher.shape[-1]
    loss = student.new_zeros((), dtype=working_dtype(student))
    if groups == 0 or N < 2:
        return loss

    weight = loss + options.weights[over]  # ()
    if mask is None:
        group_weight = weight / groups  # not in Python: a float made of sizes is a graph a size
    else:
        counts = mask.sum(1, keepdim=True) >= 2  # (groups, 1)
        mask = mask & counts
        group_weight = weight / counts.sum().clamp_min(1).to(loss.dtype)

    chunks = _chunks(student, Ds + Dt, feature_side)
    chunk = (groups + chunks - 1) // chunks
    for i in range(chunks):
        part = slice(i * chunk, (i + 1) * chunk)
        part_mask = None if mask is None else mask[part]
        s = _Centred(student[part], part_mask, options.normalize)
        t = _Centred(teacher[part], part_mask, options.normalize)
        part_dx = None if dx is None else dx[part]
        if feature_side:
            losses = _pearson_by_features(s, t, group_weight, options.eps, part_dx)
        else:
            losses = _distance_by_relations(s, t, group_weight, options, part_dx)
        if part_mask is not None:
            losses = losses.masked_fill(~counts[part, 0], 0)
        loss = loss + group_weight * losses.sum()
    return loss


def _by_features(
    over: str, student: Tensor, teacher: Tensor, options: Options, gradient: bool
) -> bool:
    """Whether (D, D) products take the place of relations."""
    members = student.shape[OVER[::-1].index(over)]
    of_any_size = not options.in_cpp and not torch.compiler.is_compiling()
    return (
        options.distance == "pearson"
        and (members > SIZES_OF_ONE_GRAPH or of_any_size)
        and _feature_side_is_cheaper(members, student.shape[-1], teacher.shape[-1], gradient)
    )


def _feature_side_is_cheaper(N: int, Ds: int, Dt: int, gradient: bool) -> bool:
    """Whether D×D products cost less than N×N ones; multiplications for each of the N rows."""
    relation_side = N * (Ds + Dt)
    feature_side = Ds * Ds + Ds * Dt + Dt * Dt
    if gradient:
        relation_side += N * Ds
        feature_side += Ds * Ds + Ds * Dt
    return feature_side < relation_side


def _chunks(x: Tensor, D: int, feature_side: bool) -> int:
    """In how many parts to work on the relations of ``x`` (groups, N, Ds); ``D`` is Ds + Dt.

    Eager on the CPU a part should stay in the cache; elsewhere it only bounds the memory, and
    long loops cost launches or time to compile. A power of two: few graphs while sizes change.
    """
    groups, N, _ = x.shape
    eager_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
    entries = groups * (N * D + (D * D if feature_side else 3 * N * N))
    most = 2**20 if eager_cpu else 2**26
    chunks = 1
    while chunks < groups and entries > chunks * most:
        chunks *= 2
    return chunks


class _Centred:
    """Rows y of ``x`` (G, N, D), normalised as asked for, minus their mean.

    Relations come from centred rows: at mean cosine 0.99 the moments of raw rows lose four
    digits. Normalised rows are of known length, |y_i|² = size·(1 − slack_i), and
    R_ij = ½|y_i|² + ½|y_j|² − ½|y_i − y_j|², which also keeps the rounding of the row norms out
    of the relations.
    """

    def __init__(self, x: Tensor, mask: Tensor | None, normalize: str) -> None:
        half = x.dtype == torch.float16
        x = upcast(x)
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0)
        # Rows that are there: (G, 1), or (1, 1) for all groups.
        if mask is None:
            self.count = x.new_full((1, 1), x.shape[1])
        else:
            self.count = mask.sum(1, keepdim=True).clamp_min(1).to(x.dtype)
        self.normalized = normalize in ("l2", "layer_norm")
        self.size: int | Tensor = 1
        factor = None
        if self.normalized and not half:
            x, factor = in_range(x)
        if normalize == "l2":
            smallest = 1e-12  # torch.nn.functional.normalize divides by max(‖x‖, this)
            norm = torch.linalg.vector_norm(x, dim=-1)  # (G, N)
            self.short = norm < smallest  # of any length
            self.slack = self.short.to(x.dtype)
            # NaN where the norm overflows: 1/inf would pass the row off as zero.
            self.scale = 1 / norm.clamp_min(smallest) + (norm - norm)  # (G, N)
        elif normalize == "layer_norm":
            # torch.nn.functional.layer_norm adds this to the variance.
            eps = 1e-5 if factor is None else 1e-5 * factor.squeeze(-1).square()
            self.size = x.shape[-1]
            columns = max(x.shape[-1], 1)
            x = x - x.sum(-1, keepdim=True) / columns
            x = x - x.sum(-1, keepdim=True) / columns  # what rounding left of a large mean
            variance = x.square().sum(-1) / columns
            self.short = torch.zeros_like(variance, dtype=torch.bool)
            self.slack = eps / (variance + eps)
            self.scale = (variance + eps).rsqrt() + (variance - variance)
        else:
            self.scale = x.new_ones(x.shape[:2])
        self.x, self.mask = x, mask
        mean = torch.bmm((self.scale / self.count)[:, None], x)  # (G, 1, D)
        rows = torch.addcmul(-mean, x, self.scale[..., None]) if self.normalized else x - mean
        # Rows that are alike would keep what rounding left of their mean, by how the processor
        # sums, for a difference, and 1/eps multiplies it.
        real = torch.ones_like(self.scale)  # (G, N)
        if mask is not None:
            real.masked_fill_(~mask, 0)
        rest = torch.bmm((real / self.count)[:, None], rows)  # (G, 1, D)
        rows.sub_(rest)
        if mask is not None:
            rows.masked_fill_(~mask[..., None], 0)
        self.mean, self.rows = mean + rest, rows  # (G, 1, D), (G, N, D)
        if not self.normalized:
            # (G, 1); differences of two are small.
            self.size = (mean.double() + rest).square().sum(-1)
        self.derivative = self.scale if factor is None else self.scale * factor.squeeze(-1)
        # float16 could not hold 1e12, so there a row too short to normalise gets the gradient of
        # its normalised row.
        if half and normalize == "l2":
            self.derivative = self.scale.masked_fill(self.short, 1)

    def offsets(self, squares: Tensor, centred: bool = False) -> Tensor:
        """h with R_ij = s_i·s_j + h_i + h_j + size, from the squared lengths of ``rows``.

        The size of rows of any length is that of their mean, squared. Of two equal forms for
        normalised rows, the first errs with the squared length of the mean, the second with that
        of the centred rows. Where the first serves all rows of an h that will be ``centred``, it
        needs no constant: beside one, rows too short to normalise vanish.
        """
        h = torch.bmm(self.rows, self.mean.mT).squeeze(-1)  # (G, N)
        if self.normalized:
            length = torch.bmm(self.mean, self.mean.mT).squeeze(-1)  # (G, 1), squared
            apart = length < self.size / 2
            constant = (length - self.size) / 2
            h = h + (constant.masked_fill(apart, 0) if centred else constant)
            known = -(squares + self.size * self.slack) / 2
            h = torch.where(apart | self.short, h, known)
        return h if self.mask is None else h.masked_fill(~self.mask, 0)

    def unscaled_gradient(self, h: Tensor, row_sums: Tensor) -> Tensor:
        """‖x_i‖ · ∂/∂x_i from ``h``, H_i = Σ_j A_ij (s_j − s_i), in place, and Σ_j A_ij.

        The derivative of normalising takes out what lies along a row of known length, and leaves
        a row of any length all of it. It is taken from H_i and the rows themselves: what rounding
        left along them goes out with it.
        """
        along = row_sums
        if self.normalized:
            across = (h * self.x).sum(-1) * self.scale
            along = self.slack * row_sums - (across / self.size).masked_fill(self.short, 0)
        return h.addcmul_(self.x, (along * self.scale)[..., None])

    def centred_offsets(self, squares: Tensor) -> Tensor:
        """h minus its mean: R̃_ij = s_i·s_j + u_i + u_j is then the centred relation."""
        u = self.offsets(squares, centred=True)  # (G, N)
        for _ in range(2):  # of rows that are alike nothing must be left, not a mean's rounding
            u = u - u.sum(1, keepdim=True) / self.count
            u = u if self.mask is None else u.masked_fill(~self.mask, 0)
        return u

    def relations(self, centred: bool) -> Tensor:
        """(G, N, N) relations less a constant: their mean, or ``size``; 0 at padding."""
        R = torch.bmm(self.rows, self.rows.mT)
        squares = R.diagonal(dim1=1, dim2=2)
        h = self.centred_offsets(squares) if centred else self.offsets(squares)
        R.add_(h[:, :, None]).add_(h[:, None, :])
        if self.mask is not None:
            R.masked_fill_(~(self.mask[:, :, None] & self.mask[:, None, :]), 0)
        return R


def _norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(1, 2))


def _reciprocal(x: Tensor) -> Tensor:
    """1/x where x > 0, else 0: the derivative of a norm at 0 is taken as 0."""
    return torch.where(x > 0, 1 / x, 0)


class _Distances(NamedTuple):
    """Losses of a chunk of relations, and their derivative ∂/∂R_s = k·A."""

    losses: Tensor  # (G,)
    A: Tensor  # (G, N, N), 0 at padding
    k: Tensor  # (G,)


def _distances(s: _Centred, t: _Centred, options: Options, gradient: bool) -> _Distances:
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
    # Softened relations differ by little, and KL by its square: float32 would cancel.
    log_p_s = _log_softmax(R_s.double() / temperature, padding)
    log_p_t = _log_softmax(R_t.double() / temperature, padding)
    kl = (log_p_t.exp() * (log_p_t - log_p_s)).sum((1, 2))
    A = (log_p_s.exp() - log_p_t.exp()).to(R_s.dtype)
    if padding is not None:
        A = A.masked_fill_(padding, 0)
    return _Distances((temperature**2 * kl).to(R_s.dtype), A, one * temperature)


def _distance_by_relations(
    s: _Centred, t: _Centred, weight: Tensor, options: Options, dx: Tensor | None
) -> Tensor:
    """Losses (G,) from (N, N) relations; weight · their gradient is added to ``dx`` (G, N, Ds).

    ∂/∂y_i = 2kΣ_j A_ij y_j = 2k(H_i + Σ_j A_ij y_i) with H_i = Σ_j A_ij (s_j − s_i): alike rows
    lose no digits, as Σ_j A_ij y_j would.
    """
    losses, A, k = _distances(s, t, options, dx is not None)
    if dx is None:
        return losses
    row_sums = A.sum(-1)  # (G, N)
    A.diagonal(dim1=1, dim2=2).sub_(row_sums)
    h = s.unscaled_gradient(torch.bmm(A, s.rows), row_sums)
    dx.addcmul_(h, (2 * weight * k[:, None] * s.derivative)[..., None])
    return losses


def _log_softmax(logits: Tensor, padding: Tensor | None) -> Tensor:
    """Log-probabilities of all (N, N) entries of a relation as one distribution; 0 at padding."""
    if padding is None:
        return logits.flatten(1).log_softmax(1).view_as(logits)
    logits = logits.masked_fill(padding, torch.finfo(logits.dtype).min)
    return logits.flatten(1).log_softmax(1).view_as(logits).masked_fill(padding, 0)


def _pearson_by_features(
    s: _Centred, t: _Centred, weight: Tensor, eps: float, dx: Tensor | None
) -> Tensor:
    """`_distance_by_relations` for Pearson from (D, D) products: ⟨SSᵀ, TTᵀ⟩ = ‖TᵀS‖²."""
    u = s.centred_offsets(s.rows.square().sum(-1))  # (G, N)
    v = t.centred_offsets(t.rows.square().sum(-1))
    n = s.count
    StS = torch.bmm(s.rows.mT, s.rows)  # (G, Ds, Ds)
    TtS = torch.bmm(t.rows.mT, s.rows)  # (G, Dt, Ds)
    TtT = torch.bmm(t.rows.mT, t.rows)

    def inner(x: Tensor, y: Tensor, product: Tensor) -> Tensor:
        linear = 2 * n * (x * y).sum(1, keepdim=True)
        return linear.squeeze(1) + _norms(product).square()

    sigma_s, sigma_t = inner(u, u, StS).sqrt(), inner(v, v, TtT).sqrt()  # (G,)
    covariance = inner(u, v, TtS)
    denominator = sigma_s * sigma_t + eps
    losses = (denominator - covariance) / denominator
    if dx is None:
        return losses

    # ∂/∂R̃_s = p·R̃_t + q·R̃_s =: A
    p = -1 / denominator
    q = covariance / denominator.square() * sigma_t * _reciprocal(sigma_s)
    p, q = 2 * weight * p[:, None], 2 * weight * q[:, None]  # (G, 1)
    w = p * v + q * u  # (G, N)
    row_sums = n * w
    # A·S = p·T(TᵀS) + q·S(SᵀS) + 1(wᵀS) + w(1ᵀS), and 1ᵀS is what rounding left.
    h = torch.bmm(t.rows, TtS.mul_(p[..., None]))
    h.baddbmm_(s.rows, StS.mul_(q[..., None]))
    ones = torch.ones_like(w)
    h.baddbmm_(torch.stack((ones, w), 2), torch.bmm(torch.stack((w, ones), 1), s.rows))
    h.addcmul_(s.rows, row_sums[..., None], value=-1)
    h = s.unscaled_gradient(h, row_sums).mul_(s.derivative[..., None])
    dx += h if s.mask is None else h.masked_fill_(~s.mask[..., None], 0)
    return losses
