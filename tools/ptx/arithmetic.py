"""Arithmetic, comparisons, conversions and moves of registers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .instructions import Run, decodes
from .parse import Immediate, Instruction, Pair, Vector, is_type, width
from .values import (
    SHARED_WINDOW,
    UNSIGNED,
    canonical,
    flush,
    fma32,
    fma64,
    narrow_bf16,
    numpy_type,
    reader,
    widen_bf16,
    writer,
)

ROUNDINGS = ("rn", "rz", "rm", "rp")
PACKED = ("f16x2", "bf16x2")


def rounding_of(x: Instruction) -> str:
    return next((word for word in x.modifiers if word in ROUNDINGS), "rn")


def compute(x: Instruction, program: Any, function: Callable, types: Any, result: str) -> Run:
    """The result of a function of all operands behind the first, each of its type."""
    if isinstance(types, str):
        types = [types] * (len(x.operands) - 1)
    reads = [
        reader(operand, type, program.entry.symbols)
        for operand, type in zip(x.operands[1:], types, strict=True)
    ]
    write = writer(x.operands[0], result)

    def run(m: Any, mask: Any) -> None:
        R = m.registers
        write(R, function(*[read(R) for read in reads]), mask)

    return run


def with_float_rules(x: Instruction, function: Callable) -> Callable:
    """Canonical NaN, except of sign changes; ``.ftz`` flushes."""
    if x.opcode not in ("neg", "abs"):
        computed = function
        function = lambda *values: canonical(computed(*values))  # noqa: E731
    if "ftz" in x.modifiers and x.type == "f32":
        inner = function
        function = lambda *values: flush(inner(*map(flush, values)))  # noqa: E731
    return function


def packed(function: Callable, type: str) -> Callable:
    """The same for both halves of 32 bits."""

    def run(*values: np.ndarray) -> np.ndarray:
        halves = []
        for shift in (0, 16):
            parts = [(v >> np.uint32(shift)).astype(np.uint16) for v in values]
            if type == "bf16x2":
                halves.append(narrow_bf16(function(*map(widen_bf16, parts))))
            else:
                halves.append(function(*[p.view(np.float16) for p in parts]).view(np.uint16))
        low, high = (h.astype(np.uint32) for h in halves)
        return low | high << 16

    return run


# Integers


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Rounded towards zero; all ones where the divisor is 0."""
    quotient = a // b
    if a.dtype.kind == "i":
        quotient = quotient + ((quotient < 0) & (quotient * b != a))
    return np.where(b == 0, a.dtype.type(-1) if a.dtype.kind == "i" else ~a.dtype.type(0), quotient)


def remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(b == 0, a, a - divide(a, b) * b)


def high_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of a product of twice the width."""
    product = a.astype(object) * b.astype(object)
    return (product >> 8 * a.dtype.itemsize).astype(a.dtype)


# Floats


def extreme(join: Callable, choose: Callable) -> Callable:
    """The number where one is NaN; −0 below 0."""

    def run(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        whole = UNSIGNED[a.dtype.itemsize * 8]
        zeros = join(a.view(whole), b.view(whole)).view(a.dtype)
        return np.where(a == b, zeros, choose(a, b))

    return run


def with_nan(function: Callable) -> Callable:
    def run(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), function(a, b))

    return run


def negate(a: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "f":
        bits = a.dtype.itemsize * 8
        whole = UNSIGNED[bits]
        return (a.view(whole) ^ whole(1 << (bits - 1))).view(a.dtype)
    return -a


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return fma64(a, b, c) if a.dtype == np.float64 else fma32(a, b, c)


PLAIN = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": negate, "abs": np.abs,
    "min": extreme(np.bitwise_or, np.fmin), "max": extreme(np.bitwise_and, np.fmax), "fma": fused,
}  # fmt: skip
INTEGER = {
    **PLAIN, "min": np.minimum, "max": np.maximum, "div": divide, "rem": remainder,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
}  # fmt: skip


@decodes("add", "sub", "mul", "fma", "min", "max", "neg", "abs", "div", "rem", "mad", "and", "or",
         "xor", "not")  # fmt: skip
def plain(x: Instruction, program: Any) -> Run | None:
    type, words = x.type, x.modifiers
    if type[0] in "usbp" and type not in ("bf16", "bf16x2"):
        return integers(x, program)
    if x.opcode == "div":
        return special(x, program)
    rounded = rounding_of(x) != "rn" or (x.opcode == "fma" and "16" in type)
    if rounded or {"sat", "xorsign", "relu"} & set(words):
        return None
    function = PLAIN[x.opcode]
    if "NaN" in words:
        function = with_nan(function)
    function = with_float_rules(x, function)
    if type in PACKED:
        return compute(x, program, packed(function, type), "b32", "b32")
    return compute(x, program, function, type, type)


def integers(x: Instruction, program: Any) -> Run | None:
    type, words = x.type, x.modifiers
    if x.opcode in ("mul", "mad"):
        result = type[0] + str(2 * width(type)) if "wide" in words else type
        to = numpy_type(result)
        product = high_product if "hi" in words else lambda a, b: a.astype(to, copy=False) * b
        if x.opcode == "mul":
            return compute(x, program, product, type, result)
        return compute(x, program, lambda a, b, c: product(a, b) + c, [type, type, result], result)
    if "sat" in words or "cc" in words:
        return None
    return compute(x, program, INTEGER[x.opcode], type, type)


@decodes("shl", "shr")
def shift(x: Instruction, program: Any) -> Run:
    """By the width or more: 0, or the sign."""
    bits, as_type = width(x.type), numpy_type(x.type)
    keeps_sign = x.opcode == "shr" and x.type[0] == "s"

    def function(a: np.ndarray, by: np.ndarray) -> np.ndarray:
        within = np.minimum(by, np.uint32(bits - 1)).astype(as_type)
        value = a << within if x.opcode == "shl" else a >> within
        return value if keeps_sign else np.where(by < bits, value, as_type(0))

    if isinstance(x.operands[2], Immediate) and 0 <= x.operands[2].bits < bits:
        by = as_type(x.operands[2].bits)
        shifted = np.left_shift if x.opcode == "shl" else np.right_shift
        read = reader(x.operands[1], x.type, program.entry.symbols)
        write = writer(x.operands[0], x.type)
        return lambda m, mask: write(m.registers, shifted(read(m.registers), by), mask)
    return compute(x, program, function, [x.type, "u32"], x.type)


@decodes("bfe")
def extract(x: Instruction, program: Any) -> Run | None:
    """A field's bits; a signed field is extended by its highest bit in range."""
    if width(x.type) != 32:
        return None
    wide = np.int64 if x.type[0] == "s" else np.uint64

    def function(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
        up = (64 - np.minimum(length & 255, 32)).astype(wide)
        field = a.astype(wide) >> np.minimum(start & 255, 63).astype(wide) << up >> up
        return np.where(length & 255, field, 0).astype(a.dtype)

    return compute(x, program, function, [x.type, "u32", "u32"], x.type)


@decodes("brev")
def reverse_bits(x: Instruction, program: Any) -> Run:
    bits, as_type = width(x.type), numpy_type(x.type)

    def function(a: np.ndarray) -> np.ndarray:
        places = np.arange(bits, dtype=as_type)
        return ((a[:, None] >> places & as_type(1)) << places[::-1]).sum(1, dtype=as_type)

    return compute(x, program, function, x.type, x.type)


@decodes("bfind")
def find(x: Instruction, program: Any) -> Run | None:
    """Place of the highest bit that is set, or the shift that brings it there; −1 for none."""
    if x.type != "u32":
        return None

    def function(a: np.ndarray) -> np.ndarray:
        place = np.frexp(a.astype(np.float64))[1] - 1
        if "shiftamt" in x.modifiers:
            place = np.where(place < 0, -1, 31 - place)
        return place.astype(np.int32).view(np.uint32)

    return compute(x, program, function, x.type, "u32")


@decodes("popc")
def count_bits(x: Instruction, program: Any) -> Run:
    return compute(x, program, lambda a: np.bitwise_count(a).astype(np.uint32), x.type, "u32")


@decodes("prmt")
def permute(x: Instruction, program: Any) -> Run | None:
    """Each byte of the result is one of eight, or its sign."""
    if x.modifiers != ("b32",):
        return None

    def function(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
        both = b.astype(np.uint64) << np.uint64(32) | a
        result = np.zeros(1, np.uint32)
        for place in range(4):
            choice = selector >> np.uint32(4 * place) & np.uint32(15)
            byte = both >> ((choice & 7) * 8).astype(np.uint64) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            byte = np.where(choice & 8, sign, byte).astype(np.uint32)
            result = result | byte << np.uint32(8 * place)
        return result

    return compute(x, program, function, "b32", "b32")


EXACT = {"sqrt": np.sqrt, "rcp": np.reciprocal, "div": np.divide}
FUNCTIONS = {**EXACT, "ex2": np.exp2, "lg2": np.log2, "rsqrt": lambda a: 1 / np.sqrt(a)}


@decodes("ex2", "lg2", "sqrt", "rsqrt", "rcp")
def special(x: Instruction, program: Any) -> Run | None:
    """``.approx`` and ``.full`` are computed in float64 and rounded once."""
    if x.type not in ("f32", "f64") or rounding_of(x) != "rn":
        return None
    function = EXACT.get(x.opcode)
    if {"approx", "full"} & set(x.modifiers):
        wide = FUNCTIONS[x.opcode]

        def function(*values: np.ndarray) -> np.ndarray:
            return wide(*(v.astype(np.float64) for v in values)).astype(values[0].dtype)

    return function and compute(x, program, with_float_rules(x, function), x.type, x.type)


@decodes("copysign")
def copy_sign(x: Instruction, program: Any) -> Run:
    return compute(x, program, lambda a, b: np.copysign(b, a), x.type, x.type)


# Comparisons and choices

COMPARED = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
OTHER_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def comparison(name: str, is_float: bool) -> Callable:
    """By PTX's name: ordered ones are false of NaN, those that end in u true."""
    if not is_float:
        return COMPARED[OTHER_NAMES.get(name, name)]
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name == "ne":
        return lambda a, b: (a < b) | (a > b)
    if name == "neu":
        return np.not_equal
    if name in COMPARED:
        return COMPARED[name]
    inner = COMPARED[name[:-1]]
    return lambda a, b: inner(a, b) | np.isnan(a) | np.isnan(b)


@decodes("setp")
def compare(x: Instruction, program: Any) -> Run | None:
    function = comparison(x.modifiers[0], x.type[0] == "f" or x.type == "bf16")
    joined = isinstance(x.operands[0], Pair) or len(x.operands) > 3
    return None if joined or "ftz" in x.modifiers else compute(x, program, function, x.type, "pred")


@decodes("selp")
def choose(x: Instruction, program: Any) -> Run:
    type = f"b{width(x.type)}"
    return compute(x, program, lambda a, b, p: np.where(p, a, b), [type, type, "pred"], type)


# Moves and conversions


@decodes("mov")
def move(x: Instruction, program: Any) -> Run:
    target, source = x.operands
    type, symbols = f"b{width(x.type)}" if x.type != "pred" else "pred", program.entry.symbols
    if isinstance(target, Vector):
        part = width(x.type) // len(target.items)
        read = reader(source, type, symbols)
        writes = [writer(item, f"b{part}") for item in target.items]
        small, big = UNSIGNED[part], UNSIGNED[width(x.type)]

        def unpack(m: Any, mask: Any) -> None:
            whole = read(m.registers)
            for place, write in enumerate(writes):
                write(m.registers, (whole >> big(part * place)).astype(small), mask)

        return unpack
    if isinstance(source, Vector):
        part = width(x.type) // len(source.items)
        reads = [reader(item, f"b{part}", symbols) for item in source.items]
        write, big = writer(target, type), UNSIGNED[width(x.type)]

        def pack(m: Any, mask: Any) -> None:
            whole = big(0)
            for place, read in enumerate(reads):
                whole = whole | read(m.registers).astype(big) << big(part * place)
            write(m.registers, whole, mask)

        return pack
    return compute(x, program, lambda a: a, type, type)


@decodes("cvta")
def convert_address(x: Instruction, program: Any) -> Run:
    """Between the generic window and a space's own; global addresses are the same in both."""
    if not any(word.startswith("shared") for word in x.modifiers):
        return compute(x, program, lambda a: a, "u64", "u64")
    offset = np.uint64(SHARED_WINDOW)
    if "to" in x.modifiers:
        return compute(x, program, lambda a: a - offset, "u64", "u64")
    return compute(x, program, lambda a: a + offset, "u64", "u64")


@decodes("cvt")
def convert(x: Instruction, program: Any) -> Run | None:
    to, of = [word for word in x.modifiers if is_type(word)][-2:]
    words = set(x.modifiers)
    if words & {"relu", "satfinite", "sat", "ftz"} or (of, to) == ("bf16", "bf16"):
        return None
    if to in PACKED:
        if of != "f32" or "rn" not in words:
            return None
        half = narrow_bf16 if to == "bf16x2" else bits_of_half
        # The first operand becomes the upper half.
        return compute(
            x, program, lambda a, b: half(a).astype(np.uint32) << 16 | half(b), "f32", "b32"
        )
    if to == "tf32":
        return compute(x, program, round_tf32, "f32", "b32") if "rna" in words else None
    function = conversion(of, to, words)
    return None if function is None else compute(x, program, function, of, to)


def bits_of_half(a: np.ndarray) -> np.ndarray:
    return canonical(a.astype(np.float16)).view(np.uint16)


def round_tf32(a: np.ndarray) -> np.ndarray:
    """To 10 digits, halves away from zero."""
    bits = a.view(np.uint32)
    return np.where(np.isfinite(a), (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000), bits)


def conversion(of: str, to: str, words: set[str]) -> Callable | None:
    of_float, to_float = (type[0] == "f" or type == "bf16" for type in (of, to))
    if not to_float:
        as_type = numpy_type(to)
        return to_integer(of, to, words) if of_float else lambda a: a.astype(as_type)
    if words & {"rz", "rm", "rp"} or (of, to) == ("f64", "bf16"):
        return None
    whole = (integral_rounding(words) if of_float else None) or (lambda a: a)
    as_type = numpy_type(to)
    return lambda a: canonical(whole(a).astype(as_type))


def integral_rounding(words: set[str]) -> Callable | None:
    names = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    return next((names[word] for word in names if word in words), None)


def to_integer(of: str, to: str, words: set[str]) -> Callable | None:
    """Values out of range become the nearest; NaN 0, or 2⁶³ where 64 bits are involved."""
    rounded = integral_rounding(words)
    if rounded is None:
        return None
    as_type = numpy_type(to)
    limits = np.iinfo(as_type)
    of_nan = 0
    if of == "f64" or width(to) == 64:
        of_nan = limits.min if to[0] == "s" else 1 << (width(to) - 1)

    def function(a: np.ndarray) -> np.ndarray:
        whole = rounded(a.astype(np.float64))
        high, low = whole >= float(limits.max), whole <= float(limits.min)
        inside = np.where(high | low | np.isnan(whole), 0.0, whole).astype(as_type)
        result = np.where(high, as_type(limits.max), np.where(low, as_type(limits.min), inside))
        return np.where(np.isnan(whole), as_type(of_nan), result)

    return function
