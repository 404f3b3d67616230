"""Predict the benchmark's cases on a GPU that is not there: *predicted, not measured*.

``python -m tools.estimate [--device h100|h200|a100] [--set ...] [--only ...]`` prints a line for
each case; ``--page FILE`` writes docs/estimates.md. It runs the cases on tensors without data
(tools/dry_cuda.py) and compiles what they start, so it needs the repository and Triton, and no GPU.
`prediction` has the arithmetic.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import tomllib

from bench import suite

from .prediction import GPUS, LATENCY, LAUNCH, REACHED, SCHEDULERS, Gpu, predict

TEXTS = Path(__file__).with_name("estimates")
SHOWN = "soft_targets/forward KL/rows8192 V152064/bfloat16"  # whose arithmetic stands in full


class Aim(NamedTuple):
    """Work that was found to be far from its floor, in milliseconds by hand from machine code."""

    title: str
    key: str
    before: tuple[float, float]
    floor: float
    why_not: str = ""  # it has lost less than half of the distance


AIMS = [Aim(**aim) for aim in tomllib.loads((TEXTS / "aims.toml").read_text())["aims"]]
# Work that this can't say, in the same columns.
BY_HAND = (
    "| roots, n 32 / 110, by hand below | 0.75 / 8.6 | 0.17 / 1.9 | | instructions | yes, of the "
    "distance to 0 |",
    "| Python per call | 0.2 to 1 | launches only, below | | | no: checks, autograd and PyTorch's "
    "own operations take several times what the launches do |",
)
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
        # Counted in the loops of csrc/linalg/roots.cu's machine code for sm_90, loops that do not
        # always run included, and in the lines of
        # ``--device h100 --set vocab --only soft_targets --json``.
        by_hand = (TEXTS / "by_hand.md.in").read_text().removesuffix("\n")
        parts.append(AIMS_HEAD + "\n".join([*table, *_serial(rows), *BY_HAND, "", by_hand]))
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
    text = (TEXTS / "head.md.in").read_text().removesuffix("\n")
    return text.format(
        gpu=gpu.name.upper(), device=gpu.name, memory=REACHED["memory"],
        tensor_cores=REACHED["tensor cores"], bandwidth=gpu.bandwidth / 1e12,
        cache_bandwidth=gpu.cache_bandwidth / 1e12, clock=gpu.clock / 1e9, schedulers=SCHEDULERS,
        latency=LATENCY * 1e6, launch=LAUNCH * 1e6,
    )  # fmt: skip


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


def split(text: str) -> list[str]:
    """Names of a comma-separated list."""
    return [name.strip() for name in text.split(",") if name.strip()]


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
    if options.page:
        options.page.write_text(page(gpu, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
