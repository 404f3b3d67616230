"""Dual orthogonal projection of LRKD (Learnable Relational Knowledge Distillation), eqs. 3-10."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastkd._core import check
from fastkd._core.dispatch import Backend, backend_of
from fastkd._core.fallback import by_reference
from fastkd._core.module import LossModule
from fastkd._core.numerics import (
    LossInCpp,
    apply,
    as_rows,
    dense_rows,
    product,
    saveable,
    upcast,
    working_dtype,
    zero_padding,
)
from fastkd._core.plans import planned
from fastkd._core.pooling import pool_tokens
from fastkd.linalg.cayley import (
    Cayley,
    RowsTimesCayley,
    first_columns,
    inverse_by_products,
    skew_part,
    stacked,
)

Reduction = Literal["mean", "batchmean", "sum"]
REDUCTIONS = get_args(Reduction)

# Attributes of a torch Module that hold its hooks.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def cayley_ref(skew: Tensor) -> Tensor:
    """W = (I + Q)(I − Q)⁻¹ as written in section 3.2 of the paper; see `cayley`."""
    q = upcast(skew)  # (*, n, n)
    identity = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return ((identity + q) @ torch.linalg.inv(identity - q)).to(skew.dtype)


def cayley(skew: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Orthogonal matrix W from a skew-symmetric matrix Q, by the Cayley map.

    W = (I + Q)(I − Q)⁻¹  (LRKD, section 3.2)

    The caller must pass a skew-symmetric Q (Qᵀ = −Q): then I − Q is always invertible and WᵀW = I.
    For other Q the formula and its gradient hold, but W is not orthogonal and the Triton kernels
    may give NaN. They may also give NaN for a Frobenius norm of Q above about 1e5.

    Args:
        skew: Q (*, n, n), any floating dtype; half precision is computed in float32.
        backend: "auto", "torch" (by factorisation) or "triton" (by products alone).

    Returns:
        W (*, n, n) in the dtype of ``skew``.

    Raises:
        TypeError: ``skew`` is not a floating tensor.
        ValueError: the last two dimensions of ``skew`` differ.

    >>> raw = torch.randn(3, 3)
    >>> w = cayley(raw - raw.mT)
    >>> torch.allclose(w.mT @ w, torch.eye(3), atol=1e-5)
    True
    """
    check.floating("skew", skew, min_ndim=2)
    if skew.shape[-1] != skew.shape[-2]:
        raise ValueError(f"skew must be square in its last two dimensions, got {tuple(skew.shape)}")
    inverse = None
    if backend_of(backend, "cayley", skew) == "triton" and skew.numel() > 0:
        with torch.no_grad():
            inverse = inverse_by_products(upcast(skew), [])
    return Cayley.apply(skew, inverse)


@dataclass(eq=False, repr=False)
class OrthogonalProjection(LossModule):
    """Trainable orthogonal projection x ↦ x W₁ W₂ … W_m (LRKD, eq. 6).

    Every W is the Cayley matrix of the skew-symmetric part (A − Aᵀ)/2 of a trained square matrix
    A, so W stays orthogonal whatever the optimizer does. At unequal sizes the product of square
    matrices of size max(in_dim, out_dim) is cut to (in_dim, out_dim), which leaves orthonormal rows
    or columns. The initial projection is the identity, or its slice.

    ``.half()``, ``.bfloat16()`` and ``.to(dtype)`` to half precision leave the trained matrices in
    float32, since rounding would lose small steps. W is computed in float32, and the result has the
    dtype of x.

    On a GPU the inverses S = (I − Q)⁻¹ in W are refined from those of the last call by a few
    products, which is much cheaper than a factorisation and exact to rounding error, however far
    the matrices have changed. The module stores the last S, as large as its matrices, but not as a
    buffer: it is neither saved in checkpoints nor sent to other processes. Without it, for example
    after loading, a call starts from I, so results may differ by rounding error from an
    uninterrupted run; calls with unchanged matrices return the same bits. Matrices whose skew part
    has a Frobenius norm above about 1e5 may give NaN; "torch" always factorises.

    Args:
        in_dim, out_dim: columns of the input and of the result.
        layers: number m of matrices.
        orthogonal: False trains plain matrices instead of Cayley matrices, the paper's ablation.
        backend: "auto", "torch" or "triton", for the orthogonal W.

    Shape: x (..., in_dim) -> (..., out_dim) in the dtype of x.

    >>> projection = OrthogonalProjection(4, 6)
    >>> projection(torch.ones(2, 4)).shape
    torch.Size([2, 6])
    >>> projection.weight.shape
    torch.Size([4, 6])
    """

    in_dim: int
    out_dim: int
    layers: int = 2
    orthogonal: bool = True
    backend: Backend = "auto"

    fixed = "in_dim", "out_dim", "layers", "orthogonal"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("in_dim", "out_dim", "layers"):
            check.positive_int(name, getattr(self, name))
        n = max(self.in_dim, self.out_dim)
        # At least float32, also if half precision is the default dtype.
        empty = functools.partial(
            torch.empty, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32)
        )
        if self.orthogonal:
            self.raw = nn.Parameter(empty(self.layers, n, n))
        else:
            sizes = [(self.in_dim, self.out_dim)] + [(self.out_dim, self.out_dim)] * (
                self.layers - 1
            )
            self.matrices = nn.ParameterList(nn.Parameter(empty(*size)) for size in sizes)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the projection to the identity, or its slice; call it after ``to_empty``."""
        self._last_inverse: Tensor | None = None
        if self.orthogonal:
            self.raw.zero_()
        else:
            for matrix in self.matrices:
                matrix.zero_().fill_diagonal_(1)
        self._allocate_state()

    def _apply(self, fn, recurse=True):
        def convert(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            if converted.dtype in (torch.float16, torch.bfloat16):
                return tensor.to(converted.device, torch.float32)
            return converted

        super()._apply(convert, recurse)
        if self._last_inverse is not None:
            self._last_inverse = convert(self._last_inverse)
        self._allocate_state()
        return self

    def _allocate_state(self) -> None:
        """Allocate the last inverse before the first call if it is used, for compiled graphs."""
        if self.orthogonal and self.backend != "torch" and self.raw.device.type == "cuda":
            self._last(self.raw)

    def _last(self, raw: Tensor) -> Tensor:
        """The last (I − Q)⁻¹ (layers, n, n), for matrices like ``raw``; I before the first call."""
        last = self._last_inverse
        if last is None or last.device != raw.device or last.dtype != raw.dtype:
            with torch.inference_mode(False):
                last = torch.eye(raw.shape[-1], dtype=raw.dtype, device=raw.device)
                last = last.repeat(self.layers, 1, 1)
            self._last_inverse = last
        return last

    @property
    def weight(self) -> Tensor:
        """W (in_dim, out_dim), differentiable, in float32 (float64 after ``.double()``)."""
        if self.orthogonal:
            inverse = _refined_inverse([self], [self.raw])
            factors = Cayley.apply(skew_part(self.raw), inverse)
        else:
            factors = list(self.matrices)
        weight = factors[0]
        for factor in factors[1:]:
            weight = product(weight, factor)
        return weight[: self.in_dim, : self.out_dim]

    def forward(self, x: Tensor) -> Tensor:
        check.floating("x", x)
        if x.shape[-1] != self.in_dim:
            raise ValueError(f"x must have {self.in_dim} columns (in_dim), got {tuple(x.shape)}")
        rows = as_rows(saveable(x))
        if self.orthogonal and _is_few(rows, self.raw):
            (projected,) = _project_rows([rows], [self])
        else:
            # Not in half precision, whose rounding error is too large: most of a Cayley matrix's
            # gradient is symmetric, and only the skew-symmetric rest reaches the trained matrix.
            weight = self.weight
            dtype = torch.promote_types(x.dtype, weight.dtype)
            projected = product(rows.to(dtype), weight.to(dtype))
        projected = projected.to(x.dtype)
        return projected if x.dim() == 2 else projected.reshape(*x.shape[:-1], self.out_dim)


def _is_few(rows: Tensor, raw: Tensor) -> bool:
    """Whether solving for the rows is cheaper than forming W: up to about n rows.

    Forming W takes an inverse and two products for each layer (about 6n³ operations). Solving takes
    a factorisation (⅔n³) and 4n² operations for each row.
    """
    return rows.shape[0] <= raw.shape[-1]


def _project_rows(rows: list[Tensor], projections: list[OrthogonalProjection]) -> list[Tensor]:
    """x W of several projections in one batch: [(R, in_dim)] -> [(R, out_dim)], at least float32.

    All projections have the same number of layers and the same max(in_dim, out_dim).
    """
    dtype = torch.promote_types(working_dtype(rows[0]), projections[0].raw.dtype)
    raw = [projection.raw.to(dtype) for projection in projections]
    rows = [x.to(dtype) for x in rows]
    inverse = _refined_inverse(projections, raw)
    projected = apply(RowsTimesCayley, len(rows), inverse, *rows, *raw)
    whole = [projected] if len(rows) == 1 else projected
    return [first_columns(x, p.out_dim) for x, p in zip(whole, projections, strict=True)]


def _refined_inverse(
    projections: Sequence[OrthogonalProjection], raw: Sequence[Tensor]
) -> Tensor | None:
    """The projections' (I − Q)⁻¹, `stacked`, refined from the last ones, which it overwrites.

    None on the CPU, where a factorisation is faster, and in float64.
    """
    if backend_of(projections[0].backend, "OrthogonalProjection", raw[0]) != "triton":
        return None
    with torch.no_grad():
        last = [p._last(matrices) for p, matrices in zip(projections, raw, strict=True)]
        inverse = inverse_by_products(skew_part(stacked(raw, raw[0].shape[-1])), last)
        # Into the same memory, which a replayed CUDA graph reads and writes.
        for state, new in zip(last, [inverse] if len(last) == 1 else inverse, strict=True):
            state.copy_(new)
    return inverse


def layer_norm_mse_ref(
    x: Tensor,
    y: Tensor,
    eps: float = 1e-5,
    reduction: Reduction = "mean",
    *,
    weights: Tensor | None = None,
) -> Tensor:
    """Eqs. 7 and 9 as written: ½‖norm(x) − norm(y)‖²; see `layer_norm_mse`."""
    norm_x, norm_y = (F.layer_norm(upcast(z), z.shape[-1:], eps=eps) for z in (x, y))
    losses = (norm_x - norm_y).square().sum(-1) / 2
    losses = losses if weights is None else losses * weights
    return losses.sum() / _divisor(x, reduction)


def _row_losses(eps: float, x: Tensor, y: Tensor) -> Tensor:
    """½‖norm(x) − norm(y)‖² of each row, also of rows of equal numbers without ``eps``."""
    return (_normalised(x, eps) - _normalised(y, eps)).square().sum(-1) / 2


def _normalised(x: Tensor, eps: float) -> Tensor:
    """`F.layer_norm`; a row of equal numbers gives 0, and without ``eps`` its gradient is 0."""
    x = x - x[..., :1].detach()  # which changes nothing else: equal numbers are 0, however large
    if eps > 0:
        return F.layer_norm(x, x.shape[-1:], eps=eps)
    equal = (x.square() == 0).all(-1, keepdim=True)
    return F.layer_norm(torch.where(equal, 0, x), x.shape[-1:], eps=0).masked_fill(equal, 0)


@planned
def layer_norm_mse(
    x: Tensor,
    y: Tensor,
    eps: float = 1e-5,
    reduction: Reduction = "mean",
    backend: Backend = "auto",
    *,
    weights: Tensor | None = None,
) -> Tensor:
    """Half squared distance of two layer-normalised tensors, with gradients to both.

    L = ½‖norm(x) − norm(y)‖²₂,  norm(x) = (x − mean(x)) / √(var(x) + eps)  (LRKD, eqs. 7 and 9)

    over the last dimension, with biased variance and no affine part. A row of equal numbers
    normalises to zeros; without eps, where the formula is 0/0, its gradient is 0.

    Args:
        x: (..., D).
        y: (..., D), same shape, dtype and device as ``x``.
        eps: added to the variance.
        reduction: the sum over all elements, divided by their number ("mean"), by the number of
            rows ("batchmean") or by 1 ("sum").
        backend: "auto", "torch", "triton" or "cpp".
        weights: (...) floating, the leading dimensions of ``x``: factors of the rows' losses, of
            any sign and without gradient. They don't change the divisor.

    Returns:
        Scalar in float32 (float64 for float64); 0 without rows.

    Raises:
        ValueError, TypeError: different shapes, dtypes or devices, or an unknown option.

    >>> x = torch.tensor([[1.0, -1.0]])
    >>> y = torch.tensor([[-1.0, 1.0]])
    >>> round(layer_norm_mse(x, y, eps=0.0).item(), 4)
    2.0
    """
    check.floating("x", x)
    check.floating("y", y)
    check.shape("y", y, x.shape, "the shape of x")
    check.like("y", y, "x", x)
    check.number("eps", eps, at_least=0)
    check.choice("reduction", reduction, REDUCTIONS)
    remedy = "call it once for each row whose weight learns"
    weights = check.weights(weights, x.shape[:-1], x, of="x", remedy=remedy)
    weights = None if weights is None else weights.flatten()
    return _layer_norm_mse(x, y, weights, _Options(float(eps), reduction), backend)


@planned
def _layer_norm_mse(
    x: Tensor, y: Tensor, weights: Tensor | None, options: "_Options", backend: Backend
) -> Tensor:
    x, y = saveable(x), saveable(y)
    runs_on = backend_of(backend, "layer_norm_mse", x, columns=x.shape[-1])
    if runs_on == "triton":
        from fastkd.kernels.upstream import LossByKernel

        return apply(LossByKernel, options, x, y, weights)
    x, y = as_rows(x), as_rows(y)
    if runs_on == "torch":
        losses = functools.partial(_row_losses, options.eps)
        found = by_reference(losses, 2 * x.shape[-1], x, y)
        found = found if weights is None else found * weights
        return found.sum() / _divisor(x, options.reduction)
    return apply(LossInCpp, options, x, y, weights)


def _divisor(x: Tensor, reduction: str) -> int:
    """Divisor of the sum over elements; at least 1, so that the loss of no rows is 0."""
    rows = x.shape[:-1].numel()
    return max({"mean": rows * x.shape[-1], "batchmean": rows, "sum": 1}[reduction], 1)


@dataclass(frozen=True)
class _Options:
    eps: float
    reduction: str
    stacked = False

    def cpp(self, tensors: Sequence[Any], needs: Sequence[bool]) -> list[Tensor]:
        """See `LossInCpp`."""
        x, y = dense_rows(*tensors[:2])
        options = self.eps, _divisor(x, self.reduction)
        return torch.ops.fastkd_cpp.layer_norm_mse(x, y, tensors[2], *options, *needs[:2])

    def triton(
        self, tensors: Sequence[Any], upstream: Tensor | None, needs: Sequence[bool]
    ) -> list[Tensor]:
        """See `LossByKernel`."""
        from fastkd.kernels.projection import layer_norm_mse

        x, y = dense_rows(*tensors[:2])
        divisor = _divisor(x, self.reduction)
        return layer_norm_mse(x, y, tensors[2], upstream, self.eps, divisor, *needs[:2])


@dataclass(eq=False, repr=False)
class DualProjectionLoss(LossModule):
    """Dual projection loss of LRKD between the layers of a student and a teacher.

    L = γ·½‖norm(H_s P_s) − norm(H_t)‖² + (1 − γ)·½‖norm(H_t P_t) − norm(H_s)‖²  (eqs. 6-10)

    H_s and H_t have one row for each sample: token features (B, N, D) are averaged over the real
    tokens (eq. 3). A sample without a real token contributes zero and does not count in the mean.
    P_s and P_t are `OrthogonalProjection`; both are trained, though the teacher is not.

    The paper writes the plain squared norm, with a weight β between 1 and 15 beside a
    cross-entropy. For a batch of 32 × 768 numbers that sum would start near 10⁴ and dominate the
    cross-entropy, so by default each of the two terms is divided by its number of elements.

    Args:
        student_dim, teacher_dim: hidden sizes Ds and Dt.
        layers: matrices in each projection (2 in the paper).
        gamma: weight of the student projection loss, in [0, 1] (0.3 in the paper).
        orthogonal: False trains plain linear projections, the paper's ablation.
        reduction: "mean" over elements, "batchmean" over samples, or "sum".

    Shape: student (B, Ds) or (B, N, Ds); teacher (B, Dt) or (B, M, Dt); ``mask`` (B,) or (B, N),
    ``teacher_mask`` likewise if the teacher has another tokenizer, by default ``mask``. Returns a
    scalar in float32 (float64 for float64).

    >>> loss = DualProjectionLoss(student_dim=4, teacher_dim=6)
    >>> student = torch.randn(2, 5, 4, requires_grad=True)
    >>> loss(student, torch.randn(2, 5, 6), mask=torch.ones(2, 5)).shape
    torch.Size([])
    """

    student_dim: int
    teacher_dim: int
    layers: int = 2
    gamma: float = 0.3
    orthogonal: bool = True
    reduction: Reduction = "mean"
    backend: Backend = "auto"

    fixed = "student_dim", "teacher_dim", "layers", "orthogonal"

    def check_options(self) -> None:
        super().check_options()
        check.fraction("gamma", self.gamma)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive_int("student_dim", self.student_dim)
        check.positive_int("teacher_dim", self.teacher_dim)
        dims = self.student_dim, self.teacher_dim
        # C++ computes only the distance.
        backend: Backend = "torch" if self.backend == "cpp" else self.backend
        self.student_projection, self.teacher_projection = (
            OrthogonalProjection(*sizes, self.layers, self.orthogonal, backend)
            for sizes in (dims, dims[::-1])
        )

    def forward(
        self,
        student: Tensor,
        teacher: Tensor,
        mask: Tensor | None = None,
        teacher_mask: Tensor | None = None,
    ) -> Tensor:
        check.pair(student, teacher, min_ndim=2)
        _check_features("student", student, self.student_projection.in_dim)
        _check_features("teacher", teacher, self.teacher_projection.in_dim)
        if student.shape[0] != teacher.shape[0]:
            raise ValueError(
                f"student has {student.shape[0]} samples but teacher has {teacher.shape[0]}; "
                "pass the same samples"
            )
        mask = check.mask(mask, student.shape[:-1], student.device)
        if teacher_mask is not None or mask is None:
            of_teacher = teacher.shape[:-1], teacher.device, "teacher_mask", "teacher"
            teacher_mask = check.mask(teacher_mask, *of_teacher)
        elif teacher.shape[:-1] == student.shape[:-1]:
            teacher_mask = mask
        else:
            raise ValueError(
                f"mask belongs to student {tuple(student.shape)} and doesn't fit teacher "
                f"{tuple(teacher.shape)}; pass teacher_mask too"
            )

        h_s, h_t = _pooled(student, mask), _pooled(teacher, teacher_mask)  # (B, Ds), (B, Dt)
        masked = [(student, mask), (teacher, teacher_mask)]
        is_shared = mask is not None and teacher_mask is mask
        valid = _real_samples(masked[:1] if is_shared else masked)
        h_s, h_t = zero_padding(h_s, valid), zero_padding(h_t, valid)
        projected_s, projected_t = self._project(h_s, h_t)
        # Rows of zeros normalise to zeros: a sample left out adds nothing to either term.
        options = _Options(1e-5, self.reduction)
        spl = _layer_norm_mse(projected_s, h_t, None, options, self.backend)
        tpl = _layer_norm_mse(projected_t, h_s, None, options, self.backend)
        loss = torch.lerp(tpl, spl, self.gamma)
        if valid is None or self.reduction == "sum":
            return loss
        return loss * len(valid) / valid.sum().clamp(min=1)

    def _project(self, h_s: Tensor, h_t: Tensor) -> tuple[Tensor, Tensor]:
        """H_s P_s (B, Dt) and H_t P_t (B, Ds), eqs. 6 and 8."""
        projections = [self.student_projection, self.teacher_projection]
        # Hooks run only in a module's own call: FSDP's gather the matrices that it has sharded.
        hooked = any(getattr(projection, name) for projection in projections for name in HOOKS)
        if projections[0].orthogonal and _is_few(h_s, projections[0].raw) and not hooked:
            projected_s, projected_t = _project_rows([h_s, h_t], projections)
            return projected_s.to(h_s.dtype), projected_t.to(h_t.dtype)
        return projections[0](h_s), projections[1](h_t)


def _check_features(name: str, x: Tensor, dim: int) -> None:
    if x.dim() not in (2, 3):
        raise ValueError(f"{name} must be (B, D) or (B, N, D), got shape {tuple(x.shape)}")
    if x.shape[-1] != dim:
        raise ValueError(f"{name} must have {dim} columns ({name}_dim), got {tuple(x.shape)}")


def _pooled(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean (B, D) over the real tokens of (B, N, D) (eq. 3), 0 without any; (B, D) is kept."""
    return upcast(zero_padding(x, mask)) if x.dim() == 2 else pool_tokens(x, mask, "mean")


def _real_samples(masked: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor | None:
    """Which samples (B,) have a real token in all features; None if all samples have."""
    real = []
    for x, mask in masked:
        if mask is not None:
            real.append(mask if mask.dim() == 1 else mask.any(1))
        elif x.shape[1] == 0:
            real.append(x.new_zeros(len(x), dtype=torch.bool))
    return functools.reduce(torch.logical_and, real) if real else None
