"""Distance of a student's hidden states from its teacher's, position by position."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastkd._core.checks import (
    check_choice,
    check_mask,
    check_number,
    check_pair,
    check_positive_int,
    check_shape,
    checked_weights,
)
from fastkd._core.dispatch import BACKENDS, Backend, backend_of
from fastkd._core.numerics import (
    GradientInForward,
    apply,
    as_rows,
    autocast_off,
    dense_rows,
    direction_ref,
    largest_entries,
    once_differentiable,
    project,
    reduced,
    rescale_extreme_rows,
    saveable,
    upcast,
)
from fastkd._core.plans import planned

Kind = Literal["mse", "cosine", "smooth_l1"]
KINDS = get_args(Kind)
Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = get_args(Reduction)


def hidden_state_loss_ref(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None = None,
    *,
    kind: Kind = "mse",
    beta: float = 1.0,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """`hidden_state_loss` in plain PyTorch."""
    h_s, h_t = upcast(student), upcast(teacher)  # (..., D)
    real = h_s.new_ones(h_s.shape[:-1], dtype=torch.bool) if mask is None else mask.bool()
    h_s, h_t = (torch.where(real[..., None], h, 0) for h in (h_s, h_t))
    if kind == "cosine":
        losses = 1 - (direction_ref(h_s) * direction_ref(h_t)).sum(-1)
    elif kind == "mse":
        losses = (F.mse_loss(h_s, h_t, reduction="none") / h_s.shape[-1]).sum(-1)
    else:
        losses = F.smooth_l1_loss(h_s, h_t, reduction="none", beta=beta).mean(-1)
    losses = losses.masked_fill(~real, 0)
    return reduced(losses, real, reduction, weights)


@planned
def hidden_state_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None = None,
    *,
    kind: Kind = "mse",
    beta: float = 1.0,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    backend: Backend = "auto",
) -> Tensor:
    """Distance of hidden states at each position, averaged over the positions that count.

    With d = h_s − h_t, the loss of a position is the mean over the features of d² (``"mse"``), or
    of d²/2β where |d| < β and |d| − β/2 elsewhere (``"smooth_l1"``), or 1 − cos(h_s, h_t)
    (``"cosine"``, where the cosine of a zero vector is 0 and its gradient zero). It is NaN where a
    state that counts holds NaN or inf.

    Args:
        student: (..., D) hidden states, floating.
        teacher: (..., D), the same shape, dtype and device, without grad.
        mask: (...) bool or 0/1, 1 = real token. Other positions don't count, whatever they hold.
        kind: "mse", "cosine" or "smooth_l1".
        beta: β of "smooth_l1", at least 0; 0 is the mean absolute difference.
        weights: (...) floating, factors of the positions' losses, of any sign and without
            gradient. A weight of 0 is no mask: the position still counts in the mean, and 0 times
            an infinite loss is NaN.
        reduction: "mean" over the positions that count, "sum", or "none" for (...).
        backend: "auto", "torch", "triton" or "cpp".

    Returns:
        Scalar, or (...), in float32 (float64 for float64).

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device or option, or a teacher that requires
            grad.

    >>> student, teacher = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])
    >>> [hidden_state_loss(student, teacher, kind=kind).item() for kind in KINDS]
    [2.5, 1.0, 1.0]
    """
    check_pair(student, teacher)
    check_shape("teacher", teacher, student.shape, "the shape of student")
    if student.shape[-1] == 0:
        raise ValueError(f"student must have at least one feature, got {tuple(student.shape)}")
    check_choice("kind", kind, KINDS)
    check_number("beta", beta, at_least=0)
    check_choice("reduction", reduction, REDUCTIONS)
    leading = student.shape[:-1]
    real = check_mask(mask, leading, student.device)
    weights = checked_weights(weights, leading, student, real)
    runs_on = backend_of(backend, "hidden_state_loss", student)
    real, weights = (None if x is None else x.flatten() for x in (real, weights))
    rows = as_rows(saveable(student)), as_rows(saveable(teacher))
    options = _Options(kind, float(beta), reduction)
    if runs_on == "torch":
        losses = apply(_TorchHiddenStates, options, real, *rows)
        losses = reduced(losses, real, reduction, weights)
    else:
        function = _CppHiddenStates if runs_on == "cpp" else _TritonHiddenStates
        losses = apply(function, options, real, weights, *rows)
    return losses.reshape(leading) if reduction == "none" else losses


class HiddenStateLoss(nn.Module):
    """See `hidden_state_loss`. Adds a linear projection of the student where the widths differ.

    Args:
        kind: "mse", "cosine" or "smooth_l1".
        student_dim, teacher_dim: hidden sizes; where both are given and differ, ``projector`` maps
            the student's states to the teacher's size.
        beta, reduction, backend: as in `hidden_state_loss`.

    ``forward(student, teacher, mask=None, weights=None)`` takes student (..., Ds) and teacher
    (..., Dt), with mask and weights of their leading dimensions.

    >>> loss = HiddenStateLoss("cosine", student_dim=4, teacher_dim=6)
    >>> loss(torch.randn(3, 5, 4), torch.randn(3, 5, 6), torch.ones(3, 5)).shape
    torch.Size([])
    """

    def __init__(
        self,
        kind: Kind = "mse",
        student_dim: int | None = None,
        teacher_dim: int | None = None,
        *,
        beta: float = 1.0,
        reduction: Reduction = "mean",
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        check_choice("kind", kind, KINDS)
        check_number("beta", beta, at_least=0)
        check_choice("reduction", reduction, REDUCTIONS)
        check_choice("backend", backend, BACKENDS)
        if (student_dim is None) != (teacher_dim is None):
            raise ValueError(
                f"student_dim is {student_dim} and teacher_dim {teacher_dim}; pass both or neither"
            )
        self.kind, self.beta = kind, beta
        self.reduction, self.backend = reduction, backend
        self.projector: nn.Linear | None = None
        if student_dim is not None and teacher_dim is not None:
            check_positive_int("student_dim", student_dim)
            check_positive_int("teacher_dim", teacher_dim)
            if student_dim != teacher_dim:
                self.projector = nn.Linear(student_dim, teacher_dim)

    def forward(
        self,
        student: Tensor,
        teacher: Tensor,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """The loss as a scalar, or (...)."""
        if self.projector is not None:
            check_pair(student, teacher)
            if student.shape[-1] != self.projector.in_features:
                raise ValueError(
                    f"student must have student_dim={self.projector.in_features} features, "
                    f"got {student.shape[-1]}"
                )
            real = check_mask(mask, student.shape[:-1], student.device)
            student = project(self.projector, student, real)
            teacher = teacher.to(student.dtype)
        return hidden_state_loss(
            student,
            teacher,
            mask,
            kind=self.kind,
            beta=self.beta,
            weights=weights,
            reduction=self.reduction,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, reduction={self.reduction!r}"


@dataclass(frozen=True)
class _Options:
    kind: str
    beta: float
    reduction: str  # applied by the kernels, which compute the gradient with the loss


class _TorchHiddenStates(torch.autograd.Function):
    """Losses (R,) of rows (R, D); the difference is computed again in the backward pass."""

    @staticmethod
    def forward(ctx, options, mask, student, teacher):
        with autocast_off(student):
            if options.kind == "cosine":
                losses, _, _, _ = _angles(student, teacher)
            else:
                d = _difference(student, teacher)
                peak = largest_entries(d).squeeze(-1)
                distances = _distance_of(d, options)
                # Divide before adding: the sum may overflow where the mean doesn't.
                losses = distances.div_(student.shape[-1]).sum(-1)
                # NaN where the difference is infinite. Not in place: see `cast`.
                losses = losses + (peak - peak)
            if mask is not None:
                losses = losses.masked_fill(~mask, 0)
        ctx.save_for_backward(mask, student, teacher)
        ctx.options = options
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        mask, student, teacher = ctx.saved_tensors
        with autocast_off(student):
            if ctx.options.kind == "cosine":
                losses, a, difference, scale = _angles(student, teacher)
                dx = difference.addcmul_(a, -losses[:, None])
                factor = grad * scale
            else:
                d = _difference(student, teacher)
                dx = _slope_of(d, ctx.options)
                factor = grad / d.shape[-1]
            dx = dx.mul_(factor[:, None])
            if mask is not None:
                dx = dx.masked_fill_(~mask[:, None], 0)
        return None, None, dx.to(student.dtype), None


def _difference(student: Tensor, teacher: Tensor) -> Tensor:
    return upcast(student) - upcast(teacher)


def _distance_of(d: Tensor, options: _Options) -> Tensor:
    """The distance of each feature, in memory that may be that of ``d``."""
    if options.kind == "mse":
        return d.square_()
    beta, size = options.beta, d.abs()
    return torch.where(size < beta, d * (d / beta) / 2, size - beta / 2) if beta else size


def _slope_of(d: Tensor, options: _Options) -> Tensor:
    """Derivative of `_distance_of`, in new memory; NaN where d is."""
    if options.kind == "mse":
        return 2 * d
    if options.beta:
        return (d / options.beta).clamp_(-1, 1).add_(d - d)
    return torch.where(d == 0, 0, torch.copysign(torch.ones_like(d), d)).add_(d - d)


def _angles(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses ½‖â − b̂‖² (R,), directions â and differences â − b̂ (R, D), and 1/‖a‖ (R,).

    The squared difference does not cancel where rows are nearly parallel, as 1 − â·b̂ would. With a
    zero row the loss is 1, and 1/‖a‖ is returned as 0: there is no gradient.
    """
    a, of_a = _direction(student)
    b, of_b = _direction(teacher)
    difference = a - b
    zero = (of_a == 0) | (of_b == 0)
    losses = (torch.linalg.vector_norm(difference, dim=-1).square() / 2).masked_fill(zero, 1)
    return losses, a, difference, of_a.masked_fill(zero, 0)


def _direction(x: Tensor) -> tuple[Tensor, Tensor]:
    """x / ‖x‖ (R, D) and 1 / ‖x‖ (R,); both 0 for a zero row, NaN for an infinite one."""
    x, factor = rescale_extreme_rows(upcast(x), or_tiny=True)
    norm = torch.linalg.vector_norm(x, dim=-1)
    scale = torch.where(norm == 0, 0, 1 / norm + (norm - norm))
    return x * scale[:, None], scale if factor is None else scale * factor.squeeze(-1)


class _CppHiddenStates(GradientInForward):
    """The reduced loss and its gradient, in one pass over the rows."""

    @staticmethod
    def forward(ctx, options, mask, weights, student, teacher):
        loss, *gradient = torch.ops.fastkd_cpp.hidden_states(
            *dense_rows(student, teacher),
            mask,
            weights,
            options.kind,
            options.beta,
            options.reduction,
            ctx.needs_input_grad[3],
        )
        ctx.save_for_backward(*gradient)
        ctx.dtypes = [student.dtype] * len(gradient)
        return loss


class _TritonHiddenStates(torch.autograd.Function):
    """The reduced loss and its gradient, in one kernel; see `kernels.upstream`."""

    @staticmethod
    def forward(ctx, options, mask, weights, student, teacher):
        from fastkd.kernels.hidden_states import hidden_states

        student, teacher = dense_rows(student, teacher)
        mask, weights = (None if x is None else x.contiguous() for x in (mask, weights))
        ctx.in_forward = options.reduction != "none" and student.dtype != torch.float16
        ctx.options, computed = options, ctx.needs_input_grad[3] and ctx.in_forward
        given = student, teacher, mask, weights
        kind, beta, reduction = options.kind, options.beta, options.reduction
        loss, *gradient = hidden_states(*given, None, kind, beta, reduction, computed)
        ctx.save_for_backward(*(gradient if ctx.in_forward else given))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        from fastkd.kernels.hidden_states import hidden_states
        from fastkd.kernels.upstream import scaled

        if ctx.in_forward:
            gradient = scaled(ctx.saved_tensors, grad)
        else:
            kind, beta, reduction = ctx.options.kind, ctx.options.beta, ctx.options.reduction
            student, teacher, mask, weights = ctx.saved_tensors
            given = student, teacher, mask, weights, grad
            _, *gradient = hidden_states(*given, kind, beta, reduction, True)
        return None, None, None, *gradient, None
