"""Losses of rerankers, which compare the scores of a query's documents within their list.

Labels (R, 3) of R pairs of query and document have the number of the pair's list, whether the
document is relevant, and its score, NaN without one.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastkd._core.numerics import upcast
from fastkd.lm.soft_targets import DivergenceWord, soft_target_loss

COLUMNS = 3
FAR = -3e4  # far below any score, and finite in float16


@dataclass(frozen=True)
class Lists:
    """The lists of R pairs: ``same`` (R, R), whether two are of one list; ``relevant`` and
    ``scores`` (R,)."""

    same: Tensor
    relevant: Tensor
    scores: Tensor

    @classmethod
    def of(cls, labels: Any, logits: Any) -> "Lists | None":
        """The lists in the ``labels`` of a head with one output; None for other labels."""
        if not (isinstance(labels, Tensor) and isinstance(logits, Tensor)):
            return None
        if labels.shape[1:] != (COLUMNS,) or logits.numel() != len(labels):
            return None
        number, relevant, scores = labels.unbind(1)
        return cls(number[:, None] == number, relevant > 0, scores)

    @property
    def weights(self) -> Tensor:
        """A list's weight of 1, divided among its pairs (R,)."""
        return 1 / self.same.sum(1)

    def rows(self, scores: Tensor) -> Tensor:
        """Scores (R, R): in each row those of the pair's list."""
        return scores.flatten().expand(len(scores), -1).masked_fill(~self.same, FAR)

    def divergence(
        self, student: Tensor, teacher: Tensor, temperature: float, kind: DivergenceWord, t2: bool
    ) -> Tensor:
        """Divergence of the distributions over each pair's list (R,)."""
        return soft_target_loss(
            self.rows(upcast(student)),
            self.rows(upcast(teacher)),
            temperature=temperature,
            divergence=kind,
            scale_by_t2=t2,
            reduction="none",
        )

    def contrast(self, student: Tensor) -> Tensor:
        """Cross-entropy of each pair's list with its relevant documents (R,)."""
        wanted = (self.same & self.relevant).to(student.dtype)
        wanted = wanted / wanted.sum(1, keepdim=True).clamp(min=1)
        return -(wanted * self.rows(upcast(student)).log_softmax(-1)).sum(1)

    def any(self, mask: Tensor) -> Tensor:
        """Whether a pair of ``mask`` (R,) is in the list of each pair (R,)."""
        return (self.same & mask).any(1)

    def margins(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """The squared differences of margins, their means over each list's pairs of a relevant and
        another document summed over the lists, and the number of these lists."""
        pairs = self.same & self.relevant[:, None] & ~self.relevant
        s, t = (upcast(x).flatten() for x in (student, teacher))
        errors = (s[:, None] - s) - (t[:, None] - t).detach()
        counts = (self.same.to(s.dtype) @ pairs.sum(1).to(s.dtype)).clamp(min=1)  # of the list
        total = (torch.where(pairs, errors, 0).square().sum(1) / counts).sum()
        known = self.any(self.relevant) & self.any(~self.relevant)
        return total, (known * self.weights).sum()
