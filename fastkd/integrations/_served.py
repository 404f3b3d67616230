"""A served teacher's log-probabilities of a prompt, as a `TopK`."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from fastkd._core import check
from fastkd.lm.targets import SLACK, TopK

NONE = -9999.0  # what vLLM's server writes into JSON for −inf

Entry = Sequence[tuple[int, float]]  # ids and log-probabilities, in any order


def positions_of(name: str, entries: Any) -> Sequence[Any]:
    """The entries, checked to be a list of one prompt's positions."""
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise TypeError(
            f"{name} must be a list with an entry for each position, got {type(entries).__name__}"
        )
    return entries


def from_entries(name: str, entries: Sequence[Entry], k: int) -> TopK:
    """The k most probable tokens of every entry but the first, which has no log-probabilities."""
    check.positive_int("k", k)
    if len(entries) < 2:
        raise ValueError(f"{name} must have at least two positions, got {len(entries)}")
    if entries[0]:
        raise ValueError(
            f"{name} must begin with None, the first token's entry; pass those of the whole prompt"
        )
    rows = [_most_probable(f"{name}[{i}]", entry, k) for i, entry in enumerate(entries) if i]
    ids, log_probs = ([[pair[n] for pair in row] for row in rows] for n in (0, 1))
    return TopK(torch.tensor(ids), torch.tensor(log_probs, dtype=torch.float32))


def _most_probable(name: str, entry: Entry, k: int) -> Entry:
    if len(entry) < k:
        raise ValueError(
            f"{name} has {len(entry)} tokens but k is {k}; request at least k of the server"
        )
    for token, value in entry:
        if token < 0:
            raise ValueError(f"{name} must have token ids from 0, got {token}")
        if math.isnan(value) or value > SLACK:
            raise ValueError(f"{name} must have log-probabilities of at most 0, got {value}")
    if len({token for token, _ in entry}) < len(entry):
        raise ValueError(f"{name} must not have a token twice")
    total = math.fsum(math.exp(value - SLACK) for _, value in entry)
    if total > 1:
        raise ValueError(
            f"{name} has probabilities that add up to {total:.4g}; have the server return "
            "log-probabilities of the whole vocabulary, not logits"
        )
    kept = sorted(entry, key=lambda pair: -pair[1])[:k]
    if kept[0][1] == -math.inf:
        raise ValueError(f"{name} must have a token with a finite log-probability, got none")
    return kept
