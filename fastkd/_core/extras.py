"""Imports of packages that an optional extra installs."""

import importlib
from pathlib import Path
from types import ModuleType


class MissingExtra(ModuleNotFoundError):
    """A package of an optional extra is not installed; the message has the command for it."""


# Import names that differ from the package's name.
PACKAGES = {"google": "protobuf", "sklearn": "scikit-learn", "yaml": "PyYAML"}


def how_to_get(extra: str) -> str:
    """The pip command that installs ``extra``, from the checkout if fastkd runs from one."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        where = "." if checkout == Path.cwd() else str(checkout)
        return f"get it with: pip install --no-build-isolation -e '{where}[{extra}]'"
    return f"get it with: pip install 'fastkd[{extra}]'"


def require(module: str, extra: str) -> ModuleType:
    """Import ``module``, or raise MissingExtra with the command that installs ``extra``."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        missing = PACKAGES.get(missing, missing)
        raise MissingExtra(
            f"{missing} is not installed; {how_to_get(extra)}", name=missing
        ) from error
