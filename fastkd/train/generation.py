"""How models generate text: its length, greedy or sampled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

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
