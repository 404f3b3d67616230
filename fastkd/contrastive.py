"""COS-NCE (LRC-BERT): a contrastive loss on the angles between layers' outputs."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastkd._checks import (
    check_choice,
    check_floating,
    check_labels,
    check_like,
    check_mask,
    check_no_grad,
    check_pair,
    check_positive_int,
    check_shape,
    layer_pairs,
)
from fastkd._dispatch import use_triton
from fastkd._labels import add_by_class, label_segments
from fastkd._numerics import autocast_off, once_differentiable, upcast, working_dtype
from fastkd._pooling import pool_tokens

__all__ = ["CosNCELoss", "cos_nce_loss", "cos_nce_loss_ref"]

REDUCTIONS = ("mean", "sum", "none")
POOLS = ("tokens", "cls", "mean")

# Elements of one block of samples: 2 MB in fp32, so that what is made of a block stays in cache.
BLOCK_ELEMENTS = 2**19

# Norms outside are computed again from scaled vectors: their squares may leave fp32's range.
SMALLEST_NORM, LARGEST_NORM = 1e-15, 1e15


def cos_nce_loss_ref(
    student: Tensor,
    teacher: Tensor,
    *,
    negatives: Tensor | None = None,
    labels: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Eqs. 1-2 of LRC-BERT in plain PyTorch; see `cos_nce_loss`."""
    z_s, z_t = upcast(student), upcast(teacher)  # (B, ..., D)
    size = len(z_s)
    real = torch.ones_like(z_s[..., 0], dtype=torch.bool) if mask is None else mask.bool()
    z_s, z_t = (torch.where(real[..., None], z, 0) for z in (z_s, z_t))

    # The negatives n_j of sample i, and which of them count: (B, K, ...)
    if negatives is None:
        n = z_t
        cos_n = torch.einsum("i...d,j...d->ij...", _direction_ref(z_s), _direction_ref(n))
        other = ~torch.eye(size, dtype=torch.bool, device=z_s.device)
        if labels is not None:
            other = labels[:, None] != labels[None, :]
        counts = other.view(size, size, *[1] * (real.dim() - 1)) & real[None]
    else:
        n = upcast(negatives)  # (K, ..., D) or (B, K, ..., D)
        samples = "i" if n.dim() > z_s.dim() else ""
        cos_n = torch.einsum(f"i...d,{samples}k...d->ik...", _direction_ref(z_s), _direction_ref(n))
        counts = torch.ones_like(cos_n, dtype=torch.bool)

    # g(x, y) = 1 - x·y / (‖x‖ ‖y‖)   (eq. 2)
    g_n = 1 - cos_n  # (B, K, ...)
    g_p = 1 - (_direction_ref(z_t) * _direction_ref(z_s)).sum(-1)  # (B, ...)
    # Σ_i (2 - (g(n_i, z_S) - g(z_T, z_S))) / 2K + g(z_T, z_S)   (eq. 1)
    k = counts.sum(1)  # (B, ...)
    total = torch.where(counts, 2 - (g_n - g_p[:, None]), 0).sum(1)
    compared = real & (k > 0)
    losses = torch.where(compared, total / (2 * k.clamp_min(1)) + g_p, 0)
    return _reduce(losses, compared, reduction)


def _direction_ref(x: Tensor) -> Tensor:
    """x / ‖x‖, and zero for a zero vector: its cosine with anything is 0."""
    norm = x.norm(dim=-1, keepdim=True)
    return torch.where(norm == 0, 0, x / torch.where(norm == 0, 1, norm))


def cos_nce_loss(
    student: Tensor,
    teacher: Tensor,
    *,
    negatives: Tensor | None = None,
    labels: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
    backend: str = "auto",
) -> Tensor:
    """Pull each position to the teacher's by angle and push it from the teacher's negatives.

    ``L(z_S, z_T, N) = Σ_k (2 - (g(n_k, z_S) - g(z_T, z_S))) / 2K + g(z_T, z_S)`` (LRC-BERT,
    eq. 1) with ``g(x, y) = 1 - x·y / (‖x‖ ‖y‖)`` (eq. 2), which is
    ``2 + mean_k cos(n_k, z_S) / 2 - 3/2 cos(z_T, z_S)`` and costs one pass, linear in B. A
    position without negatives (a batch of one, no sample of another label) compares nothing and
    contributes zero, with zero gradient. The cosine of a zero vector is 0, its gradient zero.

    Args:
        student: (B, ..., D).
        teacher: (B, ..., D), the same shape.
        negatives: teacher features of negatives, (K, ..., D) for all samples or (B, K, ..., D)
            for each, compared at the same position; None: the other samples of the batch.
        labels: (B,); only samples of another label are negatives. Not with ``negatives``.
        mask: (B, ...) bool or 0/1, 1 = real token. A padded position has no loss and is nobody's
            negative.
        reduction: "mean" over the real positions that have a negative, "sum", or "none".
        backend: "auto", "torch" or "triton".

    Returns:
        Scalar, or (B, ...) for "none"; float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError: on a wrong shape, dtype, device or option, naming the argument.

    >>> student = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> cos_nce_loss(student, teacher=2 * student)  # at the teacher, at right angles to the other
    tensor(0.5000)
    """
    return _cos_nce_layers(
        [student],
        [teacher],
        None if negatives is None else [negatives],
        labels,
        mask,
        reduction,
        backend,
    )


def _cos_nce_layers(
    students: list[Tensor],
    teachers: list[Tensor],
    negatives: list[Tensor] | None,
    labels: Tensor | None,
    mask: Tensor | None,
    reduction: str,
    backend: str,
) -> Tensor:
    """`cos_nce_loss` of each layer, averaged; "none" takes one layer."""
    first = students[0]
    for i, (student, teacher) in enumerate(zip(students, teachers, strict=True)):
        check_pair(student, teacher, min_ndim=2)
        check_shape("teacher", teacher, student.shape, "the shape of student")
        check_shape(
            "student without features", student[..., 0], first.shape[:-1], "as the first layer"
        )
        if negatives is not None:
            _check_negatives(negatives[i], student)
    mask = check_mask(mask, first.shape[:-1], first.device)
    if labels is not None:
        check_labels("labels", labels, first.shape[0], first.device)
        if negatives is not None:
            raise ValueError(
                "labels choose among the samples of the batch and say nothing about given "
                "negatives; pass either labels or negatives"
            )
    check_choice("reduction", reduction, REDUCTIONS)

    unsupported = "float64 is left to PyTorch" if first.dtype == torch.float64 else None
    kernels = use_triton(backend, "cos_nce_loss", first, unsupported)
    students, teachers = _flat(students), _flat(teachers)
    given: list[Tensor | None] = [None] * len(students)
    if negatives is not None:
        given = [
            x.reshape(*x.shape[: x.dim() - first.dim() + 1], *student.shape[1:])
            for x, student in zip(negatives, students, strict=True)
        ]
    if mask is not None:
        mask = mask.reshape(students[0].shape[:2])
    layers = list(zip(students, teachers, given, strict=True))
    if kernels and first.numel() > 0:
        loss = _triton_layers(layers, labels, mask, reduction)
    else:
        losses = []
        for layer in layers:
            terms, compared = _CosNCE.apply(*layer, labels, mask)
            losses.append(_reduce(terms, compared, reduction))
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
    return loss.reshape(first.shape[:-1]) if reduction == "none" else loss


def _flat(layers: list[Tensor]) -> list[Tensor]:
    """(B, ..., D) as (B, P, D)."""
    return [x.reshape(x.shape[0], x.shape[1:-1].numel(), x.shape[-1]) for x in layers]


class CosNCELoss(nn.Module):
    """See `cos_nce_loss`. Holds ``W``, the projection of eq. 3 from student to teacher size.

    Args:
        student_dim, teacher_dim: hidden sizes.
        pool: "tokens" (each position by itself), "cls" (the first real token) or "mean" (the
            average of the real tokens). Features (B, D) pass through unpooled.
        reduction, backend: as in `cos_nce_loss`.

    ``forward(student, teacher, mask=None, labels=None, negatives=None)`` takes student
    (B, N, Ds) or (B, Ds), teacher likewise, or lists of layers: one W for all, their losses
    averaged. negatives are as `cos_nce_loss` takes them, pooled already (a list for layers).

    >>> loss = CosNCELoss(student_dim=4, teacher_dim=6)
    >>> loss(torch.randn(3, 5, 4), torch.randn(3, 5, 6)).shape
    torch.Size([])
    """

    def __init__(
        self,
        student_dim: int,
        teacher_dim: int,
        pool: str = "tokens",
        *,
        reduction: str = "mean",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_positive_int("student_dim", student_dim)
        check_positive_int("teacher_dim", teacher_dim)
        check_choice("pool", pool, POOLS)
        check_choice("reduction", reduction, ("mean", "sum"))
        self.pool, self.reduction, self.backend = pool, reduction, backend
        self.W = nn.Linear(student_dim, teacher_dim, bias=False)

    def forward(
        self,
        student: Tensor | Sequence[Tensor],
        teacher: Tensor | Sequence[Tensor],
        mask: Tensor | None = None,
        labels: Tensor | None = None,
        negatives: Tensor | Sequence[Tensor] | None = None,
    ) -> Tensor:
        pairs = layer_pairs(student, teacher)
        given: list[Tensor] | None = None
        if negatives is not None:
            given = [negatives] if isinstance(negatives, Tensor) else list(negatives)
            if len(given) != len(pairs):
                raise ValueError(
                    f"negatives has {len(given)} layers but student has {len(pairs)}; "
                    "pass as many of one as of the other"
                )
        students, teachers = [], []
        mask_of_layers = mask
        for student, teacher in pairs:
            student, teacher, mask_of_layers = self._pooled(student, teacher, mask)
            students.append(self.W(student))
            teachers.append(teacher)
        return _cos_nce_layers(
            students, teachers, given, labels, mask_of_layers, self.reduction, self.backend
        )

    def _pooled(
        self, student: Tensor, teacher: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Both sides of a layer and the mask, one row per sample unless the pool is "tokens"."""
        check_floating("student", student, min_ndim=2)
        check_floating("teacher", teacher, min_ndim=2)
        if student.dim() < 3 or self.pool == "tokens":
            return student, teacher, mask
        mask = check_mask(mask, student.shape[:2], student.device)
        student = pool_tokens(student, mask, self.pool)
        teacher = pool_tokens(teacher, mask, self.pool)
        return student, teacher, None if mask is None else mask.any(1)

    def extra_repr(self) -> str:
        return f"pool={self.pool!r}, reduction={self.reduction!r}"


def _check_negatives(negatives: Tensor, student: Tensor) -> None:
    check_floating("negatives", negatives)
    check_like("negatives", negatives, "student", student)
    check_no_grad("negatives", negatives)
    shape, rest = tuple(negatives.shape), tuple(student.shape[1:])
    shared = negatives.dim() == student.dim() and shape[1:] == rest
    each = negatives.dim() == student.dim() + 1 and shape[2:] == rest
    if not shared and not (each and shape[0] == student.shape[0]):
        named = ", ".join(map(str, rest))
        raise ValueError(
            f"negatives must have shape (K, {named}) or ({student.shape[0]}, K, {named}), "
            f"got {shape}"
        )


def _reduce(losses: Tensor, compared: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / compared.sum().clamp_min(1)


class _CosNCE(torch.autograd.Function):
    """Loss per position (B, P), and which positions had a negative.

    A position's loss is 2 + ẑ·a with a = w·S - v·t̂: S the sum of its negatives' directions, in a
    batch without its own taken out, which v makes up for. Its gradient is (a - ẑ (ẑ·a)) / ‖z‖.
    """

    @staticmethod
    def forward(ctx, student, teacher, negatives, labels, mask):
        with autocast_off(student):
            blocks = _Blocks(student, mask)
            total, own, w, v, compared = _negatives(blocks, teacher, negatives, labels)
            pull = torch.zeros_like(w)  # (B, P), ẑ·a
            for part in blocks.parts:
                z, _ = blocks.directions(student, part)
                t, _ = blocks.directions(teacher, part)
                s = total[own[part]] if own is not None else total
                pull[part] = w[part] * (z * s).sum(-1) - v[part] * (z * t).sum(-1)
            losses = torch.where(compared, 2 + pull, 0)
        ctx.save_for_backward(student, teacher, mask, total, own, w, v, compared, pull)
        ctx.mark_non_differentiable(compared)
        return losses, compared

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        student, teacher, mask, total, own, w, v, compared, pull = ctx.saved_tensors
        with autocast_off(student):
            blocks = _Blocks(student, mask)
            dx = torch.empty_like(student, memory_format=torch.contiguous_format)
            for part in blocks.parts:
                z, scale = blocks.directions(student, part)
                t, _ = blocks.directions(teacher, part)
                s = total[own[part]] if own is not None else total
                d = s * w[part][..., None] - t.mul_(v[part][..., None])
                d.sub_(z.mul_(pull[part][..., None]))
                d.mul_((scale * grad[part])[..., None])
                dx[part] = d.masked_fill_(~compared[part][..., None], 0)
        return dx, None, None, None, None


def _triton_layers(
    layers: list[tuple[Tensor, Tensor, Tensor | None]],
    labels: Tensor | None,
    mask: Tensor | None,
    reduction: str,
) -> Tensor:
    """The layers' average by `fastkd.kernels.contrastive`, those alike in one go."""
    from fastkd.kernels.contrastive import LAYERS_PER_LAUNCH

    groups: dict[tuple, list] = {}
    for student, teacher, negatives in layers:
        kind = (student.shape, student.dtype, None if negatives is None else negatives.shape)
        groups.setdefault(kind, []).append((student, teacher, negatives))
    losses = []
    for group in groups.values():
        for start in range(0, len(group), LAYERS_PER_LAUNCH):
            part = group[start : start + LAYERS_PER_LAUNCH]
            features = [x for side in zip(*part, strict=True) for x in side if x is not None]
            loss = _CosNCETriton.apply(labels, mask, reduction, len(part), *features)
            losses.append(loss if len(part) == len(layers) else loss * (len(part) / len(layers)))
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


class _CosNCETriton(torch.autograd.Function):
    """Layers of one shape by `fastkd.kernels.contrastive`."""

    @staticmethod
    def forward(ctx, labels, mask, reduction, layers, *features):
        from fastkd.kernels import contrastive as kernels

        students, teachers = _alike(features[:layers]), _alike(features[layers : 2 * layers])
        negatives = list(features[2 * layers :])
        ctx.kind = "batch" if labels is None else "labels"
        if negatives:
            ctx.kind = "each" if negatives[0].dim() == 4 else "shared"
            negatives = _alike([x.reshape(-1, *x.shape[-2:]) for x in negatives])
        labels = None if labels is None else labels.contiguous()
        mask = None if mask is None else mask.contiguous()
        # A custom operator costs more than the launches behind it: only where a graph needs one.
        run = kernels.cos_nce_op if torch.compiler.is_compiling() else kernels.cos_nce
        loss, *saved = run(students, teachers, negatives, labels, mask, ctx.kind, reduction)
        ctx.layers = layers
        ctx.save_for_backward(labels, mask, *saved, *students, *teachers)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        from fastkd.kernels import contrastive as kernels

        labels, mask, *saved = ctx.saved_tensors
        saved, features = saved[:5], saved[5:]
        students, teachers = features[: ctx.layers], features[ctx.layers :]
        compiling = torch.compiler.is_compiling()
        run = kernels.cos_nce_gradient_op if compiling else kernels.cos_nce_gradient
        dx = run(students, teachers, labels, mask, saved, grad.contiguous(), ctx.kind)
        needless = len(ctx.needs_input_grad) - 4 - ctx.layers
        return (None,) * 4 + dx.unbind() + (None,) * needless


def _alike(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors with the same strides, the last one 1."""
    strides = tensors[0].stride()
    if strides[-1] == 1 and all(x.stride() == strides for x in tensors):
        return list(tensors)
    return [x.contiguous() for x in tensors]


class _Blocks:
    """Samples in blocks, as directions in the working dtype, with the padding zeroed."""

    def __init__(self, like: Tensor, mask: Tensor | None):
        self.mask = mask
        self.dtype = working_dtype(like)
        # On the CPU the data may be looked at; on a GPU that would synchronise.
        self.may_look = like.device.type == "cpu" and not torch.compiler.is_compiling()
        self.parts = self.split(like.shape[0], like.shape[1:].numel())

    def split(self, count: int, size: int) -> list[slice]:
        """0..count in slices, for blocks of items of ``size`` elements each."""
        step = max(1, BLOCK_ELEMENTS // max(size, 1)) if self.may_look else max(count, 1)
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    def directions(self, x: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """x / ‖x‖ of a block (b, P, D), new memory, and 1 / ‖x‖ (b, P); zero vectors give 0."""
        x = x[part].to(self.dtype)
        if self.mask is None:
            return _directions(x, self.may_look)
        real = self.mask[part]
        return _directions(torch.where(real[..., None], x, 0), self.may_look, real)


def _directions(x: Tensor, may_look: bool, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x / ‖x‖ (..., D) in new memory and 1 / ‖x‖ (...); both 0 for a zero vector."""
    norm = torch.linalg.vector_norm(x, dim=-1)
    usual = (norm > SMALLEST_NORM) & (norm < LARGEST_NORM)
    if real is not None:
        usual |= ~real
    if may_look and bool(usual.all()):
        scale = torch.where(norm == 0, 0, norm.reciprocal())
        return x * scale[..., None], scale
    peak = x.abs().amax(-1)
    peak = torch.where(peak == 0, 1, peak)
    x = x / peak[..., None]
    norm = torch.linalg.vector_norm(x, dim=-1)
    scale = torch.where(norm == 0, 0, norm.reciprocal())
    return x.mul_(scale[..., None]), scale / peak


def _negatives(
    blocks: _Blocks, teacher: Tensor, negatives: Tensor | None, labels: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Every position's negatives.

    Returns sums of directions (..., P, D), each sample's row among them (B,) or None where all
    share one sum, the weights w and v (B, P), and which positions have any (B, P).
    """
    batch, positions, features = teacher.shape
    zeros = functools.partial(torch.zeros, dtype=blocks.dtype, device=teacher.device)
    real = blocks.mask
    if real is None:
        real = torch.ones(batch, positions, dtype=torch.bool, device=teacher.device)
    own = None
    if negatives is not None:
        count = zeros(batch, positions) + negatives.shape[-3]
        total = zeros(*negatives.shape[:-3], positions, features)
        if negatives.dim() == 4:
            own = torch.arange(batch, device=teacher.device)
        for part in blocks.split(negatives.shape[-3], total.numel()):
            negative = negatives[..., part, :, :].to(blocks.dtype)
            total += _directions(negative, blocks.may_look)[0].sum(-3)
    elif labels is None:
        count = (real.sum(0, dtype=blocks.dtype) - 1).expand(batch, positions)
        total = zeros(positions, features)
        for part in blocks.parts:
            total += blocks.directions(teacher, part)[0].sum(0)
    else:
        own = label_segments(labels)
        classes = int(own.max()) + 1 if blocks.may_look and batch else batch
        total, count = zeros(classes, positions, features), zeros(classes, positions)
        for part in blocks.parts:
            add_by_class(total, own[part], blocks.directions(teacher, part)[0])
        total = _sum_of_others(total)
        count = _sum_of_others(add_by_class(count, own, real.to(blocks.dtype)))[own]
    w = torch.where(count > 0, 0.5 / count.clamp_min(1), 0)
    v = w + 1.5 if negatives is None and labels is None else torch.full_like(w, 1.5)
    return total, own, w, v, real & (count > 0)


def _sum_of_others(x: Tensor) -> Tensor:
    """For each class (C, ...) the sum over the other classes; no subtraction, so no digits go."""
    before, after = x.cumsum(0), x.flip(0).cumsum(0).flip(0)
    others = torch.zeros_like(x)
    others[1:] += before[:-1]
    others[:-1] += after[1:]
    return others
