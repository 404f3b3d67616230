"""What a row of logits adds to the loss: its divergence from a teacher, its cross-entropy."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastkd._core.numerics import autocast_off, upcast, values_readable, working_dtype
from fastkd._torch.divergences import row_divergence
from fastkd._torch.vocabulary_shard import ALL, Columns

# Logits worked on at a time on the CPU: few enough that the buffers of a chunk stay near the cache,
# enough that threads do not wait for each other after every small operation.
CHUNK = 1 << 21

# Softened further, distributions differ by so little, and τ²·KL weighs its rounding so much, that
# float32 would leave few digits.
HOT = 10.0


@dataclass(frozen=True)
class Soft:
    """What the soft targets of a row depend on; `fastkd.targets.TopK` has the tails."""

    form: str  # Divergence.form
    coefficient: float
    temperature: float
    scale: float  # τ² or 1
    tail: str = ""  # the teacher is its top k

    @property
    def per_row(self) -> tuple[str, float, float]:
        """What the kernels take."""
        return self.form, self.temperature, self.scale


def soft_rows(
    student: Tensor,
    teacher: list[Tensor],
    wants_grad: bool,
    soft: Soft,
    columns: Columns = ALL,
) -> tuple[Tensor, Tensor | None]:
    """Losses (R,) of logits (R, V), and their gradients with respect to student/τ, without scale.

    The teacher is logits (R, V), or ids and log-probabilities (R, K).
    """
    log_ps = log_softmax(student, soft.temperature, columns)
    if soft.tail:
        ids, log_probs = teacher
        return _from_top_k(log_ps, ids, log_probs, wants_grad, soft)
    log_pt = log_softmax(teacher[0], soft.temperature, columns)
    return row_divergence(soft.form, soft.coefficient, log_ps, log_pt, wants_grad, columns)


def log_softmax(logits: Tensor, temperature: float, columns: Columns = ALL) -> Tensor:
    z = logits.double() if temperature > HOT else upcast(logits)
    return columns.log_softmax(z if temperature == 1 else z / temperature)


def _from_top_k(
    log_ps: Tensor, ids: Tensor, log_probs: Tensor, wants_grad: bool, soft: Soft
) -> tuple[Tensor, Tensor | None]:
    """The divergence over a teacher's k words, and over all others as one where they count.

    It has a gradient g with respect to the logits of these K + 1 outcomes, log q of the student:
    a word of the outcome j gets g_j p/q_j, all of it where the outcome is one word.
    """
    log_probs = log_probs.to(log_ps.dtype)
    absent = log_probs == -torch.inf
    log_qs = log_ps.gather(-1, ids).masked_fill_(absent, -torch.inf)
    if soft.tail == "renormalise":
        log_qs, log_qt = log_qs.log_softmax(-1), log_probs.log_softmax(-1)
        value, g = row_divergence(soft.form, soft.coefficient, log_qs, log_qt, wants_grad)
        if g is None:
            return value, None
        return value, torch.zeros_like(log_ps).scatter_add_(-1, ids, g.masked_fill_(absent, 0))
    # An absent word's place may be that of a word: it takes none away.
    taken = torch.full_like(log_qs, -torch.inf).masked_fill_(absent, torch.inf)
    rest = log_ps.scatter_reduce(-1, ids, taken, "amin")
    log_tail = rest.logsumexp(-1, keepdim=True)
    log_qs = torch.cat([log_qs, log_tail], -1)
    value, g = row_divergence(
        soft.form, soft.coefficient, log_qs, _with_tail(log_probs, log_ps.shape[-1]), wants_grad
    )
    if g is None:
        return value, None
    # Of a tail that can't happen nothing is left to share.
    log_tail = log_tail.masked_fill(log_tail == -torch.inf, 0)
    grad = (rest - log_tail).exp_().mul_(g[:, -1:])
    return value, grad.scatter_add_(-1, ids, g[:, :-1].masked_fill(absent, 0))


def _with_tail(log_probs: Tensor, V: int) -> Tensor:
    """Teacher's log-probabilities (R, K + 1): those of the k tokens and that of all others.

    The tail is what the k tokens leave of 1. In float32 rounding would be as large as a small tail,
    and a tail of 0 makes reverse KL infinite.
    """
    exact = log_probs.double()
    total = exact.logsumexp(-1, keepdim=True)
    tail = (-torch.expm1(total)).log() if log_probs.shape[-1] < V else total.new_zeros(())
    tail = torch.where((total < 0) & (log_probs.shape[-1] < V), tail, -torch.inf)
    return torch.cat([exact, tail], -1).log_softmax(-1).to(log_probs.dtype)


def weighed_rows(
    student: Tensor,
    teacher: list[Tensor],
    mask: Tensor | None,
    wants_grad: bool,
    soft: Soft,
    divisor: Tensor | int,
) -> tuple[Tensor, Tensor | None]:
    """Loss (R,) of every row, and its gradient (R, V) over the divisor; both 0 where masked.

    The gradient stays in the working dtype: half types would lose small probabilities before a
    loss scale reaches them.
    """
    factor = soft.scale / soft.temperature / divisor
    dtype = working_dtype(student)
    loss = student.new_empty(len(student), dtype=dtype)
    dstudent = student.new_empty(student.shape, dtype=dtype) if wants_grad else None
    with autocast_off(student):
        for chunk in row_chunks(student):
            logits = _unmasked(student[chunk], mask, chunk)
            other = [x[chunk] if soft.tail else _unmasked(x[chunk], mask, chunk) for x in teacher]
            value, grad = soft_rows(logits, other, wants_grad, soft)
            loss[chunk] = value * soft.scale
            if dstudent is not None and grad is not None:
                torch.mul(grad, factor, out=dstudent[chunk])
                if mask is not None:
                    dstudent[chunk].masked_fill_(~mask[chunk, None], 0)
        if mask is not None:
            loss = loss.masked_fill(~mask, 0)
    return loss, dstudent


def row_chunks(logits: Tensor) -> list[slice]:
    """Row ranges to work on one at a time; one range where a loop would not pay."""
    if not values_readable(logits):  # on a GPU or traced
        return [slice(None)]
    rows, vocabulary = logits.shape
    step = max(CHUNK // vocabulary, 1)
    return [slice(start, start + step) for start in range(0, rows, step)]


def _unmasked(x: Tensor, mask: Tensor | None, chunk: slice) -> Tensor:
    return x if mask is None else x.masked_fill(~mask[chunk, None], 0)


@dataclass(frozen=True)
class Task:
    """What the cross-entropy of a row depends on; see `fastkd.targets.CrossEntropy`."""

    label_smoothing: float
    z_loss: float


def task_rows(
    student: Tensor,
    labels: Tensor,
    wants_grad: bool,
    task: Task,
    out: Tensor | None = None,
    columns: Columns = ALL,
) -> tuple[Tensor, Tensor | None]:
    """Cross-entropy (R,) of logits (R, V) with labels (R,), and its gradient, in ``out`` if given.

    ``out`` may be student.
    """
    smoothing, V = task.label_smoothing, columns.words or student.shape[-1]
    top = columns.total(student.amax(-1), "max")
    depth = top - columns.gather(student, labels)
    if smoothing:
        depth = (1 - smoothing) * depth + smoothing * (top - columns.sum(student) / V)
    grad = torch.sub(student, top[:, None], out=out).exp_()
    total = columns.sum(grad)
    log_total = total.log()
    value, factor = depth + log_total, total.reciprocal()
    if task.z_loss:
        log_z = top + log_total
        value = value + task.z_loss * log_z.square()
        factor = factor * (1 + 2 * task.z_loss * log_z)
    if not wants_grad:
        return value, None
    grad.mul_(factor[:, None])
    if smoothing:
        grad.sub_(smoothing / V)
    label = torch.full_like(value, smoothing - 1)
    if columns.group:
        labels, here = columns.own(labels, grad)
        label = label.masked_fill(~here, 0)
    return value, grad.scatter_add_(-1, labels[:, None], label[:, None])


def seen_rows(
    student: Tensor, labels: Tensor | None, columns: Columns = ALL
) -> tuple[Tensor, Tensor]:
    """The student's entropy (R,), and whether its likeliest word is the label, 0 without labels."""
    log_p = columns.log_softmax(student)
    p = log_p.exp()
    entropy = -columns.sum(log_p.mul_(p).masked_fill_(p == 0, 0))
    right = torch.zeros_like(entropy) if labels is None else columns.argmax(student) == labels
    return entropy, right.to(entropy.dtype)
