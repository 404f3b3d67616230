"""Faults of Triton's interpreter that stop right kernels, by version; repaired for the tests.

Each has a few lines that show it without fastkd in docs/versions.md.
"""

import functools
import os
from importlib import metadata

from packaging.version import Version


def _triton_from(version: str) -> bool:
    try:
        return Version(metadata.version("triton")) >= Version(version)
    except metadata.PackageNotFoundError:
        return False


# A comparison keeps the integer type of its operands, so of a scalar's comparison a block of
# integers is made, which loads and stores refuse as a mask. Older ones took it as one.
MASKS_OF_SCALARS = _triton_from("3.9")


def repair() -> None:
    """Where kernels are interpreted: comparisons give booleans."""
    if os.environ.get("TRITON_INTERPRET") != "1" or not MASKS_OF_SCALARS:
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def repaired(operation):
        @functools.wraps(operation)
        def compare(*operands):
            return TensorHandle(operation(*operands).data, tl.int1)

        return compare

    for name in dir(InterpreterBuilder):
        operation = getattr(InterpreterBuilder, name)
        if name.startswith(("create_icmp", "create_fcmp")) and not hasattr(
            operation, "__wrapped__"
        ):
            setattr(InterpreterBuilder, name, repaired(operation))
