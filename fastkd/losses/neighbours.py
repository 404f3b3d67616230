"""Nearest rows of the same label in PyTorch, and the proof that both backends choose exactly.

Matrix products of tiles give every pair the score ‖t‖² − 2 s·t = ‖s − t‖² − ‖s‖²; the k best rows
and a few more candidates are kept. **Proof of the choice.** Rounding changes a score by at most
ρ·‖t‖(2‖s‖ + ‖t‖), with ρ from the number of rounding steps, and underflow by at most u. Let d be
the distance of the k-th candidate, computed as a difference in float64. A row at least as near has
‖t‖ ≤ ‖s‖ + d = r, and so a score of at most

    limit = d² − ‖s‖² + ρ·r(2‖s‖ + r) + u.

If only the k chosen rows have a score up to the limit, the choice is proven. Else differences in
float64 decide between all rows within the limit. Those are among the candidates if the worst
candidate is beyond the limit, as all rejected rows are then too; otherwise every row of the label
is compared. If d is computed from the k-th score instead, the error of that score is added to the
limit. Of equal distances the lower row is chosen.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fastkd._core.numerics import autocast_off, values_readable, working_dtype
from fastkd._core.operator import operator

# Elements of one block of rows: about 4 MB in fp32, so that a block and its distances stay in the
# cache and the full (N, M) matrix is never allocated.
BLOCK_ELEMENTS = 2**20
MAX_BLOCK_ROWS = 1024

# A label with this many rows gets blocks of its own: in a mixed block each row is compared with the
# bank rows of the other labels too.
ROWS_OF_OWN = 256

# Elements of one block of pairs of rows; several blocks exist at a time.
PAIR_ELEMENTS = 2**18

# Up to this product of rows, bank and features, comparing all pairs is cheaper than the search.
SMALL_PROBLEM = 2**20

# With fewer rows, centring the bank costs more than the few comparisons that it saves.
MIN_ROWS_TO_CENTRE = 256

# Features of one product: the rounding error of a longer sum exceeds most differences of distances.
PRODUCT_FEATURES = 512

# Candidates beyond the k-th, compared by direct difference.
EXTRA_CANDIDATES = 8

_Rows = slice | Tensor  # a range of rows, or row numbers


def _shapes(student, teacher, low, high, labels, k, ignore_index):
    dtype = working_dtype(student)
    return student.new_empty(student.shape[0], dtype=dtype), student.new_empty(
        student.shape, dtype=dtype
    )


# An operator, so that a graph doesn't unroll the loops over blocks, and values can be read.
@operator(_shapes)
def neighbour_losses(
    student: Tensor,
    teacher: Tensor,
    low: Tensor,
    high: Tensor | None,
    labels: Tensor,
    k: int,
    ignore_index: int,
) -> tuple[Tensor, Tensor]:
    """Loss of each row (N,) and Σ_k (student - neighbour_k) (N, D), the gradient's direction.

    ``low``, ``high`` and ``labels`` come from `fastkd._core.label_matching.label_ranges`.
    """
    with autocast_off(student):
        search = _Search(student, teacher, low, high, labels, k, ignore_index)
        return search.losses(*search.neighbours())


class _Search:
    """Search for the nearest rows of the same label, without a matrix of all distances.

    On the CPU differences are computed only where the choice is not proven. On a GPU control flow
    must not depend on data: differences are computed for all candidates, and the products are in
    float64, which separates all distances that differ in float32. On a CPU that would cost two to
    three times as much.
    """

    def __init__(self, student, teacher, low, high, labels, k, ignore_index):
        self.student, self.teacher = student, teacher
        self.low, self.high, self.labels = low, high, labels
        self.k, self.ignore_index = k, ignore_index
        self.dtype = working_dtype(student)
        self.block_rows = min(MAX_BLOCK_ROWS, max(64, BLOCK_ELEMENTS // student.shape[1]))
        self.readable = values_readable(student)
        self.some_ignored = not self.readable or bool((labels == ignore_index).any())
        self.product_dtype = self.dtype if self.readable else torch.float64
        self.centre: Tensor | None = None
        if not self.readable or student.shape[0] >= MIN_ROWS_TO_CENTRE:
            # ‖s‖² + ‖t‖² - 2 s·t cancels less if both are near the origin.
            centre = teacher.mean(0, dtype=self.product_dtype)  # (D,)
            if not self.readable:  # nothing is proven later: short rows may not lose their digits
                shortest = torch.linalg.vector_norm(teacher, dim=1, dtype=self.product_dtype).min()
                near = torch.linalg.vector_norm(centre) <= 2 * shortest
                centre = torch.where(near, centre, 0)
            self.centre = torch.where(centre.isfinite(), centre, 0)

    def losses(self, nearest: Tensor, found: Tensor, broken: Tensor) -> tuple[Tensor, Tensor]:
        """Loss (N,) and Σ_k (student - neighbour_k) (N, D), by direct difference."""
        size, features = self.student.shape
        losses, residuals = [], []
        # A power of two, at most 1/√D: the sum of squares can't overflow where the loss doesn't.
        shrink = 0.5 ** math.ceil(math.log2(features) / 2)
        all_found = self.readable and bool(found.all())
        for part in _parts(size, max(1, PAIR_ELEMENTS // features)):
            student = self.student[part].to(self.dtype)
            for j in range(self.k):
                neighbour = self.teacher.index_select(0, nearest[part, j])
                difference = student - neighbour.to(self.dtype)
                if not all_found:
                    difference.masked_fill_(~found[part, j, None], 0)
                squares = difference.mul(shrink).square_().sum(1)
                if j == 0:
                    residual, loss = difference, squares
                else:
                    residual, loss = residual.add_(difference), loss.add_(squares)
            losses.append(loss)
            residuals.append(residual)
        loss = torch.cat(losses).div_(features * shrink**2)
        residual = torch.cat(residuals)
        if not self.readable or bool(broken.any()):
            residual.masked_fill_(broken[:, None], torch.nan)
            loss.masked_fill_(broken, torch.nan)
        return loss, residual

    def neighbours(self) -> tuple[Tensor, Tensor, Tensor]:
        """Neighbours (N, k), which exist (N, k), and rows compared with a NaN or inf (N,)."""
        size, device = self.student.shape[0], self.student.device
        if self.readable and self.student.numel() * self.teacher.shape[0] <= SMALL_PROBLEM:
            result = self.all_pairs()
            if result is not None:
                return result
        nearest = torch.zeros(size, self.k, dtype=torch.int64, device=device)
        found = torch.zeros(size, self.k, dtype=torch.bool, device=device)
        broken = torch.zeros(size, dtype=torch.bool, device=device)
        for queries, bank in self.chunks():
            nearest[queries], found[queries], broken[queries] = self.search(queries, bank)
        return nearest, found, broken

    def all_pairs(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """`neighbours` of a small problem in few steps; None where a square may overflow."""
        q, t = self.student.to(self.dtype), self.teacher.to(self.dtype)
        t_norm = torch.linalg.vector_norm(t, dim=1)
        largest = float(torch.linalg.vector_norm(q, dim=1).max() + t_norm.max())
        if not largest < math.sqrt(torch.finfo(self.dtype).max) / 2:
            return None
        same = self.same(slice(0, len(q)), slice(0, len(t)))
        d = _scores(t_norm.square_(), q, t).masked_fill_(~same, torch.inf)
        best, nearest = d.topk(min(self.k + 1, len(t)), largest=False)
        if self.k < len(t):
            slack = self.rounding(self.dtype) * largest**2 + self.underflow(self.dtype)
            unsure = best[:, self.k] - best[:, self.k - 1] <= slack  # NaN where both are missing
            if bool(unsure.any()):
                rows = unsure.nonzero().squeeze(1)
                near = d[rows] <= best[rows, self.k - 1, None] + slack
                bank = torch.arange(len(t), device=t.device)
                nearest[rows, : self.k] = self.nearest_of(rows, bank, near)
        found = best[:, : self.k] < torch.inf
        return nearest[:, : self.k], found, found.new_zeros(len(q))

    def chunks(self) -> Iterator[tuple[_Rows, _Rows]]:
        """Chunks of student rows, each with the teacher rows that may match their labels."""
        size, bank_size = self.student.shape[0], self.teacher.shape[0]
        runs: list[int] = []
        if self.readable and size > min(self.block_rows, ROWS_OF_OWN - 1):
            low, queries = self.low.sort(stable=True)
            runs = torch.unique_consecutive(low, return_counts=True)[1].tolist()
        if not runs or (size <= self.block_rows and max(runs) < ROWS_OF_OWN):
            yield from ((part, slice(0, bank_size)) for part in _parts(size, self.block_rows))
            return
        # Sorted by label, a chunk is compared only with the part of the bank around its labels.
        high = self.low if self.high is None else self.high
        labels, bank = self.labels.sort(stable=True)
        if labels.is_floating_point():  # NaNs are sorted last, where searchsorted needs numbers
            labels = labels.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        for part in _blocks(runs, self.block_rows):
            first = int(torch.searchsorted(labels, low[part][0]))
            last = int(torch.searchsorted(labels, high[queries[part]].max(), right=True))
            if first < last:
                yield queries[part], bank[first:last]

    def search(self, queries: _Rows, bank: _Rows) -> tuple[Tensor, Tensor, Tensor]:
        """`neighbours` of some rows among some of the bank."""
        q = self.rows(self.student, queries)  # (Q, D)
        q_squared = _squared_norm(q)
        keep = self.k + EXTRA_CANDIDATES
        best = q.new_full((len(q), keep), torch.inf)
        chosen = torch.zeros_like(best, dtype=torch.int64)
        for block in _split(bank, self.block_rows):
            score = self.scores(q, q_squared, block)
            score.masked_fill_(~self.same(queries, block), torch.inf)
            score, column = self.smallest(score, keep)
            column = column + block.start if isinstance(block, slice) else block[column]
            best, order = self.smallest(torch.cat([best, score], 1), keep)
            chosen = torch.cat([chosen, column], 1).gather(1, order)

        found = best[:, : self.k] < torch.inf
        broken = best[:, 0] == -torch.inf
        if not self.readable or not bool(q_squared.isfinite().all()):
            broken |= ~q.isfinite().all(1)
        if self.readable:
            self.settle(queries, bank, q_squared, best, chosen, broken)
        else:
            chosen = self.reorder(queries, best, chosen)
        return chosen[:, : self.k], found, broken & found[:, 0]

    def smallest(self, score: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The n smallest of each row and their columns; without `settle` the first of equals."""
        if self.readable:
            return score.topk(min(n, score.shape[1]), largest=False)
        score, column = score.sort(dim=1, stable=True)
        return score[:, :n], column[:, :n]

    def scores(self, q: Tensor, q_squared: Tensor, bank: _Rows) -> Tensor:
        """‖q - t‖² - ‖q‖² (Q, M) for a block of the bank; -inf where t holds a NaN or inf."""
        t = self.rows(self.teacher, bank)
        t_squared = _squared_norm(t)
        if self.readable and bool((2 * t_squared.max() + q_squared.max()).isfinite()):
            return _scores(t_squared, q, t)
        # In float64, since 2 q·t may overflow where the score doesn't. Finite rows whose score
        # overflows stay candidates, at the largest distance.
        t = t.double()
        score = _scores(_squared_norm(t), q.double(), t)
        largest = torch.finfo(self.product_dtype).max
        score.nan_to_num_(largest, largest, -largest)
        if self.product_dtype != torch.float64:
            score = score.clamp_(-largest, largest).to(self.product_dtype)
        return score.masked_fill_(~t.isfinite().all(1), -torch.inf)

    def settle(
        self,
        queries: _Rows,
        bank: _Rows,
        q_squared: Tensor,
        best: Tensor,
        chosen: Tensor,
        broken: Tensor,
    ) -> None:
        """Choose again, in place, where rounding could have changed the choice."""
        following, last = best[:, self.k], best[:, -1]
        limit = self.limit(q_squared, best[:, self.k - 1])
        unsure = ~((following > limit) | (following == torch.inf) | broken)
        if not bool(unsure.any()):
            return
        # If the last candidate is beyond the limit, the neighbours are among the candidates.
        few = (last > limit) | (last == torch.inf)
        index = (unsure & few).nonzero().squeeze(1)
        rows = index + queries.start if isinstance(queries, slice) else queries[index]
        # Ascending, here and below, so that the lower row comes first among equals.
        candidates, order = chosen[index].sort(1)
        near = (best <= limit[:, None])[index].gather(1, order)
        chosen[index, : self.k] = self.nearest_of(rows, candidates, near)

        index = (unsure & ~few).nonzero().squeeze(1)
        rows = index + queries.start if isinstance(queries, slice) else queries[index]
        if isinstance(bank, slice):
            bank = torch.arange(bank.stop, device=rows.device)
        else:
            bank = bank.sort().values
        for part in _parts(len(rows), max(1, BLOCK_ELEMENTS // (2 * len(bank)))):
            chosen[index[part], : self.k] = self.exact(rows[part], bank)

    def rounding(self, dtype: torch.dtype) -> float:
        """Bound of the rounding error of two scores, relative to (‖q‖ + ‖t‖)²."""
        features = self.student.shape[1]
        sums = min(features, PRODUCT_FEATURES) + features // PRODUCT_FEATURES
        return (sums + 8) * torch.finfo(dtype).eps

    def underflow(self, dtype: torch.dtype) -> float:
        """Bound of the underflow error of two scores."""
        return 8 * self.student.shape[1] * torch.finfo(dtype).tiny

    def limit(self, q_squared: Tensor, kth: Tensor) -> Tensor:
        """Largest score that a row as near as the k-th can have, with its rounding error."""
        # The largest norm of such a row.
        reach = q_squared.sqrt() + (kth + q_squared).clamp_min(0).sqrt()
        rounding = 2 * self.rounding(kth.dtype) * (q_squared + reach.square())
        largest = torch.finfo(kth.dtype).max
        return (kth + rounding + self.underflow(kth.dtype)).nan_to_num_(largest, largest)

    def exact(self, queries: Tensor, bank: Tensor) -> Tensor:
        """The k nearest (Q, k), by differences of all rows that float64 scores don't exclude."""
        q = self.student[queries].double()
        d = q.new_empty(len(queries), len(bank))
        for part in _parts(len(bank), self.block_rows):
            t = self.teacher[bank[part]].double()
            d[:, part] = _scores(_squared_norm(t), q, t)
        largest = torch.finfo(d.dtype).max
        d.nan_to_num_(largest, largest).masked_fill_(~self.same(queries, bank), torch.inf)
        kth = d.topk(self.k, largest=False).values[:, -1]
        return self.nearest_of(queries, bank, d <= self.limit(_squared_norm(q), kth)[:, None])

    def nearest_of(self, queries: Tensor, bank: Tensor, near: Tensor) -> Tensor:
        """The k nearest (Q, k) among the rows of ``bank`` (Q, M) that are ``near``, by differences.

        At least k rows must be near. Of equal distances the first is chosen.
        """
        bank = bank.expand_as(near)
        row, column = near.nonzero(as_tuple=True)
        queries, others = queries[row], bank[row, column]
        d = torch.full(near.shape, torch.inf, dtype=torch.float64, device=near.device)
        largest = torch.finfo(d.dtype).max
        for part in _parts(len(row), max(1, PAIR_ELEMENTS // self.student.shape[1])):
            difference = self.student[queries[part]].double() - self.teacher[others[part]]
            d[row[part], column[part]] = difference.square_().sum(1).clamp_max_(largest)
        return bank.gather(1, _first(d, self.k))

    def reorder(self, queries: _Rows, best: Tensor, chosen: Tensor) -> Tensor:
        """Candidates (Q, keep) sorted by distance, from differences; of equals the lower first."""
        chosen, order = chosen.sort(1)
        missing = best.gather(1, order) == torch.inf
        q = self.student[queries].double()
        distance = []
        for part in _parts(len(q), max(1, BLOCK_ELEMENTS // (chosen.shape[1] * q.shape[1]))):
            t = self.teacher[chosen[part]]  # (b, keep, D)
            distance.append((q[part, None] - t).square_().sum(2))
        # Only missing rows may be inf, no square that overflows and no NaN.
        largest = torch.finfo(torch.float64).max
        direct = torch.cat(distance) if distance else best.double()
        direct = direct.nan_to_num_(largest, largest).masked_fill_(missing, torch.inf)
        return chosen.gather(1, direct.argsort(dim=1, stable=True))

    def same(self, queries: _Rows, bank: _Rows) -> Tensor:
        """Which labels match (Q, M)."""
        labels, low = self.labels[bank], self.low[queries][:, None]
        if self.high is None:
            same = labels == low
        else:
            same = (labels >= low) & (labels <= self.high[queries][:, None])
        return same & (labels != self.ignore_index) if self.some_ignored else same

    def rows(self, x: Tensor, index: _Rows) -> Tensor:
        """Rows of ``x`` in the dtype of the products, minus the bank's mean if it is used."""
        x = x[index].to(self.product_dtype)
        return x if self.centre is None else x - self.centre


def _first(d: Tensor, k: int) -> Tensor:
    """Columns of the k smallest (Q, k), the first of equals; overwrites ``d``."""
    chosen = [d.argmin(1, keepdim=True)]
    while len(chosen) < k:
        d.scatter_(1, chosen[-1], torch.inf)
        chosen.append(d.argmin(1, keepdim=True))
    return torch.cat(chosen, 1)


def _scores(t_squared: Tensor, q: Tensor, t: Tensor) -> Tensor:
    """‖t‖² - 2 q·t (Q, M)."""
    first, *more = zip(q.split(PRODUCT_FEATURES, 1), t.split(PRODUCT_FEATURES, 1), strict=True)
    score = torch.addmm(t_squared, first[0], first[1].T, alpha=-2)
    for a, b in more:
        score.addmm_(a, b.T, alpha=-2)
    return score


def _squared_norm(x: Tensor) -> Tensor:
    # In parts: one long sum would lose digits.
    norms = [torch.linalg.vector_norm(part, dim=1) for part in x.split(4096, dim=1)]
    return sum((norm.square_() for norm in norms[1:]), norms[0].square_())


def _split(index: _Rows, step: int) -> Sequence[_Rows]:
    """``index`` in parts of at most ``step`` rows."""
    if isinstance(index, slice):
        return _parts(index.stop, step)
    return list(index.split(step))


def _blocks(runs: list[int], most: int) -> Iterator[slice]:
    """Slices of at most ``most`` sorted rows, cut where a label with many rows begins or ends."""
    bounds, end = [0], 0
    for run in runs:
        if run >= ROWS_OF_OWN:
            bounds.append(end)
        end += run
        if run >= ROWS_OF_OWN or end - bounds[-1] >= most:
            bounds.append(end)
    for start, stop in itertools.pairwise([*bounds, end]):
        step = math.ceil((stop - start) / max(math.ceil((stop - start) / most), 1))
        yield from (slice(i, min(i + step, stop)) for i in range(start, stop, max(step, 1)))


def _parts(size: int, step: int) -> list[slice]:
    """Slices of at most ``step`` that cover 0..size."""
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]
