"""``python -m tools.widths``: global accesses of the benchmarks' kernels that could be wider.

Prints as JSON the source lines of the kernels of `SETS` whose loads or stores in PTX have less than
16 bytes although a thread's part of the tile has 16, except `ALLOWED`. ``--unproven`` compiles
nothing if kernels/proven.json holds this state of kernels and benchmarks. ``--prove`` records the
state there if nothing is wrong.
"""

import ast
import functools
import hashlib
import json
import linecache
import math
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from bench import suite
from bench.case import Case
from tools.compile_report import PROVEN, ROOT, WIDTHS, Form, note_proven
from tools.dry_cuda import Device, problem

SETS = ("bert", "vocab", "bank")
# Bits of Triton's types.
BITS = {"i1": 8, "i8": 8, "i16": 16, "i32": 32, "i64": 64}
BITS |= {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}

# Where a thread's share of a tile is no run of 16 bytes at an address known to be aligned, and why
# it stays so: the line's beginning, by kernel.
ALLOWED = {
    # Rows of the candidates in the order of their labels lie anywhere.
    "knn_sorted_search_kernel": ("return tl.load(order_ptr + position",),
    # Products are rows of M numbers, few and in the cache; M is not specialised, for few compiled
    # forms.
    "knn_search_kernel": ("product += tl.sum(tl.load(product_ptr",),
    "knn_product_kernel": ("tl.store(product_ptr + offsets",),
    # One number for each row of a warp's tile; the stride of rows is not specialised.
    "relation_small_mean_kernel": ("scale = tl.load(scale_ptr",),
    # One number a row, added up by one program; the number of rows is not specialised.
    "cos_nce_reduce_kernel": ("total += tl.load(x_ptr + i",),
    "reduce_kernel": ("total += tl.load(loss_ptr",),
    "count_kernel": ("count += (tl.load(mask_ptr",),
    # The last elements of a tensor, fewer than a block.
    "upstream_kernel": ("tl.store(at, tl.load(at, mask=inside)",),
}


def aligned(form: Form) -> bool:
    """Whether rows of the vocabulary are whole 16 elements; those of features are in these sets."""
    known = {form.types[place[0]][0] for place, _ in form.known}
    return "V" in known or all(name != "V" for name, _ in form.types)


def forms_of(case: Case) -> list[Form]:
    """Forms that fastkd's provider starts on sm_90, forward and backward."""
    device = Device()
    device.capability = 90
    with FakeTensorMode():
        inputs = case.make(device=torch.device("cpu"), dtype=case.dtype, **case.sizes)
    with device.running(), torch.device("cuda"):
        inputs = tree_map_only(torch.Tensor, on_device, inputs)
        usable = (p for p in case.providers if p.why_not(torch.device("cuda")) is None)
        provider = next((p for p in usable if p.name == "fastkd triton"), None)
        if provider is not None:
            with mock.patch.object(torch.nn.Module, "to", lambda module, *_: module):
                bound = provider.bind(inputs)
            if found := problem(bound.forward):
                raise RuntimeError(f"{case.key}: {found}")
    return list(device.forms)


def on_device(x: torch.Tensor) -> torch.Tensor:
    """The same tensor without data on the GPU."""
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    return made.requires_grad_(x.requires_grad)


@functools.cache
def narrow(form: Form) -> set[str]:
    """Source lines, file:line, with an access that could have 16 bytes and has less."""
    made: Any = form.compiled().asm
    lines, large = source_lines(made["ttir"]), set()
    tile = r"tt\.(?:load|store) .*?tensor<([\dx]+)x!tt\.ptr<(\w+)>.* loc\((#loc\d*)\)$"
    for sizes, kind, place in re.findall(tile, made["ttir"], re.MULTILINE):
        if math.prod(map(int, sizes.split("x"))) * BITS[kind] >= 8 * 16 * 32 * form.num_warps:
            large.add(lines[place])
    return {line for line, size in accesses(made["ptx"]) if size < 16} & large


def accesses(ptx: str) -> list[tuple[str, int]]:
    """Source line and bytes of each global load, store and asynchronous copy."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"(?:.*/)?([^"/]*)"', ptx, re.MULTILINE))
    line, found = "", []
    for row in ptx.splitlines():
        if place := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", row):
            line = f"{files[place[1]]}:{place[2]}"
        elif access := re.search(r"\b(?:ld|st)\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)\b", row):
            found.append((line, int(access[1] or 1) * int(access[2]) // 8))
        elif copy := re.search(r"\bcp\.async\.c[ag]\.shared\.global.*?\], (\w+)[,;]", row):
            found.append((line, int(copy[1], 0)))
    return found


def source_lines(ttir: str) -> dict[str, str]:
    """File and line of each location; of a call, the line in the called function."""
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


def narrow_lines() -> dict[str, list[str]]:
    """Texts of narrow lines by kernel; those of rows that are not aligned under "unaligned"."""
    found: dict[str, set[str]] = {}
    for case in suite.cases(SETS):
        for form in forms_of(case) if case.loss != "step" else []:
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
    if len(found) <= 15 or not any("tl.load(_by_row(row_ptr)" in line for line in unaligned):
        wrong.append("narrow accesses are not seen")
    return wrong


def state() -> str:
    """Hash of kernels, benchmarks and this file, without comments."""
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
