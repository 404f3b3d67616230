"""The interface for progress and messages of a run; `fastkd.cli.display` implements it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

Item = TypeVar("Item")


class Track:
    """Progress bar of one training."""

    def advance(self, step: int, losses: Mapping[str, float] | None = None, note: str = "") -> None:
        """Report that ``step`` is done; ``losses`` are means since they were last reported.

        The ``note`` follows them in the line.
        """

    def stop(self) -> None:
        """The training is over."""


class Display:
    """Output of a run: lines, progress bars and events; this base class prints nothing."""

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def say(self, line: str) -> None:
        """Print a line."""

    def event(self, name: str, **values: Any) -> None:
        """Record an event with JSON-serialisable values, for --log-json."""

    def track(self, title: str, first: int, total: int) -> Track:
        """Progress of a training that begins after step ``first`` of ``total``."""
        return Track()

    def shared(self) -> Callable[[], AbstractContextManager["Display"]]:
        """Context manager that lets a second process print.

        From its first use this process prints plain lines only.
        """
        return Display


def counted(items: Iterable[Item], display: Display, title: str, total: int) -> Iterator[Item]:
    """Iterate over ``items`` with a progress bar of length ``total``."""
    track = display.track(title, 0, total)
    try:
        for number, item in enumerate(items, start=1):
            yield item
            track.advance(number, {})
    finally:
        track.stop()


def clock(seconds: float) -> str:
    """Minutes and seconds, as in 4:05."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"


def compared(ratio: float, more: str, less: str, same: str) -> str:
    """The ratio in words: "2.0 times faster"; ``same`` where it rounds to 1.0."""
    times = f"{max(ratio, 1 / ratio):.1f}"
    if times == "1.0":
        return same
    return f"{times} times {more if ratio > 1 else less}"


def format_scores(values: Mapping[str, float]) -> str:
    """`name 0.123` for every value."""
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())
