"""What one program of a compiled kernel does, read from what Triton compiled: no GPU is asked.

Two texts of one compilation answer two questions. Triton's own code says how often each loop runs
for given arguments, which argument a load or store goes to and how wide it is, and which matrix
products there are. The disassembled machine code says how many instructions a trip takes, in loops
that are matched by the source line of their ``for``.
"""

import functools
import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .compile_report import Form, resources

# Bits of Triton's types.
BITS = {"i1": 8, "i8": 8, "i16": 16, "i32": 32, "i64": 64}
BITS |= {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}

ARITHMETIC: dict[str, Callable[..., int]] = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.muli": lambda a, b: a * b,
    "arith.divsi": lambda a, b: a // b,
    "arith.remsi": lambda a, b: a % b,
    "arith.minsi": min,
    "arith.maxsi": max,
    "arith.andi": lambda a, b: a & b,
    "arith.ori": lambda a, b: a | b,
    "arith.xori": lambda a, b: a ^ b,
    "arith.select": lambda condition, a, b: a if condition else b,
    "arith.extsi": lambda a: a,
    "arith.extui": lambda a: a,
    "arith.trunci": lambda a: a,
    "arith.index_cast": lambda a: a,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "slt": lambda a, b: a < b,
    "sle": lambda a, b: a <= b,
    "sgt": lambda a, b: a > b,
    "sge": lambda a, b: a >= b,
}


class Loop(NamedTuple):
    """A loop of the machine code: places of its instructions, and where its ``for`` stands."""

    first: int
    last: int
    line: str


class MachineCode(NamedTuple):
    """Instructions in order, without predicates, their places in the source, and the loops."""

    instructions: list[str]
    lines: list[str]  # file:line
    loops: list[Loop]


class Site(NamedTuple):
    """A load or store: places of the arguments that it may go to, and its bytes, masked or not."""

    places: frozenset[int]
    bytes: float


class Launch(NamedTuple):
    """What a started kernel was given: sizes in bytes of tensors, or numbers."""

    form: Form
    grid: tuple[int, ...]
    arguments: list[Any]


class InMemory(NamedTuple):
    """A tensor among the arguments."""

    bytes: int


@dataclass
class Effort:
    """Of one program, all of its loops' trips together."""

    trips: dict[str, list[float]] = field(default_factory=dict)  # of the loops of a source line
    loads: list[Site] = field(default_factory=list)
    stores: list[Site] = field(default_factory=list)
    products: dict[str, float] = field(default_factory=dict)  # operations, by arithmetic
    waits: float = 0.0  # trips that load, one after the other
    unknown: set[str] = field(default_factory=set)  # lines that decide by what lies in memory


class Compiled(NamedTuple):
    """A form as compiled for its architecture."""

    ttir: str
    code: MachineCode
    registers: int
    shared: int
    wide_products: bool  # a warp group's, not a warp's


@functools.cache
def compiled(form: Form) -> Compiled:
    """What Triton makes of a form, taken apart."""
    result = form.compiled()
    return Compiled(
        result.asm["ttir"],
        machine_code(disassembled(result.asm["cubin"])),
        resources(result.asm["cubin"])["registers"],
        result.metadata.shared,
        "wgmma" in result.asm["ptx"] or "tcgen05" in result.asm["ptx"],
    )


def disassembled(cubin: bytes) -> str:
    """Machine code with the lines of the source, by the tool that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-c", "-g", "-ndf", file.name]  # no dataflow, a quarter of the time
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def machine_code(text: str) -> MachineCode:
    """Instructions and loops of a disassembly; a loop ends at its last branch backwards."""
    instructions: list[str] = []
    lines: list[str] = []
    labels: dict[str, int] = {}
    line = ""
    for row in text.splitlines():
        if found := re.match(r'\s*//## File "(?:.*/)?(.*)", line (\d+)', row):
            line = f"{found[1]}:{found[2]}"
        elif found := re.match(r"\s*(\.L_x_\d+):", row):
            labels[found[1]] = len(instructions)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", row):
            instructions.append(found[1])
            lines.append(line)
    last: dict[int, int] = {}
    for place, instruction in enumerate(instructions):
        found = re.match(r"BRA.*`\((\.L_x_\d+)\)", instruction)
        first = labels.get(found[1], place) if found else place
        if first < place:
            last[first] = place
    return MachineCode(instructions, lines, [Loop(a, b, lines[b]) for a, b in sorted(last.items())])


def executed(code: MachineCode, trips: Mapping[str, Sequence[float]]) -> float:
    """Instructions that one warp of a program executes.

    Loops of one line, as of a function called twice, come in the same order in both texts; where
    the assembler made more or fewer of them, they share the trips. Other loops, such as ``while``,
    run once.
    """
    times: dict[Loop, float] = {}
    for line, each in trips.items():
        same = [loop for loop in code.loops if loop.line == line]
        shared = each if len(each) == len(same) else [sum(each) / max(len(same), 1)] * len(same)
        times |= dict(zip(same, shared, strict=True))
    total = 0.0
    for place in range(len(code.instructions)):
        around = [loop for loop in times if loop.first <= place <= loop.last]
        total += times[min(around, key=lambda loop: loop.last - loop.first)] if around else 1.0
    return total


class Assumed(NamedTuple):
    """Where what lies in memory decides: trips of a loop, and whether both branches are taken."""

    trips: float = 1.0
    both: bool = False


def work(ttir: str, arguments: Sequence[Any], grid: Sequence[int], assumed: Assumed) -> Effort:
    """Walk Triton's code as the program in the middle of the grid does.

    ``arguments`` are those of the function, in order: numbers, or anything else for a pointer.
    """
    return _Walk(arguments, grid, assumed).walk(ttir)


class _Walk:
    def __init__(self, arguments: Sequence[Any], grid: Sequence[int], assumed: Assumed) -> None:
        self.arguments, self.assumed = arguments, assumed
        self.grid = (*grid, 1, 1)
        self.values: dict[str, int] = {}
        self.origins: dict[str, frozenset[int]] = {}  # of pointers: places of arguments
        self.lines: dict[str, str] = {}
        # What is open: how often it runs, its kind, and whether it loads.
        self.open: list[tuple[float, str, bool]] = [(1.0, "", False)]
        self.result = Effort()

    def walk(self, ttir: str) -> Effort:
        self.lines = source_lines(ttir)
        for row in ttir.splitlines():
            text = row.strip()
            if text.startswith("tt.func"):
                for place, name in enumerate(re.findall(r"(%\w+): ", text)):
                    self.origins[name] = frozenset((place,))
                    if isinstance(self.arguments[place], int):
                        self.values[name] = int(self.arguments[place])
            elif text.startswith("}"):
                self._close(text)
            elif text.endswith("{"):
                self._begin(text)
            elif text.startswith(("%", "tt.store")):
                self._operation(text)
        return self.result

    @property
    def times(self) -> float:
        return self.open[-1][0]

    def _line(self, text: str) -> str:
        found = re.search(r"loc\((#loc\d*)\)$", text)
        return self.lines.get(found[1], "") if found else ""

    def _begin(self, text: str) -> None:
        times, kind = self.times, "other"
        if found := re.search(r"scf\.for (%\w+) = (%\S+) to (%\S+) step (%\S+)", text):
            start, stop, step = (self.values.get(name) for name in found.groups()[1:])
            trips, kind = self.assumed.trips, "for, assumed"
            self.values.pop(found[1], None)
            if start is not None and stop is not None and step is not None:
                trips, kind = max(0, math.ceil((stop - start) / step)), "for"
                self.values[found[1]] = start
            for name, given in re.findall(r"(%\w+) = (%[\w#]+)[,)]", text):
                self._same(name, given)
                self.values.pop(name, None)
            times *= trips
        elif found := re.search(r"scf\.if (%\S+)", text):
            condition = self.values.get(found[1])
            times *= self.assumed.both if condition is None else bool(condition)
            kind = "if, assumed" if condition is None else "if" if condition else "if not"
        elif "scf.while" in text:
            times *= min(self.assumed.trips, 1.0)
        self.open.append((times, kind, False))

    def _close(self, text: str) -> None:
        if len(self.open) == 1:
            return
        times, kind, loads = self.open.pop()
        line = self._line(text)
        if text.endswith("{"):  # an else, or the body of a while
            otherwise = self.times * (kind != "if") if kind.startswith("if") else times
            self.open.append((otherwise, kind, loads))
            return
        if "assumed" in kind:
            self.result.unknown.add(f"{kind.partition(',')[0]} {line}")
        if kind.startswith("for"):
            self.result.trips.setdefault(line, []).append(times)
            self.result.waits += times * loads
        elif loads:
            self.open[-1] = (*self.open[-1][:2], True)

    def _operation(self, text: str) -> None:
        name, _, rest = text.partition(" = ") if text.startswith("%") else ("", "", text)
        kind = rest.split()[0]
        operands = re.findall(r"%[\w#]+", rest.split(" : ")[0])
        self.values.pop(name, None)
        if kind in ("tt.load", "tt.store"):
            self._memory(kind, rest, self.origins.get(operands[0], frozenset()))
        elif kind == "tt.dot":
            self._product(rest)
        elif found := re.match(r"arith\.constant (-?\d+|true|false) ", rest + " "):
            self.values[name] = int({"true": "1", "false": "0"}.get(found[1], found[1]))
        elif found := re.match(r"tt\.get_(program_id|num_programs) (\w)", rest):
            count = self.grid["xyz".index(found[2])]
            self.values[name] = count // 2 if found[1] == "program_id" else count
        elif "!tt.ptr" in rest and operands:
            self._same(name, *operands)
        else:
            function = ARITHMETIC.get(rest.split()[1].rstrip(",") if kind == "arith.cmpi" else kind)
            known = [self.values[operand] for operand in operands if operand in self.values]
            if function and "tensor" not in rest and len(known) == len(operands):
                self.values[name] = function(*known)

    def _memory(self, kind: str, rest: str, places: frozenset[int]) -> None:
        pointer = re.search(r"(?:tensor<([\dx]*)x)?!tt\.ptr<(\w+)>", rest.split(" : ")[1])
        assert pointer is not None
        entries = math.prod(map(int, pointer[1].split("x"))) if pointer[1] else 1
        noted = self.result.loads if kind == "tt.load" else self.result.stores
        noted.append(Site(places, self.times * entries * BITS[pointer[2]] // 8))
        if kind == "tt.load":
            self.open[-1] = (*self.open[-1][:2], True)

    def _product(self, rest: str) -> None:
        (left, right) = re.findall(r"tensor<([\dx]+)x([a-z]\w*)>", rest)[:2]
        *_, m, k = map(int, left[0].split("x"))
        n = int(right[0].split("x")[-1])
        precision = re.search(r"inputPrecision = (\w+)", rest)
        kind = precision[1] if precision and left[1] == "f32" else left[1]
        done = self.result.products
        done[kind] = done.get(kind, 0.0) + self.times * 2 * m * n * k

    def _same(self, name: str, *others: str) -> None:
        self.origins[name] = frozenset().union(*(self.origins.get(x, ()) for x in others))


def source_lines(ttir: str) -> dict[str, str]:
    """File and line of each location: of a called function, the line inside it."""
    direct = re.findall(r'^(#loc\d*) = loc\("(?:.*/)?(.*)":(\d+):\d+\)', ttir, re.MULTILINE)
    named = re.findall(r'^(#loc\d*) = loc\((?:callsite\(|"[^"]*"\()(#loc\d*)', ttir, re.MULTILINE)
    lines = {name: f"{file}:{line}" for name, file, line in direct}
    following = dict(named)
    for name in following:
        target = name
        while target in following:
            target = following[target]
        if target in lines:
            lines[name] = lines[target]
    return lines
