"""Soft targets and labels from hidden states: a few positions' logits at a time, then forgotten.

A chunk of positions goes through the head, its logits become their gradient in place, and the
gradient goes back through the head into float32 sums. No more of (positions, V) stands in memory
than `Recipe.chunk_bytes`, and no second matrix of the head's size beside the sums.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastkd._core.memory import empty
from fastkd._core.numerics import (
    autocast_off,
    once_differentiable,
    saveable,
    times_upstream,
    upcast,
    values_readable,
    working_dtype,
)
from fastkd._core.operator import operator
from fastkd._core.products import (
    HALF,
    add_product,
    multiplied_in_half,
    product,
    product_back,
    scaled_for_products,
)
from fastkd._torch.row_losses import Soft, Task, row_chunks, seen_rows, soft_rows, task_rows
from fastkd._torch.vocabulary_shard import ALL, Columns

# Bytes of logits that stand in memory together, on the CPU and on a GPU: enough positions for
# products that are not bound by reading the head and by adding to its gradient.
CHUNK_BYTES = (1 << 26, 1 << 31)

# Rows of logits that csrc/losses/cross_entropy/operator.cpp has at a time in bfloat16.
LOGIT_ROWS = 128

# Rows of what the operator says of each position.
TERMS = ("soft", "task", "entropy", "accuracy")


@dataclass(frozen=True)
class HeadForm:
    """What a head does to its products and bias; without a cap it is 0."""

    scale: float = 1.0
    softcap: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """What the loss is made of, besides tensors."""

    soft: Soft
    task: Task
    soft_weight: float
    task_weight: float
    student: HeadForm
    teacher: HeadForm
    vocabulary: int  # 0 for all
    chunk_bytes: int
    terms: bool  # entropy and accuracy too
    # On the CPU a weight in bfloat16 has its gradient in bfloat16 where one chunk makes it: rounded
    # once, and again by an upstream gradient that is no power of two. Not in graphs, whose dtypes
    # can't depend on sizes.
    narrow: bool
    columns: Columns = ALL

    def flat(self) -> tuple[str, str, str, list[float], list[int]]:
        """As an operator takes it."""
        soft, task = self.soft, self.task
        numbers = [soft.coefficient, soft.temperature, soft.scale]
        numbers += [task.label_smoothing, task.z_loss, self.soft_weight, self.task_weight]
        for form in (self.student, self.teacher):
            numbers += [form.scale, form.softcap]
        columns = self.columns
        sizes = [self.vocabulary, self.chunk_bytes, int(self.terms), int(self.narrow)]
        sizes += [columns.first, columns.most, columns.words]
        return soft.form, soft.tail, columns.group, numbers, sizes

    @staticmethod
    def of(form: str, tail: str, group: str, numbers: list[float], sizes: list[int]) -> "Recipe":
        """From `flat`."""
        coefficient, temperature, scale, smoothing, z_loss, soft, task, *forms = numbers
        return Recipe(
            Soft(form, coefficient, temperature, scale, tail),
            Task(smoothing, z_loss),
            soft,
            task,
            HeadForm(*forms[:2]),
            HeadForm(*forms[2:]),
            sizes[0],
            sizes[1],
            bool(sizes[2]),
            bool(sizes[3]),
            Columns(group, *sizes[4:]),
        )


@dataclass(frozen=True)
class Options:
    recipe: Recipe
    reduction: str
    runs_on: str  # of the rows: "torch", "triton" or "cpp"
    students: int  # of the tensors, those of the student's head


class LinearSoftTargets(torch.autograd.Function):
    """Loss, terms and gradients of all chunks.

    A sum needs no upstream gradient to know how its rows weigh, so its gradients are made along
    with the loss. The losses of single rows are weighed by the upstream gradient, so there the
    backward pass computes the logits once more.

    ``tensors`` are the student's head on its hidden states: these (R, D) and the weight (V, D), any
    number of further states (R, r) and weights (V, r) that add to the products, and last the bias
    (V) or None; then the teacher's likewise, or the ids and log-probabilities (R, K) of its top k,
    or none where nothing is asked about the teacher.
    """

    @staticmethod
    def forward(ctx, options, mask, labels, denominator, *tensors):
        ctx.options = options
        student, teacher = list(tensors[: options.students]), list(tensors[options.students :])
        ctx.dtypes = [None if x is None else x.dtype for x in student]
        ctx.teachers = len(teacher)
        needs = list(ctx.needs_input_grad[4 : 4 + len(student)])
        recipe: Recipe = options.recipe
        given = student, teacher, labels, mask
        if options.reduction == "none":
            _save(ctx, labels, mask, *tensors)
            no_needs = [False] * len(needs)
            (rows,) = _run(options, *given, None, no_needs)
            total = rows
        elif options.runs_on == "cpp" and _at_once(student, teacher, labels, mask, recipe):
            count = 1 if options.reduction == "sum" else max(student[0].shape[0], 1)
            with autocast_off(student[0]):
                loss, total, *grads = _labels_at_once(
                    student, labels, None, denominator, count, recipe, needs
                )
            _save(ctx, *grads)
            ctx.mark_non_differentiable(total)
            return loss, total
        else:
            divisor = _divisor(student[0], mask, options.reduction, denominator)
            weights = None
            if any(needs):
                weights = divisor.reciprocal().expand(student[0].shape[0])
            rows, *grads = _run(options, *given, weights, needs)
            _save(ctx, *grads)
            total = rows.sum(-1) / divisor
        ctx.mark_non_differentiable(total)
        return _weighed(total, recipe), total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        options, students = ctx.options, len(ctx.dtypes)
        needs = list(ctx.needs_input_grad[4 : 4 + students])
        if options.reduction == "none":
            labels, mask, *tensors = ctx.saved_tensors
            sides = tensors[:students], tensors[students:]
            _, *made = _run(options, *sides, labels, mask, grad.contiguous(), needs)
            grad = None
        else:
            made = list(ctx.saved_tensors)
        grads = iter(made)
        scaled = (
            times_upstream(next(grads), grad, dtype) if need else None
            for need, dtype in zip(needs, ctx.dtypes, strict=True)
        )
        return None, None, None, None, *scaled, *[None] * ctx.teachers


def _run(options: Options, *given: Any) -> list[Tensor]:
    """`linear_soft_targets` of its tensors and needs."""
    if options.runs_on == "triton" or torch.compiler.is_compiling():
        return linear_soft_targets(*(*given, *options.recipe.flat(), options.runs_on))
    return _in_chunks(*(*given, options.recipe, options.runs_on))  # an operator costs the host


def _save(ctx, *tensors: Tensor | None) -> None:
    """For the backward pass, also what was made under ``torch.inference_mode``."""
    ctx.save_for_backward(*(None if x is None else saveable(x) for x in tensors))


def _divisor(x: Tensor, mask: Tensor | None, reduction: str, denominator: Tensor | None) -> Tensor:
    """What the sum over rows is divided by, ()."""
    dtype = working_dtype(x)
    if reduction == "sum":
        return torch.ones((), dtype=dtype, device=x.device)
    if denominator is not None:
        return denominator
    if mask is None:
        return torch.full((), max(x.shape[0], 1), dtype=dtype, device=x.device)
    return mask.sum().clamp(min=1).to(dtype)


def _weighed(terms: Tensor, recipe: Recipe) -> Tensor:
    """The loss, of terms (4, ...); a weight of 0 counts nothing even against ∞."""
    if recipe.task_weight == 0:
        return terms[0] * recipe.soft_weight
    if recipe.soft_weight == 0:
        return terms[1] * recipe.task_weight
    return terms[0] * recipe.soft_weight + terms[1] * recipe.task_weight


def _shapes(student, teacher, labels, mask, weights, needs, *rest):
    hidden, dtype = student[0], working_dtype(student[0])
    needed = [x for x, need in zip(student, needs, strict=True) if need]
    grads = [x.new_empty(x.shape, dtype=dtype) for x in needed]
    return [hidden.new_empty((len(TERMS), hidden.shape[0]), dtype=dtype), *grads]


# An operator on PyTorch too: how many chunks there are would be a graph of its own for each.
@operator(_shapes)
def linear_soft_targets(
    student: list[Tensor | None],
    teacher: list[Tensor | None],
    labels: Tensor | None,
    mask: Tensor | None,
    weights: Tensor | None,
    needs: list[bool],
    form: str,
    tail: str,
    group: str,
    numbers: list[float],
    sizes: list[int],
    runs_on: str,
) -> list[Tensor]:
    """Terms (4, R) of every row, and gradients of Σ weights·loss to those of student in need.

    Tensors as in `LinearSoftTargets`, `Recipe.flat` for the rest; 0 where the mask (R,) is False.
    Gradients are of the working dtype, but see `Recipe.narrow`.
    """
    recipe = Recipe.of(form, tail, group, numbers, sizes)
    return _in_chunks(student, teacher, labels, mask, weights, needs, recipe, runs_on)


def _in_chunks(
    student: list[Tensor | None],
    teacher: list[Tensor | None],
    labels: Tensor | None,
    mask: Tensor | None,
    weights: Tensor | None,
    needs: list[bool],
    recipe: Recipe,
    runs_on: str,
) -> list[Tensor]:
    """The same, by its recipe."""
    hidden = student[0]
    assert hidden is not None
    R, kept = hidden.shape[0], None
    if mask is not None and values_readable(hidden):
        kept, mask = mask.nonzero()[:, 0], None
        kept = None if len(kept) == R else kept
    student = _rows_of(student, kept, mask)
    tail = bool(recipe.soft.tail)
    teacher = teacher if tail else _rows_of(teacher, kept, mask)
    if kept is not None:
        labels, weights = (None if x is None else x[kept] for x in (labels, weights))
        teacher = [None if x is None else x[kept] for x in teacher] if tail else teacher
    elif mask is not None and weights is not None:
        weights = weights.masked_fill(~mask, 0)
    with autocast_off(hidden):
        if runs_on == "cpp" and _at_once(student, teacher, labels, mask, recipe):
            _, terms, *made = _labels_at_once(student, labels, weights, None, 0, recipe, needs)
            grads = dict(zip((i for i in range(3) if needs[i]), made, strict=False))
        else:
            work = _Pass(student, teacher, recipe, needs, runs_on)
            for chunk in work.chunks:
                work.add(chunk, *[None if x is None else x[chunk] for x in (labels, mask, weights)])
            terms, grads = work.terms, work.grads
    for i in filter(lambda i: _has_rows(student, i), grads):
        grads[i] = recipe.columns.total(grads[i])
    if mask is not None:
        terms = terms.masked_fill(~mask, 0)
    if kept is not None:
        terms = _spread(terms.T, kept, R).T.contiguous()
        grads = {i: _spread(x, kept, R) if _has_rows(student, i) else x for i, x in grads.items()}
    return [terms, *(grads[i] for i in sorted(grads))]


def _at_once(
    student: list[Tensor | None],
    teacher: list[Tensor | None],
    labels: Tensor | None,
    mask: Tensor | None,
    recipe: Recipe,
) -> bool:
    """Whether one operator makes all: of labels alone, in one chunk, by a head of one product."""
    hidden, weight = student[0], student[1]
    assert hidden is not None and weight is not None
    if mask is not None or torch.compiler.is_compiling():
        return False
    plain = labels is not None and len(student) == 3 and not recipe.student.softcap
    if not plain or teacher or recipe.terms or recipe.task_weight == 0:
        return False
    if hidden.dtype in HALF and not multiplied_in_half(hidden):
        return False
    V, R = recipe.vocabulary or weight.shape[0], hidden.shape[0]
    if hidden.dtype in HALF and R > 1:  # of all rows it keeps the gradient, rounded
        return V * (4 * min(R, LOGIT_ROWS) + 2 * R) <= recipe.chunk_bytes
    return 0 < R <= _chunk_rows(recipe, hidden, working_dtype(hidden).itemsize, V)


def _labels_at_once(
    student: list[Tensor | None],
    labels: Tensor | None,
    weights: Tensor | None,
    denominator: Tensor | None,
    count: int,
    recipe: Recipe,
    needs: list[bool],
) -> list[Tensor]:
    """The loss, its terms, and the gradients needed; of rows where there is no count."""
    (_, weight, _), task = student, recipe.task
    assert weight is not None
    made: list[Tensor] = torch.ops.fastkd_cpp.cross_entropy_of_states(
        *student,
        labels,
        weights,
        denominator,
        count,
        *needs,
        recipe.vocabulary or weight.shape[0],
        recipe.student.scale,
        recipe.task_weight,
        task.label_smoothing,
        task.z_loss,
        recipe.narrow,
    )
    return made


def _chunk_rows(recipe: Recipe, hidden: Tensor, bytes_each: int, V: int) -> int:
    """Positions whose logits of a side or two, of so many bytes, stand in memory together."""
    bytes_each += 2 * (hidden.dtype in HALF)
    step = max(recipe.chunk_bytes // (bytes_each * (recipe.columns.most or V)), 1)
    # Whole tiles of the products, an aligned start in every vector.
    return step - step % 128 if step > 128 else step


def _has_rows(side: list[Tensor | None], i: int) -> bool:
    """Whether the tensor i of a head is states: they and weights take turns, the bias is last."""
    return i % 2 == 0 and i < len(side) - 1


def _rows_of(
    side: list[Tensor | None], kept: Tensor | None, mask: Tensor | None
) -> list[Tensor | None]:
    """A head with the states of real positions alone, or with zeros for the others."""

    def real(x: Tensor) -> Tensor:
        return x[kept] if kept is not None else x if mask is None else x.where(mask[:, None], 0)

    return [real(x) if x is not None and _has_rows(side, i) else x for i, x in enumerate(side)]


def _spread(x: Tensor, kept: Tensor, rows: int) -> Tensor:
    """(kept, ...) in their places among all rows, which are 0."""
    return x.new_zeros(rows, *x.shape[1:]).index_copy_(0, kept, x)


class _Side:
    """A head on its hidden states, cut to the vocabulary."""

    def __init__(self, tensors: list[Tensor | None], form: HeadForm, vocabulary: int) -> None:
        *pairs, bias = tensors
        self.states = [x for x in pairs[::2] if x is not None]
        self.weights = [x[:vocabulary] for x in pairs[1::2] if x is not None]
        self.bias = None if bias is None else bias[:vocabulary]
        self.form = form

    def products(self, chunk: slice) -> Tensor:
        first, *more = (
            product(x[chunk], w) for x, w in zip(self.states, self.weights, strict=True)
        )
        for other in more:
            first += other
        return first

    def finish(self, z: Tensor) -> Tensor:
        """Logits of the products (R, V), in their place."""
        if self.bias is not None:
            z += self.bias
        if self.form.scale != 1:
            z *= self.form.scale
        if self.form.softcap:
            z.div_(self.form.softcap).tanh_().mul_(self.form.softcap)
        return z

    def slope(self, logits: Tensor) -> Tensor | None:
        """Of the cap, at its logits."""
        if not self.form.softcap:
            return None
        return (logits / self.form.softcap).square_().neg_().add_(1)


class _Pass:
    """One walk over all positions."""

    def __init__(
        self,
        student: list[Tensor | None],
        teacher: list[Tensor | None],
        recipe: Recipe,
        needs: list[bool],
        runs_on: str,
    ) -> None:
        self.recipe, self.runs_on = recipe, runs_on
        self.by_kernels = runs_on != "torch"
        assert student[1] is not None
        self.V = V = recipe.vocabulary or len(student[1])
        self.student = _Side(student, recipe.student, V)
        self.teacher, self.top_k = None, []
        if recipe.soft.tail:
            self.top_k = [x for x in teacher if x is not None]
        elif teacher:
            self.teacher = _Side(teacher, recipe.teacher, V)
        hidden = self.student.states[0]
        sides = [self.student, *([self.teacher] if self.teacher else [])]
        double = any(x.dtype == torch.float64 for side in sides for x in side.states)
        self.dtype = torch.float64 if double else torch.float32
        self.terms = hidden.new_zeros(len(TERMS), len(hidden), dtype=working_dtype(hidden))
        self.chunks = list(self.ranges())
        self.narrow = recipe.narrow and len(self.chunks) == 1
        needed = {i: x for i, (x, need) in enumerate(zip(student, needs, strict=True)) if need}
        self.grads = {i: self.sums(i, x) for i, x in needed.items() if x is not None}

    def sums(self, i: int, x: Tensor) -> Tensor:
        """Where the gradient of a tensor adds up; what the first chunk will fill stays empty."""
        of_weight = i % 2 == 1
        narrow = self.narrow and of_weight and x.dtype == torch.bfloat16 and x.device.type == "cpu"
        total = empty(x.shape, x.dtype if narrow else working_dtype(x), x.device)
        filled = self.V if of_weight and self.chunks else 0
        if filled < len(x):
            total[filled:].zero_()
        return total

    def ranges(self) -> Iterator[slice]:
        """Of positions whose logits stand in memory together."""
        hidden = self.student.states[0]
        sides = 1 + (self.teacher is not None)
        step = _chunk_rows(self.recipe, hidden, sides * self.dtype.itemsize, self.V)
        return (slice(start, start + step) for start in range(0, len(hidden), step))

    def add(
        self,
        chunk: slice,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """A chunk's terms and, with weights (R,), its part of the gradients."""
        student = self.student.products(chunk).to(self.dtype)
        if self.teacher is not None:
            teacher = [self.teacher.products(chunk).to(self.dtype)]
        else:
            teacher = [x[chunk] for x in self.top_k]
        terms = self.terms[:, chunk]
        together = self.runs_on == "triton" or bool(self.recipe.columns.group)
        ranges = [] if together else row_chunks(student)
        if len(ranges) < 2:
            self.fill(student, teacher, terms, labels, mask, weights)
        else:
            for rows in ranges:
                rest = [None if x is None else x[rows] for x in (labels, mask, weights)]
                self.fill(student[rows], [x[rows] for x in teacher], terms[:, rows], *rest)
        if weights is not None:
            self.back(chunk, student, None if self.by_kernels else weights[:, None])

    def fill(
        self,
        student: Tensor,
        teacher: list[Tensor],
        terms: Tensor,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """Fill in the terms (4, R) of products (R, V), and their gradient in the student's place.

        Only the kernels weigh the gradient by the rows' weights (R,); else `back` does.
        """
        recipe, wants_grad = self.recipe, weights is not None
        self.student.finish(student)
        if self.teacher is not None:
            self.teacher.finish(teacher[0])
        if recipe.terms:
            terms[2], terms[3] = seen_rows(student, labels, recipe.columns)
        slope = self.student.slope(student) if wants_grad else None
        of_soft = weights if teacher and recipe.soft_weight else None
        of_task = wants_grad and labels is not None and recipe.task_weight != 0
        grad = None
        if labels is not None:
            out = student if of_task and not teacher else None
            terms[1], grad = self.task_of(student, labels, weights if of_task else None, out)
        if teacher:
            terms[0] = self.fill_soft(student, teacher, mask, of_soft)
        if weights is None:
            return
        if grad is None:
            if of_soft is None:
                student.zero_()
        elif of_soft is None:
            if grad is not student or recipe.task_weight != 1:
                torch.mul(grad, recipe.task_weight, out=student)
        elif self.runs_on == "triton":
            student.addcmul_(grad, weights[:, None], value=recipe.task_weight)
        else:
            student.add_(grad, alpha=recipe.task_weight)
        if slope is not None:
            student *= slope
        if recipe.student.scale != 1:
            student *= recipe.student.scale

    def task_of(
        self, student: Tensor, labels: Tensor, weights: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Cross-entropies (R,) and, with weights (R,), their gradient, in ``out`` if given.

        Only the kernel in C++ weighs it.
        """
        task = self.recipe.task
        if self.runs_on != "cpp":
            return task_rows(student, labels, weights is not None, task, out, self.recipe.columns)
        if weights is not None and out is None:
            out = torch.empty_like(student)
        options = task.label_smoothing, task.z_loss
        return torch.ops.fastkd_cpp.cross_entropy(student, labels, out, weights, *options), out

    def fill_soft(
        self, student: Tensor, teacher: list[Tensor], mask: Tensor | None, weights: Tensor | None
    ) -> Tensor:
        """Divergences (R,) and, with weights, their gradient in the student's place."""
        soft, weight = self.recipe.soft, self.recipe.soft_weight
        if not self.by_kernels:
            wants_grad, columns = weights is not None, self.recipe.columns
            value, grad = soft_rows(student, teacher, wants_grad, soft, columns)
            if grad is not None:
                torch.mul(grad, weight * soft.scale / soft.temperature, out=student)
            return value * soft.scale

        if self.runs_on == "cpp":
            if weights is not None and weight != 1:
                weights = weights * weight
            given = student, teacher[0], mask, weights, *soft.per_row
            return torch.ops.fastkd_cpp.soft_target_rows(*given)
        from fastkd.kernels import soft_targets as kernels

        form, temperature, scale = soft.per_row
        rows = student, teacher[0], mask
        loss, stats = kernels.soft_target_forward(*rows, form, temperature, scale)
        if weights is not None:
            kernels.fill_gradient(
                student, *rows, stats, None, weights, form, temperature, scale * weight
            )
        return loss

    def back(self, chunk: slice, grad: Tensor, weights: Tensor | None) -> None:
        """Add what a chunk's gradient (R, V) with respect to the products makes of the head's.

        Weights (R, 1) are left to the states, which have fewer columns, unless a half type would
        round these.
        """
        states, head = self.student.states, self.student.weights
        if weights is not None and any(multiplied_in_half(x) for x in states):
            grad, weights = grad.mul_(weights), None
        bias = 2 * len(states)
        if bias in self.grads:
            self.grads[bias][: self.V] += (grad if weights is None else grad * weights).sum(0)
        if not self.grads.keys() - {bias}:
            return
        made = {x.dtype: scaled_for_products(grad.to(working_dtype(x)), x.dtype) for x in states}
        for i, (x, w) in enumerate(zip(states, head, strict=True)):
            ready_grad, factor = made[x.dtype]
            if 2 * i in self.grads:
                part = product_back(ready_grad, w)
                for scale in (weights, factor):
                    part = part if scale is None else part.mul_(scale)
                self.grads[2 * i][chunk] = part
            if 2 * i + 1 in self.grads:
                x = x[chunk] if weights is None else upcast(x[chunk]) * weights
                total = self.grads[2 * i + 1][: self.V]
                add_product(total, ready_grad, x, factor, first=chunk.start == 0)
