"""Distillation from logits: the divergence of the teacher's and the student's softened output."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fastkd._checks import (
    check_choice,
    check_floating,
    check_like,
    check_mask,
    check_no_grad,
    check_number,
    check_shape,
)
from fastkd._dispatch import use_triton
from fastkd._numerics import autocast_off, once_differentiable, upcast, working_dtype

DIVERGENCES = ("forward_kl", "reverse_kl", "adaptive_kl", "js")
REDUCTIONS = ("batchmean", "sum", "none")

# Teacher probability that the head of adaptive_kl may hold (Wu et al. 2024, μ).
HEAD_MASS = 0.5

# Logits worked on at a time on the CPU: few enough that the buffers of a chunk stay near the cache,
# enough that threads do not wait for each other after every small operation.
CHUNK = 1 << 21

# Logits that linear_soft_target_loss holds at a time, on the CPU and on a GPU: enough positions
# for matrix products that are not bound by reading the vocabulary's weights.
LINEAR_CHUNK = (1 << 22, 1 << 27)


def soft_target_loss_ref(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    temperature: float = 1.0,
    divergence: str = "forward_kl",
    mask: Tensor | None = None,
    reduction: str = "batchmean",
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
        in_head = ranked.cumsum(-1) <= HEAD_MASS
        in_head[..., 0] = True
        gap = gap.gather(-1, order)
        g_head, g_tail = gap.where(in_head, 0).sum(-1), gap.where(~in_head, 0).sum(-1)
        weight = torch.where(g_head + g_tail > 0, g_head / (g_head + g_tail), 0.5)
        forward_kl, reverse_kl = _kl_ref(p_t, log_pt, log_ps), _kl_ref(p_s, log_ps, log_pt)
        loss = weight * forward_kl + (1 - weight) * reverse_kl

    loss = loss.where(real[..., 0], 0) * (temperature**2 if scale_by_t2 else 1.0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (real.sum().clamp(min=1) if denominator is None else denominator)


def _kl_ref(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) = Σ p (log p − log q), where 0 · log 0 = 0."""
    # The difference is filled too: in a backward pass 0 · inf would still make NaN.
    nothing = p == 0
    return (p * (log_p - log_q).masked_fill(nothing, 0)).sum(-1)


def soft_target_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    temperature: float = 1.0,
    divergence: str = "forward_kl",
    mask: Tensor | None = None,
    reduction: str = "batchmean",
    scale_by_t2: bool = True,
    denominator: float | Tensor | None = None,
    backend: str = "auto",
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
        denominator: a number or 0-d tensor to divide by in place of this batch's own count
            (gradient accumulation); only with "batchmean".
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
    mask = check_mask(mask, student_logits.shape[:-1], student_logits.device)
    temperature = float(temperature)
    scale = temperature**2 if scale_by_t2 else 1.0
    vocabulary = student_logits.shape[-1]
    rows = (
        student_logits.reshape(-1, vocabulary),
        teacher_logits.reshape(-1, vocabulary),
        None if mask is None else mask.reshape(-1),
    )
    options = divergence, temperature, scale
    unsupported = "float64 runs on PyTorch" if student_logits.dtype == torch.float64 else None
    if use_triton(backend, "soft_target_loss", student_logits, unsupported):
        loss = _SoftTargetsTriton.apply(*rows, *options, reduction, denominator)
        return loss.reshape(student_logits.shape[:-1]) if reduction == "none" else loss
    loss = _SoftTargets.apply(*rows, *options)  # (R,)
    return _reduce(loss.reshape(student_logits.shape[:-1]), mask, reduction, denominator)


def _check_logits(student: Tensor, teacher: Tensor) -> None:
    check_floating("student_logits", student)
    check_floating("teacher_logits", teacher)
    check_like("teacher_logits", teacher, "student_logits", student)
    check_no_grad("teacher_logits", teacher)
    if student.shape[-1] != teacher.shape[-1]:
        raise ValueError(
            f"student_logits have a vocabulary of {student.shape[-1]} entries but teacher_logits "
            f"of {teacher.shape[-1]}; logits of different vocabularies can't be compared"
        )
    if student.shape != teacher.shape:
        raise ValueError(
            f"teacher_logits must have the shape of student_logits {tuple(student.shape)}, "
            f"got {tuple(teacher.shape)}"
        )
    if student.shape[-1] == 0:
        raise ValueError(f"student_logits have no entry to compare, got {tuple(student.shape)}")


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
    if not isinstance(denominator, Tensor):
        check_number("denominator", denominator, above=0)
    elif denominator.dim() != 0:
        raise ValueError(
            f"denominator must be a number or a 0-d tensor, got {tuple(denominator.shape)}"
        )
    else:
        check_no_grad("denominator", denominator)


def _reduce(
    loss: Tensor, mask: Tensor | None, reduction: str, denominator: float | Tensor | None
) -> Tensor:
    """Reduce the losses of all positions, zero where masked."""
    if reduction == "none":
        return loss
    return loss.sum() / _count(loss.numel(), mask, reduction, denominator)


def _count(
    items: int, mask: Tensor | None, reduction: str, denominator: float | Tensor | None
) -> float | Tensor:
    """What the sum over positions is divided by; at least 1 when it is counted here."""
    if reduction == "sum":
        return 1
    if denominator is not None:
        return denominator
    return max(items, 1) if mask is None else mask.sum().clamp(min=1)


class _SoftTargets(torch.autograd.Function):
    """Loss of every row and, in the same pass over the logits, its gradient."""

    @staticmethod
    def forward(ctx, student, teacher, mask, divergence, temperature, scale):
        # student, teacher (R, V); mask (R,)
        ctx.dtype = student.dtype
        loss, dstudent = _rows(
            student, teacher, mask, divergence, temperature, scale, ctx.needs_input_grad[0]
        )
        ctx.save_for_backward(dstudent, mask)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        dstudent, mask = ctx.saved_tensors
        if mask is not None:
            grad = grad.masked_fill(~mask, 0)
        return (dstudent * grad[:, None]).to(ctx.dtype), None, None, None, None, None


class _SoftTargetsTriton(torch.autograd.Function):
    """The same, reduced too, by two kernels and a third that reads the logits for the gradient."""

    @staticmethod
    def forward(
        ctx, student, teacher, mask, divergence, temperature, scale, reduction, denominator
    ):
        from fastkd.kernels import soft_targets as kernels

        compiling = torch.compiler.is_compiling()
        run = kernels.soft_target_forward_op if compiling else kernels.soft_target_forward
        reduce = kernels.soft_target_reduce_op if compiling else kernels.soft_target_reduce
        student, teacher = (z if z.stride(-1) == 1 else z.contiguous() for z in (student, teacher))
        ctx.options = divergence, temperature, scale
        loss, stats = run(student, teacher, mask, *ctx.options)
        if reduction == "none":
            ctx.save_for_backward(student, teacher, mask, stats, None)
            return loss
        chosen = _kernel_divisor(student, mask, reduction, denominator)
        total, divisor = reduce(loss, mask, *chosen)
        ctx.save_for_backward(student, teacher, mask, stats, divisor)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        from fastkd.kernels import soft_targets as kernels

        compiling = torch.compiler.is_compiling()
        run = kernels.soft_target_backward_op if compiling else kernels.soft_target_backward
        student, teacher, mask, stats, divisor = ctx.saved_tensors
        dstudent = run(student, teacher, mask, stats, divisor, grad, *ctx.options)
        return dstudent, None, None, None, None, None, None, None


def _kernel_divisor(
    student: Tensor, mask: Tensor | None, reduction: str, denominator: float | Tensor | None
) -> tuple[float | None, Tensor | None]:
    """`_count` for the kernel: a number or a tensor; neither stands for the mask's own count."""
    if isinstance(denominator, Tensor):
        kept = denominator.is_floating_point()
        return None, denominator.to(student.device, None if kept else torch.int64)
    if reduction == "sum" or denominator is not None:
        return float(denominator or 1), None
    return (None if mask is not None else float(max(student.shape[0], 1))), None


def _rows(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    divergence: str,
    temperature: float,
    scale: float,
    wants_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """Loss (R,) of every row, 0 where masked, and its gradient (R, V) with respect to student.

    The gradient stays in the working dtype: half types would lose small probabilities before a
    loss scale reaches them. In a masked row it is finite, but not zero.
    """
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
    step = max(CHUNK // vocabulary, 1)
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        step = max(rows, 1)
    return [slice(start, start + step) for start in range(0, rows, step)]


def _log_softmax(logits: Tensor, mask: Tensor | None, chunk: slice, temperature: float) -> Tensor:
    z = upcast(logits)
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
    value = torch.lerp(reverse_value, forward_value, head)
    if forward_grad is None or reverse_grad is None:
        return value, None
    return value, torch.lerp(reverse_grad, forward_grad, head[:, None])


_ROW_DIVERGENCES = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "js": _js,
    "adaptive_kl": _adaptive_kl,
}


def _weighted_sum(p: Tensor, x: Tensor) -> Tensor:
    """Σ p·x over the vocabulary, where a probability of 0 counts nothing even against ∞."""
    return (p * x).masked_fill_(p == 0, 0).sum(-1)


def _expectation_grad(p: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    return (x - mean[:, None]).mul_(p).masked_fill_(p == 0, 0)


def _head_share(p_s: Tensor, p_t: Tensor) -> Tensor:
    """g_head / (g_head + g_tail) of every row; ½ where the distributions are the same."""
    gap = (p_t - p_s).abs_()
    total = gap.sum(-1)
    ranked, order = p_t.sort(dim=-1, descending=True, stable=True)
    in_head = ranked.cumsum(-1) <= HEAD_MASS
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
    divergence: str = "forward_kl",
    mask: Tensor | None = None,
    reduction: str = "batchmean",
    scale_by_t2: bool = True,
    denominator: float | Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """`soft_target_loss` from hidden states and vocabulary heads, without all the logits.

    Equals soft_target_loss(H_s W_sᵀ, H_t W_tᵀ, ...), computed for a few positions at a time, so
    that (positions, V) logits never stand in memory. The logits have the dtype of the inputs, as
    those of the models' own heads do.

    Args:
        student_hidden: (..., Ds).
        student_weight: (V, Ds), the weight of the student's vocabulary head.
        teacher_hidden: (..., Dt), the same leading dimensions; must not require grad.
        teacher_weight: (V, Dt), the same vocabulary; must not require grad.
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
    unsupported = "float64 runs on PyTorch" if student_hidden.dtype == torch.float64 else None
    loss = _LinearSoftTargets.apply(
        student_hidden.reshape(-1, student_hidden.shape[-1]),
        student_weight,
        teacher_hidden.reshape(-1, teacher_hidden.shape[-1]),
        teacher_weight,
        None if mask is None else mask.reshape(-1),
        divergence,
        float(temperature),
        float(temperature**2) if scale_by_t2 else 1.0,
        reduction == "none",
        use_triton(backend, "linear_soft_target_loss", student_hidden, unsupported),
    )  # (R,) or, summed, ()
    if reduction == "none":
        return loss.reshape(leading)
    return loss / _count(leading.numel(), mask, reduction, denominator)


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
        check_like(name, x, "student_hidden", student_hidden)
    check_no_grad("teacher_hidden", teacher_hidden)
    check_no_grad("teacher_weight", teacher_weight)
    if student_weight.shape[0] != teacher_weight.shape[0]:
        raise ValueError(
            f"student_weight has a vocabulary of {student_weight.shape[0]} entries but "
            f"teacher_weight of {teacher_weight.shape[0]}; logits of different vocabularies "
            "can't be compared"
        )
    if student_weight.shape[0] == 0:
        raise ValueError(
            f"student_weight has no entry to compare, got {tuple(student_weight.shape)}"
        )
    leading = student_hidden.shape[:-1]
    shape = (*leading, teacher_weight.shape[1])
    check_shape("teacher_hidden", teacher_hidden, shape, "student_hidden's positions, Dt")
    shape = (student_weight.shape[0], student_hidden.shape[-1])
    check_shape("student_weight", student_weight, shape, "the vocabulary, Ds")


class _LinearSoftTargets(torch.autograd.Function):
    """Loss and gradients of a chunk of positions at a time, then their logits are forgotten.

    A sum needs no upstream gradient to know how its rows weigh, so its gradients are made along
    with the loss. The losses of single rows are weighed by the upstream gradient, so there the
    backward pass computes the logits once more.
    """

    @staticmethod
    def forward(ctx, h_s, w_s, h_t, w_t, mask, divergence, temperature, scale, rowwise, triton):
        ctx.options = divergence, temperature, scale, triton
        ctx.rowwise = rowwise
        ctx.dtype = h_s.dtype
        needs = ctx.needs_input_grad[:2]
        if rowwise:
            loss, _, _ = _linear_pass(h_s, w_s, h_t, w_t, mask, None, (False, False), ctx.options)
            ctx.save_for_backward(h_s, w_s, h_t, w_t, mask)
            return loss
        weights = None
        if any(needs):
            weights = torch.ones(h_s.shape[0], dtype=working_dtype(h_s), device=h_s.device)
        loss, dh, dw = _linear_pass(h_s, w_s, h_t, w_t, mask, weights, needs, ctx.options)
        ctx.save_for_backward(dh, dw)
        return loss.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if ctx.rowwise:
            h_s, w_s, h_t, w_t, mask = ctx.saved_tensors
            needs = ctx.needs_input_grad[:2]
            _, *grads = _linear_pass(h_s, w_s, h_t, w_t, mask, grad, needs, ctx.options)
        else:
            grads = [None if saved is None else saved * grad for saved in ctx.saved_tensors]
        dh, dw = (None if x is None else x.to(ctx.dtype) for x in grads)
        return dh, dw, *(None,) * 8


def _linear_pass(
    h_s: Tensor,
    w_s: Tensor,
    h_t: Tensor,
    w_t: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    needs: tuple[bool, bool],
    options: tuple[str, float, float, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Losses (R,) and the gradients of Σ weights·loss to h_s (R, Ds) and w_s (V, Ds)."""
    dtype = working_dtype(h_s)
    loss = h_s.new_empty(h_s.shape[0], dtype=dtype)
    dh = h_s.new_empty(h_s.shape, dtype=dtype) if needs[0] else None
    dw = torch.zeros_like(w_s, dtype=dtype) if needs[1] else None
    if mask is not None:
        h_s, h_t = h_s.where(mask[:, None], 0), h_t.where(mask[:, None], 0)
        weights = None if weights is None else weights.masked_fill(~mask, 0)
    with autocast_off(h_s):
        for chunk in _linear_chunks(h_s.shape[0], w_s.shape[0], h_s):
            student, teacher = h_s[chunk] @ w_s.T, h_t[chunk] @ w_t.T
            kept, weight = (None if x is None else x[chunk] for x in (mask, weights))
            loss[chunk], grad = _weighted_rows(student, teacher, kept, weight, *options)
            if grad is None:
                continue
            if dh is not None:
                dh[chunk] = grad @ w_s
            if dw is not None and dw.dtype == grad.dtype:
                dw.addmm_(grad.T, h_s[chunk])
            elif dw is not None:
                dw += grad.T @ h_s[chunk]
    return loss, dh, dw


def _weighted_rows(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    divergence: str,
    temperature: float,
    scale: float,
    triton: bool,
) -> tuple[Tensor, Tensor | None]:
    """Loss (R,) of every row and, with weights (R,), the gradient of Σ weights·loss (R, V).

    The gradient has the dtype of the logits, and may stand where the student's stood.
    """
    options = divergence, temperature, scale
    if not triton:
        loss, grad = _rows(student, teacher, mask, *options, weights is not None)
        if grad is None or weights is None:
            return loss, None
        return loss, (grad * weights[:, None]).to(student.dtype)

    from fastkd.kernels import soft_targets as kernels

    compiling = torch.compiler.is_compiling()
    if weights is None:
        forward = kernels.soft_target_forward_op if compiling else kernels.soft_target_forward
        return forward(student, teacher, mask, *options)[0], None
    replace = kernels.soft_target_replace_op if compiling else kernels.soft_target_replace
    return replace(student, teacher, mask, weights, *options), student


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
        divergence: str = "forward_kl",
        reduction: str = "batchmean",
        scale_by_t2: bool = True,
        backend: str = "auto",
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
