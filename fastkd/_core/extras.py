"""One sentence for an import that an optional extra brings."""

import importlib
from pathlib import Path
from types import ModuleType


class MissingExtra(ModuleNotFoundError):
    """A package of an optional extra is not installed; the message says how to get it."""


# Packages that are called otherwise than what is imported.
PACKAGES = {"google": "protobuf", "sklearn": "scikit-learn", "yaml": "PyYAML"}


def how_to_get(extra: str) -> str:
    """The command that brings ``extra``, from a checkout where this is one."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        where = "." if checkout == Path.cwd() else str(checkout)
        return f"get it with: pip install --no-build-isolation -e '{where}[{extra}]'"
    return f"get it with: pip install 'fastkd[{extra}]'"


def require(module: str, extra: str) -> ModuleType:
    """Import ``module``, or raise MissingExtra naming the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        missing = PACKAGES.get(missing, missing)
        raise MissingExtra(
            f"{missing} is not installed; {how_to_get(extra)}", name=missing
        ) from error
