"""Global and shared memory with a record of accesses, from which hazards are found.

Shadow arrays have an element for each `grain` bytes, the shortest access of the program. Time
within a CTA is the number of barriers passed, its epoch. Two accesses in one epoch are unordered,
unless both are by one thread, or by one warp with a ``bar.warp.sync`` between them.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .parse import SHARED_BASE, Instruction

if TYPE_CHECKING:
    from .machine import Machine

# In place of an epoch, later than any: nobody wrote it; an asynchronous copy did.
COPIED, UNWRITTEN = 1 << 29, 1 << 30
# In place of a thread: several of one warp (plus its number), of several warps.
OF_WARP, OF_WARPS = 1 << 24, 1 << 25
ATOMIC = 1 << 26  # an atomic instruction
MANY = -1  # in place of a CTA


class Hazard(Exception):
    """Undefined behaviour of a program, and its place.

    ``kind`` is "bounds" (an address outside every tensor or the shared memory), "alignment",
    "unwritten" (reading what nobody wrote), "race" (two threads of a CTA, one of them writing,
    without a barrier between them), "grid race" (the same of two CTAs, without an atomic),
    "asynchronous" (what a copy or product is still at), "fence" (shared memory or registers that a
    product reads without its fence), "convergence" (a ``.sync`` instruction that part of its mask
    never reaches) or "barrier" (one that part of a CTA misses).
    """

    def __init__(self, kind: str, instruction: Instruction, thread: int, cta: int, what: str = ""):
        self.kind, self.thread, self.cta = kind, thread, cta
        self.instruction = instruction.text
        place = f"thread {thread} of CTA {cta}, line {instruction.line}: {instruction.text}"
        super().__init__(f"{kind}: {what + '; ' if what else ''}{place}")


def bytes_of(extent: tuple[int, int]) -> np.ndarray:
    """The memory between two addresses."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * (extent[1] - extent[0])).from_address(extent[0]))


class Region:
    """Consecutive bytes of one or more tensors."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.low = start // 16 * 16
        size = -(-(stop - self.low) // 16) * 16
        # Beyond start and stop nothing is read or written: addresses are compared with them.
        self.bytes = bytes_of((self.low, self.low + size))
        self.views = {n: self.bytes.view(f"u{n}") for n in (1, 2, 4, 8)}
        self.views[16] = self.bytes.view("u8").reshape(-1, 2)
        self.reader: Any = None  # CTA (from 1) or MANY, of each grain
        self.writer: Any = None
        self.written: Any = None  # of each byte, where the tensor was new
        self.size = size

    def shadows(self, grain: int) -> None:
        if self.reader is None:
            count = self.size // grain
            self.reader, self.read_time = (np.zeros(count, np.int32) for _ in range(2))

    def writer_shadows(self, grain: int) -> None:
        if self.writer is None:
            count = self.size // grain
            self.writer, self.thread, self.epoch, self.write_time = (
                np.zeros(count, np.int32) for _ in range(4)
            )


class Global:
    """The tensors of a launch, at their own addresses."""

    def __init__(self, extents: Sequence[tuple[int, int]], grain: int) -> None:
        self.regions: list[Region] = []
        self.grain = grain
        self.recent: dict[int, Region] = {}  # by instruction
        self.time = 0  # of releases
        self.released: dict[int, dict[int, int]] = {}  # address → CTA → time that it is known to
        self.known: dict[int, dict[int, int]] = {}  # CTA → what it acquired
        for start, stop in sorted(extents):
            if stop <= start:
                continue
            if self.regions and start <= self.regions[-1].stop:
                last = self.regions.pop()
                start, stop = last.start, max(stop, last.stop)
            self.regions.append(Region(start, stop))

    def parts(
        self, m: "Machine", of: Instruction, address: np.ndarray, size: int, lanes: np.ndarray
    ) -> Iterator[tuple[Region, Any, np.ndarray]]:
        """Each region, which of the accesses are to it (None: all), and their places in it."""
        m.refuse("alignment", of, lanes, address & np.uint64(size - 1), place(address, size))
        region = self.recent.get(of.index)
        if region is not None:
            offset = address - np.uint64(region.start)
            if offset.max() <= region.stop - region.start - size:
                yield region, None, (address - np.uint64(region.low)) // np.uint64(size)
                return
        left = np.ones(len(address), bool)
        for region in self.regions:
            room = region.stop - region.start - size
            if room < 0:
                continue
            mine = address - np.uint64(region.start) <= np.uint64(room)
            if mine.any():
                self.recent[of.index] = region
                left &= ~mine
                chosen = None if mine.all() else np.flatnonzero(mine)
                places = (address if chosen is None else address[chosen]) - np.uint64(region.low)
                yield region, chosen, places // np.uint64(size)
        m.refuse("bounds", of, lanes, left, place(address, size))

    def read(
        self, m: "Machine", of: Instruction, address: np.ndarray, size: int, lanes: np.ndarray
    ) -> np.ndarray:
        """Elements of ``size`` bytes, those of 16 as two of 8."""
        m.counts.sectors(address, lanes, "read")
        result = None
        for region, chosen, places in self.parts(m, of, address, size, lanes):
            self.note_read(m, of, region, places, size, lanes if chosen is None else lanes[chosen])
            values = region.views[size][places]
            if chosen is None:
                return values
            if result is None:
                result = np.zeros((len(address), *values.shape[1:]), values.dtype)
            result[chosen] = values
        return result

    def write(self, m, of, address, size, lanes, values) -> None:
        m.counts.sectors(address, lanes, "written")
        for region, chosen, places in self.parts(m, of, address, size, lanes):
            writers = lanes if chosen is None else lanes[chosen]
            new = values if chosen is None else values[chosen]
            self.note_write(m, of, region, places, size, writers, new)
            region.views[size][places] = new

    def rows(self, shadow: np.ndarray, size: int) -> np.ndarray:
        return shadow.reshape(-1, max(size // self.grain, 1))

    def note_read(self, m, of, region, places, size, lanes) -> None:
        if region.written is not None:
            m.refuse("unwritten", of, lanes, ~region.written.reshape(-1, size)[places])
        region.shadows(self.grain)
        cta = m.cta_number[lanes][:, None]
        if region.writer is not None:
            self.check_writer(m, of, region, places, size, lanes, cta)
        rows = self.rows(region.reader, size)
        before = rows[places]
        if ((before != 0) & (before != cta)).any():
            known = self.happened(before, self.rows(region.read_time, size)[places], cta)
            rows[places] = np.where(known, cta, MANY)
        else:
            rows[places] = cta
        if self.time:
            self.rows(region.read_time, size)[places] = self.time

    def check_writer(self, m, of, region, places, size, lanes, cta) -> None:
        """Who wrote a place last in this launch, did so before."""
        self.check_ctas(m, of, region, places, size, lanes, cta, "writes")
        writer, thread = (self.rows(x, size)[places] for x in (region.writer, region.thread))
        now = (writer == cta) & (self.rows(region.epoch, size)[places] == m.epoch[lanes][:, None])
        now &= thread != m.thread_number[lanes][:, None]
        m.refuse("race", of, lanes, now, lambda at: f"thread {thread[at].max()} writes there")

    def check_ctas(self, m, of, region, places, size, lanes, cta, what: str) -> None:
        """What other CTAs did at a place, "reads" or "writes", is known to be over."""
        shadows = {"reads": (region.reader, region.read_time)}.get(what) or (
            region.writer, region.write_time,
        )  # fmt: skip
        other, time = (self.rows(shadow, size)[places] for shadow in shadows)
        if ((other != 0) & (other != cta)).any():
            known = self.happened(other, time, cta)
            m.refuse(
                "grid race", of, lanes, ~known, lambda at: f"CTA {other[at].max() - 1} {what} there"
            )

    def note_write(self, m, of, region, places, size, lanes, new) -> None:
        region.shadows(self.grain)
        region.writer_shadows(self.grain)
        cta = m.cta_number[lanes][:, None]
        self.check_ctas(m, of, region, places, size, lanes, cta, "writes")
        # A thread that writes what is there already races with none of its CTA.
        changed = region.views[size][places] != new
        if changed.ndim == 2:
            changed = changed.any(1)
        if changed.any():
            where = np.flatnonzero(changed)
            some = (places[where], size, lanes[where], cta[where])
            self.check_writer(m, of, region, *some)
            self.check_ctas(m, of, region, *some, "reads")
        writers = self.rows(region.writer, size)
        threads = self.rows(region.thread, size)
        writers[places] = cta
        threads[places] = m.thread_number[lanes][:, None]
        m.refuse("grid race", of, lanes, writers[places] != cta, "another CTA writes there")
        if (threads[places] != m.thread_number[lanes][:, None]).any():
            check_equal(m, of, places, new, lanes)
        self.rows(region.epoch, size)[places] = m.epoch[lanes][:, None]
        if self.time:
            self.rows(region.write_time, size)[places] = self.time
        if region.written is not None:
            region.written.reshape(-1, size)[places] = True

    def happened(self, other: np.ndarray, time: np.ndarray, cta: np.ndarray) -> np.ndarray:
        """Whether accesses of other CTAs are known to be over, from atomics that were acquired."""
        result = (other == 0) | (other == cta)
        other, time, cta = np.broadcast_arrays(other, time, cta)
        for at in zip(*np.nonzero(~result), strict=True):
            known = self.known.get(int(cta[at]), {})
            result[at] = other[at] != MANY and int(time[at]) < known.get(int(other[at]), 0)
        return result

    def atomic(self, m, of, address, size, lanes, change, ordered: bool) -> np.ndarray:
        """Each element in turn replaced by ``change(old, which)``; returns the old ones."""
        m.counts.sectors(address, lanes, "written")
        olds = np.zeros(len(address), f"u{size}")
        for region, chosen, places in self.parts(m, of, address, size, lanes):
            which = np.arange(len(address)) if chosen is None else chosen
            region.shadows(self.grain)
            region.writer_shadows(self.grain)
            view = region.views[size]
            for turn in turns(places):
                at, item = places[turn], which[turn]
                olds[item] = view[at]
                view[at] = change(view[at], item)
            if region.written is not None:
                region.written.reshape(-1, size)[places] = True
            cta = m.cta_number[lanes[which]][:, None]
            shadows = (region.reader, region.writer) if of.opcode == "atom" else (region.writer,)
            for rows in (self.rows(shadow, size) for shadow in shadows):
                rows[places] = np.where(rows[places] == 0, cta, rows[places])
        if ordered:
            self.synchronise(address, m.cta_number[lanes])
        return olds

    def synchronise(self, address: np.ndarray, ctas: np.ndarray) -> None:
        """Acquire what others released at an address, then release what is known."""
        for place, cta in sorted({(int(a), int(c)) for a, c in zip(address, ctas, strict=True)}):
            known = self.known.setdefault(cta, {})
            for other, time in self.released.get(place, {}).items():
                known[other] = max(known.get(other, 0), time)
            self.time += 1
            known[cta] = self.time
            self.released[place] = {**self.released.get(place, {}), **known}


def place(address: np.ndarray, size: int) -> Callable[[int], str]:
    return lambda at: f"{size} bytes at {int(address[at]):#x}"


def turns(places: np.ndarray) -> Iterator[np.ndarray]:
    """Indices of accesses such that none of a turn shares a place, all of them in the end."""
    order = np.argsort(places, kind="stable")
    first = np.flatnonzero(np.r_[True, places[order][1:] != places[order][:-1]])
    rank = np.arange(len(places)) - np.repeat(first, np.diff(np.r_[first, len(places)]))
    for turn in range(int(rank.max()) + 1):
        yield order[rank == turn]


class Shared:
    """Shared memory of the CTAs that run together, one after another in one array."""

    def __init__(self, ctas: int, size: int, grain: int, has_products: bool) -> None:
        self.size, self.grain = size, grain
        self.stride = -(-max(size, 1) // 16) * 16
        total = ctas * self.stride
        self.bytes = np.zeros(total, np.uint8)
        self.views = {n: self.bytes.view(f"u{n}") for n in (1, 2, 4, 8)}
        self.views[16] = self.bytes.view("u8").reshape(-1, 2)
        count = total // grain
        self.write_epoch = np.full(count, UNWRITTEN, np.int32)
        self.writer = np.zeros(count, np.int32)  # thread, of all that run together
        self.write_warp_epoch = np.zeros(count, np.int32)
        self.read_epoch = np.full(count, -1, np.int32)
        self.reader = np.zeros(count, np.int32)
        self.read_warp_epoch = np.zeros(count, np.int32)
        self.copy = np.zeros(count, np.int32)  # group of an asynchronous copy
        self.fence = np.full(count, -1, np.int32) if has_products else None
        # Product that reads it last, and the first thread of its warp group.
        self.product = np.zeros(count, np.int32) if has_products else None
        self.product_group = np.zeros(count, np.int32) if has_products else None

    def places(self, m, of, address: np.ndarray, size: int, lanes: np.ndarray) -> np.ndarray:
        """Addresses in the shared window as places of ``size`` bytes."""
        offset = address.astype(np.int64) - SHARED_BASE
        m.refuse("alignment", of, lanes, offset & (size - 1), place(address, size))
        outside = (offset < 0) | (offset > self.size - size)
        m.refuse(
            "bounds", of, lanes, outside, lambda at: f"shared byte {offset[at]} of {self.size}"
        )
        return (offset + m.shared_start[lanes]) // size

    def rows(self, shadow: np.ndarray, size: int) -> np.ndarray:
        return shadow.reshape(-1, max(size // self.grain, 1))

    def read(self, m, of, address, size, lanes, by_warp: bool = False) -> np.ndarray:
        """``by_warp``: what a lane addresses, others of its warp get."""
        m.counts.wavefronts(address, size, lanes)
        places = self.places(m, of, address, size, lanes)
        self.note_read(m, of, places, size, lanes, by_warp)
        return self.views[size][places]

    def write(self, m, of, address, size, lanes, values, by_warp: bool = False) -> None:
        m.counts.wavefronts(address, size, lanes)
        places = self.places(m, of, address, size, lanes)
        self.note_write(m, of, places, size, lanes, values)
        self.views[size][places] = values

    def note_read(self, m, of, places, size, lanes, by_warp: bool) -> None:
        now = m.epoch[lanes][:, None]
        me = m.lane[lanes][:, None]
        late = self.rows(self.write_epoch, size)[places] >= now
        if late.any():
            at = np.flatnonzero(late.any(1))
            self.check_write(m, of, places[at], size, lanes[at], by_warp)
        warp_now = m.warp_epoch[lanes][:, None]
        epochs, readers, of_warps = (
            self.rows(x, size) for x in (self.read_epoch, self.reader, self.read_warp_epoch)
        )
        before = np.where(epochs[places] == now, readers[places], me)
        if by_warp:
            mine = OF_WARP + me // 32
        else:
            fresh = (before != me) & (of_warps[places] < warp_now) & self.in_warp(before, me)
            before = np.where(fresh, me, before)
            mine = np.where(before == me, me, OF_WARP + me // 32)
        mine = np.where(self.in_warp(before, me), mine, OF_WARPS)
        epochs[places], of_warps[places] = now, warp_now
        readers[places] = mine
        seen = readers[places]
        if (seen != mine).any():  # several threads of this instruction read one place
            same_warp = self.in_warp(seen, me) & (mine != OF_WARPS)
            for at in (np.flatnonzero((seen != mine).any(1)),):
                readers[places[at]] = np.where(same_warp, OF_WARP + me // 32, OF_WARPS)[at]
                wrong = ~self.in_warp(readers[places[at]], me[at])
                readers[places[at]] = np.where(wrong, OF_WARPS, readers[places[at]])

    @staticmethod
    def in_warp(who: np.ndarray, me: np.ndarray) -> np.ndarray:
        """Whether a thread or several are of a thread's warp."""
        return np.where(who >= OF_WARP, who - OF_WARP, who // 32) == me // 32

    def check_write(self, m, of, places, size, lanes, by_warp: bool) -> None:
        """The last write to places was not before this epoch: by whom, and is it over?"""
        epoch = self.rows(self.write_epoch, size)[places]
        writer = self.rows(self.writer, size)[places]
        me, now = m.lane[lanes][:, None], m.epoch[lanes][:, None]
        m.refuse("unwritten", of, lanes, epoch == UNWRITTEN)
        copied = epoch == COPIED
        if copied.any():
            done = m.copies_done_at[self.rows(self.copy, size)[places], writer]
            in_flight = copied & (done == COPIED)
            m.refuse("asynchronous", of, lanes, in_flight, "its copy was not waited for")
            epoch = np.where(copied, done, epoch)
            over = (epoch < now).all(1)
            self.rows(self.write_epoch, size)[places[over]] = epoch[over]
        ordered = (epoch < now) | ((writer == me) & (not by_warp))
        past = self.rows(self.write_warp_epoch, size)[places] < m.warp_epoch[lanes][:, None]
        ordered |= (writer // 32 == me // 32) & past & ~copied
        other = writer % m.threads
        m.refuse(
            "race", of, lanes, ~ordered,
            lambda at: f"thread {other[at][~ordered[at]][0]} writes there",
        )  # fmt: skip

    def note_write(self, m, of, places, size, lanes, values) -> None:
        now, me = m.epoch[lanes][:, None], m.lane[lanes][:, None]
        warp_now = m.warp_epoch[lanes][:, None]
        written = self.rows(self.write_epoch, size)[places]
        read = self.rows(self.read_epoch, size)[places]
        doubtful = (((written >= now) & (written != UNWRITTEN)) | (read == now)).any(1)
        if self.product is not None:
            doubtful |= (self.rows(self.product, size)[places] != 0).any(1)
        if doubtful.any():
            at = np.flatnonzero(doubtful)
            old = self.views[size][places[at]]
            changed = (old != values[at]) if values is not None else np.ones(len(at), bool)
            at = at[changed.any(1) if changed.ndim == 2 else changed]
            if len(at):
                self.check_overwrite(m, of, places[at], size, lanes[at])
        writers = self.rows(self.writer, size)
        writers[places] = me
        if (writers[places] != me).any() and values is not None:
            check_equal(m, of, places, values, lanes)
        self.rows(self.write_epoch, size)[places] = now
        self.rows(self.write_warp_epoch, size)[places] = warp_now
        if self.fence is not None:
            self.rows(self.fence, size)[places] = m.fences[lanes][:, None]

    def check_overwrite(self, m, of, places, size, lanes) -> None:
        written = self.rows(self.write_epoch, size)[places]
        some = np.flatnonzero((written != UNWRITTEN).all(1))
        if len(some):
            now = m.epoch[lanes[some]][:, None]
            some = some[(written[some] >= now).any(1)]
        if len(some):
            self.check_write(m, of, places[some], size, lanes[some], False)
        me, now = m.lane[lanes][:, None], m.epoch[lanes][:, None]
        reader = self.rows(self.reader, size)[places]
        past = self.rows(self.read_warp_epoch, size)[places] < m.warp_epoch[lanes][:, None]
        ordered = (self.rows(self.read_epoch, size)[places] < now) | (reader == me)
        ordered |= self.in_warp(reader, me) & past
        m.refuse("race", of, lanes, ~ordered, "another thread reads there")
        if self.product is not None:
            self.check_products(m, of, places, size, lanes)

    def check_products(self, m, of, places, size, lanes) -> None:
        """No product still reads places that are written."""
        serials = self.rows(self.product, size)[places]
        readers = self.rows(self.product_group, size)[places]
        for at, column in zip(*np.nonzero(serials), strict=True):
            serial, reader = int(serials[at, column]), int(readers[at, column])
            over = m.products.over_at[serial][reader] if serial in m.products.over_at else -1
            if over < 0:
                raise m.hazard("asynchronous", of, lanes[at], "a product reads there")
            if over >= m.epoch[lanes[at]] and reader // 128 != m.lane[lanes[at]] // 128:
                raise m.hazard("race", of, lanes[at], "a product of other threads reads there")

    def copy_in(self, m, of, places, size, lanes, values) -> None:
        """What ``cp.async`` brings, from now on in flight."""
        self.note_write(m, of, places, size, lanes, None)
        self.views[size][places] = values
        self.rows(self.write_epoch, size)[places] = COPIED
        self.rows(self.copy, size)[places] = m.copies_committed[lanes][:, None]

    def read_product(self, m, of, address: np.ndarray, size: int, first: np.ndarray) -> np.ndarray:
        """Elements at addresses (groups, ...) that products of warp groups read, asynchronously.

        ``first``: the groups' first threads.
        """
        offset = address - SHARED_BASE
        outside = (offset < 0) | (offset > self.size - size)
        m.refuse("bounds", of, first, outside, "of its matrix")
        lane = first.reshape(-1, *[1] * (address.ndim - 1))
        places = (offset + m.shared_start[lane]) // size
        grains = (places * size // self.grain).reshape(len(first), -1)
        epoch, writer = self.write_epoch[grains], self.writer[grains]
        copied = epoch == COPIED
        if copied.any():
            epoch = np.where(copied, m.copies_done_at[self.copy[grains], writer], epoch)
        now = m.epoch[first][:, None]
        for kind, wrong in (
            ("unwritten", epoch == UNWRITTEN),
            ("asynchronous", epoch == COPIED),
            ("race", epoch >= now),
            ("fence", self.fence[grains] >= m.fences[writer]),
        ):
            m.refuse(kind, of, first, wrong, "of its matrix")
        self.product[grains] = m.products.serial
        self.product_group[grains] = first[:, None]
        return self.views[size][places]

    def atomic(self, m, of, address, size, lanes, change) -> np.ndarray:
        """As `Global.atomic`; among atomics of one epoch there is no race."""
        m.counts.wavefronts(address, size, lanes)
        places = self.places(m, of, address, size, lanes)
        now = m.epoch[lanes][:, None]
        epochs, readers = self.rows(self.write_epoch, size), self.rows(self.read_epoch, size)
        by_others = self.rows(self.writer, size)[places] != ATOMIC
        at = np.flatnonzero(((epochs[places] >= now) & by_others).any(1))
        if len(at):
            self.check_write(m, of, places[at], size, lanes[at], False)
        by_others = self.rows(self.reader, size)[places] != ATOMIC
        at = np.flatnonzero(((readers[places] == now) & by_others).any(1))
        if len(at):
            self.check_overwrite(m, of, places[at], size, lanes[at])
        olds, view = np.zeros(len(places), f"u{size}"), self.views[size]
        for turn in turns(places):
            olds[turn] = view[places[turn]]
            view[places[turn]] = change(view[places[turn]], turn)
        self.rows(self.writer, size)[places] = ATOMIC
        self.rows(self.reader, size)[places] = ATOMIC
        epochs[places] = readers[places] = now
        return olds


def check_equal(m, of, places, values, lanes) -> None:
    """Threads of one instruction that write one place write the same."""
    order = np.argsort(places, kind="stable")
    different = values[order][1:] != values[order][:-1]
    if different.ndim == 2:
        different = different.any(1)
    wrong = np.flatnonzero((places[order][1:] == places[order][:-1]) & different)
    if len(wrong):
        raise m.hazard("race", of, lanes[order[wrong[0] + 1]], "another thread writes there")
