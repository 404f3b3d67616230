"""Flag what got worse between two result files: ``python -m fastkd.bench.compare A.json B.json``.

Only fastkd's own providers are judged; peers and torch.compile are other people's code. Times are
compared as ratios to the reference of the same round, so a slower machine does not count. What a
ratio is off by chance is seen between the passes of a run: `slower` says when it is more.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .harness import FORMAT, REFERENCE, ours

# A ratio has to grow by so much, and by so many standard errors; a run needs so many passes.
LEAST = math.log1p(0.10)
ERRORS = 4.0
FEWEST = 3
# Passes farther from their run's median than so many usual deviations are pulled in to there.
FAR = 3.0

Pair = tuple[Sequence[float], Sequence[float]]


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One sentence for every figure that got worse beyond the noise."""
    found, timed = [], []
    rows = {row["key"]: row for row in after["rows"]}
    for row in before["rows"]:
        if row["key"] not in rows:
            continue
        for name, old in row["providers"].items():
            own = ours(row["loss"], name)
            if "both" not in old or not (own or name == REFERENCE):
                continue
            where = f"{row['key']}, {name}"
            new = rows[row["key"]]["providers"].get(name, {"skipped": "not in the later file"})
            if "both" not in new:
                reason = new.get("refused") or new.get("skipped")
                found.append(f"{where}: no longer measured ({reason})")
            elif own:
                found += [f"{where}: {text}" for text in _resources(old, new)]
                if len(passes(old)) >= FEWEST and len(passes(new)) >= FEWEST:
                    timed.append((where, old, new))
    flags = slower([(passes(old), passes(new)) for _, old, new in timed])
    for (where, old, new), flag in zip(timed, flags, strict=True):
        if flag:
            a, b = old["ratio"]["median"], new["ratio"]["median"]
            found.append(f"{where}: {a:.3g} -> {b:.3g} of the reference's time ({b / a:.2f}×)")
    return found


def passes(result: dict[str, Any]) -> list[float]:
    """Logarithms of a provider's ratio to the reference, one for each pass."""
    return [math.log(ratio) for ratio in result.get("ratio", {}).get("passes", ())]


def _resources(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What a provider needs more of."""
    found = []
    # A single small allocation more is no news.
    if new.get("peak_bytes", 0) > 1.02 * old.get("peak_bytes", math.inf) + 65536:
        a, b = old["peak_bytes"] / 2**20, new["peak_bytes"] / 2**20
        found.append(f"peak memory {a:.2f} -> {b:.2f} MiB")
    if new.get("launches", 0) > old.get("launches", math.inf):
        found.append(f"launches {old['launches']} -> {new['launches']}")
    return found


def slower(pairs: Sequence[Pair]) -> list[bool]:
    """Which of the pairs (logarithms of passes before, after) grew beyond the noise.

    The mean has to grow by `LEAST` and by `ERRORS` standard errors. A handful of passes says
    little about its own scatter, so the variance is the mean of the pair's and of the median of
    all pairs. A single disturbed pass neither raises an alarm nor hides one: it is pulled in, and
    all passes, as they were measured, after must lie above all before, but for one on each side
    where there are five.
    `tests/bench/test_compare.py` simulates how often this is wrong.
    """
    if not pairs:
        return []
    limit = FAR * statistics.median(math.sqrt(_variance(pair)) for pair in pairs)
    near = [(_pulled_in(before, limit), _pulled_in(after, limit)) for before, after in pairs]
    own = [_variance(pair) for pair in near]
    usual = statistics.median(own)
    flags = []
    for (before, after), pulled_in, variance in zip(pairs, near, own, strict=True):
        growth = statistics.fmean(pulled_in[1]) - statistics.fmean(pulled_in[0])
        error = math.sqrt((variance + usual) / 2 * (1 / len(before) + 1 / len(after)))
        spare = 1 if min(len(before), len(after)) >= 5 else 0
        apart = sorted(after)[spare] > sorted(before)[-1 - spare]
        flags.append(apart and growth > max(LEAST, ERRORS * error))
    return flags


def _variance(pair: Pair) -> float:
    """Within the two runs, about their medians."""
    squares = [(x - statistics.median(run)) ** 2 for run in pair for x in run]
    return sum(squares) / (len(squares) - 2)


def _pulled_in(run: Sequence[float], limit: float) -> list[float]:
    """``run`` with nothing farther than ``limit`` from its median."""
    middle = statistics.median(run)
    return [min(max(x, middle - limit), middle + limit) for x in run]


def main(arguments: list[str] | None = None) -> int:
    """Print what got worse; the exit status is 1 if anything did, 2 if that can't be said."""
    parser = argparse.ArgumentParser(prog="python -m fastkd.bench.compare", description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    paths = (options.before, options.after)
    files = before, after = [json.loads(path.read_text()) for path in paths]
    for path, results in zip(paths, files, strict=True):
        if results.get("format") != FORMAT:
            print(f"{path} has format {results.get('format')}, not {FORMAT}: measure again")
            return 2
    if before["machine"] != after["machine"]:
        print(f"different machines: {before['machine']['name']}, {after['machine']['name']}")
    keys = [{row["key"] for row in results["rows"]} for results in files]
    for only, path in ((keys[0] - keys[1], paths[0]), (keys[1] - keys[0], paths[1])):
        if only:
            print(f"{len(only)} rows only in {path}")
    for path, results in zip(paths, files, strict=True):
        short = sum(
            0 < len(passes(result)) < FEWEST
            for row in results["rows"]
            for name, result in row["providers"].items()
            if ours(row["loss"], name)
        )
        if short:
            print(f"{path}: {short} times of fewer than {FEWEST} passes, not compared")
    found = compare(before, after)
    print("\n".join(found) or f"nothing got worse in {len(keys[0] & keys[1])} rows")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
