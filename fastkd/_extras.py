"""One sentence for an import that an optional extra brings."""

import importlib
from types import ModuleType


class MissingExtra(ImportError):
    """A package of an optional extra is not installed; the message says how to get it."""


def require(module: str, extra: str) -> ModuleType:
    """Import ``module``, or raise MissingExtra naming the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        raise MissingExtra(
            f"{missing} is not installed; get it with: pip install 'fastkd[{extra}]'"
        ) from error
