"""The `measure` fixture: check a group's providers, time them in interleaved rounds, report.

pytest-benchmark times one test after the other, and a slow moment of the machine then hits one
provider of a group only. So the first test of a group times all selected providers, a round of
each in turn, and the tests hand their rounds to the ``benchmark`` fixture through its timer.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import pytest
import torch

from . import suite
from .case import COMPILED, REFERENCE, Case, Provider, ours
from .group import DEVICE, Group, described, where
from .measure import limits


class Clock:
    """Timer of the ``benchmark`` fixture, advanced by the time of each round."""

    now = 0.0

    def read(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


CLOCK = Clock()


@pytest.fixture
def measure(benchmark, request):
    """``measure(case, provider)`` checks the provider, and times it unless benchmarks are off."""

    def run(case: Case, provider: Provider) -> None:
        group = _group(case, request.session)
        if benchmark.disabled:
            reason = group.check(provider)
            if reason and (provider.name == REFERENCE or ours(case.loss, provider.name)):
                pytest.fail(reason)
            if reason:
                pytest.skip(reason)
            benchmark.pedantic(lambda: None)
            return
        if not (group.samples or group.refused):
            option = request.config.getoption
            group.time(float(option("benchmark_max_time")), option("benchmark_min_rounds"))
        if reason := group.refused.get(provider.name):
            benchmark.skipped = True
            pytest.skip(reason)
        rounds = group.samples[provider.name]
        benchmark.name, benchmark.params = provider.name, None
        benchmark.extra_info.update(described(case, provider, group))
        left = iter(rounds)
        benchmark.pedantic(lambda: CLOCK.advance(next(left)), rounds=len(rounds))

    return run


@functools.lru_cache(maxsize=1)  # one group's inputs in memory at a time
def _group(case: Case, session: pytest.Session) -> Group:
    chosen = [
        item.callspec.params["provider"]
        for item in session.items
        if hasattr(item, "callspec") and item.callspec.params.get("case") is case
    ]
    return Group(case, chosen)


def pytest_configure(config):
    for name in suite.SETS:
        config.addinivalue_line("markers", f"{name}: the benchmarks' set of this name")
    config.addinivalue_line("markers", "headline: the benchmarks in the README's table")


def pytest_generate_tests(metafunc):
    """One test for each case and provider: the device's sets, or tiny forms without timing."""
    if "provider" in metafunc.fixturenames:
        cases = list(metafunc.module.cases())
        config = metafunc.config
        if config.getoption("benchmark_disable") or hasattr(config, "workerinput"):
            cases = list({(c.title, c.dtype): _tiny(c) for c in reversed(cases)}.values())
        else:
            sets = set(re.findall(r"\w+", config.getoption("markexpr"))) & {*suite.SETS}
            own = suite.CUDA_SETS if DEVICE.type == "cuda" else suite.CPU_SETS
            cases = [case for case in cases if case.set in (sets or own)]
        metafunc.parametrize("case, provider", list(_parameters(cases)))


def _tiny(case: Case) -> Case:
    """``case`` at tiny sizes, mostly without torch.compile."""
    compiles = (case.loss, case.dtype) == ("attention", torch.float32)
    kept = [p for p in case.providers if compiles or p.name != COMPILED]
    return dataclasses.replace(suite.toy(case), providers=tuple(kept))


def _parameters(cases: list[Case]) -> Iterator:
    for case in suite.each_once(cases):
        for provider in case.providers:
            reason = provider.why_not(DEVICE)
            own = ours(case.loss, provider.name)
            if reason and own and case.loss != "step":
                continue  # this backend has no such kernel
            marks = [
                getattr(pytest.mark, case.set),
                pytest.mark.benchmark(group=case.key, timer=CLOCK.read),
                *([pytest.mark.headline] if case.headline else []),
                *([pytest.mark.skip(reason=reason)] if reason else []),
            ]
            name = f"{case.key.partition('/')[2].replace('/', ' ')}: {provider.name}"
            yield pytest.param(case, provider, marks=marks, id=name)


def pytest_benchmark_generate_machine_info(config):
    """Processor, instructions and versions, which are equal for comparable results."""
    return {**where()["machine"], "versions": where()["versions"]}


def pytest_benchmark_update_json(config, benchmarks, output_json):
    """Add the hardware's limits, and remove fields that no report reads."""
    dtypes = {bench["extra_info"]["dtype"] for bench in output_json["benchmarks"]}
    output_json["limits"] = limits(DEVICE, tuple(getattr(torch, name) for name in sorted(dtypes)))
    for bench in output_json["benchmarks"]:
        bench["stats"].pop("data", None)
        bench["options"] = {}
        # JSON has no infinity: the error of a value that is not finite.
        for name in ("value_error", "gradient_error"):
            if math.isinf(bench["extra_info"].get(name, 0.0)):
                bench["extra_info"][name] = None
