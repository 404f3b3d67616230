"""Is this working tree slower than another commit? ``python -m bench.compare REF``.

The other commit is built in build/compare/ and gets this tree's bench/. The headline groups run in
both trees in turn, and fastkd's providers are compared by their ratio to the reference of the same
rounds. The exit status is 1 if one is slower beyond noise.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .case import ours

ROOT = Path(__file__).resolve().parent.parent
# Least growth of a ratio, and least number of standard errors.
LEAST = math.log(1.10)
ERRORS = 4.0

Pair = tuple[Sequence[float], Sequence[float]]


def slower(pairs: Sequence[Pair]) -> list[bool]:
    """Pairs (logarithms of ratios of each run, before and after) that grew beyond noise.

    The median has to grow by `LEAST` and by `ERRORS` standard errors. A few runs say little
    about their own scatter, so the variance is the mean of the pair's and of the median pair's.
    One disturbed run on either side neither raises an alarm nor hides one: scatter is estimated
    from absolute deviations, and all runs after but one have to lie above all before but one.
    """
    scatters = [_scatter(pair) for pair in pairs]
    usual = statistics.median(scatters) if pairs else 0.0
    flags = []
    for (before, after), scatter in zip(pairs, scatters, strict=True):
        growth = statistics.median(after) - statistics.median(before)
        # The median's variance is π/2 times that of a mean.
        variance = math.pi / 2 * (scatter**2 + usual**2) / 2
        error = math.sqrt(variance * (1 / len(before) + 1 / len(after)))
        apart = sorted(after)[1] > sorted(before)[-2]
        flags.append(apart and growth > max(LEAST, ERRORS * error))
    return flags


def _scatter(pair: Pair) -> float:
    """Standard deviation of one run, from the median absolute deviation of both sides."""
    deviations = [abs(x - statistics.median(runs)) for runs in pair for x in runs]
    return 1.4826 * statistics.median(deviations)


def build(ref: str) -> Path:
    """A tree of the commit ``ref`` with its extension built and this tree's benchmarks."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout

    commit = git("rev-parse", "--verify", f"{ref}^{{commit}}").decode().strip()
    tree = ROOT / "build" / "compare" / commit[:12]
    if not tree.exists():
        unfinished = tree.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        subprocess.run(["tar", "-x"], cwd=unfinished, input=git("archive", commit), check=True)
        _build_extension(unfinished)
        unfinished.rename(tree)
    shutil.rmtree(tree / "bench")
    ignored = shutil.ignore_patterns("results", "studies", "__pycache__")
    shutil.copytree(ROOT / "bench", tree / "bench", ignore=ignored)
    return tree


def _build_extension(tree: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    environment = {**os.environ, "FASTKD_REQUIRE_EXT": "1"}
    subprocess.run(command, cwd=tree, check=True, env=environment)


def ratios(tree: Path, out: Path, arguments: list[str]) -> dict[str, tuple[float, int]]:
    """Logarithm of the ratio to the reference, and peak bytes, by group and provider."""
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "bench", *arguments, "--benchmark-quiet"]
    # ``python -m`` imports from the tree before anything that is installed.
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    subprocess.run([*command, f"--benchmark-json={out}"], cwd=tree, env=environment, check=True)
    found = {}
    for bench in json.loads(out.read_text())["benchmarks"]:
        info = bench["extra_info"]
        if ours(info["loss"], info["backend"]) and "ratio" in info:
            key = f"{bench['group']}, {info['backend']}"
            found[key] = (math.log(info["ratio"]["median"]), info.get("peak_bytes", 0))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("ref", help="commit to compare this working tree with")
    parser.add_argument("--runs", type=int, default=5, help="of each tree, at least 3")
    parser.add_argument("--pytest", default="-m headline", help="arguments that choose the groups")
    options = parser.parse_args(arguments)
    if options.runs < 3:
        parser.error("--runs: fewer than 3 runs show no noise; give 3 or more")
    _build_extension(ROOT)
    trees = {"before": build(options.ref), "after": ROOT}
    found: dict[str, list[dict[str, tuple[float, int]]]] = {"before": [], "after": []}
    for run in range(options.runs):
        for side in ("before", "after") if run % 2 else ("after", "before"):
            print(f"run {run + 1} of {options.runs}, {side}", flush=True)
            out = ROOT / "build" / "compare" / "json" / f"{side}-{run}.json"
            found[side].append(ratios(trees[side], out, shlex.split(options.pytest)))
    return report(found["before"], found["after"])


def report(
    before: list[dict[str, tuple[float, int]]], after: list[dict[str, tuple[float, int]]]
) -> int:
    """Print slower, larger and missing providers; 1 if there are any."""
    names = list(before[0])
    lines = [f"{name}: no longer measured" for name in names if name not in after[0]]
    kept = [n for n in names if all(n in run for run in (*before, *after))]
    pairs = [([run[n][0] for run in before], [run[n][0] for run in after]) for n in kept]
    growths = [statistics.median(b) - statistics.median(a) for a, b in pairs]
    for name, (a, b), growth, flag in zip(kept, pairs, growths, slower(pairs), strict=True):
        if flag:
            old, new = (math.exp(statistics.median(runs)) for runs in (a, b))
            lines.append(
                f"{name}: {old:.3g} -> {new:.3g} of the reference's time ({math.exp(growth):.2f}×)"
            )
        old_bytes, new_bytes = before[0][name][1], after[0][name][1]
        if new_bytes > 1.02 * old_bytes + 65536:  # one small allocation more is not reported
            lines.append(f"{name}: peak {old_bytes / 2**20:.2f} -> {new_bytes / 2**20:.2f} MiB")
    if growths:
        typical = statistics.median(abs(growth) for growth in growths)
        print(f"{len(kept)} providers, median difference {100 * typical:.1f}%")
    print("\n".join(lines) or "nothing is slower beyond noise")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
