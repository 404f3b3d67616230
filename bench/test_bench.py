"""``pytest bench``: the cases of `suite` under pytest-benchmark, one group a case.

A provider is compared with the float64 reference before it is timed, as in ``python -m bench``.
"""

import functools

import pytest
import torch

from . import suite
from .harness import REFERENCE, Case, Provider, check, oracle_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each case and provider that the device can run."""
    chosen = metafunc.config.getoption("--bench-set", default=None)
    name = chosen or ("bert" if DEVICE.type == "cuda" else "cpu")
    pairs = [
        pytest.param(case, provider, id=f"{case.key}/{provider.name}")
        for case in suite.cases([name])
        for provider in case.providers
    ]
    metafunc.parametrize("case, provider", pairs)


@functools.lru_cache(maxsize=1)
def prepared(case: Case):
    """Oracle and inputs, kept while the providers of one case take turns."""
    oracle = oracle_of(case, DEVICE)
    if oracle is not None:
        check(oracle, case.providers[0])
    return oracle, case.make(device=DEVICE, dtype=case.dtype, **case.sizes)


@pytest.mark.benchmark(max_time=0.5, min_rounds=5, warmup=True, warmup_iterations=1)
def test_step(benchmark, case: Case, provider: Provider) -> None:
    """Forward and backward."""
    reason = provider.why_not(DEVICE)
    if reason is not None:
        pytest.skip(reason)
    oracle, inputs = prepared(case)
    if provider.name != REFERENCE:
        result = check(oracle, provider)
        assert "refused" not in result, result["refused"]
    bound = provider.bind(inputs)
    benchmark.group = case.key
    benchmark.name = provider.name

    def step() -> None:
        bound.step()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    benchmark(step)
