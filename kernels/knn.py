"""Intra-class KNN: search, loss and gradient without a matrix of all distances.

Data path. `search_kernel` multiplies a tile of student rows with tile after tile of the bank and
keeps, in registers, the best 8, 16 or 64 candidates of each row by ‖t‖² − 2 s·t: the k it is asked
for and at least seven more. With both sides sorted by label it finds by bisection where its labels
begin and end in the bank, so that tiles of other labels cost nothing. Few rows against a large bank
split the bank among programs. Rows so long and so few that one program would have all the work
split the features instead: `product_kernel` then leaves partial products of at most 2^18 pairs.
`settle_kernel` merges what the programs of one row found, compares the candidates by direct
difference in float64, which neither underflows nor overflows, and leaves the loss, the neighbours
and the factor of the gradient. The worst candidate's score bounds whatever the search rejected: if
it is out of reach by more than rounding, as almost always, the choice is proven. Else the program
compares whatever is within reach, and in a part of the bank where that fills the list of
candidates, all rows of the label.
`gradient_kernel` reads the row and its neighbours again and writes the gradient with the upstream
gradient applied.

With s bytes an element: the bank is read once a tile of BLOCK_N rows, ⌈N/BLOCK_N⌉·M·D·s bytes,
most of them from the L2 cache; settling reads (candidates + 1)·N·D·s, the gradient (k + 2)·N·D·s.
2·N·M·D/C operations on the tensor cores for C labels of equal size. 32 rows against 65,536 × 768 in
bf16 are bound by bandwidth (100 MB), 65,536 against 65,536 by the tensor cores.
"""

import math

import numpy
import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._dispatch import triton_interpreted

# Rows of the bank from which sorting by label (two launches) pays.
ROWS_TO_SORT = 1024
# Programs of the search that keep a large GPU busy: the bank or the features are split for them.
PROGRAMS = 512
# Most pairs whose products may lie in memory, and the features from which on that pays.
PAIRS_IN_MEMORY = 2**18
FEATURES_TO_SPLIT = 4096
# Candidates beyond the k-th, which rounding may have put behind it.
SPARE = 7

# Stands for a score that overflows; inf stands for no candidate.
FAR = tl.constexpr(3e38)
# No row of a bank.
LAST = tl.constexpr(2**31 - 1)


def keep(k: int) -> int:
    """Candidates kept for each row: a power of two, and few of them, to compile few forms."""
    return 8 if k + SPARE <= 8 else 16 if k + SPARE <= 16 else 64


def is_aligned(*sizes: int) -> bool:
    """Whether rows are whole 16 elements, so that a thread needs one address for several."""
    return not any(size % 16 for size in sizes)


def blocks(
    N: int,
    k: int,
    itemsize: int,
    is_sorted: bool,
    aligned: bool,
    labels: torch.dtype,
    has_tolerance: bool,
) -> dict[str, int]:
    """Block sizes and warps of the search.

    With up to 64 rows the bank's bandwidth decides, a bank that is not sorted is small: small tiles
    make more programs. Beyond that tiles are as large as registers hold together with the
    candidates: float32's products in three parts need most of them; labels of float64, differences
    of int64 and addresses of rows that are not ``aligned`` are as bad. 128 bytes of features a
    step, three steps in flight.
    """
    many = keep(k) > 16
    wide_labels = labels == torch.float64 or (labels == torch.int64 and has_tolerance)
    if not is_sorted and itemsize == 2 and not many and not wide_labels:
        block_n, block_m = 16, 64
    elif N <= 64 or not (is_sorted and aligned) or wide_labels or (itemsize == 4 and many):
        block_n, block_m = 32, 32
    elif itemsize == 4:
        block_n, block_m = 64 if has_tolerance else 128, 32
    else:
        block_n, block_m = 64 if many else 128, 64
    return {
        "BLOCK_N": block_n,
        "BLOCK_M": block_m,
        "BLOCK_D": (64 if itemsize == 4 and many else 128) // itemsize,
        "num_warps": 8,
    }


def product_blocks(itemsize: int, aligned: bool) -> dict[str, int]:
    """Of products that stay in memory: small tiles, as pairs are few and their features many."""
    step = 128 if aligned or itemsize == 2 else 64
    return {"BLOCK_N": 32, "BLOCK_M": 32, "BLOCK_D": step // itemsize, "num_warps": 4}


def from_product_blocks() -> dict[str, int]:
    """Of the search among such products: small tiles, so that there are more programs."""
    return {"BLOCK_N": 16, "BLOCK_M": 32, "BLOCK_D": 16, "num_warps": 4}


@triton.jit
def _insert(score, first, best, chosen, WIDTH: tl.constexpr, KEEP: tl.constexpr):
    """Put scores (R, WIDTH) that beat the worst of ``best`` (R, KEEP) in its place.

    ``chosen`` holds their positions, which start from ``first``. The earlier of equals stays.
    """
    column = tl.arange(0, WIDTH)[None, :]
    slot = tl.arange(0, KEEP)[None, :]
    nearest, at = tl.min(score, axis=1, return_indices=True)
    worst, out = tl.max(best, axis=1, return_indices=True)
    better = nearest < worst
    while tl.max(better.to(tl.int32), axis=0) > 0:
        taken = (column == at[:, None]) & better[:, None]  # (R, WIDTH)
        replaced = (slot == out[:, None]) & better[:, None]  # (R, KEEP)
        best = tl.where(replaced, nearest[:, None], best)
        chosen = tl.where(replaced, first + at[:, None], chosen)
        score = tl.where(taken, float("inf"), score)
        nearest, at = tl.min(score, axis=1, return_indices=True)
        worst, out = tl.max(best, axis=1, return_indices=True)
        better = nearest < worst
    return best, chosen


@triton.jit
def _tolerance(labels, tolerance, rest):
    """The tolerance in the type of the labels, from two numbers of 32 bits."""
    if labels.dtype == tl.float64:
        return tl.full((), tolerance, tl.float64) + tl.full((), rest, tl.float64)
    elif labels.dtype == tl.int64:
        return (tl.full((), tolerance, tl.int64) << 31) + rest
    else:
        return tolerance


@triton.jit
def _range(labels_ptr, lowest, highest, tolerance, start, stop, HAS_TOLERANCE: tl.constexpr):
    """The part of start..stop of the sorted bank whose labels may match lowest..highest."""
    first, last = start, stop
    while first < last:
        middle = (first + last) // 2
        at = tl.load(labels_ptr + middle)
        below = lowest - at > tolerance if HAS_TOLERANCE else at < lowest
        first = tl.where(below, middle + 1, first)
        last = tl.where(below, last, middle)
    begin, last = first, stop
    while first < last:
        middle = (first + last) // 2
        at = tl.load(labels_ptr + middle)
        inside = at - highest <= tolerance if HAS_TOLERANCE else at <= highest
        first = tl.where(inside, middle + 1, first)
        last = tl.where(inside, last, middle)
    return begin, first


@triton.jit
def _same(s_labels, t_labels, tolerance, HAS_TOLERANCE: tl.constexpr):
    """Which labels match."""
    if HAS_TOLERANCE:
        return tl.abs(s_labels - t_labels) <= tolerance
    else:
        return s_labels == t_labels


@triton.jit
def _rows(order_ptr, position, there, SORTED: tl.constexpr):
    """Row numbers of positions in the order of the labels."""
    if SORTED:
        return tl.load(order_ptr + position, mask=there, other=0)
    else:
        return position.to(tl.int64)


@triton.jit
def _product(
    s_ptr,
    t_ptr,
    s_row,
    t_row,
    s_there,
    t_there,
    first,
    last,
    stride_s,
    stride_t,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """s·t (BLOCK_N, BLOCK_M) and ‖t‖² (BLOCK_M,) over features first..last."""
    product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(first, last, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        s = tl.load(
            s_ptr + s_row[:, None] * stride_s + d[None, :],
            mask=s_there[:, None] & (d < last)[None, :],
            other=0.0,
        )
        t = tl.load(
            t_ptr + t_row[:, None] * stride_t + d[None, :],
            mask=t_there[:, None] & (d < last)[None, :],
            other=0.0,
        )
        wide = t.to(tl.float32)
        if WIDEN:
            s, t = s.to(tl.float32), wide
        # A difference, as a sum would become the tensor core's own, which rounds more.
        product -= tl.dot(s, tl.trans(t), input_precision="tf32x3")
        squares += tl.sum(wide * wide, axis=1)
    return -product, squares


@triton.jit(do_not_specialize=["N", "M"])
def product_kernel(
    s_ptr,  # (N, D)
    t_ptr,  # (M, D)
    product_ptr,  # (splits, N, M)
    squares_ptr,  # (splits, M)
    N,
    M,
    D,
    stride_s,
    stride_t,
    features,  # of a split
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    split = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(2) * features
    last = tl.minimum(first + features, D)
    product, squares = _product(
        s_ptr, t_ptr, i.to(tl.int64), j.to(tl.int64), i < N, j < M, first, last,
        stride_s, stride_t, BLOCK_N, BLOCK_M, BLOCK_D, WIDEN,
    )  # fmt: skip
    out = (split * N + i[:, None]) * M + j[None, :]
    tl.store(product_ptr + out, product, mask=(i < N)[:, None] & (j < M)[None, :])
    if tl.program_id(0) == 0:
        tl.store(squares_ptr + split * M + j, squares, mask=j < M)


@triton.jit(do_not_specialize=["N", "M", "rows", "product_splits", "tolerance", "tolerance_rest"])
def search_kernel(
    s_ptr,  # (N, D), unless FROM_PRODUCTS
    t_ptr,  # (M, D)
    s_labels_ptr,  # (N,), sorted if SORTED
    t_labels_ptr,  # (M,)
    s_order_ptr,  # (N,): row of each position, if SORTED
    t_order_ptr,  # (M,)
    product_ptr,  # (product_splits, N, M), if FROM_PRODUCTS
    squares_ptr,  # (product_splits, M)
    score_ptr,  # (N, splits, KEEP): inf where there is no candidate
    candidate_ptr,  # (N, splits, KEEP): rows of the bank
    N,
    M,
    D,
    stride_s,
    stride_t,
    rows,  # of the bank, for one split
    product_splits,
    tolerance,
    tolerance_rest,
    HAS_TOLERANCE: tl.constexpr,
    SORTED: tl.constexpr,
    FROM_PRODUCTS: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    s_there = i < N
    s_labels = tl.load(s_labels_ptr + i, mask=s_there, other=0)
    s_row = _rows(s_order_ptr, i, s_there, SORTED)
    slack = _tolerance(s_labels, tolerance, tolerance_rest)

    start = tl.program_id(1) * rows
    stop = tl.minimum(start + rows, M)
    if SORTED:
        # NaNs come last and match nothing.
        real = s_there & (s_labels == s_labels)
        anything = tl.max(s_labels, axis=0)
        lowest = tl.min(tl.where(real, s_labels, anything), axis=0)
        least = tl.min(s_labels, axis=0)
        highest = tl.max(tl.where(real, s_labels, least), axis=0)
        start, stop = _range(t_labels_ptr, lowest, highest, slack, start, stop, HAS_TOLERANCE)

    best = tl.full((BLOCK_N, KEEP), float("inf"), tl.float32)
    chosen = tl.zeros((BLOCK_N, KEEP), tl.int32)
    for first in range(start, stop, BLOCK_M):
        j = first + tl.arange(0, BLOCK_M)
        t_there = j < stop
        if FROM_PRODUCTS:
            product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            squares = tl.zeros((BLOCK_M,), tl.float32)
            for split in range(0, product_splits):
                at = (split * N + i[:, None]) * M + j[None, :]
                product += tl.load(
                    product_ptr + at, mask=s_there[:, None] & t_there[None, :], other=0.0
                )
                squares += tl.load(squares_ptr + split * M + j, mask=t_there, other=0.0)
        else:
            t_row = _rows(t_order_ptr, j, t_there, SORTED)
            product, squares = _product(
                s_ptr, t_ptr, s_row, t_row, s_there, t_there, 0, D, stride_s, stride_t,
                BLOCK_N, BLOCK_M, BLOCK_D, WIDEN,
            )  # fmt: skip
        score = squares[None, :] - 2.0 * product  # (BLOCK_N, BLOCK_M)
        # What overflows stays a candidate; a row of the bank with a NaN or inf becomes the first,
        # so that it can't hide. Direct differences tell which is which.
        score = tl.where(score < FAR, score, FAR)
        score = tl.where((squares < float("inf"))[None, :], score, -float("inf"))
        t_labels = tl.load(t_labels_ptr + j, mask=t_there, other=0)
        same = _same(s_labels[:, None], t_labels[None, :], slack, HAS_TOLERANCE)
        same = same & s_there[:, None] & t_there[None, :]
        score = tl.where(same, score, float("inf"))
        best, chosen = _insert(score, first, best, chosen, BLOCK_M, KEEP)

    found = (best < float("inf")) & s_there[:, None]
    candidate = _rows(t_order_ptr, chosen, found, SORTED)
    slot = tl.arange(0, KEEP)[None, :]
    out = (s_row[:, None] * tl.num_programs(1) + tl.program_id(1)) * KEEP + slot
    tl.store(score_ptr + out, best, mask=s_there[:, None])
    tl.store(candidate_ptr + out, candidate.to(tl.int32), mask=s_there[:, None])


@triton.jit
def _distances(s_ptr, t_ptr, t_row, there, D, stride_t, BLOCK_D: tl.constexpr):
    """‖s - t‖² of some rows of the bank: finite, as float64 holds any, unless s or t are not.

    Equal rows get equal bits.
    """
    distance = tl.zeros(t_row.shape, tl.float64)
    t_start = t_row.to(tl.int64) * stride_t
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        s = tl.load(s_ptr + d, mask=d < D, other=0.0).to(tl.float64)
        t = tl.load(
            t_ptr + t_start[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0
        )  # (rows, BLOCK_D)
        difference = s[None, :] - t.to(tl.float64)
        distance += tl.sum(difference * difference, axis=1)
    return distance


@triton.jit
def _squared_norm(s_ptr, D, BLOCK_D: tl.constexpr):
    """‖s‖²."""
    squares = tl.zeros((BLOCK_D,), tl.float64)
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        s = tl.load(s_ptr + d, mask=d < D, other=0.0).to(tl.float64)
        squares += s * s
    return tl.sum(squares, axis=0)


@triton.jit
def _insert_exact(distance, row, best, chosen):
    """`_insert` for one row of the student, by (distance, row) and with no place for inf."""
    least = tl.min(distance, axis=0)
    at = tl.min(tl.where(distance == least, row, LAST), axis=0)
    worst = tl.max(best, axis=0)
    out = tl.max(tl.where(best == worst, chosen, -1), axis=0)
    while (least < float("inf")) & ((least < worst) | ((least == worst) & (at < out))):
        chosen_out = (best == worst) & (chosen == out)
        best = tl.where(chosen_out, least, best)
        chosen = tl.where(chosen_out, at, chosen)
        distance = tl.where(row == at, float("inf"), distance)
        least = tl.min(distance, axis=0)
        at = tl.min(tl.where(distance == least, row, LAST), axis=0)
        worst = tl.max(best, axis=0)
        out = tl.max(tl.where(best == worst, chosen, -1), axis=0)
    return best, chosen


@triton.jit
def _choose(distance, chosen, nearest_ptr, row, k):
    """Store the k nearest, the lower row of equals first; their sum and the k-th distance."""
    total = tl.zeros((), tl.float64)
    least = tl.zeros((), tl.float64)
    for n in range(0, k):
        least = tl.min(distance, axis=0)
        exists = least < float("inf")
        lowest = tl.min(tl.where(distance == least, chosen, LAST), axis=0)
        total += tl.where(exists, least, 0.0)
        tl.store(nearest_ptr + row * k + n, tl.where(exists, lowest, -1))
        distance = tl.where((distance == least) & (chosen == lowest), float("inf"), distance)
    return total, least


@triton.jit(do_not_specialize=["M", "k", "rows", "splits", "tolerance", "tolerance_rest"])
def settle_kernel(
    s_ptr,  # (N, D)
    t_ptr,  # (M, D)
    s_labels_ptr,  # (N,), as the student's rows lie
    t_labels_ptr,  # (M,), sorted if SORTED
    t_order_ptr,  # (M,): row of each position, if SORTED
    score_ptr,  # (N, splits, KEEP)
    candidate_ptr,  # (N, splits, KEEP)
    loss_ptr,  # (N,)
    factor_ptr,  # (N,): of Σ_k (student - neighbour_k) in the gradient
    nearest_ptr,  # (N, k): rows of the bank, -1 where there is none
    M,
    D,
    k,
    stride_s,
    stride_t,
    rows,  # of the bank, for one split
    splits,
    tolerance,
    tolerance_rest,
    rounding,  # see `score_rounding`
    scale,
    HAS_TOLERANCE: tl.constexpr,
    SORTED: tl.constexpr,
    KEEP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, KEEP)
    candidates = splits * KEEP
    score_ptr += row * candidates
    candidate_ptr += row * candidates
    best = tl.full((1, KEEP), float("inf"), tl.float32)
    chosen = tl.zeros((1, KEEP), tl.int32)
    for first in range(0, candidates, WIDTH):
        at = first + tl.arange(0, WIDTH)
        score = tl.load(score_ptr + at, mask=at < candidates, other=float("inf"))
        best, chosen = _insert(score[None, :], first, best, chosen, WIDTH, KEEP)
    best = tl.reshape(best, (KEEP,))
    found = best < float("inf")
    chosen = tl.reshape(chosen, (KEEP,))
    chosen = tl.load(candidate_ptr + chosen, mask=found, other=0)

    s_ptr += row * stride_s
    distance = _distances(s_ptr, t_ptr, chosen, found, D, stride_t, BLOCK_D)
    finite = distance < float("inf")
    broken = tl.max((found & ~finite).to(tl.int32), axis=0)
    distance = tl.where(found & finite, distance, float("inf"))
    total, kth = _choose(distance, chosen, nearest_ptr, row, k)

    # A row at least as near as the k-th has ‖t‖ ≤ reach, and so no score above the limit; underflow
    # costs each feature less than 2^-122. What overflows proves nothing.
    square = _squared_norm(s_ptr, D, BLOCK_D)
    norm = tl.sqrt(square.to(tl.float32))
    reach = norm + tl.sqrt(kth.to(tl.float32))
    size = reach * (2 * norm + reach)
    limit = (kth - square).to(tl.float32) + rounding * size + D * 2.0**-122
    limit = tl.where(size < FAR, limit, float("inf"))
    rejected = tl.max(best, axis=0)  # nothing that is not among the candidates scores less
    if (broken == 0) & (rejected < float("inf")) & (rejected <= limit):
        s_label = tl.load(s_labels_ptr + row)
        slack = _tolerance(s_label, tolerance, tolerance_rest)
        nearest = tl.full((KEEP,), float("inf"), tl.float64)
        chosen = LAST - slot  # distinct, and higher than any row
        for split in range(0, splits):
            score = tl.load(score_ptr + split * KEEP + slot)
            start = split * rows
            stop = tl.minimum(start + rows, M)
            # What is in reach is in the list of the split, unless the list is full of it.
            is_listed = tl.max(score, axis=0) > limit
            if is_listed:
                stop = tl.where(tl.min(score, axis=0) <= limit, start + 1, start)
            elif SORTED:
                start, stop = _range(
                    t_labels_ptr, s_label, s_label, slack, start, stop, HAS_TOLERANCE
                )
            for first in range(start, stop, KEEP):
                j = first + slot
                there = j < stop
                if not SORTED:
                    t_labels = tl.load(t_labels_ptr + j, mask=there, other=0)
                    there = there & _same(s_label, t_labels, slack, HAS_TOLERANCE)
                t_row = _rows(t_order_ptr, j, there, SORTED).to(tl.int32)
                if is_listed:
                    there = score <= limit
                    t_row = tl.load(candidate_ptr + split * KEEP + slot, mask=there, other=0)
                distance = _distances(s_ptr, t_ptr, t_row, there, D, stride_t, BLOCK_D)
                finite = distance < float("inf")
                broken = tl.maximum(broken, tl.max((there & ~finite).to(tl.int32), axis=0))
                distance = tl.where(there & finite, distance, float("inf"))
                nearest, chosen = _insert_exact(distance, t_row, nearest, chosen)
        total, kth = _choose(nearest, chosen, nearest_ptr, row, k)

    nan = tl.where(broken > 0, float("nan"), 0.0)
    tl.store(loss_ptr + row, (total * (scale / D)).to(tl.float32) + nan)
    tl.store(factor_ptr + row, 2.0 * scale / D + nan)


@triton.jit(do_not_specialize=["k", "stride_dloss"])
def gradient_kernel(
    s_ptr,  # (N, D)
    t_ptr,  # (M, D)
    nearest_ptr,  # (N, k)
    factor_ptr,  # (N,)
    dloss_ptr,  # (N,), or one for all with stride 0
    dx_ptr,  # (N, D)
    D,
    k,
    stride_s,
    stride_t,
    stride_dloss,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    s = tl.load(s_ptr + row * stride_s + d, mask=d < D, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for n in range(0, k):
        neighbour = tl.load(nearest_ptr + row * k + n).to(tl.int64)
        there = (d < D) & (neighbour >= 0)
        t = tl.load(t_ptr + neighbour * stride_t + d, mask=there, other=0.0).to(tl.float32)
        total += tl.where(neighbour >= 0, s - t, 0.0)
    scale = tl.load(factor_ptr + row) * tl.load(dloss_ptr + row * stride_dloss)
    tl.store(dx_ptr + row * D + d, total * scale, mask=d < D)


def knn(
    student: Tensor,
    teacher: Tensor,
    student_labels: Tensor,
    teacher_labels: Tensor | None,
    k: int,
    tolerance: float | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """scale · loss of each row (N,), the gradient's factors (N,) and the neighbours (N, k).

    Rows (N, D) and (M, D) with stride 1 along D; labels of one type (float16 and bool have
    become others), ``teacher_labels`` None where they are the student's.
    """
    student_labels = _comparable(student_labels, tolerance)
    teacher_labels = None if teacher_labels is None else _comparable(teacher_labels, tolerance)
    N, D = student.shape
    M = teacher.shape[0]
    from_products = D >= FEATURES_TO_SPLIT and N * M <= PAIRS_IN_MEMORY
    is_sorted = M >= ROWS_TO_SORT and not from_products
    labels = student_labels
    student_order = teacher_order = None
    if is_sorted:
        student_labels, student_order = labels.sort(stable=True)
        if teacher_labels is None:
            teacher_order = student_order
        else:
            teacher_labels, teacher_order = teacher_labels.sort(stable=True)
    if teacher_labels is None:
        teacher_labels = student_labels

    itemsize = student.element_size()
    sizes = (D, student.stride(0), teacher.stride(0))
    aligned = is_aligned(*sizes)
    if from_products:
        config = from_product_blocks() | {"WIDEN": False}
    else:
        config = blocks(N, k, itemsize, is_sorted, aligned, labels.dtype, tolerance is not None)
        config |= {"WIDEN": _widens(student.dtype)}
    tiles = triton.cdiv(N, config["BLOCK_N"])
    new = {"dtype": torch.float32, "device": student.device}
    with torch.cuda.device_of(student):
        product = squares = None
        product_splits, features = 0, D
        if from_products:
            product_config = product_blocks(itemsize, aligned)
            grid = (
                triton.cdiv(N, product_config["BLOCK_N"]),
                triton.cdiv(M, product_config["BLOCK_M"]),
            )
            features = max(1024, triton.cdiv(D * grid[0] * grid[1], 64 * PROGRAMS) * 64)
            product_splits = triton.cdiv(D, features)
            product = torch.empty(product_splits, N, M, **new)
            squares = torch.empty(product_splits, M, **new)
            product_kernel[(*grid, product_splits)](
                student,
                teacher,
                product,
                squares,
                N,
                M,
                *sizes,
                features,
                WIDEN=_widens(student.dtype),
                **product_config,
            )

        splits = max(min(PROGRAMS // tiles, triton.cdiv(M, config["BLOCK_M"])), 1)
        rows = triton.cdiv(M, splits * config["BLOCK_M"]) * config["BLOCK_M"]
        splits = triton.cdiv(M, rows)
        label_tolerance = _tolerance_parts(tolerance, labels)
        score = torch.empty(N, splits, keep(k), **new)
        candidate = torch.empty(N, splits, keep(k), dtype=torch.int32, device=student.device)
        search_kernel[(tiles, splits)](
            *((None, None) if from_products else (student, teacher)),
            student_labels,
            teacher_labels,
            student_order,
            teacher_order,
            product,
            squares,
            score,
            candidate,
            N,
            M,
            *((None, None, None) if from_products else sizes),
            rows,
            product_splits,
            *label_tolerance,
            HAS_TOLERANCE=tolerance is not None,
            SORTED=is_sorted,
            FROM_PRODUCTS=from_products,
            KEEP=keep(k),
            **config,
        )

        loss, factor = torch.empty(N, **new), torch.empty(N, **new)
        nearest = torch.empty(N, k, dtype=torch.int32, device=student.device)
        settle_kernel[(N,)](
            student,
            teacher,
            labels,
            teacher_labels,
            teacher_order,
            score,
            candidate,
            loss,
            factor,
            nearest,
            M,
            D,
            k,
            student.stride(0),
            teacher.stride(0),
            rows,
            splits,
            *label_tolerance,
            score_rounding(features, product_splits, itemsize),
            scale,
            HAS_TOLERANCE=tolerance is not None,
            SORTED=is_sorted,
            **settle_blocks(k, aligned),
        )
    return loss, factor, nearest


def _comparable(labels: Tensor, tolerance: float | None) -> Tensor:
    """Labels in few types, for few compiled forms; differences of float32 stay in it."""
    if not labels.is_floating_point():
        return labels.to(torch.int64)
    return labels.to(torch.float64) if tolerance is None else labels


def _tolerance_parts(tolerance: float | None, labels: Tensor) -> tuple[float, float]:
    """A tolerance in two numbers of 32 bits: two integers for integer labels, or two float32."""
    if not labels.is_floating_point():
        return divmod(0 if tolerance is None else min(math.floor(tolerance), 2**62 - 1), 2**31)
    high = 0.0 if tolerance is None else float(numpy.float32(tolerance))
    return high, 0.0 if tolerance is None else tolerance - high


def _widens(dtype: torch.dtype) -> bool:
    """Triton's interpreter multiplies the bits of bfloat16."""
    return triton_interpreted() and dtype == torch.bfloat16


def score_rounding(features: int, splits: int, itemsize: int) -> float:
    """c such that a computed ‖t‖² - 2 s·t errs by no more than c·‖t‖·(2‖s‖ + ‖t‖).

    Every step of at most 64 features is added up from zero. For 2-byte inputs products are exact,
    and the tensor cores (sm_80 and later) add 4 to 16 of them to the sum, each cut at 2^-24 of the
    largest and the result at 2^-23: less than 2^-23 of Σ|s||t| for each feature of the step. For
    float32, in parts of 11 bits, products leave out less than 25·2^-23, and the 3·32 at most of a
    step are added up in the same way. Then the steps, one rounding each. ‖t‖² has fewer roundings.
    One more for each split of the features, eight for the rest.
    """
    step = 64 if itemsize == 2 else 25 + 3 * 32
    terms = step + triton.cdiv(features, 64 if itemsize == 2 else 16)
    return (terms + splits + 8) * 2.0**-23


def settle_blocks(k: int, aligned: bool) -> dict[str, int]:
    """Candidates merged at a time, and features of a tile: 16 differences a thread.

    In float64 each is two registers, and these sizes spill none; four where each has an address.
    """
    tile = 8192 if aligned else 2048
    return {"KEEP": keep(k), "WIDTH": 128, "BLOCK_D": tile // keep(k), "num_warps": 16}


def knn_gradient(
    student: Tensor, teacher: Tensor, nearest: Tensor, factor: Tensor, dloss: Tensor
) -> Tensor:
    """Gradient (N, D) for the upstream gradient of the losses (N,)."""
    N, D = student.shape
    dx = torch.empty(N, D, dtype=student.dtype, device=student.device)
    config = gradient_blocks()
    with torch.cuda.device_of(student):
        gradient_kernel[(N, triton.cdiv(D, config["BLOCK_D"]))](
            student,
            teacher,
            nearest,
            factor,
            dloss,
            dx,
            D,
            nearest.shape[1],
            student.stride(0),
            teacher.stride(0),
            dloss.stride(0),
            **config,
        )
    return dx


def gradient_blocks() -> dict[str, int]:
    """Eight elements a thread: a row of 768 or 1024 is one program's."""
    return {"BLOCK_D": 1024, "num_warps": 4}


knn_op = torch.library.custom_op("fastkd::knn", knn, mutates_args=())
knn_gradient_op = torch.library.custom_op("fastkd::knn_gradient", knn_gradient, mutates_args=())


@knn_op.register_fake
def _(student, teacher, student_labels, teacher_labels, k, tolerance, scale):
    rows = student.new_empty(student.shape[0], dtype=torch.float32)
    return rows, torch.empty_like(rows), rows.new_empty(student.shape[0], k, dtype=torch.int32)


@knn_gradient_op.register_fake
def _(student, teacher, nearest, factor, dloss):
    return student.new_empty(student.shape)
