"""``python -m tools.executed.count [loss ...]``: counts of the kernels' compiled code.

The benchmarks' cases in `CASES` run forward and backward, compiled for ``--capability``; a few
rows, layers or positions are executed. A line for each kernel has, for each element of the
student's input: a thread's instructions, bytes requested (32-byte sectors of each warp's access),
distinct bytes (each once a launch), operations of matrix products; the fraction of shared memory's
passes that bank conflicts add, barriers of 1,024 elements, registers, and instructions by class.
"""

import argparse
import collections
import functools
import operator
import sys
from typing import NamedTuple

import torch

from bench import suite
from bench.case import Case
from tools.compile_report import resources
from tools.executed import executing
from tools.ptx.compiled import Compiled, Launches
from tools.ptx.counting import Counts

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


class Cost(NamedTuple):
    """One kernel's launches in one case."""

    kernel: str
    elements: int  # of the student's input that was executed
    form: Compiled
    counts: Counts


def costs(launches: Launches, elements: int) -> list[Cost]:
    """Costs of the kernels in the order of their first launch."""
    parts = collections.defaultdict(list)
    for name, counts in launches:
        parts[name].append(counts)
    return [
        Cost(name, elements, launches.forms[name], functools.reduce(operator.add, x))
        for name, x in parts.items()
    ]


def of_case(case: Case, capability: int) -> list[Cost]:
    """Costs of a case's Triton kernels."""
    provider = next(p for p in case.providers if p.name == "fastkd triton")
    sizes = case.sizes | CASES[case.key]
    inputs = case.make(device=torch.device("cpu"), dtype=case.dtype, **sizes)
    with executing(capability) as launches:
        bound = provider.bind(inputs)
        bound.step()
    return costs(launches, bound.leaves[0].numel())


def line(cost: Cost) -> str:
    c, each = cost.counts, 1 / cost.elements
    passes = c.by_class["shared"] + c.shared_conflicts
    measured = {
        "instructions": f"{32 * c.instructions * each:.1f}",
        "bytes requested": f"{32 * (c.global_sectors_read + c.global_sectors_written) * each:.2f}",
        "distinct": f"{(c.global_bytes_read + c.global_bytes_written) * each:.2f}",
        "operations": f"{c.mma_flops * each:.0f}",
        "lost passes": f"{c.shared_conflicts / max(passes, 1):.0%}",
        "barriers": f"{1024 * c.barriers * each:.2f}",
        "registers": resources(cost.form.cubin)["registers"],
    }
    classes = [f"{name} {32 * n * each:.2f}" for name, n in c.by_class.most_common()]
    numbers = ", ".join(f"{name} {number}" for name, number in measured.items())
    return f"{cost.kernel}: {numbers}; {', '.join(classes)}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.executed.count", description=__doc__)
    parser.add_argument("losses", nargs="*", help="losses of the benchmarks (default: all)")
    parser.add_argument("--capability", type=int, default=90, choices=(80, 90))
    options = parser.parse_args(arguments)
    known = sorted({key.partition("/")[0] for key in CASES})
    if unknown := sorted({*options.losses} - {*known}):
        parser.error(f"no counts of {', '.join(unknown)}; choose from {', '.join(known)}")
    torch.manual_seed(0)
    by_key = {case.key: case for case in suite.every_case()}
    for case in (by_key[key] for key in CASES):
        if options.losses and case.loss not in options.losses:
            continue
        print(case.key, *map(line, of_case(case, options.capability)),
              sep="\n  ", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
