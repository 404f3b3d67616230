"""Loads, stores, atomics and asynchronous copies."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .instructions import Run, access_size, decodes, space_of
from .memory import COPIED
from .parse import Address, Immediate, Instruction, Register, Symbol, Vector, is_type, width
from .values import SHARED_WINDOW, UNSIGNED, numpy_type, reader, writer

# Words of loads and stores that say how to cache, or how strongly to order what is ordered here
# anyway: instructions take effect at once and in the order of the program.
IGNORED = {
    "nc", "ca", "cg", "cs", "cv", "lu", "wb", "wt", "volatile", "relaxed", "acquire", "release",
    "acq_rel", "weak", "cta", "cluster", "gpu", "sys", "noftz",
}  # fmt: skip


def known_words(x: Instruction, *more: str) -> bool:
    """Whether all modifiers of an access are supported."""
    spaces = ("global", "shared", "shared::cta", "param", "v2", "v4", "v8")
    return all(
        word in IGNORED or word in spaces or word in more or is_type(word)
        or word.startswith(("L1::", "L2::"))
        for word in x.modifiers
    )  # fmt: skip


def address_of(x: Address, program: Any) -> Callable[[Any], np.ndarray]:
    """Addresses (threads,) of an operand."""
    base, offset = x
    if isinstance(base, (Immediate, Symbol)):
        start = base.bits if isinstance(base, Immediate) else program.entry.symbols[base.name]
        fixed = np.array([start + offset], np.uint64)
        return lambda m: np.broadcast_to(fixed, m.size)
    index, unsigned = base.index, UNSIGNED[base.bits]
    step = np.array(offset).astype(np.int64).view(np.uint64)

    def read(m: Any) -> np.ndarray:
        address = m.registers[index].view(unsigned).astype(np.uint64) + step
        return np.broadcast_to(address, m.size) if len(address) == 1 else address

    return read


def elements(x: Instruction, operand: Any) -> tuple:
    return operand.items if isinstance(operand, Vector) else (operand,)


@decodes("ld")
def load(x: Instruction, program: Any) -> Run | None:
    space = space_of(x)
    if space == "param":
        return load_parameter(x, program)
    if space in ("local", "const") or not known_words(x):
        return None
    address, size = address_of(x.operands[1], program), access_size(x)
    writes = [writer(item, x.type) for item in elements(x, x.operands[0])]
    each, as_type = UNSIGNED[width(x.type)], numpy_type(x.type)
    if x.type == "bf16":
        return None
    if len(writes) * width(x.type) // 8 != size:
        return None

    def run(m: Any, mask: Any) -> None:
        lanes, at = m.lanes(mask), address(m)
        if mask is not None:
            at = at[lanes]
        values = read(m, x, space, at, size, lanes)
        values = values.view(each).reshape(len(lanes), -1)
        for place, write in enumerate(writes):
            value = m.spread(np.ascontiguousarray(values[:, place]), mask)
            write(m.registers, value.view(as_type), mask)

    return run


def placed(m: Any, space: str, at: np.ndarray) -> Iterator[tuple[Any, Any, np.ndarray]]:
    """Each memory, which of the accesses are to it, and their addresses there."""
    if space != "generic":
        yield m.memory if space == "global" else m.shared, slice(None), at
        return
    is_shared = at >= np.uint64(SHARED_WINDOW)
    for memory, mine, base in ((m.memory, ~is_shared, 0), (m.shared, is_shared, SHARED_WINDOW)):
        which = np.flatnonzero(mine)
        if len(which):
            yield memory, which, at[which] - np.uint64(base)


def read(m: Any, x: Instruction, space: str, at: Any, size: int, lanes: np.ndarray) -> np.ndarray:
    result = None
    for memory, which, own in placed(m, space, at):
        values = memory.read(m, x, own, size, lanes[which])
        if len(values) == len(at):
            return values
        if result is None:
            result = np.zeros((len(at), *values.shape[1:]), values.dtype)
        result[which] = values
    return result


def write(m: Any, x: Instruction, space: str, at: Any, size: int, lanes: Any, values: Any) -> None:
    for memory, which, own in placed(m, space, at):
        memory.write(m, x, own, size, lanes[which], values[which])


@decodes("st")
def store(x: Instruction, program: Any) -> Run | None:
    space = space_of(x)
    if space in ("param", "local", "const") or not known_words(x):
        return None
    address, size = address_of(x.operands[0], program), access_size(x)
    type = f"b{width(x.type)}"
    reads = [reader(item, type, program.entry.symbols) for item in elements(x, x.operands[1])]
    if len(reads) * width(type) // 8 != size:
        return None
    whole = UNSIGNED[min(size, 8) * 8]

    def run(m: Any, mask: Any) -> None:
        lanes, at = m.lanes(mask), address(m)
        values = [np.broadcast_to(get(m.registers), m.size) for get in reads]
        if mask is not None:
            at, values = at[lanes], [v[lanes] for v in values]
        joined = values[0] if len(values) == 1 else np.stack(values, 1).view(whole)
        if joined.ndim == 2 and size <= 8:
            joined = joined[:, 0]
        write(m, x, space, at, size, lanes, joined)

    return run


def load_parameter(x: Instruction, program: Any) -> Run:
    size, as_type = width(x.type) // 8, numpy_type(x.type)
    base = x.operands[1].base
    address = address_of(x.operands[1], program)
    writes = [writer(item, x.type) for item in elements(x, x.operands[0])]

    def run(m: Any, mask: Any) -> None:
        at = address(m)
        if not isinstance(base, Register) or (at == at[0]).all():
            at = at[:1]
        parameters = np.frombuffer(m.parameters, np.uint8)
        for place, write in enumerate(writes):
            bytes_read = parameters[at[:, None].astype(np.int64) + np.arange(size) + place * size]
            write(m.registers, bytes_read.view(as_type)[:, 0], mask)

    return run


# Atomics

CHANGES: dict[str, Callable] = {
    "add": np.add, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "exch": lambda old, new: new, "min": np.minimum, "max": np.maximum,
}  # fmt: skip


@decodes("createpolicy")
def cache_policy(x: Instruction, program: Any) -> Run:
    """A policy for the L2 cache, which changes no value."""
    write = writer(x.operands[0], "b64")

    def run(m: Any, mask: Any) -> None:
        write(m.registers, np.zeros(m.size, np.uint64), mask)

    return run


@decodes("atom", "red")
def atomic(x: Instruction, program: Any) -> Run | None:
    space, size = space_of(x), access_size(x)
    more = (*CHANGES, "cas")
    if (
        space not in ("global", "shared")
        or not known_words(x, *more)
        or x.type in ("bf16", "f16x2")
    ):
        return None
    target, *operands = x.operands if x.opcode == "atom" else (None, *x.operands)
    address, symbols = address_of(operands[0], program), program.entry.symbols
    name = next(word for word in x.modifiers if word in more)
    as_type, bits = numpy_type(x.type), UNSIGNED[width(x.type)]
    reads = [reader(item, x.type, symbols) for item in operands[1:]]
    written = writer(target, f"b{width(x.type)}")
    ordered = bool({"acquire", "release", "acq_rel"} & set(x.modifiers)) or any(
        other.opcode in ("fence", "membar") and "proxy" not in other.modifiers
        for other in program.entry.instructions
    )

    def run(m: Any, mask: Any) -> None:
        lanes, at = m.lanes(mask), address(m)
        values = [np.broadcast_to(get(m.registers), m.size)[lanes] for get in reads]

        def change(old: np.ndarray, which: np.ndarray) -> np.ndarray:
            if name == "cas":
                swapped = old.view(bits) == values[0][which].view(bits)
                return np.where(swapped, values[1][which].view(bits), old)
            return CHANGES[name](old.view(as_type), values[0][which]).astype(as_type).view(bits)

        at = at[lanes] if mask is not None else at
        if space == "global":
            olds = m.memory.atomic(m, x, at, size, lanes, change, ordered)
        else:
            olds = m.shared.atomic(m, x, at, size, lanes, change)
        written(m.registers, m.spread(olds.astype(bits), mask), mask)

    return run


# Asynchronous copies


@decodes("cp")
def copy(x: Instruction, program: Any) -> Run | None:
    words = x.modifiers
    if "async" not in words or "bulk" in words or "mbarrier" in words:
        return None
    if "commit_group" in words:
        return lambda m, mask: commit(m, mask)
    if "wait_group" in words:
        pending = x.operands[0].bits
        return lambda m, mask: wait(m, mask, pending)
    if not isinstance(x.operands[2], Immediate):
        return None
    size = x.operands[2].bits
    target, source = (address_of(operand, program) for operand in x.operands[:2])
    given = len(x.operands) > 3
    if given and isinstance(x.operands[3], Register) and x.operands[3].bits == 1:
        return None  # ignore-src
    length = reader(x.operands[3], "u32", program.entry.symbols) if given else None

    def run(m: Any, mask: Any) -> None:
        lanes = m.lanes(mask)
        to, of = target(m)[lanes], source(m)[lanes]
        places = m.shared.places(m, x, to, size, lanes)
        m.counts.wavefronts(to, size, lanes)
        kept = np.full(len(lanes), size)
        if length is not None:
            kept = np.broadcast_to(length(m.registers), m.size)[lanes].astype(np.int64)
        values = np.zeros((len(lanes), 2) if size == 16 else len(lanes), f"u{min(size, 8)}")
        whole = np.flatnonzero(kept == size)
        if len(whole):
            values[whole] = m.memory.read(m, x, of[whole], size, lanes[whole])
        for item in np.flatnonzero((kept > 0) & (kept < size)):  # the rest becomes zeros
            part = values[item : item + 1].view(np.uint8).reshape(-1)
            for byte in range(int(kept[item])):
                at = of[item : item + 1] + np.uint64(byte)
                part[byte] = m.memory.read(m, x, at, 1, lanes[item : item + 1])[0]
        m.shared.copy_in(m, x, places, size, lanes, values)

    return run


def commit(m: Any, mask: Any) -> None:
    m.copies_committed = m.copies_committed + (1 if mask is None else mask)
    if m.copies_committed.max() >= len(m.copies_done_at):
        more = np.full_like(m.copies_done_at, COPIED)
        m.copies_done_at = np.concatenate([m.copies_done_at, more])


def wait(m: Any, mask: Any, pending: int) -> None:
    """Wait until at most this number of a thread's groups is pending."""
    done = np.maximum(m.copies_done, m.copies_committed - pending)
    if mask is not None:
        done = np.where(mask, done, m.copies_done)
    for group in range(int(m.copies_done.min()), int(done.max())):
        now_done = (m.copies_done <= group) & (group < done)
        m.copies_done_at[group] = np.where(now_done, m.epoch, m.copies_done_at[group])
    m.copies_done = done.astype(np.int32)
