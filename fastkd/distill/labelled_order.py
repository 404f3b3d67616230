"""Row order of an epoch with a minimum fraction of labelled rows in each batch."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastkd.models.inputs import IGNORED

# Default minimum fraction of labelled rows in a batch.
LABELLED_SHARE = 0.25
# Batches among which rows are sorted by length, as in transformers.
WINDOW = 50


def has_label(labels: Any) -> np.ndarray:
    """Mask (rows,) of labelled rows: neither the class −100 nor NaN. A list is always a label."""
    try:
        numbers = np.asarray(labels, dtype=np.float64)
    except (TypeError, ValueError):  # lists of several lengths
        return np.ones(len(labels), dtype=bool)
    if numbers.ndim != 1:
        return np.ones(len(numbers), dtype=bool)
    return ~(np.isnan(numbers) | (numbers == IGNORED))


@dataclass(frozen=True, eq=False)
class LabelledOrder:
    """Row order of an epoch in which every batch has a minimum fraction of labelled rows.

    Every row is read at least once. If the fraction of ``labelled`` rows (rows,) is below
    ``share``, labelled rows are repeated until each batch has this fraction, so that the label
    loss is not computed from one or two rows. The numbers of repetitions differ by at most one.
    A batch keeps at least one unlabelled row. Labelled rows are spread evenly over a batch: its
    equal shards, one for each process, differ by at most one labelled row. With ``lengths`` (rows,)
    a batch has rows of similar length.
    """

    labelled: np.ndarray
    batch: int
    share: float = LABELLED_SHARE
    lengths: np.ndarray | None = None

    @functools.cached_property
    def batch_sizes(self) -> list[tuple[int, int]]:
        """Numbers of unlabelled and labelled rows of each batch; empty if none are repeated."""
        count, rows = int(self.labelled.sum()), len(self.labelled)
        # 1e-9: a rounding error must not add a row. An epoch ends when all unlabelled rows are
        # read, so a batch needs at least one.
        drawn = min(math.ceil(self.share * self.batch - 1e-9), self.batch - 1)
        if count == 0 or count >= min(self.share, drawn / self.batch) * rows:
            return []
        full, rest = divmod(rows - count, self.batch - drawn)
        last = [(rest, math.ceil(rest * drawn / (self.batch - drawn)))] if rest else []
        return [(self.batch - drawn, drawn)] * full + last

    @property
    def rows(self) -> int:
        """Rows in an epoch."""
        return sum(map(sum, self.batch_sizes)) or len(self.labelled)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Row numbers, batch after batch."""
        order = self._with_repeats(rng) if self.batch_sizes else rng.permutation(self.rows)
        if self.lengths is None:
            return order
        for start in range(0, len(order), WINDOW * self.batch):
            rows = order[start : start + WINDOW * self.batch]
            for kind in (True, False):  # labelled rows stay spread over the batches
                places = np.flatnonzero(self.labelled[rows] == kind)
                of_kind = rows[places]
                rows[places] = of_kind[np.argsort(self.lengths[of_kind], kind="stable")]
            full = len(rows) // self.batch * self.batch
            rng.shuffle(rows[:full].reshape(-1, self.batch))
        return order

    def _with_repeats(self, rng: np.random.Generator) -> np.ndarray:
        """Rows in random order, with labelled rows repeated."""
        with_label, without = np.flatnonzero(self.labelled), np.flatnonzero(~self.labelled)
        needed = sum(drawn for _, drawn in self.batch_sizes)
        rounds = -(-needed // len(with_label))
        labelled = np.concatenate([rng.permutation(with_label) for _ in range(rounds)])[:needed]
        unlabelled = rng.permutation(without)
        batches, at = [], [0, 0]
        for rest, drawn in self.batch_sizes:
            positions = (2 * np.arange(drawn) + 1) * (rest + drawn) // max(1, 2 * drawn)
            batch = np.empty(rest + drawn, dtype=np.int64)
            is_labelled = np.zeros(rest + drawn, dtype=bool)
            is_labelled[positions] = True
            batch[is_labelled] = labelled[at[1] : at[1] + drawn]
            batch[~is_labelled] = unlabelled[at[0] : at[0] + rest]
            at = [at[0] + rest, at[1] + drawn]
            batches.append(batch)
        return np.concatenate(batches)
