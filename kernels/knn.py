"""Intra-class KNN: search, loss and gradient without a matrix of all distances.

Data path. A search multiplies a tile of student rows with tile after tile of the bank. The scores
‖t‖² − 2 s·t of a row enter BUCKETS buckets in registers: a bucket has the bank rows of one column
of the tiles, the least score with its row, and the second least score. So a score costs six
instructions and no sum over the tile, and at the end no row outside of the buckets' first is nearer
than the second least score allows. Many student rows and a large bank are both sorted by label, so
that tiles of other labels are skipped; `knn_norm_kernel` then computes ‖t‖² once for all tiles and
copies the bank in the order of the labels, unless it has more than 4 GB, for
`knn_sorted_search_kernel`. `knn_search_kernel` searches all others: it squares the tile that it
multiplies, so that the bank is read once and no norms are stored.
The part of the bank that a tile compares with is split over programs. For few and long rows, which
would occupy one program only, the features are split instead: `knn_product_kernel` then stores
partial products of at most 2^18 pairs.
`knn_settle_kernel` merges the buckets of one row to its best 8, 16 or 64 candidates, k and at least
seven more, compares them by direct difference in float64, which neither underflows nor overflows,
and stores the loss, the neighbours and the factor of the gradient. The proof in
`fastkd.losses.neighbours` shows when this choice is exact, which it almost always is. Otherwise the
program compares also the first rows of the other buckets within the error bound, and all rows of a
bucket whose second score is within it. ROWS_AT_ONCE student rows are searched at a time: more would
share few splits, whose buckets have many rows.
`knn_gradient_kernel` reads the row and its neighbours again and writes the gradient, multiplied by
the upstream gradient.

With s bytes per element: the bank is read once per tile of BLOCK_N rows, ⌈N/BLOCK_N⌉·M·D·s bytes,
most of them from the L2 cache; buckets are 12·BUCKETS bytes per row and split, written and read
once; settling reads (candidates + 1)·N·D·s, the gradient (k + 2)·N·D·s.
2·N·M·D/C operations on the tensor cores for C labels of equal size. The search of many rows adds
every CHAIN features in float32 what the tensor cores summed: rows of a language model have a mean
cosine of .99, and the bound on the rounding of all 768 features would leave 320 exact comparisons
a row (2,048 × 65,536, k 4, emulated), at .995 8,400; now 22 and 60. 32 rows against 65,536 × 768 in
bf16 are bound by bandwidth (100 MB), 65,536 against 65,536 by the tensor cores.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastkd._core.dispatch import triton_interpreted
from fastkd._core.operator import launch_kernel, operator
from fastkd.kernels import launch
from fastkd.kernels.halves import halves
from fastkd.kernels.launch import cdiv
from fastkd.kernels.reduction import summed
from fastkd.kernels.rounding import PRECISE, rounded

# Numbers of student and bank rows from which sorting by label and stored norms are faster.
ROWS_TO_SORT = 65
BANK_TO_SORT = 1024
# Programs of the search that keep a large GPU busy, two for each of its 132 processors: the bank or
# the features are split for them.
PROGRAMS = 264
# Student rows of one search: more would share few splits of the bank, with many rows in a bucket.
ROWS_AT_ONCE = 4096
# Buckets of a split: as many as the bank rows of the smallest tile.
BUCKETS = 32
# Largest number of pairs with stored products, and number of features from which it is faster.
PAIRS_IN_MEMORY = 2**18
FEATURES_TO_SPLIT = 4096
# Bytes of a bank up to which it is copied in the order of the labels: asynchronous copies of rows
# that lie anywhere halve the search's speed.
MOST_BYTES_TO_COPY = 2**32
# Elements between rows of a bank from which a tile's offsets need 64 bits: the search has 32.
FAR_APART = 2**24
# Features that the tensor cores sum in a search of many rows: the bound on a longer sum's rounding
# costs hundreds of exact comparisons where rows have a mean cosine of .99, a shorter one additions.
CHAIN = 256
# Candidates after the k-th, which rounding may have misplaced.
SPARE = 7

# Score of a candidate whose score overflows; inf means no candidate.
FAR = tl.constexpr(3e38)
# Splits of the features whose products are read in one step.
SPLITS_AT_ONCE = tl.constexpr(16)
# Index that is no row of a bank.
LAST = tl.constexpr(2**31 - 1)


def keep(k: int) -> int:
    """Number of candidates per row: one of a few powers of two, for few compiled forms."""
    return 8 if k + SPARE <= 8 else 16 if k + SPARE <= 16 else 64


def is_aligned(D: int, stride_s: int, stride_t: int) -> bool:
    """Whether rows are multiples of 16 elements, so that a thread loads several per address."""
    return (D | stride_s | stride_t) % 16 == 0


def search_blocks(M: int, itemsize: int, aligned: bool, capability: int) -> dict[str, int]:
    """Block sizes and warps of the search in a bank that is not sorted.

    The bank's bandwidth is the limit: 32 student rows share one read. A large bank has tiles of 128
    rows, of which 16 kB are in flight, and a small one tiles of 32, for more programs. Tiles go
    through registers, where they are squared, and not by the compiler's asynchronous copies.
    """
    block_m = 32
    if aligned and M >= 128 * PROGRAMS:
        block_m = 128 if itemsize == 2 and capability < 10 else 64  # more would spill registers
    tile = {"BLOCK_N": 32, "BLOCK_M": block_m, "BLOCK_D": 128 // itemsize}
    bound = 128 if aligned and itemsize == 2 else 224  # two programs of a processor, or no spills
    return {**tile, "num_warps": 8, "num_stages": 1, "maxnreg": bound}


def sorted_blocks(itemsize: int, aligned: bool, capability: int) -> dict[str, int]:
    """Block sizes and warps of the search in a sorted bank.

    Tiles are as large as the registers hold beside the buckets: the L2 cache's bandwidth limits
    small ones. Only Hopper (9) has enough registers for the largest. float32's products in three
    parts need most registers, and addresses of rows that are not ``aligned`` even more.
    """
    half = itemsize == 2
    block_n, block_m = 32, 32
    if aligned:
        block_n = 128
        block_m = 32 if itemsize == 4 else 128 if capability == 9 else 64
    return {
        "BLOCK_N": block_n,
        "BLOCK_M": block_m,
        "BLOCK_D": 128 // itemsize,
        "CHAIN": CHAIN if half else 128 // itemsize,
        "num_warps": 8,
        "num_stages": 4 if half and aligned else 3,
        **({} if aligned and half else {"maxnreg": 224}),  # instead of 128, which spill
    }


def product_blocks(itemsize: int, aligned: bool) -> dict[str, int]:
    """Blocks of stored products: small tiles, for few pairs of many features."""
    step = 128 if aligned or itemsize == 2 else 64
    return {"BLOCK_N": 32, "BLOCK_M": 32, "BLOCK_D": step // itemsize, "num_warps": 4}


# Blocks of the search among stored products: small tiles, for more programs.
FROM_PRODUCT_BLOCKS = {"BLOCK_N": 16, "BLOCK_M": 32, "BLOCK_D": 16, "num_warps": 8}

# Blocks of the gradient, eight elements per thread: one program per row of 768 or 1024.
GRADIENT_BLOCKS = {"BLOCK_D": 1024, "num_warps": 4}


@triton.jit
def _insert(score, first, best, chosen, WIDTH: tl.constexpr, KEEP: tl.constexpr):
    """Replace the worst of ``best`` (R, KEEP) by each better score of ``scores`` (R, WIDTH).

    ``chosen`` holds the positions, counted from ``first``. Of equal scores the earlier is kept.
    """
    column = tl.arange(0, WIDTH)[None, :]
    slot = tl.arange(0, KEEP)[None, :]
    nearest, worst = tl.min(score, axis=1), tl.max(best, axis=1)
    better = nearest < worst
    while tl.max(better.to(tl.int32), axis=0) > 0:
        # Positions are found only where a score is inserted, which is rare.
        at = tl.min(tl.where(score == nearest[:, None], column, WIDTH), axis=1)
        out = tl.min(tl.where(best == worst[:, None], slot, KEEP), axis=1)
        taken = (column == at[:, None]) & better[:, None]  # (R, WIDTH)
        replaced = (slot == out[:, None]) & better[:, None]  # (R, KEEP)
        best = tl.where(replaced, nearest[:, None], best)
        chosen = tl.where(replaced, first + at[:, None], chosen)
        score = tl.where(taken, float("inf"), score)
        nearest, worst = tl.min(score, axis=1), tl.max(best, axis=1)
        better = nearest < worst
    return best, chosen


@triton.jit
def _collect(score, at, best, second, chosen):
    """Enter scores (BLOCK_N, columns) of the bank's positions from ``at`` on into the buckets.

    A bucket (BLOCK_N, BUCKETS) has the positions of one column, BUCKETS apart: the least of their
    scores, its position less the column, and the second least. Of equal scores the earlier is kept.
    """
    if score.shape[1] > best.shape[1]:
        left, right = halves(score)
        best, second, chosen = _collect(left, at, best, second, chosen)
        at += score.shape[1] // 2
        best, second, chosen = _collect(right, at, best, second, chosen)
    else:
        nearer = score < best
        second = tl.minimum(second, tl.where(nearer, best, score))
        chosen = tl.where(nearer, at, chosen)
        best = tl.where(nearer, score, best)
    return best, second, chosen


@triton.jit
def _rows(order_ptr, position, mask, SORTED: tl.constexpr):
    """Row indices of positions, which are in the order of the labels if SORTED."""
    if SORTED:
        return tl.load(order_ptr + position, mask=mask, other=0)
    else:
        return position.to(tl.int64)


@triton.jit
def _product(
    s_ptr,
    t_ptr,
    s_row,
    t_row,
    s_mask,
    t_mask,
    first,
    last,
    stride_s,
    stride_t,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """s·t (BLOCK_N, BLOCK_M) and ‖t‖² (BLOCK_M,) over features first..last.

    Tensor cores sum BLOCK_D features before their sum is added in float32: see `score_rounding`.
    """
    product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(first, last, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        s = tl.load(
            s_ptr + s_row[:, None] * stride_s + d[None, :],
            mask=s_mask[:, None] & (d < last)[None, :],
            other=0.0,
        )
        t = tl.load(
            t_ptr + t_row[:, None] * stride_t + d[None, :],
            mask=t_mask[:, None] & (d < last)[None, :],
            other=0.0,
        )
        # Rows that only the product reads lie in shared memory without bank conflicts, so they
        # are loaded twice. A cache modifier keeps the compiler from merging both loads.
        again = tl.load(
            t_ptr + t_row[:, None] * stride_t + d[None, :],
            mask=t_mask[:, None] & (d < last)[None, :],
            other=0.0,
            cache_modifier=".ca",
        ).to(tl.float32)
        squares += tl.sum(rounded(again * again), axis=1)
        if WIDEN:
            s, t = s.to(tl.float32), t.to(tl.float32)
        # A difference: the compiler would move a sum into the tensor core, which rounds more.
        product -= tl.dot(s, tl.trans(t), input_precision=PRECISE)
    return -product, squares


@triton.jit(do_not_specialize=["M", "ignore_index"])
def knn_norm_kernel(
    t_ptr,  # (M, D)
    labels_ptr,  # (M,), sorted
    t_order_ptr,  # (M,): row of each position
    bank_ptr,  # (M, D): the rows in this order, or None
    squares_ptr,  # (M,): ‖t‖² in this order, -inf for a label that matches nothing
    M,
    D,
    stride_t,
    ignore_index,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    j = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row = tl.load(t_order_ptr + j, mask=j < M, other=0)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        mask = (j < M)[:, None] & (d < D)[None, :]
        t = tl.load(t_ptr + row[:, None] * stride_t + d[None, :], mask=mask, other=0.0)
        if bank_ptr is not None:
            tl.store(bank_ptr + j[:, None] * D + d[None, :], t, mask=mask)
        squares += tl.sum(t.to(tl.float32) * t.to(tl.float32), axis=1)
    labels = tl.load(labels_ptr + j, mask=j < M, other=0)
    # NaNs come last, behind inf.
    matches = (labels != ignore_index) & (labels == labels)
    tl.store(squares_ptr + j, tl.where(matches, squares, -float("inf")), mask=j < M)


@triton.jit(do_not_specialize=["N", "M"])
def knn_product_kernel(
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
    offsets = (split * N + i[:, None]) * M + j[None, :]
    tl.store(product_ptr + offsets, product, mask=(i < N)[:, None] & (j < M)[None, :])
    if tl.program_id(0) == 0:
        tl.store(squares_ptr + split * M + j, squares, mask=j < M)


@triton.jit
def _scores(product, squares):
    """‖t‖² − 2 s·t (BLOCK_N, BLOCK_M). A score that overflows stays a candidate."""
    score = squares[None, :] - 2.0 * product
    return tl.where(score < FAR, score, FAR)


@triton.jit
def _matching(score, squares, same):
    """Scores of rows with the ``same`` label, inf for others.

    A bank row with NaN or inf becomes the first candidate, so that it is not lost. Direct
    differences distinguish it from a row whose square overflows.
    """
    score = tl.where((squares < float("inf"))[None, :], score, -float("inf"))
    return tl.where(same, score, float("inf"))


@triton.jit
def _store_range(bucket_ptr, i, s_mask, start, stop, BUCKETS: tl.constexpr):
    split = i.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(bucket_ptr + (split * 4 + 3) * BUCKETS, start, mask=s_mask)
    tl.store(bucket_ptr + (split * 4 + 3) * BUCKETS + 1, stop, mask=s_mask)


@triton.jit
def _store_buckets(bucket_ptr, i, s_mask, best, second, chosen, BUCKETS: tl.constexpr):
    column = tl.arange(0, BUCKETS)[None, :]
    split = i.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    bucket_ptr += split[:, None] * (4 * BUCKETS) + column
    tl.store(bucket_ptr, best.to(tl.int32, bitcast=True), mask=s_mask[:, None])
    tl.store(bucket_ptr + BUCKETS, second.to(tl.int32, bitcast=True), mask=s_mask[:, None])
    tl.store(bucket_ptr + 2 * BUCKETS, chosen + column, mask=s_mask[:, None])


@triton.jit
def _load_scores(bucket_ptr, bucket, splits, BUCKETS: tl.constexpr):
    """Least and second least scores of buckets, counted over all splits."""
    mask = bucket < splits * BUCKETS
    bucket_ptr += bucket // BUCKETS * (4 * BUCKETS) + bucket % BUCKETS
    score = tl.load(bucket_ptr, mask=mask, other=0).to(tl.float32, bitcast=True)
    second = tl.load(bucket_ptr + BUCKETS, mask=mask, other=0).to(tl.float32, bitcast=True)
    return tl.where(mask, score, float("inf")), tl.where(mask, second, float("inf"))


@triton.jit(do_not_specialize=["first_row", "N", "M"])
def knn_sorted_search_kernel(
    s_ptr,  # (N, D)
    t_ptr,  # (M, D), in the order of the labels if ORDERED
    low_ptr,  # (N,): the first position that a row compares with
    high_ptr,  # (N,): the position after the last
    s_order_ptr,  # (N,): row of each position
    t_order_ptr,  # (M,)
    squares_ptr,  # (M,), from `knn_norm_kernel`
    # (rows, splits, 4, BUCKETS), bits of float32 and int32: the least scores, inf if the bucket is
    # empty, the second least, positions of the least in the sorted bank, and the split's first
    # position and that after its last
    bucket_ptr,
    first_row,  # position of the first student row
    N,
    M,
    D,
    stride_s,
    stride_t,
    ORDERED: tl.constexpr,
    BUCKETS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHAIN: tl.constexpr,  # features that the tensor cores sum: see `score_rounding`
    WIDEN: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    s_mask = first_row + i < N
    s_row = tl.load(s_order_ptr + first_row + i, mask=s_mask, other=0)
    low = tl.load(low_ptr + s_row, mask=s_mask, other=0)
    high = tl.load(high_ptr + s_row, mask=s_mask, other=0)
    # The range of the bank for these rows, divided among the splits.
    compares = s_mask & (low < high)
    begin = tl.min(tl.where(compares, low, M), axis=0) // BLOCK_M * BLOCK_M  # for wide loads
    end = tl.max(tl.where(compares, high, 0), axis=0)
    share = tl.cdiv(tl.cdiv(end - begin, tl.num_programs(1)), BLOCK_M) * BLOCK_M
    start = begin + tl.program_id(1) * share
    stop = tl.minimum(start + share, end)
    _store_range(bucket_ptr, i, s_mask, start, stop, BUCKETS)
    # All rows compare with the positions between.
    common_low, common_high = tl.max(low, axis=0), tl.min(tl.where(s_mask, high, M), axis=0)

    best = tl.full((BLOCK_N, BUCKETS), float("inf"), tl.float32)
    second = tl.full((BLOCK_N, BUCKETS), float("inf"), tl.float32)
    chosen = tl.zeros((BLOCK_N, BUCKETS), tl.int32)
    # One loop over tiles and features, so that a tile's end waits for no load of the next.
    steps = tl.cdiv(D, BLOCK_D)
    product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    chain = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(0, tl.cdiv(tl.maximum(stop - start, 0), BLOCK_M) * steps):
        first = start + step // steps * BLOCK_M
        d = step % steps * BLOCK_D + tl.arange(0, BLOCK_D)
        # Rows without a score are any of the bank's, and of the student's: masks cost instructions.
        j = tl.minimum(first + tl.arange(0, BLOCK_M), stop - 1)
        t_row = _rows(t_order_ptr, j, True, not ORDERED)
        inside = (d < D)[None, :]
        s = tl.load(s_ptr + s_row[:, None] * stride_s + d[None, :], mask=inside, other=0.0)
        t = tl.load(t_ptr + t_row[:, None] * stride_t + d[None, :], mask=inside, other=0.0)
        if WIDEN:
            s, t = s.to(tl.float32), t.to(tl.float32)
        if CHAIN > BLOCK_D:
            if (step % steps > 0) & (step % steps % (CHAIN // BLOCK_D) == 0):
                product += chain
                chain = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            chain = tl.dot(s, tl.trans(t), chain, input_precision=PRECISE)
        else:
            # A difference: the compiler would move a sum into the tensor core, which rounds more.
            product -= tl.dot(s, tl.trans(t), input_precision=PRECISE)
        if step % steps == steps - 1:
            position = first + tl.arange(0, BLOCK_M)
            squares = tl.load(squares_ptr + position, mask=position < stop, other=-float("inf"))
            score = _scores(product + chain if CHAIN > BLOCK_D else -product, squares)
            usual = (squares > -float("inf")) & (squares < float("inf"))
            is_usual = tl.min(usual.to(tl.int32), axis=0) > 0
            if is_usual & (first >= common_low) & (first + BLOCK_M <= common_high):
                best, second, chosen = _collect(score, first, best, second, chosen)
            else:
                same = (position[None, :] >= low[:, None]) & (position[None, :] < high[:, None])
                score = _matching(score, squares, same & (squares != -float("inf"))[None, :])
                best, second, chosen = _collect(score, first, best, second, chosen)
            product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            chain = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)

    _store_buckets(bucket_ptr, i, s_mask, best, second, chosen, BUCKETS)


@triton.jit(do_not_specialize=["first_row", "N", "M", "product_splits", "ignore_index"])
def knn_search_kernel(
    s_ptr,  # (N, D), unless FROM_PRODUCTS
    t_ptr,  # (M, D)
    low_ptr,  # (N,): the first label that a row compares with
    high_ptr,  # (N,): the last label
    labels_ptr,  # (M,)
    product_ptr,  # (product_splits, N, M), if FROM_PRODUCTS
    squares_ptr,  # (product_splits, M)
    bucket_ptr,  # (rows, splits, 4, BUCKETS), as in `knn_sorted_search_kernel`
    first_row,
    N,
    M,
    D,
    stride_s,
    stride_t,
    product_splits,
    ignore_index,
    FROM_PRODUCTS: tl.constexpr,
    BUCKETS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    s_mask = first_row + i < N
    s_row = (first_row + i).to(tl.int64)
    low = tl.load(low_ptr + s_row, mask=s_mask, other=0)
    high = tl.load(high_ptr + s_row, mask=s_mask, other=0)

    # The bank is divided among the splits.
    share = tl.cdiv(tl.cdiv(M, tl.num_programs(1)), BLOCK_M) * BLOCK_M
    start = tl.program_id(1) * share
    stop = tl.minimum(start + share, M)
    _store_range(bucket_ptr, i, s_mask, start, stop, BUCKETS)

    best = tl.full((BLOCK_N, BUCKETS), float("inf"), tl.float32)
    second = tl.full((BLOCK_N, BUCKETS), float("inf"), tl.float32)
    chosen = tl.zeros((BLOCK_N, BUCKETS), tl.int32)
    if not FROM_PRODUCTS:
        j, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        t_offsets = j[:, None] * tl.cast(stride_t, tl.int32) + d[None, :]  # few registers
        s_ptr += s_row[:, None] * stride_s + d[None, :]
        mask = (start + j < stop)[:, None] & (d < D)[None, :]
        t = tl.load(t_ptr + tl.cast(start, tl.int64) * stride_t + t_offsets, mask=mask, other=0.0)
    for first in range(start, stop, BLOCK_M):
        product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        if FROM_PRODUCTS:
            j = first + tl.arange(0, BLOCK_M)
            squares = tl.zeros((BLOCK_M,), tl.float32)
            for first_split in range(0, product_splits, SPLITS_AT_ONCE):
                split = first_split + tl.arange(0, SPLITS_AT_ONCE)
                there = (split < product_splits)[:, None] & (j < stop)[None, :]
                offsets = (split[:, None, None] * N + s_row[None, :, None]) * M + j[None, None, :]
                inside = there[:, None, :] & s_mask[None, :, None]
                product += tl.sum(tl.load(product_ptr + offsets, mask=inside, other=0.0), axis=0)
                part = tl.load(squares_ptr + split[:, None] * M + j[None, :], mask=there, other=0.0)
                squares += tl.sum(part, axis=0)
        else:
            partial = tl.zeros((BLOCK_M, BLOCK_D // 8), tl.float32)
            for done in range(0, D, BLOCK_D):
                # The next tile is loaded before this one is used.
                following, after = first, done + BLOCK_D
                if after >= D:
                    following, after = first + BLOCK_M, 0
                next_ptr = t_ptr + tl.cast(following, tl.int64) * stride_t + after
                mask = (following + j < stop)[:, None] & (after + d < D)[None, :]
                next_t = tl.load(next_ptr + t_offsets, mask=mask, other=0.0)
                there = s_mask[:, None] & (done + d < D)[None, :]
                s = tl.load(s_ptr + done, mask=there, other=0.0)
                wide = tl.reshape(t.to(tl.float32), (BLOCK_M, BLOCK_D // 8, 8))
                partial += tl.sum(wide * wide, axis=2)
                if WIDEN:
                    s, t = s.to(tl.float32), t.to(tl.float32)
                # A difference: the compiler would move a sum into the tensor core, which rounds
                # more.
                product -= tl.dot(s, tl.trans(t), input_precision=PRECISE)
                t = next_t
            product, squares = -product, tl.sum(partial, axis=1)
        position = first + tl.arange(0, BLOCK_M)
        labels = tl.load(labels_ptr + position, mask=position < stop, other=0)
        inside = (position < stop) & (labels != ignore_index)
        same = (labels[None, :] >= low[:, None]) & (labels[None, :] <= high[:, None])
        score = _matching(_scores(product, squares), squares, same & inside[None, :])
        best, second, chosen = _collect(score, first, best, second, chosen)

    _store_buckets(bucket_ptr, i, s_mask, best, second, chosen, BUCKETS)


@triton.jit
def _distances(s_ptr, t_ptr, t_row, mask, D, stride_t, BLOCK_D: tl.constexpr):
    """‖s - t‖² of some rows of the bank, in float64: finite for all finite s and t.

    Equal rows have bitwise equal distances.
    """
    distance = tl.zeros(t_row.shape, tl.float64)
    t_start = t_row.to(tl.int64) * stride_t
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        s = tl.load(s_ptr + d, mask=d < D, other=0.0).to(tl.float64)
        t = tl.load(
            t_ptr + t_start[:, None] + d[None, :], mask=mask[:, None] & (d < D)[None, :], other=0.0
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
    """`_insert` for one student row, ordered by (distance, row); inf is never inserted."""
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
    """Store the k nearest, the lower row first if equal; return their sum and the k-th distance."""
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


@triton.jit(do_not_specialize=["first_row", "M", "k", "splits", "ignore_index"])
def knn_settle_kernel(
    s_ptr,  # (N, D)
    t_ptr,  # (M, D)
    low_ptr,  # (N,), as in `knn_search_kernel`
    high_ptr,  # (N,)
    labels_ptr,  # (M,)
    s_order_ptr,  # (N,)
    t_order_ptr,  # (M,)
    bucket_ptr,  # (rows, splits, 4, BUCKETS), as in `knn_sorted_search_kernel`
    count_ptr,  # (): the losses are divided by it, if at least one; or None
    loss_ptr,  # (N,)
    factor_ptr,  # (N,): of Σ_k (student - neighbour_k) in the gradient
    nearest_ptr,  # (N, k): rows of the bank, -1 where there is none
    first_row,
    M,
    D,
    k,
    stride_s,
    stride_t,
    splits,
    ignore_index,
    rounding,  # see `score_rounding`
    scale,  # 1 / D
    SORTED: tl.constexpr,
    BUCKETS: tl.constexpr,
    KEEP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = _rows(s_order_ptr, first_row + program, True, SORTED)
    slot = tl.arange(0, KEEP)
    bucket_ptr += program * splits * (4 * BUCKETS)
    best = tl.full((1, KEEP), float("inf"), tl.float32)
    chosen = tl.zeros((1, KEEP), tl.int32)
    second = tl.full((WIDTH,), float("inf"), tl.float32)
    for first in range(0, splits * BUCKETS, WIDTH):
        numbers = first + tl.arange(0, WIDTH)
        score, following = _load_scores(bucket_ptr, numbers, splits, BUCKETS)
        second = tl.minimum(second, following)
        best, chosen = _insert(score[None, :], first, best, chosen, WIDTH, KEEP)
    best = tl.reshape(best, (KEEP,))
    mask = best < float("inf")
    chosen = tl.reshape(chosen, (KEEP,))
    place = (chosen // BUCKETS * 4 + 2) * BUCKETS + chosen % BUCKETS
    position = tl.load(bucket_ptr + place, mask=mask, other=0)
    chosen = _rows(t_order_ptr, position, mask, SORTED).to(tl.int32)

    s_ptr += row * stride_s
    distance = _distances(s_ptr, t_ptr, chosen, mask, D, stride_t, BLOCK_D)
    finite = distance < float("inf")
    broken = tl.max((mask & ~finite).to(tl.int32), axis=0)
    distance = tl.where(mask & finite, distance, float("inf"))
    total, kth = _choose(distance, chosen, nearest_ptr, row, k)

    # The proof of `fastkd.losses.neighbours`; it fails for scores that overflow.
    square = _squared_norm(s_ptr, D, KEEP * BLOCK_D)
    norm = tl.sqrt(square.to(tl.float32))
    reach = norm + tl.sqrt(kth.to(tl.float32))
    size = reach * (2 * norm + reach)
    limit = (kth - square).to(tl.float32) + rounding * size + D * 2.0**-122
    limit = tl.where(size < FAR, limit, float("inf"))
    worst, second_least = tl.max(best, axis=0), tl.min(second, axis=0)
    rejected = tl.minimum(worst, second_least)  # no row outside the candidates has a lower score
    if (broken == 0) & (rejected < float("inf")) & (rejected <= limit):
        # Rows within the bound that are no candidates: the first of a bucket, or all of a bucket
        # whose second is within too.
        low, high = tl.load(low_ptr + row), tl.load(high_ptr + row)
        nearest = distance
        chosen = tl.where(nearest < float("inf"), chosen, LAST - slot)  # distinct
        for first in range(0, splits * BUCKETS, WIDTH):
            numbers = first + tl.arange(0, WIDTH)
            score, second = _load_scores(bucket_ptr, numbers, splits, BUCKETS)
            is_full = (second <= limit) & (second < float("inf"))
            others = (score <= limit) & (score >= worst) & (score < float("inf"))
            bucket = tl.min(tl.where(is_full | others, numbers, LAST), axis=0)
            while bucket < LAST:
                split_ptr = bucket_ptr + bucket // BUCKETS * (4 * BUCKETS)
                nearest_place = tl.load(split_ptr + 2 * BUCKETS + bucket % BUCKETS)
                t_row = _rows(t_order_ptr, nearest_place, True, SORTED).to(tl.int32)
                is_known = tl.max((chosen == t_row).to(tl.int32), axis=0) > 0
                begin, end = nearest_place, nearest_place + 1
                if tl.max((is_full & (numbers == bucket)).to(tl.int32), axis=0) > 0:
                    begin = tl.load(split_ptr + 3 * BUCKETS) + bucket % BUCKETS
                    end = tl.load(split_ptr + 3 * BUCKETS + 1)
                for at in range(begin, end, KEEP * BUCKETS):
                    j = at + slot * BUCKETS
                    labels = tl.load(labels_ptr + j, mask=j < end, other=0)
                    mask = (j < end) & (labels != ignore_index) & (labels == labels)
                    if SORTED:
                        mask = mask & (j >= low) & (j < high)
                    else:
                        mask = mask & (labels >= low) & (labels <= high)
                    mask = mask & ~(is_known & (j == nearest_place))
                    rows = _rows(t_order_ptr, j, mask, SORTED).to(tl.int32)
                    distance = _distances(s_ptr, t_ptr, rows, mask, D, stride_t, BLOCK_D)
                    finite = distance < float("inf")
                    broken = tl.maximum(broken, tl.max((mask & ~finite).to(tl.int32), axis=0))
                    distance = tl.where(mask & finite, distance, float("inf"))
                    nearest, chosen = _insert_exact(distance, rows, nearest, chosen)
                remaining = (is_full | others) & (numbers > bucket)
                bucket = tl.min(tl.where(remaining, numbers, LAST), axis=0)
        total, kth = _choose(nearest, chosen, nearest_ptr, row, k)

    if count_ptr is not None:
        scale /= tl.maximum(tl.load(count_ptr), 1).to(tl.float32)
    nan = tl.where(broken > 0, float("nan"), 0.0)
    # No division in float64: it is a function call that spills registers.
    tl.store(loss_ptr + row, (total * scale).to(tl.float32) + nan)
    tl.store(factor_ptr + row, 2.0 * scale + nan)


@triton.jit(do_not_specialize=["k", "stride_dloss"])
def knn_gradient_kernel(
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
        mask = (d < D) & (neighbour >= 0)
        t = tl.load(t_ptr + neighbour * stride_t + d, mask=mask, other=0.0).to(tl.float32)
        total += tl.where(neighbour >= 0, s - t, 0.0)
    scale = tl.load(factor_ptr + row) * tl.load(dloss_ptr + row * stride_dloss)
    tl.store(dx_ptr + row * D + d, total * scale, mask=d < D)


def _forward_shapes(student, teacher, low, high, labels, count, k, ignore_index, is_sum):
    factor = student.new_empty(student.shape[0], dtype=torch.float32)
    losses = factor.new_empty(() if is_sum else factor.shape)
    return losses, factor, factor.new_empty(student.shape[0], k, dtype=torch.int32)


@operator(_forward_shapes)
def knn_forward(
    student: Tensor,
    teacher: Tensor,
    low: Tensor,
    high: Tensor | None,
    labels: Tensor,
    count: Tensor | None,
    k: int,
    ignore_index: int,
    is_sum: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of each row (N,), or their sum, the gradient's factors (N,) and the neighbours (N, k).

    Rows (N, D) and (M, D) have stride 1 along D. ``low``, ``high`` and ``labels`` come from
    `fastkd._core.label_matching.label_ranges`. Losses and factors are divided by ``count``, if
    given.
    """
    (N, D), M = student.shape, teacher.shape[0]
    sizes = (D, student.stride(0), teacher.stride(0))
    from_products = D >= FEATURES_TO_SPLIT and N * M <= PAIRS_IN_MEMORY
    is_sorted = N >= ROWS_TO_SORT and M >= BANK_TO_SORT and not from_products
    from_products |= not is_sorted and sizes[2] >= FAR_APART
    high = low if high is None else high
    itemsize, aligned = student.element_size(), is_aligned(*sizes)
    capability = launch.capability(student.device)
    s_order = t_order = product = squares = None
    features, product_splits, chain, bank = D, 0, 64, teacher
    blocks = FROM_PRODUCT_BLOCKS
    if is_sorted:
        low, high, labels, s_order, t_order = _sort(low, high, labels)
        bank, squares = _ordered(teacher, labels, t_order, ignore_index)
        blocks = sorted_blocks(itemsize, aligned, capability)
        chain = min(D, blocks["CHAIN"])
    elif from_products:
        product, squares, features = _products(student, teacher, sizes)
        product_splits = len(product)
    else:
        blocks = search_blocks(M, itemsize, aligned, capability)
        chain = blocks["BLOCK_D"]
    rows = (low, high, labels, s_order, t_order, product, squares)
    loss = student.new_empty(N, dtype=torch.float32)
    factor, nearest = torch.empty_like(loss), loss.new_empty(N, k, dtype=torch.int32)
    for first in range(0, N, ROWS_AT_ONCE):
        found = _search(
            student, bank, bank is not teacher, sizes, rows, blocks, first, ignore_index
        )
        launch_kernel(
            knn_settle_kernel,
            (len(found),),
            student,
            teacher,
            low,
            high,
            labels,
            s_order,
            t_order,
            found,
            count,
            loss,
            factor,
            nearest,
            first,
            M,
            D,
            k,
            *sizes[1:],
            found.shape[1],
            ignore_index,
            score_rounding(features, product_splits, itemsize, chain),
            1 / D,
            SORTED=is_sorted,
            BUCKETS=BUCKETS,
            **settle_blocks(k, found.shape[1], aligned, from_products),
        )
    return summed(loss, None, 1) if is_sum else loss, factor, nearest


def _sort(low: Tensor, high: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Range of each row in the sorted bank, the bank's sorted labels, and both orders."""
    ordered, t_order = labels.sort(stable=True)
    bounds = ordered
    if ordered.is_floating_point():  # a binary search fails among NaNs
        bounds = ordered.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    first = torch.searchsorted(bounds, low, out_int32=True)
    last = torch.searchsorted(bounds, high, right=True, out_int32=True)
    return first, last, ordered, first.argsort(stable=True), t_order


def _ordered(
    teacher: Tensor, labels: Tensor, order: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The bank in this order (M, D), unless it is large, and ‖t‖² in this order (M,)."""
    M, D = teacher.shape
    is_copied = teacher.numel() * teacher.element_size() <= MOST_BYTES_TO_COPY
    bank = teacher.new_empty(M, D) if is_copied else None
    squares = teacher.new_empty(M, dtype=torch.float32)
    config = norm_blocks(teacher.element_size())
    launch_kernel(
        knn_norm_kernel,
        (cdiv(M, config["BLOCK_M"]),),
        teacher,
        labels,
        order,
        bank,
        squares,
        M,
        D,
        teacher.stride(0),
        ignore_index,
        **config,
    )
    return teacher if bank is None else bank, squares


def _products(
    student: Tensor, teacher: Tensor, sizes: tuple[int, int, int]
) -> tuple[Tensor, Tensor, int]:
    """s·t (splits, N, M) and ‖t‖² (splits, M) over splits of the features, and their size."""
    (N, D), M = student.shape, teacher.shape[0]
    config = product_blocks(student.element_size(), is_aligned(*sizes))
    tiles = cdiv(N, config["BLOCK_N"]), cdiv(M, config["BLOCK_M"])
    features = max(1024, cdiv(D * tiles[0] * tiles[1], 64 * PROGRAMS) * 64)
    splits = cdiv(D, features)
    product = student.new_empty(splits, N, M, dtype=torch.float32)
    squares = student.new_empty(splits, M, dtype=torch.float32)
    launch_kernel(
        knn_product_kernel,
        (*tiles, splits),
        student,
        teacher,
        product,
        squares,
        N,
        M,
        *sizes,
        features,
        WIDEN=_widens(student.dtype),
        **config,
    )
    return product, squares, features


def _search(
    student: Tensor,
    bank: Tensor,
    is_ordered: bool,
    sizes: tuple[int, int, int],
    rows: tuple[Tensor | None, ...],
    blocks: dict[str, int],
    first: int,
    ignore_index: int,
) -> Tensor:
    """Buckets of some rows (rows, splits, 4, BUCKETS), as in `knn_sorted_search_kernel`."""
    N, M = len(student), len(bank)
    low, high, labels, s_order, t_order, product, squares = rows
    count = min(N - first, ROWS_AT_ONCE)
    tiles, widens = cdiv(count, blocks["BLOCK_N"]), _widens(student.dtype)
    # All programs run at a time.
    splits = max(min(PROGRAMS // tiles, cdiv(M, blocks["BLOCK_M"])), 1)
    found = student.new_empty(count, splits, 4, BUCKETS, dtype=torch.int32)
    if s_order is not None:
        launch_kernel(
            knn_sorted_search_kernel,
            (tiles, splits),
            student,
            bank,
            *(low, high, s_order, t_order, squares),
            found,
            first,
            N,
            M,
            *sizes[:2],
            bank.stride(0),
            ORDERED=is_ordered,
            BUCKETS=BUCKETS,
            WIDEN=widens,
            **blocks,
        )
    else:
        launch_kernel(
            knn_search_kernel,
            (tiles, splits),
            *((student, bank) if product is None else (None, None)),
            *(low, high, labels, product, squares),
            found,
            first,
            N,
            M,
            *(sizes if product is None else (None, None, None)),
            0 if product is None else len(product),
            ignore_index,
            FROM_PRODUCTS=product is not None,
            BUCKETS=BUCKETS,
            WIDEN=product is None and widens,
            **blocks,
        )
    return found


def _widens(dtype: torch.dtype) -> bool:
    """Whether to widen bfloat16, whose bits Triton's interpreter would multiply."""
    return dtype == torch.bfloat16 and triton_interpreted()


def score_rounding(features: int, splits: int, itemsize: int, chain: int) -> float:
    """ρ of the proof in `fastkd.losses.neighbours`, for scores ‖t‖² - 2 s·t of the kernels.

    The tensor cores sum at most ``chain`` features of 2-byte inputs from zero. Products are exact.
    The tensor cores (sm_80 and later) add 4 to 16 of them at a time to the sum so far: each term
    is truncated at 2^-24 of the largest and the result at 2^-23. Terms and sums are at most
    Σ|s||t|, so n products have an error below (n/2 + 1)·2^-23 of it: at most 2^-23 per feature.
    For float32 each step of at most 32 features is summed from zero. In parts of 11 bits, products
    omit less than 25·2^-23, and at most 3·32 products of a step are added in the same way. Each
    float32 sum of chains or steps adds one rounding, each split of the features one more, the rest
    eight. ‖t‖² has fewer roundings. The bound is doubled, since the tensor cores' addition was
    observed and is not documented.
    """
    terms = chain if itemsize == 2 else 25 + 3 * 32
    sums = cdiv(features, chain if itemsize == 2 else 16)
    return 2 * (terms + sums + splits + 8) * 2.0**-23


def norm_blocks(itemsize: int) -> dict[str, int]:
    """Blocks of ‖t‖² and the copy: 16 bytes per thread, eight rows per program."""
    return {"BLOCK_M": 8, "BLOCK_D": 256 * 2 // itemsize, "num_warps": 4}


def settle_blocks(k: int, splits: int, aligned: bool, is_long: bool) -> dict[str, int]:
    """Buckets merged at a time, and features of a tile: 8 or 16 differences per thread.

    A float64 difference needs two registers, and more if each has an address; these sizes do not
    spill. Without a bound the assembler uses 56 to 128 registers and spills a few values. Few and
    long rows use four times the warps.
    """
    tile, warps = 2048 if aligned and keep(k) == 8 else 1024, 4
    if is_long:
        tile, warps = (4 if keep(k) == 8 else 2) * tile, 4 * warps
    width = 128 if splits <= 16 else 1024
    blocks = {"KEEP": keep(k), "WIDTH": width, "BLOCK_D": tile // keep(k)}
    return {**blocks, "num_warps": warps, "maxnreg": 128 if is_long else 168}


def _backward_shapes(student, teacher, nearest, factor, dloss):
    return student.new_empty(student.shape)


@operator(_backward_shapes)
def knn_backward(
    student: Tensor, teacher: Tensor, nearest: Tensor, factor: Tensor, dloss: Tensor
) -> Tensor:
    """Gradient (N, D) for the upstream gradient of the losses (N,), or of their sum."""
    N, D = student.shape
    dloss = dloss.expand(N)
    dx = student.new_empty(N, D)
    launch_kernel(
        knn_gradient_kernel,
        (N, cdiv(D, GRADIENT_BLOCKS["BLOCK_D"])),
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
        **GRADIENT_BLOCKS,
    )
    return dx
