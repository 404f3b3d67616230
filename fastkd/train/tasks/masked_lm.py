"""Language models that read in both directions: masked tokens of running text."""

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fastkd._core.extras import require
from fastkd.train.arrow_rows import UNLABELLED, Encoded
from fastkd.train.errors import InputError
from fastkd.train.tasks.base import Collate, Tokens, logits, token_loss_sums
from fastkd.train.tasks.causal_lm import CausalLM, perplexity


@dataclass(frozen=True)
class MaskedLM(CausalLM):
    """Documents read and packed as in --task causal-lm, between a model's special tokens.

    15% of a row's tokens are masked as in transformers (BERT, section 3.1), at least one. Training
    masks other tokens in each epoch, by its seed; evaluation and a cached teacher mask the same.
    """

    metrics = ("masked_perplexity",)
    lower_is_better = frozenset(metrics)
    head = "AutoModelForMaskedLM"
    pipeline = "fill-mask"
    evaluation_columns = ()
    usage = (
        "from transformers import pipeline\n\n"
        'fill = pipeline("$pipeline", "$directory")\n'
        'print(fill(f"A {fill.tokenizer.mask_token} upon a time"))'
    )

    #: Encoders read a row as one document.
    separate_documents: bool = False

    @classmethod
    def of(cls, config: Any, report: Mapping[str, Any] | None = None) -> "MaskedLM":
        return cls()

    def encode(self, batch: dict[str, list], tokenizer: Any, max_length: int) -> Tokens:
        first, last = _around(tokenizer)
        found = super().encode(batch, tokenizer, max_length - len(first) - len(last))
        ids = [[*first, *row, *last] for row in found["input_ids"]]
        masks = [[1] * len(row) for row in ids]
        return {"input_ids": ids, "attention_mask": masks, "number": found["number"]}

    def collator(self, tokenizer: Any) -> Collate:
        if tokenizer.mask_token is None:
            raise InputError(
                f"--task {self.name()} needs a tokenizer with a mask token, and "
                f"{type(tokenizer).__name__} has none"
            )
        return Hide(tokenizer, super().collator(tokenizer))

    def answer(self, model: nn.Module, batch: dict[str, torch.Tensor], tokenizer: Any) -> Any:
        """The sum of -log p of a row's masked tokens, and their number."""
        return token_loss_sums(logits(model, batch), batch["labels"])

    def scores(self, metrics: Sequence[str], answers: Any, examples: Encoded) -> dict[str, float]:
        loss, count = math.fsum(x for x, _ in answers), sum(n for _, n in answers)
        return {"masked_perplexity": perplexity(loss / count) if count else math.nan}

    def predictions(self, answers: Any, examples: Encoded) -> list[dict[str, Any]]:
        """Masked tokens and their perplexity of each document up to --max-length."""
        return [
            {"hidden": count, "masked_perplexity": perplexity(loss / count) if count else None}
            for loss, count in answers
        ]


@dataclass(frozen=True)
class Hide:
    """Collator that masks tokens of each row, chosen by the row and the numbers in ``draw``."""

    tokenizer: Any
    pad: Collate
    draw: tuple[int, ...] = ()

    def for_epoch(self, draw: tuple[int, ...]) -> "Hide":
        return replace(self, draw=draw)

    def __call__(self, rows: list[dict[str, Any]]) -> Mapping[str, Any]:
        transformers: Any = require("transformers", "train")
        hide = transformers.DataCollatorForLanguageModeling(self.tokenizer)
        return self.pad([{**row, **self._hidden(hide, row)} for row in rows])

    def _hidden(self, hide: Any, row: dict[str, Any]) -> dict[str, list[int]]:
        ids = row["input_ids"]
        name = hashlib.blake2b(repr((self.draw, ids)).encode(), digest_size=7).digest()
        hide.generator = torch.Generator().manual_seed(int.from_bytes(name, "big"))
        special = self.tokenizer.get_special_tokens_mask(ids, already_has_special_tokens=True)
        while True:
            inputs, labels = hide.torch_mask_tokens(torch.tensor([ids]), torch.tensor([special]))
            if all(special) or bool((labels != UNLABELLED).any()):
                return {"input_ids": inputs[0].tolist(), "labels": labels[0].tolist()}


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    found = tokenizer("a", return_special_tokens_mask=True)
    pieces = list(zip(found["input_ids"], found["special_tokens_mask"], strict=True))
    first = [token for token, _ in itertools.takewhile(lambda piece: piece[1], pieces)]
    after = itertools.takewhile(lambda piece: piece[1], reversed(pieces))
    return first, [token for token, _ in after][::-1]


TASK = MaskedLM
