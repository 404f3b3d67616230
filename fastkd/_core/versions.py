"""Oldest and newest versions that the core tests ran with; docs/versions.md lists the runs."""

import warnings
from importlib.metadata import version

TESTED = {
    "torch": ("2.10.0", "2.15.0"),
    "triton": ("3.6.0", "3.9.0"),
    "transformers": ("5.0.0", "5.23.0"),
    "python": ("3.10", "3.13"),
}


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")[:2]))


# The installed version, as an import of torch takes seconds.
if _numbers(version("torch")) < _numbers(TESTED["torch"][0]):
    warnings.warn(
        f"fastkd was never tested with torch {version('torch')}: "
        f"the oldest it was tested with is {TESTED['torch'][0]}",
        stacklevel=3,
    )
