"""What can go wrong in a command, each said in one sentence."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """What the user gave can't be used; the message names the option, or the file and row."""


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its type where it says nothing."""
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
        super().__init__(f"Stopped after step {step}, which is saved; --resume continues from it")
        self.code = 128 + signum


class Stopped(KeyboardInterrupt):
    """A signal outside training, or a second one within: stop at once."""

    def __init__(self, signum: int):
        super().__init__(signum)
        self.code = 128 + signum


class RunFailed(RuntimeError):
    """The command can't go on; what was saved before is intact."""


class TrainingFailed(RunFailed):
    """Training can't go on."""


class SaveFailed(RunFailed):
    """A file can't be written."""
