"""Decoders: from an instruction to a function of the machine and a mask of threads."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .parse import Instruction, width
from .values import unknown

if TYPE_CHECKING:
    from .machine import Machine, Program

Run = Callable[["Machine", Any], None]
# Opcode → decoder.
DECODERS: dict[str, Callable[[Instruction, "Program"], Run]] = {}


def decodes(*opcodes: str) -> Callable:
    """Decorator that registers a decoder for these opcodes."""

    def register(decoder: Callable) -> Callable:
        DECODERS.update(dict.fromkeys(opcodes, decoder))
        return decoder

    return register


def decode(instruction: Instruction, program: "Program") -> Run:
    decoder = DECODERS.get(instruction.opcode)
    if decoder is None:
        raise unknown(instruction)
    try:
        run = decoder(instruction, program)
    except (KeyError, ValueError, StopIteration, IndexError, TypeError) as error:
        raise unknown(instruction) from error
    if run is None:
        raise unknown(instruction)
    if instruction.guard is None:
        return run
    index, negated = instruction.guard

    def guarded(m: "Machine", mask: Any) -> None:
        chosen = m.registers[index]
        if negated:
            chosen = ~chosen
        if len(chosen) == 1:
            if chosen[0]:
                run(m, mask)
            return
        if mask is not None:
            chosen = chosen & mask
        count = np.count_nonzero(chosen)
        if count:
            run(m, None if count == m.size else chosen)

    return guarded


def space_of(instruction: Instruction) -> str | None:
    """State space of a memory access: "global", "shared", "param", "local" or "generic"."""
    if instruction.opcode in ("ldmatrix", "stmatrix"):
        return "shared"
    if instruction.opcode not in ("ld", "st", "atom", "red"):
        return None
    for word in instruction.modifiers:
        if word in ("global", "param", "local", "const"):
            return word
        if word.startswith("shared"):
            return "shared"
    return "generic"


def touches(instruction: Instruction, space: str) -> bool:
    if instruction.opcode == "cp" and "async" in instruction.modifiers:
        return len(instruction.operands) > 1
    return space_of(instruction) in (space, "generic")


def access_size(instruction: Instruction) -> int:
    """Smallest number of bytes that a thread reads or writes at once."""
    if instruction.opcode in ("ldmatrix", "stmatrix"):
        return 16
    if instruction.opcode == "cp":
        return instruction.operands[2].bits
    count = next((int(x[1:]) for x in instruction.modifiers if x in ("v2", "v4", "v8")), 1)
    return count * width(instruction.type) // 8
