"""Distillation losses of five papers and others as fused, exact, drop-in PyTorch functions."""

import importlib
from typing import TYPE_CHECKING, Any

from fastkd._core import versions  # noqa: F401 - its warning about an old torch

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fastkd.public import *  # noqa: F403
    from fastkd.public import __all__  # noqa: F401


def __getattr__(name: str) -> Any:
    """Import all public names at the first use of one: `fastkd --help` needs no torch."""
    if name == "__all__" or not name.startswith("__"):
        public = importlib.import_module("fastkd.public")
        names = globals()
        names.update({entry: getattr(public, entry) for entry in (*public.__all__, "__all__")})
        if name in names:
            return names[name]
    raise AttributeError(f"module 'fastkd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
