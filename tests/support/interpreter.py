"""Patches of Triton's interpreter for the tests: bugs fixed, a slow check left out.

Each fault has a few lines that show it without fastkd in docs/versions.md.
"""

import dataclasses
import functools
import os
from importlib import metadata

import pytest
import torch
from packaging.version import Version

from fastkd._core import extension
from fastkd._core.dispatch import TRITON_INSTALLED

# A string is evaluated when the test runs: conftest.py sets the variable after this import.
of_compiled_code = pytest.mark.skipif(
    "os.environ.get('TRITON_INTERPRET') == '1'", reason="of compiled code: make test-compiled"
)
# Functions of tests with a backend.
MARKS = {
    "torch": [],
    "triton": [pytest.mark.skipif(not TRITON_INSTALLED, reason="no triton")],
    "cpp": [
        pytest.mark.skipif(
            not extension.CPU or torch.cuda.is_available(),
            reason="no extension, or the tests' tensors are on a GPU",
        )
    ],
}


def _triton_from(version: str) -> bool:
    try:
        return Version(metadata.version("triton")) >= Version(version)
    except metadata.PackageNotFoundError:
        return False


# A comparison keeps the integer type of its operands, so of a scalar's comparison a block of
# integers is made, which loads and stores refuse as a mask. Older ones took it as one.
MASKS_OF_SCALARS = _triton_from("3.9")


def prepare() -> None:
    """Whether kernels run in the interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1" and TRITON_INSTALLED:
        _prepare()


@functools.cache
def _prepare() -> None:
    _leave_out_overflow()
    _round_bfloat16()
    if MASKS_OF_SCALARS:
        _repair_comparisons()


def _leave_out_overflow() -> None:
    """Each sum, difference and product of integers is computed again in 64 bits and compared with
    the bounds of its type; what comes of it is asserted in debug mode only.
    """
    from triton.runtime.interpreter import interpreter_builder as builder

    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


def _round_bfloat16() -> None:
    """float32 is cut to bfloat16, twice the error that rounding to nearest has, and of one sign:
    what is rounded three times would be off by more than 8e-3. Compiled code rounds.
    """
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.create_fp_trunc

    def rounded(self, x, dtype):
        if (x.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, x, dtype)
        bits = torch.from_numpy(x.data).bfloat16().view(torch.uint16).numpy()
        return TensorHandle(bits, tl.bfloat16)

    InterpreterBuilder.create_fp_trunc = rounded


def _repair_comparisons() -> None:
    """Make comparisons return booleans."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def repaired(operation):
        @functools.wraps(operation)
        def compare(*operands):
            return TensorHandle(operation(*operands).data, tl.int1)

        return compare

    for name in dir(InterpreterBuilder):
        if name.startswith(("create_icmp", "create_fcmp")):
            setattr(InterpreterBuilder, name, repaired(getattr(InterpreterBuilder, name)))
