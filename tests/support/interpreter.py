"""Patches of Triton's interpreter for the tests: bugs fixed, slow code replaced.

Each fault has a few lines that show it without fastkd in docs/versions.md.
"""

import dataclasses
import functools
import inspect
import os
from types import SimpleNamespace

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
NO_CPP = not extension.CPU or torch.cuda.is_available()
MARKS = {
    "torch": [],
    "triton": [pytest.mark.skipif(not TRITON_INSTALLED, reason="no triton")],
    "cpp": [pytest.mark.skipif(NO_CPP, reason="no extension, or tensors of tests on a GPU")],
}


def prepare() -> None:
    """Whether kernels run in the interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1" and TRITON_INSTALLED:
        _prepare()


@functools.cache
def _prepare() -> None:
    import triton

    _leave_out_overflow()
    _replace_language_once()
    _convert_operands_once()
    _describe_types_once()
    _round_bfloat16()
    if Version(triton.__version__) >= Version("3.9"):
        _repair_comparisons()


def _leave_out_overflow() -> None:
    """Each sum, difference and product of integers is computed again in 64 bits and compared with
    the bounds of its type; what comes of it is asserted in debug mode only.
    """
    from triton.runtime.interpreter import interpreter_builder as builder

    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


def _replace_language_once() -> None:
    """Every launch and every call of a device function searches the language for what it replaces,
    and a launch puts it back. No kernel is compiled here, so it may stay replaced.

    Replaced functions are called directly, and their arguments are looked at once.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    replace, unwrap = interpreter._patch_lang, tl.core._unwrap_if_constexpr
    semantic = interpreter.interpreter_semantic
    plain = {tl.tensor, tl.dtype, tl.pointer_type, tl.block_type, int, float, bool, type(None)}
    modules = set()

    def replace_once(function):
        module = function.__globals__["__name__"]
        if module not in modules:
            replace(function)
            modules.add(module)
        return SimpleNamespace(restore=lambda: None)

    def replace_function(owner, name, member, builder, scope):
        function = inspect.unwrap(member)

        def call(*args, _semantic=None, **kwargs):
            return function(*args, _semantic=semantic, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_lang, interpreter._patch_attr = replace_once, replace_function
    tl.core._unwrap_if_constexpr = lambda x: x if type(x) in plain else unwrap(x)


def _convert_operands_once() -> None:
    """Cache how operands are converted to one type and one shape, which depends on their types.

    A number becomes the same tensor each time, without memory for each of its elements.
    """
    import numpy as np
    import triton.language as tl
    from triton.language.semantic import TritonSemantic as Semantic

    convert, broadcast = Semantic.binary_op_type_checking_impl, Semantic.broadcast_impl_value
    to_tensor = Semantic.to_tensor
    known, shapes, numbers = {}, {}, {}

    def key_of(x):
        return x.type.name if type(x) is tl.tensor else (type(x), x)

    def kept(given, converted):
        if isinstance(given, tl.tensor):
            return converted.type
        data = converted.handle.data
        converted.handle.data = np.broadcast_to(data.ravel()[:1], data.shape)
        return converted

    def converted(self, x, kept):
        if type(kept) is tl.tensor:
            return kept
        if x.type.name == kept.name:
            return x
        if x.dtype.name != kept.scalar.name:
            x = self.cast(x, kept.scalar)
            if x.type.name == kept.name:
                return x
        if not x.type.is_block():
            return self.tensor(self.builder.create_splat(kept, x.handle), kept)
        for _ in range(len(kept.shape) - len(x.shape)):
            x = self.expand_dims(x, 0)
        return self.tensor(self.builder.create_broadcast(x.handle, kept.shape), kept)

    def binary_op_type_checking_impl(self, lhs, rhs, *allowed, **how):
        key = key_of(lhs), key_of(rhs), allowed, *how.items()
        if key not in known:
            known[key] = list(map(kept, (lhs, rhs), convert(self, lhs, rhs, *allowed, **how)))
        left, right = known[key]
        return converted(self, lhs, left), converted(self, rhs, right)

    def broadcast_impl_value(self, lhs, rhs):
        key = lhs.type.name, rhs.type.name
        if key[0] == key[1]:
            return lhs, rhs
        if key not in shapes:
            shapes[key] = [x.type for x in broadcast(self, lhs, rhs)]
        left, right = shapes[key]
        return converted(self, lhs, left), converted(self, rhs, right)

    def number_to_tensor(self, x, check_type=True):
        if type(x) is tl.tensor:
            return x
        if type(x) not in (int, float, bool):
            return to_tensor(self, x, check_type)
        key = type(x), x
        if key not in numbers:
            numbers[key] = to_tensor(self, x)
        return numbers[key]

    Semantic.binary_op_type_checking_impl = binary_op_type_checking_impl
    Semantic.broadcast_impl_value = broadcast_impl_value
    Semantic.to_tensor = number_to_tensor


def _describe_types_once() -> None:
    """Cache types of blocks, and what each value looks up of its type: numpy's, and its sizes."""
    import triton.language as tl
    from triton.runtime import interpreter

    describe, numpy_type = tl.tensor.__init__, interpreter._get_np_dtype
    make_block = tl.block_type.__init__
    known, numpy_types, blocks = {}, {}, {}

    def block(self, element_ty, shape):
        key = element_ty.name, *shape
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self)
        self.__dict__ = blocks[key]

    def tensor(self, handle, type):
        if type.name not in known:
            describe(self, handle, type)
            known[type.name] = self.shape, self.numel, self.dtype
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = known[type.name]

    def numpy_type_once(type):
        if type.name not in numpy_types:
            numpy_types[type.name] = numpy_type(type)
        return numpy_types[type.name]

    tl.block_type.__init__, tl.tensor.__init__ = block, tensor
    interpreter._get_np_dtype = numpy_type_once


def _round_bfloat16() -> None:
    """float32 is cut to bfloat16, twice the error that rounding to nearest has, and of one sign:
    what is rounded three times would be off by more than 8e-3. Compiled code rounds.
    """
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
    """A comparison keeps the integer type of its operands, so of a scalar's comparison a block of
    integers is made, which loads and stores refuse as a mask. Older ones took it as one.
    """
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
