"""Spans of text that pair the tokens of two models."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fastkd._core.numerics import product, upcast, zero_padding
from fastkd.models.backbone import Model
from fastkd.models.outputs import Outputs


@dataclass
class Spans:
    """Spans of a batch: ``tokens`` holds the student's (B, N) and the teacher's (B, M) span
    numbers from 0, −1 for no span.

    Features are compared at S + 1 places of a sample: at the token that the head reads, then as
    means over the tokens of each span. ``mask`` (B, S + 1) marks the places that student and
    teacher both have.
    """

    tokens: tuple[Tensor, Tensor]
    mask: Tensor
    #: Teacher's position (B, N) paired with each student token, −1 for none; for predictions.
    paired: Tensor | None = None
    #: Whether the heads predict the next token.
    causal: bool = False
    #: Span numbers and ids of the student's tokens (B, N) and the teacher's (B, M), as the heads
    #: read them: documents are in their rows.
    rows: tuple[Tensor, Tensor] | None = None
    ids: tuple[Tensor | None, Tensor | None] = (None, None)

    def pair(self, student: Tensor, teacher: Tensor, causal: bool) -> None:
        """Pair the tokens of equal spans, (B, N) and (B, M), whose predictions are compared.

        No causal head predicts the teacher's first token.
        """
        paired = paired_positions(student, teacher)
        self.paired, self.causal = paired.masked_fill(paired < int(causal), -1), causal

    def predictions(self, outputs: Outputs) -> Outputs:
        """The teacher's predictions (B, M, ...) at the student's positions (B, N, ...).

        A causal head predicts token n + 1 at position n, so the teacher's logits, head inputs or
        top k are read one position before the paired token. Positions without a pair have arbitrary
        values.
        """
        assert self.paired is not None
        places = self.paired
        if self.causal:
            places = F.pad(places[:, 1:], (0, 1)) - 1
        places = places.clamp(min=0)[..., None]

        def at(x: Tensor) -> Tensor:
            if x.dim() != 3:  # predictions for rows
                return x
            return x.gather(1, places.to(x.device).expand(-1, -1, x.shape[-1]))

        return outputs.predictions(at)

    @classmethod
    def of(cls, student: Tensor, teacher: Tensor) -> "Spans":
        count = int(max(student.max(), teacher.max())) + 1 if len(student) else 0
        present = [_members(x, count).any(2) for x in (student, teacher)]
        first = present[0].new_ones(len(student), 1)
        return cls((student, teacher), torch.cat([first, present[0] & present[1]], 1))

    def pool(self, outputs: Outputs, side: int, model: Model, mask: Tensor | None) -> Outputs:
        """Hidden states (B, N, D) as (B, S + 1, D)."""
        members = _members(self.tokens[side], self.mask.shape[1] - 1)  # (B, S, N)

        def sentence(x: Tensor) -> Tensor:
            return model.sentence_token(x, mask, outputs.sentence)

        def pooled(x: Tensor, tokens: int) -> Tensor:
            rows = zero_padding(upcast(x), self.tokens[side] >= 0)
            means = product(members.to(rows.dtype), rows) / members.sum(2, keepdim=True).clamp(
                min=1
            )
            return torch.cat([sentence(x)[:, None], means.to(x.dtype)], 1)

        return dataclasses.replace(outputs.features(pooled), spans=True)


def single_tokens(spans: Tensor) -> Tensor:
    """Spans (B, N), −1 for tokens that share their span with another token."""
    alike = (spans[:, :, None] == spans[:, None, :]).sum(2)  # (B, N)
    return spans.masked_fill(alike > 1, -1)


def paired_positions(student: Tensor, teacher: Tensor) -> Tensor:
    """Teacher's position (B, N) with the same span as each student token, −1 for none."""
    same = (student[:, :, None] == teacher[:, None, :]) & (student >= 0)[:, :, None]  # (B, N, M)
    return torch.where(same.any(2), same.to(torch.uint8).argmax(2), -1)


def _members(spans: Tensor, count: int) -> Tensor:
    """Mask (B, S, N) of the tokens in each span."""
    return spans[:, None, :] == torch.arange(count, device=spans.device)[:, None]
