"""A case with its selected providers: checked first, then timed in interleaved rounds."""

import functools
import os

import torch

from fastkd._core import machine

from .case import COMPILED, REFERENCE, Bound, Case, GraphBound, Provider
from .measure import (
    Oracle,
    interleaved,
    one_line,
    peak_bytes,
    quartiles,
    release,
    seconds_of,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOWEST = 60.0  # seconds of a step beyond which a provider is not timed


class Group:
    """Errors, reasons to refuse and rounds of a case's providers, each made when needed."""

    def __init__(self, case: Case, providers: list[Provider]) -> None:
        self.case, self.providers = case, providers
        self.info: dict[str, dict] = {provider.name: {} for provider in providers}
        self.refused: dict[str, str] = {}
        self.samples: dict[str, list[float]] = {}

    @functools.cached_property
    def oracle(self) -> Oracle:
        return Oracle(self.case, DEVICE)

    def check(self, provider: Provider) -> str | None:
        """Reason to refuse the provider, or None."""
        try:
            self.info[provider.name], reason = self.oracle.check(provider)
        except Exception as error:
            reason = one_line(error)
            release(DEVICE)
        return reason

    def time(self, seconds: float, least: int) -> None:
        """Check every provider, then time the accurate ones."""
        for provider in self.providers:
            if reason := self.check(provider):
                self.refused[provider.name] = reason
        self.__dict__.pop("oracle", None)  # frees its float64 copies
        release(DEVICE)
        torch.manual_seed(0)
        inputs = self.case.make(device=DEVICE, dtype=self.case.dtype, **self.case.sizes)
        bound: dict[str, Bound] = {}
        for provider in self.providers:
            if provider.name not in self.refused:
                try:
                    bound[provider.name] = self._warm(provider, inputs)
                except Exception as error:
                    self.refused[provider.name] = one_line(error)
                    release(DEVICE)
        if bound:
            self.samples = interleaved(bound, DEVICE, seconds, least)

    def _warm(self, provider: Provider, inputs: dict) -> Bound:
        """The provider after some steps, its memory in ``info``."""
        bound, info = provider.bind(inputs), self.info[provider.name]
        if (took := seconds_of(bound, DEVICE)) > SLOWEST:  # the first step may have compiled
            took = seconds_of(bound, DEVICE)
        if took > SLOWEST:
            raise TimeoutError(f"one step takes {took:.0f} s")
        if not isinstance(bound, GraphBound):  # its memory was allocated at the capture
            info["peak_bytes"] = peak_bytes(bound.step, DEVICE)
        if provider.name == COMPILED:
            info["graph_breaks"] = sum(torch._dynamo.utils.counters["graph_break"].values())
        return bound


def described(case: Case, provider: Provider, group: Group) -> dict:
    """The ``extra_info`` of a result, which `bench.report` reads."""
    found = {
        "loss": case.loss,
        "title": case.title,
        "sizes": case.sizes,
        "dtype": str(case.dtype).removeprefix("torch."),
        "sweep": case.sweep,
        "headline": case.headline,
        "bytes": case.bytes_moved,
        "operations": case.operations,
        "backend": provider.name,
        **group.info[provider.name],
        "commit": where()["commit"],
        "processor": where()["machine"].get("gpu", where()["machine"]["cpu"]),
        "threads": where()["machine"]["threads"],
        "versions": where()["versions"],
    }
    if REFERENCE in group.samples:
        pairs = zip(group.samples[provider.name], group.samples[REFERENCE], strict=True)
        found["ratio"] = quartiles([mine / reference for mine, reference in pairs])
    return found


@functools.cache
def where() -> dict:
    """Machine, versions and commit."""
    return machine.describe(DEVICE, os.environ.get("FASTKD_COMMIT"))
