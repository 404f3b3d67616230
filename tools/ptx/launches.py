"""A launch: its tensors, its parameters, its CTAs, a few at a time."""

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from .counting import Counter, Counts, class_of
from .machine import Machine, Program, program
from .memory import Global, Region
from .parse import Entry, width

# How many threads run together, where each CTA has fewer.
TOGETHER = 4096
# Which bytes of a tensor are written, by their address.
Written = dict[tuple[int, int], np.ndarray]


def launch(
    ptx: str,
    *,
    grid: Sequence[int],
    threads: int | Sequence[int],
    shared: int = 0,
    args: Sequence[Any] = (),
    fresh: Sequence[Tensor] = (),
) -> Counts:
    """Execute the one entry of a PTX text on CPU tensors, which its stores change in place.

    Args:
        grid: CTAs in one to three dimensions.
        threads: of a CTA, a multiple of 32.
        shared: bytes of shared memory that the launch adds to what the text declares.
        args: the entry's parameters in order: tensors (a pointer to their first element), numbers,
            ``bytes`` for a structure. Pointers missing at the end are null.
        fresh: tensors that nobody has written to yet; reading one before is a hazard.

    Raises:
        Hazard: the program does what it may not rely on.
        UnknownInstruction: an instruction that is not known here.
    """
    written = {extent(x): np.zeros(extent(x)[1] - extent(x)[0], bool) for x in fresh}
    sizes = (threads,) if isinstance(threads, int) else threads
    return execute(program(ptx), grid, sizes, shared, args, written)


def execute(
    of: Program,
    grid: Sequence[int],
    threads: Sequence[int],
    shared: int,
    args: Sequence[Any],
    written: Written,
) -> Counts:
    grid3, threads3 = ((*map(int, sizes), 1, 1)[:3] for sizes in (grid, threads))
    per_cta = threads3[0] * threads3[1] * threads3[2]
    if per_cta % 32:
        raise ValueError(f"threads: {per_cta} of a CTA are not whole warps")
    if of.entry.threads not in (None, per_cta):
        raise ValueError(f"threads: {per_cta}, but the text requires {of.entry.threads}")
    tensors = [x for x in flat(args) if isinstance(x, Tensor)]
    memory = Global([extent(x) for x in tensors], of.grains["global"])
    for region in memory.regions:
        mark_fresh(region, written)
    counter, counts = Counter(), {}
    parameters = packed(of.entry, list(flat(args)))
    ctas = range(grid3[0] * grid3[1] * grid3[2])
    together = max(TOGETHER // per_cta, 1)
    size = of.entry.static_shared + shared
    with np.errstate(all="ignore"):
        for first in range(0, len(ctas), together):
            machine = Machine(
                of, ctas[first : first + together], grid3, threads3, size, memory, counter,
                parameters,
            )  # fmt: skip
            machine.block_counts = counts
            machine.run()
    for region in memory.regions:
        keep_fresh(region, written)
    return summary(of, counter, counts, memory)


def summary(of: Program, counter: Counter, blocks: dict[int, int], memory: Global) -> Counts:
    result = counter.result
    for place, warps in blocks.items():
        for instruction in of.blocks[place].instructions:
            result.by_class[class_of(instruction)] += warps
    result.instructions = sum(result.by_class.values())
    for region in memory.regions:
        for shadow, what in ((region.reader, "read"), (region.writer, "written")):
            if shadow is not None:
                name = f"global_bytes_{what}"
                grains = int(np.count_nonzero(shadow))
                setattr(result, name, getattr(result, name) + grains * memory.grain)
    return result


def flat(args: Sequence[Any]) -> Iterator[Any]:
    for x in args:
        if isinstance(x, (tuple, list)):
            yield from flat(x)
        else:
            yield x


def extent(x: Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and behind its last."""
    if x.numel() == 0:
        return x.data_ptr(), x.data_ptr()
    if x.device.type != "cpu":
        raise ValueError(f"args: a tensor on {x.device}; the machine runs on CPU tensors")
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def mark_fresh(region: Region, written: Written) -> None:
    for (start, stop), known in written.items():
        low, high = max(start, region.start), min(stop, region.stop)
        if low < high:
            if region.written is None:
                region.written = np.ones(region.size, bool)
            region.written[low - region.low : high - region.low] = known[low - start : high - start]


def keep_fresh(region: Region, written: Written) -> None:
    for (start, stop), known in written.items():
        low, high = max(start, region.start), min(stop, region.stop)
        if low < high:
            known[low - start : high - start] = region.written[low - region.low : high - region.low]


def packed(entry: Entry, args: list[Any]) -> bytes:
    """The parameters as they lie in memory."""
    size = max((p.offset + p.size for p in entry.parameters), default=0)
    result = bytearray(size)
    if len(args) > len(entry.parameters):
        raise ValueError(f"args: {len(args)} for {len(entry.parameters)} parameters")
    for number, parameter in enumerate(entry.parameters):
        if number >= len(args):
            if width(parameter.type) != 64:
                raise ValueError(f"args: none for {parameter.name}, which is no pointer")
            continue
        value = args[number]
        if isinstance(value, Tensor):
            value = value.data_ptr()
        if isinstance(value, bytes):
            data = value
        elif isinstance(value, float):
            data = struct.pack({4: "f", 8: "d", 2: "e"}[parameter.size], value)
        else:
            bits = 8 * parameter.size
            data = (int(value or 0) & ((1 << bits) - 1)).to_bytes(parameter.size, "little")
        result[parameter.offset : parameter.offset + parameter.size] = data
    return bytes(result)
