"""Registers as numpy arrays: one element a thread, or one for all where threads agree.

A register keeps the bits that were written, in whatever type of its width; who reads says how.
An array of one element stands for the same value in every thread.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from .parse import Immediate, Instruction, Register, Symbol, UnknownInstruction, width

UNSIGNED = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT = {16: np.float16, 32: np.float32, 64: np.float64}
# Where generic addresses of shared memory begin.
SHARED_WINDOW = 1 << 56

Read = Callable[[list], np.ndarray]  # of the registers
Write = Callable[[list, np.ndarray, Any], None]  # registers, values, the threads that write


def numpy_type(type: str) -> Any:
    """In which values of a PTX type are computed; bfloat16 in float32."""
    if type == "bf16":
        return np.float32
    kinds = {"f": FLOAT, "s": SIGNED, "t": FLOAT}
    return kinds.get(type[0], UNSIGNED)[width(type)]


def unknown(instruction: Instruction) -> UnknownInstruction:
    return UnknownInstruction(f"line {instruction.line}: {instruction.text}")


def widen_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow_bf16(x: np.ndarray) -> np.ndarray:
    """Bits of float32 values rounded to nearest even; NaN is 0x7FFF."""
    bits = x.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def reader(x: Any, type: str, symbols: dict[str, int]) -> Read:
    """How to read an operand as values of a type."""
    bits, as_type = width(type), numpy_type(type)
    if isinstance(x, Symbol):
        value = np.array([symbols[x.name] + x.offset], UNSIGNED[bits])
        return lambda R: value
    if isinstance(x, Immediate):
        value = np.array([x.bits & ((1 << bits) - 1)], UNSIGNED[max(bits, 8)])
        value = value.astype(bool) if bits == 1 else value
        value = widen_bf16(value) if type == "bf16" else value.view(as_type)
        return lambda R: value
    if not isinstance(x, Register):
        raise ValueError(f"operand {x}")
    index = x.index
    if type == "bf16":
        return lambda R: widen_bf16(R[index].view(np.uint16))
    if bits == 1:
        return lambda R: R[index]
    if x.bits == bits:
        return lambda R: R[index].view(as_type)
    if x.bits < bits:
        raise ValueError(f"a register of {x.bits} bits as {type}")
    whole, part = UNSIGNED[x.bits], UNSIGNED[bits]
    return lambda R: R[index].view(whole).astype(part).view(as_type)


def writer(x: Register | None, type: str) -> Write:
    """How to write values of a type to a register, which may be wider."""
    if x is None:
        return lambda R, value, mask: None
    index, bits = x.index, width(type)
    whole = UNSIGNED[x.bits]
    if type == "bf16":
        convert = narrow_bf16
    elif x.bits > bits and bits > 1:
        wide = (SIGNED if type[0] == "s" else UNSIGNED)[x.bits]

        def convert(value: np.ndarray) -> np.ndarray:
            return (value if type[0] == "s" else value.view(UNSIGNED[bits])).astype(wide)
    elif x.bits < bits:
        raise ValueError(f"a register of {x.bits} bits for {type}")
    else:
        convert = None

    def write(R: list, value: np.ndarray, mask: Any) -> None:
        if convert is not None:
            value = convert(value)
        if mask is not None:
            value = np.where(mask, value.view(whole), R[index].view(whole))
        R[index] = value

    return write


# Rounding

TINY = np.float32(2.0**-126)
HALF, BELOW = (
    np.uint64(1 << 28),
    np.uint64((1 << 29) - 1),
)  # of a float64's digits below a float32's


def round_to_odd(total: np.ndarray, error: np.ndarray) -> np.ndarray:
    """A float64 sum and what it is off by, as a value that rounds on as the exact sum would."""
    bits = total.view(np.int64)
    inward = (error > 0) != (total > 0)
    odd = np.where(inward, bits - 1, bits) | 1
    return np.where((error != 0) & np.isfinite(total), odd.view(np.float64), total)


def two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A sum in float64 and what it is off by (Knuth)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def two_product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A product in float64 and what it is off by (Dekker, Veltkamp)."""
    product = a * b
    a_high, b_high = (x * 134217729.0 - (x * 134217729.0 - x) for x in (a, b))
    a_low, b_low = a - a_high, b - b_high
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, error


def exact_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Float64 sum rounded to odd."""
    return round_to_odd(*two_sum(a, b))


def fma32(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x·y + z of float32, rounded once.

    The product is exact in float64; the sum is not, which matters where it lies halfway between
    two float32 or below the normal ones.
    """
    product, wide_z = x.astype(np.float64) * y, z.astype(np.float64)
    total = product + wide_z
    result = total.astype(np.float32)
    doubtful = (total.view(np.uint64) & BELOW) == HALF
    small = np.abs(result) < TINY
    if small.any():
        doubtful = doubtful | (small & (total != 0))
    if doubtful.any():
        exact = exact_sum(*np.broadcast_arrays(product, wide_z)).astype(np.float32)
        result = np.where(doubtful, exact, result)
    return result


def fma64(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x·y + z of float64, rounded once (Boldo and Melquiond, 2008)."""
    x, y, z = np.broadcast_arrays(x, y, z)
    plain = x * y + z
    # Beyond these, parts of the sum overflow, or are below what float64 has.
    of_x, of_y, of_z = (np.frexp(v)[1] for v in (x, y, z))
    usual = np.isfinite(plain)
    for exponent in (of_x, of_y, of_z, of_x + of_y):
        usual = usual & (np.abs(exponent) < 900)
    high, low = two_product(x, y)
    middle, rest = two_sum(z, low)
    top, error = two_sum(high, middle)
    fused = top + exact_sum(error, rest)
    rare = ~usual & np.isfinite(x) & np.isfinite(y) & np.isfinite(z)
    finite = np.isfinite(x) & np.isfinite(y)
    result = np.where(usual, fused, np.where(finite & np.isinf(z), z, plain))
    for at in zip(*np.nonzero(rare), strict=True):
        result[at] = _fma_of_fractions(float(x[at]), float(y[at]), float(z[at]))
    return result


def _fma_of_fractions(x: float, y: float, z: float) -> float:
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if exact == 0:
        return x * y + z
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


# The canonical NaNs: PTX keeps payloads of NaN in double precision only.
NAN = {2: np.array([0x7FFF], np.uint16), 4: np.array([0x7FFFFFFF], np.uint32)}


def canonical(x: np.ndarray) -> np.ndarray:
    """Results with the canonical NaN: numpy's has the sign and payload of its first operand."""
    nan = np.isnan(x)
    if x.dtype == np.float64 or not nan.any():
        return x
    return np.where(nan, NAN[x.dtype.itemsize].view(x.dtype), x)


def flush(x: np.ndarray) -> np.ndarray:
    """Float32 values, those below the normal ones as zeros of their sign (``.ftz``)."""
    size = np.abs(x)
    small = (size < TINY) & (size > 0)
    return np.where(small, np.copysign(np.float32(0), x), x) if small.any() else x
