"""Exceptions whose message is one sentence for the user."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Invalid input of the user; the message names the option, or the file and row."""


class EmptyLabel(InputError):
    """A row without a label."""


def first_line(error: BaseException) -> str:
    """First line of the error's message, or its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def nearest(name: str, known: Iterable[str]) -> str:
    """The known names, and the one closest to ``name``, as the end of an error message."""
    known = list(known)
    folded = {candidate.casefold(): candidate for candidate in reversed(known)}
    near = difflib.get_close_matches(name.casefold(), folded, n=1)
    listed = ", ".join(known[:16]) + (", ..." if len(known) > 16 else "")
    return f"known: {listed}" + (f"; did you mean {folded[near[0]]!r}?" if near else "")


class Interrupted(Exception):
    """A signal: training stopped after a complete checkpoint."""

    def __init__(self, step: int, signum: int):
        super().__init__(f"Stopped after step {step}, which is saved")
        self.code = 128 + signum


class Stopped(KeyboardInterrupt):
    """A signal outside training, or a second one within: stop at once."""

    def __init__(self, signum: int):
        super().__init__(signum)
        self.code = 128 + signum


class RunFailed(RuntimeError):
    """The command failed; earlier results are intact."""


class TrainingFailed(RunFailed):
    """Training failed."""


class SaveFailed(RunFailed):
    """A file could not be written."""
