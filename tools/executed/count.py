"""Counts of the kernels' compiled code, and the least time that they allow on a GPU.

``python -m tools.executed.count [loss ...]`` runs the benchmarks' cases in `CASES`, forward and
backward, compiled for ``--capability``, with fastkd's kernels and with Liger's where they are
installed. A few rows, layers or positions are executed, and times are scaled to the whole case.
It prints a row for each kernel, per element of the student's input, and its instructions by class.
``--page`` writes the tables into docs/kernels.md, which explains the columns.
"""

import argparse
import collections
import dataclasses
import functools
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from bench import suite
from bench.case import Case
from tools.compile_report import resources
from tools.executed import executing
from tools.ptx.compiled import Compiled, Launches
from tools.ptx.counting import Counts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
START, END = "<!-- python -m tools.executed.count --page -->", "<!-- end of counts -->"
# Cases of the benchmarks by their key, and the sizes of which fewer are executed.
CASES: dict[str, dict[str, int]] = {
    "relation/tokens + samples/B32 N128 Ds768 Dt768 layers6/bfloat16": {"layers": 1},
    "relation/tokens/B16 N1024 Ds1024 Dt1024/bfloat16": {"B": 1},
    "knn/batch, k=1/N32 M32 D768 classes2/bfloat16": {},
    "knn/bank, k=1/N32 M4096 D768 classes2/bfloat16": {},
    "contrastive/tokens/B32 N128 D768/bfloat16": {"N": 16},
    "contrastive/tokens/B8 N4096 D4096/bfloat16": {"N": 16},
    "projection/LayerNorm-MSE/rows32768 D4096/bfloat16": {"rows": 8},
    "attention/maps/B32 H12 N128/bfloat16": {"B": 1},
    **{
        f"soft_targets/{title}/rows8192 V152064/bfloat16": {"rows": 8}
        for title in ("forward KL", "reverse KL", "Jensen-Shannon", "adaptive KL",
                      "total variation", "negative log acceptance", "LK")
    },
    "soft_targets/forward KL, top k/rows8192 V152064 K64/bfloat16": {"rows": 8},
}  # fmt: skip
PROVIDERS = {"fastkd triton": "fastkd", "liger-kernel": "Liger"}


class Gpu(NamedTuple):
    """Rates of a data sheet."""

    name: str
    processors: int
    cycles: float  # a second
    memory: float  # bytes a second
    cache: float  # bytes a second from the L2 cache
    products: float  # bf16 operations a second; tf32 has half
    threads: int = 2048  # of a multiprocessor
    registers: int = 65536
    shared: int = 233_472


GPUS = (
    Gpu("H100", 132, 1.83e9, 3.35e12, 5120 * 1.83e9, 989e12),
    Gpu("B200", 148, 1.85e9, 8.0e12, 2 * 5120 * 1.85e9, 2250e12),
)


class Cost(NamedTuple):
    """One kernel's launches in one case."""

    kernel: str
    elements: int  # of the student's input that was executed
    form: Compiled
    counts: Counts


def costs(launches: Launches, elements: int) -> list[Cost]:
    """Costs of the kernels in the order of their first launch."""
    parts: dict[str, list[Counts]] = {}
    for name, counts in launches:
        parts.setdefault(name, []).append(counts)
    return [Cost(name, elements, launches.forms[name], total(x)) for name, x in parts.items()]


def of_case(case: Case, provider: str, capability: int) -> list[Cost]:
    """Costs of a provider's kernels; none where it has no kernels for the case."""
    chosen = [p for p in case.providers if p.name == provider]
    small = case.sizes | CASES[case.key]
    inputs = case.make(device=torch.device("cpu"), dtype=case.dtype, **small)
    with executing(capability) as launches:
        for one in chosen:
            bound = one.bind(inputs)
            bound.step()
    return costs(launches, bound.leaves[0].numel() if chosen else 0)


def total(parts: list[Counts]) -> Counts:
    sums: dict[str, int] = {}
    classes: collections.Counter[str] = collections.Counter()
    for counts in parts:
        for name, value in dataclasses.asdict(counts).items():
            if name == "by_class":
                classes.update(value)
            else:
                sums[name] = sums.get(name, 0) + value
    return Counts(by_class=dict(classes), **sums)


@functools.cache
def registers(ptx: str, capability: int) -> int:
    """Registers of a thread, as ptxas assigns them."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
        subprocess.run([tool, f"-arch={arch}", source, "-o", binary], check=True)
        return resources(binary.read_bytes())["registers"]


def resident(registers: int, shared: int, threads: int) -> int:
    """CTAs that a multiprocessor holds; registers are allocated by 256 to a warp."""
    gpu = GPUS[0]
    of_warp = -(-32 * registers // 256) * 256
    by_registers = gpu.registers // of_warp // (threads // 32)
    return min(gpu.threads // threads, by_registers, gpu.shared // (shared + 1024), 32)


def least(gpu: Gpu, cost: Cost) -> dict[str, float]:
    """Least seconds of each part of a GPU for the executed launches."""
    c, cycles = cost.counts, gpu.processors * gpu.cycles
    products = gpu.products / (2 if ".tf32" in cost.form.ptx else 1)
    return {
        "issue": c.instructions / (4 * cycles),
        "DRAM": (c.global_bytes_read + c.global_bytes_written) / gpu.memory,
        "L2": 32 * (c.global_sectors_read + c.global_sectors_written) / gpu.cache,
        "shared memory": (c.by_class.get("shared", 0) + c.shared_conflicts) / cycles,
        "tensor cores": c.mma_flops / products,
    }


def binding(gpu: Gpu, cost: Cost) -> tuple[float, str]:
    seconds = least(gpu, cost)
    name = max(seconds, key=lambda part: seconds[part])
    return seconds[name], name


HEAD = [
    "kernel", "instructions", "bytes requested", "distinct bytes", "lost passes", "barriers",
    "operations", "registers", "CTAs", *(f"{gpu.name}, ms" for gpu in GPUS), "binds",
]  # fmt: skip


def row(source: str, cost: Cost, times: float, capability: int) -> list[str]:
    c, each = cost.counts, 1 / cost.elements
    used = registers(cost.form.ptx, capability)
    passes = c.by_class.get("shared", 0) + c.shared_conflicts
    found = [binding(gpu, cost) for gpu in GPUS]
    return [
        f"{source} `{cost.kernel}`", f"{32 * c.instructions * each:.1f}",
        f"{32 * (c.global_sectors_read + c.global_sectors_written) * each:.2f}",
        f"{(c.global_bytes_read + c.global_bytes_written) * each:.2f}",
        f"{c.shared_conflicts / max(passes, 1):.0%}", f"{1024 * c.barriers * each:.2f}",
        f"{c.mma_flops * each:.0f}", str(used),
        str(resident(used, cost.form.shared, 32 * cost.form.warps)),
        *(f"{1e3 * times * seconds:.3g}" for seconds, _ in found),
        ", ".join(dict.fromkeys(name for _, name in found)),
    ]  # fmt: skip


def table(case: Case, capability: int) -> tuple[str, list[str]]:
    """A case's table, and a line of instructions by class for each kernel."""
    small = case.sizes | CASES[case.key]
    times = math.prod(case.sizes.values()) / math.prod(small.values())
    rows, classes = [], []
    for provider, source in PROVIDERS.items():
        found = of_case(case, provider, capability)
        rows += [row(source, cost, times, capability) for cost in found]
        classes += [line(cost) for cost in found]
        if found:
            sums = [sum(binding(gpu, cost)[0] for cost in found) for gpu in GPUS]
            cells = [f"**{1e3 * times * x:.3g}**" for x in sums]
            rows.append([f"**{source}**", *[""] * (len(HEAD) - 4), *cells, ""])
    executed = ", ".join(f"{name} {n} of {case.sizes[name]}" for name, n in CASES[case.key].items())
    title = f"**{case.key}**" + (f" (executed: {executed})" if executed else "")
    return f"{title}\n\n{grid([HEAD, *rows])}", classes


def grid(rows: list[list[str]]) -> str:
    head, *rest = rows
    return "\n".join(f"| {' | '.join(x)} |" for x in [head, ["---"] * len(head), *rest])


def line(cost: Cost) -> str:
    classes = sorted(cost.counts.by_class.items(), key=lambda item: -item[1])
    each = (f"{name} {32 * n / cost.elements:.2f}" for name, n in classes)
    return f"{cost.kernel}: {', '.join(each)}"


def write_page(text: str) -> None:
    page = PAGE.read_text()
    pattern = re.compile(re.escape(START) + ".*?" + re.escape(END), re.DOTALL)
    assert pattern.search(page), f"{PAGE}: no place for the tables"
    PAGE.write_text(pattern.sub(lambda _: f"{START}\n\n{text}\n\n{END}", page))


def chosen(losses: list[str]) -> Iterator[Case]:
    by_key = {case.key: case for case in suite.every_case()}
    for key in CASES:
        if not losses or by_key[key].loss in losses:
            yield by_key[key]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.executed.count", description=__doc__)
    parser.add_argument("losses", nargs="*", help="losses of the benchmarks (default: all)")
    parser.add_argument("--capability", type=int, default=90, choices=(80, 90))
    parser.add_argument("--page", action="store_true", help="write the tables into docs/kernels.md")
    options = parser.parse_args(arguments)
    known = {key.partition("/")[0] for key in CASES}
    if unknown := set(options.losses) - known:
        names = ", ".join(sorted(known))
        parser.error(f"no counts of {', '.join(sorted(unknown))}; choose from {names}")
    torch.manual_seed(0)
    found = []
    for case in chosen(options.losses):
        text, classes = table(case, options.capability)
        print("\n".join([text, "", *classes, ""]), flush=True)
        found.append(text)
    if options.page:
        write_page("\n\n".join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
