"""PTX text as data: an entry's parameters, registers, shared arrays and instructions."""

import functools
import re
import struct
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

# Bits of the types whose names end in no number that says so.
ODD_WIDTHS = {"pred": 1, "bf16": 16, "tf32": 32, "f16x2": 32, "bf16x2": 32}
# Shared memory begins here in its window, as on sm_90, where the first KiB is the system's.
SHARED_BASE = 1024
# Each is a register that a launch sets.
SPECIAL = (
    *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
    "%laneid",
    "%warpid",
    "%lanemask_lt",
)


class Register(NamedTuple):
    index: int
    bits: int  # 1 for predicates


class Immediate(NamedTuple):
    bits: int  # of two's complement, or of the float that ``is_float`` says it is
    is_float: bool = False


class Symbol(NamedTuple):
    """A label, a parameter, or a shared array."""

    name: str
    offset: int = 0


class Address(NamedTuple):
    base: "Register | Immediate | Symbol"
    offset: int


class Pair(NamedTuple):
    """``p|q``, two results of one instruction."""

    first: Register | None
    second: Register | None


class Vector(NamedTuple):
    items: tuple


@dataclass(eq=False)
class Instruction:
    text: str
    line: int  # in the text, from 1
    index: int
    guard: tuple[int, bool] | None  # the predicate's register and whether it is negated
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple

    @property
    def type(self) -> str:
        """The last type among the modifiers."""
        return next(x for x in reversed(self.modifiers) if is_type(x))

    def registers(self, operands: tuple | None = None) -> Iterator[int]:
        """Indices of the registers that operands name, of all by default."""
        for x in self.operands if operands is None else operands:
            if isinstance(x, Register):
                yield x.index
            elif isinstance(x, (Vector, Pair)):
                yield from self.registers(x.items if isinstance(x, Vector) else tuple(x))
            elif isinstance(x, Address):
                yield from self.registers((x[0],))


class Parameter(NamedTuple):
    name: str
    type: str
    offset: int
    size: int


@dataclass
class Entry:
    name: str
    parameters: list[Parameter] = field(default_factory=list)
    registers: list[int] = field(default_factory=list)  # bits of each
    special: dict[str, int] = field(default_factory=dict)  # registers that a launch sets
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # index of the instruction behind each
    symbols: dict[str, int] = field(default_factory=dict)  # address of each array and parameter
    static_shared: int = 0  # bytes in front of the launch's own
    threads: int | None = None  # of a block, where the text says so


@functools.cache
def is_type(word: str) -> bool:
    return word in ODD_WIDTHS or re.fullmatch(r"[busf](8|16|32|64|128)", word) is not None


@functools.cache
def width(type: str) -> int:
    """Bits of a type."""
    return ODD_WIDTHS.get(type) or int(type[1:])


class UnknownInstruction(NotImplementedError):
    """PTX that the machine does not know, with its line."""


TOKEN = re.compile(
    r"""\s*(?: (?P<brace>[{}])
             | (?P<label>[\w$%]+)\s*:(?!:)
             | \.(?P<line>loc|file|section)\b[^\n]*
             | \.(?P<directive>\w+)(?P<rest>[^;]*);
             | (?P<guard>@!?[%\w$]+\s+)?(?P<opcode>[a-z]\w*)(?P<modifiers>(?:\.\w+(?:::\w+)*)*)
               (?P<operands>[^;]*);
            )""",
    re.VERBOSE,
)


def entries(ptx: str) -> dict[str, str]:
    """The text of each entry by its name, each with the module's head."""
    starts = [m.start() for m in re.finditer(r"(?:\.visible\s+)?\.entry\b", ptx)]
    ends = [*starts[1:], len(ptx)]
    texts = [ptx[: starts[0]] + ptx[a:b] for a, b in zip(starts, ends, strict=True)]
    return {re.search(r"\.entry\s+([\w$]+)", text).group(1): text for text in texts}


def parse(ptx: str) -> Entry:
    """The one entry of a PTX text."""
    text = re.sub(r"//[^\n]*", "", ptx)
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.DOTALL)
    if len(found := list(re.finditer(r"\.entry\s+([\w$]+)\s*\(", text))) != 1:
        raise ValueError(
            f"ptx: {len(found)} entries, but a launch starts one; see tools.ptx.entries"
        )
    header_end = text.index(")", found[0].end())
    body = text.index("{", header_end)
    entry = Entry(found[0].group(1))
    _parameters(entry, text[found[0].end() : header_end])
    if threads := re.search(r"\.reqntid\s+([\d, ]+)", text[header_end:body]):
        sizes = [int(x) for x in threads.group(1).split(",")]
        entry.threads = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
    _shared_arrays(entry, text)
    for name in SPECIAL:
        entry.special[name] = len(entry.registers)
        entry.registers.append(32)
    _Body(entry, text, body + 1).read()
    return entry


def _parameters(entry: Entry, text: str) -> None:
    offset = 0
    for declared in filter(None, (x.strip() for x in text.split(","))):
        type = next(x for x in re.findall(r"\.(\w+)", declared) if is_type(x))
        name, count = re.search(r"([\w$]+)\s*(?:\[(\d+)\])?$", declared).groups()
        align = int(found.group(1)) if (found := re.search(r"\.align (\d+) \.b8", declared)) else 0
        size = width(type) // 8 * int(count or 1)
        offset = -(-offset // (align or size)) * (align or size)
        entry.parameters.append(Parameter(name, type, offset, size))
        entry.symbols[name] = offset
        offset += size


def _shared_arrays(entry: Entry, text: str) -> None:
    """Addresses of the arrays with a size; the launch's own bytes follow them."""
    pattern = r"(\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\[(\d*)\]"
    dynamic = []
    for extern, align, type, name, count in re.findall(pattern, text):
        if extern:
            dynamic.append(name)
            continue
        start = -(-entry.static_shared // int(align or 1)) * int(align or 1)
        entry.symbols[name] = SHARED_BASE + start
        entry.static_shared = start + width(type) // 8 * int(count)
    entry.static_shared = -(-entry.static_shared // 16) * 16
    entry.symbols |= dict.fromkeys(dynamic, SHARED_BASE + entry.static_shared)


class _Body:
    """Reads statements in order; names are known to the braces they are declared in."""

    def __init__(self, entry: Entry, text: str, start: int) -> None:
        self.entry, self.text, self.place = entry, text, start
        self.scopes: list[dict[str, tuple[int, int]]] = [{}]  # name → first register, bits
        self.line_starts = [m.end() for m in re.finditer("\n", text)]

    def read(self) -> None:
        while self.scopes:
            match = TOKEN.match(self.text, self.place)
            if match is None:
                rest = self.text[self.place :].strip().partition("\n")[0]
                raise UnknownInstruction(f"line {self.line_of(self.place)}: {rest}")
            self.place = match.end()
            if match["brace"]:
                self.scopes.append({}) if match["brace"] == "{" else self.scopes.pop()
            elif match["label"]:
                self.entry.labels[match["label"]] = len(self.entry.instructions)
            elif match["directive"] == "reg":
                self.declare(match["rest"])
            elif match["opcode"]:
                self.add(match)

    def line_of(self, place: int) -> int:
        return bisect_right(self.line_starts, place) + 1

    def declare(self, text: str) -> None:
        """``.b32 %r<421>`` declares %r0 to %r420, ``.pred p, q`` two."""
        type, names = re.fullmatch(r"\s*\.(\w+)\s+(.*)", text, re.DOTALL).groups()
        for name in names.split(","):
            name, count = re.fullmatch(r"\s*([%\w$]+)(?:<(\d+)>)?\s*", name).groups()
            self.scopes[-1][name + ("<" if count else "")] = len(self.entry.registers), width(type)
            self.entry.registers += [width(type)] * int(count or 1)

    def add(self, match: re.Match) -> None:
        start = match.start("guard") if match["guard"] else match.start("opcode")
        text = " ".join(self.text[start : match.end()].split())
        guard = None
        if match["guard"]:
            name = match["guard"][1:].strip()
            guard = self.register(name.lstrip("!")).index, name[0] == "!"
        modifiers = tuple(match["modifiers"].split(".")[1:])
        try:
            operands = tuple(map(self.operand, split(match["operands"])))
        except (AttributeError, KeyError, ValueError) as error:
            raise UnknownInstruction(f"line {self.line_of(start)}: {text} ({error})") from error
        self.entry.instructions.append(
            Instruction(
                text=text,
                line=self.line_of(start),
                index=len(self.entry.instructions),
                guard=guard,
                opcode=match["opcode"],
                modifiers=modifiers,
                operands=operands,
            )
        )

    def register(self, name: str) -> Register:
        if name in self.entry.special:
            index = self.entry.special[name]
            return Register(index, self.entry.registers[index])
        stem = name.rstrip("0123456789")
        for scope in reversed(self.scopes):
            if name in scope:
                return Register(*scope[name])
            if f"{stem}<" in scope and stem != name:
                first, bits = scope[f"{stem}<"]
                return Register(first + int(name[len(stem) :]), bits)
        raise KeyError(name)

    def operand(self, text: str):
        if text[0] == "{":
            return Vector(tuple(map(self.operand, split(text[1:-1]))))
        if text[0] == "[":
            base, sign, offset = re.fullmatch(
                r"\[\s*([%\w$]+)\s*(?:([+-])\s*(-?\w+)\s*)?\]", text
            ).groups()
            value = int(offset or "0", 0) * (-1 if sign == "-" else 1)
            return Address(self.operand(base), value)
        if text == "_":
            return None
        if "|" in text:
            first, second = (None if x.strip() == "_" else self.register(x.strip())
                             for x in text.split("|"))  # fmt: skip
            return Pair(first, second)
        if text[:2].lower() in ("0f", "0d"):
            return Immediate(int(text[2:], 16), True)
        if re.fullmatch(r"-?\d\w*", text):
            return Immediate(int(text.rstrip("U"), 0))
        if re.fullmatch(r"-?\d+\.\d+", text):
            return Immediate(int.from_bytes(struct.pack("<f", float(text)), "little"), True)
        if text[0] == "%" or any(text in scope for scope in self.scopes):
            return self.register(text)
        name, offset = re.fullmatch(r"([\w$]+)(?:\s*\+\s*(\d+))?", text).groups()
        return Symbol(name, int(offset or 0))


@functools.lru_cache(10_000)
def split(text: str) -> list[str]:
    """Operands at the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        if letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]
