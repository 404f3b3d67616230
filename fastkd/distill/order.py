"""The rows of an epoch, in an order in which few labels don't drown among many rows without."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastkd.analysis.model_inputs import IGNORED

# The least share of labelled rows in a batch, where nothing else is said.
LABELLED_SHARE = 0.25


def has_label(labels: Any) -> np.ndarray:
    """Which rows have one, (rows,) bool: not the class −100 or the number NaN; lists of them do."""
    try:
        numbers = np.asarray(labels, dtype=np.float64)
    except (TypeError, ValueError):  # of several lengths
        return np.ones(len(labels), dtype=bool)
    if numbers.ndim != 1:
        return np.ones(len(numbers), dtype=bool)
    return ~(np.isnan(numbers) | (numbers == IGNORED))


@dataclass(frozen=True, eq=False)
class Order:
    """Which rows each batch of an epoch reads.

    Every row is read at least once. Where fewer than ``share`` of the rows are ``labelled``
    (rows,), labelled rows are read again, all equally often or once more, so that each batch has
    this share of them: the term on labels is then not one row's noise. A batch keeps at least one
    unlabelled row. Labelled rows are spread evenly over a batch, so that processes which divide it
    into equal parts have equally many, or one more.
    """

    labelled: np.ndarray
    batch: int
    share: float = LABELLED_SHARE

    @property
    def _drawn(self) -> int:
        """Labelled rows in a full batch where they are read again; 0 where each is read once."""
        count, rows = int(self.labelled.sum()), len(self.labelled)
        # A rounding error is no row. A batch of labelled rows alone would never end the epoch.
        drawn = min(math.ceil(self.share * self.batch - 1e-9), self.batch - 1)
        enough = count >= min(self.share, drawn / self.batch) * rows
        return 0 if enough or count == 0 else drawn

    @property
    def rows(self) -> int:
        """Rows in an epoch."""
        if not self._drawn:
            return len(self.labelled)
        return sum(sum(part) for part in self._parts())

    def _parts(self) -> Sequence[tuple[int, int]]:
        """Unlabelled and labelled rows of each batch."""
        without, drawn = int((~self.labelled).sum()), self._drawn
        full, rest = divmod(without, self.batch - drawn)
        last = [(rest, math.ceil(rest * drawn / (self.batch - drawn)))] if rest else []
        return [(self.batch - drawn, drawn)] * full + last

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """The numbers of the rows, batch after batch."""
        if not self._drawn:
            return rng.permutation(len(self.labelled))
        parts = self._parts()
        with_label, without = np.flatnonzero(self.labelled), np.flatnonzero(~self.labelled)
        needed = sum(drawn for _, drawn in parts)
        rounds = -(-needed // len(with_label))
        labelled = np.concatenate([rng.permutation(with_label) for _ in range(rounds)])[:needed]
        others = rng.permutation(without)
        batches, at = [], [0, 0]
        for rest, drawn in parts:
            places = (2 * np.arange(drawn) + 1) * (rest + drawn) // max(1, 2 * drawn)
            batch = np.empty(rest + drawn, dtype=np.int64)
            among = np.zeros(rest + drawn, dtype=bool)
            among[places] = True
            batch[among] = labelled[at[1] : at[1] + drawn]
            batch[~among] = others[at[0] : at[0] + rest]
            at = [at[0] + rest, at[1] + drawn]
            batches.append(batch)
        return np.concatenate(batches)
