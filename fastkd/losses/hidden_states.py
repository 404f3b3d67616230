"""Distance of a student's hidden states from its teacher's, position by position."""

import functools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fastkd._core import check
from fastkd._core.dispatch import Backend, backend_of
from fastkd._core.fallback import by_reference
from fastkd._core.module import LossModule
from fastkd._core.numerics import (
    LossInCpp,
    Projector,
    apply,
    as_rows,
    dense_rows,
    direction_ref,
    reduced,
    saveable,
    upcast,
    zero_padding,
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
    real = None if mask is None else mask.bool()
    losses = _losses(kind, beta, upcast(student), upcast(teacher), real)
    return reduced(losses, real, reduction, weights)


def _losses(kind: str, beta: float, h_s: Tensor, h_t: Tensor, real: Tensor | None) -> Tensor:
    """Losses (...) of states (..., D), 0 outside ``real``."""
    h_s, h_t = zero_padding(h_s, real), zero_padding(h_t, real)
    if kind == "cosine":  # 1 - cos without its cancellation, and 1 with a zero row
        a, b = direction_ref(h_s), direction_ref(h_t)
        zero = (h_s == 0).all(-1) | (h_t == 0).all(-1)
        losses = ((a - b).square().sum(-1) / 2).masked_fill(zero, 1)
    elif kind == "mse":
        losses = (F.mse_loss(h_s, h_t, reduction="none") / h_s.shape[-1]).sum(-1)
    else:
        losses = F.smooth_l1_loss(h_s, h_t, reduction="none", beta=beta).mean(-1)
    d = (h_s - h_t).detach()
    losses = losses + (d - d).sum(-1)  # NaN where the difference is infinite
    return losses if real is None else losses.masked_fill(~real, 0)


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
    check.pair(student, teacher)
    check.shape("teacher", teacher, student.shape, "the shape of student")
    if student.shape[-1] == 0:
        raise ValueError(f"student must have at least one feature, got {tuple(student.shape)}")
    check.choice("kind", kind, KINDS)
    check.number("beta", beta, at_least=0)
    check.choice("reduction", reduction, REDUCTIONS)
    leading = student.shape[:-1]
    real = check.mask(mask, leading, student.device)
    weights = check.weights(weights, leading, student, real)
    runs_on = backend_of(backend, "hidden_state_loss", student)
    options = _Options(kind, beta * 1.0, reduction)
    student, teacher = saveable(student), saveable(teacher)
    if runs_on == "triton":
        from fastkd.kernels.upstream import LossByKernel

        losses = apply(LossByKernel, options, student, teacher, real, weights)
        return losses.reshape(leading) if reduction == "none" else losses
    real, weights = (None if x is None else x.flatten() for x in (real, weights))
    rows = as_rows(student), as_rows(teacher)
    if runs_on == "torch":
        choices = functools.partial(_losses, kind, options.beta)
        losses = by_reference(choices, 2 * student.shape[-1], *rows, real)
        losses = reduced(losses, real, reduction, weights)
    else:
        losses = apply(LossInCpp, options, *rows, real, weights)
    return losses.reshape(leading) if reduction == "none" else losses


@dataclass(eq=False, repr=False)
class HiddenStateLoss(LossModule):
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

    kind: Kind = "mse"
    student_dim: int | None = None
    teacher_dim: int | None = None
    _: KW_ONLY
    beta: float = 1.0
    reduction: Reduction = "mean"
    backend: Backend = "auto"

    fixed = "student_dim", "teacher_dim"

    def check_options(self) -> None:
        super().check_options()
        check.number("beta", self.beta, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.projector = None
        dims = self.student_dim, self.teacher_dim
        check.sizes_to_project(*dims)
        if dims[0] is not None and dims[1] is not None:
            self.projector = Projector(dims[0], dims[1]) if dims[0] != dims[1] else None
        elif dims != (None, None):
            raise ValueError(
                f"student_dim is {dims[0]} and teacher_dim {dims[1]}; pass both or neither"
            )

    def forward(
        self,
        student: Tensor,
        teacher: Tensor,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        if self.projector is not None:
            check.pair(student, teacher)
            if student.shape[-1] != self.projector.in_features:
                raise ValueError(
                    f"student must have student_dim={self.projector.in_features} features, "
                    f"got {student.shape[-1]}"
                )
            real = check.mask(mask, student.shape[:-1], student.device)
            student = self.projector(student, real)
            teacher = teacher.to(student.dtype)
        options = self.options("kind", "beta", "reduction", "backend")
        return hidden_state_loss(student, teacher, mask, weights=weights, **options)


@dataclass(frozen=True)
class _Options:
    kind: str
    beta: float
    reduction: str  # applied by the kernels, which compute the gradient with the loss
    stacked = False

    def cpp(self, tensors: Sequence[Any], needs: Sequence[bool]) -> list[Tensor]:
        """See `LossInCpp`."""
        rows, options = dense_rows(*tensors[:2]), (self.kind, self.beta, self.reduction, needs[0])
        return torch.ops.fastkd_cpp.hidden_states(*rows, *tensors[2:], *options)

    def triton(
        self, tensors: Sequence[Any], upstream: Tensor | None, needs: Sequence[bool]
    ) -> list[Tensor]:
        """See `LossByKernel`."""
        from fastkd.kernels.hidden_states import hidden_states

        student, teacher = dense_rows(*tensors[:2])
        mask, weights = (None if x is None else x.flatten().contiguous() for x in tensors[2:])
        options = self.kind, self.beta, self.reduction
        return hidden_states(student, teacher, mask, weights, upstream, *options, needs[0])
