"""Random steps of a Distiller, new in every run, against the same loss by hand."""

import random

import pytest

from tests.distill.draws import FOUND, KINDS, PAIRS, failure
from tests.support.draw import FIRST

# Of the pairs of a model and a method, a third in a run.
START = FIRST % 2**20 * len(PAIRS)
DRAWN = random.Random(FIRST).sample(range(START, START + len(PAIRS)), len(PAIRS) // 3)


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_random_steps_are_those_by_hand(kind):
    """After those that failed once."""
    seeds = [*FOUND, *DRAWN]
    failures = []
    for seed in (x for x in seeds if PAIRS[x % len(PAIRS)][0] == kind):
        if wrong := failure(seed):
            call = f"print(__import__('tests.distill.draws').distill.draws.failure({seed}))"
            failures.append(f'python -c "{call}"\n{wrong}')
    assert not failures, "\n".join(failures[:3])
