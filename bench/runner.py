"""Run a selection of cases, print the table as it grows, keep the results in a JSON file.

The first pass checks and times everything and prints the table; later ones (`passes`) time
fastkd's own providers again. The file is complete and valid after every case of every pass.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fastkd._core import machine
from fastkd._core.atomic_files import write_file
from fastkd._core.checks import check_choice

from . import roofline, suite, table
from .harness import FORMAT, Case, add_pass, measure, one_line, row_of
from .passes import code_digest, run_pass, timed_again

# A GPU's times scatter less, and its hours cost more.
PASSES = {"cpu": 5, "cuda": 3}


class WrongChoice(ValueError):
    """A set, loss or device that isn't there."""


def run(
    sets: Sequence[str] = (),
    only: Sequence[str] = (),
    device: str | None = None,
    out: str | Path | None = None,
    plot: str | Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Measure the chosen cases and return the results as written to ``out``.

    Args:
        sets: names of size sets; none means the device's own ("cpu", or every GPU set).
        only: losses to measure; none means all.
        device: "cpu" or "cuda"; None takes CUDA where there is one.
        out: result file, or a folder that gets ``<machine>.json``; None means ``runs/bench/``.
        plot: folder for pictures; None draws none.
        options: see `run_cases`.
    """
    target, cases = _choose(sets, only, device)
    path = Path("runs/bench" if out is None else out)
    path = path if path.suffix == ".json" else path / f"{machine.slug(target)}.json"
    results = run_cases(cases, target, path, **options)
    print(f"\nresults: {path}")
    if plot is not None:
        from .plots import draw

        for picture in draw(results, Path(plot)):
            print(f"picture: {picture}")
    return results


def _choose(
    sets: Sequence[str], only: Sequence[str], device: str | None
) -> tuple[torch.device, list[Case]]:
    """Device and cases, or WrongChoice."""
    try:
        if device is not None:
            check_choice("device", device, ("cpu", "cuda"))
        for name in sets:
            check_choice("set", name, suite.SETS)
        for name in only:
            check_choice("only", name, suite.LOSSES)
    except ValueError as error:
        raise WrongChoice(str(error)) from None
    if device == "cuda" and not torch.cuda.is_available():
        raise WrongChoice("device='cuda' was asked for, but this torch sees no CUDA device")
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    sets = tuple(sets) or (suite.CUDA_SETS if target.type == "cuda" else suite.CPU_SETS)
    cases = suite.cases(sets, only)
    if not cases:
        raise WrongChoice(f"no case of {', '.join(only)} in set {', '.join(sets)}")
    return target, cases


def run_cases(
    cases: Iterable[Case],
    device: torch.device,
    path: Path,
    *,
    commit: str | None = None,
    resume: bool = False,
    seconds: float = 1.5,
    passes: int | None = None,
    fewest: int = 5,
    budget: float = math.inf,
    predicted: Mapping[str, float] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Measure ``cases`` into ``path``; see `run`. With one pass they need not be the suite's.

    Args:
        commit: what to record as the commit where git can't tell.
        resume: keep what ``path`` already holds from the same code on the same machine.
        seconds: timing budget of one case, all passes together.
        passes: how often every case is timed; None means `PASSES` of the device.
        fewest: rounds of a case's first pass, however long they take.
        budget: seconds after which no case is begun; the rest is listed in the result as "left".
        predicted: milliseconds by case, shown beside what is measured.
    """
    end = clock() + budget
    cases = list(cases)
    passes = passes or PASSES[device.type]
    results: dict[str, Any] = {
        "format": FORMAT,
        **machine.describe(device, commit),
        "code": code_digest(),
        "passes": passes,
    }
    kept = _kept_rows(path, results) if resume else {}
    dtypes = tuple(sorted({case.dtype for case in cases}, key=str))
    print(f"{results['machine']['name']}, torch {results['versions']['torch']}", flush=True)
    limits = roofline.roofline(device, dtypes)
    results["roofline"] = limits
    rates = (
        f"{name.removesuffix('_ops_per_s')} {rate / 1e12:.3g} T/s"
        for name, rate in limits.items()
        if name.endswith("ops_per_s")
    )
    print(f"copy {limits['copy_bytes_per_s'] / 1e9:.3g} GB/s, matrix {', '.join(rates)}")
    results["rows"] = []
    for number, case in enumerate(cases, start=1):
        start = time.perf_counter()
        row = kept.get(case.key)
        if row is None and clock() >= end:
            results.setdefault("left", []).append(case.key)
            continue
        if row is None:
            row = _measured(case, device, seconds / passes, fewest)
            _set_floor(row, limits)
            if predicted and case.key in predicted:
                row["predicted_ms"] = predicted[case.key]
            row["seconds"] = time.perf_counter() - start
            if passes == 1 or not timed_again(row):
                del row["passes"]
        results["rows"].append(row)
        write(path, results)
        print(f"\n[{number}/{len(cases)}] " + "\n".join(table.row_lines(row)), flush=True)
    if left := results.get("left"):
        write(path, results)
        print(f"\n{len(left)} cases are left, for want of time: {', '.join(left)}")
    for number in range(2, passes + 1):
        if clock() >= end:
            results.setdefault("left", []).append(f"pass {number}")
            write(path, results)
            break
        _later_pass(number, results, device, path, seconds / passes)
    return results


def _later_pass(
    number: int, results: dict[str, Any], device: torch.device, path: Path, seconds: float
) -> None:
    """Time all rows that lack pass ``number`` once more: a dot for each."""
    rows = [row for row in results["rows"] if len(row.get("passes", ())) == number - 1]
    if not rows:
        return
    start = time.perf_counter()
    print(f"\npass {number}/{results['passes']} ", end="", flush=True)
    for row, times in run_pass(rows, device, seconds, results["code"]):
        add_pass(row, times)
        if number == results["passes"]:
            del row["passes"]
        write(path, results)
        print(".", end="", flush=True)
    # A floor is what the hardware can do: the best that was seen of it in any pass.
    dtypes = tuple(getattr(torch, name) for name in sorted({row["dtype"] for row in rows}))
    for name, limit in roofline.roofline(device, dtypes, number).items():
        results["roofline"][name] = max(limit, results["roofline"].get(name, 0.0))
    for row in results["rows"]:
        _set_floor(row, results["roofline"])
    write(path, results)
    print(f" {time.perf_counter() - start:.0f} s", end="", flush=True)


def _set_floor(row: dict[str, Any], limits: dict[str, float]) -> None:
    row["floor_ms"] = roofline.floor_ms(limits, row["bytes_moved"], row["operations"], row["dtype"])


def _measured(case: Case, device: torch.device, seconds: float, fewest: int) -> dict[str, Any]:
    """The row of ``case``; one whose inputs or oracle don't fit must not end the whole run."""
    try:
        return measure(case, device, seconds, fewest)
    except RuntimeError as error:
        reason = f"inputs or oracle failed: {one_line(error)}"
        return row_of(case, {p.name: {"skipped": reason} for p in case.providers})


def _kept_rows(path: Path, now: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of an earlier, unfinished run of the same code, versions and machine, by key."""
    if not path.exists():
        return {}
    try:
        before = json.loads(path.read_text())
        before["rows"]
    except (ValueError, TypeError, KeyError):
        raise WrongChoice(f"{path} is damaged: move it away, or leave out --resume") from None
    same = ("format", "machine", "versions", "commit", "code", "passes")
    if any(before.get(name) != now[name] for name in same):
        return {}
    return {row["key"]: row for row in before["rows"]}


def write(path: Path, results: dict[str, Any]) -> None:
    """Replace the file in one step: an interruption leaves the last complete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(results, indent=1) + "\n")


def split(text: str) -> tuple[str, ...]:
    """Names of a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
