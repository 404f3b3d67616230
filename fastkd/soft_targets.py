"""Distillation from logits: the divergence of the teacher's and the student's softened output."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fastkd._checks import (
    check_choice,
    check_device,
    check_floating,
    check_like,
    check_mask,
    check_no_grad,
    check_number,
    check_shape,
)
from fastkd._dispatch import Backend, use_triton
from fastkd._numerics import (
    apply,
    as_rows,
    autocast_off,
    once_differentiable,
    saveable,
    upcast,
    values_readable,
    working_dtype,
)
from fastkd._products import add_product, product, product_back, ready, sums_like
from fastkd.kernels.launch import operator

Divergence = Literal["forward_kl", "reverse_kl", "adaptive_kl", "js"]
DIVERGENCES = get_args(Divergence)
Reduction = Literal["batchmean", "sum", "none"]
REDUCTIONS = get_args(Reduction)

# Logits worked on at a time on the CPU: few enough that the buffers of a chunk stay near the cache,
# enough that threads do not wait for each other after every small operation.
CHUNK = 1 << 21

# Softened further, distributions differ by so little, and τ²·KL weighs its rounding so much, that
# float32 would leave few digits.
HOT = 10.0

# Logits that linear_soft_target_loss holds at a time, on the CPU and on a GPU: enough positions
# for matrix products that are not bound by reading the vocabulary's weights.
LINEAR_CHUNK = (1 << 22, 1 << 27)


def soft_target_loss_ref(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    temperature: float = 1.0,
    divergence: Divergence = "forward_kl",
    mask: Tensor | None = None,
    reduction: Reduction = "batchmean",
    scale_by_t2: bool = True,
    denominator: float | Tensor | None = None,
) -> Tensor:
    """The divergences as written in the literature. See `soft_target_loss`."""
    if mask is None:
        mask = torch.ones(student_logits.shape[:-1], device=student_logits.device)
    real = mask.bool()[..., None]  # (..., 1)
    log_ps = torch.log_softmax(upcast(student_logits).where(real, 0) / temperature, dim=-1)
    log_pt = torch.log_softmax(upcast(teacher_logits).where(real, 0) / temperature, dim=-1)
    p_s, p_t = log_ps.exp(), log_pt.exp()

    if divergence == "forward_kl":
        loss = _kl_ref(p_t, log_pt, log_ps)
    elif divergence == "reverse_kl":
        loss = _kl_ref(p_s, log_ps, log_pt)
    elif divergence == "js":
        log_m = torch.logaddexp(log_ps, log_pt) - math.log(2)
        loss = (_kl_ref(p_t, log_pt, log_m) + _kl_ref(p_s, log_ps, log_m)) / 2
    else:
        gap = (p_t - p_s).detach().abs()
        ranked, order = p_t.sort(dim=-1, descending=True, stable=True)
        mass = _mass(ranked)
        in_head = mass <= mass[..., -1:] / 2  # μ = ½ (Wu et al. 2024)
        in_head[..., 0] = True
        gap = gap.gather(-1, order)
        g_head, g_tail = gap.where(in_head, 0).sum(-1), gap.where(~in_head, 0).sum(-1)
        weight = torch.where(g_head + g_tail > 0, g_head / (g_head + g_tail), 0.5)
        forward_kl, reverse_kl = _kl_ref(p_t, log_pt, log_ps), _kl_ref(p_s, log_ps, log_pt)
        loss = _weigh_ref(weight, forward_kl) + _weigh_ref(1 - weight, reverse_kl)

    loss = loss.where(real[..., 0], 0) * (temperature**2 if scale_by_t2 else 1.0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (real.sum().clamp(min=1) if denominator is None else denominator)


def _mass(ranked: Tensor) -> Tensor:
    """What descending probabilities add up to, by the first: half of equal ones is half of it."""
    return (ranked / ranked[..., :1]).cumsum(-1)


def _kl_ref(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) = Σ p (log p − log q), where 0 · log 0 = 0."""
    # The difference is filled too: in a backward pass 0 · inf would still make NaN.
    nothing = p == 0
    return (p * (log_p - log_q).masked_fill(nothing, 0)).sum(-1)


def _weigh_ref(weight: Tensor, loss: Tensor) -> Tensor:
    """weight · loss, where a weight of 0 counts nothing even against ∞."""
    return (weight * loss).masked_fill(weight == 0, 0)


def soft_target_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    temperature: float = 1.0,
    divergence: Divergence = "forward_kl",
    mask: Tensor | None = None,
    reduction: Reduction = "batchmean",
    scale_by_t2: bool = True,
    denominator: float | Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Divergence between the softened output distributions of teacher and student.

    With p = softmax(z/τ) and KL(p ‖ q) = Σ p log(p/q) over the vocabulary:

    - ``"forward_kl"``: KL(p_t ‖ p_s)  (LRKD, eq. 1)
    - ``"reverse_kl"``: KL(p_s ‖ p_t)
    - ``"js"``: ½KL(p_t ‖ m) + ½KL(p_s ‖ m) with m = ½(p_s + p_t)
    - ``"adaptive_kl"``: w·KL(p_t ‖ p_s) + (1 − w)·KL(p_s ‖ p_t), w = g_head / (g_head + g_tail)
      (Wu et al. 2024, as in LRKD's Table 4). g sums the gaps |p_t − p_s| over the head, the
      teacher's most probable entries while their cumulative probability is at most ½ (the first
      always belongs to it, equal ones go by index), and over the rest. w is a constant for the
      gradient.

    times τ² when ``scale_by_t2``. An entry of probability 0 on the side that weighs it adds
    nothing, so a vocabulary masked with −inf on both sides is fine.

    Args:
        student_logits: (..., V).
        teacher_logits: (..., V), same shape, dtype and device; must not require grad.
        temperature: τ > 0.
        divergence: one of the four above.
        mask: (...), bool or 0/1, 1 = real; the rest adds nothing and gets no gradient.
        reduction: "batchmean" divides the sum by the number of real positions, "sum" does not,
            "none" gives one value a position, 0 where masked.
        scale_by_t2: multiply by τ², which keeps the gradient's size over temperatures.
        denominator: a positive number, or a 0-d tensor of any real dtype and any device, to
            divide by in place of this batch's own count (gradient accumulation); only with
            "batchmean". The dtype of the loss stays its own.
        backend: "auto", "torch" or "triton".

    Returns:
        Scalar, or (...) for "none", in float32 (float64 for float64). 0 without any real position.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices differ (two vocabularies can't be
            compared), the teacher requires grad, or an unknown or impossible option.

    >>> student = torch.tensor([[0.0, 0.0]], requires_grad=True)
    >>> teacher = torch.tensor([[1.0, 3.0]]).log()
    >>> loss = soft_target_loss(student, teacher)
    >>> round(loss.item(), 4)  # ¼·log(½) + ¾·log(3/2)
    0.1308
    """
    _check_logits(student_logits, teacher_logits)
    _check_options(temperature, divergence, reduction, denominator)
    leading = student_logits.shape[:-1]
    mask = check_mask(mask, leading, student_logits.device)
    denominator = _as_tensor(denominator, student_logits)
    options = _Options(divergence, float(temperature), scale_by_t2, reduction)
    student, teacher = as_rows(student_logits), as_rows(teacher_logits)
    mask = None if mask is None else mask.flatten()
    if use_triton(backend, "soft_target_loss", student):
        loss = apply(_SoftTargetsTriton, options, student, teacher, mask, denominator)
    else:
        loss = apply(_SoftTargets, options, student, teacher, mask)
        if reduction != "none":
            loss = _divide(loss.sum(), leading.numel(), mask, reduction, denominator)
    return loss.reshape(leading) if reduction == "none" else loss


def _check_logits(student: Tensor, teacher: Tensor) -> None:
    check_floating("student_logits", student)
    check_floating("teacher_logits", teacher)
    check_like("teacher_logits", teacher, "student_logits", student)
    check_no_grad("teacher_logits", teacher)
    _check_vocabularies("logits", student, student.shape[-1], teacher.shape[-1])
    check_shape("teacher_logits", teacher, student.shape, "the shape of student_logits")


def _check_vocabularies(name: str, student: Tensor, of_student: int, of_teacher: int) -> None:
    if of_student != of_teacher:
        raise ValueError(
            f"student_{name} has a vocabulary of {of_student} entries but teacher_{name} of "
            f"{of_teacher}; logits of different vocabularies can't be compared"
        )
    if of_student == 0:
        raise ValueError(f"student_{name} has no entry to compare, got {tuple(student.shape)}")


def _check_options(
    temperature: float, divergence: str, reduction: str, denominator: float | Tensor | None
) -> None:
    check_number("temperature", temperature, above=0)
    check_choice("divergence", divergence, DIVERGENCES)
    check_choice("reduction", reduction, REDUCTIONS)
    if denominator is None:
        return
    if reduction != "batchmean":
        raise ValueError(f"denominator needs reduction='batchmean', got {reduction!r}")
    if isinstance(denominator, Tensor):
        if denominator.dim() != 0:
            raise ValueError(
                f"denominator must be a number or a 0-d tensor, got {tuple(denominator.shape)}"
            )
        if denominator.dtype == torch.bool or denominator.is_complex():
            raise TypeError(f"denominator must be a real number, got {denominator.dtype}")
        check_no_grad("denominator", denominator)
    if not isinstance(denominator, Tensor) or values_readable(denominator):
        check_number("denominator", _number(denominator), above=0)


def _number(x: float | Tensor) -> float:
    """The value of a number, or of a tensor whose values may be read."""
    return x.item() if isinstance(x, Tensor) else x


def _as_tensor(denominator: float | Tensor | None, x: Tensor) -> Tensor | None:
    """The denominator as a 0-d tensor of the device and working dtype of ``x``.

    Without a wait for the device: a number travels in the launch.
    """
    dtype = working_dtype(x)
    if denominator is None:
        return None
    if isinstance(denominator, Tensor) and not values_readable(denominator):
        if denominator.device.type == "meta" != x.device.type:
            raise ValueError("denominator is on meta, where it has no value to divide by")
        return denominator.to(x.device, dtype, non_blocking=True)
    # Not torch.full, of which the compiler makes a graph for every number.
    return torch.ones((), dtype=dtype, device=x.device) * _number(denominator)


def _divide(
    total: Tensor, rows: int, mask: Tensor | None, reduction: str, denominator: Tensor | None
) -> Tensor:
    """The sum over all positions, divided by what the reduction says; by 1 at least if counted."""
    if reduction == "sum":
        return total
    if denominator is not None:
        return total / denominator
    return total / (max(rows, 1) if mask is None else mask.sum().clamp(min=1))


# What the losses of single rows depend on: divergence, temperature and their factor.
PerRow = tuple[str, float, float]


@dataclass(frozen=True)
class _Options:
    divergence: str
    temperature: float
    scale_by_t2: bool
    reduction: str

    @property
    def per_row(self) -> PerRow:
        scale = self.temperature**2 if self.scale_by_t2 else 1.0
        return self.divergence, self.temperature, scale


def _save(ctx, *tensors: Tensor | None) -> None:
    """For the backward pass, also what was made under ``torch.inference_mode``."""
    ctx.save_for_backward(*(None if x is None else saveable(x) for x in tensors))


class _SoftTargets(torch.autograd.Function):
    """Loss of every row and, in the same pass over the logits, its gradient."""

    @staticmethod
    def forward(ctx, options, student, teacher, mask):
        # student, teacher (R, V); mask (R,)
        ctx.dtype = student.dtype
        loss, dstudent = _rows(student, teacher, mask, ctx.needs_input_grad[1], options.per_row)
        _save(ctx, dstudent, mask)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        dstudent, mask = ctx.saved_tensors
        if mask is not None:
            grad = grad.masked_fill(~mask, 0)
        return None, (dstudent * grad[:, None]).to(ctx.dtype), None, None


class _SoftTargetsTriton(torch.autograd.Function):
    """The same, reduced too, by two kernels and a third that reads the logits for the gradient."""

    @staticmethod
    def forward(ctx, options, student, teacher, mask, denominator):
        from fastkd.kernels.soft_targets import soft_target_forward, soft_target_reduce

        student, teacher = (z if z.stride(-1) == 1 else z.contiguous() for z in (student, teacher))
        ctx.options = options
        loss, stats = soft_target_forward(student, teacher, mask, *options.per_row)
        divisor = None
        if options.reduction != "none":
            counts = options.reduction == "batchmean"
            loss, divisor = soft_target_reduce(loss, mask, denominator, counts)
        _save(ctx, student, teacher, mask, stats, divisor)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        from fastkd.kernels.soft_targets import soft_target_backward

        student, teacher, mask, stats, divisor = ctx.saved_tensors
        dstudent = soft_target_backward(
            student, teacher, mask, stats, divisor, grad, *ctx.options.per_row
        )
        return None, dstudent, None, None, None


def _rows(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    wants_grad: bool,
    per_row: PerRow,
) -> tuple[Tensor, Tensor | None]:
    """Loss (R,) of every row, 0 where masked, and its gradient (R, V) with respect to student.

    The gradient stays in the working dtype: half types would lose small probabilities before a
    loss scale reaches them. In a masked row it is finite, but not zero.
    """
    divergence, temperature, scale = per_row
    rows, vocabulary = student.shape
    dtype = working_dtype(student)
    loss = student.new_empty(rows, dtype=dtype)
    dstudent = student.new_empty(student.shape, dtype=dtype) if wants_grad else None
    row_divergence = _ROW_DIVERGENCES[divergence]
    with autocast_off(student):
        for chunk in _chunks(rows, vocabulary, student):
            log_ps = _log_softmax(student[chunk], mask, chunk, temperature)
            log_pt = _log_softmax(teacher[chunk], mask, chunk, temperature)
            value, grad = row_divergence(log_ps, log_pt, wants_grad)
            loss[chunk] = value * scale
            if dstudent is not None and grad is not None:
                torch.mul(grad, scale / temperature, out=dstudent[chunk])
        if mask is not None:
            loss = loss.masked_fill(~mask, 0)
    return loss, dstudent


def _chunks(rows: int, vocabulary: int, x: Tensor) -> list[slice]:
    """Row ranges to work on one at a time; one range where a loop would not pay."""
    if not values_readable(x):  # on a GPU or traced
        return [slice(None)]
    step = max(CHUNK // vocabulary, 1)
    return [slice(start, start + step) for start in range(0, rows, step)]


def _log_softmax(logits: Tensor, mask: Tensor | None, chunk: slice, temperature: float) -> Tensor:
    z = logits.double() if temperature > HOT else upcast(logits)
    if mask is not None:
        z = z.masked_fill(~mask[chunk, None], 0)
    return torch.log_softmax(z if temperature == 1 else z / temperature, dim=-1)


def _forward_kl(log_ps: Tensor, log_pt: Tensor, wants_grad: bool) -> tuple[Tensor, Tensor | None]:
    """KL(p_t ‖ p_s) of every row and its gradient with respect to z_s/τ: p_s − p_t."""
    p_t = log_pt.exp()
    value = _weighted_sum(p_t, log_pt - log_ps)
    return value, log_ps.exp().sub_(p_t) if wants_grad else None


def _reverse_kl(log_ps: Tensor, log_pt: Tensor, wants_grad: bool) -> tuple[Tensor, Tensor | None]:
    """KL(p_s ‖ p_t) and its gradient: p_s (log p_s − log p_t − KL)."""
    p_s = log_ps.exp()
    ratio = log_ps - log_pt
    value = _weighted_sum(p_s, ratio)
    return value, _expectation_grad(p_s, ratio, value) if wants_grad else None


def _js(log_ps: Tensor, log_pt: Tensor, wants_grad: bool) -> tuple[Tensor, Tensor | None]:
    """½KL(p_t ‖ m) + ½KL(p_s ‖ m) and its gradient: ½p_s (log p_s − log m − KL(p_s ‖ m))."""
    log_m = torch.logaddexp(log_ps, log_pt).sub_(math.log(2))
    p_s = log_ps.exp()
    ratio = log_ps - log_m
    student_side = _weighted_sum(p_s, ratio)
    value = (student_side + _weighted_sum(log_pt.exp(), log_pt - log_m)) / 2
    return value, _expectation_grad(p_s, ratio, student_side).div_(2) if wants_grad else None


def _adaptive_kl(log_ps: Tensor, log_pt: Tensor, wants_grad: bool) -> tuple[Tensor, Tensor | None]:
    """Forward and reverse KL weighted by the gap of the head and of the tail."""
    p_s, p_t = log_ps.exp(), log_pt.exp()
    head = _head_share(p_s, p_t)  # (R,)
    forward_value, forward_grad = _forward_kl(log_ps, log_pt, wants_grad)
    reverse_value, reverse_grad = _reverse_kl(log_ps, log_pt, wants_grad)
    value = _weigh(head, forward_value) + _weigh(1 - head, reverse_value)
    if forward_grad is None or reverse_grad is None:
        return value, None
    head = head[:, None]
    return value, _weigh(head, forward_grad) + _weigh(1 - head, reverse_grad)


_ROW_DIVERGENCES = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "js": _js,
    "adaptive_kl": _adaptive_kl,
}


def _weighted_sum(p: Tensor, x: Tensor) -> Tensor:
    """Σ p·x over the vocabulary, where a probability of 0 counts nothing even against ∞."""
    return (p * x).masked_fill_(p == 0, 0).sum(-1)


def _weigh(weight: Tensor, x: Tensor) -> Tensor:
    """weight · x, where a weight of 0 counts nothing even against ∞; not a lerp, which makes
    ∞ − ∞ of one infinite end."""
    return (weight * x).masked_fill_(weight == 0, 0)


def _expectation_grad(p: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    return (x - mean[:, None]).mul_(p).masked_fill_(p == 0, 0)


def _head_share(p_s: Tensor, p_t: Tensor) -> Tensor:
    """g_head / (g_head + g_tail) of every row; ½ where the distributions are the same."""
    gap = (p_t - p_s).abs_()
    total = gap.sum(-1)
    ranked, order = p_t.sort(dim=-1, descending=True, stable=True)
    mass = _mass(ranked)
    in_head = mass <= mass[:, -1:] / 2  # teacher probability that the head may hold, μ = ½
    in_head[:, 0] = True
    head = gap.gather(-1, order).masked_fill_(~in_head, 0).sum(-1)
    return torch.where(total > 0, head / total, 0.5)


def linear_soft_target_loss_ref(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    **options: Any,
) -> Tensor:
    """`soft_target_loss_ref` on the logits. See `linear_soft_target_loss`."""
    return soft_target_loss_ref(
        student_hidden @ student_weight.T, teacher_hidden @ teacher_weight.T, **options
    )


def linear_soft_target_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    temperature: float = 1.0,
    divergence: Divergence = "forward_kl",
    mask: Tensor | None = None,
    reduction: Reduction = "batchmean",
    scale_by_t2: bool = True,
    denominator: float | Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`soft_target_loss` from hidden states and vocabulary heads, without all the logits.

    Equals soft_target_loss(H_s W_sᵀ, H_t W_tᵀ, ...), computed for a few positions at a time, so
    that (positions, V) logits never stand in memory. The logits of a side have the wider dtype of
    its states and its weight, as those of the model's own head do outside autocast.

    Args:
        student_hidden: (..., Ds).
        student_weight: (V, Ds), the weight of the student's vocabulary head; any floating dtype.
        teacher_hidden: (..., Dt), the same leading dimensions and dtype; must not require grad.
        teacher_weight: (V, Dt), the same vocabulary, any floating dtype; must not require grad.
            A head that both share is given twice, here as ``student_weight.detach()``.
        temperature, divergence, mask, reduction, scale_by_t2, denominator, backend: as in
            `soft_target_loss`; the mask is over the leading dimensions.

    Returns:
        As `soft_target_loss`, with gradients to ``student_hidden`` and ``student_weight``.

    Raises:
        ValueError, TypeError: as `soft_target_loss`.

    >>> hidden, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(10, 4)
    >>> linear_soft_target_loss(hidden, weight, torch.randn(2, 3, 8), torch.randn(10, 8)).shape
    torch.Size([])
    """
    _check_heads(student_hidden, student_weight, teacher_hidden, teacher_weight)
    _check_options(temperature, divergence, reduction, denominator)
    leading = student_hidden.shape[:-1]
    mask = check_mask(mask, leading, student_hidden.device)
    h_s, w_s = _one_dtype(student_hidden, student_weight)
    h_t, w_t = _one_dtype(teacher_hidden, teacher_weight)
    denominator = _as_tensor(denominator, h_s)
    wider = h_t if h_t.dtype == torch.float64 else h_s
    triton = use_triton(backend, "linear_soft_target_loss", wider)
    options = _LinearOptions(divergence, float(temperature), scale_by_t2, reduction, triton)
    mask = None if mask is None else mask.flatten()
    # (R,) or, summed, ()
    loss = apply(_LinearSoftTargets, options, as_rows(h_s), w_s, as_rows(h_t), w_t, mask)
    if reduction == "none":
        return loss.reshape(leading)
    return _divide(loss, leading.numel(), mask, reduction, denominator)


def _one_dtype(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider of their dtypes."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    return hidden.to(dtype), weight.to(dtype)


def _check_heads(
    student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor
) -> None:
    check_floating("student_hidden", student_hidden)
    for name, x, ndim in (
        ("student_weight", student_weight, 2),
        ("teacher_hidden", teacher_hidden, None),
        ("teacher_weight", teacher_weight, 2),
    ):
        check_floating(name, x, ndim)
        check_device(name, x, "student_hidden", student_hidden)
    check_like("teacher_hidden", teacher_hidden, "student_hidden", student_hidden)
    check_no_grad("teacher_hidden", teacher_hidden)
    check_no_grad("teacher_weight", teacher_weight)
    V, Ds = student_weight.shape[0], student_hidden.shape[-1]
    _check_vocabularies("weight", student_weight, V, teacher_weight.shape[0])
    shape = (*student_hidden.shape[:-1], teacher_weight.shape[1])
    check_shape("teacher_hidden", teacher_hidden, shape, "student_hidden's positions, Dt")
    check_shape("student_weight", student_weight, (V, Ds), "the vocabulary, Ds")


@dataclass(frozen=True)
class _LinearOptions(_Options):
    triton: bool


class _LinearSoftTargets(torch.autograd.Function):
    """Loss and gradients of a chunk of positions at a time, then their logits are forgotten.

    A sum needs no upstream gradient to know how its rows weigh, so its gradients are made along
    with the loss. The losses of single rows are weighed by the upstream gradient, so there the
    backward pass computes the logits once more.
    """

    @staticmethod
    def forward(ctx, options, h_s, w_s, h_t, w_t, mask):
        ctx.options = options
        ctx.dtype = h_s.dtype
        given = h_s, w_s, h_t, w_t, mask, None
        passes = options.triton, *options.per_row
        if options.reduction == "none":
            _save(ctx, *given[:-1])
            return linear_soft_targets(*given, False, False, *passes)[0]
        needs = ctx.needs_input_grad[1:3]
        loss, *grads = linear_soft_targets(*given, *needs, *passes)
        _save(ctx, *_placed(grads, *needs))
        return loss.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if ctx.options.reduction == "none":
            needs = ctx.needs_input_grad[1:3]
            passes = ctx.options.triton, *ctx.options.per_row
            h_s, w_s, h_t, w_t, mask = ctx.saved_tensors
            _, *grads = linear_soft_targets(h_s, w_s, h_t, w_t, mask, grad, *needs, *passes)
            dh, dw = _placed(grads, *needs)
        else:
            dh, dw = (None if saved is None else saved * grad for saved in ctx.saved_tensors)
        dh, dw = (None if x is None else x.to(ctx.dtype) for x in (dh, dw))
        return None, dh, dw, None, None, None


def _placed(grads: list[Tensor], needs_dh: bool, needs_dw: bool) -> tuple[Tensor | None, ...]:
    """The gradients to the states and to the weight, those of the two that were needed."""
    return grads[0] if needs_dh else None, grads[-1] if needs_dw else None


def _linear_shapes(h_s, w_s, h_t, w_t, mask, weights, needs_dh, needs_dw, *options):
    needed = ((h_s, needs_dh), (w_s, needs_dw))
    grads = [torch.empty_like(x, dtype=working_dtype(h_s)) for x, needs in needed if needs]
    return [h_s.new_empty(h_s.shape[0], dtype=working_dtype(h_s)), *grads]


# An operator on PyTorch too: how many chunks there are would be a graph of its own for each.
@operator(_linear_shapes)
def linear_soft_targets(
    h_s: Tensor,
    w_s: Tensor,
    h_t: Tensor,
    w_t: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    needs_dh: bool,
    needs_dw: bool,
    triton: bool,
    divergence: str,
    temperature: float,
    scale: float,
) -> list[Tensor]:
    """Losses (R,) and the gradients of Σ weights·loss to h_s (R, Ds) and w_s (V, Ds), if needed.

    Without weights (R,) all are 1.
    """
    per_row = divergence, temperature, scale
    rows, dtype = h_s.shape[0], working_dtype(h_s)
    loss = h_s.new_empty(rows, dtype=dtype)
    dh = h_s.new_empty(h_s.shape, dtype=dtype) if needs_dh else None
    dw = sums_like(w_s) if needs_dw else None
    if weights is None and (needs_dh or needs_dw):
        weights = torch.ones_like(loss)
    if mask is not None:
        h_s, h_t = h_s.where(mask[:, None], 0), h_t.where(mask[:, None], 0)
        weights = None if weights is None else weights.masked_fill(~mask, 0)
    with autocast_off(h_s):
        for chunk in _linear_chunks(rows, w_s.shape[0], h_s):
            student, teacher = product(h_s[chunk], w_s), product(h_t[chunk], w_t)
            wider = torch.promote_types(student.dtype, teacher.dtype)
            kept, weight = (None if x is None else x[chunk] for x in (mask, weights))
            loss[chunk], grad = _weighted_rows(
                student.to(wider), teacher.to(wider), kept, weight, triton, per_row
            )
            if grad is None:
                continue
            grad, factor = ready(grad.to(dtype), h_s.dtype)
            if dh is not None:
                part = product_back(grad, w_s)
                dh[chunk] = part if factor is None else part * factor
            if dw is not None:
                add_product(dw, grad, h_s[chunk], factor)
    return [x for x in (loss, dh, dw) if x is not None]


def _weighted_rows(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    triton: bool,
    per_row: PerRow,
) -> tuple[Tensor, Tensor | None]:
    """Loss (R,) of every row and, with weights (R,), the gradient of Σ weights·loss (R, V).

    The gradient has the dtype of the logits, and may stand where the student's stood.
    """
    if not triton:
        loss, grad = _rows(student, teacher, mask, weights is not None, per_row)
        if grad is None or weights is None:
            return loss, None
        return loss, (grad * weights[:, None]).to(student.dtype)

    from fastkd.kernels.soft_targets import fill_gradient, soft_target_forward

    loss, stats = soft_target_forward(student, teacher, mask, *per_row)
    if weights is None:
        return loss, None
    fill_gradient(student, student, teacher, mask, stats, None, weights, *per_row)
    return loss, student


def _linear_chunks(rows: int, vocabulary: int, x: Tensor) -> list[slice]:
    """Ranges of positions whose logits stand in memory together."""
    step = max(LINEAR_CHUNK[x.device.type == "cuda"] // vocabulary, 1)
    if step > 128:
        step -= step % 128  # whole tiles of the products, and an aligned start in every vector
    return [slice(start, start + step) for start in range(0, rows, step)]


class SoftTargetLoss(nn.Module):
    """See `soft_target_loss`; holds its options.

    >>> loss = SoftTargetLoss(temperature=2.0, divergence="js")
    >>> loss(torch.zeros(2, 5), torch.zeros(2, 5)).item()
    0.0
    """

    def __init__(
        self,
        temperature: float = 1.0,
        divergence: Divergence = "forward_kl",
        reduction: Reduction = "batchmean",
        scale_by_t2: bool = True,
        backend: Backend = "auto",
    ):
        super().__init__()
        _check_options(temperature, divergence, reduction, None)
        self.temperature, self.divergence = temperature, divergence
        self.reduction, self.scale_by_t2 = reduction, scale_by_t2
        self.backend = backend

    def forward(
        self,
        student_logits: Tensor,
        teacher_logits: Tensor,
        mask: Tensor | None = None,
        denominator: float | Tensor | None = None,
    ) -> Tensor:
        """The loss; ``denominator`` as in `soft_target_loss`."""
        return soft_target_loss(
            student_logits,
            teacher_logits,
            temperature=self.temperature,
            divergence=self.divergence,
            mask=mask,
            reduction=self.reduction,
            scale_by_t2=self.scale_by_t2,
            denominator=denominator,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return (
            f"temperature={self.temperature}, divergence={self.divergence!r}, "
            f"reduction={self.reduction!r}, scale_by_t2={self.scale_by_t2}"
        )
