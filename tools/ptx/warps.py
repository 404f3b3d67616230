"""Warp instructions and barriers."""

from typing import Any

import numpy as np

from .instructions import Run, decodes
from .parse import Immediate, Instruction, Pair
from .values import numpy_type, reader, writer


@decodes("bar", "barrier")
def barrier(x: Instruction, program: Any) -> Run | None:
    if "warp" in x.modifiers:

        def warp_barrier(m: Any, mask: Any) -> None:
            m.warp_epoch = m.warp_epoch + (1 if mask is None else mask)

        return warp_barrier
    if "sync" not in x.modifiers or not isinstance(x.operands[0], Immediate):
        return None
    count = x.operands[1].bits if len(x.operands) > 1 else None

    def cta_barrier(m: Any, mask: Any) -> None:
        if count not in (None, m.threads):
            raise NotImplementedError(f"line {x.line}: {x.text}: a barrier of part of a CTA")
        arrived = m.size if mask is None else np.count_nonzero(mask)
        m.counts.result.barriers += int(arrived) // m.threads
        m.epoch = m.epoch + (np.int32(1) if mask is None else mask)

    return cta_barrier


EVERYONE = np.uint32(0xFFFFFFFF)


def warp_values(m: Any, value: np.ndarray) -> np.ndarray:
    """Values (warps, 32)."""
    return np.broadcast_to(value, m.size).reshape(-1, 32)


def members_of(named: np.ndarray) -> np.ndarray:
    """Masks as booleans (warps, threads, whom they name)."""
    return (named[:, :, None] >> np.arange(32, dtype=np.uint32) & np.uint32(1)).astype(bool)


def taking_part(m: Any, mask: Any) -> np.ndarray:
    if mask is None:
        return np.ones((m.size // 32, 32), bool)
    return mask.reshape(-1, 32)


@decodes("shfl")
def shuffle(x: Instruction, program: Any) -> Run | None:
    mode, symbols = x.modifiers[1], program.entry.symbols
    if x.modifiers[0] != "sync" or mode not in ("up", "down", "bfly", "idx"):
        return None
    target = x.operands[0] if isinstance(x.operands[0], Pair) else Pair(x.operands[0], None)
    value = reader(x.operands[1], "b32", symbols)
    by, clamp, members = (reader(operand, "u32", symbols) for operand in x.operands[2:])
    write, write_valid = writer(target.first, "b32"), writer(target.second, "pred")
    fixed = all(isinstance(operand, Immediate) for operand in x.operands[2:])
    known: dict[int, np.ndarray] = {}  # threads that run together → whom each reads from

    def run(m: Any, mask: Any) -> None:
        R = m.registers
        values = np.broadcast_to(value(R), m.size)
        source = known.get(m.size)
        if source is None or mask is not None or target.second is not None:
            lane, valid = source_lanes(mode, warp_values(m, by(R)), warp_values(m, clamp(R)))
            check_members(m, x, mask, warp_values(m, members(R)), lane)
            source = (lane + m.lane.reshape(-1, 32)[:, :1]).reshape(-1)
            write_valid(R, valid.reshape(-1), mask)
            if fixed:
                known[m.size] = source
        write(R, values[source], mask)

    return run


def source_lanes(mode: str, by: np.ndarray, clamp: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which lane each thread reads: its own if out of range. And whether it is in range."""
    lane = np.arange(32)
    by, clamp = by.astype(np.int64), clamp.astype(np.int64)
    by, limit, segment = by & 31, clamp & 31, clamp >> 8 & 31
    first, last = lane & segment, lane & segment | limit & ~segment
    source = {
        "up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": first | by & ~segment
    }[mode]  # fmt: skip
    valid = source >= last if mode == "up" else source <= last
    return np.where(valid, source, lane), valid


def check_members(m: Any, x: Instruction, mask: Any, named: np.ndarray, source: np.ndarray) -> None:
    """Each thread is in the mask that it names, and what it reads from is too."""
    if (named == EVERYONE).all():
        return
    named = named.astype(np.int64)
    wrong = taking_part(m, mask) & ((named >> np.arange(32) & 1 == 0) | (named >> source & 1 == 0))
    m.refuse("convergence", x, m.lane, wrong, "a thread outside of the mask")


@decodes("vote")
def vote(x: Instruction, program: Any) -> Run | None:
    if x.modifiers[1] != "ballot":
        return None
    value, members = (
        reader(operand, type, program.entry.symbols)
        for operand, type in zip(x.operands[1:], ("pred", "u32"), strict=True)
    )
    write = writer(x.operands[0], "b32")

    def run(m: Any, mask: Any) -> None:
        named = warp_values(m, members(m.registers))
        check_members(m, x, mask, named, np.arange(32))
        yes = warp_values(m, value(m.registers)) & taking_part(m, mask)
        bits = np.packbits(yes, axis=1, bitorder="little").view(np.uint32)
        write(m.registers, np.repeat(bits, 32) & named.reshape(-1), mask)

    return run


REDUCTIONS = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


@decodes("redux")
def reduce(x: Instruction, program: Any) -> Run | None:
    name, type = x.modifiers[1], x.type
    if type[0] == "f":
        return None
    function, as_type = REDUCTIONS[name], numpy_type(type)
    value, members = (
        reader(operand, t, program.entry.symbols)
        for operand, t in zip(x.operands[1:], (type, "u32"), strict=True)
    )
    write = writer(x.operands[0], type)
    limits = np.iinfo(as_type)
    start = {"min": limits.max, "max": limits.min, "and": -1}.get(name, 0)

    def run(m: Any, mask: Any) -> None:
        named = warp_values(m, members(m.registers))
        check_members(m, x, mask, named, np.arange(32))
        values = warp_values(m, value(m.registers))
        if mask is not None or (named != EVERYONE).any():
            neutral = np.array([start]).astype(as_type)
            spread = np.where(members_of(named), values[:, None, :], neutral)
            result = function.reduce(spread, axis=2, dtype=as_type)
        else:
            result = np.repeat(function.reduce(values, axis=1, dtype=as_type), 32)
        write(m.registers, result.reshape(-1), mask)

    return run


@decodes("fence", "membar")
def fence(x: Instruction, program: Any) -> Run:
    """Orders memory for a thread; only the fence before asynchronous reads is remembered."""
    if "proxy" not in x.modifiers:
        return lambda m, mask: None

    def proxy_fence(m: Any, mask: Any) -> None:
        m.fences = m.fences + (1 if mask is None else mask)

    return proxy_fence
