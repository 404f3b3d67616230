"""Tensor cores: matrices of registers, loaded and stored by warps and multiplied.

Where a register's elements lie in a matrix is PTX's, section "Matrix fragments for mma". Products
are exact and summed in float64, then rounded to float32 once; a GPU adds a few at a time and cuts.
Those of int8 are exact there, too.
"""

from typing import Any

import numpy as np

from .instructions import Run, decodes
from .movement import address_of
from .parse import Instruction, Vector
from .values import canonical, reader, widen_bf16, writer

LANE = np.arange(32)
ROW, COLUMN = LANE // 4, LANE % 4  # a thread's in a tile of 8 × 4 registers


def tiles_of(registers: np.ndarray, bits: int) -> np.ndarray:
    """Registers (warps, 32) as tiles (warps, 8, elements of 4 registers)."""
    tiles = np.ascontiguousarray(registers.reshape(-1, 8, 4).astype(np.uint32))
    return tiles.view({8: np.int8, 16: np.uint16, 32: np.uint32}[bits])


def numbers(bits: np.ndarray, type: str) -> np.ndarray:
    """Elements of a matrix as float64; tf32 has no more than 10 digits."""
    if type == "bf16":
        return widen_bf16(bits).astype(np.float64)
    if type == "s8":
        return bits.view(np.int8).astype(np.float64)
    if type == "f16":
        return bits.view(np.float16).astype(np.float64)
    if type == "tf32":
        bits = bits & np.uint32(0xFFFFE000)
    return bits.view(np.float32).astype(np.float64)


def tiles(m: Any, reads: list, lanes: np.ndarray, bits: int, type: str) -> list[np.ndarray]:
    """The registers of these threads as tiles of numbers."""
    registers = (np.broadcast_to(get(m.registers), m.size)[lanes] for get in reads)
    return [numbers(tiles_of(x, bits), type) for x in registers]


def rows_of(m: Any, reads: list, lanes: np.ndarray, bits: int, type: str) -> np.ndarray:
    """A's rows (warps, 16, K), whose tiles go down first."""
    found = tiles(m, reads, lanes, bits, type)
    return np.concatenate([np.concatenate(found[half::2], 2) for half in (0, 1)], 1)


# Bits of an element, and the type of sums.
KINDS = {"f16": (16, "f32"), "bf16": (16, "f32"), "tf32": (32, "f32"), "s8": (8, "s32")}


def added(products: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Sums in the type of ``before``; those of int8 stay below 2^31."""
    total = products + before
    if before.dtype == np.float32:
        return canonical(total.astype(np.float32))
    return total.clip(-(2**31), 2**31 - 1).astype(np.int32)


@decodes("mma")
def multiply(x: Instruction, program: Any) -> Run | None:
    """D (16, 8) = A (16, K) · B (K, 8) + C of each warp."""
    words = x.modifiers
    shape = next(word for word in words if word[0] == "m" and word[1].isdigit())
    kinds = {
        ("m16n8k16", "f16"): 16, ("m16n8k8", "f16"): 8, ("m16n8k16", "bf16"): 16,
        ("m16n8k8", "bf16"): 8, ("m16n8k8", "tf32"): 8, ("m16n8k4", "tf32"): 4,
        ("m16n8k32", "s8"): 32,
    }  # fmt: skip
    d_type, a_type, b_type, c_type = words[-4:]
    if "row" not in words or "col" not in words or a_type != b_type or d_type != c_type:
        return None
    K, (bits, sums) = kinds[shape, a_type], KINDS[a_type]
    if d_type != sums:
        return None
    symbols = program.entry.symbols
    d, a, b, c = (operand.items for operand in x.operands)
    read_a, read_b = ([reader(item, "b32", symbols) for item in items] for items in (a, b))
    read_c = [reader(item, sums, symbols) for item in c]
    writes = [writer(item, sums) for item in d]

    def run(m: Any, mask: Any) -> None:
        # B's columns are a tile's rows.
        columns = np.concatenate(tiles(m, read_b, m.lane, bits, a_type), 2).swapaxes(1, 2)
        product = rows_of(m, read_a, m.lane, bits, a_type) @ columns  # (warps, 16, 8)
        own = product[:, np.r_[ROW, ROW + 8].reshape(2, 1, 32), 2 * COLUMN + np.arange(2)[:, None]]
        for place, (get, write) in enumerate(zip(read_c, writes, strict=True)):
            before = np.broadcast_to(get(m.registers), m.size)
            total = added(own[:, place // 2, place % 2].reshape(-1), before)
            write(m.registers, total, mask)
        m.counts.result.mma_flops += 2 * 16 * 8 * K * m.warps(mask)

    return run


@decodes("ldmatrix")
def load_matrices(x: Instruction, program: Any) -> Run | None:
    """Tiles of 8 rows of 16 bytes, whose addresses 8 threads each give."""
    if "m8n8" not in x.modifiers or "b16" not in x.modifiers:
        return None
    address, transposed = address_of(x.operands[1], program), "trans" in x.modifiers
    writes = [writer(item, "b32") for item in x.operands[0].items]
    count = len(writes)

    def run(m: Any, mask: Any) -> None:
        lanes = m.lanes(mask).reshape(-1, 32)[:, : 8 * count].reshape(-1)
        at = address(m)[lanes]
        rows = m.shared.read(m, x, at, 16, lanes, by_warp=True)
        tiles = rows.view(np.uint16).reshape(-1, count, 8, 8)
        if transposed:
            tiles = tiles.swapaxes(2, 3)
        registers = np.ascontiguousarray(tiles).view(np.uint32).reshape(-1, count, 32)
        for place, write in enumerate(writes):
            value = np.ascontiguousarray(registers[:, place]).reshape(-1)
            write(m.registers, m.spread(value, mask), mask)

    return run


@decodes("stmatrix")
def store_matrices(x: Instruction, program: Any) -> Run | None:
    if "m8n8" not in x.modifiers or "b16" not in x.modifiers:
        return None
    address, transposed = address_of(x.operands[0], program), "trans" in x.modifiers
    items = x.operands[1].items if isinstance(x.operands[1], Vector) else (x.operands[1],)
    reads = [reader(item, "b32", program.entry.symbols) for item in items]
    count = len(reads)

    def run(m: Any, mask: Any) -> None:
        everyone = m.lanes(mask).reshape(-1, 32)
        lanes = everyone[:, : 8 * count].reshape(-1)
        registers = [
            np.broadcast_to(get(m.registers), m.size)[everyone.reshape(-1)] for get in reads
        ]
        tiles = np.stack([tiles_of(r, 16) for r in registers], 1)  # (warps, count, 8, 8)
        if transposed:
            tiles = tiles.swapaxes(2, 3)
        rows = np.ascontiguousarray(tiles).view(np.uint64).reshape(-1, 2)
        m.shared.write(m, x, address(m)[lanes], 16, lanes, rows, by_warp=True)

    return run


# Products of warp groups (sm_90): asynchronous, from registers and shared memory

# Bits 62 and 63 of a descriptor → bytes of a row in a pattern of 8 rows; their 16-byte parts are
# exchanged by the row's number.
SWIZZLES = {0: 16, 1: 128, 2: 64, 3: 32}


def shared_matrix(descriptor: np.ndarray, rows: int, K: int, size: int, transposed: bool) -> Any:
    """Addresses (groups, rows, K) of a matrix's elements of ``size`` bytes in shared memory.

    ``transposed``: neighbours lie along the rows' index, not along K.
    """
    fields = [
        (descriptor >> np.uint64(bit) & np.uint64(0x3FFF)) << np.uint64(4) for bit in (0, 16, 32)
    ]
    start, leading, stride = (x.astype(np.int64)[:, None, None] for x in fields)
    swizzle = int(descriptor[0] >> np.uint64(62))
    width = SWIZZLES[swizzle]
    n, k = np.arange(rows)[:, None], np.arange(K)[None, :]
    if transposed:
        per_row = width // size
        inner = k % 8 * width + n % per_row * size
        steps = (leading, stride) if swizzle else (stride, leading)
        address = start + n // per_row * steps[0] + k // 8 * steps[1] + inner
    elif swizzle:
        address = start + n // 8 * stride + n % 8 * width + k * size
    else:
        column = k * size
        address = start + n // 8 * stride + n % 8 * 16 + column // 16 * leading + column % 16
    return address ^ (address >> 7 & (width // 16 - 1)) << 4


@decodes("wgmma")
def group_product(x: Instruction, program: Any) -> Run | None:
    if "fence" in x.modifiers:
        return lambda m, mask: m.products.fence()
    if "commit_group" in x.modifiers:
        return lambda m, mask: m.products.commit(m, mask)
    if "wait_group" in x.modifiers:
        pending = x.operands[0].bits
        return lambda m, mask: m.products.wait(m, mask, pending)
    shape, d_type, a_type, b_type = [word for word in x.modifiers if word != "satfinite"][-4:]
    if a_type != b_type or a_type not in KINDS or d_type != KINDS[a_type][1]:
        return None
    N, K = (int(n) for n in shape.removeprefix("m64n").split("k"))
    bits, sums = KINDS[a_type]
    symbols = program.entry.symbols
    d, a, b, scale, *signs = x.operands
    in_registers = isinstance(a, Vector)
    sign = signs[0].bits * signs[1].bits if signs else 1
    transposed = [bool(flag.bits) for flag in signs[2:]]
    transpose_a, transpose_b = (False, False, *transposed)[-2:]
    if in_registers:
        read_a = [reader(item, "b32", symbols) for item in a.items]
    else:
        read_a = [reader(a, "b64", symbols)]
    read_b, keeps = reader(b, "b64", symbols), reader(scale, "pred", symbols)
    read_d = [reader(item, sums, symbols) for item in d.items]
    writes = [writer(item, sums) for item in d.items]

    def from_shared(m: Any, mask: Any, read: Any, rows: int, transpose: bool) -> np.ndarray:
        first = m.lanes(mask)[::128]
        descriptor = np.broadcast_to(read(m.registers), m.size)[first]
        address = shared_matrix(descriptor, rows, K, bits // 8, transpose)
        return numbers(m.shared.read_product(m, x, address, bits // 8, first), a_type)

    def run(m: Any, mask: Any) -> None:
        lanes, R = m.lanes(mask), m.registers
        groups = len(lanes) // 128
        if in_registers:
            left = rows_of(m, read_a, lanes, bits, a_type).reshape(groups, 64, K)
        else:
            left = from_shared(m, mask, read_a[0], 64, transpose_a)
        right = from_shared(m, mask, read_b, N, transpose_b)
        product = (sign * left @ right.swapaxes(1, 2)).reshape(4 * groups, 16, N)
        kept = np.broadcast_to(keeps(R), m.size)[lanes]
        for place, (get, write) in enumerate(zip(read_d, writes, strict=True)):
            row = ROW + 8 * (place % 4 // 2)
            own = product[:, row, 8 * (place // 4) + 2 * COLUMN + place % 2].reshape(-1)
            before = np.broadcast_to(get(R), m.size)[lanes]
            value = added(own, np.where(kept, before, before.dtype.type(0)))
            write(R, m.spread(value, mask), mask)
        m.counts.result.mma_flops += 2 * 64 * N * K * groups

    return run


class Products:
    """Groups of asynchronous products: which registers and bytes they are still at.

    A register's accumulator may be read and written after the wait for its group; what a product
    reads, before or after it, but then only behind a ``wgmma.fence``.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.fenced = False
        self.changed: set[int] = set()  # registers, since the fence
        self.serial = 1  # of the group that products join
        self.open: dict[int, Any] = {}  # register → serial
        self.under_way: dict[int, np.ndarray] = {}  # serial → threads that have not waited
        self.over_at: dict[int, np.ndarray] = {}  # serial → in which epoch each thread had

    def fence(self) -> None:
        self.fenced = True
        self.changed.clear()

    def commit(self, m: Any, mask: Any) -> None:
        self.under_way[self.serial] = np.ones(self.size, bool) if mask is None else mask.copy()
        self.over_at[self.serial] = np.full(self.size, -1)
        self.serial += 1

    def wait(self, m: Any, mask: Any, pending: int) -> None:
        here = np.ones(self.size, bool) if mask is None else mask
        mine = [serial for serial, at in self.under_way.items() if (at & here).any()]
        for serial in mine[: len(mine) - pending]:
            self.over_at[serial][here] = m.epoch[here]
            self.under_way[serial] &= ~here
            if not self.under_way[serial].any():
                del self.under_way[serial]
                self.open = {r: s for r, s in self.open.items() if s != serial}

    def check(self, m: Any, x: Instruction, mask: Any) -> None:
        """Before an instruction: whether its registers are free, and fenced for a product."""
        if x.opcode == "wgmma":
            if "mma_async" in x.modifiers:
                self.check_fence(m, x, mask)
            return
        written = x.operands[:1] if x.opcode not in ("st", "red", "stmatrix", "bar") else ()
        self.changed.update(x.registers(written))
        for register in x.registers() if self.open else ():
            serial = self.open.get(register)
            if serial is not None:
                busy = np.broadcast_to(self.under_way.get(serial, True), self.size)[m.lanes(mask)]
                m.refuse("asynchronous", x, m.lanes(mask), busy, "a product is at its register")

    def check_fence(self, m: Any, x: Instruction, mask: Any) -> None:
        used = list(x.registers(x.operands[:1]))
        sources = list(x.registers(x.operands[1:2])) if isinstance(x.operands[1], Vector) else []
        if not self.fenced or self.changed.intersection(used + sources):
            raise m.hazard(
                "fence", x, m.lanes(mask)[0], "no wgmma.fence since its registers changed"
            )
        self.open |= dict.fromkeys(used, self.serial)
