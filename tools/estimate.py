"""Predict the benchmark's cases on a GPU that is not there: *predicted, not measured*.

``python -m tools.estimate [--device h100|h200|a100] [--set ...] [--only ...]`` prints a line for
each case; ``--page FILE`` writes docs/estimates.md. ``make gpu-check`` on that GPU prints them
beside what it measures. It runs the cases on tensors without data (tools/dry_cuda.py) and
compiles what they start, so it needs the repository and Triton, and no GPU. `prediction` has the
arithmetic.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from fastkd.bench import suite
from fastkd.bench.passes import code_digest
from fastkd.bench.runner import split, write

from .prediction import GPUS, LATENCY, LAUNCH, REACHED, SCHEDULERS, Gpu, predict

KEPT = Path(__file__).resolve().parents[1] / "build" / "estimates"
SHOWN = "soft_targets/forward KL/rows8192 V152064/bfloat16"  # whose arithmetic stands in full


class Aim(NamedTuple):
    """Work that was found to be far from its floor, in milliseconds by hand from machine code."""

    title: str
    key: str
    before: tuple[float, float]
    floor: float
    why_not: str = ""  # it has lost less than half of the distance


AIMS = (
    Aim("CCA, 6 pairs, m 4096", "cca/observations/pairs6 m4096 Ds768 Dt768/float32", (25, 40), 0.5),
    Aim(
        "CCA, 24 pairs, m 4096",
        "cca/observations/pairs24 m4096 Ds768 Dt768/float32",
        (60, 120),
        2.0,
    ),
    Aim(
        "FCD, 6 layers, B32 N128",
        "relation/tokens + samples/B32 N128 Ds768 Dt768 layers6/bfloat16",
        (0.150, 0.220),
        0.026,
        "every row is still read for its norm, for the relations of each kind and for the "
        "gradient, and a program of a sample fills a multiprocessor alone",
    ),
    Aim("forward KL 8192 × 152k", SHOWN, (3.4, 4.1), 2.9),
    Aim(
        "adaptive KL 8192 × 152k",
        "soft_targets/adaptive KL/rows8192 V152064/bfloat16",
        (17, 17),
        2.9,
        "two histograms in place of eight reads, but Triton's counting takes most of a program's "
        "instructions, and 243 registers leave one program a multiprocessor",
    ),
    Aim(
        "KNN 32 × 65,536 × 768",
        "knn/bank, k=1/N32 M65536 D768 classes2/bfloat16",
        (0.150, 0.180),
        0.023,
    ),
    Aim(
        "KNN 65,536² × 768",
        "knn/all pairs, k=1/N65536 M65536 D768 classes2/bfloat16",
        (14, 14),
        4.2,
        "tiles of 128 × 64 read both sides from the L2 cache for every 64 features; beside the "
        "candidates, 128 × 128 don't fit into 255 registers, and 128 × 256 without them, of which "
        "a second kernel gets the least of every 16 scores, fit on sm_90 alone: the compiler keeps "
        "616 bytes in memory on sm_80 and 920 on sm_100",
    ),
    Aim(
        "relation B8 N4096 2048/4096",
        "relation/tokens/B8 N4096 Ds2048 Dt4096/bfloat16",
        (4.0, 4.7),
        1.7,
        "the tiles of both products are bound by the L2 cache",
    ),
    Aim(
        "Cayley 768",
        "projection/Cayley/D768/float32",
        (1.3, 1.3),
        0.05,
        "without a guess, ten rounds and 31 launches",
    ),
    Aim(
        "Cayley 4096",
        "projection/Cayley/D4096/float32",
        (10, 15),
        3.2,
        "without a guess it takes ten rounds of two products in three parts each; a training step, "
        "which has the last inverse for a guess, takes about two rounds",
    ),
)


# Work that this can't say, in the same columns.
BY_HAND = (
    "| roots, n 32 / 110, by hand below | 0.75 / 8.6 | 0.17 / 1.9 | | instructions | yes, of the "
    "distance to 0 |",
    "| Python per call | 0.2 to 1 | launches only, below | | | no: checks, autograd and PyTorch's "
    "own operations take several times what the launches do |",
)
# Counted in the loops of csrc/roots.cu's machine code for sm_90; what is not always run counts too.
ROOTS = """\
The roots are counted by hand, as the extension's machine code is not read, with the sweeps and
rotations that the benchmark's matrices take. A warp issues one instruction in two cycles of
1.83 GHz at most, a scheduler one a cycle; how long a result takes, which the next rotation waits
for, is not in it.

- n 32, one warp a matrix, 500 of them one for each scheduler: 1,239 rotations × 72 instructions +
  69 sweeps × 173 + 32 eigenvalues × 35 + 31 reflections × 911 + 32 rows of root and vectors × 726 +
  32 rows read × 85 = 156,000; × 2 / 1.83 GHz = 0.17 ms, without a barrier. An earlier version took
  four warps with 314,000 instructions between them and about 136 barriers.
- n 110, sixteen warps a matrix: the first finds rotations, 13,270 × 73 + 13,600 couplings looked
  at × 18 + 220 sweeps × 237 = 1,266,000, × 2 cycles, while others apply them. Then all four warps
  of a scheduler: 109 reflections × 5,000 + their product 109 × 2,700 + root 88,000 = 927,000
  cycles. In all 3.46 million cycles, 1.9 ms."""
# By hand from the lines of ``--device h100 --set vocab --only soft_targets --json``.
HEADS = """\
Language models' heads, on an H100: Jensen-Shannon of 8,192 rows, 4,096 features on both sides,
128,256 words, bf16, forward and backward. Predicted 62.2 ms (1,024 rows: 8.0 ms; 8,192 rows of
2,048 and 4,096 features: 42.5 ms), of which products 43.5 at 80% of the data sheet, the row
kernels 9.8, adding to the head's gradient 5.6, gradients to bf16 2.1, scaling them 1.1. Memory
beyond the inputs, by hand: 2.13 GB of a chunk (1,664 rows: float32 logits of both sides, a bf16
gradient), 2.10 of the head's gradient in float32, 0.2 for the states' and one tile: 4.4 GB. The
inputs are 2.2 GB more.

A kernel that keeps logits in registers, a tile at a time, is not written, as it loses by these
numbers. It would save the row kernels and the cast, 11.9 ms at most. But normalisers have to be
known before a gradient, so both sides' products come once more, 17.2 T operations: 21.7 ms, if
Triton's products were as fast as cuBLAS's. Jensen-Shannon's gradient also waits for an
expectation that waits for the normalisers, so there they come twice more. With 1,024 rows it is
1.5 ms against 2.7 and 5.4."""
SERIAL = (
    "cos_nce_reduce_kernel",
    "cos_nce_sum_kernel",
    "relation_coefficients_kernel",
    "relation_offsets_kernel",
    "soft_target_reduce_kernel",
)


def page(gpu: Gpu, rows: list[dict[str, Any]]) -> str:
    found = {row["key"]: row for row in rows}
    parts = [_head(gpu)]
    if SHOWN in found:
        parts.append(_in_full(gpu, found[SHOWN]))
    if table := [_aim(aim, found[aim.key]) for aim in AIMS if aim.key in found]:
        parts.append(
            AIMS_HEAD + "\n".join([*table, *_serial(rows), *BY_HAND, "", ROOTS, "", HEADS])
        )
    parts.append(ALL_HEAD + "\n".join(_row(row) for row in rows))
    return "\n\n".join(parts) + "\n"


AIMS_HEAD = """\
## What was far from its floor

"Before" is what an earlier version was estimated to take, by hand from its machine code. The last
column says whether at least half of the distance to the floor is gone, and what keeps it if not.
This floor is by hand as well, of what the algorithm has to do, such as reading logits twice. Below
it is the benchmarks': inputs and results moved once, and the formula's operations.

| work | before, ms | predicted now | floor | bound by | half of the distance lost |
|---|---|---|---|---|---|
"""

ALL_HEAD = """\
## Every case

| case | predicted, ms | floor | device alone | host alone | launches | bound by |
|---|---|---|---|---|---|---|
"""


def _head(gpu: Gpu) -> str:
    return f"""\
# Estimates: predicted, not measured

This page goes when a GPU has measured: what is measured stands in [benchmarks.md](benchmarks.md).

No number here comes from a clock. They are computed from compiled kernels, for an
{gpu.name.upper()} without one at hand, and written by

```sh
python -m tools.estimate --device {gpu.name} --page docs/estimates.md
```

fastkd's own provider of every GPU case of the benchmarks runs, forward and backward, on tensors
without data. Each kernel that it starts is compiled for the GPU. Triton's code gives the trips of
every loop, the bytes of every load and store and the matrix products of one program; the
disassembled machine code gives the instructions of a trip. A launch takes the longest of

- **memory**: each load or store reads or writes its tensor's bytes once, at {REACHED["memory"]:.0%}
  of {gpu.bandwidth / 1e12:g} TB/s; tensors smaller than half of the L2 cache come from it but once;
- **L2 cache**: all bytes asked for, at {gpu.cache_bandwidth / 1e12:g} TB/s;
- **instructions**: of all warps on the busiest multiprocessor, {SCHEDULERS} a cycle at
  {gpu.clock / 1e9:g} GHz, and no more than one in two cycles of one warp;
- **tensor cores**: at {REACHED["tensor cores"]:.0%} of the data sheet's rate, less where a warp and
  not a warp group multiplies on sm_90;
- **latency**: {LATENCY * 1e6:g} µs for each trip whose loads the next one waits for, in every wave
  of programs;
- {LAUNCH * 1e6:g} µs, the least from one launch to the next.

A step is the sum of its launches, or what Python takes to start them where that is longer. What
depends on data is assumed: KNN's labels are spread evenly, rare branches are not taken, Cayley maps
take the rounds of their benchmark's matrices. Not in it: the CUDA extension (roots of matrices up
to 119 rows, where only what surrounds it is counted), what PyTorch's autograd starts around fastkd,
conflicts of shared memory, clocks below the boost clock. Expect the order of magnitude and what
binds, not the second digit."""


def _in_full(gpu: Gpu, row: dict[str, Any]) -> str:
    lines = [f"## One case in full\n\n{row['key']}, {row['launches']} launches.\n"]
    for kernel in row["kernels"]:
        detail = kernel["detail"]
        limits = ", ".join(f"{name} {us:.1f}" for name, us in kernel["limits_us"].items())
        if detail.get("warps"):
            per = kernel["programs"] / gpu.processors
            issue = detail["instructions"] * detail["warps"] / SCHEDULERS / gpu.clock * 1e6
            lines.append(
                f"- `{kernel['name']}`: {kernel['programs']} programs, {per:.1f} a multiprocessor, "
                f"{detail['programs a processor']:.0f} at a time ({detail['registers']} registers, "
                f"{detail['warps']} warps): {kernel['waves']:.1f} waves. "
                f"{detail['bytes'] / 1e9:.3f} GB asked for. {detail['instructions']:.0f} "
                f"instructions a warp: × {detail['warps']} warps / {SCHEDULERS} / "
                f"{gpu.clock / 1e9:g} GHz = {issue:.2f} µs a program. Limits in µs: {limits}. "
                f"Taken: {kernel['us']:.1f} µs, {kernel['bound']}."
            )
        else:
            lines.append(f"- `{kernel['name']}`: {limits} µs. Taken: {kernel['us']:.1f} µs.")
    lines.append(
        f"\nDevice {row['device_ms']:.3f} ms, host {row['host_ms']:.3f} ms: predicted "
        f"{row['predicted_ms']:.3f} ms, bound by {row['bound']}."
    )
    return "\n".join(lines)


def _aim(aim: Aim, row: dict[str, Any]) -> str:
    low, high = aim.before
    before = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    now = row["predicted_ms"]
    lost = now - aim.floor <= ((low + high) / 2 - aim.floor) / 2
    answer = "yes" if lost else f"no: {aim.why_not}"
    return f"| {aim.title} | {before} | {now:.3g} | {aim.floor:g} | {row['bound']} | {answer} |"


def _serial(rows: list[dict[str, Any]]) -> list[str]:
    """The longest launch of those that add up on a few multiprocessors while the others wait."""
    made = [
        (kernel["us"] / 1e3, f"`{kernel['name']}`, {row['key']}")
        for row in rows
        for kernel in row["kernels"]
        if kernel["name"] in SERIAL and kernel["programs"] <= 6
    ]
    if not made:
        return []
    longest, where = max(made)
    aim = Aim(f"sums of one to six programs: {where}", "", (0.02, 0.16), 0.002)
    return [_aim(aim, {"predicted_ms": longest, "bound": "latency"})]


def _row(row: dict[str, Any]) -> str:
    problem = f" ({row['problem']})" if row["problem"] else ""
    return (
        f"| {row['key']}{problem} | {row['predicted_ms']:.3g} | {row['floor_ms']:.3g} | "
        f"{row['device_ms']:.3g} | {row['host_ms']:.3g} | {row['launches']} | {row['bound']} |"
    )


def line(row: dict[str, Any]) -> str:
    """A case and its prediction."""
    return (
        f"{row['predicted_ms']:9.3f} ms predicted, floor {row['floor_ms']:.3f}, device "
        f"{row['device_ms']:.3f}, host {row['host_ms']:.3f}, {row['launches']} launches, bound by "
        f"{row['bound']}: {row['key']}"
    )


def keep(name: str, rows: list[dict[str, Any]]) -> None:
    """Put predictions for the GPU ``name`` where `kept` finds them, beside earlier ones."""
    milliseconds = kept(name) | {row["key"]: row["predicted_ms"] for row in rows}
    write(KEPT / f"{name}.json", {"code": code_digest(), "predicted_ms": milliseconds})


def kept(gpu: str) -> dict[str, float]:
    """Milliseconds by case, if they were estimated for this GPU from this code."""
    for file in KEPT.glob("*.json"):
        found = json.loads(file.read_text())
        if file.stem in gpu.lower() and found["code"] == code_digest():
            return found["predicted_ms"]
    return {}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.estimate", description=__doc__)
    parser.add_argument("--device", choices=tuple(GPUS), default="h200")
    parser.add_argument("--set", default="", help=f"comma-separated: {', '.join(suite.SETS)}")
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(suite.LOSSES)}")
    parser.add_argument("--json", action="store_true", help="print rows as JSON, a line each")
    parser.add_argument("--page", type=Path, help="write the page of the documentation")
    options = parser.parse_args(arguments)
    # The interpreter replaces kernels by Python functions, which have nothing to compile.
    if os.environ.pop("TRITON_INTERPRET", "0") == "1" and "triton" in sys.modules:
        parser.error("triton is already imported with TRITON_INTERPRET=1")
    sets = split(options.set) or suite.CUDA_SETS
    # A training step is mostly the models' own work.
    cases = [case for case in suite.cases(sets, split(options.only)) if case.loss != "step"]
    gpu, rows = GPUS[options.device], []
    for prediction in predict(gpu, cases):
        rows.append(prediction.row())
        print(json.dumps(rows[-1]) if options.json else line(rows[-1]), flush=True)
    keep(gpu.name, rows)
    if options.page:
        options.page.write_text(page(gpu, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
