"""``python -m tools.widths``: accesses of the benchmarks' kernels that could be wider.

As JSON, what is wrong with those of the sets `SETS`: lines of the source whose loads or stores take
less than 16 bytes at a time, though each thread has that much of the tile, but for what is
`ALLOWED`. ``--unproven`` compiles nothing where kernels/proven.json knows this state of kernels and
benchmarks, ``--prove`` notes it there if nothing is wrong.
"""

import ast
import hashlib
import json
import linecache
import math
import re
import sys
from pathlib import Path

import triton

from bench import suite
from tools.compile_report import PROVEN, ROOT, WIDTHS, Form, note_proven
from tools.machine_code import BITS, Launch, compiled, source_lines
from tools.recording import Recorder

SETS = ("bert", "vocab", "bank")

# Where a thread's share of a tile is no run of 16 bytes at an address known to be aligned, and why
# it stays so: the line's beginning, by kernel.
ALLOWED = {
    # Rows of the bank in the order of their labels lie anywhere, as do candidates. Products are
    # rows of M numbers, few and in the cache; M is not specialised, for few compiled forms.
    "knn_search_kernel": (
        "return tl.load(order_ptr + position",
        "product += tl.sum(tl.load(product_ptr",
    ),
    "knn_product_kernel": ("tl.store(product_ptr + offsets",),
    # One number a row, added up by one program; the number of rows is not specialised.
    "cos_nce_reduce_kernel": ("total += tl.load(partial_ptr", "counted += tl.load(counted_ptr"),
    "soft_target_reduce_kernel": ("total += tl.load(loss_ptr",),
    # Those few entries that may be the head's end, each where its place is.
    "soft_target_forward_kernel": ("tl.store(members_ptr",),
}


def aligned(form: Form) -> bool:
    """Whether rows of the vocabulary are whole 16 elements; those of features are in these sets."""
    known = {form.types[place[0]][0] for place, _ in form.known}
    return "V" in known or all(name != "V" for name, _ in form.types)


def narrow(form: Form) -> set[str]:
    """Lines of the source with an access of less than 16 bytes that could have had them."""
    made = compiled(form)
    lines, large = source_lines(made.ttir), set()
    tile = r"tt\.(?:load|store) .*?tensor<([\dx]+)x!tt\.ptr<(\w+)>.* loc\((#loc\d*)\)$"
    for sizes, kind, place in re.findall(tile, made.ttir, re.MULTILINE):
        if math.prod(map(int, sizes.split("x"))) * BITS[kind] >= 8 * 16 * 32 * form.num_warps:
            large.add(lines[place])
    access = re.compile(r"(?:LDG|STG|LDGSTS)\.E(?!.*\.128)")
    places = zip(made.code.instructions, made.code.lines, strict=True)
    return {line for text, line in places if access.match(text)} & large


def narrow_lines() -> dict[str, list[str]]:
    """By kernel; those of rows that are not aligned stand under "unaligned"."""
    recorder = Recorder(90)
    found: dict[str, set[str]] = {}
    for case in suite.cases(SETS):
        started = recorder.record(case)[0] if case.loss != "step" else []
        for form in {x.form for x in started if isinstance(x, Launch)}:
            name = form.name if aligned(form) else "unaligned"
            found.setdefault(name, set()).update(map(source, narrow(form)))
    return {name: sorted(lines) for name, lines in found.items()}


def problems() -> list[str]:
    found = narrow_lines()
    unaligned = found.pop("unaligned")
    wrong = [
        f"{kernel}: {line}"
        for kernel, lines in found.items()
        for line in lines
        if not line.startswith(ALLOWED.get(kernel, ("nothing",)))
    ]
    wrong += [
        f"{kernel}: {start} is wide now"
        for kernel, starts in ALLOWED.items()
        for start in starts
        if not any(line.startswith(start) for line in found[kernel])
    ]
    if len(found) <= 15 or not any("tl.load(row_ptr" in line for line in unaligned):
        wrong.append("narrow accesses are not seen")
    return wrong


def state() -> str:
    """Changes with what is compiled, and what is looked for."""
    files = [*sorted((ROOT / "kernels").glob("*.py")), Path(__file__)]
    files += [Path(str(module.__file__)) for module in (suite, *suite.MODULES)]
    code = (ast.unparse(ast.parse(file.read_text())) for file in files)
    parts = [triton.__version__.rpartition(".")[0], *code]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def main() -> None:
    known = json.loads(PROVEN.read_text()).get(WIDTHS) == state()
    wrong = [] if known and "--unproven" in sys.argv else problems()
    if "--prove" in sys.argv and not wrong:
        note_proven({WIDTHS: state()})
    print(json.dumps(wrong, indent=1))


def source(line: str) -> str:
    """The text at file:line."""
    file, _, number = line.rpartition(":")
    return linecache.getline(str(ROOT / "kernels" / file), int(number)).strip()


if __name__ == "__main__":
    main()
