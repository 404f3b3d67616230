"""Soft-target and label losses from hidden states, for a chunk of positions at a time.

The head computes a chunk's logits, their gradient overwrites them, and products with the head add
it to float32 sums. Memory holds at most `LossOptions.chunk_bytes` of (positions, V) logits, and
the sums are the only other matrices of the head's size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fastkd._core.numerics import (
    autocast_off,
    empty,
    once_differentiable,
    save_for_backward,
    times_upstream,
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
from fastkd.lm.row_losses import (
    CrossEntropyOptions,
    Match,
    SoftTargetOptions,
    cross_entropy,
    divergence_in_cpp,
    divergence_in_place,
    entropy_and_accuracy,
    log_mass_of,
    row_chunks,
)

# Bytes of logits in memory, on the CPU and on a GPU: enough positions that reading the head and
# adding to its gradient don't bound the products.
CHUNK_BYTES = (1 << 26, 1 << 31)

TILE_ROWS = 128  # of a matrix product

# Rows of bfloat16 logits in one block of csrc/losses/cross_entropy/operator.cpp.
LOGIT_ROWS = 128

# Rows of the terms (len(TERMS), R) of the positions: the first are those of return_terms=True.
LOSSES = ("soft", "task")
MAIN_TERMS = (*LOSSES, "entropy", "accuracy")
TEACHER_TERMS = ("total_variation", "teacher_entropy", "teacher_log_prob")
TERMS = (*MAIN_TERMS, *TEACHER_TERMS, "log_prob")

TOTAL_VARIATION = SoftTargetOptions("total_variation", 0.0, temperature=1.0, scale=1.0)


@dataclass(frozen=True)
class HeadForm:
    """Scale and cap of a head's logits."""

    scale: float = 1.0
    softcap: float = 0.0  # 0 for none


@dataclass(frozen=True)
class LossOptions:
    reduction: str
    runs_on: str  # backend of the row losses: "torch", "triton" or "cpp"
    students: int  # number of tensors of the student's head
    soft: SoftTargetOptions
    task: CrossEntropyOptions
    soft_weight: float
    task_weight: float
    student: HeadForm
    teacher: HeadForm
    vocabulary: int  # number of token ids compared, 0 for all
    chunk_bytes: int
    terms: str  # names of the terms to compute besides the losses, with spaces between
    # On the CPU the gradient of a bfloat16 weight is bfloat16 if there is one chunk: it is rounded
    # once, and again if the upstream gradient isn't a power of two. Not in graphs, whose dtypes
    # must not depend on sizes.
    narrow: bool
    largest_ratio: float = 0.0  # bound of the importance ratios
    unmatched: str = ""  # of a `fastkd.VocabularyMatch`; "" for one vocabulary


@dataclass(frozen=True)
class Positions:
    """Tensors (R,) of the positions; None for those that a call doesn't have.

    The weights are 0 where the mask is False.
    """

    labels: Tensor | None = None
    mask: Tensor | None = None
    soft_mask: Tensor | None = None  # positions with soft targets; all others have the task alone
    soft_weights: Tensor | None = None  # factor of each position's divergence
    task_weights: Tensor | None = None  # factor of each position's cross-entropy
    teacher_rows: Tensor | None = None  # row of the teacher's states for each position
    ratio_ids: Tensor | None = None  # tokens of the importance ratio, and their old log q
    ratio_old: Tensor | None = None

    def tensors(self) -> list[Tensor | None]:
        return [getattr(self, field.name) for field in fields(self)]

    def at(self, rows: slice | Tensor) -> "Positions":
        return Positions(*(None if x is None else x[rows] for x in self.tensors()))


COLUMNS = 3  # tensors of `fastkd.VocabularyMatch.columns`; the first may be a draft vocabulary
TRAILING = len(fields(Positions)) + COLUMNS


class LinearSoftTargets(torch.autograd.Function):
    """Loss and terms, with gradients computed in the forward pass for a reduced loss.

    For reduction "none" the upstream gradient weights the rows, so the backward pass computes the
    logits again.

    ``tensors`` begin with the student's head on its hidden states: states (R, D) and weight (V, D),
    further pairs of states (R, r) and weights (V, r) whose products are added, and the bias (V) or
    None. The teacher's follow, likewise, or ids and log-probabilities (R, K) of its top k, or
    nothing if the loss doesn't depend on the teacher. Then come those of `Positions` and, or None,
    the columns of another vocabulary: those of a match, or the teacher's token ids (V,) that are
    compared while its probabilities are those of its whole vocabulary.
    """

    @staticmethod
    def forward(ctx, options, denominator, *tensors):
        ctx.options = options
        positions, columns, student, teacher = _arguments(tensors, options)
        ctx.dtypes = [None if x is None else x.dtype for x in student]
        needs = list(ctx.needs_input_grad[2 : 2 + len(student)])
        hidden = student[0]
        assert hidden is not None
        run: Any = linear_soft_targets
        if options.runs_on != "triton" and not torch.compiler.is_compiling():
            run = run.__wrapped__  # plain code: the operator costs host time
        one_operator = _in_one_operator(student, teacher, positions, options)
        if options.reduction == "none":
            save_for_backward(ctx, *tensors)
            arguments = student, teacher, positions.tensors(), columns, None, [False] * len(needs)
            (total,) = run(*arguments, options)
        elif one_operator and positions.task_weights is None:
            count = 1 if options.reduction == "sum" else max(hidden.shape[0], 1)
            with autocast_off(hidden):
                loss, total, *grads = _cross_entropy_of_states(
                    student, positions.labels, None, denominator, count, options, needs
                )
            ctx.save_for_backward(*grads)
            ctx.mark_non_differentiable(total)
            return loss, total
        else:
            divisor = divisor_of(hidden, positions.mask, options.reduction, denominator)
            upstream = None
            if any(needs):
                upstream = divisor.reciprocal().expand(hidden.shape[0])
            rows, *grads = run(
                student, teacher, positions.tensors(), columns, upstream, needs, options
            )
            ctx.save_for_backward(*grads)
            total = rows.sum(-1) / divisor
        ctx.mark_non_differentiable(total)
        # A term of weight 0 adds nothing, even if it is infinite.
        if options.task_weight == 0:
            return total[0] * options.soft_weight, total
        if options.soft_weight == 0:
            return total[1] * options.task_weight, total
        return total[0] * options.soft_weight + total[1] * options.task_weight, total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        options, students = ctx.options, len(ctx.dtypes)
        needs = list(ctx.needs_input_grad[2 : 2 + students])
        if options.reduction == "none":
            positions, columns, student, teacher = _arguments(ctx.saved_tensors, options)
            run: Any = linear_soft_targets
            if options.runs_on != "triton" and not torch.compiler.is_compiling():
                run = run.__wrapped__
            arguments = positions.tensors(), columns, grad.contiguous(), needs, options
            _, *computed = run(student, teacher, *arguments)
            grad = None
        else:
            computed = list(ctx.saved_tensors)
        grads = iter(computed)
        scaled = (
            times_upstream(next(grads), grad, dtype) if need else None
            for need, dtype in zip(needs, ctx.dtypes, strict=True)
        )
        return None, None, *scaled, *(None for _ in ctx.needs_input_grad[2 + students :])


def _arguments(
    tensors: Sequence[Tensor | None], options: LossOptions
) -> tuple[Positions, list[Tensor | None], list[Tensor | None], list[Tensor | None]]:
    """Positions, columns, student and teacher of the tensors of `LinearSoftTargets`."""
    heads, positions, columns = tensors[:-TRAILING], tensors[-TRAILING:-COLUMNS], tensors[-COLUMNS:]
    student, teacher = heads[: options.students], heads[options.students :]
    return Positions(*positions), list(columns), list(student), list(teacher)


def divisor_of(
    x: Tensor, mask: Tensor | None, reduction: str, denominator: Tensor | None
) -> Tensor:
    """Divisor () of the sum over rows; a count is at least 1."""
    dtype = working_dtype(x)
    if reduction != "batchmean":
        return torch.ones((), dtype=dtype, device=x.device)
    if denominator is not None:
        return denominator
    if mask is None:
        return torch.full((), max(x.shape[0], 1), dtype=dtype, device=x.device)
    return mask.sum().clamp(min=1).to(dtype)


def _shapes(student, teacher, positions, columns, upstream, needs, *rest):
    hidden, dtype = student[0], working_dtype(student[0])
    needed = [x for x, need in zip(student, needs, strict=True) if need]
    grads = [x.new_empty(x.shape, dtype=dtype) for x in needed]
    return [hidden.new_empty((len(TERMS), hidden.shape[0]), dtype=dtype), *grads]


# An operator for PyTorch too: else each number of chunks would compile its own graph.
@operator(_shapes)
def linear_soft_targets(
    student: list[Tensor | None],
    teacher: list[Tensor | None],
    position_tensors: list[Tensor | None],
    columns: list[Tensor | None],
    upstream: Tensor | None,
    needs: list[bool],
    options: LossOptions,
) -> list[Tensor]:
    """`TERMS` of every row, and gradients of Σ upstream·loss for the student's tensors.

    Tensors are those of `LinearSoftTargets`; ``needs`` selects the gradients. Terms are 0 where the
    mask (R,) is False. Gradients have the working dtype, except for `LossOptions.narrow`.
    """
    positions = Positions(*position_tensors)
    hidden = student[0]
    assert hidden is not None
    R, real = hidden.shape[0], None  # real: row numbers, if values can be read and some are masked
    if positions.mask is not None and values_readable(hidden):
        real = positions.mask.nonzero()[:, 0]
        positions = replace(positions, mask=None)
        real = None if len(real) == R else real
    tail, by_row = bool(options.soft.tail), positions.teacher_rows is not None and bool(teacher)
    if by_row and not (values_readable(hidden) or hidden.is_cuda):
        assert positions.teacher_rows is not None
        teacher, by_row = _real_states(teacher, positions.teacher_rows, None), False
    mask = positions.mask
    if mask is not None:  # values can't be read
        student = _real_states(student, None, mask)
        teacher = teacher if tail or by_row else _real_states(teacher, None, mask)
        upstream = None if upstream is None else upstream.masked_fill(~mask, 0)
    if by_row:
        real, positions, teacher = _by_teacher_row(real, positions, teacher)
    if real is not None:
        student, positions = _real_states(student, real, None), positions.at(real)
        upstream = None if upstream is None else upstream[real]
        if tail:
            teacher = [None if x is None else x[real] for x in teacher]
        elif not by_row:
            teacher = _real_states(teacher, real, None)
    with autocast_off(hidden):
        if _in_one_operator(student, teacher, positions, options):
            weights = _times(upstream, positions.task_weights) if any(needs) else None
            _, terms, *computed = _cross_entropy_of_states(
                student, positions.labels, weights, None, 0, options, needs
            )
            grads = dict(zip((i for i in range(3) if needs[i]), computed, strict=False))
            terms = torch.nn.functional.pad(terms, (0, 0, 0, len(TERMS) - len(terms)))
        else:
            work = _ChunkedPass(student, teacher, columns, options, needs)
            if by_row:
                work.share_teacher_rows(positions.teacher_rows)
            for chunk in work.chunks:
                rows = None if upstream is None else upstream[chunk]
                logits = work.student.products(chunk).to(work.dtype)
                for part in work.parts(chunk, logits, positions.at(chunk), rows):
                    grad = work.fill(*part)
                if upstream is not None:
                    work.student.back(chunk, grad if work.rounds else logits, work.grads)
            terms, grads = work.terms, work.grads
    terms = _weighted(terms, positions)
    if real is not None:
        terms = _at_rows(terms.T, real, R).T.contiguous()
        grads = {i: _at_rows(x, real, R) if _is_states(student, i) else x for i, x in grads.items()}
    return [terms, *(grads[i] for i in sorted(grads))]


def _weighted(terms: Tensor, positions: Positions) -> Tensor:
    """Terms with the positions' weights, 0 where they don't count."""
    if positions.soft_mask is not None:
        of_teacher = slice(TERMS.index(TEACHER_TERMS[0]), TERMS.index(TEACHER_TERMS[-1]) + 1)
        terms[of_teacher] = terms[of_teacher].masked_fill(~positions.soft_mask, 0)
    for i, factor in enumerate((positions.soft_weights, positions.task_weights)):
        if factor is not None:
            terms[i] *= factor
    return terms if positions.mask is None else terms.masked_fill(~positions.mask, 0)


def _by_teacher_row(
    real: Tensor | None, positions: Positions, teacher: list[Tensor | None]
) -> tuple[Tensor, Positions, list[Tensor | None]]:
    """Real positions in the order of their teacher rows, and the teacher with these rows alone.

    ``teacher_rows`` then are rows of that teacher. On a GPU this waits for the device.
    """
    rows = positions.teacher_rows
    assert rows is not None
    used, local = (rows if real is None else rows[real]).unique(return_inverse=True)
    order = local.argsort(stable=True)
    teacher = [x[used] if x is not None and _is_states(teacher, i) else x
               for i, x in enumerate(teacher)]  # fmt: skip
    kept = order if real is None else real[order]
    places = torch.empty_like(rows).index_copy_(0, kept, local[order])
    return kept, replace(positions, teacher_rows=places), teacher


def _times(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The product, where None is 1."""
    return a if b is None else b if a is None else a * b


def _in_one_operator(
    student: list[Tensor | None],
    teacher: list[Tensor | None],
    positions: Positions,
    options: LossOptions,
) -> bool:
    """Whether one C++ operator computes all: labels alone, one chunk, a head of one product."""
    hidden, weight = student[0], student[1]
    assert hidden is not None and weight is not None
    if options.runs_on != "cpp" or positions.mask is not None or torch.compiler.is_compiling():
        return False
    plain = positions.labels is not None and len(student) == 3 and not options.student.softcap
    if not plain or teacher or options.terms or options.task_weight == 0:
        return False
    if hidden.dtype in HALF and not multiplied_in_half(hidden):
        return False
    V, R = options.vocabulary or weight.shape[0], hidden.shape[0]
    if hidden.dtype in HALF and R > 1:  # it also stores the rounded gradient of all rows
        return V * (4 * min(R, LOGIT_ROWS) + 2 * R) <= options.chunk_bytes
    return 0 < R <= _chunk_rows(options, hidden, working_dtype(hidden).itemsize, V)


def _cross_entropy_of_states(
    student: list[Tensor | None],
    labels: Tensor | None,
    weights: Tensor | None,
    denominator: Tensor | None,
    count: int,
    options: LossOptions,
    needs: list[bool],
) -> list[Tensor]:
    """Loss, terms and needed gradients; with ``count`` 0 loss and terms of each row."""
    (_, weight, _), task = student, options.task
    assert weight is not None
    results: list[Tensor] = torch.ops.fastkd_cpp.cross_entropy_of_states(
        *student,
        labels,
        weights,
        denominator,
        count=count,
        needs_hidden=needs[0],
        needs_weight=needs[1],
        needs_bias=needs[2],
        vocabulary=options.vocabulary or weight.shape[0],
        scale=options.student.scale,
        factor=options.task_weight,
        label_smoothing=task.label_smoothing,
        z_loss=task.z_loss,
        narrow=options.narrow,
    )
    return results


def _chunk_rows(options: LossOptions, hidden: Tensor, bytes_each: int, V: int) -> int:
    """Positions of one chunk, if the logits of one token take ``bytes_each`` in all models."""
    bytes_each += 2 * (hidden.dtype in HALF)
    return max(options.chunk_bytes // (bytes_each * V), 1)


def equal_chunks(rows: int, most: int) -> Iterator[slice]:
    """Slices of at most ``most`` rows, as few as possible.

    They have about one size: even a chunk of few rows reads the head and adds to its gradient. They
    are whole tiles of the products, so that every chunk begins at an aligned address.
    """
    tile = TILE_ROWS if most > TILE_ROWS else 1
    most -= most % tile
    step = -(-rows // max(-(-rows // most), 1))
    step = max(-(-step // tile) * tile, 1)
    return (slice(start, start + step) for start in range(0, rows, step))


def _is_states(head: list[Tensor | None], i: int) -> bool:
    """Whether tensor i of a head holds states: states and weights alternate, the bias is last."""
    return i % 2 == 0 and i < len(head) - 1


def _real_states(
    head: list[Tensor | None], real: Tensor | None, mask: Tensor | None
) -> list[Tensor | None]:
    """A head with the states of ``real`` rows alone, or with zeros where masked."""

    def select(x: Tensor) -> Tensor:
        return x[real] if real is not None else x if mask is None else x.where(mask[:, None], 0)

    return [select(x) if x is not None and _is_states(head, i) else x for i, x in enumerate(head)]


def _at_rows(x: Tensor, index: Tensor, rows: int) -> Tensor:
    """Zeros (rows, ...) with ``x`` at the rows ``index``."""
    return x.new_zeros(rows, *x.shape[1:]).index_copy_(0, index, x)


class HeadOnStates:
    """Logits of a head on its hidden states, for the compared part of the vocabulary."""

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
        """Logits from products (R, V), which they overwrite."""
        if self.bias is not None:
            z += self.bias
        if self.form.scale != 1:
            z *= self.form.scale
        if self.form.softcap:
            z.div_(self.form.softcap).tanh_().mul_(self.form.softcap)
        return z

    def slope(self, logits: Tensor) -> Tensor | None:
        """Derivative of the cap, from the capped logits; None without a cap."""
        if not self.form.softcap:
            return None
        return (logits / self.form.softcap).square_().neg_().add_(1)

    def back(self, chunk: slice, grad: Tensor, totals: dict[int, Tensor]) -> None:
        """Add a chunk's gradients, of the tensors that ``totals`` has by their number.

        ``grad`` (R, V) is the gradient of the products. The first chunk overwrites the weights'
        totals.
        """
        bias, V = 2 * len(self.states), len(self.weights[0])
        if bias in totals:
            totals[bias][:V] += grad.sum(0)
        if not totals.keys() - {bias}:
            return
        scaled = {x.dtype: scaled_for_products(grad, x.dtype) for x in self.states}
        for i, (x, w) in enumerate(zip(self.states, self.weights, strict=True)):
            scaled_grad, factor = scaled[x.dtype]
            if 2 * i in totals:
                part = product_back(scaled_grad, w)
                totals[2 * i][chunk] = part if factor is None else part.mul_(factor)
            if 2 * i + 1 in totals:
                total, first = totals[2 * i + 1][:V], chunk.start == 0
                add_product(total, scaled_grad, x[chunk], factor, first=first)


class _ChunkedPass:
    """Terms and gradients of all positions, a chunk at a time."""

    def __init__(
        self,
        student: list[Tensor | None],
        teacher: list[Tensor | None],
        columns: list[Tensor | None],
        options: LossOptions,
        needs: list[bool],
    ) -> None:
        self.columns = [x for x in columns if x is not None]
        self.draft = None if options.unmatched else columns[0]
        self.options, self.runs_on = options, options.runs_on
        assert student[1] is not None
        self.V = V = options.vocabulary or len(student[1])
        self.student = HeadOnStates(student, options.student, V)
        self.teacher, self.top_k = None, []
        if options.soft.tail:
            self.top_k = [x for x in teacher if x is not None]
        elif teacher:
            assert teacher[1] is not None
            whole = len(teacher[1]) if self.columns else V
            self.teacher = HeadOnStates(teacher, options.teacher, whole)
        # Whether the divergence's pass writes the terms: it compares the same distributions.
        of_pair = self.teacher is not None and self.draft is None and not options.unmatched
        self.writes_terms = self.runs_on == "cpp" and of_pair
        hidden = self.student.states[0]
        heads = [self.student, *([self.teacher] if self.teacher else [])]
        double = any(x.dtype == torch.float64 for head in heads for x in head.states)
        self.dtype = torch.float64 if double else torch.float32
        self.terms = hidden.new_zeros(len(TERMS), len(hidden), dtype=working_dtype(hidden))
        columns_in_all = self.V + (0 if self.teacher is None else len(self.teacher.weights[0]))
        if options.unmatched and not values_readable(hidden):
            columns_in_all += self.V  # the teacher's logits at the student's columns
        bytes_each = -(-columns_in_all * self.dtype.itemsize // max(V, 1))
        self.chunks = list(equal_chunks(len(hidden), _chunk_rows(options, hidden, bytes_each, V)))
        #: The teacher's rows of each chunk, by its first position, if positions share them.
        self.teacher_chunks = dict[int, slice]()
        self.narrow = options.narrow and len(self.chunks) == 1
        needed = {i: x for i, (x, need) in enumerate(zip(student, needs, strict=True)) if need}
        self.grads = {i: self.sums(i, x) for i, x in needed.items() if x is not None}
        # Whether the labels' kernel rounds its gradient: bfloat16 products alone read it.
        states, bias = self.student.states, 2 * len(self.student.states)
        alone = not teacher and bias not in self.grads and options.student == HeadForm()
        in_half = all(x.dtype == torch.bfloat16 for x in states)
        self.rounds = self.runs_on == "triton" and alone and in_half

    def sums(self, i: int, x: Tensor) -> Tensor:
        """Sum for the gradient of a tensor; the part that the first chunk overwrites is empty."""
        is_weight = i % 2 == 1
        narrow = self.narrow and is_weight and x.dtype == torch.bfloat16 and x.device.type == "cpu"
        total = empty(x.shape, x.dtype if narrow else working_dtype(x), x.device)
        filled = self.V if is_weight and self.chunks else 0
        if filled < len(x):
            total[filled:].zero_()
        return total

    def share_teacher_rows(self, rows: Tensor | None) -> None:
        """Let each chunk compute the teacher's rows of its positions once: ascending rows (R,)."""
        if rows is None or not self.chunks:
            return
        ends = [min(x.stop, len(rows)) - 1 for x in self.chunks]
        bounds = rows[[*(x.start for x in self.chunks), *ends]].tolist()
        for chunk, first, last in zip(
            self.chunks, bounds[: len(ends)], bounds[len(ends) :], strict=True
        ):
            self.teacher_chunks[chunk.start] = slice(first, last + 1)

    def parts(
        self, chunk: slice, student: Tensor, positions: Positions, upstream: Tensor | None
    ) -> Iterator[tuple[Any, ...]]:
        """Arguments of `fill` for the rows of a chunk, a few at a time; ``student``: products."""
        shared = self.teacher_chunks.get(chunk.start)
        if self.teacher is not None:
            teacher = [self.teacher.products(shared or chunk).to(self.dtype)]
        else:
            teacher = [x[chunk] for x in self.top_k]
        if shared is not None:
            assert positions.teacher_rows is not None
            positions = replace(positions, teacher_rows=positions.teacher_rows - shared.start)
        terms = self.terms[:, chunk]
        ranges = [] if self.runs_on == "triton" else row_chunks(student)
        if len(ranges) < 2:
            ranges = [slice(None)]
        if shared is not None and self.teacher is not None:
            self.teacher.finish(teacher[0])
        for rows in ranges:
            part, of_rows = None if upstream is None else upstream[rows], positions.at(rows)
            if shared is None:
                targets = [x[rows] for x in teacher]
                if self.teacher is not None:
                    self.teacher.finish(targets[0])
            else:
                targets, of_rows = self.shared_targets(teacher, of_rows)
            yield student[rows], targets, terms[:, rows], of_rows, part

    def shared_targets(
        self, teacher: list[Tensor], positions: Positions
    ) -> tuple[list[Tensor], Positions]:
        """The teacher's logits of these positions, without a copy for the C++ operator."""
        own = positions.teacher_rows
        assert own is not None
        if self.runs_on == "cpp":
            first, last = own[[0, -1]].tolist()  # ascending
            return [x[first : last + 1] for x in teacher], replace(
                positions, teacher_rows=own - first
            )
        targets = [x[own] for x in teacher]
        if positions.mask is not None:  # any row of the teacher
            targets[0].masked_fill_(~positions.mask[:, None], 0)
        return targets, replace(positions, teacher_rows=None)

    def fill(
        self,
        student: Tensor,
        teacher: list[Tensor],
        terms: Tensor,
        positions: Positions,
        upstream: Tensor | None,
    ) -> Tensor:
        """Write the terms of products (R, V), and overwrite ``student`` with their gradient.

        Returns the gradient, which is another tensor where the kernel rounds it.

        ``teacher`` is logits, of the rows ``positions.teacher_rows`` if there are any, or a top k.
        """
        options, labels, needs_grad = self.options, positions.labels, upstream is not None
        self.student.finish(student)
        row_terms = None
        if options.terms and self.writes_terms and positions.soft_mask is None:
            row_terms = labels, terms[len(LOSSES) :]
        elif options.terms:
            logits, shared = teacher[0] if self.teacher else None, positions.teacher_rows
            by_row = logits if logits is None or shared is None else logits[shared]
            self.fill_terms(student, by_row, labels, terms)
        log_mass = slope = grad = None
        if self.teacher is not None and self.draft is not None:
            draft = self.draft, positions.teacher_rows, options.soft.temperature
            teacher, log_mass = self.draft_part(teacher[0], *draft)
        if needs_grad and options.student.softcap:
            slope = self.student.slope(student)
        if labels is not None:
            grad = self.fill_labels(student, labels, terms, positions, upstream, bool(teacher))
            if grad is not None and self.rounds:
                return grad
        has_soft = needs_grad and bool(teacher) and options.soft_weight != 0
        if teacher:
            call = student, teacher, positions, upstream if has_soft else None
            terms[0] = self.fill_soft(*call, log_mass, row_terms)
        if not needs_grad:
            return student
        if grad is None and not has_soft:
            student.zero_()
        elif grad is not None and has_soft:
            student.add_(grad)
        elif grad is not None and grad is not student:
            student.copy_(grad)
        if slope is not None:
            student *= slope
        if options.student.scale != 1:
            student *= options.student.scale
        return student

    def draft_part(
        self, whole: Tensor, draft: Tensor, rows: Tensor | None, temperature: float
    ) -> tuple[list[Tensor], Tensor]:
        """The teacher's logits of a draft's tokens and log (R,) of their mass."""
        logits = whole.index_select(1, draft)
        log_mass = log_mass_of(logits, whole, temperature, self.runs_on)
        # Of mass 0, with any distribution of it: that of no finite logit would be NaN.
        logits.masked_fill_((log_mass == -torch.inf)[:, None], 0)
        return [logits], log_mass if rows is None else log_mass[rows]

    def fill_labels(
        self,
        student: Tensor,
        labels: Tensor,
        terms: Tensor,
        positions: Positions,
        upstream: Tensor | None,
        has_teacher: bool,
    ) -> Tensor | None:
        """Write the cross-entropies; returns their gradient (R, V), which may be ``student``."""
        options, grad = self.options, None
        if upstream is not None and options.task_weight != 0:
            dtype = torch.bfloat16 if self.rounds else student.dtype
            apart = has_teacher or self.rounds
            grad = torch.empty_like(student, dtype=dtype) if apart else student
        factors = _times(upstream, positions.task_weights)
        if factors is not None and options.task_weight != 1:
            factors = factors * options.task_weight
        terms[1] = cross_entropy(self.runs_on, student, labels, options.task, factors, grad)
        return grad

    def fill_soft(
        self,
        student: Tensor,
        teacher: list[Tensor],
        positions: Positions,
        upstream: Tensor | None,
        log_mass: Tensor | None,
        row_terms: tuple[Tensor | None, Tensor] | None,
    ) -> Tensor:
        """Divergences (R,); with ``upstream`` their gradient overwrites ``student``."""
        options, mask, soft_mask = self.options, positions.mask, positions.soft_mask
        weights, ratio = _times(upstream, positions.soft_weights), None
        if positions.ratio_ids is not None and positions.ratio_old is not None:
            log_q = self.log_probs(student, positions.ratio_ids)
            ratio = (log_q - positions.ratio_old).exp_().clamp_(max=options.largest_ratio)
            weights = _times(weights, ratio)
        if soft_mask is not None:
            mask = soft_mask if mask is None else mask & soft_mask
            if self.teacher and positions.teacher_rows is None:  # which may be NaN there
                teacher[0].masked_fill_(~mask[:, None], 0)
        match = Match(self.columns, options.unmatched) if options.unmatched else None
        soft = divergence_in_place(
            student, teacher, options.soft, options.soft_weight, self.runs_on,
            upstream is not None, mask, weights, log_mass, positions.teacher_rows, row_terms, match,
        )  # fmt: skip
        soft = soft if soft_mask is None else soft.masked_fill(~soft_mask, 0)
        return soft if ratio is None else soft * ratio

    def fill_terms(
        self, student: Tensor, teacher: Tensor | None, labels: Tensor | None, terms: Tensor
    ) -> None:
        names = self.options.terms.split()
        if not {"entropy", "accuracy"}.isdisjoint(names):
            terms[2], terms[3] = self.entropy_and_accuracy(student, labels)
        for name in names:
            if name not in MAIN_TERMS:
                terms[TERMS.index(name)] = self.term(name, student, teacher, labels)

    def entropy_and_accuracy(self, logits: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `fastkd.lm.row_losses.entropy_and_accuracy`."""
        if self.runs_on != "cpp":
            return entropy_and_accuracy(logits, labels)
        found = logits.new_empty(len(TERMS) - len(LOSSES), len(logits))
        options = TOTAL_VARIATION, None, None, None
        divergence_in_cpp(logits, [logits], *options, labels=labels, terms=found)
        return found[0], found[1]

    def term(
        self, name: str, student: Tensor, teacher: Tensor | None, labels: Tensor | None
    ) -> Tensor:
        """A term (R,) of logits (R, V) at temperature 1; those of labels are 0 without labels."""
        of_labels = name in ("log_prob", "teacher_log_prob")
        if (of_labels and labels is None) or (teacher is None and name != "log_prob"):
            return torch.zeros_like(student[:, 0])
        if labels is not None and name == "log_prob":
            return self.log_probs(student, labels)
        assert teacher is not None
        if labels is not None and name == "teacher_log_prob":
            return self.log_probs(teacher, labels if self.draft is None else self.draft[labels])
        if name == "teacher_entropy":
            return self.entropy_and_accuracy(teacher, None)[0]
        targets, log_mass = [teacher], None
        if self.draft is not None:
            targets, log_mass = self.draft_part(teacher, self.draft, None, 1.0)
        options = TOTAL_VARIATION, 1.0, self.runs_on, False, None, None, log_mass
        return divergence_in_place(student, targets, *options)

    def log_probs(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Log-probabilities (R,) of one token for each row of logits (R, V), at temperature 1."""
        plain = CrossEntropyOptions(label_smoothing=0.0, z_loss=0.0)
        return -cross_entropy(self.runs_on, logits, ids, plain)
