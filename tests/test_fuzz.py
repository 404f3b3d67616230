"""A few random calls of `tests/losses`; `make fuzz` runs any number of them."""

import pytest

from tests import fuzz
from tests.support.interpreter import MARKS

SEEDS = {"torch": 4, "triton": 2, "cpp": 4}  # the interpreter is slow


CASES = [
    pytest.param(name, backend, marks=MARKS[backend])
    for name in fuzz.FUNCTIONS
    # Compiling takes seconds; test_promises.py compiles every loss on every backend.
    for backend in (("torch",) if name == "compiled" else fuzz.backends(name))
]


@pytest.mark.parametrize(("name", "runs_on"), CASES)
def test_random_calls_agree_with_the_oracles(name, runs_on):
    seeds = range(1 if name == "compiled" else SEEDS[runs_on])
    found = {seed: fuzz.checked(name, runs_on, seed) for seed in seeds}
    assert not any(found.values()), "\n".join(f"{s}: {f}" for s, f in found.items() if f)
