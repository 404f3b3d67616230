"""A few of the random calls of `tests/fuzz.py` in every run; `make fuzz` makes as many as asked."""

import pytest

from fastkd._dispatch import TRITON_INSTALLED
from tests import fuzz

SEEDS = 12


@pytest.mark.parametrize("backend", ("torch", "triton"))
@pytest.mark.parametrize("name", fuzz.FUNCTIONS)
def test_random_calls_agree_with_the_oracles(name, backend):
    if backend not in fuzz.backends(name):
        pytest.skip("no kernel")
    if backend == "triton" and not TRITON_INSTALLED:
        pytest.skip("no triton installed")
    found = {seed: fuzz.checked(name, backend, seed) for seed in range(SEEDS)}
    assert not any(found.values()), "\n".join(f"{s}: {f}" for s, f in found.items() if f)
