"""How models generate text: its length, greedy or sampled; and the score of such texts."""

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastkd._core.extras import require
from fastkd.train.options import fits

# Default of --max-new-tokens.
MAX_NEW_TOKENS = 128


@dataclass(frozen=True)
class Generation:
    """At most ``max_new_tokens``: greedy at temperature 0, else sampled by ``seed`` and prompt."""

    max_new_tokens: int = MAX_NEW_TOKENS
    temperature: float = 0.0
    seed: int = 0

    @classmethod
    def of(cls, settings: Any) -> "Generation":
        """The generation of a model's training, as far as its manifest is readable."""
        found = settings if isinstance(settings, dict) else {}
        new, temperature, seed = (found.get(x, 0) for x in ("max_new_tokens", "sample", "seed"))
        return cls(
            new if fits(new, int) and new > 0 else MAX_NEW_TOKENS,
            temperature if fits(temperature, float) and temperature > 0 else 0.0,
            seed if fits(seed, int) and seed >= 0 else 0,
        )

    def options(self, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Options of transformers' ``generate`` for ``prompts``, the tokens of each text."""
        found = {"max_new_tokens": self.max_new_tokens, "do_sample": False, "num_beams": 1}
        if not self.temperature:
            return found
        # Options in a model's folder would change the samples.
        draw = Draw(self.seed, prompts, self.temperature)
        return {**found, "logits_processor": [draw], "repetition_penalty": 1.0}


GREEDY = Generation()


class Draw:
    """Logits processor whose most probable token is a sample (Gumbel-max).

    The sample of a prompt depends on ``seed`` and that prompt alone.
    """

    def __init__(self, seed: int, prompts: Sequence[Sequence[int]], temperature: float = 1.0):
        seeds = (np.random.SeedSequence((seed, *prompt)) for prompt in prompts)
        self.seeds = [int(each.generate_state(1, np.uint64)[0]) for each in seeds]
        self.generators: list[torch.Generator] = []
        self.temperature = temperature

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.generators:
            made = (torch.Generator(scores.device) for _ in self.seeds)
            pairs = zip(made, self.seeds, strict=True)
            self.generators = [generator.manual_seed(seed) for generator, seed in pairs]
        waits = torch.empty_like(scores, dtype=torch.float64)  # in float32 too many are 0
        for row, generator in zip(waits, self.generators, strict=True):
            row.exponential_(generator=generator)
        return (scores.double() / self.temperature).log_softmax(-1) - waits.log()


def rouge_l(generated: Sequence[str], references: Sequence[str]) -> float:
    """rouge-score's mean F-measure of ROUGE-L, without stemming.

    rouge-score's own tokenizer drops all but ASCII letters and digits. `Words` gives the same words
    for such text, and words of other scripts.
    """
    scorer = require("rouge_score.rouge_scorer", "tasks").RougeScorer(["rougeL"], tokenizer=Words())
    pairs = zip(references, generated, strict=True)
    return math.fsum(scorer.score(*pair)["rougeL"].fmeasure for pair in pairs) / len(references)


class Words:
    """Tokenizer of lower-case words; in scripts without spaces each letter is a word.

    A text without letters and digits is split into characters.
    """

    def __init__(self) -> None:
        unspaced = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
        self.pattern = require("regex", "tasks").compile(
            rf"(?V1)[{unspaced}&&[\p{{L}}\p{{N}}]]\p{{M}}*"
            rf"|[[\p{{L}}\p{{N}}]--{unspaced}][[\p{{L}}\p{{N}}\p{{M}}]--{unspaced}]*"
        )

    def tokenize(self, text: str) -> list[str]:
        text = unicodedata.normalize("NFKC", text.lower())
        return self.pattern.findall(text) or [x for x in text if not x.isspace()]
