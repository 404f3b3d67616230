"""``python -m tools.widths``: accesses of the benchmarks' kernels that could be wider.

As JSON, for every kernel that the sets `SETS` start: the lines of the source whose loads or stores
take less than 16 bytes at a time, though each thread has that much of the tile. Those of rows that
are not aligned stand under "unaligned".
"""

import json
import linecache
import math
import re

from fastkd.bench import suite
from tools.compile_report import ROOT, Form
from tools.machine_code import BITS, Launch, compiled, source_lines
from tools.recording import Recorder

SETS = ("bert", "vocab", "bank")


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


def main() -> None:
    recorder = Recorder(90)
    found: dict[str, set[str]] = {}
    for case in suite.cases(SETS):
        started = recorder.record(case)[0] if case.loss != "step" else []
        for form in {x.form for x in started if isinstance(x, Launch)}:
            name = form.name if aligned(form) else "unaligned"
            found.setdefault(name, set()).update(map(source, narrow(form)))
    print(json.dumps({name: sorted(lines) for name, lines in found.items()}))


def source(line: str) -> str:
    """The text at file:line."""
    file, _, number = line.rpartition(":")
    return linecache.getline(str(ROOT / "kernels" / file), int(number)).strip()


if __name__ == "__main__":
    main()
