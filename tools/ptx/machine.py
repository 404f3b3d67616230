"""Execution of several CTAs together: each register is an array over their threads.

All threads start as one group. A divergent branch splits a group in two; the group at the lower
address runs until it meets the other. A ``.sync`` instruction waits for the threads of its mask, a
barrier for the whole CTA.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

# The other modules of instructions are imported for the table that they fill.
from . import arithmetic, instructions, movement, tensor  # noqa: F401
from . import warps as _warps  # noqa: F401
from .counting import Counter
from .memory import COPIED, Global, Hazard, Shared
from .parse import Entry, Immediate, Instruction, Register, parse
from .values import UNSIGNED

Run = Callable[["Machine", Any], None]
# After so many blocks of one group while others could go on, one of these does: it may be what a
# loop waits for.
PATIENCE = 1000


@dataclass
class Block:
    """Instructions that run one after another; only the first may wait for other threads."""

    start: int
    instructions: list[Instruction] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    waits: str = ""  # "barrier" or "convergence"
    branch: Instruction | None = None
    target: int = 0


class Program:
    """An entry, decoded once for all its launches."""

    def __init__(self, ptx: str) -> None:
        self.text, self.entry = ptx, parse(ptx)
        self.grains = {
            space: min(
                (instructions.access_size(x) for x in self.entry.instructions
                 if instructions.touches(x, space)), default=16,
            )
            for space in ("global", "shared")
        }  # fmt: skip
        self.has_products = any(x.opcode == "wgmma" for x in self.entry.instructions)
        self.blocks: dict[int, Block] = {}
        leaders = {0, len(self.entry.instructions), *self.entry.labels.values()}
        for x in self.entry.instructions:
            if x.opcode in ("bra", "ret", "exit"):
                leaders.add(x.index + 1)
            if waits_for(x):
                leaders.add(x.index)
        ordered = sorted(leaders)
        for start, stop in itertools.pairwise(ordered):
            self.blocks[start] = self.block(start, stop)

    def block(self, start: int, stop: int) -> Block:
        block = Block(start)
        for x in self.entry.instructions[start:stop]:
            block.instructions.append(x)
            if x.opcode in ("bra", "ret", "exit"):
                block.branch = x
                if x.opcode == "bra":
                    block.target = self.entry.labels[x.operands[0].name]
            else:
                block.runs.append(instructions.decode(x, self))
        block.waits = waits_for(block.instructions[0])
        return block


def waits_for(x: Instruction) -> str:
    if x.opcode in ("bar", "barrier") and "warp" not in x.modifiers:
        return "barrier"
    return "convergence" if "sync" in x.modifiers else ""


@lru_cache(64)
def program(ptx: str) -> Program:
    return Program(ptx)


# A mask of no thread; None is one of all.
NOBODY = False
# Their last operand is a mask of the threads that take part.
MASKED = ("shfl", "vote", "redux", "bar")


class Machine:
    def __init__(
        self,
        program: Program,
        ctas: Sequence[int],
        grid: tuple[int, int, int],
        threads: tuple[int, int, int],
        shared: int,
        memory: Global,
        counts: Counter,
        parameters: bytes,
    ) -> None:
        self.program, self.memory, self.counts = program, memory, counts
        self.parameters = parameters
        self.threads = threads[0] * threads[1] * threads[2]
        self.size = size = len(ctas) * self.threads
        self.lane = np.arange(size)
        self.thread_number = (self.lane % self.threads).astype(np.int32)
        self.cta_number = (np.repeat(np.array(ctas), self.threads) + 1).astype(np.int32)
        self.block_counts: dict[int, int] = {}
        # Barriers passed, of the CTA and of the warp.
        self.epoch, self.warp_epoch = np.zeros(size, np.int32), np.zeros(size, np.int32)
        # Groups of asynchronous copies, and in which epoch each was waited for.
        self.copies_committed, self.copies_done = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self.copies_done_at = np.full((8, size), COPIED, np.int32)
        self.fences = np.zeros(size, np.int32)
        self.products = tensor.Products(size) if program.has_products else None
        entry = program.entry
        self.shared = Shared(len(ctas), shared, program.grains["shared"], program.has_products)
        self.shared_start = self.lane // self.threads * self.shared.stride
        self.registers: list[np.ndarray] = [np.zeros(1, UNSIGNED[b]) for b in entry.registers]
        self.set_special(entry, grid, threads)
        self.ready: dict[int, Any] = {}  # place → mask of the threads there
        self.blocked: dict[int, Any] = {}

    def set_special(self, entry: Entry, grid: Sequence[int], threads: Sequence[int]) -> None:
        cta, thread = self.cta_number - 1, self.thread_number
        values = {
            "%tid.x": thread % threads[0],
            "%tid.y": thread // threads[0] % threads[1],
            "%tid.z": thread // (threads[0] * threads[1]),
            "%ctaid.x": cta % grid[0],
            "%ctaid.y": cta // grid[0] % grid[1],
            "%ctaid.z": cta // (grid[0] * grid[1]),
            "%laneid": thread % 32,
            "%warpid": thread // 32,
            "%lanemask_lt": (1 << (thread % 32).astype(np.int64)) - 1,
            **{f"%ntid.{axis}": np.array([n]) for axis, n in zip("xyz", threads, strict=True)},
            **{f"%nctaid.{axis}": np.array([n]) for axis, n in zip("xyz", grid, strict=True)},
        }
        for name, value in values.items():
            value = value.astype(np.uint32)
            if name.startswith("%ctaid") and (value == value[0]).all():
                value = value[:1]
            self.registers[entry.special[name]] = value

    def lanes(self, mask: Any) -> np.ndarray:
        return self.lane if mask is None else np.flatnonzero(mask)

    def spread(self, values: np.ndarray, mask: Any) -> np.ndarray:
        """Values of a mask's threads as an array over all."""
        if mask is None:
            return values
        whole = np.zeros(self.size, values.dtype)
        whole[mask] = values
        return whole

    def hazard(self, kind: str, of: Instruction, lane: int, what: str = "") -> Hazard:
        thread, cta = int(self.thread_number[lane]), int(self.cta_number[lane]) - 1
        return Hazard(kind, of, thread, cta, what)

    def refuse(
        self, kind: str, of: Instruction, lanes: np.ndarray, wrong: np.ndarray,
        what: str | Callable[[int], str] = "",
    ) -> None:  # fmt: skip
        """Raise the hazard of the first access (lanes, ...) of which something is wrong."""
        if wrong.any():
            at = int(np.flatnonzero(wrong.reshape(len(lanes), -1).any(1))[0])
            raise self.hazard(kind, of, lanes[at], what if isinstance(what, str) else what(at))

    # Control flow

    def run(self) -> None:
        self.ready[0] = None
        choose = min
        while self.ready or self.blocked:
            if not self.ready:
                self.give_up()
            place = choose(self.ready)
            # A loop without end may wait for what a thread behind it does.
            choose = max if self.follow(place, self.ready.pop(place)) else min

    def give_up(self) -> None:
        place = min(self.blocked)
        mask = self.blocked[place]
        block = self.program.blocks[place]
        raise self.hazard(
            block.waits, block.instructions[0], int(np.flatnonzero(mask)[0]),
            "other threads never come here",
        )  # fmt: skip

    def put(self, place: int, mask: Any) -> None:
        """Threads come to a place where others may wait."""
        for waiting in (self.ready, self.blocked):
            if place in waiting:
                mask = mask | waiting.pop(place)
        if mask is not None and mask.all():
            mask = None
        self.ready[place] = mask

    def follow(self, place: int, mask: Any) -> bool:
        """Run a group until it meets others, waits, ends, or is ahead of others.

        Whether it only ran for too long, while others could go on.
        """
        warps, patience = self.warps(mask), PATIENCE
        while True:
            block = self.program.blocks[place]
            if block.waits and mask is not None:
                mask = self.gathered(block, mask)
                if mask is NOBODY:
                    return False
                warps = self.warps(mask)
            self.block_counts[place] = self.block_counts.get(place, 0) + warps
            if self.products is None:
                for run in block.runs:
                    run(self, mask)
            else:
                for run, instruction in zip(block.runs, block.instructions, strict=False):
                    self.products.check(self, instruction, mask)
                    run(self, mask)
            place = block.start + len(block.instructions)
            if block.branch is not None:
                leaving, staying = self.divide(block.branch, mask)
                if block.branch.opcode != "bra":
                    if staying is NOBODY:
                        return False
                    if staying is not mask:
                        mask, warps = staying, self.warps(staying)
                elif staying is NOBODY:
                    place = block.target
                elif leaving is not NOBODY:
                    self.put(block.target, leaving)
                    self.put(place, staying)
                    return False
            patience -= bool(self.ready)
            if place in self.ready or place in self.blocked or (
                self.ready and (place > min(self.ready) or not patience)
            ):  # fmt: skip
                self.put(place, mask)
                return not patience

    def warps(self, mask: Any) -> int:
        """How many have a thread in a group."""
        if mask is None:
            return self.size // 32
        return int(np.count_nonzero(mask.reshape(-1, 32).any(1)))

    def divide(self, branch: Instruction, mask: Any) -> tuple[Any, Any]:
        """The threads of a group that take a branch and those that don't."""
        if branch.guard is None:
            return mask, NOBODY
        index, negated = branch.guard
        taken = self.registers[index]
        taken = ~taken if negated else taken
        if len(taken) == 1:
            return (mask, NOBODY) if taken[0] else (NOBODY, mask)
        leaving = taken if mask is None else taken & mask
        count = np.count_nonzero(leaving)
        if count == 0:
            return NOBODY, mask
        if count == (self.size if mask is None else np.count_nonzero(mask)):
            return mask, NOBODY
        staying = ~taken if mask is None else ~taken & mask
        both = leaving.reshape(-1, 32).any(1) & staying.reshape(-1, 32).any(1)
        self.counts.result.divergent += int(np.count_nonzero(both))
        return leaving, staying

    def gathered(self, block: Block, mask: Any) -> Any:
        """The threads of a group whose partners are all here; the others wait for theirs."""
        first = block.instructions[0]
        if block.waits == "barrier":
            together = self.threads
        elif first.opcode == "wgmma":
            together = 128
        else:
            together = 32
        named = block.waits == "convergence" and first.opcode in MASKED
        members = first.operands[-1] if named else None
        if isinstance(members, Register):
            here = mask.reshape(-1, 32) @ (np.int64(1) << np.arange(32))
            wanted = np.broadcast_to(self.registers[members.index], self.size).astype(np.int64)
            complete = mask & ((wanted & ~np.repeat(here, 32)) == 0)
        elif isinstance(members, Immediate) and members.bits & 0xFFFFFFFF != 0xFFFFFFFF:
            wanted = (members.bits >> np.arange(32) & 1).astype(bool)
            complete = mask & np.repeat((mask.reshape(-1, 32) | ~wanted).all(1), 32)
        else:
            complete = np.repeat(mask.reshape(-1, together).all(1), together)
        if complete.all() or (complete == mask).all():
            return mask
        self.blocked[block.start] = mask & ~complete
        return complete if complete.any() else NOBODY
