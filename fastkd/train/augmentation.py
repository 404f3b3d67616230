"""TinyBERT's data augmentation (Jiao et al. 2020, Algorithm 1), with a masked language model.

Each word of a text is replaced with a probability by one of the most probable words at its masked
position. A word of several tokens is replaced by one of the words whose input embeddings are
nearest to the mean of its own (the paper reads GloVe's). A replacement differs from the word.
"""

import itertools
import random
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

WORD = re.compile(r"\w+(?:['’-]\w+)*")
LONGEST = 512  # tokens that a masked model reads at most here


class Augmenter:
    """Copies of texts with some words replaced.

    Args:
        model, tokenizer: a masked language model and its fast tokenizer.
        probability: of a word's replacement; 0.4 in the paper.
        candidates: number of the most probable words that a replacement is drawn from; 15.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        probability: float = 0.4,
        candidates: int = 15,
        batch_size: int = 32,
    ) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self.probability, self.number, self.batch_size = probability, candidates, batch_size
        self.words = _whole_words(tokenizer, model.config.vocab_size)
        self.ids = torch.tensor(sorted(self.words), device=model.device)
        embeddings = model.get_input_embeddings().weight.detach().float()
        self.embeddings = F.normalize(embeddings, dim=-1)
        self.raw = embeddings

    def copies(self, text: str, times: int, rng: random.Random) -> list[str]:
        """``times`` copies of ``text``, drawn with ``rng``."""
        spans = [match.span() for match in WORD.finditer(text)]
        choices = self._candidates(text, spans)
        found = []
        for _ in range(times):
            parts, end = [], 0
            for (start, stop), words in zip(spans, choices, strict=True):
                drawn = rng.random() < self.probability
                word = rng.choice(words) if drawn and words else text[start:stop]
                parts += [text[end:start], word]
                end = stop
            found.append("".join([*parts, text[end:]]))
        return found

    def _candidates(self, text: str, spans: Sequence[tuple[int, int]]) -> list[list[str]]:
        """Possible replacements of the word at each span; none beyond the model's length."""
        limit = min(LONGEST, self.tokenizer.model_max_length)
        encoded = self.tokenizer(
            text, return_offsets_mapping=True, truncation=True, max_length=limit
        )
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        covering = [
            [i for i, (a, b) in enumerate(offsets) if a < stop and b > start]
            for start, stop in spans
        ]
        single = [tokens[0] for tokens in covering if len(tokens) == 1]
        probable = dict(zip(single, self._probable(ids, single), strict=True))
        found: list[list[str]] = []
        for (start, stop), tokens in zip(spans, covering, strict=True):
            if not tokens:
                found.append([])
                continue
            if len(tokens) == 1:
                order = probable[tokens[0]]
            else:
                order = self._nearest([ids[i] for i in tokens])
            own = text[start:stop].casefold()
            words = (self.words[i] for i in order if self.words[i].casefold() != own)
            found.append(list(itertools.islice(words, self.number)))
        return found

    @torch.no_grad()
    def _probable(self, ids: list[int], positions: list[int]) -> list[list[int]]:
        """Most probable whole words at each masked position, with one more for the word itself."""
        found: list[list[int]] = []
        for first in range(0, len(positions), self.batch_size):
            part = positions[first : first + self.batch_size]
            rows = torch.tensor([ids] * len(part), device=self.model.device)
            at = torch.arange(len(part), device=rows.device), torch.tensor(part, device=rows.device)
            rows[at] = self.tokenizer.mask_token_id
            logits = self.model(input_ids=rows).logits[at][:, self.ids]
            most = min(self.number + 1, len(self.ids))
            found += self.ids[logits.topk(most).indices].tolist()
        return found

    def _nearest(self, ids: list[int]) -> list[int]:
        """Whole words with the nearest input embeddings."""
        mean = F.normalize(self.raw[ids].mean(0), dim=-1)
        similar = self.embeddings[self.ids] @ mean
        most = min(self.number + 1, len(self.ids))
        nearest: list[int] = self.ids[similar.topk(most).indices].tolist()
        return nearest


def _whole_words(tokenizer: Any, size: int) -> dict[int, str]:
    """Words that are one token, by token id."""
    tokens = tokenizer.convert_ids_to_tokens(range(min(size, len(tokenizer))))
    marked = any(token and token.startswith(("Ġ", "▁")) for token in tokens)  # of a word's start
    found = {}
    for i, token in enumerate(tokens):
        if token is None or i in tokenizer.all_special_ids:
            continue
        starts = token.startswith(("Ġ", "▁")) if marked else not token.startswith("##")
        word = token.lstrip("Ġ▁")
        if starts and WORD.fullmatch(word):
            found[i] = word
    return found
