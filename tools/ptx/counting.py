"""Counters of instructions and memory accesses of a launch."""

import collections
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

# Opcode → class; other opcodes are "float", "double" or "integer" by their type.
CLASSES = {
    **dict.fromkeys(("ex2", "lg2", "rcp", "rsqrt", "sqrt", "div"), "special"),
    **dict.fromkeys(("mov", "selp", "prmt", "cvta"), "move"),
    **dict.fromkeys(("bra", "ret", "exit"), "branch"),
    **dict.fromkeys(("shfl", "vote", "redux"), "warp"),
    **dict.fromkeys(("bar", "barrier", "fence", "membar", "griddepcontrol"), "barrier"),
    **dict.fromkeys(("ldmatrix", "stmatrix"), "shared"),
    **dict.fromkeys(("mma", "wgmma"), "tensor"),
    **dict.fromkeys(("atom", "red"), "atomic"),
    "cvt": "convert",
    "setp": "compare",
    "cp": "copy",
}


def class_of(instruction: Any) -> str:
    """The class that an instruction is counted in."""
    name, modifiers = instruction.opcode, instruction.modifiers
    if name in ("ld", "st"):
        spaces = ("param", "global", "local", "const")
        if any(x.startswith("shared") for x in modifiers):
            return "shared"
        return next((x for x in modifiers if x in spaces), "generic")
    if name in ("div", "sqrt", "rcp") and modifiers[-1][0] in "us":
        return "integer"
    if name in CLASSES:
        return CLASSES[name]
    last = modifiers[-1] if modifiers else ""
    return {"f64": "double", "pred": "compare"}.get(last, "float" if "f" in last else "integer")


@dataclass
class Counts:
    """Counts of one launch. Instructions are counted for each warp, predicated ones too."""

    instructions: int = 0
    by_class: collections.Counter[str] = field(default_factory=collections.Counter)
    divergent: int = 0  # branches of a warp that its threads leave on both sides
    global_bytes_read: int = 0  # distinct ones
    global_bytes_written: int = 0
    global_sectors_read: int = 0  # of 32 bytes, that the instructions of warps request
    global_sectors_written: int = 0
    shared_conflicts: int = 0  # wavefronts beyond the first of what could be one
    barriers: int = 0  # of a CTA each
    mma_flops: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        names = (each.name for each in fields(self))
        return Counts(*(getattr(self, name) + getattr(other, name) for name in names))


class Counter:
    """Counts while a launch runs."""

    def __init__(self) -> None:
        self.result = Counts()
        self.known_conflicts: dict[tuple[int, bytes], int] = {}

    def sectors(self, address: np.ndarray, lanes: np.ndarray, what: str) -> None:
        """Distinct sectors of each warp's accesses, of which each lies in one."""
        keys = (lanes // 32).astype(np.uint64) << np.uint64(52) | address >> np.uint64(5)
        steps = keys[1:] != keys[:-1]
        if (keys[1:] < keys[:-1]).any():
            count = len(np.unique(keys))
        else:
            count = int(np.count_nonzero(steps)) + 1
        name = f"global_sectors_{what}"
        setattr(self.result, name, getattr(self.result, name) + count)

    def wavefronts(self, address: np.ndarray, size: int, lanes: np.ndarray) -> None:
        """Passes beyond the first over the 32 banks of 4 bytes.

        Accesses of 8 bytes take a half warp at a time, those of 16 a quarter.
        """
        key = (size, address.tobytes() + lanes.tobytes())
        if key not in self.known_conflicts:
            at_once = 32 // max(size // 4, 1)
            words = address.astype(np.int64)[:, None] // 4 + np.arange(max(size // 4, 1))
            group = np.broadcast_to((lanes // at_once)[:, None], words.shape)
            order = np.lexsort((words.ravel(), group.ravel()))
            words, group = words.ravel()[order], group.ravel()[order]
            first = np.r_[True, (words[1:] != words[:-1]) | (group[1:] != group[:-1])]
            slots = group[first] * 32 + words[first] % 32
            passes = np.bincount(slots, minlength=(int(group.max()) + 1) * 32).reshape(-1, 32)
            self.known_conflicts[key] = int(np.maximum(passes.max(1) - 1, 0).sum())
        self.result.shared_conflicts += self.known_conflicts[key]
