"""How long each kernel of a step runs on a GPU: ``python -m bench.kernel_times [RESULT]``.

`make gpu-check` measures it (runs/gpu/kernels.json), each case in a process that had no fault
before. This command keeps the result as bench/results/kernels/MACHINE.json and writes the table of
docs/kernels.md. Durations are torch.profiler's, without launches and waits between kernels, of
fastkd's Triton kernels (PyTorch code where a loss has none) at the benchmarks' sizes for GPUs.
Inputs that fit into the L2 cache may come from it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from . import suite
from .case import Bound, Case, Provider
from .group import DEVICE
from .report import RESULTS, ROOT, fill, mark, milliseconds, sizes, table, with_note

PAGE = ROOT / "docs" / "kernels.md"
FOLDER = RESULTS / "kernels"
START, END = "<!-- python -m bench.kernel_times -->", "<!-- end of times -->"
LEAST_FLOOR = 2e-3  # milliseconds, about a launch: a multiple of less says nothing
SETS = [name for name in suite.CUDA_SETS if name not in ("sweep", "step")]


def own_provider(case: Case) -> Provider:
    """The Triton kernels, or what fastkd runs where a loss has none."""
    names = ("fastkd triton", "fastkd torch", "fastkd")
    by_name = {p.name: p for p in case.providers if p.why_not(DEVICE) is None}
    return next(by_name[name] for name in names if name in by_name)


def durations(bound: Bound, steps: int = 5) -> dict[str, list[float]]:
    """Launches and microseconds of each kernel in one step, the longest first."""
    for _ in range(2):
        bound.step()
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as trace:
        for _ in range(steps):
            bound.between()
            bound.step()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in trace.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0:
            of_kernel = found.setdefault(event.name(), [0.0, 0.0])
            of_kernel[0] += 1 / steps
            of_kernel[1] += event.duration_ns() / 1e3 / steps
    return dict(sorted(found.items(), key=lambda kernel: -kernel[1][1]))


def row(case: Case) -> dict[str, Any]:
    """Durations of a case's kernels, and what its floor follows from."""
    torch.manual_seed(0)
    provider = own_provider(case)
    inputs = case.make(device=DEVICE, dtype=case.dtype, **case.sizes)
    return {
        "loss": case.loss, "title": case.title, "sizes": case.sizes,
        "dtype": str(case.dtype).removeprefix("torch."), "bytes": case.bytes_moved,
        "operations": case.operations, "provider": provider.name,
        "kernels": durations(provider.bind(inputs)),
    }  # fmt: skip


def page(result: dict[str, Any]) -> str:
    """The table of docs/kernels.md: time by bytes or operations, all kernels, fastkd's by name."""
    rows = []
    for row in result["cases"]:
        floor = 1e3 * max(
            row["bytes"] / result["limits"]["copy"],
            row["operations"] / result["limits"][row["dtype"]],
        )
        total = sum(us for _, us in row["kernels"].values()) / 1e3
        own, others = [], 0.0
        for name, (launches, us) in row["kernels"].items():
            short = name.partition("<")[0].rpartition("::")[2].rpartition(" ")[2]
            if "fastkd::" in name or (name.isidentifier() and name.endswith("_kernel")):
                count = f" ({launches:.0f})" if launches > 1.5 else ""
                own.append(f"`{short.removesuffix('_kernel')}`{count} {us / 1e3:.3g}")
            else:
                others += us / 1e3
        own += [f"libraries {others:.3g}"] if others >= 0.005 else []
        rows.append((
            f"{row['loss']}: {row['title']}{mark(row['loss'], result['commit'])}",
            sizes(row), ", ".join(own), f"{floor:.3g}",
            milliseconds({"ms": total}), f"{total / floor:.1f}" if floor >= LEAST_FLOOR else "",
        ))  # fmt: skip
    about = (
        f"{result['machine']['gpu']}, torch {result['versions']['torch']}, Triton "
        f"{result['versions']['triton']}, commit {result['commit']}, {result['date']}. Copies "
        f"{result['limits']['copy'] / 1e12:.3g} TB/s, bf16 products "
        f"{result['limits']['bfloat16'] / 1e12:.3g} TFLOP/s."
    )
    columns = "loss | sizes | kernels, their launches and ms | floor, ms | all, ms | × floor"
    return f"{about}\n\n{with_note(table(columns, rows, text=3))}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kernel_times", description=__doc__)
    parser.add_argument("measured", nargs="*", type=Path, help="new results, kept in the folder")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in options.measured:
        result = json.loads(path.read_text())
        (FOLDER / f"{result['machine']['name']}.json").write_text(path.read_text())
    texts = [page(json.loads(path.read_text())) for path in sorted(FOLDER.glob("*.json"))]
    text = "\n\n".join(texts) or "No result file is there yet."
    PAGE.write_text(fill(PAGE.read_text(), text, START, END))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
